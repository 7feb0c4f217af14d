/* SPDX-License-Identifier: Apache-2.0 */
/* nccl_stand_in.h: NCCL between threads of one process, or between processes, over the CUDA stand-in's
 * streams.
 *
 * Ranks are threads, each with a device of its own; or processes (nccl_stand_in_share), each with a machine
 * of its own, on the host that NCCL_HOSTID names. A collective runs in the order of its stream: it gives away
 * a copy of what it sends and then waits for what it needs from others, so it completes as early as NCCL may
 * let it, and a caller that takes it for a barrier is found out. Sums go around a ring and are rounded to the
 * type at every hop, so they differ from a tree's.
 *
 * A process that dies is noticed as NCCL notices it: while a communicator is made, by its two neighbours
 * among the ranks, whose calls return ncclRemoteError; in a collective by ranks of other hosts, whose
 * communicators report ncclRemoteError and go on waiting until they are aborted; by nobody on its own host.
 * Two processes of one host with the same device are refused with ncclInvalidUsage, and there are no windows
 * between hosts: registering succeeds and leaves the handle alone.
 *
 * A communicator that is asked for as non-blocking is in progress after each call until it has been polled a
 * few times; ncclCommSplit of one returns success with no communicator yet.
 *
 * Misuse goes to stand_in_misuse: memory that is not a device's, buffers that overlap but are not in place or
 * are written by one call of a group and touched by another, a window of memory that NCCL did not allocate or
 * of other sizes or offsets on other ranks, memory freed while registered, a group not ended, two threads of
 * a rank inside at once, an order of communicators that differs between ranks, the NULL stream with copy
 * engines, fewer CTAs at most than at least, a split that shares what its parent works with, several ids of
 * which one is another on another rank or is not made by the first of the ranks that it serves, or more of
 * them than ranks, a communicator used after it was destroyed or while it is in progress, what releases of
 * that version are known to do wrong (copy engines of two ranks; symmetric collectives in one group), a look
 * for errors by a thread that blocks SIGSEGV, ncclCommDestroy where a rank is dead, which does not come back.
 * What differs between ranks (kind, count, type, root) is misuse and waits for ever, as the real thing
 * may. */
#ifndef ZR_TEST_NCCL_STAND_IN_H
#define ZR_TEST_NCCL_STAND_IN_H

#include <nccl.h>

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

struct nccl_stand_in_machine {
    /* of the library; 22809. Below 22700 it has no windows, below 21900 no memory, below 21800 no
     * ncclCommSplit, below 22300 no ncclCommInitRankScalable, below 22907 no ncclCommMemStats */
    int version;
    /* true; false: registering succeeds and leaves the handle alone */
    bool windows;
    /* 0; of the device, that a communicator takes */
    int64_t comm_bytes;
    /* false; true: ncclCommAbort does not come back, and what runs goes on waiting */
    bool abort_sticks;
    /* 0; that a group takes on its stream at least */
    int32_t slow_us;
};

/* Writable while there are no communicators. */
struct nccl_stand_in_machine *nccl_stand_in_the_machine(void);

/* Ranks are processes that this one forks from now on, until nccl_stand_in_end here; each ends with one of
 * its own. Before anything else of the stand-ins, which have threads that are not forked. */
void nccl_stand_in_share(void);
/* Stops such a rank, a child of the calling process, where it holds nothing of the stand-in that other ranks
 * wait for. Returns when it has stopped. */
void nccl_stand_in_stop(pid_t pid);

/* The k-th call of that name on that device from now on (1-based) returns res, once. One at a time; k 0:
 * none. */
void nccl_stand_in_fail(const char *call, int device, int k, ncclResult_t res);
/* That call does not come back instead. */
void nccl_stand_in_hang(const char *call, int device, int k);
/* All communicators of the device report it from now on. */
void nccl_stand_in_async(int device, ncclResult_t res);

struct nccl_stand_in_counts {
    /* collectives, sends and receives, over all ranks */
    int64_t n_calls;
    /* groups of calls put on streams */
    int64_t n_groups;
    /* of n_calls: collectives with both buffers in symmetric windows */
    int64_t n_symmetric;
    /* of n_symmetric: gathers of a communicator without CTAs */
    int64_t n_copy_engine;
    /* communicators made by ncclCommInitRankConfig or ncclCommInitRankScalable, those of them by several ids,
     * and those made by ncclCommSplit, over all ranks */
    int64_t n_made, n_scalable, n_split;
    /* of them, those that may use one CTA */
    int64_t n_one_cta;
    /* communicators that are alive */
    int64_t n_comms;
    /* windows that are registered */
    int64_t n_registered;
};

void nccl_stand_in_counts(struct nccl_stand_in_counts *out);

/* Lets everything go that hangs, waits for calls to come back, forgets all, and reports what is still alive
 * as misuse, unless something hung, which it returns: then memory may be left, for stand_in_end to find.
 * Before that. */
bool nccl_stand_in_end(void);

#endif
