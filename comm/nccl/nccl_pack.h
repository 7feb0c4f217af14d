/* SPDX-License-Identifier: Apache-2.0 */
/* nccl_pack.h: small and short segments, packed into one.
 *
 * What NCCL's collectives are good at are few large slices of one length. A layer has a dozen biases and
 * norms whose slices are some KB, and at stages 0 and 1, where stacked tensors lie in place, slices that are
 * short or empty on the last ranks, past whose end a collective would go. These travel as one: every rank has
 * a row in a room at the end of the communicator's own arena, into which one kernel copies its slices one
 * after the other, and out of which another copies or adds up what has arrived. What does not fit goes in
 * rounds.
 *
 * Packed are
 *   - segments whose last slices are short, however long the others (but not by the fixed tree: a send may be
 *     of any length);
 *   - segments with places of their own whose slices are up to opt.small_bytes: rows are of the largest slice
 *     (not by the fixed tree either). Larger ones travel place by place, each as a broadcast from it or a sum
 *     to it (nccl_gather.c, nccl_reduce.c);
 *   - segments with slices up to opt.small_bytes, where there are at least two of them or such as above.
 * All others travel as they lie, without a copy: copying a large one would take longer than what one call
 * fewer saves. The choice, the rows and the rounds are the same on all ranks. */
#ifndef ZR_COMM_NCCL_PACK_H
#define ZR_COMM_NCCL_PACK_H

#include "comm/nccl/nccl_comm.h"

/* The most parts of a round. */
enum { ZR_NCCL_PARTS = 64 };

/* What packing has to know of a segment. */
struct zr_nccl_shape {
    /* offset of the flat in the arena */
    int64_t flat;
    struct zr_cut cut;
    /* 0: it moves as bytes */
    int dtype;
};
typedef struct zr_nccl_shape zr_nccl_shape_of(const void *seg, int i);

/* Bytes [at, at + n) of every rank's slice of one segment; shorter, or none, of the last ranks. */
struct zr_nccl_part {
    int seg;
    int64_t at, n;
    /* offset in each row */
    int64_t place;
};

struct zr_nccl_pack {
    const struct zr_nccl *m;
    zr_nccl_shape_of *of;
    const void *seg;
    int n_seg;
    /* packs segments of this dtype alone; 0: all */
    int dtype;
    /* slices up to this size are packed; 0: none */
    int64_t small_bytes;
    /* packs slices that are short or of any size, but not by the fixed tree */
    bool takes_uneven;
    /* the first segment that is not packed to its end, and how far it is */
    int next;
    int64_t at;
    /* Of this round: */
    int n;
    struct zr_nccl_part part[ZR_NCCL_PARTS];
    /* (size, row) bytes */
    char *room;
    /* bytes of a row, a multiple of 128; 0: there is none left */
    int64_t row;
};

/* The segments' packing, before its first round. */
void zr_nccl_pack_open(struct zr_nccl_pack *p, const struct zr_nccl *m, zr_nccl_shape_of *of, const void *seg,
                       int n_seg, int dtype, bool takes_uneven);
/* Whether segment i travels packed. */
bool zr_nccl_packs(const struct zr_nccl_pack *p, int i);
/* The next round: from *used bytes of the room on, which grow, rows up to most_bytes. false: nothing was
 * left, or nothing fits. With *used = 0 something fits. */
bool zr_nccl_pack_next(struct zr_nccl_pack *p, int64_t *used, int64_t most_bytes);
/* Bytes of a place's slice that belong to the part. */
int64_t zr_nccl_part_bytes(const struct zr_nccl_pack *p, const struct zr_nccl_part *part, int place);
/* A place's bytes of a part in the room. */
static inline char *zr_nccl_part_at(const struct zr_nccl_pack *p, const struct zr_nccl_part *part, int place)
{
    return p->room + place * p->row + part->place;
}

/* Copies on their way into as few kernels as they fit into. */
struct zr_nccl_copies {
    struct zr_copy_rows c[ZR_MAX_COPIES];
    int n;
};
/* Adds what slices of places [first, end) have of a part: from the segment into the room, or back. */
int zr_nccl_copy_part(const struct zr_nccl_pack *p, const struct zr_nccl_part *part, int first, int end,
                      bool into_room, struct zr_stream *s, struct zr_nccl_copies *t);
int zr_nccl_copy(const struct zr_nccl *m, struct zr_stream *s, struct zr_nccl_copies *t,
                 const struct zr_copy_rows *c);
/* Puts what is left of them on the stream. */
int zr_nccl_copy_end(const struct zr_nccl *m, struct zr_stream *s, struct zr_nccl_copies *t);

#endif
