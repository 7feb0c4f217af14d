/* SPDX-License-Identifier: Apache-2.0 */
/* lent.c: fills, checks and reads the cards of ranks whose program lends a communicator. */
#include "comm/meet/lent.h"
#include "comm/identity.h"
#include "comm/meet/net_address.h"
#include "kernels/limits.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <xxhash.h>

/* Returns a hash of this machine and the network that its processes see. Containers of one machine may
 * have two. */
static uint64_t loopback_hash(void)
{
    struct zr_identity id;
    struct stat net = {0};
    zr_identity_read(&id);
    stat("/proc/self/ns/net", &net);
    return XXH3_64bits_withSeed(id.machine, strlen(id.machine), (uint64_t)net.st_ino);
}

/* Reserves a free port with a socket that is bound and does not listen. Other sockets with SO_REUSEADDR, such
 * as libuv's, may listen there meanwhile. The kernel does not give the port to programs that ask for any
 * port. */
static int hold_port(int *held, union zr_address *bound)
{
    socklen_t n = sizeof *bound;
    int fd = zr_address_bind_all(0, bound);
    char why[ZR_SYSTEM_WORDS];
    *held = fd < 0 ? -1 : fd;
    if (fd < 0 || getsockname(fd, &bound->any, &n))
        return zr_fail(ZERO_ERR_SYSTEM, "rank 0 has no port for the rendezvous: %s",
                       zr_system_words(fd < 0 ? -fd : errno, why));
    return 0;
}

/* Lists the addresses by which other hosts may reach that port. */
static int offer_own(const struct zr_world *w, const union zr_address *bound,
                     char text[ZR_ADDRESS_LIST_CHARS])
{
    union zr_address at[ZR_LOOKUP_MOST];
    struct zr_interfaces mine;
    int err =
        w->interface[0] ? zr_interfaces_find("interface", w->interface, &mine) : zr_interfaces_all(&mine);
    if (!err)
        zr_address_list_print(at, zr_address_list_reaching(&mine, bound, ZR_LOOKUP_MOST, at), text);
    return err;
}

static int take_port(const struct zr_world *w, int *held, struct zr_lent_card *c)
{
    union zr_address bound;
    int err = hold_port(held, &bound);
    if (err)
        return err;
    c->port = zr_address_port(&bound);
    return c->address[0] ? 0 : offer_own(w, &bound, c->at);
}

int zr_lent_fill(const struct zr_world *w, int *held, struct zr_lent_card *c)
{
    memset(c, 0, sizeof *c);
    c->loopback = loopback_hash();
    c->by_file = w->file[0] != 0;
    memcpy(c->name, w->name, sizeof c->name);
    if (w->rank != 0)
        return 0;
    snprintf(c->address, sizeof c->address, "%s", w->host);
    c->port = w->port;
    c->is_given = w->port != 0 || c->by_file;
    int err = zr_job_key_make(&c->key);
    return err || c->is_given ? err : take_port(w, held, c);
}

int zr_lent_check(const struct zr_lent_card *all, const char *name, const struct zr_world *w,
                  bool *same_loopback)
{
    const struct zr_lent_card *zero = &all[0];
    *same_loopback = true;
    int err = zr_first_error_of(all, w->world, w->rank);
    if (err)
        return err;
    for (int r = 0; r < w->world; r++) {
        *same_loopback &= all[r].loopback == zero->loopback;
        if (strncmp(all[r].name, zero->name, sizeof zero->name))
            return zr_fail(ZERO_ERR_MISMATCH,
                           "cfg.launch.name is \"%.63s\" on rank 0 and \"%.63s\" on rank %d: ranks that meet "
                           "over %s must wrap their contexts in the same order",
                           zero->name, all[r].name, r, name);
        if (all[r].by_file != zero->by_file)
            return zr_fail(
                ZERO_ERR_ARG,
                "rank %d %s by a file:// and rank 0 %s: cfg.launch.rendezvous, or ZERO_RENDEZVOUS, must "
                "be the same on all ranks",
                r, all[r].by_file ? "meets" : "does not meet", zero->by_file ? "does" : "does not");
    }
    return 0;
}

int zr_lent_take(const struct zr_lent_card *zero, bool same_loopback, const char *name, struct zr_world *w)
{
    bool by_list = !zero->is_given && !same_loopback && !zero->address[0];
    int n_at = by_list ? zr_address_list_read(zero->at, strnlen(zero->at, sizeof zero->at), w->at) : 0;
    if (by_list && n_at < 1)
        return zr_fail(
            ZERO_ERR_ARG,
            "the ranks of %s are on several hosts, and rank 0's host, or its interface, has no address that "
            "other hosts can reach: set cfg.launch.rendezvous or ZERO_RENDEZVOUS to tcp://host:port",
            name);
    snprintf(w->host, sizeof w->host, "%.*s", (int)sizeof zero->address - 1,
             zero->is_given || !same_loopback ? zero->address : "127.0.0.1");
    w->port = zero->port;
    w->n_at = n_at;
    w->key = zero->key;
    return 0;
}

int zr_lent_choose(const struct zr_lent_card *all, const char *name, struct zr_world *w)
{
    bool same_loopback;
    int err = zr_lent_check(all, name, w, &same_loopback);
    return err ? err : zr_lent_take(&all[0], same_loopback, name, w);
}
