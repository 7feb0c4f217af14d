/* SPDX-License-Identifier: Apache-2.0 */
/* mpi_shim.h: MPI as libzero calls it, in plain types of C. libzero itself works without an MPI. When it is
 * asked for one it loads the module libzero-mpi.so (mpi_shim.c), which is compiled against mpi.h and linked
 * with that MPI.
 *
 * The module shows one symbol, zero_mpi_shim_1, the table below.
 *
 * Of one process's MPI, one thread calls at a time; library, address, is_initialized, is_finalized and
 * thread_level any thread at any time. A handle of a communicator or a request is an index in the shim. Calls
 * return 0 or MPI's error class, whose words error() has. */
#ifndef ZR_COMM_MPI_SHIM_H
#define ZR_COMM_MPI_SHIM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* SLOTS: requests that can be under way at once. COMMS: communicators. PIECE_BYTES: of one message, and of
 * what one rank has in one collective, but for all_gather; MPI counts elements in an int. */
enum { ZR_MPI_SHIM_VERSION = 1, ZR_MPI_SLOTS = 1024, ZR_MPI_COMMS = 256, ZR_MPI_PIECE_BYTES = 1 << 30 };

/* Tags are 0..ZR_MPI_TAG_MAX: the least that MPI promises. */
enum { ZR_MPI_TAG_MAX = 32767 };

/* What MPI allows of threads: one only (that began it), one at a time, any. */
enum zr_mpi_level { ZR_MPI_FUNNELED_OR_LESS, ZR_MPI_SERIALIZED, ZR_MPI_MULTIPLE };

/* Collectives of MPI's own, which block. */
enum zr_mpi_own_call { ZR_MPI_ALLGATHER, ZR_MPI_REDUCE_SCATTER, ZR_MPI_REDUCE_SCATTER_BLOCK };

/* MPI of one process. */
struct zr_mpi_world;

/* A request that ended: with 0, or the class of its error. */
struct zr_mpi_done {
    int32_t slot, error;
};

struct zr_mpi_shim {
    /* ZR_MPI_SHIM_VERSION, and the size of this struct, of when it was compiled */
    uint32_t version, bytes;
    /* "Open MPI" or "MPICH", and the version of mpi.h */
    const char *name, *compiled;
    /* Never fails. The same for each caller of a process. */
    struct zr_mpi_world *(*world)(void);
    /* The first line of MPI_Get_library_version; before init too. */
    void (*library)(struct zr_mpi_world *w, char *text, size_t n);
    /* Of MPI_Get_library_version, as this library is linked. */
    const void *(*address)(void);
    bool (*is_initialized)(struct zr_mpi_world *w);
    bool (*is_finalized)(struct zr_mpi_world *w);
    /* While it is initialized. */
    enum zr_mpi_level (*thread_level)(struct zr_mpi_world *w);
    /* From then on errors of MPI_COMM_WORLD are returned. *level: what there is, maybe less than wanted. */
    int (*init)(struct zr_mpi_world *w, enum zr_mpi_level want, enum zr_mpi_level *level);
    int (*finalize)(struct zr_mpi_world *w);
    /* fn(arg) where any thread calls MPI_Finalize, before that does anything. fn NULL: no more. */
    int (*on_finalize)(struct zr_mpi_world *w, void (*fn)(void *arg), void *arg);
    void (*error)(struct zr_mpi_world *w, int code, char *text, size_t n);

    /* lent: the program's MPI_Comm *, NULL: MPI_COMM_WORLD. MPI_COMM_NULL: rank -1 and size 0. */
    int (*rank_of)(struct zr_mpi_world *w, void *lent, int *rank, int *size);
    /* A communicator of the ranks member[n] of lent, in that order, all of which call, with one tag. Blocks.
     * Its errors are returned, whatever lent's are. There can be ZR_MPI_COMMS, then it is MPI_ERR_OTHER. */
    int (*make)(struct zr_mpi_world *w, void *lent, const int32_t *member, int n, int tag, int32_t *comm);
    /* The same of one that was made here. */
    int (*make_from)(struct zr_mpi_world *w, int32_t parent, const int32_t *member, int n, int tag,
                     int32_t *comm);
    /* One of the same ranks, all of which call. Blocks. */
    int (*copy)(struct zr_mpi_world *w, int32_t comm, int32_t *out);
    /* lent, or MPI_COMM_WORLD (NULL), itself: for send, receive and probe only. The program may receive what
     * is sent there. One communicator has one handle, which is given back with free as often as it was
     * taken; the communicator stays. */
    int (*borrow)(struct zr_mpi_world *w, void *lent, int32_t *comm);
    /* No request of it is pending; all its ranks call. May block, unless it is borrowed. */
    int (*free)(struct zr_mpi_world *w, int32_t comm);

    /* Each begins a request, and its memory is MPI's until poll has told that it ended. *slot -1, with 0: too
     * many are under way, nothing was begun. Collectives of one communicator begin in one order on all its
     * ranks. */
    int (*send)(struct zr_mpi_world *w, int32_t comm, const void *at, int64_t bytes, int to, int tag,
                int32_t *slot);
    /* As many bytes as are sent. */
    int (*receive)(struct zr_mpi_world *w, int32_t comm, void *at, int64_t bytes, int from, int tag,
                   int32_t *slot);
    /* *from: a rank whose message with that tag has arrived, so that receive ends at once; -1: there is
     * none. */
    int (*probe)(struct zr_mpi_world *w, int32_t comm, int tag, int *from);
    /* bytes of each rank (own; NULL: they are in place already), of rank p to to + p * stride. bytes and
     * stride: multiples of 64, or below 1 GiB. */
    int (*all_gather)(struct zr_mpi_world *w, int32_t comm, const void *own, void *to, int64_t bytes,
                      int64_t stride, int32_t *slot);
    int (*broadcast)(struct zr_mpi_world *w, int32_t comm, void *at, int64_t bytes, int root, int32_t *slot);
    /* In place, element by element, the largest, or the sum modulo 2^64. The largest of unsigned numbers is
     * not to be had: MPICH 4.0, and some calls of Open MPI 4.1, compare them as signed ones. */
    int (*all_max)(struct zr_mpi_world *w, int32_t comm, int64_t *at, int n, int32_t *slot);
    int (*all_sum)(struct zr_mpi_world *w, int32_t comm, uint64_t *at, int n, int32_t *slot);
    /* MPI's own sum, in its order: in is (size, n), of which rank p gets the sum of row p. To be compared
     * with, no more. */
    int (*reduce_block)(struct zr_mpi_world *w, int32_t comm, const float *in, float *out, int64_t n,
                        int32_t *slot);
    /* A call that blocks until this rank's part of it is done, while no request is under way. Also to be
     * compared with, no more. The same sum; or of each rank n floats, out being (size, n), in which its own
     * are already, and in not looked at. size * n: to INT_MAX. */
    int (*own)(struct zr_mpi_world *w, int32_t comm, enum zr_mpi_own_call which, const float *in, float *out,
               int64_t n);
    /* Lets MPI work, and says which requests have ended, whose slots are free again. Returns how many, or
     * minus the class of an error that is of none of them. Never blocks, if MPI does not. */
    int (*poll)(struct zr_mpi_world *w, struct zr_mpi_done done[ZR_MPI_SLOTS]);
};

#define ZR_MPI_SHIM_SYMBOL "zero_mpi_shim_1"

#endif
