/* SPDX-License-Identifier: Apache-2.0 */
/* launch.h: launches the model's kernels on the stream of a struct compute. It is C++ for the .cu files;
 * include cuda_runtime.h before it. */
#ifndef ZERO_BENCH_MODEL_LAUNCH_H
#define ZERO_BENCH_MODEL_LAUNCH_H

extern "C" {
#include "bench/compute.h"
}

namespace
{

template <class T> struct same {
    typedef T type;
};

/* Launches a kernel without waiting for it; `what` names it in messages. Returns 0 or ZERO_ERR_SYSTEM. */
template <class... P>
int launch(const struct compute *on, const char *what, void (*kernel)(P...), dim3 grid, dim3 block,
           typename same<P>::type... args)
{
    void *list[] = {(void *)&args...};
    cudaStream_t stream = (cudaStream_t)on->dev->ops->stream_native(on->stream);
    cudaError_t err = cudaLaunchKernel(kernel, grid, block, list, 0, stream);
    return err == cudaSuccess ? 0
                              : zr_fail(ZERO_ERR_SYSTEM, "launching %s: %s", what, cudaGetErrorString(err));
}

inline unsigned ceil_div(int64_t n, int64_t d)
{
    return (unsigned)((n + d - 1) / d);
}

} // namespace

#endif
