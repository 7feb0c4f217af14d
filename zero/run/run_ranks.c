/* SPDX-License-Identifier: Apache-2.0 */
/* run_ranks.c: starts the ranks of one attempt, and watches them until they have ended.
 *
 * An attempt goes through these phases:
 *
 *     RUNNING
 *     ENDING   the ranks that are alive got SIGTERM, and a timer runs
 *     KILLED   what is left got SIGKILL
 *     CLOSING  its handles are being closed
 *
 * It is over when every rank was reaped, every output pipe is at its end, and all handles are closed. If
 * zero-run ends the ranks, no process that they started may be left either. A rank's children may keep its
 * pipes open after its end. They get the same two seconds. */
#include "zero/run/run_ranks.h"
#include "comm/flight.h"
#include "kernels/limits.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#ifndef ZR_RUN_GRACE_MS /* a test sets another value */
#define ZR_RUN_GRACE_MS 2000
#endif
#define GRACE_MS      ZR_RUN_GRACE_MS /* from SIGTERM to SIGKILL */
#define AFTER_KILL_MS 1000 /* from SIGKILL to giving up on pipes that something outside the group holds */

struct rank {
    uv_process_t process;
    struct zr_run_attempt *attempt;
    int number;   /* number in the job */
    int pid;      /* number of the process and of its group */
    bool spawned; /* process is a handle of the loop */
    bool alive;
    uint32_t asked; /* signals that asked it to end: 1 << each */
    int flight;     /* descriptor of its flight recorder; negative: none */
    struct zr_run_end end;
    struct zr_rank_output out[2]; /* standard output and error; not used with --raw */
};

struct zr_run_attempt {
    struct zr_run_node *node;
    struct zr_run_assignment assignment;
    struct zr_run_watch watch;
    struct rank *ranks;
    int n_started, n_alive;
    int n_open;    /* pipes not at their end, or not closed yet */
    int n_handles; /* other handles that are being closed */
    enum { RUNNING, ENDING, KILLED, CLOSING } phase;
    bool to_end; /* zero-run ends the ranks and all that they started */
    bool hurry;
    struct rank *candidate; /* the failure to report in this turn of the loop */
    uint64_t turn_ns;       /* when the first end in this turn was seen; 0: none was */
    int64_t epoch_ns;       /* zr_flight_epoch_ns at the first end of all; 0: none yet */
    uv_timer_t grace;
    uv_check_t round_end; /* runs after every round of events of the loop */
};

static struct zr_sink *sink_of(struct zr_run_node *node, int stream)
{
    return &node->sinks[node->one_sink ? 0 : stream];
}

void zr_run_say(struct zr_run_node *node, const char *fmt, ...)
{
    char line[1024] = "zero-run: ";
    size_t n = strlen(line);
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(line + n, sizeof line - n - 1, fmt, ap);
    va_end(ap);
    strcat(line, "\n");
    zr_sink_put(sink_of(node, 1), line, strlen(line));
}

bool zr_run_written(const struct zr_run_node *node)
{
    return zr_sink_idle(&node->sinks[0]) && zr_sink_idle(&node->sinks[1]);
}

static void on_grace_over(uv_timer_t *timer);

static void start_timer(struct zr_run_attempt *a, uint64_t ms)
{
    uv_timer_start(&a->grace, on_grace_over, ms, 0);
}

/* Signals the process group of a rank. SIGUSR1 and SIGUSR2 are passed on, and do not ask the rank to end. */
static void signal_rank(struct rank *r, int signum)
{
    if (signum != SIGUSR1 && signum != SIGUSR2)
        r->asked |= UINT32_C(1) << signum;
    kill(-r->pid, signum);
}

void zr_run_attempt_signal(struct zr_run_attempt *a, int signum)
{
    for (int i = 0; i < a->n_started; i++)
        if (a->ranks[i].alive)
            signal_rank(&a->ranks[i], signum);
}

void zr_run_attempt_end(struct zr_run_attempt *a)
{
    if (a->phase != RUNNING)
        return;
    a->phase = ENDING;
    a->to_end = true;
    zr_run_attempt_signal(a, SIGTERM);
    start_timer(a, GRACE_MS);
}

/* Whether the process group of a rank has members: the rank itself or what it started. The kernel does not
 * give the number of a live group to a new process. To reuse the number within the few seconds after the
 * group is empty, it would have to use up all other numbers. */
static bool group_lives(const struct rank *r)
{
    if (r->pid == 0 || r->alive)
        return r->alive;
    /* Orphans become our children (PR_SET_CHILD_SUBREAPER), and are members until they are reaped. */
    while (waitpid(-r->pid, NULL, WNOHANG) > 0)
        ;
    return kill(-r->pid, 0) == 0;
}

/* Whether ranks or processes that they started are alive, in any process group. In phase KILLED all of them
 * get SIGKILL again, because some may be new. */
static bool descendants_live(const struct zr_run_attempt *a)
{
    while (a->n_alive == 0 && waitpid(-1, NULL, WNOHANG) > 0) /* libuv reaps ranks */
        ;
    struct zr_run_pids left = zr_run_descendants(&a->node->before);
    for (int i = 0; i < left.n && a->phase >= KILLED; i++)
        kill(left.pids[i], SIGKILL);
    free(left.pids);
    return left.n > 0;
}

static void kill_all(struct zr_run_attempt *a)
{
    a->phase = KILLED;
    for (int i = 0; i < a->n_started; i++) {
        struct rank *r = &a->ranks[i];
        bool holds_output = r->out[0].open || r->out[1].open;
        if (group_lives(r) && (r->alive || holds_output || a->to_end))
            signal_rank(r, SIGKILL);
    }
    if (a->to_end)
        descendants_live(a);
    start_timer(a, AFTER_KILL_MS);
}

void zr_run_attempt_hurry(struct zr_run_attempt *a)
{
    if (a->phase == CLOSING)
        return;
    a->hurry = a->to_end = true;
    kill_all(a);
}

/* Reports the end once the loop has closed all handles, because they are freed with the attempt. */
static void finish_if_closed(struct zr_run_attempt *a)
{
    if (a->phase == CLOSING && a->n_open == 0 && a->n_handles == 0) {
        a->node->attempt = NULL;
        a->watch.on_over(a->watch.arg);
    }
}

static void on_closed(uv_handle_t *h)
{
    struct zr_run_attempt *a = h->data;
    a->n_handles--;
    finish_if_closed(a);
}

static void close_handle(struct zr_run_attempt *a, uv_handle_t *h)
{
    h->data = a;
    a->n_handles++;
    uv_close(h, on_closed);
}

static void close_all(struct zr_run_attempt *a)
{
    a->phase = CLOSING;
    for (int i = 0; i < a->n_started; i++) {
        struct rank *r = &a->ranks[i];
        for (int stream = 0; stream < 2; stream++)
            zr_rank_output_close(&r->out[stream]);
        if (r->spawned)
            close_handle(a, (uv_handle_t *)&r->process);
    }
    close_handle(a, (uv_handle_t *)&a->grace);
    close_handle(a, (uv_handle_t *)&a->round_end);
}

bool zr_run_attempt_leftovers(const struct zr_run_attempt *a)
{
    bool found = false;
    for (int i = 0; i < a->n_started && a->to_end; i++)
        found |= group_lives(&a->ranks[i]);
    return found || (a->to_end && descendants_live(a));
}

static void close_if_over(struct zr_run_attempt *a)
{
    if (a->n_alive > 0 || a->phase == CLOSING)
        return;
    /* Processes that ranks started and left behind. */
    bool leftovers = a->n_open > 0 || zr_run_attempt_leftovers(a);
    if (!leftovers || a->hurry)
        close_all(a);
    else if (!uv_is_active((uv_handle_t *)&a->grace))
        start_timer(a, GRACE_MS);
}

static void on_grace_over(uv_timer_t *timer)
{
    struct zr_run_attempt *a = timer->data;
    /* If a slow reader keeps us from reading a pipe to its end, that is no fault of the ranks. */
    bool waiting_for_reader = a->n_alive == 0 && !zr_run_written(a->node);
    if (waiting_for_reader)
        start_timer(a, GRACE_MS);
    else if (a->phase != KILLED)
        kill_all(a);
    else if (a->n_alive == 0)
        close_all(a);
    else
        start_timer(a, AFTER_KILL_MS); /* a rank is stuck in the kernel, and will end later */
}

static void on_exit_of(uv_process_t *process, int64_t code, int signum)
{
    struct rank *r = process->data;
    struct zr_run_attempt *a = r->attempt;
    r->alive = false;
    if (!a->turn_ns)
        a->turn_ns = uv_hrtime();
    if (!a->epoch_ns)
        a->epoch_ns = zr_flight_epoch_ns();
    r->end = (struct zr_run_end){.rank = r->number,
                                 .code = (int)code,
                                 .signal = signum,
                                 .asked = r->asked,
                                 .at_ns = a->turn_ns,
                                 .epoch_ns = a->epoch_ns};
    a->n_alive--;
    zr_run_progress_ended(&a->node->progress, r->number - a->assignment.first_rank, (int)code, signum);
    zr_run_flight_last_call(r->flight, r->end.last);
    bool failed = code != 0 || signum != 0;
    if (failed && (!a->candidate || (signum && !a->candidate->end.signal)))
        a->candidate = r;
}

/* Runs after every round of events, so that exits that were seen together are compared. */
static void on_round_end(uv_check_t *check)
{
    struct zr_run_attempt *a = check->data;
    a->turn_ns = 0;
    if (a->candidate && a->phase == RUNNING) {
        a->watch.on_failed(a->watch.arg, &a->candidate->end);
        zr_run_attempt_end(a);
    }
    close_if_over(a);
}

static void on_end_of_output(struct zr_rank_output *l)
{
    struct zr_run_attempt *a = l->arg;
    a->n_open--;
    close_if_over(a); /* the last pipe may end after the last rank, when nothing else wakes the loop */
    finish_if_closed(a);
}

static void on_sink_written(struct zr_sink *sink)
{
    struct zr_run_node *node = sink->arg;
    struct zr_run_attempt *a = node->attempt;
    for (int i = 0; a && i < a->n_started && !node->o->raw; i++)
        for (int stream = 0; stream < 2; stream++)
            zr_rank_output_update(&a->ranks[i].out[stream]);
    node->on_written(node->arg);
}

/* Standard output is a terminal, so that lines come as they are written. Otherwise pipes are used and not
 * libuv's socket pairs, because a rank must be able to open /dev/stdout. */
static int open_ends(struct zr_run_node *node, const struct rank *r, int stream, uv_file ends[2])
{
    int err = UV_ENOTTY;
    if (stream == 0 && !node->no_terminals) {
        err = zr_run_terminal(ends, snprintf(NULL, 0, "[%d] ", r->number));
        if (err) {
            node->no_terminals = true;
            zr_run_say(node,
                       "no pseudo-terminal for rank %d: %s; the output of this and later ranks goes through "
                       "pipes and may come late",
                       r->number, uv_strerror(err));
        }
    }
    return err ? uv_pipe(ends, UV_NONBLOCK_PIPE, 0) : 0;
}

static int open_output(struct zr_run_attempt *a, struct rank *r, uv_stdio_container_t *stdio)
{
    for (int stream = 0; stream < 2; stream++) {
        uv_file ends[2];
        int err = open_ends(a->node, r, stream, ends);
        if (err)
            return err;
        stdio[1 + stream] = (uv_stdio_container_t){.flags = UV_INHERIT_FD, .data.fd = ends[1]};
        err = zr_rank_output_open(&r->out[stream], &a->node->loop, ends[0], r->number,
                                  sink_of(a->node, stream), on_end_of_output, a);
        if (err) {
            close(ends[0]);
            return err;
        }
        a->n_open++;
    }
    return 0;
}

/* Makes the arguments of zero-run --exec-rank PARENT PATH ARGV0 ARGS..., which the caller frees. NULL: out of
 * memory. parent: memory for our process number. */
static char **arguments(const struct zr_run_options *o, char parent[16])
{
    int n_args = 0;
    while (o->argv[n_args])
        n_args++;
    char **args = calloc((size_t)n_args + 5, sizeof *args);
    if (!args)
        return NULL;
    snprintf(parent, 16, "%d", (int)getpid());
    args[0] = (char *)"zero-run";
    args[1] = (char *)ZR_RUN_EXEC;
    args[2] = parent;
    args[3] = (char *)o->path;
    memcpy(args + 4, o->argv, (size_t)n_args * sizeof *args);
    return args;
}

/* Starts a rank in a new session. A terminal's Ctrl-C then reaches it only through zero-run, once. */
static int spawn(struct zr_run_attempt *a, struct rank *r, int local_rank, uv_stdio_container_t stdio[4])
{
    const struct zr_run_options *o = a->node->o;
    char parent[16];
    char **args = arguments(o, parent),
         **env = zr_run_environment(o, &a->assignment, local_rank, a->node->progress.path, r->flight >= 0);
    uv_process_options_t options = {
        .exit_cb = on_exit_of,
        .file = "/proc/self/exe",
        .args = args,
        .env = env,
        .flags = UV_PROCESS_DETACHED,
        .stdio_count = r->flight >= 0 ? 4 : 3,
        .stdio = stdio,
    };
    int err = args && env ? 0 : UV_ENOMEM;
    if (!err) {
        r->spawned = true; /* must be closed even if uv_spawn fails */
        err = uv_spawn(&a->node->loop, &r->process, &options);
    }
    if (!err) {
        r->process.data = r;
        r->pid = r->process.pid;
        r->alive = true;
        a->n_alive++;
    }
    free(args);
    free(env);
    return err;
}

static int start_rank(struct zr_run_attempt *a, int local_rank)
{
    struct rank *r = &a->ranks[local_rank];
    bool raw = a->node->o->raw;
    r->attempt = a;
    r->number = a->assignment.first_rank + local_rank;
    r->flight = zr_run_flight_make();
    char why[ZR_SYSTEM_WORDS];
    if (r->flight < 0)
        zr_run_say(
            a->node,
            "no memory for the flight recorder of rank %d: %s; if the rank fails, its last call is not known",
            r->number, zr_system_words(-r->flight, why));
    bool have_input = r->number == 0 && fcntl(0, F_GETFD) != -1;
    uv_stdio_container_t stdio[4] = {
        {.flags = have_input ? UV_INHERIT_FD : UV_IGNORE, .data.fd = 0}, /* ignored: /dev/null */
        {.flags = UV_INHERIT_FD, .data.fd = 1},
        {.flags = UV_INHERIT_FD, .data.fd = 2},
        [ZR_RUN_FLIGHT_FD] = {.flags = UV_INHERIT_FD, .data.fd = r->flight}};
    int err = raw ? 0 : open_output(a, r, stdio);
    if (!err)
        err = spawn(a, r, local_rank, stdio);
    for (int stream = 1; stream < 3 && !raw; stream++)
        if (stdio[stream].data.fd > 2)
            close(stdio[stream].data.fd);
    return err;
}

int zr_run_attempt_start(struct zr_run_node *node, const struct zr_run_assignment *assignment,
                         const struct zr_run_watch *watch, struct zr_run_attempt **out)
{
    struct zr_run_attempt *a = calloc(1, sizeof *a);
    *out = NULL;
    if (a)
        a->ranks = calloc((size_t)assignment->n_ranks, sizeof *a->ranks);
    if (!a || !a->ranks) {
        free(a);
        return UV_ENOMEM;
    }
    *out = node->attempt = a;
    zr_run_progress_clear(&node->progress);
    a->node = node;
    a->assignment = *assignment;
    a->watch = *watch;
    uv_timer_init(&node->loop, &a->grace);
    a->grace.data = a;
    uv_check_init(&node->loop, &a->round_end);
    a->round_end.data = a;
    int err = uv_check_start(&a->round_end, on_round_end);
    while (a->n_started < assignment->n_ranks && !err) {
        err = start_rank(a, a->n_started);
        a->n_started++;
    }
    return err;
}

bool zr_run_attempt_ending(const struct zr_run_attempt *a)
{
    return a->phase != RUNNING;
}

int zr_run_attempt_alive(const struct zr_run_attempt *a)
{
    return a->n_alive;
}

int zr_run_attempt_started(const struct zr_run_attempt *a)
{
    return a->n_started;
}

struct zr_run_reached zr_run_attempt_reached(const struct zr_run_attempt *a)
{
    return zr_run_progress_read(&a->node->progress);
}

/* Reports the processes that even SIGKILL did not end, such as those of another user. */
static void report_leftovers(struct zr_run_attempt *a)
{
    char text[512] = "";
    struct zr_run_pids left = zr_run_descendants(&a->node->before);
    for (int i = 0; i < left.n && strlen(text) + 16 < sizeof text; i++)
        sprintf(text + strlen(text), "%s%d", i ? ", " : "", left.pids[i]);
    if (left.n)
        zr_run_say(a->node, "processes of ranks that have not ended: %d (pid %s)", left.n, text);
    free(left.pids);
}

/* Writes a rank's flight recorder to a file. All ranks are gone, so nobody waits for the disk. */
static void write_last(struct zr_run_attempt *a, const struct rank *r)
{
    char why[ZR_RUN_MESSAGE_BYTES] = "";
    if (r->pid && !a->hurry)
        zr_run_flight_write(r->flight, &r->end, why);
    if (why[0])
        zr_run_say(a->node, "%s", why);
}

void zr_run_attempt_free(struct zr_run_attempt *a)
{
    if (a->to_end && !a->hurry)
        report_leftovers(a);
    for (int i = 0; i < a->n_started; i++) {
        write_last(a, &a->ranks[i]);
        if (a->ranks[i].flight >= 0)
            close(a->ranks[i].flight);
    }
    free(a->ranks);
    free(a);
}

int zr_run_node_open(struct zr_run_node *node)
{
    ZR_TRY(zr_run_progress_open(&node->progress, node->o->n_ranks));
    /* uv_loop_init aborts the process if it cannot open a descriptor. */
    ZR_TRY(-zr_no_descriptors(ZR_MAX_PROBED));
    ZR_TRY(uv_loop_init(&node->loop));
    prctl(PR_SET_CHILD_SUBREAPER, 1); /* to know when the last process that a rank has started is gone */
    node->before = zr_run_descendants(&node->before);
    struct stat out, both;
    node->one_sink =
        !fstat(1, &out) && !fstat(2, &both) && out.st_dev == both.st_dev && out.st_ino == both.st_ino;
    for (int stream = 0; stream < 2; stream++)
        zr_sink_init(&node->sinks[stream], &node->loop, stream + 1, on_sink_written, node);
    return 0;
}
