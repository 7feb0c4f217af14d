/* SPDX-License-Identifier: Apache-2.0 */
/* hub.c: a rendezvous' life on its loop: frames, failures, losses and the end (see hub.h; ranks meet in
 * hub_meet.c). Runs on the thread that runs the loop. */
#include "comm/meet/hub.h"
#include "comm/fork.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LINGER_MS = 300 }; /* for the other ends to read a goodbye */

static const char exited[] = "its program exited without zero_unwrap";

static int send_frame(struct zr_rendezvous *r, int rank, enum zr_frame_type type, int32_t about,
                      const void *payload, size_t n)
{
    struct zr_frame f = {.type = (uint16_t)type, .rank = r->w.rank, .world = r->w.world, .about = about};
    struct zr_link *l = r->members[rank].link;
    return l ? zr_link_send(l, f, payload, n) : 0;
}

void zr_hub_keep(struct zr_rendezvous *r, struct zr_link *l)
{
    zr_fork_last_word(&l->kept,
                      &(struct zr_frame){.magic = ZR_FRAME_MAGIC,
                                         .version = ZR_FRAME_VERSION,
                                         .type = ZR_FRAME_EXIT,
                                         .rank = r->w.rank,
                                         .world = r->w.world},
                      &r->last_failure);
}

int zr_hub_send(struct zr_rendezvous *r, int rank, enum zr_frame_type type, const void *payload, size_t n)
{
    int err = send_frame(r, rank, type, 0, payload, n);
    return err ? zr_hub_fail_all(r, err, zr_error_text()) : 0;
}

int zr_hub_send_about(struct zr_rendezvous *r, int rank, enum zr_frame_type type, int32_t about,
                      const void *payload, size_t n)
{
    bool here = r->members[rank].state == ZR_MEMBER_HERE;
    return here ? send_frame(r, rank, type, about, payload, n) : 0;
}

int zr_hub_send_all(struct zr_rendezvous *r, enum zr_frame_type type, int32_t about, const void *payload,
                    size_t n)
{
    struct zr_frame f = {.type = (uint16_t)type, .rank = r->w.rank, .world = r->w.world, .about = about};
    int err = 0;
    if (r->w.rank != 0)
        return 0;
    struct zr_shared_bytes *shared = zr_shared_bytes_new(payload, n);
    if (!shared)
        return zr_fail(ZR_ERR_NOMEM, "rendezvous: no memory for a frame of %zu bytes", n);
    for (int i = 1; i < r->w.world; i++) {
        struct zr_link *l = r->members[i].state == ZR_MEMBER_HERE ? r->members[i].link : NULL;
        int its = l ? zr_link_send_shared(l, f, shared) : 0;
        err = err ? err : its;
    }
    zr_shared_bytes_leave(shared);
    return err;
}

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
        (void)zr_hub_send_about(r, 0, ZR_FRAME_FAIL, code, r->text, strlen(r->text));
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

void zr_hub_send_report(struct zr_rendezvous *r, bool leaving)
{
    char text[sizeof r->report_text];
    uv_mutex_lock(&r->report_lock);
    int code = r->report_code;
    memcpy(text, r->report_text, sizeof text);
    uv_mutex_unlock(&r->report_lock);
    if (!code || r->code || r->closing || (code == ZR_ERR_PEER && !leaving))
        return;
    r->reported = true;
    zr_hub_fail(r, code, "%s", text);
    (void)zr_hub_send_about(r, 0, ZR_FRAME_FAIL, code, r->text, strlen(r->text));
}

/* --- ranks that go --- */

static const char *doing(const struct zr_rendezvous *r)
{
    return r->phase == ZR_PHASE_MEET   ? "while ranks met"
           : r->phase == ZR_PHASE_IDLE ? "before an exchange"
                                       : "during an exchange";
}

void zr_hub_describe(const struct zr_rendezvous *r, int rank, char text[ZR_HUB_CALL_CHARS])
{
    text[0] = 0;
    if (r->describe)
        r->describe(r->describe_arg, rank, text, ZR_HUB_CALL_CHARS);
}

/* How a rank was lost, as this one has it and tells it on, with the other's last call. Whoever saw it first
 * may be of another host, and know only which call the other has told: a rank that can read it says it
 * instead. */
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
            zr_hub_fail(r, ZR_ERR_PEER, "rank %d left %s", i, doing(r));
        if (member->state == ZR_MEMBER_LOST)
            zr_hub_fail(r, ZR_ERR_PEER, "rank %d was lost %s: %s", i, doing(r),
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

void zr_hub_report_failure(struct zr_rendezvous *r)
{
    if (r->detached && r->code && r->on_failed && !r->closing)
        r->on_failed(r->arg, r->code, r->text);
}

void zr_hub_report_unreported(struct zr_rendezvous *r)
{
    if (r->code && !r->reported) /* reported by a rank that had finished the last exchange before this one */
        zr_hub_report_failure(r);
    for (int i = 0; i < r->w.world && !r->closing; i++) {
        struct zr_member *member = &r->members[i];
        if (member->unreported)
            report_lost(r, i, member->how);
        member->unreported = false;
    }
}

/* A rank that had failed before it ended is not the cause: its failure becomes this one's. */
static void adopt(struct zr_rendezvous *r, int code, const char *text)
{
    bool first = !r->code;
    zr_hub_fail(r, code < 0 ? code : ZR_ERR_FAILED, "%s", text);
    if (first)
        zr_hub_report_failure(r);
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

/* A rank said goodbye. */
static void leave(struct zr_rendezvous *r, int rank)
{
    struct zr_member *member = &r->members[rank];
    member->state = ZR_MEMBER_LEFT;
    if (member->link)
        zr_link_finish(member->link);
    if (!r->detached && r->phase != ZR_PHASE_IDLE)
        zr_hub_check(r);
}

/* --- frames and ends of links --- */

/* Nothing that comes in is looked at any more. At exit the other ranks learn one after the other that this
 * rank ends, and those who know leave at once: to those who do not know yet their leaving must not look like
 * the cause. */
static bool is_deaf(const struct zr_rendezvous *r)
{
    return r->closing || zr_fork_ending();
}

/* A rank's program exits with its context open. Where it had failed before, it says that. */
static void on_exit_frame(struct zr_rendezvous *r, struct zr_link *l, const struct zr_frame *f,
                          const char *text)
{
    zr_link_drop(l);
    if (f->about && r->detached && r->members[l->rank].state == ZR_MEMBER_HERE) {
        r->members[l->rank].state = ZR_MEMBER_LOST;
        adopt(r, f->about, text);
    } else {
        lose(r, l->rank, exited);
    }
}

/* Rank 0: from another rank, which is here. */
static void on_rank_frame(struct zr_rendezvous *r, struct zr_link *l, const struct zr_frame *f,
                          const char *payload)
{
    struct zr_member *member = &r->members[l->rank];
    bool ours = f->world == r->w.world && f->rank == l->rank && f->version == ZR_FRAME_VERSION;
    if (ours && f->type == ZR_FRAME_GOODBYE) {
        leave(r, l->rank);
    } else if (ours && (f->type == ZR_FRAME_GIVE || f->type == ZR_FRAME_VERDICT) && payload &&
               !member->gave) {
        member->gave = f->type;
        member->given = zr_link_take_payload(l);
        member->n_given = f->n_bytes;
        member->given_about = f->about;
    } else if (ours && f->type == ZR_FRAME_FAIL) {
        adopt(r, f->about, payload ? payload : ""); /* it is still here, and its goodbye will follow */
    } else if (ours && f->type == ZR_FRAME_BEAT) {
        zr_hub_on_beat(r, l->rank, payload);
    } else if (ours && f->type == ZR_FRAME_EXIT) {
        on_exit_frame(r, l, f, payload ? payload : "");
    } else if (ours && f->type == ZR_FRAME_CALLS &&
               zr_hub_on_calls(r, l->rank, f->about, payload, f->n_bytes)) {
        /* The calls are kept. */
    } else if (ours && f->type == ZR_FRAME_MESSAGE && payload && f->about == 0 &&
               zr_hub_message(r, l->rank, payload, f->n_bytes)) {
        /* It is told, or will be. */
    } else {
        zr_link_drop(l);
        lose(r, l->rank, "it sent a frame that makes no sense here");
    }
}

void zr_hub_all_here(struct zr_rendezvous *r)
{
    for (int i = 0; i < r->w.world; i++)
        if (r->members[i].state == ZR_MEMBER_EMPTY)
            r->members[i].state = ZR_MEMBER_HERE;
}

static void on_ready(struct zr_rendezvous *r)
{
    r->ready = true;
    r->phase = ZR_PHASE_IDLE; /* before the result is looked at: rank 0 may leave right behind it */
    zr_hub_all_here(r);
}

/* The result of the exchange under way. */
static void on_result(struct zr_rendezvous *r, struct zr_link *l, const struct zr_frame *f)
{
    r->all = zr_link_take_payload(l);
    r->n_all = f->n_bytes;
    r->all_about = f->about;
    r->phase = ZR_PHASE_IDLE;
}

/* From rank 0. */
static void on_hub_frame(struct zr_rendezvous *r, struct zr_link *l, const struct zr_frame *f,
                         const char *payload)
{
    const char *text = payload ? payload : "";
    bool ours = f->world == r->w.world && f->rank == l->rank && f->version == ZR_FRAME_VERSION;
    if (ours && f->type == ZR_FRAME_READY && !r->ready) {
        on_ready(r);
    } else if (ours && f->type == (r->exchange_of == ZR_FRAME_GIVE ? ZR_FRAME_ALL : r->exchange_of) &&
               payload && r->phase == ZR_PHASE_EXCHANGE && !r->all) {
        on_result(r, l, f);
    } else if (ours && f->type == ZR_FRAME_FAIL) {
        adopt(r, f->about, text);
    } else if (ours && f->type == ZR_FRAME_LOST && f->about >= 0 && f->about < r->w.world &&
               f->about != r->w.rank && f->about != l->rank) {
        char why[ZR_FRAME_TEXT_BYTES];
        snprintf(why, sizeof why, "%s", text);
        lose(r, f->about, why);
    } else if (ours && f->type == ZR_FRAME_ASK_CALLS) {
        zr_hub_asked(r);
    } else if (ours && f->type == ZR_FRAME_MESSAGE && payload && (f->about == r->w.rank || f->about == -1) &&
               zr_hub_message(r, 0, payload, f->n_bytes)) {
        /* It is told, or will be. */
    } else if (ours && f->type == ZR_FRAME_BEAT) {
        zr_hub_on_beat(r, l->rank, payload);
    } else if (ours && f->type == ZR_FRAME_EXIT) {
        on_exit_frame(r, l, f, text);
    } else if (ours && f->type == ZR_FRAME_GOODBYE) {
        leave(r, l->rank);
    } else {
        zr_link_drop(l);
        lose(r, l->rank, "it sent a frame that makes no sense here");
    }
}

static void on_frame(struct zr_link *l, const struct zr_frame *f, const char *payload)
{
    struct zr_rendezvous *r = l->owner;
    if (is_deaf(r))
        return;
    if (l->is_outgoing && r->accepted)
        on_hub_frame(r, l, f, payload);
    else if (l->is_outgoing)
        zr_hub_answer(r, l, f, payload);
    else if (l->rank > 0)
        on_rank_frame(r, l, f, payload);
    else
        zr_hub_hello(r, l, f, payload);
}

/* A rank may send its blob of the next exchange before rank 0 has begun it. A frame that is too large
 * for this exchange is of another one than ours, which is a failure of all ranks. */
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
        return zr_hub_fail(r, ZR_ERR_MISMATCH, "exchange: rank %d gives %zu bytes, rank 0 gives %zu", rank, n,
                           r->n_expected);
    if (type == ZR_FRAME_GIVE)
        return zr_hub_fail(r, ZR_ERR_MISMATCH,
                           "exchange: rank %d gives %zu bytes, rank 0 compares how it went", rank, n);
    return zr_hub_fail(r, ZR_ERR_MISMATCH, "exchange: rank %d compares how it went, rank 0 gives %zu bytes",
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

static void on_end(struct zr_link *l, int code, const char *why)
{
    struct zr_rendezvous *r = l->owner;
    if (is_deaf(r))
        return;
    bool known = l->is_outgoing ? r->accepted : l->rank > 0;
    if (known && code == ZR_ERR_NOMEM && !r->detached) {
        zr_hub_fail_all(r, code, why);
        zr_link_finish(l); /* what is on its way there is still read there */
    } else if (known) {
        lose(r, l->rank, why);
    } else if (l->is_outgoing && code == ZR_ERR_NOMEM) {
        /* Rank 0 may have let us in already. */
        zr_hub_fail(r, code, "rank %d: %s", r->w.rank, why);
        (void)send_frame(r, 0, ZR_FRAME_FAIL, code, r->text, strlen(r->text));
        zr_link_finish(l);
    } else if (l->is_outgoing) {
        /* Whoever listens there now is not our rank 0, or not yet. */
        zr_hub_note(r, code == ZR_ERR_PEER ? ZR_TROUBLE_ENDED : ZR_TROUBLE_STRANGE, "%s", why);
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

static void handle_closed(uv_handle_t *h)
{
    struct zr_rendezvous *r = h->data;
    r->n_handles--;
}

/* The deadline's timer bounds the wait for goodbyes, so it is closed last. */
static void check_links(struct zr_rendezvous *r)
{
    if (r->closing && !r->links && !uv_is_closing((uv_handle_t *)&r->deadline))
        uv_close((uv_handle_t *)&r->deadline, handle_closed);
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
            (void)send_frame(r, l->rank, ZR_FRAME_GOODBYE, 0, NULL, 0);
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
    uv_close((uv_handle_t *)&r->retry, handle_closed);
    uv_close((uv_handle_t *)&r->patience, handle_closed);
    uv_close((uv_handle_t *)&r->admit, handle_closed);
    uv_close((uv_handle_t *)&r->answers, handle_closed);
    uv_close((uv_handle_t *)&r->beat, handle_closed);
    uv_close((uv_handle_t *)&r->look, handle_closed);
    zr_hub_forget_comparison(r);
    uv_close((uv_handle_t *)&r->report, handle_closed);
    uv_timer_start(&r->deadline, lingered, LINGER_MS, 0);
    check_links(r);
}

bool zr_hub_closed(const struct zr_rendezvous *r)
{
    return r->w.world == 1 || (r->closing && !r->links && r->n_handles == 0 && !r->lookup);
}
