/* SPDX-License-Identifier: Apache-2.0 */
/* test_checkpoint_faults.c: fails every file call of a save and of a load in turn, in every way. Also
 * fails the power at every call, with part of the unsynced changes kept. A committed checkpoint must
 * always be found, and nothing else.
 *
 * EVERY=n in the environment tests every n-th file call and every (n + 2) / 3-th power failure. N_SUBSETS
 * is the number of subsets kept for each; 100 take minutes. */
#include "test/checkpoint/memory_files.h"
#include "test/checkpoint/saved_model.h"
#include "test/cmocka.h"
#include "test/kernels/random.h"
#include "zero/checkpoint/checkpoint_dir.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static int n_subsets = 20, every = 1;
static int64_t first_call = 1; /* of those that fail */
static uint64_t first_seed;

static void quiet(void *arg, const char *line)
{
}

/* Two committed saves, and the state that a third would hold. */
struct history {
    struct memory_files *files;
    uint64_t hashes[3][4]; /* per rank: the state at steps 1, 2 and 3 */
    pthread_barrier_t barrier;
    double failed[3];
    int64_t n_calls;
};

static struct history open_history(int world)
{
    struct history h = {.files = memory_files_open()};
    CHECK_THAT(!pthread_barrier_init(&h.barrier, NULL, (unsigned)world));
    return h;
}

static void close_history(struct history *h)
{
    assert_int_equal(memory_files_n_open(h->files), 0);
    pthread_barrier_destroy(&h->barrier);
    memory_files_close(h->files);
}

/* Each rank's own data at a step. */
static int note_of(int rank, int64_t t, char note[64])
{
    return snprintf(note, 64, "rank %d's own, at step %lld", rank, (long long)t);
}

static void check_notes(struct model_rank *m, int64_t t)
{
    struct zero_data_info info;
    char note[64], found[64] = "";
    CHECK_OK(zero_read_data(m->z, ZERO_DATA_JOB, 0, 0, NULL, &info));
    for (int r = 0; r < info.n_saved; r++) {
        int n = note_of(r, t, note);
        CHECK_OK(zero_read_data(m->z, r, 0, n, found, NULL));
        CHECK_THAT(!memcmp(note, found, (size_t)n));
    }
}

static void begin_history(struct model_rank *m, struct history *h)
{
    for (int i = 1; i <= 3; i++) {
        CHECK_OK(model_steps(m, 1));
        h->hashes[m->rank][i] = model_hash(m);
        char note[64];
        CHECK_OK(zero_set_data(m->z, ZERO_DATA_RANK, note, note_of(m->rank, i, note)));
        if (i < 3)
            CHECK_OK(zero_save(m->z, "run", NULL));
    }
    if (zr_engine_snapshot(m->z->engine))
        CHECK_OK(zero_save_wait(m->z, NULL));
}

/* Returns the step that is found. Its state must be that of the step. */
static int64_t loaded_step(struct model_rank *m, const struct history *h)
{
    CHECK_OK(zero_load(m->z, "run"));
    int64_t t = model_t(m);
    char note[64];
    CHECK_THAT(t >= 1 && t <= 3);
    CHECK_THAT(model_hash(m) == h->hashes[m->rank][t]);
    CHECK_OK(zero_set_data(m->z, ZERO_DATA_RANK, note, note_of(m->rank, 3, note))); /* for the next save */
    return t;
}

static int save_and_wait(struct model_rank *m)
{
    int err = zero_save(m->z, "run", NULL);
    return err ? err : zero_save_wait(m->z, NULL);
}

/* ---- calls that fail, on any rank ---- */

static void begin_fault(struct model_rank *m, struct history *h, enum memory_fault fault, int64_t at,
                        bool always)
{
    pthread_barrier_wait(&h->barrier);
    if (m->rank == 0) {
        zr_folder_unlock_all(&m->z->locks); /* the save must take the lock again */
        memory_files_fault(h->files, fault, at, always);
    }
    pthread_barrier_wait(&h->barrier);
}

/* Returns whether there were fewer than `at` calls. Checks that all ranks or none got an error. */
static bool end_fault(struct model_rank *m, struct history *h, int64_t at, int err)
{
    h->failed[m->rank] = err != 0;
    pthread_barrier_wait(&h->barrier);
    if (m->rank == 0) {
        h->n_calls = memory_files_calls(h->files);
        CHECK_THAT(memory_files_n_open(h->files) == 0);
        memory_files_fault(h->files, FAULT_NONE, 0, false);
    }
    for (int r = 0; r < m->world; r++)
        CHECK_THAT(h->failed[r] == h->failed[0]);
    pthread_barrier_wait(&h->barrier);
    return h->n_calls < at;
}

static void fail_saves(struct model_rank *m, void *arg)
{
    struct history *h = arg;
    static const enum memory_fault faults[] = {FAULT_EIO, FAULT_ENOSPC, FAULT_EINTR, FAULT_SHORT};
    begin_history(m, h);
    for (size_t f = 0; f < 4; f++) {
        for (int always = 0; always < 2; always++) {
            if (faults[f] == FAULT_EINTR && always)
                continue; /* a call that is interrupted for ever never ends */
            bool done = false;
            int64_t k;
            for (k = faults[f] == FAULT_SHORT && always ? 1 : first_call; !done; k += every) {
                begin_fault(m, h, faults[f], k, always);
                int err = save_and_wait(m);
                done = end_fault(m, h, k, err) ||
                       (faults[f] == FAULT_SHORT && always); /* from the first call on: byte by byte */
                if (faults[f] == FAULT_EINTR || faults[f] == FAULT_SHORT || done)
                    CHECK_THAT(err == 0);
                else if (err)
                    CHECK_THAT(err == ZERO_ERR_IO && strstr(zero_last_error(), "zero_save"));
                /* The context is usable and has the state that was to be saved. A whole checkpoint is
                 * found, the older or the new one. */
                CHECK_THAT(model_hash(m) == h->hashes[m->rank][3]);
                int64_t t = loaded_step(m, h);
                CHECK_THAT(t == 2 || t == 3);
                check_notes(m, t);
                if (!err)
                    CHECK_THAT(t == 3);
                if (t == 2) {
                    m->step = 2;
                    CHECK_OK(model_steps(m, 1));
                    CHECK_THAT(model_hash(m) == h->hashes[m->rank][3]);
                }
                m->step = 3;
                if (!done && k / every % 8 == 0) {
                    CHECK_OK(save_and_wait(m));
                    CHECK_THAT(loaded_step(m, h) == 3);
                }
            }
            if (m->rank == 0 && faults[f] == FAULT_EIO && !always)
                printf("%lld file calls in a save of %d ranks\n", (long long)h->n_calls, m->world);
        }
    }
}

static void test_save_calls_fail(void **state)
{
    for (int way = 0; way < 4; way++) {
        int world = way / 2 ? 3 : 1;
        struct history h = open_history(world);
        struct model_options o = {.stage = world == 1 ? 2 : 3,
                                  .world = world,
                                  .async = way % 2,
                                  .keep = 2,
                                  .log = quiet,
                                  .files = memory_files_table(h.files)};
        model_run(&o, fail_saves, &h);
        close_history(&h);
    }
}

static void fail_loads(struct model_rank *m, void *arg)
{
    struct history *h = arg;
    static const enum memory_fault faults[] = {FAULT_EIO, FAULT_ENOSPC, FAULT_EINTR, FAULT_SHORT};
    begin_history(m, h);
    for (size_t f = 0; f < 4; f++) {
        bool done = false;
        for (int64_t k = first_call; !done; k += every) {
            m->step = 2;
            begin_fault(m, h, faults[f], k, false);
            int err = zero_load(m->z, "run");
            done = end_fault(m, h, k, err);
            if (faults[f] == FAULT_EINTR || faults[f] == FAULT_SHORT || done)
                CHECK_THAT(err == 0);
            /* A call may fail without harm, such as closing a file that was read. */
            CHECK_THAT(model_hash(m) == (err ? h->hashes[m->rank][3] : h->hashes[m->rank][2]));
            CHECK_THAT(model_t(m) == (err ? 3 : 2));
            if (!err)
                CHECK_OK(model_steps(m, 1));
            CHECK_THAT(model_hash(m) == h->hashes[m->rank][3]);
        }
    }
    if (m->rank == 0)
        printf("%lld file calls in a load of %d ranks\n", (long long)h->n_calls, m->world);
}

static void test_load_calls_fail(void **state)
{
    for (int world = 1; world <= 3; world += 2) {
        struct history h = open_history(world);
        struct model_options o = {
            .stage = 1, .world = world, .log = quiet, .files = memory_files_table(h.files)};
        model_run(&o, fail_loads, &h);
        close_history(&h);
    }
}

/* ---- the power fails for all ranks at the same moment ---- */

#define MAX_CALLS 300
#define MAX_STEP  4 /* a save of one rank makes about 100 calls */

/* The disks as they were when the power failed at call k of a third save. */
struct outage {
    struct history h;
    struct memory_files *disk[MAX_CALLS];
    bool reported[MAX_CALLS]; /* the save was reported as done */
    int n;
    int64_t n_loads, n_new;
};

static void lose_power(struct model_rank *m, void *arg)
{
    struct outage *o = arg;
    struct history *h = &o->h;
    bool over = false;
    CHECK_OK(zero_save(m->z, "start", NULL));
    CHECK_OK(zero_save_wait(m->z, NULL));
    const struct zr_files *start = m->z->files;
    int64_t step = (every + 2) / 3 < MAX_STEP ? (every + 2) / 3 : MAX_STEP;
    for (int64_t k = 1; !over; k += step) {
        /* Start again each time: two committed saves. The next one removes the first. */
        CHECK_THAT(k < MAX_CALLS);
        m->z->files = start;
        CHECK_OK(zero_load(m->z, "start"));
        if (m->rank == 0)
            o->disk[o->n] = memory_files_open();
        pthread_barrier_wait(&h->barrier);
        struct memory_files *disk = o->disk[o->n];
        m->z->files = memory_files_table(disk);
        m->step = 0;
        begin_history(m, h);
        pthread_barrier_wait(&h->barrier);
        if (m->rank == 0) {
            zr_folder_unlock_all(&m->z->locks);
            memory_files_fault(disk, FAULT_DEAD, k, true);
        }
        pthread_barrier_wait(&h->barrier);
        int err = save_and_wait(m);
        pthread_barrier_wait(&h->barrier); /* no thread writes any more, so all ranks count the same calls */
        over = memory_files_calls(disk) < k;
        if (over)
            CHECK_THAT(err == 0);
        pthread_barrier_wait(&h->barrier);
        if (m->rank == 0)
            o->reported[o->n++] = !err;
        pthread_barrier_wait(&h->barrier);
    }
    m->z->files = start;
}

/* An interrupted removal leaves no folder that looks like somebody else's. */
static int has_manifest(void *arg, const char *name)
{
    char path[ZR_PATH_BYTES];
    int64_t *n;
    snprintf(path, sizeof path, "run/%.100s/manifest.json", name);
    CHECK_THAT(*name == '.' || memory_files_content(arg, path, &n));
    return 0;
}

/* One rank is enough: it can load what any number of ranks saved. */
static void find_after_outage(struct model_rank *m, void *arg)
{
    struct outage *o = arg;
    const struct zr_files *own = m->z->files;
    for (int k = 0; k < o->n; k++)
        for (int i = 0; i < n_subsets; i++) {
            struct memory_files *found =
                memory_files_crash(o->disk[k], first_seed + (uint64_t)(k * 1000 + i));
            m->z->files = memory_files_table(found);
            CHECK_OK(zr_folder_walk(m->z->files, "run", NULL, has_manifest, found));
            int64_t t = loaded_step(m, &o->h);
            CHECK_THAT(t >= 2);                    /* no commit is lost */
            CHECK_THAT(!o->reported[k] || t == 3); /* this one was committed */
            o->n_new += t == 3;
            o->n_loads++;
            if (i == 0) { /* training goes on: leftovers hinder nothing */
                check_notes(m, t);
                CHECK_OK(save_and_wait(m));
                CHECK_THAT(loaded_step(m, &o->h) == t);
            }
            zr_folder_unlock_all(&m->z->locks);
            memory_files_close(found);
        }
    m->z->files = own;
}

static void test_power_failures(void **state)
{
    for (int way = 0; way < 4; way++) {
        struct outage o = {0};
        struct model_options p = {
            .stage = way / 2 ? 3 : 0, .world = way / 2 ? 3 : 1, .async = way % 2, .keep = 2, .log = quiet};
        o.h = open_history(p.world);
        p.files = memory_files_table(o.h.files);
        model_run(&p, lose_power, &o);
        p.stage = 2;
        p.world = 1;
        model_run(&p, find_after_outage, &o);
        printf("power failures of %d ranks at %d calls, %lld loads, %lld of them of the new checkpoint\n",
               way / 2 ? 3 : 1, o.n, (long long)o.n_loads, (long long)o.n_new);
        assert_true(o.n > 20 && o.n_new > 0 && o.n_new < o.n_loads);
        for (int k = 0; k < o.n; k++)
            memory_files_close(o.disk[k]);
        close_history(&o.h);
    }
}

int main(void)
{
    const char *seed = getenv("SEED"), *n = getenv("N_SUBSETS"), *e = getenv("EVERY");
    first_seed = seed ? strtoull(seed, NULL, 0) : (uint64_t)time(NULL) * 1000;
    n_subsets = n ? atoi(n) : n_subsets;
    printf("SEED=%llu\n", (unsigned long long)first_seed);
    every = e && atoi(e) > 0 ? atoi(e) : every;
    first_call = 1 + (int64_t)(random_mix(first_seed) % (uint64_t)every);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_save_calls_fail),
        cmocka_unit_test(test_load_calls_fail),
        cmocka_unit_test(test_power_failures),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
