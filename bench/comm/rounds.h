/* SPDX-License-Identifier: Apache-2.0 */
/* rounds.h: times and checks of collectives of one size after the other.
 *
 * At each size every row, which is a collective of one backend or a limit of the machine, is run once in
 * every round, in an order that changes from round to round: what else the machine does hits all of them. A
 * row's time of a round is that of the slowest rank, from a start that all ranks have in common. Before the
 * first round and after the last one all results are poisoned, made, and compared with what they must be. */
#ifndef ZERO_BENCH_COMM_ROUNDS_H
#define ZERO_BENCH_COMM_ROUNDS_H

#include "bench/comm/limits.h"
#include "bench/comm/ranks.h"

enum comm_op { COMM_ALL_GATHER, COMM_REDUCE_SCATTER, COMM_AGREE, COMM_OPS };
extern const char *const comm_op_names[COMM_OPS];

enum {
    /* An agreement is of this at most: more than any step has. */
    COMM_MOST_AGREE = 64 << 10,
    COMM_MOST_ROWS = COMM_OPS * (COMM_BACKENDS + 1) + ZR_MPI_OWNS,
    /* of comm_row's own */
    COMM_NOT_OWN = -1,
};

/* A collective of a backend, one of MPI's own, or the limit of one. */
struct comm_row {
    enum comm_op op;
    /* NULL: the limit */
    struct comm_backend *of;
    /* enum zr_mpi_own: MPI's own call, in the memory of that backend, which is MPI's; or COMM_NOT_OWN */
    int own;
    /* the row of its limit; NULL: it has none, or is one */
    struct comm_row *limit;
    /* (rounds) nanoseconds of one call */
    double *ns;
    /* elements that were wrong, of all ranks */
    int64_t wrong;
};

struct comm_rounds {
    struct comm_ranks *ranks;
    struct comm_asked asked;
    enum zr_dtype dtype;
    struct comm_limits limits;
    /* what is measured at this size: bytes of the region, and of one rank's slice of it */
    int64_t bytes, slice;
    struct comm_row row[COMM_MOST_ROWS];
    int n_rows;
    /* (COMM_MOST_ROWS * rounds) */
    double *times;
    /* What MPI's own sums add up where the backends add up bf16, which MPI does not know: as many elements of
     * fp32. NULL: what the backends do. */
    char *wide;
    int64_t wide_bytes;
    /* where things are in the arenas */
    int64_t gather_at, reduce_at, sum_at, words_at, control_at;
    /* of the host, which the stream reaches */
    char *piece;
    uint64_t *control;
    /* (ZR_MAX_SOURCES) whose elements come together, by place */
    struct comm_source *source;
    /* both by group and size: what is reduced may not be exact where there are too many sources */
    int n;
};

/* "shm", "MPI_Allgather", "copy limit" */
const char *comm_row_name(const struct comm_row *row);

/* The slice of a region of about so many bytes among n ranks. */
int64_t comm_slice(int64_t bytes, int n);

/* Opens the communicators of ranks that have met, and takes memory for the largest size. Collective, as
 * comm_ranks_open. Then, whether or not it failed, comm_rounds_close before comm_ranks_close. */
int comm_rounds_open(struct comm_rounds *b, struct comm_ranks *r, const struct comm_asked *a);
/* Measures slices of so many bytes, at most those of asked->to_bytes, into b->row. Collective. 0 or a zr_err,
 * as when a rank is lost. */
int comm_rounds_run(struct comm_rounds *b, int64_t slice);
void comm_rounds_close(struct comm_rounds *b);

#endif
