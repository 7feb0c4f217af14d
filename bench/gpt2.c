/* gpt2.c: see gpt2.h. The architecture of Radford et al. 2019: pre-norm blocks, learned positions, tied head.
 */
#include "bench/gpt2.h"
#include "bench/gpt2_layers.h"
#include "bench/random_bits.h"

#include <math.h>
#include <stdlib.h>

/* Points n pointers at consecutive pieces of one new buffer. Returns NULL when there is no memory. */
static void *lay_out(void **pieces, const int64_t *sizes, int n, size_t element_bytes)
{
    const int64_t align = 64 / (int64_t)element_bytes; /* of each piece, in elements */
    int64_t total = 0;
    for (int i = 0; i < n; i++) {
        total += (sizes[i] + align - 1) / align * align;
    }
    char *memory = aligned_alloc(64, (size_t)total * element_bytes);
    for (int64_t i = 0, at = 0; memory && i < n; i++) {
        pieces[i] = memory + (size_t)at * element_bytes;
        at += (sizes[i] + align - 1) / align * align;
    }
    return memory;
}

static int64_t param_sizes(int64_t sizes[GPT2_N_TENSORS], const struct gpt2_config *c)
{
    int64_t L = c->layers, C = c->channels, T = c->context, V = c->vocab;
    const int64_t s[GPT2_N_TENSORS] = {
        V * C,         /* wte */
        T * C,         /* wpe */
        L * C,         /* ln1w */
        L * C,         /* ln1b */
        L * 3 * C * C, /* qkvw */
        L * 3 * C,     /* qkvb */
        L * C * C,     /* attprojw */
        L * C,         /* attprojb */
        L * C,         /* ln2w */
        L * C,         /* ln2b */
        L * 4 * C * C, /* fcw */
        L * 4 * C,     /* fcb */
        L * C * 4 * C, /* fcprojw */
        L * C,         /* fcprojb */
        C,             /* lnfw */
        C,             /* lnfb */
    };
    memcpy(sizes, s, sizeof s);
    int64_t total = 0;
    for (int i = 0; i < GPT2_N_TENSORS; i++) {
        total += s[i];
    }
    return total;
}

static real *open_activations(struct gpt2 *m)
{
    int64_t L = m->config.layers, C = m->config.channels, T = m->config.context, V = m->config.vocab;
    int64_t NH = m->config.heads, B = m->B;
    const int64_t sizes[GPT2_N_ACTIVATIONS] = {
        B * T * C,          /* embedded */
        L * B * T * C,      /* ln1 */
        L * B * T * 3 * C,  /* qkv */
        L * B * NH * T * T, /* att */
        L * B * T * C,      /* atty */
        L * B * T * C,      /* residual2 */
        L * B * T * C,      /* ln2 */
        L * B * T * 4 * C,  /* fch */
        L * B * T * 4 * C,  /* fch_gelu */
        L * B * T * C,      /* residual3 */
        B * T * C,          /* lnf */
        B * T * V,          /* dlogits */
        B * T * C,          /* dresidual */
        B * T * C,          /* dbtc */
        B * T * 3 * C,      /* dqkv */
        B * T * 4 * C,      /* dfch */
        NH * T * T,         /* dscores */
    };
    return lay_out((void **)&m->acts, sizes, GPT2_N_ACTIVATIONS, sizeof(real));
}

static float *open_statistics(struct gpt2 *m)
{
    int64_t L = m->config.layers, T = m->config.context, V = m->config.vocab, NH = m->config.heads, B = m->B;
    const int64_t sizes[GPT2_N_STATISTICS] = {
        L * B * T,
        L * B * T, /* ln1_mean, ln1_rstd */
        L * B * T,
        L * B * T, /* ln2_mean, ln2_rstd */
        B * T,
        B * T,                 /* lnf_mean, lnf_rstd */
        NH * T * T,            /* scores */
        T * V,                 /* logits */
        4 * m->config.channels /* columns */
    };
    return lay_out((void **)&m->stats, sizes, GPT2_N_STATISTICS, sizeof(float));
}

/* Element i of tensor t is drawn from seed by its place alone (Box and Muller 1958). */
static void draw(real *x, int64_t n, uint64_t seed, int t, double deviation)
{
    const double two_pi = 6.283185307179586;
    uint64_t stream = random_bits(random_bits(seed) + (uint64_t)t);
    for (int64_t i = 0; i < n; i += 2) {
        double u = ((double)(random_bits(stream + (uint64_t)i) >> 11) + 0.5) * 0x1p-53;
        double v = (double)(random_bits(stream + (uint64_t)i + 1) >> 11) * 0x1p-53;
        double r = deviation * sqrt(-2.0 * log(u));
        x[i] = from_float((float)(r * cos(two_pi * v)));
        if (i + 1 < n) {
            x[i + 1] = from_float((float)(r * sin(two_pi * v)));
        }
    }
}

static void fill(real *x, int64_t n, float value)
{
    for (int64_t i = 0; i < n; i++) {
        x[i] = from_float(value);
    }
}

static void initialise(struct gpt2 *m, uint64_t seed)
{
    int64_t L = m->config.layers, C = m->config.channels, T = m->config.context, V = m->config.vocab;
    struct params *p = &m->params;
    double deviation = 0.02, projection = deviation / sqrt(2.0 * (double)L);
    draw(p->wte, V * C, seed, 0, deviation);
    draw(p->wpe, T * C, seed, 1, deviation);
    fill(p->ln1w, L * C, 1.0f);
    fill(p->ln1b, L * C, 0.0f);
    draw(p->qkvw, L * 3 * C * C, seed, 2, deviation);
    fill(p->qkvb, L * 3 * C, 0.0f);
    draw(p->attprojw, L * C * C, seed, 3, projection);
    fill(p->attprojb, L * C, 0.0f);
    fill(p->ln2w, L * C, 1.0f);
    fill(p->ln2b, L * C, 0.0f);
    draw(p->fcw, L * 4 * C * C, seed, 4, deviation);
    fill(p->fcb, L * 4 * C, 0.0f);
    draw(p->fcprojw, L * C * 4 * C, seed, 5, projection);
    fill(p->fcprojb, L * C, 0.0f);
    fill(p->lnfw, C, 1.0f);
    fill(p->lnfb, C, 0.0f);
}

int gpt2_open(struct gpt2 *m, const struct gpt2_config *config, int64_t B, uint64_t seed,
              struct zr_gemm *gemm)
{
    *m = (struct gpt2){.config = *config, .B = B, .gemm = gemm};
    int64_t BT = B * config->context, sizes[GPT2_N_TENSORS];
    int64_t n_params = param_sizes(sizes, config);
    m->params_memory = lay_out((void **)&m->params, sizes, GPT2_N_TENSORS, sizeof(real));
    m->acts_memory = open_activations(m);
    m->stats_memory = open_statistics(m);
    m->tokens = calloc((size_t)BT, sizeof *m->tokens);
    m->targets = calloc((size_t)BT, sizeof *m->targets);
    m->order = malloc((size_t)(BT + config->vocab + 1) * sizeof *m->order);
    if (!m->params_memory || !m->acts_memory || !m->stats_memory || !m->tokens || !m->targets || !m->order) {
        gpt2_close(m);
        return zr_fail(ZR_ERR_NOMEM, "no memory for a model of %lld parameters and %lld rows of %lld tokens",
                       (long long)n_params, (long long)B, (long long)config->context);
    }
    initialise(m, seed);
    return 0;
}

int gpt2_open_grads(struct gpt2 *m)
{
    int64_t sizes[GPT2_N_TENSORS];
    int64_t n_params = param_sizes(sizes, &m->config);
    m->grads_memory = lay_out((void **)&m->grads, sizes, GPT2_N_TENSORS, sizeof(real));
    if (!m->grads_memory) {
        return zr_fail(ZR_ERR_NOMEM, "no memory for the gradients of %lld parameters", (long long)n_params);
    }
    void **grads = (void **)&m->grads;
    for (int i = 0; i < GPT2_N_TENSORS; i++) {
        memset(grads[i], 0, (size_t)sizes[i] * sizeof(real));
    }
    return 0;
}

void gpt2_free_params(struct gpt2 *m)
{
    free(m->params_memory);
    m->params_memory = NULL;
}

void gpt2_close(struct gpt2 *m)
{
    free(m->params_memory);
    free(m->grads_memory);
    free(m->acts_memory);
    free(m->stats_memory);
    free(m->tokens);
    free(m->targets);
    free(m->order);
    *m = (struct gpt2){0};
}

/* After the first failure products are left out, and whoever drives the model sees m->err at the end of the
 * pass. */
static void multiply(struct gpt2 *m, const struct zr_gemm_args *args)
{
    if (!m->err) {
        m->err = zr_gemm_run(m->gemm, args);
    }
}

/* out (B*T, OC) = inp (B*T, C) * weight (OC, C)^T + bias (OC); add: to what out holds. */
static void linear_forward(struct gpt2 *m, real *out, const real *inp, const real *weight, const real *bias,
                           int64_t C, int64_t OC, bool add)
{
    multiply(m, &(struct zr_gemm_args){
                    .trans_b = true,
                    .m = m->B * m->config.context,
                    .n = OC,
                    .k = C,
                    .ab_dtype = GPT2_GEMM_DTYPE,
                    .c_dtype = GPT2_GEMM_DTYPE,
                    .bias_dtype = GPT2_GEMM_DTYPE,
                    .a = inp,
                    .b = weight,
                    .bias = bias,
                    .c = out,
                    .lda = C,
                    .ldb = C,
                    .ldc = OC,
                    .beta = add ? 1.0f : 0.0f,
                    .n_batch = 1,
                });
}

/* dinp (B*T, C) = dout (B*T, OC) * weight (OC, C);  dweight (OC, C) += dout^T * inp;  dbias (OC) += sum of
 * dout's rows, if there is a bias */
static void linear_backward(struct gpt2 *m, real *dinp, real *dweight, real *dbias, const real *dout,
                            const real *inp, const real *weight, int64_t C, int64_t OC)
{
    int64_t BT = m->B * m->config.context;
    struct zr_gemm_args args = {
        .m = BT,
        .n = C,
        .k = OC,
        .ab_dtype = GPT2_GEMM_DTYPE,
        .c_dtype = GPT2_GEMM_DTYPE,
        .a = dout,
        .b = weight,
        .c = dinp,
        .lda = OC,
        .ldb = C,
        .ldc = C,
        .n_batch = 1,
    };
    multiply(m, &args);
    args.trans_a = true;
    args.m = OC;
    args.k = BT;
    args.b = inp;
    args.c = dweight;
    args.beta = 1.0f;
    multiply(m, &args);
    if (dbias) {
        bias_backward(dbias, dout, m->stats.columns, BT, OC);
    }
}

/* One product per head, of matrices that lie side by side in a row of the batch. */
static void multiply_heads(struct gpt2 *m, struct zr_gemm_args args)
{
    args.ab_dtype = GPT2_GEMM_DTYPE;
    args.n_batch = m->config.heads;
    multiply(m, &args);
}

/* atty (B, T, C) = softmax(q * k^T / sqrt(HS)) * v for each head, from qkv (B, T, 3*C), whose columns are q,
 * k, v and in each of those the heads; att (B, NH, T, T) is kept. */
static void attention_forward(struct gpt2 *m, real *atty, real *att, const real *qkv)
{
    int64_t T = m->config.context, C = m->config.channels, NH = m->config.heads, HS = C / NH;
    for (int64_t b = 0; b < m->B; b++, atty += T * C, att += NH * T * T, qkv += T * 3 * C) {
        const real *q = qkv, *k = qkv + C, *v = qkv + 2 * C;
        multiply_heads(m, (struct zr_gemm_args){
                              .trans_b = true, /* scores (T, T) = q (T, HS) * k (T, HS)^T */
                              .m = T,
                              .n = T,
                              .k = HS,
                              .c_dtype = ZR_F32,
                              .a = q,
                              .lda = 3 * C,
                              .stride_a = HS,
                              .b = k,
                              .ldb = 3 * C,
                              .stride_b = HS,
                              .c = m->stats.scores,
                              .ldc = T,
                              .stride_c = T * T,
                          });
        causal_softmax_forward(att, m->stats.scores, NH, T, 1.0f / sqrtf((float)HS));
        multiply_heads(m, (struct zr_gemm_args){
                              .m = T,
                              .n = HS,
                              .k = T,
                              .c_dtype = GPT2_GEMM_DTYPE,
                              .a = att,
                              .lda = T,
                              .stride_a = T * T, /* atty (T, HS) = att (T, T) * v (T, HS) */
                              .b = v,
                              .ldb = 3 * C,
                              .stride_b = HS,
                              .c = atty,
                              .ldc = C,
                              .stride_c = HS,
                          });
    }
}

static void attention_backward(struct gpt2 *m, real *dqkv, const real *datty, const real *att,
                               const real *qkv)
{
    int64_t T = m->config.context, C = m->config.channels, NH = m->config.heads, HS = C / NH;
    float *datt = m->stats.scores;
    real *dscores = m->acts.dscores;
    for (int64_t b = 0; b < m->B;
         b++, datty += T * C, att += NH * T * T, qkv += T * 3 * C, dqkv += T * 3 * C) {
        const real *q = qkv, *k = qkv + C, *v = qkv + 2 * C;
        real *dq = dqkv, *dk = dqkv + C, *dv = dqkv + 2 * C;
        multiply_heads(m, (struct zr_gemm_args){
                              .trans_b = true, /* datt (T, T) = datty (T, HS) * v (T, HS)^T */
                              .m = T,
                              .n = T,
                              .k = HS,
                              .c_dtype = ZR_F32,
                              .a = datty,
                              .lda = C,
                              .stride_a = HS,
                              .b = v,
                              .ldb = 3 * C,
                              .stride_b = HS,
                              .c = datt,
                              .ldc = T,
                              .stride_c = T * T,
                          });
        multiply_heads(m, (struct zr_gemm_args){
                              .trans_a = true, /* dv (T, HS) = att (T, T)^T * datty (T, HS) */
                              .m = T,
                              .n = HS,
                              .k = T,
                              .c_dtype = GPT2_GEMM_DTYPE,
                              .a = att,
                              .lda = T,
                              .stride_a = T * T,
                              .b = datty,
                              .ldb = C,
                              .stride_b = HS,
                              .c = dv,
                              .ldc = 3 * C,
                              .stride_c = HS,
                          });
        causal_softmax_backward(dscores, datt, att, NH, T, 1.0f / sqrtf((float)HS));
        multiply_heads(m, (struct zr_gemm_args){
                              .m = T,
                              .n = HS,
                              .k = T,
                              .c_dtype = GPT2_GEMM_DTYPE,
                              .a = dscores,
                              .lda = T,
                              .stride_a = T * T, /* dq (T, HS) = dscores (T, T) * k (T, HS) */
                              .b = k,
                              .ldb = 3 * C,
                              .stride_b = HS,
                              .c = dq,
                              .ldc = 3 * C,
                              .stride_c = HS,
                          });
        multiply_heads(m, (struct zr_gemm_args){
                              .trans_a = true, /* dk (T, HS) = dscores (T, T)^T * q (T, HS) */
                              .m = T,
                              .n = HS,
                              .k = T,
                              .c_dtype = GPT2_GEMM_DTYPE,
                              .a = dscores,
                              .lda = T,
                              .stride_a = T * T,
                              .b = q,
                              .ldb = 3 * C,
                              .stride_b = HS,
                              .c = dk,
                              .ldc = 3 * C,
                              .stride_c = HS,
                          });
    }
}

void gpt2_embed_forward(struct gpt2 *m)
{
    embedding_forward(m->acts.embedded, m->tokens, m->params.wte, m->params.wpe, m->B, m->config.context,
                      m->config.channels);
}

/* The input of layer l; of layer L, the input of the head. */
static real *residual_before(struct gpt2 *m, int64_t l)
{
    int64_t BTC = m->B * m->config.context * m->config.channels;
    return l == 0 ? m->acts.embedded : m->acts.residual3 + (l - 1) * BTC;
}

void gpt2_layer_forward(struct gpt2 *m, int64_t l)
{
    int64_t C = m->config.channels, T = m->config.context, NH = m->config.heads, BT = m->B * T;
    const struct params *p = &m->params;
    const struct activations *a = &m->acts;
    const struct statistics *s = &m->stats;
    const real *x = residual_before(m, l);
    real *ln1 = a->ln1 + l * BT * C, *qkv = a->qkv + l * BT * 3 * C, *att = a->att + l * m->B * NH * T * T;
    real *atty = a->atty + l * BT * C, *residual2 = a->residual2 + l * BT * C, *ln2 = a->ln2 + l * BT * C;
    real *fch = a->fch + l * BT * 4 * C, *fch_gelu = a->fch_gelu + l * BT * 4 * C;
    real *residual3 = a->residual3 + l * BT * C;

    layernorm_forward(ln1, s->ln1_mean + l * BT, s->ln1_rstd + l * BT, x, p->ln1w + l * C, p->ln1b + l * C,
                      s->columns, BT, C);
    linear_forward(m, qkv, ln1, p->qkvw + l * 3 * C * C, p->qkvb + l * 3 * C, C, 3 * C, false);
    attention_forward(m, atty, att, qkv);
    memcpy(residual2, x, (size_t)(BT * C) * sizeof(real));
    linear_forward(m, residual2, atty, p->attprojw + l * C * C, p->attprojb + l * C, C, C, true);
    layernorm_forward(ln2, s->ln2_mean + l * BT, s->ln2_rstd + l * BT, residual2, p->ln2w + l * C,
                      p->ln2b + l * C, s->columns, BT, C);
    linear_forward(m, fch, ln2, p->fcw + l * 4 * C * C, p->fcb + l * 4 * C, C, 4 * C, false);
    gelu_forward(fch_gelu, fch, BT * 4 * C);
    memcpy(residual3, residual2, (size_t)(BT * C) * sizeof(real));
    linear_forward(m, residual3, fch_gelu, p->fcprojw + l * C * 4 * C, p->fcprojb + l * C, 4 * C, C, true);
}

double gpt2_head_forward(struct gpt2 *m)
{
    int64_t C = m->config.channels, T = m->config.context, V = m->config.vocab, BT = m->B * T;
    const real *x = residual_before(m, m->config.layers);
    double loss = 0.0;
    layernorm_forward(m->acts.lnf, m->stats.lnf_mean, m->stats.lnf_rstd, x, m->params.lnfw, m->params.lnfb,
                      m->stats.columns, BT, C);
    for (int64_t b = 0; b < m->B; b++) { /* row by row: logits are the largest thing there is */
        multiply(m, &(struct zr_gemm_args){
                        .trans_b = true, /* logits (T, V) = lnf (T, C) * wte (V, C)^T */
                        .m = T,
                        .n = V,
                        .k = C,
                        .ab_dtype = GPT2_GEMM_DTYPE,
                        .c_dtype = ZR_F32,
                        .a = m->acts.lnf + b * T * C,
                        .lda = C,
                        .b = m->params.wte,
                        .ldb = C,
                        .c = m->stats.logits,
                        .ldc = V,
                        .n_batch = 1,
                    });
        if (m->err) {
            return NAN;
        }
        loss += cross_entropy(m->acts.dlogits + b * T * V, m->stats.logits, m->targets + b * T, T, V,
                              1.0f / (float)BT);
    }
    return loss / (double)BT;
}

void gpt2_head_backward(struct gpt2 *m)
{
    int64_t C = m->config.channels, V = m->config.vocab, BT = m->B * m->config.context;
    const struct activations *a = &m->acts;
    linear_backward(m, a->dbtc, m->grads.wte, NULL, a->dlogits, a->lnf, m->params.wte, C, V);
    memset(a->dresidual, 0, (size_t)(BT * C) * sizeof(real));
    layernorm_backward(a->dresidual, m->grads.lnfw, m->grads.lnfb, a->dbtc,
                       residual_before(m, m->config.layers), m->params.lnfw, m->stats.lnf_mean,
                       m->stats.lnf_rstd, m->stats.columns, BT, C);
}

/* dresidual: on entry the gradient of the layer's output, on return that of its input. */
void gpt2_layer_backward(struct gpt2 *m, int64_t l)
{
    int64_t C = m->config.channels, T = m->config.context, NH = m->config.heads, BT = m->B * T;
    const struct params *p = &m->params, *g = &m->grads;
    const struct activations *a = &m->acts;
    const struct statistics *s = &m->stats;
    const real *x = residual_before(m, l);
    const real *ln1 = a->ln1 + l * BT * C, *qkv = a->qkv + l * BT * 3 * C,
               *att = a->att + l * m->B * NH * T * T;
    const real *atty = a->atty + l * BT * C, *residual2 = a->residual2 + l * BT * C,
               *ln2 = a->ln2 + l * BT * C;
    const real *fch = a->fch + l * BT * 4 * C, *fch_gelu = a->fch_gelu + l * BT * 4 * C;

    linear_backward(m, a->dfch, g->fcprojw + l * C * 4 * C, g->fcprojb + l * C, a->dresidual, fch_gelu,
                    p->fcprojw + l * C * 4 * C, 4 * C, C);
    gelu_backward(a->dfch, fch, BT * 4 * C);
    linear_backward(m, a->dbtc, g->fcw + l * 4 * C * C, g->fcb + l * 4 * C, a->dfch, ln2,
                    p->fcw + l * 4 * C * C, C, 4 * C);
    layernorm_backward(a->dresidual, g->ln2w + l * C, g->ln2b + l * C, a->dbtc, residual2, p->ln2w + l * C,
                       s->ln2_mean + l * BT, s->ln2_rstd + l * BT, s->columns, BT, C);
    linear_backward(m, a->dbtc, g->attprojw + l * C * C, g->attprojb + l * C, a->dresidual, atty,
                    p->attprojw + l * C * C, C, C);
    attention_backward(m, a->dqkv, a->dbtc, att, qkv);
    linear_backward(m, a->dbtc, g->qkvw + l * 3 * C * C, g->qkvb + l * 3 * C, a->dqkv, ln1,
                    p->qkvw + l * 3 * C * C, C, 3 * C);
    layernorm_backward(a->dresidual, g->ln1w + l * C, g->ln1b + l * C, a->dbtc, x, p->ln1w + l * C,
                       s->ln1_mean + l * BT, s->ln1_rstd + l * BT, s->columns, BT, C);
}

void gpt2_embed_backward(struct gpt2 *m)
{
    embedding_backward(m->grads.wte, m->grads.wpe, m->acts.dresidual, m->tokens, m->order, m->stats.columns,
                       m->B, m->config.context, m->config.channels, m->config.vocab);
}
