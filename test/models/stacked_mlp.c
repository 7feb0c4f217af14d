/* SPDX-License-Identifier: Apache-2.0 */
/* stacked_mlp.c: the model of stacked_mlp.h in fp32 on one thread, written for clarity. */
#include "test/models/stacked_mlp.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define LN_EPS 1e-5f

static uint64_t random_bits(uint64_t *state)
{
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static float random_uniform(uint64_t *state) /* [0, 1) */
{
    return (float)(random_bits(state) >> 40) * 0x1p-24f;
}

static void fill_random(float *w, size_t n, float scale, uint64_t *state)
{
    for (size_t i = 0; i < n; i++)
        w[i] = scale * (2.0f * random_uniform(state) - 1.0f);
}

static void fill_value(float *w, size_t n, float value)
{
    for (size_t i = 0; i < n; i++)
        w[i] = value;
}

static void param_sizes(struct mlp *m)
{
    size_t V = (size_t)m->config.vocab, T = (size_t)m->config.context, C = (size_t)m->config.channels,
           L = (size_t)m->config.layers;
    size_t sizes[MLP_N_TENSORS] = {V * C, T * C, L * C, L * C, L * 4 * C * C, L * 4 * C, L * C * 4 * C,
                                   L * C, C,     C,     V};
    memcpy(m->sizes, sizes, sizeof sizes);
    m->n_params = 0;
    for (int i = 0; i < MLP_N_TENSORS; i++)
        m->n_params += sizes[i];
}

/* Allocates one buffer for all tensors, and makes the struct point into it. */
static float *alloc_and_point_params(struct mlp_tensors *p, const size_t *sizes)
{
    size_t n = 0;
    for (int i = 0; i < MLP_N_TENSORS; i++)
        n += sizes[i];
    float *memory = calloc(n, sizeof(float));
    if (memory == NULL)
        return NULL;
    float **ptrs[MLP_N_TENSORS] = {&p->wte,   &p->wpe,   &p->ln1w, &p->ln1b, &p->fcw,  &p->fcb,
                                   &p->projw, &p->projb, &p->lnfw, &p->lnfb, &p->headb};
    float *at = memory;
    for (int i = 0; i < MLP_N_TENSORS; i++) {
        *ptrs[i] = at;
        at += sizes[i];
    }
    return memory;
}

static float *alloc_and_point_acts(struct mlp_acts *a, const struct mlp *m, size_t *n_acts)
{
    size_t B = (size_t)m->batch, C = (size_t)m->config.channels, L = (size_t)m->config.layers,
           V = (size_t)m->config.vocab;
    struct {
        float **ptr;
        size_t n;
    } acts[] = {
        {&a->encoded, B * C},
        {&a->ln1, L * B * C},
        {&a->mean1, L * B},
        {&a->rstd1, L * B},
        {&a->fch, L * B * 4 * C},
        {&a->gelu, L * B * 4 * C},
        {&a->residual, L * B * C},
        {&a->lnf, B * C},
        {&a->meanf, B},
        {&a->rstdf, B},
        {&a->logits, B * V},
        {&a->probs, B * V},
        {&a->losses, B},
    };
    size_t n = 0;
    for (size_t i = 0; i < sizeof acts / sizeof *acts; i++)
        n += acts[i].n;
    float *memory = calloc(n, sizeof(float));
    if (memory == NULL)
        return NULL;
    float *at = memory;
    for (size_t i = 0; i < sizeof acts / sizeof *acts; i++) {
        *acts[i].ptr = at;
        at += acts[i].n;
    }
    *n_acts = n;
    return memory;
}

struct mlp *mlp_new(struct mlp_config config, int batch, uint64_t seed)
{
    struct mlp *m = calloc(1, sizeof *m);
    if (m == NULL)
        return NULL;
    m->config = config;
    m->batch = batch;
    param_sizes(m);
    m->params_memory = alloc_and_point_params(&m->params, m->sizes);
    m->grads_memory = alloc_and_point_params(&m->grads, m->sizes);
    m->acts_memory = alloc_and_point_acts(&m->acts, m, &m->n_acts);
    m->grads_acts_memory = alloc_and_point_acts(&m->grads_acts, m, &m->n_acts);
    m->path = malloc((size_t)config.layers * sizeof(int));
    m->updates = calloc((size_t)config.layers, sizeof(int));
    if (m->params_memory == NULL || m->grads_memory == NULL || m->acts_memory == NULL ||
        m->grads_acts_memory == NULL || m->path == NULL || m->updates == NULL) {
        mlp_free(m);
        return NULL;
    }
    m->n_path = config.layers;
    for (int l = 0; l < config.layers; l++)
        m->path[l] = l;

    float C = (float)config.channels;
    fill_random(m->params.wte, m->sizes[0], 0.7f, &seed);
    fill_random(m->params.wpe, m->sizes[1], 1.0f, &seed);
    fill_value(m->params.ln1w, m->sizes[2], 1.0f);
    fill_random(m->params.fcw, m->sizes[4], 1.0f / sqrtf(C), &seed);
    fill_random(m->params.projw, m->sizes[6], 0.5f / sqrtf(C * (float)config.layers), &seed);
    fill_value(m->params.lnfw, m->sizes[8], 1.0f);
    return m;
}

void mlp_free(struct mlp *m)
{
    if (m == NULL)
        return;
    free(m->params_memory);
    free(m->grads_memory);
    free(m->m_memory);
    free(m->v_memory);
    free(m->acts_memory);
    free(m->grads_acts_memory);
    free(m->path);
    free(m->updates);
    free(m);
}

/* --- layers, forward and backward -------------------------------------------------------------------------
 */

static void encoder_forward(float *out, const int *tokens, const float *wte, const float *wpe, int B, int T,
                            int C)
{
    for (int b = 0; b < B; b++) {
        float *o = out + b * C;
        for (int c = 0; c < C; c++)
            o[c] = 0.0f;
        for (int t = 0; t < T; t++) {
            const float *e = wte + tokens[b * T + t] * C;
            for (int c = 0; c < C; c++)
                o[c] += e[c] * wpe[t * C + c];
        }
    }
}

/* If dwpe is NULL, positions are not trained. */
static void encoder_backward(float *dwte, float *dwpe, const float *dout, const int *tokens, const float *wte,
                             const float *wpe, int B, int T, int C)
{
    for (int b = 0; b < B; b++) {
        const float *d = dout + b * C;
        for (int t = 0; t < T; t++) {
            int ix = tokens[b * T + t];
            for (int c = 0; c < C; c++) {
                dwte[ix * C + c] += d[c] * wpe[t * C + c];
                if (dwpe != NULL)
                    dwpe[t * C + c] += d[c] * wte[ix * C + c];
            }
        }
    }
}

static void layernorm_forward(float *out, float *mean, float *rstd, const float *inp, const float *w,
                              const float *b, int B, int C)
{
    for (int i = 0; i < B; i++) {
        const float *x = inp + i * C;
        float mu = 0.0f, var = 0.0f;
        for (int c = 0; c < C; c++)
            mu += x[c];
        mu /= (float)C;
        for (int c = 0; c < C; c++)
            var += (x[c] - mu) * (x[c] - mu);
        var /= (float)C;
        float s = 1.0f / sqrtf(var + LN_EPS);
        for (int c = 0; c < C; c++)
            out[i * C + c] = s * (x[c] - mu) * w[c] + b[c];
        mean[i] = mu;
        rstd[i] = s;
    }
}

static void layernorm_backward(float *dinp, float *dw, float *db, const float *dout, const float *inp,
                               const float *w, const float *mean, const float *rstd, int B, int C)
{
    for (int i = 0; i < B; i++) {
        const float *x = inp + i * C, *d = dout + i * C;
        float sum = 0.0f, sum_norm = 0.0f;
        for (int c = 0; c < C; c++) {
            float norm = (x[c] - mean[i]) * rstd[i];
            sum += w[c] * d[c];
            sum_norm += w[c] * d[c] * norm;
        }
        sum /= (float)C;
        sum_norm /= (float)C;
        for (int c = 0; c < C; c++) {
            float norm = (x[c] - mean[i]) * rstd[i];
            db[c] += d[c];
            dw[c] += norm * d[c];
            dinp[i * C + c] += (w[c] * d[c] - sum - norm * sum_norm) * rstd[i];
        }
    }
}

/* out (B, OC) = inp (B, C) * w (OC, C)^T + b (OC) */
static void matmul_forward(float *out, const float *inp, const float *w, const float *bias, int B, int C,
                           int OC)
{
    for (int i = 0; i < B; i++)
        for (int o = 0; o < OC; o++) {
            float sum = bias[o];
            for (int c = 0; c < C; c++)
                sum += inp[i * C + c] * w[o * C + c];
            out[i * OC + o] = sum;
        }
}

static void matmul_backward(float *dinp, float *dw, float *dbias, const float *dout, const float *inp,
                            const float *w, int B, int C, int OC)
{
    for (int i = 0; i < B; i++)
        for (int o = 0; o < OC; o++) {
            float d = dout[i * OC + o];
            dbias[o] += d;
            for (int c = 0; c < C; c++) {
                dinp[i * C + c] += w[o * C + c] * d;
                dw[o * C + c] += inp[i * C + c] * d;
            }
        }
}

#define GELU_SCALE 0.7978845608f /* sqrt(2/pi) */

static void gelu_forward(float *out, const float *inp, int n)
{
    for (int i = 0; i < n; i++) {
        float x = inp[i];
        out[i] = 0.5f * x * (1.0f + tanhf(GELU_SCALE * (x + 0.044715f * x * x * x)));
    }
}

static void gelu_backward(float *dinp, const float *inp, const float *dout, int n)
{
    for (int i = 0; i < n; i++) {
        float x = inp[i], t = tanhf(GELU_SCALE * (x + 0.044715f * x * x * x));
        float slope =
            0.5f * (1.0f + t) + 0.5f * x * (1.0f - t * t) * GELU_SCALE * (1.0f + 3.0f * 0.044715f * x * x);
        dinp[i] += slope * dout[i];
    }
}

static void residual_forward(float *out, const float *a, int n)
{
    for (int i = 0; i < n; i++)
        out[i] += a[i];
}

/* --- the model --------------------------------------------------------------------------------------------
 */

void mlp_encode(struct mlp *m, const int *tokens)
{
    m->tokens = tokens;
    encoder_forward(m->acts.encoded, tokens, m->params.wte, m->params.wpe, m->batch, m->config.context,
                    m->config.channels);
}

void mlp_block_forward(struct mlp *m, int l, int prev)
{
    struct mlp_tensors p = m->params;
    struct mlp_acts a = m->acts;
    int B = m->batch, C = m->config.channels;
    const float *in = prev < 0 ? a.encoded : a.residual + prev * B * C; /* (B, C) */
    float *out = a.residual + l * B * C;
    layernorm_forward(a.ln1 + l * B * C, a.mean1 + l * B, a.rstd1 + l * B, in, p.ln1w + l * C, p.ln1b + l * C,
                      B, C);
    matmul_forward(a.fch + l * B * 4 * C, a.ln1 + l * B * C, p.fcw + l * 4 * C * C, p.fcb + l * 4 * C, B, C,
                   4 * C);
    gelu_forward(a.gelu + l * B * 4 * C, a.fch + l * B * 4 * C, B * 4 * C);
    matmul_forward(out, a.gelu + l * B * 4 * C, p.projw + l * C * 4 * C, p.projb + l * C, B, 4 * C, C);
    residual_forward(out, in, B * C);
}

void mlp_head_forward(struct mlp *m, int last, const int *targets)
{
    struct mlp_tensors p = m->params;
    struct mlp_acts a = m->acts;
    int B = m->batch, C = m->config.channels, V = m->config.vocab;
    const float *in = last < 0 ? a.encoded : a.residual + last * B * C;
    layernorm_forward(a.lnf, a.meanf, a.rstdf, in, p.lnfw, p.lnfb, B, C);
    matmul_forward(a.logits, a.lnf, p.wte, p.headb, B, C, V);
    m->targets = targets;
    m->mean_loss = 0.0f;
    for (int b = 0; b < B; b++) {
        const float *logits = a.logits + b * V;
        float *probs = a.probs + b * V, max = logits[0], sum = 0.0f;
        for (int v = 1; v < V; v++)
            max = fmaxf(max, logits[v]);
        for (int v = 0; v < V; v++)
            sum += probs[v] = expf(logits[v] - max);
        for (int v = 0; v < V; v++)
            probs[v] /= sum;
        if (targets != NULL) {
            a.losses[b] = -logf(probs[targets[b]]);
            m->mean_loss += a.losses[b];
        }
    }
    m->mean_loss /= (float)B;
}

void mlp_forward(struct mlp *m, const int *tokens, const int *targets)
{
    mlp_encode(m, tokens);
    int prev = -1;
    for (int i = 0; i < m->n_path; i++) {
        mlp_block_forward(m, m->path[i], prev);
        prev = m->path[i];
    }
    mlp_head_forward(m, prev, targets);
}

void mlp_zero_grads_acts(struct mlp *m)
{
    memset(m->grads_acts_memory, 0, m->n_acts * sizeof(float));
}

void mlp_head_backward(struct mlp *m, int last)
{
    struct mlp_tensors p = m->params, g = m->grads;
    struct mlp_acts a = m->acts, d = m->grads_acts;
    int B = m->batch, C = m->config.channels, V = m->config.vocab;
    for (int b = 0; b < B; b++)
        for (int v = 0; v < V; v++)
            d.logits[b * V + v] = (a.probs[b * V + v] - (v == m->targets[b] ? 1.0f : 0.0f)) / (float)B;
    if (m->store_headb)
        memset(g.headb, 0, (size_t)V * sizeof(float));
    matmul_backward(d.lnf, g.wte, g.headb, d.logits, a.lnf, p.wte, B, C, V);
    layernorm_backward(last < 0 ? d.encoded : d.residual + last * B * C, g.lnfw, g.lnfb, d.lnf,
                       last < 0 ? a.encoded : a.residual + last * B * C, p.lnfw, a.meanf, a.rstdf, B, C);
}

void mlp_block_backward(struct mlp *m, int l, int prev)
{
    struct mlp_tensors p = m->params, g = m->grads;
    struct mlp_acts a = m->acts, d = m->grads_acts;
    int B = m->batch, C = m->config.channels;
    const float *in = prev < 0 ? a.encoded : a.residual + prev * B * C;
    float *din = prev < 0 ? d.encoded : d.residual + prev * B * C;
    const float *dout = d.residual + l * B * C;
    residual_forward(din, dout, B * C);
    matmul_backward(d.gelu + l * B * 4 * C, g.projw + l * C * 4 * C, g.projb + l * C, dout,
                    a.gelu + l * B * 4 * C, p.projw + l * C * 4 * C, B, 4 * C, C);
    gelu_backward(d.fch + l * B * 4 * C, a.fch + l * B * 4 * C, d.gelu + l * B * 4 * C, B * 4 * C);
    matmul_backward(d.ln1 + l * B * C, g.fcw + l * 4 * C * C, g.fcb + l * 4 * C, d.fch + l * B * 4 * C,
                    a.ln1 + l * B * C, p.fcw + l * 4 * C * C, B, C, 4 * C);
    layernorm_backward(din, g.ln1w + l * C, g.ln1b + l * C, d.ln1 + l * B * C, in, p.ln1w + l * C,
                       a.mean1 + l * B, a.rstd1 + l * B, B, C);
}

void mlp_encode_backward(struct mlp *m)
{
    encoder_backward(m->grads.wte, m->grads.wpe, m->grads_acts.encoded, m->tokens, m->params.wte,
                     m->params.wpe, m->batch, m->config.context, m->config.channels);
}

void mlp_backward(struct mlp *m)
{
    mlp_zero_grads_acts(m);
    mlp_head_backward(m, m->n_path > 0 ? m->path[m->n_path - 1] : -1);
    for (int i = m->n_path; i-- > 0;)
        mlp_block_backward(m, m->path[i], i > 0 ? m->path[i - 1] : -1);
    mlp_encode_backward(m);
}

/* --- training ---------------------------------------------------------------------------------------------
 */

void mlp_zero_grad(struct mlp *m)
{
    memset(m->grads_memory, 0, m->n_params * sizeof(float));
}

double mlp_clip(struct mlp *m, float max_norm)
{
    double sum = 0.0;
    for (size_t i = 0; i < m->n_params; i++)
        sum += (double)m->grads_memory[i] * m->grads_memory[i];
    double norm = sqrt(sum);
    if (max_norm > 0.0f && norm > max_norm) {
        float scale = (float)(max_norm / norm);
        for (size_t i = 0; i < m->n_params; i++)
            m->grads_memory[i] *= scale;
    }
    return norm;
}

void mlp_adamw(size_t n, float *w, const float *g, float *m, float *v, struct mlp_adamw a)
{
    float c1 = 1.0f - powf(a.beta1, (float)a.t), c2 = 1.0f - powf(a.beta2, (float)a.t);
    for (size_t i = 0; i < n; i++) {
        m[i] = a.beta1 * m[i] + (1.0f - a.beta1) * g[i];
        v[i] = a.beta2 * v[i] + (1.0f - a.beta2) * (g[i] * g[i]);
        w[i] = w[i] - a.lr * ((m[i] / c1) / (sqrtf(v[i] / c2) + a.eps) + a.decay * w[i]);
    }
}

int mlp_decays(int tensor)
{
    static const int is_matrix[MLP_N_TENSORS] = {1, 1, 0, 0, 1, 0, 1, 0, 0, 0, 0};
    return is_matrix[tensor];
}

/* Returns whether the tensor has one slice per layer: ln1w to projb. */
static int is_stacked(int tensor)
{
    return tensor >= 2 && tensor <= 7;
}

static int runs(const struct mlp *m, int layer)
{
    for (int i = 0; i < m->n_path; i++)
        if (m->path[i] == layer)
            return 1;
    return 0;
}

/* A tensor without a gradient pointer is not changed. */
void mlp_update(struct mlp *m, struct mlp_adamw a)
{
    if (m->m_memory == NULL) {
        m->m_memory = calloc(m->n_params, sizeof(float));
        m->v_memory = calloc(m->n_params, sizeof(float));
        if (m->m_memory == NULL || m->v_memory == NULL)
            abort();
    }
    const float *grads[MLP_N_TENSORS];
    memcpy(grads, &m->grads, sizeof grads);
    for (int l = 0; l < m->config.layers; l++)
        m->updates[l] += runs(m, l);
    size_t at = 0;
    for (int k = 0; k < MLP_N_TENSORS; k++) {
        int n_slices = is_stacked(k) ? m->config.layers : 1;
        size_t n = m->sizes[k] / (size_t)n_slices;
        struct mlp_adamw one = a;
        one.decay = mlp_decays(k) ? a.decay : 0.0f;
        for (int l = 0; l < n_slices; l++, at += n) {
            int leaves_out = m->leaves_out && is_stacked(k);
            one.t = leaves_out ? m->updates[l] : a.t;
            if (grads[k] != NULL && !(leaves_out && !runs(m, l)))
                mlp_adamw(n, m->params_memory + at, m->grads_memory + at, m->m_memory + at, m->v_memory + at,
                          one);
        }
    }
}

/* --- files and text ---------------------------------------------------------------------------------------
 */

#define MLP_MAGIC 20260214

int mlp_save(const struct mlp *m, FILE *f)
{
    int header[5] = {MLP_MAGIC, m->config.vocab, m->config.context, m->config.channels, m->config.layers};
    if (fwrite(header, sizeof header, 1, f) != 1)
        return -1;
    return fwrite(m->params_memory, sizeof(float), m->n_params, f) == m->n_params ? 0 : -1;
}

int mlp_load(struct mlp *m, FILE *f)
{
    int header[5];
    if (fread(header, sizeof header, 1, f) != 1 || header[0] != MLP_MAGIC || header[1] != m->config.vocab ||
        header[2] != m->config.context || header[3] != m->config.channels || header[4] != m->config.layers)
        return -1;
    return fread(m->params_memory, sizeof(float), m->n_params, f) == m->n_params ? 0 : -1;
}

void mlp_sample(struct mlp *m, const int *prompt, int *out, int n, uint64_t seed)
{
    int T = m->config.context, V = m->config.vocab, batch = m->batch;
    int *window = malloc((size_t)T * sizeof(int));
    if (window == NULL)
        abort();
    memcpy(window, prompt, (size_t)T * sizeof(int));
    m->batch = 1;
    for (int i = 0; i < n; i++) {
        mlp_forward(m, window, NULL);
        float coin = random_uniform(&seed), cdf = 0.0f;
        int token = V - 1;
        for (int v = 0; v < V; v++) {
            cdf += m->acts.probs[v];
            if (coin < cdf) {
                token = v;
                break;
            }
        }
        out[i] = token;
        memmove(window, window + 1, (size_t)(T - 1) * sizeof(int));
        window[T - 1] = token;
    }
    m->batch = batch;
    free(window);
}
