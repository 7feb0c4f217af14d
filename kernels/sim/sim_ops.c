/* SPDX-License-Identifier: Apache-2.0 */
/* sim_ops.c: the simulated device's operations, which it puts on a stream. sim_effect.c runs them. */
#include "kernels/agreement.h"
#include "kernels/op_check.h"
#include "kernels/sim/sim_device_inside.h"

#include <stdlib.h>
#include <string.h>

static struct zr_sim_op *new_call(struct zr_stream *s, const char *name, void (*fn)(void *), const void *arg,
                                  size_t arg_bytes)
{
    struct zr_sim_op *op = zr_sim_op_new(s, ZR_SIM_OP_CALL, name);
    op->fn = fn;
    op->access = s->declared;
    op->n = s->n_declared;
    s->declared = NULL;
    s->n_declared = 0;
    memcpy(op->copy, arg, arg_bytes);
    return op;
}

static int call(struct zr_stream *s, void (*fn)(void *), const void *arg, size_t arg_bytes)
{
    if (arg_bytes > ZR_CALL_BYTES)
        return zr_fail(ZERO_ERR_ARG, "sim: a call's argument has %zu bytes; allowed: %d", arg_bytes,
                       ZR_CALL_BYTES);
    return zr_sim_op_put(s, new_call(s, "call", fn, arg, arg_bytes));
}

static void declare(struct zr_device *dev, struct zr_stream *s, const struct zr_access *a, int n)
{
    struct zr_sim *w = zr_sim_device_of(dev)->w;
    if (!s) {
        zr_sim_begin(w, w->host, "host", w->host->unit, w->host->step);
        zr_shadow_touch(&w->rec, w->host, a, n);
        return;
    }
    free(s->declared);
    s->n_declared = n;
    s->declared = malloc((size_t)n * sizeof *a);
    if (!s->declared)
        abort();
    memcpy(s->declared, a, (size_t)n * sizeof *a);
}

static int zero(struct zr_stream *s, void *dst, int64_t bytes)
{
    if (zr_sim_dropped(s->dev->w, ZR_SIM_CLEAR, s->dev->rank, NULL, s))
        return 0;
    struct zr_sim_op *op = zr_sim_op_new(s, ZR_SIM_OP_ZERO, "zero");
    op->dst = dst;
    op->count = bytes;
    return zr_sim_op_put(s, op);
}

static int copy(struct zr_stream *s, void *dst, const void *src, int64_t bytes)
{
    struct zr_sim_op *op = zr_sim_op_new(s, ZR_SIM_OP_COPY, "copy");
    op->dst = dst;
    op->src = src;
    op->count = bytes;
    return zr_sim_op_put(s, op);
}

/* Makes one copy after the other. For ranges and contents this is the same. */
static int copy_rows(struct zr_stream *s, const struct zr_copy_rows *table, int n)
{
    int err = zr_check_copy_rows(table, n);
    for (int i = 0; i < n && !err; i++) {
        const struct zr_copy_rows *c = &table[i];
        for (int64_t row = 0, left = c->bytes; left > 0 && !err; row++, left -= c->row_bytes)
            err = copy(s, (char *)c->dst + row * c->dst_stride, (const char *)c->src + row * c->src_stride,
                       left < c->row_bytes ? left : c->row_bytes);
    }
    return err;
}

static int cast(struct zr_stream *s, void *dst, enum zero_dtype dt, const void *src, enum zero_dtype st,
                int64_t n)
{
    struct zr_sim_op *op = zr_sim_op_new(s, ZR_SIM_OP_CAST, "cast");
    op->dst = dst;
    op->dst_type = dt;
    op->src = src;
    op->src_type = st;
    op->count = n;
    return zr_sim_op_put(s, op);
}

static int put_add(struct zr_stream *s, void *dst, enum zero_dtype dt, const void *src, enum zero_dtype st,
                   int64_t n)
{
    struct zr_sim_op *op = zr_sim_op_new(s, ZR_SIM_OP_ADD, "add");
    op->dst = dst;
    op->dst_type = dt;
    op->src = src;
    op->src_type = st;
    op->count = n;
    return zr_sim_op_put(s, op);
}

static int add(struct zr_stream *s, float *dst, const void *src, enum zero_dtype st, int64_t n)
{
    return put_add(s, dst, ZERO_F32, src, st, n);
}

/* Adds one source after the other. For ranges and contents this is the same. */
static int sum_tree(struct zr_stream *s, float *dst, const void *const *src, int n_src, enum zero_dtype st,
                    int64_t n, bool accumulate)
{
    int err = accumulate ? 0 : zero(s, dst, n * (int64_t)sizeof *dst);
    for (int i = 0; i < n_src && !err; i++)
        err = add(s, dst, src[i], st, n);
    return err;
}

static int sum_ranges(struct zr_stream *s, const struct zr_sum_range *table, int n_sums,
                      const void *const *src, int n_src, enum zero_dtype st)
{
    int err = zr_check_sum_ranges(table, n_sums, n_src, st);
    for (int i = 0; i < n_sums && !err; i++) {
        const void *from[ZR_MAX_SOURCES];
        for (int j = 0; j < n_src; j++)
            from[j] = (const char *)src[j] + table[i].at * zr_dtype_bytes(st);
        err = sum_tree(s, table[i].dst, from, n_src, st, table[i].n, table[i].accumulate);
    }
    return err;
}

/* Puts a call of a function of this file, with the ranges that it touches. */
static int call_with(struct zr_stream *s, const char *name, void (*fn)(void *), const void *arg,
                     size_t arg_bytes, const struct zr_access *a, int n)
{
    declare(&s->dev->base, s, a, n);
    struct zr_sim_op *op = new_call(s, name, fn, arg, arg_bytes);
    return zr_sim_op_put(s, op);
}

struct value {
    void *dst;
    int64_t bytes;
    unsigned char value[ZR_PUT_BYTES];
};

static void put_value(void *arg)
{
    const struct value *v = arg;
    memcpy(v->dst, v->value, (size_t)v->bytes);
}

static int put_op(struct zr_stream *s, void *dst, const void *src, int64_t bytes)
{
    struct value v = {.dst = dst, .bytes = bytes};
    if (bytes > ZR_PUT_BYTES)
        return zr_fail(ZERO_ERR_ARG, "sim: put of %lld bytes; allowed: %d", (long long)bytes, ZR_PUT_BYTES);
    memcpy(v.value, src, (size_t)bytes);
    struct zr_access a = {dst, bytes, true};
    return call_with(s, "put", put_value, &v, sizeof v, &a, 1);
}

static void agree_write_value(void *arg)
{
    zr_agree_write(arg);
}

static int agree_begin(struct zr_stream *s, const struct zr_agree_begin *b)
{
    const struct zr_access a[] = {{b->own, sizeof *b->own, false}, {b->out, sizeof *b->out, true}};
    ZR_TRY(zr_check_agree_begin(b));
    return call_with(s, "agree_begin", agree_write_value, b, sizeof *b, a, 2);
}

static void agree_read_value(void *arg)
{
    zr_agree_read(arg);
}

static int agree_end(struct zr_stream *s, const struct zr_agree_end *e)
{
    const struct zr_access a[] = {{e->all, sizeof *e->all, false},
                                  {e->scalars, sizeof *e->scalars, true},
                                  {e->agreed, sizeof *e->agreed, true}};
    ZR_TRY(zr_check_agree_end(e));
    return call_with(s, "agree_end", agree_read_value, e, sizeof *e, a, 3);
}

struct stamping {
    struct zr_line *line;
    int64_t *out_ns;
};

static void stamp_value(void *arg)
{
    const struct stamping *m = arg;
    *m->out_ns = zr_sim_now(m->line);
}

static int stamp(struct zr_stream *s, int64_t *out_ns)
{
    struct stamping m = {s->line, out_ns};
    struct zr_access a = {out_ns, sizeof *out_ns, true};
    return call_with(s, "stamp", stamp_value, &m, sizeof m, &a, 1);
}

static int sum_squares(struct zr_stream *s, struct zr_exact_sum *acc, const void *x, enum zero_dtype dtype,
                       int64_t n, const struct zr_largest *largest)
{
    struct zr_sim_op *op = zr_sim_op_new(s, ZR_SIM_OP_SQUARES, "sum_squares");
    op->dst = acc;
    op->src = x;
    op->src_type = dtype;
    op->count = n;
    op->largest = largest ? *largest : (struct zr_largest){.word = NULL};
    op->goes_on = s->last == ZR_SIM_OP_SQUARES;
    return zr_sim_op_put(s, op);
}

struct maximum {
    void *dst;
    enum zero_dtype dtype;
    int n_src;
    int64_t n;
    const void *src[8];
};

/* Programs of the simulation use real numbers for it. */
static void take_maximum(void *arg)
{
    const struct maximum *m = arg;
    zr_host_kernels(ZR_ISA_PORTABLE)->maximum(m->dst, m->src, m->n_src, m->dtype, m->n);
}

static int maximum(struct zr_stream *s, void *dst, const void *const *src, int n_src, enum zero_dtype dtype,
                   int64_t n)
{
    struct maximum m = {.dst = dst, .dtype = dtype, .n_src = n_src, .n = n};
    struct zr_access a[1 + sizeof m.src / sizeof *m.src];
    const int64_t bytes = n * zr_dtype_bytes(dtype);
    if (n_src > (int)(sizeof m.src / sizeof *m.src))
        return zr_fail(ZERO_ERR_NOTSUP, "sim: a maximum of %d sources; allowed: 8", n_src);
    for (int i = 0; i < n_src; i++) {
        m.src[i] = src[i];
        a[i] = (struct zr_access){src[i], bytes, false};
    }
    a[n_src] = (struct zr_access){dst, bytes, true};
    return call_with(s, "maximum", take_maximum, &m, sizeof m, a, n_src + 1);
}

static void leave_digest(void *arg)
{
    (void)arg;
}

/* The memory has no values here, so that all digests stay as they are. */
static int digest(struct zr_stream *s, uint64_t *sum, const void *at, int64_t bytes, uint64_t first)
{
    const struct zr_access a[] = {{at, bytes, false}, {sum, sizeof *sum, false}, {sum, sizeof *sum, true}};
    return call_with(s, "digest", leave_digest, &first, sizeof first, a, 3);
}

static int scale(struct zr_stream *s, float *x, int64_t n, const struct zr_step_scalars *scalars)
{
    struct zr_sim_op *op = zr_sim_op_new(s, ZR_SIM_OP_SCALE, "scale");
    op->dst = x;
    op->count = n;
    op->scalars = scalars;
    return zr_sim_op_put(s, op);
}

static int put_update(struct zr_stream *s, const struct zr_update *u, bool goes_on)
{
    struct zr_sim_op *op = zr_sim_op_new(s, ZR_SIM_OP_UPDATE, "update");
    op->update = *u;
    op->goes_on = goes_on;
    return zr_sim_op_put(s, op);
}

static int update(struct zr_stream *s, const struct zr_update *u)
{
    return put_update(s, u, false);
}

static int update_spans(struct zr_stream *s, const struct zr_update *u, const struct zr_update_span *spans,
                        int n_spans)
{
    int err = zr_check_update_spans(u, spans, n_spans);
    for (int i = 0; i < n_spans && !err; i++) {
        const struct zr_update part = zr_update_of_span(u, &spans[i]);
        err = put_update(s, &part, i > 0);
    }
    return err;
}

static int add_rounded(struct zr_stream *s, uint16_t *dst, const float *src, int64_t n,
                       const struct zr_rounding *rounding)
{
    (void)rounding;
    return put_add(s, dst, ZERO_BF16, src, ZERO_F32, n);
}

static int encode(struct zr_stream *s, const struct zr_coded *to, const float *src, int64_t n)
{
    ZR_TRY(zr_check_coded("encode", to, n));
    struct zr_sim_op *op = zr_sim_op_new(s, ZR_SIM_OP_ENCODE, "encode");
    op->coded = *to;
    op->src = src;
    op->count = n;
    return zr_sim_op_put(s, op);
}

static int decode(struct zr_stream *s, float *dst, const struct zr_coded *from, int64_t n)
{
    ZR_TRY(zr_check_coded("decode", from, n));
    struct zr_sim_op *op = zr_sim_op_new(s, ZR_SIM_OP_DECODE, "decode");
    op->dst = dst;
    op->coded = *from;
    op->count = n;
    return zr_sim_op_put(s, op);
}

int zr_sim_compute(struct zr_stream *s, const char *name, const struct zr_sim_touch *touch, int n, int64_t ns)
{
    struct zr_sim_op *op = zr_sim_op_new(s, ZR_SIM_OP_COMPUTE, name);
    op->touch = malloc((size_t)(n + 1) * sizeof *touch);
    if (!op->touch)
        abort();
    memcpy(op->touch, touch, (size_t)n * sizeof *touch);
    op->n = n;
    op->ns = ns;
    return zr_sim_op_put(s, op);
}

int zr_sim_put(struct zr_stream *s, const char *name, int32_t unit, uint32_t step,
               bool (*start)(void *arg, struct zr_stream *s), void *arg)
{
    struct zr_sim_op *op = zr_sim_op_new(s, ZR_SIM_OP_TOGETHER, name);
    op->unit = unit;
    op->step = step;
    op->start = start;
    op->arg = arg;
    return zr_sim_op_put(s, op);
}

const struct zr_device_ops zr_sim_ops = {
    .name = "sim",
    .close = zr_sim_device_close,
    .alloc = zr_sim_alloc,
    .host_memory = true,
    .free = zr_sim_free,
    .host_alloc = zr_sim_alloc,
    .host_free = zr_sim_free,
    .stream_open = zr_sim_stream_open,
    .stream_close = zr_sim_stream_close,
    .stream_sync = zr_sim_stream_sync,
    .stream_native = zr_sim_stream_native,
    .event_open = zr_sim_event_open,
    .event_close = zr_sim_event_close,
    .event_record = zr_sim_event_record,
    .stream_wait = zr_sim_stream_wait,
    .event_sync = zr_sim_event_sync,
    .event_query = zr_sim_event_query,
    .call = call,
    .declare = declare,
    .stamp = stamp,
    .zero = zero,
    .copy = copy,
    .copy_rows = copy_rows,
    .put = put_op,
    .cast = cast,
    .add = add,
    .sum_tree = sum_tree,
    .sum_ranges = sum_ranges,
    .sum_squares = sum_squares,
    .maximum = maximum,
    .digest = digest,
    .scale = scale,
    .update = update,
    .update_spans = update_spans,
    .add_rounded = add_rounded,
    .encode = encode,
    .decode = decode,
    .agree_begin = agree_begin,
    .agree_end = agree_end,
};
