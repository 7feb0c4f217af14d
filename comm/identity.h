/* SPDX-License-Identifier: Apache-2.0 */
/* identity.h: where a process runs, in a form that other processes can compare with their own.
 *
 * A caller of zr_topology_probe passes an identity. Tests fill the struct themselves, so that the ranks of
 * one machine can pose as several hosts, or as ranks that may not see each other's memory. */
#ifndef ZR_COMM_IDENTITY_H
#define ZR_COMM_IDENTITY_H

#include <stdint.h>

struct zr_identity {
    /* One boot of one machine. The host name on systems without a boot id. */
    char machine[48];
    /* For messages only: two containers may have the same one, and a machine may be renamed. */
    char host_name[64];
    /* Processes in different PID namespaces have different numbers for each other. */
    uint64_t pid_namespace;
    /* ZERO_HOST_ID, which splits a machine into several hosts. "" if it is not set. A long value is kept as
     * its beginning and a hash. */
    char host_id[48];

    /* Opens the file behind descriptor fd of process pid for reading and writing. That process is the one of
     * rank `rank`. Returns a descriptor of this process, or -1 with errno. NULL: the file is opened through
     * /proc. */
    int (*open)(void *arg, int rank, int pid, int fd);
    void *arg;
};

/* Reads the identity of this process. Local. */
void zr_identity_read(struct zr_identity *out);

/* Calls id->open, or opens the file through /proc if id->open is NULL. */
int zr_identity_open(const struct zr_identity *id, int rank, int pid, int fd);

#endif
