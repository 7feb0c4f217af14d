/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_stream.c: streams, events and host functions of the CUDA device. */
#include "kernels/alloc.h"
#include "kernels/cuda/cuda_device.h"
#include "kernels/op_check.h"

#include <stdlib.h>
#include <string.h>

/* --- streams --- */

static int stream_native(struct zr_cuda_device *dev, enum zr_stream_kind kind, void *native,
                         struct zr_stream *s)
{
    int owner = dev->ordinal;
    s->native = native;
    if (kind == ZR_STREAM_QUEUE) {
        s->owned = true;
        return ZR_CUDA(dev, "cudaStreamCreateWithPriority",
                       cudaStreamCreateWithPriority(&s->native, cudaStreamNonBlocking, dev->priority));
    }
    /* The NULL stream belongs to the current device. */
    ZR_TRY(native ? ZR_CUDA(dev, "cudaStreamGetDevice", cudaStreamGetDevice(native, &owner)) : 0);
    if (owner != dev->ordinal)
        return zr_fail(ZERO_ERR_ARG, "stream open: the stream is of GPU %d, the device is GPU %d", owner,
                       dev->ordinal);
    return 0;
}

int zr_cuda_stream_open(struct zr_device *base, enum zr_stream_kind kind, const char *name, void *native,
                        struct zr_stream **out)
{
    struct zr_cuda_device *dev = (struct zr_cuda_device *)base;
    (void)name;
    *out = NULL;
    if (kind != ZR_STREAM_QUEUE && kind != ZR_STREAM_CALLER)
        return zr_fail(ZERO_ERR_ARG, "stream open: kind is %d, must be queue (%d) or caller (%d)", (int)kind,
                       (int)ZR_STREAM_QUEUE, (int)ZR_STREAM_CALLER);
    if (kind == ZR_STREAM_QUEUE && native)
        return zr_fail(ZERO_ERR_ARG, "stream open: a queue is the library's own stream, native must be NULL");
    struct zr_stream *s;
    ZR_TRY(ZR_ZALLOC(s, 1, "a stream"));
    s->dev = dev;
    int err = stream_native(dev, kind, native, s);
    if (err) {
        free(s);
        return err;
    }
    pthread_mutex_init(&s->lock, NULL);
    *out = s;
    return 0;
}

int zr_cuda_stream_sync(struct zr_stream *s)
{
    return ZR_CUDA_OUTSIDE(s->dev, "cudaStreamSynchronize", cudaStreamSynchronize(s->native));
}

void zr_cuda_stream_close(struct zr_stream *s)
{
    if (!s)
        return;
    /* Both may fail if the GPU is lost. Then no host function runs any more, either. */
    zr_cuda_stream_sync(s);
    if (s->owned)
        ZR_CUDA(s->dev, "cudaStreamDestroy", cudaStreamDestroy(s->native));
    while (s->all) {
        struct zr_cuda_closure *c = s->all;
        s->all = c->next;
        free(c);
    }
    pthread_mutex_destroy(&s->lock);
    free(s);
}

void *zr_cuda_stream_native(struct zr_stream *s)
{
    return s->native;
}

/* --- events --- */

int zr_cuda_event_open(struct zr_device *base, struct zr_event **out)
{
    struct zr_cuda_device *dev = (struct zr_cuda_device *)base;
    struct zr_event *e;
    *out = NULL;
    ZR_TRY(ZR_ZALLOC(e, 1, "an event"));
    e->dev = dev;
    int err = ZR_CUDA(dev, "cudaEventCreateWithFlags",
                      cudaEventCreateWithFlags(&e->native, cudaEventDisableTiming));
    if (err) {
        free(e);
        return err;
    }
    *out = e;
    return 0;
}

void zr_cuda_event_close(struct zr_event *e)
{
    if (!e)
        return;
    ZR_CUDA(e->dev, "cudaEventDestroy", cudaEventDestroy(e->native));
    free(e);
}

int zr_cuda_event_record(struct zr_event *e, struct zr_stream *s)
{
    return ZR_CUDA(e->dev, "cudaEventRecord", cudaEventRecord(e->native, s->native));
}

int zr_cuda_stream_wait(struct zr_stream *s, struct zr_event *e)
{
    return ZR_CUDA(s->dev, "cudaStreamWaitEvent", cudaStreamWaitEvent(s->native, e->native, 0));
}

int zr_cuda_event_sync(struct zr_event *e)
{
    return ZR_CUDA_OUTSIDE(e->dev, "cudaEventSynchronize", cudaEventSynchronize(e->native));
}

/* A query by the runtime that finds the event not ready is an error to it, which replaces an error that the
 * program has not fetched yet (cudaGetLastError). While there is one, the driver is asked, which keeps no
 * errors. */
int zr_cuda_event_query(struct zr_event *e)
{
    bool late = false;
    cudaError_t earlier = cudaPeekAtLastError();
    bool keep = earlier != cudaSuccess && earlier != cudaErrorNotReady;
    ZR_TRY(ZR_CUDA_OUTSIDE(e->dev, keep ? "cuEventQuery" : "cudaEventQuery", ({
                               cudaError_t got = keep ? e->dev->query(e->native) : cudaEventQuery(e->native);
                               late = got == cudaErrorNotReady;
                               if (late && !keep)
                                   cudaGetLastError();
                               late ? cudaSuccess : got;
                           })));
    return !late;
}

/* --- host functions --- */

static void closure_put(struct zr_cuda_closure *c)
{
    struct zr_stream *s = c->stream;
    pthread_mutex_lock(&s->lock);
    c->next_free = s->free;
    s->free = c;
    pthread_mutex_unlock(&s->lock);
}

static void run_closure(void *arg)
{
    struct zr_cuda_closure *c = arg;
    c->fn(c->arg);
    closure_put(c);
}

/* Returns a free closure, or a new one, or NULL without memory. */
static struct zr_cuda_closure *closure_get(struct zr_stream *s)
{
    pthread_mutex_lock(&s->lock);
    struct zr_cuda_closure *c = s->free;
    if (c) {
        s->free = c->next_free;
    } else {
        c = calloc(1, sizeof *c);
        if (c) {
            c->stream = s;
            c->next = s->all;
            s->all = c;
        }
    }
    pthread_mutex_unlock(&s->lock);
    return c;
}

int zr_cuda_stream_call(struct zr_stream *s, void (*fn)(void *arg), const void *arg, size_t bytes)
{
    ZR_TRY(zr_check_call(bytes));
    struct zr_cuda_closure *c = closure_get(s);
    if (!c)
        return zr_fail(ZERO_ERR_NOMEM, "call: no memory for %zu bytes", sizeof *c);
    c->fn = fn;
    if (bytes)
        memcpy(c->arg, arg, bytes);
    int err = ZR_CUDA(s->dev, "cudaLaunchHostFunc", cudaLaunchHostFunc(s->native, run_closure, c));
    if (err)
        closure_put(c);
    return err;
}
