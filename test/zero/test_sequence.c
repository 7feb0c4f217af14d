/* SPDX-License-Identifier: Apache-2.0 */
/* test_sequence.c: sequence parallelism. Between the pairs of products of test_tp.c's net, a rank computes
 * only its own rows. With equal tp, all stages and divisions of the data give the same bits. With any tp,
 * with or without sequence parallelism, losses, norms and weights are close to a reference in double that is
 * not cut. */
#include "kernels/state_codes.h"
#include "test/cmocka.h"
#include "test/stand_in/half.h"
#include "test/zero/pipeline_ranks.h"
#include "test/zero/sample.h"
#include "test/zero/toy_net.h"
#include "test/zero/where.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    LAYERS = 3,
    C = 10,
    H = 12,
    ROWS = 4,
    TENSORS = 4 * LAYERS,
    STEPS = 3,

    MAX_WORLD = 8
};

#define REAL        double
#define NAME(x)     whole_##x
#define OWN_FIRST   0
#define OWN_END     (ROWS * C)
#define ENTER(x, p) (void)(x)
#define LEAVE(x, p) (void)(x)
#define BEGIN(l, p) (void)(l)
#define END(l, p)   (void)(l)
#include "test/zero/tp_net.inc"

/* One rank's state on its way through the layers. */
struct way;
static int enter(struct way *w, float *x, enum zero_phase phase);
static int leave(struct way *w, float *x, enum zero_phase phase);
static int begin_layer(struct way *w, int l, enum zero_phase phase);
static int end_layer(struct way *w, int l, enum zero_phase phase);
static int own_first(const struct way *w);
static int own_end(const struct way *w);

#define REAL        float
#define NAME(x)     part_##x
#define OWN_FIRST   own_first(arg)
#define OWN_END     own_end(arg)
#define ENTER(x, p) OR_RETURN(enter(arg, x, p))
#define LEAVE(x, p) OR_RETURN(leave(arg, x, p))
#define BEGIN(l, p) OR_RETURN(begin_layer(arg, l, p))
#define END(l, p)   OR_RETURN(end_layer(arg, l, p))
#include "test/zero/tp_net.inc"

#include "test/zero/tp_reference.inc"

/* Returns weight i of a tensor of the whole model (s, b, w1 and w2 of each layer), exact in bf16. */
static double first_value(int tensor, int64_t i)
{
    uint32_t seed = 99u + 40503u * (uint32_t)(tensor * 1009 + i);
    draw(&seed), draw(&seed);
    double x = draw(&seed);
    return bf16_to_float(bf16_from_float((float)(tensor % 4 == 0 ? 1 + 0.2 * x : 0.5 * x)));
}

/* ---- one rank ---- */

struct setup {
    int stage, tp;
    /* n_micro: micro-batches per step over all ranks; 0: one per rank. prefetch applies if it is not 0 */
    int n_micro, prefetch;
    /* sequence: a rank computes its own rows. unflagged: its tensors lack the flag. flag_apart: only rank 0's
     * have it */
    bool sequence, unflagged, flag_apart, bf16, check, in_place, unbracketed;
    /* a tensor with the flag although rows are whole; 0: none */
    int wrongly_partial;
    int64_t budget;
    const struct reference *want;
    /* the error of zero_wrap, or of the rank's function, on every rank; NULL: none */
    int code;
    const char *says;
};

/* The net computes in float, on copies of what the library's pointers show inside a bracket. */
struct way {
    const struct setup *s;
    zero_ctx *z;
    int part;
    struct part_net net;
    float w[TENSORS][C * H], dw[TENSORS][C * H];
    void *param[TENSORS], *grad[TENSORS];
    char own[TENSORS][C * H * sizeof(float)];
    struct zero_tensor table[TENSORS];
    char name[TENSORS][16];
};

static int own_first(const struct way *w)
{
    return w->s->sequence ? w->part * (ROWS / w->s->tp) * C : 0;
}

static int own_end(const struct way *w)
{
    return w->s->sequence ? (w->part + 1) * (ROWS / w->s->tp) * C : ROWS * C;
}

static int whole(struct way *w, const float *x)
{
    return zero_expect_equal(w->z, ZERO_AXIS_TP, x, ROWS * C, ZERO_F32);
}

static int sum(struct way *w, float *x)
{
    return zero_all_reduce(w->z, ZERO_AXIS_TP, x, x, ROWS * C, ZERO_F32, ZERO_SUM);
}

static int gather(struct way *w, float *x, const float *own)
{
    return zero_all_gather(w->z, ZERO_AXIS_TP, x, own, own_end(w) - own_first(w), ZERO_F32);
}

static int scatter(struct way *w, float *own, const float *x)
{
    return zero_reduce_scatter(w->z, ZERO_AXIS_TP, own, x, own_end(w) - own_first(w), ZERO_F32);
}

/* The rank's rows lie at their place in the whole activation. All other rows are NaN between products, to
 * show that they are not read. */
static int enter(struct way *w, float *x, enum zero_phase phase)
{
    float *own = x + own_first(w);
    if (!w->s->sequence)
        return phase == ZERO_FORWARD ? whole(w, x) : sum(w, x);
    for (int i = 0; phase == ZERO_FORWARD && i < ROWS * C; i++)
        if (i < own_first(w) || i >= own_end(w))
            x[i] = NAN;
    return phase == ZERO_FORWARD ? gather(w, x, own) : scatter(w, own, x);
}

static int leave(struct way *w, float *x, enum zero_phase phase)
{
    float *own = x + own_first(w);
    if (!w->s->sequence)
        return phase == ZERO_FORWARD ? sum(w, x) : whole(w, x);
    OR_RETURN(phase == ZERO_FORWARD ? scatter(w, own, x) : gather(w, x, own));
    for (int i = 0; phase == ZERO_FORWARD && i < ROWS * C; i++)
        if (i < own_first(w) || i >= own_end(w))
            x[i] = NAN;
    return 0;
}

static int begin_layer(struct way *w, int l, enum zero_phase phase)
{
    if (!w->s->unbracketed)
        OR_RETURN(zero_begin(w->z, l, phase));
    for (int t = 4 * l; t < 4 * l + 4; t++)
        for (int64_t i = 0; i < n_elems(t, w->s->tp); i++) {
            w->w[t][i] = w->s->bf16 ? bf16_to_float(((uint16_t *)w->param[t])[i]) : ((float *)w->param[t])[i];
            w->dw[t][i] = 0;
        }
    return 0;
}

static int end_layer(struct way *w, int l, enum zero_phase phase)
{
    for (int t = 4 * l; phase == ZERO_BACKWARD && t < 4 * l + 4; t++)
        for (int64_t i = 0; i < n_elems(t, w->s->tp); i++)
            if (w->s->bf16)
                ((uint16_t *)w->grad[t])[i] =
                    bf16_from_float(bf16_to_float(((uint16_t *)w->grad[t])[i]) + w->dw[t][i]);
            else
                ((float *)w->grad[t])[i] += w->dw[t][i];
    return w->s->unbracketed ? 0 : zero_end(w->z, l, phase);
}

static struct way *make_way(const struct setup *s, int part)
{
    static const char *const names[4] = {"s", "b", "w1", "w2"};
    struct way *w = calloc(1, sizeof *w);
    bool flagged = s->flag_apart ? part == 0 : s->sequence && !s->unflagged;
    w->s = s;
    w->part = part;
    w->net.hidden = H / s->tp;
    for (int t = 0; t < TENSORS; t++) {
        struct part_layer *l = &w->net.layer[t / 4];
        float **const param[4] = {&l->s, &l->b, &l->w1, &l->w2};
        float **const grad[4] = {&l->ds, &l->db, &l->dw1, &l->dw2};
        *param[t % 4] = w->w[t];
        *grad[t % 4] = w->dw[t];
        w->param[t] = w->own[t];
        for (int64_t i = 0; i < n_elems(t, s->tp); i++) {
            float x = (float)first_value(t, element_of(t, s->tp, part, i));
            if (s->bf16)
                ((uint16_t *)w->param[t])[i] = bf16_from_float(x);
            else
                ((float *)w->param[t])[i] = x;
        }
        snprintf(w->name[t], sizeof w->name[t], "%s%d", names[t % 4], t / 4);
        w->table[t] = (struct zero_tensor){
            .name = w->name[t],
            .param = &w->param[t],
            .grad = &w->grad[t],
            .shape = {n_elems(t, s->tp)},
            .dtype = s->bf16 ? ZERO_BF16 : ZERO_F32,
            .unit = t / 4,
            .flags = (t % 4 < 2 && flagged) || (t && t == s->wrongly_partial) ? ZERO_TP_PARTIAL : 0,
            .tp_cut = t % 4 < 2 ? 0 : ZERO_TP_CUT(0)};
    }
    return w;
}

/* bf16 weights are rounded for each use, and gradients when they are written. */
static double bound(const struct setup *s)
{
    return s->bf16 ? 0.03 : 1e-5;
}

/* A rank's own rows give a part of the loss. */
static int whole_loss(struct way *w, double *loss)
{
    float all = (float)w->net.loss;
    if (w->s->sequence)
        OR_RETURN(zero_all_reduce(w->z, ZERO_AXIS_TP, &all, &all, 1, ZERO_F32, ZERO_SUM));
    *loss = (double)all;
    return 0;
}

static int one_step(struct toy_rank *r, struct way *w, int step, int dp, int n_dp)
{
    const struct setup *s = w->s;
    double x[ROWS * C], target[ROWS * C], loss = 0, one;
    struct zero_step_info info;
    const int n_own = s->n_micro / n_dp;
    for (int k = 0; k < n_own; k++) {
        draw_batch(step * s->n_micro + k * n_dp + dp, x, target);
        memset(w->net.x, 0xff, sizeof w->net.x);
        memset(w->net.u, 0xff, sizeof w->net.u);
        OR_RETURN(part_forward(&w->net, w, x, target));
        OR_RETURN(part_backward(&w->net, w, target));
        OR_RETURN(whole_loss(w, &one));
        loss += one / n_own;
        if (s->unbracketed && k + 1 < n_own)
            OR_RETURN(zero_micro(w->z));
    }
    OR_RETURN(zero_carry(w->z, &loss, 1));
    OR_RETURN(zero_step(w->z, (float)LR, &info));
    if (!near(info.carried[0], s->want->loss[step], bound(s)))
        toy_wrong(r, "step %d: loss %.9g instead of %.9g", step, info.carried[0], s->want->loss[step]);
    if (!near(info.grad_norm, s->want->norm[step], bound(s)))
        toy_wrong(r, "step %d: norm %.9g instead of %.9g", step, info.grad_norm, s->want->norm[step]);
    return 0;
}

static void add_bits(uint64_t *hash, float x)
{
    *hash = (*hash ^ zr_float_bits(x)) * 1099511628211u;
}

/* r->hash: hash of all weights on this rank; *of_whole: hash of those that tensor parallelism does not cut */
static int look_at_weights(struct toy_rank *r, struct way *w, uint64_t *of_whole)
{
    const struct setup *s = w->s;
    r->hash = *of_whole = 1469598103934665603u;
    for (int t = 0; t < TENSORS; t++) {
        float x[C * H];
        memset(x, 0xff, sizeof x);
        OR_RETURN(zero_read(w->z, t, ZERO_VALUE_MASTER, 0, n_elems(t, s->tp), x));
        for (int64_t i = 0; i < n_elems(t, s->tp); i++) {
            double want = s->want->w[t][element_of(t, s->tp, w->part, i)];
            add_bits(&r->hash, x[i]);
            if (t % 4 < 2)
                add_bits(of_whole, x[i]);
            if (!near((double)x[i], want, bound(s)))
                toy_wrong(r, "element %d of tensor %d of part %d is %.9g instead of %.9g", (int)i, t, w->part,
                          (double)x[i], want);
        }
    }
    return 0;
}

/* Counts lines about a gradient that is equal on all tensor-parallel ranks. Ranks are threads. */
static _Atomic int n_said_partial;
static char said_partial[256];

static void count_line(void *arg, const char *line)
{
    if (strstr(line, "ZERO_TP_PARTIAL") && !n_said_partial++)
        snprintf(said_partial, sizeof said_partial, "%s", line);
}

static _Atomic uint64_t whole_hash[MAX_WORLD];

/* A rank's work between zero_wrap and zero_unwrap. Returns the first error. */
typedef int rank_fn(struct toy_rank *r, struct way *w, zero_ctx *z, const struct place *at);

struct job {
    struct setup *s;
    rank_fn *fn;
};

static void run_rank(struct toy_rank *r)
{
    const struct job *j = r->arg;
    const struct setup *s = r->arg = j->s;
    struct zero_config cfg = toy_config(r, s->stage);
    struct place at = {0};
    cfg.debug.log = count_line;
    cfg.optim.optimizer = ZERO_SGD;
    cfg.optim.weight_decay = 0;
    cfg.debug.check = s->check;
    cfg.memory.grad_in_place = s->in_place;
    if (s->budget)
        cfg.memory.param_budget_bytes = s->budget;
    int err = pipeline_place(&cfg, s->stage, 1, r->world / s->tp, s->tp, &at);
    if (s->n_micro) {
        cfg.grad_accum_steps = s->n_micro / at.n_dp;
        cfg.memory.prefetch = s->prefetch;
    }
    struct way *w = make_way(s, at.tp);
    err = FIRST_ERROR(err, zero_wrap(&w->z, w->table, TENSORS, &cfg), j->fn ? j->fn(r, w, w->z, &at) : 0);
    if (s->says)
        toy_expect(r, err, s->code, s->says);
    else
        toy_note(r, err);
    zero_unwrap(&w->z);
    free(w);
}

/* Wraps on `world` ranks, and calls fn unless it is NULL. Fails the test unless the outcome is that of s. */
static void run(struct setup *s, int world, rank_fn *fn, const char *what, struct toy_rank r[MAX_WORLD])
{
    struct job j = {s, fn};
    toy_run(world, run_rank, &j, r, what);
}

static int train(struct toy_rank *r, struct way *w, zero_ctx *z, const struct place *at)
{
    struct zero_stats stats;
    uint64_t of_whole = 0;
    for (int step = 0; step < STEPS; step++)
        OR_RETURN(one_step(r, w, step, at->dp, at->n_dp));
    OR_RETURN(look_at_weights(r, w, &of_whole));
    whole_hash[r->rank] = of_whole;
    OR_RETURN(zero_get_stats(z, &stats));
    pipeline_check_memory(r, &stats, NULL);
    return 0;
}

/* Checks that all ranks are close to the reference. Replicas of a part must have equal bits, and weights that
 * are not cut must have equal bits on all ranks. hash: (tp) hashes of earlier runs; 0: none. */
static void run_setup(struct setup *s, int world, uint64_t *hash)
{
    struct toy_rank r[MAX_WORLD];
    char what[160];
    if (!sample_has())
        return;
    snprintf(what, sizeof what,
             "tp %d, world %d, stage %d, %d micro-batches, sequence %d, bf16 %d, check %d, in place %d, "
             "unbracketed %d, budget %d",
             s->tp, world, s->stage, s->n_micro, s->sequence, s->bf16, s->check, s->in_place, s->unbracketed,
             (int)s->budget);
    run(s, world, train, what, r);
    assert_int_equal(n_said_partial, 0);
    for (int k = 0; k < world; k++) {
        uint64_t *of_part = &hash[k % s->tp];
        *of_part = *of_part ? *of_part : r[k].hash;
        if (*of_part != r[k].hash)
            fail_msg("%s: part %d of rank %d has other bits", what, k % s->tp, k);
        if (whole_hash[k] != whole_hash[0])
            fail_msg("%s: rank %d has other bits of what is not cut", what, k);
    }
}

/* ---- tests ---- */

/* All layouts have the same micro-batches: one on each of 4 ranks, or 4 on one. */
static void the_same_bits_however_data_is_cut(void **state)
{
    struct reference *want = make_reference(4);
    for (int bf16 = 0; bf16 < 2; bf16++)
        for (int tp = 1; tp <= 4; tp *= 2) {
            uint64_t hash[4] = {0}, in_place[4] = {0}, pairs[4] = {0};
            int n = 0;
            struct setup s = {.tp = tp, .n_micro = 4, .bf16 = bf16, .sequence = true, .want = want};
            for (int n_dp = 1; n_dp <= 4 && n_dp * tp <= MAX_WORLD; n_dp *= 2)
                for (s.stage = 0; s.stage < TOY_STAGES; s.stage++, n++) {
                    if (s.stage > 3 && n_dp != 4)
                        continue;
                    s.prefetch = n % 3;
                    s.check = n % 3 == 2;
                    s.budget = s.stage == 3 && n_dp == 2 ? 1 << 14 : 0;
                    run_setup(&s, n_dp * tp, hash);
                }
            s.budget = s.prefetch = 0;
            /* A model without brackets. */
            s.unbracketed = true;
            for (s.stage = 0; s.stage < 2; s.stage++)
                for (int n_dp = 1; n_dp <= 2; n_dp++) {
                    s.check = n_dp == 1;
                    run_setup(&s, n_dp * tp, hash);
                }
            s.unbracketed = false;
            /* The model sums its micro-batches, so gradients are summed over tp once. */
            s.in_place = true;
            for (s.stage = 0; !bf16 && s.stage < 4; s.stage++) {
                s.check = s.stage & 1;
                run_setup(&s, 2 * tp, in_place);
            }
            s.in_place = s.check = false;
            /* Tensor parallelism alone is equally close. */
            s.sequence = false;
            s.stage = 2;
            run_setup(&s, tp, pairs);
        }
    free(want);
}

static void other_numbers_of_micro_batches(void **state)
{
    for (int n_dp = 1; n_dp <= 2; n_dp++)
        for (int n_micro = 1; n_micro <= 3; n_micro += 2) {
            struct reference *want = make_reference(n_micro * n_dp);
            uint64_t hash[4] = {0};
            struct setup s = {.tp = 2, .n_micro = n_micro * n_dp, .sequence = true, .want = want};
            for (s.stage = 0; s.stage < 4; s.stage++) {
                s.check = s.stage == 1 || s.stage == 3;
                run_setup(&s, n_dp * s.tp, hash);
            }
            free(want);
        }
}

/* ---- the calls ---- */

enum { MAX_PART = 300007, BEHIND = 64 };

/* Returns an element on a tensor-parallel rank. Some are large and of both signs, so that the order of
 * additions shows. */
static float element(int part, int64_t i)
{
    uint32_t seed = 31u * (uint32_t)part + 2246822519u * (uint32_t)i;
    draw(&seed);
    return (float)(draw(&seed) * (i % 7 ? 1 : 4096));
}

static void fill(char *x, int64_t n, int part, bool bf16)
{
    for (int64_t i = 0; i < n; i++)
        if (bf16)
            ((uint16_t *)x)[i] = bf16_from_float(element(part, i));
        else
            ((float *)x)[i] = element(part, i);
}

struct buffers {
    char *src, *sum, *dst, *part;
};

static bool untouched(const char *x)
{
    bool is = true;
    for (int i = 0; i < BEHIND; i++)
        is &= x[i] == (char)0xff;
    return is;
}

/* Checks that the scattered part has the bits of the whole sum there. */
static int compare_scatter(struct toy_rank *r, zero_ctx *z, struct buffers *b, int64_t part, bool bf16,
                           bool in_place)
{
    const enum zero_dtype dtype = bf16 ? ZERO_BF16 : ZERO_F32;
    const int64_t size = bf16 ? 2 : 4, n = part * r->world, own = r->rank * part * size;
    fill(b->src, n, r->rank, bf16);
    OR_RETURN(zero_all_reduce(z, ZERO_AXIS_TP, b->sum, b->src, n, dtype, ZERO_SUM));
    memset(b->part, 0xff, (size_t)(part * size + BEHIND));
    char *to = in_place ? b->src + own : b->part;
    OR_RETURN(zero_reduce_scatter(z, ZERO_AXIS_TP, to, b->src, part, dtype));
    if (memcmp(to, b->sum + own, (size_t)(part * size)))
        toy_wrong(r, "part of %lld elements, bf16 %d, in place %d: not the bits of the sum", (long long)part,
                  bf16, in_place);
    if (!untouched(b->part + (in_place ? 0 : part * size)))
        toy_wrong(r, "scatter of %lld wrote behind its part", (long long)part);
    fill(b->dst, n, r->rank, bf16); /* in place, only this rank's part changes */
    if (memcmp(b->src, b->dst, (size_t)(in_place ? own : n * size)) ||
        memcmp(b->src + own + part * size, b->dst + own + part * size,
               (size_t)(n * size - own - part * size)))
        toy_wrong(r, "scatter of %lld changed its source", (long long)part);
    return 0;
}

/* as_bytes: moves integers of twice the size (f32 as i64, bf16 as i32) */
static int compare_gather(struct toy_rank *r, zero_ctx *z, struct buffers *b, int64_t part, bool bf16,
                          bool in_place, bool as_bytes)
{
    const enum zero_dtype dtype = as_bytes ? (bf16 ? ZERO_I32 : ZERO_I64) : bf16 ? ZERO_BF16 : ZERO_F32;
    const int64_t size = bf16 ? 2 : 4, n = part * r->world;
    memset(b->dst, 0xff, (size_t)(n * size + BEHIND));
    fill(b->part, part, r->rank, bf16);
    if (in_place)
        memcpy(b->dst + r->rank * part * size, b->part, (size_t)(part * size));
    const char *from = in_place ? b->dst + r->rank * part * size : b->part;
    OR_RETURN(zero_all_gather(z, ZERO_AXIS_TP, b->dst, from, as_bytes ? part / 2 : part, dtype));
    for (int p = 0; p < r->world; p++) {
        fill(b->src, part, p, bf16);
        if (memcmp(b->dst + p * part * size, b->src, (size_t)(part * size)))
            toy_wrong(r, "gather of %lld, bf16 %d, in place %d: not rank %d's part", (long long)part, bf16,
                      in_place, p);
    }
    if (!untouched(b->dst + n * size))
        toy_wrong(r, "gather of %lld wrote behind the whole", (long long)part);
    return 0;
}

static int64_t tp_bytes(zero_ctx *z)
{
    struct zero_stats stats = {0};
    return zero_get_stats(z, &stats) ? -1 : stats.tp_bytes;
}

/* A gather receives the other ranks' parts. A sum receives their summands of this rank's part, padded to 128
 * bytes per piece. */
static int count_bytes(struct toy_rank *r, zero_ctx *z, struct buffers *b)
{
    int64_t before = tp_bytes(z), part = 4096, others = r->world - 1;
    OR_RETURN(zero_all_gather(z, ZERO_AXIS_TP, b->dst, b->part, part, ZERO_BF16));
    int64_t gathered = tp_bytes(z) - before;
    OR_RETURN(zero_reduce_scatter(z, ZERO_AXIS_TP, b->part, b->src, part, ZERO_F32));
    int64_t summed = tp_bytes(z) - before - gathered;
    if (gathered != part * 2 * others || summed != part * 4 * others)
        toy_wrong(r, "%lld and %lld bytes received", (long long)gathered, (long long)summed);
    /* An all-reduce receives summands of this rank's part, then the others' sums, in the dtype of the call.
     * On GPUs a small one receives all summands. */
    for (int bf16 = 0; bf16 < 2; bf16++) {
        int64_t size = bf16 ? 2 : 4;
        before = tp_bytes(z);
        OR_RETURN(zero_all_reduce(z, ZERO_AXIS_TP, b->dst, b->src, part * r->world,
                                  bf16 ? ZERO_BF16 : ZERO_F32, ZERO_SUM));
        if (tp_bytes(z) - before != (where_has_gpu ? r->world : 2) * part * size * others)
            toy_wrong(r, "%lld bytes received for a sum, bf16 %d", (long long)(tp_bytes(z) - before), bf16);
    }
    return 0;
}

static int move_parts(struct toy_rank *r, struct way *w, zero_ctx *z, const struct place *at)
{
    static const int64_t parts[] = {0, 1, 2, 31, 32, 33, 1000, 87360, 87381, 131072, 131073, MAX_PART};
    static char memory[4][4][(size_t)MAX_PART * 4 * 4 + BEHIND];
    char(*own)[sizeof memory[0][0]] = memory[r->rank];
    struct buffers b = {own[0], own[1], own[2], own[3]};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        for (int way = 0; way < 4; way++) {
            OR_RETURN(compare_scatter(r, z, &b, parts[i], way & 1, way & 2));
            OR_RETURN(compare_gather(r, z, &b, parts[i], way & 1, way & 2, false));
            if (parts[i] % 2 == 0)
                OR_RETURN(compare_gather(r, z, &b, parts[i], way & 1, way & 2, true));
        }
    return count_bytes(r, z, &b);
}

static void parts_and_sums(void **state)
{
    for (int world = 1; world <= 4; world++) {
        struct setup s = {.stage = 2, .tp = world, .check = world == 3};
        struct toy_rank r[MAX_WORLD];
        run(&s, world, move_parts, "parts", r);
    }
}

/* ---- what is refused ---- */

static int gather_over(zero_ctx *z, enum zero_axis axis, float *dst, const float *src, int64_t n)
{
    return zero_all_gather(z, axis, dst, src, n, ZERO_F32);
}

static int scatter_over(zero_ctx *z, enum zero_axis axis, float *dst, const float *src, int64_t n)
{
    return zero_reduce_scatter(z, axis, dst, src, n, ZERO_F32);
}

static int refuse(struct toy_rank *r, struct way *w, zero_ctx *z, const struct place *at)
{
    float x[16] = {0};
    toy_expect(r, gather_over(NULL, ZERO_AXIS_TP, x, x + 8, 4), ZERO_ERR_ARG, "zero_all_gather: z is NULL");
    toy_expect(r, gather_over(z, ZERO_AXIS_PP, x, x + 8, 4), ZERO_ERR_ARG, "zero_all_gather: axis is 3");
    toy_expect(r, scatter_over(z, ZERO_AXIS_PP, x, x + 8, 4), ZERO_ERR_ARG,
               "zero_reduce_scatter: axis is 3; allowed: ZERO_AXIS_TP, ZERO_AXIS_CP");
    toy_expect(r, scatter_over(z, ZERO_AXIS_TP, x, NULL, 4), ZERO_ERR_ARG, "src is NULL");
    toy_expect(r, gather_over(z, ZERO_AXIS_TP, NULL, x, 4), ZERO_ERR_ARG, "dst is NULL");
    toy_expect(r, scatter_over(z, ZERO_AXIS_TP, x, x, -2), ZERO_ERR_ARG, "n is -2");
    toy_expect(r, gather_over(z, ZERO_AXIS_TP, x, x, INT64_MAX / 16 + 1), ZERO_ERR_ARG, "n is ");
    toy_expect(r, zero_all_gather(z, ZERO_AXIS_TP, x, x + 8, 4, (enum zero_dtype)0), ZERO_ERR_ARG,
               "zero_all_gather: dtype is 0; allowed: ZERO_F32, ZERO_BF16, ZERO_F16, ZERO_I32, ZERO_I64");
    toy_expect(r, zero_reduce_scatter(z, ZERO_AXIS_TP, x, x + 8, 4, ZERO_I32), ZERO_ERR_ARG,
               "zero_reduce_scatter: dtype is 4; allowed: ZERO_F32, ZERO_BF16");
    /* Inside the whole, only the place of the rank's own part is allowed. */
    toy_expect(r, gather_over(z, ZERO_AXIS_TP, x, x + (r->rank ? 0 : 4), 4), ZERO_ERR_ARG,
               "overlap; allowed: no overlap, or the smaller one at the place of rank");
    toy_expect(r, scatter_over(z, ZERO_AXIS_TP, x + 7, x, 4), ZERO_ERR_ARG, "overlap");
    toy_expect(r, scatter_over(z, ZERO_AXIS_TP, x, x + 3, 4), ZERO_ERR_ARG, "overlap");
    OR_RETURN(scatter_over(z, ZERO_AXIS_TP, x + 8, x, 4)); /* side by side is allowed */
    OR_RETURN(scatter_over(z, ZERO_AXIS_TP, x, x + 4, 4));
    /* Different numbers of elements fail the context on every rank. */
    toy_expect(r, gather_over(z, ZERO_AXIS_TP, x, x + 8, r->rank ? 3 : 2), ZERO_ERR_MISMATCH,
               "zero_all_gather");
    toy_expect(r, zero_begin(z, 0, ZERO_FORWARD), ZERO_ERR_MISMATCH, "zero_all_gather");
    return 0;
}

/* One rank gathers where the other scatters, with equal numbers of elements. */
static int swap_calls(struct toy_rank *r, struct way *w, zero_ctx *z, const struct place *at)
{
    float x[8] = {1, 2, 3, 4}, y[8] = {5, 6, 7, 8};
    return r->rank ? gather_over(z, ZERO_AXIS_TP, x, y, 2) : scatter_over(z, ZERO_AXIS_TP, x, y, 2);
}

static void what_is_refused(void **state)
{
    for (int stage = 0; stage <= 3; stage += 3) {
        struct setup good = {.stage = stage, .tp = 2}, swapped = good, apart = good;
        struct toy_rank r[MAX_WORLD];
        swapped.code = apart.code = ZERO_ERR_MISMATCH;
        swapped.says = "every rank must make the same calls";
        apart.says = "tensors[0] (s0 on rank 1)";
        apart.flag_apart = true;
        run(&good, 2, refuse, "refused", r);
        run(&swapped, 2, swap_calls, "other calls", r);
        run(&apart, 2, NULL, "flags", r);
    }
    static float x[24], *param = x, *grad;
    struct zero_config cfg = ZERO_CONFIG_INIT;
    struct zero_plan_info plan;
    struct zero_tensor t = {.name = "w",
                            .param = (void **)&param,
                            .grad = (void **)&grad,
                            .shape = {24},
                            .dtype = ZERO_F32,
                            .flags = ZERO_TP_PARTIAL};
    assert_int_equal(zero_plan(&t, 1, &cfg, &plan), 0); /* without a mesh there is no error */
    t.tp_cut = ZERO_TP_CUT(0);
    assert_int_equal(zero_plan(&t, 1, &cfg, &plan), ZERO_ERR_ARG);
    assert_non_null(strstr(zero_last_error(), "tensors[0] (w): ZERO_TP_PARTIAL with tp_cut"));
}

/* Without the flag, weights that are not cut drift apart between ranks. Check mode finds it. */
static int forget_the_flag(struct toy_rank *r, struct way *w, zero_ctx *z, const struct place *at)
{
    return one_step(r, w, 0, 0, 1);
}

/* With the flag, a gradient of all rows counts once per rank. A log line names the tensor once. */
static int flag_of_all_rows(struct toy_rank *r, struct way *w, zero_ctx *z, const struct place *at)
{
    double x[ROWS * C], target[ROWS * C];
    struct zero_step_info info;
    for (int step = 0; step < 2; step++) {
        draw_batch(step, x, target);
        OR_RETURN(part_forward(&w->net, w, x, target));
        OR_RETURN(part_backward(&w->net, w, target));
        OR_RETURN(zero_step(z, (float)LR, &info));
    }
    return 0;
}

static void a_flag_that_is_too_much(void **state)
{
    for (int check = 0; check < 2; check++)
        for (int stage = 0; stage <= 3; stage++)
            for (int bf16 = 0; bf16 < 2; bf16++) {
                struct toy_rank r[MAX_WORLD];
                struct setup s = {
                    .stage = stage, .tp = 4, .check = check, .bf16 = bf16, .wrongly_partial = 5};
                n_said_partial = 0;
                run(&s, 4, flag_of_all_rows, "a flag that is too much", r);
                assert_int_equal(n_said_partial, 4);
                assert_non_null(strstr(said_partial, "tensor b1 is the same on all 4 ranks of tp, but with"));
                assert_non_null(strstr(said_partial, "counts 4 times"));
            }
    n_said_partial = 0;
}

static void a_flag_that_is_forgotten(void **state)
{
    struct reference *want = make_reference(1);
    for (int stage = 0; stage <= 3; stage++) {
        struct setup s = {.stage = stage,
                          .tp = 2,
                          .n_micro = 1,
                          .prefetch = 2,
                          .check = true,
                          .want = want,
                          .sequence = true,
                          .unflagged = true,
                          .code = ZERO_ERR_MISMATCH,
                          .says = "has no tp_cut"};
        struct toy_rank r[MAX_WORLD];
        run(&s, 2, forget_the_flag, "a flag is forgotten", r);
    }
    free(want);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(parts_and_sums),
        cmocka_unit_test(the_same_bits_however_data_is_cut),
        cmocka_unit_test(other_numbers_of_micro_batches),
        cmocka_unit_test(what_is_refused),
        cmocka_unit_test(a_flag_that_is_forgotten),
        cmocka_unit_test(a_flag_that_is_too_much),
    };
    return cmocka_run_group_tests_name("sequence", tests, NULL, NULL);
}
