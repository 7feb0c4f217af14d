/* SPDX-License-Identifier: Apache-2.0 */
/* launcher.h: finds out which launcher started this process, from its environment variables.
 *
 * Launchers nest: srun starts torchrun, and mpirun runs inside a job of Slurm's. The environment then has the
 * variables of several, and the innermost launcher decides. If the variables do not show which one is the
 * innermost, and they disagree about the rank, finding the launcher is an error that names both. */
#ifndef ZR_COMM_LAUNCHER_H
#define ZR_COMM_LAUNCHER_H

#include "comm/meet/rendezvous.h"

#include <sys/types.h>

enum { ZR_MAX_RANKS = 65536 };

/* In the order of precedence. */
enum zr_launcher_kind {
    /* ZERO_RANK together with ZERO_JOB */
    ZR_LAUNCHER_ZERO_RUN,
    /* ZERO_RANK without ZERO_JOB: the user's own choice */
    ZR_LAUNCHER_BY_HAND,
    ZR_LAUNCHER_TORCHRUN,
    ZR_LAUNCHER_OMPI,
    ZR_LAUNCHER_MPICH,
    ZR_LAUNCHER_SLURM,
    /* RANK without torchrun's other variables */
    ZR_LAUNCHER_PLAIN,
    ZR_LAUNCHERS
};

/* One launcher's variables. The rank and world variables go in pairs; the others may be missing. */
struct zr_launcher {
    enum zr_launcher_kind kind;
    const char *source;
    const char *rank, *world, *local_rank;
    /* Variable with the number of ranks on this host. */
    const char *local_size;
    /* Variables that together distinguish jobs on this host. */
    const char *job[3];
    /* Variable with the number of restarts. */
    const char *attempt;
    /* An MPI's launcher or Slurm. */
    bool gives_no_address;
    /* An MPI's launcher, so that ranks can agree on more over MPI. */
    bool is_of_mpi;
    /* Slurm may have started it, and then knows the hosts. */
    bool is_of_slurm;
};

/* Finds the launcher that counts, compares it with the others that are set, and fills rank, world, local
 * rank, source, size_from and note of w. *out is NULL, and w unchanged, if no launcher's variables are set.
 * by_mpi: the ranks work over MPI, so an MPI launcher's variables must say the same.
 * Errors: ARG  half of a pair is set, a number is wrong, or two launchers contradict each other */
int zr_launcher_find(bool by_mpi, const struct zr_launcher **out, struct zr_world *w);

/* Returns the launcher that started this process if its job has more ranks than world. *said gets its values.
 * NULL: there is none, or its variables cannot be read. *is_sure is false if they may be left over. */
const struct zr_launcher *zr_launcher_of_larger(int world, struct zr_world *said, bool *is_sure);

/* Whether srun started this task with this rank and world. */
bool zr_launcher_is_slurm_task(int rank, int world);

/* Whether this program was started with l's rank and world as they are now. A forked child counts as its
 * parent. */
bool zr_launcher_is_unchanged(const struct zr_launcher *l);

/* Returns the process that started the ranks of l on this host. That is the nearest one above this process
 * that did not begin with the rank's variables. 0: a process above cannot be read. */
pid_t zr_launcher_process(const struct zr_launcher *l);

/* Reads decimal text in [lo, hi], with nothing before or after it. */
int zr_meeting_number(const char *name, const char *text, int lo, int hi, int *out);

#endif
