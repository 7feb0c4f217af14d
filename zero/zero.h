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
 * Words. A *rank* is a process of the job; the *world* is all of them, and also their number. A *unit*,
 * usually a layer, is gathered whole. Stage 1 shards optimizer state over the ranks, stage 2 also gradients,
 * and stage 3 also parameters (ZeRO, arXiv:1910.02054; FSDP, arXiv:2304.11277). A *shard* is what one rank
 * keeps, and a *slot* is memory that gathered units use in turn. A *bracket* is a zero_begin/zero_end pair
 * around the model's use of a unit. A *micro-batch* is one forward and backward. A *step* is
 * cfg.grad_accum_steps micro-batches and zero_step. A *buffer* is state that is not trained. A *host* is the
 * ranks that can map each other's memory, usually a machine. The device "host" is the CPU.
 *
 * Errors. Every call that can fail returns 0 or a negative enum zero_err, and zero_last_error() explains it.
 * A failed call changes nothing. But if a rank is lost, ranks disagree, or a rank's own work fails (CUDA, the
 * callback optim.update, a fault that check mode finds), the context fails on every rank. Later calls then
 * return the same error, and only zero_unwrap and zero_get_stats work.
 *
 * Comments below leave out three common errors. ARG: a pointer is NULL, or a number is out of range. ORDER:
 * the call is not allowed in a bracket or at this point of a step. MISMATCH: ranks made different calls, or
 * gave different arguments.
 *
 * "Collective" means that every rank makes the call, in the same order. zero_begin, zero_end and zero_micro
 * wait for other ranks only if what the model uses next is still being gathered, updated or reduced.
 *
 * Threads. Only one thread at a time may use a context. Calls on different contexts, or without a context,
 * may run concurrently. Contexts open at the same time must have different names (cfg.launch.name). The
 * library never calls exit(), and installs a signal handler in check mode only.
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

/* A wrapped model, from zero_wrap to zero_unwrap. */
typedef struct zero_ctx zero_ctx;

/* Values that zero_read and zero_write copy. Frozen tensors and buffers have ZERO_VALUE_PARAM alone. */
enum zero_value {
    /* The weights, in the tensor's dtype. */
    ZERO_VALUE_PARAM = 0,
    /* The master weights, in fp32. A tensor without masters gives its weights. */
    ZERO_VALUE_MASTER = 1,
    /* + i: the i-th optimizer state, i from 0, in fp32. */
    ZERO_VALUE_STATE = 2,
    /* The fp32 gradient that the update will use: reduced, scaled and clipped. For zero_read between backward
     * and zero_step. The first such read of a step also does what zero_norm does. With pp above 1 call
     * zero_norm before it. */
    ZERO_VALUE_GRAD = 64
};

/* Write ZERO_CONFIG_INIT to *cfg, for languages without C's macros.
 *
 * size is the caller's sizeof(struct zero_config).
 *
 * Local; any thread.
 * Errors: ARG  size is not that of this library; nothing is written */
ZERO_API int zero_config_init(struct zero_config *cfg, size_t size);

/* Set the field named key from text, such as "stage" to "3" or "optimizer" to "lion".
 *
 * The key is the field's name, alone or after the name of its struct: "states" or "memory.states". "auto"
 * means ZERO_AUTO. A number of bytes may end in k, M, G, T, Ki, Mi, Gi or Ti.
 *
 * Local; any thread.
 * Errors: ARG  an unknown key (the message has the nearest one), or a field that is a pointer */
ZERO_API int zero_config_set(struct zero_config *cfg, const char *key, const char *value);

/* Find this rank's place in cfg.mesh before zero_wrap, for the data loader and for cudaSetDevice.
 *
 * The rank is the one that zero_wrap finds: that of cfg.launch, or of the launcher (launching.md), or 0 of 1.
 * NULL means ZERO_CONFIG_INIT.
 *
 * Local; any thread. Blocks until cfg.launch.nccl_comm is ready, if it is nonblocking.
 * Errors: ARG  the product of cfg.mesh is not the world, or zero_wrap would refuse cfg */
ZERO_API int zero_find_place(const struct zero_config *cfg, struct zero_place *out);

/* Get this rank's rows of a sequence that the ranks of cp share (context_parallel.md).
 *
 * rows is the length of the sequence. The rank has n[0] rows from first[0] on, then n[1] from first[1] on;
 * n[1] may be 0. With cp 1 these are all rows.
 *
 * Local; any thread.
 * Errors: ARG  cp, or 2 * cp with ZERO_CP_ZIGZAG, does not divide rows */
ZERO_API int zero_cp_rows(const struct zero_place *place, int64_t rows, enum zero_cp_order order,
                          int64_t first[2], int64_t n[2]);

/* Count what one rank would allocate and send after zero_wrap, for any stage and world.
 *
 * The world is cfg->launch.world, 1 by default. param and grad are not dereferenced; a grad that is not NULL
 * means trainable. If cfg.deterministic is ZERO_AUTO, replicas (cfg.mesh) are assumed to be on
 * several hosts.
 *
 * Local; any thread.
 * Errors: ARG, BUDGET  as of zero_wrap; *out is not changed */
ZERO_API int zero_plan(const struct zero_tensor *tensors, int32_t n_tensors, const struct zero_config *cfg,
                       struct zero_plan_info *out);

/* Shard a model over all ranks and take over its pointers.
 *
 * Rank 0's parameters go to all ranks, unless cfg.init_from says otherwise. From here on the library sets
 * *param and *grad; at stages 2 and 3 they are NULL outside brackets. What they pointed at may be freed,
 * except buffers.
 *
 * Collective.
 * Blocks     until all ranks have come, at most cfg.launch.start_timeout_ms
 * Ownership  tensors, names, cfg and its arrays are copied. The model's pointer variables and the arguments
 *            of callbacks must remain valid until zero_unwrap
 * Errors     all ranks fail, and *out is NULL:
 *            ARG, NOTSUP, BUDGET  the message names the field or the tensor
 *            NOMEM                with the table of the plan
 *            MISMATCH             what differs between ranks
 *            PEER, TIMEOUT        which rank is missing */
ZERO_API int zero_wrap(zero_ctx **out, const struct zero_tensor *tensors, int32_t n_tensors,
                       const struct zero_config *cfg);

/* Open and close a bracket: the model's use of one unit.
 *
 * In between, the unit's parameter pointers are valid, and in backward its gradient pointers. Gradients start
 * at zero, unless ZERO_GRAD_OVERWRITE is set; with grad_in_place only in the first micro-batch. zero_end in
 * backward starts to reduce the gradient, and adds it to the sum of the step.
 *
 * Brackets of different units may nest and overlap. A unit may be open in forward and backward at once
 * (recompute). Two layers of a stacked tensor may be open at once only with ZERO_POINTER_PER_BEGIN, or below
 * stage 2. ZERO_BACKWARD_INPUT and ZERO_BACKWARD_WEIGHT are a backward in two halves: the first has the
 * parameters, the second the gradient.
 *
 * A step updates the units that had a backward bracket; the log names the others once. A unit may have one
 * backward bracket per micro-batch, or as many as zero_tensor.uses or cfg.memory.order declares.
 *
 * Collective.
 * Blocks  host: zero_begin blocks until the parameters have arrived. At stages 0 and 1 the last backward
 *         zero_end of a micro-batch blocks until gradients are reduced
 * GPU     both enqueue on cfg.stream
 * Errors: ORDER   open already, or not open; parameters have no values yet (ZERO_INIT_LATER); *param or *grad
 *                 set by the program; more backward brackets of the unit in a step than uses *
 *                 grad_accum_steps
 *         BUDGET  open brackets hold every slot that is large enough */
ZERO_API int zero_begin(zero_ctx *z, int32_t unit, enum zero_phase phase);
ZERO_API int zero_end(zero_ctx *z, int32_t unit, enum zero_phase phase);

/* End a micro-batch, in a program without brackets that accumulates gradients (stages 0 and 1).
 *
 * Call it after each backward of a step but the last one, which zero_step ends. Gradients are zero when it
 * returns. It does nothing in programs with brackets, or with cfg.memory.grad_in_place.
 *
 * Collective. */
ZERO_API int zero_micro(zero_ctx *z);

/* Finish the step: reduce the remaining gradients, clip them, and update the weights.
 *
 * Call once per cfg.grad_accum_steps micro-batches. If any rank has a gradient that is not finite, or the
 * update would overflow, no rank updates and info->skipped is 1. Passing info makes the call wait for this
 * step's norm. Without it the call waits for the previous step's norm only, and the log names skipped steps.
 *
 * Collective; lr must be equal on all ranks.
 * Errors: ARG    lr is not finite
 *         ORDER  micro-batches are missing; or a unit has a gradient without brackets, while others use them
 *         ORDER  every gradient of every rank is zero in the first step; the context fails */
ZERO_API int zero_step(zero_ctx *z, float lr, struct zero_step_info *info);

/* Read the outcome of the last zero_step without waiting.
 *
 * Returns 0 and fills *info, or returns ZERO_PENDING (above 0) while this rank does not know the norm yet.
 *
 * Local. */
ZERO_API int zero_last_step(zero_ctx *z, struct zero_step_info *info);
enum { ZERO_PENDING = 1 };

/* Send n doubles (0 to 8), such as a loss, along with the next zero_step.
 *
 * Their means over ranks arrive in its struct zero_step_info, as zero_mean would give them. A second call
 * before the step replaces the values.
 *
 * Local; n must be equal on all ranks. values are copied. */
ZERO_API int zero_carry(zero_ctx *z, const double *values, int32_t n);

/* Compute the global gradient norm of the step to come, scaled and before clipping.
 *
 * It is NaN if a gradient is not finite. zero_step or zero_drop must follow. Until then backward brackets and
 * zero_micro are refused, and the model must not change gradients.
 *
 * Collective; allowed wherever zero_step is. Blocks until gradients are reduced. */
ZERO_API int zero_norm(zero_ctx *z, double *norm);

/* Discard the gradients of the current step. The step number does not advance.
 *
 * Collective. Blocks at most for the last step's norm and for gradients that are being reduced.
 * Errors: ORDER  there is nothing to drop */
ZERO_API int zero_drop(zero_ctx *z);

/* Change a hyperparameter of a parameter group, from the next step on.
 *
 * key is "lr_scale", "beta1", "beta2", "eps" or "weight_decay". ZERO_ALL sets it in all groups, and allows
 * "clip", "grad_scale" and, if pp is 1, "grad_accum_steps". Checkpoints do not hold these numbers.
 *
 * Local, between steps; every rank makes the same call.
 * Errors: ARG  the optimizer does not use key; or key is beta1, and there is no momentum */
ZERO_API int zero_tune(zero_ctx *z, int32_t group, const char *key, double value);

/* Set the step number and every unit's step count to t (0 to 1e17), as if t steps had been taken.
 *
 * Use it after zero_write of optimizer states from elsewhere: bias corrections go on from t.
 *
 * Collective, between steps. Blocks for the last step's norm. */
ZERO_API int zero_set_step(zero_ctx *z, int64_t t);

/* Copy elements [first, first + n) of tensors[tensor], row-major in its shape, to dst.
 *
 * dst is host memory, of the tensor's dtype for ZERO_VALUE_PARAM and fp32 otherwise; NULL on a rank that does
 * not want them.
 *
 * Collective (in a pipeline, over the tensor's pipeline stage). Blocks.
 * Errors: ORDER  values are missing (ZERO_INIT_LATER) */
ZERO_API int zero_read(zero_ctx *z, int32_t tensor, int32_t value, int64_t first, int64_t n, void *dst);

/* Write elements of a tensor: the reverse of zero_read.
 *
 * Of the ranks with the same tp index the lowest gives src; the others may give NULL. Writing parameters or
 * master weights sets both. Both pipeline stages of a ZERO_TIED tensor make the call, and src is the first
 * one's.
 *
 * Values are rounded to nearest to the form in which they are kept.
 *
 * Collective, as zero_read. Blocks.
 * Errors: ARG  ZERO_VALUE_GRAD; or the elements cut a block of states kept as ZERO_MOMENTS_Q8 */
ZERO_API int zero_write(zero_ctx *z, int32_t tensor, int32_t value, int64_t first, int64_t n,
                        const void *src);

/* Make all parameters readable without brackets, until zero_release_all.
 *
 * *param of every tensor points at the whole tensor: on the device if where is 0, in host memory if it is
 * ZERO_DEVICE_HOST. Forward brackets are allowed inside; calls that train or write are refused. Stages 2 and
 * 3 take memory beyond the plan (memory.md). On a GPU take the pointers anew after both calls.
 *
 * Collective. Both block; zero_release_all also waits for what the model has put on cfg.stream.
 * Errors: BUDGET, NOMEM  the message has the bytes */
ZERO_API int zero_gather_all(zero_ctx *z, int where);
ZERO_API int zero_release_all(zero_ctx *z);

/* Replace each of n values (0 to 64) by its mean over ranks, for losses and metrics.
 *
 * The sum is exact. Ranks along cp count. With tp the mean is over the ranks with the same index along tp.
 * With pp the last pipeline stage's values are used, and all ranks get their mean.
 *
 * Collective over the world. Blocks. */
ZERO_API int zero_mean(zero_ctx *z, double *values, int32_t n);

/* Get the factor that makes the step train on the mean over all tokens (or samples) of all ranks.
 *
 * count is how many tokens this rank has in all micro-batches of the next step. Add up the losses of the
 * tokens, and start backward with *scale for each. Ranks along tp give the same count; along pp the last
 * pipeline stage's is used.
 *
 * Collective, before the step's first backward, outside brackets; a repeated call replaces the count.
 * Blocks.
 * Errors: ARG  a count is negative or not finite (the message names the rank), or all are 0 */
ZERO_API int zero_loss_scale(zero_ctx *z, double count, double *scale);

/* Combine arrays over an axis.
 *
 * zero_all_reduce gives each rank the sum or the largest of every element, zero_all_gather all ranks' src in
 * order, zero_reduce_scatter its part of the sum. zero_all_to_all sends part r of src to rank r, and puts the
 * part from rank r at part r of dst.
 *
 * n counts the elements of the smaller of dst and src; the larger one has n for each rank of the axis. In
 * zero_all_to_all n is one part, and both have a part for each rank. Sums are added in fp32 in a fixed tree
 * and rounded once (NCCL: only with cfg.deterministic). In zero_all_reduce dst may be src. In a gather or
 * scatter the smaller array may lie at this rank's place in the larger one. tensor_parallel.md and
 * context_parallel.md have examples.
 *
 * Collective over the axis; inside or outside brackets.
 * Blocks  host: until the other ranks of the axis have come
 * GPU     enqueues on cfg.stream; arrays on the GPU
 * Errors: ARG  any other overlap; a sum with a dtype other than f32 and bf16, or unaligned on a GPU */
ZERO_API int zero_all_reduce(zero_ctx *z, enum zero_axis axis, void *dst, const void *src, int64_t n,
                             enum zero_dtype dtype, enum zero_reduce op);
ZERO_API int zero_all_gather(zero_ctx *z, enum zero_axis axis, void *dst, const void *src, int64_t n,
                             enum zero_dtype dtype);
ZERO_API int zero_reduce_scatter(zero_ctx *z, enum zero_axis axis, void *dst, const void *src, int64_t n,
                                 enum zero_dtype dtype);

ZERO_API int zero_all_to_all(zero_ctx *z, enum zero_axis axis, void *dst, const void *src, int64_t n,
                             enum zero_dtype dtype);

/* Begin and end one step of a ring: send src to the rank `by` places further along the axis, and receive dst
 * from the rank `by` places back.
 *
 * by counts around the ring, and may be negative. Other calls are allowed while a shift is open. One shift
 * per axis is open at a time. Until zero_shift_end dst must not be used, and src not be changed.
 * zero_shift_end waits after a failure, too.
 *
 * Collective over the axis.
 * Blocks  host: zero_shift_end, until dst has arrived; zero_shift_begin over tp, or for more than 1 GiB
 * GPU     zero_shift_end lets cfg.stream wait
 * Errors: ARG    dst and src overlap
 *         ORDER  a shift is open, or none */
ZERO_API int zero_shift_begin(zero_ctx *z, enum zero_axis axis, int32_t by, void *dst, const void *src,
                              int64_t n, enum zero_dtype dtype);
ZERO_API int zero_shift_end(zero_ctx *z, enum zero_axis axis);

/* Copy bytes of buf from rank root of an axis to the others, such as a sampled token.
 *
 * root is a rank's number along the axis.
 *
 * Collective over the axis; with ZERO_AXIS_PP over the world, before the first or after the last
 * action of zero_next. There it blocks until the others have come, elsewhere as zero_all_reduce. */
ZERO_API int zero_broadcast(zero_ctx *z, enum zero_axis axis, int32_t root, void *buf, int64_t bytes);

/* Assert that all ranks of an axis have the same n elements in src, which is memory of cfg.device.
 *
 * With cfg.debug.check they are compared in steps 1, 2, 4 and so on. Without it nothing is read or sent.
 *
 * Collective over the axis.
 * Errors: MISMATCH  src differs on two ranks, which the message names; the context fails */
ZERO_API int zero_expect_equal(zero_ctx *z, enum zero_axis axis, const void *src, int64_t n,
                               enum zero_dtype dtype);

/* Assert that the ranks of cp together have each of the rows 0 to rows - 1 of a sequence once.
 *
 * first and n are as in zero_cp_rows. With cfg.debug.check they are compared in steps 1, 2, 4 and so on.
 *
 * Collective over cp.
 * Errors: MISMATCH  a row that two ranks have, or none, which the message names; the context fails */
ZERO_API int zero_expect_rows(zero_ctx *z, int64_t rows, const int64_t first[2], const int64_t n[2]);

/* Get this rank's next action of the pipeline: the forward or backward of one micro-batch.
 *
 * The schedule decides the order, so store what backward needs for each micro-batch and pipeline stage. Call
 * it until micro_batch is -1, then call zero_step. With one pipeline stage action->in, out and kept are NULL.
 * With several, brackets are inside actions, and zero_micro is not called.
 *
 * Collective. Blocks on the host until the action's input has arrived. */
ZERO_API int zero_next(zero_ctx *z, struct zero_action *action);

/* End the action that zero_next gave; its output goes to the next pipeline stage.
 *
 * Collective. Blocks only while no message buffer is free. */
ZERO_API int zero_finish(zero_ctx *z);

/* Make the next actions an evaluation: the forward of grad_accum_steps micro-batches.
 *
 * It lasts until micro_batch is -1.
 *
 * Local; every rank calls it, between steps. */
ZERO_API int zero_evaluate(zero_ctx *z);

/* How zero_sync_buffers makes the ranks' buffers equal. */
enum zero_sync {
    /* The exact mean over ranks; NaN where one is not finite. Integers must be equal already. */
    ZERO_SYNC_MEAN = 1,
    /* Rank 0's values. */
    ZERO_SYNC_RANK0 = 2
};

/* Make the ranks' buffers (ZERO_BUFFER) equal, before an evaluation or zero_save.
 *
 * Each rank's forward changes its own buffers. zero_save saves rank 0's, with a warning if others differ.
 *
 * Collective. Blocks, unless the model has no buffers.
 * Errors: MISMATCH  integers differ, with ZERO_SYNC_MEAN
 *         ORDER     a buffer's pointer is NULL */
ZERO_API int zero_sync_buffers(zero_ctx *z, int32_t how);

/* Options of one zero_save. All zero is the default. */
struct zero_save_options {
    /* 1: a milestone, which save_keep neither counts nor removes. Its name ends in -kept. Default 0. */
    int32_t kept;
};

/* Save a new checkpoint, dir/save-SERIAL-step-T.
 *
 * It holds weights, optimizer states, step counts and what zero_set_data was given. Each rank writes what it
 * owns. When the call returns, it is on the disk and was read back, and the oldest beyond
 * cfg.checkpoint.save_keep are removed. With save_async the call takes a copy and returns, and zero_save_wait
 * or the next save has the outcome.
 *
 * All ranks must see the same dir. It is made if it is missing, and locked until zero_unwrap. options may be
 * NULL.
 *
 * Collective, between steps; outside brackets and actions. Blocks on the disk.
 * Errors: the checkpoints in dir are as before
 *         IO   the message names the file and the reason, or the process that holds the lock
 *         ARG  names of tensors are not UTF-8, or too long for a file's header */
ZERO_API int zero_save(zero_ctx *z, const char *dir, const struct zero_save_options *options);

/* Wait until the last save is on the disk, and get the path of this context's last checkpoint.
 *
 * *path is absolute, equal on all ranks, and valid until the next save, load or unwrap; NULL if there is
 * none. path may be NULL.
 *
 * Collective; outside actions.
 * Errors: those of the save, once */
ZERO_API int zero_save_wait(zero_ctx *z, const char **path);

/* Load a checkpoint, or the latest valid one in a folder of checkpoints.
 *
 * The stage, world, mesh, prefetch and budget may differ from those of the save; the loaded values are
 * bit-identical. Names, dtypes, shapes and optimizers must be equal. A tensor that was frozen and is now
 * trained begins with fresh optimizer state; the log says so. Masters and moments that were saved in another
 * form are converted, to nearest; the log says so. Data of an earlier zero_set_data are dropped.
 *
 * All ranks must find the same files there. Until it ends, the call needs temporary space for a copy of
 * this rank's shards; on a CPU with ZERO_INIT_LATER only for another file of states, if there is one. Masters
 * that are kept as remainders, and values that are converted, need 4 bytes more per element. The space is in
 * host memory, or in states_dir with ZERO_STATES_FILE.
 *
 * Collective, between steps; outside brackets and actions. Blocks on the disk.
 * Errors: IO   the message names the file that is missing or damaged, or the rank that finds a different file
 *         ARG  the checkpoint is of another model; the message names the tensor */
ZERO_API int zero_load(zero_ctx *z, const char *path);

/* The owner of data: the job (rank 0's are stored) or, in zero_set_data only, this rank. */
enum zero_data { ZERO_DATA_JOB = -1, ZERO_DATA_RANK = -2 };

/* Give later checkpoints data of the program, of any size: seeds, the position in the data set.
 *
 * `whose` is the owner, an enum zero_data. Every checkpoint holds them until the next call or zero_load. 0
 * bytes: none.
 *
 * Local.
 * Ownership  data are copied to host memory, which is not in the plan */
ZERO_API int zero_set_data(zero_ctx *z, int32_t whose, const void *data, int64_t bytes);

/* Data of the program in the checkpoint that was loaded last. */
struct zero_data_info {
    /* Bytes of the data asked for; 0: none was saved. */
    int64_t bytes;
    /* Ranks that saved the checkpoint. */
    int32_t n_saved;
};

/* Read bytes [first, first + n) of the program's data from the checkpoint that was loaded last.
 *
 * whose is ZERO_DATA_JOB, or a saved rank from 0 to info->n_saved - 1. Any rank reads any of them. With n 0
 * the call only fills *info. info may be NULL.
 *
 * Local. Blocks on the disk.
 * Errors: ORDER  no checkpoint was loaded
 *         IO     the file is damaged, or was removed by a later zero_save */
ZERO_API int zero_read_data(zero_ctx *z, int32_t whose, int64_t first, int64_t n, void *dst,
                            struct zero_data_info *info);

/* Write the model's weights alone, in the model's dtype, as safetensors for other programs.
 *
 * dir is made if it is missing. It gets model.safetensors, or an index and several files if one would be
 * larger than max_file_bytes (0: 5 GB). An earlier export there is replaced. map has n entries for
 * the tensors of this pipeline stage, equal on all its ranks; NULL: every tensor under its own name.
 *
 * Collective; outside brackets and actions. Blocks on the disk, where only the first rank of each tp shard
 * and pipeline stage writes.
 * Errors: IO   the message names the file
 *         ARG  the message names the entry of map, or weight files in dir that zero_export did not write */
ZERO_API int zero_export(zero_ctx *z, const char *dir, const struct zero_weight *map, int32_t n,
                         int64_t max_file_bytes);

/* Read weights from dir/model.safetensors, or the files of its index, into the weights and master weights.
 *
 * If dir ends in .safetensors and is no folder, it is the path of the only file.
 *
 * F32, BF16 and F16 become f32 exactly, or are rounded once to bf16; other dtypes must be the tensor's own.
 * map is as in zero_export. Optimizer states, and tensors that map does not name, keep their values. If a
 * file cannot be read to its end, some tensors may have new values; the call may be repeated.
 *
 * Collective; outside brackets and actions. Blocks on the disk. Only ranks that would write an
 * export need to see dir.
 * Errors: IO      the message names the file; or the files are of two exports
 *         ARG     the message names the entry of map, or the tensor whose shape differs
 *         NOTSUP  the message names the tensor whose dtype differs */
ZERO_API int zero_import(zero_ctx *z, const char *dir, const struct zero_weight *map, int32_t n);

/* Fill *out with this rank's numbers. Works on a failed context too.
 *
 * Local. */
ZERO_API int zero_get_stats(zero_ctx *z, struct zero_stats *out);

/* Write this rank's timeline to the file path, as Chrome trace JSON for Perfetto.
 *
 * Local. Blocks until operations in flight have finished.
 * Errors: ARG  cfg.debug.trace is 0 */
ZERO_API int zero_trace_write(zero_ctx *z, const char *path);

/* Close a context, free everything, and set *z and the model's pointers (not those of buffers) to NULL.
 *
 * It returns the error of an asynchronous save, or the one that ended the context. *z may be NULL. In a
 * forked child only *z is set, and the call returns ORDER.
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
