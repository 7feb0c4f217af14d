/* SPDX-License-Identifier: Apache-2.0 */
/* test_checkpoint_tier.c: masters and states in a file (states = file) have the bits of those in memory. They
 * are saved and loaded, in other worlds and by contexts with other settings, and failures say what failed. */
#include "shard/engine/internal.h"
#include "test/checkpoint/saved_model.h"
#include "test/cmocka.h"
#include "zero/checkpoint/files.h"

#include <errno.h>
#include <linux/magic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/vfs.h>

/* Precisions of masters and moments. */
static int masters, moments;

static char folder[] = "/tmp/zero-tier-XXXXXX", saved[64], loaded[64];
static uint64_t hash[3];

/* An f32 tensor and a bf16 tensor, of three parts each on one rank and of two on each of two ranks. */
static void enlarge(struct zero_tensor *tensors, struct zero_config *cfg)
{
    cfg->optim.masters = masters;
    cfg->optim.moments = moments;
    tensors[0].shape[0] = 233052;
    tensors[5].shape[0] = (5 << 19) + 1;
}

static void use_file(struct zero_tensor *tensors, struct zero_config *cfg)
{
    enlarge(tensors, cfg);
    cfg->memory.states = ZERO_STATES_FILE;
    cfg->memory.states_dir = folder;
}

static void small_file(struct zero_tensor *tensors, struct zero_config *cfg)
{
    (void)tensors;
    cfg->memory.states = ZERO_STATES_FILE;
    cfg->memory.states_dir = folder;
}

static void train(struct model_rank *m, void *arg)
{
    bool is_first = arg != NULL;
    for (int k = 0; k < 3; k++) {
        CHECK_OK(model_steps(m, 1));
        uint64_t h = model_hash(m);
        if (m->rank == 0 && is_first)
            hash[k] = h;
        CHECK_THAT((is_first && m->rank > 0) || h == hash[k]);
        if (k == 1)
            CHECK_OK(zero_save(m->z, is_first ? saved : loaded, NULL));
    }
    struct zero_stats stats;
    CHECK_OK(zero_get_stats(m->z, &stats));
#define SAME_BYTES(name, text) CHECK_THAT(stats.allocated.name == stats.planned.name);
    ZERO_MEM_MAP(SAME_BYTES)
    CHECK_THAT((stats.planned.state_buffers == 0) == is_first);
    CHECK_THAT(is_first || stats.planned.master + stats.planned.moments == 0);
}

static void load(struct model_rank *m, void *arg)
{
    CHECK_OK(zero_load(m->z, arg));
    CHECK_THAT(model_hash(m) == hash[1]);
    m->step = 2;
    CHECK_OK(model_steps(m, 1));
    if (m->world == 2)
        CHECK_THAT(model_hash(m) == hash[2]);
}

static void test_same_bits(void **state)
{
    for (int stage = 0; stage <= 3; stage += 3) {
        masters = stage ? ZERO_MASTERS_REMAINDER : ZERO_MASTERS_F32;
        moments = stage ? ZERO_MOMENTS_Q8 : ZERO_MOMENTS_F32;
        struct model_options o = {.stage = stage, .world = 2, .change = enlarge};
        snprintf(saved, sizeof saved, "%s/device%d", folder, stage);
        snprintf(loaded, sizeof loaded, "%s/file%d", folder, stage);
        model_run(&o, train, &o);
        o.change = use_file;
        model_run(&o, train, NULL);
        o.scrambled = true;
        model_run(&o, load, loaded);
        o.stage = 3 - stage;
        model_run(&o, load, saved);
        o.world = 1;
        model_run(&o, load, loaded);
        o.change = enlarge;
        model_run(&o, load, loaded);
    }
}

/* A load that fails changes nothing. */
static void load_damaged(struct model_rank *m, void *arg)
{
    (void)arg;
    CHECK_OK(model_steps(m, 1));
    uint64_t before = model_hash(m);
    CHECK_THAT(zero_load(m->z, saved) == ZERO_ERR_IO);
    CHECK_THAT(strstr(zero_last_error(), "damaged") != NULL);
    CHECK_THAT(model_hash(m) == before);
    CHECK_OK(model_steps(m, 1));
}

static void save_small(struct model_rank *m, void *arg)
{
    (void)arg;
    CHECK_OK(model_steps(m, 2));
    CHECK_OK(zero_save(m->z, saved, NULL));
}

static void test_damage(void **state)
{
    char path[200];
    struct model_options o = {.stage = 3, .world = 1, .change = small_file};
    snprintf(saved, sizeof saved, "%s/damaged", folder);
    model_run(&o, save_small, NULL);
    snprintf(path, sizeof path, "%s/save-00000001-step-00000002/shard-00001-of-00001.safetensors", saved);
    FILE *f = fopen(path, "r+");
    assert_non_null(f);
    fseek(f, -100, SEEK_END);
    int byte = fgetc(f);
    fseek(f, -100, SEEK_END);
    fputc(byte ^ 1, f);
    fclose(f);
    model_run(&o, load_damaged, NULL);
}

/* ---- failures of the disk ---- */

static struct zr_files failing;
static _Atomic int64_t calls_left;
static bool reads_fail;

static int64_t failing_pread(void *arg, int fd, void *buf, size_t n, int64_t at)
{
    return reads_fail && --calls_left < 0 ? -EIO : zr_files_posix.pread(arg, fd, buf, n, at);
}

static int64_t failing_pwrite(void *arg, int fd, const void *buf, size_t n, int64_t at)
{
    return !reads_fail && --calls_left < 0 ? -ENOSPC : zr_files_posix.pwrite(arg, fd, buf, n, at);
}

/* Every transfer of the last rank fails once: in a step, and in calls between steps. All ranks get its
 * error. */
static void meet_failure(struct model_rank *m, void *arg)
{
    const char *const says = reads_fail ? ": read: " : ": write: no space left on device";
    int err = 0;
    (void)arg;
    CHECK_OK(model_steps(m, 1));
    CHECK_OK(zr_engine_drain(m->z->engine)); /* the step's last parts are written */
    if (m->rank == m->world - 1)
        m->z->states->file.fs = &failing;
    for (int k = 0; !err && k < 3; k++) {
        err = model_steps(m, 1);
        err = err ? err : zr_engine_drain(m->z->engine);
    }
    CHECK_THAT(err == ZERO_ERR_IO);
    CHECK_THAT(strstr(zero_last_error(), says) != NULL);
    CHECK_THAT(strstr(zero_last_error(), folder) != NULL);
    CHECK_THAT(m->rank == m->world - 1 || strstr(zero_last_error(), "(found by rank 1)") != NULL);
}

static void test_transfer_fails(void **state)
{
    failing = zr_files_posix;
    failing.pread = failing_pread;
    failing.pwrite = failing_pwrite;
    for (int k = 0; k < 24; k++) {
        struct model_options o = {.stage = k % 4, .world = 1 + k / 12, .change = small_file};
        calls_left = k % 12 / 2;
        reads_fail = k % 2;
        model_run(&o, meet_failure, NULL);
    }
}

/* The files that a load of remainders makes. */
static const char *const made[] = {"another file of states", "the values that this rank loads",
                                   "converting values"};

static int failing_allocate(void *arg, int fd, int64_t bytes)
{
    return --calls_left < 0 ? -ENOSPC : zr_files_posix.allocate(arg, fd, bytes);
}

static int failing_map(void *arg, int fd, int64_t bytes, void **out)
{
    return --calls_left < 0 ? -ENODEV : zr_files_posix.map(arg, fd, bytes, out);
}

/* A load that gets no space for one of its files changes nothing. */
static void load_without_space(struct model_rank *m, void *arg)
{
    bool maps_fail = arg != NULL;
    CHECK_OK(model_steps(m, 1));
    uint64_t before = model_hash(m);
    failing = zr_files_posix;
    if (maps_fail)
        failing.map = failing_map;
    else
        failing.allocate = failing_allocate;
    for (int k = 0; k < 3; k++) {
        m->z->states->file.fs = &failing;
        calls_left = k;
        CHECK_THAT(zero_load(m->z, saved) == ZERO_ERR_IO);
        CHECK_THAT(strstr(zero_last_error(), maps_fail ? "cannot be mapped" : made[k]) != NULL);
        CHECK_THAT(model_hash(m) == before);
    }
    calls_left = 3;
    CHECK_OK(zero_load(m->z, saved));
    CHECK_THAT(model_hash(m) != before);
    CHECK_OK(model_steps(m, 1));
}

static void small_remainders(struct zero_tensor *tensors, struct zero_config *cfg)
{
    small_file(tensors, cfg);
    cfg->optim.masters = ZERO_MASTERS_REMAINDER;
}

static void test_load_without_space(void **state)
{
    struct model_options o = {.stage = 1, .world = 1, .change = small_file};
    snprintf(saved, sizeof saved, "%s/space", folder);
    model_run(&o, save_small, NULL);
    o.change = small_remainders;
    model_run(&o, load_without_space, NULL);
    model_run(&o, load_without_space, &o);
}

/* Wraps a model of one small tensor. */
static int wrap_one(zero_ctx **z, struct zero_config *cfg)
{
    static float w[4], *param, *grad;
    struct zero_tensor t = {
        .name = "w", .param = (void **)&param, .grad = (void **)&grad, .shape = {4}, .dtype = ZERO_F32};
    param = w;
    return zero_wrap(z, &t, 1, cfg);
}

static void test_refused(void **state)
{
    zero_ctx *z;
    struct zero_config cfg = ZERO_CONFIG_INIT;
    cfg.memory.states = ZERO_STATES_FILE;
    assert_int_equal(wrap_one(&z, &cfg), ZERO_ERR_ARG);
    assert_non_null(strstr(zero_last_error(), "states_dir is NULL"));
    cfg.memory.states_dir = "/nowhere/at/all";
    assert_int_equal(wrap_one(&z, &cfg), ZERO_ERR_IO);
    assert_non_null(strstr(zero_last_error(), "states_dir /nowhere/at/all: a file of 4096 bytes"));
    cfg.memory.states_dir = folder;
    cfg.checkpoint.save_async = 1;
    assert_int_equal(wrap_one(&z, &cfg), ZERO_ERR_ARG);
    assert_non_null(strstr(zero_last_error(), "save_async is 1"));
    /* Another folder from the environment. */
    cfg.checkpoint.save_async = 0;
    cfg.memory.states_dir = NULL;
    setenv("ZERO_STATES_DIR", folder, 1);
    assert_int_equal(wrap_one(&z, &cfg), 0);
    assert_int_equal(zero_unwrap(&z), 0);
    unsetenv("ZERO_STATES_DIR");
}

static void keep_warning(void *arg, const char *line)
{
    if (strstr(line, "states_dir"))
        snprintf(arg, 200, "%s", line);
}

static bool is_tmpfs(const char *dir)
{
    struct statfs fs;
    return !statfs(dir, &fs) && fs.f_type == TMPFS_MAGIC;
}

static void test_in_memory(void **state)
{
    const char *dirs[] = {"/dev/shm", folder};
    if (!is_tmpfs(dirs[0]))
        skip();
    for (int k = 0; k < 2; k++) {
        char warning[200] = "";
        zero_ctx *z;
        struct zero_config cfg = ZERO_CONFIG_INIT;
        cfg.memory.states = ZERO_STATES_FILE;
        cfg.memory.states_dir = dirs[k];
        cfg.debug.log = keep_warning;
        cfg.debug.log_arg = warning;
        assert_int_equal(wrap_one(&z, &cfg), 0);
        assert_int_equal(zero_unwrap(&z), 0);
        assert_int_equal(*warning != 0, is_tmpfs(dirs[k]));
    }
}

static int clean(void **state)
{
    char command[100];
    snprintf(command, sizeof command, "rm -r %s", folder);
    return system(command);
}

int main(void)
{
    if (!mkdtemp(folder))
        return 1;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_same_bits),      cmocka_unit_test(test_damage),
        cmocka_unit_test(test_transfer_fails), cmocka_unit_test(test_load_without_space),
        cmocka_unit_test(test_refused),        cmocka_unit_test(test_in_memory),
    };
    return cmocka_run_group_tests(tests, NULL, clean);
}
