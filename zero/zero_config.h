/* SPDX-License-Identifier: Apache-2.0 */
/* zero_config.h: the structs that the program fills in. zero.h includes this file and explains the terms. */
#ifndef ZERO_ZERO_CONFIG_H
#define ZERO_ZERO_CONFIG_H

#include "types.h"
#include "zero_info.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The source of the parameters' first values. *param may be NULL (memory.md), but not with ZERO_INIT_MODEL,
 * nor on rank 0 with ZERO_INIT_RANK0. Buffers get rank 0's values. */
enum zero_init {
    /* *param of every rank; only rank 0's values are used. */
    ZERO_INIT_MODEL = 0,
    /* *param of rank 0. */
    ZERO_INIT_RANK0 = 1,
    /* zero_load, or zero_import and zero_write. Until every element has a value, calls that need values
     * return ZERO_ERR_ORDER. */
    ZERO_INIT_LATER = 2,
    /* cfg.init. */
    ZERO_INIT_CALL = 3
};

/* Flags of a tensor. */
enum {
    /* shape[0] layers in one piece of memory. Layer l is in unit + l. */
    ZERO_STACKED = 1 << 0,
    /* No weight decay: biases, norms. */
    ZERO_NO_DECAY = 1 << 1,
    /* Backward stores the whole gradient instead of adding to it. */
    ZERO_GRAD_OVERWRITE = 1 << 2,
    /* The unit's parameters stay gathered at stage 3, and its gradients whole at stages 2 and 3. Any number
     * of such units may be open at once. */
    ZERO_RESIDENT = 1 << 3,
    /* With ZERO_STACKED: the model reads *param and *grad anew after each zero_begin, so several layers may
     * be open at once. Layer l is still at *param + l * stride. */
    ZERO_POINTER_PER_BEGIN = 1 << 4,
    /* State that is saved but not trained. grad is NULL, and no other flag is set. */
    ZERO_BUFFER = 1 << 5,
    /* A tensor of the first and the last pipeline stage, such as an embedding that the head shares
     * (pipeline.md). With pp 1 the same as ZERO_RESIDENT. */
    ZERO_TIED = 1 << 6,
    /* Sequence parallelism: each rank along tp computes this gradient from its own tokens, and zero_end adds
     * up those of tp. */
    ZERO_TP_PARTIAL = 1 << 7,
    /* With tp_cut: zero_wrap and zero_write take the whole tensor, and the library cuts out this rank's
     * shard. zero_read numbers elements within the shard. */
    ZERO_WHOLE = 1 << 8
};

/* A value of zero_tensor.tp_cut. */
#define ZERO_TP_CUT(dim) ((dim) + 1)

/* One tensor of the model.
 *
 * From zero_wrap to zero_unwrap the library sets *param and *grad, and the model must not assign them. Calls
 * that find another value return ZERO_ERR_ORDER and change nothing. A buffer's pointer and memory, on the
 * host or cfg.device, stay the model's. It may be moved between two calls, but never to NULL. */
struct zero_tensor {
    /* Name in errors, traces and checkpoints; unique in the whole model, except for ZERO_TIED tensors and
     * ZERO_STACKED ones that pipeline stages divide. */
    const char *name;
    /* Addresses of the model's own pointers, in place until zero_unwrap. *grad has the same dtype. grad NULL:
     * frozen. */
    void **param, **grad;
    /* Row-major dimensions, ended by 0 if fewer than 8. */
    int64_t shape[8];
    enum zero_dtype dtype;
    /* Unit, 0 to n - 1 without gaps. ZERO_STACKED: that of the first layer. Ignored for buffers. */
    int32_t unit;
    /* Flags, or-ed. 0: none. */
    uint32_t flags;
    /* Parameter group (struct zero_optim). 0: cfg.optim; g: cfg.optim_groups[g - 1]. Buffers: 0. */
    int32_t group;
    /* Shards begin at multiples of this many elements of the tensor or layer (optimizers.md). 0 means 1. */
    int64_t granule;
    /* ZERO_TP_CUT(d): tp divides the tensor along dimension d, and shape is that of this rank's shard. 0:
     * ranks along tp have the same elements, and compute the same gradient unless ZERO_TP_PARTIAL is set. */
    int32_t tp_cut;
    /* Blocks along that dimension, each divided separately, as in a fused q, k and v. 0 means 1. */
    int32_t tp_blocks;
    /* Size of the whole tensor along dimension 0, if shards are padded. 0: no padding. */
    int64_t tp_size;
    /* Pipeline stage on this rank, 0 to stages_per_rank - 1. All tensors of a unit have the same. */
    int32_t pp_stage;
    /* Most backward brackets of the unit in a micro-batch, 0 to 1000. 0 means 1. All tensors of a unit that
     * set it set the same. With cfg.memory.order: 0, or the number of brackets there. */
    int32_t uses;
};

/* A parameter group: what updates its tensors, and with which numbers.
 *
 * Start from ZERO_OPTIM_INIT, which writes every default. Keys, and variables of fields marked + (struct
 * zero_config), set group 0, cfg.optim. zero_tune changes the numbers between steps. */
struct zero_optim {
    /* + enum zero_optimizer. Default ZERO_ADAMW. If update is set, leave the default, which is ignored. */
    int32_t optimizer;
    /* + Factor of zero_step's lr, 0 and more. With 0 weights do not change, but states do. Default 1. */
    float lr_scale;
    /* + 0 and more, below 1. Default ZERO_AUTO: the optimizer's (ZERO_OPTIMIZER_MAP). */
    float beta1, beta2;
    /* + 0 and more. Default ZERO_AUTO: the optimizer's. */
    float eps;
    /* + 0 and more. Default 0. */
    float weight_decay;
    /* + enum zero_masters: the form of the masters of the group's bf16 weights. With update: f32. Default
     * f32. */
    int32_t masters;
    /* + enum zero_moments: the form of the optimizer's states, for weights of any dtype. With update: f32.
     * Default f32. */
    int32_t moments;
    /* fp32 state arrays that update uses, each the size of the weights, 0 to 4. Default 0. */
    int32_t n_states;
    /* The program's own optimizer (optimizers.md). The library calls it on one of its threads, or in a world
     * of 1 on the caller of zero_step, one call at a time. It must not call zero_*. If it returns non-zero,
     * the context fails with ZERO_ERR_FAILED. Default NULL. */
    int (*update)(void *arg, const struct zero_update *u);
    void *update_arg;
};

/* "All groups", for zero_tune. */
#define ZERO_ALL (-1)

/* Ranks along each axis; their product is the world. Axes are listed outermost first, so ranks along tp are
 * neighbours. */
struct zero_mesh {
    /* + Pipeline parallelism. Default 1. */
    int32_t pp;
    /* + Replicas of the model at stage 3 (HSDP, HFSDP), each sharded over dp_shard ranks. Lower stages treat
     * all data-parallel ranks as one group, with a warning. ZERO_AUTO: one replica per host. Default 1. */
    int32_t dp_replicate;
    /* + Ranks that stages 1 to 3 shard over, not counting cp. Default 0: the world divided by the other
     * axes. */
    int32_t dp_shard;
    /* + Context parallelism: ranks that share the rows of every sequence (context_parallel.md), 1 to 64.
     * Stages shard over dp_shard * cp ranks. Default 1. */
    int32_t cp;
    /* + Tensor parallelism: ranks that divide every layer and compute on the same data, 1 to 64. Default
     * 1. */
    int32_t tp;
};

/* Version of all public structs and enums. */
#define ZERO_ABI_VERSION 0x5a45000cu

/* How a job is sharded and run. Start from ZERO_CONFIG_INIT (or zero_config_init), which writes every
 * default.
 *
 * A field's own name, without that of the struct around it, is its key for zero_config_set. For fields marked
 * + the environment variable ZERO_<KEY IN CAPITALS> overrides the program. Values must be equal on all ranks
 * unless a comment says otherwise. */
struct zero_config {
    /* bytes of this struct */
    size_t size;
    /* ZERO_ABI_VERSION */
    uint32_t version;

    /* + What is sharded. 0: nothing (data parallel), 1: optimizer state, 2: gradients too, 3: parameters too.
     * Default 0. */
    int32_t stage;
    /* + enum zero_device: host, or cuda for the calling thread's current device. Default host. */
    int32_t device;
    /* The model's compute stream on a GPU. NULL is CUDA's legacy default stream, with a warning;
     * cudaStreamLegacy is the same without one. */
    zero_stream stream;

    /* + Micro-batches per zero_step, 1 and more. Default 1. zero_get_stats has the actual value, as a restart
     * with fewer ranks may raise it. */
    int32_t grad_accum_steps;
    /* + Most that zero_tune may set. Memory is planned for it. Default 0: grad_accum_steps. */
    int32_t max_grad_accum_steps;
    /* + Largest global L2 norm of the gradients; larger ones are scaled down. Default 0: no clipping. */
    float clip;
    /* + Factor that gradients are multiplied by before anything else; not 0. Default 1. */
    double grad_scale;
    /* + 1: sum gradients over ranks and micro-batches; 0: average them. Default 0. */
    int32_t grad_sum;
    /* + 1: the same bits at every stage, prefetch and budget, and in every power-of-two world. Keeps further
     * copies of the gradient sums: one from 3 micro-batches per step on, two from 7, three from 15, and so
     * on. With nccl at most 64 ranks may reduce together. Default ZERO_AUTO: on. It is off with nccl and, if
     * a step may have several micro-batches, with grad_in_place (then 1 is refused) or replicas on several
     * hosts. */
    int32_t deterministic;
    /* + enum zero_hybrid: hsdp, hfsdp. Default hsdp. */
    int32_t hybrid;
    /* With tp or pp above 1, "all ranks" and "rank 0" in other comments mean all, or the first, of the ranks
     * with the same part of the model. */
    struct zero_mesh mesh;
    /* Parameter group 0. */
    struct zero_optim optim;
    /* Further parameter groups, 0 to 255, each begun with ZERO_OPTIM_INIT; copied. Default NULL and 0. */
    const struct zero_optim *optim_groups;
    int32_t n_optim_groups;

    /* Memory and the traffic of parameters and gradients. */
    struct {
        /* + Units gathered ahead. 0: none. Default 2. */
        int32_t prefetch;
        /* + Bytes for gathered parameters at stage 3. Default ZERO_AUTO: what prefetch needs. */
        int64_t param_budget_bytes;
        /* + Dtype of gradients between ranks: f32, bf16, or 0 for the tensor's own. Default 0. */
        int32_t wire_dtype;
        /* + 1: backward adds up the micro-batches of a step, and gradients are reduced once (PyTorch's
         * no_sync). At stages 2 and 3 they stay whole until then. Default 0: every micro-batch is reduced.
         * That is so with 1, too, if any tensor has ZERO_GRAD_OVERWRITE. */
        int32_t grad_in_place;
        /* + Dtype of a step's gradient sums, for bf16 tensors: f32, bf16 (not with optim.update), or 0 for
         * f32. In bf16 the first value of each sum is rounded to nearest, and the result of each addition at
         * random. So the bits depend on grad_accum_steps. Default 0. */
        int32_t grad_sum_dtype;
        /* + enum zero_states: the memory that holds masters and states. Default device. */
        int32_t states;
        /* With ZERO_STATES_FILE: an existing folder on a local disk (may differ). zero_wrap makes this rank's
         * file there. ZERO_STATES_DIR overrides it. Default NULL. */
        const char *states_dir;
        /* + Seed of rounding at random, 0 to 2^53 - 1. Checkpoints record it, but a load does not set it.
         * Default 0. */
        int64_t seed;
        /* The n_order calls of one micro-batch; copied. They size slots, and declare how many backward
         * brackets each unit has. After the first step the library follows the order that it has seen. With
         * several pipeline stages on a rank: all forward calls, stage by stage, then all backward calls.
         * Default NULL: each unit forward, then each backward in reverse, as often as uses says. */
        int32_t n_order;
        const struct zero_call *order;
    } memory;

    /* Pipelines, with mesh.pp or stages_per_rank above 1. */
    struct {
        /* + enum zero_schedule. Default 1f1b. */
        int32_t schedule;
        /* Path of a schedule in the CSV form of torch.distributed.pipelining, which replaces `schedule` in
         * training. Default NULL. */
        const char *schedule_file;
        /* Pipeline stages on each rank, with interleaved, gpipe or a schedule_file. Rank r has stages r, pp +
         * r, 2 pp + r and so on; pp_stage numbers them from 0. Default 1. */
        int32_t stages_per_rank;
        /* Most bytes that a pipeline stage passes to the next for one micro-batch. Default 0. */
        int64_t activation_bytes;
    } pipeline;

    /* Ranks: their numbers, how they meet, and how they communicate. */
    struct {
        /* This rank's number (may differ), and the number of ranks. Default 0 and 0: found in the variables
         * of zero-run, torchrun, Open MPI, MPICH or Slurm; without these, rank 0 of 1. */
        int32_t rank, world;
        /* Where ranks meet: "tcp://host:port" of rank 0, or "file:///path" on a disk that all hosts share.
         * Default NULL: as the environment says, or else over the launcher's MPI. */
        const char *rendezvous;
        /* Network interface that ranks meet on (may differ): its name or an address of it. ZERO_INTERFACE
         * overrides it. Default NULL: the system's routes decide. */
        const char *interface;
        /* + Longest wait for other ranks, in ms, 1 and more. Default 30000. */
        int64_t timeout_ms;
        /* + The same in zero_wrap. Default ZERO_AUTO: 600000, or timeout_ms if that is longer. */
        int64_t start_timeout_ms;
        /* Name of this context, at most 63 characters. Only contexts of the same name connect. Default NULL:
         * "". */
        const char *name;
        /* + enum zero_backend. Default ZERO_BACKEND_AUTO: self for world 1, else shm on the host and nccl
         * with cuda. */
        int32_t backend;
        /* Address of the program's own MPI_Comm, which says who the ranks are. Needs MPI_THREAD_MULTIPLE
         * (launching.md). Default NULL: MPI_COMM_WORLD. */
        void *mpi_comm;
        /* The program's own ncclComm_t, which says who the ranks are; it is split. The program's NCCL traffic
         * must not overlap the library's (gpus.md). Default NULL. */
        void *nccl_comm;
        /* The program's all-gather, by which ranks meet: `bytes` of exactly `world` ranks, in rank order.
         * Returns 0. Needs rank and world. Default NULL. */
        int (*exchange)(void *arg, const void *mine, void *all, size_t bytes);
        void *exchange_arg;
        /* + nccl: 1 gathers with the GPU's copy engines, within a host; needs NCCL 2.30.7. Default ZERO_AUTO:
         * off. */
        int32_t copy_engine;
    } launch;

    /* Checkpoints. */
    struct {
        /* + 1: zero_save copies, and writes the copy while training goes on. Takes memory. Default 0. */
        int32_t save_async;
        /* + Checkpoints that zero_save keeps in a folder, milestones not counted. Default 0: all. */
        int32_t save_keep;
    } checkpoint;

    /* Finding faults. */
    struct {
        /* + 1: check mode, which is slow and finds mistakes of the model (check_mode.md). Default 0. */
        int32_t check;
        /* + 1: record spans for zero_trace_write. Default 0. */
        int32_t trace;
        /* Called with one line, without its newline, from any thread. Default NULL: warnings go to stderr. */
        void (*log)(void *arg, const char *line);
        void *log_arg;
    } debug;

    /* enum zero_init. Default ZERO_INIT_MODEL. */
    int32_t init_from;
    /* ZERO_INIT_CALL: writes elements [first, first + n) of tensors[tensor] (with tp_cut, of the whole
     * tensor), row-major, in its dtype, to host memory at dst. zero_wrap calls it for this rank's part, and
     * fails if it returns non-zero or skips an element. It must not call zero_*. */
    int (*init)(void *arg, int32_t tensor, int64_t first, int64_t n, void *dst);
    void *init_arg;
};

/* One tensor of a file of weights. */
struct zero_weight {
    /* Name in the file. */
    const char *name;
    /* Index in the table of zero_wrap. */
    int32_t tensor;
    /* Part of the tensor. 0: all of it; ZERO_SLICE(i): index i of the first dimension, such as a layer. */
    int32_t slice;
    /* 1: the two dimensions are in the other order in the file. */
    int32_t transposed;
};

/* A value of zero_weight.slice, for i from 0. */
#define ZERO_SLICE(i) (0x40000000 + (i))

/* Values of ZERO_OPTIM_INIT; every other field is 0. X(field, value) */
#define ZERO_OPTIM_DEFAULTS(X)                                                                               \
    X(optimizer, ZERO_ADAMW)                                                                                 \
    X(lr_scale, 1)                                                                                           \
    X(beta1, ZERO_AUTO)                                                                                      \
    X(beta2, ZERO_AUTO)                                                                                      \
    X(eps, ZERO_AUTO)

#ifdef __cplusplus
static inline zero_optim zero_optim_started(void)
{
    zero_optim o = zero_optim();
#define ZERO_OPTIM_ASSIGN(field, value) o.field = value;
    ZERO_OPTIM_DEFAULTS(ZERO_OPTIM_ASSIGN)
#undef ZERO_OPTIM_ASSIGN
    return o;
}
#define ZERO_OPTIM_INIT zero_optim_started()
#else
#define ZERO_OPTIM_FIELD(field, value) .field = value,
#define ZERO_OPTIM_INIT                                                                                      \
    {                                                                                                        \
        ZERO_OPTIM_DEFAULTS(ZERO_OPTIM_FIELD)                                                                \
    }
#endif

/* Values of ZERO_CONFIG_INIT; every other field is 0. X(field, value) */
#define ZERO_CONFIG_DEFAULTS(X)                                                                              \
    X(size, sizeof(struct zero_config))                                                                      \
    X(version, ZERO_ABI_VERSION)                                                                             \
    X(device, ZERO_DEVICE_HOST)                                                                              \
    X(launch.timeout_ms, 30000)                                                                              \
    X(optim, ZERO_OPTIM_INIT)                                                                                \
    X(grad_scale, 1)                                                                                         \
    X(grad_accum_steps, 1)                                                                                   \
    X(memory.prefetch, 2)                                                                                    \
    X(deterministic, ZERO_AUTO)                                                                              \
    X(memory.param_budget_bytes, ZERO_AUTO)                                                                  \
    X(mesh.pp, 1)                                                                                            \
    X(mesh.dp_replicate, 1)                                                                                  \
    X(mesh.cp, 1)                                                                                            \
    X(mesh.tp, 1)                                                                                            \
    X(launch.copy_engine, ZERO_AUTO)                                                                         \
    X(launch.start_timeout_ms, ZERO_AUTO)                                                                    \
    X(pipeline.stages_per_rank, 1)

#ifdef __cplusplus
static inline zero_config zero_config_started(void)
{
    zero_config c = zero_config();
#define ZERO_CONFIG_ASSIGN(field, value) c.field = value;
    ZERO_CONFIG_DEFAULTS(ZERO_CONFIG_ASSIGN)
#undef ZERO_CONFIG_ASSIGN
    return c;
}
#define ZERO_CONFIG_INIT zero_config_started()
#else
#define ZERO_CONFIG_FIELD(field, value) .field = value,
#define ZERO_CONFIG_INIT                                                                                     \
    {                                                                                                        \
        ZERO_CONFIG_DEFAULTS(ZERO_CONFIG_FIELD)                                                              \
    }
#endif

#ifdef __cplusplus
}
#endif

#endif
