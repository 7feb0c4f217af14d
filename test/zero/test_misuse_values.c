/* SPDX-License-Identifier: Apache-2.0 */
/* test_misuse_values.c: ways to use the library wrongly (misuse.h):
 * values read and written, all parameters at once, buffers, weights under other names. */
#include "test/zero/misuse.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

/* ---- values ---- */

static int reads_past_the_end(struct program *p)
{
    float x[8];
    return zero_read(p->z, 0, ZERO_VALUE_PARAM, toy_elems(0) - 4, 8, x);
}

static int reads_no_tensor(struct program *p)
{
    float x[8];
    return zero_read(p->z, TOY_TENSORS, ZERO_VALUE_PARAM, 0, 8, x);
}

static int reads_state_of_frozen(struct program *p)
{
    float x[8];
    return zero_read(p->z, TOY_FROZEN, ZERO_VALUE_STATE, 0, 8, x);
}

static int reads_in_bracket(struct program *p)
{
    float x[8];
    int err = zero_begin(p->z, 0, ZERO_FORWARD);
    return err ? err : zero_read(p->z, 0, ZERO_VALUE_PARAM, 0, 8, x);
}

static int writes_nothing(struct program *p)
{
    return zero_write(p->z, 0, ZERO_VALUE_PARAM, 0, 8, NULL);
}

static int means_too_many(struct program *p)
{
    double x[65] = {0};
    return zero_mean(p->z, x, 65);
}

/* ---- all parameters at once ---- */

static int evaluates_all(struct program *p)
{
    int err = zero_gather_all(p->z, 0);
    if (!err)
        err = toy_forward(&p->model, p->z, false);
    return err ? err : zero_release_all(p->z);
}

/* Between micro-batches, after the norm, and after the step. */
static int gathers_all_the_time(struct program *p)
{
    int err = 0;
    for (int step = 0; !err && step < STEPS; step++) {
        for (int k = 0; !err && k < p->cfg.grad_accum_steps; k++) {
            err = micro_batch(p, step, k);
            if (!err)
                err = evaluates_all(p);
        }
        if (!err)
            err = norm(p);
        if (!err)
            err = evaluates_all(p);
        if (!err)
            err = zero_step(p->z, 1e-2f, NULL);
        if (!err)
            err = evaluates_all(p);
    }
    return err;
}

static int gather(struct program *p)
{
    return zero_gather_all(p->z, 0);
}

AFTER(gathers_of_nothing, 0, zero_gather_all(NULL, 0))
AFTER(releases_of_nothing, 0, zero_release_all(NULL))
AFTER(gathers_nowhere, 0, zero_gather_all(p->z, 7))
AFTER(gathers_on_no_gpu, 0, zero_gather_all(p->z, ZERO_DEVICE_CUDA))
AFTER(gathers_in_bracket, zero_begin(p->z, 1, ZERO_FORWARD), gather(p))
AFTER(gathers_twice, gather(p), gather(p))
AFTER(releases_first, 0, zero_release_all(p->z))
AFTER(releases_twice, gather(p) || zero_release_all(p->z), zero_release_all(p->z))
AFTER(releases_in_bracket, gather(p) || zero_begin(p->z, 1, ZERO_FORWARD), zero_release_all(p->z))
AFTER(steps_while_held, micro_batch(p, 0, 0) || gather(p), zero_step(p->z, 1e-2f, NULL))
AFTER(norms_while_held, micro_batch(p, 0, 0) || gather(p), norm(p))
AFTER(drops_while_held, micro_batch(p, 0, 0) || gather(p), zero_drop(p->z))
AFTER(backward_while_held, gather(p), zero_begin(p->z, 1, ZERO_BACKWARD))
AFTER(micro_while_held, gather(p), zero_micro(p->z))
AFTER(writes_while_held, gather(p), zero_write(p->z, 0, ZERO_VALUE_PARAM, 0, 8, (float[8]){0}))
AFTER(loads_while_held, gather(p), zero_load(p->z, "/tmp"))
AFTER(imports_while_held, gather(p), zero_import(p->z, "/tmp", NULL, 0))
AFTER(gathers_after_failure, fails(p), gather(p))
AFTER(releases_after_failure, fails(p), zero_release_all(p->z))

static int never_releases(struct program *p)
{
    int err = train(p);
    return err ? err : gather(p);
}

static int assigns_while_held(struct program *p)
{
    int err = gather(p);
    p->model.param[0] = p->spare[0];
    return err ? err : zero_release_all(p->z);
}

static int odd_one_gathers(struct program *p)
{
    int err = p->odd ? gather(p) : 0;
    return err ? err : train(p);
}

static int odd_one_gathers_elsewhere(struct program *p)
{
    int err = zero_gather_all(p->z, p->odd ? ZERO_DEVICE_HOST : 0);
    if (!err)
        err = zero_release_all(p->z);
    return err ? err : train(p);
}

/* ---- buffers ---- */

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
    for (int step = 0; !err && step < STEPS; step++) {
        for (int k = 0; !err && k < p->cfg.grad_accum_steps; k++) {
            p->counter++;
            err = micro_batch(p, step, k);
            if (!err)
                err = sync_mean(p);
        }
        if (!err)
            err = zero_step(p->z, 1e-2f, NULL);
        if (!err)
            err = gather(p);
        if (!err)
            err = sync_mean(p);
        if (!err)
            err = zero_release_all(p->z);
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

static int odd_one_syncs(struct program *p)
{
    int err = p->odd ? sync_mean(p) : 0;
    return err ? err : train(p);
}

static int syncs_otherwise(struct program *p)
{
    int err = zero_sync_buffers(p->z, p->odd ? ZERO_SYNC_RANK0 : ZERO_SYNC_MEAN);
    return err ? err : train(p);
}

AFTER(syncs_of_nothing, 0, zero_sync_buffers(NULL, ZERO_SYNC_MEAN))
AFTER(syncs_somehow, 0, zero_sync_buffers(p->z, 0))
AFTER(syncs_in_bracket, zero_begin(p->z, 1, ZERO_FORWARD), sync_mean(p))
AFTER(syncs_after_failure, fails(p), sync_mean(p))
AFTER(syncs_without_buffers, sync_mean(p), train(p))

/* ---- weights under other names ---- */

/* All layers under one name, out and back in over zeros: nothing may stay zero. */
static int leaves_slice_out(struct program *p)
{
    const struct zero_weight map = {.name = "h", .tensor = TOY_STACKED};
    const int64_t n = toy_elems(TOY_STACKED);
    char dir[64], file[128];
    void *nothing = calloc((size_t)n, 4);
    snprintf(dir, sizeof dir, "/tmp/zero-misuse-%ld", (long)getpid());
    int err = zero_export(p->z, dir, &map, 1, 0);
    if (!err)
        err = zero_write(p->z, TOY_STACKED, ZERO_VALUE_PARAM, 0, n, nothing);
    if (!err)
        err = zero_import(p->z, dir, &map, 1);
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

AFTER(exports_slice_1, 0, exports(p, TOY_STACKED, 1))
AFTER(exports_slice_minus_1, 0, exports(p, TOY_STACKED, -1))
AFTER(exports_a_slice_too_many, 0, exports(p, TOY_STACKED, ZERO_SLICE(2)))
AFTER(exports_a_slice_of_a_vector, 0, exports(p, 2, ZERO_SLICE(0)))
AFTER(imports_slice_1, 0,
      zero_import(p->z, "/tmp/there-is-no-such-folder/weights",
                  &(struct zero_weight){.name = "h", .slice = 1}, 1))

/* ---- the rows ---- */

static const struct misuse rows[] = {
    {"reads past a tensor's end",
     ALL,
     BOTH,
     NULL,
     reads_past_the_end,
     ERROR,
     ZERO_ERR_ARG,
     {"zero_read: first is", "tensor embedding"}},
    {"reads a tensor that is not there",
     ALL,
     BOTH,
     NULL,
     reads_no_tensor,
     ERROR,
     ZERO_ERR_ARG,
     {"zero_read: tensor is 5; allowed: 0..4"}},
    {"reads the state of a frozen tensor",
     ALL,
     BOTH,
     NULL,
     reads_state_of_frozen,
     ERROR,
     ZERO_ERR_ARG,
     {"tensor frozen is frozen"}},
    {"reads inside a bracket",
     ALL,
     BOTH,
     NULL,
     reads_in_bracket,
     ERROR,
     ZERO_ERR_ORDER,
     {"zero_read: unit 0 has an open bracket"}},
    {"writes from NULL", ALL, W1, NULL, writes_nothing, ERROR, ZERO_ERR_ARG, {"zero_write: src is NULL"}},
    {"means more than fits", ALL, BOTH, NULL, means_too_many, ERROR, ZERO_ERR_ARG, {"zero_mean: n is 65"}},
    WRONG("gathers all of no context", S0, W1, NULL, gathers_of_nothing, ARG, "zero_gather_all: z is NULL"),
    WRONG("releases all of no context", S0, W1, NULL, releases_of_nothing, ARG,
          "zero_release_all: z is NULL"),
    WRONG("gathers all nowhere", ALL, BOTH, NULL, gathers_nowhere, ARG, "zero_gather_all: where is 7",
          "allowed: 0, ZERO_DEVICE_HOST"),
    WRONG("gathers all on a GPU that is not there", ALL, BOTH, NULL, gathers_on_no_gpu, ARG,
          "zero_gather_all: where is 2", "only if cfg.device is cuda"),
    WRONG("gathers all in a bracket", ALL, BOTH, NULL, gathers_in_bracket, ORDER,
          "zero_gather_all: unit 1 has an open bracket"),
    WRONG("gathers all twice", ALL, BOTH, NULL, gathers_twice, ORDER,
          "zero_gather_all: all parameters are already gathered"),
    WRONG("releases what was not gathered", ALL, BOTH, NULL, releases_first, ORDER,
          "zero_release_all: ", "there was no zero_gather_all"),
    WRONG("releases twice", ALL, BOTH, NULL, releases_twice, ORDER,
          "zero_release_all: ", "there was no zero_gather_all"),
    WRONG("releases in a bracket", ALL, BOTH, NULL, releases_in_bracket, ORDER,
          "zero_release_all: unit 1 has an open bracket"),
    WRONG("steps with all parameters", ALL, BOTH, NULL, steps_while_held, ORDER,
          "zero_step: ", "call zero_release_all first"),
    WRONG("asks for the norm with all parameters", ALL, BOTH, NULL, norms_while_held, ORDER,
          "zero_norm: ", "call zero_release_all first"),
    WRONG("drops with all parameters", ALL, BOTH, NULL, drops_while_held, ORDER,
          "zero_drop: ", "call zero_release_all first"),
    WRONG("goes backward with all parameters", ALL, BOTH, NULL, backward_while_held, ORDER,
          "zero_begin: ", "call zero_release_all first"),
    WRONG("ends a micro-batch with all parameters", ALL, BOTH, NULL, micro_while_held, ORDER,
          "zero_micro: ", "call zero_release_all first"),
    WRONG("writes with all parameters", ALL, BOTH, NULL, writes_while_held, ORDER,
          "zero_write: ", "call zero_release_all first"),
    WRONG("loads with all parameters", ALL, BOTH, NULL, loads_while_held, ORDER,
          "zero_load: ", "call zero_release_all first"),
    WRONG("imports with all parameters", ALL, BOTH, NULL, imports_while_held, ORDER,
          "zero_import: ", "call zero_release_all first"),
    WRONG("gathers all after a failure", ALL, BOTH, update_that_refuses, gathers_after_failure, FAILED,
          "the update callback returned 3"),
    WRONG("releases all after a failure", ALL, BOTH, update_that_refuses, releases_after_failure, FAILED,
          "the update callback returned 3"),
    WRONG("assigns a parameter while all are there", ALL, BOTH, NULL, assigns_while_held, ORDER,
          "zero_release_all: *param of tensor embedding"),
    WRONG("gathers all on one rank alone", ALL, W2, NULL, odd_one_gathers, MISMATCH, "zero_gather_all"),
    WRONG("gathers all elsewhere on one rank", ALL, W2, NULL, odd_one_gathers_elsewhere, MISMATCH,
          "zero_gather_all"),
    GOOD("gathers all the time", ALL, BOTH, accumulate_four, gathers_all_the_time),
    GOOD("never releases", ALL, BOTH, NULL, never_releases),
    WRONG("makes no context's buffers equal", S0, W1, NULL, syncs_of_nothing, ARG,
          "zero_sync_buffers: z is NULL"),
    WRONG("makes buffers equal somehow", ALL, BOTH, with_counter, syncs_somehow, ARG,
          "zero_sync_buffers: how is 0; allowed: ZERO_SYNC_MEAN"),
    WRONG("makes buffers equal in a bracket", ALL, BOTH, with_counter, syncs_in_bracket, ORDER,
          "zero_sync_buffers: unit 1 has an open bracket"),
    WRONG("counts on one rank alone", ALL, W2, with_counter, counts_alone, MISMATCH,
          "zero_sync_buffers: ", "buffer seen", "integers have no mean"),
    WRONG("loses a buffer", ALL, BOTH, with_counter, loses_its_buffer, ORDER,
          "zero_sync_buffers: ", "*param of buffer seen is NULL"),
    WRONG("makes buffers equal on one rank alone", ALL, W2, with_counter, odd_one_syncs, MISMATCH,
          "zero_sync_buffers"),
    WRONG("makes buffers equal otherwise on one rank", ALL, W2, with_counter, syncs_otherwise, MISMATCH,
          "zero_sync_buffers: how is ZERO_SYNC_RANK0 on rank 1 and ZERO_SYNC_MEAN on rank 0"),
    WRONG("makes buffers equal after a failure", ALL, BOTH, update_that_refuses, syncs_after_failure, FAILED,
          "the update callback returned 3"),
    GOOD("makes buffers equal all the time", ALL, BOTH, with_counter, syncs_all_the_time),
    GOOD("makes buffers equal that it does not have", ALL, BOTH, NULL, syncs_without_buffers),
    GOOD("leaves slice out of a map", ALL, BOTH, NULL, leaves_slice_out),
    WRONG("gives a slice by its number", ALL, BOTH, NULL, exports_slice_1, ARG, "zero_export: ",
          "map[0] (h): slice is 1", "allowed: 0 (all of it), ZERO_SLICE(0) to ZERO_SLICE(1)"),
    WRONG("gives a negative slice", ALL, BOTH, NULL, exports_slice_minus_1, ARG,
          "slice is -1 of tensor layers"),
    WRONG("gives a slice that there is not", ALL, BOTH, NULL, exports_a_slice_too_many, ARG,
          "slice is ZERO_SLICE(2) of tensor layers"),
    WRONG("gives a slice of a vector", ALL, BOTH, NULL, exports_a_slice_of_a_vector, ARG,
          "slice is ZERO_SLICE(0), but tensor bias has one dimension"),
    WRONG("imports a slice by its number", ALL, BOTH, NULL, imports_slice_1, ARG,
          "zero_import: ", "map[0] (h): slice is 1"),
};

static void test_misuse(void **state)
{
    (void)state;
    misuse_try(rows, (int)(sizeof rows / sizeof *rows));
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_misuse)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
