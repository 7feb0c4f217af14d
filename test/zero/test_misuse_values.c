/* SPDX-License-Identifier: Apache-2.0 */
/* test_misuse_values.c: wrong uses (misuse.h) of zero_read, zero_write, zero_gather_all, buffers, and weights
 * under other names. */
#include "test/zero/misuse.h"

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static int evaluates_all(struct program *p)
{
    return FIRST_ERROR(zero_gather_all(p->z, 0), toy_forward(&p->model, p->z, false), zero_release_all(p->z));
}

/* Gathers between micro-batches, after the norm, and after the step. */
static int gathers_all_the_time(struct program *p)
{
    int err = 0;
    for (int i = 0; !err && i < STEPS; i++) {
        for (int k = 0; !err && k < p->cfg.grad_accum_steps; k++)
            err = FIRST_ERROR(micro_batch(p, i, k), evaluates_all(p));
        err = FIRST_ERROR(err, norm(p), evaluates_all(p), step(p), evaluates_all(p));
    }
    return err;
}

static int gather(struct program *p)
{
    return zero_gather_all(p->z, 0);
}

static int assigns_while_held(struct program *p)
{
    int err = gather(p);
    p->model.param[0] = p->spare[0];
    return err ? err : zero_release_all(p->z);
}

static void with_counter(struct program *p)
{
    memcpy(p->wider, p->model.table, sizeof p->model.table);
    p->counter_at = &p->counter;
    p->wider[TOY_TENSORS] = (struct zero_tensor){
        .name = "seen", .param = &p->counter_at, .shape = {1}, .dtype = ZERO_I64, .flags = ZERO_BUFFER};
    p->table = p->wider;
    p->n_tensors = TOY_TENSORS + 1;
}

static int sync_mean(struct program *p)
{
    return zero_sync_buffers(p->z, ZERO_SYNC_MEAN);
}

static int syncs_all_the_time(struct program *p)
{
    int err = 0;
    for (int i = 0; !err && i < STEPS; i++) {
        for (int k = 0; !err && k < p->cfg.grad_accum_steps; k++) {
            p->counter++;
            err = FIRST_ERROR(micro_batch(p, i, k), sync_mean(p));
        }
        err = FIRST_ERROR(err, step(p), gather(p), sync_mean(p), zero_release_all(p->z));
    }
    return err;
}

static int counts_alone(struct program *p)
{
    p->counter += p->odd;
    return sync_mean(p);
}

static int loses_its_buffer(struct program *p)
{
    p->counter_at = NULL;
    return zero_sync_buffers(p->z, ZERO_SYNC_RANK0);
}

/* Exports all layers under one name, zeroes them and imports them. Nothing may stay zero. */
static int leaves_slice_out(struct program *p)
{
    const struct zero_weight map = {.name = "h", .tensor = TOY_STACKED};
    const int64_t n = toy_elems(TOY_STACKED);
    char dir[64], file[128];
    void *nothing = calloc((size_t)n, 4);
    snprintf(dir, sizeof dir, "/tmp/zero-misuse-%ld", (long)getpid());
    int err = FIRST_ERROR(zero_export(p->z, dir, &map, 1, 0),
                          zero_write(p->z, TOY_STACKED, ZERO_VALUE_PARAM, 0, n, nothing),
                          zero_import(p->z, dir, &map, 1));
    free(nothing);
    if (p->rank->rank == 0) {
        snprintf(file, sizeof file, "%s/model.safetensors", dir);
        remove(file);
        remove(dir);
    }
    return err ? err : train(p);
}

static int exports(struct program *p, int32_t tensor, int32_t slice)
{
    const struct zero_weight map = {.name = "h", .tensor = tensor, .slice = slice};
    return zero_export(p->z, "/tmp/there-is-no-such-folder/weights", &map, 1, 0);
}

/* ---- rows ---- */

MISUSE("reads past a tensor's end", ALL, BOTH, NOTHING,
       zero_read(p->z, 0, ZERO_VALUE_PARAM, toy_elems(0) - 4, 8, (float[8]){0}),
       FAILS(ARG, "zero_read: first is", "tensor embedding"))
MISUSE("reads a tensor that is not there", ALL, BOTH, NOTHING,
       zero_read(p->z, TOY_TENSORS, ZERO_VALUE_PARAM, 0, 8, (float[8]){0}),
       FAILS(ARG, "zero_read: tensor is 5; allowed: 0..4"))
MISUSE("reads the state of a frozen tensor", ALL, BOTH, NOTHING,
       zero_read(p->z, TOY_FROZEN, ZERO_VALUE_STATE, 0, 8, (float[8]){0}),
       FAILS(ARG, "tensor frozen is frozen"))
MISUSE("reads inside a bracket", ALL, BOTH, NOTHING,
       FIRST_ERROR(begin(p, 0, ZERO_FORWARD), zero_read(p->z, 0, ZERO_VALUE_PARAM, 0, 8, (float[8]){0})),
       FAILS(ORDER, "zero_read: unit 0 has an open bracket"))
MISUSE("writes from NULL", ALL, W1, NOTHING, zero_write(p->z, 0, ZERO_VALUE_PARAM, 0, 8, NULL),
       FAILS(ARG, "zero_write: src is NULL"))
MISUSE("means more than fits", ALL, BOTH, NOTHING, zero_mean(p->z, (double[65]){0}, 65),
       FAILS(ARG, "zero_mean: n is 65"))
MISUSE("gathers all of no context", S0, W1, NOTHING, zero_gather_all(NULL, 0),
       FAILS(ARG, "zero_gather_all: z is NULL"))
MISUSE("releases all of no context", S0, W1, NOTHING, zero_release_all(NULL),
       FAILS(ARG, "zero_release_all: z is NULL"))
MISUSE("gathers all nowhere", ALL, BOTH, NOTHING, zero_gather_all(p->z, 7),
       FAILS(ARG, "zero_gather_all: where is 7", "allowed: 0, ZERO_DEVICE_HOST"))
MISUSE("gathers all on a GPU that is not there", ALL, BOTH, NOTHING, zero_gather_all(p->z, ZERO_DEVICE_CUDA),
       FAILS(ARG, "zero_gather_all: where is 2", "only if cfg.device is cuda"))
MISUSE("gathers all in a bracket", ALL, BOTH, NOTHING, FIRST_ERROR(begin(p, 1, ZERO_FORWARD), gather(p)),
       FAILS(ORDER, "zero_gather_all: unit 1 has an open bracket"))
MISUSE("gathers all twice", ALL, BOTH, NOTHING, FIRST_ERROR(gather(p), gather(p)),
       FAILS(ORDER, "zero_gather_all: all parameters are already gathered"))
MISUSE("releases what was not gathered", ALL, BOTH, NOTHING, zero_release_all(p->z),
       FAILS(ORDER, "zero_release_all: ", "there was no zero_gather_all"))
MISUSE("releases twice", ALL, BOTH, NOTHING,
       FIRST_ERROR(gather(p), zero_release_all(p->z), zero_release_all(p->z)),
       FAILS(ORDER, "zero_release_all: ", "there was no zero_gather_all"))
MISUSE("releases in a bracket", ALL, BOTH, NOTHING,
       FIRST_ERROR(gather(p), begin(p, 1, ZERO_FORWARD), zero_release_all(p->z)),
       FAILS(ORDER, "zero_release_all: unit 1 has an open bracket"))
MISUSE("steps with all parameters", ALL, BOTH, NOTHING, FIRST_ERROR(micro_batch(p, 0, 0), gather(p), step(p)),
       FAILS(ORDER, "zero_step: ", "call zero_release_all first"))
MISUSE("asks for the norm with all parameters", ALL, BOTH, NOTHING,
       FIRST_ERROR(micro_batch(p, 0, 0), gather(p), norm(p)),
       FAILS(ORDER, "zero_norm: ", "call zero_release_all first"))
MISUSE("drops with all parameters", ALL, BOTH, NOTHING,
       FIRST_ERROR(micro_batch(p, 0, 0), gather(p), zero_drop(p->z)),
       FAILS(ORDER, "zero_drop: ", "call zero_release_all first"))
MISUSE("goes backward with all parameters", ALL, BOTH, NOTHING,
       FIRST_ERROR(gather(p), begin(p, 1, ZERO_BACKWARD)),
       FAILS(ORDER, "zero_begin: ", "call zero_release_all first"))
MISUSE("ends a micro-batch with all parameters", ALL, BOTH, NOTHING, FIRST_ERROR(gather(p), zero_micro(p->z)),
       FAILS(ORDER, "zero_micro: ", "call zero_release_all first"))
MISUSE("writes with all parameters", ALL, BOTH, NOTHING,
       FIRST_ERROR(gather(p), zero_write(p->z, 0, ZERO_VALUE_PARAM, 0, 8, (float[8]){0})),
       FAILS(ORDER, "zero_write: ", "call zero_release_all first"))
MISUSE("loads with all parameters", ALL, BOTH, NOTHING, FIRST_ERROR(gather(p), zero_load(p->z, "/tmp")),
       FAILS(ORDER, "zero_load: ", "call zero_release_all first"))
MISUSE("imports with all parameters", ALL, BOTH, NOTHING,
       FIRST_ERROR(gather(p), zero_import(p->z, "/tmp", NULL, 0)),
       FAILS(ORDER, "zero_import: ", "call zero_release_all first"))
MISUSE("gathers all after a failure", ALL, BOTH, update_that_refuses(p), FIRST_ERROR(fails(p), gather(p)),
       FAILS(FAILED, "the update callback returned 3"))
MISUSE("releases all after a failure", ALL, BOTH, update_that_refuses(p),
       FIRST_ERROR(fails(p), zero_release_all(p->z)), FAILS(FAILED, "the update callback returned 3"))
MISUSE("assigns a parameter while all are there", ALL, BOTH, NOTHING, assigns_while_held(p),
       FAILS(ORDER, "zero_release_all: *param of tensor embedding"))
MISUSE("gathers all on one rank alone", ALL, W2, NOTHING, FIRST_ERROR(p->odd ? gather(p) : 0, train(p)),
       FAILS(MISMATCH, "zero_gather_all"))
MISUSE("gathers all elsewhere on one rank", ALL, W2, NOTHING,
       FIRST_ERROR(zero_gather_all(p->z, p->odd ? ZERO_DEVICE_HOST : 0), zero_release_all(p->z), train(p)),
       FAILS(MISMATCH, "zero_gather_all"))
MISUSE("gathers all the time", ALL, BOTH, p->cfg.grad_accum_steps = 4, gathers_all_the_time(p), TRAINS)
MISUSE("never releases", ALL, BOTH, NOTHING, FIRST_ERROR(train(p), gather(p)), TRAINS)
MISUSE("makes no context's buffers equal", S0, W1, NOTHING, zero_sync_buffers(NULL, ZERO_SYNC_MEAN),
       FAILS(ARG, "zero_sync_buffers: z is NULL"))
MISUSE("makes buffers equal somehow", ALL, BOTH, with_counter(p), zero_sync_buffers(p->z, 0),
       FAILS(ARG, "zero_sync_buffers: how is 0; allowed: ZERO_SYNC_MEAN"))
MISUSE("makes buffers equal in a bracket", ALL, BOTH, with_counter(p),
       FIRST_ERROR(begin(p, 1, ZERO_FORWARD), sync_mean(p)),
       FAILS(ORDER, "zero_sync_buffers: unit 1 has an open bracket"))
MISUSE("counts on one rank alone", ALL, W2, with_counter(p), counts_alone(p),
       FAILS(MISMATCH, "zero_sync_buffers: ", "buffer seen", "integers have no mean"))
MISUSE("loses a buffer", ALL, BOTH, with_counter(p), loses_its_buffer(p),
       FAILS(ORDER, "zero_sync_buffers: ", "*param of buffer seen is NULL"))
MISUSE("makes buffers equal on one rank alone", ALL, W2, with_counter(p),
       FIRST_ERROR(p->odd ? sync_mean(p) : 0, train(p)), FAILS(MISMATCH, "zero_sync_buffers"))
MISUSE("makes buffers equal otherwise on one rank", ALL, W2, with_counter(p),
       FIRST_ERROR(zero_sync_buffers(p->z, p->odd ? ZERO_SYNC_RANK0 : ZERO_SYNC_MEAN), train(p)),
       FAILS(MISMATCH, "zero_sync_buffers: how is ZERO_SYNC_RANK0 on rank 1 and ZERO_SYNC_MEAN on rank 0"))
MISUSE("makes buffers equal after a failure", ALL, BOTH, update_that_refuses(p),
       FIRST_ERROR(fails(p), sync_mean(p)), FAILS(FAILED, "the update callback returned 3"))
MISUSE("makes buffers equal all the time", ALL, BOTH, with_counter(p), syncs_all_the_time(p), TRAINS)
MISUSE("makes buffers equal that it does not have", ALL, BOTH, NOTHING, FIRST_ERROR(sync_mean(p), train(p)),
       TRAINS)
MISUSE("leaves slice out of a map", ALL, BOTH, NOTHING, leaves_slice_out(p), TRAINS)
MISUSE("gives a slice by its number", ALL, BOTH, NOTHING, exports(p, TOY_STACKED, 1),
       FAILS(ARG, "zero_export: ", "map[0] (h): slice is 1",
             "allowed: 0 (all of it), ZERO_SLICE(0) to ZERO_SLICE(1)"))
MISUSE("gives a negative slice", ALL, BOTH, NOTHING, exports(p, TOY_STACKED, -1),
       FAILS(ARG, "slice is -1 of tensor layers"))
MISUSE("gives a slice that there is not", ALL, BOTH, NOTHING, exports(p, TOY_STACKED, ZERO_SLICE(2)),
       FAILS(ARG, "slice is ZERO_SLICE(2) of tensor layers"))
MISUSE("gives a slice of a vector", ALL, BOTH, NOTHING, exports(p, 2, ZERO_SLICE(0)),
       FAILS(ARG, "slice is ZERO_SLICE(0), but tensor bias has one dimension"))
MISUSE("imports a slice by its number", ALL, BOTH, NOTHING,
       zero_import(p->z, "/tmp/there-is-no-such-folder/weights",
                   &(struct zero_weight){.name = "h", .slice = 1}, 1),
       FAILS(ARG, "zero_import: ", "map[0] (h): slice is 1"))
