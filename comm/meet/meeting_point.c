/* SPDX-License-Identifier: Apache-2.0 */
/* meeting_point.c: reads addresses, lists of hosts and names of jobs, and chooses where ranks meet. */
#include "comm/meet/meeting_point.h"
#include "comm/meet/net_address.h"

#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <xxhash.h>

/* --- Slurm's lists of hosts --- */

enum { DIGITS = 18 }; /* most digits of a number */

struct reader {
    const char *variable, *list, *at;
    /* The name that is being read: its first form, its length, and the number of names that it stands for. */
    char name[ZR_HOSTLIST_NAME];
    int n_name;
    int64_t n;
};

static int refuse_list(const struct reader *r, const char *what)
{
    return zr_fail(ZERO_ERR_ARG,
                   "%s is \"%.200s\": %s at character %d; a list such as node[01-03,07],login is allowed",
                   r->variable, r->list, what, (int)(r->at - r->list) + 1);
}

static bool is_digit(char c)
{
    return c >= '0' && c <= '9';
}

static bool is_of_name(char c)
{
    return is_digit(c) || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '.' || c == '_' ||
           c == '-';
}

static int add_to_name(struct reader *r, const char *text, int n)
{
    if (r->n_name + n >= ZR_HOSTLIST_NAME)
        return refuse_list(r, "a name of more than 255 characters");
    memcpy(r->name + r->n_name, text, (size_t)n);
    r->n_name += n;
    return 0;
}

static int read_number(struct reader *r, int64_t *out)
{
    const char *from = r->at;
    for (*out = 0; is_digit(*r->at); r->at++) {
        if (r->at - from >= DIGITS)
            return refuse_list(r, "a number of more than 18 digits");
        *out = *out * 10 + (*r->at - '0');
    }
    return r->at > from ? 0 : refuse_list(r, "no number");
}

/* Reads a group in brackets. Its first number becomes part of the name. */
static int read_group(struct reader *r)
{
    int64_t n = 0;
    for (bool first = true; first || *r->at == ','; first = false) {
        const char *from = ++r->at;
        int64_t low, high;
        int err = read_number(r, &low);
        if (!err && first)
            err = add_to_name(r, from, (int)(r->at - from));
        high = low;
        if (!err && *r->at == '-') {
            r->at++;
            err = read_number(r, &high);
        }
        if (err)
            return err;
        if (high < low)
            return refuse_list(r, "a range that goes down");
        if (high - low >= ZR_HOSTLIST_MAX || (n += high - low + 1) > ZR_HOSTLIST_MAX)
            return refuse_list(r, "more than 65536 names");
    }
    if (*r->at != ']')
        return refuse_list(r, "no ]");
    r->at++;
    r->n *= n;
    return r->n > ZR_HOSTLIST_MAX ? refuse_list(r, "more than 65536 names") : 0;
}

static int read_name(struct reader *r)
{
    const char *from = r->at;
    int err = 0;
    r->n_name = 0;
    r->n = 1;
    while (!err && (is_of_name(*r->at) || *r->at == '[')) {
        if (*r->at == '[')
            err = read_group(r);
        else
            err = add_to_name(r, r->at++, 1);
    }
    if (err)
        return err;
    if (r->at == from)
        return refuse_list(r, *from ? "no name" : "the end");
    return *r->at && *r->at != ',' ? refuse_list(r, "what no name has") : 0;
}

int zr_hostlist_first(const char *variable, const char *list, char first[ZR_HOSTLIST_NAME], int64_t *n)
{
    struct reader r = {.variable = variable, .list = list, .at = list};
    char found[ZR_HOSTLIST_NAME];
    int64_t all = 0;
    for (bool more = true; more;) {
        int err = read_name(&r);
        if (err)
            return err;
        if (!all)
            snprintf(found, sizeof found, "%.*s", r.n_name, r.name);
        all += r.n;
        if (all > ZR_HOSTLIST_MAX)
            return refuse_list(&r, "more than 65536 names");
        more = *r.at == ',';
        r.at += more;
    }
    memcpy(first, found, strlen(found) + 1);
    *n = all;
    return 0;
}

/* --- addresses and URLs --- */

static bool is_ipv6(const char *text)
{
    union zr_address a;
    return strchr(text, ':') && zr_address_parse(text, 0, &a);
}

/* Copies the n characters of a name or an address, an IPv6 one without its brackets. Returns false if they
 * are neither. */
static bool take_host(const char *text, size_t n, char host[sizeof((struct zr_world *)0)->host])
{
    bool in_brackets = n > 2 && text[0] == '[' && text[n - 1] == ']';
    if (in_brackets) {
        text++;
        n -= 2;
    }
    if (n == 0 || n >= sizeof((struct zr_world *)0)->host)
        return false;
    memcpy(host, text, n);
    host[n] = 0;
    return in_brackets || strchr(host, ':') ? is_ipv6(host) : !strpbrk(host, "/[]");
}

/* Reads the path of "file:///path". The path is not decoded. */
static int read_file_url(const char *name, const char *path, struct zr_world *w)
{
    size_t n = strlen(path);
    if (path[0] != '/' || n >= sizeof w->file || strpbrk(path, "\n\r"))
        return zr_fail(ZERO_ERR_ARG,
                       "%s is \"file://%.200s\": file:// and the whole path of a folder or file, of up to "
                       "%zu characters, is allowed, as in file:///shared/folder",
                       name, path, sizeof w->file - 1);
    memcpy(w->file, path, n + 1);
    w->host[0] = 0;
    w->port = 0;
    return 0;
}

int zr_meeting_url(const char *name, const char *url, struct zr_world *w)
{
    char host[sizeof w->host], port_name[64];
    if (strncmp(url, "file://", 7) == 0)
        return read_file_url(name, url + 7, w);
    const char *colon = strncmp(url, "tcp://", 6) ? NULL : strrchr(url + 6, ':');
    if (!colon || !take_host(url + 6, (size_t)(colon - url - 6), host))
        return zr_fail(ZERO_ERR_ARG,
                       "%s is \"%.200s\": tcp://host:port or tcp://[ipv6]:port is allowed, with a name or an "
                       "address of up to %zu characters, or file:///path",
                       name, url, sizeof w->host - 1);
    if (url[6] != '[' && strchr(host, ':'))
        return zr_fail(ZERO_ERR_ARG,
                       "%s is \"%.200s\": put an IPv6 address into brackets, as in tcp://[%s]:%.16s", name,
                       url, host, colon + 1);
    snprintf(port_name, sizeof port_name, "the port in %s", name);
    int err = zr_meeting_number(port_name, colon + 1, 1, 65535, &w->port);
    if (!err)
        memcpy(w->host, host, sizeof host);
    return err;
}

bool zr_meeting_host(const char *text, char host[sizeof((struct zr_world *)0)->host])
{
    return take_host(text, strlen(text), host);
}

/* Reads MASTER_ADDR and MASTER_PORT. *found: they are set. */
static int find_master(struct zr_world *w, bool *found)
{
    const char *addr = getenv("MASTER_ADDR"), *port = getenv("MASTER_PORT");
    *found = addr || port;
    if (!*found)
        return 0;
    if (!addr || !port)
        return zr_fail(ZERO_ERR_ARG, "%s is not set though %s is \"%.64s\": both or neither are allowed",
                       addr ? "MASTER_PORT" : "MASTER_ADDR", addr ? "MASTER_ADDR" : "MASTER_PORT",
                       addr ? addr : port);
    if (!zr_meeting_host(addr, w->host))
        return zr_fail(
            ZERO_ERR_ARG,
            "MASTER_ADDR is \"%.64s\": a name, an address of IPv4 or one of IPv6, as ::1 or [::1], of 1 "
            "to %zu characters is allowed",
            addr, sizeof w->host - 1);
    int err = zr_meeting_number("MASTER_PORT", port, 1, 65535, &w->port);
    if (err)
        return err;
    /* torchrun's agent has its own store on that port. */
    const char *agent = getenv("TORCHELASTIC_USE_AGENT_STORE");
    if (agent && strcmp(agent, "True") == 0)
        w->port += w->port < 65535 ? 1 : -1;
    return 0;
}

/* --- hosts of a launcher --- */

/* Whether srun started this rank. */
static bool is_slurm_task(const struct zr_launcher *l, const struct zr_world *w)
{
    return l->is_of_slurm && zr_launcher_is_slurm_task(w->rank, w->world);
}

static const char *first_set(const char *const names[2])
{
    return getenv(names[0]) ? names[0] : getenv(names[1]) ? names[1] : NULL;
}

/* The hosts that a job's ranks are on, as far as known. */
struct hosts {
    /* Number of hosts. 0: unknown. */
    int64_t n;
    /* Slurm's list of them, and the list's name in messages. NULL: none. */
    const char *list, *variable;
    char first[ZR_HOSTLIST_NAME];
};

static int read_slurm_hosts(struct hosts *h)
{
    static const char *const counts[] = {"SLURM_STEP_NUM_NODES", "SLURM_NNODES"}, *const lists[] = {
                                                                                      "SLURM_STEP_NODELIST",
                                                                                      "SLURM_JOB_NODELIST"};
    const char *count = first_set(counts);
    int err = 0, n = 0;
    int64_t n_listed = 0;
    if (count)
        err = zr_meeting_number(count, getenv(count), 1, ZR_HOSTLIST_MAX, &n);
    h->n = n;
    if (err || n == 1)
        return err;
    if (!getenv("SLURM_HET_SIZE")) /* in such a job the list is of one component */
        h->variable = first_set(lists);
    if (h->variable) {
        h->list = getenv(h->variable);
        err = zr_hostlist_first(h->variable, h->list, h->first, &n_listed);
    }
    if (!h->n)
        h->n = n_listed;
    return err;
}

static int read_hosts(const struct zr_launcher *l, const struct zr_world *w, struct hosts *h)
{
    const char *local = l->local_size ? getenv(l->local_size) : NULL;
    int n_local = 0, err = 0;
    *h = (struct hosts){.n = 0};
    if (local)
        err = zr_meeting_number(l->local_size, local, 1, w->world, &n_local);
    if (err)
        return err;
    if (n_local == w->world)
        h->n = 1;
    else if (is_slurm_task(l, w))
        err = read_slurm_hosts(h);
    if (n_local && n_local < w->world && h->n < 2)
        h->n = 2; /* or more */
    return err;
}

/* --- the job --- */

static void add_to_job(const char *const names[3], struct zr_world *w)
{
    size_t used = 0;
    for (int i = 0; i < 3 && names[i]; i++) {
        const char *text = getenv(names[i]);
        if (text && used < sizeof w->job)
            used += (size_t)snprintf(w->job + used, sizeof w->job - used, "%s%s", used ? "." : "", text);
    }
}

/* Names a job of torchrun, which calls every job "none" without --rdzv-id. Two jobs that run at the same time
 * have different addresses of their agents' store. */
static void name_torchruns_job(struct zr_world *w)
{
    const char *addr = getenv("MASTER_ADDR"), *port = getenv("MASTER_PORT");
    if ((!w->job[0] || !strcmp(w->job, "none")) && addr && port)
        snprintf(w->job, sizeof w->job, "torchrun at %.90s:%.16s", addr, port);
}

static void find_job(const struct zr_launcher *l, struct zr_world *w)
{
    static const char *const of_slurm[3] = {"SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID"};
    const char *own = getenv("ZERO_JOB");
    if (l)
        add_to_job(l->job, w);
    if (!w->job[0] && l && is_slurm_task(l, w))
        add_to_job(of_slurm, w);
    if (own && w->job[0] && !getenv("SLURM_HET_SIZE")) /* each component of such a job has an id */
        snprintf(w->start.job, sizeof w->start.job, "%s's job %.90s", l->source, w->job);
    if (own)
        snprintf(w->job, sizeof w->job, "%s", own);
    else if (l && l->kind == ZR_LAUNCHER_TORCHRUN)
        name_torchruns_job(w);
}

/* Reads the number of restarts of the job, from zero-run or from l. */
static int find_attempt(const struct zr_launcher *l, struct zr_world *w)
{
    const char *const names[] = {"ZERO_ATTEMPT", l ? l->attempt : NULL};
    for (int i = 0; i < 2; i++) {
        const char *text = names[i] ? getenv(names[i]) : NULL;
        if (text)
            return zr_meeting_number(names[i], text, 0, INT_MAX, &w->attempt);
    }
    return 0;
}

/* --- the meeting point --- */

/* Derives the port from the job's name. It is below the ephemeral range. */
static void use_port_of_job(struct zr_world *w)
{
    const char *own = getenv("ZERO_JOB");
    w->port = 20000 + (int)(XXH3_64bits(w->job, strlen(w->job)) % 12000);
    w->is_port_of_own_job = own && *own;
}

/* Names a job of MPICH by its launcher's process, which is the same for all ranks of a host: MPICH gives
 * its jobs no names. */
static void name_by_process(const struct zr_launcher *l, struct zr_world *w)
{
    long process = (long)zr_launcher_process(l);
    if (!w->job[0])
        snprintf(w->job, sizeof w->job, "%s of process %ld", l->source, process ? process : (long)getppid());
    else if (process)
        snprintf(w->start.job, sizeof w->start.job, "%s of process %ld", l->source, process);
}

static void meet_on_loopback(const struct zr_launcher *l, const struct hosts *h, struct zr_world *w)
{
    bool is_named = w->start.job[0] || is_slurm_task(l, w) || !getenv("ZERO_JOB");
    if (!w->job[0] || (l->kind == ZR_LAUNCHER_MPICH && !is_named))
        name_by_process(l, w);
    strcpy(w->host, "127.0.0.1");
    use_port_of_job(w);
    w->is_host_assumed = h->n == 0;
    snprintf(w->way, sizeof w->way, "%s", h->n ? "the launcher's only host" : "the launcher names no host");
}

/* Meets at the first host of Slurm's list. If the tasks were distributed in another way, rank 0 is on another
 * host, which only rank 0 knows. */
static int meet_at_first(const struct hosts *h, struct zr_world *w)
{
    const char *own = getenv("SLURMD_NODENAME");
    if (w->rank == 0 && own && strcmp(own, h->first) != 0)
        return zr_fail(ZERO_ERR_ARG,
                       "rank 0 runs on \"%.100s\", but Slurm's node list %.200s begins with \"%.100s\": set "
                       "ZERO_RENDEZVOUS to tcp://%.100s:PORT on all ranks",
                       own, h->list, h->first, own);
    snprintf(w->host, sizeof w->host, "%s", h->first);
    use_port_of_job(w);
    snprintf(w->way, sizeof w->way, "%s", h->variable);
    return 0;
}

/* Finds where ranks meet if an MPI's launcher or Slurm started them. These give no address. */
static int meet_by_launcher(const struct zr_launcher *l, struct zr_world *w)
{
    struct hosts h;
    int err = read_hosts(l, w, &h);
    if (err)
        return err;
    if (h.n < 2) {
        meet_on_loopback(l, &h, w);
        return 0;
    }
    if (h.list)
        return meet_at_first(&h, w);
    return zr_fail(
        ZERO_ERR_ARG,
        "rank %d of %d (from %s) does not know where rank 0 is: its ranks are on several hosts, and "
        "%s; %sset ZERO_RENDEZVOUS to tcp://host:port, or MASTER_ADDR and MASTER_PORT",
        w->rank, w->world, w->source,
        is_slurm_task(l, w) ? "Slurm gave no list of all hosts" : "this launcher does not list them",
        l->is_of_mpi ? "on the host device set backend to mpi (ZERO_BACKEND=mpi), and ranks find each other "
                       "by MPI; otherwise "
                     : "");
}

/* Finds where ranks meet, in a world of more than one rank. */
static int find_place(const struct zr_launcher *l, const char *want_url, bool by_mpi, struct zr_world *w)
{
    const char *url = want_url ? want_url : getenv("ZERO_RENDEZVOUS");
    const char *name = want_url ? "rendezvous" : "ZERO_RENDEZVOUS";
    bool found;
    snprintf(w->way, sizeof w->way, "%s", name);
    if (url)
        return zr_meeting_url(name, url, w);
    strcpy(w->way, "MASTER_ADDR");
    int err = find_master(w, &found);
    if (err || found)
        return err;
    w->by_mpi = by_mpi && l && l->is_of_mpi;
    if (w->by_mpi) {
        strcpy(w->way, "MPI");
        return 0;
    }
    if (l && l->gives_no_address)
        return meet_by_launcher(l, w);
    return zr_fail(ZERO_ERR_ARG,
                   "rank %d of %d (from %s) does not know where rank 0 is: set ZERO_RENDEZVOUS to "
                   "tcp://host:port, or MASTER_ADDR and MASTER_PORT",
                   w->rank, w->world, w->source);
}

int zr_meeting_point_find(const struct zr_launcher *l, const char *want_url, bool by_mpi, struct zr_world *w)
{
    find_job(l, w);
    int err = find_attempt(l, w);
    if (!err && w->world > 1)
        err = zr_job_key_find(&w->key);
    if (!err && w->world > 1)
        return find_place(l, want_url, by_mpi, w);
    /* A wrong URL is an error, even if it is not needed. */
    if (!err && want_url)
        err = zr_meeting_url("rendezvous", want_url, w);
    w->host[0] = w->file[0] = 0;
    w->port = 0;
    return err;
}
