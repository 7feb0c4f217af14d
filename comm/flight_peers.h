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
struct zr_rank_seen;
struct zr_rendezvous;
struct zr_topology;

/* Maps the recorders of the ranks on this host, before zr_rendezvous_detach. Every rank sends the location of
 * its own recorder f, which must outlive *out. A recorder that cannot be mapped is left out, with a warning.
 * Returns ZERO_ERR_NOMEM on all ranks, or an error of the exchange; *out is then NULL.
 *
 * Collective over rdv; blocks. */
int zr_flight_peers_open(struct zr_rendezvous *rdv, const struct zr_topology *t, const struct zr_flight *f,
                         struct zr_log *log, struct zr_flight_peers **out);
/* NULL is allowed. */
void zr_flight_peers_close(struct zr_flight_peers *p);

/* Writes the call that a rank's program is in, or was in last: "zero_step in step 12, which had returned".
 * The text is "" if that is unknown, as for ranks on other hosts. rank may be this rank. Any thread. */
void zr_flight_peers_last_call(const struct zr_flight_peers *p, int32_t rank, char *text, size_t n_text);

/* Reads whether a rank's process is stopped, and the failure that it recorded. All 0 for ranks on other
 * hosts. Any thread. */
void zr_flight_peers_see(const struct zr_flight_peers *p, int32_t rank, struct zr_rank_seen *out);

#endif
