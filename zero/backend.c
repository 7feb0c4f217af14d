/* backend.c: which device and which communicator a context works with, and opening them. */
#include "shard/check_comm.h"
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

/* Of one rank, in one unit: slices that have to be brought to one length. At stage 0 reduced gradients are
 * gathered too, in fp32. */
static int64_t ragged_bytes(const struct zr_layout *l, int stage)
{
    int64_t most = 0;
    for (int32_t u = 0; u < l->n_units; u++) {
        int64_t n = 0;
        for (int32_t i = 0; i < l->units[u].n_flats; i++) {
            const struct zr_flat *f = &l->flats[l->units[u].first_flat + i];
            if (f->trainable && f->total_bytes < f->shard_bytes * l->world)
                n += stage == 0 ? f->shard_elems * (int64_t)sizeof(float) : f->shard_bytes;
        }
        most = zr_max(most, n);
    }
    return most;
}

void zr_backend_reserve(struct zr_config *config, enum zero_backend backend, const struct zr_layout *layout)
{
    int64_t largest = 0;
    for (int32_t i = 0; i < layout->n_flats; i++)
        if (layout->flats[i].trainable)
            largest = zr_max(largest, layout->flats[i].shard_bytes);
    if (backend == ZERO_BACKEND_NCCL)
        config->options.scratch_bytes =
            zr_nccl_reserve_bytes(layout->world, config->options.deterministic, largest,
                                  ragged_bytes(layout, config->options.stage));
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
                                         .reserve_bytes = o->scratch_bytes,
                                         .ragged_bytes = ragged_bytes(z->layout, o->stage),
                                         .copy_engine = copy_engine == ZERO_AUTO ? 0
                                                        : copy_engine            ? 1
                                                                                 : -1,
                                         .lent = z->config.user.nccl_comm,
                                         .log = o->log};
    int err = zr_nccl_open(z->rendezvous, z->device, &nccl, &z->gather, &z->reduce);
    z->nccl = err ? NULL : z->gather;
    return err;
}

int zr_backend_open_comms(struct zero_ctx *z, enum zero_backend backend)
{
    const struct zr_options *o = &z->config.options;
    int err = 0;
    if (backend == ZERO_BACKEND_SELF) {
        err = zr_self_open(z->device, &z->gather);
        if (!err)
            err = zr_self_open(z->device, &z->reduce);
    } else if (backend == ZERO_BACKEND_SHM) {
        err = zr_shm_open(z->rendezvous, z->device, "gather", o->timeout_ms, &z->gather);
        if (!err)
            err = zr_shm_open(z->rendezvous, z->device, "reduce", o->timeout_ms, &z->reduce);
        if (!err)
            zr_shm_pair(z->gather, z->reduce);
    } else {
        err = open_nccl(z);
    }
    if (!err && z->check)
        err = zr_check_comm_open(z->check, z->gather, "gather", &z->gather);
    if (!err && z->check)
        err = zr_check_comm_open(z->check, z->reduce, "reduce", &z->reduce);
    return err;
}
