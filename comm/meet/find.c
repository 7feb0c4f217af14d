/* SPDX-License-Identifier: Apache-2.0 */
/* find.c: finds at which addresses ranks meet. Rank 0 listens there, and the others try them one after the
 * other.
 *
 * The addresses come from the name or number that stands for rank 0, from a file that rank 0 has written
 * (meeting_file.h), or from a network interface of this host. Each host may ask for a different interface
 * (struct zr_world). Otherwise the routes of the system decide. Loopback offers no choice.
 *
 * With a file, rank 0 listens at a free port and writes the file. The others read it again and again until it
 * leads them to rank 0. If a file of its job is there already, rank 0 first connects to the address in it. It
 * replaces the file only if no other rank 0 of this job answers. Otherwise two jobs would take each other's
 * ranks. Any program may listen at an address in an old file. If it refuses a rank, the rank does not give
 * up, because rank 0 may be about to write another file. */
#include "comm/meet/hub.h"
#include "comm/meet/net_address.h"
#include "kernels/limits.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum {
    AGAIN_SOONEST_MS = 20,
    AGAIN_LATEST_MS = 500,
    FIND_AGAIN_MS = 20,  /* a name of a host that is still starting may appear later */
    FOUND_FOR_MS = 1000, /* time before a name is looked up again */
    FIND_DESCRIPTORS = 2 /* for a look-up, and for the connection that follows */
};

/* --- interfaces --- */

static bool is_asked_for(const struct zr_rendezvous *r)
{
    return r->w.interface[0] != 0;
}

static int find_mine(const struct zr_rendezvous *r, struct zr_interfaces *out)
{
    return is_asked_for(r) ? zr_interfaces_find("interface", r->w.interface, out) : zr_interfaces_all(out);
}

/* --- rank 0 --- */

/* Rank 0: takes the addresses of the interface that was asked for. Returns false if none was, or if ranks
 * meet on loopback. An interface that does not exist is a failure. */
static bool take_interface(struct zr_rendezvous *r)
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
        for (int i = 0; i < mine.n && r->n_to < ZR_LOOKUP_MAX; i++) {
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

/* Keeps those addresses at which rank 0 listens. */
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

/* Writes on what rank 0 listens: " (on eth0 (10.77.0.1, fd77::1), lo (127.0.0.1, ::1))". "" if only on
 * loopback. */
static void say_listening(const struct zr_rendezvous *r, char *text, size_t n_text)
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

/* Lists the addresses by which a bound socket can be reached: those for other hosts, and loopback last.
 * Returns how many, at least 1. */
static int list_reachable(const union zr_address *bound, union zr_address at[ZR_LOOKUP_MAX])
{
    struct zr_interfaces here;
    if (!zr_address_is_any(bound)) {
        at[0] = *bound;
        return 1;
    }
    if (zr_interfaces_all(&here))
        here.n = 0;
    int n = zr_address_list_reaching(&here, bound, ZR_LOOKUP_MAX - 1, at);
    zr_address_parse("127.0.0.1", zr_address_port(bound), &at[n]);
    return n + 1;
}

/* --- the other ranks --- */

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

/* Others: handles a name that stands for loopback on its own host (127.0.1.1). Then rank 0 is on this host,
 * and listens on the interface that was asked for. Its addresses replace those of loopback. */
static void leave_loopback(struct zr_rendezvous *r)
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
    for (int i = 0; i < mine.n && r->n_to < ZR_LOOKUP_MAX; i++) {
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

/* --- a file --- */

int zr_hub_again_ms(struct zr_rendezvous *r)
{
    int64_t ms = (zr_hub_now_ms(r) - r->started_ms) / 16;
    return ms < AGAIN_SOONEST_MS ? AGAIN_SOONEST_MS : ms > AGAIN_LATEST_MS ? AGAIN_LATEST_MS : (int)ms;
}

/* Rank 0: listens at a free port, and then writes the file. */
static void listen_for_file(struct zr_rendezvous *r)
{
    zr_address_parse(r->w.key.n_bytes ? "::" : "127.0.0.1", 0, &r->to[0]);
    r->n_to = 1;
    /* One address, as two addresses may not have the same free port. */
    if (r->w.key.n_bytes && r->w.interface[0]) {
        struct zr_interfaces mine;
        int err = zr_interfaces_find("interface", r->w.interface, &mine);
        if (err) {
            zr_hub_fail(r, err, "rank 0: %s", zr_error_text());
            return;
        }
        r->to[0] = mine.of[0].address;
    }
    zr_hub_listen(r);
}

/* Returns whether a file of this job is there. This rank 0 then tries to reach the rank 0 that wrote the
 * file. If not, *may_replace says whether there is a file that leads nowhere. */
static bool goes_to_first(struct zr_rendezvous *r, bool *may_replace)
{
    char why[ZR_MEETING_WHY_CHARS];
    int found = zr_meeting_file_read(&r->w, &r->file, why);
    *may_replace = found != ZR_MEETING_FILE_ABSENT;
    if (found)
        return false;
    r->n_to = r->file.n;
    r->to_now = 0;
    memcpy(r->to, r->file.at, sizeof r->to);
    if (!r->w.key.n_bytes && !zr_address_is_loopback(&r->to[0]))
        return false; /* without a key no rank could have met there either */
    zr_hub_connect(r);
    return true;
}

void zr_hub_no_first(struct zr_rendezvous *r)
{
    (void)zr_meeting_file_remove(&r->w, &r->file);
    r->worst = ZR_TROUBLE_NONE; /* that trouble is no reason why others do not come */
    r->trouble[0] = r->trouble_before[0] = 0;
    zr_hub_write_file(r);
}

static void write_later(uv_timer_t *t)
{
    zr_hub_write_file(t->data);
}

void zr_hub_write_file_later(struct zr_rendezvous *r)
{
    if (!r->code && !r->closing)
        uv_timer_start(&r->retry, write_later, (uint64_t)zr_hub_again_ms(r), 0);
}

void zr_hub_write_file(struct zr_rendezvous *r)
{
    union zr_address bound;
    bool may_replace;
    /* All ranks may be here without a file: another context of this process has passed on their
     * connections. */
    if (r->ready || r->code || goes_to_first(r, &may_replace))
        return;
    int n = sizeof bound, err = uv_tcp_getsockname(&r->listener[0].tcp, &bound.any, &n);
    if (err) {
        zr_hub_fail(r, ZERO_ERR_SYSTEM, "rank 0: its port is not known: %s", uv_strerror(err));
        return;
    }
    r->w.port = zr_address_port(&bound);
    zr_meeting_file_begin(&r->w, &r->file);
    r->file.n = list_reachable(&bound, r->file.at);
    err = zr_meeting_file_write(&r->w, &r->file, may_replace);
    r->has_written = !err;
    if (err == ZR_MEETING_FILE_TAKEN) {
        zr_hub_write_file_later(r);
    } else if (err) {
        zr_hub_fail(r, err, "rank 0: %s", zr_error_text());
        zr_hub_stop_listening(r);
    }
}

void zr_hub_remove_file(struct zr_rendezvous *r)
{
    if (r->has_written)
        (void)zr_meeting_file_remove(&r->w, &r->file);
    r->has_written = false;
}

/* Others: reads the addresses to try from the file. Returns false if there are none, which is noted. */
static bool read_meeting_file(struct zr_rendezvous *r)
{
    char why[ZR_MEETING_WHY_CHARS];
    r->n_to = 0;
    if (zr_meeting_file_read(&r->w, &r->file, why)) {
        zr_hub_note(r, ZR_TROUBLE_NOBODY, "%s", why);
        return false;
    }
    r->n_to = r->file.n;
    memcpy(r->to, r->file.at, sizeof r->to);
    return true;
}

/* Whether the file was written on another host. A host's name does not decide where a rank is. But it is
 * enough to explain why loopback does not lead to rank 0. */
static bool is_elsewhere(const struct zr_meeting_file *f)
{
    char host[sizeof f->host] = "";
    return gethostname(host, sizeof host - 1) == 0 && strcmp(host, f->host) != 0;
}

static void say_file(const struct zr_rendezvous *r, char text[ZR_PLACE_CHARS])
{
    char path[ZR_MEETING_PATH_CHARS], at[ZR_ADDRESS_CHARS];
    zr_meeting_file_path(&r->w, path);
    int n = snprintf(text, ZR_PLACE_CHARS, "file://%.240s", path);
    if (!r->file.n)
        return;
    zr_address_print(&r->file.at[0], at);
    n += snprintf(text + n, (size_t)(ZR_PLACE_CHARS - n), " (\"%s\": %s%s)", r->file.host, at,
                  r->file.n > 1 ? ", ..." : "");
    if (r->w.rank == 0 && r->has_written && !zr_meeting_file_is_there(&r->w, &r->file))
        snprintf(text + n, (size_t)(ZR_PLACE_CHARS - n), ", which was removed or replaced meanwhile");
    else if (r->w.rank != 0 && !r->w.key.n_bytes && is_elsewhere(&r->file))
        snprintf(text + n, (size_t)(ZR_PLACE_CHARS - n),
                 "; without a key ranks meet on one host only: set ZERO_JOB_KEY");
}

/* --- addresses --- */

/* Drops all addresses but loopback if there is no key. Fails if none is left. */
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
    zr_hub_fail(r, ZERO_ERR_ARG,
                "rank %d: rank 0's address %s (%s) can be reached by other hosts, and this job has no key to "
                "recognize its ranks: set ZERO_JOB_KEY to the same 32 random hex digits on all ranks "
                "(openssl rand -hex 16), or ZERO_JOB_KEY_FILE to a file with them, or meet at 127.0.0.1 if "
                "all ranks are on one host",
                r->w.rank, r->w.host, host);
    return false;
}

/* Keeps the first address of each family. */
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
            leave_loopback(r);
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

/* Finds addresses without a look-up. The name of rank 0 may stand for loopback here and for a network
 * interface elsewhere. So with a name and a key rank 0 listens on all addresses. It does the same if it has
 * sent the others a list. */
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
        listen_for_file(r);
    else if (read_meeting_file(r))
        go(r);
    else
        uv_timer_start(&r->retry, find_again, (uint64_t)zr_hub_again_ms(r), 0);
}

void zr_hub_no_descriptor(struct zr_rendezvous *r, int error, const char *what_for)
{
    char text[256], why[ZR_SYSTEM_WORDS];
    snprintf(text, sizeof text, "no descriptor is left %s: %s", what_for, zr_system_words(error, why));
    zr_hub_fail_all(r, ZERO_ERR_SYSTEM, text);
}

void zr_hub_find(struct zr_rendezvous *r)
{
    /* Without descriptors a look-up would fail as if the network were at fault. */
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
    if (r->w.rank == 0 && take_interface(r)) {
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

/* Writes the first of the addresses. Returns how many characters. */
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
        say_file(r, text);
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
        say_listening(r, text + used, ZR_PLACE_CHARS - used);
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
