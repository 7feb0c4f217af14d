/* progress.h: how far a rank has come, in memory that zero-run reads when the rank is gone: for whether a job
 * is to be started again, and with how many micro-batches on each rank when ranks are fewer. */
#ifndef ZR_ZERO_PROGRESS_H
#define ZR_ZERO_PROGRESS_H

#include <stdatomic.h>
#include <stdint.h>

#define ZR_PROGRESS_MAGIC UINT64_C(0x737365726772707a) /* "zprgress" */

/* One for each rank of a zero-run, one behind the other in a file without a name. zero-run writes magic, and
 * -1 for t; the rank's process the rest. */
struct zr_progress {
    uint64_t magic;
    /* of the context that writes here; 0: none does */
    _Atomic int32_t pid;
    /* grad_accum_steps; 0: there was no context yet */
    _Atomic int32_t accum;
    /* of the last zero_step; -1: there was no context yet */
    _Atomic int64_t t;
    char reserved[40];
};
_Static_assert(sizeof(struct zr_progress) == 64, "no two ranks write to one cache line");

/* The rank's end: what ZERO_PROGRESS ("PATH:NUMBER") names, mapped. Zeroed: nothing is. */
struct zr_progress_map {
    struct zr_progress *own;
    void *all;
    int64_t n_bytes;
};

struct zr_log;

/* A context begins. Without that variable, or where another context of this process writes already, nothing
 * is kept; where it names nothing that can be used a line is logged. */
void zr_progress_open(struct zr_progress_map *m, struct zr_log *log, int32_t accum);
void zr_progress_step(struct zr_progress_map *m, int64_t t);
void zr_progress_close(struct zr_progress_map *m);

#endif
