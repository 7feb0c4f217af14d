/* SPDX-License-Identifier: Apache-2.0 */
/* mpi_open.c: opens and closes communicators over MPI, and has the backend's row.
 *
 * The ranks are connected by the rendezvous already. Over it they check that they have the same MPI, and that
 * it has all of them as ranks, before any of them waits inside MPI. */
#include "comm/fold.h"
#include "comm/meet/rendezvous.h"
#include "comm/mpi/mpi_comm.h"
#include "comm/timed_call.h"
#include "comm/topology.h"
#include "kernels/alloc.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* CLOSE_MS: time limit of MPI_Comm_free, which waits for no other rank in existing libraries. REST_NS: time
 * for pending requests to end when a communicator is closed. RETRY_NS: pause of ranks that do not all have a
 * turn. */
enum { CLOSE_MS = 5000, REST_NS = 100 * 1000 * 1000, RETRY_NS = 2 * 1000 * 1000 };

/* ---- what ranks exchange ---- */

struct record {
    int32_t err;
    int32_t is_user_comm;
    /* Rank and size of the communicator from which the set's communicators are made. */
    int32_t mpi_rank, mpi_size;
    /* The time when the rank began, and whether it has its process's turn to make communicators. */
    int64_t begun_ns;
    int32_t has_turn;
    char version[ZR_MPI_VERSION_BYTES];
};

static int exchange_records(struct zr_mpi_set *p, int err, struct record *mine, struct record *all)
{
    return zr_rendezvous_agree_and_exchange(p->rdv, err, &mine->err, sizeof *mine, all);
}

static int check_same_mpi(const struct zr_mpi_set *p, const struct record *all)
{
    for (int i = 1; i < p->world; i++) {
        if (all[i].is_user_comm != all[0].is_user_comm)
            return zr_fail(ZERO_ERR_MISMATCH, "rank %d lends mpi_comm, rank %d does not",
                           all[0].is_user_comm ? 0 : i, all[0].is_user_comm ? i : 0);
        if (strncmp(all[i].version, all[0].version, sizeof all[0].version))
            return zr_fail(ZERO_ERR_MISMATCH, "rank %d has %.95s, rank 0 has %.95s", i, all[i].version,
                           all[0].version);
    }
    return 0;
}

int zr_mpi_check_rank(int rank, int world, const char *found_by, int mpi_rank, int mpi_world)
{
    if (mpi_rank == rank && mpi_world == world)
        return 0;
    return zr_fail(ZERO_ERR_ARG,
                   "rank %d of %d (%s) is rank %d of %d in MPI_COMM_WORLD: start all ranks by one mpirun of "
                   "Open MPI, or one mpiexec of MPICH, and unset variables left over from another launcher",
                   rank, world, found_by, mpi_rank, mpi_world);
}

/* Checks that every rank of the world is in the MPI communicator, and that no two have the same number
 * there. */
static int check_ranks(const struct zr_mpi_set *p, const struct record *all)
{
    const char *of = all[0].is_user_comm ? "mpi_comm" : "MPI_COMM_WORLD";
    for (int i = 0; i < p->world; i++) {
        const struct record *c = &all[i];
        if (c->mpi_rank < 0)
            return zr_fail(ZERO_ERR_ARG, "rank %d is not in %s (it is MPI_COMM_NULL there)", i, of);
        if (c->mpi_size < p->world)
            return zr_fail(ZERO_ERR_ARG,
                           "%s of rank %d has %d ranks, and the world has %d: start all ranks by one mpirun "
                           "of Open MPI, or one mpiexec of MPICH (this is %.95s)",
                           of, i, c->mpi_size, p->world, c->version);
        for (int k = 0; k < i; k++)
            if (all[k].mpi_rank == c->mpi_rank)
                return zr_fail(ZERO_ERR_ARG,
                               "ranks %d and %d are both rank %d of %s: they belong to two MPI jobs", k, i,
                               c->mpi_rank, of);
    }
    for (int i = 0; i < p->world && p->opt.found_by; i++) {
        int err = zr_mpi_check_rank(i, p->world, p->opt.found_by, all[i].mpi_rank, all[i].mpi_size);
        if (err)
            return err;
    }
    return 0;
}

/* ---- opening ---- */

int zr_mpi_say(const struct zr_mpi_process *p, int class, const char *call)
{
    char text[160];
    zr_mpi_shim_of(p)->error(zr_mpi_world_of(p), class, text, sizeof text);
    return zr_fail(ZERO_ERR_FAILED, "%s: %s: %s", zr_mpi_shim_of(p)->name, call, text);
}

static int find_library(const struct zr_mpi_options *opt, struct zr_mpi_library *lib)
{
    if (opt->library) {
        *lib = *opt->library;
        return 0;
    }
    int err = zr_mpi_check_launcher();
    return err ? err : zr_mpi_load(opt->log, lib);
}

/* Without a launcher MPI would begin as a world of one, if it can begin at all. */
int zr_mpi_check_launched(const struct zr_mpi_library *lib)
{
    return lib->is_launched ? 0 : zr_mpi_say_not_launched();
}

int zr_mpi_rank_of(struct zr_mpi_process *p, void *user_comm, int64_t ms, int *rank, int *size)
{
    int err = zr_mpi_enter(p, ms);
    *rank = -1;
    *size = 0;
    if (err)
        return err;
    int class = zr_mpi_shim_of(p)->rank_of(zr_mpi_world_of(p), user_comm, rank, size);
    zr_mpi_leave(p);
    return class ? zr_mpi_say(p, class, user_comm ? "mpi_comm" : "MPI_COMM_WORLD") : 0;
}

static int ask_rank(const struct zr_mpi_set *p, struct record *mine)
{
    int rank, size, err = zr_mpi_rank_of(p->process, p->opt.user_comm, p->opt.start_timeout_ms, &rank, &size);
    mine->mpi_rank = rank;
    mine->mpi_size = size;
    return err;
}

static int64_t day_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    return t.tv_sec * INT64_C(1000000000) + t.tv_nsec;
}

/* Begins MPI on all ranks, or on none that did not have it already. */
static int meet_in_mpi(struct zr_mpi_set *p, struct record *all)
{
    struct zr_mpi_library lib;
    struct record mine = {.is_user_comm = p->opt.user_comm != NULL};
    int err = find_library(&p->opt, &lib);
    if (!err) {
        snprintf(mine.version, sizeof mine.version, "%s", lib.version);
        err = zr_mpi_check_launched(&lib);
    }
    err = exchange_records(p, err, &mine, all);
    err = err ? err : check_same_mpi(p, all);
    if (err)
        return err;
    snprintf(p->path, sizeof p->path, "%s%s", lib.version, p->tiers ? ", shared inside hosts" : "");
    err = zr_mpi_process_open(&lib, p->opt.start_timeout_ms, p->rdv, p->opt.log, &p->process);
    err = err ? err : ask_rank(p, &mine);
    mine.begun_ns = day_ns();
    err = exchange_records(p, err, &mine, all);
    err = err ? err : check_ranks(p, all);
    for (int i = 0; i < p->world && !err; i++)
        p->mpi_rank[i] = all[i].mpi_rank;
    p->begun_ns = all[0].begun_ns;
    return err;
}

static bool all_have_turns(const struct zr_mpi_set *p, const struct record *all)
{
    int n = 0;
    while (n < p->world && all[n].has_turn)
        n++;
    return n == p->world;
}

/* Takes the turn on all ranks, or on none. */
static int take_turns(struct zr_mpi_set *p, struct record *all)
{
    int64_t until = zr_now_ns() + p->opt.start_timeout_ms * 1000000;
    for (struct record mine = {0};;) {
        mine.has_turn = zr_mpi_turn_take(p->process, p->begun_ns);
        int err = mine.has_turn || zr_now_ns() <= until
                      ? 0
                      : zr_fail(ZERO_ERR_TIMEOUT,
                                "another context of this process has been opening its communicators for %lld "
                                "ms (start_timeout_ms)",
                                (long long)p->opt.start_timeout_ms);
        err = exchange_records(p, err, &mine, all);
        if (!err && all_have_turns(p, all))
            return 0;
        if (mine.has_turn)
            zr_mpi_turn_end(p->process);
        if (err)
            return err;
        nanosleep(&(struct timespec){.tv_nsec = RETRY_NS}, NULL);
    }
}

/* Checks a world of one: MPI may have more ranks if the program has begun it and nothing else gives their
 * number. */
static int check_alone(const struct zr_mpi_set *p)
{
    struct zr_mpi_library lib;
    int rank, size;
    if (!p->opt.found_by || !zr_mpi_is_loaded() || zr_mpi_load(NULL, &lib) ||
        !lib.shim->is_initialized(lib.world) || lib.shim->is_finalized(lib.world) ||
        lib.shim->rank_of(lib.world, NULL, &rank, &size))
        return 0;
    return zr_mpi_check_rank(0, 1, p->opt.found_by, rank, size);
}

/* Arguments of MPI_Comm_create_group, for the thread that may be left behind in it. */
struct making {
    struct zr_mpi_process *process;
    void *user_comm;
    int32_t *member;
    int n, tag;
    int64_t ms;
    int32_t comm;
    int class;
    /* The failure that prevented the call. */
    struct zr_saved_error kept;
};

static int make_in_time(void *arg)
{
    struct making *k = arg;
    int err = zr_mpi_enter(k->process, k->ms);
    if (err) {
        zr_error_save(&k->kept, err); /* the message belongs to this thread */
        return err;
    }
    k->class = zr_mpi_shim_of(k->process)
                   ->make(zr_mpi_world_of(k->process), k->user_comm, k->member, k->n, k->tag, &k->comm);
    zr_mpi_leave(k->process);
    return 0;
}

int zr_mpi_make(struct zr_mpi *m)
{
    struct zr_mpi_set *p = m->set;
    int n = m->base.group.size, res = 0;
    struct making k = {.process = p->process,
                       .user_comm = p->opt.user_comm,
                       .member = malloc((size_t)n * sizeof *k.member),
                       .n = n,
                       .tag = (int)m->base.role,
                       .ms = p->opt.start_timeout_ms,
                       .comm = -1};
    const struct zr_task_call call = {.what = "MPI_Comm_create_group",
                                      .thread = "zero-mpi-make",
                                      .fn = make_in_time,
                                      .look = p->rdv,
                                      .limit = " (start_timeout_ms)"};
    bool left;
    if (!k.member)
        return zr_fail(ZERO_ERR_NOMEM, "mpi %s: no memory for %d ranks", m->name, n);
    for (int i = 0; i < n; i++)
        k.member[i] = p->mpi_rank[zr_comm_rank(&m->base, i)];
    int err = zr_timed_call(&call, k.ms, &k, sizeof k, &res, &left);
    if (left) { /* the thread still reads them */
        p->is_left = true;
        zr_mpi_process_half_made(p->process);
        return err;
    }
    free(k.member);
    m->comm = err ? -1 : k.comm;
    err = err ? err : res ? zr_error_restore(&k.kept) : 0;
    return err ? err : k.class ? zr_mpi_say(p->process, k.class, "MPI_Comm_create_group") : 0;
}

static int64_t mpi_chunk_of(const struct zr_role_ask *ask)
{
    int64_t n = (ask->largest_bytes + ZR_MPI_ALIGN - 1) / ZR_MPI_ALIGN * ZR_MPI_ALIGN;
    return ask->group->size == 1 || n > ZR_MPI_CHUNK ? ZR_MPI_CHUNK : n > ZR_MPI_ALIGN ? n : ZR_MPI_ALIGN;
}

/* Two chunks for each rank of a block, and the partial sums of the tree. The partial sum of a chunk of bf16
 * elements has twice its bytes, hence the second factor of 2. */
int64_t zr_mpi_role_bytes(enum zr_role role, const struct zr_role_ask *ask, bool deterministic)
{
    int32_t size = ask->group->size, rows = size < ZR_FOLD_BLOCK ? size : ZR_FOLD_BLOCK;
    (void)deterministic; /* sums always are */
    return size == 1 || !zr_role_reduces(role) ? 0 : (2 * rows + 2 * zr_fold_parts(size)) * mpi_chunk_of(ask);
}

/* Logs how the group uses shared memory, once for each group. */
static void report_tiers(const struct zr_mpi *m)
{
    const struct zr_spread *s = &m->spread;
    struct zr_log *log = m->base.group.rank ? NULL : m->set->opt.log;
    if (s->n_hosts == 1 && m->sums_by_host)
        zr_info(log, "mpi %s: shared memory among the %d ranks of a group, which are on one host", m->name,
                s->size);
    else if (m->sums_by_host)
        zr_info(log, "mpi %s: %d ranks on each of %d hosts: shared memory inside a host, MPI between",
                m->name, s->most_local, s->n_hosts);
    else
        zr_info(log,
                "mpi %s: %d to %d ranks on each of %d hosts: gathers use shared memory inside a host; sums "
                "are made rank by rank over MPI, because sums by host keep their bits only if each host has "
                "the same power of two of ranks (up to %d), consecutive in the group",
                m->name, s->least_local, s->most_local, s->n_hosts, ZR_MAX_SOURCES);
}

/* Whether the role gathers or reduces, which uses shared memory inside hosts. */
static bool moves_slices(enum zr_role role)
{
    return role < ZR_ROLE_CONTROL || zr_role_moves_activations(role);
}

/* Finds how the group is distributed over hosts, if some host has several ranks. Returns ZERO_ERR_NOMEM. */
static int find_spread(struct zr_mpi *m)
{
    const struct zr_group *g = &m->base.group;
    struct zr_spread *s = &m->spread;
    if (!m->set->tiers || g->size == 1 || !moves_slices(m->base.role))
        return 0;
    int err = zr_spread_make(m->set->opt.topology, g, s);
    if (err)
        return err;
    m->sums_by_host = s->cut && s->most_local > 1 && s->most_local <= ZR_MAX_SOURCES;
    if (s->most_local > 1)
        report_tiers(m);
    else
        zr_spread_free(s);
    return 0;
}

static void fail_order(struct zr_comm *c, int code, const char *text)
{
    zr_mpi_fail(zr_mpi_of(c)->set, code, text);
}

static int make_role(struct zr_mpi_set *p, enum zr_role role, const struct zr_role_ask *ask,
                     struct zr_comm **out)
{
    struct zr_mpi *m = calloc(1, sizeof *m);
    if (!m || !zr_op_queue_open(&m->queue, &m->base, p->dev)) {
        free(m);
        return zr_fail(ZERO_ERR_NOMEM, "mpi %s: no memory for a communicator", zr_role_name(role));
    }
    m->base = (struct zr_comm){.ops = &zr_mpi_ops,
                               .group = *ask->group,
                               .role = role,
                               .alarm = &p->alarm,
                               .failure = &p->failure,
                               .reserve = zr_mpi_role_bytes(role, ask, true)};
    m->queue.move = zr_mpi_move;
    m->queue.fail = fail_order;
    m->set = p;
    m->name = zr_role_name(role);
    m->comm = -1;
    m->chunk = mpi_chunk_of(ask);
    pthread_mutex_init(&m->lock, NULL);
    p->n_open++;
    *out = &m->base;
    ZR_TRY(ZR_ZALLOC(m->post, ask->group->size, "the communicator of mpi %s", m->name));
    ZR_TRY(ZR_ZALLOC(m->from, ask->group->size, "the communicator of mpi %s", m->name));
    ZR_TRY(ZR_ZALLOC(m->peer, ask->group->size, "the communicator of mpi %s", m->name));
    return find_spread(m);
}

/* Whether there is a core for each waiting thread. Then threads spin for a while before they sleep. */
static bool has_cores(const struct zr_topology *t, int world, int n_streams)
{
    return zr_topology_has_cores(t ? t->local_size : world, t ? zr_topology_on_machine(t) : world, n_streams);
}

/* Whether some host has several ranks. */
static bool has_tiers(const struct zr_mpi_options *opt)
{
    const struct zr_topology *t = opt->topology;
    return t && !opt->flat && t->n_hosts < t->world;
}

static void drop_set(struct zr_mpi_set *p)
{
    if (p->n_open)
        return;
    zr_mpi_process_drop(p->process, p->opt.log, !p->is_left && !zr_first_code(&p->failure));
    if (p->is_left) /* pending requests and threads still use it */
        return;
    free(p->mpi_rank);
    free(p);
}

static int make_mpi_set(struct zr_rendezvous *rdv, struct zr_device *dev, const struct zr_mpi_options *opt,
                        struct zr_mpi_set **out)
{
    ZR_TRY(ZR_ZALLOC(*out, 1, "the communicators of mpi"));
    struct zr_mpi_set *p = *out;
    p->opt = *opt;
    p->rdv = rdv;
    p->dev = dev;
    p->kernels = zr_host_kernels_best();
    p->timeout_ns = opt->timeout_ms * 1000000;
    p->rank = zr_rendezvous_rank(rdv);
    p->world = zr_rendezvous_world(rdv);
    p->tiers = has_tiers(opt);
    return ZR_ZALLOC(p->mpi_rank, p->world, "%d ranks of mpi", p->world);
}

static int open_all(struct zr_mpi_set *p, const struct zr_role_ask ask[ZR_ROLES],
                    struct zr_comm *comm[ZR_ROLES])
{
    struct record *all;
    int err = ZR_ZALLOC(all, p->world, "%d ranks of mpi", p->world), n = 0;
    for (int r = 0; r < ZR_ROLES && !err; r++)
        if (ask[r].group) {
            err = make_role(p, (enum zr_role)r, &ask[r], &comm[r]);
            n += r != ZR_ROLE_CONTROL && r != ZR_ROLE_WORLD; /* these work on the stream that reduces */
        }
    p->spins = has_cores(p->opt.topology, p->world, n);
    err = zr_rendezvous_agree(p->rdv, err);
    if (!err && p->world > 1)
        err = meet_in_mpi(p, all);
    else if (!err) {
        snprintf(p->path, sizeof p->path, "one rank, which needs no MPI");
        err = check_alone(p);
    }
    bool in_turn = !err && p->world > 1;
    if (in_turn)
        err = take_turns(p, all);
    in_turn &= !err;
    free(all);
    for (int r = 0; r < ZR_ROLES && !err; r++)
        if (comm[r]) {
            struct zr_mpi *m = zr_mpi_of(comm[r]);
            err = zr_rendezvous_agree(p->rdv, m->base.group.size > 1 ? zr_mpi_make(m) : 0);
        }
    if (in_turn)
        zr_mpi_turn_end(p->process);
    return err;
}

int zr_mpi_open(struct zr_rendezvous *rdv, struct zr_device *dev, const struct zr_mpi_options *opt,
                const struct zr_role_ask ask[ZR_ROLES], struct zr_comm *comm[ZR_ROLES])
{
    struct zr_mpi_set *p;
    memset(comm, 0, ZR_ROLES * sizeof *comm);
    if (!dev->ops->compute_on_caller)
        return zr_fail(ZERO_ERR_NOTSUP, "mpi works on the host device, not on %s", dev->ops->name);
    int err = make_mpi_set(rdv, dev, opt, &p);
    if (err) {
        if (p)
            drop_set(p);
        return zr_rendezvous_fail(rdv, err);
    }
    p->n_open++; /* holds the set while it is opened */
    err = open_all(p, ask, comm);
    p->opt.library = NULL; /* it belongs to the caller */
    if (err) {
        struct zr_saved_error kept;
        zr_error_save(&kept, err);
        zr_first_keep(&p->failure, err, kept.text);
        for (int r = 0; r < ZR_ROLES; r++) {
            zr_comm_close(comm[r]);
            comm[r] = NULL;
        }
        p->n_open--;
        drop_set(p);
        return zr_error_restore(&kept);
    }
    p->n_open--;
    return 0;
}

/* ---- closing ---- */

struct freeing {
    struct zr_mpi_process *process;
    int32_t comm;
};

static int free_in_time(void *arg)
{
    const struct freeing *k = arg;
    int err = zr_mpi_enter(k->process, CLOSE_MS);
    if (err)
        return err;
    int class = zr_mpi_shim_of(k->process)->free(zr_mpi_world_of(k->process), k->comm);
    zr_mpi_leave(k->process);
    return class;
}

/* Frees the MPI communicator. After a failure it does not, as MPI_Comm_free would wait for a lost rank. */
static void free_mpi_comm(struct zr_mpi *m)
{
    struct freeing k = {m->set->process, m->comm};
    const struct zr_task_call call = {.what = "MPI_Comm_free", .thread = "zero-mpi-free", .fn = free_in_time};
    struct zr_task *task;
    int res;
    if (m->comm < 0 || zr_first_code(&m->set->failure) || zr_mpi_ended(k.process))
        return;
    if (zr_task_start(&call, &k, sizeof k, &task) || !zr_task_await(task, CLOSE_MS, &k, &res))
        m->set->is_left = true;
}

/* Polls for a while: requests may have ended without any thread having noticed. */
static bool comes_to_rest(const struct zr_mpi *m)
{
    int64_t until = zr_now_ns() + REST_NS;
    while (!zr_mpi_rests(m) && zr_now_ns() < until) {
        zr_mpi_poll(m->set->process);
        nanosleep(&(struct timespec){.tv_nsec = 100000}, NULL);
    }
    return zr_mpi_rests(m);
}

void zr_mpi_close(struct zr_comm *c)
{
    struct zr_mpi *m = zr_mpi_of(c);
    struct zr_mpi_set *p = m->set;
    bool rests = comes_to_rest(m);
    p->n_open--;
    if (rests) {
        free_mpi_comm(m);
        zr_mpi_unmap(m);
        zr_arena_drop(c->held);
        zr_op_queue_close(&m->queue);
        pthread_mutex_destroy(&m->lock);
        free(m->words);
        free(m->post);
        free(m->from);
        free(m->peer);
        zr_spread_free(&m->spread);
        free(m);
    } else { /* MPI uses memory of the communicator and of its arena for as long as the process lives */
        zr_warn(p->opt.log,
                "mpi %s: other ranks do not answer pending requests: the communicator and its memory are not "
                "freed; the process should end",
                m->name);
        p->is_left = true;
    }
    drop_set(p);
}

/* ---- the backend's row ---- */

static int mpi_open_roles(struct zr_rendezvous *rdv, struct zr_device *dev,
                          const struct zr_backend_config *config, const struct zr_role_ask ask[ZR_ROLES],
                          struct zr_comm *comm[ZR_ROLES])
{
    int64_t start_ms = config->start_timeout_ms ? config->start_timeout_ms : config->timeout_ms;
    const struct zr_mpi_options opt = {.timeout_ms = config->timeout_ms,
                                       .start_timeout_ms = start_ms,
                                       .flat = config->flat,
                                       .user_comm = config->user_comm,
                                       .found_by = config->user_comm ? NULL : config->found_by,
                                       .topology = config->topology,
                                       .log = config->log};
    return zr_mpi_open(rdv, dev, &opt, ask, comm);
}

static const char *mpi_path(const struct zr_comm *c)
{
    return ((const struct zr_mpi *)c)->set->path;
}

const struct zr_backend zr_backend_mpi = {
    .name = "mpi",
    .device = "host",
    .reserve = zr_mpi_role_bytes,
    .open = mpi_open_roles,
    .path = mpi_path,
    .opens_in_turn = true,
    .user_comm_name = "mpi_comm",
    .user_comm_world = zr_mpi_user_comm_world,
    .exchange = zr_mpi_exchange,
    .job_world = zr_mpi_job_world,
};
