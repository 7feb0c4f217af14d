/* minimal.c: a small network, trained by libzero. It includes nothing of it but zero/zero.h.
 *
 *     cc minimal.c -o minimal $(pkg-config --cflags --libs libzero) -lm
 *     ZERO_STAGE=3 zero-run -n 4 ./minimal */
#include <zero/zero.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { N_IN = 3, N_HIDDEN = 32, BATCH = 48, N_STEPS = 200 };

struct model {                  /* y = w2 tanh(w1 x), and a batch; the ranks share each batch */
    float *w1, *w2, *dw1, *dw2; /* (N_HIDDEN, N_IN), (N_HIDDEN), and their gradients */
    float x[BATCH][N_IN], h[BATCH][N_HIDDEN], dh[BATCH][N_HIDDEN], want[BATCH], error[BATCH];
    int32_t rank, n; /* this rank's samples of a batch: n, from rank * n on */
};

static float random_float(unsigned i) /* -1 to 1, a hash of i */
{
    i = (i ^ i >> 16) * 0x7feb352du;
    i = (i ^ i >> 15) * 0x846ca68bu;
    return (float)(i >> 8) / 8388608.0f - 1.0f;
}

static void next_batch(struct model *m, int step)
{
    for (int s = 0; s < m->n; s++) {
        unsigned sample = (unsigned)(step * BATCH + m->rank * m->n + s);
        float a = random_float(2 * sample), b = random_float(2 * sample + 1);
        m->x[s][0] = a, m->x[s][1] = b, m->x[s][2] = 1;
        m->want[s] = sinf(3 * a) * b;
    }
}

static void forward(struct model *m, int unit)
{
    for (int s = 0; s < m->n; s++) {
        m->error[s] = -m->want[s];
        for (int i = 0; i < N_HIDDEN; i++)
            if (unit == 0) {
                float sum = 0;
                for (int j = 0; j < N_IN; j++)
                    sum += m->w1[i * N_IN + j] * m->x[s][j];
                m->h[s][i] = tanhf(sum);
            } else
                m->error[s] += m->w2[i] * m->h[s][i];
    }
}

static void backward(struct model *m, int unit)
{
    for (int s = 0; s < m->n; s++)
        for (int i = 0; i < N_HIDDEN; i++) {
            float h = m->h[s][i], de = 2 * m->error[s] / (float)m->n;
            if (unit == 1) {
                m->dw2[i] += de * h;
                m->dh[s][i] = de * m->w2[i];
            } else
                for (int j = 0; j < N_IN; j++)
                    m->dw1[i * N_IN + j] += m->dh[s][i] * (1 - h * h) * m->x[s][j];
        }
}

static double mean_square_error(const struct model *m)
{
    double sum = 0;
    for (int s = 0; s < m->n; s++)
        sum += m->error[s] * m->error[s];
    return sum / m->n;
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
        {.name = "w1", .param = (void **)&m->w1, .grad = (void **)&m->dw1,
         .shape = {N_HIDDEN, N_IN}, .dtype = ZERO_F32, .unit = 0},
        {.name = "w2", .param = (void **)&m->w2, .grad = (void **)&m->dw2,
         .shape = {N_HIDDEN}, .dtype = ZERO_F32, .unit = 1},
    };
    struct zero_config cfg = ZERO_CONFIG_INIT;
    zero_ctx *z;

    cfg.stage = 3;
    must(zero_wrap(&z, tensors, 2, &cfg));
    for (int step = 1; step <= N_STEPS; step++) {
        next_batch(m, step);
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

        double loss = mean_square_error(m);
        must(zero_mean(z, &loss, 1));
        if (m->rank == 0 && step % 20 == 0)
            printf("step %d loss %.6f\n", step, loss);
    }
    must(zero_unwrap(&z));
}
/* clang-format on */

int main(void)
{
    static float w1[N_HIDDEN * N_IN], w2[N_HIDDEN]; /* not used again once zero_wrap has them */
    static struct model m = {.w1 = w1, .w2 = w2};
    int32_t world;

    for (unsigned i = 0; i < N_HIDDEN * N_IN; i++)
        w1[i] = 2 * random_float(i);
    for (unsigned i = 0; i < N_HIDDEN; i++)
        w2[i] = random_float(i) / 4;
    must(zero_find_rank(NULL, &m.rank, &world, NULL));
    m.n = BATCH / world;
    if (m.n * world == BATCH)
        train(&m);
    else
        fprintf(stderr, "%d samples cannot be shared alike by %d ranks\n", BATCH, (int)world);
    return m.n * world != BATCH;
}
