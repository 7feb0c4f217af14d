/* SPDX-License-Identifier: Apache-2.0 */
/* test_checkpoint_exchange.c: tests that a checkpoint of any stage and world loads with the same bits in
 * every other one, and that training continues as if it had not been interrupted. */
#include "shard/options.h"
#include "test/checkpoint/memory_files.h"
#include "test/checkpoint/saved_model.h"
#include "test/cmocka.h"
#include "test/zero/sample.h"
#include "zero/checkpoint/checkpoint_dir.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define STEPS 3
#define MORE  10
static const int worlds[] = {1, 2, 3, 4, 5, 8};
#define N_WORLDS 6
#define N_STAGED (4 * N_WORLDS)

/* Further cases after the stages. */
static const struct {
    int hybrid, world, group;
} hybrids[] = {{ZR_HSDP, 4, 2}, {ZR_HFSDP, 4, 2}, {ZR_HSDP, 8, 4}, {ZR_HFSDP, 8, 2}};
#define N_HYBRIDS ((int)(sizeof hybrids / sizeof *hybrids))
#define N_WAYS    (N_STAGED + N_HYBRIDS)

static struct way {
    uint64_t hash, later; /* after STEPS steps, and after MORE further steps */
    char dir[32];
} ways[N_WAYS];

static struct memory_files *files;

/* For every other case: slices differ in size, and some are empty. A checkpoint does not depend on that. */
static void give_granules(struct zero_tensor *t, struct zero_config *cfg)
{
    for (int i = 0; i < MODEL_TENSORS; i++) {
        int64_t n = 1;
        for (int d = t[i].flags & ZERO_STACKED ? 1 : 0; d < 8 && t[i].shape[d]; d++)
            n *= t[i].shape[d];
        if (!(t[i].flags & ZERO_BUFFER))
            t[i].granule = i % 2 ? n : n / 3 + 1;
    }
}

static struct model_options options_of(int way)
{
    int stage = way / N_WORLDS;
    void (*change)(struct zero_tensor * t, struct zero_config * cfg) =
        (way + stage) % 2 ? give_granules : NULL;
    if (way >= N_STAGED)
        return (struct model_options){.stage = 3,
                                      .world = hybrids[way - N_STAGED].world,
                                      .hybrid = hybrids[way - N_STAGED].hybrid,
                                      .group = hybrids[way - N_STAGED].group,
                                      .prefetch = way % 2 ? -1 : 1,
                                      .async = way % 3 == 1,
                                      .change = change,
                                      .files = memory_files_table(files)};
    return (struct model_options){.stage = stage,
                                  .world = worlds[way % N_WORLDS],
                                  .prefetch = way % 5 == 0 ? -1 : way % 3,
                                  .budget = way == 23 ? 1 << 15 : 0,
                                  .async = way % 3 == 1,
                                  .change = change,
                                  .files = memory_files_table(files)};
}

static void save_one(struct model_rank *m, void *arg)
{
    struct way *w = arg;
    char note[64];
    int n = snprintf(note, sizeof note, "seed 1, position %lld", (long long)m->step + STEPS);
    CHECK_OK(model_steps(m, STEPS));
    CHECK_OK(zero_set_data(m->z, ZERO_DATA_JOB, m->rank ? "another rank's" : note, m->rank ? 14 : n));
    CHECK_OK(zero_save(m->z, w->dir, NULL));
    uint64_t hash = model_hash(m);
    CHECK_OK(model_steps(m, MORE));
    uint64_t later = model_hash(m);
    CHECK_OK(zero_save_wait(m->z, NULL));
    if (m->rank == 0) {
        w->hash = hash;
        w->later = later;
    }
}

static void load_all(struct model_rank *m, void *arg)
{
    int self = *(int *)arg;
    /* Units that it has gathered ahead are older than the load. */
    CHECK_OK(model_steps(m, 2));
    for (int i = 0; i < N_WAYS; i++) {
        struct way *w = &ways[(self + 1 + i) % N_WAYS]; /* its own comes last */
        struct zero_data_info info;
        char note[18];
        CHECK_OK(zero_load(m->z, w->dir));
        CHECK_THAT(model_hash(m) == w->hash);
        CHECK_OK(zero_read_data(m->z, ZERO_DATA_JOB, 0, 18, note, &info));
        CHECK_THAT(info.bytes == 18 && !memcmp(note, "seed 1, position 3", 18));
        CHECK_THAT(model_t(m) == STEPS);
    }
    m->step = STEPS;
    CHECK_OK(model_steps(m, MORE));
    CHECK_THAT(model_hash(m) == ways[self].later);
}

static void test_every_pair(void **state)
{
    files = memory_files_open();
    for (int i = 0; i < N_WAYS; i++) {
        struct model_options o = options_of(i);
        snprintf(ways[i].dir, sizeof ways[i].dir, "/stage%d-world%d-%d", o.stage, o.world, o.hybrid);
        model_run(&o, save_one, &ways[i]);
    }
    for (int i = 0; i < N_WAYS; i++) {
        struct model_options o = options_of(i);
        if (!sample_has())
            continue;
        o.scrambled = true;
        model_run(&o, load_all, &i);
    }
    assert_int_equal(memory_files_n_open(files), 0);
    memory_files_close(files);
}

/* Where the library promises that two topologies have the same bits, they also have them after a
 * checkpoint. */
static void test_across_stages(void **state)
{
    for (int w = 0; w < N_WORLDS; w++)
        for (int stage = 1; stage < 4; stage++) {
            assert_true(ways[stage * N_WORLDS + w].hash == ways[w].hash);
            assert_true(ways[stage * N_WORLDS + w].later == ways[w].later);
        }
    for (int i = 0; i < N_HYBRIDS; i++)
        for (int w = 0; w < N_WORLDS; w++)
            if (worlds[w] == hybrids[i].world) {
                assert_true(ways[N_STAGED + i].hash == ways[w].hash);
                assert_true(ways[N_STAGED + i].later == ways[w].later);
            }
}

/* ---- a long asynchronous run ---- */

static void save_every_step(struct model_rank *m, void *arg)
{
    uint64_t *hash = arg;
    for (int i = 0; i < 12; i++) {
        CHECK_OK(model_steps(m, 1));
        CHECK_OK(zero_save(m->z, "run", NULL));
    }
    CHECK_OK(zero_save_wait(m->z, NULL));
    CHECK_OK(zero_save_wait(m->z, NULL)); /* nothing is left to wait for */
    uint64_t h = model_hash(m);
    if (m->rank == 0)
        *hash = h;
    struct zero_stats s;
    CHECK_OK(zero_get_stats(m->z, &s));
    CHECK_THAT(s.allocated.snapshot == s.planned.snapshot && s.allocated.total == s.planned.total);
    CHECK_THAT(m->z->plan->snapshot_bytes > 0);
}

static void load_latest(struct model_rank *m, void *arg)
{
    CHECK_OK(zero_load(m->z, "run"));
    CHECK_THAT(model_hash(m) == *(uint64_t *)arg);
    CHECK_THAT(model_t(m) == 12);
}

static int n_names;
static int count_name(void *arg, const char *name)
{
    n_names++;
    return name[0] == '.' ? -1 : 0;
}

static void test_asynchronous(void **state)
{
    for (int world = 1; world <= 3; world++) {
        uint64_t hash = 0;
        files = memory_files_open();
        struct model_options o = {
            .stage = world, .world = world, .async = true, .keep = 3, .files = memory_files_table(files)};
        model_run(&o, save_every_step, &hash);
        n_names = 0;
        assert_int_equal(zr_folder_walk(o.files, "run", NULL, count_name, NULL), 0);
        assert_int_equal(n_names, 3);
        o.scrambled = true;
        model_run(&o, load_latest, &hash);
        memory_files_close(files);
    }
}

/* A commit does not wait for the next save: later steps complete it. */
static void commit_by_steps(struct model_rank *m, void *arg)
{
    CHECK_OK(model_steps(m, 1));
    CHECK_OK(zero_save(m->z, "run", NULL));
    bool there = false;
    for (int i = 0; i < 2000 && !there; i++) {
        double found = 0;
        struct zr_manifest manifest;
        bool broken;
        CHECK_OK(model_steps(m, 1));
        if (m->rank == 0 &&
            !zr_checkpoint_open(m->z->files, "run/save-00000001-step-00000001", &broken, &manifest)) {
            zr_manifest_free(&manifest);
            found = 1;
        }
        CHECK_OK(zero_mean(m->z, &found, 1));
        there = found > 0;
    }
    CHECK_THAT(there);
    CHECK_OK(zero_save_wait(m->z, NULL));
}

static void test_commit_by_steps(void **state)
{
    files = memory_files_open();
    struct model_options o = {.stage = 3, .world = 3, .async = true, .files = memory_files_table(files)};
    model_run(&o, commit_by_steps, NULL);
    memory_files_close(files);
}

/* ---- where it may not be called ---- */

static void refuse(struct model_rank *m, void *arg)
{
    char longest[ZR_PATH_BYTES + 1];
    memset(longest, 'x', ZR_PATH_BYTES);
    longest[ZR_PATH_BYTES] = 0;
    CHECK_THAT(zero_save(NULL, "run", NULL) == ZERO_ERR_ARG && zero_load(NULL, "run") == ZERO_ERR_ARG);
    CHECK_THAT(zero_save(m->z, NULL, NULL) == ZERO_ERR_ARG && zero_save(m->z, "", NULL) == ZERO_ERR_ARG &&
               zero_load(m->z, "") == ZERO_ERR_ARG);
    CHECK_THAT(zero_save(m->z, longest, NULL) == ZERO_ERR_ARG && zero_load(m->z, longest) == ZERO_ERR_ARG);
    CHECK_OK(model_steps(m, 1)); /* a first step without gradients would be refused anyway */
    CHECK_OK(zero_begin(m->z, 1, ZERO_FORWARD));
    CHECK_THAT(zero_save(m->z, "run", NULL) == ZERO_ERR_ORDER && zero_load(m->z, "run") == ZERO_ERR_ORDER);
    CHECK_OK(zero_end(m->z, 1, ZERO_FORWARD));
    CHECK_OK(zero_save(m->z, "run", NULL));
    CHECK_OK(zero_begin(m->z, 1, ZERO_BACKWARD));
    CHECK_OK(zero_end(m->z, 1, ZERO_BACKWARD));
    CHECK_THAT(zero_save(m->z, "run", NULL) == ZERO_ERR_ORDER && zero_load(m->z, "run") == ZERO_ERR_ORDER);
    CHECK_THAT(strstr(zero_last_error(), "a step has begun") != NULL);
    CHECK_OK(zero_step(m->z, 0.1f, NULL));
    CHECK_OK(zero_load(m->z, "run"));
    CHECK_OK(model_steps(m, 1));
}

static void test_refused(void **state)
{
    for (int async = 0; async < 2; async++) {
        files = memory_files_open();
        struct model_options o = {.stage = 3, .world = 2, .async = async, .files = memory_files_table(files)};
        model_run(&o, refuse, NULL);
        memory_files_close(files);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_pair),   cmocka_unit_test(test_across_stages),
        cmocka_unit_test(test_asynchronous), cmocka_unit_test(test_commit_by_steps),
        cmocka_unit_test(test_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
