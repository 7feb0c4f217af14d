/* SPDX-License-Identifier: Apache-2.0 */
/* verify_stages.c: the pipeline stages of a case: the tensors, schedule, script and plan of each; which ranks
 * belong to it; and the sums that gradients must have. A model without pipeline parallelism is one stage. */
#include "kernels/alloc.h"
#include "shard/verify/verify_world.h"

#include <stdlib.h>
#include <string.h>

/* Flat numbers in contents for each tensor-parallel rank of each pipeline stage. Replicated tensors use the
 * numbers of tensor-parallel rank 0. */
enum { FLATS = 1 << 16 };

/* ---- which rank has which stage ---- */

int32_t zr_case_stages(const struct zr_verify_case *c)
{
    return zr_case_pp(c) * zr_case_per_rank(c);
}

static int32_t n_tp_ranks(const struct zr_verify_case *c)
{
    return c->tp > 1 ? c->tp : 1;
}

int32_t zr_verify_dp(const struct zr_verify_case *c)
{
    return c->world / zr_case_pp(c) / n_tp_ranks(c);
}

int32_t zr_stage_units(const struct zr_verify_case *c, int32_t stage)
{
    uint64_t s = c->seed ^ 0x0417 ^ (uint64_t)stage << 40;
    return zr_in_stages(c) ? 1 + (int32_t)zr_verify_below(&s, c->n_units) : c->n_units;
}

static int32_t place_in_pp(const struct zr_verify_case *c, int32_t rank)
{
    return rank / (c->world / zr_case_pp(c));
}

void zr_stage_enter(struct zr_verify_world *v, struct zr_verify_rank *r)
{
    int32_t rank = v->by_symmetry ? 0 : r->id;
    r->of_stage = &v->stages[place_in_pp(v->c, rank)];
    r->tp_rank = rank % n_tp_ranks(v->c);
    r->walk = r->of_stage->walk;
}

int zr_stage_class(const struct zr_verify_case *c, int32_t rank)
{
    return place_in_pp(c, rank) * n_tp_ranks(c) + rank % n_tp_ranks(c);
}

int32_t zr_stage_flat(const struct zr_verify_rank *r, const struct zr_tensor *t, int32_t flat)
{
    bool copy = t->tie == ZR_TIE_COPY;
    int32_t group = (copy ? 0 : r->of_stage->at * n_tp_ranks(r->v->c)) + (t->cut ? r->tp_rank : 0);
    return group * FLATS + (copy ? r->v->stages[0].layout->units[0].first_flat : flat);
}

int zr_stage_contributor(const struct zr_verify_world *v, int rank, const struct zr_tensor *t)
{
    return t->cut || t->partial ? rank : rank - rank % n_tp_ranks(v->c);
}

/* ---- expected gradients ---- */

/* Adds the contributions of a pipeline stage's ranks to a tensor's gradient, n from each rank. If each
 * tensor-parallel rank has a partial gradient, all ranks contribute. Otherwise only those with one
 * index in tensor parallelism do: the others have other elements, or the same gradient. */
static void add_contributions(const struct zr_verify_world *v, const struct zr_verify_stage *stage,
                              const struct zr_tensor *t, int32_t tp_rank, int32_t n, uint32_t step,
                              struct zr_content *sum)
{
    for (int32_t rank = 0; rank < v->c->world; rank++) {
        if (&v->stages[place_in_pp(v->c, rank)] != stage ||
            (!t->partial && rank % n_tp_ranks(v->c) != tp_rank))
            continue;
        for (int32_t k = 0; k < n; k++)
            sum->value += zr_sim_contribution(zr_stage_contributor(v, rank, t), step, sum->flat, k);
        sum->n += n;
    }
}

struct zr_content zr_stage_whole_grad(void *arg, int32_t flat, uint32_t step)
{
    const struct zr_verify_world *v = arg;
    bool whole = v->c->pp < 2 && v->c->tp < 2;
    int32_t n_tp = n_tp_ranks(v->c), group = whole ? 0 : flat / FLATS, at = whole ? flat : flat % FLATS;
    struct zr_content sum = {.kind = ZR_CONTENT_GRAD, .size = sizeof(float), .flat = flat};
    if (v->by_symmetry || flat < 0 || group >= zr_case_pp(v->c) * n_tp || step < 1 ||
        (int)step > v->c->n_steps)
        return sum;
    const struct zr_verify_stage *stage = &v->stages[group / n_tp];
    const struct zr_layout *l = stage->layout;
    if (at >= l->n_flats)
        return sum;
    const struct zr_flat *f = &l->flats[at];
    const struct zr_tensor *t = &l->tensors[l->pieces[f->first_piece].tensor];
    int32_t n = stage->script.n_contrib[((int)step - 1) * l->n_units + f->unit];
    add_contributions(v, stage, t, group % n_tp, n, step - 1, &sum);
    if (t->tie == ZR_TIE_OWNER) {
        const struct zr_verify_stage *last = &v->stages[v->c->pp - 1];
        int32_t unit = last->layout->n_units - 1;
        n = last->script.n_contrib[((int)step - 1) * last->layout->n_units + unit];
        add_contributions(v, last, t, group % n_tp, n, step - 1, &sum);
    }
    return sum;
}

/* ---- schedules ---- */

bool zr_case_is_apart(const struct zr_verify_case *c)
{
    uint64_t s = c->seed ^ 0xa9a7;
    return zr_in_stages(c) &&
           (c->schedule == ZR_RUN_ZERO_BUBBLE || (c->schedule == ZR_RUN_ANY && zr_verify_chance(&s, 50)));
}

/* Whether the next computation of this kind on stage `at` of n is possible. done counts the computations so
 * far. If the first and the last pipeline stage share a tensor, the first one's weight gradients need those
 * of the last. */
static bool may_come(const struct zr_verify_case *c, enum zr_pipe_kind kind, int32_t at, int32_t n,
                     int32_t (*done)[64 * ZR_VERIFY_PER_RANK])
{
    int32_t *forward = done[ZR_PIPE_FORWARD], *inputs = done[ZR_PIPE_BACKWARD],
            *weights = done[ZR_PIPE_BACKWARD_WEIGHT];
    if (kind == ZR_PIPE_FORWARD)
        return forward[at] < c->accum && (at == 0 || forward[at - 1] > forward[at]);
    if (kind == ZR_PIPE_BACKWARD_WEIGHT)
        return weights[at] < inputs[at] && (at > 0 || !c->tied || weights[n - 1] > weights[0]);
    return inputs[at] < forward[at] && (at == n - 1 || inputs[at + 1] > inputs[at]);
}

/* Draws a random valid order: repeatedly picks one of the computations that are ready. */
static int draw_schedule(const struct zr_verify_case *c, struct zr_pipeline **out)
{
    uint64_t s = c->seed ^ 0x5ced;
    int percent = 10 + (int)zr_verify_below(&s, 80);
    bool apart = zr_case_is_apart(c);
    int32_t done[ZR_PIPE_BACKWARD_WEIGHT + 1][64 * ZR_VERIFY_PER_RANK] = {{0}}, n = zr_case_stages(c);
    struct zr_pipeline *p = *out = zr_pipeline_new(zr_case_pp(c));
    int err = p ? 0 : ZERO_ERR_NOMEM;
    for (int64_t left = (2 + apart) * (int64_t)n * c->accum; !err && left;) {
        int32_t at = (int32_t)zr_verify_below(&s, n);
        enum zr_pipe_kind kind = !zr_verify_chance(&s, percent)      ? ZR_PIPE_FORWARD
                                 : apart && zr_verify_chance(&s, 50) ? ZR_PIPE_BACKWARD_WEIGHT
                                                                     : ZR_PIPE_BACKWARD;
        if (!may_come(c, kind, at, n, done))
            continue;
        int32_t micro = done[kind][at]++;
        if (apart && kind == ZR_PIPE_BACKWARD)
            kind = ZR_PIPE_BACKWARD_INPUT;
        err = zr_pipeline_add(p, at % zr_case_pp(c),
                              (struct zr_pipe_action){.kind = kind, .stage = at, .micro_batch = micro});
        left--;
    }
    return err;
}

/* A mutant exchanges each message of tied gradients of the first stage with the message before it. */
static void receive_early(struct zr_verify_world *v, struct zr_walk_row *row)
{
    struct zr_pipe_action *last = NULL;
    for (int64_t i = 0; i < row->n; i++) {
        struct zr_pipe_action *a = &row->actions[i];
        if (a->kind == ZR_PIPE_TIE && last) {
            const struct zr_pipe_action tie = *a;
            memmove(last + 1, last, (size_t)(a - last) * sizeof *last);
            *last = tie;
            v->n_acted++;
        }
        last = zr_pipe_sends(a->kind) || zr_pipe_receives(a->kind) ? a : NULL;
    }
}

static int take_rows(struct zr_verify_world *v, struct zr_pipeline *all, int32_t n_tied, bool evaluation)
{
    int32_t n_onward, n_back;
    int err = zr_pipeline_slots(all, &n_onward, &n_back);
    if (!err && !evaluation && v->c->tied)
        err = zr_pipeline_place_ties(all, &n_tied);
    if (!err && !evaluation && v->c->tied && !n_tied)
        err = zr_fail(ZERO_ERR_ARG, "the messages of tied tensors have no place in the schedule");
    for (int32_t s = 0; !err && s < zr_case_pp(v->c); s++) {
        struct zr_verify_stage *stage = &v->stages[s];
        struct zr_walk_row *row = evaluation ? &stage->walk.evaluation : &stage->walk.step;
        stage->room.n_onward = (int32_t)zr_max(stage->room.n_onward, n_onward);
        stage->room.n_back = (int32_t)zr_max(stage->room.n_back, n_back);
        if (!evaluation)
            stage->room.n_tied = n_tied;
        row->n = all->rows[s].n;
        ZR_TRY(ZR_ALLOC(row->actions, row->n, "a schedule"));
        memcpy(row->actions, all->rows[s].at, (size_t)row->n * sizeof *row->actions);
        if (v->mutant && v->mutant->what == ZR_EARLY_TIE && s == 0 && !evaluation)
            receive_early(v, row);
    }
    return err;
}

/* Chooses the schedule as zero_wrap does. */
static enum zr_pipeline_kind kind_of(const struct zr_verify_case *c, bool evaluation)
{
    bool interleaved = zr_case_per_rank(c) > 1;
    int32_t rounds = c->accum / zr_case_pp(c);
    if (c->schedule == ZR_RUN_GPIPE || (evaluation && interleaved && rounds > 1 && c->accum % rounds))
        return ZR_GPIPE;
    if (c->schedule == ZR_RUN_ZERO_BUBBLE)
        return ZR_ZERO_BUBBLE;
    return interleaved || c->schedule == ZR_RUN_INTERLEAVED ? ZR_INTERLEAVED : ZR_1F1B;
}

static int make_rows(struct zr_verify_world *v, bool evaluation)
{
    const struct zr_verify_case *c = v->c;
    struct zr_pipeline *computed = NULL, *all = NULL;
    struct zr_pipe_report report;
    int err = !evaluation && c->schedule == ZR_RUN_ANY
                  ? draw_schedule(c, &computed)
                  : zr_pipeline_build(&computed, kind_of(c, evaluation), zr_case_pp(c), zr_case_per_rank(c),
                                      c->accum, evaluation);
    if (!err)
        err = zr_pipeline_lower(&all, computed, zr_pipe_assumed_cost(), 0);
    if (!err)
        err = zr_pipeline_check(all, zr_pipe_assumed_cost(), &report);
    if (!err) {
        int32_t n_tied = evaluation ? 0 : zr_pipeline_tied_slots(all, &report);
        zr_pipe_report_close(&report, all);
        err = take_rows(v, all, n_tied, evaluation);
    }
    zr_pipeline_close(all);
    zr_pipeline_close(computed);
    return err;
}

/* Sets the sizes of message slots. Only the sizes for tied tensors differ between pipeline stages. */
static void set_room(struct zr_verify_stage *s, const struct zr_verify_case *c)
{
    int64_t tied_bytes = 0, sum_bytes = 0;
    for (int32_t i = 0; i < s->layout->n_tensors; i++) {
        const struct zr_tensor *t = &s->layout->tensors[i];
        tied_bytes += t->tie != ZR_TIE_NONE ? zr_tied_bytes(t) : 0;
        sum_bytes += t->tie != ZR_TIE_NONE ? zr_tied_sum_bytes(t) : 0;
    }
    s->room.pp = s->walk.pp;
    s->room.per_rank = s->walk.per_rank;
    s->room.slot_bytes = 4096;
    s->room.tied_bytes = zr_round_up(tied_bytes, 4096);
    if (!c->deterministic && c->accum > 1) { /* the last stage sums its micro-batches */
        s->room.tied_sum_bytes = zr_round_up(sum_bytes, 4096);
        s->room.n_summed = c->accum;
        s->room.n_tied = 1;
    }
}

/* ---- options ---- */

/* The default order if none is declared: every unit forward, then every unit backward, following the row.
 * zero/schedule.c does the same. */
static void assume_order(struct zr_verify_stage *s)
{
    int32_t n = 0;
    struct zero_call *order = calloc((size_t)(2 * s->layout->n_units * s->walk.step.n) + 1, sizeof *order);
    if (!order)
        abort();
    for (int64_t i = 0; i < s->walk.step.n; i++) {
        const struct zr_pipe_action *a = &s->walk.step.actions[i];
        enum zero_phase phase = zr_pipe_phase(a->kind);
        bool backward = zr_phase_is_backward(phase);
        int32_t first = s->first_unit[a->stage / s->walk.pp],
                units = s->first_unit[a->stage / s->walk.pp + 1] - first;
        for (int32_t k = 0; k < 2 * units && zr_pipe_computes(a->kind); k++)
            order[n++] = (struct zero_call){.unit = first + (backward ? 2 * units - 1 - k : k) / 2,
                                            .phase = (uint8_t)phase,
                                            .is_end = k & 1};
        if (zr_phase_has_grads(phase) && s->walk.per_rank > 1)
            order[n - 1].is_end = ZR_ENDS_ACTION;
    }
    s->script.order = order;
    s->script.n_order = n;
}

static void set_options(const struct zr_verify_world *v, struct zr_verify_stage *s)
{
    const struct zr_verify_case *c = v->c;
    bool assumed = zr_in_stages(c) && !s->script.n_order;
    if (assumed)
        assume_order(s);
    s->opt = (struct zr_options){.stage = c->stage,
                                 .hybrid = (enum zr_hybrid)c->hybrid,
                                 .dp_shard = c->group,
                                 .pp = c->pp,
                                 .tp = c->tp,
                                 .cp = c->cp,
                                 .n_optims = ZR_OPTIMIZER_COUNT,
                                 .clip = 1,
                                 .grad_scale = 1,
                                 .grad_accum_steps = c->accum,
                                 .prefetch = c->prefetch,
                                 .deterministic = c->deterministic,
                                 .grad_in_place = c->grad_in_place,
                                 .wire_dtype = c->wire_bf16 ? ZERO_BF16 : 0,
                                 .states = (enum zero_states)c->states,
                                 .part_elems = 256 << c->seed % 4, /* so that flats have several parts */
                                 .order = s->script.order,
                                 .n_order = s->script.n_order,
                                 .order_of_step = zr_in_stages(c),
                                 .order_assumed = assumed,
                                 .timeout_ms = 1000,
                                 .save_async = c->snapshots > 0};
    for (int kind = 1; kind < ZR_OPTIMIZER_COUNT; kind++) { /* one group per kind */
        const struct zr_optimizer_kind *row = zr_optimizer_kind((enum zero_optimizer)kind);
        s->opt.optim[kind] = (struct zr_optim){.optimizer = (enum zero_optimizer)kind,
                                               .lr_scale = 1,
                                               .beta1 = row->beta1,
                                               .beta2 = row->beta2,
                                               .eps = row->eps};
    }
    if (c->user_update) {
        s->opt.optim[ZR_OPTIMIZER_NONE].lr_scale = 1;
        s->opt.update = zr_rank_user_update;
    }
    if (zr_in_stages(c))
        s->opt.pipe_bytes = zr_pipe_room_bytes(&s->room);
    if (c->pp > 1)
        s->opt.tied_bytes = zr_tied_room_bytes(&s->room);
    int64_t all = 0;
    for (int32_t u = 0; u < s->layout->n_units; u++)
        all += s->layout->units[u].param_bytes;
    s->opt.param_budget_bytes = c->budget ? all * c->budget / 100 : -1;
    if (v->speed && v->speed->budget_bytes)
        s->opt.param_budget_bytes = v->speed->budget_bytes;
}

/* ---- opening and closing ---- */

int zr_stages_make(struct zr_verify_world *v)
{
    const struct zr_verify_case *c = v->c;
    int32_t n = zr_case_pp(c);
    int err = 0;
    v->stages = calloc((size_t)n, sizeof *v->stages);
    if (!v->stages)
        abort();
    for (int32_t s = 0; !err && s < n; s++) {
        v->stages[s].at = s;
        v->stages[s].walk =
            (struct zr_walk){.per_rank = zr_case_per_rank(c), .pp = n, .pp_at = s, .n_micro = c->accum};
        for (int32_t k = 0; k < zr_case_per_rank(c); k++)
            v->stages[s].first_unit[k + 1] = v->stages[s].first_unit[k] + zr_stage_units(c, k * n + s);
        err = zr_verify_layout(c, s, v->speed, &v->stages[s].layout);
    }
    if (!err && zr_in_stages(c))
        err = make_rows(v, false);
    if (!err && zr_in_stages(c))
        err = make_rows(v, true);
    for (int32_t s = 0; !err && s < n; s++) {
        struct zr_verify_stage *stage = &v->stages[s];
        set_room(stage, c);
        zr_mutant_change_rows(v, stage);
        err = zr_script_make(c, stage, &stage->script);
        if (err)
            break;
        set_options(v, stage);
        v->any_trained |= stage->layout->state_elems > 0;
        err = zr_plan_make(stage->layout, &stage->opt, &stage->plan);
    }
    return err;
}

void zr_stages_free(struct zr_verify_world *v)
{
    for (int32_t s = 0; v->stages && s < zr_case_pp(v->c); s++) {
        struct zr_verify_stage *stage = &v->stages[s];
        zr_plan_free(stage->plan);
        zr_layout_free(stage->layout);
        zr_script_free(&stage->script);
        free(stage->walk.step.actions);
        free(stage->walk.evaluation.actions);
    }
    free(v->stages);
}
