/* SPDX-License-Identifier: Apache-2.0 */
/* hub_find.c: at which addresses the ranks of a rendezvous meet: those of the name or number that stands for
 * rank 0, of either family. Rank 0 listens there, the others try one after the other. */
#include "comm/meet/address_list.h"
#include "comm/meet/hub.h"
#include "kernels/limits.h"

#include <stdio.h>
#include <string.h>

enum {
    FIND_AGAIN_MS = 20,  /* a name of a host that is still starting may appear later */
    FOUND_FOR_MS = 1000, /* that what was found counts before the name is looked up again */
    FIND_DESCRIPTORS = 2 /* of a look-up, and of the connection that follows */
};

/* Without a key ranks meet on loopback only: the other addresses go. Fails where none is left. */
static bool keep_usable(struct zr_rendezvous *r)
{
    if (r->w.key.n_bytes)
        return true;
    char host[ZR_ADDRESS_CHARS];
    int n = 0;
    zr_address_print_host(&r->to[0], host);
    for (int i = 0; i < r->n_to; i++)
        if (zr_address_is_loopback(&r->to[i]))
            r->to[n++] = r->to[i];
    r->n_to = n;
    if (n)
        return true;
    zr_hub_fail(r, ZR_ERR_ARG,
                "rank %d: rank 0's address %s (%s) can be reached by other hosts, and this job has no key to "
                "recognize its ranks: set ZERO_JOB_KEY to the same 32 random hex digits on all ranks "
                "(openssl rand -hex 16), or ZERO_JOB_KEY_FILE to a file with them, or meet at 127.0.0.1 if "
                "all ranks are on one host",
                r->w.rank, r->w.host, host);
    return false;
}

/* Of each family the first. */
static void keep_one_of_each(struct zr_rendezvous *r)
{
    int n = 1;
    for (int i = 1; i < r->n_to && n < 2; i++)
        if (r->to[i].any.sa_family != r->to[0].any.sa_family)
            r->to[n++] = r->to[i];
    r->n_to = n;
}

static void go(struct zr_rendezvous *r)
{
    r->to_now = 0;
    if (!keep_usable(r))
        return;
    if (r->w.rank == 0) {
        keep_one_of_each(r);
        zr_hub_listen(r);
    } else {
        zr_hub_connect(r);
    }
}

static void find_again(uv_timer_t *t)
{
    zr_hub_find(t->data);
}

static void on_looked_up(void *arg, const struct zr_looked_up *found)
{
    struct zr_rendezvous *r = arg;
    r->lookup = NULL;
    if (r->closing || r->code)
        return;
    if (found->n) {
        memcpy(r->to, found->at, sizeof r->to);
        r->n_to = found->n;
        r->found_ms = zr_hub_now_ms(r);
        if (r->w.rank != 0)
            zr_hub_leave_loopback(r);
        go(r);
    } else {
        zr_hub_note(r, ZR_TROUBLE_NOBODY, "no address for \"%.200s\": %s", r->w.host, found->why);
        uv_timer_start(&r->retry, find_again, FIND_AGAIN_MS, 0);
    }
}

static void add_number(struct zr_rendezvous *r, const char *number)
{
    if (zr_address_parse(number, r->w.port, &r->to[r->n_to]))
        r->n_to++;
}

/* Addresses for which nobody has to be asked. What is rank 0's name may stand for loopback here and for a
 * network interface elsewhere, so with a name rank 0 listens on all addresses, if there is a key; and so it
 * does where it has told the others a list. */
static bool find_at_once(struct zr_rendezvous *r)
{
    bool listens = r->w.rank == 0;
    if (!listens && r->w.n_at) {
        memcpy(r->to, r->w.at, sizeof r->to);
        r->n_to = r->w.n_at;
        return true;
    }
    r->n_to = 0;
    add_number(r, r->w.host);
    if (!r->n_to && listens && strcmp(r->w.host, "localhost") == 0) {
        add_number(r, "127.0.0.1");
        add_number(r, "::1");
    } else if (!r->n_to && listens && r->w.key.n_bytes) {
        add_number(r, "::");
    }
    return r->n_to > 0;
}

static void find_by_file(struct zr_rendezvous *r)
{
    if (r->w.rank == 0)
        zr_hub_listen_for_file(r);
    else if (zr_hub_read_file(r))
        go(r);
    else
        uv_timer_start(&r->retry, find_again, (uint64_t)zr_hub_again_ms(r), 0);
}

void zr_hub_no_descriptor(struct zr_rendezvous *r, int error, const char *what_for)
{
    char text[256], why[ZR_SYSTEM_WORDS];
    snprintf(text, sizeof text, "no descriptor is left %s: %s", what_for, zr_system_words(error, why));
    zr_hub_fail_all(r, ZR_ERR_SYSTEM, text);
}

void zr_hub_find(struct zr_rendezvous *r)
{
    /* Without descriptors a look-up fails as if the network were at fault. */
    int error = zr_no_descriptors(FIND_DESCRIPTORS);
    if (error) {
        zr_hub_no_descriptor(r, error, "to find the other ranks with");
        return;
    }
    if (r->w.file[0]) {
        find_by_file(r);
        return;
    }
    bool is_fresh = r->found_ms && zr_hub_now_ms(r) - r->found_ms < FOUND_FOR_MS;
    if (r->w.rank == 0 && zr_hub_take_interface(r)) {
        if (!r->code)
            go(r);
        return;
    }
    if (is_fresh || find_at_once(r)) {
        go(r);
        return;
    }
    int err = zr_lookup_start(r->loop, r->w.host, r->w.port, on_looked_up, r, &r->lookup);
    if (!err && !r->worst)
        zr_hub_note(r, ZR_TROUBLE_NONE, "the address of \"%.200s\" is being looked up", r->w.host);
    if (err)
        zr_hub_fail(r, err, "rank %d: rendezvous: %s", r->w.rank, zr_error_text());
}

/* The first of them. */
static int say_list(const union zr_address *at, int n, char text[ZR_PLACE_CHARS])
{
    char list[ZR_ADDRESS_LIST_CHARS];
    zr_address_list_print(at, n < 4 ? n : 4, list);
    return snprintf(text, ZR_PLACE_CHARS, "%s", list);
}

void zr_hub_say_place(const struct zr_rendezvous *r, char text[ZR_PLACE_CHARS])
{
    const char *host = r->w.host;
    if (r->w.file[0]) {
        zr_hub_say_file(r, text);
        return;
    }
    int n;
    if (r->w.n_at)
        n = say_list(r->w.at, r->w.n_at, text);
    else
        n = snprintf(text, ZR_PLACE_CHARS, strchr(host, ':') ? "[%.255s]:%d" : "%.255s:%d", host, r->w.port);
    if (r->w.is_port_of_own_job)
        n += snprintf(text + n, (size_t)(ZR_PLACE_CHARS - n),
                      " (a port derived from ZERO_JOB: set it on all ranks or on none)");
    if (r->w.is_host_assumed)
        snprintf(text + n, (size_t)(ZR_PLACE_CHARS - n),
                 " (this host, because the launcher does not give the number of hosts: if there are several, "
                 "set ZERO_RENDEZVOUS)");
    if (r->w.rank == 0) {
        size_t used = strlen(text);
        zr_hub_say_listening(r, text + used, ZR_PLACE_CHARS - used);
        return;
    }
    if (!r->found_ms || !r->n_to)
        return;
    for (int i = 0; i < r->n_to && n < ZR_PLACE_CHARS - ZR_ADDRESS_CHARS; i++) {
        char address[ZR_ADDRESS_CHARS];
        zr_address_print_host(&r->to[i], address);
        n += snprintf(text + n, (size_t)(ZR_PLACE_CHARS - n), "%s%s", i ? ", " : " (", address);
    }
    snprintf(text + n, (size_t)(ZR_PLACE_CHARS - n), ")");
}
