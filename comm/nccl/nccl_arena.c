/* SPDX-License-Identifier: Apache-2.0 */
/* nccl_arena.c: arenas of NCCL communicators: memory from NCCL or the device, registered as a symmetric
 * window if all ranks can. */
#include "comm/meet/rendezvous.h"
#include "comm/nccl/nccl_comm.h"
#include "comm/nccl/nccl_versions.h"
#include "comm/shared_memory.h"
#include "kernels/alloc.h"

#include <stdio.h>
#include <stdlib.h>

/* ---- memory ---- */

struct memory {
    struct zr_nccl_api api;
    void *at;
    size_t bytes;
};

static int alloc_memory(void *arg)
{
    struct memory *m = arg;
    return m->api.MemAlloc(&m->at, m->bytes);
}

static int free_memory(void *arg)
{
    struct memory *m = arg;
    return m->api.MemFree(m->at);
}

struct nccl_arena {
    struct zr_arena base;
    struct zr_nccl_set *set; /* whose functions allocate and free it */
    bool of_nccl;
    /* It is in the list of arenas that are never freed. */
    atomic_bool left;
    struct nccl_arena *next;
};

/* Arenas that are never freed. A leak checker finds them and their sets through this list. */
static struct nccl_arena *_Atomic left_behind;

void zr_nccl_leave_arena(struct zr_arena *a)
{
    struct nccl_arena *own = (struct nccl_arena *)a;
    if (!own || atomic_exchange(&own->left, true))
        return;
    own->next = atomic_load(&left_behind);
    while (!atomic_compare_exchange_weak(&left_behind, &own->next, own))
        ;
}

static void free_nccl_arena(struct zr_arena *a)
{
    struct nccl_arena *own = (struct nccl_arena *)a;
    struct zr_nccl_set *p = own->set;
    struct memory mem = {.api = p->api, .at = a->base};
    ncclResult_t res;
    if (a->base && own->of_nccl)
        zr_nccl_timed_call(p, "ncclMemFree", ZR_NCCL_CLOSE_MS, free_memory, &mem, sizeof mem, &res);
    else if (a->base)
        p->dev->ops->free(p->dev, a->base, a->bytes);
    free(own);
    zr_nccl_set_drop(p);
}

/* Allocates and zeroes memory, without registering it. */
static int take_memory(struct zr_nccl_set *p, int64_t bytes, struct nccl_arena *a)
{
    struct memory mem = {.api = p->api, .bytes = (size_t)bytes};
    ncclResult_t res = ncclSuccess;
    int err = 0;
    if (p->api.MemAlloc && p->api.MemFree)
        err = zr_nccl_timed_call(p, "ncclMemAlloc", p->opt.start_timeout_ms, alloc_memory, &mem, sizeof mem,
                                 &res);
    a->of_nccl = !err && !res && mem.at;
    if (!err && !a->of_nccl)
        err = p->dev->ops->alloc(p->dev, bytes, &mem.at);
    if (err)
        return err;
    a->base.base = mem.at;
    return zr_plain_zero(p->dev, mem.at, bytes);
}

static int make_nccl_arena(struct zr_nccl_set *p, int64_t bytes, struct nccl_arena **out)
{
    ZR_TRY(ZR_ZALLOC(*out, 1, "an arena of nccl"));
    struct nccl_arena *a = *out;
    a->base = (struct zr_arena){.free = free_nccl_arena, .bytes = bytes, .n_held = 1};
    a->set = p;
    atomic_fetch_add(&p->n_users, 1);
    return take_memory(p, bytes, a);
}

int zr_nccl_arena(struct zr_comm *c, int64_t bytes, struct zr_arena **out)
{
    struct zr_nccl *m = zr_nccl_of(c);
    struct zr_nccl_set *p = m->set;
    struct zr_nccl_tally t;
    struct nccl_arena *a = NULL;
    int err = 0;
    if (bytes <= 0)
        err = zr_fail(ZERO_ERR_ARG, "nccl %s: the arena is %lld bytes: more than 0 are allowed", m->name,
                      (long long)bytes);
    err = zr_nccl_agree(p, err, bytes, m, &t);
    if (!err && t.odd >= 0)
        err = zr_fail(ZERO_ERR_MISMATCH, "nccl %s: the arena is %lld bytes on rank %d and %lld on rank %d",
                      m->name, (long long)t.odd_number, t.odd, (long long)t.first, zr_comm_rank(c, 0));
    else if (err)
        return err; /* on all ranks */
    if (!err)
        err = make_nccl_arena(p, bytes, &a);
    err = zr_nccl_agree(p, err, 0, NULL, NULL);
    if (!err) {
        *out = &a->base;
        return 0;
    }
    struct zr_saved_error kept;
    zr_error_save(&kept, err);
    if (a)
        zr_arena_drop(&a->base);
    return zr_error_restore(&kept);
}

/* ---- windows ---- */

#if ZR_NCCL_WINDOWS
struct registering {
    struct zr_nccl_api api;
    ncclComm_t comm;
    void *at;
    size_t bytes;
    ncclWindow_t window;
};

static int register_window(void *arg)
{
    struct registering *r = arg;
    return r->api.CommWindowRegister(r->comm, r->at, r->bytes, &r->window, NCCL_WIN_COLL_SYMMETRIC);
}

static int deregister_window(void *arg)
{
    struct registering *r = arg;
    return r->api.CommWindowDeregister(r->comm, r->window);
}

/* Registers the arena as a window. Without windows in NCCL or the machine, the window stays NULL, without an
 * error. */
static int open_window(struct zr_nccl *m, char *base, int64_t bytes)
{
    struct zr_nccl_set *p = m->set;
    struct registering r = {.api = p->api, .comm = m->comm, .at = base, .bytes = (size_t)bytes};
    ncclResult_t res = ncclSuccess;
    int err = zr_nccl_together(p, "ncclCommWindowRegister", register_window, &r, sizeof r, &res);
    if (!err && res)
        err = zr_nccl_say(p, m->comm, res, "ncclCommWindowRegister");
    m->window = err ? NULL : r.window;
    return err;
}

int zr_nccl_close_window(struct zr_nccl *m, ncclComm_t comm)
{
    struct zr_nccl_set *p = m->set;
    struct registering r = {.api = p->api, .comm = comm, .window = m->window};
    ncclResult_t res;
    if (!m->window)
        return 0;
    m->window = NULL;
    return zr_nccl_timed_call(p, "ncclCommWindowDeregister", ZR_NCCL_CLOSE_MS, deregister_window, &r,
                              sizeof r, &res);
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

int zr_nccl_close_window(struct zr_nccl *m, ncclComm_t comm)
{
    (void)m, (void)comm;
    return 0;
}

static bool can_register(const struct zr_nccl_api *api)
{
    (void)api;
    return false;
}
#endif

/* ---- the arena ---- */

/* Why the arena is not registered, or NULL. The fixed tree sends and receives slices, which uses no windows.
 * Windows are registered only if the user asks for copy engines, which need them: neither has run on several
 * GPUs yet. */
static const char *why_plain(const struct zr_nccl *m, int64_t n_of_nccl)
{
    const struct zr_nccl_set *p = m->set;
    if (zr_nccl_is_alone(m))
        return "one rank, no communicator";
    if (zr_role_is_pair(m->base.role))
        return "messages between two ranks";
    if (p->opt.deterministic && zr_role_reduces(m->base.role))
        return "plain, sums in the fixed tree";
    if (!p->opt.copy_engine)
        return "plain: copy_engine is off";
    if (!can_register(&p->api) || p->api.version < ZR_NCCL_HAS_WINDOWS)
        return "plain: symmetric windows need 2.27, here and when it was built";
    if (zr_nccl_fault_of(ZR_NCCL_USE_WINDOWS, p->api.version, m->base.group.size))
        return "plain: this version's symmetric windows are faulty";
    if (n_of_nccl < m->base.group.size)
        return "plain: ncclMemAlloc gave no memory";
    return NULL;
}

/* Registers the arena on all ranks of the group or on none, and writes the path. */
static int choose_path(struct zr_nccl *m, char *base, int64_t bytes, int64_t n_of_nccl)
{
    struct zr_nccl_set *p = m->set;
    struct zr_nccl_tally with;
    char version[32];
    const char *plain = why_plain(m, n_of_nccl);
    zr_nccl_version_text(p->api.version, version, sizeof version);
    int err = plain ? 0 : open_window(m, base, bytes);
    /* All ranks of the world call this, also those of a group that has no windows. */
    err = zr_nccl_agree(p, err, m->window != NULL, m, &with);
    if (err)
        return err;
    if (!plain && with.sum < m->base.group.size) {
        plain = "plain: no symmetric windows on this machine";
        err = zr_nccl_close_window(m, m->comm);
        if (err)
            return err;
    }
    bool engine = !plain && m->copy_engine,
         gathers = m->base.role == ZR_ROLE_GATHER || m->base.role == ZR_ROLE_GATHER_OUTER;
    snprintf(m->path, sizeof m->path, "NCCL %s, %s%s", version,
             plain    ? plain
             : engine ? "symmetric windows, copy engine"
                      : "symmetric windows",
             gathers && p->opt.ragged ? ", ragged by broadcasts" : "");
    zr_info(p->opt.log, "nccl %s: %s", m->name, m->path);
    const struct zr_nccl_fault *f = zr_nccl_fault_of(ZR_NCCL_USE_WINDOWS, p->api.version, m->base.group.size);
    if (f && p->opt.copy_engine)
        zr_info(p->opt.log, "nccl %s: no symmetric windows with NCCL %s: %s (%s)", m->name, version, f->what,
                f->source);
    if (plain && m->copy_engine)
        zr_warn(p->opt.log, "nccl %s: no copy engine without symmetric windows", m->name);
    return 0;
}

/* Divides the communicator's part of the arena, which begins at `at`. First comes the room for packed
 * segments. If it compares or sums, ledgers and the fixed tree's scratch memory follow. */
static void share_reserve(struct zr_nccl *m, int64_t at)
{
    int size = m->base.group.size;
    int64_t ledgers =
        (size * (int64_t)sizeof(struct zr_nccl_ledger) + ZR_NCCL_ALIGN - 1) / ZR_NCCL_ALIGN * ZR_NCCL_ALIGN;
    m->room_at = at;
    m->room_bytes = zr_role_is_pair(m->base.role) ? 0 : zr_nccl_room_bytes(size, m->packed);
    if (!m->compares && !zr_role_reduces(m->base.role))
        return;
    m->ledgers_at = m->room_at + m->room_bytes;
    m->scratch_at = m->ledgers_at + ledgers;
    m->scratch_bytes = at + m->base.reserve - m->scratch_at;
}

/* Undoes an attach. If the window could not be deregistered, the arena may still be registered and is
 * leaked. */
static int attach_no_more(struct zr_nccl *m, struct zr_arena *a, int err)
{
    struct zr_saved_error kept;
    zr_error_save(&kept, err);
    if (!zr_nccl_settle(m) || zr_nccl_close_window(m, m->comm)) {
        atomic_fetch_add(&a->n_held, 1);
        zr_nccl_leave_arena(a);
    }
    return zr_error_restore(&kept);
}

/* ---- the first operations ---- */

/* Input of the first operations. The communicator and the arena's address are copies: a thread that is left
 * behind goes on after both were taken from struct zr_nccl. The arena and the set are leaked then. */
struct warming {
    struct zr_nccl *m;
    ncclComm_t comm;
    char *base;
    /* Bytes for each rank of a gather or sum over the part of the arena before the communicator's own. */
    size_t bytes;
};

/* Each rank sends `bytes` at from to each other one, and receives theirs one after the other at to. */
static ncclResult_t warm_messages(const struct warming *w, const char *from, char *to, size_t bytes,
                                  cudaStream_t native)
{
    const struct zr_comm *c = &w->m->base;
    const struct zr_nccl_api *api = &w->m->set->api;
    ncclResult_t res = api->GroupStart(), ended;
    if (res)
        return res;
    for (int i = 0; i < c->group.size && !res; i++) {
        if (i == c->group.rank)
            continue;
        res = api->Send(from, bytes, ncclInt8, i, w->comm, native);
        if (!res)
            res = api->Recv(to, bytes, ncclInt8, i, w->comm, native);
        to += bytes;
    }
    ended = api->GroupEnd();
    return res ? res : ended;
}

/* A gather, or a sum of zeros, over size times bytes. Activations have both, and sums of whole arrays, and
 * messages among all ranks. */
static ncclResult_t warm_slices(const struct warming *w, char *at, size_t bytes, cudaStream_t native)
{
    const struct zr_comm *c = &w->m->base;
    const struct zr_nccl_api *api = &w->m->set->api;
    char *mine = at + bytes * (size_t)c->group.rank;
    ncclResult_t res = ncclSuccess;
    if (zr_role_reduces(c->role) && !w->m->set->opt.deterministic)
        res = api->ReduceScatter(at, mine, bytes / sizeof(float), ncclFloat32, ncclSum, w->comm, native);
    const bool activations = zr_role_moves_activations(c->role);
    if ((!zr_role_reduces(c->role) || activations) && !res)
        res = api->AllGather(mine, at, bytes, ncclInt8, w->comm, native);
    if (activations && !w->m->set->opt.deterministic && !res)
        res = api->AllReduce(at, at, bytes / sizeof(float) * (size_t)c->group.size, ncclFloat32, ncclSum,
                             w->comm, native);
    if (activations && !res)
        res = warm_messages(w, at + bytes * (size_t)(c->group.size - 1), at, bytes, native);
    return res;
}

/* A message each way between two ranks. */
static ncclResult_t warm_pair(const struct warming *w, cudaStream_t native)
{
    const struct zr_nccl_api *api = &w->m->set->api;
    int peer = 1 - w->m->base.group.rank;
    ncclResult_t res = api->GroupStart(), ended;
    if (res)
        return res;
    res = api->Send(w->base, ZR_NCCL_ALIGN, ncclInt8, peer, w->comm, native);
    if (!res)
        res = api->Recv(w->base + ZR_NCCL_ALIGN, ZR_NCCL_ALIGN, ncclInt8, peer, w->comm, native);
    ended = api->GroupEnd();
    return res ? res : ended;
}

/* The messages of the fixed tree. */
static ncclResult_t warm_tree(const struct warming *w, cudaStream_t native)
{
    const struct zr_nccl *m = w->m;
    int64_t bytes = m->scratch_bytes / (m->base.group.size - 1);
    if (bytes > m->room_at)
        bytes = m->room_at;
    return warm_messages(w, w->base, w->base + m->scratch_at, (size_t)bytes, native);
}

static ncclResult_t warm_comparison(const struct warming *w, cudaStream_t native)
{
    const struct zr_nccl *m = w->m;
    const struct zr_nccl_api *api = &m->set->api;
    const size_t bytes = sizeof m->set->ledger;
    char *all = w->base + m->ledgers_at;
    ncclResult_t res =
        api->AllGather(all + (size_t)m->base.group.rank * bytes, all, bytes, ncclInt8, w->comm, native);
    return res ? res : api->AllReduce(all, all, 4, ncclUint64, ncclMax, w->comm, native);
}

/* Runs one operation of each kind and waits for them. Runs on a helper thread. */
static int warm_on_stream(void *arg)
{
    const struct warming *w = arg;
    const struct zr_nccl *m = w->m;
    const struct zr_device_ops *d = m->set->dev->ops;
    struct zr_stream *s;
    if (d->stream_open(m->set->dev, ZR_STREAM_QUEUE, "first operations", NULL, &s))
        return ncclUnhandledCudaError;
    cudaStream_t native = d->stream_native(s);
    ncclResult_t res = ncclSuccess;
    if (zr_role_is_pair(m->base.role))
        res = warm_pair(w, native);
    else if (m->set->opt.deterministic && zr_role_reduces(m->base.role))
        res = warm_tree(w, native);
    if (m->room_bytes > 0 && !res)
        res = warm_slices(w, w->base + m->room_at, ZR_NCCL_ALIGN, native);
    if (w->bytes && !res)
        res = warm_slices(w, w->base, w->bytes, native);
    if (m->compares && !res)
        res = warm_comparison(w, native);
    if (!res && d->stream_sync(s))
        res = ncclUnhandledCudaError;
    d->stream_close(s);
    return res;
}

/* Reports this rank's failure to the others, which wait for it inside NCCL. A lost peer is not reported, as
 * all ranks find it themselves, with its name. */
static int fail_all(const struct zr_nccl_set *p, int err)
{
    return err == ZERO_ERR_PEER ? err : zr_rendezvous_fail(p->rdv, err);
}

/* Runs the first operations of a communicator while its arena is still zero, which they leave it. NCCL
 * connects in the first operation of a kind, which may take long with many ranks. Here it may take
 * start_timeout_ms instead of an operation's timeout_ms. All ranks attach their communicators in one
 * order. */
static int warm_up(struct zr_nccl *m)
{
    struct zr_nccl_set *p = m->set;
    int64_t most = m->room_at / m->base.group.size & -ZR_NCCL_ALIGN,
            slice = (m->largest + ZR_NCCL_ALIGN - 1) & -ZR_NCCL_ALIGN;
    if (slice > most || zr_role_moves_activations(m->base.role)) /* may be larger than slices */
        slice = most;
    struct warming w = {.m = m, .comm = m->comm, .base = m->base.held->base, .bytes = (size_t)slice};
    ncclResult_t res = ncclSuccess;
    char what[96];
    int err = 0;
    snprintf(what, sizeof what, "the first operations of NCCL's %s communicator", m->name);
    if (m->comm && !m->user_comm)
        err = zr_nccl_together(p, what, warm_on_stream, &w, sizeof w, &res);
    if (!err && res)
        err = fail_all(p, zr_nccl_say(p, NULL, res, what));
    err = zr_nccl_agree(p, err, 0, NULL, NULL);
    if (err) {
        struct zr_saved_error kept;
        zr_error_save(&kept, err);
        /* ncclCommDestroy would wait for operations that do not end. */
        for (int i = 0; i < p->n_open && !zr_nccl_is_stuck(p); i++)
            zr_nccl_fail(p->open[i], err, "%s", kept.text);
        zr_error_restore(&kept);
    }
    return err;
}

int zr_nccl_attach(struct zr_comm *c, struct zr_arena *a)
{
    struct zr_nccl *m = zr_nccl_of(c);
    struct zr_nccl_tally t;
    int err = zr_nccl_agree(m->set, zr_comm_check_reserve(c, a), ((struct nccl_arena *)a)->of_nccl, m, &t);
    if (err)
        return err;
    err = choose_path(m, a->base, a->bytes, t.sum);
    if (err)
        return attach_no_more(m, a, err);
    share_reserve(m, a->bytes - a->taken - c->reserve);
    err = warm_up(m);
    return err ? attach_no_more(m, a, err) : 0;
}
