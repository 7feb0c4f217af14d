/* hub_reach.c: how a rank reaches rank 0: finds its address, connects, and makes sure that it is rank 0 of
 * this job before it believes a word (handshake.h).
 *
 * Whatever else listens there may be gone in a moment, so that is no failure: the rank tries again until its
 * time is over. Only where somebody who speaks the protocol refuses it for seconds does it give up earlier,
 * for that will be another job, or the key is not the same. */
#include "comm/meet/hub.h"

#include <arpa/inet.h>
#include <stdio.h>
#include <string.h>

enum {
    RETRY_MS = 20,
    REFUSED_RETRY_MS = 200,
    REFUSED_MS = 3000, /* longer than another program's port may be held for a moment */
    SILENT_MS = 5000,  /* for rank 0 to ask who we are */
    ANSWER_MS = 10000, /* and to answer: a rank that rank 0 has let in must not be given up easily */
};

static void connect_again(uv_timer_t *t)
{
    zr_hub_find(t->data);
}

static void retry_in(struct zr_rendezvous *r, int ms)
{
    if (!r->code && !r->closing)
        uv_timer_start(&r->retry, connect_again, (uint64_t)ms, 0);
}

void zr_hub_retry(struct zr_rendezvous *r)
{
    retry_in(r, RETRY_MS);
}

static void leave_place(struct zr_rendezvous *r, struct zr_link *l)
{
    if (r->members[0].link == l)
        r->members[0].link = NULL;
    l->rank = -1;
    zr_link_drop(l);
}

void zr_hub_connect(struct zr_rendezvous *r)
{
    struct zr_link *l = zr_hub_add_link(r);
    if (!l) {
        zr_hub_fail(r, ZR_ERR_NOMEM, "rendezvous: no memory for a connection");
        return;
    }
    int err = zr_link_connect(l, &r->address);
    if (err) {
        zr_hub_note(r, ZR_TROUBLE_NOBODY, "%s", uv_strerror(err));
        zr_link_drop(l);
        zr_hub_retry(r);
    }
}

void zr_hub_on_connect(struct zr_link *l, int status)
{
    struct zr_rendezvous *r = l->owner;
    if (status < 0) {
        r->refused_ms = 0;
        zr_hub_note(r, ZR_TROUBLE_NOBODY, "%s%s", uv_strerror(status),
                    status == UV_ECONNREFUSED ? ": rank 0 has not started, or has given up and left" : "");
        zr_link_drop(l);
        zr_hub_retry(r);
        return;
    }
    zr_hub_note(r, ZR_TROUBLE_SILENT, "it took the connection but does not answer");
    l->rank = 0;
    l->since_ms = zr_hub_now_ms(r);
    r->members[0].link = l;
}

void zr_hub_give_up_slow(struct zr_rendezvous *r)
{
    struct zr_link *l = r->members[0].link;
    bool asked = l && l->shake.world;
    if (!l || r->accepted || l->finishing || zr_hub_now_ms(r) - l->since_ms < (asked ? ANSWER_MS : SILENT_MS))
        return;
    leave_place(r, l);
    zr_hub_retry(r);
}

/* --- who is it? --- */

/* Not rank 0 of this job, at the moment. */
static void is_another(struct zr_rendezvous *r, struct zr_link *l, enum zr_trouble trouble, const char *text)
{
    zr_hub_note(r, trouble, "%s", text);
    leave_place(r, l);
    if (trouble != ZR_TROUBLE_REFUSED) {
        r->refused_ms = 0;
        zr_hub_retry(r);
        return;
    }
    int64_t now = zr_hub_now_ms(r),
            patience = r->timeout_ms / 2 < REFUSED_MS ? r->timeout_ms / 2 : REFUSED_MS;
    if (!r->refused_ms)
        r->refused_ms = now;
    if (now - r->refused_ms > patience)
        zr_hub_fail(r, ZR_ERR_MISMATCH, "rank %d looked for rank 0 at %s:%d: %s", r->w.rank, r->w.host,
                    r->w.port, text);
    retry_in(r, REFUSED_RETRY_MS);
}

static void on_challenge(struct zr_rendezvous *r, struct zr_link *l, const char *nonce)
{
    struct zr_hello hello;
    struct zr_frame f = {
        .type = ZR_FRAME_HELLO, .rank = r->w.rank, .world = r->w.world, .about = r->w.attempt};
    l->shake = (struct zr_shake){.rank = r->w.rank, .world = r->w.world, .attempt = r->w.attempt};
    int err = zr_shake_random(l->shake.nonce, sizeof l->shake.nonce);
    if (!err) {
        memcpy(l->shake.nonce_0, nonce, sizeof l->shake.nonce_0);
        memcpy(hello.nonce, l->shake.nonce, sizeof hello.nonce);
        zr_shake_prove(&r->w, &l->shake, ZR_FRAME_HELLO, 0, "", hello.proof);
        err = zr_link_send(l, f, &hello, sizeof hello);
    }
    if (err)
        zr_hub_fail(r, err, "rank %d: %s", r->w.rank, zr_error_text());
}

void zr_hub_answer(struct zr_rendezvous *r, struct zr_link *l, const struct zr_frame *f, const char *payload)
{
    const char *text;
    char why[256];
    bool asked = l->shake.world;
    if (f->version != ZR_FRAME_VERSION) {
        snprintf(
            why, sizeof why,
            "it speaks version %u of the protocol, this rank version %d: all ranks need the same libzero",
            f->version, ZR_FRAME_VERSION);
        is_another(r, l, ZR_TROUBLE_REFUSED, why);
    } else if (f->type == ZR_FRAME_CHALLENGE && !asked && f->n_bytes == ZR_NONCE_BYTES) {
        on_challenge(r, l, payload);
    } else if (asked && zr_shake_answer(&r->w, &l->shake, f, payload, &text)) {
        if (f->type == ZR_FRAME_REFUSE) {
            zr_link_finish(l);
            zr_hub_fail(r, f->about < 0 ? f->about : ZR_ERR_MISMATCH, "rank 0 refused: %s", text);
            return;
        }
        r->accepted = true;
        r->members[0].state = ZR_MEMBER_HERE;
        zr_link_allow(l, ZR_FRAME_SMALL_BYTES);
        zr_hub_keep(r, l);
        uv_timer_stop(&r->patience);
        zr_hub_note(r, ZR_TROUBLE_WAIT, "it waits for other ranks");
    } else if (asked && (f->type == ZR_FRAME_REFUSE || f->type == ZR_FRAME_ACCEPT)) {
        snprintf(why, sizeof why, "%s of another job, or with another key: %s must be the same on all ranks",
                 f->type == ZR_FRAME_REFUSE ? "it refused this rank as one" : "it is one",
                 r->w.key.n_bytes ? "ZERO_JOB_KEY and the job's name (ZERO_JOB, or the launcher's)"
                                  : "ZERO_JOB_KEY, which this rank does not have, and the job's name "
                                    "(ZERO_JOB, or the launcher's)");
        is_another(r, l, ZR_TROUBLE_REFUSED, why);
    } else {
        is_another(r, l, ZR_TROUBLE_STRANGE, "it sent a frame that makes no sense here");
    }
}
