/* test_checkpoint_faults.c: every file call of a save and of a load fails in turn, in every way; and the
 * power fails at every one, with what was not synced kept in part. What was committed is always there, and
 * nothing else ever is. */
#include "test/checkpoint/memory_files.h"
#include "test/checkpoint/saved_model.h"
#include "zero/checkpoint_dir.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

static int n_subsets = 100;
static uint64_t first_seed;

static void quiet(void *arg, const char *line)
{
    (void)arg;
    (void)line;
}

/* Two committed saves, and the state a third would hold. */
struct history {
    struct memory_files *files;
    uint64_t hashes[3][4]; /* as each rank knows it: of the state at step 1, 2, 3 */
};

static void begin_history(struct model_rank *m, struct history *h)
{
    for (int i = 1; i <= 3; i++) {
        CHECK_OK(model_steps(m, 1));
        h->hashes[m->rank][i] = model_hash(m);
        if (i < 3)
            CHECK_OK(zero_save(m->z, "run"));
    }
    if (m->z->engine.snapshot)
        CHECK_OK(zero_save_wait(m->z));
}

/* The step that is found, which must have the state of that step. */
static int64_t loaded_step(struct model_rank *m, const struct history *h)
{
    CHECK_OK(zero_load(m->z, "run"));
    int64_t t = m->z->engine.t;
    CHECK_THAT(t >= 1 && t <= 3);
    CHECK_THAT(model_hash(m) == h->hashes[m->rank][t]);
    return t;
}

static int save_and_wait(struct model_rank *m)
{
    int err = zero_save(m->z, "run");
    return err ? err : zero_save_wait(m->z);
}

/* ---- calls that fail ---- */

static void fail_saves(struct model_rank *m, void *arg)
{
    struct history *h = arg;
    static const enum memory_fault faults[] = {FAULT_EIO, FAULT_ENOSPC, FAULT_EINTR, FAULT_SHORT};
    begin_history(m, h);
    for (size_t f = 0; f < 4; f++) {
        for (int always = 0; always < 2; always++) {
            if (faults[f] == FAULT_EINTR && always)
                continue; /* a call that is interrupted for ever is never done */
            bool done = false;
            for (int64_t k = 1; !done; k++) {
                memory_files_fault(h->files, faults[f], k, always);
                int err = save_and_wait(m);
                done = memory_files_calls(h->files) < k ||
                       (faults[f] == FAULT_SHORT && always); /* from the first on: byte by byte */
                memory_files_fault(h->files, FAULT_NONE, 0, false);
                if (faults[f] == FAULT_EINTR || faults[f] == FAULT_SHORT || done)
                    CHECK_THAT(err == 0);
                else if (err)
                    CHECK_THAT(err == ZERO_ERR_IO && strstr(zero_last_error(), "zero_save"));
                CHECK_THAT(memory_files_n_open(h->files) == 0);
                /* Usable, with the state that was to be saved; what is found is a whole checkpoint, of before
                 * or of now. */
                CHECK_THAT(model_hash(m) == h->hashes[m->rank][3]);
                int64_t t = loaded_step(m, h);
                CHECK_THAT(t == 2 || t == 3);
                if (!err)
                    CHECK_THAT(t == 3);
                if (t == 2) {
                    m->step = 2;
                    CHECK_OK(model_steps(m, 1));
                    CHECK_THAT(model_hash(m) == h->hashes[m->rank][3]);
                }
                m->step = 3;
                if (!done && k % 8 == 0) {
                    CHECK_OK(save_and_wait(m));
                    CHECK_THAT(loaded_step(m, h) == 3);
                }
            }
        }
    }
}

static void test_save_calls_fail(void **state)
{
    (void)state;
    for (int async = 0; async < 2; async++) {
        struct history h = {.files = memory_files_open()};
        struct model_options o = {.stage = 2,
                                  .world = 1,
                                  .async = async,
                                  .keep = 2,
                                  .log = quiet,
                                  .files = memory_files_table(h.files)};
        model_run(&o, fail_saves, &h);
        memory_files_close(h.files);
    }
}

static void fail_loads(struct model_rank *m, void *arg)
{
    struct history *h = arg;
    static const enum memory_fault faults[] = {FAULT_EIO, FAULT_EINTR, FAULT_SHORT};
    begin_history(m, h);
    for (size_t f = 0; f < 3; f++) {
        bool done = false;
        for (int64_t k = 1; !done; k++) {
            m->step = 2;
            memory_files_fault(h->files, faults[f], k, false);
            int err = zero_load(m->z, "run");
            done = memory_files_calls(h->files) < k;
            memory_files_fault(h->files, FAULT_NONE, 0, false);
            if (faults[f] != FAULT_EIO || done)
                CHECK_THAT(err == 0);
            CHECK_THAT(memory_files_n_open(h->files) == 0);
            /* A call whose failure does no harm (closing what was read) may pass. */
            CHECK_THAT(model_hash(m) == (err ? h->hashes[m->rank][3] : h->hashes[m->rank][2]));
            CHECK_THAT(m->z->engine.t == (err ? 3 : 2));
            if (!err)
                CHECK_OK(model_steps(m, 1));
            CHECK_THAT(model_hash(m) == h->hashes[m->rank][3]);
        }
    }
}

static void test_load_calls_fail(void **state)
{
    (void)state;
    struct history h = {.files = memory_files_open()};
    struct model_options o = {.stage = 1, .world = 1, .log = quiet, .files = memory_files_table(h.files)};
    model_run(&o, fail_loads, &h);
    memory_files_close(h.files);
}

/* Ranks meet the fault at different moments: all must report it, and all go on. */
static void fail_among_ranks(struct model_rank *m, void *arg)
{
    struct history *h = arg;
    begin_history(m, h);
    for (int64_t k = 1; k < 150; k += 3) {
        double results[2] = {0, 0};
        CHECK_OK(zero_mean(m->z, results, 1));
        if (m->rank == 0)
            memory_files_fault(h->files, FAULT_EIO, k, false);
        CHECK_OK(zero_mean(m->z, results, 1));
        int saved = save_and_wait(m), again = 0;
        results[0] = saved != 0;
        CHECK_OK(zero_mean(m->z, results, 1));
        CHECK_THAT(results[0] == 0 || results[0] == 1); /* all or none */
        if (m->rank == 0)
            memory_files_fault(h->files, FAULT_NONE, 0, false);
        CHECK_THAT(model_hash(m) == h->hashes[m->rank][3]);
        again = save_and_wait(m);
        CHECK_THAT(again == 0);
        if (m->rank == 0)
            memory_files_fault(h->files, FAULT_EIO, k, false);
        CHECK_OK(zero_mean(m->z, results, 1));
        int loaded = zero_load(m->z, "run");
        results[0] = loaded != 0;
        CHECK_OK(zero_mean(m->z, results, 1));
        CHECK_THAT(results[0] == 0 || results[0] == 1);
        if (m->rank == 0)
            memory_files_fault(h->files, FAULT_NONE, 0, false);
        CHECK_THAT(model_hash(m) == h->hashes[m->rank][3] && m->z->engine.t == 3);
        CHECK_OK(zero_mean(m->z, results, 1));
    }
}

static void test_among_ranks(void **state)
{
    (void)state;
    for (int async = 0; async < 2; async++) {
        struct history h = {.files = memory_files_open()};
        struct model_options o = {.stage = 3,
                                  .world = 3,
                                  .async = async,
                                  .keep = 2,
                                  .log = quiet,
                                  .files = memory_files_table(h.files)};
        model_run(&o, fail_among_ranks, &h);
        assert_int_equal(memory_files_n_open(h.files), 0);
        memory_files_close(h.files);
    }
}

/* ---- the power fails ---- */

static void lose_power(struct model_rank *m, void *arg)
{
    struct history *h = arg;
    int64_t n_calls = 1, n_loads = 0, n_new = 0;
    for (int64_t k = 1; k <= n_calls + 1; k++) {
        /* Anew each time: two committed saves of which the first is to go, and the power fails at call k of
         * the third. */
        struct memory_files *disk = memory_files_open();
        m->z->files = memory_files_table(disk);
        m->step = 0;
        m->z->files = memory_files_table(h->files);
        CHECK_OK(zero_load(m->z, "start"));
        m->z->files = memory_files_table(disk);
        begin_history(m, h);
        memory_files_fault(disk, FAULT_DEAD, k, true);
        int err = save_and_wait(m);
        n_calls = k == 1 ? 1 << 20 : n_calls;
        bool over = memory_files_calls(disk) < k;
        if (over)
            CHECK_THAT(err == 0);
        for (int i = 0; i < n_subsets; i++) {
            struct memory_files *found = memory_files_crash(disk, first_seed + (uint64_t)(k * 1000 + i));
            m->z->files = memory_files_table(found);
            int64_t t = loaded_step(m, h);
            CHECK_THAT(t >= 2);        /* no commit is lost */
            CHECK_THAT(err || t == 3); /* and this was one */
            n_new += t == 3;
            n_loads++;
            if (i == 0) { /* and it goes on from there: what is left lying about hinders nothing */
                m->step = t;
                CHECK_OK(save_and_wait(m));
                CHECK_THAT(loaded_step(m, h) == t);
            }
            memory_files_close(found);
        }
        memory_files_close(disk);
        m->z->files = memory_files_table(h->files);
        if (over)
            break;
        n_calls = k + 1;
    }
    printf("power failures at %lld calls, %lld loads, %lld of them of the new checkpoint\n",
           (long long)n_calls, (long long)n_loads, (long long)n_new);
    CHECK_THAT(n_calls > 20 && n_new > 0 && n_new < n_loads);
}

static void save_start(struct model_rank *m, void *arg)
{
    (void)arg;
    CHECK_OK(zero_save(m->z, "start"));
    CHECK_OK(zero_save_wait(m->z));
}

static void start_and_lose_power(struct model_rank *m, void *arg)
{
    save_start(m, arg);
    lose_power(m, arg);
}

static void test_power_failures(void **state)
{
    (void)state;
    for (int async = 0; async < 2; async++) {
        struct history h = {.files = memory_files_open()};
        struct model_options o = {.stage = 0,
                                  .world = 1,
                                  .async = async,
                                  .keep = 2,
                                  .log = quiet,
                                  .files = memory_files_table(h.files)};
        model_run(&o, start_and_lose_power, &h);
        memory_files_close(h.files);
    }
}

int main(void)
{
    const char *seed = getenv("SEED"), *n = getenv("N_SUBSETS");
    first_seed = seed ? strtoull(seed, NULL, 0) : (uint64_t)time(NULL) * 1000;
    n_subsets = n ? atoi(n) : n_subsets;
    printf("SEED=%llu\n", (unsigned long long)first_seed);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_save_calls_fail),
        cmocka_unit_test(test_load_calls_fail),
        cmocka_unit_test(test_among_ranks),
        cmocka_unit_test(test_power_failures),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
