/* SPDX-License-Identifier: Apache-2.0 */
/* events.h: the events between an engine's streams, by what they say.
 *
 * Every arrow between streams is one event:
 *   param_free[slot]  compute -> gather   the last bracket that read the slot ended
 *   ready[unit]       gather  -> compute  the unit's parameters are gathered
 *   updated[unit]     reduce  -> gather   the optimizer wrote the shard (-> compute: nothing is gathered)
 *   grad_done[place]  compute -> reduce   backward has written the gradient
 *   grad_free[place]  reduce  -> compute  every rank has reduced it: its place may be written again
 *   step_compute      compute -> reduce   what came before zero_step is done with the parameters
 *   gather_tail       gather  -> reduce   every gather of the old parameters is done
 *   step_norm         reduce  -> host     norm, clip factor and skip flag of the step are known
 * And where an update is of a fine slice, so that groups gather it (struct zr_core_spec, outer_gathers):
 *   updated[unit]     reduce  -> outer    the optimizer wrote the fine slice (outer: of gathers)
 *   whole[unit]       outer   -> gather   the inner slice has every group's part, in place of updated
 *   gather_outer_tail outer   -> reduce   every such gather of the old parameters is done
 * And where gradients are reduced between groups too, on a stream of its own (struct zr_core_spec, outer):
 *   partial_full[place] reduce       -> reduce outer   the sum over a group is there
 *   partial_free[place] reduce outer -> reduce         every group has read it, or it was dropped
 *   updated[unit]       reduce       -> reduce outer   the optimizer has read the unit's sum
 *   reduce_outer_tail   reduce outer -> reduce         every sum of the world is there
 *
 * Messages between pipeline stages, and tied tensors, have their own: see pipe.c and tied.c. */
#ifndef ZR_SHARD_ENGINE_EVENTS_H
#define ZR_SHARD_ENGINE_EVENTS_H

#include "kernels/device.h"
#include "shard/plan.h"

struct zr_engine;

/* Events by what they say. */
enum zr_event_class {
    ZR_EVENT_ANY,
    ZR_EVENT_PARAM_FREE,
    ZR_EVENT_READY,
    ZR_EVENT_UPDATED,
    ZR_EVENT_GRAD_DONE,
    ZR_EVENT_GRAD_FREE,
    ZR_EVENT_STEP_COMPUTE,
    ZR_EVENT_GATHER_TAIL,
    ZR_EVENT_STEP_NORM,
    /* the model's thread waits for a stream's end */
    ZR_EVENT_DRAINED,
    ZR_EVENT_WHOLE,
    ZR_EVENT_GATHER_OUTER_TAIL,
    ZR_EVENT_PARTIAL_FULL,
    ZR_EVENT_PARTIAL_FREE,
    ZR_EVENT_REDUCE_OUTER_TAIL,
    /* of messages between stages (pipe.c), and of tied tensors (tied.c) */
    ZR_EVENT_PIPE_DONE,
    ZR_EVENT_PIPE_MOVED,
    ZR_EVENT_TIED_DONE,
    ZR_EVENT_TIED_MOVED,
    ZR_EVENT_TIED_GIVEN
};

struct zr_events {
    /* (n) for closing */
    struct zr_event **all;
    /* (n) enum zr_event_class */
    uint8_t *class_of;
    int32_t n;
    struct zr_event **param_free, **ready, **updated, **grad_done, **grad_free;
    /* outer_gathers only: (n_units); (1) */
    struct zr_event **whole, **gather_outer_tail;
    /* with groups only: (partial places), see zr_partial_place; (1) */
    struct zr_event **partial_full, **partial_free, **reduce_outer_tail;
    struct zr_event *step_compute, *gather_tail, *step_norm, *drained;
};

/* tables.c. What is open is freed with the tables, also where opening failed. */
int zr_events_open(struct zr_device *dev, const struct zr_plan *p, struct zr_events *ev);
/* Of any event of the engine's, those of messages and tied tensors included; ZR_EVENT_ANY: it has no such. */
enum zr_event_class zr_event_class_of(const struct zr_engine *e, const struct zr_event *event);
/* pipe.c and tied.c: of theirs alone. */
enum zr_event_class zr_pipe_event_class(const struct zr_engine *e, const struct zr_event *event);
enum zr_event_class zr_tied_event_class(const struct zr_engine *e, const struct zr_event *event);

#endif
