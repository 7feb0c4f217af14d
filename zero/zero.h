/* SPDX-License-Identifier: Apache-2.0 */
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
 * Words. A *rank* is a process of the job, and *world* is their number. A *unit* is what is gathered as one,
 * usually a layer. Stage 1 shards optimizer state over the ranks, stage 2 also gradients, stage 3 also
 * parameters (ZeRO, arXiv:1910.02054; FSDP, arXiv:2304.11277). A *shard* is what one rank keeps, and a *slot*
 * is memory that units take in turn. A *bracket* is a zero_begin/zero_end pair around the model's use of a
 * unit. A *micro-batch* is one forward and backward; cfg.grad_accum_steps of them, and zero_step, are a
 * *step*. A *buffer* is a tensor that is not trained. The *host* is the machine, and as a device its CPU.
 *
 * Errors. Every call that can fail returns 0 or a negative enum zero_err, and zero_last_error() explains it.
 * (Only zero_last_step may also return ZERO_PENDING, which is above 0.) A failed call changes nothing. But if
 * a rank is lost, ranks disagree, or a rank's own work fails (CUDA, the program's update, a fault that check
 * mode finds), the context ends on every rank: later calls return the same error, and only zero_unwrap and
 * zero_get_stats work. A call whose comment says "nothing changed" of ranks that differ has compared them
 * first.
 *
 * "Collective" means that every rank makes the call, in the same order. zero_begin, zero_end and zero_micro
 * are collective, too. They wait for other ranks only if what the model reads or writes next is still being
 * gathered, updated or reduced.
 *
 * Threads. One thread at a time uses a context. Different contexts, and functions without a context, are
 * independent. Contexts that are open at the same time have different names (cfg.launch.name). The global
 * state is these names and, in check mode, a signal handler and write(), fread() and their like. The library
 * never exits, and prints only warnings that no cfg.debug.log receives.
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
     * that zero_norm says holds then; with pp above 1 zero_norm comes first. Not of frozen tensors and
     * buffers. */
    ZERO_VALUE_GRAD = 64
};

/* Write ZERO_CONFIG_INIT to *cfg, for languages without C's macros.
 * size is the caller's sizeof(struct zero_config).
 *
 * Local; any thread.
 * Errors: ARG  cfg is NULL, or size is not that of this library; nothing is written */
ZERO_API int zero_config_init(struct zero_config *cfg, size_t size);

/* Set the field named key from text.
 * Numbers ("stage" = "3"; bytes also with k, M, G, T, Ki, Mi, Gi or Ti), names ("optimizer" = "lion")
 * and "auto" for ZERO_AUTO are accepted. The texts are not kept.
 *
 * Local; any thread.
 * Errors: ARG  an unknown key (the message has the nearest one), a value out of range, or a pointer field */
ZERO_API int zero_config_set(struct zero_config *cfg, const char *key, const char *value);

/* Find this rank's place in cfg.mesh before zero_wrap, for the data loader, the model's part and
 * cudaSetDevice(place.local_rank).
 *
 * The rank is the one that zero_wrap finds. It comes from cfg's rank and world, its nccl_comm or mpi_comm, or
 * the variables of zero-run, torchrun, Open MPI, MPICH or Slurm. Without any of these it is rank 0 of 1. If
 * cfg is NULL, ZERO_CONFIG_INIT is meant. With dp_replicate ZERO_AUTO the hosts are not known yet:
 * dp_replicate, dp_shard and their n_ are -1, and zero_get_stats has them after the wrap.
 *
 * Local: talks to no other rank.
 * Blocks: for a cfg.launch.nccl_comm that NCCL is still making, at most cfg.launch.timeout_ms.
 * Threads: any.
 * Errors: what zero_wrap would refuse of cfg and the variables; *out is left alone
 *         ARG       the axes of cfg.mesh do not make the world
 *         NOTSUP    cp is above 1, or pp or tp on a GPU */
ZERO_API int zero_find_place(const struct zero_config *cfg, struct zero_place *out);

/* Count what zero_wrap would allocate and send, for any stage and world, without allocating or
 * communicating.
 * The world is cfg->launch.world, 1 by default. param and grad are not followed; grad non-NULL means
 * trainable. ZERO_STAGE and the like override cfg here too. out holds numbers of one rank, with
 * nothing to free. Because no hosts are known, set cfg.deterministic for a hybrid whose replicas lie
 * on one host.
 *
 * Local; any thread.
 * Errors: ARG, BUDGET  as of zero_wrap; *out is not changed */
ZERO_API int zero_plan(const struct zero_tensor *tensors, int32_t n_tensors, const struct zero_config *cfg,
                       struct zero_plan_info *out);

/* Shard a model over all ranks and take over its pointers.
 * Rank 0's parameters go to all ranks, unless cfg.init_from says otherwise. From here on the library
 * sets *param and *grad of every tensor; at stages 2 and 3 they are NULL outside brackets. What they
 * pointed at may be freed, except the memory of buffers. *grad is not read and may be NULL. Memory is
 * checked against the plan before anything is allocated.
 *
 * Collective.
 * Blocks     until all ranks have come, at most cfg.launch.start_timeout_ms
 * Ownership  tensors, names, cfg and the arrays in it are copied. The pointers at param and grad, and what
 *            callbacks are given, must stay in place until zero_unwrap. Close *out by zero_unwrap
 * Errors     all ranks fail, and *out is NULL:
 *            ARG, NOTSUP, BUDGET  the message names the field or the tensor
 *            NOMEM                with the table of the plan
 *            MISMATCH             what differs between ranks
 *            PEER, TIMEOUT        which rank is missing */
ZERO_API int zero_wrap(zero_ctx **out, const struct zero_tensor *tensors, int32_t n_tensors,
                       const struct zero_config *cfg);

/* Open and close a bracket: the model's use of one unit.
 * From zero_begin to the matching zero_end the unit's parameter pointers are valid. In backward its
 * gradient pointers are valid too, and the gradients are zero unless ZERO_GRAD_OVERWRITE. The end of a
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
 * Blocks  host: zero_begin, until the parameters have arrived; zero_end at stages 0 and 1, at the end of a
 *         micro-batch, until gradients are reduced
 * GPU     both enqueue on cfg.stream
 * Errors: ARG     no such unit or phase
 *         ORDER   open already, or not open; backward after zero_norm; no values yet; an assigned pointer;
 *                 more backward brackets of the unit in a step than uses * cfg.grad_accum_steps (the message
 *                 names the unit), as where zero_step was forgotten
 *         BUDGET  open brackets hold every slot that is large enough */
ZERO_API int zero_begin(zero_ctx *z, int32_t unit, enum zero_phase phase);
ZERO_API int zero_end(zero_ctx *z, int32_t unit, enum zero_phase phase);

/* End a micro-batch, in a program without brackets that accumulates gradients (stages 0 and 1).
 * Call it after each backward but the last, which zero_step ends. Gradients are zero when it returns.
 * It does nothing for bracketed units and with cfg.memory.grad_in_place.
 *
 * Collective.
 * Errors: ORDER  a bracket is open, zero_norm was called, or all micro-batches of the step have ended */
ZERO_API int zero_micro(zero_ctx *z);

/* Finish the step: reduce the remaining gradients, clip them, and update the weights.
 * Call once per cfg.grad_accum_steps micro-batches, with a finite lr. If any rank has a gradient that
 * is not finite, or a norm so large that the update would overflow, no rank updates and info->skipped
 * is 1; without info the log says it. Passing info makes the call wait for this step's norm; without
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
 * Returns 0 and fills *info, or returns ZERO_PENDING (which is no error) while this rank does not know
 * the norm yet. Just before the next zero_step is the best time.
 *
 * Local.
 * Errors: ORDER  there was no zero_step yet */
ZERO_API int zero_last_step(zero_ctx *z, struct zero_step_info *info);
enum { ZERO_PENDING = 1 };

/* Send n doubles (0 to 8), such as a loss, along with the next zero_step.
 * Their means over ranks arrive with its outcome, in zero_step's info or by zero_last_step. The sum is
 * exact, so the mean does not depend on order. Given again before the step, the last ones count. With
 * a pipeline the last pipeline stage's values count.
 *
 * Local; n must be equal on all ranks, or the step fails with MISMATCH. values are copied.
 * Errors: ARG  n is out of range, or values is NULL */
ZERO_API int zero_carry(zero_ctx *z, const double *values, int32_t n);

/* Compute the global norm of the step to come, scaled and before clipping, for rules of the program's own.
 * It is NaN if a gradient is not finite. Then call zero_step, or zero_drop to give the step up. Until
 * then backward brackets and zero_micro are refused, and the model leaves its gradients alone.
 *
 * Collective. Blocks until gradients are reduced.
 * Errors: ORDER  zero_step would be refused */
ZERO_API int zero_norm(zero_ctx *z, double *norm);

/* Discard the gradients of the current step.
 * Weights, optimizer state and the number of the step stay as they are.
 *
 * Collective. Blocks at most for the last step's norm and for gradients that are being reduced.
 * Errors: ORDER  a bracket is open, or there is nothing to drop */
ZERO_API int zero_drop(zero_ctx *z);

/* Change a number that the next zero_step and those after it use: "lr_scale", "beta1", "beta2", "eps" or
 * "weight_decay" of a parameter group, or of all with ZERO_ALL; with ZERO_ALL also "clip" or "grad_scale".
 *
 * Call between steps. Checkpoints do not hold these numbers: after zero_load the context keeps its own.
 *
 * Local; every rank makes the same call, else the next zero_step returns ZERO_ERR_MISMATCH.
 * Errors: ARG    no such group or key, out of range, not used by the optimizer, or momentum that was 0 before
 *         ORDER  a step has begun */
ZERO_API int zero_tune(zero_ctx *z, int32_t group, const char *key, double value);

/* Set the number of the last step, and the step count of every unit, to t (0 to 1e17).
 * For optimizer states from elsewhere: write them by zero_write and set the count that they belong to.
 * Bias corrections go on from it.
 *
 * Collective, between steps. Blocks for the last step's norm.
 * Errors: ARG    t is out of range
 *         ORDER  a step has begun */
ZERO_API int zero_set_step(zero_ctx *z, int64_t t);

/* Copy elements [first, first + n) of tensors[tensor], row-major over the whole tensor, to dst.
 * value is an enum zero_value. dst is host memory for n elements, of the tensor's dtype for
 * ZERO_VALUE_PARAM and fp32 otherwise; NULL on a rank that does not want them.
 *
 * Collective (in a pipeline, over the tensor's pipeline stage): same tensor, value and range. Blocks.
 * Errors: ARG       no such tensor, value or range
 *         ORDER     a bracket is open, there are no values yet, or zero_step would be refused for a gradient
 *         MISMATCH  ranks gave different arguments; the context fails */
ZERO_API int zero_read(zero_ctx *z, int32_t tensor, int32_t value, int64_t first, int64_t n, void *dst);

/* Make all parameters readable without brackets, until zero_release_all.
 * *param of every tensor points at the whole tensor, for evaluation, sampling or the program's own
 * save. where is 0 for the device, or ZERO_DEVICE_HOST for host memory. Forward brackets are allowed
 * inside and cost nothing. Calls that train or write are refused. At stages 2 and 3 this takes memory
 * beyond the plan (see memory.md). On a GPU take the pointers anew after both calls.
 *
 * Collective. Block; zero_release_all also waits for what the model has put on cfg.stream.
 * Errors: BUDGET, NOMEM  the message has the bytes; nothing is changed
 *         ARG            another where
 *         ORDER          a bracket is open; gathered already, or nothing is gathered */
ZERO_API int zero_gather_all(zero_ctx *z, int where);
ZERO_API int zero_release_all(zero_ctx *z);

/* Write elements of a tensor: the reverse of zero_read.
 * Rank 0's src counts; others may give NULL. Writing ZERO_VALUE_PARAM also sets the master weights;
 * writing ZERO_VALUE_MASTER also sets the parameter, rounded. A ZERO_TIED tensor is written by the
 * ranks of its first and last pipeline stage, and the first one's src counts.
 *
 * Collective, as zero_read. Blocks. src is read until the call returns.
 * Errors: as of zero_read; also ARG for ZERO_VALUE_GRAD, and ORDER inside zero_gather_all */
ZERO_API int zero_write(zero_ctx *z, int32_t tensor, int32_t value, int64_t first, int64_t n,
                        const void *src);

/* Replace each of n values (0 to 64) by its mean over ranks, for losses and metrics.
 * The sum is exact, so the mean does not depend on order. With a mesh it is the mean over the ranks
 * that have this rank's part of the model.
 *
 * Collective over the world. Blocks.
 * Errors: ARG       n is out of range, or values is NULL
 *         MISMATCH  ranks gave different n; the context fails */
ZERO_API int zero_mean(zero_ctx *z, double *values, int32_t n);

/* Get the factor that makes the step train on the mean over all tokens (or samples) of all ranks.
 * count is what this rank has in all micro-batches of the step to come. The program adds up its
 * tokens' losses and starts backward with *scale for each. The result does not depend on how tokens
 * are spread over ranks and micro-batches. Ranks along tp give the same count; along pp the last
 * pipeline stage's counts.
 *
 * Collective, before the step's first backward, outside brackets. Blocks; it waits least between
 * the forward and the backward of the first micro-batch. Called again, the last one counts.
 * Errors: ARG    a count that is negative or not finite (the message names the rank), or all counts are 0
 *         ORDER  a step has begun */
ZERO_API int zero_loss_scale(zero_ctx *z, double count, double *scale);

/* Tensor parallelism, over the ranks of cfg.mesh's tp: around a pair of products of which the first is cut
 * by columns of its output and the second by rows of its input, so that what lies between them (heads of
 * attention, channels of an MLP) is a rank's own. enter stands before the first: forward, dst is src;
 * backward, dst is the sum over tp of src, the gradient of each rank's part. leave stands behind the
 * second: forward, dst is the sum over tp of src; backward, dst is src. In backward the calls come in
 * reverse order. What is added behind a leave (a bias) is added on every rank, and what lies outside of
 * pairs is computed alike on all. ZERO_BACKWARD_INPUT is backward, too. n elements of dtype (ZERO_F32,
 * ZERO_BF16) on cfg.stream, or in the model's memory on the host; dst may be src, else they lie apart. Sums
 * are added in fp32 in a fixed order and rounded once: every rank of tp has the same bits. Collective over
 * the ranks of tp: all of them give the same n, dtype and phase, else the context ends with
 * ZERO_ERR_MISMATCH. On the host it blocks until the others have come, where it moves something. With tp 1
 * dst is src in both phases.
 * Inside or outside of brackets. ZERO_ERR_ARG, and nothing changed, for another phase or dtype, a negative n,
 * NULL, and dst and src that share some of their memory. */
ZERO_API int zero_tp_enter(zero_ctx *z, void *dst, const void *src, int64_t n, int32_t dtype,
                           enum zero_phase phase);
ZERO_API int zero_tp_leave(zero_ctx *z, void *dst, const void *src, int64_t n, int32_t dtype,
                           enum zero_phase phase);

/* Sequence parallelism: in place of enter and leave, so that what lies between the pairs of products
 * (norms, residual sums, dropout) is computed, and kept, for a rank's own rows alone. n elements are the
 * whole of an activation, and rank r of tp has the r-th of tp equal parts of it, n / tp elements; with rows
 * of the sequence outermost a part is whole rows. gather stands in place of enter: forward, dst (n) is
 * every rank's src (n / tp) in their order; backward, dst (n / tp) is this rank's part of the sum over tp
 * of src (n). And scatter stands in place of leave: forward, dst (n / tp) is this rank's part of the sum
 * over tp of src (n); in backward, dst (n) is every rank's src (n / tp) in their order. The sums have the
 * bits of enter's and leave's. What is added behind a scatter is added to a rank's own rows, and tensors
 * that are used there have gradients of those rows alone: flag them ZERO_TP_PARTIAL. dst and src lie apart,
 * or the part lies in the whole, where this rank's is. Otherwise as above; ZERO_ERR_ARG also for an n that
 * tp does not divide. */
ZERO_API int zero_tp_gather(zero_ctx *z, void *dst, const void *src, int64_t n, int32_t dtype,
                            enum zero_phase phase);
ZERO_API int zero_tp_scatter(zero_ctx *z, void *dst, const void *src, int64_t n, int32_t dtype,
                             enum zero_phase phase);

/* Each of x (n, fp32, in place) becomes its sum over tp, or the largest of them, NaN where one is NaN: for
 * a loss whose vocabulary is cut, of which ranks need the largest logit, and the sum of exponentials, of
 * each row. Otherwise as above; x is of the host. */
enum { ZERO_TP_SUM = 1, ZERO_TP_MAX = 2 };
ZERO_API int zero_tp_reduce(zero_ctx *z, float *x, int64_t n, int32_t op);

/* Get this rank's next action of the pipeline: the forward or backward of one micro-batch.
 * The schedule decides the order, so keep what a backward needs of its forward by micro-batch, and by
 * pipeline stage if stages_per_rank is above 1. Call it until micro_batch is -1, then call zero_step.
 * With one pipeline stage in, out and kept are NULL, and one program serves both. With several,
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
 * It lasts until zero_next gives a micro_batch of -1. The loss is the last pipeline stage's; call
 * zero_mean on all ranks for its mean.
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
 * Each rank's forward changes its own buffers. zero_save saves rank 0's, with a warning if others
 * differ. zero_read, zero_write, checkpoints and exports handle buffers like other tensors. In a
 * pipeline, rank 0 and all ranks are those of the buffer's pipeline stage.
 *
 * Collective. Blocks, unless the model has no buffers.
 * Errors: MISMATCH  integers differ and how is ZERO_SYNC_MEAN, or ranks gave different how
 *         ORDER     a bracket is open, between actions, or a buffer's pointer is NULL */
ZERO_API int zero_sync_buffers(zero_ctx *z, int32_t how);

/* Collective, blocking (but see cfg.checkpoint.save_async). Saves a new checkpoint into the folder dir, which
 * is made if it is missing (not its parents), as dir/save-SERIAL-step-T: weights, optimizer states, the count
 * of steps, the program's user data and each rank's own. Each rank writes what it owns, as one safetensors
 * file; rank 0 then writes the manifest, which alone makes it a checkpoint. On return it is on the disk:
 * files and folders were synced, and heads and checksums read back. Only then are those beyond the
 * cfg.checkpoint.save_keep latest removed, and what unfinished saves left. All ranks must see one file system
 * there, which is looked at. dir may be relative, to the working directory at the call, and may be a symbolic
 * link. Links inside it are not followed: a save-... that is one is not removed, and any other fails the
 * call. Outside brackets, between steps; with pp above 1 before the first action of a step or after the last,
 * or ZERO_ERR_ORDER, and of the tensors of all stages.
 *
 * dir is locked from the first save into it until zero_unwrap, as one of the latest 8 folders: a save by
 * another context fails with ZERO_ERR_IO and names the holder. The lock ends with the process. Children that
 * it forked after the save keep it, unless they exec.
 *
 * On failure (ZERO_ERR_IO naming the call, file and reason; ZERO_ERR_ARG for names of tensors that are not
 * UTF-8, or too many and too long for a file's header or the manifest; ZERO_ERR_NOMEM) the context is as
 * before, and so are the checkpoints in dir. With cfg.checkpoint.save_async the call waits for the save
 * before it, returns its failure, if any, without beginning another, and leaves writing to a thread;
 * zero_save_wait tells the outcome. */
ZERO_API int zero_save(zero_ctx *z, const char *dir);

/* The same, of a checkpoint that cfg.checkpoint.save_keep does not remove and does not count: a milestone,
 * the best so far, the end of an epoch. It is dir/save-SERIAL-step-T-kept: the name says so, to later runs
 * too, and renaming a checkpoint to or from it is how to change one's mind. zero_load takes it for the latest
 * like any other. ZERO_ERR_MISMATCH, and nothing written, where other ranks call zero_save. */
ZERO_API int zero_save_kept(zero_ctx *z, const char *dir);

/* Collective, blocking. Until the save begun last is on the disk; returns its failure, once. 0 when there is
 * none. zero_save, zero_load and zero_unwrap do the same first. With pp above 1 ZERO_ERR_ORDER between two
 * actions. */
ZERO_API int zero_save_wait(zero_ctx *z);

/* Where the checkpoint is that was saved last, for zero_load, and for copying it elsewhere: *path is
 * dir/save-SERIAL-step-T (or -kept) from the root on, the same on every rank, valid until the next zero_save,
 * zero_save_wait, zero_load or zero_unwrap; NULL when this context has saved none. It is the last one that is
 * known to be on the disk: with cfg.checkpoint.save_async the one begun last from zero_save_wait on, the one
 * before it until then. A save that failed changes nothing. Local; does not wait. */
ZERO_API int zero_get_saved(zero_ctx *z, const char **path);

/* Collective, blocking. Loads a checkpoint: path is one, or a folder of them, of which the one saved last is
 * taken; unfinished ones, and those with a damaged manifest or a file of another size, are skipped and told
 * to cfg.debug.log. Any stage, world, mesh, prefetch and budget loads what any other saved, bit by bit. A
 * damaged block is an error of the rank that reads it. Links inside the folder are not followed. Tensors are
 * matched by name; names, dtypes, shapes and each one's optimizer must be the same. A tensor that was frozen
 * and is now trained, or the reverse, is loaded too: a trained one then begins with fresh optimizer state,
 * and the log names the tensors, and a unit whose step count it shares. Needs host memory for what this rank
 * owns, for the time of the call (but for buffers alone with ZERO_INIT_LATER on the host, before any
 * zero_write). Rank 0 says which it is, and all ranks must find the same files there, on one file system or
 * as copies: their manifests are compared. On failure (ZERO_ERR_IO, ZERO_ERR_ARG for another model; the file
 * and the tensor, or the rank that finds something else, are named) nothing is changed. Outside brackets,
 * between steps; with pp above 1 before the first action of a step or after the last. */
ZERO_API int zero_load(zero_ctx *z, const char *path);

/* The program's own bytes (at most 64 KiB, copied): rank 0's travel with every checkpoint saved afterwards,
 * and zero_load brings them back on every rank; what others give is not used. 0 bytes: none. For what the
 * library does not know: seeds, the position in the data. ZERO_ERR_ARG for more bytes, ZERO_ERR_NOMEM; what
 * was set before stays then. Local; does not wait. */
ZERO_API int zero_set_user_data(zero_ctx *z, const void *data, int64_t bytes);
/* *data: the bytes set or loaded last, the library's, valid until the next zero_set_user_data, zero_load or
 * zero_unwrap; NULL and 0 when there are none. Local; does not wait. */
ZERO_API int zero_get_user_data(zero_ctx *z, const void **data, int64_t *bytes);

/* This rank's own bytes, of any size: the state of its data loader or of its random numbers, a replay buffer.
 * They are copied to host memory that is not in the plan; 0 bytes: none. Each later checkpoint has them, in
 * the rank's file and under its checksums, until the next zero_set_rank_data or zero_load. zero_load checks
 * all of them, each rank a part. Ranks wait cfg.launch.timeout_ms for each other then: raise it for many GB.
 * Ranks may give different sizes, or nothing. Local. */
ZERO_API int zero_set_rank_data(zero_ctx *z, const void *data, int64_t bytes);

/* Of the checkpoint loaded last: *n_saved ranks saved it, which need not be as many as there are now (0: none
 * was loaded), and saved rank saved_rank, of 0..*n_saved - 1, gave *bytes, 0 if none. Any rank may ask for
 * any saved one. n_saved or bytes may be NULL; without bytes saved_rank is not looked at. With bytes:
 * ZERO_ERR_ORDER when no checkpoint was loaded, ZERO_ERR_ARG for another saved_rank. Local; does not wait. */
ZERO_API int zero_find_rank_data(zero_ctx *z, int32_t saved_rank, int32_t *n_saved, int64_t *bytes);

/* Reads bytes [first, first + n) of what saved rank saved_rank gave, from the checkpoint loaded last, to dst.
 * Each block of 1 MiB that is touched is checked again. The call opens the file, so read large pieces.
 * ZERO_ERR_IO if the file is gone, as after a zero_save whose cfg.checkpoint.save_keep removed it. Local,
 * blocking. */
ZERO_API int zero_read_rank_data(zero_ctx *z, int32_t saved_rank, int64_t first, int64_t n, void *dst);

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
 * It needs cfg.debug.trace and has the latest part of a long run.
 *
 * Local. Blocks until what was begun is done.
 * Errors: ARG  cfg.debug.trace is 0
 *         IO   the file cannot be written */
ZERO_API int zero_trace_write(zero_ctx *z, const char *path);

/* Close a context, free everything, and set *z and the model's pointers to NULL.
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
