/* SPDX-License-Identifier: Apache-2.0 */
/* verify_run.c: runs a case. It opens the simulated world and its ranks, and lets the threads run in turn.
 * Then it checks that every rank ended as it should, and that each norm covered the right elements. */
#include "shard/verify/verify_world.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The first fine slice with trainable elements. Without granules this is 0, since no first slice is empty. */
static int32_t first_slice(const struct zr_layout *l)
{
    int64_t first;
    for (int32_t k = 0; k < l->world; k++)
        for (int32_t i = 0; i < l->n_flats; i++)
            if (l->flats[i].trainable && zr_flat_owned(&l->flats[i], k, &first))
                return k;
    return 0;
}

/* The first pipeline stage with trainable tensors. */
static const struct zr_verify_stage *first_trained(const struct zr_verify_world *v)
{
    const struct zr_verify_stage *first = v->stages;
    while (v->any_trained && !first->layout->state_elems)
        first++;
    return first;
}

/* Whether a gradient of this rank is not finite. Only elements that one rank of the first pipeline stage with
 * trainable tensors owns are affected. The other ranks learn of it by the agreement on the norm. */
static bool poisoned(void *arg, int rank, uint32_t step)
{
    const struct zr_verify_world *v = arg;
    const struct zr_verify_rank *r = &v->ranks[rank];
    const struct zr_verify_stage *first = first_trained(v);
    const struct zr_layout *l = first->layout;
    int32_t k = first_slice(l);
    return v->c->poison >= 0 && v->c->poison + 1 == (int)step && r->of_stage == first && r->tp_rank == 0 &&
           r->engine.dp_rank == k % l->outer * l->inner + k / l->outer;
}

/* Whether the step has gradients of the unit. */
static bool uses_unit(const struct zr_verify_rank *r, int32_t unit)
{
    return r->of_stage->script.no_backward_brackets || r->n_used[unit];
}

bool zr_verify_skips(const struct zr_verify_rank *r, int step)
{
    const struct zr_verify_stage *first = first_trained(r->v);
    const struct zr_layout *l = first->layout;
    int32_t k = first_slice(l), i = 0;
    int64_t at;
    if (r->v->c->poison != step)
        return false;
    /* Units are left out only where there is one pipeline stage, so this rank is in it. */
    while (i < l->n_flats && !(l->flats[i].trainable && zr_flat_owned(&l->flats[i], k, &at) &&
                               (r->of_stage != first || uses_unit(r, l->flats[i].unit))))
        i++;
    return i < l->n_flats;
}

static void squared(void *arg, int rank, int64_t n)
{
    struct zr_verify_world *v = arg;
    v->n_squared[v->by_symmetry ? 0 : zr_stage_class(v->c, rank)] += n;
}

/* Adds the elements that a norm must count: each element of the units in the step once. Split tensors count
 * on every tensor-parallel rank, replicated tensors only on the first. One rank of each class counts. */
void zr_verify_expect_norm(struct zr_verify_rank *r)
{
    struct zr_verify_world *v = r->v;
    const struct zr_layout *l = &r->layout;
    int class = v->by_symmetry ? 0 : zr_stage_class(v->c, r->id);
    for (int id = 0; id < r->id; id++)
        if (v->by_symmetry || zr_stage_class(v->c, id) == class)
            return;
    for (int32_t i = 0; i < l->n_pieces; i++) {
        const struct zr_tensor *t = &l->tensors[l->pieces[i].tensor];
        bool has = uses_unit(r, zr_piece_flat(l, i)->unit);
        v->n_expected[class] += t->grad && has && (t->cut || r->tp_rank == 0) ? l->pieces[i].n : 0;
    }
}

static void check_norms(struct zr_verify_world *v)
{
    const struct zr_verify_case *c = v->c;
    for (int32_t k = 0, n_tp = c->tp > 1 ? c->tp : 1; k < zr_case_pp(c) * n_tp; k++)
        if (v->n_squared[k] != v->n_expected[k])
            zr_report(zr_sim_recorder(v->sim), "stage %d, part %d: the norms have %lld elements, not %lld",
                      k / n_tp, k % n_tp, (long long)v->n_squared[k], (long long)v->n_expected[k]);
}

static void check_ends(struct zr_verify_world *v)
{
    const struct zr_verify_case *c = v->c;
    bool died = c->dead >= 0 && v->ranks[c->dead].dead;
    bool all_ended = true;
    for (int id = 0; id < v->n_ranks; id++) {
        all_ended &= v->ranks[id].finished;
        const struct zr_verify_rank *r = &v->ranks[id], *first = &v->ranks[id];
        while (first > v->ranks && first[-1].of_stage == r->of_stage)
            first--;
        if (!r->done)
            zr_report(zr_sim_recorder(v->sim), "rank %d never ended", id);
        else if (died                               ? !r->dead && !r->error
                 : c->fail_alloc && v->agreed_error ? r->error != ZERO_ERR_NOMEM
                                                    : r->error != 0)
            zr_report(zr_sim_recorder(v->sim), "rank %d ended with %d%s", id, r->error,
                      died ? " though a rank died" : "");
        else if (!died && (r->refused != first->refused || r->n_calls != first->n_calls))
            zr_report(zr_sim_recorder(v->sim), "rank %d stopped at call %lld, rank %d at call %lld", id,
                      (long long)r->n_calls, first->id, (long long)first->n_calls);
    }
    if (all_ended && !v->by_symmetry)
        check_norms(v);
    if (all_ended)
        zr_sim_order_end(v->order, v->sim);
}

static void set_speed(const struct zr_verify_world *v, struct zr_sim_options *o)
{
    const struct zr_verify_speed *speed = v->speed;
    o->ran = zr_time_ran;
    o->memory_bytes_per_s = speed->memory_bytes_per_s;
    o->states_bytes_per_s = speed->states_bytes_per_s;
    o->near_bytes_per_s = speed->near_bytes_per_s;
    o->far_bytes_per_s = speed->far_bytes_per_s;
    o->launch_ns = speed->launch_ns;
    o->near_ns = speed->near_ns;
    o->far_ns = speed->far_ns;
    o->ranks_per_node = speed->ranks_per_node;
    o->links = speed->rings ? ZR_SIM_LINKS_RING : ZR_SIM_LINKS_DIRECT;
}

static int open_sim(struct zr_verify_world *v)
{
    const struct zr_verify_case *c = v->c;
    /* Every rank has five streams. Pipelines add three for pairs of neighbours and one for tied tensors;
     * context parallelism adds one for shifts, and a file of states one for transfers. */
    struct zr_sim_options o = {.world = v->n_ranks,
                               .n_streams =
                                   5 + (c->pp > 1 ? 4 : 0) + (c->cp > 1) + (c->states == ZERO_STATES_FILE),
                               .compute_on_caller = c->caller,
                               .event_done = c->event_done,
                               .fail_alloc = c->fail_alloc,
                               .yield = zr_turn_yield,
                               .drop = v->mutant ? zr_mutant_drops : NULL,
                               .whole_grad = zr_stage_whole_grad,
                               .poisoned = poisoned,
                               .squared = squared,
                               .moves_arrays = c->arrays,
                               .contents_unknown = v->by_symmetry,
                               .arg = v};
    if (v->mutant && v->mutant->what == ZR_FLAWED_COMM) {
        o.comm_flaws = v->mutant->flaw;
        o.flawed_roles = v->mutant->roles;
    }
    if (v->speed)
        set_speed(v, &o);
    return zr_sim_open(&o, &v->sim);
}

static int open_world(struct zr_verify_world *v)
{
    int err = open_sim(v);
    v->ranks = calloc((size_t)v->n_ranks, sizeof *v->ranks);
    if (!v->ranks)
        abort();
    if (!err) {
        int32_t class_of[64];
        for (int id = 0; id < v->n_ranks && !v->by_symmetry; id++)
            class_of[id] = zr_stage_class(v->c, id);
        v->order = zr_sim_order_open(v->sim, v->by_symmetry ? NULL : class_of);
        err = v->order ? 0 : zr_fail(ZERO_ERR_NOMEM, "no memory for the order of collectives");
    }
    if (!err)
        err = zr_groups_open(v);
    for (int id = 0; !err && id < v->n_ranks; id++)
        err = zr_rank_open(v, id);
    return err;
}

static void add_up(const struct zr_verify_world *v, struct zr_verify_result *out)
{
    for (int id = 0; id < v->n_ranks; id++) {
        const struct zr_verify_rank *r = &v->ranks[id];
        out->n_calls += r->n_calls;
        out->action_hash = out->action_hash * 31 + r->action_hash;
        out->refused |= r->refused;
        out->died |= r->dead;
    }
    out->starved = v->agreed_error == ZERO_ERR_NOMEM;
    for (int32_t s = 0; s < (v->c->pp > 1 ? v->c->pp : 1); s++)
        out->reordered |= v->stages[s].script.reordered;
    out->n_snapshots = v->n_snapshots;
}

static struct zr_verify_time time_of(const struct zr_verify_world *v)
{
    int64_t peak, step_ns = v->ranks[0].step_to_ns - v->ranks[0].step_from_ns;
    const int64_t *bytes = v->stages[0].plan->bytes;
    const struct zr_verify_span *s = &v->step_span;
    zr_sim_held(v->sim, 0, &peak);
    return (struct zr_verify_time){
        .step_ns = step_ns,
        .compute_ns = v->step_compute_ns,
        .exposed_ns = step_ns - v->step_compute_ns,
        .bubble_ns = s->to_ns - s->from_ns - v->step_compute_ns,
        .norm_ns = s->norm_ns > s->to_ns ? s->norm_ns - s->to_ns : 0,
        .peak_bytes = peak,
        .states_bytes = v->c->states == ZERO_STATES_HOST ? bytes[ZR_MEM_MASTER] + bytes[ZR_MEM_MOMENTS] : 0,
        .received_bytes = v->ranks[0].received_bytes,
        .step_wire_bytes = v->stages[0].plan->traffic.wire_bytes,
        .step_outer_bytes = v->stages[0].plan->traffic.outer_bytes,
        .n_simulated = v->n_ranks,
        .plan_bytes = v->stages[0].plan->total_bytes};
}

/* Chooses the ranks to simulate. */
static int count_ranks(struct zr_verify_world *v)
{
    v->n_ranks = v->c->world;
    if (!v->by_symmetry)
        return 0;
    int err = zr_symmetry_make(v->c->world, v->stages[0].plan->hop[ZR_INNER].size, v->speed->ranks_per_node,
                               &v->symmetry);
    v->n_ranks = v->symmetry.n;
    return err;
}

static int run(struct zr_verify_world *v, struct zr_verify_result *out, struct zr_verify_time *time)
{
    int err = zr_stages_make(v);
    if (err == ZERO_ERR_BUDGET) { /* as zero_wrap refuses it */
        out->refused = err;
        return 0;
    }
    if (!err)
        err = count_ranks(v);
    if (!err)
        err = open_world(v);
    if (err)
        return err;
    zr_turns_take(v);
    check_ends(v);
    zr_trace_name_lines(v);
    add_up(v, out);
    if (time)
        *time = time_of(v);
    return 0;
}

int zr_verify_world_run(struct zr_verify_world *v, struct zr_verify_result *out, struct zr_verify_time *time)
{
    memset(out, 0, sizeof *out);
    v->random = v->c->seed ^ 0xa11ce;
    int err = run(v, out, time);
    if (v->sim) {
        zr_ranks_close(v);
        const struct zr_recorder *rec = zr_sim_recorder(v->sim);
        out->n_ops = rec->n_ops;
        out->n_accesses = rec->n_accesses;
        out->n_reports = rec->n_reports;
        out->n_acted = v->n_acted;
        snprintf(out->text, sizeof out->text, "%s", rec->first_report);
        if (rec->broken)
            err = zr_fail(ZERO_ERR_NOMEM, "no memory to keep a record of the case");
    }
    zr_sim_close(v->sim);
    zr_sim_order_close(v->order);
    zr_stages_free(v);
    zr_symmetry_free(&v->symmetry);
    return err;
}

int zr_verify_run(const struct zr_verify_case *c, const struct zr_mutant *mutant,
                  struct zr_verify_result *out)
{
    struct zr_verify_world v = {.c = c, .mutant = mutant};
    return zr_verify_world_run(&v, out, NULL);
}
