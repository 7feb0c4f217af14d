/* SPDX-License-Identifier: Apache-2.0 */
/* nccl_open.c: opens the NCCL communicators of a context, and closes them. */
#include "comm/meet/rendezvous.h"
#include "comm/nccl/nccl_comm.h"
#include "comm/nccl/nccl_versions.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void zr_nccl_version_text(int v, char *text, size_t n_text)
{
    snprintf(text, n_text, "%d.%d.%d", v / 10000, v / 100 % 100, v % 100);
}

/* ---- opening ---- */

struct opening {
    struct zr_nccl_api api;
    ncclComm_t parent, *out;
    int64_t until_ns;
    struct zr_group group;
    ncclUniqueId *ids;
    int n_ids;
    struct zr_nccl_config config;
};

/* Most blocks of threads that a role's kernels may use, as the GPU has other work. Agreements are small. The
 * messages of a pipeline and tied gradients are mostly hidden behind compute. */
static int most_blocks(enum zr_role role)
{
    switch (role) {
    case ZR_ROLE_CONTROL:
    case ZR_ROLE_WORLD:
        return 1;
    case ZR_ROLE_TIED:
    case ZR_ROLE_EVEN_PAIR:
    case ZR_ROLE_ODD_PAIR:
    case ZR_ROLE_CLOSING_PAIR:
        return 4;
    default:
        return NCCL_CONFIG_UNDEF_INT;
    }
}

/* Communicators run at the same time, so they share no resources (splitShare), and NCCL starts their kernels
 * in the order of the calls (launchOrderImplicit). */
static struct zr_nccl_config make_config(const struct zr_nccl *m)
{
    enum { UNSET = NCCL_CONFIG_UNDEF_INT };
    int version = m->set->api.version;
    return (struct zr_nccl_config){
        .size = sizeof(struct zr_nccl_config),
        .magic = 0xcafebeef,
        .version = (unsigned)(version < ZR_NCCL_HAS_LAUNCH_ORDER ? version : ZR_NCCL_HAS_LAUNCH_ORDER),
        .blocking = 1,
        .cgaClusterSize = UNSET,
        .minCTAs = UNSET,
        .maxCTAs = most_blocks(m->base.role),
        .splitShare = 0,
        .trafficClass = UNSET,
        .commName = m->name,
        .collnetEnable = UNSET,
        .CTAPolicy = m->copy_engine ? ZR_NCCL_CTA_POLICY_ZERO : UNSET,
        .shrinkShare = UNSET,
        .nvlsCTAs = UNSET,
        .nChannelsPerNetPeer = UNSET,
        .nvlinkCentricSched = UNSET,
        .graphUsageMode = UNSET,
        .numRmaCtx = UNSET,
        .maxP2pPeers = UNSET,
        .graphStreamOrdering = UNSET,
        .launchOrderImplicit = 1,
        .numRmaSig = UNSET,
    };
}

/* Opens a communicator. If its parent is non-blocking, a thread of NCCL's makes the split later. */
static int open_one(void *arg)
{
    struct opening *o = arg;
    ncclConfig_t *config = (ncclConfig_t *)&o->config;
    if (!o->parent && o->n_ids > 1)
        return o->api.CommInitRankScalable(o->out, o->group.size, o->group.rank, o->n_ids, o->ids, config);
    if (!o->parent)
        return o->api.CommInitRankConfig(o->out, o->group.size, o->ids[0], o->group.rank, config);
    /* Groups have no member in common, so the rank of a member is the color. A rank alone takes no part. */
    int color = o->group.size > 1 ? zr_group_member(&o->group, 0) : NCCL_SPLIT_NOCOLOR;
    ncclResult_t res = o->api.CommSplit(o->parent, color, o->group.rank, o->out, config);
    return zr_nccl_await(&o->api, o->parent, res, o->group.size > 1 ? o->out : NULL, o->until_ns);
}

/* Where NCCL writes a communicator, and the ids that it reads. After a call that has not returned and may
 * still do so, it is never freed. A leak checker finds it through this list. */
struct place {
    ncclComm_t comm;
    struct place *next;
    ncclUniqueId ids[];
};
static struct place *_Atomic left_behind;

static void leave_behind(struct place *c)
{
    c->next = atomic_load(&left_behind);
    while (!atomic_compare_exchange_weak(&left_behind, &c->next, c))
        ;
}

bool zr_nccl_splits(const struct zr_nccl *m)
{
    /* The first communicator has all ranks, so the others are split off it. */
    const struct zr_nccl_set *p = m->set;
    return p->api.CommSplit && (p->opt.user_comm || m != p->open[0]);
}

int zr_nccl_n_ids(const struct zr_nccl *m)
{
    const struct zr_nccl_set *p = m->set;
    int per_id = p->opt.ranks_per_id ? p->opt.ranks_per_id : ZR_NCCL_RANKS_PER_ID, size = m->base.group.size;
    if (p->opt.user_comm || zr_nccl_splits(m) || zr_nccl_is_alone(m))
        return 0;
    return p->api.CommInitRankScalable ? (size - 1) / per_id + 1 : 1;
}

/* NCCL distributes ranks over ids by the same rule, so each rank reports to the first rank of its id. */
int zr_nccl_id_place(const struct zr_nccl *m, int id)
{
    int n = zr_nccl_n_ids(m), each = m->base.group.size / n, more = m->base.group.size % n;
    return id * each + (id < more ? id : more);
}

/* Allocates a place. It is not on the stack, as NCCL may use it after open_comm has returned. */
static struct place *make_place(const ncclUniqueId *ids, int n_ids)
{
    struct place *out = calloc(1, sizeof *out + (size_t)n_ids * sizeof *ids);
    if (out && n_ids)
        memcpy(out->ids, ids, (size_t)n_ids * sizeof *ids);
    return out;
}

static int open_comm(struct zr_nccl *m, const ncclUniqueId *ids)
{
    struct zr_nccl_set *p = m->set;
    struct opening o = {.api = p->api, .group = m->base.group, .config = make_config(m)};
    ncclResult_t res = ncclSuccess;
    char what[64];
    int err = 0;
    o.n_ids = zr_nccl_n_ids(m);
    struct place *out = make_place(ids, o.n_ids);
    if (zr_nccl_splits(m))
        o.parent = p->opt.user_comm ? p->opt.user_comm : p->open[0]->comm;
    o.out = out ? &out->comm : NULL;
    o.ids = out ? out->ids : NULL;
    /* The deadline of the call around it passes first. */
    o.until_ns = zr_now_ns() + p->opt.start_timeout_ms * 1000000 + 1000000000;
    m->user_comm = p->opt.user_comm && !p->api.CommSplit && !zr_nccl_is_alone(m);
    if (m->user_comm) {
        m->comm = p->opt.user_comm;
    } else if (zr_nccl_is_alone(m) && !o.parent) {
        /* A single rank needs no communicator. */
    } else if (!out) {
        err = zr_fail(ZERO_ERR_NOMEM, "nccl %s: no memory for a communicator", m->name);
    } else {
        snprintf(what, sizeof what, "%s of the %s communicator",
                 o.parent      ? "ncclCommSplit"
                 : o.n_ids > 1 ? "ncclCommInitRankScalable"
                               : "ncclCommInitRankConfig",
                 m->name);
        err = zr_nccl_together(p, what, open_one, &o, sizeof o, &res);
        bool late = err == ZERO_ERR_TIMEOUT || res == ncclInProgress;
        if (!err && res == ncclInProgress)
            err = zr_fail(ZERO_ERR_NOTSUP,
                          "%s returned before it had finished: is NCCL_COMM_BLOCKING=0 set? Unset it, "
                          "because libzero's communicators must block",
                          what);
        if (!err && res)
            err = zr_nccl_say(p, NULL, res, what);
        if (!err)
            m->comm = out->comm;
        if (late) {
            leave_behind(out);
            out = NULL;
        }
    }
    free(out);
    return zr_nccl_agree(p, err, 0, NULL, NULL);
}

static bool is_world_in_order(const struct zr_group *g, int world)
{
    bool is = g->size == world;
    for (int i = 0; i < g->size && is; i++)
        is = zr_group_member(g, i) == i;
    return is;
}

static int check_user_comm(const struct zr_nccl_set *p)
{
    int world = 0, rank = -1;
    ncclResult_t res = p->api.CommCount(p->opt.user_comm, &world);
    if (!res)
        res = p->api.CommUserRank(p->opt.user_comm, &rank);
    if (res)
        return zr_nccl_say(p, NULL, res, "nccl_comm");
    if (world != p->world || rank != p->rank)
        return zr_fail(ZERO_ERR_ARG, "nccl_comm is rank %d of %d, but this is rank %d of %d", rank, world,
                       p->rank, p->world);
    for (int i = 0; i < p->n_open && !p->api.CommSplit; i++)
        if (!is_world_in_order(&p->open[i]->base.group, world))
            return zr_fail(ZERO_ERR_NOTSUP,
                           "nccl_comm has %d ranks, and a group of %d is needed: this NCCL cannot split it "
                           "(2.18 or newer can)",
                           world, p->open[i]->base.group.size);
    return 0;
}

/* Whether a communicator gathers by copy engines. That is only on request, as no run on several GPUs has
 * shown yet that it works. A copy engine that is stuck cannot be aborted. */
static bool wants_engine(const struct zr_nccl *m, const char *version)
{
    const struct zr_nccl_options *o = &m->set->opt;
    const struct zr_nccl_fault *f =
        zr_nccl_fault_of(ZR_NCCL_USE_COPY_ENGINE, m->set->api.version, m->base.group.size);
    if (!o->copy_engine || (m->base.role != ZR_ROLE_GATHER && m->base.role != ZR_ROLE_GATHER_OUTER))
        return false;
    if (f)
        zr_warn(o->log, "copy_engine is on with NCCL %s: %s (%s); copy_engine = 0 avoids it", version,
                f->what, f->source);
    return true;
}

static int check_tree_size(const struct zr_nccl_set *p)
{
    for (int i = 0; i < p->n_open; i++) {
        const struct zr_comm *c = &p->open[i]->base;
        if (p->opt.deterministic && zr_role_reduces(c->role) && c->group.size > ZR_MAX_SOURCES)
            return zr_fail(ZERO_ERR_NOTSUP, "nccl %s: deterministic with %d ranks: up to %d are allowed",
                           p->open[i]->name, c->group.size, ZR_MAX_SOURCES);
    }
    return 0;
}

/* Several communicators may deadlock on a GPU that has no room for all their kernels, unless NCCL starts
 * these in one order. It does so if the communicator's options say so, from 2.32 on, or before that if a
 * variable in the environment does. A library cannot set that one: other threads may be reading the
 * environment. */
static void warn_of_order(const struct zr_nccl_set *p, const char *version)
{
    const char *set = getenv("NCCL_LAUNCH_ORDER_IMPLICIT");
    int n = 0;
    for (int i = 0; i < p->n_open; i++)
        n += !zr_nccl_is_alone(p->open[i]);
    if (n < 2 || p->rank || p->api.version >= ZR_NCCL_HAS_LAUNCH_ORDER || (set && strcmp(set, "1") == 0))
        return;
    if (p->api.version < ZR_NCCL_HAS_ORDER_VARIABLE)
        zr_warn(p->opt.log,
                "NCCL %s does not order several communicators, which may deadlock: use 2.26 or newer",
                version);
    else
        zr_warn(
            p->opt.log,
            "set NCCL_LAUNCH_ORDER_IMPLICIT=1 for every rank, as zero-run does: without it NCCL %s does not "
            "order several communicators, which may deadlock",
            version);
}

/* Contexts of this process with communicators on each GPU. */
static atomic_int n_contexts[64];

/* NCCL needs the operations of all contexts on a GPU in one order on all ranks, and each has a thread that
 * issues them. */
static void warn_of_contexts(struct zr_nccl_set *p)
{
    ncclComm_t comm = p->open[0]->comm;
    int gpu = -1;
    if (!comm || p->open[0]->user_comm || !p->api.CommCuDevice || p->api.CommCuDevice(comm, &gpu) ||
        gpu < 0 || gpu >= (int)(sizeof n_contexts / sizeof *n_contexts))
        return;
    p->gpu = gpu;
    if (atomic_fetch_add(&n_contexts[gpu], 1) > 0)
        zr_warn(p->opt.log,
                "another context of this process has NCCL communicators on GPU %d: if calls on both overlap, "
                "the ranks may deadlock (gpus.md)",
                gpu);
}

/* Checks and prepares what needs no other rank. */
static int prepare(struct zr_nccl_set *p)
{
    const struct zr_nccl_options *o = &p->opt;
    const struct zr_device_ops *d = p->dev->ops;
    const int64_t most = INT64_MAX / 2000000;
    if (o->timeout_ms <= 0 || o->timeout_ms > most || o->start_timeout_ms <= 0 || o->start_timeout_ms > most)
        return zr_fail(ZERO_ERR_ARG,
                       "nccl: timeout_ms is %lld, start_timeout_ms %lld: more than 0 is allowed",
                       (long long)o->timeout_ms, (long long)o->start_timeout_ms);
    if (d->compute_on_caller || !d->stream_native)
        return zr_fail(ZERO_ERR_NOTSUP, "nccl works on the cuda device, not on %s", d->name);
    int err = check_tree_size(p);
    if (!err)
        err = zr_nccl_load(o->library, o->user_comm != NULL, &p->api);
    if (err)
        return err;
    char version[32];
    zr_nccl_version_text(p->api.version, version, sizeof version);
    if (p->api.version < ZR_NCCL_OLDEST)
        return zr_fail(ZERO_ERR_NOTSUP, "NCCL is %s: 2.14 or newer is needed", version);
    zr_info(o->log, "nccl: NCCL %s from %s", version, p->api.path);
    warn_of_order(p, version);
    bool has_copy_engine = p->api.version >= ZR_NCCL_HAS_COPY_ENGINE;
#ifndef NCCL_CTA_POLICY_ZERO
    has_copy_engine = false;
#endif
    if (o->copy_engine && !has_copy_engine)
        return zr_fail(ZERO_ERR_NOTSUP,
                       "copy_engine is on: NCCL is %s, built with %d.%d: 2.28 or newer is needed", version,
                       NCCL_MAJOR, NCCL_MINOR);
    for (int i = 0; i < p->n_open; i++)
        p->open[i]->copy_engine = !zr_nccl_is_alone(p->open[i]) && wants_engine(p->open[i], version);
    return o->user_comm ? check_user_comm(p) : 0;
}

static int open_events(struct zr_nccl *m)
{
    const struct zr_device_ops *d = m->set->dev->ops;
    int err = 0;
    for (int i = 0; i < ZR_NCCL_PENDING && !err; i++) {
        err = d->event_open(m->set->dev, &m->pending[i].begun);
        if (!err)
            err = d->event_open(m->set->dev, &m->pending[i].done);
    }
    return err;
}

static int open_host(struct zr_nccl_set *p)
{
    void *host;
    int64_t bytes = (int64_t)sizeof *p->ledgers * ZR_NCCL_LEDGERS * p->comparing->base.group.size;
    int err = p->dev->ops->host_alloc(p->dev, bytes, &host);
    if (err)
        return err;
    p->ledgers = host;
    p->ledgers_bytes = bytes;
    for (int i = 0; i < p->n_open && !err; i++)
        err = open_events(p->open[i]);
    return err;
}

static void init_comm(struct zr_nccl_set *p, enum zr_role role, const struct zr_role_ask *ask)
{
    struct zr_nccl *m = &p->of[role];
    if (!ask->group)
        return;
    m->base = (struct zr_comm){.ops = &p->ops,
                               .group = *ask->group,
                               .role = role,
                               .alarm = &p->alarm,
                               .failure = &m->failure,
                               .reserve = zr_nccl_role_bytes(role, ask, p->opt.deterministic),
                               .packs_gathers = p->opt.small_bytes,
                               .packs_sums = p->opt.deterministic ? 0 : p->opt.small_bytes};
    m->set = p;
    m->name = zr_role_name(role);
    m->largest = ask->largest_bytes;
    m->packed = role == ZR_ROLE_CONTROL || role == ZR_ROLE_WORLD ? 0 : ask->packed_bytes;
    m->hash = (uint64_t)zr_group_member(ask->group, 0) * ZR_ROLES + role;
    p->open[p->n_open++] = m;
}

/* Returns a role whose group is the world. */
static enum zr_role widest(const struct zr_role_ask ask[ZR_ROLES])
{
    return ask[ZR_ROLE_WORLD].group     ? ZR_ROLE_WORLD
           : ask[ZR_ROLE_CONTROL].group ? ZR_ROLE_CONTROL
                                        : ZR_ROLE_GATHER;
}

static struct zr_nccl_set *make_set(struct zr_rendezvous *rdv, struct zr_device *dev,
                                    const struct zr_nccl_options *opt, const struct zr_role_ask *ask)
{
    struct zr_nccl_set *p = calloc(1, sizeof *p);
    if (!p)
        return NULL;
    p->n_users = 1;
    p->gpu = -1;
    p->dev = dev;
    p->rdv = rdv;
    p->opt = *opt;
    if (!opt->start_timeout_ms)
        p->opt.start_timeout_ms = opt->timeout_ms;
    p->ops = zr_nccl_ops;
    p->ops.deterministic = opt->deterministic;
    p->rank = zr_rendezvous_rank(rdv);
    p->world = zr_rendezvous_world(rdv);
    p->timeout_ns = opt->timeout_ms * 1000000;
    /* The first one has all ranks, so that the others can be split off it. */
    enum zr_role first = widest(ask);
    init_comm(p, first, &ask[first]);
    for (int r = 0; r < ZR_ROLES; r++)
        if (r != (int)first)
            init_comm(p, (enum zr_role)r, &ask[r]);
    p->comparing = &p->of[ask[ZR_ROLE_CONTROL].group ? ZR_ROLE_CONTROL : ZR_ROLE_REDUCE];
    p->comparing->compares = true;
    p->of[ZR_ROLE_WORLD].compares = ask[ZR_ROLE_WORLD].group != NULL;
    return p;
}

bool zr_nccl_is_stuck(struct zr_nccl_set *p)
{
    pthread_mutex_lock(&p->lock);
    bool stuck = p->stuck;
    pthread_mutex_unlock(&p->lock);
    return stuck;
}

static void close_all(struct zr_nccl_set *p)
{
    /* The last communicator to close frees p. */
    for (int n = p->n_open, i = 0; i < n; i++)
        zr_nccl_close(&p->open[i]->base);
}

int zr_nccl_open(struct zr_rendezvous *rdv, struct zr_device *dev, const struct zr_nccl_options *opt,
                 const struct zr_role_ask ask[ZR_ROLES], struct zr_comm *comm[ZR_ROLES])
{
    struct zr_nccl_set *p = make_set(rdv, dev, opt, ask);
    ncclUniqueId *ids[ZR_ROLES] = {NULL};
    memset(comm, 0, ZR_ROLES * sizeof *comm);
    if (!p)
        return zr_rendezvous_fail(rdv, zr_fail(ZERO_ERR_NOMEM, "nccl: no memory for communicators"));
    int err = zr_nccl_watch(p);
    if (err) {
        free(p);
        return zr_rendezvous_fail(rdv, err); /* the other ranks wait to compare cards */
    }
    err = prepare(p);
    if (!err)
        err = open_host(p);
    err = zr_nccl_meet(p, err, ids);
    for (int i = 0; i < p->n_open && !err; i++)
        err = open_comm(p->open[i], ids[p->open[i]->base.role]);
    for (int r = 0; r < ZR_ROLES; r++)
        free(ids[r]);
    if (err) {
        struct zr_saved_error kept;
        zr_error_save(&kept, err);
        /* A rank may be dead, and ncclCommDestroy would wait for it. */
        for (int i = 0; i < p->n_open && !zr_nccl_is_stuck(p); i++)
            zr_nccl_fail(p->open[i], err, "%s", kept.text);
        close_all(p);
        return zr_error_restore(&kept);
    }
    warn_of_contexts(p);
    for (int i = 0; i < p->n_open; i++)
        comm[p->open[i]->base.role] = &p->open[i]->base;
    return 0;
}

/* ---- closing ---- */

struct destroying {
    struct zr_nccl_api api;
    ncclComm_t comm;
};

static int destroy_comm(void *arg)
{
    struct destroying *d = arg;
    return d->api.CommDestroy(d->comm);
}

static void close_events(struct zr_nccl *m)
{
    const struct zr_device_ops *d = m->set->dev->ops;
    for (int i = 0; i < ZR_NCCL_PENDING; i++) {
        d->event_close(m->pending[i].begun);
        d->event_close(m->pending[i].done);
    }
}

void zr_nccl_set_drop(struct zr_nccl_set *p)
{
    if (atomic_fetch_sub(&p->n_users, 1) != 1)
        return;
    pthread_cond_destroy(&p->wake);
    pthread_mutex_destroy(&p->lock);
    free(p);
}

/* Takes the NCCL communicator to destroy, which no other thread then queries or aborts. Returns NULL if there
 * is none, or if it has been aborted. *well is false if it is left behind. */
static ncclComm_t take_comm(struct zr_nccl *m, bool *well)
{
    struct zr_nccl_set *p = m->set;
    ncclComm_t comm = NULL;
    bool settled = false;
    while (!settled) { /* a failure may be found in between */
        *well = zr_nccl_settle(m);
        pthread_mutex_lock(&p->lock);
        settled = !*well || !m->abort_wanted || m->abort_ended;
        if (settled && *well) {
            comm = m->comm;
            m->comm = NULL;
        }
        pthread_mutex_unlock(&p->lock);
    }
    return comm;
}

void zr_nccl_close(struct zr_comm *c)
{
    struct zr_nccl *m = zr_nccl_of(c);
    struct zr_nccl_set *p = m->set;
    bool well;
    ncclComm_t comm = take_comm(m, &well);
    if (comm)
        well = zr_nccl_close_window(m, comm) == 0;
    if (comm && well && !m->user_comm) {
        struct destroying d = {p->api, comm};
        ncclResult_t res;
        well =
            zr_nccl_timed_call(p, "ncclCommDestroy", ZR_NCCL_CLOSE_MS, destroy_comm, &d, sizeof d, &res) == 0;
    }
    if (well) {
        zr_arena_drop(c->held);
    } else {
        zr_nccl_leave_arena(c->held);
        zr_warn(p->opt.log,
                "nccl %s: a call into NCCL has not returned: the communicator and its memory are not freed",
                m->name);
    }
    pthread_mutex_lock(&p->lock);
    m->comm = NULL;
    m->n_got = m->n_put;
    m->closed = true;
    bool last = true;
    for (int i = 0; i < p->n_open; i++)
        last &= p->open[i]->closed;
    pthread_mutex_unlock(&p->lock);
    if (!last)
        return;
    if (p->gpu >= 0)
        atomic_fetch_sub(&n_contexts[p->gpu], 1);
    zr_nccl_unwatch(p);
    for (int i = 0; i < p->n_open; i++)
        close_events(p->open[i]);
    if (p->ledgers && !p->stuck)
        p->dev->ops->host_free(p->dev, p->ledgers, p->ledgers_bytes);
    zr_nccl_set_drop(p);
}
