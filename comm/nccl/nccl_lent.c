/* nccl_lent.c: what a communicator that the program lends is asked for: who the ranks are, and where they can
 * meet. After that it is split (nccl_open.c).
 *
 * The ranks of a communicator have found each other already, so nothing else has to tell them how to: rank 0
 * takes a free port, and where that is goes to all by one all-gather, with a new key for the job that keeps
 * others out. From then on the rendezvous is as always, for it is also how a lost rank is noticed. */
#include "comm/identity.h"
#include "comm/meet/job_key.h"
#include "comm/meet/net_address.h"
#include "comm/meet/rendezvous.h"
#include "comm/nccl/nccl_comm.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
#include <xxhash.h>

/* --- communicators that may be non-blocking --- */

ncclResult_t zr_nccl_await(const struct zr_nccl_api *api, ncclComm_t comm, ncclResult_t res, ncclComm_t *out,
                           int64_t until_ns)
{
    if (res != ncclSuccess && res != ncclInProgress)
        return res;
    for (;;) {
        bool made = !out || __atomic_load_n(out, __ATOMIC_ACQUIRE);
        if (res == ncclSuccess && made)
            return res;
        ncclResult_t asked = api->CommGetAsyncError(comm, &res);
        if (asked)
            return asked;
        made = !out || __atomic_load_n(out, __ATOMIC_ACQUIRE);
        if (res == ncclSuccess && made)
            return res;
        if ((res != ncclSuccess && res != ncclInProgress) || zr_now_ns() > until_ns)
            return res ? res : ncclInProgress;
        nanosleep(&(struct timespec){.tv_nsec = 200000}, NULL);
    }
}

static int say_unready(const struct zr_nccl_set *p, void *lent, ncclResult_t res, int64_t timeout_ms)
{
    if (res == ncclInProgress)
        return zr_fail(ZR_ERR_TIMEOUT,
                       "nccl_comm, which was lent, is not ready after %lld ms (non-blocking?)",
                       (long long)timeout_ms);
    return zr_nccl_say(p, lent, res, "nccl_comm, which was lent");
}

int zr_nccl_lent_world(void *lent, int64_t timeout_ms, int *rank, int *world)
{
    struct zr_nccl_set *p = calloc(1, sizeof *p);
    if (!p)
        return zr_fail(ZR_ERR_NOMEM, "nccl_comm: no memory to ask it");
    int err = zr_nccl_load(NULL, true, &p->api);
    if (!err) {
        ncclResult_t res =
            zr_nccl_await(&p->api, lent, ncclInProgress, NULL, zr_now_ns() + timeout_ms * 1000000);
        if (!res)
            res = p->api.CommCount(lent, world);
        if (!res)
            res = p->api.CommUserRank(lent, rank);
        if (res)
            err = say_unready(p, lent, res, timeout_ms);
    }
    free(p);
    return err;
}

/* --- what ranks tell each other over it --- */

struct card {
    uint64_t loopback;     /* the same where it is the same */
    int32_t port;          /* of rank 0: where it listens; 0: nowhere */
    int32_t is_given;      /* of rank 0: the address is the user's */
    int32_t by_file;       /* ranks meet by a file that the user names */
    char address[256];     /* of rank 0: "" when it knows none beyond its host */
    struct zr_job_key key; /* of rank 0 */
    ZR_VERDICT(256);
};

/* This machine, and the network that its process sees: containers of one machine may have two. */
static uint64_t loopback_hash(void)
{
    struct zr_identity id;
    struct stat net = {0};
    zr_identity_read(&id);
    stat("/proc/self/ns/net", &net);
    return XXH3_64bits_withSeed(id.machine, strlen(id.machine), (uint64_t)net.st_ino);
}

/* A free port, kept by a socket that is bound and does not listen: others with SO_REUSEADDR, as libuv's are,
 * may listen there meanwhile, and nobody who asks for any port gets it. */
static int hold_port(int *held, int32_t *port)
{
    union zr_address a;
    socklen_t n = sizeof a;
    int fd = -EAFNOSUPPORT;
    for (int i = 0; i < 2 && (fd == -EAFNOSUPPORT || fd == -EADDRNOTAVAIL); i++) {
        zr_address_parse(i ? "0.0.0.0" : "::", 0, &a);
        fd = zr_address_bind(&a);
    }
    *held = fd < 0 ? -1 : fd;
    if (fd < 0 || getsockname(fd, &a.any, &n))
        return zr_fail(ZR_ERR_SYSTEM, "rank 0 has no port for the rendezvous: %s",
                       strerror(fd < 0 ? -fd : errno));
    *port = zr_address_port(&a);
    return 0;
}

static int fill_lent_card(const struct zr_world *w, int *held, struct card *c)
{
    memset(c, 0, sizeof *c);
    c->loopback = loopback_hash();
    c->by_file = w->file[0] != 0;
    if (w->rank != 0)
        return 0;
    snprintf(c->address, sizeof c->address, "%s", w->host);
    c->port = w->port;
    c->is_given = w->port != 0 || c->by_file;
    int err = zr_job_key_make(&c->key);
    return err || c->is_given ? err : hold_port(held, &c->port);
}

/* All ranks have the same cards and come to the same end. */
static int choose_address(const struct card *all, struct zr_world *w)
{
    const struct card *zero = &all[0];
    bool same_loopback = true;
    int err = zr_verdict_first(all, w->world, w->rank);
    if (err)
        return err;
    for (int r = 0; r < w->world; r++) {
        same_loopback &= all[r].loopback == zero->loopback;
        if (all[r].by_file != zero->by_file)
            return zr_fail(ZR_ERR_ARG,
                           "rank %d %s by a file:// and rank 0 %s: cfg.rendezvous, or ZERO_RENDEZVOUS, must "
                           "be the same on all ranks",
                           r, all[r].by_file ? "meets" : "does not meet",
                           zero->by_file ? "does" : "does not");
    }
    if (!zero->is_given && !same_loopback && !zero->address[0])
        return zr_fail(ZR_ERR_ARG,
                       "the ranks of nccl_comm are on several hosts, and none but the program knows by which "
                       "address they reach rank 0: set cfg.rendezvous or ZERO_RENDEZVOUS to tcp://host:port");
    snprintf(w->host, sizeof w->host, "%.*s", (int)sizeof zero->address - 1,
             zero->is_given || !same_loopback ? zero->address : "127.0.0.1");
    w->port = zero->port;
    w->key = zero->key;
    return 0;
}

/* --- moving them --- */

struct moving {
    struct zr_nccl_api api;
    ncclComm_t comm;
    cudaStream_t stream;
    char *all;
    int rank;
    int64_t until_ns;
};

static int gather_cards(void *arg)
{
    struct moving *m = arg;
    ncclResult_t res = m->api.AllGather(m->all + (size_t)m->rank * sizeof(struct card), m->all,
                                        sizeof(struct card), ncclInt8, m->comm, m->stream);
    return zr_nccl_await(&m->api, m->comm, res, NULL, m->until_ns);
}

/* What the all-gather works with. */
struct place {
    struct zr_stream *stream;
    struct zr_event *done;
    void *device, *host;
    int64_t bytes;
};

static int open_place(struct zr_device *dev, struct place *pl)
{
    const struct zr_device_ops *d = dev->ops;
    int err = d->stream_open(dev, ZR_STREAM_QUEUE, "lent", NULL, &pl->stream);
    if (!err)
        err = d->event_open(dev, &pl->done);
    if (!err)
        err = d->alloc(dev, pl->bytes, &pl->device);
    return err ? err : d->host_alloc(dev, pl->bytes, &pl->host);
}

static void close_place(struct zr_device *dev, struct place *pl)
{
    const struct zr_device_ops *d = dev->ops;
    d->stream_close(pl->stream);
    d->event_close(pl->done);
    if (pl->device)
        d->free(dev, pl->device, pl->bytes);
    if (pl->host)
        d->host_free(dev, pl->host, pl->bytes);
}

static int await_event(struct zr_nccl_set *p, const struct place *pl, void *lent, int64_t timeout_ms,
                       int64_t until_ns)
{
    for (;;) {
        ncclResult_t res = ncclSuccess;
        int done = p->dev->ops->event_query(pl->done);
        if (done)
            return done < 0 ? done : 0;
        if (p->api.CommGetAsyncError(lent, &res) || (res && res != ncclInProgress))
            return zr_nccl_say(p, lent, res, "nccl_comm, which was lent");
        if (zr_now_ns() > until_ns)
            return zr_fail(ZR_ERR_TIMEOUT,
                           "not all ranks of nccl_comm came to zero_wrap in %lld ms, or one lends none, or "
                           "another operation of the program's on it is in the way",
                           (long long)timeout_ms);
        nanosleep(&(struct timespec){.tv_nsec = 200000}, NULL);
    }
}

/* Copies this rank's card to the device, gathers, and copies all cards back. *left: something of it may still
 * be under way. */
static int move_cards(struct zr_nccl_set *p, const struct place *pl, void *lent, int64_t timeout_ms,
                      const struct card *mine, bool *left)
{
    const struct zr_device_ops *d = p->dev->ops;
    int64_t size = sizeof *mine, until_ns = zr_now_ns() + timeout_ms * 1000000;
    struct moving m = {.api = p->api,
                       .comm = lent,
                       .stream = d->stream_native(pl->stream),
                       .all = pl->device,
                       .rank = p->rank,
                       /* the deadline of the call around it passes first */
                       .until_ns = until_ns + 1000000000};
    char *slot = (char *)pl->host + p->rank * size;
    ncclResult_t res = ncclSuccess;
    memcpy(slot, mine, (size_t)size);
    int err = d->copy(pl->stream, (char *)pl->device + p->rank * size, slot, size);
    if (!err)
        err = zr_nccl_within(
            p, "ncclAllGather over nccl_comm, which was lent: not all of its ranks came to zero_wrap: it",
            timeout_ms, gather_cards, &m, sizeof m, &res);
    if (!err && res)
        err = say_unready(p, lent, res, timeout_ms);
    *left = p->stuck || res == ncclInProgress;
    if (!err)
        err = d->copy(pl->stream, pl->host, pl->device, pl->bytes);
    if (!err)
        err = d->event_record(pl->done, pl->stream);
    if (err)
        return err;
    err = await_event(p, pl, lent, timeout_ms, until_ns);
    *left = err != 0;
    return err;
}

int zr_nccl_lent_meet(struct zr_device *dev, void *lent, int64_t timeout_ms, struct zr_world *w, int *held,
                      bool *left)
{
    struct place pl = {.bytes = (int64_t)sizeof(struct card) * w->world};
    struct zr_nccl_set *p = calloc(1, sizeof *p);
    struct card mine;
    *held = -1;
    *left = false;
    if (!p)
        return zr_fail(ZR_ERR_NOMEM, "nccl_comm: no memory to meet over it");
    p->dev = dev;
    p->rank = w->rank;
    pthread_mutex_init(&p->lock, NULL);
    int err = zr_nccl_load(NULL, true, &p->api);
    if (!err && !dev->ops->stream_native)
        err = zr_fail(ZR_ERR_NOTSUP, "nccl_comm works on the cuda device, not on %s", dev->ops->name);
    if (!err)
        err = open_place(dev, &pl);
    if (!err) {
        zr_verdict_put(&mine, fill_lent_card(w, held, &mine));
        err = move_cards(p, &pl, lent, timeout_ms, &mine, left);
    }
    if (!err)
        err = choose_address(pl.host, w);
    if (err && *held >= 0) {
        close(*held);
        *held = -1;
    }
    if (!*left) {
        struct zr_kept kept;
        zr_keep(&kept, err);
        close_place(dev, &pl);
        zr_say_again(&kept);
    }
    pthread_mutex_destroy(&p->lock);
    free(p);
    return err;
}
