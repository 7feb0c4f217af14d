/* SPDX-License-Identifier: Apache-2.0 */
/* mpi_process.h: MPI of this process, as all that use it share it.
 *
 * MPI begins once per process and cannot begin again, so it stays when a context is closed: where it was
 * begun here it ends with the process, and where the program began it, that ends it. One thread is inside MPI
 * at a time, so that MPI_THREAD_SERIALIZED is enough where nobody else uses it. Requests move when somebody
 * polls: who waits for one does, and a thread of this process's looks now and then for all others, since MPI
 * may have taken bytes over without having sent them yet. */
#ifndef ZR_COMM_MPI_PROCESS_H
#define ZR_COMM_MPI_PROCESS_H

#include "comm/mpi/mpi_library.h"

#include <stdatomic.h>

struct zr_mpi_process;
struct zr_rendezvous;

/* Requests that are waited for together. It stays where it is until all have ended. */
struct zr_mpi_batch {
    /* that have not ended */
    _Atomic int32_t n_left;
    /* class of the first error, 0: none */
    _Atomic int32_t error;
};

/* Begins MPI, if nobody has; blocks until all processes of the job do, at most ms, or until a rank of look
 * (before the detach; may be NULL) is lost or fails: then it is never used any more. To be dropped.
 * ZR_ERR_ORDER: it has been finalized. ZR_ERR_NOTSUP: threads are not allowed what is needed, or this process
 * was forked from one that had opened MPI here. */
int zr_mpi_process_open(const struct zr_mpi_library *lib, int64_t ms, struct zr_rendezvous *look,
                        struct zr_log *log, struct zr_mpi_process **out);
/* log: that with which it was opened, which is told until then if the program calls MPI_Finalize. in_order:
 * nothing of who drops it is pending, and no peer was lost. Else MPI_Finalize could wait for ever, and the
 * process ends without it. p NULL is allowed. */
void zr_mpi_process_drop(struct zr_mpi_process *p, struct zr_log *log, bool in_order);
/* The same, in order, where it will soon be opened again, and others may wait until then for what MPI has not
 * sent yet: its thread looks on until that is dropped, or the process ends. */
void zr_mpi_process_leave_looking(struct zr_mpi_process *p, struct zr_log *log);

/* The shim's calls are made between these two. Any thread. 0; else nothing may be called: MPI_Finalize was,
 * or the process ends (ZR_ERR_ORDER), or a call does not come back (ZR_ERR_TIMEOUT, after ms). */
int zr_mpi_enter(struct zr_mpi_process *p, int64_t ms);
void zr_mpi_leave(struct zr_mpi_process *p);
const struct zr_mpi_shim *zr_mpi_shim_of(const struct zr_mpi_process *p);
struct zr_mpi_world *zr_mpi_world_of(const struct zr_mpi_process *p);

/* The contexts of a process make communicators one after the other, since that waits for other ranks inside
 * MPI. Two processes may give their turns to two contexts, each of which needs both. So a context begins only
 * when all its ranks have a turn; else they give theirs back and try again. begun_ns: when the context began,
 * equal on all its ranks. A context waits a moment for one that began later, and not at all for one that
 * began earlier, so the earliest gets all turns. false: another context has the turn. */
bool zr_mpi_turn_take(struct zr_mpi_process *p, int64_t begun_ns);
void zr_mpi_turn_end(struct zr_mpi_process *p);

/* A thread was left behind that makes a communicator, inside: zr_mpi_enter says so from now on. */
void zr_mpi_process_half_made(struct zr_mpi_process *p);

/* Inside: a request that was begun in slot belongs to the batch. */
void zr_mpi_begun(struct zr_mpi_process *p, int32_t slot, struct zr_mpi_batch *b);
/* Lets MPI work, unless another thread is inside, which does so itself. true: some request has ended. */
bool zr_mpi_poll(struct zr_mpi_process *p);
/* 0, or why nothing will move any more, as this thread's message. */
int zr_mpi_ended(struct zr_mpi_process *p);

#endif
