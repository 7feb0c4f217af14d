/* SPDX-License-Identifier: Apache-2.0 */
/* sim.h: collectives between the ranks of a simulated world (kernels/sim/sim_device.h).
 *
 * They promise what comm.h promises and nothing more. Ranks wait for each other as little as it allows. A
 * peer reads another rank's arena on its own stream, even after that rank's operation is over. */
#ifndef ZR_COMM_SIM_H
#define ZR_COMM_SIM_H

#include "comm/comm.h"
#include "kernels/sim/sim_device.h"

/* Checks the order in which ranks issue collectives over all communicators.
 *
 * As NCCL requires, the order must be the same on all ranks of a class, and all ranks must issue theirs in
 * one order of all collectives. Each rank must issue from one thread, or from threads that are ordered. On
 * one communicator collectives must also run in order: on one stream, or on streams that wait.
 *
 * class_of has (world) the class of each rank, from 0. Ranks of a class have the same part of the same
 * pipeline stage. NULL: there is one class. Open one order for each world. Returns NULL if there is no
 * memory. */
struct zr_sim_order;
struct zr_sim_order *zr_sim_order_open(struct zr_sim *w, const int32_t *class_of);
/* Call when all ranks have ended without a failure. Reports it if some collectives have no place in an order
 * of all ranks: each rank of a circle issues a collective before one that the next rank issues first. */
void zr_sim_order_end(const struct zr_sim_order *o, struct zr_sim *w);
/* Call after the world was closed. NULL is allowed. */
void zr_sim_order_close(struct zr_sim_order *o);

/* Opens the communicators of one role, one for each of n_groups groups. Each rank of the world is in one
 * group. The groups' rank is ignored, and their members are copied. n_groups 0: one group of all ranks.
 * out[rank] is that rank's handle; each is closed separately. */
int zr_sim_comm_open(struct zr_sim *w, enum zr_role role, int n_groups, const struct zr_group *groups,
                     struct zr_sim_order *order, struct zr_comm **out);

/* Fails the communicator of any's group as the death of `rank` (of the world) would. Ranks that wait in a
 * collective see the failure. */
void zr_sim_comm_lose(struct zr_comm *any, int rank);

/* Writes what the ranks wait for, or "" if no rank waits. Used in reports of hangs. */
void zr_sim_comm_waits(const struct zr_comm *any, char *text, size_t n);

#endif
