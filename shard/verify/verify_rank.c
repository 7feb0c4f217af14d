/* SPDX-License-Identifier: Apache-2.0 */
/* verify_rank.c: one rank of a case. It has the real engine, plan and core, a loop that the verifier drives,
 * and a model thread that makes the calls of the script. The model thread is a coroutine (ucontext). */
#include "shard/engine/check/observers.h"
#include "shard/verify/verify_world.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { STACK_BYTES = 96 << 10 };

/* ---- values ---- */

static void touch_values(struct zr_verify_rank *r, int32_t tensor, enum zr_sim_how how)
{
    const struct zr_layout *l = &r->layout;
    const struct zr_tensor *t = &l->tensors[tensor];
    for (int64_t s = 0; s < t->n_layers; s++) {
        int32_t id = l->piece_of[l->layer_base[tensor] + s];
        int64_t bytes = l->pieces[id].n * zr_dtype_bytes(t->dtype);
        struct zr_sim_touch touch = {r->scratch + s * bytes, bytes, how,
                                     zr_compute_expected_param(r, id, r->n_done)};
        zr_sim_host_touch(r->v->sim, how == ZR_SIM_READ ? "use of read values" : "new values", &touch, 1);
    }
}

struct written {
    struct zr_verify_rank *r;
    int32_t tensor;
};

static int settle_remainders(void *arg, const struct zr_flat *f, const struct zr_piece *p, int64_t first,
                             int64_t n)
{
    const struct written *w = arg;
    struct zr_verify_rank *r = w->r;
    if (p->tensor != w->tensor)
        return 0;
    struct zr_content content = zr_compute_expected_param(r, (int32_t)(p - r->layout.pieces), r->n_done);
    content.kind = ZR_CONTENT_STATE;
    int err = 0;
    for (int64_t end = first + n; !err && first < end; first += n) {
        n = end - first;
        err = zr_part_use(&r->engine, f, first, true, &n);
        if (err)
            break;
        content.first = first;
        void *at = zr_engine_master_at(&r->engine, f, first);
        const struct zr_sim_touch touch[] = {{at, n * content.size, ZR_SIM_READ, {.kind = ZR_CONTENT_ZERO}},
                                             {at, n * content.size, ZR_SIM_SET, content}};
        zr_sim_host_touch(r->v->sim, "remainders of new values", touch, 2);
    }
    return err;
}

/* Checks that a write of a tensor's parameters has zeroed the remainders of their masters. The remainders
 * then have the version of the parameters. */
static int written(struct zr_verify_rank *r, int32_t tensor, int err)
{
    struct written w = {r, tensor};
    const struct zr_layout *l = r->engine.layout; /* with a mutant it has other flats than r->layout */
    for (int32_t i = 0; !err && i < l->n_flats; i++) {
        const struct zr_flat *f = &l->flats[i];
        struct zr_span kept = zr_engine_kept(&r->engine, f);
        if (f->masters == ZERO_MASTERS_REMAINDER)
            err = zr_flat_ranges(l, f, kept.first, kept.first + kept.n, settle_remainders, &w);
    }
    return err ? err : zr_part_leave(&r->engine);
}

static double mean_rank(const struct zr_group *g)
{
    int64_t sum = 0;
    for (int32_t i = 0; i < g->size; i++)
        sum += zr_group_member(g, i);
    return (double)sum / g->size;
}

static int do_values(struct zr_verify_rank *r, const struct zr_script_op *op)
{
    int32_t tensor = op->kind == ZR_DO_MEAN ? 0 : op->index % r->layout.n_tensors;
    int64_t n = r->layout.tensors[tensor].n_elems;
    if (op->kind == ZR_DO_READ) {
        int err = zr_engine_read(&r->engine, tensor, ZR_VALUE_PARAM, 0, n, r->scratch);
        if (!err)
            touch_values(r, tensor, ZR_SIM_READ);
        return err;
    }
    if (op->kind == ZR_DO_WRITE && r->layout.tensors[tensor].tie != ZR_TIE_NONE)
        return 0; /* both stages must call: ZR_DO_WRITE_TIED */
    if (op->kind == ZR_DO_WRITE) {
        touch_values(r, tensor, ZR_SIM_SET);
        return written(r, tensor, zr_engine_write(&r->engine, tensor, ZR_VALUE_PARAM, 0, n, r->scratch));
    }
    struct zr_sim_touch touch = {r->mean, sizeof r->mean, ZR_SIM_PLAIN_WRITE, {0}};
    zr_sim_host_touch(r->v->sim, "new means", &touch, 1);
    r->mean[0] = r->id;
    r->mean[1] = 1;
    int err = zr_engine_mean(&r->engine, r->mean, 2);
    const struct zr_mesh *mesh = &r->v->mesh[r->id];
    int to_last = (mesh->pp - 1 - mesh->pp_rank) * (r->v->c->world / mesh->pp);
    double mean = mean_rank(&mesh->dp_group) + to_last;
    if (!err && (r->mean[0] != mean || r->mean[1] != 1))
        zr_report(zr_sim_recorder(r->v->sim), "rank %d: the mean of ranks came out as %g, not %g", r->id,
                  r->mean[0], mean);
    return err;
}

/* Both pipeline stages write the tensor; the owner's values are used. */
static int write_tied(struct zr_verify_rank *r)
{
    int err = 0;
    for (int32_t t = 0; !err && t < r->layout.n_tensors; t++) {
        const struct zr_tensor *of = &r->layout.tensors[t];
        if (of->tie == ZR_TIE_NONE)
            continue;
        touch_values(r, t, ZR_SIM_SET);
        if (of->tie == ZR_TIE_OWNER)
            err = written(r, t, zr_engine_write(&r->engine, t, ZR_VALUE_PARAM, 0, of->n_elems, r->scratch));
    }
    return err ? err : zr_engine_tied_values(&r->engine);
}

/* ---- the model's thread ---- */

/* The mean rank of the last pipeline stage, which has the loss. */
static double mean_carried(const struct zr_verify_case *c)
{
    int of_stage = c->world / (c->pp > 1 ? c->pp : 1);
    return c->world - of_stage + (of_stage - 1) / 2.0;
}

/* Follows zero_step and zero_drop: the next action is the first of a step. */
static void start_rows(struct zr_verify_rank *r)
{
    r->walk.at = 0;
    r->walk.open = false;
    memset(r->n_used, 0, (size_t)r->layout.n_units * sizeof *r->n_used);
}

static int do_step(struct zr_verify_rank *r, const struct zr_script_op *op)
{
    struct zero_step_info result;
    bool skips = zr_verify_skips(r, op->step);
    const double values[] = {r->id, 1};
    if (r->v->c->values)
        zr_engine_give(&r->engine, values, 2);
    int err = zr_engine_step(&r->engine, 0.1f, r->v->c->wait_result ? &result : NULL);
    if (err)
        return err;
    zr_verify_expect_norm(r);
    if (r->v->c->wait_result && r->v->c->values &&
        (result.n_carried != 2 || result.carried[0] != mean_carried(r->v->c) || result.carried[1] != 1))
        zr_report(zr_sim_recorder(r->v->sim), "rank %d: step %d carried %g and %g", r->id, op->step,
                  result.carried[0], result.carried[1]);
    if (r->v->c->wait_result && result.skipped != skips)
        zr_report(zr_sim_recorder(r->v->sim), "rank %d: step %d was %s", r->id, op->step,
                  skips ? "not skipped" : "skipped");
    for (int32_t u = 0; u < r->layout.n_units; u++)
        r->n_done[u] += !skips && (r->n_used[u] || r->of_stage->script.no_backward_brackets);
    start_rows(r);
    if (r->id == 0) {
        r->v->step_compute_ns = r->v->compute_ns;
        r->v->compute_ns = 0;
        r->v->step_span = r->v->span;
        r->v->span = (struct zr_verify_span){0};
    }
    r->step_from_ns = r->step_to_ns;
    r->step_to_ns = zr_sim_now(zr_sim_host(r->v->sim, r->id, ZR_SIM_MODEL));
    if (r->v->mutant && r->v->mutant->what == ZR_LESS_TIED_VALUES) {
        r->v->n_acted++;
        zr_tied_forget(&r->engine);
        return 0;
    }
    return zr_engine_tied_step(&r->engine);
}

static int do_norm(struct zr_verify_rank *r, const struct zr_script_op *op)
{
    double norm;
    int err = zr_engine_norm(&r->engine, &norm);
    if (!err)
        zr_verify_expect_norm(r);
    if (!err && isnan(norm) != zr_verify_skips(r, op->step))
        zr_report(zr_sim_recorder(r->v->sim), "rank %d: the norm of step %d is %g", r->id, op->step, norm);
    return err;
}

static int gather_all(struct zr_verify_rank *r)
{
    int err = zr_turn_agree(r, zr_engine_all_open(&r->engine, false));
    if (!err)
        return zr_engine_all_gather(&r->engine, 0);
    zr_engine_all_close(&r->engine);
    return err;
}

static int do_op(struct zr_verify_rank *r, const struct zr_script_op *op)
{
    static const char *const during[] = {
        "zero_begin",    "zero_end",         "compute",       "zero_micro",      "zero_step",
        "zero_read",     "zero_write",       "zero_write",    "zero_mean",       "zero_save",
        "compute",       "zero_norm",        "zero_drop",     "zero_gather_all", "zero_release_all",
        "zero_evaluate", "zero_next",        "activations",   "activations",     "zero_finish",
        "collective",    "zero_shift_begin", "zero_shift_end"};
    struct zr_line *l = zr_sim_host(r->v->sim, r->id, ZR_SIM_MODEL);
    struct zr_core_event ev = {.kind = op->kind == ZR_DO_BEGIN ? ZR_EV_BEGIN
                                       : op->kind == ZR_DO_END ? ZR_EV_END
                                                               : ZR_EV_MICRO,
                               .unit = op->index,
                               .phase = op->phase};
    const struct zr_mutant *m = r->v->mutant;
    l->during = during[op->kind];
    l->unit = op->kind <= ZR_DO_USE ? op->index : -1;
    l->step = (uint32_t)(op->step + (op->kind == ZR_DO_STEP || op->kind == ZR_DO_NORM)); /* as in jobs */
    if (m && m->what == ZR_LESS_CALL && m->action == op->kind && r->id == r->v->c->world - 1 &&
        op->index == 0 && op->step == 1) {
        r->v->n_acted++;
        return 0;
    }
    switch ((enum zr_script_op_kind)op->kind) {
    case ZR_DO_BEGIN:
    case ZR_DO_END:
    case ZR_DO_MICRO:
        return zr_engine_call(&r->engine, &ev);
    case ZR_DO_USE:
        return zr_compute_use(r, op);
    case ZR_DO_STEP:
        return do_step(r, op);
    case ZR_DO_SNAPSHOT:
        return zr_snapshot_take(r);
    case ZR_DO_ZERO:
        return zr_compute_zero_grads(r);
    case ZR_DO_NORM:
        return do_norm(r, op);
    case ZR_DO_GATHER_ALL:
        return gather_all(r);
    case ZR_DO_RELEASE_ALL:
        return zr_engine_all_release(&r->engine);
    case ZR_DO_DROP:
        start_rows(r);
        return zr_engine_drop(&r->engine);
    case ZR_DO_EVALUATE:
        r->walk.evaluates = true;
        r->walk.at = 0;
        return 0;
    case ZR_DO_NEXT:
        return zr_actions_next(r, op);
    case ZR_DO_TAKE:
    case ZR_DO_GIVE:
        return zr_actions_move(r, op);
    case ZR_DO_FINISH:
        return zr_actions_finish(r);
    case ZR_DO_COMBINE:
        return zr_verify_combine(r, op);
    case ZR_DO_SHIFT_BEGIN:
    case ZR_DO_SHIFT_END:
        return zr_verify_shift(r, op);
    case ZR_DO_WRITE_TIED:
        return write_tied(r);
    default:
        return do_values(r, op);
    }
}

/* Whether the error is a refusal by the core. A refusal changes nothing, is the same on all ranks, and ends
 * the run early. */
static bool is_refusal(const struct zr_verify_rank *r, const struct zr_script_op *op, int err)
{
    const struct zr_verify_case *c = r->v->c;
    bool uneven = c->skipped || c->repeats;
    bool room = c->declared && !c->changes && !c->skipped; /* every bracket has a slot */
    bool core = (err == ZERO_ERR_BUDGET && op->kind == ZR_DO_BEGIN && !room) ||
                (err == ZERO_ERR_ORDER && (op->kind == ZR_DO_STEP || op->kind == ZR_DO_NORM) && uneven) ||
                /* units without brackets */
                (err == ZERO_ERR_ORDER && op->kind == ZR_DO_DROP && c->unbracketed);
    return core && !zr_engine_has_failed(&r->engine);
}

/* Without groups, the engine opens none of the streams and events that only groups need. */
static void look_at_opened(struct zr_verify_rank *r)
{
    const struct zr_engine *e = &r->engine;
    int32_t units = r->layout.n_units, grads = units + r->plan.n_grad_slots;
    int32_t n = r->plan.n_param_slots + 2 * units + 2 * grads + 4; /* 4: events without an array */
    n += r->plan.file_bytes ? 4 : 0;
    if (!r->plan.spec.outer && (e->ev.n != n || e->gather_outer_stream || e->reduce_outer_stream))
        zr_report(zr_sim_recorder(r->v->sim), "rank %d opened %d events or streams that only groups need",
                  r->id, e->ev.n - n);
}

static int read_file(void *arg, void *buf, int64_t n, int64_t at)
{
    struct zr_verify_rank *r = arg;
    if (zr_mutant_reads_into_last(r))
        buf = r->last_buffer;
    r->last_buffer = buf;
    r->n_read += zr_sim_move(r->v->sim, buf, r->file + at, n);
    return 0;
}

static int write_file(void *arg, const void *buf, int64_t n, int64_t at)
{
    struct zr_verify_rank *r = arg;
    r->n_written += zr_sim_move(r->v->sim, r->file + at, buf, n);
    return 0;
}

static int wrap(struct zr_verify_rank *r)
{
    struct zr_verify_world *v = r->v;
    struct zr_options opt = r->of_stage->opt;
    opt.update_arg = r;
    struct zr_engine_parts parts = {.dev = zr_sim_device(v->sim, r->id),
                                    .plan = &r->plan,
                                    .opt = &opt,
                                    .loop = r->loop,
                                    .states = {read_file, write_file, r},
                                    .open_observers = zr_check_open_observers,
                                    .pipe_room = r->of_stage->room};
    for (int k = 0; k < ZR_ROLES; k++)
        parts.comm[k] = v->comm[k] ? v->comm[k][r->id] : NULL;
    zr_sim_host(v->sim, r->id, ZR_SIM_MODEL)->during = "zero_wrap";
    int err = zr_engine_open(&r->engine, &parts);
    r->engine_open = !err;
    err = zr_turn_agree(r, err);
    if (!err)
        err = zr_turn_agree(r, zr_engine_allocate(&r->engine));
    if (err)
        return err;
    look_at_opened(r);
    int64_t peak, held = zr_sim_held(v->sim, r->id, &peak);
    if (!v->lost && (peak != r->plan.total_bytes || held != peak))
        zr_report(zr_sim_recorder(v->sim), "rank %d holds %lld bytes, at most %lld; the plan says %lld",
                  r->id, (long long)held, (long long)peak, (long long)r->plan.total_bytes);
    zr_sim_speaker(v->sim)->during = "zero_wrap values";
    err = zr_engine_adopt(&r->engine, !v->by_symmetry);
    if (!err)
        err = zr_engine_tied_values(&r->engine);
    if (!err)
        zr_engine_point(&r->engine, true);
    return err;
}

/* Checks the elements of one piece. There is padding between pieces. */
static int expect_kept(void *arg, const struct zr_flat *f, const struct zr_piece *p, int64_t first, int64_t n)
{
    struct zr_verify_rank *r = arg;
    struct zr_content content = zr_compute_expected_param(r, (int32_t)(p - r->layout.pieces), r->n_done);
    content.first = first;
    struct zr_sim_touch touch = {zr_engine_param_at(&r->engine, f, first), n * content.size, ZR_SIM_READ,
                                 content};
    zr_sim_host_touch(r->v->sim, "look at what is kept", &touch, 1);
    return 0;
}

/* Checks that each part of the file that was read for an update was written once. */
static void look_at_file(struct zr_verify_rank *r)
{
    if (r->n_read != r->n_written)
        zr_report(zr_sim_recorder(r->v->sim), "rank %d read %lld parts of its file, and wrote %lld", r->id,
                  (long long)r->n_read, (long long)r->n_written);
}

/* Checks that the parameters that this rank keeps, its own and its peers', are those of the last step.
 * Nothing is in flight. */
static void look_at_kept(struct zr_verify_rank *r)
{
    struct zr_where at = zr_where_of(&r->plan.placement, r->engine.dp_rank);
    for (int32_t i = 0; i < r->layout.n_flats; i++) {
        const struct zr_flat *f = &r->layout.flats[i];
        struct zr_span kept = zr_flat_span(f, at, r->plan.resident[f->unit] ? ZR_LEVEL_ALL : ZR_LEVEL_INNER);
        zr_flat_ranges(&r->layout, f, kept.first, kept.first + kept.n, expect_kept, r);
    }
}

static void live(struct zr_verify_rank *r)
{
    struct zr_verify_world *v = r->v;
    int err = wrap(r);
    for (int32_t i = 0; !err && i < r->of_stage->script.n; i++) {
        zr_turn_dies(r);
        const struct zr_script_op *op = &r->of_stage->script.ops[i];
        err = do_op(r, op);
        r->n_calls = i + 1;
        if (err && is_refusal(r, op, err)) {
            r->refused = true;
            if (v->c->pp > 1) /* the other stages continue */
                zr_report(zr_sim_recorder(v->sim), "rank %d, stage %d: a call failed: %s", r->id,
                          r->of_stage->at, zr_error_text());
            err = 0;
            break;
        }
        if (!err && zr_verify_chance(&v->random, 40))
            zr_turn_give_way(r);
    }
    zr_sim_host(v->sim, r->id, ZR_SIM_MODEL)->during = "zero_unwrap";
    if (!err)
        err = zr_snapshot_end(r);
    if (!err)
        err = zr_engine_barrier(&r->engine);
    if (!err)
        look_at_kept(r);
    if (!err)
        look_at_file(r);
    if (!err)
        zr_verify_left_shifts(r);
    if (!err)
        r->received_bytes = zr_roles_wire_bytes(&r->engine) - r->engine.m.not_counted.wire;
    r->finished = !err;
    r->error = err;
}

static void enter(unsigned high, unsigned low)
{
    struct zr_verify_rank *r = (struct zr_verify_rank *)((uintptr_t)high << 32 | low);
    live(r);
    r->done = true;
    for (;;)
        swapcontext(&r->context, &r->v->scheduler);
}

/* ---- opening and closing ---- */

/* Allocates the model's values before zero_wrap. Only the first data-parallel rank allocates, since the
 * runtime uses its values. */
static void own_values(struct zr_verify_rank *r)
{
    struct zr_verify_world *v = r->v;
    const struct zr_layout *l = &r->layout;
    for (int32_t t = 0; !v->by_symmetry && t < l->n_tensors; t++) {
        const struct zr_tensor *x = &l->tensors[t];
        int64_t size = zr_dtype_bytes(x->dtype);
        r->own[t] = calloc((size_t)x->n_elems, (size_t)size);
        if (!r->own[t])
            abort();
        zr_sim_register(v->sim, r->id, x->name, r->own[t], x->n_elems * size);
        for (int64_t s = 0; s < x->n_layers; s++) {
            int32_t id = l->piece_of[l->layer_base[t] + s];
            int64_t bytes = l->pieces[id].n * size;
            zr_sim_mark(v->sim, r->own[t] + s * bytes, bytes, zr_compute_expected_param(r, id, NULL));
        }
    }
}

/* A mutant gives the engine a changed layout. */
static void show_engine(struct zr_verify_rank *r)
{
    const struct zr_layout *l = &r->layout;
    size_t tensors = (size_t)l->n_tensors * sizeof *l->tensors, flats = (size_t)l->n_flats * sizeof *l->flats;
    if (!r->v->mutant)
        return;
    r->shown = *l;
    r->shown.tensors = malloc(tensors);
    r->shown.flats = malloc(flats);
    if (!r->shown.tensors || !r->shown.flats)
        abort();
    memcpy(r->shown.tensors, l->tensors, tensors);
    memcpy(r->shown.flats, l->flats, flats);
    zr_mutant_change_layout(r->v, &r->shown);
    r->plan.layout = &r->shown;
}

int zr_rank_user_update(void *arg, const struct zero_update *u)
{
    struct zr_verify_rank *r = arg;
    struct zr_update k = {.n = u->n,
                          .master = u->master,
                          .grad = u->grad,
                          .state = {u->state[0], u->state[1]},
                          .param_dtype = ZERO_F32,
                          .grad_dtype = ZERO_F32,
                          .scalars = zr_engine_scalars(&r->engine)};
    zr_sim_user_update(r->v->sim, &k);
    return 0;
}

int zr_rank_open(struct zr_verify_world *v, int id)
{
    struct zr_verify_rank *r = &v->ranks[id],
                          *first = &v->ranks[v->by_symmetry ? 0 : zr_group_member(&v->mesh[id].dp_group, 0)];
    r->v = v;
    r->id = id;
    zr_stage_enter(v, r);
    const struct zr_layout *l = r->of_stage->layout;
    size_t n = (size_t)l->n_tensors;
    r->stuck_at = -1;
    r->pace = v->c->pace == ZR_PACE_MIXED ? (enum zr_verify_pace)zr_verify_below(&v->random, ZR_PACE_MIXED)
                                          : v->c->pace;
    r->layout = *l;
    r->plan = *r->of_stage->plan;
    r->plan.layout = &r->layout;
    r->tensors = malloc(n * sizeof *r->tensors);
    r->param = calloc(n, sizeof *r->param);
    r->grad = calloc(n, sizeof *r->grad);
    r->own = calloc(n, sizeof *r->own);
    r->n_used = calloc((size_t)l->n_units, sizeof *r->n_used);
    r->n_done = calloc((size_t)l->n_units, sizeof *r->n_done);
    r->n_saved = calloc((size_t)l->n_units, sizeof *r->n_saved);
    r->stack = malloc(STACK_BYTES);
    r->pushed = calloc(ZR_VERIFY_QUEUE, sizeof(struct zr_vclock *));
    int64_t largest = 1;
    for (size_t t = 0; t < n; t++)
        largest = zr_max(largest, l->tensors[t].n_elems * zr_dtype_bytes(l->tensors[t].dtype));
    r->file = r->plan.file_bytes ? malloc((size_t)r->plan.file_bytes) : NULL;
    r->scratch = v->c->values ? malloc((size_t)largest) : NULL;
    bool moves = v->c->tp > 1 || v->c->cp > 1;
    r->activations = moves ? malloc((size_t)zr_verify_axis_bytes()) : NULL;
    if (!r->tensors || !r->param || !r->grad || !r->own || !r->n_used || !r->n_done || !r->n_saved ||
        !r->stack || !r->pushed || (r->plan.file_bytes && !r->file) || (v->c->values && !r->scratch) ||
        (moves && !r->activations))
        abort();
    zr_sim_register(v->sim, id, "means", r->mean, sizeof r->mean);
    if (r->file) {
        zr_sim_register(v->sim, id, "file of states", r->file, r->plan.file_bytes);
        zr_sim_mark(v->sim, r->file, r->plan.file_bytes, (struct zr_content){.kind = ZR_CONTENT_ZERO});
    }
    if (r->scratch)
        zr_sim_register(v->sim, id, "values", r->scratch, largest);
    if (r->activations)
        zr_sim_register(v->sim, id, "activations", r->activations, zr_verify_axis_bytes());
    memcpy(r->tensors, l->tensors, n * sizeof *r->tensors);
    r->layout.tensors = r->tensors;
    if (r == first)
        own_values(r);
    for (size_t t = 0; t < n; t++) {
        r->tensors[t].param = &r->param[t];
        r->param[t] = first->own[t];
        if (r->tensors[t].grad)
            r->tensors[t].grad = &r->grad[t];
        if (r->tensors[t].tied_grad)
            r->tensors[t].tied_grad = &r->grad[t];
    }
    show_engine(r);
    /* A single rank that computes on the host has no loop. */
    if (v->c->world > 1 || !v->c->caller) {
        struct zr_loop_driver driver = {zr_turn_pushed, zr_turn_awaited, r};
        int err = zr_loop_open_driven(ZR_VERIFY_QUEUE, zr_turn_issue, r, &driver, &r->loop);
        if (err)
            return err;
    }
    getcontext(&r->context);
    r->context.uc_stack.ss_sp = r->stack;
    r->context.uc_stack.ss_size = STACK_BYTES;
    makecontext(&r->context, (void (*)(void))enter, 2, (unsigned)((uintptr_t)r >> 32),
                (unsigned)(uintptr_t)r);
    return 0;
}

void zr_ranks_close(struct zr_verify_world *v)
{
    for (int id = 0; v->ranks && id < v->n_ranks; id++) {
        struct zr_verify_rank *r = &v->ranks[id];
        if (!r->v)
            continue;
        zr_sim_kill(v->sim, id); /* nothing may run any more */
        zr_loop_close(r->loop, NULL, NULL);
        if (r->engine_open)
            zr_engine_close(&r->engine);
    }
    zr_groups_close(v);
    for (int id = 0; v->ranks && id < v->n_ranks; id++) {
        struct zr_verify_rank *r = &v->ranks[id];
        int64_t peak;
        if (r->v && zr_sim_held(v->sim, id, &peak))
            zr_report(zr_sim_recorder(v->sim), "rank %d left %lld bytes of device memory", id,
                      (long long)zr_sim_held(v->sim, id, &peak));
        for (int i = 0; r->pushed && i < ZR_VERIFY_QUEUE; i++)
            zr_vclock_drop(r->pushed[i]);
        zr_vclock_drop(r->complete);
        for (int32_t t = 0; r->own && t < r->layout.n_tensors; t++)
            free(r->own[t]);
        free(r->tensors);
        free(r->param);
        free(r->grad);
        free(r->own);
        free(r->n_used);
        free(r->n_done);
        free(r->n_saved);
        free(r->stack);
        free(r->pushed);
        free(r->file);
        free(r->scratch);
        free(r->activations);
        free(r->shown.tensors);
        free(r->shown.flats);
    }
    free(v->ranks);
}
