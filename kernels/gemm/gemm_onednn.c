/* SPDX-License-Identifier: Apache-2.0 */
/* gemm_onednn.c: matrix products through oneDNN's matmul primitive.
 *
 * Primitives are kept by shape, strides and types (gemm_cache.h), so that after the first call of a shape
 * only pointers change. All primitives share one scratch buffer, as large as the largest request. If the CPU
 * has no bf16 products (oneDNN needs AVX-512), the matrices are widened to f32, multiplied, and rounded
 * once. */
#include "kernels/alloc.h"
#include "kernels/gemm/gemm.h"
#include "kernels/gemm/gemm_cache.h"
#include "kernels/gemm/onednn_api.h"

#include <stdlib.h>
#include <string.h>

/* Functions of the OpenMP runtime that oneDNN uses. They are declared here because a compiler may bring the
 * omp.h of another runtime. */
void omp_set_num_threads(int n);
int omp_get_max_threads(void);

enum { A, B, BIAS, C, SCRATCH, N_OPERANDS };

struct product {
    struct zr_gemm_prepared base;
    bool widen; /* there is no primitive; see run_widened */
    dnnl_primitive_t primitive;
    dnnl_memory_t memory[N_OPERANDS]; /* NULL: not used */
};

struct buffer {
    void *p;
    size_t bytes;
};

struct host_gemm {
    struct zr_gemm base;
    int n_threads;
    const struct zr_host_kernels *kernels;
    dnnl_engine_t engine;
    dnnl_stream_t stream;
    struct zr_gemm_cache cache;
    struct buffer scratch; /* scratch memory of oneDNN */
    struct buffer bias;    /* a bias widened to f32 */
    struct buffer wide;    /* f32 copies of A, B and C */
};

static int gemm_error(dnnl_status_t status, const char *what)
{
    switch (status) {
    case dnnl_success:
        return 0;
    case dnnl_out_of_memory:
        return zr_fail(ZERO_ERR_NOMEM, "gemm: oneDNN is out of memory at %s", what);
    case dnnl_unimplemented:
        return zr_fail(ZERO_ERR_NOTSUP, "gemm: oneDNN has no %s for this product on this CPU", what);
    default:
        return zr_fail(ZERO_ERR_SYSTEM, "gemm: oneDNN gives status %d at %s", (int)status, what);
    }
}

static int buffer_reserve(struct buffer *b, size_t bytes)
{
    if (bytes <= b->bytes)
        return 0;
    void *p = NULL;
    if (posix_memalign(&p, 4096, bytes) != 0)
        return zr_fail(ZERO_ERR_NOMEM, "gemm: no memory for %zu bytes of scratch", bytes);
    free(b->p);
    *b = (struct buffer){p, bytes};
    return 0;
}

static dnnl_data_type_t data_type(enum zero_dtype t)
{
    return t == ZERO_F32 ? dnnl_f32 : dnnl_bf16;
}

static void product_free(struct zr_gemm_prepared *base)
{
    struct product *p = (struct product *)base;
    for (int i = 0; i < N_OPERANDS; i++)
        if (p->memory[i])
            dnnl_memory_destroy(p->memory[i]);
    if (p->primitive)
        dnnl_primitive_destroy(p->primitive);
    free(p);
}

/* Describes a matrix of rows x columns, or a batch of them. row and column are strides in elements. */
static dnnl_status_t describe(onednn_desc *d, const struct zr_gemm_key *k, int64_t n_batch, int64_t rows,
                              int64_t columns, int64_t batch, int64_t row, int64_t column,
                              enum zero_dtype type)
{
    dnnl_dims_t dims = {n_batch, rows, columns}, strides = {batch, row, column};
    int skip = k->n_batch > 1 ? 0 : 1; /* a single product has two dimensions */
    return onednn_desc_make(d, 3 - skip, dims + skip, data_type(type), strides + skip);
}

static dnnl_status_t make_attr(dnnl_primitive_attr_t *attr, const struct zr_gemm_key *k)
{
    dnnl_status_t s = dnnl_primitive_attr_create(attr);
    if (s != dnnl_success)
        return s;
    s = dnnl_primitive_attr_set_scratchpad_mode(*attr, dnnl_scratchpad_mode_user);
    if (s == dnnl_success && k->beta) {
        dnnl_post_ops_t ops = NULL;
        s = dnnl_post_ops_create(&ops);
        if (s == dnnl_success)
            s = onednn_append_sum(ops, data_type((enum zero_dtype)k->c_dtype));
        if (s == dnnl_success)
            s = dnnl_primitive_attr_set_post_ops(*attr, ops);
        if (ops)
            dnnl_post_ops_destroy(ops);
    }
    return s;
}

/* Makes p's primitive and memory objects. *scratch_bytes is what the primitive asks for. On failure p holds
 * what must be freed. */
static dnnl_status_t product_build(struct host_gemm *g, struct product *p, size_t *scratch_bytes)
{
    const struct zr_gemm_key *k = &p->base.key;
    const enum zero_dtype ab = (enum zero_dtype)k->ab_dtype, c = (enum zero_dtype)k->c_dtype;
    onednn_desc desc[4];
    dnnl_primitive_attr_t attr = NULL;
    dnnl_primitive_desc_t pd = NULL;
    memset(desc, 0, sizeof desc);

    dnnl_status_t s = describe(&desc[A], k, k->n_batch, k->m, k->k, k->stride_a, k->trans_a ? 1 : k->lda,
                               k->trans_a ? k->lda : 1, ab);
    if (s == dnnl_success)
        s = describe(&desc[B], k, k->n_batch, k->k, k->n, k->stride_b, k->trans_b ? 1 : k->ldb,
                     k->trans_b ? k->ldb : 1, ab);
    if (s == dnnl_success && k->has_bias)
        s = describe(&desc[BIAS], k, 1, 1, k->n, k->n, k->n, 1, ZERO_F32);
    if (s == dnnl_success)
        s = describe(&desc[C], k, k->n_batch, k->m, k->n, k->stride_c, k->ldc, 1, c);
    if (s == dnnl_success)
        s = make_attr(&attr, k);
    if (s == dnnl_success)
        s = onednn_matmul_desc(&pd, g->engine, &desc[A], &desc[B], &desc[BIAS], &desc[C], attr);
    if (s == dnnl_success)
        s = dnnl_primitive_create(&p->primitive, pd);
    for (int i = 0; i < 4 && s == dnnl_success; i++)
        if (i != BIAS || k->has_bias)
            s = dnnl_memory_create(&p->memory[i], onednn_desc_get(&desc[i]), g->engine, DNNL_MEMORY_NONE);
    if (s == dnnl_success) {
        onednn_desc_ref scratch = dnnl_primitive_desc_query_md(pd, dnnl_query_scratchpad_md, 0);
        *scratch_bytes = scratch ? dnnl_memory_desc_get_size(scratch) : 0;
        if (*scratch_bytes)
            s = dnnl_memory_create(&p->memory[SCRATCH], scratch, g->engine, DNNL_MEMORY_NONE);
    }
    if (pd)
        dnnl_primitive_desc_destroy(pd);
    if (attr)
        dnnl_primitive_attr_destroy(attr);
    for (int i = 0; i < 4; i++)
        onednn_desc_free(&desc[i]);
    return s;
}

static int product_get(struct host_gemm *g, const struct zr_gemm_key *k, struct product **out)
{
    *out = (struct product *)zr_gemm_cache_find(&g->cache, k);
    if (*out)
        return 0;
    struct product *p;
    ZR_TRY(ZR_ZALLOC(p, 1, "a plan of oneDNN"));
    p->base.key = *k;
    size_t scratch_bytes = 0;
    dnnl_status_t s = product_build(g, p, &scratch_bytes);
    if (s == dnnl_unimplemented && k->ab_dtype == ZERO_BF16) {
        p->widen = true;
        s = dnnl_success;
    }
    int err = gemm_error(s, "matmul");
    if (!err)
        err = buffer_reserve(&g->scratch, scratch_bytes);
    if (!err)
        err = zr_gemm_cache_add(&g->cache, &p->base);
    if (err)
        product_free(&p->base);
    else
        *out = p;
    return err;
}

/* --- running --- */

static int check_host(const struct zr_gemm_args *a)
{
    if (a->ab_dtype == ZERO_F16 || (a->bias && a->bias_dtype == ZERO_F16))
        return zr_fail(ZERO_ERR_NOTSUP, "gemm: the host multiplies f32 and bf16, not f16");
    if (a->epilogue != ZR_GEMM_PLAIN)
        return zr_fail(ZERO_ERR_NOTSUP, "gemm: epilogue %d is not supported on the host", (int)a->epilogue);
    return 0;
}

static bool host_can(struct zr_gemm *base, const struct zr_gemm_args *a)
{
    (void)base;
    return !check_host(a);
}

static int run_primitive(struct host_gemm *g, struct product *p, const struct zr_gemm_args *a,
                         const void *bias)
{
    /* oneDNN takes pointers without const, also to memory that it only reads. */
    void *data[N_OPERANDS] = {(void *)(uintptr_t)a->a, (void *)(uintptr_t)a->b, (void *)(uintptr_t)bias, a->c,
                              g->scratch.p};
    static const int names[N_OPERANDS] = {DNNL_ARG_SRC, DNNL_ARG_WEIGHTS, DNNL_ARG_BIAS, DNNL_ARG_DST,
                                          DNNL_ARG_SCRATCHPAD};
    dnnl_exec_arg_t args[N_OPERANDS];
    int n = 0;
    dnnl_status_t s = dnnl_success;
    for (int i = 0; i < N_OPERANDS && s == dnnl_success; i++) {
        if (!p->memory[i])
            continue;
        s = dnnl_memory_set_data_handle(p->memory[i], data[i]);
        args[n++] = (dnnl_exec_arg_t){names[i], p->memory[i]};
    }
    if (s == dnnl_success)
        s = dnnl_primitive_execute(p->primitive, g->stream, n, args);
    if (s == dnnl_success)
        s = dnnl_stream_wait(g->stream);
    return gemm_error(s, "execution");
}

/* Copies a batch of rows x columns between a strided matrix and a dense one, converting on the way. */
static void convert(struct host_gemm *g, void *dst, enum zero_dtype dt, int64_t dst_batch, int64_t dst_row,
                    const void *src, enum zero_dtype st, int64_t src_batch, int64_t src_row, int64_t n_batch,
                    int64_t rows, int64_t columns)
{
    for (int64_t b = 0; b < n_batch; b++)
        for (int64_t r = 0; r < rows; r++)
            g->kernels->cast((char *)dst + (b * dst_batch + r * dst_row) * zr_dtype_bytes(dt), dt,
                             (const char *)src + (b * src_batch + r * src_row) * zr_dtype_bytes(st), st,
                             columns);
}

static int run_with_bias(struct host_gemm *g, const struct zr_gemm_args *a, const void *bias);

static int run_widened(struct host_gemm *g, const struct zr_gemm_args *a, const void *bias)
{
    int64_t rows_a = a->trans_a ? a->k : a->m, columns_a = a->trans_a ? a->m : a->k;
    int64_t rows_b = a->trans_b ? a->n : a->k, columns_b = a->trans_b ? a->k : a->n;
    int64_t n_a = rows_a * columns_a, n_b = rows_b * columns_b, n_c = a->m * a->n;
    ZR_TRY(buffer_reserve(&g->wide, (size_t)(a->n_batch * (n_a + n_b + n_c)) * sizeof(float)));
    float *wa = g->wide.p, *wb = wa + a->n_batch * n_a, *wc = wb + a->n_batch * n_b;
    convert(g, wa, ZERO_F32, n_a, columns_a, a->a, a->ab_dtype, a->stride_a, a->lda, a->n_batch, rows_a,
            columns_a);
    convert(g, wb, ZERO_F32, n_b, columns_b, a->b, a->ab_dtype, a->stride_b, a->ldb, a->n_batch, rows_b,
            columns_b);
    if (a->beta != 0)
        convert(g, wc, ZERO_F32, n_c, a->n, a->c, a->c_dtype, a->stride_c, a->ldc, a->n_batch, a->m, a->n);
    struct zr_gemm_args f = *a;
    f.ab_dtype = f.c_dtype = ZERO_F32;
    f.a = wa, f.b = wb, f.c = wc;
    f.lda = columns_a, f.ldb = columns_b, f.ldc = a->n;
    f.stride_a = n_a, f.stride_b = n_b, f.stride_c = n_c;
    ZR_TRY(run_with_bias(g, &f, bias));
    convert(g, a->c, a->c_dtype, a->stride_c, a->ldc, wc, ZERO_F32, n_c, a->n, a->n_batch, a->m, a->n);
    return 0;
}

/* bias has f32 elements, or is NULL. */
static int run_with_bias(struct host_gemm *g, const struct zr_gemm_args *a, const void *bias)
{
    struct zr_gemm_key k = zr_gemm_key_of(a);
    k.has_bias = bias != NULL;
    struct product *p;
    ZR_TRY(product_get(g, &k, &p));
    return p->widen ? run_widened(g, a, bias) : run_primitive(g, p, a, bias);
}

static int host_run(struct zr_gemm *base, const struct zr_gemm_args *a)
{
    struct host_gemm *g = (struct host_gemm *)base;
    ZR_TRY(check_host(a));
    const void *bias = a->bias;
    if (bias && a->bias_dtype != ZERO_F32) {
        ZR_TRY(buffer_reserve(&g->bias, (size_t)a->n * sizeof(float)));
        g->kernels->cast(g->bias.p, ZERO_F32, bias, a->bias_dtype, a->n);
        bias = g->bias.p;
    }
    /* The team size belongs to the calling thread. It is also read when a primitive is made. */
    int before = omp_get_max_threads();
    if (before != g->n_threads)
        omp_set_num_threads(g->n_threads);
    int err = run_with_bias(g, a, bias);
    if (before != g->n_threads)
        omp_set_num_threads(before);
    return err;
}

static void host_close(struct zr_gemm *base)
{
    struct host_gemm *g = (struct host_gemm *)base;
    zr_gemm_cache_close(&g->cache, product_free);
    if (g->stream)
        dnnl_stream_destroy(g->stream);
    if (g->engine)
        dnnl_engine_destroy(g->engine);
    free(g->scratch.p);
    free(g->bias.p);
    free(g->wide.p);
    free(g);
}

static const struct zr_gemm_ops host_ops = {.close = host_close, .run = host_run, .can = host_can};

int zr_gemm_open(int n_threads, struct zr_gemm **out)
{
    *out = NULL;
    if (n_threads < 1)
        return zr_fail(ZERO_ERR_ARG, "gemm: n_threads is %d, must be at least 1", n_threads);
    struct host_gemm *g;
    ZR_TRY(ZR_ZALLOC(g, 1, "matrix products"));
    g->base.ops = &host_ops;
    g->n_threads = n_threads;
    g->kernels = zr_host_kernels_best();
    int err = zr_gemm_cache_open(&g->cache);
    if (!err) {
        dnnl_status_t s = dnnl_engine_create(&g->engine, dnnl_cpu, 0);
        if (s == dnnl_success)
            s = dnnl_stream_create(&g->stream, g->engine, dnnl_stream_default_flags);
        err = gemm_error(s, "opening");
    }
    if (err) {
        host_close(&g->base);
        return err;
    }
    *out = &g->base;
    return 0;
}
