/* backend.c: which device and which communicator a context works with, and opening them. */
#include "shard/engine/check_comm.h"
#include "zero/context.h"

#include <stdio.h>

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

/* Bytes of a flat's slices on the wire, at least and at most: gradients may be narrowed for it, and where
 * every rank has all of the sums those are gathered too, in fp32. */
static int64_t least_slice(const struct zr_flat *f, const struct zr_options *o)
{
    return o->wire_dtype ? zr_min(f->inner.each, f->fine_elems * zr_dtype_bytes(o->wire_dtype))
                         : f->inner.each;
}

static int64_t most_slice(const struct zr_flat *f, const struct zr_options *o)
{
    return zr_placement_asked(o).all_reduces && f->trainable ? f->fine_elems * (int64_t)sizeof(float)
                                                             : f->inner.each;
}

/* Of one rank, in one unit: slices that NCCL's communicators pack, because they are small or the last ones
 * short. */
static int64_t packed_bytes(const struct zr_layout *l, const struct zr_options *o)
{
    int64_t most = 0;
    for (int32_t u = 0; u < l->n_units; u++) {
        int64_t bytes = 0;
        int n = 0;
        bool any_short = false;
        for (int32_t i = 0; i < l->units[u].n_flats; i++) {
            const struct zr_flat *f = &l->flats[l->units[u].first_flat + i];
            bool is_short = f->inner.total < f->inner.each * l->world;
            if ((!f->trainable && !zr_placement_asked(o).shards_params) ||
                (!is_short && least_slice(f, o) > ZR_NCCL_SMALL_BYTES))
                continue;
            bytes += most_slice(f, o);
            any_short |= is_short;
            n++;
        }
        if (any_short || n > 1)
            most = zr_max(most, bytes);
    }
    return most;
}

void zr_backend_reserve(struct zr_config *config, enum zero_backend backend, const struct zr_layout *layout)
{
    struct zr_options *o = &config->options;
    int64_t largest = 0;
    for (int32_t i = 0; i < layout->n_flats; i++)
        if (layout->flats[i].trainable)
            largest = zr_max(largest, layout->flats[i].inner.each);
    if (backend != ZERO_BACKEND_NCCL)
        return;
    int64_t packed = packed_bytes(layout, o);
    o->gather_scratch_bytes = zr_nccl_room_bytes(layout->world, packed);
    o->reduce_scratch_bytes = zr_nccl_reserve_bytes(layout->world, o->deterministic, largest, packed);
}

int zr_backend_open_device(struct zero_ctx *z)
{
    return on_gpu(&z->config) || z->lent ? zr_cuda_device_open(ZR_CUDA_CURRENT, &z->device)
                                         : zr_host_device_open(&z->device);
}

static int open_nccl(struct zero_ctx *z)
{
    const struct zr_options *o = &z->config.options;
    int copy_engine = z->config.user.copy_engine;
    const struct zr_nccl_options nccl = {.timeout_ms = o->timeout_ms,
                                         .deterministic = o->deterministic,
                                         .packed_bytes = packed_bytes(z->layout, o),
                                         .small_bytes = ZR_NCCL_SMALL_BYTES,
                                         .reserve_bytes = o->reduce_scratch_bytes,
                                         .copy_engine = copy_engine == ZERO_AUTO ? 0
                                                        : copy_engine            ? 1
                                                                                 : -1,
                                         .lent = z->config.user.nccl_comm,
                                         .log = o->log};
    int err = zr_nccl_open(z->rendezvous, z->device, &z->mesh.all, &nccl, &z->comm[ZR_ROLE_GATHER],
                           &z->comm[ZR_ROLE_REDUCE]);
    z->nccl = err ? NULL : z->comm[ZR_ROLE_GATHER];
    return err;
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

static int open_shm(struct zero_ctx *z)
{
    int err = 0;
    for (int r = 0; !err && r < ZR_ROLES; r++)
        if (group_of(z, (enum zr_role)r))
            err = zr_shm_open(z->rendezvous, z->device, group_of(z, (enum zr_role)r), (enum zr_role)r,
                              z->config.options.timeout_ms, &z->comm[r]);
    for (int r = ZR_ROLE_GATHER; !err && r < ZR_ROLE_CONTROL; r += 2) /* those of one group */
        if (z->comm[r])
            zr_shm_pair(z->comm[r], z->comm[r + 1]);
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
