/* SPDX-License-Identifier: Apache-2.0 */
/* stand_in_memory.c: device memory, page-locked memory, copies and fills.
 *
 * New memory is filled with 0xFF. With AddressSanitizer blocks come from malloc, so it watches their ends.
 * Addresses have the alignment that CUDA promises, and no better. A copy from or to memory that is not
 * page-locked makes the host wait, which is the most that CUDA may do. */
#include "test/stand_in/stand_in_inside.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(at, bytes)   ((void)(at))
#define ASAN_UNPOISON_MEMORY_REGION(at, bytes) ((void)(at))
#endif

enum { ALIGN = 256, FREED_MAX_BYTES = 64 << 20, FREED_MAX = 256 };

struct block {
    struct stand_in_range range;
    int64_t charged; /* bytes taken from the device */
    void *base;
    size_t base_bytes;
    struct block *next;
};

static struct block *blocks;
/* Freed blocks, newest first. They are not reused, so that a late access is noticed; the oldest are
 * released. */
static struct block *freed;

static bool within(const struct stand_in_range *r, const void *p)
{
    return (const char *)p >= r->at && (const char *)p < r->at + r->bytes;
}

static struct block *find(const void *p)
{
    for (struct block *b = blocks; b; b = b->next)
        if (within(&b->range, p))
            return b;
    return NULL;
}

bool si_is_in_block(const void *p)
{
    bool is = false;
    si_lock();
    for (struct block *b = blocks; b && !is; b = b->next)
        is = within(&b->range, p) || (const char *)p == b->range.at + b->range.bytes;
    si_unlock();
    return is;
}

bool si_find_any(const void *p, struct stand_in_range *out)
{
    struct block *b = find(p);
    for (struct block *f = freed; f && !b; f = f->next)
        b = within(&f->range, p) ? f : NULL;
    if (b)
        *out = b->range;
    return b != NULL;
}

bool stand_in_find(const void *p, struct stand_in_range *out)
{
    si_lock();
    struct block *b = find(p);
    if (b)
        *out = b->range;
    si_unlock();
    return b != NULL;
}

/* --- allocation --- */

/* CUDA maps memory in pieces of 2 MiB, and small allocations share a piece. */
static int64_t charge(size_t bytes, const char *kind)
{
    const size_t piece = 2 << 20;
    bool alone = bytes >= piece / 2 || strcmp(kind, "ncclMemAlloc") == 0;
    return (int64_t)(alone ? (bytes + piece - 1) / piece * piece : bytes);
}

void stand_in_use(int device, int64_t bytes)
{
    si_lock();
    si.device[device].used_bytes += bytes;
    si_unlock();
}

static void free_block(struct block *b)
{
    if (b->range.type == cudaMemoryTypeDevice)
        si_closed_release(b->base, b->base_bytes);
    else
        free(b->base);
    free(b);
}

static cudaError_t take(void **out, size_t bytes, size_t align, enum cudaMemoryType type, const char *kind)
{
    struct block *b = calloc(1, sizeof *b);
    struct si_device *dev = &si.device[si_device()];
    *out = NULL;
    if (!b)
        return cudaErrorMemoryAllocation;
    si_lock();
    bool fits =
        type != cudaMemoryTypeDevice || (bytes <= (size_t)si.machine.device_bytes &&
                                         dev->used_bytes + charge(bytes, kind) <= si.machine.device_bytes);
    b->base_bytes = bytes + 2 * align;
    if (fits && bytes < (size_t)1 << 46)
        b->base =
            type == cudaMemoryTypeDevice ? si_closed_take(si_device(), b->base_bytes) : malloc(b->base_bytes);
    if (!b->base) {
        si_unlock();
        free(b);
        return cudaErrorMemoryAllocation;
    }
    /* An odd multiple of align. */
    uintptr_t at = ((uintptr_t)b->base + align - 1) / align * align;
    if (at / align % 2 == 0)
        at += align;
    b->range = (struct stand_in_range){(char *)at, bytes, si_device(), type, kind};
    b->charged = charge(bytes, kind);
    b->next = blocks;
    blocks = b;
    if (type == cudaMemoryTypeDevice)
        dev->used_bytes += b->charged;
    si_unlock();
    memset(stand_in_reach((void *)at), 0xff, bytes);
    *out = (void *)at;
    return cudaSuccess;
}

/* Releases all freed blocks but the newest few, which hold at most most_bytes. Call with the lock held. */
static void forget_freed(size_t most_bytes)
{
    size_t bytes = 0;
    int n = 0;
    struct block **at = &freed;
    while (*at && bytes + (*at)->range.bytes <= most_bytes && n++ < FREED_MAX) {
        bytes += (*at)->range.bytes;
        at = &(*at)->next;
    }
    struct block *b = *at;
    *at = NULL;
    while (b) {
        struct block *next = b->next;
        ASAN_UNPOISON_MEMORY_REGION(b->range.at, b->range.bytes);
        free_block(b);
        b = next;
    }
}

static cudaError_t give_back(const char *call, void *p, enum cudaMemoryType type)
{
    si_lock();
    struct block **at = &blocks;
    while (*at && (*at)->range.at != (char *)p)
        at = &(*at)->next;
    struct block *b = *at;
    if (!b || b->range.type != type) {
        si_misuse_locked("%s: not the start of live memory of its kind", call);
        si_unlock();
        return cudaErrorInvalidValue;
    }
    si_wait_for_device(b->range.device); /* may release the lock, and others may then change the list */
    for (at = &blocks; *at != b; at = &(*at)->next)
        ;
    *at = b->next;
    if (type == cudaMemoryTypeDevice)
        si.device[b->range.device].used_bytes -= b->charged;
    memset(stand_in_reach(b->range.at), 0xff, b->range.bytes);
    ASAN_POISON_MEMORY_REGION(b->range.at, b->range.bytes);
    b->next = freed;
    freed = b;
    forget_freed(FREED_MAX_BYTES);
    si_unlock();
    return cudaSuccess;
}

cudaError_t stand_in_alloc(void **out, size_t bytes, size_t align, const char *kind)
{
    return take(out, bytes, align, cudaMemoryTypeDevice, kind);
}

cudaError_t cudaMalloc(void **devPtr, size_t size)
{
    *devPtr = NULL;
    SI_BEGIN("cudaMalloc");
    return stand_in_done(size ? take(devPtr, size, ALIGN, cudaMemoryTypeDevice, "cudaMalloc") : cudaSuccess);
}

cudaError_t cudaFree(void *devPtr)
{
    SI_BEGIN("cudaFree");
    return stand_in_done(devPtr ? give_back("cudaFree", devPtr, cudaMemoryTypeDevice) : cudaSuccess);
}

cudaError_t cudaHostAlloc(void **pHost, size_t size, unsigned int flags)
{
    (void)flags;
    *pHost = NULL;
    SI_BEGIN("cudaHostAlloc");
    return stand_in_done(size ? take(pHost, size, 4096, cudaMemoryTypeHost, "cudaHostAlloc")
                              : cudaErrorInvalidValue);
}

cudaError_t cudaMallocHost(void **ptr, size_t size)
{
    return cudaHostAlloc(ptr, size, cudaHostAllocDefault);
}

cudaError_t cudaFreeHost(void *ptr)
{
    SI_BEGIN("cudaFreeHost");
    return stand_in_done(ptr ? give_back("cudaFreeHost", ptr, cudaMemoryTypeHost) : cudaSuccess);
}

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total)
{
    SI_BEGIN("cudaMemGetInfo");
    si_lock();
    *total = (size_t)si.machine.device_bytes;
    *free_bytes = *total - (size_t)si.device[si_device()].used_bytes;
    si_unlock();
    return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *ptr)
{
    struct stand_in_range r;
    SI_BEGIN("cudaPointerGetAttributes");
    memset(attributes, 0, sizeof *attributes);
    attributes->type = cudaMemoryTypeUnregistered;
    attributes->device = -2; /* the real one's answer for unknown memory */
    attributes->hostPointer = (void *)ptr;
    if (stand_in_find(ptr, &r)) {
        attributes->type = r.type;
        attributes->device = r.device;
        attributes->devicePointer = (void *)ptr;
        attributes->hostPointer = r.type == cudaMemoryTypeHost ? (void *)ptr : NULL;
    }
    return cudaSuccess;
}

/* --- copies and fills --- */

/* Finds what [p, p + bytes) is and sets *type. Returns false with a misuse if it leaves its allocation or
 * was freed. Call with the lock held. */
static bool classify(const char *call, const void *p, size_t bytes, enum cudaMemoryType *type)
{
    struct block *b = find(p);
    *type = b ? b->range.type : cudaMemoryTypeUnregistered;
    if (b && (const char *)p + bytes > b->range.at + b->range.bytes) {
        si_misuse_locked("%s: %zu bytes at %zu of an allocation of %zu (%s)", call, bytes,
                         (size_t)((const char *)p - b->range.at), b->range.bytes, b->range.kind);
        return false;
    }
    for (struct block *f = b ? NULL : freed; f; f = f->next)
        if (within(&f->range, p)) {
            si_misuse_locked("%s: %zu bytes in freed memory (%s)", call, bytes, f->range.kind);
            return false;
        }
    return true;
}

bool stand_in_check_device_range(const char *what, const void *p, size_t bytes, int device)
{
    enum cudaMemoryType type;
    si_lock();
    struct block *b = find(p);
    bool good = classify(what, p, bytes, &type);
    if (good && (!b || type != cudaMemoryTypeDevice || b->range.device != device)) {
        si_misuse_locked("%s: not memory of device %d", what, device);
        good = false;
    }
    si_unlock();
    return good;
}

struct move {
    void *dst;
    const void *src; /* NULL: fill with value */
    size_t bytes;
    int value;
};

static void run_move(void *arg)
{
    const struct move *m = arg;
    if (m->src)
        memmove(stand_in_reach(m->dst), stand_in_reach(m->src), m->bytes);
    else
        memset(stand_in_reach(m->dst), m->value, m->bytes);
}

static cudaError_t put_move(const char *call, struct move m, enum cudaMemcpyKind kind, cudaStream_t stream,
                            bool wait)
{
    enum cudaMemoryType dst, src = cudaMemoryTypeDevice;
    SI_BEGIN(call);
    if ((unsigned)kind > cudaMemcpyDefault)
        return stand_in_done(cudaErrorInvalidMemcpyDirection);
    if (m.bytes == 0)
        return cudaSuccess;
    si_lock();
    bool good = classify(call, m.dst, m.bytes, &dst) && (!m.src || classify(call, m.src, m.bytes, &src));
    if (good && !m.src && dst == cudaMemoryTypeUnregistered) {
        si_misuse_locked("%s: not device memory", call);
        good = false;
    }
    bool to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice,
         from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
    if (good && m.src && kind != cudaMemcpyDefault &&
        (to_device != (dst == cudaMemoryTypeDevice) || from_device != (src == cudaMemoryTypeDevice))) {
        si_misuse_locked("%s: the kind is not what the pointers are", call);
        good = false;
    }
    si_unlock();
    struct move *held = good ? malloc(sizeof *held) : NULL;
    if (!held)
        return stand_in_done(good ? cudaErrorMemoryAllocation : cudaErrorInvalidValue);
    *held = m;
    cudaError_t err = si_put_work(stream, call, run_move, held, free, SI_SHORT);
    if (!err && (wait || dst == cudaMemoryTypeUnregistered || src == cudaMemoryTypeUnregistered)) {
        si_lock();
        struct CUstream_st *s = si_stream(call, stream, &err);
        if (s)
            si_wait_for(s->last);
        err = si.device[si_device()].lost;
        si_unlock();
    }
    return stand_in_done(err);
}

cudaError_t cudaMemcpyAsync(void *dst, const void *src, size_t count, enum cudaMemcpyKind kind,
                            cudaStream_t stream)
{
    struct move m = {.dst = dst, .src = src, .bytes = count};
    return put_move("cudaMemcpyAsync", m, kind, stream, false);
}

cudaError_t cudaMemcpy(void *dst, const void *src, size_t count, enum cudaMemcpyKind kind)
{
    struct move m = {.dst = dst, .src = src, .bytes = count};
    return put_move("cudaMemcpy", m, kind, NULL, true);
}

cudaError_t cudaMemsetAsync(void *devPtr, int value, size_t count, cudaStream_t stream)
{
    struct move m = {.dst = devPtr, .value = value, .bytes = count};
    return put_move("cudaMemsetAsync", m, cudaMemcpyDefault, stream, false);
}

cudaError_t cudaMemset(void *devPtr, int value, size_t count)
{
    struct move m = {.dst = devPtr, .value = value, .bytes = count};
    return put_move("cudaMemset", m, cudaMemcpyDefault, NULL, true);
}

void si_memory_end(void)
{
    forget_freed(0);
    while (blocks) {
        struct block *b = blocks;
        blocks = b->next;
        if (!si.device[b->range.device].lost)
            si_misuse_locked("%zu bytes of device %d (%s) were never freed", b->range.bytes, b->range.device,
                             b->range.kind);
        if (b->range.type == cudaMemoryTypeDevice)
            si.device[b->range.device].used_bytes -= b->charged;
        free_block(b);
    }
    for (int i = 0; i < STAND_IN_MAX_DEVICES; i++)
        si.device[i].used_bytes = 0; /* left behind by a call */
}
