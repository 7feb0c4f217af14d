/* SPDX-License-Identifier: Apache-2.0 */
/* llama_layers.c: the functions of llama_layers.h on the host. Threads share the vectors, rows or columns as
 * in layers.c, and one thread computes each number. So the bits do not depend on the number of
 * threads. */
#include "bench/llama/llama_layers.h"
#include "bench/model/loops.h"
#include "bench/threads.h"

#include <math.h>

const struct llama_layers *llama_layers_for(const struct compute *on)
{
#ifdef ZR_HAVE_CUDA
    if (on->cuda)
        return &llama_layers_cuda;
#endif
    (void)on; /* no GPU in this build */
    return &llama_layers_host;
}

/* ---- RMSNorm ---- */

/* Vectors from .. to - 1. x is a buffer for one. */
MODEL_CLONES static void normalize(real *restrict out, int64_t out_row, float *restrict rstd,
                                   const real *restrict inp, const struct llama_vectors *is,
                                   const real *restrict weight, float eps, float *restrict x, int64_t from,
                                   int64_t to)
{
    int64_t n = is->width;
    for (int64_t v = from; v < to; v++) {
        const real *in = inp + llama_vector_at(is, v, is->row);
        real *o = out + llama_vector_at(is, v, out_row);
        for (int64_t i = 0; i < n; i++)
            x[i] = to_float(in[i]);
        float scale = 1.0f / sqrtf(dot(x, x, n) / (float)n + eps);
        for (int64_t i = 0; i < n; i++)
            o[i] = from_float(x[i] * scale * to_float(weight[i]));
        rstd[v] = scale;
    }
}

static int rmsnorm_forward(const struct compute *on, real *out, int64_t out_row, float *rstd, const real *inp,
                           struct llama_vectors is, const real *weight, float eps, float *scratch)
{
    int64_t n = is.N * is.n;
    IN_PARTS(on)
    normalize(out, out_row, rstd, inp, &is, weight, eps, scratch + part * 2 * is.width, part_at(on, n, part),
              part_at(on, n, part + 1));
    return 0;
}

/* Vectors from .. to - 1. dinp may be dout, so all of a vector is read before it is written. */
MODEL_CLONES static void normalize_backward(real *dinp, bool adds, const real *dout, int64_t dout_row,
                                            const real *restrict inp, const struct llama_vectors *is,
                                            const real *restrict weight, const float *restrict rstd,
                                            float *restrict norm, int64_t from, int64_t to)
{
    int64_t n = is->width;
    float *restrict dnorm = norm + n;
    for (int64_t v = from; v < to; v++) {
        const real *in = inp + llama_vector_at(is, v, is->row), *d = dout + llama_vector_at(is, v, dout_row);
        real *di = dinp + llama_vector_at(is, v, is->row);
        float scale = rstd[v];
        for (int64_t i = 0; i < n; i++) {
            norm[i] = to_float(in[i]) * scale;
            dnorm[i] = to_float(weight[i]) * to_float(d[i]);
        }
        float mean = dot(dnorm, norm, n) / (float)n;
        for (int64_t i = 0; i < n; i++)
            dnorm[i] = (dnorm[i] - norm[i] * mean) * scale;
        for (int64_t i = 0; i < n; i++)
            di[i] = from_float(adds ? to_float(di[i]) + dnorm[i] : dnorm[i]);
    }
}

/* Columns from .. to - 1 over all vectors. columns is a buffer for them. */
MODEL_CLONES static void add_weight_grad(real *restrict dweight, const real *restrict dout, int64_t dout_row,
                                         const real *restrict inp, const struct llama_vectors *is,
                                         const float *restrict rstd, float *restrict columns, int64_t from,
                                         int64_t to)
{
    int64_t n = to - from;
    memset(columns, 0, (size_t)n * sizeof *columns);
    for (int64_t v = 0; v < is->N * is->n; v++) {
        const real *in = inp + llama_vector_at(is, v, is->row) + from;
        const real *d = dout + llama_vector_at(is, v, dout_row) + from;
        float scale = rstd[v];
        for (int64_t i = 0; i < n; i++)
            columns[i] += to_float(d[i]) * (to_float(in[i]) * scale);
    }
    add_columns(dweight + from, columns, n);
}

/* The weight comes first: dinp may overwrite dout. */
static int rmsnorm_backward(const struct compute *on, real *dinp, bool adds, real *dweight, const real *dout,
                            int64_t dout_row, const real *inp, struct llama_vectors is, const real *weight,
                            const float *rstd, float *scratch)
{
    int64_t n = is.N * is.n;
    if (dweight) {
        IN_PARTS(on)
        add_weight_grad(dweight, dout, dout_row, inp, &is, rstd, scratch + part * 2 * is.width,
                        part_at(on, is.width, part), part_at(on, is.width, part + 1));
    }
    if (dinp) {
        IN_PARTS(on)
        normalize_backward(dinp, adds, dout, dout_row, inp, &is, weight, rstd, scratch + part * 2 * is.width,
                           part_at(on, n, part), part_at(on, n, part + 1));
    }
    return 0;
}

/* ---- rotary positions ---- */

/* Turns one vector; its second half is y. sign is -1 to turn it back. */
static inline void turn(real *restrict x, real *restrict y, const float *restrict cosine,
                        const float *restrict sine, float sign, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        float a = to_float(x[i]), b = to_float(y[i]), c = cosine[i], s = sign * sine[i];
        x[i] = from_float(a * c - b * s);
        y[i] = from_float(b * c + a * s);
    }
}

MODEL_CLONES static void turn_vectors(real *x, const struct llama_vectors *is, const int32_t *positions,
                                      const float *table, float sign, int64_t from, int64_t to)
{
    int64_t half = is->width / 2;
    for (int64_t v = from; v < to; v++) {
        real *at = x + llama_vector_at(is, v, is->row);
        const float *row = table + positions[v / is->n] * is->width;
        turn(at, at + half, row, row + half, sign, half);
    }
}

static int rotate(const struct compute *on, real *x, struct llama_vectors is, const int32_t *positions,
                  const float *table, bool back)
{
    int64_t n = is.N * is.n;
    IN_PARTS(on)
    turn_vectors(x, &is, positions, table, back ? -1.0f : 1.0f, part_at(on, n, part),
                 part_at(on, n, part + 1));
    return 0;
}

/* ---- SwiGLU ---- */

MODEL_CLONES static void swiglu(real *restrict out, const real *restrict gate_up, int64_t N, int64_t F)
{
    for (int64_t row = 0; row < N; row++, out += F, gate_up += 2 * F)
        for (int64_t i = 0; i < F; i++) {
            float x = to_float(gate_up[i]);
            out[i] = from_float(x * sigmoid(x) * to_float(gate_up[F + i]));
        }
}

static int swiglu_forward(const struct compute *on, real *out, const real *gate_up, int64_t N, int64_t F)
{
    IN_PARTS(on)
    {
        int64_t from = part_at(on, N, part);
        swiglu(out + from * F, gate_up + from * 2 * F, part_at(on, N, part + 1) - from, F);
    }
    return 0;
}

static inline void swiglu_row_backward(real *restrict gate, real *restrict up, const real *restrict dout,
                                       int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        float x = to_float(gate[i]), u = to_float(up[i]), d = to_float(dout[i]), s = sigmoid(x);
        gate[i] = from_float(d * u * llama_silu_slope(x, s));
        up[i] = from_float(d * (x * s));
    }
}

MODEL_CLONES static void swiglu_rows_backward(real *gate_up, const real *dout, int64_t N, int64_t F)
{
    for (int64_t row = 0; row < N; row++, dout += F, gate_up += 2 * F)
        swiglu_row_backward(gate_up, gate_up + F, dout, F);
}

static int swiglu_backward(const struct compute *on, real *gate_up, const real *dout, int64_t N, int64_t F)
{
    IN_PARTS(on)
    {
        int64_t from = part_at(on, N, part);
        swiglu_rows_backward(gate_up + from * 2 * F, dout + from * F, part_at(on, N, part + 1) - from, F);
    }
    return 0;
}

/* ---- adapters ---- */

MODEL_CLONES static void scale_part(real *x, float factor, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        x[i] = from_float(to_float(x[i]) * factor);
}

static int scale(const struct compute *on, real *x, float factor, int64_t n)
{
    IN_PARTS(on)
    {
        int64_t from = part_at(on, n, part);
        scale_part(x + from, factor, part_at(on, n, part + 1) - from);
    }
    return 0;
}

/* Two vectors for each thread. */
static int64_t n_scratch(const struct compute *on, int64_t width)
{
    return on->n_threads * 2 * width;
}

const struct llama_layers llama_layers_host = {
    .n_scratch = n_scratch,
    .rmsnorm_forward = rmsnorm_forward,
    .rmsnorm_backward = rmsnorm_backward,
    .rotate = rotate,
    .swiglu_forward = swiglu_forward,
    .swiglu_backward = swiglu_backward,
    .scale = scale,
};
