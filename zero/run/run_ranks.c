/* run_ranks.c: starts the ranks, forwards signals to them, and ends them all when one fails.
 *
 * A run goes one way: RUNNING -> ENDING (the living got SIGTERM, a timer runs) -> KILLED (what is left got
 * SIGKILL). It is over when every rank was reaped, every output pipe is at its end, and all output is
 * written. A rank's children may hold its pipes open after it: they get the same two seconds. */
#include "zero/run/run.h"

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

#define GRACE_MS      2000 /* from SIGTERM to SIGKILL */
#define AFTER_KILL_MS 1000 /* from SIGKILL to giving up on pipes that something outside the group holds */

static const int forwarded[] = {SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2};
#define N_FORWARDED (sizeof forwarded / sizeof *forwarded)

struct run;

struct rank {
    uv_process_t process;
    struct run *run;
    int number;
    int pid; /* also its process group's */
    bool alive;
    int64_t code;
    int signal;
    struct zr_lines out[2]; /* standard output and error; not used when raw */
};

struct run {
    const struct zr_run_options *o;
    uv_loop_t loop;
    struct rank *ranks;
    int n_started, n_alive, n_open; /* n_open: pipes not at their end */
    struct zr_sink sinks[2];
    bool one_sink;     /* both descriptors are one file: one queue keeps lines whole */
    bool no_terminals; /* no pseudo-terminal could be had */
    enum { RUNNING, ENDING, KILLED } phase;
    int exit_code;
    struct rank *candidate; /* the failure to be reported, of those seen in one turn of the loop */
    int n_asked;            /* SIGINT, SIGTERM, SIGHUP so far */
    bool hurry;             /* asked three times: do not wait for output */
    uv_signal_t signals[N_FORWARDED];
    uv_timer_t grace;
    uv_check_t judge;
    uv_tcp_t port_holder;
};

static struct zr_sink *sink_of(struct run *run, int stream)
{
    return &run->sinks[run->one_sink ? 0 : stream];
}

/* A line of our own, in its turn among the ranks'. */
static void __attribute__((format(printf, 2, 3))) say(struct run *run, const char *fmt, ...)
{
    char line[512] = "zero-run: ";
    size_t n = strlen(line);
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(line + n, sizeof line - n - 1, fmt, ap);
    va_end(ap);
    strcat(line, "\n");
    zr_sink_put(sink_of(run, 1), line, strlen(line));
}

/* ", ending ..." or nothing. */
static const char *ending_others(const struct run *run, char *text, size_t bytes)
{
    snprintf(text, bytes, "; ending %d other rank%s", run->n_alive, run->n_alive == 1 ? "" : "s");
    return run->n_alive ? text : "";
}

static void signal_ranks(struct run *run, int signum)
{
    for (int i = 0; i < run->n_started; i++)
        if (run->ranks[i].alive)
            kill(-run->ranks[i].pid, signum);
}

static void on_grace_over(uv_timer_t *timer);

static void start_timer(struct run *run, uint64_t ms)
{
    uv_timer_start(&run->grace, on_grace_over, ms, 0);
}

static void end_all(struct run *run, int exit_code)
{
    if (run->phase != RUNNING)
        return;
    run->phase = ENDING;
    run->exit_code = exit_code;
    signal_ranks(run, SIGTERM);
    start_timer(run, GRACE_MS);
}

/* Whether the process group of a rank has members: the rank itself or what it started. The kernel gives out
 * no number anew that is a group's; in the few seconds after the group is empty that would take all other
 * numbers to have been given out. */
static bool group_lives(const struct rank *r)
{
    if (r->pid == 0 || r->alive)
        return r->alive;
    /* Orphans come to us (prepare), and count until they are reaped. */
    while (waitpid(-r->pid, NULL, WNOHANG) > 0)
        ;
    return kill(-r->pid, 0) == 0;
}

static void kill_all(struct run *run)
{
    run->phase = KILLED;
    for (int i = 0; i < run->n_started; i++) {
        const struct rank *r = &run->ranks[i];
        bool holds_output = r->out[0].open || r->out[1].open;
        if (group_lives(r) && (r->alive || holds_output || run->exit_code))
            kill(-r->pid, SIGKILL);
    }
    start_timer(run, AFTER_KILL_MS);
}

static bool output_written(const struct run *run)
{
    return zr_sink_idle(&run->sinks[0]) && zr_sink_idle(&run->sinks[1]);
}

static void finish_if_over(struct run *run)
{
    if (run->n_alive > 0)
        return;
    if (run->hurry) {
        uv_stop(&run->loop);
        return;
    }
    bool leftovers = run->n_open > 0; /* what ranks started and left behind */
    for (int i = 0; i < run->n_started && run->phase == ENDING; i++)
        leftovers |= group_lives(&run->ranks[i]);
    if (leftovers && !uv_is_active((uv_handle_t *)&run->grace))
        start_timer(run, GRACE_MS);
    if (!leftovers && output_written(run))
        uv_stop(&run->loop);
}

static void on_grace_over(uv_timer_t *timer)
{
    struct run *run = timer->data;
    /* A pipe is not at its end while a slow reader keeps us from reading it: that is no fault of the ranks.
     */
    bool waiting_for_reader = run->n_alive == 0 && !output_written(run);
    if (waiting_for_reader)
        start_timer(run, GRACE_MS);
    else if (run->phase != KILLED)
        kill_all(run);
    else if (run->n_alive == 0)
        uv_stop(&run->loop);
    else
        start_timer(run, AFTER_KILL_MS); /* stuck in the kernel: it will go */
}

static void on_exit_of(uv_process_t *process, int64_t code, int signum)
{
    struct rank *r = process->data;
    struct run *run = r->run;
    r->alive = false;
    r->code = code;
    r->signal = signum;
    run->n_alive--;
    bool failed = code != 0 || signum != 0;
    /* A rank that was killed is the likelier cause than one that returned an error, perhaps on its account.
     */
    if (failed && (!run->candidate || (signum && !run->candidate->signal)))
        run->candidate = r;
}

/* A crash at a touch of memory that a bracket does not hold is what check mode explains. */
static void advise(struct run *run, const struct rank *r)
{
    const char *check = getenv("ZERO_CHECK"), *stage = getenv("ZERO_STAGE");
    int signum = r->signal ? r->signal : (int)r->code - 128; /* a shell says it so */
    bool on = check && *check && strcmp(check, "0");
    bool unsharded = stage && (!strcmp(stage, "0") || !strcmp(stage, "1"));
    if ((signum == SIGSEGV || signum == SIGBUS) && !on && !unsharded)
        say(run,
            "if it trains at stage 2 or 3, try ZERO_CHECK=1: it tells which tensor was touched outside its "
            "bracket");
}

/* After every round of events: exits that were seen together are judged together. */
static void on_judge(uv_check_t *check)
{
    struct run *run = check->data;
    struct rank *r = run->candidate;
    if (r && run->phase == RUNNING) {
        char others[64];
        ending_others(run, others, sizeof others);
        if (r->signal)
            say(run, "rank %d was killed by signal %d (%s)%s", r->number, r->signal, strsignal(r->signal),
                run->n_alive ? others : "");
        else
            say(run, "rank %d exited with code %d%s", r->number, (int)r->code, run->n_alive ? others : "");
        advise(run, r);
        end_all(run, r->signal ? 128 + r->signal : (int)r->code);
    }
    finish_if_over(run);
}

static void on_signal(uv_signal_t *handle, int signum)
{
    struct run *run = handle->data;
    bool asks_to_end = signum != SIGUSR1 && signum != SIGUSR2;
    run->n_asked += asks_to_end;
    if (!asks_to_end || run->n_asked == 1) {
        signal_ranks(run, signum);
    } else if (run->n_asked == 2 && run->phase == RUNNING) {
        say(run, "second signal %d (%s); ending %d ranks", signum, strsignal(signum), run->n_alive);
        end_all(run, 128 + signum);
    } else if (run->n_asked > 2) {
        run->hurry = true;
        kill_all(run);
    }
}

static void on_end_of_output(struct zr_lines *l)
{
    struct run *run = l->arg;
    run->n_open--;
}

static void on_written(struct zr_sink *sink)
{
    struct run *run = sink->arg;
    if (sink->error && sink == &run->sinks[0] && run->phase == RUNNING) {
        char others[64];
        say(run, "standard output: %s%s", strerror(sink->error), ending_others(run, others, sizeof others));
        end_all(run, sink->error == EPIPE ? 128 + SIGPIPE : 1);
    }
    for (int i = 0; i < run->n_started && !run->o->raw; i++)
        for (int stream = 0; stream < 2; stream++)
            zr_lines_update(&run->ranks[i].out[stream]);
}

/* Binds a free port and keeps it bound, not listening, until all is over: nobody is given the same one
 * meanwhile, and rank 0 can still listen on it, for Linux lets sockets with SO_REUSEADDR (libuv's and torch's
 * have it) share a port nobody listens on. */
static int hold_port(struct run *run, int *port)
{
    struct sockaddr_in at;
    int n = sizeof at;
    int err = uv_ip4_addr("127.0.0.1", 0, &at);
    if (!err)
        err = uv_tcp_init(&run->loop, &run->port_holder);
    if (!err)
        err = uv_tcp_bind(&run->port_holder, (const struct sockaddr *)&at, 0);
    if (!err)
        err = uv_tcp_getsockname(&run->port_holder, (struct sockaddr *)&at, &n);
    if (!err)
        *port = ntohs(at.sin_port);
    return err;
}

/* Standard output is a terminal, so that it comes as it is written. Otherwise real pipes, not libuv's socket
 * pairs: a rank must be able to open /dev/stdout. */
static int open_ends(struct run *run, const struct rank *r, int stream, uv_file ends[2])
{
    int err = UV_ENOTTY;
    if (stream == 0 && !run->no_terminals) {
        err = zr_run_terminal(ends, snprintf(NULL, 0, "[%d] ", r->number));
        if (err) {
            run->no_terminals = true;
            say(run,
                "no pseudo-terminal for rank %d: %s; output from here on is through pipes, and may come late",
                r->number, uv_strerror(err));
        }
    }
    return err ? uv_pipe(ends, UV_NONBLOCK_PIPE, 0) : 0;
}

static int open_output(struct run *run, struct rank *r, uv_stdio_container_t *stdio)
{
    for (int stream = 0; stream < 2; stream++) {
        uv_file ends[2];
        int err = open_ends(run, r, stream, ends);
        if (err)
            return err;
        stdio[1 + stream] = (uv_stdio_container_t){.flags = UV_INHERIT_FD, .data.fd = ends[1]};
        err = zr_lines_open(&r->out[stream], &run->loop, ends[0], r->number, sink_of(run, stream),
                            on_end_of_output, run);
        if (err)
            return err;
        run->n_open++;
    }
    return 0;
}

static int start_rank(struct run *run, int number, int port, const char *job)
{
    const struct zr_run_options *o = run->o;
    struct rank *r = &run->ranks[number];
    *r = (struct rank){.run = run, .number = number};
    bool have_input = number == 0 && fcntl(0, F_GETFD) != -1;
    uv_stdio_container_t stdio[3] = {
        {.flags = have_input ? UV_INHERIT_FD : UV_IGNORE, .data.fd = 0}, /* ignored: /dev/null */
        {.flags = UV_INHERIT_FD, .data.fd = 1},
        {.flags = UV_INHERIT_FD, .data.fd = 2}};
    int n_args = 0;
    while (o->argv[n_args])
        n_args++;
    char parent[16];
    snprintf(parent, sizeof parent, "%d", (int)getpid());
    char **args = calloc((size_t)n_args + 5, sizeof *args);
    char **env = zr_run_environment(o, number, port, job);
    int err = args && env ? 0 : UV_ENOMEM;
    if (!err && !o->raw)
        err = open_output(run, r, stdio);
    if (!err) {
        args[0] = (char *)"zero-run";
        args[1] = (char *)ZR_RUN_EXEC;
        args[2] = parent;
        args[3] = (char *)o->path;
        memcpy(args + 4, o->argv, (size_t)n_args * sizeof *args);
        uv_process_options_t spawn = {
            .exit_cb = on_exit_of,
            .file = "/proc/self/exe",
            .args = args,
            .env = env,
            .flags =
                UV_PROCESS_DETACHED, /* a session of its own: a terminal's Ctrl-C comes once, through us */
            .stdio_count = 3,
            .stdio = stdio,
        };
        err = uv_spawn(&run->loop, &r->process, &spawn);
    }
    if (!err) {
        r->process.data = r;
        r->pid = r->process.pid;
        r->alive = true;
        run->n_alive++;
    }
    for (int stream = 1; stream < 3 && !o->raw; stream++)
        if (stdio[stream].data.fd > 2)
            close(stdio[stream].data.fd);
    free(args);
    free(env);
    return err;
}

static int prepare(struct run *run)
{
    int err = uv_loop_init(&run->loop);
    if (err)
        return err;
    prctl(PR_SET_CHILD_SUBREAPER, 1); /* to know when the last of a rank's group is gone */
    struct stat out, both;
    run->one_sink =
        !fstat(1, &out) && !fstat(2, &both) && out.st_dev == both.st_dev && out.st_ino == both.st_ino;
    for (int stream = 0; stream < 2; stream++)
        zr_sink_init(&run->sinks[stream], &run->loop, stream + 1, on_written, run);
    for (size_t i = 0; i < N_FORWARDED && !err; i++) {
        run->signals[i].data = run;
        err = uv_signal_init(&run->loop, &run->signals[i]);
        if (!err)
            err = uv_signal_start(&run->signals[i], on_signal, forwarded[i]);
    }
    if (err)
        return err;
    uv_timer_init(&run->loop, &run->grace);
    run->grace.data = run;
    uv_check_init(&run->loop, &run->judge);
    run->judge.data = run;
    return uv_check_start(&run->judge, on_judge);
}

/* Tells one run from another, on this host and over time. */
static void name_job(char *text, size_t bytes)
{
    uv_timeval64_t now = {0};
    uv_gettimeofday(&now);
    snprintf(text, bytes, "zero-run.%d.%lld.%06d", (int)getpid(), (long long)now.tv_sec, (int)now.tv_usec);
}

int zr_run_ranks(const struct zr_run_options *o)
{
    static struct run run; /* not on the stack: a worker may be in a write when we leave in a hurry */
    run.o = o;
    char job[64];
    name_job(job, sizeof job);
    signal(SIGPIPE, SIG_IGN); /* a reader that left is an error of write() */
    int port = o->port;
    int err = prepare(&run);
    if (!err && !port)
        err = hold_port(&run, &port);
    run.ranks = calloc((size_t)o->n_ranks, sizeof *run.ranks);
    if (err || !run.ranks) {
        fprintf(stderr, "zero-run: cannot start: %s\n", uv_strerror(run.ranks ? err : UV_ENOMEM));
        return 1;
    }
    while (run.n_started < o->n_ranks && !err) {
        err = start_rank(&run, run.n_started, port, job);
        run.n_started++;
    }
    if (err) {
        char others[64];
        say(&run, "cannot start rank %d: %s%s", run.n_started - 1, uv_strerror(err),
            ending_others(&run, others, sizeof others));
        end_all(&run, 1);
    }
    uv_run(&run.loop, UV_RUN_DEFAULT);
    return run.exit_code;
}
