/* SPDX-License-Identifier: Apache-2.0 */
/* stand_in_race.cc: two streams write the same memory, one after the other in time; built with
 * ThreadSanitizer, that must be a reported race exactly when no event orders them.
 *
 *     stand_in_race ordered | unordered */
#include <cuda_runtime.h>

#include <cstdio>
#include <cstring>
#include <unistd.h>

__global__ static void write_kernel(int *p)
{
    p[threadIdx.x] = (int)threadIdx.x;
}

int main(int argc, char **argv)
{
    cudaStream_t a, b;
    cudaEvent_t e;
    int *p;
    if (argc != 2)
        return 2;
    cudaError_t err = cudaStreamCreateWithFlags(&a, cudaStreamNonBlocking);
    err = err ? err : cudaStreamCreateWithFlags(&b, cudaStreamNonBlocking);
    err = err ? err : cudaEventCreate(&e);
    err = err ? err : cudaMalloc(&p, 32 * sizeof *p);
    void *args[] = {&p};
    err = err ? err : cudaLaunchKernel(write_kernel, dim3(1), dim3(32), args, 0, a);
    err = err ? err : cudaEventRecord(e, a);
    if (std::strcmp(argv[1], "ordered") == 0)
        err = err ? err : cudaStreamWaitEvent(b, e, 0);
    usleep(20000); /* a is long done; but a query that says so would order the host, and b with it */
    err = err ? err : cudaLaunchKernel(write_kernel, dim3(1), dim3(32), args, 0, b);
    err = err ? err : cudaFree(p);
    err = err ? err : cudaEventDestroy(e);
    err = err ? err : cudaStreamDestroy(a);
    err = err ? err : cudaStreamDestroy(b);
    return err ? 2 : stand_in_end(NULL) != 0;
}
