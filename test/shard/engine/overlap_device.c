/* SPDX-License-Identifier: Apache-2.0 */
/* overlap_device.c: the device and the communicator of overlap_device.h. */
#include "test/shard/engine/overlap_device.h"
#include "kernels/agreement.h"

#include <stdlib.h>
#include <string.h>

struct overlap_device {
    struct zr_device base;
    struct zr_stream *model; /* the first queue opened */
    int64_t n_waited;
};

struct zr_stream {
    struct overlap_device *dev;
    int64_t now;
};

struct zr_event {
    struct overlap_device *dev;
    int64_t at;
};

int64_t overlap_now(const struct zr_stream *s)
{
    return s->now;
}

void overlap_spend(struct zr_stream *s, int64_t ns)
{
    s->now += ns;
}

static void close_device(struct zr_device *dev)
{
    free(dev);
}

static int take(struct zr_device *dev, int64_t bytes, void **out)
{
    (void)dev;
    *out = calloc(1, (size_t)bytes);
    return *out ? 0 : ZERO_ERR_NOMEM;
}

static void give(struct zr_device *dev, void *p, int64_t bytes)
{
    (void)dev;
    (void)bytes;
    free(p);
}

static int stream_open(struct zr_device *dev, enum zr_stream_kind kind, const char *name, void *native,
                       struct zr_stream **out)
{
    struct overlap_device *o = (struct overlap_device *)dev;
    (void)name;
    (void)native;
    *out = calloc(1, sizeof **out);
    if (!*out)
        return ZERO_ERR_NOMEM;
    (*out)->dev = o;
    o->model = !o->model && kind == ZR_STREAM_CALLER ? *out : o->model;
    return 0;
}

static void stream_close(struct zr_stream *s)
{
    free(s);
}

static int stream_sync(struct zr_stream *s)
{
    (void)s;
    return 0;
}

static int event_open(struct zr_device *dev, struct zr_event **out)
{
    *out = calloc(1, sizeof **out);
    if (!*out)
        return ZERO_ERR_NOMEM;
    (*out)->dev = (struct overlap_device *)dev;
    return 0;
}

static void event_close(struct zr_event *e)
{
    free(e);
}

static int event_record(struct zr_event *e, struct zr_stream *s)
{
    e->at = s->now;
    return 0;
}

static int stream_wait(struct zr_stream *s, struct zr_event *e)
{
    s->dev->n_waited += s == s->dev->model && e->at > s->now;
    s->now = e->at > s->now ? e->at : s->now;
    return 0;
}

static int event_sync(struct zr_event *e)
{
    (void)e;
    return 0;
}

static int event_query(struct zr_event *e)
{
    return !e->dev->base.ops->compute_on_caller || e->at <= e->dev->model->now;
}

/* Returns at least 1, since a time of 0 means none. */
static int stamp(struct zr_stream *s, int64_t *out_ns)
{
    *out_ns = s->now + 1;
    return 0;
}

static int call(struct zr_stream *s, void (*fn)(void *), const void *arg, size_t arg_bytes)
{
    char copy[ZR_CALL_BYTES];
    (void)s;
    memcpy(copy, arg, arg_bytes);
    fn(copy);
    return 0;
}

static int zero(struct zr_stream *s, void *dst, int64_t bytes)
{
    (void)s;
    (void)dst;
    (void)bytes;
    return 0;
}

static int copy(struct zr_stream *s, void *dst, const void *src, int64_t bytes)
{
    (void)s;
    (void)dst;
    (void)src;
    (void)bytes;
    return 0;
}

static int cast(struct zr_stream *s, void *dst, enum zero_dtype dt, const void *src, enum zero_dtype st,
                int64_t n)
{
    (void)s;
    (void)dst;
    (void)dt;
    (void)src;
    (void)st;
    (void)n;
    return 0;
}

static int add(struct zr_stream *s, float *dst, const void *src, enum zero_dtype st, int64_t n)
{
    (void)s;
    (void)dst;
    (void)src;
    (void)st;
    (void)n;
    return 0;
}

static int put(struct zr_stream *s, void *dst, const void *src, int64_t bytes)
{
    (void)s;
    memcpy(dst, src, (size_t)bytes);
    return 0;
}

static int agree_begin(struct zr_stream *s, const struct zr_agree_begin *b)
{
    (void)s;
    zr_agree_write(b);
    return 0;
}

static int agree_end(struct zr_stream *s, const struct zr_agree_end *e)
{
    (void)s;
    zr_agree_read(e);
    return 0;
}

static int sum_squares(struct zr_stream *s, struct zr_exact_sum *acc, const void *x, enum zero_dtype dtype,
                       int64_t n, const struct zr_largest *largest)
{
    (void)dtype;
    (void)largest;
    (void)s;
    (void)acc;
    (void)x;
    (void)n;
    return 0;
}

static int scale(struct zr_stream *s, float *x, int64_t n, const struct zr_step_scalars *scalars)
{
    (void)s;
    (void)x;
    (void)n;
    (void)scalars;
    return 0;
}

static int update(struct zr_stream *s, const struct zr_update *u)
{
    (void)s;
    (void)u;
    return 0;
}

static int update_spans(struct zr_stream *s, const struct zr_update *u, const struct zr_update_span *spans,
                        int n_spans)
{
    (void)s;
    (void)u;
    (void)spans;
    (void)n_spans;
    return 0;
}

static int encode(struct zr_stream *s, const struct zr_coded *to, const float *src, int64_t n)
{
    (void)s;
    (void)to;
    (void)src;
    (void)n;
    return 0;
}

static const struct zr_device_ops device_ops = {
    .name = "overlap",
    .close = close_device,
    .alloc = take,
    .host_memory = true,
    .free = give,
    .host_alloc = take,
    .host_free = give,
    .stream_open = stream_open,
    .stream_close = stream_close,
    .stream_sync = stream_sync,
    .event_open = event_open,
    .event_close = event_close,
    .event_record = event_record,
    .stream_wait = stream_wait,
    .event_sync = event_sync,
    .event_query = event_query,
    .call = call,
    .stamp = stamp,
    .zero = zero,
    .copy = copy,
    .put = put,
    .cast = cast,
    .add = add,
    .sum_squares = sum_squares,
    .scale = scale,
    .update = update,
    .update_spans = update_spans,
    .encode = encode,
    .agree_begin = agree_begin,
    .agree_end = agree_end,
};

static struct zr_device *device_open(const struct zr_device_ops *ops)
{
    struct overlap_device *o = calloc(1, sizeof *o);
    o->base.ops = ops;
    return &o->base;
}

struct zr_device *overlap_device_open(void)
{
    return device_open(&device_ops);
}

struct zr_device *overlap_device_open_on_caller(void)
{
    static struct zr_device_ops ops;
    ops = device_ops;
    ops.compute_on_caller = true;
    return device_open(&ops);
}

int64_t overlap_device_n_waited(const struct zr_device *dev)
{
    return ((const struct overlap_device *)dev)->n_waited;
}

struct overlap_comm {
    struct zr_comm base;
    int64_t cost_ns;
    struct zr_first failure;
    _Atomic uint32_t alarm;
    int64_t n_asked;
};

static void free_arena(struct zr_arena *a)
{
    free(a->base);
    free(a);
}

static int arena(struct zr_comm *c, int64_t bytes, struct zr_arena **out)
{
    struct zr_arena *a = *out = calloc(1, sizeof *a);
    (void)c;
    *a = (struct zr_arena){.free = free_arena, .base = calloc(1, (size_t)bytes), .bytes = bytes, .n_held = 1};
    return 0;
}

static int run(struct zr_comm *c, struct zr_stream *s, const struct zr_comm_op *op)
{
    int64_t slot = op->post.bytes;
    char *at = c->arena + op->off;
    if (op->post.op == ZR_OP_ALL_GATHER || op->post.op == ZR_OP_REDUCE_SCATTER)
        s->now += ((struct overlap_comm *)c)->cost_ns;
    for (int r = 1; op->post.op == ZR_OP_EXCHANGE && r < c->group.size; r++)
        memcpy(at + r * slot, at, (size_t)slot);
    /* All ranks have put in what this one has. */
    for (int32_t i = 0; op->post.op == ZR_OP_AGREE && i < op->n_sum; i++)
        ((int64_t *)at)[i] *= c->group.size;
    zr_comm_done(c, op);
    return 0;
}

static void abort_comm(struct zr_comm *c, int code, const char *why)
{
    (void)c;
    (void)code;
    (void)why;
}

static int status(struct zr_comm *c, char *why, size_t why_bytes)
{
    ((struct overlap_comm *)c)->n_asked++;
    (void)why;
    (void)why_bytes;
    return 0;
}

static void close_comm(struct zr_comm *c)
{
    zr_arena_drop(c->held);
    free(c);
}

static const struct zr_comm_ops comm_ops = {
    .name = "overlap",
    .deterministic = true,
    .arena = arena,
    .run = run,
    .abort = abort_comm,
    .status = status,
    .close = close_comm,
};

int64_t overlap_comm_n_asked(const struct zr_comm *c)
{
    return ((const struct overlap_comm *)c)->n_asked;
}

void overlap_comm_alarm(struct zr_comm *c)
{
    atomic_store(&((struct overlap_comm *)c)->alarm, 1);
}

struct zr_comm *overlap_comm_open(struct zr_device *dev, int world, int64_t cost_ns)
{
    struct overlap_comm *o = calloc(1, sizeof *o);
    (void)dev;
    o->base = (struct zr_comm){
        .ops = &comm_ops, .group = zr_group_of_all(0, world), .alarm = &o->alarm, .failure = &o->failure};
    o->cost_ns = cost_ns;
    return &o->base;
}
