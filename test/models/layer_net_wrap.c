/* SPDX-License-Identifier: Apache-2.0 */
/* layer_net_wrap.c: wraps an array of layer structs. The structs are passed by value, so a layer's
 * functions see the pointers that zero_begin set in the array. */
#include "test/models/layer_net_wrap.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define ROWS     72 /* images per step; a multiple of every world times accum in use */
#define PIXELS   (NET_SIDE * NET_SIDE)
#define MAX_UNIT 8
#define SEED     17

static uint64_t hash(uint64_t a, uint64_t b)
{
    uint64_t z = (a ^ 0x6a09e667f3bcc909u) * 0x9e3779b97f4a7c15u + b;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

/* Images [first, first + n) of a step: a horizontal, vertical or diagonal bar at a random place, with
 * noise. */
static void images(uint64_t seed, int step, int first, int n, float *input, float *truth)
{
    memset(truth, 0, (size_t)(n * NET_CLASSES) * sizeof(float));
    for (int b = 0; b < n; b++) {
        uint64_t bits = hash(hash(seed, (uint64_t)step), (uint64_t)(first + b));
        int kind = (int)(bits % NET_CLASSES), at = (int)(bits / 16 % (NET_SIDE - 2)) + 1;
        truth[b * NET_CLASSES + kind] = 1.0f;
        for (int y = 0; y < NET_SIDE; y++)
            for (int x = 0; x < NET_SIDE; x++) {
                int on = kind == 0   ? y == at
                         : kind == 1 ? x == at
                         : kind == 2 ? (x - y + NET_SIDE) % NET_SIDE == at
                                     : (x + y) % NET_SIDE == at;
                bits = hash(bits, (uint64_t)x);
                input[b * PIXELS + y * NET_SIDE + x] = (float)on + 0.3f * (float)(bits >> 40) * 0x1p-24f;
            }
    }
}

static void copy_weights(const struct net *net, struct run_log *log)
{
    for (int i = 0; i < net->n; i++)
        log->n_weights += net->layers[i].n_weights + net->layers[i].n_biases;
    log->weights = malloc((size_t)log->n_weights * sizeof(float));
    if (log->weights == NULL) {
        log->err = ZERO_ERR_NOMEM;
        return;
    }
    float *dst = log->weights;
    for (int i = 0; i < net->n; i++) {
        struct layer l = net->layers[i];
        if (l.n_weights == 0)
            continue;
        memcpy(dst, l.weights, (size_t)l.n_weights * sizeof(float));
        memcpy(dst + l.n_weights, l.biases, (size_t)l.n_biases * sizeof(float));
        dst += l.n_weights + l.n_biases;
    }
}

/* --- plain ------------------------------------------------------------------------------------------------
 */

/* SGD with momentum by the definition in kernels/device.h, on updates that are the negative sum over the
 * batch. */
static void sgd(int n, float *w, float *updates, float *momentum, float scale, float lr, float beta,
                float decay, int t)
{
    for (int i = 0; i < n; i++) {
        float g = scale * updates[i];
        g = g + decay * w[i];
        momentum[i] = t == 1 ? g : beta * momentum[i] + g;
        w[i] = w[i] - lr * momentum[i];
        updates[i] = 0.0f;
    }
}

static void train_plain(const void *options, struct run_log *log)
{
    const struct layer_net_options *o = options;
    static _Thread_local float input[ROWS * PIXELS], truth[ROWS * NET_CLASSES], momentum[1 << 12];
    struct net *net = net_new(ROWS, SEED);
    if (net == NULL) {
        log->err = ZERO_ERR_NOMEM;
        return;
    }
    memset(momentum, 0, sizeof momentum);
    net->layers[0].frozen = o->frozen;
    if (o->no_momentum)
        net->momentum = 0.0f;
    for (int step = 0; step < o->steps; step++) {
        images(SEED, step, 0, ROWS, input, truth);
        log->loss[step] = net_forward(net, input, truth);
        net_backward(net, input);
        if (o->own_update) {
            net_update(net, (struct update_args){ROWS, net->learning_rate, net->momentum, net->decay});
        } else {
            float *m = momentum, scale = (float)(-1.0 / ROWS);
            for (int i = 0; i < net->n; i++) {
                struct layer l = net->layers[i];
                if (l.n_weights == 0 || l.frozen)
                    continue;
                sgd(l.n_weights, l.weights, l.weight_updates, m, scale, net->learning_rate, net->momentum,
                    net->decay, step + 1);
                sgd(l.n_biases, l.biases, l.bias_updates, m + l.n_weights, scale, net->learning_rate,
                    net->momentum, 0, step + 1);
                m += l.n_weights + l.n_biases;
            }
        }
        if (o->evaluate && step % 2 == 1) {
            images(SEED + 1, step, 0, ROWS, input, truth);
            log->eval[step] = net_forward(net, input, truth);
        }
    }
    log->n_steps = o->steps;
    copy_weights(net, log);
    net_free(net);
}

/* --- wrapped ----------------------------------------------------------------------------------------------
 */

struct wrapped {
    zero_ctx *z;
    struct net *net;
    int unit[MAX_UNIT]; /* of each layer; -1: no weights */
    struct zero_tensor tensors[2 * MAX_UNIT];
    char names[2 * MAX_UNIT][24];
    int n_tensors;
};

/* One unit per layer that has weights. */
static void list_tensors(struct wrapped *w)
{
    int n_units = 0;
    for (int i = 0; i < w->net->n; i++) {
        struct layer *l = &w->net->layers[i];
        w->unit[i] = -1;
        if (l->n_weights == 0)
            continue;
        w->unit[i] = n_units++;
        struct zero_tensor *t = &w->tensors[w->n_tensors];
        snprintf(w->names[w->n_tensors], sizeof w->names[0], "layer%d.weights", i);
        t[0] = (struct zero_tensor){.name = w->names[w->n_tensors++],
                                    .param = (void **)&l->weights,
                                    .grad = l->frozen ? NULL : (void **)&l->weight_updates,
                                    .shape = {l->n_biases, l->n_weights / l->n_biases},
                                    .dtype = ZERO_F32,
                                    .unit = w->unit[i]};
        snprintf(w->names[w->n_tensors], sizeof w->names[0], "layer%d.biases", i);
        t[1] = (struct zero_tensor){.name = w->names[w->n_tensors++],
                                    .param = (void **)&l->biases,
                                    .grad = l->frozen ? NULL : (void **)&l->bias_updates,
                                    .shape = {l->n_biases},
                                    .dtype = ZERO_F32,
                                    .unit = w->unit[i],
                                    .flags = ZERO_NO_DECAY};
    }
}

#define DO(call)                                                                                             \
    do {                                                                                                     \
        int do_err_ = (call);                                                                                \
        if (do_err_ != 0)                                                                                    \
            return do_err_;                                                                                  \
    } while (0)

/* net_forward and net_backward with brackets. */
static int forward(struct wrapped *w, const float *input, const float *truth)
{
    for (int i = 0; i < w->net->n; i++) {
        if (w->unit[i] >= 0)
            DO(zero_begin(w->z, w->unit[i], ZERO_FORWARD));
        struct layer l = w->net->layers[i];
        memset(l.delta, 0, (size_t)(l.batch * l.outputs) * sizeof(float));
        l.forward(l, net_pass(w->net, i, input, truth));
        if (w->unit[i] >= 0)
            DO(zero_end(w->z, w->unit[i], ZERO_FORWARD));
    }
    return 0;
}

static int backward(struct wrapped *w, const float *input)
{
    for (int i = w->net->n; i-- > 0;) {
        if (w->unit[i] >= 0)
            DO(zero_begin(w->z, w->unit[i], ZERO_BACKWARD));
        struct layer l = w->net->layers[i];
        l.backward(l, net_pass(w->net, i, input, NULL));
        if (w->unit[i] >= 0)
            DO(zero_end(w->z, w->unit[i], ZERO_BACKWARD));
    }
    return 0;
}

struct own_update {
    struct update_args args;
    const struct zero_tensor *tensors;
};

/* The net's own arithmetic on a range. The updates, which it keeps from step to step, are the only state. */
static int own_update(void *arg, const struct zero_update *u)
{
    const struct own_update *own = arg;
    struct update_args a = own->args;
    if (own->tensors[u->tensor_index].flags & ZERO_NO_DECAY)
        a.decay = 0.0f;
    a.learning_rate = u->lr;
    for (int64_t i = 0; i < u->n; i++)
        u->state[0][i] += u->grad[i];
    update_weights((int)u->n, u->master, u->state[0], a);
    return 0;
}

/* Zeroes the updates before a batch, as such nets do. */
static void zero_own_updates(struct net *net)
{
    for (int i = 0; i < net->n; i++) {
        struct layer *l = &net->layers[i];
        if (l->n_weights > 0 && l->weight_updates != NULL)
            memset(l->weight_updates, 0, (size_t)l->n_weights * sizeof(float));
        if (l->n_biases > 0 && l->bias_updates != NULL)
            memset(l->bias_updates, 0, (size_t)l->n_biases * sizeof(float));
    }
}

static void train_rank(const void *options, const struct run_setup *setup, int rank, const char *url,
                       struct run_log *log)
{
    const struct layer_net_options *o = options;
    const int A = setup->accum > 0 ? setup->accum : 1, B = ROWS / (setup->world * A);
    static _Thread_local float input[ROWS * PIXELS], truth[ROWS * NET_CLASSES];
    struct wrapped w = {.net = net_new(B, SEED + (uint64_t)rank * 1000)};
    struct net *net = w.net;
    if (net == NULL) {
        log->err = ZERO_ERR_NOMEM;
        return;
    }
    net->layers[0].frozen = o->frozen;
    if (o->no_momentum)
        net->momentum = 0.0f;
    list_tensors(&w);

    struct zero_config cfg = run_config(setup, rank, url);
    struct own_update own = {{ROWS, 0.0f, net->momentum, net->decay}, w.tensors};
    if (o->own_update) {
        cfg.optim.update = own_update;
        cfg.optim.update_arg = &own;
        cfg.optim.n_states = 1;
        cfg.grad_sum = 1;
    } else {
        cfg.optim.optimizer = ZERO_SGD;
        cfg.optim.beta1 = net->momentum;
        cfg.optim.weight_decay = net->decay;
        cfg.grad_scale = -1.0 / B;
    }
    float *old[4 * MAX_UNIT];
    for (int i = 0; i < w.n_tensors; i++) {
        old[2 * i] = *w.tensors[i].param;
        old[2 * i + 1] = w.tensors[i].grad ? *w.tensors[i].grad : NULL;
    }
    RUN_TRY(log, zero_wrap(&w.z, w.tensors, w.n_tensors, &cfg));
    for (int i = 0; i < 2 * w.n_tensors; i++)
        free(old[i]);

    for (int step = 0; step < o->steps; step++) {
        double loss = 0.0, eval = 0.0;
        for (int a = 0; a < A; a++) {
            images(SEED, step, run_micro(setup, rank, a) * B, B, input, truth);
            if (run_zeroes(setup, a, false))
                zero_own_updates(net);
            if (setup->brackets)
                RUN_TRY(log, forward(&w, input, truth));
            else
                net_forward(net, input, truth);
            run_lag(setup, rank);
            if (run_zeroes(setup, a, true))
                zero_own_updates(net);
            if (setup->brackets)
                RUN_TRY(log, backward(&w, input));
            else
                net_backward(net, input);
            if (!setup->brackets && !setup->no_micro && a < A - 1)
                RUN_TRY(log, zero_micro(w.z));
            loss += (double)net_cost(net) / A;
        }
        struct zero_step_info info = {0};
        RUN_TRY(log, zero_step(w.z, net->learning_rate, setup->no_info ? NULL : &info));
        RUN_TRY(log, zero_mean(w.z, &loss, 1));
        log->loss[step] = loss;
        log->norm[step] = info.grad_norm;
        if (o->evaluate && step % 2 == 1) {
            for (int a = 0; a < A; a++) {
                images(SEED + 1, step, run_micro(setup, rank, a) * B, B, input, truth);
                if (setup->brackets)
                    RUN_TRY(log, forward(&w, input, truth));
                else
                    net_forward(net, input, truth);
                eval += (double)net_cost(net) / A;
            }
            RUN_TRY(log, zero_mean(w.z, &eval, 1));
            log->eval[step] = eval;
        }
    }

    log->n_steps = o->steps;
    for (int i = 0; i < net->n; i++)
        log->n_weights += net->layers[i].n_weights + net->layers[i].n_biases;
    log->n_states = log->n_weights;
    log->weights = malloc((size_t)log->n_weights * sizeof(float));
    log->states = calloc((size_t)log->n_weights, sizeof(float));
    if (log->weights == NULL || log->states == NULL) {
        log->err = ZERO_ERR_NOMEM;
        goto out;
    }
    int64_t at = 0;
    for (int i = 0; i < w.n_tensors; i++) {
        int64_t n = w.tensors[i].shape[0] * (w.tensors[i].shape[1] ? w.tensors[i].shape[1] : 1);
        RUN_TRY(log, zero_read(w.z, i, ZERO_VALUE_PARAM, 0, n, log->weights + at));
        if (w.tensors[i].grad != NULL && !o->no_momentum)
            RUN_TRY(log, zero_read(w.z, i, ZERO_VALUE_STATE, 0, n, log->states + at));
        at += n;
    }
out:
    run_unwrap(log, &w.z);
    net_free(net);
}

const struct run_model layer_net_run_model = {.plain = train_plain, .rank = train_rank, .tolerance = 5e-6};
