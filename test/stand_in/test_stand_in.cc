/* SPDX-License-Identifier: Apache-2.0 */
/* test_stand_in.cc: the stand-in itself: that it orders what CUDA orders, runs kernels whose threads need
 * each other, and notices misuse. */
#include <cuda_runtime.h>

#include "bench/model/tensor_core.h"

#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csetjmp>
#include <csignal>
#include <cstdarg>
#include <cstddef>
#include <cstdio>
#include <cstdlib>

extern "C" {
#include <cmocka.h>
}

#define OK(call) assert_int_equal(call, cudaSuccess)

static void nothing_wrong()
{
    const char *text;
    assert_int_equal(stand_in_end(&text), 0);
}

static void wrong(int n, const char *part)
{
    const char *text;
    assert_int_equal(stand_in_end(&text), n);
    assert_non_null(std::strstr(text, part));
}

/* --- kernels --- */

/* out[block] = sum of in over the block's elements, by shuffles and shared memory. */
__global__ static void sum_kernel(const int *in, int *out, int n)
{
    __shared__ int part[32];
    int i = (int)(blockIdx.x * blockDim.x + threadIdx.x), lane = (int)(threadIdx.x % 32);
    int sum = i < n ? in[i] : 0;
    for (int by = 16; by; by /= 2)
        sum += __shfl_down_sync(0xffffffffu, sum, (unsigned)by);
    if (lane == 0)
        part[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
        sum = 0;
        for (unsigned w = 0; w < blockDim.x / 32; w++)
            sum += part[w];
        atomicAdd(out, sum);
        out[1 + blockIdx.x] = sum;
    }
}

static void test_kernel_with_barriers(void **)
{
    enum { N = 5000, BLOCK = 256, BLOCKS = (N + BLOCK - 1) / BLOCK };
    int *in, *out, host[N], got[1 + BLOCKS], n = N, total = 0;
    cudaStream_t s;
    OK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
    OK(cudaMalloc(&in, sizeof host));
    OK(cudaMalloc(&out, sizeof got));
    for (int i = 0; i < N; i++)
        total += host[i] = rand() % 1000;
    OK(cudaMemcpyAsync(in, host, sizeof host, cudaMemcpyDefault, s));
    OK(cudaMemsetAsync(out, 0, sizeof got, s));
    void *args[] = {&in, &out, &n};
    OK(cudaLaunchKernel(sum_kernel, dim3(BLOCKS), dim3(BLOCK), args, 0, s));
    OK(cudaMemcpyAsync(got, out, sizeof got, cudaMemcpyDefault, s));
    assert_int_equal(got[0], total);
    for (int b = 0; b < BLOCKS; b++) {
        int sum = 0;
        for (int i = b * BLOCK; i < N && i < (b + 1) * BLOCK; i++)
            sum += host[i];
        assert_int_equal(got[1 + b], sum);
    }
    OK(cudaFree(in));
    OK(cudaFree(out));
    OK(cudaStreamDestroy(s));
    nothing_wrong();
}

/* Every lane's view of each kind of exchange. */
__global__ static void exchange_kernel(int *out)
{
    int lane = (int)threadIdx.x;
    out[lane] = __shfl_sync(0xffffffffu, lane * 10, 5);
    out[32 + lane] = __shfl_xor_sync(0xffffffffu, lane, 3);
    out[64 + lane] = __shfl_down_sync(0xffffffffu, lane, 30);
    out[96 + lane] = __shfl_up_sync(0xffffffffu, lane, 4);
    out[128 + lane] = __shfl_down_sync(0xffffffffu, lane, 1, 8);
    out[160 + lane] = (int)__ballot_sync(0xffffffffu, lane % 3 == 0);
    out[192 + lane] = lane < 8 ? __shfl_xor_sync(0xffu, lane, 1) : __all_sync(0xffffff00u, lane > 7);
}

static void test_exchanges(void **)
{
    int *out, got[224];
    OK(cudaMalloc(&out, sizeof got));
    void *args[] = {&out};
    OK(cudaLaunchKernel(exchange_kernel, dim3(1), dim3(32), args));
    OK(cudaMemcpy(got, out, sizeof got, cudaMemcpyDeviceToHost));
    unsigned thirds = 0;
    for (int i = 0; i < 32; i += 3)
        thirds |= 1u << i;
    for (int i = 0; i < 32; i++) {
        assert_int_equal(got[i], 50);
        assert_int_equal(got[32 + i], i ^ 3);
        assert_int_equal(got[64 + i], i < 2 ? i + 30 : i);
        assert_int_equal(got[96 + i], i < 4 ? i : i - 4);
        assert_int_equal(got[128 + i], i % 8 == 7 ? i : i + 1);
        assert_int_equal(got[160 + i], (int)thirds);
        assert_int_equal(got[192 + i], i < 8 ? (i ^ 1) : 1);
    }
    OK(cudaFree(out));
    nothing_wrong();
}

/* How each copy looks before it is waited for and after, of those there is something for and of those not. */
__global__ static void copy_kernel(const int *in, int *out, int off, bool wait)
{
    alignas(16) __shared__ int to[32][4];
    int lane = (int)threadIdx.x;
    copy_16_bytes(to[lane], in + 4 * lane + off, lane % 2 == 0);
    if (wait) {
        out[lane] = to[lane][3];
        wait_for_copies();
        __syncwarp();
        out[32 + lane] = to[lane ^ 2][3];
        copy_4_bytes(&to[lane][1], in + lane, lane % 3 == 0);
        wait_for_copies();
        out[64 + lane] = to[lane][1];
    }
}

static void test_copies(void **)
{
    int *in, *out, host[129], got[96], off = 0;
    bool wait = true;
    OK(cudaMalloc(&in, sizeof host));
    OK(cudaMalloc(&out, sizeof got));
    for (int i = 0; i < 129; i++)
        host[i] = i + 1;
    OK(cudaMemcpy(in, host, sizeof host, cudaMemcpyHostToDevice));
    void *args[] = {&in, &out, &off, &wait};
    OK(cudaLaunchKernel(copy_kernel, dim3(1), dim3(32), args));
    OK(cudaMemcpy(got, out, sizeof got, cudaMemcpyDeviceToHost));
    for (int i = 0; i < 32; i++) {
        assert_int_equal(got[i], -1);
        assert_int_equal(got[32 + i], i % 2 == 0 ? 4 * (i ^ 2) + 4 : 0);
        assert_int_equal(got[64 + i], i % 3 == 0 ? i + 1 : 0);
    }
    off = 1;
    OK(cudaLaunchKernel(copy_kernel, dim3(1), dim3(32), args));
    OK(cudaDeviceSynchronize());
    off = 0;
    wait = false;
    OK(cudaLaunchKernel(copy_kernel, dim3(2), dim3(32), args));
    OK(cudaFree(in));
    OK(cudaFree(out));
    const char *text;
    assert_int_equal(stand_in_end(&text),
                     16 + 32); /* the lanes that read from off; those of one block of two */
    assert_non_null(std::strstr(text, "not a multiple"));
    assert_non_null(std::strstr(text, "had not waited"));
}

__global__ static void divergent_kernel(int *out)
{
    if (threadIdx.x != 7)
        out[threadIdx.x] = __shfl_sync(0xffffffffu, 1, 0);
}

static void test_divergence(void **)
{
    int *out;
    OK(cudaMalloc(&out, 128));
    void *args[] = {&out};
    OK(cudaLaunchKernel(divergent_kernel, dim3(1), dim3(32), args));
    assert_int_equal(cudaDeviceSynchronize(), cudaErrorLaunchFailure);
    assert_int_equal(cudaGetLastError(), cudaErrorLaunchFailure);
    assert_int_equal(cudaGetLastError(), cudaSuccess);
    wrong(1, "not all reach"); /* not the memory: a lost device cannot free it */
}

/* --- order --- */

struct gate {
    pthread_mutex_t lock;
    pthread_cond_t cond;
    bool open;
};

static void wait_gate(void *arg)
{
    gate *g = static_cast<gate *>(arg);
    pthread_mutex_lock(&g->lock);
    while (!g->open)
        pthread_cond_wait(&g->cond, &g->lock);
    pthread_mutex_unlock(&g->lock);
}

static void open_gate(gate *g)
{
    pthread_mutex_lock(&g->lock);
    g->open = true;
    pthread_cond_broadcast(&g->cond);
    pthread_mutex_unlock(&g->lock);
}

/* The NULL stream waits for blocking streams, and they for it; a non-blocking one goes its own way. */
static void test_null_stream(void **)
{
    gate first = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, false}, second = first;
    cudaStream_t blocking, apart;
    OK(cudaStreamCreate(&blocking));
    OK(cudaStreamCreateWithFlags(&apart, cudaStreamNonBlocking));
    OK(stand_in_put(blocking, "held", wait_gate, &first, NULL));
    OK(stand_in_put(NULL, "held", wait_gate, &second, NULL));
    assert_int_equal(cudaStreamQuery(NULL), cudaErrorNotReady);
    OK(cudaLaunchHostFunc(
        apart, [](void *) {}, NULL));
    OK(cudaStreamSynchronize(apart));
    open_gate(&first);
    OK(cudaStreamSynchronize(blocking));
    OK(cudaLaunchHostFunc(
        blocking, [](void *) {}, NULL));
    assert_int_equal(cudaStreamQuery(blocking), cudaErrorNotReady); /* behind the NULL stream's */
    open_gate(&second);
    OK(cudaDeviceSynchronize());
    OK(cudaStreamQuery(blocking));
    OK(cudaStreamDestroy(blocking));
    OK(cudaStreamDestroy(apart));
    nothing_wrong();
}

static void test_events(void **)
{
    gate hold = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, false};
    cudaStream_t a, b;
    cudaEvent_t e, t;
    float ms;
    OK(cudaStreamCreateWithFlags(&a, cudaStreamNonBlocking));
    OK(cudaStreamCreateWithFlags(&b, cudaStreamNonBlocking));
    OK(cudaEventCreateWithFlags(&e, cudaEventDisableTiming));
    OK(cudaEventCreate(&t));
    OK(cudaEventQuery(e)); /* never recorded */
    OK(cudaStreamWaitEvent(b, e, 0));
    OK(cudaStreamSynchronize(b));
    OK(cudaEventRecord(t, a));
    OK(cudaLaunchHostFunc(a, wait_gate, &hold));
    OK(cudaEventRecord(e, a));
    assert_int_equal(cudaEventQuery(e), cudaErrorNotReady);
    OK(cudaStreamWaitEvent(b, e, 0));
    OK(cudaEventRecord(e, b)); /* the wait above is for the record of its time */
    assert_int_equal(cudaStreamQuery(b), cudaErrorNotReady);
    open_gate(&hold);
    OK(cudaEventSynchronize(e));
    OK(cudaStreamQuery(a));
    assert_int_equal(cudaEventElapsedTime(&ms, t, e), cudaErrorInvalidResourceHandle);
    OK(cudaEventElapsedTime(&ms, t, t));
    assert_true(ms == 0);
    OK(cudaEventDestroy(e));
    OK(cudaEventDestroy(t));
    OK(cudaStreamDestroy(a));
    OK(cudaStreamDestroy(b));
    nothing_wrong();
}

struct crowd {
    int inside, most;
};

static void enter_and_leave(void *arg)
{
    crowd *c = static_cast<crowd *>(arg);
    int inside = __atomic_add_fetch(&c->inside, 1, __ATOMIC_SEQ_CST);
    if (inside > __atomic_load_n(&c->most, __ATOMIC_SEQ_CST))
        __atomic_store_n(&c->most, inside, __ATOMIC_SEQ_CST);
    usleep(200);
    __atomic_sub_fetch(&c->inside, 1, __ATOMIC_SEQ_CST);
}

/* CUDA has one thread for the host functions of a device's streams. */
static void test_host_functions_one_at_a_time(void **)
{
    enum { STREAMS = 4, EACH = 20 };
    crowd c = {0, 0};
    cudaStream_t s[STREAMS];
    for (int i = 0; i < STREAMS; i++)
        OK(cudaStreamCreateWithFlags(&s[i], cudaStreamNonBlocking));
    for (int k = 0; k < EACH; k++)
        for (int i = 0; i < STREAMS; i++)
            OK(cudaLaunchHostFunc(s[i], enter_and_leave, &c));
    OK(cudaDeviceSynchronize());
    assert_int_equal(c.most, 1);
    for (int i = 0; i < STREAMS; i++)
        OK(cudaStreamDestroy(s[i]));
    nothing_wrong();
}

/* --- misuse --- */

static void call_cuda(void *)
{
    void *p;
    assert_int_equal(cudaMalloc(&p, 1), cudaErrorNotPermitted);
}

static void test_misuse(void **)
{
    void *p, *q;
    cudaStream_t s;
    cudaEvent_t e;
    OK(cudaStreamCreate(&s));
    OK(cudaEventCreate(&e));
    OK(cudaMalloc(&p, 100));
    assert_int_equal(cudaMemsetAsync(p, 0, 101, s), cudaErrorInvalidValue);
    wrong(4, "101 bytes at 0 of an allocation of 100"); /* and memory, stream and event left behind */

    OK(cudaMalloc(&p, 100));
    OK(cudaFree(p));
    assert_int_equal(cudaMemset(p, 0, 1), cudaErrorInvalidValue);
    wrong(1, "freed memory");
    assert_int_equal(cudaFree(&p), cudaErrorInvalidValue);
    wrong(1, "not the start of live memory");

    OK(cudaStreamCreate(&s));
    OK(cudaStreamDestroy(s));
    assert_int_equal(cudaStreamSynchronize(s), cudaErrorInvalidResourceHandle);
    wrong(1, "destroyed");
    assert_int_equal(cudaEventRecord(reinterpret_cast<cudaEvent_t>(&p), NULL),
                     cudaErrorInvalidResourceHandle);
    wrong(1, "destroyed");

    OK(cudaLaunchHostFunc(NULL, call_cuda, NULL));
    wrong(1, "cudaMalloc inside a host function");

    OK(cudaEventCreate(&e));
    stand_in_forbid_unrecorded(true);
    OK(cudaStreamWaitEvent(NULL, e, 0));
    OK(cudaEventDestroy(e));
    wrong(1, "never recorded");

    stand_in_the_machine()->n_devices = 2;
    OK(cudaSetDevice(1));
    OK(cudaStreamCreate(&s));
    OK(cudaSetDevice(0));
    OK(cudaMalloc(&q, 1));
    assert_int_equal(cudaMemsetAsync(q, 0, 1, s), cudaErrorInvalidResourceHandle);
    OK(cudaStreamDestroy(s));
    OK(cudaFree(q));
    wrong(1, "the stream is of device 1");
    assert_int_equal(cudaSetDevice(2), cudaErrorInvalidDevice);
    stand_in_the_machine()->n_devices = 1;
    cudaGetLastError();
    nothing_wrong();
}

static void *ask(void *event)
{
    cudaError_t *out = static_cast<cudaError_t *>(malloc(sizeof *out));
    *out = cudaEventQuery(static_cast<cudaEvent_t>(event));
    return out;
}

static void *ask_relaxed(void *event)
{
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    cudaThreadExchangeStreamCaptureMode(&mode);
    return ask(event);
}

static cudaError_t on_a_thread(void *(*fn)(void *), void *arg)
{
    pthread_t id;
    void *got;
    assert_int_equal(pthread_create(&id, NULL, fn, arg), 0);
    pthread_join(id, &got);
    cudaError_t err = *static_cast<cudaError_t *>(got);
    free(got);
    return err;
}

/* A thread that never chose works on device 0, whoever's the event is that it asks after. */
static void test_contexts(void **)
{
    cudaEvent_t e;
    cudaStream_t s;
    stand_in_the_machine()->n_devices = 3;
    assert_false(stand_in_has_context(0));
    OK(cudaSetDevice(2));
    OK(cudaEventCreate(&e));
    OK(cudaStreamCreate(&s));
    assert_true(stand_in_has_context(2));
    assert_false(stand_in_has_context(0));
    OK(cudaSetDevice(1));
    assert_int_equal(cudaEventRecord(e, NULL), cudaErrorInvalidResourceHandle);
    cudaGetLastError();
    OK(cudaEventRecord(e, s));
    OK(cudaStreamWaitEvent(NULL, e, 0));
    OK(cudaEventSynchronize(e));
    OK(on_a_thread(ask, e));
    assert_true(stand_in_has_context(0));
    OK(cudaEventDestroy(e));
    OK(cudaStreamDestroy(s));
    OK(cudaSetDevice(0));
    stand_in_the_machine()->n_devices = 1;
    nothing_wrong();
}

static void test_capture(void **)
{
    cudaEvent_t e;
    cudaStream_t s;
    cudaGraph_t graph;
    cudaStreamCaptureStatus status;
    void *p;
    OK(cudaEventCreate(&e));
    OK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
    for (int how = 0; how < 6; how++) {
        OK(cudaStreamBeginCapture(s, how == 3   ? cudaStreamCaptureModeThreadLocal
                                     : how == 4 ? cudaStreamCaptureModeRelaxed
                                                : cudaStreamCaptureModeGlobal));
        bool broken = how == 0 || how == 5;
        if (how == 0 || how == 3 || how == 4)
            assert_int_equal(on_a_thread(ask, e), broken ? cudaErrorStreamCaptureUnsupported : cudaSuccess);
        if (how == 2)
            OK(on_a_thread(ask_relaxed, e));
        if (how == 4)
            OK(cudaMalloc(&p, 1));
        if (how == 5)
            assert_int_equal(cudaMalloc(&p, 1), cudaErrorStreamCaptureUnsupported);
        OK(cudaStreamIsCapturing(s, &status));
        assert_int_equal(status, broken ? cudaStreamCaptureStatusInvalidated : cudaStreamCaptureStatusActive);
        assert_int_equal(cudaStreamEndCapture(s, &graph),
                         broken ? cudaErrorStreamCaptureInvalidated : cudaSuccess);
        assert_int_equal(graph == NULL, broken);
        OK(cudaGraphDestroy(graph));
        if (how == 4)
            OK(cudaFree(p));
    }
    assert_int_equal(cudaStreamEndCapture(s, &graph), cudaErrorStreamCaptureUnmatched);
    cudaGetLastError();
    OK(cudaStreamDestroy(s));
    OK(cudaEventDestroy(e));
    nothing_wrong();
}

static void test_failures(void **)
{
    void *p;
    stand_in_fail("cudaMalloc", 2, cudaErrorMemoryAllocation, false);
    OK(cudaMalloc(&p, 1));
    OK(cudaFree(p));
    assert_int_equal(cudaMalloc(&p, 1), cudaErrorMemoryAllocation);
    assert_null(p);
    OK(cudaMalloc(&p, 1));
    OK(cudaFree(p));
    assert_int_equal(stand_in_calls("cudaMalloc"), 3);
    assert_int_equal(cudaGetLastError(), cudaErrorMemoryAllocation);

    stand_in_fail(NULL, 1, cudaErrorIllegalAddress, true);
    assert_int_equal(cudaMalloc(&p, 1), cudaErrorIllegalAddress);
    assert_int_equal(cudaDeviceSynchronize(), cudaErrorIllegalAddress);
    nothing_wrong();
    OK(cudaDeviceSynchronize());

    int64_t all = stand_in_the_machine()->device_bytes;
    stand_in_the_machine()->device_bytes = 1000;
    OK(cudaMalloc(&p, 600));
    void *more;
    assert_int_equal(cudaMalloc(&more, 401), cudaErrorMemoryAllocation);
    size_t left, total;
    OK(cudaMemGetInfo(&left, &total));
    assert_int_equal(left, 400);
    OK(cudaFree(p));
    stand_in_the_machine()->device_bytes = all;
    nothing_wrong();
}

/* --- hardware queues --- */

static void waits_for_flag(void *flag)
{
    while (!__atomic_load_n(static_cast<int *>(flag), __ATOMIC_ACQUIRE))
        usleep(1000);
}

/* Of nine streams two share a queue. There the second one's work waits for the first one's, which has not
 * started; work that has started holds up nobody. */
static void test_hardware_queues(void **)
{
    enum { N = 9 };
    cudaStream_t s[N];
    int flag = 0;
    void *p;
    OK(cudaMalloc(&p, N));
    for (int i = 0; i < N; i++)
        OK(cudaStreamCreateWithFlags(&s[i], cudaStreamNonBlocking));
    OK(cudaLaunchHostFunc(s[0], waits_for_flag, &flag));
    OK(cudaMemsetAsync(p, 0, 1, s[N - 1]));
    OK(cudaStreamSynchronize(s[N - 1]));
    OK(cudaMemsetAsync(p, 0, 1, s[0]));
    for (int i = 1; i < N; i++)
        OK(cudaMemsetAsync(static_cast<char *>(p) + i, 0, 1, s[i]));
    for (int i = 1; i < N - 1; i++)
        OK(cudaStreamSynchronize(s[i]));
    usleep(20000);
    assert_int_equal(cudaStreamQuery(s[N - 1]), cudaErrorNotReady);
    __atomic_store_n(&flag, 1, __ATOMIC_RELEASE);
    for (int i = 0; i < N; i++) {
        OK(cudaStreamSynchronize(s[i]));
        OK(cudaStreamDestroy(s[i]));
    }
    OK(cudaFree(p));
    nothing_wrong();
}

/* --- memory that the CPU cannot access --- */

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
static const bool is_closed = false;
#else
static const bool is_closed = true;
#endif

static void reads_it(void *p)
{
    volatile char c = static_cast<volatile char *>(p)[12];
    (void)c;
}

static void writes_behind_a_window(void *p)
{
    int device;
    stand_in_touch();
    std::memset(p, 0, 100);
    reads_it(p);
    OK(cudaGetDevice(&device));
    static_cast<volatile char *>(p)[99] = 1;
}

static void reads_in_a_host_function(void *p)
{
    OK(cudaLaunchHostFunc(NULL, reads_it, p));
    OK(cudaDeviceSynchronize());
}

__global__ static void load_kernel(void *p)
{
    **static_cast<int **>(p) = 1;
}

static void loads_an_address(void *p)
{
    void *args[] = {&p};
    OK(cudaMemcpy(p, &p, sizeof p, cudaMemcpyHostToDevice));
    OK(cudaLaunchKernel(load_kernel, dim3(1), dim3(1), args));
    OK(cudaDeviceSynchronize());
}

/* Each ends the program that does it, after a line that names it. */
static void test_closed_memory(void **)
{
    static const struct {
        void (*fn)(void *p);
        const char *says;
    } cases[] = {
        {reads_it, "host code reads device memory"},
        {reads_it, "byte 12 of an allocation of 100 (cudaMalloc) of device 0"},
        {writes_behind_a_window, "host code writes device memory"},
        {writes_behind_a_window, "byte 99 of an"},
        {reads_in_a_host_function, "or a host function, reads device memory"},
        {loads_an_address, "a kernel that got the address from memory, or a host function, writes device"},
    };
    for (size_t i = 0; is_closed && i < sizeof cases / sizeof *cases; i++) {
        char text[4096];
        size_t n = 0;
        int fd[2], status;
        void *p;
        assert_int_equal(pipe(fd), 0);
        std::fflush(stdout);
        pid_t pid = fork();
        if (pid == 0) {
            dup2(fd[1], STDERR_FILENO);
            OK(cudaMalloc(&p, 100));
            cases[i].fn(p);
            _exit(0);
        }
        close(fd[1]);
        for (ssize_t got; n + 1 < sizeof text && (got = read(fd[0], text + n, sizeof text - 1 - n)) > 0;)
            n += (size_t)got;
        text[n] = 0;
        close(fd[0]);
        assert_int_equal(waitpid(pid, &status, 0), pid);
        assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV);
        if (!std::strstr(text, cases[i].says))
            fail_msg("case %zu says: %s", i, text);
    }
}

int main()
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_closed_memory), /* first: it forks */
        cmocka_unit_test(test_kernel_with_barriers),
        cmocka_unit_test(test_exchanges),
        cmocka_unit_test(test_copies),
        cmocka_unit_test(test_divergence),
        cmocka_unit_test(test_null_stream),
        cmocka_unit_test(test_events),
        cmocka_unit_test(test_host_functions_one_at_a_time),
        cmocka_unit_test(test_hardware_queues),
        cmocka_unit_test(test_misuse),
        cmocka_unit_test(test_contexts),
        cmocka_unit_test(test_capture),
        cmocka_unit_test(test_failures),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
