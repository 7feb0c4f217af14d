/* SPDX-License-Identifier: Apache-2.0 */
/* zero_config.h: the structs that zero.h's calls are given: tensors, calls, the configuration, weights of a
 * file. Included by zero.h, which says what the words mean. */
#ifndef ZERO_ZERO_CONFIG_H
#define ZERO_ZERO_CONFIG_H

#include "zero_info.h"

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum zero_dtype {
    ZERO_F32 = 1,
    ZERO_BF16 = 2,
    ZERO_F16 = 3, /* for zero_plan alone: zero_wrap returns ZERO_ERR_NOTSUP */
    ZERO_I32 = 4, /* this and the next: of a ZERO_BUFFER only, as counters are */
    ZERO_I64 = 5
};

/* What a bracket is of: with the unit's parameters, and in backward its gradient. A backward may be in two
 * parts, as some pipeline schedules have it. */
enum zero_phase {
    ZERO_FORWARD = 1,
    ZERO_BACKWARD = 2,
    /* gradients of the unit's inputs, which come first: with its parameters */
    ZERO_BACKWARD_INPUT = 3,
    /* those of its weights: with its gradient alone; a forward bracket inside has parameters */
    ZERO_BACKWARD_WEIGHT = 4
};

/* Optimizers. X(name, value, key in configurations and checkpoints, what it is: its source, its defaults of
 * beta1, beta2 and eps where it uses them, and the fp32 states that it keeps per weight). Where no decay is
 * named, it is added to the gradient. */
#define ZERO_OPTIMIZER_MAP(X)                                                                                \
    X(ADAMW, 1, adamw, "arXiv:1711.05101, decoupled decay; 0.9, 0.999, 1e-8; 2 states")                      \
    X(ADAM, 2, adam, "arXiv:1412.6980; 0.9, 0.999, 1e-8; 2 states")                                          \
    X(SGD, 3, sgd, "PyTorch's; beta1 is the momentum, 0; 1 state, none without momentum")                    \
    X(RMSPROP, 4, rmsprop, "Tieleman and Hinton, 2012, PyTorch's form; beta2 0.99, 1e-8; 1 state")           \
    X(LION, 5, lion, "arXiv:2302.06675, decoupled decay; 0.9, 0.99; 1 state")                                \
    X(NESTEROV, 6, nesterov, "PyTorch's SGD(nesterov=True); beta1 is the momentum, 0.9; 1 state, none with 0")

enum zero_optimizer {
#define ZERO_OPTIMIZER_ENUM(name, value, key, text) ZERO_##name = value,
    ZERO_OPTIMIZER_MAP(ZERO_OPTIMIZER_ENUM)
#undef ZERO_OPTIMIZER_ENUM
};

/* What moves bytes between ranks. X(name, value, key in configurations, for which ranks). backend auto is the
 * first of them that works on cfg.device in a world of that size. */
#define ZERO_BACKEND_MAP(X)                                                                                  \
    X(SELF, 1, self, "world 1; host, cuda")                                                                  \
    X(SHM, 2, shm, "one host, through shared memory; host")                                                  \
    X(NCCL, 3, nccl, "a GPU each; cuda")                                                                     \
    X(MPI, 4, mpi, "any hosts, through Open MPI or MPICH; host")

enum zero_backend {
    ZERO_BACKEND_AUTO = 0,
#define ZERO_BACKEND_ENUM(name, value, key, text) ZERO_BACKEND_##name = value,
    ZERO_BACKEND_MAP(ZERO_BACKEND_ENUM)
#undef ZERO_BACKEND_ENUM
};

/* Where parameters, gradients and optimizer state are, and where the model computes. */
enum zero_device { ZERO_DEVICE_HOST = 1, ZERO_DEVICE_CUDA = 2 };

/* Where the parameters' values come from at zero_wrap. All but the first are for models that a rank's memory
 * does not hold: *param may be NULL there, and nothing is allocated but the plan's memory. Buffers have
 * memory and rank 0's values with all of them. */
enum zero_init {
    /* *param: every rank has values, and rank 0's count */
    ZERO_INIT_MODEL = 0,
    /* *param of rank 0; NULL or not on others, which are not read */
    ZERO_INIT_RANK0 = 1,
    /* zero_load, or zero_import and zero_write of every element: until then zero_begin, zero_step and
     * whatever else wants values is ZERO_ERR_ORDER, and *param is NULL everywhere. What *param points at is
     * not read. With pp above 1 calls of all ranks wait for it on every stage */
    ZERO_INIT_LATER = 2,
    /* cfg.init; what *param points at is not read */
    ZERO_INIT_CALL = 3
};

/* Flags of a tensor. */
enum {
    /* shape[0] layers in one piece of memory, which the model addresses as base + l * stride; layer l belongs
     * to unit + l */
    ZERO_STACKED = 1 << 0,
    /* no weight decay (biases, norms) */
    ZERO_NO_DECAY = 1 << 1,
    /* backward stores all of this gradient, adding nothing: it need not be zeroed */
    ZERO_GRAD_OVERWRITE = 1 << 2,
    /* keep its unit in memory of its own, which takes no slot: the parameters stay gathered for the whole
     * step at stage 3, and at stages 2 and 3 the whole gradient has a place. Any number of units with this
     * flag may be open at once. Default: the unit takes slots in turn with others */
    ZERO_RESIDENT = 1 << 3,
    /* with ZERO_STACKED: the model reads *param and *grad anew after each zero_begin and keeps them for that
     * layer, so several layers may be open at once */
    ZERO_POINTER_PER_BEGIN = 1 << 4,
    /* not trained, but saved, and to agree over ranks: running statistics, counters. grad NULL, no other
     * flag; see zero_sync_buffers */
    ZERO_BUFFER = 1 << 5,
    /* with pp above 1: the first and the last pipeline stage have this tensor, under one name
     * (an embedding that is the head's matrix). The first owns it: its values and optimizer count, and its
     * backward finds the last one's gradient of the micro-batch in *grad and adds to it, in one bracket;
     * with deterministic off, in the step's last micro-batch the sum of all. The last has no state of it,
     * gets the values with each step, and its *grad is set in backward actions alone. On both its unit is
     * resident: give it one of its own. With pp 1 the flag means ZERO_RESIDENT; with pp 1 and several stages
     * on the rank it is refused */
    ZERO_TIED = 1 << 6,
    /* With tp above 1: every rank along tp has all of this tensor (tp_cut 0), but its gradient is of the
     * rank's own rows of the sequence, as for norms and for biases behind a reduce-scatter. Contributions
     * are summed over tp in fp32, in a fixed order, and rounded once, so zero_end waits for the other ranks
     * of tp. With ZERO_TIED, set it on both pipeline stages or on neither. */
    ZERO_TP_PARTIAL = 1 << 7
};

/* For zero_tensor.tp_cut: along which dimension. One more, so that a table that leaves the field out says
 * that the tensor is whole. */
#define ZERO_TP_CUT(dim) ((dim) + 1)

/* One tensor of the model. Copied by zero_wrap, but param and grad stay the model's: the library re-points
 * *param and *grad whenever the tensor is moved. The model does not assign them between zero_wrap and
 * zero_unwrap: zero_begin and zero_end (of its unit), zero_micro and zero_step return ZERO_ERR_ORDER when
 * they find another value, NULL included, and change nothing; the message has the value to put back.
 *
 * A buffer (ZERO_BUFFER) is the exception: its memory, of the host or of cfg.device, and its pointer stay the
 * model's. It is valid at any time, never NULL, in no unit (unit is not looked at), of any size, and may be
 * ZERO_I32 or ZERO_I64; the model may move it to other memory of that size between two calls. */
struct zero_tensor {
    /* unique; used in errors, traces and checkpoints. With pp above 1 in the whole model: in
     * one stage alone, but for ZERO_TIED, and for ZERO_STACKED where stages have layers of one tensor each:
     * all of it alike but their number, and in the order of the stages. zero_wrap: ZERO_ERR_MISMATCH */
    const char *name;
    /* addresses of the model's OWN pointers, which must stay where they are until zero_unwrap; grad NULL:
     * frozen. *grad may be NULL, and its content is not used */
    void **param, **grad;
    /* row-major, ended by 0 (or by all 8) */
    int64_t shape[8];
    /* of what *param and *grad point at */
    enum zero_dtype dtype;
    /* gathered together with it; units are 0..n-1 without gaps. ZERO_STACKED: of the first layer */
    int32_t unit;
    /* ZERO_STACKED and the others above, or-ed; 0: none */
    uint32_t flags;
    /* Parameter group, which says what updates the tensor (struct zero_optim). 0: cfg.optim; g above 0:
     * cfg.optim_groups[g - 1]. Of a buffer 0. */
    int32_t group;
    /* Elements that stay together on one rank, counted from the first of the tensor, or of a layer of a
     * stacked one; the last ones may be fewer. 0: 1. At most the tensor's elements, or a layer's. For an
     * optimizer of optim.update, or a quantiser, that works on blocks, on rows of a matrix or on all of it:
     * every range that it gets is of whole granules. Ranks may then own more than others, or nothing; all
     * reserve what the largest needs. Element by element the results are those without. */
    int64_t granule;
    /* The ranks of tp have different parts of it, of one shape, cut along dimension d of shape:
     * ZERO_TP_CUT(d). 0: all of them have the same elements, and come to the same gradient of them, which
     * counts once in the norm. Checkpoints have the whole tensor by it */
    int32_t tp_cut;
    /* of a fused tensor (q, k and v): blocks of that dimension, one after another in the whole and in each
     * part, each of them cut; 0: 1 */
    int32_t tp_blocks;
    /* along dimension 0 of a tensor of one block: of the whole, where parts are padded to one shape (token
     * ids); the last parts are then the shorter ones. 0: as much as all parts have */
    int64_t tp_size;
    /* with stages_per_rank above 1: of which of this rank's stages it is, from 0; all tensors of a unit are
     * of one. Tensors of two stages may have one name where ZERO_STACKED, as those of two ranks may */
    int32_t pp_stage;
    /* Backward brackets that the unit has in a micro-batch. 0 to 1000; 0 means 1. A micro-batch may have
     * fewer. One more than uses * grad_accum_steps in a step is ZERO_ERR_ORDER. One tensor of a unit says it,
     * or several say the same number. Where cfg.memory.order is given, its own brackets count, and uses is 0
     * or agrees with it. */
    int32_t uses;
};

/* One call of the model's step, for cfg.memory.order. */
struct zero_call {
    int32_t unit;
    /* enum zero_phase */
    uint8_t phase;
    /* 0: zero_begin, 1: zero_end */
    uint8_t is_end;
};

typedef struct CUstream_st *zero_stream;

/* A range of elements for optim.update. All pointers are device memory of this rank; arrays hold n fp32
 * elements. A range lies within one layer of a stacked tensor, begins at a multiple of 32 elements of it, and
 * has a multiple of 32 elements unless it ends with the layer, so blocks of 32 are never cut, and neither are
 * granules (struct zero_tensor). Each element is in one range of a step on the rank that updates it (at stage
 * 0: on every rank), in any order of ranges. States begin at multiples of 256 bytes, with granules of 128;
 * master and grad too, but for stacked tensors, whose layers follow each other without a gap. */
struct zero_update {
    /* the tensor's name */
    const char *tensor;
    /* in the array given to zero_wrap */
    int32_t tensor_index;
    /* element of the tensor, in row-major order, that index 0 here is */
    int64_t first;
    /* elements */
    int64_t n;
    /* weights: read and write; rounded to the model's dtype by the library afterwards */
    float *master;
    /* reduced over ranks and micro-batches, scaled and clipped */
    const float *grad;
    /* n_states of the group, zero at first; the others are NULL */
    float *state[4];
    /* as given to zero_step, times the group's lr_scale */
    float lr;
    /* Steps that have updated the range's unit, this one included. At least 1. */
    int64_t t;
    /* NULL on the host: compute at once on the calling thread; on a GPU: put it there */
    zero_stream stream;
};

/* A parameter group: what updates its tensors, and with which numbers.
 *
 * Start from ZERO_OPTIM_INIT, which writes every default. From then on 0 means 0. cfg.optim is group 0 and
 * cfg.optim_groups are the others; zero_tensor.group names a tensor's group. Keys and environment variables
 * set group 0. zero_tune changes the numbers between steps. */
struct zero_optim {
    /* + enum zero_optimizer. Default ZERO_ADAMW. With update only the default is allowed, and not used. */
    int32_t optimizer;
    /* + Factor of zero_step's lr, 0 and more. With 0 the weights stay, and states go on. Default 1. */
    float lr_scale;
    /* + 0 and more, below 1. Default ZERO_AUTO: the optimizer's (ZERO_OPTIMIZER_MAP). */
    float beta1, beta2;
    /* + 0 and more. With 0 a weight whose gradient was always 0 becomes NaN; the log warns. Default
     * ZERO_AUTO: the optimizer's. */
    float eps;
    /* + 0 and more. Each step subtracts lr * weight_decay of the weight (decoupled), or adds weight_decay of
     * it to the gradient, as the optimizer defines. Not for ZERO_NO_DECAY. Default 0. */
    float weight_decay;
    /* fp32 arrays like the weights that update keeps, 0 to 4. Default 0. */
    int32_t n_states;
    /* The program's own optimizer, element by element. The library calls it on one of its threads, or in a
     * world of 1 on the caller of zero_step, one call at a time. It must not call zero_*, and gets lr_scale
     * alone of the numbers above. If it returns non-zero, the context fails with ZERO_ERR_FAILED, and the
     * message has the tensor and the value. Default NULL. */
    int (*update)(void *arg, const struct zero_update *u);
    void *update_arg;
};

/* "All groups", for zero_tune. */
#define ZERO_ALL (-1)

/* cfg.pipeline.schedule: in which order the stages of a pipeline take the micro-batches of a step. Sums have
 * the same bits by each. 1f1b and gpipe wait as long. */
enum zero_schedule {
    /* as soon as there is a backward, it goes first: as many micro-batches' activations are kept as there are
     * stages behind, and one */
    ZERO_SCHEDULE_1F1B = 0,
    /* all forwards, then all backwards: every micro-batch's activations are kept */
    ZERO_SCHEDULE_GPIPE = 1,
    /* as 1f1b, for stages_per_rank of 2 and more: stages wait for each other so many times less, and each
     * micro-batch's activations go so many times as often from rank to rank. grad_accum_steps is a multiple
     * of pp, or as many times another number of pp and more, or less than pp */
    ZERO_SCHEDULE_INTERLEAVED = 2,
    /* as 1f1b, with backwards apart: actions are ZERO_BACKWARD_INPUT and, later, ZERO_BACKWARD_WEIGHT of a
     * micro-batch, which fill most of the time in which 1f1b waits (ZB-H1, arXiv:2401.10241). Each rank keeps
     * as many micro-batches' activations as there are stages */
    ZERO_SCHEDULE_ZERO_BUBBLE = 3
};

/* cfg.hybrid: what stage 3 shards across replicas (cfg.mesh.dp_replicate above 1). Gathers stay in a replica,
 * whose ranks have a fast network among them (a host). Only gradients are summed across replicas, and
 * parameters of HFSDP gathered. */
enum zero_hybrid {
    /* nothing: parameters, gradients and optimizer states are sharded in each replica, and all replicas hold
     * the same. It is stage 3 in a replica and stage 0 among replicas */
    ZERO_HSDP = 0,
    /* the optimizer's states: replicas gather updated parameters from each other. It is stage 3 in a replica
     * and stage 1 among replicas */
    ZERO_HFSDP = 1
};

/* cfg.mesh: how many ranks lie along each axis. Axes are outermost first: the ranks along tp are neighbours.
 * A rank is its number along tp, plus tp times its number along cp, and so on outwards. The product is the
 * world. */
struct zero_mesh {
    /* + ranks that have the stages of a pipeline (zero_next); default 1 */
    int32_t pp;
    /* + replicas of what dp_shard shards. Above 1 at stage 3: HSDP, or with cfg.hybrid HFSDP. At stages 0 to
     * 2 all data-parallel ranks are one group, which a warning says. ZERO_AUTO ("auto"): one replica per
     * host, whose ranks are consecutive and as many as those of any other host; then dp_shard is 0. Ranks are
     * on one host where they can map each other's memory. Default 1 */
    int32_t dp_replicate;
    /* + ranks that stages 1 to 3 shard over; default 0: what the other axes leave of the world */
    int32_t dp_shard;
    /* + 1, the default: the library has no context parallelism yet */
    int32_t cp;
    /* + ranks that the model's layers are cut over (tensor parallelism). Each wraps its own part, and all of
     * them compute on the same data; default 1 */
    int32_t tp;
};

/* "Choose for me", where a field below says by what. */
#define ZERO_AUTO (-1)

/* The version of all public structs and enums. Each change of their layout raises it. */
#define ZERO_ABI_VERSION 0x5a450005u

/* How a job is sharded and run. Start from ZERO_CONFIG_INIT (or zero_config_init), which writes every
 * default. From then on a field means what it holds, 0 too.
 *
 * A field's own name, without its group, is its key for zero_config_set. For the fields marked + the
 * environment variable ZERO_<KEY IN CAPITALS> overrides the program. Values must be equal on all ranks
 * unless a comment says otherwise. */
struct zero_config {
    /* bytes of this struct */
    size_t size;
    /* ZERO_ABI_VERSION */
    uint32_t version;

    /* + What is sharded. 0: nothing (data parallel), 1: optimizer state, 2: gradients too, 3: parameters too.
     * Default 0. */
    int32_t stage;
    /* + enum zero_device, host or cuda: where the model computes. With cuda, the calling thread's current
     * device, one for each rank. Default host. */
    int32_t device;
    /* The model's compute stream on a GPU; NULL on the host. NULL on a GPU is CUDA's legacy default stream,
     * with a warning; cudaStreamLegacy is the same without one. */
    zero_stream stream;

    /* + Micro-batches per zero_step, 1 and more. Default 1. A launcher that starts a job again with fewer
     * ranks may raise it by ZERO_GRAD_ACCUM_STEPS, so a program that is to survive that reads it from
     * zero_stats. */
    int32_t grad_accum_steps;
    /* + Largest global L2 norm of the gradients; larger ones are scaled down. Default 0: no clipping. */
    float clip;
    /* + Factor that gradients are multiplied by before anything else; not 0. Default 1. */
    double grad_scale;
    /* + 1: sum gradients over ranks and micro-batches; 0: average them. Default 0. */
    int32_t grad_sum;
    /* + 1: the same bits at every stage, prefetch and budget, and in every power-of-two world. Steps of 3 and
     * more micro-batches then need memory for more gradient sums. With nccl, at most 64 ranks in a group.
     * Default ZERO_AUTO: on, but off with nccl, with grad_in_place, and for a hybrid over several hosts with
     * grad_accum_steps above 1. */
    int32_t deterministic;
    /* + enum zero_hybrid, used with dp_replicate above 1 at stage 3: hsdp, hfsdp. Default hsdp. */
    int32_t hybrid;
    /* How the ranks are laid out. With tp or pp above 1, ranks that have the same part of the model are a
     * world of their own: what other comments say about all ranks and about rank 0 is said of these. */
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
        /* + Bytes for gathered parameters at stage 3, beyond the shards. Default ZERO_AUTO: what prefetch
         * needs. */
        int64_t param_budget_bytes;
        /* + Dtype of gradients between ranks: f32, bf16, or 0 for the tensor's own. Default 0. */
        int32_t wire_dtype;
        /* + 1: backward adds all micro-batches of a step to the same gradient, which is reduced once per step
         * (PyTorch's no_sync). At stages 2 and 3 gradients then stay whole until the last micro-batch.
         * Excludes deterministic. Default 0: every micro-batch is reduced, and added up in fp32. */
        int32_t grad_in_place;
        /* The n_order calls of one micro-batch; copied. They size slots, make the first step's gathers right,
         * and declare how many backward brackets each unit has (zero_tensor.uses): as many as are here, and
         * one where there are none. Otherwise the calls may differ. With several pipeline stages on a
         * rank: all forward calls, stage by stage, then all backward calls. Default NULL: each unit forward,
         * then each backward in reverse, as often as uses says. */
        int32_t n_order;
        const struct zero_call *order;
    } memory;

    /* Pipelines: a mesh whose pp, or stages_per_rank, is above 1. */
    struct {
        /* + enum zero_schedule: 1f1b, gpipe, interleaved, zero-bubble. Default 1f1b. */
        int32_t schedule;
        /* Path of a schedule in the CSV form of torch.distributed.pipelining: one line for each rank, with or
         * without messages. Replaces `schedule` in training. zero_wrap and zero_plan read it, and refuse one
         * that deadlocks, leaves an action out or repeats one. Default NULL. */
        const char *schedule_file;
        /* Pipeline stages on each rank, with interleaved, gpipe or a schedule_file. Of pp ranks, rank r has
         * stages r, pp + r, 2 pp + r ..., which its table numbers from 0. Default 1. */
        int32_t stages_per_rank;
        /* Bytes that a stage passes to the next for one micro-batch, at most. Default 0: none. */
        int64_t activation_bytes;
    } pipeline;

    /* Which rank this is, how ranks meet, and how they communicate. */
    struct {
        /* This rank's number and the number of ranks. Default 0 and 0: found in the variables of zero-run,
         * torchrun, Open MPI, MPICH or Slurm; without these, rank 0 of 1. May differ: rank. */
        int32_t rank, world;
        /* Where ranks meet: "tcp://host:port" of rank 0, or "file:///path" on a disk that all hosts share.
         * Read by zero_wrap and not kept. Default NULL: the environment, else over the launcher's MPI. */
        const char *rendezvous;
        /* Network interface that ranks meet on: its name ("eth0") or an address of it. ZERO_INTERFACE
         * overrides it. Does not affect NCCL's own traffic. May differ. Default NULL: the system's routes
         * decide. */
        const char *interface;
        /* + How long an operation waits for other ranks, in milliseconds, 1 and more. Default 30000. */
        int64_t timeout_ms;
        /* + How long zero_wrap waits for the other ranks, in milliseconds, 1 and more. Default ZERO_AUTO:
         * 600000, or timeout_ms if that is longer. */
        int64_t start_timeout_ms;
        /* Name of this context, at most 63 characters. Contexts that are open at the same time need different
         * names, because only ranks of one name meet. Default NULL: "". */
        const char *name;
        /* + enum zero_backend: what moves the bytes. Default ZERO_BACKEND_AUTO: self for world 1, else shm on
         * the host and nccl with cuda. */
        int32_t backend;
        /* Points to the program's own MPI_Comm, from which the library makes its own. It says who the ranks
         * are. MPI must have been started with MPI_THREAD_MULTIPLE. Until zero_wrap has returned on all
         * ranks, receive nothing there with MPI_ANY_TAG. Default NULL: MPI_COMM_WORLD. */
        void *mpi_comm;
        /* The program's own ncclComm_t, which is split. It says who the ranks are. Not used after zero_wrap,
         * nor destroyed. The program's own NCCL traffic must not overlap the library's (see gpus.md). Default
         * NULL. */
        void *nccl_comm;
        /* + nccl: 1 gathers with the GPU's copy engines and symmetric windows, within a host; needs NCCL
         * 2.30.7. Default ZERO_AUTO: off. */
        int32_t copy_engine;
    } launch;

    /* Checkpoints. */
    struct {
        /* + 1: zero_save returns when a snapshot is ordered, and writes it while training goes on. Reserves
         * memory for what this rank saves. Default 0. */
        int32_t save_async;
        /* + Checkpoints that zero_save keeps in a folder. Default 0: all. */
        int32_t save_keep;
    } checkpoint;

    /* Finding faults. */
    struct {
        /* + 1: check mode (check_mode.md): detects races, and uses of a unit outside its bracket. Slow, and
         * takes more memory. Default 0. */
        int32_t check;
        /* + 1: keep a timeline for zero_trace_write, of the latest 16384 spans of each track. Default 0. */
        int32_t trace;
        /* Takes one line of text without a newline, from any thread. Default NULL: warnings go to stderr,
         * each once. ZERO_LOG=stderr or ZERO_LOG=FILE takes every line too; ZERO_LOG=off silences stderr. */
        void (*log)(void *arg, const char *line);
        void *log_arg;
    } debug;

    /* enum zero_init: where the first values of parameters come from. Default ZERO_INIT_MODEL. */
    int32_t init_from;
    /* ZERO_INIT_CALL: writes elements [first, first + n) of tensors[tensor], row-major over the whole tensor
     * and in its dtype, to dst in host memory. zero_wrap calls it on its own thread, for this rank's part, in
     * pieces of at most 256 KiB. It must not call zero_*. If it returns non-zero or skips an element,
     * zero_wrap fails and names the tensor. */
    int (*init)(void *arg, int32_t tensor, int64_t first, int64_t n, void *dst);
    void *init_arg;
};

/* One tensor of a file of weights. */
struct zero_weight {
    const char *name;
    /* in the array given to zero_wrap */
    int32_t tensor;
    /* 0: all of it; ZERO_SLICE(i): the i-th of its first dimension, as a tensor of the others (a layer of a
     * stacked one); any other number is refused */
    int32_t slice;
    /* 1: two dimensions, which the file has the other way round */
    int32_t transposed;
};

/* What zero_weight.slice holds for slice i, from 0 on. Not i itself, so that an entry that leaves the field
 * out has the whole tensor, not the first slice in silence. */
#define ZERO_SLICE(i) (0x40000000 + (i))

/* What ZERO_OPTIM_INIT writes; every other field is 0. X(field, value) */
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

/* What ZERO_CONFIG_INIT writes; every other field is 0. X(field, value) */
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
