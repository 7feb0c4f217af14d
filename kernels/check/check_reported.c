/* SPDX-License-Identifier: Apache-2.0 */
/* check_reported.c: records what no call of the device shows: hand-overs between threads, the program's own
 * work on streams, readers of memory, and ranks that meet. */
#include "kernels/check/check_device_inside.h"

void zr_check_doing(struct zr_check *c, const char *name, int32_t unit, uint32_t step)
{
    pthread_mutex_lock(&c->lock);
    struct zr_line *host = zr_check_host_line(c);
    host->during = name;
    host->unit = unit;
    host->step = step;
    pthread_mutex_unlock(&c->lock);
}

struct zr_vclock *zr_check_hand(struct zr_check *c)
{
    pthread_mutex_lock(&c->lock);
    struct zr_vclock *s = c->rec.broken ? NULL : zr_vclock_hold(zr_check_host_line(c));
    pthread_mutex_unlock(&c->lock);
    return s;
}

void zr_check_job(struct zr_check *c, struct zr_vclock *known)
{
    pthread_mutex_lock(&c->lock);
    c->job_thread = pthread_self();
    c->in_job = true;
    zr_line_join(&c->rec, zr_check_host_line(c), known);
    zr_vclock_drop(known);
    pthread_mutex_unlock(&c->lock);
}

void zr_check_job_done(struct zr_check *c)
{
    pthread_mutex_lock(&c->lock);
    c->in_job = false;
    pthread_mutex_unlock(&c->lock);
}

void zr_check_compute(struct zr_check *c, struct zr_stream *s, const char *name, const struct zr_access *a)
{
    struct zr_line *l = zr_check_issue(s, name);
    zr_shadow_touch(&c->rec, l, a, 1);
    zr_check_issued(s);
}

void zr_check_reader(struct zr_check *c, struct zr_stream *s, const void *at, int64_t bytes)
{
    pthread_mutex_lock(&c->lock);
    struct zr_line *l = &c->rec.lines[ZR_CHECK_READER], *host = zr_check_host_line(c);
    zr_line_join(&c->rec, l, s->line->clock);
    zr_line_begin(&c->rec, l, "read of a snapshot", host->during, host->unit, host->step);
    zr_shadow_read(&c->rec, l, at, bytes);
    pthread_mutex_unlock(&c->lock);
}

void zr_check_reader_done(struct zr_check *c)
{
    pthread_mutex_lock(&c->lock);
    zr_line_join(&c->rec, zr_check_host_line(c), c->rec.lines[ZR_CHECK_READER].clock);
    pthread_mutex_unlock(&c->lock);
}

/* Each line's entry in the clock, and its mirror's, become the larger of the two. */
static void meet(struct zr_check *c, struct zr_line *l)
{
    struct zr_vclock *s = c->world > 1 ? zr_line_own(&c->rec, l) : NULL;
    for (int i = 0; s && i < ZR_CHECK_LINES; i++) {
        uint32_t mine = s->at[i], theirs = s->at[ZR_CHECK_LINES + i];
        s->at[i] = s->at[ZR_CHECK_LINES + i] = mine > theirs ? mine : theirs;
    }
}

/* Returns the mirror of a line, with the line's operation. Its clock is the line's with the entries of lines
 * and mirrors exchanged, because the other ranks know of this rank what this rank knows of them. */
static struct zr_line *mirror_of(struct zr_check *c, struct zr_line *l)
{
    struct zr_line *t = &c->rec.lines[ZR_CHECK_LINES + l->id];
    zr_vclock_drop(t->clock);
    t->clock = zr_vclock_hold(l);
    struct zr_vclock *s = zr_line_own(&c->rec, t);
    for (int i = 0; s && i < ZR_CHECK_LINES; i++) {
        uint32_t own = s->at[i];
        s->at[i] = s->at[ZR_CHECK_LINES + i];
        s->at[ZR_CHECK_LINES + i] = own;
    }
    t->info = l->info;
    return t;
}

void zr_check_collective(struct zr_check *c, struct zr_stream *s, const char *name, int32_t unit,
                         uint32_t step, const struct zr_check_part *parts, int n, bool starts, bool ends)
{
    struct zr_line *l = s->line, *t = NULL;
    pthread_mutex_lock(&c->lock);
    struct zr_line *host = zr_check_host_line(c);
    if (l != host)
        zr_line_join(&c->rec, l, host->clock);
    /* The ranks meet before the operation begins, so they learn what came before it, and nothing of it. */
    if (starts)
        meet(c, l);
    zr_line_begin(&c->rec, l, name, host->during, unit, step);
    for (int i = 0; i < n; i++) {
        if (parts[i].how == ZR_OTHERS_READ)
            t = t ? t : mirror_of(c, l);
        if (parts[i].how == ZR_MINE_WRITE)
            zr_shadow_write(&c->rec, l, parts[i].at, parts[i].bytes);
        else
            zr_shadow_read(&c->rec, parts[i].how == ZR_OTHERS_READ ? t : l, parts[i].at, parts[i].bytes);
    }
    if (ends)
        meet(c, l);
    pthread_mutex_unlock(&c->lock);
}
