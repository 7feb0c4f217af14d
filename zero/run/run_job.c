/* SPDX-License-Identifier: Apache-2.0 */
/* run_job.c: one node's part of a job. It forwards signals to its ranks, and learns of their failures and of
 * lost output. It ends zero-run when the job is over and all output is written. The role (run_job.h) decides
 * what follows from these events. */
#include "zero/run/run_job.h"
#include "kernels/error.h"
#include "kernels/limits.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const int forwarded[ZR_RUN_N_SIGNALS] = {SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2};

/* Stops the event loop, so that zero-run ends, if the job is over and its output is written. */
static void stop_if_written(struct zr_run_job *j)
{
    if (j->over && (j->hurry || zr_run_written(&j->node)))
        uv_stop(&j->node.loop);
}

void zr_run_job_over(struct zr_run_job *j)
{
    j->over = true;
    stop_if_written(j);
}

void zr_run_job_end(struct zr_run_job *j, int exit_code)
{
    if (!j->exit_code)
        j->exit_code = exit_code;
    if (j->attempt)
        zr_run_attempt_end(j->attempt);
}

static int n_alive(const struct zr_run_job *j)
{
    return j->attempt ? zr_run_attempt_alive(j->attempt) : 0;
}

/* --- ranks --- */

/* Called at the first failure of this node's ranks. */
static void on_failed(void *arg, const struct zr_run_end *end)
{
    struct zr_run_job *j = arg;
    struct zr_run_failure f = {.kind = ZR_RUN_RANK_ENDED,
                               .node = j->node.o->node,
                               .rank = end->rank,
                               .code = end->code,
                               .signal = end->signal,
                               .n_others = n_alive(j)};
    memcpy(f.last, end->last, sizeof f.last);
    j->role->on_failure(j, &f);
}

/* Called when all ranks of this node's attempt are gone. */
static void on_over(void *arg)
{
    struct zr_run_job *j = arg;
    bool leftovers = zr_run_attempt_leftovers(j->attempt);
    struct zr_run_reached reached = zr_run_attempt_reached(j->attempt);
    zr_run_attempt_free(j->attempt);
    j->attempt = NULL;
    j->role->on_over(j, leftovers, reached);
    stop_if_written(j);
}

void zr_run_job_start(struct zr_run_job *j)
{
    const struct zr_run_watch watch = {on_failed, on_over, j};
    int err = zr_run_attempt_start(&j->node, &j->assignment, &watch, &j->attempt);
    if (!err)
        return;
    struct zr_run_failure f = {
        .kind = ZR_RUN_NOT_STARTED, .node = j->node.o->node, .code = err, .n_others = n_alive(j)};
    f.rank = j->assignment.first_rank + (j->attempt ? zr_run_attempt_started(j->attempt) - 1 : 0);
    j->role->on_failure(j, &f);
    if (j->attempt)
        zr_run_attempt_end(j->attempt);
    else
        j->role->on_over(j, false, (struct zr_run_reached){.step = -1});
}

/* --- output --- */

/* Called when output was written, or could not be: error is then an errno. */
static void on_written(void *arg)
{
    struct zr_run_job *j = arg;
    int error = j->node.sinks[0].error;
    if (error && !j->output_lost) {
        j->output_lost = true;
        if (j->attempt && !zr_run_attempt_ending(j->attempt)) {
            const struct zr_run_failure f = {
                .kind = ZR_RUN_OUTPUT_LOST, .node = j->node.o->node, .code = error, .n_others = n_alive(j)};
            j->role->on_failure(j, &f);
            if (j->attempt)
                zr_run_attempt_end(j->attempt);
        }
    }
    stop_if_written(j);
}

/* --- signals --- */

void zr_run_job_signal(struct zr_run_job *j, int signum)
{
    bool asks_to_end = signum != SIGUSR1 && signum != SIGUSR2;
    if (asks_to_end && j->n_asked++ == 0)
        j->asked_by = signum;
    j->hurry = j->n_asked > 2;
    if (!j->attempt) {
        stop_if_written(j);
    } else if (!asks_to_end || j->n_asked == 1) {
        zr_run_attempt_signal(j->attempt, signum);
    } else if (j->hurry) {
        zr_run_attempt_hurry(j->attempt);
    } else if (!zr_run_attempt_ending(j->attempt)) {
        zr_run_say(&j->node, "second signal %d (%s); ending %d ranks", signum, strsignal(signum), n_alive(j));
        zr_run_job_end(j, 128 + signum);
    }
}

static void on_signal(uv_signal_t *handle, int signum)
{
    struct zr_run_job *j = handle->data;
    zr_run_job_signal(j, signum);
    j->role->on_signal(j, signum);
}

static int watch_signals(struct zr_run_job *j)
{
    int err = 0;
    for (size_t i = 0; i < ZR_RUN_N_SIGNALS && !err; i++) {
        j->signals[i].data = j;
        err = uv_signal_init(&j->node.loop, &j->signals[i]);
        if (!err)
            err = uv_signal_start(&j->signals[i], on_signal, forwarded[i]);
    }
    return err;
}

/* --- other nodes --- */

static void on_message(void *arg, int from, const struct zr_run_message *m)
{
    struct zr_run_job *j = arg;
    j->role->on_message(j, from, m);
}

static void on_lost(void *arg, int node, const char *why)
{
    struct zr_run_job *j = arg;
    j->role->on_lost(j, node, why);
}

/* --- the job --- */

/* Lets the nodes meet. Until then there is nothing to end, and a signal ends zero-run like any program. */
static int meet(struct zr_run_job *j, const struct zr_run_options *o)
{
    char why[ZR_SYSTEM_WORDS];
    int err = zr_run_node_open(&j->node);
    if (err) {
        fprintf(stderr, "zero-run: cannot start: %s\n", zr_limit_words(-err, uv_strerror(err), why));
        return 1;
    }
    if (zr_run_nodes_meet(o, &j->node.loop, &j->nodes)) {
        fprintf(stderr, "zero-run: %s\n", zr_error_text());
        return 1;
    }
    err = watch_signals(j);
    if (err)
        fprintf(stderr, "zero-run: cannot start: %s\n", zr_limit_words(-err, uv_strerror(err), why));
    return err ? 1 : 0;
}

int zr_run_job(const struct zr_run_options *o)
{
    static struct zr_run_job job; /* not on the stack, because a worker may still write at the end */
    struct zr_run_job *j = &job;
    j->node.o = o; /* the command line */
    j->node.on_written = on_written;
    j->node.arg = j;
    j->role = o->node == 0 ? &zr_run_leads : &zr_run_follows;
    signal(SIGPIPE, SIG_IGN); /* if the reader has left, write() fails instead */
    int code = meet(j, o);
    if (code)
        return code;
    zr_run_nodes_watch(j->nodes, on_message, on_lost, j);
    j->role->begin(j);
    if (!j->over || !zr_run_written(&j->node))
        uv_run(&j->node.loop, UV_RUN_DEFAULT);
    zr_run_nodes_close(j->nodes);
    return j->exit_code;
}
