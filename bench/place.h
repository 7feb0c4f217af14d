/* SPDX-License-Identifier: Apache-2.0 */
/* place.h: where a model lives and computes: on the host, or on a CUDA device. */
#ifndef ZERO_BENCH_PLACE_H
#define ZERO_BENCH_PLACE_H

#include "kernels/gemm/gemm.h"
#include "zero/zero.h"

struct place {
    struct zr_device *dev;
    /* all of the model's work, in order */
    struct zr_stream *stream;
    struct zr_gemm *gemm;
    /* on the host, threads of one layer function or matrix product; 1 on a GPU */
    int n_threads;
    bool cuda;
};

#define PLACE_GPU_OF_RANK (-1)

/* Opens the host with n_threads. With cuda it opens GPU number `gpu` instead, which becomes this thread's
 * current device (PLACE_GPU_OF_RANK: the local rank's, by zero_find_place). Returns 0 or a zero_err. On
 * failure *p holds nothing. ZERO_ERR_NOTSUP: there is no usable GPU, and the message says why. */
int place_open(struct place *p, bool cuda, int gpu, int n_threads);
/* The stream for libzero; NULL on the host. */
zero_stream place_stream(const struct place *p);
/* "host" or "cuda". */
const char *place_name(const struct place *p);
/* The GPU memory that is in use, by other processes too; 0 on the host. */
int64_t place_used_bytes(const struct place *p);
/* Waits for the stream and closes everything. A place that was not opened is allowed. */
void place_close(struct place *p);

#endif
