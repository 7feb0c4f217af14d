/* SPDX-License-Identifier: Apache-2.0 */
/* test_tune.c: numbers that change between steps: clip, the optimizers' numbers, the step number,
 * micro-batches per step, and states from elsewhere.
 *
 * A toy model trains at every stage on one to three ranks that are threads. A change on the way must give the
 * same bits as a configuration that has the number from the start. */
#include "test/cmocka.h"
#include "test/zero/toy_net.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { STEPS = 6, WORLDS = 3, MAX_VALUES = 2048 };

/* A number that changes from first to then. */
struct knob {
    const char *key;
    int optimizer; /* of every group */
    float first, then;
    int32_t group; /* group 1 has two of the tensors */
};

static const struct knob knobs[] = {
    {"clip", ZERO_ADAMW, 0, 0.05f},         {"clip", ZERO_SGD, 0.05f, 0},
    {"beta1", ZERO_ADAMW, 0.9f, 0},         {"beta2", ZERO_ADAM, 0.999f, 0.5f},
    {"eps", ZERO_ADAMW, 1e-8f, 1e-2f},      {"weight_decay", ZERO_ADAMW, 0.1f, 0.5f},
    {"beta1", ZERO_SGD, 0.9f, 0.25f},       {"weight_decay", ZERO_SGD, 0, 0.25f},
    {"beta2", ZERO_RMSPROP, 0.99f, 0.5f},   {"beta1", ZERO_LION, 0.9f, 0.1f},
    {"beta1", ZERO_NESTEROV, 0.9f, 0.125f}, {"eps", ZERO_RMSPROP, 1e-8f, 1e-3f},
    {"grad_scale", ZERO_ADAMW, 1, 1e6f},    {"grad_scale", ZERO_SGD, 1, -0.5f},
    {"lr_scale", ZERO_ADAMW, 1, 0.25f},     {"lr_scale", ZERO_SGD, 0.5f, 0, 1},
    {"lr_scale", ZERO_ADAMW, 0, 1.5f, 1},   {"weight_decay", ZERO_ADAMW, 0.1f, 0.5f, 1},
    {"beta1", ZERO_ADAMW, 0.9f, 0.5f, 1},   {"eps", ZERO_ADAMW, 1e-8f, 1e-2f, 1}};
enum { N_KNOBS = sizeof knobs / sizeof *knobs };

struct setup {
    int stage;
    const struct knob *knob;
    bool starts_so; /* the configuration has the number; else it changes before the first step */
    bool resumes;   /* half way, a new context with the number in its configuration loads a checkpoint */
    bool waits;     /* waits for every step's outcome */
    int optimizer, way;
    bool brackets, in_place; /* how micro-batches are summed */
    char *folder;
};

static int n_states_of(int optimizer)
{
    return optimizer == ZERO_ADAMW || optimizer == ZERO_ADAM ? 2 : 1;
}

/* group: memory for group 1 */
static void put(struct zero_config *cfg, const struct knob *k, float x, struct toy *m,
                struct zero_optim *group)
{
    struct zero_config of_group = ZERO_CONFIG_INIT;
    char text[64];
    snprintf(text, sizeof text, "%.9g", (double)x);
    cfg->optim.optimizer = of_group.optim.optimizer = k->optimizer;
    if (!k->group)
        of_group.optim.weight_decay = 0.1f;
    if (k->optimizer == ZERO_SGD)
        cfg->optim.beta1 = of_group.optim.beta1 = 0.9f;
    if (zero_config_set(k->group ? &of_group : cfg, k->key, text))
        abort();
    *group = of_group.optim;
    cfg->optim_groups = group;
    cfg->n_optim_groups = 1;
    m->table[0].group = m->table[TOY_STACKED].group = 1;
}

static int tune(zero_ctx *z, const struct knob *k)
{
    bool of_step = !strcmp(k->key, "clip") || !strcmp(k->key, "grad_scale");
    return zero_tune(z, of_step ? ZERO_ALL : k->group, k->key, (double)k->then);
}

static int train(struct toy *m, zero_ctx *z, int step, int rank, struct zero_step_info *info)
{
    return FIRST_ERROR(toy_forward(m, z, true), toy_backward(m, z, true, step, rank),
                       zero_step(z, 1e-2f, info));
}

/* ---- numbers ---- */

static void from_the_start(struct toy_rank *r)
{
    const struct setup *s = r->arg;
    struct toy m;
    struct zero_optim group;
    zero_ctx *z = NULL;
    struct zero_config cfg = toy_config(r, s->stage);
    int err = 0;
    toy_make(&m);
    put(&cfg, s->knob, s->starts_so ? s->knob->then : s->knob->first, &m, &group);
    TOY_TRY(zero_wrap(&z, m.table, TOY_TENSORS, &cfg));
    if (!s->starts_so)
        TOY_TRY(tune(z, s->knob));
    for (int step = 0; !err && step < 3; step++)
        TOY_TRY(train(&m, z, step, r->rank, NULL));
    TOY_TRY(toy_hash(z, n_states_of(s->knob->optimizer), &r->hash));
    zero_unwrap(&z);
    toy_free(&m);
}

static void tuned_before_the_first_step(void **state)
{
    for (int i = 0; i < N_KNOBS; i++)
        for (int stage = 0; stage <= 3; stage++) {
            struct setup s = {.stage = stage, .knob = &knobs[i], .starts_so = true};
            int world = 1 + (i + stage) % WORLDS;
            struct toy_rank a[WORLDS], b[WORLDS];
            toy_run(world, from_the_start, &s, a, "configured");
            s.starts_so = false;
            toy_run(world, from_the_start, &s, b, "tuned");
            for (int k = 0; k < world; k++)
                if (b[k].hash != a[0].hash)
                    fail_msg("%s of optimizer %d, group %d, stage %d, world %d: other weights", knobs[i].key,
                             knobs[i].optimizer, knobs[i].group, stage, world);
        }
}

/* Changes a number half way: by zero_tune, or by a checkpoint and another configuration. */
static void half_way(struct toy_rank *r)
{
    const struct setup *s = r->arg;
    struct toy m, again;
    struct zero_optim group;
    zero_ctx *z = NULL;
    struct zero_config cfg = toy_config(r, s->stage);
    int err = 0;
    toy_make(&m);
    toy_make(&again);
    put(&cfg, s->knob, s->knob->first, &m, &group);
    TOY_TRY(zero_wrap(&z, m.table, TOY_TENSORS, &cfg));
    struct toy *now = &m;
    for (int step = 0; !err && step < STEPS; step++) {
        if (step == STEPS / 2 && s->resumes) {
            TOY_TRY(zero_save(z, s->folder, NULL));
            TOY_TRY(zero_unwrap(&z));
            put(&cfg, s->knob, s->knob->then, &again, &group);
            now = &again;
            TOY_TRY(zero_wrap(&z, now->table, TOY_TENSORS, &cfg));
            TOY_TRY(zero_load(z, s->folder));
        } else if (step == STEPS / 2) {
            TOY_TRY(tune(z, s->knob));
        }
        TOY_TRY(train(now, z, step, r->rank, NULL));
    }
    TOY_TRY(toy_hash(z, n_states_of(s->knob->optimizer), &r->hash));
    zero_unwrap(&z);
    toy_free(&m);
    toy_free(&again);
}

static void tuned_half_way(void **state)
{
    for (int i = 0; i < N_KNOBS; i++) {
        char folder[] = "/tmp/zero-tune-XXXXXX", command[64];
        assert_non_null(mkdtemp(folder));
        struct setup s = {.stage = i % 4, .knob = &knobs[i], .folder = folder};
        int world = 1 + (i + i / 4) % WORLDS;
        struct toy_rank a[WORLDS], b[WORLDS];
        toy_run(world, half_way, &s, a, "tuned half way");
        s.resumes = true;
        toy_run(world, half_way, &s, b, "resumed");
        snprintf(command, sizeof command, "rm -r %s", folder);
        assert_int_equal(system(command), 0);
        for (int k = 0; k < world; k++)
            if (b[k].hash != a[0].hash)
                fail_msg("%s of optimizer %d, stage %d: other weights", knobs[i].key, knobs[i].optimizer,
                         i % 4);
    }
}

/* Changes numbers at every step while earlier steps are still running. Each step must use its own numbers. */
static void every_step(struct toy_rank *r)
{
    const struct setup *s = r->arg;
    struct toy m;
    zero_ctx *z;
    struct zero_config cfg = toy_config(r, s->stage);
    struct zero_step_info info;
    int err = toy_open(r, &m, &z, &cfg);
    for (int step = 0; !err && step < 4 * STEPS; step++) {
        TOY_TRY(zero_tune(z, ZERO_ALL, "clip", 0.001 * (step + 1)));
        TOY_TRY(zero_tune(z, 0, "beta1", 0.9 - 0.03 * step));
        TOY_TRY(zero_tune(z, ZERO_ALL, "grad_scale", 1 + 0.25 * step));
        TOY_TRY(zero_tune(z, ZERO_ALL, "beta2", 0.999 - 0.03 * step));
        TOY_TRY(zero_tune(z, 0, "eps", 1e-8 * (step + 1)));
        TOY_TRY(zero_tune(z, 0, "weight_decay", 0.1 * step));
        TOY_TRY(train(&m, z, step, r->rank, s->waits ? &info : NULL));
        double nothing = 0;
        if (s->waits)
            TOY_TRY(zero_mean(z, &nothing, 1));
    }
    TOY_TRY(toy_hash(z, 2, &r->hash));
    toy_close(&m, &z);
}

static void tuned_at_every_step(void **state)
{
    for (int world = 1; world <= WORLDS; world++)
        for (int stage = 0; stage <= 3; stage++) {
            struct setup s = {.stage = stage, .waits = true};
            struct toy_rank a[WORLDS], b[WORLDS];
            toy_run(world, every_step, &s, a, "waiting");
            s.waits = false;
            toy_run(world, every_step, &s, b, "not waiting");
            assert_int_equal(a[0].hash, b[0].hash);
        }
}

/* ---- micro-batches per step ---- */

enum { MAX_ACCUM = 5 };

static int accumulate(struct toy *m, zero_ctx *z, const struct toy_rank *r, int step, int accum)
{
    const struct setup *s = r->arg;
    for (int k = 0; k < accum; k++) {
        if (k && !s->brackets && !s->in_place)
            OR_RETURN(zero_micro(z));
        OR_RETURN(toy_forward(m, z, s->brackets));
        OR_RETURN(toy_backward(m, z, s->brackets, step, k * r->world + r->rank));
    }
    return zero_step(z, 1e-2f, NULL);
}

/* Changes micro-batches per step in most steps: by zero_tune, or by a checkpoint and another
 * configuration. */
static void other_accum(struct toy_rank *r)
{
    static const int accum_of[STEPS] = {2, 2, MAX_ACCUM, 1, 3, 4};
    const struct setup *s = r->arg;
    struct toy m;
    zero_ctx *z = NULL;
    struct zero_config cfg = toy_config(r, s->stage);
    struct zero_stats stats = {0};
    int err = 0, n_micro = 0, n_replans = 0;
    cfg.memory.grad_in_place = s->in_place;
    if (s->in_place)
        cfg.deterministic = 0;
    cfg.clip = 0.05f;
    cfg.memory.prefetch = 1; /* with more, all units are resident */
    toy_make(&m);
    for (int step = 0; !err && step < STEPS; step++) {
        if (s->resumes && step && accum_of[step] != accum_of[step - 1]) {
            TOY_TRY(zero_save(z, s->folder, NULL));
            TOY_TRY(zero_unwrap(&z));
            toy_free(&m);
            toy_make(&m);
        }
        if (!z) {
            m.table[4].flags = s->in_place ? 0 : m.table[4].flags;
            cfg.grad_accum_steps = accum_of[step];
            cfg.max_grad_accum_steps = s->resumes ? 0 : MAX_ACCUM;
            TOY_TRY(zero_wrap(&z, m.table, TOY_TENSORS, &cfg));
            if (step)
                TOY_TRY(zero_load(z, s->folder));
        } else if (!s->resumes) {
            TOY_TRY(zero_tune(z, ZERO_ALL, "grad_accum_steps", accum_of[step]));
        }
        TOY_TRY(accumulate(&m, z, r, step, accum_of[step]));
        n_micro += accum_of[step] * r->world;
        TOY_TRY(zero_get_stats(z, &stats));
        n_replans = step ? n_replans : (int)stats.n_replans;
        if (!err && (stats.grad_accum_steps != accum_of[step] || stats.n_micro != n_micro ||
                     (!s->resumes && stats.n_replans != n_replans)))
            toy_wrong(r, "step %d: grad_accum_steps %d, n_micro %lld, n_replans %lld", step,
                      stats.grad_accum_steps, (long long)stats.n_micro, (long long)stats.n_replans);
    }
    TOY_TRY(toy_hash(z, 2, &r->hash));
    zero_unwrap(&z);
    toy_free(&m);
}

static void other_micro_batches(void **state)
{
    for (int world = 1; world <= TOY_HYBRID_WORLD; world++)
        for (int stage = 0; stage < TOY_STAGES; stage++) {
            char folder[] = "/tmp/zero-tune-XXXXXX", what[64];
            struct setup s = {.stage = stage,
                              .brackets = stage > 1 || (world + stage) % 2,
                              .in_place = stage < TOY_HSDP && (world / 2 + stage) % 2,
                              .folder = folder};
            struct toy_rank a[TOY_HYBRID_WORLD], b[TOY_HYBRID_WORLD];
            if (world < TOY_HYBRID_WORLD && !toy_has_stage(world, stage))
                continue;
            toy_make_folder(folder);
            snprintf(what, sizeof what, "stage %d, brackets %d, in place %d", s.stage, s.brackets,
                     s.in_place);
            toy_run(world, other_accum, &s, a, what);
            s.resumes = true;
            toy_run(world, other_accum, &s, b, what);
            for (int k = 0; k < world; k++)
                if (b[k].hash != a[0].hash)
                    fail_msg("%s, world %d: other weights", what, world);
            toy_remove_folder(folder);
        }
}

/* The plan's memory is for the largest number of micro-batches. */
static void plans_for_the_most(void **state)
{
    struct toy m;
    toy_make(&m);
    for (int stage = 0; stage <= 3; stage++) {
        struct zero_config cfg = ZERO_CONFIG_INIT;
        struct zero_plan_info most, least;
        cfg.stage = stage;
        cfg.launch.world = 2;
        cfg.max_grad_accum_steps = 8;
        assert_int_equal(zero_plan(m.table, TOY_TENSORS, &cfg, &least), 0);
        cfg.grad_accum_steps = 8;
        assert_int_equal(zero_plan(m.table, TOY_TENSORS, &cfg, &most), 0);
        assert_memory_equal(&least.bytes, &most.bytes, sizeof most.bytes);
        assert_true(least.traffic.wire_bytes < most.traffic.wire_bytes);
    }
    toy_free(&m);
}

static void accumulate_wrongly(struct toy_rank *r)
{
    const struct setup *s = r->arg;
    struct toy m;
    zero_ctx *z = NULL;
    struct zero_action a;
    struct zero_config cfg = toy_config(r, s->stage);
    double scale;
    int err = 0;
    cfg.grad_accum_steps = 2;
    toy_make(&m);
    cfg.max_grad_accum_steps = 3 + r->rank;
    if (r->world > 1)
        toy_expect(r, zero_wrap(&z, m.table, TOY_TENSORS, &cfg), ZERO_ERR_MISMATCH,
                   "max_grad_accum_steps is 4 on rank 1 and 3 on rank 0");
    cfg.max_grad_accum_steps = s->way ? 0 : MAX_ACCUM;
    TOY_TRY(zero_wrap(&z, m.table, TOY_TENSORS, &cfg));
#define TUNE(x) zero_tune(z, ZERO_ALL, "grad_accum_steps", x)
    const char *most =
        s->way ? "allowed: 1 to 2 (see max_grad_accum_steps)" : "allowed: 1 to 5 (see max_grad_accum_steps)";
    toy_expect(r, TUNE(MAX_ACCUM + 1), ZERO_ERR_ARG, "zero_tune: grad_accum_steps is 6; ");
    const double wrong[] = {0, -1, 1.5, NAN, 4294967297.0, MAX_ACCUM + 1};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++)
        toy_expect(r, TUNE(wrong[i]), ZERO_ERR_ARG, most);
    toy_expect(r, zero_tune(z, 0, "grad_accum_steps", 2), ZERO_ERR_ARG,
               "group is 0 but grad_accum_steps applies to the whole step");
    TOY_TRY(zero_loss_scale(z, 1, &scale));
    toy_expect(r, TUNE(1), ZERO_ERR_ORDER, "grad_accum_steps after zero_loss_scale");
    TOY_TRY(toy_forward(&m, z, true));
    TOY_TRY(toy_backward(&m, z, true, 0, r->rank));
    toy_expect(r, TUNE(1), ZERO_ERR_ORDER, "zero_tune: a step has begun");
    TOY_TRY(zero_micro(z));
    TOY_TRY(zero_drop(z));
    TOY_TRY(TUNE(1));
    TOY_TRY(zero_next(z, &a));
    toy_expect(r, TUNE(2), ZERO_ERR_ORDER, "zero_tune: actions of the step have begun");
    TOY_TRY(toy_forward(&m, z, true));
    TOY_TRY(zero_finish(z));
    TOY_TRY(zero_next(z, &a));
    TOY_TRY(toy_backward(&m, z, true, 0, r->rank));
    TOY_TRY(zero_finish(z));
    TOY_TRY(zero_next(z, &a));
    if (!err && a.micro_batch != -1)
        toy_wrong(r, "the step has micro-batch %d", a.micro_batch);
    TOY_TRY(zero_step(z, 1e-2f, NULL));
    TOY_TRY(zero_evaluate(z));
    toy_expect(r, TUNE(2), ZERO_ERR_ORDER, "zero_tune: actions of an evaluation have begun");
    for (a.micro_batch = 0; !err && a.micro_batch >= 0;) {
        TOY_TRY(zero_next(z, &a));
        if (a.micro_batch >= 0) {
            TOY_TRY(toy_forward(&m, z, true));
            TOY_TRY(zero_finish(z));
        }
    }
    TOY_TRY(TUNE(2));
    TOY_TRY(zero_loss_scale(z, 1, &scale)); /* one token per rank in two micro-batches */
    if (!err && scale != 2)
        toy_wrong(r, "the loss is scaled by %g", scale);
    TOY_TRY(toy_forward(&m, z, true));
    TOY_TRY(toy_backward(&m, z, true, 0, r->rank));
    if (!err)
        toy_expect(r, zero_step(z, 1e-2f, NULL), ZERO_ERR_ORDER, "and grad_accum_steps is 2");
#undef TUNE
    zero_unwrap(&z);
    toy_free(&m);
}

static void wrong_micro_batches(void **state)
{
    struct setup s = {};
    toy_at_each_stage(accumulate_wrongly, &s, &s.stage, "wrong micro-batches");
    s.way = 1;
    toy_at_each_stage(accumulate_wrongly, &s, &s.stage, "max_grad_accum_steps 0");
}

/* ---- states from elsewhere, and the step number ---- */

static struct zero_config config_of(struct toy_rank *r, const struct setup *s)
{
    struct zero_config cfg = toy_config(r, s->stage);
    cfg.optim.optimizer = s->optimizer;
    if (s->optimizer == ZERO_SGD)
        cfg.optim.beta1 = 0.9f;
    return cfg;
}

/* How states get into another context. */
enum { BY_WRITING = 1, BY_WRITING_AND_COUNT, SAVED_UNTRAINED };

static void carry_over(struct toy_rank *r)
{
    const struct setup *s = r->arg;
    int way = s->way;
    struct toy m, other;
    zero_ctx *from = NULL, *to = NULL;
    struct zero_config cfg = config_of(r, s);
    struct zero_step_info info;
    int err = 0, n_states = n_states_of(s->optimizer);
    uint64_t hash = 0;
    toy_make(&m);
    toy_make(&other);
    TOY_TRY(zero_wrap(&from, m.table, TOY_TENSORS, &cfg));
    for (int step = 0; !err && step < 2; step++)
        TOY_TRY(train(&m, from, step, r->rank, NULL));
    cfg.launch.name = "to"; /* both contexts are open at the same time */
    TOY_TRY(zero_wrap(&to, other.table, TOY_TENSORS, &cfg));
    for (int t = 0; t < TOY_TENSORS; t++)
        for (int value = ZERO_VALUE_MASTER; t != TOY_FROZEN && value < ZERO_VALUE_STATE + n_states; value++) {
            float x[MAX_VALUES];
            TOY_TRY(zero_read(from, t, value, 0, toy_elems(t), x));
            TOY_TRY(zero_write(to, t, value, 0, toy_elems(t), x));
        }
    if (way == BY_WRITING_AND_COUNT)
        TOY_TRY(zero_set_step(to, 2));
    if (way == SAVED_UNTRAINED) {
        TOY_TRY(zero_save(to, s->folder, NULL));
        TOY_TRY(zero_unwrap(&to));
        toy_free(&other);
        toy_make(&other);
        TOY_TRY(zero_wrap(&to, other.table, TOY_TENSORS, &cfg));
        TOY_TRY(zero_load(to, s->folder));
    }
    for (int step = 2; !err && step < 4; step++) {
        TOY_TRY(train(&m, from, step, r->rank, NULL));
        TOY_TRY(train(&other, to, step, r->rank, &info));
        if (!err && info.t != (way == BY_WRITING_AND_COUNT ? step + 1 : step - 1))
            toy_wrong(r, "step %d: t is %d", step, (int)info.t);
    }
    TOY_TRY(toy_hash(from, n_states, &r->hash));
    TOY_TRY(toy_hash(to, n_states, &hash));
    if (!err && hash != r->hash)
        toy_wrong(r, "the states were lost on the way");
    zero_unwrap(&from);
    zero_unwrap(&to);
    toy_free(&m);
    toy_free(&other);
}

/* States continue bit by bit. Optimizers without bias correction do so with any step count. */
static void states_go_on(void **state)
{
    static const struct {
        int optimizer, way;
    } cases[] = {{ZERO_ADAMW, BY_WRITING_AND_COUNT}, {ZERO_ADAM, BY_WRITING_AND_COUNT},
                 {ZERO_SGD, BY_WRITING_AND_COUNT},   {ZERO_SGD, BY_WRITING},
                 {ZERO_NESTEROV, BY_WRITING},        {ZERO_RMSPROP, BY_WRITING},
                 {ZERO_SGD, SAVED_UNTRAINED},        {ZERO_NESTEROV, SAVED_UNTRAINED}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (int stage = 0; stage <= 3; stage++) {
            char folder[] = "/tmp/zero-tune-XXXXXX", command[64];
            assert_non_null(mkdtemp(folder));
            struct setup s = {
                .stage = stage, .optimizer = cases[i].optimizer, .way = cases[i].way, .folder = folder};
            struct toy_rank r[WORLDS];
            int world = 1 + ((int)i + stage) % WORLDS;
            char what[64];
            snprintf(what, sizeof what, "optimizer %d, way %d, stage %d", s.optimizer, s.way, stage);
            toy_ranks(world, carry_over, &s, r);
            snprintf(command, sizeof command, "rm -r %s", folder);
            assert_int_equal(system(command), 0);
            toy_assert_well(r, world, what);
        }
}

/* ---- wrong calls ---- */

static int user_update(void *arg, const struct zero_update *u)
{
    for (int64_t i = 0; i < u->n; i++)
        u->master[i] -= u->lr * u->grad[i];
    return 0;
}

static void call_wrongly(struct toy_rank *r)
{
    const struct setup *s = r->arg;
    struct toy m;
    zero_ctx *z = NULL;
    struct zero_config cfg = toy_config(r, s->stage);
    int err = 0;
    toy_make(&m);
    cfg.optim.optimizer = ZERO_SGD;
    struct zero_optim groups[2] = {ZERO_OPTIM_INIT, ZERO_OPTIM_INIT};
    groups[0].optimizer = ZERO_RMSPROP;
    groups[1].update = user_update;
    cfg.optim_groups = groups;
    cfg.n_optim_groups = 2;
    m.table[0].group = 1;
    m.table[TOY_STACKED].group = 2;
    TOY_TRY(zero_wrap(&z, m.table, TOY_TENSORS, &cfg));
    TOY_TRY(train(&m, z, 0, r->rank, NULL));
    toy_expect(r, zero_tune(NULL, ZERO_ALL, "clip", 1), ZERO_ERR_ARG, "zero_tune: z is NULL");
    toy_expect(r, zero_tune(z, 0, NULL, 1), ZERO_ERR_ARG, "zero_tune: key is NULL");
    toy_expect(r, zero_tune(z, 0, "lr", 1), ZERO_ERR_ARG,
               "zero_tune: key is \"lr\"; allowed: clip, grad_scale, grad_accum_steps");
    toy_expect(r, zero_tune(z, ZERO_ALL, "grad_scale", 0), ZERO_ERR_ARG,
               "zero_tune: grad_scale is 0; allowed");
    toy_expect(r, zero_tune(z, 1, "grad_scale", 1), ZERO_ERR_ARG,
               "group is 1 but grad_scale applies to the whole step; allowed: ZERO_ALL (-1)");
    toy_expect(r, zero_tune(z, 1, "lr_scale", -1), ZERO_ERR_ARG,
               "zero_tune: lr_scale is -1; allowed: a finite");
    toy_expect(r, zero_tune(z, ZERO_ALL, "clip", NAN), ZERO_ERR_ARG,
               "zero_tune: clip is nan; allowed: a finite number");
    toy_expect(r, zero_tune(z, ZERO_ALL, "clip", -1), ZERO_ERR_ARG, "zero_tune: clip is -1");
    toy_expect(r, zero_tune(z, ZERO_ALL, "clip", 1e300), ZERO_ERR_ARG, "zero_tune: clip is 1e+300");
    toy_expect(r, zero_tune(z, ZERO_ALL, "clip", 1e-300), ZERO_ERR_ARG, "zero_tune: clip is 1e-300");
    toy_expect(r, zero_tune(z, 0, "clip", 1), ZERO_ERR_ARG, "clip applies to the whole step");
    toy_expect(r, zero_tune(z, 0, "weight_decay", INFINITY), ZERO_ERR_ARG, "zero_tune: weight_decay is inf");
    toy_expect(r, zero_tune(z, 1, "beta2", 1), ZERO_ERR_ARG, "zero_tune: beta2 is 1; allowed: 0 and");
    toy_expect(r, zero_tune(z, 1, "beta2", 0.99999999999), ZERO_ERR_ARG, "zero_tune: beta2 is");
    toy_expect(r, zero_tune(z, 1, "beta2", ZERO_AUTO), ZERO_ERR_ARG, "zero_tune: beta2 is -1");
    toy_expect(r, zero_tune(z, 1, "beta1", 0.5), ZERO_ERR_ARG, "group 1 uses rmsprop, which has no beta1");
    toy_expect(r, zero_tune(z, 0, "beta2", 0.5), ZERO_ERR_ARG, "group 0 uses sgd, which has no beta2");
    toy_expect(r, zero_tune(z, 0, "eps", 0.5), ZERO_ERR_ARG, "sgd, which has no eps");
    toy_expect(r, zero_tune(z, 3, "beta1", 0.5), ZERO_ERR_ARG, "zero_tune: group is 3; allowed: 0..2");
    toy_expect(r, zero_tune(z, -2, "beta1", 0.5), ZERO_ERR_ARG, "zero_tune: group is -2; allowed: 0..2");
    toy_expect(r, zero_tune(z, 0, "beta1", 0.5), ZERO_ERR_ARG,
               "beta1 of group 0 (sgd) is 0.5, but was 0 at zero_wrap, which then keeps no momentum");
    toy_expect(r, zero_tune(z, ZERO_ALL, "beta2", 0.5), ZERO_ERR_ARG, "group 0 uses sgd, which has no beta2");
    toy_expect(r, zero_tune(z, 2, "weight_decay", 0.5), ZERO_ERR_ARG,
               "key is weight_decay but group 2 has an update of its own; allowed: lr_scale");
    TOY_TRY(zero_tune(z, 2, "lr_scale", 0.5));
    toy_expect(r, zero_set_step(NULL, 1), ZERO_ERR_ARG, "zero_set_step: z is NULL");
    toy_expect(r, zero_set_step(z, -1), ZERO_ERR_ARG, "zero_set_step: t is -1");
    toy_expect(r, zero_set_step(z, INT64_MAX), ZERO_ERR_ARG, "zero_set_step: t is 9223372036854775807");
    TOY_TRY(zero_begin(z, 1, ZERO_FORWARD));
    toy_expect(r, zero_tune(z, ZERO_ALL, "clip", 1), ZERO_ERR_ORDER, "zero_tune: unit 1 has an open bracket");
    toy_expect(r, zero_set_step(z, 1), ZERO_ERR_ORDER, "zero_set_step: unit 1 has an open bracket");
    TOY_TRY(zero_end(z, 1, ZERO_FORWARD));
    TOY_TRY(toy_forward(&m, z, true));
    TOY_TRY(toy_backward(&m, z, true, 1, r->rank));
    toy_expect(r, zero_tune(z, ZERO_ALL, "clip", 1), ZERO_ERR_ORDER, "zero_tune: a step has begun");
    toy_expect(r, zero_set_step(z, 1), ZERO_ERR_ORDER, "zero_set_step: a step has begun");
    TOY_TRY(zero_step(z, 1e-2f, NULL));
    zero_unwrap(&z);
    toy_free(&m);
}

static void wrong_calls(void **state)
{
    struct setup s = {};
    toy_at_each_stage(call_wrongly, &s, &s.stage, "wrong calls");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tuned_before_the_first_step),
        cmocka_unit_test(tuned_half_way),
        cmocka_unit_test(tuned_at_every_step),
        cmocka_unit_test(other_micro_batches),
        cmocka_unit_test(plans_for_the_most),
        cmocka_unit_test(wrong_micro_batches),
        cmocka_unit_test(states_go_on),
        cmocka_unit_test(wrong_calls),
    };
    return cmocka_run_group_tests(tests, NULL, toy_remove_folders);
}
