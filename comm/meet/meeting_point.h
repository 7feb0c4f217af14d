/* SPDX-License-Identifier: Apache-2.0 */
/* meeting_point.h: finds where rank 0 waits for the others, once a rank knows its number, and the name that
 * the ranks of a job have in common.
 *
 * The first of these that is set counts:
 *
 *    1. cfg.launch.rendezvous, or ZERO_RENDEZVOUS: "tcp://host:port", "tcp://[ipv6]:port", or
 *       "file:///path" of a folder that all ranks share, or of a file in it
 *    2. MASTER_ADDR and MASTER_PORT
 *    3. what ranks agree on over MPI, if its launcher has started them (zr_world, by_mpi)
 *    4. loopback, if the launcher of an MPI or Slurm says that all ranks are on one host, or does not
 *       say on how many; the port follows from the job's name
 *    5. the first host of Slurm's node list, at that port */
#ifndef ZR_COMM_MEETING_POINT_H
#define ZR_COMM_MEETING_POINT_H

#include "comm/meet/launcher.h"
#include "kernels/error.h"

#include <stdint.h>

/* Completes w, whose rank, world and source are known. l is the launcher that gave them. NULL: the
 * configuration gave them, or nothing did. want_url is cfg.launch.rendezvous, or NULL. by_mpi: the ranks can
 * communicate over MPI. */
int zr_meeting_point_find(const struct zr_launcher *l, const char *want_url, bool by_mpi, struct zr_world *w);

/* Sets host and port of w, or its file, from a URL. name is its name in messages. */
int zr_meeting_url(const char *name, const char *url, struct zr_world *w);

/* Copies a name or an address, an IPv6 one without its brackets. Returns false if text is neither. */
bool zr_meeting_host(const char *text, char host[sizeof((struct zr_world *)0)->host]);

/* ---- Slurm's lists of hosts, as SLURM_STEP_NODELIST: "node[01-03,07],rack[1-2]n[01-10]-ib,login" ----
 *
 * A name has letters, digits, '.', '_' and '-', and groups in brackets: numbers and ranges of numbers. Each
 * number gives one name, with its leading zeros. Several groups of one name multiply. */

enum { ZR_HOSTLIST_NAME = 256, ZR_HOSTLIST_MAX = 65536 };

/* Reads the first name, and how many there are (up to ZR_HOSTLIST_MAX). variable is the list's name in
 * messages. ZERO_ERR_ARG names the character at which the list is invalid; nothing is written then. */
int zr_hostlist_first(const char *variable, const char *list, char first[ZR_HOSTLIST_NAME], int64_t *n);

#endif
