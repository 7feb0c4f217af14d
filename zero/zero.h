/* SPDX-License-Identifier: Apache-2.0 */
/* zero.h: libzero, a drop-in ZeRO/FSDP runtime for models in C.
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
 *         static const char *const name[LAYERS] = {"w1", "w2", "w3", "w4", "w5", "w6", "w7", "w8"};
 *         struct zero_tensor tensors[LAYERS];
 *         struct zero_config cfg = ZERO_CONFIG_INIT;
 *         zero_ctx *z;
 *
 *         for (int l = 0; l < LAYERS; l++)
 *             tensors[l] = (struct zero_tensor){.name = name[l], .param = (void **)&m->w[l],
 *                                               .grad = (void **)&m->dw[l], .shape = {N},
 *                                               .dtype = ZERO_F32, .unit = l};
 *         cfg.stage = 3;
 *         must(zero_wrap(&z, tensors, LAYERS, &cfg));
 *         for (int step = 1; step <= 200; step++) {
 *             for (int l = 0; l < LAYERS; l++) {
 *                 must(zero_begin(z, l, ZERO_FORWARD));
 *                 forward(m, l);
 *                 must(zero_end(z, l, ZERO_FORWARD));
 *             }
 *             for (int l = LAYERS - 1; l >= 0; l--) {
 *                 must(zero_begin(z, l, ZERO_BACKWARD));
 *                 backward(m, l);
 *                 must(zero_end(z, l, ZERO_BACKWARD));
 *             }
 *             must(zero_step(z, 3e-2f, NULL));
 *             must(zero_mean(z, &m->loss, 1));
 *             if (m->rank == 0 && step % 20 == 0)
 *                 printf("step %d loss %.4g\n", step, m->loss);
 *         }
 *         must(zero_unwrap(&z));
 *     }
 *
 * Words. A *rank* is a process of the job, and the *world* is how many there are. A *unit* is gathered as a
 * whole; usually it is a layer. Stage 1 shards optimizer state over the ranks, stage 2 also gradients, and
 * stage 3 also parameters (ZeRO, arXiv:1910.02054; FSDP, arXiv:2304.11277). A *shard* is what one rank keeps,
 * and a *slot* is memory that open units reuse. A *bracket* is a zero_begin/zero_end pair around the model's
 * use of a unit. A *micro-batch* is one forward and backward. A *step* is cfg.grad_accum_steps micro-batches
 * followed by zero_step. A *buffer* is state that is not a parameter, such as a counter. A *host* is a
 * machine; as a device, its CPU and memory.
 *
 * Errors. Every call that can fail returns 0 or a negative enum zero_err, and zero_last_error() explains it.
 * (Only zero_last_step may also return ZERO_PENDING, which is above 0.) A failed call changes nothing. But if
 * a rank is lost, ranks disagree, or a rank's own work fails (CUDA, the program's update, a fault that check
 * mode finds), the context ends on every rank. Later calls then return the same error, and only zero_unwrap
 * and zero_get_stats work. Where a call's errors say that the context fails, it fails in this way.
 *
 * "Collective" means that every rank makes the call, in the same order. zero_begin, zero_end and zero_micro
 * are collective, too. They wait for other ranks only if what the model reads or writes next is still being
 * gathered, updated or reduced.
 *
 * Threads. One thread at a time uses a context. Different contexts, and functions without a context, are
 * independent. Contexts that are open at the same time have different names (cfg.launch.name). Check mode
 * installs a signal handler, and wraps write(), fread() and the like. The library never calls exit(). Without
 * cfg.debug.log it prints warnings to stderr.
 */
#ifndef ZERO_ZERO_H
#define ZERO_ZERO_H

#include "export.h"
#include "zero_config.h"

#ifdef __cplusplus
extern "C" {
#endif

#define ZERO_VERSION_MAJOR 0
#define ZERO_VERSION_MINOR 1
#define ZERO_VERSION_PATCH 0

/* X(name, value, text, help). zero/when_it_goes_wrong.md shows this map as a table. */
#define ZERO_ERR_MAP(X)                                                                                      \
    X(ARG, -1, "invalid argument",                                                                           \
      "An argument, a field, a variable or a tensor is not allowed. The message says what is.")              \
    X(NOMEM, -2, "not enough memory",                                                                        \
      "The plan does not fit, or an allocation failed. Use a higher stage, more ranks or less prefetch.")    \
    X(NOTSUP, -3, "not supported here",                                                                      \
      "This build, machine, device or MPI or NCCL library cannot do it. The message says what is missing.")  \
    X(ORDER, -4, "calls out of order",                                                                       \
      "This call is not allowed here, or the model used memory out of its turn. The message says which.")    \
    X(MISMATCH, -5, "ranks disagree",                                                                        \
      "Ranks differ in their model, configuration, buffers or calls. Make equal what the message names.")    \
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
    X(FAILED, -11, "the context failed earlier",                                                             \
      "A callback of the program, MPI or NCCL failed. The message has what it returned or said.")

enum zero_err {
#define ZERO_ERR_ENUM(name, value, text, help) ZERO_ERR_##name = value,
    ZERO_ERR_MAP(ZERO_ERR_ENUM)
#undef ZERO_ERR_ENUM
};

/* A wrapped model: what zero_wrap opens and zero_unwrap closes. */
typedef struct zero_ctx zero_ctx;

/* Values that zero_read and zero_write copy. */
enum zero_value {
    /* the weights in the tensor's dtype */
    ZERO_VALUE_PARAM = 0,
    /* the fp32 master weights (for f32 tensors the weights themselves); not of frozen tensors and buffers */
    ZERO_VALUE_MASTER = 1,
    /* + i: the i-th fp32 state of the tensor's own optimizer, i from 0; not of frozen tensors and buffers */
    ZERO_VALUE_STATE = 2,
    /* zero_read alone, between backward and zero_step: the fp32 gradient as the update will have it, reduced
     * over ranks and micro-batches, scaled and clipped. The first read of a step asks for its norm, and all
     * that zero_norm says holds then; with pp above 1 zero_norm comes first. Not of frozen tensors and
     * buffers. */
    ZERO_VALUE_GRAD = 64
};

/* Write ZERO_CONFIG_INIT to *cfg, for languages without C's macros.
 *
 * size is the caller's sizeof(struct zero_config).
 *
 * Local; any thread.
 * Errors: ARG  cfg is NULL, or size is not that of this library; nothing is written */
ZERO_API int zero_config_init(struct zero_config *cfg, size_t size);

/* Set the field named key from text.
 *
 * Numbers ("stage" = "3"; bytes also with k, M, G, T, Ki, Mi, Gi or Ti), names ("optimizer" = "lion")
 * and "auto" for ZERO_AUTO are accepted. The texts are not kept.
 *
 * Local; any thread.
 * Errors: ARG  an unknown key (the message has the nearest one), a value out of range, or a pointer field */
ZERO_API int zero_config_set(struct zero_config *cfg, const char *key, const char *value);

/* Find this rank's place in cfg.mesh before zero_wrap: for the data loader, for cudaSetDevice, and to know
 * which part of the model this rank has with tp or pp.
 *
 * The rank is the one that zero_wrap finds. It comes from cfg's rank and world, its nccl_comm or mpi_comm, or
 * the variables of zero-run, torchrun, Open MPI, MPICH or Slurm. Without any of these it is rank 0 of 1. If
 * cfg is NULL, ZERO_CONFIG_INIT is meant. With dp_replicate ZERO_AUTO the hosts are not known yet: then
 * dp_replicate, dp_shard, n_dp_replicate and n_dp_shard are -1, and zero_get_stats has them after the wrap.
 *
 * Local; any thread. Blocks for a cfg.launch.nccl_comm that NCCL is still making.
 * Errors: ARG     the axes of cfg.mesh do not make the world, or zero_wrap would refuse cfg
 *         NOTSUP  cp is above 1, or pp or tp on a GPU */
ZERO_API int zero_find_place(const struct zero_config *cfg, struct zero_place *out);

/* Count what zero_wrap would allocate and send, for any stage and world, without allocating or
 * communicating.
 *
 * The world is cfg->launch.world, 1 by default. param and grad are not followed; grad non-NULL means
 * trainable. ZERO_STAGE and the like override cfg here too. out holds numbers of one rank, with
 * nothing to free. It assumes that replicas (HSDP, HFSDP) lie on several hosts. If they share a host,
 * set cfg.deterministic to 1.
 *
 * Local; any thread.
 * Errors: ARG, BUDGET  as of zero_wrap; *out is not changed */
ZERO_API int zero_plan(const struct zero_tensor *tensors, int32_t n_tensors, const struct zero_config *cfg,
                       struct zero_plan_info *out);

/* Shard a model over all ranks and take over its pointers.
 *
 * Rank 0's parameters go to all ranks, unless cfg.init_from says otherwise. From here on the library
 * sets *param and *grad of every tensor; at stages 2 and 3 they are NULL outside brackets. What they
 * pointed at may be freed, except the memory of buffers. *grad is not read and may be NULL. The plan
 * is checked against the available memory before anything is allocated.
 *
 * Collective.
 * Blocks     until all ranks have come, at most cfg.launch.start_timeout_ms
 * Ownership  tensors, names, cfg and the arrays in it are copied. The model's pointer variables and the
 *            arguments of callbacks must remain valid until zero_unwrap, which closes *out
 * Errors     all ranks fail, and *out is NULL:
 *            ARG, NOTSUP, BUDGET  the message names the field or the tensor
 *            NOMEM                with the table of the plan
 *            MISMATCH             what differs between ranks
 *            PEER, TIMEOUT        which rank is missing */
ZERO_API int zero_wrap(zero_ctx **out, const struct zero_tensor *tensors, int32_t n_tensors,
                       const struct zero_config *cfg);

/* Open and close a bracket: the model's use of one unit.
 *
 * From zero_begin to the matching zero_end the unit's parameter pointers are valid. In backward its
 * gradient pointers are valid too. Gradients are zero then, except with ZERO_GRAD_OVERWRITE, and from
 * the second micro-batch on with cfg.memory.grad_in_place. The end of a
 * unit's backward bracket adds one contribution to its gradient and starts to reduce it.
 *
 * Brackets of different units may nest and overlap. A unit may be open in forward and in backward at
 * once (recompute), but not twice in one phase. At stages 2 and 3 two layers of a stacked tensor may
 * be open at once only with ZERO_POINTER_PER_BEGIN. ZERO_BACKWARD_INPUT and ZERO_BACKWARD_WEIGHT are a
 * backward in two parts: the first has the parameters, the second the gradient.
 *
 * A step updates the units that had a backward bracket; the log names the others once. At stages 0 and
 * 1 a program may do without brackets, in all steps; with several pipeline stages it may not. The
 * guide says when *grad is NULL there. A unit has one backward bracket in a micro-batch, unless
 * zero_tensor.uses or cfg.memory.order declares more.
 *
 * Collective.
 * Blocks  host: zero_begin, until the parameters have arrived. At stages 0 and 1 the zero_end that closes
 *         the micro-batch's last backward bracket, until gradients are reduced
 * GPU     both enqueue on cfg.stream
 * Errors: ARG     no such unit or phase
 *         ORDER   open already, or not open; backward after zero_norm; no values yet; the program set *param or
 *                 *grad; or more than uses * cfg.grad_accum_steps backward brackets of the unit in a step
 *         BUDGET  open brackets hold every slot that is large enough */
ZERO_API int zero_begin(zero_ctx *z, int32_t unit, enum zero_phase phase);
ZERO_API int zero_end(zero_ctx *z, int32_t unit, enum zero_phase phase);

/* End a micro-batch, in a program without brackets that accumulates gradients (stages 0 and 1).
 *
 * Call it after each backward but the last, which zero_step ends. Gradients are zero when it returns.
 * It does nothing for bracketed units and with cfg.memory.grad_in_place.
 *
 * Collective.
 * Errors: ORDER  a bracket is open, zero_norm was called, or all micro-batches of the step have ended */
ZERO_API int zero_micro(zero_ctx *z);

/* Finish the step: reduce the remaining gradients, clip them, and update the weights.
 *
 * Call once per cfg.grad_accum_steps micro-batches, with a finite lr. If any rank has a gradient that
 * is not finite, or the update would overflow, no rank updates and info->skipped is 1. If info is
 * NULL, a skipped step is logged. Passing info makes the call wait for this step's norm; without
 * it the call waits for the previous step's norm only. In the first step the log names the tensors
 * whose gradients were zero.
 *
 * Collective; lr must be equal on all ranks.
 * Errors: ORDER     a bracket is open, or micro-batches are missing (the message names the unit);
 *                   or a unit without a bracket has a gradient that is not zero
 *         ARG       lr is not finite
 *         MISMATCH  ranks made different calls; the context fails, here or in a later call
 *         ORDER     every gradient of every rank is zero in the first step; the context fails */
ZERO_API int zero_step(zero_ctx *z, float lr, struct zero_step_info *info);

/* Read the outcome of the last zero_step without waiting.
 *
 * Returns 0 and fills *info, or returns ZERO_PENDING (which is no error) while this rank does not know
 * the norm yet. Just before the next zero_step is the best time.
 *
 * Local.
 * Errors: ORDER  there was no zero_step yet */
ZERO_API int zero_last_step(zero_ctx *z, struct zero_step_info *info);
enum { ZERO_PENDING = 1 };

/* Send n doubles (0 to 8), such as a loss, along with the next zero_step.
 *
 * Their means over ranks arrive with its outcome, in zero_step's info or by zero_last_step. The sum is
 * exact, so the mean does not depend on order. If it is called again before the step, the new values
 * replace the old. With a pipeline the last pipeline stage's values count.
 *
 * Local; n must be equal on all ranks, or the step fails with MISMATCH. values are copied.
 * Errors: ARG  n is out of range, or values is NULL */
ZERO_API int zero_carry(zero_ctx *z, const double *values, int32_t n);

/* Compute the global norm of the step to come, scaled and before clipping, for rules of the program's own.
 *
 * It is NaN if a gradient is not finite. After zero_norm, call zero_step or zero_drop. Until then
 * backward brackets and zero_micro are refused, and the model leaves its gradients alone.
 *
 * Collective. Blocks until gradients are reduced.
 * Errors: ORDER  zero_step would be refused */
ZERO_API int zero_norm(zero_ctx *z, double *norm);

/* Discard the gradients of the current step.
 *
 * Weights, optimizer state and the number of the step stay as they are.
 *
 * Collective. Blocks at most for the last step's norm and for gradients that are being reduced.
 * Errors: ORDER  a bracket is open, or there is nothing to drop */
ZERO_API int zero_drop(zero_ctx *z);

/* Change a number of a parameter group for the next steps.
 *
 * key is "lr_scale", "beta1", "beta2", "eps" or "weight_decay". With group ZERO_ALL it is set in all groups,
 * and key may also be "clip" or "grad_scale". Call between steps. Checkpoints do not hold these numbers, so
 * the context keeps its own after zero_load.
 *
 * Local; every rank makes the same call, else the next zero_step returns ZERO_ERR_MISMATCH.
 * Errors: ARG    no such group or key, out of range, not used by the optimizer, or beta1 where there is no
 *                momentum
 *         ORDER  a step has begun */
ZERO_API int zero_tune(zero_ctx *z, int32_t group, const char *key, double value);

/* Set the number of the last step, and the step count of every unit, to t (0 to 1e17).
 *
 * For optimizer states from elsewhere: write them by zero_write and set the count that they belong to.
 * Bias corrections go on from it.
 *
 * Collective, between steps. Blocks for the last step's norm.
 * Errors: ARG    t is out of range
 *         ORDER  a step has begun */
ZERO_API int zero_set_step(zero_ctx *z, int64_t t);

/* Copy elements [first, first + n) of tensors[tensor], row-major over the whole tensor, to dst.
 *
 * value is an enum zero_value. dst is host memory for n elements, of the tensor's dtype for
 * ZERO_VALUE_PARAM and fp32 otherwise; NULL on a rank that does not want them.
 *
 * Collective (in a pipeline, over the tensor's pipeline stage): same tensor, value and range. Blocks.
 * Errors: ARG       no such tensor, value or range
 *         ORDER     a bracket is open, or there are no values yet; for ZERO_VALUE_GRAD whenever zero_step
 *                   would be refused
 *         MISMATCH  ranks gave different arguments; the context fails */
ZERO_API int zero_read(zero_ctx *z, int32_t tensor, int32_t value, int64_t first, int64_t n, void *dst);

/* Make all parameters readable without brackets, until zero_release_all.
 *
 * *param of every tensor points at the whole tensor, for evaluation, sampling or the program's own
 * save. where is 0 for the device, or ZERO_DEVICE_HOST for host memory. Forward brackets are allowed
 * inside and cost nothing. Calls that train or write are refused. At stages 2 and 3 this takes memory
 * beyond the plan (see memory.md). On a GPU take the pointers anew after both calls.
 *
 * Collective. Block; zero_release_all also waits for what the model has put on cfg.stream.
 * Errors: BUDGET, NOMEM  the message has the bytes; nothing is changed
 *         ARG            where has another value
 *         ORDER          a bracket is open; gathered already, or nothing is gathered */
ZERO_API int zero_gather_all(zero_ctx *z, int where);
ZERO_API int zero_release_all(zero_ctx *z);

/* Write elements of a tensor: the reverse of zero_read.
 *
 * Rank 0's src counts; others may give NULL. Writing ZERO_VALUE_PARAM also sets the master weights;
 * writing ZERO_VALUE_MASTER also sets the parameter, rounded. A ZERO_TIED tensor is written by the
 * ranks of its first and last pipeline stage, and the first one's src counts.
 *
 * Collective, as zero_read. Blocks. src is read until the call returns.
 * Errors: as of zero_read; also ARG for ZERO_VALUE_GRAD, and ORDER inside zero_gather_all */
ZERO_API int zero_write(zero_ctx *z, int32_t tensor, int32_t value, int64_t first, int64_t n,
                        const void *src);

/* Replace each of n values (0 to 64) by its mean over ranks, for losses and metrics.
 *
 * The sum is exact, so the mean does not depend on order. With tp it is the mean over the ranks that have
 * this rank's shard of the model. With a pipeline the last pipeline stage's values count, and all ranks get
 * their mean.
 *
 * Collective over the world. Blocks.
 * Errors: ARG       n is out of range, or values is NULL
 *         MISMATCH  ranks gave different n; the context fails */
ZERO_API int zero_mean(zero_ctx *z, double *values, int32_t n);

/* Get the factor that makes the step train on the mean over all tokens (or samples) of all ranks.
 *
 * count is what this rank has in all micro-batches of the step to come. The program adds up its
 * tokens' losses and starts backward with *scale for each. The result does not depend on how tokens
 * are spread over ranks and micro-batches. Ranks along tp give the same count; along pp only
 * the last pipeline stage's count is used.
 *
 * Collective, before the step's first backward, outside brackets. Blocks.
 * To wait least, call it between the first micro-batch's forward and backward. The last call counts.
 * Errors: ARG    a count that is negative or not finite (the message names the rank), or all counts are 0
 *         ORDER  a step has begun */
ZERO_API int zero_loss_scale(zero_ctx *z, double count, double *scale);

/* The axes of cfg.mesh that collectives run over. */
enum zero_axis {
    ZERO_AXIS_TP = 1,
    ZERO_AXIS_CP,
    /* zero_broadcast alone */
    ZERO_AXIS_PP
};

/* How zero_all_reduce combines elements. */
enum zero_reduce {
    ZERO_SUM = 1,
    /* the largest; NaN where one is NaN */
    ZERO_MAX
};

/* Combine arrays over the ranks of an axis.
 * zero_all_reduce gives each rank the sum or the largest of every element. zero_all_gather gives it the
 * src of all ranks in their order. zero_reduce_scatter gives it its part of the sum.
 *
 * n counts the elements of the smaller of dst and src; the larger one has n for each rank of the axis.
 * Sums are added in fp32 in a fixed tree and rounded once, so all ranks have the same bits. In
 * zero_all_reduce dst may be src; in the others the smaller array may lie at this rank's place in the
 * larger one. On an axis of one rank the calls copy. tensor_parallel.md has a forward and its backward.
 *
 * Collective over the axis; inside or outside brackets.
 * Blocks  host: until the other ranks of the axis have come
 * GPU     enqueues on cfg.stream; the memory is that of cfg.device
 * Errors: ARG       another axis or op, n out of range, NULL, or dst and src overlap elsewhere; a dtype other
 *                   than ZERO_F32 and ZERO_BF16 (zero_all_gather takes all)
 *         MISMATCH  ranks gave other n, dtype or op, or made other calls; the context fails */
ZERO_API int zero_all_reduce(zero_ctx *z, enum zero_axis axis, void *dst, const void *src, int64_t n,
                             enum zero_dtype dtype, enum zero_reduce op);
ZERO_API int zero_all_gather(zero_ctx *z, enum zero_axis axis, void *dst, const void *src, int64_t n,
                             enum zero_dtype dtype);
ZERO_API int zero_reduce_scatter(zero_ctx *z, enum zero_axis axis, void *dst, const void *src, int64_t n,
                                 enum zero_dtype dtype);

/* Copy bytes of buf from rank number root of an axis to the others, such as a sampled token.
 * Over pp all ranks of the world call it, outside actions, and each gets the bytes of the rank that has
 * its place on the other axes.
 *
 * Collective over the axis, with equal root and bytes. Blocks until the other ranks have come.
 * Errors: ARG       another axis, a root outside the axis, negative bytes, or NULL
 *         ORDER     over pp, the actions of a step or an evaluation have begun
 *         MISMATCH  ranks gave other arguments, or made other calls; the context fails */
ZERO_API int zero_broadcast(zero_ctx *z, enum zero_axis axis, int32_t root, void *buf, int64_t bytes);

/* State that all ranks of an axis have the same n elements in src.
 * cfg.debug.check compares them in steps 1, 2, 4 and so on. Without it nothing is read or sent.
 *
 * Collective over the axis.
 * Errors: ARG       as of zero_all_gather
 *         MISMATCH  src differs on two ranks, or ranks made other calls; the context fails */
ZERO_API int zero_expect_equal(zero_ctx *z, enum zero_axis axis, const void *src, int64_t n,
                               enum zero_dtype dtype);

/* Get this rank's next action of the pipeline: the forward or backward of one micro-batch.
 *
 * The schedule decides the order, so store what backward needs for each micro-batch, and for each
 * pipeline stage if stages_per_rank is above 1. Call it until micro_batch is -1, then call zero_step.
 * With one pipeline stage action->in, out and kept are NULL, so one program serves both cases. With several,
 * brackets are inside actions, and zero_micro is not called.
 *
 * Collective. Blocks on the host until the action's input has arrived.
 * Errors: ORDER  the previous action is not finished, or a bracket is open */
ZERO_API int zero_next(zero_ctx *z, struct zero_action *action);
/* End the action that zero_next gave; its output goes to the next pipeline stage.
 *
 * Collective. Blocks only while no message buffer is free.
 * Errors: ORDER  there is no action, or a bracket is open */
ZERO_API int zero_finish(zero_ctx *z);

/* Make the next actions an evaluation: the forward of grad_accum_steps micro-batches, without backward or
 * step.
 *
 * It lasts until zero_next gives a micro_batch of -1. The loss is the last pipeline stage's; zero_mean,
 * called by all ranks, gives its mean to all.
 *
 * Local; every rank calls it, between steps.
 * Errors: ORDER  a step or an evaluation has begun */
ZERO_API int zero_evaluate(zero_ctx *z);

/* How zero_sync_buffers makes the ranks' buffers equal. */
enum zero_sync {
    /* the mean over ranks, with the same bits whatever their order (the sum is exact); NaN where one is not
     * finite. Buffers of integers have to be equal already */
    ZERO_SYNC_MEAN = 1,
    /* rank 0's */
    ZERO_SYNC_RANK0 = 2
};

/* Make the ranks' buffers (ZERO_BUFFER) equal, before an evaluation or zero_save.
 *
 * Each rank's forward changes its own buffers. zero_save saves rank 0's, with a warning if others
 * differ. zero_read, zero_write, checkpoints and exports handle buffers like other tensors. In a
 * pipeline, rank 0 and all ranks are those of the buffer's pipeline stage.
 *
 * Collective. Blocks, unless the model has no buffers.
 * Errors: MISMATCH  integers differ and how is ZERO_SYNC_MEAN, or ranks gave different how
 *         ORDER     a bracket is open, between actions, or a buffer's pointer is NULL */
ZERO_API int zero_sync_buffers(zero_ctx *z, int32_t how);

/* Options of one zero_save. All zero is the default. */
struct zero_save_options {
    /* 1: a milestone, which cfg.checkpoint.save_keep neither counts nor removes. Its folder's name ends in
     * -kept. Default 0. */
    int32_t kept;
};

/* Save a new checkpoint, dir/save-SERIAL-step-T.
 * It holds weights, optimizer states, step counts and what zero_set_data was given. Each rank writes what
 * it owns; rank 0 writes the manifest last, and only a valid manifest makes a checkpoint. The call returns
 * when it is on the disk and was read back. Only then are those beyond cfg.checkpoint.save_keep removed.
 *
 * With cfg.checkpoint.save_async the call ends the save before it, orders a snapshot and returns. If the
 * save before it failed, the call returns that error and begins none. zero_save_wait tells the outcome.
 *
 * dir is made if it is missing, and stays locked until zero_unwrap. All ranks must see one file system
 * there. Links inside dir are not followed. options may be NULL.
 *
 * Collective, between steps; outside brackets and actions.
 * Errors: the context and the checkpoints in dir are as before
 *         IO        the message names the file and the reason, or the process that holds the lock
 *         ARG       options->kept; or tensors whose names are not UTF-8 or too long for a file's header
 *         MISMATCH  ranks gave different options
 *         ORDER     a bracket is open, or a step has begun */
ZERO_API int zero_save(zero_ctx *z, const char *dir, const struct zero_save_options *options);

/* Wait until the last save is on the disk, and get the path of the last checkpoint.
 * *path is that of the last checkpoint that this context saved, from the root on and equal on all ranks, or
 * NULL. It is valid until the next zero_save, zero_save_wait, zero_load or zero_unwrap. path may be NULL.
 *
 * Collective; outside actions.
 * Errors: those of the save, once; *path is not changed */
ZERO_API int zero_save_wait(zero_ctx *z, const char **path);

/* Load a checkpoint. If path is a folder of checkpoints, the latest valid one is loaded.
 * Any stage, world, mesh, prefetch and budget loads what any other saved, bit by bit. Names, dtypes, shapes
 * and optimizers of tensors must be equal. A tensor that was frozen and is now trained begins with fresh
 * optimizer state, and the log says so. What zero_set_data was given is dropped.
 *
 * All ranks must find the same files there, or copies. Links inside the folder are not followed. The call
 * needs host memory for what this rank owns, except with ZERO_INIT_LATER on the host.
 *
 * Collective, between steps; outside brackets and actions.
 * Errors: nothing is changed
 *         IO     the message names the file that is missing or damaged, or the rank that finds another
 *         ARG    the checkpoint is of another model; the message names the tensor
 *         ORDER  a bracket is open, or a step has begun */
ZERO_API int zero_load(zero_ctx *z, const char *path);

/* An owner of data, for zero_set_data and zero_read_data. */
enum zero_data {
    /* the job's, which rank 0 gives */
    ZERO_DATA_JOB = -1,
    /* this rank's; zero_set_data alone */
    ZERO_DATA_RANK = -2
};

/* Give later checkpoints data of the program, of any size: seeds, the position in the data set.
 * whose is ZERO_DATA_JOB (what other ranks than rank 0 give is ignored) or ZERO_DATA_RANK. Every checkpoint
 * holds it until the next call or zero_load. 0 bytes: none.
 *
 * Local.
 * Ownership  data is copied to host memory, which is not in the plan
 * Errors: ARG    whose, or negative bytes
 *         NOMEM  what was given before stays */
ZERO_API int zero_set_data(zero_ctx *z, int32_t whose, const void *data, int64_t bytes);

/* Data of the program in the checkpoint that was loaded last. */
struct zero_data_info {
    /* bytes of the data asked for; 0: none was saved */
    int64_t bytes;
    /* ranks that saved the checkpoint */
    int32_t n_saved;
};

/* Read bytes [first, first + n) of the program's data from the checkpoint that was loaded last.
 * whose is ZERO_DATA_JOB, or a saved rank from 0 to info->n_saved - 1. Any rank reads any of them. With n 0
 * the call only fills *info. info may be NULL. Each call opens the file, so read large pieces.
 *
 * Local. Blocks on the disk.
 * Errors: ORDER  no checkpoint was loaded
 *         ARG    no such rank, or the range is not within its data
 *         IO     the file is damaged, or was removed by a later zero_save */
ZERO_API int zero_read_data(zero_ctx *z, int32_t whose, int64_t first, int64_t n, void *dst,
                            struct zero_data_info *info);

/* Write the model's weights alone, in the model's dtype, as safetensors for other programs.
 * The export is dir/model.safetensors if one file of max_file_bytes holds it (0: 5 GB). Otherwise it is
 * model.safetensors.index.json and files of at least one tensor, model-ID-0000i-of-0000N.safetensors. dir is
 * made if it is missing. An earlier export there is replaced in a single step, and stays whole if the call
 * fails or the program is killed. No link inside dir is followed.
 * map: names and pieces, n of them, equal on every rank, not kept. NULL: every tensor under its own name; n
 * is then ignored. With pp above 1 each place of pp gives the entries of its table, and n may be 0. All of
 * them are written in the order of the stages. An entry that two stages give is written once.
 *
 * Collective; Blocks on the disk, where rank 0 writes, and the first rank of each part and pipeline stage.
 * Outside brackets and actions.
 * Errors: IO    the message names the file
 *         ARG   the message names the entry of map, or weight files in dir that zero_export did not write */
ZERO_API int zero_export(zero_ctx *z, const char *dir, const struct zero_weight *map, int32_t n,
                         int64_t max_file_bytes);

/* Read weights from safetensors into the model: into the weights and the master weights of all ranks.
 * The file is dir/model.safetensors. If there is none, the index names the files. Values of F32, BF16 and F16
 * become f32 exactly, or are rounded once to bf16; other dtypes must be the tensor's own. map as in
 * zero_export. Optimizer states, and tensors that no entry of map names, keep their values. Names, shapes and
 * dtypes are checked before anything is changed. If a file cannot be read to its end, weights before it may
 * have been written, equal on all ranks that have them. The context goes on, and may import again.
 * Collective; Blocks on the disk, where the ranks read that would write an export; others need not see dir.
 * Outside brackets and actions.
 * Errors: IO      the message names the file; or the files carry the ids of two exports
 *         ARG     the message names the entry of map, or the tensor whose shape is another
 *         NOTSUP  the message names the tensor whose dtype is another */
ZERO_API int zero_import(zero_ctx *z, const char *dir, const struct zero_weight *map, int32_t n);

/* Fill *out with this rank's numbers. Works on a failed context too.
 *
 * Local. */
ZERO_API int zero_get_stats(zero_ctx *z, struct zero_stats *out);

/* Write this rank's timeline to the file path, as Chrome trace JSON for Perfetto.
 *
 * It requires cfg.debug.trace. Of a long run only the latest part is kept.
 *
 * Local. Blocks until operations in flight have finished.
 * Errors: ARG  cfg.debug.trace is 0
 *         IO   the file cannot be written */
ZERO_API int zero_trace_write(zero_ctx *z, const char *path);

/* Close a context, free everything, and set *z and the model's pointers (not those of buffers) to NULL.
 *
 * It returns the error of an asynchronous save, or the one that ended the context. z and *z may be
 * NULL. In a forked child only *z is set, and the call returns ORDER. If a thread of the library is
 * stuck in a driver or in the program's update, its memory stays allocated, with a warning.
 *
 * Collective while the context works; local after it has failed. Blocks. */
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
