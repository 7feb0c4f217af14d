/* SPDX-License-Identifier: Apache-2.0 */
/* rounds.h: times and checks the collectives of each size.
 *
 * A row is a collective of one backend, or a limit of the machine. Every round runs each row once, in
 * changing order, so that other load on the machine hits all rows. The time of a row is that of the
 * slowest rank, from a common start. Before the first and after the last round, each row is called once and
 * its result compared with the right values. */
#ifndef ZERO_BENCH_COMM_ROUNDS_H
#define ZERO_BENCH_COMM_ROUNDS_H

#include "bench/comm/limits.h"
#include "bench/comm/ranks.h"

/* COMM_AGREE: an agreement, which is a small all-reduce of 64-bit words in place (zr_comm_agree). Each step
 * of training makes one. */
enum comm_op { COMM_ALL_GATHER, COMM_REDUCE_SCATTER, COMM_AGREE, COMM_OPS };
extern const char *const comm_op_names[COMM_OPS];

enum {
    /* most bytes of an agreement; a step has fewer */
    COMM_MAX_AGREE = 64 << 10,
    COMM_MAX_ROWS = COMM_OPS * (COMM_BACKENDS + 1) + ZR_MPI_OWNS,
    /* value of comm_row.mpi_call */
    COMM_NO_MPI_CALL = -1,
};

/* A backend's collective, one of MPI's own, or a limit. */
struct comm_row {
    enum comm_op op;
    /* NULL: this row is a limit */
    struct comm_backend *backend;
    /* enum zr_mpi_own, if MPI's own call is measured in the memory of backend mpi; or COMM_NO_MPI_CALL */
    int mpi_call;
    /* the row with the limit of this row's collective; NULL: there is none */
    struct comm_row *limit;
    /* (rounds) nanoseconds of one call */
    double *ns;
    /* number of wrong elements, over all ranks */
    int64_t wrong;
};

struct comm_rounds {
    struct comm_ranks *ranks;
    struct comm_asked asked;
    enum zero_dtype dtype;
    struct comm_limits limits;
    /* the size being measured: bytes of the region, and of one rank's slice */
    int64_t bytes, slice;
    struct comm_row row[COMM_MAX_ROWS];
    int n_rows;
    /* (COMM_MAX_ROWS * rounds) */
    double *times;
    /* Input of MPI's own sums if the backends add bf16, which MPI does not have: as many fp32 elements.
     * NULL: they use the backends' input. */
    char *mpi_input;
    int64_t mpi_input_bytes;
    /* offsets in the arenas: the region of gathers, the input and the result of sums, the words of
     * agreements, and the words in which ranks merge `control` */
    int64_t gather_at, reduce_at, sum_at, words_at, control_at;
    /* host memory that the stream can reach: for values, and for numbers that ranks merge */
    char *host_buffer;
    uint64_t *control;
    /* (ZR_MAX_SOURCES) the ranks whose elements are combined, in the order of places */
    struct comm_source *source;
    /* ranks of the group that is measured; sums of more than ZR_MAX_SOURCES ranks are not checked bit for
     * bit */
    int n;
};

/* A row's name, such as "shm", "MPI_Allgather" or "copy limit". */
const char *comm_row_name(const struct comm_row *row);

/* The slice of each of n ranks, for a region of about `bytes`. */
int64_t comm_slice(int64_t bytes, int n);

/* Opens the communicators of ranks that have met, and takes memory for the largest size. Collective, as
 * comm_ranks_open. In either case, call comm_rounds_close and then comm_ranks_close. */
int comm_rounds_open(struct comm_rounds *b, struct comm_ranks *r, const struct comm_asked *a);
/* Measures slices of so many bytes, at most those of asked->to_bytes, into b->row. Collective. Returns 0
 * or a zero_err, for example when a rank is lost. */
int comm_rounds_run(struct comm_rounds *b, int64_t slice);
void comm_rounds_close(struct comm_rounds *b);

#endif
