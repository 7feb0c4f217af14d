/* SPDX-License-Identifier: Apache-2.0 */
/* mpi_traffic.c: makes every call of a shim's table and checks the values. */
#include "test/comm/mpi/mpi_traffic.h"
#include "kernels/device.h"

#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST = 64, TAG = 1000, DEADLINE_S = 60 };

struct traffic {
    const struct zr_mpi_shim *shim;
    struct zr_mpi_world *w;
    int32_t comm;
    int place, size;
    bool under_way[ZR_MPI_SLOTS];
    int n_under_way;
    char *wrong;
    size_t n_wrong;
};

__attribute__((format(printf, 2, 3))) static bool say(struct traffic *t, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    int n = snprintf(t->wrong, t->n_wrong, "place %d of %d: ", t->place, t->size);
    if (n > 0 && (size_t)n < t->n_wrong)
        vsnprintf(t->wrong + n, t->n_wrong - (size_t)n, fmt, ap);
    va_end(ap);
    return false;
}

static bool ok(struct traffic *t, const char *what, int err)
{
    char text[512];
    if (!err)
        return true;
    t->shim->error(t->w, err, text, sizeof text);
    return say(t, "%s: %d: %s", what, err, text);
}

/* Records a request that was started. */
static bool begun(struct traffic *t, const char *what, int err, int32_t slot)
{
    if (!ok(t, what, err))
        return false;
    if (slot < 0 || slot >= ZR_MPI_SLOTS || t->under_way[slot])
        return say(t, "%s has slot %d, which is none or taken", what, slot);
    t->under_way[slot] = true;
    t->n_under_way++;
    return true;
}

/* Waits until all requests that were started have ended. */
static bool finish(struct traffic *t, const char *what)
{
    static _Thread_local struct zr_mpi_done done[ZR_MPI_SLOTS];
    int64_t until = zr_now_ns() + DEADLINE_S * INT64_C(1000000000);
    while (t->n_under_way) {
        int n = t->shim->poll(t->w, done);
        if (n < 0)
            return ok(t, what, -n);
        for (int i = 0; i < n; i++) {
            if (!t->under_way[done[i].slot])
                return say(t, "%s: slot %d ended, which was not taken", what, done[i].slot);
            t->under_way[done[i].slot] = false;
            t->n_under_way--;
            if (!ok(t, what, done[i].error))
                return false;
        }
        if (zr_now_ns() > until)
            return say(t, "%s: %d requests have not ended", what, t->n_under_way);
        if (n == 0)
            sched_yield();
    }
    return true;
}

/* Fills the k-th message from one rank to another. */
static void fill(char *at, int64_t bytes, int from, int to, int k)
{
    uint32_t word = (uint32_t)(from * 31 + to * 17 + k * 101);
    for (int64_t i = 0; i < bytes; i += 4, word = word * 1664525u + 1013904223u)
        memcpy(at + i, &word, bytes - i < 4 ? (size_t)(bytes - i) : 4);
}

static bool is_filled(struct traffic *t, const char *what, const char *at, int64_t bytes, int from, int to,
                      int k)
{
    char *expected = malloc((size_t)bytes + 1);
    fill(expected, bytes, from, to, k);
    bool same = memcmp(at, expected, (size_t)bytes) == 0;
    free(expected);
    return same || say(t, "%s: the %lld bytes from %d are wrong", what, (long long)bytes, from);
}

/* --- messages --- */

/* Two messages have the same size, so that their order shows. */
static const int64_t sizes[] = {0, 1, 1000, 1000, 70000, 70000, 300000};
enum { N_SIZES = sizeof sizes / sizeof *sizes };

static bool send_all(struct traffic *t, char *at[MOST][N_SIZES])
{
    for (int p = 0; p < t->size; p++)
        for (int k = 0; k < N_SIZES; k++) {
            int32_t slot;
            at[p][k] = malloc((size_t)sizes[k] + 1);
            fill(at[p][k], sizes[k], t->place, p, k);
            int err = t->shim->send(t->w, t->comm, at[p][k], sizes[k], p, TAG + (sizes[k] > 1), &slot);
            if (!begun(t, "send", err, slot))
                return false;
        }
    return true;
}

static bool receive_all(struct traffic *t, char *at[MOST][N_SIZES])
{
    for (int p = 0; p < t->size; p++)
        for (int k = 0; k < N_SIZES; k++) {
            int32_t slot;
            at[p][k] = calloc(1, (size_t)sizes[k] + 1);
            int err = t->shim->receive(t->w, t->comm, at[p][k], sizes[k], p, TAG + (sizes[k] > 1), &slot);
            if (!begun(t, "receive", err, slot))
                return false;
        }
    return true;
}

/* Sends between every pair of ranks, both ways, and from each rank to itself. */
static bool messages(struct traffic *t)
{
    char *out[MOST][N_SIZES] = {0}, *in[MOST][N_SIZES] = {0};
    bool well =
        t->place % 2 ? receive_all(t, in) && send_all(t, out) : send_all(t, out) && receive_all(t, in);
    well = well && finish(t, "messages");
    for (int p = 0; p < t->size; p++)
        for (int k = 0; k < N_SIZES; k++) {
            well = well && is_filled(t, "messages", in[p][k], sizes[k], p, t->place, k);
            free(out[p][k]);
            free(in[p][k]);
        }
    return well;
}

/* Starts as many requests as there are slots, and one more. */
static bool all_slots(struct traffic *t)
{
    static _Thread_local char in[ZR_MPI_SLOTS], out[ZR_MPI_SLOTS], none;
    int32_t slot;
    for (int i = 0; i < ZR_MPI_SLOTS / 2; i++) {
        out[i] = (char)i;
        int err = t->shim->receive(t->w, t->comm, &in[i], 1, (t->place + 1) % t->size, TAG, &slot);
        if (!begun(t, "receive", err, slot))
            return false;
        err = t->shim->send(t->w, t->comm, &out[i], 1, (t->place + t->size - 1) % t->size, TAG, &slot);
        if (!begun(t, "send", err, slot))
            return false;
    }
    int err = t->shim->receive(t->w, t->comm, &none, 1, t->place, TAG + 1, &slot);
    if (err || slot != -1)
        return say(t, "where no slot is free, receive returned %d and slot %d", err, slot);
    if (!finish(t, "all slots"))
        return false;
    for (int i = 0; i < ZR_MPI_SLOTS / 2; i++)
        if (in[i] != (char)i)
            return say(t, "message %d of many was overtaken", i);
    return true;
}

/* --- collectives --- */

static bool gather(struct traffic *t, int64_t bytes, int64_t stride, bool in_place)
{
    char *own = malloc((size_t)bytes + 1), *to = malloc((size_t)(stride * t->size) + 1);
    int32_t slot;
    memset(to, 0x77, (size_t)(stride * t->size));
    fill(in_place ? to + t->place * stride : own, bytes, t->place, 0, 9);
    int err = t->shim->all_gather(t->w, t->comm, in_place ? NULL : own, to, bytes, stride, &slot);
    bool well = begun(t, "all_gather", err, slot) && finish(t, "all_gather");
    for (int p = 0; p < t->size && well; p++) {
        well = is_filled(t, "all_gather", to + p * stride, bytes, p, 0, 9);
        for (int64_t i = bytes; i < stride && well; i++)
            if (to[p * stride + i] != 0x77)
                well = say(t, "all_gather wrote between slices");
    }
    free(own);
    free(to);
    return well;
}

static bool gathers(struct traffic *t)
{
    static const int64_t shapes[][2] = {{1, 1},     {72, 72},           {72, 100},
                                        {128, 192}, {1 << 16, 1 << 16}, {(1 << 16) - 64, 1 << 16}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        if (!gather(t, shapes[i][0], shapes[i][1], false) || !gather(t, shapes[i][0], shapes[i][1], true))
            return false;
    return true;
}

static bool broadcasts(struct traffic *t)
{
    enum { N = 5000 };
    char *at[MOST] = {0};
    bool well = true;
    for (int root = 0; root < t->size && well; root++) { /* all at once */
        int32_t slot;
        at[root] = calloc(1, N);
        if (t->place == root)
            fill(at[root], N, root, 0, 3);
        int err = t->shim->broadcast(t->w, t->comm, at[root], N, root, &slot);
        well = begun(t, "broadcast", err, slot);
    }
    well = well && finish(t, "broadcasts");
    for (int root = 0; root < t->size; root++) {
        well = well && is_filled(t, "broadcast", at[root], N, root, 0, 3);
        free(at[root]);
    }
    return well;
}

static bool words(struct traffic *t)
{
    uint64_t me = (uint64_t)t->place, last = (uint64_t)t->size - 1;
    /* Numbers of both signs, the smallest numbers, and a number of one rank only. */
    int64_t most[3] = {me % 2 ? (int64_t)me : -(int64_t)me, INT64_MIN + (int64_t)me, me ? -1 : INT64_MAX};
    uint64_t sum[2] = {me, UINT64_C(0) - 1 - me}, n = last + 1;
    int32_t slot;
    int err = t->shim->all_max(t->w, t->comm, most, 3, &slot);
    if (!begun(t, "all_max", err, slot))
        return false;
    err = t->shim->all_sum(t->w, t->comm, sum, 2, &slot);
    if (!begun(t, "all_sum", err, slot) || !finish(t, "all_max and all_sum"))
        return false;
    int64_t largest_odd = (int64_t)(last % 2 ? last : last ? last - 1 : 0);
    if (most[0] != largest_odd || most[1] != INT64_MIN + (int64_t)last || most[2] != INT64_MAX)
        return say(t, "all_max is %llx %llx %llx", (unsigned long long)most[0], (unsigned long long)most[1],
                   (unsigned long long)most[2]);
    if (sum[0] != n * last / 2 || sum[1] != UINT64_C(0) - n - n * last / 2)
        return say(t, "all_sum is %llx %llx", (unsigned long long)sum[0], (unsigned long long)sum[1]);
    return true;
}

typedef bool reduction_fn(struct traffic *t, const float *in, float *out, int64_t n);

static bool begin_reduction(struct traffic *t, const float *in, float *out, int64_t n)
{
    int32_t slot;
    int err = t->shim->reduce_block(t->w, t->comm, in, out, n, &slot);
    return begun(t, "reduce_block", err, slot) && finish(t, "reduce_block");
}

static bool own_block(struct traffic *t, const float *in, float *out, int64_t n)
{
    return ok(t, "own", t->shim->own(t->w, t->comm, ZR_MPI_REDUCE_SCATTER_BLOCK, in, out, n));
}

static bool own_scatter(struct traffic *t, const float *in, float *out, int64_t n)
{
    return ok(t, "own", t->shim->own(t->w, t->comm, ZR_MPI_REDUCE_SCATTER, in, out, n));
}

static bool reduction(struct traffic *t, const char *call, reduction_fn *fn)
{
    enum { N = 3000 };
    float *in = malloc(sizeof *in * N * (size_t)t->size), out[N];
    for (int i = 0; i < N * t->size; i++)
        in[i] = (float)(i % 97 + t->place); /* sums are exact in any order */
    bool well = fn(t, in, out, N);
    for (int i = 0; i < N && well; i++)
        if (out[i] != (float)((t->place * N + i) % 97 * t->size + t->size * (t->size - 1) / 2))
            well = say(t, "%s: element %d is %g", call, i, (double)out[i]);
    free(in);
    return well;
}

static bool own_gather(struct traffic *t)
{
    enum { N = 1000 };
    float *to = malloc(sizeof *to * N * (size_t)t->size);
    bool well = true;
    for (int i = 0; i < N * t->size; i++)
        to[i] = i / N == t->place ? (float)i : -1;
    if (!ok(t, "MPI_Allgather", t->shim->own(t->w, t->comm, ZR_MPI_ALLGATHER, NULL, to, N)))
        well = false;
    for (int i = 0; i < N * t->size && well; i++)
        if (to[i] != (float)i)
            well = say(t, "MPI_Allgather: element %d is %g", i, (double)to[i]);
    free(to);
    return well;
}

static bool everything(struct traffic *t)
{
    return messages(t) && all_slots(t) && gathers(t) && broadcasts(t) && words(t) &&
           reduction(t, "reduce_block", begin_reduction) &&
           reduction(t, "MPI_Reduce_scatter_block", own_block) &&
           reduction(t, "MPI_Reduce_scatter", own_scatter) && own_gather(t);
}

/* --- communicators --- */

static bool on(struct traffic *t, int32_t comm, int place, int size, const char *what)
{
    int32_t was = t->comm;
    t->comm = comm;
    t->place = place;
    t->size = size;
    char text[400];
    bool well = everything(t) && ok(t, "free", t->shim->free(t->w, comm));
    snprintf(text, sizeof text, "%.399s", t->wrong);
    if (!well)
        snprintf(t->wrong, t->n_wrong, "%s: %s", what, text);
    t->comm = was;
    return well;
}

/* Each rank sends to the next one, which probes for the message before it receives it. */
static bool borrowed(struct traffic *t, void *user_comm, int rank)
{
    int next = (rank + 1) % t->size, before = (rank + t->size - 1) % t->size, from = -1;
    int64_t until = zr_now_ns() + DEADLINE_S * INT64_C(1000000000), bytes;
    int32_t comm, again, slot;
    char out[64], in[64];
    t->place = rank;
    if (!ok(t, "borrow", t->shim->borrow(t->w, user_comm, &comm)) ||
        !ok(t, "borrow", t->shim->borrow(t->w, user_comm, &again)))
        return false;
    if (comm != again)
        return say(t, "a communicator is borrowed as %d and as %d", comm, again);
    fill(out, sizeof out, rank, next, 0);
    int err = t->shim->send(t->w, comm, out, sizeof out, next, ZR_MPI_TAG_MAX, &slot);
    if (!begun(t, "send", err, slot) || !ok(t, "probe", t->shim->probe(t->w, comm, TAG, &from, &bytes)))
        return false;
    if (from != -1)
        return say(t, "probe has a message of %d with a tag that nobody sends", from);
    while (from < 0 && zr_now_ns() < until)
        if (!ok(t, "probe", t->shim->probe(t->w, comm, ZR_MPI_TAG_MAX, &from, &bytes)))
            return false;
    if (from != before || bytes != sizeof in)
        return say(t, "probe has a message of %lld bytes of %d, not of %d", (long long)bytes, from, before);
    err = t->shim->receive(t->w, comm, in, sizeof in, from, ZR_MPI_TAG_MAX, &slot);
    return begun(t, "receive", err, slot) && finish(t, "borrowed") &&
           is_filled(t, "borrowed", in, sizeof in, before, rank, 0) &&
           ok(t, "free", t->shim->free(t->w, comm)) && ok(t, "free", t->shim->free(t->w, comm));
}

bool mpi_traffic(const struct zr_mpi_shim *shim, struct zr_mpi_world *w, void *user_comm, char *wrong,
                 size_t n)
{
    struct traffic t = {.shim = shim, .w = w, .wrong = wrong, .n_wrong = n};
    int32_t member[MOST], all, part = -1, twin;
    int rank;
    wrong[0] = 0;
    if (!ok(&t, "rank_of", shim->rank_of(w, user_comm, &rank, &t.size)))
        return false;
    if (rank < 0 || rank >= t.size || t.size > MOST)
        return say(&t, "rank %d", rank);
    if (!borrowed(&t, user_comm, rank))
        return false;
    int size = t.size, place = size - 1 - rank;
    for (int i = 0; i < size; i++)
        member[i] = size - 1 - i;
    t.place = place;
    if (!ok(&t, "make", shim->make(w, user_comm, member, size, 7, &all)) ||
        !ok(&t, "copy", shim->copy(w, all, &twin)))
        return false;
    for (int i = 0; 2 * i < size; i++)
        member[i] = 2 * i;
    /* The other ranks make no communicator meanwhile. */
    if (place % 2 == 0 && !ok(&t, "make_from", shim->make_from(w, all, member, (size + 1) / 2, 8, &part)))
        return false;
    if (all == twin || all == part || twin == part)
        return say(&t, "communicators %d, %d and %d", all, twin, part);
    return (part < 0 || on(&t, part, place / 2, (size + 1) / 2, "every second")) &&
           on(&t, all, place, size, "all, the last first") && on(&t, twin, place, size, "a copy of that");
}
