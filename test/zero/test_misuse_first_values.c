/* SPDX-License-Identifier: Apache-2.0 */
/* test_misuse_first_values.c: wrong uses (misuse.h) of initial values, calls before there are values, and
 * pointers and gradients that the model assigns. */
#include "test/zero/misuse.h"

static void has_no_values(struct program *p)
{
    for (int t = 0; t < p->n_tensors; t++)
        p->model.param[t] = NULL;
}

static void values_later(struct program *p)
{
    p->cfg.init_from = ZERO_INIT_LATER;
    has_no_values(p);
}

static int refuses_to_init(void *arg, int32_t tensor, int64_t first, int64_t n, void *dst)
{
    struct program *p = arg;
    memset(dst, 0, (size_t)(n * (p->model.table[tensor].dtype == ZERO_F32 ? 4 : 2)));
    (void)first;
    return p->odd && tensor == 4 ? -3 : 0;
}

static int inits_nothing(void *arg, int32_t tensor, int64_t first, int64_t n, void *dst)
{
    (void)arg, (void)tensor, (void)first, (void)n, (void)dst;
    return 0;
}

static void callback_that_fails(struct program *p)
{
    p->cfg.init_from = ZERO_INIT_CALL;
    p->cfg.init = refuses_to_init;
    p->cfg.init_arg = p;
    has_no_values(p);
}

static int write_values(struct program *p, int tensor, int64_t first, int64_t n)
{
    int64_t size = p->model.table[tensor].dtype == ZERO_F32 ? 4 : 2;
    return zero_write(p->z, tensor, ZERO_VALUE_PARAM, first, n,
                      (const char *)p->model.own[tensor] + first * size);
}

static int forgets_an_element(struct program *p)
{
    int err = 0;
    for (int t = 0; !err && t < p->n_tensors; t++)
        err = write_values(p, t, 0, toy_elems(t) - (t == 2));
    return err ? err : zero_begin(p->z, 0, ZERO_FORWARD);
}

/* Writes gradients to memory that the library does not know. */
static int writes_elsewhere(struct program *p)
{
    int err = 0;
    for (int i = 0; !err && i < STEPS; i++)
        err = FIRST_ERROR(forward(p), backward_with(p, NULL), step(p));
    return err;
}

static void add_gradient_but_of_unit_2(struct program *p, int unit)
{
    if (unit != 2)
        add_gradient(p, unit);
}

static int opens_two_layers(struct program *p)
{
    return FIRST_ERROR(zero_begin(p->z, 1, ZERO_FORWARD), zero_begin(p->z, 2, ZERO_FORWARD));
}

/* ---- rows ---- */

#define TOO_EARLY(name, run, ...) MISUSE(name, ALL, BOTH, values_later(p), run, FAILS(ORDER, __VA_ARGS__))

MISUSE("never steps", ALL, BOTH, NOTHING, micro_batch(p, 0, 0), LOGS("zero_step"))
MISUSE("leaves a step unfinished", ALL, BOTH, p->cfg.grad_accum_steps = 4, micro_batch(p, 0, 0),
       LOGS("zero_unwrap: zero_step was never called"))
MISUSE("shards alone", S3, W1, NOTHING, train(p), LOGS("stage 3 shards nothing", "world 1, found in: config"))
MISUSE("shards alone", S2, W1, NOTHING, train(p), LOGS("stage 2 shards nothing", "world 1, found in: config"))
MISUSE("shards alone", S1, W1, NOTHING, train(p), LOGS("stage 1 shards nothing", "world 1, found in: config"))
MISUSE("writes its gradients elsewhere", ALL, BOTH, NOTHING, writes_elsewhere(p),
       FAILS(ORDER, "step 1: every gradient is zero, on every rank"))
MISUSE("the same, without brackets", IN_PLACE, BOTH, NOTHING,
       zero_step(p->z, 1e-2f, &(struct zero_step_info){0}),
       FAILS(ORDER, "step 1: every gradient is zero, on every rank"))
MISUSE("forgets a layer's gradient", ALL, BOTH, NOTHING,
       FIRST_ERROR(forward(p), backward_with(p, add_gradient_but_of_unit_2), step(p)),
       LOGS("in the first step no gradient was written to layers[1]: all its elements are zero"))
MISUSE("steps twice, without brackets", IN_PLACE, BOTH, NOTHING,
       FIRST_ERROR(toy_backward(&p->model, p->z, false, 0, p->rank->rank), step(p),
                   zero_step(p->z, 1e-2f, &(struct zero_step_info){0})),
       LOGS("every gradient of a step was zero, on every rank: zero_step was called twice"))
MISUSE("allocates gradients after the wrap", ALL, BOTH, NOTHING, (p->model.grad[0] = p->spare[0], train(p)),
       FAILS(ORDER, "*grad of tensor embedding (unit 0)", "after zero_wrap"))
MISUSE("the same, without brackets", IN_PLACE, BOTH, NOTHING,
       (p->model.grad[0] = p->spare[0], train_unbracketed(p, NULL)),
       FAILS(ORDER, "*grad of tensor embedding (unit 0)", "after zero_wrap"))
MISUSE("assigns a parameter", ALL, BOTH, NOTHING, (p->model.param[2] = p->spare[2], train(p)),
       FAILS(ORDER, "*param of tensor bias (unit 1)", "after zero_wrap"))
MISUSE("opens two layers of one buffer", SHARDED, BOTH, NOTHING,
       FIRST_ERROR(begin(p, 1, ZERO_FORWARD), begin(p, 2, ZERO_FORWARD)),
       FAILS(ORDER, "zero_begin: unit 2 of stacked tensor layers", "while unit 1 is"))
MISUSE("the same, where they lie side by side", IN_PLACE, BOTH, NOTHING,
       FIRST_ERROR(opens_two_layers(p), end(p, 2, ZERO_FORWARD), end(p, 1, ZERO_FORWARD), train(p)), TRAINS)
MISUSE("has no values, and does not say so", ALL, BOTH, has_no_values(p), train(p),
       FAILS(ARG, "tensors[0] (embedding): *param is NULL",
             "cfg.init_from must say where their values come from"))
MISUSE("has no values on rank 0, whose count", ALL, BOTH,
       (p->cfg.init_from = ZERO_INIT_RANK0, has_no_values(p)), train(p),
       FAILS(ARG, "tensors[0] (embedding): *param is NULL on rank 0", "ZERO_INIT_RANK0"))
MISUSE("has values of a source that is none", ALL, BOTH, p->cfg.init_from = 4, train(p),
       FAILS(ARG, "init_from is 4; allowed: model (0), rank0 (1), later (2), call (3)"))
MISUSE("has values of different sources", ALL, W2,
       p->cfg.init_from = p->odd ? ZERO_INIT_LATER : ZERO_INIT_MODEL, train(p),
       FAILS(MISMATCH, "init_from is later on rank 1 and model on rank 0"))
MISUSE("asks a callback that it does not have", ALL, BOTH, p->cfg.init_from = ZERO_INIT_CALL, train(p),
       FAILS(ARG, "init is NULL but init_from is ZERO_INIT_CALL"))
MISUSE("has a callback that nobody asks", ALL, BOTH, p->cfg.init = inits_nothing, train(p),
       FAILS(ARG, "init is set but init_from is not ZERO_INIT_CALL"))
MISUSE("has a callback that fails, on one rank", ALL, BOTH, callback_that_fails(p), train(p),
       FAILS(FAILED, "cfg.init returned -3 for tensor head, elements"))
MISUSE("has a callback that writes nothing", ALL, BOTH,
       (p->cfg.init_from = ZERO_INIT_CALL, p->cfg.init = inits_nothing, has_no_values(p)), train(p),
       FAILS(FAILED, "cfg.init did not write element", "of tensor embedding, asked for"))
TOO_EARLY("computes before there are values", begin(p, 0, ZERO_FORWARD),
          "zero_begin: tensor embedding (unit 0) has values for 0 of its 165 elements",
          "init_from is ZERO_INIT_LATER", "zero_load, or zero_import and zero_write for all tensors")
TOO_EARLY("begins a micro-batch before that", zero_micro(p->z), "zero_micro: tensor embedding")
TOO_EARLY("steps before that", step(p), "zero_step: tensor embedding")
TOO_EARLY("asks for the norm before that", zero_norm(p->z, &(double){0}), "zero_norm: tensor embedding")
TOO_EARLY("saves before that", zero_save(p->z, "/tmp/there-is-no-such-folder/ckpt", NULL),
          "zero_save: tensor embedding")
TOO_EARLY("exports before that", zero_export(p->z, "/tmp/there-is-no-such-folder", NULL, 0, 0),
          "zero_export: tensor embedding")
TOO_EARLY("gathers all before that", zero_gather_all(p->z, 0), "zero_gather_all: tensor embedding")
TOO_EARLY("reads before that", zero_read(p->z, 0, ZERO_VALUE_PARAM, 0, 8, (float[8]){0}),
          "zero_read: tensor embedding")
TOO_EARLY("forgets one element", forgets_an_element(p), "zero_begin: tensor bias (unit 1) has values for",
          "ZERO_INIT_LATER")
TOO_EARLY("writes states and no weights",
          FIRST_ERROR(zero_write(p->z, 0, ZERO_VALUE_STATE, 0, toy_elems(0), p->spare[0]),
                      begin(p, 0, ZERO_FORWARD)),
          "zero_begin: tensor embedding (unit 0) has values for 0 of its 165 elements")
MISUSE("writes other values on other ranks", ALL, W2, values_later(p),
       FIRST_ERROR(write_values(p, 0, p->odd ? 8 : 0, 8), begin(p, 0, ZERO_FORWARD)),
       FAILS(MISMATCH, "zero_write"))
