/* SPDX-License-Identifier: Apache-2.0 */
/* test_blame.c: one of four processes hangs, is stopped or is killed in the middle of training. The others
 * end in different ways as soon as a call fails. Every message must name the rank that caused the failure.
 *
 * ZERO_TEST_SEED repeats a run, N_CASES is the number of trainings, and VERBOSE=1 prints the messages. */
#include "test/cmocka.h"
#include "test/comm/ranks.h"
#include "test/zero/toy_net.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { WORLD = 4, CASES = 24, TIMEOUT_MS = 700 };
enum kind { STILL, STOPPED, KILLED, KINDS };
enum way { UNWRAPS, EXITS, ENDS_AT_ONCE, WAYS };

static const char *const kind_name[] = {"stands still", "is stopped", "is killed"};

/* One training, in memory that its ranks share. */
struct training {
    enum kind kind;
    enum way way[WORLD];
    int stage, tp, guilty, step;
    bool in_backward;
    _Atomic int pid, n_noted;
};

static struct training *now;

static void turn_guilty(void)
{
    atomic_store(&now->pid, getpid());
    if (now->kind != STILL)
        raise(now->kind == STOPPED ? SIGSTOP : SIGKILL);
    while (atomic_load(&now->n_noted) < WORLD - 1)
        sleep_ms(5);
    _exit(0);
}

static int train(struct rank *me, zero_ctx *z, struct toy *m)
{
    float x[8] = {0};
    for (int step = 1;; step++) {
        bool is_moment = me->w.rank == now->guilty && step == now->step;
        int err = toy_forward(m, z, true);
        if (!err && is_moment && !now->in_backward)
            turn_guilty();
        if (!err && now->tp > 1)
            err = zero_all_reduce(z, ZERO_AXIS_TP, x, x, 8, ZERO_F32, ZERO_SUM);
        if (!err)
            err = toy_backward(m, z, true, step, me->w.rank / now->tp);
        if (!err && is_moment)
            turn_guilty();
        if (!err)
            err = zero_step(z, 1e-2f, NULL);
        if (err)
            return err;
    }
}

/* Ends the rank. The last one that saw the error also kills the stopped rank. */
static void leave(struct rank *me, zero_ctx **z)
{
    if (atomic_fetch_add(&now->n_noted, 1) == WORLD - 2 && now->kind == STOPPED)
        kill(atomic_load(&now->pid), SIGKILL);
    if (now->way[me->w.rank] == ENDS_AT_ONCE)
        _exit(0);
    if (now->way[me->w.rank] == EXITS)
        exit(0);
    zero_unwrap(z);
}

static void live(struct rank *me)
{
    struct toy_rank r = {.rank = me->w.rank, .world = me->w.world};
    struct toy m;
    zero_ctx *z = NULL;
    snprintf(r.url, sizeof r.url, "tcp://127.0.0.1:%d", me->w.port);
    struct zero_config cfg = toy_config(&r, now->stage);
    cfg.launch.timeout_ms = now->kind == KILLED ? 60000 : TIMEOUT_MS;
    cfg.launch.start_timeout_ms = 60000;
    toy_make(&m);
    if (now->tp > 1)
        cfg.mesh.tp = now->tp;
    /* another rank may be a step ahead and fail already */
    int err = zero_wrap(&z, m.table, TOY_TENSORS, &cfg);
    note_error(me, err ? err : train(me, z, &m));
    leave(me, &z);
    toy_free(&m);
}

static void one_dies(struct rank *r)
{
    r->dies = r->w.rank == now->guilty && now->kind != STILL;
}

static uint64_t state;

static int draw(int n)
{
    return (int)random_in(&state, 0, n - 1);
}

/* Whether the message blames the guilty rank, and no other. */
static bool is_right(const char *text)
{
    char named[32], stopped[48], lost[32], left[32];
    snprintf(named, sizeof named, "rank %d", now->guilty);
    snprintf(stopped, sizeof stopped, "rank %d is stopped", now->guilty);
    bool right = strstr(text, named) && (now->kind == STOPPED) == (strstr(text, stopped) != NULL);
    for (int r = 0; r < WORLD && right; r++) {
        snprintf(lost, sizeof lost, "rank %d was lost", r);
        snprintf(left, sizeof left, "rank %d has closed", r);
        right = (r == now->guilty && now->kind == KILLED) || (!strstr(text, lost) && !strstr(text, left));
    }
    return right;
}

static void test_the_first_cause_is_named(void **arg)
{
    const char *given = getenv("N_CASES");
    int n = given ? atoi(given) : CASES, n_wrong = 0, n_said = 0;
    state = fresh_seed("blame");
    for (int i = 0; i < n; i++) {
        *now = (struct training){.kind = (enum kind)(i % KINDS),
                                 .stage = draw(TOY_STAGES),
                                 .guilty = draw(WORLD),
                                 .step = 1 + draw(3),
                                 .in_backward = draw(2)};
        now->tp = now->stage <= 3 && draw(2) ? 2 : 1;
        for (int r = 0; r < WORLD; r++)
            now->way[r] = (enum way)draw(WAYS);
        struct rank *ranks = run_ranks(true, WORLD, live, NULL, one_dies);
        for (int r = 0; r < WORLD; r++) {
            if (r == now->guilty)
                continue;
            n_said++;
            bool wrong = !ranks[r].code || !is_right(ranks[r].note);
            n_wrong += wrong;
            if (wrong || getenv("VERBOSE"))
                printf("%s: stage %d, tp %d, rank %d %s; rank %d, code %d: %s\n", wrong ? "WRONG" : "right",
                       now->stage, now->tp, now->guilty, kind_name[now->kind], r, ranks[r].code,
                       ranks[r].note);
        }
    }
    printf("%d of %d messages are wrong\n", n_wrong, n_said);
    assert_int_equal(n_wrong, 0);
}

int main(void)
{
    now = mmap(NULL, sizeof *now, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (now == MAP_FAILED)
        return 1;
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_the_first_cause_is_named)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
