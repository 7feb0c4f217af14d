/* SPDX-License-Identifier: Apache-2.0 */
/* profiler.c: ranges for NVTX profilers. NVTX consists only of headers. Its first call looks for a tool;
 * without one, each call only tests a pointer. */
#include "kernels/profiler.h"

#ifdef ZR_HAVE_NVTX

#include <nvtx3/nvToolsExt.h>

#include <pthread.h>
#include <stdio.h>

/* A zr_profiler is an NVTX domain and nothing else. */
static nvtxDomainHandle_t domain_of(struct zr_profiler *p)
{
    return (nvtxDomainHandle_t)p;
}

struct name {
    char text[48];
    nvtxEventAttributes_t attributes;
};

static const nvtxEventAttributes_t *name_of(struct name *n, const char *what, int32_t unit)
{
    snprintf(n->text, sizeof n->text, unit < 0 ? "%s" : "%s %d", what, unit);
    n->attributes = (nvtxEventAttributes_t){.version = NVTX_VERSION,
                                            .size = NVTX_EVENT_ATTRIB_STRUCT_SIZE,
                                            .messageType = NVTX_MESSAGE_TYPE_ASCII,
                                            .message.ascii = n->text};
    return &n->attributes;
}

struct zr_profiler *zr_profiler_open(void)
{
    /* NVTX's first call replaces its table of functions, which other threads read without a lock. */
    static pthread_mutex_t first = PTHREAD_MUTEX_INITIALIZER;
    pthread_mutex_lock(&first);
    nvtxDomainHandle_t domain = nvtxDomainCreateA("libzero");
    pthread_mutex_unlock(&first);
    return (struct zr_profiler *)domain;
}

void zr_profiler_close(struct zr_profiler *p)
{
    if (p)
        nvtxDomainDestroy(domain_of(p));
}

void zr_profiler_push(struct zr_profiler *p, const char *what, int32_t unit)
{
    struct name n;
    nvtxDomainRangePushEx(domain_of(p), name_of(&n, what, unit));
}

void zr_profiler_pop(struct zr_profiler *p)
{
    nvtxDomainRangePop(domain_of(p));
}

uint64_t zr_profiler_begin(struct zr_profiler *p, const char *what, int32_t unit)
{
    struct name n;
    return nvtxDomainRangeStartEx(domain_of(p), name_of(&n, what, unit));
}

void zr_profiler_end(struct zr_profiler *p, uint64_t range)
{
    nvtxDomainRangeEnd(domain_of(p), range);
}

#else

#include <stddef.h>

struct zr_profiler *zr_profiler_open(void)
{
    return NULL;
}

void zr_profiler_close(struct zr_profiler *p)
{
    (void)p;
}

void zr_profiler_push(struct zr_profiler *p, const char *what, int32_t unit)
{
    (void)p, (void)what, (void)unit;
}

void zr_profiler_pop(struct zr_profiler *p)
{
    (void)p;
}

uint64_t zr_profiler_begin(struct zr_profiler *p, const char *what, int32_t unit)
{
    (void)p, (void)what, (void)unit;
    return 0;
}

void zr_profiler_end(struct zr_profiler *p, uint64_t range)
{
    (void)p, (void)range;
}

#endif
