/* SPDX-License-Identifier: Apache-2.0 */
/* issue.h: functions shared by the files that carry out jobs: issue.c, issue_step.c, hop.c and
 * compare_tp.c. */
#ifndef ZR_SHARD_ENGINE_ISSUE_H
#define ZR_SHARD_ENGINE_ISSUE_H

#include "shard/engine/internal.h"

static inline struct zr_tag zr_job_tag(const struct zr_job *job)
{
    return (struct zr_tag){
        .unit = job->action.unit, .step = job->step, .call_hash = job->call_hash, .from = job->from};
}

static inline const struct zr_flat *zr_unit_flats(const struct zr_engine *e, int32_t unit, int32_t *n)
{
    const struct zr_unit *u = &e->layout->units[unit];
    *n = u->n_flats;
    return &e->layout->flats[u->first_flat];
}

/* Returns this rank's slice of the flat's sum k. */
static inline float *zr_sum_at(const struct zr_engine *e, const struct zr_flat *f, int k)
{
    return (float *)(e->reduce_base + zr_plan_sum(e->plan, f, e->at, k));
}

/* hop.c. One hop of a reduction: its communicator, its stream, and the dtype of the gradients on the wire. */
struct zr_hop_run {
    enum zr_role role;
    enum zr_axis axis;
    struct zr_stream *stream;
    /* 0: the gradients' own */
    enum zero_dtype wire;
};
struct zr_hop_run zr_inner_hop(const struct zr_engine *e);
/* With groups only. The last hop is the one whose result is a sum over the world. */
struct zr_hop_run zr_outer_hop(const struct zr_engine *e);
struct zr_hop_run zr_last_hop(const struct zr_engine *e);
/* For the last hop. in_place: whether the unit's sums are gathered where they are reduced, and not for its
 * update. sum: offset of the flat's first sum, of the whole one if in place, else of this rank's slice.
 * sum_bytes: bytes of a whole sum. */
bool zr_hop_in_place(const struct zr_engine *e, const struct zr_hop_run *h, int32_t unit);
int64_t zr_hop_sum(const struct zr_engine *e, const struct zr_hop_run *h, const struct zr_flat *f);
int64_t zr_hop_sum_bytes(const struct zr_hop_run *h, const struct zr_flat *f);
/* Reduces the gradient of the action's unit, or its sum over a group. This rank's slices go where the action
 * says. */
int zr_hop_reduce(struct zr_engine *e, const struct zr_hop_run *h, const struct zr_job *job);
/* Gathers the unit's sums from all ranks, as fp32, if the optimizer needs whole sums: in place, or end to end
 * at full_grad_at. Runs on the hop's stream, or on another that waits for it. */
int zr_hop_gather_sums(struct zr_engine *e, const struct zr_hop_run *h, struct zr_stream *s,
                       const struct zr_job *job);
/* Before a sum is written that peers may still be gathering: waits until everyone is past that. Does nothing
 * if nobody gathers sums. */
int zr_hop_barrier(struct zr_engine *e, const struct zr_hop_run *h, const struct zr_tag *tag);

/* issue_step.c: the jobs NORM and UPDATE, and the factor of gradients before they are clipped. */
int zr_issue_norm(struct zr_engine *e, const struct zr_job *job);
int zr_issue_update(struct zr_engine *e, const struct zr_job *job);
double zr_unclipped_scale(const struct zr_engine *e, const struct zr_tuned *tuned);

/* ---- tensor_parallel.c ---- */

/* Bytes received so far: all, from other groups, and over tp. */
struct zr_received {
    int64_t wire, outer, model;
};
struct zr_received zr_received_so_far(const struct zr_engine *e);
/* Takes the bytes received since `before` out of the program's traffic, because they were moved for a
 * comparison. */
void zr_leave_out_since(struct zr_engine *e, struct zr_received before);

/* ---- compare_tp.c ---- */

/* What is known of this rank's shard of a tensor's reduced gradient, before scaling. */
struct zr_tp_gradient {
    /* 0: this rank has no element of it */
    uint64_t hash;
    double squares;
};
/* Whether gradients are compared over tp in that step. Steps count from 1 since zero_wrap. */
bool zr_tp_compares(const struct zr_engine *e, uint32_t step);
/* Hashes the gradients in that step's NORM, when sums are complete. */
int zr_tp_look_at_gradients(struct zr_engine *e);

#endif
