/* SPDX-License-Identifier: Apache-2.0 */
/* sim_stream.c: streams and events on a virtual clock.
 *
 * An operation runs as soon as what it waits for has run. Every access is checked against the clocks, so one
 * order stands for all. */
#include "kernels/alloc.h"
#include "kernels/sim/sim_device_inside.h"

#include <stdlib.h>
#include <string.h>

/* One record of an event. */
struct zr_sim_record {
    int refs;
    bool done;
    struct zr_vclock *clock; /* clock at completion */
    struct zr_stream *waiters;
};

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

/* ---- running ---- */

static void unref_record(struct zr_sim_record *r)
{
    if (r && --r->refs == 0) {
        zr_vclock_drop(r->clock);
        free(r);
    }
}

static void free_op(struct zr_sim *w, struct zr_sim_op *op)
{
    zr_vclock_drop(op->issued);
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

static void complete(struct zr_sim_record *r, struct zr_line *l)
{
    r->done = true;
    r->clock = zr_vclock_hold(l);
    while (r->waiters) {
        struct zr_stream *s = r->waiters;
        r->waiters = s->next_waiter;
        s->waiting = false;
        make_ready(s);
    }
}

/* Runs the stream's first operation. Returns false if it has to wait. */
static bool run_head(struct zr_stream *s)
{
    struct zr_sim *w = s->dev->w;
    struct zr_sim_op *op = s->head;
    struct zr_line *l = s->line;
    if (op->issued)
        zr_line_join(&w->rec, l, op->issued);
    if (op->kind == ZR_SIM_OP_WAIT) {
        if (!op->record->done) {
            if (s->waiting)
                return false;
            s->waiting = true;
            s->next_waiter = op->record->waiters;
            op->record->waiters = s;
            return false;
        }
        zr_line_join(&w->rec, l, op->record->clock);
        return true;
    }
    if (op->kind == ZR_SIM_OP_RECORD) {
        complete(op->record, l);
        return true;
    }
    if (op->kind == ZR_SIM_OP_TOGETHER) {
        bool over = s->over || op->start(op->arg, s);
        s->over = false;
        return over;
    }
    zr_sim_effect(w, l, op, s->dev->rank);
    return true;
}

static void advance(struct zr_stream *s)
{
    while (s->head && !s->dev->dead && run_head(s)) {
        s->dev->w->activity++;
        struct zr_sim_op *op = s->head;
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

/* Lets others go on, then selects the same host thread again. */
static void yield(struct zr_sim *w)
{
    struct zr_line *host = w->host;
    w->opt.yield(w->opt.arg, host->rank);
    w->host = host;
}

static void wait_empty(struct zr_stream *s)
{
    while (s->head && !s->dev->dead)
        yield(s->dev->w);
}

struct zr_sim_op *zr_sim_op_new(struct zr_stream *s, enum zr_sim_op_kind kind, const char *name)
{
    struct zr_sim *w = s->dev->w;
    struct zr_sim_op *op = w->spare;
    if (op)
        w->spare = op->next;
    else
        op = malloc(sizeof *op);
    if (!op)
        abort();
    memset(op, 0, offsetof(struct zr_sim_op, copy));
    op->kind = kind;
    op->name = name;
    op->during = w->host->during ? w->host->during : "";
    op->unit = w->host->unit;
    op->step = w->host->step;
    op->dst_type = op->src_type = ZERO_F32;
    if (w->host != s->line)
        op->issued = zr_vclock_hold(w->host);
    return op;
}

int zr_sim_op_put(struct zr_stream *s, struct zr_sim_op *op)
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
    s->last = op->kind;
    if (s->head == op) {
        make_ready(s);
        pump(s->dev->w);
    }
    if (s->caller)
        wait_empty(s);
    return 0;
}

/* ---- streams and events ---- */

int zr_sim_stream_open(struct zr_device *dev, enum zr_stream_kind kind, const char *name, void *native,
                       struct zr_stream **out)
{
    struct zr_sim_device *d = zr_sim_device_of(dev);
    struct zr_sim *w = d->w;
    (void)native;
    struct zr_stream *s = zr_sim_refused(w) ? NULL : calloc(1, sizeof *s);
    *out = NULL;
    if (!s)
        return zr_fail(ZERO_ERR_NOMEM, "sim: no memory for a stream");
    s->dev = d;
    s->caller = kind == ZR_STREAM_CALLER && w->opt.compute_on_caller;
    int i = s->caller ? ZR_SIM_MODEL : ZR_SIM_FIRST_STREAM, end = ZR_SIM_FIRST_STREAM + w->opt.n_streams;
    while (!s->caller && i < end && w->line_used[zr_sim_line_at(w, d->rank, i)->id])
        i++;
    if (i == end) {
        free(s);
        return zr_fail(ZERO_ERR_NOMEM, "sim: a rank has at most %d streams", w->opt.n_streams);
    }
    s->line = zr_sim_line_at(w, d->rank, i);
    if (!s->caller) {
        w->line_used[s->line->id] = true;
        s->line->name = strncmp(name, "zero-", 5) ? name : name + 5;
    }
    *out = s;
    return 0;
}

void zr_sim_stream_close(struct zr_stream *s)
{
    if (!s)
        return;
    wait_empty(s);
    while (s->head) {
        struct zr_sim_op *op = s->head;
        s->head = op->next;
        free_op(s->dev->w, op);
    }
    if (!s->caller)
        s->dev->w->line_used[s->line->id] = false;
    free(s->declared);
    free(s);
}

bool zr_sim_dropped(struct zr_sim *w, enum zr_sim_edge edge, int rank, const struct zr_event *e,
                    const struct zr_stream *s)
{
    return w->opt.drop && w->opt.drop(w->opt.arg, edge, rank, e, s);
}

int zr_sim_stream_sync(struct zr_stream *s)
{
    struct zr_sim *w = s->dev->w;
    if (zr_sim_dropped(w, ZR_SIM_STREAM_SYNC, s->dev->rank, NULL, s))
        return 0;
    wait_empty(s);
    zr_line_join(&w->rec, w->host, s->line->clock);
    return 0;
}

void *zr_sim_stream_native(struct zr_stream *s)
{
    (void)s;
    return NULL;
}

int zr_sim_event_open(struct zr_device *dev, struct zr_event **out)
{
    *out = zr_sim_refused(zr_sim_device_of(dev)->w) ? NULL : calloc(1, sizeof **out);
    if (!*out)
        return zr_fail(ZERO_ERR_NOMEM, "sim: no memory for an event");
    (*out)->dev = zr_sim_device_of(dev);
    return 0;
}

void zr_sim_event_close(struct zr_event *e)
{
    if (e)
        unref_record(e->latest);
    free(e);
}

int zr_sim_event_record(struct zr_event *e, struct zr_stream *s)
{
    if (zr_sim_dropped(s->dev->w, ZR_SIM_RECORD, s->dev->rank, e, s) || s->dev->dead)
        return 0;
    struct zr_sim_record *r;
    ZR_TRY(ZR_ZALLOC(r, 1, "an event's record"));
    r->refs = 2;
    unref_record(e->latest);
    e->latest = r;
    struct zr_sim_op *op = zr_sim_op_new(s, ZR_SIM_OP_RECORD, "record");
    op->record = r;
    return zr_sim_op_put(s, op);
}

int zr_sim_stream_wait(struct zr_stream *s, struct zr_event *e)
{
    if (zr_sim_dropped(s->dev->w, ZR_SIM_WAIT, s->dev->rank, e, s))
        return 0;
    if (!e->latest)
        return 0;
    struct zr_sim_op *op = zr_sim_op_new(s, ZR_SIM_OP_WAIT, "wait");
    op->record = e->latest;
    op->record->refs++;
    return zr_sim_op_put(s, op);
}

/* The thread that is woken learns the record's clock. */
int zr_sim_event_sync(struct zr_event *e)
{
    struct zr_sim *w = e->dev->w;
    if (zr_sim_dropped(w, ZR_SIM_EVENT_SYNC, e->dev->rank, e, NULL) || !e->latest || e->dev->dead)
        return 0;
    struct zr_sim_record *r = e->latest;
    r->refs++;
    while (!r->done)
        yield(w);
    zr_line_join(&w->rec, w->host, r->clock);
    unref_record(r);
    return 0;
}

int zr_sim_event_query(struct zr_event *e)
{
    struct zr_sim *w = e->dev->w;
    if (w->opt.event_done == 2)
        return 0;
    if (!e->latest)
        return 1;
    if (w->opt.event_done == 1)
        zr_sim_event_sync(e);
    if (e->latest->done)
        zr_line_join(&w->rec, w->host, e->latest->clock);
    return e->latest->done;
}
