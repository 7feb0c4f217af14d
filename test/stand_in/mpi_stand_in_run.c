/* SPDX-License-Identifier: Apache-2.0 */
/* mpi_stand_in_run.c: moves the stand-in's data between ranks. */
#include "test/stand_in/mpi_stand_in_inside.h"

#include <sched.h>
#include <stdlib.h>
#include <string.h>

enum { POISON = 0xa5 };

/* --- requests --- */

static uint64_t hash_of(const char *at, int64_t bytes)
{
    uint64_t h = 0, word;
    for (; bytes >= 8; at += 8, bytes -= 8) {
        memcpy(&word, at, 8);
        h = (h ^ word) * UINT64_C(0x100000001b3);
    }
    for (; bytes > 0; at++, bytes--)
        h = (h ^ (unsigned char)*at) * UINT64_C(0x100000001b3);
    return h;
}

static int take_slot(struct zr_mpi_world *w)
{
    int i = 0;
    while (i < w->high && w->request[i].pending)
        i++;
    if (i == w->high && i < ZR_MPI_SLOTS)
        w->high++;
    return i < ZR_MPI_SLOTS ? i : -1;
}

static bool check_size(const struct zr_mpi_world *w, const char *call, const struct msi_request *as)
{
    bool is_gather = as->kind == MSI_ALL_GATHER, in_units = as->bytes % 64 == 0 && as->stride % 64 == 0;
    if (as->bytes >= 0 && (as->bytes <= ZR_MPI_PIECE_BYTES || (is_gather && in_units)))
        return true;
    msi_misuse("rank %d: %s of %lld bytes", w->rank, call, (long long)as->bytes);
    return false;
}

static bool check(const struct zr_mpi_world *w, const char *call, const struct msi_request *as)
{
    bool has_comm = as->comm >= 0 && as->comm < ZR_MPI_COMMS && w->comm[as->comm].team;
    if (!has_comm)
        msi_misuse("rank %d: %s on a communicator that is not there", w->rank, call);
    else if (as->peer < 0 || as->peer >= w->comm[as->comm].team->n)
        msi_misuse("rank %d: %s with rank %d of a communicator of %d", w->rank, call, as->peer,
                   w->comm[as->comm].team->n);
    else if (as->tag < 0 || as->tag > ZR_MPI_TAG_MAX)
        msi_misuse("rank %d: %s with tag %d", w->rank, call, as->tag);
    else
        return check_size(w, call, as);
    return false;
}

/* Begins a call with its arguments. Returns false if it ends with *err; then the lock is not held. */
static bool begin(struct zr_mpi_world *w, const char *call, const struct msi_request *as, int32_t *slot,
                  int *err)
{
    *slot = -1;
    *err = msi_enter(w, call, false);
    if (*err)
        return false;
    if (!check(w, call, as)) {
        *err = msi_leave(w, MPI_STAND_IN_OTHER);
        return false;
    }
    *slot = take_slot(w);
    if (*slot < 0) {
        msi_leave(w, 0);
        return false;
    }
    w->request[*slot] = *as;
    w->request[*slot].pending = true;
    w->n_pending++;
    return true;
}

/* Remembers the hash of what it sends, which must not change until it ends. */
static void note_given(struct msi_request *q, const char *from, int64_t bytes)
{
    q->from = from;
    q->given_bytes = bytes;
    q->hash = hash_of(from, bytes);
}

static void poison(char *at, int64_t bytes)
{
    if (bytes > 0)
        memset(at, POISON, (size_t)bytes);
}

static bool has_died(const struct msi_team *k, int place)
{
    return msi.world[k->member[place]].died;
}

static bool has_any_died(const struct msi_team *k)
{
    for (int i = 0; i < k->n; i++)
        if (has_died(k, i))
            return true;
    return false;
}

/* --- messages --- */

/* Matches messages of one pair and tag in the order in which each end began them. */
static struct msi_message *message_of(struct msi_team *k, int from, int to, int tag, bool sends)
{
    struct msi_message **at = &k->messages;
    for (; *at; at = &(*at)->next) {
        struct msi_message *m = *at;
        if (m->from == from && m->to == to && m->tag == tag && (sends ? !m->is_sent : !m->is_received))
            return m;
    }
    *at = calloc(1, sizeof **at);
    **at = (struct msi_message){.from = from, .to = to, .tag = tag};
    return *at;
}

static void compare_sizes(const struct zr_mpi_world *w, struct msi_message *m)
{
    if (!m->is_sent || !m->is_received || m->bytes == m->room)
        return;
    msi_misuse("rank %d: a message of %lld bytes with tag %d is received as one of %lld", w->rank,
               (long long)m->bytes, m->tag, (long long)m->room);
    m->different = true;
}

int msi_send(struct zr_mpi_world *w, int32_t comm, const void *at, int64_t bytes, int to, int tag,
             int32_t *slot)
{
    struct msi_request as = {.kind = MSI_SEND, .comm = comm, .bytes = bytes, .peer = to, .tag = tag};
    int err;
    if (!begin(w, "send", &as, slot, &err))
        return err;
    struct msi_request *q = &w->request[*slot];
    const struct msi_comm *c = &w->comm[comm];
    struct msi_message *m = q->message = message_of(c->team, c->place, to, tag, true);
    note_given(q, at, bytes);
    m->is_sent = true;
    m->n_ends++;
    m->bytes = bytes;
    m->at = at;
    if (bytes <= msi.machine.short_bytes) {
        m->copy = malloc((size_t)bytes + 1);
        memcpy(m->copy, at, (size_t)bytes);
        m->at = m->copy;
    }
    compare_sizes(w, m);
    msi.counts.n_messages++;
    msi.counts.most_bytes = bytes > msi.counts.most_bytes ? bytes : msi.counts.most_bytes;
    return msi_leave(w, 0);
}

int msi_receive(struct zr_mpi_world *w, int32_t comm, void *at, int64_t bytes, int from, int tag,
                int32_t *slot)
{
    struct msi_request as = {
        .kind = MSI_RECEIVE, .comm = comm, .to = at, .bytes = bytes, .peer = from, .tag = tag};
    int err;
    if (!begin(w, "receive", &as, slot, &err))
        return err;
    const struct msi_comm *c = &w->comm[comm];
    struct msi_message *m = w->request[*slot].message = message_of(c->team, from, c->place, tag, false);
    m->is_received = true;
    m->n_ends++;
    m->room = bytes;
    poison(at, bytes);
    compare_sizes(w, m);
    return msi_leave(w, 0);
}

int msi_probe(struct zr_mpi_world *w, int32_t comm, int tag, int *from, int64_t *bytes)
{
    const struct msi_comm *c = &w->comm[comm];
    int err = msi_enter(w, "probe", false);
    *from = -1;
    *bytes = 0;
    if (err)
        return err;
    for (const struct msi_message *m = c->team->messages; m && *from < 0; m = m->next)
        if (m->to == c->place && m->tag == tag && m->is_sent && !m->is_received &&
            !has_died(c->team, m->from)) {
            *from = m->from;
            *bytes = m->bytes;
        }
    return msi_leave(w, 0);
}

static bool is_message_ready(const struct msi_team *k, const struct msi_request *q)
{
    const struct msi_message *m = q->message;
    if (m->different || has_died(k, m->from) || has_died(k, m->to))
        return false;
    return q->kind == MSI_SEND ? m->copy || m->is_taken : m->is_sent;
}

static void drop_message(struct msi_team *k, struct msi_message *m)
{
    struct msi_message **at = &k->messages;
    while (*at != m)
        at = &(*at)->next;
    *at = m->next;
    free(m->copy);
    free(m);
}

static void end_message(struct msi_team *k, struct msi_request *q)
{
    struct msi_message *m = q->message;
    if (q->kind == MSI_RECEIVE) {
        memcpy(q->to, m->at, (size_t)m->bytes);
        m->is_taken = true;
    }
    if (--m->n_ends == 0 && m->is_sent && m->is_received)
        drop_message(k, m);
}

/* --- collectives --- */

static struct msi_meeting *meeting_of(struct msi_team *k, uint64_t number, const struct msi_request *as)
{
    for (struct msi_meeting *m = k->meetings; m; m = m->next)
        if (m->number == number)
            return m;
    struct msi_meeting *m = calloc(1, sizeof *m);
    *m = (struct msi_meeting){
        .number = number, .kind = as->kind, .bytes = as->bytes, .root = as->peer, .next = k->meetings};
    k->meetings = m;
    return m;
}

static void compare(const struct zr_mpi_world *w, struct msi_meeting *m, const struct msi_request *as)
{
    if (m->kind == as->kind && m->bytes == as->bytes && m->root == as->peer)
        return;
    msi_misuse("rank %d: collective %llu is kind %d of %lld bytes with root %d, another rank's is kind %d of "
               "%lld with root %d",
               w->rank, (unsigned long long)m->number, as->kind, (long long)as->bytes, as->peer, m->kind,
               (long long)m->bytes, m->root);
    m->different = true;
}

/* Joins the collective described by as, and contributes from[bytes]. Returns what begin returns. */
static bool join(struct zr_mpi_world *w, const char *call, const struct msi_request *as, const char *from,
                 int64_t bytes, int32_t *slot, int *err)
{
    if (!begin(w, call, as, slot, err))
        return false;
    struct msi_request *q = &w->request[*slot];
    struct msi_comm *c = &w->comm[as->comm];
    struct msi_meeting *m = q->meeting = meeting_of(c->team, c->n_collectives++, as);
    note_given(q, from, bytes);
    m->given[c->place] = malloc((size_t)bytes + 1);
    if (bytes)
        memcpy(m->given[c->place], from, (size_t)bytes);
    m->here[c->place] = true;
    m->n_here++;
    compare(w, m, as);
    msi.counts.n_collectives++;
    return true;
}

int msi_all_gather(struct zr_mpi_world *w, int32_t comm, const void *own, void *to, int64_t bytes,
                   int64_t stride, int32_t *slot)
{
    struct msi_request as = {
        .kind = MSI_ALL_GATHER, .comm = comm, .to = to, .bytes = bytes, .stride = stride};
    int err, place = comm >= 0 && comm < ZR_MPI_COMMS ? w->comm[comm].place : 0;
    const char *from = own ? own : (char *)to + place * stride;
    if (!join(w, "all_gather", &as, from, bytes, slot, &err))
        return err;
    for (int i = 0; i < w->comm[comm].team->n; i++)
        if (i != place || own)
            poison((char *)to + i * stride, bytes);
    return msi_leave(w, 0);
}

int msi_broadcast(struct zr_mpi_world *w, int32_t comm, void *at, int64_t bytes, int root, int32_t *slot)
{
    struct msi_request as = {.kind = MSI_BROADCAST, .comm = comm, .to = at, .bytes = bytes, .peer = root};
    int err;
    bool gives = comm >= 0 && comm < ZR_MPI_COMMS && w->comm[comm].place == root;
    if (!join(w, "broadcast", &as, at, gives ? bytes : 0, slot, &err))
        return err;
    if (!gives)
        poison(at, bytes);
    return msi_leave(w, 0);
}

static int all_reduce(struct zr_mpi_world *w, const char *call, enum msi_kind kind, int32_t comm, void *at,
                      int n, int32_t *slot)
{
    int64_t bytes = (int64_t)n * 8;
    struct msi_request as = {.kind = kind, .comm = comm, .to = (char *)at, .bytes = bytes};
    int err;
    return join(w, call, &as, (char *)at, bytes, slot, &err) ? msi_leave(w, 0) : err;
}

int msi_all_max(struct zr_mpi_world *w, int32_t comm, int64_t *at, int n, int32_t *slot)
{
    return all_reduce(w, "all_max", MSI_ALL_MAX, comm, at, n, slot);
}

int msi_all_sum(struct zr_mpi_world *w, int32_t comm, uint64_t *at, int n, int32_t *slot)
{
    return all_reduce(w, "all_sum", MSI_ALL_SUM, comm, at, n, slot);
}

int msi_reduce_block(struct zr_mpi_world *w, int32_t comm, const float *in, float *out, int64_t n,
                     int32_t *slot)
{
    int64_t bytes = n * (int64_t)sizeof *in;
    struct msi_request as = {.kind = MSI_REDUCE_BLOCK, .comm = comm, .to = (char *)out, .bytes = bytes};
    int err;
    bool has_comm = comm >= 0 && comm < ZR_MPI_COMMS && w->comm[comm].team;
    int size = has_comm ? w->comm[comm].team->n : 0;
    if (!join(w, "reduce_block", &as, (const char *)in, bytes * size, slot, &err))
        return err;
    poison((char *)out, bytes);
    return msi_leave(w, 0);
}

static bool is_meeting_ready(const struct msi_team *k, int place, const struct msi_request *q)
{
    const struct msi_meeting *m = q->meeting;
    if (m->different || has_died(k, place))
        return false;
    if (m->kind == MSI_BROADCAST)
        return m->here[m->root] && !has_died(k, m->root);
    return m->n_here == k->n && !has_any_died(k);
}

static void reduce_words(const struct msi_meeting *m, int n_ranks, char *to)
{
    for (int64_t at = 0; at < m->bytes; at += 8) {
        uint64_t acc = m->kind == MSI_ALL_SUM ? 0 : (uint64_t)INT64_MIN, x;
        for (int i = 0; i < n_ranks; i++) {
            memcpy(&x, m->given[i] + at, 8);
            acc = m->kind == MSI_ALL_SUM ? acc + x : (int64_t)acc > (int64_t)x ? acc : x;
        }
        memcpy(to + at, &acc, 8);
    }
}

/* Adds along the ring that ends at this place. */
static void reduce_block(const struct msi_meeting *m, int n_ranks, int place, char *to)
{
    for (int64_t at = 0; at < m->bytes; at += 4) {
        float acc = 0, x;
        for (int i = 1; i <= n_ranks; i++) {
            memcpy(&x, m->given[(place + i) % n_ranks] + place * m->bytes + at, 4);
            acc = i == 1 ? x : acc + x;
        }
        memcpy(to + at, &acc, 4);
    }
}

static void take(const struct msi_meeting *m, const struct msi_team *k, int place, struct msi_request *q)
{
    switch (m->kind) {
    case MSI_ALL_GATHER:
        for (int i = 0; i < k->n; i++)
            if (m->bytes && (i != place || q->from != q->to + i * q->stride))
                memcpy(q->to + i * q->stride, m->given[i], (size_t)m->bytes);
        break;
    case MSI_BROADCAST:
        if (place != m->root && m->bytes)
            memcpy(q->to, m->given[m->root], (size_t)m->bytes);
        break;
    case MSI_REDUCE_BLOCK:
        reduce_block(m, k->n, place, q->to);
        break;
    default:
        reduce_words(m, k->n, q->to);
    }
}

static void drop_meeting(struct msi_team *k, struct msi_meeting *m)
{
    struct msi_meeting **at = &k->meetings;
    while (*at != m)
        at = &(*at)->next;
    *at = m->next;
    for (int i = 0; i < MSI_RANKS; i++)
        free(m->given[i]);
    free(m);
}

void msi_forget(struct msi_team *k)
{
    while (k->meetings)
        drop_meeting(k, k->meetings);
    while (k->messages)
        drop_message(k, k->messages);
}

/* --- the end of requests --- */

static bool is_ready(const struct zr_mpi_world *w, const struct msi_request *q)
{
    const struct msi_comm *c = &w->comm[q->comm];
    return q->message ? is_message_ready(c->team, q) : is_meeting_ready(c->team, c->place, q);
}

static void check_unchanged(const struct zr_mpi_world *w, const struct msi_request *q)
{
    if (q->from && hash_of(q->from, q->given_bytes) != q->hash)
        msi_misuse("rank %d: memory that is sent (kind %d, %lld bytes) changed before the request ended",
                   w->rank, q->kind, (long long)q->given_bytes);
}

static void end_request(struct zr_mpi_world *w, struct msi_request *q)
{
    const struct msi_comm *c = &w->comm[q->comm];
    check_unchanged(w, q);
    if (q->message) {
        end_message(c->team, q);
    } else {
        take(q->meeting, c->team, c->place, q);
        if (++q->meeting->n_left == c->team->n)
            drop_meeting(c->team, q->meeting);
    }
    q->pending = false;
    w->n_pending--;
}

/* Decides by a step of Splitmix64 which of the requests that could end do so now. */
static bool ends_now(struct zr_mpi_world *w)
{
    uint64_t z = w->random += UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    return (z >> 40 & 3) != 0;
}

int msi_poll(struct zr_mpi_world *w, struct zr_mpi_done done[ZR_MPI_SLOTS])
{
    int n = 0, err = msi_enter(w, "poll", false);
    if (err)
        return -err;
    err = msi_breaks_with(w);
    if (err)
        return msi_leave(w, -err);
    int high = w->high, first = high ? (int)(w->random >> 33) % high : 0;
    for (int i = 0; i < high; i++) {
        int slot = (first + i) % high;
        struct msi_request *q = &w->request[slot];
        if (!q->pending || !is_ready(w, q) || !ends_now(w))
            continue;
        end_request(w, q);
        done[n++] = (struct zr_mpi_done){slot, msi_ends_with(w)};
    }
    while (w->high > 0 && !w->request[w->high - 1].pending)
        w->high--;
    return msi_leave(w, n);
}

/* Waits until nothing else is in progress. */
static int until_done(struct zr_mpi_world *w)
{
    struct zr_mpi_done done[ZR_MPI_SLOTS];
    int n;
    while ((n = msi_poll(w, done)) == 0)
        sched_yield();
    return n < 0 ? -n : done[0].error;
}

int msi_own(struct zr_mpi_world *w, int32_t comm, enum zr_mpi_own_call which, const float *in, float *out,
            int64_t n)
{
    int64_t bytes = n * (int64_t)sizeof *out;
    int32_t slot;
    int err = which == ZR_MPI_ALLGATHER ? msi_all_gather(w, comm, NULL, out, bytes, bytes, &slot)
                                        : msi_reduce_block(w, comm, in, out, n, &slot);
    return err ? err : until_done(w);
}
