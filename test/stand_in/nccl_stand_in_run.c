/* SPDX-License-Identifier: Apache-2.0 */
/* nccl_stand_in_run.c: carries out the stand-in's collectives when their streams reach them.
 *
 * A group first gives away copies of everything it sends, and then waits for what each of its calls needs,
 * in turn. So a broadcast's root, a reduce's other ranks and a sender are done at once, as NCCL's own
 * buffers allow. */
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
    if (c->kind == NSI_SEND || (c->kind == NSI_REDUCE && me != c->root))
        return true;
    if (c->kind == NSI_RECV || c->kind == NSI_BROADCAST)
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

static void all_reduce(const struct nsi_meeting *m, int n_ranks, const struct nsi_call *c)
{
    char *recv = stand_in_reach(c->recv);
    if (c->type == ncclFloat32 || c->type == ncclBfloat16) {
        reduce(m, n_ranks, c->comm->rank, 0, c->count, c->type, recv);
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

static void run_batch(void *arg)
{
    struct nsi_call *calls = arg;
    struct ncclComm *comm = calls->comm;
    if (nsi.machine.slow_us)
        usleep((useconds_t)nsi.machine.slow_us);
    nsi_lock();
    calls->has_run = true;
    comm->n_queued--;
    comm->n_running++;
    for (struct nsi_call *c = calls; c && !is_over(comm); c = c->next)
        give(meeting_of(c), c);
    nsi_wake();
    for (struct nsi_call *c = calls; c; c = c->next) {
        struct nsi_meeting *m = is_over(comm) ? NULL : meeting_of(c);
        while (!is_over(comm) && !is_served(m, c)) {
            /* The network tells its proxy thread; the kernel goes on waiting. */
            if (nsi_network_is_broken(comm->team, comm->rank))
                comm->async = ncclRemoteError;
            nsi_wait();
        }
        if (is_over(comm))
            break;
        take(m, c);
        leave(comm->team, m, comm->rank);
    }
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
    nsi_unlock();
    cudaGetDevice(&before);
    cudaSetDevice(comm->device);
    cudaError_t err = stand_in_put(calls->stream, "nccl", run_batch, calls, drop_batch);
    cudaSetDevice(before);
    nsi_lock();
    return err ? ncclUnhandledCudaError : ncclSuccess;
}
