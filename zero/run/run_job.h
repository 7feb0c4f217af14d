/* SPDX-License-Identifier: Apache-2.0 */
/* run_job.h: a job as one of its nodes sees it. What is the same on all of them is in run_job.c; node 0 leads
 * (run_lead.c), and the others do what it says (run_follow.c). */
#ifndef ZR_ZERO_RUN_JOB_H
#define ZR_ZERO_RUN_JOB_H

#include "zero/run/run_nodes.h"
#include "zero/run/run_ranks.h"

enum { ZR_RUN_N_SIGNALS = 5 };

struct zr_run_job {
    struct zr_run_node node;
    struct zr_run_nodes *nodes;
    const struct zr_run_role *role;
    /* node 0's: what it knows of all nodes; NULL elsewhere */
    struct zr_run_lead *lead;
    /* elsewhere: node 0 is */
    bool leader_lost;
    /* this node's ranks; NULL: none run */
    struct zr_run_attempt *attempt;
    struct zr_run_start start;
    int exit_code;
    /* no more ranks will be started, and none run */
    bool over;
    bool output_lost;
    /* SIGINT, SIGTERM, SIGHUP so far, on any node */
    int n_asked;
    /* the first of them */
    int asked_by;
    /* asked three times: output is not waited for */
    bool hurry;
    uv_signal_t signals[ZR_RUN_N_SIGNALS];
};

/* What node 0 and the others do differently. */
struct zr_run_role {
    /* After the nodes have met. */
    void (*begin)(struct zr_run_job *j);
    /* The first failure of this node's ranks, which are being ended. */
    void (*on_failure)(struct zr_run_job *j, const struct zr_run_failure *f);
    /* All ranks of this node are gone, which had reached r; j->attempt is NULL again. */
    void (*on_over)(struct zr_run_job *j, bool leftovers, struct zr_run_reached r);
    /* This node got a signal, which its own ranks have already. */
    void (*on_signal)(struct zr_run_job *j, int signum);
    void (*on_message)(struct zr_run_job *j, int from, const struct zr_run_message *m);
    void (*on_lost)(struct zr_run_job *j, int node, const char *why);
};
extern const struct zr_run_role zr_run_leads, zr_run_follows;

/* Starts this node's ranks, as j->start has them. Where that fails what was started ends; the role hears of
 * it. */
void zr_run_job_start(struct zr_run_job *j);
/* Ends them; the exit code is the first that was not 0. */
void zr_run_job_end(struct zr_run_job *j, int exit_code);
/* What a signal to any node does here: the first is forwarded to the ranks, a second one ends them. */
void zr_run_job_signal(struct zr_run_job *j, int signum);
/* zero-run ends, once all output is written. */
void zr_run_job_over(struct zr_run_job *j);

#endif
