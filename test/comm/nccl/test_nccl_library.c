/* SPDX-License-Identifier: Apache-2.0 */
/* test_nccl_library.c: tests how NCCL's library is found, on a machine without a GPU: libraries that are
 * missing or are not NCCL, and the real one without a driver. ZERO_TEST_NCCL in the environment names the
 * real library, ZERO_TEST_FAKE_NCCL one that only passes for it. */
#include "comm/comm.h"
#include "comm/nccl/nccl_options.h"
#include "test/cmocka.h"
#include "test/comm/ranks.h"

#include <dirent.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

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
    struct zr_nccl_options opt = {.timeout_ms = 60000, .library = library};
    struct zr_rendezvous *rdv;
    struct zr_device *dev;
    uv_loop_t loop;
    uv_loop_init(&loop);
    assert_int_equal(zr_rendezvous_open(&loop, &w, 1000, &rdv), 0);
    assert_int_equal(host ? zr_host_device_open(&dev) : not_host(&dev), 0);
    *gather = *reduce = (struct zr_comm *)&w;
    const struct zr_group one = zr_group_of_all(0, 1);
    const struct zr_role_ask ask[ZR_ROLES] = {{&one, 0, 0}, {&one, 0, 0}};
    struct zr_comm *comm[ZR_ROLES];
    int err = zr_nccl_open(rdv, dev, &opt, ask, comm);
    *gather = comm[ZR_ROLE_GATHER];
    *reduce = comm[ZR_ROLE_REDUCE];
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

/* --- libraries that the program has loaded --- */

#ifdef ZR_TEST_HAVE_NCCL
/* Loads a copy of the library that passes for NCCL, as name in a new folder. */
static void *load_copy(const char *name, char *path, size_t n_path)
{
    char dir[] = "/tmp/zero-nccl-XXXXXX", command[1024];
    assert_non_null(mkdtemp(dir));
    snprintf(path, n_path, "%s/%s", dir, name);
    snprintf(command, sizeof command, "cp '%s' '%s'", getenv("ZERO_TEST_FAKE_NCCL"), path);
    assert_int_equal(system(command), 0);
    void *lib = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    assert_non_null(lib);
    return lib;
}

static void remove_copy(char *path)
{
    unlink(path);
    *strrchr(path, '/') = 0;
    rmdir(path);
}

static void no_user_comm(const char *part, const char *more)
{
    int rank, world, err = zr_nccl_user_comm_world(&rank, 1000, &rank, &world);
    if (err != ZERO_ERR_NOTSUP || !strstr(zr_error_text(), part) || !strstr(zr_error_text(), more))
        fail_msg("code %d \"%s\" lacks \"%s\" or \"%s\"", err, zr_error_text(), part, more);
}

/* The program's communicator belongs to the NCCL that the program has loaded, wherever that file is. libzero
 * asks that one. If the program has loaded two, or none is visible, it returns an error. */
static void test_user_comm_of_which(void **state)
{
    int rank, world;
    char first[64], second[64];
    no_user_comm("is not visible in this process", "linked statically?");
    void *a = load_copy("libother.so", first, sizeof first);
    if (zr_nccl_user_comm_world(&rank, 1000, &rank, &world) || rank != 3 || world != 5)
        fail_msg("rank %d of %d: %s", rank, world, zr_error_text());
    void *b = load_copy("libnccl.so.2", second, sizeof second);
    no_user_comm(first, second);
    no_user_comm("has loaded NCCL twice", "");
    dlclose(b);
    assert_int_equal(zr_nccl_user_comm_world(&rank, 1000, &rank, &world), 0);
    dlclose(a);
    remove_copy(first);
    remove_copy(second);
}

static void test_wrong_library(void **state)
{
    refused("/nowhere/libnccl.so.2", false, ZERO_ERR_NOTSUP, "there is no NCCL: /nowhere/libnccl.so.2: ");
    refused("libm.so.6", false, ZERO_ERR_NOTSUP, "libm.so.6 has no nccl");
    refused(getenv("ZERO_TEST_OLD_NCCL"), false, ZERO_ERR_NOTSUP,
            "is NCCL 2.13.4, without ncclCommInitRankConfig: 2.14 or newer is needed");
    refused(NULL, true, ZERO_ERR_NOTSUP, "nccl works on the cuda device, not on host");
}

/* Opens one of two ranks, since a rank alone needs no communicator. */
static void open_of_two(struct rank *me)
{
    struct zr_nccl_options opt = {.timeout_ms = 60000, .library = me->arg};
    struct zr_rendezvous *rdv;
    struct zr_device *dev;
    struct zr_comm *comm[ZR_ROLES];
    uv_loop_t loop;
    uv_loop_init(&loop);
    RANK_CHECK(me, zr_rendezvous_open(&loop, &me->w, 60000, &rdv) == 0, "%s", zr_error_text());
    RANK_CHECK(me, not_host(&dev) == 0, "%s", zr_error_text());
    const struct zr_group both = zr_group_of_all(me->w.rank, me->w.world);
    const struct zr_role_ask ask[ZR_ROLES] = {{&both, 0, 0}, {&both, 0, 0}};
    note_error(me, zr_nccl_open(rdv, dev, &opt, ask, comm));
    RANK_CHECK(me, !comm[ZR_ROLE_GATHER] && !comm[ZR_ROLE_REDUCE], "there are communicators");
    dev->ops->close(dev);
    zr_rendezvous_free(rdv);
    RANK_CHECK(me, uv_loop_close(&loop) == 0, "handles are left");
}

static int n_threads(void)
{
    DIR *tasks = opendir("/proc/self/task");
    int n = 0;
    assert_non_null(tasks);
    for (struct dirent *d; (d = readdir(tasks));)
        n += d->d_name[0] != '.';
    closedir(tasks);
    return n;
}

static void test_no_driver(void **state)
{
    char *library = getenv("ZERO_TEST_NCCL");
    if (!library || access(library, R_OK) || access("/dev/nvidiactl", F_OK) == 0)
        skip();
    struct rank *r = run_ranks(false, 2, open_of_two, library, NULL);
    for (int i = 0; i < 2; i++)
        expect_rank(&r[i], ZERO_ERR_SYSTEM,
                    "ncclCommInitRankConfig of the gather communicator: unhandled cuda error");
    /* A failed NCCL thread may still be ending. If the program ended meanwhile, a sanitizer would report
     * what the C library frees last for it. Other NCCL threads wait for ever, so wait until the number is
     * steady. */
    for (int i = 0, n = n_threads(), still = 0; i < 2000 && still < 50; i++) {
        usleep(1000);
        int now = n_threads();
        still = now == n ? still + 1 : 0;
        n = now;
    }
}
#else
static void test_none(void **state)
{
    refused(NULL, false, ZERO_ERR_NOTSUP, "built without NCCL");
}
#endif

int main(void)
{
    const struct CMUnitTest tests[] = {
#ifdef ZR_TEST_HAVE_NCCL
        cmocka_unit_test(test_user_comm_of_which),
        cmocka_unit_test(test_wrong_library),
        cmocka_unit_test(test_no_driver),
#else
        cmocka_unit_test(test_none),
#endif
    };
    return cmocka_run_group_tests_name("nccl library", tests, NULL, NULL);
}
