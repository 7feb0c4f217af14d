/* SPDX-License-Identifier: Apache-2.0 */
/* hub_wait.c: how the blocking calls of a rendezvous wait: they run the caller's loop until what they wait
 * for is there, something failed or the time is over. Ranks other than 0 wait a little longer than they are
 * told: rank 0 knows who is missing, and its message should be the one seen. */
#include "comm/meet/hub.h"
#include "kernels/log.h"

#include <stdio.h>

enum { GRACE_MS = 1000, LOOK_MS = 100 };

static void on_deadline(uv_timer_t *t)
{
    struct zr_rendezvous *r = t->data;
    r->late = true;
}

void zr_hub_start_deadline(struct zr_rendezvous *r, int64_t ms)
{
    r->late = false;
    uv_update_time(r->loop);
    uv_timer_start(&r->deadline, on_deadline, ms > 0 ? (uint64_t)ms : 0, 0);
}

/* At most a fourth of the time that ranks wait. */
int64_t zr_hub_stay_ms(const struct zr_rendezvous *r)
{
    return r->timeout_ms < 4 * GRACE_MS ? r->timeout_ms / 4 : GRACE_MS;
}

static void on_look(uv_timer_t *t)
{
    struct zr_rendezvous *r = t->data;
    r->looks = true;
}

/* Whether rank 0 has a rank already; of the others only it knows. */
static bool is_not_missing(const struct zr_rendezvous *r, int rank)
{
    const struct zr_member *m = &r->members[rank];
    return rank == r->w.rank || m->state != ZR_MEMBER_EMPTY;
}

/* A rank that has ended before it came here will not come. */
static void look_for_ended(struct zr_rendezvous *r)
{
    const struct zr_waiting *w = r->w.waiting;
    char how[128], text[256];
    for (int i = 0; w->has_ended && i < r->w.world && !r->code; i++)
        if (!is_not_missing(r, i) && w->has_ended(w->arg, i, how, sizeof how)) {
            snprintf(text, sizeof text, "rank %d ended before it came to zero_wrap: %s", i, how);
            zr_hub_fail_all(r, ZR_ERR_PEER, text);
        }
}

const char *zr_hub_limit(const struct zr_rendezvous *r, int64_t ms)
{
    return ms < r->timeout_ms ? "" : r->limit;
}

void zr_waiting_warn(const struct zr_waiting *w, const char *text, int64_t ms, const char *limit)
{
    zr_warn(w->log, "zero_wrap still waits: %s; it gives up after %lld ms%s", text, (long long)ms, limit);
}

/* Logs for whom this rank still waits. */
static void remind(struct zr_rendezvous *r, zr_hub_say_wait *say)
{
    const struct zr_waiting *w = r->w.waiting;
    char text[ZR_WAIT_CHARS];
    int64_t now = zr_hub_now_ms(r);
    r->looks = false;
    if (r->phase == ZR_PHASE_MEET)
        look_for_ended(r);
    if (r->code || now - r->reminded_ms < w->remind_ms)
        return;
    r->reminded_ms = now;
    if (say(r, now - r->wait_ms, text))
        zr_waiting_warn(w, text, r->timeout_ms, r->limit);
}

static void start_looking(struct zr_rendezvous *r)
{
    const struct zr_waiting *w = r->w.waiting;
    r->looks = false;
    r->wait_ms = r->reminded_ms = zr_hub_now_ms(r);
    if (w)
        uv_timer_start(&r->look, on_look, LOOK_MS, LOOK_MS);
}

int zr_hub_run_from(struct zr_rendezvous *r, int64_t from_ms, bool (*done)(const struct zr_rendezvous *r),
                    zr_hub_say_wait *say)
{
    struct zr_sigpipe_hold hold;
    char text[ZR_WAIT_CHARS];
    zr_sigpipe_hold(&hold);
    int64_t grace = r->w.rank == 0 ? 0 : zr_hub_stay_ms(r);
    zr_hub_start_deadline(r, from_ms + r->timeout_ms + grace - zr_hub_now_ms(r));
    start_looking(r);
    while (!r->code && !done(r)) {
        if (r->late) {
            (void)say(r, r->timeout_ms, text);
            zr_hub_fail(r, ZR_ERR_TIMEOUT, "%s", text);
        } else if (r->looks) {
            remind(r, say);
        } else {
            uv_run(r->loop, UV_RUN_ONCE);
        }
    }
    uv_timer_stop(&r->deadline);
    uv_timer_stop(&r->look);
    zr_sigpipe_release(&hold);
    /* A result that has arrived whole is returned, even where a rank failed just after it: the next call
     * reports that. */
    return done(r) ? 0 : zr_fail(r->code, "%s", r->text);
}

int zr_hub_run_until(struct zr_rendezvous *r, bool (*done)(const struct zr_rendezvous *r),
                     zr_hub_say_wait *say)
{
    return zr_hub_run_from(r, zr_hub_now_ms(r), done, say);
}

int zr_hub_list_ranks(const struct zr_rendezvous *r, bool (*missing)(const struct zr_rendezvous *r, int rank),
                      char *text, size_t n_text)
{
    int n = 0;
    size_t used = 0;
    text[0] = 0;
    for (int i = 1; i < r->w.world; i++) {
        if (!missing(r, i))
            continue;
        if (n < 8)
            used += (size_t)snprintf(text + used, n_text - used, "%srank %d", n ? ", " : "", i);
        else if (n == 8)
            snprintf(text + used, n_text - used, ", ...");
        n++;
    }
    return n;
}
