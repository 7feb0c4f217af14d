/* SPDX-License-Identifier: Apache-2.0 */
/* open.c: allocates and frees the memory of the model in model.h, and initialises its weights. Each
 * struct of pointers shares one block of memory. */
#include "bench/model/model.h"
#include "kernels/alloc.h"

#include <stdlib.h>

#define PIECE ((int64_t)1 << 21) /* elements drawn at a time */

/* Allocates one page-aligned block and points n pointers at consecutive pieces of it. */
static int lay_out(struct model *m, struct model_block *block, void **pieces, const int64_t *sizes, int n,
                   size_t element_bytes)
{
    const int64_t align = 256 / (int64_t)element_bytes; /* of each piece, in elements */
    int64_t total = 0;
    for (int i = 0; i < n; i++)
        total += (sizes[i] + align - 1) / align * align;
    struct model_block b = {NULL, total * (int64_t)element_bytes};
    int err = m->compute->dev->ops->alloc(m->compute->dev, b.bytes, &b.p);
    if (err)
        return err;
    *block = b;
    for (int64_t i = 0, at = 0; i < n; i++) {
        pieces[i] = (char *)b.p + (size_t)at * element_bytes;
        at += (sizes[i] + align - 1) / align * align;
    }
    return 0;
}

static void give_back(struct model *m, struct model_block *block)
{
    if (block->p)
        m->compute->dev->ops->free(m->compute->dev, block->p, block->bytes);
    *block = (struct model_block){0};
}

static int64_t param_sizes(int64_t sizes[GPT2_N_TENSORS], const struct model_config *c)
{
    int64_t L = c->layers, C = c->channels, U = model_part_vocab(c);
    int64_t A = model_part_channels(c), F = model_part_hidden(c);
    const int64_t s[GPT2_N_TENSORS] = {
        U * C,          /* wte */
        c->context * C, /* wpe */
        L * C,          /* ln1w */
        L * C,          /* ln1b */
        L * 3 * A * C,  /* qkvw */
        L * 3 * A,      /* qkvb */
        L * C * A,      /* attprojw */
        L * C,          /* attprojb */
        L * C,          /* ln2w */
        L * C,          /* ln2b */
        L * F * C,      /* fcw */
        L * F,          /* fcb */
        L * C * F,      /* fcprojw */
        L * C,          /* fcprojb */
        C,              /* lnfw */
        C,              /* lnfb */
    };
    memcpy(sizes, s, sizeof s);
    int64_t total = 0;
    for (int i = 0; i < GPT2_N_TENSORS; i++)
        total += s[i];
    return total;
}

/* Allocates one micro-batch's activations. Only the first micro-batch allocates the buffers of backward, and
 * all others share them. */
static int open_activations(struct model *m, struct model_kept *k, bool first)
{
    int64_t L = m->config.layers, C = m->config.channels, T = model_own_context(&m->config), B = m->B;
    int64_t A = model_part_channels(&m->config), F = model_part_hidden(&m->config);
    int64_t R = model_own_rows(m), R_in = m->config.no_embedding ? 0 : R, R_head = m->config.no_head ? 0 : R;
    int64_t BT_head = m->config.no_head ? 0 : B * T, BT_shared = first ? B * T : 0;
    bool two_parts = m->config.two_parts; /* each micro-batch has dqkv, dfch and kept_grads */
    const int64_t sizes[GPT2_N_ACTIVATIONS] = {
        R_in * C,                                                       /* embedded */
        L * R * C,                                                      /* ln1 */
        L * B * T * 3 * A,                                              /* qkv */
        L * B * T * A,                                                  /* atty */
        L * R * C,                                                      /* residual2 */
        L * R * C,                                                      /* ln2 */
        L * B * T * F,                                                  /* fch */
        L * B * T * F,                                                  /* fch_gelu */
        L * R * C,                                                      /* residual3 */
        R_head * C,                                                     /* lnf */
        BT_head * m->ld_logits,                                         /* dlogits */
        first ? R * C : 0,                                              /* dresidual */
        BT_shared * C,                                                  /* dbtc */
        two_parts ? L * model_apart(B * T * 3 * A) : BT_shared * 3 * A, /* dqkv */
        two_parts ? L * model_apart(B * T * F) : BT_shared * F,         /* dfch */
        first ? 4 * C : 0,                                              /* dbias */
        m->config.sequence ? BT_shared * C : 0,                         /* all */
        first ? model_cp_room(&m->config, B, sizeof(real)).reals : 0,   /* shared */
        /* kept_grads: 4 * l to 4 * l + 3 are of layer l, 4 * L of the head, 4 * L + 1 of the embedding */
        two_parts ? (4 * L + 2) * model_apart(R * C) : 0,
    };
    int err = lay_out(m, &k->acts_memory, (void **)&k->acts, sizes, GPT2_N_ACTIVATIONS, sizeof(real));
    if (!err && !first) {
        const struct activations *shared = &m->kept[0].acts;
        k->acts.dresidual = shared->dresidual;
        k->acts.dbtc = shared->dbtc;
        k->acts.dbias = shared->dbias;
        k->acts.all = shared->all;
        k->acts.shared = shared->shared;
        if (!two_parts) {
            k->acts.dqkv = shared->dqkv;
            k->acts.dfch = shared->dfch;
        }
    }
    return err;
}

/* Allocates one micro-batch's statistics. Only the first micro-batch allocates the buffers, and all others
 * share them. */
static int open_statistics(struct model *m, struct model_kept *k, bool first)
{
    int64_t L = m->config.layers, C = m->config.channels, T = model_own_context(&m->config),
            NH = model_part_heads(&m->config);
    int64_t B = m->B, ld = m->config.no_head ? 0 : m->ld_logits;
    int64_t R = model_own_rows(m), R_head = m->config.no_head ? 0 : R, T_shared = first ? T : 0;
    const int64_t sizes[GPT2_N_STATISTICS] = {
        L * R,
        L * R, /* ln1_mean, ln1_rstd */
        L * R,
        L * R, /* ln2_mean, ln2_rstd */
        R_head,
        R_head,                                                        /* lnf_mean, lnf_rstd */
        L * B * NH * T,                                                /* logsum */
        B * NH * T_shared,                                             /* dots */
        first ? model_context_scratch(m) : 0,                          /* attention */
        T_shared * ld,                                                 /* logits */
        3 * T_shared,                                                  /* rows */
        first ? m->layers->n_scratch(m->compute, B * T, C) : 0,        /* scratch */
        first ? model_cp_room(&m->config, B, sizeof(real)).floats : 0, /* shared */
    };
    int err = lay_out(m, &k->stats_memory, (void **)&k->stats, sizes, GPT2_N_STATISTICS, sizeof(float));
    if (!err && !first) {
        const struct statistics *shared = &m->kept[0].stats;
        k->stats.dots = shared->dots;
        k->stats.attention = shared->attention;
        k->stats.logits = shared->logits;
        k->stats.rows = shared->rows;
        k->stats.scratch = shared->scratch;
        k->stats.shared = shared->shared;
    }
    return err;
}

int model_keep(struct model *m, int64_t n)
{
    int err = 0;
    if (n > m->n_kept)
        ZR_TRY(ZR_GROW(m->kept, n, "%lld micro-batches", (long long)n));
    while (m->n_kept < n && !err) {
        int64_t i = m->n_kept++;
        m->kept[i] = (struct model_kept){0};
        err = open_activations(m, &m->kept[i], i == 0);
        err = err ? err : open_statistics(m, &m->kept[i], i == 0);
    }
    if (!err)
        model_turn_to(m, 0);
    return err;
}

/* Points the arrays of groups into 3*BT + 1 elements, and returns what follows. */
static int32_t *group_pieces(struct model_groups *g, int32_t *at, int64_t BT)
{
    *g = (struct model_groups){.order = at, .distinct = at + BT, .first = at + 2 * BT};
    return at + 3 * BT + 1;
}

/* The elements of a batch, whose arrays share one block. */
static int64_t batch_elements(const struct model *m)
{
    return 3 * model_own_tokens(m) + 2 * (3 * model_own_tokens(m) + 1) +
           (m->config.documents ? m->B * m->config.context : 0);
}

static void batch_pieces(const struct model *m, struct model_batch *b, int32_t *at)
{
    int64_t BT = model_own_tokens(m);
    *b = (struct model_batch){.tokens = at, .targets = at + BT, .positions = at + 2 * BT};
    at = group_pieces(&b->by_token, at + 3 * BT, BT);
    at = group_pieces(&b->by_position, at, BT);
    b->document_start = m->config.documents ? at : NULL;
}

static int open_batches(struct model *m)
{
    struct zr_device *dev = m->compute->dev;
    int64_t n = batch_elements(m);
    int err = lay_out(m, &m->batch_memory, &(void *){NULL}, &n, 1, sizeof(int32_t));
    if (err)
        return err;
    n = m->batch_memory.bytes / (int64_t)sizeof(int32_t);
    batch_pieces(m, &m->batch, m->batch_memory.p);
    struct model_block host = {NULL, 2 * m->batch_memory.bytes + (int64_t)sizeof(double)};
    err = dev->ops->host_alloc(dev, host.bytes, &host.p);
    if (err)
        return err;
    m->staged_memory = host;
    batch_pieces(m, &m->staged[0], host.p);
    batch_pieces(m, &m->staged[1], (int32_t *)host.p + n);
    m->loss_out = (double *)((int32_t *)host.p + 2 * n);
    for (int i = 0; i < 2 && !err; i++)
        err = dev->ops->event_open(dev, &m->sent[i]);
    return err ? err : dev->ops->event_open(dev, &m->loss_sent);
}

static int open_losses(struct model *m)
{
    int64_t sizes[] = {model_own_tokens(m), 1};
    void *pieces[2];
    int err = lay_out(m, &m->losses_memory, pieces, sizes, 2, sizeof(double));
    if (err)
        return err;
    m->losses = pieces[0];
    m->loss = pieces[1];
    return m->compute->dev->ops->zero(m->compute->stream, m->loss, sizeof *m->loss);
}

static int64_t smaller(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static int draw_all(struct model *m, const int64_t sizes[GPT2_N_TENSORS], uint64_t seed)
{
    const struct zr_device_ops *dev = m->compute->dev->ops;
    real *piece;
    int err = ZR_ALLOC(piece, PIECE, "random weights");
    for (int t = 0; t < GPT2_N_TENSORS && !err; t++)
        for (int64_t first = 0; first < sizes[t] && !err; first += PIECE) {
            int64_t n = smaller(PIECE, sizes[t] - first);
            gpt2_draw(&m->config, seed, t, first, n, piece);
            err = dev->copy(m->compute->stream, ((real **)&m->params)[t] + first, piece,
                            n * (int64_t)sizeof(real));
            err = err ? err : dev->stream_sync(m->compute->stream); /* the buffer is used again */
        }
    free(piece);
    return err;
}

const struct model_layers *model_layers_for(const struct compute *compute)
{
#ifdef ZR_HAVE_CUDA
    if (compute->cuda)
        return &model_layers_cuda;
#endif
    (void)compute; /* no GPU in this build */
    return &model_layers_host;
}

int model_open(struct model *m, const struct model_config *config, int64_t B, const struct compute *compute)
{
    const struct model_layers *layers = model_layers_for(compute);
    int64_t align = layers->row_align;
    *m = (struct model){.config = *config, .B = B, .compute = compute, .layers = layers};
    m->ld_logits = (model_part_vocab(config) + align - 1) / align * align;
    int err = model_keep(m, 1);
    err = err ? err : open_losses(m);
    err = err ? err : open_batches(m);
    if (!err)
        err = ZR_ALLOC(m->count, config->vocab + config->context, "%lld counts",
                       (long long)(config->vocab + config->context));
    if (err) {
        model_close(m);
        return zr_fail_more(err, "a model of %lld parameters and %lld rows of %lld tokens",
                            (long long)model_n_params(config), (long long)B, (long long)config->context);
    }
    return 0;
}

int model_open_params(struct model *m, uint64_t seed)
{
    int64_t sizes[GPT2_N_TENSORS];
    int64_t n_params = param_sizes(sizes, &m->config);
    int err = lay_out(m, &m->params_memory, (void **)&m->params, sizes, GPT2_N_TENSORS, sizeof(real));
    err = err ? err : draw_all(m, sizes, seed);
    return err ? zr_fail_more(err, "a model of %lld parameters", (long long)n_params) : 0;
}

int model_open_grads(struct model *m)
{
    int64_t sizes[GPT2_N_TENSORS];
    int64_t n_params = param_sizes(sizes, &m->config);
    int err = lay_out(m, &m->grads_memory, (void **)&m->grads, sizes, GPT2_N_TENSORS, sizeof(real));
    if (err)
        return zr_fail_more(err, "the gradients of %lld parameters", (long long)n_params);
    return m->compute->dev->ops->zero(m->compute->stream, m->grads_memory.p, m->grads_memory.bytes);
}

int model_next_batch(struct model *m)
{
    const struct model_rows own = model_rows_of(m, m->cp.part);
    m->slot = !m->slot;
    const struct model_batch *b = &m->staged[m->slot];
    m->tokens = b->tokens;
    m->targets = b->targets;
    m->positions = b->positions;
    m->document_start = b->document_start;
    ZR_TRY(m->compute->dev->ops->event_sync(m->sent[m->slot]));
    int32_t *position = m->positions;
    for (int64_t row = 0; row < m->B; row++)
        for (int i = 0; i < 2; i++)
            for (int64_t t = 0; t < own.n[i]; t++)
                *position++ = (int32_t)(own.first[i] + t);
    return 0;
}

int64_t model_activation_bytes(const struct model *m)
{
    int64_t bytes = model_cp_room(&m->config, m->B, sizeof(real)).floats * (int64_t)sizeof(float);
    for (int64_t i = 0; i < m->n_kept; i++)
        bytes += m->kept[i].acts_memory.bytes;
    return bytes;
}

void model_close(struct model *m)
{
    if (!m->compute)
        return;
    struct zr_device *dev = m->compute->dev;
    dev->ops->stream_sync(m->compute->stream); /* no running work may use what is freed */
    struct model_block *blocks[] = {&m->params_memory, &m->grads_memory, &m->losses_memory, &m->batch_memory};
    for (size_t i = 0; i < sizeof blocks / sizeof *blocks; i++)
        give_back(m, blocks[i]);
    for (int64_t i = 0; i < m->n_kept; i++) {
        give_back(m, &m->kept[i].acts_memory);
        give_back(m, &m->kept[i].stats_memory);
    }
    free(m->kept);
    if (m->staged_memory.p)
        dev->ops->host_free(dev, m->staged_memory.p, m->staged_memory.bytes);
    dev->ops->event_close(m->sent[0]);
    dev->ops->event_close(m->sent[1]);
    dev->ops->event_close(m->loss_sent);
    free(m->count);
    *m = (struct model){0};
}
