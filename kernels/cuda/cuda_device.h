/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_device.h: the inside of the CUDA device, which implements device.h over the CUDA runtime.
 *
 * Streams and events are CUDA's own. These calls wait for the GPU: stream_sync, event_sync, stream_close,
 * free, and a copy from or to memory that is not page-locked. A call makes the GPU the thread's current
 * device, and afterwards restores the previous one. On a thread that never chose a device, that is number 0,
 * and restoring it would make a context there. So the library's own threads choose once (thread_begin).
 *
 * Tests run this device on a CPU, over a stand-in for the CUDA runtime (test/stand_in). */
#ifndef ZR_KERNELS_CUDA_DEVICE_H
#define ZR_KERNELS_CUDA_DEVICE_H

#include "kernels/device.h"

#include <cuda_runtime_api.h>

#include <pthread.h>

/* Memory given out. CUDA aligns less than device.h promises, so `at` lies inside the memory at `base`. */
struct zr_cuda_block {
    void *base, *at;
    struct zr_cuda_block *next;
};

struct zr_cuda_device {
    struct zr_device base;
    int ordinal;
    bool poison;
    /* priority of queue streams: the highest, so that communication starts before compute */
    int priority;
    /* number of multiprocessors */
    int n_processors;
    /* zr_now_ns() minus the GPU's global timer, in ns */
    int64_t clock_offset;
    /* the driver's cuEventQuery, whose results are numbered as the runtime's */
    cudaError_t (*query)(cudaEvent_t event);
    /* protects blocks */
    pthread_mutex_t lock;
    struct zr_cuda_block *blocks;
};

/* The arguments of one call(), which are used again after it has run. */
struct zr_cuda_closure {
    _Alignas(16) unsigned char arg[ZR_CALL_BYTES];
    void (*fn)(void *arg);
    struct zr_stream *stream;
    struct zr_cuda_closure *next_free, *next;
};

struct zr_stream {
    struct zr_cuda_device *dev;
    cudaStream_t native;
    /* a queue, which this device destroys */
    bool owned;
    /* protects the two lists, because a closure returns on a thread of CUDA */
    pthread_mutex_t lock;
    struct zr_cuda_closure *free, *all;
};

struct zr_event {
    struct zr_cuda_device *dev;
    cudaEvent_t native;
};

/* Reports a failed call with CUDA's name and text for it, and clears CUDA's record of it. Returns
 * ZERO_ERR_NOMEM for a lack of memory, else ZERO_ERR_SYSTEM, and 0 if err is no error. */
int zr_cuda_check(const struct zr_cuda_device *dev, const char *call, cudaError_t err);

/* zr_cuda_enter makes the device current, and stores the previous one in *was. zr_cuda_leave restores it, and
 * reports err with zr_cuda_check. */
cudaError_t zr_cuda_enter(const struct zr_cuda_device *dev, int *was);
int zr_cuda_leave(const struct zr_cuda_device *dev, int was, const char *call, cudaError_t err);

/* Evaluates expression, a cudaError_t of one runtime call, with dev current. The value is 0 or a zero_err. */
#define ZR_CUDA(dev, call, expression)                                                                       \
    ({                                                                                                       \
        int was_;                                                                                            \
        cudaError_t err_ = zr_cuda_enter(dev, &was_);                                                        \
        if (!err_)                                                                                           \
            err_ = (expression);                                                                             \
        zr_cuda_leave(dev, was_, call, err_);                                                                \
    })

/* Does the same for a call that CUDA may forbid while some thread captures a stream, because it waits,
 * queries or allocates. It never concerns captured work, so it need not invalidate the program's capture. */
#define ZR_CUDA_OUTSIDE(dev, call, expression)                                                               \
    ZR_CUDA(dev, call, ({                                                                                    \
                enum cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;                             \
                cudaError_t out_ = cudaThreadExchangeStreamCaptureMode(&mode_);                              \
                if (!out_) {                                                                                 \
                    out_ = (expression);                                                                     \
                    if (cudaThreadExchangeStreamCaptureMode(&mode_))                                         \
                        cudaGetLastError();                                                                  \
                }                                                                                            \
                out_;                                                                                        \
            }))

/* cuda_stream.c: streams and events. */
int zr_cuda_stream_open(struct zr_device *dev, enum zr_stream_kind kind, const char *name, void *native,
                        struct zr_stream **out);
void zr_cuda_stream_close(struct zr_stream *s);
int zr_cuda_stream_sync(struct zr_stream *s);
void *zr_cuda_stream_native(struct zr_stream *s);
int zr_cuda_event_open(struct zr_device *dev, struct zr_event **out);
void zr_cuda_event_close(struct zr_event *e);
int zr_cuda_event_record(struct zr_event *e, struct zr_stream *s);
int zr_cuda_stream_wait(struct zr_stream *s, struct zr_event *e);
int zr_cuda_event_sync(struct zr_event *e);
int zr_cuda_event_query(struct zr_event *e);
int zr_cuda_stream_call(struct zr_stream *s, void (*fn)(void *arg), const void *arg, size_t bytes);

/* cuda_ops.c: the table of functions. */
extern const struct zr_device_ops zr_cuda_ops;
/* cuda_device.c: memory. */
void zr_cuda_close(struct zr_device *dev);
int zr_cuda_alloc(struct zr_device *dev, int64_t bytes, void **out);
void zr_cuda_free(struct zr_device *dev, void *p, int64_t bytes);
int zr_cuda_host_alloc(struct zr_device *dev, int64_t bytes, void **out);
void zr_cuda_host_free(struct zr_device *dev, void *p, int64_t bytes);
int zr_cuda_thread_begin(struct zr_device *dev);
int zr_cuda_memory(struct zr_device *dev, int64_t *free_bytes, int64_t *total_bytes);

#endif
