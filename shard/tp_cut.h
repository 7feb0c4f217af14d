/* SPDX-License-Identifier: Apache-2.0 */
/* tp_cut.h: tensor-parallel cuts. A tensor-parallel rank has a *part* of a tensor. This file finds an element
 * of a part in the whole tensor, and in the parts of another cut.
 *
 * A tensor that is cut along a dimension is seen as (outer, rows, inner), where rows is the size along that
 * dimension. The rows of the whole form blocks. A part has an equal run of rows from each block, `each` rows
 * in all. With one block, parts may be padded: the last parts then have rows that the whole does not have. A
 * tensor that is not cut is one part with one row. So an element of any cut has a row-major number in the
 * whole, and that number is in one part of any other cut, even along another dimension. */
#ifndef ZR_SHARD_TP_CUT_H
#define ZR_SHARD_TP_CUT_H

#include "shard/layout.h"

struct zr_tp_cut {
    int32_t parts;
    /* Rows of the whole along the dimension; rows of a part, with padding. */
    int64_t rows, each;
    int64_t blocks;
    /* Elements of one row; elements of a part, with padding. */
    int64_t row_elems, part_elems;
};

/* The cut of a tensor that is not cut. */
struct zr_tp_cut zr_tp_none(int64_t n_elems);
/* shape: that of a part, ended by 0 if it has fewer than 8 dimensions. size: rows of the whole; 0: the rows
 * of all parts together. */
struct zr_tp_cut zr_tp_along(const int64_t shape[8], int32_t dim, int32_t blocks, int64_t size,
                             int32_t parts);
struct zr_tp_cut zr_tp_of_tensor(const struct zr_tensor *t, int32_t parts);
bool zr_tp_same(const struct zr_tp_cut *a, const struct zr_tp_cut *b);
/* Returns the elements of a part without padding. They are its first elements. */
int64_t zr_tp_elems(const struct zr_tp_cut *c, int32_t part);
int64_t zr_tp_whole_elems(const struct zr_tp_cut *c);

/* The rows of one block in a part are a run: they follow each other in the part and in the whole. Return the
 * elements of a run, and those of the whole from the beginning of a run to that of the part's next run. */
int64_t zr_tp_run_elems(const struct zr_tp_cut *c);
int64_t zr_tp_run_stride(const struct zr_tp_cut *c);

/* A run of elements that follow each other in a part and in the whole. */
struct zr_tp_run {
    int32_t part;
    /* First element in the part; first element in the whole, -1 for padding. */
    int64_t at, whole;
    int64_t n;
};
/* Return the run that begins with element `at` of a part, or with element `whole` of the whole. */
struct zr_tp_run zr_tp_run_of_part(const struct zr_tp_cut *c, int32_t part, int64_t at);
struct zr_tp_run zr_tp_run_of_whole(const struct zr_tp_cut *c, int64_t whole);
/* Returns the first element of a part whose position in the whole is `whole` or later. Padding counts as
 * later than all elements, and the end of the whole gives the end of every part. So a range of the whole is a
 * range of each part. */
int64_t zr_tp_from(const struct zr_tp_cut *c, int32_t part, int64_t whole);

#endif
