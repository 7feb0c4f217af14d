/* SPDX-License-Identifier: Apache-2.0 */
/* mpi_process.h: this process's MPI, which all its users share.
 *
 * MPI begins once per process and cannot begin again, so it stays when a context is closed. If libzero began
 * it, it ends with the process; if the program began it, the program ends it. One thread is inside MPI at a
 * time. So MPI_THREAD_SERIALIZED is enough unless the program uses MPI, too. Requests advance when a thread
 * polls. A thread that waits for a request polls. A separate thread polls now and then for all others, since
 * MPI may have accepted bytes without having sent them yet. */
#ifndef ZR_COMM_MPI_PROCESS_H
#define ZR_COMM_MPI_PROCESS_H

#include "comm/mpi/mpi_library.h"

#include <stdatomic.h>

struct zr_mpi_process;
struct zr_rendezvous;

/* Requests that are waited for together. It must not move until all have ended. */
struct zr_mpi_batch {
    /* Requests that have not ended. */
    _Atomic int32_t n_left;
    /* Class of the first error. 0: none. */
    _Atomic int32_t error;
};

/* Begins MPI, if it has not begun. Blocks until all processes of the job have begun it, for at most ms. A
 * lost or failed rank of look also ends the wait. look may be NULL, and must not be detached yet. If the wait
 * ends without MPI, this process never uses MPI again. Drop the result with zr_mpi_process_drop.
 *
 * Errors: ORDER     MPI has been finalized
 *         NOTSUP    threads may not do what is needed, or this process was forked after MPI was opened */
int zr_mpi_process_open(const struct zr_mpi_library *lib, int64_t ms, struct zr_rendezvous *look,
                        struct zr_log *log, struct zr_mpi_process **out);
/* Drops one use of p. log is the log that p was opened with. Until p is dropped, a call of MPI_Finalize by
 * the program is reported there. in_order: this user has nothing pending, and no peer was lost. If in_order
 * is false, MPI_Finalize could wait for ever, and the process ends without it. p NULL is allowed. */
void zr_mpi_process_drop(struct zr_mpi_process *p, struct zr_log *log, bool in_order);
/* Drops one use, in order, and keeps the polling thread. Use it if MPI will soon be opened again, and other
 * ranks may until then wait for messages that MPI has not sent yet. The thread polls until the next use is
 * dropped, or the process ends. */
void zr_mpi_process_leave_looking(struct zr_mpi_process *p, struct zr_log *log);

/* Begin and end a section in which the shim may be called. Any thread. zr_mpi_enter returns 0 or an error,
 * after which nothing may be called. ZERO_ERR_ORDER: MPI_Finalize was called, or the process ends.
 * ZERO_ERR_TIMEOUT: a call of another thread has not returned after ms. */
int zr_mpi_enter(struct zr_mpi_process *p, int64_t ms);
void zr_mpi_leave(struct zr_mpi_process *p);
const struct zr_mpi_shim *zr_mpi_shim_of(const struct zr_mpi_process *p);
struct zr_mpi_world *zr_mpi_world_of(const struct zr_mpi_process *p);

/* Takes the turn to make communicators. Returns false if another context has the turn.
 *
 * The contexts of a process make communicators one after the other, since that waits for other ranks inside
 * MPI. Two processes may give their turns to two contexts, and each context needs both. So a context begins
 * only when all its ranks have a turn. Otherwise they give theirs back and try again. begun_ns is the time at
 * which the context began, equal on all its ranks. A context waits a moment for one that began later, and not
 * at all for one that began earlier, so the earliest gets all turns. */
bool zr_mpi_turn_take(struct zr_mpi_process *p, int64_t begun_ns);
void zr_mpi_turn_end(struct zr_mpi_process *p);

/* Records that a thread was left behind inside MPI while it makes a communicator. The errors of zr_mpi_enter
 * mention it from now on. */
void zr_mpi_process_half_made(struct zr_mpi_process *p);

/* Adds the request in slot to a batch. Called inside MPI, after the request was begun. */
void zr_mpi_begun(struct zr_mpi_process *p, int32_t slot, struct zr_mpi_batch *b);
/* Lets MPI work, unless another thread is inside, which does so itself. Returns true if some request has
 * ended. */
bool zr_mpi_poll(struct zr_mpi_process *p);
/* Returns 0, or the reason why no request will end any more, with this thread's message. */
int zr_mpi_ended(struct zr_mpi_process *p);

#endif
