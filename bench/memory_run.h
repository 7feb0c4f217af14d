/* memory_run.h: a run of zero-bench train, by zero-run, and what it took. Each has processes of its own, so
 * that one leaves nothing behind that another could use. */
#ifndef ZERO_BENCH_MEMORY_RUN_H
#define ZERO_BENCH_MEMORY_RUN_H

#include "bench/gpt2/gpt2_config.h"
#include "bench/progress_bar.h"
#include "bench/state_hash.h"
#include "zero/zero.h"

/* What all runs of a command have in common. */
struct memory_runs {
    struct gpt2_config config;
    int64_t ranks, steps, batch;
    enum zero_dtype dtype;
    /* 0: no hybrids */
    int64_t shard_group;
    /* of all runs, so many in a row */
    struct progress progress;
    int n_runs, n_done;
};

/* In place of a column: the program without libzero, one process. */
enum { MEMORY_PLAIN = -1 };

struct memory_stage {
    /* of one rank */
    struct zero_bytes planned, allocated;
    /* mean over the ranks, all of the process; pages that n of them map count as 1/n */
    int64_t peak_resident;
    /* (steps) to be freed */
    double *loss;
    char state_sha256[STATE_HASH_CHARS];
};

/* Runs a column (stage_table.h), or MEMORY_PLAIN. Returns 0, or the exit code after one line on stderr. */
int memory_run(struct memory_runs *runs, int column, struct memory_stage *out);

#endif
