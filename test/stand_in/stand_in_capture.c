/* SPDX-License-Identifier: Apache-2.0 */
/* stand_in_capture.c: stream capture as far as it concerns other threads: modes, and the calls that are
 * unsafe while a stream is captured. */
#include "test/stand_in/stand_in_inside.h"

#include <stdlib.h>
#include <string.h>

struct CUgraph_st {
    char unused;
};

static _Thread_local enum cudaStreamCaptureMode thread_mode;

/* At cudaThreadExchangeStreamCaptureMode, cuda_runtime_api.h names only cudaMalloc as a potentially unsafe
 * call. Reports of broken captures add queries of events (PyTorch's pull request 104555: by the watching
 * thread, of events recorded before the capture) and everything that waits. This refuses more than the
 * real runtime may refuse. */
static bool is_unsafe(const char *call)
{
    static const char *const names[] = {
        "cudaMalloc",     "cudaFree",        "cudaHostAlloc",         "cudaFreeHost",
        "cudaEventQuery", "cudaStreamQuery", "cudaEventSynchronize",  "cudaStreamSynchronize",
        "cudaMemcpy",     "cudaMemset",      "cudaDeviceSynchronize", "cuEventQuery",
    };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (strcmp(call, names[i]) == 0)
            return true;
    return false;
}

cudaError_t si_unsafe_in_capture(const char *call)
{
    bool met = false;
    if (thread_mode == cudaStreamCaptureModeRelaxed)
        return cudaSuccess;
    for (struct CUstream_st *s = si.streams; s; s = s->next) {
        if (s->capture == cudaStreamCaptureStatusNone || !is_unsafe(call))
            continue;
        bool own = pthread_equal(s->capture_thread, pthread_self());
        if (own ? s->capture_mode != cudaStreamCaptureModeRelaxed
                : s->capture_mode == cudaStreamCaptureModeGlobal &&
                      thread_mode == cudaStreamCaptureModeGlobal) {
            s->capture = cudaStreamCaptureStatusInvalidated;
            met = true;
        }
    }
    return met ? cudaErrorStreamCaptureUnsupported : cudaSuccess;
}

cudaError_t si_refuse_captured(const char *call, const struct CUstream_st *s)
{
    if (s->capture == cudaStreamCaptureStatusNone)
        return cudaSuccess;
    si_misuse_locked("%s: on a stream that is captured, which is not modelled", call);
    return cudaErrorNotSupported;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode)
{
    SI_BEGIN("cudaThreadExchangeStreamCaptureMode");
    if ((unsigned)*mode > cudaStreamCaptureModeRelaxed)
        return stand_in_done(cudaErrorInvalidValue);
    enum cudaStreamCaptureMode was = thread_mode;
    thread_mode = *mode;
    *mode = was;
    return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode)
{
    cudaError_t err = cudaErrorStreamCaptureUnsupported; /* for the NULL stream */
    SI_BEGIN("cudaStreamBeginCapture");
    si_lock();
    struct CUstream_st *s =
        stream && stream != cudaStreamLegacy ? si_stream("cudaStreamBeginCapture", stream, &err) : NULL;
    if (s && (s->capture != cudaStreamCaptureStatusNone || (unsigned)mode > cudaStreamCaptureModeRelaxed)) {
        err = cudaErrorInvalidValue;
    } else if (s) {
        s->capture = cudaStreamCaptureStatusActive;
        s->capture_mode = mode;
        s->capture_thread = pthread_self();
    }
    si_unlock();
    return stand_in_done(err);
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *pGraph)
{
    cudaError_t err = cudaErrorStreamCaptureUnmatched;
    *pGraph = NULL;
    SI_BEGIN("cudaStreamEndCapture");
    si_lock();
    struct CUstream_st *s = stream ? si_stream("cudaStreamEndCapture", stream, &err) : NULL;
    if (s && s->capture == cudaStreamCaptureStatusNone) {
        err = cudaErrorStreamCaptureUnmatched;
    } else if (s && s->capture_mode != cudaStreamCaptureModeRelaxed &&
               !pthread_equal(s->capture_thread, pthread_self())) {
        err = cudaErrorStreamCaptureWrongThread;
    } else if (s) {
        if (s->capture == cudaStreamCaptureStatusInvalidated)
            err = cudaErrorStreamCaptureInvalidated;
        else if (!(*pGraph = calloc(1, sizeof **pGraph)))
            err = cudaErrorMemoryAllocation;
        s->capture = cudaStreamCaptureStatusNone;
    }
    si_unlock();
    return stand_in_done(err);
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *pCaptureStatus)
{
    cudaError_t err;
    SI_BEGIN("cudaStreamIsCapturing");
    si_lock();
    struct CUstream_st *s = si_stream("cudaStreamIsCapturing", stream, &err);
    if (s)
        *pCaptureStatus = s->capture;
    si_unlock();
    return stand_in_done(err);
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph)
{
    SI_BEGIN("cudaGraphDestroy");
    free(graph);
    return cudaSuccess;
}
