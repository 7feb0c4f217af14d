/* SPDX-License-Identifier: Apache-2.0 */
/* host_device.h: the inside of the host device, and what tests need of it.
 *
 * A queue stream is one thread and a ring of closures. Its operations are numbered 1, 2, 3, ... (tickets),
 * and one atomic counter says how many are done. An event is one atomic word: the stream and ticket of its
 * most recent record. So recording puts nothing on the ring, and completion costs nothing beyond the counter.
 * A new stream takes over a closed stream's place and continues its tickets, so such a word stays valid. */
#ifndef ZR_KERNELS_HOST_DEVICE_H
#define ZR_KERNELS_HOST_DEVICE_H

#include "kernels/device.h"
#include "kernels/thread.h"

#include <pthread.h>
#include <stdatomic.h>

enum {
    ZR_HOST_RING = 256,        /* operations that a stream holds besides those reserved */
    ZR_HOST_MAX_STREAMS = 1024 /* queue streams open at once on one device */
};

struct zr_host_options {
    /* For tests: called before each allocation, with the bytes wanted, by the thread that allocates. This
     * includes the allocation of the device, its streams and its events. true makes the allocation fail.
     * NULL: none fails. */
    bool (*refuse)(void *arg, int64_t bytes);
    void *refuse_arg;
    /* Time that a waiting thread spins before it sleeps, in ns. 0: by the number of cores. Negative: none. */
    int spin_ns;
};

/* zr_host_device_open with options, which may be NULL. Besides ZERO_ISA it reads two environment variables.
 * ZERO_POISON=1 fills memory of alloc with 0xFF bytes. ZERO_FAIL_ALLOC=k, for tests of programs, makes the
 * k-th allocation of this device fail. The device is the first. */
int zr_host_device_open_with(const struct zr_host_options *options, struct zr_device **out);

/* One closure on a ring. */
struct zr_host_op {
    _Alignas(16) unsigned char arg[ZR_CALL_BYTES];
    void (*fn)(void *arg);
    /* the operation may wait for somebody, for ever */
    bool waits;
};

/* A counter that only grows, and the threads that sleep until it reaches a value. */
struct zr_host_gate {
    _Atomic uint64_t value;
    /* lowest value that a sleeper waits for; UINT64_MAX: nobody sleeps */
    _Atomic uint64_t wake_at;
    /* taken only by sleepers and by the thread that wakes them */
    pthread_mutex_t lock;
    pthread_cond_t cond;
};

struct zr_host_device;

struct zr_stream {
    struct zr_host_device *dev;
    /* false: a caller stream, which uses only dev */
    bool is_queue;
    /* index in dev->streams */
    uint32_t index;
    /* operations put on the ring so far; the thread sleeps here */
    struct zr_host_gate put;
    /* operations finished so far; waiters sleep here */
    struct zr_host_gate done;
    _Atomic bool stop;
    /* The thread runs an operation that waits for nobody, or is about to read stop before one. */
    _Atomic bool works;
    struct zr_thread thread;
    struct zr_stream *next_free;
    /* (n_ring) operations, replaced only while nothing is on it */
    struct zr_host_op *ring;
    uint64_t n_ring;
};

/* record is (index + 1) << 48 | ticket of the most recent record. It is 0 if there was none or it completed
 * at once. With 10^6 tickets a second, 48 bits last for years. */
struct zr_event {
    struct zr_host_device *dev;
    _Atomic uint64_t record;
};

struct zr_host_device {
    struct zr_device base;
    const struct zr_host_kernels *kernels;
    struct zr_host_options options;
    bool poison;
    /* Time that a waiting thread spins before it sleeps, in ns. 0 if cores are few, because the thread that
     * it waits for needs this one. */
    int spin_ns;
    /* called by waiting threads, except those of streams; NULL: none */
    int (*ask)(void *arg);
    void *ask_arg;
    /* number of allocations until one fails; 0: none fails */
    _Atomic int64_t fail_in;
    /* protects the three fields below */
    pthread_mutex_t lock;
    /* closed streams, to be used again */
    struct zr_stream *free;
    uint32_t n_streams;
    /* each filled once, before any event can name it */
    struct zr_stream *streams[ZR_HOST_MAX_STREAMS];
};

/* Returns zeroed memory for the device's structures. It is counted and can fail like alloc's. */
void *zr_host_take(struct zr_host_device *dev, size_t bytes);
bool zr_host_refuses(struct zr_host_device *dev, int64_t bytes);

/* host_stream.c: streams and events. */
int zr_host_stream_open(struct zr_device *dev, enum zr_stream_kind kind, const char *name, void *native,
                        struct zr_stream **out);
void zr_host_stream_close(struct zr_stream *s);
void zr_host_stream_leave(struct zr_stream *s);
int zr_host_stream_reserve(struct zr_stream *s, int64_t n_ops);
bool zr_host_stream_has_room(struct zr_stream *s, int64_t n_ops);
int zr_host_stream_sync(struct zr_stream *s);
void zr_host_stream_free(struct zr_stream *s);
void zr_host_ask_while_waiting(struct zr_device *dev, int (*ask)(void *arg), void *arg);
int zr_host_event_open(struct zr_device *dev, struct zr_event **out);
void zr_host_event_close(struct zr_event *e);
int zr_host_event_record(struct zr_event *e, struct zr_stream *s);
int zr_host_stream_wait(struct zr_stream *s, struct zr_event *e);
int zr_host_event_sync(struct zr_event *e);
int zr_host_event_query(struct zr_event *e);

/* Runs fn on a copy of arg in stream order: at once on a caller stream, otherwise on the stream's thread. It
 * waits while the ring is full, and never fails. bytes is at most ZR_CALL_BYTES. */
void zr_host_put(struct zr_stream *s, void (*fn)(void *arg), const void *arg, size_t bytes);
/* Puts an operation that may wait for somebody. zr_host_stream_leave does not wait for its end. */
void zr_host_put_waiting(struct zr_stream *s, void (*fn)(void *arg), const void *arg, size_t bytes);

/* host_ops.c: the kernels and call as operations. */
int zr_host_call(struct zr_stream *s, void (*fn)(void *arg), const void *arg, size_t bytes);
int zr_host_zero(struct zr_stream *s, void *dst, int64_t bytes);
int zr_host_copy(struct zr_stream *s, void *dst, const void *src, int64_t bytes);
int zr_host_copy_rows(struct zr_stream *s, const struct zr_copy_rows *table, int n);
int zr_host_cast(struct zr_stream *s, void *dst, enum zero_dtype dt, const void *src, enum zero_dtype st,
                 int64_t n);
int zr_host_put_value(struct zr_stream *s, void *dst, const void *src, int64_t bytes);
int zr_host_stamp(struct zr_stream *s, int64_t *out_ns);
int zr_host_add(struct zr_stream *s, float *dst, const void *src, enum zero_dtype st, int64_t n);
int zr_host_sum_tree(struct zr_stream *s, float *dst, const void *const *src, int n_src, enum zero_dtype st,
                     int64_t n, bool accumulate);
int zr_host_sum_ranges(struct zr_stream *s, const struct zr_sum_range *table, int n_sums,
                       const void *const *src, int n_src, enum zero_dtype st);
int zr_host_maximum(struct zr_stream *s, void *dst, const void *const *src, int n_src, enum zero_dtype dtype,
                    int64_t n);
int zr_host_digest(struct zr_stream *s, uint64_t *sum, const void *at, int64_t bytes, uint64_t first);
int zr_host_agree_begin(struct zr_stream *s, const struct zr_agree_begin *b);
int zr_host_agree_end(struct zr_stream *s, const struct zr_agree_end *e);
int zr_host_sum_squares(struct zr_stream *s, struct zr_exact_sum *acc, const void *x, enum zero_dtype dtype,
                        int64_t n, const struct zr_largest *largest);
int zr_host_scale(struct zr_stream *s, float *x, int64_t n, const struct zr_step_scalars *scalars);
int zr_host_update(struct zr_stream *s, const struct zr_update *u);
int zr_host_update_spans(struct zr_stream *s, const struct zr_update *u, const struct zr_update_span *spans,
                         int n_spans);
int zr_host_add_rounded(struct zr_stream *s, uint16_t *dst, const float *src, int64_t n,
                        const struct zr_rounding *rounding);
int zr_host_encode(struct zr_stream *s, const struct zr_coded *to, const float *src, int64_t n);
int zr_host_decode(struct zr_stream *s, float *dst, const struct zr_coded *from, int64_t n);

#endif
