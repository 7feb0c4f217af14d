/* nccl_reduce.c: a unit's gradients to their owners, by NCCL's own sum or by the fixed tree.
 *
 * NCCL's sum is fastest, but its order depends on the algorithm it picks, and a bf16 ring rounds at every
 * hop. The fixed tree moves the same bytes per rank (each gives every owner a slice and gets world-1 of its
 * own), and adds them in fp32 with one rounding, like all other communicators. */
#include "comm/nccl_pack.h"

static ncclDataType_t type_of(enum zr_dtype t)
{
    return t == ZR_F32 ? ncclFloat32 : ncclBfloat16;
}

static struct zr_nccl_shape shape_of(const void *seg, int i)
{
    const struct zr_reduce_seg *g = (const struct zr_reduce_seg *)seg + i;
    return (struct zr_nccl_shape){g->src, g->shard_bytes, g->total_bytes, g->dtype};
}

/* All ranks' rows: what every owner is to get of this rank. */
static int fill_rows(const struct zr_nccl_pack *p, struct zr_stream *s)
{
    struct zr_nccl_copies t = {.n = 0};
    int err = 0;
    for (int k = 0; k < p->n && !err; k++)
        err = zr_nccl_copy_part(p, &p->part[k], 0, p->m->base.world, true, s, &t);
    return err ? err : zr_nccl_copy_end(p->m, s, &t);
}

/* ---- by NCCL ---- */

/* A sum is of one type, so each has rows of its own: in one room, one group. */
enum { N_TYPES = 2 };
static const enum zr_dtype types[N_TYPES] = {ZR_F32, ZR_BF16};

struct packs {
    struct zr_nccl_pack of[N_TYPES];
};

static bool next_round(struct packs *p)
{
    int64_t used = 0;
    bool more = false;
    for (int t = 0; t < N_TYPES; t++)
        more |= zr_nccl_pack_next(&p->of[t], &used, INT64_MAX);
    return more;
}

static bool goes_packed(const struct packs *p, int i)
{
    return zr_nccl_packs(&p->of[0], i) || zr_nccl_packs(&p->of[1], i);
}

/* The sum can land in dst at once; else it lands in this rank's slice of src. */
static bool goes_straight(const struct zr_reduce_seg *g)
{
    return g->dtype == ZR_F32 && !g->accumulate;
}

static ncclResult_t reduce_whole(const struct zr_nccl *m, cudaStream_t native, const struct packs *p,
                                 const struct zr_reduce_seg *seg, int n_seg)
{
    ncclResult_t res = ncclSuccess;
    int world = m->base.world, me = m->base.rank;
    for (int i = 0; i < n_seg && !res; i++) {
        const struct zr_reduce_seg *g = &seg[i];
        char *src = m->arena + g->src,
             *own = goes_straight(g) ? m->arena + g->dst : src + me * g->shard_bytes;
        if (g->total_bytes > 0 && !goes_packed(p, i))
            res = m->pair->api.ReduceScatter(src, own,
                                             (size_t)(g->total_bytes / world / zr_dtype_bytes(g->dtype)),
                                             type_of(g->dtype), ncclSum, m->comm, native);
    }
    return res;
}

static ncclResult_t reduce_rows(const struct zr_nccl *m, cudaStream_t native, const struct packs *packs)
{
    ncclResult_t res = ncclSuccess;
    for (int t = 0; t < N_TYPES && !res; t++) {
        const struct zr_nccl_pack *p = &packs->of[t];
        if (p->n > 0)
            res = m->pair->api.ReduceScatter(p->room, p->room + m->base.rank * p->row,
                                             (size_t)(p->row / zr_dtype_bytes(types[t])), type_of(types[t]),
                                             ncclSum, m->comm, native);
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

static int keep_whole(const struct zr_nccl *m, struct zr_stream *s, const struct packs *p,
                      const struct zr_reduce_seg *seg, int n_seg)
{
    int err = 0;
    for (int i = 0; i < n_seg && !err; i++) {
        const struct zr_reduce_seg *g = &seg[i];
        if (!goes_packed(p, i) && !goes_straight(g))
            err = keep_sum(m, s, g, 0, m->arena + g->src + m->base.rank * g->shard_bytes,
                           g->total_bytes / m->base.world);
    }
    return err;
}

/* This rank's row. What is only to be copied goes as one kernel. */
static int keep_row(const struct zr_nccl_pack *p, struct zr_stream *s, const struct zr_reduce_seg *seg)
{
    struct zr_nccl_copies t = {.n = 0};
    int err = 0, me = p->m->base.rank;
    for (int k = 0; k < p->n && !err; k++) {
        const struct zr_nccl_part *part = &p->part[k];
        const struct zr_reduce_seg *g = &seg[part->seg];
        const char *own = zr_nccl_part_at(p, part, me);
        int64_t n = zr_nccl_part_bytes(p, part, me);
        const struct zr_copy_rows c = {
            .dst = p->m->arena + g->dst + part->at, .src = own, .row_bytes = part->n, .bytes = n};
        err = goes_straight(g) ? zr_nccl_copy(p->m, s, &t, &c) : keep_sum(p->m, s, g, part->at, own, n);
    }
    return err ? err : zr_nccl_copy_end(p->m, s, &t);
}

int zr_nccl_reduce_fast(struct zr_nccl *m, struct zr_stream *s, const struct zr_reduce_seg *seg, int n_seg,
                        ncclResult_t *res)
{
    const struct zr_nccl_api *api = &m->pair->api;
    cudaStream_t native = m->pair->dev->ops->stream_native(s);
    struct packs p;
    int err = 0;
    for (int t = 0; t < N_TYPES; t++)
        zr_nccl_pack_open(&p.of[t], m, shape_of, seg, n_seg, types[t], true);
    bool more = next_round(&p);
    for (bool first = true; (first || more) && !err && !*res; first = false) {
        for (int t = 0; t < N_TYPES && !err; t++)
            err = fill_rows(&p.of[t], s);
        *res = err ? ncclSuccess : api->GroupStart();
        if (err || *res)
            break;
        if (first)
            *res = reduce_whole(m, native, &p, seg, n_seg);
        if (!*res)
            *res = reduce_rows(m, native, &p);
        ncclResult_t ended = api->GroupEnd();
        *res = *res ? *res : ended;
        if (!*res && first)
            err = keep_whole(m, s, &p, seg, n_seg);
        for (int t = 0; t < N_TYPES && !err && !*res; t++)
            err = keep_row(&p.of[t], s, seg);
        more = next_round(&p);
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

/* Where arrives what rank sends: room bytes of each. */
static char *arrival(const struct zr_nccl *m, int rank, int64_t room, int64_t place)
{
    int k = rank < m->base.rank ? rank : rank - 1;
    return m->arena + m->scratch_at + k * room + place;
}

/* Every rank's row, and its slices of what travels as it lies, to it; from every rank what is mine. */
static ncclResult_t swap_pieces(struct zr_nccl *m, cudaStream_t native, const struct zr_nccl_pack *p,
                                const struct piece *piece, int n, int64_t room)
{
    const struct zr_nccl_api *api = &m->pair->api;
    int world = m->base.world, me = m->base.rank;
    if (world == 1)
        return ncclSuccess;
    ncclResult_t res = api->GroupStart();
    if (res)
        return res;
    for (int k = 1; k < world && p->n > 0 && !res; k++) {
        int to = (me + k) % world, from = (me + world - k) % world;
        res = api->Send(p->room + to * p->row, (size_t)p->row, ncclInt8, to, m->comm, native);
        if (!res)
            res = api->Recv(arrival(m, from, room, 0), (size_t)p->row, ncclInt8, from, m->comm, native);
    }
    for (int i = 0; i < n; i++)
        for (int k = 1; k < world && !res; k++) {
            int to = (me + k) % world, from = (me + world - k) % world;
            int64_t give = piece_bytes(&piece[i], to), take = piece_bytes(&piece[i], me);
            const char *mine = m->arena + piece[i].seg->src + to * piece[i].seg->shard_bytes + piece[i].at;
            if (give > 0)
                res = api->Send(mine, (size_t)give, ncclInt8, to, m->comm, native);
            if (take > 0 && !res)
                res = api->Recv(arrival(m, from, room, piece[i].place), (size_t)take, ncclInt8, from, m->comm,
                                native);
        }
    ncclResult_t ended = api->GroupEnd();
    return res ? res : ended;
}

/* bytes of this rank's own slice, the first of them byte at, and what has arrived for them at place. */
static int add_up(struct zr_nccl *m, struct zr_stream *s, const struct zr_reduce_seg *g, int64_t at,
                  int64_t bytes, const char *own, int64_t place, int64_t room)
{
    int64_t size = zr_dtype_bytes(g->dtype);
    const void *src[ZR_MAX_SOURCES];
    if (bytes == 0)
        return 0;
    for (int r = 0; r < m->base.world; r++)
        src[r] = r == m->base.rank ? own : arrival(m, r, room, place);
    float *dst = (float *)(m->arena + g->dst) + at / size;
    return m->pair->dev->ops->sum_tree(s, dst, src, m->base.world, g->dtype, bytes / size, g->accumulate);
}

static int add_piece(struct zr_nccl *m, struct zr_stream *s, const struct piece *p, int64_t room)
{
    int me = m->base.rank;
    const char *own = m->arena + p->seg->src + me * p->seg->shard_bytes + p->at;
    return add_up(m, s, p->seg, p->at, piece_bytes(p, me), own, p->place, room);
}

static int add_row(struct zr_nccl *m, struct zr_stream *s, const struct zr_nccl_pack *p,
                   const struct zr_reduce_seg *seg, int64_t room)
{
    int err = 0, me = m->base.rank;
    for (int k = 0; k < p->n && !err; k++) {
        const struct zr_nccl_part *part = &p->part[k];
        err = add_up(m, s, &seg[part->seg], part->at, zr_nccl_part_bytes(p, part, me),
                     zr_nccl_part_at(p, part, me), part->place, room);
    }
    return err;
}

int zr_nccl_reduce_fixed(struct zr_nccl *m, struct zr_stream *s, const struct zr_reduce_seg *seg, int n_seg,
                         ncclResult_t *res)
{
    cudaStream_t native = m->pair->dev->ops->stream_native(s);
    int world = m->base.world, err = 0;
    /* Alone there is nothing to receive, and no limit to a piece. */
    int64_t room = world == 1 ? INT64_MAX : m->scratch_bytes / (world - 1) / ZR_NCCL_ALIGN * ZR_NCCL_ALIGN;
    struct zr_nccl_pack p;
    struct piece piece[ZR_NCCL_PIECES];
    int64_t at = 0;
    *res = ncclSuccess;
    zr_nccl_pack_open(&p, m, shape_of, seg, n_seg, 0, false);
    for (int i = 0; !err && !*res;) {
        /* First what is packed. Then as many pieces as there is room for, alike on all ranks: measured by
         * rank 0's slice, the longest. */
        int n = 0;
        int64_t in_room = 0;
        bool packed = zr_nccl_pack_next(&p, &in_room, room);
        int64_t used = p.row;
        while (i < n_seg && n < ZR_NCCL_PIECES && used < room) {
            int64_t left =
                zr_nccl_packs(&p, i) ? 0 : zr_slice_bytes(seg[i].shard_bytes, seg[i].total_bytes, 0) - at;
            int64_t take = left < room - used ? left : room - used;
            if (take > 0)
                piece[n++] = (struct piece){&seg[i], at, take, used};
            used += (take + 127) / 128 * 128;
            at += take;
            if (take == left)
                i++, at = 0;
        }
        if (!packed && n == 0)
            break;
        err = fill_rows(&p, s);
        *res = err ? ncclSuccess : swap_pieces(m, native, &p, piece, n, room);
        if (!err && !*res)
            err = add_row(m, s, &p, seg, room);
        for (int k = 0; k < n && !err && !*res; k++)
            err = add_piece(m, s, &piece[k], room);
    }
    return err;
}
