/* SPDX-License-Identifier: Apache-2.0 */
/* symmetry.h: which ranks of a simulated world are equivalent, so that one of them can represent the others.
 *
 * Ranks are in one class if they take the same time. That is so if they have the same number of neighbours on
 * their host in each group, and their groups have the same number of ranks of each class. They differ only in
 * their slices, which are shorter at the end of a flat. The rank that owns the first slice is never earlier
 * than the others, and is the representative. A world of full hosts is one class; a host that is not full
 * makes another. Classes are found by colour refinement. */
#ifndef ZR_COMM_SYMMETRY_H
#define ZR_COMM_SYMMETRY_H

#include "comm/sim/sim.h"

struct zr_symmetry {
    /* Number of ranks; ranks of an inner group; ranks of a host. The last host may have fewer. */
    int32_t world, inner, per_host;
    /* Number of representatives. Rank 0 is the first one. */
    int32_t n;
    /* (n) The representatives' ranks in the world. */
    int32_t *rank;
    /* (world) Number of each rank's representative. */
    int32_t *class_of;
};

/* Finds the classes. inner must divide the world. Returns ZERO_ERR_ARG if there are more classes than can be
 * simulated, or ZERO_ERR_NOMEM; *out then holds nothing. */
int zr_symmetry_make(int32_t world, int32_t inner, int32_t per_host, struct zr_symmetry *out);
/* A zeroed struct is allowed. */
void zr_symmetry_free(struct zr_symmetry *s);

/* Opens the communicators of one role in a world w whose rank k is representative k of s. groups has (n) each
 * one's group and place, and is copied. Representatives meet if their groups have the same number of ranks of
 * each class. A gather or a sum moves nothing, but takes its time. An agreement adds up the records of all
 * ranks that they represent. There is no broadcast. out has n handles. */
int zr_sim_comm_open_symmetric(struct zr_sim *w, enum zr_role role, const struct zr_symmetry *s,
                               const struct zr_group *groups, struct zr_sim_order *order,
                               struct zr_comm **out);

#endif
