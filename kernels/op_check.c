/* SPDX-License-Identifier: Apache-2.0 */
/* op_check.c: checks the arguments of device operations, so that every device refuses the same ones. */
#include "kernels/op_check.h"

#include "kernels/agreement.h"

int zr_check_dtype(const char *op, enum zero_dtype t)
{
    if (t == ZERO_F32 || t == ZERO_BF16)
        return 0;
    if (t == ZERO_F16)
        return zr_fail(ZERO_ERR_NOTSUP, "%s: kernels are for f32 and bf16, not for f16", op);
    return zr_fail(ZERO_ERR_ARG, "%s: dtype is %d, must be f32 (%d) or bf16 (%d)", op, (int)t, ZERO_F32,
                   ZERO_BF16);
}

int zr_check_count(const char *op, const char *what, int64_t n)
{
    return n >= 0 ? 0 : zr_fail(ZERO_ERR_ARG, "%s: %s is %lld, must not be negative", op, what, (long long)n);
}

int zr_check_call(size_t arg_bytes)
{
    if (arg_bytes > ZR_CALL_BYTES)
        return zr_fail(ZERO_ERR_ARG, "call: %zu bytes of arguments, at most %d are allowed", arg_bytes,
                       ZR_CALL_BYTES);
    return 0;
}

int zr_check_put(int64_t bytes)
{
    if (bytes < 0 || bytes > ZR_PUT_BYTES || bytes % 8)
        return zr_fail(ZERO_ERR_ARG, "put: bytes is %lld, must be a multiple of 8 up to %d", (long long)bytes,
                       ZR_PUT_BYTES);
    return 0;
}

/* Bytes from the first byte of the rows to the last, with the gaps between rows. */
static int64_t rows_extent(const struct zr_copy_rows *c, int64_t stride)
{
    int64_t last = (c->bytes - 1) / c->row_bytes;
    return last * stride + (c->bytes - last * c->row_bytes);
}

static bool apart(const void *a, int64_t a_bytes, const void *b, int64_t b_bytes)
{
    return (const char *)a + a_bytes <= (const char *)b || (const char *)b + b_bytes <= (const char *)a;
}

int zr_check_copy_rows(const struct zr_copy_rows *table, int n)
{
    if (n < 0 || n > ZR_MAX_COPIES)
        return zr_fail(ZERO_ERR_ARG, "copy_rows: %d copies, 0 to %d are allowed", n, ZR_MAX_COPIES);
    for (int i = 0; i < n; i++) {
        const struct zr_copy_rows *c = &table[i];
        int64_t rows;
        if (c->bytes < 0 || (c->bytes > 0 && c->row_bytes <= 0))
            return zr_fail(ZERO_ERR_ARG, "copy_rows: copy %d: bytes is %lld, row_bytes %lld: not allowed", i,
                           (long long)c->bytes, (long long)c->row_bytes);
        if (c->bytes <= c->row_bytes)
            continue;
        rows = (c->bytes - 1) / c->row_bytes + 1;
        int64_t widest = c->dst_stride > c->src_stride ? c->dst_stride : c->src_stride;
        if (c->dst_stride < c->row_bytes || c->src_stride < c->row_bytes ||
            __builtin_mul_overflow(rows, widest, &rows))
            return zr_fail(ZERO_ERR_ARG,
                           "copy_rows: copy %d: rows of %lld bytes are %lld apart in dst, %lld in src: at "
                           "least their length is allowed",
                           i, (long long)c->row_bytes, (long long)c->dst_stride, (long long)c->src_stride);
    }
    /* The destinations of two entries may interleave. A destination and a source must be disjoint, with the
     * gaps between their rows counted. */
    for (int i = 0; i < n; i++)
        for (int k = 0; k < n; k++) {
            const struct zr_copy_rows *w = &table[i], *r = &table[k];
            if (w->bytes > 0 && r->bytes > 0 &&
                !apart(w->dst, rows_extent(w, w->dst_stride), r->src, rows_extent(r, r->src_stride)))
                return zr_fail(ZERO_ERR_ARG, "copy_rows: copy %d writes where copy %d reads: not allowed", i,
                               k);
        }
    return 0;
}

int zr_check_cast(enum zero_dtype dst, enum zero_dtype src, int64_t n)
{
    ZR_TRY(zr_check_dtype("cast", dst));
    ZR_TRY(zr_check_dtype("cast", src));
    return zr_check_count("cast", "n", n);
}

int zr_check_sources(const char *op, int n_src, enum zero_dtype src, int64_t n)
{
    ZR_TRY(zr_check_dtype(op, src));
    ZR_TRY(zr_check_count(op, "n", n));
    if (n_src < 1 || n_src > ZR_MAX_SOURCES)
        return zr_fail(ZERO_ERR_ARG, "%s: n_src is %d, must be 1 to %d", op, n_src, ZR_MAX_SOURCES);
    return 0;
}

int zr_check_sum_ranges(const struct zr_sum_range *table, int n_sums, int n_src, enum zero_dtype src)
{
    if (n_sums < 0 || n_sums > ZR_MAX_SUMS)
        return zr_fail(ZERO_ERR_ARG, "sum_ranges: %d sums, 0 to %d are allowed", n_sums, ZR_MAX_SUMS);
    int err = zr_check_dtype("sum_ranges", src);
    if (!err && (n_src < 1 || n_src > ZR_MAX_SOURCES))
        err = zr_fail(ZERO_ERR_ARG, "sum_ranges: n_src is %d, must be 1 to %d", n_src, ZR_MAX_SOURCES);
    for (int i = 0; i < n_sums && !err; i++) {
        const struct zr_sum_range *a = &table[i];
        const int64_t size = sizeof(float);
        if (a->n < 0 || a->at < 0)
            err = zr_fail(ZERO_ERR_ARG, "sum_ranges: sum %d: at is %lld, n %lld: must not be negative", i,
                          (long long)a->at, (long long)a->n);
        for (int k = 0; k < i && !err; k++)
            if (a->n > 0 && table[k].n > 0 && !apart(a->dst, a->n * size, table[k].dst, table[k].n * size))
                err = zr_fail(ZERO_ERR_ARG, "sum_ranges: sums %d and %d overlap: not allowed", k, i);
    }
    return err;
}

static int check_precision(const struct zr_update *u, int n_states)
{
    const struct zr_rounding *r = &u->rounding;
    const bool q8 = u->moments == ZERO_MOMENTS_Q8 && n_states > 0;
    if (u->masters != ZERO_MASTERS_F32 && (!u->param || u->param_dtype != ZERO_BF16))
        return zr_fail(ZERO_ERR_ARG, "update: without fp32 masters, param must be bf16");
    if (u->masters == ZERO_MASTERS_REMAINDER && !u->remainder)
        return zr_fail(ZERO_ERR_ARG, "update: remainder is NULL, and masters need it");
    for (int i = 0; q8 && i < n_states; i++)
        if (!u->scale[i])
            return zr_fail(ZERO_ERR_ARG, "update: scale[%d] is NULL, and 8-bit states need it", i);
    if (q8 &&
        (r->first % ZR_Q8_BLOCK || r->at % ZR_Q8_BLOCK || r->run % ZR_Q8_BLOCK || r->skip % ZR_Q8_BLOCK))
        return zr_fail(
            ZERO_ERR_ARG,
            "update: 8-bit states begin at element %lld, with runs of %lld: must be multiples of %d",
            (long long)r->first, (long long)r->run, ZR_Q8_BLOCK);
    return 0;
}

int zr_check_update(const struct zr_update *u)
{
    int err = zr_check_count("update", "n", u->n);
    if (!err)
        err = zr_check_dtype("update", u->grad_dtype);
    if (!err && u->param)
        err = zr_check_dtype("update", u->param_dtype);
    const struct zr_optimizer_kind *kind = zr_optimizer_kind(u->kind);
    if (!err && !kind)
        err = zr_fail(ZERO_ERR_ARG, "update: kind is %d, must be 1 to %d", (int)u->kind,
                      ZR_OPTIMIZER_COUNT - 1);
    int n_states = err || u->n == 0 ? 0 : zr_optimizer_states(u->kind, u->beta1);
    for (int i = 0; !err && i < n_states; i++)
        if (!u->state[i])
            err = zr_fail(ZERO_ERR_ARG, "update: state[%d] is NULL, and %s keeps its %s there", i, kind->name,
                          kind->state[i]);
    return err || u->n == 0 ? err : check_precision(u, n_states);
}

int zr_check_update_spans(const struct zr_update *u, const struct zr_update_span *spans, int n_spans)
{
    if (n_spans < 0 || n_spans > ZR_MAX_SPANS)
        return zr_fail(ZERO_ERR_ARG, "update: %d spans, 0 to %d are allowed", n_spans, ZR_MAX_SPANS);
    int err = zr_check_update(u);
    for (int i = 0; i < n_spans && !err; i++) {
        const struct zr_update_span *a = &spans[i];
        if (a->n < 0 || a->first < 0 || a->n > u->n - a->first)
            err = zr_fail(ZERO_ERR_ARG,
                          "update: span %d has %lld elements from element %lld on, but there are %lld", i,
                          (long long)a->n, (long long)a->first, (long long)u->n);
        if (!err && u->moments == ZERO_MOMENTS_Q8 && a->first % ZR_Q8_BLOCK)
            err = zr_fail(ZERO_ERR_ARG, "update: span %d begins at element %lld: must be a multiple of %d", i,
                          (long long)a->first, ZR_Q8_BLOCK);
        for (int k = 0; k < i && !err; k++)
            if (a->n > 0 && spans[k].n > 0 && a->first < spans[k].first + spans[k].n &&
                spans[k].first < a->first + a->n)
                err = zr_fail(ZERO_ERR_ARG, "update: spans %d and %d overlap: not allowed", k, i);
    }
    return err;
}

int64_t zr_coding_bytes(enum zr_coding coding)
{
    return coding == ZR_CODING_WEIGHT || coding == ZR_CODING_REMAINDER ? 2 : 1;
}

int64_t zr_coding_bytes_beside(enum zr_coding coding, int64_t n)
{
    return coding == ZR_CODING_WEIGHT ? 0 : 2 * (coding == ZR_CODING_REMAINDER ? n : zr_q8_blocks(n));
}

int zr_check_coded(const char *op, const struct zr_coded *c, int64_t n)
{
    if ((unsigned)c->coding > ZR_CODING_Q8_SQUARES)
        return zr_fail(ZERO_ERR_ARG, "%s: coding is %d, must be 0 to %d", op, (int)c->coding,
                       ZR_CODING_Q8_SQUARES);
    if (n > 0 && c->coding != ZR_CODING_WEIGHT && !c->beside)
        return zr_fail(ZERO_ERR_ARG, "%s: beside is NULL, and coding %d needs it", op, (int)c->coding);
    return zr_check_count(op, "n", n);
}

void zr_update_advance(struct zr_update *u, int64_t by)
{
    const bool in_place = u->param == u->master;
    if (u->master)
        u->master += by;
    if (u->remainder)
        u->remainder += by;
    if (u->param)
        u->param = in_place ? (void *)u->master : (char *)u->param + by * zr_dtype_bytes(u->param_dtype);
    u->grad = (const char *)u->grad + by * zr_dtype_bytes(u->grad_dtype);
    for (int i = 0; i < ZR_OPTIMIZER_STATES; i++) {
        if (u->state[i])
            u->state[i] = (char *)u->state[i] + by * zr_moments_bytes(u->moments);
        if (u->scale[i])
            u->scale[i] += by / ZR_Q8_BLOCK;
    }
}

struct zr_update zr_update_of_span(const struct zr_update *u, const struct zr_update_span *span)
{
    struct zr_update part = *u;
    part.lr = span->lr;
    part.decay = span->decay;
    part.n = span->n;
    part.rounding = span->rounding;
    zr_update_advance(&part, span->first);
    return part;
}

static int check_carried(const char *op, int32_t n)
{
    if (n < 0 || n > ZR_MAX_CARRIED)
        return zr_fail(ZERO_ERR_ARG, "%s: %d carried values; 0 to %d are allowed", op, (int)n,
                       ZR_MAX_CARRIED);
    return 0;
}

int zr_check_agree_begin(const struct zr_agree_begin *b)
{
    return check_carried("agree_begin", b->n_carried);
}

int zr_check_agree_end(const struct zr_agree_end *e)
{
    if (e->n_averaged < 1 || e->n_ranks < e->n_averaged)
        return zr_fail(ZERO_ERR_ARG,
                       "agree_end: the mean of %d of %d ranks: at least 1 and at most all are allowed",
                       (int)e->n_averaged, (int)e->n_ranks);
    return check_carried("agree_end", e->n_carried);
}
