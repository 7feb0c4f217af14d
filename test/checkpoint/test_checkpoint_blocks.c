/* SPDX-License-Identifier: Apache-2.0 */
/* test_checkpoint_blocks.c: tests files of several blocks, moved by several threads, with and without the
 * page cache. */
#include "test/checkpoint/memory_files.h"
#include "test/checkpoint/saved_model.h"
#include "test/cmocka.h"
#include "test/kernels/random.h"
#include "test/zero/sample.h"
#include "zero/checkpoint/block_file.h"
#include "zero/checkpoint/checkpoint_dir.h"
#include "zero/checkpoint/manifest.h"
#include "zero/checkpoint/parallel.h"
#include "zero/checkpoint/save.h"
#include "zero/checkpoint/shard_file.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static uint64_t seed;

/* ---- threads ---- */

struct counting {
    _Atomic int called[100];
    int64_t bad;
};

static int count(void *arg, int64_t i, char *buffer)
{
    struct counting *c = arg;
    c->called[i]++;
    memset(buffer, (int)i, 5000);
    if ((uintptr_t)buffer % ZR_DIRECT_ALIGN)
        return zr_fail(ZERO_ERR_SYSTEM, "not aligned");
    for (int k = 0; k < 5000; k++)
        if (buffer[k] != (char)i)
            return zr_fail(ZERO_ERR_SYSTEM, "another's buffer");
    return i == c->bad ? zr_fail(ZERO_ERR_IO, "block %lld", (long long)i) : 0;
}

static void test_parallel(void **state)
{
    for (int n = 0; n < 100; n += 3)
        for (int threads = 1; threads < 12; threads++) {
            struct counting c = {.bad = -1};
            assert_int_equal(zr_in_parallel(n, threads, 5000, count, &c), 0);
            for (int i = 0; i < 100; i++)
                assert_int_equal(c.called[i], i < n);
        }
    for (int threads = 1; threads < 6; threads++) {
        struct counting c = {.bad = 30};
        assert_int_equal(zr_in_parallel(100, threads, 5000, count, &c), ZERO_ERR_IO);
        assert_string_equal(zr_error_text(), "block 30"); /* whichever thread failed */
        for (int i = 0; i < 100; i++)
            assert_true(c.called[i] <= 1 && (i > 30 || c.called[i] == 1));
    }
}

/* ---- one file ---- */

static void check_file(enum memory_direct direct, enum memory_fault fault, int64_t at)
{
    struct memory_files *m = memory_files_open();
    const struct zr_files *fs = memory_files_table(m);
    int64_t bytes = (3 << 20) + (int64_t)(random_next(&seed) % 20000), piece = 1 << 20;
    char *data = aligned_alloc(ZR_DIRECT_ALIGN, 4 << 20), *read = aligned_alloc(ZR_DIRECT_ALIGN, 4 << 20);
    struct zr_block_file f;
    for (int64_t i = 0; i < bytes; i++)
        data[i] = (char)random_next(&seed);
    memset(read, 0xff, 4 << 20);
    memory_files_direct(m, direct);
    memory_files_fault(m, fault, at, false);
    int err = zr_block_file_create(fs, "file", bytes, &f);
    for (int64_t k = 0; !err && k < bytes; k += piece)
        err = zr_block_write(&f, data + k, zr_min(piece, bytes - k), k);
    int closed = zr_block_file_close(&f);
    if (fault == FAULT_NONE || fault == FAULT_EINTR || fault == FAULT_SHORT)
        assert_int_equal(err || closed, 0);
    if (!err) {
        err = zr_block_file_open(fs, "file", bytes, &f);
        for (int64_t k = 0; !err && k < bytes; k += piece)
            err = zr_block_read(&f, read + k, zr_min(piece, bytes - k), k);
        if (!err)
            assert_memory_equal(data, read, (size_t)bytes);
        if (!err && fault == FAULT_NONE)
            assert_int_equal(zr_block_read(&f, read, 1, bytes), ZERO_ERR_IO); /* the file has no more */
        zr_block_file_close(&f);
    }
    assert_int_equal(memory_files_n_open(m), 0);
    if (fault == FAULT_NONE)
        assert_int_equal(memory_files_n_direct(m), direct != DIRECT_WORKS                 ? 0
                                                   : bytes - (3 << 20) >= ZR_DIRECT_ALIGN ? 8
                                                                                          : 6);
    memory_files_close(m);
    free(data);
    free(read);
}

static void test_block_file(void **state)
{
    static const enum memory_direct ways[] = {DIRECT_WORKS, DIRECT_NOT_OPENED, DIRECT_NOT_MOVED};
    static const enum memory_fault faults[] = {FAULT_EIO, FAULT_ENOSPC, FAULT_EINTR, FAULT_SHORT};
    for (int w = 0; w < 3; w++) {
        check_file(ways[w], FAULT_NONE, 0);
        for (int f = 0; f < 4; f++)
            for (int64_t at = 1; at < 24; at++)
                if (sample_has())
                    check_file(ways[w], faults[f], at);
    }
}

/* A file that does or does not fit on the disk. The error comes before anything is written. */
static void test_full(void **state)
{
    struct memory_files *m = memory_files_open();
    struct zr_block_file f;
    memory_files_fault(m, FAULT_ENOSPC, 2, false);
    assert_int_equal(zr_block_file_create(memory_files_table(m), "file", 5 << 20, &f), ZERO_ERR_IO);
    assert_non_null(strstr(zr_error_text(), "file: allocate: no space left"));
    zr_block_file_close(&f);
    assert_int_equal(memory_files_n_open(m), 0);
    memory_files_close(m);
}

/* ---- a model of several blocks ---- */

static void enlarge(struct zero_tensor *tensors, struct zero_config *cfg)
{
    tensors[5].shape[0] = 700001;
}

/* The same with 8-bit states, and with masters that are joined when they are saved. Blocks of the file end
 * within such a master. */
static void enlarge_and_narrow(struct zero_tensor *tensors, struct zero_config *cfg)
{
    enlarge(tensors, cfg);
    tensors[0].shape[0] = 60001;
    cfg->optim.masters = ZERO_MASTERS_REMAINDER;
    cfg->optim.moments = ZERO_MOMENTS_Q8;
}

static uint64_t hash;

static void save(struct model_rank *m, void *arg)
{
    CHECK_OK(model_steps(m, 1));
    CHECK_OK(zero_save(m->z, "run", NULL));
    uint64_t h = model_hash(m);
    CHECK_OK(zero_save_wait(m->z, NULL));
    if (m->rank == 0)
        hash = h;
}

static void load(struct model_rank *m, void *arg)
{
    CHECK_OK(zero_load(m->z, "run"));
    CHECK_THAT(model_hash(m) == hash);
}

/* The flipped block is one in the middle. */
static void load_flipped(struct model_rank *m, void *arg)
{
    unsigned char *at = arg;
    uint64_t before = model_hash(m);
    double nothing = 0;
    if (m->rank == 0)
        *at ^= 4;
    CHECK_OK(zero_mean(m->z, &nothing, 1));
    CHECK_THAT(zero_load(m->z, "run") == ZERO_ERR_IO);
    CHECK_THAT(strstr(zero_last_error(), "tensor head/") && strstr(zero_last_error(), "are damaged"));
    CHECK_THAT(model_hash(m) == before);
    if (m->rank == 0)
        *at ^= 4;
    CHECK_OK(zero_mean(m->z, &nothing, 1));
    load(m, NULL);
}

static void test_large_model(void **state)
{
    static const enum memory_direct ways[] = {DIRECT_WORKS, DIRECT_NOT_OPENED, DIRECT_NOT_MOVED};
    for (int w = 0; w < 3; w++) {
        struct memory_files *m = memory_files_open();
        struct model_options o = {
            .stage = 1, .world = 2, .async = w == 1, .change = enlarge, .files = memory_files_table(m)};
        memory_files_direct(m, ways[w]);
        model_run(&o, save, NULL);
        o.scrambled = true;
        for (int world = 1; world < 4; world++) {
            o.world = world;
            o.stage = world;
            o.async = w == 2; /* and the snapshot's memory is the staging memory */
            model_run(&o, load, NULL);
        }
        int64_t *n;
        unsigned char *at =
            memory_files_content(m, "run/save-00000001-step-00000001/shard-00002-of-00002.safetensors", &n);
        assert_true(at && *n > 4 * ZR_BLOCK_BYTES);
        model_run(&o, load_flipped, at + *n / 2);
        assert_true((memory_files_n_direct(m) > 0) == (w == 0));
        assert_int_equal(memory_files_n_open(m), 0);
        memory_files_close(m);
    }
}

/* Reads may overlap: a short one within a long one does not hide the long one's later blocks. */
static void test_overlapping_reads(void **state)
{
    static const char path[] = "run/save-00000001-step-00000001";
    struct memory_files *m = memory_files_open();
    const struct model_options o = {.world = 1, .change = enlarge, .files = memory_files_table(m)};
    struct zr_manifest manifest;
    struct zr_shard shard;
    bool broken;
    int64_t *n;
    model_run(&o, save, NULL);
    assert_int_equal(zr_checkpoint_open(o.files, path, &broken, &manifest), 0);
    assert_int_equal(zr_shard_open(o.files, path, &manifest.files[0], &shard), 0);
    char name[200], *all = malloc((size_t)shard.bytes), part[3][1000];
    struct zr_request requests[] = {{5000, sizeof part[0], part[0]},
                                    {0, shard.bytes, all},
                                    {ZR_BLOCK_BYTES - 10, sizeof part[1], part[1]},
                                    {2 * ZR_BLOCK_BYTES, sizeof part[2], part[2]}};
    memset(all, 0x55, (size_t)shard.bytes);
    assert_int_equal(zr_shard_fetch(&shard, requests, 4), 0);
    snprintf(name, sizeof name, "%s/%s", path, manifest.files[0].name);
    const unsigned char *content = memory_files_content(m, name, &n);
    assert_true(*n == shard.bytes && *n > 4 * ZR_BLOCK_BYTES);
    assert_memory_equal(all, content, (size_t)*n);
    assert_memory_equal(part[0], content + 5000, sizeof part[0]);
    assert_memory_equal(part[1], content + ZR_BLOCK_BYTES - 10, sizeof part[1]);
    assert_memory_equal(part[2], content + 2 * ZR_BLOCK_BYTES, sizeof part[2]);
    free(all);
    zr_shard_close(&shard);
    zr_manifest_free(&manifest);
    memory_files_close(m);
}

/* ---- a device whose memory the CPU cannot read; here a host device that says so ---- */

static _Atomic int64_t n_copied;
static const struct zr_device_ops *host_ops;

static int counting_copy(struct zr_stream *s, void *dst, const void *src, int64_t n)
{
    n_copied += n;
    return host_ops->copy(s, dst, src, n);
}

static _Atomic int64_t copies_left;

static int failing_copy(struct zr_stream *s, void *dst, const void *src, int64_t n)
{
    if (copies_left-- <= 0)
        return zr_fail(ZERO_ERR_SYSTEM, "the device is out of order");
    return host_ops->copy(s, dst, src, n);
}

static void save_from_device(struct model_rank *m, void *arg)
{
    struct zr_device *dev = zr_engine_device(m->z->engine);
    struct zr_device_ops ops = *dev->ops;
    host_ops = dev->ops;
    ops.host_memory = false;
    ops.copy = counting_copy;
    CHECK_OK(model_steps(m, 1));
    hash = model_hash(m);
    n_copied = 0;
    dev->ops = &ops;
    CHECK_OK(zero_save(m->z, "run", NULL));
    dev->ops = host_ops;
    struct zr_extents x;
    int64_t bytes = 0;
    CHECK_OK(zr_extents_of(m->z, NULL, 0, &x));
    for (int64_t i = 0; i < x.n; i++)
        bytes += x.list[i].n * x.list[i].size;
    free(x.list);
    /* Where two blocks of the file meet in a joined master, both copy it. */
    CHECK_THAT(n_copied >= bytes && n_copied <= bytes + 2 * 4 * (bytes / ZR_BLOCK_BYTES + 1));
    CHECK_OK(zero_load(m->z, "run"));
    CHECK_THAT(model_hash(m) == hash);
    ops.copy = failing_copy;
    for (int k = 0; k < 40; k += 3) {
        copies_left = k;
        dev->ops = &ops;
        int err = zero_save(m->z, "run", NULL);
        dev->ops = host_ops;
        CHECK_THAT(err == ZERO_ERR_SYSTEM && strstr(zero_last_error(), "out of order"));
        CHECK_OK(zero_load(m->z, "run"));
    }
}

static void test_device_memory(void **state)
{
    for (int narrow = 0; narrow < 2; narrow++) {
        struct memory_files *m = memory_files_open();
        struct model_options o = {.stage = 2, .world = 1, .files = memory_files_table(m)};
        o.change = narrow ? enlarge_and_narrow : enlarge;
        model_run(&o, save_from_device, NULL);
        o.scrambled = true;
        o.world = 3;
        model_run(&o, load, NULL);
        assert_int_equal(memory_files_n_open(m), 0);
        memory_files_close(m);
    }
}

int main(void)
{
    const char *s = getenv("SEED");
    seed = s ? strtoull(s, NULL, 0) : (uint64_t)time(NULL);
    printf("SEED=%llu\n", (unsigned long long)seed);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_parallel),
        cmocka_unit_test(test_block_file),
        cmocka_unit_test(test_full),
        cmocka_unit_test(test_large_model),
        cmocka_unit_test(test_overlapping_reads),
        cmocka_unit_test(test_device_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
