/* SPDX-License-Identifier: Apache-2.0 */
/* check_gpu.c: the table of check_gpu.h. Each function copies its operands to the GPU and back. */
#include "test/kernels/cuda/check_gpu.h"

#include "kernels/op_check.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MARGIN = 256, MOST = ZR_MAX_SOURCES + 8, UNTOUCHED = 0xc5 };

static struct zr_device *dev;
static struct zr_stream *s;

static void must(int err)
{
    if (err) {
        fprintf(stderr, "%s\n", zr_error_text());
        exit(1);
    }
}

/* The operands of the current call. */
static struct operand {
    const void *host;
    void *out; /* on the host, if the kernel writes it */
    char *base, *staged;
    int64_t bytes, all_bytes, at;
} operands[MOST];
static int n_operands;

/* Returns the operand's address on the device. Operands at one host address share it; the largest must
 * come first. */
static void *place(const void *host, void *out, int64_t bytes)
{
    for (int i = 0; i < n_operands; i++)
        if (operands[i].host == host && bytes <= operands[i].bytes) {
            if (out)
                operands[i].out = out;
            return operands[i].base + operands[i].at;
        }
    struct operand *o = &operands[n_operands++];
    void *p;
    *o = (struct operand){.host = host, .out = out, .bytes = bytes};
    o->at = MARGIN + (int64_t)((uintptr_t)host % MARGIN);
    o->all_bytes = o->at + bytes + MARGIN;
    o->staged = malloc((size_t)o->all_bytes);
    if (!o->staged)
        abort();
    memset(o->staged, UNTOUCHED, (size_t)o->all_bytes);
    if (bytes > 0)
        memcpy(o->staged + o->at, host, (size_t)bytes);
    must(dev->ops->alloc(dev, o->all_bytes, &p));
    o->base = p;
    must(dev->ops->copy(s, o->base, o->staged, o->all_bytes));
    return o->base + o->at;
}

static void *place_out(void *host, int64_t bytes)
{
    return place(host, host, bytes);
}

/* Waits for the kernel and copies back what it wrote. */
static void finish(const char *what)
{
    must(dev->ops->stream_sync(s));
    for (int i = 0; i < n_operands; i++) {
        struct operand *o = &operands[i];
        must(dev->ops->copy(s, o->staged, o->base, o->all_bytes));
        must(dev->ops->stream_sync(s));
        for (int64_t j = 0; j < o->all_bytes; j++)
            if ((j < o->at || j >= o->at + o->bytes) && (unsigned char)o->staged[j] != UNTOUCHED) {
                fprintf(stderr, "%s: wrote at %lld of an operand of %lld bytes\n", what,
                        (long long)(j - o->at), (long long)o->bytes);
                exit(1);
            }
        if (o->out && o->bytes > 0)
            memcpy(o->out, o->staged + o->at, (size_t)o->bytes);
        dev->ops->free(dev, o->base, o->all_bytes);
        free(o->staged);
    }
    n_operands = 0;
}

static void gpu_zero(void *dst, int64_t bytes)
{
    must(dev->ops->zero(s, place_out(dst, bytes), bytes));
    finish("zero");
}

static void gpu_copy(void *dst, const void *src, int64_t bytes)
{
    const void *from = place(src, NULL, bytes);
    must(dev->ops->copy(s, place_out(dst, bytes), from, bytes));
    finish("copy");
}

static void gpu_cast(void *dst, enum zero_dtype dst_dtype, const void *src, enum zero_dtype src_dtype,
                     int64_t n)
{
    const void *from = place(src, NULL, n * zr_dtype_bytes(src_dtype));
    must(dev->ops->cast(s, place_out(dst, n * zr_dtype_bytes(dst_dtype)), dst_dtype, from, src_dtype, n));
    finish("cast");
}

static void gpu_sum_tree(float *dst, const void *const *src, int n_src, enum zero_dtype src_dtype, int64_t n,
                         bool accumulate)
{
    const void *from[ZR_MAX_SOURCES];
    for (int i = 0; i < n_src; i++)
        from[i] = place(src[i], NULL, n * zr_dtype_bytes(src_dtype));
    must(dev->ops->sum_tree(s, place_out(dst, 4 * n), from, n_src, src_dtype, n, accumulate));
    finish("sum_tree");
}

static void gpu_add(float *dst, const float *src, int64_t n)
{
    const void *from = place(src, NULL, 4 * n);
    must(dev->ops->add(s, place_out(dst, 4 * n), from, ZERO_F32, n));
    finish("add");
}

static void gpu_sum_squares(struct zr_exact_sum *acc, const void *x, enum zero_dtype dtype, int64_t n)
{
    const void *from = place(x, NULL, n * zr_dtype_bytes(dtype));
    must(dev->ops->sum_squares(s, place_out(acc, sizeof *acc), from, dtype, n, NULL));
    finish("sum_squares");
}

static void gpu_maximum(void *dst, const void *const *src, int n_src, enum zero_dtype dtype, int64_t n)
{
    const int64_t bytes = n * zr_dtype_bytes(dtype);
    const void *from[ZR_MAX_SOURCES];
    for (int i = 0; i < n_src; i++)
        from[i] = place(src[i], NULL, bytes);
    must(dev->ops->maximum(s, place_out(dst, bytes), from, n_src, dtype, n));
    finish("maximum");
}

static void gpu_digest(uint64_t *sum, const void *at, int64_t bytes, uint64_t first)
{
    const void *from = place(at, NULL, bytes);
    must(dev->ops->digest(s, place_out(sum, sizeof *sum), from, bytes, first));
    finish("digest");
}

static void gpu_scale(float *x, int64_t n, float factor)
{
    const struct zr_step_scalars scalars = {.grad_scale = factor};
    const struct zr_step_scalars *on_device = place(&scalars, NULL, sizeof scalars);
    must(dev->ops->scale(s, place_out(x, 4 * n), n, on_device));
    finish("scale");
}

static void gpu_update(const struct zr_update *u)
{
    struct zr_update on_device = *u;
    on_device.scalars = place(u->scalars, NULL, sizeof *u->scalars);
    if (u->master)
        on_device.master = place_out(u->master, 4 * u->n);
    if (u->remainder)
        on_device.remainder = place_out(u->remainder, 2 * u->n);
    on_device.grad = place(u->grad, NULL, u->n * zr_dtype_bytes(u->grad_dtype));
    if (u->param)
        on_device.param = place_out(u->param, u->n * zr_dtype_bytes(u->param_dtype));
    for (int i = 0; i < 2; i++)
        if (u->state[i])
            on_device.state[i] = place_out(u->state[i], u->n * zr_moments_bytes(u->moments));
    for (int i = 0; i < 2; i++)
        if (u->scale[i])
            on_device.scale[i] = place_out(u->scale[i], zr_q8_blocks(u->n) * 2);
    must(dev->ops->update(s, &on_device));
    finish("update");
}

static void gpu_add_rounded(uint16_t *dst, const float *src, int64_t n, const struct zr_rounding *rounding)
{
    const float *from = place(src, NULL, 4 * n);
    must(dev->ops->add_rounded(s, place_out(dst, 2 * n), from, n, rounding));
    finish("add_rounded");
}

/* Returns the operands on the device. */
static struct zr_coded place_coded(const struct zr_coded *c, int64_t n)
{
    struct zr_coded on_device = *c;
    on_device.at = place_out(c->at, n * zr_coding_bytes(c->coding));
    if (c->beside)
        on_device.beside = place_out(c->beside, zr_coding_bytes_beside(c->coding, n));
    return on_device;
}

static void gpu_encode(const struct zr_coded *to, const float *src, int64_t n)
{
    const struct zr_coded on_device = place_coded(to, n);
    must(dev->ops->encode(s, &on_device, place(src, NULL, 4 * n), n));
    finish("encode");
}

static void gpu_decode(float *dst, const struct zr_coded *from, int64_t n)
{
    const struct zr_coded on_device = place_coded(from, n);
    must(dev->ops->decode(s, place_out(dst, 4 * n), &on_device, n));
    finish("decode");
}

static const struct zr_host_kernels table = {.name = "gpu",
                                             .zero = gpu_zero,
                                             .copy = gpu_copy,
                                             .cast = gpu_cast,
                                             .sum_tree = gpu_sum_tree,
                                             .add = gpu_add,
                                             .sum_squares = gpu_sum_squares,
                                             .maximum = gpu_maximum,
                                             .digest = gpu_digest,
                                             .scale = gpu_scale,
                                             .update = gpu_update,
                                             .add_rounded = gpu_add_rounded,
                                             .encode = gpu_encode,
                                             .decode = gpu_decode};

const struct zr_host_kernels *zr_check_gpu_open(void)
{
    if (zr_cuda_device_open(0, &dev))
        return NULL;
    must(dev->ops->stream_open(dev, ZR_STREAM_QUEUE, "check", NULL, &s));
    return &table;
}

void zr_check_gpu_close(void)
{
    dev->ops->stream_close(s);
    dev->ops->close(dev);
}
