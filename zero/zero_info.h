/* SPDX-License-Identifier: Apache-2.0 */
/* zero_info.h: the structs that the calls of zero.h fill in. zero_config.h includes this file. */
#ifndef ZERO_ZERO_INFO_H
#define ZERO_ZERO_INFO_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Memory of one rank, by category. zero/memory.md says what each holds, and when it is sharded. X(name, text)
 *   param_shards, param_slots   parameters as they are kept, and gathered ones (stage 3)
 *   grad_slots                  gradients as backward writes them
 *   grad_shards, grad_sums      reduced gradients, and further sums of them
 *   grad_gathered               one unit's reduced gradient
 *   master, moments             masters of weights that are not f32; optimizer state
 *   state_buffers               with ZERO_STATES_FILE: two parts of the file; master and moments are then 0
 *   snapshot                    the copy that cfg.checkpoint.save_async writes
 *   comm, exchange              buffers of communicators; small values, and rounding to pages */
#define ZERO_MEM_MAP(X)                                                                                      \
    X(param_shards, "parameter shards")                                                                      \
    X(param_slots, "parameter slots")                                                                        \
    X(grad_shards, "gradient shards")                                                                        \
    X(grad_slots, "gradient slots")                                                                          \
    X(grad_sums, "gradient sums")                                                                            \
    X(grad_gathered, "gathered gradients")                                                                   \
    X(master, "master weights")                                                                              \
    X(moments, "optimizer moments")                                                                          \
    X(state_buffers, "state buffers")                                                                        \
    X(snapshot, "snapshot")                                                                                  \
    X(comm, "communicators")                                                                                 \
    X(exchange, "exchange")

struct zero_bytes {
#define ZERO_MEM_FIELD(name, text) int64_t name;
    ZERO_MEM_MAP(ZERO_MEM_FIELD)
#undef ZERO_MEM_FIELD
    int64_t total;
};

/* Communication of one rank. */
struct zero_traffic {
    /* Units gathered, reduce-scattered, and all-reduced (stage 0). */
    int64_t n_all_gather, n_reduce_scatter, n_all_reduce;
    /* Bytes that this rank received. */
    int64_t wire_bytes;
    /* Hybrids: units reduced or gathered between replicas, and the part of wire_bytes that came from other
     * replicas. */
    int64_t n_outer, outer_bytes;
};

/* The outcome of zero_plan. */
struct zero_plan_info {
    int32_t world, stage;
    /* Elements of all tensors. */
    int64_t n_params;
    /* Memory of one rank; equal on all ranks. */
    struct zero_bytes bytes;
    /* host_bytes: with a GPU, the part of bytes.total that is in host memory. file_bytes: the size of the
     * file in cfg.memory.states_dir, which is not part of bytes. */
    int64_t host_bytes, file_bytes;
    /* A steady step of grad_accum_steps micro-batches in cfg.memory.order, on rank 0. If granules make ranks
     * differ, the rank that receives most. */
    struct zero_traffic traffic;
    /* Bytes by the ZeRO paper's formula: parameters, gradients and optimizer state only. */
    int64_t paper_bytes;
    /* Ranks that share one copy of the parameters, counting cp (unlike zero_mesh.dp_shard); and enum
     * zero_hybrid. */
    int32_t dp_shard, hybrid;
};

/* This rank's place in cfg.mesh. */
struct zero_place {
    /* local_rank: the number on this host if the launcher gives one, else rank. */
    int32_t rank, world, local_rank;
    /* For the data loader: the index of this rank's part, and the number of parts. Ranks along tp, cp and pp
     * share a part. */
    int32_t data, n_data;
    /* This rank's number along each axis, and the number of ranks along it. With dp_replicate ZERO_AUTO the
     * four dp_ numbers are -1 until zero_wrap; then zero_get_stats has them. */
    int32_t pp, dp_replicate, dp_shard, cp, tp;
    int32_t n_pp, n_dp_replicate, n_dp_shard, n_cp, n_tp;
};

/* Statistics of one rank since zero_wrap. */
struct zero_stats {
    /* ---- what runs ---- */

    /* With every number known. */
    struct zero_place place;
    int32_t stage;
    /* As in struct zero_plan_info. */
    int32_t dp_shard, hybrid;
    /* This rank's micro-batches per step, and how often the launcher had started the job before. */
    int32_t grad_accum_steps, attempt;
    /* The fields of cfg with these names, as this run uses them: variables may have changed them. masters and
     * moments are those of parameter group 0. The first two apply to bf16 tensors; fp32 tensors have fp32
     * sums and no separate masters. */
    int32_t grad_sum_dtype, masters, moments, states;
    /* A key of ZERO_BACKEND_MAP, such as "shm". */
    const char *backend;
    /* "host" or "cuda". */
    const char *device;
    /* How bytes travel, such as "NCCL 2.28.9, symmetric windows". Valid until zero_unwrap. */
    const char *path;

    /* ---- memory ---- */

    /* allocated is counted where memory is taken, and equals planned to the byte. */
    struct zero_bytes allocated, planned;
    /* Bytes that NCCL itself holds on the GPU, in addition to allocated. 0: unknown (before NCCL 2.29.7). */
    int64_t library_bytes;

    /* ---- steps ---- */

    /* Calls of zero_step in this context; and skipped steps, including those of the loaded checkpoint. */
    int64_t n_steps, n_skipped;
    /* Steps discarded by zero_drop, which count nowhere else. */
    int64_t n_dropped;
    /* Micro-batches of all parts of the data (place.n_data) in all steps, including those of the loaded
     * checkpoint. */
    int64_t n_micro;
    /* Times that the order of calls changed and was learned again. */
    int64_t n_replans;

    /* ---- communication ---- */

    /* Total since zero_wrap. */
    struct zero_traffic traffic;
    /* Bytes received in collectives over tp and cp, and from other pipeline stages, which traffic leaves
     * out. */
    int64_t tp_bytes, cp_bytes, pp_bytes;
    /* Calls of zero_begin that waited for their unit. */
    int64_t n_waits;
    /* Time of these waits in ns: communication that compute did not hide. */
    int64_t wait_ns;
};

/* One action of a pipeline: the forward or backward of one micro-batch through one pipeline stage.
 * zero/pipeline.md has the loop. */
struct zero_action {
    /* enum zero_phase. */
    int32_t phase;
    /* This rank's micro-batch, 0 to grad_accum_steps - 1. -1: no action is left, and zero_step is next. */
    int32_t micro_batch;
    /* Forward: the output of the pipeline stage before. Backward: the gradient of this one's output. Has
     * activation_bytes, readable until zero_finish. NULL: there is none. */
    const void *in;
    /* Memory for this pipeline stage's output (forward) or the gradient of its input (backward); not zeroed.
     * NULL: nobody receives it, or the phase is ZERO_BACKWARD_WEIGHT. */
    void *out;
    /* Backward: `in` of this micro-batch's forward. NULL in the first pipeline stage. */
    const void *kept;
    /* The pipeline stage, as in zero_tensor.pp_stage: 0 to stages_per_rank - 1. */
    int32_t pp_stage;
};

#ifdef __cplusplus
}
#endif

#endif
