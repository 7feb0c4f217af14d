/* SPDX-License-Identifier: Apache-2.0 */
/* backend.h: the interface between a context and a backend that moves bytes between ranks.
 *
 * A backend is a row, struct zr_backend, defined as zr_backend_KEY in the same folder as its communicators.
 * Programs can choose it once it has a row in ZERO_BACKEND_MAP (zero/types.h), from which
 * zero/backend.c makes the table of all. A context never compares a backend's name: what it must know is a
 * field of the row. */
#ifndef ZR_COMM_BACKEND_H
#define ZR_COMM_BACKEND_H

#include "comm/comm.h"

struct zr_user_comm;

/* Requirements on the communicator of a role. The numbers are equal on all ranks of the world. If a number is
 * too small, an operation takes more rounds. */
struct zr_role_ask {
    /* The role's ranks. NULL: no rank has the role. */
    const struct zr_group *group;
    /* Bytes of the largest slice that the role gathers or reduces. Only a reducing role reserves for it. */
    int64_t largest_bytes;
    /* Most bytes that one call packs for one rank: small slices, and slices of segments whose last slices are
     * short. Each slice is rounded up to 128. */
    int64_t packed_bytes;
};

/* Whether the role moves activations within a group. Its operations may differ from those of other groups,
 * may be larger than slices, and are of every kind. */
static inline bool zr_role_moves_activations(enum zr_role r)
{
    return r == ZR_ROLE_TP || r == ZR_ROLE_CP;
}

static inline bool zr_role_reduces(enum zr_role r)
{
    return r == ZR_ROLE_REDUCE || r == ZR_ROLE_REDUCE_OUTER || zr_role_moves_activations(r);
}

/* Whether the role's groups are pairs, or single ranks. Its broadcasts are messages. */
static inline bool zr_role_is_pair(enum zr_role r)
{
    return r >= ZR_ROLE_EVEN_PAIR && r <= ZR_ROLE_TIED;
}

/* The program's choices. A backend ignores the fields that do not concern it. */
struct zr_backend_config {
    /* Time that an operation waits for peers, in ms. */
    int64_t timeout_ms;
    /* Time limit for opening and for attaching arenas, in ms. 0: timeout_ms. */
    int64_t start_timeout_ms;
    /* Make sums in the fixed tree, whatever that costs. */
    bool deterministic;
    /* Some slices that are too large to be packed differ in size. path says how those are gathered. */
    bool ragged;
    /* nccl: use symmetric windows, and gather by copy engines. */
    bool copy_engine;
    /* mpi: do not use shared memory inside a host. */
    bool flat;
    /* The world's topology. Outlives the communicators. */
    const struct zr_topology *topology;
    /* The program's own communicator, for a backend with user_comm_world, or NULL. */
    void *user_comm;
    /* Source of the world's size, "SLURM_NTASKS is 4", with which MPI's ranks must agree. NULL: the size
     * comes from the configuration or from user_comm, which may have only some of MPI's ranks. */
    const char *found_by;
    /* May be NULL. Any thread may write to it. */
    struct zr_log *log;
};

struct zr_backend {
    /* As in ZERO_BACKEND_MAP and in zr_comm_ops. */
    const char *name;
    /* Device that the backend works with, "host" or "cuda". NULL: any. */
    const char *device;
    /* The backend is for a world of one rank, which has no rendezvous. */
    bool alone;
    /* The backend sums in the fixed tree only on request, as it has a faster way. */
    bool costly_tree;
    /* The backend packs slices of at most this many bytes, and segments whose last slices are short
     * (packed_bytes of zr_role_ask). */
    int64_t small_bytes;

    /* Returns 0 if all ranks can use the backend, else ZERO_ERR_NOTSUP naming some that cannot. t says who
     * shares a host. Local, with the same result on all ranks. NULL: all ranks can. */
    int (*check_hosts)(const struct zr_topology *t, const struct zr_group *all);
    /* Bytes that a role's communicator reserves at the end of its arena, a multiple of 256. Only the size of
     * ask->group is known. Local, with the same result on all ranks. NULL: none. */
    int64_t (*reserve)(enum zr_role role, const struct zr_role_ask *ask, bool deterministic);
    /* Opens a communicator for each role that has a group: at least GATHER and REDUCE. comm is all NULL
     * before. WORLD's group is the world; without it CONTROL's is, and without that GATHER's. rdv (NULL: a
     * single rank), dev and the groups' members must outlive the communicators. A failure is one of all
     * ranks, unless it follows from the arguments. comm then holds what the caller must close.
     *
     * Collective over all ranks of rdv; blocks. */
    int (*open)(struct zr_rendezvous *rdv, struct zr_device *dev, const struct zr_backend_config *config,
                const struct zr_role_ask ask[ZR_ROLES], struct zr_comm *comm[ZR_ROLES]);
    /* How bytes travel, for a gather communicator that has its arena. The text is valid until it is closed.
     * NULL: there is only one way, and the backend's name describes it. */
    const char *(*path)(const struct zr_comm *c);

    /* The library that allocates device memory besides arenas, and an upper estimate of its bytes for each
     * communicator. It allocates some of them in the first collectives. NULL: none. */
    const char *library;
    int64_t library_bytes;

    /* For a backend that can use the program's own communicator, else NULL. The configuration has it in the
     * field user_comm_name ("nccl_comm"). user_comm_world reads its ranks. At most one backend per device has
     * these. */
    const char *user_comm_name;
    int (*user_comm_world)(void *user_comm, int64_t timeout_ms, int *rank, int *world);
    /* Exchanges bytes before ranks have met: over the program's communicator, or over MPI_COMM_WORLD for a
     * backend with job_world (gather of struct zr_user_comm). */
    int (*exchange)(struct zr_user_comm *c, const void *mine, void *all, size_t bytes);
    /* Contexts of a process must exchange one after the other, in the same order on all ranks. */
    bool exchanges_in_turn;
    /* Contexts of a process may call open at the same time, in any order: open takes turns itself. */
    bool opens_in_turn;

    /* Finds this rank in MPI_COMM_WORLD, whose ranks can exchange their meeting address over it
     * (zr_world_find_by_mpi). The program's communicator may have only some of its ranks. NULL: the backend
     * has no such world. */
    int (*job_world)(int64_t timeout_ms, int *rank, int *world);
};

#endif
