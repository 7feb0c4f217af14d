/* SPDX-License-Identifier: Apache-2.0 */
/* issue.h: what the files that carry out jobs share. */
#ifndef ZR_SHARD_ENGINE_ENGINE_ISSUE_H
#define ZR_SHARD_ENGINE_ENGINE_ISSUE_H

#include "shard/engine/internal.h"

/* A device or communicator call; the first failure ends the job. */
#define ZR_TRY(call)                                                                                         \
    do {                                                                                                     \
        int try_err = (call);                                                                                \
        if (try_err)                                                                                         \
            return try_err;                                                                                  \
    } while (0)

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

/* This rank's slice of the flat's sum k. */
static inline float *zr_sum_at(const struct zr_engine *e, const struct zr_flat *f, int k)
{
    return (float *)(e->reduce_base + zr_plan_sum(e->plan, f, e->at, k));
}

/* hop.c. One hop of a reduction: whose communicator, which stream, and the dtype of what travels. */
struct zr_hop_run {
    enum zr_role role;
    enum zr_axis axis;
    struct zr_stream *stream;
    /* 0: as they lie */
    enum zr_dtype wire;
};
struct zr_hop_run zr_inner_hop(const struct zr_engine *e);
/* With groups only. last: the one behind which a sum is the world's. */
struct zr_hop_run zr_outer_hop(const struct zr_engine *e);
struct zr_hop_run zr_last_hop(const struct zr_engine *e);
/* Of the last hop: the unit's sums are made whole where they are reduced, not for its update; where the
 * flat's first sum is (whole, if that is so, else this rank's slice); and bytes of a whole one. */
bool zr_hop_in_place(const struct zr_engine *e, const struct zr_hop_run *h, int32_t unit);
int64_t zr_hop_sum(const struct zr_engine *e, const struct zr_hop_run *h, const struct zr_flat *f);
int64_t zr_hop_sum_bytes(const struct zr_hop_run *h, const struct zr_flat *f);
/* The gradient of the action's unit, or its sum over a group, reduced: this rank's slices to where the action
 * says. */
int zr_hop_reduce(struct zr_engine *e, const struct zr_hop_run *h, const struct zr_job *job);
/* Every rank's slices of the unit's sums to all, as fp32, where the optimizer wants all of them: in place, or
 * end to end to full_grad_at. On the hop's stream, or another that waits for all of it. */
int zr_hop_gather_sums(struct zr_engine *e, const struct zr_hop_run *h, struct zr_stream *s,
                       const struct zr_job *job);
/* Before a sum is written that peers may still be gathering: everyone is past it. Nothing where nobody
 * gathers sums. */
int zr_hop_barrier(struct zr_engine *e, const struct zr_hop_run *h, const struct zr_tag *tag);

/* issue_step.c: the jobs NORM and UPDATE; the factor of gradients before they are clipped. */
int zr_issue_norm(struct zr_engine *e, const struct zr_job *job);
int zr_issue_update(struct zr_engine *e, const struct zr_job *job);
double zr_unclipped_scale(const struct zr_engine *e, const struct zr_tuned *tuned);

/* ---- tensor_parallel.c ---- */

/* Bytes received so far: of all, from other groups, over tp. */
struct zr_received {
    int64_t wire, outer, model;
};
struct zr_received zr_received_so_far(const struct zr_engine *e);
/* Takes what was received since then out of the program's traffic: comparing has moved it. */
void zr_leave_out_since(struct zr_engine *e, struct zr_received before);

/* ---- compare_tp.c ---- */

/* This rank's shard of a tensor's reduced gradient, not scaled. */
struct zr_tp_gradient {
    /* 0: it has none */
    uint64_t hash;
    double squares;
};
/* Gradients are compared over tp in that step, counted from 1 since zero_wrap. */
bool zr_tp_compares(const struct zr_engine *e, uint32_t step);
/* In that step's NORM, when sums are complete. */
int zr_tp_look_at_gradients(struct zr_engine *e);

#endif
