/* SPDX-License-Identifier: Apache-2.0 */
/* nccl_stand_in_run.c: carries out the stand-in's collectives when their streams reach them.
 *
 * A group first gives away copies of everything it sends, and then waits for what each of its calls needs,
 * in turn. So a broadcast's root, a reduce's other ranks and a sender are done at once, as NCCL's own
 * buffers allow. A sender waits with sends_wait. */
#include "test/stand_in/half.h"
#include "test/stand_in/nccl_stand_in_inside.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* --- meeting --- */

static struct nsi_meeting *meeting_of(const struct nsi_call *c)
{
    struct nsi_team *k = c->comm->team;
    int me = c->comm->rank;
    bool message = c->kind >= NSI_SEND;
    int from = c->kind == NSI_SEND ? me : c->kind == NSI_RECV ? c->root : -1;
    int to = c->kind == NSI_SEND ? c->root : c->kind == NSI_RECV ? me : -1;
    for (struct nsi_meeting *m = k->meetings; m; m = m->next)
        if (m->number == c->number && m->from == from && m->to == to)
            return m;
    struct nsi_meeting *m = nsi_new(sizeof *m);
    *m = (struct nsi_meeting){.kind = message ? NSI_SEND : c->kind,
                              .type = c->type,
                              .op = c->op,
                              .count = c->count,
                              .root = message ? -1 : c->root,
                              .from = from,
                              .to = to,
                              .number = c->number,
                              .offset = c->offset,
                              .next = k->meetings};
    k->meetings = m;
    return m;
}

/* Two ranks that use their common communicators in different orders may wait for each other for ever. */
static void compare_order(struct nsi_meeting *m, const struct nsi_call *c)
{
    int me = c->comm->rank;
    memcpy(m->issue[me], c->issue, sizeof c->issue);
    for (int r = 0; r < c->comm->team->n_ranks; r++)
        if (m->here[r] && m->issue[r][me] != c->issue[r]) {
            stand_in_misuse(
                "rank %d: collective %llu is its call number %llu with rank %d, whose it is number %llu: "
                "communicators are used in another order",
                me, (unsigned long long)c->number, (unsigned long long)c->issue[r], r,
                (unsigned long long)m->issue[r][me]);
            return;
        }
}

static void compare(struct nsi_meeting *m, const struct nsi_call *c)
{
    int me = c->comm->rank;
    bool message = c->kind >= NSI_SEND;
    if ((!message && (m->kind != c->kind || m->root != c->root || m->op != c->op)) || m->type != c->type ||
        m->count != c->count) {
        stand_in_misuse(
            "rank %d: collective or message %llu is kind %d with %zu elements of type %d and root %d, "
            "another rank's is kind %d with %zu of type %d and root %d",
            me, (unsigned long long)c->number, c->kind, c->count, c->type, c->root, m->kind, m->count,
            m->type, m->root);
        m->different = true;
    }
    if (!message)
        compare_order(m, c);
    if (m->offset != c->offset)
        stand_in_misuse("rank %d: collective %llu lies at offset %lld of its window, another rank's at %lld",
                        me, (unsigned long long)c->number, (long long)c->offset, (long long)m->offset);
}

static size_t bytes_given(const struct nsi_call *c)
{
    size_t n = c->count * nsi_size(c->type);
    switch (c->kind) {
    case NSI_REDUCE_SCATTER:
        return n * (size_t)c->comm->team->n_ranks;
    case NSI_BROADCAST:
        return c->root == c->comm->rank ? n : 0;
    case NSI_RECV:
        return 0;
    default:
        return n;
    }
}

static void give(struct nsi_meeting *m, const struct nsi_call *c)
{
    int me = c->comm->rank;
    size_t n = bytes_given(c);
    compare(m, c);
    if (n) {
        m->given[me] = nsi_new(n);
        memcpy(m->given[me], stand_in_reach(c->send), n);
    }
    m->here[me] = true;
}

/* Returns whether everything that this rank needs is there. */
static bool is_served(const struct nsi_meeting *m, const struct nsi_call *c)
{
    int me = c->comm->rank;
    if (m->different)
        return false;
    if ((c->kind == NSI_SEND && !nsi.machine.sends_wait) || (c->kind == NSI_REDUCE && me != c->root))
        return true;
    if (c->kind >= NSI_SEND || c->kind == NSI_BROADCAST)
        return m->here[c->root];
    for (int i = 0; i < c->comm->team->n_ranks; i++)
        if (!m->here[i])
            return false;
    return true;
}

/* --- receiving --- */

static float element(const char *at, ncclDataType_t type, size_t i)
{
    float f;
    uint16_t h;
    if (type == ncclBfloat16) {
        memcpy(&h, at + 2 * i, 2);
        return bf16_to_float(h);
    }
    memcpy(&f, at + 4 * i, 4);
    return f;
}

/* NCCL's maximum is fmaxf's, which drops NaN: it is NaN only if all ranks have NaN. */
static float combine(float a, float b, ncclRedOp_t op)
{
    return op == ncclMax ? fmaxf(a, b) : a + b;
}

/* Element i of every rank's input, combined along the ring that ends at rank last. */
static void reduce(const struct nsi_meeting *m, int n_ranks, int last, size_t first, size_t n,
                   ncclDataType_t type, char *to)
{
    for (size_t i = 0; i < n; i++) {
        float acc = 0;
        for (int k = 1; k <= n_ranks; k++) {
            float x = element(m->given[(last + k) % n_ranks], type, first + i);
            acc = k == 1 ? x : combine(acc, x, m->op);
            if (type == ncclBfloat16)
                acc = bf16_to_float(bf16_from_float(acc));
        }
        uint16_t h = bf16_from_float(acc);
        memcpy(to + i * nsi_size(type), type == ncclBfloat16 ? (void *)&h : (void *)&acc, nsi_size(type));
    }
}

/* All ranks get the same bits, since each part is added up along one ring only. */
static void all_reduce(const struct nsi_meeting *m, int n_ranks, const struct nsi_call *c)
{
    char *recv = stand_in_reach(c->recv);
    if (c->type == ncclFloat32 || c->type == ncclBfloat16) {
        for (int r = 0; r < n_ranks; r++) {
            size_t n = (size_t)n_ranks, from = c->count * (size_t)r / n, end = c->count * (size_t)(r + 1) / n;
            reduce(m, n_ranks, r, from, end - from, c->type, recv + from * nsi_size(c->type));
        }
        return;
    }
    for (size_t k = 0; k < c->count; k++) {
        uint64_t acc = 0, x;
        for (int i = 0; i < n_ranks; i++) {
            memcpy(&x, m->given[i] + k * sizeof x, sizeof x);
            acc = c->op == ncclSum ? acc + x : acc > x ? acc : x;
        }
        memcpy(recv + k * sizeof acc, &acc, sizeof acc);
    }
}

static void take(const struct nsi_meeting *m, const struct nsi_call *c)
{
    int me = c->comm->rank, n_ranks = c->comm->team->n_ranks;
    size_t n = c->count * nsi_size(c->type);
    char *recv = stand_in_reach(c->recv);
    switch (c->kind) {
    case NSI_ALL_GATHER:
        for (int i = 0; i < n_ranks; i++)
            memcpy(recv + n * (size_t)i, m->given[i], n);
        break;
    case NSI_REDUCE_SCATTER:
        reduce(m, n_ranks, me, c->count * (size_t)me, c->count, c->type, recv);
        break;
    case NSI_REDUCE:
        if (me == c->root)
            reduce(m, n_ranks, me, 0, c->count, c->type, recv);
        break;
    case NSI_BROADCAST:
    case NSI_RECV:
        memcpy(recv, m->given[c->root], n);
        break;
    case NSI_ALL_REDUCE:
        all_reduce(m, n_ranks, c);
        break;
    case NSI_SEND:
        break;
    }
}

static void free_meeting(struct nsi_meeting *m)
{
    for (int i = 0; i < NSI_RANKS; i++)
        nsi_drop(m->given[i]);
    nsi_drop(m);
}

static void leave(struct nsi_team *k, struct nsi_meeting *m, int me)
{
    m->left[me] = true;
    for (int i = 0; i < k->n_ranks; i++)
        if (!m->left[i] && (m->from < 0 || i == m->from || i == m->to))
            return;
    struct nsi_meeting **at = &k->meetings;
    while (*at != m)
        at = &(*at)->next;
    *at = m->next;
    free_meeting(m);
}

void nsi_forget(struct nsi_team *team)
{
    for (struct nsi_meeting *m = team->meetings, *next; m; m = next) {
        next = m->next;
        free_meeting(m);
    }
    team->meetings = NULL;
}

/* --- on the stream --- */

static bool is_over(const struct ncclComm *comm)
{
    return comm->aborted || nsi.ending;
}

static void forget_batch(const struct nsi_call *calls)
{
    struct nsi_call **at = &nsi.batches;
    while (*at && *at != calls)
        at = &(*at)->next_batch;
    if (*at)
        *at = calls->next_batch;
}

/* --- room on the GPU, and operations that wait for ever --- */

enum {
    /* waits without any change after which operations are looked at */
    STILL_WAITS = 10,
    /* with more batches a look, whose time grows with their third power, is left out */
    MAX_LOOKED_AT = 200
};

static bool may_start(const struct nsi_call *calls)
{
    int device = calls->comm->device;
    for (const struct nsi_call *b = nsi.batches; b && calls->comm->in_order; b = b->next_batch)
        if (b->comm->device == device && b->comm->in_order && !b->now && b->order < calls->order)
            return false;
    return nsi.n_ctas[device] + calls->n_ctas <= nsi.machine.n_ctas;
}

/* Returns the batch of another rank that has the call which this one needs from it; NULL: it was not
 * issued. */
static const struct nsi_call *batch_with(const struct nsi_call *call, int rank)
{
    for (const struct nsi_call *b = nsi.batches; b; b = b->next_batch)
        for (const struct nsi_call *c = b; c; c = c->next)
            if (c->comm->team == call->comm->team && c->comm->rank == rank && c->number == call->number &&
                (c->kind >= NSI_SEND) == (call->kind >= NSI_SEND) &&
                (call->kind < NSI_SEND || (c->kind != call->kind && c->root == call->comm->rank)))
                return b;
    return NULL;
}

/* Returns a rank that a running batch needs and that cannot go on; -1: none. */
static int waits_for(const struct nsi_call *calls)
{
    const struct nsi_call *c = calls->now;
    const struct nsi_meeting *m = meeting_of(c);
    bool one = c->kind >= NSI_SEND || c->kind == NSI_BROADCAST;
    if (is_served(m, c) || m->different)
        return -1;
    for (int r = 0; r < c->comm->team->n_ranks; r++) {
        const struct nsi_call *b = m->here[r] || (one && r != c->root) ? NULL : batch_with(c, r);
        if (b && !b->can_go)
            return r;
    }
    return -1;
}

struct before {
    bool all_go;
    const struct nsi_call *stuck;
};

static void look_before(void *context, void *arg)
{
    struct before *all = context;
    for (const struct nsi_call *b = nsi.batches; b; b = b->next_batch)
        if (b == arg && !b->can_go) {
            all->all_go = false;
            all->stuck = b;
        }
}

static bool can_go(const struct nsi_call *calls, struct before *before)
{
    const struct ncclComm *comm = calls->comm;
    if (is_over(comm))
        return true;
    if (calls->now)
        return waits_for(calls) < 0;
    *before = (struct before){.all_go = true};
    stand_in_before(calls, look_before, before);
    if (!before->all_go || !calls->has_run)
        return before->all_go;
    for (const struct nsi_call *b = nsi.batches; b; b = b->next_batch) {
        if (b->comm->device != comm->device || b == calls)
            continue;
        if (comm->in_order && b->comm->in_order && !b->now && b->order < calls->order)
            return b->can_go;
        if (b->holds_ctas && b->can_go)
            return true;
    }
    return may_start(calls);
}

static void describe(const struct nsi_call *b, char *text, size_t n)
{
    const struct nsi_call *c = b->now ? b->now : b;
    struct before before = {.all_go = true};
    int at = snprintf(text, n, "rank %d's %s %llu of [%.48s]", b->comm->rank, nsi_name(c->kind),
                      (unsigned long long)c->number, b->comm->team->id);
    if (b->now) {
        snprintf(text + at, n - (size_t)at, " runs and waits for rank %d", waits_for(b));
        return;
    }
    can_go(b, &before);
    if (before.stuck)
        snprintf(text + at, n - (size_t)at, " has not started, behind %s %llu of [%.48s]",
                 nsi_name(before.stuck->kind), (unsigned long long)before.stuck->number,
                 before.stuck->comm->team->id);
    else
        snprintf(text + at, n - (size_t)at, " has not started: it needs %d CTAs, and %d of %d are taken",
                 b->n_ctas, nsi.n_ctas[b->comm->device], nsi.machine.n_ctas);
}

/* Reports the batches that can never go on, whatever the host does. The others can, because the calls of
 * their peers were not issued yet, or wait for batches that can go on. */
static void look_for_hang(void)
{
    struct before before;
    int n = 0;
    for (struct nsi_call *b = nsi.batches; b; b = b->next_batch)
        b->can_go = false;
    for (bool more = true; more;) {
        more = false;
        for (struct nsi_call *b = nsi.batches; b; b = b->next_batch)
            if (!b->can_go && can_go(b, &before))
                b->can_go = more = true;
    }
    for (struct nsi_call *b = nsi.batches; b; b = b->next_batch)
        n += !b->can_go && !b->reported;
    if (n == 0)
        return;
    stand_in_misuse("%d operations on GPUs wait for each other for ever:", n);
    for (struct nsi_call *b = nsi.batches; b; b = b->next_batch) {
        char text[300];
        if (b->can_go || b->reported)
            continue;
        b->reported = true;
        describe(b, text, sizeof text);
        stand_in_misuse("%s", text);
    }
    nsi.hung = true;
}

/* Waits until something has changed. If nothing does for a while, looks whether anything can. One look is
 * enough until an operation is issued, starts or ends. */
static void wait_or_look(int *n_still)
{
    uint32_t seen = atomic_load(&nsi_shared->moved);
    nsi_wait();
    *n_still = atomic_load(&nsi_shared->moved) == seen ? *n_still + 1 : 0;
    if (*n_still < STILL_WAITS || (nsi.looked_at_move == seen && nsi.looked_at_order == nsi.n_ordered))
        return;
    nsi.looked_at_move = seen;
    nsi.looked_at_order = nsi.n_ordered;
    if (nsi.n_batches <= MAX_LOOKED_AT)
        look_for_hang();
}

static void run_batch(void *arg)
{
    struct nsi_call *calls = arg;
    struct ncclComm *comm = calls->comm;
    int n_still = 0;
    if (nsi.machine.slow_us)
        usleep((useconds_t)nsi.machine.slow_us);
    nsi_lock();
    calls->has_run = true;
    comm->n_queued--;
    comm->n_running++;
    while (!is_over(comm) && !may_start(calls))
        wait_or_look(&n_still);
    calls->now = calls;
    calls->holds_ctas = !is_over(comm);
    nsi.n_ctas[comm->device] += calls->holds_ctas ? calls->n_ctas : 0;
    for (struct nsi_call *c = calls; c && !is_over(comm); c = c->next)
        give(meeting_of(c), c);
    nsi_wake();
    for (struct nsi_call *c = calls; c; c = c->next) {
        struct nsi_meeting *m = is_over(comm) ? NULL : meeting_of(c);
        calls->now = c;
        while (!is_over(comm) && !is_served(m, c)) {
            /* The network tells its proxy thread; the kernel goes on waiting. */
            if (nsi_network_is_broken(comm->team, comm->rank))
                comm->async = ncclRemoteError;
            wait_or_look(&n_still);
        }
        if (is_over(comm))
            break;
        take(m, c);
        leave(comm->team, m, comm->rank);
    }
    nsi.n_ctas[comm->device] -= calls->holds_ctas ? calls->n_ctas : 0;
    calls->holds_ctas = false;
    forget_batch(calls);
    comm->n_running--;
    nsi_wake();
    nsi_unlock();
}

/* Called after the batch has run, or when its device was lost. */
static void drop_batch(void *arg)
{
    struct nsi_call *c = arg;
    nsi_lock();
    c->comm->n_queued -= !c->has_run;
    forget_batch(c);
    nsi.n_batches--;
    nsi_wake();
    nsi_unlock();
    for (struct nsi_call *next; c; c = next) {
        next = c->next;
        free(c);
    }
}

ncclResult_t nsi_run(struct nsi_call *calls)
{
    struct ncclComm *comm = calls->comm;
    int before = 0;
    comm->n_queued++;
    nsi.n_batches++;
    nsi.counts.n_groups++;
    calls->n_ctas = comm->no_ctas ? 0 : comm->n_ctas;
    calls->order = nsi.n_ordered++;
    calls->next_batch = nsi.batches;
    nsi.batches = calls;
    nsi_unlock();
    cudaGetDevice(&before);
    cudaSetDevice(comm->device);
    cudaError_t err = stand_in_put(calls->stream, "nccl", run_batch, calls, drop_batch);
    cudaSetDevice(before);
    nsi_lock();
    return err ? ncclUnhandledCudaError : ncclSuccess;
}
