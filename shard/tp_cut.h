/* SPDX-License-Identifier: Apache-2.0 */
/* tp_cut.h: where an element of a part of a tensor is in the whole, and in the parts of another cut of it.
 *
 * A tensor that is cut along a dimension is seen as (outer, rows, inner), rows being that dimension's. The
 * whole has them in blocks, of each of which a part has an equal run, `each` rows in all. Parts of one block
 * may be padded: the last ones then have rows that the whole does not. A tensor that is not cut is one part
 * of one row. So an element of any cut leads to its number in the whole, row-major, and that to one part of
 * any other cut, also along another dimension. */
#ifndef ZR_SHARD_TP_CUT_H
#define ZR_SHARD_TP_CUT_H

#include "shard/layout.h"

struct zr_tp_cut {
    int32_t parts;
    /* of the whole along the dimension; of a part, what it is padded by counted in */
    int64_t rows, each;
    int64_t blocks;
    /* elements behind one row; elements of a part, padding counted in */
    int64_t inner, part_elems;
};

/* Not cut. */
struct zr_tp_cut zr_tp_none(int64_t n_elems);
/* shape: of a part, ended by 0 or by all 8; size: rows of the whole, 0: of all parts. */
struct zr_tp_cut zr_tp_along(const int64_t shape[8], int32_t dim, int32_t blocks, int64_t size,
                             int32_t parts);
struct zr_tp_cut zr_tp_of_tensor(const struct zr_tensor *t, int32_t parts);
bool zr_tp_same(const struct zr_tp_cut *a, const struct zr_tp_cut *b);
/* Elements of a part that the whole has: the first of it. */
int64_t zr_tp_elems(const struct zr_tp_cut *c, int32_t part);
/* Elements of the whole. */
int64_t zr_tp_whole_elems(const struct zr_tp_cut *c);

/* A run of elements that follow each other in a part and in the whole. */
struct zr_tp_run {
    int32_t part;
    /* element of the part; of the whole, -1: it is padding */
    int64_t at, whole;
    int64_t n;
};
/* The run that begins with element `at` of a part; with element `whole` of the whole. */
struct zr_tp_run zr_tp_run_of_part(const struct zr_tp_cut *c, int32_t part, int64_t at);
struct zr_tp_run zr_tp_run_of_whole(const struct zr_tp_cut *c, int64_t whole);
/* The first element of a part whose place in the whole is `whole` or later. Padding counts as later than all
 * elements, and the end of the whole gives the end of every part. So a range of the whole is a range of each
 * part. */
int64_t zr_tp_from(const struct zr_tp_cut *c, int32_t part, int64_t whole);

#endif
