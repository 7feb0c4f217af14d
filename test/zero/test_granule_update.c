/* SPDX-License-Identifier: Apache-2.0 */
/* test_granule_update.c: zero_tensor.granule, for an update that works on whole granules. Every range that
 * optim.update gets consists of whole granules, at any stage, world and group size. So a rule that needs all
 * of a row, or of a matrix, ends in the weights of a run on one rank. Some granules are so large that some
 * ranks own nothing. */
#include "test/cmocka.h"
#include "test/zero/toy_net.h"

#include <stdio.h>
#include <string.h>

enum { STEPS = 3, N_SETS = 4 };

/* Granules by tensor: a row; all of a layer; sizes that divide neither 32 nor the tensor; all of a tensor. */
static const int64_t sets[N_SETS][TOY_TENSORS] = {
    {5, 3, 70, 20, 257}, {165, 120, 70, 7, 257}, {7, 41, 33, 1, 48}, {64, 64, 64, 20, 64}};

struct grained {
    int stage, set;
    double norm[STEPS];
};

struct rule {
    struct toy_rank *r;
    const struct zero_tensor *table;
    const int64_t *granule;
    bool torn;
};

static int64_t layer_elems(const struct zero_tensor *t, int tensor)
{
    return toy_elems(tensor) / (t->flags & ZERO_STACKED ? t->shape[0] : 1);
}

/* Moves each element by its gradient minus the mean gradient of its granule. */
static void update_granule(const struct zero_update *u, int64_t first, int64_t n)
{
    float sum = 0;
    for (int64_t i = first; i < first + n; i++)
        sum += u->grad[i];
    for (int64_t i = first; i < first + n; i++)
        u->master[i] -= u->lr * (u->grad[i] - sum / (float)n);
}

static int update(void *arg, const struct zero_update *u)
{
    struct rule *rule = arg;
    int64_t granule = rule->granule[u->tensor_index],
            layer = layer_elems(&rule->table[u->tensor_index], u->tensor_index), at = u->first % layer;
    bool ends = at + u->n == layer;
    if (at % granule || (u->n % granule && !ends) || at + u->n > layer || at % 32 || (u->n % 32 && !ends))
        rule->torn = true;
    for (int64_t i = 0; i < u->n; i += granule)
        update_granule(u, i, u->n - i < granule ? u->n - i : granule);
    return 0;
}

/* Checks that zero_gather_all shows what zero_read gives. */
static int compare_all(struct toy_rank *r, struct toy *m, zero_ctx *z)
{
    unsigned char one[2048];
    int err = 0;
    for (int t = 0; t < TOY_TENSORS; t++) {
        size_t bytes = (size_t)toy_elems(t) * (m->table[t].dtype == ZERO_F32 ? 4 : 2);
        TOY_TRY(zero_gather_all(z, 0));
        if (!err)
            memcpy(one, m->param[t], bytes);
        TOY_TRY(zero_release_all(z));
        unsigned char other[2048] = {0};
        TOY_TRY(zero_read(z, t, ZERO_VALUE_PARAM, 0, toy_elems(t), other));
        if (!err && memcmp(one, other, bytes))
            toy_wrong(r, "tensor %d is not what was read", t);
        TOY_TRY(zero_write(z, t, ZERO_VALUE_PARAM, 0, toy_elems(t), other));
    }
    return err;
}

static void train(struct toy_rank *r)
{
    struct grained *g = r->arg;
    struct toy m;
    zero_ctx *z = NULL;
    toy_make(&m);
    struct rule rule = {r, m.table, sets[g->set], false};
    struct zero_config cfg = toy_config(r, g->stage);
    cfg.optim.update = update;
    cfg.optim.weight_decay = 0;
    cfg.optim.update_arg = &rule;
    cfg.memory.param_budget_bytes = 8192;
    for (int t = 0; t < TOY_TENSORS; t++)
        m.table[t].granule = sets[g->set][t];
    int err = 0;
    TOY_TRY(zero_wrap(&z, m.table, TOY_TENSORS, &cfg));
    for (int step = 0; !err && step < STEPS; step++) {
        double norm = 0;
        TOY_TRY(toy_forward(&m, z, true));
        TOY_TRY(toy_backward(&m, z, true, step, 0)); /* equal on every rank */
        TOY_TRY(zero_norm(z, &norm));
        if (r->rank == 0)
            g->norm[step] = norm;
        TOY_TRY(zero_step(z, 1e-2f, NULL));
    }
    if (!err)
        err = compare_all(r, &m, z);
    TOY_TRY(toy_hash(z, 0, &r->hash));
    TOY_TRY(zero_unwrap(&z));
    if (rule.torn)
        toy_wrong(r, "a granule was torn");
    toy_free(&m);
}

static struct grained run(int world, struct grained g, uint64_t *hash)
{
    struct toy_rank r[MAX_TOY_RANKS];
    char what[64];
    snprintf(what, sizeof what, "world %d stage %d set %d", world, g.stage, g.set);
    toy_run(world, train, &g, r, what);
    for (int k = 1; k < world; k++)
        if (r[k].hash != r[0].hash)
            fail_msg("%s: rank %d has other weights than rank 0", what, k);
    *hash = r[0].hash;
    return g;
}

static void test_granules(void **state)
{
    for (int set = 0; set < N_SETS; set++) {
        uint64_t expected, hash;
        struct grained one = run(1, (struct grained){.set = set}, &expected);
        for (int world = 1; world <= MAX_TOY_RANKS; world *= 2)
            for (int stage = 0; stage < TOY_STAGES; stage++) {
                bool tried = stage >= TOY_HSDP ? world == TOY_HYBRID_WORLD : world < 8 || stage == 3;
                if (!tried)
                    continue;
                struct grained g = run(world, (struct grained){.stage = stage, .set = set}, &hash);
                if (hash != expected || memcmp(g.norm, one.norm, sizeof one.norm))
                    fail_msg("set %d: world %d stage %d has other weights than one rank", set, world, stage);
            }
    }
}

/* With 3 ranks gradient means round differently, but granules must still be whole. */
static void test_three(void **state)
{
    for (int set = 0; set < N_SETS; set++)
        for (int stage = 0; stage <= 3; stage++) {
            uint64_t hash;
            run(3, (struct grained){.stage = stage, .set = set}, &hash);
        }
}

/* The parts of a file of states are multiples of 32 elements, but not of every granule. */
static void test_file(void **state)
{
    struct zero_config cfg = ZERO_CONFIG_INIT;
    struct zero_plan_info info;
    static void *nowhere;
    struct zero_tensor t = {
        .name = "w", .param = &nowhere, .grad = &nowhere, .shape = {320}, .dtype = ZERO_F32, .granule = 5};
    cfg.launch.world = 1;
    cfg.memory.states = ZERO_STATES_FILE;
    cfg.memory.states_dir = "/tmp";
    assert_int_equal(zero_plan(&t, 1, &cfg, &info), 0); /* a named optimizer does not need whole granules */
    cfg.optim.update = update;
    cfg.optim.weight_decay = 0;
    assert_int_equal(zero_plan(&t, 1, &cfg, &info), ZERO_ERR_ARG);
    assert_non_null(strstr(zero_last_error(), "tensors[0] (w): granule is 5"));
    t.granule = 16;
    assert_int_equal(zero_plan(&t, 1, &cfg, &info), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_granules), cmocka_unit_test(test_three),
                                       cmocka_unit_test(test_file)};
    return cmocka_run_group_tests_name("granules", tests, NULL, NULL);
}
