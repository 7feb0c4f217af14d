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

/* The sum can land in dst at once; else it lands in this rank's slice of src. */
static bool goes_straight(const struct zr_reduce_seg *g)
{
    return g->dtype == ZR_F32 && !g->accumulate;
}

static ncclResult_t fast_seg(struct zr_nccl *m, cudaStream_t native, const struct zr_reduce_seg *g)
{
    const struct zr_nccl_api *api = &m->pair->api;
    int world = m->base.world, me = m->base.rank;
    int64_t size = zr_dtype_bytes(g->dtype);
    char *src = m->arena + g->src, *own = goes_straight(g) ? m->arena + g->dst : src + me * g->shard_bytes;
    ncclResult_t res = ncclSuccess;
    if (g->total_bytes == world * g->shard_bytes)
        return api->ReduceScatter(src, own, (size_t)(g->shard_bytes / size), type_of(g->dtype), ncclSum,
                                  m->comm, native);
    for (int r = 0; r < world && !res; r++) {
        char *slice = src + r * g->shard_bytes;
        int64_t n = zr_slice_bytes(g->shard_bytes, g->total_bytes, r) / size;
        if (n > 0)
            res = api->Reduce(slice, r == me ? own : slice, (size_t)n, type_of(g->dtype), ncclSum, r, m->comm,
                              native);
    }
    return res;
}

int zr_nccl_reduce_fast(struct zr_nccl *m, struct zr_stream *s, const struct zr_reduce_seg *seg, int n_seg,
                        ncclResult_t *res)
{
    const struct zr_nccl_pair *p = m->pair;
    const struct zr_device_ops *d = p->dev->ops;
    cudaStream_t native = d->stream_native(s);
    *res = p->api.GroupStart();
    if (*res)
        return 0;
    for (int i = 0; i < n_seg && !*res; i++)
        if (seg[i].total_bytes > 0)
            *res = fast_seg(m, native, &seg[i]);
    ncclResult_t ended = p->api.GroupEnd();
    if (!*res)
        *res = ended;
    int err = 0;
    for (int i = 0; i < n_seg && !err && !*res; i++) {
        const struct zr_reduce_seg *g = &seg[i];
        int64_t n = zr_slice_bytes(g->shard_bytes, g->total_bytes, m->base.rank) / zr_dtype_bytes(g->dtype);
        const char *own = m->arena + g->src + m->base.rank * g->shard_bytes;
        float *dst = (float *)(m->arena + g->dst);
        if (n == 0 || goes_straight(g))
            continue;
        err = g->accumulate ? d->add(s, dst, own, g->dtype, n) : d->cast(s, dst, ZR_F32, own, g->dtype, n);
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
