/* zero.h: libzero, a ZeRO/FSDP runtime that a C model drops in.
 *
 *     static void must(int err)
 *     {
 *         if (err) {
 *             fprintf(stderr, "%s\n", zero_last_error());
 *             exit(1);
 *         }
 *     }
 *
 *     static void train(struct model *m)
 *     {
 *         struct zero_tensor tensors[] = {
 *             {.name = "w1", .param = (void **)&m->w1, .grad = (void **)&m->dw1, .shape = {N},
 *              .dtype = ZERO_F32, .unit = 0},
 *             {.name = "w2", .param = (void **)&m->w2, .grad = (void **)&m->dw2, .shape = {N},
 *              .dtype = ZERO_F32, .unit = 1}};
 *         struct zero_config cfg = ZERO_CONFIG_INIT;
 *         zero_ctx *z;
 *
 *         cfg.stage = 3;
 *         must(zero_wrap(&z, tensors, 2, &cfg));
 *         for (int step = 1; step <= 200; step++) {
 *             for (int unit = 0; unit < 2; unit++) {
 *                 must(zero_begin(z, unit, ZERO_FORWARD));
 *                 forward(m, unit);
 *                 must(zero_end(z, unit, ZERO_FORWARD));
 *             }
 *             for (int unit = 1; unit >= 0; unit--) {
 *                 must(zero_begin(z, unit, ZERO_BACKWARD));
 *                 backward(m, unit);
 *                 must(zero_end(z, unit, ZERO_BACKWARD));
 *             }
 *             must(zero_step(z, 3e-2f, NULL));
 *             must(zero_mean(z, &m->loss, 1));
 *             if (m->rank == 0 && step % 20 == 0)
 *                 printf("step %d loss %.6f\n", step, m->loss);
 *         }
 *         must(zero_unwrap(&z));
 *     }
 *
 * Words. A *rank* is one process of the job, *world* their number. A *unit* is what is gathered together,
 * usually a layer. At stage 1 optimizer state is sharded over the ranks, at stage 2 gradients too, at stage 3
 * parameters too (ZeRO, arXiv:1910.02054; FSDP, arXiv:2304.11277). A *shard* is the part that one rank keeps;
 * a *slot* is a place that units take in turn, while they are gathered or their gradients are written. A
 * *bracket* is a zero_begin/zero_end pair around the model's use of a unit. A *micro-batch* is one forward
 * and backward, and cfg.grad_accum_steps of them, with zero_step behind, are a *step*. A *buffer* is a tensor
 * that is not trained (ZERO_BUFFER). The *host* is the machine, and as a device its CPU and memory.
 *
 * Errors. Every call that can fail returns 0 or a negative enum zero_err, and zero_last_error() then says
 * what, where, and which rank, unit or tensor. (zero_last_step alone may also return ZERO_PENDING, which is
 * above 0 and no error.) A failed call leaves nothing to clean up and changes nothing, except that a failure
 * among ranks (a lost peer, a timeout, ranks that differ) or of a rank's own work (CUDA, cfg.update, a fault
 * that cfg.check finds) ends the context, on every rank: each is told, with the rank that found it, every
 * later call returns the same cause, and only zero_unwrap and zero_get_stats are left. Where a call's comment
 * says "nothing changed" of ranks that differ, they were compared first, and the context goes on.
 *
 * "Collective" means: every rank must make the call, in the same order relative to its other collective
 * calls. zero_begin, zero_end and zero_micro are collective in this sense. They wait for other ranks no
 * longer than for what the model is to read or write next: parameters that are being gathered or updated, a
 * place whose gradients are being reduced.
 *
 * Thread-safety: one context is used by one thread at a time (the model's thread). Different contexts, and
 * the functions without a context, are independent. The library has no global state (but while cfg.check is
 * on for the handler of a signal and what the process calls write(), fread() and their like), never exits,
 * and prints only warnings that no cfg.log receives (see there).
 */
#ifndef ZERO_ZERO_H
#define ZERO_ZERO_H

#include "export.h"

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define ZERO_VERSION_MAJOR 0
#define ZERO_VERSION_MINOR 1
#define ZERO_VERSION_PATCH 0

/* X(name, value, text) */
#define ZERO_ERR_MAP(X)                                                                                      \
    X(ARG, -1, "invalid argument")                                                                           \
    X(NOMEM, -2, "not enough memory")                                                                        \
    X(NOTSUP, -3, "not supported here")                                                                      \
    X(ORDER, -4, "calls out of order")                                                                       \
    X(MISMATCH, -5, "ranks disagree")                                                                        \
    X(PEER, -6, "a rank was lost")                                                                           \
    X(TIMEOUT, -7, "timed out")                                                                              \
    X(IO, -8, "input or output failed")                                                                      \
    X(SYSTEM, -9, "the operating system refused")                                                            \
    X(BUDGET, -10, "memory budget too small")                                                                \
    X(FAILED, -11, "the context failed earlier")

enum zero_err {
#define ZERO_ERR_ENUM(name, value, text) ZERO_ERR_##name = value,
    ZERO_ERR_MAP(ZERO_ERR_ENUM)
#undef ZERO_ERR_ENUM
};

enum zero_dtype {
    ZERO_F32 = 1,
    ZERO_BF16 = 2,
    ZERO_F16 = 3, /* for zero_plan alone: zero_wrap returns ZERO_ERR_NOTSUP */
    ZERO_I32 = 4, /* this and the next: of a ZERO_BUFFER only, as counters are */
    ZERO_I64 = 5
};

enum zero_phase { ZERO_FORWARD = 1, ZERO_BACKWARD = 2 };

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

enum zero_backend {
    ZERO_BACKEND_AUTO = 0,
    ZERO_BACKEND_SELF = 1,
    ZERO_BACKEND_SHM = 2,
    ZERO_BACKEND_NCCL = 3
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
     * not read */
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
    /* keep its unit gathered for the whole step at stage 3 */
    ZERO_RESIDENT = 1 << 3,
    /* with ZERO_STACKED: the model reads *param and *grad anew after each zero_begin and keeps them for that
     * layer, so several layers may be open at once */
    ZERO_POINTER_PER_BEGIN = 1 << 4,
    /* not trained, but saved, and to agree over ranks: running statistics, counters. grad NULL, no other
     * flag; see zero_sync_buffers */
    ZERO_BUFFER = 1 << 5
};

/* One tensor of the model. Copied by zero_wrap, but param and grad stay the model's: the library re-points
 * *param and *grad whenever the tensor's place changes. The model does not assign them between zero_wrap and
 * zero_unwrap: zero_begin and zero_end (of its unit), zero_micro and zero_step return ZERO_ERR_ORDER when
 * they find another value, NULL included, and change nothing; the message has the value to put back.
 *
 * A buffer (ZERO_BUFFER) is the exception: its memory, of the host or of cfg.device, and its pointer stay the
 * model's. It is valid at any time, never NULL, in no unit (unit is not looked at), of any size, and may be
 * ZERO_I32 or ZERO_I64; the model may give it another place of that size between two calls. */
struct zero_tensor {
    /* unique; used in errors, traces and checkpoints */
    const char *name;
    /* the model's OWN pointers; grad NULL = frozen */
    void **param, **grad;
    /* row-major, ended by 0 (or by all 8) */
    int64_t shape[8];
    /* of *param and *grad */
    enum zero_dtype dtype;
    /* gathered together with it; units are 0..n-1 without gaps. ZERO_STACKED: of the first layer */
    int32_t unit;
    /* ZERO_STACKED and the others above, or-ed; 0: none */
    uint32_t flags;
    /* What updates it: enum zero_optimizer; 0: cfg.optimizer. cfg.beta1, beta2 and eps are those of
     * cfg.optimizer; the other kinds have their defaults. Not with cfg.update, which updates every tensor. A
     * kind's states are kept for its own tensors only. */
    int32_t optimizer;
    /* multiplies the lr of zero_step; 0: 1. A tensor that is not to move has grad NULL */
    float lr_scale;
    /* multiplies cfg.weight_decay; 0: 1. For none: ZERO_NO_DECAY */
    float decay_scale;
};

/* One call of the model's step, for cfg.order. */
struct zero_call {
    int32_t unit;
    /* enum zero_phase */
    uint8_t phase;
    /* 0: zero_begin, 1: zero_end */
    uint8_t is_end;
};

typedef struct CUstream_st *zero_stream;
typedef struct zero_ctx zero_ctx;

/* A range of elements for cfg.update. All pointers are device memory of this rank; arrays hold n fp32
 * elements. A range lies within one layer of a stacked tensor, begins at a multiple of 32 elements of it, and
 * has a multiple of 32 elements unless it ends with the layer, so blocks of 32 are never cut. Each element is
 * in one range of a step on the rank that updates it (at stage 0: on every rank), in any order of ranges.
 * States begin at multiples of 256 bytes; master and grad too, but for stacked tensors, whose layers follow
 * each other without a gap. */
struct zero_update {
    /* its name */
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
    /* cfg.n_states of them, zero at first */
    float *state[4];
    /* as given to zero_step, times the tensor's lr_scale */
    float lr;
    /* 1-based number of this step */
    int64_t t;
    /* NULL on the host: compute at once on the calling thread; on a GPU: put it there */
    zero_stream stream;
};

/* "Choose for me", where a field below says by what. */
#define ZERO_AUTO (-1)

/* Of the structs here and how calls read them. A program that was built with another one is refused. */
#define ZERO_ABI_VERSION 0x5a450001u

/* Configuration. Start from ZERO_CONFIG_INIT (or zero_config_init), which writes every default; from then on
 * what a field holds is what it means, 0 too. Names are also the keys of zero_config_set and, as ZERO_<KEY IN
 * CAPITALS>, environment variables that override the program (fields marked + only).
 *
 * The sizes are those of the structs as the program's zero.h has them, so that the library may be of a later
 * version, whose structs have more fields at their end: arrays of zero_tensor, zero_call and zero_weight are
 * walked in steps of them, and of the structs that calls fill no byte beyond them is written. A program that
 * was built with a later zero.h than the library's is refused. */
struct zero_config {
    /* of this struct */
    size_t size;
    /* ZERO_ABI_VERSION */
    uint32_t version;

    uint32_t tensor_size, call_size, weight_size;
    uint32_t step_info_size, stats_size, plan_info_size;

    /* + 0..3; default 0: plain data parallel */
    int32_t stage;
    /* + host, cuda; default host. cuda: the calling thread's current device (cudaSetDevice), of which each
     * rank needs its own; the model's pointers may be host or device memory */
    int32_t device;
    /* + auto, self, shm, nccl; auto: self for world 1, else shm, with cuda nccl */
    int32_t backend;
    /* explicit when world > 0; default 0: found in the environment, in the variables of zero-run, torchrun,
     * Open MPI, MPICH or Slurm (see zero_find_rank); else world 1 */
    int32_t rank, world;
    /* "tcp://host:port" of rank 0; default NULL: from the environment */
    const char *rendezvous;
    /* + for peers, in every operation; 1 and more; default 30000 */
    int64_t timeout_ms;

    /* + enum zero_optimizer; default ZERO_AUTO: update where that is set, else adamw */
    int32_t optimizer;
    /* + 0 and more, below 1; default ZERO_AUTO: by optimizer (see there) */
    float beta1, beta2;
    /* + default ZERO_AUTO: by optimizer. 0, with a warning: a weight whose gradient was always 0 becomes
     * NaN */
    float eps;
    /* + default 0 */
    float weight_decay;
    /* + global L2 norm above which gradients are scaled down; default 0: no clipping */
    float clip;
    /* + multiplies the gradients before everything else; not 0; default 1 */
    double grad_scale;
    /* + micro-batches per zero_step, 1 and more; default 1 */
    int32_t grad_accum_steps;
    /* + 1: sum over ranks and micro-batches instead of the mean; default 0 */
    int32_t grad_sum;
    /* + stages 0 and 1, with grad_accum_steps above 1. 1: the model zeroes its gradients once per step at
     * most and adds every micro-batch to them, so that they hold the sum and are reduced once per step.
     * Default 0: each micro-batch starts from zero, is reduced when it ends and added up by the library,
     * whatever the model does to its gradients between micro-batches. Gives up deterministic, which adds
     * micro-batches up in a fixed order */
    int32_t grad_in_place;
    /* of update, 0..4 fp32 arrays like the weights; default 0 */
    int32_t n_states;
    /* the model's own optimizer, element-wise; called on a thread of the library's (host) and must not call
     * zero_*; non-zero: the step fails */
    int (*update)(void *arg, const struct zero_update *u);
    void *update_arg;

    /* + units gathered ahead; 0: none; default 2 */
    int32_t prefetch;
    /* + 1: same bits at every stage, prefetch and budget, and at every power-of-two world for equal
     * micro-batches. 0: off. Default ZERO_AUTO: on where it costs nothing (not nccl, nor with
     * grad_in_place) */
    int32_t deterministic;
    /* + for gathered parameters at stage 3, besides the shards; default ZERO_AUTO: what prefetch needs */
    int64_t param_budget_bytes;
    /* + of gradients between ranks: f32, bf16; default 0: the tensor's own */
    int32_t wire_dtype;
    /* n_order calls of one micro-batch; default NULL: each unit forward, then each backward, reversed. A hint
     * that saves the first step's prefetch and sizes the slots, and says how often a pass uses each unit in
     * backward (see zero_step) */
    int32_t n_order;
    const struct zero_call *order;

    /* the model's compute stream on a GPU; NULL on the host. NULL on a GPU is CUDA's legacy default stream,
     * with a warning (cudaStreamLegacy: the same without): where the model's kernels run on another one,
     * nothing orders them with the library */
    zero_stream stream;
    /* a line without newline; may be called from the library's threads. NULL: warnings go to the standard
     * error, each once. ZERO_LOG=stderr or a file in the environment takes every line as well, ZERO_LOG=off
     * keeps warnings from the standard error */
    void (*log)(void *arg, const char *line);
    void *log_arg;
    /* + 1: keep a timeline for zero_trace_write, of the latest 16384 spans of each of its three tracks;
     * default 0 */
    int32_t trace;

    /* + 1: watch the run: whether anything orders every two accesses to a byte, and, at stages 2 and 3 on the
     * host, whether the model touches a unit outside its bracket, by memory that is closed to it then, or on
     * a GPU filled with NaN (see zero/README.md, "The check"). A fault on the host is told to the log at
     * once, by a thread of the library while the one at fault waits; it ends the context with a message
     * naming it. On the host zero_wrap overwrites with NaN what *param pointed at, where that is private and
     * writable memory and not a buffer's. At stages 0 and 1 all ranks must have the same. For debugging:
     * slower, and a bracket's unit is held twice, or on a GPU memory for 15 times the largest is taken;
     * default 0 */
    int32_t check;

    /* + 1: zero_save returns when a snapshot is ordered, and writes while training goes on. Reserves memory
     * for it (category snapshot): what this rank saves; default 0 */
    int32_t save_async;
    /* + checkpoints kept in a folder of zero_save; default 0: none is removed */
    int32_t save_keep;

    /* nccl: the program's own ncclComm_t, to make ours from (it is split); default NULL: found through the
     * rendezvous. It says who the ranks are: rank, world and rendezvous need not be given, and where they
     * are, or a launcher's variables are, rank and world must be its own. Every rank of it calls zero_wrap
     * with it. It may be non-blocking, is not used after zero_wrap returns, nor destroyed, and must be of the
     * libnccl.so.2 that the process has loaded: with two of them, or one that is linked statically, it is
     * refused.
     *
     * NCCL wants the operations of all communicators of a GPU in one order on all ranks, and a thread of the
     * library issues ours at times of its own. So the program's own NCCL traffic, on any communicator, may
     * deadlock with it, silently, until cfg.timeout_ms. Safe is traffic that begins after zero_mean or
     * zero_read, outside brackets (then nothing of ours is under way), and is complete on the GPU before the
     * next zero_ call. */
    void *nccl_comm;
    /* + nccl: gathers by the GPU's copy engines instead of its SMs, within a node; 1 on, 0 off; default
     * ZERO_AUTO: where NCCL has them (2.28), all ranks share a host, and that release is not known to hang
     * (2.29.7 to 2.31.1 do with 2 ranks). On, such a release is used, with a warning */
    int32_t copy_engine;
    /* enum zero_init: where the parameters' values come from; default ZERO_INIT_MODEL */
    int32_t init_from;
    /* init_from ZERO_INIT_CALL: writes elements [first, first + n) of tensors[tensor], counted row-major over
     * the whole tensor, to dst: host memory, in the tensor's dtype. Values that follow from the element's
     * number do not depend on stage and world. Called by zero_wrap on its own thread, on each rank for its
     * part (each element on one rank), in pieces of at most 256 KiB, unit by unit, in which ranks wait for
     * each other (cfg.timeout_ms); must not call zero_*. Non-zero: zero_wrap fails, and names the tensor and
     * what it returned. So does an element that is not written. */
    int (*init)(void *arg, int32_t tensor, int64_t first, int64_t n, void *dst);
    void *init_arg;
};

/* Memory per rank, by category. X(name, text)
 *   param_shards   parameters as they are kept: 1/N of a unit at stage 3, all of it where it is resident
 *   param_slots    places for gathered copies (stage 3)
 *   grad_shards    reduced gradients, fp32, 1/N; none of those that are reduced where they lie: f32, once a
 *                  step, at stage 0 or on one rank
 *   grad_slots     where backward writes: whole at stages 0 and 1 and on one rank, else a few units
 *   grad_sums      further sums of gradients, which deterministic accumulation takes
 *   grad_gathered  stage 0: one unit's reduced gradient, whole, fp32, where it is not reduced where it lies
 *   master         fp32 copies of weights that are not fp32 themselves
 *   moments        optimizer states
 *   snapshot       cfg.save_async: the copy that is written while training goes on
 *   comm           the communicators' own: NCCL's room for packed slices and for what arrives
 *   exchange       a step's agreement over ranks, values on their way, and what rounding to pages costs */
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

#define ZERO_MEM_COUNT_ONE(name, text) +1
struct zero_bytes {
#define ZERO_MEM_FIELD(name, text) int64_t name;
    ZERO_MEM_MAP(ZERO_MEM_FIELD)
#undef ZERO_MEM_FIELD
    /* 0; of categories to come */
    int64_t reserved[15 - (0 ZERO_MEM_MAP(ZERO_MEM_COUNT_ONE))];

    int64_t total;
};
#undef ZERO_MEM_COUNT_ONE

/* Of one step, per rank. */
struct zero_traffic {
    /* n_all_reduce: units all-reduced (stage 0) */
    int64_t n_all_gather, n_reduce_scatter, n_all_reduce;
    /* received by this rank from others */
    int64_t wire_bytes;
    /* 0 */
    int64_t reserved[4];
};

struct zero_plan_info {
    int32_t world, stage;
    /* elements over all tensors */
    int64_t n_params;
    /* of every rank: all are alike */
    struct zero_bytes bytes;
    /* of a steady step of grad_accum_steps micro-batches in cfg.order */
    struct zero_traffic traffic;
    /* the ZeRO paper's formula for the same model, stage and world: parameters, gradients and optimizer state
     * only */
    int64_t paper_bytes;
};

/* What a rank has done since zero_wrap. */
struct zero_stats {
    int32_t rank, world, local_rank, stage;
    /* "self", "shm", "nccl" */
    const char *backend;
    /* "host", "cuda" */
    const char *device;

    int64_t n_steps, n_skipped;
    /* allocated: counted where memory was taken; equal to planned to the byte */
    struct zero_bytes allocated, planned;
    /* total since zero_wrap */
    struct zero_traffic traffic;
    /* begins that had to wait for their unit */
    int64_t n_waits;
    /* in those: exposed communication as the model's thread saw it */
    int64_t wait_ns;
    /* times the call order changed and was learned anew */
    int64_t n_replans;
    /* how bytes travel, of a backend that has several ways ("NCCL 2.28.9, symmetric windows"); valid until
     * zero_unwrap */
    const char *path;
    /* steps given up by zero_drop; they count in nothing else */
    int64_t n_dropped;
};

struct zero_step_info {
    /* 1-based number of the step just taken; skipped ones do not count */
    int64_t t;
    /* global, of the scaled gradient, before clipping */
    double grad_norm;
    /* 1: it was above cfg.clip */
    int32_t clipped;
    /* 1: a gradient was not finite on some rank: nothing was updated, on any rank */
    int32_t skipped;
    /* reserved: 0 */
    int32_t n_carried, reserved;
    /* n_carried means over ranks of what zero_carry gave to this step */
    double carried[8];
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

/* What ZERO_CONFIG_INIT writes; every other field is 0. X(field, value) */
#define ZERO_CONFIG_DEFAULTS(X)                                                                              \
    X(size, sizeof(struct zero_config))                                                                      \
    X(version, ZERO_ABI_VERSION)                                                                             \
    X(tensor_size, sizeof(struct zero_tensor))                                                               \
    X(call_size, sizeof(struct zero_call))                                                                   \
    X(weight_size, sizeof(struct zero_weight))                                                               \
    X(step_info_size, sizeof(struct zero_step_info))                                                         \
    X(stats_size, sizeof(struct zero_stats))                                                                 \
    X(plan_info_size, sizeof(struct zero_plan_info))                                                         \
    X(device, ZERO_DEVICE_HOST)                                                                              \
    X(timeout_ms, 30000)                                                                                     \
    X(optimizer, ZERO_AUTO)                                                                                  \
    X(beta1, ZERO_AUTO)                                                                                      \
    X(beta2, ZERO_AUTO)                                                                                      \
    X(eps, ZERO_AUTO)                                                                                        \
    X(grad_scale, 1)                                                                                         \
    X(grad_accum_steps, 1)                                                                                   \
    X(prefetch, 2)                                                                                           \
    X(deterministic, ZERO_AUTO)                                                                              \
    X(param_budget_bytes, ZERO_AUTO)                                                                         \
    X(copy_engine, ZERO_AUTO)

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

/* What zero_read and zero_write move. */
enum zero_value {
    /* the weights in the tensor's dtype */
    ZERO_VALUE_PARAM = 0,
    /* the fp32 master weights (for f32 tensors the weights themselves); not of frozen tensors and buffers */
    ZERO_VALUE_MASTER = 1,
    /* + i: the i-th fp32 state of the tensor's own optimizer, i from 0; not of frozen tensors and buffers */
    ZERO_VALUE_STATE = 2,
    /* zero_read alone, between backward and zero_step: the fp32 gradient as the update will have it, reduced
     * over ranks and micro-batches, scaled and clipped. The first read of a step asks for its norm, and all
     * that zero_norm says holds then. Not of frozen tensors and buffers. */
    ZERO_VALUE_GRAD = 64
};

/* ZERO_CONFIG_INIT for callers that cannot use it, in languages without C's macros. size: of the struct as
 * the caller has it, all of which is written. The sizes of the other structs, which the library cannot know,
 * are left 0: the caller sets those of the structs that it uses, tensor_size always. ZERO_ERR_ARG when cfg is
 * NULL, or no zero.h up to this library's had a struct of that size; nothing is written then. Local; any
 * thread. */
ZERO_API int zero_config_init(struct zero_config *cfg, size_t size);

/* Applies "value" to the field named key ("stage" = "3", "dtype"-like fields by name: "bf16", ZERO_AUTO by
 * "auto"). ZERO_ERR_ARG names the nearest key when there is none of that name. Any thread. */
ZERO_API int zero_config_set(struct zero_config *cfg, const char *key, const char *value);

/* Who this process is, by what zero_wrap goes by: cfg's rank and world, cfg's nccl_comm, or the variables of
 * zero-run, torchrun, Open MPI, MPICH or Slurm; rank 0 of world 1 where there is nothing. For what is done
 * before zero_wrap: reading this rank's part of the data, cudaSetDevice(*local_rank). cfg may be NULL:
 * ZERO_CONFIG_INIT; any of rank, world and local_rank (the rank among those of this host) may be NULL.
 * Refuses what zero_wrap would refuse of cfg and the variables (ZERO_ERR_ARG), and changes nothing then.
 * Local: talks to no other rank, and does not wait but for a cfg.nccl_comm that NCCL is still making, at most
 * cfg.timeout_ms. Any thread. */
ZERO_API int zero_find_rank(const struct zero_config *cfg, int32_t *rank, int32_t *world,
                            int32_t *local_rank);

/* What zero_wrap would allocate and send, for any stage and world (cfg->world, default 1), without allocating
 * device memory and without talking to anybody. param and grad pointers are not followed; grad non-NULL still
 * means trainable. The environment's ZERO_STAGE and the like override cfg here too. */
ZERO_API int zero_plan(const struct zero_tensor *tensors, int32_t n_tensors, const struct zero_config *cfg,
                       struct zero_plan_info *out);

/* Collective, blocking. Takes over the parameters: rank 0's values are given to all ranks (or cfg.init_from
 * says where they come from; *param that is NULL without is an error), *param and *grad of every tensor are
 * re-pointed (at stages 2 and 3 they are NULL outside brackets, or with cfg.check closed memory), and what
 * they pointed at may be freed afterwards (with cfg.check it was overwritten), but for buffers, whose memory
 * stays the model's. On failure *out is NULL, no pointer was changed and nothing is left behind. Memory is
 * checked against the plan first: ZERO_ERR_NOMEM comes with the plan's table, before anything was
 * allocated. */
ZERO_API int zero_wrap(zero_ctx **out, const struct zero_tensor *tensors, int32_t n_tensors,
                       const struct zero_config *cfg);

/* Makes unit's parameters readable (and in backward its gradients writable, zeroed unless
 * ZERO_GRAD_OVERWRITE) and points the model at them until the matching zero_end. Brackets of different units
 * may nest and overlap, and a unit may be open in forward and in backward at once (recompute), but not twice
 * in one phase. At stages 2 and 3 the base of a stacked tensor fits the layer begun last, so two layers of
 * one are open at once only if it has ZERO_POINTER_PER_BEGIN; else the second begin is refused. Once one of
 * them ends, the base fits one that is still open. Each outermost backward bracket gives one gradient
 * contribution, reduced when it ends. On the host it returns when the parameters are readable; on a GPU it
 * only enqueues. Optional at stages 0 and 1, where it buys overlap: use it around every use of a unit or
 * around none. There the model may zero its gradients where it likes between the end of a micro-batch's
 * backward brackets and its next backward: nothing reads them then. From a unit's backward zero_end to that
 * end they are being reduced, and *grad is NULL. Where one rank keeps all of a gradient (stage 0, and world
 * 1), it is f32 and a step reduces it once (grad_accum_steps 1, or grad_in_place), the sum has no other place
 * than the gradient: then *grad is NULL until zero_step. A second backward bracket of such a unit in one step
 * takes memory beyond the plan, and a line tells so, unless cfg.order declares it. */
ZERO_API int zero_begin(zero_ctx *z, int32_t unit, enum zero_phase phase);
ZERO_API int zero_end(zero_ctx *z, int32_t unit, enum zero_phase phase);

/* Ends a micro-batch, for models without brackets (stages 0 and 1) that accumulate gradients: call it after
 * each backward but the last (zero_step ends that one). Gradients are reduced, and zero when it returns. No
 * effect on units that were bracketed; not needed with cfg.grad_in_place. */
ZERO_API int zero_micro(zero_ctx *z);

/* Collective. Reduces what is left, clips, updates, and starts gathering the new parameters. lr: learning
 * rate of this step. info may be NULL; if it is not, the call waits for the global norm (not for the update).
 * Refused with ZERO_ERR_ORDER, and nothing changed, while a bracket is open, when no backward bracket has
 * ended since the last step (of a model that uses them), or when the micro-batches counted are not
 * cfg.grad_accum_steps (which a model without brackets and with grad_accum_steps 1 is trusted to have run).
 * The unit with the most backward brackets counts. One or some of several may have more, as tied weights
 * have, but when all units have had twice their number or more, the step is refused, and so is the next
 * zero_begin in backward: a model that uses every unit several times in a pass says so in cfg.order.
 * What backward left zero in the first step is told to cfg.log, by tensor (on the host); when every gradient
 * of every rank is zero then, nothing is trained, and the context ends with ZERO_ERR_ORDER: by this call
 * where info is given, else by a later one. */
ZERO_API int zero_step(zero_ctx *z, float lr, struct zero_step_info *info);

/* The outcome of the last zero_step without a wait, for logging: 0 and *info, or ZERO_PENDING, which is not
 * an error, and *info as it was, while the step's norm is not known on this rank yet. The later it is asked
 * for, the surer it is there: just before the next zero_step is best, for from then on that one is the last.
 * Not collective: ranks may learn it at different times. ZERO_ERR_ORDER before the first zero_step. */
ZERO_API int zero_last_step(zero_ctx *z, struct zero_step_info *info);
enum { ZERO_PENDING = 1 };

/* The next zero_step carries n (0..8) doubles of this rank, a loss and the like, in an exchange that it makes
 * anyhow; their means over ranks, with the same bits whatever the order (the sum is exact), come with its
 * outcome: zero_step's info or zero_last_step. Copied; given again, the last ones count; zero_drop forgets
 * them. Every rank gives as many, else the step ends the context with ZERO_ERR_MISMATCH. Local; does not
 * wait. */
ZERO_API int zero_carry(zero_ctx *z, const double *values, int32_t n);

/* Collective, blocking. Where a program has a rule of its own on the norm or the loss: reduces what is left,
 * and gives in *norm the global norm of the step to come, scaled and before clipping, as zero_step's info
 * will have it (NaN where a gradient is not finite: that step would be skipped). Then zero_step goes on, or
 * zero_drop gives up. Until one of them is called, a backward bracket and zero_micro are refused, and a model
 * without brackets leaves its gradients alone (on the host zero_step refuses what was written since; it looks
 * at the first 4 KiB of each gradient). Forward brackets are free. Asked again, it gives the same number
 * without asking anybody. Refused with ZERO_ERR_ORDER, and nothing changed, when zero_step would be. */
ZERO_API int zero_norm(zero_ctx *z, double *norm);

/* Collective; waits at most for the last step's norm and for gradients that are being reduced. Gives up the
 * step with its gradients, after zero_norm or at any time since its first backward: gradients are zero again,
 * the count of micro-batches starts anew, weights, optimizer states and the number of the step (info.t) stay.
 * Counted in zero_stats.n_dropped. Refused with ZERO_ERR_ORDER, and nothing changed, while a bracket is open,
 * or when there is nothing to drop as far as brackets tell. */
ZERO_API int zero_drop(zero_ctx *z);

/* Changes what the next zero_step and those after it are taken with: key is "clip", "beta1", "beta2", "eps"
 * or "weight_decay", within the field's range. optimizer: an enum zero_optimizer that a tensor has; 0:
 * cfg.optimizer's, with "weight_decay" every kind's, and with "clip", which is of the whole step, nothing
 * else. With cfg.update "clip" alone. A number that the kind does not use is refused, and a momentum (beta1)
 * of one that began with 0 and keeps none. Between steps. Every rank gives the same: does not wait, and where
 * ranks differ the next zero_step ends the context with ZERO_ERR_MISMATCH. Checkpoints do not hold these
 * numbers: after zero_load those of this context go on, as after zero_wrap those of cfg. */
ZERO_API int zero_tune(zero_ctx *z, int32_t optimizer, const char *key, double value);

/* The number of the last step is t (0 to 1e17): the next is t + 1, for bias corrections, info.t, cfg.update
 * and checkpoints. For states that come from elsewhere: zero_write them, and set the count that they belong
 * to. (What zero_write or zero_load put into states is never thrown away, at the first step neither.) Between
 * steps. Every rank gives the same, as of zero_tune. Waits for the last step's norm. */
ZERO_API int zero_set_step(zero_ctx *z, int64_t t);

/* Collective, blocking. Copies elements [first, first + n) of tensors[tensor] to dst (host memory; element
 * size of the value's dtype). Every rank gives the same range; dst may be NULL on ranks that do not want it.
 * Outside brackets. */
ZERO_API int zero_read(zero_ctx *z, int32_t tensor, int32_t value, int64_t first, int64_t n, void *dst);

/* Collective, blocking. All parameters, at every stage, until zero_release_all: *param of every tensor points
 * at the whole of it, stacked ones too, and may be read (not written) without brackets: for evaluation,
 * sampling, or the program's own save. Forward brackets inside are allowed and cost nothing; backward ones,
 * zero_micro, zero_norm, zero_drop, zero_step, zero_write, zero_import and zero_load are refused. Between any
 * two of the model's calls, outside brackets.
 * where: 0, or ZERO_DEVICE_CUDA on a GPU: where the model computes; at stage 3 within an explicit
 * cfg.param_budget_bytes. ZERO_DEVICE_HOST: in host memory, whatever the budget. What it takes comes on top
 * of the plan, until the release: nothing at stages 0 and 1 (but for ZERO_DEVICE_HOST on a GPU), at stages 2
 * and 3 the stacked tensors and what is sharded, whole. ZERO_ERR_BUDGET or ZERO_ERR_NOMEM name the bytes,
 * on all ranks, and nothing is changed. ZERO_ERR_ARG for another where, ZERO_ERR_ORDER inside a bracket or
 * when all are there already. On a GPU pointers taken before are not good after it, nor those taken inside
 * after zero_release_all.
 *
 * zero_release_all: collective, blocking; waits for what the model has put on cfg.stream too. ZERO_ERR_ORDER
 * inside a bracket, or when nothing was gathered. zero_unwrap releases as well. */
ZERO_API int zero_gather_all(zero_ctx *z, int where);
ZERO_API int zero_release_all(zero_ctx *z);

/* Collective, blocking. The reverse; rank 0's src counts, others may give NULL. Writing ZERO_VALUE_PARAM sets
 * the master weights to the same value; writing ZERO_VALUE_MASTER sets the parameter to it, rounded. Outside
 * brackets. */
ZERO_API int zero_write(zero_ctx *z, int32_t tensor, int32_t value, int64_t first, int64_t n,
                        const void *src);

/* Collective, blocking. values (n <= 64), host memory: each becomes its mean over ranks; with the same bits
 * whatever the order (the sum is exact). For losses and metrics. */
ZERO_API int zero_mean(zero_ctx *z, double *values, int32_t n);

/* How zero_sync_buffers makes the ranks' buffers equal. */
enum zero_sync {
    /* the mean over ranks, with the same bits whatever their order (the sum is exact); NaN where one is not
     * finite. Buffers of integers have to be equal already */
    ZERO_SYNC_MEAN = 1,
    /* rank 0's */
    ZERO_SYNC_RANK0 = 2
};

/* Collective, blocking. zero_wrap gives rank 0's buffers to all ranks; from then on each rank's forward
 * changes its own, and this makes all of them equal again: before an evaluation, and before zero_save, which
 * saves rank 0's (and warns once where those of others differ, or with cfg.check fails with
 * ZERO_ERR_MISMATCH). ZERO_ERR_MISMATCH, and nothing changed, where ranks differ in a buffer of integers that
 * ZERO_SYNC_MEAN would have to average, or in how; ZERO_ERR_ORDER, on all ranks, where *param of one is NULL,
 * and inside a bracket. No buffers: nothing happens, and nobody waits. Beyond that a buffer is read by
 * zero_read (rank 0's), written by zero_write (on all ranks), saved, loaded (on all ranks), exported and
 * imported as other tensors are; it has no ZERO_VALUE_MASTER and no states. */
ZERO_API int zero_sync_buffers(zero_ctx *z, int32_t how);

/* Collective, blocking (but see cfg.save_async). Saves a new checkpoint into the folder dir, which is made if
 * it is missing (not its parents), as dir/save-SERIAL-step-T: weights, optimizer states, the count of steps,
 * the program's user data and each rank's own. Each rank writes what it owns, as one safetensors file; rank 0
 * then writes the manifest, which alone makes it a checkpoint. On return it is on the disk: files and folders
 * were synced, and heads and checksums read back. Only then are those beyond the cfg.save_keep latest
 * removed, and what unfinished saves left. All ranks see the same file system. dir may be relative, to the
 * working directory at the call. Outside brackets, between steps.
 *
 * From the first save into it until zero_unwrap dir is locked: a save of another context into it, of this
 * process or any other, fails with ZERO_ERR_IO and names the holder. The lock ends with the process; children
 * that it forked after the save, and that go on without exec, keep it. Beyond 8 folders the one not saved
 * into for longest is unlocked.
 *
 * On failure (ZERO_ERR_IO naming the call, file and reason; ZERO_ERR_ARG for names of tensors that are not
 * UTF-8, or too many and too long for a file's header or the manifest; ZERO_ERR_NOMEM) the context is as
 * before, and so are the checkpoints in dir. With cfg.save_async the call waits for the save before it,
 * returns its failure, if any, without beginning another, and leaves writing to a thread; zero_save_wait
 * tells the outcome. */
ZERO_API int zero_save(zero_ctx *z, const char *dir);

/* The same, of a checkpoint that cfg.save_keep does not remove and does not count: a milestone, the best so
 * far, the end of an epoch. It is dir/save-SERIAL-step-T-kept: the name says so, to later runs too, and
 * renaming a checkpoint to or from it is how to change one's mind. zero_load takes it for the latest like any
 * other. ZERO_ERR_MISMATCH, and nothing written, where other ranks call zero_save. */
ZERO_API int zero_save_kept(zero_ctx *z, const char *dir);

/* Collective, blocking. Until the save begun last is on the disk; returns its failure, once. 0 when there is
 * none. zero_save, zero_load and zero_unwrap do the same first. */
ZERO_API int zero_save_wait(zero_ctx *z);

/* Where the checkpoint is that was saved last, for zero_load, and for copying it elsewhere: *path is
 * dir/save-SERIAL-step-T (or -kept) from the root on, the same on every rank, valid until the next zero_save,
 * zero_save_wait, zero_load or zero_unwrap; NULL when this context has saved none. It is the last one that is
 * known to be on the disk: with cfg.save_async the one begun last from zero_save_wait on, the one before it
 * until then. A save that failed changes nothing. Local; does not wait. */
ZERO_API int zero_get_saved(zero_ctx *z, const char **path);

/* Collective, blocking. Loads a checkpoint: path is one, or a folder of them, of which the one saved last is
 * taken; unfinished and damaged ones after it are skipped and told to cfg.log. Any stage, world, prefetch and
 * budget loads what any other saved, bit by bit; each rank reads what it owns, and checks every block's
 * checksums. Tensors are matched by name; names, dtypes, shapes, which are frozen, and each one's optimizer
 * must be the same. Needs host memory for what this rank owns, for the time of the call (but for buffers
 * alone with ZERO_INIT_LATER on the host, before any zero_write). On failure (ZERO_ERR_IO, ZERO_ERR_ARG for
 * another model; the file and the tensor are named) nothing is changed. Outside brackets, between steps. */
ZERO_API int zero_load(zero_ctx *z, const char *path);

/* The program's own bytes (at most 64 KiB, copied): rank 0's travel with every checkpoint saved afterwards,
 * and zero_load brings them back on every rank. For what the library does not know: seeds, the position in
 * the data. Local. */
ZERO_API int zero_set_user_data(zero_ctx *z, const void *data, int64_t bytes);
/* *data: the bytes set or loaded last, valid until the next zero_set_user_data, zero_load or zero_unwrap;
 * NULL and 0 when there are none. */
ZERO_API int zero_get_user_data(zero_ctx *z, const void **data, int64_t *bytes);

/* This rank's own bytes, as many as memory and a file have room for, beside those that all share: the state
 * of its data loader or of its random numbers, a replay buffer. Copied (0 bytes: none; a save that is under
 * way has its own hold of what it saves), host memory that is not in the plan. They travel with every
 * checkpoint saved afterwards, in the rank's file and under its checksums, until the next zero_set_rank_data
 * or zero_load, after which a program gives anew what its next checkpoints are to have. Local: ranks may give
 * different sizes, or nothing. zero_load reads all of it once, each rank a part, to find damage; ranks wait
 * cfg.timeout_ms for each other there, which many GB may ask to be longer. */
ZERO_API int zero_set_rank_data(zero_ctx *z, const void *data, int64_t bytes);

/* Of the checkpoint loaded last: *n_saved ranks saved it, which need not be as many as there are now (0: none
 * was loaded); saved rank saved_rank, of 0..*n_saved - 1, gave *bytes, 0 if none. Any rank may ask for any
 * saved one: where the world has changed, who goes on from what is the program's to say. Either of n_saved
 * and bytes may be NULL; without bytes saved_rank is not looked at. Local. */
ZERO_API int zero_find_rank_data(zero_ctx *z, int32_t saved_rank, int32_t *n_saved, int64_t *bytes);

/* Reads bytes [first, first + n) of what saved rank saved_rank gave, from the checkpoint loaded last, to dst.
 * zero_load has checked all of it, and brings none of it to memory; here each block of 1 MiB that is touched
 * is checked once more. The file must still be there: read before a zero_save whose cfg.save_keep removes
 * that checkpoint, else ZERO_ERR_IO. Every call opens the file, so read large pieces. Local, blocking. */
ZERO_API int zero_read_rank_data(zero_ctx *z, int32_t saved_rank, int64_t first, int64_t n, void *dst);

/* Collective, blocking. Writes the model's weights alone, in its dtype, for other programs: safetensors
 * dir/model-0000i-of-0000N.safetensors of at most max_file_bytes each (0: 5 GB; one tensor at least) and
 * model.safetensors.index.json. Rank 0 writes; files of these names are replaced. map: names and pieces, n of
 * them; NULL: every tensor under its own name. On failure the files are incomplete, and nothing else is
 * changed. Outside brackets. */
ZERO_API int zero_export(zero_ctx *z, const char *dir, const struct zero_weight *map, int32_t n,
                         int64_t max_file_bytes);

/* Collective, blocking. The reverse: reads such files (or one, dir/model.safetensors), F32 or BF16, into
 * weights and master weights; optimizer states stay. What no entry of map names is left alone, in the files
 * and in the model. Names, shapes and dtypes are checked before anything is changed; a file that cannot be
 * read to its end may leave some weights written. Outside brackets. */
ZERO_API int zero_import(zero_ctx *z, const char *dir, const struct zero_weight *map, int32_t n);

/* This rank's numbers, of a context that has failed too. Local; does not wait. ZERO_ERR_ARG where z or out is
 * NULL, or the configuration has no stats_size. */
ZERO_API int zero_get_stats(zero_ctx *z, struct zero_stats *out);

/* Writes this rank's timeline as Chrome trace JSON (Perfetto reads it): brackets, collectives, steps. Needs
 * cfg.trace, and has the latest part of a long run. Blocking. */
ZERO_API int zero_trace_write(zero_ctx *z, const char *path);

/* Collective when the context is healthy, local when it has failed. Frees everything and sets *z to NULL;
 * pointers the library gave to the model are dead, and set to NULL. NULL and pointers to NULL are allowed. */
ZERO_API int zero_unwrap(zero_ctx **z);

/* The short text of a code; never NULL. */
ZERO_API const char *zero_strerror(int code);

/* The message of this thread's last failure; "" if none. Valid until the thread's next failing call. */
ZERO_API const char *zero_last_error(void);

/* "0.1.0" of the library in use. */
ZERO_API const char *zero_version(void);

#ifdef __cplusplus
}
#endif

#endif
