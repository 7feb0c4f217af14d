/* SPDX-License-Identifier: Apache-2.0 */
/* verify_mutants.c: applies a mutant to a case: it drops a wait or record, or changes, repeats, delays or
 * removes a job. A mutant that is never reported shows that a check is missing, or that the operation is not
 * needed. verify_mutants.inc is the list of mutants. */
#include "shard/engine/mesh_axis.h"
#include "shard/verify/verify_world.h"

#include <string.h>

static bool applies(const struct zr_verify_rank *r, const struct zr_mutant *m)
{
    return !m->one_rank || r->id == r->v->c->world - 1;
}

static const struct zr_stream *stream_of(const struct zr_engine *e, enum zr_stream_class class)
{
    switch (class) {
    case ZR_ON_COMPUTE:
        return e->compute;
    case ZR_ON_GATHER:
        return e->gather_stream;
    case ZR_ON_GATHER_OUTER:
        return e->role[ZR_ROLE_GATHER_OUTER].stream;
    case ZR_ON_REDUCE_OUTER:
        return e->role[ZR_ROLE_REDUCE_OUTER].stream;
    case ZR_ON_PAIR_0:
        return e->pair_stream[0];
    case ZR_ON_TIED:
        return e->tied_stream;
    case ZR_ON_SHIFT:
        return e->m.cp_axis->shift_stream;
    case ZR_ON_STATES:
        return e->states_stream;
    default:
        return e->reduce_stream;
    }
}

bool zr_mutant_drops(void *arg, enum zr_sim_edge edge, int rank, const struct zr_event *event,
                     const struct zr_stream *stream)
{
    static const enum zr_mutation mutation_of[] = {[ZR_SIM_RECORD] = ZR_LESS_RECORD,
                                                   [ZR_SIM_WAIT] = ZR_LESS_WAIT,
                                                   [ZR_SIM_EVENT_SYNC] = ZR_LESS_EVENT_SYNC,
                                                   [ZR_SIM_STREAM_SYNC] = ZR_LESS_STREAM_SYNC,
                                                   [ZR_SIM_CLEAR] = ZR_LESS_CLEAR};
    struct zr_verify_world *v = arg;
    struct zr_verify_rank *r = &v->ranks[rank];
    const struct zr_mutant *m = v->mutant;
    const struct zr_engine *e = &r->engine;
    if (m->what != mutation_of[edge] || !applies(r, m))
        return false;
    if (m->event && (!event || zr_event_class_of(e, event) != m->event))
        return false;
    if (m->stream && stream != stream_of(e, m->stream))
        return false;
    if (m->during && strcmp(m->during, zr_sim_speaker(v->sim)->during))
        return false;
    v->n_acted++;
    return true;
}

/* Whether the mutant changes this job. */
static bool concerns(const struct zr_verify_rank *r, const struct zr_job *job)
{
    const struct zr_mutant *m = r->v->mutant;
    return m && m->what >= ZR_LESS_JOB && m->what < ZR_LESS_CALL &&
           (!m->action || job->action.kind == m->action) && applies(r, m);
}

/* Uses the next slot instead, if it is large enough. */
static bool move_slot(const struct zr_plan *plan, struct zr_action *a)
{
    bool gathers = a->kind == ZR_ACT_GATHER;
    int32_t n = gathers ? plan->n_param_slots : plan->n_grad_slots;
    const struct zr_slot_region *slots = gathers ? plan->param_slots : plan->grad_slots;
    if (a->slot < 0 || n < 2)
        return false;
    int32_t other = (a->slot + 1) % n;
    if (slots[other].bytes < slots[a->slot].bytes)
        return false;
    a->slot = other;
    return true;
}

static bool move_group_slot(const struct zr_plan *plan, struct zr_action *a)
{
    if (a->group_slot < 0)
        return false;
    a->group_slot = (a->group_slot + 1) % plan->n_group_slots;
    return true;
}

static bool set_accumulate(struct zr_action *a, bool accumulate)
{
    bool changes = a->accumulate != accumulate;
    a->accumulate = accumulate;
    return changes;
}

static bool take_first_sum(struct zr_action *a)
{
    bool changes = a->sum > 0;
    a->sum = 0;
    a->n_folds = 0;
    return changes;
}

/* Changes an action. Returns false if there is nothing to change. */
static bool change(enum zr_mutation what, const struct zr_plan *plan, struct zr_action *a)
{
    switch (what) {
    case ZR_WRONG_SLOT:
        return move_slot(plan, a);
    case ZR_WRONG_GROUP_SLOT:
        return move_group_slot(plan, a);
    case ZR_NO_ACCUMULATE:
        return set_accumulate(a, false);
    case ZR_ALWAYS_ACCUMULATE:
        return set_accumulate(a, true);
    case ZR_OTHER_SUM:
        return take_first_sum(a);
    default:
        return true;
    }
}

static void issue_twice(struct zr_engine *e, struct zr_job job)
{
    struct zr_action *a = &job.action;
    zr_engine_issue(e, &job);
    /* A sum in place between groups never accumulates. */
    if (a->kind == ZR_ACT_REDUCE || (a->kind == ZR_ACT_REDUCE_OUTER && a->group_slot >= 0))
        a->accumulate = true;
    zr_engine_issue(e, &job);
}

static void issue_on_gather_stream(struct zr_engine *e, const struct zr_job *job)
{
    struct zr_stream *own = e->reduce_stream;
    e->reduce_stream = e->gather_stream;
    zr_engine_issue(e, job);
    e->reduce_stream = own;
}

/* Keeps a job for later, one at a time. */
static bool hold(struct zr_verify_rank *r, const struct zr_job *job)
{
    if (r->holding) {
        zr_engine_issue(&r->engine, job);
        return false;
    }
    r->holding = true;
    r->held = *job;
    return true;
}

/* Whether the held job should have been issued before this one. */
static bool ends_hold(const struct zr_verify_rank *r, const struct zr_job *job)
{
    int until = r->holding ? r->v->mutant->until : 0;
    return r->holding && (until ? job->action.kind == until : job->action.kind != r->held.action.kind);
}

void zr_mutant_issue(struct zr_verify_rank *r, const struct zr_job *job)
{
    struct zr_engine *e = &r->engine;
    if (ends_hold(r, job)) {
        r->holding = false;
        zr_engine_issue(e, job);
        zr_engine_issue(e, &r->held);
        return;
    }
    if (!concerns(r, job)) {
        zr_engine_issue(e, job);
        return;
    }
    struct zr_job changed = *job;
    enum zr_mutation what = r->v->mutant->what;
    bool acted = change(what, &r->plan, &changed.action);
    if (what == ZR_TWICE_JOB)
        issue_twice(e, changed);
    else if (what == ZR_LATE_JOB)
        acted = hold(r, job);
    else if (what == ZR_OTHER_STREAM)
        issue_on_gather_stream(e, job);
    else if (what != ZR_LESS_JOB)
        zr_engine_issue(e, &changed);
    r->v->n_acted += acted;
}

void zr_mutant_change_layout(struct zr_verify_world *v, struct zr_layout *l)
{
    enum zr_mutation what = v->mutant ? v->mutant->what : 0;
    for (int32_t t = 0; t < l->n_tensors; t++) {
        struct zr_tensor *x = &l->tensors[t];
        bool changes = what == ZR_SKIP_TP_GRAD_SUM ? x->partial
                                                   : what == ZR_SUM_EQUAL_TP_GRADS && !x->partial && !x->cut;
        v->n_acted += changes;
        x->partial ^= changes;
    }
    for (int32_t i = 0; i < l->n_flats; i++) {
        bool changes =
            what == ZR_NORM_OF_ALL ? !l->flats[i].cut : what == ZR_NORM_OF_FIRST && l->flats[i].cut;
        v->n_acted += changes && l->flats[i].trainable;
        l->flats[i].cut ^= changes;
    }
}

/* Index of the row's first message from action i on, or of its end. */
static int64_t next_message(const struct zr_walk_row *row, int64_t i)
{
    while (i < row->n && !zr_pipe_sends(row->actions[i].kind) && !zr_pipe_receives(row->actions[i].kind))
        i++;
    return i;
}

void zr_mutant_change_rows(struct zr_verify_world *v, struct zr_verify_stage *s)
{
    enum zr_mutation what = v->mutant ? v->mutant->what : 0;
    struct zr_walk_row *row = &s->walk.step;
    int64_t first = next_message(row, 0), second = next_message(row, first + 1);
    if (what == ZR_LESS_SLOTS && s->room.n_onward > 1) {
        s->room.n_onward--;
        v->n_acted++;
    }
    if (what == ZR_OTHER_ORDER && s->at == v->c->pp - 1 && second < row->n) {
        struct zr_pipe_action swap = row->actions[first];
        row->actions[first] = row->actions[second];
        row->actions[second] = swap;
        v->n_acted++;
    }
    if (what == ZR_LESS_MESSAGE && s->at == 0) {
        int64_t last = first;
        for (int64_t i = first; i < row->n; i = next_message(row, i + 1))
            last = i;
        row->actions[last].kind = ZR_PIPE_UNSHARD; /* an action that sends nothing */
        v->n_acted++;
    }
}

/* Whether the mutant is that one, for this axis. */
static bool concerns_axis(struct zr_verify_rank *r, enum zr_mutation what, enum zero_axis axis)
{
    const struct zr_mutant *m = r->v->mutant;
    bool acts = m && m->what == what && m->roles >> (axis == ZERO_AXIS_CP ? ZR_ROLE_CP : ZR_ROLE_TP) & 1;
    r->v->n_acted += acts;
    return acts;
}

bool zr_mutant_shifts_back(struct zr_verify_rank *r, enum zero_axis axis)
{
    return concerns_axis(r, ZR_OTHER_SIDE, axis);
}

bool zr_mutant_leaves_shift_open(struct zr_verify_rank *r, enum zero_axis axis)
{
    return concerns_axis(r, ZR_LESS_SHIFT_END, axis);
}

void zr_mutant_keep_out(struct zr_verify_rank *r, enum zero_axis axis)
{
    if (concerns_axis(r, ZR_SAME_OUT, axis))
        zr_axis_of(&r->engine, axis)->out = 1; /* so it uses 0 first */
}

bool zr_mutant_reads_into_last(struct zr_verify_rank *r)
{
    const struct zr_mutant *m = r->v->mutant;
    bool acts = m && m->what == ZR_SAME_BUFFER && r->last_buffer;
    r->v->n_acted += acts;
    return acts;
}

static const struct zr_mutant mutants[] = {
#include "shard/verify/verify_mutants.inc"
};

int zr_mutant_count(void)
{
    return (int)(sizeof mutants / sizeof *mutants);
}

const struct zr_mutant *zr_mutant_at(int i)
{
    return &mutants[i];
}

const char *zr_mutant_name(const struct zr_mutant *m)
{
    return m->name;
}

const char *zr_mutant_link(const struct zr_mutant *m)
{
    return m->link;
}

int64_t zr_mutant_hunt(const struct zr_mutant *m, uint64_t first_seed, int64_t n_seeds, int64_t *n_acted,
                       struct zr_verify_result *out)
{
    *n_acted = 0;
    for (int64_t i = 0; i < n_seeds; i++) {
        struct zr_verify_case c;
        if (!m->case_text)
            zr_verify_case_random(first_seed + (uint64_t)i, &c);
        else if (zr_verify_parse(m->case_text, &c))
            return -1;
        c.seed = first_seed + (uint64_t)i;
        /* Other faults would end the run before the mutant has an effect. */
        c.dead = -1;
        c.fail_alloc = 0;
        if (c.world > 6 && !m->case_text)
            c.world = 2 + c.world % 3;
        if (!zr_verify_possible(&c)) { /* the smaller world is not divisible */
            c.group = c.hybrid = c.pp = c.tp = c.cp = 0;
            c.per_rank = c.schedule = c.partial = c.sums = c.moves = 0;
            c.dealt = c.tied = false;
        }
        if (zr_verify_run(&c, m, out))
            continue;
        *n_acted += out->n_acted > 0 || m->what == ZR_FLAWED_COMM;
        if (out->n_reports)
            return i;
    }
    return -1;
}
