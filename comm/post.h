/* SPDX-License-Identifier: Apache-2.0 */
/* post.h: one operation as its ranks compare it before anything moves, and the words in which they tell how
 * theirs differ. A rank posts what it is about to do where the others of its group find it. */
#ifndef ZR_COMM_POST_H
#define ZR_COMM_POST_H

#include "comm/comm.h"

struct zr_post {
    /* number of the operation on its communicator, from 1 on */
    uint64_t seq;
    /* enum zr_op; root is -1 where there is none */
    int32_t op, unit, root;
    uint32_t step, n_seg, pad;
    uint64_t call_hash;
    /* of all segments together, of the range, of a slot, or of the words */
    int64_t bytes;
    uint64_t seg_hash;
};

/* Adds to what is posted: the segments of an operation, n_seg of them among size places; where a range
 * lies. */
void zr_post_gathers(struct zr_post *p, int size, const struct zr_gather_seg *seg, int n_seg);
void zr_post_reduces(struct zr_post *p, int size, const struct zr_reduce_seg *seg, int n_seg);
void zr_post_numbers(struct zr_post *p, const int64_t *v, int n);

bool zr_post_same(const struct zr_post *a, const struct zr_post *b);

/* "reduce_scatter seq 812 unit 14" */
void zr_op_describe(enum zr_op op, uint64_t seq, int32_t unit, char *text, size_t n_text);
void zr_post_describe(const struct zr_post *p, char *text, size_t n_text);
/* "rank 3 is at reduce_scatter seq 3 unit 14 of step 8, rank 0 of step 7": of two that are not the same,
 * rank's against own's. */
void zr_post_differ(int rank, const struct zr_post *theirs, int own, const struct zr_post *mine, char *text,
                    size_t n_text);

#endif
