/* nccl_arena.c: a communicator's arena: memory of NCCL's or of the device's, registered as a window where all
 * ranks can, and given back. */
#include "comm/nccl/nccl_comm.h"
#include "comm/nccl/nccl_versions.h"

#include <stdio.h>

/* ---- memory ---- */

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

void zr_nccl_free_arena(struct zr_nccl *m)
{
    struct zr_nccl_pair *p = m->pair;
    struct memory mem = {.api = p->api, .at = m->arena};
    ncclResult_t res;
    if (m->arena && m->arena_of_nccl)
        zr_nccl_within(p, "ncclMemFree", ZR_NCCL_CLOSE_MS, free_memory, &mem, sizeof mem, &res);
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

/* ---- windows ---- */

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

int zr_nccl_close_window(struct zr_nccl *m)
{
    struct zr_nccl_pair *p = m->pair;
    struct registering r = {.api = p->api, .comm = m->comm, .window = m->window};
    ncclResult_t res;
    if (!m->window)
        return 0;
    m->window = NULL;
    return zr_nccl_within(p, "ncclCommWindowDeregister", ZR_NCCL_CLOSE_MS, deregister_window, &r, sizeof r,
                          &res);
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

int zr_nccl_close_window(struct zr_nccl *m)
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

/* ---- the arena ---- */

/* The fixed tree's slices travel by send and receive, which use no windows. */
static const char *why_plain(const struct zr_nccl *m, int64_t n_of_nccl)
{
    const struct zr_nccl_pair *p = m->pair;
    if (p->opt.deterministic && m == &p->reduce)
        return "plain, sums in the fixed tree";
    if (!can_register(&p->api) || p->api.version < ZR_NCCL_HAS_WINDOWS)
        return "plain: symmetric windows need 2.27, here and when it was built";
    if (zr_nccl_fault_of(ZR_NCCL_USE_WINDOWS, p->api.version, p->group.size))
        return "plain: this version's symmetric windows are faulty";
    if (n_of_nccl < p->group.size)
        return "plain: ncclMemAlloc gave no memory";
    return NULL;
}

/* Registers on all ranks of the group or on none, and writes the path. */
static int choose_path(struct zr_nccl *m, char *base, int64_t bytes, int64_t n_of_nccl)
{
    struct zr_nccl_pair *p = m->pair;
    struct zr_nccl_tally with;
    char version[32];
    const char *plain = why_plain(m, n_of_nccl);
    zr_nccl_version_text(p->api.version, version, sizeof version);
    int err = plain ? 0 : open_window(m, base, bytes);
    /* All ranks of the world come here, also those of a group that has no windows. */
    err = zr_nccl_agree(p, err, m->window != NULL, &with);
    if (err)
        return err;
    if (!plain && with.sum < p->group.size) {
        plain = "plain: no symmetric windows on this machine";
        err = zr_nccl_close_window(m);
        if (err)
            return err;
    }
    bool engine = !plain && m == &p->gather && p->opt.copy_engine > 0;
    snprintf(m->path, sizeof m->path, "NCCL %s, %s", version,
             plain    ? plain
             : engine ? "symmetric windows, copy engine"
                      : "symmetric windows");
    zr_info(p->opt.log, "nccl %s: %s", m->name, m->path);
    const struct zr_nccl_fault *f = zr_nccl_fault_of(ZR_NCCL_USE_WINDOWS, p->api.version, p->group.size);
    if (f && can_register(&p->api))
        zr_info(p->opt.log, "nccl %s: no symmetric windows with NCCL %s: %s (%s)", m->name, version, f->what,
                f->source);
    if (plain && m == &p->gather && p->opt.copy_engine > 0)
        zr_warn(p->opt.log, "nccl gather: no copy engine without symmetric windows");
    return 0;
}

/* The end of the arena: the room for what travels packed; of the reduce arena then ledgers, and the fixed
 * tree's scratch. */
static void share_reserve(struct zr_nccl *m)
{
    const struct zr_nccl_pair *p = m->pair;
    int64_t ledgers = (p->group.size * (int64_t)sizeof(struct zr_nccl_ledger) + ZR_NCCL_ALIGN - 1) /
                      ZR_NCCL_ALIGN * ZR_NCCL_ALIGN;
    m->room_at = m->usable_bytes;
    m->room_bytes = zr_nccl_room_bytes(p->group.size, p->opt.packed_bytes);
    if (m != &p->reduce)
        return;
    m->ledgers_at = m->room_at + m->room_bytes;
    m->scratch_at = m->ledgers_at + ledgers;
    m->scratch_bytes = m->arena_bytes - m->scratch_at;
}

int zr_nccl_arena(struct zr_comm *c, int64_t bytes, void **base)
{
    struct zr_nccl *m = zr_nccl_of(c);
    struct zr_nccl_pair *p = m->pair;
    int64_t reserve =
        m == &p->reduce ? p->opt.reserve_bytes : zr_nccl_room_bytes(p->group.size, p->opt.packed_bytes);
    struct zr_nccl_tally t;
    void *at = NULL;
    int err = 0;
    if (m->arena)
        return zr_fail(ZR_ERR_ORDER, "nccl %s: the arena is made once", m->name);
    if (bytes <= reserve || (reserve && bytes % ZR_NCCL_ALIGN))
        err = zr_fail(ZR_ERR_ARG,
                      "nccl %s: the arena is %lld bytes: more than what is ours of it (%lld)%s is allowed",
                      m->name, (long long)bytes, (long long)reserve, reserve ? ", a multiple of 256," : "");
    err = zr_nccl_agree(p, err, bytes, &t);
    if (!err && t.odd >= 0)
        err = zr_fail(ZR_ERR_MISMATCH, "nccl %s: the arena is %lld bytes on rank %d and %lld on rank 0",
                      m->name, (long long)t.odd_number, t.odd, (long long)t.first);
    if (err)
        return err;
    err = take_memory(m, bytes, &at);
    err = zr_nccl_agree(p, err, m->arena_of_nccl, &t);
    if (!err)
        err = choose_path(m, at, bytes, t.sum);
    m->arena = at;
    if (err) {
        struct zr_kept kept;
        zr_keep(&kept, err);
        if (zr_nccl_settle(m) &&
            zr_nccl_close_window(m) == 0) /* else it stays NCCL's: it may yet be registered */
            zr_nccl_free_arena(m);
        m->arena = NULL;
        return zr_say_again(&kept);
    }
    m->usable_bytes = bytes - reserve;
    share_reserve(m);
    *base = at;
    return 0;
}
