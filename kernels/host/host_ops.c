/* SPDX-License-Identifier: Apache-2.0 */
/* host_ops.c: the host's kernels as stream operations. Each packs its arguments into one closure. */
#include "kernels/agreement.h"
#include "kernels/host/host_device.h"
#include "kernels/op_check.h"

#include <stdlib.h>
#include <string.h>

int zr_host_call(struct zr_stream *s, void (*fn)(void *arg), const void *arg, size_t bytes)
{
    ZR_TRY(zr_check_call(bytes));
    zr_host_put_waiting(s, fn, arg, bytes);
    return 0;
}

/* The arguments of every kernel except update. Each uses what it needs. */
struct args {
    const struct zr_host_kernels *k;
    void *dst;
    const void *src;
    int64_t n;
    enum zero_dtype dst_dtype, src_dtype;
};

static void zero_op(void *arg)
{
    const struct args *a = arg;
    a->k->zero(a->dst, a->n);
}

int zr_host_zero(struct zr_stream *s, void *dst, int64_t bytes)
{
    struct args a = {.k = s->dev->kernels, .dst = dst, .n = bytes};
    ZR_TRY(zr_check_count("zero", "bytes", bytes));
    zr_host_put(s, zero_op, &a, sizeof a);
    return 0;
}

static void copy_op(void *arg)
{
    const struct args *a = arg;
    a->k->copy(a->dst, a->src, a->n);
}

int zr_host_copy(struct zr_stream *s, void *dst, const void *src, int64_t bytes)
{
    struct args a = {.k = s->dev->kernels, .dst = dst, .src = src, .n = bytes};
    ZR_TRY(zr_check_count("copy", "bytes", bytes));
    zr_host_put(s, copy_op, &a, sizeof a);
    return 0;
}

/* A table of copies. It does not fit into a closure, which carries its address. */
struct copies {
    const struct zr_host_kernels *k;
    int n;
    struct zr_copy_rows table[ZR_MAX_COPIES];
};

static void copy_rows_op(void *arg)
{
    struct copies *t = *(struct copies **)arg;
    for (int i = 0; i < t->n; i++) {
        const struct zr_copy_rows *c = &t->table[i];
        char *dst = c->dst;
        const char *src = c->src;
        for (int64_t left = c->bytes; left > 0; left -= c->row_bytes) {
            t->k->copy(dst, src, left < c->row_bytes ? left : c->row_bytes);
            if (left > c->row_bytes)
                dst += c->dst_stride, src += c->src_stride;
        }
    }
    free(t);
}

int zr_host_copy_rows(struct zr_stream *s, const struct zr_copy_rows *table, int n)
{
    int err = zr_check_copy_rows(table, n);
    if (err || n == 0)
        return err;
    struct copies *t = zr_host_take(s->dev, sizeof *t);
    if (!t)
        return zr_fail(ZERO_ERR_NOMEM, "copy_rows: no memory for %d copies", n);
    t->k = s->dev->kernels;
    t->n = n;
    memcpy(t->table, table, (size_t)n * sizeof *table);
    zr_host_put(s, copy_rows_op, &t, sizeof t);
    return 0;
}

static void cast_op(void *arg)
{
    const struct args *a = arg;
    a->k->cast(a->dst, a->dst_dtype, a->src, a->src_dtype, a->n);
}

int zr_host_cast(struct zr_stream *s, void *dst, enum zero_dtype dt, const void *src, enum zero_dtype st,
                 int64_t n)
{
    struct args a = {.k = s->dev->kernels, .dst = dst, .src = src, .n = n, .dst_dtype = dt, .src_dtype = st};
    ZR_TRY(zr_check_cast(dt, st, n));
    zr_host_put(s, cast_op, &a, sizeof a);
    return 0;
}

struct put_args {
    void *dst;
    int64_t bytes;
    unsigned char value[ZR_PUT_BYTES];
};

static void put_op(void *arg)
{
    const struct put_args *a = arg;
    memcpy(a->dst, a->value, (size_t)a->bytes);
}

int zr_host_put_value(struct zr_stream *s, void *dst, const void *src, int64_t bytes)
{
    struct put_args a = {.dst = dst, .bytes = bytes};
    ZR_TRY(zr_check_put(bytes));
    memcpy(a.value, src, (size_t)bytes);
    zr_host_put(s, put_op, &a, sizeof a);
    return 0;
}

static void stamp_op(void *arg)
{
    **(int64_t **)arg = zr_now_ns();
}

int zr_host_stamp(struct zr_stream *s, int64_t *out_ns)
{
    zr_host_put(s, stamp_op, &out_ns, sizeof out_ns);
    return 0;
}

static void add_op(void *arg)
{
    const struct args *a = arg;
    if (a->src_dtype == ZERO_F32)
        a->k->add(a->dst, a->src, a->n);
    else
        a->k->sum_tree(a->dst, &a->src, 1, a->src_dtype, a->n, true);
}

int zr_host_add(struct zr_stream *s, float *dst, const void *src, enum zero_dtype st, int64_t n)
{
    struct args a = {.k = s->dev->kernels, .dst = dst, .src = src, .n = n, .src_dtype = st};
    ZR_TRY(zr_check_dtype("add", st));
    ZR_TRY(zr_check_count("add", "n", n));
    zr_host_put(s, add_op, &a, sizeof a);
    return 0;
}

/* Sources of a tree. They do not fit into a closure, which carries their address. */
struct tree {
    struct args a;
    int n_src;
    bool accumulate;
    const void *src[ZR_MAX_SOURCES];
};

static void tree_op(void *arg)
{
    struct tree *t = *(struct tree **)arg;
    t->a.k->sum_tree(t->a.dst, t->src, t->n_src, t->a.src_dtype, t->a.n, t->accumulate);
    free(t);
}

int zr_host_sum_tree(struct zr_stream *s, float *dst, const void *const *src, int n_src, enum zero_dtype st,
                     int64_t n, bool accumulate)
{
    ZR_TRY(zr_check_sources("sum_tree", n_src, st, n));
    struct tree *t = zr_host_take(s->dev, sizeof *t);
    if (!t)
        return zr_fail(ZERO_ERR_NOMEM, "sum_tree: no memory for %d sources", n_src);
    t->a = (struct args){.k = s->dev->kernels, .dst = dst, .n = n, .src_dtype = st};
    t->n_src = n_src;
    t->accumulate = accumulate;
    memcpy(t->src, src, (size_t)n_src * sizeof *src);
    zr_host_put(s, tree_op, &t, sizeof t);
    return 0;
}

static void maximum_op(void *arg)
{
    struct tree *t = *(struct tree **)arg;
    t->a.k->maximum(t->a.dst, t->src, t->n_src, t->a.src_dtype, t->a.n);
    free(t);
}

int zr_host_maximum(struct zr_stream *s, void *dst, const void *const *src, int n_src, enum zero_dtype dtype,
                    int64_t n)
{
    ZR_TRY(zr_check_sources("maximum", n_src, dtype, n));
    struct tree *t = zr_host_take(s->dev, sizeof *t);
    if (!t)
        return zr_fail(ZERO_ERR_NOMEM, "maximum: no memory for %d sources", n_src);
    t->a = (struct args){.k = s->dev->kernels, .dst = dst, .n = n, .src_dtype = dtype};
    t->n_src = n_src;
    memcpy(t->src, src, (size_t)n_src * sizeof *src);
    zr_host_put(s, maximum_op, &t, sizeof t);
    return 0;
}

struct digest_args {
    struct args a;
    uint64_t first;
};

static void digest_op(void *arg)
{
    const struct digest_args *d = arg;
    d->a.k->digest(d->a.dst, d->a.src, d->a.n, d->first);
}

int zr_host_digest(struct zr_stream *s, uint64_t *sum, const void *at, int64_t bytes, uint64_t first)
{
    struct digest_args d = {.a = {.k = s->dev->kernels, .dst = sum, .src = at, .n = bytes}, .first = first};
    ZR_TRY(zr_check_count("digest", "bytes", bytes));
    zr_host_put(s, digest_op, &d, sizeof d);
    return 0;
}

struct sums {
    const struct zr_host_kernels *k;
    int n_sums, n_src;
    enum zero_dtype src_dtype;
    struct zr_sum_range table[ZR_MAX_SUMS];
    const char *src[ZR_MAX_SOURCES];
};

static void sum_ranges_op(void *arg)
{
    struct sums *t = *(struct sums **)arg;
    for (int i = 0; i < t->n_sums; i++) {
        const struct zr_sum_range *r = &t->table[i];
        const void *src[ZR_MAX_SOURCES];
        for (int j = 0; j < t->n_src; j++)
            src[j] = t->src[j] + r->at * zr_dtype_bytes(t->src_dtype);
        t->k->sum_tree(r->dst, src, t->n_src, t->src_dtype, r->n, r->accumulate);
    }
    free(t);
}

int zr_host_sum_ranges(struct zr_stream *s, const struct zr_sum_range *table, int n_sums,
                       const void *const *src, int n_src, enum zero_dtype st)
{
    int err = zr_check_sum_ranges(table, n_sums, n_src, st);
    if (err || n_sums == 0)
        return err;
    struct sums *t = zr_host_take(s->dev, sizeof *t);
    if (!t)
        return zr_fail(ZERO_ERR_NOMEM, "sum_ranges: no memory for %d sums", n_sums);
    t->k = s->dev->kernels;
    t->n_sums = n_sums;
    t->n_src = n_src;
    t->src_dtype = st;
    memcpy(t->table, table, (size_t)n_sums * sizeof *table);
    memcpy(t->src, src, (size_t)n_src * sizeof *src);
    zr_host_put(s, sum_ranges_op, &t, sizeof t);
    return 0;
}

struct squares_args {
    struct args a;
    struct zr_largest largest;
};

static void sum_squares_op(void *arg)
{
    const struct squares_args *q = arg;
    const struct args *a = &q->a;
    a->k->sum_squares(a->dst, a->src, a->src_dtype, a->n);
    if (q->largest.word)
        zr_largest_record(&q->largest, a->dst, a->src, a->src_dtype, a->n);
}

int zr_host_sum_squares(struct zr_stream *s, struct zr_exact_sum *acc, const void *x, enum zero_dtype dtype,
                        int64_t n, const struct zr_largest *largest)
{
    struct squares_args a = {.a = {.k = s->dev->kernels, .dst = acc, .src = x, .n = n, .src_dtype = dtype}};
    if (largest)
        a.largest = *largest;
    ZR_TRY(zr_check_dtype("sum_squares", dtype));
    ZR_TRY(zr_check_count("sum_squares", "n", n));
    zr_host_put(s, sum_squares_op, &a, sizeof a);
    return 0;
}

static void scale_op(void *arg)
{
    const struct args *a = arg;
    const struct zr_step_scalars *scalars = a->src;
    if (!scalars->skip)
        a->k->scale(a->dst, a->n, scalars->grad_scale);
}

int zr_host_scale(struct zr_stream *s, float *x, int64_t n, const struct zr_step_scalars *scalars)
{
    struct args a = {.k = s->dev->kernels, .dst = x, .src = scalars, .n = n};
    ZR_TRY(zr_check_count("scale", "n", n));
    zr_host_put(s, scale_op, &a, sizeof a);
    return 0;
}

struct update_args {
    const struct zr_host_kernels *k;
    struct zr_update u;
};
_Static_assert(sizeof(struct update_args) <= ZR_CALL_BYTES, "an update must fit into a closure");

static void update_op(void *arg)
{
    const struct update_args *a = arg;
    a->k->update(&a->u);
}

int zr_host_update(struct zr_stream *s, const struct zr_update *u)
{
    struct update_args a = {.k = s->dev->kernels, .u = *u};
    ZR_TRY(zr_check_update(u));
    zr_host_put(s, update_op, &a, sizeof a);
    return 0;
}

/* Puts one operation per span. On the host an operation costs little, and needs no memory. */
int zr_host_update_spans(struct zr_stream *s, const struct zr_update *u, const struct zr_update_span *spans,
                         int n_spans)
{
    int err = zr_check_update_spans(u, spans, n_spans);
    for (int i = 0; !err && i < n_spans; i++) {
        const struct zr_update part = zr_update_of_span(u, &spans[i]);
        err = zr_host_update(s, &part);
    }
    return err;
}

struct rounded_args {
    struct args a;
    struct zr_rounding rounding;
};

static void add_rounded_op(void *arg)
{
    const struct rounded_args *r = arg;
    r->a.k->add_rounded(r->a.dst, r->a.src, r->a.n, &r->rounding);
}

int zr_host_add_rounded(struct zr_stream *s, uint16_t *dst, const float *src, int64_t n,
                        const struct zr_rounding *rounding)
{
    struct rounded_args r = {{.k = s->dev->kernels, .dst = dst, .src = src, .n = n}, *rounding};
    ZR_TRY(zr_check_count("add_rounded", "n", n));
    zr_host_put(s, add_rounded_op, &r, sizeof r);
    return 0;
}

struct coded_args {
    struct args a;
    struct zr_coded coded;
};

static void encode_op(void *arg)
{
    const struct coded_args *c = arg;
    c->a.k->encode(&c->coded, c->a.src, c->a.n);
}

int zr_host_encode(struct zr_stream *s, const struct zr_coded *to, const float *src, int64_t n)
{
    struct coded_args c = {{.k = s->dev->kernels, .src = src, .n = n}, *to};
    ZR_TRY(zr_check_coded("encode", to, n));
    zr_host_put(s, encode_op, &c, sizeof c);
    return 0;
}

static void decode_op(void *arg)
{
    const struct coded_args *c = arg;
    c->a.k->decode(c->a.dst, &c->coded, c->a.n);
}

int zr_host_decode(struct zr_stream *s, float *dst, const struct zr_coded *from, int64_t n)
{
    struct coded_args c = {{.k = s->dev->kernels, .dst = dst, .n = n}, *from};
    ZR_TRY(zr_check_coded("decode", from, n));
    zr_host_put(s, decode_op, &c, sizeof c);
    return 0;
}

static void agree_write_op(void *arg)
{
    zr_agree_write(arg);
}
_Static_assert(sizeof(struct zr_agree_begin) <= ZR_CALL_BYTES, "must fit into a closure");

int zr_host_agree_begin(struct zr_stream *s, const struct zr_agree_begin *b)
{
    ZR_TRY(zr_check_agree_begin(b));
    zr_host_put(s, agree_write_op, b, sizeof *b);
    return 0;
}

static void agree_read_op(void *arg)
{
    zr_agree_read(arg);
}
_Static_assert(sizeof(struct zr_agree_end) <= ZR_CALL_BYTES, "must fit into a closure");

int zr_host_agree_end(struct zr_stream *s, const struct zr_agree_end *e)
{
    ZR_TRY(zr_check_agree_end(e));
    zr_host_put(s, agree_read_op, e, sizeof *e);
    return 0;
}
