/* SPDX-License-Identifier: Apache-2.0 */
/* nccl.c: puts operations on a stream as NCCL calls, keeps the ledger, and has the communicator's table of
 * functions. nccl_comm.h describes how it works. */
#include "comm/meet/rendezvous.h"
#include "comm/nccl/nccl_comm.h"

#include <time.h>
#include <xxhash.h>

/* Adds an operation to the ledgers. It comes first, as all ranks must have equal ledgers even if this rank
 * then fails. Data-parallel ranks may have activations of different sizes, so their ledger leaves out tp and
 * cp. It also leaves out sizes between groups, which differ between parts of the model. */
static void enter(struct zr_nccl *m, const struct zr_post *p)
{
    struct zr_nccl_ledger *l = &m->set->ledger;
    bool same = m->base.role != ZR_ROLE_GATHER_OUTER && m->base.role != ZR_ROLE_REDUCE_OUTER;
    const uint64_t words[] = {m->base.role,
                              (uint64_t)p->op,
                              (uint64_t)p->unit,
                              p->step,
                              p->call_hash,
                              same ? p->n_seg : 0,
                              same ? (uint64_t)p->root : 0,
                              same ? (uint64_t)p->bytes : 0,
                              same ? p->seg_hash : 0};
    const uint64_t own[] = {(uint64_t)p->op,   (uint64_t)p->unit,  p->step,    p->call_hash, p->n_seg,
                            (uint64_t)p->root, (uint64_t)p->bytes, p->seg_hash};
    m->hash = XXH3_64bits_withSeed(own, sizeof own, m->hash);
    if (zr_role_moves_activations(m->base.role))
        return;
    l->hash = XXH3_64bits_withSeed(words, sizeof words, l->hash);
    l->n_issued++;
}

static bool is_full(const struct zr_nccl *m)
{
    return m->n_put - m->n_got == ZR_NCCL_PENDING;
}

/* Waits until there is a free entry, or a failure. Only for roles that move activations, whose issuer does
 * not call has_room. It waits for operations that this rank has issued before. */
static void await_entry(struct zr_nccl *m)
{
    bool waits = zr_role_moves_activations(m->base.role) || zr_role_is_pair(m->base.role);
    while (waits) {
        pthread_mutex_lock(&m->set->lock);
        waits = is_full(m) && !zr_nccl_has_failed(m) && !atomic_load(&m->set->alarm);
        pthread_mutex_unlock(&m->set->lock);
        if (!waits)
            return;
        nanosleep(&(struct timespec){.tv_nsec = 50000}, NULL);
        zr_nccl_reap(m);
    }
}

/* Takes a free entry for the operation. There is one, as the issuer has called has_room, or await_entry has
 * waited. Returns 1 if there is nothing to do, as this or another communicator has failed. Called with the
 * lock held. */
static int take_entry(struct zr_nccl *m, const struct zr_comm_op *op)
{
    struct zr_nccl_pending *e = zr_nccl_entry(m, m->n_put);
    if (zr_nccl_has_failed(m) || (is_full(m) && atomic_load(&m->set->alarm)))
        return 1;
    if (is_full(m))
        return zr_fail(ZERO_ERR_ORDER, "%d operations are pending, and has_room was not called",
                       ZR_NCCL_PENDING);
    e->op = *op;
    e->begun_ns = 0;
    e->ledger = -1;
    e->most = false;
    m->issuing = true;
    m->issuing_ns = zr_now_ns();
    if (m->set->idle)
        pthread_cond_broadcast(&m->set->wake);
    return 0;
}

/* Takes an entry and records the event before the operation. */
static int begin_issue(struct zr_nccl *m, struct zr_stream *s, const struct zr_comm_op *op)
{
    struct zr_nccl_set *p = m->set;
    zr_nccl_reap(m);
    await_entry(m);
    pthread_mutex_lock(&p->lock);
    int err = take_entry(m, op);
    pthread_mutex_unlock(&p->lock);
    return err ? err : p->dev->ops->event_record(zr_nccl_entry(m, m->n_put)->begun, s);
}

/* Asks NCCL for its memory, now and then: it grows with the first collectives that need connections. After a
 * failure another thread may abort the communicator, even while this thread issues (abort_is_due). So the
 * handle is read once, and is not used then. */
static uint64_t ask_memory(const struct zr_nccl *m)
{
    uint64_t value = 0, seq = m->base.n_issued;
    bool now = (seq & (seq - 1)) == 0 || seq % 256 == 0;
    ncclComm_t comm = m->comm;
    if (!now || !m->set->api.CommMemStats || !comm || m->user_comm || zr_nccl_has_failed(m) ||
        m->set->api.CommMemStats(comm, ZR_NCCL_STAT_GPU_MEM_TOTAL, &value))
        return 0;
    return value;
}

/* Ends the issuing of an operation. err is from the device, res from NCCL. After an error in either, ranks no
 * longer issue the same operations. */
static int end_issue(struct zr_nccl *m, struct zr_stream *s, const struct zr_comm_op *op, int err,
                     ncclResult_t res)
{
    struct zr_nccl_set *p = m->set;
    char what[96];
    if (!err && !res)
        err = p->dev->ops->event_record(zr_nccl_entry(m, m->n_put)->done, s);
    uint64_t held = err || res ? 0 : ask_memory(m);
    pthread_mutex_lock(&p->lock);
    if (held)
        m->base.library_bytes = (int64_t)held;
    m->issuing = false;
    m->n_put += !err && !res;
    pthread_mutex_unlock(&p->lock);
    zr_post_describe(&op->post, what, sizeof what);
    if (res) /* An abort by another thread ends calls with an error; its cause is kept already. */
        return zr_nccl_has_failed(m) ? 0 : zr_nccl_fail_call(m, res, what);
    if (err) {
        zr_fail_more(err, "%s", what);
        zr_nccl_fail(m, err, "%s", zr_error_text());
    }
    return err;
}

/* A group must end, whatever happened in it. */
static ncclResult_t end_group(const struct zr_nccl_set *p, ncclResult_t res)
{
    ncclResult_t ended = p->api.GroupEnd();
    return res ? res : ended;
}

static int nccl_gather(struct zr_nccl *m, struct zr_stream *s, const struct zr_comm_op *op, ncclResult_t *res)
{
    return op->post.bytes > 0 ? zr_nccl_gather(m, s, op->gather, (int)op->post.n_seg, res) : 0;
}

static int nccl_reduce(struct zr_nccl *m, struct zr_stream *s, const struct zr_comm_op *op, ncclResult_t *res)
{
    /* With one rank the fixed tree makes no NCCL call. */
    bool fixed = m->set->opt.deterministic || zr_nccl_is_alone(m);
    return (fixed ? zr_nccl_reduce_fixed : zr_nccl_reduce_fast)(m, s, op->reduce, (int)op->post.n_seg, res);
}

/* Between two ranks a message does what a broadcast does, with fewer steps inside NCCL. Both ranks issue
 * their messages in one order. */
static ncclResult_t nccl_message(struct zr_nccl *m, cudaStream_t native, char *at,
                                 const struct zr_comm_op *op)
{
    const struct zr_nccl_api *api = &m->set->api;
    size_t bytes = (size_t)op->post.bytes;
    int peer = 1 - m->base.group.rank;
    return op->post.root == peer ? api->Recv(at, bytes, ncclInt8, peer, m->comm, native)
                                 : api->Send(at, bytes, ncclInt8, peer, m->comm, native);
}

static ncclResult_t nccl_broadcast(struct zr_nccl *m, cudaStream_t native, const struct zr_comm_op *op)
{
    char *at = m->base.arena + op->off;
    if (op->post.bytes == 0 || zr_nccl_is_alone(m))
        return ncclSuccess;
    if (zr_role_is_pair(m->base.role))
        return nccl_message(m, native, at, op);
    return m->set->api.Broadcast(at, at, (size_t)op->post.bytes, ncclInt8, op->post.root, m->comm, native);
}

/* ---- exchange and agree, which carry ledgers ---- */

/* Takes host memory for the ranks' ledgers. Returns its index, or -1. */
static int32_t free_ledgers(struct zr_nccl_set *p)
{
    int32_t k = 0;
    pthread_mutex_lock(&p->lock);
    while (k < ZR_NCCL_LEDGERS && p->ledger_busy[k])
        k++;
    k = k < ZR_NCCL_LEDGERS ? k : -1;
    if (k >= 0)
        p->ledger_busy[k] = true;
    pthread_mutex_unlock(&p->lock);
    return k;
}

/* Returns this rank's part of a sum over the world that is 0 if the ranks of each communicator have issued
 * the same operations on it: the first rank's hash once for each other rank, less the others' hashes. */
static uint64_t part_of_sum(const struct zr_nccl_set *p)
{
    uint64_t sum = 0;
    for (int i = 0; i < p->n_open; i++) {
        const struct zr_group *g = &p->open[i]->base.group;
        sum += p->open[i]->hash * (uint64_t)(g->rank == 0 ? g->size - 1 : -1);
    }
    return sum;
}

/* Puts this rank's ledger into its slot. For an agreement, puts the ledger's words and their complements, or
 * this rank's part of the world's sum. */
static int put_ledger(struct zr_nccl *m, struct zr_stream *s, bool most)
{
    struct zr_nccl_set *p = m->set;
    const int64_t size = sizeof p->ledger;
    char *all = m->base.arena + m->ledgers_at;
    const uint64_t part = part_of_sum(p);
    p->ledger.exchange++;
    if (m->base.role == ZR_ROLE_WORLD)
        return p->dev->ops->put(s, all, &part, sizeof part);
    if (!most)
        return p->dev->ops->put(s, all + m->base.group.rank * size, &p->ledger, size);
    const uint64_t words[4] = {p->ledger.hash, ~p->ledger.hash, p->ledger.n_issued, ~p->ledger.n_issued};
    _Static_assert(sizeof words == sizeof p->ledger, "they lie where a ledger does");
    return p->dev->ops->put(s, all, words, size);
}

/* Copies the received ledgers to the host, if there is room. */
static int fetch_ledgers(struct zr_nccl *m, struct zr_stream *s, bool most)
{
    struct zr_nccl_set *p = m->set;
    struct zr_nccl_pending *e = zr_nccl_entry(m, m->n_put);
    e->most = most;
    e->ledger = free_ledgers(p);
    if (e->ledger < 0)
        return 0;
    return p->dev->ops->copy(s, zr_nccl_ledgers(p, e->ledger), m->base.arena + m->ledgers_at,
                             (int64_t)sizeof *p->ledgers * (most ? 1 : m->base.group.size));
}

static ncclResult_t exchange_all(struct zr_nccl *m, cudaStream_t native, const struct zr_comm_op *op,
                                 bool ledgers)
{
    const struct zr_nccl_api *api = &m->set->api;
    const int64_t size = sizeof m->set->ledger, slot = op->post.bytes;
    char *all = m->base.arena + m->ledgers_at, *slots = m->base.arena + op->off;
    int me = m->base.group.rank;
    ncclResult_t res = api->GroupStart();
    if (res)
        return res;
    if (slot > 0)
        res = api->AllGather(slots + me * slot, slots, (size_t)slot, ncclInt8, m->comm, native);
    if (ledgers && !res)
        res = api->AllGather(all + me * size, all, (size_t)size, ncclInt8, m->comm, native);
    return end_group(m->set, res);
}

static ncclResult_t agree_all(struct zr_nccl *m, cudaStream_t native, const struct zr_comm_op *op,
                              bool ledgers)
{
    const struct zr_nccl_api *api = &m->set->api;
    char *at = m->base.arena + op->off, *maxima = at + op->n_sum * (int64_t)sizeof(int64_t),
         *words = m->base.arena + m->ledgers_at;
    ncclResult_t res = api->GroupStart();
    if (res)
        return res;
    if (op->n_sum > 0)
        res = api->AllReduce(at, at, (size_t)op->n_sum, ncclInt64, ncclSum, m->comm, native);
    if (op->n_max > 0 && !res)
        res = api->AllReduce(maxima, maxima, (size_t)op->n_max, ncclUint64, ncclMax, m->comm, native);
    if (ledgers && !res && m->base.role == ZR_ROLE_WORLD)
        res = api->AllReduce(words, words, 1, ncclInt64, ncclSum, m->comm, native);
    else if (ledgers && !res)
        res = api->AllReduce(words, words, 4, ncclUint64, ncclMax, m->comm, native);
    return end_group(m->set, res);
}

static int nccl_with_ledgers(struct zr_nccl *m, struct zr_stream *s, cudaStream_t native,
                             const struct zr_comm_op *op, ncclResult_t *res)
{
    bool most = op->post.op == ZR_OP_AGREE,
         ledgers = m->compares && !zr_nccl_is_alone(m) && (most || m->base.role != ZR_ROLE_WORLD);
    int err = ledgers ? put_ledger(m, s, most) : 0;
    if (!err && !zr_nccl_is_alone(m) && (ledgers || op->post.bytes > 0))
        *res = (most ? agree_all : exchange_all)(m, native, op, ledgers);
    return err || *res || !ledgers ? err : fetch_ledgers(m, s, most);
}

/* Puts the calls of an operation of arenas on the stream. */
static int in_arenas(struct zr_nccl *m, struct zr_stream *s, const struct zr_comm_op *op, ncclResult_t *res)
{
    cudaStream_t native = m->set->dev->ops->stream_native(s);
    switch ((enum zr_op)op->post.op) {
    case ZR_OP_ALL_GATHER:
        return nccl_gather(m, s, op, res);
    case ZR_OP_REDUCE_SCATTER:
        return nccl_reduce(m, s, op, res);
    case ZR_OP_BROADCAST:
        *res = nccl_broadcast(m, native, op);
        return 0;
    case ZR_OP_EXCHANGE:
    case ZR_OP_AGREE:
        return nccl_with_ledgers(m, s, native, op, res);
    case ZR_OP_ALL_TO_ALL:
    case ZR_OP_SHIFT:
        return zr_nccl_pass(m, s, op, res);
    case ZR_OP_ALL_REDUCE: /* only of arrays */
        break;
    }
    return 0;
}

/* Puts the calls of an operation of arrays on the stream. */
static int of_arrays(struct zr_nccl *m, struct zr_stream *s, const struct zr_comm_op *op, ncclResult_t *res)
{
    const struct zr_nccl_api *api = &m->set->api;
    const struct zr_arrays *a = &op->arrays;
    const size_t n = (size_t)a->n, bytes = (size_t)op->post.bytes;
    const ncclDataType_t type = zr_nccl_type(a->dtype);
    cudaStream_t native = m->set->dev->ops->stream_native(s);
    if (op->post.op == ZR_OP_ALL_TO_ALL || op->post.op == ZR_OP_SHIFT)
        return zr_nccl_pass(m, s, op, res);
    if (zr_nccl_is_alone(m))
        return a->dst == a->src ? 0 : m->set->dev->ops->copy(s, a->dst, a->src, op->post.bytes);
    *res = op->post.op == ZR_OP_ALL_GATHER ? api->AllGather(a->src, a->dst, bytes, ncclInt8, m->comm, native)
           : op->post.op == ZR_OP_REDUCE_SCATTER
               ? api->ReduceScatter(a->src, a->dst, n, type, ncclSum, m->comm, native)
               : api->AllReduce(a->src, a->dst, n, type, ncclSum, m->comm, native);
    return 0;
}

static int run_by(struct zr_nccl *m, struct zr_stream *s, const struct zr_comm_op *op,
                  int (*put)(struct zr_nccl *, struct zr_stream *, const struct zr_comm_op *, ncclResult_t *))
{
    ncclResult_t res = ncclSuccess;
    enter(m, &op->post);
    int err = begin_issue(m, s, op);
    if (err)
        return err < 0 ? end_issue(m, s, op, err, res) : 0;
    err = put(m, s, op, &res);
    return end_issue(m, s, op, err, res);
}

static int nccl_run(struct zr_comm *c, struct zr_stream *s, const struct zr_comm_op *op)
{
    struct zr_nccl *m = zr_nccl_of(c);
    if (op->post.op == ZR_OP_REDUCE_SCATTER && !zr_role_reduces(c->role))
        return zr_fail(ZERO_ERR_ARG, "nccl %s: reduce_scatter is the reduce communicators'", m->name);
    return run_by(m, s, op, in_arenas);
}

static int nccl_run_arrays(struct zr_comm *c, struct zr_stream *s, const struct zr_comm_op *op)
{
    return run_by(zr_nccl_of(c), s, op, of_arrays);
}

/* ---- status ---- */

static void nccl_abort(struct zr_comm *c, int code, const char *why)
{
    code = code ? code : ZERO_ERR_FAILED;
    zr_nccl_fail(zr_nccl_of(c), code, "%s", why ? why : zr_err_name(code));
}

/* Writes the operation that the stream has come to, as far as the watching thread has seen. */
static bool nccl_last(struct zr_comm *c, char *text, size_t n_text)
{
    struct zr_nccl *m = zr_nccl_of(c);
    text[0] = 0;
    pthread_mutex_lock(&m->set->lock);
    bool inside = m->issuing || (m->n_got < m->n_put && zr_nccl_entry(m, m->n_got)->begun_ns);
    uint64_t at = m->issuing ? m->n_put : inside ? m->n_got : m->n_got - 1;
    if (inside || m->n_got > 0)
        zr_post_describe(&zr_nccl_entry(m, at)->op.post, text, n_text);
    pthread_mutex_unlock(&m->set->lock);
    return inside;
}

static void nccl_catch_up(struct zr_comm *c)
{
    zr_nccl_reap(zr_nccl_of(c));
}

const char *zr_nccl_path(const struct zr_comm *c)
{
    return ((const struct zr_nccl *)c)->path;
}

static void nccl_compare(struct zr_comm *c, int code, const char *what)
{
    struct zr_nccl *m = zr_nccl_of(c);
    pthread_mutex_lock(&m->set->lock);
    zr_nccl_doubt(m, code, what);
    pthread_mutex_unlock(&m->set->lock);
}

static bool room_for(struct zr_nccl *m, int n_ops)
{
    pthread_mutex_lock(&m->set->lock);
    bool room = m->n_put - m->n_got + (uint64_t)n_ops <= ZR_NCCL_PENDING;
    pthread_mutex_unlock(&m->set->lock);
    return room;
}

/* The number of segments does not matter, as segments are not kept. */
static bool nccl_has_room(struct zr_comm *c, int n_ops, int n_seg)
{
    struct zr_nccl *m = zr_nccl_of(c);
    (void)n_seg;
    if (!room_for(m, n_ops))
        zr_nccl_reap(m);
    return room_for(m, n_ops);
}

static bool nccl_stuck(struct zr_comm *c)
{
    return !zr_nccl_settle(zr_nccl_of(c));
}

const struct zr_comm_ops zr_nccl_ops = {
    .name = "nccl",
    .runs_failed = true, /* its ledger counts operations after a failure, too */
    .arena = zr_nccl_arena,
    .attach = zr_nccl_attach,
    .run = nccl_run,
    .run_arrays = nccl_run_arrays,
    .abort = nccl_abort,
    .catch_up = nccl_catch_up,
    .last = nccl_last,
    .compare = nccl_compare,
    .has_room = nccl_has_room,
    .stuck = nccl_stuck,
    .close = zr_nccl_close,
};
