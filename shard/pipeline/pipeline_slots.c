/* SPDX-License-Identifier: Apache-2.0 */
/* pipeline_slots.c: how many messages of a pair of ranks are in use at the same time, where each takes the
 * slot of its micro-batch's number, modulo the slots. */
#include "kernels/error.h"
#include "shard/pipeline/pipeline.h"

#include <stdlib.h>

/* Where in a rank's row each micro-batch's action of a kind is, for one stage; -1: nowhere. BACKWARD is where
 * its backward computes the gradient of its inputs, BACKWARD_WEIGHT where that ends, with the weights: one
 * action or two. */
struct places {
    int64_t *of[ZR_PIPE_N_KINDS];
};

static void note_place(const struct places *at, const struct zr_pipe_action *a, int64_t i)
{
    at->of[a->kind][a->micro_batch] = i;
    if (a->kind == ZR_PIPE_BACKWARD_INPUT)
        at->of[ZR_PIPE_BACKWARD][a->micro_batch] = i;
    if (a->kind == ZR_PIPE_BACKWARD)
        at->of[ZR_PIPE_BACKWARD_WEIGHT][a->micro_batch] = i;
}

static void find_places(const struct zr_pipeline *p, const struct zr_pipe_row *row, int32_t stage,
                        const struct places *at)
{
    for (int k = 0; k < ZR_PIPE_N_KINDS; k++)
        for (int32_t m = 0; m < p->n_micro_batches; m++)
            at->of[k][m] = -1;
    for (int64_t i = 0; i < row->n; i++)
        if (row->at[i].stage == stage && row->at[i].micro_batch >= 0)
            note_place(at, &row->at[i], i);
}

/* Each micro-batch's `use` comes behind the `done` of the one that had its slot before, if the row has them.
 */
static bool comes_behind(const int64_t *use, const int64_t *done, int32_t n, int32_t slots)
{
    for (int32_t m = slots; m < n; m++)
        if (use[m] >= 0 && done[m - slots] >= 0 && use[m] < done[m - slots])
            return false;
    return true;
}

/* What is received stays until the micro-batch's backward is over, or forward where there is none; what is
 * computed is written where the one before was sent from. */
static bool is_enough(const struct places *at, int32_t n, int32_t onward, int32_t back)
{
    bool forward_only = at->of[ZR_PIPE_BACKWARD][0] < 0;
    const int64_t *last = at->of[forward_only ? ZR_PIPE_FORWARD : ZR_PIPE_BACKWARD_WEIGHT];
    return comes_behind(at->of[ZR_PIPE_RECV_F], last, n, onward) &&
           comes_behind(at->of[ZR_PIPE_FORWARD], at->of[ZR_PIPE_SEND_F], n, onward) &&
           comes_behind(at->of[ZR_PIPE_RECV_B], at->of[ZR_PIPE_BACKWARD_WEIGHT], n, back) &&
           comes_behind(at->of[ZR_PIPE_BACKWARD], at->of[ZR_PIPE_SEND_B], n, back);
}

/* The same where the next stage is this rank's, too: what one computes the other reads where it is. */
static bool is_enough_within(const struct places *at, const struct places *next, int32_t n, int32_t onward,
                             int32_t back)
{
    bool forward_only = at->of[ZR_PIPE_BACKWARD][0] < 0;
    const int64_t *last = next->of[forward_only ? ZR_PIPE_FORWARD : ZR_PIPE_BACKWARD_WEIGHT];
    return comes_behind(at->of[ZR_PIPE_FORWARD], last, n, onward) &&
           comes_behind(next->of[ZR_PIPE_BACKWARD], at->of[ZR_PIPE_BACKWARD_WEIGHT], n, back);
}

int zr_pipeline_slots(const struct zr_pipeline *p, int32_t *n_onward, int32_t *n_back)
{
    int32_t n = p->n_micro_batches;
    int64_t *room = malloc(2 * (size_t)ZR_PIPE_N_KINDS * (size_t)n * sizeof *room);
    struct places at, next;
    if (!room)
        return zr_fail(ZR_ERR_NOMEM, "no memory for the slots of %d micro-batches", n);
    for (int k = 0; k < ZR_PIPE_N_KINDS; k++) {
        at.of[k] = room + (int64_t)k * n;
        next.of[k] = room + (int64_t)(ZR_PIPE_N_KINDS + k) * n;
    }
    *n_onward = *n_back = 1;
    int32_t *rank_of = zr_pipe_places(p);
    for (int32_t s = 0; rank_of && s < p->n_stages; s++) {
        if (rank_of[s] < 0)
            continue;
        find_places(p, &p->rows[rank_of[s]], s, &at);
        while (*n_onward < n && !is_enough(&at, n, *n_onward, n))
            ++*n_onward;
        while (*n_back < n && !is_enough(&at, n, n, *n_back))
            ++*n_back;
        if (s + 1 == p->n_stages || rank_of[s + 1] != rank_of[s])
            continue;
        find_places(p, &p->rows[rank_of[s]], s + 1, &next);
        while (*n_onward < n && !is_enough_within(&at, &next, n, *n_onward, n))
            ++*n_onward;
        while (*n_back < n && !is_enough_within(&at, &next, n, n, *n_back))
            ++*n_back;
    }
    int err = rank_of ? 0 : ZR_ERR_NOMEM;
    free(rank_of);
    free(room);
    return err;
}
