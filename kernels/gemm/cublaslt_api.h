/* SPDX-License-Identifier: Apache-2.0 */
/* cublaslt_api.h: cuBLASLt's functions, found when they are first needed. Loading the library takes 200 MB of
 * memory, which programs that stay on the host should not pay.
 *
 * Only gemm_cublaslt.c includes it. Tests define ZR_CUBLASLT_LINKED, and link functions of the same names. */
#ifndef ZR_KERNELS_CUBLASLT_API_H
#define ZR_KERNELS_CUBLASLT_API_H

#include "kernels/error.h"

#include <cublasLt.h>

#include <dlfcn.h>
#include <pthread.h>

/* X(name without "cublasLt") */
#define CUBLASLT_FUNCTIONS(X)                                                                                \
    X(Create)                                                                                                \
    X(Destroy)                                                                                               \
    X(GetStatusName)                                                                                         \
    X(GetVersion)                                                                                            \
    X(MatrixLayoutCreate)                                                                                    \
    X(MatrixLayoutDestroy)                                                                                   \
    X(MatrixLayoutSetAttribute)                                                                              \
    X(MatmulDescCreate)                                                                                      \
    X(MatmulDescDestroy)                                                                                     \
    X(MatmulDescSetAttribute)                                                                                \
    X(MatmulPreferenceCreate)                                                                                \
    X(MatmulPreferenceDestroy)                                                                               \
    X(MatmulPreferenceSetAttribute)                                                                          \
    X(MatmulAlgoGetHeuristic)                                                                                \
    X(Matmul)

/* The functions. They are valid once cublaslt_load has returned 0. */
static struct {
#define X(name) __typeof__(&cublasLt##name) name;
    CUBLASLT_FUNCTIONS(X)
#undef X
} lt;

/* Name of something that could not be found. NULL: nothing is missing. */
static const char *lt_missing;

#ifdef ZR_CUBLASLT_LINKED
static void lt_find(void)
{
#define X(name) lt.name = cublasLt##name;
    CUBLASLT_FUNCTIONS(X)
#undef X
}
#else
#define LT_TEXT(x) #x
#define LT_NAME(v) "libcublasLt.so." LT_TEXT(v)
#define LT_LIBRARY LT_NAME(CUBLAS_VER_MAJOR)

static void lt_find(void)
{
    void *library = dlopen(LT_LIBRARY, RTLD_LAZY | RTLD_LOCAL);
    if (!library) /* the folder in which the build found it */
        library = dlopen(ZR_CUBLASLT_DIR "/" LT_LIBRARY, RTLD_LAZY | RTLD_LOCAL);
    if (!library) {
        lt_missing = LT_LIBRARY;
        return;
    }
#define X(name)                                                                                              \
    *(void **)&lt.name = dlsym(library, "cublasLt" #name);                                                   \
    if (!lt.name)                                                                                            \
        lt_missing = "cublasLt" #name " in " LT_LIBRARY;
    CUBLASLT_FUNCTIONS(X)
#undef X
}
#endif

/* Callable from any thread. Returns 0, or ZERO_ERR_NOTSUP with the name of what is missing. */
static int cublaslt_load(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, lt_find);
    return lt_missing ? zr_fail(ZERO_ERR_NOTSUP, "gemm: %s is not found", lt_missing) : 0;
}

#endif
