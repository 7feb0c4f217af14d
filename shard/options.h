/* SPDX-License-Identifier: Apache-2.0 */
/* options.h: what the user asked for, resolved: no defaults left to fill in, no text left to parse, nothing
 * of zero/zero.h.
 *
 * zr_config_resolve() in zero/config.c makes it from struct zero_config; everything below works from this
 * alone. Plain data, copied by value; the one pointer into other memory that it may hold for long is order
 * (see there). */
#ifndef ZR_SHARD_OPTIONS_H
#define ZR_SHARD_OPTIONS_H

#include "kernels/device.h"

#define ZR_MAX_STATES  4   /* fp32 arrays like the weights that an optimizer may keep */
#define ZR_MOST_OPTIMS 256 /* parameter groups */

/* One call of a micro-batch, as the model is expected to make it. */
struct zr_call {
    int32_t unit;
    /* 0: forward, 1: backward. Of a backward whose gradients of inputs and of weights are apart (apart 1) 0:
     * that of inputs, which has parameters as forward has; 1: that of weights, which has the unit's gradient
     * and no parameters */
    uint8_t backward;
    /* 0: the bracket opens, 1: it closes */
    uint8_t is_end;
    /* 1: the last one of a backward action, of an order in which the pipeline stages of a rank take turns, so
     * that it ends a micro-batch of its stage. No padding: calls are compared and hashed by bytes, as part of
     * the core's state */
    uint8_t ends_action;
    uint8_t apart;
};

/* The unit's parameters are there in the bracket. */
static inline bool zr_call_needs_param(const struct zr_call *call)
{
    return !call->backward || !call->apart;
}

/* Backward, or one of its two halves. */
static inline bool zr_phase_is_backward(bool backward, bool apart)
{
    return backward || apart;
}

static inline const char *zr_phase_name(bool backward, bool apart)
{
    const char *whole = backward ? "backward" : "forward";
    return !apart ? whole : backward ? "backward of weights" : "backward of inputs";
}

/* A range of elements for the model's own optimizer. Pointers are device memory of this rank, n fp32 elements
 * each. */
struct zr_user_update {
    /* index in the array the model gave */
    int32_t tensor;
    /* element of the tensor, row-major, that index 0 here is */
    int64_t first;
    /* elements */
    int64_t n;
    /* weights: read and written */
    float *master;
    /* reduced, scaled and clipped */
    const float *grad;
    /* n_states of them, zero at first; the rest NULL */
    float *state[ZR_MAX_STATES];
    /* of this step */
    float lr;
    /* 1-based number of this step */
    int64_t t;
    /* the device's own stream handle; NULL on the host */
    void *native_stream;
};

/* A parameter group: what updates its tensors, and with which numbers. A zero here means zero. No padding, as
 * groups are hashed by bytes. */
struct zr_optim {
    /* ZR_OPTIMIZER_NONE: the user's update callback */
    enum zr_optimizer optimizer;
    /* fp32 arrays kept per weight, 0..4 */
    int32_t n_states;
    float lr_scale, beta1, beta2, eps, weight_decay;
};

/* Stage 3 in groups of ranks, each with a copy of the parameters. */
enum zr_hybrid {
    ZR_HYBRID_NONE, /* one group */
    ZR_HSDP,        /* all that is cut is cut inside a group */
    ZR_HFSDP        /* the optimizer's state is cut across groups, too */
};

struct zr_options {
    /* 0..3; what it means is for placement.h alone to know */
    int stage;
    /* other than NONE: stage is 3 */
    enum zr_hybrid hybrid;
    /* of a hybrid: ranks that share one copy of the parameters, >= 1 */
    int32_t dp_shard;
    /* Pipeline stages of the model, and parts of each of them: every part of every stage has data-parallel
     * ranks of its own; 0 and 1: it is whole */
    int32_t pp, parts;
    /* of activations from stage to stage, what their arena takes (pipe.c) */
    int64_t pipe_bytes;
    /* and of tensors that the first and the last stage have (tied.c) */
    int64_t tied_bytes;

    /* parameter groups, n_optims of them, at first (zr_engine_tune) */
    struct zr_optim optim[ZR_MOST_OPTIMS];
    int32_t n_optims;
    /* global L2 norm above which gradients are scaled down; 0: no clipping; at first */
    float clip;
    /* multiplies gradients before everything else; finite, not 0; at first */
    double grad_scale;
    /* micro-batches per step, >= 1, at first; and the most that a later step may have, if more */
    int grad_accum_steps, max_grad_accum_steps;
    /* the model sums a step's micro-batches in its own gradients, or in the place it is given in brackets */
    bool grad_in_place;
    /* sum over ranks and micro-batches instead of their mean */
    bool grad_sum;

    /* The model's own optimizer, for groups without a kind, or NULL. Non-zero: the step fails. Called on a
     * thread of the device's (host). */
    int (*update)(void *arg, const struct zr_user_update *u);
    void *update_arg;

    /* units gathered ahead; 0: none */
    int prefetch;
    /* for gathered parameters at stage 3, besides the shards; negative: what prefetch needs */
    int64_t param_budget_bytes;
    /* gradients of what is not cut are compared over tp in the first steps; on the host */
    bool compares_tp;
    /* same bits at every stage, prefetch, budget and power-of-two world */
    bool deterministic;
    /* of gradients between ranks; 0: the tensor's own */
    enum zr_dtype wire_dtype;

    /* Calls of one micro-batch; n_order 0: those of zr_plan_assume_order. Brackets are
     * balanced and units >= 0; that they exist is for the layout to check. The memory belongs to whoever made
     * these options and is valid until the call they were made for returns: copy what is kept. */
    const struct zr_call *order;
    int n_order;
    /* the order is that of a whole step, grad_accum_steps micro-batches interleaved */
    bool order_of_step;
    /* nobody has declared it: it is what most models do, and another may come */
    bool order_assumed;

    /* That the communicators want for themselves at the end of their arenas; multiples of 256. */
    int64_t gather_scratch_bytes, reduce_scratch_bytes, control_scratch_bytes;
    /* What they pack of slices that a list of places makes, when they gather and when they reduce: up to so
     * many bytes (packs_up_to of comm/segment.h); 0: none. It changes what a rank receives. */
    int64_t gather_packs_up_to, reduce_packs_up_to;

    /* for peers, in every operation; > 0 */
    int64_t timeout_ms;

    /* NULL: nobody listens. Of whoever made these options; lives as long as what is opened with them */
    struct zr_log *log;
    /* keep a timeline */
    bool trace;

    /* reserve memory for a snapshot, and write checkpoints from it while training goes on */
    bool save_async;
    /* checkpoints kept in a folder; 0: all */
    int save_keep;

    /* watch the run (check/model_check.h); units take slots even where keeping all of them takes no more
     * memory */
    bool check;
};

/* The program says in which order its calls come. */
static inline bool zr_order_declared(const struct zr_options *o)
{
    return o->n_order > 0 && !o->order_assumed;
}

/* The most micro-batches of any step, which memory is planned for. */
static inline int zr_most_micro_batches(const struct zr_options *o)
{
    return o->max_grad_accum_steps > o->grad_accum_steps ? o->max_grad_accum_steps : o->grad_accum_steps;
}

/* Ranks that have the model together, for each of the data-parallel ranks. */
static inline int32_t zr_model_ranks(const struct zr_options *o)
{
    return (o->pp > 1 ? o->pp : 1) * (o->parts > 1 ? o->parts : 1);
}

#endif
