/* SPDX-License-Identifier: Apache-2.0 */
/* stand_in_state.c: the stand-in's machine, lock, failures on demand, and record of misuse. */
#include "test/stand_in/stand_in_inside.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct si_state si = {.lock = PTHREAD_MUTEX_INITIALIZER,
                      .moved = PTHREAD_COND_INITIALIZER,
                      .n_queues = 8,
                      .machine = {.driver_version = CUDART_VERSION,
                                  .n_devices = 1,
                                  .major = 9,
                                  .minor = 0,
                                  .device_bytes = INT64_C(8) << 30}};

static _Thread_local int current_device;
static _Thread_local cudaError_t last_error;
_Thread_local bool si_in_host_function, si_on_stream;

/* --- the lock --- */

void si_lock(void)
{
#ifdef STAND_IN_TSAN
    AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
    AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
    AnnotateIgnoreSyncBegin(__FILE__, __LINE__);
#endif
    pthread_mutex_lock(&si.lock);
}

void si_unlock(void)
{
    pthread_mutex_unlock(&si.lock);
#ifdef STAND_IN_TSAN
    AnnotateIgnoreSyncEnd(__FILE__, __LINE__);
    AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
    AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
#endif
}

void si_wait(pthread_cond_t *cond)
{
    pthread_cond_wait(cond, &si.lock);
}

/* --- the machine --- */

__attribute__((constructor)) static void read_environment(void)
{
    const char *devices = getenv("STAND_IN_DEVICES"), *bytes = getenv("STAND_IN_BYTES"),
               *seed = getenv("SEED"), *queues = getenv("CUDA_DEVICE_MAX_CONNECTIONS");
    if (devices)
        si.machine.n_devices = atoi(devices);
    if (queues && atoi(queues) >= 1 && atoi(queues) <= SI_MAX_QUEUES)
        si.n_queues = atoi(queues);
    if (bytes)
        si.machine.device_bytes = strtoll(bytes, NULL, 0);
    si.seed = seed ? strtoull(seed, NULL, 0) : (uint64_t)getpid();
}

struct stand_in_machine *stand_in_the_machine(void)
{
    return &si.machine;
}

void stand_in_forbid_unrecorded(bool forbid)
{
    si_lock();
    si.forbid_unrecorded = forbid;
    si_unlock();
}

/* --- misuse --- */

static struct {
    int n;
    char text[8192];
} misuse;

static void vmisuse(const char *fmt, va_list ap)
{
    size_t used = strlen(misuse.text);
    char line[512];
    vsnprintf(line, sizeof line, fmt, ap);
    fprintf(stderr, "stand-in: misuse: %s\n", line);
    snprintf(misuse.text + used, sizeof misuse.text - used, "%s\n", line);
    misuse.n++;
}

void si_misuse_locked(const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    vmisuse(fmt, ap);
    va_end(ap);
}

void stand_in_misuse(const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    si_lock();
    vmisuse(fmt, ap);
    si_unlock();
    va_end(ap);
}

__attribute__((destructor)) static void no_silent_misuse(void)
{
    if (misuse.n) {
        fprintf(stderr, "stand-in: the program ends with %d misuses that nobody asked for\n", misuse.n);
        _exit(99);
    }
}

/* --- failures and counts --- */

enum { MAX_CALLS = 96 };

static struct {
    struct {
        const char *name;
        int64_t n;
    } call[MAX_CALLS];
    int n_names;
    int64_t n;
    char fail_name[64];
    int64_t fail_in; /* 0: none */
    cudaError_t fail_with;
    bool lost;
} calls;

/* A call passes the same string each time, so comparing pointers usually finds it. */
static int64_t *count_of(const char *name)
{
    for (int i = 0; i < calls.n_names; i++)
        if (calls.call[i].name == name)
            return &calls.call[i].n;
    for (int i = 0; i < calls.n_names; i++)
        if (strcmp(calls.call[i].name, name) == 0)
            return &calls.call[i].n;
    if (calls.n_names == MAX_CALLS)
        abort();
    calls.call[calls.n_names].name = name;
    calls.call[calls.n_names].n = 0;
    return &calls.call[calls.n_names++].n;
}

void stand_in_fail(const char *call, int k, cudaError_t err, bool lost)
{
    si_lock();
    memset(&calls, 0, sizeof calls);
    snprintf(calls.fail_name, sizeof calls.fail_name, "%s", call ? call : "");
    calls.fail_in = k;
    calls.fail_with = err;
    calls.lost = lost;
    si_unlock();
}

int64_t stand_in_calls(const char *call)
{
    si_lock();
    int64_t n = calls.n;
    if (call) {
        n = 0;
        for (int i = 0; i < calls.n_names; i++)
            if (strcmp(calls.call[i].name, call) == 0)
                n = calls.call[i].n;
    }
    si_unlock();
    return n;
}

int64_t stand_in_host_waits(void)
{
    si_lock();
    int64_t n = si.n_host_waits;
    si_unlock();
    return n;
}

/* Calls that query devices and use none. Any other call makes the primary context of the calling thread's
 * current device if there is none yet, about 0.5 GB on a real one. A thread that never chose a device has
 * number 0. That includes cudaThreadExchangeStreamCaptureMode and cudaEventQuery, even of another device's
 * event. Since CUDA 12 cudaSetDevice itself makes the context (its comment in cuda_runtime_api.h). */
static bool makes_no_context(const char *call)
{
    static const char *const names[] = {"cudaGetDeviceCount",    "cudaSetDevice",
                                        "cudaGetDevice",         "cudaGetDeviceProperties",
                                        "cudaDeviceGetPCIBusId", "cudaDeviceGetAttribute"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (strcmp(call, names[i]) == 0)
            return true;
    return false;
}

bool stand_in_has_context(int device)
{
    si_lock();
    bool has = si.device[device].has_context;
    si_unlock();
    return has;
}

/* A thread that waits by polling repeats the same few calls, as often as the wait takes. In a row of calls
 * that only query, each counts at most twice: once on the way in, and once on the way out where a call
 * encloses others. */
static bool asks_again(const char *call)
{
    static const char *const asking[] = {"cudaEventQuery", "cuEventQuery", "cudaStreamQuery", "cudaGetDevice",
                                         "cudaThreadExchangeStreamCaptureMode"};
    enum { N_ASKING = sizeof asking / sizeof *asking };
    static _Thread_local int n_asked[N_ASKING];
    for (int i = 0; i < N_ASKING; i++)
        if (strcmp(call, asking[i]) == 0)
            return ++n_asked[i] > 2;
    memset(n_asked, 0, sizeof n_asked);
    return false;
}

cudaError_t stand_in_begin(const char *call)
{
    cudaError_t err = cudaSuccess;
    si_touch_end();
    if (si_in_host_function) {
        stand_in_misuse("%s inside a host function", call);
        return cudaErrorNotPermitted;
    }
    bool again = asks_again(call);
    si_lock();
    calls.n += !again;
    ++*count_of(call);
    bool may_fail = calls.fail_name[0] ? strcmp(calls.fail_name, call) == 0 : !again;
    if (calls.fail_in > 0 && may_fail && --calls.fail_in == 0) {
        err = calls.fail_with;
        if (calls.lost)
            si.device[current_device].lost = err;
    }
    if (!err)
        err = si.device[current_device].lost;
    if (si.device[current_device].lost)
        si_wait_for_lost(current_device);
    if (si.machine.driver_version == 0)
        err = cudaErrorInsufficientDriver; /* the real one's answer if it finds no driver */
    if (!err)
        err = si_unsafe_in_capture(call);
    if (!err && !si.device[current_device].has_context)
        si.device[current_device].has_context = !makes_no_context(call);
    si_unlock();
    return err;
}

cudaError_t stand_in_done(cudaError_t err)
{
    if (err)
        last_error = err;
    return err;
}

int stand_in_end(const char **text)
{
    static char reported[sizeof misuse.text];
    si_lock();
    si_wait_for_device(-1);
    si_streams_end();
    si_memory_end();
    si_closed_end();
    memset(&calls, 0, sizeof calls);
    si.n_host_waits = 0;
    si.forbid_unrecorded = false;
    for (int i = 0; i < STAND_IN_MAX_DEVICES; i++) {
        si.device[i].lost = cudaSuccess;
        si.device[i].has_context = false;
    }
    int n = misuse.n;
    memcpy(reported, misuse.text, sizeof reported);
    misuse.n = 0;
    misuse.text[0] = 0;
    si_unlock();
    if (text)
        *text = reported;
    return n;
}

/* --- errors and devices --- */

cudaError_t cudaGetLastError(void)
{
    cudaError_t err = last_error;
    last_error = cudaSuccess;
    return err;
}

cudaError_t cudaPeekAtLastError(void)
{
    return last_error;
}

static const struct {
    cudaError_t code;
    const char *name, *text;
} errors[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInitializationError, "cudaErrorInitializationError", "initialization error"},
    {cudaErrorInvalidConfiguration, "cudaErrorInvalidConfiguration", "invalid configuration argument"},
    {cudaErrorInsufficientDriver, "cudaErrorInsufficientDriver",
     "CUDA driver version is insufficient for CUDA runtime version"},
    {cudaErrorNoDevice, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorNoKernelImageForDevice, "cudaErrorNoKernelImageForDevice",
     "no kernel image is available for execution on the device"},
    {cudaErrorInvalidMemcpyDirection, "cudaErrorInvalidMemcpyDirection", "invalid copy direction for memcpy"},
    {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
    {cudaErrorIllegalAddress, "cudaErrorIllegalAddress", "an illegal memory access was encountered"},
    {cudaErrorLaunchFailure, "cudaErrorLaunchFailure", "unspecified launch failure"},
    {cudaErrorNotPermitted, "cudaErrorNotPermitted", "operation not permitted"},
    {cudaErrorNotSupported, "cudaErrorNotSupported", "operation not supported"},
    {cudaErrorStreamCaptureUnsupported, "cudaErrorStreamCaptureUnsupported",
     "operation not permitted when stream is capturing"},
    {cudaErrorStreamCaptureInvalidated, "cudaErrorStreamCaptureInvalidated",
     "operation failed due to a previous error during capture"},
    {cudaErrorStreamCaptureUnmatched, "cudaErrorStreamCaptureUnmatched",
     "the capture was not initiated in this stream"},
    {cudaErrorStreamCaptureWrongThread, "cudaErrorStreamCaptureWrongThread",
     "attempt to terminate a thread-local capture sequence from another thread"},
    {cudaErrorUnknown, "cudaErrorUnknown", "unknown error"},
};

const char *cudaGetErrorName(cudaError_t error)
{
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].code == error)
            return errors[i].name;
    return "unrecognized error code";
}

const char *cudaGetErrorString(cudaError_t error)
{
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].code == error)
            return errors[i].text;
    return "unrecognized error code";
}

cudaError_t cudaDriverGetVersion(int *driverVersion)
{
    *driverVersion = si.machine.driver_version; /* succeeds with 0 if there is no driver */
    return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int *runtimeVersion)
{
    *runtimeVersion = CUDART_VERSION;
    return cudaSuccess;
}

/* The check with which every call that needs a device begins. */
static cudaError_t no_driver(void)
{
    if (si.machine.driver_version == 0 || si.machine.driver_version < CUDART_VERSION / 1000 * 1000)
        return cudaErrorInsufficientDriver;
    return si.machine.n_devices == 0 ? cudaErrorNoDevice : cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int *count)
{
    *count = 0;
    SI_BEGIN("cudaGetDeviceCount");
    cudaError_t err = no_driver();
    if (!err)
        *count = si.machine.n_devices;
    return stand_in_done(err);
}

static cudaError_t check_device(const char *call, int device)
{
    SI_BEGIN(call);
    cudaError_t err = no_driver();
    if (!err && (device < 0 || device >= si.machine.n_devices))
        err = cudaErrorInvalidDevice;
    return stand_in_done(err);
}

cudaError_t cudaSetDevice(int device)
{
    cudaError_t err = check_device("cudaSetDevice", device);
    if (!err) {
        current_device = device;
        si_lock();
        si.device[device].has_context = true;
        si_unlock();
    }
    return err;
}

cudaError_t cudaGetDevice(int *device)
{
    SI_BEGIN("cudaGetDevice");
    *device = current_device;
    return cudaSuccess;
}

int si_device(void)
{
    return current_device;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *prop, int device)
{
    cudaError_t err = check_device("cudaGetDeviceProperties", device);
    if (err)
        return err;
    memset(prop, 0, sizeof *prop);
    snprintf(prop->name, sizeof prop->name, "stand-in");
    prop->totalGlobalMem = (size_t)si.machine.device_bytes;
    prop->major = si.machine.major;
    prop->minor = si.machine.minor;
    prop->multiProcessorCount = 2;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attr, int device)
{
    cudaError_t err = check_device("cudaDeviceGetAttribute", device);
    if (err)
        return err;
    switch (attr) {
    case cudaDevAttrMaxThreadsPerBlock:
        *value = 1024;
        return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlock:
        *value = 48 << 10;
        return cudaSuccess;
    case cudaDevAttrMultiProcessorCount:
        *value = 2; /* few, so that grids sized by it still loop */
        return cudaSuccess;
    case cudaDevAttrComputeCapabilityMajor:
        *value = si.machine.major;
        return cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor:
        *value = si.machine.minor;
        return cudaSuccess;
    }
    return stand_in_done(cudaErrorInvalidValue);
}

cudaError_t cudaDeviceGetPCIBusId(char *pciBusId, int len, int device)
{
    cudaError_t err = check_device("cudaDeviceGetPCIBusId", device);
    if (!err)
        snprintf(pciBusId, (size_t)len, "0000:%02x:00.0", device);
    return err;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *leastPriority, int *greatestPriority)
{
    SI_BEGIN("cudaDeviceGetStreamPriorityRange");
    *leastPriority = 0;
    *greatestPriority = -5;
    return cudaSuccess;
}
