/* SPDX-License-Identifier: Apache-2.0 */
/* test_out_of_memory.c: each allocation of the library fails once, on one rank. Then zero_wrap must fail on
 * every rank or succeed on every rank, and never crash, hang or leak. Allocations of libuv are not tested,
 * because libuv ends the process for some of them.
 *
 * EVERY=n tests one in n allocations, from a random one of the first n. Linked with --wrap against the static
 * libraries. */
#include "test/cmocka.h"
#include "test/zero/toy_net.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

void *__real_malloc(size_t size);
void *__real_calloc(size_t n, size_t size);
void *__real_realloc(void *p, size_t size);
char *__real_strdup(const char *s);
void *__wrap_malloc(size_t size);
void *__wrap_calloc(size_t n, size_t size);
void *__wrap_realloc(void *p, size_t size);
char *__wrap_strdup(const char *s);

/* allocations of this thread until one fails; 0: none fails */
static _Thread_local int64_t fail_in;
static _Thread_local int64_t n_taken; /* allocations of this thread so far */

static bool refused(void)
{
    n_taken++;
    return fail_in > 0 && --fail_in == 0;
}

void *__wrap_malloc(size_t size)
{
    return refused() ? NULL : __real_malloc(size);
}

void *__wrap_calloc(size_t n, size_t size)
{
    return refused() ? NULL : __real_calloc(n, size);
}

void *__wrap_realloc(void *p, size_t size)
{
    return refused() ? NULL : __real_realloc(p, size);
}

char *__wrap_strdup(const char *s)
{
    return refused() ? NULL : __real_strdup(s);
}

enum { TIMEOUT_MS = 2000, SOON_MS = 15000, MAX_ALLOCATIONS = 2000 };

struct trial {
    int stage, failing;
    int64_t k;        /* number of the allocation that fails in zero_wrap of rank `failing` */
    int64_t k_unwrap; /* the same in zero_unwrap */
    int64_t k_run;    /* the same in the step between them */
    bool fired;       /* the allocation was reached */
};

static int64_t every = 1, first = 1;

static bool checked(void)
{
    const char *check = getenv("ZERO_CHECK");
    return check && !strcmp(check, "1");
}

static void train(struct toy_rank *r)
{
    struct trial *t = r->arg;
    static const struct zero_call order[] = {
        {0, ZERO_FORWARD, 0}, {0, ZERO_FORWARD, 1}, {0, ZERO_BACKWARD, 0}, {0, ZERO_BACKWARD, 1}};
    struct toy m;
    zero_ctx *z = NULL;
    struct zero_config cfg = toy_config(r, t->stage);
    cfg.launch.timeout_ms = cfg.launch.start_timeout_ms = TIMEOUT_MS;
    cfg.memory.order = order;
    cfg.memory.n_order = 4;
    cfg.debug.trace = 1;
    toy_make(&m);
    int64_t from = toy_now_ms();
    bool victim = r->rank == t->failing;
    fail_in = victim ? t->k : 0;
    int err = zero_wrap(&z, m.table, TOY_TENSORS, &cfg);
    if (victim && t->k)
        t->fired = fail_in == 0;
    fail_in = 0;
    toy_note(r, err);
    if (err && (z || !toy_untouched(&m)))
        toy_wrong(r, "a failed zero_wrap changed something");
    if (!err) {
        int64_t before = n_taken;
        fail_in = victim ? t->k_run : 0;
        if (toy_forward(&m, z, true) || toy_backward(&m, z, true, 0, r->rank) || zero_step(z, 1e-2f, NULL) ||
            toy_forward(&m, z, true))
            toy_wrong(r, "after zero_wrap: %s", zero_last_error());
        if (victim && t->k_run)
            t->fired = fail_in == 0;
        if (n_taken != before && !checked()) /* check mode records more as it runs */
            toy_wrong(r, "%lld allocations after zero_wrap", (long long)(n_taken - before));
        fail_in = victim ? t->k_unwrap : 0;
        err = zero_unwrap(&z);
        if (victim && t->k_unwrap)
            t->fired = fail_in == 0;
        fail_in = 0;
        if (err || z)
            toy_wrong(r, "zero_unwrap: %s", zero_last_error());
    }
    r->ms = toy_now_ms() - from;
    toy_free(&m);
}

/* Whether the rank knows the cause. If the victim fails before or while it connects, the others only know
 * that it did not come. */
static bool knows(const struct toy_rank *r, bool victim)
{
    if (r->err == ZERO_ERR_NOMEM || (r->err == ZERO_ERR_PEER && !victim)) /* PEER if training has begun */
        return strstr(r->text, "memory");
    if (r->err == ZERO_ERR_TIMEOUT)
        return !victim && (strstr(r->text, "did not come") || strstr(r->text, "for rank 0"));
    return r->err == 0;
}

static void check(const struct toy_rank *r, int world, const struct trial *t)
{
    for (int i = 0; i < world; i++)
        if (r[i].wrong[0] || r[i].ms > SOON_MS || !r[i].err != !r[0].err || !knows(&r[i], i == t->failing))
            fail_msg("stage %d world %d, allocation %lld (%lld in zero_unwrap) of rank %d fails; rank %d: "
                     "code %d after %lld ms \"%s\"; %s",
                     t->stage, world, (long long)t->k, (long long)t->k_unwrap, t->failing, i, r[i].err,
                     (long long)r[i].ms, r[i].text, r[i].wrong);
}

static void fail_each(int world, int stage, int failing, struct toy_holdings before)
{
    struct toy_holdings now;
    struct toy_rank r[TOY_HYBRID_WORLD];
    struct trial t = {.stage = stage, .failing = failing, .fired = true};
    for (t.k = first; t.fired; t.k += every) {
        assert_true(t.k < MAX_ALLOCATIONS);
        toy_ranks(world, train, &t, r);
        if (getenv("VERBOSE"))
            for (int i = 0; i < world; i++)
                printf("world %d, allocation %lld of rank %d: rank %d %4d %5lld ms %.150s\n", world,
                       (long long)t.k, failing, i, r[i].err, (long long)r[i].ms, r[i].err ? r[i].text : "");
        check(r, world, &t);
        if (!toy_holds_no_more(before, &now))
            fail_msg("world %d allocation %lld of rank %d: fds %d -> %d, threads %d -> %d, maps %d -> %d",
                     world, (long long)t.k, failing, before.n_fds, now.n_fds, before.n_threads, now.n_threads,
                     before.n_maps, now.n_maps);
    }
    assert_true(t.k > 20); /* otherwise no allocation failed */
    t = (struct trial){.stage = stage, .failing = failing, .fired = true};
    for (t.k_unwrap = 1; t.fired; t.k_unwrap++) {
        toy_ranks(world, train, &t, r);
        check(r, world, &t);
        assert_true(toy_holds_no_more(before, &now));
    }
    /* Without memory check mode stops watching, and training goes on. */
    t = (struct trial){.stage = stage, .failing = failing, .fired = checked()};
    for (t.k_run = first; t.fired; t.k_run += every) {
        toy_ranks(world, train, &t, r);
        check(r, world, &t);
        assert_true(!r[failing].err && toy_holds_no_more(before, &now));
    }
}

static void each_allocation(void **state)
{
    struct toy_holdings before = toy_holdings();
    fail_each(1, 2, 0, before);
    fail_each(2, 3, 0, before);
    fail_each(2, 2, 1, before);
    fail_each(TOY_HYBRID_WORLD, TOY_HFSDP, 2, before);
}

/* zero_plan allocates too, also for the check of cfg.memory.order. */
static void plan(void **state)
{
    struct toy m;
    toy_make(&m);
    struct zero_config cfg = ZERO_CONFIG_INIT;
    cfg.stage = 3;
    cfg.launch.world = 3;
    int err = ZERO_ERR_NOMEM, k;
    for (k = 1; err; k++) {
        struct zero_plan_info info;
        fail_in = k;
        err = zero_plan(m.table, TOY_TENSORS, &cfg, &info);
        fail_in = 0;
        if (err && (err != ZERO_ERR_NOMEM || !strstr(zero_last_error(), "memory")))
            fail_msg("allocation %d: code %d \"%s\"", k, err, zero_last_error());
    }
    assert_true(k > 10);
    toy_free(&m);
}

int main(void)
{
    const char *n = getenv("EVERY"), *seed = getenv("SEED");
    every = n && atoi(n) > 0 ? atoi(n) : every;
    int64_t s = seed ? strtoll(seed, NULL, 0) : (int64_t)time(NULL);
    first = 1 + s % every;
    printf("SEED=%lld\n", (long long)s);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(plan),
        cmocka_unit_test(each_allocation),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
