/* SPDX-License-Identifier: Apache-2.0 */
/* test_misuse_ranks.c: ranks that differ or have a wrong number, and miscounted steps (misuse.h). */
#include "test/zero/misuse.h"

static void poison_gradient(struct program *p, int unit)
{
    add_gradient(p, unit);
    if (unit == 0)
        toy_poison_gradient(&p->model, 0, NAN);
}

static int finds(struct zero_config cfg)
{
    struct zero_place place;
    return zero_find_place(&cfg, &place);
}

static int finds_as(struct program *p, int rank, int world, void *nccl_comm)
{
    struct zero_config cfg = p->cfg;
    cfg.launch.rank = rank;
    cfg.launch.world = world;
    cfg.launch.nccl_comm = nccl_comm;
    return finds(cfg);
}

/* ---- rows ---- */

MISUSE("gives another lr on one rank", ALL, W2, NOTHING,
       FIRST_ERROR(micro_batch(p, 0, 0), zero_step(p->z, p->odd ? 2e-2f : 1e-2f, NULL), train(p)),
       FAILS(MISMATCH, "lr is"))
MISUSE("begins another unit on one rank", ALL, W2, NOTHING,
       FIRST_ERROR(begin(p, p->odd ? 2 : 1, ZERO_FORWARD), end(p, p->odd ? 2 : 1, ZERO_FORWARD), train(p)),
       FAILS(MISMATCH, "rank 1 called zero_begin(unit 2, forward) in step 1",
             "rank 0 called zero_begin(unit 1, forward) in step 1"))
MISUSE("reads on one rank alone", ALL, W2, NOTHING,
       FIRST_ERROR(p->odd ? zero_read(p->z, 0, ZERO_VALUE_PARAM, 0, 8, (float[8]){0}) : 0, train(p)),
       FAILS(MISMATCH, "rank 1 called zero_read(tensor 0) in step 1",
             "rank 0 called zero_begin(unit 0, forward) in step 1"))
MISUSE("wraps at another stage on one rank", ALL, W2,
       p->cfg.stage = p->odd ? (p->cfg.stage + 1) % 4 : p->cfg.stage, train(p),
       FAILS(MISMATCH, "stage is", "on rank 1"))
MISUSE("clips otherwise on one rank", ALL, W2, p->cfg.clip = p->odd ? 1.0f : 2.0f, train(p),
       FAILS(MISMATCH, "clip is 1 on rank 1 and 2 on rank 0"))
MISUSE("has another shape on one rank", ALL, W2, if (p->odd) p->model.table[TOY_FROZEN].shape[0] = 10,
       train(p), FAILS(MISMATCH, "tensors[3] (frozen", "rank 1 and rank 0 differ"))
MISUSE("steps on a gradient that is no number", ALL, BOTH, NOTHING,
       FIRST_ERROR(forward(p), backward_with(p, poison_gradient), step(p), train(p)),
       LOGS("step 1", "skipped"))
MISUSE("has four micro-batches and says one", ALL, BOTH, NOTHING, FIRST_ERROR(micro_batches(p, 4), step(p)),
       FAILS(ORDER, "grad_accum_steps"))
MISUSE("lends a communicator on the host", ALL, BOTH, p->cfg.launch.nccl_comm = &p->cfg, train(p),
       FAILS(ARG, "nccl_comm"))
MISUSE("steps twice", ALL, BOTH, NOTHING, FIRST_ERROR(micro_batch(p, 0, 0), step(p), step(p)),
       FAILS(ORDER, "zero_step: "))
MISUSE("asks for its rank without ZERO_CONFIG_INIT", S0, W1, NOTHING, finds((struct zero_config){.stage = 3}),
       FAILS(ARG, "zero_find_place: ", "ZERO_CONFIG_INIT"))
MISUSE("asks for its rank with no place for the answer", S0, BOTH, NOTHING, zero_find_place(&p->cfg, NULL),
       FAILS(ARG, "zero_find_place: out is NULL"))
MISUSE("asks for its rank with half of a pair", S0, W1, NOTHING, finds_as(p, 1, 0, NULL),
       FAILS(ARG, "zero_find_place: rank is 1 but world is 0"))
MISUSE("asks for a rank beyond the world", S0, BOTH, NOTHING,
       finds_as(p, p->rank->world, p->rank->world, NULL), FAILS(ARG, "zero_find_place: rank is"))
MISUSE("asks a communicator on the host for its rank", S0, BOTH, NOTHING,
       finds_as(p, p->rank->rank, p->rank->world, p), FAILS(ARG, "zero_find_place: ", "nccl_comm"))
MISUSE("asks for its rank when it has wrapped", ALL, BOTH, NOTHING, FIRST_ERROR(finds(p->cfg), train(p)),
       TRAINS)
