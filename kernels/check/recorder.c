/* SPDX-License-Identifier: Apache-2.0 */
/* recorder.c: lines, their clocks and operations, and the faults found. */
#include "kernels/check/recorder.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { FIRST_INFOS = 1024, MAX_INFOS = 1 << 20 };

int zr_recorder_open(struct zr_recorder *r, int32_t n_lines)
{
    *r = (struct zr_recorder){.n_lines = n_lines};
    r->lines = calloc((size_t)n_lines, sizeof *r->lines);
    r->infos = calloc(FIRST_INFOS, sizeof *r->infos);
    r->cap_infos = FIRST_INFOS;
    bool ok = r->lines && r->infos;
    for (int32_t i = 0; ok && i < n_lines; i++) {
        r->lines[i] = (struct zr_line){.id = i, .name = "", .unit = -1, .clock = zr_vclock_new(r)};
        ok = r->lines[i].clock != NULL;
    }
    if (ok)
        return 0;
    zr_recorder_close(r);
    return zr_fail(ZERO_ERR_NOMEM, "no memory to keep the clocks of %d lines", n_lines);
}

void zr_recorder_close(struct zr_recorder *r)
{
    zr_shadow_close(r);
    for (int32_t i = 0; r->lines && i < r->n_lines; i++)
        zr_vclock_drop(r->lines[i].clock);
    free(r->lines);
    free(r->infos);
    *r = (struct zr_recorder){0};
}

void zr_report(struct zr_recorder *r, const char *fmt, ...)
{
    va_list ap;
    if (r->forgiving || r->n_reports++)
        return;
    va_start(ap, fmt);
    vsnprintf(r->first_report, sizeof r->first_report, fmt, ap);
    va_end(ap);
}

/* ---- clocks ---- */

struct zr_vclock *zr_vclock_new(struct zr_recorder *r)
{
    struct zr_vclock *s = r->broken ? NULL : calloc(1, sizeof *s + (size_t)r->n_lines * sizeof *s->at);
    r->broken |= !s;
    if (s)
        s->refs = 1;
    return s;
}

struct zr_vclock *zr_vclock_hold(struct zr_line *l)
{
    if (l->clock)
        l->clock->refs++;
    return l->clock;
}

void zr_vclock_drop(struct zr_vclock *s)
{
    if (s && --s->refs == 0)
        free(s);
}

struct zr_vclock *zr_line_own(struct zr_recorder *r, struct zr_line *l)
{
    if (r->broken || l->clock->refs == 1)
        return r->broken ? NULL : l->clock;
    struct zr_vclock *copy = zr_vclock_new(r);
    if (!copy)
        return NULL;
    copy->now_ns = l->clock->now_ns;
    memcpy(copy->at, l->clock->at, (size_t)r->n_lines * sizeof *copy->at);
    l->clock->refs--;
    return l->clock = copy;
}

void zr_vclock_join(struct zr_recorder *r, struct zr_vclock *into, const struct zr_vclock *s)
{
    if (!into || !s)
        return;
    for (int32_t i = 0; i < r->n_lines; i++)
        into->at[i] = s->at[i] > into->at[i] ? s->at[i] : into->at[i];
    into->now_ns = s->now_ns > into->now_ns ? s->now_ns : into->now_ns;
}

void zr_line_join(struct zr_recorder *r, struct zr_line *l, const struct zr_vclock *s)
{
    if (r->broken || !s || l->clock == s)
        return;
    bool news = s->now_ns > l->clock->now_ns;
    for (int32_t i = 0; !news && i < r->n_lines; i++)
        news = s->at[i] > l->clock->at[i];
    if (news)
        zr_vclock_join(r, zr_line_own(r, l), s);
}

/* ---- operations ---- */

static bool more_infos(struct zr_recorder *r)
{
    if (r->n_infos < r->cap_infos || r->cap_infos >= MAX_INFOS)
        return true;
    struct zr_info *more = realloc(r->infos, 2 * (size_t)r->cap_infos * sizeof *more);
    r->broken |= !more;
    if (!more)
        return false;
    r->infos = more;
    r->cap_infos *= 2;
    return true;
}

void zr_line_begin(struct zr_recorder *r, struct zr_line *l, const char *name, const char *during,
                   int32_t unit, uint32_t step)
{
    if (r->broken || !more_infos(r))
        return;
    struct zr_vclock *s = zr_line_own(r, l);
    if (!s || ++s->at[l->id] == UINT32_MAX) { /* the clocks are full: nothing more can be checked */
        r->broken = true;
        return;
    }
    l->info = r->n_infos++;
    r->infos[l->info % r->cap_infos] =
        (struct zr_info){name, during ? during : "", l->id, unit, step, l->info};
    r->n_ops++;
}

const struct zr_info *zr_info_at(const struct zr_recorder *r, uint32_t number)
{
    static const struct zr_info forgotten = {.name = "an operation", .during = "long ago", .unit = -1};
    const struct zr_info *i = &r->infos[number % r->cap_infos];
    return i->number == number ? i : &forgotten;
}
