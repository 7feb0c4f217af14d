/* SPDX-License-Identifier: Apache-2.0 */
/* nccl_gather.c: gathers over NCCL. Large segments travel without a copy; small and short ones are packed
 * (nccl_pack.h). All are in one group of calls. */
#include "comm/nccl/nccl_pack.h"

static struct zr_nccl_shape gather_shape_of(const void *seg, int i)
{
    const struct zr_gather_seg *g = (const struct zr_gather_seg *)seg + i;
    return (struct zr_nccl_shape){g->dst, g->cut, 0};
}

static char *own_slice(const struct zr_nccl *m, const struct zr_gather_seg *g)
{
    return m->base.arena + zr_gather_own(g, m->base.group.rank);
}

static bool in_place(const struct zr_nccl *m, const struct zr_gather_seg *g)
{
    return own_slice(m, g) == m->base.arena + g->dst + zr_cut_at(&g->cut, m->base.group.rank);
}

/* Copies this rank's slices into its row. */
static int fill_row(const struct zr_nccl_pack *p, struct zr_stream *s, const struct zr_gather_seg *seg)
{
    struct zr_nccl_copies t = {.n = 0};
    int err = 0, me = p->m->base.group.rank;
    for (int k = 0; k < p->n && !err; k++) {
        const struct zr_nccl_part *part = &p->part[k];
        struct zr_copy_rows c = {.dst = zr_nccl_part_at(p, part, me),
                                 .src = own_slice(p->m, &seg[part->seg]) + part->at,
                                 .row_bytes = part->n,
                                 .bytes = zr_nccl_part_bytes(p, part, me)};
        err = zr_nccl_copy(p->m, s, &t, &c);
    }
    return err ? err : zr_nccl_copy_end(p->m, s, &t);
}

/* Copies all ranks' rows into their segments. A slice in place is not written: others may be reading it. */
static int empty_rows(const struct zr_nccl_pack *p, struct zr_stream *s, const struct zr_gather_seg *seg)
{
    struct zr_nccl_copies t = {.n = 0};
    int err = 0, me = p->m->base.group.rank, size = p->m->base.group.size;
    for (int k = 0; k < p->n && !err; k++) {
        const struct zr_nccl_part *part = &p->part[k];
        bool there = in_place(p->m, &seg[part->seg]);
        err = zr_nccl_copy_part(p, part, 0, there ? me : size, false, s, &t);
        if (!err && there)
            err = zr_nccl_copy_part(p, part, me + 1, size, false, s, &t);
    }
    return err ? err : zr_nccl_copy_end(p->m, s, &t);
}

/* Gathers slices of any size, for which NCCL has no collective: each place broadcasts its slice. A place
 * without bytes has no call. */
static ncclResult_t gather_places(const struct zr_nccl *m, cudaStream_t native, const struct zr_gather_seg *g)
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

static ncclResult_t gather_whole(const struct zr_nccl_pack *p, cudaStream_t native,
                                 const struct zr_gather_seg *seg, int n_seg)
{
    const struct zr_nccl *m = p->m;
    ncclResult_t res = ncclSuccess;
    for (int i = 0; i < n_seg && !res; i++) {
        const struct zr_gather_seg *g = &seg[i];
        bool as_it_lies = g->cut.total > 0 && !zr_nccl_packs(p, i);
        if (as_it_lies && g->cut.at)
            res = gather_places(m, native, g);
        else if (as_it_lies)
            res =
                m->set->api.AllGather(own_slice(m, g), m->base.arena + g->dst,
                                      (size_t)(g->cut.total / m->base.group.size), ncclInt8, m->comm, native);
    }
    return res;
}

static int gather_alone(const struct zr_nccl *m, struct zr_stream *s, const struct zr_gather_seg *seg,
                        int n_seg)
{
    int err = 0;
    for (int i = 0; i < n_seg && !err; i++)
        if (seg[i].cut.total > 0 && !in_place(m, &seg[i]))
            err = m->set->dev->ops->copy(s, m->base.arena + seg[i].dst, own_slice(m, &seg[i]),
                                         seg[i].cut.total);
    return err;
}

int zr_nccl_gather(struct zr_nccl *m, struct zr_stream *s, const struct zr_gather_seg *seg, int n_seg,
                   ncclResult_t *res)
{
    if (zr_nccl_is_alone(m))
        return gather_alone(m, s, seg, n_seg);
    const struct zr_nccl_api *api = &m->set->api;
    cudaStream_t native = m->set->dev->ops->stream_native(s);
    struct zr_nccl_pack p;
    int64_t used = 0;
    int err = 0;
    zr_nccl_pack_open(&p, m, gather_shape_of, seg, n_seg, 0, true);
    bool more = zr_nccl_pack_next(&p, &used, INT64_MAX);
    for (bool first = true; (first || more) && !err && !*res; first = false) {
        err = fill_row(&p, s, seg);
        *res = err ? ncclSuccess : api->GroupStart();
        if (err || *res)
            break;
        if (first)
            *res = gather_whole(&p, native, seg, n_seg);
        if (!*res && more)
            *res = api->AllGather(p.room + m->base.group.rank * p.row, p.room, (size_t)p.row, ncclInt8,
                                  m->comm, native);
        ncclResult_t ended = api->GroupEnd();
        *res = *res ? *res : ended;
        if (!*res)
            err = empty_rows(&p, s, seg);
        used = 0;
        more = zr_nccl_pack_next(&p, &used, INT64_MAX);
    }
    return err;
}
