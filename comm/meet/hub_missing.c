/* SPDX-License-Identifier: Apache-2.0 */
/* hub_missing.c: who does not come, in a tree. Rank 0 waits for those that are linked with it, and one of
 * them may only wait for another. So before rank 0 says who is missing it asks; each rank answers with those
 * that it waits for itself, after it has asked them; and one that does not answer is missing. */
#include "comm/meet/hub.h"

#include <string.h>

enum { MOST_MISSING = sizeof((struct zr_missing *)0)->ranks / sizeof(int32_t), MOST_ANSWER_MS = 2000 };

int64_t zr_hub_answers_ms(const struct zr_rendezvous *r)
{
    int64_t ms = r->timeout_ms / 8;
    return !r->is_tree ? 0 : ms < 1 ? 1 : ms > MOST_ANSWER_MS ? MOST_ANSWER_MS : ms;
}

void zr_hub_forget_missing(struct zr_rendezvous *r)
{
    if (r->missing.state == ZR_MISSING_UNKNOWN && !r->missing.n && !r->missing.n_waiting)
        return;
    uv_timer_stop(&r->answers);
    for (int i = 0; i < r->w.world; i++)
        r->members[i].is_missing = r->members[i].is_asked = false;
    memset(&r->missing, 0, sizeof r->missing);
}

static void add_missing(struct zr_rendezvous *r, int rank)
{
    struct zr_missing *m = &r->missing;
    if (r->members[rank].is_missing)
        return;
    r->members[rank].is_missing = true;
    if (m->n < MOST_MISSING)
        m->ranks[m->n++] = rank;
}

/* Ranks wait for the rank that is child k, or for one below it. */
static bool awaits_child(const struct zr_rendezvous *r, int k)
{
    const struct zr_member *member = &r->members[zr_tree_child(&r->tree, k)];
    return r->phase == ZR_PHASE_MEET       ? !member->has_joined
           : r->phase == ZR_PHASE_EXCHANGE ? r->is_gathering && !member->gave
                                           : false;
}

static void finish_asking(struct zr_rendezvous *r)
{
    struct zr_missing *m = &r->missing;
    uv_timer_stop(&r->answers);
    for (int k = 0; k < r->tree.n_children; k++) {
        int rank = zr_tree_child(&r->tree, k);
        /* One that waits for nobody and is waited for is as good as one that does not answer. */
        if (r->members[rank].is_asked || (r->w.rank == 0 && !m->n && awaits_child(r, k)))
            add_missing(r, rank);
        r->members[rank].is_asked = false;
    }
    m->n_waiting = 0;
    m->state = ZR_MISSING_KNOWN;
    if (r->w.rank == 0)
        return;
    (void)zr_hub_send_above(r, ZR_FRAME_MISSING, 0, m->ranks, (size_t)m->n * sizeof *m->ranks);
    zr_hub_forget_missing(r);
}

static void on_no_answer(uv_timer_t *t)
{
    finish_asking(t->data);
}

/* Whoever is asked has a part of the time less, for each link that is left below. */
static void ask_below(struct zr_rendezvous *r, int64_t ms)
{
    struct zr_missing *m = &r->missing;
    int height = zr_tree_height(r->tree, r->w.fan_out);
    int32_t below_ms = (int32_t)(height > 1 ? ms * (height - 1) / height : ms);
    zr_hub_forget_missing(r);
    m->state = ZR_MISSING_ASKED;
    for (int k = 0; k < r->tree.n_children; k++) {
        int rank = zr_tree_child(&r->tree, k);
        bool may_answer = zr_tree_child_span(&r->tree, k) > 1 && r->members[rank].state == ZR_MEMBER_HERE;
        if (!awaits_child(r, k))
            continue;
        if (may_answer && zr_hub_send_about(r, rank, ZR_FRAME_ASK_MISSING, below_ms, NULL, 0) == 0) {
            r->members[rank].is_asked = true;
            m->n_waiting++;
        } else {
            add_missing(r, rank);
        }
    }
    uv_update_time(r->loop);
    if (m->n_waiting)
        uv_timer_start(&r->answers, on_no_answer, (uint64_t)ms, 0);
    else
        finish_asking(r);
}

bool zr_hub_asks_below(struct zr_rendezvous *r)
{
    if (!r->is_tree || r->w.rank != 0 || r->phase == ZR_PHASE_IDLE)
        return false;
    if (r->missing.state == ZR_MISSING_UNKNOWN)
        ask_below(r, zr_hub_answers_ms(r));
    return r->missing.state == ZR_MISSING_ASKED;
}

void zr_hub_on_ask_missing(struct zr_rendezvous *r, int32_t ms)
{
    int32_t self = r->w.rank;
    if (r->detached || r->closing || r->missing.state == ZR_MISSING_ASKED)
        return;
    if (r->phase == ZR_PHASE_IDLE)
        (void)zr_hub_send_above(r, ZR_FRAME_MISSING, 0, &self, sizeof self);
    else
        ask_below(r, ms < 1 ? 1 : ms > MOST_ANSWER_MS ? MOST_ANSWER_MS : ms);
}

bool zr_hub_on_missing(struct zr_rendezvous *r, int rank, const char *payload, size_t n)
{
    struct zr_member *member = &r->members[rank];
    if (n % sizeof(int32_t) || n > sizeof r->missing.ranks)
        return false;
    if (!member->is_asked) /* it answers late */
        return true;
    for (size_t i = 0; i < n / sizeof(int32_t); i++) {
        int32_t one;
        memcpy(&one, payload + i * sizeof one, sizeof one);
        if (one < 0 || one >= r->w.world || zr_hub_towards(r, one) != rank)
            return false;
        add_missing(r, one);
    }
    member->is_asked = false;
    if (--r->missing.n_waiting == 0)
        finish_asking(r);
    return true;
}
