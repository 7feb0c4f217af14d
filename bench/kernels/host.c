/* SPDX-License-Identifier: Apache-2.0 */
/* host.c: measures the host's kernels and matrix products, and their limits.
 *
 * The limit of a kernel is a loop over the same arrays that computes almost nothing (stream_pass, limits.h).
 * The limit of a product is the fastest product of square matrices. Each round runs every kernel and its
 * limit once, both after an untimed pass over the same arrays, so that both find the caches in the same
 * state. Then it runs the products.
 *
 * A row is an entry of the table that is printed: first the kernels of stream_kernels, then two for each
 * optimizer, then the products. */
#include "bench/kernels/host.h"
#include "bench/kernels/limits.h"
#include "bench/random_bits.h"
#include "bench/report/report.h"
#include "bench/threads.h"
#include "kernels/alloc.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* N_WARM: rounds before the first that counts. */
enum { N_WARM = 2, N_SQUARES = 3, N_PRODUCTS = 2, N_STREAM_KERNELS = 8 };
enum { N_UPDATES = 2 * (ZR_OPTIMIZER_COUNT - 1), N_STREAMED = N_STREAM_KERNELS + N_UPDATES };
enum { N_ROWS = N_STREAMED + N_PRODUCTS };
/* The two limits of a kernel: on one thread, where the kernel runs too, and on all threads. */
enum { ON_ONE, ON_ALL, N_KERNEL_LIMITS };

static const int64_t square_sizes[N_SQUARES] = {512, 768, 1024};
static const enum zero_dtype product_dtypes[N_PRODUCTS] = {ZERO_F32, ZERO_BF16};

struct kernels_host {
    struct kernels_host_options o;
    const struct compute *compute;
    struct stream_arrays arrays;
    struct zr_step_scalars scalars;
    void *gemm_a, *gemm_b, *gemm_c; /* sized for the largest product */
    struct block {
        void *p;
        int64_t bytes;
    } blocks[16]; /* all memory, for kernels_host_close */
    int n_blocks;
    struct kernels_host_row rows[N_ROWS];
    /* (n_rounds) each. A product has a limit for each of square_sizes; a kernel has ON_ONE and ON_ALL. */
    double *seconds[N_ROWS], *limit[N_ROWS][N_SQUARES];
};

/* ---- kernels ---- */

static const struct {
    const char *name;
    enum stream_mix mix;
} stream_kernels[N_STREAM_KERNELS] = {
    {"copy", STREAM_COPY},
    {"cast f32 to bf16", STREAM_TO_BF16},
    {"cast bf16 to f32", STREAM_TO_F32},
    {"sum of squares", STREAM_READ},
    {"scale", STREAM_SCALE},
    {"add", STREAM_ADD},
    {"sum of 4, f32", STREAM_SUM_4_F32},
    {"sum of 4, bf16", STREAM_SUM_4_BF16},
};

static int run_kernel(struct kernels_host *h, enum stream_mix mix)
{
    const struct zr_device_ops *dev = h->compute->dev->ops;
    const struct stream_arrays *a = &h->arrays;
    struct zr_stream *s = h->compute->stream;
    struct zr_exact_sum sum = {0};
    int64_t n = h->o.n;
    switch (mix) {
    case STREAM_COPY:
        return dev->copy(s, a->written_f32, a->read_f32[0], n * 4);
    case STREAM_TO_BF16:
        return dev->cast(s, a->written_bf16, ZERO_BF16, a->read_f32[0], ZERO_F32, n);
    case STREAM_TO_F32:
        return dev->cast(s, a->written_f32, ZERO_F32, a->read_bf16[0], ZERO_BF16, n);
    case STREAM_READ:
        return dev->sum_squares(s, &sum, a->read_f32[0], ZERO_F32, n, NULL);
    case STREAM_SCALE:
        return dev->scale(s, a->updated[0], n, &h->scalars);
    case STREAM_ADD:
        return dev->add(s, a->updated[0], a->read_f32[0], ZERO_F32, n);
    case STREAM_SUM_4_F32:
        return dev->sum_tree(s, a->written_f32, (const void *const *)a->read_f32, LIMIT_MAX_READ, ZERO_F32, n,
                             false);
    default:
        return dev->sum_tree(s, a->written_f32, (const void *const *)a->read_bf16, LIMIT_MAX_READ, ZERO_BF16,
                             n, false);
    }
}

/* Row N_STREAM_KERNELS + 2 * i + b is the update of optimizer i + 1; if b is 1 it also writes bf16
 * weights. */
static enum zero_optimizer optimizer_of(int row)
{
    return (enum zero_optimizer)((row - N_STREAM_KERNELS) / 2 + 1);
}

static bool writes_bf16(int row)
{
    return (row - N_STREAM_KERNELS) % 2;
}

static enum stream_mix mix_of(int row)
{
    if (row < N_STREAM_KERNELS)
        return stream_kernels[row].mix;
    bool two = zr_optimizer_states(optimizer_of(row), 0.9f) == 2;
    return writes_bf16(row) ? two ? STREAM_UPDATE_2_BF16 : STREAM_UPDATE_1_BF16
           : two            ? STREAM_UPDATE_2
                            : STREAM_UPDATE_1;
}

static int run_update(struct kernels_host *h, int row)
{
    const struct stream_arrays *a = &h->arrays;
    struct zr_update u = {
        .kind = optimizer_of(row),
        .param_dtype = writes_bf16(row) ? ZERO_BF16 : ZERO_F32,
        .grad_dtype = ZERO_F32,
        .lr = 1e-6f,
        .beta1 = 0.9f,
        .beta2 = 0.95f,
        .eps = 1e-8f,
        .decay = 0.1f,
        .c1 = 0.1f,
        .c2 = 0.05f,
        .t = 2,
        .n = h->o.n,
        .master = a->updated[0],
        .param = writes_bf16(row) ? a->written_bf16 : NULL,
        .grad = a->read_f32[0],
        .state = {a->updated[1], zr_optimizer_states(optimizer_of(row), 0.9f) == 2 ? a->updated[2] : NULL},
        .scalars = &h->scalars,
    };
    return h->compute->dev->ops->update(h->compute->stream, &u);
}

/* A pass of the limit's loop, cut over all threads. */
static void pass_on_all(struct kernels_host *h, enum stream_mix mix)
{
    const struct compute *on = h->compute;
    IN_PARTS(on)
    {
        int64_t first = part_at(on, h->o.n, part);
        const struct stream_arrays mine = stream_from(&h->arrays, first);
        stream_pass(mix, &mine, part_at(on, h->o.n, part + 1) - first);
    }
}

/* Runs a kernel or an update, and its limits. A round below 0 is not kept. */
static int measure_streamed(struct kernels_host *h, int row, int64_t round)
{
    const enum stream_mix mix = mix_of(row);
    stream_pass(mix, &h->arrays, h->o.n);
    int64_t start = zr_now_ns();
    int err = row < N_STREAM_KERNELS ? run_kernel(h, mix) : run_update(h, row);
    int64_t between = zr_now_ns();
    stream_pass(mix, &h->arrays, h->o.n);
    int64_t end = zr_now_ns(), end_of_all = end;
    if (h->compute->n_threads > 1) {
        pass_on_all(h, mix);
        end_of_all = zr_now_ns();
    }
    if (round >= 0) {
        h->seconds[row][round] = (double)(between - start) * 1e-9;
        h->limit[row][ON_ONE][round] = (double)(end - between) * 1e-9;
        h->limit[row][ON_ALL][round] =
            h->compute->n_threads > 1 ? (double)(end_of_all - end) * 1e-9 : h->limit[row][ON_ONE][round];
    }
    return err;
}

/* ---- products ---- */

/* Times one product of (m, k) and (k, n) matrices. */
static int multiply(struct kernels_host *h, enum zero_dtype dtype, int64_t m, int64_t n, int64_t k,
                    double *seconds)
{
    const struct zr_gemm_args args = product_of(dtype, m, n, k, h->gemm_a, k, h->gemm_b, n, h->gemm_c, n);
    int64_t start = zr_now_ns();
    int err = zr_gemm_run(h->compute->gemm, &args);
    *seconds = (double)(zr_now_ns() - start) * 1e-9;
    return err;
}

/* Runs a product of the options' size, and the squares. A round below 0 is not kept. */
static int measure_product(struct kernels_host *h, int i, int64_t round)
{
    const int64_t *g = h->o.gemm;
    double seconds;
    int err = multiply(h, product_dtypes[i], g[0], g[1], g[2], &seconds);
    if (round >= 0)
        h->seconds[N_STREAMED + i][round] = seconds;
    for (int s = 0; s < N_SQUARES && !err; s++) {
        int64_t n = square_sizes[s];
        err = multiply(h, product_dtypes[i], n, n, n, &seconds);
        if (round >= 0)
            h->limit[N_STREAMED + i][s][round] = seconds;
    }
    return err;
}

static double flop(int64_t m, int64_t n, int64_t k)
{
    return 2.0 * (double)m * (double)n * (double)k;
}

/* ---- memory ---- */

/* Allocates memory that kernels_host_close frees. */
static int take(struct kernels_host *h, int64_t bytes, void **out)
{
    struct zr_device *dev = h->compute->dev;
    int err = dev->ops->alloc(dev, bytes, out);
    if (!err)
        h->blocks[h->n_blocks++] = (struct block){*out, bytes};
    return err;
}

/* Fills memory with numbers from 1/2 to 1. Both halves of each float are such numbers in bf16, too. So
 * nothing is subnormal, which is slow on some CPUs, nothing overflows, and no second moment is negative. */
static int take_numbers(struct kernels_host *h, int64_t bytes, void **out)
{
    int err = take(h, bytes, out);
    for (int64_t i = 0; i < bytes / 2 && !err; i++)
        ((uint16_t *)*out)[i] = (uint16_t)(0x3f00 | (random_bits((uint64_t)i) & 0x7f));
    return err;
}

static int64_t larger(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

static int open_arrays(struct kernels_host *h)
{
    const int64_t f32 = 4 * h->o.n;
    int err = 0;
    struct stream_arrays *a = &h->arrays;
    for (int i = 0; i < LIMIT_MAX_READ && !err; i++)
        err = take_numbers(h, f32, (void **)&a->read_f32[i]);
    /* The bf16 inputs share these arrays' memory. */
    for (int i = 0; i < LIMIT_MAX_READ && !err; i++)
        a->read_bf16[i] = (const uint16_t *)a->read_f32[i];
    for (int i = 0; i < LIMIT_MAX_UPDATED && !err; i++)
        err = take_numbers(h, f32, (void **)&a->updated[i]);
    err = err ? err : take_numbers(h, f32, (void **)&a->written_f32);
    return err ? err : take_numbers(h, f32 / 2, (void **)&a->written_bf16);
}

static int open_products(struct kernels_host *h)
{
    const int64_t *g = h->o.gemm, square = square_sizes[N_SQUARES - 1] * square_sizes[N_SQUARES - 1];
    int err = take_numbers(h, 4 * larger(square, g[0] * g[2]), &h->gemm_a);
    err = err ? err : take_numbers(h, 4 * larger(square, g[2] * g[1]), &h->gemm_b);
    return err ? err : take_numbers(h, 4 * larger(square, g[0] * g[1]), &h->gemm_c);
}

static int open_times(struct kernels_host *h)
{
    for (int row = 0; row < N_ROWS; row++) {
        for (int k = -1; k < (row < N_STREAMED ? N_KERNEL_LIMITS : N_SQUARES); k++) {
            double **to = k < 0 ? &h->seconds[row] : &h->limit[row][k];
            ZR_TRY(ZR_ZALLOC(*to, h->o.n_rounds, "%lld times", (long long)h->o.n_rounds));
        }
    }
    return 0;
}

/* ---- results ---- */

/* Fills in a row of the table from the medians. */
static void finish_streamed(struct kernels_host *h, int row)
{
    struct kernels_host_row *r = &h->rows[row];
    if (row < N_STREAM_KERNELS)
        snprintf(r->name, sizeof r->name, "%s", stream_kernels[row].name);
    else
        snprintf(r->name, sizeof r->name, "%s %s", zr_optimizer_kind(optimizer_of(row))->name,
                 writes_bf16(row) ? "bf16" : "f32");
    r->bytes = stream_bytes(mix_of(row));
    r->rate = (double)(r->bytes * h->o.n) / report_median(h->seconds[row], h->o.n_rounds);
    r->limit = (double)(r->bytes * h->o.n) / report_median(h->limit[row][ON_ONE], h->o.n_rounds);
    r->limit_of_all = (double)(r->bytes * h->o.n) / report_median(h->limit[row][ON_ALL], h->o.n_rounds);
}

static void finish_product(struct kernels_host *h, int i)
{
    const int row = N_STREAMED + i;
    const int64_t *g = h->o.gemm;
    struct kernels_host_row *r = &h->rows[row];
    snprintf(r->name, sizeof r->name, "product %s", zr_dtype_name(product_dtypes[i]));
    r->rate = flop(g[0], g[1], g[2]) / report_median(h->seconds[row], h->o.n_rounds);
    for (int s = 0; s < N_SQUARES; s++) {
        int64_t n = square_sizes[s];
        double rate = flop(n, n, n) / report_median(h->limit[row][s], h->o.n_rounds);
        r->limit = rate > r->limit ? rate : r->limit;
    }
    r->limit_of_all = r->limit;
}

int kernels_host_measure(struct kernels_host **out, const struct compute *compute,
                         const struct kernels_host_options *o)
{
    struct kernels_host *h;
    *out = NULL;
    ZR_TRY(ZR_ZALLOC(h, 1, "%zu bytes", sizeof *h));
    h->o = *o;
    h->compute = compute;
    h->scalars = (struct zr_step_scalars){.grad_scale = 1.0f + 0x1p-23f}; /* a factor of 1 would be skipped */
    int err = open_arrays(h);
    err = err ? err : open_products(h);
    err = err ? err : open_times(h);
    for (int64_t round = -N_WARM; round < o->n_rounds && !err; round++) {
        for (int row = 0; row < N_STREAMED && !err; row++)
            err = measure_streamed(h, row, round);
        for (int i = 0; i < N_PRODUCTS && !err; i++)
            err = measure_product(h, i, round);
    }
    if (err) {
        kernels_host_close(h);
        return err;
    }
    for (int row = 0; row < N_STREAMED; row++)
        finish_streamed(h, row);
    for (int i = 0; i < N_PRODUCTS; i++)
        finish_product(h, i);
    *out = h;
    return 0;
}

const struct kernels_host_row *kernels_host_row(const struct kernels_host *h, const char *name)
{
    int row = 0;
    while (row + 1 < N_ROWS && strcmp(h->rows[row].name, name) != 0)
        row++;
    return &h->rows[row];
}

void kernels_host_print(const struct kernels_host *h)
{
    printf("%-18s %13s %17s %17s %9s\n", "", "bytes/element", "measured", "limit", "of limit");
    for (int row = 0; row < N_ROWS; row++) {
        const struct kernels_host_row *r = &h->rows[row];
        const char *unit = r->bytes ? "GB/s" : "GFLOP/s";
        char bytes[24] = "";
        if (r->bytes)
            snprintf(bytes, sizeof bytes, "%lld", (long long)r->bytes);
        printf("%-18s %13s %9.1f %-7s %9.1f %-7s %8.0f%%\n", r->name, bytes, r->rate * 1e-9, unit,
               r->limit * 1e-9, unit, 100 * r->rate / r->limit);
    }
    printf("limit: a loop that reads and writes the same arrays and computes next to nothing; of products,\n"
           "the best of squares of 512, 768 and 1024; products on all threads, the rest on one\n");
}

json_t *kernels_host_json(const struct kernels_host *h)
{
    json_t *list = json_array();
    for (int row = 0; row < N_ROWS; row++) {
        const struct kernels_host_row *r = &h->rows[row];
        json_array_append_new(
            list, json_pack("{s:s, s:I, s:s, s:o, s:o, s:o}", "name", r->name, "bytes_per_element",
                            (json_int_t)r->bytes, "unit", r->bytes ? "GB/s" : "GFLOP/s", "measured",
                            report_number(r->rate * 1e-9), "limit", report_number(r->limit * 1e-9),
                            "of_limit", report_number(r->rate / r->limit)));
    }
    return list;
}

void kernels_host_close(struct kernels_host *h)
{
    if (!h)
        return;
    for (int i = 0; i < h->n_blocks; i++)
        h->compute->dev->ops->free(h->compute->dev, h->blocks[i].p, h->blocks[i].bytes);
    for (int row = 0; row < N_ROWS; row++) {
        free(h->seconds[row]);
        for (int s = 0; s < N_SQUARES; s++)
            free(h->limit[row][s]);
    }
    free(h);
}
