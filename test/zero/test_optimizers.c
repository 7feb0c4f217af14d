/* SPDX-License-Identifier: Apache-2.0 */
/* test_optimizers.c: each tensor is updated by the optimizer of its group, with the group's numbers.
 *
 * A model with tensors of several optimizers per unit trains at every stage, on one to three ranks. A plain
 * program does the same with the reference functions of the kernel tests, in fp32. Weights and states must
 * have the same bits, and memory must be what each optimizer's states need. The ranges that optim.update gets
 * are checked too. */
#include "test/kernels/optimizer_references.h"
#include "test/stand_in/half.h"
#include "test/zero/toy_net.h"
#include "test/zero/where.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TENSORS = 11, UNITS = 4, MAX_ELEMS = 400, STEPS = 4, MAX_LINES = 4096 };

struct spec {
    const char *name;
    int64_t shape[3];
    bool bf16, frozen;
    int32_t unit;
    uint32_t flags;
    int32_t group;
};

/* One unit and dtype has several optimizers, and one flat has two groups of the same optimizer with different
 * numbers. Layers of the stacked tensor have an odd size. Some optimizers have no states. */
static const struct spec specs[TENSORS] = {
    {"embedding", {37, 9}, .unit = 0, .group = 1},
    {"position", {130}, .unit = 0, .group = 2},
    {"table", {65}, .unit = 0, .group = 3},
    {"frozen", {20}, .frozen = true, .unit = 0, .group = 3},
    {"types", {50}, .unit = 0, .group = 6},
    {"segments", {40}, .unit = 0, .group = 7},
    {"layers", {2, 91}, .unit = 1, .flags = ZERO_STACKED, .group = 4},
    {"bias", {70}, .bf16 = true, .unit = 1, .flags = ZERO_NO_DECAY},
    {"gate", {64}, .bf16 = true, .unit = 1, .group = 5},
    {"norm", {33}, .unit = 2},
    {"head", {257}, .bf16 = true, .unit = 3, .group = 2},
};

#define AUTO .beta1 = ZERO_AUTO, .beta2 = ZERO_AUTO, .eps = ZERO_AUTO
static const float LR = 0.0625f;
static const struct zero_optim groups[] = {
    {.optimizer = ZERO_ADAM,
     .lr_scale = 1,
     .beta1 = 0.75f,
     .beta2 = 0.96875f,
     .eps = 1e-6f,
     .weight_decay = 0.1f},
    {.optimizer = ZERO_ADAMW, .lr_scale = 1, .weight_decay = 0.2f, AUTO},
    {.optimizer = ZERO_SGD, .lr_scale = 0.5f, .weight_decay = 0.1f, AUTO},
    {.optimizer = ZERO_LION, .lr_scale = 0.125f, AUTO},
    {.optimizer = ZERO_NESTEROV, .lr_scale = 1, .weight_decay = 0.1f, AUTO},
    {.optimizer = ZERO_RMSPROP, .lr_scale = 1, .weight_decay = 0.025f, AUTO},
    {.optimizer = ZERO_ADAMW, .lr_scale = 0.25f, .beta1 = 0.5f, .beta2 = 0.75f, .eps = 1e-3f},
    {.optimizer = ZERO_SGD, .lr_scale = 1, .beta1 = 0.5f, .beta2 = ZERO_AUTO, .eps = ZERO_AUTO}};
enum { GROUPS = sizeof groups / sizeof *groups };

static int64_t elems(int t)
{
    return specs[t].shape[0] * (specs[t].shape[1] ? specs[t].shape[1] : 1);
}

static int64_t layers(int t)
{
    return specs[t].flags & ZERO_STACKED ? specs[t].shape[0] : 1;
}

static float noise(int64_t a, int64_t b)
{
    return random_unit(random_mix(random_mix((uint64_t)a) + (uint64_t)b));
}

/* Rounds x to the tensor's dtype. */
static float rounded(int t, float x)
{
    return specs[t].bf16 ? bf16_to_float(bf16_from_float(x)) : x;
}

static float first_weight(int t, int64_t i)
{
    return rounded(t, noise(100 + t, i));
}

static float gradient(int t, int64_t i, float weight, int step, int rank)
{
    return rounded(t, 0.5f * weight + noise(step * 8 + rank, (int64_t)t << 32 | i));
}

static enum zero_optimizer kind_of(int t)
{
    return (enum zero_optimizer)groups[specs[t].group].optimizer;
}

static float beta1_of(int t)
{
    float beta1 = groups[specs[t].group].beta1;
    return beta1 == ZERO_AUTO ? zr_optimizer_kind(kind_of(t))->beta1 : beta1;
}

static int states_of(int t)
{
    return specs[t].frozen ? 0 : zr_optimizer_states(kind_of(t), beta1_of(t));
}

/* ---- the plain program ---- */

struct plain {
    float w[TENSORS][MAX_ELEMS], state[2][TENSORS][MAX_ELEMS];
};

static void plain_step(struct plain *p, int step, int world)
{
    float scale = (float)(1.0 / world);
    for (int t = 0; t < TENSORS; t++) {
        const struct zr_optimizer_kind *row = zr_optimizer_kind(kind_of(t));
        const struct zero_optim *g = &groups[specs[t].group];
        struct zr_update u = {.kind = kind_of(t),
                              .lr = LR * g->lr_scale,
                              .beta1 = beta1_of(t),
                              .beta2 = g->beta2 == ZERO_AUTO ? row->beta2 : g->beta2,
                              .eps = g->eps == ZERO_AUTO ? row->eps : g->eps,
                              .decay = specs[t].flags & ZERO_NO_DECAY ? 0 : g->weight_decay,
                              .c1 = 1,
                              .c2 = 1,
                              .t = step + 1};
        if (row->bias_correction) {
            u.c1 = 1.0f - powf(u.beta1, (float)u.t);
            u.c2 = 1.0f - powf(u.beta2, (float)u.t);
        }
        for (int64_t i = 0; !specs[t].frozen && i < elems(t); i++) {
            float seen = rounded(t, p->w[t][i]), sum = gradient(t, i, seen, step, 0);
            for (int r = 1; r < world; r++)
                sum += gradient(t, i, seen, step, r);
            element_f32(&u, scale, sum, &p->w[t][i], &p->state[0][t][i], &p->state[1][t][i]);
        }
    }
}

static struct plain *plain_run(int world)
{
    struct plain *p = calloc(1, sizeof *p);
    assert_non_null(p);
    for (int t = 0; t < TENSORS; t++)
        for (int64_t i = 0; i < elems(t); i++)
            p->w[t][i] = first_weight(t, i);
    for (int step = 0; step < STEPS; step++)
        plain_step(p, step, world);
    return p;
}

/* ---- the wrapped program ---- */

struct run {
    int stage, prefetch;
    bool regrouped;           /* each tensor has a separate group, with the numbers of its original group */
    const struct plain *want; /* NULL: a custom optimizer */
    struct ranges *ranges;    /* shared by all ranks */
};

struct model {
    void *param[TENSORS], *grad[TENSORS];
    struct zero_tensor table[TENSORS];
    struct zero_optim own[TENSORS];
};

static void make_model(struct model *m)
{
    for (int t = 0; t < TENSORS; t++) {
        const struct spec *s = &specs[t];
        m->param[t] = malloc((size_t)elems(t) * 4);
        m->table[t] = (struct zero_tensor){.name = s->name,
                                           .param = &m->param[t],
                                           .grad = s->frozen ? NULL : &m->grad[t],
                                           .shape = {s->shape[0], s->shape[1]},
                                           .dtype = s->bf16 ? ZERO_BF16 : ZERO_F32,
                                           .unit = s->unit,
                                           .flags = s->flags,
                                           .group = s->group};
        for (int64_t i = 0; i < elems(t); i++)
            if (s->bf16)
                ((uint16_t *)m->param[t])[i] = bf16_from_float(first_weight(t, i));
            else
                ((float *)m->param[t])[i] = first_weight(t, i);
    }
}

static void set_groups(struct zero_config *cfg)
{
    cfg->optim = groups[0];
    cfg->optim_groups = groups + 1;
    cfg->n_optim_groups = GROUPS - 1;
}

static struct zero_config configure(struct toy_rank *r, const struct run *o, struct model *m)
{
    struct zero_config cfg = toy_config(r, o->stage);
    cfg.memory.prefetch = o->prefetch;
    set_groups(&cfg);
    for (int t = 0; o->regrouped && t < TENSORS; t++) {
        m->own[t] = groups[specs[t].group];
        m->table[t].group = 1 + t;
        cfg.optim_groups = m->own;
        cfg.n_optim_groups = TENSORS;
    }
    return cfg;
}

static int train(struct toy_rank *r, struct model *m, zero_ctx *z, const struct zero_config *cfg)
{
    int err = 0;
    for (int step = 0; !err && step < STEPS; step++) {
        for (int32_t u = UNITS; !err && u-- > 0;) {
            err = zero_begin(z, u, ZERO_BACKWARD);
            where_wait(cfg);
            for (int t = 0; !err && t < TENSORS; t++) {
                int64_t n = elems(t) / layers(t), layer = u - specs[t].unit;
                if (specs[t].frozen || layer < 0 || layer >= layers(t))
                    continue;
                for (int64_t i = layer * n; i < (layer + 1) * n; i++) {
                    if (specs[t].bf16) {
                        float w = bf16_to_float(((uint16_t *)m->param[t])[i]);
                        ((uint16_t *)m->grad[t])[i] = bf16_from_float(gradient(t, i, w, step, r->rank));
                    } else {
                        float w = ((float *)m->param[t])[i];
                        ((float *)m->grad[t])[i] = gradient(t, i, w, step, r->rank);
                    }
                }
            }
            if (!err)
                err = zero_end(z, u, ZERO_BACKWARD);
        }
        if (!err)
            err = zero_step(z, LR, NULL);
    }
    return err;
}

/* Computes the bytes of a rank's states from the rules of layout.h, independently of the library. */
static int64_t state_bytes(int stage, int world)
{
    bool counted[TENSORS] = {false};
    int64_t bytes = 0;
    for (int t = 0; t < TENSORS; t++) {
        int64_t size = specs[t].bf16 ? 2 : 4, copies = stage == 0 ? world : 1;
        bool in_place = stage <= 1 && (specs[t].flags & ZERO_STACKED);
        if (specs[t].frozen || counted[t])
            continue;
        int64_t end = elems(t) / layers(t) * size;
        for (int o = t + 1; !in_place && o < TENSORS; o++)
            if (layers(o) == 1 && !specs[o].frozen && specs[o].unit == specs[t].unit &&
                specs[o].bf16 == specs[t].bf16 && kind_of(o) == kind_of(t) && states_of(o) == states_of(t)) {
                end = (end + 255) / 256 * 256 + elems(o) * size;
                counted[o] = true;
            }
        int64_t shard = ((end + world - 1) / world + 255) / 256 * 256 / size;
        bytes += layers(t) * shard * copies * 4 * states_of(t);
    }
    return bytes;
}

static void compare(struct toy_rank *r, zero_ctx *z, int t, int32_t value, const float *want,
                    const char *what)
{
    float got[MAX_ELEMS];
    memset(got, 0xff, sizeof got);
    if (zero_read(z, t, value, 0, elems(t), got)) {
        toy_wrong(r, "%s of %s: %s\n", what, specs[t].name, zero_last_error());
        return;
    }
    for (int64_t i = 0; i < elems(t); i++)
        if (memcmp(&got[i], &want[i], sizeof *got) != 0) {
            toy_wrong(r, "%s of %s, element %lld: %a, not %a\n", what, specs[t].name, (long long)i,
                      (double)got[i], (double)want[i]);
            return;
        }
}

static void check_values(struct toy_rank *r, zero_ctx *z, const struct run *o)
{
    for (int t = 0; t < TENSORS; t++) {
        float x;
        char says[128];
        int n = states_of(t);
        if (!specs[t].frozen)
            compare(r, z, t, ZERO_VALUE_MASTER, o->want->w[t], "weights");
        for (int s = 0; s < n; s++)
            compare(r, z, t, ZERO_VALUE_STATE + s, o->want->state[s][t], "a state");
        if (zero_read(z, t, ZERO_VALUE_STATE + n, 0, 1, &x) != ZERO_ERR_ARG)
            toy_wrong(r, "%s has a state %d\n", specs[t].name, n);
        snprintf(says, sizeof says, "optimizer of tensor %s: %s, %d state", specs[t].name,
                 zr_optimizer_kind(kind_of(t))->name, n);
        if (!specs[t].frozen && !strstr(zero_last_error(), says))
            toy_wrong(r, "%s\n", zero_last_error());
    }
}

static void check_bytes(struct toy_rank *r, zero_ctx *z, const struct model *m, const struct zero_config *cfg)
{
    struct zero_stats s;
    struct zero_plan_info plan;
    int64_t want = state_bytes(cfg->stage, r->world);
    /* Check mode puts gaps after gradients, and so into flats. */
    if (getenv("ZERO_CHECK") && !zero_get_stats(z, &s))
        want = s.planned.moments;
    if (zero_get_stats(z, &s) || zero_plan(m->table, TENSORS, cfg, &plan))
        toy_wrong(r, "%s\n", zero_last_error());
    else if (s.allocated.moments != want || s.planned.moments != want || plan.bytes.moments != want ||
             s.allocated.total != s.planned.total)
        toy_wrong(
            r,
            "states: %lld bytes allocated, %lld planned, %lld by zero_plan, not %lld; %lld in all, of %lld\n",
            (long long)s.allocated.moments, (long long)s.planned.moments, (long long)plan.bytes.moments,
            (long long)want, (long long)s.allocated.total, (long long)s.planned.total);
}

static void run_rank(struct toy_rank *r)
{
    const struct run *o = r->arg;
    struct model m = {0};
    zero_ctx *z = NULL;
    void *own[TENSORS];
    make_model(&m);
    struct zero_config cfg = configure(r, o, &m);
    where_open(r->rank, &cfg);
    memcpy(own, m.param, sizeof own);
    int err = FIRST_ERROR(zero_wrap(&z, m.table, TENSORS, &cfg), train(r, &m, z, &cfg));
    if (err)
        toy_wrong(r, "%s\n", zero_last_error());
    else {
        check_values(r, z, o);
        check_bytes(r, z, &m, &cfg);
    }
    zero_unwrap(&z);
    where_close(&cfg);
    for (int t = 0; t < TENSORS; t++)
        free(own[t]);
}

static void run_ranks(int world, void (*fn)(struct toy_rank *r), struct run *o)
{
    struct toy_rank ranks[MAX_TOY_RANKS];
    toy_ranks(world, fn, o, ranks);
    for (int i = 0; i < world; i++)
        if (*ranks[i].wrong)
            fail_msg("stage %d, world %d, rank %d: %s", o->stage, world, i, ranks[i].wrong);
}

/* Collects the log, in which rank 0 names the optimizer of each group. */
static void keep_line(void *arg, const char *line)
{
    char *lines = arg;
    snprintf(lines + strlen(lines), MAX_LINES - strlen(lines), "%s\n", line);
}

static void kinds_are_reported(void **state)
{
    static const char *const says[] = {
        "group 0: adam (arXiv:1412.6980) updates 2 tensors of 103 elements; 2 states per weight: first "
        "moment, "
        "second moment\n",
        "group 2: sgd (PyTorch's SGD) updates 2 tensors of 387 elements; 0 states per weight\n",
        "group 3: lion (arXiv:2302.06675) updates 1 tensors of 65 elements; 1 state per weight: momentum\n",
        "group 7: sgd (PyTorch's SGD) updates 0 tensors of 0 elements; 1 state per weight: momentum\n",
        "optim_groups[6] has no tensor: no zero_tensor.group is 7\n"};
    static char lines[MAX_LINES];
    struct model m = {0};
    void *own[TENSORS];
    zero_ctx *z;
    struct zero_config cfg = ZERO_CONFIG_INIT;
    make_model(&m);
    memcpy(own, m.param, sizeof own);
    cfg.launch.world = 1;
    set_groups(&cfg);
    m.table[5].group = 6;
    cfg.debug.log = keep_line;
    cfg.debug.log_arg = lines;
    assert_int_equal(zero_wrap(&z, m.table, TENSORS, &cfg), 0);
    zero_unwrap(&z);
    for (size_t i = 0; i < sizeof says / sizeof *says; i++)
        if (!strstr(lines, says[i]))
            fail_msg("not said: %s in: %s", says[i], lines);
    for (int t = 0; t < TENSORS; t++)
        free(own[t]);
}

static void each_by_its_own(void **state)
{
    for (int world = 1; world <= 3; world++) {
        struct plain *p = plain_run(world);
        for (int stage = 0; stage < 4; stage++)
            for (int regrouped = 0; regrouped < 2; regrouped++)
                run_ranks(
                    world, run_rank,
                    &(struct run){
                        .stage = stage, .prefetch = stage == 3 ? 0 : 2, .regrouped = regrouped, .want = p});
        free(p);
    }
}

/* ---- optimizers without states ---- */

static void plan_of(int32_t optimizer, float beta1, struct zero_plan_info *out)
{
    struct model m = {0};
    struct zero_config cfg = ZERO_CONFIG_INIT;
    cfg.optim.optimizer = optimizer;
    cfg.optim.beta1 = beta1;
    make_model(&m);
    for (int t = 0; t < TENSORS; t++) {
        m.table[t].group = t % 2;
        free(m.param[t]);
    }
    m.own[0] = cfg.optim;
    cfg.optim_groups = m.own;
    cfg.n_optim_groups = 1;
    cfg.stage = 1;
    cfg.launch.world = 2;
    if (zero_plan(m.table, TENSORS, &cfg, out))
        fail_msg("%s", zero_last_error());
}

static void stateless_kinds_take_none(void **state)
{
    struct zero_plan_info plain, momentum, adam;
    plan_of(ZERO_SGD, 0, &plain);
    plan_of(ZERO_SGD, 0.5f, &momentum);
    plan_of(ZERO_ADAMW, 0.5f, &adam);
    assert_int_equal(plain.bytes.moments, 0);
    assert_true(momentum.bytes.moments > 0 && adam.bytes.moments == 2 * momentum.bytes.moments);
    assert_int_equal(plain.bytes.total - plain.bytes.exchange,
                     momentum.bytes.total - momentum.bytes.exchange - momentum.bytes.moments);
}

/* ---- the ranges of optim.update ---- */

/* How often all ranks together updated each element in this step. */
struct ranges {
    pthread_mutex_t lock;
    int seen[TENSORS][MAX_ELEMS];
    char wrong[1024];
};

static int look_at_range(void *arg, const struct zero_update *u)
{
    struct ranges *s = arg;
    int t = u->tensor_index;
    int64_t layer = elems(t) / layers(t), at = u->first % layer, end = at + u->n;
    float scale = groups[specs[t].group].lr_scale;
    bool own_place = layers(t) == 1 || layer % 64 == 0;
    pthread_mutex_lock(&s->lock);
    const char *what = u->n < 1 || u->first < 0 || u->first + u->n > elems(t) ? "lies outside its tensor"
                       : end > layer                                          ? "crosses the end of a layer"
                       : at % 32 ? "does not begin at a multiple of 32 elements of its layer"
                       : end != layer && u->n % 32 ? "is no multiple of 32 elements, before its layer's end"
                       : (uintptr_t)u->state[0] % 256 || (uintptr_t)u->state[1] % 256
                           ? "has states that are not aligned"
                       : own_place && ((uintptr_t)u->master % 256 || (uintptr_t)u->grad % 256)
                           ? "has weights or gradients that are not aligned"
                       : (uintptr_t)u->master % 4 || (uintptr_t)u->grad % 4 ? "is not made of floats"
                       : u->lr != LR * scale                                ? "has another learning rate"
                       : strcmp(u->tensor, specs[t].name) != 0              ? "has another tensor's name"
                       : u->state[2] || u->state[3]                         ? "has states beyond n_states"
                                                                            : NULL;
    if (what)
        snprintf(s->wrong, sizeof s->wrong, "tensor %s, elements %lld..%lld: the range %s", u->tensor,
                 (long long)u->first, (long long)(u->first + u->n - 1), what);
    for (int64_t i = 0; !what && i < u->n; i++) {
        s->seen[t][u->first + i]++;
        u->master[i] -= u->lr * u->grad[i];
        u->state[0][i] += 1;
        u->state[1][i] += 2;
    }
    pthread_mutex_unlock(&s->lock);
    return what != NULL;
}

static void run_own(struct toy_rank *r)
{
    const struct run *o = r->arg;
    struct model m = {0};
    zero_ctx *z = NULL;
    void *own[TENSORS];
    struct zero_config cfg = toy_config(r, o->stage);
    for (int g = 0; g < GROUPS; g++) {
        m.own[g] = (struct zero_optim)ZERO_OPTIM_INIT;
        m.own[g].lr_scale = groups[g].lr_scale;
        m.own[g].update = look_at_range;
        m.own[g].update_arg = o->ranges;
        m.own[g].n_states = 2;
    }
    cfg.optim = m.own[0];
    cfg.optim_groups = m.own + 1;
    cfg.n_optim_groups = GROUPS - 1;
    cfg.memory.prefetch = o->prefetch;
    make_model(&m);
    memcpy(own, m.param, sizeof own);
    int err = FIRST_ERROR(zero_wrap(&z, m.table, TENSORS, &cfg), train(r, &m, z, &cfg));
    float x[MAX_ELEMS];
    for (int t = 0; !err && t < TENSORS; t++) {
        err = specs[t].frozen ? 0 : zero_read(z, t, ZERO_VALUE_STATE + 1, 0, elems(t), x);
        for (int64_t i = 0; !err && !specs[t].frozen && i < elems(t); i++)
            if (x[i] != 2 * STEPS)
                toy_wrong(r, "state 1 of %s, element %lld, is %g\n", specs[t].name, (long long)i,
                          (double)x[i]);
    }
    if (err)
        toy_wrong(r, "%s\n", zero_last_error());
    zero_unwrap(&z);
    for (int t = 0; t < TENSORS; t++)
        free(own[t]);
}

static void ranges_are_as_documented(void **state)
{
    if (where_has_gpu) /* on a GPU the callback would have to enqueue kernels */
        skip();
    for (int stage = 0; stage < 4; stage++)
        for (int world = 1; world <= 3; world++) {
            struct ranges s = {.lock = PTHREAD_MUTEX_INITIALIZER};
            run_ranks(world, run_own,
                      &(struct run){.stage = stage, .prefetch = stage == 3 ? 0 : 2, .ranges = &s});
            assert_string_equal(s.wrong, "");
            for (int t = 0; t < TENSORS; t++)
                for (int64_t i = 0; i < elems(t); i++)
                    assert_int_equal(s.seen[t][i], specs[t].frozen ? 0 : STEPS * (stage == 0 ? world : 1));
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_by_its_own),
        cmocka_unit_test(kinds_are_reported),
        cmocka_unit_test(stateless_kinds_take_none),
        cmocka_unit_test(ranges_are_as_documented),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
