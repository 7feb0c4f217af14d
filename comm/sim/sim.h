/* sim.h: collectives between the ranks of a simulated world (kernels/sim/sim_device.h).
 *
 * They promise what comm.h promises and nothing more: who waits for whom is the least that it allows, and a
 * peer reads another rank's arena on its own stream, also after that rank's own operation is over. */
#ifndef ZR_COMM_SIM_H
#define ZR_COMM_SIM_H

#include "comm/comm.h"
#include "kernels/sim/sim_device.h"

/* The order in which ranks issue collectives over all communicators together: it must be the same on all
 * ranks, as NCCL wants it, and each rank must issue one after the other, from one thread or from threads that
 * are ordered. One for a world; NULL where no memory is left. */
struct zr_sim_order;
struct zr_sim_order *zr_sim_order_open(struct zr_sim *w);
void zr_sim_order_close(struct zr_sim_order *o); /* NULL is allowed; after the world */

/* One communicator of all ranks of the world: out gets one handle a rank, each closed on its own. name tells
 * it in reports ("gather"). */
int zr_sim_comm_open(struct zr_sim *w, const char *name, struct zr_sim_order *order, struct zr_comm **out);

/* Every rank that still waits for others in a collective learns that `rank` is gone: as a communicator does
 * whose peer dies. */
void zr_sim_comm_lose(struct zr_comm *any, int rank);

/* What the ranks wait for, or "" when nobody waits; for reports of hangs. */
void zr_sim_comm_waits(const struct zr_comm *any, char *text, size_t n);

#endif
