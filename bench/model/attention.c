/* SPDX-License-Identifier: Apache-2.0 */
/* attention.c: attention in tiles, as matrix products and functions of the layer table (attention.h).
 *
 * The heads of a batch are processed in groups, so that the scores of a tile stay in a cache. The operands of
 * products are first copied to separate arrays with dense rows, in which missing queries are 0. So the shapes
 * and strides of products depend only on the tile, not on which rows the caller has or how it stores them.
 *
 * Query heads that share a key head are adjacent in these arrays and form one matrix. So one product adds up
 * their gradients of keys and values in fp32. */
#include "bench/model/layers.h"
#include "bench/train/profile.h"

#include <math.h>

/* HOST_TILE, GPU_TILE: positions in a tile of queries; a GPU needs few large products. KEYS: keys in one
 * product. HOST_BYTES, GPU_BYTES: the most bytes of scores of a group of heads. */
enum { HOST_TILE = 128, GPU_TILE = 256, KEYS = 1024, HOST_BYTES = 4 << 20, GPU_BYTES = 128 << 20 };

static int64_t smaller(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static int64_t larger(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

/* One group of key heads, and the query heads that use them. scores, datt, att and dscores are (heads,
 * queries of a tile, keys). logsum and logsum_part are (heads, queries of a tile). All other arrays are
 * (heads, rows, HS). */
struct work {
    const struct compute *on;
    const struct model_layers *layers;
    const struct model_attention_args *args;
    int64_t group, first, n_heads; /* key heads: the most in a group, the first, and their number */
    int64_t sharing;               /* query heads that share a key head */
    int64_t tile_rows, n_keys;     /* positions in a tile; rows of keys */
    struct model_tile tile;
    int64_t n_blocks; /* of keys that this tile has multiplied */
    /* (B, NH, all queries) The arrays that backward's caller gives. */
    const float *given_logsum, *given_dots;
    real *q, *dy, *k, *v, *att, *dscores;
    float *scores, *datt;
    float *y, *y_part, *logsum, *logsum_part;
    float *dq, *dk, *dv;
};

/* Points the arrays into the memory `at`, which may be NULL. Returns how many floats they take. */
static int64_t lay_out(struct work *w, float *at)
{
    int64_t queries = w->group * w->sharing * smaller(w->tile_rows, w->args->T);
    int64_t keys = w->group * w->n_keys;
    int64_t scores = queries * smaller(KEYS, w->args->T), of_queries = queries * w->args->HS,
            of_keys = keys * w->args->HS, used = 0;
    const struct {
        void *array;
        int64_t n;
        size_t bytes;
    } pieces[] = {
        {&w->q, of_queries, sizeof(real)},    {&w->dy, of_queries, sizeof(real)},
        {&w->k, of_keys, sizeof(real)},       {&w->v, of_keys, sizeof(real)},
        {&w->att, scores, sizeof(real)},      {&w->dscores, scores, sizeof(real)},
        {&w->scores, scores, sizeof(float)},  {&w->datt, scores, sizeof(float)},
        {&w->y, of_queries, sizeof(float)},   {&w->y_part, of_queries, sizeof(float)},
        {&w->logsum, queries, sizeof(float)}, {&w->logsum_part, queries, sizeof(float)},
        {&w->dq, of_queries, sizeof(float)},  {&w->dk, of_keys, sizeof(float)},
        {&w->dv, of_keys, sizeof(float)},
    };
    for (size_t i = 0; i < sizeof pieces / sizeof *pieces; i++) {
        *(void **)pieces[i].array = at ? at + used : NULL;
        used += (pieces[i].n * (int64_t)pieces[i].bytes + 255) / 256 * 64; /* 64 floats are 256 bytes */
    }
    return used;
}

static struct work describe(const struct compute *on, const struct model_attention_args *a)
{
    struct work w = {.on = on, .layers = model_layers_for(on), .args = a, .n_keys = model_n_rows(&a->keys)};
    w.tile_rows = on->cuda ? GPU_TILE : HOST_TILE;
    w.sharing = a->NH / a->n_kv;
    int64_t bytes = w.sharing * smaller(w.tile_rows, a->T) * smaller(KEYS, a->T) * (int64_t)sizeof(float);
    int64_t heads = a->B * a->n_kv;
    int64_t most = larger(1, (on->cuda ? GPU_BYTES : HOST_BYTES) / bytes),
            n_groups = (heads + most - 1) / most;
    w.group = (heads + n_groups - 1) / n_groups;
    w.tile = (struct model_tile){.NH = a->NH,
                                 .T = a->T,
                                 .queries = a->queries,
                                 .document_start = a->document_start,
                                 .scale = 1.0f / sqrtf((float)a->HS)};
    lay_out(&w, a->scratch);
    return w;
}

static bool is_fused(const struct compute *on, int64_t HS)
{
    const struct model_attention *fused = model_layers_for(on)->attention;
    return fused && fused->fits(HS);
}

int64_t model_attention_scratch(const struct compute *on, const struct model_attention_args *args)
{
    if (is_fused(on, args->HS))
        return 0;
    struct work w = describe(on, args);
    return lay_out(&w, NULL);
}

/* One matrix per head of keys; elements between rows and between heads. */
struct matrices {
    void *at;
    int64_t row, head;
};

/* c (M, N) = op(a) (M, K) * op(b) (K, N) in fp32, for each key head of the group. If `adds` is set, the
 * product is added to c. */
static int multiply(struct work *w, struct matrices c, bool adds, struct matrices a, bool trans_a,
                    struct matrices b, bool trans_b, int64_t M, int64_t N, int64_t K)
{
    struct zr_gemm_args args = product_of(MODEL_DTYPE, M, N, K, a.at, a.row, b.at, b.row, c.at, c.row);
    args.c_dtype = ZERO_F32;
    args.beta = adds ? 1.0f : 0.0f;
    args.trans_a = trans_a;
    args.trans_b = trans_b;
    args.n_batch = w->n_heads;
    args.stride_a = a.head;
    args.stride_b = b.head;
    args.stride_c = c.head;
    if (w->args->profile)
        profile_enter_product(w->args->profile, 2.0 * (double)M * (double)N * (double)K * (double)w->n_heads);
    return zr_gemm_run(w->on->gemm, &args);
}

/* The rows of the tile's queries, over all heads that share a key head. The functions below describe these
 * queries, the keys, and their scores as matrices. */
static int64_t n_sharing(const struct work *w)
{
    return w->sharing * w->tile.n_queries;
}

static struct matrices of_queries(const struct work *w, void *at)
{
    return (struct matrices){at, w->args->HS, n_sharing(w) * w->args->HS};
}

static struct matrices of_keys(const struct work *w, void *at)
{
    return (struct matrices){at, w->args->HS, w->n_keys * w->args->HS};
}

static struct matrices of_scores(const struct work *w, void *at)
{
    return (struct matrices){at, w->tile.n_keys, n_sharing(w) * w->tile.n_keys};
}

/* The place of the group's query heads, and of its key heads, in an array of the caller. The rows of the
 * array are `row` elements apart. */
static struct model_heads query_heads(const struct work *w, int64_t row, int64_t n)
{
    int64_t HS = w->args->HS;
    return (struct model_heads){w->tile.first_head, w->tile.n_heads, w->args->NH, HS, n * row, HS, row};
}

static struct model_heads key_heads(const struct work *w, int64_t row)
{
    int64_t HS = w->args->HS;
    return (struct model_heads){w->first, w->n_heads, w->args->n_kv, HS, w->n_keys * row, HS, row};
}

/* All keys in the order in which they are stored. */
static struct model_rows stored_keys(const struct work *w)
{
    return (struct model_rows){.n = {w->n_keys}};
}

static int load_keys(struct work *w, real *to, const real *from)
{
    return w->layers->attention_load(w->on, to, from, key_heads(w, w->args->kv_row), stored_keys(w), 0,
                                     w->n_keys);
}

static int load_queries(struct work *w, real *to, const real *from, int64_t row)
{
    const struct model_rows *rows = &w->args->queries;
    return w->layers->attention_load(w->on, to, from, query_heads(w, row, model_n_rows(rows)), *rows,
                                     w->tile.query, w->tile.n_queries);
}

/* Selects the next tile from position `at` on that has one of the queries. Returns false if there is none. */
static bool next_tile(struct work *w, int64_t at)
{
    const struct model_rows *rows = &w->args->queries;
    int64_t first = INT64_MAX;
    for (int i = 0; i < 2; i++)
        if (rows->n[i] && rows->first[i] + rows->n[i] > at)
            first = smaller(first, larger(rows->first[i], at));
    if (first == INT64_MAX)
        return false;
    w->tile.query = first / w->tile_rows * w->tile_rows;
    w->tile.n_queries = smaller(w->tile_rows, w->args->T - w->tile.query);
    w->n_blocks = 0;
    return true;
}

/* A position at or before the first key that any query of the tile sees, on the grid of tiles. On a GPU,
 * where the host cannot read the documents, it is 0. */
static int64_t first_seen(const struct work *w)
{
    const int32_t *start = w->args->document_start;
    int64_t n_kv = w->args->n_kv, T = w->args->T, least = w->tile.query;
    if (!start || w->on->cuda)
        return 0;
    for (int64_t b = w->first / n_kv; b <= (w->first + w->n_heads - 1) / n_kv; b++)
        least = smaller(least, start[b * T + w->tile.query]);
    return least / w->tile_rows * w->tile_rows;
}

/* Calls run for each block of the keys that the tile may see, with the block's first row. */
static int each_block(struct work *w, int (*run)(struct work *w, int64_t first))
{
    const struct model_rows *rows = &w->args->keys;
    int64_t least = first_seen(w), end = w->tile.query + w->tile.n_queries, before = 0;
    for (int i = 0; i < 2; before += rows->n[i++]) {
        int64_t to = smaller(rows->first[i] + rows->n[i], end);
        for (int64_t at = larger(rows->first[i], least); at < to; at += KEYS) {
            w->tile.key = at;
            w->tile.n_keys = smaller(KEYS, to - at);
            ZR_TRY(run(w, before + at - rows->first[i]));
            w->n_blocks++;
        }
    }
    return 0;
}

/* Selects the group that begins at head `first` of the keys. */
static void turn_to_group(struct work *w, int64_t first)
{
    w->first = first;
    w->n_heads = smaller(w->group, w->args->B * w->args->n_kv - first);
    w->tile.first_head = w->first * w->sharing;
    w->tile.n_heads = w->n_heads * w->sharing;
}

/* ---- forward ---- */

static int forward_block(struct work *w, int64_t first)
{
    int64_t HS = w->args->HS, M = n_sharing(w), N = w->tile.n_keys, n = w->tile.n_queries;
    float *y = w->n_blocks ? w->y_part : w->y, *logsum = w->n_blocks ? w->logsum_part : w->logsum;
    const struct model_heads dense = {0, w->tile.n_heads, w->tile.n_heads, HS, 0, n * HS, HS};
    struct matrices q = of_queries(w, w->q), k = of_keys(w, w->k + first * HS),
                    v = of_keys(w, w->v + first * HS);
    struct matrices s = of_scores(w, w->scores), p = of_scores(w, w->att);
    ZR_TRY(multiply(w, s, false, q, false, k, true, M, N, HS)); /* scores = q k^T */
    ZR_TRY(w->layers->attention_softmax(w->on, w->att, logsum, w->scores, w->tile));
    ZR_TRY(multiply(w, of_queries(w, y), false, p, false, v, false, M, HS, N)); /* y = att v */
    if (w->n_blocks)
        ZR_TRY(w->layers->attention_merge(w->on, w->y, w->logsum, w->y_part, w->logsum_part, dense, n));
    return 0;
}

/* x = 0, with so many rows for each head of keys. */
static int set_zero(struct work *w, float *x, int64_t rows)
{
    return w->on->dev->ops->zero(w->on->stream, x, w->n_heads * rows * w->args->HS * (int64_t)sizeof *x);
}

static int forward_tile(struct work *w, real *y, float *y32, float *logsum)
{
    const struct model_attention_args *a = w->args;
    int64_t n = model_n_rows(&a->queries), query = w->tile.query, n_queries = w->tile.n_queries;
    const struct model_heads of_y = query_heads(w, a->NH * a->HS, n);
    const struct model_heads of_logsum = {w->tile.first_head, w->tile.n_heads, a->NH, 1, a->NH * n, n, 1};
    ZR_TRY(load_queries(w, w->q, a->q, a->q_row));
    ZR_TRY(each_block(w, forward_block));
    if (!w->n_blocks) { /* no query of the tile sees a key */
        w->tile.n_keys = 0;
        ZR_TRY(set_zero(w, w->y, n_sharing(w)));
        ZR_TRY(w->layers->attention_softmax(w->on, w->att, w->logsum, w->scores, w->tile));
    }
    ZR_TRY(w->layers->attention_store(w->on, y, y32, false, w->y, of_y, a->queries, query, n_queries));
    return w->layers->attention_store(w->on, NULL, logsum, false, w->logsum, of_logsum, a->queries, query,
                                      n_queries);
}

static int forward_group(struct work *w, real *y, float *y32, float *logsum)
{
    ZR_TRY(load_keys(w, w->k, w->args->k));
    ZR_TRY(load_keys(w, w->v, w->args->v));
    for (int64_t at = 0; next_tile(w, at); at = w->tile.query + w->tile.n_queries)
        ZR_TRY(forward_tile(w, y, y32, logsum));
    return 0;
}

int model_attention_forward(const struct compute *on, const struct model_attention_args *args, real *y,
                            float *y32, float *logsum)
{
    if (is_fused(on, args->HS))
        return model_layers_for(on)->attention->forward(on, args, y, y32, logsum);
    struct work w = describe(on, args);
    for (int64_t head = 0; head < args->B * args->n_kv; head += w.group) {
        turn_to_group(&w, head);
        ZR_TRY(forward_group(&w, y, y32, logsum));
    }
    return 0;
}

int model_attention_merge(const struct compute *on, float *y, float *logsum, const float *y_part,
                          const float *logsum_part, int64_t B, int64_t n, int64_t NH, int64_t HS)
{
    const struct model_heads heads = {0, B * NH, NH, HS, n * NH * HS, HS, NH * HS};
    return model_layers_for(on)->attention_merge(on, y, logsum, y_part, logsum_part, heads, n);
}

/* ---- backward ---- */

static int backward_block(struct work *w, int64_t first)
{
    int64_t HS = w->args->HS, M = n_sharing(w), N = w->tile.n_keys;
    struct matrices q = of_queries(w, w->q), dy = of_queries(w, w->dy), dq = of_queries(w, w->dq);
    struct matrices k = of_keys(w, w->k + first * HS), v = of_keys(w, w->v + first * HS);
    struct matrices dk = of_keys(w, w->dk + first * HS), dv = of_keys(w, w->dv + first * HS);
    struct matrices s = of_scores(w, w->scores), p = of_scores(w, w->att);
    struct matrices dp = of_scores(w, w->datt), ds = of_scores(w, w->dscores);
    ZR_TRY(multiply(w, s, false, q, false, k, true, M, N, HS));   /* scores = q k^T */
    ZR_TRY(multiply(w, dp, false, dy, false, v, true, M, N, HS)); /* datt = dy v^T */
    ZR_TRY(w->layers->attention_softmax_backward(w->on, w->att, w->dscores, w->scores, w->datt,
                                                 w->given_logsum, w->given_dots, w->tile));
    ZR_TRY(multiply(w, dv, true, p, true, dy, false, N, HS, M));            /* dv += att^T dy */
    ZR_TRY(multiply(w, dk, true, ds, true, q, false, N, HS, M));            /* dk += dscores^T q */
    return multiply(w, dq, w->n_blocks > 0, ds, false, k, false, M, HS, N); /* dq += dscores k */
}

static int backward_tile(struct work *w, const real *dy, const struct model_attention_grads *g)
{
    const struct model_attention_args *a = w->args;
    int64_t n = model_n_rows(&a->queries), row = g->dq32 ? a->NH * a->HS : g->dq_row;
    ZR_TRY(load_queries(w, w->q, a->q, a->q_row));
    ZR_TRY(load_queries(w, w->dy, dy, a->NH * a->HS));
    ZR_TRY(each_block(w, backward_block));
    if (!w->n_blocks)
        ZR_TRY(set_zero(w, w->dq, n_sharing(w)));
    return w->layers->attention_store(w->on, g->dq, g->dq32, true, w->dq, query_heads(w, row, n), a->queries,
                                      w->tile.query, w->tile.n_queries);
}

static int store_grads_of_keys(struct work *w, real *to, float *to32, int64_t dkv_row, const float *from)
{
    int64_t row = to32 ? w->args->n_kv * w->args->HS : dkv_row;
    return w->layers->attention_store(w->on, to, to32, true, from, key_heads(w, row), stored_keys(w), 0,
                                      w->n_keys);
}

static int backward_group(struct work *w, const real *dy, const struct model_attention_grads *g)
{
    ZR_TRY(load_keys(w, w->k, w->args->k));
    ZR_TRY(load_keys(w, w->v, w->args->v));
    ZR_TRY(set_zero(w, w->dk, w->n_keys));
    ZR_TRY(set_zero(w, w->dv, w->n_keys));
    for (int64_t at = 0; next_tile(w, at); at = w->tile.query + w->tile.n_queries)
        ZR_TRY(backward_tile(w, dy, g));
    ZR_TRY(store_grads_of_keys(w, g->dk, g->dk32, g->dkv_row, w->dk));
    return store_grads_of_keys(w, g->dv, g->dv32, g->dkv_row, w->dv);
}

int model_attention_backward(const struct compute *on, const struct model_attention_args *args,
                             const real *dy, const real *y, const float *logsum, float *dots,
                             const struct model_attention_grads *grads)
{
    if (is_fused(on, args->HS))
        return model_layers_for(on)->attention->backward(on, args, dy, y, logsum, dots, grads);
    struct work w = describe(on, args);
    w.given_logsum = logsum;
    w.given_dots = dots;
    ZR_TRY(
        w.layers->attention_dots(on, dots, dy, y, args->B, model_n_rows(&args->queries), args->NH, args->HS));
    for (int64_t head = 0; head < args->B * args->n_kv; head += w.group) {
        turn_to_group(&w, head);
        ZR_TRY(backward_group(&w, dy, grads));
    }
    return 0;
}
