/* rendezvous.c: how ranks meet, exchange blobs before any communicator exists, and part (see rendezvous.h and
 * hub.h).
 *
 * The blocking calls run the caller's loop until what they wait for is there, something failed or the time is
 * over. Ranks other than 0 wait a little longer than they are told: rank 0 knows who is missing, and its
 * message should be the one seen. */
#include "comm/meet/hub.h"
#include "comm/verdict.h"

#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_EXCHANGE_BYTES = 1 << 30, GRACE_MS = 1000 };

int zr_rendezvous_rank(const struct zr_rendezvous *r)
{
    return r->w.rank;
}

int zr_rendezvous_world(const struct zr_rendezvous *r)
{
    return r->w.world;
}

static void on_deadline(uv_timer_t *t)
{
    struct zr_rendezvous *r = t->data;
    r->late = true;
}

/* At most a fourth of the time that ranks wait. */
static int64_t grace_ms(const struct zr_rendezvous *r)
{
    return r->timeout_ms < 4 * GRACE_MS ? r->timeout_ms / 4 : GRACE_MS;
}

/* Runs the loop until done or failed; say_late fails when the time is over. Returns the failure. */
static int run_until(struct zr_rendezvous *r, bool (*done)(const struct zr_rendezvous *r),
                     void (*say_late)(struct zr_rendezvous *r))
{
    struct zr_sigpipe_hold hold;
    zr_sigpipe_hold(&hold);
    int64_t grace = r->w.rank == 0 ? 0 : grace_ms(r);
    r->late = false;
    uv_update_time(r->loop);
    uv_timer_start(&r->deadline, on_deadline, (uint64_t)(r->timeout_ms + grace), 0);
    while (!r->code && !done(r)) {
        if (r->late)
            say_late(r);
        else
            uv_run(r->loop, UV_RUN_ONCE);
    }
    uv_timer_stop(&r->deadline);
    zr_sigpipe_release(&hold);
    /* A result that has arrived whole is returned, even where a rank failed just after it: the next call
     * reports that. */
    return done(r) ? 0 : zr_fail(r->code, "%s", r->text);
}

/* "rank 2, rank 5" of those that missing() names; returns their number. */
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

/* --- opening --- */

static bool has_not_come(const struct zr_rendezvous *r, int rank)
{
    return r->members[rank].state == ZR_MEMBER_EMPTY;
}

static void late_to_meet(struct zr_rendezvous *r)
{
    const char *because = r->trouble[0] ? "; last: " : "", *before = r->trouble_before[0] ? "; before: " : "";
    char place[ZR_PLACE_CHARS], self[ZR_SELF_CHARS];
    zr_hub_say_place(r, place);
    if (r->w.rank == 0) {
        char who[256];
        int n = list_ranks(r, has_not_come, who, sizeof who);
        zr_hub_fail(r, ZR_ERR_TIMEOUT, "%d of %d ranks did not come to %s in %lld ms: %s%s%s", n, r->w.world,
                    place, (long long)r->timeout_ms, who, because, r->trouble);
    } else {
        zr_hub_say_self(r, self);
        zr_hub_fail(r, ZR_ERR_TIMEOUT, "rank %d%s waited %lld ms for rank 0 at %s%s%s%s%s", r->w.rank, self,
                    (long long)r->timeout_ms, place, because, r->trouble, before, r->trouble_before);
    }
}

static bool all_came(const struct zr_rendezvous *r)
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

/* Rank 0 has failed. Ranks that connect a moment later are told why, so that they do not look for it until
 * their own time is over. */
static void stay_to_refuse(struct zr_rendezvous *r)
{
    struct zr_sigpipe_hold hold;
    zr_sigpipe_hold(&hold);
    r->late = false;
    uv_update_time(r->loop);
    uv_timer_start(&r->deadline, on_deadline, (uint64_t)grace_ms(r), 0);
    while (!r->late && r->n_listening && !all_came(r))
        uv_run(r->loop, UV_RUN_ONCE);
    uv_timer_stop(&r->deadline);
    zr_sigpipe_release(&hold);
}

static int meet_ranks(struct zr_rendezvous *r)
{
    zr_hub_start(r);
    int err = run_until(r, all_here, late_to_meet);
    if (r->w.rank != 0)
        return err;
    if (!err)
        zr_hub_seal(r);
    for (int i = 1; i < r->w.world && !err; i++)
        if (r->members[i].state == ZR_MEMBER_HERE)
            err = zr_hub_send(r, i, ZR_FRAME_READY, NULL, 0);
    if (err)
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
    uv_timer_init(r->loop, &r->beat);
    uv_unref((uv_handle_t *)&r->beat);
    r->n_handles = 7;
    return 0;
}

static void free_tables(struct zr_rendezvous *r)
{
    for (int i = 0; i < r->w.world; i++) {
        free(r->members[i].given);
        free(r->members[i].how);
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
    if (w->world > 1 && !w->file[0] && (!w->host[0] || w->port < 1 || w->port > 65535))
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
    err = meet_ranks(r);
    if (err) {
        zr_rendezvous_free(r);
        return err;
    }
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
}

/* --- exchanging --- */

static bool has_not_given(const struct zr_rendezvous *r, int rank)
{
    return !r->members[rank].gave;
}

static void late_to_exchange(struct zr_rendezvous *r)
{
    if (r->w.rank == 0) {
        char who[256];
        int n = list_ranks(r, has_not_given, who, sizeof who);
        zr_hub_fail(r, ZR_ERR_TIMEOUT, "exchange: %d of %d ranks did not come in %lld ms: %s", n, r->w.world,
                    (long long)r->timeout_ms, who);
    } else {
        zr_hub_fail(r, ZR_ERR_TIMEOUT, "exchange: rank %d waited %lld ms for rank 0", r->w.rank,
                    (long long)r->timeout_ms);
    }
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

static void late_to_send(struct zr_rendezvous *r)
{
    zr_hub_fail(r, ZR_ERR_TIMEOUT, "exchange: a rank did not take the result in %lld ms",
                (long long)r->timeout_ms);
}

/* Rank 0 has what the ranks sent, and is then ready for the next: a fast rank may send what is of the next
 * exchange while a slow one still reads. */
static int gather(struct zr_rendezvous *r)
{
    int err = r->code ? r->code : run_until(r, all_given, late_to_exchange);
    for (int i = 1; i < r->w.world && !err; i++) {
        const struct zr_member *member = &r->members[i];
        if (member->gave != r->exchange_of ||
            (member->gave == ZR_FRAME_GIVE && member->n_given != r->n_expected))
            err = zr_hub_differ(r, i, member->gave, member->n_given);
    }
    zr_hub_expect(r, r->exchange_of, 0);
    return err;
}

static void forget_given(struct zr_member *member)
{
    free(member->given);
    member->given = NULL;
    member->gave = 0;
}

/* The loop may not be run again for a while, so what does not fit into the sockets' buffers is written now. A
 * rank that has the result may leave meanwhile, which is no failure of this exchange. */
static int send_to_the_end(struct zr_rendezvous *r)
{
    r->phase = ZR_PHASE_IDLE;
    return all_sent(r) ? 0 : run_until(r, all_sent, late_to_send);
}

static int exchange_as_center(struct zr_rendezvous *r, const void *mine, size_t n, char *all)
{
    zr_hub_expect(r, ZR_FRAME_GIVE, n);
    int err = gather(r);
    memcpy(all, mine, n);
    for (int i = 1; i < r->w.world; i++) {
        if (!err)
            memcpy(all + (size_t)i * n, r->members[i].given, n);
        forget_given(&r->members[i]);
    }
    for (int i = 1; i < r->w.world && !err; i++)
        err = zr_hub_send(r, i, ZR_FRAME_ALL, all, n * (size_t)r->w.world);
    if (!err)
        err = send_to_the_end(r);
    return err ? zr_fail(r->code, "%s", r->text) : 0;
}

static void forget_result(struct zr_rendezvous *r)
{
    free(r->all);
    r->all = NULL;
    r->n_all = 0;
}

static int exchange_as_ray(struct zr_rendezvous *r, const void *mine, size_t n, char *all)
{
    zr_hub_expect(r, ZR_FRAME_GIVE, n * (size_t)r->w.world);
    (void)zr_hub_send(r, 0, ZR_FRAME_GIVE, mine, n);
    int err = run_until(r, has_all, late_to_exchange);
    zr_hub_expect(r, ZR_FRAME_GIVE, 0);
    if (!err && r->n_all != n * (size_t)r->w.world)
        err = zr_hub_fail(r, ZR_ERR_MISMATCH,
                          "exchange: rank 0 returns %zu bytes for %d ranks, rank %d gives %zu each", r->n_all,
                          r->w.world, r->w.rank, n);
    if (!err)
        memcpy(all, r->all, r->n_all);
    forget_result(r);
    return err ? zr_fail(r->code, "%s", r->text) : 0;
}

/* An exchange may begin. */
static int begin_exchange(struct zr_rendezvous *r)
{
    if (r->detached || r->closing)
        return zr_fail(ZR_ERR_ORDER, "exchange: the rendezvous is %s", r->closing ? "closed" : "detached");
    if (r->w.world > 1 && (r->code || zr_hub_check(r)))
        return zr_fail(r->code, "%s", r->text);
    r->phase = r->w.world > 1 ? ZR_PHASE_EXCHANGE : ZR_PHASE_IDLE;
    return 0;
}

int zr_rendezvous_exchange(struct zr_rendezvous *r, const void *mine, size_t n, void *all)
{
    if (n == 0 || n > MOST_EXCHANGE_BYTES / (size_t)r->w.world)
        return zr_fail(ZR_ERR_ARG,
                       "exchange: %zu bytes from each of %d ranks: 1 to %d bytes in all are allowed", n,
                       r->w.world, MOST_EXCHANGE_BYTES);
    int err = begin_exchange(r);
    if (err)
        return err;
    if (r->w.world == 1)
        memcpy(all, mine, n);
    else
        err = r->w.rank == 0 ? exchange_as_center(r, mine, n, all) : exchange_as_ray(r, mine, n, all);
    r->phase = ZR_PHASE_IDLE;
    return err;
}

/* --- how it went --- */

/* Who speaks, and what it says: what a VERDICT carries, up to the end of the text. */
struct said {
    int32_t rank;
    char text[ZR_ERROR_BYTES];
};

static int send_verdict(struct zr_rendezvous *r, int to, int32_t code, const struct said *s)
{
    size_t n = offsetof(struct said, text) + strlen(s->text);
    int err = zr_hub_send_about(r, to, ZR_FRAME_VERDICT, code, s, n);
    return err ? zr_hub_fail_all(r, err, zr_error_text()) : 0;
}

/* Of what another rank sent. */
static int32_t read_verdict(const char *payload, size_t n, int32_t code, struct said *s)
{
    memset(s, 0, sizeof *s);
    memcpy(s, payload, n < sizeof *s ? n : sizeof *s - 1);
    return zr_verdict_code(code);
}

/* The lowest rank that failed speaks. */
static int agree_as_center(struct zr_rendezvous *r, int32_t *code, struct said *s)
{
    struct said other = {.rank = -1};
    zr_hub_expect(r, ZR_FRAME_VERDICT, sizeof other);
    int err = gather(r);
    for (int i = 1; i < r->w.world; i++) {
        struct zr_member *member = &r->members[i];
        int32_t its = err ? 0 : read_verdict(member->given, member->n_given, member->given_about, &other);
        if (zr_verdict_rather(*code, its)) {
            *code = its;
            *s = other;
        }
        forget_given(member);
    }
    for (int i = 1; i < r->w.world && !err; i++)
        err = send_verdict(r, i, *code, s);
    return err ? err : send_to_the_end(r);
}

static int agree_as_ray(struct zr_rendezvous *r, int32_t *code, struct said *s)
{
    zr_hub_expect(r, ZR_FRAME_VERDICT, sizeof *s);
    (void)send_verdict(r, 0, *code, s);
    int err = run_until(r, has_all, late_to_exchange);
    zr_hub_expect(r, ZR_FRAME_VERDICT, 0);
    if (!err)
        *code = read_verdict(r->all, r->n_all, r->all_about, s);
    forget_result(r);
    return err;
}

static int take_verdict(struct zr_rendezvous *r, int32_t *code, struct said *s)
{
    int err = r->w.rank == 0 ? agree_as_center(r, code, s) : agree_as_ray(r, code, s);
    return err ? zr_fail(r->code, "%s", r->text) : 0;
}

int zr_rendezvous_agree(struct zr_rendezvous *r, int err)
{
    struct zr_kept own;
    struct said s = {.rank = r->w.rank};
    int32_t code = zr_keep(&own, err);
    if (err)
        memcpy(s.text, own.text, sizeof s.text);
    int met = begin_exchange(r);
    if (!met && r->w.world > 1)
        met = take_verdict(r, &code, &s);
    r->phase = ZR_PHASE_IDLE;
    if (err && (met || s.rank == r->w.rank))
        return zr_say_again(&own);
    if (met)
        return met;
    return code ? zr_fail(code, "rank %d: %s", s.rank, s.text) : 0;
}

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
