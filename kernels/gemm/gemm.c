/* SPDX-License-Identifier: Apache-2.0 */
/* gemm.c: the functions of gemm.h. It checks what holds for oneDNN and cuBLASLt. */
#include "kernels/gemm/gemm.h"
#include "kernels/gemm/gemm_cache.h"

static int check_sizes(const struct zr_gemm_args *a)
{
    if (a->m < 1 || a->n < 1 || a->k < 1 || a->n_batch < 1)
        return zr_fail(ZERO_ERR_ARG,
                       "gemm: m, n, k, n_batch are %lld, %lld, %lld, %lld, all must be at least 1",
                       (long long)a->m, (long long)a->n, (long long)a->k, (long long)a->n_batch);
    int64_t lda = a->trans_a ? a->m : a->k, ldb = a->trans_b ? a->k : a->n;
    if (a->lda < lda || a->ldb < ldb || a->ldc < a->n)
        return zr_fail(ZERO_ERR_ARG,
                       "gemm: lda, ldb, ldc are %lld, %lld, %lld, must be at least %lld, %lld, %lld",
                       (long long)a->lda, (long long)a->ldb, (long long)a->ldc, (long long)lda,
                       (long long)ldb, (long long)a->n);
    if (a->beta != 0 && a->beta != 1)
        return zr_fail(ZERO_ERR_ARG, "gemm: beta is %g, must be 0 or 1", (double)a->beta);
    return 0;
}

static bool known(enum zero_dtype t)
{
    return t == ZERO_F32 || t == ZERO_BF16 || t == ZERO_F16;
}

static int check_types(const struct zr_gemm_args *a)
{
    if (!known(a->ab_dtype) || (a->c_dtype != ZERO_F32 && a->c_dtype != a->ab_dtype) ||
        (a->bias && !known(a->bias_dtype)))
        return zr_fail(ZERO_ERR_NOTSUP,
                       "gemm: dtypes are %s x %s -> %s, bias %s; C must be of the operands' dtype or f32",
                       zr_dtype_name(a->ab_dtype), zr_dtype_name(a->ab_dtype), zr_dtype_name(a->c_dtype),
                       a->bias ? zr_dtype_name(a->bias_dtype) : "none");
    return 0;
}

static int check_epilogue(const struct zr_gemm_args *a)
{
    static const struct {
        const char *name;
        bool aux, sum, bias, beta;
    } takes[] = {
        [ZR_GEMM_PLAIN] = {"plain", false, false, true, true},
        [ZR_GEMM_GELU] = {"gelu", true, false, true, false},
        [ZR_GEMM_DGELU] = {"dgelu", true, false, false, false},
        [ZR_GEMM_SUM_A] = {"sum_a", false, true, false, true},
    };
    if (a->epilogue < ZR_GEMM_PLAIN || a->epilogue > ZR_GEMM_SUM_A)
        return zr_fail(ZERO_ERR_ARG, "gemm: epilogue is %d, must be 0..%d", (int)a->epilogue, ZR_GEMM_SUM_A);
    const char *name = takes[a->epilogue].name;
    if (!!a->aux != takes[a->epilogue].aux || !!a->sum != takes[a->epilogue].sum)
        return zr_fail(ZERO_ERR_ARG, "gemm: epilogue %s %s aux and %s sum", name,
                       takes[a->epilogue].aux ? "needs" : "has no",
                       takes[a->epilogue].sum ? "needs" : "has no");
    if ((a->bias && !takes[a->epilogue].bias) || (a->beta != 0 && !takes[a->epilogue].beta))
        return zr_fail(ZERO_ERR_ARG, "gemm: epilogue %s takes no %s", name, a->beta != 0 ? "beta 1" : "bias");
    if (a->aux && a->ldaux < a->n)
        return zr_fail(ZERO_ERR_ARG, "gemm: ldaux is %lld, must be at least %lld", (long long)a->ldaux,
                       (long long)a->n);
    if (a->epilogue != ZR_GEMM_PLAIN && a->n_batch != 1)
        return zr_fail(ZERO_ERR_ARG, "gemm: epilogue %s takes one product, n_batch is %lld", name,
                       (long long)a->n_batch);
    return 0;
}

static int check_args(const struct zr_gemm_args *a)
{
    ZR_TRY(check_sizes(a));
    ZR_TRY(check_types(a));
    return check_epilogue(a);
}

int zr_gemm_run(struct zr_gemm *g, const struct zr_gemm_args *args)
{
    ZR_TRY(check_args(args));
    return g->ops->run(g, args);
}

bool zr_gemm_can(struct zr_gemm *g, const struct zr_gemm_args *args)
{
    return !check_args(args) && g->ops->can(g, args);
}

void zr_gemm_close(struct zr_gemm *g)
{
    if (g)
        g->ops->close(g);
}

#ifndef ZR_HAVE_ONEDNN
int zr_gemm_open(int n_threads, struct zr_gemm **out)
{
    (void)n_threads;
    *out = NULL;
    return zr_fail(ZERO_ERR_NOTSUP,
                   "gemm: this build has no oneDNN, so it cannot multiply matrices on the host");
}
#endif

#ifndef ZR_HAVE_CUBLASLT
int zr_gemm_open_cuda(struct zr_device *dev, struct zr_stream *s, int64_t workspace_bytes, bool tf32,
                      struct zr_gemm **out)
{
    (void)dev, (void)s, (void)workspace_bytes, (void)tf32;
    *out = NULL;
    return zr_fail(ZERO_ERR_NOTSUP,
                   "gemm: this build has no cuBLASLt, so it cannot multiply matrices on a GPU");
}
#endif
