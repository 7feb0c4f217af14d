/* SPDX-License-Identifier: Apache-2.0 */
/* tp_cut.c: which elements of a tensor each tp rank has, and where they lie in the whole tensor. */
#include "shard/tp_cut.h"
#include "kernels/asserts.h"

struct zr_tp_cut zr_tp_none(int64_t n_elems)
{
    return (struct zr_tp_cut){
        .parts = 1, .rows = 1, .each = 1, .blocks = 1, .row_elems = n_elems, .part_elems = n_elems};
}

struct zr_tp_cut zr_tp_along(const int64_t shape[8], int32_t dim, int32_t blocks, int64_t size, int32_t parts)
{
    struct zr_tp_cut c = {.parts = parts,
                          .rows = size ? size : shape[dim] * parts,
                          .each = shape[dim],
                          .blocks = blocks,
                          .row_elems = 1,
                          .part_elems = 1};
    for (int d = 0; d < 8 && shape[d]; d++) {
        c.row_elems *= d > dim ? shape[d] : 1;
        c.part_elems *= shape[d];
    }
    return c;
}

struct zr_tp_cut zr_tp_of_tensor(const struct zr_tensor *t, int32_t parts)
{
    if (parts <= 1 || !t->cut)
        return zr_tp_none(t->n_elems);
    return zr_tp_along(t->shape, t->cut_dim, t->cut_blocks, t->cut_size, parts);
}

bool zr_tp_same(const struct zr_tp_cut *a, const struct zr_tp_cut *b)
{
    return a->parts == b->parts && a->rows == b->rows && a->each == b->each && a->blocks == b->blocks &&
           a->row_elems == b->row_elems;
}

/* Returns the rows of one block that each part has. */
static int64_t rows_of_block(const struct zr_tp_cut *c)
{
    return c->each / c->blocks;
}

int64_t zr_tp_run_elems(const struct zr_tp_cut *c)
{
    return rows_of_block(c) * c->row_elems;
}

int64_t zr_tp_run_stride(const struct zr_tp_cut *c)
{
    return c->rows / c->blocks * c->row_elems;
}

int64_t zr_tp_elems(const struct zr_tp_cut *c, int32_t part)
{
    int64_t before = part * c->each, left = c->rows > before ? c->rows - before : 0;
    if (c->blocks > 1 || left >= c->each)
        return c->part_elems;
    return left * c->row_elems; /* only the first dimension is padded */
}

int64_t zr_tp_whole_elems(const struct zr_tp_cut *c)
{
    return c->part_elems / c->each * c->rows;
}

struct zr_tp_run zr_tp_run_of_part(const struct zr_tp_cut *c, int32_t part, int64_t at)
{
    int64_t share = rows_of_block(c), column = at % c->row_elems, row = at / c->row_elems % c->each,
            outer = at / c->row_elems / c->each;
    int64_t block = row / share, within = row % share,
            whole = block * share * c->parts + part * share + within, rows = share - within;
    struct zr_tp_run run = {.part = part, .at = at};
    ZR_ASSERT(at >= 0 && at < c->part_elems);
    if (whole >= c->rows) {
        run.whole = -1;
        run.n = rows * c->row_elems - column;
        return run;
    }
    rows = rows < c->rows - whole ? rows : c->rows - whole;
    run.whole = (outer * c->rows + whole) * c->row_elems + column;
    run.n = rows * c->row_elems - column;
    return run;
}

struct zr_tp_run zr_tp_run_of_whole(const struct zr_tp_cut *c, int64_t whole)
{
    int64_t share = rows_of_block(c), column = whole % c->row_elems, row = whole / c->row_elems % c->rows,
            outer = whole / c->row_elems / c->rows;
    int64_t block = row / (share * c->parts), within = row % (share * c->parts),
            rows = share - within % share;
    rows = rows < c->rows - row ? rows : c->rows - row;
    return (struct zr_tp_run){.part = (int32_t)(within / share),
                              .at =
                                  (outer * c->each + block * share + within % share) * c->row_elems + column,
                              .whole = whole,
                              .n = rows * c->row_elems - column};
}

int64_t zr_tp_from(const struct zr_tp_cut *c, int32_t part, int64_t whole)
{
    int64_t row = whole / c->row_elems % c->rows, outer = whole / c->row_elems / c->rows,
            share = rows_of_block(c);
    int64_t block = row / (share * c->parts), within = row % (share * c->parts);
    if (within / share == part)
        return zr_tp_run_of_whole(c, whole).at;
    return (outer * c->each + (block + (within / share > part)) * share) * c->row_elems;
}
