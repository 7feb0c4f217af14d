/* engine_hop.c: one hop of a reduction: gradients of one axis's ranks added up, and where the optimizer wants
 * all of the sum, gathered again. */
#include "shard/engine/engine_issue.h"

struct zr_hop_run zr_inner_hop(const struct zr_engine *e)
{
    return (struct zr_hop_run){.role = ZR_ROLE_REDUCE, .axis = ZR_INNER, .wire = e->opt.wire_dtype};
}

static struct zr_reduce_seg hop_seg(const struct zr_engine *e, const struct zr_flat *f,
                                    const struct zr_action *a)
{
    return (struct zr_reduce_seg){.src = zr_plan_grad_full(e->plan, f, a->slot),
                                  .dst = zr_plan_sum(e->plan, f, e->at, a->sum),
                                  .cut = f->inner,
                                  .dtype = f->dtype,
                                  .accumulate = a->accumulate && !e->plan->sum_in_place[a->unit]};
}

/* In place: the gradient is consumed by this reduce anyway. */
static int narrow(struct zr_engine *e, enum zr_dtype wire, struct zr_reduce_seg *seg)
{
    void *grad = e->reduce_base + seg->src;
    int64_t size = zr_dtype_bytes(seg->dtype), ratio = size / zr_dtype_bytes(wire);
    ZR_TRY(e->dev->ops->cast(e->reduce_stream, grad, wire, grad, seg->dtype, seg->cut.total / size));
    seg->cut.each /= ratio;
    seg->cut.total /= ratio;
    seg->dtype = wire;
    return 0;
}

int zr_hop_reduce(struct zr_engine *e, const struct zr_hop_run *h, const struct zr_job *job)
{
    int32_t n, n_segs = 0;
    const struct zr_flat *f = zr_unit_flats(e, job->action.unit, &n);
    bool travels = h->wire && e->plan->hop[h->axis].size > 1;
    for (int32_t i = 0; i < n; i++) {
        if (!f[i].trainable)
            continue;
        struct zr_reduce_seg seg = hop_seg(e, &f[i], &job->action);
        if (travels && zr_dtype_bytes(h->wire) < zr_dtype_bytes(seg.dtype))
            ZR_TRY(narrow(e, h->wire, &seg));
        e->i.reduce_segs[n_segs++] = seg;
    }
    struct zr_tag tag = zr_job_tag(job);
    return zr_role_reduce(e, h->role, e->i.reduce_segs, n_segs, &tag);
}

int zr_hop_gather_sums(struct zr_engine *e, const struct zr_hop_run *h, const struct zr_job *job)
{
    int32_t n, n_segs = 0, unit = job->action.unit;
    const struct zr_flat *f = zr_unit_flats(e, unit, &n);
    bool in_place = e->plan->sum_in_place[unit];
    int64_t at = e->plan->full_grad_at, size = e->plan->hop[h->axis].size;
    if (!e->plan->hop[h->axis].sums_whole)
        return 0;
    for (int32_t i = 0; i < n; i++) {
        if (!f[i].trainable)
            continue;
        int64_t shard = f[i].inner_elems * (int64_t)sizeof(float);
        int64_t home = zr_plan_sum(e->plan, &f[i], (struct zr_where){0, 0}, 0);
        e->i.gather_segs[n_segs++] = (struct zr_gather_seg){
            .src = home,
            .dst = in_place ? home : at,
            .in_place = in_place,
            .cut = {shard, f[i].inner.total / zr_dtype_bytes(f[i].dtype) * (int64_t)sizeof(float)}};
        at += shard * size;
    }
    struct zr_tag tag = zr_job_tag(job);
    return zr_role_gather(e, h->role, e->i.gather_segs, n_segs, &tag);
}

int zr_hop_barrier(struct zr_engine *e, const struct zr_hop_run *h, const struct zr_tag *tag)
{
    return e->plan->hop[h->axis].sums_whole ? zr_role_barrier(e, h->role, tag) : 0;
}
