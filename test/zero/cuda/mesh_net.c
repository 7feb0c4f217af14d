/* SPDX-License-Identifier: Apache-2.0 */
/* mesh_net.c: the model of mesh_net.h: layers h = tanh(w1 x); y = x + w2 h + b. */
#include "test/zero/cuda/mesh_net.h"
#include "kernels/state_codes.h"
#include "test/cmocka.h"
#include "test/zero/where.h"

#include <cuda_runtime_api.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LAYERS = 9, C = 10, H = 24, ROWS = 2, ACT = ROWS * C, MICRO = 8, OF_LAYER = 3, MOST_STAGES = 2 };

struct layer {
    float *param[OF_LAYER], *grad[OF_LAYER];
};

struct net {
    zero_ctx *z;
    const struct zero_config *cfg;
    int hidden, n_layers;
    /* first layer of each of the rank's stages, and the end of the last; index of a stage's first unit */
    int first[MOST_STAGES], end[MOST_STAGES], unit[MOST_STAGES];
    struct layer layer[LAYERS];
    float x[MICRO][LAYERS + 1][ACT], h[MICRO][LAYERS][ROWS * H], gx[MICRO][LAYERS][ACT],
        ga[MICRO][LAYERS][ROWS * H];
    float own[LAYERS * OF_LAYER][C * H];
    struct zero_tensor table[LAYERS * OF_LAYER];
    char name[LAYERS * OF_LAYER][16];
};

struct net_found *net_found;

const char *net_text(const struct net_run *n, char text[160])
{
    snprintf(text, 160, "pp %d dp %d tp %d, stage %d, schedule %d, %d stages per rank, prefetch %d, %s, %s%s",
             n->pp, n->dp, n->tp, n->stage, n->schedule, n->per_rank ? n->per_rank : 1, n->prefetch,
             n->gpu ? "gpu" : "host", n->deterministic ? "deterministic" : "fast",
             n->check ? ", checked" : "");
    return text;
}

/* ---- the model ---- */

static int n_elems(int k, int tp)
{
    return k == 2 ? C : C * H / tp;
}

/* Returns weight i of this rank's part of a tensor. */
static float first_value(int tensor, int tp, int part, int i)
{
    int k = tensor % OF_LAYER, hidden = H / tp;
    int whole = k == 2 ? i : k == 0 ? part * hidden * C + i : i / hidden * H + part * hidden + i % hidden;
    uint32_t seed = 99u + 40503u * (uint32_t)(tensor * 1009 + whole);
    pipeline_draw(&seed), pipeline_draw(&seed);
    return (float)(0.5 * pipeline_draw(&seed));
}

static void add_layer(struct net *m, int layer, int pp_stage, const struct net_run *n, int part)
{
    static const char *const names[OF_LAYER] = {"w1", "w2", "b"};
    int u = m->n_layers++;
    for (int k = 0; k < OF_LAYER; k++) {
        int t = u * OF_LAYER + k;
        for (int i = 0; i < n_elems(k, n->tp); i++)
            m->own[t][i] = first_value(layer * OF_LAYER + k, n->tp, part, i);
        m->layer[u].param[k] = m->own[t];
        snprintf(m->name[t], sizeof m->name[t], "%s%d", names[k], layer);
        m->table[t] = (struct zero_tensor){.name = m->name[t],
                                           .param = (void **)&m->layer[u].param[k],
                                           .grad = (void **)&m->layer[u].grad[k],
                                           .shape = {n_elems(k, n->tp)},
                                           .dtype = ZERO_F32,
                                           .unit = u,
                                           .pp_stage = pp_stage,
                                           .tp_cut = k == 2 ? 0 : ZERO_TP_CUT(0)};
    }
}

static void make_net(struct net *m, const struct net_run *n, const struct place *at)
{
    int per_rank = n->per_rank ? n->per_rank : 1, n_stages = n->pp * per_rank;
    memset(m, 0, sizeof *m);
    m->hidden = H / n->tp;
    for (int k = 0; k < per_rank; k++) {
        m->first[k] = pipeline_layers_before(LAYERS, n_stages, k * n->pp + at->pp);
        m->end[k] = pipeline_layers_before(LAYERS, n_stages, k * n->pp + at->pp + 1);
        m->unit[k] = m->n_layers;
        for (int l = m->first[k]; l < m->end[k]; l++)
            add_layer(m, l, k, n, at->tp);
    }
}

int net_sum(zero_ctx *z, const struct zero_config *cfg, float *x, int n)
{
    const size_t bytes = (size_t)n * sizeof *x;
    cudaStream_t s = cfg->stream;
    void *room;
    if (cfg->device != ZERO_DEVICE_CUDA)
        return zero_all_reduce(z, ZERO_AXIS_TP, x, x, n, ZERO_F32, ZERO_SUM);
    if (cudaMalloc(&room, bytes) || cudaMemcpyAsync(room, x, bytes, cudaMemcpyHostToDevice, s))
        return ZERO_ERR_SYSTEM;
    int err = zero_all_reduce(z, ZERO_AXIS_TP, room, room, n, ZERO_F32, ZERO_SUM);
    if (cudaMemcpyAsync(x, room, bytes, cudaMemcpyDeviceToHost, s) || cudaStreamSynchronize(s) ||
        cudaFree(room))
        return ZERO_ERR_SYSTEM;
    return err;
}

static int begin(struct net *m, int unit, enum zero_phase phase)
{
    OR_RETURN(zero_begin(m->z, unit, phase));
    where_wait(m->cfg);
    return 0;
}

/* Any call of CUDA ends what where_wait began, so that the library's host code finds device memory closed. */
static void close_memory(const struct net *m)
{
    int device;
    if (m->cfg->device == ZERO_DEVICE_CUDA && cudaGetDevice(&device))
        abort();
}

static int end(struct net *m, int unit, enum zero_phase phase)
{
    close_memory(m);
    return zero_end(m->z, unit, phase);
}

static int layer_forward(struct net *m, int micro, int u)
{
    float *x = m->x[micro][u], *y = m->x[micro][u + 1], *h = m->h[micro][u], bias[C];
    OR_RETURN(begin(m, u, ZERO_FORWARD));
    const float *w1 = m->layer[u].param[0], *w2 = m->layer[u].param[1];
    memcpy(bias, m->layer[u].param[2], sizeof bias);
    for (int r = 0; r < ROWS; r++) {
        for (int j = 0; j < m->hidden; j++) {
            float sum = 0;
            for (int i = 0; i < C; i++)
                sum += w1[j * C + i] * x[r * C + i];
            h[r * m->hidden + j] = tanhf(sum);
        }
        for (int i = 0; i < C; i++) {
            y[r * C + i] = 0;
            for (int j = 0; j < m->hidden; j++)
                y[r * C + i] += w2[i * m->hidden + j] * h[r * m->hidden + j];
        }
    }
    OR_RETURN(net_sum(m->z, m->cfg, y, ACT));
    for (int i = 0; i < ACT; i++)
        y[i] += x[i] + bias[i % C];
    return end(m, u, ZERO_FORWARD);
}

static void layer_weights(struct net *m, int micro, int u)
{
    const float *h = m->h[micro][u], *x = m->x[micro][u], *da = m->ga[micro][u], *dy = m->gx[micro][u];
    float *dw1 = m->layer[u].grad[0], *dw2 = m->layer[u].grad[1], *db = m->layer[u].grad[2];
    for (int i = 0; i < ACT; i++)
        db[i % C] += dy[i];
    for (int r = 0; r < ROWS; r++)
        for (int j = 0; j < m->hidden; j++)
            for (int i = 0; i < C; i++) {
                dw2[i * m->hidden + j] += dy[r * C + i] * h[r * m->hidden + j];
                dw1[j * C + i] += da[r * m->hidden + j] * x[r * C + i];
            }
}

/* dx: in: the gradient of the layer's output; out: that of its input */
static void layer_inputs(struct net *m, int micro, int u, const float dx[ACT], float du[ACT])
{
    const float *w1 = m->layer[u].param[0], *w2 = m->layer[u].param[1], *h = m->h[micro][u];
    float *da = m->ga[micro][u];
    memcpy(m->gx[micro][u], dx, ACT * sizeof *dx);
    memset(du, 0, ACT * sizeof *du);
    for (int r = 0; r < ROWS; r++)
        for (int j = 0; j < m->hidden; j++) {
            float hj = h[r * m->hidden + j], dh = 0;
            for (int i = 0; i < C; i++)
                dh += w2[i * m->hidden + j] * dx[r * C + i];
            da[r * m->hidden + j] = dh * (1 - hj * hj);
            for (int i = 0; i < C; i++)
                du[r * C + i] += w1[j * C + i] * da[r * m->hidden + j];
        }
}

static int layer_backward(struct net *m, int micro, int u, float dx[ACT], enum zero_phase phase)
{
    float du[ACT];
    OR_RETURN(begin(m, u, phase));
    if (phase != ZERO_BACKWARD_WEIGHT)
        layer_inputs(m, micro, u, dx, du);
    if (phase != ZERO_BACKWARD_INPUT)
        layer_weights(m, micro, u);
    if (phase != ZERO_BACKWARD_WEIGHT)
        OR_RETURN(net_sum(m->z, m->cfg, du, ACT));
    for (int i = 0; i < ACT && phase != ZERO_BACKWARD_WEIGHT; i++)
        dx[i] += du[i];
    return end(m, u, phase);
}

/* ---- training ---- */

static void draw_batch(int batch, float x[ACT], float target[ACT])
{
    uint32_t seed = 4711u + 2654435761u * (uint32_t)batch;
    for (int i = 0; i < 4; i++)
        pipeline_draw(&seed);
    for (int i = 0; i < ACT; i++) {
        x[i] = (float)pipeline_draw(&seed);
        target[i] = (float)pipeline_draw(&seed);
    }
}

/* Copies a message, which is in device memory on the GPU. */
static void copy_message(struct net *m, void *dst, const void *src)
{
    where_wait(m->cfg);
    memcpy(dst, src, ACT * sizeof(float));
    close_memory(m);
}

static int run_action(struct net *m, const struct zero_action *a, int batch, double *loss)
{
    const int u = m->unit[a->pp_stage], n = m->end[a->pp_stage] - m->first[a->pp_stage];
    /* A rank's stages use separate parts of x, as no stage's last output is kept. */
    float input[ACT], target[ACT], dx[ACT], last[ACT], *x = m->x[a->micro_batch][u];
    draw_batch(batch, input, target);
    if (a->phase == ZERO_FORWARD) {
        if (a->in)
            copy_message(m, input, a->in);
        memcpy(x, input, sizeof input);
        for (int l = 0; l < n; l++)
            OR_RETURN(layer_forward(m, a->micro_batch, u + l));
        const float *y = m->x[a->micro_batch][u + n];
        for (int i = 0; !a->out && i < ACT; i++) {
            *loss += (double)(y[i] - target[i]) * (double)(y[i] - target[i]) / (2 * ROWS);
        }
        if (a->out)
            copy_message(m, a->out, y);
        return 0;
    }
    memcpy(last, m->x[a->micro_batch][u + n], sizeof last);
    for (int i = 0; i < ACT; i++)
        dx[i] = (last[i] - target[i]) / ROWS;
    if (a->in)
        copy_message(m, dx, a->in);
    for (int l = n; l-- > 0;)
        OR_RETURN(layer_backward(m, a->micro_batch, u + l, dx, (enum zero_phase)a->phase));
    if (a->out)
        copy_message(m, a->out, dx);
    return 0;
}

static int one_step(struct net *m, int step, const struct place *at, struct net_found *found)
{
    struct zero_step_info info;
    double loss = 0;
    for (;;) {
        struct zero_action a;
        OR_RETURN(zero_next(m->z, &a));
        if (a.micro_batch < 0)
            break;
        OR_RETURN(run_action(m, &a, step * MICRO + a.micro_batch * at->n_dp + at->dp, &loss));
        OR_RETURN(zero_finish(m->z));
    }
    loss /= MICRO / at->n_dp;
    OR_RETURN(zero_carry(m->z, &loss, 1));
    OR_RETURN(zero_step(m->z, 0.01f, &info));
    found->loss[step] = info.carried[0];
    found->norm[step] = info.grad_norm;
    return 0;
}

static int hash_state(struct toy_rank *r, struct net *m, int tp, struct net_found *found)
{
    static const int values[] = {ZERO_VALUE_PARAM, ZERO_VALUE_STATE, ZERO_VALUE_STATE + 1};
    r->hash = 0;
    for (int t = 0; t < m->n_layers * OF_LAYER; t++)
        for (int v = 0; v < 3; v++) {
            float w[C * H];
            uint64_t hash = 1469598103934665603u + (uint64_t)v;
            for (const char *c = m->name[t]; *c; c++)
                hash = (hash ^ (uint64_t)*c) * 1099511628211u;
            OR_RETURN(zero_read(m->z, t, values[v], 0, n_elems(t % OF_LAYER, tp), w));
            for (int i = 0; i < n_elems(t % OF_LAYER, tp); i++)
                hash = (hash ^ zr_float_bits(w[i])) * 1099511628211u;
            hash ^= hash >> 29;
            r->hash += hash;
            found->whole += t % OF_LAYER == 2 ? hash : 0;
        }
    return 0;
}

static int train(struct toy_rank *r, struct net *m, const struct place *at)
{
    const struct net_run *n = r->arg;
    struct net_found *found = &net_found[r->rank];
    struct zero_stats stats;
    memset(found, 0, sizeof *found);
    for (int step = 0; step < NET_STEPS; step++)
        OR_RETURN(one_step(m, step, at, found));
    OR_RETURN(hash_state(r, m, n->tp, found));
    OR_RETURN(zero_get_stats(m->z, &stats));
    pipeline_check_memory(r, &stats, NULL);
    return n->more ? n->more(r, m->z, m->cfg) : 0;
}

static int configure(struct toy_rank *r, struct zero_config *cfg, struct place *at)
{
    const struct net_run *n = r->arg;
    struct zero_place p = {0};
    *cfg = toy_config(r, n->stage);
    cfg->debug.log = toy_forget_line;
    cfg->debug.check = n->check;
    cfg->memory.prefetch = n->prefetch;
    cfg->clip = 0.5f;
    cfg->pipeline.schedule = n->schedule;
    cfg->pipeline.stages_per_rank = n->per_rank ? n->per_rank : 1;
    cfg->pipeline.activation_bytes = ACT * (int64_t)sizeof(float);
    if (n->gpu)
        where_open(r->rank, cfg);
    cfg->deterministic = n->deterministic;
    cfg->mesh.pp = n->pp;
    cfg->mesh.tp = n->tp;
    cfg->mesh.dp_replicate = n->stage > 3 ? n->dp / 2 : 1;
    int err = zero_find_place(cfg, &p);
    *at = (struct place){.pp = p.pp, .dp = p.data, .n_dp = p.n_data, .tp = p.tp};
    if (err)
        return err;
    cfg->grad_accum_steps = MICRO / p.n_data;
    if (n->change)
        n->change(cfg);
    return 0;
}

void net_rank(struct toy_rank *r)
{
    const struct net_run *n = r->arg;
    struct zero_config cfg;
    struct place at = {0};
    struct net *m = malloc(sizeof *m);
    int err = configure(r, &cfg, &at);
    if (!err) {
        make_net(m, n, &at);
        m->cfg = &cfg;
        err = zero_wrap(&m->z, m->table, m->n_layers * OF_LAYER, &cfg);
    } else {
        m->z = NULL;
    }
    if (!err)
        err = train(r, m, &at);
    toy_note(r, err);
    int ended = zero_unwrap(&m->z);
    if (ended && !err)
        toy_note(r, ended);
    if (n->gpu)
        where_close(&cfg);
    free(m);
}

/* ---- comparing ---- */

void net_compare(const struct net_run *n, const struct toy_rank *r, uint64_t want[NET_PARTS],
                 const struct net_found *of, bool exact)
{
    char what[160];
    uint64_t own[NET_PARTS] = {0};
    net_text(n, what);
    pipeline_compare(r, n->pp, n->dp, n->tp, exact ? want : own, what);
    for (int k = 0; k < n->pp * n->dp * n->tp; k++) {
        const struct net_found *f = &net_found[k];
        if (f->whole != net_found[k / n->tp * n->tp].whole)
            fail_msg("%s: rank %d has other bits of what tp does not cut", what, k);
        for (int s = 0; s < NET_STEPS; s++) {
            if (f->loss[s] != net_found[0].loss[s] || f->norm[s] != net_found[0].norm[s])
                fail_msg("%s: rank %d has another loss or norm than rank 0", what, k);
            double off = exact ? 0 : 1e-5;
            if (!(fabs(f->norm[s] - of->norm[s]) <= off * of->norm[s]) ||
                !(fabs(f->loss[s] - of->loss[s]) <= 1e-5 * of->loss[s]))
                fail_msg("%s: step %d: loss %.17g, norm %.17g instead of %.17g, %.17g", what, s, f->loss[s],
                         f->norm[s], of->loss[s], of->norm[s]);
        }
    }
}
