/* SPDX-License-Identifier: Apache-2.0 */
/* test_stdio.c: processes that start with a standard descriptor closed, processes that may only write small
 * files, and processes that may open few descriptors. */
#include "kernels/limits.h"
#include "kernels/standard_fds.h"
#include "test/cmocka.h"
#include "test/comm/ranks.h"
#include "test/zero/toy_net.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

struct job {
    struct toy m;
    zero_ctx *z;
};

/* Instructions for the ranks. */
struct plan {
    unsigned closed; /* descriptors to close, 1 << each */
    char folder[64];
};

static int said; /* lines about descriptors */

static void count_line(void *arg, const char *line)
{
    said += strstr(line, "was closed: it is /dev/null now") != NULL;
}

static int start(struct rank *me, struct job *j)
{
    struct toy_rank r = {.rank = me->w.rank, .world = me->w.world};
    snprintf(r.url, sizeof r.url, "tcp://127.0.0.1:%d", me->w.port);
    struct zero_config cfg = toy_config(&r, 3);
    cfg.debug.log = count_line;
    cfg.debug.trace = 1;
    toy_make(&j->m);
    return zero_wrap(&j->z, j->m.table, TOY_TENSORS, &cfg);
}

static int one_step(struct rank *me, struct job *j)
{
    return FIRST_ERROR(toy_forward(&j->m, j->z, true), toy_backward(&j->m, j->z, true, 0, me->w.rank),
                       zero_step(j->z, 1e-2f, NULL));
}

/* ---- closed descriptors ---- */

static bool is_dev_null(int fd)
{
    struct stat null, st;
    return !stat("/dev/null", &null) && !fstat(fd, &st) && st.st_rdev == null.st_rdev && S_ISCHR(st.st_mode);
}

static void train_without_stdio(struct rank *me)
{
    const struct plan *plan = me->arg;
    struct job j = {0};
    int n_closed = 0;
    for (int fd = 0; fd < 3; fd++)
        if (plan->closed & 1u << fd) {
            close(fd);
            n_closed++;
        }
    RANK_CHECK(me, start(me, &j) == 0, "%s", zero_last_error());
    RANK_CHECK(me, said == n_closed, "%d lines of %d descriptors", said, n_closed);
    for (int fd = 0; fd < 3; fd++)
        RANK_CHECK(me, is_dev_null(fd) || !(plan->closed & 1u << fd), "descriptor %d is taken", fd);
    RANK_CHECK(me, one_step(me, &j) == 0, "%s", zero_last_error());
    /* Close them again, now that the context is open. */
    for (int fd = 0; fd < 3; fd++)
        if (plan->closed & 1u << fd)
            close(fd);
    RANK_CHECK(me, zero_save(j.z, plan->folder, NULL) == 0, "%s", zero_last_error());
    RANK_CHECK(me, zero_unwrap(&j.z) == 0, "%s", zero_last_error());
    for (int fd = 0; fd < 3; fd++)
        RANK_CHECK(me, !(plan->closed & 1u << fd) || fcntl(fd, F_GETFD) < 0, "descriptor %d is left open",
                   fd);
    toy_free(&j.m);
}

static void test_closed_descriptors(void **state)
{
    for (unsigned closed = 1; closed < 8; closed++)
        for (int world = 1; world <= 2; world++) {
            struct plan plan = {.closed = closed, .folder = "/tmp/zero-stdio-XXXXXX"};
            toy_make_folder(plan.folder);
            run_ranks(true, world, train_without_stdio, &plan, NULL);
            toy_remove_folder(plan.folder);
        }
}

static void open_without_stdio(struct rank *me)
{
    close(0);
    int fd = zr_above_standard(open("/dev/zero", O_RDONLY));
    RANK_CHECK(me, fd > 2 && fcntl(fd, F_GETFD) == FD_CLOEXEC, "descriptor %d", fd);
    RANK_CHECK(me, fcntl(0, F_GETFD) < 0, "descriptor 0 is taken");
    RANK_CHECK(me, zr_above_standard(fd) == fd && zr_above_standard(-1) == -1, "it moved again");
    /* No higher descriptor is free, so the low one must be closed, and the call fails. */
    setrlimit(RLIMIT_NOFILE, &(struct rlimit){3, 3});
    fd = zr_above_standard(open("/dev/zero", O_RDONLY));
    RANK_CHECK(me, fd == -1 && fcntl(0, F_GETFD) < 0, "descriptor %d", fd);
}

static void test_moved_above(void **state)
{
    run_ranks(true, 1, open_without_stdio, NULL, NULL);
}

/* ---- a limit on file size ---- */

static void limit_files(rlim_t bytes)
{
    struct rlimit most;
    getrlimit(RLIMIT_FSIZE, &most);
    most.rlim_cur = bytes;
    setrlimit(RLIMIT_FSIZE, &most);
}

#define NAMES_LIMIT(code, want)                                                                              \
    ((code) == (want) && strstr(zero_last_error(), "2048 bytes (RLIMIT_FSIZE, ulimit -f)"))

static void wrap_with_small_files(struct rank *me)
{
    struct job j = {0};
    limit_files(2048);
    int err = start(me, &j);
    RANK_CHECK(me, err && strstr(zero_last_error(), "(RLIMIT_FSIZE, ulimit -f)"), "%d: %s", err,
               zero_last_error());
    limit_files(RLIM_INFINITY);
    toy_free(&j.m);
}

static void save_to_small_files(struct rank *me)
{
    const struct plan *plan = me->arg;
    char path[128];
    sigset_t pending;
    struct job j = {0};
    RANK_CHECK(me, start(me, &j) == 0, "%s", zero_last_error());
    RANK_CHECK(me, one_step(me, &j) == 0, "%s", zero_last_error());
    limit_files(2048);
    int err = zero_save(j.z, plan->folder, NULL);
    RANK_CHECK(me, NAMES_LIMIT(err, ZERO_ERR_IO), "zero_save: %d: %s", err, zero_last_error());
    err = zero_export(j.z, plan->folder, NULL, 0, 0);
    RANK_CHECK(me, NAMES_LIMIT(err, ZERO_ERR_IO), "zero_export: %d: %s", err, zero_last_error());
    snprintf(path, sizeof path, "%s/trace-%d.json", plan->folder, me->w.rank);
    err = zero_trace_write(j.z, path);
    RANK_CHECK(me, NAMES_LIMIT(err, ZERO_ERR_IO), "zero_trace_write: %d: %s", err, zero_last_error());
    sigpending(&pending);
    RANK_CHECK(me, !sigismember(&pending, SIGXFSZ), "a signal is left behind");
    limit_files(RLIM_INFINITY);
    RANK_CHECK(me, zero_save(j.z, plan->folder, NULL) == 0, "%s", zero_last_error());
    RANK_CHECK(me, zero_unwrap(&j.z) == 0, "%s", zero_last_error());
    toy_free(&j.m);
}

static void test_file_limit(void **state)
{
    for (int world = 1; world <= 2; world++) {
        struct plan plan = {.folder = "/tmp/zero-stdio-XXXXXX"};
        toy_make_folder(plan.folder);
        run_ranks(true, world, save_to_small_files, &plan, NULL);
        toy_remove_folder(plan.folder);
    }
    run_ranks(true, 2, wrap_with_small_files, NULL, NULL);
}

/* ---- a limit on descriptors ---- */

enum { MAX_DESCRIPTORS = 256, LEAVE_MS = 300 };

/* Rank `limited` may open `more` descriptors than it has. */
struct few {
    int limited, more;
};

static void limit_descriptors(int more)
{
    struct rlimit most;
    int used = 0;
    getrlimit(RLIMIT_NOFILE, &most);
    for (int fd = 0; fd < MAX_DESCRIPTORS; fd++)
        if (fcntl(fd, F_GETFD) >= 0)
            used = fd + 1;
    /* The limit is on descriptor numbers, so there must be no gap below. */
    for (int fd = 0; fd < used; fd++)
        if (fcntl(fd, F_GETFD) < 0)
            fcntl(0, F_DUPFD, fd);
    most.rlim_cur = (rlim_t)(used + more);
    setrlimit(RLIMIT_NOFILE, &most);
}

/* LeakSanitizer opens files at exit. */
static void lift_limit(void)
{
    struct rlimit most;
    getrlimit(RLIMIT_NOFILE, &most);
    most.rlim_cur = most.rlim_max;
    setrlimit(RLIMIT_NOFILE, &most);
}

/* The limited rank may fail before it reaches the other one. Then the other one exits soon instead of
 * waiting. */
static void *leave_early(void *arg)
{
    struct rank *me = arg;
    struct few *few = me->arg;
    wait_stage(&me->all[few->limited], 1);
    sleep_ms(LEAVE_MS);
    _exit(0);
}

static void wrap_with_few_descriptors(struct rank *me)
{
    struct few *few = me->arg;
    struct job j = {0};
    pthread_t leaver;
    if (me->w.rank == few->limited)
        limit_descriptors(few->more);
    else
        RANK_CHECK(me, !pthread_create(&leaver, NULL, leave_early, me), "no thread");
    int err = start(me, &j);
    note_error(me, err);
    if (me->w.rank == few->limited && err)
        atomic_store(&me->stage, 1);
    RANK_CHECK(me, !err || strstr(me->note, "(RLIMIT_NOFILE, ulimit -n)"), "%d more for rank %d: %d: %s",
               few->more, few->limited, err, me->note);
    RANK_CHECK(me, !err || err == ZERO_ERR_SYSTEM, "%d more for rank %d: %d: %s", few->more, few->limited,
               err, me->note);
    if (!err)
        RANK_CHECK(me, zero_unwrap(&j.z) == 0, "%s", zero_last_error());
    toy_free(&j.m);
    lift_limit();
}

static void test_descriptor_limit(void **state)
{
    struct few few = {0};
    char text[ZR_SYSTEM_WORDS];
    assert_non_null(strstr(zr_limit_words(ENFILE, "full", text), "full: all processes of this host"));
    assert_string_equal(zr_limit_words(EPERM, "forbidden", text), "forbidden");
    for (; few.limited < 2; few.limited++) {
        for (few.more = 0; few.more < MAX_DESCRIPTORS; few.more++)
            if (!run_ranks(true, 2, wrap_with_few_descriptors, &few, NULL)[few.limited].code)
                break;
        printf("rank %d needs %d descriptors\n", few.limited, few.more);
        assert_in_range(few.more, 6, MAX_DESCRIPTORS - 1);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_closed_descriptors),
                                       cmocka_unit_test(test_moved_above), cmocka_unit_test(test_file_limit),
                                       cmocka_unit_test(test_descriptor_limit)};
    return cmocka_run_group_tests(tests, NULL, toy_remove_folders);
}
