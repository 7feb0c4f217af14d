/* SPDX-License-Identifier: Apache-2.0 */
/* mpi_comm.h: the inside of MPI's communicators.
 *
 * A role's communicator has an MPI communicator of its own. An operation runs on the stream's thread: the
 * rank sends every other what it is about to do (comm/post.h) and gets theirs, compares them, and only then
 * moves data. So ranks that do different things fail before MPI could mix up what they send. While it waits,
 * the thread polls, and looks for what keeps the others from coming: a failure that another rank told over
 * the rendezvous, and the deadline, which begins anew with each request that ends.
 *
 * MPI cannot take a request back: what is under way when an operation fails stays so, with the memory that
 * belongs to it. So a communicator with such requests is left behind, and its arena with it.
 *
 *   mpi.c         what an operation does when its turn comes; the table of functions
 *   mpi_gather.c  gathers: shared memory inside a host, MPI between
 *   mpi_reduce.c  sums: rows of slices in chunks, added in the fixed tree, by rank or by host
 *   mpi_wait.c    requests begun and waited for; posts compared; failing
 *   mpi_arena.c   arenas, and what communicators have of them for themselves
 *   mpi_open.c    ranks meet, and communicators are made and closed
 *   mpi_own.c     MPI's own collectives, to compare with
 *   mpi_lent.c    what a communicator that the program lends, or MPI_COMM_WORLD, is asked for
 *   mpi_meeting_point.c  where ranks meet, told over MPI */
#ifndef ZR_COMM_MPI_COMM_H
#define ZR_COMM_MPI_COMM_H

#include "comm/mpi/mpi_options.h"
#include "comm/mpi/mpi_process.h"
#include "comm/op_queue.h"
#include "comm/post.h"
#include "comm/spread.h"

#include <pthread.h>

struct zr_world;

enum {
    /* of what a communicator has of an arena's end */
    ZR_MPI_ALIGN = 256,
    /* of what is summed, in one message; of a message of any other kind, and of what a rank has in one
     * collective: small enough that a deadline for each is one for the whole */
    ZR_MPI_CHUNK = 512 << 10,
    ZR_MPI_MESSAGE = 64 << 20,
    /* requests of one operation under way: communicators that work at the same time have room in the shim */
    ZR_MPI_WINDOW = 128,
    ZR_MPI_TEXT = 1024
};

/* Of messages, in each communicator. */
enum { ZR_MPI_TAG_POST = 1, ZR_MPI_TAG_DATA, ZR_MPI_TAG_HOST };

/* What the communicators of a context share. */
struct zr_mpi_set {
    struct zr_mpi_options opt;
    struct zr_mpi_process *process;
    struct zr_rendezvous *rdv;
    struct zr_device *dev;
    const struct zr_host_kernels *kernels;
    int64_t timeout_ns;
    int32_t rank, world;
    /* when rank 0 began to open them, by the clock of the day */
    int64_t begun_ns;
    /* (world) of each rank, in the MPI communicator that all are made from */
    int32_t *mpi_rank;
    /* there is a core for every thread that waits */
    bool spins;
    /* Some host has several ranks: arenas are memory that a host's ranks map. */
    bool tiers;
    int n_open;
    /* something of it is pending for ever */
    bool is_left;
    struct zr_first failure;
    _Atomic uint32_t alarm;
    char path[ZR_MPI_VERSION_BYTES + 32];
};

struct zr_mpi {
    /* first: callers hold its address */
    struct zr_comm base;
    struct zr_mpi_set *set;
    /* of its role */
    const char *name;
    /* the shim's; -1: of one rank */
    int32_t comm;
    /* (base.reserve) what is this one's own, at the end of the arena */
    char *own;
    /* of what is summed in one message, at most */
    int64_t chunk;
    /* How its ranks lie on hosts, where some host has several; size 0: each is by itself. */
    struct zr_spread spread;
    /* Sums are made host by host. */
    bool sums_by_host;
    /* (size) of the members on this host, mapped for reading, and my own; NULL: of another host's */
    char **peer;

    struct zr_op_queue queue;

    /* stream's thread */
    /* (size) what every place is about to do; mine at my own; and requests: from each place, and all to them
     */
    struct zr_post *post;
    struct zr_mpi_batch *from, sent;
    /* of data */
    struct zr_mpi_batch data[2];
    /* an agreement's words while MPI has them */
    uint64_t *words;
    int64_t n_words;

    /* for messages: how long the wait took that came to nothing */
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
/* Keeps the first failure of the context's communicators, and tells the other ranks. Returns the kept code.
 * Any thread. */
int zr_mpi_fail(struct zr_mpi_set *p, int code, const char *text);
/* The same of an operation, where calls of the programs that differ may explain it: they are compared first,
 * if there is somebody to do it. */
int zr_mpi_fail_op(struct zr_mpi *m, int code, const char *what);
/* A request; waits while there is no room. 0 or the failure. */
int zr_mpi_send(struct zr_mpi *m, const void *at, int64_t bytes, int to, int tag, struct zr_mpi_batch *b);
int zr_mpi_receive(struct zr_mpi *m, void *at, int64_t bytes, int from, int tag, struct zr_mpi_batch *b);
int zr_mpi_all_gather(struct zr_mpi *m, const void *own, void *to, int64_t bytes, int64_t stride);
int zr_mpi_broadcast(struct zr_mpi *m, void *at, int64_t bytes, int root);
/* MPI's own sum, as the shim has it. */
int zr_mpi_reduce_block(struct zr_mpi *m, const float *in, float *out, int64_t n);
/* Sums of the first n_sum words, the largest of the others. */
int zr_mpi_all_reduce(struct zr_mpi *m, uint64_t *at, int32_t n_sum, int32_t n_max);
/* Until at most so many of the batch are under way. 0 or the failure. */
int zr_mpi_await(struct zr_mpi *m, struct zr_mpi_batch *b, int32_t n_left);
/* Tells the others what this rank is about to do, and compares what they are. 0 or the failure. */
int zr_mpi_meet(struct zr_mpi *m, const struct zr_post *mine);
/* Until the members of this host are all here, in the operation that they have met for. What they wrote to
 * their arenas before is there then. 0 or the failure. */
int zr_mpi_meet_host(struct zr_mpi *m);
/* Nothing of the communicator is under way. */
bool zr_mpi_rests(const struct zr_mpi *m);

/* Between two pieces of work that needs no MPI: requests go on all the same, and a failure ends the
 * operation. */
int zr_mpi_look_between(struct zr_mpi *m);

/* mpi_gather.c, mpi_reduce.c: the segments of one operation. */
int zr_mpi_gather(struct zr_mpi *m, const struct zr_gather_seg *seg, uint32_t n_seg);
int zr_mpi_reduce(struct zr_mpi *m, const struct zr_reduce_seg *seg, uint32_t n_seg);

/* mpi.c: moves the data of an operation (op_queue.h). */
int zr_mpi_move(struct zr_comm *c, const struct zr_comm_op *op);

/* mpi_arena.c. Both collective over the world. */
int zr_mpi_arena(struct zr_comm *c, int64_t bytes, struct zr_arena **out);
int zr_mpi_attach(struct zr_comm *c, struct zr_arena *a);
/* The arenas of this host's other members. */
void zr_mpi_unmap(struct zr_mpi *m);

/* mpi.c */
extern const struct zr_comm_ops zr_mpi_ops;
/* mpi_open.c */
void zr_mpi_close(struct zr_comm *c);
/* Makes a communicator of MPI's for the group, whose ranks are all here and call too. */
int zr_mpi_make(struct zr_mpi *m);

/* ZR_ERR_FAILED with MPI's words for a class of error. */
int zr_mpi_say(const struct zr_mpi_process *p, int class, const char *call);

/* Of a communicator that is lent, or MPI_COMM_WORLD (NULL). -1 and 0: it is MPI_COMM_NULL. */
int zr_mpi_rank_of(struct zr_mpi_process *p, void *lent, int64_t ms, int *rank, int *size);
/* ZR_ERR_NOTSUP: nothing says that an MPI's launcher has started this rank. */
int zr_mpi_check_launched(const struct zr_mpi_library *lib);
/* ZR_ERR_ARG: this rank (rank of world, by found_by) is another one in MPI_COMM_WORLD. */
int zr_mpi_check_rank(int rank, int world, const char *found_by, int mpi_rank, int mpi_world);

/* mpi_meeting_point.c */
/* Collective over lent, or MPI_COMM_WORLD (NULL), whose ranks are w's, among contexts of one w->name:
 * completes w as zr_lent_choose does. Drops p, which was opened with log. name: of the communicator, for
 * messages; *held: -1, and then as of zr_lent_fill. */
int zr_mpi_find_meeting_point(struct zr_mpi_process *p, void *lent, const char *name, int64_t timeout_ms,
                              struct zr_log *log, struct zr_world *w, int *held);
/* Of the backend's row. */
int zr_mpi_world_meet(const struct zr_backend_config *config, struct zr_world *w, int *held);

/* mpi_lent.c: of the backend's row. */
int zr_mpi_lent_world(void *lent, int64_t timeout_ms, int *rank, int *world);
int zr_mpi_job_world(int64_t timeout_ms, int *rank, int *world);
int zr_mpi_lent_meet(struct zr_device *dev, void *lent, int64_t timeout_ms, struct zr_world *w, int *held,
                     bool *left);

#endif
