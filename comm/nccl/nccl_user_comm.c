/* SPDX-License-Identifier: Apache-2.0 */
/* nccl_user_comm.c: reads the ranks of the program's own communicator, and exchanges the bytes over it by
 * which they meet (comm/meet/user_comm.h). The communicator is split later (nccl_open.c). */
#include "comm/meet/rendezvous.h"
#include "comm/meet/user_comm.h"
#include "comm/nccl/nccl_comm.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

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

static int say_unready(const struct zr_nccl_set *p, void *user_comm, ncclResult_t res, int64_t timeout_ms)
{
    if (res == ncclInProgress)
        return zr_fail(ZERO_ERR_TIMEOUT,
                       "nccl_comm is not ready after %lld ms (start_timeout_ms); is it non-blocking?",
                       (long long)timeout_ms);
    return zr_nccl_say(p, user_comm, res, "nccl_comm");
}

int zr_nccl_user_comm_world(void *user_comm, int64_t timeout_ms, int *rank, int *world)
{
    struct zr_nccl_set *p = calloc(1, sizeof *p);
    if (!p)
        return zr_fail(ZERO_ERR_NOMEM, "nccl_comm: no memory to query it");
    int err = zr_nccl_load(NULL, true, &p->api);
    if (!err) {
        ncclResult_t res =
            zr_nccl_await(&p->api, user_comm, ncclInProgress, NULL, zr_now_ns() + timeout_ms * 1000000);
        if (!res)
            res = p->api.CommCount(user_comm, world);
        if (!res)
            res = p->api.CommUserRank(user_comm, rank);
        if (res)
            err = say_unready(p, user_comm, res, timeout_ms);
    }
    free(p);
    return err;
}

/* --- an all-gather of bytes --- */

struct moving {
    struct zr_nccl_api api;
    ncclComm_t comm;
    cudaStream_t stream;
    char *all;
    size_t bytes;
    int rank;
    int64_t until_ns;
};

static int gather_bytes(void *arg)
{
    struct moving *m = arg;
    ncclResult_t res =
        m->api.AllGather(m->all + (size_t)m->rank * m->bytes, m->all, m->bytes, ncclInt8, m->comm, m->stream);
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
    int err = d->stream_open(dev, ZR_STREAM_QUEUE, "exchange", NULL, &pl->stream);
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

static int await_event(struct zr_nccl_set *p, const struct place *pl, void *user_comm, int64_t timeout_ms,
                       int64_t until_ns)
{
    for (;;) {
        ncclResult_t res = ncclSuccess;
        int done = p->dev->ops->event_query(pl->done);
        if (done)
            return done < 0 ? done : 0;
        if (p->api.CommGetAsyncError(user_comm, &res) || (res && res != ncclInProgress))
            return zr_nccl_say(p, user_comm, res, "nccl_comm");
        if (zr_now_ns() > until_ns)
            return zr_fail(ZERO_ERR_TIMEOUT,
                           "not all ranks of nccl_comm came to zero_wrap in %lld ms (start_timeout_ms), or "
                           "one has no nccl_comm, or another operation of the program on it is pending",
                           (long long)timeout_ms);
        nanosleep(&(struct timespec){.tv_nsec = 200000}, NULL);
    }
}

/* Copies this rank's bytes to the device, gathers, and copies those of all ranks back. c->is_left: something
 * may still be running. */
static int move_bytes(struct zr_nccl_set *p, const struct place *pl, struct zr_user_comm *c, const void *mine,
                      size_t bytes)
{
    const struct zr_device_ops *d = p->dev->ops;
    int64_t until_ns = zr_now_ns() + c->timeout_ms * 1000000;
    struct moving m = {.api = p->api,
                       .comm = c->comm,
                       .stream = d->stream_native(pl->stream),
                       .all = pl->device,
                       .bytes = bytes,
                       .rank = p->rank,
                       /* The deadline of the call around it passes first. */
                       .until_ns = until_ns + 1000000000};
    size_t at = (size_t)p->rank * bytes;
    ncclResult_t res = ncclSuccess;
    memcpy((char *)pl->host + at, mine, bytes);
    int err = d->copy(pl->stream, (char *)pl->device + at, (char *)pl->host + at, (int64_t)bytes);
    if (!err)
        err = zr_nccl_timed_call(p, "ncclAllGather over nccl_comm (not all of its ranks came to zero_wrap)",
                                 c->timeout_ms, gather_bytes, &m, sizeof m, &res);
    if (!err && res)
        err = say_unready(p, c->comm, res, c->timeout_ms);
    c->is_left = p->stuck || res == ncclInProgress;
    if (!err)
        err = d->copy(pl->stream, pl->host, pl->device, pl->bytes);
    if (!err)
        err = d->event_record(pl->done, pl->stream);
    if (err)
        return err;
    err = await_event(p, pl, c->comm, c->timeout_ms, until_ns);
    c->is_left = err != 0;
    return err;
}

int zr_nccl_exchange(struct zr_user_comm *c, const void *mine, void *all, size_t bytes)
{
    struct place pl = {.bytes = (int64_t)bytes * c->w->world};
    struct zr_nccl_set *p = calloc(1, sizeof *p);
    struct zr_device *dev = c->dev;
    c->is_left = false;
    if (!p)
        return zr_fail(ZERO_ERR_NOMEM, "nccl_comm: no memory to meet over it");
    p->dev = dev;
    p->rank = c->w->rank;
    pthread_mutex_init(&p->lock, NULL);
    int err = zr_nccl_load(NULL, true, &p->api);
    if (!err && !dev->ops->stream_native)
        err = zr_fail(ZERO_ERR_NOTSUP, "nccl_comm works on the cuda device, not on %s", dev->ops->name);
    if (!err)
        err = open_place(dev, &pl);
    if (!err)
        err = move_bytes(p, &pl, c, mine, bytes);
    if (!err)
        memcpy(all, pl.host, (size_t)pl.bytes);
    if (!c->is_left) {
        struct zr_saved_error kept;
        zr_error_save(&kept, err);
        close_place(dev, &pl);
        zr_error_restore(&kept);
    }
    pthread_mutex_destroy(&p->lock);
    free(p);
    return err;
}
