/* SPDX-License-Identifier: Apache-2.0 */
/* hub_interface.c: by which of this host's network interfaces a rank meets the others: rank 0 listens on its
 * addresses, the others connect from them. Which one it is may be asked for (struct zr_world), on each host
 * by itself; without that rank 0 listens where hub_find.c says, and the routes of the system decide for the
 * others. What goes over loopback has no other way. */
#include "comm/meet/address_list.h"
#include "comm/meet/hub.h"

#include <stdio.h>
#include <string.h>

static bool is_asked_for(const struct zr_rendezvous *r)
{
    return r->w.interface[0] != 0;
}

static int find_mine(const struct zr_rendezvous *r, struct zr_interfaces *out)
{
    return is_asked_for(r) ? zr_interfaces_find("interface", r->w.interface, out) : zr_interfaces_all(out);
}

/* --- rank 0 --- */

bool zr_hub_take_interface(struct zr_rendezvous *r)
{
    struct zr_interfaces mine;
    union zr_address given;
    bool is_number = zr_address_parse(r->w.host, r->w.port, &given);
    if (!is_asked_for(r) || zr_world_is_on_loopback(&r->w))
        return false;
    int err = find_mine(r, &mine);
    if (err) {
        zr_hub_fail(r, err, "rank 0: %s", zr_error_text());
        return true;
    }
    r->n_to = 0;
    for (int pass = 0; pass < 2 && !r->n_to; pass++)
        for (int i = 0; i < mine.n && r->n_to < ZR_LOOKUP_MOST; i++) {
            zr_address_set_port(&mine.of[i].address, r->w.port);
            if (pass || (is_number && zr_address_same(&mine.of[i].address, &given)))
                r->to[r->n_to++] = mine.of[i].address;
        }
    if (is_number && !zr_address_same(&r->to[0], &given))
        zr_hub_note(r, ZR_TROUBLE_NOBODY,
                    "%s is not an address of this host, so rank 0 listens at all addresses of %s", r->w.host,
                    r->w.interface);
    return true;
}

/* Those of all that rank 0 listens at, into all. */
static void keep_listening(const struct zr_rendezvous *r, struct zr_interfaces *all)
{
    int n = 0;
    for (int i = 0; i < all->n; i++) {
        bool listens = false;
        zr_address_set_port(&all->of[i].address, r->w.port);
        for (int k = 0; k < r->n_to; k++)
            listens |= zr_address_same(&r->to[k], &all->of[i].address) ||
                       (zr_address_is_any(&r->to[k]) &&
                        (r->to[k].any.sa_family == AF_INET6 || all->of[i].address.any.sa_family == AF_INET));
        if (listens)
            all->of[n++] = all->of[i];
    }
    all->n = n;
}

void zr_hub_say_listening(const struct zr_rendezvous *r, char *text, size_t n_text)
{
    struct zr_interfaces all;
    char list[256];
    text[0] = 0;
    if (!r->n_to || zr_address_is_loopback(&r->to[0]) || zr_interfaces_all(&all))
        return;
    keep_listening(r, &all);
    zr_interfaces_list(&all, list, sizeof list);
    snprintf(text, n_text, " (on %s)", list);
}

/* --- a port that was bound --- */

int zr_hub_reachable_at(const union zr_address *bound, union zr_address at[ZR_LOOKUP_MOST])
{
    struct zr_interfaces here;
    if (!zr_address_is_any(bound)) {
        at[0] = *bound;
        return 1;
    }
    if (zr_interfaces_all(&here))
        here.n = 0;
    int n = zr_address_list_reaching(&here, bound, ZR_LOOKUP_MOST - 1, at);
    zr_address_parse("127.0.0.1", zr_address_port(bound), &at[n]);
    return n + 1;
}

/* --- the others --- */

int zr_hub_source(const struct zr_rendezvous *r, union zr_address *from)
{
    const union zr_address *to = &r->to[r->to_now];
    struct zr_interfaces mine;
    if (!is_asked_for(r) || zr_address_is_loopback(to))
        return 1;
    int err = find_mine(r, &mine);
    for (int i = 0; i < mine.n && !err; i++)
        if (mine.of[i].address.any.sa_family == to->any.sa_family) {
            *from = mine.of[i].address;
            return 0;
        }
    return UV_EADDRNOTAVAIL;
}

void zr_hub_leave_loopback(struct zr_rendezvous *r)
{
    struct zr_interfaces mine;
    int n_found = r->n_to;
    if (!is_asked_for(r) || zr_world_is_on_loopback(&r->w) || find_mine(r, &mine))
        return;
    r->n_to = 0;
    for (int i = 0; i < n_found; i++)
        if (!zr_address_is_loopback(&r->to[i]))
            r->to[r->n_to++] = r->to[i];
    if (r->n_to == n_found)
        return;
    for (int i = 0; i < mine.n && r->n_to < ZR_LOOKUP_MOST; i++) {
        zr_address_set_port(&mine.of[i].address, r->w.port);
        r->to[r->n_to++] = mine.of[i].address;
    }
}

bool zr_hub_has_family(const struct zr_rendezvous *r, int family)
{
    struct zr_interfaces mine;
    return find_mine(r, &mine) != 0 || zr_interfaces_reach_far(&mine, family);
}

void zr_hub_say_self(const struct zr_rendezvous *r, char text[ZR_SELF_CHARS])
{
    union zr_address from;
    char host[ZR_ADDRESS_CHARS], name[ZR_INTERFACE_CHARS];
    int asked = r->to_now < r->n_to ? zr_hub_source(r, &from) : UV_EADDRNOTAVAIL;
    text[0] = 0;
    if (asked < 0 && is_asked_for(r))
        snprintf(text, ZR_SELF_CHARS, " (on %s)", r->w.interface);
    if (asked < 0 || (asked > 0 && zr_address_source(&r->to[r->to_now], &from)))
        return;
    zr_address_print_host(&from, host);
    zr_interface_of(&from, name);
    snprintf(text, ZR_SELF_CHARS, " (%s%s%s)", host, name[0] ? " on " : "", name);
}
