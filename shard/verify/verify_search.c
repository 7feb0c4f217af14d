/* SPDX-License-Identifier: Apache-2.0 */
/* verify_search.c: visits every order in which the host threads of small models can run.
 *
 * The vector clocks of one run cover all orders of the device if the run has the only possible graph of
 * waits. A wait refers to the most recent record when it is called, so a faster or slower loop could change
 * the graph. The search shows that this does not happen.
 *
 * It sends the calls of a model through the real core. Each action is split into what engine/model.c and
 * engine/issue.c do for it: push, await, record, wait, sync. A state is the position of each rank's model
 * thread and loop. The search visits all states breadth first. It reports:
 *   - a wait that finds different records on different paths
 *   - a gather into a slot in use
 *   - a bracket whose slot holds another unit
 *   - a state other than the end in which no thread can continue
 * Each configuration also runs once on the simulated world, which checks the graph itself.
 *
 * Ranks make the same calls, so states that differ only by a permutation of ranks are one state. Ranks affect
 * each other only by syncs, in whatever group. So two or three ranks are enough for groups of a world of
 * four. With three ranks, all operations of a model thread between two possible waits are one move. This
 * hides no deadlock, and with two ranks each operation is a move. */
#include "shard/verify/verify_world.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_OPS = 1000, MAX_JOBS = 500 };
_Static_assert(MAX_OPS < 1024 && MAX_JOBS < 1024, "ten bits each: see pack()");

/* Events are numbered by class and by index in the class. */
enum { OF_CLASS = 16, MAX_EVENTS = (ZR_EVENT_REDUCE_OUTER_TAIL + 1) * OF_CLASS };

enum host_op_kind { HOST_PUSH, HOST_AWAIT, HOST_RECORD, HOST_WAIT, HOST_SYNC };

struct host_op {
    enum host_op_kind kind;
    int32_t number; /* PUSH, AWAIT, SYNC: jobs issued before it; RECORD, WAIT: the event */
    int32_t found;  /* WAIT: records of the event before it; -1: not reached yet */
};

struct job_ops {
    struct host_op op[8];
    int n;
};

/* The operations of one rank, which are the same on all ranks. */
struct program {
    struct host_op op[MAX_OPS];
    struct job_ops job[MAX_JOBS];
    int32_t n_ops, n_jobs;
    int32_t recorded[MAX_EVENTS][MAX_JOBS]; /* positions of its records, in op or job */
    int32_t n_recorded[MAX_EVENTS];
    char fault[160];
};

struct tracing {
    struct program *p;
    const struct zr_plan *plan;
    int32_t unit_job[8], grad_job[16], norm_job, snapshot_job, slot_unit[16];
    bool open[16], wrong;
    enum zr_search_flaw flaw;
};

static int32_t event_of(int class, int32_t number)
{
    return class * OF_CLASS + number;
}

static void add_op(struct tracing *t, enum host_op_kind kind, int32_t number)
{
    struct program *p = t->p;
    if ((t->flaw == ZR_SEARCH_NO_AWAIT && kind == HOST_AWAIT) ||
        (t->flaw == ZR_SEARCH_NO_PUSH && kind == HOST_PUSH && number == 3))
        return;
    if (p->n_ops == MAX_OPS)
        abort();
    if (kind == HOST_RECORD)
        p->recorded[number][p->n_recorded[number]++] = p->n_ops;
    p->op[p->n_ops++] = (struct host_op){kind, number, -1};
}

static void job_op(struct tracing *t, enum host_op_kind kind, int32_t event)
{
    struct program *p = t->p;
    struct job_ops *j = &p->job[p->n_jobs - 1];
    if (j->n == (int)(sizeof j->op / sizeof *j->op))
        abort();
    if (kind == HOST_RECORD)
        p->recorded[event][p->n_recorded[event]++] = p->n_jobs - 1;
    j->op[j->n++] = (struct host_op){kind, event, -1};
}

static void wrong(struct tracing *t, const char *what, const struct zr_action *a)
{
    if (!t->wrong)
        snprintf(t->p->fault, sizeof t->p->fault, "%s: action %d of unit %d, slot %d", what, a->kind, a->unit,
                 a->slot);
    t->wrong = true;
}

/* The current job waits for all jobs so far on another stream. */
static void job_tail(struct tracing *t, int class)
{
    job_op(t, HOST_RECORD, event_of(class, 0));
    job_op(t, HOST_WAIT, event_of(class, 0));
}

static void trace_gather(struct tracing *t, const struct zr_action *a, int32_t number)
{
    bool whole = t->plan->spec.outer_gathers && t->plan->spec.units[a->unit].trainable;
    if (a->slot >= 0) {
        if (t->open[a->slot])
            wrong(t, "a gather into a slot in use", a);
        t->slot_unit[a->slot] = a->unit;
        job_op(t, HOST_WAIT, event_of(ZR_EVENT_PARAM_FREE, a->slot));
    }
    job_op(t, HOST_WAIT, event_of(whole ? ZR_EVENT_WHOLE : ZR_EVENT_UPDATED, a->unit));
    job_op(t, HOST_RECORD, event_of(ZR_EVENT_READY, a->unit));
    t->unit_job[a->unit] = number;
}

static void trace_gather_outer(struct tracing *t, const struct zr_action *a)
{
    job_op(t, HOST_WAIT, event_of(ZR_EVENT_UPDATED, a->unit));
    job_op(t, HOST_RECORD, event_of(ZR_EVENT_WHOLE, a->unit));
}

/* Records that the last reader of a gradient is done. */
static void trace_grad_free(struct tracing *t, const struct zr_action *a, int32_t number)
{
    int32_t index = zr_grad_index(t->plan, a->unit, a->slot);
    job_op(t, HOST_RECORD, event_of(ZR_EVENT_GRAD_FREE, index));
    t->grad_job[index] = number;
}

static void trace_reduce(struct tracing *t, const struct zr_action *a, int32_t number)
{
    job_op(t, HOST_WAIT, event_of(ZR_EVENT_GRAD_DONE, zr_grad_index(t->plan, a->unit, a->slot)));
    if (t->plan->spec.outer) {
        job_op(t, HOST_WAIT, event_of(ZR_EVENT_GROUP_SUM_FREE, zr_group_sum_index(a)));
        job_op(t, HOST_RECORD, event_of(ZR_EVENT_GROUP_SUM_DONE, zr_group_sum_index(a)));
    }
    if (!t->plan->sum_in_place[a->unit])
        trace_grad_free(t, a, number);
}

static void trace_reduce_outer(struct tracing *t, const struct zr_action *a)
{
    job_op(t, HOST_WAIT, event_of(ZR_EVENT_GROUP_SUM_DONE, zr_group_sum_index(a)));
    job_op(t, HOST_RECORD, event_of(ZR_EVENT_GROUP_SUM_FREE, zr_group_sum_index(a)));
}

static void trace_norm(struct tracing *t, int32_t number)
{
    job_op(t, HOST_WAIT, event_of(ZR_EVENT_STEP_COMPUTE, 0));
    job_tail(t, ZR_EVENT_GATHER_TAIL);
    if (t->plan->spec.outer_gathers)
        job_tail(t, ZR_EVENT_GATHER_OUTER_TAIL);
    if (t->plan->spec.outer)
        job_tail(t, ZR_EVENT_REDUCE_OUTER_TAIL);
    t->norm_job = number;
}

static void trace_update(struct tracing *t, const struct zr_action *a, int32_t number)
{
    if (t->plan->sum_in_place[a->unit])
        trace_grad_free(t, a, number);
    job_op(t, HOST_RECORD, event_of(ZR_EVENT_UPDATED, a->unit));
    t->unit_job[a->unit] = number;
}

static void trace_job(struct tracing *t, const struct zr_action *a)
{
    int32_t number = ++t->p->n_jobs;
    if (number > MAX_JOBS)
        abort();
    add_op(t, HOST_PUSH, number);
    switch ((enum zr_action_kind)a->kind) {
    case ZR_ACT_GATHER:
        trace_gather(t, a, number);
        break;
    case ZR_ACT_GATHER_OUTER:
        trace_gather_outer(t, a);
        break;
    case ZR_ACT_REDUCE:
        trace_reduce(t, a, number);
        break;
    case ZR_ACT_REDUCE_OUTER:
        trace_reduce_outer(t, a);
        break;
    case ZR_ACT_NORM:
        trace_norm(t, number);
        break;
    case ZR_ACT_UPDATE:
        trace_update(t, a, number);
        break;
    default:
        break;
    }
}

static void trace_action(struct tracing *t, const struct zr_action *a)
{
    int32_t index = zr_grad_index(t->plan, a->unit, a->slot);
    switch ((enum zr_action_kind)a->kind) {
    case ZR_ACT_USE_PARAM:
        if (a->slot >= 0 && t->slot_unit[a->slot] != a->unit)
            wrong(t, "a bracket on a slot that holds another unit", a);
        if (a->slot >= 0)
            t->open[a->slot] = true;
        /* fall through */
    case ZR_ACT_WAIT_PARAM:
        add_op(t, HOST_AWAIT, t->unit_job[a->unit]);
        add_op(t, HOST_WAIT, event_of(a->gathered ? ZR_EVENT_READY : ZR_EVENT_UPDATED, a->unit));
        break;
    case ZR_ACT_HIDE_PARAM:
        if (a->slot >= 0) {
            t->open[a->slot] = false; /* its last bracket ended */
            add_op(t, HOST_RECORD, event_of(ZR_EVENT_PARAM_FREE, a->slot));
        }
        break;
    case ZR_ACT_USE_GRAD:
        add_op(t, HOST_AWAIT, t->grad_job[index]);
        add_op(t, HOST_WAIT, event_of(ZR_EVENT_GRAD_FREE, index));
        break;
    case ZR_ACT_RETURN_GRADS:
        add_op(t, HOST_AWAIT, t->grad_job[index]);
        add_op(t, HOST_WAIT, event_of(ZR_EVENT_GRAD_FREE, index));
        break;
    case ZR_ACT_HIDE_GRAD:
        add_op(t, HOST_RECORD, event_of(ZR_EVENT_GRAD_DONE, index));
        break;
    default:
        trace_job(t, a);
    }
}

/* Sends the script's calls through the core. */
static int trace(struct program *p, const struct zr_plan *plan, const struct zr_script *s,
                 enum zr_search_flaw flaw)
{
    struct tracing t = {.p = p, .plan = plan, .flaw = flaw};
    size_t bytes = zr_core_bytes(&plan->spec);
    void *now = malloc(bytes), *next = malloc(bytes);
    struct zr_action *actions = malloc((size_t)zr_core_max_actions(&plan->spec) * sizeof *actions);
    if (!now || !next || !actions)
        abort();
    zr_core_init(now, &plan->spec);
    int err = 0;
    for (int32_t i = 0; !err && i < s->n; i++) {
        const struct zr_script_op *op = &s->ops[i];
        if (op->kind == ZR_DO_USE)
            continue;
        struct zr_core_event ev = {op->kind == ZR_DO_BEGIN      ? ZR_EV_BEGIN
                                   : op->kind == ZR_DO_END      ? ZR_EV_END
                                   : op->kind == ZR_DO_MICRO    ? ZR_EV_MICRO
                                   : op->kind == ZR_DO_SNAPSHOT ? ZR_EV_SNAPSHOT
                                                                : ZR_EV_STEP,
                                   op->index, op->phase};
        int32_t n;
        memcpy(next, now, bytes); /* the core's state is plain data */
        err = zr_core_take(next, &ev, actions, &n);
        if (ev.kind == ZR_EV_STEP) {
            if (t.norm_job) {
                add_op(&t, HOST_AWAIT, t.norm_job);
                add_op(&t, HOST_SYNC, t.norm_job);
            }
            add_op(&t, HOST_RECORD, event_of(ZR_EVENT_STEP_COMPUTE, 0));
        }
        /* The previous snapshot was read, so it was complete. */
        if (ev.kind == ZR_EV_SNAPSHOT && t.snapshot_job) {
            add_op(&t, HOST_AWAIT, t.snapshot_job);
            add_op(&t, HOST_SYNC, t.snapshot_job);
        }
        for (int32_t k = 0; !err && k < n; k++)
            trace_action(&t, &actions[k]);
        if (ev.kind == ZR_EV_SNAPSHOT)
            t.snapshot_job = p->n_jobs;
        void *swap = now;
        now = next;
        next = swap;
    }
    add_op(&t, HOST_AWAIT, p->n_jobs);
    add_op(&t, HOST_SYNC, p->n_jobs);
    free(now);
    free(next);
    free(actions);
    return err;
}

/* ---- states ---- */

struct states {
    uint64_t *seen, *queue; /* seen: open addressing; 0 is a free entry */
    int64_t n, n_done, cap;
};

static void visit(struct states *s, uint64_t key);

static void enlarge(struct states *s)
{
    struct states more = {.cap = s->cap ? s->cap * 4 : 1 << 12};
    more.seen = calloc((size_t)more.cap, sizeof *more.seen);
    more.queue = malloc((size_t)more.cap * sizeof *more.queue);
    if (!more.seen || !more.queue)
        abort();
    for (int64_t i = 0; i < s->n; i++)
        visit(&more, s->queue[i]);
    more.n_done = s->n_done;
    free(s->seen);
    free(s->queue);
    *s = more;
}

static void visit(struct states *s, uint64_t key)
{
    if (2 * s->n >= s->cap)
        enlarge(s);
    uint64_t stored = key + 1, at = stored * UINT64_C(0x9e3779b97f4a7c15) >> 20;
    for (;; at++) {
        uint64_t *slot = &s->seen[at & (uint64_t)(s->cap - 1)];
        if (*slot == stored)
            return;
        if (!*slot) {
            *slot = stored;
            s->queue[s->n++] = key;
            return;
        }
    }
}

/* Ten bits each for the position of a rank's model thread and of its loop. Ranks are sorted. */
static uint64_t pack(const int32_t (*at)[2], int world)
{
    uint64_t part[3] = {0}, key = 0;
    for (int r = 0; r < world; r++) {
        int i = r;
        uint64_t x = (uint64_t)at[r][0] << 10 | (uint64_t)at[r][1];
        for (; i > 0 && part[i - 1] > x; i--)
            part[i] = part[i - 1];
        part[i] = x;
    }
    for (int r = 0; r < world; r++)
        key = key << 20 | part[r];
    return key;
}

/* Counts the records before a wait. Returns false if another path found another count. */
static bool finds(struct program *p, struct host_op *op, int32_t model_at, int32_t loop_at, bool by_model)
{
    int class = op->number / OF_CLASS;
    bool of_model =
        class == ZR_EVENT_PARAM_FREE || class == ZR_EVENT_GRAD_DONE || class == ZR_EVENT_STEP_COMPUTE;
    /* The wait follows the record of a tail within the same job. */
    bool is_tail = class == ZR_EVENT_GATHER_TAIL || class == ZR_EVENT_GATHER_OUTER_TAIL ||
                   class == ZR_EVENT_REDUCE_OUTER_TAIL;
    int32_t at = of_model ? model_at : by_model ? loop_at : loop_at + is_tail, n = 0;
    while (n < p->n_recorded[op->number] && p->recorded[op->number][n] < at)
        n++;
    if (op->found >= 0 && op->found != n) {
        snprintf(
            p->fault, sizeof p->fault,
            "a wait of %s for event class %d, number %d finds record %d or %d: it depends on the loop's pace",
            by_model ? "the model's thread" : "the loop", class, op->number % OF_CLASS, op->found, n);
        return false;
    }
    op->found = n;
    return true;
}

/* The positions of each rank's model thread and loop, and the smallest position of a loop. */
struct state {
    int world;
    int32_t at[3][2], least;
};

static struct state unpack(uint64_t key, int world)
{
    struct state at = {.world = world, .least = INT32_MAX};
    for (int r = world; r-- > 0; key >>= 20) {
        at.at[r][0] = (int32_t)(key >> 10 & 1023);
        at.at[r][1] = (int32_t)(key & 1023);
        at.least = at.at[r][1] < at.least ? at.at[r][1] : at.least;
    }
    return at;
}

static void visit_state(struct states *s, const struct state *at)
{
    visit(s, pack((const int32_t(*)[2])at->at, at->world));
}

/* Makes the next move of rank r's model thread, unless it has ended or must wait, and counts it in *n.
 * Returns false on a fault. */
static bool move_model(struct program *p, struct states *s, struct state at, int r, int *n)
{
    int32_t *m = &at.at[r][0], l = at.at[r][1];
    if (*m == p->n_ops)
        return true;
    struct host_op *op = &p->op[*m];
    if (op->kind == HOST_WAIT && !finds(p, op, *m, l, true))
        return false;
    if ((op->kind == HOST_AWAIT && l < op->number) || (op->kind == HOST_SYNC && at.least < op->number))
        return true;
    do
        ++*m;
    while (at.world > 2 && *m < p->n_ops && p->op[*m].kind != HOST_AWAIT && p->op[*m].kind != HOST_SYNC);
    visit_state(s, &at);
    ++*n;
    return true;
}

/* Jobs that the model thread has pushed before position m. */
static int32_t pushed_before(const struct program *p, int32_t m)
{
    while (m-- > 0)
        if (p->op[m].kind == HOST_PUSH)
            return p->op[m].number;
    return 0;
}

/* The same for the loop of rank r. It can issue a job that was pushed. */
static bool move_loop(struct program *p, struct states *s, struct state at, int r, int *n)
{
    int32_t m = at.at[r][0], *l = &at.at[r][1];
    if (*l >= pushed_before(p, m))
        return true;
    struct job_ops *job = &p->job[*l];
    for (int k = 0; k < job->n; k++)
        if (job->op[k].kind == HOST_WAIT && !finds(p, &job->op[k], m, *l, false))
            return false;
    ++*l;
    visit_state(s, &at);
    ++*n;
    return true;
}

static bool all_ended(const struct program *p, const struct state *at)
{
    int n = 0;
    for (int r = 0; r < at->world; r++)
        n += at->at[r][0] == p->n_ops && at->at[r][1] == p->n_jobs;
    return n == at->world;
}

static bool search(struct program *p, int world, struct states *s, struct zr_search_result *out)
{
    bool ended = false;
    visit_state(s, &(struct state){.world = world});
    for (; s->n_done < s->n; s->n_done++) {
        struct state at = unpack(s->queue[s->n_done], world);
        int n_next = 0;
        for (int r = 0; r < world; r++)
            if (!move_model(p, s, at, r, &n_next) || !move_loop(p, s, at, r, &n_next))
                return false;
        out->n_edges += n_next;
        bool is_end = all_ended(p, &at);
        ended |= is_end;
        if (n_next == 0 && !is_end) {
            snprintf(p->fault, sizeof p->fault, "deadlock: rank 0 is at %d of %d, its loop at job %d of %d",
                     at.at[0][0], p->n_ops, at.at[0][1], p->n_jobs);
            return false;
        }
    }
    if (!ended)
        snprintf(p->fault, sizeof p->fault, "the end is never reached");
    return ended;
}

/* n_ranks: the number of ranks to follow. */
static int search_case(const struct zr_verify_case *c, int n_ranks, enum zr_search_flaw flaw,
                       struct zr_search_result *out)
{
    struct program *p = calloc(1, sizeof *p);
    struct zr_verify_world v = {.c = c};
    struct zr_verify_result run;
    struct states s = {0};
    if (!p)
        return zr_fail(ZERO_ERR_NOMEM, "no memory to search");
    int err = zr_stages_make(&v);
    if (!err)
        err = trace(p, v.stages[0].plan, &v.stages[0].script, flaw);
    if (!err) {
        bool good = !p->fault[0] && search(p, n_ranks, &s, out);
        out->n_configs++;
        out->n_states += s.n;
        err = zr_verify_run(c, NULL, &run);
        if (!err && good && run.n_reports) {
            good = false;
            snprintf(p->fault, sizeof p->fault, "%.150s", run.text);
        }
        if (!good && !out->n_bad++) {
            char text[800];
            zr_verify_describe(c, text, sizeof text);
            snprintf(out->text, sizeof out->text, "%s: %s", text, p->fault);
        }
    }
    free(s.seen);
    free(s.queue);
    zr_stages_free(&v);
    free(p);
    return err;
}

/* All patterns, then the first one with all possible snapshots, and the second one with frozen tensors. */
enum { N_PROGRAMS = 3 * 2 * 2 * (ZR_USE_PATTERNS + 2) };

static struct zr_verify_case program_case(int units, int i)
{
    return (struct zr_verify_case){.seed = (uint64_t)units,
                                   .n_units = units,
                                   .prefetch = i % 3,
                                   .accum = 1 + i / 3 % 2,
                                   .deterministic = i / 6 % 2,
                                   .pattern = (enum zr_verify_pattern)(i / 12 % ZR_USE_PATTERNS),
                                   .snapshots = i / 12 == ZR_USE_PATTERNS ? 100 : 0,
                                   .frozen = i / 12 > ZR_USE_PATTERNS ? 70 : 0,
                                   .declared = true,
                                   .n_steps = 2,
                                   .pace = ZR_PACE_RANDOM,
                                   .poison = -1,
                                   .dead = -1};
}

/* Two groups of two ranks, with two or three ranks followed. Three ranks get one unit less, as their programs
 * are longer. */
static int search_groups(int32_t most_units, int32_t most_ranks, enum zr_search_flaw flaw,
                         struct zr_search_result *out)
{
    int err = 0;
    for (int n_ranks = 2; n_ranks <= most_ranks; n_ranks++)
        for (int units = 1; units == 1 || units <= most_units - (n_ranks > 2); units++)
            for (int i = 0; i < 2 * N_PROGRAMS && !err; i++) {
                struct zr_verify_case c = program_case(units, i / 2);
                c.stage = 3;
                c.world = 4;
                c.group = 2;
                c.hybrid = i % 2 ? ZR_HFSDP : ZR_HSDP;
                err = search_case(&c, n_ranks, flaw, out);
            }
    return err;
}

int zr_verify_search(int32_t most_units, int32_t most_ranks, enum zr_search_flaw flaw,
                     struct zr_search_result *out)
{
    *out = (struct zr_search_result){0};
    if (most_units < 1 || most_units > 6 || most_ranks < 2 || most_ranks > 3)
        return zr_fail(ZERO_ERR_ARG, "units is %d (1..6), ranks %d (2..3)", most_units, most_ranks);
    int err = 0;
    for (int world = 2; world <= most_ranks; world++)
        for (int units = 1; units <= most_units; units++)
            for (int i = 0; i < 4 * N_PROGRAMS && !err; i++) {
                struct zr_verify_case c = program_case(units, i / 4);
                c.stage = i % 4;
                c.world = world;
                err = search_case(&c, world, flaw, out);
            }
    return err ? err : search_groups(most_units, most_ranks, flaw, out);
}
