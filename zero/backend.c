/* SPDX-License-Identifier: Apache-2.0 */
/* backend.c: chooses the device and the backend of a context, and opens them. Only this file has the table of
 * backends. All others use the row that was chosen. */
#include "shard/engine/check/check_comm.h"
#include "zero/context.h"

#include <stdio.h>
#include <string.h>

#define DECLARED(name, value, key, text) extern const struct zr_backend zr_backend_##key;
ZERO_BACKEND_MAP(DECLARED)
#undef DECLARED

/* Backends by their number. 0 is auto. */
static const struct zr_backend *const backends[] = {NULL,
#define ROW(name, value, key, text) [value] = &zr_backend_##key,
                                                    ZERO_BACKEND_MAP(ROW)
#undef ROW
};
_Static_assert(sizeof backends / sizeof *backends == ZR_BACKEND_COUNT, "numbers without gaps");

const struct zr_backend *zr_backend_row(int32_t number)
{
    return number > 0 && number < ZR_BACKEND_COUNT ? backends[number] : NULL;
}

int32_t zr_backend_number(const struct zr_backend *row)
{
    int32_t i = 0;
    while (i < ZR_BACKEND_COUNT && backends[i] != row)
        i++;
    return i;
}

static bool on_gpu(const struct zr_config *c)
{
    return c->user.device == ZERO_DEVICE_CUDA;
}

static const char *device_name(const struct zr_config *c)
{
    return on_gpu(c) ? "cuda" : "host";
}

const struct zr_backend *zr_backend_of_user_comm(const struct zero_config *c, void **comm)
{
    const char *device = c->device == ZERO_DEVICE_CUDA ? "cuda" : "host";
    int i = 1;
    *comm = c->device == ZERO_DEVICE_CUDA ? c->launch.nccl_comm : c->launch.mpi_comm;
    if (!*comm)
        return NULL;
    while (i < ZR_BACKEND_COUNT && (!backends[i]->user_comm_world || strcmp(backends[i]->device, device)))
        i++;
    return i < ZR_BACKEND_COUNT ? backends[i] : NULL;
}

/* Whether a program on this device may choose the backend in a world of this size. */
static bool is_for(const struct zr_backend *b, const char *device, int world)
{
    return (!b->device || strcmp(b->device, device) == 0) && (!b->alone || world == 1);
}

/* Writes "auto, shm, self". Backends made for the device come first. */
static void list_allowed(const char *device, int world, bool takes_comm, char *text, size_t n_text)
{
    int n = snprintf(text, n_text, "auto");
    for (int of_any = 0; of_any <= 1; of_any++)
        for (int i = 1; i < ZR_BACKEND_COUNT; i++) {
            const struct zr_backend *b = backends[i];
            if (is_for(b, device, world) && (b->device ? !of_any : of_any) &&
                (!takes_comm || b->user_comm_world) && (size_t)n < n_text)
                n += snprintf(text + n, n_text - (size_t)n, ", %s", b->name);
        }
}

/* Checks the backend that the configuration names. */
static int check_named(const struct zr_config *config, const struct zr_backend *b, int world)
{
    const char *device = device_name(config);
    char allowed[128];
    void *comm;
    const struct zr_backend *user_backend = zr_backend_of_user_comm(&config->user, &comm);
    list_allowed(device, world, false, allowed, sizeof allowed);
    if (b->alone && world > 1)
        return zr_fail(ZERO_ERR_ARG, "backend is %s, which is for world 1, but world is %d; allowed: %s",
                       b->name, world, allowed);
    if (!is_for(b, device, world))
        return zr_fail(ZERO_ERR_ARG, "backend is %s, but device is %s; allowed: %s", b->name, device,
                       allowed);
    list_allowed(device, world, true, allowed, sizeof allowed);
    if (comm && !b->user_comm_world)
        return zr_fail(ZERO_ERR_ARG, "backend is %s, but %s is set; allowed: %s", b->name,
                       user_backend->user_comm_name, allowed);
    return 0;
}

/* Returns the first backend that fits, or the one that a communicator of the program belongs to. */
static const struct zr_backend *choose_automatically(const struct zr_config *config, int world)
{
    const char *device = device_name(config);
    int i = 1;
    void *comm;
    const struct zr_backend *user_backend = zr_backend_of_user_comm(&config->user, &comm);
    if (user_backend)
        return user_backend;
    while (i < ZR_BACKEND_COUNT && !is_for(backends[i], device, world))
        i++;
    return i < ZR_BACKEND_COUNT ? backends[i] : NULL;
}

int zr_backend_choose(struct zr_config *config, int world, const struct zr_backend **out)
{
    const struct zr_backend *b = zr_backend_row(config->user.launch.backend);
    ZR_TRY(b ? check_named(config, b, world) : 0);
    b = b ? b : choose_automatically(config, world);
    if (!b)
        return zr_fail(ZERO_ERR_NOTSUP, "there is no backend for device %s with world %d",
                       device_name(config), world);
    if (b->costly_tree && config->user.deterministic == ZERO_AUTO)
        config->options.deterministic = false;
    *out = b;
    return 0;
}

/* Writes the backends that join ranks of several hosts: "backend nccl (device cuda)". */
static void list_for_hosts(char *text, size_t n_text)
{
    int n = 0;
    text[0] = 0;
    for (int i = 1; i < ZR_BACKEND_COUNT; i++) {
        const struct zr_backend *b = backends[i];
        if (!b->alone && !b->check_hosts && (size_t)n < n_text)
            n += snprintf(text + n, n_text - (size_t)n, "%s%s (device %s)", n ? " or " : "backend ", b->name,
                          b->device ? b->device : "any");
    }
}

int zr_backend_check_hosts(const struct zero_ctx *z)
{
    struct zr_saved_error why;
    char hosts[512], others[128];
    int err = z->backend->check_hosts ? z->backend->check_hosts(&z->topology, &z->mesh.world) : 0;
    if (!err || z->topology.n_hosts == 1)
        return err;
    zr_error_save(&why, err);
    zr_topology_list_hosts(&z->topology, hosts, sizeof hosts);
    list_for_hosts(others, sizeof others);
    return zr_fail(err, "%s (%s); several hosts need %s", why.text, hosts, others);
}

/* ---- what the communicator of each role moves, and what it needs of the plan ---- */

/* What the functions below compute slices from. */
struct plan_of_slices {
    const struct zr_backend *backend;
    const struct zr_layout *layout;
    const struct zr_options *options;
};

/* The slices of a flat that the communicators of one axis move, inside shard groups (inner) or between them
 * (outer). The bytes of the largest slice are between least, if gradients are narrowed on the wire, and most,
 * if it travels in fp32. must_pack: they are packed even if the unit's other slices are large. travel: any of
 * them travel. */
struct slices {
    int64_t least, most;
    bool must_pack, travel;
};

/* Adds to s whether its slices must be packed: if the last slices of an equal cut are short (is_short), or if
 * slices that are cut at a list of places are small. */
static struct slices with_packing(struct slices s, const struct zr_cut *c, bool is_short, int64_t small_bytes)
{
    s.must_pack = c->at ? s.least <= small_bytes : is_short;
    s.most = c->at ? zr_min(s.most, small_bytes) : s.most;
    return s;
}

/* Returns the bytes of the largest slice. If every rank keeps all gradient sums, these are gathered too, in
 * fp32. */
static int64_t largest_inner_slice(const struct plan_of_slices *a, const struct zr_flat *f)
{
    bool sums = a->layout->outer == 1 && zr_placement_asked(a->options).all_reduces && f->trainable;
    return f->inner_elems * (sums ? (int64_t)sizeof(float) : zr_dtype_bytes(f->dtype));
}

/* The slices of a shard group. Gradients may travel in a narrower dtype. */
static struct slices inner_slices(const struct plan_of_slices *a, const struct zr_flat *f)
{
    const struct zr_options *o = a->options;
    int64_t slice_bytes = f->inner_elems * zr_dtype_bytes(f->dtype);
    const struct slices s = {
        .least =
            o->wire_dtype ? zr_min(slice_bytes, f->inner_elems * zr_dtype_bytes(o->wire_dtype)) : slice_bytes,
        .most = largest_inner_slice(a, f),
        .travel = f->trainable || zr_placement_asked(o).shards_params};
    return with_packing(s, &f->inner, f->inner.total < slice_bytes * a->layout->inner,
                        a->backend->small_bytes);
}

/* Each inner slice is cut into fine slices, which one replicate group moves. Returns the bytes of the largest
 * fine slice of the inner slice where that is smallest. */
static int64_t least_of_groups(const struct zr_layout *l, const struct zr_flat *f)
{
    int64_t least = f->fine_elems * zr_dtype_bytes(f->dtype);
    for (int32_t k = 0; f->fine.at && k < l->inner; k++) {
        const struct zr_cut groups = zr_flat_groups_cut(f, k);
        least = groups.total > 0 ? zr_min(least, zr_cut_most(&groups, l->outer)) : least;
    }
    return least;
}

/* The slices that travel between shard groups: of parameters, and of fp32 sums. */
static struct slices outer_slices(const struct plan_of_slices *a, const struct zr_flat *f)
{
    const struct slices s = {.least = least_of_groups(a->layout, f),
                             .most = f->fine_elems * (int64_t)sizeof(float),
                             .travel = true};
    return with_packing(s, &f->fine, f->fine.total < s.least * a->layout->world, a->backend->small_bytes);
}

typedef struct slices slices_of(const struct plan_of_slices *a, const struct zr_flat *f);

/* Returns the most bytes that one rank packs for one unit. Slices are packed if they are small or unequal. */
static int64_t packed_bytes(const struct plan_of_slices *a, slices_of *slices_of_flat)
{
    const struct zr_layout *l = a->layout;
    int64_t most = 0;
    for (int32_t u = 0; u < l->n_units; u++) {
        int64_t bytes = 0;
        int n = 0;
        bool any_alone = false;
        for (int32_t i = 0; i < l->units[u].n_flats; i++) {
            const struct slices s = slices_of_flat(a, &l->flats[l->units[u].first_flat + i]);
            if (!s.travel || (!s.must_pack && s.least > a->backend->small_bytes))
                continue;
            bytes += s.most;
            any_alone |= s.must_pack;
            n++;
        }
        if (any_alone || n > 1)
            most = zr_max(most, bytes);
    }
    return most;
}

/* Returns the bytes of the largest slice of an activation that a rank of tp or cp adds up. */
static int64_t largest_of_axis(int32_t n_ranks)
{
    return zr_round_up(ZR_AXIS_ELEMS * (int64_t)sizeof(float) / zr_max(n_ranks, 1), ZR_PIECE_ALIGN);
}

/* Sets what the communicator of each role has to move, but not its group. */
static void ask_roles(const struct zr_backend *b, const struct zr_layout *l, const struct zr_options *o,
                      struct zr_role_ask ask[ZR_ROLES])
{
    const struct plan_of_slices a = {b, l, o};
    int64_t inner = 0, outer = 0, gathered = 0;
    memset(ask, 0, ZR_ROLES * sizeof *ask);
    for (int32_t i = 0; i < l->n_flats; i++) {
        const struct zr_flat *f = &l->flats[i];
        gathered = inner_slices(&a, f).travel ? zr_max(gathered, largest_inner_slice(&a, f)) : gathered;
        inner = f->trainable ? zr_max(inner, f->inner_elems * zr_dtype_bytes(f->dtype)) : inner;
        outer = f->trainable ? zr_max(outer, f->fine_elems * (int64_t)sizeof(float)) : outer;
    }
    ask[ZR_ROLE_GATHER].largest_bytes = gathered;
    ask[ZR_ROLE_REDUCE].largest_bytes = inner;
    ask[ZR_ROLE_GATHER_OUTER].largest_bytes = ask[ZR_ROLE_REDUCE_OUTER].largest_bytes = outer;
    /* The last slice of an activation may be short. */
    ask[ZR_ROLE_TP].largest_bytes = ask[ZR_ROLE_TP].packed_bytes = largest_of_axis(o->tp);
    ask[ZR_ROLE_CP].largest_bytes = ask[ZR_ROLE_CP].packed_bytes = largest_of_axis(o->cp);
    ask[ZR_ROLE_GATHER].packed_bytes = ask[ZR_ROLE_REDUCE].packed_bytes = packed_bytes(&a, inner_slices);
    ask[ZR_ROLE_GATHER_OUTER].packed_bytes = ask[ZR_ROLE_REDUCE_OUTER].packed_bytes =
        packed_bytes(&a, outer_slices);
}

/* Whether some slices, or their sums, are too large to be packed. */
static bool is_ragged(const struct zr_backend *b, const struct zr_layout *l, const struct zr_options *o)
{
    const struct plan_of_slices a = {b, l, o};
    bool ragged = false;
    for (int32_t i = 0; i < l->n_flats; i++) {
        const struct zr_flat *f = &l->flats[i];
        bool large = largest_inner_slice(&a, f) > b->small_bytes;
        ragged |= f->inner.at && large && inner_slices(&a, f).travel;
    }
    return ragged;
}

void zr_backend_reserve(struct zr_config *config, const struct zr_backend *b, const struct zr_layout *layout)
{
    struct zr_options *o = &config->options;
    struct zr_role_ask ask[ZR_ROLES];
    int64_t bytes[ZR_ROLES] = {0};
    const bool groups = layout->outer > 1, stages = o->pp > 1, axes = o->tp > 1 || o->cp > 1;
    /* The ranks of each role. 0: no rank has it, or it reserves nothing. */
    const struct zr_group size[ZR_ROLES] = {
        [ZR_ROLE_GATHER].size = layout->inner,
        [ZR_ROLE_REDUCE].size = layout->inner,
        [ZR_ROLE_GATHER_OUTER].size = groups ? layout->outer : 0,
        [ZR_ROLE_REDUCE_OUTER].size = groups ? layout->outer : 0,
        [ZR_ROLE_CONTROL].size = groups || stages ? layout->world : 0,
        [ZR_ROLE_TP].size = o->tp > 1 ? o->tp : 0,
        [ZR_ROLE_CP].size = o->cp > 1 ? o->cp : 0,
        [ZR_ROLE_WORLD].size = axes || stages ? layout->world * zr_max(o->tp, 1) * zr_max(o->pp, 1) : 0};
    if (!b->reserve)
        return;
    ask_roles(b, layout, o, ask);
    for (int r = 0; r < ZR_ROLES; r++) {
        ask[r].group = &size[r];
        bytes[r] = size[r].size ? b->reserve((enum zr_role)r, &ask[r], o->deterministic) : 0;
    }
    /* Without an arena of its own, the world's communicator has that of gradients (engine.c). */
    const bool in_control = groups || stages;
    o->gather_scratch_bytes = bytes[ZR_ROLE_GATHER] + bytes[ZR_ROLE_GATHER_OUTER];
    o->reduce_scratch_bytes =
        bytes[ZR_ROLE_REDUCE] + bytes[ZR_ROLE_REDUCE_OUTER] + (in_control ? 0 : bytes[ZR_ROLE_WORLD]);
    o->control_scratch_bytes = bytes[ZR_ROLE_CONTROL] + (in_control ? bytes[ZR_ROLE_WORLD] : 0);
    o->tp_scratch_bytes = bytes[ZR_ROLE_TP];
    o->cp_scratch_bytes = bytes[ZR_ROLE_CP];
    o->gather_packs_up_to = b->small_bytes;
    /* The fixed tree of deterministic sums packs nothing. */
    o->reduce_packs_up_to = o->deterministic ? 0 : b->small_bytes;
}

/* ---- opening and closing ---- */

int zr_backend_open_device(struct zero_ctx *z)
{
    bool gpu = z->user_comm_backend ? strcmp(z->user_comm_backend->device, "cuda") == 0 : on_gpu(&z->config);
    return gpu ? zr_cuda_device_open(ZR_CUDA_CURRENT, &z->device) : zr_host_device_open(&z->device);
}

/* Returns the group of ranks that a role's communicator joins. NULL: this role has no communicator of its
 * own. */
static const struct zr_group *group_of(const struct zero_ctx *z, enum zr_role role)
{
    bool groups = z->plan->placement.size[ZR_OUTER] > 1, stages = z->mesh.pp > 1,
         axes = z->mesh.tp > 1 || z->mesh.cp > 1;
    switch (role) {
    case ZR_ROLE_GATHER:
    case ZR_ROLE_REDUCE:
        return groups ? &z->mesh.shard_group : &z->mesh.dp_group;
    case ZR_ROLE_GATHER_OUTER:
    case ZR_ROLE_REDUCE_OUTER:
        return groups ? &z->mesh.replicate_group : NULL;
    case ZR_ROLE_CONTROL:
        return groups || stages ? &z->mesh.dp_group : NULL;
    case ZR_ROLE_TP:
        return z->mesh.tp > 1 ? &z->mesh.tp_group : NULL;
    case ZR_ROLE_CP:
        return z->mesh.cp > 1 ? &z->mesh.cp_group : NULL;
    case ZR_ROLE_WORLD:
        return axes || stages ? &z->mesh.world : NULL;
    case ZR_ROLE_EVEN_PAIR:
        return stages ? &z->mesh.pair[0] : NULL;
    case ZR_ROLE_ODD_PAIR:
        return z->mesh.pp > 2 ? &z->mesh.pair[1] : NULL;
    case ZR_ROLE_CLOSING_PAIR:
        return stages && z->config.user.pipeline.stages_per_rank > 1 ? &z->mesh.ends : NULL;
    case ZR_ROLE_TIED:
        return stages ? &z->mesh.ends : NULL;
    case ZR_ROLES:
        break;
    }
    return NULL;
}

int zr_backend_open_comms(struct zero_ctx *z)
{
    const struct zr_options *o = &z->config.options;
    const struct zr_backend_config config = {.timeout_ms = o->timeout_ms,
                                             .start_timeout_ms = z->start_ms,
                                             .deterministic = o->deterministic,
                                             .ragged = is_ragged(z->backend, z->layout, o),
                                             .copy_engine = z->config.user.launch.copy_engine == 1,
                                             .topology = &z->topology,
                                             .user_comm = z->user_comm.comm,
                                             .found_by = z->world.is_given ? NULL : z->world.size_from,
                                             .log = o->log};
    struct zr_role_ask ask[ZR_ROLES];
    ask_roles(z->backend, z->layout, o, ask);
    for (int r = 0; r < ZR_ROLES; r++)
        ask[r].group = group_of(z, (enum zr_role)r);
    int err = z->backend->open(z->rendezvous, z->device, &config, ask, z->comm);
    for (int r = 0; !err && z->check && r < ZR_ROLES; r++)
        if (z->comm[r])
            err = zr_check_comm_watch(z->check, z->comm[r]);
    if (!z->comm[ZR_ROLE_CONTROL])
        z->comm[ZR_ROLE_CONTROL] = z->comm[ZR_ROLE_REDUCE];
    return err;
}

const char *zr_backend_path(const struct zero_ctx *z)
{
    return z->backend->path ? z->backend->path(z->comm[ZR_ROLE_GATHER]) : z->backend->name;
}

void zr_backend_abort_comms(struct zero_ctx *z, int err)
{
    struct zr_saved_error why;
    zr_error_save(&why, err);
    for (int r = 0; r < ZR_ROLES; r++)
        if (z->comm[r])
            z->comm[r]->ops->abort(z->comm[r], err, why.text);
    zr_error_restore(&why);
}

void zr_backend_close_comms(struct zero_ctx *z)
{
    for (int r = 0; r < ZR_ROLES; r++)
        if (z->comm[r] && (r != ZR_ROLE_CONTROL || z->comm[r] != z->comm[ZR_ROLE_REDUCE]))
            zr_comm_close(z->comm[r]);
}
