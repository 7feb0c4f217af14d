/* SPDX-License-Identifier: Apache-2.0 */
/* tables.c: allocates an engine's events and tables, whose sizes depend on the model. */
#include "kernels/alloc.h"
#include "shard/engine/internal.h"
#include "shard/engine/issue.h"

#include <stdlib.h>
#include <string.h>

/* ---- events ---- */

int zr_events_open(struct zr_device *dev, const struct zr_plan *p, struct zr_events *ev)
{
    int32_t units = p->layout->n_units, places = units + p->n_grad_slots;
    int32_t partials = zr_n_partial_places(p);
    bool outer = p->spec.outer, outer_gathers = p->spec.outer_gathers;
    const struct {
        enum zr_event_class class;
        int32_t n;
        struct zr_event ***many;
    } rows[] = {{ZR_EVENT_PARAM_FREE, p->n_param_slots, &ev->param_free},
                {ZR_EVENT_READY, units, &ev->ready},
                {ZR_EVENT_UPDATED, units, &ev->updated},
                {ZR_EVENT_GRAD_DONE, places, &ev->grad_done},
                {ZR_EVENT_GRAD_FREE, places, &ev->grad_free},
                {ZR_EVENT_WHOLE, outer_gathers ? units : 0, &ev->whole},
                {ZR_EVENT_GATHER_OUTER_TAIL, outer_gathers, &ev->gather_outer_tail},
                {ZR_EVENT_PARTIAL_FULL, partials, &ev->partial_full},
                {ZR_EVENT_PARTIAL_FREE, partials, &ev->partial_free},
                {ZR_EVENT_REDUCE_OUTER_TAIL, outer, &ev->reduce_outer_tail}};
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
    enum zr_event_class of_pipe = zr_pipe_event_class(e, event);
    return of_pipe ? of_pipe : zr_tied_event_class(e, event);
}

/* ---- tables ---- */

struct table {
    void *field; /* address of the pointer to it */
    size_t n, size;
};

enum { MOST_TABLES = 26 };

/* Lists all tables, and returns how many there are. */
static int list_tables(struct zr_engine *e, struct table *t)
{
    struct zr_model_side *m = &e->m;
    size_t units = (size_t)e->layout->n_units, tensors = (size_t)e->layout->n_tensors;
    size_t flats = (size_t)e->layout->n_flats, places = units + (size_t)e->plan->n_grad_slots;
    const struct table all[] = {
        {&m->core, 1, zr_core_bytes(&e->plan->spec)},
        {&m->actions, (size_t)zr_core_max_actions(&e->plan->spec), sizeof *m->actions},
        {&m->segs, flats, sizeof *m->segs},
        {&m->unit_job, units, sizeof *m->unit_job},
        {&m->grad_job, places, sizeof *m->grad_job},
        {&m->reported_param, tensors, sizeof *m->reported_param},
        {&m->reported_grad, tensors, sizeof *m->reported_grad},
        {&m->n_shown_param, tensors, sizeof *m->n_shown_param},
        {&m->n_shown_grad, tensors, sizeof *m->n_shown_grad},
        {&m->param_shown, units, sizeof *m->param_shown},
        {&m->grad_shown, units, sizeof *m->grad_shown},
        {&m->param_slot, units, sizeof *m->param_slot},
        {&m->grad_slot, units, sizeof *m->grad_slot},
        {&m->grad_pointer, tensors, sizeof *m->grad_pointer},
        {&m->in_flight, units, sizeof *m->in_flight},
        {&m->flying, units, sizeof *m->flying},
        {&m->unit_t, units, sizeof *m->unit_t},
        {&m->updating, units, sizeof *m->updating},
        {&e->tp_gradient, tensors, sizeof *e->tp_gradient},
        {&e->tp_left_out, units, sizeof *e->tp_left_out},
        {&e->i.gather_segs, flats, sizeof *e->i.gather_segs},
        {&e->i.reduce_segs, flats, sizeof *e->i.reduce_segs},
        {&e->i.left_out, units, sizeof *e->i.left_out},
    };
    _Static_assert(sizeof all / sizeof *all <= MOST_TABLES, "room for all");
    memcpy(t, all, sizeof all);
    return (int)(sizeof all / sizeof *all);
}

int zr_tables_open(struct zr_engine *e)
{
    struct table t[MOST_TABLES];
    for (int n = list_tables(e, t), i = 0; i < n; i++) {
        void *at;
        ZR_TRY(ZR_ZALLOC_BYTES(at, (t[i].n + 1) * t[i].size, "the tables of %d units", e->layout->n_units));
        memcpy(t[i].field, &at, sizeof at);
    }
    for (int32_t u = 0; u < e->layout->n_units; u++)
        if (e->layout->units[u].n_flats > e->most_segs)
            e->most_segs = e->layout->units[u].n_flats;
    zr_core_init(e->m.core, &e->plan->spec);
    return 0;
}

void zr_tables_close(struct zr_engine *e)
{
    struct table t[MOST_TABLES];
    for (int n = list_tables(e, t), i = 0; i < n; i++) {
        void *at;
        memcpy(&at, t[i].field, sizeof at);
        free(at);
    }
    free(e->ev.all);
    free(e->ev.class_of);
}
