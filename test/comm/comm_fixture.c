/* SPDX-License-Identifier: Apache-2.0 */
/* comm_fixture.c: opens and closes what comm_fixture.h describes. */
#include "test/comm/comm_fixture.h"

#include <string.h>

static const enum zr_role roles[MAX_COMMS] = {ZR_ROLE_GATHER, ZR_ROLE_REDUCE};

static int open_host(const struct zr_world *w, struct zr_device **out)
{
    (void)w;
    return zr_host_device_open(out);
}

static int open_self(struct fixture *o, int n, int64_t timeout_ms)
{
    int err = 0;
    (void)timeout_ms;
    for (int i = 0; i < n && !err; i++)
        err = zr_self_open(o->dev, roles[i], &o->comm[i]);
    return err;
}

static int open_shm(struct fixture *o, int n, int64_t timeout_ms)
{
    int err = 0;
    for (int i = 0; i < n && !err; i++)
        err = zr_shm_open(o->rdv, o->dev, NULL, &o->group, roles[i], timeout_ms, &o->comm[i]);
    return err;
}

const struct fixture_kind fixture_self = {.open_device = open_host, .open_comms = open_self, .exact = true};
const struct fixture_kind fixture_shm = {.open_device = open_host, .open_comms = open_shm, .exact = true};

static void find_group(struct fixture *o, const struct zr_world *w, const struct fixture_groups *g)
{
    int at = 0, first, end;
    if (!g) {
        o->group = zr_group_of_all(w->rank, w->world);
        o->group.local_size = w->world; /* as a topology of one host says */
        o->group.local_rank = w->rank;
        return;
    }
    while (g->deal[at] != w->rank)
        at++;
    first = at < g->n_first ? 0 : g->n_first;
    end = at < g->n_first ? g->n_first : w->world;
    memcpy(o->members, g->deal + first, (size_t)(end - first) * sizeof *o->members);
    o->group = (struct zr_group){.size = end - first, .rank = at - first, .members = o->members};
    o->group.local_size = o->group.size;
    o->group.local_rank = o->group.rank;
}

int fixture_open(struct fixture *o, const struct zr_world *w, const struct fixture_kind *kind, int n,
                 int64_t timeout_ms, int64_t arena_bytes)
{
    return fixture_open_groups(o, w, NULL, kind, n, timeout_ms, arena_bytes);
}

int fixture_open_groups(struct fixture *o, const struct zr_world *w, const struct fixture_groups *groups,
                        const struct fixture_kind *kind, int n, int64_t timeout_ms, int64_t arena_bytes)
{
    memset(o, 0, sizeof *o);
    find_group(o, w, groups);
    uv_loop_init(&o->loop);
    o->n = n;
    int err = zr_rendezvous_open(&o->loop, w, 30000, &o->rdv);
    if (!err)
        err = kind->open_device(w, &o->dev);
    if (!err)
        err = kind->open_comms(o, n, timeout_ms);
    for (int i = 0; i < n && !err; i++) {
        err = o->dev->ops->stream_open(o->dev, ZR_STREAM_QUEUE, zr_role_name(roles[i]), NULL, &o->stream[i]);
        int64_t more = kind->reserve_bytes ? kind->reserve_bytes(w->world, i) : 0;
        if (!err && arena_bytes)
            err = fixture_arena(o->comm[i], arena_bytes + more, &o->base[i]);
    }
    return err;
}

int fixture_arena(struct zr_comm *c, int64_t bytes, char **base)
{
    struct zr_arena *a;
    int err = zr_comm_arena(c, bytes, &a);
    if (err)
        return err;
    err = zr_comm_attach(c, a);
    if (!err)
        *base = a->base;
    zr_arena_drop(a);
    return err;
}

int fixture_open_more(struct fixture *more, struct fixture *o, const struct zr_world *w,
                      const struct fixture_groups *groups, const struct fixture_kind *kind,
                      int64_t timeout_ms)
{
    memset(more, 0, sizeof *more);
    find_group(more, w, groups);
    more->rdv = o->rdv;
    more->dev = o->dev;
    return kind->open_comms(more, 2, timeout_ms);
}

void fixture_close_more(struct fixture *more)
{
    for (int i = 0; i < 2; i++)
        if (more->comm[i])
            zr_comm_close(more->comm[i]);
}

bool fixture_close(struct fixture *o)
{
    for (int i = 0; i < MAX_COMMS; i++) {
        if (o->stream[i])
            o->dev->ops->stream_close(o->stream[i]);
        if (o->comm[i])
            zr_comm_close(o->comm[i]);
    }
    if (o->dev)
        o->dev->ops->close(o->dev);
    zr_rendezvous_free(o->rdv);
    return uv_loop_close(&o->loop) == 0;
}

int fixture_store(struct fixture *o, int i, const char *from, int64_t bytes)
{
    int err = o->dev->ops->copy(o->stream[i], o->base[i], from, bytes);
    return err ? err : o->dev->ops->stream_sync(o->stream[i]);
}

int fixture_fetch(struct fixture *o, int i, char *to, int64_t bytes)
{
    int err = o->dev->ops->copy(o->stream[i], to, o->base[i], bytes);
    return err ? err : o->dev->ops->stream_sync(o->stream[i]);
}

void note_status(struct rank *me, struct zr_comm *c)
{
    me->code = zr_comm_status(c, me->note, sizeof me->note);
}

void wait_failed(struct zr_comm *c)
{
    /* Watch only the alarm: this rank must be notified of a failure without looking for it. */
    for (int i = 0; i < 30000 && !atomic_load(c->alarm); i++)
        sleep_ms(1);
}

void *abort_soon(void *arg)
{
    struct zr_comm *c = arg;
    sleep_ms(30);
    c->ops->abort(c, ZERO_ERR_ORDER, "the model called out of order");
    c->ops->abort(c, ZERO_ERR_IO, "a later cause changes nothing");
    return NULL;
}
