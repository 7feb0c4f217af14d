/* options.h: what the user asked for, resolved: no defaults left to fill in, no text left to parse, nothing
 * of zero/zero.h.
 *
 * zr_config_resolve() in zero/config.c makes it from struct zero_config; everything below works from this
 * alone. Plain data, copied by value; the one pointer into other memory that it may hold for long is order
 * (see there). */
#ifndef ZR_SHARD_OPTIONS_H
#define ZR_SHARD_OPTIONS_H

#include "kernels/device.h"

#define ZR_MAX_STATES 4 /* fp32 arrays like the weights that an optimizer may keep */

/* One call of a micro-batch, as the model is expected to make it. */
struct zr_call {
    int32_t unit;
    uint8_t backward; /* 0: forward, 1: backward */
    uint8_t is_end;   /* 0: the bracket opens, 1: it closes */
    uint16_t unused;  /* 0. No padding: calls are compared and hashed by bytes, as part of the core's state */
};

/* A range of elements for the model's own optimizer. Pointers are device memory of this rank, n fp32 elements
 * each. */
struct zr_user_update {
    int32_t tensor;              /* index in the array the model gave */
    int64_t first;               /* element of the tensor, row-major, that index 0 here is */
    int64_t n;                   /* elements */
    float *master;               /* weights: read and written */
    const float *grad;           /* reduced, scaled and clipped */
    float *state[ZR_MAX_STATES]; /* n_states of them, zero at first; the rest NULL */
    float lr;                    /* of this step */
    int64_t t;                   /* 1-based number of this step */
    void *native_stream;         /* the device's own stream handle; NULL on the host */
};

/* What the tensors of one kind of optimizer are updated with. True values: a zero here means zero. */
struct zr_hyper {
    float beta1, beta2, eps, weight_decay;
};

struct zr_options {
    int stage; /* 0..3 */

    enum zr_optimizer
        optimizer; /* of tensors that name none; ZR_OPTIMIZER_NONE: the user's update callback */
    struct zr_hyper hyper[ZR_OPTIMIZER_COUNT]; /* by kind, at first (zr_engine_tune) */
    float clip;           /* global L2 norm above which gradients are scaled down; 0: no clipping; at first */
    double grad_scale;    /* multiplies gradients before everything else; finite, not 0 */
    int grad_accum_steps; /* micro-batches per step, >= 1 */
    bool grad_in_place;   /* stages 0 and 1: the model sums a step's micro-batches in its own gradients */
    bool grad_sum;        /* sum over ranks and micro-batches instead of their mean */

    /* The model's own optimizer, or NULL. Non-zero: the step fails. Called on a thread of the device's
     * (host). */
    int (*update)(void *arg, const struct zr_user_update *u);
    void *update_arg;
    int n_states; /* of update: fp32 arrays kept per weight, 0..4 */

    int prefetch;               /* units gathered ahead; 0: none */
    int64_t param_budget_bytes; /* for gathered parameters at stage 3, besides the shards; negative: what
                                   prefetch needs */
    bool deterministic;         /* same bits at every stage, prefetch, budget and power-of-two world */
    enum zr_dtype wire_dtype;   /* of gradients between ranks; 0: the tensor's own */

    /* Calls of one micro-batch; n_order 0: each unit forward, then each backward in reverse. Brackets are
     * balanced and units >= 0; that they exist is for the layout to check. The memory belongs to whoever made
     * these options and is valid until the call they were made for returns: copy what is kept. */
    const struct zr_call *order;
    int n_order;

    /* That the communicators want for themselves at the end of their arenas; multiples of 256. */
    int64_t gather_scratch_bytes, reduce_scratch_bytes;

    int64_t timeout_ms; /* for peers, in every operation; > 0 */

    struct zr_log *log; /* NULL: nobody listens. Of whoever made these options; lives as long as what is
                           opened with them */
    bool trace;         /* keep a timeline */

    bool save_async; /* reserve memory for a snapshot, and write checkpoints from it while training goes on */
    int save_keep;   /* checkpoints kept in a folder; 0: all */

    bool check; /* watch the run (engine_check.h) */
};

/* The kind that updates a tensor which names `kind`, ZR_OPTIMIZER_NONE: none. */
static inline enum zr_optimizer zr_kind_of(const struct zr_options *o, enum zr_optimizer kind)
{
    return kind ? kind : o->optimizer;
}

/* And the fp32 arrays that it keeps per weight. */
static inline int zr_states_of(const struct zr_options *o, enum zr_optimizer kind)
{
    enum zr_optimizer k = zr_kind_of(o, kind);
    return k ? zr_optimizer_states(k, o->hyper[k].beta1) : o->n_states;
}

#endif
