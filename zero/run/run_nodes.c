/* SPDX-License-Identifier: Apache-2.0 */
/* run_nodes.c: lets the nodes of a job meet over the rendezvous of ranks, compares their options, and passes
 * messages between them. */
#include "zero/run/run_nodes.h"
#include "comm/meet/meeting_point.h"
#include "zero/zero.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define TEXT_OF(x) #x
#define VERSION(x) TEXT_OF(x)
/* A test builds zero-run with another version. */
#ifndef ZR_RUN_VERSION
#define ZR_RUN_VERSION                                                                                       \
    VERSION(ZERO_VERSION_MAJOR) "." VERSION(ZERO_VERSION_MINOR) "." VERSION(ZERO_VERSION_PATCH)
#endif

/* A node's options, which nodes compare. In every version the struct has this size and begins with the
 * version. */
struct node_options {
    char version[32];
    struct zr_run_member member;
    int32_t restarts, min_ranks, allow_batch_change, port, silent_ms, cannot_run, message_bytes;
    char reserved[368];
};
_Static_assert(sizeof(struct node_options) == 512, "versions are compared before anything else is");

struct zr_run_nodes {
    struct zr_rendezvous *meet;
    struct zr_run_member *members;
    int n, node;
    void (*on_message)(void *arg, int from, const struct zr_run_message *m);
    void (*on_lost)(void *arg, int node, const char *why);
    void *arg;
};

/* --- words --- */

/* Translates a message of the rendezvous about ranks into one about nodes. Parts of paths are not changed. */
static void reword_for_nodes(const char *text, char *out, size_t n_out)
{
    static const char *const words[][2] = {{"rank", "node"}, {"ranks", "nodes"}, {"world", "--nnodes"}};
    size_t used = 0;
    char before = 0;
    while (*text && used + 1 < n_out) {
        size_t n = 1;
        const char *put = text;
        while (isalnum((unsigned char)*text) && (isalnum((unsigned char)text[n]) || text[n] == '_'))
            n++;
        size_t n_put = n;
        for (size_t i = 0; i < sizeof words / sizeof *words; i++)
            if (strlen(words[i][0]) == n && !memcmp(text, words[i][0], n) && before != '/' &&
                text[n] != '/') {
                put = words[i][1];
                n_put = strlen(put);
            }
        n_put = n_put < n_out - used ? n_put : n_out - used - 1;
        memcpy(out + used, put, n_put);
        used += n_put;
        text += n;
        before = text[-1];
    }
    out[used] = 0;
}

static int fail_reworded(int err)
{
    char text[ZR_ERROR_BYTES];
    reword_for_nodes(zr_error_text(), text, sizeof text);
    return zr_fail(err, "%s", text);
}

/* --- what nodes were given --- */

static struct node_options own_options(const struct zr_run_options *o)
{
    struct node_options c = {.version = ZR_RUN_VERSION,
                             .member.n_ranks = o->n_ranks,
                             .restarts = o->limits.restarts,
                             .min_ranks = o->limits.min_ranks,
                             .allow_batch_change = o->limits.allow_batch_change,
                             .port = o->port,
                             .silent_ms = (int32_t)o->silent_ms,
                             .cannot_run = !o->path,
                             .message_bytes = sizeof(struct zr_run_message)};
    if (gethostname(c.member.host, sizeof c.member.host - 1))
        strcpy(c.member.host, "?");
    return c;
}

/* Reports an option that differs between a node and node 0. */
static int fail_option(const struct node_options *c, int node, const char *what, int value, int value_0)
{
    return zr_fail(ZERO_ERR_MISMATCH,
                   "%s is %d on node %d (%s), and %d on node 0 (%s): it must be the same on all nodes", what,
                   value, node, c[node].member.host, value_0, c[0].member.host);
}

/* Finds the first node that differs from node 0. All nodes find the same one. */
static int compare(const struct node_options *c, int n)
{
    for (int i = 1; i < n; i++)
        if (strncmp(c[i].version, c[0].version, sizeof c->version) != 0)
            return zr_fail(
                ZERO_ERR_MISMATCH,
                "node %d (%s) has libzero %.31s, node 0 (%s) has libzero %.31s: all nodes need the "
                "same",
                i, c[i].member.host, c[i].version, c[0].member.host, c[0].version);
    for (int i = 1; i < n; i++)
        if (c[i].message_bytes != c[0].message_bytes)
            return zr_fail(
                ZERO_ERR_MISMATCH,
                "node %d (%s) and node 0 (%s) have libzero %.31s of different builds: all nodes need "
                "the same",
                i, c[i].member.host, c[0].member.host, c[0].version);
    for (int i = 0; i < n; i++)
        if (c[i].cannot_run)
            return zr_fail(ZERO_ERR_ARG, "node %d (%s) cannot run the program", i, c[i].member.host);
    for (int i = 1; i < n; i++) {
        if (c[i].restarts != c[0].restarts)
            return fail_option(c, i, "--restarts", c[i].restarts, c[0].restarts);
        if (c[i].min_ranks != c[0].min_ranks)
            return fail_option(c, i, "--min-ranks", c[i].min_ranks, c[0].min_ranks);
        if (c[i].allow_batch_change != c[0].allow_batch_change)
            return fail_option(c, i, "--allow-batch-change", c[i].allow_batch_change,
                               c[0].allow_batch_change);
        if (c[i].port != c[0].port)
            return fail_option(c, i, "--port", c[i].port, c[0].port);
        if (c[i].silent_ms != c[0].silent_ms)
            return fail_option(c, i, "--node-timeout", c[i].silent_ms / 1000, c[0].silent_ms / 1000);
    }
    return 0;
}

/* Checks the number of ranks on all nodes. */
static int check_n_ranks(const struct node_options *c, int n, int min_ranks)
{
    int64_t all = 0;
    for (int i = 0; i < n; i++)
        all += c[i].member.n_ranks;
    if (all > ZR_MAX_RANKS)
        return zr_fail(ZERO_ERR_ARG, "%d nodes have %lld ranks: up to %d are allowed", n, (long long)all,
                       ZR_MAX_RANKS);
    if (min_ranks > all)
        return zr_fail(ZERO_ERR_ARG, "--min-ranks is %d, and %d node%s %s %lld rank%s", min_ranks, n,
                       n == 1 ? "" : "s", n == 1 ? "has" : "have", (long long)all, all == 1 ? "" : "s");
    return 0;
}

/* --- meeting --- */

/* Names the job. Nodes with another ZERO_JOB refuse each other. If several jobs share a folder, each has a
 * file whose name follows from the job's name and key. */
static void name_meeting(struct zr_world *w)
{
    const char *given = getenv("ZERO_JOB");
    snprintf(w->job, sizeof w->job, "nodes of zero-run%s%s", given ? " " : "", given ? given : "");
}

/* The result of looking up a host name. */
struct looked_up {
    bool is_done;
    struct zr_looked_up found;
};

static void on_looked_up(void *arg, const struct zr_looked_up *found)
{
    struct looked_up *l = arg;
    l->found = *found;
    l->is_done = true;
}

/* Whether one of these interfaces has the address, or it is a loopback address, which many hosts have for
 * their own name. */
static bool may_listen_at(const struct zr_interfaces *mine, const union zr_address *at)
{
    bool is_mine = zr_address_is_loopback(at);
    for (int i = 0; i < mine->n; i++)
        is_mine |= zr_address_same(&mine->of[i].address, at);
    return is_mine;
}

static int check_addresses(const struct zr_world *w, const struct zr_interfaces *mine,
                           const struct zr_looked_up *found)
{
    char at[ZR_ADDRESS_CHARS] = "", name[ZR_INTERFACE_CHARS] = "";
    for (int i = 0; i < found->n; i++) {
        if (may_listen_at(mine, &found->at[i]))
            return 0;
        if (!name[0]) {
            zr_interface_of(&found->at[i], name);
            zr_address_print_host(&found->at[i], at);
        }
    }
    if (!name[0]) /* no interface of this host has it; it may be a gateway's */
        return 0;
    return zr_fail(ZERO_ERR_ARG,
                   "node 0 listens on interface %s, but the others look for it at %.200s (%s), which is "
                   "on %s: change the interface or the address",
                   w->interface, w->host, at, name);
}

/* On node 0, checks that the other nodes look for it on the interface where it listens. It looks HOST up as
 * they do. An address in numbers was compared with the interface before. */
static int check_host(uv_loop_t *loop, const struct zr_world *w)
{
    struct zr_interfaces mine;
    struct zr_lookup *lookup;
    struct looked_up l = {.is_done = false};
    if (w->rank || !w->interface[0] || w->file[0] || zr_world_is_on_loopback(w))
        return 0;
    int err = zr_interfaces_find("ZERO_INTERFACE", w->interface, &mine);
    if (!err)
        err = zr_lookup_start(loop, w->host, w->port, on_looked_up, &l, &lookup);
    while (!err && !l.is_done)
        uv_run(loop, UV_RUN_ONCE);
    return err ? err : check_addresses(w, &mine, &l.found);
}

static int open_meeting(const struct zr_run_options *o, uv_loop_t *loop, struct zr_run_nodes *n,
                        struct node_options *all)
{
    struct zr_world w = {.rank = o->node, .world = o->n_nodes, .local_rank = o->node, .tells_late = true};
    struct node_options own = own_options(o);
    snprintf(w.host, sizeof w.host, "%s", o->meet_host);
    snprintf(w.file, sizeof w.file, "%s", o->meet_file);
    w.port = o->meet_port;
    int err = zr_world_interface(NULL, &w);
    if (err)
        return fail_reworded(err);
    ZR_TRY(check_host(loop, &w));
    ZR_TRY(zr_job_key_find(&w.key));
    name_meeting(&w);
    err = zr_rendezvous_open(loop, &w, o->meet_ms, &n->meet);
    explicit_bzero(&w.key, sizeof w.key);
    if (!err)
        err = zr_rendezvous_exchange(n->meet, &own, sizeof own, all);
    return err ? fail_reworded(err) : compare(all, o->n_nodes);
}

int zr_run_nodes_meet(const struct zr_run_options *o, uv_loop_t *loop, struct zr_run_nodes **out)
{
    struct zr_run_nodes *n = calloc(1, sizeof *n);
    struct node_options *all = calloc((size_t)o->n_nodes, sizeof *all);
    *out = NULL;
    if (n)
        n->members = calloc((size_t)o->n_nodes, sizeof *n->members);
    int err = n && n->members && all ? 0 : zr_fail(ZERO_ERR_NOMEM, "no memory for %d nodes", o->n_nodes);
    if (!err && o->n_nodes > 1)
        err = open_meeting(o, loop, n, all);
    else if (!err)
        all[0] = own_options(o);
    if (!err)
        err = check_n_ranks(all, o->n_nodes, o->limits.min_ranks);
    for (int i = 0; i < o->n_nodes && !err; i++)
        n->members[i] = all[i].member;
    free(all);
    if (err) {
        struct zr_saved_error why;
        zr_error_save(&why, err);
        zr_run_nodes_close(n);
        return zr_error_restore(&why);
    }
    n->n = o->n_nodes;
    n->node = o->node;
    if (n->meet)
        zr_rendezvous_silence(n->meet, o->silent_ms);
    *out = n;
    return 0;
}

const struct zr_run_member *zr_run_nodes_of(const struct zr_run_nodes *n, int node)
{
    return &n->members[node];
}

/* --- talking --- */

static void on_lost(void *arg, int node, const char *why)
{
    struct zr_run_nodes *n = arg;
    char text[640];
    reword_for_nodes(why, text, sizeof text);
    n->on_lost(n->arg, node, text);
}

static void on_message(void *arg, int from, const void *data, size_t n_data)
{
    struct zr_run_nodes *n = arg;
    struct zr_run_message m;
    if (n_data != sizeof m)
        return; /* another build sent it, which compare() refuses */
    memcpy(&m, data, sizeof m);
    m.text[sizeof m.text - 1] = m.assignment.host[sizeof m.assignment.host - 1] =
        m.assignment.job[sizeof m.assignment.job - 1] = 0;
    n->on_message(n->arg, from, &m);
}

void zr_run_nodes_watch(struct zr_run_nodes *n,
                        void (*message)(void *arg, int from, const struct zr_run_message *m),
                        void (*lost)(void *arg, int node, const char *why), void *arg)
{
    n->on_message = message;
    n->on_lost = lost;
    n->arg = arg;
    if (!n->meet)
        return;
    zr_rendezvous_on_message(n->meet, on_message);
    zr_rendezvous_detach(n->meet, on_lost, NULL, n);
}

void zr_run_nodes_send(struct zr_run_nodes *n, int to, const struct zr_run_message *m)
{
    int err = n->meet ? zr_rendezvous_send(n->meet, to, m, sizeof *m) : 0;
    if (err && err != ZERO_ERR_PEER) /* on_lost reports a lost node */
        n->on_lost(n->arg, to, zr_error_text());
}

void zr_run_nodes_close(struct zr_run_nodes *n)
{
    if (!n)
        return;
    zr_rendezvous_free(n->meet);
    free(n->members);
    free(n);
}
