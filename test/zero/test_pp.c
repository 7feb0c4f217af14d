/* SPDX-License-Identifier: Apache-2.0 */
/* test_pp.c: a model with pipeline stages. For any number of pipeline stages, schedule and division of the
 * data, weights, states, norms and losses have the bits of the model on one rank. */
#include "kernels/state_codes.h"
#include "test/cmocka.h"
#include "test/first_error.h"
#include "test/zero/pipeline_ranks.h"
#include "test/zero/sample.h"
#include "test/zero/toy_net.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* Layers go to the pipeline stages evenly, and the first ones get the remainder. So most pipelines are
 * uneven. */
enum { LAYERS = 5, C = 10, H = 12, ROWS = 2, OF_LAYER = 3, STEPS = 3, MICRO = 8, MAX_WORLD = 8 };

struct layer {
    float *w1, *w2, *b, *dw1, *dw2, *db;
};

struct model {
    /* number of layers here, and the first one's number in the whole model */
    int n_layers, first;
    /* where the pipeline stage's units and tensors begin in the rank's table, and the rank's next pipeline
     * stage */
    int first_unit, first_tensor;
    struct model *next;
    /* nests: the first layer's bracket stays open around those of the others; lingers: actions are delayed */
    bool nests, lingers;
    /* recomputes: each backward has a declared forward bracket around it; splits: a whole backward computes
     * all gradients of inputs before those of weights, as declared */
    bool recomputes, splits;
    /* the first layer has a second, declared backward bracket, which adds nothing */
    bool again;
    /* one gradient is NaN */
    bool poisoned;
    /* channels between the products on this tensor-parallel rank */
    int hidden;
    struct layer layer[LAYERS];
    float x[MICRO][LAYERS + 1][ROWS * C], h[MICRO][LAYERS][ROWS * H];
    /* gradients of a layer's output (gx, and gy for the products) and of tanh's argument (ga), kept from the
     * backward of inputs for that of weights */
    float gx[MICRO][LAYERS][ROWS * C], gy[MICRO][LAYERS][ROWS * C], ga[MICRO][LAYERS][ROWS * H];
    float own[LAYERS * OF_LAYER][C * H];
    struct zero_tensor table[LAYERS * OF_LAYER];
    char name[LAYERS * OF_LAYER][16];
};

static void draw_batch(int micro, float x[ROWS * C], float target[ROWS * C])
{
    uint32_t seed = 4711u + 2654435761u * (uint32_t)micro;
    for (int i = 0; i < 4; i++)
        pipeline_draw(&seed);
    for (int i = 0; i < ROWS * C; i++) {
        x[i] = (float)pipeline_draw(&seed);
        target[i] = (float)pipeline_draw(&seed);
    }
}

/* Returns weight i of a tensor of the whole model. Tensors are w1, w2 and b of each layer. */
static float first_value(int tensor, int64_t i)
{
    uint32_t seed = 99u + 40503u * (uint32_t)(tensor * 1009 + i);
    pipeline_draw(&seed), pipeline_draw(&seed);
    return (float)(0.5 * pipeline_draw(&seed));
}

static int64_t n_elems(int tensor, int tp)
{
    return tensor % OF_LAYER == 2 ? C : (int64_t)C * H / tp;
}

static int64_t element_of(int tensor, int tp, int part, int64_t i)
{
    int hidden = H / tp;
    if (tensor % OF_LAYER == 2)
        return i;
    if (tensor % OF_LAYER == 0) /* rows of w1 */
        return (int64_t)part * hidden * C + i;
    return i / hidden * H + (int64_t)part * hidden + i % hidden;
}

static struct model *make_model(int pp, int stage, int tp, int part)
{
    static const char *const names[OF_LAYER] = {"w1", "w2", "b"};
    struct model *m = calloc(1, sizeof *m);
    m->hidden = H / tp;
    m->first = pipeline_layers_before(LAYERS, pp, stage);
    m->n_layers = pipeline_layers_before(LAYERS, pp, stage + 1) - m->first;
    for (int t = 0; t < m->n_layers * OF_LAYER; t++) {
        struct layer *l = &m->layer[t / OF_LAYER];
        float **const param[OF_LAYER] = {&l->w1, &l->w2, &l->b};
        float **const grad[OF_LAYER] = {&l->dw1, &l->dw2, &l->db};
        int k = t % OF_LAYER, whole = m->first * OF_LAYER + t;
        *param[k] = m->own[t];
        for (int64_t i = 0; i < n_elems(t, tp); i++)
            m->own[t][i] = first_value(whole, element_of(t, tp, part, i));
        snprintf(m->name[t], sizeof m->name[t], "%s%d", names[k], m->first + t / OF_LAYER);
        m->table[t] = (struct zero_tensor){.name = m->name[t],
                                           .param = (void **)param[k],
                                           .grad = (void **)grad[k],
                                           .shape = {n_elems(t, tp)},
                                           .dtype = ZERO_F32,
                                           .unit = t / OF_LAYER,
                                           .tp_cut = k == 2 ? 0 : ZERO_TP_CUT(0)};
    }
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

/* Makes all n pipeline stages of a rank, with one table in the first. If there are more pipeline stages than
 * layers, the last ones have none and only pass activations on. */
static struct model *make_stages(int pp, int at, int n, int tp, int part, int *n_tensors)
{
    struct model *first = make_model(pp * n, at, tp, part), *last = first;
    *n_tensors = first->n_layers * OF_LAYER;
    for (int k = 1; k < n; k++) {
        struct model *m = last->next = make_model(pp * n, k * pp + at, tp, part);
        m->first_unit = last->first_unit + last->n_layers;
        m->first_tensor = *n_tensors;
        for (int t = 0; t < m->n_layers * OF_LAYER; t++) {
            m->table[t].unit += m->first_unit;
            m->table[t].pp_stage = k;
            first->table[(*n_tensors)++] = m->table[t];
        }
        last = m;
    }
    return first;
}

static struct model *stage_of(struct model *m, int stage)
{
    while (stage-- > 0)
        m = m->next;
    return m;
}

/* h = tanh(w1 x); y = x + w2 h + b */
static int forward(struct model *m, zero_ctx *z, int micro)
{
    bool nests = m->nests && m->n_layers;
    if (nests)
        OR_RETURN(zero_begin(z, m->first_unit, ZERO_FORWARD));
    for (int l = 0; l < m->n_layers; l++) {
        const struct layer *a = &m->layer[l];
        float *x = m->x[micro][l], *y = m->x[micro][l + 1], *h = m->h[micro][l];
        if (l || !nests)
            OR_RETURN(zero_begin(z, m->first_unit + l, ZERO_FORWARD));
        OR_RETURN(zero_expect_equal(z, ZERO_AXIS_TP, x, ROWS * C, ZERO_F32));
        for (int r = 0; r < ROWS; r++) {
            for (int j = 0; j < m->hidden; j++) {
                float sum = 0;
                for (int i = 0; i < C; i++)
                    sum += a->w1[j * C + i] * x[r * C + i];
                h[r * m->hidden + j] = tanhf(sum);
            }
            for (int i = 0; i < C; i++) {
                float sum = 0;
                for (int j = 0; j < m->hidden; j++)
                    sum += a->w2[i * m->hidden + j] * h[r * m->hidden + j];
                y[r * C + i] = sum;
            }
        }
        OR_RETURN(zero_all_reduce(z, ZERO_AXIS_TP, y, y, ROWS * C, ZERO_F32, ZERO_SUM));
        for (int i = 0; i < ROWS * C; i++)
            y[i] += x[i] + a->b[i % C];
        if (l || !nests)
            OR_RETURN(zero_end(z, m->first_unit + l, ZERO_FORWARD));
    }
    return nests ? zero_end(z, m->first_unit, ZERO_FORWARD) : 0;
}

/* dx: in: the gradient of the layer's output; out: that of its input */
static int layer_inputs(struct model *m, zero_ctx *z, int micro, int l, float dx[ROWS * C])
{
    const struct layer *a = &m->layer[l];
    const float *h = m->h[micro][l];
    float du[ROWS * C], *da = m->ga[micro][l], *dy = m->gy[micro][l];
    memcpy(m->gx[micro][l], dx, sizeof m->gx[micro][l]);
    OR_RETURN(zero_expect_equal(z, ZERO_AXIS_TP, dx, ROWS * C, ZERO_F32));
    memcpy(dy, dx, ROWS * C * sizeof *dy);
    for (int r = 0; r < ROWS; r++) {
        for (int j = 0; j < m->hidden; j++) {
            float hj = h[r * m->hidden + j], dh = 0;
            for (int i = 0; i < C; i++)
                dh += a->w2[i * m->hidden + j] * dy[r * C + i];
            da[r * m->hidden + j] = dh * (1 - hj * hj);
        }
        for (int i = 0; i < C; i++) {
            float sum = 0;
            for (int j = 0; j < m->hidden; j++)
                sum += a->w1[j * C + i] * da[r * m->hidden + j];
            du[r * C + i] = sum;
        }
    }
    OR_RETURN(zero_all_reduce(z, ZERO_AXIS_TP, du, du, ROWS * C, ZERO_F32, ZERO_SUM));
    for (int i = 0; i < ROWS * C; i++)
        dx[i] += du[i];
    return 0;
}

static void layer_weights(struct model *m, int micro, int l)
{
    const struct layer *a = &m->layer[l];
    const float *h = m->h[micro][l], *x = m->x[micro][l], *da = m->ga[micro][l], *dy = m->gy[micro][l];
    for (int i = 0; i < ROWS * C; i++)
        a->db[i % C] += m->gx[micro][l][i];
    if (m->poisoned && micro == 1)
        a->db[3] = NAN;
    for (int r = 0; r < ROWS; r++)
        for (int j = 0; j < m->hidden; j++)
            for (int i = 0; i < C; i++) {
                a->dw2[i * m->hidden + j] += dy[r * C + i] * h[r * m->hidden + j];
                a->dw1[j * C + i] += da[r * m->hidden + j] * x[r * C + i];
            }
}

/* dx: in: the gradient of the pipeline stage's output; out: that of its input, except in a backward of
 * weights */
static int backward(struct model *m, zero_ctx *z, int micro, float dx[ROWS * C], enum zero_phase phase)
{
    bool nests = m->nests && m->n_layers, recomputes = m->recomputes && phase != ZERO_BACKWARD_WEIGHT;
    if (nests)
        OR_RETURN(zero_begin(z, m->first_unit, phase));
    for (int l = m->n_layers; l-- > 0;) {
        if (recomputes)
            OR_RETURN(zero_begin(z, m->first_unit + l, ZERO_FORWARD));
        if (l || !nests)
            OR_RETURN(zero_begin(z, m->first_unit + l, phase));
        if (phase != ZERO_BACKWARD_WEIGHT)
            OR_RETURN(layer_inputs(m, z, micro, l, dx));
        if (phase != ZERO_BACKWARD_INPUT)
            layer_weights(m, micro, l);
        if (l || !nests)
            OR_RETURN(zero_end(z, m->first_unit + l, phase));
        if (recomputes)
            OR_RETURN(zero_end(z, m->first_unit + l, ZERO_FORWARD));
    }
    if (m->again && m->n_layers) {
        OR_RETURN(zero_begin(z, m->first_unit, phase));
        OR_RETURN(zero_end(z, m->first_unit, phase));
    }
    return nests ? zero_end(z, m->first_unit, phase) : 0;
}

/* ---- one rank ---- */

struct setup {
    int pp, dp, tp, stage, prefetch, schedule;
    /* per_rank: pipeline stages per rank; 0: one. micro: micro-batches per rank; 0: the rank's share of
     * MICRO */
    int per_rank, micro;
    bool check, evaluates, nests, lingers, recomputes, splits, again;
    /* a schedule file, with a line per pipeline stage; NULL: none. apart: it has separate backwards of inputs
     * and weights. keeps: most micro-batches that each pipeline stage keeps */
    const char *file;
    bool apart;
    int keeps[4];
    /* changes what is wrapped; NULL: no change */
    void (*change)(struct zero_config *cfg, struct model *m, const struct place *at);
    /* the error on every rank, from zero_wrap or later; NULL: none. or_peer: a rank that was left by another
     * may get ZERO_ERR_PEER instead */
    int code;
    const char *says;
    bool or_peer;
    /* norms and losses of every step, from the run with pp 1, once `known` is set */
    double norm[STEPS], loss[STEPS];
    bool known;
};

static int per_rank(const struct setup *s)
{
    return s->per_rank ? s->per_rank : 1;
}

/* Delays an action by a random time, so that pipeline stages wait in other places. */
static void linger(const struct zero_action *a, int batch)
{
    uint32_t seed = 77u * (uint32_t)batch + (uint32_t)a->phase;
    for (int i = 0; i < 3; i++)
        pipeline_draw(&seed);
    struct timespec t = {.tv_nsec = (long)(seed >> 16) * 10};
    nanosleep(&t, NULL);
}

/* Runs forward or backward of one micro-batch on a pipeline stage. */
static int run_action(struct model *m, zero_ctx *z, const struct zero_action *a, int batch, double *loss)
{
    m = stage_of(m, a->pp_stage);
    float *x = m->x[a->micro_batch][0], *y = m->x[a->micro_batch][m->n_layers];
    float input[ROWS * C], target[ROWS * C], dx[ROWS * C];
    draw_batch(batch, input, target);
    if (m->lingers)
        linger(a, batch * 3 + m->first);
    if (a->phase == ZERO_FORWARD) {
        memcpy(x, a->in ? a->in : input, sizeof input);
        OR_RETURN(forward(m, z, a->micro_batch));
        for (int i = 0; !a->out && i < ROWS * C; i++)
            *loss += (double)(y[i] - target[i]) * (double)(y[i] - target[i]) / (2 * ROWS);
        if (a->out)
            memcpy(a->out, y, sizeof input);
        return 0;
    }
    /* Other micro-batches ran since the forward, but its input must still be in a->kept. */
    if (a->kept && memcmp(a->kept, x, sizeof input) != 0)
        return ZERO_ERR_FAILED;
    for (int i = 0; i < ROWS * C; i++)
        dx[i] = (y[i] - target[i]) / ROWS;
    if (a->in)
        memcpy(dx, a->in, sizeof dx);
    bool weights = a->phase == ZERO_BACKWARD_WEIGHT;
    if (weights && m->n_layers && memcmp(m->gx[a->micro_batch][m->n_layers - 1], dx, sizeof dx) != 0)
        return ZERO_ERR_FAILED; /* the gradient that the backward of inputs got must still be in a->in */
    if (m->splits && a->phase == ZERO_BACKWARD) {
        OR_RETURN(backward(m, z, a->micro_batch, dx, ZERO_BACKWARD_INPUT));
        OR_RETURN(backward(m, z, a->micro_batch, dx, ZERO_BACKWARD_WEIGHT));
    } else {
        OR_RETURN(backward(m, z, a->micro_batch, dx, (enum zero_phase)a->phase));
    }
    if (a->out)
        memcpy(a->out, dx, sizeof dx);
    return 0;
}

static int run_actions(struct toy_rank *r, struct model *m, zero_ctx *z, int step, const struct place *at,
                       double *loss)
{
    const struct setup *s = r->arg;
    enum { MAX_STAGES = 4 };
    int n_micro = MICRO / at->n_dp, n = 0, most = 0, v = per_rank(s);
    int n_seen[ZERO_BACKWARD_WEIGHT + 1][MAX_STAGES] = {{0}}, *over = n_seen[ZERO_BACKWARD];
    for (;; n++) {
        struct zero_action a;
        memset(&a, 0x55, sizeof a);
        OR_RETURN(zero_next(z, &a));
        if (a.micro_batch < 0)
            break;
        if (a.pp_stage < 0 || a.pp_stage >= v)
            toy_wrong(r, "stage is %d", a.pp_stage);
        int stage = a.pp_stage * s->pp + at->pp;
        bool ends = a.phase == ZERO_FORWARD ? stage == s->pp * v - 1 : stage == 0;
        ends |= a.phase == ZERO_BACKWARD_WEIGHT;
        if ((a.out == NULL) != ends)
            toy_wrong(r, "stage %d, phase %d: out is %p", stage, a.phase, a.out);
        if (a.micro_batch != n_seen[a.phase][a.pp_stage]++)
            toy_wrong(r, "phase %d: micro-batch %d comes out of its turn", a.phase, a.micro_batch);
        if (a.phase == ZERO_BACKWARD_INPUT)
            over = n_seen[ZERO_BACKWARD_WEIGHT];
        int kept = n_seen[ZERO_FORWARD][0] - over[0];
        most = kept > most ? kept : most;
        OR_RETURN(run_action(m, z, &a, step * MICRO + a.micro_batch * at->n_dp + at->dp, loss));
        OR_RETURN(zero_finish(z));
    }
    int behind = s->pp - at->pp, want = s->pp > 1 && s->schedule == ZERO_SCHEDULE_GPIPE ? n_micro : behind;
    bool apart = n_seen[ZERO_BACKWARD_WEIGHT][0] > 0;
    want = s->file ? s->keeps[at->pp] : apart ? s->pp : want;
    if (apart != (s->apart || (s->pp > 1 && s->schedule == ZERO_SCHEDULE_ZERO_BUBBLE)))
        toy_wrong(r, "backwards are%s apart", apart ? "" : " not");
    if (n != (2 + apart) * n_micro * v || (v == 1 && most != (want < n_micro ? want : n_micro)))
        toy_wrong(r, "stage %d: %d actions, %d micro-batches at most, instead of %d", at->pp, n, most, want);
    *loss /= n_micro;
    return 0;
}

/* Broadcasts over pipeline stages: each rank gets the data of the rank at its place on pipeline stage
 * root. */
static int send_to_all_stages(struct toy_rank *r, zero_ctx *z, int pp)
{
    static const int sizes[] = {0, 1, 1500};
    const int of_stage = r->world / pp;
    for (int root = 0; root < pp; root++)
        for (size_t k = 0; k < sizeof sizes / sizeof *sizes; k++) {
            unsigned char x[1501];
            int bad = 0, from = root * of_stage + r->rank % of_stage;
            for (int i = 0; i < 1501; i++)
                x[i] = (unsigned char)(i * 7 + r->rank * 31);
            OR_RETURN(zero_broadcast(z, ZERO_AXIS_PP, root, x, sizes[k]));
            for (int i = 0; i < 1501; i++)
                bad += x[i] != (unsigned char)(i * 7 + (i < sizes[k] ? from : r->rank) * 31);
            if (bad)
                toy_wrong(r, "%d of %d bytes of stage %d are wrong", bad, sizes[k], root);
        }
    return 0;
}

/* Evaluates between steps, and compares the loss with that of the next step. */
static int evaluate(struct toy_rank *r, struct model *m, zero_ctx *z, int step, const struct place *at)
{
    const struct setup *s = r->arg;
    struct zero_action a;
    double loss = 0;
    int n = 0, n_micro = MICRO / at->n_dp, seen[4] = {0};
    OR_RETURN(zero_evaluate(z));
    toy_expect(r, zero_evaluate(z), ZERO_ERR_ORDER, "zero_evaluate: an evaluation has begun");
    toy_expect(r, zero_step(z, 0.1f, NULL), ZERO_ERR_ORDER, "zero_step: ");
    for (;; n++) {
        OR_RETURN(zero_next(z, &a));
        if (a.micro_batch < 0)
            break;
        if (a.phase != ZERO_FORWARD || a.micro_batch != seen[a.pp_stage]++ || a.kept)
            toy_wrong(r, "phase %d of micro-batch %d in an evaluation", a.phase, a.micro_batch);
        OR_RETURN(run_action(m, z, &a, step * MICRO + a.micro_batch * at->n_dp + at->dp, &loss));
        OR_RETURN(zero_finish(z));
    }
    loss /= n_micro;
    OR_RETURN(zero_mean(z, &loss, 1)); /* the last pipeline stage's loss, on all ranks */
    OR_RETURN(send_to_all_stages(r, z, s->pp));
    if (n != n_micro * per_rank(s) || (s->known && !(fabs(loss - s->loss[step]) <= 1e-5 * s->loss[step])))
        toy_wrong(r, "evaluated at step %d: %d micro-batches, loss %.17g", step, n, loss);
    return 0;
}

/* Adds hashes of this pipeline stage's tensors and states to r->hash. The sum over all pipeline stages is the
 * same for any division. */
static int hash_stage(struct toy_rank *r, struct model *m, zero_ctx *z, int tp)
{
    static const int values[] = {ZERO_VALUE_PARAM, ZERO_VALUE_STATE, ZERO_VALUE_STATE + 1};
    for (int t = 0; t < m->n_layers * OF_LAYER; t++)
        for (int v = 0; v < 3; v++) {
            float w[C * H];
            uint64_t hash = 1469598103934665603u + (uint64_t)((m->first * OF_LAYER + t) * 3 + v);
            memset(w, 0xff, sizeof w);
            OR_RETURN(zero_read(z, m->first_tensor + t, values[v], 0, n_elems(t, tp), w));
            for (int64_t i = 0; i < n_elems(t, tp); i++)
                hash = (hash ^ zr_float_bits(w[i])) * 1099511628211u;
            r->hash += hash ^ hash >> 29;
        }
    return 0;
}

static int hash_state(struct toy_rank *r, struct model *m, zero_ctx *z, int tp)
{
    for (; m; m = m->next)
        OR_RETURN(hash_stage(r, m, z, tp));
    return 0;
}

static int one_step(struct toy_rank *r, struct model *m, zero_ctx *z, int step, const struct place *at)
{
    struct setup *s = r->arg;
    struct zero_step_info info;
    double loss = 0;
    OR_RETURN(run_actions(r, m, z, step, at, &loss));
    OR_RETURN(zero_carry(z, &loss, 1));
    OR_RETURN(zero_step(z, 0.01f, &info));
    if (!s->known && r->rank == 0) {
        s->norm[step] = info.grad_norm;
        s->loss[step] = info.carried[0];
    }
    double off = s->tp == 1 ? 0 : 1e-5;
    if (s->known && !(fabs(info.grad_norm - s->norm[step]) <= off * s->norm[step]))
        toy_wrong(r, "step %d: norm %.17g instead of %.17g", step, info.grad_norm, s->norm[step]);
    if (s->known && !(fabs(info.carried[0] - s->loss[step]) <= 1e-5 * s->loss[step]))
        toy_wrong(r, "step %d: loss %.17g instead of %.17g", step, info.carried[0], s->loss[step]);
    return 0;
}

/* Declares the forward of each layer, then each backward with a forward bracket around it. */
static int declare(struct zero_call *order, int n_layers)
{
    int n = 0;
    if (n_layers > LAYERS)
        return 0;
    for (int l = 0; l < n_layers; l++)
        for (int is_end = 0; is_end < 2; is_end++)
            order[n++] = (struct zero_call){l, ZERO_FORWARD, (uint8_t)is_end};
    for (int l = n_layers; l-- > 0;)
        for (int k = 0; k < 4; k++)
            order[n++] = (struct zero_call){l, k == 1 || k == 2 ? ZERO_BACKWARD : ZERO_FORWARD, k >= 2};
    return n;
}

/* Declares the forward of each layer, then the gradients of all inputs, then those of all weights. */
static int declare_apart(struct zero_call *order, int n_layers)
{
    static const uint8_t phases[] = {ZERO_FORWARD, ZERO_BACKWARD_INPUT, ZERO_BACKWARD_WEIGHT};
    int n = 0;
    for (int k = 0; k < 3 && n_layers <= LAYERS; k++)
        for (int l = 0; l < 2 * n_layers; l++)
            order[n++] = (struct zero_call){(k ? 2 * n_layers - 1 - l : l) / 2, phases[k], l % 2};
    return n;
}

static int configure(struct toy_rank *r, struct zero_config *cfg, struct place *at)
{
    const struct setup *s = r->arg;
    *cfg = toy_config(r, s->stage);
    cfg->debug.log = toy_forget_line;
    cfg->memory.prefetch = s->prefetch;
    cfg->debug.check = s->check;
    cfg->clip = 0.5f;
    cfg->pipeline.schedule = s->schedule;
    cfg->pipeline.stages_per_rank = per_rank(s);
    cfg->pipeline.schedule_file = s->file;
    cfg->pipeline.activation_bytes = ROWS * C * (int64_t)sizeof(float);
    OR_RETURN(pipeline_place(cfg, s->stage, s->pp, s->dp, s->tp, at));
    if ((at->pp * at->n_dp + at->dp) * s->tp + at->tp != r->rank)
        toy_wrong(r, "rank %d is %d of pp, %d of dp, %d of tp", r->rank, at->pp, at->dp, at->tp);
    cfg->grad_accum_steps = s->micro ? s->micro : MICRO / at->n_dp;
    return 0;
}

static struct model *make_rank(const struct setup *s, const struct place *at, int *n_tensors)
{
    struct model *m = make_stages(s->pp, at->pp, per_rank(s), s->tp, at->tp, n_tensors);
    for (struct model *x = m; x; x = x->next) {
        x->nests = s->nests;
        x->recomputes = s->recomputes;
        x->splits = s->splits;
        x->lingers = s->lingers;
        x->again = s->again;
        for (int t = 0; s->again && t < *n_tensors; t++)
            if (m->table[t].unit == x->first_unit)
                m->table[t].uses = 2;
    }
    return m;
}

/* A rank's work between zero_wrap and zero_unwrap. Returns the first error. */
typedef int rank_fn(struct toy_rank *r, struct model *m, zero_ctx *z, const struct place *at);

struct job {
    struct setup *s;
    rank_fn *fn;
};

/* Returns the memory for the result of zero_plan on this rank, which is compared after zero_wrap. */
static struct zero_plan_info *plan_of(struct toy_rank *r)
{
    static struct zero_plan_info plans[MAX_WORLD];
    return &plans[r->rank];
}

static int wrap(struct toy_rank *r, struct place *at, struct model **m, zero_ctx **z)
{
    const struct setup *s = r->arg;
    struct zero_config cfg;
    struct zero_call order[6 * LAYERS];
    int n_tensors;
    OR_RETURN(configure(r, &cfg, at));
    *m = make_rank(s, at, &n_tensors);
    if (s->recomputes || s->splits) {
        cfg.memory.order = order;
        cfg.memory.n_order = (s->splits ? declare_apart : declare)(order, n_tensors / OF_LAYER);
    }
    if (s->change)
        s->change(&cfg, *m, at);
    if (!s->says)
        OR_RETURN(zero_plan((*m)->table, n_tensors, &cfg, plan_of(r)));
    return zero_wrap(z, (*m)->table, n_tensors, &cfg);
}

static void run_rank(struct toy_rank *r)
{
    const struct job *j = r->arg;
    const struct setup *s = r->arg = j->s;
    struct place at = {0};
    struct model *m = NULL;
    zero_ctx *z = NULL;
    r->hash = 0;
    int err = wrap(r, &at, &m, &z);
    if (!err && j->fn)
        err = j->fn(r, m, z, &at);
    if (!s->says)
        toy_note(r, err);
    else if (!s->or_peer || err != ZERO_ERR_PEER)
        toy_expect(r, err, s->code, s->says);
    if (!j->fn && s->says && z)
        toy_wrong(r, "there is a context");
    zero_unwrap(&z);
    free_model(m);
}

/* Wraps on all ranks, and calls fn unless it is NULL. Fails the test unless the outcome is that of s. */
static void run(struct setup *s, rank_fn *fn, const char *what, struct toy_rank r[MAX_WORLD])
{
    struct job j = {s, fn};
    int world = s->pp * s->dp * s->tp;
    toy_run(world, run_rank, &j, r, what);
}

static int train(struct toy_rank *r, struct model *m, zero_ctx *z, const struct place *at)
{
    const struct setup *s = r->arg;
    struct zero_stats stats;
    for (int step = 0; step < STEPS; step++) {
        if (s->evaluates && step == 1)
            OR_RETURN(evaluate(r, m, z, step, at));
        OR_RETURN(one_step(r, m, z, step, at));
    }
    OR_RETURN(hash_state(r, m, z, s->tp));
    OR_RETURN(zero_get_stats(z, &stats));
    pipeline_check_memory(r, &stats, s->stage <= 3 ? plan_of(r) : NULL);
    /* Each message takes a page. A pipeline stage receives from one neighbour or two. */
    int n_passes = 0, n_replans = 0;
    for (int k = 0; k < per_rank(s) && s->pp > 1; k++) {
        int stage = k * s->pp + at->pp;
        n_passes += (stage > 0) * (STEPS + s->evaluates) + (stage + 1 < s->pp * per_rank(s)) * STEPS;
    }
    for (const struct model *x = m; x; x = x->next)
        n_replans |= s->nests && x->n_layers > 1;
    if ((stats.place.n_pp != s->pp || stats.pp_bytes != (int64_t)MICRO / s->dp * n_passes * 4096))
        toy_wrong(r, "pp is %lld, with %lld bytes", (long long)stats.place.n_pp, (long long)stats.pp_bytes);
    /* the schedule determines the calls, so only undeclared nesting makes the library learn the order anew */
    if (s->pp * per_rank(s) > 1 && stats.n_replans != n_replans)
        toy_wrong(r, "the order was learned anew %lld times", (long long)stats.n_replans);
    return 0;
}

/* ---- tests ---- */

static void the_same_bits_however_layers_are_divided(void **state)
{
    static const int schedules[] = {ZERO_SCHEDULE_ZERO_BUBBLE, ZERO_SCHEDULE_GPIPE, ZERO_SCHEDULE_ZERO_BUBBLE,
                                    ZERO_SCHEDULE_1F1B};
    struct setup s = {.dp = 1};
    for (s.tp = 1; s.tp <= 2; s.tp++) {
        uint64_t want[2] = {0};
        int n = 0;
        s.known = false;
        for (s.pp = 1; s.pp <= 4; s.pp++)
            for (s.dp = 1; s.dp <= 4; s.dp *= 2)
                for (s.stage = 0; s.stage < TOY_STAGES; s.stage++) {
                    struct toy_rank r[MAX_WORLD];
                    char what[128];
                    int world = s.pp * s.dp * s.tp;
                    if (world > MAX_WORLD || (s.stage > 3 && s.dp != 4))
                        continue;
                    s.prefetch = n % 3;
                    s.schedule = schedules[n % 4];
                    s.check = n % 5 == 4;
                    s.evaluates = n % 4 >= 2;
                    s.nests = n % 6 == 5;
                    s.lingers = n % 7 > 4;
                    s.recomputes = n % 5 == 3 && !s.nests;
                    s.splits = n % 3 == 1 && !s.nests && !s.recomputes;
                    s.again = n % 3 == 2 && !s.nests && !s.recomputes;
                    snprintf(what, sizeof what,
                             "pp %d, dp %d, tp %d, stage %d, schedule %d, prefetch %d, check %d, evaluates "
                             "%d, nests %d, splits %d, again %d",
                             s.pp, s.dp, s.tp, s.stage, s.schedule, s.prefetch, s.check, s.evaluates, s.nests,
                             s.splits, s.again);
                    n++;
                    if (s.known && !sample_has())
                        continue;
                    run(&s, train, what, r);
                    pipeline_compare(r, s.pp, s.dp, s.tp, want, what);
                    s.known = true;
                }
        assert_true(n >= 20);
    }
}

/* The loops set the layout; everything else is random. */
static void the_same_bits_with_several_stages_on_a_rank(void **state)
{
    struct setup s = {.dp = 1, .tp = 1, .pp = 1};
    struct toy_rank r[MAX_WORLD];
    uint32_t seed = (uint32_t)time(NULL), drawn = seed;
    uint64_t want[1] = {0};
    run(&s, train, "one stage", r);
    pipeline_compare(r, 1, 1, 1, want, "one stage");
    s.known = true;
    for (s.per_rank = 2; s.per_rank <= 3; s.per_rank++)
        for (s.pp = 1; s.pp <= 4; s.pp++)
            for (s.dp = 1; s.dp <= 2; s.dp++)
                for (s.stage = 0; s.stage <= 3; s.stage++) {
                    char what[160];
                    pipeline_draw(&drawn);
                    uint32_t bits = drawn >> 8;
                    s.prefetch = bits % 3;
                    s.schedule = bits / 3 % 4 ? ZERO_SCHEDULE_INTERLEAVED : ZERO_SCHEDULE_GPIPE;
                    s.check = bits / 12 % 4 == 0;
                    s.evaluates = bits / 48 % 2;
                    s.nests = bits / 96 % 3 == 0 && s.prefetch == 2;
                    s.lingers = bits / 288 % 4 == 0;
                    s.recomputes = bits / 1152 % 3 == 0 && !s.nests;
                    s.splits = bits / 3456 % 3 == 0 && !s.nests && !s.recomputes;
                    s.again = bits / 10368 % 3 == 0 && !s.nests && !s.recomputes && !s.splits;
                    snprintf(what, sizeof what,
                             "%d stages a rank, pp %d, dp %d, stage %d, schedule %d, prefetch %d, check %d, "
                             "evaluates %d, nests %d, recomputes %d, splits %d, again %d, seed %u",
                             s.per_rank, s.pp, s.dp, s.stage, s.schedule, s.prefetch, s.check, s.evaluates,
                             s.nests, s.recomputes, s.splits, s.again, seed);
                    if (!sample_has())
                        continue;
                    run(&s, train, what, r);
                    pipeline_compare(r, s.pp, s.dp, 1, want, what);
                }
}

/* ---- custom schedules ---- */

/* For 8 micro-batches, with dp 1. */
static const char two_stages[] = "0F0,0F1,0F2,0B0,0F3,0B1,0F4,0B2,0F5,0B3,0F6,0B4,0F7,0B5,0B6,0B7\n"
                                 "1F0,1F1,1B0,1F2,1B1,1F3,1B2,1F4,1B3,1F5,1B4,1F6,1B5,1F7,1B6,1B7\n";
/* The second pipeline stage delays its backwards; the first and the last do not. */
static const char three_stages[] = "0F0,0F1,0F2,0F3,0F4,0F5,0F6,0F7,0B0,0B1,0B2,0B3,0B4,0B5,0B6,0B7\n"
                                   "1F0,1F1,1F2,1F3,1F4,1F5,1F6,1F7,1B0,1B1,1B2,1B3,1B4,1B5,1B6,1B7\n"
                                   "2F0,2B0,2F1,2B1,2F2,2B2,2F3,2B3,2F4,2B4,2F5,2B5,2F6,2B6,2F7,2B7\n";
/* For two ranks with two pipeline stages each. The second rank's first pipeline stage waits longer than it
 * must. */
static const char two_of_two[] = "0F0,0F1,2F0,2F1,0F2,0F3,2B0,2F2,2B1,2F3,0B0,0B1,2B2,2B3,0B2,0B3\n"
                                 "1F0,1F1,3F0,3B0,3F1,3B1,1F2,1F3,1B0,1B1,3F2,3B2,3F3,3B3,1B2,1B3\n";
/* The same with separate gradients of weights; the second rank computes them at the end. */
static const char two_of_two_apart[] =
    "0F0,0F1,2F0,2F1,0F2,0F3,2I0,2F2,2I1,2W0,2F3,0I0,0W0,0I1,2W1,2I2,2I3,0W1,0I2,2W2,0I3,2W3,0W2,0W3\n"
    "1F0,1F1,3F0,3I0,3F1,3I1,1F2,1F3,1I0,1I1,3F2,3I2,3F3,3I3,1I2,1I3,3W0,3W1,3W2,3W3,1W0,1W1,1W2,1W3\n";
/* As PyTorch writes it, with send and receive actions, for 2 micro-batches. */
static const char with_messages[] =
    "0UNSHARD,0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1,0REDUCE_GRAD\n"
    "1UNSHARD,1RECV_F0,1F0,1RECV_F1,1B0,1SEND_B0,1F1,1B1,1SEND_B1,1REDUCE_GRAD\n";

static void a_schedule_from_a_file(void **state)
{
    static const struct {
        const char *text;
        int pp, dp, per_rank, keeps[4];
        bool apart;
    } given[] = {{two_stages, 2, 1, 1, {3, 2}},
                 {three_stages, 3, 1, 1, {8, 8, 1}},
                 {with_messages, 2, 4, 1, {2, 1}},
                 {two_of_two, 2, 2, 2, {0}, false},
                 {two_of_two_apart, 2, 2, 2, {0}, true}};
    for (size_t i = 0; i < sizeof given / sizeof *given; i++) {
        struct toy_rank r[MAX_WORLD];
        char path[64];
        struct setup one = {.pp = 1, .dp = given[i].dp, .tp = 1, .stage = 1}, s = one;
        uint64_t want[1] = {0};
        run(&one, train, "one stage", r);
        pipeline_compare(r, 1, one.dp, 1, want, "one stage");
        pipeline_write_file(path, given[i].text);
        s.pp = given[i].pp;
        s.per_rank = given[i].per_rank;
        s.file = path;
        s.apart = given[i].apart;
        memcpy(s.keeps, given[i].keeps, sizeof s.keeps);
        for (s.stage = 0; s.stage <= 3; s.stage++) {
            s.check = s.stage == 2;
            s.evaluates = s.stage == 1;
            s.lingers = s.stage == 3;
            run(&s, train, given[i].text, r);
            pipeline_compare(r, s.pp, s.dp, 1, want, given[i].text);
        }
        unlink(path);
    }
}

/* Removes the schedule file of the first pipeline stage, so that ranks differ. */
static void one_stage_has_a_file(struct zero_config *cfg, struct model *m, const struct place *at)
{
    if (!at->pp)
        cfg->pipeline.schedule_file = NULL;
}

/* Every rank refuses these before any data moves. */
static void what_a_file_cannot_say_is_refused(void **state)
{
    static const struct {
        const char *text;
        int code;
        const char *says;
    } bad[] = {
        {"0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n2F0,2B0,2F1,2B1\n", ZERO_ERR_ARG, "3 ranks; allowed: a line for"},
        {"0F0,0B0\n1F0,1B0\n", ZERO_ERR_ARG, "1 micro-batches; allowed: grad_accum_steps, which is 2"},
        {"1F0,1B0,1F1,1B1\n0F0,0F1,0B0,0B1\n", ZERO_ERR_NOTSUP, "rank 0: 1F0; allowed: actions of stage 0"},
        {"0F0,2F0,2B0,0F1,2F1,0B0,2B1,0B1\n1F0,1F1,1B0,1B1\n", ZERO_ERR_ARG,
         "3 stages; allowed: 2, as pp is 2 and stages_per_rank 1"},
        {"0F0,0F1,0I0,0I1,0W1,0W0\n1F0,1B0,1F1,1B1\n", ZERO_ERR_NOTSUP, "are not in the order of micro-"},
        {"0F0,0F1,0W0,0I0,0B1\n1F0,1B0,1F1,1B1\n", ZERO_ERR_ARG, "0W0"},
        {"0F0,(0F1;0B0)OVERLAP_F_B,0B1\n1F0,1B0,1F1,1B1\n", ZERO_ERR_NOTSUP,
         "rank 0: 0F1 overlaps another action; allowed: F"},
        {"0F0,0F1,0B1,0B0\n1F0,1F1,1B1,1B0\n", ZERO_ERR_NOTSUP,
         "backward passes are not in the order of micro-"},
        {"0F0,0F1,0B0\n1F0,1B0,1F1,1B1\n", ZERO_ERR_ARG, "rank 0: 0B1 is missing"},
        {"0F0,0F1,0F0,0B0,0B1\n1F0,1B0,1F1,1B1\n", ZERO_ERR_ARG, "0F0 is there twice"},
        {"0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1,1B0\n", ZERO_ERR_ARG, "1B0 is there twice"},
        {"0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n", ZERO_ERR_ARG, "0B0"}, /* each waits for the other */
        {"0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n"
         "1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1\n",
         ZERO_ERR_ARG, "rank 0 is at 0SEND_F1, which waits for rank 1; rank 1 is at 1SEND_B0"},
        {"0F0,what\n1F0\n", ZERO_ERR_ARG, "line 1"},
        {"", ZERO_ERR_ARG, "no action is in it"},
        {NULL, ZERO_ERR_MISMATCH, "read different schedules from schedule_file"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        struct setup s = {.pp = 2, .dp = 2, .tp = 1, .micro = 2, .code = bad[i].code, .says = bad[i].says};
        struct toy_rank r[MAX_WORLD];
        char path[64];
        pipeline_write_file(path, bad[i].text ? bad[i].text : "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n");
        s.file = path;
        s.change = bad[i].text ? NULL : one_stage_has_a_file;
        run(&s, NULL, s.says, r);
        unlink(path);
    }
}

static void a_file_that_is_not_there(void **state)
{
    struct setup s = {.pp = 2, .dp = 1, .tp = 1, .micro = 2, .file = "/nowhere/schedule.csv"};
    struct toy_rank r[MAX_WORLD];
    char path[64];
    s.code = ZERO_ERR_IO;
    s.says = "schedule_file: /nowhere/schedule.csv: No such file";
    run(&s, NULL, s.says, r);
    pipeline_write_file(path, "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n");
    s.file = path;
    s.schedule = ZERO_SCHEDULE_GPIPE;
    s.code = ZERO_ERR_ARG;
    s.says = "schedule is set too; allowed: one of schedule and";
    run(&s, NULL, s.says, r);
    unlink(path);
}

/* ---- the mean over tokens ---- */

/* Counts differ between ranks. Only those of the last pipeline stage, which has the loss, are tokens. */
static int scale_tokens(struct toy_rank *r, struct model *m, zero_ctx *z, const struct place *at)
{
    double scale = 0;
    const struct setup *s = r->arg;
    double count = at->pp == s->pp - 1 ? 3 + 4 * at->dp : 1000;
    OR_RETURN(zero_loss_scale(z, count, &scale));
    if (scale != (double)MICRO / (3 + 7))
        toy_wrong(r, "scale is %.17g instead of %.17g", scale, (double)MICRO / (3 + 7));
    return 0;
}

static void tokens_count_where_the_loss_is(void **state)
{
    struct setup s = {.pp = 2, .dp = 2, .tp = 2};
    struct toy_rank r[MAX_WORLD];
    run(&s, scale_tokens, "pp 2, dp 2, tp 2", r);
}

/* ---- a step that is skipped ---- */

/* One rank of one pipeline stage has a NaN gradient. No pipeline stage may update anything. */
static int skip_step(struct toy_rank *r, struct model *m, zero_ctx *z, const struct place *at)
{
    const struct setup *s = r->arg;
    struct zero_step_info info = {.skipped = 0};
    double loss = 0;
    m->poisoned = at->pp == 1 && at->dp == 1;
    OR_RETURN(hash_state(r, m, z, s->tp));
    uint64_t before = r->hash;
    OR_RETURN(run_actions(r, m, z, 0, at, &loss));
    OR_RETURN(zero_step(z, 0.01f, &info));
    r->hash = 0;
    OR_RETURN(hash_state(r, m, z, s->tp));
    if ((!info.skipped || info.t != 0 || r->hash != before))
        toy_wrong(r, "skipped is %d, t %lld, the state is %s", info.skipped, (long long)info.t,
                  r->hash == before ? "the same" : "another");
    m->poisoned = false;
    OR_RETURN(run_actions(r, m, z, 1, at, &loss));
    OR_RETURN(zero_step(z, 0.01f, &info));
    if ((info.skipped || info.t != 1 || info.clipped != 1))
        toy_wrong(r, "after it: skipped %d, t %lld, clipped %d", info.skipped, (long long)info.t,
                  info.clipped);
    return 0;
}

static void all_stages_skip_a_step(void **state)
{
    struct setup s = {.pp = 3, .dp = 2, .tp = 1};
    struct toy_rank r[MAX_WORLD];
    for (int k = 0; k < 8; k++) {
        s.stage = k % 4;
        s.per_rank = 1 + k / 4;
        s.schedule = k < 4 ? ZERO_SCHEDULE_1F1B : ZERO_SCHEDULE_INTERLEAVED;
        run(&s, skip_step, "a step that is skipped", r);
    }
}

/* ---- calls of one pipeline stage alone ---- */

/* Reads and writes involve one pipeline stage's ranks only. The others go on with the step, and all agree at
 * its end. */
static int write_alone(struct toy_rank *r, struct model *m, zero_ctx *z, const struct place *at)
{
    double loss = 0, norm = 0;
    float w[C] = {0}, got[C] = {0};
    w[3] = 0.25f;
    if (at->pp == 1) {
        OR_RETURN(zero_write(z, 2, ZERO_VALUE_STATE, 0, C, w));
        OR_RETURN(zero_write(z, 2, ZERO_VALUE_PARAM, 0, C, w));
        OR_RETURN(zero_read(z, 2, ZERO_VALUE_PARAM, 0, C, got));
        if (memcmp(w, got, sizeof w) != 0)
            toy_wrong(r, "what was written is not what is read");
    }
    OR_RETURN(run_actions(r, m, z, 0, at, &loss));
    if (at->pp == 0)
        toy_expect(r, zero_read(z, 2, ZERO_VALUE_GRAD, 0, C, got), ZERO_ERR_ORDER,
                   "zero_read: the gradients of this step are not complete; with pp 2, call zero_norm");
    OR_RETURN(zero_norm(z, &norm));
    if (at->pp == 0)
        OR_RETURN(zero_read(z, 2, ZERO_VALUE_GRAD, 0, C, got));
    OR_RETURN(zero_drop(z));
    OR_RETURN(run_actions(r, m, z, 0, at, &loss));
    OR_RETURN(zero_step(z, 0.01f, NULL));
    return 0;
}

static void a_stage_reads_and_writes_its_own(void **state)
{
    struct setup s = {.pp = 2, .dp = 2, .tp = 1, .stage = 3};
    struct toy_rank r[MAX_WORLD];
    run(&s, write_alone, "pp 2, dp 2", r);
}

static void freeze_first_stage(struct zero_config *cfg, struct model *m, const struct place *at)
{
    for (int t = 0; t < m->n_layers * OF_LAYER && at->pp == 0; t++)
        m->table[t].grad = NULL;
}

/* The first pipeline stage is frozen. It has nothing to drop, which is no error, and still takes part in
 * steps. */
static int drop_where_all_is_frozen(struct toy_rank *r, struct model *m, zero_ctx *z, const struct place *at)
{
    for (int round = 0; round < 4; round++) {
        struct zero_action a = {0};
        toy_expect(r, zero_drop(z), ZERO_ERR_ORDER, "zero_drop: no action of the step has begun");
        for (;;) {
            OR_RETURN(zero_next(z, &a));
            if (a.micro_batch < 0)
                break;
            /* no gradient reaches the frozen pipeline stage */
            int n = a.phase == ZERO_BACKWARD && at->pp == 0 ? 0 : m->n_layers;
            for (int l = 0; l < n; l++) {
                OR_RETURN(zero_begin(z, l, (enum zero_phase)a.phase));
                if (a.phase == ZERO_BACKWARD)
                    m->layer[l].db[0] = 1;
                OR_RETURN(zero_end(z, l, (enum zero_phase)a.phase));
            }
            if (a.out)
                *(float *)a.out = 1;
            OR_RETURN(zero_finish(z));
        }
        OR_RETURN(round % 2 ? zero_step(z, 0.01f, NULL) : zero_drop(z));
    }
    return 0;
}

static void a_frozen_stage_drops_with_the_others(void **state)
{
    struct setup s = {.pp = 2, .dp = 2, .tp = 1, .micro = 2, .change = freeze_first_stage};
    struct toy_rank r[MAX_WORLD];
    for (s.stage = 0; s.stage <= 3; s.stage++)
        run(&s, drop_where_all_is_frozen, "a frozen stage", r);
}

/* Freezes the first pipeline stage, and puts a tensor of the second into another group. */
static void group_in_second_stage(struct zero_config *cfg, struct model *m, const struct place *at)
{
    static struct zero_optim lion = ZERO_OPTIM_INIT;
    freeze_first_stage(cfg, m, at);
    if (at->pp == 1)
        m->table[1].group = 1;
    cfg->optim_groups = &lion;
    cfg->n_optim_groups = 1;
}

static void more_accumulation_later(struct zero_config *cfg, struct model *m, const struct place *at)
{
    group_in_second_stage(cfg, m, at);
    cfg->max_grad_accum_steps = 2 * MICRO;
}

/* All ranks change the numbers of all groups, also of groups without a tensor on the rank. */
static int tune_all(struct toy_rank *r, struct model *m, zero_ctx *z, const struct place *at)
{
    double loss = 0;
    OR_RETURN(zero_tune(z, 0, "eps", 1e-6));
    OR_RETURN(zero_tune(z, 1, "beta1", 0.5));
    OR_RETURN(zero_tune(z, ZERO_ALL, "weight_decay", 0.25));
    OR_RETURN(zero_tune(z, ZERO_ALL, "grad_accum_steps", MICRO / at->n_dp));
    toy_expect(r, zero_tune(z, 2, "beta1", 0.5), ZERO_ERR_ARG, "group is 2; allowed: 0..1");
    toy_expect(r, zero_tune(z, ZERO_ALL, "grad_accum_steps", 1), ZERO_ERR_ARG,
               "grad_accum_steps is 1; allowed with several pipeline stages: ");
    for (;;) {
        struct zero_action a;
        OR_RETURN(zero_next(z, &a));
        if (a.micro_batch < 0)
            break;
        if (a.phase == ZERO_FORWARD || at->pp > 0)
            OR_RETURN(run_action(m, z, &a, a.micro_batch, &loss));
        OR_RETURN(zero_finish(z));
    }
    OR_RETURN(zero_step(z, 0.01f, NULL));
    return zero_mean(z, &loss, 1);
}

static void optimizers_of_other_stages_are_tuned(void **state)
{
    struct setup s = {.pp = 2, .dp = 2, .tp = 1, .change = group_in_second_stage};
    struct setup more = {.pp = 2,
                         .dp = 2,
                         .tp = 1,
                         .change = more_accumulation_later,
                         .code = ZERO_ERR_ARG,
                         .says = "max_grad_accum_steps is 16 but grad_accum_steps is"};
    struct toy_rank r[MAX_WORLD];
    for (s.stage = 0; s.stage <= 3; s.stage++) {
        more.stage = s.stage;
        run(&more, NULL, "max_grad_accum_steps", r);
        run(&s, tune_all, "tuned", r);
    }
}

/* Trains without brackets, where pointers are valid without them. In a pipeline the step then updates no
 * unit, so gradients that backward has written are an error. */
static int train_without_brackets(struct toy_rank *r, struct model *m, zero_ctx *z, const struct place *at)
{
    struct zero_action a;
    double norm, loss = 0;
    OR_RETURN(zero_next(z, &a));
    while (a.micro_batch >= 0) {
        if (at->pp == 1)
            OR_RETURN(run_action(m, z, &a, a.micro_batch, &loss));
        else if (a.out)
            memset(a.out, 0, ROWS * C * sizeof(float));
        OR_RETURN(zero_finish(z));
        OR_RETURN(zero_next(z, &a));
    }
    const char *norm_says = "zero_norm: the gradient of tensor ",
               *step_says = "zero_step: the gradient of tensor ";
    if (at->pp == 0) {
        ((float *)*m->table[0].grad)[0] = 1;
        toy_expect(r, zero_norm(z, &norm), ZERO_ERR_ORDER, norm_says);
        toy_expect(r, zero_step(z, 0.01f, NULL), ZERO_ERR_ORDER, step_says);
    }
    OR_RETURN(zero_drop(z));
    return 0;
}

static void stages_without_brackets_are_refused(void **state)
{
    struct setup s = {.pp = 2, .dp = 2, .tp = 1};
    struct toy_rank r[MAX_WORLD];
    for (s.stage = 0; s.stage <= 1; s.stage++) {
        run(&s, train_without_brackets, "no brackets", r);
    }
}

static int init_weight(void *arg, int32_t tensor, int64_t first, int64_t n, void *dst)
{
    const struct model *m = arg;
    for (int64_t i = 0; i < n; i++)
        ((float *)dst)[i] = first_value(m->first * OF_LAYER + tensor, first + i);
    return 0;
}

static void init_by_call(struct zero_config *cfg, struct model *m, const struct place *at)
{
    cfg->init_from = ZERO_INIT_CALL;
    cfg->init = init_weight;
    cfg->init_arg = m;
}

static int read_first_values(struct toy_rank *r, struct model *m, zero_ctx *z, const struct place *at)
{
    for (int t = 0; t < m->n_layers * OF_LAYER; t++) {
        float w[C * H];
        OR_RETURN(zero_read(z, t, ZERO_VALUE_PARAM, 0, n_elems(t, 1), w));
        for (int64_t i = 0; i < n_elems(t, 1); i++)
            if (w[i] != first_value(m->first * OF_LAYER + t, i))
                toy_wrong(r, "tensor %d has another first value at %d", t, (int)i);
    }
    return 0;
}

/* Some pipeline stages have more units than others. */
static void first_values_by_a_callback(void **state)
{
    struct setup s = {.pp = 3, .dp = 2, .tp = 1, .stage = 3, .change = init_by_call};
    struct toy_rank r[MAX_WORLD];
    run(&s, read_first_values, "pp 3, dp 2", r);
}

/* ---- wrong calls ---- */

static int misuse_calls(struct toy_rank *r, struct model *m, zero_ctx *z, const struct place *at)
{
    const struct setup *s = r->arg;
    struct zero_action a;
    float sink[C];
    toy_expect(r, zero_next(NULL, &a), ZERO_ERR_ARG, "zero_next: z is NULL");
    toy_expect(r, zero_next(z, NULL), ZERO_ERR_ARG, "zero_next: action is NULL");
    toy_expect(r, zero_finish(NULL), ZERO_ERR_ARG, "zero_finish: z is NULL");
    toy_expect(r, zero_finish(z), ZERO_ERR_ORDER, "zero_finish: no action is under way; zero_next gives one");
    OR_RETURN(zero_gather_all(z, 0));
    toy_expect(r, zero_evaluate(z), ZERO_ERR_ORDER, "zero_evaluate: zero_gather_all holds all parameters");
    OR_RETURN(zero_release_all(z));
    if (s->pp > 1) {
        toy_expect(r, zero_begin(z, 0, ZERO_FORWARD), ZERO_ERR_ORDER,
                   "zero_begin: unit 0 is used outside an action; in a pipeline, call zero_next first");
        toy_expect(r, zero_micro(z), ZERO_ERR_ORDER, "zero_micro: a pipeline's schedule ends");
        toy_expect(r, zero_drop(z), ZERO_ERR_ORDER, "zero_drop: no action of the step has begun");
        toy_expect(r, zero_step(z, 0.1f, NULL), ZERO_ERR_ORDER,
                   "zero_step: 0 of the step's 16 actions are over; zero_next gives the next");
    }
    OR_RETURN(zero_next(z, &a));
    toy_expect(r, zero_next(z, &a), ZERO_ERR_ORDER,
               "zero_next: forward of micro-batch 0 is not over; zero_finish ends it");
    toy_expect(r, zero_begin(z, 0, ZERO_BACKWARD), ZERO_ERR_ORDER,
               "zero_begin: unit 0 in backward, but the action is forward of micro-batch 0");
    toy_expect(r, zero_step(z, 0.1f, NULL), ZERO_ERR_ORDER, "zero_step: ");
    toy_expect(r, zero_drop(z), ZERO_ERR_ORDER, "zero_drop: 0 of the step's 16 actions are over");
    if (s->pp > 1) {
        double scale;
        const char *says = "the step has begun; call it before the first";
        toy_expect(r, zero_read(z, 0, 0, 0, C, sink), ZERO_ERR_ORDER, says);
        toy_expect(r, zero_write(z, 0, 0, 0, C, sink), ZERO_ERR_ORDER, says);
        toy_expect(r, zero_mean(z, &scale, 1), ZERO_ERR_ORDER, says);
        toy_expect(r, zero_broadcast(z, ZERO_AXIS_PP, 0, sink, 4), ZERO_ERR_ORDER, says);
        toy_expect(r, zero_broadcast(z, ZERO_AXIS_PP, 2, sink, 4), ZERO_ERR_ARG, "root is 2; allowed: 0..1");
        toy_expect(r, zero_gather_all(z, 0), ZERO_ERR_ORDER, says);
        toy_expect(r, zero_loss_scale(z, 1, &scale), ZERO_ERR_ORDER, says);
        toy_expect(r, zero_tune(z, ZERO_ALL, "clip", 1), ZERO_ERR_ORDER, says);
        toy_expect(r, zero_save(z, "nowhere", NULL), ZERO_ERR_ORDER, says);
        toy_expect(r, zero_save_wait(z, NULL), ZERO_ERR_ORDER, says);
        toy_expect(r, zero_load(z, "nowhere"), ZERO_ERR_ORDER, says);
    }
    OR_RETURN(zero_begin(z, 0, ZERO_FORWARD));
    toy_expect(r, zero_finish(z), ZERO_ERR_ORDER, "zero_finish: unit 0 has an open bracket; end it first");
    OR_RETURN(zero_end(z, 0, ZERO_FORWARD));
    if (a.out)
        memset(a.out, 0, sizeof sink);
    OR_RETURN(zero_finish(z));
    if (s->pp == 1)
        toy_expect(r, zero_step(z, 0.1f, NULL), ZERO_ERR_ORDER,
                   "zero_step: 1 of the step's 16 actions are over; zero_next gives the next");
    return 0;
}

static int broadcast_other_roots(struct toy_rank *r, struct model *m, zero_ctx *z, const struct place *at)
{
    float x = 1;
    toy_expect(r, zero_broadcast(z, ZERO_AXIS_PP, at->pp, &x, sizeof x), ZERO_ERR_MISMATCH,
               "called zero_broadcast(pp) in step 1 with other arguments");
    return 0;
}

static void calls_out_of_turn_are_named(void **state)
{
    struct toy_rank r[MAX_WORLD];
    for (int pp = 1; pp <= 2; pp++) {
        struct setup s = {.pp = pp, .dp = 1, .tp = 1};
        run(&s, misuse_calls, pp == 1 ? "pp 1" : "pp 2", r);
        if (pp > 1) {
            run(&s, broadcast_other_roots, "other roots", r);
        }
    }
}

/* Opens a bracket for the other kind of backward, for a phase that does not exist, and for a unit that is
 * open already. */
static int misuse_apart(struct toy_rank *r, struct model *m, zero_ctx *z, const struct zero_action *a)
{
    struct layer *l = &m->layer[0];
    char says[96];
    bool inputs = a->phase == ZERO_BACKWARD_INPUT;
    const char *part = inputs ? "inputs" : "weights";
    toy_expect(
        r, zero_begin(z, 0, (enum zero_phase)5), ZERO_ERR_ARG,
        "zero_begin: phase is 5; allowed: ZERO_FORWARD, ZERO_BACKWARD, ZERO_BACKWARD_INPUT, ZERO_BACKWARD_W");
    snprintf(says, sizeof says, "zero_begin: unit 0 in backward, but the action is backward of %s of micro-",
             part);
    toy_expect(r, zero_begin(z, 0, ZERO_BACKWARD), ZERO_ERR_ORDER, says);
    snprintf(says, sizeof says,
             "zero_begin: unit 0 in backward of %s, but the action is backward of %s of micro-",
             inputs ? "weights" : "inputs", part);
    toy_expect(r, zero_begin(z, 0, inputs ? ZERO_BACKWARD_WEIGHT : ZERO_BACKWARD_INPUT), ZERO_ERR_ORDER,
               says);
    OR_RETURN(zero_begin(z, 0, (enum zero_phase)a->phase));
    snprintf(says, sizeof says, "zero_begin: unit 0 is already open in backward of %s", part);
    toy_expect(r, zero_begin(z, 0, (enum zero_phase)a->phase), ZERO_ERR_ORDER, says);
    toy_expect(r, zero_end(z, 0, ZERO_BACKWARD), ZERO_ERR_ORDER, "zero_end: unit 0 is not open in backward");
    if ((l->w1 != NULL) != inputs || (l->dw1 != NULL) == inputs)
        toy_wrong(r, "phase %d: parameters at %p, gradient at %p", a->phase, (void *)l->w1, (void *)l->dw1);
    if (!inputs) { /* a forward bracket inside has parameters */
        OR_RETURN(zero_begin(z, 0, ZERO_FORWARD));
        if (!l->w1)
            toy_wrong(r, "no parameters in a forward bracket");
        OR_RETURN(zero_end(z, 0, ZERO_FORWARD));
        memset(l->dw1, 0, C * H * sizeof *l->dw1);
        memset(l->dw2, 0, C * H * sizeof *l->dw2);
        memset(l->db, 0, C * sizeof *l->db);
    }
    return zero_end(z, 0, (enum zero_phase)a->phase);
}

static int misuse_parts_of_a_backward(struct toy_rank *r, struct model *m, zero_ctx *z,
                                      const struct place *at)
{
    struct zero_action a;
    int n_apart = 0;
    for (;;) {
        OR_RETURN(zero_next(z, &a));
        if (a.micro_batch < 0)
            break;
        if (a.phase != ZERO_FORWARD && n_apart++ < 2)
            OR_RETURN(misuse_apart(r, m, z, &a));
        else if (a.phase == ZERO_BACKWARD_WEIGHT)
            for (int l = 0; l < m->n_layers; l++) {
                OR_RETURN(zero_begin(z, l, ZERO_BACKWARD_WEIGHT));
                OR_RETURN(zero_end(z, l, ZERO_BACKWARD_WEIGHT));
            }
        if (a.phase == ZERO_BACKWARD_INPUT && n_apart == 1)
            toy_expect(r, zero_next(z, &a), ZERO_ERR_ORDER,
                       "zero_next: backward of inputs of micro-batch 0 is not over; zero_finish ends it");
        if (a.out)
            memset(a.out, 0, ROWS * C * sizeof(float));
        OR_RETURN(zero_finish(z));
    }
    return 0;
}

static void parts_of_a_backward_are_named(void **state)
{
    struct toy_rank r[MAX_WORLD];
    struct setup s = {.pp = 2, .dp = 2, .tp = 1, .stage = 3, .schedule = ZERO_SCHEDULE_ZERO_BUBBLE};
    run(&s, misuse_parts_of_a_backward, "backwards apart", r);
}

/* ---- buffers between pipeline stages, in check mode ---- */

/* Misuses an action's buffers, during the action or when it is over. */
typedef void slot_misuse(const struct zero_action *a, bool over);

static void writes_beyond(const struct zero_action *a, bool over)
{
    if (a->out && a->micro_batch == 2 && !over)
        ((float *)a->out)[ROWS * C] = 1;
}

static void writes_to_in(const struct zero_action *a, bool over)
{
    if (a->in && a->phase == ZERO_FORWARD && a->micro_batch == 2 && !over)
        ((float *)(uintptr_t)a->in)[3] += 1;
}

static void writes_to_gradient(const struct zero_action *a, bool over)
{
    if (a->in && a->phase == ZERO_BACKWARD && a->micro_batch == 2 && !over)
        ((float *)(uintptr_t)a->in)[3] += 1;
}

/* Writes to the buffer that backward gets as `kept`. */
static void writes_to_in_later(const struct zero_action *a, bool over)
{
    static _Thread_local float *in;
    if (a->in && a->phase == ZERO_FORWARD && a->micro_batch == 2 && !over)
        in = (float *)(uintptr_t)a->in;
    if (a->phase == ZERO_BACKWARD && a->micro_batch == 0 && in && !over) {
        in[0] += 1;
        in = NULL;
    }
}

static void writes_late(const struct zero_action *a, bool over)
{
    if (a->out && a->phase == ZERO_FORWARD && a->micro_batch == 2 && over)
        ((float *)a->out)[3] += 1;
}

static void writes_nothing(const struct zero_action *a, bool over)
{
    if (a->out && a->phase == ZERO_FORWARD && a->micro_batch == 2 && !over)
        memset(a->out, 0xff, ROWS * C * sizeof(float));
}

static void writes_half(const struct zero_action *a, bool over)
{
    if (a->out && a->phase == ZERO_BACKWARD && a->micro_batch == 2 && !over)
        memset((float *)a->out + C, 0xff, (ROWS - 1) * C * sizeof(float));
}

#ifdef __SANITIZE_THREAD__
#define THREADS_WATCHED true
#else
#define THREADS_WATCHED false
#endif

static _Atomic int n_slot_lines;
static char slot_line[512];

static void keep_slot_line(void *arg, const char *line)
{
    if (strstr(line, "bytes to a.out") && n_slot_lines++ == 0)
        snprintf(slot_line, sizeof slot_line, "%s", line);
}

static slot_misuse *misuse_of_slots;

static void log_slots(struct zero_config *cfg, struct model *m, const struct place *at)
{
    cfg->debug.log = keep_slot_line;
}

static int misuse_slots(struct toy_rank *r, struct model *m, zero_ctx *z, const struct place *at)
{
    double loss = 0;
    for (int step = 0; step < 2; step++) {
        for (;;) {
            struct zero_action a;
            OR_RETURN(zero_next(z, &a));
            if (a.micro_batch < 0)
                break;
            int err = run_action(m, z, &a, a.micro_batch, &loss);
            misuse_of_slots(&a, false);
            OR_RETURN(err);
            OR_RETURN(zero_finish(z));
            misuse_of_slots(&a, true);
        }
        OR_RETURN(zero_step(z, 0.01f, NULL));
    }
    return 0;
}

static void slots_of_stages_are_watched(void **state)
{
    const struct setup two = {.pp = 2, .dp = 2, .tp = 1, .stage = 1, .schedule = ZERO_SCHEDULE_GPIPE},
                       four = {.pp = 2,
                               .dp = 1,
                               .tp = 1,
                               .stage = 3,
                               .per_rank = 2,
                               .schedule = ZERO_SCHEDULE_INTERLEAVED},
                       one = {.pp = 1, .dp = 1, .tp = 1, .per_rank = 3, .schedule = ZERO_SCHEDULE_GPIPE};
    const struct {
        slot_misuse *misuse;
        /* 0: a log line instead of an error */
        int code;
        const char *says;
    } rows[] = {
        {writes_beyond, ZERO_ERR_ORDER,
         "of micro-batch 2 wrote 84 bytes to a.out, but activation_bytes is 80"},
        {writes_to_in, ZERO_ERR_ORDER, "it wrote to a.in of forward of micro-"},
        {writes_to_gradient, ZERO_ERR_ORDER, "it wrote to a.in of backward of"},
        {writes_to_in_later, ZERO_ERR_ORDER, "it wrote to "},
        {writes_late, ZERO_ERR_ORDER, "the a.out of forward of micro-batch 2 was changed after its"},
        {writes_nothing, 0,
         "forward of micro-batch 2 wrote 0 bytes to a.out, but that of micro-batch 0 wrote 80"},
        {writes_half, 0,
         "backward of micro-batch 2 wrote 40 bytes to a.out, but that of micro-batch 0 wrote 80"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        for (int k = 0; k < 3; k++) {
            /* ThreadSanitizer would report the race with the copy */
            if (THREADS_WATCHED && rows[i].misuse == writes_late)
                continue;
            struct setup s = k == 0 ? two : k == 1 ? four : one;
            const char *says = rows[i].says;
            struct toy_rank r[MAX_WORLD];
            char what[128];
            if (k == 2 && (rows[i].misuse == writes_to_in || rows[i].misuse == writes_to_in_later ||
                           rows[i].misuse == writes_to_gradient))
                /* on one rank, the output of a pipeline stage is the input of the next */
                says = "was changed after its";
            s.check = s.or_peer = true;
            s.change = log_slots;
            s.code = rows[i].code;
            s.says = s.code ? says : NULL;
            n_slot_lines = 0;
            misuse_of_slots = rows[i].misuse;
            snprintf(what, sizeof what, "%s, %d ranks", says, s.pp * s.dp);
            run(&s, misuse_slots, what, r);
            if (!s.code && (n_slot_lines == 0 || !strstr(slot_line, says)))
                fail_msg("%s: %d lines, the first: %s", what, n_slot_lines, slot_line);
        }
}

/* ---- configurations that are refused ---- */

static void unit_that_is_not_there(struct zero_config *cfg)
{
    static const struct zero_call calls[] = {
        {0, ZERO_FORWARD, 0}, {0, ZERO_FORWARD, 1}, {99, ZERO_BACKWARD, 0}, {99, ZERO_BACKWARD, 1}};
    cfg->memory.order = calls;
    cfg->memory.n_order = 4;
}

static const struct setup *refused[32];
static int n_refused;

/* One row: the mesh, a statement that changes cfg, the model m or its table, and the error of every rank. The
 * row adds itself to refused[] before main(). */
#define REFUSED(...)                  REFUSED_NUMBERED(__COUNTER__, __VA_ARGS__)
#define REFUSED_NUMBERED(number, ...) REFUSED_ROW(number, __VA_ARGS__)
#define REFUSED_ROW(number, on, statement, code_, says_)                                                     \
    static void change_##number(struct zero_config *cfg, struct model *m, const struct place *at)            \
    {                                                                                                        \
        (void)cfg, (void)m, (void)at;                                                                        \
        statement;                                                                                           \
    }                                                                                                        \
    __attribute__((constructor)) static void add_##number(void)                                              \
    {                                                                                                        \
        static const struct setup row = {UNWRAP on, .change = change_##number, .code = ZERO_ERR_##code_,     \
                                         .says = says_};                                                     \
        refused[n_refused++] = &row;                                                                         \
    }

#define UNWRAP(...) __VA_ARGS__

#define PP_2_DP_2 .pp = 2, .dp = 2, .tp = 1
REFUSED((PP_2_DP_2), cfg->pipeline.activation_bytes = 0, ARG,
        "activation_bytes is 0; allowed: the bytes of one micro-batch")
REFUSED((PP_2_DP_2), cfg->pipeline.activation_bytes += at->pp, MISMATCH,
        "activation_bytes is 81 on rank 2 and 80 on rank 0")
REFUSED((PP_2_DP_2), cfg->pipeline.schedule = at->pp ? ZERO_SCHEDULE_GPIPE : ZERO_SCHEDULE_1F1B, MISMATCH,
        "schedule is gpipe on rank 2 and 1f1b on rank 0")
REFUSED((PP_2_DP_2), cfg->pipeline.schedule = 4, ARG,
        "schedule is 4; allowed: 1f1b (0), gpipe (1), interleaved (2), zero")
REFUSED((PP_2_DP_2), cfg->debug.check = at->pp == 1, MISMATCH,
        "check is 1 on rank 2 and 0 on rank 0; all ranks must have")
REFUSED((PP_2_DP_2), cfg->grad_accum_steps = 1 << 24, ARG,
        "grad_accum_steps is 16777216; allowed with pp 2: 1..8388608")
/* On the second pipeline stage, the second data-parallel rank has another shape, cut or unit than the
 * first. */
REFUSED((PP_2_DP_2), if (at->pp == 1 && at->dp == 1) m->table[2].shape[0]--, MISMATCH,
        "tensors[2] (b3 on rank 3): rank 3 and rank 2 differ in its name, shape, dtype, tp_cut")
REFUSED((PP_2_DP_2), if (at->pp == 1 && at->dp == 1) m->table[1].tp_cut = 0, MISMATCH,
        "tensors[1] (w23 on rank 3): rank 3 and rank 2 differ")
REFUSED((PP_2_DP_2), if (at->pp == 1 && at->dp == 1) m->table[m->n_layers * OF_LAYER - 1].unit++, MISMATCH,
        "tensors[5] (b4 on rank 3): rank 3 and rank 2 differ")
REFUSED((PP_2_DP_2), cfg->mesh.dp_shard = 1, ARG, "do not multiply to the world of 4 ranks")

/* On the second pipeline stage, tensor-parallel ranks begin with different values of a tensor that is not
 * cut. */
REFUSED((.pp = 2, .dp = 1, .tp = 2), if (at->pp == 1 && at->tp == 1) m->own[5][0] += 1, MISMATCH,
        "tensor b4 has no tp_cut, so all ranks of tp must have the same values, but rank 2 and rank 3")
REFUSED((.pp = 2, .dp = 1, .tp = 2, .stage = 3), if (at->pp == 1 && at->tp == 1) m->own[5][0] += 1, MISMATCH,
        "tensor b4 has no tp_cut, so all ranks of tp must have the same values, but rank 2 and rank 3")

/* There are more pipeline stages than layers, so one has no tensor. */
REFUSED((.pp = LAYERS + 1, .dp = 1, .tp = 1, .stage = 1), (void)0, ARG,
        "n_tensors is 0, with pp 6; allowed: 1 and more")

/* Two pipeline stages on each rank. */
#define TWO_EACH(n) .pp = n, .dp = 1, .tp = 1, .per_rank = 2, .schedule = ZERO_SCHEDULE_INTERLEAVED
REFUSED((TWO_EACH(2)), cfg->pipeline.schedule = ZERO_SCHEDULE_1F1B, ARG,
        "stages_per_rank is 2, but schedule is 1f1b, with one stage")
REFUSED((TWO_EACH(2)), cfg->grad_accum_steps = 5, ARG,
        "cannot divide 5 micro-batches evenly into 2 rounds on 2 ranks")
REFUSED((TWO_EACH(2)), cfg->pipeline.stages_per_rank += at->pp, MISMATCH,
        "stages_per_rank is 3 on rank 1 and 2 on rank 0")
REFUSED((TWO_EACH(2)), m->table[1].pp_stage = 2, ARG, "): pp_stage is 2; allowed: 0..1 (see stages_per_rank)")
REFUSED((TWO_EACH(2)), m->table[1].pp_stage = 1, ARG,
        "): its unit 0 is on stage 1, but another tensor of the unit is on")
REFUSED((TWO_EACH(2)), unit_that_is_not_there(cfg), ARG, "order[2].unit is 99; allowed: 0..")
REFUSED((TWO_EACH(1)), unit_that_is_not_there(cfg), ARG, "order[2].unit is 99; allowed: 0..")
REFUSED((TWO_EACH(1)), m->table[OF_LAYER * 2].name = m->table[0].name, ARG,
        "are both named w10; names must be unique")
REFUSED((TWO_EACH(1)), m->table[0].flags = ZERO_TIED, NOTSUP,
        "(w10): ZERO_TIED with pp 1 and stages_per_rank 2")
REFUSED((TWO_EACH(1)), cfg->pipeline.activation_bytes = 0, ARG,
        "pp is 1 and stages_per_rank 2, but activation_bytes is 0")

static void what_cannot_be_is_refused(void **state)
{
    for (int i = 0; i < n_refused; i++) {
        struct setup s = *refused[i];
        struct toy_rank r[MAX_WORLD];
        run(&s, NULL, s.says, r);
    }
}

/* ---- log lines ---- */

static char reported[512];
static int n_reported;

static void keep_line(void *arg, const char *line)
{
    if (strstr(line, "fewer micro-batches than stages") && n_reported++ == 0)
        snprintf(reported, sizeof reported, "%s", line);
}

static void keep_lines(struct zero_config *cfg, struct model *m, const struct place *at)
{
    if (at->pp == 0)
        cfg->debug.log = keep_line;
}

static void fewer_micro_batches_than_stages_are_a_line(void **state)
{
    struct toy_rank r[MAX_WORLD];
    for (int pp = 2; pp <= 3; pp++) {
        struct setup s = {.pp = pp, .dp = 1, .tp = 1, .stage = 1, .micro = 2, .change = keep_lines};
        n_reported = 0;
        run(&s, NULL, "few micro-batches", r);
        assert_int_equal(n_reported, pp == 3);
    }
    assert_non_null(strstr(reported, "grad_accum_steps is 2, but pp is 3"));
    assert_non_null(strstr(reported, "(2 of 4 parts of a step)"));
}

/* A bracket of a unit on the rank's other pipeline stage is refused and changes nothing. */
static int bracket_another_stage(struct toy_rank *r, struct model *m, zero_ctx *z, const struct place *at)
{
    struct zero_action a;
    double loss = 0;
    char says[96];
    int n = 0;
    toy_expect(r, zero_micro(z), ZERO_ERR_ORDER, "schedule ends the micro-batches");
    for (;; n++) {
        OR_RETURN(zero_next(z, &a));
        if (a.micro_batch < 0)
            break;
        int unit = stage_of(m, !a.pp_stage)->first_unit;
        snprintf(says, sizeof says,
                 "zero_begin: unit %d is on stage %d of this rank, but the action is for stage %d", unit,
                 !a.pp_stage, a.pp_stage);
        toy_expect(r, zero_begin(z, unit, a.phase), ZERO_ERR_ORDER, says);
        OR_RETURN(run_action(m, z, &a, a.micro_batch, &loss));
        OR_RETURN(zero_finish(z));
    }
    if (n != 4 * MICRO)
        toy_wrong(r, "%d actions", n);
    OR_RETURN(zero_step(z, 0.01f, NULL));
    return 0;
}

static void units_of_another_stage_are_refused(void **state)
{
    struct setup s = {.dp = 1, .tp = 1, .per_rank = 2, .stage = 3, .schedule = ZERO_SCHEDULE_INTERLEAVED};
    struct toy_rank r[MAX_WORLD];
    for (s.pp = 1; s.pp <= 2; s.pp++) {
        run(&s, bracket_another_stage, "a bracket of another stage", r);
    }
}

/* ---- calls that all ranks must make, but some do not ---- */

/* A call that only some ranks make: those at this place along pp, and along tp unless it is -1. */
struct alone {
    struct setup s;
    int pp, tp;
    int (*call)(zero_ctx *z);
};

static const struct alone *alone;

static int tune_alone(zero_ctx *z)
{
    return zero_tune(z, ZERO_ALL, "clip", 3);
}

static int count_alone(zero_ctx *z)
{
    return zero_set_step(z, 41);
}

static int carry_alone(zero_ctx *z)
{
    static const double two[] = {1, 2};
    return zero_carry(z, two, 2);
}

/* Some ranks make a call before the first step. */
static int call_alone(struct toy_rank *r, struct model *m, zero_ctx *z, const struct place *at)
{
    struct zero_step_info info;
    double loss = 0;
    if (at->pp == alone->pp && (alone->tp < 0 || at->tp == alone->tp))
        OR_RETURN(alone->call(z));
    OR_RETURN(run_actions(r, m, z, 0, at, &loss));
    return zero_step(z, 0.01f, &info);
}

/* Each rank's error names the call. A rank may also find that another one failed first and left. */
#define NAMES(text) .code = ZERO_ERR_MISMATCH, .says = (text), .or_peer = true

static void calls_of_one_stage_are_named(void **state)
{
    static const char numbers[] =
        "called zero_step in step 1 after different numbers in zero_carry, zero_tune or";

    static const char evaluation[] = "called zero_evaluate in step 1";
    const struct alone rows[] = {
        {{.pp = 2, .dp = 2, .tp = 1, NAMES(numbers)}, 1, -1, tune_alone},
        {{.pp = 2, .dp = 2, .tp = 1, NAMES(numbers)}, 0, -1, count_alone},
        {{.pp = 2, .dp = 1, .tp = 2, NAMES("every rank must make the same calls")}, 1, 1, carry_alone},
        {{.pp = 3, .dp = 1, .tp = 2, NAMES(numbers)}, 2, -1, tune_alone},
        {{.pp = 2, .dp = 2, .tp = 1, NAMES(evaluation)}, 1, -1, zero_evaluate},
        {{.pp = 2, .dp = 1, .tp = 1, NAMES(evaluation)}, 0, -1, zero_evaluate},
        {{.pp = 2, .dp = 1, .tp = 2, NAMES(evaluation)}, 1, 1, zero_evaluate},
        {{.pp = 3, .dp = 1, .tp = 1, NAMES(evaluation)}, 2, -1, zero_evaluate},
        {{.pp = 3, .dp = 1, .tp = 1, NAMES(evaluation)}, 1, -1, zero_evaluate},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        struct setup s = rows[i].s;
        struct toy_rank r[MAX_WORLD];
        alone = &rows[i];
        run(&s, call_alone, s.says, r);
    }
}

/* ---- a pipeline stage that stops ---- */

static _Atomic bool over_mpi;

static void limit_waits_over_mpi(struct zero_config *cfg, struct model *m, const struct place *at)
{
    over_mpi = cfg->launch.backend == ZERO_BACKEND_MPI;
    if (over_mpi)
        cfg->launch.timeout_ms = 3000;
}

static int stop_in_the_middle(struct toy_rank *r, struct model *m, zero_ctx *z, const struct place *at)
{
    double loss = 0;
    if (at->pp == 1 && at->dp == 0) { /* this rank gives up after two actions */
        for (int n = 0; n < 2; n++) {
            struct zero_action a;
            OR_RETURN(zero_next(z, &a));
            OR_RETURN(run_action(m, z, &a, 0, &loss));
            OR_RETURN(zero_finish(z));
        }
        return 0;
    }
    int err = FIRST_ERROR(run_actions(r, m, z, 0, at, &loss), zero_step(z, 0.01f, NULL));
    /* Depending on what is seen first, rank 2 was lost, or made another call than its pipeline stage. Over
     * MPI the time limit may come first. */
    if ((err != ZERO_ERR_PEER && err != ZERO_ERR_MISMATCH && (!over_mpi || err != ZERO_ERR_TIMEOUT)) ||
        !strstr(zero_last_error(), "rank 2"))
        toy_wrong(r, "code %d, \"%s\"", err, zero_last_error());
    return 0;
}

static void a_stage_that_leaves_ends_all(void **state)
{
    struct setup s = {.pp = 2, .dp = 2, .tp = 1, .change = limit_waits_over_mpi};
    struct toy_rank r[MAX_WORLD];
    for (int k = 0; k < 8; k++) {
        s.stage = k % 4;
        s.per_rank = 1 + k / 4;
        s.schedule = k < 4 ? ZERO_SCHEDULE_1F1B : ZERO_SCHEDULE_INTERLEAVED;
        run(&s, stop_in_the_middle, "a rank that leaves", r);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_same_bits_however_layers_are_divided),
        cmocka_unit_test(the_same_bits_with_several_stages_on_a_rank),
        cmocka_unit_test(tokens_count_where_the_loss_is),
        cmocka_unit_test(all_stages_skip_a_step),
        cmocka_unit_test(a_schedule_from_a_file),
        cmocka_unit_test(what_a_file_cannot_say_is_refused),
        cmocka_unit_test(a_file_that_is_not_there),
        cmocka_unit_test(a_stage_reads_and_writes_its_own),
        cmocka_unit_test(a_frozen_stage_drops_with_the_others),
        cmocka_unit_test(stages_without_brackets_are_refused),
        cmocka_unit_test(optimizers_of_other_stages_are_tuned),
        cmocka_unit_test(first_values_by_a_callback),
        cmocka_unit_test(calls_out_of_turn_are_named),
        cmocka_unit_test(parts_of_a_backward_are_named),
        cmocka_unit_test(slots_of_stages_are_watched),
        cmocka_unit_test(what_cannot_be_is_refused),
        cmocka_unit_test(fewer_micro_batches_than_stages_are_a_line),
        cmocka_unit_test(units_of_another_stage_are_refused),
        cmocka_unit_test(calls_of_one_stage_are_named),
        cmocka_unit_test(a_stage_that_leaves_ends_all),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
