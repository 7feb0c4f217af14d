/* run_lead.c: a job, from its first rank's start to zero-run's exit code: forwards signals to the ranks, says
 * who failed first, starts all ranks again where that is wanted and of use (run_decide.h), and ends zero-run
 * when the ranks have ended and all output is written. */
#include "zero/run/run_ranks.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const int forwarded[] = {SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2};
#define N_FORWARDED (sizeof forwarded / sizeof *forwarded)

struct lead {
    struct zr_run_node node;
    struct zr_run_attempt *attempt; /* NULL: no more will be started */
    struct zr_run_start start;      /* of that attempt */
    int exit_code;                  /* and of zero-run, where it is the last */
    bool cannot_start;
    uint64_t failed_ns; /* uv_hrtime, when its first rank failed */
    bool output_lost;
    int n_asked; /* SIGINT, SIGTERM, SIGHUP so far */
    bool hurry;  /* asked three times: do not wait for output */
    uv_signal_t signals[N_FORWARDED];
    uv_tcp_t *port_holder;
};

/* Of a failure the first counts. */
static void end_all(struct lead *l, int exit_code)
{
    if (!l->exit_code)
        l->exit_code = exit_code;
    zr_run_attempt_end(l->attempt);
}

static void stop_if_written(struct lead *l)
{
    if (!l->attempt && (l->hurry || zr_run_written(&l->node)))
        uv_stop(&l->node.loop);
}

enum { OTHERS = 48 };

/* "; ending ..." or nothing. */
static const char *ending_others(const struct lead *l, char text[OTHERS])
{
    int n = l->attempt ? zr_run_attempt_alive(l->attempt) : 0;
    snprintf(text, OTHERS, "; ending %d other rank%s", n, n == 1 ? "" : "s");
    return n ? text : "";
}

/* A crash at a touch of memory that a bracket does not hold is what check mode explains. */
static void advise(struct lead *l, const struct zr_run_end *end)
{
    const char *check = getenv("ZERO_CHECK"), *stage = getenv("ZERO_STAGE");
    int signum = end->signal ? end->signal : end->code - 128; /* a shell says it so */
    bool on = check && *check && strcmp(check, "0");
    bool unsharded = stage && (!strcmp(stage, "0") || !strcmp(stage, "1"));
    if ((signum == SIGSEGV || signum == SIGBUS) && !on && !unsharded)
        zr_run_say(&l->node,
                   "if it trains at stage 2 or 3, try ZERO_CHECK=1: it tells which tensor was touched "
                   "outside its bracket");
}

static void on_failed(void *arg, const struct zr_run_end *end)
{
    struct lead *l = arg;
    char others[OTHERS];
    if (end->signal)
        zr_run_say(&l->node, "rank %d was killed by signal %d (%s)%s", end->rank, end->signal,
                   strsignal(end->signal), ending_others(l, others));
    else
        zr_run_say(&l->node, "rank %d exited with code %d%s", end->rank, end->code, ending_others(l, others));
    advise(l, end);
    l->failed_ns = end->at_ns;
    l->cannot_start |= !end->signal && (end->code == ZR_RUN_NOT_RUNNABLE || end->code == ZR_RUN_NOT_FOUND);
    end_all(l, end->signal ? 128 + end->signal : end->code);
}

static void on_written(void *arg)
{
    struct lead *l = arg;
    int error = l->node.sinks[0].error;
    if (error && !l->output_lost) {
        char others[OTHERS];
        l->output_lost = true;
        if (l->attempt && !zr_run_attempt_ending(l->attempt)) {
            zr_run_say(&l->node, "standard output: %s%s", strerror(error), ending_others(l, others));
            end_all(l, error == EPIPE ? 128 + SIGPIPE : 1);
        }
    }
    stop_if_written(l);
}

static void on_signal(uv_signal_t *handle, int signum)
{
    struct lead *l = handle->data;
    bool asks_to_end = signum != SIGUSR1 && signum != SIGUSR2;
    l->n_asked += asks_to_end;
    l->hurry = l->n_asked > 2;
    if (!l->attempt) {
        stop_if_written(l);
    } else if (!asks_to_end || l->n_asked == 1) {
        zr_run_attempt_signal(l->attempt, signum);
    } else if (l->hurry) {
        zr_run_attempt_hurry(l->attempt);
    } else if (!zr_run_attempt_ending(l->attempt)) {
        zr_run_say(&l->node, "second signal %d (%s); ending %d ranks", signum, strsignal(signum),
                   zr_run_attempt_alive(l->attempt));
        end_all(l, 128 + signum);
    }
}

static void free_handle(uv_handle_t *h)
{
    free(h);
}

/* Binds a free port and keeps it bound, not listening, until the attempt is over: nobody is given the same
 * one meanwhile, and rank 0 can still listen on it, for Linux lets sockets with SO_REUSEADDR (libuv's and
 * torch's have it) share a port nobody listens on. The next attempt has another one: whoever still knocks at
 * the last one's finds nobody. */
static int hold_port(struct lead *l, int *port)
{
    struct sockaddr_in at;
    int n = sizeof at;
    if (l->port_holder)
        uv_close((uv_handle_t *)l->port_holder, free_handle);
    l->port_holder = malloc(sizeof *l->port_holder);
    int err = l->port_holder ? uv_ip4_addr("127.0.0.1", 0, &at) : UV_ENOMEM;
    if (!err)
        err = uv_tcp_init(&l->node.loop, l->port_holder);
    if (!err)
        err = uv_tcp_bind(l->port_holder, (const struct sockaddr *)&at, 0);
    if (!err)
        err = uv_tcp_getsockname(l->port_holder, (struct sockaddr *)&at, &n);
    if (!err)
        *port = ntohs(at.sin_port);
    return err;
}

static int watch_signals(struct lead *l)
{
    int err = 0;
    for (size_t i = 0; i < N_FORWARDED && !err; i++) {
        l->signals[i].data = l;
        err = uv_signal_init(&l->node.loop, &l->signals[i]);
        if (!err)
            err = uv_signal_start(&l->signals[i], on_signal, forwarded[i]);
    }
    return err;
}

static void name_job(char *text, size_t bytes)
{
    uv_timeval64_t now = {0};
    uv_gettimeofday(&now);
    snprintf(text, bytes, "zero-run.%d.%lld.%06d", (int)getpid(), (long long)now.tv_sec, (int)now.tv_usec);
}

static void on_over(void *arg);

/* The ranks of the attempt that l->start has. Where that fails what was started ends. */
static void start(struct lead *l)
{
    const struct zr_run_watch watch = {on_failed, on_over, l};
    int err = l->node.o->port ? 0 : hold_port(l, &l->start.port);
    if (!err)
        err = zr_run_attempt_start(&l->node, &l->start, &watch, &l->attempt);
    if (!err)
        return;
    char others[OTHERS];
    int number = l->attempt ? zr_run_attempt_started(l->attempt) - 1 : 0;
    zr_run_say(&l->node, "cannot start rank %d: %s%s", number, uv_strerror(err), ending_others(l, others));
    l->cannot_start = true;
    l->exit_code = 1;
    if (l->attempt)
        zr_run_attempt_end(l->attempt);
}

/* Whether there is to be another attempt, which start then has. */
static bool decide(struct lead *l, bool leftovers)
{
    const struct zr_run_ended ended = {
        .n_attempts = l->start.attempt + 1,
        .world = l->start.world,
        .n_available = l->node.o->n_ranks,
        .asked = l->n_asked > 0 || l->output_lost,
        .cannot_start = l->cannot_start,
        .leftovers = leftovers,
        .most_t = -1,
        .accum = l->start.accum,
    };
    struct zr_run_next next;
    zr_run_decide(&l->node.o->limits, &ended, &next);
    if (next.restart)
        zr_run_say(&l->node, "%s (%.2f s after the failure)", next.text,
                   (double)(uv_hrtime() - l->failed_ns) * 1e-9);
    else if (next.text[0])
        zr_run_say(&l->node, "%s", next.text);
    l->start.attempt++;
    l->start.world = l->start.n_ranks = next.world;
    l->start.accum = next.accum;
    return next.restart;
}

static void on_over(void *arg)
{
    struct lead *l = arg;
    bool leftovers = zr_run_attempt_leftovers(l->attempt);
    zr_run_attempt_free(l->attempt);
    l->attempt = NULL;
    if (l->exit_code && decide(l, leftovers)) {
        l->exit_code = 0;
        start(l);
    }
    stop_if_written(l);
}

int zr_run_lead(const struct zr_run_options *o)
{
    static struct lead lead; /* not on the stack: a worker may be in a write when we leave in a hurry */
    struct lead *l = &lead;
    l->node.o = o;
    l->node.on_written = on_written;
    l->node.arg = l;
    l->start = (struct zr_run_start){
        .world = o->n_ranks, .n_ranks = o->n_ranks, .host = "127.0.0.1", .port = o->port};
    name_job(l->start.job, sizeof l->start.job);
    signal(SIGPIPE, SIG_IGN); /* a reader that left is an error of write() */
    int err = zr_run_node_open(&l->node);
    if (!err)
        err = watch_signals(l);
    if (err) {
        fprintf(stderr, "zero-run: cannot start: %s\n", uv_strerror(err));
        return 1;
    }
    start(l);
    if (l->attempt || !zr_run_written(&l->node))
        uv_run(&l->node.loop, UV_RUN_DEFAULT);
    return l->exit_code;
}
