/* SPDX-License-Identifier: Apache-2.0 */
/* pipelined.c: the network of minimal.c, with its layers divided into pipeline stages.
 *
 *     cc pipelined.c -o pipelined $(pkg-config --cflags --libs libzero) -lm
 *     zero-run -n 4 ./pipelined 2     (two stages of four layers, each of them on two ranks)
 *     ZERO_SCHEDULE=zero-bubble zero-run -n 4 ./pipelined 2     (gradients of weights are computed later) */
#include <zero/zero.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LAYERS = 8, N = 128, MICRO = 8, ROWS = 6 }; /* MICRO micro-batches of ROWS samples in a step */

struct acts { /* activations of one micro-batch, kept from forward to backward */
    float h[LAYERS + 1][ROWS][N], dy[LAYERS][ROWS][N], error[ROWS];
};

struct model { /* layers are h = h + tanh(w h); the last one sums up w h, which approximates sin(3 x) */
    float *w[LAYERS], *dw[LAYERS];
    int32_t n_layers, n_stages, stage, n_dp, dp; /* this rank's layers, and its place */
    struct acts acts[MICRO];
    double loss;
};

static float sample(int micro_batch, int row)
{
    return (float)(row * MICRO + micro_batch) / (MICRO * ROWS / 2) - 1;
}

static void must(int err) /* every call returns 0 or an error code */
{
    if (err) {
        fprintf(stderr, "%s\n", zero_last_error());
        exit(1);
    }
}

static void forward(struct model *m, zero_ctx *z, struct acts *a)
{
    int n = m->n_layers - (m->stage == m->n_stages - 1); /* without the layer that sums up */
    for (int l = 0; l < n; l++) {
        must(zero_begin(z, l, ZERO_FORWARD));
        for (int s = 0; s < ROWS; s++)
            for (int i = 0; i < N; i++)
                a->h[l + 1][s][i] = a->h[l][s][i] + tanhf(m->w[l][i] * a->h[l][s][i]);
        must(zero_end(z, l, ZERO_FORWARD));
    }
}

static void forward_of_last(struct model *m, zero_ctx *z, struct acts *a, int micro_batch)
{
    int l = m->n_layers - 1;
    must(zero_begin(z, l, ZERO_FORWARD));
    for (int s = 0; s < ROWS; s++) {
        a->error[s] = -sinf(3 * sample(micro_batch, s));
        for (int i = 0; i < N; i++)
            a->error[s] += m->w[l][i] * a->h[l][s][i];
        m->loss += a->error[s] * a->error[s] / ROWS;
    }
    must(zero_end(z, l, ZERO_FORWARD));
}

/* Computes all gradients, or only those of inputs, or only those of weights. The last needs no weights. */
static void backward(struct model *m, zero_ctx *z, struct acts *a, float dh[ROWS][N], enum zero_phase phase)
{
    for (int l = m->n_layers - 1; l >= 0; l--) {
        int adds_up = m->stage == m->n_stages - 1 && l == m->n_layers - 1;
        must(zero_begin(z, l, phase));
        for (int s = 0; s < ROWS && phase != ZERO_BACKWARD_WEIGHT; s++)
            for (int i = 0; i < N; i++) {
                float w = m->w[l][i], t = tanhf(w * a->h[l][s][i]);
                float dy = adds_up ? 2 * a->error[s] / ROWS : dh[s][i] * (1 - t * t);
                a->dy[l][s][i] = dy;
                dh[s][i] = dy * w + (adds_up ? 0 : dh[s][i]);
            }
        for (int s = 0; s < ROWS && phase != ZERO_BACKWARD_INPUT; s++)
            for (int i = 0; i < N; i++)
                m->dw[l][i] += a->dy[l][s][i] * a->h[l][s][i];
        must(zero_end(z, l, phase));
    }
}

/* One action of the schedule: this stage's forward or backward of one micro-batch. */
static void act(struct model *m, zero_ctx *z, const struct zero_action *action)
{
    static float dh[ROWS][N];
    struct acts *a = &m->acts[action->micro_batch];
    int micro_batch = action->micro_batch * m->n_dp + m->dp; /* its number among those of all ranks */
    if (action->phase == ZERO_FORWARD) {
        for (int s = 0; s < ROWS; s++)
            for (int i = 0; i < N; i++)
                a->h[0][s][i] = sample(micro_batch, s);
        if (action->in) /* activations of the previous stage */
            memcpy(a->h[0], action->in, sizeof a->h[0]);
        forward(m, z, a);
        if (action->out)
            memcpy(action->out, a->h[m->n_layers], sizeof a->h[0]);
        else
            forward_of_last(m, z, a, micro_batch);
    } else {
        if (action->in) /* gradient of this stage's activations, from the next one */
            memcpy(dh, action->in, sizeof dh);
        backward(m, z, a, dh, (enum zero_phase)action->phase);
        if (action->out)
            memcpy(action->out, dh, sizeof dh);
    }
}

static void train(struct model *m, const char *const name[LAYERS], struct zero_config *cfg)
{
    struct zero_tensor tensors[LAYERS];
    struct zero_action action;
    struct zero_step_info info;
    zero_ctx *z;

    for (int l = 0; l < m->n_layers; l++)
        tensors[l] = (struct zero_tensor){.name = name[l],
                                          .param = (void **)&m->w[l],
                                          .grad = (void **)&m->dw[l],
                                          .shape = {N},
                                          .dtype = ZERO_F32,
                                          .unit = l};
    cfg->stage = 2;
    cfg->grad_accum_steps = MICRO / m->n_dp;
    cfg->pipeline.activation_bytes = sizeof m->acts[0].h[0];
    must(zero_wrap(&z, tensors, m->n_layers, cfg));
    for (int step = 1; step <= 200; step++) {
        m->loss = 0;
        for (must(zero_next(z, &action)); action.micro_batch >= 0; must(zero_next(z, &action))) {
            act(m, z, &action);
            must(zero_finish(z)); /* the library sends action.out */
        }
        m->loss /= MICRO / m->n_dp;
        must(zero_carry(z, &m->loss, 1)); /* only the last stage's value counts */
        must(zero_step(z, 3e-2f, &info));
        if (m->stage == 0 && m->dp == 0 && step % 20 == 0)
            printf("step %d loss %.9g\n", step, info.carried[0]);
    }
    must(zero_unwrap(&z));
}

int main(int argc, char **argv)
{
    static const char *const name[LAYERS] = {"w1", "w2", "w3", "w4", "w5", "w6", "w7", "w8"};
    static float w[LAYERS][N]; /* initial weights, which are not used after zero_wrap */
    static struct model m;
    struct zero_config cfg = ZERO_CONFIG_INIT;
    struct zero_place place;

    cfg.mesh.pp = argc > 1 ? atoi(argv[1]) : 1;
    must(zero_find_place(&cfg, &place));
    m.stage = place.pp;
    m.n_stages = place.n_pp;
    m.dp = place.data;
    m.n_dp = place.n_data;
    if (LAYERS % m.n_stages || MICRO % m.n_dp) {
        fprintf(stderr, "%d layers do not divide into %d stages, or %d micro-batches into %d ranks\n", LAYERS,
                (int)m.n_stages, MICRO, (int)m.n_dp);
        return 1;
    }
    m.n_layers = LAYERS / m.n_stages;
    for (int k = 0; k < m.n_layers; k++) {
        int l = m.stage * m.n_layers + k;
        m.w[k] = w[k];
        for (int i = 0; i < N; i++)
            w[k][i] = (l < LAYERS - 1 ? 1.0f : 0.02f) * sinf((float)(l * N + i));
    }
    train(&m, name + m.stage * m.n_layers, &cfg);
    return 0;
}
