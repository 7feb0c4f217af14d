/* SPDX-License-Identifier: Apache-2.0 */
/* mpi_wait.c: begins requests and waits for them, compares the ranks' next operations, and fails. */
#include "comm/meet/rendezvous.h"
#include "comm/mpi/mpi_comm.h"

#include <sched.h>
#include <stdio.h>
#include <time.h>

/* A waiting thread spins for SPIN_NS, yields its core until YIELD_NS, and then sleeps, longer after LONG_NS.
 * PEERS: most posts that are exchanged at a time. */
enum {
    SPIN_NS = 50 * 1000,
    YIELD_NS = 2 * 1000 * 1000,
    LONG_NS = 100 * 1000 * 1000,
    PEERS = ZR_MPI_WINDOW / 2
};
/* The most time that rank 0 may take to compare calls, in addition to timeout_ms. */
static const int64_t DOUBT_NS = INT64_C(8) * 1000 * 1000 * 1000;

/* How long no request has ended. The time between two looks counts only up to LONG_NS. If it is longer, the
 * process was stopped or had no core, and the others may have been, too. since_ns: when a request ended
 * last. */
struct patience {
    int64_t still_ns, last_ns, since_ns;
    int32_t left;
};

/* ---- failing ---- */

int zr_mpi_fail(struct zr_mpi_set *p, int code, const char *text)
{
    if (zr_first_keep(&p->failure, code, text)) {
        atomic_store(&p->alarm, 1);
        zr_rendezvous_report(p->rdv, code, text);
    }
    return zr_first_code(&p->failure);
}

static void rest_a_while(const struct zr_mpi_set *p, int64_t waited_ns)
{
    if (p->spins && waited_ns < SPIN_NS)
        zr_relax();
    else if (waited_ns < YIELD_NS)
        sched_yield(); /* more ranks than cores: another rank may need this core */
    else
        nanosleep(&(struct timespec){.tv_nsec = waited_ns < LONG_NS ? 50000 : 500000}, NULL);
}

int zr_mpi_fail_op(struct zr_mpi *m, int code, const char *what)
{
    struct zr_mpi_set *p = m->set;
    char op[96], text[ZR_MPI_TEXT], why[ZR_FRAME_TEXT_BYTES];
    zr_post_describe(&m->last, op, sizeof op);
    snprintf(text, sizeof text, "%s: %s", op, what);
    int explained = zr_rendezvous_explain(p->rdv, code, text, why);
    if (explained)
        return zr_mpi_fail(p, explained, why);
    if (!zr_first_code(&p->failure) && zr_rendezvous_compare(p->rdv, code, text)) {
        int64_t until = zr_now_ns() + (p->timeout_ns < DOUBT_NS ? p->timeout_ns : DOUBT_NS);
        while (!zr_first_code(&p->failure) && zr_now_ns() < until) {
            zr_mpi_poll(p->process); /* other ranks may still need what this rank has sent */
            rest_a_while(p, LONG_NS);
        }
    }
    return zr_mpi_fail(p, code, text);
}

static int fail_class(struct zr_mpi *m, int code, int class, const char *call)
{
    const struct zr_mpi_process *p = m->set->process;
    char text[160], what[256];
    zr_mpi_shim_of(p)->error(zr_mpi_world_of(p), class, text, sizeof text);
    snprintf(what, sizeof what, "%s: %s: %s", zr_mpi_shim_of(p)->name, call, text);
    return zr_mpi_fail_op(m, code, what);
}

/* ---- waiting ---- */

/* Looks for failures and polls once. Returns 0 to go on waiting, 1 if no request has ended for too long, or
 * the failure. */
static int look_around_once(struct zr_mpi *m, struct patience *w, int32_t left)
{
    struct zr_mpi_set *p = m->set;
    int64_t now = zr_now_ns();
    int err = zr_first_code(&p->failure), ended = err ? 0 : zr_mpi_ended(p->process);
    if (ended)
        err = zr_mpi_fail_op(m, ended, zr_error_text());
    if (err)
        return err;
    if (left != w->left || !w->last_ns)
        *w = (struct patience){.last_ns = now, .since_ns = now, .left = left};
    w->still_ns += now - w->last_ns < LONG_NS ? now - w->last_ns : LONG_NS;
    w->last_ns = now;
    if (w->still_ns > p->timeout_ns) {
        m->waited_ms = (now - w->since_ns) / 1000000;
        return 1;
    }
    if (!zr_mpi_poll(p->process))
        rest_a_while(p, w->still_ns);
    return 0;
}

/* Returns 0, 1 or the failure, like look_around_once. */
static int await_batch(struct zr_mpi *m, struct zr_mpi_batch *b, int32_t n_left)
{
    struct patience w = {0};
    int32_t left;
    while ((left = atomic_load(&b->n_left)) > n_left) {
        int res = look_around_once(m, &w, left);
        if (res)
            return res;
    }
    int class = atomic_load(&b->error);
    return class ? fail_class(m, ZERO_ERR_PEER, class, "a pending message") : 0;
}

static int fail_unmoved(struct zr_mpi *m)
{
    char what[160];
    snprintf(what, sizeof what,
             "rank %d waited %lld ms (timeout_ms) for bytes of other ranks, which had reached this "
             "operation, but no bytes came",
             m->set->rank, (long long)m->waited_ms);
    return zr_mpi_fail_op(m, ZERO_ERR_TIMEOUT, what);
}

int zr_mpi_await(struct zr_mpi *m, struct zr_mpi_batch *b, int32_t n_left)
{
    int res = await_batch(m, b, n_left);
    return res == 1 ? fail_unmoved(m) : res;
}

/* ---- beginning ---- */

/* Arguments of a request. */
struct ask {
    const char *call;
    struct zr_mpi_batch *batch;
    const void *from;
    void *to;
    int64_t bytes, stride;
    int peer, tag;
};

typedef int begin_fn(const struct zr_mpi_shim *shim, struct zr_mpi_world *w, int32_t comm,
                     const struct ask *a, int32_t *slot);

static int begin_send(const struct zr_mpi_shim *shim, struct zr_mpi_world *w, int32_t comm,
                      const struct ask *a, int32_t *slot)
{
    return shim->send(w, comm, a->from, a->bytes, a->peer, a->tag, slot);
}

static int begin_receive(const struct zr_mpi_shim *shim, struct zr_mpi_world *w, int32_t comm,
                         const struct ask *a, int32_t *slot)
{
    return shim->receive(w, comm, a->to, a->bytes, a->peer, a->tag, slot);
}

static int begin_gather(const struct zr_mpi_shim *shim, struct zr_mpi_world *w, int32_t comm,
                        const struct ask *a, int32_t *slot)
{
    return shim->all_gather(w, comm, a->from, a->to, a->bytes, a->stride, slot);
}

static int begin_broadcast(const struct zr_mpi_shim *shim, struct zr_mpi_world *w, int32_t comm,
                           const struct ask *a, int32_t *slot)
{
    return shim->broadcast(w, comm, a->to, a->bytes, a->peer, slot);
}

static int begin_sum(const struct zr_mpi_shim *shim, struct zr_mpi_world *w, int32_t comm,
                     const struct ask *a, int32_t *slot)
{
    return shim->all_sum(w, comm, a->to, (int)a->bytes, slot);
}

static int begin_max(const struct zr_mpi_shim *shim, struct zr_mpi_world *w, int32_t comm,
                     const struct ask *a, int32_t *slot)
{
    return shim->all_max(w, comm, a->to, (int)a->bytes, slot);
}

static int begin_reduce_block(const struct zr_mpi_shim *shim, struct zr_mpi_world *w, int32_t comm,
                              const struct ask *a, int32_t *slot)
{
    return shim->reduce_block(w, comm, a->from, a->to, a->bytes / (int64_t)sizeof(float), slot);
}

/* Tries to begin a request. Returns 0 with the request's slot, or -1 as slot if there is no room; or the
 * failure. */
static int begin_once(struct zr_mpi *m, begin_fn *begin, const struct ask *a, int32_t *slot)
{
    struct zr_mpi_set *p = m->set;
    struct zr_mpi_process *mpi = p->process;
    int err = zr_mpi_enter(mpi, p->opt.timeout_ms);
    if (err)
        return zr_mpi_fail_op(m, err, zr_error_text());
    int class = begin(zr_mpi_shim_of(mpi), zr_mpi_world_of(mpi), m->comm, a, slot);
    if (!class && *slot >= 0)
        zr_mpi_begun(mpi, *slot, a->batch);
    zr_mpi_leave(mpi);
    return class ? fail_class(m, ZERO_ERR_FAILED, class, a->call) : 0;
}

static int begin_request(struct zr_mpi *m, begin_fn *fn, const struct ask *a)
{
    struct patience w = {0};
    int32_t slot = -1;
    for (;;) {
        int res = zr_first_code(&m->set->failure);
        res = res ? res : begin_once(m, fn, a, &slot);
        if (res || slot >= 0)
            return res;
        res = look_around_once(m, &w, 0); /* other requests take all the room */
        if (res)
            return res == 1 ? fail_unmoved(m) : res;
    }
}

int zr_mpi_send(struct zr_mpi *m, const void *at, int64_t bytes, int to, int tag, struct zr_mpi_batch *b)
{
    const struct ask a = {
        .call = "MPI_Isend", .batch = b, .from = at, .bytes = bytes, .peer = to, .tag = tag};
    return begin_request(m, begin_send, &a);
}

int zr_mpi_receive(struct zr_mpi *m, void *at, int64_t bytes, int from, int tag, struct zr_mpi_batch *b)
{
    const struct ask a = {
        .call = "MPI_Irecv", .batch = b, .to = at, .bytes = bytes, .peer = from, .tag = tag};
    return begin_request(m, begin_receive, &a);
}

/* Gathers piece by piece, so that each piece has a separate deadline. */
int zr_mpi_all_gather(struct zr_mpi *m, const void *own, void *to, int64_t bytes, int64_t stride)
{
    int err = 0;
    for (int64_t at = 0; at < bytes && !err; at += ZR_MPI_MESSAGE) {
        const struct ask a = {.call = "MPI_Iallgather",
                              .batch = &m->data[0],
                              .from = own ? (const char *)own + at : NULL,
                              .to = (char *)to + at,
                              .bytes = bytes - at < ZR_MPI_MESSAGE ? bytes - at : ZR_MPI_MESSAGE,
                              .stride = stride};
        err = begin_request(m, begin_gather, &a);
        err = err ? err : zr_mpi_await(m, &m->data[0], 0);
    }
    return err;
}

int zr_mpi_broadcast(struct zr_mpi *m, void *at, int64_t bytes, int root)
{
    int err = 0;
    for (int64_t done = 0; done < bytes && !err; done += ZR_MPI_MESSAGE) {
        const struct ask a = {.call = "MPI_Ibcast",
                              .batch = &m->data[0],
                              .to = (char *)at + done,
                              .bytes = bytes - done < ZR_MPI_MESSAGE ? bytes - done : ZR_MPI_MESSAGE,
                              .peer = root};
        err = begin_request(m, begin_broadcast, &a);
        err = err ? err : zr_mpi_await(m, &m->data[0], 0);
    }
    return err;
}

int zr_mpi_reduce_block(struct zr_mpi *m, const float *in, float *out, int64_t n)
{
    const struct ask a = {.call = "MPI_Ireduce_scatter_block",
                          .batch = &m->data[0],
                          .from = in,
                          .to = out,
                          .bytes = n * (int64_t)sizeof *in};
    int err = begin_request(m, begin_reduce_block, &a);
    return err ? err : zr_mpi_await(m, &m->data[0], 0);
}

int zr_mpi_all_reduce(struct zr_mpi *m, uint64_t *at, int32_t n_sum, int32_t n_max)
{
    struct ask a = {.call = "MPI_Iallreduce", .batch = &m->data[0], .to = at, .bytes = n_sum};
    const uint64_t sign = UINT64_C(1) << 63; /* flipping it gives signed numbers the order of unsigned ones */
    int err = n_sum ? begin_request(m, begin_sum, &a) : 0;
    a.to = at + n_sum;
    a.bytes = n_max;
    for (int32_t i = n_sum; i < n_sum + n_max; i++)
        at[i] ^= sign;
    if (!err && n_max)
        err = begin_request(m, begin_max, &a);
    err = err ? err : zr_mpi_await(m, &m->data[0], 0);
    for (int32_t i = n_sum; i < n_sum + n_max && !err; i++)
        at[i] ^= sign;
    return err;
}

int zr_mpi_look_between(struct zr_mpi *m)
{
    int err = zr_first_code(&m->set->failure);
    if (!err)
        zr_mpi_poll(m->set->process);
    return err;
}

/* ---- meeting ---- */

static bool has_come(const struct zr_mpi *m, int place)
{
    return atomic_load(&m->from[place].n_left) == 0;
}

/* The ranks that exchange posts: the whole group when an operation begins, or its ranks on one host in the
 * middle. */
struct meeting {
    bool in_host;
    /* Number of these ranks; this rank's number among them. */
    int n, me;
};

static int at_distance(const struct zr_mpi *m, const struct meeting *w, int k)
{
    int i = (w->me + k + w->n) % w->n;
    return w->in_host ? zr_spread_place(&m->spread, m->spread.host, i) : i;
}

/* Fails with the places at distances from first to end that have not come. Returns 0 if all have come
 * meanwhile, by another thread's poll. */
static int fail_missing(struct zr_mpi *m, const struct meeting *w, int first, int end)
{
    /* The last operation that all of them have reached. */
    const struct zr_post *there = w->in_host ? &m->last : &m->before;
    char where[128], more[48] = "", what[320];
    int n = 0, place = -1;
    for (int k = first; k < end; k++)
        if (!has_come(m, at_distance(m, w, -k))) {
            place = place < 0 ? at_distance(m, w, -k) : place;
            n++;
        }
    if (!n)
        return 0;
    zr_post_where(there, where, sizeof where);
    if (n > 1)
        snprintf(more, sizeof more, ", and for %d more", n - 1);
    snprintf(what, sizeof what, "rank %d waited %lld ms (timeout_ms) for rank %d, which is %s%s",
             m->set->rank, (long long)m->waited_ms, zr_comm_rank(&m->base, place), where, more);
    return zr_mpi_fail_op(m, ZERO_ERR_TIMEOUT, what);
}

/* Compares the posts of places that have come. */
static int compare_posts(struct zr_mpi *m, const struct meeting *w, int first, int end)
{
    const struct zr_post *mine = &m->post[m->base.group.rank];
    char what[512];
    for (int k = first; k < end; k++) {
        int i = at_distance(m, w, -k);
        if (!has_come(m, i) || zr_post_same(mine, &m->post[i]))
            continue;
        zr_post_differ(zr_comm_rank(&m->base, i), &m->post[i], m->set->rank, mine, what, sizeof what);
        return zr_mpi_fail_op(m, ZERO_ERR_MISMATCH, what);
    }
    return 0;
}

/* Fails after a timeout. The posts that have come may show why others have not. */
static int fail_unmet(struct zr_mpi *m, const struct meeting *w, int first, int end)
{
    int err = compare_posts(m, w, first, end);
    return err ? err : fail_missing(m, w, first, end);
}

/* Exchanges posts at distances from first to end: sends to the ranks ahead, receives from those behind. */
static int meet_some(struct zr_mpi *m, const struct meeting *w, int first, int end)
{
    int res = 0, tag = w->in_host ? ZR_MPI_TAG_HOST : ZR_MPI_TAG_POST;
    for (int k = first; k < end && !res; k++) {
        int from = at_distance(m, w, -k);
        res = zr_mpi_receive(m, &m->post[from], sizeof *m->post, from, tag, &m->from[from]);
    }
    for (int k = first; k < end && !res; k++)
        res = zr_mpi_send(m, &m->post[m->base.group.rank], sizeof *m->post, at_distance(m, w, k), tag,
                          &m->sent);
    for (int k = first; k < end && !res; k++)
        res = await_batch(m, &m->from[at_distance(m, w, -k)], 0);
    if (res < 0)
        return res;
    int err = res ? fail_unmet(m, w, first, end) : 0;
    return err ? err : compare_posts(m, w, first, end);
}

static int meet_members(struct zr_mpi *m, const struct meeting *w)
{
    int err = 0;
    for (int first = 1; first < w->n && !err; first += PEERS)
        err = meet_some(m, w, first, first + PEERS < w->n ? first + PEERS : w->n);
    return err ? err : zr_mpi_await(m, &m->sent, 0);
}

int zr_mpi_meet(struct zr_mpi *m, const struct zr_post *mine)
{
    const struct meeting all = {.n = m->base.group.size, .me = m->base.group.rank};
    m->post[all.me] = *mine;
    return meet_members(m, &all);
}

/* When the messages have arrived, earlier writes are visible, as MPI itself passes messages through shared
 * memory. */
int zr_mpi_meet_host(struct zr_mpi *m)
{
    const struct zr_spread *s = &m->spread;
    const struct meeting here = {
        .in_host = true, .n = s->n_local[s->host], .me = s->local_of[m->base.group.rank]};
    return meet_members(m, &here);
}

bool zr_mpi_rests(const struct zr_mpi *m)
{
    int32_t n = !zr_op_queue_is_idle(&m->queue); /* its thread is inside MPI */
    n += atomic_load(&m->sent.n_left) + atomic_load(&m->data[0].n_left) + atomic_load(&m->data[1].n_left);
    for (int i = 0; m->from && i < m->base.group.size; i++)
        n += atomic_load(&m->from[i].n_left);
    return n == 0;
}
