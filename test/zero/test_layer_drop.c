/* SPDX-License-Identifier: Apache-2.0 */
/* test_layer_drop.c: units without a backward bracket in a step. The step does not update them at all: no
 * weight decay, no momentum, and no count for the bias correction. Trained weights have the same bits at
 * every stage, and are close to a reference that does the same in double. */
#include "test/cmocka.h"
#include "test/kernels/random.h"
#include "test/stand_in/half.h"
#include "test/zero/sample.h"
#include "test/zero/toy_net.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { STEPS = 8, SAVED = 5, MAX_ELEMS = 257 };
#define LR 0.02

enum pattern { EVERY_UNIT, HALVES, LAYERS, UPPER, PATTERNS };

struct setup {
    enum pattern pattern;
    int stage, world, accum, prefetch, optimizer;
    /* stage at which training continues from a checkpoint after SAVED steps; -1: no checkpoint */
    int loads_at;
    const char *folder;
    /* the model zeroes its gradients after each micro-batch, except where the pointer is NULL; stages 0 and
     * 1 */
    bool zeroes;
};

static bool draw(uint64_t a, uint64_t b)
{
    return random_mix(random_mix(a) + b) & 1;
}

/* Whether the unit has a backward bracket in that micro-batch, equally on all ranks. LAYERS drops some units
 * for whole steps, but never the head. */
static bool has_bracket(const struct setup *s, int unit, int step, int micro)
{
    if (s->pattern == EVERY_UNIT)
        return true;
    if (s->pattern == HALVES)
        return (unit < 2) == (step / 2 % 2 == 0);
    if (s->pattern == UPPER) /* the other layer of the stacked tensor never has one */
        return unit >= 2;
    return unit == 3 ||
           (draw((uint64_t)unit, (uint64_t)step) && draw((uint64_t)unit + 10, (uint64_t)(step * 8 + micro)));
}

static bool has_step(const struct setup *s, int unit, int step)
{
    bool has = false;
    for (int a = 0; a < s->accum; a++)
        has |= has_bracket(s, unit, step, a);
    return has;
}

/* ---- the reference ---- */

struct reference {
    struct toy m;
    double master[TOY_TENSORS][MAX_ELEMS], m1[TOY_TENSORS][MAX_ELEMS], m2[TOY_TENSORS][MAX_ELEMS];
    int t[TOY_UNITS];
    float grad[TOY_TENSORS][MAX_ELEMS];
};

static double value(const struct toy *m, int tensor, const void *at, int64_t i)
{
    return m->table[tensor].dtype == ZERO_F32 ? ((const float *)at)[i]
                                              : bf16_to_float(((const uint16_t *)at)[i]);
}

static int unit_of(const struct toy *m, int tensor, int64_t i)
{
    const struct zero_tensor *t = &m->table[tensor];
    return t->unit + (t->flags & ZERO_STACKED ? (int)(i / (toy_elems(tensor) / t->shape[0])) : 0);
}

static void update_reference(const struct setup *s, struct reference *r, int tensor, int64_t i, double g)
{
    double *w = &r->master[tensor][i], *m1 = &r->m1[tensor][i], *m2 = &r->m2[tensor][i];
    int t = r->t[unit_of(&r->m, tensor, i)];
    double decay = r->m.table[tensor].flags & ZERO_NO_DECAY ? 0 : 0.1;
    if (s->optimizer == ZERO_SGD) {
        *m1 = t == 1 ? g + decay * *w : 0.9 * *m1 + g + decay * *w;
        *w -= LR * *m1;
    } else {
        *m1 = 0.9 * *m1 + 0.1 * g;
        *m2 = 0.999 * *m2 + 0.001 * g * g;
        *w -= LR * (*m1 / (1 - pow(0.9, t)) / (sqrt(*m2 / (1 - pow(0.999, t))) + 1e-8) + decay * *w);
    }
    if (r->m.table[tensor].dtype == ZERO_F32)
        ((float *)r->m.param[tensor])[i] = (float)*w;
    else
        ((uint16_t *)r->m.param[tensor])[i] = bf16_ties_away((float)*w);
}

/* Computes all micro-batches of all ranks. */
static void reference_step(const struct setup *s, struct reference *r, int step)
{
    static double sum[TOY_TENSORS][MAX_ELEMS];
    memset(sum, 0, sizeof sum);
    for (int k = 0; k < s->world * s->accum; k++) {
        memset(r->grad, 0, sizeof r->grad);
        for (int u = 0; u < TOY_UNITS; u++)
            if (has_bracket(s, u, step, k % s->accum))
                toy_add_gradient(&r->m, u, step, k);
        for (int t = 0; t < TOY_TENSORS; t++)
            for (int64_t i = 0; t != TOY_FROZEN && i < toy_elems(t); i++)
                sum[t][i] += value(&r->m, t, r->grad[t], i);
    }
    for (int u = 0; u < TOY_UNITS; u++)
        r->t[u] += has_step(s, u, step);
    for (int t = 0; t < TOY_TENSORS; t++)
        for (int64_t i = 0; t != TOY_FROZEN && i < toy_elems(t); i++)
            if (has_step(s, unit_of(&r->m, t, i), step))
                update_reference(s, r, t, i, sum[t][i] / (s->world * s->accum));
}

static struct reference *train_reference(const struct setup *s)
{
    struct reference *r = calloc(1, sizeof *r);
    if (!r)
        abort();
    toy_make(&r->m);
    for (int t = 0; t < TOY_TENSORS; t++) {
        r->m.grad[t] = r->grad[t];
        for (int64_t i = 0; i < toy_elems(t); i++)
            r->master[t][i] = value(&r->m, t, r->m.param[t], i);
    }
    for (int step = 0; step < STEPS; step++)
        reference_step(s, r, step);
    return r;
}

/* ---- the library ---- */

static int train_step(const struct setup *s, struct toy *m, zero_ctx *z, int rank, int step)
{
    for (int a = 0; a < s->accum; a++) {
        OR_RETURN(toy_forward(m, z, true));
        for (int u = TOY_UNITS; u-- > 0;) {
            if (!has_bracket(s, u, step, a))
                continue;
            OR_RETURN(zero_begin(z, u, ZERO_BACKWARD));
            toy_add_gradient(m, u, step, rank * s->accum + a);
            OR_RETURN(zero_end(z, u, ZERO_BACKWARD));
        }
        for (int t = 0; s->zeroes && t < TOY_TENSORS; t++)
            if (m->grad[t])
                memset(m->grad[t], 0, (size_t)(toy_elems(t) * (m->table[t].dtype == ZERO_F32 ? 4 : 2)));
    }
    return zero_step(z, (float)LR, NULL);
}

static int n_states_of(const struct setup *s)
{
    return s->optimizer == ZERO_SGD ? 1 : 2;
}

static struct zero_config config_of(struct toy_rank *r, const struct setup *s, int stage)
{
    struct zero_config cfg = toy_config(r, stage);
    cfg.debug.log = toy_forget_line;
    cfg.grad_accum_steps = s->accum;
    cfg.memory.prefetch = s->prefetch;
    cfg.optim.optimizer = s->optimizer;
    if (s->optimizer == ZERO_SGD)
        cfg.optim.beta1 = 0.9f;
    return cfg;
}

static void compare(struct toy_rank *r, zero_ctx *z, const struct toy *m, const struct reference *ref)
{
    static const double allowed[] = {[ZERO_F32] = 2e-5, [ZERO_BF16] = 2e-3};
    float *x = malloc(MAX_ELEMS * sizeof *x);
    int err = 0;
    for (int t = 0; !err && x && t < TOY_TENSORS; t++) {
        if (t == TOY_FROZEN)
            continue;
        TOY_TRY(zero_read(z, t, ZERO_VALUE_MASTER, 0, toy_elems(t), x));
        for (int64_t i = 0; !err && i < toy_elems(t); i++)
            if (!(fabs(x[i] - ref->master[t][i]) <= allowed[m->table[t].dtype])) {
                toy_wrong(r, "%s[%d] is %.7g, not %.7g. ", m->table[t].name, (int)i, (double)x[i],
                          ref->master[t][i]);
                break;
            }
    }
    free(x);
}

static struct reference *wanted;

static void train(struct toy_rank *r)
{
    const struct setup *s = r->arg;
    struct toy m;
    zero_ctx *z = NULL;
    struct zero_config cfg = config_of(r, s, s->stage);
    struct zero_step_info info;
    int err = 0;
    toy_make(&m);
    TOY_TRY(zero_wrap(&z, m.table, TOY_TENSORS, &cfg));
    for (int step = 0; !err && step < STEPS; step++) {
        if (step == SAVED && s->loads_at >= 0) {
            TOY_TRY(zero_save(z, s->folder, NULL));
            TOY_TRY(zero_unwrap(&z));
            toy_free(&m);
            toy_make(&m);
            cfg = config_of(r, s, s->loads_at);
            TOY_TRY(zero_wrap(&z, m.table, TOY_TENSORS, &cfg));
            TOY_TRY(zero_load(z, s->folder));
        }
        TOY_TRY(train_step(s, &m, z, r->rank, step));
    }
    if (!err)
        compare(r, z, &m, wanted);
    TOY_TRY(toy_hash(z, n_states_of(s), &r->hash));
    info.t = -1;
    if (!err && s->loads_at < 0)
        TOY_TRY(zero_last_step(z, &info));
    if (!err && s->loads_at < 0 && info.t != STEPS) /* info.t counts the steps of the job */
        toy_wrong(r, "info.t is %lld", (long long)info.t);
    zero_unwrap(&z);
    toy_free(&m);
}

static uint64_t run(const struct setup *s)
{
    struct toy_rank r[MAX_TOY_RANKS];
    char what[160];
    snprintf(what, sizeof what,
             "pattern %d, stage %d, world %d, accum %d, prefetch %d, optimizer %d, loads at %d",
             (int)s->pattern, s->stage, s->world, s->accum, s->prefetch, s->optimizer, s->loads_at);
    wanted = train_reference(s);
    toy_ranks(s->world, train, (void *)(uintptr_t)s, r);
    toy_free(&wanted->m);
    free(wanted);
    toy_assert_well(r, s->world, what);
    for (int k = 1; k < s->world; k++)
        if (r[k].hash != r[0].hash)
            fail_msg("%s: rank %d has other values than rank 0", what, k);
    return r[0].hash;
}

static void all_stages_agree(void **state)
{
    for (int pattern = 0; pattern < PATTERNS; pattern++)
        for (int world = 1; world <= 4; world *= 2)
            for (int accum = 1; accum <= 3; accum += 2) {
                uint64_t want = 0;
                for (int stage = 0; stage < TOY_STAGES; stage++)
                    for (int prefetch = 0; prefetch <= 5; prefetch += 5) {
                        struct setup s = {
                            (enum pattern)pattern, stage, world, accum, prefetch, ZERO_ADAMW, -1, NULL};
                        if ((stage >= TOY_HSDP && world < TOY_HYBRID_WORLD) || !sample_has())
                            continue;
                        uint64_t hash = run(&s);
                        if (want && hash != want)
                            fail_msg("pattern %d, world %d, accum %d: stage %d, prefetch %d has other bits",
                                     pattern, world, accum, stage, prefetch);
                        want = hash;
                    }
            }
}

/* A micro-batch may leave out the unit that usually comes last in backward. Then the library does not know
 * that the micro-batch is over, and still reduces gradients while the model zeroes its gradients. */
static void the_model_may_zero_its_gradients(void **state)
{
    for (int pattern = 0; pattern < PATTERNS; pattern++)
        for (int world = 1; world <= 2; world++)
            for (int stage = 0; stage <= 1; stage++)
                if (sample_has())
                    run(&(struct setup){.pattern = (enum pattern)pattern,
                                        .stage = stage,
                                        .world = world,
                                        .accum = 3,
                                        .prefetch = 2,
                                        .optimizer = ZERO_ADAMW,
                                        .loads_at = -1,
                                        .zeroes = true});
}

static void other_optimizers(void **state)
{
    for (int pattern = 0; pattern < PATTERNS; pattern++)
        for (int stage = 0; stage < TOY_HSDP; stage++)
            if (sample_has())
                run(&(struct setup){(enum pattern)pattern, stage, 2, 1, 2, ZERO_SGD, -1, NULL});
}

/* The checkpoint has each unit's step count. */
static void a_save_keeps_the_counts(void **state)
{
    for (int pattern = 0; pattern < PATTERNS; pattern++)
        for (int stage = 0; stage < TOY_HSDP; stage++)
            for (int accum = 1; accum <= 3; accum += 2) {
                char folder[] = "/tmp/zero-layer-drop-XXXXXX";
                if (!sample_has())
                    continue;
                toy_make_folder(folder);
                struct setup s = {(enum pattern)pattern, stage, 2, accum, 2, ZERO_ADAMW, -1, folder};
                uint64_t want = run(&s);
                s.loads_at = 3 - stage;
                if (run(&s) != want)
                    fail_msg("pattern %d, accum %d: saved at stage %d and loaded at %d there are other bits",
                             pattern, accum, stage, s.loads_at);
                toy_remove_folder(folder);
            }
}

/* ---- zero_update.t, zero_set_step, norms, gradients, empty brackets ---- */

static int64_t seen_t[TOY_TENSORS];

static int see(void *arg, const struct zero_update *u)
{
    for (int t = 0; t < TOY_TENSORS; t++) {
        static const char *const names[TOY_TENSORS] = {"embedding", "layers", "bias", "frozen", "head"};
        if (!strcmp(names[t], u->tensor))
            seen_t[t] = u->t;
    }
    return 0;
}

static int backward_of(struct toy *m, zero_ctx *z, int unit, bool writes)
{
    OR_RETURN(zero_begin(z, unit, ZERO_BACKWARD));
    if (writes)
        toy_add_gradient(m, unit, 0, 0);
    return zero_end(z, unit, ZERO_BACKWARD);
}

static void count_per_unit(struct toy_rank *r)
{
    const int *stage = r->arg;
    struct toy m;
    zero_ctx *z = NULL;
    struct zero_config cfg = toy_config(r, *stage);
    int err = 0;
    cfg.debug.log = toy_forget_line;
    cfg.optim.update = see;
    cfg.optim.weight_decay = 0;
    toy_make(&m);
    memset(seen_t, 0, sizeof seen_t);
    TOY_TRY(zero_wrap(&z, m.table, TOY_TENSORS, &cfg));
    for (int step = 0; !err && step < 5; step++) {
        TOY_TRY(backward_of(&m, z, 3, true));
        if (step == 1 || step == 4)
            TOY_TRY(backward_of(&m, z, 0, step == 1)); /* in step 4 the bracket is empty, but counts */
        if (step == 2)
            TOY_TRY(zero_drop(z));
        else
            TOY_TRY(zero_step(z, 0.1f, NULL));
    }
    TOY_TRY(zero_save_wait(z, NULL));
    if (!err && (seen_t[4] != 4 || seen_t[0] != 2 || seen_t[1] != 0))
        toy_wrong(r, "counts are %d, %d and %d. ", (int)seen_t[4], (int)seen_t[0], (int)seen_t[1]);
    TOY_TRY(zero_set_step(z, 100));
    TOY_TRY(backward_of(&m, z, 2, true));
    TOY_TRY(zero_step(z, 0.1f, NULL));
    TOY_TRY(backward_of(&m, z, 0, true));
    TOY_TRY(zero_step(z, 0.1f, NULL));
    TOY_TRY(zero_save_wait(z, NULL));
    if (!err && (seen_t[1] != 101 || seen_t[0] != 101))
        toy_wrong(r, "behind zero_set_step(100) counts are %d and %d. ", (int)seen_t[1], (int)seen_t[0]);
    zero_unwrap(&z);
    toy_free(&m);
}

static void each_unit_has_a_count(void **state)
{
    for (int stage = 0; stage < TOY_HSDP; stage++) {
        struct toy_rank r[1];
        toy_run(1, count_per_unit, &stage, r, "a count for each unit");
    }
}

static void read_left_out(struct toy_rank *r)
{
    const int *stage = r->arg;
    struct toy m;
    zero_ctx *z;
    struct zero_config cfg = toy_config(r, *stage);
    float g[2 * 40 * 3];
    double norm = 0, sum = 0;
    cfg.debug.log = toy_forget_line;
    int err = toy_open(r, &m, &z, &cfg);
    for (int u = 0; u < TOY_UNITS; u++)
        TOY_TRY(backward_of(&m, z, u, true));
    TOY_TRY(zero_step(z, 0.1f, NULL));
    TOY_TRY(backward_of(&m, z, 2, true)); /* the second layer */
    TOY_TRY(zero_norm(z, &norm));
    TOY_TRY(zero_read(z, TOY_STACKED, ZERO_VALUE_GRAD, 0, 2 * 40 * 3, g));
    for (int i = 0; !err && i < 2 * 40 * 3; i++) {
        sum += (double)g[i] * g[i];
        if (i < 40 * 3 && g[i] != 0)
            toy_wrong(r, "the gradient of a layer that is left out is %g at %d. ", (double)g[i], i);
    }
    if (!err && fabs(sqrt(sum) - norm) > 1e-4 * norm)
        toy_wrong(r, "the norm is %g, not %g. ", norm, sqrt(sum));
    TOY_TRY(zero_step(z, 0.1f, NULL));
    toy_close(&m, &z);
}

static void it_has_no_gradient(void **state)
{
    int stage;
    toy_at_each_stage(read_left_out, &stage, &stage, "the gradient of what is left out");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(all_stages_agree),      cmocka_unit_test(the_model_may_zero_its_gradients),
        cmocka_unit_test(other_optimizers),      cmocka_unit_test(a_save_keeps_the_counts),
        cmocka_unit_test(each_unit_has_a_count), cmocka_unit_test(it_has_no_gradient),
    };
    return cmocka_run_group_tests_name("layer drop", tests, NULL, toy_remove_folders);
}
