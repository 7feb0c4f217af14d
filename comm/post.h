/* SPDX-License-Identifier: Apache-2.0 */
/* post.h: operations in the form that ranks compare before data moves. A rank posts its next operation where
 * the other ranks of its group find it. If two posts differ, a message says how. */
#ifndef ZR_COMM_POST_H
#define ZR_COMM_POST_H

#include "comm/comm.h"

/* Add to a post: n numbers, or a segment's bytes and how they are cut among size places. */
void zr_post_numbers(struct zr_post *p, const int64_t *v, int n);
void zr_post_cut(struct zr_post *p, const struct zr_cut *c, int size);

bool zr_post_same(const struct zr_post *a, const struct zr_post *b);

/* Writes "reduce_scatter seq 812 unit 14". */
void zr_post_describe(const struct zr_post *p, char *text, size_t n_text);
/* Writes "at seq 812 (reduce_scatter unit 14)", or "not at its first operation yet" if seq is 0. */
void zr_post_where(const struct zr_post *p, char *text, size_t n_text);
/* Writes how rank's post differs from that of my_rank: "rank 3 is at reduce_scatter seq 3 unit 14 of step 8,
 * rank 0 of step 7". */
void zr_post_differ(int rank, const struct zr_post *theirs, int my_rank, const struct zr_post *mine,
                    char *text, size_t n_text);

#endif
