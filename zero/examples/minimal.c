/* SPDX-License-Identifier: Apache-2.0 */
/* minimal.c: trains a small network of eight layers with libzero. It includes only zero/zero.h of libzero.
 *
 *     cc minimal.c -o minimal $(pkg-config --cflags --libs libzero) -lm
 *     zero-run -n 4 ./minimal
 *     ZERO_STAGE=1 zero-run -n 4 ./minimal    (at another stage than the program's own) */
#include <zero/zero.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { LAYERS = 8, N = 128, SAMPLES = 48 };

struct model { /* layers are h = h + tanh(w h); the last one sums up w h, which approximates sin(3 x) */
    float *w[LAYERS], *dw[LAYERS], x[SAMPLES], h[LAYERS][SAMPLES][N], dh[SAMPLES][N], error[SAMPLES];
    double loss;
    int32_t rank, world, n; /* n samples on each rank */
};

static void forward(struct model *m, int l)
{
    m->loss = 0;
    for (int s = 0; s < m->n; s++) {
        m->error[s] = -sinf(3 * m->x[s]);
        for (int i = 0; i < N; i++) {
            float h = l == 0 ? m->h[0][s][i] = m->x[s] : m->h[l][s][i];
            if (l < LAYERS - 1)
                m->h[l + 1][s][i] = h + tanhf(m->w[l][i] * h);
            else
                m->error[s] += m->w[l][i] * h;
        }
        m->loss += m->error[s] * m->error[s] / (float)m->n;
    }
}

static void backward(struct model *m, int l)
{
    for (int s = 0; s < m->n; s++)
        for (int i = 0; i < N; i++) {
            float w = m->w[l][i], h = m->h[l][s][i], t = tanhf(w * h);
            float dy = l < LAYERS - 1 ? m->dh[s][i] * (1 - t * t) : 2 * m->error[s] / (float)m->n;
            m->dw[l][i] += dy * h;
            m->dh[s][i] = dy * w + (l < LAYERS - 1 ? m->dh[s][i] : 0);
        }
}

static void must(int err) /* every call returns 0 or an error code */
{
    if (err) {
        fprintf(stderr, "%s\n", zero_last_error());
        exit(1);
    }
}

/* clang-format off */
static void train(struct model *m)
{
    static const char *const name[LAYERS] = {"w1", "w2", "w3", "w4", "w5", "w6", "w7", "w8"};
    struct zero_tensor tensors[LAYERS]; /* describe the model's pointers, which libzero sets from here on */
    struct zero_config cfg = ZERO_CONFIG_INIT;
    zero_ctx *z;

    for (int l = 0; l < LAYERS; l++)
        tensors[l] = (struct zero_tensor){.name = name[l], .param = (void **)&m->w[l], .grad = (void **)&m->dw[l],
                                          .shape = {N}, .dtype = ZERO_F32, .unit = l};
    cfg.stage = 3;
    must(zero_wrap(&z, tensors, LAYERS, &cfg));
    for (int step = 1; step <= 200; step++) {
        for (int l = 0; l < LAYERS; l++) {
            must(zero_begin(z, l, ZERO_FORWARD)); /* the layer's weights are valid until zero_end */
            forward(m, l);
            must(zero_end(z, l, ZERO_FORWARD));
        }
        for (int l = LAYERS - 1; l >= 0; l--) {
            must(zero_begin(z, l, ZERO_BACKWARD)); /* and its gradients are valid too, starting at zero */
            backward(m, l);
            must(zero_end(z, l, ZERO_BACKWARD)); /* its gradients are reduced over the ranks */
        }
        must(zero_step(z, 3e-2f, NULL)); /* AdamW with the mean gradient; each rank updates its part */
        must(zero_mean(z, &m->loss, 1));
        if (m->rank == 0 && step % 20 == 0)
            printf("step %d loss %.4g\n", step, m->loss);
    }
    must(zero_unwrap(&z));
}
/* clang-format on */

int main(void)
{
    static float w[LAYERS][N]; /* initial weights, which are not used after zero_wrap */
    static struct model m;
    struct zero_place place;

    must(zero_find_place(NULL, &place));
    m.rank = place.data;
    m.world = place.n_data;
    for (int l = 0; l < LAYERS; l++) {
        m.w[l] = w[l];
        for (int i = 0; i < N; i++)
            w[l][i] = (l < LAYERS - 1 ? 1.0f : 0.02f) * sinf((float)(l * N + i));
    }
    for (m.n = 0; m.n < SAMPLES / m.world; m.n++)
        m.x[m.n] = (float)(m.n * m.world + m.rank) / (SAMPLES / 2) - 1;
    if (SAMPLES % m.world == 0)
        train(&m);
    else
        fprintf(stderr, "%d samples cannot be divided evenly among %d ranks\n", SAMPLES, (int)m.world);
    return SAMPLES % m.world != 0;
}
