/* SPDX-License-Identifier: Apache-2.0 */
/* test_checkpoint_folders.c: tests ranks that find different file systems under one path, as can happen on
 * several hosts. All ranks refuse a save before anything is written to a wrong folder, and a load before
 * anything is changed. */
#include "test/checkpoint/memory_files.h"
#include "test/checkpoint/saved_model.h"
#include "test/cmocka.h"
#include "zero/checkpoint/checkpoint_dir.h"
#include "zero/checkpoint/same_folder.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define HIDDEN "run/.save-00000001-step-00000001"
#define SAVED  "run/save-00000001-step-00000001"

enum { RANKS = 3 };

enum fault { MISSING, ANOTHER, SHORTER, ONE_FILE_SYSTEM };

struct two_disks {
    enum fault fault;
    int other_rank; /* the rank with the other disk */
    struct memory_files *disk, *other;
};

static int count_name(void *arg, const char *name)
{
    int *n = arg;
    *n += !strcmp(name, ZR_FOLDER_MARK);
    return 0;
}

/* The other disk has such a folder too, from somebody else's save. */
static void prepare(const struct two_disks *d)
{
    static const unsigned char mark[ZR_FOLDER_MARK_BYTES] = {1, 2, 3};
    const struct zr_files *fs = memory_files_table(d->other);
    if (d->fault == MISSING)
        return;
    CHECK_OK(zr_folder_make(fs, "run", NULL));
    CHECK_OK(zr_folder_make(fs, HIDDEN, NULL));
    memory_files_put(d->other, HIDDEN "/" ZR_FOLDER_MARK, mark, d->fault == ANOTHER ? sizeof mark : 3);
}

/* Checks the message on the rank itself. Other ranks put its name before it. */
static void check_words(const struct model_rank *m, const struct two_disks *d)
{
    static const char *const says[] = {
        [MISSING] = "this rank cannot see the folder that rank 0 made: ",
        [ANOTHER] = HIDDEN " is not the folder that rank 0 made",
        [SHORTER] = HIDDEN " is not the folder that rank 0 made",
    };
    char start[64] = "zero_save: ";
    if (m->rank != d->other_rank)
        snprintf(start, sizeof start, "zero_save: rank %d: ", d->other_rank);
    const char *text = zero_last_error();
    bool well = !strncmp(text, start, strlen(start)) && strstr(text, says[d->fault]) &&
                strstr(text, "; all ranks must share a file system") &&
                (d->fault != MISSING || strstr(text, HIDDEN "/" ZR_FOLDER_MARK ": open: "));
    if (!well)
        printf("rank %d: %s\n", m->rank, text);
    CHECK_THAT(well);
}

static void save_apart(struct model_rank *m, void *arg)
{
    const struct two_disks *d = arg;
    int n_marks = 0;
    CHECK_OK(model_steps(m, 1));
    if (d->fault != ONE_FILE_SYSTEM) {
        m->z->files = memory_files_table(m->rank == d->other_rank ? d->other : d->disk);
        CHECK_THAT(zero_save(m->z, "run", NULL) == ZERO_ERR_IO);
        check_words(m, d);
    }
    /* As if nothing had happened: training goes on, and a folder that all ranks see can be saved to. */
    m->z->files = memory_files_table(d->disk);
    uint64_t before = model_hash(m);
    CHECK_OK(zero_save(m->z, "run", NULL));
    const char *path;
    CHECK_OK(zero_save_wait(m->z, &path));
    CHECK_OK(zr_folder_walk(m->z->files, path, NULL, count_name, &n_marks));
    CHECK_THAT(n_marks == 0);
    CHECK_OK(model_steps(m, 1));
    CHECK_OK(zero_load(m->z, "run"));
    CHECK_THAT(model_hash(m) == before);
}

static void test_ranks_that_see_other_folders(void **state)
{
    for (int k = 0; k < 2 * (ONE_FILE_SYSTEM + 1); k++) {
        struct two_disks d = {.fault = (enum fault)(k / 2),
                              .other_rank = 1 + k % (RANKS - 1),
                              .disk = memory_files_open(),
                              .other = memory_files_open()};
        struct model_options o = {.stage = k % 2 ? 3 : 1, .world = RANKS, .async = k % 2};
        prepare(&d);
        model_run(&o, save_apart, &d);
        assert_int_equal(memory_files_n_open(d.disk), 0);
        assert_int_equal(memory_files_n_open(d.other), 0);
        memory_files_close(d.disk);
        memory_files_close(d.other);
    }
}

/* ---- loading ---- */

static char one[] = "one", two[] = "two";

/* The folder that one rank finds instead of the others' checkpoint. */
enum instead { NO_FOLDER, CUT_FILE, ANOTHER_SAVE, COPY };

struct two_saves {
    enum instead instead;
    int other_rank;
    struct memory_files *disk, *other;
};

static void not_said(void *arg, const char *line)
{
}

/* Saves with this data of the program, which alone tells two saves of one step apart. */
static void save_with(struct model_rank *m, void *arg)
{
    CHECK_OK(model_steps(m, 1));
    CHECK_OK(zero_set_data(m->z, ZERO_DATA_JOB, arg, (int64_t)strlen(arg)));
    CHECK_OK(zero_save(m->z, "run", NULL));
}

/* The message on the rank that reports. Other ranks put its name before it. */
static void load_words(const struct two_saves *d, char starts[256], const char **ends)
{
    *ends = "; all ranks must find the same files there";
    if (d->instead == ANOTHER_SAVE) { /* every rank finds this by itself */
        snprintf(starts, 256, SAVED ": rank %d finds a different checkpoint there than rank 0; all ",
                 d->other_rank ? d->other_rank : 1);
        return;
    }
    if (d->other_rank == 0) { /* no rank knows that others have one */
        *ends = "";
        strcpy(starts, "run: not a checkpoint: ");
        return;
    }
    *ends = "; rank 0 sees a checkpoint there: all ranks must find the same files there";
    strcpy(starts, d->instead == CUT_FILE ? SAVED "/shard-00002-of-00003.safetensors: has "
                                          : SAVED ": not a checkpoint: it has no manifest.json; ");
}

static void check_load_words(const struct model_rank *m, const struct two_saves *d)
{
    char starts[256], before[64] = "zero_load: ";
    const char *text = zero_last_error(), *ends;
    load_words(d, starts, &ends);
    if (m->rank != d->other_rank && d->instead != ANOTHER_SAVE)
        snprintf(before, sizeof before, "zero_load: rank %d: ", d->other_rank);
    size_t n_before = strlen(before), n = strlen(text), n_ends = strlen(ends);
    bool well = !strncmp(text, before, n_before) && !strncmp(text + n_before, starts, strlen(starts)) &&
                n > n_ends && !strcmp(text + n - n_ends, ends);
    if (!well)
        printf("rank %d: %s\n", m->rank, text);
    CHECK_THAT(well);
}

static void load_apart(struct model_rank *m, void *arg)
{
    const struct two_saves *d = arg;
    struct zero_data_info info;
    char own[3];
    uint64_t before = model_hash(m);
    m->z->files = memory_files_table(m->rank == d->other_rank ? d->other : d->disk);
    if (d->instead != COPY) {
        CHECK_THAT(zero_load(m->z, "run") == ZERO_ERR_IO);
        check_load_words(m, d);
        CHECK_THAT(model_hash(m) == before);
        m->z->files = memory_files_table(d->disk);
    }
    CHECK_OK(zero_load(m->z, "run"));
    CHECK_THAT(model_hash(m) != before);
    CHECK_OK(zero_read_data(m->z, ZERO_DATA_JOB, 0, 3, own, &info));
    CHECK_THAT(info.bytes == 3 && !memcmp(own, one, 3));
    CHECK_OK(model_steps(m, 1));
}

static void test_ranks_that_load_other_folders(void **state)
{
    for (int k = 0; k < RANKS * (COPY + 1); k++) {
        int64_t *size;
        struct two_saves d = {.instead = (enum instead)(k / RANKS),
                              .other_rank = k % RANKS,
                              .disk = memory_files_open(),
                              .other = memory_files_open()};
        struct model_options o = {.stage = 1 + k % 3, .world = RANKS, .log = not_said};
        o.files = memory_files_table(d.disk);
        model_run(&o, save_with, one);
        o.files = memory_files_table(d.other);
        if (d.instead != NO_FOLDER)
            model_run(&o, save_with, d.instead == ANOTHER_SAVE ? two : one);
        if (d.instead == CUT_FILE) {
            assert_non_null(memory_files_content(d.other, SAVED "/shard-00002-of-00003.safetensors", &size));
            --*size;
        }
        o.scrambled = true;
        model_run(&o, load_apart, &d);
        assert_int_equal(memory_files_n_open(d.disk), 0);
        assert_int_equal(memory_files_n_open(d.other), 0);
        memory_files_close(d.disk);
        memory_files_close(d.other);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_ranks_that_see_other_folders),
                                       cmocka_unit_test(test_ranks_that_load_other_folders)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
