/* SPDX-License-Identifier: Apache-2.0 */
/* test_faults.c: faults of one rank: it dies, stops, runs out of memory, or makes a different call. Every
 * rank soon gets an error that names the rank and the cause. Later calls give the same error, and zero_unwrap
 * leaves nothing behind. Time limits only tell an answer from a hang. */
#include "test/cmocka.h"
#include "test/first_error.h"
#include "test/zero/toy_net.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { SOON_MS = 15000, LONG_MS = 30000, SHORT_MS = 2000, HANG_MS = 120000 };

static bool verbose; /* VERBOSE=1: prints messages and their delays */

static void sleep_ms(int ms)
{
    nanosleep(&(struct timespec){.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000}, NULL);
}

static void report(const char *what, int stage, const struct toy_rank *r)
{
    for (int k = 0; verbose && k < r[0].world; k++)
        printf("%-24s stage %d rank %d of %d: %4d %5lld ms  %.200s\n", what, stage, k, r[0].world, r[k].err,
               (long long)r[k].ms, r[k].err ? r[k].text : "");
}

/* Checks that every call on a failed context gives the cause, and that zero_unwrap leaves nothing behind. */
static void check_failed(struct toy_rank *r, struct toy *m, zero_ctx *z, struct toy_holdings before)
{
    float x = 0;
    double d = 0;
    struct zero_step_info info;
    struct zero_stats stats;
#define SAME_CAUSE(call)                                                                                     \
    do {                                                                                                     \
        int same_err = (call);                                                                               \
        if (same_err != r->err || strcmp(zero_last_error(), r->text))                                        \
            toy_wrong(r, "%s: %d %.300s", #call, same_err, zero_last_error());                               \
    } while (0)
    SAME_CAUSE(zero_begin(z, 0, ZERO_FORWARD));
    SAME_CAUSE(zero_begin(z, -1, ZERO_FORWARD));
    SAME_CAUSE(zero_end(z, 3, ZERO_BACKWARD));
    SAME_CAUSE(zero_micro(z));
    SAME_CAUSE(zero_step(z, 1e-2f, NULL));
    SAME_CAUSE(zero_step(z, 1e-2f, &info));
    SAME_CAUSE(zero_read(z, 0, 0, 0, 1, &x));
    SAME_CAUSE(zero_read(z, 77, 0, 0, 1, &x));
    SAME_CAUSE(zero_write(z, 0, 0, 0, 1, &x));
    SAME_CAUSE(zero_mean(z, &d, 1));
    if (zero_get_stats(z, &stats) || stats.place.rank != r->rank || stats.place.world != r->world)
        toy_wrong(r, "zero_stats: %s", zero_last_error());
    SAME_CAUSE(zero_unwrap(&z));
#undef SAME_CAUSE
    if (z)
        toy_wrong(r, "zero_unwrap left the context");
    for (int t = 0; t < TOY_TENSORS; t++)
        if (m->param[t] || m->grad[t])
            toy_wrong(r, "zero_unwrap left a pointer");
    if (before.n_fds)
        toy_check_nothing_left(r, before);
}

/* ---- ranks that are processes ---- */

extern int __lsan_do_recoverable_leak_check(void) __attribute__((weak));

static struct toy_rank *shared;  /* memory shared by all processes */
static _Atomic int64_t *died_ms; /* when the victim was about to die; shared too */

/* Forks the ranks. If kill_after_us is 0 or more, kills the victim after that time. Kills a stopped victim
 * once the others have ended. */
static void run_processes(int world, void (*fn)(struct toy_rank *r), void *arg, int victim, int kill_after_us)
{
    pid_t pid[MAX_TOY_RANKS];
    toy_set_ranks(world, arg, shared);
    atomic_store(died_ms, 0);
    fflush(stdout);
    fflush(stderr);
    for (int i = 0; i < world; i++) {
        pid[i] = fork();
        assert_true(pid[i] >= 0);
        if (pid[i] == 0) {
            fn(&shared[i]);
            if (__lsan_do_recoverable_leak_check && __lsan_do_recoverable_leak_check())
                toy_wrong(&shared[i], "memory was left");
            _exit(0);
        }
    }
    if (kill_after_us >= 0) {
        nanosleep(&(struct timespec){.tv_nsec = kill_after_us * 1000L}, NULL);
        atomic_store(died_ms, toy_now_ms());
        kill(pid[victim], SIGKILL);
    }
    int64_t until = toy_now_ms() + HANG_MS;
    for (int left = world, i = 0; left; i = (i + 1) % world) {
        int status, is_late = toy_now_ms() > until;
        bool only_victim = left == 1 && i == victim && pid[i] > 0;
        if (is_late || only_victim)
            for (int k = 0; k < world; k++)
                if (pid[k] > 0)
                    kill(pid[k], SIGKILL);
        if (pid[i] > 0 && waitpid(pid[i], &status, WNOHANG) == pid[i]) {
            pid[i] = 0;
            left--;
            bool killed = WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
            if (is_late)
                toy_wrong(&shared[i], "it hung");
            else if (i == victim ? !killed : status != 0)
                toy_wrong(&shared[i], "it ended with status 0x%x", (unsigned)status);
        }
        if (i == 0)
            sleep_ms(2);
    }
}

enum point {
    BEFORE_MEETING,
    AFTER_WRAP,
    IN_FORWARD,
    IN_BACKWARD,
    BEFORE_STEP,
    IN_UPDATE,
    AFTER_STEP,
    BEFORE_READ,
    BEFORE_UNWRAP,
    N_POINTS,
    NOWHERE
};

static const char *const point_names[] = {"before meeting", "after wrap",  "in forward",
                                          "in backward",    "before step", "in update",
                                          "after step",     "before read", "before unwrap"};

struct death {
    int stage, victim, signal, world;
    enum point at;
    int timeout_ms, start_timeout_ms; /* start_timeout_ms 0: timeout_ms */
};

struct actor {
    struct toy_rank *r;
    const struct death *d;
    int n_lines;
};

static void die_at(struct actor *a, enum point here)
{
    if (a->r->rank != a->d->victim || a->d->at != here)
        return;
    atomic_store(died_ms, toy_now_ms());
    raise(a->d->signal);
}

static void on_log(void *arg, const char *line)
{
    struct actor *a = arg;
    die_at(a, a->n_lines++ ? AFTER_WRAP : BEFORE_MEETING);
}

static int sgd(void *arg, const struct zero_update *u)
{
    if (u->t == 2)
        die_at(arg, IN_UPDATE);
    for (int64_t i = 0; i < u->n; i++)
        u->master[i] -= u->lr * u->grad[i];
    return 0;
}

static int pass_with_death(struct actor *a, struct toy *m, zero_ctx *z, enum zero_phase phase, int step)
{
    int err = 0;
    for (int i = 0; !err && i < TOY_UNITS; i++) {
        int u = phase == ZERO_FORWARD ? i : TOY_UNITS - 1 - i;
        err = zero_begin(z, u, phase);
        if (!err && phase == ZERO_BACKWARD)
            toy_add_gradient(m, u, step, a->r->rank);
        if (step == 1 && i == 2)
            die_at(a, phase == ZERO_FORWARD ? IN_FORWARD : IN_BACKWARD);
        if (!err)
            err = zero_end(z, u, phase);
    }
    return err;
}

/* Pointers and hashes of the weights that the model can read outside brackets. */
struct seen_weights {
    int step; /* the step after whose forward they were recorded; -1: none */
    const void *at[TOY_TENSORS];
    uint64_t hash[TOY_TENSORS];
};

static void see_weights(const struct toy *m, struct seen_weights *seen)
{
    for (int t = 0; t < TOY_TENSORS; t++) {
        int64_t n = toy_elems(t) * (m->table[t].dtype == ZERO_F32 ? 4 : 2);
        seen->at[t] = m->param[t];
        seen->hash[t] = 0xcbf29ce484222325u;
        for (int64_t i = 0; seen->at[t] && i < n; i++)
            seen->hash[t] = (seen->hash[t] ^ ((const unsigned char *)seen->at[t])[i]) * 0x100000001b3u;
    }
}

/* Checks that a step that some ranks did not make leaves the weights unchanged, also after its last
 * operations. At stage 3 there is nothing to check, because weights are gathered for brackets only. */
static void check_weights(struct toy_rank *r, const struct death *d, const struct toy *m,
                          const struct seen_weights *before, int step)
{
    struct seen_weights now;
    if (before->step != step) /* the step failed in forward, before its weights were recorded */
        return;
    if (d->stage >= 3 || (d->at != IN_BACKWARD && d->at != BEFORE_STEP))
        return;
    sleep_ms(50);
    see_weights(m, &now);
    for (int t = 0; t < TOY_TENSORS; t++)
        if (now.at[t] && now.at[t] == before->at[t] && now.hash[t] != before->hash[t])
            toy_wrong(r, "a step that failed has changed the weights of tensor %d", t);
}

/* Trains until a call fails, and forever if none does. */
static void train_until_death(struct toy_rank *r)
{
    const struct death *d = r->arg;
    struct actor a = {r, d, 0};
    struct toy_holdings before = toy_holdings();
    struct toy m;
    zero_ctx *z;
    struct zero_config cfg = toy_config(r, d->stage);
    cfg.launch.timeout_ms = d->timeout_ms;
    cfg.launch.start_timeout_ms = d->start_timeout_ms ? d->start_timeout_ms : d->timeout_ms;
    cfg.debug.log = on_log;
    cfg.debug.log_arg = &a;
    if (d->at == IN_UPDATE) {
        cfg.optim.update = sgd;
        cfg.optim.weight_decay = 0;
        cfg.optim.update_arg = &a;
    }
    int err = toy_open(r, &m, &z, &cfg);
    if (err && (z || !toy_untouched(&m)))
        toy_wrong(r, "a failed zero_wrap changed something");
    bool in_unwrap = false;
    struct seen_weights weights = {.step = -1};
    int at_step = 0;
    for (int step = 0; !err; step++) {
        at_step = step;
        err = pass_with_death(&a, &m, z, ZERO_FORWARD, step);
        if (!err)
            see_weights(&m, &weights), weights.step = step;
        if (!err)
            err = pass_with_death(&a, &m, z, ZERO_BACKWARD, step);
        if (err)
            break;
        if (step == 1)
            die_at(&a, BEFORE_STEP);
        err = zero_step(z, 1e-2f, NULL);
        if (step == 1)
            die_at(&a, AFTER_STEP);
        if (!err && step == 1 && d->at == BEFORE_READ) {
            uint64_t hash;
            die_at(&a, BEFORE_READ);
            err = toy_hash(z, 2, &hash);
        }
        if (!err && step == 1 && d->at == BEFORE_UNWRAP) {
            die_at(&a, BEFORE_UNWRAP);
            err = zero_unwrap(&z);
            in_unwrap = true;
            if (!err)
                toy_wrong(r, "zero_unwrap did not notice");
            break;
        }
    }
    toy_note(r, err);
    r->ms = toy_now_ms() - atomic_load(died_ms);
    if (z) {
        check_weights(r, d, &m, &weights, at_step);
        check_failed(r, &m, z, before);
    } else {
        toy_check_nothing_left(r, before);
        for (int t = 0; in_unwrap && t < TOY_TENSORS; t++)
            if (m.param[t] || m.grad[t])
                toy_wrong(r, "zero_unwrap left a pointer");
    }
    toy_free(&m);
}

/* alone_code: allowed for a rank that came after rank 0 had given up, and so knows no other cause; 0:
 * none. */
static void assert_survivors(const char *what, const struct death *d, int code, int alone_code,
                             bool names_operation)
{
    char name[16];
    snprintf(name, sizeof name, "rank %d", d->victim);
    report(what, d->stage, shared);
    for (int k = 0; k < d->world; k++) {
        const struct toy_rank *r = &shared[k];
        if (k == d->victim) {
            if (r->wrong[0])
                fail_msg("%s: the victim: %s", what, r->wrong);
            continue;
        }
        /* After zero_wrap the message names an operation. */
        bool reported =
            r->err == code && strstr(r->text, name) && (!names_operation || strstr(r->text, " seq "));
        bool alone =
            alone_code && r->err == alone_code && (strstr(r->text, name) || strstr(r->text, "for rank 0"));
        if (r->wrong[0] || !(reported || alone) || r->ms > SOON_MS)
            fail_msg("%s: stage %d world %d victim %d, rank %d: code %d after %lld ms: \"%s\"; %s", what,
                     d->stage, d->world, d->victim, k, r->err, (long long)r->ms, r->text, r->wrong);
    }
}

static void killed_at_each_point(void **state)
{
    for (int at = 0; at < N_POINTS; at++)
        for (int stage = 0; stage <= 3; stage++) {
            struct death d = {.stage = stage, .world = 3, .signal = SIGKILL, .at = at, .timeout_ms = LONG_MS};
            d.victim = (at + stage) % 3;
            if (at == BEFORE_MEETING) { /* no rank knows the victim yet, so only a timeout finds it */
                if (stage % 3)
                    continue;
                d.start_timeout_ms = SHORT_MS;
            }
            run_processes(3, train_until_death, &d, d.victim, -1);
            assert_survivors(point_names[at], &d, at == BEFORE_MEETING ? ZERO_ERR_TIMEOUT : ZERO_ERR_PEER, 0,
                             at > BEFORE_MEETING);
        }
}

/* Kills a rank of one of two groups. The other group gets the error as soon, and as complete. With HFSDP rank
 * 3 owns no part of the model, so its update is never called. */
static void killed_in_a_group(void **state)
{
    for (int at = AFTER_WRAP; at < N_POINTS; at++)
        for (int stage = TOY_HSDP; stage <= TOY_HFSDP; stage++) {
            struct death d = {.stage = stage, .world = 4, .signal = SIGKILL, .at = at, .timeout_ms = LONG_MS};
            d.victim = at == IN_UPDATE ? 2 : (at + stage) % 4;
            run_processes(4, train_until_death, &d, d.victim, -1);
            assert_survivors(point_names[at], &d, ZERO_ERR_PEER, 0, true);
        }
}

static uint64_t seed;

static void killed_at_any_time(void **state)
{
    uint64_t s = seed;
    for (int i = 0; i < 10; i++) {
        s = s * 6364136223846793005u + 1442695040888963407u;
        struct death d = {.stage = (int)(s >> 33 & 3),
                          .world = 2 + (int)(s >> 40 & 1),
                          .at = NOWHERE,
                          .timeout_ms = SHORT_MS};
        d.victim = (int)(s >> 45) % d.world;
        run_processes(d.world, train_until_death, &d, d.victim, 10000 + (int)((s >> 50) % 40000));
        assert_survivors("killed at any time", &d, ZERO_ERR_PEER, ZERO_ERR_TIMEOUT, false);
    }
}

static void stopped(void **state)
{
    for (int stage = 0; stage <= 3; stage += 3) {
        int at = stage ? BEFORE_UNWRAP : IN_FORWARD;
        struct death d = {.stage = stage,
                          .world = 3,
                          .victim = stage ? 0 : 2,
                          .signal = SIGSTOP,
                          .at = at,
                          .timeout_ms = SHORT_MS};
        run_processes(3, train_until_death, &d, d.victim, -1);
        assert_survivors("stopped", &d, ZERO_ERR_TIMEOUT, 0, true);
    }
}

/* Stops a rank of one of two groups. Some ranks then wait for the stopped rank, and others for a waiting
 * rank. The first rank to find the cause reports it to all. */
static void stopped_in_a_group(void **state)
{
    static const enum point points[] = {IN_FORWARD, IN_BACKWARD, AFTER_STEP};
    for (int i = 0; i < 2 * (int)(sizeof points / sizeof *points); i++) {
        struct death d = {.stage = TOY_HSDP + i % 2,
                          .world = 4,
                          .victim = i % 4,
                          .signal = SIGSTOP,
                          .at = points[i / 2],
                          .timeout_ms = SHORT_MS};
        run_processes(4, train_until_death, &d, d.victim, -1);
        assert_survivors("stopped in a group", &d, ZERO_ERR_TIMEOUT, 0, true);
    }
}

/* Fails on one rank for a reason that only its process can know: an unreadable configuration, or no
 * memory. */
static void illegible(struct toy_rank *r)
{
    struct toy m;
    zero_ctx *z = NULL;
    struct zero_config cfg = ZERO_CONFIG_INIT;
    char text[16];
    toy_make(&m);
    snprintf(text, sizeof text, "%d", r->rank);
    setenv("ZERO_RANK", text, 1);
    snprintf(text, sizeof text, "%d", r->world);
    setenv("ZERO_WORLD_SIZE", text, 1);
    setenv("ZERO_RENDEZVOUS", r->url, 1);
    int64_t from = toy_now_ms();
    if (r->rank == r->world - 1) {
        if (*(int *)r->arg)
            setenv("ZERO_FAIL_ALLOC", "7", 1);
        else
            memset(&cfg, 0, sizeof cfg);
    }
    toy_note(r, zero_wrap(&z, m.table, TOY_TENSORS, &cfg));
    r->ms = toy_now_ms() - from;
    if (z || !toy_untouched(&m))
        toy_wrong(r, "something was changed");
    toy_free(&m);
}

static void found_in_the_environment(void **state)
{
    for (int memory = 0; memory <= 1; memory++) {
        run_processes(3, illegible, &memory, -1, -1);
        report(memory ? "no memory on one" : "illegible configuration", 0, shared);
        for (int k = 0; k < 3; k++) {
            const struct toy_rank *r = &shared[k];
            if (r->wrong[0] || r->err != (memory ? ZERO_ERR_NOMEM : ZERO_ERR_ARG) || r->ms > SOON_MS ||
                (k < 2 && !strstr(r->text, "rank 2")) ||
                !strstr(r->text, memory ? "no memory" : "ZERO_CONFIG_INIT"))
                fail_msg("rank %d: code %d after %lld ms \"%s\"; %s", k, r->err, (long long)r->ms, r->text,
                         r->wrong);
        }
    }
}

static int train_step(struct toy *m, zero_ctx *z, int step, int rank)
{
    return FIRST_ERROR(toy_forward(m, z, true), toy_backward(m, z, true, step, rank),
                       zero_step(z, 1e-2f, NULL));
}

/* An environment variable that differs in one process of a run with groups. */
struct override {
    const char *variable, *value;
    int stage, code; /* code 0: the difference is allowed */
    const char *says;
};

static void overridden(struct toy_rank *r)
{
    const struct override *o = r->arg;
    struct toy m;
    zero_ctx *z = NULL;
    struct zero_config cfg = toy_config(r, o->stage);
    toy_make(&m);
    if (r->rank == r->world - 1)
        setenv(o->variable, o->value, 1);
    int err = zero_wrap(&z, m.table, TOY_TENSORS, &cfg);
    if (err && (z || !toy_untouched(&m)))
        toy_wrong(r, "something was changed");
    if (!err)
        err = train_step(&m, z, 0, r->rank);
    toy_note(r, err);
    zero_unwrap(&z);
    toy_free(&m);
}

static void overridden_on_one_rank(void **state)
{
    const struct override all[] = {
        {"ZERO_HYBRID", "none", TOY_HSDP, ZERO_ERR_ARG, "ZERO_HYBRID is \"none\"; allowed: hsdp (0), hfsdp"},
        {"ZERO_DP_REPLICATE", "1", TOY_HSDP, ZERO_ERR_MISMATCH,
         "dp_replicate is 1 on rank 3 and 2 on rank 0"},
        {"ZERO_TP", "2", TOY_HSDP, ZERO_ERR_MISMATCH, "tp is 2 on rank 3 and 1 on rank 0"},
        {"ZERO_HYBRID", "hfsdp", TOY_HSDP, ZERO_ERR_MISMATCH, "hybrid is hfsdp on rank 3 and hsdp on rank 0"},
        {"ZERO_DP_REPLICATE", "4", TOY_HFSDP, ZERO_ERR_MISMATCH,
         "dp_replicate is 4 on rank 3 and 2 on rank 0"},
        {"ZERO_DP_REPLICATE", "3", TOY_HFSDP, ZERO_ERR_ARG, "do not divide the world of 4 ranks"},
        {"ZERO_DP_REPLICATE", "auto", TOY_HSDP, ZERO_ERR_MISMATCH, "dp_replicate is 1 on rank 3"},
        {"ZERO_DP_REPLICATE", "two", TOY_HSDP, ZERO_ERR_ARG, "ZERO_DP_REPLICATE is \"two\""},
        {"ZERO_STAGE", "2", TOY_HSDP, ZERO_ERR_MISMATCH, "stage is 2 on rank 3 and 3 on rank 0"},
        {"ZERO_CHECK", "1", TOY_HSDP, ZERO_ERR_MISMATCH, "check is 1 on rank 3 and 0 on rank 0"},
        {"ZERO_CHECK", "1", TOY_HFSDP, ZERO_ERR_MISMATCH, "check is 1 on rank 3 and 0 on rank 0"},
        {"ZERO_CHECK", "1", 3, ZERO_ERR_MISMATCH, "check is 1 on rank 3 and 0 on rank 0"},
        {"ZERO_CHECK", "1", 2, 0, ""},
        {"ZERO_TIMEOUT_MS", "60000", TOY_HFSDP, 0, ""},
    };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        struct override o = all[i];
        run_processes(4, overridden, &o, -1, -1);
        report(o.variable, o.stage, shared);
        for (int k = 0; k < 4; k++) {
            const struct toy_rank *r = &shared[k];
            bool named = !o.code || k == 3 || strstr(r->text, "rank 3");
            if (r->wrong[0] || r->err != o.code || !named || (o.code && !strstr(r->text, o.says)))
                fail_msg("%s=%s, rank %d: code %d \"%s\"; %s", o.variable, o.value, k, r->err, r->text,
                         r->wrong);
        }
    }
}

/* ---- ranks that disagree about what is wrapped ---- */

struct wrapping {
    struct toy m;
    struct zero_config cfg;
    int32_t n;
};

struct disagreement {
    const char *what;
    void (*spoil)(struct wrapping *w);
    int code;
    const char *said[2];
    /* the rank that differs waits for one more rank */
    bool other_world;
};

static const struct disagreement *disagreements[32];
static int n_disagreements;

/* One row: its name, the statement that spoils *w on one rank, the error of all ranks, and two parts of its
 * text. The row adds itself to disagreements[] before main(). */
#define DISAGREE(...)                  DISAGREE_NUMBERED(__COUNTER__, __VA_ARGS__)
#define DISAGREE_NUMBERED(number, ...) DISAGREE_ROW(number, __VA_ARGS__)
#define DISAGREE_ROW(number, what, statement, code, ...)                                                     \
    static void spoil_##number(struct wrapping *w)                                                           \
    {                                                                                                        \
        statement;                                                                                           \
    }                                                                                                        \
    __attribute__((constructor)) static void add_##number(void)                                              \
    {                                                                                                        \
        static const struct disagreement row = {what, spoil_##number, ZERO_ERR_##code, __VA_ARGS__};         \
        disagreements[n_disagreements++] = &row;                                                             \
    }

static void other_order(struct wrapping *w)
{
    struct zero_tensor t = w->m.table[0];
    w->m.table[0] = w->m.table[1];
    w->m.table[1] = t;
}

static int own_update(void *arg, const struct zero_update *u)
{
    return 0;
}

static void other_calls(struct wrapping *w)
{
    static const struct zero_call order[] = {{0, ZERO_FORWARD, 0}, {0, ZERO_FORWARD, 1}};
    w->cfg.memory.order = order;
    w->cfg.memory.n_order = 2;
}

DISAGREE("other stage", w->cfg.stage = 2, MISMATCH, {"stage is 2 on rank", "and 3 on rank 0"})
DISAGREE("other dtype", w->m.table[0].dtype = ZERO_BF16, MISMATCH, {"tensors[0]", "embedding"})
DISAGREE("other shape", w->m.table[4].shape[0] = 200, MISMATCH, {"tensors[4]", "head"})
DISAGREE("same size, other shape", (w->m.table[0].shape[0] = 5, w->m.table[0].shape[1] = 33), MISMATCH,
         {"tensors[0]", "shape"})
DISAGREE("fewer tensors", (w->m.table[3] = w->m.table[4], w->m.table[3].unit = 3, w->n = 4), MISMATCH,
         {"n_tensors is 4 on rank", "and 5 on rank 0"})
DISAGREE("other order", other_order(w), MISMATCH, {"tensors[0]", "name"})
DISAGREE("other name", w->m.table[2].name = "beans", MISMATCH, {"tensors[2]", "name"})
DISAGREE("other flags", w->m.table[2].flags = 0, MISMATCH, {"tensors[2]", "flags"})
DISAGREE("other frozen", w->m.table[2].grad = NULL, MISMATCH, {"tensors[2]", "gradient"})
DISAGREE("other unit", w->m.table[2].unit = 2, MISMATCH, {"tensors[2]", "unit"})
DISAGREE("other prefetch", w->cfg.memory.prefetch = 1, MISMATCH, {"prefetch is 1 on rank", "and 2 on rank 0"})
DISAGREE("other clip", w->cfg.clip = 0.25f, MISMATCH, {"clip is 0.25 on rank", "and 0 on rank 0"})
DISAGREE("other accumulation", w->cfg.grad_accum_steps = 4, MISMATCH,
         {"grad_accum_steps is 4 on rank", "and 1 on rank 0"})
DISAGREE("other wire dtype", w->cfg.memory.wire_dtype = ZERO_BF16, MISMATCH,
         {"wire_dtype is bf16 on rank", "and 0 on rank 0"})
DISAGREE("other optimizer", w->cfg.optim.optimizer = ZERO_RMSPROP, MISMATCH,
         {"optimizer is rmsprop on rank", "and adamw on rank 0"})
DISAGREE("update of its own", (w->cfg.optim.update = own_update, w->cfg.optim.weight_decay = 0), MISMATCH,
         {"optimizer is optim.update on rank", "and adamw on rank 0"})
DISAGREE("other decay", w->cfg.optim.weight_decay = 0.2f, MISMATCH, {"weight_decay is 0.2", "and 0.1"})
DISAGREE("other calls", other_calls(w), MISMATCH, {"n_order is 2 on rank", "on rank 0"})
DISAGREE("other world", w->cfg.launch.world++, MISMATCH, {"has world", "rank 0 has world"},
         .other_world = true)
DISAGREE("invalid stage", w->cfg.stage = 4, ARG, {"stage is 4", "0, 1, 2, 3"})
DISAGREE("invalid tensor", w->m.table[2].name = NULL, ARG, {"tensors[2]", "name is NULL"})
DISAGREE("invalid unit", w->m.table[4].unit = 9, ARG, {"unit 3 has no tensor", "without gaps"})
DISAGREE("invalid backend", w->cfg.launch.backend = ZERO_BACKEND_SELF, ARG, {"backend is self", "auto, shm"})
DISAGREE("invalid budget", w->cfg.memory.param_budget_bytes = 100, BUDGET,
         {"param_budget_bytes is 100", "alone needs"})
DISAGREE("too large",
         (w->m.table[4].shape[0] = INT64_C(1) << 46, w->m.param[4] = (void *)((uintptr_t)1 << 60)), MISMATCH,
         {"tensors[4]", "differ in its"})

struct wrap_case {
    const struct disagreement *of;
    int odd;
};

static void wrap_differently(struct toy_rank *r)
{
    const struct wrap_case *c = r->arg;
    struct wrapping w = {.n = TOY_TENSORS};
    zero_ctx *z = (zero_ctx *)&w;
    toy_make(&w.m);
    w.cfg = toy_config(r, 3);
    if (r->rank == c->odd)
        c->of->spoil(&w);
    void *param[TOY_TENSORS];
    memcpy(param, w.m.param, sizeof param);
    int64_t from = toy_now_ms();
    toy_note(r, zero_wrap(&z, w.m.table, w.n, &w.cfg));
    r->ms = toy_now_ms() - from;
    bool same = !memcmp(param, w.m.param, sizeof param);
    for (int t = 0; t < TOY_TENSORS; t++)
        same &= !w.m.grad[t];
    if (z || !same)
        toy_wrong(r, "something was changed");
    toy_free(&w.m);
}

static void ranks_disagree(void **state)
{
    struct toy_holdings before = toy_holdings();
    for (int i = 0; i < n_disagreements; i++)
        for (int world = 2; world <= 3; world++) {
            struct wrap_case c = {disagreements[i], world - 1};
            struct toy_rank r[3];
            if (c.of->other_world && world > 2)
                continue; /* rank 0 gives up at once, and a later rank would wait for it in vain */
            char odd[16];
            toy_ranks(world, wrap_differently, &c, r);
            report(c.of->what, 3, r);
            snprintf(odd, sizeof odd, "rank %d", c.odd);
            /* the message need not name the rank that differs on that rank itself */
            for (int k = 0; k < world; k++)
                if (r[k].wrong[0] || r[k].err != c.of->code || !strstr(r[k].text, c.of->said[0]) ||
                    !strstr(r[k].text, c.of->said[1]) || (k != c.odd && !strstr(r[k].text, odd)) ||
                    r[k].ms > SOON_MS)
                    fail_msg("%s: world %d rank %d: code %d after %lld ms \"%s\"; %s", c.of->what, world, k,
                             r[k].err, (long long)r[k].ms, r[k].text, r[k].wrong);
        }
    toy_assert_nothing_left(before);
}

/* The same with rank 0 as the rank that differs; the others are compared with it. */
static void rank_0_is_wrong(void **state)
{
    for (int i = 0; i < n_disagreements; i++) {
        struct wrap_case c = {disagreements[i], 0};
        struct toy_rank r[2];
        if (c.of->other_world) /* the other rank would never come */
            continue;
        toy_ranks(2, wrap_differently, &c, r);
        for (int k = 0; k < 2; k++)
            if (r[k].wrong[0] || r[k].err != c.of->code || (k > 0 && !strstr(r[k].text, "rank 0")) ||
                r[k].ms > SOON_MS)
                fail_msg("%s: rank %d: code %d after %lld ms \"%s\"; %s", c.of->what, k, r[k].err,
                         (long long)r[k].ms, r[k].text, r[k].wrong);
    }
}

/* ---- ranks that call differently ---- */

enum difference {
    OTHER_UNIT,
    LEFT_OUT,
    STEP_EARLY,
    STEP_REFUSED,
    READ_FOR_MEAN,
    READ_OTHER_RANGE,
    READ_OTHER_TENSOR,
    READ_OTHER_VALUE,
    READ_FOR_WRITE,
    MEAN_OF_FEWER,
    UNWRAP_FOR_MEAN,
    OTHER_LR,
    EARLY_UNWRAP,
    MEAN_ALONE,
    SILENT,
    N_DIFFERENCES
};

static const char *const difference_names[] = {
    [OTHER_UNIT] = "begins another unit",
    [LEFT_OUT] = "leaves a backward out",
    [STEP_EARLY] = "steps early",
    [STEP_REFUSED] = "gives up when refused",
    [READ_FOR_MEAN] = "reads for mean",
    [READ_OTHER_RANGE] = "reads another range",
    [READ_OTHER_TENSOR] = "reads another tensor",
    [READ_OTHER_VALUE] = "reads another value",
    [READ_FOR_WRITE] = "reads for write",
    [MEAN_OF_FEWER] = "means fewer",
    [UNWRAP_FOR_MEAN] = "unwraps for mean",
    [OTHER_LR] = "another lr",
    [EARLY_UNWRAP] = "unwraps early",
    [MEAN_ALONE] = "means while others go on",
    [SILENT] = "says nothing",
};

/* What the differing rank called, and what the others called instead, as in every rank's message. */
static const char *const called[N_DIFFERENCES][2] = {
    [OTHER_UNIT] = {"zero_begin(unit 2, forward) in step 2", "zero_begin(unit 1, forward) in step 2"},
    [LEFT_OUT] = {"zero_begin(unit 0, backward) in step 2", "zero_begin(unit 1, backward) in step 2"},
    [STEP_EARLY] = {"zero_step in step 2", "zero_begin(unit 1, backward) in step 2"},
    /* zero_unwrap, or zero_step itself */
    [STEP_REFUSED] = {"zero_", "zero_begin(unit 0, forward) in step 2"},
    [READ_FOR_MEAN] = {"zero_read(tensor 0) in step 2", "zero_mean in step 2"},
    [READ_OTHER_RANGE] = {"zero_read(tensor 0) in step 2",
                          "zero_read(tensor 0) in step 2 with other arguments"},
    [READ_OTHER_TENSOR] = {"zero_read(tensor 1) in step 2", "zero_read(tensor 0) in step 2"},
    [READ_OTHER_VALUE] = {"zero_read(tensor 0) in step 2",
                          "zero_read(tensor 0) in step 2 with other arguments"},
    [READ_FOR_WRITE] = {"zero_read(tensor 0) in step 2", "zero_write(tensor 0) in step 2"},
    [MEAN_OF_FEWER] = {"zero_mean in step 2", "zero_mean in step 2 with other arguments"},
    [UNWRAP_FOR_MEAN] = {"zero_unwrap in step 2", "zero_mean in step 2"},
    [EARLY_UNWRAP] = {"zero_unwrap in step 2", "zero_begin(unit 0, forward) in step 2"},
    [MEAN_ALONE] = {"zero_mean in step 2", "zero_begin(unit 0, forward) in step 2"},
};

/* Whether text contains "rank 2 called A" and "rank 0 called B", in any order, and never "this rank". */
static bool names_the_calls(const char *text, int how, int odd, int world)
{
    const char *a = called[how][0], *b = called[how][1];
    if (strstr(text, "this rank"))
        return false;
    for (int other = 0; a && other < world; other++) {
        char one[256], two[256];
        bool args = strstr(b, " with other arguments") != NULL; /* written once, at the end */
        snprintf(one, sizeof one, "rank %d called %s", odd, a);
        snprintf(two, sizeof two, "rank %d called %.*s", other, (int)(strlen(b) - (args ? 21 : 0)), b);
        if (other != odd && strstr(text, one) && strstr(text, two) &&
            (!args || strstr(text, " with other arguments;")))
            return true;
    }
    return !a;
}

struct differing {
    int stage;
    enum difference how;
};

/* When the differing rank began to differ. */
static _Atomic int64_t differed_ms;
static _Atomic int n_done;

static int differ(struct toy_rank *r, zero_ctx **z, enum difference how, bool odd)
{
    float x[8] = {0};
    double mean[2] = {1 + r->rank, 2};
    int err = 0;
    switch (how) {
    case READ_FOR_MEAN:
        err = odd ? zero_read(*z, 0, 0, 0, 8, x) : zero_mean(*z, mean, 1);
        break;
    case READ_OTHER_RANGE:
        err = zero_read(*z, 0, 0, odd ? 8 : 0, 8, x);
        break;
    case READ_OTHER_TENSOR:
        err = zero_read(*z, odd ? 1 : 0, 0, 0, 8, x);
        break;
    case READ_OTHER_VALUE:
        err = zero_read(*z, 0, odd ? 2 : 3, 0, 8, x);
        break;
    case MEAN_OF_FEWER:
        err = zero_mean(*z, mean, odd ? 1 : 2);
        break;
    case UNWRAP_FOR_MEAN:
        err = odd ? zero_unwrap(z) : zero_mean(*z, mean, 1);
        break;
    case READ_FOR_WRITE:
        err = odd ? zero_read(*z, 0, 0, 0, 8, x) : zero_write(*z, 0, 0, 0, 8, x);
        break;
    case EARLY_UNWRAP:
        err = odd ? zero_unwrap(z) : 0;
        break;
    case STEP_REFUSED:
        err = odd ? zero_step(*z, 1e-2f, NULL) : 0;
        break;
    case MEAN_ALONE:
        err = odd ? zero_mean(*z, mean, 1) : 0;
        break;
    case SILENT:
        for (int i = 0; odd && i < HANG_MS / 10 && atomic_load(&n_done) + 1 < r->world; i++)
            sleep_ms(10);
        break;
    default:
        break;
    }
    return err;
}

static void train_differently(struct toy_rank *r)
{
    const struct differing *c = r->arg;
    bool odd = r->rank == r->world - 1;
    struct toy m;
    zero_ctx *z;
    struct zero_config cfg = toy_config(r, c->stage);
    /* Only a silent rank, and one that waits for a call that the others never make, are found by timeout. */
    cfg.launch.timeout_ms = c->how == SILENT || c->how == MEAN_ALONE ? SHORT_MS : LONG_MS;
    if (c->how == MEAN_ALONE)
        cfg.memory.prefetch = 0; /* makes the other ranks wait in a gather at stage 3 */
    int err = toy_open(r, &m, &z, &cfg);
    if (err)
        toy_wrong(r, "zero_wrap: %s", zero_last_error());
    for (int step = 0; !err && z && step < 4; step++) {
        bool now = odd && step == 1;
        if (now)
            atomic_store(&differed_ms, toy_now_ms());
        if (step == 1)
            err = differ(r, &z, c->how, odd);
        if (!z)
            break;
        for (int u = 0; !err && u < TOY_UNITS; u++) {
            int unit = now && c->how == OTHER_UNIT && u == 1 ? 2 : u;
            err = FIRST_ERROR(zero_begin(z, unit, ZERO_FORWARD), zero_end(z, unit, ZERO_FORWARD));
        }
        for (int u = TOY_UNITS; !err && u-- > 0;) {
            if (now && c->how == LEFT_OUT && u == 1)
                continue;
            err = zero_begin(z, u, ZERO_BACKWARD);
            if (!err)
                toy_add_gradient(&m, u, step, r->rank);
            if (!err)
                err = zero_end(z, u, ZERO_BACKWARD);
            if (!err && now && c->how == STEP_EARLY && u == 2)
                err = zero_step(z, 1e-2f, NULL);
        }
        if (!err)
            err = zero_step(z, now && c->how == OTHER_LR ? 2e-2f : 1e-2f, NULL);
    }
    toy_note(r, err);
    r->ms = toy_now_ms() - atomic_load(&differed_ms);
    atomic_fetch_add(&n_done, 1);
    if (z && err && err != ZERO_ERR_ORDER) {
        check_failed(r, &m, z, (struct toy_holdings){0}); /* which unwraps z */
        toy_free(&m);
    } else {
        toy_close(&m, &z);
    }
}

static void ranks_call_differently(void **state)
{
    struct toy_holdings before = toy_holdings();
    for (int how = 0; how < N_DIFFERENCES; how++)
        for (int stage = 0; stage <= 3; stage++) {
            if (how == SILENT && stage % 3) /* the timeout makes it slow */
                continue;
            int world = 2 + (how + stage) % 2, odd = world - 1;
            struct differing c = {stage, how};
            struct toy_rank r[3];
            atomic_store(&n_done, 0);
            toy_ranks(world, train_differently, &c, r);
            report(difference_names[how], stage, r);
            int code = how == SILENT ? ZERO_ERR_TIMEOUT : ZERO_ERR_MISMATCH;
            for (int k = 0; k < world; k++) {
                int want = k == odd && how == STEP_REFUSED ? ZERO_ERR_ORDER : code;
                const char *found = strstr(r[k].text, "found by");
                bool says = want == ZERO_ERR_ORDER || (strstr(r[k].text, how == OTHER_LR ? "lr is" : "seq") &&
                                                       names_the_calls(r[k].text, how, odd, world) &&
                                                       (!found || !strstr(found + 1, "found by")));
                if (r[k].wrong[0] || r[k].err != want || !says || r[k].ms > SOON_MS)
                    fail_msg("%s: stage %d world %d rank %d: code %d after %lld ms \"%s\"; %s",
                             difference_names[how], stage, world, k, r[k].err, (long long)r[k].ms, r[k].text,
                             r[k].wrong);
            }
        }
    toy_assert_nothing_left(before);
}

/* ---- memory that fails ---- */

struct training {
    int stage;
    int64_t k; /* the number of the allocation that fails, on rank `failing` (-1: on every rank) */
    int failing;
};

static void train_without_memory(struct toy_rank *r)
{
    const struct training *t = r->arg;
    struct toy_holdings before = t->failing >= 0 ? toy_holdings() : (struct toy_holdings){0};
    struct toy m;
    zero_ctx *z = NULL;
    struct zero_config cfg = toy_config(r, t->stage);
    char text[32];
    cfg.debug.trace = 1;
    toy_make(&m);
    snprintf(text, sizeof text, "%lld", (long long)t->k);
    if (t->failing == r->rank)
        setenv("ZERO_FAIL_ALLOC", text, 1);
    int64_t from = toy_now_ms();
    int err = zero_wrap(&z, m.table, TOY_TENSORS, &cfg);
    toy_note(r, err);
    if (err) {
        if (z || !toy_untouched(&m))
            toy_wrong(r, "a failed zero_wrap changed something");
    } else {
        /* Nothing is allocated from here on, so nothing can fail. */
        if (train_step(&m, z, 0, r->rank) || toy_hash(z, 2, &r->hash) || zero_unwrap(&z))
            toy_wrong(r, "after zero_wrap: %s", zero_last_error());
    }
    r->ms = toy_now_ms() - from;
    toy_free(&m);
    if (before.n_fds)
        toy_check_nothing_left(r, before);
}

/* Checks that all ranks succeeded or all failed. Returns whether they succeeded. */
static bool check_without_memory(const struct toy_rank *r, int world, const struct training *t)
{
    char name[16];
    snprintf(name, sizeof name, "rank %d", t->failing);
    for (int i = 0; i < world; i++) {
        bool reported = t->failing < 0 || i == t->failing || strstr(r[i].text, name);
        bool right = r[i].err == ZERO_ERR_NOMEM || r[i].err == ZERO_ERR_SYSTEM;
        if (r[i].wrong[0] || r[i].ms > SOON_MS || (r[i].err && (!reported || !right || !r[i].text[0])) ||
            !r[i].err != !r[0].err)
            fail_msg("stage %d world %d, allocation %lld of rank %d fails; rank %d: code %d after %lld ms "
                     "\"%s\"; %s",
                     t->stage, world, (long long)t->k, t->failing, i, r[i].err, (long long)r[i].ms, r[i].text,
                     r[i].wrong);
    }
    return !r[0].err;
}

static void no_memory_in_a_process(void **state)
{
    for (int stage = 0; stage <= 3; stage += 3)
        for (int failing = 0; failing <= 1; failing++) {
            struct training t = {.stage = stage, .failing = failing};
            do {
                t.k++;
                run_processes(2, train_without_memory, &t, -1, -1);
            } while (!check_without_memory(shared, 2, &t));
            assert_true(t.k > 10); /* otherwise no allocation failed */
        }
}

static void fail_each_allocation(int stage, int world)
{
    struct training t = {.stage = stage, .failing = -1};
    struct toy_rank r[TOY_HYBRID_WORLD];
    bool well;
    do {
        char text[32];
        t.k++;
        snprintf(text, sizeof text, "%lld", (long long)t.k);
        setenv("ZERO_FAIL_ALLOC", text, 1);
        toy_ranks(world, train_without_memory, &t, r);
        unsetenv("ZERO_FAIL_ALLOC");
        well = check_without_memory(r, world, &t);
    } while (!well);
    assert_true(t.k > 10);
}

static void no_memory(void **state)
{
    struct toy_holdings before = toy_holdings();
    for (int stage = 0; stage <= 3; stage++)
        for (int world = 1; world <= 2; world++)
            fail_each_allocation(stage, world);
    fail_each_allocation(TOY_HSDP, TOY_HYBRID_WORLD);
    fail_each_allocation(TOY_HFSDP, TOY_HYBRID_WORLD);
    toy_assert_nothing_left(before);
}

/* ---- many contexts ---- */

static void wrap_often(struct toy_rank *r)
{
    for (int i = 0; i < 200; i++) {
        struct toy m;
        zero_ctx *z = NULL;
        toy_make(&m);
        struct zero_config cfg = toy_config(r, i % 4);
        int err = zero_wrap(&z, m.table, TOY_TENSORS, &cfg);
        if (!err && i % 8 == 0)
            err = train_step(&m, z, 0, r->rank);
        if (!err)
            err = zero_unwrap(&z);
        toy_free(&m);
        if (err) {
            toy_wrong(r, "time %d: %s", i, zero_last_error());
            return;
        }
    }
}

static int64_t resident_kib(void)
{
    long long pages = 0;
    FILE *f = fopen("/proc/self/statm", "re");
    if (f && fscanf(f, "%*d %lld", &pages) != 1)
        pages = 0;
    if (f)
        fclose(f);
    return pages * sysconf(_SC_PAGESIZE) / 1024;
}

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { MAX_GROWTH_KIB = 1 << 20 }; /* sanitizers keep freed memory to watch it */
#else
enum { MAX_GROWTH_KIB = 4 << 10 };
#endif

static void two_hundred_times(void **state)
{
    for (int world = 1; world <= 2; world++) {
        struct toy_rank r[2];
        toy_ranks(world, wrap_often, NULL, r); /* does what a process does once only */
        struct toy_holdings before = toy_holdings();
        /* The allocator's arenas grow by chance, depending on which threads meet in it. A leak grows in each
         * round. */
        int64_t growth = INT64_MAX;
        for (int round = 0; round < 4 && growth > MAX_GROWTH_KIB; round++) {
            int64_t kib = resident_kib();
            toy_ranks(world, wrap_often, NULL, r);
            for (int k = 0; k < world; k++)
                if (r[k].wrong[0])
                    fail_msg("world %d rank %d: %s", world, k, r[k].wrong);
            toy_assert_nothing_left(before);
            growth = resident_kib() - kib;
        }
        if (growth > MAX_GROWTH_KIB)
            fail_msg("world %d: %lld KiB more after 200 times, each time", world, (long long)growth);
    }
}

struct twice {
    const struct toy_rank *other; /* the rank whose url the second context uses */
    int n;                        /* number of contexts */
};

static void two_at_once(struct toy_rank *r)
{
    const struct twice *t = r->arg;
    struct toy m[2];
    zero_ctx *z[2] = {0};
    int err = 0;
    for (int i = 0; !err && i < t->n; i++) {
        struct zero_config cfg = toy_config(r, i ? 3 : 1);
        if (i)
            cfg.launch.rendezvous = t->other->url;
        toy_make(&m[i]);
        err = zero_wrap(&z[i], m[i].table, TOY_TENSORS, &cfg);
    }
    for (int step = 0; !err && step < 3; step++)
        for (int i = 0; !err && i < t->n; i++)
            err = train_step(&m[i], z[i], step, r->rank);
    uint64_t hash[2] = {0};
    for (int i = 0; !err && i < t->n; i++)
        err = toy_hash(z[i], 2, &hash[i]);
    if (!err && t->n == 2 && hash[0] != hash[1])
        toy_wrong(r, "the two differ");
    r->hash = hash[0];
    toy_note(r, err);
    for (int i = 0; i < t->n; i++) {
        zero_unwrap(&z[i]);
        toy_free(&m[i]);
    }
}

static void two_contexts(void **state)
{
    struct toy_holdings before = toy_holdings();
    struct toy_rank r[2], other[2];
    uint64_t alone = 0;
    for (int n = 1; n <= 2; n++) {
        toy_set_ranks(2, NULL, other);
        struct twice t = {other, n};
        toy_ranks(2, two_at_once, &t, r);
        for (int k = 0; k < 2; k++)
            if (r[k].wrong[0] || r[k].err)
                fail_msg("rank %d: %s %s", k, r[k].text, r[k].wrong);
        alone = n == 1 ? r[0].hash : alone;
        assert_true(r[0].hash == alone && r[1].hash == alone);
    }
    toy_assert_nothing_left(before);
}

int main(void)
{
    const char *given = getenv("SEED");
    verbose = getenv("VERBOSE");
    seed = given ? strtoull(given, NULL, 0) : (uint64_t)time(NULL);
    printf("SEED=%llu\n", (unsigned long long)seed);
    shared = mmap(NULL, sizeof *shared * MAX_TOY_RANKS + sizeof *died_ms, PROT_READ | PROT_WRITE,
                  MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (shared == MAP_FAILED)
        return 1;
    died_ms = (_Atomic int64_t *)(shared + MAX_TOY_RANKS);
    const struct CMUnitTest tests[] = {
        /* Tests that fork come first, before the process has threads. */
        cmocka_unit_test(killed_at_each_point),   cmocka_unit_test(killed_in_a_group),
        cmocka_unit_test(killed_at_any_time),     cmocka_unit_test(stopped),
        cmocka_unit_test(stopped_in_a_group),     cmocka_unit_test(found_in_the_environment),
        cmocka_unit_test(overridden_on_one_rank), cmocka_unit_test(no_memory_in_a_process),
        cmocka_unit_test(ranks_disagree),         cmocka_unit_test(rank_0_is_wrong),
        cmocka_unit_test(ranks_call_differently), cmocka_unit_test(no_memory),
        cmocka_unit_test(two_hundred_times),      cmocka_unit_test(two_contexts),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
