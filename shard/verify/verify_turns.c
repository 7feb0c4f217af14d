/* SPDX-License-Identifier: Apache-2.0 */
/* verify_turns.c: decides by the seed which thread runs next. Model threads are coroutines, and loops are
 * driven from here. A rank may die at any point of either. */
#include "shard/verify/verify_world.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- dying ---- */

void zr_turn_give_way(struct zr_verify_rank *r)
{
    swapcontext(&r->context, &r->v->scheduler);
    zr_sim_host(r->v->sim, r->id, ZR_SIM_MODEL);
}

/* Called at each point of a rank. If the rank dies here and its model thread is running, this call does not
 * return. */
bool zr_turn_dies(struct zr_verify_rank *r)
{
    struct zr_verify_world *v = r->v;
    if (r->id != v->c->dead || r->n_points++ < v->c->dead_at || r->dead)
        return r->dead;
    r->dead = r->done = true;
    v->lose_at = v->n_turns + zr_verify_below(&v->random, 64);
    zr_sim_kill(v->sim, r->id);
    zr_sim_recorder(v->sim)->forgiving = true;
    while (v->running == r)
        zr_turn_give_way(r);
    return true;
}

/* ---- the loops ---- */

static void issue_one(struct zr_verify_rank *r)
{
    struct zr_line *before = zr_sim_speaker(r->v->sim);
    if (zr_loop_issue_next(r->loop))
        r->v->n_issued++;
    zr_sim_speak(r->v->sim, before);
}

static bool behind(const struct zr_verify_rank *r)
{
    return r->loop && !r->dead && r->n_issued < r->n_pushed;
}

static void note_job(struct zr_verify_rank *r, const struct zr_job *job)
{
    uint64_t word[] = {
        job->action.kind, (uint64_t)job->action.unit,      (uint64_t)job->action.slot, job->action.fill,
        job->action.sum,  job->action.accumulate,          job->action.n_folds,        job->call_hash,
        job->step,        (uint64_t)job->action.group_slot};
    for (size_t i = 0; i < sizeof word / sizeof *word; i++)
        r->action_hash = (r->action_hash ^ word[i]) * UINT64_C(0x100000001b3) + 1;
}

/* Issues a job. The loop's thread knows what the model thread knew when it pushed the job. */
void zr_turn_issue(void *arg, const struct zr_job *job)
{
    struct zr_verify_rank *r = arg;
    struct zr_vclock **known = &r->pushed[r->n_issued++ % ZR_VERIFY_QUEUE];
    struct zr_line *l = zr_sim_host(r->v->sim, r->id, ZR_SIM_LOOP);
    zr_line_join(zr_sim_recorder(r->v->sim), l, *known);
    zr_vclock_drop(*known);
    *known = NULL;
    l->during = zr_action_name((enum zr_action_kind)job->action.kind);
    l->unit = job->action.unit;
    l->step = job->step;
    note_job(r, job);
    if (!zr_turn_dies(r))
        zr_mutant_issue(r, job);
}

static void issue_some(struct zr_verify_rank *r)
{
    for (int64_t k = zr_verify_below(&r->v->random, 4); k > 0 && behind(r); k--)
        issue_one(r);
}

void zr_turn_pushed(void *arg)
{
    struct zr_verify_rank *r = arg;
    r->pushed[r->n_pushed++ % ZR_VERIFY_QUEUE] = zr_vclock_hold(zr_sim_speaker(r->v->sim));
    while (r->pace == ZR_PACE_AT_ONCE && behind(r))
        issue_one(r);
    if (r->pace == ZR_PACE_RANDOM && zr_verify_chance(&r->v->random, 30))
        issue_some(r);
}

void zr_turn_awaited(void *arg, uint64_t number)
{
    struct zr_verify_rank *r = arg;
    const struct zr_mutant *m = r->v->mutant;
    if (m && m->what == ZR_LESS_AWAIT && (!m->one_rank || r->id == r->v->c->world - 1) &&
        (!m->during || !strcmp(m->during, zr_sim_speaker(r->v->sim)->during))) {
        r->v->n_acted++;
        return;
    }
    while (r->n_issued < number)
        issue_one(r);
    if (m && m->what == ZR_TWO_ISSUERS) {
        r->v->n_acted++;
        return;
    }
    struct zr_line *model = zr_sim_speaker(r->v->sim), *loop = zr_sim_host(r->v->sim, r->id, ZR_SIM_LOOP);
    zr_line_join(zr_sim_recorder(r->v->sim), model, loop->clock);
    zr_sim_speak(r->v->sim, model);
}

/* ---- waiting ---- */

/* The model thread of a rank waits for the device. */
void zr_turn_yield(void *arg, int rank)
{
    struct zr_verify_world *v = arg;
    struct zr_verify_rank *r = v->running;
    if (!r || r->id != rank) {
        fprintf(stderr, "verify: rank %d waits outside its thread\n", rank);
        abort();
    }
    zr_turn_dies(r);
    r->stuck_at = zr_sim_activity(v->sim) + v->n_issued;
    zr_turn_give_way(r);
}

/* Simulates an agreement through the rendezvous: all ranks succeed or all fail. A rank may reach the next
 * agreement before another has read this result, so two results are kept. */
int zr_turn_agree(struct zr_verify_rank *r, int err)
{
    struct zr_verify_world *v = r->v;
    int number = v->n_agreed / v->n_ranks, *of_this = &v->agreed[number % 2];
    if (v->n_agreed % v->n_ranks == 0)
        *of_this = 0;
    if (err)
        *of_this = v->agreed_error = err;
    v->n_agreed++;
    while (v->n_agreed < (number + 1) * v->n_ranks && !v->lost)
        zr_turn_yield(v, r->id);
    return v->lost ? ZERO_ERR_PEER : *of_this;
}

/* ---- which rank continues ---- */

static bool can_go(const struct zr_verify_rank *r)
{
    return !r->done && r->stuck_at != zr_sim_activity(r->v->sim) + r->v->n_issued;
}

static void lose(struct zr_verify_world *v)
{
    char text[64];
    v->lost = true;
    snprintf(text, sizeof text, "rank %d was lost", v->c->dead);
    for (int r = 0; r < v->n_ranks; r++)
        if (r != v->c->dead && v->ranks[r].engine_open)
            zr_engine_fail(&v->ranks[r].engine, ZERO_ERR_PEER, text);
    for (int k = 0; k < v->n_opened; k++)
        zr_sim_comm_lose(v->opened[k][v->c->dead], v->c->dead);
}

static bool add_waits(void *arg, struct zr_comm *any)
{
    char *waits = arg;
    size_t n = strlen(waits);
    zr_sim_comm_waits(any, waits + n, ZR_ERROR_BYTES - n);
    return n + 1 < ZR_ERROR_BYTES;
}

static bool end_group(void *arg, struct zr_comm *any)
{
    (void)arg;
    any->ops->abort(any, ZERO_ERR_TIMEOUT, "hang");
    return true;
}

/* Called when no rank can continue, whatever the loops do. Returns false after the second hang. */
static bool break_up(struct zr_verify_world *v)
{
    char waits[ZR_ERROR_BYTES];
    if (v->c->dead >= 0 && v->ranks[v->c->dead].dead && !v->lost) {
        lose(v);
        return true;
    }
    waits[0] = 0;
    zr_groups_each(v, add_waits, waits);
    int saving = 0;
    while (saving < v->n_ranks && !v->ranks[saving].reading)
        saving++;
    zr_report(zr_sim_recorder(v->sim), "hang%s: %s%s",
              v->hang_broken ? " after the communicators failed" : "", waits,
              saving < v->n_ranks ? "a rank waits for its snapshot" : "");
    if (v->hang_broken)
        return false;
    v->hang_broken = true;
    zr_groups_each(v, end_group, NULL);
    return true;
}

void zr_turns_take(struct zr_verify_world *v)
{
    int world = v->n_ranks;
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
                issue_some(r);
            if (zr_snapshot_readable(r) && zr_verify_chance(&v->random, 30))
                zr_snapshot_read(r, true);
            continue;
        }
        /* All model threads wait, so a loop or a reader must move. */
        bool moved = false;
        int from = (int)zr_verify_below(&v->random, world);
        for (int i = 0; i < world && !moved; i++) {
            struct zr_verify_rank *r = &v->ranks[(from + i) % world];
            moved = behind(r) || zr_snapshot_readable(r);
            if (behind(r))
                issue_one(r);
            else if (moved)
                zr_snapshot_read(r, true);
        }
        if (moved)
            continue;
        int64_t now = zr_sim_activity(v->sim) + v->n_issued + v->n_agreed;
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
