/* test_checkpoint_folders.c: ranks that see other file systems by the same path, as they may on several
 * hosts: a save is refused on all of them, before anything is written into a wrong folder. */
#include "test/checkpoint/memory_files.h"
#include "test/checkpoint/saved_model.h"
#include "zero/checkpoint/checkpoint_dir.h"
#include "zero/checkpoint/same_folder.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define HIDDEN "run/.save-00000001-step-00000001"

enum { RANKS = 3 };

enum fault { MISSING, ANOTHER, SHORTER, ONE_FILE_SYSTEM };

struct two_disks {
    enum fault fault;
    int who; /* of this rank the other is */
    struct memory_files *disk, *other;
};

static int count_name(void *arg, const char *name)
{
    int *n = arg;
    *n += !strcmp(name, ZR_FOLDER_MARK);
    return 0;
}

/* On the other one there is such a folder, too, of somebody else's save. */
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

/* The words on the rank itself, before which others name it. */
static void check_words(const struct model_rank *m, const struct two_disks *d)
{
    static const char *const says[] = {
        [MISSING] = "the folder that rank 0 made cannot be seen here: ",
        [ANOTHER] = HIDDEN " is another folder here than the one that rank 0 made",
        [SHORTER] = HIDDEN " is another folder here than the one that rank 0 made",
    };
    char start[64] = "zero_save: ";
    if (m->rank != d->who)
        snprintf(start, sizeof start, "zero_save: rank %d: ", d->who);
    const char *text = zero_last_error();
    bool well = !strncmp(text, start, strlen(start)) && strstr(text, says[d->fault]) &&
                strstr(text, "; all ranks must see one file system") &&
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
        m->z->files = memory_files_table(m->rank == d->who ? d->other : d->disk);
        CHECK_THAT(zero_save(m->z, "run") == ZERO_ERR_IO);
        check_words(m, d);
    }
    /* As if nothing had been: training goes on, and a save where all see the same. */
    m->z->files = memory_files_table(d->disk);
    uint64_t before = model_hash(m);
    CHECK_OK(zero_save(m->z, "run"));
    CHECK_OK(zero_save_wait(m->z));
    const char *path;
    CHECK_OK(zero_get_saved(m->z, &path));
    CHECK_OK(zr_folder_walk(m->z->files, path, NULL, count_name, &n_marks));
    CHECK_THAT(n_marks == 0);
    CHECK_OK(model_steps(m, 1));
    CHECK_OK(zero_load(m->z, "run"));
    CHECK_THAT(model_hash(m) == before);
}

static void test_ranks_that_see_other_folders(void **state)
{
    (void)state;
    for (int k = 0; k < 2 * (ONE_FILE_SYSTEM + 1); k++) {
        struct two_disks d = {.fault = (enum fault)(k / 2),
                              .who = 1 + k % (RANKS - 1),
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

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_ranks_that_see_other_folders)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
