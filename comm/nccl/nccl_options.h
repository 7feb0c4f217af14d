/* SPDX-License-Identifier: Apache-2.0 */
/* nccl_options.h: NCCL's communicators as those see them who open them: for ranks that each have a GPU of the
 * cuda device. */
#ifndef ZR_COMM_NCCL_OPTIONS_H
#define ZR_COMM_NCCL_OPTIONS_H

#include "comm/backend.h"

struct zr_rendezvous;
struct zr_world;

struct zr_nccl_options {
    /* how long a collective waits for peers, and the call that issues it may take */
    int64_t timeout_ms;
    /* how long each call may take that makes a communicator, or allocates or registers an arena; 0:
     * timeout_ms */
    int64_t start_timeout_ms;
    /* reduce in the fixed tree: the bits of shm and self; at most ZR_MAX_SOURCES ranks in a group */
    bool deterministic;
    /* Slices of more are packed only where the last ones are short. */
    int64_t small_bytes;
    /* Larger slices of a list of places are gathered: what says how bytes travel says so. */
    bool ragged;
    /* symmetric windows, and gathers by copy engines instead of kernels (2.28) */
    bool copy_engine;
    /* NULL, or the program's own ncclComm_t over all ranks of the rendezvous, which stays the program's: it
     * is split, or used as it is by an NCCL that cannot split. NCCL wants the operations of all communicators
     * of a GPU in one order on all ranks, so while ours are at work other NCCL traffic of the program, from
     * another thread or on any communicator, may deadlock with them */
    void *lent;
    /* A communicator of more ranks is made by several ids, each of at most so many; 0: ZR_NCCL_RANKS_PER_ID
     */
    int ranks_per_id;
    /* NULL: what the program has loaded, else libnccl.so.2; else a path */
    const char *library;
    /* may be NULL; written by a thread of the communicators, too */
    struct zr_log *log;
};

/* What a communicator that the program lends says of its ranks. Local; blocks up to timeout_ms, of the start,
 * while it is not ready (a non-blocking one). */
int zr_nccl_lent_world(void *lent, int64_t timeout_ms, int *rank, int *world);

/* Collective over lent, blocking up to timeout_ms; w is from zr_world_lent, of more than one rank. Where w
 * has no address yet, rank 0 takes a free port; its address and a new key go to all ranks by one all-gather
 * on a stream of dev, into w. *held: -1, or a socket that keeps the port for rank 0 until the rendezvous
 * listens there: close it then. *left: NCCL has not ended, so dev can only be left behind. */
int zr_nccl_lent_meet(struct zr_device *dev, void *lent, int64_t timeout_ms, struct zr_world *w, int *held,
                      bool *left);

/* All ranks of an id report to the one process that made it. NCCL has more than so many do it one after the
 * other (NCCL_UID_STAGGER_THRESHOLD in its user guide), which that process could not take at once. */
#define ZR_NCCL_RANKS_PER_ID 256

/* What slices may have at most to travel packed: copying them in and out takes a few microseconds, less than
 * a call of their own. */
#define ZR_NCCL_SMALL_BYTES (32 << 10)

/* Bytes at the end of an arena, of a group of size ranks, for what travels packed: segments whose last slices
 * are short, which a collective of NCCL's cannot take as they lie, and small ones (comm/nccl/nccl_pack.h). */
static inline int64_t zr_nccl_room_bytes(int size, int64_t packed_bytes)
{
    const int64_t most = 64 << 20, least = 256 * (int64_t)size;
    int64_t all = packed_bytes > most / size ? most : packed_bytes * size;
    return size == 1 ? 0 : all > least ? (all + 255) / 256 * 256 : least;
}

/* The same with what comparing ledgers and the fixed tree want: of a communicator that reduces, or on which
 * ranks are compared. */
static inline int64_t zr_nccl_reserve_bytes(int size, bool deterministic, int64_t largest_bytes,
                                            int64_t packed_bytes)
{
    const int64_t per_peer = 4 << 20, in_all = 64 << 20, align = 256;
    int64_t ledgers = (size * INT64_C(32) + align - 1) / align * align;
    int64_t room = zr_nccl_room_bytes(size, packed_bytes);
    /* A round's row of packed slices arrives where the others' slices do. */
    int64_t slice = largest_bytes > packed_bytes ? largest_bytes : packed_bytes;
    if (!deterministic || size == 1)
        return ledgers + room;
    slice = slice < per_peer ? slice : per_peer;
    slice = slice < in_all / (size - 1) ? slice : in_all / (size - 1);
    slice = (slice + align - 1) / align * align;
    return ledgers + room + (slice > align ? slice : align) * (size - 1);
}

/* Bytes that a role's communicator uses for itself at the end of its arena; a multiple of 256. Where an arena
 * is attached to several communicators, each has its own. */
static inline int64_t zr_nccl_role_bytes(enum zr_role role, const struct zr_role_ask *ask, bool deterministic)
{
    if (role == ZR_ROLE_CONTROL)
        return zr_nccl_reserve_bytes(ask->group->size, false, 0, 0);
    return zr_role_reduces(role)
               ? zr_nccl_reserve_bytes(ask->group->size, deterministic, ask->largest_bytes, ask->packed_bytes)
               : zr_nccl_room_bytes(ask->group->size, ask->packed_bytes);
}

/* Collective over all ranks of rdv, each with the groups that it belongs to, and blocking; rdv, and the
 * groups' members, must outlive the communicators. Opens one for each role that anybody has (GATHER and
 * REDUCE at least): close each. Where there is no CONTROL, the roles that there are are of one group. The
 * arenas are made and attached before zr_rendezvous_detach. Operations of all of them are issued by one
 * thread at a time, in the same order on all ranks.
 * What ranks issue is compared at each exchange and agreement of CONTROL, or where nobody has that, of
 * REDUCE; before that, ranks that differ may move wrong bytes or wait until timeout_ms. Once rdv is detached,
 * what the thread that watches them finds goes to all ranks over rdv, and what calls of the programs that
 * differ may explain fails only when they were compared there (zr_rendezvous_compare), at most
 * timeout_ms, or 8 s, later.
 * Only REDUCE and REDUCE_OUTER reduce. Where ops->deterministic is false, a reduce_scatter leaves this rank's
 * slice of src unspecified.
 * ZR_ERR_NOTSUP: built without NCCL, or there is no library. */
int zr_nccl_open(struct zr_rendezvous *rdv, struct zr_device *dev, const struct zr_nccl_options *opt,
                 const struct zr_role_ask ask[ZR_ROLES], struct zr_comm *comm[ZR_ROLES]);
/* How bytes really travel: "NCCL 2.28.9, symmetric windows", of a gather communicator of opt->ragged with
 * ", ragged by broadcasts" behind it. Of a communicator of zr_nccl_open that has its
 * arena; valid until it is closed. */
const char *zr_nccl_path(const struct zr_comm *c);

#endif
