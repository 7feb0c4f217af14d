/* SPDX-License-Identifier: Apache-2.0 */
/* user_comm.c: fills, gathers, checks and reads the cards of ranks that can exchange bytes before they
 * meet. */
#include "comm/meet/user_comm.h"
#include "comm/identity.h"
#include "comm/timed_call.h"
#include "kernels/limits.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

static const char LIMIT[] = " (start_timeout_ms)";

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
    union zr_address at[ZR_LOOKUP_MAX];
    struct zr_interfaces mine;
    int err =
        w->interface[0] ? zr_interfaces_find("interface", w->interface, &mine) : zr_interfaces_all(&mine);
    if (!err)
        zr_address_list_print(at, zr_address_list_reaching(&mine, bound, ZR_LOOKUP_MAX, at), text);
    return err;
}

static int take_port(const struct zr_world *w, int *held, struct zr_user_comm_card *c)
{
    union zr_address bound;
    int err = hold_port(held, &bound);
    if (err)
        return err;
    c->port = zr_address_port(&bound);
    return c->address[0] ? 0 : offer_own(w, &bound, c->at);
}

static int fill_address(const struct zr_world *w, int *held, struct zr_user_comm_card *c)
{
    snprintf(c->address, sizeof c->address, "%s", w->host);
    c->port = w->port;
    c->is_given = w->port != 0 || c->by_file;
    int err = zr_job_key_make(&c->key);
    return err || c->is_given ? err : take_port(w, held, c);
}

static uint64_t sum_of(const struct zr_user_comm_card *c)
{
    return XXH3_64bits((const char *)c + sizeof c->sum, sizeof *c - sizeof c->sum);
}

int zr_user_comm_fill(const struct zr_world *w, int *held, struct zr_user_comm_card *c)
{
    memset(c, 0, sizeof *c);
    c->rank = w->rank;
    c->world = w->world;
    c->loopback = loopback_hash();
    c->by_file = w->file[0] != 0;
    memcpy(c->name, w->name, sizeof c->name);
    int err = zr_first_error_put(c, w->rank == 0 ? fill_address(w, held, c) : 0);
    c->sum = sum_of(c);
    return err;
}

/* --- reading cards --- */

/* Checks that each card is the one that its rank has sent. */
static int check_gathered(const struct zr_user_comm_card *all, const char *name, const struct zr_world *w)
{
    for (int r = 0; r < w->world; r++) {
        const struct zr_user_comm_card *c = &all[r];
        if (c->sum != sum_of(c))
            return zr_fail(ZERO_ERR_FAILED,
                           "%s gave rank %d wrong bytes for rank %d: it must give every rank the bytes of "
                           "each, in rank order, and all ranks need the same libzero",
                           name, w->rank, r);
        if (c->world != w->world)
            return zr_fail(ZERO_ERR_ARG,
                           "%s: world is %d on rank %d and %d on rank %d; it must be the same on all ranks",
                           name, c->world, c->rank, w->world, w->rank);
        if (c->rank != r)
            return zr_fail(ZERO_ERR_ARG,
                           "%s gave rank %d the bytes of rank %d in the place of rank %d: rank must be "
                           "another number on each rank, by which %s orders them",
                           name, w->rank, c->rank, r, name);
    }
    return 0;
}

/* rank: an error of this rank does not name it. */
static int check_cards(const struct zr_user_comm_card *all, const char *name, const struct zr_world *w,
                       int rank)
{
    const struct zr_user_comm_card *zero = &all[0];
    int err = zr_first_error_of(all, w->world, rank);
    for (int r = 1; r < w->world && !err; r++) {
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
    return err;
}

static bool have_same_loopback(const struct zr_user_comm_card *all, int n)
{
    int r = 1;
    while (r < n && all[r].loopback == all[0].loopback)
        r++;
    return r == n;
}

static int check_all(const struct zr_user_comm_card *all, const char *name, const struct zr_world *w,
                     int rank)
{
    int err = check_gathered(all, name, w);
    return err ? err : check_cards(all, name, w, rank);
}

void zr_user_comm_check(struct zr_user_comm_card *all, const char *name, const struct zr_world *w)
{
    zr_first_error_put(&all[0], check_all(all, name, w, -1));
    all[0].is_checked = true;
    all[0].has_one_loopback = have_same_loopback(all, w->world);
    all[0].sum = sum_of(&all[0]);
}

/* Returns the error that rank 0 found when it checked all cards. */
static int take_checked(const struct zr_user_comm_card *zero, const char *name, const struct zr_world *w)
{
    if (zero->sum != sum_of(zero))
        return zr_fail(ZERO_ERR_FAILED,
                       "%s gave rank %d wrong bytes for rank 0: all ranks need the same libzero", name,
                       w->rank);
    return zero->err ? zr_fail(zr_first_error_code(zero->err), "%.*s", (int)sizeof zero->text - 1, zero->text)
                     : 0;
}

int zr_user_comm_choose(const struct zr_user_comm_card *all, const char *name, struct zr_world *w)
{
    const struct zr_user_comm_card *zero = &all[0];
    int err = zero->is_checked ? take_checked(zero, name, w) : check_all(all, name, w, w->rank);
    if (err)
        return err;
    bool same_loopback = zero->is_checked ? zero->has_one_loopback : have_same_loopback(all, w->world);
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

/* --- gathering cards --- */

enum { UNBEGUN = INT32_MIN, UNWRITTEN = 0xa5 };

/* A call of cfg.launch.exchange. data is mine, all, and room for as much as all again, because the program's
 * group may have more ranks than cfg.launch.world says. A thread that is left behind in the call keeps the
 * data. */
struct exchange_call {
    int (*exchange)(void *arg, const void *mine, void *all, size_t bytes);
    void *arg;
    size_t bytes;
    int64_t data[];
};

/* A wait for such a call. */
struct exchange_wait {
    const struct zr_user_comm *c;
    int64_t begun_ns, reminded_ns;
};

static int call_exchange(void *arg)
{
    struct exchange_call *k = arg;
    return k->exchange(k->arg, k->data, (char *)k->data + k->bytes, k->bytes);
}

/* Logs a long wait. Fails if a rank has ended: it will not meet the others, whether it has come here or
 * not. */
static int watch_exchange(void *arg)
{
    struct exchange_wait *k = arg;
    const struct zr_waiting *w = k->c->w->waiting;
    char text[ZR_WAIT_CHARS], how[128], ended[ZR_ENDED_CHARS];
    bool has_begun;
    int64_t now = zr_now_ns();
    for (int i = 0; w && w->has_ended && i < k->c->w->world; i++)
        if (i != k->c->w->rank && w->has_ended(w->arg, i, &has_begun, how, sizeof how)) {
            zr_waiting_say_ended(i, has_begun, how, ended);
            return zr_fail(ZERO_ERR_PEER, "%s", ended);
        }
    if (!w || now - k->reminded_ns < w->remind_ms * 1000000)
        return 0;
    k->reminded_ns = now;
    snprintf(
        text, sizeof text,
        "cfg.launch.exchange (do all ranks call zero_wrap, and is it set on all?) has not returned on rank "
        "%d after %lld ms",
        k->c->w->rank, (long long)((now - k->begun_ns) / 1000000));
    zr_waiting_warn(w, text, k->c->timeout_ms, LIMIT);
    return 0;
}

/* Returns an error if the call wrote more than the n_all bytes of all. */
static int check_size(const struct zr_user_comm *c, const unsigned char *all, size_t n_all, size_t bytes)
{
    size_t n = 2 * n_all;
    while (n > n_all && all[n - 1] == UNWRITTEN)
        n--;
    return n == n_all ? 0
                      : zr_fail(ZERO_ERR_ARG,
                                "cfg.launch.exchange gave rank %d the bytes of %zu ranks or more, but "
                                "cfg.launch.world is %d: it must gather from these ranks only",
                                c->w->rank, (n + bytes - 1) / bytes, c->w->world);
}

int zr_user_comm_call(struct zr_user_comm *c, const void *mine, void *all, size_t bytes)
{
    size_t n_all = bytes * (size_t)c->w->world, n = sizeof(struct exchange_call) + bytes + 2 * n_all;
    struct exchange_call *k = calloc(1, n);
    struct exchange_wait wait = {c, zr_now_ns(), zr_now_ns()};
    const struct zr_task_call call = {
        .what = "cfg.launch.exchange (do all ranks call zero_wrap, and is it set on all?)",
        .thread = "zero-exchange",
        .dev = c->dev,
        .fn = call_exchange,
        .unbegun = UNBEGUN,
        .watch = watch_exchange,
        .watch_arg = &wait,
        .limit = LIMIT};
    bool left; /* what the call uses is its own */
    int res = 0;
    if (!k)
        return zr_fail(ZERO_ERR_NOMEM, "exchange: no memory for the cards of %d ranks", c->w->world);
    *k = (struct exchange_call){.exchange = c->exchange, .arg = c->exchange_arg, .bytes = bytes};
    memcpy(k->data, mine, bytes);
    unsigned char *of_call = (unsigned char *)k->data + bytes;
    memset(of_call + n_all, UNWRITTEN, n_all);
    int err = zr_timed_call(&call, c->timeout_ms, k, n, &res, &left);
    if (!err && res == UNBEGUN)
        err = zr_fail(ZERO_ERR_SYSTEM, "the thread of cfg.launch.exchange could not use the GPU of rank %d",
                      c->w->rank);
    else if (!err && res)
        err = zr_fail(ZERO_ERR_FAILED, "cfg.launch.exchange returned %d on rank %d", res, c->w->rank);
    err = err ? err : check_size(c, of_call, n_all, bytes);
    if (!err)
        memcpy(all, of_call, n_all);
    free(k);
    return err;
}

int zr_user_comm_meet(struct zr_user_comm *c, struct zr_world *w, int *held)
{
    struct zr_user_comm_card mine, *all = calloc((size_t)w->world, sizeof *all);
    *held = -1;
    if (!all)
        return zr_fail(ZERO_ERR_NOMEM, "%s: no memory for the cards of %d ranks", c->name, w->world);
    (void)zr_user_comm_fill(w, held, &mine); /* a failure is in the card, so all ranks learn of it */
    c->w = w;
    int err = c->gather(c, &mine, all, sizeof mine);
    err = err ? err : zr_user_comm_choose(all, c->name, w);
    free(all);
    if (err && *held >= 0) {
        close(*held);
        *held = -1;
    }
    return err;
}
