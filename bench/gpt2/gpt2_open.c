/* gpt2_open.c: the memory of the model in gpt2.h, and its first weights. */
#include "bench/gpt2/gpt2.h"
#include "bench/random_bits.h"

#include <math.h>
#include <stdlib.h>

#include <uv.h>

/* Weights are drawn in pieces, each by this many threads at most, of so many elements each (an even number).
 * A thread draws the 1.5 billion of the largest model in half a minute. */
#define N_DRAWERS 16
#define PART      ((int64_t)1 << 17)

/* Points n pointers at consecutive pieces of one new block, which starts on a page. */
static int lay_out(struct gpt2 *m, struct gpt2_block *block, void **pieces, const int64_t *sizes, int n,
                   size_t element_bytes)
{
    const int64_t align = 256 / (int64_t)element_bytes; /* of each piece, in elements */
    int64_t total = 0;
    for (int i = 0; i < n; i++)
        total += (sizes[i] + align - 1) / align * align;
    struct gpt2_block b = {NULL, total * (int64_t)element_bytes};
    int err = m->place->dev->ops->alloc(m->place->dev, b.bytes, &b.p);
    if (err)
        return err;
    *block = b;
    for (int64_t i = 0, at = 0; i < n; i++) {
        pieces[i] = (char *)b.p + (size_t)at * element_bytes;
        at += (sizes[i] + align - 1) / align * align;
    }
    return 0;
}

static void give_back(struct gpt2 *m, struct gpt2_block *block)
{
    if (block->p)
        m->place->dev->ops->free(m->place->dev, block->p, block->bytes);
    *block = (struct gpt2_block){0};
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
    for (int i = 0; i < GPT2_N_TENSORS; i++)
        total += s[i];
    return total;
}

static int open_activations(struct gpt2 *m)
{
    int64_t L = m->config.layers, C = m->config.channels, T = m->config.context, NH = m->config.heads;
    int64_t B = m->B, TT = m->attention ? 0 : T * T;
    const int64_t sizes[GPT2_N_ACTIVATIONS] = {
        B * T * C,            /* embedded */
        L * B * T * C,        /* ln1 */
        L * B * T * 3 * C,    /* qkv */
        L * B * NH * TT,      /* att */
        L * B * T * C,        /* atty */
        L * B * T * C,        /* residual2 */
        L * B * T * C,        /* ln2 */
        L * B * T * 4 * C,    /* fch */
        L * B * T * 4 * C,    /* fch_gelu */
        L * B * T * C,        /* residual3 */
        B * T * C,            /* lnf */
        B * T * m->ld_logits, /* dlogits */
        B * T * C,            /* dresidual */
        B * T * C,            /* dbtc */
        B * T * 3 * C,        /* dqkv */
        B * T * 4 * C,        /* dfch */
        NH * TT,              /* dscores */
        4 * C,                /* dbias */
    };
    return lay_out(m, &m->acts_memory, (void **)&m->acts, sizes, GPT2_N_ACTIVATIONS, sizeof(real));
}

static int open_statistics(struct gpt2 *m)
{
    int64_t L = m->config.layers, C = m->config.channels, T = m->config.context, NH = m->config.heads;
    int64_t B = m->B, TT = m->attention ? 0 : T * T;
    const int64_t sizes[GPT2_N_STATISTICS] = {
        L * B * T,
        L * B * T, /* ln1_mean, ln1_rstd */
        L * B * T,
        L * B * T, /* ln2_mean, ln2_rstd */
        B * T,
        B * T,                             /* lnf_mean, lnf_rstd */
        NH * TT,                           /* scores */
        m->attention ? L * B * NH * T : 0, /* logsum */
        m->attention ? B * NH * T : 0,     /* dots */
        T * m->ld_logits,                  /* logits */
        m->layers->n_scratch(B * T, C),    /* scratch */
    };
    return lay_out(m, &m->stats_memory, (void **)&m->stats, sizes, GPT2_N_STATISTICS, sizeof(float));
}

/* The pieces of a batch, in one block. */
static void batch_pieces(struct gpt2_batch *b, int32_t *at, int64_t BT)
{
    *b = (struct gpt2_batch){at, at + BT, at + 2 * BT, at + 3 * BT, at + 4 * BT, 0};
}

static int open_batches(struct gpt2 *m)
{
    struct zr_device *dev = m->place->dev;
    int64_t BT = m->B * m->config.context, n = 5 * BT + 1;
    int err = lay_out(m, &m->batch_memory, &(void *){NULL}, &n, 1, sizeof(int32_t));
    if (err)
        return err;
    n = m->batch_memory.bytes / (int64_t)sizeof(int32_t);
    batch_pieces(&m->batch, m->batch_memory.p, BT);
    struct gpt2_block host = {NULL, 2 * m->batch_memory.bytes + (int64_t)sizeof(double)};
    err = dev->ops->host_alloc(dev, host.bytes, &host.p);
    if (err)
        return err;
    m->staged_memory = host;
    batch_pieces(&m->staged[0], host.p, BT);
    batch_pieces(&m->staged[1], (int32_t *)host.p + n, BT);
    m->loss_out = (double *)((int32_t *)host.p + 2 * n);
    for (int i = 0; i < 2 && !err; i++)
        err = dev->ops->event_open(dev, &m->sent[i]);
    return err ? err : dev->ops->event_open(dev, &m->loss_sent);
}

static int open_losses(struct gpt2 *m)
{
    int64_t sizes[] = {m->B * m->config.context, 1};
    void *pieces[2];
    int err = lay_out(m, &m->losses_memory, pieces, sizes, 2, sizeof(double));
    if (err)
        return err;
    m->losses = pieces[0];
    m->loss = pieces[1];
    return m->place->dev->ops->zero(m->place->stream, m->loss, sizeof *m->loss);
}

/* Some of a tensor's elements. Which thread draws them changes nothing: each is drawn by its place alone. */
struct drawing {
    real *x;
    int64_t first, n; /* first is even */
    uint64_t stream;  /* of the tensor */
    double deviation;
};

/* Box and Muller 1958. */
static void draw(void *arg)
{
    const struct drawing *d = arg;
    const double two_pi = 6.283185307179586;
    for (int64_t i = 0; i < d->n; i += 2) {
        uint64_t at = d->stream + (uint64_t)(d->first + i);
        double u = ((double)(random_bits(at) >> 11) + 0.5) * 0x1p-53;
        double v = (double)(random_bits(at + 1) >> 11) * 0x1p-53;
        double r = d->deviation * sqrt(-2.0 * log(u));
        d->x[i] = from_float((float)(r * cos(two_pi * v)));
        if (i + 1 < d->n)
            d->x[i + 1] = from_float((float)(r * sin(two_pi * v)));
    }
}

static int64_t smaller(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* Draws a piece of up to N_DRAWERS * PART elements: a part on each thread. */
static void draw_piece(const struct drawing *piece)
{
    struct drawing part[N_DRAWERS];
    uv_thread_t thread[N_DRAWERS];
    bool started[N_DRAWERS] = {false};
    int n_parts = (int)((piece->n + PART - 1) / PART);
    for (int i = 0; i < n_parts; i++) {
        int64_t at = i * PART;
        part[i] = *piece;
        part[i].x += at;
        part[i].first += at;
        part[i].n = smaller(PART, piece->n - at);
        started[i] = i > 0 && !uv_thread_create(&thread[i], draw, &part[i]);
    }
    for (int i = 0; i < n_parts; i++)
        if (!started[i])
            draw(&part[i]);
    for (int i = 0; i < n_parts; i++)
        if (started[i])
            uv_thread_join(&thread[i]);
}

/* How a tensor starts: drawn with this deviation, or where that is 0 filled with a value. */
struct start {
    double deviation;
    float value;
};

static int start_tensor(struct gpt2 *m, real *x, int64_t n, const struct start *start, uint64_t stream,
                        real *piece, int64_t piece_elems)
{
    const struct zr_device_ops *dev = m->place->dev->ops;
    for (int64_t first = 0; first < n; first += piece_elems) {
        int64_t here = smaller(piece_elems, n - first);
        if (start->deviation > 0)
            draw_piece(&(struct drawing){piece, first, here, stream, start->deviation});
        else
            for (int64_t i = 0; i < here; i++)
                piece[i] = from_float(start->value);
        int err = dev->copy(m->place->stream, x + first, piece, here * (int64_t)sizeof(real));
        err = err ? err : dev->stream_sync(m->place->stream); /* piece is used again */
        if (err)
            return err;
    }
    return 0;
}

static int initialise(struct gpt2 *m, const int64_t sizes[GPT2_N_TENSORS], uint64_t seed)
{
    double deviation = 0.02, projection = deviation / sqrt(2.0 * (double)m->config.layers);
    const struct start starts[GPT2_N_TENSORS] = {
        {deviation, 0},  /* wte */
        {deviation, 0},  /* wpe */
        {0, 1},          /* ln1w */
        {0, 0},          /* ln1b */
        {deviation, 0},  /* qkvw */
        {0, 0},          /* qkvb */
        {projection, 0}, /* attprojw */
        {0, 0},          /* attprojb */
        {0, 1},          /* ln2w */
        {0, 0},          /* ln2b */
        {deviation, 0},  /* fcw */
        {0, 0},          /* fcb */
        {projection, 0}, /* fcprojw */
        {0, 0},          /* fcprojb */
        {0, 1},          /* lnfw */
        {0, 0},          /* lnfb */
    };
    int64_t piece_elems = PART * smaller(uv_available_parallelism(), N_DRAWERS);
    real *piece = malloc((size_t)piece_elems * sizeof *piece);
    if (!piece)
        return zr_fail(ZR_ERR_NOMEM, "no memory to draw weights in");
    int err = 0;
    uint64_t n_drawn = 0;
    for (int t = 0; t < GPT2_N_TENSORS && !err; t++) {
        uint64_t stream = random_bits(random_bits(seed) + n_drawn);
        n_drawn += starts[t].deviation > 0;
        err = start_tensor(m, ((real **)&m->params)[t], sizes[t], &starts[t], stream, piece, piece_elems);
    }
    free(piece);
    return err;
}

const struct gpt2_layers *gpt2_layers_for(const struct place *place)
{
#ifdef ZR_HAVE_CUDA
    if (place->cuda)
        return &gpt2_layers_cuda;
#endif
    (void)place; /* there is no GPU to open it on */
    return &gpt2_layers_host;
}

int gpt2_open(struct gpt2 *m, const struct gpt2_config *config, int64_t B, uint64_t seed,
              const struct place *place)
{
    const struct gpt2_layers *layers = gpt2_layers_for(place);
    int64_t align = layers->row_align, sizes[GPT2_N_TENSORS];
    *m = (struct gpt2){.config = *config, .B = B, .place = place, .layers = layers};
    if (layers->attention && layers->attention->fits(config->channels / config->heads))
        m->attention = layers->attention;
    m->ld_logits = (config->vocab + align - 1) / align * align;
    int64_t n_params = param_sizes(sizes, config);
    int err = lay_out(m, &m->params_memory, (void **)&m->params, sizes, GPT2_N_TENSORS, sizeof(real));
    err = err ? err : open_activations(m);
    err = err ? err : open_statistics(m);
    err = err ? err : open_losses(m);
    err = err ? err : open_batches(m);
    if (!err) {
        m->count = malloc((size_t)config->vocab * sizeof *m->count);
        err = m->count ? 0 : zr_fail(ZR_ERR_NOMEM, "no memory for %lld counts", (long long)config->vocab);
    }
    err = err ? err : initialise(m, sizes, seed);
    if (err) {
        gpt2_close(m);
        return zr_fail_more(err, "a model of %lld parameters and %lld rows of %lld tokens",
                            (long long)n_params, (long long)B, (long long)config->context);
    }
    return 0;
}

int gpt2_open_grads(struct gpt2 *m)
{
    int64_t sizes[GPT2_N_TENSORS];
    int64_t n_params = param_sizes(sizes, &m->config);
    int err = lay_out(m, &m->grads_memory, (void **)&m->grads, sizes, GPT2_N_TENSORS, sizeof(real));
    if (err)
        return zr_fail_more(err, "the gradients of %lld parameters", (long long)n_params);
    return m->place->dev->ops->zero(m->place->stream, m->grads_memory.p, m->grads_memory.bytes);
}

void gpt2_free_params(struct gpt2 *m)
{
    give_back(m, &m->params_memory);
}

int gpt2_next_batch(struct gpt2 *m)
{
    m->slot = !m->slot;
    m->tokens = m->staged[m->slot].tokens;
    m->targets = m->staged[m->slot].targets;
    return m->place->dev->ops->event_sync(m->sent[m->slot]);
}

void gpt2_close(struct gpt2 *m)
{
    if (!m->place)
        return;
    struct zr_device *dev = m->place->dev;
    dev->ops->stream_sync(m->place->stream); /* nothing is freed under work that uses it */
    struct gpt2_block *blocks[] = {&m->params_memory, &m->grads_memory,  &m->acts_memory,
                                   &m->stats_memory,  &m->losses_memory, &m->batch_memory};
    for (size_t i = 0; i < sizeof blocks / sizeof *blocks; i++)
        give_back(m, blocks[i]);
    if (m->staged_memory.p)
        dev->ops->host_free(dev, m->staged_memory.p, m->staged_memory.bytes);
    dev->ops->event_close(m->sent[0]);
    dev->ops->event_close(m->sent[1]);
    dev->ops->event_close(m->loss_sent);
    free(m->count);
    *m = (struct gpt2){0};
}
