/* SPDX-License-Identifier: Apache-2.0 */
/* stand_in_stream.c: streams as threads with in-order queues, events as positions in them, and host
 * functions. */
#include "test/stand_in/stand_in_inside.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static int64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* --- operations --- */

static struct si_op *hold(struct si_op *op)
{
    op->n_refs++;
    return op;
}

void si_let_go(struct si_op *op)
{
    if (!op || --op->n_refs)
        return;
    for (int i = 0; i < op->n_after; i++)
        si_let_go(op->after[i]);
    si_let_go(op->behind);
    free(op);
}

static bool is_blocking(const struct CUstream_st *s, int device)
{
    return s->alive && s->device == device && !(s->flags & cudaStreamNonBlocking) &&
           s != si.device[device].legacy;
}

/* Orders op after `after`, even if that is done already. */
static void add_after(struct si_op *op, struct si_op *after)
{
    if (after)
        op->after[op->n_after++] = hold(after);
}

struct si_op *si_put(struct CUstream_st *s, void (*fn)(void *arg), void *arg, void (*drop)(void *arg),
                     struct si_op *after)
{
    size_t n = 2;
    for (struct CUstream_st *t = si.streams; t; t = t->next)
        n++;
    struct si_op *op = calloc(1, sizeof *op + n * sizeof(struct si_op *));
    if (!op)
        return NULL;
    op->fn = fn, op->arg = arg, op->drop = drop;
    si_unlock();
    ORDER_BEFORE(op);
    si_lock();
    add_after(op, after);
    struct CUstream_st *legacy = si.device[s->device].legacy;
    if (s == legacy) {
        for (struct CUstream_st *t = si.streams; t && (size_t)op->n_after < n; t = t->next)
            if (is_blocking(t, s->device))
                add_after(op, t->last);
    } else if (legacy && !(s->flags & cudaStreamNonBlocking)) {
        add_after(op, legacy->last);
    }
    struct si_op **queue_end = &si.device[s->device].queue_end[s->queue];
    op->stream = s;
    if (*queue_end && !(*queue_end)->started && (*queue_end)->stream != s) {
        op->behind = hold(*queue_end);
        op->behind->is_awaited = true;
    }
    si_let_go(*queue_end);
    *queue_end = op;
    op->n_refs = 4; /* references of the hardware queue, the stream's queue, s->last and the caller */
    if (s->first)
        s->end->next = op;
    else
        s->first = op;
    s->end = op;
    si_let_go(s->last);
    s->last = op;
    pthread_cond_signal(&s->cond);
    return op;
}

static void wait_done(struct si_op *op)
{
    if (!op)
        return;
    hold(op);
    while (!op->done)
        si_wait(&si.moved);
    si_unlock();
    ORDER_AFTER(op);
    si_lock();
    si_let_go(op);
}

void si_wait_for(struct si_op *op)
{
    si.n_host_waits++;
    wait_done(op);
}

void si_wait_for_lost(int device)
{
    for (struct CUstream_st *s = si.streams; s; s = s->next)
        if (s->device == device) {
            while (s->running_short)
                si_wait(&si.moved);
            si_unlock();
            ORDER_AFTER(s);
            si_lock();
        }
}

void si_wait_for_device(int device)
{
    si.n_host_waits++;
    for (struct CUstream_st *s = si.streams; s; s = s->next)
        if (device < 0 || s->device == device)
            wait_done(s->last);
}

static void run(struct si_op *op, bool is_lost)
{
    ORDER_AFTER(op);
    for (int i = 0; i < op->n_after; i++)
        ORDER_AFTER(op->after[i]);
    if (!op->fn || is_lost)
        return;
    si_in_host_function = op->kind == SI_HOST_FUNCTION;
    op->fn(op->arg);
    si_in_host_function = false;
}

static void *stream_main(void *arg)
{
    struct CUstream_st *s = arg;
    si_on_stream = true;
    si_lock();
    for (;;) {
        while (!s->first && !s->ending)
            si_wait(&s->cond);
        struct si_op *op = s->first;
        if (!op)
            break;
        for (int i = 0; i < op->n_after; i++)
            while (!op->after[i]->done)
                si_wait(&si.moved);
        while (op->behind && !op->behind->started)
            si_wait(&si.moved);
        si_let_go(op->behind);
        op->behind = NULL;
        op->started = true;
        if (op->is_awaited)
            pthread_cond_broadcast(&si.moved);
        bool *host_function_runs = &si.device[s->device].host_function_runs;
        while (op->kind == SI_HOST_FUNCTION && *host_function_runs)
            si_wait(&si.moved);
        *host_function_runs |= op->kind == SI_HOST_FUNCTION;
        bool is_lost = si.device[s->device].lost != cudaSuccess;
        s->running_short = !is_lost && op->kind == SI_SHORT;
        si_unlock();
        run(op, is_lost);
        if (op->drop)
            op->drop(op->arg);
        ORDER_BEFORE(op);
        ORDER_BEFORE(s);
        si_lock();
        s->running_short = false;
        *host_function_runs &= op->kind != SI_HOST_FUNCTION;
        op->done = true;
        op->done_ns = now_ns();
        for (int i = 0; i < op->n_after; i++)
            si_let_go(op->after[i]);
        op->n_after = 0;
        s->first = op->next;
        si_let_go(op);
        pthread_cond_broadcast(&si.moved);
    }
    si_unlock();
    si_fibers_end();
    si_lock();
    si.n_threads--;
    pthread_cond_broadcast(&si.moved);
    si_unlock();
    return NULL;
}

/* Visits what must be done before op may start. */
static void walk(struct si_op *op, void (*visit)(void *context, void *arg), void *context);

static void walk_to(struct si_op *op, void (*visit)(void *context, void *arg), void *context)
{
    if (op->done || op->walk == si.n_walks)
        return;
    op->walk = si.n_walks;
    if (op->kind == SI_OTHER && op->fn)
        visit(context, op->arg);
    walk(op, visit, context);
}

static void walk(struct si_op *op, void (*visit)(void *context, void *arg), void *context)
{
    if (op->started)
        return;
    for (struct si_op *p = op->stream->first; p && p != op; p = p->next)
        walk_to(p, visit, context);
    for (int i = 0; i < op->n_after; i++)
        walk_to(op->after[i], visit, context);
    if (op->behind)
        walk(op->behind, visit, context);
}

void stand_in_before(const void *work, void (*visit)(void *context, void *arg), void *context)
{
    si_lock();
    si.n_walks++;
    for (struct CUstream_st *s = si.streams; s; s = s->next)
        for (struct si_op *op = s->first; op; op = op->next)
            if (op->arg == work && op->fn)
                walk(op, visit, context);
    si_unlock();
}

/* --- streams --- */

/* Returns the hardware queue of the device that the fewest streams have. */
static int free_queue(int device)
{
    int n[SI_MAX_QUEUES] = {0}, best = 0;
    for (const struct CUstream_st *s = si.streams; s; s = s->next)
        n[s->queue] += s->alive && s->device == device;
    for (int q = 1; q < si.n_queues; q++)
        if (n[q] < n[best])
            best = q;
    return best;
}

static struct CUstream_st *stream_new(int device, unsigned flags, int priority)
{
    struct CUstream_st *s = calloc(1, sizeof *s);
    pthread_attr_t attr;
    pthread_t thread;
    sigset_t all, old;
    if (!s)
        return NULL;
    s->queue = free_queue(device);
    s->device = device, s->flags = flags, s->priority = priority, s->alive = true;
    pthread_cond_init(&s->cond, NULL);
    pthread_attr_init(&attr);
    pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
    sigfillset(&all);
    sigdelset(&all, SIGSEGV); /* so that a handler hears of it */
    pthread_sigmask(SIG_SETMASK, &all, &old);
    int err = pthread_create(&thread, &attr, stream_main, s);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    pthread_attr_destroy(&attr);
    if (err) {
        pthread_cond_destroy(&s->cond);
        free(s);
        return NULL;
    }
    si.n_threads++;
    s->next = si.streams;
    si.streams = s;
    return s;
}

struct CUstream_st *si_stream(const char *call, cudaStream_t handle, cudaError_t *err)
{
    int device = si_device();
    *err = cudaSuccess;
    if (!handle || handle == cudaStreamLegacy) {
        struct CUstream_st **legacy = &si.device[device].legacy;
        if (!*legacy)
            *legacy = stream_new(device, cudaStreamDefault, 0);
        if (!*legacy)
            *err = cudaErrorMemoryAllocation;
        return *legacy;
    }
    for (struct CUstream_st *s = si.streams; s; s = s->next)
        if (s == handle && s->alive)
            return s;
    si_misuse_locked("%s: the stream is destroyed or never was", call);
    *err = cudaErrorInvalidResourceHandle;
    return NULL;
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *pStream, unsigned int flags, int priority)
{
    SI_BEGIN("cudaStreamCreateWithPriority");
    si_lock();
    *pStream = stream_new(si_device(), flags, priority);
    si_unlock();
    return stand_in_done(*pStream ? cudaSuccess : cudaErrorMemoryAllocation);
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *pStream, unsigned int flags)
{
    return cudaStreamCreateWithPriority(pStream, flags, 0);
}

cudaError_t cudaStreamCreate(cudaStream_t *pStream)
{
    return cudaStreamCreateWithPriority(pStream, cudaStreamDefault, 0);
}

static void stream_end(struct CUstream_st *s)
{
    s->alive = false;
    s->ending = true;
    pthread_cond_signal(&s->cond);
}

cudaError_t cudaStreamDestroy(cudaStream_t stream)
{
    cudaError_t err = cudaErrorInvalidResourceHandle;
    SI_BEGIN("cudaStreamDestroy");
    si_lock();
    struct CUstream_st *s = stream ? si_stream("cudaStreamDestroy", stream, &err) : NULL;
    if (s)
        stream_end(s);
    si_unlock();
    return stand_in_done(err);
}

static cudaError_t sync_stream(const char *call, cudaStream_t stream, bool wait)
{
    cudaError_t err;
    SI_BEGIN(call);
    si_lock();
    struct CUstream_st *s = si_stream(call, stream, &err);
    if (s && wait)
        si_wait_for(s->last);
    else if (s && s->last && !s->last->done)
        err = cudaErrorNotReady;
    if (s && si.device[s->device].lost)
        err = si.device[s->device].lost;
    si_unlock();
    return stand_in_done(err);
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream)
{
    return sync_stream("cudaStreamSynchronize", stream, true);
}

cudaError_t cudaStreamQuery(cudaStream_t stream)
{
    return sync_stream("cudaStreamQuery", stream, false);
}

cudaError_t cudaDeviceSynchronize(void)
{
    SI_BEGIN("cudaDeviceSynchronize");
    si_lock();
    si_wait_for_device(si_device());
    cudaError_t err = si.device[si_device()].lost;
    si_unlock();
    return stand_in_done(err);
}

/* Returns one of the three numbers that describe a stream. */
static cudaError_t ask_stream(const char *call, cudaStream_t stream, struct CUstream_st *out)
{
    cudaError_t err;
    SI_BEGIN(call);
    si_lock();
    struct CUstream_st *s = si_stream(call, stream, &err);
    if (s)
        *out = *s;
    si_unlock();
    return stand_in_done(err);
}

cudaError_t cudaStreamGetDevice(cudaStream_t hStream, int *device)
{
    struct CUstream_st s = {0};
    cudaError_t err = ask_stream("cudaStreamGetDevice", hStream, &s);
    if (!err)
        *device = s.device;
    return err;
}

cudaError_t cudaStreamGetFlags(cudaStream_t hStream, unsigned int *flags)
{
    struct CUstream_st s = {0};
    cudaError_t err = ask_stream("cudaStreamGetFlags", hStream, &s);
    if (!err)
        *flags = s.flags;
    return err;
}

cudaError_t cudaStreamGetPriority(cudaStream_t hStream, int *priority)
{
    struct CUstream_st s = {0};
    cudaError_t err = ask_stream("cudaStreamGetPriority", hStream, &s);
    if (!err)
        *priority = s.priority;
    return err;
}

/* --- work --- */

/* Returns the stream if this thread may put work on it. Call with the lock held. */
static struct CUstream_st *own_stream(const char *call, cudaStream_t stream, cudaError_t *err)
{
    struct CUstream_st *s = si_stream(call, stream, err);
    if (s && s->device != si_device()) {
        si_misuse_locked("%s: the stream is of device %d, the thread's device is %d", call, s->device,
                         si_device());
        *err = cudaErrorInvalidResourceHandle;
        return NULL;
    }
    *err = s ? si_refuse_captured(call, s) : *err;
    return *err ? NULL : s;
}

cudaError_t si_put_work(cudaStream_t stream, const char *what, void (*fn)(void *arg), void *arg,
                        void (*drop)(void *arg), enum si_kind kind)
{
    cudaError_t err;
    si_lock();
    struct CUstream_st *s = own_stream(what, stream, &err);
    struct si_op *op = s ? si_put(s, fn, arg, drop, NULL) : NULL;
    if (op) {
        op->kind = kind;
        si_let_go(op);
    } else if (!err) {
        err = cudaErrorMemoryAllocation;
    }
    si_unlock();
    if (err && drop)
        drop(arg);
    return err;
}

cudaError_t stand_in_put(cudaStream_t stream, const char *what, void (*fn)(void *arg), void *arg,
                         void (*drop)(void *arg))
{
    return si_put_work(stream, what, fn, arg, drop, SI_OTHER);
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t fn, void *userData)
{
    SI_BEGIN("cudaLaunchHostFunc");
    return stand_in_done(fn ? si_put_work(stream, "cudaLaunchHostFunc", fn, userData, NULL, SI_HOST_FUNCTION)
                            : cudaErrorInvalidValue);
}

/* --- events --- */

/* Returns NULL with a misuse if it is no event. Call with the lock held. */
static struct CUevent_st *event_of(const char *call, cudaEvent_t handle, cudaError_t *err)
{
    *err = cudaSuccess;
    for (struct CUevent_st *e = si.events; e; e = e->next)
        if (e == handle && e->alive)
            return e;
    si_misuse_locked("%s: the event is destroyed or never was", call);
    *err = cudaErrorInvalidResourceHandle;
    return NULL;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned int flags)
{
    SI_BEGIN("cudaEventCreateWithFlags");
    struct CUevent_st *e = calloc(1, sizeof *e);
    *event = e;
    if (!e)
        return stand_in_done(cudaErrorMemoryAllocation);
    si_lock();
    e->device = si_device(), e->flags = flags, e->alive = true;
    e->next = si.events;
    si.events = e;
    si_unlock();
    return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t *event)
{
    return cudaEventCreateWithFlags(event, cudaEventDefault);
}

cudaError_t cudaEventDestroy(cudaEvent_t event)
{
    cudaError_t err;
    SI_BEGIN("cudaEventDestroy");
    si_lock();
    struct CUevent_st *e = event_of("cudaEventDestroy", event, &err);
    if (e) {
        si_let_go(e->record);
        e->record = NULL;
        e->alive = false;
    }
    si_unlock();
    return stand_in_done(err);
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream)
{
    cudaError_t err;
    SI_BEGIN("cudaEventRecord");
    si_lock();
    struct CUevent_st *e = event_of("cudaEventRecord", event, &err);
    struct CUstream_st *s = e ? si_stream("cudaEventRecord", stream, &err) : NULL;
    if (s && s->device != e->device) {
        err = cudaErrorInvalidResourceHandle; /* no misuse: a way to find a stream's device */
    } else if (s && !(err = si_refuse_captured("cudaEventRecord", s))) {
        struct si_op *op = si_put(s, NULL, NULL, NULL, NULL);
        if (op) {
            si_let_go(e->record);
            e->record = op;
        } else {
            err = cudaErrorMemoryAllocation;
        }
    }
    si_unlock();
    return stand_in_done(err);
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int flags)
{
    cudaError_t err;
    (void)flags;
    SI_BEGIN("cudaStreamWaitEvent");
    si_lock();
    struct CUevent_st *e = event_of("cudaStreamWaitEvent", event, &err);
    struct CUstream_st *s = e ? si_stream("cudaStreamWaitEvent", stream, &err) : NULL;
    if (s && (err = si_refuse_captured("cudaStreamWaitEvent", s)))
        s = NULL;
    if (s && e->record) {
        struct si_op *op = si_put(s, NULL, NULL, NULL, e->record);
        if (!op)
            err = cudaErrorMemoryAllocation;
        si_let_go(op);
    } else if (s && si.forbid_unrecorded) {
        si_misuse_locked("cudaStreamWaitEvent: the event was never recorded");
    }
    si_unlock();
    return stand_in_done(err);
}

/* Queries the event, or waits for it. Keeps no error for cudaGetLastError. */
static cudaError_t sync_event(const char *call, cudaEvent_t event, bool wait)
{
    cudaError_t err = stand_in_begin(call);
    if (err)
        return err;
    si_lock();
    struct CUevent_st *e = event_of(call, event, &err);
    struct si_op *record = e && e->record ? hold(e->record) : NULL;
    if (e && wait)
        si_wait_for(record);
    else if (record && !record->done)
        err = cudaErrorNotReady;
    if (e && si.device[e->device].lost)
        err = si.device[e->device].lost;
    si_unlock();
    if (!err && record)
        ORDER_AFTER(record);
    si_lock();
    si_let_go(record);
    si_unlock();
    return err;
}

cudaError_t cudaEventQuery(cudaEvent_t event)
{
    return stand_in_done(sync_event("cudaEventQuery", event, false));
}

cudaError_t cudaEventSynchronize(cudaEvent_t event)
{
    return stand_in_done(sync_event("cudaEventSynchronize", event, true));
}

/* The driver's function, which does not change the runtime's last error. */
static cudaError_t driver_event_query(cudaEvent_t event)
{
    return sync_event("cuEventQuery", event, false);
}

cudaError_t cudaGetDriverEntryPointByVersion(const char *symbol, void **funcPtr, unsigned int cudaVersion,
                                             unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *driverStatus)
{
    SI_BEGIN("cudaGetDriverEntryPointByVersion");
    bool has = strcmp(symbol, "cuEventQuery") == 0;
    (void)cudaVersion, (void)flags;
    *funcPtr = has ? (void *)driver_event_query : NULL;
    *driverStatus = has ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return cudaSuccess;
}

cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t start, cudaEvent_t end)
{
    cudaError_t err;
    SI_BEGIN("cudaEventElapsedTime");
    si_lock();
    struct CUevent_st *a = event_of("cudaEventElapsedTime", start, &err);
    struct CUevent_st *b = a ? event_of("cudaEventElapsedTime", end, &err) : NULL;
    if (b && (((a->flags | b->flags) & cudaEventDisableTiming) || !a->record || !b->record))
        err = cudaErrorInvalidResourceHandle;
    else if (b && (!a->record->done || !b->record->done))
        err = cudaErrorNotReady;
    else if (b)
        *ms = (float)((double)(b->record->done_ns - a->record->done_ns) * 1e-6);
    si_unlock();
    return stand_in_done(err);
}

void si_streams_end(void)
{
    for (struct CUstream_st *s = si.streams; s; s = s->next)
        if (s->alive) {
            if (s != si.device[s->device].legacy && !si.device[s->device].lost)
                si_misuse_locked("a stream of device %d was never destroyed", s->device);
            stream_end(s);
        }
    while (si.n_threads)
        si_wait(&si.moved);
    while (si.streams) {
        struct CUstream_st *s = si.streams;
        si.streams = s->next;
        si_let_go(s->last);
        pthread_cond_destroy(&s->cond);
        free(s);
    }
    for (int i = 0; i < STAND_IN_MAX_DEVICES; i++) {
        si.device[i].legacy = NULL;
        for (int q = 0; q < SI_MAX_QUEUES; q++) {
            si_let_go(si.device[i].queue_end[q]);
            si.device[i].queue_end[q] = NULL;
        }
    }
    while (si.events) {
        struct CUevent_st *e = si.events;
        si.events = e->next;
        if (e->alive && !si.device[e->device].lost)
            si_misuse_locked("an event of device %d was never destroyed", e->device);
        si_let_go(e->record);
        free(e);
    }
}
