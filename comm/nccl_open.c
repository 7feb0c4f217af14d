/* nccl_open.c: opens a pair of NCCL communicators, makes their arenas, and closes them.
 *
 * Every step that may fail on one rank alone ends with a comparison over the rendezvous, so that all ranks go
 * on together or fail together, with the same words. It is also what names a rank that does not come. */
#include "comm/nccl_comm.h"
#include "comm/rendezvous.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <xxhash.h>

enum { CLOSE_MS = 10000, OLDEST = 21400 /* ncclCommInitRankConfig */, COPY_ENGINE = 22800 };

static void __attribute__((format(printf, 2, 3))) say(const struct zr_nccl_pair *p, const char *fmt, ...)
{
    char text[512];
    va_list ap;
    if (!p->opt.log)
        return;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    p->opt.log(p->opt.log_arg, text);
}

static void version_text(int v, char *text, size_t n_text)
{
    snprintf(text, n_text, "%d.%d.%d", v / 10000, v / 100 % 100, v % 100);
}

/* ---- agreeing ---- */

/* What a rank tells the others before there is a communicator. */
struct card {
    int32_t err, version, deterministic, copy_engine, lent, unused;
    int64_t reserve_bytes;
    uint64_t host;
    ncclUniqueId id[2]; /* rank 0's */
    char text[400];
};

struct outcome {
    int64_t err, number;
    char text[400];
};

/* What ranks said beside their error. */
struct tally {
    int64_t sum, first; /* of rank 0 */
    int odd;            /* the first rank that has another number than rank 0; -1: none */
    int64_t odd_number;
};

/* err: of this rank, with its message. Returns the first rank's error, or 0 with the tally of the ranks'
 * numbers (t may be NULL). */
static int agree(struct zr_nccl_pair *p, int err, int64_t number, struct tally *t)
{
    struct outcome mine = {.err = err, .number = number}, *all = malloc((size_t)p->world * sizeof *all);
    if (err)
        snprintf(mine.text, sizeof mine.text, "%s", zr_error_text());
    if (!all)
        return err ? err : zr_fail(ZR_ERR_NOMEM, "nccl: no memory to compare %d ranks", p->world);
    int met = zr_rendezvous_exchange(p->rdv, &mine, sizeof mine, all);
    for (int r = 0; !met && r < p->world; r++) {
        if (all[r].err)
            met = r == p->rank ? zr_fail((int)all[r].err, "%s", mine.text)
                               : zr_fail((int)all[r].err, "rank %d: %s", r, all[r].text);
    }
    if (!met && t)
        *t = (struct tally){.first = all[0].number, .odd = -1};
    for (int r = 0; !met && t && r < p->world; r++) {
        t->sum += all[r].number;
        if (t->odd < 0 && all[r].number != t->first)
            t->odd = r, t->odd_number = all[r].number;
    }
    if (err)
        met = zr_fail(err, "%s", mine.text);
    free(all);
    return met;
}

static int compare_cards(const struct zr_nccl_pair *p, const struct card *all)
{
    for (int r = 0; r < p->world; r++)
        if (all[r].err)
            return zr_fail(all[r].err, "rank %d: %s", r, all[r].text);
    for (int r = 1; r < p->world; r++) {
        if (all[r].version != all[0].version) {
            char a[32], b[32];
            version_text(all[r].version, a, sizeof a);
            version_text(all[0].version, b, sizeof b);
            return zr_fail(ZR_ERR_MISMATCH,
                           "rank %d has NCCL %s, rank 0 has %s: all ranks must have the same", r, a, b);
        }
#define SAME(field, what)                                                                                    \
    if (all[r].field != all[0].field)                                                                        \
    return zr_fail(ZR_ERR_MISMATCH,                                                                          \
                   "nccl: %s is %lld on rank %d and %lld on rank 0; all ranks must have the same", what,     \
                   (long long)all[r].field, r, (long long)all[0].field)
        SAME(deterministic, "deterministic");
        SAME(copy_engine, "copy_engine");
        SAME(reserve_bytes, "reserve_bytes");
        SAME(lent, "the use of a communicator that was lent");
#undef SAME
    }
    return 0;
}

/* Compares all cards; out: rank 0's, with its ids. */
static int meet(struct zr_nccl_pair *p, int err, struct card *out, bool *one_host)
{
    struct card mine = {.err = err,
                        .version = p->api.version,
                        .deterministic = p->opt.deterministic,
                        .copy_engine = p->opt.copy_engine,
                        .lent = p->opt.lent != NULL,
                        .reserve_bytes = p->opt.reserve_bytes};
    char host[256] = "";
    gethostname(host, sizeof host - 1);
    mine.host = XXH3_64bits(host, strlen(host));
    for (int i = 0; !mine.err && p->rank == 0 && !p->opt.lent && i < 2; i++) {
        ncclResult_t res = p->api.GetUniqueId(&mine.id[i]);
        if (res)
            mine.err = zr_nccl_say(p, NULL, res, "ncclGetUniqueId");
    }
    if (mine.err)
        snprintf(mine.text, sizeof mine.text, "%s", zr_error_text());
    struct card *all = malloc((size_t)p->world * sizeof *all);
    if (!all)
        return mine.err ? mine.err : zr_fail(ZR_ERR_NOMEM, "nccl: no memory to compare %d ranks", p->world);
    int met = zr_rendezvous_exchange(p->rdv, &mine, sizeof mine, all);
    if (!met)
        met = compare_cards(p, all);
    if (mine.err)
        met = zr_fail(mine.err, "%s", mine.text);
    *one_host = true;
    for (int r = 0; !met && r < p->world; r++)
        *one_host &= all[r].host == all[0].host;
    if (!met)
        *out = all[0];
    free(all);
    return met;
}

/* ---- a communicator ---- */

struct opening {
    struct zr_nccl_api api;
    ncclComm_t out, lent;
    int world, rank;
    ncclUniqueId id;
    ncclConfig_t config;
};

static ncclResult_t open_one(void *arg)
{
    struct opening *o = arg;
    if (o->lent)
        return o->api.CommSplit(o->lent, 0, o->rank, &o->out, &o->config);
    return o->api.CommInitRankConfig(&o->out, o->world, o->id, o->rank, &o->config);
}

static int open_comm(struct zr_nccl *m, const ncclUniqueId *id, bool copy_engine)
{
    struct zr_nccl_pair *p = m->pair;
    struct opening o = {.api = p->api,
                        .lent = p->opt.lent,
                        .world = p->world,
                        .rank = p->rank,
                        .id = *id,
                        .config = NCCL_CONFIG_INITIALIZER};
    ncclResult_t res = ncclSuccess;
    char what[64];
    int err = 0;
    o.config.blocking = 1;
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 27, 0)
    o.config.commName = m->name;
#endif
#ifdef NCCL_CTA_POLICY_ZERO
    if (copy_engine)
        o.config.CTAPolicy = NCCL_CTA_POLICY_ZERO;
#else
    (void)copy_engine;
#endif
    m->lent = p->opt.lent && !p->api.CommSplit;
    if (m->lent) {
        m->comm = p->opt.lent;
    } else {
        snprintf(what, sizeof what, "%s of the %s communicator",
                 o.lent ? "ncclCommSplit" : "ncclCommInitRankConfig", m->name);
        err = zr_nccl_within(p, what, p->opt.timeout_ms, open_one, &o, sizeof o, &res);
        if (!err && res)
            err = zr_nccl_say(p, NULL, res, what);
        if (!err)
            m->comm = o.out;
    }
    return agree(p, err, 0, NULL);
}

static int check_lent(const struct zr_nccl_pair *p)
{
    int world = 0, rank = -1;
    ncclResult_t res = p->api.CommCount(p->opt.lent, &world);
    if (!res)
        res = p->api.CommUserRank(p->opt.lent, &rank);
    if (res)
        return zr_nccl_say(p, NULL, res, "the ncclComm_t that was lent");
    if (world != p->world || rank != p->rank)
        return zr_fail(ZR_ERR_ARG,
                       "the ncclComm_t that was lent is rank %d of %d: it must be rank %d of %d, as here",
                       rank, world, p->rank, p->world);
    return 0;
}

/* What this rank can find out alone. */
static int prepare(struct zr_nccl_pair *p)
{
    const struct zr_nccl_options *o = &p->opt;
    const struct zr_device_ops *d = p->dev->ops;
    int64_t least = zr_nccl_reserve_bytes(p->world, o->deterministic, 0);
    if (o->timeout_ms <= 0 || o->timeout_ms > INT64_MAX / 2000000)
        return zr_fail(ZR_ERR_ARG, "nccl: timeout_ms is %lld: more than 0 is allowed",
                       (long long)o->timeout_ms);
    if (d->compute_on_caller || !d->stream_native)
        return zr_fail(ZR_ERR_NOTSUP, "nccl works on the cuda device, not on %s", d->name);
    if (o->deterministic && p->world > ZR_MAX_SOURCES)
        return zr_fail(ZR_ERR_NOTSUP, "nccl: deterministic with %d ranks: up to %d are allowed", p->world,
                       ZR_MAX_SOURCES);
    if (o->reserve_bytes < least || o->reserve_bytes % ZR_NCCL_ALIGN)
        return zr_fail(ZR_ERR_ARG, "nccl: reserve_bytes is %lld: a multiple of %d from %lld is allowed",
                       (long long)o->reserve_bytes, ZR_NCCL_ALIGN, (long long)least);
    int err = zr_nccl_load(o->library, &p->api);
    if (err)
        return err;
    char version[32];
    version_text(p->api.version, version, sizeof version);
    if (p->api.version < OLDEST)
        return zr_fail(ZR_ERR_NOTSUP, "NCCL is %s: 2.14 or newer is needed", version);
    bool has_copy_engine = p->api.version >= COPY_ENGINE;
#ifndef NCCL_CTA_POLICY_ZERO
    has_copy_engine = false;
#endif
    if (o->copy_engine > 0 && !has_copy_engine)
        return zr_fail(ZR_ERR_NOTSUP,
                       "copy_engine is on: NCCL is %s, built with %d.%d: 2.28 or newer is needed", version,
                       NCCL_MAJOR, NCCL_MINOR);
    if (!has_copy_engine)
        p->opt.copy_engine = -1;
    return o->lent ? check_lent(p) : 0;
}

static int open_events(struct zr_nccl *m)
{
    const struct zr_device_ops *d = m->pair->dev->ops;
    int err = 0;
    for (int i = 0; i < ZR_NCCL_PENDING && !err; i++) {
        err = d->event_open(m->pair->dev, &m->pending[i].begun);
        if (!err)
            err = d->event_open(m->pair->dev, &m->pending[i].done);
    }
    return err;
}

static int open_host(struct zr_nccl_pair *p)
{
    void *host;
    int64_t bytes = (int64_t)sizeof *p->ledgers * ZR_NCCL_LEDGERS * p->world;
    int err = p->dev->ops->host_alloc(p->dev, bytes, &host);
    if (err)
        return err;
    p->ledgers = host;
    p->ledgers_bytes = bytes;
    err = open_events(&p->gather);
    return err ? err : open_events(&p->reduce);
}

static void init_comm(struct zr_nccl *m, struct zr_nccl_pair *p, const char *name)
{
    m->base = (struct zr_comm){
        .ops = p->opt.deterministic ? &zr_nccl_fixed_ops : &zr_nccl_ops, .rank = p->rank, .world = p->world};
    m->pair = p;
    m->name = name;
}

int zr_nccl_open(struct zr_rendezvous *rdv, struct zr_device *dev, const struct zr_nccl_options *opt,
                 struct zr_comm **gather, struct zr_comm **reduce)
{
    struct zr_nccl_pair *p = calloc(1, sizeof *p);
    *gather = *reduce = NULL;
    if (!p)
        return zr_fail(ZR_ERR_NOMEM, "nccl: no memory for a pair of communicators");
    p->dev = dev;
    p->rdv = rdv;
    p->opt = *opt;
    p->rank = zr_rendezvous_rank(rdv);
    p->world = zr_rendezvous_world(rdv);
    p->timeout_ns = opt->timeout_ms * 1000000;
    init_comm(&p->gather, p, "gather");
    init_comm(&p->reduce, p, "reduce");
    int err = zr_nccl_watch(p);
    if (err) {
        free(p);
        return err;
    }
    err = prepare(p);
    if (!err)
        err = open_host(p);
    struct card first;
    bool one_host;
    err = meet(p, err, &first, &one_host);
    if (p->opt.copy_engine == 0)
        p->opt.copy_engine = one_host ? 1 : -1;
    if (!err)
        err = open_comm(&p->gather, &first.id[0], p->opt.copy_engine > 0);
    if (!err)
        err = open_comm(&p->reduce, &first.id[1], false);
    if (err) {
        char text[ZR_ERROR_BYTES];
        snprintf(text, sizeof text, "%s", zr_error_text());
        zr_nccl_close(&p->gather.base);
        zr_nccl_close(&p->reduce.base);
        return zr_fail(err, "%s", text);
    }
    *gather = &p->gather.base;
    *reduce = &p->reduce.base;
    return 0;
}

/* ---- arenas ---- */

struct memory {
    struct zr_nccl_api api;
    void *at;
    size_t bytes;
};

static ncclResult_t alloc_memory(void *arg)
{
    struct memory *m = arg;
    return m->api.MemAlloc(&m->at, m->bytes);
}

static ncclResult_t free_memory(void *arg)
{
    struct memory *m = arg;
    return m->api.MemFree(m->at);
}

static void free_arena(struct zr_nccl *m)
{
    struct zr_nccl_pair *p = m->pair;
    struct memory mem = {.api = p->api, .at = m->arena};
    ncclResult_t res;
    if (m->arena && m->arena_of_nccl)
        zr_nccl_within(p, "ncclMemFree", CLOSE_MS, free_memory, &mem, sizeof mem, &res);
    else if (m->arena)
        p->dev->ops->free(p->dev, m->arena, m->arena_bytes);
    m->arena = NULL;
}

/* Not registered yet. */
static int take_memory(struct zr_nccl *m, int64_t bytes, void **out)
{
    struct zr_nccl_pair *p = m->pair;
    const struct zr_device_ops *d = p->dev->ops;
    struct zr_stream *s = NULL;
    struct memory mem = {.api = p->api, .bytes = (size_t)bytes};
    ncclResult_t res = ncclSuccess;
    int err = 0;
    if (p->api.MemAlloc && p->api.MemFree)
        err = zr_nccl_within(p, "ncclMemAlloc", p->opt.timeout_ms, alloc_memory, &mem, sizeof mem, &res);
    m->arena_of_nccl = !err && !res && mem.at;
    m->arena_bytes = bytes;
    if (!err && !m->arena_of_nccl)
        err = d->alloc(p->dev, bytes, &mem.at);
    if (err)
        return err;
    void *base = *out = mem.at;
    err = d->stream_open(p->dev, ZR_STREAM_QUEUE, "arena", NULL, &s);
    if (!err)
        err = d->zero(s, base, bytes);
    if (!err)
        err = d->stream_sync(s);
    d->stream_close(s);
    return err;
}

#if ZR_NCCL_WINDOWS
struct registering {
    struct zr_nccl_api api;
    ncclComm_t comm;
    void *at;
    size_t bytes;
    ncclWindow_t window;
};

static ncclResult_t register_window(void *arg)
{
    struct registering *r = arg;
    return r->api.CommWindowRegister(r->comm, r->at, r->bytes, &r->window, NCCL_WIN_COLL_SYMMETRIC);
}

static ncclResult_t deregister_window(void *arg)
{
    struct registering *r = arg;
    return r->api.CommWindowDeregister(r->comm, r->window);
}

/* The window stays NULL, and no error is returned, where NCCL or the machine has none. */
static int open_window(struct zr_nccl *m, char *base, int64_t bytes)
{
    struct zr_nccl_pair *p = m->pair;
    struct registering r = {.api = p->api, .comm = m->comm, .at = base, .bytes = (size_t)bytes};
    ncclResult_t res = ncclSuccess;
    int err =
        zr_nccl_within(p, "ncclCommWindowRegister", p->opt.timeout_ms, register_window, &r, sizeof r, &res);
    if (!err && res)
        err = zr_nccl_say(p, m->comm, res, "ncclCommWindowRegister");
    m->window = err ? NULL : r.window;
    return err;
}

static int close_window(struct zr_nccl *m)
{
    struct zr_nccl_pair *p = m->pair;
    struct registering r = {.api = p->api, .comm = m->comm, .window = m->window};
    ncclResult_t res;
    if (!m->window)
        return 0;
    m->window = NULL;
    return zr_nccl_within(p, "ncclCommWindowDeregister", CLOSE_MS, deregister_window, &r, sizeof r, &res);
}

static bool can_register(const struct zr_nccl_api *api)
{
    return api->CommWindowRegister && api->CommWindowDeregister;
}
#else
static int open_window(struct zr_nccl *m, char *base, int64_t bytes)
{
    (void)m, (void)base, (void)bytes;
    return 0;
}

static int close_window(struct zr_nccl *m)
{
    (void)m;
    return 0;
}

static bool can_register(const struct zr_nccl_api *api)
{
    (void)api;
    return false;
}
#endif

/* The fixed tree's slices travel by send and receive, which use no windows. */
static const char *why_plain(const struct zr_nccl *m, int64_t n_of_nccl)
{
    const struct zr_nccl_pair *p = m->pair;
    if (p->opt.deterministic && m == &p->reduce)
        return "plain, sums in the fixed tree";
    if (!can_register(&p->api) || p->api.version < 22700)
        return "plain: symmetric windows need 2.27, here and when it was built";
    if (n_of_nccl < p->world)
        return "plain: ncclMemAlloc gave no memory";
    return NULL;
}

/* Registers on all ranks or on none, and writes the path. */
static int choose_path(struct zr_nccl *m, char *base, int64_t bytes, int64_t n_of_nccl)
{
    struct zr_nccl_pair *p = m->pair;
    struct tally with;
    char version[32];
    const char *plain = why_plain(m, n_of_nccl);
    version_text(p->api.version, version, sizeof version);
    if (!plain) {
        int err = open_window(m, base, bytes);
        err = agree(p, err, m->window != NULL, &with);
        if (err)
            return err;
        if (with.sum < p->world) {
            plain = "plain: no symmetric windows on this machine";
            err = close_window(m);
            if (err)
                return err;
        }
    }
    bool engine = !plain && m == &p->gather && p->opt.copy_engine > 0;
    snprintf(m->path, sizeof m->path, "NCCL %s, %s", version,
             plain    ? plain
             : engine ? "symmetric windows, copy engine"
                      : "symmetric windows");
    say(p, "nccl %s: %s", m->name, m->path);
    if (plain && m == &p->gather && p->opt.copy_engine > 0)
        say(p, "nccl gather: no copy engine without symmetric windows");
    return 0;
}

int zr_nccl_arena(struct zr_comm *c, int64_t bytes, void **base)
{
    struct zr_nccl *m = zr_nccl_of(c);
    struct zr_nccl_pair *p = m->pair;
    int64_t reserve = m == &p->reduce ? p->opt.reserve_bytes : 0;
    struct tally t;
    void *at = NULL;
    int err = 0;
    if (m->arena)
        return zr_fail(ZR_ERR_ORDER, "nccl %s: the arena is made once", m->name);
    if (bytes <= reserve || (reserve && bytes % ZR_NCCL_ALIGN))
        err = zr_fail(ZR_ERR_ARG,
                      "nccl %s: the arena is %lld bytes: more than reserve_bytes (%lld)%s is allowed",
                      m->name, (long long)bytes, (long long)reserve, reserve ? ", a multiple of 256," : "");
    err = agree(p, err, bytes, &t);
    if (!err && t.odd >= 0)
        err = zr_fail(ZR_ERR_MISMATCH, "nccl %s: the arena is %lld bytes on rank %d and %lld on rank 0",
                      m->name, (long long)t.odd_number, t.odd, (long long)t.first);
    if (err)
        return err;
    err = take_memory(m, bytes, &at);
    err = agree(p, err, m->arena_of_nccl, &t);
    if (!err)
        err = choose_path(m, at, bytes, t.sum);
    m->arena = at;
    if (err) {
        char text[ZR_ERROR_BYTES];
        snprintf(text, sizeof text, "%s", zr_error_text());
        if (zr_nccl_settle(m) && close_window(m) == 0) /* else it stays NCCL's: it may yet be registered */
            free_arena(m);
        m->arena = NULL;
        return zr_fail(err, "%s", text);
    }
    m->usable_bytes = bytes - reserve;
    m->ledgers_at = m->usable_bytes;
    m->scratch_at = m->usable_bytes + zr_nccl_reserve_bytes(p->world, false, 0);
    m->scratch_bytes = bytes - m->scratch_at;
    *base = at;
    return 0;
}

/* ---- closing ---- */

struct destroying {
    struct zr_nccl_api api;
    ncclComm_t comm;
};

static ncclResult_t destroy_comm(void *arg)
{
    struct destroying *d = arg;
    return d->api.CommDestroy(d->comm);
}

static void close_events(struct zr_nccl *m)
{
    const struct zr_device_ops *d = m->pair->dev->ops;
    for (int i = 0; i < ZR_NCCL_PENDING; i++) {
        d->event_close(m->pending[i].begun);
        d->event_close(m->pending[i].done);
    }
}

void zr_nccl_close(struct zr_comm *c)
{
    if (!c)
        return;
    struct zr_nccl *m = zr_nccl_of(c);
    struct zr_nccl_pair *p = m->pair;
    bool well = zr_nccl_settle(m);
    if (well && m->comm)
        well = close_window(m) == 0;
    if (well && m->comm && !m->lent) {
        struct destroying d = {p->api, m->comm};
        ncclResult_t res;
        well = zr_nccl_within(p, "ncclCommDestroy", CLOSE_MS, destroy_comm, &d, sizeof d, &res) == 0;
    }
    if (well)
        free_arena(m);
    else
        say(p, "nccl %s: a call into NCCL has not come back: the communicator is left behind with its memory",
            m->name);
    pthread_mutex_lock(&p->lock);
    m->comm = NULL;
    m->n_got = m->n_put;
    m->closed = true;
    bool last = p->gather.closed && p->reduce.closed;
    pthread_mutex_unlock(&p->lock);
    if (!last)
        return;
    zr_nccl_unwatch(p);
    close_events(&p->gather);
    close_events(&p->reduce);
    if (p->ledgers && !p->stuck)
        p->dev->ops->host_free(p->dev, p->ledgers, p->ledgers_bytes);
    free(p);
}
