/* verify_mutants.c: schedules with one thing missing. */
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
    default:
        return e->reduce_stream;
    }
}

bool zr_mutant_drops(void *arg, enum zr_sim_edge edge, int rank, const struct zr_event *event,
                     const struct zr_stream *stream)
{
    static const enum zr_mutation of[] = {[ZR_SIM_RECORD] = ZR_LESS_RECORD,
                                          [ZR_SIM_WAIT] = ZR_LESS_WAIT,
                                          [ZR_SIM_EVENT_SYNC] = ZR_LESS_EVENT_SYNC,
                                          [ZR_SIM_STREAM_SYNC] = ZR_LESS_STREAM_SYNC,
                                          [ZR_SIM_CLEAR] = ZR_LESS_CLEAR};
    struct zr_verify_world *v = arg;
    struct zr_verify_rank *r = &v->ranks[rank];
    const struct zr_mutant *m = v->mutant;
    const struct zr_engine *e = &r->engine;
    if (m->what != of[edge] || !applies(r, m))
        return false;
    if (m->event && (!event || zr_event_class_of(&e->ev, event) != m->event))
        return false;
    if (m->stream && stream != stream_of(e, m->stream))
        return false;
    if (m->during && strcmp(m->during, zr_sim_speaker(v->sim)->during))
        return false;
    v->n_acted++;
    return true;
}

void zr_mutant_issue(struct zr_verify_rank *r, const struct zr_job *job)
{
    const struct zr_mutant *m = r->v->mutant;
    struct zr_engine *e = &r->engine;
    if (r->holding && (m->until ? job->action.kind == m->until : job->action.kind != r->held.action.kind)) {
        r->holding = false;
        zr_engine_issue(e, job);
        zr_engine_issue(e, &r->held);
        return;
    }
    if (!m || m->what < ZR_LESS_JOB || m->what >= ZR_LESS_CALL ||
        (m->action && job->action.kind != m->action) || !applies(r, m)) {
        zr_engine_issue(e, job);
        return;
    }
    struct zr_job changed = *job;
    int32_t n_slots = job->action.kind == ZR_ACT_GATHER ? r->plan.n_param_slots : r->plan.n_grad_slots;
    bool acted = true;
    switch (m->what) {
    case ZR_LESS_JOB:
        break;
    case ZR_TWICE_JOB:
        zr_engine_issue(e, job);
        /* In place, what is added between groups is what was set aside. */
        if (changed.action.kind == ZR_ACT_REDUCE ||
            (changed.action.kind == ZR_ACT_REDUCE_OUTER && changed.action.partial >= 0))
            changed.action.accumulate = true;
        zr_engine_issue(e, &changed);
        break;
    case ZR_LATE_JOB:
        acted = !r->holding;
        if (r->holding) {
            zr_engine_issue(e, job);
        } else {
            r->holding = true;
            r->held = *job;
        }
        break;
    case ZR_OTHER_SLOT:
        acted = job->action.slot >= 0 && n_slots > 1;
        if (acted) {
            /* Only into slots that hold as much. */
            int32_t other = (job->action.slot + 1) % n_slots;
            const struct zr_slot_place *p =
                job->action.kind == ZR_ACT_GATHER ? r->plan.param_slots : r->plan.grad_slots;
            acted = p[other].bytes >= p[job->action.slot].bytes;
            if (acted)
                changed.action.slot = other;
        }
        zr_engine_issue(e, &changed);
        break;
    case ZR_OTHER_PARTIAL:
        acted = job->action.partial >= 0;
        if (acted)
            changed.action.partial = (job->action.partial + 1) % r->plan.n_partial_slots;
        zr_engine_issue(e, &changed);
        break;
    case ZR_NO_ACCUMULATE:
        acted = changed.action.accumulate;
        changed.action.accumulate = false;
        zr_engine_issue(e, &changed);
        break;
    case ZR_ALWAYS_ACCUMULATE:
        acted = !changed.action.accumulate;
        changed.action.accumulate = true;
        zr_engine_issue(e, &changed);
        break;
    case ZR_OTHER_STREAM: {
        struct zr_stream *own = e->reduce_stream;
        e->reduce_stream = e->gather_stream;
        zr_engine_issue(e, job);
        e->reduce_stream = own;
        break;
    }
    case ZR_OTHER_SUM:
        acted = changed.action.sum > 0;
        changed.action.sum = 0;
        changed.action.n_folds = 0;
        zr_engine_issue(e, &changed);
        break;
    default:
        zr_engine_issue(e, job);
    }
    r->v->n_acted += acted;
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
        if (!m->on)
            zr_verify_case_random(first_seed + (uint64_t)i, &c);
        else if (zr_verify_parse(m->on, &c))
            return -1;
        c.seed = first_seed + (uint64_t)i;
        /* Faults of other kinds would end the run before the mutant shows. */
        c.dead = -1;
        c.fail_alloc = 0;
        if (c.world > 6)
            c.world = 2 + c.world % 3;
        if (!zr_verify_possible(&c)) /* its groups do not divide that */
            c.group = c.hybrid = c.dealt = 0;
        if (zr_verify_run(&c, m, out))
            continue;
        *n_acted += out->n_unmatched > 0 || m->what == ZR_FLAWED_COMM;
        if (out->n_reports)
            return i;
    }
    return -1;
}
