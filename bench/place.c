/* SPDX-License-Identifier: Apache-2.0 */
/* place.c: opens the device, stream and matrix products of a model. */
#include "bench/place.h"
#include "bench/libzero_error.h"

static int open_host(struct place *p, int n_threads)
{
    int err = zr_host_device_open(&p->dev);
    if (err)
        return err;
    err = p->dev->ops->stream_open(p->dev, ZR_STREAM_CALLER, "model", NULL, &p->stream);
    return err ? err : zr_gemm_open(n_threads, &p->gemm);
}

static int open_cuda(struct place *p, int gpu)
{
    struct zero_place at = {.local_rank = gpu};
    if (gpu == PLACE_GPU_OF_RANK) {
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

int place_open(struct place *p, bool cuda, int gpu, int n_threads)
{
    *p = (struct place){.n_threads = cuda ? 1 : n_threads};
    int err = cuda ? open_cuda(p, gpu) : open_host(p, n_threads);
    if (err)
        place_close(p);
    return err;
}

void place_close(struct place *p)
{
    zr_gemm_close(p->gemm);
    if (p->dev) {
        p->dev->ops->stream_close(p->stream);
        p->dev->ops->close(p->dev);
    }
    *p = (struct place){0};
}

zero_stream place_stream(const struct place *p)
{
    return p->dev->ops->stream_native(p->stream);
}

const char *place_name(const struct place *p)
{
    return p->dev->ops->name;
}

int64_t place_used_bytes(const struct place *p)
{
    int64_t free_bytes, total_bytes;
    if (!p->dev->ops->memory || p->dev->ops->memory(p->dev, &free_bytes, &total_bytes))
        return 0;
    return total_bytes - free_bytes;
}
