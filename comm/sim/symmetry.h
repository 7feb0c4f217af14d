/* SPDX-License-Identifier: Apache-2.0 */
/* symmetry.h: which ranks of a simulated world are alike, so that one of them can stand for all.
 *
 * Ranks are of one class where nothing that takes time tells them apart: as many neighbours on their host, in
 * each of their groups, and in their groups members of the same classes in the same numbers. What is left is
 * that slices at the end of a flat are shorter than the first; so the rank of a class that owns the first
 * slice is never earlier than another one of it, and it is the representative. A world of full hosts is one
 * class; a host that is not full makes another. Classes are found as in colour refinement: by what a rank
 * sees, until a round tells no more ranks apart. */
#ifndef ZR_COMM_SYMMETRY_H
#define ZR_COMM_SYMMETRY_H

#include "comm/sim/sim.h"

struct zr_symmetry {
    /* Ranks, in groups of `inner`, side by side; hosts of per_host, of which the last may have fewer. */
    int32_t world, inner, per_host;
    /* representatives; rank 0 is the first of them */
    int32_t n;
    /* (n) ranks of the world */
    int32_t *rank;
    /* (world) number of the representative */
    int32_t *class_of;
};

/* inner divides the world. ZR_ERR_ARG where there are more classes than can be simulated, ZR_ERR_NOMEM; then
 * *out holds nothing. */
int zr_symmetry_make(int32_t world, int32_t inner, int32_t per_host, struct zr_symmetry *out);
/* A zeroed struct is allowed. */
void zr_symmetry_free(struct zr_symmetry *s);

/* The communicators of one role for a world of w's whose rank k is representative k of s. groups: (n) each
 * one's, with its place; copied. Representatives meet that have members of the same classes in their groups.
 * They gather and reduce nothing, and take the time that it takes; an agreement adds up the records of all
 * whom they stand for. There is no broadcast. out: (n). */
int zr_sim_comm_open_symmetric(struct zr_sim *w, enum zr_role role, const struct zr_symmetry *s,
                               const struct zr_group *groups, struct zr_sim_order *order,
                               struct zr_comm **out);

#endif
