/* SPDX-License-Identifier: Apache-2.0 */
/* progress.h: how far a rank has come, in memory that zero-run and the ranks of a node share.
 *
 * zero-run reads it when a rank is gone: for whether a job is to be started again, and with how many
 * micro-batches on each rank when ranks are fewer. Ranks that wait in zero_wrap read that another one has
 * ended. */
#ifndef ZR_ZERO_PROGRESS_H
#define ZR_ZERO_PROGRESS_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define ZR_PROGRESS_MAGIC UINT64_C(0x327365726772707a) /* "zprgres2" */

/* One for each rank of a zero-run, one behind the other in a file without a name. zero-run writes magic, -1
 * for t, and how the rank ended. The rank's process writes the rest. */
struct zr_progress {
    uint64_t magic;
    /* of the context that writes here; 0: none does */
    _Atomic int32_t pid;
    /* grad_accum_steps; 0: there was no context yet */
    _Atomic int32_t accum;
    /* of the last zero_step; -1: there was no context yet */
    _Atomic int64_t t;
    /* how often it has begun zero_wrap with other ranks */
    _Atomic int32_t n_wraps;
    /* 0: it runs; 1 + its exit code; or minus the signal that killed it */
    _Atomic int32_t ended;
    char reserved[32];
};
_Static_assert(sizeof(struct zr_progress) == 64, "no two ranks write to one cache line");

/* The rank's end: what ZERO_PROGRESS ("PATH:NUMBER") names, mapped. Zeroed: nothing is. */
struct zr_progress_map {
    struct zr_progress *own, *all;
    int64_t n_bytes;
    /* the wrap that this context is, counted from 1, and this rank in the job; 0: it meets nobody */
    int32_t n_wraps, rank;
    /* this context writes there */
    bool claimed;
};

struct zr_log;

/* Maps it, and does nothing without that variable. If it names nothing that can be used, a line is logged. */
void zr_progress_open(struct zr_progress_map *m, struct zr_log *log);
/* This rank begins to meet the others of its job, if zero-run started them as these ranks. */
void zr_progress_meet(struct zr_progress_map *m, int32_t rank, int32_t world);
/* Whether a rank of this node has ended before it began to meet this one: then how says "its program returned
 * 0". m: a struct zr_progress_map. On any thread. */
bool zr_progress_has_ended(void *m, int rank, char *how, size_t n_how);
/* A context has come about. Where another context of this process writes already, nothing is kept. */
void zr_progress_begin(struct zr_progress_map *m, int32_t accum);
void zr_progress_step(struct zr_progress_map *m, int64_t t);
void zr_progress_close(struct zr_progress_map *m);

#endif
