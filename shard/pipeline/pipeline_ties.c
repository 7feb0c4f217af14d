/* SPDX-License-Identifier: Apache-2.0 */
/* pipeline_ties.c: tensors that the first and the last stage have: for how many micro-batches the last
 * stage's gradients may be on their way to the first, whose backward begins with them. */
#include "shard/pipeline/pipeline.h"

#include <stdlib.h>

static bool are_apart(const struct zr_pipeline *p)
{
    for (int32_t r = 0; r < p->n_ranks; r++)
        for (int64_t i = 0; i < p->rows[r].n; i++)
            if (p->rows[r].at[i].kind == ZR_PIPE_BACKWARD_WEIGHT)
                return true;
    return false;
}

/* ---- do all ranks come through? ---- */

/* Ranks go on as long as they have what they need: a computation what was sent to its stage, and room for
 * what it gives; no time passes. */
struct trial {
    const struct zr_pipeline *p;
    int32_t n_onward, n_back;
    /* (n_ranks) */
    int64_t *at;
    /* (4, n_stages, n_micro_batches) a stage has come to a message's sending, or to taking it */
    bool *met;
    /* micro-batches of which the first and the last stage have the gradients of weights */
    int32_t n_first, n_last;
    /* gradients that may be on their way */
    int32_t most;
};

static bool *met(const struct trial *t, enum zr_pipe_kind message, int32_t stage, int32_t micro_batch)
{
    int64_t which = message - ZR_PIPE_SEND_F;
    return &t->met[(which * t->p->n_stages + stage) * t->p->n_micro_batches + micro_batch];
}

/* Of stages that are one rank's nothing is sent. */
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

/* -1: no memory. */
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

/* ---- how many ---- */

/* When a stage's backward of each micro-batch is, on the virtual clock, by what its rank computes. */
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

/* As many as make nobody wait on the virtual clock. */
static int32_t that_nobody_waits(const struct zr_pipeline *p, const struct zr_pipe_report *report)
{
    int32_t n = p->n_micro_batches, apart = 1;
    struct zr_pipe_time *first = malloc(2 * (size_t)n * sizeof *first), *last = first + n;
    if (!first) /* as many as can be */
        return n;
    list_backwards(p, report->times, 0, first);
    list_backwards(p, report->times, p->n_stages - 1, last);
    for (int32_t m = 0; m < n; m++)
        while (m >= apart && first[m - apart].end_ns > last[m].start_ns)
            apart++;
    free(first);
    return (apart + 1) / 2;
}

/* The last stage's backward waits for the first stage's of so many micro-batches before. With one stage on
 * each rank that is as many behind as there are stages; by a schedule of another kind it may be more: the
 * last rank then waits, for nothing that waits for it. With several the last rank waits with its other
 * stages, too, for which the first may be waiting: so as many as make nobody wait on the virtual clock, where
 * the others' order then has no circle with them either.
 *
 * Where weights' gradients are apart, the first stage's may even come before the last's, for which they wait;
 * whether anybody then waits for ever is tried. */
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
