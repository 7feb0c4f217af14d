/* backend.c: which device and which communicator a context works with, and opening them. */
#include "comm/nccl/nccl_options.h"
#include "shard/engine/check_comm.h"
#include "zero/context.h"

#include <stdio.h>
#include <string.h>

static bool on_gpu(const struct zr_config *c)
{
    return c->user.device == ZERO_DEVICE_CUDA;
}

int zr_backend_choose(struct zr_config *config, int world, enum zero_backend *out)
{
    enum zero_backend want = (enum zero_backend)config->user.backend, many = ZERO_BACKEND_SHM;
    const char *device = "host", *allowed = "auto, shm";
    if (on_gpu(config)) {
        device = "cuda";
        allowed = "auto, nccl";
        many = ZERO_BACKEND_NCCL;
    }
    if (want == ZERO_BACKEND_SELF && world > 1)
        return zr_fail(ZR_ERR_ARG, "backend is self, which is for world 1, but world is %d; allowed: %s",
                       world, allowed);
    if (want != ZERO_BACKEND_AUTO && want != ZERO_BACKEND_SELF && want != many)
        return zr_fail(ZR_ERR_ARG, "backend is %s, but device is %s; allowed: %s%s",
                       want == ZERO_BACKEND_NCCL ? "nccl" : "shm", device, allowed,
                       world == 1 ? ", self" : "");
    bool lent = config->user.nccl_comm != NULL;
    if (lent && want == ZERO_BACKEND_SELF)
        return zr_fail(ZR_ERR_ARG, "backend is self, but nccl_comm is set; allowed: auto, nccl");
    *out = want != ZERO_BACKEND_AUTO ? want : world == 1 && !lent ? ZERO_BACKEND_SELF : many;
    /* The fixed tree is how self and shm reduce anyway. NCCL has to send every rank's share to its owner for
     * it. */
    if (*out == ZERO_BACKEND_NCCL && config->user.deterministic == ZERO_AUTO)
        config->options.deterministic = false;
    return 0;
}

/* A flat's slices on the wire of one axis: bytes at least and at most, whether the last ones are short, and
 * whether any travel. */
struct slices {
    int64_t least, most;
    bool is_short, travel;
};

/* Gradients may be narrowed for it, and where every rank has all of the sums those are gathered too, in fp32.
 */
static struct slices inner_slices(const struct zr_layout *l, const struct zr_options *o,
                                  const struct zr_flat *f)
{
    const struct zr_placement asked = zr_placement_asked(o);
    int64_t each = f->inner.each;
    bool sums = l->outer == 1 && asked.all_reduces && f->trainable;
    return (struct slices){
        .least = o->wire_dtype ? zr_min(each, f->inner_elems * zr_dtype_bytes(o->wire_dtype)) : each,
        .most = sums ? f->inner_elems * (int64_t)sizeof(float) : each,
        .is_short = f->inner.total < each * l->inner,
        .travel = f->trainable || asked.shards_params};
}

/* Between groups: parameters, and sums in fp32. */
static struct slices outer_slices(const struct zr_layout *l, const struct zr_options *o,
                                  const struct zr_flat *f)
{
    (void)o;
    return (struct slices){.least = f->fine.each,
                           .most = f->fine_elems * (int64_t)sizeof(float),
                           .is_short = f->fine.total < f->fine.each * l->world,
                           .travel = true};
}

typedef struct slices slices_of(const struct zr_layout *l, const struct zr_options *o,
                                const struct zr_flat *f);

/* Of one rank, in one unit: slices that NCCL's communicators pack, because they are small or the last ones
 * short. */
static int64_t packed_bytes(const struct zr_layout *l, const struct zr_options *o, slices_of *of)
{
    int64_t most = 0;
    for (int32_t u = 0; u < l->n_units; u++) {
        int64_t bytes = 0;
        int n = 0;
        bool any_short = false;
        for (int32_t i = 0; i < l->units[u].n_flats; i++) {
            const struct slices s = of(l, o, &l->flats[l->units[u].first_flat + i]);
            if (!s.travel || (!s.is_short && s.least > ZR_NCCL_SMALL_BYTES))
                continue;
            bytes += s.most;
            any_short |= s.is_short;
            n++;
        }
        if (any_short || n > 1)
            most = zr_max(most, bytes);
    }
    return most;
}

/* What every role's communicator is to move; of which group is left open. */
static void ask_roles(const struct zr_layout *l, const struct zr_options *o, struct zr_role_ask ask[ZR_ROLES])
{
    int64_t inner = 0, outer = 0;
    memset(ask, 0, ZR_ROLES * sizeof *ask);
    for (int32_t i = 0; i < l->n_flats; i++) {
        const struct zr_flat *f = &l->flats[i];
        inner = f->trainable ? zr_max(inner, f->inner.each) : inner;
        outer = f->trainable ? zr_max(outer, f->fine_elems * (int64_t)sizeof(float)) : outer;
    }
    ask[ZR_ROLE_REDUCE].largest_bytes = inner;
    ask[ZR_ROLE_REDUCE_OUTER].largest_bytes = outer;
    ask[ZR_ROLE_GATHER].packed_bytes = ask[ZR_ROLE_REDUCE].packed_bytes = packed_bytes(l, o, inner_slices);
    ask[ZR_ROLE_GATHER_OUTER].packed_bytes = ask[ZR_ROLE_REDUCE_OUTER].packed_bytes =
        packed_bytes(l, o, outer_slices);
}

/* The first tensor whose granule made a flat be cut at places. */
static int refuse_granule(const struct zr_layout *l)
{
    for (int32_t i = 0; i < l->n_flats; i++)
        for (int32_t k = 0; l->flats[i].fine.at && k < l->flats[i].n_pieces; k++) {
            int32_t t = l->pieces[l->flats[i].first_piece + k].tensor;
            if (l->tensors[t].granule > 1 && 32 % l->tensors[t].granule)
                return zr_fail(
                    ZR_ERR_NOTSUP,
                    "tensors[%d] (%s): granule is %lld; allowed with backend nccl, where all slices "
                    "are equal: numbers that divide 32",
                    t, l->tensors[t].name, (long long)l->tensors[t].granule);
        }
    return 0;
}

int zr_backend_reserve(struct zr_config *config, enum zero_backend backend, const struct zr_layout *layout)
{
    struct zr_options *o = &config->options;
    struct zr_role_ask ask[ZR_ROLES];
    int64_t bytes[ZR_ROLES] = {0};
    const struct zr_group sizes[] = {
        {.size = layout->inner}, {.size = layout->outer}, {.size = layout->world}};
    if (backend != ZERO_BACKEND_NCCL)
        return 0;
    if (layout->has_places)
        return refuse_granule(layout);
    ask_roles(layout, o, ask);
    for (int r = 0; r < (layout->outer > 1 ? ZR_ROLES : ZR_ROLE_GATHER_OUTER); r++) {
        ask[r].group = &sizes[r / 2]; /* roles come in pairs of one group */
        bytes[r] = zr_nccl_role_bytes((enum zr_role)r, &ask[r], o->deterministic);
    }
    o->gather_scratch_bytes = bytes[ZR_ROLE_GATHER] + bytes[ZR_ROLE_GATHER_OUTER];
    o->reduce_scratch_bytes = bytes[ZR_ROLE_REDUCE] + bytes[ZR_ROLE_REDUCE_OUTER];
    o->control_scratch_bytes = bytes[ZR_ROLE_CONTROL];
    return 0;
}

int zr_backend_open_device(struct zero_ctx *z)
{
    return on_gpu(&z->config) || z->lent ? zr_cuda_device_open(ZR_CUDA_CURRENT, &z->device)
                                         : zr_host_device_open(&z->device);
}

/* Whose ranks a role joins; NULL: there are no groups, and it is nobody's or another's. */
static const struct zr_group *group_of(const struct zero_ctx *z, enum zr_role role)
{
    bool groups = z->plan->place.size[ZR_OUTER] > 1;
    if (role <= ZR_ROLE_REDUCE)
        return groups ? &z->mesh.in : &z->mesh.all;
    if (!groups)
        return NULL;
    return role == ZR_ROLE_CONTROL ? &z->mesh.all : &z->mesh.out;
}

static int open_nccl(struct zero_ctx *z)
{
    const struct zr_options *o = &z->config.options;
    int copy_engine = z->config.user.copy_engine;
    const struct zr_nccl_options nccl = {.timeout_ms = o->timeout_ms,
                                         .deterministic = o->deterministic,
                                         .small_bytes = ZR_NCCL_SMALL_BYTES,
                                         .copy_engine = copy_engine == ZERO_AUTO ? 0
                                                        : copy_engine            ? 1
                                                                                 : -1,
                                         .lent = z->config.user.nccl_comm,
                                         .log = o->log};
    struct zr_role_ask ask[ZR_ROLES];
    ask_roles(z->layout, o, ask);
    for (int r = 0; r < ZR_ROLES; r++)
        ask[r].group = group_of(z, (enum zr_role)r);
    int err = zr_nccl_open(z->rendezvous, z->device, &nccl, ask, z->comm);
    z->nccl = err ? NULL : z->comm[ZR_ROLE_GATHER];
    return err;
}

static int open_shm(struct zero_ctx *z)
{
    struct zr_comm *open[ZR_ROLES];
    int err = 0, n = 0;
    for (int r = 0; !err && r < ZR_ROLES; r++)
        if (group_of(z, (enum zr_role)r)) {
            err = zr_shm_open(z->rendezvous, z->device, group_of(z, (enum zr_role)r), (enum zr_role)r,
                              z->config.options.timeout_ms, &z->comm[r]);
            open[n++] = z->comm[r];
        }
    if (!err)
        zr_shm_link(open, n);
    return err;
}

static int open_self(struct zero_ctx *z)
{
    int err = 0;
    for (int r = ZR_ROLE_GATHER; !err && r <= ZR_ROLE_REDUCE; r++)
        err = zr_self_open(z->device, (enum zr_role)r, &z->comm[r]);
    return err;
}

int zr_backend_open_comms(struct zero_ctx *z, enum zero_backend backend)
{
    int err = backend == ZERO_BACKEND_SELF  ? open_self(z)
              : backend == ZERO_BACKEND_SHM ? open_shm(z)
                                            : open_nccl(z);
    for (int r = 0; !err && z->check && r < ZR_ROLES; r++)
        if (z->comm[r])
            err = zr_check_comm_open(z->check, z->comm[r], &z->comm[r]);
    if (!z->comm[ZR_ROLE_CONTROL])
        z->comm[ZR_ROLE_CONTROL] = z->comm[ZR_ROLE_REDUCE];
    return err;
}

void zr_backend_close_comms(struct zero_ctx *z)
{
    for (int r = 0; r < ZR_ROLES; r++)
        if (z->comm[r] && (r < ZR_ROLE_CONTROL || z->comm[r] != z->comm[ZR_ROLE_REDUCE]))
            z->comm[r]->ops->close(z->comm[r]);
}
