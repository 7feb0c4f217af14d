/* SPDX-License-Identifier: Apache-2.0 */
/* nccl.c: the NCCL communicator's vtable: checks, the ledger, and what an operation puts on the stream (see
 * nccl_comm.h for how it all works). */
#include "comm/meet/rendezvous.h"
#include "comm/nccl/nccl_comm.h"

#include <stdio.h>
#include <string.h>
#include <xxhash.h>

/* One call of an operation, from its checks to its event. */
struct issue {
    struct zr_nccl *m;
    struct zr_stream *s;
    cudaStream_t native;
    enum zr_op op;
    const struct zr_tag *tag;
    struct zr_comm_stats count;
    int32_t ledger;
    bool most; /* the ledgers are put together */
};

static uint64_t hash_words(uint64_t seed, const int64_t *v, size_t n)
{
    return XXH3_64bits_withSeed(v, n * sizeof *v, seed);
}

static int nccl_check_ready(const struct zr_nccl *m, enum zr_op op)
{
    if (!m->arena)
        return zr_fail(ZR_ERR_ORDER, "nccl %s: %s: there is no arena yet", m->name, zr_op_name(op));
    return 0;
}

/* The ledger is written first: it says what all ranks must do alike, also where this rank then cannot. Sizes
 * between groups are those of a part, which are not the same for all parts. */
static void enter(struct zr_nccl *m, enum zr_op op, const struct zr_tag *tag, uint64_t sizes)
{
    struct zr_nccl_ledger *l = &m->set->ledger;
    bool same = m->base.role != ZR_ROLE_GATHER_OUTER && m->base.role != ZR_ROLE_REDUCE_OUTER;
    const int64_t words[] = {
        m->base.role, op, tag->unit, tag->step, (int64_t)tag->call_hash, same ? (int64_t)sizes : 0};
    l->hash = hash_words(l->hash, words, sizeof words / sizeof *words);
    l->n_issued++;
}

/* With the lock held: a free entry of the pending ones is this operation's. Who issues has asked has_room, so
 * there is one. 1: there is nothing to do, as the communicator has failed, or another has. */
static int take_entry(const struct issue *i)
{
    struct zr_nccl *m = i->m;
    bool full = m->n_put - m->n_got == ZR_NCCL_PENDING;
    if (zr_nccl_has_failed(m) || (full && atomic_load(&m->set->alarm)))
        return 1;
    m->next_seq++;
    if (full)
        return zr_fail(ZR_ERR_ORDER, "%d operations are pending, and has_room was not called",
                       ZR_NCCL_PENDING);
    m->issuing = true;
    m->issuing_ns = zr_now_ns();
    m->issuing_op = i->op;
    m->issuing_unit = i->tag->unit;
    if (m->set->idle)
        pthread_cond_broadcast(&m->set->wake);
    return 0;
}

/* And the stream's event before the operation is recorded. */
static int begin_issue(struct issue *i)
{
    struct zr_nccl *m = i->m;
    struct zr_nccl_set *p = m->set;
    zr_nccl_reap(m);
    pthread_mutex_lock(&p->lock);
    int err = take_entry(i);
    pthread_mutex_unlock(&p->lock);
    if (err)
        return err;
    i->native = p->dev->ops->stream_native(i->s);
    i->ledger = -1;
    return p->dev->ops->event_record(m->pending[m->n_put % ZR_NCCL_PENDING].begun, i->s);
}

static void describe_issue(const struct issue *i, char *text, size_t n_text)
{
    zr_op_describe(i->op, i->m->next_seq, i->tag->unit, text, n_text);
}

/* What NCCL holds grows with the first collectives that want connections. While this thread issues nobody
 * aborts the communicator. */
static uint64_t ask_memory(const struct issue *i)
{
    const struct zr_nccl *m = i->m;
    uint64_t value = 0, seq = m->next_seq;
    bool now = (seq & (seq - 1)) == 0 || seq % 256 == 0;
    if (!now || !m->set->api.CommMemStats || !m->comm || m->lent ||
        m->set->api.CommMemStats(m->comm, ZR_NCCL_STAT_GPU_MEM_TOTAL, &value))
        return 0;
    return value;
}

/* err: of the device; res: of NCCL. After either, ranks are no longer in step. */
static int end_issue(struct issue *i, int err, ncclResult_t res)
{
    struct zr_nccl *m = i->m;
    struct zr_nccl_set *p = m->set;
    struct zr_nccl_pending *e = &m->pending[m->n_put % ZR_NCCL_PENDING];
    char what[96];
    describe_issue(i, what, sizeof what);
    if (!err && !res)
        err = p->dev->ops->event_record(e->done, i->s);
    uint64_t held = err || res ? 0 : ask_memory(i);
    pthread_mutex_lock(&p->lock);
    m->library_bytes = held ? held : m->library_bytes;
    m->issuing = false;
    if (!err && !res) {
        e->op = i->op;
        e->unit = i->tag->unit;
        e->seq = m->next_seq;
        e->begun_ns = 0;
        e->ledger = i->ledger;
        e->most = i->most;
        e->count = i->count;
        e->mark = i->tag->mark;
        m->n_put++;
    }
    pthread_mutex_unlock(&p->lock);
    if (res) {
        /* An abort from outside ends calls with an error; the cause is kept already. */
        if (zr_nccl_has_failed(m))
            return 0;
        return zr_nccl_fail_call(m, res, what);
    }
    if (err) {
        zr_fail_more(err, "%s", what);
        zr_nccl_fail(m, err, "%s", zr_error_text());
    }
    return err;
}

/* A group ends whatever happened in it. */
static ncclResult_t end_group(const struct zr_nccl_set *p, ncclResult_t res)
{
    ncclResult_t ended = p->api.GroupEnd();
    return res ? res : ended;
}

/* What ranks compare of a list of places. */
static uint64_t hash_places(uint64_t sizes, const struct zr_cut *c, int size)
{
    for (int p = 1; c->at && p < size; p++) {
        int64_t at = zr_cut_at(c, p);
        sizes = hash_words(sizes, &at, 1);
    }
    return sizes;
}

/* ---- all_gather ---- */

static int nccl_all_gather(struct zr_comm *c, struct zr_stream *s, const struct zr_gather_seg *seg, int n_seg,
                           const struct zr_tag *tag)
{
    struct zr_nccl *m = zr_nccl_of(c);
    struct issue i = {.m = m, .s = s, .op = ZR_OP_ALL_GATHER, .tag = tag, .count = {.n_all_gather = 1}};
    int err = nccl_check_ready(m, i.op);
    if (!err)
        err = zr_gather_check("nccl all_gather", c->group.size, zr_nccl_usable(m), seg, n_seg);
    if (err)
        return err;
    uint64_t sizes = (uint64_t)n_seg;
    int64_t total = 0;
    for (int k = 0; k < n_seg; k++) {
        const struct zr_gather_seg *g = &seg[k];
        const int64_t v[] = {g->src, g->in_place, g->dst, g->cut.each, g->cut.total};
        sizes = hash_words(sizes, v, sizeof v / sizeof *v);
        sizes = hash_places(sizes, &g->cut, c->group.size);
        total += g->cut.total;
        i.count.wire_bytes += zr_gather_wire(&g->cut, c->group.size, c->group.rank, m->set->opt.small_bytes);
    }
    enter(m, i.op, tag, sizes);
    err = begin_issue(&i);
    if (err)
        return err < 0 ? end_issue(&i, err, ncclSuccess) : 0;
    ncclResult_t res = ncclSuccess;
    if (total > 0)
        err = zr_nccl_gather(m, s, seg, n_seg, &res);
    return end_issue(&i, err, res);
}

/* ---- reduce_scatter ---- */

static int nccl_reduce_scatter(struct zr_comm *c, struct zr_stream *s, const struct zr_reduce_seg *seg,
                               int n_seg, const struct zr_tag *tag)
{
    struct zr_nccl *m = zr_nccl_of(c);
    struct issue i = {
        .m = m, .s = s, .op = ZR_OP_REDUCE_SCATTER, .tag = tag, .count = {.n_reduce_scatter = 1}};
    int err = nccl_check_ready(m, i.op);
    if (!err && !zr_role_reduces(c->role))
        err = zr_fail(ZR_ERR_ARG, "nccl %s: reduce_scatter is the reduce communicators'", m->name);
    if (!err)
        err = zr_reduce_check("nccl reduce_scatter", c->group.size, c->group.rank, zr_nccl_usable(m), seg,
                              n_seg);
    if (err)
        return err;
    uint64_t sizes = (uint64_t)n_seg;
    const int64_t packs_up_to = m->set->opt.deterministic ? 0 : m->set->opt.small_bytes;
    for (int k = 0; k < n_seg; k++) {
        const struct zr_reduce_seg *g = &seg[k];
        const int64_t v[] = {g->src, g->cut.each, g->cut.total, g->dtype, g->accumulate};
        sizes = hash_words(sizes, v, sizeof v / sizeof *v);
        sizes = hash_places(sizes, &g->cut, c->group.size);
        i.count.wire_bytes += zr_reduce_wire(&g->cut, c->group.size, c->group.rank, packs_up_to);
    }
    enter(m, i.op, tag, sizes);
    err = begin_issue(&i);
    if (err)
        return err < 0 ? end_issue(&i, err, ncclSuccess) : 0;
    ncclResult_t res = ncclSuccess;
    /* which calls nothing of NCCL's alone */
    bool fixed = m->set->opt.deterministic || zr_nccl_is_alone(m);
    err = fixed ? zr_nccl_reduce_fixed(m, s, seg, n_seg, &res) : zr_nccl_reduce_fast(m, s, seg, n_seg, &res);
    return end_issue(&i, err, res);
}

/* ---- broadcast, exchange ---- */

static int begin_range(struct issue *i, int64_t off, int64_t bytes, int64_t n, int root)
{
    struct zr_nccl *m = i->m;
    int err = nccl_check_ready(m, i->op);
    if (!err)
        err = zr_range_check(i->op == ZR_OP_EXCHANGE ? "nccl exchange" : "nccl broadcast", zr_nccl_usable(m),
                             off, bytes, n);
    if (err)
        return err;
    const int64_t v[] = {off, bytes, root};
    enter(m, i->op, i->tag, hash_words(0, v, sizeof v / sizeof *v));
    err = begin_issue(i);
    return err < 0 ? end_issue(i, err, ncclSuccess) : err;
}

static int nccl_broadcast(struct zr_comm *c, struct zr_stream *s, int64_t off, int64_t bytes, int root,
                          const struct zr_tag *tag)
{
    struct zr_nccl *m = zr_nccl_of(c);
    struct issue i = {.m = m, .s = s, .op = ZR_OP_BROADCAST, .tag = tag, .count = {.n_broadcast = 1}};
    if (root < 0 || root >= c->group.size)
        return zr_fail(ZR_ERR_ARG, "nccl broadcast: root is %d: 0 to %d are allowed", root,
                       c->group.size - 1);
    int err = begin_range(&i, off, bytes, 1, root);
    if (err)
        return err < 0 ? err : 0;
    i.count.wire_bytes = c->group.rank == root ? 0 : bytes;
    ncclResult_t res = ncclSuccess;
    if (bytes > 0 && !zr_nccl_is_alone(m))
        res = m->set->api.Broadcast(m->arena + off, m->arena + off, (size_t)bytes, ncclInt8, root, m->comm,
                                    i.native);
    return end_issue(&i, 0, res);
}

/* Room for the ranks' ledgers on the host, or -1. */
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

static int nccl_exchange(struct zr_comm *c, struct zr_stream *s, int64_t off, int64_t slot_bytes,
                         const struct zr_tag *tag)
{
    struct zr_nccl *m = zr_nccl_of(c);
    struct zr_nccl_set *p = m->set;
    const struct zr_device_ops *d = p->dev->ops;
    struct issue i = {.m = m, .s = s, .op = ZR_OP_EXCHANGE, .tag = tag, .count = {.n_exchange = 1}};
    int err = begin_range(&i, off, slot_bytes, c->group.size, -1);
    if (err)
        return err < 0 ? err : 0;
    i.count.wire_bytes = slot_bytes * (c->group.size - 1);
    bool ledgers = m->compares && c->group.size > 1;
    const int64_t size = sizeof p->ledger;
    char *all = m->arena + m->ledgers_at, *slots = m->arena + off;
    if (ledgers) {
        p->ledger.exchange++;
        err = d->put(s, all + c->group.rank * size, &p->ledger, size);
    }
    ncclResult_t res = ncclSuccess;
    if (!err && !zr_nccl_is_alone(m) && (ledgers || slot_bytes > 0)) {
        res = p->api.GroupStart();
        if (!res) {
            if (slot_bytes > 0)
                res = p->api.AllGather(slots + c->group.rank * slot_bytes, slots, (size_t)slot_bytes,
                                       ncclInt8, m->comm, i.native);
            if (ledgers && !res)
                res = p->api.AllGather(all + c->group.rank * size, all, (size_t)size, ncclInt8, m->comm,
                                       i.native);
            res = end_group(p, res);
        }
    }
    if (ledgers && !err && !res) {
        i.ledger = free_ledgers(p);
        if (i.ledger >= 0)
            err = d->copy(s, p->ledgers + i.ledger * c->group.size, all, size * c->group.size);
    }
    return end_issue(&i, err, res);
}

/* ---- agree ---- */

/* The ledger's words and their complements go into the reserve, to be put together in the same group. */
static int put_ledger(struct issue *i)
{
    struct zr_nccl_set *p = i->m->set;
    p->ledger.exchange++;
    const uint64_t words[4] = {p->ledger.hash, ~p->ledger.hash, p->ledger.n_issued, ~p->ledger.n_issued};
    _Static_assert(sizeof words == sizeof p->ledger, "they lie where a ledger does");
    return p->dev->ops->put(i->s, i->m->arena + i->m->ledgers_at, words, sizeof words);
}

static ncclResult_t agree_all(const struct issue *i, char *at, int32_t n_sum, int32_t n_max, bool ledgers)
{
    struct zr_nccl *m = i->m;
    const struct zr_nccl_api *api = &m->set->api;
    char *maxima = at + n_sum * (int64_t)sizeof(int64_t), *words = m->arena + m->ledgers_at;
    ncclResult_t res = api->GroupStart();
    if (res)
        return res;
    if (n_sum > 0)
        res = api->AllReduce(at, at, (size_t)n_sum, ncclInt64, ncclSum, m->comm, i->native);
    if (n_max > 0 && !res)
        res = api->AllReduce(maxima, maxima, (size_t)n_max, ncclUint64, ncclMax, m->comm, i->native);
    if (ledgers && !res)
        res = api->AllReduce(words, words, 4, ncclUint64, ncclMax, m->comm, i->native);
    return end_group(m->set, res);
}

static int nccl_agree(struct zr_comm *c, struct zr_stream *s, int64_t off, int32_t n_sum, int32_t n_max,
                      const struct zr_tag *tag)
{
    struct zr_nccl *m = zr_nccl_of(c);
    struct zr_nccl_set *p = m->set;
    struct issue i = {.m = m, .s = s, .op = ZR_OP_AGREE, .tag = tag, .count = {.n_agree = 1}, .most = true};
    int err = nccl_check_ready(m, i.op);
    if (!err)
        err = zr_agree_check("nccl agree", zr_nccl_usable(m), off, n_sum, n_max);
    if (err)
        return err;
    const int64_t v[] = {off, n_sum, n_max};
    enter(m, i.op, tag, hash_words(0, v, sizeof v / sizeof *v));
    err = begin_issue(&i);
    if (err)
        return err < 0 ? end_issue(&i, err, ncclSuccess) : 0;
    i.count.wire_bytes = zr_agree_wire(c->group.size, c->group.rank, n_sum, n_max);
    bool ledgers = m->compares && c->group.size > 1;
    ncclResult_t res = ncclSuccess;
    if (ledgers)
        err = put_ledger(&i);
    if (!err && !zr_nccl_is_alone(m) && (ledgers || n_sum > 0 || n_max > 0))
        res = agree_all(&i, m->arena + off, n_sum, n_max, ledgers);
    if (ledgers && !err && !res) {
        i.ledger = free_ledgers(p);
        if (i.ledger >= 0)
            err = p->dev->ops->copy(s, p->ledgers + i.ledger * c->group.size, m->arena + m->ledgers_at,
                                    sizeof *p->ledgers);
    }
    return end_issue(&i, err, res);
}

/* ---- the rest ---- */

static void nccl_abort(struct zr_comm *c, int code, const char *why)
{
    code = code ? code : ZR_ERR_FAILED;
    zr_nccl_fail(zr_nccl_of(c), code, "%s", why ? why : zr_err_name(code));
}

static int nccl_status(struct zr_comm *c, char *why, size_t why_bytes)
{
    return zr_first_report(&zr_nccl_of(c)->failure, why, why_bytes);
}

/* What its stream has come to, as far as the watching thread has seen. */
static bool nccl_last(struct zr_comm *c, char *text, size_t n_text)
{
    struct zr_nccl *m = zr_nccl_of(c);
    text[0] = 0;
    pthread_mutex_lock(&m->set->lock);
    const struct zr_nccl_pending *e = &m->pending[m->n_got % ZR_NCCL_PENDING];
    bool inside = m->issuing || (m->n_got < m->n_put && e->begun_ns);
    if (m->issuing)
        zr_op_describe(m->issuing_op, m->next_seq, m->issuing_unit, text, n_text);
    else if (inside)
        zr_op_describe(e->op, e->seq, e->unit, text, n_text);
    else if (m->n_got > 0) {
        e = &m->pending[(m->n_got - 1) % ZR_NCCL_PENDING];
        zr_op_describe(e->op, e->seq, e->unit, text, n_text);
    }
    pthread_mutex_unlock(&m->set->lock);
    return inside;
}

static void nccl_stats(struct zr_comm *c, struct zr_comm_stats *out)
{
    struct zr_nccl *m = zr_nccl_of(c);
    zr_nccl_reap(m);
    pthread_mutex_lock(&m->set->lock);
    *out = m->done;
    out->library_bytes = (int64_t)m->library_bytes;
    pthread_mutex_unlock(&m->set->lock);
}

const char *zr_nccl_path(const struct zr_comm *c)
{
    return ((const struct zr_nccl *)c)->path;
}

static void nccl_called(struct zr_comm *c, const struct zr_called *call)
{
    zr_rendezvous_called(zr_nccl_of(c)->set->rdv, call);
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

/* Segments are no limit: what is put on a stream takes its own. */
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
    .arena = zr_nccl_arena,
    .attach = zr_nccl_attach,
    .all_gather = nccl_all_gather,
    .reduce_scatter = nccl_reduce_scatter,
    .broadcast = nccl_broadcast,
    .exchange = nccl_exchange,
    .agree = nccl_agree,
    .abort = nccl_abort,
    .status = nccl_status,
    .stats = nccl_stats,
    .last = nccl_last,
    .called = nccl_called,
    .compare = nccl_compare,
    .has_room = nccl_has_room,
    .stuck = nccl_stuck,
    .close = zr_nccl_close,
};
