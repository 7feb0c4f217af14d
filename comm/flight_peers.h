/* SPDX-License-Identifier: Apache-2.0 */
/* flight_peers.h: maps the flight recorders of the other ranks on this host while they live. If one of them
 * is killed, the others can report what its program called last. This works with every backend. */
#ifndef ZR_COMM_FLIGHT_PEERS_H
#define ZR_COMM_FLIGHT_PEERS_H

#include <stddef.h>
#include <stdint.h>

struct zr_flight;
struct zr_flight_peers;
struct zr_log;
struct zr_rendezvous;
struct zr_topology;

/* Maps the recorders of the ranks on this host, before zr_rendezvous_detach, and lets rdv read them
 * (zr_rendezvous_know). Every rank sends the location of its recorder f. f must outlive *out, and *out must
 * outlive rdv. A recorder that cannot be mapped is left out, with a warning. Returns ZERO_ERR_NOMEM on all
 * ranks, or an error of the exchange; *out is then NULL.
 *
 * Collective over rdv; blocks. */
int zr_flight_peers_open(struct zr_rendezvous *rdv, const struct zr_topology *t, const struct zr_flight *f,
                         struct zr_log *log, struct zr_flight_peers **out);
/* NULL is allowed. */
void zr_flight_peers_close(struct zr_flight_peers *p);

#endif
