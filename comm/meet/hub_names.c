/* SPDX-License-Identifier: Apache-2.0 */
/* hub_names.c: contexts with names. A rank may come to rank 0 with another name than rank 0's. If another
 * context of rank 0's process waits with that name, it takes the connection over. Else the rank has come too
 * early, and has to try again. */
#include "comm/meet/hub.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void on_handed(uv_async_t *a)
{
    struct zr_rendezvous *r = a->data;
    for (struct zr_handed *h; (h = zr_open_name_next(r->w.open_name));) {
        zr_hub_take_handed(r, h);
        free(h);
    }
}

int zr_hub_await_handed(struct zr_rendezvous *r)
{
    if (!r->w.open_name)
        return 0;
    int err = uv_async_init(r->loop, &r->handed, on_handed);
    if (err)
        return zr_fail(ZR_ERR_SYSTEM, "rendezvous: uv_async_init: %s", uv_strerror(err));
    r->handed.data = r;
    uv_unref((uv_handle_t *)&r->handed);
    r->n_handles++;
    r->awaits_handed = true;
    zr_open_name_await(r->w.open_name, &r->handed);
    return 0;
}

static void handed_closed(uv_handle_t *h)
{
    struct zr_rendezvous *r = h->data;
    r->n_handles--;
}

void zr_hub_ignore_handed(struct zr_rendezvous *r)
{
    if (!r->awaits_handed)
        return;
    r->awaits_handed = false;
    zr_open_name_ignore(r->w.open_name);
    uv_close((uv_handle_t *)&r->handed, handed_closed);
}

/* --- who waits with which name --- */

void zr_hub_has_come(struct zr_rendezvous *r, int rank)
{
    free(r->members[rank].waits_as);
    r->members[rank].waits_as = NULL;
}

static const char *waiting_name(const struct zr_rendezvous *r, int rank)
{
    const struct zr_member *m = &r->members[rank];
    return m->waits_as ? m->waits_as : m->state == ZR_MEMBER_HERE ? r->w.name : NULL;
}

/* Appends the ranks that wait with the name of `first`, the lowest of them. */
static size_t say_name(const struct zr_rendezvous *r, int first, bool is_first, char *text, size_t n_text)
{
    const char *name = waiting_name(r, first);
    int n = 0;
    size_t used =
        (size_t)snprintf(text, n_text, "%s \"%s\" on", is_first ? "cfg.launch.name is" : " and", name);
    for (int i = first; i < r->w.world && used < n_text && n <= 4; i++) {
        const char *its = waiting_name(r, i);
        if (!its || strcmp(its, name))
            continue;
        used += (size_t)snprintf(text + used, n_text - used,
                                 n == 4 ? ", ..."
                                 : n    ? ", rank %d"
                                        : " rank %d",
                                 i);
        n++;
    }
    return used < n_text ? used : n_text - 1;
}

static bool is_said_before(const struct zr_rendezvous *r, int rank)
{
    for (int i = 0; i < rank; i++)
        if (waiting_name(r, i) && !strcmp(waiting_name(r, i), waiting_name(r, rank)))
            return true;
    return false;
}

void zr_hub_say_names(const struct zr_rendezvous *r, char text[ZR_NAMES_CHARS])
{
    size_t used = 0;
    int n_names = 0;
    text[0] = 0;
    for (int i = 0; i < r->w.world; i++)
        if (waiting_name(r, i) && !is_said_before(r, i))
            used += say_name(r, i, n_names++ == 0, text + used, ZR_NAMES_CHARS - used);
    if (n_names < 2)
        text[0] = 0;
}

void zr_hub_other_name(struct zr_rendezvous *r, struct zr_link *l, const struct zr_frame *f,
                       const char *payload)
{
    int rank = l->shake.rank;
    struct zr_hello hello;
    uv_os_fd_t fd;
    memcpy(&hello, payload, sizeof hello);
    if (uv_fileno((uv_handle_t *)&l->tcp, &fd) == 0 &&
        zr_open_name_hand(r->w.open_name, fd, &l->shake, f, &hello)) {
        zr_link_drop(l);
        return;
    }
    char names[ZR_NAMES_CHARS];
    bool is_ours = l->shake.world == r->w.world && rank > 0 && rank < r->w.world;
    if (is_ours && r->members[rank].state == ZR_MEMBER_EMPTY) {
        free(r->members[rank].waits_as);
        r->members[rank].waits_as = strdup(l->shake.name);
    }
    zr_hub_say_names(r, names);
    zr_hub_refuse(r, l, ZR_FRAME_AGAIN, 0, names);
}
