/* SPDX-License-Identifier: Apache-2.0 */
/* identity.h: where a process runs, as far as another one can compare it with where itself runs.
 *
 * Whoever asks for the topology (topology.h) gives its identity along. Tests fill the struct themselves, so
 * that the ranks of one machine can pose as several hosts, or as ranks that may not see each other's memory.
 */
#ifndef ZR_COMM_IDENTITY_H
#define ZR_COMM_IDENTITY_H

#include <stdint.h>

struct zr_identity {
    /* one boot of one machine; of a system that does not tell, its host name */
    char machine[48];
    /* for messages only: two containers may have one, and one machine may be renamed */
    char host_name[64];
    /* processes of different ones have different numbers for each other */
    uint64_t pid_namespace;
    /* ZERO_HOST_ID, by which a machine is several hosts; "": it is not set. Of a long one the beginning and a
     * hash */
    char part[48];

    /* Opens, for reading and writing, file fd of process pid, which is rank's; returns a descriptor of this
     * process, or -1 with errno. NULL: through /proc. */
    int (*open)(void *arg, int rank, int pid, int fd);
    void *arg;
};

/* Of this process. Local. */
void zr_identity_read(struct zr_identity *out);

/* id->open, or what stands for it. */
int zr_identity_open(const struct zr_identity *id, int rank, int pid, int fd);

#endif
