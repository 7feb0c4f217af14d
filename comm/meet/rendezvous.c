/* SPDX-License-Identifier: Apache-2.0 */
/* rendezvous.c: the public calls of a rendezvous: opening, exchanging, agreeing, detaching, closing.
 *
 * The blocking calls run the caller's loop until the result is there, something failed or the time is over.
 * Ranks other than 0 wait a little longer than rank 0, because rank 0 knows which ranks are missing, and
 * users should see its message. In an exchange every rank sends rank 0 its part, and rank 0 sends the result
 * to all of them. */
#include "comm/first_error.h"
#include "comm/meet/hub.h"
#include "kernels/log.h"

#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* --- waiting --- */

enum { GRACE_MS = 1000, LOOK_MS = 100 };

/* Describes a wait that has lasted ms, and which ranks this rank waits for. The text is logged during the
 * wait, unless the function returns false because another rank knows better. After the time is over the text
 * is the failure. */
typedef bool say_wait(const struct zr_rendezvous *r, int64_t ms, char text[ZR_WAIT_CHARS]);

static void on_deadline(uv_timer_t *t)
{
    struct zr_rendezvous *r = t->data;
    r->late = true;
}

/* Sets `late` to false now, and to true after ms. */
static void start_deadline(struct zr_rendezvous *r, int64_t ms)
{
    r->late = false;
    uv_update_time(r->loop);
    uv_timer_start(&r->deadline, on_deadline, ms > 0 ? (uint64_t)ms : 0, 0);
}

/* The time that the others wait longer than rank 0. After a failure rank 0 stays as long, to inform ranks
 * that connect. It is at most a fourth of the time that ranks wait. */
static int64_t stay_ms(const struct zr_rendezvous *r)
{
    return r->timeout_ms < 4 * GRACE_MS ? r->timeout_ms / 4 : GRACE_MS;
}

static void on_look(uv_timer_t *t)
{
    struct zr_rendezvous *r = t->data;
    r->looks = true;
}

/* Returns whether a rank is here already. Only rank 0 knows this about others. */
static bool is_not_missing(const struct zr_rendezvous *r, int rank)
{
    const struct zr_member *m = &r->members[rank];
    return rank == r->w.rank || m->state != ZR_MEMBER_EMPTY;
}

/* Fails if a rank has ended before it came here, as it will not come. Only rank 0 knows whether a rank that
 * had begun to come has reached it. */
static void look_for_ended(struct zr_rendezvous *r)
{
    const struct zr_waiting *w = r->w.waiting;
    char how[128], text[ZR_ENDED_CHARS];
    bool has_begun;
    for (int i = 0; w->has_ended && i < r->w.world && !r->code; i++)
        if (!is_not_missing(r, i) && w->has_ended(w->arg, i, &has_begun, how, sizeof how) &&
            (r->w.rank == 0 || !has_begun)) {
            zr_waiting_say_ended(i, has_begun, how, text);
            zr_hub_fail_all(r, ZERO_ERR_PEER, text);
        }
}

/* Returns the limit of a wait of ms that is over, " (start_timeout_ms)". "" for a wait that goes on. */
static const char *limit_of(const struct zr_rendezvous *r, int64_t ms)
{
    return ms < r->timeout_ms ? "" : r->limit;
}

void zr_waiting_warn(const struct zr_waiting *w, const char *text, int64_t ms, const char *limit)
{
    zr_warn(w->log, "zero_wrap still waits: %s; it gives up after %lld ms%s", text, (long long)ms, limit);
}

void zr_waiting_say_ended(int rank, bool has_begun, const char *how, char text[ZR_ENDED_CHARS])
{
    snprintf(text, ZR_ENDED_CHARS, "rank %d ended %s zero_wrap: %s", rank,
             has_begun ? "in" : "before it came to", how);
}

/* Logs which ranks this rank still waits for. */
static void remind(struct zr_rendezvous *r, say_wait *say)
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

/* Runs the loop until done or failed, or until timeout_ms have passed since from_ms. Returns the failure. */
static int run_from(struct zr_rendezvous *r, int64_t from_ms, bool (*done)(const struct zr_rendezvous *r),
                    say_wait *say)
{
    struct zr_sigpipe_hold hold;
    char text[ZR_WAIT_CHARS];
    zr_sigpipe_hold(&hold);
    /* The grace begins when the rank sees that the time is over, because the whole machine may have stood
     * still until then. */
    int64_t grace = r->w.rank == 0 ? 0 : stay_ms(r);
    start_deadline(r, from_ms + r->timeout_ms - zr_hub_now_ms(r));
    start_looking(r);
    while (!r->code && !done(r)) {
        if (r->late && grace) {
            start_deadline(r, grace);
            grace = 0;
        } else if (r->late) {
            (void)say(r, r->timeout_ms, text);
            zr_hub_fail(r, ZERO_ERR_TIMEOUT, "%s", text);
        } else if (r->looks) {
            remind(r, say);
        } else {
            uv_run(r->loop, UV_RUN_ONCE);
        }
    }
    uv_timer_stop(&r->deadline);
    uv_timer_stop(&r->look);
    zr_sigpipe_release(&hold);
    /* A complete result is returned, even if a rank failed just after it. The next call reports that. */
    return done(r) ? 0 : zr_fail(r->code, "%s", r->text);
}

static int run_until(struct zr_rendezvous *r, bool (*done)(const struct zr_rendezvous *r), say_wait *say)
{
    return run_from(r, zr_hub_now_ms(r), done, say);
}

/* Writes "rank 2, rank 5" of the ranks that missing() names. Returns how many there are. */
static int list_ranks(const struct zr_rendezvous *r, bool (*missing)(const struct zr_rendezvous *r, int rank),
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
        int n = list_ranks(r, has_not_come, who, sizeof who);
        zr_hub_say_names(r, names);
        snprintf(text, ZR_WAIT_CHARS, "%d of %d ranks did not come to %s in %lld ms%s: %s%s%s%s%s%s", n,
                 r->w.world, place, (long long)ms, limit_of(r, ms), who, size, names[0] ? "; " : "", names,
                 because, r->trouble);
        return n > 0;
    }
    zr_hub_say_self(r, self);
    snprintf(text, ZR_WAIT_CHARS, "rank %d%s waited %lld ms%s for rank 0 at %s%s%s%s%s", r->w.rank, self,
             (long long)ms, limit_of(r, ms), place, because, r->trouble, before, r->trouble_before);
    return !r->accepted;
}

static bool all_here(const struct zr_rendezvous *r)
{
    return r->w.rank == 0 ? r->n_here == r->w.world : r->ready;
}

/* Stays for a moment after rank 0 has failed. Ranks that connect get the reason, so that they do not look for
 * rank 0 until their time is over. */
static void stay_to_refuse(struct zr_rendezvous *r)
{
    struct zr_sigpipe_hold hold;
    zr_sigpipe_hold(&hold);
    start_deadline(r, stay_ms(r));
    zr_hub_admit(r);
    while (!r->late && r->n_listening && !zr_hub_all_came(r))
        uv_run(r->loop, UV_RUN_ONCE);
    uv_timer_stop(&r->deadline);
    zr_sigpipe_release(&hold);
}

static int meet_ranks(struct zr_rendezvous *r)
{
    zr_hub_start(r);
    int err = run_until(r, all_here, say_who_has_not_come);
    if (!err && r->w.rank == 0) {
        zr_hub_seal(r);
        err = zr_hub_send_all(r, ZR_FRAME_READY, 0, NULL, 0);
        zr_hub_all_here(r);
        if (err)
            zr_hub_fail_all(r, err, zr_error_text());
    }
    bool is_known = !r->w.file[0] || r->w.rank || r->has_written; /* so that other ranks may connect */
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
        return zr_fail(ZERO_ERR_SYSTEM, "rendezvous: uv_async_init: %s", uv_strerror(err));
    r->report.data = r;
    uv_unref((uv_handle_t *)&r->report);
    uv_timer_t *const timers[] = {&r->deadline, &r->retry, &r->patience, &r->admit,
                                  &r->answers,  &r->look,  &r->beat};
    for (size_t i = 0; i < sizeof timers / sizeof *timers; i++) {
        uv_timer_init(r->loop, timers[i]); /* cannot fail */
        timers[i]->data = r;
    }
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
        return zr_fail(ZERO_ERR_ARG, "rendezvous: rank is %d: 0 to %d are allowed", w->rank, w->world - 1);
    if (w->world > 1 && !w->file[0] && ((!w->host[0] && !w->n_at) || w->port < 1 || w->port > 65535))
        return zr_fail(ZERO_ERR_ARG,
                       "rendezvous: rank 0 is at \"%s\" port %d: a host and a port of 1 to 65535 are allowed",
                       w->host, w->port);
    if (timeout_ms <= 0)
        return zr_fail(ZERO_ERR_ARG, "rendezvous: timeout_ms is %lld: more than 0 is allowed",
                       (long long)timeout_ms);
    struct zr_rendezvous *r = calloc(1, sizeof *r);
    if (r)
        r->members = calloc((size_t)w->world, sizeof *r->members);
    if (!r || !r->members || uv_mutex_init(&r->report_lock)) {
        if (r)
            free(r->members);
        free(r);
        return zr_fail(ZERO_ERR_NOMEM, "rendezvous: no memory for %d ranks", w->world);
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

/* --- knowledge of other ranks --- */

void zr_rendezvous_know(struct zr_rendezvous *r, const struct zr_known_ranks *known)
{
    r->known = *known;
}

bool zr_rendezvous_common_calls(const struct zr_rendezvous *r, int rank, const struct zr_call_log **own,
                                const struct zr_call_log **other)
{
    return r->known.common_calls && r->known.common_calls(r->known.arg, rank, own, other);
}

void zr_rendezvous_last_call(const struct zr_rendezvous *r, int rank, char text[ZR_LAST_CALL_CHARS])
{
    char call[ZR_HUB_CALL_CHARS];
    zr_hub_describe(r, rank, call);
    snprintf(text, ZR_LAST_CALL_CHARS, "%s%s", call[0] ? ZR_HUB_LAST_CALL : "", call);
}

int zr_rendezvous_stopped(const struct zr_rendezvous *r)
{
    struct zr_rank_seen seen;
    for (int i = 0; i < r->w.world; i++) {
        zr_hub_see(r, i, &seen);
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
    for (int i = 0; i < r->w.world; i++) {
        if (i == r->w.rank || (rank >= 0 && i != rank))
            continue;
        zr_hub_see(r, i, &seen);
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
    rank = code == ZERO_ERR_TIMEOUT ? zr_rendezvous_stopped(r) : -1;
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
    r->timeout_ms = ms + (ms + 2) / 3; /* beat.c waits for three fourths of it */
}

void zr_rendezvous_limit(struct zr_rendezvous *r, int64_t timeout_ms)
{
    r->timeout_ms = timeout_ms;
    r->limit = r->w.waiting ? " (timeout_ms)" : "";
}

/* --- calls of one rank alone --- */

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

/* --- detaching and closing --- */

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
    /* Reports earlier losses and failures on the loop's thread. */
    uv_timer_start(&r->deadline, on_detached, 0, 0);
    uv_mutex_lock(&r->report_lock);
    r->may_report = true;
    uv_mutex_unlock(&r->report_lock);
}

void zr_rendezvous_report(struct zr_rendezvous *r, int code, const char *text)
{
    zr_fork_last_failure(&r->last_failure, code, text);
    (void)zr_hub_put_report(r, &r->reported, code, text);
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

enum { MAX_EXCHANGE_BYTES = 1 << 30 };

/* --- exchanging --- */

static bool has_not_given(const struct zr_rendezvous *r, int rank)
{
    return !r->members[rank].gave;
}

static bool say_who_has_not_given(const struct zr_rendezvous *r, int64_t ms, char text[ZR_WAIT_CHARS])
{
    if (r->w.rank == 0) {
        char who[256];
        int n = list_ranks(r, has_not_given, who, sizeof who);
        snprintf(text, ZR_WAIT_CHARS, "exchange: %d of %d ranks did not come in %lld ms%s: %s", n, r->w.world,
                 (long long)ms, limit_of(r, ms), who);
        return n > 0;
    }
    snprintf(text, ZR_WAIT_CHARS, "exchange: rank %d waited %lld ms%s for rank 0", r->w.rank, (long long)ms,
             limit_of(r, ms));
    return false;
}

static bool all_given(const struct zr_rendezvous *r)
{
    for (int i = 1; i < r->w.world; i++)
        if (!r->members[i].gave)
            return false;
    return true;
}

static bool has_all(const struct zr_rendezvous *r)
{
    return r->all != NULL;
}

static bool all_sent(const struct zr_rendezvous *r)
{
    for (int i = 1; i < r->w.world; i++)
        if (r->members[i].state == ZR_MEMBER_HERE && r->members[i].link &&
            uv_stream_get_write_queue_size((const uv_stream_t *)&r->members[i].link->tcp) > 0)
            return false;
    return true;
}

static bool say_who_does_not_take(const struct zr_rendezvous *r, int64_t ms, char text[ZR_WAIT_CHARS])
{
    snprintf(text, ZR_WAIT_CHARS, "exchange: a rank did not take the result in %lld ms%s", (long long)ms,
             limit_of(r, ms));
    return true;
}

/* Rank 0 waits for the parts of the others. It is then ready for the next exchange: a fast rank may send its
 * part of that while a slow one still reads. */
static int gather(struct zr_rendezvous *r)
{
    int err = r->code ? r->code : run_from(r, r->exchange_ms, all_given, say_who_has_not_given);
    for (int i = 1; i < r->w.world && !err; i++) {
        const struct zr_member *member = &r->members[i];
        if (member->gave != r->exchange_of ||
            (member->gave == ZR_FRAME_GIVE && member->n_given != zr_hub_expected(r, i)))
            err = zr_hub_differ(r, i, member->gave, member->n_given);
    }
    zr_hub_expect(r, r->exchange_of, 0);
    return err;
}

/* Another rank sends rank 0 its part, and waits for the result. */
static int await_result(struct zr_rendezvous *r, int32_t about, const void *mine, size_t n)
{
    int err = zr_hub_send(r, 0, r->exchange_of, about, mine, n);
    if (err)
        return zr_hub_fail_all(r, err, zr_error_text());
    err = run_from(r, r->exchange_ms, has_all, say_who_has_not_given);
    zr_hub_expect(r, r->exchange_of, 0);
    return err;
}

static void forget_given(struct zr_member *member)
{
    free(member->given);
    member->given = NULL;
    member->gave = 0;
}

/* Waits until everything is written to the sockets, because the loop may not be run again for a while. A rank
 * that has the result may leave meanwhile, which is no failure of this exchange. */
static int send_to_the_end(struct zr_rendezvous *r)
{
    r->phase = ZR_PHASE_IDLE;
    return all_sent(r) ? 0 : run_until(r, all_sent, say_who_does_not_take);
}

static void forget_result(struct zr_rendezvous *r)
{
    free(r->all);
    r->all = NULL;
    r->n_all = 0;
}

/* Rank 0 sends the result to all others. */
static int send_result(struct zr_rendezvous *r, enum zr_frame_type type, int32_t about, const void *all,
                       size_t n)
{
    int err = zr_hub_send_all(r, type, about, all, n);
    return err ? zr_hub_fail_all(r, err, zr_error_text()) : send_to_the_end(r);
}

static int exchange_as_first(struct zr_rendezvous *r, const void *mine, size_t n, char *all)
{
    zr_hub_expect(r, ZR_FRAME_GIVE, n);
    int err = gather(r);
    for (int i = 0; i < r->w.world; i++) {
        if (!err)
            memcpy(all + (size_t)i * n, i ? r->members[i].given : mine, n);
        forget_given(&r->members[i]);
    }
    if (!err)
        err = send_result(r, ZR_FRAME_ALL, 0, all, n * (size_t)r->w.world);
    return err ? zr_fail(r->code, "%s", r->text) : 0;
}

static int exchange_as_other(struct zr_rendezvous *r, const void *mine, size_t n, char *all)
{
    zr_hub_expect(r, ZR_FRAME_GIVE, n);
    int err = await_result(r, 0, mine, n);
    if (!err && r->n_all != n * (size_t)r->w.world)
        err = zr_hub_fail(r, ZERO_ERR_MISMATCH,
                          "exchange: rank 0 returns %zu bytes for %d ranks, rank %d gives %zu each", r->n_all,
                          r->w.world, r->w.rank, n);
    if (!err)
        memcpy(all, r->all, r->n_all);
    forget_result(r);
    return err ? zr_fail(r->code, "%s", r->text) : 0;
}

/* Begins an exchange, if that is possible now. */
static int begin_exchange(struct zr_rendezvous *r)
{
    if (r->detached || r->closing)
        return zr_fail(ZERO_ERR_ORDER, "exchange: the rendezvous is %s", r->closing ? "closed" : "detached");
    if (r->w.world > 1 && (r->code || zr_hub_check(r)))
        return zr_fail(r->code, "%s", r->text);
    if (r->w.world == 1)
        return 0;
    r->phase = ZR_PHASE_EXCHANGE;
    r->exchange_ms = zr_hub_now_ms(r);
    return 0;
}

int zr_rendezvous_exchange(struct zr_rendezvous *r, const void *mine, size_t n, void *all)
{
    if (n == 0 || n > MAX_EXCHANGE_BYTES / (size_t)r->w.world)
        return zr_fail(ZERO_ERR_ARG,
                       "exchange: %zu bytes from each of %d ranks: 1 to %d bytes in all are allowed", n,
                       r->w.world, MAX_EXCHANGE_BYTES);
    int err = begin_exchange(r);
    if (err)
        return err;
    if (r->w.world == 1)
        memcpy(all, mine, n);
    else
        err = r->w.rank == 0 ? exchange_as_first(r, mine, n, all) : exchange_as_other(r, mine, n, all);
    r->phase = ZR_PHASE_IDLE;
    return err;
}

/* --- agreeing on a result --- */

/* The rank that failed and its message, in the form of a RESULT's payload, which ends after the text. */
struct said {
    int32_t rank;
    char text[ZR_ERROR_BYTES];
};

static size_t said_bytes(const struct said *s)
{
    return offsetof(struct said, text) + strlen(s->text);
}

/* Reads a RESULT from another rank. */
static int32_t read_result(const char *payload, size_t n, int32_t code, struct said *s)
{
    memset(s, 0, sizeof *s);
    memcpy(s, payload, n < sizeof *s ? n : sizeof *s - 1);
    return zr_first_error_code(code);
}

/* Rank 0 takes the failure of the rank that decides (first_error.h), usually the lowest that failed. */
static int gather_results(struct zr_rendezvous *r, int32_t *code, struct said *s)
{
    struct said other = {.rank = -1};
    int err = gather(r);
    for (int i = 1; i < r->w.world; i++) {
        struct zr_member *member = &r->members[i];
        int32_t member_code =
            err ? 0 : read_result(member->given, member->n_given, member->given_about, &other);
        if (zr_first_error_rather(*code, member_code)) {
            *code = member_code;
            *s = other;
        }
        forget_given(member);
    }
    return err;
}

static int agree_as_first(struct zr_rendezvous *r, int32_t *code, struct said *s)
{
    zr_hub_expect(r, ZR_FRAME_RESULT, sizeof *s);
    int err = gather_results(r, code, s);
    return err ? err : send_result(r, ZR_FRAME_RESULT, *code, s, said_bytes(s));
}

static int agree_as_other(struct zr_rendezvous *r, int32_t *code, struct said *s)
{
    zr_hub_expect(r, ZR_FRAME_RESULT, sizeof *s);
    int err = await_result(r, *code, s, said_bytes(s));
    if (!err)
        *code = read_result(r->all, r->n_all, r->all_about, s);
    forget_result(r);
    return err;
}

static int agree_with_all(struct zr_rendezvous *r, int32_t *code, struct said *s)
{
    int err = r->w.rank == 0 ? agree_as_first(r, code, s) : agree_as_other(r, code, s);
    return err ? zr_fail(r->code, "%s", r->text) : 0;
}

int zr_rendezvous_agree(struct zr_rendezvous *r, int err)
{
    struct zr_saved_error own;
    struct said s = {.rank = r->w.rank};
    int32_t code = zr_error_save(&own, err);
    if (err)
        memcpy(s.text, own.text, sizeof s.text);
    int met = begin_exchange(r);
    if (!met && r->w.world > 1)
        met = agree_with_all(r, &code, &s);
    r->phase = ZR_PHASE_IDLE;
    if (err && (met || s.rank == r->w.rank))
        return zr_error_restore(&own);
    if (met)
        return met;
    return code ? zr_fail(code, "rank %d: %s", s.rank, s.text) : 0;
}

int zr_rendezvous_agree_and_exchange(struct zr_rendezvous *r, int err, int32_t *mine, size_t n, void *all)
{
    struct zr_saved_error own;
    *mine = zr_error_save(&own, err);
    int met = zr_rendezvous_exchange(r, mine, n, all);
    if (met) {
        memset(all, 0, (size_t)r->w.world * n); /* rank 0 may have got all bytes before it failed */
        return err ? zr_error_restore(&own) : met;
    }
    for (int i = 0; i < r->w.world; i++) {
        int32_t member_code;
        memcpy(&member_code, (const char *)all + (size_t)i * n, sizeof member_code);
        if (member_code)
            return zr_rendezvous_agree(r, err ? zr_error_restore(&own) : 0);
    }
    return 0;
}
