/* SPDX-License-Identifier: Apache-2.0 */
/* backend.h: what moves bytes between ranks, as whoever opens it sees it, whichever it is.
 *
 * A backend is a row, struct zr_backend, defined as zr_backend_KEY beside its communicators. It becomes one
 * that programs can choose by its row in ZERO_BACKEND_MAP (zero/zero_config.h), of which zero/backend.c makes
 * the table of all. What a context has to know of its backend it asks the row; nothing asks for a name. */
#ifndef ZR_COMM_BACKEND_H
#define ZR_COMM_BACKEND_H

#include "comm/comm.h"

struct zr_world;

/* What the communicator of a role is opened for: all ranks of the world have the same numbers. */
struct zr_role_ask {
    /* whose ranks it joins; NULL: nobody has the role */
    const struct zr_group *group;
    /* of the largest slice that it reduces; less than there are makes reducing take more rounds */
    int64_t largest_bytes;
    /* The most that one call has to pack, one rank's slices, each rounded up to 128: small slices, and those
     * of segments whose last ones are short. Less than there are makes it take more rounds. */
    int64_t packed_bytes;
};

static inline bool zr_role_reduces(enum zr_role r)
{
    return r == ZR_ROLE_REDUCE || r == ZR_ROLE_REDUCE_OUTER;
}

/* What a program may choose of any backend; each takes what concerns it. */
struct zr_backend_config {
    /* how long an operation waits for peers */
    int64_t timeout_ms;
    /* and how long opening may, and attaching arenas; 0: as long */
    int64_t start_timeout_ms;
    /* reduce in the fixed tree, whatever that costs */
    bool deterministic;
    /* Some slices that are too large to be packed differ in size: path says how those are gathered. */
    bool ragged;
    /* nccl: symmetric windows, and gathers by copy engines */
    bool copy_engine;
    /* over the backend's own way inside a host, too, where it would use shared memory there */
    bool flat;
    /* of the world; it outlives the communicators */
    const struct zr_topology *topology;
    /* NULL, or the program's own communicator, of a backend with lent_world */
    void *lent;
    /* Source of the world's size, "SLURM_NTASKS is 4". Ranks of MPI must agree with it. NULL: the
     * configuration or a lent communicator, and these may have some of MPI's ranks only. */
    const char *found_by;
    /* may be NULL; any thread may write to it */
    struct zr_log *log;
};

struct zr_backend {
    /* as in ZERO_BACKEND_MAP, and as its communicators' ops have it */
    const char *name;
    /* the device's that it works on, "host" or "cuda"; NULL: any */
    const char *device;
    /* For a world of one rank, which has nobody to meet: there is no rendezvous then. */
    bool alone;
    /* It has the roles of a model in parts, MODEL and WORLD. */
    bool has_parts;
    /* The fixed tree is not how it would reduce by itself, so it does so only where it is asked to. */
    bool costly_tree;
    /* It packs slices of at most so many bytes, and segments whose last ones are short: zr_role_ask's
     * packed_bytes. */
    int64_t small_bytes;

    /* 0 where all ranks can be on it, of which t says who shares a host; else ZR_ERR_NOTSUP, naming some that
     * cannot. Local, alike on all ranks. NULL: any can. */
    int (*check_hosts)(const struct zr_topology *t, const struct zr_group *all);
    /* Bytes that a role's communicator uses for itself at the end of its arena, a multiple of 256; of
     * ask->group the size alone is known. Local, alike on all ranks. NULL: none. */
    int64_t (*reserve)(enum zr_role role, const struct zr_role_ask *ask, bool deterministic);
    /* Collective over all ranks of rdv (NULL: alone), and blocking: a communicator for each role that
     * somebody has, GATHER and REDUCE at least; comm is all NULL before. Where there is no CONTROL, all that
     * there are are of one group. rdv, dev and the groups' members must outlive them. On failure, which is of
     * all ranks unless it follows from the arguments, comm has what the caller is to close. */
    int (*open)(struct zr_rendezvous *rdv, struct zr_device *dev, const struct zr_backend_config *config,
                const struct zr_role_ask ask[ZR_ROLES], struct zr_comm *comm[ZR_ROLES]);
    /* How bytes really travel, of the communicator that gathers, once it has its arena; valid until it is
     * closed. NULL: there is one way, and it is called as the backend is. */
    const char *(*path)(const struct zr_comm *c);

    /* What allocates on the device besides arenas, and about how many bytes at most for each communicator,
     * some of them with its first collectives. NULL: nothing does. */
    const char *library;
    int64_t library_bytes;

    /* Of a backend whose communicators a program may lend, else NULL: the configuration's field for one
     * ("nccl_comm"), what one says of its ranks, and how these meet (as zr_nccl_lent_world and
     * zr_nccl_lent_meet). One backend for each device. */
    const char *lent_name;
    int (*lent_world)(void *lent, int64_t timeout_ms, int *rank, int *world);
    int (*lent_meet)(struct zr_device *dev, void *lent, int64_t timeout_ms, struct zr_world *w, int *held,
                     bool *left);
    /* Contexts of a process call lent_meet one after the other, in one order on all ranks. */
    bool lent_in_turn;
    /* Contexts of a process may call open at the same time, in any order: it sees to that itself. */
    bool opens_in_turn;

    /* Finds this rank in MPI_COMM_WORLD, where a lent communicator is a part of it, or has another order.
     * NULL: the backend has no such communicator. */
    int (*job_world)(int64_t timeout_ms, int *rank, int *world);

    /* Of a backend whose ranks can tell each other over MPI where they meet, else NULL. Collective, blocking,
     * of a world of several ranks with by_mpi (zr_world_find_by_mpi), which it completes; *held: -1, or, of
     * rank 0, a socket that keeps its port until the rendezvous is open, to be closed then. */
    int (*world_meet)(const struct zr_backend_config *config, struct zr_world *w, int *held);
};

#endif
