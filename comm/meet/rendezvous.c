/* SPDX-License-Identifier: Apache-2.0 */
/* rendezvous.c: how ranks meet and part (see rendezvous.h and hub.h). */
#include "comm/meet/hub.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int zr_rendezvous_rank(const struct zr_rendezvous *r)
{
    return r->w.rank;
}

int zr_rendezvous_world(const struct zr_rendezvous *r)
{
    return r->w.world;
}

/* --- opening --- */

static bool has_not_come(const struct zr_rendezvous *r, int rank)
{
    return r->members[rank].state == ZR_MEMBER_EMPTY;
}

static bool say_who_has_not_come(const struct zr_rendezvous *r, int64_t ms, char text[ZR_WAIT_CHARS])
{
    const char *because = r->trouble[0] ? "; last: " : "", *before = r->trouble_before[0] ? "; before: " : "";
    char place[ZR_PLACE_CHARS], self[ZR_SELF_CHARS], size[sizeof r->w.size_from + 4] = "";
    zr_hub_say_place(r, place);
    if (r->w.size_from[0])
        snprintf(size, sizeof size, " (%s)", r->w.size_from);
    if (r->w.rank == 0) {
        char who[256], names[ZR_NAMES_CHARS];
        int n = zr_hub_list_ranks(r, has_not_come, who, sizeof who);
        zr_hub_say_names(r, names);
        snprintf(text, ZR_WAIT_CHARS, "%d of %d ranks did not come to %s in %lld ms%s: %s%s%s%s%s%s", n,
                 r->w.world, place, (long long)ms, zr_hub_limit(r, ms), who, size, names[0] ? "; " : "",
                 names, because, r->trouble);
        return n > 0;
    }
    zr_hub_say_self(r, self);
    snprintf(text, ZR_WAIT_CHARS, "rank %d%s waited %lld ms%s for rank 0 at %s%s%s%s%s", r->w.rank, self,
             (long long)ms, zr_hub_limit(r, ms), place, because, r->trouble, before, r->trouble_before);
    return !r->accepted;
}

bool zr_hub_all_came(const struct zr_rendezvous *r)
{
    for (int i = 1; i < r->w.world; i++)
        if (has_not_come(r, i))
            return false;
    return true;
}

static bool all_here(const struct zr_rendezvous *r)
{
    return r->w.rank == 0 ? r->n_here == r->w.world : r->ready;
}

/* Rank 0 has failed. Ranks that connect a moment later are told why, so that
 * they do not look for it until their own time is over. */
static void stay_to_refuse(struct zr_rendezvous *r)
{
    struct zr_sigpipe_hold hold;
    zr_sigpipe_hold(&hold);
    zr_hub_start_deadline(r, zr_hub_stay_ms(r));
    zr_hub_admit(r);
    while (!r->late && r->n_listening && !zr_hub_all_came(r))
        uv_run(r->loop, UV_RUN_ONCE);
    uv_timer_stop(&r->deadline);
    zr_sigpipe_release(&hold);
}

static int meet_ranks(struct zr_rendezvous *r)
{
    zr_hub_start(r);
    int err = zr_hub_run_until(r, all_here, say_who_has_not_come);
    if (!err && r->w.rank == 0) {
        zr_hub_seal(r);
        err = zr_hub_send_all(r, ZR_FRAME_READY, 0, NULL, 0);
        zr_hub_all_here(r);
        if (err)
            zr_hub_fail_all(r, err, zr_error_text());
    }
    bool is_known = !r->w.file[0] || r->w.rank || r->has_written; /* so that others may come */
    if (err && is_known)
        stay_to_refuse(r);
    return err ? zr_fail(r->code, "%s", r->text) : 0;
}

static void on_report(uv_async_t *a)
{
    zr_hub_send_report(a->data, false);
    zr_hub_compare(a->data);
}

static int open_handles(struct zr_rendezvous *r)
{
    int err = uv_async_init(r->loop, &r->report, on_report);
    if (err)
        return zr_fail(ZR_ERR_SYSTEM, "rendezvous: uv_async_init: %s", uv_strerror(err));
    uv_unref((uv_handle_t *)&r->report);
    r->report.data = r;
    r->deadline.data = r->retry.data = r->patience.data = r->admit.data = r->answers.data = r->beat.data = r;
    uv_timer_init(r->loop, &r->deadline); /* cannot fail */
    uv_timer_init(r->loop, &r->retry);
    uv_timer_init(r->loop, &r->patience);
    uv_timer_init(r->loop, &r->admit);
    uv_timer_init(r->loop, &r->answers);
    uv_timer_init(r->loop, &r->look);
    r->look.data = r;
    uv_timer_init(r->loop, &r->beat);
    uv_unref((uv_handle_t *)&r->beat);
    r->n_handles = 8;
    return 0;
}

static void free_tables(struct zr_rendezvous *r)
{
    for (int i = 0; i < r->w.world; i++) {
        free(r->members[i].given);
        free(r->members[i].how);
        free(r->members[i].last_heard);
        free(r->members[i].waits_as);
    }
    zr_hub_forget_comparison(r);
    zr_hub_forget_messages(r);
    free(r->all);
    free(r->members);
    uv_mutex_destroy(&r->report_lock);
    free(r);
}

int zr_rendezvous_open(uv_loop_t *loop, const struct zr_world *w, int64_t timeout_ms,
                       struct zr_rendezvous **out)
{
    *out = NULL;
    if (w->world < 1 || w->rank < 0 || w->rank >= w->world)
        return zr_fail(ZR_ERR_ARG, "rendezvous: rank is %d: 0 to %d are allowed", w->rank, w->world - 1);
    if (w->world > 1 && !w->file[0] && ((!w->host[0] && !w->n_at) || w->port < 1 || w->port > 65535))
        return zr_fail(ZR_ERR_ARG,
                       "rendezvous: rank 0 is at \"%s\" port %d: a host and a port of 1 to 65535 are allowed",
                       w->host, w->port);
    if (timeout_ms <= 0)
        return zr_fail(ZR_ERR_ARG, "rendezvous: timeout_ms is %lld: more than 0 is allowed",
                       (long long)timeout_ms);
    struct zr_rendezvous *r = calloc(1, sizeof *r);
    if (r)
        r->members = calloc((size_t)w->world, sizeof *r->members);
    if (!r || !r->members || uv_mutex_init(&r->report_lock)) {
        if (r)
            free(r->members);
        free(r);
        return zr_fail(ZR_ERR_NOMEM, "rendezvous: no memory for %d ranks", w->world);
    }
    r->loop = loop;
    r->w = *w;
    r->timeout_ms = timeout_ms;
    r->limit = w->waiting ? " (start_timeout_ms)" : "";
    if (w->world == 1) {
        r->ready = true;
        *out = r;
        return 0;
    }
    int err = open_handles(r);
    if (err) {
        free_tables(r);
        return err;
    }
    if (w->rank == 0)
        err = zr_hub_await_handed(r);
    if (!err)
        err = meet_ranks(r);
    zr_hub_ignore_handed(r);
    if (err) {
        zr_rendezvous_free(r);
        return err;
    }
    r->w.open_name = NULL;
    r->phase = ZR_PHASE_IDLE;
    *out = r;
    return 0;
}

void zr_rendezvous_describe(struct zr_rendezvous *r,
                            void (*describe)(void *arg, int rank, char *text, size_t n_text), void *arg)
{
    r->describe = describe;
    r->describe_arg = arg;
}

void zr_rendezvous_last_call(const struct zr_rendezvous *r, int rank, char text[ZR_LAST_CALL_CHARS])
{
    char call[ZR_HUB_CALL_CHARS];
    zr_hub_describe(r, rank, call);
    snprintf(text, ZR_LAST_CALL_CHARS, "%s%s", call[0] ? ZR_HUB_LAST_CALL : "", call);
}

void zr_rendezvous_watch(struct zr_rendezvous *r, void (*see)(void *arg, int rank, struct zr_rank_seen *out),
                         void *arg)
{
    r->see = see;
    r->see_arg = arg;
}

int zr_rendezvous_stopped(const struct zr_rendezvous *r)
{
    struct zr_rank_seen seen;
    for (int i = 0; r->see && i < r->w.world; i++) {
        r->see(r->see_arg, i, &seen);
        if (seen.is_stopped)
            return i;
    }
    return -1;
}

void zr_rendezvous_describe_stopped(const struct zr_rendezvous *r, int rank, char text[ZR_STOPPED_CHARS])
{
    char last[ZR_LAST_CALL_CHARS];
    text[0] = 0;
    if (rank < 0)
        return;
    zr_rendezvous_last_call(r, rank, last);
    snprintf(text, ZR_STOPPED_CHARS, "; rank %d is stopped, by SIGSTOP or a debugger%s", rank, last);
}

int zr_rendezvous_recorded(const struct zr_rendezvous *r, int rank, char text[ZR_FRAME_TEXT_BYTES])
{
    struct zr_rank_seen seen, first = {.code = 0};
    int finder = -1;
    for (int i = 0; r->see && i < r->w.world; i++) {
        if (i == r->w.rank || (rank >= 0 && i != rank))
            continue;
        r->see(r->see_arg, i, &seen);
        if (seen.code && (finder < 0 || seen.failed_ns < first.failed_ns)) {
            first = seen;
            finder = i;
        }
    }
    if (finder >= 0)
        snprintf(text, ZR_FRAME_TEXT_BYTES, strstr(first.text, ZR_HUB_FOUND_BY) ? "%.*s" : "%.*s%s%d)",
                 ZR_FRAME_TEXT_BYTES - 40, first.text, ZR_HUB_FOUND_BY, finder);
    return first.code;
}

int zr_rendezvous_explain(const struct zr_rendezvous *r, int code, const char *text,
                          char why[ZR_FRAME_TEXT_BYTES])
{
    char stopped[ZR_STOPPED_CHARS];
    int other = zr_rendezvous_recorded(r, -1, why), rank;
    if (other)
        return other;
    rank = code == ZR_ERR_TIMEOUT ? zr_rendezvous_stopped(r) : -1;
    if (rank < 0)
        return 0;
    zr_rendezvous_describe_stopped(r, rank, stopped);
    snprintf(why, ZR_FRAME_TEXT_BYTES, "%.*s%s", ZR_FRAME_TEXT_BYTES - (int)sizeof stopped, text, stopped);
    return code;
}

void zr_rendezvous_hosts(struct zr_rendezvous *r, const struct zr_topology *t)
{
    r->hosts = t;
}

void zr_rendezvous_silence(struct zr_rendezvous *r, int64_t ms)
{
    r->timeout_ms = ms + (ms + 2) / 3; /* of which hub_beat.c waits three fourths */
}

void zr_rendezvous_limit(struct zr_rendezvous *r, int64_t timeout_ms)
{
    r->timeout_ms = timeout_ms;
    r->limit = r->w.waiting ? " (timeout_ms)" : "";
}

/* --- without the others --- */

int zr_rendezvous_fail(struct zr_rendezvous *r, int code)
{
    char text[sizeof r->text];
    snprintf(text, sizeof text, "%s", zr_error_text());
    if (r->w.world > 1 && !r->detached && !r->closing)
        zr_hub_fail_all(r, code, text);
    return zr_fail(code, "%s", text);
}

int zr_rendezvous_look(struct zr_rendezvous *r)
{
    if (r->w.world == 1 || r->detached || r->closing)
        return 0;
    struct zr_sigpipe_hold hold;
    zr_sigpipe_hold(&hold);
    uv_run(r->loop, UV_RUN_NOWAIT);
    zr_sigpipe_release(&hold);
    return r->code || zr_hub_check(r) ? zr_fail(r->code, "%s", r->text) : 0;
}

/* --- parting --- */

static void on_detached(uv_timer_t *t)
{
    zr_hub_deliver(t->data);
    zr_hub_report_unreported(t->data);
}

void zr_rendezvous_detach(struct zr_rendezvous *r, void (*on_lost)(void *arg, int rank, const char *why),
                          void (*on_failed)(void *arg, int code, const char *text), void *arg)
{
    r->on_lost = on_lost;
    r->on_failed = on_failed;
    r->arg = arg;
    r->detached = true;
    if (r->w.world == 1 || r->closing)
        return;
    zr_hub_beat(r);
    uv_timer_start(&r->deadline, on_detached, 0, 0); /* tells on the loop's thread what happened before */
    uv_mutex_lock(&r->report_lock);
    r->may_report = true;
    uv_mutex_unlock(&r->report_lock);
}

void zr_rendezvous_report(struct zr_rendezvous *r, int code, const char *text)
{
    zr_fork_last_failure(&r->last_failure, code, text);
    uv_mutex_lock(&r->report_lock);
    if (r->may_report && !r->report_code) {
        snprintf(r->report_text, sizeof r->report_text, "%s", text);
        r->report_code = code;
        uv_async_send(&r->report); /* with the lock: the handle is not closed meanwhile */
    }
    uv_mutex_unlock(&r->report_lock);
}

void zr_rendezvous_close(struct zr_rendezvous *r)
{
    zr_hub_close(r);
}

void zr_rendezvous_free(struct zr_rendezvous *r)
{
    if (!r)
        return;
    struct zr_sigpipe_hold hold;
    zr_sigpipe_hold(&hold);
    zr_hub_close(r);
    while (!zr_hub_closed(r))
        uv_run(r->loop, UV_RUN_ONCE);
    zr_sigpipe_release(&hold);
    free_tables(r);
}
