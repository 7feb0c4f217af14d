/* SPDX-License-Identifier: Apache-2.0 */
/* pipeline_slots.c: counts the message slots between ranks. Each message uses the slot with its micro-batch's
 * number modulo the number of slots, so a slot must be free when its next message comes. */
#include "kernels/alloc.h"
#include "kernels/error.h"
#include "shard/pipeline/pipeline.h"

#include <stdlib.h>

/* For one stage and each kind of action: the index in the rank's row for each micro-batch, or -1. BACKWARD is
 * the action that computes the gradient of the input. BACKWARD_WEIGHT is the one that completes backward;
 * both are the same action if backward is not split. */
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

/* Whether each micro-batch's `use` comes after the `done` of the previous micro-batch in its slot. */
static bool comes_behind(const int64_t *use, const int64_t *done, int32_t n, int32_t slots)
{
    for (int32_t m = slots; m < n; m++)
        if (use[m] >= 0 && done[m - slots] >= 0 && use[m] < done[m - slots])
            return false;
    return true;
}

/* A received message stays until backward is complete, or forward if there is no backward. A computed message
 * is written after the previous one in its slot was sent. */
static bool is_enough(const struct places *at, int32_t n, int32_t onward, int32_t back)
{
    bool forward_only = at->of[ZR_PIPE_BACKWARD][0] < 0;
    const int64_t *last = at->of[forward_only ? ZR_PIPE_FORWARD : ZR_PIPE_BACKWARD_WEIGHT];
    return comes_behind(at->of[ZR_PIPE_RECV_F], last, n, onward) &&
           comes_behind(at->of[ZR_PIPE_FORWARD], at->of[ZR_PIPE_SEND_F], n, onward) &&
           comes_behind(at->of[ZR_PIPE_RECV_B], at->of[ZR_PIPE_BACKWARD_WEIGHT], n, back) &&
           comes_behind(at->of[ZR_PIPE_BACKWARD], at->of[ZR_PIPE_SEND_B], n, back);
}

/* The same if the next stage is on this rank: it reads the result in the slot where this stage wrote it. */
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
    int64_t *room;
    struct places at, next;
    ZR_TRY(ZR_ALLOC(room, (int64_t)2 * ZR_PIPE_N_KINDS * n, "the slots of %d micro-batches", n));
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
    int err = rank_of ? 0 : ZERO_ERR_NOMEM;
    free(rank_of);
    free(room);
    return err;
}
