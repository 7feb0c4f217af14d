/* SPDX-License-Identifier: Apache-2.0 */
/* step.c: the step on the model's thread, and the calls that may come before it, zero_norm and zero_drop. It
 * also keeps the counts of steps, and the step's number for messages. */
#include "shard/engine/issue.h"
#include "shard/engine/mesh_axis.h"

#include <stdio.h>
#include <string.h>
#include <time.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

struct zr_steps {
    /* calls of zero_step since zero_wrap */
    uint32_t n_calls;
    /* added to n_calls for the number in messages, which goes on after a load */
    int64_t offset;
    /* steps that were begun, also before a load. Once the last one is settled, it is t + n_skipped. Noise
     * depends on it instead of t, which is not known before the last step is settled. */
    int64_t begun;
    /* states were loaded, so the next zero_step computes the offset anew */
    bool renumber;
    /* a zero_step is under way; n_calls counts it already */
    bool under_way;
    /* steps that updated weights, so skipped ones do not count; the optimizer's t */
    int64_t t;
    /* (n_units) steps that updated the unit, and were not skipped */
    int64_t *unit_t;
    /* (n_units) whether the step that is not read yet updates the unit, unless it is skipped */
    bool *updating;
    /* first unit that the last step left out; -1: none */
    int32_t left_out;
    int64_t n_skipped, n_dropped;
    /* the last step's outcome is not read yet */
    bool result_due;
    /* the program asked for that outcome, so a skipped step needs no warning */
    bool program_reads;
    /* outcome of the last step that was read, and the least of the numbers that ranks gave to
     * zr_engine_report_least before it */
    struct zero_step_info result;
    uint64_t least;
    float lr;
    /* norm of the step to come, once zero_norm asked for it */
    double norm;
    /* a zero_norm is under way, so jobs that are pushed belong to the step to come */
    bool in_norm;
    /* values that the next step carries, and those of the last step that was begun, which its job reads */
    struct zr_carried next, carried;
};

int zr_steps_open(struct zr_engine *e)
{
    ZR_TABLE(e, e->m.steps, 1);
    ZR_TABLE(e, e->m.steps->unit_t, e->layout->n_units);
    ZR_TABLE(e, e->m.steps->updating, e->layout->n_units);
    return 0;
}

/* ---- numbers and counts ---- */

uint32_t zr_step_calls(const struct zr_engine *e)
{
    return e->m.steps->n_calls;
}

uint32_t zr_last_step_number(const struct zr_engine *e)
{
    return (uint32_t)(e->m.steps->n_calls + e->m.steps->offset);
}

uint32_t zr_step_number(const struct zr_engine *e)
{
    return zr_last_step_number(e) + !e->m.steps->under_way;
}

const struct zero_step_info *zr_last_result(const struct zr_engine *e)
{
    return &e->m.steps->result;
}

void zr_steps_facts(const struct zr_engine *e, struct zr_engine_facts *out)
{
    const struct zr_steps *s = e->m.steps;
    out->n_steps = s->n_calls;
    out->last_step = zr_last_step_number(e);
    out->t = s->t;
    out->left_out = s->left_out;
    out->n_skipped = s->n_skipped;
    out->n_dropped = s->n_dropped;
}

void zr_engine_set_skipped(struct zr_engine *e, int64_t n)
{
    e->m.steps->n_skipped = n;
    e->m.steps->begun = e->m.steps->t + n;
}

uint64_t zr_engine_least(const struct zr_engine *e)
{
    return e->m.steps->least;
}

int zr_engine_set_step(struct zr_engine *e, int64_t t)
{
    int err = zr_engine_settle(e); /* the last step's outcome counts first */
    if (err)
        return err;
    e->m.steps->t = t;
    e->m.steps->begun = t + e->m.steps->n_skipped;
    for (int32_t u = 0; u < e->layout->n_units; u++)
        e->m.steps->unit_t[u] = t;
    e->m.steps->renumber = true; /* the next zero_step does this, because ranks may load at different times */
    zr_engine_change_tuned(e)->has_states = true;
    return 0;
}

int64_t zr_engine_unit_step(const struct zr_engine *e, int32_t unit)
{
    return e->m.steps->unit_t[unit];
}

void zr_engine_set_unit_step(struct zr_engine *e, int32_t unit, int64_t t)
{
    e->m.steps->unit_t[unit] = t;
}

void zr_engine_renumber(struct zr_engine *e, int64_t last)
{
    e->m.steps->offset = last - (int64_t)e->m.steps->n_calls;
    e->m.steps->renumber = false;
}

uint32_t zr_tuned_digest(const struct zr_engine *e, int32_t n_carried)
{
    const struct zr_tuned *now = zr_engine_tuned(e);
    const struct {
        double grad_scale;
        float clip;
        int32_t n_carried;
        int64_t grad_accum_steps;
        int64_t t; /* pipeline stages differ in it if only some of them have loaded states */
    } all = {now->grad_scale, now->clip, n_carried, now->grad_accum_steps, e->m.steps->t};
    uint64_t optims = XXH3_64bits(now->optim, (size_t)e->opt.n_optims * sizeof *now->optim);
    return (uint32_t)XXH3_64bits_withSeed(&all, sizeof all, optims);
}

/* Adds to a job what its action needs of the step: the numbers to update with, and the count of updates. */
void zr_steps_fill_job(struct zr_engine *e, struct zr_job *job, uint64_t number)
{
    struct zr_steps *s = e->m.steps;
    const struct zr_action *a = &job->action;
    job->lr = s->lr;
    job->begun = s->begun + !s->under_way;
    if (a->kind == ZR_ACT_NORM || a->kind == ZR_ACT_UPDATE) {
        job->tuned = zr_tuned_of_job(e, number);
        job->carried = &s->carried;
    }
    if (a->kind == ZR_ACT_NORM)
        job->compares_tp = zr_tp_compares(e, s->n_calls + !s->under_way);
    if (a->kind == ZR_ACT_LEAVE_OUT && s->left_out < 0)
        s->left_out = a->unit;
    if (a->kind == ZR_ACT_UPDATE) {
        job->t = s->unit_t[a->unit] + 1;
        s->updating[a->unit] = true;
    }
}

/* ---- waits, and the outcome of a step ---- */

/* Waits for an event of the device, and meanwhile for a failure of the context. */
int zr_engine_wait(struct zr_engine *e, struct zr_event *event)
{
    const struct zr_device_ops *d = e->dev->ops;
    const struct timespec nap = {.tv_nsec = 20000};
    /* In host memory event_sync asks for failures while it waits. Elsewhere it does not, so this polls
     * first. */
    int done = d->host_memory;
    for (int n = 0; !done; n++) {
        done = d->event_query(event);
        if (done < 0)
            return zr_engine_fail(e, done, zr_error_text());
        int err = done ? 0 : zr_engine_status(e);
        if (err)
            return err;
        if (!done && n > 1000)
            nanosleep(&nap, NULL);
    }
    int err = d->event_sync(event);
    return err ? zr_engine_fail(e, err, zr_error_text()) : zr_engine_status(e);
}

/* Fails the context because ranks made different calls. The communicator finds the first calls that differ,
 * if it can, and fails the context within its own time limit. */
static int compare_calls(struct zr_engine *e, const char *text)
{
    const struct timespec nap = {.tv_nsec = 20000};
    struct zr_comm *all = zr_widest_comm(e);
    if (!all->ops->compare)
        return zr_engine_fail(e, ZERO_ERR_MISMATCH, text);
    all->ops->compare(all, ZERO_ERR_MISMATCH, text);
    while (!zr_engine_status(e))
        nanosleep(&nap, NULL);
    return ZERO_ERR_MISMATCH;
}

/* Reports that ranks gave different values, which all ranks have found. The device left the weights alone on
 * every rank. */
static int fail_disagreement(struct zr_engine *e, const struct zr_agreed *a)
{
    uint32_t step = zr_last_step_number(e) + e->m.steps->in_norm;
    char text[256];
    if (a->differs & ZR_AGREE_INCOMPLETE) {
        /* rarely seen: the failure that ended the collective is usually reported instead */
        snprintf(text, sizeof text, "step %u: the ranks could not compare their results", step);
        return zr_engine_fail(e, ZERO_ERR_FAILED, text);
    }
    if (a->differs == UINT32_C(1) << ZR_AGREE_LR) {
        snprintf(text, sizeof text,
                 "step %u: lr is %.9g on rank %d and %.9g on rank %d; every rank must give the same", step,
                 (double)a->lr[0].lr, a->lr[0].rank, (double)a->lr[1].lr, a->lr[1].rank);
        return zr_engine_fail(e, ZERO_ERR_MISMATCH, text);
    }
    snprintf(
        text, sizeof text,
        "step %u: not all ranks made the same calls (zero_begin, zero_end, zero_norm, zero_tune ...) since "
        "zero_wrap",
        step);
    return compare_calls(e, text);
}

/* Waits for the last NORM job, which zero_step and zero_norm both issue, and reads what all ranks agreed
 * on. */
static int read_agreed(struct zr_engine *e)
{
    zr_jobs_await(e, zr_last_norm_job(e));
    ZR_TRY(zr_engine_wait(e, e->ev.step_norm));
    struct zr_access seen = {e->agreed, sizeof *e->agreed, false};
    zr_declare(e->dev, NULL, &seen, 1);
    if (!e->agreed->differs)
        return zr_observe_step(e, ZR_STEP_AGREED, NULL);
    fail_disagreement(e, e->agreed);
    return zr_engine_check(e);
}

/* Finds the rank that has `rank`'s replica and this rank's tp number, and returns its data-parallel place.
 * Returns e->dp if `rank` is in another pipeline stage. */
static int32_t dp_place_of(const struct zr_engine *e, int32_t rank)
{
    const struct zr_comm *control = e->role[ZR_ROLE_CONTROL].comm;
    int32_t like = rank - rank % e->tp + e->tp_rank, place = 0;
    while (place < e->dp && zr_comm_rank(control, place) != like)
        place++;
    return place;
}

/* Returns the name of the tensor whose reduced gradient `rank` has at position `at` of the arena, in units of
 * 2 bytes. Returns NULL if `rank` is in another pipeline stage. */
static const char *tensor_at(const struct zr_engine *e, int32_t rank, int64_t at)
{
    const struct zr_layout *l = e->layout;
    int32_t place = dp_place_of(e, rank);
    if (place == e->dp)
        return NULL;
    const struct zr_where where = zr_where_of(&e->plan->placement, place);
    for (int32_t i = 0; i < l->n_flats; i++) {
        const struct zr_flat *f = &l->flats[i];
        struct zr_span own = zr_flat_span(f, where, ZR_LEVEL_FINE); /* the rank's slice, in elements */
        const int64_t sum_at = zr_plan_sum(e->plan, f, where, 0) / 2;
        int64_t k = f->trainable && at >= sum_at ? (at - sum_at) * 2 / zr_sum_size(f) : -1;
        for (int32_t p = f->first_piece; k >= 0 && k < own.n && p < f->first_piece + f->n_pieces; p++)
            if (own.first + k >= l->pieces[p].first && own.first + k < l->pieces[p].first + l->pieces[p].n)
                return l->tensors[l->pieces[p].tensor].name;
    }
    return NULL;
}

/* Warns with the same text on every rank of a pipeline stage. Ranks of other stages do not know the tensor's
 * name. */
static void report_skipped(const struct zr_engine *e, const struct zr_agreed *a)
{
    int32_t rank = zr_largest_rank(a->largest);
    const char *name = tensor_at(e, rank, zr_largest_at(a->largest));
    char of[128];
    if (name)
        snprintf(of, sizeof of, "tensor %.80s", name);
    else
        snprintf(of, sizeof of, "a tensor of pipeline stage %d", rank / (e->n_all / e->pp));
    if (a->too_large)
        zr_warn(e->opt.log,
                "step %u was skipped: the gradient's norm is %.3g, and above %.3g the update overflows "
                "float; the largest part is the gradient of %s in the shard of rank %d; no rank updated its "
                "weights; see info of zero_step, and zero_get_stats for the count",
                zr_last_step_number(e), a->grad_norm, a->most_norm, of, rank);
    else
        zr_warn(e->opt.log,
                "step %u was skipped: the reduced gradient of %s is not finite in the shard of rank %d; no "
                "rank updated its weights; see info of zero_step, and zero_get_stats for the count",
                zr_last_step_number(e), of, rank);
}

/* Waits for the outcome of the last step, if it is not read yet, and counts it. The counts of updates, t and
 * unit_t, depend on whether the step was skipped. */
int zr_engine_settle(struct zr_engine *e)
{
    if (!e->m.steps->result_due)
        return 0;
    int err = read_agreed(e);
    const struct zr_agreed *a = e->agreed;
    e->m.steps->result_due = false;
    if (err)
        return err;
    e->m.steps->result =
        (struct zero_step_info){.grad_norm = a->grad_norm, .clipped = a->clipped, .skipped = a->skipped};
    e->m.steps->result.n_carried = e->m.steps->carried.n;
    _Static_assert(sizeof e->m.steps->result.carried == sizeof a->carried, "as many values");
    memcpy(e->m.steps->result.carried, a->carried, (size_t)e->m.steps->carried.n * sizeof *a->carried);
    if (a->skipped && !e->m.steps->program_reads && e->m.steps->n_skipped == 0)
        report_skipped(e, a);
    e->m.steps->t += !a->skipped;
    for (int32_t u = 0; u < e->layout->n_units; u++) {
        e->m.steps->unit_t[u] += e->m.steps->updating[u] && !a->skipped;
        e->m.steps->updating[u] = false;
    }
    e->m.steps->n_skipped += a->skipped;
    e->m.steps->result.t = e->m.steps->t;
    e->m.steps->least = a->least;
    err = zr_observe_step(e, ZR_STEP_SETTLED, NULL);
    if (!err)
        return 0;
    zr_engine_fail(e, err, zr_error_text());
    return zr_engine_check(e);
}

int zr_engine_norm(struct zr_engine *e, double *norm)
{
    ZR_TRY(zr_engine_check(e));
    ZR_TRY(zr_engine_settle(e));
    *norm = e->m.steps->norm;
    if (zr_core_complete(e->m.core) && zr_core_open_unit(e->m.core) < 0)
        return 0; /* the norm was asked for already */
    ZR_TRY(zr_observe_step(e, ZR_STEP_CALLED, "zero_norm"));
    e->m.steps->lr = 0; /* NORM compares lr over ranks, and zero_norm has none */
    e->m.steps->carried.n = 0;
    ZR_TRY(zr_engine_note(e, e->dev->ops->event_record(e->ev.step_compute, e->compute)));
    e->m.steps->in_norm = true;
    /* NORM and STEP carry a number for the hash of calls in the field unit (struct zr_core_event). */
    struct zr_core_event ev = {.kind = ZR_EV_NORM, .unit = (int32_t)zr_tuned_digest(e, 0)};
    int err = zr_engine_call(e, &ev);
    if (!err)
        err = read_agreed(e);
    e->m.steps->in_norm = false;
    if (err)
        return err;
    *norm = e->m.steps->norm = e->agreed->grad_norm;
    return zr_observe_step(e, ZR_STEP_NORM_KNOWN, NULL);
}

int zr_engine_drop(struct zr_engine *e)
{
    ZR_TRY(zr_engine_check(e));
    ZR_TRY(zr_engine_settle(e));
    ZR_TRY(zr_engine_call(e, &(struct zr_core_event){.kind = ZR_EV_DROP, .unit = -1}));
    ZR_TRY(zr_observe_step(e, ZR_STEP_DROPPED, NULL));
    zr_tied_forget(e);
    e->m.steps->n_dropped++;
    e->m.steps->next.n = 0;
    return 0;
}

void zr_engine_give(struct zr_engine *e, const double *values, int32_t n)
{
    if (n)
        memcpy(e->m.steps->next.value, values, (size_t)n * sizeof *values);
    e->m.steps->next.n = n;
}

int zr_engine_last(struct zr_engine *e, bool *known, struct zero_step_info *result)
{
    int err = 0;
    *known = !e->m.steps->result_due;
    if (e->m.steps->result_due && (!e->loop || zr_loop_issued(e->loop, zr_last_norm_job(e)))) {
        int done = e->dev->ops->event_query(e->ev.step_norm);
        *known = done > 0;
        err = done < 0 ? zr_engine_fail(e, done, zr_error_text()) : 0;
    }
    e->m.steps->program_reads |= *known;
    if (!err && *known)
        err = zr_engine_settle(e);
    if (!err && *known)
        *result = e->m.steps->result;
    return err;
}

/* Hands the call to the schedule's core as zr_engine_call does. Once the core has taken it, and before its
 * actions become jobs, the step is counted and the numbers that its jobs read are set. */
static int make_step(struct zr_engine *e, float lr, struct zero_step_info *result)
{
    int32_t n;
    ZR_TRY(zr_engine_check(e));
    ZR_TRY(zr_engine_settle(e));
    struct zr_core_event ev = {.kind = ZR_EV_STEP, .unit = (int32_t)zr_tuned_digest(e, e->m.steps->next.n)};
    ZR_TRY(zr_pointers_check(e, &ev));
    ZR_TRY(zr_observe_step(e, ZR_STEP_CALLED, "zero_step"));
    ZR_TRY(zr_core_take(e->m.core, &ev, e->m.actions, &n));
    zr_model_called(e, &ev);
    e->m.steps->n_calls++;
    e->m.steps->begun++;
    e->m.steps->under_way = true;
    if (e->m.steps->renumber)
        zr_engine_renumber(e, e->m.steps->t + 1);
    e->m.steps->left_out = -1;
    e->m.steps->lr = lr;
    e->m.steps->carried = e->m.steps->next;
    e->m.steps->next.n = 0;
    zr_observe_call(e, "zero_step", -1, "", zr_step_number(e));
    ZR_TRY(zr_observe_step(e, ZR_STEP_BEGUN, NULL));
    zr_timeline_begin(e->timeline, ZR_TRACK_MODEL, ZR_SPAN_STEP, -1, zr_step_number(e));
    ZR_TRY(zr_engine_note(e, e->dev->ops->event_record(e->ev.step_compute, e->compute)));
    int err = zr_model_act(e, n);
    int reported = zr_observe_step(e, ZR_STEP_ISSUED, NULL);
    err = err ? err : reported;
    e->m.steps->result_due = true;
    e->m.steps->program_reads = result != NULL;
    if (!err && result) {
        err = zr_engine_settle(e);
        *result = e->m.steps->result;
    }
    zr_timeline_end(e->timeline, ZR_TRACK_MODEL, ZR_SPAN_STEP, -1);
    return err;
}

int zr_engine_step(struct zr_engine *e, float lr, struct zero_step_info *result)
{
    int err = make_step(e, lr, result);
    e->m.steps->under_way = false;
    return err;
}

int zr_engine_end_step(struct zr_engine *e)
{
    ZR_TRY(zr_tp_compare_partial(e));
    ZR_TRY(zr_compare_gradients(e));
    return zr_observe_step(e, ZR_STEP_OVER, NULL);
}

/* Waits for all work on a stream. s may be NULL. */
static int drain_stream(struct zr_engine *e, struct zr_stream *s)
{
    const struct zr_device_ops *d = e->dev->ops;
    if (!s)
        return 0;
    if (d->host_memory)
        return zr_engine_note(e, d->stream_sync(s));
    ZR_TRY(zr_engine_note(e, d->event_record(e->ev.drained, s)));
    return zr_engine_wait(e, e->ev.drained);
}

int zr_engine_drain(struct zr_engine *e)
{
    zr_engine_await_jobs(e);
    ZR_TRY(drain_stream(e, e->gather_stream));
    ZR_TRY(drain_stream(e, e->gather_outer_stream));
    ZR_TRY(drain_stream(e, e->reduce_outer_stream));
    ZR_TRY(drain_stream(e, e->reduce_stream));
    ZR_TRY(drain_stream(e, e->states_stream));
    for (int pair = 0; pair < ZR_PAIR_ROLES; pair++)
        ZR_TRY(drain_stream(e, e->pair_stream[pair]));
    ZR_TRY(drain_stream(e, e->tied_stream));
    ZR_TRY(drain_stream(e, e->m.cp_axis->shift_stream));
    ZR_TRY(drain_stream(e, e->compute));
    /* A step that ranks did not agree on is found here at the latest. */
    ZR_TRY(zr_engine_check(e));
    ZR_TRY(zr_part_leave(e));
    return zr_engine_settle(e);
}
