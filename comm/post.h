/* SPDX-License-Identifier: Apache-2.0 */
/* post.h: operations as ranks compare them before data moves. A rank posts what it is about to do where the
 * other ranks of its group find it. If two posts differ, a message says how. */
#ifndef ZR_COMM_POST_H
#define ZR_COMM_POST_H

#include "comm/comm.h"

/* Add to a post: n numbers; a segment's bytes and where it is cut among size places. */
void zr_post_numbers(struct zr_post *p, const int64_t *v, int n);
void zr_post_cut(struct zr_post *p, const struct zr_cut *c, int size);

bool zr_post_same(const struct zr_post *a, const struct zr_post *b);

/* "reduce_scatter seq 812 unit 14" */
void zr_post_describe(const struct zr_post *p, char *text, size_t n_text);
/* "at seq 812 (reduce_scatter unit 14)"; "not at its first operation yet" if seq is 0 */
void zr_post_where(const struct zr_post *p, char *text, size_t n_text);
/* "rank 3 is at reduce_scatter seq 3 unit 14 of step 8, rank 0 of step 7": how rank's post differs from that
 * of rank own. */
void zr_post_differ(int rank, const struct zr_post *theirs, int own, const struct zr_post *mine, char *text,
                    size_t n_text);

#endif
