/* SPDX-License-Identifier: Apache-2.0 */
/* hub_meet.c: how the ranks of a rendezvous come together: rank 0 listens (hub_listen.c), asks everybody who
 * comes for a proof that he is of this job, and lets ranks in; the others reach it (hub_reach.c).
 *
 * An unidentified connection must not stop a job, nor learn of it more than that it is there. Who does not
 * prove that he has the job's key is sent away without a word of why; who says nothing for seconds is
 * dropped; and there are never more than MOST_UNIDENTIFIED of them, the others wait in the kernel's queue. A
 * rank of this very job that is wrong, by its number or its world, fails all of them. */
#include "comm/meet/hub.h"
#include "kernels/limits.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum {
    MOST_UNIDENTIFIED = 128, /* connections that have not proved to be a rank's */
    FAIR_MS = 100,           /* that each of them has to answer before another may take its place */
    UNIDENTIFIED_MS = 5000,  /* that it has where no other wants its place */
    SWEEP_MS = 500,
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

/* --- rank 0: unidentified connections and ranks --- */

/* An unidentified connection is told nothing, not even why. */
static void send_away(struct zr_rendezvous *r, struct zr_link *l, const char *why)
{
    struct zr_frame f = {.type = ZR_FRAME_REFUSE, .about = ZR_ERR_MISMATCH};
    zr_hub_note(r, ZR_TROUBLE_STRANGE, "refused %s: %s", l->peer, why);
    (void)zr_link_send(l, f, NULL, 0);
    zr_link_finish(l);
}

void zr_hub_refuse(struct zr_rendezvous *r, struct zr_link *l, enum zr_frame_type type, int code,
                   const char *text)
{
    struct zr_frame f = {.type = (uint16_t)type, .rank = r->w.rank, .world = r->w.world, .about = code};
    char proof_and_text[ZR_PROOF_BYTES + ZR_FRAME_TEXT_BYTES];
    char *said = proof_and_text + ZR_PROOF_BYTES;
    snprintf(said, ZR_FRAME_TEXT_BYTES, "%s", text);
    zr_shake_prove(&r->w, &l->shake, type, code, said, (uint8_t *)proof_and_text);
    if (type == ZR_FRAME_REFUSE)
        zr_hub_note(r, ZR_TROUBLE_STRANGE, "refused %s: %s", l->peer, text);
    (void)zr_link_send(l, f, proof_and_text, ZR_PROOF_BYTES + strlen(said));
    zr_link_finish(l);
}

static void refuse(struct zr_rendezvous *r, struct zr_link *l, int code, const char *text)
{
    zr_hub_refuse(r, l, ZR_FRAME_REFUSE, code, text);
}

/* All have met: whoever comes now cannot join, and the others go on. */
static void refuse_late(struct zr_rendezvous *r, struct zr_link *l)
{
    const int rank = l->shake.rank;
    const bool is_known = rank >= 0 && rank < r->w.world;
    const struct zr_link *first = is_known && rank ? r->members[rank].link : NULL;
    char text[256];
    if (is_known && (rank == 0 || first))
        snprintf(text, sizeof text,
                 "the job runs already, and rank %d is in it%s%s: rank %d was started twice", rank,
                 first ? ", at " : "", first ? first->peer : "", rank);
    else
        snprintf(text, sizeof text, "the job runs already: rank %d came too late, or has left it", rank);
    refuse(r, l, ZR_ERR_MISMATCH, text);
}

/* A rank of this job that cannot be right: no rank can go on, and each is told why. */
static void refuse_all(struct zr_rendezvous *r, struct zr_link *l, const char *text)
{
    refuse(r, l, ZR_ERR_MISMATCH, text);
    zr_hub_fail(r, ZR_ERR_MISMATCH, "%s", text);
}

static void let_in(struct zr_rendezvous *r, struct zr_link *l)
{
    uint8_t proof[ZR_PROOF_BYTES];
    int rank = l->shake.rank;
    zr_shake_prove(&r->w, &l->shake, ZR_FRAME_ACCEPT, 0, "", proof);
    l->rank = rank;
    zr_link_allow(l, ZR_FRAME_SMALL_BYTES);
    zr_hub_keep(r, l);
    r->n_unidentified--;
    r->members[rank].link = l;
    r->members[rank].state = ZR_MEMBER_HERE;
    r->n_here++;
    zr_hub_has_come(r, rank);
    (void)zr_hub_send(r, rank, ZR_FRAME_ACCEPT, proof, sizeof proof);
}

/* Whether the two may be of one part of a job: a part is a run of ranks, or every so many-th rank. Equal
 * ranks are inherited from one shell. */
static bool may_be_one_part(const struct zr_rendezvous *r, const struct zr_shake *s)
{
    const struct zr_start *a = &r->w.start, *b = &s->start;
    if (!a->world || a->world != b->world || a->rank == b->rank || s->world != r->w.world)
        return true;
    int first = a->rank - r->w.rank;
    bool is_run = first == b->rank - s->rank && (first % s->world == 0 || a->world % s->world);
    return is_run || (int64_t)(a->rank - b->rank) * s->world == (int64_t)(r->w.rank - s->rank) * a->world;
}

/* The rank has what it takes to meet this one, but a launcher started it for another job, or another part. */
static bool is_started_otherwise(const struct zr_rendezvous *r, const struct zr_link *l, char *text, size_t n)
{
    const struct zr_shake *s = &l->shake;
    const struct zr_start *a = &r->w.start, *b = &s->start;
    if (a->job[0] && b->job[0] && strcmp(a->job, b->job))
        snprintf(text, n,
                 "rank %d at %s was started by %s, rank %d by %s: if these are two jobs, give each its own "
                 "ZERO_JOB",
                 s->rank, l->peer, b->job, r->w.rank, a->job);
    else if (!may_be_one_part(r, s))
        snprintf(text, n,
                 "rank %d at %s was started as rank %d of %d, rank %d as rank %d of %d: they belong to two "
                 "parts of a job: give each part its own meeting point, by cfg.launch.rendezvous",
                 s->rank, l->peer, b->rank, b->world, r->w.rank, a->rank, a->world);
    else
        return false;
    return true;
}

void zr_hub_hello(struct zr_rendezvous *r, struct zr_link *l, const struct zr_frame *f, const char *payload)
{
    char text[sizeof r->text + 64];
    if (f->type != ZR_FRAME_HELLO) {
        zr_link_drop(l);
        return;
    }
    if (f->version != ZR_FRAME_VERSION) {
        snprintf(text, sizeof text, "it speaks version %u of the protocol, rank 0 version %d", f->version,
                 ZR_FRAME_VERSION);
        send_away(r, l, text);
        return;
    }
    if (!zr_shake_hello(&r->w, &l->shake, f, payload)) {
        send_away(r, l,
                  r->w.key.n_bytes ? "it belongs to another job, or has another ZERO_JOB_KEY or none"
                                   : "it belongs to another job, or has a ZERO_JOB_KEY, but rank 0 has none");
        return;
    }
    const struct zr_shake *s = &l->shake;
    if (is_started_otherwise(r, l, text, sizeof text)) {
        refuse(r, l, ZR_ERR_MISMATCH, text);
    } else if (r->ready) {
        refuse_late(r, l);
    } else if (s->attempt != r->w.attempt) {
        snprintf(text, sizeof text, "rank %d at %s is of attempt %d of this job, rank 0 of attempt %d",
                 s->rank, l->peer, s->attempt, r->w.attempt);
        refuse(r, l, ZR_ERR_MISMATCH, text);
    } else if (strcmp(s->name, r->w.name)) {
        zr_hub_other_name(r, l, f, payload);
    } else if (s->world != r->w.world) {
        snprintf(text, sizeof text, "rank %d at %s has world %d, rank 0 has world %d%s%s%s", s->rank, l->peer,
                 s->world, r->w.world, r->w.size_from[0] ? " (" : "", r->w.size_from,
                 r->w.size_from[0] ? ")" : "");
        refuse_all(r, l, text);
    } else if (s->rank == 0) {
        refuse(r, l, ZR_ERR_MISMATCH, "rank 0 is there twice");
        zr_hub_fail(r, ZR_ERR_MISMATCH, "rank 0 is there twice: here and at %s: %s", l->peer,
                    ZR_HUB_TWO_JOBS);
    } else if (s->rank <= 0 || s->rank >= r->w.world) {
        snprintf(text, sizeof text, "rank %d at %s: ranks 1 to %d may join rank 0", s->rank, l->peer,
                 r->w.world - 1);
        refuse_all(r, l, text);
    } else if (r->code) {
        snprintf(text, sizeof text, "rank %d came after the others had given up: %s", s->rank, r->text);
        if (r->members[s->rank].state == ZR_MEMBER_EMPTY)
            r->members[s->rank].state = ZR_MEMBER_LEFT;
        refuse(r, l, r->code, text);
    } else if (r->members[s->rank].state != ZR_MEMBER_EMPTY) {
        const struct zr_link *first = r->members[s->rank].link;
        snprintf(
            text, sizeof text,
            "rank %d is there twice: at %s and at %s: it was started twice, or two jobs meet at one place",
            s->rank, first ? first->peer : "?", l->peer);
        refuse_all(r, l, text);
    } else {
        let_in(r, l);
    }
}

static struct zr_link *oldest_unidentified(struct zr_rendezvous *r)
{
    struct zr_link *oldest = NULL;
    for (struct zr_link *s = r->links; s; s = s->next)
        if (s->rank < 0 && !s->is_outgoing && !uv_is_closing((uv_handle_t *)&s->tcp))
            oldest = s; /* new ones are put in front */
    return oldest;
}

void zr_hub_drop_slow(struct zr_rendezvous *r)
{
    int64_t now = zr_hub_now_ms(r);
    for (struct zr_link *s = r->links; s; s = s->next)
        if (s->rank < 0 && !s->is_outgoing && now - s->since_ms >= UNIDENTIFIED_MS)
            zr_link_drop(s);
}

static void admit_later(uv_timer_t *t)
{
    zr_hub_admit(t->data);
}

static struct zr_listener *find_awaited(struct zr_rendezvous *r)
{
    for (int i = 0; i < 2; i++) {
        struct zr_listener *s = &r->listener[i];
        if (s->is_open && s->is_awaited && !uv_is_closing((uv_handle_t *)&s->tcp))
            return s;
    }
    return NULL;
}

/* libuv offers nobody else at this listener until this one is taken. */
static void take_awaited(struct zr_rendezvous *r, struct zr_listener *s)
{
    struct zr_link *l = zr_hub_add_link(r);
    if (!l) {
        zr_hub_fail(r, ZR_ERR_NOMEM, "rank 0: rendezvous: no memory for a connection");
        zr_hub_stop_listening(r);
        return;
    }
    struct zr_frame f = {.type = ZR_FRAME_CHALLENGE};
    l->since_ms = zr_hub_now_ms(r);
    r->n_unidentified++;
    s->is_awaited = false;
    if (zr_link_accept(l, (uv_stream_t *)&s->tcp) < 0 ||
        zr_shake_random(l->shake.nonce_0, sizeof l->shake.nonce_0) ||
        zr_link_send(l, f, l->shake.nonce_0, sizeof l->shake.nonce_0))
        zr_link_drop(l);
}

void zr_hub_take_handed(struct zr_rendezvous *r, const struct zr_handed *h)
{
    struct zr_link *l = zr_hub_add_link(r);
    if (!l) {
        close(h->fd); /* the rank comes again */
        return;
    }
    l->since_ms = zr_hub_now_ms(r);
    r->n_unidentified++;
    memcpy(l->shake.nonce_0, h->nonce_0, sizeof l->shake.nonce_0);
    if (zr_link_adopt(l, h->fd) < 0)
        zr_link_drop(l);
    else
        zr_hub_hello(r, l, &h->frame, (const char *)&h->hello);
}

/* Now, or when the oldest of too many unidentified connections has had its time. */
void zr_hub_admit(struct zr_rendezvous *r)
{
    struct zr_listener *s = find_awaited(r);
    if (r->closing || !s)
        return;
    struct zr_link *oldest = r->n_unidentified >= MOST_UNIDENTIFIED ? oldest_unidentified(r) : NULL;
    int64_t left = oldest ? oldest->since_ms + FAIR_MS - zr_hub_now_ms(r) : 0;
    if (r->n_unidentified >= MOST_UNIDENTIFIED && left <= 0 && oldest) {
        zr_link_drop(oldest);
        left = 1; /* it is gone after this round of the loop */
    }
    if (r->n_unidentified < MOST_UNIDENTIFIED) {
        take_awaited(r, s);
        left = 1;
    }
    if (find_awaited(r))
        uv_timer_start(&r->admit, admit_later, left > 0 ? (uint64_t)left : 1, 0);
}

void zr_hub_seal(struct zr_rendezvous *r)
{
    r->ready = true;
    uv_timer_stop(&r->retry); /* a rank 0 to which all were handed over may not have listened yet */
    if (r->w.tells_late)
        return;
    uv_timer_stop(&r->patience);
    zr_hub_stop_listening(r);
    for (struct zr_link *l = r->links; l; l = l->next)
        if (l->rank < 0 && !l->finishing) /* the refused may still read why */
            zr_link_drop(l);
}

/* --- the beginning --- */

/* libuv takes connections and closes them again while the process has no descriptor for them, and tells
 * nobody. So this rank looks, unless connections that it drops soon may give it one. */
static void check_descriptors(struct zr_rendezvous *r)
{
    int error = zr_no_descriptors(1);
    if (error)
        zr_hub_no_descriptor(r, error, "for the connections of other ranks");
}

static void on_patience(uv_timer_t *t)
{
    struct zr_rendezvous *r = t->data;
    zr_hub_drop_slow(r);
    zr_hub_give_up_slow(r);
    if (r->n_listening && !r->n_unidentified && !r->ready && !r->code && !zr_hub_all_came(r))
        check_descriptors(r);
}

void zr_hub_start(struct zr_rendezvous *r)
{
    r->started_ms = zr_hub_now_ms(r);
    uv_timer_start(&r->patience, on_patience, SWEEP_MS, SWEEP_MS);
    if (r->w.rank == 0)
        r->members[0].state = ZR_MEMBER_HERE;
    r->n_here = 1;
    zr_hub_find(r);
}
