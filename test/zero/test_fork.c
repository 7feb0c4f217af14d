/* SPDX-License-Identifier: Apache-2.0 */
/* test_fork.c: ranks that fork, and ranks that exit with an open context. Every call in a forked child
 * returns an error and never hangs. Neither a child's calls nor its end affects the ranks. */
#include "test/cmocka.h"
#include "test/comm/ranks.h"
#include "test/zero/toy_net.h"

#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

enum { HANG_S = 60 };

static int last_words_take_ms;

/* Delays send(), which the library uses only for a rank's message at exit. */
ssize_t send(int fd, const void *data, size_t n, int flags)
{
    ssize_t sent = syscall(SYS_sendto, fd, data, n, flags, NULL, 0);
    sleep_ms(last_words_take_ms);
    return sent;
}

/* One rank with a toy model, wrapped at the stage that arg points to. */
struct job {
    struct toy m;
    zero_ctx *z;
};

static int start(struct rank *me, struct job *j)
{
    struct toy_rank r = {.rank = me->w.rank, .world = me->w.world};
    snprintf(r.url, sizeof r.url, "tcp://127.0.0.1:%d", me->w.port);
    struct zero_config cfg = toy_config(&r, *(int *)me->arg);
    toy_make(&j->m);
    return zero_wrap(&j->z, j->m.table, TOY_TENSORS, &cfg);
}

static int one_step(struct rank *me, struct job *j, int step)
{
    return FIRST_ERROR(toy_forward(&j->m, j->z, true), toy_backward(&j->m, j->z, true, step, me->w.rank),
                       zero_step(j->z, 1e-2f, NULL));
}

/* Makes every call in a forked child. Returns the number of the first call without the expected error, or
 * 0. */
static int call_everything(struct job *j)
{
    float x = 0;
    double d = 0;
    struct zero_stats stats;
    int n = 0;
#define REFUSED(call)                                                                                        \
    n++;                                                                                                     \
    if ((call) != ZERO_ERR_ORDER || !strstr(zero_last_error(), "was forked from process"))                   \
        return n;
    REFUSED(zero_begin(j->z, 0, ZERO_FORWARD))
    REFUSED(zero_end(j->z, 0, ZERO_FORWARD))
    REFUSED(zero_micro(j->z))
    REFUSED(zero_step(j->z, 1e-2f, NULL))
    REFUSED(zero_read(j->z, 0, 0, 0, 1, &x))
    REFUSED(zero_write(j->z, 0, 0, 0, 1, &x))
    REFUSED(zero_mean(j->z, &d, 1))
    REFUSED(zero_save(j->z, "nowhere", NULL))
    REFUSED(zero_save_wait(j->z, NULL))
    REFUSED(zero_load(j->z, "nowhere"))
    REFUSED(zero_export(j->z, "nowhere", NULL, 0, 0))
    REFUSED(zero_import(j->z, "nowhere", NULL, 0))
    REFUSED(zero_set_data(j->z, ZERO_DATA_RANK, "mine", 4))
    REFUSED(zero_read_data(j->z, 0, 0, 1, &x, NULL))
    REFUSED(zero_get_stats(j->z, &stats))
    REFUSED(zero_unwrap(&j->z))
#undef REFUSED
    return j->z ? n + 1 : 0;
}

/* Forks a child that ends by exit(), as one does that knows nothing of the library. */
static int child_of(struct job *j)
{
    fflush(NULL);
    pid_t pid = fork();
    if (pid == 0) {
        alarm(HANG_S);
        int wrong = call_everything(j);
        if (wrong)
            _exit(wrong);
        toy_free(&j->m);
        exit(0);
    }
    int status = -1;
    waitpid(pid, &status, 0);
    return status;
}

static void fork_and_go_on(struct rank *me)
{
    struct job j = {0};
    RANK_CHECK(me, start(me, &j) == 0, "%s", zero_last_error());
    for (int step = 0; step < 3; step++) {
        int status = step == 1 ? child_of(&j) : 0;
        RANK_CHECK(me, status == 0, "the child ended with status 0x%x", (unsigned)status);
        RANK_CHECK(me, one_step(me, &j, step) == 0, "%s", zero_last_error());
    }
    RANK_CHECK(me, zero_unwrap(&j.z) == 0, "%s", zero_last_error());
    toy_free(&j.m);
}

static void test_child_calls(void **state)
{
    for (int stage = 0; stage <= 3; stage++)
        for (int world = 1; world <= 3; world += 2)
            run_ranks(true, world, fork_and_go_on, &stage, NULL);
}

/* All descriptors that zero_wrap opens have FD_CLOEXEC. */
static void look_at_descriptors(struct rank *me)
{
    struct job j = {0};
    bool before[1024] = {false};
    for (int fd = 0; fd < 1024; fd++)
        before[fd] = fcntl(fd, F_GETFD) >= 0;
    RANK_CHECK(me, start(me, &j) == 0, "%s", zero_last_error());
    int n = 0;
    for (int fd = 0; fd < 1024; fd++) {
        int flags = before[fd] ? -1 : fcntl(fd, F_GETFD);
        n += flags >= 0;
        RANK_CHECK(me, flags < 0 || flags & FD_CLOEXEC, "descriptor %d stays open in other programs", fd);
    }
    RANK_CHECK(me, n > 0, "wrapping opened nothing");
    RANK_CHECK(me, zero_unwrap(&j.z) == 0, "%s", zero_last_error());
    toy_free(&j.m);
}

static void test_descriptors(void **state)
{
    int stage = 3;
    run_ranks(true, 2, look_at_descriptors, &stage, NULL);
}

/* Trains until a call fails. The rank that exits does so after its second step. */
static void train_while_one_goes(struct rank *me)
{
    struct job j = {0};
    RANK_CHECK(me, start(me, &j) == 0, "%s", zero_last_error());
    bool goes = me->note[0] == '!';
    int err = 0;
    for (int step = 0; !err && step < 1000000; step++) {
        err = one_step(me, &j, step);
        if (goes && step == 1)
            exit(0);
    }
    note_error(me, err);
    zero_unwrap(&j.z);
    toy_free(&j.m);
}

static void rank_1_goes(struct rank *r)
{
    strcpy(r->note, r->w.rank == 1 ? "!" : "");
}

static void rank_0_goes(struct rank *r)
{
    strcpy(r->note, r->w.rank == 0 ? "!" : "");
}

static void test_exit_without_unwrap(void **state)
{
    for (int stage = 0; stage <= 3; stage += 3)
        for (int who = 0; who <= 1; who++) {
            char name[32];
            snprintf(name, sizeof name, "rank %d was lost", who);
            struct rank *r =
                run_ranks(true, 3, train_while_one_goes, &stage, who ? rank_1_goes : rank_0_goes);
            for (int i = 0; i < 3; i++)
                if (i != who) {
                    expect_rank(&r[i], ZERO_ERR_PEER, name);
                    expect_rank(&r[i], ZERO_ERR_PEER, "exited without zero_unwrap");
                }
        }
}

/* Rank 0 reports its exit to the others one after the other. The first to learn of it fails and exits while
 * rank 0's threads still run. The last one must not get that exit as the cause. */
static void test_exit_is_reported_slowly(void **state)
{
    int stage = 3;
    last_words_take_ms = 300;
    struct rank *r = run_ranks(true, 3, train_while_one_goes, &stage, rank_0_goes);
    last_words_take_ms = 0;
    for (int i = 1; i < 3; i++)
        expect_rank(&r[i], ZERO_ERR_PEER, "rank 0 was lost");
}

/* Kills a rank while its forked child lives on with copies of its sockets. The others wait for nobody: at
 * stage 1 a forward only checks for known failures. So neither a timeout nor a look at the process finds the
 * death; only the closed connection does. */
static void outlived_by_a_child(struct rank *me)
{
    struct job j = {0};
    double mean = 1;
    RANK_CHECK(me, start(me, &j) == 0, "%s", zero_last_error());
    RANK_CHECK(me, one_step(me, &j, 0) == 0, "%s", zero_last_error());
    RANK_CHECK(me, zero_mean(j.z, &mean, 1) == 0, "%s", zero_last_error());
    RANK_CHECK(me, all_at(me, 1), "a rank is missing");
    if (me->dies) {
        pid_t pid = fork();
        if (pid == 0) {
            alarm(2 * HANG_S);
            pause();
            _exit(0);
        }
        atomic_store(&me->stage, (int)pid);
        kill(getpid(), SIGKILL);
    }
    int err = 0;
    for (int64_t until = toy_now_ms() + 1000 * HANG_S; !err && toy_now_ms() < until; sleep_ms(1))
        err = toy_forward(&j.m, j.z, true);
    note_error(me, err);
    zero_unwrap(&j.z);
    toy_free(&j.m);
}

static void rank_1_dies(struct rank *r)
{
    r->dies = r->w.rank == 1;
}

static void rank_0_dies(struct rank *r)
{
    r->dies = r->w.rank == 0;
}

static void test_death_is_found_by_its_connection(void **state)
{
    int stage = 1;
    for (int who = 0; who <= 1; who++) {
        char text[96];
        snprintf(text, sizeof text, "rank %d was lost", who);
        struct rank *r = run_ranks(true, 3, outlived_by_a_child, &stage, who ? rank_1_dies : rank_0_dies);
        assert_int_equal(kill(r[who].stage, SIGKILL), 0); /* the child lived longer than the ranks */
        for (int i = 0; i < 3; i++)
            if (i != who) {
                expect_rank(&r[i], ZERO_ERR_PEER, text);
                expect_rank(&r[i], ZERO_ERR_PEER, "its connection closed unexpectedly");
            }
    }
}

int main(void)
{
    setenv("ZERO_JOB_KEY", "0f1e2d3c4b5a69788796a5b4c3d2e1f0", 1);
    setenv("ZERO_JOB", "forks", 1);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_child_calls),
        cmocka_unit_test(test_descriptors),
        cmocka_unit_test(test_exit_without_unwrap),
        cmocka_unit_test(test_exit_is_reported_slowly),
        cmocka_unit_test(test_death_is_found_by_its_connection),
    };
    return cmocka_run_group_tests_name("ranks that fork or exit", tests, NULL, NULL);
}
