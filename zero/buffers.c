/* SPDX-License-Identifier: Apache-2.0 */
/* buffers.c: zero_sync_buffers, and the checks of buffers that other calls need: does each have memory, and
 * are they equal on all ranks? */
#include "zero/context.h"

#include <stdio.h>

static bool is_integer(const struct zr_tensor *t)
{
    return t->dtype == ZERO_I32 || t->dtype == ZERO_I64;
}

int zr_buffers_check(const struct zero_ctx *z)
{
    for (int32_t i = 0; z->layout->n_buffers && i < z->layout->n_tensors; i++) {
        const struct zr_tensor *t = &z->layout->tensors[i];
        if (t->buffer && !*t->param)
            return zr_fail(
                ZERO_ERR_ORDER,
                "*param of buffer %s is NULL; the model must keep the buffer's memory until zero_unwrap",
                t->name);
    }
    return 0;
}

bool zr_buffers_exist(const struct zero_ctx *z)
{
    bool any = false;
    for (int32_t i = 0; i < z->whole.n; i++)
        any |= z->whole.tensors[i].buffer;
    return any;
}

bool zr_buffers_are_saved_here(const struct zero_ctx *z)
{
    return z->world.rank % (z->world.world / z->mesh.pp) == 0;
}

/* The first buffer element that differs from the one on the first rank, and its tensor. -1: all are equal. */
struct unequal {
    int64_t element;
    int32_t tensor;
    char name[ZR_EXCHANGE_BYTES - sizeof(int64_t) - sizeof(int32_t)];
};
_Static_assert(sizeof(struct unequal) <= ZR_EXCHANGE_BYTES, "as one part of an exchange");

/* Pipeline stages have different buffers, so each stage compares its own, and then all ranks exchange the
 * result. */
int zr_buffers_compare(struct zero_ctx *z, bool integers_only, bool *equal)
{
    struct unequal mine = {.element = -1}, *all = z->from_all;
    int err = 0, found = -1;
    for (int32_t i = 0; !err && i < z->layout->n_tensors; i++) {
        const struct zr_tensor *t = &z->layout->tensors[i];
        int64_t element;
        if (!t->buffer || (integers_only && !is_integer(t)))
            continue;
        err = zr_engine_compare_buffer(z->engine, i, &element);
        if (err || element < 0 || mine.element >= 0)
            continue;
        mine.element = element;
        mine.tensor = i;
        snprintf(mine.name, sizeof mine.name, "%s", t->name);
    }
    if (!err)
        err = zr_engine_exchange(z->engine, &mine, sizeof mine, all);
    for (int r = 0; !err && r < z->world.world; r++)
        if (all[r].element >= 0 && (found < 0 || all[r].tensor < all[found].tensor))
            found = r;
    *equal = found < 0;
    if (found >= 0)
        zr_fail(ZERO_ERR_MISMATCH, "element %lld of buffer %s differs between rank %d and rank %d",
                (long long)all[found].element, all[found].name, found, zr_first_of_part(z, found));
    return err;
}

/* Synchronizes one buffer. Integers were compared before, so ZERO_SYNC_MEAN leaves them. */
static int sync_one(struct zero_ctx *z, int32_t tensor, enum zero_sync how)
{
    if (how == ZERO_SYNC_RANK0)
        return zr_engine_spread_buffer(z->engine, tensor);
    return is_integer(&z->layout->tensors[tensor]) ? 0 : zr_engine_mean_buffer(z->engine, tensor);
}

static const char *how_name(int32_t how)
{
    return how == ZERO_SYNC_MEAN ? "ZERO_SYNC_MEAN" : "ZERO_SYNC_RANK0";
}

/* Compares the argument before data moves. Otherwise NCCL would wait for data that other ranks never send. */
static int agree_how(struct zero_ctx *z, int32_t how)
{
    int32_t *all = z->from_all;
    int err = zr_engine_exchange(z->engine, &how, sizeof how, all);
    for (int r = 1; !err && r < z->world.world; r++)
        if (all[r] != all[0])
            err = zr_fail(ZERO_ERR_MISMATCH,
                          "how is %s on rank %d and %s on rank 0; all ranks must give the same",
                          how_name(all[r]), r, how_name(all[0]));
    return err;
}

static int sync_all(struct zero_ctx *z, enum zero_sync how)
{
    bool equal = true;
    int err = zr_buffers_check(z);
    if (z->world.world == 1)
        return err;
    err = zr_agree_in_run(z, err);
    if (!err)
        err = agree_how(z, (int32_t)how);
    if (!err && how == ZERO_SYNC_MEAN)
        err = zr_buffers_compare(z, true, &equal);
    if (!err && !equal)
        err = zr_fail_more(ZERO_ERR_MISMATCH, "integers have no mean");
    for (int32_t i = 0; !err && i < z->layout->n_tensors; i++)
        if (z->layout->tensors[i].buffer)
            err = sync_one(z, i, how);
    return err;
}

int zero_sync_buffers(zero_ctx *z, int32_t how)
{
    ZR_BEGIN_CALL(z, ZR_CALL_SYNC_BUFFERS);
    if (how != ZERO_SYNC_MEAN && how != ZERO_SYNC_RANK0)
        return zr_fail(ZERO_ERR_ARG,
                       "zero_sync_buffers: how is %d; allowed: ZERO_SYNC_MEAN (1), ZERO_SYNC_RANK0 (2)", how);
    zr_engine_called(z->engine, (uint64_t)how);
    if (!zr_buffers_exist(z))
        return 0;
    int err = sync_all(z, (enum zero_sync)how);
    return err ? zr_fail_more(err, "zero_sync_buffers") : 0;
}
