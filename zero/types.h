/* SPDX-License-Identifier: Apache-2.0 */
/* types.h: the numbers and structs that the whole library shares with programs. zero.h includes this file. */
#ifndef ZERO_TYPES_H
#define ZERO_TYPES_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* X(name, value, text, help). zero/when_it_goes_wrong.md shows this map as a table. */
#define ZERO_ERR_MAP(X)                                                                                      \
    X(ARG, -1, "invalid argument",                                                                           \
      "An argument, field, variable or tensor is not allowed. The message says what is allowed.")            \
    X(NOMEM, -2, "not enough memory",                                                                        \
      "The plan does not fit, or an allocation failed. Use a higher stage, more ranks or less prefetch.")    \
    X(NOTSUP, -3, "not supported here",                                                                      \
      "This build, machine, device or MPI or NCCL library cannot do it. The message says what is missing.")  \
    X(ORDER, -4, "calls out of order",                                                                       \
      "This call is not allowed here, or memory was used outside its bracket. The message says which.")      \
    X(MISMATCH, -5, "ranks disagree",                                                                        \
      "Ranks differ in model, configuration, buffers or calls. The message says what must be equal.")        \
    X(PEER, -6, "a rank was lost",                                                                           \
      "Another rank ended, was killed or was cut off. Read the output of the rank that the message names.")  \
    X(TIMEOUT, -7, "timed out",                                                                              \
      "A rank or a driver did not answer in time. See what it does, or raise the limit that is named.")      \
    X(IO, -8, "input or output failed",                                                                      \
      "A file or a connection failed, or a file is damaged. The message has the path and the reason.")       \
    X(SYSTEM, -9, "the operating system refused",                                                            \
      "The system has no descriptor, thread, port or shared memory left. The message has its reason.")       \
    X(BUDGET, -10, "memory budget too small",                                                                \
      "Memory for gathered units is too small for what is open at once. The message says what helps.")       \
    X(FAILED, -11, "code outside libzero failed",                                                            \
      "MPI, NCCL or a callback of the program failed. The message has what it returned or said.")

enum zero_err {
#define ZERO_ERR_ENUM(name, value, text, help) ZERO_ERR_##name = value,
    ZERO_ERR_MAP(ZERO_ERR_ENUM)
#undef ZERO_ERR_ENUM
};

/* libzero chooses; each field says how. */
#define ZERO_AUTO (-1)

enum zero_dtype {
    ZERO_F32 = 1,
    ZERO_BF16 = 2,
    ZERO_F16 = 3, /* zero_plan only; zero_wrap returns ZERO_ERR_NOTSUP */
    ZERO_I32 = 4, /* for a ZERO_BUFFER, and in collectives that do not add */
    ZERO_I64 = 5  /* the same */
};

/* Where the model computes, and where its parameters, gradients and optimizer state are. */
enum zero_device { ZERO_DEVICE_HOST = 1, ZERO_DEVICE_CUDA = 2 };

/* Backends, which move bytes between ranks. X(name, value, key, where it works) */
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

/* The phase of a bracket. Some pipeline schedules divide a backward into two parts. */
enum zero_phase {
    /* Has the unit's parameters. */
    ZERO_FORWARD = 1,
    /* Has parameters and gradients. */
    ZERO_BACKWARD = 2,
    /* The first part: gradients of the unit's inputs. Has parameters. */
    ZERO_BACKWARD_INPUT = 3,
    /* The second part: gradients of the weights. Has gradients only. */
    ZERO_BACKWARD_WEIGHT = 4
};

/* One zero_begin or zero_end of a micro-batch, for cfg.memory.order. */
struct zero_call {
    int32_t unit;
    /* enum zero_phase. */
    uint8_t phase;
    /* 0: zero_begin, 1: zero_end. */
    uint8_t is_end;
};

/* Optimizers. X(name, value, key, source; defaults of beta1, beta2 and eps; states per weight). Weight
 * decay is added to the gradient unless it is decoupled. */
#define ZERO_OPTIMIZER_MAP(X)                                                                                \
    X(ADAMW, 1, adamw, "arXiv:1711.05101, decoupled decay; 0.9, 0.999, 1e-8; 2 states")                      \
    X(ADAM, 2, adam, "arXiv:1412.6980; 0.9, 0.999, 1e-8; 2 states")                                          \
    X(SGD, 3, sgd, "PyTorch's; beta1 is the momentum, default 0; 1 state, none with 0")                      \
    X(RMSPROP, 4, rmsprop, "Tieleman and Hinton, 2012, PyTorch's form; beta2 0.99, 1e-8; 1 state")           \
    X(LION, 5, lion, "arXiv:2302.06675, decoupled decay; 0.9, 0.99; 1 state")                                \
    X(NESTEROV, 6, nesterov, "PyTorch's SGD(nesterov=True); beta1 is the momentum, 0.9; 1 state, none with 0")

enum zero_optimizer {
#define ZERO_OPTIMIZER_ENUM(name, value, key, text) ZERO_##name = value,
    ZERO_OPTIMIZER_MAP(ZERO_OPTIMIZER_ENUM)
#undef ZERO_OPTIMIZER_ENUM
};

/* The form in which masters of bf16 weights are kept (memory.md). f32 weights are their own masters. */
enum zero_masters {
    /* In fp32. */
    ZERO_MASTERS_F32 = 0,
    /* As the 16 bits of the master that the bf16 weight lacks. Weights, losses and checkpoints are those of
     * ZERO_MASTERS_F32, bit for bit. */
    ZERO_MASTERS_REMAINDER = 1,
    /* Not kept. The update rounds the new weights at random. */
    ZERO_MASTERS_NONE = 2
};

/* The form in which the states of an optimizer are kept (memory.md). */
enum zero_moments {
    /* In fp32. */
    ZERO_MOMENTS_F32 = 0,
    /* In bf16, rounded at random. */
    ZERO_MOMENTS_BF16 = 1,
    /* As 8-bit codes, rounded at random, with a bf16 scale for each block of 32 elements. */
    ZERO_MOMENTS_Q8 = 2
};

/* The memory that holds masters and states (memory.md). All give the same bits. */
enum zero_states {
    /* Memory of cfg.device. */
    ZERO_STATES_DEVICE = 0,
    /* Pinned host memory, which a GPU's update reads and writes. On the host the same as
     * ZERO_STATES_DEVICE. */
    ZERO_STATES_HOST = 1,
    /* A file in cfg.memory.states_dir, of which two parts are in memory. Excludes cfg.checkpoint.save_async,
     * and optim.update for tensors whose granule does not divide 32. */
    ZERO_STATES_FILE = 2
};

typedef struct CUstream_st *zero_stream;

/* A range of elements for optim.update (optimizers.md). Arrays have n fp32 elements in the memory of
 * cfg.device. With cfg.memory.states host or file, states and the masters of bf16 weights are in pinned host
 * memory instead. */
struct zero_update {
    const char *tensor;
    /* Index in the table of zero_wrap. */
    int32_t tensor_index;
    /* Element of the tensor, in row-major order, at index 0 of the arrays. */
    int64_t first;
    int64_t n;
    /* Weights to update. The library then rounds them to the tensor's dtype. */
    float *master;
    /* Gradient, reduced, scaled and clipped. */
    const float *grad;
    /* n_states arrays, zero at first. The others are NULL. */
    float *state[4];
    /* zero_step's lr times the group's lr_scale. */
    float lr;
    /* Steps that have updated the unit, this one included; 1 and more. */
    int64_t t;
    /* Stream to compute on. NULL on the host: compute on the calling thread before returning. */
    zero_stream stream;
};

/* The outcome of a step. */
struct zero_step_info {
    /* Number of the step, from 1; skipped steps do not count. */
    int64_t t;
    /* Global L2 norm of the scaled gradient before clipping. NaN: a gradient was not finite. */
    double grad_norm;
    /* 1: the norm was above cfg.clip. */
    int32_t clipped;
    /* 1: no rank updated anything, because a gradient was not finite or too large on some rank. */
    int32_t skipped;
    /* Number of values given to zero_carry. */
    int32_t n_carried;
    /* Their means over ranks. NaN: a rank's value was not finite. */
    double carried[8];
};

/* The order of a pipeline's actions (pipeline.md). All give the same bits. */
enum zero_schedule {
    /* Backward as soon as possible. */
    ZERO_SCHEDULE_1F1B = 0,
    /* All forwards, then all backwards. */
    ZERO_SCHEDULE_GPIPE = 1,
    /* 1F1B with several pipeline stages per rank. */
    ZERO_SCHEDULE_INTERLEAVED = 2,
    /* 1F1B with divided backwards, whose second half fills idle time (ZB-H1, arXiv:2401.10241). */
    ZERO_SCHEDULE_ZERO_BUBBLE = 3
};

/* What stage 3 shards across replicas, if cfg.mesh.dp_replicate is above 1. */
enum zero_hybrid {
    /* Nothing: stage 3 in a replica, stage 0 between replicas. */
    ZERO_HSDP = 0,
    /* Optimizer state: stage 3 in a replica, stage 1 between replicas. */
    ZERO_HFSDP = 1
};

/* Axes of cfg.mesh. ZERO_AXIS_PP is for zero_broadcast only. */
enum zero_axis { ZERO_AXIS_TP = 1, ZERO_AXIS_CP, ZERO_AXIS_PP };

/* How ranks along cp share the rows of a sequence. Zigzag: each has a chunk from the front and one from the
 * back, which makes causal attention equal work. */
enum zero_cp_order { ZERO_CP_CONTIGUOUS = 1, ZERO_CP_ZIGZAG };

/* How zero_all_reduce combines elements. ZERO_MAX of a NaN is NaN. */
enum zero_reduce { ZERO_SUM = 1, ZERO_MAX };

#ifdef __cplusplus
}
#endif

#endif
