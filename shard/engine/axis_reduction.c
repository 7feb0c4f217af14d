/* SPDX-License-Identifier: Apache-2.0 */
/* axis_reduction.c: adds up the gradients of the ranks of one axis, and gathers the sum again if the
 * optimizer needs all of it. */
#include "shard/engine/issue.h"

struct zr_axis_reduction zr_inner_reduction(const struct zr_engine *e)
{
    return (struct zr_axis_reduction){.role = ZR_ROLE_REDUCE,
                                      .axis = ZR_INNER,
                                      .stream = e->role[ZR_ROLE_REDUCE].stream,
                                      .wire = e->opt.wire_dtype};
}

struct zr_axis_reduction zr_outer_reduction(const struct zr_engine *e)
{
    /* Sums of groups are fp32 on the wire, so they are not rounded again. */
    return (struct zr_axis_reduction){
        .role = ZR_ROLE_REDUCE_OUTER, .axis = ZR_OUTER, .stream = e->role[ZR_ROLE_REDUCE_OUTER].stream};
}

struct zr_axis_reduction zr_last_reduction(const struct zr_engine *e)
{
    return e->plan->spec.outer ? zr_outer_reduction(e) : zr_inner_reduction(e);
}

/* Without groups the sum goes where the optimizer looks for it, or to the reduce slot. With groups it goes
 * where the reduction between groups starts. */
static struct zr_reduce_seg inner_seg(const struct zr_engine *e, const struct zr_flat *f,
                                      const struct zr_action *a)
{
    int64_t dst = e->plan->spec.outer ? zr_plan_inner_sum(e->plan, f, e->at, a->group_slot)
                                      : zr_plan_reduced(e->plan, f, e->at, a->sum);
    bool adds = a->accumulate && !e->plan->sum_in_place[a->unit] && !zr_has_reduce_slot(e, f);
    return (struct zr_reduce_seg){.src = zr_plan_grad_full(e->plan, f, a->slot),
                                  .dst = dst,
                                  .cut = f->inner,
                                  .dtype = f->dtype,
                                  .accumulate = adds};
}

/* The source is a group slot, or the sum in place. */
static struct zr_reduce_seg outer_seg(const struct zr_engine *e, const struct zr_flat *f,
                                      const struct zr_action *a)
{
    return (struct zr_reduce_seg){.src = zr_plan_inner_sum(e->plan, f, e->at, a->group_slot),
                                  .dst = zr_plan_reduced(e->plan, f, e->at, a->sum),
                                  .cut = zr_flat_group_sums_cut(f, e->at.inner, ZERO_F32),
                                  .dtype = ZERO_F32,
                                  .accumulate = a->accumulate && !zr_has_reduce_slot(e, f)};
}

/* Converts the gradient to the wire's dtype in place, because this reduction consumes it anyway. */
static int narrow(struct zr_engine *e, enum zero_dtype wire, struct zr_reduce_seg *seg)
{
    void *grad = e->reduce_base + seg->src;
    int64_t size = zr_dtype_bytes(seg->dtype);
    ZR_TRY(e->dev->ops->cast(e->reduce_stream, grad, wire, grad, seg->dtype, seg->cut.total / size));
    seg->cut = zr_cut_in(&seg->cut, size, zr_dtype_bytes(wire));
    seg->dtype = wire;
    return 0;
}

/* Rounds the unit's sums over all ranks from the reduce slot to its bf16 sums. */
static int round_reduced(struct zr_engine *e, const struct zr_axis_reduction *r, const struct zr_job *job)
{
    int32_t n;
    const struct zr_flat *f = zr_unit_flats(e, job->action.unit, &n);
    bool is_last = r->axis == ZR_OUTER || !e->plan->spec.outer;
    for (int32_t i = 0; is_last && i < n; i++)
        if (zr_has_reduce_slot(e, &f[i]))
            ZR_TRY(zr_round_reduced(e, r->stream, &f[i], job));
    return 0;
}

int zr_reduce_over_axis(struct zr_engine *e, const struct zr_axis_reduction *r, const struct zr_job *job)
{
    int32_t n, n_segs = 0;
    const struct zr_flat *f = zr_unit_flats(e, job->action.unit, &n);
    bool narrows = r->wire && e->plan->hop[r->axis].size > 1;
    for (int32_t i = 0; i < n; i++) {
        if (!f[i].trainable)
            continue;
        struct zr_reduce_seg seg =
            r->axis == ZR_INNER ? inner_seg(e, &f[i], &job->action) : outer_seg(e, &f[i], &job->action);
        if (narrows && zr_dtype_bytes(r->wire) < zr_dtype_bytes(seg.dtype))
            ZR_TRY(narrow(e, r->wire, &seg));
        /* A gradient of one rank may be its own sum. In bf16 no communicator takes it. */
        if (seg.dst != seg.src || f[i].sum_dtype == ZERO_F32)
            e->i.reduce_segs[n_segs++] = seg;
    }
    struct zr_tag tag = zr_job_tag(job);
    if (n_segs)
        ZR_TRY(zr_role_reduce(e, r->role, e->i.reduce_segs, n_segs, &tag));
    return round_reduced(e, r, job);
}

bool zr_sums_gathered_early(const struct zr_engine *e, const struct zr_axis_reduction *r, int32_t unit)
{
    return r->axis == ZR_INNER ? e->plan->sum_in_place[unit] : !e->plan->outer_each;
}

int64_t zr_sum_offset(const struct zr_engine *e, const struct zr_axis_reduction *r, const struct zr_flat *f)
{
    if (r->axis == ZR_OUTER && !e->plan->outer_each)
        return zr_plan_inner_sum(e->plan, f, e->at, -1);
    return zr_plan_sum(e->plan, f, (struct zr_where){0, 0}, 0);
}

int64_t zr_whole_sum_bytes(const struct zr_axis_reduction *r, const struct zr_flat *f)
{
    return (r->axis == ZR_INNER ? f->elems : f->inner_elems) * zr_sum_size(f);
}

static struct zr_cut sum_cut(const struct zr_engine *e, const struct zr_axis_reduction *r,
                             const struct zr_flat *f)
{
    if (r->axis == ZR_OUTER)
        return zr_flat_group_sums_cut(f, e->at.inner, f->sum_dtype);
    return zr_flat_sums_cut(f, &f->inner, f->sum_dtype);
}

int zr_gather_sums(struct zr_engine *e, const struct zr_axis_reduction *r, struct zr_stream *s,
                   const struct zr_job *job)
{
    int32_t n, n_segs = 0, unit = job->action.unit;
    const struct zr_flat *f = zr_unit_flats(e, unit, &n);
    bool early = zr_sums_gathered_early(e, r, unit);
    int64_t at = e->plan->full_grad_at;
    if (!e->plan->hop[r->axis].sums_whole)
        return 0;
    for (int32_t i = 0; i < n; i++) {
        if (!f[i].trainable)
            continue;
        int64_t src = zr_sum_offset(e, r, &f[i]);
        e->i.gather_segs[n_segs++] = (struct zr_gather_seg){
            .src = src, .dst = early ? src : at, .in_place = early, .cut = sum_cut(e, r, &f[i])};
        at += zr_whole_sum_bytes(r, &f[i]);
    }
    struct zr_tag tag = zr_job_tag(job);
    return zr_role_gather_on(e, r->role, s, e->i.gather_segs, n_segs, &tag);
}

int zr_sums_barrier(struct zr_engine *e, const struct zr_axis_reduction *r, const struct zr_tag *tag)
{
    return e->plan->hop[r->axis].sums_whole ? zr_role_barrier(e, r->role, tag) : 0;
}
