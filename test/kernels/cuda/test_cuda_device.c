/* SPDX-License-Identifier: Apache-2.0 */
/* test_cuda_device.c: runs the device suite on the CUDA device over the stand-in, and tests what only a
 * GPU promises or refuses. */
#include "kernels/cuda/cuda_device.h"
#include "test/cmocka.h"
#include "test/kernels/device_suite.h"
#include "test/stand_in/stand_in.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static void nothing_wrong(void)
{
    const char *text;
    int n = stand_in_end(&text);
    if (n)
        fail_msg("%s", text);
}

static struct zr_device *gpu(void)
{
    struct zr_device *dev;
    if (zr_cuda_device_open(0, &dev))
        fail_msg("%s", zr_error_text());
    return dev;
}

/* Expects that opening fails with that code and a message with these parts. */
static void refused(int ordinal, int code, const char *part, const char *other)
{
    struct zr_device *dev = (struct zr_device *)&ordinal;
    assert_int_equal(zr_cuda_device_open(ordinal, &dev), code);
    assert_null(dev);
    if (!strstr(zr_error_text(), part) || !strstr(zr_error_text(), other))
        fail_msg("\"%s\" lacks \"%s\" or \"%s\"", zr_error_text(), part, other);
    assert_null(strchr(zr_error_text(), '\n'));
    assert_int_equal(cudaGetLastError(), cudaSuccess);
    nothing_wrong();
}

static void test_what_is_refused(void **state)
{
    struct stand_in_machine *m = stand_in_the_machine(), was = *m;
    m->driver_version = 0;
    refused(0, ZERO_ERR_NOTSUP, "no usable GPU", "no NVIDIA driver");
    m->driver_version = 12040;
    refused(0, ZERO_ERR_NOTSUP, "the driver is for CUDA 12.4", "needs one for CUDA 13.0 or newer");
    m->driver_version = 12090;
    refused(0, ZERO_ERR_NOTSUP, "the driver is for CUDA 12.9", "needs one for CUDA 13.0 or newer");
    m->driver_version = 13000; /* older than the runtime, with the same major version */
    struct zr_device *dev;
    assert_int_equal(zr_cuda_device_open(0, &dev), 0);
    dev->ops->close(dev);
    *m = was;
    m->n_devices = 0;
    refused(0, ZERO_ERR_NOTSUP, "no usable GPU", "sees none");
    m->n_devices = 2;
    refused(2, ZERO_ERR_ARG, "GPU number is 2", "0 to 1");
    refused(-2, ZERO_ERR_ARG, "GPU number is -2", "0 to 1");
    *m = was;
    m->major = 7, m->minor = 5;
    refused(0, ZERO_ERR_NOTSUP, "compute capability 7.5", "8.0 or more");
    *m = was;
    stand_in_fail("cudaLaunchKernel", 1, cudaErrorNoKernelImageForDevice, false);
    refused(0, ZERO_ERR_SYSTEM, "GPU 0", "cudaErrorNoKernelImageForDevice");
}

/* Any number of copies is one kernel. An empty table is none. */
static void test_a_table_is_one_kernel(void **state)
{
    struct zr_device *dev = gpu();
    struct zr_stream *s;
    void *p;
    struct zr_copy_rows table[ZR_MAX_COPIES];
    assert_int_equal(dev->ops->stream_open(dev, ZR_STREAM_QUEUE, "t", NULL, &s), 0);
    assert_int_equal(dev->ops->alloc(dev, 1 << 20, &p), 0);
    char *at = p;
    int64_t launches = stand_in_calls("cudaLaunchKernel"), copies = stand_in_calls("cudaMemcpyAsync");
    for (int n = 0; n <= ZR_MAX_COPIES; n += 16) {
        for (int i = 0; i < n; i++)
            table[i] = (struct zr_copy_rows){at + 2048 * i, at + (1 << 19) + 4096 * i, 128, 1000, 256, 512};
        assert_int_equal(dev->ops->copy_rows(s, table, n), 0);
        launches += n > 0;
        assert_int_equal(stand_in_calls("cudaLaunchKernel"), launches);
        for (int i = 0; i < n; i++)
            table[i].bytes = 0;
        assert_int_equal(dev->ops->copy_rows(s, table, n), 0);
        assert_int_equal(stand_in_calls("cudaLaunchKernel"), launches);
    }
    const void *src[] = {at, at + 1024, at + 2048};
    struct zr_sum_range sums[ZR_MAX_SUMS];
    for (int n = 0; n <= ZR_MAX_SUMS; n += 16) {
        for (int i = 0; i < n; i++)
            sums[i] = (struct zr_sum_range){(float *)p + (1 << 17) + 1000 * i, i, 999, i % 2};
        assert_int_equal(dev->ops->sum_ranges(s, sums, n, src, 3, ZERO_BF16), 0);
        launches += n > 0;
        assert_int_equal(stand_in_calls("cudaLaunchKernel"), launches);
    }
    float *x = p;
    struct zr_update_span spans[ZR_MAX_SPANS];
    const struct zr_update u = {.kind = ZERO_ADAMW,
                                .grad_dtype = ZERO_F32,
                                .n = 1 << 16,
                                .master = x,
                                .grad = x + (1 << 16),
                                .state = {x + (2 << 16), x + (3 << 16) - 1024},
                                .scalars = p};
    for (int n = 0; n <= ZR_MAX_SPANS; n += 16) {
        for (int i = 0; i < n; i++)
            spans[i] = (struct zr_update_span){900 * i, 800 + i, 0.1f, 0};
        assert_int_equal(dev->ops->update_spans(s, &u, spans, n), 0);
        launches += n > 0;
        assert_int_equal(stand_in_calls("cudaLaunchKernel"), launches);
    }
    assert_int_equal(stand_in_calls("cudaMemcpyAsync"), copies);
    dev->ops->free(dev, p, 1 << 20);
    dev->ops->stream_close(s);
    dev->ops->close(dev);
    nothing_wrong();
}

/* The thread's current GPU is used, not the first. */
static void test_the_thread_s_gpu(void **state)
{
    struct stand_in_machine *m = stand_in_the_machine(), was = *m;
    struct zr_device *dev;
    struct stand_in_range range;
    void *p;
    m->n_devices = 3;
    assert_int_equal(cudaSetDevice(2), cudaSuccess);
    assert_int_equal(zr_cuda_device_open(ZR_CUDA_CURRENT, &dev), 0);
    assert_int_equal(cudaSetDevice(1), cudaSuccess);
    assert_int_equal(dev->ops->alloc(dev, 100, &p), 0);
    assert_true(stand_in_find(p, &range));
    assert_int_equal(range.device, 2);
    dev->ops->free(dev, p, 100);
    dev->ops->close(dev);
    assert_int_equal(cudaSetDevice(0), cudaSuccess);
    nothing_wrong();
    *m = was;
}

static void test_out_of_memory(void **state)
{
    struct stand_in_machine *m = stand_in_the_machine(), was = *m;
    m->device_bytes = 1000000;
    struct zr_device *dev = gpu();
    void *p, *q;
    int64_t left, total;
    assert_int_equal(dev->ops->memory(dev, &left, &total), 0);
    assert_int_equal(left, 1000000);
    assert_int_equal(total, 1000000);
    assert_int_equal(dev->ops->alloc(dev, 500000, &p), 0);
    assert_int_equal(dev->ops->alloc(dev, 600000, &q), ZERO_ERR_NOMEM);
    assert_null(q);
    assert_non_null(strstr(zr_error_text(), "GPU 0 cannot allocate 600000 bytes"));
    assert_non_null(strstr(zr_error_text(), "of 1000000 are free"));
    assert_int_equal(cudaGetLastError(), cudaSuccess);
    dev->ops->free(dev, p, 500000);
    assert_int_equal(dev->ops->alloc(dev, 600000, &q), 0);
    dev->ops->free(dev, q, 600000);
    dev->ops->close(dev);
    *m = was;
    nothing_wrong();
}

static void test_poison(void **state)
{
    void *p;
    unsigned char *host;
    enum { BYTES = 10000 };
    setenv("ZERO_POISON", "1", 1);
    struct zr_device *dev = gpu();
    unsetenv("ZERO_POISON");
    struct zr_stream *s;
    assert_int_equal(dev->ops->stream_open(dev, ZR_STREAM_QUEUE, "s", NULL, &s), 0);
    assert_int_equal(dev->ops->alloc(dev, BYTES, &p), 0);
    assert_true(stand_in_calls("cudaMemset") == 1);
    host = malloc(BYTES);
    assert_int_equal(dev->ops->copy(s, host, p, BYTES), 0);
    for (int i = 0; i < BYTES; i++)
        assert_int_equal(host[i], 0xff);
    free(host);
    dev->ops->free(dev, p, BYTES);
    dev->ops->stream_close(s);
    dev->ops->close(dev);
    nothing_wrong();
}

/* Streams of the caller: NULL, one of this GPU, one of another. The thread's current device stays the
 * same. */
static void test_caller_streams(void **state)
{
    struct stand_in_machine *m = stand_in_the_machine(), was = *m;
    m->n_devices = 2;
    struct zr_device *dev = gpu();
    cudaStream_t own, other;
    struct zr_stream *s, *mine;
    struct zr_event *e;
    void *p;
    int current;
    assert_int_equal(cudaStreamCreate(&own), 0);
    assert_int_equal(cudaSetDevice(1), 0);
    assert_int_equal(cudaStreamCreate(&other), 0);
    assert_int_equal(dev->ops->stream_open(dev, ZR_STREAM_CALLER, "c", other, &s), ZERO_ERR_ARG);
    assert_null(s);
    assert_non_null(strstr(zr_error_text(), "of GPU 1, the device is GPU 0"));
    assert_int_equal(dev->ops->stream_open(dev, ZR_STREAM_QUEUE, "c", own, &s), ZERO_ERR_ARG);
    assert_int_equal(dev->ops->stream_open(dev, (enum zr_stream_kind)9, "c", own, &s), ZERO_ERR_ARG);
    assert_int_equal(dev->ops->event_open(dev, &e), 0);
    assert_int_equal(dev->ops->alloc(dev, 100, &p), 0);
    assert_int_equal(dev->ops->stream_open(dev, ZR_STREAM_QUEUE, "q", NULL, &mine), 0);
    assert_non_null(dev->ops->stream_native(mine));
    cudaStream_t natives[] = {own, NULL};
    for (int i = 0; i < 2; i++) {
        assert_int_equal(dev->ops->stream_open(dev, ZR_STREAM_CALLER, "c", natives[i], &s), 0);
        assert_ptr_equal(dev->ops->stream_native(s), natives[i]);
        assert_int_equal(dev->ops->zero(s, p, 100), 0);
        assert_int_equal(dev->ops->event_record(e, s), 0);
        assert_int_equal(dev->ops->stream_wait(mine, e), 0);
        assert_int_equal(dev->ops->event_sync(e), 0);
        assert_int_equal(dev->ops->stream_sync(s), 0);
        dev->ops->stream_close(s);
    }
    assert_int_equal(cudaGetDevice(&current), 0);
    assert_int_equal(current, 1);
    dev->ops->free(dev, p, 100);
    dev->ops->event_close(e);
    dev->ops->stream_close(mine);
    dev->ops->close(dev);
    assert_int_equal(cudaStreamDestroy(own), 0); /* the caller's: closing the wrapper leaves it open */
    assert_int_equal(cudaStreamDestroy(other), 0);
    assert_int_equal(cudaSetDevice(0), 0);
    *m = was;
    nothing_wrong();
}

static void nap(void *arg)
{
    nanosleep(&(struct timespec){.tv_nsec = 100000000}, NULL);
}

/* A query of work that is not done returns at once. An error that the program has not fetched yet is still
 * there afterwards. */
static void test_query_keeps_errors(void **state)
{
    struct zr_device *dev = gpu();
    struct zr_stream *s;
    struct zr_event *e;
    assert_int_equal(dev->ops->stream_open(dev, ZR_STREAM_QUEUE, "s", NULL, &s), 0);
    assert_int_equal(dev->ops->event_open(dev, &e), 0);
    for (int earlier = 0; earlier < 2; earlier++) {
        assert_int_equal(dev->ops->call(s, nap, NULL, 0), 0);
        assert_int_equal(dev->ops->event_record(e, s), 0);
        assert_int_equal(cudaSetDevice(earlier ? 99 : 0), earlier ? cudaErrorInvalidDevice : cudaSuccess);
        assert_int_equal(dev->ops->event_query(e), 0);
        assert_int_equal(cudaPeekAtLastError(), earlier ? cudaErrorInvalidDevice : cudaSuccess);
        assert_int_equal(dev->ops->stream_sync(s), 0);
        assert_int_equal(dev->ops->event_query(e), 1);
        assert_int_equal(cudaGetLastError(), earlier ? cudaErrorInvalidDevice : cudaSuccess);
    }
    dev->ops->event_close(e);
    dev->ops->stream_close(s);
    dev->ops->close(dev);
    nothing_wrong();
}

/* --- every call may fail --- */

static void nothing(void *arg)
{
}

/* Uses every part of the device once. Returns the first error, with everything closed. */
static int use_everything(void)
{
    struct zr_device *dev;
    struct zr_stream *s = NULL, *caller = NULL;
    struct zr_event *e = NULL;
    void *p = NULL, *h = NULL;
    enum { BYTES = 4096 };
    int64_t left, total;
    int err = zr_cuda_device_open(0, &dev);
    if (err)
        return err;
    const struct zr_device_ops *o = dev->ops;
    bool failed = (err = o->stream_open(dev, ZR_STREAM_QUEUE, "s", NULL, &s)) ||
                  (err = o->stream_open(dev, ZR_STREAM_CALLER, "c", NULL, &caller)) ||
                  (err = o->event_open(dev, &e)) || (err = o->alloc(dev, BYTES, &p)) ||
                  (err = o->host_alloc(dev, BYTES, &h)) || (err = o->memory(dev, &left, &total)) ||
                  (err = o->zero(s, p, BYTES)) || (err = o->copy(s, h, p, BYTES)) ||
                  (err = o->put(s, p, &left, sizeof left)) || (err = o->stamp(s, h)) ||
                  (err = o->cast(s, p, ZERO_BF16, p, ZERO_F32, 10)) || (err = o->call(s, nothing, NULL, 0)) ||
                  (err = o->event_record(e, s)) || (err = o->stream_wait(caller, e)) ||
                  (err = o->event_sync(e)) || (err = o->stream_sync(caller));
    assert_int_equal(failed, err != 0);
    if (h)
        o->host_free(dev, h, BYTES);
    if (p)
        o->free(dev, p, BYTES);
    o->event_close(e);
    o->stream_close(caller);
    o->stream_close(s);
    o->close(dev);
    return err;
}

static void test_every_call_can_fail(void **state)
{
    stand_in_fail(NULL, 0, cudaSuccess, false);
    assert_int_equal(use_everything(), 0);
    int n = (int)stand_in_calls(NULL), n_failed = 0;
    nothing_wrong();
    for (int k = 1; k <= n; k++) {
        stand_in_fail(NULL, k, cudaErrorUnknown, false);
        int err = use_everything();
        assert_int_equal(cudaGetLastError(), cudaSuccess);
        if (err) {
            n_failed++;
            assert_true(err == ZERO_ERR_SYSTEM || err == ZERO_ERR_NOTSUP);
            assert_true(strstr(zr_error_text(), "cudaErrorUnknown (unknown error)") != NULL);
        }
        /* If closing or resetting the device fails, something stays in the stand-in. A caller could not do
         * anything about it. */
        stand_in_end(NULL);
    }
    printf("%d of %d calls end in an error\n", n_failed, n);
    assert_true(n_failed > n / 2);
}

/* After the GPU is lost, every call fails with that error and nothing hangs. Closing frees all host
 * memory, which AddressSanitizer checks. */
static void test_lost_gpu(void **state)
{
    stand_in_fail(NULL, 0, cudaSuccess, false);
    assert_int_equal(use_everything(), 0);
    int n = (int)stand_in_calls(NULL);
    for (int k = 1; k <= n; k += 7) {
        stand_in_fail(NULL, k, cudaErrorIllegalAddress, true);
        int err = use_everything();
        assert_true(err == ZERO_ERR_SYSTEM || err == ZERO_ERR_NOTSUP || err == 0);
        assert_true(!err || strstr(zr_error_text(), "cudaErrorIllegalAddress"));
        stand_in_end(NULL);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_what_is_refused),
        cmocka_unit_test(test_the_thread_s_gpu),
        cmocka_unit_test(test_out_of_memory),
        cmocka_unit_test(test_poison),
        cmocka_unit_test(test_caller_streams),
        cmocka_unit_test(test_every_call_can_fail),
        cmocka_unit_test(test_lost_gpu),
        cmocka_unit_test(test_query_keeps_errors),
        cmocka_unit_test(test_a_table_is_one_kernel),
    };
    struct zr_device *dev;
    if (zr_cuda_device_open(0, &dev)) {
        fprintf(stderr, "%s\n", zr_error_text());
        return 1;
    }
    int failed = zr_device_suite(dev);
    dev->ops->close(dev);
    const char *text;
    if (stand_in_end(&text)) {
        fprintf(stderr, "misuse in the suite:\n%s", text);
        failed++;
    }
    return failed + cmocka_run_group_tests(tests, NULL, NULL);
}
