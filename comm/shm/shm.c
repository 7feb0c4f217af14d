/* SPDX-License-Identifier: Apache-2.0 */
/* shm.c: opens and closes the communicator of ranks on one host, and has its table of functions. shm.h
 * describes how it works. */
#include "comm/shm/shm.h"
#include "comm/backend.h"
#include "comm/meet/rendezvous.h"
#include "comm/topology.h"

#include <stdio.h>
#include <stdlib.h>

/* How long a waiting thread spins, and the number of streams that is assumed until zr_shm_link knows it. */
enum { SPIN_NS = 20000, LEAST_STREAMS = 2 };

static struct zr_shm *shm_of(struct zr_comm *c)
{
    return (struct zr_shm *)c;
}

static int shm_attach(struct zr_comm *c, struct zr_arena *a)
{
    struct zr_shm *m = shm_of(c);
    int err = zr_shm_map(m, a);
    if (err)
        return err;
    pthread_mutex_lock(&m->lock);
    m->mapped = true;
    pthread_mutex_unlock(&m->lock);
    m->base.alarm = &m->peer[m->base.group.rank].head->alarm;
    if (zr_first_code(&m->failure)) /* it was aborted before peers could be reached */
        zr_shm_fail(m, zr_first_code(&m->failure), zr_shm_self(m), m->failure.text);
    return 0;
}

static int shm_run(struct zr_comm *c, struct zr_stream *s, const struct zr_comm_op *op)
{
    return zr_op_queue_put(&shm_of(c)->queue, s, op);
}

static bool shm_has_room(struct zr_comm *c, int n_ops, int n_seg)
{
    return zr_op_queue_has_room(&shm_of(c)->queue, n_ops, n_seg);
}

static void shm_abort(struct zr_comm *c, int code, const char *why)
{
    struct zr_shm *m = shm_of(c);
    code = code ? code : ZERO_ERR_FAILED;
    zr_shm_fail(m, code, zr_shm_self(m), why ? why : zr_err_name(code));
}

static int shm_status(struct zr_comm *c, char *why, size_t why_bytes)
{
    struct zr_shm *m = shm_of(c);
    int code = zr_shm_adopt(m);
    if (!why || !why_bytes)
        return code;
    if (!code)
        why[0] = 0;
    else if (m->found_by == zr_shm_self(m))
        snprintf(why, why_bytes, "%s", m->failure.text);
    else
        snprintf(why, why_bytes, "%s (found by rank %d)", m->failure.text, m->found_by);
    return code;
}

static bool shm_last(struct zr_comm *c, char *text, size_t n_text)
{
    struct zr_post last = {.seq = 0};
    bool inside = shm_of(c)->mapped && zr_shm_last(shm_of(c), c->group.rank, &last);
    text[0] = 0;
    if (last.seq)
        zr_post_describe(&last, text, n_text);
    return inside;
}

/* Returns how long a waiting thread spins before it sleeps. It spins only if there is a core for each stream
 * of every rank. */
static int64_t choose_spin(const struct zr_shm *m, int n_streams)
{
    return zr_topology_has_cores(m->n_host, m->n_machine, n_streams) ? SPIN_NS : 0;
}

void zr_shm_link(struct zr_comm *const comm[], int n)
{
    int n_streams = 0;
    for (int i = 0; i < n; i++)
        n_streams += comm[i]->role != ZR_ROLE_CONTROL &&
                     comm[i]->role != ZR_ROLE_WORLD; /* these two work on the stream that reduces */
    for (int i = 0; i < n; i++) {
        struct zr_shm *m = shm_of(comm[i]);
        m->spin_ns = choose_spin(m, n_streams);
        for (int k = 0; k < n; k++)
            m->sibling[comm[k]->role] = shm_of(comm[k]);
    }
}

static void shm_close(struct zr_comm *c)
{
    struct zr_shm *m = shm_of(c);
    for (int r = 0; r < ZR_ROLES; r++)
        if (m->sibling[r])
            m->sibling[r]->sibling[c->role] = NULL;
    if (m->mapped) {
        /* Peers that wait for this rank would wait in vain. The memory stays while a peer maps it. */
        atomic_store(&m->peer[c->group.rank].head->closed, 1);
        zr_shm_wake_all(m);
        zr_shm_unmap(m);
    }
    zr_arena_drop(c->held);
    zr_op_queue_close(&m->queue);
    pthread_mutex_destroy(&m->lock);
    free(m);
}

static const struct zr_comm_ops shm_ops = {
    .name = "shm",
    .deterministic = true,
    .most_segs = ZR_RING_SEGS,
    .arena = zr_shm_arena,
    .attach = shm_attach,
    .run = shm_run,
    .abort = shm_abort,
    .status = shm_status,
    .last = shm_last,
    .has_room = shm_has_room,
    .close = shm_close,
};

static int too_many(int32_t n_ranks)
{
    return zr_fail(ZERO_ERR_NOTSUP, "shared memory among %d ranks: up to %d are allowed", n_ranks,
                   ZR_SHM_SIZE);
}

int zr_shm_open(struct zr_rendezvous *rdv, struct zr_device *dev, const struct zr_topology *t,
                const struct zr_group *group, enum zr_role role, int64_t timeout_ms, struct zr_comm **out)
{
    const char *name = zr_role_name(role);
    *out = NULL;
    if (group->size > ZR_SHM_SIZE)
        return zr_fail_more(too_many(group->size), "%s", name);
    if (group->local_size && group->local_size < group->size)
        return zr_rendezvous_fail(rdv, zr_fail(ZERO_ERR_NOTSUP,
                                               "%s: shared memory needs all ranks of a group on one host: of "
                                               "%d ranks only %d are on this host",
                                               name, group->size, group->local_size));
    if (timeout_ms <= 0 || timeout_ms > INT64_MAX / 2000000)
        return zr_fail(ZERO_ERR_ARG, "%s: timeout_ms is %lld: more than 0 is allowed", name,
                       (long long)timeout_ms);
    if (!dev->ops->compute_on_caller)
        return zr_fail(ZERO_ERR_NOTSUP, "%s: shared memory works on the host device, not on %s", name,
                       dev->ops->name);
    struct zr_shm *m = calloc(1, sizeof *m);
    if (!m || !zr_op_queue_open(&m->queue, &m->base, dev)) {
        free(m);
        return zr_rendezvous_fail(rdv, zr_fail(ZERO_ERR_NOMEM, "%s: no memory for a communicator", name));
    }
    m->base = (struct zr_comm){
        .ops = &shm_ops, .group = *group, .role = role, .alarm = &m->alarm, .failure = &m->failure};
    m->queue.move = zr_shm_move;
    m->queue.fail = shm_abort;
    m->sibling[role] = m;
    m->name = name;
    m->rdv = rdv;
    m->kernels = zr_host_kernels_best();
    m->timeout_ns = timeout_ms * 1000000;
    m->n_host = t ? t->local_size : zr_rendezvous_world(rdv);
    m->n_machine = t ? zr_topology_on_machine(t) : m->n_host;
    m->spin_ns = choose_spin(m, LEAST_STREAMS);
    pthread_mutex_init(&m->lock, NULL);
    for (int i = 0; i < ZR_SHM_SIZE; i++)
        m->peer[i].pidfd = -1;
    *out = &m->base;
    return 0;
}

static int shm_open_roles(struct zr_rendezvous *rdv, struct zr_device *dev,
                          const struct zr_backend_config *config, const struct zr_role_ask ask[ZR_ROLES],
                          struct zr_comm *comm[ZR_ROLES])
{
    struct zr_comm *open[ZR_ROLES];
    int err = 0, n = 0;
    for (int r = 0; !err && r < ZR_ROLES; r++)
        if (ask[r].group) {
            err = zr_shm_open(rdv, dev, config->topology, ask[r].group, (enum zr_role)r, config->timeout_ms,
                              &comm[r]);
            open[n++] = comm[r];
        }
    if (!err)
        zr_shm_link(open, n);
    return err;
}

static int shm_check_hosts(const struct zr_topology *t, const struct zr_group *all)
{
    int err = zr_topology_one_host(t, all->members, all->size);
    return err || all->size <= ZR_SHM_SIZE ? err : too_many(all->size);
}

const struct zr_backend zr_backend_shm = {
    .name = "shm",
    .device = "host",
    .check_hosts = shm_check_hosts,
    .open = shm_open_roles,
};
