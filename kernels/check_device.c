/* check_device.c: see check_device.h. Each call is recorded under one lock, then passed on without it: what
 * is beneath may block. */
#include "kernels/check_device.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct zr_check {
    struct zr_device base; /* first: it is the device */
    struct zr_device_ops ops;
    struct zr_device *inner;
    int rank, world;
    pthread_mutex_t lock; /* of all below */
    struct zr_recorder rec;
    bool used[ZR_CHECK_LINES];
    pthread_t loop;
    bool has_loop;
};

struct zr_stream {
    struct zr_check *check;
    struct zr_stream *inner;
    struct zr_line *line;
    struct zr_access *declared; /* of the next call */
    int n_declared;
};

struct zr_event {
    struct zr_check *check;
    struct zr_event *inner;
    struct zr_stamp *stamp; /* of the latest record; NULL: none */
};

static struct zr_check *check_of(struct zr_device *dev)
{
    return (struct zr_check *)dev;
}

static struct zr_line *host_line(struct zr_check *c)
{
    bool loop = c->has_loop && pthread_equal(c->loop, pthread_self());
    return &c->rec.lines[loop ? ZR_CHECK_LOOP : ZR_CHECK_MODEL];
}

/* A new operation of the stream; the lock is held until issued(). */
static struct zr_line *issue(struct zr_stream *s, const char *name)
{
    struct zr_check *c = s->check;
    pthread_mutex_lock(&c->lock);
    struct zr_line *host = host_line(c);
    if (s->line != host)
        zr_line_join(&c->rec, s->line, host->stamp);
    zr_line_begin(&c->rec, s->line, name, host->during, host->unit, host->step);
    return s->line;
}

static void issued(struct zr_stream *s)
{
    pthread_mutex_unlock(&s->check->lock);
}

/* ---- memory ---- */

static void device_close(struct zr_device *dev)
{
    (void)dev; /* zr_check_close */
}

/* What was just taken is watched, or given back. */
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
    struct zr_check *c = check_of(dev);
    const struct zr_device_ops *d = c->inner->ops;
    return watch(c, d->alloc(c->inner, bytes, out), "device memory", bytes, out, d->free);
}

static void device_free(struct zr_device *dev, void *p, int64_t bytes)
{
    struct zr_check *c = check_of(dev);
    zr_check_remove(c, p);
    c->inner->ops->free(c->inner, p, bytes);
}

static int host_alloc(struct zr_device *dev, int64_t bytes, void **out)
{
    struct zr_check *c = check_of(dev);
    const struct zr_device_ops *d = c->inner->ops;
    return watch(c, d->host_alloc(c->inner, bytes, out), "host memory", bytes, out, d->host_free);
}

static void host_free(struct zr_device *dev, void *p, int64_t bytes)
{
    struct zr_check *c = check_of(dev);
    zr_check_remove(c, p);
    c->inner->ops->host_free(c->inner, p, bytes);
}

static int memory(struct zr_device *dev, int64_t *free_bytes, int64_t *total_bytes)
{
    struct zr_device *inner = check_of(dev)->inner;
    return inner->ops->memory(inner, free_bytes, total_bytes);
}

/* ---- streams ---- */

static int stream_open(struct zr_device *dev, enum zr_stream_kind kind, const char *name, void *native,
                       struct zr_stream **out)
{
    struct zr_check *c = check_of(dev);
    struct zr_stream *s = calloc(1, sizeof *s);
    *out = NULL;
    if (!s)
        return zr_fail(ZR_ERR_NOMEM, "check: no memory for a stream");
    bool caller = kind == ZR_STREAM_CALLER && c->inner->ops->compute_on_caller;
    int i = caller ? ZR_CHECK_MODEL : ZR_CHECK_FIRST_STREAM;
    pthread_mutex_lock(&c->lock);
    while (!caller && i < ZR_CHECK_LINES && c->used[i])
        i++;
    if (i < ZR_CHECK_LINES)
        c->used[i] = true;
    pthread_mutex_unlock(&c->lock);
    int err = i == ZR_CHECK_LINES ? zr_fail(ZR_ERR_NOMEM, "check: at most %d streams are looked after",
                                            ZR_CHECK_LINES - ZR_CHECK_FIRST_STREAM)
                                  : c->inner->ops->stream_open(c->inner, kind, name, native, &s->inner);
    if (err) {
        if (i < ZR_CHECK_LINES)
            c->used[i] = false;
        free(s);
        return err;
    }
    s->check = c;
    s->line = &c->rec.lines[i];
    if (!caller) {
        /* Names of the library's own streams: literals. */
        s->line->name = c->rec.lines[ZR_CHECK_LINES + i].name = name ? name : "stream";
    }
    *out = s;
    return 0;
}

static void stream_close(struct zr_stream *s)
{
    if (!s)
        return;
    struct zr_check *c = s->check;
    c->inner->ops->stream_close(s->inner);
    pthread_mutex_lock(&c->lock);
    zr_line_join(&c->rec, host_line(c), s->line->stamp); /* it was waited for */
    c->used[s->line->id] = false;
    pthread_mutex_unlock(&c->lock);
    free(s->declared);
    free(s);
}

/* Who was waited for has done what it had done when the waiting began. */
static struct zr_stamp *hold(struct zr_check *c, struct zr_stamp *const *now)
{
    pthread_mutex_lock(&c->lock);
    struct zr_stamp *s = *now;
    if (s)
        s->refs++;
    pthread_mutex_unlock(&c->lock);
    return s;
}

static void join_host(struct zr_check *c, struct zr_stamp *known, bool done)
{
    pthread_mutex_lock(&c->lock);
    if (done)
        zr_line_join(&c->rec, host_line(c), known);
    zr_stamp_drop(known);
    pthread_mutex_unlock(&c->lock);
}

static int stream_sync(struct zr_stream *s)
{
    struct zr_check *c = s->check;
    struct zr_stamp *known = hold(c, &s->line->stamp);
    int err = c->inner->ops->stream_sync(s->inner);
    join_host(c, known, !err);
    return err;
}

static void *stream_native(struct zr_stream *s)
{
    return s->check->inner->ops->stream_native(s->inner);
}

static int make_current(struct zr_device *dev)
{
    struct zr_device *inner = check_of(dev)->inner;
    return inner->ops->make_current ? inner->ops->make_current(inner) : 0;
}

/* ---- events ---- */

static int event_open(struct zr_device *dev, struct zr_event **out)
{
    struct zr_check *c = check_of(dev);
    struct zr_event *e = calloc(1, sizeof *e);
    *out = NULL;
    if (!e)
        return zr_fail(ZR_ERR_NOMEM, "check: no memory for an event");
    e->check = c;
    int err = c->inner->ops->event_open(c->inner, &e->inner);
    if (err)
        free(e);
    else
        *out = e;
    return err;
}

static void event_close(struct zr_event *e)
{
    if (!e)
        return;
    e->check->inner->ops->event_close(e->inner);
    pthread_mutex_lock(&e->check->lock);
    zr_stamp_drop(e->stamp);
    pthread_mutex_unlock(&e->check->lock);
    free(e);
}

/* Passed on first: whoever finds this record in the clocks has it beneath as well. */
static int event_record(struct zr_event *e, struct zr_stream *s)
{
    int err = e->check->inner->ops->event_record(e->inner, s->inner);
    if (err)
        return err;
    struct zr_line *l = issue(s, "record");
    zr_stamp_drop(e->stamp);
    e->stamp = zr_stamp_hold(l);
    issued(s);
    return 0;
}

static int stream_wait(struct zr_stream *s, struct zr_event *e)
{
    struct zr_line *l = issue(s, "wait");
    zr_line_join(&s->check->rec, l, e->stamp);
    issued(s);
    return s->check->inner->ops->stream_wait(s->inner, e->inner);
}

static int event_sync(struct zr_event *e)
{
    struct zr_stamp *known = hold(e->check, &e->stamp);
    int err = e->check->inner->ops->event_sync(e->inner);
    join_host(e->check, known, !err);
    return err;
}

static bool event_done(struct zr_event *e)
{
    struct zr_stamp *known = hold(e->check, &e->stamp);
    bool done = e->check->inner->ops->event_done(e->inner);
    join_host(e->check, known, done);
    return done;
}

/* ---- operations ---- */

static void touch(struct zr_check *c, struct zr_line *l, const struct zr_access *a, int n)
{
    for (int i = 0; i < n; i++) {
        zr_shadow_read(&c->rec, l, a[i].at, a[i].bytes);
        if (a[i].write)
            zr_shadow_write(&c->rec, l, a[i].at, a[i].bytes);
    }
}

static int call(struct zr_stream *s, void (*fn)(void *arg), const void *arg, size_t arg_bytes)
{
    struct zr_line *l = issue(s, "call");
    touch(s->check, l, s->declared, s->n_declared);
    s->n_declared = 0;
    issued(s);
    return s->check->inner->ops->call(s->inner, fn, arg, arg_bytes);
}

static void declare(struct zr_device *dev, struct zr_stream *s, const struct zr_access *a, int n)
{
    struct zr_check *c = check_of(dev);
    pthread_mutex_lock(&c->lock);
    if (!s) {
        struct zr_line *host = host_line(c);
        zr_line_begin(&c->rec, host, "host", host->during, host->unit, host->step);
        touch(c, host, a, n);
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

/* An operation that reads and writes these; any may be NULL. */
static void note(struct zr_stream *s, const char *name, const void *read, int64_t n_read, const void *written,
                 int64_t n_written, bool adds)
{
    struct zr_line *l = issue(s, name);
    struct zr_recorder *rec = &s->check->rec;
    if (read)
        zr_shadow_read(rec, l, read, n_read);
    if (adds)
        zr_shadow_read(rec, l, written, n_written);
    if (written)
        zr_shadow_write(rec, l, written, n_written);
    issued(s);
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

static int cast(struct zr_stream *s, void *dst, enum zr_dtype dt, const void *src, enum zr_dtype st,
                int64_t n)
{
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

static int add(struct zr_stream *s, float *dst, const void *src, enum zr_dtype st, int64_t n)
{
    note(s, "add", src, n * zr_dtype_bytes(st), dst, n * (int64_t)sizeof *dst, true);
    return s->check->inner->ops->add(s->inner, dst, src, st, n);
}

static int sum_tree(struct zr_stream *s, float *dst, const void *const *src, int n_src, enum zr_dtype st,
                    int64_t n, bool accumulate)
{
    struct zr_line *l = issue(s, "sum_tree");
    for (int i = 0; i < n_src; i++)
        zr_shadow_read(&s->check->rec, l, src[i], n * zr_dtype_bytes(st));
    if (accumulate)
        zr_shadow_read(&s->check->rec, l, dst, n * (int64_t)sizeof *dst);
    zr_shadow_write(&s->check->rec, l, dst, n * (int64_t)sizeof *dst);
    issued(s);
    return s->check->inner->ops->sum_tree(s->inner, dst, src, n_src, st, n, accumulate);
}

static int finish(struct zr_stream *s, const struct zr_finish *f)
{
    const struct zr_access used[] = {{f->records, f->n_ranks * f->stride_bytes, false},
                                     {f->scalars, sizeof *f->scalars, true},
                                     {f->outcome, sizeof *f->outcome, true}};
    struct zr_line *l = issue(s, "finish");
    touch(s->check, l, used, 3);
    issued(s);
    return s->check->inner->ops->finish(s->inner, f);
}

static int sum_squares(struct zr_stream *s, struct zr_exact_sum *acc, const float *x, int64_t n)
{
    note(s, "sum_squares", x, n * (int64_t)sizeof *x, acc, sizeof *acc, true);
    return s->check->inner->ops->sum_squares(s->inner, acc, x, n);
}

static int scale(struct zr_stream *s, float *x, int64_t n, const struct zr_step_scalars *scalars)
{
    note(s, "scale", scalars, sizeof *scalars, x, n * (int64_t)sizeof *x, true);
    return s->check->inner->ops->scale(s->inner, x, n, scalars);
}

static int update(struct zr_stream *s, const struct zr_update *u)
{
    int64_t bytes = u->n * (int64_t)sizeof(float);
    struct zr_access used[] = {{u->scalars, sizeof *u->scalars, false},
                               {u->grad, bytes, false},
                               {u->master, bytes, true},
                               {u->param, u->n * zr_dtype_bytes(u->param_dtype), true},
                               {u->state[0], bytes, true},
                               {u->state[1], bytes, true}};
    struct zr_line *l = issue(s, "update");
    for (size_t i = 0; i < sizeof used / sizeof *used; i++)
        if (used[i].at)
            touch(s->check, l, &used[i], 1);
    issued(s);
    return s->check->inner->ops->update(s->inner, u);
}

/* ---- the check ---- */

static const struct zr_device_ops check_ops = {
    .close = device_close,
    .alloc = device_alloc,
    .free = device_free,
    .host_alloc = host_alloc,
    .host_free = host_free,
    .memory = memory,
    .stream_open = stream_open,
    .stream_close = stream_close,
    .stream_sync = stream_sync,
    .stream_native = stream_native,
    .make_current = make_current,
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
    .put = put,
    .cast = cast,
    .add = add,
    .sum_tree = sum_tree,
    .sum_squares = sum_squares,
    .scale = scale,
    .update = update,
    .finish = finish,
};

_Static_assert(sizeof(void *) != 8 || sizeof(struct zr_device_ops) == 8 * 32,
               "a device has another call now: it must be passed on here");

int zr_check_open(struct zr_device *inner, int rank, int world, struct zr_check **out)
{
    static const char *const thread[] = {"model's thread", "loop", "reader"};
    *out = NULL;
    struct zr_check *c = calloc(1, sizeof *c);
    if (!c)
        return zr_fail(ZR_ERR_NOMEM, "check: no memory for its %zu bytes", sizeof *c);
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

struct zr_stream *zr_check_inner(struct zr_stream *s)
{
    return s->inner;
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

void zr_check_doing(struct zr_check *c, const char *name, int32_t unit, uint32_t step)
{
    pthread_mutex_lock(&c->lock);
    struct zr_line *host = host_line(c);
    host->during = name;
    host->unit = unit;
    host->step = step;
    pthread_mutex_unlock(&c->lock);
}

struct zr_stamp *zr_check_hand(struct zr_check *c)
{
    pthread_mutex_lock(&c->lock);
    struct zr_stamp *s = c->rec.broken ? NULL : zr_stamp_hold(host_line(c));
    pthread_mutex_unlock(&c->lock);
    return s;
}

void zr_check_take(struct zr_check *c, struct zr_stamp *known, bool loop)
{
    pthread_mutex_lock(&c->lock);
    if (loop) {
        c->loop = pthread_self();
        c->has_loop = true;
    }
    zr_line_join(&c->rec, host_line(c), known);
    zr_stamp_drop(known);
    pthread_mutex_unlock(&c->lock);
}

void zr_check_compute(struct zr_check *c, struct zr_stream *s, const char *name, const struct zr_access *a)
{
    struct zr_line *l = issue(s, name);
    touch(c, l, a, 1);
    issued(s);
}

void zr_check_reader(struct zr_check *c, struct zr_stream *s, const void *at, int64_t bytes)
{
    pthread_mutex_lock(&c->lock);
    struct zr_line *l = &c->rec.lines[ZR_CHECK_READER], *host = host_line(c);
    zr_line_join(&c->rec, l, s->line->stamp);
    zr_line_begin(&c->rec, l, "read of a snapshot", host->during, host->unit, host->step);
    zr_shadow_read(&c->rec, l, at, bytes);
    pthread_mutex_unlock(&c->lock);
}

void zr_check_reader_done(struct zr_check *c)
{
    pthread_mutex_lock(&c->lock);
    zr_line_join(&c->rec, host_line(c), c->rec.lines[ZR_CHECK_READER].stamp);
    pthread_mutex_unlock(&c->lock);
}

/* What one side knows of the other, both know. */
static void meet(struct zr_check *c, struct zr_line *l)
{
    struct zr_stamp *s = c->world > 1 ? zr_line_own(&c->rec, l) : NULL;
    for (int i = 0; s && i < ZR_CHECK_LINES; i++) {
        uint32_t mine = s->at[i], theirs = s->at[ZR_CHECK_LINES + i];
        s->at[i] = s->at[ZR_CHECK_LINES + i] = mine > theirs ? mine : theirs;
    }
}

/* The twin of a line, at the line's operation: it knows as much, and has come as far. */
static struct zr_line *twin(struct zr_check *c, struct zr_line *l)
{
    struct zr_line *t = &c->rec.lines[ZR_CHECK_LINES + l->id];
    zr_stamp_drop(t->stamp);
    t->stamp = zr_stamp_hold(l);
    struct zr_stamp *s = zr_line_own(&c->rec, t);
    if (s)
        s->at[t->id] = s->at[l->id];
    t->info = l->info;
    return t;
}

void zr_check_collective(struct zr_check *c, struct zr_stream *s, const char *name, int32_t unit,
                         uint32_t step, const struct zr_check_part *parts, int n, bool starts, bool ends)
{
    struct zr_line *l = s->line, *t = NULL;
    pthread_mutex_lock(&c->lock);
    struct zr_line *host = host_line(c);
    if (l != host)
        zr_line_join(&c->rec, l, host->stamp);
    /* On entering: what follows is not known to anyone by that. */
    if (starts)
        meet(c, l);
    zr_line_begin(&c->rec, l, name, host->during, unit, step);
    for (int i = 0; i < n; i++) {
        if (parts[i].how == ZR_OTHERS_READ)
            t = t ? t : twin(c, l);
        if (parts[i].how == ZR_MINE_WRITE)
            zr_shadow_write(&c->rec, l, parts[i].at, parts[i].bytes);
        else
            zr_shadow_read(&c->rec, parts[i].how == ZR_OTHERS_READ ? t : l, parts[i].at, parts[i].bytes);
    }
    if (ends)
        meet(c, l);
    pthread_mutex_unlock(&c->lock);
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
