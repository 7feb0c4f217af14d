/* SPDX-License-Identifier: Apache-2.0 */
/* stand_in.h: a CUDA runtime on the CPU, so that the host side of the GPU code, and the very text of its
 * kernels, run in tests where no GPU and no toolkit is.
 *
 * Streams are threads with in-order queues, device memory is the host's, and a kernel's threads are fibers
 * that run on the stream's thread, in an order drawn from a seed. Timing is not modelled. Order is: only what
 * CUDA orders is ordered, and under ThreadSanitizer two accesses that no event, stream or host wait orders
 * are a reported race, whatever the clock said (the stand-in's own locks are hidden from it). Under
 * AddressSanitizer kernels cannot leave their allocations.
 *
 * Misuse gives the error CUDA would give, or none where CUDA would not notice, and is counted and printed; a
 * program that ends with misuse no test has asked for exits with 99.
 *
 * Several devices. Each thread has a current one, number 0 until it chooses. As CUDA's programming guide has
 * it (multi-device system, stream and event behavior): a kernel for a stream of another device than the
 * current one is refused, and so is the record of an event on one of another device than the event's; waits
 * for, and queries of, another device's event are not. Copies, fills and host functions for another device's
 * stream, which CUDA takes, are refused here all the same: the thread that asks has not chosen its device.
 * Which devices have a context can be asked.
 *
 * Of stream capture there is what concerns others than the one who captures: the modes, and the unsafe calls
 * that invalidate a capture. What is captured is not modelled.
 *
 * Not modelled: that the CPU may not touch device memory; graphs; managed memory; memory pools; peer access;
 * dynamic shared memory.
 *
 * Environment, read at the first call: STAND_IN_DEVICES (1), STAND_IN_BYTES (of each device, 8 GiB), SEED. */
#ifndef ZR_TEST_STAND_IN_H
#define ZR_TEST_STAND_IN_H

#include <cuda_runtime_api.h>

#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* --- what tests control --- */

struct stand_in_machine {
    /* as cudaDriverGetVersion gives it; 0: no driver */
    int driver_version;
    /* 1..16; 0: a driver without devices */
    int n_devices;
    /* compute capability */
    int major, minor;
    /* memory of each device */
    int64_t device_bytes;
};

enum { STAND_IN_MOST_DEVICES = 16 };

/* The machine as it is; writable while no stream or memory exists. */
struct stand_in_machine *stand_in_the_machine(void);

/* From now on the k-th call of that name returns err, once; with lost, that and every later call on the
 * calling thread's current device does, and its streams run nothing more. k counts from 1; 0: none. call
 * NULL: of any name, but where a thread only asks, call after call, no more than two of each count, so that
 * the number does not depend on how long anything takes. */
void stand_in_fail(const char *call, int k, cudaError_t err, bool lost);
/* Calls of that name (NULL: of any, as above) since the last stand_in_fail or stand_in_end. */
int64_t stand_in_calls(const char *call);
/* Times that a call made the host wait for a stream since the last stand_in_end: cudaStreamSynchronize and
 * its like, cudaFree, and copies from or to memory that is not page-locked. */
int64_t stand_in_host_waits(void);

/* Whether anything has made a context on the device since the last stand_in_end. */
bool stand_in_has_context(int device);

/* Whether a wait on an event never recorded, which CUDA lets pass, is misuse. Default: not. */
void stand_in_forbid_unrecorded(bool forbid);

/* Number of misuses since the last call, their texts (one a line, the first few KiB) to *text when not NULL,
 * valid until the next call. Waits for all streams first. What is still open (memory, streams, events) is
 * misuse too. Forgets failures and lost devices. */
int stand_in_end(const char **text);

/* --- for the stand-ins of libraries above the runtime --- */

/* Begins an API call: counts it and gives the error it must return at once, or 0. Refused inside host
 * functions. */
cudaError_t stand_in_begin(const char *call);
/* Ends it: keeps err for cudaGetLastError. */
cudaError_t stand_in_done(cudaError_t err);

void stand_in_misuse(const char *fmt, ...) __attribute__((format(printf, 1, 2)));

/* Puts fn(arg) on the stream, in order, on its thread; drop(arg) (or nothing) when it has run or never will.
 * The stream must be of the calling thread's current device. fn may block. */
cudaError_t stand_in_put(cudaStream_t stream, const char *what, void (*fn)(void *arg), void *arg,
                         void (*drop)(void *arg));

/* Device memory of the current device, as cudaMalloc with an alignment (a power of two); kind is kept for
 * stand_in_find. Freed by cudaFree. */
cudaError_t stand_in_alloc(void **out, size_t bytes, size_t align, const char *kind);

/* Counts memory of the device as used without there being any; negative: no longer. */
void stand_in_use(int device, int64_t bytes);

struct stand_in_range {
    char *at;
    size_t bytes;
    int device;
    enum cudaMemoryType type;
    /* "cudaMalloc", "cudaHostAlloc", or what stand_in_alloc was given */
    const char *kind;
};
/* The live allocation that p lies in; false if there is none. */
bool stand_in_find(const void *p, struct stand_in_range *out);
/* True if [p, p + bytes) is within one live allocation of the device; else misuse named by what. */
bool stand_in_check_device_range(const char *what, const void *p, size_t bytes, int device);

/* Runs run(closure) for every thread of every block. The C++ template cudaLaunchKernel calls this. */
cudaError_t stand_in_launch(void (*run)(void *closure), void *closure, void (*drop)(void *closure),
                            struct dim3 grid, struct dim3 block, size_t shared_bytes, cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif
