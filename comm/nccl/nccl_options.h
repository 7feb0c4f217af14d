/* SPDX-License-Identifier: Apache-2.0 */
/* nccl_options.h: how to open NCCL communicators, for ranks that each have a GPU of the cuda device. */
#ifndef ZR_COMM_NCCL_OPTIONS_H
#define ZR_COMM_NCCL_OPTIONS_H

#include "comm/backend.h"

struct zr_rendezvous;

struct zr_nccl_options {
    /* Time that a collective waits for peers, and that the issuing call may take, in ms. */
    int64_t timeout_ms;
    /* Time limit of each call that makes a communicator, allocates or registers an arena, or runs the first
     * operations, in ms. 0: timeout_ms. */
    int64_t start_timeout_ms;
    /* Reduce in the fixed tree, with the bits of shm and self. Groups may have at most ZR_MAX_SOURCES
     * ranks. */
    bool deterministic;
    /* Largest slice that is packed, in bytes. Larger ones are packed only if the last slices are short. */
    int64_t small_bytes;
    /* Larger slices of a list of places are gathered. zr_nccl_path then mentions how they travel. */
    bool ragged;
    /* Use symmetric windows, and gather by copy engines instead of kernels. Needs NCCL 2.28. */
    bool copy_engine;
    /* NULL, or the program's own ncclComm_t over all ranks of the rendezvous. The program keeps it. It is
     * split, or used directly if this NCCL cannot split. NCCL needs the operations of all communicators of a
     * GPU in one order on all ranks. So other NCCL traffic of the program may deadlock with libzero's
     * operations while they run. */
    void *user_comm;
    /* Most ranks for each NCCL id; a larger communicator gets several ids. 0: ZR_NCCL_RANKS_PER_ID. */
    int ranks_per_id;
    /* Path of the library. NULL: the one that the program has loaded, or else libnccl.so.2. */
    const char *library;
    /* May be NULL. A thread of the communicators writes to it, too. */
    struct zr_log *log;
};

/* Reads the rank and world of the program's own communicator. Local. Blocks up to timeout_ms while a
 * non-blocking communicator is not ready; pass start_timeout_ms. */
int zr_nccl_user_comm_world(void *user_comm, int64_t timeout_ms, int *rank, int *world);

/* zr_user_comm.gather over the program's own communicator, on a stream of c->dev. */
int zr_nccl_exchange(struct zr_user_comm *c, const void *mine, void *all, size_t bytes);

/* All ranks of an id report to the process that made it, which can only serve so many at once. Above this
 * number NCCL lets them report one after the other (NCCL_UID_STAGGER_THRESHOLD in its user guide). */
#define ZR_NCCL_RANKS_PER_ID 256

/* Largest slice that is packed, in bytes. Copying it in and out takes a few microseconds, less than another
 * call. */
#define ZR_NCCL_SMALL_BYTES (32 << 10)

/* Bytes at the end of an arena for packed segments, in a group of size ranks. Packed segments are small ones,
 * and those with short last slices, which an NCCL collective cannot take in place (comm/nccl/nccl_pack.h). */
static inline int64_t zr_nccl_room_bytes(int size, int64_t packed_bytes)
{
    const int64_t most = 64 << 20, least = 256 * (int64_t)size;
    int64_t all = packed_bytes > most / size ? most : packed_bytes * size;
    return size == 1 ? 0 : all > least ? (all + 255) / 256 * 256 : least;
}

/* The same plus memory for comparing ledgers and for the fixed tree. It is for a communicator that reduces,
 * or on which ranks are compared. */
static inline int64_t zr_nccl_reserve_bytes(int size, bool deterministic, int64_t largest_bytes,
                                            int64_t packed_bytes)
{
    const int64_t per_peer = 4 << 20, in_all = 64 << 20, align = 256;
    int64_t ledgers = (size * INT64_C(32) + align - 1) / align * align;
    int64_t room = zr_nccl_room_bytes(size, packed_bytes);
    /* A row of packed slices is received in the same memory as the slices of other ranks. */
    int64_t slice = largest_bytes > packed_bytes ? largest_bytes : packed_bytes;
    if (!deterministic || size == 1)
        return ledgers + room;
    slice = slice < per_peer ? slice : per_peer;
    slice = slice < in_all / (size - 1) ? slice : in_all / (size - 1);
    slice = (slice + align - 1) / align * align;
    return ledgers + room + (slice > align ? slice : align) * (size - 1);
}

/* Bytes that a role's communicator reserves at the end of its arena, a multiple of 256. Each communicator of
 * an arena has separate bytes. */
static inline int64_t zr_nccl_role_bytes(enum zr_role role, const struct zr_role_ask *ask, bool deterministic)
{
    if (zr_role_is_pair(role))
        return 0; /* messages need no more than their own memory */
    if (role == ZR_ROLE_CONTROL || role == ZR_ROLE_WORLD)
        return zr_nccl_reserve_bytes(ask->group->size, false, 0, 0);
    return zr_role_reduces(role)
               ? zr_nccl_reserve_bytes(ask->group->size, deterministic, ask->largest_bytes, ask->packed_bytes)
               : zr_nccl_room_bytes(ask->group->size, ask->packed_bytes);
}

/* Opens a communicator for each role that any rank has, at least GATHER and REDUCE; close each.
 *
 * Every rank passes a group for each of these roles, of itself alone if it has no partner. rdv and the
 * groups' members must outlive the communicators. WORLD's group is the world; without it CONTROL's is, and
 * without that GATHER's. Make and attach the arenas before zr_rendezvous_detach. One thread at a time issues
 * the operations of all communicators, in an order that is the same on all ranks which two communicators have
 * in common.
 *
 * Ranks compare what they issued at each exchange and agreement of CONTROL, or of REDUCE if no rank has
 * CONTROL, and at each agreement of WORLD. Before that, ranks that differ may move wrong bytes or wait until
 * timeout_ms. Once rdv is detached, a failure goes to all ranks over it. If different calls of the programs
 * may explain the failure, these are compared first (zr_rendezvous_compare). That delays the failure by at
 * most timeout_ms, or 8 s.
 *
 * Only REDUCE, REDUCE_OUTER, TP and CP reduce. A broadcast of a role of pairs is a message. If
 * ops->deterministic is false, a reduce_scatter leaves this rank's slice of src unspecified.
 *
 * Collective over all ranks of rdv; blocks.
 * Errors: NOTSUP   built without NCCL, or there is no library */
int zr_nccl_open(struct zr_rendezvous *rdv, struct zr_device *dev, const struct zr_nccl_options *opt,
                 const struct zr_role_ask ask[ZR_ROLES], struct zr_comm *comm[ZR_ROLES]);
/* How bytes travel: "NCCL 2.28.9, symmetric windows". A gather communicator with opt->ragged adds ", ragged
 * by broadcasts". The communicator must have its arena. Valid until it is closed. */
const char *zr_nccl_path(const struct zr_comm *c);

#endif
