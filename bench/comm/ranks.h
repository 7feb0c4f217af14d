/* SPDX-License-Identifier: Apache-2.0 */
/* ranks.h: the ranks of zero-bench comm, and their communicators.
 *
 * Communicators are opened without a context of zero/zero.h, so that each backend is measured by itself and
 * several are open at once. A loop on a separate thread notices ranks that are lost or fail, and ends the
 * waits for them. */
#ifndef ZERO_BENCH_COMM_RANKS_H
#define ZERO_BENCH_COMM_RANKS_H

#include "comm/backend.h"
#include "comm/meet/rendezvous.h"
#include "comm/mesh.h"
#include "comm/mpi/mpi_own.h"
#include "kernels/thread.h"

enum { COMM_BACKENDS = 16 };

/* The options that all ranks must have in common. All fields have 64 bits, so that structs can be compared
 * by bytes. */
struct comm_asked {
    /* a bit for each number in ZERO_BACKEND_MAP, 0: all possible backends; a bit for each enum comm_op */
    int64_t backends, ops;
    /* smallest and largest size of the slices of all ranks together, in bytes, and the factor between two
     * sizes */
    int64_t from_bytes, to_bytes, factor;
    /* ranks of a group, 0: all; whether collectives run between groups instead of inside them */
    int64_t group, across;
    /* enum zero_dtype; cfg.deterministic: ZERO_AUTO, 0 or 1; whether on a GPU */
    int64_t dtype, deterministic, cuda;
    /* MPI uses no shared memory inside hosts. */
    int64_t flat;
    int64_t rounds;
};

/* A backend's communicators, which share one arena. */
struct comm_backend {
    const struct zr_backend *kind;
    struct zr_comm *comm[ZR_ROLES];
    /* among these: the two that are measured, and one that spans the world */
    struct zr_comm *gather, *reduce, *all;
    char *arena;
    /* how bytes travel, for the report */
    const char *path;
};

/* This rank of zero-bench comm. */
struct comm_ranks {
    struct zr_world world;
    struct zr_topology topology;
    struct zr_mesh mesh;
    /* the group whose collectives are measured */
    const struct zr_group *group;
    struct zr_rendezvous *rdv;
    struct zr_device *dev;
    struct zr_stream *stream;
    struct comm_backend backend[COMM_BACKENDS];
    int n_backends;
    /* backends that were not asked for by name and that cannot be opened, with the reasons; or "" */
    char left_out[1024];
    /* the loop that notices lost ranks, how to stop it, its thread, and which of these exist */
    uv_loop_t loop;
    uv_async_t stop;
    struct zr_thread thread;
    bool has_loop, has_thread;
};

/* All names, such as "self, shm or nccl". */
const char *comm_backend_names(void);
/* The bit of a backend in comm_asked, or 0 if there is no such name. */
int64_t comm_backend_bit(const char *name, size_t n_name);

/* Whether the backend is MPI, whose own collectives can be compared. */
bool comm_backend_is_mpi(const struct comm_backend *b);

/* Lets the ranks meet, and checks that all have the same options. Collective, blocking. Returns 0 or a
 * zero_err, the same on all ranks once they have met. Call comm_ranks_close in either case. */
int comm_ranks_meet(struct comm_ranks *r, const struct comm_asked *a);

/* Opens the device and the communicators for slices of slice_bytes. Each backend has a zeroed arena of
 * arena_bytes besides what it needs itself. other_bytes: what the caller will allocate besides.
 * Collective, blocking. Returns 0 or a zero_err, the same on all ranks. */
int comm_ranks_open(struct comm_ranks *r, const struct comm_asked *a, int64_t slice_bytes,
                    int64_t arena_bytes, int64_t other_bytes);

/* Waits for the stream. Returns 0, or why a communicator failed. */
int comm_ranks_sync(struct comm_ranks *r);

/* Collective if err is 0. Otherwise the other ranks get this thread's message, which is kept. */
void comm_ranks_close(struct comm_ranks *r, int err);

#endif
