/* sim_device.c: streams, events and host threads on a virtual clock; see sim_device.h.
 *
 * Operations run as soon as what they wait for has run: since every access is checked against the clocks, one
 * order stands for all. */
#include "kernels/sim_device.h"
#include "kernels/finish.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum op_kind {
    OP_WAIT,
    OP_RECORD,
    OP_CALL,
    OP_ZERO,
    OP_COPY,
    OP_CAST,
    OP_ADD,
    OP_SQUARES,
    OP_SCALE,
    OP_UPDATE,
    OP_COMPUTE,
    OP_TOGETHER
};

/* One record of an event. */
struct record {
    int refs;
    bool done;
    struct zr_stamp *stamp; /* when done */
    struct zr_stream *waiters;
};

struct op {
    struct op *next;
    enum op_kind kind;
    const char *name, *during;
    int32_t unit;
    uint32_t step;
    struct zr_stamp *issued;
    struct record *record;
    struct zr_access *access;
    struct zr_sim_touch *touch;
    int n;
    int64_t count, ns;
    void *dst;
    const void *src;
    enum zr_dtype dst_type, src_type;
    const struct zr_step_scalars *scalars;
    struct zr_update update;
    void (*fn)(void *arg);
    bool (*start)(void *arg, struct zr_stream *s);
    void *arg;
    _Alignas(16) char copy[ZR_CALL_BYTES];
};

struct zr_stream {
    struct sim_device *dev;
    struct zr_line *line;
    bool caller, waiting; /* waiting: in a record's list */
    bool over;            /* the operation under way ended elsewhere (zr_sim_resume) */
    struct op *head, *tail;
    struct zr_stream *next_waiter, *next_ready;
    bool ready;
    struct zr_access *declared;
    int n_declared;
};

struct zr_event {
    struct sim_device *dev;
    struct record *latest;
};

struct sim_device {
    struct zr_device base;
    struct zr_sim *w;
    int rank;
    bool dead;
    int64_t held, peak;
};

struct zr_sim {
    struct zr_sim_options opt;
    struct zr_device_ops ops;
    struct sim_device *devices; /* (world) */
    struct zr_recorder rec;
    bool *line_used;      /* (rec.n_lines) */
    struct zr_line *host; /* who speaks */
    struct zr_stream *ready;
    bool pumping;
    struct op *spare;
    int64_t n_allocs, activity;
    struct zr_line *running; /* the stream whose operation is under way */
};

/* ---- looks from outside ---- */

struct zr_recorder *zr_sim_recorder(struct zr_sim *w)
{
    return &w->rec;
}

const struct zr_sim_options *zr_sim_config(const struct zr_sim *w)
{
    return &w->opt;
}

struct zr_device *zr_sim_device(struct zr_sim *w, int rank)
{
    return &w->devices[rank].base;
}

struct zr_line *zr_sim_line_of(struct zr_stream *s)
{
    return s->line;
}

struct zr_sim *zr_sim_of(const struct zr_stream *s)
{
    return s->dev->w;
}

bool zr_sim_idle(const struct zr_stream *s)
{
    return !s->head;
}

int64_t zr_sim_held(const struct zr_sim *w, int rank, int64_t *peak)
{
    *peak = w->devices[rank].peak;
    return w->devices[rank].held;
}

int64_t zr_sim_now(const struct zr_line *line)
{
    return line->stamp->now_ns;
}

void zr_sim_begin(struct zr_sim *w, struct zr_line *l, const char *name, int32_t unit, uint32_t step)
{
    zr_line_begin(&w->rec, l, name, l->during, unit, step);
}

void zr_sim_spend(struct zr_sim *w, struct zr_line *l, int64_t ns)
{
    int64_t from = l->stamp->now_ns;
    if (ns > 0)
        zr_line_own(&w->rec, l)->now_ns += ns;
    if (w->opt.ran)
        w->opt.ran(w->opt.arg, zr_info_at(&w->rec, l->info), l->name, l->rank, from, from + ns);
}

struct zr_line *zr_sim_host(struct zr_sim *w, int rank, int thread)
{
    return w->host = &w->rec.lines[rank * ZR_SIM_LINES + thread];
}

/* ---- running ---- */

static void unref_record(struct record *r)
{
    if (r && --r->refs == 0) {
        zr_stamp_drop(r->stamp);
        free(r);
    }
}

static void free_op(struct zr_sim *w, struct op *op)
{
    zr_stamp_drop(op->issued);
    unref_record(op->record);
    free(op->access);
    free(op->touch);
    op->next = w->spare;
    w->spare = op;
}

static void make_ready(struct zr_stream *s)
{
    struct zr_sim *w = s->dev->w;
    if (s->ready)
        return;
    s->ready = true;
    s->next_ready = w->ready;
    w->ready = s;
}

static void complete(struct zr_sim *w, struct record *r, struct zr_line *l)
{
    (void)w;
    r->done = true;
    r->stamp = zr_stamp_hold(l);
    while (r->waiters) {
        struct zr_stream *s = r->waiters;
        r->waiters = s->next_waiter;
        s->waiting = false;
        make_ready(s);
    }
}

static int64_t moving(const struct zr_sim *w, int64_t bytes)
{
    return w->opt.memory_bytes_per_s > 0
               ? w->opt.launch_ns + (int64_t)((double)bytes / w->opt.memory_bytes_per_s * 1e9)
               : 0;
}

static void touch_all(struct zr_sim *w, struct zr_line *l, const struct zr_sim_touch *t, int n)
{
    for (int i = 0; i < n; i++) {
        bool writes = t[i].how == ZR_SIM_ADD || t[i].how == ZR_SIM_SET || t[i].how == ZR_SIM_PLAIN_WRITE;
        if (t[i].how != ZR_SIM_SET && t[i].how != ZR_SIM_PLAIN_WRITE)
            zr_shadow_read(&w->rec, l, t[i].at, t[i].bytes);
        if (t[i].how == ZR_SIM_READ)
            zr_shadow_expect(&w->rec, l, t[i].at, t[i].bytes, t[i].tag);
        if (writes)
            zr_shadow_write(&w->rec, l, t[i].at, t[i].bytes);
        if (t[i].how == ZR_SIM_ADD)
            zr_shadow_add_to(&w->rec, t[i].at, t[i].bytes, t[i].tag);
        if (t[i].how == ZR_SIM_SET)
            zr_shadow_set(&w->rec, t[i].at, t[i].bytes, t[i].tag);
    }
}

static int64_t run_update(struct zr_sim *w, struct zr_line *l, const struct zr_update *u, uint32_t step)
{
    int64_t bytes = u->n * (int64_t)sizeof(float), n_param = u->n * zr_dtype_bytes(u->param_dtype);
    bool apart = u->param && u->param != (void *)u->master;
    zr_shadow_read(&w->rec, l, u->scalars, sizeof *u->scalars);
    zr_shadow_read(&w->rec, l, u->grad, bytes);
    struct zr_content at = zr_shadow_at(&w->rec, u->master);
    at.kind = ZR_TAG_PARAM;
    zr_shadow_expect(&w->rec, l, u->master, bytes, at);
    struct zr_content grad = w->opt.whole_grad(w->opt.arg, at.flat, step);
    grad.first = at.first;
    zr_shadow_expect(&w->rec, l, u->grad, bytes, grad);
    struct zr_content state = at;
    state.kind = ZR_TAG_STATE;
    bool skip = u->scalars->skip;
    zr_shadow_read(&w->rec, l, u->master, bytes);
    if (!skip) {
        at.value++;
        zr_shadow_write(&w->rec, l, u->master, bytes);
        zr_shadow_set(&w->rec, u->master, bytes, at);
        struct zr_content param = at;
        param.size = (uint8_t)zr_dtype_bytes(u->param_dtype);
        if (apart) {
            zr_shadow_write(&w->rec, l, u->param, n_param);
            zr_shadow_set(&w->rec, u->param, n_param, param);
        }
    }
    for (int i = 0; i < 2; i++) {
        if (!u->state[i])
            continue;
        zr_shadow_read(&w->rec, l, u->state[i], bytes);
        zr_shadow_expect(&w->rec, l, u->state[i], bytes, state);
        if (skip)
            continue;
        zr_shadow_write(&w->rec, l, u->state[i], bytes);
        zr_shadow_set(
            &w->rec, u->state[i], bytes,
            (struct zr_content){
                .kind = ZR_TAG_STATE, .size = 4, .flat = at.flat, .first = at.first, .value = at.value});
    }
    return bytes * 7;
}

/* The effect of an operation of one rank. */
static void run_effect(struct zr_sim *w, struct zr_line *l, struct op *op, int rank)
{
    int64_t bytes = 0;
    int ds = (int)zr_dtype_bytes(op->dst_type), ss = (int)zr_dtype_bytes(op->src_type);
    zr_sim_begin(w, l, op->name, op->unit, op->step);
    w->rec.infos[l->info % w->rec.cap_infos].during = op->during;
    switch (op->kind) {
    case OP_CALL:
        for (int i = 0; i < op->n; i++) {
            zr_shadow_read(&w->rec, l, op->access[i].at, op->access[i].bytes);
            if (op->access[i].write)
                zr_shadow_write(&w->rec, l, op->access[i].at, op->access[i].bytes);
        }
        w->running = l;
        op->fn(op->copy);
        break;
    case OP_ZERO:
        bytes = op->count;
        zr_shadow_write(&w->rec, l, op->dst, op->count);
        zr_shadow_set(&w->rec, op->dst, op->count, (struct zr_content){.kind = ZR_TAG_ZERO});
        if (op->count <= 1024)
            memset(op->dst, 0, (size_t)op->count);
        break;
    case OP_COPY:
        bytes = op->count * 2;
        zr_shadow_read(&w->rec, l, op->src, op->count);
        zr_shadow_write(&w->rec, l, op->dst, op->count);
        ss = zr_shadow_at(&w->rec, op->src).size;
        ss = ss ? ss : 1;
        zr_shadow_copy(&w->rec, op->dst, ss, op->src, ss, op->count / ss);
        if (op->count <= 1024)
            memcpy(op->dst, op->src, (size_t)op->count);
        break;
    case OP_CAST:
        bytes = op->count * (ss + ds);
        zr_shadow_read(&w->rec, l, op->src, op->count * ss);
        if (op->dst == op->src) /* before the write cuts the source */
            zr_shadow_copy(&w->rec, op->dst, ds, op->src, ss, op->count);
        zr_shadow_write(&w->rec, l, op->dst, op->count * ds);
        if (op->dst != op->src)
            zr_shadow_copy(&w->rec, op->dst, ds, op->src, ss, op->count);
        break;
    case OP_ADD:
        bytes = op->count * 12;
        zr_shadow_read(&w->rec, l, op->src, op->count * ss);
        zr_shadow_read(&w->rec, l, op->dst, op->count * ds);
        zr_shadow_write(&w->rec, l, op->dst, op->count * ds);
        zr_shadow_sum(&w->rec, op->dst, op->src, ss, op->count);
        break;
    case OP_SQUARES:
        bytes = op->count * 4;
        zr_shadow_read(&w->rec, l, op->src, op->count * 4);
        zr_shadow_read(&w->rec, l, op->dst, sizeof(struct zr_exact_sum));
        zr_shadow_write(&w->rec, l, op->dst, sizeof(struct zr_exact_sum));
        if (w->opt.poisoned && w->opt.poisoned(w->opt.arg, rank, op->step))
            ((struct zr_exact_sum *)op->dst)->nonfinite = 1;
        break;
    case OP_SCALE:
        bytes = op->count * 8;
        zr_shadow_read(&w->rec, l, op->scalars, sizeof *op->scalars);
        zr_shadow_read(&w->rec, l, op->dst, op->count * 4);
        zr_shadow_write(&w->rec, l, op->dst, op->count * 4);
        break;
    case OP_UPDATE:
        bytes = run_update(w, l, &op->update, op->step);
        break;
    case OP_COMPUTE:
        touch_all(w, l, op->touch, op->n);
        break;
    case OP_WAIT:
    case OP_RECORD:
    case OP_TOGETHER:
        break;
    }
    zr_sim_spend(w, l, op->kind == OP_COMPUTE ? op->ns : op->kind == OP_CALL ? 0 : moving(w, bytes));
}

/* Runs what the stream has come to: false, it stands. */
static bool run_head(struct zr_stream *s)
{
    struct zr_sim *w = s->dev->w;
    struct op *op = s->head;
    struct zr_line *l = s->line;
    if (op->issued)
        zr_line_join(&w->rec, l, op->issued);
    if (op->kind == OP_WAIT) {
        if (!op->record->done) {
            if (s->waiting)
                return false;
            s->waiting = true;
            s->next_waiter = op->record->waiters;
            op->record->waiters = s;
            return false;
        }
        zr_line_join(&w->rec, l, op->record->stamp);
        return true;
    }
    if (op->kind == OP_RECORD) {
        complete(w, op->record, l);
        return true;
    }
    if (op->kind == OP_TOGETHER) {
        bool over = s->over || op->start(op->arg, s);
        s->over = false;
        return over;
    }
    run_effect(w, l, op, s->dev->rank);
    return true;
}

static void advance(struct zr_stream *s)
{
    while (s->head && !s->dev->dead && run_head(s)) {
        s->dev->w->activity++;
        struct op *op = s->head;
        s->head = op->next;
        if (!s->head)
            s->tail = NULL;
        free_op(s->dev->w, op);
    }
}

static void pump(struct zr_sim *w)
{
    if (w->pumping)
        return;
    w->pumping = true;
    while (w->ready) {
        struct zr_stream *s = w->ready;
        w->ready = s->next_ready;
        s->ready = false;
        advance(s);
    }
    w->pumping = false;
}

void zr_sim_resume(struct zr_stream *s)
{
    s->over = true;
    make_ready(s);
    pump(s->dev->w);
}

static void wait_until(struct zr_sim *w, const bool *done)
{
    struct zr_line *host = w->host;
    while (!*done) {
        w->opt.yield(w->opt.arg, host->rank);
        w->host = host;
    }
}

static bool stream_empty(const struct zr_stream *s)
{
    return !s->head || s->dev->dead;
}

static void wait_empty(struct zr_stream *s)
{
    struct zr_sim *w = s->dev->w;
    struct zr_line *host = w->host;
    while (!stream_empty(s)) {
        w->opt.yield(w->opt.arg, host->rank);
        w->host = host;
    }
}

static struct op *new_op(struct zr_stream *s, enum op_kind kind, const char *name)
{
    struct zr_sim *w = s->dev->w;
    struct op *op = w->spare;
    if (op)
        w->spare = op->next;
    else
        op = malloc(sizeof *op);
    if (!op)
        abort();
    memset(op, 0, offsetof(struct op, copy));
    op->kind = kind;
    op->name = name;
    op->during = w->host->during ? w->host->during : "";
    op->unit = w->host->unit;
    op->step = w->host->step;
    op->dst_type = op->src_type = ZR_F32;
    if (w->host != s->line)
        op->issued = zr_stamp_hold(w->host);
    return op;
}

static int put(struct zr_stream *s, struct op *op)
{
    if (s->dev->dead) {
        free_op(s->dev->w, op);
        return 0;
    }
    if (s->tail)
        s->tail->next = op;
    else
        s->head = op;
    s->tail = op;
    if (s->head == op) {
        make_ready(s);
        pump(s->dev->w);
    }
    if (s->caller)
        wait_empty(s);
    return 0;
}

/* ---- the device ---- */

static struct sim_device *device_of(struct zr_device *dev)
{
    return (struct sim_device *)dev;
}

static void device_close(struct zr_device *dev)
{
    (void)dev; /* with the world */
}

static bool refused(struct zr_sim *w)
{
    return ++w->n_allocs == w->opt.fail_alloc;
}

static int device_alloc(struct zr_device *dev, int64_t bytes, void **out)
{
    struct sim_device *d = device_of(dev);
    if (bytes <= 0)
        return zr_fail(ZR_ERR_ARG, "sim: %lld bytes were asked for; more than 0 are allowed",
                       (long long)bytes);
    if (refused(d->w))
        return zr_fail(ZR_ERR_NOMEM, "sim: no memory for %lld bytes", (long long)bytes);
    /* Untouched pages of a large block cost nothing. */
    void *p = calloc(1, (size_t)bytes);
    if (!p)
        return zr_fail(ZR_ERR_NOMEM, "sim: no memory for %lld bytes", (long long)bytes);
    d->held += bytes;
    d->peak = d->held > d->peak ? d->held : d->peak;
    *out = p;
    return zr_shadow_add(&d->w->rec, d->rank, "device memory", p, bytes);
}

static void device_free(struct zr_device *dev, void *p, int64_t bytes)
{
    struct sim_device *d = device_of(dev);
    zr_shadow_remove(&d->w->rec, p);
    d->held -= bytes;
    free(p);
}

static int stream_open(struct zr_device *dev, enum zr_stream_kind kind, const char *name, void *native,
                       struct zr_stream **out)
{
    struct sim_device *d = device_of(dev);
    struct zr_sim *w = d->w;
    (void)native;
    struct zr_stream *s = refused(w) ? NULL : calloc(1, sizeof *s);
    *out = NULL;
    if (!s)
        return zr_fail(ZR_ERR_NOMEM, "sim: no memory for a stream");
    s->dev = d;
    s->caller = kind == ZR_STREAM_CALLER && w->opt.compute_on_caller;
    int32_t first = d->rank * ZR_SIM_LINES, i = first + (s->caller ? ZR_SIM_MODEL : ZR_SIM_FIRST_STREAM);
    while (!s->caller && i < first + ZR_SIM_LINES && w->line_used[i])
        i++;
    if (i == first + ZR_SIM_LINES) {
        free(s);
        return zr_fail(ZR_ERR_NOMEM, "sim: a rank has at most %d streams",
                       ZR_SIM_LINES - ZR_SIM_FIRST_STREAM);
    }
    s->line = &w->rec.lines[i];
    if (!s->caller) {
        w->line_used[i] = true;
        s->line->name = strncmp(name, "zero-", 5) ? name : name + 5;
    }
    *out = s;
    return 0;
}

static void stream_close(struct zr_stream *s)
{
    if (!s)
        return;
    wait_empty(s);
    while (s->head) {
        struct op *op = s->head;
        s->head = op->next;
        free_op(s->dev->w, op);
    }
    if (!s->caller)
        s->dev->w->line_used[s->line->id] = false;
    free(s->declared);
    free(s);
}

static bool dropped(struct zr_sim *w, enum zr_sim_edge edge, int rank, const struct zr_event *e,
                    const struct zr_stream *s)
{
    return w->opt.drop && w->opt.drop(w->opt.arg, edge, rank, e, s);
}

static int stream_sync(struct zr_stream *s)
{
    struct zr_sim *w = s->dev->w;
    if (dropped(w, ZR_SIM_STREAM_SYNC, s->dev->rank, NULL, s))
        return 0;
    wait_empty(s);
    zr_line_join(&w->rec, w->host, s->line->stamp);
    return 0;
}

static void *stream_native(struct zr_stream *s)
{
    (void)s;
    return NULL;
}

static int event_open(struct zr_device *dev, struct zr_event **out)
{
    *out = refused(device_of(dev)->w) ? NULL : calloc(1, sizeof **out);
    if (!*out)
        return zr_fail(ZR_ERR_NOMEM, "sim: no memory for an event");
    (*out)->dev = device_of(dev);
    return 0;
}

static void event_close(struct zr_event *e)
{
    if (e)
        unref_record(e->latest);
    free(e);
}

static int event_record(struct zr_event *e, struct zr_stream *s)
{
    if (dropped(s->dev->w, ZR_SIM_RECORD, s->dev->rank, e, s) || s->dev->dead)
        return 0;
    struct record *r = calloc(1, sizeof *r);
    if (!r)
        return zr_fail(ZR_ERR_NOMEM, "sim: no memory for a record");
    r->refs = 2;
    unref_record(e->latest);
    e->latest = r;
    struct op *op = new_op(s, OP_RECORD, "record");
    op->record = r;
    return put(s, op);
}

static int stream_wait(struct zr_stream *s, struct zr_event *e)
{
    if (dropped(s->dev->w, ZR_SIM_WAIT, s->dev->rank, e, s))
        return 0;
    if (!e->latest)
        return 0;
    struct op *op = new_op(s, OP_WAIT, "wait");
    op->record = e->latest;
    op->record->refs++;
    return put(s, op);
}

/* A thread that is woken knows what the record knew. */
static int event_sync(struct zr_event *e)
{
    struct zr_sim *w = e->dev->w;
    if (dropped(w, ZR_SIM_EVENT_SYNC, e->dev->rank, e, NULL) || !e->latest || e->dev->dead)
        return 0;
    struct record *r = e->latest;
    r->refs++;
    wait_until(w, &r->done);
    zr_line_join(&w->rec, w->host, r->stamp);
    unref_record(r);
    return 0;
}

static bool event_done(struct zr_event *e)
{
    struct zr_sim *w = e->dev->w;
    if (w->opt.event_done == 2)
        return false;
    if (!e->latest)
        return true;
    if (w->opt.event_done == 1)
        event_sync(e);
    if (e->latest->done)
        zr_line_join(&w->rec, w->host, e->latest->stamp);
    return e->latest->done;
}

static struct op *new_call(struct zr_stream *s, const char *name, void (*fn)(void *), const void *arg,
                           size_t arg_bytes)
{
    struct op *op = new_op(s, OP_CALL, name);
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
        return zr_fail(ZR_ERR_ARG, "sim: a call's argument has %zu bytes; allowed: %d", arg_bytes,
                       ZR_CALL_BYTES);
    return put(s, new_call(s, "call", fn, arg, arg_bytes));
}

static void declare(struct zr_device *dev, struct zr_stream *s, const struct zr_access *a, int n)
{
    struct zr_sim *w = device_of(dev)->w;
    if (!s) {
        zr_sim_begin(w, w->host, "host", w->host->unit, w->host->step);
        for (int i = 0; i < n; i++) {
            zr_shadow_read(&w->rec, w->host, a[i].at, a[i].bytes);
            if (a[i].write)
                zr_shadow_write(&w->rec, w->host, a[i].at, a[i].bytes);
        }
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
    if (dropped(s->dev->w, ZR_SIM_CLEAR, s->dev->rank, NULL, s))
        return 0;
    struct op *op = new_op(s, OP_ZERO, "zero");
    op->dst = dst;
    op->count = bytes;
    return put(s, op);
}

static int copy(struct zr_stream *s, void *dst, const void *src, int64_t bytes)
{
    struct op *op = new_op(s, OP_COPY, "copy");
    op->dst = dst;
    op->src = src;
    op->count = bytes;
    return put(s, op);
}

static int cast(struct zr_stream *s, void *dst, enum zr_dtype dt, const void *src, enum zr_dtype st,
                int64_t n)
{
    struct op *op = new_op(s, OP_CAST, "cast");
    op->dst = dst;
    op->dst_type = dt;
    op->src = src;
    op->src_type = st;
    op->count = n;
    return put(s, op);
}

static int add(struct zr_stream *s, float *dst, const void *src, enum zr_dtype st, int64_t n)
{
    struct op *op = new_op(s, OP_ADD, "add");
    op->dst = dst;
    op->src = src;
    op->src_type = st;
    op->count = n;
    return put(s, op);
}

/* As adding one after the other: for ranges and tags it is the same. */
static int sum_tree(struct zr_stream *s, float *dst, const void *const *src, int n_src, enum zr_dtype st,
                    int64_t n, bool accumulate)
{
    int err = accumulate ? 0 : zero(s, dst, n * (int64_t)sizeof *dst);
    for (int i = 0; i < n_src && !err; i++)
        err = add(s, dst, src[i], st, n);
    return err;
}

/* A function of this file, with what it touches. */
static int call_with(struct zr_stream *s, const char *name, void (*fn)(void *), const void *arg,
                     size_t arg_bytes, const struct zr_access *a, int n)
{
    declare(&s->dev->base, s, a, n);
    struct op *op = new_call(s, name, fn, arg, arg_bytes);
    return put(s, op);
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
        return zr_fail(ZR_ERR_ARG, "sim: put of %lld bytes; allowed: %d", (long long)bytes, ZR_PUT_BYTES);
    memcpy(v.value, src, (size_t)bytes);
    struct zr_access a = {dst, bytes, true};
    return call_with(s, "put", put_value, &v, sizeof v, &a, 1);
}

static void finish_value(void *arg)
{
    zr_finish_step(arg);
}

static int finish(struct zr_stream *s, const struct zr_finish *f)
{
    const struct zr_access a[] = {{f->records, f->n_ranks * f->stride_bytes, false},
                                  {f->scalars, sizeof *f->scalars, true},
                                  {f->outcome, sizeof *f->outcome, true}};
    return call_with(s, "finish", finish_value, f, sizeof *f, a, 3);
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

static int sum_squares(struct zr_stream *s, struct zr_exact_sum *acc, const float *x, int64_t n)
{
    struct op *op = new_op(s, OP_SQUARES, "sum_squares");
    op->dst = acc;
    op->src = x;
    op->count = n;
    return put(s, op);
}

static int scale(struct zr_stream *s, float *x, int64_t n, const struct zr_step_scalars *scalars)
{
    struct op *op = new_op(s, OP_SCALE, "scale");
    op->dst = x;
    op->count = n;
    op->scalars = scalars;
    return put(s, op);
}

static int update(struct zr_stream *s, const struct zr_update *u)
{
    struct op *op = new_op(s, OP_UPDATE, "update");
    op->update = *u;
    return put(s, op);
}

int zr_sim_compute(struct zr_stream *s, const char *name, const struct zr_sim_touch *touch, int n, int64_t ns)
{
    struct op *op = new_op(s, OP_COMPUTE, name);
    op->touch = malloc((size_t)(n + 1) * sizeof *touch);
    if (!op->touch)
        abort();
    memcpy(op->touch, touch, (size_t)n * sizeof *touch);
    op->n = n;
    op->ns = ns;
    return put(s, op);
}

void zr_sim_host_touch(struct zr_sim *w, const char *name, const struct zr_sim_touch *touch, int n)
{
    zr_sim_begin(w, w->host, name, w->host->unit, w->host->step);
    touch_all(w, w->host, touch, n);
}

int zr_sim_put(struct zr_stream *s, const char *name, int32_t unit, uint32_t step,
               bool (*start)(void *arg, struct zr_stream *s), void *arg)
{
    struct op *op = new_op(s, OP_TOGETHER, name);
    op->unit = unit;
    op->step = step;
    op->start = start;
    op->arg = arg;
    return put(s, op);
}

static const struct zr_device_ops sim_ops = {
    .name = "sim",
    .close = device_close,
    .alloc = device_alloc,
    .host_memory = true,
    .free = device_free,
    .host_alloc = device_alloc,
    .host_free = device_free,
    .stream_open = stream_open,
    .stream_close = stream_close,
    .stream_sync = stream_sync,
    .stream_native = stream_native,
    .event_open = event_open,
    .event_close = event_close,
    .event_record = event_record,
    .stream_wait = stream_wait,
    .event_sync = event_sync,
    .event_done = event_done,
    .call = call,
    .declare = declare,
    .stamp = stamp,
    .zero = zero,
    .copy = copy,
    .put = put_op,
    .cast = cast,
    .add = add,
    .sum_tree = sum_tree,
    .sum_squares = sum_squares,
    .scale = scale,
    .update = update,
    .finish = finish,
};

/* ---- the world ---- */

int64_t zr_sim_activity(const struct zr_sim *w)
{
    return w->activity;
}

void zr_sim_user_update(struct zr_sim *w, const struct zr_update *u)
{
    run_update(w, w->running, u, zr_info_at(&w->rec, w->running->info)->step);
}

struct zr_line *zr_sim_speaker(const struct zr_sim *w)
{
    return w->host;
}

void zr_sim_speak(struct zr_sim *w, struct zr_line *host)
{
    w->host = host;
}

void zr_sim_kill(struct zr_sim *w, int rank)
{
    w->devices[rank].dead = true;
}

int zr_sim_register(struct zr_sim *w, int rank, const char *name, const void *at, int64_t bytes)
{
    return zr_shadow_add(&w->rec, rank, name, at, bytes);
}

void zr_sim_mark(struct zr_sim *w, const void *at, int64_t bytes, struct zr_content tag)
{
    zr_shadow_set(&w->rec, at, bytes, tag);
}

int zr_sim_open(const struct zr_sim_options *opt, struct zr_sim **out)
{
    static const char *const thread[] = {
        [ZR_SIM_MODEL] = "model thread", [ZR_SIM_LOOP] = "loop", [ZR_SIM_READER] = "snapshot's reader"};
    struct zr_sim *w = calloc(1, sizeof *w);
    if (!w)
        return zr_fail(ZR_ERR_NOMEM, "sim: no memory for a world");
    w->opt = *opt;
    int32_t n_lines = opt->world * ZR_SIM_LINES;
    w->devices = calloc((size_t)opt->world, sizeof *w->devices);
    w->line_used = calloc((size_t)n_lines, sizeof *w->line_used);
    if (!w->devices || !w->line_used || zr_recorder_open(&w->rec, n_lines)) {
        free(w->devices);
        free(w->line_used);
        free(w);
        return zr_fail(ZR_ERR_NOMEM, "sim: no memory for %d ranks", opt->world);
    }
    w->rec.every_byte_known = true;
    w->ops = sim_ops;
    w->ops.compute_on_caller = opt->compute_on_caller;
    for (int r = 0; r < opt->world; r++)
        w->devices[r] = (struct sim_device){.base.ops = &w->ops, .w = w, .rank = r};
    for (int32_t i = 0; i < n_lines; i++) {
        int kind = i % ZR_SIM_LINES;
        w->rec.lines[i].rank = i / ZR_SIM_LINES;
        w->rec.lines[i].name = kind < ZR_SIM_FIRST_STREAM ? thread[kind] : "stream";
    }
    w->host = &w->rec.lines[0];
    *out = w;
    return 0;
}

void zr_sim_close(struct zr_sim *w)
{
    if (!w)
        return;
    zr_recorder_close(&w->rec);
    while (w->spare) {
        struct op *op = w->spare;
        w->spare = op->next;
        free(op);
    }
    free(w->devices);
    free(w->line_used);
    free(w);
}
