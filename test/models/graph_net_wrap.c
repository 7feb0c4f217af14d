/* SPDX-License-Identifier: Apache-2.0 */
/* graph_net_wrap.c: wraps a graph. Its variable nodes are the tensors, and libzero moves their pointers,
 * which point into the two vectors, one by one. At stages 0 and 1 forward and backward do not change. At
 * stages 2 and 3 the loop over the nodes has brackets. */
#include "test/models/graph_net_wrap.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define ROWS  72 /* sums per step; a multiple of every world times accum in use */
#define SEED  29
#define LR    0.01f
#define DECAY 0.9f
#define EPS   1e-4f /* for libzero's RMSprop */
#define MAX_V 16    /* variables */

/* Sums [first, first + n) of a step: two numbers of 4 bits, and the 5 bits of their sum. */
static void sums(uint64_t seed, int step, int first, int n, float *in, float *truth)
{
    for (int b = 0; b < n; b++) {
        uint64_t z = (seed * 1000 + (uint64_t)step) * 0x9e3779b97f4a7c15u + (uint64_t)(first + b);
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
        z ^= z >> 31;
        unsigned sum = (unsigned)(z & 15) + (unsigned)(z >> 4 & 15);
        for (int i = 0; i < GN_IN; i++)
            in[b * GN_IN + i] = z >> i & 1 ? 1.0f : -1.0f;
        for (int i = 0; i < GN_OUT; i++)
            truth[b * GN_OUT + i] = (float)(sum >> i & 1);
    }
}

static bool is_var(const struct gnode *p)
{
    return (p->flag & (GN_VAR | GN_CONST)) != 0;
}

/* --- plain ------------------------------------------------------------------------------------------------
 */

static void library_rmsprop(int n, const float *g, float *x, float *r)
{
    for (int i = 0; i < n; i++) {
        r[i] = DECAY * r[i] + (1.0f - DECAY) * (g[i] * g[i]);
        x[i] = x[i] - LR * (g[i] / (sqrtf(r[i]) + EPS));
    }
}

static void train_plain(const void *options, struct run_log *log)
{
    const struct graph_net_options *o = options;
    struct gnet *a = gnet_new(ROWS, SEED, o->frozen);
    float *r = a ? calloc((size_t)a->n_var, sizeof(float)) : NULL;
    if (r == NULL) {
        log->err = ZERO_ERR_NOMEM;
        gnet_free(a);
        return;
    }
    for (int step = 0; step < o->steps; step++) {
        sums(SEED, step, 0, ROWS, a->in->x, a->truth->x);
        memset(a->g, 0, (size_t)a->n_var * sizeof(float));
        log->loss[step] = gnet_cost(a, 1);
        if (o->library_rmsprop)
            library_rmsprop(a->n_var, a->g, a->x, r);
        else
            gnet_rmsprop(a->n_var, LR, DECAY, a->g, a->x, r);
        if (o->evaluate && step % 2 == 0) {
            sums(SEED + 1, step, 0, ROWS, a->in->x, a->truth->x);
            log->eval[step] = gnet_cost(a, 0);
        }
    }
    log->n_steps = o->steps;
    log->n_weights = a->n_var;
    log->weights = a->x;
    a->x = NULL;
    free(r);
    gnet_free(a);
}

/* --- wrapped ----------------------------------------------------------------------------------------------
 */

#define DO(call)                                                                                             \
    do {                                                                                                     \
        int do_err_ = (call);                                                                                \
        if (do_err_ != 0)                                                                                    \
            return do_err_;                                                                                  \
    } while (0)

/* gnet_cost with a bracket around the nodes of each layer. */
static int forward(zero_ctx *z, struct gnet *a)
{
    int open = -1;
    for (int i = 0; i < a->n; i++) {
        if (a->v[i]->op == NULL || a->v[i]->layer == open) {
            gnet_node(a, i, GN_FORWARD);
            continue;
        }
        if (open >= 0)
            DO(zero_end(z, open, ZERO_FORWARD));
        open = a->v[i]->layer;
        if (open >= 0)
            DO(zero_begin(z, open, ZERO_FORWARD));
        gnet_node(a, i, GN_FORWARD);
    }
    return open >= 0 ? zero_end(z, open, ZERO_FORWARD) : 0;
}

static int backward(zero_ctx *z, struct gnet *a)
{
    int open = -1;
    gnet_seed(a);
    for (int i = a->n; i-- > 0;) {
        if (a->v[i]->op == NULL)
            continue;
        if (a->v[i]->layer != open) {
            if (open >= 0)
                DO(zero_end(z, open, ZERO_BACKWARD));
            open = a->v[i]->layer;
            if (open >= 0)
                DO(zero_begin(z, open, ZERO_BACKWARD));
        }
        gnet_node(a, i, GN_BACKWARD);
    }
    return open >= 0 ? zero_end(z, open, ZERO_BACKWARD) : 0;
}

struct own_update {
    const struct graph_net_options *options;
    const struct zero_tensor *tensors;
    const int64_t *first; /* first element of each tensor in the vector */
    uint8_t *covered;
};

static int own_update(void *arg, const struct zero_update *u)
{
    struct own_update *own = arg;
    if (u->t == own->options->fail_at)
        return 1;
    if (strcmp(u->tensor, own->tensors[u->tensor_index].name) != 0)
        return 2;
    gnet_rmsprop((int)u->n, u->lr, DECAY, u->grad, u->master, u->state[0]);
    if (own->covered != NULL && u->t == own->options->steps)
        for (int64_t i = 0; i < u->n; i++)
            own->covered[own->first[u->tensor_index] + u->first + i]++;
    return 0;
}

static void train_rank(const void *options, const struct run_setup *setup, int rank, const char *url,
                       struct run_log *log)
{
    const struct graph_net_options *o = options;
    const int A = setup->accum > 0 ? setup->accum : 1, B = ROWS / (setup->world * A);
    zero_ctx *z = NULL;
    struct gnet *a = gnet_new(B, SEED + (uint64_t)rank * 1000, o->frozen);
    if (a == NULL) {
        log->err = ZERO_ERR_NOMEM;
        return;
    }

    struct zero_tensor tensors[MAX_V];
    int64_t first[MAX_V], n_var = 0;
    int n = 0;
    for (int i = 0; i < a->n; i++) {
        struct gnode *p = a->v[i];
        if (!is_var(p))
            continue;
        tensors[n] = (struct zero_tensor){.name = p->label,
                                          .param = (void **)&p->x,
                                          .grad = p->flag & GN_CONST ? NULL : (void **)&p->g,
                                          .shape = {p->d[0], p->n_dim == 2 ? p->d[1] : 0},
                                          .dtype = ZERO_F32,
                                          .unit = p->layer,
                                          .uses = 2}; /* one layer has two brackets, the others one */
        first[n++] = n_var;
        n_var += p->n_dim == 2 ? p->d[0] * p->d[1] : p->d[0];
    }

    struct zero_config cfg = run_config(setup, rank, url);
    struct own_update own = {.options = o,
                             .tensors = tensors,
                             .first = first,
                             .covered = o->covered ? o->covered + rank * o->covered_stride : NULL};
    if (o->library_rmsprop) {
        cfg.optim.optimizer = ZERO_RMSPROP;
        cfg.optim.beta2 = DECAY;
        cfg.optim.eps = EPS;
    } else {
        cfg.optim.update = own_update;
        cfg.optim.update_arg = &own;
        cfg.optim.n_states = 1;
    }
    RUN_TRY(log, zero_wrap(&z, tensors, n, &cfg));
    free(a->x);
    free(a->g);
    a->x = a->g = NULL;

    for (int step = 0; step < o->steps; step++) {
        double loss = 0.0, eval = 0.0;
        for (int micro = 0; micro < A; micro++) {
            sums(SEED, step, run_micro(setup, rank, micro) * B, B, a->in->x, a->truth->x);
            if (run_zeroes(setup, micro, false))
                gnet_zero_grad(a);
            if (setup->brackets)
                RUN_TRY(log, forward(z, a));
            else
                gnet_cost(a, 0);
            run_lag(setup, rank);
            if (run_zeroes(setup, micro, true))
                gnet_zero_grad(a);
            if (setup->brackets)
                RUN_TRY(log, backward(z, a));
            else
                gnet_grad(a);
            if (!setup->brackets && !setup->no_micro && micro < A - 1)
                RUN_TRY(log, zero_micro(z));
            loss += (double)a->cost->x[0] / A;
        }
        struct zero_step_info info = {0};
        RUN_TRY(log, zero_step(z, LR, setup->no_info ? NULL : &info));
        RUN_TRY(log, zero_mean(z, &loss, 1));
        log->loss[step] = loss;
        log->norm[step] = info.grad_norm;
        if (o->evaluate && step % 2 == 0) {
            for (int micro = 0; micro < A; micro++) {
                sums(SEED + 1, step, run_micro(setup, rank, micro) * B, B, a->in->x, a->truth->x);
                if (setup->brackets)
                    RUN_TRY(log, forward(z, a));
                else
                    gnet_cost(a, 0);
                eval += (double)a->cost->x[0] / A;
            }
            RUN_TRY(log, zero_mean(z, &eval, 1));
            log->eval[step] = eval;
        }
    }

    log->n_steps = o->steps;
    log->n_weights = log->n_states = n_var;
    log->weights = malloc((size_t)n_var * sizeof(float));
    log->states = calloc((size_t)n_var, sizeof(float));
    if (log->weights == NULL || log->states == NULL) {
        log->err = ZERO_ERR_NOMEM;
        goto out;
    }
    for (int i = 0; i < n; i++) {
        int64_t n_elements = (i + 1 < n ? first[i + 1] : n_var) - first[i];
        RUN_TRY(log, zero_read(z, i, ZERO_VALUE_PARAM, 0, n_elements, log->weights + first[i]));
        if (tensors[i].grad != NULL)
            RUN_TRY(log, zero_read(z, i, ZERO_VALUE_STATE, 0, n_elements, log->states + first[i]));
    }
out:
    run_unwrap(log, &z);
    gnet_free(a);
}

const struct run_model graph_net_run_model = {.plain = train_plain, .rank = train_rank, .tolerance = 5e-6};
