/* SPDX-License-Identifier: Apache-2.0 */
/* run_job.h: a job as one of its nodes sees it. run_job.c has what all nodes do. Node 0 leads (run_lead.c),
 * and the others do what it says (run_follow.c). */
#ifndef ZR_ZERO_RUN_JOB_H
#define ZR_ZERO_RUN_JOB_H

#include "zero/run/run_nodes.h"
#include "zero/run/run_ranks.h"

enum { ZR_RUN_N_SIGNALS = 5 };

/* An attempt is one start of all ranks; a restart is another attempt. */
struct zr_run_job {
    struct zr_run_node node;
    struct zr_run_nodes *nodes;
    const struct zr_run_role *role;
    /* Node 0's state of all nodes. NULL on the other nodes. */
    struct zr_run_lead *lead;
    /* On the other nodes: node 0 is lost. */
    bool leader_lost;
    /* This node's ranks. NULL: none run. */
    struct zr_run_attempt *attempt;
    struct zr_run_assignment assignment;
    int exit_code;
    /* No ranks run, and no more will be started. */
    bool over;
    /* Standard output could not be written, which ends the ranks. */
    bool output_lost;
    /* Number of SIGINT, SIGTERM and SIGHUP so far, on any node. */
    int n_asked;
    /* The first of these signals. */
    int asked_by;
    /* A third such signal came, so output is not waited for. */
    bool hurry;
    uv_signal_t signals[ZR_RUN_N_SIGNALS];
};

/* The part of a job that node 0 and the others do differently. */
struct zr_run_role {
    /* Called when the nodes have met. */
    void (*begin)(struct zr_run_job *j);
    /* Called at the first failure of this node's ranks, which are ended then. */
    void (*on_failure)(struct zr_run_job *j, const struct zr_run_failure *f);
    /* Called when all ranks of this node are gone. leftovers: processes that they started are still there. r:
     * how far they came. j->attempt is NULL again. */
    void (*on_over)(struct zr_run_job *j, bool leftovers, struct zr_run_reached r);
    /* Called when this node got a signal, which its own ranks have already. */
    void (*on_signal)(struct zr_run_job *j, int signum);
    /* Called when another node sent a message, and when the connection to another node was lost. */
    void (*on_message)(struct zr_run_job *j, int from, const struct zr_run_message *m);
    void (*on_lost)(struct zr_run_job *j, int node, const char *why);
};
extern const struct zr_run_role zr_run_leads, zr_run_follows;

/* Starts this node's ranks as j->assignment says. If that fails, the ranks that were started end, and the
 * role gets the failure. */
void zr_run_job_start(struct zr_run_job *j);
/* Ends this node's ranks. The first exit code that is not 0 is kept. */
void zr_run_job_end(struct zr_run_job *j, int exit_code);
/* Handles a signal that any node got. The first is forwarded to the ranks, the second ends them, and the
 * third ends them at once. SIGUSR1 and SIGUSR2 are only forwarded. */
void zr_run_job_signal(struct zr_run_job *j, int signum);
/* Ends zero-run once all output is written. */
void zr_run_job_over(struct zr_run_job *j);

#endif
