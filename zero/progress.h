/* SPDX-License-Identifier: Apache-2.0 */
/* progress.h: how far a rank has come, in memory that zero-run shares with the ranks of its node.
 *
 * zero-run reads it when a rank has ended. It then decides whether to start the job again, and with how many
 * micro-batches per rank if there are fewer ranks. Ranks that wait in zero_wrap read there that another rank
 * has ended. */
#ifndef ZR_ZERO_PROGRESS_H
#define ZR_ZERO_PROGRESS_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define ZR_PROGRESS_MAGIC UINT64_C(0x327365726772707a) /* "zprgres2" */

/* One record for each rank of a zero-run, in the order of local ranks, in a file without a name. zero-run
 * writes magic, the initial t of -1, and ended. The rank's process writes the rest. */
struct zr_progress {
    uint64_t magic;
    /* Process of the context that writes here. 0: none does. */
    _Atomic int32_t pid;
    /* grad_accum_steps. 0: there was no context yet. */
    _Atomic int32_t accum;
    /* Highest step that was taken. -1: there was no context yet. */
    _Atomic int64_t t;
    /* How often the rank has begun zero_wrap with other ranks. */
    _Atomic int32_t n_wraps;
    /* How the rank ended. 0: it runs; 1 + its exit code; or minus the signal that killed it. */
    _Atomic int32_t ended;
    char reserved[32];
};
_Static_assert(sizeof(struct zr_progress) == 64, "no two ranks write to one cache line");

/* A rank's mapping of the file that ZERO_PROGRESS ("PATH:NUMBER") names. Zeroed: nothing is mapped. */
struct zr_progress_map {
    struct zr_progress *own, *all;
    int64_t n_bytes;
    /* Number of this context's zero_wrap, from 1 (0: it has no other ranks), and this rank in the job. */
    int32_t n_wraps, rank;
    /* Whether this context writes the record. */
    bool claimed;
};

struct zr_log;

/* Maps the file. Does nothing without ZERO_PROGRESS. Logs a line if the variable names no usable file. */
void zr_progress_open(struct zr_progress_map *m, struct zr_log *log);
/* Records that this rank begins to meet the others of its job. Does nothing if zero-run did not start them as
 * these ranks. */
void zr_progress_meet(struct zr_progress_map *m, int32_t rank, int32_t world);
/* Whether a rank of this node has ended. If so, how says, for example, "its program returned 0". *has_begun:
 * it had begun to meet this rank. m points to a struct zr_progress_map. Any thread. */
bool zr_progress_has_ended(void *m, int rank, bool *has_begun, char *how, size_t n_how);
/* Begins to report for an open context. Does nothing if another context of this process reports already. */
void zr_progress_begin(struct zr_progress_map *m, int32_t accum);
void zr_progress_step(struct zr_progress_map *m, int64_t t);
void zr_progress_close(struct zr_progress_map *m);

#endif
