/* SPDX-License-Identifier: Apache-2.0 */
/* tables.c: allocates an engine's events and tables, whose sizes depend on the model. */
#include "kernels/alloc.h"
#include "shard/engine/internal.h"
#include "shard/engine/issue.h"

#include <stddef.h>
#include <stdlib.h>
#include <string.h>

/* ---- events ---- */

int zr_events_open(struct zr_device *dev, const struct zr_plan *p, struct zr_events *ev)
{
    int32_t units = p->layout->n_units, grads = units + p->n_grad_slots;
    int32_t group_sums = zr_n_group_sums(p);
    bool outer = p->spec.outer, outer_gathers = p->spec.outer_gathers;
    const struct {
        enum zr_event_class class;
        int32_t n;
        struct zr_event ***many;
    } rows[] = {{ZR_EVENT_PARAM_FREE, p->n_param_slots, &ev->param_free},
                {ZR_EVENT_READY, units, &ev->ready},
                {ZR_EVENT_UPDATED, units, &ev->updated},
                {ZR_EVENT_GRAD_DONE, grads, &ev->grad_done},
                {ZR_EVENT_GRAD_FREE, grads, &ev->grad_free},
                {ZR_EVENT_WHOLE, outer_gathers ? units : 0, &ev->whole},
                {ZR_EVENT_GATHER_OUTER_TAIL, outer_gathers, &ev->gather_outer_tail},
                {ZR_EVENT_GROUP_SUM_DONE, group_sums, &ev->group_sum_done},
                {ZR_EVENT_GROUP_SUM_FREE, group_sums, &ev->group_sum_free},
                {ZR_EVENT_REDUCE_OUTER_TAIL, outer, &ev->reduce_outer_tail},
                {ZR_EVENT_STATES_READ, p->file_bytes ? 2 : 0, &ev->states_read},
                {ZR_EVENT_STATES_UPDATED, p->file_bytes ? 2 : 0, &ev->states_updated}};
    struct zr_event **const single[] = {[ZR_EVENT_STEP_COMPUTE] = &ev->step_compute,
                                        [ZR_EVENT_GATHER_TAIL] = &ev->gather_tail,
                                        [ZR_EVENT_STEP_NORM] = &ev->step_norm,
                                        [ZR_EVENT_DRAINED] = &ev->drained};
    int32_t at = 0, n = ZR_EVENT_DRAINED - ZR_EVENT_STEP_COMPUTE + 1;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        n += rows[i].n;
    ZR_TRY(ZR_ZALLOC(ev->all, n, "%d events", n));
    ZR_TRY(ZR_ZALLOC(ev->class_of, n, "%d events", n));
    for (; ev->n < n; ev->n++) {
        int err = dev->ops->event_open(dev, &ev->all[ev->n]);
        if (err)
            return err;
    }
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        *rows[i].many = &ev->all[at];
        memset(&ev->class_of[at], (int)rows[i].class, (size_t)rows[i].n);
        at += rows[i].n;
    }
    for (int class = ZR_EVENT_STEP_COMPUTE; class <= ZR_EVENT_DRAINED; class ++) {
        ev->class_of[at] = (uint8_t) class;
        *single[class] = ev->all[at++];
    }
    return 0;
}

enum zr_event_class zr_event_class_of(const struct zr_engine *e, const struct zr_event *event)
{
    int32_t i = 0;
    while (i < e->ev.n && e->ev.all[i] != event)
        i++;
    if (i < e->ev.n)
        return (enum zr_event_class)e->ev.class_of[i];
    enum zr_event_class class = zr_pipe_event_class(e, event);
    class = class ? class : zr_tied_event_class(e, event);
    return class ? class : zr_axis_event_class(e, event);
}

/* ---- tables ---- */

/* Precedes each table in memory. */
struct zr_table {
    _Alignas(max_align_t) struct zr_table *next;
};

int zr_table_open(struct zr_engine *e, void *field, int64_t n, size_t size)
{
    struct zr_table *t;
    ZR_TRY(ZR_ZALLOC_ARRAY(t, sizeof *t, n + 1, size, "the tables of %d units", e->layout->n_units));
    void *at = t + 1;
    t->next = e->tables;
    e->tables = t;
    memcpy(field, &at, sizeof at);
    return 0;
}

int zr_tables_open(struct zr_engine *e)
{
    const int32_t units = e->layout->n_units, flats = e->layout->n_flats;
    void *core = NULL;
    ZR_TRY(zr_table_open(e, &core, 1, zr_core_bytes(&e->plan->spec)));
    e->m.core = core;
    zr_core_init(e->m.core, &e->plan->spec);
    ZR_TABLE(e, e->m.actions, zr_core_max_actions(&e->plan->spec));
    ZR_TABLE(e, e->m.segs, flats);
    ZR_TABLE(e, e->i.gather_segs, flats);
    ZR_TABLE(e, e->i.reduce_segs, flats);
    ZR_TABLE(e, e->i.left_out, units);
    for (int32_t u = 0; u < units; u++) {
        e->most_segs = (int32_t)zr_max(e->most_segs, e->layout->units[u].n_flats);
        e->most_roundings = zr_max(e->most_roundings, zr_rounding_ops(e, u));
    }
    return 0;
}

void zr_tables_close(struct zr_engine *e)
{
    while (e->tables) {
        struct zr_table *t = e->tables;
        e->tables = t->next;
        free(t);
    }
    free(e->ev.all);
    free(e->ev.class_of);
}
