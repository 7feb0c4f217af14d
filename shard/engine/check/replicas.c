/* SPDX-License-Identifier: Apache-2.0 */
/* replicas.c: compares copies that must be equal (cfg.debug.check). With HSDP every group updates a copy of
 * the parameters. With tp every rank updates the tensors that are not cut (compare_tp.c). The copies get the
 * same bits if the update gives the same result for the same arguments. A program's optim.update may not.
 * Copies then drift apart, and nothing shows it but a loss that is a little off.
 *
 * Ranks exchange a digest of the parameters and master weights that each keeps. Digests of ranks with the
 * same part of a copy are compared. Only if some differ are tensors compared one by one, to name one. All
 * ranks get the same digests, and so the same answer. Copies that differ stay different. So they
 * are not compared after every step (zr_compare_is_due). To compare, the host waits for all streams, which
 * would hide races. */
#include "shard/engine/check/observers.h"
#include "shard/engine/internal.h"
#include "shard/engine/issue.h"

#include <stdlib.h>

/* Compares the tensors [first, end) of all groups. all: (n_all) memory for the ranks' digests. differ gets
 * two ranks that should be equal and are not, or -1 twice. */
static int compare_tensors(struct zr_engine *e, int32_t first, int32_t end, uint64_t *all, int32_t differ[2])
{
    uint64_t digest;
    ZR_TRY(zr_digest_tensors(e, first, end, false, &digest));
    ZR_TRY(zr_engine_exchange(e, &digest, sizeof digest, all));
    const struct zr_comm *control = e->role[ZR_ROLE_CONTROL].comm;
    int32_t group_size = e->plan->hop[ZR_INNER].size;
    differ[0] = differ[1] = -1;
    for (int32_t p = group_size; differ[0] < 0 && p < e->dp; p++) {
        int32_t a = zr_comm_rank(control, p % group_size), b = zr_comm_rank(control, p);
        if (all[a] != all[b])
            differ[0] = a, differ[1] = b;
    }
    return 0;
}

/* Fails with the name of the first tensor that differs. differ: two ranks whose copies differ somewhere. */
static int report_difference(struct zr_engine *e, uint64_t *all, int32_t differ[2])
{
    int32_t found[2] = {-1, -1}, t = 0;
    /* pipeline stages have different tensors */
    for (; e->pp == 1 && found[0] < 0 && t < e->layout->n_tensors; t++)
        ZR_TRY(compare_tensors(e, t, t + 1, all, found));
    const char *name = found[0] < 0 ? "?" : e->layout->tensors[t - 1].name;
    if (found[0] >= 0)
        differ = found;
    return zr_fail(ZERO_ERR_MISMATCH,
                   "check: after step %u rank %d and rank %d hold different copies of the same part of "
                   "tensor %s: with hybrid hsdp every group updates its own copy%s",
                   zr_last_step_number(e), differ[0], differ[1], name,
                   e->opt.update ? ", so optim.update must give the same weights for the same arguments"
                                 : ", and one of them was changed by something else");
}

/* Compares the copies of the groups, and names a tensor if they differ. */
static int compare_groups(struct zr_engine *e)
{
    uint64_t *all = malloc((size_t)e->n_all * sizeof *all);
    int32_t differ[2];
    int err = all ? 0 : zr_fail(ZERO_ERR_NOMEM, "check: no memory to compare the groups' copies");
    if (!err)
        err = zr_engine_drain(e);
    if (!err)
        err = compare_tensors(e, 0, e->layout->n_tensors, all, differ);
    if (!err && differ[0] >= 0)
        err = report_difference(e, all, differ);
    free(all);
    return err ? zr_engine_fail(e, err, zr_error_text()) : 0;
}

static int replicas_step(struct zr_observer *o, enum zr_step_moment at, const char *call)
{
    (void)call;
    if (at != ZR_STEP_OVER || !zr_compare_is_due(o->e))
        return 0;
    int err = o->e->plan->hop[ZR_OUTER].sums_whole ? compare_groups(o->e) : 0;
    return err ? err : zr_engine_tp_compare(o->e);
}

int zr_replicas_open(struct zr_engine *e)
{
    static const struct zr_observer_ops ops = {.on_step = replicas_step};
    struct zr_observer *o;
    return e->opt.check ? zr_observer_new(e, &ops, sizeof *o, 0, 0, &o) : 0;
}
