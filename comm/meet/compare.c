/* SPDX-License-Identifier: Apache-2.0 */
/* compare.c: compares what programs called, for ranks that share no memory with the calls (see
 * zr_rendezvous_compare).
 *
 * A rank with a failure that different calls may explain sends its latest calls, and that failure, to rank 0.
 * Rank 0 asks the others for their calls. When all have come, or the time is over, it looks for the first
 * call that differs. That becomes the failure of all ranks, and is sent like any other. What a rank has sent
 * to rank 0 before its calls arrives before them, so a failure that explains everything comes first. */
#include "comm/meet/hub.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ANSWER_MS = 5000 };

/* Time that rank 0 waits for answers. It is half of the time that ranks wait for each other, so that the rank
 * that asked is still waiting. */
static uint64_t answer_ms(const struct zr_rendezvous *r)
{
    return (uint64_t)(r->timeout_ms / 2 < ANSWER_MS ? r->timeout_ms / 2 : ANSWER_MS);
}

/* A CALLS frame carries calls. A rank that asks for a comparison appends the text of its failure. */
_Static_assert(sizeof(struct zr_call_log_copy) + ZR_FRAME_TEXT_BYTES <= ZR_FRAME_SMALL_BYTES,
               "a rank may send its calls at any time");

bool zr_rendezvous_compare(struct zr_rendezvous *r, int code, const char *text)
{
    return zr_hub_put_report(r, &r->doubted, code, text);
}

/* ---- rank 0 compares all calls ---- */

/* NULL: they are unknown. */
static const struct zr_call_log *own_calls(const struct zr_rendezvous *r)
{
    return r->known.calls_of_all ? r->known.calls_of_all(r->known.arg) : NULL;
}

static const struct zr_call_log *member_calls(const struct zr_rendezvous *r, int rank)
{
    return rank == r->w.rank ? own_calls(r) : r->members[rank].calls;
}

static uint64_t n_calls(const struct zr_rendezvous *r, int rank)
{
    const struct zr_call_log *calls = member_calls(r, rank);
    return calls ? atomic_load(&calls->n) : 0;
}

/* Finds the first rank with the most calls, or with the fewest, among those that answered. */
static int furthest(const struct zr_rendezvous *r, bool most)
{
    int best = 0;
    for (int i = 1; i < r->w.world; i++)
        if (member_calls(r, i) &&
            (most ? n_calls(r, i) > n_calls(r, best) : n_calls(r, i) < n_calls(r, best)))
            best = i;
    return best;
}

/* Compares every rank with the one that has the most calls. If two others differ in a call, that one has made
 * this call too, so one of them differs from it. */
static bool find_difference(const struct zr_rendezvous *r, char text[ZR_CALL_LOG_BOTH_CHARS])
{
    int of = furthest(r, true);
    uint64_t first = 0;
    for (int i = 0; i < r->w.world; i++) {
        struct zr_logged_call here, there;
        uint64_t n = i != of && n_calls(r, i)
                         ? zr_call_log_differ(member_calls(r, i), member_calls(r, of), &there, &here)
                         : 0;
        if (n && (!first || n < first)) {
            first = n;
            zr_call_log_report(i, &there, of, &here,
                               zr_call_log_left_out(member_calls(r, i), member_calls(r, of), n), text);
        }
    }
    return first != 0;
}

/* Writes "240 calls, the last zero_end(unit 3, forward) in step 4". */
static void report_place(const struct zr_rendezvous *r, int rank, char *text, size_t n_text)
{
    struct zr_logged_call last;
    char call[ZR_CALL_LOG_CHARS] = "";
    uint64_t n = n_calls(r, rank);
    if (n && zr_call_log_last(member_calls(r, rank), &last))
        zr_call_log_describe(&last, call);
    if (n)
        snprintf(text, n_text, "%llu calls, the last %s", (unsigned long long)n, call);
    else
        snprintf(text, n_text, "no call");
}

/* Writes which rank is behind, if all calls that were made are the same. */
static void report_behind(const struct zr_rendezvous *r, char *text, size_t n_text)
{
    int ahead = furthest(r, true), behind = furthest(r, false);
    char there[192], here[192];
    report_place(r, ahead, here, sizeof here);
    report_place(r, behind, there, sizeof there);
    if (!n_calls(r, ahead))
        snprintf(text, n_text, "; no program has made a call");
    else if (n_calls(r, ahead) == n_calls(r, behind))
        snprintf(text, n_text, "; the programs have made the same %s", here);
    else
        snprintf(text, n_text, "; rank %d did not come: its program has made %s; that of rank %d %s", behind,
                 there, ahead, here);
}

/* Writes "; no answer came from rank 2, rank 5". */
static void report_silent(const struct zr_rendezvous *r, char *text, size_t n_text)
{
    size_t at = 0;
    text[0] = 0;
    for (int i = 1; i < r->w.world && at + 32 < n_text; i++)
        if (!r->members[i].calls)
            at += (size_t)snprintf(text + at, n_text - at, "%srank %d", at ? ", " : "; no answer came from ",
                                   i);
}

static void forget_calls(struct zr_rendezvous *r)
{
    for (int i = 0; i < r->w.world; i++) {
        free(r->members[i].calls);
        r->members[i].calls = NULL;
    }
}

static void decide(struct zr_rendezvous *r)
{
    char calls[ZR_CALL_LOG_BOTH_CHARS], place[640] = "", silent[160], stopped[ZR_STOPPED_CHARS];
    const struct zr_comparison *c = &r->comparison;
    uv_timer_stop(&r->answers);
    zr_hub_send_report(r, false);
    bool first = !r->code; /* otherwise another failure is known by now, to all */
    report_silent(r, silent, sizeof silent);
    zr_rendezvous_describe_stopped(r, zr_rendezvous_stopped(r), stopped);
    if (first && find_difference(r, calls)) {
        zr_hub_fail(r, ZERO_ERR_MISMATCH, "%s (rank %d: %.400s)", calls, c->rank, c->text);
    } else if (first) {
        if (c->code == ZERO_ERR_TIMEOUT)
            report_behind(r, place, sizeof place);
        else if (c->code == ZERO_ERR_MISMATCH)
            snprintf(place, sizeof place, "; the latest %d calls of the programs do not differ",
                     ZR_CALL_LOG_KEPT);
        zr_hub_fail(r, c->code, "%.400s%s%s%s" ZR_HUB_FOUND_BY "%d)", c->text, place, silent, stopped,
                    c->rank);
    }
    forget_calls(r);
    r->comparison.begun = false;
    if (first)
        zr_hub_report_failure(r);
}

static void on_answers_late(uv_timer_t *t)
{
    decide(t->data);
}

/* Whether a rank may still answer. A rank that is stopped will not. */
static bool may_answer(const struct zr_rendezvous *r, int rank)
{
    struct zr_rank_seen seen;
    zr_hub_see(r, rank, &seen);
    return r->members[rank].state == ZR_MEMBER_HERE && !seen.is_stopped;
}

static bool all_answered(const struct zr_rendezvous *r)
{
    for (int i = 1; i < r->w.world; i++)
        if (!r->members[i].calls && may_answer(r, i))
            return false;
    return true;
}

/* Rank 0: begins a comparison for a rank, or this one, with a failure that different calls may explain. */
static void begin_comparison(struct zr_rendezvous *r, int rank, int code, const char *text)
{
    struct zr_comparison *c = &r->comparison;
    if (c->begun || r->code || r->closing)
        return;
    c->begun = true;
    c->rank = rank;
    c->code = code < 0 ? code : ZERO_ERR_FAILED;
    snprintf(c->text, sizeof c->text, "%s", text);
    for (int i = 1; i < r->w.world; i++)
        if (!r->members[i].calls)
            zr_hub_send(r, i, ZR_FRAME_ASK_CALLS, 0, NULL, 0);
    uv_update_time(r->loop);
    uv_timer_start(&r->answers, on_answers_late, answer_ms(r), 0);
}

/* ---- frames with calls ---- */

/* Sends this rank's calls to rank 0. code 0: they are only an answer. */
static void send_calls(struct zr_rendezvous *r, int code, const char *text)
{
    size_t n_text = strlen(text);
    struct zr_call_log_copy *copy = malloc(sizeof *copy + n_text);
    if (!copy)
        return; /* the rank that asked waits until its time is over */
    zr_call_log_copy(own_calls(r), copy);
    memcpy(copy + 1, text, n_text);
    zr_hub_send(r, 0, ZR_FRAME_CALLS, code, copy, sizeof *copy + n_text);
    free(copy);
}

void zr_hub_compare(struct zr_rendezvous *r)
{
    const struct zr_reported n = zr_hub_take_report(r, &r->doubted);
    if (!n.code || r->has_doubted || r->code || r->closing)
        return;
    r->has_doubted = true;
    if (r->w.rank != 0) {
        send_calls(r, n.code, n.text);
        return;
    }
    begin_comparison(r, 0, n.code, n.text);
    if (r->comparison.begun && all_answered(r))
        decide(r);
}

void zr_hub_asked(struct zr_rendezvous *r)
{
    zr_hub_send_report(r, false);
    send_calls(r, 0, "");
}

bool zr_hub_on_calls(struct zr_rendezvous *r, int rank, int code, const char *payload, size_t n)
{
    struct zr_member *member = &r->members[rank];
    const struct zr_call_log_copy *copy = (const struct zr_call_log_copy *)payload;
    char text[ZR_FRAME_TEXT_BYTES];
    if (n < sizeof *copy || n - sizeof *copy >= sizeof text)
        return false;
    if (r->code)
        return true;
    member->calls = member->calls ? member->calls : malloc(sizeof *member->calls);
    if (member->calls)
        zr_call_log_restore(member->calls, copy);
    snprintf(text, sizeof text, "%.*s", (int)(n - sizeof *copy), payload + sizeof *copy);
    if (code)
        begin_comparison(r, rank, code, text);
    if (r->comparison.begun && all_answered(r))
        decide(r);
    return true;
}

void zr_hub_forget_comparison(struct zr_rendezvous *r)
{
    r->comparison.begun = false;
    forget_calls(r);
}
