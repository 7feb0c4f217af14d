/* SPDX-License-Identifier: Apache-2.0 */
/* gather_all.c: zero_gather_all and zero_release_all. Checks the calls and lets all ranks agree.
 * shard/engine/gather_all.c moves the data. */
#include "zero/context.h"

/* Checks param_budget_bytes. It counts gathered parameters where the model computes, and the slots are part
 * of it already. */
static int check_budget(const struct zero_ctx *z, int64_t bytes)
{
    int64_t budget = z->config.options.param_budget_bytes, slots = 0;
    for (int32_t i = 0; i < z->plan->n_param_slots; i++)
        slots += z->plan->param_slots[i].bytes;
    if (!z->plan->placement.shards_params || budget < 0 || bytes + slots <= budget)
        return 0;
    return zr_fail(ZERO_ERR_BUDGET,
                   "all parameters take %lld bytes on top of the %lld of the slots, but param_budget_bytes "
                   "is %lld: raise it, or gather to ZERO_DEVICE_HOST",
                   (long long)bytes, (long long)slots, (long long)budget);
}

/* Whether the parameters go to host memory as copies, while the model computes on a GPU. */
static bool are_apart(const struct zero_ctx *z, int where)
{
    return !z->device->ops->host_memory && where == ZERO_DEVICE_HOST;
}

static int64_t all_bytes(const struct zero_ctx *z, int where)
{
    return zr_engine_all_bytes(z->engine, are_apart(z, where));
}

/* Checks and allocates without other ranks. */
static int take_room(struct zero_ctx *z, int where)
{
    bool gpu = !z->device->ops->host_memory, on_host = where == ZERO_DEVICE_HOST, apart = are_apart(z, where);
    struct zr_core_event ev = {.kind = ZR_EV_GATHER_ALL, .unit = where};
    int64_t bytes = all_bytes(z, where);
    ZR_TRY(zr_pointers_check(z->engine, &ev));
    if (!on_host)
        ZR_TRY(check_budget(z, bytes));
    ZR_TRY(zr_memory_check_room(z, bytes, !gpu || on_host));
    return zr_engine_all_open(z->engine, apart);
}

int zero_gather_all(zero_ctx *z, int where)
{
    ZR_BEGIN_CALL(z, ZR_CALL_GATHER_ALL);
    bool gpu = !z->device->ops->host_memory;
    if (where != 0 && where != ZERO_DEVICE_HOST && (where != ZERO_DEVICE_CUDA || !gpu))
        return zr_fail(ZERO_ERR_ARG, "zero_gather_all: where is %d; allowed: 0, ZERO_DEVICE_HOST%s", where,
                       gpu ? ", ZERO_DEVICE_CUDA" : " (ZERO_DEVICE_CUDA only if cfg.device is cuda)");
    if (zr_engine_holds_all(z->engine))
        return zr_fail(ZERO_ERR_ORDER,
                       "zero_gather_all: all parameters are already gathered; call zero_release_all first");
    zr_engine_called(z->engine, (uint64_t)where);
    ZR_TRY(zr_memory_ask(z, all_bytes(z, where)));
    int err = zr_agree_in_run(z, take_room(z, where));
    if (!err)
        err = zr_engine_all_gather(z->engine, where);
    else
        zr_engine_all_close(z->engine);
    return err ? zr_fail_more(err, "zero_gather_all") : 0;
}

int zero_release_all(zero_ctx *z)
{
    ZR_BEGIN_CALL(z, ZR_CALL_RELEASE_ALL);
    return zr_engine_all_release(z->engine);
}
