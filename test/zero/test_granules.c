/* SPDX-License-Identifier: Apache-2.0 */
/* test_granules.c: slices that differ in size between ranks, because granules are not cut. A step must
 * receive what the plan predicts, training must give the bits of equal slices, and zero_stats.path must name
 * how unequal slices travel.
 *
 * Some slices are small, and some are larger than NCCL's communicators pack. Runs on two to four ranks that
 * are threads, on the host or on the GPU stand-in. Gradients are small whole numbers, whose sums are exact in
 * any order. */
#include "test/cmocka.h"
#include "test/stand_in/half.h"
#include "test/zero/sample.h"
#include "test/zero/toy_net.h"
#include "test/zero/where.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TENSORS = 9, UNITS = 4, FROZEN = 6, WARM_STEPS = 4 };

static const struct zero_tensor shape_of[TENSORS] = {
    /* one rank has all of it, and it is too large to be packed */
    {.name = "matrix", .shape = {96, 256}, .dtype = ZERO_F32, .unit = 0, .granule = 96 * 256},
    {.name = "scales", .shape = {700}, .dtype = ZERO_BF16, .unit = 0, .granule = 48},
    {.name = "layers", .shape = {2, 3000}, .dtype = ZERO_F32, .unit = 1, .granule = 7, .flags = ZERO_STACKED},
    {.name = "half", .shape = {30000}, .dtype = ZERO_BF16, .unit = 1, .granule = 5000},
    /* small enough to be packed only in 16 bits */
    {.name = "rows", .shape = {9, 1000}, .dtype = ZERO_F32, .unit = 2, .granule = 9000},
    {.name = "equal", .shape = {4096}, .dtype = ZERO_BF16, .unit = 2},
    {.name = "frozen", .shape = {3000}, .dtype = ZERO_F32, .unit = 3, .granule = 3000},
    /* as large as all others together, so that at stage 3 not all units stay gathered */
    {.name = "even", .shape = {4, 24576}, .dtype = ZERO_F32, .unit = 0, .group = 1, .flags = ZERO_STACKED},
    {.name = "bias", .shape = {600}, .dtype = ZERO_F32, .unit = 3, .granule = 200},
};

static int64_t n_slices(int t)
{
    return shape_of[t].flags & ZERO_STACKED ? shape_of[t].shape[0] : 1;
}

/* Returns the number of elements of one slice. */
static int64_t n_elems(int t)
{
    int64_t n = 1;
    for (int d = 0; shape_of[t].shape[d]; d++)
        n *= shape_of[t].shape[d];
    return n / n_slices(t);
}

/* ---- one rank ---- */

struct setup {
    int stage;
    bool granules, loose; /* loose: deterministic is off */
    int accum, wire;      /* wire: cfg.memory.wire_dtype; 0: the tensors' dtypes */
    struct zero_plan_info plan;
    struct zero_traffic step[MAX_TOY_RANKS];
};

struct net {
    void *param[TENSORS], *grad[TENSORS], *own[TENSORS];
    struct zero_tensor table[TENSORS];
};

/* The configuration of the calling thread's rank. */
static _Thread_local struct zero_config open_cfg;

static void make_net(struct net *m, bool granules)
{
    memset(m, 0, sizeof *m);
    for (int t = 0; t < TENSORS; t++) {
        int64_t n = n_elems(t) * n_slices(t);
        m->own[t] = m->param[t] = malloc((size_t)n * 4);
        for (int64_t i = 0; i < n; i++) {
            float x = (float)((i + t) % 17) / 16;
            if (shape_of[t].dtype == ZERO_F32)
                ((float *)m->own[t])[i] = x;
            else
                ((uint16_t *)m->own[t])[i] = bf16_from_float(x);
        }
        m->table[t] = shape_of[t];
        m->table[t].granule *= granules;
        m->table[t].param = &m->param[t];
        m->table[t].grad = t == FROZEN ? NULL : &m->grad[t];
    }
}

static void free_net(struct net *m)
{
    for (int t = 0; t < TENSORS; t++)
        free(m->own[t]);
}

/* Returns the first element of the unit's slice of the tensor, or -1 if the unit has none. */
static int64_t first_of(int t, int unit)
{
    int64_t slice = unit - shape_of[t].unit;
    return slice >= 0 && slice < n_slices(t) ? slice * n_elems(t) : -1;
}

/* Adds every weight that forward reads to the hash. */
static void look(struct toy_rank *r, const struct net *m, int unit)
{
    for (int t = 0; t < TENSORS; t++) {
        int64_t first = first_of(t, unit), size = shape_of[t].dtype == ZERO_F32 ? 4 : 2;
        const unsigned char *at = m->param[t];
        for (int64_t i = first; first >= 0 && i < first + n_elems(t); i++) {
            uint32_t x = 0;
            memcpy(&x, at + i * size, (size_t)size);
            r->hash = (r->hash ^ x) * 0x100000001b3u;
        }
    }
}

static void add_gradient(struct net *m, int unit, int step, int micro)
{
    for (int t = 0; t < TENSORS; t++) {
        int64_t first = first_of(t, unit);
        for (int64_t i = first; first >= 0 && t != FROZEN && i < first + n_elems(t); i++) {
            float g = (float)((i + step) % 5 - 2 + micro % 3);
            uint16_t *half = m->grad[t];
            if (shape_of[t].dtype == ZERO_F32)
                ((float *)m->grad[t])[i] += g;
            else
                half[i] = bf16_from_float(bf16_to_float(half[i]) + g);
        }
    }
}

static int forward(struct toy_rank *r, struct net *m, zero_ctx *z)
{
    int err = 0;
    for (int u = 0; u < UNITS && !err; u++) {
        TOY_TRY(zero_begin(z, u, ZERO_FORWARD));
        where_wait(&open_cfg);
        if (!err)
            look(r, m, u);
        TOY_TRY(zero_end(z, u, ZERO_FORWARD));
    }
    return err;
}

static int backward(struct toy_rank *r, struct net *m, zero_ctx *z, int step, int micro)
{
    int err = 0;
    for (int u = UNITS; u-- > 0 && !err;) {
        TOY_TRY(zero_begin(z, u, ZERO_BACKWARD));
        where_wait(&open_cfg);
        if (!err)
            add_gradient(m, u, step, micro);
        TOY_TRY(zero_end(z, u, ZERO_BACKWARD));
    }
    return err;
}

static int step(struct toy_rank *r, struct net *m, zero_ctx *z, int k)
{
    const struct setup *s = r->arg;
    int err = 0;
    for (int a = 0; a < s->accum && !err; a++) {
        err = forward(r, m, z);
        err = err ? err : backward(r, m, z, k, a * r->world + r->rank);
    }
    TOY_TRY(zero_step(z, 1e-2f, NULL));
    return err;
}

/* Gets the traffic so far. A read first waits until everything on the stream has arrived. */
static int received(struct toy_rank *r, zero_ctx *z, struct zero_traffic *out)
{
    struct zero_stats stats = {0};
    float x;
    int err = 0;
    TOY_TRY(zero_read(z, 0, ZERO_VALUE_PARAM, 0, 1, &x));
    TOY_TRY(zero_get_stats(z, &stats));
    *out = stats.traffic;
    return err;
}

/* Returns the traffic of the step between a and b. From b to c there is only the read of received(), whose
 * traffic is subtracted. */
static struct zero_traffic step_between(const struct zero_traffic *a, const struct zero_traffic *b,
                                        const struct zero_traffic *c)
{
#define STEP(field) .field = 2 * b->field - a->field - c->field
    return (struct zero_traffic){STEP(n_all_gather), STEP(n_reduce_scatter), STEP(n_all_reduce),
                                 STEP(wire_bytes),   STEP(n_outer),          STEP(outer_bytes)};
#undef STEP
}

static void check_stats(struct toy_rank *r, zero_ctx *z, const struct setup *s)
{
    struct zero_stats stats = {.path = ""};
    int err = 0;
    TOY_TRY(zero_get_stats(z, &stats));
    bool says = strstr(stats.path, ", ragged by broadcasts") != NULL;
    if (!err && says != (where_has_gpu && s->granules))
        toy_wrong(r, "gathers go by \"%s\"", stats.path);
    if (!err && memcmp(&stats.allocated, &stats.planned, sizeof stats.planned))
        toy_wrong(r, "not what is planned is held");
}

static void train(struct toy_rank *r)
{
    struct setup *s = r->arg;
    struct zero_traffic at[3];
    struct net m;
    zero_ctx *z = NULL;
    int err = 0;
    make_net(&m, s->granules);
    open_cfg = toy_config(r, s->stage);
    where_open(r->rank, &open_cfg);
    struct zero_optim sgd = ZERO_OPTIM_INIT;
    sgd.optimizer = ZERO_SGD;
    sgd.weight_decay = open_cfg.optim.weight_decay;
    open_cfg.optim_groups = &sgd;
    open_cfg.n_optim_groups = 1;
    open_cfg.deterministic = !s->loose;
    open_cfg.grad_accum_steps = s->accum;
    open_cfg.memory.prefetch = 0; /* otherwise the slots would hold all units */
    open_cfg.memory.wire_dtype = s->wire;
    r->hash = 0xcbf29ce484222325u;
    if (r->rank == 0)
        TOY_TRY(zero_plan(m.table, TENSORS, &open_cfg, &s->plan));
    TOY_TRY(zero_wrap(&z, m.table, TENSORS, &open_cfg));
    for (int k = 0; k < WARM_STEPS && !err; k++)
        err = step(r, &m, z, k);
    for (int k = 0; k < 3 && !err; k++) {
        err = FIRST_ERROR(k == 1 ? step(r, &m, z, WARM_STEPS) : 0, received(r, z, &at[k]));
    }
    if (!err) {
        s->step[r->rank] = step_between(&at[0], &at[1], &at[2]);
        check_stats(r, z, s);
        err = forward(r, &m, z); /* hashes the weights after the last step */
    }
    zero_unwrap(&z);
    where_close(&open_cfg);
    free_net(&m);
}

/* ---- all ranks ---- */

static void describe(const struct setup *s, int world, char *what, size_t n)
{
    snprintf(what, n, "stage %d world %d granules %d deterministic %d accum %d wire %d", s->stage, world,
             s->granules, !s->loose, s->accum, s->wire);
}

static bool same_counts(const struct zero_traffic *a, const struct zero_traffic *b)
{
    return a->n_all_gather == b->n_all_gather && a->n_reduce_scatter == b->n_reduce_scatter &&
           a->n_all_reduce == b->n_all_reduce && a->n_outer == b->n_outer;
}

/* Compares the traffic of a step with the plan. The plan is that of rank 0; with granules it is that of a
 * rank that receives most. */
static void check_traffic(const struct setup *s, int world, const char *what)
{
    const struct zero_traffic *plan = &s->plan.traffic, *at = s->step;
    bool found = false;
    for (int k = 0; k < world; k++) {
        bool counts = s->granules || k == 0;
        if (!same_counts(plan, &at[k]) || (counts && at[k].wire_bytes > plan->wire_bytes))
            fail_msg("%s: rank %d received %lld bytes, %lld are planned (gathers %lld, %lld; reduces %lld, "
                     "%lld)",
                     what, k, (long long)at[k].wire_bytes, (long long)plan->wire_bytes,
                     (long long)at[k].n_all_gather, (long long)plan->n_all_gather,
                     (long long)at[k].n_reduce_scatter, (long long)plan->n_reduce_scatter);
        found |= counts && at[k].wire_bytes == plan->wire_bytes && at[k].outer_bytes == plan->outer_bytes;
    }
    if (!found)
        fail_msg("%s: no rank received %lld bytes, %lld of other groups; rank 0: %lld, %lld", what,
                 (long long)plan->wire_bytes, (long long)plan->outer_bytes, (long long)at[0].wire_bytes,
                 (long long)at[0].outer_bytes);
}

/* Trains on all ranks and returns the hash of the weights that they read. */
static uint64_t run(const struct setup *like, int world, bool granules)
{
    struct toy_rank r[TOY_HYBRID_WORLD];
    struct setup s = *like;
    char what[128];
    s.granules = granules;
    describe(&s, world, what, sizeof what);
    toy_run(world, train, &s, r, what);
    check_traffic(&s, world, what);
    for (int k = 1; k < world; k++)
        if (r[k].hash != r[0].hash)
            fail_msg("%s: rank %d saw other weights", what, k);
    return r[0].hash;
}

static void compare(const struct setup *s, int world)
{
    if (run(s, world, false) != run(s, world, true)) {
        char what[128];
        describe(s, world, what, sizeof what);
        fail_msg("%s: not the same with granules", what);
    }
}

/* Compares runs with and without granules: deterministic or not, with one micro-batch in full width or
 * several in bf16. Each stage below 4 runs half of these. */
static void test_ways(int stage, int world)
{
    for (int way = 0; way < 4; way++)
        if ((stage >= TOY_HSDP || (way + way / 2 + stage) % 2 == 0) && sample_has())
            compare(&(struct setup){.stage = stage,
                                    .loose = way & 1,
                                    .accum = way & 2 ? 2 : 1,
                                    .wire = way & 2 ? ZERO_BF16 : 0},
                    world);
}

static void stages(void **state)
{
    for (int stage = 0; stage <= 3; stage++)
        for (int world = 2; world <= 3; world++)
            test_ways(stage, world);
}

static void hybrids(void **state)
{
    for (int stage = TOY_HSDP; stage < TOY_STAGES; stage++)
        test_ways(stage, TOY_HYBRID_WORLD);
}

/* Wraps a bf16 tensor whose slices can be packed, but whose fp32 sums are too large for that. */
static void wrap_half(struct toy_rank *r)
{
    enum { ELEMS = 24000 };
    int *stage = r->arg, err = 0;
    void *param = calloc(ELEMS, 2), *grad = NULL, *own = param;
    const struct zero_tensor t = {.name = "half",
                                  .param = &param,
                                  .grad = &grad,
                                  .shape = {ELEMS},
                                  .dtype = ZERO_BF16,
                                  .granule = ELEMS / 2};
    struct zero_stats stats = {.path = ""};
    zero_ctx *z = NULL;
    open_cfg = toy_config(r, *stage);
    where_open(r->rank, &open_cfg);
    TOY_TRY(zero_wrap(&z, &t, 1, &open_cfg));
    TOY_TRY(zero_get_stats(z, &stats));
    bool says = strstr(stats.path, ", ragged by broadcasts") != NULL;
    if (!err && says != (where_has_gpu && *stage == 0))
        toy_wrong(r, "gathers go by \"%s\"", stats.path);
    zero_unwrap(&z);
    where_close(&open_cfg);
    free(own);
}

/* fp32 sums are gathered only at stage 0, where every rank has all of them. */
static void large_sums_of_small_slices(void **state)
{
    for (int stage = 0; stage <= 1; stage++) {
        struct toy_rank r[2];
        toy_run(2, wrap_half, &stage, r, stage ? "stage 1" : "stage 0");
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(stages),
        cmocka_unit_test(large_sums_of_small_slices),
        cmocka_unit_test(hybrids),
    };
    return cmocka_run_group_tests_name("granules", tests, NULL, NULL);
}
