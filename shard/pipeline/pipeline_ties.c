/* pipeline_ties.c: tensors that the first and the last stage have: for how many micro-batches the last stage's
 * gradients may be on their way to the first, whose backward begins with them. */
#include "shard/pipeline/pipeline.h"

#include <stdlib.h>

/* It has gradients of weights, as a whole backward has. */
static bool gives_weights(enum zr_pipe_kind kind)
{
    return kind == ZR_PIPE_BACKWARD || kind == ZR_PIPE_BACKWARD_WEIGHT;
}

static bool are_apart(const struct zr_pipeline *p)
{
    for (int32_t r = 0; r < p->n_ranks; r++)
        for (int64_t i = 0; i < p->rows[r].n; i++)
            if (p->rows[r].at[i].kind == ZR_PIPE_BACKWARD_WEIGHT)
                return true;
    return false;
}

/* ---- do all ranks come through? ---- */

/* Ranks go on as long as they have what they need; no time passes. */
struct trial {
    const struct zr_pipeline *p;
    /* (n_ranks) */
    int64_t *at;
    /* (2, n_stages, n_micro_batches) what a stage has sent, onward and back */
    bool *sent;
    /* micro-batches of which the first and the last stage have the gradients of weights */
    int32_t n_first, n_last;
    /* gradients that may be on their way */
    int32_t most;
};

static bool *sent_by(const struct trial *t, bool back, int32_t stage, int32_t micro_batch)
{
    return &t->sent[((int64_t)(back ? t->p->n_stages : 0) + stage) * t->p->n_micro_batches + micro_batch];
}

static bool may_go(const struct trial *t, const struct zr_pipe_action *a)
{
    if (a->kind == ZR_PIPE_RECV_F)
        return *sent_by(t, false, a->stage - 1, a->micro_batch);
    if (a->kind == ZR_PIPE_RECV_B)
        return *sent_by(t, true, a->stage + 1, a->micro_batch);
    if (!gives_weights(a->kind))
        return true;
    return (a->stage > 0 || t->n_last > a->micro_batch) &&
           (a->stage < t->p->n_stages - 1 || t->n_first + t->most > a->micro_batch);
}

static void go(struct trial *t, const struct zr_pipe_action *a)
{
    if (zr_pipe_sends(a->kind))
        *sent_by(t, a->kind == ZR_PIPE_SEND_B, a->stage, a->micro_batch) = true;
    t->n_first += gives_weights(a->kind) && a->stage == 0;
    t->n_last += gives_weights(a->kind) && a->stage == t->p->n_stages - 1;
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
                      .sent = calloc(2 * (size_t)p->n_stages * (size_t)p->n_micro_batches, sizeof *t.sent),
                      .most = 2 * slots};
    int through = t.at && t.sent ? come_through(&t) : -1;
    free(t.at);
    free(t.sent);
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
 * each rank that is as many behind as there are stages; by a schedule of another kind it may be more: the last
 * rank then waits, for nothing that waits for it. With several the last rank waits with its other stages, too,
 * for which the first may be waiting: so as many as make nobody wait on the virtual clock, where the others'
 * order then has no circle with them either.
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
