/* SPDX-License-Identifier: Apache-2.0 */
/* nccl_pack.h: packs small and short segments into one.
 *
 * NCCL's collectives are best with few large slices of equal length. A layer also has a dozen biases and
 * norms with slices of some KB. At stages 0 and 1 the last ranks may have slices that are short or empty,
 * and a collective would go past their end. All these travel together. Every rank has a row in a room at the
 * end of the arena. One kernel copies its slices into the row, one after the other, and another copies out
 * or adds up what has arrived. What does not fit goes in further rounds.
 *
 * These segments are packed:
 *
 *   - those whose last slices are short. The fixed tree does not pack them, as a send may have any length;
 *   - those with a list of places whose slices have up to opt.small_bytes. Rows are as long as the largest
 *     slice. The fixed tree does not pack them either. Larger slices travel place by place, as a broadcast
 *     from each place or a sum to it (nccl_gather.c, nccl_reduce.c);
 *   - those with equal slices of up to opt.small_bytes, if at least two segments would be packed.
 *
 * All others travel without a copy, which would take longer than the call that it saves. The choice, the
 * rows and the rounds are the same on all ranks. */
#ifndef ZR_COMM_NCCL_PACK_H
#define ZR_COMM_NCCL_PACK_H

#include "comm/nccl/nccl_comm.h"

/* The most parts of a round. */
enum { ZR_NCCL_PARTS = 64 };

/* The properties of a segment that packing depends on. */
struct zr_nccl_shape {
    /* Offset of the flat in the arena. */
    int64_t flat;
    struct zr_cut cut;
    /* enum zero_dtype. 0: it travels as bytes. */
    int dtype;
};
typedef struct zr_nccl_shape zr_nccl_shape_of(const void *seg, int i);

/* Bytes [at, at + n) of every rank's slice of one segment. The last ranks may have fewer, or none. */
struct zr_nccl_part {
    int seg;
    int64_t at, n;
    /* Offset in each row. */
    int64_t place;
};

struct zr_nccl_pack {
    const struct zr_nccl *m;
    zr_nccl_shape_of *of;
    const void *seg;
    int n_seg;
    /* Packs segments of this dtype only. 0: all. */
    int dtype;
    /* Slices of up to this many bytes are packed. 0: none. */
    int64_t small_bytes;
    /* Packs short slices and those of a list of places; the fixed tree does not. */
    bool takes_uneven;
    /* The first segment that is not packed completely, and the bytes of its slices that are packed. */
    int next;
    int64_t at;
    /* Parts of this round. */
    int n;
    struct zr_nccl_part part[ZR_NCCL_PARTS];
    /* (size, row) Bytes of the rows of all ranks. */
    char *room;
    /* Bytes of a row, a multiple of 128. 0: nothing is left. */
    int64_t row;
};

/* Chooses the segments to pack, before the first round. */
void zr_nccl_pack_open(struct zr_nccl_pack *p, const struct zr_nccl *m, zr_nccl_shape_of *of, const void *seg,
                       int n_seg, int dtype, bool takes_uneven);
/* Whether segment i travels packed. */
bool zr_nccl_packs(const struct zr_nccl_pack *p, int i);
/* Chooses the parts of the next round. Their rows have up to most_bytes, start at *used bytes of the room,
 * and are added to *used. Returns false if nothing was left, or nothing fits. Something always fits if *used
 * is 0. */
bool zr_nccl_pack_next(struct zr_nccl_pack *p, int64_t *used, int64_t most_bytes);
/* Bytes of a place's slice that belong to the part. */
int64_t zr_nccl_part_bytes(const struct zr_nccl_pack *p, const struct zr_nccl_part *part, int place);
/* Address in the room of a place's bytes of a part. */
static inline char *zr_nccl_part_at(const struct zr_nccl_pack *p, const struct zr_nccl_part *part, int place)
{
    return p->room + place * p->row + part->place;
}

/* Collects copies, so that they take few kernels. */
struct zr_nccl_copies {
    struct zr_copy_rows c[ZR_MAX_COPIES];
    int n;
};
/* Add copies. The first adds a part's slices of places [first, end), from the segment into the room or back;
 * the second adds rows. */
int zr_nccl_copy_part(const struct zr_nccl_pack *p, const struct zr_nccl_part *part, int first, int end,
                      bool into_room, struct zr_stream *s, struct zr_nccl_copies *t);
int zr_nccl_copy(const struct zr_nccl *m, struct zr_stream *s, struct zr_nccl_copies *t,
                 const struct zr_copy_rows *c);
/* Puts the remaining copies on the stream. */
int zr_nccl_copy_end(const struct zr_nccl *m, struct zr_stream *s, struct zr_nccl_copies *t);

#endif
