/* SPDX-License-Identifier: Apache-2.0 */
/* process_stat.h: what the kernel reports about another process of this host. */
#ifndef ZR_COMM_PROCESS_STAT_H
#define ZR_COMM_PROCESS_STAT_H

#include <stdbool.h>

struct zr_process_stat {
    /* Process id of the parent. 0: it has none in this PID namespace. */
    int parent;
    /* State as in proc(5): 'T' and 't' are stopped, 'Z' and 'X' have ended. */
    char state;
    /* The program's name, which the kernel cuts. */
    char name[64];
};

/* Reads /proc/PID/stat. Returns false if the process is gone, or /proc cannot be read. */
bool zr_process_stat(int pid, struct zr_process_stat *out);

#endif
