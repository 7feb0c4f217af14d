/* SPDX-License-Identifier: Apache-2.0 */
/* run_ranks.h: the ranks of this node in one attempt of a job: started, signalled, ended, and their output
 * brought to ours. What follows from their end is for others to say (run_lead.c). */
#ifndef ZR_ZERO_RUN_RANKS_H
#define ZR_ZERO_RUN_RANKS_H

#include "zero/run/run.h"

#include <stdint.h>

struct zr_run_attempt;

/* What outlives attempts: the loop, and where output goes. */
struct zr_run_node {
    const struct zr_run_options *o;
    uv_loop_t loop;
    /* standard output and error */
    struct zr_sink sinks[2];
    struct zr_run_progress progress;
    /* both descriptors are one file: one queue keeps lines whole */
    bool one_sink;
    /* no pseudo-terminal could be had */
    bool no_terminals;
    /* processes that descended from this one before it started a rank: a shell's, which became zero-run */
    struct zr_run_pids before;
    /* the one that runs; NULL */
    struct zr_run_attempt *attempt;
    /* a buffer of output was written, or lost */
    void (*on_written)(void *arg);
    void *arg;
};

/* node: zeroed, not on the stack (a worker may be in a write when we leave in a hurry); with o, on_written
 * and arg. Returns 0 or a libuv error. */
int zr_run_node_open(struct zr_run_node *node);
/* A line of our own on standard error, in its turn among the ranks'. */
void zr_run_say(struct zr_run_node *node, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
/* Nothing waits to be written. */
bool zr_run_written(const struct zr_run_node *node);

/* How a rank ended. */
struct zr_run_end {
    /* of the job */
    int rank;
    int code;
    /* that killed it; 0 */
    int signal;
    /* signals by which we had asked it to end, before that was seen: 1 << each */
    uint32_t asked;
    /* uv_hrtime, the same for all that were seen in one turn of the loop: which of them was first is not
     * known; and zr_flight_epoch_ns, the same for all of an attempt */
    uint64_t at_ns;
    int64_t epoch_ns;
    /* "; its last call was ...", or "" */
    char last[ZR_RUN_LAST_CHARS];
};

struct zr_run_watch {
    /* The first rank that failed, once, while no one had asked for the ranks' end: of those seen in one turn
     * of the loop one that was killed, which is the likelier cause than one that returned an error. */
    void (*on_failed)(void *arg, const struct zr_run_end *end);
    /* All ranks and what they had started are gone, their output is read, and the attempt may be freed. */
    void (*on_over)(void *arg);
    void *arg;
};

/* Starts the ranks. Calls nothing of watch before it returns. An error of libuv's: *n_started of them run,
 * none more will; they are to be ended. NULL in *out: out of memory. */
int zr_run_attempt_start(struct zr_run_node *node, const struct zr_run_start *start,
                         const struct zr_run_watch *watch, struct zr_run_attempt **out);
/* Those that live get signum. */
void zr_run_attempt_signal(struct zr_run_attempt *a, int signum);
/* SIGTERM, and 2 s later SIGKILL for what is left, also of what they started. A second time: nothing. */
void zr_run_attempt_end(struct zr_run_attempt *a);
/* SIGKILL now; over when the ranks are gone, whatever becomes of their output. */
void zr_run_attempt_hurry(struct zr_run_attempt *a);
/* zr_run_attempt_end or _hurry was called. */
bool zr_run_attempt_ending(const struct zr_run_attempt *a);
int zr_run_attempt_alive(const struct zr_run_attempt *a);
int zr_run_attempt_started(const struct zr_run_attempt *a);
/* True if the ranks were to end and a process that they started is still there. */
bool zr_run_attempt_leftovers(const struct zr_run_attempt *a);
/* How far its ranks have come. */
struct zr_run_reached zr_run_attempt_reached(const struct zr_run_attempt *a);
void zr_run_attempt_free(struct zr_run_attempt *a);

#endif
