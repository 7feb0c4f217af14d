/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_ops.c: the CUDA device's operations, which check their arguments and put kernels on the stream, and
 * its table. */
#include "kernels/cuda/cuda_device.h"
#include "kernels/cuda/cuda_kernels.h"
#include "kernels/op_check.h"

static int op_zero(struct zr_stream *s, void *dst, int64_t bytes)
{
    int err = zr_check_count("zero", "bytes", bytes);
    if (err || bytes == 0)
        return err;
    return ZR_CUDA(s->dev, "cudaMemsetAsync", cudaMemsetAsync(dst, 0, (size_t)bytes, s->native));
}

static int op_copy(struct zr_stream *s, void *dst, const void *src, int64_t bytes)
{
    int err = zr_check_count("copy", "bytes", bytes);
    if (err || bytes == 0)
        return err;
    return ZR_CUDA(s->dev, "cudaMemcpyAsync",
                   cudaMemcpyAsync(dst, src, (size_t)bytes, cudaMemcpyDefault, s->native));
}

static int op_copy_rows(struct zr_stream *s, const struct zr_copy_rows *table, int n)
{
    ZR_TRY(zr_check_copy_rows(table, n));
    return ZR_CUDA(s->dev, "copy_rows", zr_cuda_copy_rows(s->native, table, n));
}

static int op_put(struct zr_stream *s, void *dst, const void *src, int64_t bytes)
{
    ZR_TRY(zr_check_put(bytes));
    return ZR_CUDA(s->dev, "put", zr_cuda_put(s->native, dst, src, bytes));
}

static int op_stamp(struct zr_stream *s, int64_t *out_ns)
{
    return ZR_CUDA(s->dev, "stamp", zr_cuda_stamp(s->native, out_ns, s->dev->clock_offset));
}

static int op_cast(struct zr_stream *s, void *dst, enum zero_dtype dt, const void *src, enum zero_dtype st,
                   int64_t n)
{
    ZR_TRY(zr_check_cast(dt, st, n));
    if (dt == st)
        return dst == src ? 0 : op_copy(s, dst, src, n * zr_dtype_bytes(dt));
    return ZR_CUDA(s->dev, "cast", zr_cuda_cast(s->native, dst, dt, src, n));
}

static int op_add(struct zr_stream *s, float *dst, const void *src, enum zero_dtype st, int64_t n)
{
    ZR_TRY(zr_check_dtype("add", st));
    ZR_TRY(zr_check_count("add", "n", n));
    return ZR_CUDA(s->dev, "add", zr_cuda_add(s->native, dst, src, st, n));
}

static int op_sum_tree(struct zr_stream *s, float *dst, const void *const *src, int n_src, enum zero_dtype st,
                       int64_t n, bool accumulate)
{
    ZR_TRY(zr_check_sources("sum_tree", n_src, st, n));
    return ZR_CUDA(s->dev, "sum_tree", zr_cuda_sum_tree(s->native, dst, src, n_src, st, n, accumulate));
}

static int op_sum_ranges(struct zr_stream *s, const struct zr_sum_range *table, int n_sums,
                         const void *const *src, int n_src, enum zero_dtype st)
{
    ZR_TRY(zr_check_sum_ranges(table, n_sums, n_src, st));
    return ZR_CUDA(s->dev, "sum_ranges", zr_cuda_sum_ranges(s->native, table, n_sums, src, n_src, st));
}

/* Six tiles of sum_squares fit on a multiprocessor with 228 KB of shared memory, and four on one with 164
 * KB. */
enum { SQUARES_BLOCKS = 6 };

static int op_sum_squares(struct zr_stream *s, struct zr_exact_sum *acc, const void *x, enum zero_dtype dtype,
                          int64_t n, const struct zr_largest *largest)
{
    const struct zr_largest none = {.word = NULL};
    ZR_TRY(zr_check_dtype("sum_squares", dtype));
    ZR_TRY(zr_check_count("sum_squares", "n", n));
    return ZR_CUDA(s->dev, "sum_squares",
                   zr_cuda_sum_squares(s->native, acc, x, dtype, n, largest ? largest : &none,
                                       SQUARES_BLOCKS * s->dev->n_processors));
}

static int op_maximum(struct zr_stream *s, void *dst, const void *const *src, int n_src,
                      enum zero_dtype dtype, int64_t n)
{
    ZR_TRY(zr_check_sources("maximum", n_src, dtype, n));
    return ZR_CUDA(s->dev, "maximum", zr_cuda_maximum(s->native, dst, src, n_src, dtype, n));
}

/* All threads that a multiprocessor has room for. */
enum { DIGEST_BLOCKS = 8 };

static int op_digest(struct zr_stream *s, uint64_t *sum, const void *at, int64_t bytes, uint64_t first)
{
    ZR_TRY(zr_check_count("digest", "bytes", bytes));
    return ZR_CUDA(s->dev, "digest",
                   zr_cuda_digest(s->native, sum, at, bytes, first, DIGEST_BLOCKS * s->dev->n_processors));
}

static int op_scale(struct zr_stream *s, float *x, int64_t n, const struct zr_step_scalars *scalars)
{
    ZR_TRY(zr_check_count("scale", "n", n));
    return ZR_CUDA(s->dev, "scale", zr_cuda_scale(s->native, x, n, scalars));
}

static int op_update_spans(struct zr_stream *s, const struct zr_update *u, const struct zr_update_span *spans,
                           int n_spans)
{
    ZR_TRY(zr_check_update_spans(u, spans, n_spans));
    return ZR_CUDA(s->dev, "update", zr_cuda_update_spans(s->native, u, spans, n_spans));
}

static int op_update(struct zr_stream *s, const struct zr_update *u)
{
    const struct zr_update_span all = {.n = u->n, .lr = u->lr, .decay = u->decay, .rounding = u->rounding};
    return op_update_spans(s, u, &all, 1);
}

static int op_add_rounded(struct zr_stream *s, uint16_t *dst, const float *src, int64_t n,
                          const struct zr_rounding *rounding)
{
    ZR_TRY(zr_check_count("add_rounded", "n", n));
    return ZR_CUDA(s->dev, "add_rounded", zr_cuda_add_rounded(s->native, dst, src, n, rounding));
}

static int op_encode(struct zr_stream *s, const struct zr_coded *to, const float *src, int64_t n)
{
    ZR_TRY(zr_check_coded("encode", to, n));
    return ZR_CUDA(s->dev, "encode", zr_cuda_encode(s->native, to, src, n));
}

static int op_decode(struct zr_stream *s, float *dst, const struct zr_coded *from, int64_t n)
{
    ZR_TRY(zr_check_coded("decode", from, n));
    return ZR_CUDA(s->dev, "decode", zr_cuda_decode(s->native, dst, from, n));
}

static int op_agree_begin(struct zr_stream *s, const struct zr_agree_begin *b)
{
    ZR_TRY(zr_check_agree_begin(b));
    return ZR_CUDA(s->dev, "agree_begin", zr_cuda_agree_begin(s->native, b));
}

static int op_agree_end(struct zr_stream *s, const struct zr_agree_end *e)
{
    ZR_TRY(zr_check_agree_end(e));
    return ZR_CUDA(s->dev, "agree_end", zr_cuda_agree_end(s->native, e));
}

const struct zr_device_ops zr_cuda_ops = {
    .name = "cuda",
    .close = zr_cuda_close,
    .alloc = zr_cuda_alloc,
    .free = zr_cuda_free,
    .host_alloc = zr_cuda_host_alloc,
    .host_free = zr_cuda_host_free,
    .memory = zr_cuda_memory,
    .stream_open = zr_cuda_stream_open,
    .stream_close = zr_cuda_stream_close,
    .stream_sync = zr_cuda_stream_sync,
    .stream_native = zr_cuda_stream_native,
    .thread_begin = zr_cuda_thread_begin,
    .event_open = zr_cuda_event_open,
    .event_close = zr_cuda_event_close,
    .event_record = zr_cuda_event_record,
    .stream_wait = zr_cuda_stream_wait,
    .event_sync = zr_cuda_event_sync,
    .event_query = zr_cuda_event_query,
    .call = zr_cuda_stream_call,
    .stamp = op_stamp,
    .zero = op_zero,
    .copy = op_copy,
    .copy_rows = op_copy_rows,
    .put = op_put,
    .cast = op_cast,
    .add = op_add,
    .sum_tree = op_sum_tree,
    .sum_ranges = op_sum_ranges,
    .sum_squares = op_sum_squares,
    .maximum = op_maximum,
    .digest = op_digest,
    .scale = op_scale,
    .update = op_update,
    .update_spans = op_update_spans,
    .add_rounded = op_add_rounded,
    .encode = op_encode,
    .decode = op_decode,
    .agree_begin = op_agree_begin,
    .agree_end = op_agree_end,
};
