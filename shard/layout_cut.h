/* SPDX-License-Identifier: Apache-2.0 */
/* layout_cut.h: where flats are cut whose granules equal slices would tear; part of layout.c. */
#ifndef ZR_SHARD_LAYOUT_CUT_H
#define ZR_SHARD_LAYOUT_CUT_H

#include "shard/layout.h"

/* Equal slices never tear it: it divides a block of the norm. */
static inline bool zr_granule_fits(int64_t granule)
{
    return granule <= 1 || ZR_NORM_BLOCK % granule == 0;
}

/* Equal slices might tear a granule of the flat. Not in a world of one rank. */
bool zr_flat_needs_places(const struct zr_layout *l, const struct zr_flat *f);

/* Of a flat with all its pieces: its cuts, and what they reserve. ZR_ERR_NOMEM. */
int zr_flat_cut_at_places(const struct zr_layout *l, struct zr_flat *f);

#endif
