/* SPDX-License-Identifier: Apache-2.0 */
/* topology.c: finds out which ranks can map each other's memory.
 *
 * Every rank makes a small segment in the way shared memory is made. It sends its location and its identity
 * to all. Ranks with the same machine, process namespace and ZERO_HOST_ID form a set. The lowest rank of a
 * set opens the segments of all others, and each of the others opens the segment of the lowest. Both
 * directions are tried because permissions may differ. That is two tests per rank and not one per pair:
 * processes of one user that pass it pass it among each other, too. All ranks receive all results, so every
 * rank finds the same hosts.
 *
 * Everything that could fail on one rank alone comes before the first exchange. */
#include "comm/topology.h"
#include "comm/meet/rendezvous.h"
#include "kernels/limits.h"
#include "kernels/standard_fds.h"
#include "kernels/thread.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
    SEGMENT_BYTES = 4096,
    PROBE_DESCRIPTORS = 2 /* a rank's own segment, and the one that it opens */
};

/* Content of a segment. It proves that the segment is the right one, and not another file whose number was
 * reused. */
struct segment {
    uint64_t magic, nonce;
};
static const uint64_t segment_magic = 0x7a65726f20746f70;

/* A rank's identity and segment, as it sends them to all. */
struct rank_record {
    int32_t err;
    int32_t pid, fd; /* fd -1: it could make no segment, and its finding says why */
    uint64_t nonce, pid_namespace;
    char machine[48], host_name[64], host_id[48];
};

/* A rank's result: the first rank whose memory it should be able to map and cannot (-1: none), and why. If it
 * has no segment itself, text says why not. */
struct finding {
    int32_t cannot;
    char text[124];
};

/* One zr_topology_probe. */
struct probe {
    struct zr_rendezvous *rdv;
    const struct zr_identity *id;
    int32_t world, rank;
    struct rank_record *records; /* (world) */
    struct finding *findings;    /* (world) */
    int32_t *lowest;             /* (world) lowest rank of the rank's set */
    int fd;                      /* this rank's segment, open while others may open it; -1: none */
    struct segment *mine;        /* its mapping */
};

/* --- memory --- */

/* Returns false if there is no memory; nothing is allocated then, and no message is set. */
static bool allocate(int32_t world, int32_t rank, struct zr_topology *out)
{
    *out = (struct zr_topology){.world = world, .rank = rank};
    out->host_of = calloc((size_t)world * 3, sizeof *out->host_of);
    out->hosts = calloc((size_t)world, sizeof *out->hosts);
    if (!out->host_of || !out->hosts) {
        zr_topology_free(out);
        return false;
    }
    out->place_of = out->host_of + world;
    out->rank_at = out->place_of + world;
    return true;
}

void zr_topology_free(struct zr_topology *t)
{
    if (!t)
        return;
    free(t->host_of); /* and the arrays behind it */
    free(t->hosts);
    *t = (struct zr_topology){.world = 0};
}

/* --- from hosts to places --- */

static int32_t add_host(struct zr_topology *t, int32_t rank)
{
    t->hosts[t->n_hosts] = (struct zr_host){.lowest_rank = rank};
    return t->n_hosts++;
}

static void put_on_host(struct zr_topology *t, int32_t rank, int32_t host)
{
    t->host_of[rank] = host;
    t->hosts[host].n_ranks++;
}

/* Numbers the places, after all ranks were put on their hosts. */
static void number_places(struct zr_topology *t)
{
    int32_t place = 0;
    for (int32_t host = 0; host < t->n_hosts; host++)
        for (int32_t r = t->hosts[host].lowest_rank, n = 0; n < t->hosts[host].n_ranks; r++)
            if (t->host_of[r] == host) {
                if (r == t->rank)
                    t->local_rank = n;
                t->place_of[r] = place;
                t->rank_at[place++] = r;
                n++;
            }
    t->why = "";
    for (int32_t host = t->n_hosts - 1; host >= 0; host--)
        if (t->hosts[host].why[0])
            t->why = t->hosts[host].why;
    t->host = t->host_of[t->rank];
    t->local_size = t->hosts[t->host].n_ranks;
}

bool zr_topology_order_by_rank(struct zr_topology *t)
{
    bool changed = false;
    for (int32_t r = 0; r < t->world; r++) {
        changed |= t->place_of[r] != r;
        t->place_of[r] = t->rank_at[r] = r;
    }
    t->by_rank = true;
    return changed;
}

int zr_topology_assume(int32_t world, int32_t local_size, struct zr_topology *out)
{
    if (world < 1 || local_size < 0)
        return zr_fail(ZERO_ERR_ARG, "a world of %d ranks cannot have %d on each host", world, local_size);
    if (!allocate(world, 0, out))
        return zr_fail(ZERO_ERR_NOMEM, "no memory for the hosts of %d ranks", world);
    int32_t each = local_size ? local_size : world;
    for (int32_t r = 0; r < world; r++)
        put_on_host(out, r, r % each ? out->n_hosts - 1 : add_host(out, r));
    number_places(out);
    return 0;
}

/* --- this rank's segment --- */

/* Notes why this rank has no segment. Returns -1. */
static int cannot_make(struct probe *p, struct finding *f, const char *what)
{
    char why[ZR_SYSTEM_WORDS];
    snprintf(f->text, sizeof f->text, "%s: %s", what, zr_system_words(errno, why));
    if (p->fd >= 0)
        close(p->fd);
    p->fd = -1;
    return -1;
}

/* Returns the segment's descriptor, or -1 if this rank can have none. That is a fact about it and no
 * failure. */
static int make_probe(struct probe *p, struct rank_record *c, struct finding *f)
{
    p->fd = zr_above_standard(memfd_create("zero-topology", MFD_CLOEXEC));
    if (p->fd < 0)
        return cannot_make(p, f, "making a shared memory file");
    if (zr_limited_ftruncate(p->fd, SEGMENT_BYTES))
        return cannot_make(p, f, "reserving shared memory");
    void *at = mmap(NULL, SEGMENT_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, p->fd, 0);
    if (at == MAP_FAILED)
        return cannot_make(p, f, "mapping shared memory");
    p->mine = at;
    if (getrandom(&c->nonce, sizeof c->nonce, 0) != sizeof c->nonce)
        c->nonce = (uint64_t)getpid() << 32 ^ (uint64_t)(uintptr_t)p;
    *p->mine = (struct segment){.magic = segment_magic, .nonce = c->nonce};
    return p->fd;
}

/* Returns err, or a failure that keeps this rank from asking. */
static int fill_record(struct probe *p, int err, struct rank_record *c, struct finding *f)
{
    char why[ZR_SYSTEM_WORDS];
    int none = zr_no_descriptors(PROBE_DESCRIPTORS);
    memset(c, 0, sizeof *c);
    memset(f, 0, sizeof *f);
    c->fd = f->cannot = -1;
    if (!err && none) /* without this check the rank would seem to be on another host */
        err = zr_fail(ZERO_ERR_SYSTEM, "asking which ranks share memory: %s", zr_system_words(none, why));
    if (err)
        return err;
    c->pid = (int32_t)getpid();
    c->pid_namespace = p->id->pid_namespace;
    snprintf(c->machine, sizeof c->machine, "%s", p->id->machine);
    snprintf(c->host_name, sizeof c->host_name, "%s", p->id->host_name);
    snprintf(c->host_id, sizeof c->host_id, "%s", p->id->host_id);
    c->fd = make_probe(p, c, f);
    return 0;
}

/* --- other ranks' segments --- */

/* Whether fd is the segment of c. errno is 0 if it is another file. */
static bool is_segment(int fd, const struct rank_record *c)
{
    struct stat st;
    if (fstat(fd, &st) < 0)
        return false;
    errno = 0;
    if (st.st_size != SEGMENT_BYTES) /* such a file may not be touched */
        return false;
    void *at = mmap(NULL, SEGMENT_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (at == MAP_FAILED)
        return false;
    const struct segment *s = at;
    bool same = s->magic == segment_magic && s->nonce == c->nonce;
    munmap(at, SEGMENT_BYTES);
    return same;
}

/* Whether this rank can map rank's memory. If not, it fills f. */
static bool can_map(const struct probe *p, int32_t rank, struct finding *f)
{
    const struct rank_record *c = &p->records[rank];
    int fd = zr_identity_open(p->id, rank, c->pid, c->fd);
    bool same = fd >= 0 && is_segment(fd, c);
    if (!same) {
        char why[ZR_SYSTEM_WORDS];
        f->cannot = rank;
        snprintf(f->text, sizeof f->text, "%.120s",
                 errno ? zr_system_words(errno, why) : "it was replaced by another file");
    }
    if (fd >= 0)
        close(fd);
    return same;
}

/* Opens the segments that this rank has to test. */
static void open_others(const struct probe *p, struct finding *f)
{
    if (p->lowest[p->rank] != p->rank) {
        can_map(p, p->lowest[p->rank], f);
        return;
    }
    for (int32_t r = p->rank + 1; r < p->world; r++)
        if (p->lowest[r] == p->rank && !can_map(p, r, f))
            return;
}

/* --- results, which are equal on all ranks --- */

static bool same_text(const char *a, const char *b, size_t n)
{
    return strncmp(a, b, n) == 0;
}

static bool same_machine(const struct rank_record *a, const struct rank_record *b)
{
    return same_text(a->machine, b->machine, sizeof a->machine);
}

/* Whether two ranks are in one set (see above). A rank without a segment becomes a separate host. */
static bool are_in_one_set(const struct rank_record *a, const struct rank_record *b)
{
    return a->fd >= 0 && b->fd >= 0 && same_machine(a, b) && a->pid_namespace == b->pid_namespace &&
           same_text(a->host_id, b->host_id, sizeof a->host_id);
}

/* Finds the lowest rank of each rank's set. */
static void find_sets(struct probe *p)
{
    for (int32_t r = 0; r < p->world; r++) {
        int32_t low = 0;
        while (low < r && (p->lowest[low] != low || !are_in_one_set(&p->records[low], &p->records[r])))
            low++;
        p->lowest[r] = low;
    }
}

/* Whether a rank becomes a separate host. If the lowest rank cannot map one of the others, all ranks of the
 * set are separate: no test shows whether they could map each other. */
static bool is_separate(const struct probe *p, int32_t rank)
{
    return p->findings[p->lowest[rank]].cannot >= 0 || p->findings[rank].cannot >= 0;
}

/* Says which rank of the set could not open which segment. */
static void say_why(const struct probe *p, int32_t rank, struct zr_host *h)
{
    int32_t finder = p->findings[p->lowest[rank]].cannot >= 0 ? p->lowest[rank] : rank;
    const struct finding *f = &p->findings[finder];
    snprintf(h->why, sizeof h->why, "rank %d cannot open the memory of rank %d: %.120s", finder, f->cannot,
             f->text);
}

/* The lowest rank below this one on its machine that has a segment, or has none. Returns rank if there is
 * none. */
static int32_t earlier_on_machine(const struct probe *p, int32_t rank, bool has_segment)
{
    int32_t r = 0;
    while (r < rank &&
           ((p->records[r].fd >= 0) != has_segment || !same_machine(&p->records[r], &p->records[rank])))
        r++;
    return r;
}

/* The lowest rank below this one that differs from it by ZERO_HOST_ID alone. Returns rank if there is
 * none. */
static int32_t earlier_in_namespace(const struct probe *p, int32_t rank)
{
    const struct rank_record *c = &p->records[rank];
    int32_t r = 0;
    while (r < rank && (c->fd < 0 || p->records[r].fd < 0 || !same_machine(&p->records[r], c) ||
                        p->records[r].pid_namespace != c->pid_namespace))
        r++;
    return r;
}

/* Writes "ZERO_HOST_ID is "a" on rank 0 and not set on rank 1". */
static void say_host_ids(int32_t a, const char *id_a, int32_t b, const char *id_b, char *text, size_t n_text)
{
    const char *quote_a = *id_a ? "\"" : "", *quote_b = *id_b ? "\"" : "";
    snprintf(text, n_text, "ZERO_HOST_ID is %s%.47s%s on rank %d and %s%.47s%s on rank %d", quote_a,
             *id_a ? id_a : "not set", quote_a, a, quote_b, *id_b ? id_b : "not set", quote_b, b);
}

/* Says why two ranks of one machine did not try to open each other's segments. */
static void say_not_asked(const struct probe *p, int32_t rank, struct zr_host *h)
{
    int32_t other = earlier_on_machine(p, rank, true), without = earlier_on_machine(p, rank, false);
    int32_t split = earlier_in_namespace(p, rank);
    bool lacks = p->records[rank].fd < 0;
    if (split < rank)
        say_host_ids(split, p->records[split].host_id, rank, p->records[rank].host_id, h->why, sizeof h->why);
    else if (other < rank && !lacks)
        snprintf(h->why, sizeof h->why,
                 "rank %d and rank %d are in different process namespaces (containers) of one machine", other,
                 rank);
    else if (other < rank || without < rank)
        snprintf(h->why, sizeof h->why, "rank %d cannot share memory: %.120s", lacks ? rank : without,
                 p->findings[lacks ? rank : without].text);
}

static void begin_host(const struct probe *p, int32_t rank, struct zr_host *h)
{
    const struct rank_record *c = &p->records[rank];
    snprintf(h->name, sizeof h->name, "%.63s", c->host_name);
    snprintf(h->machine, sizeof h->machine, "%.47s", c->machine);
    h->pid_namespace = c->pid_namespace;
    snprintf(h->host_id, sizeof h->host_id, "%.47s", c->host_id);
    if (p->lowest[rank] == rank)
        say_not_asked(p, rank, h);
    else
        say_why(p, rank, h);
}

/* Puts each rank on a host: that of its set's lowest rank, or a separate one. */
static void make_hosts(const struct probe *p, struct zr_topology *t)
{
    for (int32_t r = 0; r < p->world; r++) {
        bool opens = p->lowest[r] == r || is_separate(p, r);
        int32_t host = opens ? add_host(t, r) : t->host_of[p->lowest[r]];
        if (opens)
            begin_host(p, r, &t->hosts[host]);
        put_on_host(t, r, host);
    }
    number_places(t);
}

/* --- the whole probe --- */

static void release(struct probe *p)
{
    if (p->mine)
        munmap(p->mine, SEGMENT_BYTES);
    if (p->fd >= 0)
        close(p->fd);
    free(p->records);
    free(p->findings);
    free(p->lowest);
}

/* A rank that has ended meanwhile has no memory to open either, but is not another host. So if any segment
 * could not be opened, all ranks exchange once more. A rank that does not answer is lost. */
static int check_all_alive(const struct probe *p)
{
    int32_t r = 0;
    while (r < p->world && p->findings[r].cannot < 0)
        r++;
    return r < p->world ? zr_rendezvous_exchange(p->rdv, &p->rank, sizeof p->rank, p->lowest) : 0;
}

/* Makes two exchanges: where each rank is, and which ranks each could map. */
static int ask(struct probe *p, int err, struct zr_topology *t)
{
    struct rank_record mine;
    struct finding found;
    err = fill_record(p, err, &mine, &found);
    int met = zr_rendezvous_agree_and_exchange(p->rdv, err, &mine.err, sizeof mine, p->records);
    if (met)
        return met;
    find_sets(p);
    open_others(p, &found);
    met = zr_rendezvous_exchange(p->rdv, &found, sizeof found, p->findings);
    if (met)
        return met;
    make_hosts(p, t);
    return check_all_alive(p);
}

int zr_topology_probe(struct zr_rendezvous *rdv, const struct zr_identity *id, int err,
                      struct zr_topology *out)
{
    struct zr_identity own;
    *out = (struct zr_topology){.world = 0};
    if (!rdv)
        return err ? err : zr_topology_assume(1, 0, out);
    if (!id)
        zr_identity_read(&own);
    struct probe p = {.rdv = rdv, .id = id ? id : &own, .world = zr_rendezvous_world(rdv), .fd = -1};
    p.rank = zr_rendezvous_rank(rdv);
    p.records = calloc((size_t)p.world, sizeof *p.records);
    p.findings = calloc((size_t)p.world, sizeof *p.findings);
    p.lowest = calloc((size_t)p.world, sizeof *p.lowest);
    if (p.records && p.findings && p.lowest && allocate(p.world, p.rank, out))
        err = ask(&p, err, out);
    else if (err)
        zr_rendezvous_fail(rdv, err);
    else
        err = zr_rendezvous_fail(
            rdv, zr_fail(ZERO_ERR_NOMEM, "no memory to ask %d ranks for their hosts", p.world));
    if (err)
        zr_topology_free(out);
    release(&p);
    return err;
}

/* --- queries --- */

int32_t zr_topology_on_machine(const struct zr_topology *t)
{
    int32_t n = 0;
    for (int32_t r = 0; r < t->world; r++)
        n += zr_topology_same_machine(t, r);
    return n;
}

bool zr_topology_same_machine(const struct zr_topology *t, int32_t rank)
{
    const struct zr_host *a = &t->hosts[t->host], *b = &t->hosts[t->host_of[rank]];
    return same_text(a->machine, b->machine, sizeof a->machine);
}

bool zr_topology_has_cores(int32_t on_host, int32_t on_machine, int32_t n)
{
    return (int64_t)on_host * n <= zr_thread_cores() &&
           (int64_t)on_machine * n <= sysconf(_SC_NPROCESSORS_ONLN);
}

int zr_topology_one_host(const struct zr_topology *t, const int32_t *members, int32_t n)
{
    int32_t k = 1;
    while (k < n && t->host_of[members[k]] == t->host_of[members[0]])
        k++;
    if (k >= n)
        return 0;
    const struct zr_host *a = &t->hosts[t->host_of[members[0]]], *b = &t->hosts[t->host_of[members[k]]];
    if (!same_text(a->machine, b->machine, sizeof a->machine))
        return zr_fail(ZERO_ERR_NOTSUP,
                       "shared memory needs all ranks on one host: rank %d is on \"%s\", rank %d on \"%s\"",
                       members[0], a->name, members[k], b->name);
    if (a->pid_namespace != b->pid_namespace)
        return zr_fail(ZERO_ERR_NOTSUP,
                       "shared memory needs all ranks in one process namespace: rank %d (\"%s\") and rank %d "
                       "(\"%s\") are in different containers",
                       members[0], a->name, members[k], b->name);
    if (!same_text(a->host_id, b->host_id, sizeof a->host_id)) {
        char host_ids[192];
        say_host_ids(members[0], a->host_id, members[k], b->host_id, host_ids, sizeof host_ids);
        return zr_fail(ZERO_ERR_NOTSUP,
                       "shared memory needs all ranks on one host: %s, which makes it two hosts", host_ids);
    }
    return zr_fail(ZERO_ERR_NOTSUP, "shared memory needs ranks that can map each other's memory: %s",
                   b->why[0] ? b->why : a->why);
}

static void append(char *text, size_t n_text, const char *fmt, ...) __attribute__((format(printf, 3, 4)));

static void append(char *text, size_t n_text, const char *fmt, ...)
{
    size_t used = strlen(text);
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text + used, n_text - used, fmt, ap);
    va_end(ap);
}

void zr_topology_list_ranks(const struct zr_topology *t, int32_t host, char *text, size_t n_text)
{
    int32_t left = t->hosts[host].n_ranks, last;
    const char *comma = "";
    text[0] = 0;
    for (int32_t r = t->hosts[host].lowest_rank; left > 0; r = last + 1, comma = ", ") {
        while (t->host_of[r] != host)
            r++;
        for (last = r; last - r + 1 < left && t->host_of[last + 1] == host;)
            last++;
        if (last - r < 2)
            last = r;
        append(text, n_text, "%s%d", comma, r);
        if (last > r)
            append(text, n_text, " to %d", last);
        left -= last - r + 1;
    }
}

void zr_topology_list_hosts(const struct zr_topology *t, char *text, size_t n_text)
{
    text[0] = 0;
    for (int32_t host = 0; host < t->n_hosts; host++) {
        char ranks[96];
        int32_t n = t->hosts[host].n_ranks;
        zr_topology_list_ranks(t, host, ranks, sizeof ranks);
        append(text, n_text, "%shost %d has %d%s (%s)", host ? ", " : "", host, n,
               host     ? ""
               : n == 1 ? " rank"
                        : " ranks",
               ranks);
    }
}
