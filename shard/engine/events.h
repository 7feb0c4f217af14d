/* SPDX-License-Identifier: Apache-2.0 */
/* events.h: the events between an engine's streams.
 *
 * Each arrow between two streams is one event. An index is that of zr_grad_index or zr_group_sum_index:
 *   param_free[slot]  compute -> gather   the last bracket that read the slot has ended
 *   ready[unit]       gather  -> compute  the unit's parameters are gathered
 *   updated[unit]     reduce  -> gather   the optimizer has written the shard (to compute if not gathered)
 *   grad_done[index]  compute -> reduce   backward has written the gradient
 *   grad_free[index]  reduce  -> compute  every rank has reduced it or, if it is summed in place, its update
 *                                         is done, so its memory may be written again
 *   step_compute      compute -> reduce   calls before zero_step are done with the parameters
 *   gather_tail       gather  -> reduce   every gather of the old parameters is done
 *   step_norm         reduce  -> host     norm, clip factor and skip flag of the step are known
 *
 * With masters and states in a file (state_parts.c), for each of two buffers:
 *   states_read[b]    states  -> reduce   a part of the file is in the buffer
 *   states_updated[b] reduce  -> states   the optimizer has updated the part
 *
 * With HFSDP updates are of fine slices, which shard groups gather from each other on another stream, outer
 * (outer_gathers in struct zr_core_spec):
 *   updated[unit]     reduce  -> outer    the optimizer has written the fine slice
 *   whole[unit]       outer   -> gather   the inner slice is complete; replaces updated
 *   gather_outer_tail outer   -> reduce   every such gather of the old parameters is done
 *
 * With HSDP and HFSDP gradients are also reduced between shard groups. This is on another stream, reduce
 * outer (outer in struct zr_core_spec):
 *   group_sum_done[index]  reduce       -> reduce outer   the sum over a group is there
 *   group_sum_free[index]  reduce outer -> reduce         every group has read it, or it was dropped
 *   updated[unit]          reduce       -> reduce outer   the optimizer has read the unit's sum
 *   reduce_outer_tail      reduce outer -> reduce         every sum of the world is there
 *
 * pipe.c, tied.c and mesh_axis.h list the events of messages between pipeline stages, of tied tensors, and of
 * shifts. */
#ifndef ZR_SHARD_ENGINE_EVENTS_H
#define ZR_SHARD_ENGINE_EVENTS_H

#include "kernels/device.h"
#include "shard/plan.h"

struct zr_engine;

/* Classes of events, by what they say. */
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
    /* the model's thread waits for the end of a stream */
    ZR_EVENT_DRAINED,
    ZR_EVENT_WHOLE,
    ZR_EVENT_GATHER_OUTER_TAIL,
    ZR_EVENT_GROUP_SUM_DONE,
    ZR_EVENT_GROUP_SUM_FREE,
    ZR_EVENT_REDUCE_OUTER_TAIL,
    ZR_EVENT_STATES_READ,
    ZR_EVENT_STATES_UPDATED,
    /* messages between pipeline stages (pipe.c), and tied tensors (tied.c) */
    ZR_EVENT_PIPE_DONE,
    ZR_EVENT_PIPE_MOVED,
    ZR_EVENT_TIED_DONE,
    ZR_EVENT_TIED_MOVED,
    ZR_EVENT_TIED_VALUES,
    /* shifts over cp (mesh_axis.h) */
    ZR_EVENT_SHIFT_READY,
    ZR_EVENT_SHIFT_DONE
};

struct zr_events {
    /* (n) for closing */
    struct zr_event **all;
    /* (n) enum zr_event_class */
    uint8_t *class_of;
    int32_t n;
    struct zr_event **param_free, **ready, **updated, **grad_done, **grad_free;
    /* with outer_gathers only: (n_units); (1) */
    struct zr_event **whole, **gather_outer_tail;
    /* with groups only: (group sums), indexed by zr_group_sum_index; (1) */
    struct zr_event **group_sum_done, **group_sum_free, **reduce_outer_tail;
    /* with a file of states only: (2) */
    struct zr_event **states_read, **states_updated;
    struct zr_event *step_compute, *gather_tail, *step_norm, *drained;
};

/* tables.c. zr_tables_close frees the lists, even if opening failed. */
int zr_events_open(struct zr_device *dev, const struct zr_plan *p, struct zr_events *ev);
/* Returns the class of any event of the engine, even of messages, tied tensors and shifts. ZR_EVENT_ANY: it
 * is not the engine's. */
enum zr_event_class zr_event_class_of(const struct zr_engine *e, const struct zr_event *event);
/* pipe.c, tied.c and mesh_axis.c: the same for their events only. */
enum zr_event_class zr_pipe_event_class(const struct zr_engine *e, const struct zr_event *event);
enum zr_event_class zr_tied_event_class(const struct zr_engine *e, const struct zr_event *event);
enum zr_event_class zr_axis_event_class(const struct zr_engine *e, const struct zr_event *event);

#endif
