/* SPDX-License-Identifier: Apache-2.0 */
/* test_cublaslt_stand_in.c: tests that the stand-in for cuBLASLt notices misuse. test_gemm.c tests its
 * products. */
#include "test/cmocka.h"
#include "test/stand_in/cublaslt_stand_in.h"
#include "test/stand_in/stand_in.h"

#include <cublasLt.h>

#include <string.h>

enum { M = 8, N = 16, K = 4, WORKSPACE = 1 << 16 };

struct product {
    cudaStream_t stream;
    cublasLtHandle_t handle;
    cublasLtMatmulDesc_t desc;
    cublasLtMatrixLayout_t a, b, d;
    cublasLtMatmulPreference_t preference;
    cublasLtMatmulHeuristicResult_t found;
    char *memory; /* A, B, D, 4096 bytes apart, and the workspace */
};

#define OK(call) assert_int_equal(call, CUBLAS_STATUS_SUCCESS)

static cublasStatus_t find(struct product *p)
{
    int n;
    return cublasLtMatmulAlgoGetHeuristic(p->handle, p->desc, p->a, p->b, p->d, p->d, p->preference, 1,
                                          &p->found, &n);
}

static struct product open_product(void)
{
    struct product p;
    const uint64_t bytes = WORKSPACE;
    const uint32_t align = 16;
    memset(&p, 0, sizeof p);
    OK((cublasStatus_t)cudaStreamCreateWithFlags(&p.stream, cudaStreamNonBlocking));
    OK((cublasStatus_t)cudaMalloc((void **)&p.memory, 3 * 4096 + WORKSPACE));
    OK(cublasLtCreate(&p.handle));
    OK(cublasLtMatmulDescCreate(&p.desc, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    OK(cublasLtMatrixLayoutCreate(&p.a, CUDA_R_32F, M, K, M));
    OK(cublasLtMatrixLayoutCreate(&p.b, CUDA_R_32F, K, N, K));
    OK(cublasLtMatrixLayoutCreate(&p.d, CUDA_R_32F, M, N, M));
    OK(cublasLtMatmulPreferenceCreate(&p.preference));
    OK(cublasLtMatmulPreferenceSetAttribute(p.preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &bytes,
                                            sizeof bytes));
    for (int which = CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES;
         which <= CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES; which++)
        OK(cublasLtMatmulPreferenceSetAttribute(p.preference, (cublasLtMatmulPreferenceAttributes_t)which,
                                                &align, sizeof align));
    OK(find(&p));
    assert_int_equal(cudaMemsetAsync(p.memory, 0, 2 * 4096, p.stream), cudaSuccess);
    return p;
}

static cublasStatus_t multiply(struct product *p, int64_t at_a, int64_t at_b, int64_t at_d, size_t workspace)
{
    const float one = 1, zero = 0;
    return cublasLtMatmul(p->handle, p->desc, &one, p->memory + at_a, p->a, p->memory + at_b, p->b, &zero,
                          p->memory + at_d, p->d, p->memory + at_d, p->d, &p->found.algo,
                          p->memory + 3 * 4096, workspace, p->stream);
}

/* Ends the test: there is exactly one misuse, whose text contains this part. NULL: none. */
static void close_product(struct product *p, const char *part)
{
    const char *text;
    OK(cublasLtMatmulPreferenceDestroy(p->preference));
    OK(cublasLtMatrixLayoutDestroy(p->a));
    OK(cublasLtMatrixLayoutDestroy(p->b));
    OK(cublasLtMatmulDescDestroy(p->desc));
    OK(cublasLtDestroy(p->handle));
    assert_int_equal(cublaslt_stand_in_n_open(), 0);
    assert_int_equal(cudaFree(p->memory), cudaSuccess);
    assert_int_equal(cudaStreamDestroy(p->stream), cudaSuccess);
    int n = stand_in_end(&text);
    if (n != (part ? 1 : 0) || (part && !strstr(text, part)))
        fail_msg("%d misuses, not %d with \"%s\": %s", n, part ? 1 : 0, part ? part : "", text);
}

static void close_with_result(struct product *p, const char *part)
{
    OK(cublasLtMatrixLayoutDestroy(p->d));
    close_product(p, part);
}

static void test_right(void **state)
{
    struct product p = open_product();
    OK(multiply(&p, 0, 4096, 8192, WORKSPACE));
    close_with_result(&p, NULL);
}

static void test_places(void **state)
{
    static const struct {
        int64_t a, b, d;
        const char *reported;
    } cases[] = {
        {4, 4096, 8192, "A at"},                          /* less aligned than requested */
        {0, 4096, 3 * 4096 + WORKSPACE - 64, "bytes at"}, /* goes beyond its allocation */
        {0, 4096, 4096, "overlaps"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct product p = open_product();
        assert_int_equal(multiply(&p, cases[i].a, cases[i].b, cases[i].d, WORKSPACE),
                         CUBLAS_STATUS_INVALID_VALUE);
        close_with_result(&p, cases[i].reported);
    }
}

static void test_workspace(void **state)
{
    struct product p = open_product();
    /* Some algorithms need no workspace: look for one that does. */
    for (int64_t ld = N; p.found.workspaceSize == 0 && ld < N + 20; ld++) {
        OK(cublasLtMatrixLayoutDestroy(p.d));
        OK(cublasLtMatrixLayoutCreate(&p.d, CUDA_R_32F, M, N, ld));
        OK(find(&p));
    }
    assert_true(p.found.workspaceSize > 0);
    assert_int_equal(multiply(&p, 0, 4096, 8192, p.found.workspaceSize - 1), CUBLAS_STATUS_INVALID_VALUE);
    close_with_result(&p, "a workspace of");
}

static void test_another_product(void **state)
{
    struct product p = open_product();
    OK(cublasLtMatrixLayoutDestroy(p.d));
    OK(cublasLtMatrixLayoutCreate(&p.d, CUDA_R_32F, M, N, M + 1));
    assert_int_equal(multiply(&p, 0, 4096, 8192, WORKSPACE), CUBLAS_STATUS_INVALID_VALUE);
    close_with_result(&p, "another product's");
}

static void test_layouts(void **state)
{
    struct product p = open_product();
    OK(cublasLtMatrixLayoutDestroy(p.d));
    OK(cublasLtMatrixLayoutCreate(&p.d, CUDA_R_32F, M + 1, N, M + 1));
    assert_int_equal(find(&p), CUBLAS_STATUS_INVALID_VALUE);
    close_with_result(&p, "do not fit each other");
}

static void test_attributes(void **state)
{
    struct product p = open_product();
    const int64_t wide = 1;
    assert_int_equal(cublasLtMatmulDescSetAttribute(p.desc, CUBLASLT_MATMUL_DESC_TRANSA, &wide, sizeof wide),
                     CUBLAS_STATUS_INVALID_VALUE);
    close_with_result(&p, "another size");
    p = open_product();
    const uint32_t epilogue = CUBLASLT_EPILOGUE_GELU_AUX; /* and ld of aux is not set */
    OK(cublasLtMatmulDescSetAttribute(p.desc, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof epilogue));
    assert_int_equal(find(&p), CUBLAS_STATUS_INVALID_VALUE);
    close_with_result(&p, "was not set");
}

static void test_destroyed(void **state)
{
    struct product p = open_product();
    OK(cublasLtMatrixLayoutDestroy(p.d));
    assert_int_equal(multiply(&p, 0, 4096, 8192, WORKSPACE), CUBLAS_STATUS_INVALID_VALUE);
    close_product(&p, "destroyed before");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_right),     cmocka_unit_test(test_places),
        cmocka_unit_test(test_workspace), cmocka_unit_test(test_another_product),
        cmocka_unit_test(test_layouts),   cmocka_unit_test(test_attributes),
        cmocka_unit_test(test_destroyed),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
