/* SPDX-License-Identifier: Apache-2.0 */
/* compute.c: opens the device, stream and matrix products of a model. */
#include "bench/compute.h"
#include "bench/libzero_error.h"

static int open_host(struct compute *p, int n_threads)
{
    int err = zr_host_device_open(&p->dev);
    if (err)
        return err;
    err = p->dev->ops->stream_open(p->dev, ZR_STREAM_CALLER, "model", NULL, &p->stream);
    return err ? err : zr_gemm_open(n_threads, &p->gemm);
}

static int open_cuda(struct compute *p, int gpu)
{
    struct zero_place at = {.local_rank = gpu};
    if (gpu == GPU_OF_LOCAL_RANK) {
        int rank_err = take_libzero_error(zero_find_place(NULL, &at));
        if (rank_err)
            return rank_err;
    }
    int err = zr_cuda_device_open(at.local_rank, &p->dev);
    if (err)
        return err;
    p->cuda = true;
    err = p->dev->ops->stream_open(p->dev, ZR_STREAM_QUEUE, "model", NULL, &p->stream);
    return err ? err : zr_gemm_open_cuda(p->dev, p->stream, 0, false, &p->gemm);
}

int compute_open(struct compute *p, bool cuda, int gpu, int n_threads)
{
    *p = (struct compute){.n_threads = cuda ? 1 : n_threads};
    int err = cuda ? open_cuda(p, gpu) : open_host(p, n_threads);
    if (err)
        compute_close(p);
    return err;
}

void compute_close(struct compute *p)
{
    zr_gemm_close(p->gemm);
    if (p->dev) {
        p->dev->ops->stream_close(p->stream);
        p->dev->ops->close(p->dev);
    }
    *p = (struct compute){0};
}

zero_stream compute_stream(const struct compute *p)
{
    return p->dev->ops->stream_native(p->stream);
}

const char *compute_name(const struct compute *p)
{
    return p->dev->ops->name;
}

int64_t compute_used_bytes(const struct compute *p)
{
    int64_t free_bytes, total_bytes;
    if (!p->dev->ops->memory || p->dev->ops->memory(p->dev, &free_bytes, &total_bytes))
        return 0;
    return total_bytes - free_bytes;
}

struct zr_gemm_args product_of(enum zero_dtype dtype, int64_t m, int64_t n, int64_t k, const void *a,
                               int64_t lda, const void *b, int64_t ldb, void *c, int64_t ldc)
{
    return (struct zr_gemm_args){.m = m,
                                 .n = n,
                                 .k = k,
                                 .ab_dtype = dtype,
                                 .c_dtype = dtype,
                                 .a = a,
                                 .lda = lda,
                                 .b = b,
                                 .ldb = ldb,
                                 .c = c,
                                 .ldc = ldc,
                                 .n_batch = 1};
}
