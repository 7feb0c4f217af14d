/* SPDX-License-Identifier: Apache-2.0 */
/* nccl_places.c: large slices of any size, place by place: NCCL has no collective for them. A group's calls
 * run together. A place without bytes has no call. */
#include "comm/nccl/nccl_pack.h"

ncclResult_t zr_nccl_gather_places(const struct zr_nccl *m, cudaStream_t native,
                                   const struct zr_gather_seg *g)
{
    ncclResult_t res = ncclSuccess;
    for (int place = 0; place < m->base.group.size && !res; place++) {
        char *to = m->base.arena + g->dst + zr_cut_at(&g->cut, place);
        const char *from = place == m->base.group.rank ? m->base.arena + zr_gather_own(g, place) : to;
        int64_t n = zr_cut_bytes(&g->cut, place);
        if (n > 0)
            res = m->set->api.Broadcast(from, to, (size_t)n, ncclInt8, place, m->comm, native);
    }
    return res;
}

ncclResult_t zr_nccl_reduce_places(const struct zr_nccl *m, cudaStream_t native,
                                   const struct zr_reduce_seg *g, char *own, ncclDataType_t type)
{
    ncclResult_t res = ncclSuccess;
    for (int place = 0; place < m->base.group.size && !res; place++) {
        char *slice = m->base.arena + g->src + zr_cut_at(&g->cut, place);
        int64_t n = zr_cut_bytes(&g->cut, place) / zr_dtype_bytes(g->dtype);
        char *to = place == m->base.group.rank ? own : slice; /* of others nothing is received */
        if (n > 0)
            res = m->set->api.Reduce(slice, to, (size_t)n, type, ncclSum, place, m->comm, native);
    }
    return res;
}
