/* gemm_onednn.c: matrix products through oneDNN's matmul primitive.
 *
 * A product's shape, strides and types make the key of a table of primitives, so that after the first call of
 * a shape only pointers change. Scratch memory is one buffer as large as the hungriest primitive asks for.
 * Where the CPU has no bf16 products (oneDNN wants AVX-512), the matrices are widened to f32, multiplied, and
 * rounded once. */
#include "kernels/gemm.h"
#include "kernels/onednn_api.h"

#include <stdlib.h>
#include <string.h>

/* Of the OpenMP runtime that oneDNN uses; declared here because a compiler may bring another runtime's omp.h.
 */
void omp_set_num_threads(int n);
int omp_get_max_threads(void);

/* Everything a primitive depends on; plain numbers without padding, compared and hashed as bytes. */
struct key {
    int64_t m, n, k, lda, ldb, ldc, n_batch, stride_a, stride_b, stride_c;
    int32_t trans_a, trans_b, ab_dtype, c_dtype, has_bias, beta;
};

_Static_assert(sizeof(struct key) == 10 * 8 + 6 * 4, "a key has no padding to compare");

enum { A, B, BIAS, C, SCRATCH, N_OPERANDS };

struct product {
    struct key key;
    uint64_t hash;
    bool widen; /* no primitive: see run_widened */
    dnnl_primitive_t primitive;
    dnnl_memory_t memory[N_OPERANDS]; /* NULL: not used */
};

struct buffer {
    void *p;
    size_t bytes;
};

struct zr_gemm {
    int n_threads;
    const struct zr_host_kernels *kernels;
    dnnl_engine_t engine;
    dnnl_stream_t stream;
    struct product **table; /* open addressing, at most half full */
    size_t n_places, n_used;
    struct buffer scratch; /* of oneDNN */
    struct buffer bias;    /* a bias widened to f32 */
    struct buffer wide;    /* f32 copies of A, B and C */
};

static int gemm_error(dnnl_status_t status, const char *what)
{
    switch (status) {
    case dnnl_success:
        return 0;
    case dnnl_out_of_memory:
        return zr_fail(ZR_ERR_NOMEM, "gemm: oneDNN is out of memory at %s", what);
    case dnnl_unimplemented:
        return zr_fail(ZR_ERR_NOTSUP, "gemm: oneDNN has no %s for this product on this CPU", what);
    default:
        return zr_fail(ZR_ERR_SYSTEM, "gemm: oneDNN gives status %d at %s", (int)status, what);
    }
}

static int buffer_reserve(struct buffer *b, size_t bytes)
{
    if (bytes <= b->bytes)
        return 0;
    void *p = NULL;
    if (posix_memalign(&p, 4096, bytes) != 0)
        return zr_fail(ZR_ERR_NOMEM, "gemm: no memory for %zu bytes of scratch", bytes);
    free(b->p);
    *b = (struct buffer){p, bytes};
    return 0;
}

static dnnl_data_type_t data_type(enum zr_dtype t)
{
    return t == ZR_F32 ? dnnl_f32 : dnnl_bf16;
}

static void product_free(struct product *p)
{
    if (!p)
        return;
    for (int i = 0; i < N_OPERANDS; i++)
        if (p->memory[i])
            dnnl_memory_destroy(p->memory[i]);
    if (p->primitive)
        dnnl_primitive_destroy(p->primitive);
    free(p);
}

/* A matrix of rows x columns, or a batch of them. row and column: the strides, in elements. */
static dnnl_status_t describe(onednn_desc *d, const struct key *k, int64_t n_batch, int64_t rows,
                              int64_t columns, int64_t batch, int64_t row, int64_t column, enum zr_dtype type)
{
    dnnl_dims_t dims = {n_batch, rows, columns}, strides = {batch, row, column};
    int skip = k->n_batch > 1 ? 0 : 1; /* a single product has two dimensions */
    return onednn_desc_make(d, 3 - skip, dims + skip, data_type(type), strides + skip);
}

static dnnl_status_t make_attr(dnnl_primitive_attr_t *attr, const struct key *k)
{
    dnnl_status_t s = dnnl_primitive_attr_create(attr);
    if (s != dnnl_success)
        return s;
    s = dnnl_primitive_attr_set_scratchpad_mode(*attr, dnnl_scratchpad_mode_user);
    if (s == dnnl_success && k->beta) {
        dnnl_post_ops_t ops = NULL;
        s = dnnl_post_ops_create(&ops);
        if (s == dnnl_success)
            s = onednn_append_sum(ops, data_type((enum zr_dtype)k->c_dtype));
        if (s == dnnl_success)
            s = dnnl_primitive_attr_set_post_ops(*attr, ops);
        if (ops)
            dnnl_post_ops_destroy(ops);
    }
    return s;
}

/* Makes p's primitive and memory objects; scratch_bytes is what the primitive asks for. On failure p holds
 * what there is to free. */
static dnnl_status_t product_build(struct zr_gemm *g, struct product *p, size_t *scratch_bytes)
{
    const struct key *k = &p->key;
    const enum zr_dtype ab = (enum zr_dtype)k->ab_dtype, c = (enum zr_dtype)k->c_dtype;
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
        s = describe(&desc[BIAS], k, 1, 1, k->n, k->n, k->n, 1, ZR_F32);
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

/* --- the table --- */

static uint64_t hash_key(const struct key *k)
{
    /* FNV-1a over the words: keys are few and read once per product. */
    const unsigned char *bytes = (const unsigned char *)k;
    uint64_t h = UINT64_C(0xcbf29ce484222325);
    for (size_t i = 0; i < sizeof *k; i += 8) {
        uint64_t word;
        memcpy(&word, bytes + i, 8);
        h = (h ^ word) * UINT64_C(0x100000001b3);
        h ^= h >> 29;
    }
    return h;
}

static struct product **table_find(struct zr_gemm *g, const struct key *k, uint64_t hash)
{
    size_t i = hash & (g->n_places - 1);
    while (g->table[i] && (g->table[i]->hash != hash || memcmp(&g->table[i]->key, k, sizeof *k) != 0))
        i = (i + 1) & (g->n_places - 1);
    return &g->table[i];
}

static int table_grow(struct zr_gemm *g)
{
    struct product **old = g->table;
    size_t n_old = g->n_places;
    struct product **table = calloc(2 * n_old, sizeof *table);
    if (!table)
        return zr_fail(ZR_ERR_NOMEM, "gemm: no memory for a table of %zu products", 2 * n_old);
    g->table = table;
    g->n_places = 2 * n_old;
    for (size_t i = 0; i < n_old; i++)
        if (old[i])
            *table_find(g, &old[i]->key, old[i]->hash) = old[i];
    free(old);
    return 0;
}

static int product_get(struct zr_gemm *g, const struct key *k, struct product **out)
{
    uint64_t hash = hash_key(k);
    *out = *table_find(g, k, hash);
    if (*out)
        return 0;
    if (2 * (g->n_used + 1) > g->n_places) {
        int err = table_grow(g);
        if (err)
            return err;
    }
    struct product *p = calloc(1, sizeof *p);
    if (!p)
        return zr_fail(ZR_ERR_NOMEM, "gemm: no memory for %zu bytes", sizeof *p);
    p->key = *k;
    p->hash = hash;
    size_t scratch_bytes = 0;
    dnnl_status_t s = product_build(g, p, &scratch_bytes);
    if (s == dnnl_unimplemented && k->ab_dtype == ZR_BF16) {
        p->widen = true;
        s = dnnl_success;
    }
    int err = gemm_error(s, "matmul");
    if (!err)
        err = buffer_reserve(&g->scratch, scratch_bytes);
    if (err) {
        product_free(p);
        return err;
    }
    *table_find(g, k, hash) = p;
    g->n_used++;
    *out = p;
    return 0;
}

/* --- running --- */

static int check_args(const struct zr_gemm_args *a)
{
    if (a->m < 1 || a->n < 1 || a->k < 1 || a->n_batch < 1)
        return zr_fail(ZR_ERR_ARG,
                       "gemm: m, n, k, n_batch are %lld, %lld, %lld, %lld, all must be at least 1",
                       (long long)a->m, (long long)a->n, (long long)a->k, (long long)a->n_batch);
    if ((a->ab_dtype != ZR_F32 && a->ab_dtype != ZR_BF16) ||
        (a->c_dtype != ZR_F32 && a->c_dtype != a->ab_dtype) ||
        (a->bias && a->bias_dtype != ZR_F32 && a->bias_dtype != ZR_BF16))
        return zr_fail(
            ZR_ERR_NOTSUP,
            "gemm: dtypes are %s x %s -> %s, bias %s; allowed are f32 -> f32, bf16 -> bf16 or f32, and a "
            "bias of f32 or bf16",
            zr_dtype_name(a->ab_dtype), zr_dtype_name(a->ab_dtype), zr_dtype_name(a->c_dtype),
            a->bias ? zr_dtype_name(a->bias_dtype) : "none");
    if (a->beta != 0 && a->beta != 1)
        return zr_fail(ZR_ERR_ARG, "gemm: beta is %g, must be 0 or 1", (double)a->beta);
    int64_t lda = a->trans_a ? a->m : a->k, ldb = a->trans_b ? a->k : a->n;
    if (a->lda < lda || a->ldb < ldb || a->ldc < a->n)
        return zr_fail(ZR_ERR_ARG,
                       "gemm: lda, ldb, ldc are %lld, %lld, %lld, must be at least %lld, %lld, %lld",
                       (long long)a->lda, (long long)a->ldb, (long long)a->ldc, (long long)lda,
                       (long long)ldb, (long long)a->n);
    return 0;
}

static int run_primitive(struct zr_gemm *g, struct product *p, const struct zr_gemm_args *a, const void *bias)
{
    /* oneDNN takes pointers to what it only reads without const. */
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
static void convert(struct zr_gemm *g, void *dst, enum zr_dtype dt, int64_t dst_batch, int64_t dst_row,
                    const void *src, enum zr_dtype st, int64_t src_batch, int64_t src_row, int64_t n_batch,
                    int64_t rows, int64_t columns)
{
    for (int64_t b = 0; b < n_batch; b++)
        for (int64_t r = 0; r < rows; r++)
            g->kernels->cast((char *)dst + (b * dst_batch + r * dst_row) * zr_dtype_bytes(dt), dt,
                             (const char *)src + (b * src_batch + r * src_row) * zr_dtype_bytes(st), st,
                             columns);
}

static int run_with_bias(struct zr_gemm *g, const struct zr_gemm_args *a, const void *bias);

static int run_widened(struct zr_gemm *g, const struct zr_gemm_args *a, const void *bias)
{
    int64_t rows_a = a->trans_a ? a->k : a->m, columns_a = a->trans_a ? a->m : a->k;
    int64_t rows_b = a->trans_b ? a->n : a->k, columns_b = a->trans_b ? a->k : a->n;
    int64_t n_a = rows_a * columns_a, n_b = rows_b * columns_b, n_c = a->m * a->n;
    int err = buffer_reserve(&g->wide, (size_t)(a->n_batch * (n_a + n_b + n_c)) * sizeof(float));
    if (err)
        return err;
    float *wa = g->wide.p, *wb = wa + a->n_batch * n_a, *wc = wb + a->n_batch * n_b;
    convert(g, wa, ZR_F32, n_a, columns_a, a->a, a->ab_dtype, a->stride_a, a->lda, a->n_batch, rows_a,
            columns_a);
    convert(g, wb, ZR_F32, n_b, columns_b, a->b, a->ab_dtype, a->stride_b, a->ldb, a->n_batch, rows_b,
            columns_b);
    if (a->beta != 0)
        convert(g, wc, ZR_F32, n_c, a->n, a->c, a->c_dtype, a->stride_c, a->ldc, a->n_batch, a->m, a->n);
    struct zr_gemm_args f = *a;
    f.ab_dtype = f.c_dtype = ZR_F32;
    f.a = wa, f.b = wb, f.c = wc;
    f.lda = columns_a, f.ldb = columns_b, f.ldc = a->n;
    f.stride_a = n_a, f.stride_b = n_b, f.stride_c = n_c;
    err = run_with_bias(g, &f, bias);
    if (!err)
        convert(g, a->c, a->c_dtype, a->stride_c, a->ldc, wc, ZR_F32, n_c, a->n, a->n_batch, a->m, a->n);
    return err;
}

/* bias is f32 or NULL. */
static int run_with_bias(struct zr_gemm *g, const struct zr_gemm_args *a, const void *bias)
{
    bool batch = a->n_batch > 1;
    struct key k = {
        .m = a->m,
        .n = a->n,
        .k = a->k,
        .lda = a->lda,
        .ldb = a->ldb,
        .ldc = a->ldc,
        .n_batch = a->n_batch,
        .stride_a = batch ? a->stride_a : 0,
        .stride_b = batch ? a->stride_b : 0,
        .stride_c = batch ? a->stride_c : 0,
        .trans_a = a->trans_a,
        .trans_b = a->trans_b,
        .ab_dtype = (int32_t)a->ab_dtype,
        .c_dtype = (int32_t)a->c_dtype,
        .has_bias = bias != NULL,
        .beta = a->beta != 0,
    };
    struct product *p;
    int err = product_get(g, &k, &p);
    if (err)
        return err;
    return p->widen ? run_widened(g, a, bias) : run_primitive(g, p, a, bias);
}

int zr_gemm_run(struct zr_gemm *g, const struct zr_gemm_args *a)
{
    int err = check_args(a);
    if (err)
        return err;
    const void *bias = a->bias;
    if (bias && a->bias_dtype != ZR_F32) {
        err = buffer_reserve(&g->bias, (size_t)a->n * sizeof(float));
        if (err)
            return err;
        g->kernels->cast(g->bias.p, ZR_F32, bias, a->bias_dtype, a->n);
        bias = g->bias.p;
    }
    /* The team size is a property of the calling thread, also read when a primitive is made. */
    int before = omp_get_max_threads();
    if (before != g->n_threads)
        omp_set_num_threads(g->n_threads);
    err = run_with_bias(g, a, bias);
    if (before != g->n_threads)
        omp_set_num_threads(before);
    return err;
}

int zr_gemm_open(int n_threads, struct zr_gemm **out)
{
    *out = NULL;
    if (n_threads < 1)
        return zr_fail(ZR_ERR_ARG, "gemm: n_threads is %d, must be at least 1", n_threads);
    struct zr_gemm *g = calloc(1, sizeof *g);
    if (g)
        g->table = calloc(64, sizeof *g->table);
    if (!g || !g->table) {
        free(g);
        return zr_fail(ZR_ERR_NOMEM, "gemm: no memory to open");
    }
    g->n_places = 64;
    g->n_threads = n_threads;
    g->kernels = zr_host_kernels_best();
    dnnl_status_t s = dnnl_engine_create(&g->engine, dnnl_cpu, 0);
    if (s == dnnl_success)
        s = dnnl_stream_create(&g->stream, g->engine, dnnl_stream_default_flags);
    if (s != dnnl_success) {
        zr_gemm_close(g);
        return gemm_error(s, "opening");
    }
    *out = g;
    return 0;
}

void zr_gemm_close(struct zr_gemm *g)
{
    if (!g)
        return;
    for (size_t i = 0; i < g->n_places; i++)
        product_free(g->table[i]);
    if (g->stream)
        dnnl_stream_destroy(g->stream);
    if (g->engine)
        dnnl_engine_destroy(g->engine);
    free(g->scratch.p);
    free(g->bias.p);
    free(g->wide.p);
    free(g->table);
    free(g);
}
