/* verify_run.c: a case: the simulated world below its ranks, what the world's gradients must add up to, and
 * whether everyone ended as it should. */
#include "shard/verify/verify_world.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static struct zr_content whole_grad(void *arg, int32_t flat, uint32_t step)
{
    const struct zr_verify_world *v = arg;
    struct zr_content content = {.kind = ZR_CONTENT_GRAD, .size = sizeof(float), .flat = flat};
    if (v->by_symmetry || flat < 0 || flat >= v->layout->n_flats || step < 1 || (int)step > v->c->n_steps)
        return content;
    int32_t n = v->script.n_contrib[((int)step - 1) * v->c->n_units + v->layout->flats[flat].unit];
    for (int r = 0; r < v->c->world; r++)
        for (int32_t k = 0; k < n; k++)
            content.value += zr_sim_share(r, step - 1, flat, k);
    content.n = n * v->c->world;
    return content;
}

/* The place that owns the first trained elements: without granules place 0, as no first slice is empty. */
static int32_t first_owner(const struct zr_layout *l)
{
    int64_t first;
    for (int32_t k = 0; k < l->world; k++)
        for (int32_t i = 0; i < l->n_flats; i++)
            if (l->flats[i].trainable && zr_flat_owned(&l->flats[i], k, &first))
                return k % l->outer * l->inner + k / l->outer;
    return 0;
}

/* In what one rank owns alone, so that the others have it from the agreement. */
static bool poisoned(void *arg, int rank, uint32_t step)
{
    const struct zr_verify_world *v = arg;
    return v->c->poison >= 0 && v->c->poison + 1 == (int)step &&
           v->ranks[rank].engine.place == first_owner(v->layout);
}

static int user_update(void *arg, const struct zr_user_update *u)
{
    struct zr_verify_rank *r = arg;
    struct zr_update k = {.n = u->n,
                          .master = u->master,
                          .grad = u->grad,
                          .state = {u->state[0], u->state[1]},
                          .param_dtype = ZR_F32,
                          .scalars = zr_engine_scalars(&r->engine)};
    zr_sim_user_update(r->v->sim, &k);
    return 0;
}

static void set_options(struct zr_verify_world *v)
{
    const struct zr_verify_case *c = v->c;
    v->opt = (struct zr_options){.stage = c->stage,
                                 .hybrid = (enum zr_hybrid)c->hybrid,
                                 .shard_group = c->group,
                                 .optimizer = c->sgd ? ZR_SGD : ZR_ADAMW,
                                 .clip = 1,
                                 .grad_scale = 1,
                                 .grad_accum_steps = c->accum,
                                 .prefetch = c->prefetch,
                                 .deterministic = c->deterministic,
                                 .grad_in_place = c->grad_in_place,
                                 .wire_dtype = c->wire_bf16 ? ZR_BF16 : 0,
                                 .order = v->script.order,
                                 .n_order = v->script.n_order,
                                 .timeout_ms = 1000,
                                 .save_async = c->snapshots > 0};
    for (int kind = 1; kind < ZR_OPTIMIZER_COUNT; kind++) {
        const struct zr_optimizer_kind *row = zr_optimizer_kind((enum zr_optimizer)kind);
        v->opt.hyper[kind] = (struct zr_hyper){.beta1 = row->beta1, .beta2 = row->beta2, .eps = row->eps};
    }
    if (c->user_update) {
        v->opt.optimizer = 0;
        v->opt.update = user_update;
        v->opt.n_states = 2;
    }
    int64_t all = 0;
    for (int32_t u = 0; u < v->layout->n_units; u++)
        all += v->layout->units[u].param_bytes;
    v->opt.param_budget_bytes = c->budget ? all * c->budget / 100 : -1;
    if (v->speed && v->speed->budget_bytes)
        v->opt.param_budget_bytes = v->speed->budget_bytes;
}

/* Did everyone end as it should? */
static void check_ends(struct zr_verify_world *v)
{
    const struct zr_verify_case *c = v->c;
    const struct zr_verify_rank *first = &v->ranks[0];
    bool died = c->dead >= 0 && v->ranks[c->dead].dead;
    for (int id = 0; id < v->n_ranks; id++) {
        const struct zr_verify_rank *r = &v->ranks[id];
        if (!r->done)
            zr_report(zr_sim_recorder(v->sim), "rank %d never ended", id);
        else if (died                               ? !r->dead && !r->error
                 : c->fail_alloc && v->agreed_error ? r->error != ZR_ERR_NOMEM
                                                    : r->error != 0)
            zr_report(zr_sim_recorder(v->sim), "rank %d ended with %d%s", id, r->error,
                      died ? " though a rank died" : "");
        else if (!died && (r->refused != first->refused || r->n_calls != first->n_calls))
            zr_report(zr_sim_recorder(v->sim), "rank %d stopped at call %lld, rank 0 at call %lld", id,
                      (long long)r->n_calls, (long long)first->n_calls);
    }
}

/* The model's script, and the plan for it. */
static int plan_model(struct zr_verify_world *v)
{
    int err = zr_script_make(v->c, &v->script);
    if (!err)
        err = zr_verify_layout(v->c, v->speed, &v->layout);
    if (err)
        return err;
    set_options(v);
    return zr_plan_make(v->layout, &v->opt, &v->plan);
}

static void set_speed(const struct zr_verify_world *v, struct zr_sim_options *o)
{
    const struct zr_verify_speed *speed = v->speed;
    o->ran = v->trace ? zr_trace_ran : NULL;
    o->memory_bytes_per_s = speed->memory_bytes_per_s;
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
    struct zr_sim_options o = {.world = v->n_ranks,
                               .compute_on_caller = c->caller,
                               .event_done = c->event_done,
                               .fail_alloc = c->fail_alloc,
                               .yield = zr_turn_yield,
                               .drop = v->mutant ? zr_mutant_drops : NULL,
                               .whole_grad = whole_grad,
                               .poisoned = poisoned,
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

/* The simulated world and its ranks. */
static int open_world(struct zr_verify_world *v)
{
    int err = open_sim(v);
    v->ranks = calloc((size_t)v->n_ranks, sizeof *v->ranks);
    if (!v->ranks)
        abort();
    if (!err) {
        v->order = zr_sim_order_open(v->sim, NULL);
        err = v->order ? 0 : zr_fail(ZR_ERR_NOMEM, "no memory for the order of collectives");
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
    out->starved = v->agreed_error == ZR_ERR_NOMEM;
    out->reordered = v->script.reordered;
    out->n_snapshots = v->n_snapshots;
}

static struct zr_verify_time time_of(const struct zr_verify_world *v)
{
    int64_t peak, step_ns = v->ranks[0].step_to_ns - v->ranks[0].step_from_ns;
    zr_sim_held(v->sim, 0, &peak);
    return (struct zr_verify_time){.step_ns = step_ns,
                                   .compute_ns = v->step_compute_ns,
                                   .exposed_ns = step_ns - v->step_compute_ns,
                                   .peak_bytes = peak,
                                   .received_bytes = v->ranks[0].received_bytes,
                                   .step_wire_bytes = v->plan->traffic.wire_bytes,
                                   .step_outer_bytes = v->plan->traffic.outer_bytes,
                                   .n_simulated = v->n_ranks,
                                   .plan_bytes = v->plan->total_bytes};
}

/* Who is simulated. */
static int count_ranks(struct zr_verify_world *v)
{
    v->n_ranks = v->c->world;
    if (!v->by_symmetry)
        return 0;
    int err =
        zr_symmetry_make(v->c->world, v->plan->hop[ZR_INNER].size, v->speed->ranks_per_node, &v->symmetry);
    v->n_ranks = v->symmetry.n;
    return err;
}

static int run(struct zr_verify_world *v, struct zr_verify_result *out, struct zr_verify_time *time)
{
    int err = plan_model(v);
    if (err == ZR_ERR_BUDGET) { /* as zero_wrap refuses it */
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
        out->n_unmatched = v->n_acted;
        snprintf(out->text, sizeof out->text, "%s", rec->first_report);
        if (rec->broken)
            err = zr_fail(ZR_ERR_NOMEM, "no memory to keep a record of the case");
    }
    zr_sim_close(v->sim);
    zr_sim_order_close(v->order);
    zr_plan_free(v->plan);
    zr_layout_free(v->layout);
    zr_script_free(&v->script);
    zr_symmetry_free(&v->symmetry);
    return err;
}

int zr_verify_run(const struct zr_verify_case *c, const struct zr_mutant *mutant,
                  struct zr_verify_result *out)
{
    struct zr_verify_world v = {.c = c, .mutant = mutant};
    return zr_verify_world_run(&v, out, NULL);
}
