/* SPDX-License-Identifier: Apache-2.0 */
/* nccl_lent.c: reads the ranks of a communicator that the program lends, and lets them agree on where they
 * meet. The address goes to all ranks by one all-gather (comm/meet/lent.h). The communicator is split later
 * (nccl_open.c). */
#include "comm/meet/lent.h"
#include "comm/meet/rendezvous.h"
#include "comm/nccl/nccl_comm.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

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
        return zr_fail(ZERO_ERR_TIMEOUT,
                       "nccl_comm is not ready after %lld ms (start_timeout_ms); is it non-blocking?",
                       (long long)timeout_ms);
    return zr_nccl_say(p, lent, res, "nccl_comm");
}

int zr_nccl_lent_world(void *lent, int64_t timeout_ms, int *rank, int *world)
{
    struct zr_nccl_set *p = calloc(1, sizeof *p);
    if (!p)
        return zr_fail(ZERO_ERR_NOMEM, "nccl_comm: no memory to query it");
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

/* --- moving cards --- */

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
    ncclResult_t res = m->api.AllGather(m->all + (size_t)m->rank * sizeof(struct zr_lent_card), m->all,
                                        sizeof(struct zr_lent_card), ncclInt8, m->comm, m->stream);
    return zr_nccl_await(&m->api, m->comm, res, NULL, m->until_ns);
}

/* The stream, event and memory that the all-gather uses. */
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
            return zr_nccl_say(p, lent, res, "nccl_comm");
        if (zr_now_ns() > until_ns)
            return zr_fail(ZERO_ERR_TIMEOUT,
                           "not all ranks of nccl_comm came to zero_wrap in %lld ms (start_timeout_ms), or "
                           "one has no nccl_comm, or another operation of the program on it is pending",
                           (long long)timeout_ms);
        nanosleep(&(struct timespec){.tv_nsec = 200000}, NULL);
    }
}

/* Copies this rank's card to the device, gathers, and copies all cards back. *left: something may still be
 * running. */
static int move_cards(struct zr_nccl_set *p, const struct place *pl, void *lent, int64_t timeout_ms,
                      const struct zr_lent_card *mine, bool *left)
{
    const struct zr_device_ops *d = p->dev->ops;
    int64_t size = sizeof *mine, until_ns = zr_now_ns() + timeout_ms * 1000000;
    struct moving m = {.api = p->api,
                       .comm = lent,
                       .stream = d->stream_native(pl->stream),
                       .all = pl->device,
                       .rank = p->rank,
                       /* The deadline of the call around it passes first. */
                       .until_ns = until_ns + 1000000000};
    char *slot = (char *)pl->host + p->rank * size;
    ncclResult_t res = ncclSuccess;
    memcpy(slot, mine, (size_t)size);
    int err = d->copy(pl->stream, (char *)pl->device + p->rank * size, slot, size);
    if (!err)
        err = zr_nccl_timed_call(p, "ncclAllGather over nccl_comm (not all of its ranks came to zero_wrap)",
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
    struct place pl = {.bytes = (int64_t)sizeof(struct zr_lent_card) * w->world};
    struct zr_nccl_set *p = calloc(1, sizeof *p);
    struct zr_lent_card mine;
    *held = -1;
    *left = false;
    if (!p)
        return zr_fail(ZERO_ERR_NOMEM, "nccl_comm: no memory to meet over it");
    p->dev = dev;
    p->rank = w->rank;
    pthread_mutex_init(&p->lock, NULL);
    int err = zr_nccl_load(NULL, true, &p->api);
    if (!err && !dev->ops->stream_native)
        err = zr_fail(ZERO_ERR_NOTSUP, "nccl_comm works on the cuda device, not on %s", dev->ops->name);
    if (!err)
        err = open_place(dev, &pl);
    if (!err) {
        zr_first_error_put(&mine, zr_lent_fill(w, held, &mine));
        err = move_cards(p, &pl, lent, timeout_ms, &mine, left);
    }
    if (!err)
        err = zr_lent_choose(pl.host, "nccl_comm", w);
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
