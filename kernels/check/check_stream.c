/* SPDX-License-Identifier: Apache-2.0 */
/* check_stream.c: the checking device's streams and events, which it passes on, and the order that they
 * make. */
#include "kernels/alloc.h"
#include "kernels/check/check_device_inside.h"

#include <stdlib.h>

struct zr_line *zr_check_host_line(struct zr_check *c)
{
    bool job = c->in_job && pthread_equal(c->job_thread, pthread_self());
    return &c->rec.lines[job ? ZR_CHECK_LOOP : ZR_CHECK_MODEL];
}

struct zr_line *zr_check_issue(struct zr_stream *s, const char *name)
{
    struct zr_check *c = s->check;
    pthread_mutex_lock(&c->lock);
    struct zr_line *host = zr_check_host_line(c);
    if (s->line != host)
        zr_line_join(&c->rec, s->line, host->clock);
    zr_line_begin(&c->rec, s->line, name, host->during, host->unit, host->step);
    return s->line;
}

void zr_check_issued(struct zr_stream *s)
{
    pthread_mutex_unlock(&s->check->lock);
}

/* ---- streams ---- */

int zr_check_stream_open(struct zr_device *dev, enum zr_stream_kind kind, const char *name, void *native,
                         struct zr_stream **out)
{
    struct zr_check *c = zr_check_of(dev);
    struct zr_stream *s;
    *out = NULL;
    ZR_TRY(ZR_ZALLOC(s, 1, "a stream"));
    bool caller = kind == ZR_STREAM_CALLER && c->inner->ops->compute_on_caller;
    int i = caller ? ZR_CHECK_MODEL : ZR_CHECK_FIRST_STREAM;
    pthread_mutex_lock(&c->lock);
    while (!caller && i < ZR_CHECK_LINES && c->used[i])
        i++;
    if (i < ZR_CHECK_LINES)
        c->used[i] = true;
    pthread_mutex_unlock(&c->lock);
    int err = i == ZR_CHECK_LINES ? zr_fail(ZERO_ERR_NOMEM, "check: at most %d streams can be checked",
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
        /* The library names its streams with literals, so the pointer stays valid. */
        s->line->name = c->rec.lines[ZR_CHECK_LINES + i].name = name ? name : "stream";
    }
    *out = s;
    return 0;
}

void zr_check_stream_close(struct zr_stream *s)
{
    if (!s)
        return;
    struct zr_check *c = s->check;
    c->inner->ops->stream_close(s->inner);
    pthread_mutex_lock(&c->lock);
    zr_line_join(&c->rec, zr_check_host_line(c), s->line->clock); /* the stream was waited for */
    c->used[s->line->id] = false;
    pthread_mutex_unlock(&c->lock);
    free(s->declared);
    free(s);
}

/* Holds the clock of what is waited for, as it is when the wait begins. join_host joins it afterwards. */
static struct zr_vclock *hold(struct zr_check *c, struct zr_vclock *const *now)
{
    pthread_mutex_lock(&c->lock);
    struct zr_vclock *s = *now;
    if (s)
        s->refs++;
    pthread_mutex_unlock(&c->lock);
    return s;
}

static void join_host(struct zr_check *c, struct zr_vclock *known, bool done)
{
    pthread_mutex_lock(&c->lock);
    if (done)
        zr_line_join(&c->rec, zr_check_host_line(c), known);
    zr_vclock_drop(known);
    pthread_mutex_unlock(&c->lock);
}

void zr_check_stream_leave(struct zr_stream *s)
{
    if (s && s->check->inner->ops->stream_leave)
        s->check->inner->ops->stream_leave(s->inner);
}

int zr_check_stream_reserve(struct zr_stream *s, int64_t n_ops)
{
    return zr_stream_reserve(s->check->inner, s->inner, n_ops);
}

bool zr_check_stream_has_room(struct zr_stream *s, int64_t n_ops)
{
    return zr_stream_has_room(s->check->inner, s->inner, n_ops);
}

int zr_check_stream_sync(struct zr_stream *s)
{
    struct zr_check *c = s->check;
    struct zr_vclock *known = hold(c, &s->line->clock);
    int err = c->inner->ops->stream_sync(s->inner);
    join_host(c, known, !err);
    return err;
}

void *zr_check_stream_native(struct zr_stream *s)
{
    return s->check->inner->ops->stream_native(s->inner);
}

struct zr_stream *zr_check_inner(struct zr_stream *s)
{
    return s->inner;
}

/* ---- events ---- */

int zr_check_event_open(struct zr_device *dev, struct zr_event **out)
{
    struct zr_check *c = zr_check_of(dev);
    struct zr_event *e;
    *out = NULL;
    ZR_TRY(ZR_ZALLOC(e, 1, "an event"));
    e->check = c;
    int err = c->inner->ops->event_open(c->inner, &e->inner);
    if (err)
        free(e);
    else
        *out = e;
    return err;
}

void zr_check_event_close(struct zr_event *e)
{
    if (!e)
        return;
    e->check->inner->ops->event_close(e->inner);
    pthread_mutex_lock(&e->check->lock);
    zr_vclock_drop(e->clock);
    pthread_mutex_unlock(&e->check->lock);
    free(e);
}

/* Passes the record on first, so that an event whose record is in the clocks has it in the inner device,
 * too. */
int zr_check_event_record(struct zr_event *e, struct zr_stream *s)
{
    ZR_TRY(e->check->inner->ops->event_record(e->inner, s->inner));
    struct zr_line *l = zr_check_issue(s, "record");
    zr_vclock_drop(e->clock);
    e->clock = zr_vclock_hold(l);
    zr_check_issued(s);
    return 0;
}

int zr_check_stream_wait(struct zr_stream *s, struct zr_event *e)
{
    struct zr_line *l = zr_check_issue(s, "wait");
    zr_line_join(&s->check->rec, l, e->clock);
    zr_check_issued(s);
    return s->check->inner->ops->stream_wait(s->inner, e->inner);
}

int zr_check_event_sync(struct zr_event *e)
{
    struct zr_vclock *known = hold(e->check, &e->clock);
    int err = e->check->inner->ops->event_sync(e->inner);
    join_host(e->check, known, !err);
    return err;
}

int zr_check_event_query(struct zr_event *e)
{
    struct zr_vclock *known = hold(e->check, &e->clock);
    int done = e->check->inner->ops->event_query(e->inner);
    join_host(e->check, known, done == 1);
    return done;
}
