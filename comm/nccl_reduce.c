/* nccl_reduce.c: a unit's gradients to their owners, by NCCL's own sum or by the fixed tree.
 *
 * NCCL's sum is fastest, but its order depends on the algorithm it picks, and a bf16 ring rounds at every
 * hop. The fixed tree moves the same bytes per rank (each gives every owner a slice and gets world-1 of its
 * own), and adds them in fp32 with one rounding, like all other communicators. */
#include "comm/nccl_comm.h"

static ncclDataType_t type_of(enum zr_dtype t)
{
    return t == ZR_F32 ? ncclFloat32 : ncclBfloat16;
}

/* ---- by NCCL ---- */

static void reduce_slices(const void *seg, int i, int64_t *shard_bytes, int64_t *total_bytes)
{
    const struct zr_reduce_seg *g = (const struct zr_reduce_seg *)seg + i;
    *shard_bytes = g->shard_bytes;
    *total_bytes = g->total_bytes;
}

/* The sum can land in dst at once; else it lands in this rank's slice of src, or of the room. */
static bool goes_straight(const struct zr_nccl *m, const struct zr_reduce_seg *g)
{
    return g->dtype == ZR_F32 && !g->accumulate &&
           zr_nccl_fits(m->base.world, g->shard_bytes, g->total_bytes);
}

static ncclResult_t reduce_whole(const struct zr_nccl *m, cudaStream_t native,
                                 const struct zr_reduce_seg *seg, int n_seg)
{
    ncclResult_t res = ncclSuccess;
    int world = m->base.world, me = m->base.rank;
    for (int i = 0; i < n_seg && !res; i++) {
        const struct zr_reduce_seg *g = &seg[i];
        char *src = m->arena + g->src,
             *own = goes_straight(m, g) ? m->arena + g->dst : src + me * g->shard_bytes;
        if (g->total_bytes > 0 && zr_nccl_fits(world, g->shard_bytes, g->total_bytes))
            res = m->pair->api.ReduceScatter(src, own,
                                             (size_t)(g->total_bytes / world / zr_dtype_bytes(g->dtype)),
                                             type_of(g->dtype), ncclSum, m->comm, native);
    }
    return res;
}

static ncclResult_t reduce_parts(const struct zr_nccl *m, cudaStream_t native,
                                 const struct zr_reduce_seg *seg, const struct zr_nccl_cut *c)
{
    ncclResult_t res = ncclSuccess;
    for (int k = 0; k < c->n && !res; k++) {
        const struct zr_nccl_part *p = &c->part[k];
        enum zr_dtype t = seg[p->seg].dtype;
        res = m->pair->api.ReduceScatter(p->room, p->room + m->base.rank * p->n,
                                         (size_t)(p->n / zr_dtype_bytes(t)), type_of(t), ncclSum, m->comm,
                                         native);
    }
    return res;
}

/* n bytes of the sum at own, the first of them byte at of this rank's slice, to where they belong. */
static int keep_sum(const struct zr_nccl *m, struct zr_stream *s, const struct zr_reduce_seg *g, int64_t at,
                    const char *own, int64_t n)
{
    const struct zr_device_ops *d = m->pair->dev->ops;
    int64_t size = zr_dtype_bytes(g->dtype);
    float *dst = (float *)(m->arena + g->dst) + at / size;
    if (n <= 0)
        return 0;
    return g->accumulate ? d->add(s, dst, own, g->dtype, n / size)
                         : d->cast(s, dst, ZR_F32, own, g->dtype, n / size);
}

static int keep_whole(const struct zr_nccl *m, struct zr_stream *s, const struct zr_reduce_seg *seg,
                      int n_seg)
{
    int err = 0;
    for (int i = 0; i < n_seg && !err; i++) {
        const struct zr_reduce_seg *g = &seg[i];
        if (zr_nccl_fits(m->base.world, g->shard_bytes, g->total_bytes) && !goes_straight(m, g))
            err = keep_sum(m, s, g, 0, m->arena + g->src + m->base.rank * g->shard_bytes,
                           g->total_bytes / m->base.world);
    }
    return err;
}

static int keep_parts(const struct zr_nccl *m, struct zr_stream *s, const struct zr_reduce_seg *seg,
                      const struct zr_nccl_cut *c)
{
    int err = 0, me = m->base.rank;
    for (int k = 0; k < c->n && !err; k++) {
        const struct zr_nccl_part *p = &c->part[k];
        const struct zr_reduce_seg *g = &seg[p->seg];
        int64_t left = zr_slice_bytes(g->shard_bytes, g->total_bytes, me) - p->at;
        err = keep_sum(m, s, g, p->at, p->room + me * p->n, left < p->n ? left : p->n);
    }
    return err;
}

int zr_nccl_reduce_fast(struct zr_nccl *m, struct zr_stream *s, const struct zr_reduce_seg *seg, int n_seg,
                        ncclResult_t *res)
{
    const struct zr_nccl_api *api = &m->pair->api;
    cudaStream_t native = m->pair->dev->ops->stream_native(s);
    struct zr_nccl_cut c = {0};
    bool more = zr_nccl_cut(m, &c, n_seg, reduce_slices, seg);
    int err = 0;
    for (bool first = true; (first || more) && !err && !*res; first = false) {
        for (int k = 0; k < c.n && !err; k++) {
            const struct zr_reduce_seg *g = &seg[c.part[k].seg];
            err = zr_nccl_move_part(m, s, &c.part[k], m->arena + g->src, g->shard_bytes, g->total_bytes, -1,
                                    true);
        }
        *res = err ? ncclSuccess : api->GroupStart();
        if (err || *res)
            break;
        if (first)
            *res = reduce_whole(m, native, seg, n_seg);
        if (!*res)
            *res = reduce_parts(m, native, seg, &c);
        ncclResult_t ended = api->GroupEnd();
        *res = *res ? *res : ended;
        if (!*res && first)
            err = keep_whole(m, s, seg, n_seg);
        if (!*res && !err)
            err = keep_parts(m, s, seg, &c);
        more = zr_nccl_cut(m, &c, n_seg, reduce_slices, seg);
    }
    return err;
}

/* ---- by the fixed tree ---- */

/* A range of one segment's slices: bytes [at, at + n) of every rank's. Shorter, or empty, in a ragged one. */
struct piece {
    const struct zr_reduce_seg *seg;
    int64_t at, n;
    int64_t place; /* in the room of each peer */
};

static int64_t piece_bytes(const struct piece *p, int rank)
{
    int64_t left = zr_slice_bytes(p->seg->shard_bytes, p->seg->total_bytes, rank) - p->at;
    return left <= 0 ? 0 : left < p->n ? left : p->n;
}

/* Where rank's part of a piece of mine arrives. */
static char *arrival(const struct zr_nccl *m, const struct piece *p, int rank, int64_t room)
{
    int k = rank < m->base.rank ? rank : rank - 1;
    return m->arena + m->scratch_at + k * room + p->place;
}

static ncclResult_t swap_pieces(struct zr_nccl *m, cudaStream_t native, const struct piece *piece, int n,
                                int64_t room)
{
    const struct zr_nccl_api *api = &m->pair->api;
    int world = m->base.world, me = m->base.rank;
    if (world == 1 || n == 0)
        return ncclSuccess;
    ncclResult_t res = api->GroupStart();
    if (res)
        return res;
    for (int i = 0; i < n; i++)
        for (int k = 1; k < world && !res; k++) {
            int to = (me + k) % world, from = (me + world - k) % world;
            int64_t give = piece_bytes(&piece[i], to), take = piece_bytes(&piece[i], me);
            const char *mine = m->arena + piece[i].seg->src + to * piece[i].seg->shard_bytes + piece[i].at;
            if (give > 0)
                res = api->Send(mine, (size_t)give, ncclInt8, to, m->comm, native);
            if (take > 0 && !res)
                res = api->Recv(arrival(m, &piece[i], from, room), (size_t)take, ncclInt8, from, m->comm,
                                native);
        }
    ncclResult_t ended = api->GroupEnd();
    return res ? res : ended;
}

static int add_piece(struct zr_nccl *m, struct zr_stream *s, const struct piece *p, int64_t room)
{
    const struct zr_reduce_seg *g = p->seg;
    int64_t size = zr_dtype_bytes(g->dtype), n = piece_bytes(p, m->base.rank) / size;
    const void *src[ZR_MAX_SOURCES];
    if (n == 0)
        return 0;
    for (int r = 0; r < m->base.world; r++)
        src[r] = r == m->base.rank ? m->arena + g->src + r * g->shard_bytes + p->at : arrival(m, p, r, room);
    float *dst = (float *)(m->arena + g->dst) + p->at / size;
    return m->pair->dev->ops->sum_tree(s, dst, src, m->base.world, g->dtype, n, g->accumulate);
}

int zr_nccl_reduce_fixed(struct zr_nccl *m, struct zr_stream *s, const struct zr_reduce_seg *seg, int n_seg,
                         ncclResult_t *res)
{
    cudaStream_t native = m->pair->dev->ops->stream_native(s);
    int world = m->base.world, err = 0;
    /* Alone there is nothing to receive, and no limit to a piece. */
    int64_t room = world == 1 ? INT64_MAX : m->scratch_bytes / (world - 1) / ZR_NCCL_ALIGN * ZR_NCCL_ALIGN;
    struct piece piece[ZR_NCCL_PIECES];
    int64_t at = 0;
    *res = ncclSuccess;
    for (int i = 0; i < n_seg && !err && !*res;) {
        /* As many pieces as there is room for, alike on all ranks: measured by rank 0's slice, the longest.
         */
        int n = 0;
        int64_t used = 0;
        while (i < n_seg && n < ZR_NCCL_PIECES && used < room) {
            int64_t left = zr_slice_bytes(seg[i].shard_bytes, seg[i].total_bytes, 0) - at;
            int64_t take = left < room - used ? left : room - used;
            if (take > 0)
                piece[n++] = (struct piece){&seg[i], at, take, used};
            used += (take + 127) / 128 * 128;
            at += take;
            if (take == left)
                i++, at = 0;
        }
        *res = swap_pieces(m, native, piece, n, room);
        for (int k = 0; k < n && !err && !*res; k++)
            err = add_piece(m, s, &piece[k], room);
    }
    return err;
}
