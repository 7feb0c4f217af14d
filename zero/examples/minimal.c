/* minimal.c: a small network, trained by libzero, of which it includes zero/zero.h alone.
 *
 *     cc minimal.c -o minimal $(pkg-config --cflags --libs libzero) -lm
 *     zero-run -n 4 ./minimal
 *     ZERO_STAGE=1 zero-run -n 4 ./minimal    (at another stage than the program's own) */
#include <zero/zero.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { N = 32, SAMPLES = 48 };

struct model { /* y = w2 tanh(w1 x), which is to be sin(3 x) */
    float *w1, *w2, *dw1, *dw2, x[SAMPLES], h[SAMPLES][N], dh[SAMPLES][N], error[SAMPLES];
    double loss;
    int32_t rank, world, n; /* n samples on each rank */
};

static void forward(struct model *m, int unit)
{
    m->loss = 0;
    for (int s = 0; s < m->n; s++) {
        m->error[s] = -sinf(3 * m->x[s]);
        for (int i = 0; i < N; i++)
            if (unit == 0)
                m->h[s][i] = tanhf(m->w1[i] * m->x[s]);
            else
                m->error[s] += m->w2[i] * m->h[s][i];
        m->loss += m->error[s] * m->error[s] / (float)m->n;
    }
}

static void backward(struct model *m, int unit)
{
    for (int s = 0; s < m->n; s++)
        for (int i = 0; i < N; i++)
            if (unit == 1) {
                float h = m->h[s][i], dy = 2 * m->error[s] / (float)m->n;
                m->dw2[i] += dy * h;
                m->dh[s][i] = dy * m->w2[i] * (1 - h * h);
            } else
                m->dw1[i] += m->dh[s][i] * m->x[s];
}

static void must(int err) /* every call returns 0 or why it failed */
{
    if (err) {
        fprintf(stderr, "%s\n", zero_last_error());
        exit(1);
    }
}

/* clang-format off */
static void train(struct model *m)
{
    struct zero_tensor tensors[] = { /* the model's own pointers, which libzero sets from here on */
        {.name = "w1", .param = (void **)&m->w1, .grad = (void **)&m->dw1, .shape = {N}, .dtype = ZERO_F32, .unit = 0},
        {.name = "w2", .param = (void **)&m->w2, .grad = (void **)&m->dw2, .shape = {N}, .dtype = ZERO_F32, .unit = 1}};
    struct zero_config cfg = ZERO_CONFIG_INIT;
    zero_ctx *z;

    cfg.stage = 3;
    must(zero_wrap(&z, tensors, 2, &cfg));
    for (int step = 1; step <= 200; step++) {
        for (int unit = 0; unit < 2; unit++) {
            must(zero_begin(z, unit, ZERO_FORWARD)); /* its weights are here until zero_end */
            forward(m, unit);
            must(zero_end(z, unit, ZERO_FORWARD));
        }
        for (int unit = 1; unit >= 0; unit--) {
            must(zero_begin(z, unit, ZERO_BACKWARD)); /* and its gradients, which are zero */
            backward(m, unit);
            must(zero_end(z, unit, ZERO_BACKWARD)); /* they are averaged over the ranks */
        }
        must(zero_step(z, 3e-2f, NULL)); /* AdamW, each rank on its part of the weights */
        must(zero_mean(z, &m->loss, 1));
        if (m->rank == 0 && step % 20 == 0)
            printf("step %d loss %.6f\n", step, m->loss);
    }
    must(zero_unwrap(&z));
}
/* clang-format on */

int main(void)
{
    static float w1[N], w2[N]; /* not used again once zero_wrap has them */
    static struct model m = {.w1 = w1, .w2 = w2};

    must(zero_find_rank(NULL, &m.rank, &m.world, NULL));
    for (int i = 0; i < N; i++)
        w1[i] = 3 * sinf((float)i), w2[i] = 2 * cosf((float)i);
    for (m.n = 0; m.n < SAMPLES / m.world; m.n++)
        m.x[m.n] = (float)(m.n * m.world + m.rank) / (SAMPLES / 2) - 1;
    if (SAMPLES % m.world == 0)
        train(&m);
    else
        fprintf(stderr, "%d samples cannot be shared alike by %d ranks\n", SAMPLES, (int)m.world);
    return SAMPLES % m.world != 0;
}
