/* SPDX-License-Identifier: Apache-2.0 */
/* pipeline_ties.c: handles tensors that the first and the last stage share. It computes how many
 * micro-batches' gradients may be in flight from the last stage to the first, whose backward needs them. Then
 * it places these messages among the others. */
#include "kernels/error.h"
#include "shard/pipeline/pipeline.h"

#include <stdlib.h>
#include <string.h>

static bool are_apart(const struct zr_pipeline *p)
{
    for (int32_t r = 0; r < p->n_ranks; r++)
        for (int64_t i = 0; i < p->rows[r].n; i++)
            if (p->rows[r].at[i].kind == ZR_PIPE_BACKWARD_WEIGHT)
                return true;
    return false;
}

/* ---- can all ranks finish? ---- */

/* Runs the schedule without time. A rank continues as long as it has its input and a free slot for its
 * output. */
struct trial {
    const struct zr_pipeline *p;
    int32_t n_onward, n_back;
    /* (n_ranks) Index of each rank's next action. */
    int64_t *at;
    /* (4, n_stages, n_micro_batches) Whether the stage has sent or received the message. */
    bool *met;
    /* Micro-batches whose weight gradients the first and the last stage have. */
    int32_t n_first, n_last;
    /* Gradients that may be in flight. */
    int32_t most;
};

static bool *met(const struct trial *t, enum zr_pipe_kind message, int32_t stage, int32_t micro_batch)
{
    int64_t kind = message - ZR_PIPE_SEND_F;
    return &t->met[(kind * t->p->n_stages + stage) * t->p->n_micro_batches + micro_batch];
}

/* Stages of one rank need no message. */
static bool is_met(const struct trial *t, enum zr_pipe_kind message, int32_t stage, int32_t micro_batch)
{
    return stage < 0 || stage >= t->p->n_stages || t->p->n_ranks == 1 || micro_batch < 0 ||
           *met(t, message, stage, micro_batch);
}

static bool may_go(const struct trial *t, const struct zr_pipe_action *a)
{
    int32_t s = a->stage, m = a->micro_batch;
    bool well = true;
    if (a->kind == ZR_PIPE_FORWARD)
        well = is_met(t, ZR_PIPE_SEND_F, s - 1, m) && is_met(t, ZR_PIPE_RECV_F, s + 1, m - t->n_onward);
    if (a->kind == ZR_PIPE_BACKWARD || a->kind == ZR_PIPE_BACKWARD_INPUT)
        well = is_met(t, ZR_PIPE_SEND_B, s + 1, m) && is_met(t, ZR_PIPE_RECV_B, s - 1, m - t->n_back);
    if (!zr_pipe_gives_weights(a->kind))
        return well;
    return well && (s > 0 || t->n_last > m) && (s < t->p->n_stages - 1 || t->n_first + t->most > m);
}

static void go(struct trial *t, const struct zr_pipe_action *a)
{
    if (zr_pipe_sends(a->kind) || zr_pipe_receives(a->kind))
        *met(t, a->kind, a->stage, a->micro_batch) = true;
    t->n_first += zr_pipe_gives_weights(a->kind) && a->stage == 0;
    t->n_last += zr_pipe_gives_weights(a->kind) && a->stage == t->p->n_stages - 1;
}

static bool come_through(struct trial *t)
{
    for (bool any = true; any;) {
        any = false;
        for (int32_t r = 0; r < t->p->n_ranks; r++)
            for (; t->at[r] < t->p->rows[r].n && may_go(t, &t->p->rows[r].at[t->at[r]]);
                 t->at[r]++, any = true)
                go(t, &t->p->rows[r].at[t->at[r]]);
    }
    bool all = true;
    for (int32_t r = 0; r < t->p->n_ranks; r++)
        all &= t->at[r] == t->p->rows[r].n;
    return all;
}

/* Whether all ranks can finish with so many slots. -1: no memory. */
static int try_with(const struct zr_pipeline *p, int32_t slots)
{
    struct trial t = {.p = p,
                      .at = calloc((size_t)p->n_ranks, sizeof *t.at),
                      .met = calloc(4 * (size_t)p->n_stages * (size_t)p->n_micro_batches, sizeof *t.met),
                      .most = 2 * slots};
    bool room = t.at && t.met && zr_pipeline_slots(p, &t.n_onward, &t.n_back) == 0;
    int through = room ? come_through(&t) : -1;
    free(t.at);
    free(t.met);
    return through;
}

/* ---- number of slots ---- */

/* The times of a stage's backward of each micro-batch on the virtual clock. */
static void list_backwards(const struct zr_pipeline *p, struct zr_pipe_time *const *times, int32_t stage,
                           struct zr_pipe_time *out)
{
    const struct zr_pipe_row *row = &p->rows[stage % p->n_ranks];
    const struct zr_pipe_time *at = times[stage % p->n_ranks];
    for (int64_t i = 0; i < row->n; i++) {
        if (row->at[i].kind == ZR_PIPE_BACKWARD && row->at[i].stage == stage)
            out[row->at[i].micro_batch] = *at;
        at += zr_pipe_computes(row->at[i].kind);
    }
}

/* The number of slots with which no rank waits on the virtual clock. */
static int32_t that_nobody_waits(const struct zr_pipeline *p, const struct zr_pipe_report *report)
{
    int32_t n = p->n_micro_batches, apart = 1;
    struct zr_pipe_time *first = malloc(2 * (size_t)n * sizeof *first), *last = first + n;
    if (!first) /* no memory: the largest number that is ever needed */
        return n;
    list_backwards(p, report->times, 0, first);
    list_backwards(p, report->times, p->n_stages - 1, last);
    for (int32_t m = 0; m < n; m++)
        while (m >= apart && first[m - apart].end_ns > last[m].start_ns)
            apart++;
    free(first);
    return (apart + 1) / 2;
}

/* With slots on both sides, the last stage's backward waits for the first stage's backward of 2 * slots
 * micro-batches before.
 *
 *   - One stage per rank: the first stage is as many micro-batches behind as there are stages. With other
 *     schedules it may be more. The last rank then waits, but nothing waits for it.
 *   - Several stages per rank: the last rank's other stages wait, too, and the first rank may wait for
 *     them. So the number is chosen such that no rank waits on the virtual clock. Then the other actions
 *     have no cycle with these waits either.
 *   - Split backward: the first stage's weight gradients may even be scheduled before the last stage's,
 *     which they need. A trial run shows whether some rank would then wait
 *     forever. */
int32_t zr_pipeline_tied_slots(const struct zr_pipeline *p, const struct zr_pipe_report *report)
{
    int32_t n = p->n_micro_batches, least = (p->n_ranks + 1) / 2 < n ? (p->n_ranks + 1) / 2 : n;
    if (are_apart(p)) {
        for (int32_t slots = least; slots < n; slots *= 2)
            if (try_with(p, slots) != 0)
                return slots;
        return try_with(p, n) != 0 ? n : 0;
    }
    return p->n_stages <= p->n_ranks || p->n_ranks == 1 ? least : that_nobody_waits(p, report);
}

/* ---- places of the messages ---- */

/* Runs the schedule with messages for which both ranks wait, action by action on all ranks. A tied message
 * moves as soon as it can, and its places in both rows are where the two ranks are at that moment. So there
 * is one order of all messages. */
struct placing {
    struct zr_pipeline *p;
    int32_t owner, copy, slots;
    /* (n_ranks) Index of each rank's next action. */
    int64_t *at;
    /* Micro-batches whose weight gradients the first and the last stage have, and whose message has moved. */
    int32_t n_first, n_last, n_moved;
    /* (n_micro_batches) Index of the action that follows the message, on both ranks. */
    int64_t *owner_at, *copy_at;
};

static void move_ties(struct placing *t)
{
    for (int32_t m; (m = t->n_moved) < t->p->n_micro_batches && t->n_last > m && t->n_first + t->slots > m;
         t->n_moved++) {
        t->owner_at[m] = t->at[t->owner];
        t->copy_at[m] = t->at[t->copy];
    }
}

static const struct zr_pipe_action *next_of(const struct placing *t, int32_t rank)
{
    const struct zr_pipe_row *row = &t->p->rows[rank];
    return t->at[rank] < row->n ? &row->at[t->at[rank]] : NULL;
}

/* A gradient of the first stage waits for its message. One of the last stage waits for the message before it
 * that used its slot. */
static bool compute(struct placing *t, int32_t rank, const struct zr_pipe_action *a)
{
    bool gives = zr_pipe_gives_weights(a->kind), first = gives && a->stage == 0,
         last = gives && a->stage == t->p->n_stages - 1;
    if ((first && t->n_moved <= a->micro_batch) || (last && t->n_moved + t->slots <= a->micro_batch))
        return false;
    t->at[rank]++;
    t->n_first += first;
    t->n_last += last;
    move_ties(t);
    return true;
}

/* Moves the rank's next message, if the other rank has come to it. */
static bool meet(struct placing *t, int32_t rank, const struct zr_pipe_action *a)
{
    bool to_next = a->kind == ZR_PIPE_SEND_F || a->kind == ZR_PIPE_RECV_B;
    enum zr_pipe_kind other = a->kind == ZR_PIPE_SEND_F   ? ZR_PIPE_RECV_F
                              : a->kind == ZR_PIPE_RECV_F ? ZR_PIPE_SEND_F
                              : a->kind == ZR_PIPE_SEND_B ? ZR_PIPE_RECV_B
                                                          : ZR_PIPE_SEND_B;
    int32_t stage = a->stage + (to_next ? 1 : -1), peer = stage % t->p->n_ranks;
    const struct zr_pipe_action *of_peer = next_of(t, peer);
    if (!of_peer || of_peer->kind != other || of_peer->stage != stage ||
        of_peer->micro_batch != a->micro_batch)
        return false;
    t->at[rank]++;
    t->at[peer]++;
    return true;
}

/* Takes a rank up to its next computation, and through that. Returns whether it has moved. */
static bool advance(struct placing *t, int32_t rank)
{
    const struct zr_pipe_action *a;
    bool any = false;
    for (; (a = next_of(t, rank)) && !zr_pipe_computes(a->kind); any = true) {
        if (!zr_pipe_sends(a->kind) && !zr_pipe_receives(a->kind))
            t->at[rank]++;
        else if (!meet(t, rank, a))
            return any;
    }
    return (a && compute(t, rank, a)) || any;
}

/* Moves the last stage's next weight gradients before whatever its rank is waiting for, if the backward of
 * inputs before them is over. Without tied tensors a schedule may have them later, because the first stage
 * needs nothing of them. */
static bool move_forward(struct placing *t)
{
    const struct zr_pipe_row *row = &t->p->rows[t->copy];
    struct zr_pipe_action *first = &row->at[t->at[t->copy]], *end = row->at + row->n, *a = first;
    const int32_t stage = t->p->n_stages - 1;
    while (a < end && !(a->stage == stage && (a->kind == ZR_PIPE_UNSHARD ||
                                              (zr_pipe_computes(a->kind) && a->micro_batch == t->n_last))))
        a++;
    if (a == first || a == end || a->kind != ZR_PIPE_BACKWARD_WEIGHT)
        return false;
    const struct zr_pipe_action weights = *a;
    memmove(first + 1, first, (size_t)(a - first) * sizeof *first);
    *first = weights;
    return true;
}

static bool place(struct placing *t)
{
    t->n_first = t->n_last = t->n_moved = 0;
    for (int32_t r = 0; r < t->p->n_ranks; r++)
        t->at[r] = 0;
    for (bool any = true; any;) {
        any = false;
        for (int32_t r = 0; r < t->p->n_ranks; r++)
            any |= advance(t, r);
        if (!any)
            any = move_forward(t);
    }
    bool all = t->n_moved == t->p->n_micro_batches;
    for (int32_t r = 0; r < t->p->n_ranks; r++)
        all &= !next_of(t, r);
    return all;
}

/* Inserts the messages into a row. */
static int insert(struct zr_pipe_row *row, const int64_t *at, int32_t n, int32_t stage)
{
    struct zr_pipe_action *longer = malloc((size_t)(row->n + n) * sizeof *longer);
    int64_t to = 0;
    int32_t m = 0;
    if (!longer)
        return zr_fail(ZERO_ERR_NOMEM, "no memory for the messages of %d micro-batches", n);
    for (int64_t i = 0; i <= row->n; i++) {
        for (; m < n && at[m] == i; m++)
            longer[to++] = (struct zr_pipe_action){.kind = ZR_PIPE_TIE, .stage = stage, .micro_batch = m};
        if (i < row->n)
            longer[to++] = row->at[i];
    }
    free(row->at);
    *row = (struct zr_pipe_row){.at = longer, .n = to, .capacity = to};
    return 0;
}

/* Tries more and more slots, each time with the rows as they were. Returns whether all ranks can finish. */
static bool place_with_enough(struct placing *t, const struct zr_pipe_action *owner_row,
                              const struct zr_pipe_action *copy_row)
{
    const struct zr_pipe_row *owner = &t->p->rows[t->owner], *copy = &t->p->rows[t->copy];
    const int32_t most = t->p->n_micro_batches;
    bool placed = place(t);
    while (!placed && t->slots < most) {
        t->slots = 2 * t->slots < most ? 2 * t->slots : most;
        memcpy(owner->at, owner_row, (size_t)owner->n * sizeof *owner->at);
        memcpy(copy->at, copy_row, (size_t)copy->n * sizeof *copy->at);
        placed = place(t);
    }
    return placed;
}

int zr_pipeline_place_ties(struct zr_pipeline *p, int32_t *slots)
{
    const int32_t n = p->n_micro_batches;
    if (p->n_ranks == 1 || !*slots)
        return 0;
    struct placing t = {.p = p, .copy = (p->n_stages - 1) % p->n_ranks, .slots = *slots};
    struct zr_pipe_row *owner = &p->rows[t.owner], *copy = &p->rows[t.copy];
    struct zr_pipe_action *saved = malloc((size_t)(owner->n + copy->n) * sizeof *saved);
    t.at = malloc(((size_t)p->n_ranks + 2 * (size_t)n) * sizeof *t.at);
    if (!t.at || !saved) {
        free(t.at);
        free(saved);
        return zr_fail(ZERO_ERR_NOMEM, "no memory to place the messages of %d micro-batches", n);
    }
    t.owner_at = t.at + p->n_ranks;
    t.copy_at = t.owner_at + n;
    memcpy(saved, owner->at, (size_t)owner->n * sizeof *saved);
    memcpy(saved + owner->n, copy->at, (size_t)copy->n * sizeof *saved);
    bool placed = place_with_enough(&t, saved, saved + owner->n);
    *slots = placed ? t.slots : 0;
    int err = placed ? insert(owner, t.owner_at, n, 0) : 0;
    if (placed && !err)
        err = insert(copy, t.copy_at, n, p->n_stages - 1);
    free(t.at);
    free(saved);
    return err;
}
