/* SPDX-License-Identifier: Apache-2.0 */
/* hub.c: the links of a rendezvous. It sends and handles frames, reports failures and losses, and closes
 * everything at the end. All of it runs on the thread that runs the loop. Ranks meet in admit.c (rank 0) and
 * reach.c (the others). */
#include "comm/meet/hub.h"
#include "comm/fork.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    MAX_KEPT = 64,   /* messages that came before the detach, besides one from each rank */
    LINGER_MS = 300, /* for the other ends to read a goodbye */
};

int64_t zr_hub_now_ms(struct zr_rendezvous *r)
{
    uv_update_time(r->loop);
    return (int64_t)uv_now(r->loop);
}

struct zr_link *zr_hub_add_link(struct zr_rendezvous *r)
{
    struct zr_link *l = zr_link_new(r->loop, &zr_hub_calls, r, ZR_FRAME_SHAKE_BYTES);
    if (!l)
        return NULL;
    l->next = r->links;
    if (r->links)
        r->links->prev = l;
    r->links = l;
    return l;
}

/* --- sending --- */

static struct zr_frame frame_of(const struct zr_rendezvous *r, enum zr_frame_type type, int32_t about)
{
    return (struct zr_frame){.magic = ZR_FRAME_MAGIC,
                             .version = ZR_FRAME_VERSION,
                             .type = (uint16_t)type,
                             .rank = r->w.rank,
                             .world = r->w.world,
                             .about = about};
}

int zr_hub_send(struct zr_rendezvous *r, int rank, enum zr_frame_type type, int32_t about,
                const void *payload, size_t n)
{
    const struct zr_member *to = &r->members[rank];
    if (to->state != ZR_MEMBER_HERE || !to->link)
        return 0;
    return zr_link_send(to->link, frame_of(r, type, about), payload, n);
}

void zr_hub_keep(struct zr_rendezvous *r, struct zr_link *l)
{
    const struct zr_frame f = frame_of(r, ZR_FRAME_EXIT, 0);
    zr_fork_last_word(&l->kept, &f, &r->last_failure);
}

int zr_hub_send_all(struct zr_rendezvous *r, enum zr_frame_type type, int32_t about, const void *payload,
                    size_t n)
{
    int err = 0;
    if (r->w.rank != 0)
        return 0;
    struct zr_shared_bytes *shared = zr_shared_bytes_new(payload, n);
    if (!shared)
        return ZERO_ERR_NOMEM;
    for (int i = 1; i < r->w.world; i++) {
        struct zr_link *l = r->members[i].state == ZR_MEMBER_HERE ? r->members[i].link : NULL;
        int its = l ? zr_link_send_shared(l, frame_of(r, type, about), shared) : 0;
        err = err ? err : its;
    }
    zr_shared_bytes_leave(shared);
    return err;
}

/* --- failures --- */

int zr_hub_fail(struct zr_rendezvous *r, int code, const char *fmt, ...)
{
    if (r->code)
        return r->code;
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(r->text, sizeof r->text, fmt, ap);
    va_end(ap);
    r->code = code;
    (void)zr_hub_send_all(r, ZR_FRAME_FAIL, code, r->text, strlen(r->text));
    return code;
}

int zr_hub_fail_all(struct zr_rendezvous *r, int code, const char *text)
{
    bool first = !r->code;
    zr_hub_fail(r, code, "rank %d: %s", r->w.rank, text);
    if (first)
        (void)zr_hub_send(r, 0, ZR_FRAME_FAIL, code, r->text, strlen(r->text));
    return r->code;
}

void zr_hub_note(struct zr_rendezvous *r, enum zr_trouble trouble, const char *fmt, ...)
{
    if (trouble >= r->worst)
        r->trouble_before[0] = 0;
    else if (!r->trouble_before[0])
        memcpy(r->trouble_before, r->trouble, sizeof r->trouble);
    r->worst = trouble > r->worst ? trouble : r->worst;
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(r->trouble, sizeof r->trouble, fmt, ap);
    va_end(ap);
}

bool zr_hub_put_report(struct zr_rendezvous *r, struct zr_reported *report, int code, const char *text)
{
    uv_mutex_lock(&r->report_lock);
    bool listens = r->may_report;
    if (listens && !report->code) {
        snprintf(report->text, sizeof report->text, "%s", text);
        report->code = code;
        uv_async_send(&r->report); /* hold the lock, so that the handle is not closed meanwhile */
    }
    uv_mutex_unlock(&r->report_lock);
    return listens;
}

struct zr_reported zr_hub_take_report(struct zr_rendezvous *r, const struct zr_reported *report)
{
    uv_mutex_lock(&r->report_lock);
    struct zr_reported taken = *report;
    uv_mutex_unlock(&r->report_lock);
    return taken;
}

void zr_hub_send_report(struct zr_rendezvous *r, bool leaving)
{
    const struct zr_reported n = zr_hub_take_report(r, &r->reported);
    if (!n.code || r->code || r->closing || (n.code == ZERO_ERR_PEER && !leaving))
        return;
    r->has_reported = true;
    zr_hub_fail(r, n.code, "%s", n.text);
    (void)zr_hub_send(r, 0, ZR_FRAME_FAIL, r->code, r->text, strlen(r->text));
}

void zr_hub_report_failure(struct zr_rendezvous *r)
{
    if (r->detached && r->code && r->on_failed && !r->closing)
        r->on_failed(r->arg, r->code, r->text);
}

/* Adopts the failure of a rank that had failed before it ended. The end of that rank is not the cause. */
static void adopt(struct zr_rendezvous *r, int code, const char *text)
{
    bool first = !r->code;
    zr_hub_fail(r, code < 0 ? code : ZERO_ERR_FAILED, "%s", text);
    if (first)
        zr_hub_report_failure(r);
}

/* --- lost ranks --- */

static const char *doing(const struct zr_rendezvous *r)
{
    return r->phase == ZR_PHASE_MEET   ? "while ranks met"
           : r->phase == ZR_PHASE_IDLE ? "before an exchange"
                                       : "during an exchange";
}

void zr_hub_describe(const struct zr_rendezvous *r, int rank, char text[ZR_HUB_CALL_CHARS])
{
    text[0] = 0;
    if (r->known.last_call)
        r->known.last_call(r->known.arg, rank, text, ZR_HUB_CALL_CHARS);
}

void zr_hub_see(const struct zr_rendezvous *r, int rank, struct zr_rank_seen *out)
{
    memset(out, 0, sizeof *out);
    if (r->known.see)
        r->known.see(r->known.arg, rank, out);
}

/* Writes how a rank was lost, with its last call, for this rank and those that it reports to. The rank that
 * noticed the loss first may be on another host, and know only the call of the last beat. A rank that can
 * read the real last call replaces that. */
static void say_how_lost(struct zr_rendezvous *r, int rank, const char *why, char text[ZR_FRAME_TEXT_BYTES])
{
    const char *last_heard = r->members[rank].last_heard;
    char call[ZR_HUB_CALL_CHARS] = "", last[ZR_LAST_CALL_CHARS] = "";
    why = why ? why : "there is no memory to say how";
    const char *heard = strstr(why, ZR_HUB_LAST_HEARD);
    bool is_known = strstr(why, ZR_HUB_LAST_CALL) != NULL;
    size_t n_why = strlen(why);
    if (!is_known)
        zr_hub_describe(r, rank, call);
    if (call[0])
        snprintf(last, sizeof last, "%s%s", ZR_HUB_LAST_CALL, call);
    else if (!is_known && !heard && last_heard)
        snprintf(last, sizeof last, "%s%s", ZR_HUB_LAST_HEARD, last_heard);
    if (call[0] && heard)
        n_why = (size_t)(heard - why);
    size_t most = ZR_FRAME_TEXT_BYTES - (last[0] ? sizeof last : 1);
    snprintf(text, ZR_FRAME_TEXT_BYTES, "%.*s%s", (int)(n_why < most ? n_why : most), why, last);
}

int zr_hub_check(struct zr_rendezvous *r)
{
    for (int i = 0; i < r->w.world; i++) {
        const struct zr_member *member = &r->members[i];
        if (member->state == ZR_MEMBER_LEFT)
            zr_hub_fail(r, ZERO_ERR_PEER, "rank %d left %s", i, doing(r));
        if (member->state == ZR_MEMBER_LOST)
            zr_hub_fail(r, ZERO_ERR_PEER, "rank %d was lost %s: %s", i, doing(r),
                        member->how ? member->how : "there is no memory to say how");
    }
    return r->code;
}

static void report_lost(struct zr_rendezvous *r, int rank, const char *why)
{
    char text[ZR_FRAME_TEXT_BYTES];
    say_how_lost(r, rank, why, text);
    (void)zr_hub_send_all(r, ZR_FRAME_LOST, rank, text, strlen(text));
    if (r->on_lost && !r->closing)
        r->on_lost(r->arg, rank, text);
}

void zr_hub_report_unreported(struct zr_rendezvous *r)
{
    if (r->code &&
        !r->has_reported) /* reported by a rank that had finished the last exchange before this one */
        zr_hub_report_failure(r);
    for (int i = 0; i < r->w.world && !r->closing; i++) {
        struct zr_member *member = &r->members[i];
        if (member->unreported)
            report_lost(r, i, member->how);
        member->unreported = false;
    }
}

static void lose(struct zr_rendezvous *r, int rank, const char *why)
{
    struct zr_member *member = &r->members[rank];
    char recorded[ZR_FRAME_TEXT_BYTES];
    if (member->state == ZR_MEMBER_LOST || member->state == ZR_MEMBER_LEFT)
        return;
    member->state = ZR_MEMBER_LOST;
    int code = r->detached ? zr_rendezvous_recorded(r, rank, recorded) : 0;
    if (code) {
        adopt(r, code, recorded);
    } else if (r->detached) {
        report_lost(r, rank, why);
    } else {
        member->unreported = true;
        member->how = strdup(why);
        if (r->phase != ZR_PHASE_IDLE)
            zr_hub_check(r);
    }
}

void zr_hub_lose(struct zr_rendezvous *r, struct zr_link *l, const char *why)
{
    zr_link_drop(l);
    lose(r, l->rank, why);
}

void zr_hub_let_go(struct zr_rendezvous *r, struct zr_link *l)
{
    zr_link_drop(l);
    r->members[l->rank].state = ZR_MEMBER_LOST;
}

/* --- messages of the rendezvous' user --- */

struct zr_message {
    struct zr_message *next;
    int from;
    size_t n;
    char data[];
};

int zr_rendezvous_send(struct zr_rendezvous *r, int to, const void *data, size_t n)
{
    bool from_0 = r->w.rank == 0;
    if (n == 0 || n > ZR_FRAME_SMALL_BYTES || (from_0 ? to < -1 || to == 0 || to >= r->w.world : to != 0))
        return zr_fail(ZERO_ERR_ARG,
                       "rank %d sends rank %d %zu bytes: 1 to %d, from or to rank 0, are allowed", r->w.rank,
                       to, n, ZR_FRAME_SMALL_BYTES);
    if (!r->detached || r->closing)
        return zr_fail(ZERO_ERR_ORDER, "sending: the rendezvous is %s",
                       r->closing ? "closed" : "not detached");
    if (to < 0)
        return zr_hub_send_all(r, ZR_FRAME_MESSAGE, -1, data, n);
    if (r->members[to].state != ZR_MEMBER_HERE)
        return zr_fail(ZERO_ERR_PEER, "rank %d has left", to);
    return zr_hub_send(r, to, ZR_FRAME_MESSAGE, to, data, n);
}

void zr_rendezvous_on_message(struct zr_rendezvous *r,
                              void (*on_message)(void *arg, int from, const void *data, size_t n))
{
    r->on_message = on_message;
}

static bool keep_message(struct zr_rendezvous *r, int from, const char *data, size_t n)
{
    struct zr_message **end = &r->messages, *t;
    int n_kept = 0;
    while (*end) {
        end = &(*end)->next;
        n_kept++;
    }
    t = n_kept < MAX_KEPT + r->w.world ? malloc(sizeof *t + n) : NULL;
    if (!t)
        return false;
    *t = (struct zr_message){.from = from, .n = n};
    memcpy(t->data, data, n);
    *end = t;
    return true;
}

/* Delivers a message, or keeps it before the detach. Returns false if too many are kept. */
static bool deliver_or_keep(struct zr_rendezvous *r, int from, const char *data, size_t n)
{
    if (!r->may_deliver)
        return keep_message(r, from, data, n);
    if (r->on_message)
        r->on_message(r->arg, from, data, n);
    return true;
}

void zr_hub_forget_messages(struct zr_rendezvous *r)
{
    while (r->messages) {
        struct zr_message *t = r->messages;
        r->messages = t->next;
        free(t);
    }
}

void zr_hub_deliver(struct zr_rendezvous *r)
{
    r->may_deliver = true;
    while (r->messages) {
        struct zr_message *t = r->messages;
        r->messages = t->next;
        if (r->on_message && !r->closing)
            r->on_message(r->arg, t->from, t->data, t->n);
        free(t);
    }
}

/* --- frames --- */

/* Returns whether frames are ignored from now on. At exit the other ranks learn one after the other that this
 * rank ends, and leave at once. To those who do not know yet, that must not look like the cause. */
static bool is_deaf(const struct zr_rendezvous *r)
{
    return r->closing || zr_fork_ending();
}

void zr_hub_all_here(struct zr_rendezvous *r)
{
    for (int i = 0; i < r->w.world; i++)
        if (r->members[i].state == ZR_MEMBER_EMPTY)
            r->members[i].state = ZR_MEMBER_HERE;
}

/* Handles a goodbye. */
static bool on_goodbye(struct zr_rendezvous *r, struct zr_link *l)
{
    r->members[l->rank].state = ZR_MEMBER_LEFT;
    zr_link_finish(l);
    if (!r->detached && r->phase != ZR_PHASE_IDLE)
        zr_hub_check(r);
    return true;
}

/* Handles the exit of a rank's program with its context open. If it had failed before, the frame has the
 * failure. */
static bool on_exit_frame(struct zr_rendezvous *r, struct zr_link *l, const struct zr_frame *f,
                          const char *text)
{
    zr_link_drop(l);
    if (f->about && r->detached && r->members[l->rank].state == ZR_MEMBER_HERE) {
        r->members[l->rank].state = ZR_MEMBER_LOST;
        adopt(r, f->about, text);
    } else {
        lose(r, l->rank, "its program exited without zero_unwrap");
    }
    return true;
}

/* Rank 0: keeps another rank's part of an exchange, or its result of a step. */
static bool on_given(struct zr_rendezvous *r, struct zr_link *l, const struct zr_frame *f)
{
    struct zr_member *member = &r->members[l->rank];
    if (r->w.rank != 0 || !l->in.payload || member->gave)
        return false;
    member->gave = f->type;
    member->given = zr_link_take_payload(l);
    member->n_given = f->n_bytes;
    member->given_about = f->about;
    return true;
}

/* Others: keeps the result of the current exchange, which rank 0 has sent. */
static bool on_result(struct zr_rendezvous *r, struct zr_link *l, const struct zr_frame *f)
{
    const enum zr_frame_type want = r->exchange_of == ZR_FRAME_GIVE ? ZR_FRAME_ALL : r->exchange_of;
    if (f->type != want || !l->in.payload || r->phase != ZR_PHASE_EXCHANGE || r->all)
        return false;
    r->all = zr_link_take_payload(l);
    r->n_all = f->n_bytes;
    r->all_about = f->about;
    r->phase = ZR_PHASE_IDLE; /* set before the result is read: rank 0 may leave right after it */
    r->n_expected = 0;
    return true;
}

static bool on_ready(struct zr_rendezvous *r)
{
    if (r->ready)
        return false;
    r->ready = true;
    r->phase = ZR_PHASE_IDLE; /* see on_result */
    zr_hub_all_here(r);
    return true;
}

static bool on_lost_frame(struct zr_rendezvous *r, const struct zr_frame *f, const char *text)
{
    char why[ZR_FRAME_TEXT_BYTES];
    if (f->about < 1 || f->about >= r->w.world || f->about == r->w.rank)
        return false;
    snprintf(why, sizeof why, "%s", text);
    lose(r, f->about, why);
    return true;
}

/* Handles a frame that only rank 0 sends. Returns false if it is invalid. */
static bool on_frame_of_rank_0(struct zr_rendezvous *r, struct zr_link *l, const struct zr_frame *f,
                               const char *text)
{
    switch (f->type) {
    case ZR_FRAME_READY:
        return on_ready(r);
    case ZR_FRAME_ALL:
    case ZR_FRAME_RESULT:
        return on_result(r, l, f);
    case ZR_FRAME_LOST:
        return on_lost_frame(r, f, text);
    case ZR_FRAME_ASK_CALLS:
        zr_hub_asked(r);
        return true;
    default:
        return false;
    }
}

/* Handles a frame from a rank that is here. Returns false if it is invalid. */
static bool on_frame_of_rank(struct zr_rendezvous *r, struct zr_link *l, const struct zr_frame *f,
                             const char *payload)
{
    const char *text = payload ? payload : "";
    if (f->world != r->w.world || f->rank != l->rank || f->version != ZR_FRAME_VERSION)
        return false;
    switch (f->type) {
    case ZR_FRAME_GOODBYE:
        return on_goodbye(r, l);
    case ZR_FRAME_EXIT:
        return on_exit_frame(r, l, f, text);
    case ZR_FRAME_FAIL: /* the rank is still here, and its goodbye will follow */
        adopt(r, f->about, text);
        return true;
    case ZR_FRAME_BEAT:
        zr_hub_on_beat(r, l->rank, payload);
        return true;
    case ZR_FRAME_MESSAGE:
        return payload && (f->about == r->w.rank || f->about == -1) &&
               deliver_or_keep(r, l->rank, payload, f->n_bytes);
    default:
        break;
    }
    if (r->w.rank != 0)
        return on_frame_of_rank_0(r, l, f, text);
    if (f->type == ZR_FRAME_CALLS)
        return zr_hub_on_calls(r, l->rank, f->about, payload, f->n_bytes);
    return (f->type == ZR_FRAME_GIVE || f->type == ZR_FRAME_RESULT) && on_given(r, l, f);
}

static void on_frame(struct zr_link *l, const struct zr_frame *f, const char *payload)
{
    struct zr_rendezvous *r = l->owner;
    if (is_deaf(r))
        return;
    if (l->is_outgoing && !r->accepted) {
        zr_hub_answer(r, l, f, payload);
    } else if (!l->is_outgoing && l->rank < 0) {
        zr_hub_hello(r, l, f, payload);
    } else if (!on_frame_of_rank(r, l, f, payload)) {
        zr_link_drop(l);
        lose(r, l->rank, "it sent a frame that makes no sense here");
    }
}

/* Handles a frame that is too large. A rank may send its part of the next exchange before rank 0 has begun
 * it. A frame that is too large for the current exchange belongs to another one, which is a failure of all
 * ranks. */
static bool on_large(struct zr_link *l, const struct zr_frame *f)
{
    struct zr_rendezvous *r = l->owner;
    if (r->closing || r->detached || l->is_outgoing || l->rank < 1 || f->type != ZR_FRAME_GIVE)
        return false;
    if (r->n_expected)
        zr_hub_differ(r, l->rank, f->type, f->n_bytes);
    return true;
}

size_t zr_hub_expected(const struct zr_rendezvous *r, int rank)
{
    bool is_result = rank == 0 && r->exchange_of == ZR_FRAME_GIVE;
    return is_result ? r->n_expected * (size_t)r->w.world : r->n_expected;
}

int zr_hub_differ(struct zr_rendezvous *r, int rank, uint16_t type, size_t n)
{
    if (type == ZR_FRAME_GIVE && r->exchange_of == ZR_FRAME_GIVE)
        return zr_hub_fail(r, ZERO_ERR_MISMATCH, "exchange: rank %d gives %zu bytes, rank 0 gives %zu", rank,
                           n, r->n_expected);
    if (type == ZR_FRAME_GIVE)
        return zr_hub_fail(r, ZERO_ERR_MISMATCH,
                           "exchange: rank %d gives %zu bytes, rank 0 compares how it went", rank, n);
    return zr_hub_fail(r, ZERO_ERR_MISMATCH, "exchange: rank %d compares how it went, rank 0 gives %zu bytes",
                       rank, r->n_expected);
}

void zr_hub_expect(struct zr_rendezvous *r, enum zr_frame_type of, size_t n)
{
    r->n_expected = n;
    r->exchange_of = of;
    for (int i = 0; i < r->w.world; i++) {
        struct zr_link *l = r->members[i].link;
        if (!l || r->members[i].state != ZR_MEMBER_HERE)
            continue;
        size_t expected = zr_hub_expected(r, i);
        uint32_t most = expected > ZR_FRAME_SMALL_BYTES ? (uint32_t)expected : ZR_FRAME_SMALL_BYTES;
        if (n && l->held && l->in.head.n_bytes > most)
            (void)on_large(l, &l->in.head);
        else if (n || !l->held)
            zr_link_allow(l, most);
    }
}

/* --- ends of links --- */

static void on_end(struct zr_link *l, int code, const char *why)
{
    struct zr_rendezvous *r = l->owner;
    if (is_deaf(r))
        return;
    bool known = l->is_outgoing ? r->accepted : l->rank > 0;
    if (known && code == ZERO_ERR_NOMEM && !r->detached) {
        zr_hub_fail_all(r, code, why);
        zr_link_finish(l); /* frames that are being sent are still read by the other end */
    } else if (known) {
        lose(r, l->rank, why);
    } else if (l->is_outgoing && code == ZERO_ERR_NOMEM) {
        /* Rank 0 may have accepted this rank already. */
        zr_hub_fail(r, code, "rank %d: %s", r->w.rank, why);
        (void)zr_link_send(l, frame_of(r, ZR_FRAME_FAIL, code), r->text, strlen(r->text));
        zr_link_finish(l);
    } else if (l->is_outgoing) {
        /* The other side is not rank 0 of this job, or not yet. */
        zr_hub_note(r, code == ZERO_ERR_PEER ? ZR_TROUBLE_ENDED : ZR_TROUBLE_STRANGE, "%s", why);
        r->members[0].link = NULL;
        zr_hub_retry(r);
    }
}

static void check_links(struct zr_rendezvous *r);

static void on_closed(struct zr_link *l)
{
    struct zr_rendezvous *r = l->owner;
    if (l->prev)
        l->prev->next = l->next;
    else
        r->links = l->next;
    if (l->next)
        l->next->prev = l->prev;
    if (!l->is_outgoing && l->rank < 0)
        r->n_unidentified--;
    if (l->rank >= 0 && r->members[l->rank].link == l)
        r->members[l->rank].link = NULL;
    check_links(r);
}

const struct zr_link_calls zr_hub_calls = {
    .on_connect = zr_hub_on_connect,
    .on_frame = on_frame,
    .on_large = on_large,
    .on_end = on_end,
    .on_closed = on_closed,
};

/* --- closing --- */

void zr_hub_handle_closed(uv_handle_t *h)
{
    struct zr_rendezvous *r = h->data;
    r->n_handles--;
}

/* Closes the deadline timer as the last handle, when all links are gone. It limits the wait for goodbyes. */
static void check_links(struct zr_rendezvous *r)
{
    if (r->closing && !r->links && !uv_is_closing((uv_handle_t *)&r->deadline))
        uv_close((uv_handle_t *)&r->deadline, zr_hub_handle_closed);
}

static void lingered(uv_timer_t *t)
{
    struct zr_rendezvous *r = t->data;
    for (struct zr_link *l = r->links; l; l = l->next)
        zr_link_drop(l);
}

void zr_hub_close(struct zr_rendezvous *r)
{
    if (r->closing || r->w.world == 1)
        return;
    uv_mutex_lock(&r->report_lock);
    r->may_report = false;
    uv_mutex_unlock(&r->report_lock);
    zr_hub_send_report(r, true);
    for (struct zr_link *l = r->links; l; l = l->next) {
        if (l->finishing)
            continue;
        if (l->rank >= 0 && r->members[l->rank].link == l && r->members[l->rank].state == ZR_MEMBER_HERE) {
            (void)zr_hub_send(r, l->rank, ZR_FRAME_GOODBYE, 0, NULL, 0);
            zr_link_finish(l);
        } else {
            zr_link_drop(l);
        }
    }
    r->closing = true;
    zr_hub_ignore_handed(r);
    zr_hub_stop_listening(r);
    if (r->lookup)
        zr_lookup_leave(r->lookup);
    uv_timer_t *const timers[] = {&r->retry, &r->patience, &r->admit, &r->answers, &r->beat, &r->look};
    for (size_t i = 0; i < sizeof timers / sizeof *timers; i++)
        uv_close((uv_handle_t *)timers[i], zr_hub_handle_closed);
    zr_hub_forget_comparison(r);
    uv_close((uv_handle_t *)&r->report, zr_hub_handle_closed);
    uv_timer_start(&r->deadline, lingered, LINGER_MS, 0);
    check_links(r);
}

bool zr_hub_closed(const struct zr_rendezvous *r)
{
    return r->w.world == 1 || (r->closing && !r->links && r->n_handles == 0 && !r->lookup);
}
