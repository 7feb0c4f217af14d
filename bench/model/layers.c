/* SPDX-License-Identifier: Apache-2.0 */
/* layers.c: the functions of layers.h on the host. They use the threads that multiply, ignore
 * streams, and are done when they return. Each thread takes some of the rows, elements or columns, and one
 * thread computes each number. So the bits do not depend on the number of threads.
 *
 * A compiler can vectorise the loops without reordering floating-point operations: element-wise loops as they
 * are, sums over 16 lanes in a fixed order. */
#include "bench/model/loops.h"
#include "bench/model/vocab.h"
#include "bench/threads.h"

#include <math.h>

static inline float largest(const float *x, int64_t n)
{
    float s[LANES];
    for (int j = 0; j < LANES; j++)
        s[j] = x[0];
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int j = 0; j < LANES; j++)
            s[j] = x[i + j] > s[j] ? x[i + j] : s[j];
    for (int j = 0; i < n; i++, j++)
        s[j] = x[i] > s[j] ? x[i] : s[j];
    for (int j = 1; j < LANES; j++)
        s[0] = s[j] > s[0] ? s[j] : s[0];
    return s[0];
}

MODEL_CLONES static void normalize_rows(real *restrict out, float *restrict mean, float *restrict rstd,
                                        const real *restrict inp, const real *restrict weight,
                                        const real *restrict bias, float *restrict x, int64_t N, int64_t C)
{
    for (int64_t row = 0; row < N; row++, inp += C, out += C) {
        for (int64_t i = 0; i < C; i++)
            x[i] = to_float(inp[i]);
        float mu = sum(x, C) / (float)C;
        for (int64_t i = 0; i < C; i++)
            x[i] -= mu;
        float scale = 1.0f / sqrtf(dot(x, x, C) / (float)C + MODEL_LAYERNORM_EPS);
        for (int64_t i = 0; i < C; i++)
            out[i] = from_float(x[i] * scale * to_float(weight[i]) + to_float(bias[i]));
        mean[row] = mu;
        rstd[row] = scale;
    }
}

static int layernorm_forward(const struct compute *on, real *out, float *mean, float *rstd, const real *inp,
                             const real *weight, const real *bias, float *scratch, int64_t N, int64_t C)
{
    IN_PARTS(on)
    {
        int64_t from = part_at(on, N, part), n = part_at(on, N, part + 1) - from;
        normalize_rows(out + from * C, mean + from, rstd + from, inp + from * C, weight, bias,
                       scratch + part * 2 * C, n, C);
    }
    return 0;
}

MODEL_CLONES static void normalize_rows_backward(real *restrict dinp, const real *restrict dout,
                                                 const real *restrict inp, const real *restrict weight,
                                                 const float *restrict mean, const float *restrict rstd,
                                                 float *restrict norm, int64_t N, int64_t C)
{
    float *restrict dnorm = norm + C;
    for (int64_t row = 0; row < N; row++, inp += C, dout += C, dinp += C) {
        float mu = mean[row], scale = rstd[row];
        for (int64_t i = 0; i < C; i++) {
            norm[i] = (to_float(inp[i]) - mu) * scale;
            dnorm[i] = to_float(weight[i]) * to_float(dout[i]);
        }
        float m = sum(dnorm, C) / (float)C, m_norm = dot(dnorm, norm, C) / (float)C;
        for (int64_t i = 0; i < C; i++)
            dinp[i] = from_float(to_float(dinp[i]) + (dnorm[i] - m - norm[i] * m_norm) * scale);
    }
}

/* Computes n columns over all N rows. */
MODEL_CLONES static void normalize_columns_backward(real *restrict dweight, real *restrict dbias,
                                                    const real *restrict dout, const real *restrict inp,
                                                    const float *restrict mean, const float *restrict rstd,
                                                    float *restrict dw, int64_t n, int64_t N, int64_t C)
{
    float *restrict db = dw + n;
    memset(dw, 0, 2 * (size_t)n * sizeof *dw);
    for (int64_t row = 0; row < N; row++, inp += C, dout += C) {
        float mu = mean[row], scale = rstd[row];
        for (int64_t i = 0; i < n; i++) {
            float d = to_float(dout[i]);
            dw[i] += d * ((to_float(inp[i]) - mu) * scale);
            db[i] += d;
        }
    }
    add_columns(dweight, dw, n);
    add_columns(dbias, db, n);
}

static int layernorm_backward(const struct compute *on, real *dinp, real *dweight, real *dbias,
                              const real *dout, const real *inp, const real *weight, const float *mean,
                              const float *rstd, float *scratch, int64_t N, int64_t C)
{
    IN_PARTS(on)
    {
        float *mine = scratch + part * 2 * C;
        int64_t from = part_at(on, N, part), n = part_at(on, N, part + 1) - from;
        if (dinp)
            normalize_rows_backward(dinp + from * C, dout + from * C, inp + from * C, weight, mean + from,
                                    rstd + from, mine, n, C);
        from = part_at(on, C, part), n = part_at(on, C, part + 1) - from;
        if (dweight)
            normalize_columns_backward(dweight + from, dbias + from, dout + from, inp + from, mean, rstd,
                                       mine, n, N, C);
    }
    return 0;
}

static inline float gelu_gate(float x)
{
    return sigmoid(2.0f * model_gelu_u(x));
}

MODEL_CLONES static void gelu(real *restrict out, const real *restrict inp, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        float x = to_float(inp[i]);
        out[i] = from_float(x * gelu_gate(x));
    }
}

static int gelu_forward(const struct compute *on, real *out, const real *inp, int64_t n)
{
    IN_PARTS(on)
    {
        int64_t from = part_at(on, n, part);
        gelu(out + from, inp + from, part_at(on, n, part + 1) - from);
    }
    return 0;
}

MODEL_CLONES static void gelu_slope(real *restrict dout, const real *restrict inp, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        float x = to_float(inp[i]);
        dout[i] = from_float(to_float(dout[i]) * model_gelu_slope(x, gelu_gate(x)));
    }
}

static int gelu_backward(const struct compute *on, real *dout, const real *inp, int64_t n)
{
    IN_PARTS(on)
    {
        int64_t from = part_at(on, n, part);
        gelu_slope(dout + from, inp + from, part_at(on, n, part + 1) - from);
    }
    return 0;
}

/* The index of a head's row in an array. */
static inline int64_t head_at(const struct model_heads *h, int64_t head, int64_t row)
{
    return head / h->NH * h->batch + head % h->NH * h->head + row * h->row;
}

/* Rows at n positions of each of some heads. */
struct part_of_heads {
    struct model_heads heads;
    struct model_rows rows;
    int64_t first, n;
};

/* Rows that lie one after the other, or are all missing. */
struct run {
    int64_t at, n; /* the index of the first, -1 if they are missing; how many */
};

/* The run that begins with row i, counted over the heads. It ends before row `end`. */
static struct run run_from(const struct part_of_heads *p, int64_t i, int64_t end)
{
    int64_t position = p->first + i % p->n, row = model_row_at(&p->rows, position);
    int64_t n = p->n - i % p->n < end - i ? p->n - i % p->n : end - i;
    for (int r = 0; r < 2; r++) {
        int64_t to_first = p->rows.first[r] - position, to_end = to_first + p->rows.n[r];
        n = to_first > 0 && to_first < n ? to_first : n;
        n = to_end > 0 && to_end < n ? to_end : n;
    }
    return (struct run){row < 0 ? -1 : head_at(&p->heads, p->heads.first + i / p->n, row), n};
}

/* Rows are short, so that calling memcpy for each would take longer. */
static inline void copy_row(real *restrict to, const real *restrict from, int64_t n)
{
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int j = 0; j < LANES; j++)
            to[i + j] = from[i + j];
    for (; i < n; i++)
        to[i] = from[i];
}

MODEL_CLONES static void load_rows(real *restrict to, const real *restrict from,
                                   const struct part_of_heads *p, int64_t begin, int64_t end)
{
    int64_t width = p->heads.width;
    for (struct run run; begin < end; begin += run.n) {
        run = run_from(p, begin, end);
        if (run.at < 0)
            memset(to + begin * width, 0, (size_t)(run.n * width) * sizeof *to);
        for (int64_t i = 0; i < run.n && run.at >= 0; i++)
            copy_row(to + (begin + i) * width, from + run.at + i * p->heads.row, width);
    }
}

/* Who moves n elements: all threads, or one if they are so few that starting threads would take longer. */
static const struct compute *movers(const struct compute *on, int64_t n)
{
    static const struct compute one = {.n_threads = 1};
    return n < 1 << 14 ? &one : on;
}

static int attention_load(const struct compute *on, real *to, const real *from, struct model_heads heads,
                          struct model_rows rows, int64_t first, int64_t n)
{
    const struct part_of_heads p = {heads, rows, first, n};
    on = movers(on, heads.n * n * heads.width);
    IN_PARTS(on)
    load_rows(to, from, &p, part_at(on, heads.n * n, part), part_at(on, heads.n * n, part + 1));
    return 0;
}

static inline void round_row(real *restrict to, const float *restrict from, int64_t n)
{
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int j = 0; j < LANES; j++)
            to[i + j] = from_float(from[i + j]);
    for (; i < n; i++)
        to[i] = from_float(from[i]);
}

/* to32 += from, or = */
static inline void store_floats(float *restrict to32, bool adds, const float *restrict from, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        to32[i] = adds ? to32[i] + from[i] : from[i];
}

MODEL_CLONES static void store_rows(real *restrict to, float *restrict to32, bool adds,
                                    const float *restrict from, const struct part_of_heads *p, int64_t begin,
                                    int64_t end)
{
    int64_t width = p->heads.width;
    for (struct run run; begin < end; begin += run.n) {
        run = run_from(p, begin, end);
        for (int64_t i = 0; i < run.n && run.at >= 0; i++) {
            int64_t at = run.at + i * p->heads.row;
            if (to32)
                store_floats(to32 + at, adds, from + (begin + i) * width, width);
            else
                round_row(to + at, from + (begin + i) * width, width);
        }
    }
}

static int attention_store(const struct compute *on, real *to, float *to32, bool adds, const float *from,
                           struct model_heads heads, struct model_rows rows, int64_t first, int64_t n)
{
    const struct part_of_heads p = {heads, rows, first, n};
    on = movers(on, heads.n * n * heads.width);
    IN_PARTS(on)
    store_rows(to, to32, adds, from, &p, part_at(on, heads.n * n, part), part_at(on, heads.n * n, part + 1));
    return 0;
}

/* Rows from .. to - 1 of the tile, counted over its heads. */
MODEL_CLONES static void softmax_rows(real *restrict att, float *restrict logsum, float *restrict scores,
                                      const struct model_tile *tile, int64_t from, int64_t to)
{
    int64_t n = tile->n_keys;
    for (int64_t row = from; row < to; row++) {
        struct model_seen seen =
            model_seen_keys(tile, tile->first_head + row / tile->n_queries, row % tile->n_queries);
        int64_t n_seen = seen.to - seen.from;
        float *x = scores + row * n + seen.from;
        real *a = att + row * n + seen.from;
        float top = n_seen ? largest(x, n_seen) : 0;
        for (int64_t i = 0; i < n_seen; i++)
            x[i] = fast_exp((x[i] - top) * tile->scale);
        float total = sum(x, n_seen), inverse = 1.0f / total;
        for (int64_t i = 0; i < n_seen; i++)
            a[i] = from_float(x[i] * inverse);
        memset(att + row * n, 0, (size_t)seen.from * sizeof *att);
        memset(a + n_seen, 0, (size_t)(n - seen.to) * sizeof *att);
        logsum[row] = n_seen ? top * tile->scale + logf(total) : -INFINITY;
    }
}

static int attention_softmax(const struct compute *on, real *att, float *logsum, float *scores,
                             struct model_tile tile)
{
    int64_t n = tile.n_heads * tile.n_queries;
    IN_PARTS(on)
    softmax_rows(att, logsum, scores, &tile, part_at(on, n, part), part_at(on, n, part + 1));
    return 0;
}

/* y += share * (y_part - y) */
MODEL_CLONES static void merge_row(float *restrict y, const float *restrict y_part, float share, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        y[i] -= share * (y[i] - y_part[i]);
}

static void merge_one(float *y, float *logsum, const float *y_part, float part, int64_t n)
{
    float whole = *logsum, top = whole > part ? whole : part;
    if (part == -INFINITY) /* it saw no key */
        return;
    float less = fast_exp(whole > part ? part - whole : whole - part);
    merge_row(y, y_part, (whole > part ? less : 1.0f) / (1.0f + less), n);
    *logsum = top + (float)log1p((double)less);
}

static int attention_merge(const struct compute *on, float *y, float *logsum, const float *y_part,
                           const float *logsum_part, struct model_heads heads, int64_t n)
{
    IN_PARTS(on)
    for (int64_t i = part_at(on, heads.n * n, part); i < part_at(on, heads.n * n, part + 1); i++) {
        int64_t at = head_at(&heads, heads.first + i / n, i % n);
        merge_one(y + at, logsum + i, y_part + at, logsum_part[i], heads.width);
    }
    return 0;
}

/* Rows from .. to - 1 of all tokens, with NH * HS elements each. */
MODEL_CLONES static void dot_rows(float *restrict dots, const real *restrict dy, const real *restrict y,
                                  int64_t from, int64_t to, int64_t n, int64_t NH, int64_t HS)
{
    for (int64_t row = from; row < to; row++)
        for (int64_t head = 0; head < NH; head++) {
            const real *d = dy + (row * NH + head) * HS, *x = y + (row * NH + head) * HS;
            float s[LANES] = {0};
            int64_t i = 0;
            for (; i + LANES <= HS; i += LANES)
                for (int j = 0; j < LANES; j++)
                    s[j] += to_float(d[i + j]) * to_float(x[i + j]);
            for (int j = 0; i < HS; i++, j++)
                s[j] += to_float(d[i]) * to_float(x[i]);
            dots[(row / n * NH + head) * n + row % n] = sum_lanes(s);
        }
}

static int attention_dots(const struct compute *on, float *dots, const real *dy, const real *y, int64_t B,
                          int64_t n, int64_t NH, int64_t HS)
{
    IN_PARTS(on)
    dot_rows(dots, dy, y, part_at(on, B * n, part), part_at(on, B * n, part + 1), n, NH, HS);
    return 0;
}

MODEL_CLONES static void softmax_rows_backward(real *restrict att, real *restrict dscores,
                                               const float *restrict scores, const float *restrict datt,
                                               const float *restrict logsum, const float *restrict dots,
                                               const struct model_tile *tile, int64_t from, int64_t to)
{
    int64_t n = tile->n_keys, n_rows = model_n_rows(&tile->queries);
    for (int64_t row = from; row < to; row++) {
        int64_t head = tile->first_head + row / tile->n_queries, query = row % tile->n_queries;
        struct model_seen seen = model_seen_keys(tile, head, query);
        int64_t at = row * n + seen.from, n_seen = seen.to - seen.from;
        int64_t of_query = head * n_rows + model_row_at(&tile->queries, tile->query + query);
        float less = n_seen ? logsum[of_query] : 0, d = n_seen ? dots[of_query] : 0, scale = tile->scale;
        for (int64_t i = at; i < at + n_seen; i++) {
            float p = fast_exp(scores[i] * scale - less);
            att[i] = from_float(p);
            dscores[i] = from_float(p * (datt[i] - d) * scale);
        }
        memset(att + row * n, 0, (size_t)seen.from * sizeof *att);
        memset(dscores + row * n, 0, (size_t)seen.from * sizeof *dscores);
        memset(att + at + n_seen, 0, (size_t)(n - seen.to) * sizeof *att);
        memset(dscores + at + n_seen, 0, (size_t)(n - seen.to) * sizeof *dscores);
    }
}

static int attention_softmax_backward(const struct compute *on, real *att, real *dscores, float *scores,
                                      float *datt, const float *logsum, const float *dots,
                                      struct model_tile tile)
{
    int64_t n = tile.n_heads * tile.n_queries;
    IN_PARTS(on)
    softmax_rows_backward(att, dscores, scores, datt, logsum, dots, &tile, part_at(on, n, part),
                          part_at(on, n, part + 1));
    return 0;
}

MODEL_CLONES static void cross_entropy_rows(real *restrict dlogits, double *restrict loss,
                                            float *restrict logits, const int32_t *restrict targets,
                                            int64_t N, int64_t V, int64_t ld, struct model_label label,
                                            float scale)
{
    const float each = scale * label.each, more = scale * label.target;
    for (int64_t row = 0; row < N; row++, logits += ld, dlogits += ld) {
        int32_t target = targets[row];
        if (target == MODEL_LEFT_OUT) {
            memset(dlogits, 0, (size_t)V * sizeof *dlogits);
            loss[row] = 0.0;
            continue;
        }
        float top = largest(logits, V);
        double wanted = (double)label.target * (double)(logits[target] - top);
        if (label.each > 0)
            wanted += (double)label.each * ((double)sum(logits, V) - (double)V * (double)top);
        for (int64_t i = 0; i < V; i++)
            logits[i] = fast_exp(logits[i] - top);
        float total = sum(logits, V), factor = scale / total;
        for (int64_t i = 0; i < V; i++)
            dlogits[i] = from_float(logits[i] * factor - each);
        dlogits[target] = from_float(logits[target] * factor - each - more);
        loss[row] = log((double)total) - wanted;
    }
}

static int cross_entropy(const struct compute *on, real *dlogits, double *loss, float *logits,
                         const int32_t *targets, int64_t N, int64_t V, int64_t ld, struct model_label label,
                         float scale)
{
    IN_PARTS(on)
    {
        int64_t from = part_at(on, N, part);
        cross_entropy_rows(dlogits + from * ld, loss + from, logits + from * ld, targets + from,
                           part_at(on, N, part + 1) - from, V, ld, label, scale);
    }
    return 0;
}

static int add_loss(const struct compute *on, double *total, const double *loss, int64_t N)
{
    (void)on;
    double sum_of_rows = 0.0;
    for (int64_t row = 0; row < N; row++)
        sum_of_rows += loss[row];
    *total += ldexp(rint(ldexp(sum_of_rows / (double)N, 36)), -36);
    return 0;
}

/* Computes n columns over all N rows. */
MODEL_CLONES static void sum_columns(real *restrict dbias, const real *restrict dout, float *restrict columns,
                                     int64_t n, int64_t N, int64_t C)
{
    memset(columns, 0, (size_t)n * sizeof *columns);
    for (int64_t row = 0; row < N; row++, dout += C)
        add_row(columns, dout, n);
    add_columns(dbias, columns, n);
}

static int bias_backward(const struct compute *on, real *dbias, const real *dout, float *scratch, int64_t N,
                         int64_t C)
{
    IN_PARTS(on)
    {
        int64_t from = part_at(on, C, part);
        sum_columns(dbias + from, dout + from, scratch + from, part_at(on, C, part + 1) - from, N, C);
    }
    return 0;
}

MODEL_CLONES static void add_elements(real *restrict grad, const real *restrict x, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        grad[i] = from_float(to_float(grad[i]) + to_float(x[i]));
}

static int add(const struct compute *on, real *grad, const real *x, int64_t n)
{
    IN_PARTS(on)
    {
        int64_t from = part_at(on, n, part);
        add_elements(grad + from, x + from, part_at(on, n, part + 1) - from);
    }
    return 0;
}

MODEL_CLONES static void embed_rows(real *restrict out, const int32_t *restrict tokens,
                                    const int32_t *restrict positions, const real *restrict wte,
                                    const real *restrict wpe, int64_t from, int64_t to, int64_t C)
{
    out += from * C;
    for (int64_t row = from; row < to; row++, out += C) {
        const real *token = tokens[row] < 0 ? NULL : wte + tokens[row] * C;
        const real *position = wpe ? wpe + positions[row] * C : NULL;
        for (int64_t i = 0; i < C; i++)
            out[i] =
                from_float((token ? to_float(token[i]) : 0.0f) + (position ? to_float(position[i]) : 0.0f));
    }
}

static int embedding_forward(const struct compute *on, real *out, const int32_t *tokens,
                             const int32_t *positions, const real *wte, const real *wpe, int64_t N, int64_t C)
{
    IN_PARTS(on)
    embed_rows(out, tokens, positions, wte, wpe, part_at(on, N, part), part_at(on, N, part + 1), C);
    return 0;
}

/* The rows of one number are summed in fp32 and added once. Adding each row to a bf16 gradient would lose the
 * later ones. */
MODEL_CLONES static void add_to_rows(real *restrict grad, const real *restrict dout,
                                     const struct model_groups *g, float *restrict columns, int64_t from,
                                     int64_t to, int64_t C)
{
    for (int64_t d = from; d < to; d++) {
        memset(columns, 0, (size_t)C * sizeof *columns);
        for (int32_t at = g->first[d]; at < g->first[d + 1]; at++)
            add_row(columns, dout + g->order[at] * C, C);
        add_columns(grad + g->distinct[d] * C, columns, C);
    }
}

static int embedding_backward(const struct compute *on, real *grad, const real *dout,
                              const struct model_groups *to, float *scratch, int64_t C)
{
    const int64_t n = to->n_distinct;
    IN_PARTS(on)
    add_to_rows(grad, dout, to, scratch + part * 2 * C, part_at(on, n, part), part_at(on, n, part + 1), C);
    return 0;
}

/* Two rows for each thread, and one row of the widest bias. */
static int64_t n_scratch(const struct compute *on, int64_t N, int64_t C)
{
    (void)N;
    return (on->n_threads > 2 ? 2 * on->n_threads : 4) * C;
}

const struct model_layers model_layers_host = {
    .row_align = 1,
    .n_scratch = n_scratch,
    .layernorm_forward = layernorm_forward,
    .layernorm_backward = layernorm_backward,
    .gelu_forward = gelu_forward,
    .gelu_backward = gelu_backward,
    .attention_load = attention_load,
    .attention_store = attention_store,
    .attention_softmax = attention_softmax,
    .attention_merge = attention_merge,
    .attention_dots = attention_dots,
    .attention_softmax_backward = attention_softmax_backward,
    .cross_entropy = cross_entropy,
    .vocab_top = model_vocab_top,
    .vocab_exponentials = model_vocab_exponentials,
    .vocab_loss = model_vocab_loss,
    .add_loss = add_loss,
    .bias_backward = bias_backward,
    .add = add,
    .embedding_forward = embedding_forward,
    .tokens_backward = embedding_backward,
    .positions_backward = embedding_backward,
};
