/* SPDX-License-Identifier: Apache-2.0 */
/* stand_in.h: a CUDA runtime on the CPU. With it the host side of the GPU code, and the source of its
 * kernels, run in tests without a GPU and without the toolkit.
 *
 * Streams are threads with in-order queues, device memory is the host's, and a kernel's threads are fibers
 * on the stream's thread, in an order drawn from a seed. Timing is not modelled, but order is. Under
 * ThreadSanitizer, two accesses that no event, stream or host wait orders are a reported race, whenever
 * they happened; the stand-in's own locks are hidden from it. Under AddressSanitizer kernels cannot leave
 * their allocations.
 *
 * A misuse returns CUDA's error, or none if CUDA would not notice. It is counted and printed. A program
 * that ends with misuse that no test expected exits with 99.
 *
 * There may be several devices. A thread's current device is number 0 until it chooses another. By CUDA's
 * programming guide (multi-device system, stream and event behavior), these are refused:
 * - a kernel for a stream of another device than the current one
 * - a record of an event on a stream of another device than the event's
 *
 * Waits for and queries of another device's event are allowed. CUDA also takes copies, fills and host
 * functions for another device's stream; they are refused here, since the thread has forgotten to choose
 * its device. Tests can ask which devices have a context.
 *
 * Stream capture is modelled as far as it concerns other threads: the modes, and the unsafe calls that
 * invalidate a capture. Not modelled are captured work, graphs, managed memory, memory pools, peer access,
 * and dynamic shared memory.
 *
 * Streams share the hardware queues of their device, of which there are 8 unless
 * CUDA_DEVICE_MAX_CONNECTIONS says otherwise: an operation starts only when those in front of it in the
 * queue have started.
 *
 * The CPU cannot access device memory: such a program ends by SIGSEGV after a line that names the access.
 * With sanitizers it can.
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

/* --- controls for tests --- */

struct stand_in_machine {
    /* the version that cudaDriverGetVersion returns; 0: no driver */
    int driver_version;
    /* 1..16; 0: a driver without devices */
    int n_devices;
    /* compute capability */
    int major, minor;
    /* memory of each device */
    int64_t device_bytes;
};

enum { STAND_IN_MAX_DEVICES = 16 };

/* The machine's properties, which may be changed while no stream or memory exists. */
struct stand_in_machine *stand_in_the_machine(void);

/* From now on the k-th call of that name returns err, once. With lost, every later call on the calling
 * thread's current device returns it too, and its streams run nothing more. k counts from 1; 0: none. With
 * call NULL any name counts. Of a row of calls in which a thread only queries, at most two per kind count
 * then, so that the number does not depend on how long anything takes. */
void stand_in_fail(const char *call, int k, cudaError_t err, bool lost);
/* Number of calls of that name since the last stand_in_fail or stand_in_end (NULL: of any name, counted as
 * above). */
int64_t stand_in_calls(const char *call);
/* How often a call made the host wait for a stream since the last stand_in_end: cudaStreamSynchronize and
 * similar calls, cudaFree, and copies from or to memory that is not page-locked. */
int64_t stand_in_host_waits(void);

/* Returns whether any call has made a context on the device since the last stand_in_end. */
bool stand_in_has_context(int device);

/* Sets whether a wait for an event that was never recorded, which CUDA allows, is misuse. Default: it is
 * not. */
void stand_in_forbid_unrecorded(bool forbid);

/* Lets the calling thread access memory of its current device, which on a real one it cannot, until its
 * next call of CUDA. Tests whose models compute on the CPU need it. Meanwhile other threads can access that
 * device's memory too. */
void stand_in_touch(void);

/* Returns the number of misuses since the last call. Waits for all streams first. Memory, streams and
 * events that are still open are misuse too. If text is not NULL, *text gets the messages (one per line,
 * the first few KiB), valid until the next call. Forgets failures and lost devices. */
int stand_in_end(const char **text);

/* --- for the stand-ins of libraries that use the runtime --- */

/* Begins an API call: counts it, and returns the error that it must return at once, or 0. Refused inside
 * host functions. */
cudaError_t stand_in_begin(const char *call);
/* Ends an API call: keeps err for cudaGetLastError. */
cudaError_t stand_in_done(cudaError_t err);

void stand_in_misuse(const char *fmt, ...) __attribute__((format(printf, 1, 2)));

/* Puts fn(arg) on the stream, in order, on its thread. drop(arg), if set, is called after it has run or
 * when it never will. The stream must belong to the calling thread's current device. fn may block. */
cudaError_t stand_in_put(cudaStream_t stream, const char *what, void (*fn)(void *arg), void *arg,
                         void (*drop)(void *arg));

/* Calls visit(context, arg) for whatever stand_in_put has put and must be done before the work with the
 * argument work may start. */
void stand_in_before(const void *work, void (*visit)(void *context, void *arg), void *context);

/* Allocates memory on the current device, like cudaMalloc, with an alignment (a power of two). kind is
 * kept for stand_in_find. Free it with cudaFree. */
cudaError_t stand_in_alloc(void **out, size_t bytes, size_t align, const char *kind);

/* Counts memory of the device as used without allocating any; negative: as free again. */
void stand_in_use(int device, int64_t bytes);

struct stand_in_range {
    char *at;
    size_t bytes;
    int device;
    enum cudaMemoryType type;
    /* "cudaMalloc", "cudaHostAlloc", or the kind passed to stand_in_alloc */
    const char *kind;
};
/* Finds the live allocation that contains p. Returns false if there is none. */
bool stand_in_find(const void *p, struct stand_in_range *out);
/* Returns true if [p, p + bytes) is inside one live allocation of the device. Otherwise reports a misuse
 * named by what. */
bool stand_in_check_device_range(const char *what, const void *p, size_t bytes, int device);

/* Returns where the stand-in and its kernels access the memory that programs know by the address p. */
void *stand_in_reach(const void *p);

/* Runs run(closure) for every thread of every block. The closure is the kernel's arguments, of that many
 * bytes. The C++ template cudaLaunchKernel calls this. */
cudaError_t stand_in_launch(void (*run)(void *closure), void *closure, size_t bytes,
                            void (*drop)(void *closure), struct dim3 grid, struct dim3 block,
                            size_t shared_bytes, cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif
