/* test_nccl_library.c: what of NCCL can be tested where there is no GPU: libraries that are missing or are
 * not it, and the real one without a driver. ZERO_TEST_NCCL in the environment names the real one. */
#include "comm/comm.h"
#include "test/comm/ranks.h"

#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

/* A host device that passes for one that NCCL could work on. */
static int not_host(struct zr_device **out)
{
    static struct zr_device_ops ops;
    int err = zr_host_device_open(out);
    if (err)
        return err;
    ops = *(*out)->ops;
    ops.compute_on_caller = false;
    (*out)->ops = &ops;
    return 0;
}

static int open_pair(const char *library, bool host, struct zr_comm **gather, struct zr_comm **reduce)
{
    struct zr_world w = {.rank = 0, .world = 1};
    struct zr_nccl_options opt = {
        .timeout_ms = 60000, .library = library, .reserve_bytes = zr_nccl_reserve_bytes(1, false, 0)};
    struct zr_rendezvous *rdv;
    struct zr_device *dev;
    uv_loop_t loop;
    uv_loop_init(&loop);
    assert_int_equal(zr_rendezvous_open(&loop, &w, 1000, &rdv), 0);
    assert_int_equal(host ? zr_host_device_open(&dev) : not_host(&dev), 0);
    *gather = *reduce = (struct zr_comm *)&w;
    int err = zr_nccl_open(rdv, dev, &opt, gather, reduce);
    assert_true(err < 0);
    assert_null(*gather);
    assert_null(*reduce);
    dev->ops->close(dev);
    zr_rendezvous_free(rdv);
    assert_int_equal(uv_loop_close(&loop), 0);
    return err;
}

static void refused(const char *library, bool host, int code, const char *text)
{
    struct zr_comm *gather, *reduce;
    int err = open_pair(library, host, &gather, &reduce);
    if (err != code || !strstr(zr_error_text(), text))
        fail_msg("code %d \"%s\", expected %d with \"%s\"", err, zr_error_text(), code, text);
}

#ifdef ZR_TEST_HAVE_NCCL
static void test_wrong_library(void **state)
{
    (void)state;
    refused("/nowhere/libnccl.so.2", false, ZR_ERR_NOTSUP, "there is no NCCL: /nowhere/libnccl.so.2: ");
    refused("libm.so.6", false, ZR_ERR_NOTSUP, "libm.so.6 has no nccl");
    refused(NULL, true, ZR_ERR_NOTSUP, "nccl works on the cuda device, not on host");
}

static void test_no_driver(void **state)
{
    const char *library = getenv("ZERO_TEST_NCCL");
    (void)state;
    if (!library || access(library, R_OK) || access("/dev/nvidiactl", F_OK) == 0)
        skip();
    refused(library, false, ZR_ERR_SYSTEM,
            "ncclCommInitRankConfig of the gather communicator: unhandled cuda error");
}
#else
static void test_none(void **state)
{
    (void)state;
    refused(NULL, false, ZR_ERR_NOTSUP, "built without NCCL");
}
#endif

int main(void)
{
    const struct CMUnitTest tests[] = {
#ifdef ZR_TEST_HAVE_NCCL
        cmocka_unit_test(test_wrong_library),
        cmocka_unit_test(test_no_driver),
#else
        cmocka_unit_test(test_none),
#endif
    };
    return cmocka_run_group_tests_name("nccl library", tests, NULL, NULL);
}
