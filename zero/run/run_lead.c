/* SPDX-License-Identifier: Apache-2.0 */
/* run_lead.c: node 0 of a job, which is often the only node. It tells the other nodes which ranks to start,
 * finds out who failed first, and ends all ranks. It starts them again if that is wanted and useful
 * (run_decide.h), and decides when the job is over. */
#include "kernels/error.h"
#include "kernels/limits.h"
#include "zero/run/run_job.h"

#include <errno.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* How long node 0 waits after a rank has returned an error. The cause may be a rank that was killed on
 * another node, and the report of that may still be on its way. */
#ifndef ZR_RUN_CAUSE_WAIT_MS
#define ZR_RUN_CAUSE_WAIT_MS 200
#endif
enum { FAILURE_CHARS = 640 };

struct zr_run_lead {
    /* (n_nodes) What node 0 knows of each node. */
    struct lead_node {
        bool lost;
        /* Its ranks of this attempt and what they started are gone, or the node is lost. */
        bool over;
        struct zr_run_assignment assignment;
    } * nodes;
    int n_nodes;
    /* Processes that ranks had started are still there. */
    bool leftovers;
    /* How far the ranks of this attempt have come. */
    struct zr_run_reached reached;
    /* Over all attempts, as in struct zr_run_ended. */
    int64_t max_step;
    int n_without_step, first_world, first_accum;
    /* The likeliest cause of the attempt's failure so far. kind 0: none. */
    struct zr_run_failure failure;
    /* The reason, if it is a lost node. */
    char why[400];
    /* Time at which the first failure was reported (uv_hrtime). */
    uint64_t failed_ns;
    /* The failure was printed, and all ranks are being ended. */
    bool is_failed;
    /* The program cannot be started, so another attempt would fail, too. */
    bool cannot_start;
    /* Runs for ZR_RUN_CAUSE_WAIT_MS after a rank has returned an error. */
    uv_timer_t cause_wait;
    /* Holds the port of rank 0 (hold_port). */
    uv_tcp_t *port_holder;
};

/* Sends a message to all other nodes that are not lost, except node `except`. */
static void send_others(struct zr_run_job *j, int except, const struct zr_run_message *m)
{
    for (int i = 1; i < j->lead->n_nodes; i++)
        if (i != except && !j->lead->nodes[i].lost)
            zr_run_nodes_send(j->nodes, i, m);
}

static struct zr_run_message __attribute__((format(printf, 3, 4)))
message(enum zr_run_word word, int number, const char *fmt, ...)
{
    struct zr_run_message m = {.word = word, .number = number};
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(m.text, sizeof m.text, fmt, ap);
    va_end(ap);
    return m;
}

/* --- what failed --- */

/* Returns how likely a failure is the cause. A killed rank or a lost node is likelier than a rank that
 * returns an error. */
static int likelihood(const struct zr_run_failure *f)
{
    return f->kind == 0 ? 0 : f->kind == ZR_RUN_RANK_ENDED && !f->signal ? 1 : 2;
}

static int exit_code_of(const struct zr_run_failure *f)
{
    if (f->kind == ZR_RUN_RANK_ENDED)
        return f->signal ? 128 + f->signal : f->code;
    return f->kind == ZR_RUN_OUTPUT_LOST && f->code == EPIPE ? 128 + SIGPIPE : 1;
}

/* Writes " on node 1 (b)" if there are several nodes. */
static void say_where(const struct zr_run_job *j, int node, char *text, size_t n_text)
{
    text[0] = 0;
    if (j->lead->n_nodes > 1)
        snprintf(text, n_text, " on node %d (%s)", node, zr_run_nodes_of(j->nodes, node)->host);
}

/* Writes "; ending ...", or nothing. */
static void say_others(const struct zr_run_job *j, const struct zr_run_failure *f, char *text, size_t n_text)
{
    text[0] = 0;
    if (j->lead->n_nodes > 1)
        snprintf(text, n_text, "; ending all ranks");
    else if (f->n_others)
        snprintf(text, n_text, "; ending %d other rank%s", f->n_others, f->n_others == 1 ? "" : "s");
}

static void say_failure(const struct zr_run_job *j, const struct zr_run_failure *f, char text[FAILURE_CHARS])
{
    char where[112], others[48], why[ZR_SYSTEM_WORDS];
    const struct zr_run_assignment *s = &j->lead->nodes[f->node].assignment;
    say_where(j, f->node, where, sizeof where);
    say_others(j, f, others, sizeof others);
    if (f->kind == ZR_RUN_NODE_LOST)
        snprintf(text, FAILURE_CHARS, "node %d (%s, ranks %d to %d) is lost: %s%s", f->node,
                 zr_run_nodes_of(j->nodes, f->node)->host, s->first_rank, s->first_rank + s->n_ranks - 1,
                 j->lead->why, others);
    else if (f->kind == ZR_RUN_NOT_STARTED)
        snprintf(text, FAILURE_CHARS, "cannot start rank %d%s: %s%s", f->rank, where,
                 f->node ? uv_strerror(f->code) : zr_limit_words(-f->code, uv_strerror(f->code), why),
                 others);
    else if (f->kind == ZR_RUN_OUTPUT_LOST)
        snprintf(text, FAILURE_CHARS, "standard output%s: %s%s", where,
                 f->node ? strerror(f->code) : zr_system_words(f->code, why), others);
    else if (f->signal)
        snprintf(text, FAILURE_CHARS, "rank %d%s was killed by signal %d (%s)%.*s%s", f->rank, where,
                 f->signal, strsignal(f->signal), ZR_RUN_MESSAGE_BYTES - 1, f->last, others);
    else
        snprintf(text, FAILURE_CHARS, "rank %d%s exited with code %d%.*s%s", f->rank, where, f->code,
                 ZR_RUN_MESSAGE_BYTES - 1, f->last, others);
}

/* Suggests check mode after a crash that may come from memory outside its bracket. */
static void advise(struct zr_run_job *j, const struct zr_run_failure *f)
{
    const char *check = getenv("ZERO_CHECK"), *stage = getenv("ZERO_STAGE");
    int signum = f->signal ? f->signal : f->code - 128; /* a shell's exit code for a signal */
    bool on = check && *check && strcmp(check, "0");
    bool unsharded = stage && (!strcmp(stage, "0") || !strcmp(stage, "1"));
    if (f->kind == ZR_RUN_RANK_ENDED && (signum == SIGSEGV || signum == SIGBUS) && !on && !unsharded)
        zr_run_say(&j->node,
                   "if it trains at stage 2 or 3, try ZERO_CHECK=1: it tells which tensor was touched "
                   "outside its bracket");
}

/* Ends an attempt that has failed. Prints the cause on all nodes, and ends all ranks. */
static void end_failed_attempt(struct zr_run_job *j)
{
    struct zr_run_lead *l = j->lead;
    const struct zr_run_failure *f = &l->failure;
    char text[FAILURE_CHARS];
    l->is_failed = true;
    uv_timer_stop(&l->cause_wait);
    say_failure(j, f, text);
    zr_run_say(&j->node, "%s", text);
    advise(j, f);
    j->output_lost |= f->kind == ZR_RUN_OUTPUT_LOST;
    l->cannot_start |=
        f->kind == ZR_RUN_NOT_STARTED || (f->kind == ZR_RUN_RANK_ENDED && !f->signal &&
                                          (f->code == ZR_RUN_NOT_RUNNABLE || f->code == ZR_RUN_NOT_FOUND));
    const struct zr_run_message end = message(ZR_RUN_END, 0, "%s", text);
    send_others(j, 0, &end);
    zr_run_job_end(j, exit_code_of(f));
}

static void on_cause_wait_over(uv_timer_t *t)
{
    struct zr_run_job *j = t->data;
    if (!j->lead->is_failed)
        end_failed_attempt(j);
}

static void on_failure(struct zr_run_job *j, const struct zr_run_failure *f)
{
    struct zr_run_lead *l = j->lead;
    if (l->is_failed)
        return;
    if (!l->failure.kind)
        l->failed_ns = uv_hrtime();
    if (likelihood(f) > likelihood(&l->failure))
        l->failure = *f;
    if (l->n_nodes == 1 || likelihood(f) > 1)
        end_failed_attempt(j);
    else if (!uv_is_active((uv_handle_t *)&l->cause_wait))
        uv_timer_start(&l->cause_wait, on_cause_wait_over, ZR_RUN_CAUSE_WAIT_MS, 0);
}

/* --- attempts --- */

static void free_handle(uv_handle_t *h)
{
    free(h);
}

/* Binds to all addresses of this host if other hosts connect to it, otherwise to loopback. */
static int bind_anywhere(uv_tcp_t *holder, bool from_elsewhere)
{
    struct sockaddr_in6 v6;
    struct sockaddr_in v4;
    int err = from_elsewhere ? uv_ip6_addr("::", 0, &v6) : UV_EAFNOSUPPORT;
    if (!err)
        err = uv_tcp_bind(holder, (const struct sockaddr *)&v6, 0);
    if (err) {
        uv_ip4_addr(from_elsewhere ? "0.0.0.0" : "127.0.0.1", 0, &v4);
        err = uv_tcp_bind(holder, (const struct sockaddr *)&v4, 0);
    }
    return err;
}

/* Binds a free port, and keeps it bound but not listening until the attempt is over. Nobody else gets the
 * port meanwhile. Rank 0 can still listen on it, because Linux lets sockets with SO_REUSEADDR (libuv's and
 * torch's have it) share a port that nobody listens on. The next attempt gets another port, so a late process
 * of the last attempt reaches nobody. */
static int hold_port(struct zr_run_job *j, int *port)
{
    struct zr_run_lead *l = j->lead;
    struct sockaddr_storage at;
    int n = sizeof at;
    if (l->port_holder)
        uv_close((uv_handle_t *)l->port_holder, free_handle);
    l->port_holder = malloc(sizeof *l->port_holder);
    int err = l->port_holder ? uv_tcp_init(&j->node.loop, l->port_holder) : UV_ENOMEM;
    if (!err)
        err = bind_anywhere(l->port_holder, l->n_nodes > 1);
    if (!err)
        err = uv_tcp_getsockname(l->port_holder, (struct sockaddr *)&at, &n);
    if (!err) /* both families have the port at this offset */
        *port = ntohs(((const struct sockaddr_in *)&at)->sin_port);
    return err;
}

/* Assigns ranks to the nodes that are left, node by node. */
static void assign_ranks(struct zr_run_job *j)
{
    struct zr_run_lead *l = j->lead;
    int first = 0;
    for (int i = 0; i < l->n_nodes; i++) {
        struct lead_node *n = &l->nodes[i];
        n->over = n->lost;
        n->assignment = j->assignment;
        n->assignment.node = i;
        n->assignment.first_rank = first;
        n->assignment.n_ranks = n->lost ? 0 : zr_run_nodes_of(j->nodes, i)->n_ranks;
        first += n->assignment.n_ranks;
    }
}

/* Starts the attempt that j->assignment describes. said: the reason for a restart, "" at first. */
static void start_attempt(struct zr_run_job *j, const char *said)
{
    struct zr_run_lead *l = j->lead;
    l->failure.kind = 0;
    l->is_failed = l->leftovers = false;
    l->reached = (struct zr_run_reached){.step = -1};
    int err = j->node.o->port ? 0 : hold_port(j, &j->assignment.port);
    assign_ranks(j);
    if (err) {
        on_failure(j, &(struct zr_run_failure){.kind = ZR_RUN_NOT_STARTED, .code = err});
        for (int i = 1; i < l->n_nodes; i++)
            l->nodes[i].over = true;
        j->role->on_over(j, false, l->reached);
        return;
    }
    for (int i = 1; i < l->n_nodes; i++) {
        struct zr_run_message m = message(ZR_RUN_START, 0, "%s", said);
        m.assignment = l->nodes[i].assignment;
        if (!l->nodes[i].lost)
            zr_run_nodes_send(j->nodes, i, &m);
    }
    j->assignment = l->nodes[0].assignment;
    zr_run_job_start(j);
}

static int n_available(const struct zr_run_job *j)
{
    int n = 0;
    for (int i = 0; i < j->lead->n_nodes; i++)
        n += j->lead->nodes[i].lost ? 0 : zr_run_nodes_of(j->nodes, i)->n_ranks;
    return n;
}

/* Adds the progress of the attempt that is over to that of the job. */
static void count_progress(struct zr_run_job *j)
{
    struct zr_run_lead *l = j->lead;
    bool is_new = l->reached.step > l->max_step;
    if (j->assignment.attempt > 0)
        l->n_without_step = is_new ? 0 : l->n_without_step + 1;
    if (is_new)
        l->max_step = l->reached.step;
    if (!l->first_accum && l->reached.accum) {
        l->first_accum = l->reached.accum;
        l->first_world = j->assignment.world;
    }
}

/* Returns whether there is another attempt, and sets j->assignment for it. */
static bool decide(struct zr_run_job *j, struct zr_run_next *next)
{
    const struct zr_run_ended ended = {
        .n_attempts = j->assignment.attempt + 1,
        .world = j->assignment.world,
        .n_available = n_available(j),
        .asked = j->n_asked > 0 || j->output_lost,
        .cannot_start = j->lead->cannot_start,
        .leftovers = j->lead->leftovers,
        .max_step = j->lead->max_step,
        .n_without_step = j->lead->n_without_step,
        .first_world = j->lead->first_world,
        .first_accum = j->lead->first_accum,
        .accum = j->assignment.accum,
    };
    zr_run_decide(&j->node.o->limits, &ended, next);
    size_t used = strlen(next->text);
    if (next->restart)
        snprintf(next->text + used, sizeof next->text - used, " (%.2f s after the failure)",
                 (double)(uv_hrtime() - j->lead->failed_ns) * 1e-9);
    if (next->text[0])
        zr_run_say(&j->node, "%s", next->text);
    j->assignment.attempt++;
    j->assignment.world = next->world;
    j->assignment.accum = next->accum;
    return next->restart;
}

/* Called when the ranks of all nodes are gone. */
static void end_attempt(struct zr_run_job *j)
{
    struct zr_run_next next = {0};
    if (j->lead->failure.kind && !j->lead->is_failed)
        end_failed_attempt(j);
    count_progress(j);
    if (j->exit_code && decide(j, &next)) {
        j->exit_code = 0;
        start_attempt(j, next.text);
        return;
    }
    const struct zr_run_message quit = message(ZR_RUN_QUIT, j->exit_code, "%s", next.text);
    send_others(j, 0, &quit);
    zr_run_job_over(j);
}

/* Called when the ranks of a node are gone. */
static void node_over(struct zr_run_job *j, int node, bool leftovers, struct zr_run_reached r)
{
    struct zr_run_lead *l = j->lead;
    l->reached.step = r.step > l->reached.step ? r.step : l->reached.step;
    l->reached.accum = r.accum > l->reached.accum ? r.accum : l->reached.accum;
    l->leftovers |= leftovers;
    l->nodes[node].over = true;
    for (int i = 0; i < l->n_nodes; i++)
        if (!l->nodes[i].over)
            return;
    end_attempt(j);
}

/* --- events --- */

static void on_over(struct zr_run_job *j, bool leftovers, struct zr_run_reached r)
{
    node_over(j, 0, leftovers, r);
}

static void on_signal(struct zr_run_job *j, int signum)
{
    const struct zr_run_message m = message(ZR_RUN_SIGNAL, signum, "%s", "");
    send_others(j, 0, &m);
}

static void on_message(struct zr_run_job *j, int from, const struct zr_run_message *m)
{
    const struct zr_run_message forward = message(ZR_RUN_SIGNAL, m->number, "%s", "");
    struct zr_run_failure failure = m->failure;
    failure.node = from;
    switch (m->word) {
    case ZR_RUN_FAILED:
        on_failure(j, &failure);
        break;
    case ZR_RUN_OVER:
        node_over(j, from, m->number, m->reached);
        break;
    case ZR_RUN_SIGNAL:
        zr_run_job_signal(j, m->number);
        send_others(j, from, &forward);
        break;
    default:
        break; /* messages for the other nodes only */
    }
}

static void on_lost(struct zr_run_job *j, int node, const char *why)
{
    struct zr_run_lead *l = j->lead;
    bool had_ranks = !l->nodes[node].over;
    if (j->over || l->nodes[node].lost)
        return;
    l->nodes[node].lost = true;
    if (!had_ranks || l->is_failed) {
        zr_run_say(&j->node, "node %d (%s) is lost: %s", node, zr_run_nodes_of(j->nodes, node)->host, why);
    } else {
        snprintf(l->why, sizeof l->why, "%s", why);
        on_failure(j, &(struct zr_run_failure){.kind = ZR_RUN_NODE_LOST, .node = node});
    }
    if (had_ranks)
        node_over(j, node, false, (struct zr_run_reached){.step = -1});
}

/* --- the beginning --- */

static void name_job(char *text, size_t bytes)
{
    uv_timeval64_t now = {0};
    uv_gettimeofday(&now);
    snprintf(text, bytes, "zero-run.%d.%lld.%06d", (int)getpid(), (long long)now.tv_sec, (int)now.tv_usec);
}

/* Writes the address of rank 0. If the nodes meet by a file, it is the name of this host, which may not be
 * reachable from everywhere. Only programs without libzero need it then: libzero's ranks find rank 0 by the
 * file. */
static void write_rank_0_host(const struct zr_run_options *o, char *text, size_t bytes)
{
    if (o->n_nodes == 1)
        snprintf(text, bytes, "127.0.0.1");
    else if (!o->meet_file[0])
        snprintf(text, bytes, "%s", o->meet_host);
    else if (gethostname(text, bytes))
        snprintf(text, bytes, "localhost");
    text[bytes - 1] = 0;
}

static void begin(struct zr_run_job *j)
{
    static struct zr_run_lead lead;
    const struct zr_run_options *o = j->node.o;
    struct zr_run_lead *l = j->lead = &lead;
    l->n_nodes = o->n_nodes;
    l->max_step = -1;
    l->nodes = calloc((size_t)o->n_nodes, sizeof *l->nodes);
    if (!l->nodes) {
        zr_run_say(&j->node, "no memory for %d nodes", o->n_nodes);
        j->exit_code = 1;
        zr_run_job_over(j);
        return;
    }
    l->cause_wait.data = j;
    uv_timer_init(&j->node.loop, &l->cause_wait);
    j->assignment.port = o->port;
    write_rank_0_host(o, j->assignment.host, sizeof j->assignment.host);
    name_job(j->assignment.job, sizeof j->assignment.job);
    j->assignment.world = n_available(j);
    start_attempt(j, "");
}

const struct zr_run_role zr_run_leads = {.begin = begin,
                                         .on_failure = on_failure,
                                         .on_over = on_over,
                                         .on_signal = on_signal,
                                         .on_message = on_message,
                                         .on_lost = on_lost};
