/* SPDX-License-Identifier: Apache-2.0 */
/* nccl_stand_in.h: NCCL between threads of one process, or between processes, over the CUDA stand-in's
 * streams.
 *
 * Ranks are threads with one device each. With nccl_stand_in_share they are processes with one machine each,
 * on the host that NCCL_HOSTID names. A collective runs in its stream's order. It first gives away a copy of
 * what it sends and then waits for what it needs from others. So it completes as early as NCCL may let it,
 * and a caller that takes it for a barrier fails. A sender may also wait for its receiver, as NCCL does when
 * a message fills its buffers, and two ranks that both send first then fail. Sums go around a ring and are
 * rounded to the type at every hop, so they differ from a tree's. Maxima drop NaN.
 *
 * A process that dies is noticed as with NCCL:
 * - While a communicator is made, its two neighbours among the ranks get ncclRemoteError.
 * - In a collective, ranks of other hosts get ncclRemoteError and go on waiting until they are aborted.
 * - On its own host no rank notices it.
 *
 * A call waits for other ranks if they connect in it: ncclCommSplit, and the first operation of ranks on a
 * communicator if the environment has NCCL_STAND_IN_CONNECT=1. Without it, ranks connect when the
 * communicator is made, as in NCCL with NCCL_RUNTIME_CONNECT=0. ncclCommDestroy waits for the ranks of its
 * host.
 *
 * A collective starts when all its CTAs fit on the device: 32, or maxCTAs. With NCCL_LAUNCH_ORDER_IMPLICIT=1
 * those of a device start in the order of issue. Ranks that use communicators in different orders may then
 * wait for each other for ever, which is reported.
 *
 * Two processes of one host with the same device are refused with ncclInvalidUsage. There are no windows
 * between hosts: registering succeeds and does not set the handle. A non-blocking communicator is in
 * progress after each call until it has been polled a few times. ncclCommSplit of one returns success
 * before the communicator exists.
 *
 * These are reported as stand_in_misuse:
 * - memory that is not a device's; buffers that overlap and are not in place
 * - a buffer written by one call of a group and used by another
 * - a window of memory that NCCL did not allocate, or with other sizes or offsets on other ranks
 * - memory freed while registered; a group that is not ended
 * - two threads of a rank inside at once; an order of communicators that differs between ranks
 * - the NULL stream with copy engines; a largest number of CTAs below the smallest
 * - a split that shares resources its parent works with
 * - several ids that differ between ranks, were not made by the first rank that they serve, or outnumber
 *   the ranks
 * - a communicator used after it was destroyed or while it is in progress
 * - known faults of the version: copy engines of two ranks, symmetric collectives in one group
 * - a query for errors by a thread that blocks SIGSEGV
 * - ncclCommDestroy with a dead rank, which does not return; or without the other ranks of the host
 * - ncclCommAbort while a call with the communicator is in progress, if it could be revoked first
 * - first operations of ranks that wait for each other
 * - operations on GPUs that wait for each other, for a part of a GPU or behind each other (not reported
 *   between ranks that are processes, or for more than 200 operations)
 * - ranks that differ in kind, count, type or root; they wait for ever, as in the real library */
#ifndef ZR_TEST_NCCL_STAND_IN_H
#define ZR_TEST_NCCL_STAND_IN_H

#include <nccl.h>

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

struct nccl_stand_in_machine {
    /* version of the library; default 22809. Below 22700 it has no windows, below 21900 no memory, below
     * 21800 no ncclCommSplit, below 22300 no ncclCommInitRankScalable, below 22807 no ncclCommRevoke, below
     * 22907 no ncclCommMemStats */
    int version;
    /* default true; false: registering succeeds and does not set the handle */
    bool windows;
    /* device memory that a communicator takes; default 0 */
    int64_t comm_bytes;
    /* default false; true: ncclCommAbort does not return, and running work goes on waiting */
    bool abort_sticks;
    /* default false; true: ncclCommRevoke does not return, and does nothing */
    bool revoke_sticks;
    /* default false; true: what sends a message completes when the receiver has come */
    bool sends_wait;
    /* the least time that a group takes on its stream; default 0 */
    int32_t slow_us;
    /* time that a communicator's first group of calls takes to return: its first one with ncclAllReduce, with
     * other collectives, and with messages to or from a rank; default 0 */
    int32_t connect_ms;
    /* how long ncclCommDestroy waits for other ranks before that is reported; default 60000 */
    int32_t destroy_ms;
    /* CTAs that a device can hold; default 132 */
    int32_t n_ctas;
};

/* May be changed while there are no communicators. */
struct nccl_stand_in_machine *nccl_stand_in_the_machine(void);

/* Makes ranks of the processes that this one forks from now on, until it calls nccl_stand_in_end. Each of
 * them calls that too before it ends. Call this before anything else of the stand-ins, whose threads are
 * not forked. */
void nccl_stand_in_share(void);
/* Stops such a rank, a child of the calling process, at a point where it holds nothing of the stand-in
 * that other ranks wait for. Returns when it has stopped. */
void nccl_stand_in_stop(pid_t pid);

/* From now on the k-th call (1-based) of that name on that device returns res, once. One such call is set
 * at a time; k 0: none. */
void nccl_stand_in_fail(const char *call, int device, int k, ncclResult_t res);
/* The same, but the call does not return, unless its communicator is revoked or aborted. */
void nccl_stand_in_hang(const char *call, int device, int k);
/* From now on all communicators of the device report res. */
void nccl_stand_in_async(int device, ncclResult_t res);

struct nccl_stand_in_counts {
    /* collectives, sends and receives, over all ranks */
    int64_t n_calls;
    /* groups of calls put on streams */
    int64_t n_groups;
    /* the most bytes that a rank has sent to ncclAllGather */
    int64_t most_gathered;
    /* of n_calls: collectives with both buffers in symmetric windows */
    int64_t n_symmetric;
    /* of n_symmetric: gathers of a communicator without CTAs */
    int64_t n_copy_engine;
    /* over all ranks: communicators made by ncclCommInitRankConfig or ncclCommInitRankScalable, those of
     * them made with several ids, and those made by ncclCommSplit */
    int64_t n_made, n_scalable, n_split;
    /* of all these, communicators that may use one CTA */
    int64_t n_one_cta;
    /* of all these, communicators whose kernels start in the order of the calls (launchOrderImplicit,
     * 2.32) */
    int64_t n_ordered;
    /* communicators alive */
    int64_t n_comms;
    /* windows registered */
    int64_t n_registered;
};

void nccl_stand_in_counts(struct nccl_stand_in_counts *out);

/* Releases everything that hangs, waits for calls to return, and forgets everything. Reports as misuse
 * what is still alive, unless something hung. Returns whether something hung: then memory may be left,
 * which stand_in_end will report. Call it before stand_in_end. */
bool nccl_stand_in_end(void);

#endif
