/* SPDX-License-Identifier: Apache-2.0 */
/* run_follow.c: a node other than node 0. Its ranks start and end when node 0 says so, and it reports to node
 * 0 what happens to them. Without node 0 the job is over. */
#include "zero/run/run_job.h"

static void send_0(struct zr_run_job *j, const struct zr_run_message *m)
{
    zr_run_nodes_send(j->nodes, 0, m);
}

static void begin(struct zr_run_job *j)
{
    (void)j; /* node 0 starts the ranks */
}

static void on_failure(struct zr_run_job *j, const struct zr_run_failure *f)
{
    send_0(j, &(struct zr_run_message){.word = ZR_RUN_FAILED, .failure = *f});
}

static void on_over(struct zr_run_job *j, bool leftovers, struct zr_run_reached r)
{
    if (j->leader_lost)
        zr_run_job_over(j);
    else
        send_0(j, &(struct zr_run_message){.word = ZR_RUN_OVER, .number = leftovers, .reached = r});
}

static void on_signal(struct zr_run_job *j, int signum)
{
    send_0(j, &(struct zr_run_message){.word = ZR_RUN_SIGNAL, .number = signum});
}

static void on_message(struct zr_run_job *j, int from, const struct zr_run_message *m)
{
    (void)from;
    if (m->text[0])
        zr_run_say(&j->node, "%s", m->text);
    switch (m->word) {
    case ZR_RUN_START:
        j->assignment = m->assignment;
        zr_run_job_start(j);
        /* A signal on this node and this message may have crossed on the way. */
        if (j->n_asked && j->attempt)
            zr_run_attempt_signal(j->attempt, j->asked_by);
        break;
    case ZR_RUN_END:
        zr_run_job_end(j, 0);
        break;
    case ZR_RUN_SIGNAL:
        zr_run_job_signal(j, m->number);
        break;
    case ZR_RUN_QUIT:
        j->exit_code = m->number;
        zr_run_job_over(j);
        break;
    default:
        break; /* messages for node 0 only */
    }
}

static void on_lost(struct zr_run_job *j, int node, const char *why)
{
    if (node != 0 || j->over)
        return; /* node 0 decides what follows from the loss of another node */
    int n = j->attempt ? zr_run_attempt_alive(j->attempt) : 0;
    zr_run_say(&j->node, "node 0 (%s), which leads the job, is lost: %s; ending %d rank%s",
               zr_run_nodes_of(j->nodes, 0)->host, why, n, n == 1 ? "" : "s");
    j->leader_lost = true;
    zr_run_job_end(j, 1);
    if (!j->attempt)
        zr_run_job_over(j);
}

const struct zr_run_role zr_run_follows = {.begin = begin,
                                           .on_failure = on_failure,
                                           .on_over = on_over,
                                           .on_signal = on_signal,
                                           .on_message = on_message,
                                           .on_lost = on_lost};
