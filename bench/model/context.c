/* SPDX-License-Identifier: Apache-2.0 */
/* context.c: attention of one rank, and the three forms of context.h.
 *
 * A plane is an array with the queries, the keys or the values of n heads, or with their gradient. It covers
 * this rank's tokens (B, T, n*HS) or whole rows (B, context, n*HS). With grouped-query attention, planes of
 * keys and values have fewer heads than those of queries. Collectives need planes in the order of ranks, and
 * attention needs rows in the order of positions. So planes are rearranged after they were received and
 * before they are sent. */
#include "bench/model/model.h"
#include "kernels/alloc.h"

/* Returns the error of a collective, if there is one. Its time is the library's in the profile. */
#define TRY_SHARED(m, call)                                                                                  \
    do {                                                                                                     \
        enum profile_part before_call = profile_enter((m)->profile, PROFILE_LIBRARY);                        \
        int error_of_call = (call);                                                                          \
        profile_enter((m)->profile, before_call);                                                            \
        ZR_TRY(error_of_call);                                                                               \
    } while (0)

#define REAL ((int64_t)sizeof(real))

struct model_rows model_rows_of(const struct model *m, int32_t c)
{
    return m->cp.rows ? m->cp.rows[c] : (struct model_rows){.n = {m->config.context, 0}};
}

/* ---- sizes ---- */

/* Floats of n reals. */
static int64_t floats_of(int64_t n)
{
    return n * REAL / (int64_t)sizeof(float);
}

/* Elements of a plane with n heads. */
static int64_t own_plane(const struct model *m, int64_t n)
{
    return model_own_tokens(m) * n * model_head_size(&m->config);
}

static int64_t whole_plane(const struct model *m, int64_t n)
{
    return m->config.cp * own_plane(m, n);
}

/* The number of key heads that n query heads use. n is a multiple of the query heads that share one. */
static int64_t kv_heads_for(const struct model *m, int64_t n)
{
    return n / model_sharing_heads(&m->config);
}

/* In a row of qkv: the first columns of the keys and of the values that a query head uses. */
static int64_t key_column(const struct model *m, int64_t head)
{
    return model_part_channels(&m->config) + kv_heads_for(m, head) * model_head_size(&m->config);
}

static int64_t value_column(const struct model *m, int64_t head)
{
    return key_column(m, head) + model_part_kv_channels(&m->config);
}

/* ---- moving rows ---- */

/* Planes that are sent together: their number, and the heads of each. */
struct planes {
    int n;
    int64_t heads[3];
};

static int64_t all_heads(const struct planes *p)
{
    int64_t sum = 0;
    for (int i = 0; i < p->n; i++)
        sum += p->heads[i];
    return sum;
}

static int copy_rows(struct model *m, void *dst, int64_t dst_stride, const void *src, int64_t src_stride,
                     int64_t n_rows, int64_t row_bytes)
{
    const struct zr_copy_rows copy = {dst, src, row_bytes, n_rows * row_bytes, dst_stride, src_stride};
    return m->compute->dev->ops->copy_rows(m->compute->stream, &copy, 1);
}

/* Copies a plane of n heads from columns of a matrix with `width` elements in a row, or back. */
static int take_columns(struct model *m, real *plane, const real *matrix, int64_t width, int64_t n)
{
    int64_t row = own_plane(m, n) / model_own_tokens(m) * REAL;
    return copy_rows(m, plane, row, matrix, width * REAL, model_own_tokens(m), row);
}

static int put_columns(struct model *m, real *matrix, int64_t width, const real *plane, int64_t n)
{
    int64_t row = own_plane(m, n) / model_own_tokens(m) * REAL;
    return copy_rows(m, matrix, width * REAL, plane, row, model_own_tokens(m), row);
}

/* Copies rank c's plane to its rows in a plane of whole rows or, with `back`, from there. */
static int move_rows(struct model *m, int32_t c, void *whole, void *plane, int64_t row_bytes, bool back)
{
    const struct model_rows r = model_rows_of(m, c);
    int64_t whole_row = m->config.context * row_bytes, own_row = model_own_context(&m->config) * row_bytes;
    for (int i = 0; i < 2; i++) {
        char *in_whole = (char *)whole + r.first[i] * row_bytes;
        char *in_plane = (char *)plane + i * r.n[0] * row_bytes;
        int64_t bytes = r.n[i] * row_bytes;
        ZR_TRY(back ? copy_rows(m, in_plane, own_row, in_whole, whole_row, m->B, bytes)
                    : copy_rows(m, in_whole, whole_row, in_plane, own_row, m->B, bytes));
    }
    return 0;
}

/* The same for several planes of every rank. `ranks` has all planes of the first rank, then those of the
 * next; `whole` has the planes of whole rows. */
static int move_planes(struct model *m, void *whole, void *ranks, const struct planes *p,
                       int64_t element_bytes, bool back)
{
    const int64_t all = all_heads(p), head_bytes = model_head_size(&m->config) * element_bytes;
    for (int32_t c = 0; c < m->config.cp; c++)
        for (int64_t i = 0, before = 0; i < p->n; before += p->heads[i++])
            ZR_TRY(move_rows(m, c, (char *)whole + whole_plane(m, before) * element_bytes,
                             (char *)ranks + own_plane(m, c * all + before) * element_bytes,
                             p->heads[i] * head_bytes, back));
    return 0;
}

/* Rounds a plane of fp32 gradients to the model's dtype and copies it to columns of a matrix. `rounded` is a
 * buffer for one plane. */
static int round_columns(struct model *m, real *matrix, int64_t width, const float *plane, real *rounded,
                         int64_t n)
{
    ZR_TRY(m->compute->dev->ops->cast(m->compute->stream, rounded, MODEL_DTYPE, plane, ZERO_F32,
                                      own_plane(m, n)));
    return put_columns(m, matrix, width, rounded, n);
}

static int zero_floats(struct model *m, float *x, int64_t n)
{
    return m->compute->dev->ops->zero(m->compute->stream, x, n * (int64_t)sizeof *x);
}

/* ---- attention ---- */

static struct model_attention_args attention_of(const struct model *m, int64_t n_heads,
                                                struct model_rows queries, struct model_rows keys)
{
    return (struct model_attention_args){.B = m->B,
                                         .T = m->config.context,
                                         .NH = n_heads,
                                         .n_kv = kv_heads_for(m, n_heads),
                                         .HS = model_head_size(&m->config),
                                         .queries = queries,
                                         .keys = keys,
                                         .document_start = m->batch.document_start,
                                         .scratch = m->stats.attention,
                                         .profile = m->profile};
}

static struct model_rows whole_rows(const struct model *m)
{
    return (struct model_rows){.n = {m->config.context, 0}};
}

/* ---- one rank ---- */

static struct model_attention_args own_attention(const struct model *m, const real *qkv)
{
    struct model_attention_args args =
        attention_of(m, model_part_heads(&m->config), whole_rows(m), whole_rows(m));
    args.q = qkv;
    args.k = qkv + key_column(m, 0);
    args.v = qkv + value_column(m, 0);
    args.q_row = args.kv_row = model_part_qkv(&m->config);
    return args;
}

static int own_forward(struct model *m, real *atty, float *logsum, real *qkv)
{
    const struct model_attention_args args = own_attention(m, qkv);
    return model_attention_forward(m->compute, &args, atty, NULL, logsum);
}

static int own_backward(struct model *m, real *dqkv, const real *datty, const real *atty, const float *logsum,
                        const real *qkv)
{
    const struct model_attention_args args = own_attention(m, qkv);
    const struct model_attention_grads grads = {.dq = dqkv,
                                                .dk = dqkv + key_column(m, 0),
                                                .dv = dqkv + value_column(m, 0),
                                                .dq_row = args.q_row,
                                                .dkv_row = args.kv_row};
    return model_attention_backward(m->compute, &args, datty, atty, logsum, m->stats.dots, &grads);
}

/* ---- the gather form ---- */

/* The buffers of the gather form, for n query heads and kv key heads at a time. */
struct gathered {
    int64_t n, kv;
    /* Keys and values: (cp, 2) planes in the order of ranks, and 2 planes of whole rows. After attention, the
     * memory of both is a buffer for a plane of queries. */
    real *ranks, *whole;
    /* Planes of the results of n heads, and of their gradient. NULL if n is all heads. */
    real *y, *dy;
    /* Gradients of keys and values, of whole rows and in the order of ranks; and those of queries. */
    float *dwhole, *dranks, *dq;
};

static struct gathered open_gathered(const struct model *m)
{
    int64_t heads = model_part_heads(&m->config), n = m->config.cp_heads ? m->config.cp_heads : heads;
    int64_t kv = kv_heads_for(m, n), planes = model_apart(2 * whole_plane(m, kv));
    int64_t own = model_apart(own_plane(m, n));
    struct gathered g = {.n = n, .kv = kv, .ranks = m->acts.shared, .dwhole = m->stats.shared};
    g.whole = g.ranks + planes;
    g.y = n < heads ? g.ranks + model_larger(2 * planes, own) : NULL;
    g.dy = n < heads ? g.y + own : NULL;
    g.dranks = g.dwhole + planes;
    g.dq = g.dranks + planes;
    return g;
}

/* Gathers the keys and values that g->n query heads use, from head `first` on. Fills in the arguments of
 * attention to them. */
static int gather_heads(struct model *m, const struct gathered *g, int64_t first, const real *qkv,
                        struct model_attention_args *out)
{
    int64_t row = model_part_qkv(&m->config), HS = model_head_size(&m->config), plane = own_plane(m, g->kv);
    real *own = g->ranks + m->cp.part * 2 * plane;
    ZR_TRY(take_columns(m, own, qkv + key_column(m, first), row, g->kv));
    ZR_TRY(take_columns(m, own + plane, qkv + value_column(m, first), row, g->kv));
    TRY_SHARED(m, m->cp.gather(m->cp.arg, g->ranks, own, 2 * plane));
    ZR_TRY(move_planes(m, g->whole, g->ranks, &(struct planes){2, {g->kv, g->kv}}, REAL, false));
    *out = attention_of(m, g->n, model_rows_of(m, m->cp.part), whole_rows(m));
    out->q = qkv + first * HS;
    out->q_row = row;
    out->k = g->whole;
    out->v = g->whole + whole_plane(m, g->kv);
    out->kv_row = g->kv * HS;
    return 0;
}

static int gather_forward(struct model *m, real *atty, float *logsum, real *qkv)
{
    const struct gathered g = open_gathered(m);
    int64_t A = model_part_channels(&m->config), HS = model_head_size(&m->config);
    struct model_attention_args args;
    for (int64_t first = 0; first < model_part_heads(&m->config); first += g.n) {
        ZR_TRY(gather_heads(m, &g, first, qkv, &args));
        ZR_TRY(model_attention_forward(m->compute, &args, g.y ? g.y : atty, NULL,
                                       logsum + first * model_own_tokens(m)));
        if (g.y)
            ZR_TRY(put_columns(m, atty + first * HS, A, g.y, g.n));
    }
    return 0;
}

/* Sums the gradients of keys and values over the ranks. Each rank receives those of its own tokens. */
static int scatter_heads(struct model *m, const struct gathered *g, int64_t first, real *dqkv)
{
    int64_t row = model_part_qkv(&m->config), plane = own_plane(m, g->kv);
    float *own = g->dranks + m->cp.part * 2 * plane;
    ZR_TRY(move_planes(m, g->dwhole, g->dranks, &(struct planes){2, {g->kv, g->kv}}, sizeof(float), true));
    TRY_SHARED(m, m->cp.scatter(m->cp.arg, own, g->dranks, 2 * plane));
    ZR_TRY(round_columns(m, dqkv + first * model_head_size(&m->config), row, g->dq, g->ranks, g->n));
    ZR_TRY(round_columns(m, dqkv + key_column(m, first), row, own, g->ranks, g->kv));
    return round_columns(m, dqkv + value_column(m, first), row, own + plane, g->ranks, g->kv);
}

static int gather_backward(struct model *m, real *dqkv, const real *datty, const real *atty,
                           const float *logsum, const real *qkv)
{
    const struct gathered g = open_gathered(m);
    int64_t A = model_part_channels(&m->config), HS = model_head_size(&m->config);
    const struct model_attention_grads grads = {
        .dq32 = g.dq, .dk32 = g.dwhole, .dv32 = g.dwhole + whole_plane(m, g.kv)};
    struct model_attention_args args;
    for (int64_t first = 0; first < model_part_heads(&m->config); first += g.n) {
        ZR_TRY(gather_heads(m, &g, first, qkv, &args));
        if (g.y) {
            ZR_TRY(take_columns(m, g.y, atty + first * HS, A, g.n));
            ZR_TRY(take_columns(m, g.dy, datty + first * HS, A, g.n));
        }
        ZR_TRY(zero_floats(m, g.dwhole, 2 * whole_plane(m, g.kv)));
        ZR_TRY(zero_floats(m, g.dq, own_plane(m, g.n)));
        ZR_TRY(model_attention_backward(m->compute, &args, g.dy ? g.dy : datty, g.y ? g.y : atty,
                                        logsum + first * model_own_tokens(m), m->stats.dots, &grads));
        ZR_TRY(scatter_heads(m, &g, first, dqkv));
    }
    return 0;
}

/* ---- the exchange form ---- */

/* The number of query heads, and of key heads, for which a rank computes the attention of all tokens. */
static int64_t exchanged_heads(const struct model *m)
{
    return model_part_heads(&m->config) / m->config.cp;
}

static int64_t exchanged_kv_heads(const struct model *m)
{
    return kv_heads_for(m, exchanged_heads(m));
}

/* The two buffers of the exchange form. Each has room for the queries, keys and values of all heads, or for
 * the results and their gradient. */
static real *exchange_buffer(const struct model *m, int i)
{
    int64_t heads = model_part_heads(&m->config), kv = model_part_kv_heads(&m->config);
    return m->acts.shared + i * model_apart(own_plane(m, heads + model_larger(heads, 2 * kv)));
}

/* The planes of queries, keys and values. */
static struct planes exchanged_planes(const struct model *m)
{
    return (struct planes){3, {exchanged_heads(m), exchanged_kv_heads(m), exchanged_kv_heads(m)}};
}

/* Exchanges matrices that have all heads and this rank's tokens. `whole` gets the planes p of this rank's
 * heads and all tokens. first[i] is the first column of plane i in a matrix, and `columns` the distance
 * between rows. whole and sent may be the same buffer; whole and received may not. */
static int to_heads(struct model *m, real *whole, const real *const *first, const struct planes *p,
                    int64_t columns, real *sent, real *received)
{
    int64_t all = all_heads(p), HS = model_head_size(&m->config);
    for (int32_t c = 0; c < m->config.cp; c++)
        for (int64_t i = 0, before = 0; i < p->n; before += p->heads[i++])
            ZR_TRY(take_columns(m, sent + own_plane(m, c * all + before), first[i] + c * p->heads[i] * HS,
                                columns, p->heads[i]));
    TRY_SHARED(m, m->cp.exchange(m->cp.arg, received, sent, own_plane(m, all)));
    return move_planes(m, whole, received, p, REAL, false);
}

/* The inverse: planes of this rank's heads become columns of matrices with all heads and this rank's tokens.
 * Overwrites `whole`. */
static int to_tokens(struct model *m, real *const *first, const struct planes *p, int64_t columns,
                     real *whole, real *sent)
{
    int64_t all = all_heads(p), HS = model_head_size(&m->config);
    ZR_TRY(move_planes(m, whole, sent, p, REAL, true));
    TRY_SHARED(m, m->cp.exchange(m->cp.arg, whole, sent, own_plane(m, all)));
    for (int32_t c = 0; c < m->config.cp; c++)
        for (int64_t i = 0, before = 0; i < p->n; before += p->heads[i++])
            ZR_TRY(put_columns(m, first[i] + c * p->heads[i] * HS, columns,
                               whole + own_plane(m, c * all + before), p->heads[i]));
    return 0;
}

/* The arguments of attention for this rank's heads, whose planes are in qkv. */
static struct model_attention_args exchanged(const struct model *m, const real *qkv)
{
    int64_t n = exchanged_heads(m);
    struct model_attention_args args = attention_of(m, n, whole_rows(m), whole_rows(m));
    args.q = qkv;
    args.k = qkv + whole_plane(m, n);
    args.v = args.k + whole_plane(m, args.n_kv);
    args.q_row = n * args.HS;
    args.kv_row = args.n_kv * args.HS;
    return args;
}

/* The exchanged planes replace qkv, which has as many elements. They are all that backward needs. */
static int exchange_forward(struct model *m, real *atty, float *logsum, real *qkv)
{
    const struct planes of_qkv = exchanged_planes(m), of_y = {1, {exchanged_heads(m)}};
    const real *const columns[] = {qkv, qkv + key_column(m, 0), qkv + value_column(m, 0)};
    real *a = exchange_buffer(m, 0), *b = exchange_buffer(m, 1);
    ZR_TRY(to_heads(m, qkv, columns, &of_qkv, model_part_qkv(&m->config), a, b));
    const struct model_attention_args args = exchanged(m, qkv);
    ZR_TRY(model_attention_forward(m->compute, &args, a, NULL, logsum));
    return to_tokens(m, &atty, &of_y, model_part_channels(&m->config), a, b);
}

static int exchange_backward(struct model *m, real *dqkv, const real *datty, const real *atty,
                             const float *logsum, const real *qkv)
{
    int64_t n = exchanged_heads(m), plane = whole_plane(m, n);
    const struct planes of_qkv = exchanged_planes(m), of_y = {2, {n, n}};
    real *const columns[] = {dqkv, dqkv + key_column(m, 0), dqkv + value_column(m, 0)};
    real *y = exchange_buffer(m, 0), *d = exchange_buffer(m, 1);
    ZR_TRY(to_heads(m, y, (const real *const[]){atty, datty}, &of_y, model_part_channels(&m->config), y, d));
    const struct model_attention_args args = exchanged(m, qkv);
    const struct model_attention_grads grads = {.dq = d,
                                                .dk = d + plane,
                                                .dv = d + plane + whole_plane(m, args.n_kv),
                                                .dq_row = args.q_row,
                                                .dkv_row = args.kv_row};
    ZR_TRY(model_attention_backward(m->compute, &args, y + plane, y, logsum, m->stats.dots, &grads));
    return to_tokens(m, columns, &of_qkv, model_part_qkv(&m->config), d, y);
}

/* ---- the ring form ---- */

/* The buffers of the ring form. A message has keys and values, followed by the sum of their gradients so
 * far. */
struct ring {
    /* Elements of a plane of queries and of a plane of keys, and the size of keys and values in floats. */
    int64_t plane, kv_plane, kv;
    float *message[2];
    /* Forward: y are the results, and y_part and logsum_part those of one step. Backward: dq are the
     * gradients of queries, and dkv those of keys and values of one step. At the end, dkv is a buffer for one
     * plane of queries. */
    float *y, *y_part, *dq, *dkv, *logsum_part;
};

static struct ring open_ring(const struct model *m)
{
    int64_t plane = own_plane(m, model_part_heads(&m->config));
    int64_t kv_plane = own_plane(m, model_part_kv_heads(&m->config)), kv = floats_of(2 * kv_plane);
    int64_t message = model_apart(kv + 2 * kv_plane);
    struct ring r = {.plane = plane, .kv_plane = kv_plane, .kv = kv};
    r.message[0] = m->stats.shared;
    r.message[1] = r.message[0] + message;
    r.y = r.dq = r.message[1] + message;
    r.y_part = r.dkv = r.y + model_apart(plane);
    r.logsum_part = r.dkv + model_apart(model_larger(plane, 2 * kv_plane));
    return r;
}

/* The rank whose keys and values this rank has in a step of the ring. */
static int32_t ring_rank(const struct model *m, int64_t step)
{
    return (int32_t)((m->cp.part - step + m->config.cp) % m->config.cp);
}

static int ring_keys(struct model *m, const struct ring *r, const real *qkv)
{
    int64_t row = model_part_qkv(&m->config), n = model_part_kv_heads(&m->config);
    real *k = (real *)r->message[0];
    ZR_TRY(take_columns(m, k, qkv + key_column(m, 0), row, n));
    return take_columns(m, k + r->kv_plane, qkv + value_column(m, 0), row, n);
}

/* The arguments of attention to the keys and values in a message. */
static struct model_attention_args ring_attention(const struct model *m, const struct ring *r, int64_t step,
                                                  const float *message, const real *qkv)
{
    struct model_attention_args args = attention_of(
        m, model_part_heads(&m->config), model_rows_of(m, m->cp.part), model_rows_of(m, ring_rank(m, step)));
    args.q = qkv;
    args.k = (const real *)message;
    args.v = args.k + r->kv_plane;
    args.q_row = model_part_qkv(&m->config);
    args.kv_row = model_part_kv_channels(&m->config);
    return args;
}

/* Whether any query is at or after the first key. */
static bool sees_any(const struct model_attention_args *a)
{
    int64_t last =
        a->queries.n[1] ? a->queries.first[1] + a->queries.n[1] : a->queries.first[0] + a->queries.n[0];
    return a->keys.first[0] < last;
}

static int ring_forward(struct model *m, real *atty, float *logsum, real *qkv)
{
    const struct ring r = open_ring(m);
    int64_t NH = model_part_heads(&m->config), T = model_own_context(&m->config);
    ZR_TRY(ring_keys(m, &r, qkv));
    for (int64_t step = 0; step < m->config.cp; step++) {
        float *here = r.message[step % 2], *next = r.message[(step + 1) % 2];
        bool last = step == m->config.cp - 1;
        const struct model_attention_args args = ring_attention(m, &r, step, here, qkv);
        if (!last)
            TRY_SHARED(m, m->cp.shift_begin(m->cp.arg, next, here, r.kv));
        if (step == 0) {
            ZR_TRY(model_attention_forward(m->compute, &args, NULL, r.y, logsum));
        } else if (sees_any(&args)) {
            ZR_TRY(model_attention_forward(m->compute, &args, NULL, r.y_part, r.logsum_part));
            ZR_TRY(model_attention_merge(m->compute, r.y, logsum, r.y_part, r.logsum_part, m->B, T, NH,
                                         args.HS));
        }
        if (!last)
            TRY_SHARED(m, m->cp.shift_end(m->cp.arg));
    }
    return m->compute->dev->ops->cast(m->compute->stream, atty, MODEL_DTYPE, r.y, ZERO_F32, r.plane);
}

/* In each step, a rank receives the next keys and values, and the sum of the gradients of the current ones,
 * to which it adds its own. So both are sent while the rank computes. After the last step, one more shift
 * sends the sums to the ranks that have the keys. */
static int ring_backward(struct model *m, real *dqkv, const real *datty, const real *atty,
                         const float *logsum, const real *qkv)
{
    const struct zr_device_ops *dev = m->compute->dev->ops;
    const struct ring r = open_ring(m);
    const struct model_attention_grads grads = {.dq32 = r.dq, .dk32 = r.dkv, .dv32 = r.dkv + r.kv_plane};
    const int64_t cp = m->config.cp, row = model_part_qkv(&m->config), n = model_part_kv_heads(&m->config);
    ZR_TRY(ring_keys(m, &r, qkv));
    ZR_TRY(zero_floats(m, r.dq, r.plane));
    for (int64_t step = 0; step < cp; step++) {
        float *here = r.message[step % 2], *next = r.message[(step + 1) % 2];
        /* the first step has no sums to pass on, and the last one no keys and values */
        int64_t from = step == cp - 1 ? r.kv : 0, to = step == 0 ? r.kv : r.kv + 2 * r.kv_plane;
        const struct model_attention_args args = ring_attention(m, &r, step, here, qkv);
        TRY_SHARED(m, m->cp.shift_begin(m->cp.arg, next + from, here + from, to - from));
        bool adds = sees_any(&args);
        if (adds) {
            ZR_TRY(zero_floats(m, r.dkv, 2 * r.kv_plane));
            ZR_TRY(model_attention_backward(m->compute, &args, datty, atty, logsum, m->stats.dots, &grads));
        }
        TRY_SHARED(m, m->cp.shift_end(m->cp.arg));
        if (step == 0)
            ZR_TRY(
                dev->copy(m->compute->stream, next + r.kv, r.dkv, 2 * r.kv_plane * (int64_t)sizeof(float)));
        else if (adds)
            ZR_TRY(dev->add(m->compute->stream, next + r.kv, r.dkv, ZERO_F32, 2 * r.kv_plane));
    }
    const float *sums = r.message[cp % 2] + r.kv;
    float *own = r.message[(cp + 1) % 2] + r.kv;
    TRY_SHARED(m, m->cp.shift_begin(m->cp.arg, own, sums, 2 * r.kv_plane));
    ZR_TRY(round_columns(m, dqkv, row, r.dq, (real *)r.dkv, model_part_heads(&m->config)));
    TRY_SHARED(m, m->cp.shift_end(m->cp.arg));
    ZR_TRY(round_columns(m, dqkv + key_column(m, 0), row, own, (real *)r.dkv, n));
    return round_columns(m, dqkv + value_column(m, 0), row, own + r.kv_plane, (real *)r.dkv, n);
}

/* ---- the table ---- */

static const struct form {
    int (*forward)(struct model *m, real *atty, float *logsum, real *qkv);
    int (*backward)(struct model *m, real *dqkv, const real *datty, const real *atty, const float *logsum,
                    const real *qkv);
} forms[] = {
    [0] = {own_forward, own_backward},
    [MODEL_CP_GATHER] = {gather_forward, gather_backward},
    [MODEL_CP_EXCHANGE] = {exchange_forward, exchange_backward},
    [MODEL_CP_RING] = {ring_forward, ring_backward},
};

static const struct form *form_of(const struct model *m)
{
    int form = m->config.cp_form ? m->config.cp_form : MODEL_CP_GATHER;
    return &forms[m->config.cp > 1 ? form : 0];
}

int64_t model_context_scratch(const struct model *m)
{
    const struct model_config *c = &m->config;
    int64_t heads = model_part_heads(c), keys = c->context;
    if (c->cp > 1 && c->cp_form == MODEL_CP_EXCHANGE)
        heads = exchanged_heads(m);
    else if (c->cp > 1 && c->cp_form == MODEL_CP_RING)
        keys = model_own_context(c);
    else if (c->cp > 1 && c->cp_heads)
        heads = c->cp_heads;
    const struct model_attention_args args =
        attention_of(m, heads, whole_rows(m), (struct model_rows){.n = {keys}});
    return model_attention_scratch(m->compute, &args);
}

static float *logsum_of(const struct model *m, int64_t l)
{
    return m->stats.logsum + l * model_part_heads(&m->config) * model_own_tokens(m);
}

int model_context_forward(struct model *m, int64_t l, real *atty, real *qkv)
{
    return form_of(m)->forward(m, atty, logsum_of(m, l), qkv);
}

int model_context_backward(struct model *m, int64_t l, real *dqkv, const real *datty, const real *atty,
                           const real *qkv)
{
    return form_of(m)->backward(m, dqkv, datty, atty, logsum_of(m, l), qkv);
}
