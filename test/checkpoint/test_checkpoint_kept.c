/* SPDX-License-Identifier: Apache-2.0 */
/* test_checkpoint_kept.c: tests the path of the last checkpoint and which checkpoints are kept, as
 * reported to the ranks. */
#include "test/checkpoint/memory_files.h"
#include "test/checkpoint/saved_model.h"
#include "test/cmocka.h"
#include "zero/checkpoint/checkpoint_dir.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static struct memory_files *disk;

static const struct zero_save_options kept = {.kept = 1};

/* Checks the path; collective. */
static void saved_is(struct model_rank *m, const char *expected)
{
    const char *path = "poison";
    CHECK_OK(zero_save_wait(m->z, &path));
    model_check(expected ? path && !strcmp(path, expected) : !path, __FILE__, __LINE__,
                expected ? expected : "NULL");
}

/* ---- the path ---- */

static void ask_for_it(struct model_rank *m, void *arg)
{
    bool async = *(bool *)arg;
    const char *path = NULL;
    char first[64];
    CHECK_THAT(zero_save_wait(NULL, &path) == ZERO_ERR_ARG);
    saved_is(m, NULL);
    CHECK_OK(model_steps(m, 1));
    uint64_t hash = model_hash(m);
    CHECK_OK(zero_save(m->z, "run", NULL));
    saved_is(m, "run/save-00000001-step-00000001");
    CHECK_OK(zero_save_wait(m->z, &path));
    snprintf(first, sizeof first, "%s", path);

    CHECK_OK(model_steps(m, 1));
    CHECK_OK(zero_save(m->z, "other", NULL));
    if (!async)
        CHECK_OK(zero_save_wait(m->z, &path));
    CHECK_OK(zero_load(m->z, path)); /* also ends the save in progress, and updates the path */
    CHECK_THAT(model_t(m) == (async ? 1 : 2));
    saved_is(m, "other/save-00000001-step-00000002");

    CHECK_OK(zero_load(m->z, first)); /* a path that zero_load takes */
    CHECK_THAT(model_hash(m) == hash && model_t(m) == 1);
    saved_is(m, "other/save-00000001-step-00000002");

    /* A save that fails, and the wait that reports it. */
    CHECK_OK(zr_engine_barrier(m->z->engine));
    if (m->rank == 0)
        memory_files_fault(disk, FAULT_EIO, 20, true);
    CHECK_OK(zr_engine_barrier(m->z->engine));
    int err = zero_save(m->z, "run", NULL);
    path = "poison";
    CHECK_THAT((err ? err : zero_save_wait(m->z, &path)) == ZERO_ERR_IO);
    CHECK_THAT(!strcmp(path, "poison"));
    saved_is(m, "other/save-00000001-step-00000002");
    CHECK_OK(zr_engine_barrier(m->z->engine));
    if (m->rank == 0)
        memory_files_fault(disk, FAULT_NONE, 0, false);
    CHECK_OK(zr_engine_barrier(m->z->engine));
    CHECK_OK(zero_save(m->z, "run", NULL));
    CHECK_OK(zero_save_wait(m->z, &path)); /* the failed save may have left a folder, whose number is taken */
    CHECK_THAT(path && !strncmp(path, "run/save-", 9) && strcmp(path, first) != 0);
    CHECK_OK(zero_load(m->z, path));
}

static void test_where_it_is(void **state)
{
    for (int way = 0; way < 6; way++) {
        bool async = way % 2;
        disk = memory_files_open();
        struct model_options o = {
            .stage = way / 2 + 1, .world = way / 2 + 1, .async = async, .files = memory_files_table(disk)};
        model_run(&o, ask_for_it, &async);
        memory_files_close(disk);
    }
}

/* A program may change its directory after a save: the path stays valid. */
static void save_and_leave(struct model_rank *m, void *arg)
{
    const char *base = arg, *path;
    char gone[ZR_PATH_BYTES];
    CHECK_OK(model_steps(m, 1));
    CHECK_OK(zero_save(m->z, "run", NULL));
    CHECK_OK(zero_save_wait(m->z, &path));
    CHECK_THAT(path && *path == '/' && strstr(path, base));
    CHECK_THAT(!chdir("/"));
    snprintf(gone, sizeof gone, "%s", path);
    CHECK_OK(zero_load(m->z, gone));
    CHECK_OK(zr_folder_remove(&zr_files_posix, gone, NULL));
}

static void test_from_the_root(void **state)
{
    char base[] = "/tmp/zero-checkpoint-XXXXXX", run[sizeof base + 8];
    assert_non_null(mkdtemp(base));
    assert_int_equal(chdir(base), 0);
    model_run(&(struct model_options){.stage = 2, .world = 1}, save_and_leave, base);
    snprintf(run, sizeof run, "%s/run", base);
    assert_int_equal(rmdir(run), 0);
    assert_int_equal(rmdir(base), 0);
}

static void run_on_new_disk(int stage, int world, void (*fn)(struct model_rank *m, void *arg), void *arg)
{
    disk = memory_files_open();
    model_run(&(struct model_options){.stage = stage, .world = world, .files = memory_files_table(disk)}, fn,
              arg);
    memory_files_close(disk);
}

/* The names of folders have room for a large number. */
static void save_late(struct model_rank *m, void *arg)
{
    CHECK_THAT(zero_set_step(m->z, ZR_MAX_STEPS + 1) == ZERO_ERR_ARG);
    CHECK_OK(zero_set_step(m->z, ZR_MAX_STEPS));
    for (int i = 0; i < 3; i++)
        CHECK_OK(zero_save(m->z, "run", i == 1 ? &kept : NULL));
    saved_is(m, "run/save-00000003-step-100000000000000000");
    CHECK_OK(model_steps(m, 1));
    CHECK_OK(zero_save(m->z, "run", NULL));
    CHECK_OK(zero_set_step(m->z, 0));
    CHECK_OK(zero_load(m->z, "run"));
    CHECK_THAT(model_t(m) == ZR_MAX_STEPS + 1);
}

static void test_large_step(void **state)
{
    run_on_new_disk(3, 2, save_late, NULL);
}

/* The names have no room for a larger number than this. */
static void save_after_largest(struct model_rank *m, void *arg)
{
    CHECK_OK(model_steps(m, 1));
    CHECK_OK(zero_save(m->z, "run", NULL));
    if (m->rank == 0)
        CHECK_OK(zr_file_rename(m->z->files, "run/save-00000001-step-00000001",
                                "run/save-999999999999999998-step-00000001"));
    CHECK_OK(zero_load(m->z, "run"));
    CHECK_OK(model_steps(m, 1));
    CHECK_OK(zero_save(m->z, "run", NULL));
    saved_is(m, "run/save-999999999999999999-step-00000002");
    CHECK_THAT(zero_save(m->z, "run", NULL) == ZERO_ERR_ARG);
    CHECK_THAT(strstr(zero_last_error(), "run/save-999999999999999999-step-00000002: zero_load would not"));
    CHECK_OK(zero_load(m->z, "run"));
    CHECK_THAT(model_t(m) == 2);
}

static void test_largest_number(void **state)
{
    run_on_new_disk(2, 2, save_after_largest, NULL);
}

/* ---- folders of other kinds ---- */

/* A save inside a checkpoint would not be found by zero_load there. */
static void save_into_checkpoint(struct model_rank *m, void *arg)
{
    const char *path;
    int64_t *n;
    CHECK_OK(model_steps(m, 1));
    CHECK_OK(zero_save(m->z, "run", NULL));
    CHECK_OK(zero_save_wait(m->z, &path));
    CHECK_OK(zero_load(m->z, path));
    CHECK_OK(model_steps(m, 1));
    for (int i = 0; i < 2; i++) {
        CHECK_THAT(zero_save(m->z, path, i ? &kept : NULL) == ZERO_ERR_ARG);
        CHECK_THAT(
            strstr(zero_last_error(), "/save-00000001-step-00000001: this folder is itself a checkpoint"));
        CHECK_THAT(strstr(zero_last_error(), "above: run"));
    }
    CHECK_THAT(!memory_files_content(disk, "run/save-00000001-step-00000001/.lock", &n));
    CHECK_OK(zero_save(m->z, "run", NULL));
    CHECK_OK(zero_load(m->z, "run"));
    CHECK_THAT(model_t(m) == 2);
}

static void test_save_into_checkpoint(void **state)
{
    run_on_new_disk(2, 2, save_into_checkpoint, NULL);
}

/* A user's own manifest.json in the folder is not taken for a checkpoint's. */
static void save_beside_manifest(struct model_rank *m, void *arg)
{
    const char *own = arg;
    int64_t *n = NULL;
    CHECK_OK(zr_folder_make(m->z->files, "run", NULL));
    memory_files_put(disk, "run/manifest.json", own, (int64_t)strlen(own));
    CHECK_THAT(zero_load(m->z, "run") == ZERO_ERR_IO);
    CHECK_THAT(strstr(zero_last_error(), "run/manifest.json is not libzero's, or is damaged"));
    CHECK_OK(model_steps(m, 1));
    CHECK_OK(zero_save(m->z, "run", NULL));
    CHECK_OK(model_steps(m, 1));
    CHECK_OK(zero_load(m->z, "run"));
    CHECK_THAT(model_t(m) == 1);
    unsigned char *p = memory_files_content(disk, "run/manifest.json", &n);
    CHECK_THAT(*n == (int64_t)strlen(own) && (!*n || !memcmp(p, own, (size_t)*n)));
    /* A damaged manifest of libzero's is reported as damaged, whichever end of it is left. */
    for (int i = 0; i < 2; i++) {
        p = memory_files_content(disk, "run/save-00000001-step-00000001/manifest.json", &n);
        CHECK_THAT(p != NULL);
        p[i ? *n - 60 : 0] ^= 1;
        CHECK_THAT(zero_load(m->z, "run/save-00000001-step-00000001") == ZERO_ERR_IO);
        CHECK_THAT(strstr(zero_last_error(), "the file was cut short or changed"));
        p[i ? *n - 60 : 0] ^= 1;
    }
}

static void test_manifest_of_the_user(void **state)
{
    static char *const own[] = {"{\"name\":\"my app\"}\n", "", "{\"format\":\"libzero\"}"};
    for (size_t i = 0; i < sizeof own / sizeof *own; i++) {
        run_on_new_disk(1, 1, save_beside_manifest, own[i]);
    }
}

/* ---- which checkpoints are kept ---- */

struct names {
    char text[16][ZR_PATH_BYTES];
    int n;
};

static int add_name(void *arg, const char *name)
{
    struct names *l = arg;
    CHECK_THAT(l->n < 16);
    snprintf(l->text[l->n++], sizeof *l->text, "%s", name);
    return 0;
}

static int by_text(const void *a, const void *b)
{
    return strcmp(a, b);
}

/* Compares the names in a folder, in one line. */
static void folder_holds(const struct zr_files *fs, const char *expected)
{
    struct names l = {0};
    char all[1024] = "";
    CHECK_OK(zr_folder_walk(fs, "run", NULL, add_name, &l));
    qsort(l.text, (size_t)l.n, sizeof *l.text, by_text);
    for (int i = 0; i < l.n; i++)
        if (strcmp(l.text[i], ".lock") != 0)
            snprintf(all + strlen(all), sizeof all - strlen(all), "%.60s\n", l.text[i]);
    model_check(!strcmp(all, expected), __FILE__, __LINE__, all);
}

struct keeping {
    bool async;
    uint64_t hashes[16];
};

/* Takes a step before each save: k: kept; s: an ordinary save. */
static void save_as(struct model_rank *m, struct keeping *k, const char *how)
{
    for (; *how; how++) {
        CHECK_OK(model_steps(m, 1));
        uint64_t h = model_hash(m);
        if (m->rank == 0)
            k->hashes[m->step] = h;
        CHECK_OK(zero_save(m->z, "run", *how == 'k' ? &kept : NULL));
    }
    CHECK_OK(zero_save_wait(m->z, NULL));
    CHECK_OK(zr_engine_barrier(m->z->engine));
}

static void keep_some(struct model_rank *m, void *arg)
{
    struct keeping *k = arg;
    save_as(m, k, "kssk");
    saved_is(m, "run/save-00000004-step-00000004-kept");
    if (m->rank == 0)
        folder_holds(m->z->files, "save-00000001-step-00000001-kept\n"
                                  "save-00000002-step-00000002\nsave-00000003-step-00000003\n"
                                  "save-00000004-step-00000004-kept\n");
    CHECK_OK(zr_engine_barrier(m->z->engine));
    save_as(m, k, "ss");
}

/* A later run finds them: the latest is the latest, whatever its name. */
static void go_on_keeping(struct model_rank *m, void *arg)
{
    struct keeping *k = arg;
    if (m->rank == 0)
        folder_holds(m->z->files, "save-00000001-step-00000001-kept\nsave-00000004-step-00000004-kept\n"
                                  "save-00000005-step-00000005\nsave-00000006-step-00000006\n");
    CHECK_OK(zero_load(m->z, "run"));
    CHECK_THAT(model_t(m) == 6 && model_hash(m) == k->hashes[6]);
    m->step = 6;
    save_as(m, k, "k");
    CHECK_OK(zero_load(m->z, "run"));
    CHECK_THAT(model_t(m) == 7 && model_hash(m) == k->hashes[7]);
    /* A renamed one is no longer kept. */
    if (m->rank == 0)
        CHECK_OK(zr_file_rename(m->z->files, "run/save-00000004-step-00000004-kept",
                                "run/save-00000004-step-00000004"));
    CHECK_OK(zr_engine_barrier(m->z->engine));
    save_as(m, k, "s");
    if (m->rank == 0)
        folder_holds(m->z->files, "save-00000001-step-00000001-kept\nsave-00000006-step-00000006\n"
                                  "save-00000007-step-00000007-kept\nsave-00000008-step-00000008\n");
    CHECK_OK(zr_engine_barrier(m->z->engine));
    CHECK_OK(zero_load(m->z, "run/save-00000001-step-00000001-kept"));
    CHECK_THAT(model_t(m) == 1 && model_hash(m) == k->hashes[1]);
}

/* An unfinished one is no checkpoint, and is removed. */
static void leave_one_unfinished(struct model_rank *m, void *arg)
{
    struct keeping *k = arg;
    CHECK_OK(zr_folder_make(m->z->files, "run/.save-00000009-step-00000009-kept", NULL));
    m->step = 8;
    CHECK_OK(zero_load(m->z, "run"));
    save_as(m, k, "s");
    folder_holds(m->z->files, "save-00000001-step-00000001-kept\nsave-00000007-step-00000007-kept\n"
                              "save-00000008-step-00000008\nsave-00000010-step-00000009\n");
}

static void test_which_stay(void **state)
{
    for (int way = 0; way < 4; way++) {
        struct keeping k = {.async = way % 2};
        disk = memory_files_open();
        struct model_options o = {.stage = 3,
                                  .world = way / 2 ? 3 : 1,
                                  .async = k.async,
                                  .keep = 2,
                                  .files = memory_files_table(disk)};
        model_run(&o, keep_some, &k);
        o.scrambled = true;
        model_run(&o, go_on_keeping, &k);
        o.world = 1;
        model_run(&o, leave_one_unfinished, &k);
        memory_files_close(disk);
    }
}

static void keep_all(struct model_rank *m, void *arg)
{
    save_as(m, arg, "ssss");
    CHECK_OK(zr_folder_make(m->z->files, "run/save-00000002-step-00000002/mine", NULL));
    memory_files_put(disk, "run/save-00000004-step-00000004/manifest.json", "{", 1);
}

/* A damaged save does not count. A folder inside a save stays, and does not prevent any other removal. */
static void keep_two(struct model_rank *m, void *arg)
{
    save_as(m, arg, "s");
    folder_holds(m->z->files, "save-00000002-step-00000002\nsave-00000003-step-00000003\n"
                              "save-00000004-step-00000004\nsave-00000005-step-00000001\n");
    save_as(m, arg, "ss");
    folder_holds(m->z->files, "save-00000002-step-00000002\nsave-00000006-step-00000002\n"
                              "save-00000007-step-00000003\n");
    CHECK_THAT(zero_load(m->z, "run/save-00000002-step-00000002") == ZERO_ERR_IO);
    struct names l = {0};
    CHECK_OK(zr_folder_walk(m->z->files, "run/save-00000002-step-00000002", NULL, add_name, &l));
    CHECK_THAT(l.n == 1 && !strcmp(l.text[0], "mine"));
}

static void count_removals(void *arg, const char *line)
{
    if (!strstr(line, "could not be removed"))
        return;
    ++*(int *)arg;
    model_check(strstr(line, "libzero did not make the folder mine in it") != NULL, __FILE__, __LINE__, line);
}

static void test_what_cannot_go(void **state)
{
    struct keeping k = {0};
    int n_lines = 0;
    disk = memory_files_open();
    struct model_options o = {.stage = 1,
                              .world = 1,
                              .files = memory_files_table(disk),
                              .log = count_removals,
                              .log_arg = &n_lines};
    model_run(&o, keep_all, &k);
    o.keep = 2;
    model_run(&o, keep_two, &k);
    assert_int_equal(n_lines, 1);
    memory_files_close(disk);
}

/* A folder without a manifest, such as a copy in progress, stays. */
static void keep_one(struct model_rank *m, void *arg)
{
    int64_t *n;
    save_as(m, arg, "s");
    CHECK_OK(zr_folder_make(m->z->files, "run/save-00000001-step-00000009", NULL));
    memory_files_put(disk, "run/save-00000001-step-00000009/shard", "x", 1);
    CHECK_OK(zr_folder_make(m->z->files, "run/save-00000002-step-00000009", NULL));
    save_as(m, arg, "s");
    folder_holds(m->z->files, "save-00000001-step-00000009\nsave-00000002-step-00000009\n"
                              "save-00000003-step-00000002\n");
    CHECK_THAT(memory_files_content(disk, "run/save-00000001-step-00000009/shard", &n) != NULL);
}

static void count_left_alone(void *arg, const char *line)
{
    CHECK_THAT(!strstr(line, "could not be removed"));
    *(int *)arg += strstr(line, "save_keep leaves this folder alone") != NULL;
}

static void test_without_manifest(void **state)
{
    struct keeping k = {0};
    int n_lines = 0;
    disk = memory_files_open();
    struct model_options o = {.stage = 1,
                              .world = 1,
                              .keep = 1,
                              .files = memory_files_table(disk),
                              .log = count_left_alone,
                              .log_arg = &n_lines};
    model_run(&o, keep_one, &k);
    assert_int_equal(n_lines, 2);
    memory_files_close(disk);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_where_it_is),          cmocka_unit_test(test_from_the_root),
        cmocka_unit_test(test_large_step),           cmocka_unit_test(test_save_into_checkpoint),
        cmocka_unit_test(test_manifest_of_the_user), cmocka_unit_test(test_which_stay),
        cmocka_unit_test(test_largest_number),       cmocka_unit_test(test_what_cannot_go),
        cmocka_unit_test(test_without_manifest),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
