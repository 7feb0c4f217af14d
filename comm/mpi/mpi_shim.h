/* SPDX-License-Identifier: Apache-2.0 */
/* mpi_shim.h: the MPI functions that libzero calls, in plain C types. libzero itself works without an MPI. If
 * MPI is needed, libzero loads the module libzero-mpi.so (mpi_shim.c), which is compiled against mpi.h and
 * linked with that MPI.
 *
 * The module exports one symbol, zero_mpi_shim_1, the table below.
 *
 * In one process, one thread at a time may call these functions. library, address, is_initialized,
 * is_finalized and thread_level are exceptions: any thread may call them at any time. A handle of a
 * communicator or a request is an index in the shim. Calls return 0 or MPI's error class; error() gives its
 * message. */
#ifndef ZR_COMM_MPI_SHIM_H
#define ZR_COMM_MPI_SHIM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* SLOTS: most pending requests. COMMS: most communicators. PIECE_BYTES: most bytes of one message, and of one
 * rank's part in a collective other than all_gather. MPI counts elements in an int. */
enum { ZR_MPI_SHIM_VERSION = 2, ZR_MPI_SLOTS = 1024, ZR_MPI_COMMS = 256, ZR_MPI_PIECE_BYTES = 1 << 30 };

/* Tags are 0..ZR_MPI_TAG_MAX, the smallest range that MPI guarantees. */
enum { ZR_MPI_TAG_MAX = 32767 };

/* Threads that may call MPI: only the one that began it, one at a time, or any. */
enum zr_mpi_level { ZR_MPI_FUNNELED_OR_LESS, ZR_MPI_SERIALIZED, ZR_MPI_MULTIPLE };

/* MPI's own collectives, which block. */
enum zr_mpi_own_call { ZR_MPI_ALLGATHER, ZR_MPI_REDUCE_SCATTER, ZR_MPI_REDUCE_SCATTER_BLOCK };

/* MPI of one process. */
struct zr_mpi_world;

/* A request that ended, with 0 or the class of its error. */
struct zr_mpi_done {
    int32_t slot, error;
};

struct zr_mpi_shim {
    /* ZR_MPI_SHIM_VERSION and the size of this struct when the module was compiled. */
    uint32_t version, bytes;
    /* "Open MPI" or "MPICH", and the version of mpi.h. */
    const char *name, *compiled;
    /* Returns this process's MPI, the same for each caller. Never fails. */
    struct zr_mpi_world *(*world)(void);
    /* Writes the first line of MPI_Get_library_version. Allowed before init, too. */
    void (*library)(struct zr_mpi_world *w, char *text, size_t n);
    /* Address of MPI_Get_library_version in the MPI that the module is linked with. */
    const void *(*address)(void);
    bool (*is_initialized)(struct zr_mpi_world *w);
    bool (*is_finalized)(struct zr_mpi_world *w);
    /* Allowed while MPI is initialized. */
    enum zr_mpi_level (*thread_level)(struct zr_mpi_world *w);
    /* Begins MPI. From then on errors of MPI_COMM_WORLD are returned. *level may be less than wanted. */
    int (*init)(struct zr_mpi_world *w, enum zr_mpi_level want, enum zr_mpi_level *level);
    int (*finalize)(struct zr_mpi_world *w);
    /* Has fn(arg) called when any thread calls MPI_Finalize, before that does anything. fn NULL: not any
     * more. */
    int (*on_finalize)(struct zr_mpi_world *w, void (*fn)(void *arg), void *arg);
    void (*error)(struct zr_mpi_world *w, int code, char *text, size_t n);

    /* user_comm is the program's MPI_Comm *, or NULL for MPI_COMM_WORLD. MPI_COMM_NULL gives rank -1 and size
     * 0. */
    int (*rank_of)(struct zr_mpi_world *w, void *user_comm, int *rank, int *size);
    /* Makes a communicator of the ranks member[n] of user_comm, in that order. All of them call, with one
     * tag. Blocks. Its errors are returned, whatever user_comm's handler is. MPI_ERR_OTHER if there are
     * ZR_MPI_COMMS already. */
    int (*make)(struct zr_mpi_world *w, void *user_comm, const int32_t *member, int n, int tag,
                int32_t *comm);
    /* The same from a communicator that was made here. */
    int (*make_from)(struct zr_mpi_world *w, int32_t parent, const int32_t *member, int n, int tag,
                     int32_t *comm);
    /* Makes another communicator of the same ranks, which all call. Blocks. */
    int (*copy)(struct zr_mpi_world *w, int32_t comm, int32_t *out);
    /* A handle of user_comm, or MPI_COMM_WORLD (NULL), for send, receive and probe only. The program may
     * receive what is sent there. One communicator has one handle. Free it as often as it was borrowed; the
     * communicator stays. */
    int (*borrow)(struct zr_mpi_world *w, void *user_comm, int32_t *comm);
    /* Frees a communicator. All its ranks call, and no request of it is pending. May block, unless it is
     * borrowed. */
    int (*free)(struct zr_mpi_world *w, int32_t comm);

    /* These functions begin a request. Its memory belongs to MPI until poll has reported its end. *slot is
     * -1, with 0 returned, if too many requests are pending; then nothing was begun. Collectives of one
     * communicator must begin in the same order on all its ranks. */
    int (*send)(struct zr_mpi_world *w, int32_t comm, const void *at, int64_t bytes, int to, int tag,
                int32_t *slot);
    /* bytes must be the number of bytes that are sent. */
    int (*receive)(struct zr_mpi_world *w, int32_t comm, void *at, int64_t bytes, int from, int tag,
                   int32_t *slot);
    /* *from is a rank whose message with that tag, of *bytes, has arrived, so that receive ends at once. -1:
     * none. */
    int (*probe)(struct zr_mpi_world *w, int32_t comm, int tag, int *from, int64_t *bytes);
    /* Gathers bytes of each rank from own, or in place if that is NULL. Those of rank p go to to + p *
     * stride. bytes and stride must be multiples of 64, or below 1 GiB. */
    int (*all_gather)(struct zr_mpi_world *w, int32_t comm, const void *own, void *to, int64_t bytes,
                      int64_t stride, int32_t *slot);
    int (*broadcast)(struct zr_mpi_world *w, int32_t comm, void *at, int64_t bytes, int root, int32_t *slot);
    /* In place, element by element: the largest, or the sum modulo 2^64. There is no maximum of unsigned
     * numbers: MPICH 4.0, and some calls of Open MPI 4.1, compare them as signed ones. */
    int (*all_max)(struct zr_mpi_world *w, int32_t comm, int64_t *at, int n, int32_t *slot);
    int (*all_sum)(struct zr_mpi_world *w, int32_t comm, uint64_t *at, int n, int32_t *slot);
    /* MPI's own sum, in its order. in is (size, n), and rank p gets the sum of row p. For comparison only. */
    int (*reduce_block)(struct zr_mpi_world *w, int32_t comm, const float *in, float *out, int64_t n,
                        int32_t *slot);
    /* A call that blocks until this rank's part of it is done. No request may be pending. For comparison
     * only. The sums are as in reduce_block. The all-gather ignores in, and fills out (size, n) with n floats
     * of each rank; this rank's are there already. size * n is at most INT_MAX. */
    int (*own)(struct zr_mpi_world *w, int32_t comm, enum zr_mpi_own_call call, const float *in, float *out,
               int64_t n);
    /* Lets MPI work, and reports which requests have ended; their slots are free again. Returns how many, or
     * minus the class of an error that belongs to none of them. Does not block if MPI does not. */
    int (*poll)(struct zr_mpi_world *w, struct zr_mpi_done done[ZR_MPI_SLOTS]);
};

#define ZR_MPI_SHIM_SYMBOL "zero_mpi_shim_1"

#endif
