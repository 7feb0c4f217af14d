/* SPDX-License-Identifier: Apache-2.0 */
/* options.h: the user's options, resolved. Defaults are filled in, texts are parsed, and nothing depends on
 * zero/zero.h.
 *
 * zr_config_resolve() in zero/config.c makes this struct from struct zero_config, and all code below it uses
 * this struct alone. It is plain data, copied by value. The memory of `order` is valid for a limited time. */
#ifndef ZR_SHARD_OPTIONS_H
#define ZR_SHARD_OPTIONS_H

#include "kernels/device.h"
#include "kernels/phase.h"

#define ZR_MAX_STATES 4   /* most states per weight that an optimizer keeps */
#define ZR_MAX_OPTIMS 256 /* most parameter groups */

/* Kind of value in checkpoints: the scales of state i, if it has 8-bit codes. ZR_N_KINDS ends all kinds. */
#define ZR_SCALE(i) (ZR_MAX_STATES + (i))
#define ZR_N_KINDS  ZR_SCALE(ZR_MAX_STATES)

/* A third value of is_end in struct zero_call: the zero_end also ends a backward action, and so a micro-batch
 * of its pipeline stage. Only orders in which the pipeline stages of a rank take turns have it. */
enum { ZR_ENDS_ACTION = 2 };

/* A parameter group: what updates its tensors, and with which numbers. A zero here means zero. The struct has
 * no padding, because groups are hashed by bytes. */
struct zr_optim {
    /* ZR_OPTIMIZER_NONE: the user's update callback. */
    enum zero_optimizer optimizer;
    /* States per weight, 0 to 4. */
    int32_t n_states;
    float lr_scale, beta1, beta2, eps, weight_decay;
    /* The form of masters of bf16 weights, and of states. */
    enum zero_masters masters;
    enum zero_moments moments;
};

/* How stage 3 uses groups of ranks, each with a copy of the parameters. */
enum zr_hybrid {
    ZR_HYBRID_NONE, /* one group */
    ZR_HSDP,        /* all sharding is inside a group */
    ZR_HFSDP        /* the optimizer state is also sharded across groups */
};

struct zr_options {
    /* 0 to 3. Only placement.h knows what it means. */
    int stage;
    /* If not NONE, stage is 3. */
    enum zr_hybrid hybrid;
    /* With a hybrid: ranks that share one copy of the parameters, >= 1. */
    int32_t dp_shard;
    /* Pipeline stages, and tensor-parallel ranks of each (tp). Each tensor-parallel rank of each pipeline
     * stage has its set of data-parallel ranks. 0 and 1: not divided. */
    int32_t pp, tp;
    /* Data-parallel ranks that share the rows of a sequence (cp). 0 and 1: none. */
    int32_t cp;
    /* Bytes of the arena for activations between pipeline stages (pipe.c). */
    int64_t pipe_bytes;
    /* Bytes of the arena for tensors that the first and the last pipeline stage share (tied.c). */
    int64_t tied_bytes;

    /* The n_optims parameter groups. zr_engine_change_tuned may change their numbers later. */
    struct zr_optim optim[ZR_MAX_OPTIMS];
    int32_t n_optims;
    /* Global L2 norm above which gradients are scaled down. 0: no clipping. zr_engine_change_tuned may change
     * it. */
    float clip;
    /* Factor that gradients are multiplied by before anything else; finite, not 0. zr_engine_change_tuned may
     * change it. */
    double grad_scale;
    /* Micro-batches per step, >= 1, at first; and the most that a later step may have, if that is more. */
    int grad_accum_steps, max_grad_accum_steps;
    /* The model adds up a step's micro-batches in its own gradients, or in the memory that brackets give
     * it. */
    bool grad_in_place;
    /* Gradients are summed over ranks and micro-batches instead of averaged. */
    bool grad_sum;

    /* The model's own optimizer, for groups without a kind, or NULL. If it returns non-zero, the step fails.
     * On the host it is called on a thread of the device. */
    int (*update)(void *arg, const struct zero_update *u);
    void *update_arg;

    /* Units gathered ahead. 0: none. */
    int prefetch;
    /* Bytes for gathered parameters at stage 3, without the shards. Negative: what prefetch needs. */
    int64_t param_budget_bytes;
    /* Gradients of tensors that are not cut are compared over tp in the first steps. */
    bool compares_tp;
    /* The same bits at every stage, prefetch, budget and power-of-two world. */
    bool deterministic;
    /* Dtype of the gradient sums of bf16 tensors, F32 or BF16. Other tensors have F32. */
    enum zero_dtype grad_sum_dtype;
    /* Seed of rounding at random. */
    int64_t seed;
    /* The memory that holds masters and states. */
    enum zero_states states;
    /* With ZERO_STATES_FILE: elements of a part of the file, a multiple of 64. 0: the usual size. */
    int64_t part_elems;
    /* Dtype of gradients between ranks. 0: the tensor's own. */
    enum zero_dtype wire_dtype;

    /* Calls of one micro-batch. n_order 0: the calls of zr_plan_assume_order. Brackets are balanced and units
     * are not negative; the layout checks that the units exist. The memory belongs to the maker of these
     * options, and is valid until the call that takes them returns. Copy what is kept. */
    const struct zero_call *order;
    int n_order;
    /* The order is that of a whole step, with its grad_accum_steps micro-batches interleaved. */
    bool order_of_step;
    /* The order was not declared. It is what most models do, and the model may make other calls. */
    bool order_assumed;

    /* Bytes that the communicators reserve at the end of their arenas; multiples of 256. */
    int64_t gather_scratch_bytes, reduce_scratch_bytes, control_scratch_bytes, tp_scratch_bytes,
        cp_scratch_bytes;
    /* Most bytes that the communicators pack, when they gather and reduce slices with a list of places
     * (packs_up_to of comm/segment.h). 0: none. It changes what a rank receives. */
    int64_t gather_packs_up_to, reduce_packs_up_to;

    /* Longest wait for other ranks in any operation, in ms; > 0. */
    int64_t timeout_ms;

    /* Belongs to the maker of these options, and outlives what is opened with them. NULL: no log. */
    struct zr_log *log;
    /* A timeline is kept. */
    bool trace;

    /* Memory is reserved for a snapshot, and checkpoints are written from it while training goes on. */
    bool save_async;
    /* Checkpoints kept in a folder. 0: all. */
    int save_keep;

    /* Check mode is on (check/model_check.h). Units take slots even if keeping all of them takes no more
     * memory. */
    bool check;
};

/* Whether the program has declared the order of its calls. */
static inline bool zr_order_declared(const struct zr_options *o)
{
    return o->n_order > 0 && !o->order_assumed;
}

/* Returns the most micro-batches of any step. Memory is planned for them. */
static inline int zr_most_micro_batches(const struct zr_options *o)
{
    return o->max_grad_accum_steps > o->grad_accum_steps ? o->max_grad_accum_steps : o->grad_accum_steps;
}

/* Returns how many ranks hold one copy of the model together: pipeline stages times tensor-parallel ranks. */
static inline int32_t zr_model_ranks(const struct zr_options *o)
{
    return (o->pp > 1 ? o->pp : 1) * (o->tp > 1 ? o->tp : 1);
}

#endif
