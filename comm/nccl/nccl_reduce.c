/* SPDX-License-Identifier: Apache-2.0 */
/* nccl_reduce.c: sums over NCCL, by NCCL's own reduction or by the fixed tree.
 *
 * NCCL's reduction is fastest. But its order depends on the algorithm that it picks, and a bf16 ring rounds
 * at every hop. The fixed tree moves the same bytes per rank: each rank sends a slice to every owner, and
 * receives size - 1 slices. The owner adds them in fp32 with one rounding, like all other communicators. */
#include "comm/nccl/nccl_pack.h"

static struct zr_nccl_shape reduce_shape_of(const void *seg, int i)
{
    const struct zr_reduce_seg *g = (const struct zr_reduce_seg *)seg + i;
    return (struct zr_nccl_shape){g->src, g->cut, g->dtype};
}

/* Fills a row for every owner with this rank's slices. */
static int fill_rows(const struct zr_nccl_pack *p, struct zr_stream *s)
{
    struct zr_nccl_copies t = {.n = 0};
    int err = 0;
    for (int k = 0; k < p->n && !err; k++)
        err = zr_nccl_copy_part(p, &p->part[k], 0, p->m->base.group.size, true, s, &t);
    return err ? err : zr_nccl_copy_end(p->m, s, &t);
}

enum { N_TYPES = 2 };
static const enum zero_dtype types[N_TYPES] = {ZERO_F32, ZERO_BF16};
_Static_assert(ZR_NCCL_PARTS <= ZR_MAX_SUMS, "a round's parts of one type are one kernel");

/* Adds up rows with the same layout, and writes this rank's slices to their destinations. */
static int keep_rows(const struct zr_nccl_pack *p, struct zr_stream *s, const struct zr_reduce_seg *seg,
                     const void *const *rows, int n_rows)
{
    const struct zr_nccl *m = p->m;
    int err = 0;
    for (int t = 0; t < N_TYPES && !err; t++) {
        struct zr_sum_range table[ZR_NCCL_PARTS];
        int n = 0;
        for (int k = 0; k < p->n; k++) {
            const struct zr_nccl_part *part = &p->part[k];
            const struct zr_reduce_seg *g = &seg[part->seg];
            int64_t size = zr_dtype_bytes(g->dtype), bytes = zr_nccl_part_bytes(p, part, m->base.group.rank);
            float *dst = (float *)(m->base.arena + g->dst) + part->at / size;
            if (g->dtype == types[t] && bytes > 0)
                table[n++] = (struct zr_sum_range){dst, part->place / size, bytes / size, g->accumulate};
        }
        if (n)
            err = m->set->dev->ops->sum_ranges(s, table, n, rows, n_rows, types[t]);
    }
    return err;
}

/* ---- by NCCL ---- */

/* A sum has one dtype, so each dtype has separate rows. They share a room and a group of calls. */
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

/* Whether the sum can go to dst at once. Otherwise it goes to this rank's slice of src. */
static bool goes_straight(const struct zr_reduce_seg *g)
{
    return g->dtype == ZERO_F32 && !g->accumulate;
}

/* Sums slices of any size, for which NCCL has no collective: one reduction to each place. This rank's sum
 * goes to own. */
static ncclResult_t reduce_places(const struct zr_nccl *m, cudaStream_t native, const struct zr_reduce_seg *g,
                                  char *own, ncclDataType_t type)
{
    ncclResult_t res = ncclSuccess;
    for (int place = 0; place < m->base.group.size && !res; place++) {
        char *slice = m->base.arena + g->src + zr_cut_at(&g->cut, place);
        int64_t n = zr_cut_bytes(&g->cut, place) / zr_dtype_bytes(g->dtype);
        char *to = place == m->base.group.rank ? own : slice; /* receives nothing */
        if (n > 0)
            res = m->set->api.Reduce(slice, to, (size_t)n, type, ncclSum, place, m->comm, native);
    }
    return res;
}

static ncclResult_t reduce_whole(const struct zr_nccl *m, cudaStream_t native, const struct packs *p,
                                 const struct zr_reduce_seg *seg, int n_seg)
{
    ncclResult_t res = ncclSuccess;
    int size = m->base.group.size, me = m->base.group.rank;
    for (int i = 0; i < n_seg && !res; i++) {
        const struct zr_reduce_seg *g = &seg[i];
        char *src = m->base.arena + g->src,
             *own = goes_straight(g) ? m->base.arena + g->dst : src + zr_cut_at(&g->cut, me);
        bool as_it_lies = g->cut.total > 0 && !goes_packed(p, i);
        if (as_it_lies && g->cut.at)
            res = reduce_places(m, native, g, own, zr_nccl_type(g->dtype));
        else if (as_it_lies)
            res =
                m->set->api.ReduceScatter(src, own, (size_t)(g->cut.total / size / zr_dtype_bytes(g->dtype)),
                                          zr_nccl_type(g->dtype), ncclSum, m->comm, native);
    }
    return res;
}

static ncclResult_t reduce_rows(const struct zr_nccl *m, cudaStream_t native, const struct packs *packs)
{
    ncclResult_t res = ncclSuccess;
    for (int t = 0; t < N_TYPES && !res; t++) {
        const struct zr_nccl_pack *p = &packs->of[t];
        if (p->n > 0)
            res = m->set->api.ReduceScatter(p->room, p->room + m->base.group.rank * p->row,
                                            (size_t)(p->row / zr_dtype_bytes(types[t])),
                                            zr_nccl_type(types[t]), ncclSum, m->comm, native);
    }
    return res;
}

static int keep_whole(const struct zr_nccl *m, struct zr_stream *s, const struct packs *p,
                      const struct zr_reduce_seg *seg, int n_seg)
{
    const struct zr_device_ops *d = m->set->dev->ops;
    int err = 0;
    for (int i = 0; i < n_seg && !err; i++) {
        const struct zr_reduce_seg *g = &seg[i];
        const char *own = m->base.arena + g->src + zr_cut_at(&g->cut, m->base.group.rank);
        float *dst = (float *)(m->base.arena + g->dst);
        int64_t n = zr_cut_bytes(&g->cut, m->base.group.rank) / zr_dtype_bytes(g->dtype);
        if (n == 0 || goes_packed(p, i) || goes_straight(g))
            continue;
        err = g->accumulate ? d->add(s, dst, own, g->dtype, n) : d->cast(s, dst, ZERO_F32, own, g->dtype, n);
    }
    return err;
}

int zr_nccl_reduce_fast(struct zr_nccl *m, struct zr_stream *s, const struct zr_reduce_seg *seg, int n_seg,
                        ncclResult_t *res)
{
    const struct zr_nccl_api *api = &m->set->api;
    cudaStream_t native = m->set->dev->ops->stream_native(s);
    struct packs p;
    int err = 0;
    for (int t = 0; t < N_TYPES; t++)
        zr_nccl_pack_open(&p.of[t], m, reduce_shape_of, seg, n_seg, types[t], true);
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
        for (int t = 0; t < N_TYPES && !err && !*res; t++) {
            const void *own = p.of[t].room + m->base.group.rank * p.of[t].row;
            err = keep_rows(&p.of[t], s, seg, &own, 1);
        }
        more = next_round(&p);
    }
    return err;
}

/* ---- by the fixed tree ---- */

/* Bytes [at, at + n) of every rank's slice of one segment. A shorter slice has fewer bytes, or none. */
struct piece {
    const struct zr_reduce_seg *seg;
    int64_t at, n;
    int64_t place; /* offset in the receive buffer of each peer */
};

static int64_t piece_bytes(const struct piece *p, int place)
{
    int64_t left = zr_cut_bytes(&p->seg->cut, place) - p->at;
    return left <= 0 ? 0 : left < p->n ? left : p->n;
}

/* Address in the receive buffer of a peer. The buffer has room bytes, and at is the offset in it. */
static char *arrival(const struct zr_nccl *m, int peer, int64_t room, int64_t at)
{
    int k = peer < m->base.group.rank ? peer : peer - 1;
    return m->base.arena + m->scratch_at + k * room + at;
}

/* Sends every rank its row and its slices of unpacked segments, and receives this rank's from every rank. */
static ncclResult_t swap_pieces(struct zr_nccl *m, cudaStream_t native, const struct zr_nccl_pack *p,
                                const struct piece *piece, int n, int64_t room)
{
    const struct zr_nccl_api *api = &m->set->api;
    int size = m->base.group.size, me = m->base.group.rank;
    if (size == 1)
        return ncclSuccess;
    ncclResult_t res = api->GroupStart();
    if (res)
        return res;
    for (int k = 1; k < size && p->n > 0 && !res; k++) {
        int to = (me + k) % size, from = (me + size - k) % size;
        res = api->Send(p->room + to * p->row, (size_t)p->row, ncclInt8, to, m->comm, native);
        if (!res)
            res = api->Recv(arrival(m, from, room, 0), (size_t)p->row, ncclInt8, from, m->comm, native);
    }
    for (int i = 0; i < n; i++)
        for (int k = 1; k < size && !res; k++) {
            int to = (me + k) % size, from = (me + size - k) % size;
            int64_t give = piece_bytes(&piece[i], to), take = piece_bytes(&piece[i], me);
            const char *mine =
                m->base.arena + piece[i].seg->src + zr_cut_at(&piece[i].seg->cut, to) + piece[i].at;
            if (give > 0)
                res = api->Send(mine, (size_t)give, ncclInt8, to, m->comm, native);
            if (take > 0 && !res)
                res = api->Recv(arrival(m, from, room, piece[i].place), (size_t)take, ncclInt8, from, m->comm,
                                native);
        }
    ncclResult_t ended = api->GroupEnd();
    return res ? res : ended;
}

static int add_piece(struct zr_nccl *m, struct zr_stream *s, const struct piece *p, int64_t room)
{
    const struct zr_reduce_seg *g = p->seg;
    int64_t size = zr_dtype_bytes(g->dtype), n = piece_bytes(p, m->base.group.rank) / size;
    const void *src[ZR_MAX_SOURCES];
    if (n == 0)
        return 0;
    for (int r = 0; r < m->base.group.size; r++)
        src[r] = r == m->base.group.rank ? m->base.arena + g->src + zr_cut_at(&g->cut, r) + p->at
                                         : arrival(m, r, room, p->place);
    float *dst = (float *)(m->base.arena + g->dst) + p->at / size;
    return m->set->dev->ops->sum_tree(s, dst, src, m->base.group.size, g->dtype, n, g->accumulate);
}

static int add_rows(struct zr_nccl *m, struct zr_stream *s, const struct zr_nccl_pack *p,
                    const struct zr_reduce_seg *seg, int64_t room)
{
    const void *rows[ZR_MAX_SOURCES];
    for (int r = 0; r < m->base.group.size && p->n; r++)
        rows[r] = r == m->base.group.rank ? p->room + r * p->row : arrival(m, r, room, 0);
    return p->n ? keep_rows(p, s, seg, rows, m->base.group.size) : 0;
}

int zr_nccl_reduce_fixed(struct zr_nccl *m, struct zr_stream *s, const struct zr_reduce_seg *seg, int n_seg,
                         ncclResult_t *res)
{
    cudaStream_t native = m->set->dev->ops->stream_native(s);
    int size = m->base.group.size, err = 0;
    /* A single rank receives nothing, so its pieces have no limit. */
    int64_t room = size == 1 ? INT64_MAX : m->scratch_bytes / (size - 1) / ZR_NCCL_ALIGN * ZR_NCCL_ALIGN;
    struct zr_nccl_pack p;
    struct piece piece[ZR_NCCL_PIECES];
    int64_t at = 0;
    *res = ncclSuccess;
    zr_nccl_pack_open(&p, m, reduce_shape_of, seg, n_seg, 0, false);
    for (int i = 0; !err && !*res;) {
        /* Packed segments come first. Then come as many pieces as there is room for. The longest slice is the
         * measure, so that their number is the same on all ranks. */
        int n = 0;
        int64_t in_room = 0;
        bool packed = zr_nccl_pack_next(&p, &in_room, room);
        int64_t used = p.row;
        while (i < n_seg && n < ZR_NCCL_PIECES && used < room) {
            int64_t left = zr_nccl_packs(&p, i) ? 0 : zr_cut_most(&seg[i].cut, size) - at;
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
            err = add_rows(m, s, &p, seg, room);
        for (int k = 0; k < n && !err && !*res; k++)
            err = add_piece(m, s, &piece[k], room);
    }
    return err;
}
