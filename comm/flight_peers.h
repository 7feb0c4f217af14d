/* SPDX-License-Identifier: Apache-2.0 */
/* flight_peers.h: the flight recorders of the ranks that share this one's host, mapped while they live: so
 * whatever joins the ranks, the others can say what the program of one called last when it was killed. */
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

/* Collective and blocking over rdv, before zr_rendezvous_detach: every rank says where its recorder's memory
 * is (f, which outlives *out), and maps those of its host. One that cannot be mapped is left out, with a
 * warning. ZR_ERR_NOMEM, on all ranks, or as an exchange; *out is then NULL. */
int zr_flight_peers_open(struct zr_rendezvous *rdv, const struct zr_topology *t, const struct zr_flight *f,
                         struct zr_log *log, struct zr_flight_peers **out);
/* NULL is allowed. */
void zr_flight_peers_close(struct zr_flight_peers *p);

/* The call that a rank's program is in, or was in last: "zero_step in step 12, which had returned"; "" where
 * that is not known here: of another host's rank. This rank's, too. Any thread. */
void zr_flight_peers_last_call(const struct zr_flight_peers *p, int32_t rank, char *text, size_t n_text);

/* Whether a rank's process is stopped, and the failure that it recorded; all 0 for another host's rank. Any
 * thread. */
void zr_flight_peers_see(const struct zr_flight_peers *p, int32_t rank, struct zr_rank_seen *out);

#endif
