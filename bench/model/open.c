/* SPDX-License-Identifier: Apache-2.0 */
/* open.c: allocates and frees the memory of a model, and initialises its weights. All arrays of one struct of
 * pointers are in one block of memory. */
#include "bench/model/model.h"
#include "bench/train/state_hash.h"
#include "kernels/alloc.h"

#include <stdlib.h>

#define PIECE ((int64_t)1 << 21) /* elements drawn at a time */

/* Allocates one page-aligned block and points n pointers at consecutive pieces of it. If all pieces are
 * empty, it allocates nothing. */
static int lay_out(struct model *m, struct model_block *block, void **pieces, const int64_t *sizes, int n,
                   size_t element_bytes)
{
    const int64_t align = 256 / (int64_t)element_bytes; /* of each piece, in elements */
    int64_t total = 0;
    for (int i = 0; i < n; i++)
        total += (sizes[i] + align - 1) / align * align;
    struct model_block b = {NULL, total * (int64_t)element_bytes};
    int err = total ? m->compute->dev->ops->alloc(m->compute->dev, b.bytes, &b.p) : 0;
    if (err)
        return err;
    *block = b;
    for (int64_t i = 0, at = 0; i < n; i++) {
        pieces[i] = b.p ? (char *)b.p + (size_t)at * element_bytes : NULL;
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

static void close_block(struct model *m, struct model_kept *k)
{
    give_back(m, &k->acts_memory);
    give_back(m, &k->stats_memory);
}

/* The outputs of the widest product that has a bias. */
static int64_t widest_bias(const struct model_config *c)
{
    return model_larger(4 * c->channels, model_larger(model_part_qkv(c), model_part_hidden(c)));
}

/* The purpose of a block of memory:
 *
 *     FIRST    the first micro-batch; it also has the buffers that all micro-batches share
 *     NEXT     another micro-batch
 *     BETWEEN  the layers of a micro-batch between the two parts of its backward pass, with recompute */
enum purpose { FIRST, NEXT, BETWEEN };

/* Points arrays without elements at those of `other`. other NULL: they become NULL. */
static void share(void **pieces, const int64_t *sizes, void *const *other, int32_t n)
{
    for (int32_t i = 0; i < n; i++)
        if (sizes[i] == 0)
            pieces[i] = other ? other[i] : NULL;
}

static struct model_counts counts_of(const struct model *m, enum purpose purpose)
{
    const struct model_config *c = &m->config;
    bool full = !c->recompute || purpose == BETWEEN;
    int64_t once = purpose == FIRST;
    return (struct model_counts){.layers = full ? c->layers : once,
                                 .first_part = c->recompute ? once : c->layers,
                                 .head = purpose != BETWEEN && !c->no_head,
                                 .gradients = c->two_parts ? (full ? c->layers : 0) : once,
                                 .once = once};
}

/* Allocates activations. */
static int open_activations(struct model *m, struct model_kept *k, enum purpose purpose,
                            const struct model_counts *counts, const int64_t *own_sizes)
{
    int64_t L = m->config.layers, C = m->config.channels, BT = model_own_tokens(m), R = model_own_rows(m);
    bool first = purpose == FIRST, kept = purpose != BETWEEN;
    int64_t BT_shared = first ? BT : 0;
    int32_t n = m->passes->n_acts;
    int64_t sizes[MODEL_N_ACTIVATIONS + MODEL_MAX_ARRAYS] = {
        kept && !m->config.no_embedding ? R * C : 0,                                     /* embedded */
        kept ? L * R * C : 0,                                                            /* residual */
        counts->head * BT * m->ld_logits,                                                /* dlogits */
        first ? R * C : 0,                                                               /* dresidual */
        BT_shared * model_larger(C, model_part_channels(&m->config)),                    /* dbtc */
        first ? widest_bias(&m->config) : 0,                                             /* dbias */
        m->config.sequence ? BT_shared * C : 0,                                          /* all */
        first ? model_cp_room(&m->config, m->B, sizeof(real)).reals : 0,                 /* shared */
        m->config.two_parts && counts->gradients ? (4 * L + 2) * model_apart(R * C) : 0, /* kept_grads */
    };
    memcpy(sizes + MODEL_N_ACTIVATIONS, own_sizes, (size_t)n * sizeof *sizes);
    n += MODEL_N_ACTIVATIONS;
    ZR_TRY(lay_out(m, &k->acts_memory, k->acts, sizes, n, sizeof(real)));
    share(k->acts, sizes, purpose == NEXT ? m->kept[0].acts : NULL, n);
    return 0;
}

/* Allocates statistics. */
static int open_statistics(struct model *m, struct model_kept *k, enum purpose purpose,
                           const struct model_counts *counts, const int64_t *own_sizes)
{
    int64_t T = model_own_context(&m->config), BT = model_own_tokens(m), NH = model_part_heads(&m->config);
    bool first = purpose == FIRST;
    int64_t ld = m->config.no_head ? 0 : m->ld_logits, T_shared = first ? T : 0;
    int64_t quarter = (widest_bias(&m->config) + 3) / 4; /* scratch suits biases of 4 times this */
    int32_t n = m->passes->n_stats;
    int64_t sizes[MODEL_N_STATISTICS + MODEL_MAX_ARRAYS] = {
        counts->first_part * NH * BT,                                     /* logsum */
        first ? NH * BT : 0,                                              /* dots */
        first ? model_context_scratch(m) : 0,                             /* attention */
        T_shared * ld,                                                    /* logits */
        3 * T_shared,                                                     /* rows */
        first ? m->layers->n_scratch(m->compute, BT, quarter) : 0,        /* scratch */
        first ? model_cp_room(&m->config, m->B, sizeof(real)).floats : 0, /* shared */
    };
    memcpy(sizes + MODEL_N_STATISTICS, own_sizes, (size_t)n * sizeof *sizes);
    n += MODEL_N_STATISTICS;
    ZR_TRY(lay_out(m, &k->stats_memory, k->stats, sizes, n, sizeof(float)));
    share(k->stats, sizes, purpose == NEXT ? m->kept[0].stats : NULL, n);
    return 0;
}

/* Allocates a block and appends it to a list. */
static int open_block(struct model *m, struct model_kept **list, int64_t *n, enum purpose purpose)
{
    const struct model_counts counts = counts_of(m, purpose);
    int64_t acts[MODEL_MAX_ARRAYS], stats[MODEL_MAX_ARRAYS];
    ZR_TRY(ZR_GROW(*list, *n + 1, "%lld micro-batches", (long long)(*n + 1)));
    struct model_kept *k = &(*list)[*n];
    *k = (struct model_kept){0};
    m->passes->sizes(m, &counts, acts, stats);
    int err = open_activations(m, k, purpose, &counts, acts);
    err = err ? err : open_statistics(m, k, purpose, &counts, stats);
    if (err)
        close_block(m, k);
    else
        ++*n;
    return err;
}

int model_keep(struct model *m, int64_t n)
{
    while (m->n_kept < n)
        ZR_TRY(open_block(m, &m->kept, &m->n_kept, m->n_kept ? NEXT : FIRST));
    model_turn_to(m, 0);
    return 0;
}

/* The struct of pointers at offset `at` of m->own. */
static void **own_pointers(const struct model *m, size_t at)
{
    return (void **)((char *)m->own + at);
}

/* Points the model's pointers at the arrays that a block has. */
static void point_at(struct model *m, const struct model_kept *k)
{
    const struct model_passes *p = m->passes;
    const struct {
        void **to, *const *from;
        int32_t n;
    } parts[] = {{(void **)&m->acts, k->acts, MODEL_N_ACTIVATIONS},
                 {own_pointers(m, p->acts_at), k->acts + MODEL_N_ACTIVATIONS, p->n_acts},
                 {(void **)&m->stats, k->stats, MODEL_N_STATISTICS},
                 {own_pointers(m, p->stats_at), k->stats + MODEL_N_STATISTICS, p->n_stats}};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        for (int32_t j = 0; j < parts[i].n; j++)
            if (parts[i].from[j])
                parts[i].to[j] = parts[i].from[j];
}

void model_turn_to(struct model *m, int64_t i)
{
    m->current = i;
    point_at(m, &m->kept[i]);
    if (m->kept[i].between)
        point_at(m, &m->between[m->kept[i].between - 1]);
}

/* Gives the current micro-batch a block that is free, or a new one. */
static int take_between(struct model *m)
{
    int64_t i = 0;
    while (i < m->n_between && m->between[i].between)
        i++;
    if (i == m->n_between)
        ZR_TRY(open_block(m, &m->between, &m->n_between, BETWEEN));
    m->between[i].between = 1;
    m->kept[m->current].between = i + 1;
    point_at(m, &m->between[i]);
    return 0;
}

void model_begin_backward(struct model *m, enum model_computes computes)
{
    m->computes = computes;
    if (m->config.recompute && m->config.two_parts && computes != MODEL_WEIGHTS && !m->err)
        m->err = take_between(m);
}

void model_end_backward(struct model *m)
{
    struct model_kept *k = &m->kept[m->current];
    if (k->between && m->computes != MODEL_INPUTS) {
        m->between[k->between - 1].between = 0;
        k->between = 0;
        model_turn_to(m, m->current);
    }
}

struct model_pointers model_pointers_of(const struct model *m)
{
    return (struct model_pointers){.params = own_pointers(m, m->passes->params_at),
                                   .grads = own_pointers(m, m->passes->grads_at),
                                   .dtype = MODEL_DTYPE,
                                   .stores = m->stores};
}

real *model_residual_before(struct model *m, int64_t l)
{
    int64_t RC = model_own_rows(m) * m->config.channels;
    return l == 0 ? m->acts.embedded : m->acts.residual + (l - 1) * RC;
}

real *model_last_residual(struct model *m)
{
    return model_residual_before(m, m->config.layers);
}

void model_copy_residual(struct model *m, void *dst, const void *src)
{
    int64_t bytes = model_own_rows(m) * m->config.channels * (int64_t)sizeof(real);
    if (!m->err)
        m->err = m->compute->dev->ops->copy(m->compute->stream, dst, src, bytes);
}

/* Points the arrays of groups into the 3*BT + 1 elements at `at`, and returns the address behind them. */
static int32_t *group_pieces(struct model_groups *g, int32_t *at, int64_t BT)
{
    *g = (struct model_groups){.order = at, .distinct = at + BT, .first = at + 2 * BT};
    return at + 3 * BT + 1;
}

/* The number of elements of a batch. All its arrays are in one block. */
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

/* The tensors of this model: their table, their numbers in the whole model, their elements, and the sum of
 * these. */
struct tensors {
    struct zero_tensor table[MODEL_MAX_TENSORS];
    int32_t number[MODEL_MAX_TENSORS], n;
    int64_t sizes[MODEL_MAX_TENSORS], all;
};

static void find_tensors(const struct model *m, struct tensors *t)
{
    const struct model_pointers pointers = model_pointers_of(m);
    t->all = 0;
    t->n = m->config.ops->describe(t->table, t->number, &m->config, &pointers);
    for (int32_t i = 0; i < t->n; i++)
        t->all += t->sizes[i] = tensor_elements(&t->table[i]);
}

static int draw_all(struct model *m, const struct tensors *t, uint64_t seed)
{
    const struct zr_device_ops *dev = m->compute->dev->ops;
    real *piece;
    int err = ZR_ALLOC(piece, PIECE, "random weights");
    for (int32_t i = 0; i < t->n && !err; i++)
        for (int64_t first = 0; first < t->sizes[i] && !err; first += PIECE) {
            int64_t n = smaller(PIECE, t->sizes[i] - first);
            model_draw(&m->config, seed, t->number[i], first, n, piece);
            err = dev->copy(m->compute->stream, (real *)*t->table[i].param + first, piece,
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
    *m = (struct model){
        .config = *config, .B = B, .compute = compute, .layers = layers, .passes = MODEL_PASSES(config->ops)};
    m->ld_logits = (model_part_vocab(config) + align - 1) / align * align;
    m->own = zr_alloc(1, (int64_t)m->passes->own_bytes, true, "a model's pointers");
    int err = m->own ? model_keep(m, 1) : ZERO_ERR_NOMEM;
    err = err ? err : open_losses(m);
    err = err ? err : open_batches(m);
    if (!err && m->passes->open)
        err = m->passes->open(m);
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

/* Allocates a block for all tensors, and points their params or grads into it. */
static int open_tensors(struct model *m, const struct tensors *t, struct model_block *block, bool grads)
{
    void *pieces[MODEL_MAX_TENSORS];
    ZR_TRY(lay_out(m, block, pieces, t->sizes, t->n, sizeof(real)));
    for (int32_t i = 0; i < t->n; i++)
        if (!grads || t->table[i].grad)
            *(grads ? t->table[i].grad : t->table[i].param) = pieces[i];
    return 0;
}

int model_open_params(struct model *m, uint64_t seed)
{
    struct tensors t;
    find_tensors(m, &t);
    int err = open_tensors(m, &t, &m->params_memory, false);
    err = err ? err : draw_all(m, &t, seed);
    return err ? zr_fail_more(err, "a model of %lld parameters", (long long)t.all) : 0;
}

int model_open_grads(struct model *m)
{
    struct tensors t;
    find_tensors(m, &t);
    int err = open_tensors(m, &t, &m->grads_memory, true);
    if (err)
        return zr_fail_more(err, "the gradients of %lld parameters", (long long)t.all);
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
    for (int64_t i = 0; i < m->n_between; i++)
        bytes += m->between[i].acts_memory.bytes;
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
    for (int64_t i = 0; i < m->n_kept; i++)
        close_block(m, &m->kept[i]);
    for (int64_t i = 0; i < m->n_between; i++)
        close_block(m, &m->between[i]);
    free(m->kept);
    free(m->between);
    if (m->staged_memory.p)
        dev->ops->host_free(dev, m->staged_memory.p, m->staged_memory.bytes);
    dev->ops->event_close(m->sent[0]);
    dev->ops->event_close(m->sent[1]);
    dev->ops->event_close(m->loss_sent);
    free(m->count);
    free(m->own);
    *m = (struct model){0};
}
