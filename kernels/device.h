/* SPDX-License-Identifier: Apache-2.0 */
/* device.h: the interface of one device: memory, streams, events, and the kernels of a sharded optimizer.
 *
 * A device is a table of functions. The engine above uses only this header and is the same on every device.
 * Work is put on streams. A stream runs its work in order, and an event orders two streams. Calls whose name
 * ends in _sync wait for the device. On a caller stream, stream_wait waits, too (see below).
 *
 * Events follow CUDA's rule. event_record() marks the work put on the stream so far. stream_wait() makes
 * later work of a stream wait for the most recent record made before the call. Waiting for an event that was
 * never recorded does nothing.
 *
 * Thread-safety: a device and its events may be used from any thread, and a stream by one thread at a time.
 * Calls return 0 or a negative zero_err with a message (error.h). */
#ifndef ZR_KERNELS_DEVICE_H
#define ZR_KERNELS_DEVICE_H

#include "kernels/dtype.h"
#include "kernels/error.h"
#include "kernels/log.h"
#include "kernels/optimizers.h"
#include "kernels/state_codes.h"

#include <stdbool.h>
#include <stdint.h>

/* Written on the device by the step, and read there by the update kernels. The host does not wait in
 * between. */
struct zr_step_scalars {
    /* Factor of every gradient element: user's scale, mean over ranks and clip factor. */
    float grad_scale;
    /* Not 0: the step is skipped, and everything stays as it is. */
    uint32_t skip;
};

/* One contiguous range of n elements of a tensor, for an element-wise optimizer (optimizers.h), which
 * computes in fp32. Each gradient is first multiplied by scalars->grad_scale. The kind's file defines the
 * rest. */
struct zr_update {
    enum zero_optimizer kind;
    enum zero_dtype param_dtype;
    enum zero_masters masters;
    enum zero_moments moments;
    /* F32 or BF16 */
    enum zero_dtype grad_dtype;
    /* decay: weight decay, 0 for a tensor without. c1, c2: bias corrections, 1 if the kind has none. */
    float lr, beta1, beta2, eps, decay, c1, c2;
    /* number of the step, from 1 */
    int64_t t;
    /* number of elements */
    int64_t n;
    /* (n) fp32 weights, read and written; NULL unless masters is F32 */
    float *master;
    /* (n) lower halves of the masters, read and written, if masters is REMAINDER */
    uint16_t *remainder;
    /* (n) param_dtype, written with the rounded weight. NULL or == master: not written. It is bf16, and read
     * too, unless masters is F32. */
    void *param;
    /* (n) gradient in grad_dtype, reduced but not yet scaled */
    const void *grad;
    /* (n) each, zr_optimizer_states(kind, beta1) of them; the others are NULL. An element is a float, a bf16
     * or a code of one byte, as moments says. */
    void *state[ZR_OPTIMIZER_STATES];
    /* (n / ZR_Q8_BLOCK, rounded up) each, if moments is Q8. Element 0 then begins a block of its tensor, and
     * rounding.at and rounding.run are multiples of ZR_Q8_BLOCK. */
    uint16_t *scale[ZR_OPTIMIZER_STATES];
    /* noise, if anything is rounded at random */
    struct zr_rounding rounding;
    /* device memory */
    const struct zr_step_scalars *scalars;
};

/* Elements of an update with a different lr, decay and noise: n elements from element first on. */
struct zr_update_span {
    int64_t first, n;
    float lr, decay;
    struct zr_rounding rounding;
};
#define ZR_MAX_SPANS 64 /* most spans of an update */

/* Forms that encode and decode convert fp32 values to and from (state_codes.h):
 *
 *     WEIGHT      bf16 weights, rounded from masters to nearest, ties away from zero
 *     REMAINDER   such weights, and in `beside` the lower halves of their masters
 *     Q8          8-bit codes of a state, rounded to nearest, and in `beside` the scales
 *     Q8_SQUARES  the same for a state of squares */
enum zr_coding { ZR_CODING_WEIGHT, ZR_CODING_REMAINDER, ZR_CODING_Q8, ZR_CODING_Q8_SQUARES };

/* n elements in such a form. */
struct zr_coded {
    enum zr_coding coding;
    /* (n) of 2 bytes each; Q8, Q8_SQUARES: of 1 byte */
    void *at;
    /* REMAINDER: (n). Q8: (n / ZR_Q8_BLOCK, rounded up); element 0 begins a block, and only a block at the
     * end of a tensor may be short. */
    uint16_t *beside;
};

/* An exact sum of doubles. The order of additions does not matter, so ranks, shards and streams may add in
 * any order and get the same bits. It is Kulisch's long accumulator (exact_sum.h), and plain data that may be
 * copied. */
#define ZR_EXACT_LIMBS 70
struct zr_exact_sum {
    /* value = sum of limb[i] * 2^(32*i - 1088) */
    int64_t limb[ZR_EXACT_LIMBS];
    /* additions since the last carry propagation */
    uint32_t n_added;
    /* 1: a NaN or infinity was added */
    uint32_t nonfinite;
};

#define ZR_NORM_BLOCK 32 /* elements whose squares sum_squares adds up as one block */

/* Where sum_squares records the largest block, which is the one with the largest sum of squares (up to a
 * power of two, see zr_largest_of). If a step is skipped because the norm is too large or not finite, its
 * message names the tensor in which the block lies. */
struct zr_largest {
    /* device memory: zr_largest_of() the largest block so far. 0: none was recorded. */
    uint64_t *word;
    /* position of x[0] in units of 2 bytes, 0 to 2^37 - 1; x[i] is at position at + i * bytes of an element /
     * 2 */
    int64_t at;
    /* blocks with a smaller sum of squares are not recorded */
    double from;
};

/* The CPU kernels: one table per instruction set. All tables give the same bits. The kernels run
 * synchronously on the calling thread. Memory needs only the alignment of its elements. */
enum zr_isa { ZR_ISA_PORTABLE, ZR_ISA_AVX2, ZR_ISA_AVX512, ZR_ISA_COUNT };

#define ZR_MAX_SOURCES 64 /* most sources of sum_tree and maximum */

/* Copies of at least this many bytes may bypass the caches. */
enum { ZR_COPY_STREAM_BYTES = 4 << 20 };

struct zr_host_kernels {
    const char *name;
    void (*zero)(void *dst, int64_t bytes);
    /* copy may use non-temporal stores from ZR_COPY_STREAM_BYTES on. */
    void (*copy)(void *dst, const void *src, int64_t bytes);
    /* dst[i] = src[i] in dst_dtype, for F32 and BF16. To BF16 it rounds to nearest even; a NaN keeps its sign
     * and upper payload and becomes quiet. To F32 it shifts the bits. dst may be src if the destination's
     * elements are not larger than the source's. */
    void (*cast)(void *dst, enum zero_dtype dst_dtype, const void *src, enum zero_dtype src_dtype, int64_t n);
    /* dst[i] = tree(src[0][i], ..., src[n_src-1][i]) in fp32; with accumulate, dst[i] = dst[i] + tree. The
     * tree over [lo, lo+n) splits at h, the largest power of two below n: sum(lo, h) + sum(lo+h, n-h). n_src
     * is 1 to ZR_MAX_SOURCES. Sources are F32 or BF16; dst may be one of the F32 sources. */
    void (*sum_tree)(float *dst, const void *const *src, int n_src, enum zero_dtype src_dtype, int64_t n,
                     bool accumulate);
    /* dst[i] = dst[i] + src[i] */
    void (*add)(float *dst, const float *src, int64_t n);
    /* Adds to acc, for each block of ZR_NORM_BLOCK elements, the block's sum of squares in double. The last
     * block is padded with zeros. x is F32 or BF16, and must start on a block boundary of its tensor.
     *
     *     a[j] = x[j]^2 + x[j+8]^2 + x[j+16]^2 + x[j+24]^2 for j in 0..7, in that order
     *     sum  = ((a0+a4)+(a2+a6)) + ((a1+a5)+(a3+a7)) */
    void (*sum_squares)(struct zr_exact_sum *acc, const void *x, enum zero_dtype dtype, int64_t n);
    /* dst[i] = the greatest of src[0][i], ..., src[n_src-1][i], with its bits. NaN is greater than any
     * number. Of several NaNs the last one is taken, and of equal numbers, such as 0 and -0, the first. n_src
     * is 1 to ZR_MAX_SOURCES. dst and the sources are of one dtype, F32 or BF16; dst may be one of the
     * sources. */
    void (*maximum)(void *dst, const void *const *src, int n_src, enum zero_dtype dtype, int64_t n);
    /* *sum = *sum + digest, modulo 2^64, where the digest is the sum of zr_digest_word (raw_bits.h) over all
     * words of 8 bytes. The first word has the number `first`; the last one is padded with zeros. So bytes
     * that are all zero have the digest 0, and others almost certainly another one. */
    void (*digest)(uint64_t *sum, const void *at, int64_t bytes, uint64_t first);
    /* x[i] = x[i] * factor. Factor 1 changes nothing. */
    void (*scale)(float *x, int64_t n, float factor);
    /* param_dtype is F32 or BF16. */
    void (*update)(const struct zr_update *u);
    /* dst[i] = dst[i] + src[i] in bf16: the sum in fp32, rounded at random with noise of the kind
     * ZR_NOISE_SUM. */
    void (*add_rounded)(uint16_t *dst, const float *src, int64_t n, const struct zr_rounding *rounding);
    /* Source and destination do not overlap. */
    void (*encode)(const struct zr_coded *to, const float *src, int64_t n);
    void (*decode)(float *dst, const struct zr_coded *from, int64_t n);
};

/* Returns the table for isa, or NULL if this CPU or build does not have it. */
const struct zr_host_kernels *zr_host_kernels(enum zr_isa isa);
/* Returns the best table that this CPU has, or the one that the environment variable ZERO_ISA names
 * (portable, avx2, avx512), if there is such a table. It reads the environment, so call it once and keep the
 * answer. zr_host_device_open refuses a ZERO_ISA for which there is no table. */
const struct zr_host_kernels *zr_host_kernels_best(void);

#define ZR_MAX_CARRIED 8 /* most values of the program in a step's agreement */

struct zr_device;
struct zr_stream;
struct zr_event;
/* Defined in kernels/agreement.h. */
struct zr_agree_begin;
struct zr_agree_end;

/* A range that an operation touches. */
struct zr_access {
    const void *at;
    int64_t bytes;
    bool write;
};

/* One entry of a table of copies: rows of row_bytes each, whose starts are a stride apart. The last row may
 * be short. If bytes <= row_bytes there is one row, and the strides do not matter. */
struct zr_copy_rows {
    void *dst;
    const void *src;
    /* row_bytes is above 0 if bytes is. */
    int64_t row_bytes, bytes;
    /* at least row_bytes if there are several rows */
    int64_t dst_stride, src_stride;
};
#define ZR_MAX_COPIES 64 /* most entries of a table of copies */

/* One entry of a table of sums: n elements, from element `at` of every source on. */
struct zr_sum_range {
    float *dst;
    int64_t at, n;
    bool accumulate;
};
#define ZR_MAX_SUMS 64 /* most entries of a table of sums */

enum zr_stream_kind {
    /* Asynchronous. On the host this is a thread with an in-order queue. */
    ZR_STREAM_QUEUE,
    /* The model's stream. On the host this is the calling thread: work runs at once, event_record completes
     * at once, and stream_wait blocks until the event is done. */
    ZR_STREAM_CALLER
};

struct zr_device_ops {
    const char *name;
    /* The model computes on the calling thread (host), so a wait on its stream blocks the thread. */
    bool compute_on_caller;
    /* The CPU may access memory of alloc once the streams that use it are idle. */
    bool host_memory;

    void (*close)(struct zr_device *dev);

    /* bytes is above 0. The memory is 4096-byte aligned. Its content is unspecified, or 0xFF bytes (NaN) if
     * ZERO_POISON=1. */
    int (*alloc)(struct zr_device *dev, int64_t bytes, void **out);
    void (*free)(struct zr_device *dev, void *p, int64_t bytes);
    /* Allocates host memory that streams can access (page-locked on a GPU), 4096-byte aligned and zeroed.
     * bytes is above 0. */
    int (*host_alloc)(struct zr_device *dev, int64_t bytes, void **out);
    void (*host_free)(struct zr_device *dev, void *p, int64_t bytes);
    /* Returns free and total bytes of the device's memory. NULL if alloc takes host memory, which is counted
     * elsewhere. */
    int (*memory)(struct zr_device *dev, int64_t *free_bytes, int64_t *total_bytes);

    /* name is for traces and debuggers, and is copied. native is the user's stream for ZR_STREAM_CALLER on a
     * GPU, else NULL. */
    int (*stream_open)(struct zr_device *dev, enum zr_stream_kind kind, const char *name, void *native,
                       struct zr_stream **out);
    /* Finishes queued work first. s may be NULL. */
    void (*stream_close)(struct zr_stream *s);
    /* Replaces stream_close if work may never end. No further operation begins. The stream and its device are
     * left behind for as long as the process lives. After the return, only a call() or a wait for an event
     * may still be running, perhaps for ever. It may be repeated, also by several threads at once, and s may
     * be NULL. The pointer is NULL if work on a stream cannot be stopped. */
    void (*stream_leave)(struct zr_stream *s);

    /* For a stream that holds a bounded number of operations and makes callers wait when it is full.
     * stream_reserve makes room for n_ops more operations, before anything is put on the stream.
     * stream_has_room returns whether n_ops more can be put without a wait, or the stream is empty. A wait
     * for an event counts as an operation; a record does not. NULL if the driver sets the bound. Use
     * zr_stream_reserve() and zr_stream_has_room(). */
    int (*stream_reserve)(struct zr_stream *s, int64_t n_ops);
    bool (*stream_has_room)(struct zr_stream *s, int64_t n_ops);

    int (*stream_sync)(struct zr_stream *s);
    /* Sets a function that waiting threads call, because the work may never end. Each waiting thread calls
     * ask several times a second; several threads may call it at once. If ask returns 0, the thread waits on.
     * Otherwise the wait returns that code, and the work is left behind. ask NULL sets no function. Do not
     * call this while a thread waits. NULL if waiting threads poll with event_query. */
    void (*ask_while_waiting)(struct zr_device *dev, int (*ask)(void *arg), void *arg);
    /* Returns the device's native handle; NULL on the host. */
    void *(*stream_native)(struct zr_stream *s);
    /* Prepares a thread of the library for the device, which becomes the thread's current one for good. Later
     * calls of the thread do not disturb a program that captures a stream. Call it before the thread first
     * uses the device, or a library that works on the current device. Repeating it does no harm. NULL if
     * nothing is needed; use zr_thread_begin(). */
    int (*thread_begin)(struct zr_device *dev);

    int (*event_open)(struct zr_device *dev, struct zr_event **out);
    /* e may be NULL. */
    void (*event_close)(struct zr_event *e);

    int (*event_record)(struct zr_event *e, struct zr_stream *s);
    int (*stream_wait)(struct zr_stream *s, struct zr_event *e);
    int (*event_sync)(struct zr_event *e);
    /* Returns 1 if the most recent record has completed or there was none, 0 if not yet, or a negative
     * code. */
    int (*event_query)(struct zr_event *e);

    /* Runs fn on a copy of arg in stream order, on a thread of the device. arg_bytes is at most
     * ZR_CALL_BYTES, and fn must not call the device. On a GPU this is a host function and must be short.
     * CUDA runs the host functions of all streams one at a time, so one that waits for another stream's may
     * wait for ever. */
    int (*call)(struct zr_stream *s, void (*fn)(void *arg), const void *arg, size_t arg_bytes);
    /* Declares what the next call() on s touches, or, if s is NULL, what the calling thread touches now. A
     * device that checks cannot look into a function. NULL on devices that do not check; use zr_declare(). */
    void (*declare)(struct zr_device *dev, struct zr_stream *s, const struct zr_access *a, int n);
    /* Writes the time at which the stream gets there to *out_ns, in host_alloc memory. The clock is
     * zr_now_ns()'s. */
    int (*stamp)(struct zr_stream *s, int64_t *out_ns);

    /* Kernels, asynchronous in stream order, with the semantics of struct zr_host_kernels. Pointers are
     * device memory. copy also takes host memory, which must not change until the stream has passed. The
     * dtype F16 gives ZERO_ERR_NOTSUP, and other bad arguments give ZERO_ERR_ARG. */
    int (*zero)(struct zr_stream *s, void *dst, int64_t bytes);
    int (*copy)(struct zr_stream *s, void *dst, const void *src, int64_t bytes);
    /* Makes n_copies (0 to ZR_MAX_COPIES) copies at once, in no order. No entry may write what another reads
     * or writes. On a GPU this is one kernel, for device memory only. Any alignment is allowed; multiples of
     * 16 bytes are fastest. The table is copied before the call returns. */
    int (*copy_rows)(struct zr_stream *s, const struct zr_copy_rows *table, int n_copies);
    /* Writes bytes of src, which is copied before the call returns, to dst in device memory. dst is 8-byte
     * aligned; bytes is a multiple of 8, at most ZR_PUT_BYTES. */
    int (*put)(struct zr_stream *s, void *dst, const void *src, int64_t bytes);
    int (*cast)(struct zr_stream *s, void *dst, enum zero_dtype dt, const void *src, enum zero_dtype st,
                int64_t n);
    /* dst[i] = dst[i] + src[i], with src widened to fp32 first. */
    int (*add)(struct zr_stream *s, float *dst, const void *src, enum zero_dtype st, int64_t n);
    /* The array src is copied. */
    int (*sum_tree)(struct zr_stream *s, float *dst, const void *const *src, int n_src, enum zero_dtype st,
                    int64_t n, bool accumulate);
    /* Computes n_sums (0 to ZR_MAX_SUMS) sums like sum_tree's over the same sources, at once and in no order.
     * No dst may overlap another or a source. On a GPU this is one kernel. The table and the array are
     * copied. */
    int (*sum_ranges)(struct zr_stream *s, const struct zr_sum_range *table, int n_sums,
                      const void *const *src, int n_src, enum zero_dtype st);
    /* largest is copied. NULL: no block is recorded. */
    int (*sum_squares)(struct zr_stream *s, struct zr_exact_sum *acc, const void *x, enum zero_dtype dtype,
                       int64_t n, const struct zr_largest *largest);
    /* The array src is copied. */
    int (*maximum)(struct zr_stream *s, void *dst, const void *const *src, int n_src, enum zero_dtype dtype,
                   int64_t n);
    /* sum is 8-byte aligned. */
    int (*digest)(struct zr_stream *s, uint64_t *sum, const void *at, int64_t bytes, uint64_t first);
    /* x[i] = x[i] * scalars->grad_scale, or nothing if scalars->skip is set. */
    int (*scale)(struct zr_stream *s, float *x, int64_t n, const struct zr_step_scalars *scalars);
    int (*update)(struct zr_stream *s, const struct zr_update *u);
    /* Updates n_spans (0 to ZR_MAX_SPANS) spans of u->n elements at once, in no order. No two spans may
     * overlap. Elements outside the spans stay as they are. On a GPU this is one kernel. The table is
     * copied. */
    int (*update_spans)(struct zr_stream *s, const struct zr_update *u, const struct zr_update_span *spans,
                        int n_spans);
    /* The structs are copied. */
    int (*add_rounded)(struct zr_stream *s, uint16_t *dst, const float *src, int64_t n,
                       const struct zr_rounding *rounding);
    int (*encode)(struct zr_stream *s, const struct zr_coded *to, const float *src, int64_t n);
    int (*decode)(struct zr_stream *s, float *dst, const struct zr_coded *from, int64_t n);
    /* Begin and end of a step's agreement (agreement.h). The arguments are copied. */
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

/* Call it between two reads of a word that another thread is about to write. */
static inline void zr_relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Opens the host device. Its streams are threads with in-order queues, and its kernels are
 * zr_host_kernels_best(). The caller closes it with ops->close after its streams and events are closed. */
int zr_host_device_open(struct zr_device **out);

/* Opens a GPU: number ordinal, as CUDA counts them, or for ZR_CUDA_CURRENT the one that the calling thread
 * has chosen (cudaSetDevice). The caller closes it like the host device. Returns ZERO_ERR_NOTSUP if there is
 * no usable GPU. The message says why: a build without CUDA, no driver, a driver too old, no GPU, or one
 * without bf16. ZERO_POISON works as on the host. A caller stream wraps the user's cudaStream_t, which must
 * belong to this GPU. NULL is CUDA's default stream. */
enum { ZR_CUDA_CURRENT = -1 };
int zr_cuda_device_open(int ordinal, struct zr_device **out);

#endif
