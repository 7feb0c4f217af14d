/* verify_run.c: the ranks of one case. Each has the real engine, the real plan and core, a loop by hand, and
 * a model thread that is a coroutine; the simulated world below runs their streams. Who goes on next is drawn
 * from the seed. */
#include "shard/verify_world.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { QUEUE = 512, STACK_BYTES = 96 << 10 };

/* ---- dying ---- */

static void give_way(struct zr_verify_rank *r)
{
    swapcontext(&r->context, &r->v->scheduler);
    zr_sim_host(r->v->sim, r->id, ZR_SIM_MODEL);
}

/* At each point of what a rank does: is it the last? Where the rank's own thread is running it does not come
 * back. */
static bool dies(struct zr_verify_rank *r)
{
    struct zr_verify_world *v = r->v;
    if (r->id != v->c->dead || r->n_points++ < v->c->dead_at || r->dead)
        return r->dead;
    r->dead = r->done = true;
    v->lose_at = v->n_turns + zr_verify_below(&v->random, 64);
    zr_sim_kill(v->sim, r->id);
    zr_sim_recorder(v->sim)->forgiving = true;
    while (v->running == r)
        give_way(r);
    return true;
}

/* ---- the loops ---- */

static void carry_one(struct zr_verify_rank *r)
{
    struct zr_line *before = zr_sim_speaker(r->v->sim);
    if (zr_loop_carry_next(r->loop))
        r->v->n_carried++;
    zr_sim_speak(r->v->sim, before);
}

static bool behind(const struct zr_verify_rank *r)
{
    return r->loop && !r->dead && r->n_carried < r->n_pushed;
}

static void note_job(struct zr_verify_rank *r, const struct zr_job *job)
{
    uint64_t word[] = {
        job->action.kind, (uint64_t)job->action.unit, (uint64_t)job->action.slot, job->action.fill,
        job->action.sum,  job->action.accumulate,     job->action.n_folds,        job->call_hash,
        job->step};
    for (size_t i = 0; i < sizeof word / sizeof *word; i++)
        r->action_hash = (r->action_hash ^ word[i]) * UINT64_C(0x100000001b3) + 1;
}

/* The loop's hand. It knows what the model's thread knew when it gave the job. */
static void carry(void *arg, const struct zr_job *job)
{
    struct zr_verify_rank *r = arg;
    struct zr_stamp **known = &r->pushed[r->n_carried++ % QUEUE];
    struct zr_line *l = zr_sim_host(r->v->sim, r->id, ZR_SIM_LOOP);
    zr_line_join(zr_sim_recorder(r->v->sim), l, *known);
    zr_stamp_drop(*known);
    *known = NULL;
    l->during = zr_action_name((enum zr_action_kind)job->action.kind);
    l->unit = job->action.unit;
    l->step = job->step;
    note_job(r, job);
    if (!dies(r))
        zr_mutant_carry(r, job);
}

static void carry_some(struct zr_verify_rank *r)
{
    for (int64_t k = zr_verify_below(&r->v->random, 4); k > 0 && behind(r); k--)
        carry_one(r);
}

static void pushed(void *arg)
{
    struct zr_verify_rank *r = arg;
    r->pushed[r->n_pushed++ % QUEUE] = zr_stamp_hold(zr_sim_speaker(r->v->sim));
    while (r->pace == ZR_PACE_AT_ONCE && behind(r))
        carry_one(r);
    if (r->pace == ZR_PACE_RANDOM && zr_verify_chance(&r->v->random, 30))
        carry_some(r);
}

static void awaited(void *arg, uint64_t number)
{
    struct zr_verify_rank *r = arg;
    const struct zr_mutant *m = r->v->mutant;
    if (m && m->what == ZR_LESS_AWAIT &&
        (!m->during || !strcmp(m->during, zr_sim_speaker(r->v->sim)->during))) {
        r->v->n_acted++;
        return;
    }
    while (r->n_carried < number)
        carry_one(r);
}

/* ---- taking turns ---- */

/* The model's thread of a rank waits for the device. */
static void on_yield(void *arg, int rank)
{
    struct zr_verify_world *v = arg;
    struct zr_verify_rank *r = v->running;
    if (!r || r->id != rank) {
        fprintf(stderr, "verify: rank %d waits outside its thread\n", rank);
        abort();
    }
    dies(r);
    r->stuck_at = zr_sim_activity(v->sim) + v->n_carried;
    give_way(r);
}

/* What ranks do through the rendezvous while wrapping: all succeed or all fail. */
static int agree(struct zr_verify_rank *r, int err)
{
    struct zr_verify_world *v = r->v;
    int until = (v->n_agreed / v->c->world + 1) * v->c->world;
    if (err)
        v->agreed_error = err;
    v->n_agreed++;
    while (v->n_agreed < until && !v->lost)
        on_yield(v, r->id);
    return v->lost ? ZR_ERR_PEER : v->agreed_error;
}

/* ---- values ---- */

static void touch_values(struct zr_verify_rank *r, int32_t tensor, enum zr_sim_how how)
{
    const struct zr_layout *l = &r->layout;
    const struct zr_tensor *t = &l->tensors[tensor];
    for (int64_t s = 0; s < t->n_slices; s++) {
        int32_t id = l->piece_of[l->slice_base[tensor] + s];
        const struct zr_flat *f = zr_piece_flat(l, id);
        int64_t size = zr_dtype_bytes(t->dtype), bytes = l->pieces[id].n * size;
        struct zr_sim_touch touch = {r->scratch + s * bytes,
                                     bytes,
                                     how,
                                     {.kind = ZR_TAG_PARAM,
                                      .size = (uint8_t)size,
                                      .flat = (int32_t)(f - l->flats),
                                      .first = l->pieces[id].first,
                                      .value = f->trainable ? (uint64_t)r->n_done : 0}};
        zr_sim_host_touch(r->v->sim, how == ZR_SIM_READ ? "use of read values" : "new values", &touch, 1);
    }
}

static int do_values(struct zr_verify_rank *r, const struct zr_deed *d)
{
    int32_t tensor = d->kind == ZR_DO_MEAN ? 0 : d->unit % r->layout.n_tensors;
    int64_t n = r->layout.tensors[tensor].n_elems;
    if (d->kind == ZR_DO_READ) {
        int err = zr_engine_read(&r->engine, tensor, ZR_VALUE_PARAM, 0, n, r->scratch);
        if (!err)
            touch_values(r, tensor, ZR_SIM_READ);
        return err;
    }
    if (d->kind == ZR_DO_WRITE) {
        touch_values(r, tensor, ZR_SIM_SET);
        return zr_engine_write(&r->engine, tensor, ZR_VALUE_PARAM, 0, n, r->scratch);
    }
    struct zr_sim_touch touch = {r->mean, sizeof r->mean, ZR_SIM_PLAIN_WRITE, {0}};
    zr_sim_host_touch(r->v->sim, "new means", &touch, 1);
    r->mean[0] = r->id;
    r->mean[1] = 1;
    int err = zr_engine_mean(&r->engine, r->mean, 2);
    if (!err && (r->mean[0] != (r->engine.world - 1) / 2.0 || r->mean[1] != 1))
        zr_report(zr_sim_recorder(r->v->sim), "rank %d: the mean of 0..%d came out as %g", r->id,
                  r->engine.world - 1, r->mean[0]);
    return err;
}

/* ---- snapshots ---- */

static void on_snapshot(void *arg)
{
    struct zr_verify_rank *r = arg;
    zr_stamp_drop(r->complete);
    r->complete = zr_stamp_hold(zr_sim_line_of(r->engine.reduce_stream));
    r->readable = true;
}

struct reading {
    struct zr_verify_rank *r;
    const struct zr_run *run;
    struct zr_line *line;
};

/* Elements of one piece; there is padding between pieces. */
static int expect_saved(void *arg, const struct zr_flat *f, const struct zr_piece *p, int64_t first,
                        int64_t n)
{
    const struct reading *g = arg;
    const struct zr_run *run = g->run;
    struct zr_content tag = {.kind = run->kind >= 0 ? ZR_TAG_STATE : ZR_TAG_PARAM,
                             .size = (uint8_t)run->size,
                             .flat = (int32_t)(f - g->r->layout.flats),
                             .first = first,
                             .value = f->trainable ? (uint64_t)g->r->n_saved : 0};
    (void)p;
    zr_shadow_expect(zr_sim_recorder(g->r->v->sim), g->line,
                     g->r->engine.snapshot + run->snapshot_at + (first - run->first) * run->size,
                     n * run->size, tag);
    return 0;
}

static int read_run(void *arg, const struct zr_run *run)
{
    struct zr_verify_rank *r = arg;
    struct zr_recorder *rec = zr_sim_recorder(r->v->sim);
    struct reading g = {r, run, &rec->lines[r->id * ZR_SIM_LINES + ZR_SIM_READER]};
    zr_shadow_read(rec, g.line, r->engine.snapshot + run->snapshot_at, run->n * run->size);
    return zr_flat_ranges(&r->layout, run->flat, run->first, run->first + run->n, expect_saved, &g);
}

/* What the thread that writes a checkpoint does with the snapshot. */
static void read_snapshot(struct zr_verify_rank *r, bool waited)
{
    struct zr_recorder *rec = zr_sim_recorder(r->v->sim);
    struct zr_line *l = &rec->lines[r->id * ZR_SIM_LINES + ZR_SIM_READER];
    if (waited)
        zr_line_join(rec, l, r->complete);
    zr_sim_begin(r->v->sim, l, "read of a snapshot", -1, (uint32_t)r->n_saved);
    zr_engine_runs(&r->engine, read_run, r);
    r->reading = r->readable = false;
    r->v->n_snapshots++;
}

static bool reads_next(const struct zr_verify_rank *r)
{
    return r->reading && r->readable && !r->dead && r->engine_open;
}

/* The save before must be over: as zero_save and zero_unwrap wait for it. */
static int end_save(struct zr_verify_rank *r)
{
    int err = 0;
    while (r->reading && !err) {
        err = zr_engine_check(&r->engine);
        if (!err)
            on_yield(r->v, r->id);
    }
    if (!err) {
        struct zr_recorder *rec = zr_sim_recorder(r->v->sim);
        zr_line_join(rec, zr_sim_host(r->v->sim, r->id, ZR_SIM_MODEL),
                     rec->lines[r->id * ZR_SIM_LINES + ZR_SIM_READER].stamp);
    }
    return err;
}

static int do_snapshot(struct zr_verify_rank *r)
{
    const struct zr_mutant *m = r->v->mutant;
    bool before = r->reading, alone = m && m->what == ZR_LESS_READER;
    int err = alone ? 0 : end_save(r);
    if (err)
        return err;
    r->v->n_acted += alone && before;
    if (before && alone &&
        reads_next(r)) /* it goes on as it would have, later: its bytes are new ones then */
        r->readable = false;
    r->n_saved = r->n_done;
    r->reading = true;
    err = zr_engine_take_snapshot(&r->engine);
    if (!err && m && m->what == ZR_EARLY_READER) {
        r->v->n_acted++;
        read_snapshot(r, false);
    }
    return err;
}

/* ---- the model's thread ---- */

static int do_step(struct zr_verify_rank *r, const struct zr_deed *d)
{
    struct zr_step_result result;
    bool poisoned = r->v->c->poison == d->step, any = r->layout.state_elems > 0;
    int err = zr_engine_step(&r->engine, 0.1f, r->v->c->wait_result ? &result : NULL);
    if (err)
        return err;
    if (r->v->c->wait_result && any && result.skipped != poisoned)
        zr_report(zr_sim_recorder(r->v->sim), "rank %d: step %d was %s", r->id, d->step,
                  poisoned ? "not skipped" : "skipped");
    r->n_done += !poisoned;
    memset(r->n_used, 0, (size_t)r->layout.n_units * sizeof *r->n_used);
    if (r->id == 0) {
        r->v->step_compute_ns = r->v->compute_ns;
        r->v->compute_ns = 0;
    }
    r->step_from_ns = r->step_to_ns;
    r->step_to_ns = zr_sim_now(zr_sim_host(r->v->sim, r->id, ZR_SIM_MODEL));
    return 0;
}

static int do_deed(struct zr_verify_rank *r, const struct zr_deed *d)
{
    static const char *const during[] = {"zero_begin", "zero_end",   "compute",   "zero_micro", "zero_step",
                                         "zero_read",  "zero_write", "zero_mean", "zero_save"};
    struct zr_line *l = zr_sim_host(r->v->sim, r->id, ZR_SIM_MODEL);
    struct zr_core_event ev = {.kind = d->kind == ZR_DO_BEGIN ? ZR_EV_BEGIN
                                       : d->kind == ZR_DO_END ? ZR_EV_END
                                                              : ZR_EV_MICRO,
                               .unit = d->unit,
                               .backward = d->backward};
    const struct zr_mutant *m = r->v->mutant;
    l->during = during[d->kind];
    l->unit = d->kind <= ZR_DO_USE ? d->unit : -1;
    l->step = (uint32_t)(d->step + (d->kind == ZR_DO_STEP)); /* as jobs count them */
    if (m && m->what == ZR_LESS_CALL && m->action == d->kind && r->id == r->engine.world - 1 &&
        d->unit == 0 && d->step == 1) {
        r->v->n_acted++;
        return 0;
    }
    switch ((enum zr_deed_kind)d->kind) {
    case ZR_DO_BEGIN:
    case ZR_DO_END:
    case ZR_DO_MICRO:
        return zr_engine_call(&r->engine, &ev);
    case ZR_DO_USE:
        return zr_script_use(r, d);
    case ZR_DO_STEP:
        return do_step(r, d);
    case ZR_DO_SNAPSHOT:
        return do_snapshot(r);
    default:
        return do_values(r, d);
    }
}

/* A refusal of the core changes nothing and is the same on all ranks; it ends the run early. */
static bool is_refusal(const struct zr_verify_rank *r, const struct zr_deed *d, int err)
{
    bool core = (err == ZR_ERR_BUDGET && d->kind == ZR_DO_BEGIN) ||
                (err == ZR_ERR_ORDER && d->kind == ZR_DO_STEP && r->v->c->skipped);
    return core && !atomic_load(&r->engine.failed);
}

static int wrap(struct zr_verify_rank *r)
{
    struct zr_verify_world *v = r->v;
    struct zr_options opt = v->opt;
    opt.update_arg = r;
    struct zr_engine_parts parts = {.dev = zr_sim_device(v->sim, r->id),
                                    .gather = r->gather,
                                    .reduce = r->reduce,
                                    .plan = &r->plan,
                                    .opt = &opt,
                                    .loop = r->loop};
    zr_sim_host(v->sim, r->id, ZR_SIM_MODEL)->during = "zero_wrap";
    int err = zr_engine_open(&r->engine, &parts);
    r->engine_open = !err;
    r->engine.on_snapshot = on_snapshot;
    r->engine.on_snapshot_arg = r;
    err = agree(r, err);
    if (!err)
        err = agree(r, zr_engine_allocate(&r->engine));
    if (err)
        return err;
    int64_t peak, held = zr_sim_held(v->sim, r->id, &peak);
    if (!v->lost && (peak != v->plan->total_bytes || held != peak))
        zr_report(zr_sim_recorder(v->sim), "rank %d holds %lld bytes, at most %lld; the plan says %lld",
                  r->id, (long long)held, (long long)peak, (long long)v->plan->total_bytes);
    zr_sim_speaker(v->sim)->during = "zero_wrap values";
    err = zr_engine_adopt(&r->engine);
    if (!err)
        zr_engine_point(&r->engine);
    return err;
}

static void live(struct zr_verify_rank *r)
{
    struct zr_verify_world *v = r->v;
    int err = wrap(r);
    for (int32_t i = 0; !err && i < v->script.n; i++) {
        dies(r);
        const struct zr_deed *d = &v->script.deed[i];
        err = do_deed(r, d);
        r->n_calls = i + 1;
        if (err && is_refusal(r, d, err)) {
            r->refused = true;
            err = 0;
            break;
        }
        if (!err && zr_verify_chance(&v->random, 40))
            give_way(r);
    }
    zr_sim_host(v->sim, r->id, ZR_SIM_MODEL)->during = "zero_unwrap";
    if (!err)
        err = end_save(r);
    if (!err)
        err = zr_engine_barrier(&r->engine);
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

/* ---- who goes on ---- */

static bool can_go(const struct zr_verify_rank *r)
{
    return !r->done && r->stuck_at != zr_sim_activity(r->v->sim) + r->v->n_carried;
}

static void lose(struct zr_verify_world *v)
{
    char text[64];
    v->lost = true;
    snprintf(text, sizeof text, "rank %d was lost", v->c->dead);
    for (int r = 0; r < v->c->world; r++)
        if (r != v->c->dead && v->ranks[r].engine_open)
            zr_engine_fail(&v->ranks[r].engine, ZR_ERR_PEER, text);
    zr_sim_comm_lose(v->gather[0], v->c->dead);
    zr_sim_comm_lose(v->reduce[0], v->c->dead);
}

/* Nobody can go on, whatever the loops do. */
static bool break_up(struct zr_verify_world *v)
{
    char a[ZR_ERROR_BYTES / 3], b[ZR_ERROR_BYTES / 3];
    if (v->c->dead >= 0 && v->ranks[v->c->dead].dead && !v->lost) {
        lose(v);
        return true;
    }
    zr_sim_comm_waits(v->gather[0], a, sizeof a);
    zr_sim_comm_waits(v->reduce[0], b, sizeof b);
    int saving = 0;
    while (saving < v->c->world && !v->ranks[saving].reading)
        saving++;
    zr_report(zr_sim_recorder(v->sim), "hang%s: %s%s%s", v->ended ? " after the communicators failed" : "", a,
              b, saving < v->c->world ? "a rank waits for its snapshot" : "");
    if (v->ended)
        return false;
    v->ended = true;
    v->gather[0]->ops->abort(v->gather[0], ZR_ERR_TIMEOUT, "hang");
    v->reduce[0]->ops->abort(v->reduce[0], ZR_ERR_TIMEOUT, "hang");
    return true;
}

static void take_turns(struct zr_verify_world *v)
{
    int world = v->c->world;
    int64_t seen = -1;
    for (int idle = 0;; v->n_turns++) {
        int n_left = 0, n_able = 0;
        for (int r = 0; r < world; r++) {
            n_left += !v->ranks[r].done;
            n_able += can_go(&v->ranks[r]);
        }
        if (!n_left)
            return;
        if (v->c->dead >= 0 && v->ranks[v->c->dead].dead && !v->lost && v->n_turns >= v->lose_at)
            lose(v);
        if (n_able) {
            int64_t k = zr_verify_below(&v->random, n_able);
            struct zr_verify_rank *r = v->ranks;
            for (;; r++)
                if (can_go(r) && k-- == 0)
                    break;
            r->stuck_at = -1;
            v->running = r;
            swapcontext(&v->scheduler, &r->context);
            v->running = NULL;
            if (r->pace == ZR_PACE_RANDOM)
                carry_some(r);
            if (reads_next(r) && zr_verify_chance(&v->random, 30))
                read_snapshot(r, true);
            continue;
        }
        /* All wait: the loops have to move. */
        bool moved = false;
        int from = (int)zr_verify_below(&v->random, world);
        for (int i = 0; i < world && !moved; i++) {
            struct zr_verify_rank *r = &v->ranks[(from + i) % world];
            moved = behind(r) || reads_next(r);
            if (behind(r))
                carry_one(r);
            else if (moved)
                read_snapshot(r, true);
        }
        if (moved)
            continue;
        int64_t now = zr_sim_activity(v->sim) + v->n_carried + v->n_agreed;
        idle = now == seen ? idle + 1 : 0;
        seen = now;
        for (int r = 0; r < world; r++)
            v->ranks[r].stuck_at = -1;
        if (idle < 3)
            continue;
        if (!break_up(v))
            return;
        idle = 0;
    }
}

/* ---- the world ---- */

static struct zr_content whole_grad(void *arg, int32_t flat, uint32_t step)
{
    const struct zr_verify_world *v = arg;
    struct zr_content tag = {.kind = ZR_TAG_GRAD, .size = sizeof(float), .flat = flat};
    if (flat < 0 || flat >= v->layout->n_flats || step < 1 || (int)step > v->c->n_steps)
        return tag;
    int32_t n = v->script.n_contrib[((int)step - 1) * v->c->n_units + v->layout->flats[flat].unit];
    for (int r = 0; r < v->c->world; r++)
        for (int32_t k = 0; k < n; k++)
            tag.value += zr_sim_share(r, step - 1, flat, k);
    tag.n = n * v->c->world;
    return tag;
}

static bool poisoned(void *arg, int rank, uint32_t step)
{
    const struct zr_verify_world *v = arg;
    (void)rank;
    return v->c->poison >= 0 && v->c->poison + 1 == (int)step;
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
                                 .optimizer = c->sgd ? ZR_SGD : ZR_ADAMW,
                                 .beta1 = c->sgd ? 0 : 0.9f,
                                 .beta2 = 0.999f,
                                 .eps = 1e-8f,
                                 .clip = 1,
                                 .grad_scale = 1,
                                 .grad_accum_steps = c->accum,
                                 .n_states = c->sgd ? 0 : 2,
                                 .prefetch = c->prefetch,
                                 .deterministic = c->deterministic,
                                 .wire_dtype = c->wire_bf16 ? ZR_BF16 : 0,
                                 .order = v->script.order,
                                 .n_order = v->script.n_order,
                                 .timeout_ms = 1000,
                                 .save_async = c->snapshots > 0};
    if (c->user_update) {
        v->opt.optimizer = 0;
        v->opt.update = user_update;
        v->opt.n_states = 2;
    }
    int64_t all = 0;
    for (int32_t u = 0; u < v->layout->n_units; u++)
        all += v->layout->units[u].param_bytes;
    v->opt.param_budget_bytes = c->stage == 3 ? all * c->budget / 100 : 0;
}

/* The model's values before zero_wrap: all of rank 0's memory, since its count. */
static void own_values(struct zr_verify_world *v)
{
    const struct zr_layout *l = v->layout;
    struct zr_verify_rank *r = &v->ranks[0];
    for (int32_t t = 0; t < l->n_tensors; t++) {
        const struct zr_tensor *x = &l->tensors[t];
        int64_t size = zr_dtype_bytes(x->dtype);
        r->own[t] = calloc((size_t)x->n_elems, (size_t)size);
        if (!r->own[t])
            abort();
        zr_sim_register(v->sim, 0, x->name, r->own[t], x->n_elems * size);
        for (int64_t s = 0; s < x->n_slices; s++) {
            int32_t id = l->piece_of[l->slice_base[t] + s];
            int64_t bytes = l->pieces[id].n * size;
            zr_sim_mark(v->sim, r->own[t] + s * bytes, bytes,
                        (struct zr_content){.kind = ZR_TAG_PARAM,
                                            .size = (uint8_t)size,
                                            .flat = (int32_t)(zr_piece_flat(l, id) - l->flats),
                                            .first = l->pieces[id].first});
        }
    }
}

static int open_rank(struct zr_verify_world *v, int id)
{
    struct zr_verify_rank *r = &v->ranks[id];
    size_t n = (size_t)v->layout->n_tensors;
    r->v = v;
    r->id = id;
    r->stuck_at = -1;
    r->pace = v->c->pace == ZR_PACE_MIXED ? (enum zr_verify_pace)zr_verify_below(&v->random, ZR_PACE_MIXED)
                                          : v->c->pace;
    r->gather = v->gather[id];
    r->reduce = v->reduce[id];
    r->layout = *v->layout;
    r->plan = *v->plan;
    r->plan.layout = &r->layout;
    r->tensors = malloc(n * sizeof *r->tensors);
    r->param = calloc(n, sizeof *r->param);
    r->grad = calloc(n, sizeof *r->grad);
    r->own = calloc(n, sizeof *r->own);
    r->n_used = calloc((size_t)v->layout->n_units, sizeof *r->n_used);
    r->stack = malloc(STACK_BYTES);
    r->pushed = calloc(QUEUE, sizeof(struct zr_stamp *));
    int64_t largest = 1;
    for (int32_t t = 0; t < v->layout->n_tensors; t++)
        largest =
            zr_max(largest, v->layout->tensors[t].n_elems * zr_dtype_bytes(v->layout->tensors[t].dtype));
    r->scratch = v->c->values ? malloc((size_t)largest) : NULL;
    if (!r->tensors || !r->param || !r->grad || !r->own || !r->n_used || !r->stack || !r->pushed ||
        (v->c->values && !r->scratch))
        abort();
    zr_sim_register(v->sim, id, "means", r->mean, sizeof r->mean);
    if (r->scratch)
        zr_sim_register(v->sim, id, "values", r->scratch, largest);
    memcpy(r->tensors, v->layout->tensors, n * sizeof *r->tensors);
    r->layout.tensors = r->tensors;
    if (id == 0)
        own_values(v);
    for (size_t t = 0; t < n; t++) {
        r->tensors[t].param = &r->param[t];
        r->param[t] = v->ranks[0].own[t];
        if (r->tensors[t].grad)
            r->tensors[t].grad = &r->grad[t];
    }
    /* A rank alone on the host has no loop. */
    if (v->c->world > 1 || !v->c->caller) {
        struct zr_loop_by_hand hand = {pushed, awaited, r};
        int err = zr_loop_open_by_hand(QUEUE, carry, r, &hand, &r->loop);
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

static void close_ranks(struct zr_verify_world *v)
{
    for (int id = 0; v->ranks && id < v->c->world; id++) {
        struct zr_verify_rank *r = &v->ranks[id];
        if (!r->v)
            continue;
        zr_sim_kill(v->sim, id); /* nothing has to run any more */
        zr_loop_close(r->loop, NULL, NULL);
        if (r->engine_open)
            zr_engine_close(&r->engine);
    }
    for (int id = 0; v->gather && id < v->c->world; id++) {
        v->gather[id]->ops->close(v->gather[id]);
        v->reduce[id]->ops->close(v->reduce[id]);
    }
    for (int id = 0; v->ranks && id < v->c->world; id++) {
        struct zr_verify_rank *r = &v->ranks[id];
        int64_t peak;
        if (r->v && zr_sim_held(v->sim, id, &peak))
            zr_report(zr_sim_recorder(v->sim), "rank %d left %lld bytes of device memory", id,
                      (long long)zr_sim_held(v->sim, id, &peak));
        for (int i = 0; r->pushed && i < QUEUE; i++)
            zr_stamp_drop(r->pushed[i]);
        zr_stamp_drop(r->complete);
        for (int32_t t = 0; r->own && t < v->layout->n_tensors; t++)
            free(r->own[t]);
        free(r->tensors);
        free(r->param);
        free(r->grad);
        free(r->own);
        free(r->n_used);
        free(r->stack);
        free(r->pushed);
        free(r->scratch);
    }
    free(v->ranks);
}

/* Did everyone end as it should? */
static void check_ends(struct zr_verify_world *v)
{
    const struct zr_verify_case *c = v->c;
    const struct zr_verify_rank *first = &v->ranks[0];
    bool died = c->dead >= 0 && v->ranks[c->dead].dead;
    for (int id = 0; id < c->world; id++) {
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

/* Trace Event Format: a process is a rank, a thread one of its lines. */
static void on_ran(void *arg, const struct zr_info *info, const char *line, int rank, int64_t from_ns,
                   int64_t to_ns)
{
    struct zr_verify_world *v = arg;
    (void)line;
    if (v->trace && rank < 16 && to_ns > from_ns)
        fprintf(v->trace,
                "{\"name\":\"%s\",\"ph\":\"X\",\"pid\":%d,\"tid\":%d,\"ts\":%lld.%03d,\"dur\":%lld.%03d,"
                "\"args\":{\"unit\":%d,"
                "\"step\":%u,\"during\":\"%s\"}},\n",
                info->name, rank, info->line % ZR_SIM_LINES, (long long)(from_ns / 1000),
                (int)(from_ns % 1000), (long long)((to_ns - from_ns) / 1000), (int)((to_ns - from_ns) % 1000),
                info->unit, info->step, info->during);
}

static void name_lines(struct zr_verify_world *v)
{
    for (int32_t i = 0; v->trace && i < v->c->world * ZR_SIM_LINES && i < 16 * ZR_SIM_LINES; i++)
        fprintf(v->trace,
                "{\"name\":\"thread_name\",\"ph\":\"M\",\"pid\":%d,\"tid\":%d,\"args\":{\"name\":\"%s\"}},\n",
                i / ZR_SIM_LINES, i % ZR_SIM_LINES, zr_sim_recorder(v->sim)->lines[i].name);
}

static int run(struct zr_verify_world *v, struct zr_verify_result *out, struct zr_verify_time *time)
{
    const struct zr_verify_case *c = v->c;
    const struct zr_verify_speed *speed = v->speed;
    struct zr_tensor *tensors;
    int32_t n_tensors;
    int err = zr_script_make(c, &v->script);
    if (!err)
        err = zr_script_tensors(c, speed, &tensors, &n_tensors);
    if (!err)
        err = zr_layout_make(tensors, n_tensors, c->world, zr_plan_in_place(c->stage), &v->layout);
    if (err)
        return err;
    set_options(v);
    err = zr_plan_make(v->layout, &v->opt, &v->plan);
    if (err == ZR_ERR_BUDGET) { /* as zero_wrap refuses it */
        out->refused = err;
        return 0;
    }
    if (err)
        return err;
    struct zr_sim_options o = {.world = c->world,
                               .compute_on_caller = c->caller,
                               .event_done = c->event_done,
                               .fail_alloc = c->fail_alloc,
                               .yield = on_yield,
                               .drop = v->mutant ? zr_mutant_drops : NULL,
                               .whole_grad = whole_grad,
                               .poisoned = poisoned,
                               .comm_flaws =
                                   v->mutant && v->mutant->what == ZR_FLAWED_COMM ? v->mutant->flaw : 0,
                               .arg = v};
    if (speed) {
        o.ran = v->trace ? on_ran : NULL;
        o.memory_bytes_per_s = speed->memory_bytes_per_s;
        o.near_bytes_per_s = speed->near_bytes_per_s;
        o.far_bytes_per_s = speed->far_bytes_per_s;
        o.launch_ns = speed->launch_ns;
        o.near_ns = speed->near_ns;
        o.far_ns = speed->far_ns;
        o.ranks_per_node = speed->ranks_per_node;
    }
    err = zr_sim_open(&o, &v->sim);
    v->gather = calloc((size_t)c->world, sizeof *v->gather);
    v->reduce = calloc((size_t)c->world, sizeof *v->reduce);
    v->ranks = calloc((size_t)c->world, sizeof *v->ranks);
    if (!v->gather || !v->reduce || !v->ranks)
        abort();
    if (!err) {
        v->order = zr_sim_order_open(v->sim);
        err = v->order ? 0 : zr_fail(ZR_ERR_NOMEM, "no memory for the order of collectives");
    }
    if (!err)
        err = zr_sim_comm_open(v->sim, "gather", v->order, v->gather);
    if (!err)
        err = zr_sim_comm_open(v->sim, "reduce", v->order, v->reduce);
    for (int id = 0; !err && id < c->world; id++)
        err = open_rank(v, id);
    if (err)
        return err;
    take_turns(v);
    check_ends(v);
    name_lines(v);
    for (int id = 0; id < c->world; id++) {
        out->n_calls += v->ranks[id].n_calls;
        out->action_hash = out->action_hash * 31 + v->ranks[id].action_hash;
        out->refused |= v->ranks[id].refused;
        out->died |= v->ranks[id].dead;
    }
    out->starved = v->agreed_error == ZR_ERR_NOMEM;
    out->reordered = v->script.reordered;
    out->n_snapshots = v->n_snapshots;
    if (time) {
        int64_t peak;
        zr_sim_held(v->sim, 0, &peak);
        *time = (struct zr_verify_time){.step_ns = v->ranks[0].step_to_ns - v->ranks[0].step_from_ns,
                                        .compute_ns = v->step_compute_ns,
                                        .peak_bytes = peak,
                                        .plan_bytes = v->plan->total_bytes};
        time->exposed_ns = time->step_ns - time->compute_ns;
    }
    return 0;
}

static int run_world(struct zr_verify_world *v, struct zr_verify_result *out, struct zr_verify_time *time)
{
    memset(out, 0, sizeof *out);
    v->random = v->c->seed ^ 0xa11ce;
    int err = run(v, out, time);
    if (v->sim) {
        close_ranks(v);
        const struct zr_recorder *rec = zr_sim_recorder(v->sim);
        out->n_ops = rec->n_ops;
        out->n_accesses = rec->n_accesses;
        out->n_reports = rec->n_reports;
        out->n_unmatched = v->n_acted;
        snprintf(out->text, sizeof out->text, "%s", rec->first_report);
        if (rec->broken)
            err = zr_fail(ZR_ERR_NOMEM, "no memory to keep a record of the case");
    }
    free(v->gather);
    free(v->reduce);
    zr_sim_close(v->sim);
    zr_sim_order_close(v->order);
    zr_plan_free(v->plan);
    zr_layout_free(v->layout);
    zr_script_free(&v->script);
    return err;
}

int zr_verify_run(const struct zr_verify_case *c, const struct zr_mutant *mutant,
                  struct zr_verify_result *out)
{
    struct zr_verify_world v = {.c = c, .mutant = mutant};
    return run_world(&v, out, NULL);
}

int zr_verify_time(const struct zr_verify_case *c, const struct zr_verify_speed *speed, const char *path,
                   struct zr_verify_time *out, struct zr_verify_result *result)
{
    struct zr_verify_world v = {.c = c, .speed = speed};
    FILE *trace = path ? fopen(path, "w") : NULL;
    if (path && !trace)
        return zr_fail(ZR_ERR_IO, "%s cannot be written", path);
    v.trace = trace;
    if (trace)
        fprintf(trace, "[\n");
    int err = run_world(&v, result, out);
    if (trace) {
        fprintf(trace, "{\"name\":\"libzero\",\"ph\":\"M\",\"pid\":0,\"args\":{}}]\n");
        if (fclose(trace) && !err)
            err = zr_fail(ZR_ERR_IO, "%s could not be written", path);
    }
    return err;
}
