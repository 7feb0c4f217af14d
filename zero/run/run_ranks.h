/* SPDX-License-Identifier: Apache-2.0 */
/* run_ranks.h: the ranks of this node in one attempt of a job. They are started, signalled and ended, and
 * their output is forwarded to ours. Node 0 decides what follows from their end (run_lead.c). */
#ifndef ZR_ZERO_RUN_RANKS_H
#define ZR_ZERO_RUN_RANKS_H

#include "zero/run/run.h"

#include <stdint.h>

struct zr_run_attempt;

/* State that outlives attempts: the loop, and the descriptors for output. */
struct zr_run_node {
    const struct zr_run_options *o;
    uv_loop_t loop;
    /* Standard output and error. */
    struct zr_sink sinks[2];
    struct zr_run_progress progress;
    /* Both descriptors are one file, so one queue keeps lines whole. */
    bool one_sink;
    /* A pseudo-terminal could not be opened. */
    bool no_terminals;
    /* Processes that descended from this one before it started a rank, such as those of a shell that became
     * zero-run. */
    struct zr_run_pids before;
    /* The attempt that runs. NULL: none. */
    struct zr_run_attempt *attempt;
    /* Called when a buffer of output was written, or lost. */
    void (*on_written)(void *arg);
    void *arg;
};

/* Opens a node. It is zeroed except for o, on_written and arg. It is not on the stack, because a worker may
 * still write when zero-run ends in a hurry. Returns 0 or a libuv error. */
int zr_run_node_open(struct zr_run_node *node);
/* Writes a line of zero-run to standard error, in its turn among the ranks' lines. */
void zr_run_say(struct zr_run_node *node, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
/* Whether nothing waits to be written. */
bool zr_run_written(const struct zr_run_node *node);

/* How a rank ended. */
struct zr_run_end {
    /* Number in the job. */
    int rank;
    int code;
    /* Signal that killed it. 0: none. */
    int signal;
    /* Signals by which zero-run had asked it to end before its end was seen: 1 << each. */
    uint32_t asked;
    /* Time at which the end was seen (uv_hrtime). It is the same for all ends seen in one turn of the loop,
     * because their order is not known. epoch_ns is zr_flight_epoch_ns at the first end of the attempt. */
    uint64_t at_ns;
    int64_t epoch_ns;
    /* The rank's last call: "; its last call was ...", or "". */
    char last[ZR_RUN_MESSAGE_BYTES];
};

struct zr_run_watch {
    /* Called once, for the first rank that failed, unless the ranks were being ended already. If several ends
     * are seen in one turn of the loop, a rank that was killed is preferred to one that returned an error. It
     * is the likelier cause. */
    void (*on_failed)(void *arg, const struct zr_run_end *end);
    /* Called when all ranks and the processes that they started are gone, and their output is read. The
     * attempt may be freed then. */
    void (*on_over)(void *arg);
    void *arg;
};

/* Starts the ranks. Calls nothing of watch before it returns. After a libuv error some ranks may run, no more
 * will be started, and the caller ends those. If *out is NULL, memory ran out. */
int zr_run_attempt_start(struct zr_run_node *node, const struct zr_run_assignment *assignment,
                         const struct zr_run_watch *watch, struct zr_run_attempt **out);
/* Sends signum to the ranks that are alive. */
void zr_run_attempt_signal(struct zr_run_attempt *a, int signum);
/* Sends SIGTERM, and 2 s later SIGKILL to what is left, including processes that ranks started. A second call
 * does nothing. */
void zr_run_attempt_end(struct zr_run_attempt *a);
/* Sends SIGKILL now. The attempt is over when the ranks are gone, even if their output is not read. */
void zr_run_attempt_hurry(struct zr_run_attempt *a);
/* Whether the ranks are being ended. */
bool zr_run_attempt_ending(const struct zr_run_attempt *a);
int zr_run_attempt_alive(const struct zr_run_attempt *a);
int zr_run_attempt_started(const struct zr_run_attempt *a);
/* Whether the ranks were to end, and a process that they started is still there. */
bool zr_run_attempt_leftovers(const struct zr_run_attempt *a);
/* Returns how far the attempt's ranks have come. */
struct zr_run_reached zr_run_attempt_reached(const struct zr_run_attempt *a);
void zr_run_attempt_free(struct zr_run_attempt *a);

#endif
