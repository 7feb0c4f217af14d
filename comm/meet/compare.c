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

/* The payload of a CALLS frame: calls of one communicator. A rank that asks for a comparison appends the text
 * of its failure to the last one. */
struct calls_frame {
    uint64_t group;
    /* size is 0 if the rank logs no calls at all; the rest is 0 then. */
    int32_t size;
    uint16_t comm, is_last;
    struct zr_call_log_copy copy;
};
_Static_assert(sizeof(struct calls_frame) + ZR_FRAME_TEXT_BYTES <= ZR_FRAME_SMALL_BYTES,
               "a rank may send its calls at any time");

bool zr_rendezvous_compare(struct zr_rendezvous *r, int code, const char *text)
{
    return zr_hub_put_report(r, &r->doubted, code, text);
}

/* ---- rank 0 compares all calls ---- */

static void own_calls(const struct zr_rendezvous *r, struct zr_shared_calls out[ZR_SHARED_CALLS])
{
    memset(out, 0, ZR_SHARED_CALLS * sizeof *out);
    if (r->known.shared_calls)
        r->known.shared_calls(r->known.arg, out);
}

/* Returns a rank's calls of communicator number comm, 0 to ZR_SHARED_CALLS - 1. */
static const struct zr_shared_calls *calls_of(const struct zr_rendezvous *r, int rank, int comm)
{
    return &r->members[rank].calls[comm];
}

static uint64_t n_calls(const struct zr_rendezvous *r, int rank, int comm)
{
    return atomic_load(&calls_of(r, rank, comm)->log->n);
}

/* Finds, for each rank and communicator, which of its ranks have made the most and the fewest calls. If there
 * is no memory for that, nothing can be compared. */
static void find_furthest(struct zr_rendezvous *r)
{
    struct zr_sharing_rank *s = malloc((size_t)r->w.world * sizeof *s);
    for (int comm = 0; comm < ZR_SHARED_CALLS; comm++) {
        int n = 0;
        for (int i = 0; i < r->w.world; i++) {
            const struct zr_shared_calls *c = calls_of(r, i, comm);
            r->members[i].ahead[comm] = r->members[i].behind[comm] = -1;
            if (s && c->log)
                s[n++] = (struct zr_sharing_rank){c->group, n_calls(r, i, comm), c->size, i};
        }
        if (n)
            zr_call_log_furthest(s, n);
        for (int k = 0; k < n; k++) {
            r->members[s[k].rank].ahead[comm] = s[k].ahead;
            r->members[s[k].rank].behind[comm] = s[k].behind;
        }
    }
    free(s);
}

/* Compares the calls of every rank with those of the rank that has made the most. If two other ranks differ
 * in a call, that rank has made the call too, so one of the two differs from it. Sets *compared if some calls
 * could be compared. */
static bool find_difference_in(const struct zr_rendezvous *r, int comm, bool *compared,
                               char text[ZR_CALL_LOG_BOTH_CHARS])
{
    uint64_t first = 0;
    for (int i = 0; i < r->w.world; i++) {
        struct zr_logged_call here, there;
        int of = r->members[i].ahead[comm];
        if (of < 0 || of == i)
            continue;
        const struct zr_call_log *own = calls_of(r, i, comm)->log, *most = calls_of(r, of, comm)->log;
        uint64_t n = zr_call_log_differ(own, most, &there, &here);
        *compared |= zr_call_log_overlap(own, most);
        if (n && (!first || n < first)) {
            first = n;
            zr_call_log_report(i, &there, of, &here, zr_call_log_left_out(own, most, n), text);
        }
    }
    return first != 0;
}

/* Compares the calls of the world first, as they lead to the ranks that are furthest ahead. A call that only
 * some ranks must make is found in the others. */
static bool find_difference(const struct zr_rendezvous *r, bool *compared, char text[ZR_CALL_LOG_BOTH_CHARS])
{
    *compared = false;
    for (int comm = ZR_SHARED_CALLS; comm-- > 0;)
        if (find_difference_in(r, comm, compared, text))
            return true;
    return false;
}

/* Writes "240 calls, the last zero_end(unit 3, forward) in step 4". */
static void report_place(const struct zr_rendezvous *r, int rank, int comm, char *text, size_t n_text)
{
    struct zr_logged_call last;
    char call[ZR_CALL_LOG_CHARS] = "";
    uint64_t n = n_calls(r, rank, comm);
    if (n && zr_call_log_last(calls_of(r, rank, comm)->log, &last))
        zr_call_log_describe(&last, call);
    if (n)
        snprintf(text, n_text, "%llu calls, the last %s", (unsigned long long)n, call);
    else
        snprintf(text, n_text, "no call");
}

/* Finds the rank that has made the fewest calls of a communicator, if they are fewer than this rank's. This
 * rank then waits for it. Sets *comm to that communicator. Returns -1 if there is no such rank. */
static int awaited_by(const struct zr_rendezvous *r, int rank, int *comm)
{
    for (int k = ZR_SHARED_CALLS; k-- > 0;) {
        int behind = r->members[rank].behind[k];
        if (behind >= 0 && n_calls(r, behind, k) < n_calls(r, rank, k)) {
            *comm = k;
            return behind;
        }
    }
    return -1;
}

/* Follows the waits from this rank to one that waits for nobody. A rank that data-parallel ranks wait for may
 * itself wait for one of tensor parallelism, for example. Sets *comm as awaited_by does for the last wait.
 * Returns -1 if this rank waits for nobody. Calls are read while they are made, so waits may seem to form a
 * circle. */
static int last_awaited(const struct zr_rendezvous *r, int rank, int *comm)
{
    int last = -1;
    for (int n = 0, next; n < r->w.world && (next = awaited_by(r, rank, comm)) >= 0; n++)
        last = rank = next;
    return last;
}

/* Writes how far the programs are. None of them is behind another. */
static void report_equal(const struct zr_rendezvous *r, char *text, size_t n_text)
{
    char here[192];
    for (int comm = ZR_SHARED_CALLS; comm-- > 0;)
        for (int i = 0; i < r->w.world; i++) {
            if (r->members[i].ahead[comm] < 0)
                continue;
            report_place(r, i, comm, here, sizeof here);
            if (n_calls(r, i, comm))
                snprintf(text, n_text, "; the programs have made the same %s", here);
            else
                snprintf(text, n_text, "; no program has made a call");
            return;
        }
    zr_call_log_report_none(false, text, n_text);
}

/* Writes which rank is behind, if all calls that were made are the same. The wait that timed out leads to it,
 * or any other wait. */
static void report_behind(const struct zr_rendezvous *r, char *text, size_t n_text)
{
    char there[192], here[192];
    int comm = 0, behind = last_awaited(r, r->comparison.rank, &comm);
    for (int i = 0; i < r->w.world && behind < 0; i++)
        behind = last_awaited(r, i, &comm);
    if (behind < 0) {
        report_equal(r, text, n_text);
        return;
    }
    int ahead = r->members[behind].ahead[comm];
    report_place(r, ahead, comm, here, sizeof here);
    report_place(r, behind, comm, there, sizeof there);
    snprintf(text, n_text, "; rank %d did not come: its program has made %s; that of rank %d %s", behind,
             there, ahead, here);
}

/* Writes "; no answer came from rank 2, rank 5". */
static void report_silent(const struct zr_rendezvous *r, char *text, size_t n_text)
{
    size_t at = 0;
    text[0] = 0;
    for (int i = 1; i < r->w.world && at + 32 < n_text; i++)
        if (!r->members[i].has_answered)
            at += (size_t)snprintf(text + at, n_text - at, "%srank %d", at ? ", " : "; no answer came from ",
                                   i);
}

static void forget_calls(struct zr_rendezvous *r)
{
    for (int i = 0; i < r->w.world; i++) {
        struct zr_member *m = &r->members[i];
        for (int comm = 0; comm < ZR_SHARED_CALLS && i != r->w.rank; comm++)
            free((void *)(uintptr_t)m->calls[comm].log);
        memset(m->calls, 0, sizeof m->calls);
        m->has_answered = false;
    }
}

static void decide(struct zr_rendezvous *r)
{
    char calls[ZR_CALL_LOG_BOTH_CHARS], place[640] = "", silent[160], stopped[ZR_STOPPED_CHARS];
    const struct zr_comparison *c = &r->comparison;
    uv_timer_stop(&r->answers);
    zr_hub_send_report(r, false);
    bool compared, first = !r->code; /* otherwise another failure is known by now, to all */
    own_calls(r, r->members[r->w.rank].calls);
    find_furthest(r);
    report_silent(r, silent, sizeof silent);
    zr_rendezvous_describe_stopped(r, zr_rendezvous_stopped(r), stopped);
    if (first && find_difference(r, &compared, calls)) {
        zr_hub_fail(r, ZERO_ERR_MISMATCH, "%s (rank %d: %.400s)", calls, c->rank, c->text);
    } else if (first) {
        if (c->code == ZERO_ERR_TIMEOUT)
            report_behind(r, place, sizeof place);
        else if (c->code == ZERO_ERR_MISMATCH)
            zr_call_log_report_none(compared, place, sizeof place);
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
        if (!r->members[i].has_answered && may_answer(r, i))
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
        if (!r->members[i].has_answered)
            zr_hub_send(r, i, ZR_FRAME_ASK_CALLS, 0, NULL, 0);
    uv_update_time(r->loop);
    uv_timer_start(&r->answers, on_answers_late, answer_ms(r), 0);
}

/* ---- frames with calls ---- */

/* Sends this rank's calls to rank 0. code 0: they are only an answer. */
static void send_calls(struct zr_rendezvous *r, int code, const char *text)
{
    struct zr_shared_calls calls[ZR_SHARED_CALLS];
    size_t n_text = strlen(text);
    struct calls_frame *f = malloc(sizeof *f + n_text);
    if (!f)
        return; /* the rank that asked waits until its time is over */
    own_calls(r, calls);
    for (int comm = 0; comm < ZR_SHARED_CALLS; comm++) {
        bool is_last = comm == ZR_SHARED_CALLS - 1;
        if (!calls[comm].log && !is_last)
            continue;
        memset(f, 0, sizeof *f);
        f->group = calls[comm].group;
        f->size = calls[comm].size;
        f->comm = (uint16_t)comm;
        f->is_last = is_last;
        if (calls[comm].log)
            zr_call_log_copy(calls[comm].log, &f->copy);
        memcpy(f + 1, text, n_text);
        zr_hub_send(r, 0, ZR_FRAME_CALLS, is_last ? code : 0, f, sizeof *f + (is_last ? n_text : 0));
    }
    free(f);
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

/* Keeps the calls of a frame. A rank may ask and answer, so they may come twice. */
static void keep_calls(struct zr_shared_calls *to, const struct calls_frame *f)
{
    struct zr_call_log *log = (void *)(uintptr_t)to->log;
    log = log || !f->size ? log : malloc(sizeof *log);
    if (log && f->size)
        zr_call_log_restore(log, &f->copy);
    if (log)
        *to = (struct zr_shared_calls){f->group, f->size, log};
}

bool zr_hub_on_calls(struct zr_rendezvous *r, int rank, int code, const char *payload, size_t n)
{
    const struct calls_frame *f = (const struct calls_frame *)payload;
    char text[ZR_FRAME_TEXT_BYTES];
    if (n < sizeof *f || n - sizeof *f >= sizeof text || f->comm >= ZR_SHARED_CALLS)
        return false;
    if (r->code)
        return true;
    keep_calls(&r->members[rank].calls[f->comm], f);
    r->members[rank].has_answered |= f->is_last != 0;
    snprintf(text, sizeof text, "%.*s", (int)(n - sizeof *f), payload + sizeof *f);
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
