/* SPDX-License-Identifier: Apache-2.0 */
/* test_names.c: contexts with names. Several contexts of a process may be open, or in zero_wrap, at the same
 * time. Each meets the contexts of the same name on the other ranks, in any order. */
#include "test/cmocka.h"
#include "test/comm/ranks.h"
#include "test/held_port.h"
#include "test/zero/toy_net.h"

#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { STEPS = 3, HANG_S = 120, SOON_MS = 2000 };

static const char *const names[] = {"gen", "disc"};

/* A model that one rank trains. Each number has different gradients, so contexts that met the wrong ranks end
 * in other weights. */
struct job {
    struct toy m;
    struct zero_config cfg;
    zero_ctx *z;
    int number, rank, err;
    uint64_t hash;
    char url[64], text[1024];
};

static char folder[] = "/tmp/libzero-names-XXXXXX";

static void prepare(struct rank *me, int number, bool named, struct job *j)
{
    struct toy_rank r = {.rank = me->w.rank, .world = me->w.world};
    memset(j, 0, sizeof *j);
    toy_make(&j->m);
    j->cfg = toy_config(&r, 1);
    if (me->arg && *(bool *)me->arg)
        snprintf(j->url, sizeof j->url, "file://%s", folder);
    else
        snprintf(j->url, sizeof j->url, "tcp://127.0.0.1:%d", me->w.port);
    j->cfg.launch.rendezvous = j->url;
    j->cfg.debug.log = toy_forget_line;
    j->cfg.launch.name = named ? names[number] : NULL;
    j->number = number;
    j->rank = me->w.rank;
}

static int note(struct job *j, int err)
{
    if (err && !j->err) {
        j->err = err;
        snprintf(j->text, sizeof j->text, "%s", zero_last_error());
    }
    return j->err;
}

static int wrap(struct job *j)
{
    return note(j, zero_wrap(&j->z, j->m.table, TOY_TENSORS, &j->cfg));
}

static int step(struct job *j, int i)
{
    int err = FIRST_ERROR(toy_forward(&j->m, j->z, true),
                          toy_backward(&j->m, j->z, true, i + 100 * j->number, j->rank));
    return note(j, err ? err : zero_step(j->z, 1e-2f, NULL));
}

static int finish(struct job *j)
{
    if (!j->err)
        note(j, toy_hash(j->z, 2, &j->hash));
    note(j, zero_unwrap(&j->z));
    toy_free(&j->m);
    return j->err;
}

static void *run_alone(void *arg)
{
    struct job *j = arg;
    wrap(j);
    for (int i = 0; i < STEPS && !j->err; i++)
        step(j, i);
    finish(j);
    return NULL;
}

/* Finds the hash of each job when it runs alone. */
static void find_expected(struct rank *me, uint64_t expected[2])
{
    for (int k = 0; k < 2; k++) {
        struct job j;
        prepare(me, k, false, &j);
        run_alone(&j);
        RANK_CHECK(me, !j.err, "%s", j.text);
        expected[k] = j.hash;
    }
    RANK_CHECK(me, expected[0] != expected[1], "both models end alike");
}

static void check_two(struct rank *me, const char *how, const struct job j[2], const uint64_t expected[2])
{
    for (int k = 0; k < 2; k++) {
        RANK_CHECK(me, !j[k].err, "%s, %s: %s", how, names[k], j[k].text);
        RANK_CHECK(me, j[k].hash == expected[k], "%s: %s was crossed with another model", how, names[k]);
    }
}

static void nest(struct rank *me, const uint64_t expected[2])
{
    struct job j[2];
    for (int k = 0; k < 2; k++) {
        prepare(me, k, true, &j[k]);
        RANK_CHECK(me, wrap(&j[k]) == 0, "%s", j[k].text);
    }
    for (int i = 0; i < STEPS; i++)
        for (int k = 0; k < 2; k++)
            RANK_CHECK(me, step(&j[k], i) == 0, "%s", j[k].text);
    for (int k = 2; k-- > 0;)
        finish(&j[k]);
    check_two(me, "nested", j, expected);
}

/* Each rank starts another job first. */
static void run_threads(struct rank *me, const uint64_t expected[2])
{
    struct job j[2];
    pthread_t thread[2];
    for (int k = 0; k < 2; k++)
        prepare(me, k, true, &j[k]);
    for (int i = 0; i < 2; i++) {
        int k = (i + me->w.rank) % 2;
        RANK_CHECK(me, pthread_create(&thread[k], NULL, run_alone, &j[k]) == 0, "no thread");
    }
    for (int k = 0; k < 2; k++)
        pthread_join(thread[k], NULL);
    check_two(me, "from threads", j, expected);
}

/* Rank 0 has a thread for each job, and the others run them one after the other. Whichever context they start
 * with must open, whichever rank 0 listens for first. */
static void run_mixed(struct rank *me, int first, const uint64_t expected[2])
{
    struct job j[2];
    pthread_t thread[2];
    for (int k = 0; k < 2; k++)
        prepare(me, k, true, &j[k]);
    for (int i = 0; i < 2; i++) {
        int k = (i + first) % 2;
        if (me->w.rank == 0)
            RANK_CHECK(me, pthread_create(&thread[k], NULL, run_alone, &j[k]) == 0, "no thread");
        else
            run_alone(&j[k]);
    }
    for (int k = 0; me->w.rank == 0 && k < 2; k++)
        pthread_join(thread[k], NULL);
    check_two(me, "mixed", j, expected);
}

static void two_at_a_time(struct rank *me)
{
    uint64_t expected[2] = {0};
    alarm(HANG_S);
    find_expected(me, expected);
    if (!me->wrong[0])
        nest(me, expected);
    for (int i = 0; i < 4 && !me->wrong[0]; i++)
        run_threads(me, expected);
    for (int i = 0; i < 2 && !me->wrong[0]; i++)
        run_mixed(me, i, expected);
}

static void test_two_at_a_time(void **state)
{
    bool by_file[] = {false, true};
    toy_make_folder(folder);
    for (int world = 2; world <= 3; world++)
        for (int i = 0; i < 2; i++)
            run_ranks(true, world, two_at_a_time, &by_file[i], NULL);
    toy_remove_folder(folder);
}

/* Each of two ranks wraps another context first. */
static void wrap_in_another_order(struct rank *me)
{
    struct job j;
    alarm(HANG_S);
    prepare(me, me->w.rank, true, &j);
    j.cfg.launch.start_timeout_ms = SOON_MS;
    wrap(&j);
    toy_free(&j.m);
    RANK_CHECK(me, j.err == ZERO_ERR_TIMEOUT, "code %d: %s", j.err, j.text);
    RANK_CHECK(me, strstr(j.text, "cfg.launch.name is \"gen\" on rank 0 and \"disc\" on rank 1"), "%s",
               j.text);
    const char *begins = me->w.rank ? "zero_wrap of \"disc\": " : "zero_wrap of \"gen\": ";
    RANK_CHECK(me, !strncmp(j.text, begins, strlen(begins)), "%s", j.text);
}

static void test_other_order(void **state)
{
    run_ranks(true, 2, wrap_in_another_order, NULL, NULL);
}

/* A second context with the same name is refused, and does not disturb the first. */
static void wrap_the_same_twice(struct rank *me)
{
    struct job first, second;
    alarm(HANG_S);
    prepare(me, 0, false, &first);
    RANK_CHECK(me, wrap(&first) == 0, "%s", first.text);
    prepare(me, 1, false, &second);
    wrap(&second);
    RANK_CHECK(me,
               second.err == ZERO_ERR_ARG && strstr(second.text, "give each context") &&
                   strstr(second.text, "a cfg.launch.name"),
               "code %d: %s", second.err, second.text);
    toy_free(&second.m);
    for (int i = 0; i < STEPS; i++)
        RANK_CHECK(me, step(&first, i) == 0, "%s", first.text);
    RANK_CHECK(me, finish(&first) == 0, "%s", first.text);
    prepare(me, 1, false, &second);
    run_alone(&second);
    RANK_CHECK(me, !second.err, "%s", second.text);
}

/* A failed zero_wrap leaves the name free. */
static void wrap_after_a_failure(struct rank *me)
{
    struct job j;
    alarm(HANG_S);
    prepare(me, 0, true, &j);
    j.m.table[0].shape[0] = -1;
    wrap(&j);
    RANK_CHECK(me, j.err == ZERO_ERR_ARG, "code %d: %s", j.err, j.text);
    toy_free(&j.m);
    prepare(me, 0, true, &j);
    run_alone(&j);
    RANK_CHECK(me, !j.err, "%s", j.text);
}

/* A child does not inherit its parent's contexts. Children of all ranks can meet under a name that is open in
 * their parents. */
static void wrap_in_a_child(struct rank *me)
{
    struct job j;
    int status = -1;
    alarm(HANG_S);
    prepare(me, 0, true, &j);
    RANK_CHECK(me, wrap(&j) == 0, "%s", j.text);
    fflush(NULL);
    pid_t pid = fork();
    if (pid == 0) {
        struct job own;
        alarm(HANG_S);
        prepare(me, 0, true, &own);
        run_alone(&own);
        if (own.err)
            fprintf(stderr, "in the child: %s\n", own.text);
        _exit(own.err != 0);
    }
    waitpid(pid, &status, 0);
    RANK_CHECK(me, status == 0, "the child ended with status 0x%x", (unsigned)status);
    RANK_CHECK(me, step(&j, 0) == 0 && finish(&j) == 0, "%s", j.text);
}

static void test_same_name(void **state)
{
    for (int world = 2; world <= 3; world++) {
        run_ranks(true, world, wrap_the_same_twice, NULL, NULL);
        run_ranks(true, world, wrap_after_a_failure, NULL, NULL);
        run_ranks(true, world, wrap_in_a_child, NULL, NULL);
    }
}

/* ---- both sides of a fork ---- */

/* Forks a rank that a launcher started. Its child has the same rank, and both call zero_wrap. Rank 0's child
 * comes after its parent, and rank 1's child before it, unless the children wait for each other. */
static int wrap_on_both_sides(void)
{
    struct rank me = {.w = {.rank = atoi(getenv("ZERO_RANK")), .world = 2}};
    int ends[2], status = 0;
    struct job j;
    alarm(HANG_S);
    if (pipe(ends))
        return 1;
    const pid_t pid = fork();
    const bool is_first = (pid == 0) == (me.w.rank == 1);
    prepare(&me, 0, false, &j);
    j.cfg.launch.rank = j.cfg.launch.world = 0;
    j.cfg.launch.rendezvous = NULL;
    j.cfg.stage = pid ? 1 : 2; /* a parent that meets a child is an error */
    if (!is_first) {
        close(ends[1]);
        poll(&(struct pollfd){.fd = ends[0], .events = POLLIN}, 1, me.w.rank ? 300 : -1);
    }
    if (wrap(&j) == 0)
        step(&j, 0);
    if (is_first)
        close(ends[1]);
    finish(&j);
    if (j.err)
        fprintf(stderr, "rank %d, %s: %s\n", me.w.rank, pid ? "parent" : "child", j.text);
    if (pid == 0)
        _exit(j.err != 0);
    waitpid(pid, &status, 0);
    return j.err || status;
}

static void test_both_sides(void **state)
{
    pid_t pid[2];
    char text[64];
    snprintf(text, sizeof text, "tcp://127.0.0.1:%d", held_port());
    setenv("ZERO_RENDEZVOUS", text, 1);
    setenv("ZERO_WORLD_SIZE", "2", 1);
    for (int i = 0; i < 2; i++) {
        setenv("ZERO_RANK", i ? "1" : "0", 1);
        fflush(NULL);
        pid[i] = fork();
        if (pid[i] == 0) {
            execl("/proc/self/exe", "test_names", "forked", (char *)NULL);
            _exit(127);
        }
    }
    int status[2] = {-1, -1};
    for (int i = 0; i < 2; i++)
        waitpid(pid[i], &status[i], 0);
    unsetenv("ZERO_RENDEZVOUS");
    unsetenv("ZERO_WORLD_SIZE");
    unsetenv("ZERO_RANK");
    assert_true(status[0] == 0 && status[1] == 0);
}

/* The error names the context. */
static void fail_by_name(struct rank *me)
{
    struct job j;
    alarm(HANG_S);
    prepare(me, 0, true, &j);
    RANK_CHECK(me, wrap(&j) == 0, "%s", j.text);
    for (int i = 0; i < STEPS && me->w.rank == 0 && !j.err; i++)
        step(&j, i);
    RANK_CHECK(me, me->w.rank || strstr(j.text, "rank 0 of \"gen\": "), "code %d: %s", j.err, j.text);
    zero_unwrap(&j.z);
    toy_free(&j.m);
}

/* The error shows a refused name without its control characters. Ranks report the failure under the shown
 * name, so that contexts without a name do not get it. */
static void refuse_a_name(struct rank *me)
{
    struct job j;
    alarm(HANG_S);
    prepare(me, 0, false, &j);
    j.cfg.launch.name = "a\nb";
    j.cfg.launch.start_timeout_ms = SOON_MS;
    wrap(&j);
    toy_free(&j.m);
    RANK_CHECK(me, j.err == ZERO_ERR_ARG, "code %d: %s", j.err, j.text);
    RANK_CHECK(me,
               strstr(j.text, "zero_wrap of \"a\\x0ab\": ") && strstr(j.text, "name is \"a\\x0ab\"; allowed"),
               "%s", j.text);
}

static void test_named_failures(void **state)
{
    run_ranks(true, 2, fail_by_name, NULL, NULL);
    run_ranks(true, 2, refuse_a_name, NULL, NULL);
}

/* A world of one rank meets no other ranks, so its contexts need no names. */
static void wrap_two_alone(struct rank *me)
{
    struct job j[2];
    alarm(HANG_S);
    for (int k = 0; k < 2; k++) {
        prepare(me, k, false, &j[k]);
        RANK_CHECK(me, wrap(&j[k]) == 0, "%s", j[k].text);
    }
    for (int k = 0; k < 2; k++)
        RANK_CHECK(me, step(&j[k], 0) == 0 && finish(&j[k]) == 0, "%s", j[k].text);
}

static void test_alone(void **state)
{
    run_ranks(true, 1, wrap_two_alone, NULL, NULL);
}

int main(int n_args, char **args)
{
    if (n_args == 2 && strcmp(args[1], "forked") == 0)
        return wrap_on_both_sides();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_two_at_a_time),  cmocka_unit_test(test_other_order),
        cmocka_unit_test(test_same_name),      cmocka_unit_test(test_alone),
        cmocka_unit_test(test_named_failures), cmocka_unit_test(test_both_sides),
    };
    return cmocka_run_group_tests(tests, NULL, toy_remove_folders);
}
