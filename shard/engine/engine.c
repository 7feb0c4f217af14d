/* engine.c: opens and closes an engine, keeps its first failure, and knows the address of every element it
 * holds. */
#include "shard/engine/engine.h"
#include "comm/fork.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- addresses ---- */

int zr_flat_ranges(const struct zr_layout *l, const struct zr_flat *f, int64_t lo, int64_t hi, zr_range_fn fn,
                   void *arg)
{
    for (int32_t k = 0; k < f->n_pieces; k++) {
        const struct zr_piece *p = &l->pieces[f->first_piece + k];
        int64_t from = zr_max(lo, p->first), to = zr_min(hi, p->first + p->n);
        if (from >= to)
            continue;
        int err = fn(arg, f, p, from, to - from);
        if (err)
            return err;
    }
    return 0;
}

int64_t zr_engine_kept(const struct zr_engine *e, const struct zr_flat *f, int64_t *first)
{
    if (zr_level_of(e->plan->place.state) != ZR_LEVEL_ALL)
        return zr_flat_owned(f, e->rank, first);
    *first = 0;
    return f->total_bytes / zr_dtype_bytes(f->dtype);
}

char *zr_engine_param_at(const struct zr_engine *e, const struct zr_flat *f, int64_t first)
{
    int64_t size = zr_dtype_bytes(f->dtype);
    if (e->plan->resident[f->unit])
        return e->gather_base + zr_plan_param_full(e->plan, f, -1) + first * size;
    int64_t own;
    zr_flat_owned(f, e->rank, &own);
    return e->gather_base + zr_plan_param_own(e->plan, f, e->rank) + (first - own) * size;
}

float *zr_engine_master_at(const struct zr_engine *e, const struct zr_flat *f, int64_t first)
{
    int64_t at = e->plan->master_at[f - e->layout->flats], kept;
    if (at < 0)
        return (float *)zr_engine_param_at(e, f, first);
    zr_engine_kept(e, f, &kept);
    return e->master + at + (first - kept);
}

float *zr_engine_state_at(const struct zr_engine *e, const struct zr_flat *f, int i, int64_t first)
{
    int64_t kept;
    zr_engine_kept(e, f, &kept);
    return e->state[i] + e->plan->state_at[i * e->layout->n_flats + (f - e->layout->flats)] + (first - kept);
}

/* ---- failure ---- */

static const char found_by[] = " (found by rank ";

/* The other ranks are told as a communicator that has a place for it tells them: with the one that found it.
 */
static void report_others(struct zr_engine *e, int code, const char *text)
{
    char reported[ZR_ERROR_BYTES / 2];
    if (!e->on_fail)
        return;
    if (strstr(text, found_by))
        snprintf(reported, sizeof reported, "%s", text);
    else
        snprintf(reported, sizeof reported, "%.*s%s%d)", (int)sizeof reported - 40, text, found_by, e->rank);
    e->on_fail(e->on_fail_arg, code, reported);
}

int zr_engine_fail(struct zr_engine *e, int code, const char *text)
{
    uv_mutex_lock(&e->fail_lock);
    bool first = !atomic_load(&e->failed);
    if (first) {
        strncpy(e->fail_text, text, sizeof e->fail_text - 1);
        atomic_store(&e->failed, code);
    }
    uv_mutex_unlock(&e->fail_lock);
    if (first) {
        e->gather->ops->abort(e->gather, code, text);
        e->reduce->ops->abort(e->reduce, code, text);
        report_others(e, code, text);
    }
    return code;
}

/* A failure that goes from one communicator to the other on its way around the ranks gains a finder each
 * time. The first found it, and need not be told so. */
static void keep_first_finder(char *why, int rank)
{
    char *finder = strstr(why, found_by), *end = finder ? strchr(finder, ')') : NULL;
    if (end)
        end[1] = 0;
    if (end && atoi(finder + strlen(found_by)) == rank)
        *finder = 0;
}

/* Nothing has failed that anyone knows of, on any rank: what every call of the model asks, twice. */
static bool is_well(const struct zr_engine *e)
{
    return !atomic_load_explicit(&e->failed, memory_order_acquire) &&
           !atomic_load_explicit(e->gather->alarm, memory_order_acquire) &&
           !atomic_load_explicit(e->reduce->alarm, memory_order_acquire);
}

static int ask_comms(struct zr_engine *e, char *why, size_t n_why)
{
    int code = e->gather->ops->status(e->gather, why, n_why);
    return code ? code : e->reduce->ops->status(e->reduce, why, n_why);
}

void zr_engine_remote_failure(struct zr_engine *e, int code, const char *text)
{
    char why[ZR_ERROR_BYTES];
    int known = ask_comms(e, why, sizeof why);
    if (known && known != ZR_ERR_PEER)
        code = known;
    else
        snprintf(why, sizeof why, "%s", text);
    keep_first_finder(why, e->rank);
    zr_engine_fail(e, code, why);
}

int zr_engine_status(struct zr_engine *e)
{
    if (is_well(e))
        return 0;
    int code = atomic_load_explicit(&e->failed, memory_order_acquire);
    char why[ZR_ERROR_BYTES];
    if (!code) {
        code = ask_comms(e, why, sizeof why);
        if (!code)
            return 0;
        keep_first_finder(why, e->rank);
        zr_engine_fail(e, code, why);
    }
    uv_mutex_lock(&e->fail_lock);
    code = atomic_load(&e->failed);
    zr_fail(code, "rank %d: %s", e->rank, e->fail_text);
    uv_mutex_unlock(&e->fail_lock);
    return code;
}

int zr_engine_check_process(const struct zr_engine *e)
{
    if (e->forks == zr_fork_depth())
        return 0;
    return zr_fail(
        ZR_ERR_ORDER,
        "this process was forked from process %d, which called zero_wrap: only that one may use the "
        "context (the threads that carry it out are there)",
        e->pid);
}

int zr_engine_check(struct zr_engine *e)
{
    int err = zr_engine_check_process(e);
    if (!err)
        err = zr_engine_status(e);
    if (err || !e->watch)
        return err;
    int code = zr_model_check_look(e);
    if (!code)
        return 0;
    zr_engine_fail(e, code, zr_error_text());
    return zr_engine_status(e);
}

/* ---- opening ---- */

static int open_events(struct zr_engine *e)
{
    const struct zr_plan *p = e->plan;
    int32_t units = e->layout->n_units, params = p->n_param_slots, places = units + p->n_grad_slots;
    int32_t n = params + 2 * units + 2 * places + 4;
    e->events = calloc((size_t)n, sizeof *e->events);
    e->grad_job = calloc((size_t)places, sizeof *e->grad_job);
    if (!e->events || !e->grad_job)
        return zr_fail(ZR_ERR_NOMEM, "no memory for %d events", n);
    for (; e->n_events < n; e->n_events++) {
        int err = e->dev->ops->event_open(e->dev, &e->events[e->n_events]);
        if (err)
            return err;
    }
    struct zr_event **at = e->events;
    e->param_free = at;
    e->ready = at += params;
    e->updated = at += units;
    e->grad_done = at += units;
    e->grad_free = at += places;
    at += places;
    e->step_compute = at[0];
    e->gather_tail = at[1];
    e->step_norm = at[2];
    e->drained = at[3];
    return 0;
}

static int open_tables(struct zr_engine *e)
{
    size_t units = (size_t)e->layout->n_units, tensors = (size_t)e->layout->n_tensors;
    size_t flats = (size_t)e->layout->n_flats;
    e->core = malloc(zr_core_bytes(&e->plan->spec));
    e->actions = malloc((size_t)zr_core_max_actions(&e->plan->spec) * sizeof *e->actions);
    e->unit_job = calloc(units, sizeof *e->unit_job);
    e->reported_param = calloc(tensors, sizeof *e->reported_param);
    e->reported_grad = calloc(tensors, sizeof *e->reported_grad);
    e->n_shown_param = calloc(tensors, sizeof *e->n_shown_param);
    e->n_shown_grad = calloc(tensors, sizeof *e->n_shown_grad);
    e->param_shown = calloc(units, sizeof *e->param_shown);
    e->grad_shown = calloc(units, sizeof *e->grad_shown);
    e->param_slot = calloc(units, sizeof *e->param_slot);
    e->grad_slot = calloc(units, sizeof *e->grad_slot);
    e->lending = calloc(tensors, sizeof *e->lending);
    e->in_flight = calloc(units, sizeof *e->in_flight);
    e->bracketed = calloc(units, sizeof *e->bracketed);
    e->flying = calloc(units, sizeof *e->flying);
    e->aside = calloc(units, sizeof *e->aside);
    e->gather_segs = calloc(flats, sizeof *e->gather_segs);
    e->reduce_segs = calloc(flats, sizeof *e->reduce_segs);
    if (!e->core || !e->actions || !e->unit_job || !e->reported_param || !e->reported_grad ||
        !e->n_shown_param || !e->n_shown_grad || !e->param_shown || !e->grad_shown || !e->param_slot ||
        !e->grad_slot || !e->lending || !e->in_flight || !e->bracketed || !e->flying || !e->aside ||
        !e->gather_segs || !e->reduce_segs)
        return zr_fail(ZR_ERR_NOMEM, "no memory for the tables of %d units", e->layout->n_units);
    zr_core_init(e->core, &e->plan->spec);
    if (e->plan->place.model_holds && e->dev->ops->host_memory && e->dev->ops->compute_on_caller) {
        e->late_grad = calloc((size_t)e->layout->n_pieces + 1, sizeof *e->late_grad);
        if (!e->late_grad)
            return zr_fail(ZR_ERR_NOMEM, "no memory for %d gradients", e->layout->n_pieces);
    }
    bool kept = e->opt.grad_in_place || e->world == 1;
    if (e->opt.check && kept && e->plan->place.model_holds && e->dev->ops->compute_on_caller) {
        e->kept_grad = calloc((size_t)e->layout->n_pieces + 1, sizeof *e->kept_grad);
        if (!e->kept_grad)
            return zr_fail(ZR_ERR_NOMEM, "check: no memory for %d gradients", e->layout->n_pieces);
    }
    return 0;
}

/* Device memory, counted where it is taken. */
static int open_memory(struct zr_engine *e)
{
    const struct zr_plan *p = e->plan;
    void *base;
    int err = e->gather->ops->arena(e->gather, p->gather_bytes, &base);
    if (err)
        return err;
    e->gather_base = base;
    err = e->reduce->ops->arena(e->reduce, p->reduce_bytes, &base);
    if (err)
        return err;
    e->reduce_base = base;
    if (p->master_elems) {
        int64_t bytes = p->master_elems * (int64_t)sizeof(float);
        err = e->dev->ops->alloc(e->dev, bytes, &base);
        if (err)
            return err;
        e->master = base;
        e->master_bytes = e->allocated[ZR_MEM_MASTER] = bytes;
    }
    err = e->dev->ops->host_alloc(e->dev, p->words_bytes, &base);
    if (err)
        return err;
    e->outcome = base;
    e->words = (char *)base + ZR_OUTCOME_BYTES;
    if (p->snapshot_bytes) {
        /* Zeroed, and so touched: the first save is not to wait for pages. */
        err = e->dev->ops->host_alloc(e->dev, p->snapshot_bytes, &base);
        if (err)
            return err;
        e->snapshot = base;
    }
    for (int i = 0; i < p->n_states; i++) {
        int64_t bytes = p->state_elems[i] * (int64_t)sizeof(float);
        err = e->dev->ops->alloc(e->dev, bytes, &base);
        if (err)
            return err;
        e->state[i] = base;
        e->allocated[ZR_MEM_MOMENTS] += bytes;
        err = e->dev->ops->zero(e->compute, base, bytes);
        if (err)
            return err;
    }
    return e->dev->ops->stream_sync(e->compute);
}

/* The arenas by category: what lies between the places the engine uses. The rest, to the last byte of both,
 * is for exchanges. */
static void count_arenas(struct zr_engine *e)
{
    const struct zr_plan *p = e->plan;
    int64_t slots = 0, slots_at = p->gather_bytes;
    for (int32_t i = 0; i < p->n_param_slots; i++) {
        slots += zr_round_up(p->param_slots[i].bytes, ZR_PIECE_ALIGN);
        slots_at = zr_min(slots_at, p->param_slots[i].at);
    }
    int64_t in_place = zr_round_up(e->layout->in_place_param_bytes, ZR_PIECE_ALIGN);
    int64_t shards = p->n_param_slots ? slots_at : p->in_place_param_at + in_place;
    int64_t sums = zr_round_up(p->n_sums * p->sum_elems * (int64_t)sizeof(float), ZR_PIECE_ALIGN);
    e->allocated[ZR_MEM_PARAM_SHARDS] = shards;
    e->allocated[ZR_MEM_PARAM_SLOTS] = slots;
    e->allocated[ZR_MEM_GRAD_SLOTS] = p->sums_at;
    int64_t further = (p->n_sums - 1) * p->sum_elems * (int64_t)sizeof(float);
    int64_t gathered = p->values_at - p->full_grad_at;
    int64_t scratch = e->opt.gather_scratch_bytes + e->opt.reduce_scratch_bytes;
    e->allocated[ZR_MEM_GRAD_SHARDS] = sums - further;
    e->allocated[ZR_MEM_GRAD_SUMS] = further;
    e->allocated[ZR_MEM_GRAD_GATHERED] = gathered;
    e->allocated[ZR_MEM_SNAPSHOT] = e->snapshot ? p->snapshot_bytes : 0;
    e->allocated[ZR_MEM_COMM] = scratch;
    e->allocated[ZR_MEM_EXCHANGE] = p->gather_bytes - shards - slots + p->reduce_bytes - p->sums_at - sums -
                                    gathered - scratch + p->words_bytes;
}

int zr_engine_open(struct zr_engine *e, const struct zr_engine_parts *parts)
{
    memset(e, 0, sizeof *e);
    e->dev = parts->dev;
    e->pid = (int)getpid();
    e->forks = zr_fork_depth();
    e->gather = parts->gather;
    e->reduce = parts->reduce;
    e->plan = parts->plan;
    e->layout = parts->plan->layout;
    e->opt = *parts->opt;
    zr_tuned_open(e);
    e->loop = parts->loop;
    e->on_fail = parts->on_fail;
    e->on_fail_arg = parts->on_fail_arg;
    e->rank = parts->gather->rank;
    e->world = parts->gather->world;
    if (uv_mutex_init(&e->fail_lock))
        return zr_fail(ZR_ERR_SYSTEM, "a mutex could not be made");
    const struct zr_device_ops *d = e->dev->ops;
    /* A rank alone on the host has nobody to wait for: a thread more would only cost a wake-up per unit. */
    bool alone = !e->loop && d->compute_on_caller;
    enum zr_stream_kind kind = alone ? ZR_STREAM_CALLER : ZR_STREAM_QUEUE;
    int err = d->stream_open(e->dev, ZR_STREAM_CALLER, "zero-compute", parts->native_stream, &e->compute);
    if (!err)
        err = d->stream_open(e->dev, kind, "zero-gather", NULL, &e->gather_stream);
    if (!err)
        err = d->stream_open(e->dev, kind, "zero-reduce", NULL, &e->reduce_stream);
    if (!err)
        err = open_tables(e);
    if (!err)
        err = zr_written_open(e);
    if (!err)
        err = open_events(e);
    if (!err && e->plan->snapshot_bytes)
        err = zr_snapshot_listener_open(&e->listener);
    if (!err)
        err = zr_timeline_open(e->dev, e->opt.trace ? 1 << 14 : 0, &e->timeline);
    if (!err)
        err = zr_model_check_open(e, parts->check, &e->watch);
    if (err)
        zr_engine_close(e);
    return err;
}

int zr_engine_allocate(struct zr_engine *e)
{
    int err = open_memory(e);
    if (!err)
        count_arenas(e);
    return err;
}

static bool is_stuck(struct zr_comm *c)
{
    return c->ops->stuck && c->ops->stuck(c);
}

/* Finishes what is on the streams first. */
static void close_device_side(struct zr_engine *e)
{
    const struct zr_device_ops *d = e->dev->ops;
    d->stream_close(e->gather_stream);
    d->stream_close(e->reduce_stream);
    d->stream_close(e->compute);
    zr_model_check_give_back(e->watch);
    zr_engine_all_close(e);
    for (int32_t i = 0; i < e->n_events; i++)
        d->event_close(e->events[i]);
    zr_aside_close(e);
    if (e->master)
        d->free(e->dev, e->master, e->master_bytes);
    if (e->snapshot)
        d->host_free(e->dev, e->snapshot, e->plan->snapshot_bytes);
    if (e->outcome)
        d->host_free(e->dev, e->outcome, e->plan->words_bytes);
    for (int i = 0; i < ZR_MAX_STATES; i++)
        if (e->state[i])
            d->free(e->dev, e->state[i], e->plan->state_elems[i] * (int64_t)sizeof(float));
    zr_timeline_close(e->timeline);
}

bool zr_engine_close(struct zr_engine *e)
{
    bool stuck = is_stuck(e->gather) || is_stuck(e->reduce);
    if (!stuck)
        close_device_side(e);
    zr_snapshot_listener_close(e->listener);
    zr_model_check_close(e->watch);
    free(e->events);
    free(e->grad_job);
    free(e->core);
    free(e->actions);
    free(e->unit_job);
    free(e->written);
    free(e->reported_param);
    free(e->reported_grad);
    free(e->n_shown_param);
    free(e->n_shown_grad);
    free(e->param_shown);
    free(e->grad_shown);
    free(e->param_slot);
    free(e->grad_slot);
    free(e->kept_grad);
    free(e->late_grad);
    free(e->all.at);
    free(e->lending);
    free(e->in_flight);
    free(e->bracketed);
    free(e->flying);
    free(e->aside);
    free(e->gather_segs);
    free(e->reduce_segs);
    uv_mutex_destroy(&e->fail_lock);
    memset(e, 0, sizeof *e);
    return !stuck;
}
