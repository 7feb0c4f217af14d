/* SPDX-License-Identifier: Apache-2.0 */
/* hub_tree.c: a world of more ranks than one may be linked with. Rank 0 is linked with some, each of these
 * with ranks below it, and so on (tree.h); what ranks say to each other goes along these links.
 *
 * Ranks know where rank 0 is and nothing else. So a rank with others below it listens at a port of its own,
 * and every rank that is not to be linked with rank 0 itself goes there first, proves what it is, says where
 * it listens, and is told where the rank above it does, if that has come already. Then it leaves, and
 * connects there, where both sides prove again what they are. Rank 0 keeps none of these connections: they
 * count among those that have not proved to be a rank's below it, which are few at a time and short.
 *
 * A rank whose link to the one above ends has lost that one, and tells so to those below, as the one above
 * that does to all others: so every rank names the rank that died, and nobody names the ranks below it, which
 * are there. In a star all of this comes down to nothing. */
#include "comm/meet/address_list.h"
#include "comm/meet/hub.h"
#include "kernels/limits.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum {
    BELOW_BACKLOG = 128,
    ASK_SOONEST_MS = 30, /* until rank 0 is asked again for one that has not come */
    ASK_LATEST_MS = 500
};

void zr_hub_take_position(struct zr_rendezvous *r)
{
    if (!r->w.fan_out)
        r->w.fan_out = ZR_TREE_FAN_OUT;
    r->tree = zr_tree_of(r->w.world, r->w.fan_out, r->w.rank);
    r->is_tree = r->w.world - 1 > r->w.fan_out;
    r->heard_from = -1;
    for (int above = r->tree.parent; above >= 0; r->depth++)
        above = zr_tree_of(r->w.world, r->w.fan_out, above).parent;
}

bool zr_hub_is_child(const struct zr_rendezvous *r, int rank)
{
    int k = zr_tree_child_to(&r->tree, rank);
    return k >= 0 && zr_tree_child(&r->tree, k) == rank;
}

int zr_hub_towards(const struct zr_rendezvous *r, int rank)
{
    int k = zr_tree_child_to(&r->tree, rank);
    return k >= 0 ? zr_tree_child(&r->tree, k) : r->tree.parent;
}

/* --- along the links --- */

static struct zr_link *link_to(const struct zr_rendezvous *r, int rank)
{
    bool here = rank >= 0 && rank != r->heard_from && r->members[rank].state == ZR_MEMBER_HERE;
    return here ? r->members[rank].link : NULL;
}

static struct zr_frame frame_of(const struct zr_rendezvous *r, enum zr_frame_type type, int32_t about)
{
    return (struct zr_frame){.type = (uint16_t)type, .rank = r->w.rank, .world = r->w.world, .about = about};
}

int zr_hub_send_below(struct zr_rendezvous *r, enum zr_frame_type type, int32_t about, const void *payload,
                      size_t n)
{
    int err = 0;
    if (r->tree.n_children == 0)
        return 0;
    struct zr_shared_bytes *shared = zr_shared_bytes_new(payload, n);
    if (!shared)
        return zr_fail(ZR_ERR_NOMEM, "rendezvous: no memory for a frame of %zu bytes", n);
    for (int k = 0; k < r->tree.n_children; k++) {
        struct zr_link *l = link_to(r, zr_tree_child(&r->tree, k));
        int its = l ? zr_link_send_shared(l, frame_of(r, type, about), shared) : 0;
        err = err ? err : its;
    }
    zr_shared_bytes_leave(shared);
    return err;
}

int zr_hub_send_above(struct zr_rendezvous *r, enum zr_frame_type type, int32_t about, const void *payload,
                      size_t n)
{
    struct zr_link *l = link_to(r, r->tree.parent);
    return l ? zr_link_send(l, frame_of(r, type, about), payload, n) : 0;
}

void zr_hub_all_here(struct zr_rendezvous *r)
{
    for (int i = 0; i < r->w.world; i++)
        if (r->members[i].state == ZR_MEMBER_EMPTY)
            r->members[i].state = ZR_MEMBER_HERE;
}

bool zr_hub_pass_on(struct zr_rendezvous *r, int towards, const struct zr_frame *f, const char *payload)
{
    struct zr_link *l = link_to(r, zr_hub_towards(r, towards));
    return !l || zr_link_send(l, *f, payload, f->n_bytes) == 0;
}

/* --- a rank that has others below it --- */

/* Without a key where rank 0 is reached too, which is loopback; else at all addresses. */
static int bind_below(const union zr_address *here, bool anywhere)
{
    union zr_address at = *here;
    int fd = -EAFNOSUPPORT;
    zr_address_set_port(&at, 0);
    if (!anywhere)
        return zr_address_bind(&at);
    for (int i = 0; i < 2 && (fd == -EAFNOSUPPORT || fd == -EADDRNOTAVAIL); i++) {
        zr_address_parse(i ? "0.0.0.0" : "::", 0, &at);
        fd = zr_address_bind(&at);
    }
    return fd;
}

/* here: this end of a link to rank 0. */
static int listen_below(struct zr_rendezvous *r, const union zr_address *here)
{
    bool on_loopback = zr_address_is_loopback(here) && !r->w.key.n_bytes;
    int fd = bind_below(here, !on_loopback && !r->w.interface[0]), err = fd < 0 ? fd : 0;
    if (!err && listen(fd, BELOW_BACKLOG)) {
        err = -errno;
        close(fd);
    }
    if (!err)
        err = zr_hub_hand_over(r, &r->listener[0], fd);
    if (err) {
        char text[256], why[ZR_SYSTEM_WORDS];
        snprintf(text, sizeof text, "cannot listen for the ranks that connect through this rank: %s",
                 zr_limit_words(-err, uv_strerror(err), why));
        zr_hub_fail_all(r, ZR_ERR_SYSTEM, text);
    }
    return err;
}

/* By which addresses ranks below reach it: that by which it reaches rank 0 comes first, for the same network
 * leads to the others. */
static int list_own(struct zr_rendezvous *r, const union zr_address *here,
                    union zr_address own[ZR_LOOKUP_MOST])
{
    union zr_address bound, all[ZR_LOOKUP_MOST];
    int size = sizeof bound, n = 0;
    if (uv_tcp_getsockname(&r->listener[0].tcp, &bound.any, &size))
        return 0;
    int n_all = zr_hub_reachable_at(&bound, all);
    if (zr_address_reaches_far(here)) {
        own[n] = *here;
        zr_address_set_port(&own[n++], zr_address_port(&bound));
    }
    for (int i = 0; i < n_all && n < ZR_LOOKUP_MOST; i++) {
        bool leads_here = zr_address_reaches_far(&all[i]) || zr_address_is_loopback(&all[i]);
        if (leads_here && (n == 0 || !zr_address_same(&all[i], &own[0])))
            own[n++] = all[i];
    }
    return n;
}

void zr_hub_say_listens(struct zr_rendezvous *r, struct zr_link *l)
{
    char text[ZR_ADDRESS_LIST_CHARS] = "";
    union zr_address here, own[ZR_LOOKUP_MOST] = {0};
    int size = sizeof here, n = 0;
    bool has_below = r->tree.n_children > 0;
    if (has_below && uv_tcp_getsockname(&l->tcp, &here.any, &size) == 0 &&
        (r->n_listening || listen_below(r, &here) == 0))
        n = list_own(r, &here, own);
    if (r->code)
        return;
    zr_address_list_print(own, n, text);
    if (has_below && n == 0)
        zr_hub_fail_all(r, ZR_ERR_SYSTEM, "it has no address for the ranks that connect through it");
    else if (zr_link_send(l, frame_of(r, ZR_FRAME_LISTENS, 0), text, strlen(text)))
        zr_hub_fail_all(r, ZR_ERR_NOMEM, zr_error_text());
}

void zr_hub_say_joined(struct zr_rendezvous *r)
{
    bool all = r->n_here == r->tree.span && r->tree.span > 1;
    if (r->w.rank == 0 || !r->accepted || !all || r->said_joined)
        return;
    r->said_joined = true;
    if (zr_hub_send_above(r, ZR_FRAME_JOINED, 0, NULL, 0))
        zr_hub_fail_all(r, ZR_ERR_NOMEM, zr_error_text());
}

void zr_hub_joined(struct zr_rendezvous *r, int rank)
{
    struct zr_member *member = &r->members[rank];
    if (member->has_joined)
        return;
    member->has_joined = true;
    r->n_here += zr_tree_child_span(&r->tree, zr_tree_child_to(&r->tree, rank));
    zr_hub_say_joined(r);
}

/* --- where is the rank above? --- */

/* false: there is no memory, or it is no list of addresses. */
static bool keep_listens(struct zr_rendezvous *r, int rank, const char *text, size_t n)
{
    union zr_address at[ZR_LOOKUP_MOST];
    struct zr_member *member = &r->members[rank];
    if (zr_address_list_read(text, n, at) < 0)
        return false;
    free(member->listens);
    member->listens = n ? strndup(text, n) : NULL;
    return !n || member->listens;
}

void zr_hub_on_listens(struct zr_rendezvous *r, struct zr_link *l, const struct zr_frame *f,
                       const char *payload)
{
    int rank = l->shake.rank;
    bool ours = f->type == ZR_FRAME_LISTENS && f->rank == rank && f->world == r->w.world &&
                f->version == ZR_FRAME_VERSION && keep_listens(r, rank, payload ? payload : "", f->n_bytes);
    if (!ours) {
        zr_link_drop(l);
        return;
    }
    const char *above = r->members[zr_tree_of(r->w.world, r->w.fan_out, rank).parent].listens;
    if (zr_link_send(l, frame_of(r, ZR_FRAME_ABOVE, 0), above, above ? strlen(above) : 0))
        zr_link_drop(l); /* it asks again */
}

static int ask_again_ms(struct zr_rendezvous *r)
{
    int64_t ms = (zr_hub_now_ms(r) - r->started_ms) / 8;
    return ms < ASK_SOONEST_MS ? ASK_SOONEST_MS : ms > ASK_LATEST_MS ? ASK_LATEST_MS : (int)ms;
}

void zr_hub_on_above(struct zr_rendezvous *r, struct zr_link *l, const struct zr_frame *f,
                     const char *payload)
{
    union zr_address at[ZR_LOOKUP_MOST];
    bool ours =
        f->type == ZR_FRAME_ABOVE && f->rank == 0 && f->world == r->w.world && f->version == ZR_FRAME_VERSION;
    int n = ours ? zr_address_list_read(payload ? payload : "", f->n_bytes, at) : -1;
    zr_hub_leave_place(r, l);
    if (n < 0) {
        zr_hub_note(r, ZR_TROUBLE_STRANGE, "it sent a frame that makes no sense here");
        zr_hub_retry_in(r, ask_again_ms(r));
    } else if (n == 0) {
        zr_hub_note(r, ZR_TROUBLE_WAIT,
                    "rank 0 does not yet know the address of rank %d, which this rank must join",
                    r->tree.parent);
        zr_hub_retry_in(r, ask_again_ms(r));
    } else {
        memcpy(r->to, at, sizeof r->to);
        r->n_to = n;
        r->to_now = 0;
        r->found_ms = 0; /* these are not rank 0's any more */
        r->refused_ms = 0;
        r->goal = r->tree.parent;
        zr_hub_connect(r);
    }
}

/* --- frames --- */

static bool lost_below(struct zr_rendezvous *r, const struct zr_link *l, const struct zr_frame *f,
                       const char *payload)
{
    char why[ZR_FRAME_TEXT_BYTES];
    if (!r->is_tree || f->about < 0 || f->about >= r->w.world || f->about == r->w.rank || f->about == l->rank)
        return false;
    snprintf(why, sizeof why, "%s", payload ? payload : "");
    zr_hub_heard_lost(r, l->rank, f->about, why);
    return true;
}

bool zr_hub_from_below(struct zr_rendezvous *r, struct zr_link *l, const struct zr_frame *f,
                       const char *payload)
{
    if (!r->is_tree)
        return false;
    switch (f->type) {
    case ZR_FRAME_LISTENS:
        return r->w.rank == 0 && keep_listens(r, l->rank, payload ? payload : "", f->n_bytes);
    case ZR_FRAME_JOINED:
        if (r->members[l->rank].has_joined)
            return false;
        zr_hub_joined(r, l->rank);
        return true;
    case ZR_FRAME_MISSING:
        return zr_hub_on_missing(r, l->rank, payload, f->n_bytes);
    case ZR_FRAME_LOST:
        return lost_below(r, l, f, payload);
    default:
        return false;
    }
}
