/* SPDX-License-Identifier: Apache-2.0 */
/* wrap.c: zero_wrap opens a context, in phases.
 *
 * First a rank reads its configuration, finds its number and meets the other ranks. They learn who shares a
 * host with whom (comm/topology.h). Each rank then makes its plan alone, and the ranks compare plans
 * (agree.c), so that a fault on one rank is an error on all. Then memory is allocated, and the ranks agree
 * again. The model's pointers are set last, when nothing can fail any more. */
#include "kernels/alloc.h"
#include "kernels/check/check_device.h"
#include "kernels/standard_fds.h"
#include "shard/engine/check/observers.h"
#include "zero/context.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    QUEUE_JOBS = 4096,
    LEAST_LIMIT_MS = 5000, /* limit of the loop, because the first calls of a driver take time */
    REMIND_MS = 30000      /* between log lines about a missing rank */
};

/* Calls optim.update of the tensor's group. */
static int user_update(void *arg, const struct zero_update *u)
{
    const struct zero_ctx *z = arg;
    const struct zero_optim *group = &z->config.groups[z->layout->tensors[u->tensor_index].group];
    return group->update(group->update_arg, u);
}

/* A forked child has the same rank as its parent, and both may wrap. This name makes children meet children.
 */
static void name_fork(struct zr_world *w)
{
    char name[sizeof w->name];
    memcpy(name, w->name, sizeof name);
    if (w->forks)
        snprintf(w->name, sizeof w->name, "%.51s%s(fork %d)", name, name[0] ? " " : "", w->forks);
}

/* Describes how ranks can exchange bytes before they meet: over the program's communicator, by its own
 * all-gather, or over MPI if the launcher does not say where rank 0 waits. */
static void find_user_comm(struct zero_ctx *z, const struct zero_config *cfg)
{
    struct zr_user_comm *c = &z->user_comm;
    const struct zr_backend *b = z->user_comm_backend ? z->user_comm_backend : z->asked_backend;
    c->timeout_ms = z->start_ms;
    if (z->user_comm_backend || z->world.by_mpi) {
        c->name = z->user_comm_backend ? b->user_comm_name : "MPI_COMM_WORLD";
        c->gather = b->exchange;
        c->in_turn = b->exchanges_in_turn;
    } else if (cfg->launch.exchange && cfg->launch.world > 0) {
        c->name = "exchange";
        c->gather = zr_user_comm_call;
        c->exchange = cfg->launch.exchange;
        c->exchange_arg = cfg->launch.exchange_arg;
        c->in_turn = true;
    }
}

static int find_world(struct zero_ctx *z, const struct zero_config *cfg)
{
    z->user_comm_backend = zr_backend_of_user_comm(cfg, &z->user_comm.comm);
    z->asked_backend = zr_backend_row(cfg->launch.backend);
    z->start_ms = zr_config_start_ms(cfg);
    int err = zr_find_rank(cfg, &z->world);
    find_user_comm(z, cfg);
    zr_config_print_name(cfg->launch.name, z->world.name, sizeof z->world.name);
    name_fork(&z->world);
    return err;
}

/* Takes a name, so that this context is not confused with another one of this process. */
static int take_name(struct zero_ctx *z)
{
    const struct zr_user_comm *c = &z->user_comm;
    const void *used = c->comm ? c->comm : c->exchange_arg;
    char where[48];
    if (z->world.world == 1)
        return 0;
    if (used)
        snprintf(where, sizeof where, "%s %p", c->name, used);
    else
        snprintf(where, sizeof where, "%s", c->gather ? c->name : "");
    int err = zr_open_name_take(&z->world, c->gather ? where : NULL, &z->open_name);
    z->world.open_name = z->open_name;
    return err;
}

enum zr_values_in zr_values_in(const struct zero_ctx *z)
{
    switch ((enum zero_init)z->config.user.init_from) {
    case ZERO_INIT_MODEL:
        break;
    case ZERO_INIT_RANK0:
        return zr_dp_rank(z) == 0 ? ZR_VALUES_IN_RANK0 : ZR_VALUES_ELSEWHERE;
    case ZERO_INIT_LATER:
    case ZERO_INIT_CALL:
        return ZR_VALUES_ELSEWHERE;
    }
    return ZR_VALUES_IN_MODEL;
}

/* Orders places by rank, instead of by host, with deterministic or dp_replicate. The bits of deterministic
 * must not depend on hosts, and replicas are groups of consecutive ranks. Sums by host are then impossible if
 * the ranks of a host are not consecutive. */
static void order_places(struct zero_ctx *z)
{
    char hosts[512];
    bool deterministic = z->config.options.deterministic;
    if ((!deterministic && !z->config.options.hybrid) || !zr_topology_order_by_rank(&z->topology) ||
        z->topology.rank)
        return;
    zr_topology_list_hosts(&z->topology, hosts, sizeof hosts);
    zr_info(z->config.options.log,
            "the ranks of a host are not consecutive (%s): sums still follow the order of ranks, because %s, "
            "and cross hosts more often; consecutive ranks on each host are faster",
            hosts, deterministic ? "deterministic is on" : "dp_replicate has groups of consecutive ranks");
}

/* ---- the plan ---- */

/* Checks tp_size: padded parts must hold the whole dimension together. */
static int check_sizes(const struct zr_layout *l, int32_t parts)
{
    for (int32_t i = 0; i < l->n_tensors; i++) {
        const struct zr_tensor *t = &l->tensors[i];
        int64_t most = t->shape[0] > INT64_MAX / parts ? INT64_MAX : t->shape[0] * parts;
        if (t->cut_size > most || (t->cut_size && parts == 1 && t->cut_size != most))
            return zr_fail(ZERO_ERR_ARG,
                           "tensors[%d] (%s): tp_size is %lld, but shape[0] is %lld on %d ranks of tp; "
                           "allowed: %s%lld",
                           i, t->name, (long long)t->cut_size, (long long)t->shape[0], parts,
                           parts > 1 ? "1.." : "", (long long)most);
    }
    return 0;
}

int zr_prepare(struct zr_config *c, int world, const struct zero_tensor *tensors, int32_t n_tensors,
               enum zr_values_in values, struct zr_prepared *out)
{
    struct zr_tensor *t;
    *out = (struct zr_prepared){0};
    ZR_TRY(zr_backend_choose(c, world * zr_model_ranks(&c->options), &out->backend));
    ZR_TRY(zr_tensors_check(tensors, n_tensors, &c->user, values, &t));
    int err = zr_ties_take(c, t, n_tensors);
    if (err) {
        zr_tensors_free(t, n_tensors);
        return err;
    }
    ZR_TRY(zr_config_layout(c, t, n_tensors, world, &out->layout));
    ZR_TRY(check_sizes(out->layout, c->options.tp > 1 ? c->options.tp : 1));
    zr_backend_reserve(c, out->backend, out->layout);
    ZR_TRY(zr_schedule_make(c, out->layout, &out->schedule));
    return zr_plan_make(out->layout, &c->options, &out->plan);
}

/* Makes the mesh, the layout and the plan. */
static int plan_model(struct zero_ctx *z, const struct zero_tensor *tensors, int32_t n_tensors)
{
    struct zr_prepared made;
    ZR_TRY(zr_config_mesh(&z->config, z->world.rank, z->world.world));
    ZR_TRY(zr_config_groups(&z->config, &z->topology));
    /* The mesh below needs to know whether deterministic is on, which this sets. */
    ZR_TRY(zr_backend_choose(&z->config, z->world.world, &made.backend));
    const struct zr_options *o = &z->config.options;
    order_places(z);
    ZR_TRY(zr_mesh_make(&z->topology, &(struct zr_mesh_sizes){o->pp, o->tp, o->cp, o->dp_shard}, &z->mesh));
    zr_config_mind_network(&z->config, z->mesh.dp_replicate > 1 && z->mesh.replicas_span_hosts);
    int err =
        zr_prepare(&z->config, zr_place_dp(&z->config.place), tensors, n_tensors, zr_values_in(z), &made);
    z->backend = made.backend;
    z->layout = made.layout;
    z->schedule = made.schedule;
    z->plan = made.plan;
    return err ? err : zr_backend_check_hosts(z);
}

/* Prepares all that needs no other rank. */
static int prepare(struct zero_ctx *z, const struct zero_tensor *tensors, int32_t n_tensors)
{
    for (int32_t i = 0; i < z->config.options.n_optims; i++)
        if (z->config.groups[i].update) {
            z->config.options.update = user_update;
            z->config.options.update_arg = z;
        }
    ZR_TRY(ZR_ZALLOC_ARRAY(z->from_all, 0, z->world.world, ZR_EXCHANGE_BYTES, "exchanges of %d ranks",
                           z->world.world));
    ZR_TRY(ZR_ZALLOC(z->sharers, z->world.world, "the memory use of %d ranks", z->world.world));
    ZR_TRY(plan_model(z, tensors, n_tensors));
    ZR_TRY(zr_missing_brackets_open(z));
    if (!z->device)
        ZR_TRY(zr_backend_open_device(z));
    ZR_TRY(zr_memory_check_gpu(z, false));
    if (z->config.options.check)
        ZR_TRY(zr_check_open(z->device, z->world.rank, z->world.world, &z->check));
    return 0;
}

static int begin_to_open(struct zero_ctx *z)
{
    if (zr_open_name_begin(z->open_name, z->start_ms))
        return 0;
    return zr_fail(ZERO_ERR_TIMEOUT,
                   "another context of this process has been opening its communicators for %lld ms "
                   "(start_timeout_ms)",
                   (long long)z->start_ms);
}

/* Exchanges where ranks meet. Contexts may use one communicator of the program one after the other. A context
 * that begins holds it until its own communicators are open, so all later openings have the order of this
 * one. */
static int exchange_place(struct zero_ctx *z, int *held)
{
    struct zr_user_comm *c = &z->user_comm;
    if (!c->gather || z->world.world == 1)
        return 0;
    ZR_TRY(c->in_turn ? begin_to_open(z) : 0);
    if (c->comm)
        ZR_TRY(zr_backend_open_device(z));
    else if (c->exchange && z->config.user.device == ZERO_DEVICE_CUDA && zr_backend_open_device(z))
        z->device = NULL; /* prepare() fails for the same reason, when all ranks can be told */
    c->dev = z->device;
    c->log = z->config.options.log;
    int err = zr_user_comm_meet(c, &z->world, held);
    if (c->is_left) /* A call of NCCL has not returned, and may still use the device. */
        z->device = NULL;
    return err;
}

/* Logs a long wait. Under zero-run it also stops waiting for a rank that has ended. */
static void begin_to_wait(struct zero_ctx *z)
{
    zr_progress_open(&z->progress, z->config.options.log);
    zr_progress_meet(&z->progress, z->world.rank, z->world.world);
    z->waiting = (struct zr_waiting){.log = z->config.options.log,
                                     .remind_ms = REMIND_MS,
                                     .has_ended = z->progress.own ? zr_progress_has_ended : NULL,
                                     .arg = &z->progress};
    z->world.waiting = &z->waiting;
}

static int connect_ranks(struct zero_ctx *z)
{
    begin_to_wait(z);
    int held = -1, err = exchange_place(z, &held);
    if (!err)
        err = zr_rendezvous_open(zr_loop_uv(z->loop), &z->world, z->start_ms, &z->rendezvous);
    if (held >= 0)
        close(held);
    return err;
}

/* Lets the ranks of a host read each other's last calls from here on. */
static int open_flight_peers(struct zero_ctx *z)
{
    return z->rendezvous ? zr_flight_peers_open(z->rendezvous, &z->topology, z->flight, z->config.options.log,
                                                &z->flight_peers)
                         : 0;
}

static void on_lost(void *arg, int rank, const char *why)
{
    struct zero_ctx *z = arg;
    char text[ZR_ERROR_BYTES], when[112];
    zr_engine_last_op(z->engine, when, sizeof when);
    snprintf(text, sizeof text, "rank %d was lost%s%s: %s", rank, when[0] ? " " : "", when, why);
    zr_engine_fail(z->engine, ZERO_ERR_PEER, text);
}

static void on_failed(void *arg, int code, const char *text)
{
    struct zero_ctx *z = arg;
    zr_engine_remote_failure(z->engine, code, text);
}

/* Reports a failure to the other ranks over the rendezvous. With NCCL alone, they would only see a collective
 * that does not end. */
static void report_ranks(void *arg, int code, const char *text)
{
    struct zero_ctx *z = arg;
    if (z->rendezvous)
        zr_rendezvous_report(z->rendezvous, code, text);
}

/* Returns how long the loop looks for more work before it sleeps. It does so only if there are four cores for
 * each rank, so that it takes none from compute. */
static int64_t loop_spin_ns(const struct zr_topology *t)
{
    return zr_topology_has_cores(t->local_size, zr_topology_on_machine(t), 4) ? 20000 : 0;
}

static int open_engine(struct zero_ctx *z)
{
    struct zr_engine_parts parts = {.dev = z->check ? zr_check_device(z->check) : z->device,
                                    .check = z->check,
                                    .open_observers = zr_check_open_observers,
                                    .plan = z->plan,
                                    .opt = &z->config.options,
                                    .loop = z->loop,
                                    .on_fail = report_ranks,
                                    .on_fail_arg = z,
                                    .flight = z->flight,
                                    .name = z->world.name,
                                    .native_stream = z->config.user.stream,
                                    .pipe_room = *zr_schedule_room(z->schedule),
                                    .states = zr_states_io(z)};
    memcpy(parts.comm, z->comm, sizeof parts.comm);
    int err = zr_states_open(z);
    if (!err)
        err = zr_engine_open(z->engine, &parts);
    err = zr_agree_on_success(z, err);
    if (err)
        return err;
    for (int32_t i = 0; i < z->layout->n_tensors; i++)
        zr_engine_set_first(z->engine, i, zr_whole_at(z, i).first);
    return zr_agree_on_success(z, zr_engine_allocate(z->engine));
}

static void on_start(void *arg)
{
    struct zero_ctx *z = arg;
    int err = zr_thread_begin(z->device);
    if (err)
        zr_engine_fail(z->engine, err, zr_error_text());
}

/* Takes the first values of parameters from the place that cfg.init_from names. */
static int take_values(struct zero_ctx *z)
{
    int err = 0;
    switch ((enum zero_init)z->config.user.init_from) {
    case ZERO_INIT_LATER:
        err = zr_agree_in_run(z, zr_init_later_open(z));
        return err ? err : zr_engine_adopt(z->engine, false);
    case ZERO_INIT_CALL:
        err = zr_engine_init(z->engine, z->config.user.init, z->config.user.init_arg);
        if (!err)
            err = zr_engine_adopt(z->engine, false);
        return err ? err : zr_engine_tp_compare(z->engine);
    case ZERO_INIT_MODEL:
    case ZERO_INIT_RANK0:
        break;
    }
    ZR_TRY(zr_engine_adopt(z->engine, true));
    return zr_engine_tp_compare(z->engine);
}

static int start(struct zero_ctx *z)
{
    if (z->rendezvous) {
        zr_rendezvous_limit(z->rendezvous, z->config.options.timeout_ms);
        zr_rendezvous_detach(z->rendezvous, on_lost, on_failed, z);
    }
    int err = z->loop ? zr_loop_start(z->loop, loop_spin_ns(&z->topology), on_start, z) : 0;
    if (err) /* Closing the rendezvous tells the other ranks. */
        return zr_engine_fail(z->engine, err, zr_error_text());
    err = take_values(z);
    if (err || z->init_later)
        return err;
    zr_first_values_report(z);
    return zr_engine_tied_values(z->engine);
}

/* Finds the other ranks although the configuration was refused, so that they learn of the error. Uses the
 * fields that can be read, or the environment alone. If that fails, the world is this rank. Keeps the message
 * of this thread. */
static void find_world_anyway(struct zero_ctx *z, const struct zero_config *cfg)
{
    struct zero_config legible;
    struct zr_saved_error kept;
    zr_error_save(&kept, 0);
    zr_config_legible(cfg, &legible);
    z->config.options.timeout_ms = legible.launch.timeout_ms;
    if (find_world(z, &legible))
        z->world.world = 1;
    if (legible.launch.start_timeout_ms == ZERO_AUTO) /* The user waits for the error of this rank. */
        z->start_ms = legible.launch.timeout_ms;
    (void)zr_world_interface(legible.launch.interface, &z->world);
    zr_error_restore(&kept);
}

static void report_world(const struct zero_ctx *z)
{
    struct zr_log *log = z->config.options.log;
    zr_log_set_rank(log, z->world.rank, z->world.name);
    zr_info(log, "rank %d of %d, found in: %s (%s)%s%s", z->world.rank, z->world.world, z->world.source,
            z->world.size_from, z->world.way[0] ? "; where ranks meet, in: " : "", z->world.way);
    if (z->world.note[0])
        zr_warn(log, "%s", z->world.note);
    bool makes_key = z->user_comm.gather != NULL; /* Rank 0 sends the key to the others. */
    if (z->world.world > 1 && z->world.rank == 0 && !z->world.key.n_bytes && !makes_key)
        zr_warn(log, "this job has no key, so ranks meet on loopback only, and any program on this host can "
                     "pose as a rank: start it with zero-run, which makes a key, or set ZERO_JOB_KEY to the "
                     "same 32 random hex digits on all ranks");
}

static void report_standard_fds(struct zr_log *log, unsigned opened)
{
    static const char *const name[] = {"standard input", "standard output", "standard error"};
    for (int fd = 0; fd < 3; fd++)
        if (opened & 1u << fd)
            zr_warn(log,
                    "descriptor %d (%s) was closed: it is /dev/null now, so that no file or socket gets its "
                    "number",
                    fd, name[fd]);
}

/* Reads the configuration and finds the rank. After a failure z->world.world is 1 if there is no other rank
 * to tell. */
static int resolve(struct zero_ctx *z, const struct zero_config *cfg)
{
    unsigned opened;
    z->world.world = 1;
    ZR_TRY(zr_standard_fds_open(&opened));
    int err = zr_config_resolve(cfg, &z->config);
    report_standard_fds(z->config.options.log, opened);
    if (err) {
        find_world_anyway(z, cfg);
        return err;
    }
    ZR_TRY(find_world(z, &z->config.user));
    ZR_TRY(zr_world_interface(z->config.user.launch.interface, &z->world));
    report_world(z);
    return 0;
}

/* Whether the context needs a thread for communication. One rank does only if it has to use a communicator
 * for several. */
static bool needs_loop(const struct zero_ctx *z)
{
    const struct zr_backend *asked = zr_backend_row(z->config.user.launch.backend);
    return z->world.world > 1 || z->user_comm.comm || (asked && !asked->alone);
}

/* Logs the interface after ranks have met. Ranks that find each other over MPI or NCCL know it only then. */
static void report_interface(const struct zero_ctx *z)
{
    if (z->rendezvous && z->world.interface[0] && zr_world_is_on_loopback(&z->world))
        zr_info(z->config.options.log, "interface %s is not used: ranks meet on loopback, at %s",
                z->world.interface, z->world.host);
}

/* Lists the hosts. Logs a local rank of the launcher that is not this rank's number on the host, because two
 * ranks may then share a GPU. */
static void report_topology(const struct zero_ctx *z)
{
    const struct zr_topology *t = &z->topology;
    struct zr_log *log = z->config.options.log;
    char hosts[512];
    if (t->n_hosts > 1 && t->rank == 0) {
        zr_topology_list_hosts(t, hosts, sizeof hosts);
        zr_info(log, "%d hosts: %s%s%s", t->n_hosts, hosts, t->why[0] ? "; " : "", t->why);
    }
    if (z->world.has_local_rank && z->world.local_rank != t->local_rank)
        zr_info(log,
                "%s says that this is local rank %d, but among the %d ranks that share memory it is number "
                "%d (from 0)",
                z->world.source, z->world.local_rank, t->local_size, t->local_rank);
}

/* Meets the other ranks and learns their hosts. err, with the message of this thread, is an earlier error
 * that they hear of. */
static int meet(struct zero_ctx *z, int err)
{
    struct zr_saved_error kept;
    int loop_err = 0;
    zr_error_save(&kept, err);
    if (needs_loop(z))
        loop_err = zr_loop_open(QUEUE_JOBS, zr_engine_issue, z->engine, &z->loop);
    if (z->loop) {
        zr_loop_ask(z->loop, zr_engine_is_ready);
        zr_loop_limit(z->loop, zr_max(z->config.options.timeout_ms, LEAST_LIMIT_MS), zr_engine_stuck,
                      z->engine);
        loop_err = connect_ranks(z);
    }
    if (loop_err)
        return err ? zr_error_restore(&kept) : loop_err;
    zr_error_restore(&kept);
    err = zr_topology_probe(z->rendezvous, NULL, err, &z->topology);
    if (err)
        return err;
    if (z->rendezvous)
        zr_rendezvous_hosts(z->rendezvous, &z->topology);
    report_interface(z);
    report_topology(z);
    return 0;
}

static int open_flight(struct zero_ctx *z)
{
    const struct zr_flight_owner owner = {
        .rank = z->world.rank, .world = z->world.world, .attempt = z->world.attempt, .job = z->world.job};
    char why[ZR_FLIGHT_TEXT];
    int err = zr_flight_open(&owner, &z->flight, why);
    if (why[0])
        zr_warn(z->config.options.log, "%s: other processes cannot see what this rank does", why);
    zr_flight_enter(z->flight, &(struct zr_logged_call){.name = ZR_CALL_WRAP, .subject = -1});
    return err;
}

/* Opens communicators in the order that rank 0 has. Opening waits for other ranks inside a library that may
 * let in one thread at a time, so the contexts of a process take turns. The other ranks begin after rank 0
 * has begun. MPI keeps an order itself, because ranks may have other numbers in another context. */
static int open_comms_in_turn(struct zero_ctx *z)
{
    bool is_first = z->world.rank == 0;
    int err = 0;
    if (!z->backend->opens_in_turn) {
        ZR_TRY(zr_agree_on_success(z, is_first ? begin_to_open(z) : 0));
        err = is_first ? 0 : begin_to_open(z);
    }
    err = zr_agree_on_success(z, err ? err : zr_backend_open_comms(z));
    zr_open_name_end(z->open_name);
    return err;
}

static int open_context(struct zero_ctx *z, const struct zero_tensor *tensors, int32_t n_tensors,
                        const struct zero_config *cfg)
{
    struct zr_saved_error resolved;
    zr_error_save(&resolved, resolve(z, cfg));
    int err = take_name(z);
    if (err) /* Its ranks cannot be met: they would take this context for the other one. */
        return resolved.code ? zr_error_restore(&resolved) : err;
    err = zr_error_restore(&resolved);
    if (!err)
        err = open_flight(z);
    if (err && z->world.world == 1)
        return err;
    err = meet(z, err);
    if (err)
        return err;
    ZR_TRY(zr_agree_on_plan(z, prepare(z, tensors, n_tensors)));
    ZR_TRY(zr_whole_make(z));
    ZR_TRY(open_flight_peers(z));
    /* All ranks are here, so memory of their earlier contexts is free. */
    ZR_TRY(zr_agree_on_success(z, zr_memory_check(z)));
    ZR_TRY(open_comms_in_turn(z));
    ZR_TRY(zr_agree_on_success(z, zr_memory_check_gpu(z, true)));
    ZR_TRY(open_engine(z));
    return start(z);
}

/* Saves the flight recorder of a context that failed to open. Keeps the message of this thread. */
static void save_flight(struct zero_ctx *z, int err)
{
    struct zr_saved_error kept;
    char path[ZR_FLIGHT_PATH];
    zr_error_save(&kept, err);
    zr_flight_fail(z->flight, err, zr_error_text());
    if (zr_flight_save(z->flight, path))
        zr_warn(z->config.options.log, "this rank's flight recorder could not be written: %s",
                zr_error_text());
    zr_error_restore(&kept);
}

int zero_wrap(zero_ctx **out, const struct zero_tensor *tensors, int32_t n_tensors,
              const struct zero_config *cfg)
{
    if (!out)
        return zr_fail(ZERO_ERR_ARG, "zero_wrap: out is NULL");
    *out = NULL;
    struct zero_ctx *z;
    ZR_TRY(ZR_ZALLOC(z, 1, "a context"));
    z->files = &zr_files_posix;
    int err = zr_engine_new(&z->engine);
    if (!err)
        err = open_context(z, tensors, n_tensors, cfg);
    if (err) {
        if (z->world.name[0])
            zr_fail_more(err, "zero_wrap of \"%s\"", z->world.name);
        else
            zr_fail_more(err, "zero_wrap");
        save_flight(z, err);
        zr_backend_abort_comms(z, err);
        zr_tear_down(z);
        return err;
    }
    zr_old_params_fill(z);
    zr_engine_point(z->engine, !z->init_later);
    zr_wrap_report(z);
    if (!z->loop) /* This context has no other ranks. */
        zr_progress_open(&z->progress, z->config.options.log);
    zr_progress_begin(&z->progress, z->config.options.grad_accum_steps);
    zr_flight_leave(z->flight);
    *out = z;
    return 0;
}
