/* SPDX-License-Identifier: Apache-2.0 */
/* ranks.h: the ranks of zero-bench comm, and their communicators.
 *
 * They are opened below the front door, where each backend is there by itself, and several at once: no
 * context is wrapped, and no function of zero/zero.h is called. A loop on a thread of its own hears of ranks
 * that are lost or fail, and ends what waits for them. */
#ifndef ZERO_BENCH_COMM_RANKS_H
#define ZERO_BENCH_COMM_RANKS_H

#include "comm/backend.h"
#include "comm/meet/rendezvous.h"
#include "comm/mesh.h"
#include "comm/mpi/mpi_own.h"
#include "kernels/thread.h"

enum { COMM_BACKENDS = 16 };

/* What is measured: options that all ranks must have alike. Of 64 bits each, so that they are compared by
 * bytes. */
struct comm_asked {
    /* bits of ZERO_BACKEND_MAP's numbers, 0: all that can; bits of enum comm_op */
    int64_t backends, ops;
    /* sizes of the whole region, from the smallest to the largest, each so many times the one before */
    int64_t from_bytes, to_bytes, factor;
    /* ranks of a group, 0: all; whether the collectives run between such groups */
    int64_t group, across;
    /* enum zr_dtype; ZERO_AUTO, 0 or 1; on a GPU */
    int64_t dtype, deterministic, cuda;
    /* of MPI: no shared memory inside hosts */
    int64_t flat;
    int64_t rounds, bars;
};

/* A backend's communicators, which have one arena. */
struct comm_backend {
    const struct zr_backend *row;
    struct zr_comm *comm[ZR_ROLES];
    /* of these: what is measured, and what all ranks of the world are on */
    struct zr_comm *gather, *reduce, *all;
    char *arena;
    /* how bytes travel */
    const char *path;
};

struct comm_ranks {
    struct zr_world world;
    struct zr_topology topology;
    struct zr_mesh mesh;
    /* what is measured runs on it */
    const struct zr_group *group;
    struct zr_rendezvous *rdv;
    struct zr_device *dev;
    struct zr_stream *stream;
    struct comm_backend backend[COMM_BACKENDS];
    int n_backends;
    /* what was not asked for by name and cannot be here: one text after another, or "" */
    char left_out[1024];
    uv_loop_t loop;
    uv_async_t stop;
    struct zr_thread thread;
    bool has_loop, has_thread;
};

/* "self, shm or nccl" */
const char *comm_backend_names(void);
/* The bit of a backend in comm_asked; 0: there is none of that name. */
int64_t comm_backend_bit(const char *name, size_t n_name);

/* Whether it is MPI's, whose own collectives can be compared with. */
bool comm_backend_is_mpi(const struct comm_backend *b);

/* The ranks meet, and have been asked for the same. Collective, blocking: 0 or a zr_err, of all ranks if the
 * rank could be found. Then, whether or not it failed, comm_ranks_close. */
int comm_ranks_meet(struct comm_ranks *r, const struct comm_asked *a);

/* Opens the device and the communicators, for slices of so many bytes, each backend with an arena of
 * arena_bytes, zeroed, beside what it wants itself; other_bytes are those that the caller will take besides.
 * Collective, blocking: 0 or a zr_err, of all ranks. */
int comm_ranks_open(struct comm_ranks *r, const struct comm_asked *a, int64_t slice_bytes,
                    int64_t arena_bytes, int64_t other_bytes);

/* Finishes what is on the stream: 0, or why one of the communicators failed. */
int comm_ranks_sync(struct comm_ranks *r);

/* Collective where err is 0. Else the other ranks hear of it, with this thread's message, which is kept. */
void comm_ranks_close(struct comm_ranks *r, int err);

#endif
