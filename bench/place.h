/* SPDX-License-Identifier: Apache-2.0 */
/* place.h: where a model lives and computes: on the host, or on a CUDA device. */
#ifndef ZERO_BENCH_PLACE_H
#define ZERO_BENCH_PLACE_H

#include "kernels/gemm/gemm.h"
#include "zero/zero.h"

struct place {
    struct zr_device *dev;
    /* takes all of the model's work, in order */
    struct zr_stream *stream;
    struct zr_gemm *gemm;
    /* on the host: of what is done when a call returns, products and all else; on a GPU 1 */
    int n_threads;
    bool cuda;
};

#define PLACE_GPU_OF_RANK (-1)

/* On the host with n_threads; or with cuda on GPU number gpu, which becomes this thread's
 * current device (PLACE_GPU_OF_RANK: that of the local rank, by zero_find_place). Returns 0 or a zr_err
 * (ZR_ERR_NOTSUP: no usable GPU, the message says why), holding nothing. */
int place_open(struct place *p, bool cuda, int gpu, int n_threads);
/* The stream as libzero takes it: NULL on the host. */
zero_stream place_stream(const struct place *p);
/* "host" or "cuda". */
const char *place_name(const struct place *p);
/* Of a GPU's memory, what is in use, by others too; 0 on the host. */
int64_t place_used_bytes(const struct place *p);
/* Finishes what is on the stream. A place that was not opened is allowed. */
void place_close(struct place *p);

#endif
