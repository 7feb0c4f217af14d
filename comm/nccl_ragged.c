/* nccl_ragged.c: segments whose last slices are short or empty: the biases and norms of a stacked model,
 * which lie in place at stages 0 and 1.
 *
 * NCCL's gathers and reduces want slices of one length. Taken as they lie they would go past the segment's
 * end, into memory that others use; one operation per owner would make their number grow with the world. So
 * they go by way of a room at the end of the reduce arena, in which every slice has its full length, and a
 * copy between there and the segment. What does not fit goes in rounds. */
#include "comm/nccl_comm.h"

bool zr_nccl_cut(const struct zr_nccl *m, struct zr_nccl_cut *c, int n_seg,
                 void (*slices)(const void *seg, int i, int64_t *shard_bytes, int64_t *total_bytes),
                 const void *seg)
{
    int world = m->base.world;
    char *room = m->pair->reduce.arena + m->room_at;
    int64_t used = 0, shard, total;
    for (c->n = 0; c->seg < n_seg && c->n < ZR_NCCL_PIECES;) {
        slices(seg, c->seg, &shard, &total);
        int64_t left = zr_slice_bytes(shard, total, 0) - c->at; /* rank 0's slice is the longest */
        if (zr_nccl_fits(world, shard, total) || left <= 0) {
            c->seg++, c->at = 0;
            continue;
        }
        int64_t fits = (m->room_bytes - used) / world / 128 * 128, n = left < fits ? left : fits;
        if (n <= 0)
            break;
        c->part[c->n++] = (struct zr_nccl_part){c->seg, c->at, n, room + used};
        used += (world * n + ZR_NCCL_ALIGN - 1) / ZR_NCCL_ALIGN * ZR_NCCL_ALIGN;
        c->at += n;
    }
    return c->n > 0;
}

int zr_nccl_move_part(const struct zr_nccl *m, struct zr_stream *s, const struct zr_nccl_part *part,
                      char *flat, int64_t shard_bytes, int64_t total_bytes, int only, bool into_room)
{
    const struct zr_device_ops *d = m->pair->dev->ops;
    int first = only < 0 ? 0 : only, end = only < 0 ? m->base.world : only + 1, err = 0;
    /* Whole slices lie end to end, here and there. */
    if (only < 0 && part->n == shard_bytes)
        return into_room ? d->copy(s, part->room, flat, total_bytes)
                         : d->copy(s, flat, part->room, total_bytes);
    for (int r = first; r < end && !err; r++) {
        int64_t left = zr_slice_bytes(shard_bytes, total_bytes, r) - part->at,
                n = left < part->n ? left : part->n;
        char *slice = flat + r * shard_bytes + part->at, *room = part->room + r * part->n;
        if (n > 0)
            err = into_room ? d->copy(s, room, slice, n) : d->copy(s, slice, room, n);
    }
    return err;
}

/* --- gathers --- */

static void gather_slices(const void *seg, int i, int64_t *shard_bytes, int64_t *total_bytes)
{
    const struct zr_gather_seg *g = (const struct zr_gather_seg *)seg + i;
    *shard_bytes = g->shard_bytes;
    *total_bytes = g->total_bytes;
}

static char *own_slice(const struct zr_nccl *m, const struct zr_gather_seg *g)
{
    return m->arena + g->src + m->base.rank * g->src_stride;
}

static bool has_all(const struct zr_nccl *m, const struct zr_nccl_part *p, const struct zr_gather_seg *g)
{
    return zr_slice_bytes(g->shard_bytes, g->total_bytes, m->base.rank) - p->at >= p->n;
}

/* A short slice goes from the room, where what is behind it is nobody's. */
static int fill_rooms(struct zr_nccl *m, struct zr_stream *s, const struct zr_gather_seg *seg,
                      const struct zr_nccl_cut *c)
{
    int err = 0, me = m->base.rank;
    for (int k = 0; k < c->n && !err; k++) {
        const struct zr_gather_seg *g = &seg[c->part[k].seg];
        if (!has_all(m, &c->part[k], g))
            err = zr_nccl_move_part(m, s, &c->part[k], own_slice(m, g) - me * g->shard_bytes, g->shard_bytes,
                                    g->total_bytes, me, true);
    }
    return err;
}

static ncclResult_t gather_parts(const struct zr_nccl *m, cudaStream_t native,
                                 const struct zr_gather_seg *seg, const struct zr_nccl_cut *c)
{
    ncclResult_t res = ncclSuccess;
    for (int k = 0; k < c->n && !res; k++) {
        const struct zr_nccl_part *p = &c->part[k];
        const struct zr_gather_seg *g = &seg[p->seg];
        const char *from = has_all(m, p, g) ? own_slice(m, g) + p->at : p->room + m->base.rank * p->n;
        res = m->pair->api.AllGather(from, p->room, (size_t)p->n, ncclInt8, m->comm, native);
    }
    return res;
}

static ncclResult_t gather_whole(const struct zr_nccl *m, cudaStream_t native,
                                 const struct zr_gather_seg *seg, int n_seg)
{
    ncclResult_t res = ncclSuccess;
    int world = m->base.world;
    for (int k = 0; k < n_seg && !res; k++) {
        const struct zr_gather_seg *g = &seg[k];
        if (g->total_bytes > 0 && zr_nccl_fits(world, g->shard_bytes, g->total_bytes))
            res = m->pair->api.AllGather(own_slice(m, g), m->arena + g->dst, (size_t)(g->total_bytes / world),
                                         ncclInt8, m->comm, native);
    }
    return res;
}

int zr_nccl_gather(struct zr_nccl *m, struct zr_stream *s, const struct zr_gather_seg *seg, int n_seg,
                   ncclResult_t *res)
{
    const struct zr_nccl_api *api = &m->pair->api;
    cudaStream_t native = m->pair->dev->ops->stream_native(s);
    struct zr_nccl_cut c = {0};
    bool more = zr_nccl_cut(m, &c, n_seg, gather_slices, seg);
    int err = 0;
    for (bool first = true; (first || more) && !err && !*res; first = false) {
        err = fill_rooms(m, s, seg, &c);
        *res = err ? ncclSuccess : api->GroupStart();
        if (err || *res)
            break;
        if (first)
            *res = gather_whole(m, native, seg, n_seg);
        if (!*res)
            *res = gather_parts(m, native, seg, &c);
        ncclResult_t ended = api->GroupEnd();
        *res = *res ? *res : ended;
        for (int k = 0; k < c.n && !err && !*res; k++) {
            const struct zr_gather_seg *g = &seg[c.part[k].seg];
            err = zr_nccl_move_part(m, s, &c.part[k], m->arena + g->dst, g->shard_bytes, g->total_bytes, -1,
                                    false);
        }
        more = zr_nccl_cut(m, &c, n_seg, gather_slices, seg);
    }
    return err;
}
