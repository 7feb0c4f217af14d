/* SPDX-License-Identifier: Apache-2.0 */
/* pipeline.c: the tables of pipeline.h and the schedules that have a name.
 *
 *   GPipe        Huang et al., arXiv:1811.06965
 *   1F1B         Narayanan et al., PipeDream (SOSP 2019)
 *   interleaved  Narayanan et al., arXiv:2104.04473, with rounds of any length, as in PyTorch
 *   zero bubble  ZB-H1 of Qi et al., arXiv:2401.10241; keeps as many activations as 1F1B's fullest rank */
#include "shard/pipeline/pipeline.h"
#include "kernels/alloc.h"
#include "kernels/error.h"

#include <stdio.h>
#include <stdlib.h>

static const char *const kind_text[ZR_PIPE_N_KINDS] = {
#define X(name, text, has_micro_batch) text,
    ZR_PIPE_MAP(X)
#undef X
};

const char *zr_pipe_text(struct zr_pipe_action a, char text[ZR_PIPE_TEXT])
{
    if (a.micro_batch >= 0)
        snprintf(text, ZR_PIPE_TEXT, "%d%s%d", a.stage, kind_text[a.kind], a.micro_batch);
    else
        snprintf(text, ZR_PIPE_TEXT, "%d%s", a.stage, kind_text[a.kind]);
    return text;
}

const struct zr_pipe_cost *zr_pipe_assumed_cost(void)
{
    static const struct zr_pipe_cost cost = {.forward_ns = 1000, .backward_ns = 2000, .weight_ns = 1000};
    return &cost;
}

int64_t zr_pipe_ns(const struct zr_pipe_cost *cost, struct zr_pipe_action a)
{
    const int64_t ns[] = {cost->forward_ns, cost->backward_ns, cost->backward_ns - cost->weight_ns,
                          cost->weight_ns};
    return zr_pipe_computes(a.kind) ? ns[a.kind] * (cost->units ? cost->units[a.stage] : 1) : 0;
}

int64_t zr_pipe_move_ns(const struct zr_pipe_cost *cost, int32_t edge)
{
    return cost->moves_ns ? cost->moves_ns[edge] : cost->move_ns;
}

int zr_pipe_check_costs(const struct zr_pipeline *p, const struct zr_pipe_cost *cost)
{
    __int128 ns = 0, bytes = 0;
    int64_t longest_move = cost->move_ns;
    bool negative = cost->move_ns < 0;
    for (int32_t edge = 0; cost->moves_ns && edge < p->n_stages - 1; edge++) {
        if (longest_move < cost->moves_ns[edge])
            longest_move = cost->moves_ns[edge];
        negative |= cost->moves_ns[edge] < 0;
    }
    const __int128 most = INT64_MAX;
    if (cost->forward_ns < 0 || negative || cost->activation_bytes < 0 || cost->weight_ns < 0 ||
        cost->weight_ns > cost->backward_ns)
        return zr_fail(ZERO_ERR_ARG,
                       "a cost is negative, or the cost of weights is above the cost of backward");
    /* per unit, also if backward is split */
    const __int128 all_ns = (__int128)cost->forward_ns + cost->backward_ns;
    for (int32_t r = 0; r < p->n_ranks; r++) {
        for (int64_t i = 0; i < p->rows[r].n; i++) {
            const struct zr_pipe_action a = p->rows[r].at[i];
            int32_t units = cost->units ? cost->units[a.stage] : 1;
            ns += zr_pipe_computes(a.kind) ? all_ns * units + longest_move : 0;
            bytes += a.kind == ZR_PIPE_FORWARD ? (__int128)cost->activation_bytes * units : 0;
        }
    }
    return ns <= most && bytes <= most
               ? 0
               : zr_fail(
                     ZERO_ERR_ARG,
                     "the costs of all actions together, in time or activations, do not fit into 63 bits");
}

struct zr_pipeline *zr_pipeline_new(int32_t n_ranks)
{
    struct zr_pipeline *p = calloc(1, sizeof *p);
    struct zr_pipe_row *rows = calloc((size_t)n_ranks, sizeof *rows);
    if (!p || !rows) {
        free(p);
        free(rows);
        zr_fail(ZERO_ERR_NOMEM, "no memory for a pipeline schedule of %d ranks", n_ranks);
        return NULL;
    }
    p->n_ranks = n_ranks;
    p->rows = rows;
    return p;
}

int zr_pipeline_add(struct zr_pipeline *p, int32_t rank, struct zr_pipe_action action)
{
    struct zr_pipe_row *row = &p->rows[rank];
    if (row->n == row->capacity) {
        int64_t capacity = row->capacity ? 2 * row->capacity : 16;
        ZR_TRY(ZR_GROW(row->at, capacity, "%lld actions of a pipeline schedule", (long long)capacity));
        row->capacity = capacity;
    }
    row->at[row->n++] = action;
    if (action.stage >= p->n_stages)
        p->n_stages = action.stage + 1;
    if (action.micro_batch >= p->n_micro_batches)
        p->n_micro_batches = action.micro_batch + 1;
    p->has_messages |= zr_pipe_sends(action.kind) || zr_pipe_receives(action.kind);
    return 0;
}

void zr_pipeline_close(struct zr_pipeline *p)
{
    if (!p)
        return;
    for (int32_t r = 0; r < p->n_ranks; r++)
        free(p->rows[r].at);
    free(p->rows);
    free(p);
}

int32_t *zr_pipe_places(const struct zr_pipeline *p)
{
    int32_t *rank_of;
    if (ZR_ALLOC(rank_of, p->n_stages, "%d stages", p->n_stages))
        return NULL;
    for (int32_t s = 0; s < p->n_stages; s++)
        rank_of[s] = -1;
    for (int32_t r = 0; r < p->n_ranks; r++)
        for (int64_t i = 0; i < p->rows[r].n; i++)
            if (zr_pipe_computes(p->rows[r].at[i].kind))
                rank_of[p->rows[r].at[i].stage] = r;
    return rank_of;
}

/* ---- named schedules ---- */

/* The row of one rank while it is built. Forwards and backwards are numbered separately, each in its own
 * order. */
struct part {
    struct zr_pipeline *p;
    int32_t rank, per_rank, n_micro_batches;
    /* Micro-batches that a stage computes before the rank switches to its next stage. */
    int32_t round;
};

static int add(const struct part *b, enum zr_pipe_kind kind, int64_t nth)
{
    int32_t local = (int32_t)(nth / b->round % b->per_rank);
    int32_t in_round = (int32_t)(nth % b->round);
    int32_t round = (int32_t)(nth / ((int64_t)b->round * b->per_rank));
    if (kind != ZR_PIPE_FORWARD)
        local = b->per_rank - 1 - local;
    const struct zr_pipe_action a = {
        .kind = kind, .stage = local * b->p->n_ranks + b->rank, .micro_batch = round * b->round + in_round};
    return zr_pipeline_add(b->p, b->rank, a);
}

/* Adds `first` forwards, then a forward and a backward in turn, then the remaining backwards. */
static int add_all(const struct part *b, int64_t first, bool forward_only)
{
    const int64_t n = (int64_t)b->n_micro_batches * b->per_rank;
    int err = 0;
    first = first < n ? first : n;
    for (int64_t i = 0; i < n && !err; i++) {
        err = add(b, ZR_PIPE_FORWARD, i);
        if (!err && !forward_only && i >= first)
            err = add(b, ZR_PIPE_BACKWARD, i - first);
    }
    for (int64_t i = n - first; i < n && !err && !forward_only; i++)
        err = add(b, ZR_PIPE_BACKWARD, i);
    return err;
}

/* Adds the nth backward for inputs, and the backward for weights number nth - behind if it exists. */
static int add_apart(const struct part *b, int64_t nth, int64_t behind)
{
    int err = add(b, ZR_PIPE_BACKWARD_INPUT, nth);
    return err || nth < behind ? err : add(b, ZR_PIPE_BACKWARD_WEIGHT, nth - behind);
}

/* Adds actions in the order of 1F1B with a split backward. Weight gradients follow `rank` backwards later. So
 * later ranks delay theirs more, and earlier ranks get the gradients of their inputs sooner. */
static int add_zero_bubble(const struct part *b, int64_t first)
{
    const int64_t n = b->n_micro_batches, behind = b->rank;
    int err = 0;
    first = first < n ? first : n;
    for (int64_t i = 0; i < n && !err; i++) {
        err = add(b, ZR_PIPE_FORWARD, i);
        if (!err && i >= first)
            err = add_apart(b, i - first, behind);
    }
    for (int64_t i = n - first; i < n && !err; i++)
        err = add_apart(b, i, behind);
    for (int64_t i = n > behind ? n - behind : 0; i < n && !err; i++)
        err = add(b, ZR_PIPE_BACKWARD_WEIGHT, i);
    return err;
}

static int check_numbers(enum zr_pipeline_kind kind, int32_t n_ranks, int32_t per_rank, int32_t n)
{
    if (n_ranks < 1 || n_ranks > ZR_PIPE_MAX_RANKS)
        return zr_fail(ZERO_ERR_ARG, "the pipeline has %d ranks; allowed: 1 to %d", n_ranks,
                       ZR_PIPE_MAX_RANKS);
    if (per_rank > 0 && (int64_t)n_ranks * per_rank > ZR_PIPE_MAX_NUMBERS)
        return zr_fail(ZERO_ERR_ARG, "a pipeline of %d ranks with %d stages each; allowed: at most %d stages",
                       n_ranks, per_rank, ZR_PIPE_MAX_NUMBERS);
    if (per_rank < 1 || n < 1 || n > ZR_PIPE_MAX_NUMBERS || (int64_t)n_ranks * per_rank * n > ZR_PIPE_MAX_ALL)
        return zr_fail(ZERO_ERR_ARG,
                       "a pipeline of %d ranks with %d stages each and %d micro-batches: each must be 1 or "
                       "more, and their product at most %lld",
                       n_ranks, per_rank, n, (long long)ZR_PIPE_MAX_ALL);
    if (kind == ZR_1F1B && per_rank > 1)
        return zr_fail(ZERO_ERR_ARG,
                       "1F1B has one stage per rank, not %d: for several, use the interleaved schedule",
                       per_rank);
    if (kind == ZR_ZERO_BUBBLE && per_rank > 1)
        return zr_fail(ZERO_ERR_ARG, "the zero-bubble schedule has one stage per rank, not %d", per_rank);
    int32_t rounds = n / n_ranks > 1 ? n / n_ranks : 1;
    if (kind == ZR_INTERLEAVED && n % rounds)
        return zr_fail(ZERO_ERR_ARG,
                       "the interleaved schedule cannot divide %d micro-batches evenly into %d rounds on %d "
                       "ranks; allowed: a multiple of %d",
                       n, rounds, n_ranks, n_ranks);
    return 0;
}

int zr_pipeline_build(struct zr_pipeline **out, enum zr_pipeline_kind kind, int32_t n_ranks,
                      int32_t stages_per_rank, int32_t n_micro_batches, bool forward_only)
{
    *out = NULL;
    int err = check_numbers(kind, n_ranks, stages_per_rank, n_micro_batches);
    struct zr_pipeline *p = err ? NULL : zr_pipeline_new(n_ranks);
    if (!p)
        return err ? err : ZERO_ERR_NOMEM;
    int32_t rounds = n_micro_batches / n_ranks > 1 ? n_micro_batches / n_ranks : 1;
    int32_t round = kind == ZR_INTERLEAVED ? n_micro_batches / rounds : n_micro_batches;
    for (int32_t r = 0; r < n_ranks && !err; r++) {
        const struct part b = {p, r, stages_per_rank, n_micro_batches, round};
        const int64_t behind = n_ranks - 1 - r;
        const int64_t first = kind == ZR_GPIPE         ? INT64_MAX
                              : kind != ZR_INTERLEAVED ? behind
                                                       : (int64_t)(stages_per_rank - 1) * round + 2 * behind;
        if (kind == ZR_ZERO_BUBBLE && !forward_only)
            err = add_zero_bubble(&b, first);
        else
            err = add_all(&b, first, forward_only);
    }
    if (err)
        zr_pipeline_close(p);
    else
        *out = p;
    return err;
}
