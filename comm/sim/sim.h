/* SPDX-License-Identifier: Apache-2.0 */
/* sim.h: collectives between the ranks of a simulated world (kernels/sim/sim_device.h).
 *
 * They promise what comm.h promises and nothing more: who waits for whom is the least that it allows, and a
 * peer reads another rank's arena on its own stream, also after that rank's own operation is over. */
#ifndef ZR_COMM_SIM_H
#define ZR_COMM_SIM_H

#include "comm/comm.h"
#include "kernels/sim/sim_device.h"

/* The order in which ranks issue collectives over all communicators together: it must be the same on all
 * ranks of a class, as NCCL wants it, and each rank must issue one after the other, from one thread or from
 * threads that are ordered. What moves activations, or tensors of two stages, is apart: the model's thread
 * issues it beside the loop's. On one communicator they also run one after the other: on one stream, or on
 * streams that wait. class_of: (world) from 0 on, of ranks that have the same part of the same stage, or
 * NULL: all are of one. One for a world; NULL where no memory is left. */
struct zr_sim_order;
struct zr_sim_order *zr_sim_order_open(struct zr_sim *w, const int32_t *class_of);
/* NULL is allowed; after the world was closed. */
void zr_sim_order_close(struct zr_sim_order *o);

/* The communicators of one role: one for each of n_groups groups, in which each rank of the world is a member
 * once (their rank is not looked at, their members are copied). n_groups 0: one of all ranks. out[rank] gets
 * a handle of each rank's, each closed on its own. */
int zr_sim_comm_open(struct zr_sim *w, enum zr_role role, int n_groups, const struct zr_group *groups,
                     struct zr_sim_order *order, struct zr_comm **out);

/* Every rank that still waits for others in a collective of any's group learns that `rank`, of the world, is
 * gone: as a communicator does whose peer dies. */
void zr_sim_comm_lose(struct zr_comm *any, int rank);

/* What the ranks wait for, or "" when nobody waits; for reports of hangs. */
void zr_sim_comm_waits(const struct zr_comm *any, char *text, size_t n);

#endif
