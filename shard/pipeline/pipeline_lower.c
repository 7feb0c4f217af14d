/* SPDX-License-Identifier: Apache-2.0 */
/* pipeline_lower.c: adds messages, gathers and reductions to a schedule of computations.
 *
 * It goes through the actions of all ranks in the order of the virtual clock, and appends each to its rank's
 * row. A result is sent when its computation ends, and the send and its receive are appended to both rows
 * together. So a single order of all actions agrees with every row. Therefore the first unfinished message in
 * that order always finds both of its ranks ready, and no rank waits forever. */
#include "kernels/error.h"
#include "shard/pipeline/pipeline.h"

#include <stdlib.h>

/* The beginning or end of a computation. */
struct moment {
    int64_t ns;
    int32_t rank;
    bool begins;
    /* Index of the action in the rank's row. */
    int64_t i;
};

struct lowering {
    const struct zr_pipeline *from;
    struct zr_pipeline *to;
    int32_t most;
    /* (n_stages) The rank of each stage. */
    int32_t *rank_of;
    /* (n_stages) Stages sorted by rank; (n_ranks + 1) where each rank's stages begin. */
    int32_t *stages, *first;
    /* (n_stages) Index of the stage's next action that is not in `to` yet. */
    int64_t *next;
    /* (n_stages) Index of the stage's last backward. -1: none. */
    int64_t *last_backward;
    /* (n_stages) Whether the stage is gathered. */
    bool *whole;
    /* (n_ranks) For each action of the row, the index of its stage's next action. The row's length: none. */
    int64_t **following;
};

static int add(const struct lowering *l, int32_t rank, enum zr_pipe_kind kind, int32_t stage,
               int32_t micro_batch)
{
    const struct zr_pipe_action a = {.kind = kind, .stage = stage, .micro_batch = micro_batch};
    return zr_pipeline_add(l->to, rank, a);
}

static int compare(const void *left, const void *right)
{
    const struct moment *a = left, *b = right;
    if (a->ns != b->ns)
        return a->ns < b->ns ? -1 : 1;
    if (a->begins != b->begins)
        return a->begins ? 1 : -1; /* results that are ready now can be used by what begins now */
    if (a->rank != b->rank)
        return a->rank < b->rank ? -1 : 1;
    return a->i < b->i ? -1 : a->i > b->i;
}

/* ---- gathering ---- */

/* Makes sure that one more stage may be gathered. If the limit is reached, frees the gathered stage whose
 * next use is last and after action `until`. *made is false if every gathered stage is used before. */
static int make_room(const struct lowering *l, int32_t rank, int64_t until, bool *made)
{
    int32_t n_whole = 0, victim = -1;
    int64_t latest = until;
    for (int32_t k = l->first[rank]; k < l->first[rank + 1]; k++) {
        int32_t s = l->stages[k];
        n_whole += l->whole[s];
        if (l->whole[s] && l->next[s] > latest) {
            latest = l->next[s];
            victim = s;
        }
    }
    bool full = l->most && n_whole >= l->most;
    *made = !full || victim >= 0;
    if (!full || victim < 0)
        return 0;
    l->whole[victim] = false;
    return add(l, rank, ZR_PIPE_RESHARD, victim, -1);
}

/* Gathers the stage of action `use`, unless a stage that is used earlier would have to be freed. */
static int gather(const struct lowering *l, int32_t rank, int64_t use)
{
    int32_t stage = l->from->rows[rank].at[use].stage;
    bool room;
    if (l->whole[stage])
        return 0;
    int err = make_room(l, rank, use, &room);
    if (err || !room)
        return err;
    l->whole[stage] = true;
    return add(l, rank, ZR_PIPE_UNSHARD, stage, -1);
}

/* ---- beginning and end of a computation ---- */

/* Gathers the stage of a computation, and that of the next computation while this one runs. */
static int begin(const struct lowering *l, int32_t rank, int64_t i)
{
    const struct zr_pipe_row *row = &l->from->rows[rank];
    if (i && row->at[i - 1].with_next)
        return 0; /* done together with the previous action */
    int64_t n = row->at[i].with_next ? 2 : 1;
    int err = 0;
    for (int64_t j = 0; j < n && !err; j++)
        err = gather(l, rank, i + j);
    if (!err && i + n < row->n)
        err = gather(l, rank, i + n);
    for (int64_t j = 0; j < n && !err; j++) {
        err = zr_pipeline_add(l->to, rank, row->at[i + j]);
        l->next[row->at[i + j].stage] = l->following[rank][i + j];
    }
    return err;
}

static int end(const struct lowering *l, int32_t rank, int64_t i)
{
    const struct zr_pipe_row *row = &l->from->rows[rank];
    const struct zr_pipe_action a = row->at[i];
    const bool forward = a.kind == ZR_PIPE_FORWARD;
    const int32_t other = a.stage + (forward ? 1 : -1);
    int err = 0;
    if (a.kind != ZR_PIPE_BACKWARD_WEIGHT && other >= 0 && other < l->from->n_stages &&
        l->rank_of[other] != rank) {
        err = add(l, rank, forward ? ZR_PIPE_SEND_F : ZR_PIPE_SEND_B, a.stage, a.micro_batch);
        if (!err)
            err = add(l, l->rank_of[other], forward ? ZR_PIPE_RECV_F : ZR_PIPE_RECV_B, other, a.micro_batch);
    }
    if (!err && l->last_backward[a.stage] == i)
        err = add(l, rank, ZR_PIPE_REDUCE_GRAD, a.stage, -1);
    if (!err && l->whole[a.stage] && l->next[a.stage] == row->n) {
        l->whole[a.stage] = false;
        err = add(l, rank, ZR_PIPE_RESHARD, a.stage, -1);
    }
    return err;
}

/* ---- all actions ---- */

/* Fills the tables of stages per rank and of the uses of each stage. */
static void look_ahead(const struct lowering *l)
{
    const struct zr_pipeline *p = l->from;
    for (int32_t s = 0; s < p->n_stages; s++) {
        l->first[l->rank_of[s] + 1]++;
        l->last_backward[s] = -1;
    }
    for (int32_t r = 0; r < p->n_ranks; r++)
        l->first[r + 1] += l->first[r];
    for (int32_t s = p->n_stages; s-- > 0;) /* moves each end to its beginning, one index too far */
        l->stages[--l->first[l->rank_of[s] + 1]] = s;
    for (int32_t r = 0; r < p->n_ranks; r++)
        l->first[r] = l->first[r + 1];
    l->first[p->n_ranks] = p->n_stages;
    for (int32_t r = 0; r < p->n_ranks; r++) {
        const struct zr_pipe_row *row = &p->rows[r];
        for (int32_t k = l->first[r]; k < l->first[r + 1]; k++)
            l->next[l->stages[k]] = row->n;
        for (int64_t i = row->n; i-- > 0;) {
            int32_t stage = row->at[i].stage;
            l->following[r][i] = l->next[stage];
            l->next[stage] = i;
            if (row->at[i].kind != ZR_PIPE_FORWARD && l->last_backward[stage] < 0)
                l->last_backward[stage] = i;
        }
    }
}

static int go_through(const struct lowering *l, struct zr_pipe_time *const *times, struct moment *all)
{
    int64_t n = 0;
    int err = 0;
    for (int32_t r = 0; r < l->from->n_ranks; r++) {
        for (int64_t i = 0; i < l->from->rows[r].n; i++) {
            all[n++] = (struct moment){times[r][i].start_ns, r, true, i};
            all[n++] = (struct moment){times[r][i].end_ns, r, false, i};
        }
    }
    qsort(all, (size_t)n, sizeof *all, compare);
    for (int64_t k = 0; k < n && !err; k++)
        err = all[k].begins ? begin(l, all[k].rank, all[k].i) : end(l, all[k].rank, all[k].i);
    return err;
}

static bool open_following(struct lowering *l, int64_t *n_actions)
{
    const struct zr_pipeline *p = l->from;
    bool well = true;
    for (int32_t r = 0; r < p->n_ranks && well; r++) {
        l->following[r] = malloc(((size_t)p->rows[r].n + 1) * sizeof **l->following);
        well = l->following[r];
        *n_actions += p->rows[r].n;
    }
    return well;
}

static int lower(struct lowering *l, struct zr_pipe_time *const *times)
{
    struct moment *all = NULL;
    int64_t n_actions = 0;
    int err = ZERO_ERR_NOMEM;
    if (l->to && l->rank_of && l->stages && l->first && l->next && l->last_backward && l->whole &&
        l->following && open_following(l, &n_actions))
        all = malloc(2 * ((size_t)n_actions + 1) * sizeof *all);
    if (all) {
        look_ahead(l);
        err = go_through(l, times, all);
    } else {
        zr_fail(err, "no memory to lower a pipeline schedule of %d ranks", l->from->n_ranks);
    }
    for (int32_t r = 0; r < l->from->n_ranks && l->following; r++)
        free(l->following[r]);
    free(all);
    return err;
}

/* Accepts only computations that take time, since the virtual clock gives the order. */
static int check_plain(const struct zr_pipeline *p, const struct zr_pipe_cost *cost)
{
    char text[ZR_PIPE_TEXT];
    for (int32_t r = 0; r < p->n_ranks; r++) {
        for (int64_t i = 0; i < p->rows[r].n; i++) {
            const struct zr_pipe_action a = p->rows[r].at[i];
            if (!zr_pipe_computes(a.kind))
                return zr_fail(
                    ZERO_ERR_ARG,
                    "rank %d: %s: the schedule already has messages or gathers, so they cannot be added", r,
                    zr_pipe_text(a, text));
            if (zr_pipe_ns(cost, a) < 1)
                return zr_fail(ZERO_ERR_ARG, "rank %d: %s takes no time; allowed: 1 ns and more", r,
                               zr_pipe_text(a, text));
        }
    }
    return 0;
}

/* Two stages that are computed at the same time must both be gathered. */
static int check_most(const struct zr_pipeline *p, int32_t most)
{
    for (int32_t r = 0; r < p->n_ranks && most == 1; r++) {
        for (int64_t i = 0; i + 1 < p->rows[r].n; i++) {
            const struct zr_pipe_action *a = &p->rows[r].at[i];
            if (a->with_next && a[0].stage != a[1].stage)
                return zr_fail(
                    ZERO_ERR_ARG,
                    "rank %d computes stages %d and %d at the same time, but only one may be gathered", r,
                    a[0].stage, a[1].stage);
        }
    }
    return 0;
}

int zr_pipeline_lower(struct zr_pipeline **out, const struct zr_pipeline *p, const struct zr_pipe_cost *cost,
                      int32_t most_unsharded)
{
    struct zr_pipe_report report;
    *out = NULL;
    int err = check_plain(p, cost);
    err = err ? err : check_most(p, most_unsharded);
    err = err ? err : zr_pipeline_check(p, cost, &report);
    if (err)
        return err;
    const size_t n_stages = (size_t)p->n_stages, n_ranks = (size_t)p->n_ranks;
    struct lowering l = {.from = p,
                         .to = zr_pipeline_new(p->n_ranks),
                         .most = most_unsharded,
                         .rank_of = zr_pipe_places(p),
                         .stages = calloc(n_stages, sizeof *l.stages),
                         .first = calloc(n_ranks + 1, sizeof *l.first),
                         .next = calloc(n_stages, sizeof *l.next),
                         .last_backward = calloc(n_stages, sizeof *l.last_backward),
                         .whole = calloc(n_stages, sizeof *l.whole),
                         .following = calloc(n_ranks, sizeof *l.following)};
    err = lower(&l, report.times);
    if (err)
        zr_pipeline_close(l.to);
    else
        *out = l.to;
    zr_pipe_report_close(&report, p);
    free(l.rank_of);
    free(l.stages);
    free(l.first);
    free(l.next);
    free(l.last_backward);
    free(l.whole);
    free(l.following);
    return err;
}
