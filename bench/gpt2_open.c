/* gpt2_open.c: the memory of the model in gpt2.h, and its first weights. */
#include "bench/gpt2.h"
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
