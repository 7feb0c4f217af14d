/* SPDX-License-Identifier: Apache-2.0 */
/* pipeline_check.c: checks a pipeline schedule before it runs, in three passes:
 *
 *   1. Along each row: every action occurs once, after what it needs on its own rank.
 *   2. On a virtual clock: computations wait for those of other ranks; messages wait for nothing.
 *   3. Through messages: each send waits for its receiver, as with transports that do not buffer. */
#include "kernels/error.h"
#include "shard/pipeline/pipeline.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Completed work of a stage on a micro-batch. */
enum {
    DONE_F = 1,
    DONE_I = 2, /* gradient of the input, by B or I */
    DONE_W = 4, /* gradients of the weights, by B or W */
    SENT_F = 8,
    RECEIVED_F = 16,
    SENT_B = 32,
    RECEIVED_B = 64,
};

struct stage {
    int32_t rank;
    /* Gathered at this point of the row; its gradients were reduced. */
    bool whole, reduced;
    /* Micro-batches with weight gradients so far, and the last one. */
    int32_t n_done, last;
};

struct checking {
    const struct zr_pipeline *p;
    const struct zr_pipe_cost *cost;
    struct zr_pipe_report *report;
    /* (n_stages) and (n_stages, n_micro_batches). */
    struct stage *stages;
    uint8_t *done;
    bool has_backward, has_unshard, has_reduce;
    /* (n_ranks) The next action of each row, and the time at which the rank is free. */
    int64_t *at, *free_ns;
    /* (n_ranks) Ranks to look at, as a ring, and whether each is in it. */
    int32_t *queue;
    bool *queued;
    int32_t n_queued, first;
    /* (n_stages, n_micro_batches) The end of the computation. -1: not yet. */
    int64_t *f_end, *b_end;
};

static uint8_t *done_of(const struct checking *c, int32_t stage, int32_t micro_batch)
{
    return &c->done[(int64_t)stage * c->p->n_micro_batches + micro_batch];
}

static bool is_last(const struct checking *c, int32_t stage)
{
    return stage == c->p->n_stages - 1;
}

/* Whether stage + by exists and is on another rank, so that a message is needed. */
static bool moves(const struct checking *c, int32_t stage, int32_t by)
{
    int32_t other = stage + by;
    return other >= 0 && other < c->p->n_stages && c->stages[other].rank != c->stages[stage].rank;
}

/* ---- along a row ---- */

static int late(int32_t rank, struct zr_pipe_action a, struct zr_pipe_action needed)
{
    char text[ZR_PIPE_TEXT], other[ZR_PIPE_TEXT];
    return zr_fail(ZERO_ERR_ARG, "rank %d: %s comes before %s, which it needs", rank, zr_pipe_text(a, text),
                   zr_pipe_text(needed, other));
}

static int twice(int32_t rank, struct zr_pipe_action a)
{
    char text[ZR_PIPE_TEXT];
    return zr_fail(ZERO_ERR_ARG, "rank %d: %s is there twice, or an earlier action has already done it", rank,
                   zr_pipe_text(a, text));
}

struct rule {
    /* Bits that must be clear before the action; bits that must be set; bits that it sets. */
    uint8_t not_yet, needed, done;
    /* The name of the needed action in a message. */
    enum zr_pipe_kind needed_kind;
    /* For messages, the direction of the other stage: 1 next, -1 previous. 0: no message. */
    int32_t towards;
};

static const struct rule rules[] = {
    [ZR_PIPE_FORWARD] = {DONE_F, 0, DONE_F, ZR_PIPE_RECV_F, 0},
    [ZR_PIPE_BACKWARD] = {DONE_I | DONE_W, DONE_F, DONE_I | DONE_W, ZR_PIPE_FORWARD, 0},
    [ZR_PIPE_BACKWARD_INPUT] = {DONE_I, DONE_F, DONE_I, ZR_PIPE_FORWARD, 0},
    [ZR_PIPE_BACKWARD_WEIGHT] = {DONE_W, DONE_I, DONE_W, ZR_PIPE_BACKWARD_INPUT, 0},
    [ZR_PIPE_SEND_F] = {SENT_F, DONE_F, SENT_F, ZR_PIPE_FORWARD, 1},
    [ZR_PIPE_RECV_F] = {RECEIVED_F, 0, RECEIVED_F, ZR_PIPE_RECV_F, -1},
    [ZR_PIPE_SEND_B] = {SENT_B, DONE_I, SENT_B, ZR_PIPE_BACKWARD, -1},
    [ZR_PIPE_RECV_B] = {RECEIVED_B, 0, RECEIVED_B, ZR_PIPE_RECV_B, 1},
};

/* Checks that a computation has received its input. */
static int check_received(const struct checking *c, int32_t rank, struct zr_pipe_action a)
{
    const bool forward = a.kind == ZR_PIPE_FORWARD;
    struct zr_pipe_action message = a;
    message.kind = forward ? ZR_PIPE_RECV_F : ZR_PIPE_RECV_B;
    if (!c->p->has_messages || a.kind == ZR_PIPE_BACKWARD_WEIGHT || !moves(c, a.stage, forward ? -1 : 1))
        return 0;
    return *done_of(c, a.stage, a.micro_batch) & (forward ? RECEIVED_F : RECEIVED_B) ? 0
                                                                                     : late(rank, a, message);
}

static int check_computed(const struct checking *c, int32_t rank, struct zr_pipe_action a)
{
    struct stage *s = &c->stages[a.stage];
    char text[ZR_PIPE_TEXT];
    if (c->has_unshard && !s->whole)
        return zr_fail(ZERO_ERR_ARG, "rank %d: %s is computed while stage %d is not gathered", rank,
                       zr_pipe_text(a, text), a.stage);
    if (a.kind != ZR_PIPE_FORWARD && s->reduced)
        return zr_fail(ZERO_ERR_ARG, "rank %d: %s comes after %dREDUCE_GRAD: its gradient would be lost",
                       rank, zr_pipe_text(a, text), a.stage);
    if (zr_pipe_gives_weights(a.kind)) {
        c->report->in_order &= a.micro_batch > s->last;
        s->last = a.micro_batch;
        s->n_done++;
    }
    return check_received(c, rank, a);
}

static int check_of_micro_batch(const struct checking *c, int32_t rank, struct zr_pipe_action a)
{
    const struct rule *rule = &rules[a.kind];
    uint8_t *done = done_of(c, a.stage, a.micro_batch);
    char text[ZR_PIPE_TEXT];
    if (rule->towards && !moves(c, a.stage, rule->towards))
        return zr_fail(ZERO_ERR_ARG, "rank %d: %s has no peer: there is no such stage, or it is on this rank",
                       rank, zr_pipe_text(a, text));
    if (*done & rule->not_yet)
        return twice(rank, a);
    struct zr_pipe_action needed = a;
    needed.kind = rule->needed_kind;
    if ((*done & rule->needed) != rule->needed)
        return late(rank, a, needed);
    int err = zr_pipe_computes(a.kind) ? check_computed(c, rank, a) : 0;
    *done |= rule->done;
    return err;
}

static int check_of_stage(const struct checking *c, int32_t rank, struct zr_pipe_action a)
{
    struct stage *s = &c->stages[a.stage];
    if (s->rank != rank)
        return zr_fail(ZERO_ERR_ARG, "rank %d: stage %d, which it gathers or reduces, is rank %d's", rank,
                       a.stage, s->rank);
    if (a.kind == ZR_PIPE_REDUCE_GRAD) {
        if (s->reduced)
            return twice(rank, a);
        s->reduced = true;
        return s->n_done == c->p->n_micro_batches
                   ? 0
                   : zr_fail(ZERO_ERR_ARG, "rank %d: %dREDUCE_GRAD comes before %d of its %d micro-batches",
                             rank, a.stage, c->p->n_micro_batches - s->n_done, c->p->n_micro_batches);
    }
    if (s->whole == (a.kind == ZR_PIPE_UNSHARD))
        return zr_fail(ZERO_ERR_ARG, "rank %d: stage %d is %s gathered when it is to be %s", rank, a.stage,
                       s->whole ? "already" : "not", s->whole ? "gathered" : "freed");
    s->whole = !s->whole;
    return 0;
}

/* Activations, their bytes, and gathered stages at a point of the row. */
struct load {
    int64_t activations, bytes, whole;
};

static void count(const struct checking *c, struct zr_pipe_rank *rank, struct load *l,
                  struct zr_pipe_action a)
{
    int64_t bytes = c->cost->activation_bytes * (c->cost->units ? c->cost->units[a.stage] : 1);
    bool begins = a.kind == ZR_PIPE_FORWARD;
    bool ends = c->has_backward ? zr_pipe_gives_weights(a.kind) : begins;
    l->activations += begins;
    l->bytes += begins ? bytes : 0;
    l->whole += a.kind == ZR_PIPE_UNSHARD;
    rank->peak_activations =
        l->activations > rank->peak_activations ? l->activations : rank->peak_activations;
    rank->peak_bytes = l->bytes > rank->peak_bytes ? l->bytes : rank->peak_bytes;
    rank->peak_unsharded = l->whole > rank->peak_unsharded ? l->whole : rank->peak_unsharded;
    l->activations -= ends;
    l->bytes -= ends ? bytes : 0;
    l->whole -= a.kind == ZR_PIPE_RESHARD;
    rank->n_sends += zr_pipe_sends(a.kind);
    rank->busy_ns += zr_pipe_ns(c->cost, a);
}

/* Checks two computations at the same time: they must not depend on each other. */
static int check_pair(int32_t rank, const struct zr_pipe_row *row, int64_t i)
{
    const struct zr_pipe_action *a = &row->at[i];
    char text[ZR_PIPE_TEXT], other[ZR_PIPE_TEXT];
    if (!a->with_next)
        return 0;
    if (i + 1 == row->n || a[1].with_next || !zr_pipe_computes(a[0].kind) || !zr_pipe_computes(a[1].kind))
        return zr_fail(ZERO_ERR_ARG, "rank %d: %s has no other action to be computed with", rank,
                       zr_pipe_text(*a, text));
    if (a[0].stage == a[1].stage && a[0].micro_batch == a[1].micro_batch)
        return zr_fail(ZERO_ERR_ARG, "rank %d: %s is computed at the same time as %s, which it needs", rank,
                       zr_pipe_text(a[1], text), zr_pipe_text(a[0], other));
    return 0;
}

static int check_row(struct checking *c, int32_t rank)
{
    const struct zr_pipe_row *row = &c->p->rows[rank];
    struct load load = {0};
    int err = row->n ? 0 : zr_fail(ZERO_ERR_ARG, "rank %d does nothing", rank);
    for (int64_t i = 0; i < row->n && !err; i++) {
        const struct zr_pipe_action a = row->at[i];
        if (a.micro_batch >= 0 && c->stages[a.stage].rank != rank) {
            char text[ZR_PIPE_TEXT];
            return zr_fail(ZERO_ERR_ARG, "rank %d: %s, but stage %d is rank %d's", rank,
                           zr_pipe_text(a, text), a.stage, c->stages[a.stage].rank);
        }
        err = check_pair(rank, row, i);
        if (!err)
            err = a.micro_batch >= 0 ? check_of_micro_batch(c, rank, a) : check_of_stage(c, rank, a);
        count(c, &c->report->ranks[rank], &load, a);
    }
    return err;
}

static int left_out(const struct checking *c, int32_t stage, int32_t micro_batch, enum zr_pipe_kind kind)
{
    char text[ZR_PIPE_TEXT];
    const struct zr_pipe_action a = {.kind = kind, .stage = stage, .micro_batch = micro_batch};
    return zr_fail(ZERO_ERR_ARG, "rank %d: %s is missing", c->stages[stage].rank, zr_pipe_text(a, text));
}

static int check_complete(const struct checking *c, int32_t stage, int32_t micro_batch)
{
    const uint8_t done = *done_of(c, stage, micro_batch);
    const bool to_next = c->p->has_messages && moves(c, stage, 1);
    const bool to_before = c->p->has_messages && c->has_backward && moves(c, stage, -1);
    if (!(done & DONE_F))
        return left_out(c, stage, micro_batch, ZR_PIPE_FORWARD);
    if (c->has_backward && !(done & DONE_I))
        return left_out(c, stage, micro_batch, ZR_PIPE_BACKWARD);
    if (c->has_backward && !(done & DONE_W))
        return left_out(c, stage, micro_batch, ZR_PIPE_BACKWARD_WEIGHT);
    if (to_next && !(done & SENT_F))
        return left_out(c, stage, micro_batch, ZR_PIPE_SEND_F);
    if (to_before && !(done & SENT_B))
        return left_out(c, stage, micro_batch, ZR_PIPE_SEND_B);
    return 0;
}

static int check_stages(const struct checking *c)
{
    int err = 0;
    for (int32_t s = 0; s < c->p->n_stages && !err; s++) {
        for (int32_t m = 0; m < c->p->n_micro_batches && !err; m++)
            err = check_complete(c, s, m);
        if (!err && c->has_reduce && !c->stages[s].reduced)
            err = left_out(c, s, -1, ZR_PIPE_REDUCE_GRAD);
    }
    return err;
}

static int check_places(struct checking *c)
{
    int32_t *rank_of = zr_pipe_places(c->p);
    if (!rank_of)
        return ZERO_ERR_NOMEM;
    int err = 0;
    for (int32_t s = 0; s < c->p->n_stages; s++) {
        c->stages[s] = (struct stage){.rank = rank_of[s], .last = -1};
        if (rank_of[s] < 0 && !err)
            err = zr_fail(ZERO_ERR_ARG, "stage %d of %d is on no rank", s, c->p->n_stages);
    }
    free(rank_of);
    return err;
}

static void look_for_kinds(struct checking *c)
{
    for (int32_t r = 0; r < c->p->n_ranks; r++) {
        for (int64_t i = 0; i < c->p->rows[r].n; i++) {
            enum zr_pipe_kind kind = c->p->rows[r].at[i].kind;
            c->has_backward |= zr_pipe_computes(kind) && kind != ZR_PIPE_FORWARD;
            c->has_unshard |= kind == ZR_PIPE_UNSHARD || kind == ZR_PIPE_RESHARD;
            c->has_reduce |= kind == ZR_PIPE_REDUCE_GRAD;
        }
    }
}

/* ---- the queue of ranks ---- */

static void look_at(struct checking *c, int32_t rank)
{
    if (c->queued[rank])
        return;
    c->queued[rank] = true;
    c->queue[(c->first + c->n_queued++) % c->p->n_ranks] = rank;
}

/* Puts every rank at its first action, and into the queue. */
static void begin(struct checking *c)
{
    memset(c->at, 0, (size_t)c->p->n_ranks * sizeof *c->at);
    memset(c->queued, 0, (size_t)c->p->n_ranks * sizeof *c->queued);
    c->n_queued = c->first = 0;
    for (int32_t r = 0; r < c->p->n_ranks; r++)
        look_at(c, r);
}

static bool next_to_look_at(struct checking *c, int32_t *rank)
{
    if (!c->n_queued)
        return false;
    *rank = c->queue[c->first];
    c->first = (c->first + 1) % c->p->n_ranks;
    c->n_queued--;
    c->queued[*rank] = false;
    return true;
}

/* The next action of a rank. NULL: the rank has finished. */
static const struct zr_pipe_action *front(const struct checking *c, int32_t rank)
{
    const struct zr_pipe_row *row = &c->p->rows[rank];
    return c->at[rank] < row->n ? &row->at[c->at[rank]] : NULL;
}

/* The stage at the other end of a message, or the stage that a computation depends on. */
static int32_t other_stage(struct zr_pipe_action a)
{
    switch (a.kind) {
    case ZR_PIPE_SEND_F:
    case ZR_PIPE_RECV_B:
    case ZR_PIPE_BACKWARD:
    case ZR_PIPE_BACKWARD_INPUT:
        return a.stage + 1;
    default:
        return a.stage - 1;
    }
}

static int64_t *end_of(const struct checking *c, int64_t *ends, int32_t stage, int32_t micro_batch)
{
    return &ends[(int64_t)stage * c->p->n_micro_batches + micro_batch];
}

/* The time at which a computation has its input from the neighbouring stage. -1: not yet known. */
static int64_t ready_ns(const struct checking *c, struct zr_pipe_action a)
{
    const bool forward = a.kind == ZR_PIPE_FORWARD;
    if (a.kind == ZR_PIPE_BACKWARD_WEIGHT || (forward ? a.stage == 0 : is_last(c, a.stage)))
        return 0;
    int32_t other = other_stage(a);
    int64_t end = *end_of(c, forward ? c->f_end : c->b_end, other, a.micro_batch);
    if (end < 0)
        return -1;
    bool apart = c->stages[other].rank != c->stages[a.stage].rank;
    return end + (apart ? zr_pipe_move_ns(c->cost, a.stage < other ? a.stage : other) : 0);
}

/* Reports a deadlock: follows who waits for whom, from the first waiting rank until a rank repeats. */
static int stands_still(struct checking *c, const char *how)
{
    char all[1024] = "", text[ZR_PIPE_TEXT], one[160];
    int32_t r = 0, n = 0;
    while (!front(c, r))
        r++;
    memset(c->queued, 0, (size_t)c->p->n_ranks * sizeof *c->queued);
    for (; r < c->p->n_ranks && !c->queued[r] && n < 8 && front(c, r); n++) {
        const struct zr_pipe_action *at = front(c, r),
                                    a = at->with_next && ready_ns(c, *at) >= 0 ? at[1] : *at;
        int32_t waits_for = c->stages[other_stage(a)].rank;
        c->queued[r] = true;
        snprintf(one, sizeof one, "%srank %d is at %s, which waits for rank %d", n ? "; " : "", r,
                 zr_pipe_text(a, text), waits_for);
        strncat(all, one, sizeof all - strlen(all) - 1);
        r = waits_for;
    }
    if (r < c->p->n_ranks && !front(c, r)) {
        snprintf(one, sizeof one, "; rank %d has finished", r);
        strncat(all, one, sizeof all - strlen(all) - 1);
    }
    return zr_fail(ZERO_ERR_ARG, "%s: %s", how, all);
}

static bool all_through(const struct checking *c)
{
    for (int32_t r = 0; r < c->p->n_ranks; r++)
        if (front(c, r))
            return false;
    return true;
}

/* ---- messages that wait for their receiver ---- */

static bool is_message(const struct zr_pipe_action *a)
{
    return a && (zr_pipe_sends(a->kind) || zr_pipe_receives(a->kind));
}

/* Whether both ranks are at a message between them, in the same direction. */
static bool face(const struct checking *c, const struct zr_pipe_action *a, int32_t rank,
                 const struct zr_pipe_action *b)
{
    return is_message(b) && c->stages[other_stage(*b)].rank == rank &&
           zr_pipe_sends(a->kind) != zr_pipe_sends(b->kind);
}

static bool are_one_message(const struct zr_pipe_action *a, const struct zr_pipe_action *b)
{
    const bool forward = a->kind == ZR_PIPE_SEND_F || a->kind == ZR_PIPE_RECV_F;
    const bool same_way = forward == (b->kind == ZR_PIPE_SEND_F || b->kind == ZR_PIPE_RECV_F);
    return same_way && a->micro_batch == b->micro_batch && other_stage(*a) == b->stage;
}

static int check_messages(struct checking *c)
{
    begin(c);
    for (int32_t r; next_to_look_at(c, &r);) {
        const struct zr_pipe_action *a;
        while ((a = front(c, r)) && !is_message(a))
            c->at[r]++;
        if (!a)
            continue;
        int32_t peer = c->stages[other_stage(*a)].rank;
        const struct zr_pipe_action *b = front(c, peer);
        if (!b || !is_message(b) || !face(c, a, r, b)) {
            if (b && !is_message(b))
                look_at(c, peer);
            continue; /* a rank that reaches the message checks it again */
        }
        if (!are_one_message(a, b)) {
            char text[ZR_PIPE_TEXT], other[ZR_PIPE_TEXT];
            return zr_fail(
                ZERO_ERR_ARG,
                "rank %d's %s would meet rank %d's %s: messages between two ranks come in the order "
                "in which they are sent",
                r, zr_pipe_text(*a, text), peer, zr_pipe_text(*b, other));
        }
        c->at[r]++;
        c->at[peer]++;
        look_at(c, r);
        look_at(c, peer);
    }
    return all_through(c) ? 0
                          : stands_still(c, "if a send waits for its receiver, ranks wait for each other");
}

/* ---- the virtual clock ---- */

/* Times the next computation of a rank, and the one that overlaps it. Returns false if it must wait. */
static bool compute(struct checking *c, int32_t rank, const struct zr_pipe_action *a, int64_t *n_timed)
{
    int64_t ready = ready_ns(c, *a), with = a->with_next ? ready_ns(c, a[1]) : 0;
    if (ready < 0 || with < 0)
        return false;
    int64_t start = ready > with ? ready : with;
    start = start > c->free_ns[rank] ? start : c->free_ns[rank];
    for (int i = 0; i < 1 + a->with_next; i++) {
        int64_t end = start + zr_pipe_ns(c->cost, a[i]);
        if (a[i].kind == ZR_PIPE_FORWARD)
            *end_of(c, c->f_end, a[i].stage, a[i].micro_batch) = end;
        else if (a[i].kind != ZR_PIPE_BACKWARD_WEIGHT)
            *end_of(c, c->b_end, a[i].stage, a[i].micro_batch) = end;
        c->report->times[rank][n_timed[rank]++] = (struct zr_pipe_time){start, end};
        start = end;
        c->at[rank]++;
    }
    c->free_ns[rank] = start;
    c->report->span_ns = start > c->report->span_ns ? start : c->report->span_ns;
    return true;
}

static void wake_who_waits(struct checking *c, const struct zr_pipe_action *a)
{
    for (int i = 0; i < 1 + a->with_next; i++) {
        if (a[i].kind == ZR_PIPE_FORWARD && !is_last(c, a[i].stage))
            look_at(c, c->stages[a[i].stage + 1].rank);
        else if (a[i].kind != ZR_PIPE_FORWARD && a[i].stage > 0)
            look_at(c, c->stages[a[i].stage - 1].rank);
    }
}

static int run(struct checking *c, int64_t *n_timed)
{
    begin(c);
    for (int32_t r; next_to_look_at(c, &r);) {
        for (const struct zr_pipe_action *a; (a = front(c, r));) {
            if (!zr_pipe_computes(a->kind))
                c->at[r]++;
            else if (compute(c, r, a, n_timed))
                wake_who_waits(c, a);
            else
                break;
        }
    }
    if (!all_through(c))
        return stands_still(c, "ranks wait for each other");
    for (int32_t r = 0; r < c->p->n_ranks; r++)
        c->report->ranks[r].idle_ns = c->report->span_ns - c->report->ranks[r].busy_ns;
    return 0;
}

/* ---- all passes ---- */

static int no_memory(const struct zr_pipeline *p)
{
    return zr_fail(ZERO_ERR_NOMEM,
                   "no memory to check a pipeline schedule of %d ranks, %d stages and %d "
                   "micro-batches",
                   p->n_ranks, p->n_stages, p->n_micro_batches);
}

static int open_report(const struct zr_pipeline *p, struct zr_pipe_report *report)
{
    *report = (struct zr_pipe_report){.in_order = true};
    report->ranks = calloc((size_t)p->n_ranks, sizeof *report->ranks);
    report->times = calloc((size_t)p->n_ranks, sizeof *report->times);
    bool well = report->ranks && report->times;
    for (int32_t r = 0; r < p->n_ranks && well; r++) {
        int64_t n = 0;
        for (int64_t i = 0; i < p->rows[r].n; i++)
            n += zr_pipe_computes(p->rows[r].at[i].kind);
        report->times[r] = calloc((size_t)n + 1, sizeof **report->times);
        well = report->times[r];
    }
    return well ? 0 : no_memory(p);
}

static int check_all(struct checking *c)
{
    const int64_t n_all = (int64_t)c->p->n_stages * c->p->n_micro_batches;
    int64_t *n_timed = calloc((size_t)c->p->n_ranks, sizeof *n_timed);
    int err = n_timed && c->stages && c->done && c->at && c->free_ns && c->queue && c->queued && c->f_end &&
                      c->b_end
                  ? 0
                  : no_memory(c->p);
    for (int64_t i = 0; i < n_all && !err; i++)
        c->f_end[i] = c->b_end[i] = -1;
    err = err ? err : check_places(c);
    look_for_kinds(c);
    for (int32_t r = 0; r < c->p->n_ranks && !err; r++)
        err = check_row(c, r);
    err = err ? err : check_stages(c);
    err = err ? err : run(c, n_timed);
    if (!err && c->p->has_messages)
        err = check_messages(c);
    free(n_timed);
    return err;
}

int zr_pipeline_check(const struct zr_pipeline *p, const struct zr_pipe_cost *cost,
                      struct zr_pipe_report *report)
{
    int err = open_report(p, report);
    err = err ? err : zr_pipe_check_costs(p, cost);
    const size_t n_ranks = (size_t)p->n_ranks, n_all = (size_t)p->n_stages * (size_t)p->n_micro_batches;
    struct checking c = {.p = p,
                         .cost = cost,
                         .report = report,
                         .stages = calloc((size_t)p->n_stages, sizeof *c.stages),
                         .done = calloc(n_all, sizeof *c.done),
                         .at = calloc(n_ranks, sizeof *c.at),
                         .free_ns = calloc(n_ranks, sizeof *c.free_ns),
                         .queue = calloc(n_ranks, sizeof *c.queue),
                         .queued = calloc(n_ranks, sizeof *c.queued),
                         .f_end = calloc(n_all, sizeof *c.f_end),
                         .b_end = calloc(n_all, sizeof *c.b_end)};
    err = err ? err : check_all(&c);
    free(c.stages);
    free(c.done);
    free(c.at);
    free(c.free_ns);
    free(c.queue);
    free(c.queued);
    free(c.f_end);
    free(c.b_end);
    if (err)
        zr_pipe_report_close(report, p);
    return err;
}

void zr_pipe_report_close(struct zr_pipe_report *report, const struct zr_pipeline *p)
{
    for (int32_t r = 0; r < p->n_ranks && report->times; r++)
        free(report->times[r]);
    free(report->times);
    free(report->ranks);
    *report = (struct zr_pipe_report){0};
}
