/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_device.c: a GPU as a device: the checks at opening, and memory. Streams are in cuda_stream.c,
 * operations in cuda_ops.c, kernels in the .cu files. */
#include "kernels/cuda/cuda_device.h"
#include "kernels/alloc.h"
#include "kernels/cuda/cuda_kernels.h"

#include <stdlib.h>
#include <string.h>

enum { PAGE_BYTES = 4096, CLOCK_READINGS = 20 };

/* --- errors and the current device --- */

int zr_cuda_check(const struct zr_cuda_device *dev, const char *call, cudaError_t err)
{
    if (!err)
        return 0;
    cudaGetLastError(); /* it is reported here; the program's checks need not find it */
    return zr_fail(err == cudaErrorMemoryAllocation ? ZERO_ERR_NOMEM : ZERO_ERR_SYSTEM, "GPU %d: %s: %s (%s)",
                   dev->ordinal, call, cudaGetErrorName(err), cudaGetErrorString(err));
}

cudaError_t zr_cuda_enter(const struct zr_cuda_device *dev, int *was)
{
    cudaError_t err = cudaGetDevice(was);
    if (err)
        *was = dev->ordinal;
    return err || *was == dev->ordinal ? err : cudaSetDevice(dev->ordinal);
}

int zr_cuda_leave(const struct zr_cuda_device *dev, int was, const char *call, cudaError_t err)
{
    if (was != dev->ordinal)
        cudaSetDevice(was); /* it was current before */
    return zr_cuda_check(dev, call, err);
}

int zr_cuda_thread_begin(struct zr_device *base)
{
    const struct zr_cuda_device *dev = (struct zr_cuda_device *)base;
    enum cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    ZR_TRY(zr_cuda_check(dev, "cudaSetDevice", cudaSetDevice(dev->ordinal)));
    /* It comes second, because it makes a context on the current device. */
    return zr_cuda_check(dev, "cudaThreadExchangeStreamCaptureMode",
                         cudaThreadExchangeStreamCaptureMode(&mode));
}

/* --- memory --- */

/* Returns CUDA's address for memory that was given out, and forgets it. */
static void *block_take(struct zr_cuda_device *dev, void *at)
{
    void *base = NULL;
    pthread_mutex_lock(&dev->lock);
    for (struct zr_cuda_block **link = &dev->blocks; *link; link = &(*link)->next)
        if ((*link)->at == at) {
            struct zr_cuda_block *b = *link;
            *link = b->next;
            base = b->base;
            free(b);
            break;
        }
    pthread_mutex_unlock(&dev->lock);
    return base;
}

static cudaError_t block_alloc(bool poison, bool on_host, void **base, size_t bytes)
{
    if (on_host)
        return cudaHostAlloc(base, bytes, cudaHostAllocPortable | cudaHostAllocMapped);
    cudaError_t err = cudaMalloc(base, bytes);
    if (!err && poison)
        err = cudaMemset(*base, 0xff, bytes);
    if (!err && poison)
        err = cudaStreamSynchronize(NULL); /* asynchronous: other streams do not wait for the fill */
    return err;
}

static int no_memory(struct zr_cuda_device *dev, const char *what, int64_t bytes)
{
    int64_t free_bytes, total_bytes;
    if (zr_cuda_memory(&dev->base, &free_bytes, &total_bytes))
        free_bytes = total_bytes = 0;
    return zr_fail(
        ZERO_ERR_NOMEM,
        "%s: GPU %d cannot allocate %lld bytes: %lld of %lld are free; nvidia-smi shows who uses the rest",
        what, dev->ordinal, (long long)bytes, (long long)free_bytes, (long long)total_bytes);
}

static int block_open(struct zr_cuda_device *dev, bool on_host, int64_t bytes, void **out)
{
    const char *what = on_host ? "host alloc" : "device alloc";
    struct zr_cuda_block *b;
    *out = NULL;
    if (bytes <= 0)
        return zr_fail(ZERO_ERR_ARG, "%s: bytes is %lld, must be above 0", what, (long long)bytes);
    ZR_TRY(ZR_ZALLOC(b, 1, "the record of %s", what));
    size_t whole = (size_t)bytes + PAGE_BYTES;
    int failed = ZR_CUDA_OUTSIDE(dev, on_host ? "cudaHostAlloc" : "cudaMalloc",
                                 block_alloc(dev->poison, on_host, &b->base, whole));
    if (failed) {
        if (b->base)
            (void)(on_host ? cudaFreeHost(b->base) : cudaFree(b->base));
        free(b);
        return failed == ZERO_ERR_NOMEM && !on_host ? no_memory(dev, what, bytes) : failed;
    }
    b->at = (void *)(((uintptr_t)b->base + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES);
    if (on_host)
        memset(b->at, 0, (size_t)bytes);
    pthread_mutex_lock(&dev->lock);
    b->next = dev->blocks;
    dev->blocks = b;
    pthread_mutex_unlock(&dev->lock);
    *out = b->at;
    return 0;
}

int zr_cuda_alloc(struct zr_device *base, int64_t bytes, void **out)
{
    return block_open((struct zr_cuda_device *)base, false, bytes, out);
}

int zr_cuda_host_alloc(struct zr_device *base, int64_t bytes, void **out)
{
    return block_open((struct zr_cuda_device *)base, true, bytes, out);
}

void zr_cuda_free(struct zr_device *base, void *p, int64_t bytes)
{
    struct zr_cuda_device *dev = (struct zr_cuda_device *)base;
    (void)bytes;
    void *given = p ? block_take(dev, p) : NULL;
    if (given)
        ZR_CUDA_OUTSIDE(dev, "cudaFree", cudaFree(given));
}

void zr_cuda_host_free(struct zr_device *base, void *p, int64_t bytes)
{
    struct zr_cuda_device *dev = (struct zr_cuda_device *)base;
    (void)bytes;
    void *given = p ? block_take(dev, p) : NULL;
    if (given)
        ZR_CUDA_OUTSIDE(dev, "cudaFreeHost", cudaFreeHost(given));
}

int zr_cuda_memory(struct zr_device *base, int64_t *free_bytes, int64_t *total_bytes)
{
    struct zr_cuda_device *dev = (struct zr_cuda_device *)base;
    size_t left = 0, total = 0;
    int err = ZR_CUDA(dev, "cudaMemGetInfo", cudaMemGetInfo(&left, &total));
    *free_bytes = (int64_t)left;
    *total_bytes = (int64_t)total;
    return err;
}

/* --- opening and closing --- */

void zr_cuda_close(struct zr_device *base)
{
    struct zr_cuda_device *dev = (struct zr_cuda_device *)base;
    for (struct zr_cuda_block *b = dev->blocks, *next; b; b = next) {
        next = b->next;
        free(b); /* its memory is left behind on purpose, because NCCL may still use it */
    }
    pthread_mutex_destroy(&dev->lock);
    free(dev);
}

/* The parts of a version in CUDA's encoding: 13000 is 13.0. */
#define VERSION(v) (v) / 1000, (v) % 1000 / 10

/* CUDA version that the driver must support. For CUDA 12 it is the release with cudaStreamGetDevice.
 * Otherwise it is the first one of the major version, whose drivers run programs of all its minor versions
 * (NVIDIA, CUDA Compatibility: minor version compatibility). */
#if CUDART_VERSION < 12080
#error "the CUDA toolkit is older than 12.8 (kernels/meson.build)"
#endif
#define DRIVER_NEEDED (CUDART_VERSION < 13000 ? 12080 : CUDART_VERSION / 1000 * 1000)

/* Checks that this library can use the GPU of that number. Replaces ZR_CUDA_CURRENT by the number of the
 * thread's GPU. */
static int check_gpu(int *number)
{
    int ordinal = *number, driver = 0, count = 0, major = 0, minor = 0;
    if (cudaDriverGetVersion(&driver) || driver == 0)
        return zr_fail(ZERO_ERR_NOTSUP,
                       "no usable GPU: no NVIDIA driver is loaded (this library needs one for CUDA %d.%d); "
                       "in a container, start it with the GPU (docker run --gpus all)",
                       VERSION(DRIVER_NEEDED));
    cudaError_t err = cudaGetDeviceCount(&count);
    cudaGetLastError();
    if (err == cudaErrorInsufficientDriver || driver < DRIVER_NEEDED)
        return zr_fail(
            ZERO_ERR_NOTSUP,
            "no usable GPU: the driver is for CUDA %d.%d, this library needs one for CUDA %d.%d or newer",
            VERSION(driver), VERSION(DRIVER_NEEDED));
    if (err == cudaErrorNoDevice || (!err && count == 0))
        return zr_fail(ZERO_ERR_NOTSUP,
                       "no usable GPU: the driver sees none; check CUDA_VISIBLE_DEVICES and nvidia-smi");
    if (err)
        return zr_fail(ZERO_ERR_NOTSUP, "no usable GPU: cudaGetDeviceCount: %s (%s)", cudaGetErrorName(err),
                       cudaGetErrorString(err));
    err = ordinal == ZR_CUDA_CURRENT ? cudaGetDevice(&ordinal) : cudaSuccess;
    if (err) {
        cudaGetLastError();
        return zr_fail(ZERO_ERR_SYSTEM, "the thread's GPU: cudaGetDevice: %s (%s)", cudaGetErrorName(err),
                       cudaGetErrorString(err));
    }
    *number = ordinal;
    if (ordinal < 0 || ordinal >= count)
        return zr_fail(ZERO_ERR_ARG, "GPU number is %d, must be 0 to %d", ordinal, count - 1);
    err = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, ordinal);
    if (!err)
        err = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, ordinal);
    if (err) {
        cudaGetLastError();
        return zr_fail(ZERO_ERR_SYSTEM, "GPU %d: cudaDeviceGetAttribute: %s (%s)", ordinal,
                       cudaGetErrorName(err), cudaGetErrorString(err));
    }
    if (major < 8)
        return zr_fail(ZERO_ERR_NOTSUP, "GPU %d has compute capability %d.%d, but bf16 needs 8.0 or more",
                       ordinal, major, minor);
    return 0;
}

/* Reads the GPU's clock between two readings of the host's, several times. The closest pair of readings gives
 * the offset. This is the first kernel, so it also shows whether this library has code for the GPU. */
static int learn_clock(struct zr_cuda_device *dev)
{
    struct zr_stream *s = NULL;
    void *at = NULL;
    int64_t best = INT64_MAX, offset = 0;
    int err = zr_cuda_host_alloc(&dev->base, sizeof(int64_t), &at);
    if (!err)
        err = zr_cuda_stream_open(&dev->base, ZR_STREAM_QUEUE, "clock", NULL, &s);
    for (int i = 0; i < CLOCK_READINGS && !err; i++) {
        int64_t before = zr_now_ns(), after;
        err = ZR_CUDA(dev, "cudaLaunchKernel", zr_cuda_stamp(s->native, at, 0));
        if (!err)
            err = zr_cuda_stream_sync(s);
        after = zr_now_ns();
        if (!err && after - before < best) {
            best = after - before;
            offset = before + best / 2 - *(int64_t *)at;
        }
    }
    zr_cuda_stream_close(s);
    zr_cuda_host_free(&dev->base, at, sizeof(int64_t));
    dev->clock_offset = offset;
    return err;
}

/* Finds the driver's cuEventQuery in the library that the runtime has loaded. */
static int find_query(struct zr_cuda_device *dev)
{
    enum cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    void *at = NULL;
    ZR_TRY(ZR_CUDA(
        dev, "cudaGetDriverEntryPointByVersion",
        cudaGetDriverEntryPointByVersion("cuEventQuery", &at, DRIVER_NEEDED, cudaEnableDefault, &found)));
    if (!at || found != cudaDriverEntryPointSuccess)
        return zr_fail(ZERO_ERR_SYSTEM, "GPU %d: the driver has no cuEventQuery", dev->ordinal);
    *(void **)&dev->query = at;
    return 0;
}

int zr_cuda_device_open(int ordinal, struct zr_device **out)
{
    const char *poison = getenv("ZERO_POISON");
    *out = NULL;
    ZR_TRY(check_gpu(&ordinal));
    struct zr_cuda_device *dev;
    ZR_TRY(ZR_ZALLOC(dev, 1, "the device of GPU %d", ordinal));
    dev->base.ops = &zr_cuda_ops;
    dev->ordinal = ordinal;
    dev->poison = poison && strcmp(poison, "1") == 0;
    pthread_mutex_init(&dev->lock, NULL);
    int lowest;
    int err = ZR_CUDA(dev, "cudaDeviceGetStreamPriorityRange",
                      cudaDeviceGetStreamPriorityRange(&lowest, &dev->priority));
    if (!err)
        err = ZR_CUDA(dev, "cudaDeviceGetAttribute",
                      cudaDeviceGetAttribute(&dev->n_processors, cudaDevAttrMultiProcessorCount, ordinal));
    if (!err)
        err = find_query(dev);
    if (!err)
        err = learn_clock(dev);
    if (err) {
        zr_cuda_close(&dev->base);
        return err;
    }
    *out = &dev->base;
    return 0;
}
