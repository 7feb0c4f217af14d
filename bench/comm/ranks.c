/* SPDX-License-Identifier: Apache-2.0 */
/* ranks.c: opens and closes the communicators of zero-bench comm. */
#include "bench/comm/ranks.h"
#include "bench/arguments.h"
#include "bench/report/report.h"

#include "comm/first_error.h"
#include "kernels/alloc.h"
#include "kernels/host/host_memory.h"
#include "zero/zero.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { TIMEOUT_MS = 60000 };

#define DECLARED(name, value, key, text) extern const struct zr_backend zr_backend_##key;
ZERO_BACKEND_MAP(DECLARED)
#undef DECLARED

static const struct {
    const struct zr_backend *kind;
    int number;
} known[] = {
#define KNOWN(name, value, key, text) {&zr_backend_##key, value},
    ZERO_BACKEND_MAP(KNOWN)
#undef KNOWN
};
#define N_KNOWN ((int)(sizeof known / sizeof known[0]))
_Static_assert(N_KNOWN <= COMM_BACKENDS, "struct comm_ranks has an element for each backend");

const char *comm_backend_names(void)
{
    static char text[256];
    text[0] = 0;
    for (int i = 0; i < N_KNOWN; i++)
        option_list(text, sizeof text, known[i].kind->name, i + 1 == N_KNOWN);
    return text;
}

static int64_t bit_of(int i)
{
    return INT64_C(1) << known[i].number;
}

int64_t comm_backend_bit(const char *name, size_t n_name)
{
    for (int i = 0; i < N_KNOWN; i++)
        if (strlen(known[i].kind->name) == n_name && !memcmp(known[i].kind->name, name, n_name))
            return bit_of(i);
    return 0;
}

bool comm_backend_is_mpi(const struct comm_backend *b)
{
    return b->kind == &zr_backend_mpi;
}

/* ---- meeting ---- */

/* The record that each rank sends to the others before communicators are opened: its error, if it has one,
 * and its options. */
struct record {
    ZR_FIRST_ERROR(256);
    struct comm_asked asked;
};

/* Tells the other ranks err and this thread's message. Returns the error of the first rank that has one, so
 * that all ranks go on or none does. Ranks must also have the same options. */
static int agree(struct comm_ranks *r, int err, const struct comm_asked *a)
{
    int n = r->world.world, me = r->world.rank;
    struct record mine = {.asked = *a}, *all;
    if (ZR_ZALLOC(all, n, "the messages of %d ranks", n))
        return zr_rendezvous_fail(r->rdv, ZERO_ERR_NOMEM);
    zr_first_error_put(&mine, err);
    int met = zr_rendezvous_exchange(r->rdv, &mine, sizeof mine, all);
    err = zr_first_error(met, &mine, all, n, me);
    for (int i = 1; i < n && !err; i++)
        if (memcmp(&all[i].asked, &all[0].asked, sizeof all[0].asked))
            err = zr_fail(ZERO_ERR_MISMATCH, "rank %d was given other options than rank 0", i);
    free(all);
    return err;
}

int comm_ranks_meet(struct comm_ranks *r, const struct comm_asked *a)
{
    int err = zr_world_find(-1, 0, NULL, &r->world);
    err = err ? err : zr_world_interface(NULL, &r->world); /* the network interface: ZERO_INTERFACE, or any */
    if (err)
        return err;
    if (uv_loop_init(&r->loop))
        return zr_fail(ZERO_ERR_SYSTEM, "no event loop");
    r->has_loop = true;
    err = zr_rendezvous_open(&r->loop, &r->world, TIMEOUT_MS, &r->rdv);
    err = err ? err : zr_topology_probe(r->rdv, NULL, 0, &r->topology);
    err = err ? err : agree(r, 0, a);
    err = err ? err
              : zr_mesh_make(&r->topology,
                             &(struct zr_mesh_sizes){1, 1, 1, a->group ? (int32_t)a->group : r->world.world},
                             &r->mesh);
    if (err)
        return err;
    r->group = a->across ? &r->mesh.replicate_group : &r->mesh.shard_group;
    return a->across && r->mesh.dp_replicate == 1
               ? zr_fail(ZERO_ERR_ARG, "groups of %d ranks in a world of %d: there is nothing between them",
                         r->mesh.dp_shard, r->world.world)
               : 0;
}

/* ---- opening ---- */

static const char *device_of(const struct comm_asked *a)
{
    return a->cuda ? "cuda" : "host";
}

static bool is_for(const struct comm_ranks *r, const struct comm_asked *a, const struct zr_backend *b)
{
    return (!b->device || strcmp(b->device, device_of(a)) == 0) && (!b->alone || r->world.world == 1);
}

/* Returns the error for a backend that was asked for by name, but does not work with this device or number of
 * ranks. */
static int refuse(const struct comm_ranks *r, const struct comm_asked *a, const struct zr_backend *b)
{
    return b->alone && r->world.world > 1
               ? zr_fail(ZERO_ERR_ARG, "--backend: %s is for one rank, and there are %d", b->name,
                         r->world.world)
               : zr_fail(ZERO_ERR_ARG, "--backend: %s is for device %s, and device is %s", b->name, b->device,
                         device_of(a));
}

/* Adds a backend and this thread's message to the list of backends that are left out. */
static void leave_out(struct comm_ranks *r, const struct zr_backend *b)
{
    size_t used = strlen(r->left_out);
    snprintf(r->left_out + used, sizeof r->left_out - used, "%s%s: %s", used ? "; " : "", b->name,
             zr_error_text());
}

/* Chooses the backends that were asked for. If none was, chooses all that work with this device and these
 * ranks. The result is the same on all ranks. */
static int choose(struct comm_ranks *r, const struct comm_asked *a)
{
    for (int i = 0; i < N_KNOWN; i++) {
        const struct zr_backend *b = known[i].kind;
        if (a->backends ? !(a->backends & bit_of(i)) : !is_for(r, a, b))
            continue;
        if (!is_for(r, a, b))
            return refuse(r, a, b);
        int err = b->check_hosts ? b->check_hosts(&r->topology, &r->mesh.dp_group) : 0;
        if (err && a->backends)
            return zr_fail_more(err, "--backend: %s", b->name);
        if (err)
            leave_out(r, b);
        else
            r->backend[r->n_backends++].kind = b;
    }
    return r->n_backends ? 0 : zr_fail(ZERO_ERR_NOTSUP, "no backend joins these ranks: %s", r->left_out);
}

static int no_room(int64_t bytes, int64_t free_bytes, const char *where)
{
    return zr_fail(ZERO_ERR_NOMEM,
                   "%s are wanted by each rank, and %s are free %s: give smaller sizes with --bytes",
                   report_bytes(bytes).text, report_bytes(free_bytes).text, where);
}

/* Checks that there is memory for everything at once: `bytes` on this rank's GPU, or in host memory for each
 * rank of this machine. Otherwise the kernel would kill a process later. */
static int check_room(const struct comm_ranks *r, int64_t bytes)
{
    struct zr_host_memory m;
    int64_t free_bytes = INT64_MAX, total_bytes;
    char where[ZR_GROUP_PATH_BYTES + 64];
    int n_ranks = zr_topology_on_machine(&r->topology);
    if (r->dev->ops->memory) {
        int err = r->dev->ops->memory(r->dev, &free_bytes, &total_bytes);
        return err || bytes <= free_bytes ? err : no_room(bytes, free_bytes, "on this GPU");
    }
    zr_host_memory_look("", &m);
    for (int i = 0; i < m.n_groups; i++)
        if (bytes > m.group[i].free_bytes) {
            snprintf(where, sizeof where, "in memory control group %s", m.group[i].path);
            return no_room(bytes, m.group[i].free_bytes, where);
        }
    snprintf(where, sizeof where, "for %d on this machine", n_ranks);
    return bytes <= m.free_bytes / n_ranks ? 0 : no_room(bytes, m.free_bytes, where);
}

/* Sets what a backend opens for each role. With one shard group, only gather and reduce are opened, and both
 * span all ranks. With several, control spans all ranks, and the other roles join the shard groups. Of those,
 * only gather outer and reduce outer are used.
 *
 * A call has one slice for each rank, so it packs at most one, of small_bytes. */
static void ask_roles(const struct comm_ranks *r, const struct zr_backend *b, int64_t slice_bytes,
                      struct zr_role_ask ask[ZR_ROLES])
{
    memset(ask, 0, ZR_ROLES * sizeof *ask);
    for (int role = 0; role < ZR_ROLES; role++) {
        bool in_shard_group = role == ZR_ROLE_GATHER || role == ZR_ROLE_REDUCE;
        if (!in_shard_group && r->mesh.dp_replicate == 1)
            continue;
        ask[role].group = role == ZR_ROLE_CONTROL ? &r->mesh.dp_group
                          : in_shard_group        ? &r->mesh.shard_group
                                                  : &r->mesh.replicate_group;
        ask[role].largest_bytes = role == ZR_ROLE_CONTROL ? 0 : slice_bytes;
        ask[role].packed_bytes = role == ZR_ROLE_CONTROL ? 0 : b->small_bytes;
    }
}

/* Whether a backend sums in the fixed tree. Without --deterministic it does, unless it has a faster way. */
static bool is_deterministic(const struct comm_asked *a, const struct zr_backend *b)
{
    return a->deterministic == ZERO_AUTO ? !b->costly_tree : a->deterministic;
}

/* Returns the bytes of a backend's arena: `bytes` for slices, and what its communicators reserve at the
 * end. */
static int64_t arena_bytes_of(const struct comm_ranks *r, const struct comm_asked *a,
                              const struct zr_backend *b, int64_t slice_bytes, int64_t bytes)
{
    struct zr_role_ask ask[ZR_ROLES];
    ask_roles(r, b, slice_bytes, ask);
    for (int role = 0; b->reserve && role < ZR_ROLES; role++)
        if (ask[role].group)
            bytes += b->reserve((enum zr_role)role, &ask[role], is_deterministic(a, b));
    return bytes;
}

static void close_backend(struct comm_backend *b)
{
    for (int role = 0; role < ZR_ROLES; role++)
        if (b->comm[role])
            zr_comm_close(b->comm[role]);
    memset(b->comm, 0, sizeof b->comm);
}

/* Gives all of a backend's communicators one arena. */
static int give_arena(struct comm_backend *b, int64_t bytes)
{
    struct zr_arena *arena = NULL;
    int err = zr_comm_arena(b->comm[ZR_ROLE_GATHER], bytes, &arena);
    if (err)
        return err;
    for (int role = 0; role < ZR_ROLES && !err; role++)
        if (b->comm[role])
            err = zr_comm_attach(b->comm[role], arena);
    b->arena = arena->base;
    zr_arena_drop(arena);
    return err;
}

static int open_backend(struct comm_ranks *r, const struct comm_asked *a, struct comm_backend *b,
                        int64_t slice_bytes, int64_t bytes)
{
    struct zr_role_ask ask[ZR_ROLES];
    const struct zr_backend_config config = {.timeout_ms = TIMEOUT_MS,
                                             .deterministic = is_deterministic(a, b->kind),
                                             .flat = a->flat,
                                             .topology = &r->topology};
    ask_roles(r, b->kind, slice_bytes, ask);
    int err = b->kind->open(r->rdv, r->dev, &config, ask, b->comm);
    err = err ? err : give_arena(b, arena_bytes_of(r, a, b->kind, slice_bytes, bytes));
    if (err)
        return err;
    b->gather = b->comm[a->across ? ZR_ROLE_GATHER_OUTER : ZR_ROLE_GATHER];
    b->reduce = b->comm[a->across ? ZR_ROLE_REDUCE_OUTER : ZR_ROLE_REDUCE];
    b->all = b->comm[b->comm[ZR_ROLE_CONTROL] ? ZR_ROLE_CONTROL : ZR_ROLE_REDUCE];
    /* the transport: how bytes travel between ranks */
    b->path = b->kind->path ? b->kind->path(b->comm[ZR_ROLE_GATHER]) : b->kind->name;
    return 0;
}

/* A backend whose library is missing is left out, unless it was asked for by name. */
static int open_backends(struct comm_ranks *r, const struct comm_asked *a, int64_t slice_bytes, int64_t bytes)
{
    int n_open = 0, err = 0;
    for (int i = 0; i < r->n_backends && !err; i++) {
        struct comm_backend b = {.kind = r->backend[i].kind};
        err = open_backend(r, a, &b, slice_bytes, bytes);
        if (err == ZERO_ERR_NOTSUP && !a->backends) {
            leave_out(r, b.kind);
            close_backend(&b);
            err = 0;
        } else
            r->backend[n_open++] = b;
    }
    r->n_backends = n_open;
    return err || n_open ? err : zr_fail(ZERO_ERR_NOTSUP, "no backend joins these ranks: %s", r->left_out);
}

/* Opens the device and its stream, and checks memory: the part of opening that this rank does alone. */
static int open_device(struct comm_ranks *r, const struct comm_asked *a, int64_t bytes)
{
    int err = a->cuda ? zr_cuda_device_open(r->world.local_rank, &r->dev) : zr_host_device_open(&r->dev);
    err = err ? err : r->dev->ops->stream_open(r->dev, ZR_STREAM_QUEUE, "comm", NULL, &r->stream);
    return err ? err : check_room(r, bytes);
}

/* ---- lost ranks ---- */

/* Ends all collectives that wait. */
static void abort_all(struct comm_ranks *r, int code, const char *why)
{
    for (int i = 0; i < r->n_backends; i++)
        for (int role = 0; role < ZR_ROLES; role++)
            if (r->backend[i].comm[role])
                r->backend[i].comm[role]->ops->abort(r->backend[i].comm[role], code, why);
    if (zr_mpi_own_blocks()) { /* a blocking collective of MPI, such as MPI_Allgather, may never return */
        fprintf(stderr, "zero-bench comm: %s\n", why);
        _exit(EXIT_FAILURE);
    }
}

static void on_lost(void *arg, int rank, const char *why)
{
    char text[512];
    snprintf(text, sizeof text, "rank %d was lost: %s", rank, why);
    abort_all(arg, ZERO_ERR_PEER, text);
}

static void on_failed(void *arg, int code, const char *text)
{
    abort_all(arg, code, text);
}

static void on_stop(uv_async_t *stop)
{
    struct comm_ranks *r = stop->data;
    zr_rendezvous_close(r->rdv);
    uv_close((uv_handle_t *)stop, NULL);
}

static void run_loop(void *arg)
{
    struct comm_ranks *r = arg;
    uv_run(&r->loop, UV_RUN_DEFAULT);
}

/* Gives the loop to a thread. From then on, on_lost and on_failed are called when a rank is lost or fails,
 * while collectives wait. */
static int start_loop(struct comm_ranks *r)
{
    if (uv_async_init(&r->loop, &r->stop, on_stop))
        return zr_fail(ZERO_ERR_SYSTEM, "no handle of an event loop");
    r->stop.data = r;
    zr_rendezvous_detach(r->rdv, on_lost, on_failed, r);
    int err = zr_thread_start(&r->thread, "zero-loop", run_loop, r);
    r->has_thread = !err;
    if (err)
        uv_close((uv_handle_t *)&r->stop, NULL);
    return err;
}

int comm_ranks_open(struct comm_ranks *r, const struct comm_asked *a, int64_t slice_bytes,
                    int64_t arena_bytes, int64_t other_bytes)
{
    int64_t bytes = other_bytes;
    int err = choose(r, a);
    if (err) /* the same error on all ranks */
        return err;
    for (int i = 0; i < r->n_backends; i++)
        bytes += arena_bytes_of(r, a, r->backend[i].kind, slice_bytes, arena_bytes);
    err = agree(r, open_device(r, a, bytes), a);
    err = err ? err : open_backends(r, a, slice_bytes, arena_bytes);
    return err ? err : start_loop(r);
}

int comm_ranks_sync(struct comm_ranks *r)
{
    char why[512];
    int err = r->dev->ops->stream_sync(r->stream);
    for (int i = 0; i < r->n_backends && !err; i++)
        for (int role = 0; role < ZR_ROLES && !err; role++) {
            struct zr_comm *c = r->backend[i].comm[role];
            int code = c ? zr_comm_status(c, why, sizeof why) : 0;
            err = code ? zr_fail(code, "%s", why) : 0;
        }
    return err;
}

/* Whether some work of a failed communicator will never end. It may still use the device's memory, which is
 * then not freed. */
static bool is_stuck(const struct comm_ranks *r)
{
    for (int i = 0; i < r->n_backends; i++)
        for (int role = 0; role < ZR_ROLES; role++) {
            struct zr_comm *c = r->backend[i].comm[role];
            if (c && c->ops->stuck && c->ops->stuck(c))
                return true;
        }
    return false;
}

static void stop_loop(struct comm_ranks *r, int err)
{
    if (err && r->has_thread)
        zr_rendezvous_report(r->rdv, err, zr_error_text());
    if (r->has_thread) {
        uv_async_send(&r->stop);
        zr_thread_join(&r->thread);
    }
}

void comm_ranks_close(struct comm_ranks *r, int err)
{
    struct zr_saved_error kept;
    zr_error_save(&kept, err);
    stop_loop(r, err);
    bool stuck = err && is_stuck(r);
    if (r->stream && !stuck)
        r->dev->ops->stream_close(r->stream);
    for (int i = 0; i < r->n_backends; i++)
        close_backend(&r->backend[i]);
    if (r->dev && !stuck)
        r->dev->ops->close(r->dev);
    zr_rendezvous_free(r->rdv);
    if (r->has_loop) {
        uv_run(&r->loop, UV_RUN_NOWAIT);
        uv_loop_close(&r->loop);
    }
    zr_mesh_free(&r->mesh);
    zr_topology_free(&r->topology);
    zr_error_restore(&kept);
}
