/* SPDX-License-Identifier: Apache-2.0 */
/* reach.c: how a rank reaches rank 0. It finds the address, connects, and trusts nothing until the other side
 * has proved to be rank 0 of this job (handshake.h).
 *
 * Another program that listens there may be gone in a moment, so that is no failure. The rank tries again
 * until its time is over. It gives up earlier only if the other side speaks the protocol and refuses it for
 * seconds: that is another job, or one with another key. */
#include "comm/meet/hub.h"
#include "kernels/limits.h"

#include <stdio.h>
#include <string.h>

enum {
    RETRY_MS = 20,
    REFUSED_RETRY_MS = 200,
    REFUSED_MS = 3000, /* longer than another program's port may be held for a moment */
    SILENT_MS = 5000,  /* time for rank 0 to send its challenge */
    /* Time for rank 0 to answer: a rank that it has accepted must not be given up easily. */
    ANSWER_MS = 10000,
    CONNECT_MS = 5000, /* time for the connection to be accepted */
    NEXT_MS = 1000,    /* the same, if there is another address to try */
};

static void connect_again(uv_timer_t *t)
{
    struct zr_rendezvous *r = t->data;
    if (++r->to_now < r->n_to)
        zr_hub_connect(r);
    else if (r->w.rank == 0) /* this rank 0 follows a file that it has found (find.c) */
        zr_hub_no_first(r);
    else
        zr_hub_find(r);
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

/* Handles an address at which no connection was made. */
static void give_address_up(struct zr_rendezvous *r, struct zr_link *l, int status)
{
    const union zr_address *to = &r->to[r->to_now];
    if (zr_is_descriptor_limit(-status)) {
        zr_hub_no_descriptor(r, -status, "to connect to another rank with");
        zr_link_drop(l);
        return;
    }
    bool no_way = status == UV_ENETUNREACH || status == UV_EADDRNOTAVAIL || status == UV_EAFNOSUPPORT;
    int version = to->any.sa_family == AF_INET6 ? 6 : 4;
    char which[ZR_ADDRESS_CHARS] = "", gone[192] = "";
    const char *colon = r->n_to > 1 ? ": " : "", *asked = r->w.interface;
    if (r->n_to > 1)
        zr_address_print_host(to, which);
    if (status == UV_ECONNREFUSED)
        snprintf(gone, sizeof gone, ": rank 0 has not started, or has given up and left%s",
                 zr_address_is_loopback(to)
                     ? ", or is on another host: a loopback address leads to this host only"
                     : ", or listens on another interface (ZERO_INTERFACE) only");
    if (r->to_now == r->refused_at)
        r->refused_ms = 0;
    if (no_way && !zr_address_is_loopback(to) && !zr_hub_has_family(r, to->any.sa_family))
        zr_hub_note(r, ZR_TROUBLE_NOBODY,
                    "%s%s%s: %s%s has no IPv%d address to connect from: give rank 0's IPv%d address, or give "
                    "this host an IPv%d address",
                    which, colon, uv_strerror(status), *asked ? "interface " : "this host", asked, version,
                    10 - version, version);
    else if (status == UV_EINVAL && *asked)
        zr_hub_note(r, ZR_TROUBLE_NOBODY, "%s%s%s: interface %s does not lead there", which, colon,
                    uv_strerror(status), asked);
    else
        zr_hub_note(r, ZR_TROUBLE_NOBODY, "%s%s%s%s", which, colon, uv_strerror(status), gone);
    zr_link_drop(l);
    zr_hub_retry(r);
}

void zr_hub_connect(struct zr_rendezvous *r)
{
    struct zr_link *l = zr_hub_add_link(r);
    if (!l) {
        zr_hub_fail(r, ZERO_ERR_NOMEM, "rendezvous: no memory for a connection");
        return;
    }
    l->is_outgoing = true;
    l->since_ms = zr_hub_now_ms(r);
    if (!r->worst)
        zr_hub_note(r, ZR_TROUBLE_NONE, "nothing there has accepted the connection yet");
    union zr_address from;
    int err = zr_hub_source(r, &from);
    if (err >= 0)
        err = zr_link_connect(l, err ? NULL : &from, &r->to[r->to_now]);
    if (err)
        give_address_up(r, l, err);
}

void zr_hub_on_connect(struct zr_link *l, int status)
{
    struct zr_rendezvous *r = l->owner;
    if (status < 0) {
        give_address_up(r, l, status);
        return;
    }
    l->since_ms = zr_hub_now_ms(r);
    if (r->w.rank == 0) /* it has no link to itself */
        return;
    zr_hub_note(r, ZR_TROUBLE_SILENT, "the other side accepted the connection but does not answer");
    l->rank = 0;
    r->members[0].link = l;
}

/* Gives up an address that neither accepts nor refuses the connection: packets are lost, or the host is down.
 * A new attempt sends its packets at once; the old one would wait for the system's next retry. */
static void give_up_connecting(struct zr_rendezvous *r)
{
    struct zr_link *l = r->links;
    while (l && (!l->is_outgoing || uv_is_closing((uv_handle_t *)&l->tcp)))
        l = l->next;
    bool is_next = r->n_to > 1 && l && !l->peer[0];
    if (l && zr_hub_now_ms(r) - l->since_ms >= (is_next ? NEXT_MS : CONNECT_MS))
        give_address_up(r, l, UV_ETIMEDOUT);
}

void zr_hub_give_up_slow(struct zr_rendezvous *r)
{
    struct zr_link *l = r->members[0].link;
    if (r->accepted)
        return;
    if (!l)
        give_up_connecting(r);
    bool asked = l && l->shake.world;
    if (!l || r->accepted || l->finishing || zr_hub_now_ms(r) - l->since_ms < (asked ? ANSWER_MS : SILENT_MS))
        return;
    leave_place(r, l);
    zr_hub_retry(r);
}

/* --- the other side's proof --- */

/* Handles another side that is not rank 0 of this job, at the moment. */
static void is_another(struct zr_rendezvous *r, struct zr_link *l, enum zr_trouble trouble, const char *text)
{
    zr_hub_note(r, trouble, "%s", text);
    leave_place(r, l);
    if (trouble != ZR_TROUBLE_REFUSED) {
        if (r->to_now == r->refused_at)
            r->refused_ms = 0;
        zr_hub_retry(r);
        return;
    }
    int64_t now = zr_hub_now_ms(r),
            patience = r->timeout_ms / 2 < REFUSED_MS ? r->timeout_ms / 2 : REFUSED_MS;
    if (!r->refused_ms) {
        r->refused_ms = now;
        r->refused_at = r->to_now;
    }
    /* Rank 0 may be in another file, or at the next address. */
    bool may_be_elsewhere = r->w.file[0] || r->w.n_at > 1;
    if (now - r->refused_ms > patience && !may_be_elsewhere) {
        char place[ZR_PLACE_CHARS];
        zr_hub_say_place(r, place);
        zr_hub_fail(r, ZERO_ERR_MISMATCH, "rank %d looked for rank 0 at %s: %s", r->w.rank, place, text);
    }
    retry_in(r, REFUSED_RETRY_MS);
}

static void on_challenge(struct zr_rendezvous *r, struct zr_link *l, const char *nonce)
{
    struct zr_hello hello;
    struct zr_frame f = {
        .type = ZR_FRAME_HELLO, .rank = r->w.rank, .world = r->w.world, .about = r->w.attempt};
    l->shake = (struct zr_shake){
        .rank = r->w.rank, .world = r->w.world, .attempt = r->w.attempt, .start = r->w.start};
    memcpy(l->shake.name, r->w.name, sizeof l->shake.name);
    memcpy(hello.name, r->w.name, sizeof hello.name);
    hello.start = r->w.start;
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

/* Handles rank 0 of this job, if it does not wait with this rank's name yet. */
static void come_again(struct zr_rendezvous *r, struct zr_link *l, const char *text)
{
    zr_hub_note(r, ZR_TROUBLE_NAME, "%s", text);
    leave_place(r, l);
    r->refused_ms = 0;
    if (r->w.rank == 0) {
        zr_hub_write_file_later(r);
        return;
    }
    retry_in(r, zr_hub_again_ms(r));
}

/* Handles rank 0 of this job, which has accepted this rank. */
static void accept_rank_0(struct zr_rendezvous *r, struct zr_link *l)
{
    r->accepted = true;
    r->members[0].state = ZR_MEMBER_HERE;
    zr_link_allow(l, ZR_FRAME_SMALL_BYTES);
    zr_hub_keep(r, l);
    uv_timer_stop(&r->patience);
    zr_hub_note(r, ZR_TROUBLE_WAIT, "it waits for other ranks");
    if (r->code) /* a failure that could not be sent before */
        (void)zr_hub_send(r, 0, ZR_FRAME_FAIL, r->code, r->text, strlen(r->text));
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
        if (f->rank != 0) { /* the address may stand for something else on this host */
            snprintf(why, sizeof why, "it is rank %d of this job", f->rank);
            is_another(r, l, ZR_TROUBLE_STRANGE, why);
            return;
        }
        if (f->type == ZR_FRAME_AGAIN) {
            come_again(r, l, text);
            return;
        }
        if (f->type == ZR_FRAME_REFUSE) {
            zr_link_finish(l);
            if (r->w.rank == 0)
                zr_hub_fail(r, ZERO_ERR_MISMATCH,
                            "another rank 0 of this job is already there, on \"%s\" (%s): %s", r->file.host,
                            text, ZR_HUB_TWO_JOBS);
            zr_hub_fail(r, f->about < 0 ? f->about : ZERO_ERR_MISMATCH, "rank 0 refused: %s", text);
            return;
        }
        accept_rank_0(r, l);
    } else if (asked && (f->type == ZR_FRAME_REFUSE || f->type == ZR_FRAME_ACCEPT)) {
        snprintf(why, sizeof why,
                 "%s of another job, or one with another key: %s must be the same on all ranks",
                 f->type == ZR_FRAME_REFUSE ? "it refused this rank as a rank" : "it is a rank",
                 r->w.key.n_bytes ? "ZERO_JOB_KEY and the job's name (ZERO_JOB, or the launcher's)"
                                  : "ZERO_JOB_KEY, which this rank does not have, and the job's name "
                                    "(ZERO_JOB, or the launcher's)");
        is_another(r, l, ZR_TROUBLE_REFUSED, why);
    } else {
        is_another(r, l, ZR_TROUBLE_STRANGE, "it sent a frame that makes no sense here");
    }
}
