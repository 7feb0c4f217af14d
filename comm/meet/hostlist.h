/* SPDX-License-Identifier: Apache-2.0 */
/* hostlist.h: Slurm's form of a list of hosts, as in SLURM_STEP_NODELIST:
 * "node[01-03,07],rack[1-2]n[01-10]-ib,login".
 *
 * A name is letters, digits, '.', '_' and '-', with groups in brackets among them: numbers, and ranges of
 * them, of which each stands for itself with the zeros that it has. Several groups of one name multiply. */
#ifndef ZR_COMM_HOSTLIST_H
#define ZR_COMM_HOSTLIST_H

#include "kernels/error.h"

#include <stdint.h>

enum { ZR_HOSTLIST_NAME = 256, ZR_HOSTLIST_MOST = 65536 };

/* The first name and how many there are (up to ZR_HOSTLIST_MOST). variable: what the list is called in
 * messages. ZR_ERR_ARG names the character at which it is no such list; nothing is written then. */
int zr_hostlist_first(const char *variable, const char *list, char first[ZR_HOSTLIST_NAME], int64_t *n);

#endif
