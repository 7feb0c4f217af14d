/* SPDX-License-Identifier: Apache-2.0 */
/* segment.h: which bytes of a segment belong to which place, how many bytes travel for it, and checks of
 * segments. A segment is a flat region that a collective gathers or sums, and a struct zr_cut (comm.h) says
 * how it is cut into slices: all equally long (each), or at a list of places (at). */
#ifndef ZR_COMM_SEGMENT_H
#define ZR_COMM_SEGMENT_H

#include "comm/comm.h"
#include "kernels/asserts.h"

/* Offset of a place's slice in its region. With place = the number of places it is the end of the last
 * slice. */
static inline int64_t zr_cut_at(const struct zr_cut *c, int place)
{
    if (c->at)
        return (c->at[(int64_t)place * (c->at_every ? c->at_every : 1)] - c->at[0]) *
               (c->at_bytes ? c->at_bytes : 1);
    int64_t at = place * c->each;
    return at < c->total ? at : c->total;
}

/* Bytes of a place's slice. */
static inline int64_t zr_cut_bytes(const struct zr_cut *c, int place)
{
    return zr_cut_at(c, place + 1) - zr_cut_at(c, place);
}

/* Bytes of the largest slice among size places. */
static inline int64_t zr_cut_most(const struct zr_cut *c, int size)
{
    int64_t most = c->most ? c->most : zr_cut_bytes(c, 0);
    for (int p = 1; c->at && !c->most && p < size; p++) {
        int64_t n = zr_cut_bytes(c, p);
        most = n > most ? n : most;
    }
    return most;
}

/* The cut of the same elements in another dtype, with bytes_then bytes per element instead of bytes_now. */
static inline struct zr_cut zr_cut_in(const struct zr_cut *c, int64_t bytes_now, int64_t bytes_then)
{
    struct zr_cut to = *c;
    to.each = c->each / bytes_now * bytes_then;
    to.total = c->total / bytes_now * bytes_then;
    to.most = c->most / bytes_now * bytes_then;
    to.at_bytes = (int32_t)((c->at_bytes ? c->at_bytes : 1) * bytes_then / bytes_now);
    ZR_ASSERT(!c->at || to.at_bytes > 0);
    return to;
}

/* The cut of a smaller region. Its places 0 to n - 1 are the n places from first on. */
static inline struct zr_cut zr_cut_part(const struct zr_cut *c, int first, int n)
{
    struct zr_cut to = *c;
    to.total = zr_cut_at(c, first + n) - zr_cut_at(c, first);
    to.at = c->at ? c->at + (int64_t)first * (c->at_every ? c->at_every : 1) : NULL;
    to.most = 0;
    return to;
}

/* The cut in which each place has the slices of n consecutive places of c. */
static inline struct zr_cut zr_cut_merged(const struct zr_cut *c, int n)
{
    struct zr_cut to = *c;
    to.each = c->each * n;
    to.at_every = (c->at_every ? c->at_every : 1) * n;
    to.most = 0;
    return to;
}

/* Copies the list of places, if there is one, in bytes: size + 1 numbers. The cut then refers to the copy.
 * Returns how many numbers were written. */
static inline int64_t zr_cut_keep(struct zr_cut *c, int size, int64_t *to)
{
    if (!c->at)
        return 0;
    for (int p = 0; p <= size; p++)
        to[p] = zr_cut_at(c, p);
    *c = (struct zr_cut){.total = c->total, .at = to};
    return size + 1;
}

/* Whether each place has the same bytes in both cuts. */
static inline bool zr_cut_same(const struct zr_cut *a, const struct zr_cut *b, int size)
{
    bool same = a->total == b->total;
    for (int p = 1; p <= size && same; p++)
        same = zr_cut_at(a, p) == zr_cut_at(b, p);
    return same;
}

/* Offset in the arena of this rank's slice before the gather. place is this rank's. */
static inline int64_t zr_gather_own(const struct zr_gather_seg *g, int place)
{
    return g->in_place ? g->dst + zr_cut_at(&g->cut, place) : g->src;
}

/* Whether slices that are cut at a list of places are packed before they travel. The NCCL backend packs them
 * if the longest has at most packs_up_to bytes (zr_nccl_options.small_bytes). Then every slice travels as a
 * block of equal size: that of the longest slice, rounded up to 128 bytes. Otherwise slices travel as they
 * are. packs_up_to is 0 if the backend never packs. */
static inline bool zr_cut_packed(const struct zr_cut *c, int size, int64_t packs_up_to)
{
    return c->at && packs_up_to && zr_cut_most(c, size) <= packs_up_to;
}

/* Bytes of the blocks that a rank receives from the others. */
static inline int64_t zr_cut_packed_bytes(const struct zr_cut *c, int size)
{
    return (zr_cut_most(c, size) + 127) / 128 * 128 * (size - 1);
}

/* Bytes that a rank receives from the others when one segment is gathered, and when it is summed. */
static inline int64_t zr_gather_wire(const struct zr_cut *c, int size, int place, int64_t packs_up_to)
{
    return zr_cut_packed(c, size, packs_up_to) ? zr_cut_packed_bytes(c, size)
                                               : c->total - zr_cut_bytes(c, place);
}

static inline int64_t zr_reduce_wire(const struct zr_cut *c, int size, int place, int64_t packs_up_to)
{
    return zr_cut_packed(c, size, packs_up_to) ? zr_cut_packed_bytes(c, size)
                                               : zr_cut_bytes(c, place) * (size - 1);
}

/* First of n words of an agreement that a place combines. Place p combines [zr_agree_part(p), zr_agree_part(p
 * + 1)). */
static inline int64_t zr_agree_part(int size, int place, int64_t n)
{
    return n * place / size;
}

/* Bytes that a rank takes from the others for an agreement: its part from each, and every other part once. */
static inline int64_t zr_agree_wire(int size, int place, int32_t n_sum, int32_t n_max)
{
    int64_t n = (int64_t)n_sum + n_max,
            part = zr_agree_part(size, place + 1, n) - zr_agree_part(size, place, n);
    return (part * (size - 1) + n - part) * (int64_t)sizeof(uint64_t);
}

/* The cut of segment i of an operation. */
static inline const struct zr_cut *zr_op_cut(const struct zr_comm_op *op, int i)
{
    return op->post.op == ZR_OP_ALL_GATHER ? &op->gather[i].cut : &op->reduce[i].cut;
}

/* Number of segments of an operation that have a list of places. */
int zr_op_lists(const struct zr_comm_op *op);
/* Copies the segments of an operation to segs, and their lists to lists: size + 1 numbers for each. The
 * operation then refers to the copies. */
void zr_op_keep(struct zr_comm_op *op, int size, void *segs, int64_t *lists);

/* Check segments. They return 0, or ZERO_ERR_ARG or ZERO_ERR_NOTSUP with a message that names the segment,
 * the field, its value and what is allowed. */
int zr_gather_check(int size, int64_t arena_bytes, const struct zr_gather_seg *seg, int n_seg);
int zr_reduce_check(int size, int place, int64_t arena_bytes, const struct zr_reduce_seg *seg, int n_seg);

#endif
