/* sim.c: see sim.h. Ranks meet in the order in which each has put its collectives: the k-th of one is the
 * k-th of all. */
#include "comm/sim.h"
#include "comm/segment.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_RANKS = 1024 };

struct part {
    bool here;
    struct zr_stream *stream;
    struct zr_stamp *entry; /* the stream's clock when it came */
    struct zr_gather_seg *gather;
    struct zr_reduce_seg *reduce;
    enum zr_op op;
    int n_seg, root;
    int64_t off, bytes;
    struct zr_tag tag;
};

/* The k-th collective. */
struct meeting {
    struct world *world;
    uint64_t number;
    int n_here, n_put, n_over;
    bool over;
    struct part part[];
};

/* What the ranks have issued, whatever the communicator. */
struct issue {
    const struct world *world;
    enum zr_op op;
    struct zr_tag tag;
    int rank; /* the first that did */
};

struct zr_sim_order {
    struct issue *issue;
    int64_t n, cap;
    int64_t at[MOST_RANKS]; /* how many each rank has issued */
    char turn[MOST_RANKS];  /* one byte a rank, which issuing writes */
};

struct world {
    struct zr_sim *w;
    struct zr_sim_order *order;
    struct zr_recorder *rec; /* its */
    const char *name;
    int n, n_open, n_arena;
    bool arena_failed;
    struct zr_comm **ranks;
    struct meeting **ring; /* open meetings by number */
    uint64_t first, n_ring, cap;
    int code;
    char why[ZR_ERROR_BYTES];
};

struct sim_comm {
    struct zr_comm base;
    struct world *world;
    char *arena;
    int64_t arena_bytes;
    uint64_t n_put;
    struct zr_comm_stats stats;
};

static struct sim_comm *sim_of(struct zr_comm *c)
{
    return (struct sim_comm *)c;
}

static struct sim_comm *rank_of(const struct world *d, int rank)
{
    return (struct sim_comm *)d->ranks[rank];
}

static bool flawed(const struct world *d, enum zr_sim_comm_flaw flaw)
{
    return zr_sim_config(d->w)->comm_flaws & flaw;
}

/* ---- arenas ---- */

static int sim_arena(struct zr_comm *c, int64_t bytes, void **base)
{
    struct sim_comm *m = sim_of(c);
    struct world *d = m->world;
    struct zr_device *dev = zr_sim_device(d->w, c->rank);
    void *p = NULL;
    if (m->arena)
        return zr_fail(ZR_ERR_ORDER, "sim %s: the arena is made once", d->name);
    int err = dev->ops->alloc(dev, bytes, &p);
    d->arena_failed |= err != 0;
    d->n_arena++;
    m->arena = p; /* a rank that dies while it waits leaves it to close */
    m->arena_bytes = bytes;
    while (d->n_arena < d->n && !d->code) {
        zr_sim_config(d->w)->yield(zr_sim_config(d->w)->arg, c->rank);
        zr_sim_host(d->w, c->rank, ZR_SIM_MODEL);
    }
    if (d->arena_failed || d->code) {
        m->arena = NULL;
        if (p)
            dev->ops->free(dev, p, bytes);
        return d->code ? zr_fail(d->code, "%s", d->why)
                       : zr_fail(ZR_ERR_NOMEM, "sim %s: a rank has no memory for the arena", d->name);
    }
    zr_shadow_name(d->rec, p, d->name);
    zr_shadow_set(d->rec, p, bytes, (struct zr_content){.kind = ZR_TAG_ZERO});
    *base = p;
    return 0;
}

/* ---- the order over all communicators ---- */

struct zr_sim_order *zr_sim_order_open(struct zr_sim *w)
{
    struct zr_sim_order *o = calloc(1, sizeof *o);
    for (int r = 0; o && r < zr_sim_config(w)->world; r++)
        if (zr_sim_register(w, r, "order of collectives", &o->turn[r], 1)) {
            free(o);
            o = NULL;
        }
    return o;
}

void zr_sim_order_close(struct zr_sim_order *o)
{
    if (o)
        free(o->issue);
    free(o);
}

static void keep_order(struct world *d, int rank, const struct part *p)
{
    struct zr_sim_order *o = d->order;
    struct zr_line *host = zr_sim_speaker(d->w);
    zr_sim_begin(d->w, host, "issue", p->tag.unit, p->tag.step);
    zr_shadow_write(d->rec, host, &o->turn[rank], 1);
    int64_t k = o->at[rank]++;
    if (k == o->cap) {
        o->cap = o->cap ? o->cap * 2 : 256;
        o->issue = realloc(o->issue, (size_t)o->cap * sizeof *o->issue);
        if (!o->issue)
            abort();
    }
    if (k == o->n) {
        o->issue[o->n++] = (struct issue){d, p->op, p->tag, rank};
        return;
    }
    const struct issue *i = &o->issue[k];
    if (i->world != d || i->op != p->op || i->tag.unit != p->tag.unit || i->tag.step != p->tag.step)
        zr_report(
            d->rec,
            "order across communicators: collective %lld of rank %d is %s %s of unit %d, step %u, of rank "
            "%d %s %s of unit %d, step %u",
            (long long)k, i->rank, i->world->name, zr_op_name(i->op), i->tag.unit, i->tag.step, rank, d->name,
            zr_op_name(p->op), p->tag.unit, p->tag.step);
}

/* ---- failing ---- */

static void finish_part(struct meeting *m, int rank)
{
    struct part *p = &m->part[rank];
    zr_stamp_drop(p->entry);
    free(p->gather);
    free(p->reduce);
    p->entry = NULL;
    p->gather = NULL;
    p->reduce = NULL;
}

/* Everyone who stands in a meeting goes on with nothing done. A rank stands in one at most; going on, it may
 * end meetings. */
static void release_all(struct world *d)
{
    struct zr_stream *standing[MOST_RANKS] = {NULL};
    for (uint64_t k = 0; k < d->n_ring; k++) {
        struct meeting *m = d->ring[(d->first + k) % d->cap];
        for (int r = 0; r < d->n && !m->over; r++)
            if (m->part[r].here)
                standing[r] = m->part[r].stream;
        m->over = true;
    }
    for (int r = 0; r < d->n; r++)
        if (standing[r])
            zr_sim_resume(standing[r]);
}

static void fail_world(struct world *d, int code, const char *why)
{
    if (d->code)
        return;
    d->code = code ? code : ZR_ERR_FAILED;
    snprintf(d->why, sizeof d->why, "%s", why ? why : zr_err_name(code));
    d->rec->forgiving = true;
    release_all(d);
}

void zr_sim_comm_lose(struct zr_comm *any, int rank)
{
    char why[64];
    snprintf(why, sizeof why, "rank %d was lost", rank);
    fail_world(sim_of(any)->world, ZR_ERR_PEER, why);
}

void zr_sim_comm_waits(const struct zr_comm *any, char *text, size_t n)
{
    const struct world *d = ((const struct sim_comm *)any)->world;
    size_t at = 0;
    *text = 0;
    for (uint64_t k = 0; k < d->n_ring; k++) {
        const struct meeting *m = d->ring[(d->first + k) % d->cap];
        if (m->over || !m->n_here)
            continue;
        for (int r = 0; r < d->n && at < n; r++)
            if (m->part[r].here)
                at += (size_t)snprintf(text + at, n - at, "rank %d waits in %s %s of unit %d, step %u; ", r,
                                       d->name, zr_op_name(m->part[r].op), m->part[r].tag.unit,
                                       m->part[r].tag.step);
        for (int r = 0; r < d->n && at < n; r++)
            if (!m->part[r].here)
                at += (size_t)snprintf(text + at, n - at, "rank %d is not there; ", r);
        return;
    }
}

/* ---- meeting ---- */

/* Time of moving `bytes` from each of the other ranks to this one: near and far links work at once. */
static int64_t wire_ns(const struct world *d, int64_t bytes_each, int rank)
{
    const struct zr_sim_options *o = zr_sim_config(d->w);
    if (d->n == 1 || o->near_bytes_per_s <= 0)
        return 0;
    int per = o->ranks_per_node > 0 ? o->ranks_per_node : d->n, node = rank / per;
    int last = (node + 1) * per < d->n ? (node + 1) * per : d->n, near = last - node * per - 1,
        far = d->n - near - 1;
    double near_s = (double)near * (double)bytes_each / o->near_bytes_per_s;
    double far_s = far ? (double)far * (double)bytes_each / o->far_bytes_per_s : 0;
    return (int64_t)((near_s > far_s ? near_s : far_s) * 1e9) + (far ? o->far_ns : o->near_ns);
}

static void gather_body(struct world *d, struct meeting *m, int rank)
{
    struct zr_line *l = zr_sim_line_of(m->part[rank].stream);
    const struct part *mine = &m->part[rank];
    int64_t each = 0;
    zr_sim_begin(d->w, l, "all_gather", mine->tag.unit, mine->tag.step);
    for (int i = 0; i < mine->n_seg; i++) {
        const struct zr_gather_seg *g = &mine->gather[i];
        each += g->shard_bytes;
        for (int p = 0; p < d->n; p++) {
            int64_t n = zr_slice_bytes(g->shard_bytes, g->total_bytes, p);
            const char *from = rank_of(d, p)->arena + m->part[p].gather[i].src + p * g->src_stride;
            char *to = rank_of(d, rank)->arena + g->dst + p * g->shard_bytes;
            if (n == 0 || from == to)
                continue;
            zr_shadow_read(d->rec, l, from, n);
            zr_shadow_write(d->rec, l, to, n);
            int size = zr_shadow_at(d->rec, from).size;
            size = size ? size : 1;
            zr_shadow_copy(d->rec, to, size, from, size, n / size);
            rank_of(d, rank)->stats.wire_bytes += p == rank ? 0 : n;
        }
    }
    rank_of(d, rank)->stats.n_all_gather++;
    zr_sim_spend(d->w, l, wire_ns(d, each, rank));
}

static void reduce_body(struct world *d, struct meeting *m, int rank)
{
    struct zr_line *l = zr_sim_line_of(m->part[rank].stream);
    const struct part *mine = &m->part[rank];
    int64_t each = 0;
    zr_sim_begin(d->w, l, "reduce_scatter", mine->tag.unit, mine->tag.step);
    for (int i = 0; i < mine->n_seg; i++) {
        const struct zr_reduce_seg *g = &mine->reduce[i];
        int64_t n = zr_slice_bytes(g->shard_bytes, g->total_bytes, rank);
        int size = (int)zr_dtype_bytes(g->dtype);
        char *to = rank_of(d, rank)->arena + g->dst;
        int64_t out = n / size * (int64_t)sizeof(float);
        each += g->shard_bytes;
        for (int p = 0; p < d->n; p++)
            zr_shadow_read(d->rec, l, rank_of(d, p)->arena + g->src + rank * g->shard_bytes, n);
        if (g->accumulate)
            zr_shadow_read(d->rec, l, to, out);
        zr_shadow_write(d->rec, l, to, out);
        for (int p = 0; p < d->n; p++) {
            const char *from = rank_of(d, p)->arena + g->src + rank * g->shard_bytes;
            if (p == 0 && !g->accumulate)
                zr_shadow_copy(d->rec, to, (int)sizeof(float), from, size, n / size);
            else
                zr_shadow_sum(d->rec, to, from, size, n / size);
            rank_of(d, rank)->stats.wire_bytes += p == rank ? 0 : n;
        }
    }
    rank_of(d, rank)->stats.n_reduce_scatter++;
    zr_sim_spend(d->w, l, wire_ns(d, each, rank));
}

static void exchange_body(struct world *d, struct meeting *m, int rank)
{
    struct zr_line *l = zr_sim_line_of(m->part[rank].stream);
    const struct part *mine = &m->part[rank];
    zr_sim_begin(d->w, l, "exchange", mine->tag.unit, mine->tag.step);
    for (int p = 0; p < d->n; p++) {
        const char *from = rank_of(d, p)->arena + mine->off + p * mine->bytes;
        char *to = rank_of(d, rank)->arena + mine->off + p * mine->bytes;
        if (p == rank)
            continue;
        zr_shadow_read(d->rec, l, from, mine->bytes);
        zr_shadow_write(d->rec, l, to, mine->bytes);
        memcpy(to, from, (size_t)mine->bytes);
        rank_of(d, rank)->stats.wire_bytes += mine->bytes;
    }
    rank_of(d, rank)->stats.n_exchange++;
    zr_sim_spend(d->w, l, wire_ns(d, mine->bytes, rank));
}

static void broadcast_body(struct world *d, struct meeting *m, int rank)
{
    struct zr_line *l = zr_sim_line_of(m->part[rank].stream);
    const struct part *mine = &m->part[rank];
    zr_sim_begin(d->w, l, "broadcast", mine->tag.unit, mine->tag.step);
    if (rank != mine->root) {
        const char *from = rank_of(d, mine->root)->arena + mine->off;
        char *to = rank_of(d, rank)->arena + mine->off;
        zr_shadow_read(d->rec, l, from, mine->bytes);
        zr_shadow_write(d->rec, l, to, mine->bytes);
        int size = zr_shadow_at(d->rec, from).size;
        size = size ? size : 1;
        zr_shadow_copy(d->rec, to, size, from, size, mine->bytes / size);
        rank_of(d, rank)->stats.wire_bytes += mine->bytes;
    }
    rank_of(d, rank)->stats.n_broadcast++;
    zr_sim_spend(d->w, l, wire_ns(d, mine->bytes / d->n, rank));
}

static bool same_part(const struct part *a, const struct part *b)
{
    if (a->op != b->op || a->tag.unit != b->tag.unit || a->tag.step != b->tag.step ||
        a->tag.call_hash != b->tag.call_hash || a->n_seg != b->n_seg || a->root != b->root ||
        a->off != b->off || a->bytes != b->bytes)
        return false;
    for (int i = 0; i < a->n_seg; i++) {
        if (a->gather &&
            (a->gather[i].src != b->gather[i].src || a->gather[i].total_bytes != b->gather[i].total_bytes))
            return false;
        if (a->reduce &&
            (a->reduce[i].src != b->reduce[i].src || a->reduce[i].total_bytes != b->reduce[i].total_bytes ||
             a->reduce[i].dtype != b->reduce[i].dtype))
            return false;
    }
    return true;
}

static bool agree(struct world *d, const struct meeting *m)
{
    for (int r = 1; r < d->n; r++) {
        const struct part *a = &m->part[0], *b = &m->part[r];
        if (same_part(a, b))
            continue;
        char why[512];
        snprintf(why, sizeof why,
                 "%s: ranks disagree on collective %llu: rank 0 calls %s of unit %d, step %u (calls %llx), "
                 "rank %d %s of unit %d, step "
                 "%u (calls %llx)",
                 d->name, (unsigned long long)m->number, zr_op_name(a->op), a->tag.unit, a->tag.step,
                 (unsigned long long)a->tag.call_hash, r, zr_op_name(b->op), b->tag.unit, b->tag.step,
                 (unsigned long long)b->tag.call_hash);
        zr_report(d->rec, "%s", why);
        fail_world(d, ZR_ERR_MISMATCH, why);
        return false;
    }
    return true;
}

static void join_all(struct world *d, struct meeting *m, bool entries)
{
    struct zr_stamp *all = zr_stamp_new(d->rec);
    for (int r = 0; r < d->n; r++)
        zr_stamp_join(d->rec, all, entries ? m->part[r].entry : zr_sim_line_of(m->part[r].stream)->stamp);
    for (int r = 0; r < d->n; r++)
        zr_line_join(d->rec, zr_sim_line_of(m->part[r].stream), all);
    zr_stamp_drop(all);
}

/* Everyone is here. */
static void meet(struct world *d, struct meeting *m)
{
    enum zr_op op = m->part[0].op;
    int root = m->part[0].root;
    bool start_alone = op == ZR_OP_ALL_GATHER       ? flawed(d, ZR_SIM_GATHER_STARTS_ALONE)
                       : op == ZR_OP_REDUCE_SCATTER ? flawed(d, ZR_SIM_REDUCE_STARTS_ALONE)
                       : op == ZR_OP_EXCHANGE       ? flawed(d, ZR_SIM_EXCHANGE_STARTS_ALONE)
                                                    : true;
    bool leave_alone = op == ZR_OP_REDUCE_SCATTER ? flawed(d, ZR_SIM_REDUCE_LEAVES_ALONE)
                       : op == ZR_OP_EXCHANGE     ? flawed(d, ZR_SIM_EXCHANGE_LEAVES_ALONE)
                                                  : true;
    if (!start_alone)
        join_all(d, m, true);
    for (int r = 0; r < d->n; r++) {
        if (op == ZR_OP_BROADCAST && r != root && !flawed(d, ZR_SIM_BROADCAST_STARTS_ALONE))
            zr_line_join(d->rec, zr_sim_line_of(m->part[r].stream), m->part[root].entry);
        switch (op) {
        case ZR_OP_ALL_GATHER:
            gather_body(d, m, r);
            break;
        case ZR_OP_REDUCE_SCATTER:
            reduce_body(d, m, r);
            break;
        case ZR_OP_BROADCAST:
            broadcast_body(d, m, r);
            break;
        case ZR_OP_EXCHANGE:
            exchange_body(d, m, r);
            break;
        }
    }
    if (!leave_alone)
        join_all(d, m, false);
    for (int r = 0; op == ZR_OP_BROADCAST && r < d->n; r++)
        if (r != root && !flawed(d, ZR_SIM_BROADCAST_LEAVES_ALONE))
            zr_line_join(d->rec, zr_sim_line_of(m->part[root].stream),
                         zr_sim_line_of(m->part[r].stream)->stamp);
}

/* Meetings that everyone has left are forgotten. */
static void leave(struct meeting *m, int rank)
{
    struct world *d = m->world;
    finish_part(m, rank);
    m->n_over++;
    while (d->n_ring && d->ring[d->first % d->cap]->n_over == d->n) {
        free(d->ring[d->first % d->cap]);
        d->first++;
        d->n_ring--;
    }
}

static int rank_at(const struct meeting *m, const struct zr_stream *s)
{
    (void)m;
    return zr_sim_line_of((struct zr_stream *)(uintptr_t)s)->rank;
}

static bool start(void *arg, struct zr_stream *s)
{
    struct meeting *m = arg;
    struct world *d = m->world;
    int rank = rank_at(m, s);
    struct part *p = &m->part[rank];
    p->here = true;
    p->stream = s;
    p->entry = zr_stamp_hold(zr_sim_line_of(s));
    m->n_here++;
    if (d->code)
        return true;
    if (m->n_here < d->n)
        return false;
    if (!agree(d, m)) /* the others were released */
        return true;
    meet(d, m);
    m->over = true;
    struct zr_stream *others[MOST_RANKS];
    for (int r = 0; r < d->n; r++)
        others[r] = m->part[r].stream;
    for (int r = d->n; r-- > 0;)
        leave(m, r);
    for (int r = 0; r < d->n; r++)
        if (others[r] != s)
            zr_sim_resume(others[r]);
    return true;
}

static void *copy_of(const void *from, size_t bytes)
{
    void *p = malloc(bytes + 1);
    if (!p)
        abort();
    memcpy(p, from, bytes);
    return p;
}

static int join_meeting(struct zr_comm *c, struct zr_stream *s, const struct part *mine)
{
    struct sim_comm *me = sim_of(c);
    struct world *d = me->world;
    if (d->code)
        return 0;
    keep_order(d, c->rank, mine);
    uint64_t k = me->n_put++;
    while (k >= d->first + d->n_ring) {
        if (d->n_ring == d->cap) {
            uint64_t cap = d->cap ? d->cap * 2 : 64;
            struct meeting **ring = calloc(cap, sizeof *ring);
            if (!ring)
                abort();
            for (uint64_t i = 0; i < d->n_ring; i++)
                ring[(d->first + i) % cap] = d->ring[(d->first + i) % d->cap];
            free(d->ring);
            d->ring = ring;
            d->cap = cap;
        }
        struct meeting *m = calloc(1, sizeof *m + (size_t)d->n * sizeof m->part[0]);
        if (!m)
            abort();
        m->world = d;
        m->number = d->first + d->n_ring;
        d->ring[m->number % d->cap] = m;
        d->n_ring++;
    }
    struct meeting *m = d->ring[k % d->cap];
    m->part[c->rank] = *mine;
    return zr_sim_put(s, zr_op_name(mine->op), mine->tag.unit, mine->tag.step, start, m);
}

static int sim_all_gather(struct zr_comm *c, struct zr_stream *s, const struct zr_gather_seg *seg, int n_seg,
                          const struct zr_tag *tag)
{
    int err = zr_gather_check("sim all_gather", c->world, sim_of(c)->arena_bytes, seg, n_seg);
    if (err)
        return err;
    struct part p = {.op = ZR_OP_ALL_GATHER,
                     .gather = copy_of(seg, (size_t)n_seg * sizeof *seg),
                     .n_seg = n_seg,
                     .tag = *tag};
    if (sim_of(c)->world->code)
        free(p.gather);
    return join_meeting(c, s, &p);
}

static int sim_reduce_scatter(struct zr_comm *c, struct zr_stream *s, const struct zr_reduce_seg *seg,
                              int n_seg, const struct zr_tag *tag)
{
    int err = zr_reduce_check("sim reduce_scatter", c->world, sim_of(c)->arena_bytes, seg, n_seg);
    if (err)
        return err;
    struct part p = {.op = ZR_OP_REDUCE_SCATTER,
                     .reduce = copy_of(seg, (size_t)n_seg * sizeof *seg),
                     .n_seg = n_seg,
                     .tag = *tag};
    if (sim_of(c)->world->code)
        free(p.reduce);
    return join_meeting(c, s, &p);
}

static int sim_broadcast(struct zr_comm *c, struct zr_stream *s, int64_t off, int64_t bytes, int root,
                         const struct zr_tag *tag)
{
    int err = zr_range_check("sim broadcast", sim_of(c)->arena_bytes, off, bytes, 1);
    struct part p = {.op = ZR_OP_BROADCAST, .off = off, .bytes = bytes, .root = root, .tag = *tag};
    return err ? err : join_meeting(c, s, &p);
}

static int sim_exchange(struct zr_comm *c, struct zr_stream *s, int64_t off, int64_t slot_bytes,
                        const struct zr_tag *tag)
{
    if (flawed(sim_of(c)->world, ZR_SIM_NO_BARRIER_IN_STEP) && tag->unit >= 0)
        return 0;
    if (flawed(sim_of(c)->world, ZR_SIM_NO_BARRIER) && tag->unit < 0 &&
        zr_sim_speaker(sim_of(c)->world->w)->id % ZR_SIM_LINES == ZR_SIM_MODEL)
        return 0;
    int err = zr_range_check("sim exchange", sim_of(c)->arena_bytes, off, slot_bytes, c->world);
    struct part p = {.op = ZR_OP_EXCHANGE, .off = off, .bytes = slot_bytes, .tag = *tag};
    return err ? err : join_meeting(c, s, &p);
}

static void sim_abort(struct zr_comm *c, int code, const char *why)
{
    fail_world(sim_of(c)->world, code, why);
}

static int sim_status(struct zr_comm *c, char *why, size_t why_bytes)
{
    const struct world *d = sim_of(c)->world;
    if (why && why_bytes)
        snprintf(why, why_bytes, "%s", d->code ? d->why : "");
    return d->code;
}

static void sim_stats(struct zr_comm *c, struct zr_comm_stats *out)
{
    *out = sim_of(c)->stats;
}

static void sim_close(struct zr_comm *c)
{
    if (!c)
        return;
    struct sim_comm *m = sim_of(c);
    struct world *d = m->world;
    struct zr_device *dev = zr_sim_device(d->w, c->rank);
    if (m->arena)
        dev->ops->free(dev, m->arena, m->arena_bytes);
    free(m);
    if (--d->n_open)
        return;
    for (uint64_t k = 0; k < d->n_ring; k++) {
        struct meeting *left = d->ring[(d->first + k) % d->cap];
        for (int r = 0; r < d->n; r++)
            finish_part(left, r);
        free(left);
    }
    free(d->ring);
    free(d->ranks);
    free(d);
}

static const struct zr_comm_ops sim_comm_ops = {
    .name = "sim",
    .deterministic = true,
    .arena = sim_arena,
    .all_gather = sim_all_gather,
    .reduce_scatter = sim_reduce_scatter,
    .broadcast = sim_broadcast,
    .exchange = sim_exchange,
    .abort = sim_abort,
    .status = sim_status,
    .stats = sim_stats,
    .close = sim_close,
};

int zr_sim_comm_open(struct zr_sim *w, const char *name, struct zr_sim_order *order, struct zr_comm **out)
{
    int n = zr_sim_config(w)->world;
    if (n > MOST_RANKS)
        return zr_fail(ZR_ERR_ARG, "sim: world is %d; allowed: 1..%d", n, MOST_RANKS);
    struct world *d = calloc(1, sizeof *d);
    struct zr_comm **ranks = calloc((size_t)n, sizeof *ranks);
    bool ok = d && ranks;
    for (int r = 0; ok && r < n; r++) {
        struct sim_comm *m = calloc(1, sizeof *m);
        ok = m != NULL;
        if (!ok)
            break;
        m->base = (struct zr_comm){.ops = &sim_comm_ops, .rank = r, .world = n};
        m->world = d;
        ranks[r] = out[r] = &m->base;
    }
    if (!ok) {
        for (int r = 0; ranks && r < n; r++)
            free(ranks[r]);
        free(ranks);
        free(d);
        return zr_fail(ZR_ERR_NOMEM, "sim: no memory for a communicator of %d ranks", n);
    }
    *d = (struct world){
        .w = w, .order = order, .rec = zr_sim_recorder(w), .name = name, .n = n, .n_open = n, .ranks = ranks};
    return 0;
}
