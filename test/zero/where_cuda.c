/* SPDX-License-Identifier: Apache-2.0 */
/* where_cuda.c: runs ranks on the stand-in for CUDA, which lets the CPU touch device memory where a test's
 * model says that it will. */
#include "test/zero/where.h"

#include "test/stand_in/nccl_stand_in.h"
#include "test/stand_in/stand_in.h"

#include <cuda_runtime_api.h>

#include <stdio.h>
#include <stdlib.h>

const bool where_has_gpu = true;

static void must(const char *call, cudaError_t err)
{
    if (err) {
        fprintf(stderr, "%s: %s\n", call, cudaGetErrorString(err));
        abort();
    }
}

void where_open(int rank, struct zero_config *cfg)
{
    must("cudaSetDevice", cudaSetDevice(rank + 1)); /* 0 is the default of threads that never chose */
    must("cudaStreamCreateWithFlags",
         cudaStreamCreateWithFlags((cudaStream_t *)&cfg->stream, cudaStreamNonBlocking));
    cfg->device = ZERO_DEVICE_CUDA;
    cfg->deterministic = 1; /* gives the host's bits */
}

void where_close(struct zero_config *cfg)
{
    if (cfg->stream)
        must("cudaStreamDestroy", cudaStreamDestroy((cudaStream_t)cfg->stream));
    if (stand_in_has_context(0)) {
        fprintf(stderr, "a context was made on GPU 0, which no rank works on\n");
        abort();
    }
}

void where_fork(void)
{
    nccl_stand_in_share();
}

void where_reap(void)
{
    nccl_stand_in_end();
}

void where_stop(pid_t pid)
{
    nccl_stand_in_stop(pid);
}

/* Sets the host's name for both the library and NCCL. */
void where_enter(int on_host)
{
    char host[32];
    snprintf(host, sizeof host, "host-%d", on_host);
    setenv("ZERO_HOST_ID", host, 1);
    setenv("NCCL_HOSTID", host, 1);
}

bool where_leave(char *text, size_t n_text)
{
    const char *misuse;
    bool hung = nccl_stand_in_end(); /* a call that hangs keeps its resources, which is no misuse */
    bool well = stand_in_end(&misuse) == 0 || hung;
    snprintf(text, n_text, "%s", misuse);
    return well;
}

void where_wait(const struct zero_config *cfg)
{
    if (cfg->device == ZERO_DEVICE_CUDA)
        must("cudaStreamSynchronize", cudaStreamSynchronize((cudaStream_t)cfg->stream));
    stand_in_touch();
}

void *where_alloc(size_t n_bytes)
{
    void *at;
    must("cudaMalloc", cudaMalloc(&at, n_bytes));
    must("cudaMemset", cudaMemset(at, 0, n_bytes));
    return at;
}

void where_release(void *at)
{
    must("cudaFree", cudaFree(at));
}
