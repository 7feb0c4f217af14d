/* SPDX-License-Identifier: Apache-2.0 */
/* device.h: what one device can do: memory, streams, events, and the kernels of a sharded optimizer.
 *
 * A device is a vtable. The engine above talks only to this header and is the same on every device. Work is
 * put on streams; a stream runs its work in order; an event orders two streams. Nothing here waits for the
 * device except the calls whose name ends in _sync (and stream_wait on a caller stream, see below).
 *
 * Events follow CUDA's rule: event_record() marks the work put on the stream so far; stream_wait() makes
 * later work of a stream wait for the most recent record made at the time of the call; waiting on an event
 * never recorded is a no-op.
 *
 * Thread-safety: a device and its events may be used from any thread; one stream is fed by one thread at a
 * time. Calls return 0 or a negative zr_err with a message (error.h). */
#ifndef ZR_KERNELS_DEVICE_H
#define ZR_KERNELS_DEVICE_H

#include "kernels/dtype.h"
#include "kernels/error.h"
#include "kernels/log.h"
#include "kernels/optimizers.h"

#include <stdbool.h>
#include <stdint.h>

/* Written on the device by the step, read by the update kernels there: no host wait in between. */
struct zr_step_scalars {
    /* multiplies every gradient element: user's scale, mean over ranks, clip factor */
    float grad_scale;
    /* non-zero: leave everything untouched (a gradient is not finite) */
    uint32_t skip;
};

/* One contiguous range of n elements of one tensor for an element-wise optimizer of optimizers.h, in fp32.
 * Each gradient is multiplied by scalars->grad_scale first; a kind's own file says what happens then. */
struct zr_update {
    enum zr_optimizer kind;
    enum zr_dtype param_dtype;
    /* decay: of the weights, 0 for a tensor without. c1, c2: bias corrections, 1 where the kind has none */
    float lr, beta1, beta2, eps, decay, c1, c2;
    /* 1-based number of the step */
    int64_t t;
    /* elements */
    int64_t n;
    /* (n) fp32 weights, read and written */
    float *master;
    /* (n) param_dtype, written with the rounded weight; NULL or == master: none */
    void *param;
    /* (n) fp32, already reduced, not yet scaled */
    const float *grad;
    /* (n) each, zr_optimizer_states(kind, beta1) of them; NULL: a kind with momentum alone, without it */
    float *state[ZR_OPTIMIZER_STATES];
    /* device memory */
    const struct zr_step_scalars *scalars;
};

/* Elements of an update with numbers of their own, which stand for the update's: n from element first on. */
struct zr_update_span {
    int64_t first, n;
    float lr, decay;
};
#define ZR_MAX_SPANS 64 /* of an update */

/* An exact sum of doubles: order does not matter, so ranks, shards and streams may add in any order and get
 * the same bits (a long accumulator after Kulisch; see exact_sum.h). Plain data, may be copied and merged by
 * bytes. */
#define ZR_EXACT_LIMBS 70
struct zr_exact_sum {
    /* value = sum of limb[i] * 2^(32*i - 1088) */
    int64_t limb[ZR_EXACT_LIMBS];
    /* additions since the last carry propagation */
    uint32_t n_added;
    /* 1: a NaN or infinity was added */
    uint32_t nonfinite;
};

#define ZR_NORM_BLOCK 32 /* elements whose squares sum_squares adds up together */

/* Where sum_squares records the largest block that it has seen, so that a step that is skipped can name the
 * tensor. Blocks below `from` are not recorded. */
struct zr_largest {
    /* device memory: the greatest zr_largest_of() so far; 0: none */
    uint64_t *word;
    /* position of x[0], 0 to 2^37 - 1; positions follow x */
    int64_t at;
    /* sum of squares of a block */
    double from;
};

/* The host's kernels, one table per instruction set; all give the same bits. Synchronous, on the calling
 * thread, any alignment down to the element's own. */
enum zr_isa { ZR_ISA_PORTABLE, ZR_ISA_AVX2, ZR_ISA_AVX512, ZR_ISA_COUNT };

#define ZR_MAX_SOURCES 64 /* of sum_tree */

/* Copies of at least this many bytes may go past the caches. */
enum { ZR_COPY_STREAM_BYTES = 4 << 20 };

struct zr_host_kernels {
    const char *name;
    void (*zero)(void *dst, int64_t bytes);
    /* may use non-temporal stores from ZR_COPY_STREAM_BYTES on */
    void (*copy)(void *dst, const void *src, int64_t bytes);
    /* dst[i] = src[i] in dst_dtype. To BF16: round to nearest even; a NaN keeps its sign and upper payload
     * and becomes quiet. To F32: the same bits, shifted. dst may be src (in place) when the destination's
     * elements are not larger than the source's. F32 and BF16. */
    void (*cast)(void *dst, enum zr_dtype dst_dtype, const void *src, enum zr_dtype src_dtype, int64_t n);
    /* dst[i] (+)= tree(src[0][i], ..., src[n_src-1][i]) in fp32; the tree over [lo, lo+n) splits at the
     * largest power of two below n: sum(lo, h) + sum(lo+h, n-h). accumulate: dst[i] = dst[i] + tree. n_src
     * in 1..ZR_MAX_SOURCES, F32 and BF16; dst may be one of the F32 sources. */
    void (*sum_tree)(float *dst, const void *const *src, int n_src, enum zr_dtype src_dtype, int64_t n,
                     bool accumulate);
    /* dst[i] = dst[i] + src[i] */
    void (*add)(float *dst, const float *src, int64_t n);
    /* Adds to acc, for each block of 32 elements (the last one padded with zeros), the block's sum of squares
     * in double: a[j] = x[j]^2 + x[j+8]^2 + x[j+16]^2 + x[j+24]^2 for j in 0..7, in that order, then
     * ((a0+a4)+(a2+a6)) + ((a1+a5)+(a3+a7)). x must start on a block boundary of its tensor. */
    void (*sum_squares)(struct zr_exact_sum *acc, const float *x, int64_t n);
    /* x[i] = x[i] * factor; factor 1 touches nothing */
    void (*scale)(float *x, int64_t n, float factor);
    /* param_dtype F32 and BF16 */
    void (*update)(const struct zr_update *u);
};

/* The table for isa, or NULL where this CPU or build does not have it. */
const struct zr_host_kernels *zr_host_kernels(enum zr_isa isa);
/* The best this CPU has, unless the environment variable ZERO_ISA names another that it has (portable, avx2,
 * avx512). Reads the environment: ask once and keep the answer. zr_host_device_open refuses a ZERO_ISA that
 * cannot be had. */
const struct zr_host_kernels *zr_host_kernels_best(void);

#define ZR_MAX_CARRIED 8 /* doubles of the program's own in a step's agreement */

struct zr_device;
struct zr_stream;
struct zr_event;
/* In kernels/agreement.h. */
struct zr_agree_begin;
struct zr_agree_end;

/* A range that an operation touches. */
struct zr_access {
    const void *at;
    int64_t bytes;
    bool write;
};

/* One entry of a table of copies: bytes in rows of row_bytes, whose starts are so far apart; the last row may
 * be short. One row: bytes <= row_bytes, and the strides do not matter. */
struct zr_copy_rows {
    void *dst;
    const void *src;
    /* row_bytes > 0 where there are bytes */
    int64_t row_bytes, bytes;
    /* >= row_bytes where there are more rows than one */
    int64_t dst_stride, src_stride;
};
#define ZR_MAX_COPIES 64 /* of a table */

/* One entry of a table of sums: n elements, of every source those from element at on. */
struct zr_sum_range {
    float *dst;
    int64_t at, n;
    bool accumulate;
};
#define ZR_MAX_SUMS 64 /* of a table */

enum zr_stream_kind {
    /* asynchronous: on the host a thread with an in-order queue */
    ZR_STREAM_QUEUE,
    /* the model's own stream. On the host: whoever calls; work runs at once on the calling thread,
     * event_record completes at once, and stream_wait blocks until the event is done */
    ZR_STREAM_CALLER
};

struct zr_device_ops {
    const char *name;
    /* the model computes on the calling thread (host): a wait on its stream blocks the thread */
    bool compute_on_caller;
    /* alloc gives memory that the CPU may touch once the streams that use it are idle */
    bool host_memory;

    void (*close)(struct zr_device *dev);

    /* bytes > 0; 4096-byte aligned; content is unspecified (NaN bytes, 0xFF, when ZERO_POISON=1). */
    int (*alloc)(struct zr_device *dev, int64_t bytes, void **out);
    void (*free)(struct zr_device *dev, void *p, int64_t bytes);
    /* Memory of the host that streams reach too (page-locked on a GPU), 4096-byte aligned, zeroed. bytes > 0.
     */
    int (*host_alloc)(struct zr_device *dev, int64_t bytes, void **out);
    void (*host_free)(struct zr_device *dev, void *p, int64_t bytes);
    /* Free and total bytes of the memory of the device. NULL if alloc takes host memory, which others
     * count. */
    int (*memory)(struct zr_device *dev, int64_t *free_bytes, int64_t *total_bytes);

    /* name: for traces and debuggers, copied. native: the user's stream for ZR_STREAM_CALLER on a GPU, else
     * NULL. */
    int (*stream_open)(struct zr_device *dev, enum zr_stream_kind kind, const char *name, void *native,
                       struct zr_stream **out);
    /* finishes queued work first; NULL is allowed */
    void (*stream_close)(struct zr_stream *s);
    /* Instead of it, where work does not end: no more is begun, and the stream is left behind for as long as
     * the process lives, with its device. When it returns, nothing of the stream's works any more but a call
     * (below) and a wait for an event, which may go on for ever. Again, and several threads at once, are
     * allowed, and so is NULL. NULL where work that was put on a stream cannot be stopped. */
    void (*stream_leave)(struct zr_stream *s);

    /* For a stream that holds a bounded number of operations, and makes callers wait if it is full. reserve:
     * makes room for n_ops more operations; called before anything is put on it. has_room: n_ops more can be
     * put without a wait, or the stream is empty. A wait for an event counts as an operation, a record does
     * not. NULL if the driver sets the bound; use zr_stream_reserve() and zr_stream_has_room(). */
    int (*stream_reserve)(struct zr_stream *s, int64_t n_ops);
    bool (*stream_has_room)(struct zr_stream *s, int64_t n_ops);

    int (*stream_sync)(struct zr_stream *s);
    /* Threads that wait here may do so for work that never ends. From now on, while one waits, it calls ask
     * now and then (some times a second; several threads may at once): 0: it waits on; a code: its wait
     * returns that, and the work is left behind. ask NULL: nobody is asked any more. Not while a thread
     * waits. NULL where whoever waits looks by event_query. */
    void (*ask_while_waiting)(struct zr_device *dev, int (*ask)(void *arg), void *arg);
    /* the device's own handle; NULL on the host */
    void *(*stream_native)(struct zr_stream *s);
    /* The calling thread is one of the library's own and begins to work with the device: makes it the
     * thread's current one for good, and its calls such as do not disturb a program that captures a stream.
     * Before the thread's first use of the device, and of libraries that work on the current one; again does
     * no harm. NULL where there is no such thing; use zr_thread_begin(). */
    int (*thread_begin)(struct zr_device *dev);

    int (*event_open)(struct zr_device *dev, struct zr_event **out);
    /* NULL is allowed */
    void (*event_close)(struct zr_event *e);

    int (*event_record)(struct zr_event *e, struct zr_stream *s);
    int (*stream_wait)(struct zr_stream *s, struct zr_event *e);
    int (*event_sync)(struct zr_event *e);
    /* 1: the most recent record has completed, or there was none; 0: not yet; or a negative code. */
    int (*event_query)(struct zr_event *e);

    /* fn(copy of arg) in stream order, on a thread of the device's. arg_bytes <= ZR_CALL_BYTES; fn must not
     * call the device. On a GPU this is a host function and must be short: CUDA runs those of all streams one
     * at a time, so that one which waits for another stream's may wait for ever. */
    int (*call)(struct zr_stream *s, void (*fn)(void *arg), const void *arg, size_t arg_bytes);
    /* What the next call() on s touches, or with s NULL what the calling thread touches now: a device that
     * checks cannot look into a function. NULL on devices that do not check; use zr_declare(). */
    void (*declare)(struct zr_device *dev, struct zr_stream *s, const struct zr_access *a, int n);
    /* The time when the stream gets there, on the clock of zr_now_ns(), to *out_ns in host_alloc memory. */
    int (*stamp)(struct zr_stream *s, int64_t *out_ns);

    /* Kernels, asynchronous in stream order. Pointers are device memory (copy: host memory too, which must
     * stay as it is until the stream has passed). Semantics as in struct zr_host_kernels. A dtype that is not
     * F32 or BF16 gives ZR_ERR_NOTSUP on the host, bad arguments ZR_ERR_ARG. */
    int (*zero)(struct zr_stream *s, void *dst, int64_t bytes);
    int (*copy)(struct zr_stream *s, void *dst, const void *src, int64_t bytes);
    /* n_copies (0 to ZR_MAX_COPIES) at once, in no order: no entry may write what another reads or writes.
     * One kernel on a GPU, of device memory only; any alignment, fastest where all is a multiple of 16 bytes.
     * The table is the caller's, copied before the call returns. */
    int (*copy_rows)(struct zr_stream *s, const struct zr_copy_rows *table, int n_copies);
    /* dst: device memory, 8-byte aligned; src: the caller's, copied before the call returns. bytes: a
     * multiple of 8, at most ZR_PUT_BYTES. */
    int (*put)(struct zr_stream *s, void *dst, const void *src, int64_t bytes);
    int (*cast)(struct zr_stream *s, void *dst, enum zr_dtype dt, const void *src, enum zr_dtype st,
                int64_t n);
    /* dst[i] = dst[i] + src[i], src widened to fp32 first */
    int (*add)(struct zr_stream *s, float *dst, const void *src, enum zr_dtype st, int64_t n);
    /* the array src is copied */
    int (*sum_tree)(struct zr_stream *s, float *dst, const void *const *src, int n_src, enum zr_dtype st,
                    int64_t n, bool accumulate);
    /* n_sums (0 to ZR_MAX_SUMS) of sum_tree's over the same sources, at once, in no order: no dst may overlap
     * another, nor a source. One kernel on a GPU. Table and array are copied. */
    int (*sum_ranges)(struct zr_stream *s, const struct zr_sum_range *table, int n_sums,
                      const void *const *src, int n_src, enum zr_dtype st);
    /* largest: copied; NULL: no block is recorded. */
    int (*sum_squares)(struct zr_stream *s, struct zr_exact_sum *acc, const float *x, int64_t n,
                       const struct zr_largest *largest);
    /* x[i] = x[i] * scalars->grad_scale; nothing when scalars->skip */
    int (*scale)(struct zr_stream *s, float *x, int64_t n, const struct zr_step_scalars *scalars);
    int (*update)(struct zr_stream *s, const struct zr_update *u);
    /* n_spans (0 to ZR_MAX_SPANS) spans of an update of u->n elements at once, in no order: none may overlap
     * another. What lies in no span stays as it is. One kernel on a GPU. The table is copied. */
    int (*update_spans)(struct zr_stream *s, const struct zr_update *u, const struct zr_update_span *spans,
                        int n_spans);
    /* The two ends of a step's agreement (agreement.h); their arguments are copied. */
    int (*agree_begin)(struct zr_stream *s, const struct zr_agree_begin *b);
    int (*agree_end)(struct zr_stream *s, const struct zr_agree_end *e);
};
#define ZR_CALL_BYTES 192
#define ZR_PUT_BYTES  64

struct zr_device {
    const struct zr_device_ops *ops;
};

static inline void zr_declare(struct zr_device *dev, struct zr_stream *s, const struct zr_access *a, int n)
{
    if (dev->ops->declare)
        dev->ops->declare(dev, s, a, n);
}

static inline int zr_stream_reserve(struct zr_device *dev, struct zr_stream *s, int64_t n_ops)
{
    return dev->ops->stream_reserve ? dev->ops->stream_reserve(s, n_ops) : 0;
}

static inline bool zr_stream_has_room(struct zr_device *dev, struct zr_stream *s, int64_t n_ops)
{
    return !dev->ops->stream_has_room || dev->ops->stream_has_room(s, n_ops);
}

static inline int zr_thread_begin(struct zr_device *dev)
{
    return dev->ops->thread_begin ? dev->ops->thread_begin(dev) : 0;
}

/* Nanoseconds on a clock that never goes back. */
int64_t zr_now_ns(void);

/* Between two looks at a word that another thread is about to write. */
static inline void zr_relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* The host device: streams are threads with in-order queues, kernels are zr_host_kernels_best(). The caller
 * closes it with ops->close after its streams and events are closed. */
int zr_host_device_open(struct zr_device **out);

/* GPU number ordinal, as CUDA counts them, or the one the calling thread has chosen (cudaSetDevice). The
 * caller closes it as above. ZR_ERR_NOTSUP, with a message that says what is missing, where there is no
 * usable GPU: a build without CUDA, no driver, a driver too old, no GPU, one without bf16. ZERO_POISON is
 * read as on the host. A caller stream wraps the user's cudaStream_t, which must be of this GPU; NULL is
 * CUDA's default stream. */
enum { ZR_CUDA_CURRENT = -1 };
int zr_cuda_device_open(int ordinal, struct zr_device **out);

#endif
