/* SPDX-License-Identifier: Apache-2.0 */
/* mpi_comm.h: internals of the communicators over MPI.
 *
 * Each role has an MPI communicator. An operation runs on the stream's thread. The rank first sends a
 * description of it (comm/post.h) to every other rank, receives theirs, and compares them. Only then it moves
 * data, so that ranks with different operations fail before MPI could mix up their messages. While it waits,
 * the thread polls MPI. It also looks for a failure that another rank reported over the rendezvous, and for
 * the deadline, which begins anew with each request that ends.
 *
 * MPI cannot cancel a request. If an operation fails, its pending requests stay pending, and need their
 * memory. Such a communicator and its arena are never freed.
 *
 *    mpi.c         what an operation does when its turn comes; the table of functions
 *    mpi_gather.c  gathers: shared memory inside a host, MPI between
 *    mpi_reduce.c  sums: rows of slices in chunks, added in the fixed tree, by rank or by host
 *    mpi_parts.c   all-to-all and shift
 *    mpi_wait.c    begins requests and waits for them; compares posts; fails
 *    mpi_arena.c   arenas, and the part that each communicator reserves
 *    mpi_open.c    opens and closes communicators
 *    mpi_own.c     MPI's own collectives, for comparison
 *    mpi_exchange.c  the program's communicator, or MPI_COMM_WORLD, and how ranks agree over it on where they
 *                    meet */
#ifndef ZR_COMM_MPI_COMM_H
#define ZR_COMM_MPI_COMM_H

#include "comm/backend.h"
#include "comm/mpi/mpi_process.h"
#include "comm/op_queue.h"
#include "comm/post.h"
#include "comm/spread.h"

#include <pthread.h>

struct zr_rendezvous;
struct zr_world;

/* How to open communicators, for ranks on the host device. */
struct zr_mpi_options {
    /* Time that an operation waits for peers while no request ends, in ms. */
    int64_t timeout_ms;
    /* Time that opening waits for a call into MPI to return, in ms. */
    int64_t start_timeout_ms;
    /* Do not use shared memory inside a host. */
    bool flat;
    /* The program's own MPI_Comm *, which has all ranks of the rendezvous, or NULL. */
    void *user_comm;
    /* See struct zr_backend_config. */
    const char *found_by;
    /* The world's topology. Outlives the communicators. NULL: all ranks share the cores of one host. */
    const struct zr_topology *topology;
    /* NULL: libzero's module. */
    const struct zr_mpi_library *library;
    /* May be NULL. */
    struct zr_log *log;
};

enum {
    /* Alignment of a communicator's reserved part of the arena. */
    ZR_MPI_ALIGN = 256,
    /* Most bytes of a message of a sum. */
    ZR_MPI_CHUNK = 512 << 10,
    /* Most bytes of any other message, and of a rank's part in one MPI collective. It is small enough that
     * each can have the operation's deadline. */
    ZR_MPI_MESSAGE = 64 << 20,
    /* Most pending requests of one operation. The shim has room for all communicators at once; those of pairs
     * have few. */
    ZR_MPI_WINDOW = 128,
    ZR_MPI_TEXT = 1024
};

/* MPI tags. */
enum { ZR_MPI_TAG_POST = 1, ZR_MPI_TAG_DATA, ZR_MPI_TAG_HOST };

/* State that the communicators of a context share. */
struct zr_mpi_set {
    struct zr_mpi_options opt;
    struct zr_mpi_process *process;
    struct zr_rendezvous *rdv;
    struct zr_device *dev;
    const struct zr_host_kernels *kernels;
    int64_t timeout_ns;
    int32_t rank, world;
    /* Time of day at which rank 0 began to open them. */
    int64_t begun_ns;
    /* (world) Each rank's number in the MPI communicator that all are made from. */
    int32_t *mpi_rank;
    /* Waiting threads spin, as there is a core for each. */
    bool spins;
    /* Some host has several ranks, so arenas are memory that the ranks of a host map. */
    bool tiers;
    int n_open;
    /* A request or a call never ends, so the set's memory is never freed. */
    bool is_left;
    struct zr_first failure;
    _Atomic uint32_t alarm;
    char path[ZR_MPI_VERSION_BYTES + 32];
};

struct zr_mpi {
    /* Must be first: callers hold its address. */
    struct zr_comm base;
    struct zr_mpi_set *set;
    /* Name of the role. */
    const char *name;
    /* Number of the MPI communicator in the shim. -1: a group of one rank has none. */
    int32_t comm;
    /* (base.reserve) The communicator's reserved part of the arena. */
    char *own;
    /* Most bytes of a message of a sum. */
    int64_t chunk;
    /* How its ranks are distributed over hosts. size 0: each rank has a host for itself. */
    struct zr_spread spread;
    /* Each host sums the slices of its ranks, and hosts exchange these sums. */
    bool sums_by_host;
    /* (size) Arenas of the group's ranks on this host, mapped for reading. NULL: a rank of another host. */
    char **peer;

    struct zr_op_queue queue;

    /* All below is used by the stream's thread. */
    /* (size) The posts of all places, and the requests that receive and send them. */
    struct zr_post *post;
    struct zr_mpi_batch *from, sent;
    /* Requests that move data. */
    struct zr_mpi_batch data[2];
    /* Words of an agreement while MPI works on them. */
    uint64_t *words;
    int64_t n_words;

    /* Length of the last wait that timed out, for messages. */
    int64_t waited_ms;
    pthread_mutex_t lock;
    struct zr_post last, before;
    bool is_in_last;
};

static inline struct zr_mpi *zr_mpi_of(struct zr_comm *c)
{
    return (struct zr_mpi *)c;
}

/* mpi_wait.c */
/* Keeps the first failure of the context's communicators, and reports it to the other ranks. Returns the kept
 * code. Any thread. */
int zr_mpi_fail(struct zr_mpi_set *p, int code, const char *text);
/* Fails in an operation. The programs may have made different calls, which are then the cause. So the calls
 * are compared first, if rank 0 can do it. */
int zr_mpi_fail_op(struct zr_mpi *m, int code, const char *what);
/* Begin a request. They wait while there are too many. They return 0 or the failure. */
int zr_mpi_send(struct zr_mpi *m, const void *at, int64_t bytes, int to, int tag, struct zr_mpi_batch *b);
int zr_mpi_receive(struct zr_mpi *m, void *at, int64_t bytes, int from, int tag, struct zr_mpi_batch *b);
int zr_mpi_all_gather(struct zr_mpi *m, const void *own, void *to, int64_t bytes, int64_t stride);
int zr_mpi_broadcast(struct zr_mpi *m, void *at, int64_t bytes, int root);
/* MPI's own reduce-scatter. */
int zr_mpi_reduce_block(struct zr_mpi *m, const float *in, float *out, int64_t n);
/* Adds up the first n_sum words, and takes the largest of each of the others. */
int zr_mpi_all_reduce(struct zr_mpi *m, uint64_t *at, int32_t n_sum, int32_t n_max);
/* Waits until at most n_left requests of the batch are pending. Returns 0 or the failure. */
int zr_mpi_await(struct zr_mpi *m, struct zr_mpi_batch *b, int32_t n_left);
/* Exchanges posts with all ranks of the group, and compares them. Returns 0 or the failure. */
int zr_mpi_meet(struct zr_mpi *m, const struct zr_post *mine);
/* Waits, inside an operation, for the group's other ranks on this host. What they wrote to their arenas
 * before is visible then. Returns 0 or the failure. */
int zr_mpi_meet_host(struct zr_mpi *m);
/* Whether no operation and no request of the communicator is pending. */
bool zr_mpi_rests(const struct zr_mpi *m);

/* Lets MPI advance requests. Called between two pieces of work that need no MPI. Returns 0 or the failure. */
int zr_mpi_look_between(struct zr_mpi *m);

/* mpi_gather.c, mpi_reduce.c: the segments of one operation. */
int zr_mpi_gather(struct zr_mpi *m, const struct zr_gather_seg *seg, uint32_t n_seg);
int zr_mpi_reduce(struct zr_mpi *m, const struct zr_reduce_seg *seg, uint32_t n_seg);

/* mpi_gather.c. Begins to send n_out bytes to one place, and to receive n_in from another. Waits only if too
 * many requests are pending. */
int zr_mpi_swap(struct zr_mpi *m, const char *out, int64_t n_out, int to, char *in, int64_t n_in, int from);
/* Copies from an arena of this host, and lets MPI advance requests meanwhile. */
int zr_mpi_pull(struct zr_mpi *m, char *to, const char *from, int64_t bytes);

/* mpi_parts.c: an all-to-all or a shift. */
int zr_mpi_pass(struct zr_mpi *m, const struct zr_comm_op *op);

/* mpi.c: moves the data of an operation (op_queue.h). */
int zr_mpi_move(struct zr_comm *c, const struct zr_comm_op *op);

/* mpi_arena.c. Both are collective over the world. */
int zr_mpi_arena(struct zr_comm *c, int64_t bytes, struct zr_arena **out);
int zr_mpi_attach(struct zr_comm *c, struct zr_arena *a);
/* Unmaps the arenas of other ranks. */
void zr_mpi_unmap(struct zr_mpi *m);

/* mpi.c */
extern const struct zr_comm_ops zr_mpi_ops;
/* mpi_open.c */
/* Opens a communicator for each role that any rank has. The caller closes each. Initializes MPI if the
 * program has not. Contexts of a process that open at the same time take turns. rdv, dev and the groups'
 * members must outlive the communicators.
 *
 * Collective over all ranks of rdv, each with its own groups; blocks. */
int zr_mpi_open(struct zr_rendezvous *rdv, struct zr_device *dev, const struct zr_mpi_options *opt,
                const struct zr_role_ask ask[ZR_ROLES], struct zr_comm *comm[ZR_ROLES]);

/* Bytes that a role's communicator reserves at the end of its arena, a multiple of 256. */
int64_t zr_mpi_role_bytes(enum zr_role role, const struct zr_role_ask *ask, bool deterministic);
void zr_mpi_close(struct zr_comm *c);
/* Makes the MPI communicator of the group. Collective over the group. */
int zr_mpi_make(struct zr_mpi *m);

/* Returns ZERO_ERR_FAILED with MPI's message for a class of error. */
int zr_mpi_say(const struct zr_mpi_process *p, int class, const char *call);

/* Reads this rank and the size of the program's communicator, or of MPI_COMM_WORLD (NULL). The result is -1
 * and 0 for MPI_COMM_NULL. */
int zr_mpi_rank_of(struct zr_mpi_process *p, void *user_comm, int64_t ms, int *rank, int *size);
/* Returns ZERO_ERR_NOTSUP if nothing shows that an MPI launcher has started this rank. */
int zr_mpi_check_launched(const struct zr_mpi_library *lib);
/* Returns ZERO_ERR_ARG if this rank (rank of world, by found_by) has another number in MPI_COMM_WORLD. */
int zr_mpi_check_rank(int rank, int world, const char *found_by, int mpi_rank, int mpi_world);

/* mpi_exchange.c: gathers the card of each rank over c->comm (NULL: MPI_COMM_WORLD), which has the same ranks
 * as c->w, on rank 0, and sends that of rank 0 to all (gather of struct zr_user_comm). Contexts with the same
 * c->w->name exchange. Drops p, which was opened with c->log.
 *
 * Collective over that communicator. */
int zr_mpi_exchange_over(struct zr_mpi_process *p, const struct zr_user_comm *c, const void *mine, void *all,
                         size_t bytes);

/* mpi_exchange.c: functions of the backend's row. */
int zr_mpi_user_comm_world(void *user_comm, int64_t timeout_ms, int *rank, int *world);
int zr_mpi_job_world(int64_t timeout_ms, int *rank, int *world);
int zr_mpi_exchange(struct zr_user_comm *c, const void *mine, void *all, size_t bytes);

#endif
