/* SPDX-License-Identifier: Apache-2.0 */
/* zero_info.h: the structs that zero.h's calls fill: memory, plans, statistics, actions, outcomes. Included
 * by zero_config.h. */
#ifndef ZERO_ZERO_INFO_H
#define ZERO_ZERO_INFO_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Memory per rank, by category. N is the world's number of ranks; with a hybrid those of a group, but with
 * HFSDP, for master and moments, again the world's. X(name, text)
 *   param_shards   parameters as they are kept: 1/N of a unit at stage 3, all of it where it is resident
 *   param_slots    memory for gathered copies (stage 3)
 *   grad_shards    reduced gradients, fp32, 1/N; none of those that are reduced where they lie: f32, once a
 *                  step, at stage 0 or on one rank
 *   grad_slots     where backward writes: whole at stages 0 and 1, on one rank and with grad_in_place, else
 *                  whole of units with ZERO_RESIDENT or ZERO_TIED, and slots for a few of the others: as many
 *                  as cfg.memory.order holds open and one more, or without it for the three largest
 *   grad_sums      further sums of gradients, which deterministic accumulation takes; of a hybrid grad_shards
 *                  are then of the world's 1/N, and two units' sums in a group are here
 *   grad_gathered  stage 0: one unit's reduced gradient, whole, fp32, where it is not reduced where it lies;
 *                  of HSDP with deterministic accumulation 1/N of it
 *   master         fp32 copies of weights that are not fp32 themselves, 1/N (stage 0: all)
 *   moments        optimizer states, 1/N (stage 0: all)
 *   snapshot       cfg.checkpoint.save_async: the copy that is written while training goes on
 *   comm           the communicators' own: NCCL's room for packed slices and for what arrives
 *   exchange       small things that ranks tell each other (a step's agreement, exchanges, values on their
 *                  way), and what rounding to pages costs */
#define ZERO_MEM_MAP(X)                                                                                      \
    X(param_shards, "parameter shards")                                                                      \
    X(param_slots, "parameter slots")                                                                        \
    X(grad_shards, "gradient shards")                                                                        \
    X(grad_slots, "gradient slots")                                                                          \
    X(grad_sums, "gradient sums")                                                                            \
    X(grad_gathered, "gathered gradients")                                                                   \
    X(master, "master weights")                                                                              \
    X(moments, "optimizer moments")                                                                          \
    X(snapshot, "snapshot")                                                                                  \
    X(comm, "communicators")                                                                                 \
    X(exchange, "exchange")

struct zero_bytes {
#define ZERO_MEM_FIELD(name, text) int64_t name;
    ZERO_MEM_MAP(ZERO_MEM_FIELD)
#undef ZERO_MEM_FIELD
    int64_t total;
};

/* Of one step, per rank. */
struct zero_traffic {
    /* units that were gathered, reduce-scattered, and (stage 0) all-reduced */
    int64_t n_all_gather, n_reduce_scatter, n_all_reduce;
    /* bytes received by this rank from others */
    int64_t wire_bytes;
    /* of a hybrid, between groups: units reduced and units gathered there, and what of wire_bytes comes from
     * other groups, with what the ranks of all groups agree on in a step */
    int64_t n_outer, outer_bytes;
};

struct zero_plan_info {
    int32_t world, stage;
    /* elements of all tensors together */
    int64_t n_params;
    /* of every rank: all are alike */
    struct zero_bytes bytes;
    /* of a steady step of grad_accum_steps micro-batches in cfg.memory.order, on rank 0; where granules make
     * ranks differ, on the one that receives most */
    struct zero_traffic traffic;
    /* the ZeRO paper's formula for the same model, stage and world: parameters, gradients and optimizer state
     * only */
    int64_t paper_bytes;
    /* as it runs: ranks that share one copy of the parameters, all data-parallel ranks without HSDP and
     * HFSDP; and enum zero_hybrid */
    int32_t dp_shard, hybrid;
};

/* This rank's place in cfg.mesh: its number along each axis, and how many ranks lie along it. */
struct zero_place {
    /* local_rank: this process's number on its host if the launcher gives one, else the rank */
    int32_t rank, world, local_rank;
    /* for a data loader: this rank reads part `data` of n_data. Ranks along tp, cp and pp share one */
    int32_t data, n_data;
    /* -1 before zero_wrap with cfg.mesh.dp_replicate ZERO_AUTO: dp_replicate and dp_shard, and their n_ */
    int32_t pp, dp_replicate, dp_shard, cp, tp;
    int32_t n_pp, n_dp_replicate, n_dp_shard, n_cp, n_tp;
};

/* What a rank has done since zero_wrap. */
struct zero_stats {
    int32_t rank, world, local_rank, stage;
    /* "self", "shm", "nccl", "mpi": a key of ZERO_BACKEND_MAP */
    const char *backend;
    /* "host", "cuda" */
    const char *device;

    /* calls of zero_step, skipped ones too, in this context; steps that were skipped, with those of the
     * checkpoint loaded last */
    int64_t n_steps, n_skipped;
    /* allocated: counted where memory was taken; equal to planned to the byte */
    struct zero_bytes allocated, planned;
    /* total since zero_wrap */
    struct zero_traffic traffic;
    /* begins that had to wait for their unit */
    int64_t n_waits;
    /* the time that these waits took: communication that compute did not hide */
    int64_t wait_ns;
    /* times the call order changed and was learned anew */
    int64_t n_replans;
    /* how bytes travel, of a backend that has several ways ("NCCL 2.28.9, symmetric windows"); of others its
     * name. The library's, valid until zero_unwrap */
    const char *path;
    /* steps given up by zero_drop; they count in nothing else */
    int64_t n_dropped;
    /* as in struct zero_plan_info */
    int32_t dp_shard, hybrid;
    /* as it runs: this rank's micro-batches in a step; and how often the job was started before, as its
     * launcher counts */
    int32_t grad_accum_steps, attempt;
    /* micro-batches of all ranks in all steps, skipped ones too, with those of the checkpoint loaded last */
    int64_t n_micro;
    /* what NCCL holds on the GPU for the communicators, by its own count: besides allocated and planned,
     * which are libzero's. Asked after some of their operations, the first ones among them; 0: it does not
     * say (from 2.29.7 on it does), or it is another backend */
    int64_t library_bytes;
    /* of cfg.mesh, 1 without; and what this rank received in collectives over tp, which traffic leaves out */
    int64_t tp, tp_bytes;
    /* the same of pp, and of what came from the stages beside this one */
    int64_t pp, pp_bytes;
    /* as zero_find_place has it, with all of its numbers known */
    struct zero_place place;
    /* 0 */
    int32_t reserved;
};

/* A pipeline: cfg.mesh's pp cuts the model into stages, one after another, of which each rank of pp wraps its
 * own one, or several. A step's micro-batches (cfg.grad_accum_steps) go through them as cfg.pipeline.schedule
 * says, forward and back, so that stages compute at the same time. This is what one of them does: its forward
 * or its backward of one micro-batch, whose units it brackets as ever. */
struct zero_action {
    /* enum zero_phase */
    int32_t phase;
    /* 0 to grad_accum_steps - 1: of this rank's place in dp; -1: all actions of the step are over, and
     * zero_step is next */
    int32_t micro_batch;
    /* forward: what the stage before gave; backward: the gradient of what this stage gave, the same in both
     * parts of one that is apart. cfg.pipeline.activation_bytes of the library's, to be read until
     * zero_finish; NULL on the first stage forward, on the last backward */
    const void *in;
    /* forward: for what this stage gives to the next; backward: for the gradient of what the stage before
     * gave. All of it that the other stage reads has to be written: what was there is not zeroed. NULL on the
     * last stage forward, on the first backward, and in a backward of weights */
    void *out;
    /* backward: `in` of the micro-batch's forward, which is still there; NULL on the first stage */
    const void *kept;
    /* of this rank's stages, which: 0 to cfg.pipeline.stages_per_rank - 1, as its tensors have it */
    int32_t pp_stage;
};

struct zero_step_info {
    /* 1-based number of the step just taken; skipped ones do not count */
    int64_t t;
    /* global L2 norm, of the scaled gradient, before clipping; NaN if a gradient was not finite */
    double grad_norm;
    /* 1: it was above cfg.clip */
    int32_t clipped;
    /* 1: a gradient was not finite or too large on some rank (zero_step): nothing was updated, on any rank */
    int32_t skipped;
    /* how many values zero_carry gave to this step */
    int32_t n_carried;
    /* their means over ranks; NaN where a rank's is not finite */
    double carried[8];
};

#ifdef __cplusplus
}
#endif

#endif
