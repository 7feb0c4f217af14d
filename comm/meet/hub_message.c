/* SPDX-License-Identifier: Apache-2.0 */
/* hub_message.c: messages between rank 0 and the others after the detach (see rendezvous.h). One that comes
 * before this rank has detached is kept until it has. */
#include "comm/meet/hub.h"

#include <stdlib.h>
#include <string.h>

enum { MOST_KEPT = 64 };

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
        return zr_fail(ZR_ERR_ARG, "rank %d sends rank %d %zu bytes: 1 to %d, from or to rank 0, are allowed",
                       r->w.rank, to, n, ZR_FRAME_SMALL_BYTES);
    if (!r->detached || r->closing)
        return zr_fail(ZR_ERR_ORDER, "sending: the rendezvous is %s", r->closing ? "closed" : "not detached");
    if (to < 0)
        return zr_hub_send_all(r, ZR_FRAME_MESSAGE, -1, data, n);
    if (r->members[to].state != ZR_MEMBER_HERE)
        return zr_fail(ZR_ERR_PEER, "rank %d has left", to);
    return zr_hub_send_about(r, to, ZR_FRAME_MESSAGE, to, data, n);
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
    t = n_kept < MOST_KEPT ? malloc(sizeof *t + n) : NULL;
    if (!t)
        return false;
    *t = (struct zr_message){.from = from, .n = n};
    memcpy(t->data, data, n);
    *end = t;
    return true;
}

bool zr_hub_message(struct zr_rendezvous *r, int from, const char *data, size_t n)
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
