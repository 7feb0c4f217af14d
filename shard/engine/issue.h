/* SPDX-License-Identifier: Apache-2.0 */
/* issue.h: functions shared by the files that carry out jobs: issue.c, issue_step.c, axis_reduction.c and
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
static inline char *zr_sum_at(const struct zr_engine *e, const struct zr_flat *f, int k)
{
    return e->reduce_base + zr_plan_sum(e->plan, f, e->at, k);
}

/* ---- axis_reduction.c ---- */

/* A reduction over one axis: inside a group, or between groups. */
struct zr_axis_reduction {
    enum zr_axis axis;
    /* its communicator and stream */
    enum zr_role role;
    struct zr_stream *stream;
    /* dtype in which gradients are sent. 0: their own */
    enum zero_dtype wire;
};
struct zr_axis_reduction zr_inner_reduction(const struct zr_engine *e);
/* With groups only. */
struct zr_axis_reduction zr_outer_reduction(const struct zr_engine *e);
/* The one whose result is the sum over all data-parallel ranks. */
struct zr_axis_reduction zr_last_reduction(const struct zr_engine *e);

/* Reduces the gradient of the job's unit, or its sum over a group. This rank's slices go where the action
 * says. */
int zr_reduce_over_axis(struct zr_engine *e, const struct zr_axis_reduction *r, const struct zr_job *job);
/* Gathers the unit's reduced slices to whole sums on every rank, if the optimizer needs these: where the
 * slices lie, or end to end at full_grad_at. Runs on r->stream, or on another stream that waits for it. */
int zr_gather_sums(struct zr_engine *e, const struct zr_axis_reduction *r, struct zr_stream *s,
                   const struct zr_job *job);
/* Whether they are gathered where they lie, right after the reduction. Otherwise the unit's UPDATE gathers
 * them to full_grad_at. */
bool zr_sums_gathered_early(const struct zr_engine *e, const struct zr_axis_reduction *r, int32_t unit);
/* Returns the offset of the flat's first sum: of the whole one if it is gathered early, else of this rank's
 * slice. And the bytes of a whole sum. */
int64_t zr_sum_offset(const struct zr_engine *e, const struct zr_axis_reduction *r, const struct zr_flat *f);
int64_t zr_whole_sum_bytes(const struct zr_axis_reduction *r, const struct zr_flat *f);
/* Waits until no peer is still gathering this rank's sums, so that they may be overwritten. Does nothing if
 * nobody gathers sums. */
int zr_sums_barrier(struct zr_engine *e, const struct zr_axis_reduction *r, const struct zr_tag *tag);

/* ---- bf16_sums.c ---- */

/* Whether reductions of the flat's gradient end in the reduce slot, from which they are rounded to bf16. */
bool zr_has_reduce_slot(const struct zr_engine *e, const struct zr_flat *f);
/* Rounds the flat's sum over ranks from the reduce slot to the sum that the action names. */
int zr_round_reduced(struct zr_engine *e, struct zr_stream *s, const struct zr_flat *f,
                     const struct zr_job *job);
/* Adds the flat's sum number `sum` to the one before it. Uses the reduce slot. */
int zr_fold_rounded(struct zr_engine *e, struct zr_stream *s, const struct zr_flat *f,
                    const struct zr_job *job, int sum);
/* Returns the most operations that a job of the unit puts on a stream with these. */
int64_t zr_rounding_ops(const struct zr_engine *e, int32_t unit);

/* ---- others ---- */

/* Marks the begin or the end of a job's span on a stream, in the timeline. */
static inline int zr_mark_job(const struct zr_engine *e, struct zr_stream *s, enum zr_track track,
                              enum zr_span_kind kind, const struct zr_job *job, bool is_end)
{
    return zr_timeline_mark(e->timeline, s, track, kind, job->action.unit, job->step, is_end);
}

/* issue_step.c: the jobs NORM and UPDATE, and the factor of gradients before they are clipped. */
int zr_issue_norm(struct zr_engine *e, const struct zr_job *job);
int zr_issue_update(struct zr_engine *e, const struct zr_job *job);
double zr_unclipped_scale(const struct zr_engine *e, const struct zr_tuned *tuned);

/* ---- compare_tp.c ---- */

/* Whether gradients are compared over tp in that step. Steps count from 1 since zero_wrap. */
bool zr_tp_compares(const struct zr_engine *e, uint32_t step);
/* In such a step, after it: checks that all tp ranks have the same gradient of tensors that are not cut.
 * Collective. ZERO_ERR_MISMATCH, on every rank, ends the context. */
int zr_compare_gradients(struct zr_engine *e);
/* Hashes the gradients in that step's NORM, when sums are complete. */
int zr_tp_digest_gradients(struct zr_engine *e);
/* Most operations that it puts on the reduce stream. */
int64_t zr_tp_digest_ops(const struct zr_engine *e);

#endif
