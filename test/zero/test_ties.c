/* SPDX-License-Identifier: Apache-2.0 */
/* test_ties.c: a tensor that the first and the last pipeline stage share: an embedding that is also the
 * head's matrix. Any number of pipeline stages must give the bits of the model on one rank. */
#include "test/cmocka.h"
#include "test/first_error.h"
#include "test/stand_in/half.h"
#include "test/zero/pipeline_ranks.h"
#include "test/zero/sample.h"
#include "test/zero/toy_net.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* A row is a token. x = e[id]; each layer computes y = x + w x^2; the logits are y e^T.
 *
 * With a gain g per channel, x = g e[id] and the logits are (g y) e^T. Then e and g are both tied. If tensor
 * parallelism cuts e's rows, a rank's gradient of g comes from its rows only. */
enum { V = 36, C = 10, ROWS = 3, LAYERS = 5, MICRO = 8, STEPS = 3, MAX_WORLD = 8 };

/* Values and gradients in f32 or bf16. */
struct array {
    void *at, *grad;
};

struct model {
    bool bf16;
    int n_layers, first;
    /* where the pipeline stage's units and tensors begin in the rank's table, and the rank's next pipeline
     * stage */
    int first_unit, first_tensor;
    struct model *next;
    /* rows of e on this rank, and the first one's number */
    int n_rows, row;
    bool has_embedding, has_head, nan, gains, overwrites, zeroes;
    /* the embedding, or the head, has no backward of e in this step */
    bool no_embedding, no_head;
    /* the head writes e's gradient outside its bracket */
    bool strays;
    struct array e, g, w[LAYERS];
    float x[MICRO][LAYERS + 1][ROWS * C], d_logits[MICRO][ROWS * V];
    /* gradients of the layers' outputs and of the embedding's rows, kept for the weights' gradients */
    float dx[MICRO][LAYERS + 1][ROWS * C];
    /* initial values */
    float own[LAYERS + 2][V * C];
    struct zero_tensor table[LAYERS + 3];
    int n_tensors;
    char name[LAYERS + 2][16];
};

static float get(const struct model *m, const void *at, int64_t i)
{
    return m->bf16 ? bf16_to_float(((const uint16_t *)at)[i]) : ((const float *)at)[i];
}

static void put(const struct model *m, void *at, int64_t i, float x)
{
    if (m->bf16)
        ((uint16_t *)at)[i] = bf16_from_float(x);
    else
        ((float *)at)[i] = x;
}

static void add(const struct model *m, void *at, int64_t i, float x)
{
    if (at) /* not frozen */
        put(m, at, i, get(m, at, i) + x);
}

static float first_value(int tensor, int64_t i)
{
    uint32_t seed = 99u + 40503u * (uint32_t)(tensor * 1009 + i);
    pipeline_draw(&seed), pipeline_draw(&seed);
    return (float)(0.4 * pipeline_draw(&seed));
}

/* ---- the model ---- */

/* Adds e (tensor 0), or the weights of layer tensor - 1 of the whole model. */
static void add_tensor(struct model *m, struct array *a, int tensor, int64_t n)
{
    int i = m->n_tensors++;
    bool whole = !tensor && !m->bf16; /* otherwise the values are cut here */
    a->at = m->own[i];
    for (int64_t k = 0; k < (whole ? V * C : n); k++)
        put(m, m->own[i], k, first_value(tensor, (tensor || whole ? 0 : (int64_t)m->row * C) + k));
    snprintf(m->name[i], sizeof m->name[i], tensor ? "w%d" : "e", tensor - 1);
    m->table[i] = (struct zero_tensor){.name = m->name[i],
                                       .param = &a->at,
                                       .grad = &a->grad,
                                       .shape = {tensor ? n : n / C, tensor ? 0 : C},
                                       .dtype = m->bf16 ? ZERO_BF16 : ZERO_F32,
                                       .unit = i,
                                       .tp_cut = tensor ? 0 : ZERO_TP_CUT(0),
                                       .flags = (tensor ? 0 : ZERO_TIED) | (whole ? ZERO_WHOLE : 0)};
}

/* Adds g to the unit of e. */
static void add_gain(struct model *m, int32_t unit, uint32_t flags)
{
    int i = m->n_tensors++;
    m->gains = true;
    m->g.at = m->own[i];
    for (int64_t k = 0; k < C; k++)
        put(m, m->own[i], k, 1 + first_value(77, k));
    snprintf(m->name[i], sizeof m->name[i], "g");
    m->table[i] = (struct zero_tensor){.name = m->name[i],
                                       .param = &m->g.at,
                                       .grad = &m->g.grad,
                                       .shape = {C},
                                       .dtype = m->bf16 ? ZERO_BF16 : ZERO_F32,
                                       .unit = unit,
                                       .flags = ZERO_TIED | flags};
}

static float gain(const struct model *m, int i)
{
    return m->gains ? get(m, m->g.at, i) : 1;
}

static struct model *make_model(int pp, int stage, int tp, int part, bool bf16)
{
    struct model *m = calloc(1, sizeof *m);
    m->bf16 = bf16;
    m->n_rows = V / tp;
    m->row = V / tp * part;
    m->has_embedding = stage == 0;
    m->has_head = stage == pp - 1;
    m->first = pipeline_layers_before(LAYERS, pp, stage);
    m->n_layers = pipeline_layers_before(LAYERS, pp, stage + 1) - m->first;
    if (m->has_embedding)
        add_tensor(m, &m->e, 0, (int64_t)m->n_rows * C);
    for (int l = 0; l < m->n_layers; l++)
        add_tensor(m, &m->w[l], 1 + m->first + l, C);
    if (m->has_head && !m->has_embedding)
        add_tensor(m, &m->e, 0, (int64_t)m->n_rows * C);
    return m;
}

static void free_model(struct model *m)
{
    while (m) {
        struct model *next = m->next;
        free(m);
        m = next;
    }
}

/* Returns a pipeline stage of a rank. */
static struct model *stage_of(struct model *m, int stage)
{
    while (stage-- > 0)
        m = m->next;
    return m;
}

static int unit_of_e(const struct model *m)
{
    return m->first_unit + (m->has_embedding ? 0 : m->n_layers);
}

static int unit_of_layer(const struct model *m, int l)
{
    return m->first_unit + m->has_embedding + l;
}

static int id_of(int batch, int r)
{
    uint32_t seed = 4711u + 2654435761u * (uint32_t)(batch * ROWS + r);
    for (int i = 0; i < 4; i++)
        pipeline_draw(&seed);
    return (int)(seed >> 8) % V;
}

static int embed(struct model *m, zero_ctx *z, int batch, float *x)
{
    OR_RETURN(zero_begin(z, unit_of_e(m), ZERO_FORWARD));
    for (int r = 0; r < ROWS; r++)
        for (int i = 0, id = id_of(batch, r) - m->row; i < C; i++)
            x[r * C + i] = id >= 0 && id < m->n_rows ? gain(m, i) * get(m, m->e.at, id * C + i) : 0;
    OR_RETURN(zero_end(z, unit_of_e(m), ZERO_FORWARD));
    return zero_all_reduce(z, ZERO_AXIS_TP, x, x, ROWS * C, ZERO_F32, ZERO_SUM);
}

/* Also computes the gradient of the logits. */
static int head(struct model *m, zero_ctx *z, int batch, const float *x, float *d_logits)
{
    OR_RETURN(zero_expect_equal(z, ZERO_AXIS_TP, x, ROWS * C, ZERO_F32));
    OR_RETURN(zero_begin(z, unit_of_e(m), ZERO_FORWARD));
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < m->n_rows; v++) {
            float sum = v + m->row == id_of(batch + 1, r) ? -1 : 0;
            for (int i = 0; i < C; i++)
                sum += gain(m, i) * x[r * C + i] * get(m, m->e.at, v * C + i);
            d_logits[r * V + v] = sum / ROWS;
        }
    return zero_end(z, unit_of_e(m), ZERO_FORWARD);
}

static int forward(struct model *m, zero_ctx *z, int batch, int micro, const float *in, float *out)
{
    if (m->has_embedding)
        OR_RETURN(embed(m, z, batch, m->x[micro][0]));
    else
        memcpy(m->x[micro][0], in, sizeof m->x[micro][0]);
    for (int l = 0; l < m->n_layers; l++) {
        const float *x = m->x[micro][l];
        float *y = m->x[micro][l + 1];
        OR_RETURN(zero_begin(z, unit_of_layer(m, l), ZERO_FORWARD));
        for (int i = 0; i < ROWS * C; i++)
            y[i] = x[i] + get(m, m->w[l].at, i % C) * x[i] * x[i];
        OR_RETURN(zero_end(z, unit_of_layer(m, l), ZERO_FORWARD));
    }
    if (m->has_head)
        return head(m, z, batch, m->x[micro][m->n_layers], m->d_logits[micro]);
    memcpy(out, m->x[micro][m->n_layers], sizeof m->x[micro][0]);
    return 0;
}

/* Adds to the gradient of e. The caller opens and closes the bracket. */
static int head_weights(struct model *m, int micro)
{
    const float *x = m->x[micro][m->n_layers], *d = m->d_logits[micro];
    if (m->overwrites || m->zeroes)
        memset(m->e.grad, 0, (size_t)m->n_rows * C * (m->bf16 ? 2 : 4));
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < m->n_rows; v++)
            for (int i = 0; i < C; i++) {
                add(m, m->e.grad, v * C + i, d[r * V + v] * (gain(m, i) * x[r * C + i]));
                if (m->gains)
                    add(m, m->g.grad, i, d[r * V + v] * get(m, m->e.at, v * C + i) * x[r * C + i]);
            }
    if (m->nan)
        put(m, m->e.grad, 3, NAN);
    return 0;
}

static int head_inputs(struct model *m, zero_ctx *z, int micro, float *dx)
{
    const float *d = m->d_logits[micro];
    memset(dx, 0, ROWS * C * sizeof *dx);
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < m->n_rows; v++)
            for (int i = 0; i < C; i++)
                dx[r * C + i] += d[r * V + v] * get(m, m->e.at, v * C + i) * gain(m, i);
    return zero_all_reduce(z, ZERO_AXIS_TP, dx, dx, ROWS * C, ZERO_F32, ZERO_SUM);
}

static int layers_backward(struct model *m, zero_ctx *z, int micro, float *dx, enum zero_phase phase)
{
    for (int l = m->n_layers; l-- > 0;) {
        const float *x = m->x[micro][l];
        float *of_output = m->dx[micro][l];
        OR_RETURN(zero_begin(z, unit_of_layer(m, l), phase));
        for (int i = 0; i < ROWS * C && phase != ZERO_BACKWARD_WEIGHT; i++) {
            of_output[i] = dx[i];
            dx[i] *= 1 + 2 * get(m, m->w[l].at, i % C) * x[i];
        }
        for (int i = 0; i < ROWS * C && phase != ZERO_BACKWARD_INPUT; i++)
            add(m, m->w[l].grad, i % C, of_output[i] * x[i] * x[i]);
        OR_RETURN(zero_end(z, unit_of_layer(m, l), phase));
    }
    return 0;
}

static int embed_backward(struct model *m, zero_ctx *z, int batch, int micro, const float *dx,
                          enum zero_phase phase)
{
    float *of_rows = m->dx[micro][LAYERS];
    if (phase != ZERO_BACKWARD_WEIGHT) {
        OR_RETURN(zero_expect_equal(z, ZERO_AXIS_TP, dx, ROWS * C, ZERO_F32));
        memcpy(of_rows, dx, ROWS * C * sizeof *of_rows);
    }
    for (int r = 0; r < ROWS && phase != ZERO_BACKWARD_INPUT; r++)
        for (int i = 0, id = id_of(batch, r) - m->row; i < C; i++)
            if (id >= 0 && id < m->n_rows) {
                if (m->gains)
                    add(m, m->g.grad, i, of_rows[r * C + i] * get(m, m->e.at, id * C + i));
                add(m, m->e.grad, id * C + i, of_rows[r * C + i] * gain(m, i));
            }
    return 0;
}

/* Opens or closes the bracket of e. The gradient of g needs the values of e, which a backward bracket of
 * weights does not show, so it also needs a forward bracket. */
static int bracket_of_e(struct model *m, zero_ctx *z, enum zero_phase phase, bool opens)
{
    int (*call)(zero_ctx * z, int32_t unit, enum zero_phase phase) = opens ? zero_begin : zero_end;
    OR_RETURN(call(z, unit_of_e(m), phase));
    return m->gains && phase == ZERO_BACKWARD_WEIGHT ? call(z, unit_of_e(m), ZERO_FORWARD) : 0;
}

/* With one pipeline stage, the bracket of e is open from the head to the embedding. */
static int backward(struct model *m, zero_ctx *z, int batch, int micro, float *dx, enum zero_phase phase)
{
    bool both = m->has_embedding && m->has_head, none = m->no_head && (!both || m->no_embedding);
    if (m->has_head && m->strays && phase != ZERO_BACKWARD_INPUT)
        OR_RETURN(head_weights(m, micro));
    if (m->has_head && none && phase != ZERO_BACKWARD_WEIGHT) {
        OR_RETURN(zero_begin(z, unit_of_e(m), ZERO_FORWARD));
        OR_RETURN(head_inputs(m, z, micro, dx));
        OR_RETURN(zero_end(z, unit_of_e(m), ZERO_FORWARD));
    } else if (m->has_head && !none) {
        OR_RETURN(bracket_of_e(m, z, phase, true));
        if (phase != ZERO_BACKWARD_INPUT && !m->no_head)
            OR_RETURN(head_weights(m, micro));
        if (phase != ZERO_BACKWARD_WEIGHT)
            OR_RETURN(head_inputs(m, z, micro, dx));
        if (!both)
            OR_RETURN(bracket_of_e(m, z, phase, false));
    }
    OR_RETURN(layers_backward(m, z, micro, dx, phase));
    if (!m->has_embedding || (m->no_embedding && (!both || none)))
        return 0;
    if (!both)
        OR_RETURN(bracket_of_e(m, z, phase, true));
    if (!m->no_embedding)
        OR_RETURN(embed_backward(m, z, batch, micro, dx, phase));
    return bracket_of_e(m, z, phase, false);
}

/* ---- one rank ---- */

struct setup {
    int pp, dp, tp, stage, prefetch, schedule;
    /* per_rank: pipeline stages per rank; 0: one. micro: micro-batches per rank; 0: the rank's share of
     * MICRO */
    int per_rank, micro;
    bool bf16, check, evaluates, drops, frozen, gains;
    /* backward of e is missing in the embedding (step 0), in the head (step 1), and in both (step 2) */
    bool partly;
    /* free_order: not deterministic. overwrites: the last pipeline stage's backward stores its gradient of e.
     * zeroes: it zeroes the gradient first, without declaring it */
    bool free_order, unclipped, overwrites, zeroes;
    /* with free_order, backward of e is missing in step 0: 1, in the embedding; 2, in the head; 3, in both */
    int lacks;
    const char *file;
    /* changes what is wrapped; NULL: no change. Every rank then gets this error */
    void (*change)(struct zero_config *cfg, struct model *m, const struct place *at);
    int code;
    const char *says;
    /* norms of every step, from the run with pp 1, once `known` is set */
    double norm[STEPS];
    bool known;
};

static int configure(struct toy_rank *r, struct zero_config *cfg, struct place *at)
{
    const struct setup *s = r->arg;
    *cfg = toy_config(r, s->stage);
    OR_RETURN(pipeline_place(cfg, s->stage, s->pp, s->dp, s->tp, at));
    cfg->pipeline.schedule = s->file ? ZERO_SCHEDULE_1F1B : s->schedule;
    cfg->pipeline.schedule_file = s->pp > 1 ? s->file : NULL;
    cfg->pipeline.stages_per_rank = s->per_rank ? s->per_rank : 1;
    cfg->pipeline.activation_bytes = ROWS * C * (int64_t)sizeof(float);
    cfg->debug.log = toy_forget_line;
    cfg->memory.prefetch = s->prefetch;
    cfg->debug.check = s->check;
    cfg->clip = s->unclipped ? 0 : 0.5f;
    cfg->deterministic = s->free_order ? 0 : ZERO_AUTO;
    cfg->grad_accum_steps = s->micro ? s->micro : MICRO / at->n_dp;
    return 0;
}

/* Declares the order of a single pipeline stage, in which e stays open around all layers of backward. */
static int32_t declare(struct zero_call *order)
{
    int32_t n = 0;
#define CALL(u, p, e)                                                                                        \
    order[n++] = (struct zero_call)                                                                          \
    {                                                                                                        \
        .unit = (u), .phase = (p), .is_end = (e)                                                             \
    }
    for (int u = 0; u <= LAYERS + 1; u++) {
        CALL(u % (LAYERS + 1), ZERO_FORWARD, 0);
        CALL(u % (LAYERS + 1), ZERO_FORWARD, 1);
    }
    CALL(0, ZERO_BACKWARD, 0);
    for (int u = LAYERS; u > 0; u--) {
        CALL(u, ZERO_BACKWARD, 0);
        CALL(u, ZERO_BACKWARD, 1);
    }
    CALL(0, ZERO_BACKWARD, 1);
#undef CALL
    return n;
}

static struct model *make_stage(const struct setup *s, const struct place *at, int n_stages, int stage)
{
    struct model *m = make_model(n_stages, stage, s->tp, at->tp, s->bf16);
    if (s->gains && (m->has_embedding || m->has_head))
        add_gain(m, unit_of_e(m), ZERO_TP_PARTIAL);
    for (int t = 0; s->frozen && t < m->n_tensors; t++)
        if (m->table[t].flags & ZERO_TIED)
            m->table[t].grad = NULL;
    m->overwrites = s->overwrites && m->has_head && n_stages > 1;
    m->zeroes = s->zeroes && m->has_head && n_stages > 1;
    for (int t = 0; m->overwrites && t < m->n_tensors; t++)
        if (m->name[t][0] == 'e')
            m->table[t].flags |= ZERO_GRAD_OVERWRITE;
    if (n_stages > 1 && m->has_head) /* the values come from the first pipeline stage */
        memset(m->e.at, 0x3f, sizeof m->own[0]);
    if (n_stages > 1 && m->has_head && s->gains)
        memset(m->g.at, 0x3f, sizeof m->own[0]);
    return m;
}

/* Makes all pipeline stages of a rank. table gets all their tensors; returns how many. */
static int make_stages(const struct setup *s, const struct place *at, struct model **first,
                       struct zero_tensor *table)
{
    int n = 0, units = 0, per_rank = s->per_rank ? s->per_rank : 1;
    for (int k = 0; k < per_rank; k++, first = &(*first)->next) {
        struct model *m = *first = make_stage(s, at, s->pp * per_rank, k * s->pp + at->pp);
        m->first_unit = units;
        m->first_tensor = n;
        for (int t = 0; t < m->n_tensors; t++) {
            units = m->table[t].unit + m->first_unit >= units ? m->table[t].unit + m->first_unit + 1 : units;
            m->table[t].unit += m->first_unit;
            m->table[t].pp_stage = k;
            table[n++] = m->table[t];
        }
    }
    return n;
}

static struct zero_plan_info plans[MAX_WORLD];

static int wrap(struct toy_rank *r, struct model **m, struct place *at, zero_ctx **z)
{
    struct zero_tensor table[LAYERS + 4];
    const struct setup *s = r->arg;
    struct zero_config cfg;
    struct zero_call order[4 * LAYERS + 6];
    OR_RETURN(configure(r, &cfg, at));
    if (s->pp == 1) {
        cfg.memory.order = order;
        cfg.memory.n_order = declare(order);
    }
    int n = make_stages(s, at, m, table);
    if (s->change) {
        s->change(&cfg, *m, at);
        return zero_wrap(z, (*m)->table, n, &cfg);
    }
    return FIRST_ERROR(zero_plan(table, n, &cfg, &plans[r->rank]), zero_wrap(z, table, n, &cfg));
}

/* A rank's work between zero_wrap and zero_unwrap. Returns the first error. */
typedef int rank_fn(struct toy_rank *r, struct model *m, zero_ctx *z, const struct place *at);

struct job {
    struct setup *s;
    rank_fn *fn;
};

static void run_rank(struct toy_rank *r)
{
    const struct job *j = r->arg;
    struct place at = {0};
    struct model *m = NULL;
    zero_ctx *z = NULL;
    r->arg = j->s;
    r->hash = 0;
    int err = wrap(r, &m, &at, &z);
    if (j->s->says)
        toy_expect(r, err, j->s->code, j->s->says);
    else
        toy_note(r, FIRST_ERROR(err, j->fn(r, m, z, &at)));
    zero_unwrap(&z);
    free_model(m);
}

/* Wraps on all ranks, and calls fn. Fails the test unless the outcome is that of s. */
static void run(struct setup *s, rank_fn *fn, const char *what, struct toy_rank r[MAX_WORLD])
{
    struct job j = {s, fn};
    int world = s->pp * s->dp * s->tp;
    toy_run(world, run_rank, &j, r, what);
}

static int run_actions(struct model *first, zero_ctx *z, int step, const struct place *at)
{
    struct zero_action a;
    float dx[ROWS * C];
    for (;;) {
        OR_RETURN(zero_next(z, &a));
        if (a.micro_batch < 0)
            return 0;
        int batch = step * MICRO + a.micro_batch * at->n_dp + at->dp;
        struct model *m = stage_of(first, a.pp_stage);
        if (a.phase == ZERO_FORWARD) {
            OR_RETURN(forward(m, z, batch, a.micro_batch, a.in, a.out));
        } else {
            if (a.in)
                memcpy(dx, a.in, sizeof dx);
            OR_RETURN(backward(m, z, batch, a.micro_batch, dx, (enum zero_phase)a.phase));
            if (a.out)
                memcpy(a.out, dx, sizeof dx);
        }
        OR_RETURN(zero_finish(z));
    }
}

static uint64_t hash_values(uint64_t hash, const void *at, int64_t n_bytes)
{
    for (int64_t i = 0; i < n_bytes; i++)
        hash = (hash ^ ((const uint8_t *)at)[i]) * 1099511628211u;
    return hash ^ hash >> 29;
}

/* Adds hashes of the tensors that this pipeline stage owns to r->hash. r->ms hashes the weights of tied
 * tensors, which must be equal on both pipeline stages. */
static int hash_stage(struct toy_rank *r, struct model *m, zero_ctx *z)
{
    static const int values[] = {ZERO_VALUE_PARAM, ZERO_VALUE_MASTER, ZERO_VALUE_STATE, ZERO_VALUE_STATE + 1};
    for (int t = 0; t < m->n_tensors; t++) {
        bool tied = m->table[t].flags & ZERO_TIED, is_gain = m->name[t][0] == 'g',
             copy = tied && !m->has_embedding;
        for (int v = 0; v < (copy || !m->table[t].grad ? 1 : 4); v++) {
            float w[V * C];
            int64_t n = tied && !is_gain ? (int64_t)m->n_rows * C : C;
            uint64_t seed = 1469598103934665603u + (uint64_t)((tied ? 0 : 1 + m->first + t) * 4 + v);
            seed -= !tied && m->has_embedding ? 4 : 0;
            seed += is_gain ? 1000 : 0;
            memset(w, 0xff, sizeof w);
            OR_RETURN(zero_read(z, m->first_tensor + t, values[v], 0, n, w));
            uint64_t hash = hash_values(seed, w, n * (m->bf16 && v == 0 ? 2 : 4));
            r->hash += copy ? 0 : hash;
            if (tied && v == 0)
                r->ms = r->ms * 31 + (int64_t)(hash >> 8);
        }
        if (copy && !is_gain)
            toy_expect(r, zero_read(z, m->first_tensor + t, ZERO_VALUE_STATE, 0, 1, &(float){0}),
                       ZERO_ERR_ARG,
                       "zero_read: tensor e is ZERO_TIED: the first pipeline stage has its master weights");
        if (copy && !is_gain)
            toy_expect(r, zero_write(z, m->first_tensor + t, ZERO_VALUE_STATE, 0, 1, &(float){0}),
                       ZERO_ERR_ARG,
                       "zero_write: tensor e is ZERO_TIED: the first pipeline stage has its master weights");
    }
    return 0;
}

static int hash_state(struct toy_rank *r, struct model *m, zero_ctx *z)
{
    r->ms = 0;
    for (; m; m = m->next)
        OR_RETURN(hash_stage(r, m, z));
    return 0;
}

static int evaluate(struct model *m, zero_ctx *z, const struct place *at)
{
    OR_RETURN(zero_evaluate(z));
    return run_actions(m, z, 7, at);
}

static int one_step(struct toy_rank *r, struct model *m, zero_ctx *z, int step, const struct place *at)
{
    struct setup *s = r->arg;
    struct zero_step_info info;
    for (struct model *x = m; x; x = x->next) {
        x->no_embedding = s->partly && step != 1;
        x->no_head = s->partly && step != 0;
    }
    if (s->evaluates && step == 1)
        OR_RETURN(evaluate(m, z, at));
    if (s->drops && step == 1) {
        OR_RETURN(run_actions(m, z, 11, at));
        OR_RETURN(zero_drop(z));
    }
    OR_RETURN(run_actions(m, z, step, at));
    OR_RETURN(zero_step(z, 0.01f, &info));
    if (!s->known && r->rank == 0)
        s->norm[step] = info.grad_norm;
    if (s->known && info.grad_norm != s->norm[step])
        toy_wrong(r, "step %d: norm %.17g instead of %.17g", step, info.grad_norm, s->norm[step]);
    return 0;
}

static int check_stats(struct toy_rank *r, zero_ctx *z)
{
    const struct setup *s = r->arg;
    struct zero_stats stats;
    OR_RETURN(zero_get_stats(z, &stats));
    pipeline_check_memory(r, &stats, s->stage <= 3 ? &plans[r->rank] : NULL);
    /* the second bracket in bracket_of_e */
    bool undeclared = s->gains && s->schedule == ZERO_SCHEDULE_ZERO_BUBBLE;
    if (s->pp > 1 && !s->partly && stats.n_replans > undeclared)
        toy_wrong(r, "the order was learned anew %lld times", (long long)stats.n_replans);
    return 0;
}

static int train(struct toy_rank *r, struct model *m, zero_ctx *z, const struct place *at)
{
    for (int step = 0; step < STEPS; step++)
        OR_RETURN(one_step(r, m, z, step, at));
    OR_RETURN(hash_state(r, m, z));
    OR_RETURN(check_stats(r, z));
    for (const struct model *x = m; x; x = x->next)
        if (x->has_head && !x->has_embedding && x->e.grad)
            toy_wrong(r, "the copy's gradient is still shown");
    return 0;
}

/* ---- tests ---- */

/* Checks that a pipeline stage's ranks have equal bits, and that both pipeline stages have equal weights of
 * e. */
static void check_copies(const struct setup *s, const struct toy_rank *r, uint64_t want[], const char *what)
{
    int n_stage = s->dp * s->tp;
    pipeline_compare(r, s->pp, s->dp, s->tp, want, what);
    for (int k = (s->pp - 1) * n_stage; k < s->pp * n_stage; k++)
        if (r[k].ms != r[k % s->tp].ms)
            fail_msg("%s: rank %d has other weights of e than its owner", what, k);
}

static void one_layout(struct setup *s, uint64_t want[2], int n)
{
    struct toy_rank r[MAX_WORLD];
    char what[160];
    if (s->known && !sample_has())
        return;
    s->prefetch = n % 3;
    s->schedule = s->per_rank > 1 ? ZERO_SCHEDULE_INTERLEAVED : ZERO_SCHEDULE_1F1B;
    s->schedule = n % (s->per_rank > 1 ? 5 : 3) == 1 ? ZERO_SCHEDULE_GPIPE : s->schedule;
    s->schedule = n % 3 == 2 && s->per_rank < 2 ? ZERO_SCHEDULE_ZERO_BUBBLE : s->schedule;
    s->check = n % 5 == 4;
    s->evaluates = n % 4 >= 2;
    s->drops = n % 3 == 1;
    snprintf(
        what, sizeof what,
        "%s, %d stages a rank, pp %d, dp %d, tp %d, stage %d, schedule %d, check %d, drops %d, frozen %d",
        s->bf16 ? "bf16" : "f32", s->per_rank, s->pp, s->dp, s->tp, s->stage, s->schedule, s->check, s->drops,
        s->frozen);
    run(s, train, what, r);
    check_copies(s, r, want, what);
    s->known = true;
}

static void every_layout(struct setup s, bool all_stages)
{
    double norm[STEPS] = {0};
    for (s.tp = 1; s.tp <= 2; s.tp++) {
        uint64_t want[2] = {0};
        int n = 0;
        s.known = false;
        for (s.pp = 1; s.pp <= 4; s.pp++)
            for (s.dp = 1; s.dp <= 4; s.dp *= 2)
                for (s.stage = 0; s.stage < TOY_STAGES; s.stage++) {
                    bool tried = s.pp * s.dp * s.tp <= MAX_WORLD && (s.stage <= 3 || s.dp == 4) &&
                                 (all_stages || s.pp == 1 || s.stage == (s.pp + s.dp) % 4);
                    if (tried)
                        one_layout(&s, want, n++);
                }
        assert_true(n >= 10);
        for (int step = 0; step < STEPS; step++) { /* tp 2 must be close to tp 1 */
            if (s.tp == 2 && !(fabs(s.norm[step] - norm[step]) <= (s.bf16 ? 0.03 : 1e-5) * norm[step]))
                fail_msg("step %d: norm %.9g in 2 parts instead of %.9g", step, s.norm[step], norm[step]);
            norm[step] = s.norm[step];
        }
    }
}

static void the_same_bits_in_f32(void **state)
{
    every_layout((struct setup){.bf16 = false}, true);
}

static void the_same_bits_in_bf16(void **state)
{
    every_layout((struct setup){.bf16 = true}, false);
}

/* With a gain, each tensor-parallel rank has a share of g's gradient, from its rows of e. It is summed over
 * tp once, after the last pipeline stage's share arrived. */
static void the_same_bits_of_shares(void **state)
{
    every_layout((struct setup){.gains = true}, false);
    every_layout((struct setup){.gains = true, .bf16 = true}, false);
}

/* The first pipeline stage is the first one of the first rank, and the last one is the last of the last
 * rank. */
static void the_same_bits_with_several_stages_on_a_rank(void **state)
{
    struct setup s = {.dp = 1, .pp = 1, .tp = 1};
    uint64_t want[2] = {0};
    int n = 0;
    one_layout(&s, want, n++);
    for (s.per_rank = 2; s.per_rank <= 3; s.per_rank++)
        for (s.pp = 2; s.pp <= 4; s.pp++)
            for (s.dp = 1; s.dp <= 2; s.dp++)
                for (s.stage = 0; s.stage < 4; s.stage++)
                    one_layout(&s, want, n++);
}

/* If a round has more micro-batches than there are ranks, the last pipeline stage sends all gradients of a
 * round before the first one takes any. The other pipeline stages of its rank run later, so it must not wait
 * for buffer space. */
static void a_round_of_many_micro_batches(void **state)
{
    for (int ranks = 2; ranks <= 4; ranks++) {
        struct setup s = {.dp = 1, .pp = 1, .tp = 1, .micro = 2 * ranks - 1};
        uint64_t want[2] = {0};
        one_layout(&s, want, 0);
        s.pp = ranks;
        s.per_rank = 2;
        one_layout(&s, want, 0);
    }
}

/* A tied tensor is updated if either pipeline stage has brackets of it, with the sum of their gradients. */
static void either_stage_has_brackets(void **state)
{
    every_layout((struct setup){.partly = true}, false);
    every_layout((struct setup){.partly = true, .bf16 = true, .overwrites = true}, false);
}

static void the_same_bits_frozen(void **state)
{
    every_layout((struct setup){.frozen = true}, false);
}

/* With this schedule the last pipeline stage sends all its gradients before the first one takes any. */
static void the_last_stage_may_be_far_ahead(void **state)
{
    static const char rows[] = "0F0,0F1,0F2,0F3,0F4,0F5,0F6,0F7,0B0,0B1,0B2,0B3,0B4,0B5,0B6,0B7\n"
                               "1F0,1F1,1F2,1F3,1F4,1F5,1F6,1F7,1B0,1B1,1B2,1B3,1B4,1B5,1B6,1B7\n"
                               "2F0,2B0,2F1,2B1,2F2,2B2,2F3,2B3,2F4,2B4,2F5,2B5,2F6,2B6,2F7,2B7\n";
    char path[64];
    int n = 0;
    struct setup s = {.dp = 1, .tp = 1, .file = path};
    uint64_t want[2] = {0};
    pipeline_write_file(path, rows);
    for (s.pp = 1; s.pp <= 3; s.pp += 2)
        for (s.stage = 0; s.stage <= 3; s.stage++)
            one_layout(&s, want, n++);
    unlink(path);
}

/* ---- sums in any order ---- */

/* The whole model's gradients of e and g in double, as means over micro-batches. */
struct reference {
    double e[V * C], g[C];
};

static void add_reference(struct reference *ref, const struct model *m, int batch, int lacks)
{
    double x[LAYERS + 1][ROWS * C], dx[ROWS * C];
    memset(dx, 0, sizeof dx);
    for (int k = 0; k < ROWS * C; k++)
        x[0][k] = (double)gain(m, k % C) * (double)get(m, m->e.at, id_of(batch, k / C) * C + k % C);
    for (int l = 0; l < LAYERS; l++)
        for (int k = 0; k < ROWS * C; k++)
            x[l + 1][k] = x[l][k] + (double)get(m, m->w[l].at, k % C) * x[l][k] * x[l][k];
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < V; v++) {
            double d = v == id_of(batch + 1, r) ? -1 : 0;
            for (int i = 0; i < C; i++)
                d += (double)gain(m, i) * x[LAYERS][r * C + i] * (double)get(m, m->e.at, v * C + i);
            d /= ROWS;
            for (int i = 0; i < C; i++) {
                double of_e = (double)get(m, m->e.at, v * C + i), in = x[LAYERS][r * C + i];
                ref->e[v * C + i] += lacks & 2 ? 0 : d * (double)gain(m, i) * in / MICRO;
                ref->g[i] += d * of_e * in / MICRO;
                dx[r * C + i] += d * of_e * (double)gain(m, i);
            }
        }
    for (int l = LAYERS; l-- > 0;)
        for (int k = 0; k < ROWS * C; k++)
            dx[k] *= 1 + 2 * (double)get(m, m->w[l].at, k % C) * x[l][k];
    for (int k = 0; k < ROWS * C; k++) {
        int at = id_of(batch, k / C) * C + k % C;
        ref->e[at] += lacks & 1 ? 0 : dx[k] * (double)gain(m, k % C) / MICRO;
        ref->g[k % C] += dx[k] * (double)get(m, m->e.at, at) / MICRO;
    }
}

static void make_reference(const struct setup *s, struct reference *ref)
{
    struct model *m = make_model(1, 0, 1, 0, s->bf16);
    if (s->gains)
        add_gain(m, 0, 0);
    memset(ref, 0, sizeof *ref);
    for (int batch = 0; batch < MICRO; batch++)
        add_reference(ref, m, batch, s->lacks);
    free(m);
}

static void expect_near(struct toy_rank *r, const char *name, const float *got, const double *want, int n,
                        double tolerance)
{
    double most = 0;
    for (int i = 0; i < n; i++)
        most = fmax(most, fabs(want[i]));
    for (int i = 0; i < n; i++)
        if (!(fabs((double)got[i] - want[i]) <= tolerance * most)) {
            toy_wrong(r, "gradient of %s: element %d is %.9g, expected %.9g; ", name, i, (double)got[i],
                      want[i]);
            return;
        }
}

/* Takes a step without a backward of e on either pipeline stage. It must not update e. */
static int step_without_e(struct toy_rank *r, struct model *m, zero_ctx *z, const struct place *at)
{
    float before[V * C] = {0}, after[V * C] = {0};
    int64_t n = (int64_t)m->n_rows * C;
    int t = 0;
    while (m->name[t][0] != 'e' && m->has_embedding)
        t++;
    m->no_embedding = m->no_head = true;
    if (m->has_embedding)
        OR_RETURN(zero_read(z, t, ZERO_VALUE_MASTER, 0, n, before));
    OR_RETURN(run_actions(m, z, 1, at));
    OR_RETURN(zero_step(z, 0.01f, NULL));
    if (m->has_embedding)
        OR_RETURN(zero_read(z, t, ZERO_VALUE_MASTER, 0, n, after));
    if (memcmp(before, after, sizeof before) != 0)
        toy_wrong(r, "a step that leaves out e has changed it; ");
    m->no_embedding = m->no_head = false;
    return 0;
}

/* Compares the first pipeline stage's gradients, which are sums over both, with the reference. */
static int read_gradients(struct toy_rank *r, const struct model *m, zero_ctx *z)
{
    const struct setup *s = r->arg;
    static _Thread_local struct reference ref;
    float got[V * C];
    make_reference(s, &ref);
    for (int t = 0; m->has_embedding && t < m->n_tensors; t++) {
        bool is_gain = m->name[t][0] == 'g';
        int n = is_gain ? C : m->n_rows * C;
        if (!is_gain && m->name[t][0] != 'e')
            continue;
        OR_RETURN(zero_read(z, t, ZERO_VALUE_GRAD, 0, n, got));
        expect_near(r, m->name[t], got, is_gain ? ref.g : ref.e + (ptrdiff_t)m->row * C, n,
                    s->bf16 ? 0.02 : 2e-6);
    }
    return 0;
}

static int train_in_any_order(struct toy_rank *r, struct model *m, zero_ctx *z, const struct place *at)
{
    const struct setup *s = r->arg;
    struct zero_stats stats, first;
    double norm;
    OR_RETURN(zero_get_stats(z, &first));
    m->no_embedding = s->lacks & 1;
    m->no_head = s->lacks & 2;
    OR_RETURN(run_actions(m, z, 0, at));
    OR_RETURN(zero_norm(z, &norm));
    OR_RETURN(read_gradients(r, m, z));
    OR_RETURN(zero_step(z, 0.01f, NULL));
    if (s->lacks)
        OR_RETURN(step_without_e(r, m, z, at));
    for (int step = 1; step < STEPS; step++) {
        if (step == 1 && s->drops) {
            OR_RETURN(run_actions(m, z, 11, at));
            OR_RETURN(zero_drop(z));
        }
        OR_RETURN(run_actions(m, z, step, at));
        OR_RETURN(zero_step(z, 0.01f, NULL));
    }
    OR_RETURN(hash_state(r, m, z));
    if (!s->lacks) /* with lacks, the library learns the order anew */
        OR_RETURN(check_stats(r, z));
    OR_RETURN(zero_get_stats(z, &stats));
    if (at->pp == 0 && !s->known)
        r->ms = stats.pp_bytes - first.pp_bytes;
    return 0;
}

/* Without a fixed order, the last pipeline stage sends one message per step to the first, instead of one per
 * micro-batch. */
static void sums_go_once_a_step(void **state)
{
    for (int n = 0; n < 96; n++) {
        struct setup s = {.pp = 2 + n % 3,
                          .dp = 1 + n / 3 % 2,
                          .tp = 1,
                          .stage = n / 6 % 4,
                          .bf16 = n / 24 % 2,
                          .gains = n / 48,
                          .unclipped = true,
                          .overwrites = n % 5 == 1,
                          .zeroes = n % 5 == 3,
                          .drops = n % 4 == 3,
                          .check = n % 7 == 6,
                          .prefetch = n % 3,
                          .schedule = n % 2 ? ZERO_SCHEDULE_GPIPE : ZERO_SCHEDULE_1F1B};
        struct toy_rank r[MAX_WORLD];
        int64_t bytes[2];
        char what[128];
        if (s.pp * s.dp == 4 && s.dp == 1)
            s.tp = 2;
        for (int free_order = 0; free_order < 2; free_order++) {
            s.free_order = free_order;
            snprintf(what, sizeof what,
                     "%s, pp %d, dp %d, tp %d, stage %d, overwrites %d, zeroes %d, check %d, order %d",
                     s.bf16 ? "bf16" : "f32", s.pp, s.dp, s.tp, s.stage, s.overwrites, s.zeroes, s.check,
                     free_order);
            run(&s, train_in_any_order, what, r);
            bytes[free_order] = r[0].ms;
        }
        int n_micro = MICRO / s.dp;
        assert_int_equal(bytes[0] - bytes[1], (STEPS + s.drops) * (n_micro - 1) * 4096);
        s.known = true; /* keeps the hash of e's weights in r->ms */
        run(&s, train_in_any_order, what, r);
        check_copies(&s, r, (uint64_t[2]){0}, what);
    }
}

/* Each pipeline stage then sums its own gradients, and either may have none. */
static void it_may_be_left_out_in_any_order(void **state)
{
    for (int n = 0; n < 12; n++) {
        struct setup s = {.pp = 2 + n % 2,
                          .dp = 1 + n / 2 % 2,
                          .tp = 1,
                          .stage = n % 4,
                          .bf16 = n / 6,
                          .lacks = 1 + n % 3,
                          .free_order = true,
                          .unclipped = true,
                          .schedule = n % 2 ? ZERO_SCHEDULE_GPIPE : ZERO_SCHEDULE_1F1B};
        struct toy_rank r[MAX_WORLD];
        char what[96];
        snprintf(what, sizeof what, "left out, pp %d, dp %d, stage %d, lacks %d", s.pp, s.dp, s.stage,
                 s.lacks);
        run(&s, train_in_any_order, what, r);
        s.known = true; /* keeps the hash of e's weights in r->ms */
        run(&s, train_in_any_order, what, r);
        check_copies(&s, r, (uint64_t[2]){0}, what);
    }
}

/* ---- a step that is skipped ---- */

static int skip_step(struct toy_rank *r, struct model *m, zero_ctx *z, const struct place *at)
{
    struct zero_step_info info = {.skipped = 0};
    OR_RETURN(hash_state(r, m, z));
    uint64_t before = r->hash;
    int64_t weights = r->ms;
    m->nan = m->has_head && at->dp == 1;
    OR_RETURN(run_actions(m, z, 0, at));
    OR_RETURN(zero_step(z, 0.01f, &info));
    r->hash = 0;
    OR_RETURN(hash_state(r, m, z));
    if (!info.skipped || r->hash != before || r->ms != weights)
        toy_wrong(r, "skipped is %d, the state is %s", info.skipped, r->hash == before ? "equal" : "another");
    return 0;
}

/* A NaN in the copy's gradient reaches the owner. */
static void all_stages_skip_a_step(void **state)
{
    struct setup s = {.pp = 3, .dp = 2, .tp = 1};
    struct toy_rank r[MAX_WORLD];
    for (s.stage = 0; s.stage <= 3; s.stage++)
        run(&s, skip_step, "a step that is skipped", r);
}

/* ---- wrong calls ---- */

/* The head writes outside a bracket, and then has no bracket. The copy's pointer is assigned, and then put
 * back. */
static int forget_bracket(struct toy_rank *r, struct model *m, zero_ctx *z, const struct place *at)
{
    struct zero_action a = {.phase = 0};
    float dx[ROWS * C] = {0}, *before = NULL;
    int met = 0;
    for (;;) {
        OR_RETURN(zero_next(z, &a));
        if (a.micro_batch < 0)
            break;
        bool first = a.phase == ZERO_BACKWARD && met++ == 0;
        if (a.phase == ZERO_FORWARD) {
            OR_RETURN(forward(m, z, a.micro_batch, a.micro_batch, a.in, a.out));
        } else {
            m->no_head = m->strays = first && m->has_head;
            OR_RETURN(backward(m, z, a.micro_batch, a.micro_batch, dx, (enum zero_phase)a.phase));
        }
        if (first && m->has_head) {
            toy_expect(
                r, zero_finish(z), ZERO_ERR_ORDER,
                "zero_finish: micro-batch 0 has no backward bracket of unit 2 here, but the gradient of "
                "tensor e is not zero");
            memset(m->e.grad, 0, V * C * sizeof(float));
            before = m->e.grad;
            m->e.grad = dx;
            toy_expect(r, zero_finish(z), ZERO_ERR_ORDER, "zero_finish: *grad of tensor e is ");
            m->e.grad = before;
        }
        OR_RETURN(zero_finish(z));
    }
    return zero_step(z, 0.01f, NULL);
}

static void what_is_written_outside_is_named(void **state)
{
    struct setup s = {.pp = 2, .dp = 1, .tp = 1, .stage = 2};
    struct toy_rank r[MAX_WORLD];
    run(&s, forget_bracket, "a gradient outside of a bracket", r);
}

static const struct setup *refused[16];
static int n_refused;

/* One row: a statement that changes cfg or the model m, and the error of every rank. The row adds itself to
 * refused[] before main(). */
#define REFUSED(...)                  REFUSED_NUMBERED(__COUNTER__, __VA_ARGS__)
#define REFUSED_NUMBERED(number, ...) REFUSED_ROW(number, __VA_ARGS__)
#define REFUSED_ROW(number, statement, code_, says_)                                                         \
    static void change_##number(struct zero_config *cfg, struct model *m, const struct place *at)            \
    {                                                                                                        \
        (void)cfg, (void)m, (void)at;                                                                        \
        statement;                                                                                           \
    }                                                                                                        \
    __attribute__((constructor)) static void add_##number(void)                                              \
    {                                                                                                        \
        static const struct setup row = {.pp = 3,                                                            \
                                         .dp = 1,                                                            \
                                         .tp = 1,                                                            \
                                         .stage = 3,                                                         \
                                         .change = change_##number,                                          \
                                         .code = ZERO_ERR_##code_,                                           \
                                         .says = says_};                                                     \
        refused[n_refused++] = &row;                                                                         \
    }

static void whole_with_a_share(struct model *m)
{
    for (int t = 0; t < m->n_tensors; t++)
        m->table[t].tp_cut = 0;
    if (m->has_head)
        m->table[m->n_tensors - 1].flags |= ZERO_TP_PARTIAL;
}

#define DIFFER "rank 2 and rank 0 differ in their tensors with ZERO_TIED"
REFUSED(if (m->has_embedding) m->table[0].flags |= ZERO_GRAD_OVERWRITE, ARG,
        "(e): ZERO_GRAD_OVERWRITE with ZERO_TIED on the first pipeline stage")
REFUSED(cfg->memory.grad_in_place = 1, NOTSUP, "(e): ZERO_TIED with grad_in_place 1 and grad_accum_steps 8")
REFUSED(if (at->pp == 1) m->table[0].flags |= ZERO_TIED, NOTSUP,
        "(w2): ZERO_TIED on pipeline stage 1; allowed: on the first (0) and")
REFUSED(if (m->has_head) m->table[m->n_tensors - 1].flags = 0, MISMATCH,
        "rank 0 has a tensor with ZERO_TIED, and rank 2 has none")
REFUSED(if (m->has_head) cfg->pipeline.stages_per_rank = 2, MISMATCH,
        "stages_per_rank is 2 on rank 2 and 1 on rank 0")
REFUSED(if (m->has_head) m->table[m->n_tensors - 1].shape[0]--, MISMATCH, DIFFER)
REFUSED(whole_with_a_share(m), MISMATCH, DIFFER)
REFUSED(if (m->has_head) m->table[m->n_tensors - 1].flags ^= ZERO_WHOLE, MISMATCH, DIFFER)
REFUSED(if (m->has_embedding)(m->table[0].flags |= ZERO_STACKED, m->table[0].tp_cut = 0), ARG,
        "(e): ZERO_TIED with ZERO_STACKED")

static void what_cannot_be_is_refused(void **state)
{
    for (int i = 0; i < n_refused; i++) {
        struct setup s = *refused[i];
        struct toy_rank r[MAX_WORLD];
        run(&s, NULL, s.says, r);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(either_stage_has_brackets),
                                       cmocka_unit_test(the_same_bits_in_f32),
                                       cmocka_unit_test(the_same_bits_in_bf16),
                                       cmocka_unit_test(the_same_bits_of_shares),
                                       cmocka_unit_test(the_same_bits_with_several_stages_on_a_rank),
                                       cmocka_unit_test(a_round_of_many_micro_batches),
                                       cmocka_unit_test(the_same_bits_frozen),
                                       cmocka_unit_test(sums_go_once_a_step),
                                       cmocka_unit_test(it_may_be_left_out_in_any_order),
                                       cmocka_unit_test(the_last_stage_may_be_far_ahead),
                                       cmocka_unit_test(all_stages_skip_a_step),
                                       cmocka_unit_test(what_is_written_outside_is_named),
                                       cmocka_unit_test(what_cannot_be_is_refused)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
