/* SPDX-License-Identifier: Apache-2.0 */
/* check_device.c: the checking device: memory and operations, which it records and passes on, and the faults
 * found. */
#include "kernels/agreement.h"
#include "kernels/alloc.h"
#include "kernels/check/check_device_inside.h"
#include "kernels/op_check.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- memory ---- */

static void device_close(struct zr_device *dev)
{
    (void)dev; /* zr_check_close */
}

/* Adds memory that was just allocated to the record, or frees it if that fails. */
static int watch(struct zr_check *c, int err, const char *name, int64_t bytes, void **p,
                 void (*give_back)(struct zr_device *dev, void *p, int64_t bytes))
{
    if (err)
        return err;
    err = zr_check_add(c, name, *p, bytes);
    if (err) {
        give_back(c->inner, *p, bytes);
        *p = NULL;
    }
    return err;
}

static int device_alloc(struct zr_device *dev, int64_t bytes, void **out)
{
    struct zr_check *c = zr_check_of(dev);
    const struct zr_device_ops *d = c->inner->ops;
    return watch(c, d->alloc(c->inner, bytes, out), "device memory", bytes, out, d->free);
}

static void device_free(struct zr_device *dev, void *p, int64_t bytes)
{
    struct zr_check *c = zr_check_of(dev);
    zr_check_remove(c, p);
    c->inner->ops->free(c->inner, p, bytes);
}

static int host_alloc(struct zr_device *dev, int64_t bytes, void **out)
{
    struct zr_check *c = zr_check_of(dev);
    const struct zr_device_ops *d = c->inner->ops;
    return watch(c, d->host_alloc(c->inner, bytes, out), "host memory", bytes, out, d->host_free);
}

static void host_free(struct zr_device *dev, void *p, int64_t bytes)
{
    struct zr_check *c = zr_check_of(dev);
    zr_check_remove(c, p);
    c->inner->ops->host_free(c->inner, p, bytes);
}

static int memory(struct zr_device *dev, int64_t *free_bytes, int64_t *total_bytes)
{
    struct zr_device *inner = zr_check_of(dev)->inner;
    return inner->ops->memory(inner, free_bytes, total_bytes);
}

static int thread_begin(struct zr_device *dev)
{
    return zr_thread_begin(zr_check_of(dev)->inner);
}

int zr_check_add(struct zr_check *c, const char *name, const void *at, int64_t bytes)
{
    pthread_mutex_lock(&c->lock);
    int err = zr_shadow_add(&c->rec, c->rank, name, at, bytes);
    pthread_mutex_unlock(&c->lock);
    return err;
}

void zr_check_remove(struct zr_check *c, const void *at)
{
    pthread_mutex_lock(&c->lock);
    zr_shadow_remove(&c->rec, at);
    pthread_mutex_unlock(&c->lock);
}

/* ---- operations ---- */

static int call(struct zr_stream *s, void (*fn)(void *arg), const void *arg, size_t arg_bytes)
{
    struct zr_line *l = zr_check_issue(s, "call");
    zr_shadow_touch(&s->check->rec, l, s->declared, s->n_declared);
    s->n_declared = 0;
    zr_check_issued(s);
    return s->check->inner->ops->call(s->inner, fn, arg, arg_bytes);
}

static void declare(struct zr_device *dev, struct zr_stream *s, const struct zr_access *a, int n)
{
    struct zr_check *c = zr_check_of(dev);
    pthread_mutex_lock(&c->lock);
    if (!s) {
        struct zr_line *host = zr_check_host_line(c);
        zr_line_begin(&c->rec, host, "host", host->during, host->unit, host->step);
        zr_shadow_touch(&c->rec, host, a, n);
    } else {
        struct zr_access *more = realloc(s->declared, (size_t)n * sizeof *more);
        c->rec.broken |= !more;
        if (more) {
            memcpy(more, a, (size_t)n * sizeof *more);
            s->declared = more;
            s->n_declared = n;
        }
    }
    pthread_mutex_unlock(&c->lock);
}

/* Records an operation that reads and writes these ranges; either may be NULL. With adds, it also reads what
 * it writes. */
static void note(struct zr_stream *s, const char *name, const void *read, int64_t n_read, const void *written,
                 int64_t n_written, bool adds)
{
    struct zr_line *l = zr_check_issue(s, name);
    struct zr_recorder *rec = &s->check->rec;
    if (read)
        zr_shadow_read(rec, l, read, n_read);
    if (adds)
        zr_shadow_read(rec, l, written, n_written);
    if (written)
        zr_shadow_write(rec, l, written, n_written);
    zr_check_issued(s);
}

static int zero(struct zr_stream *s, void *dst, int64_t bytes)
{
    note(s, "zero", NULL, 0, dst, bytes, false);
    return s->check->inner->ops->zero(s->inner, dst, bytes);
}

static int copy(struct zr_stream *s, void *dst, const void *src, int64_t bytes)
{
    note(s, "copy", src, bytes, dst, bytes, false);
    return s->check->inner->ops->copy(s->inner, dst, src, bytes);
}

static int copy_rows(struct zr_stream *s, const struct zr_copy_rows *table, int n)
{
    ZR_TRY(zr_check_copy_rows(table, n));
    struct zr_line *l = zr_check_issue(s, "copy_rows");
    struct zr_recorder *rec = &s->check->rec;
    for (int i = 0; i < n; i++) {
        const struct zr_copy_rows *c = &table[i];
        for (int64_t row = 0, left = c->bytes; left > 0; row++, left -= c->row_bytes) {
            int64_t bytes = left < c->row_bytes ? left : c->row_bytes;
            zr_shadow_read(rec, l, (const char *)c->src + row * c->src_stride, bytes);
            zr_shadow_write(rec, l, (char *)c->dst + row * c->dst_stride, bytes);
        }
    }
    zr_check_issued(s);
    return s->check->inner->ops->copy_rows(s->inner, table, n);
}

static int cast(struct zr_stream *s, void *dst, enum zero_dtype dt, const void *src, enum zero_dtype st,
                int64_t n)
{
    ZR_TRY(zr_check_cast(dt, st, n));
    note(s, "cast", src, n * zr_dtype_bytes(st), dst, n * zr_dtype_bytes(dt), false);
    return s->check->inner->ops->cast(s->inner, dst, dt, src, st, n);
}

static int put(struct zr_stream *s, void *dst, const void *src, int64_t bytes)
{
    note(s, "put", NULL, 0, dst, bytes, false);
    return s->check->inner->ops->put(s->inner, dst, src, bytes);
}

static int stamp(struct zr_stream *s, int64_t *out_ns)
{
    note(s, "stamp", NULL, 0, out_ns, sizeof *out_ns, false);
    return s->check->inner->ops->stamp(s->inner, out_ns);
}

static int add(struct zr_stream *s, float *dst, const void *src, enum zero_dtype st, int64_t n)
{
    ZR_TRY(zr_check_dtype("add", st));
    ZR_TRY(zr_check_count("add", "n", n));
    note(s, "add", src, n * zr_dtype_bytes(st), dst, n * (int64_t)sizeof *dst, true);
    return s->check->inner->ops->add(s->inner, dst, src, st, n);
}

static int sum_tree(struct zr_stream *s, float *dst, const void *const *src, int n_src, enum zero_dtype st,
                    int64_t n, bool accumulate)
{
    ZR_TRY(zr_check_sources("sum_tree", n_src, st, n));
    struct zr_line *l = zr_check_issue(s, "sum_tree");
    for (int i = 0; i < n_src; i++)
        zr_shadow_read(&s->check->rec, l, src[i], n * zr_dtype_bytes(st));
    if (accumulate)
        zr_shadow_read(&s->check->rec, l, dst, n * (int64_t)sizeof *dst);
    zr_shadow_write(&s->check->rec, l, dst, n * (int64_t)sizeof *dst);
    zr_check_issued(s);
    return s->check->inner->ops->sum_tree(s->inner, dst, src, n_src, st, n, accumulate);
}

static int sum_ranges(struct zr_stream *s, const struct zr_sum_range *table, int n_sums,
                      const void *const *src, int n_src, enum zero_dtype st)
{
    ZR_TRY(zr_check_sum_ranges(table, n_sums, n_src, st));
    struct zr_line *l = zr_check_issue(s, "sum_ranges");
    struct zr_recorder *rec = &s->check->rec;
    int64_t size = zr_dtype_bytes(st);
    for (int i = 0; i < n_sums; i++) {
        const struct zr_sum_range *r = &table[i];
        for (int j = 0; j < n_src; j++)
            zr_shadow_read(rec, l, (const char *)src[j] + r->at * size, r->n * size);
        if (r->accumulate)
            zr_shadow_read(rec, l, r->dst, r->n * (int64_t)sizeof *r->dst);
        zr_shadow_write(rec, l, r->dst, r->n * (int64_t)sizeof *r->dst);
    }
    zr_check_issued(s);
    return s->check->inner->ops->sum_ranges(s->inner, table, n_sums, src, n_src, st);
}

static int agree_begin(struct zr_stream *s, const struct zr_agree_begin *b)
{
    const struct zr_access used[] = {{b->own, sizeof *b->own, false}, {b->out, sizeof *b->out, true}};
    ZR_TRY(zr_check_agree_begin(b));
    struct zr_line *l = zr_check_issue(s, "agree_begin");
    zr_shadow_touch(&s->check->rec, l, used, 2);
    zr_check_issued(s);
    return s->check->inner->ops->agree_begin(s->inner, b);
}

static int agree_end(struct zr_stream *s, const struct zr_agree_end *e)
{
    const struct zr_access used[] = {{e->all, sizeof *e->all, false},
                                     {e->scalars, sizeof *e->scalars, true},
                                     {e->agreed, sizeof *e->agreed, true}};
    ZR_TRY(zr_check_agree_end(e));
    struct zr_line *l = zr_check_issue(s, "agree_end");
    zr_shadow_touch(&s->check->rec, l, used, 3);
    zr_check_issued(s);
    return s->check->inner->ops->agree_end(s->inner, e);
}

static int sum_squares(struct zr_stream *s, struct zr_exact_sum *acc, const void *x, enum zero_dtype dtype,
                       int64_t n, const struct zr_largest *largest)
{
    ZR_TRY(zr_check_dtype("sum_squares", dtype));
    struct zr_line *l = zr_check_issue(s, "sum_squares");
    const struct zr_access used[] = {
        {x, n * zr_dtype_bytes(dtype), false}, {acc, sizeof *acc, false}, {acc, sizeof *acc, true}};
    zr_shadow_touch(&s->check->rec, l, used, 3);
    if (largest) {
        zr_shadow_read(&s->check->rec, l, largest->word, sizeof *largest->word);
        zr_shadow_write(&s->check->rec, l, largest->word, sizeof *largest->word);
    }
    zr_check_issued(s);
    return s->check->inner->ops->sum_squares(s->inner, acc, x, dtype, n, largest);
}

static int maximum(struct zr_stream *s, void *dst, const void *const *src, int n_src, enum zero_dtype dtype,
                   int64_t n)
{
    ZR_TRY(zr_check_sources("maximum", n_src, dtype, n));
    const int64_t bytes = n * zr_dtype_bytes(dtype);
    struct zr_line *l = zr_check_issue(s, "maximum");
    for (int i = 0; i < n_src; i++)
        zr_shadow_read(&s->check->rec, l, src[i], bytes);
    zr_shadow_write(&s->check->rec, l, dst, bytes);
    zr_check_issued(s);
    return s->check->inner->ops->maximum(s->inner, dst, src, n_src, dtype, n);
}

static int digest(struct zr_stream *s, uint64_t *sum, const void *at, int64_t bytes, uint64_t first)
{
    ZR_TRY(zr_check_count("digest", "bytes", bytes));
    note(s, "digest", at, bytes, sum, sizeof *sum, true);
    return s->check->inner->ops->digest(s->inner, sum, at, bytes, first);
}

static int scale(struct zr_stream *s, float *x, int64_t n, const struct zr_step_scalars *scalars)
{
    note(s, "scale", scalars, sizeof *scalars, x, n * (int64_t)sizeof *x, true);
    return s->check->inner->ops->scale(s->inner, x, n, scalars);
}

static void touch_update(struct zr_stream *s, struct zr_line *l, const struct zr_update *u)
{
    const int64_t bytes = u->n * (int64_t)sizeof(float);
    const int64_t scale_bytes = zr_q8_blocks(u->n) * (int64_t)sizeof *u->scale[0];
    struct zr_access used[] = {{u->scalars, sizeof *u->scalars, false},
                               {u->grad, u->n * zr_dtype_bytes(u->grad_dtype), false},
                               {u->master, bytes, true},
                               {u->remainder, u->n * (int64_t)sizeof *u->remainder, true},
                               {u->param, u->param ? u->n * zr_dtype_bytes(u->param_dtype) : 0, true}};
    for (size_t i = 0; i < sizeof used / sizeof *used; i++)
        if (used[i].at)
            zr_shadow_touch(&s->check->rec, l, &used[i], 1);
    for (int i = 0; i < ZR_OPTIMIZER_STATES; i++)
        if (u->state[i])
            zr_shadow_touch(&s->check->rec, l,
                            &(struct zr_access){u->state[i], u->n * zr_moments_bytes(u->moments), true}, 1);
    for (int i = 0; i < ZR_OPTIMIZER_STATES; i++)
        if (u->scale[i])
            zr_shadow_touch(&s->check->rec, l, &(struct zr_access){u->scale[i], scale_bytes, true}, 1);
}

static int update(struct zr_stream *s, const struct zr_update *u)
{
    ZR_TRY(zr_check_update(u));
    touch_update(s, zr_check_issue(s, "update"), u);
    zr_check_issued(s);
    return s->check->inner->ops->update(s->inner, u);
}

static int update_spans(struct zr_stream *s, const struct zr_update *u, const struct zr_update_span *spans,
                        int n_spans)
{
    ZR_TRY(zr_check_update_spans(u, spans, n_spans));
    struct zr_line *l = zr_check_issue(s, "update");
    for (int i = 0; i < n_spans; i++) {
        const struct zr_update part = zr_update_of_span(u, &spans[i]);
        touch_update(s, l, &part);
    }
    zr_check_issued(s);
    return s->check->inner->ops->update_spans(s->inner, u, spans, n_spans);
}

static int add_rounded(struct zr_stream *s, uint16_t *dst, const float *src, int64_t n,
                       const struct zr_rounding *rounding)
{
    ZR_TRY(zr_check_count("add_rounded", "n", n));
    note(s, "add_rounded", src, n * (int64_t)sizeof *src, dst, n * (int64_t)sizeof *dst, true);
    return s->check->inner->ops->add_rounded(s->inner, dst, src, n, rounding);
}

static int encode(struct zr_stream *s, const struct zr_coded *to, const float *src, int64_t n)
{
    ZR_TRY(zr_check_coded("encode", to, n));
    const struct zr_access used[] = {{src, n * (int64_t)sizeof *src, false},
                                     {to->at, n * zr_coding_bytes(to->coding), true},
                                     {to->beside, zr_coding_bytes_beside(to->coding, n), true}};
    zr_shadow_touch(&s->check->rec, zr_check_issue(s, "encode"), used, 3);
    zr_check_issued(s);
    return s->check->inner->ops->encode(s->inner, to, src, n);
}

static int decode(struct zr_stream *s, float *dst, const struct zr_coded *from, int64_t n)
{
    ZR_TRY(zr_check_coded("decode", from, n));
    const struct zr_access used[] = {{from->at, n * zr_coding_bytes(from->coding), false},
                                     {from->beside, zr_coding_bytes_beside(from->coding, n), false},
                                     {dst, n * (int64_t)sizeof *dst, true}};
    zr_shadow_touch(&s->check->rec, zr_check_issue(s, "decode"), used, 3);
    zr_check_issued(s);
    return s->check->inner->ops->decode(s->inner, dst, from, n);
}

static void ask_while_waiting(struct zr_device *dev, int (*ask)(void *arg), void *arg)
{
    struct zr_device *inner = zr_check_of(dev)->inner;
    if (inner->ops->ask_while_waiting)
        inner->ops->ask_while_waiting(inner, ask, arg);
}

/* ---- the check ---- */

static const struct zr_device_ops check_ops = {
    .close = device_close,
    .alloc = device_alloc,
    .free = device_free,
    .host_alloc = host_alloc,
    .host_free = host_free,
    .memory = memory,
    .stream_open = zr_check_stream_open,
    .stream_close = zr_check_stream_close,
    .stream_leave = zr_check_stream_leave,
    .stream_reserve = zr_check_stream_reserve,
    .stream_has_room = zr_check_stream_has_room,
    .stream_sync = zr_check_stream_sync,
    .ask_while_waiting = ask_while_waiting,
    .stream_native = zr_check_stream_native,
    .thread_begin = thread_begin,
    .event_open = zr_check_event_open,
    .event_close = zr_check_event_close,
    .event_record = zr_check_event_record,
    .stream_wait = zr_check_stream_wait,
    .event_sync = zr_check_event_sync,
    .event_query = zr_check_event_query,
    .call = call,
    .declare = declare,
    .stamp = stamp,
    .zero = zero,
    .copy = copy,
    .copy_rows = copy_rows,
    .put = put,
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

_Static_assert(sizeof(void *) != 8 || sizeof(struct zr_device_ops) == 8 * 45,
               "a device has another call now: it must be passed on here");

int zr_check_open(struct zr_device *inner, int rank, int world, struct zr_check **out)
{
    static const char *const thread[] = {"model's thread", "loop", "reader"};
    *out = NULL;
    struct zr_check *c;
    ZR_TRY(ZR_ZALLOC(c, 1, "check mode"));
    int err = zr_recorder_open(&c->rec, 2 * ZR_CHECK_LINES);
    if (err) {
        free(c);
        return err;
    }
    for (int i = 0; i < 2 * ZR_CHECK_LINES; i++) {
        int kind = i % ZR_CHECK_LINES;
        c->rec.lines[i].rank = i < ZR_CHECK_LINES ? rank : -1;
        c->rec.lines[i].name = kind < ZR_CHECK_FIRST_STREAM ? thread[kind] : "stream";
    }
    c->inner = inner;
    c->rank = rank;
    c->world = world;
    c->ops = check_ops;
    c->ops.name = inner->ops->name;
    c->ops.compute_on_caller = inner->ops->compute_on_caller;
    c->ops.host_memory = inner->ops->host_memory;
    if (!inner->ops->memory)
        c->ops.memory = NULL;
    c->base.ops = &c->ops;
    pthread_mutex_init(&c->lock, NULL);
    *out = c;
    return 0;
}

void zr_check_close(struct zr_check *c)
{
    if (!c)
        return;
    zr_recorder_close(&c->rec);
    pthread_mutex_destroy(&c->lock);
    free(c);
}

struct zr_device *zr_check_device(struct zr_check *c)
{
    return &c->base;
}

bool zr_check_found(struct zr_check *c, char *text, size_t n)
{
    pthread_mutex_lock(&c->lock);
    bool found = c->rec.n_reports > 0;
    if (found)
        snprintf(text, n, "%s", c->rec.first_report);
    pthread_mutex_unlock(&c->lock);
    return found;
}

void zr_check_stop(struct zr_check *c)
{
    pthread_mutex_lock(&c->lock);
    c->rec.broken = true;
    pthread_mutex_unlock(&c->lock);
}

bool zr_check_stopped(struct zr_check *c)
{
    pthread_mutex_lock(&c->lock);
    bool stopped = c->rec.broken;
    pthread_mutex_unlock(&c->lock);
    return stopped;
}

int64_t zr_check_n_ops(struct zr_check *c)
{
    pthread_mutex_lock(&c->lock);
    int64_t n = c->rec.n_ops;
    pthread_mutex_unlock(&c->lock);
    return n;
}
