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
 * Words. A *rank* is one process of the job, *world* their number. A *unit* is what is gathered together,
 * usually a layer. At stage 1 optimizer state is sharded over the ranks, at stage 2 gradients too, at stage 3
 * parameters too (ZeRO, arXiv:1910.02054; FSDP, arXiv:2304.11277). A *shard* is the part that one rank keeps;
 * a *slot* is memory that units take in turn, while they are gathered or their gradients are written. A
 * *bracket* is a zero_begin/zero_end pair around the model's use of a unit. A *micro-batch* is one forward
 * and backward, and cfg.grad_accum_steps of them, with zero_step behind, are a *step*. A *buffer* is a tensor
 * that is not trained (ZERO_BUFFER). The *host* is the machine, and as a device its CPU and memory.
 *
 * Errors. Every call that can fail returns 0 or a negative enum zero_err, and zero_last_error() then says
 * what, where, and which rank, unit or tensor. (zero_last_step alone may also return ZERO_PENDING, which is
 * above 0 and no error.) A failed call leaves nothing to clean up and changes nothing, except that a failure
 * among ranks (a lost peer, a timeout, ranks that differ) or of a rank's own work (CUDA, optim.update, a
 * fault that cfg.check finds) ends the context, on every rank: each is told, with the rank that found it,
 * every later call returns the same cause, and only zero_unwrap and zero_get_stats are left. Where a call's
 * comment says "nothing changed" of ranks that differ, they were compared first, and the context goes on.
 *
 * "Collective" means: every rank must make the call, in the same order relative to its other collective
 * calls. zero_begin, zero_end and zero_micro are collective in this sense. They wait for other ranks no
 * longer than for what the model is to read or write next: parameters that are being gathered or updated,
 * memory of gradients that are being reduced.
 *
 * Thread-safety: one context is used by one thread at a time (the model's thread). Different contexts, and
 * the functions without a context, are independent. Contexts that are open at the same time have different
 * names (cfg.name). The library's only global state is these names and, with cfg.check, a signal handler and
 * the functions write(), fread() and their like. It never exits, and prints only warnings that no cfg.log
 * receives.
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

/* ZERO_CONFIG_INIT for callers that cannot use it, in languages without C's macros. size: of the struct as
 * the caller has it, all of which is written. The sizes of the other structs, which the library cannot know,
 * are left 0: the caller sets those of the structs that it uses, tensor_size always. ZERO_ERR_ARG when cfg is
 * NULL, or no zero.h up to this library's had a struct of that size; nothing is written then. Local; any
 * thread. */
ZERO_API int zero_config_init(struct zero_config *cfg, size_t size);

/* Applies the text value to the field named key: numbers ("stage" = "3"; bytes also with k, M, G, T, Ki, Mi,
 * Gi or Ti), names ("optimizer" = "lion", "wire_dtype" = "bf16"), ZERO_AUTO by "auto". Neither text is kept.
 * ZERO_ERR_ARG, and nothing changed: an unknown key (the nearest is named), a value out of range (what is
 * allowed is named), a pointer. ZERO_ERR_NOTSUP: the program's struct is older than the field. Local; any
 * thread. */
ZERO_API int zero_config_set(struct zero_config *cfg, const char *key, const char *value);

/* Find out which rank this process is, as zero_wrap will: by cfg's rank and world, its nccl_comm or mpi_comm,
 * or the variables of zero-run, torchrun, Open MPI, MPICH or Slurm, else rank 0 of 1. For what comes before
 * zero_wrap, such as cudaSetDevice(*local_rank). cfg may be NULL: ZERO_CONFIG_INIT; any of rank, world and
 * local_rank (this process's number on its host if the launcher gives one, else the rank) may be NULL.
 * Refuses what zero_wrap would refuse of cfg and the variables (ZERO_ERR_ARG), and changes nothing then.
 * Local: talks to no other rank, and does not wait but for a cfg.nccl_comm that NCCL is still making, at most
 * cfg.timeout_ms. Any thread. */
ZERO_API int zero_find_rank(const struct zero_config *cfg, int32_t *rank, int32_t *world,
                            int32_t *local_rank);

/* A mesh: the ranks, numbered along axes. The axis dp_shard is what stages 1 to 3 cut over, dp_replicate
 * has the groups of a hybrid, and over tp the model itself is cut (tensor parallelism): each rank of it
 * wraps its own part, and all of them compute on the same data. Over pp the model's layers are divided into
 * stages of a pipeline (zero_next). cp is for later versions, and 1. */
typedef struct zero_mesh zero_mesh;
struct zero_axis {
    /* "pp", "dp_replicate", "dp_shard", "cp", "tp": outermost first, in this order */
    const char *name;
    /* ranks along it; -1, of one axis: what the others leave of the world */
    int32_t size;
};

/* Gives in *out, for cfg.mesh, this rank's place on the axes: n_axes of them, which are copied; those left
 * out have size 1. The ranks along the last axis are neighbours: a rank is its number along tp, plus tp
 * times its number along cp, and so on outwards. Rank and world are those of zero_find_rank(cfg). Close it
 * by zero_mesh_close, which a context need not wait for. ZERO_ERR_ARG: an unknown axis, another order, two
 * of -1, a product that is not the world; ZERO_ERR_NOTSUP: cp above 1. Local, as zero_find_rank is;
 * any thread. */
ZERO_API int zero_mesh_open(zero_mesh **out, const struct zero_axis *axes, int32_t n_axes,
                            const struct zero_config *cfg);
/* Frees it, sets *m to NULL and returns 0. NULL and a pointer to NULL are allowed. Local; any thread. */
ZERO_API int zero_mesh_close(zero_mesh **m);
/* This rank's number among those that differ from it in these axes alone, and how many they are: axes is
 * one of them, or several with + between ("dp_replicate+dp_shard"); "dp" is all that the data is cut over,
 * "world" all. A program reads the data of its number in "dp", not in the world: ranks of tp and of pp need
 * the same.
 * rank or size may be NULL. ZERO_ERR_ARG. Local; any thread. */
ZERO_API int zero_mesh_rank(const zero_mesh *m, const char *axes, int32_t *rank, int32_t *size);

/* What zero_wrap would allocate and send, for any stage and world (cfg->world, default 1), without allocating
 * device memory and without talking to anybody. param and grad pointers are not followed; grad non-NULL still
 * means trainable. The environment's ZERO_STAGE and the like override cfg here too. As no host is known, each
 * group of a hybrid is taken for one: where they share a host and grad_accum_steps is above 1, set
 * cfg.deterministic = 1 for the plan that zero_wrap makes. out holds numbers only, nothing to free; bytes are
 * of one rank, and whether a machine has them is not asked. ZERO_ERR_ARG and ZERO_ERR_BUDGET as of zero_wrap;
 * *out is left alone then. Local; any thread. */
ZERO_API int zero_plan(const struct zero_tensor *tensors, int32_t n_tensors, const struct zero_config *cfg,
                       struct zero_plan_info *out);

/* Collective, blocking. Takes over the parameters: rank 0's values are given to all ranks (or cfg.init_from
 * says where they come from; *param that is NULL without is an error), *param and *grad of every tensor are
 * re-pointed (at stages 2 and 3 they are NULL outside brackets, or with cfg.check closed memory), and what
 * they pointed at may be freed afterwards (with cfg.check it was overwritten), but for buffers, whose memory
 * stays the model's. What *grad points at is not read; NULL is allowed. tensors, their names, cfg and
 * cfg->order are copied; the pointers that param and grad are the addresses of must stay where they are until
 * zero_unwrap, and so must what cfg's callbacks are given. *out is the caller's, to be closed by zero_unwrap.
 * On failure all ranks fail, *out is NULL, and nothing has changed. Memory is checked against the plan first:
 * ZERO_ERR_NOMEM comes with the plan's table. ZERO_ERR_ARG, NOTSUP and BUDGET name the field or the tensor,
 * MISMATCH what differs between ranks, PEER and TIMEOUT who did not come within cfg.start_timeout_ms. */
ZERO_API int zero_wrap(zero_ctx **out, const struct zero_tensor *tensors, int32_t n_tensors,
                       const struct zero_config *cfg);

/* Makes unit's parameters readable (and in backward its gradients writable, zeroed unless
 * ZERO_GRAD_OVERWRITE) and points the model at them until the matching zero_end. On the host zero_begin
 * returns when the parameters are readable; on a GPU it only enqueues. zero_end waits at stages 0 and 1
 * alone, where it ends a micro-batch: until the gradients are reduced (on a GPU cfg.stream waits). Each
 * outermost backward bracket gives one gradient contribution, reduced when it ends.
 *
 * Brackets of different units may nest and overlap, and a unit may be open in forward and in backward at once
 * (recompute), but not twice in one phase. At stages 2 and 3 the base of a stacked tensor fits the layer
 * begun last, so two layers of one are open at once only if it has ZERO_POINTER_PER_BEGIN; else the second
 * begin is refused. Once one of them ends, the base fits one that is still open.
 *
 * A backward may be bracketed in two parts, as pipelines use it: ZERO_BACKWARD_INPUT, in which the
 * parameters are there, and ZERO_BACKWARD_WEIGHT, in which the gradient is, alone; a forward bracket inside
 * that has parameters. What is said here of a backward's gradient is of the second part.
 *
 * A step updates the units that had a backward bracket in any of its micro-batches, an empty one too. The
 * others are left out: no decay, no momentum, no step count. cfg.log is told once.
 *
 * At stages 0 and 1 brackets are optional, and buy overlap: a program has backward brackets in every step, or
 * in none, and then all units are updated. With several pipeline stages it has them. In a step with backward
 * brackets, what is written outside of a unit's own may be lost (cfg.check finds it on the host); zero_step
 * refuses a unit that is left out with a gradient that is not zero. cfg.log is told once of a unit that only
 * some micro-batches bracket. From a unit's backward zero_end to the end of the micro-batch its gradient is
 * being reduced, and *grad is NULL (in a step that leaves out units perhaps until the next zero_begin). From
 * then to its next backward nothing reads it, and the model may zero it.
 *
 * Where one rank keeps all of a gradient (stage 0, and world 1), it is f32 and a step reduces it once
 * (grad_accum_steps 1, or grad_in_place), the sum lies in the gradient itself: then *grad is NULL until
 * zero_step. More backward brackets of such a unit than cfg.order declares (without it, one in each
 * micro-batch) take memory beyond the plan, and a warning says so. So they do, of any unit, with a hybrid
 * whose groups are reduced once a step (grad_accum_steps 1, or cfg.deterministic off), where a step has more
 * of them than are declared for all its micro-batches: zero_end, zero_norm or zero_step finds that. Where
 * there is no such memory, the call that finds it returns ZERO_ERR_NOMEM, and the context ends.
 *
 * ZERO_ERR_ARG: no such unit or phase. ZERO_ERR_ORDER: open already, not open, backward after zero_norm,
 * parameters without values, a pointer that the model assigned. ZERO_ERR_BUDGET: open brackets hold all slots
 * that are large enough. Nothing is changed by these. */
ZERO_API int zero_begin(zero_ctx *z, int32_t unit, enum zero_phase phase);
ZERO_API int zero_end(zero_ctx *z, int32_t unit, enum zero_phase phase);

/* Ends a micro-batch, for models without brackets (stages 0 and 1) that accumulate gradients: call it after
 * each backward but the last (zero_step ends that one). Gradients are reduced, and zero when it returns (on a
 * GPU: in the order of cfg.stream). No effect on units that were bracketed; not needed with
 * cfg.grad_in_place. ZERO_ERR_ORDER, and nothing changed, inside a bracket, after zero_norm, and at the
 * grad_accum_steps-th call in a step. */
ZERO_API int zero_micro(zero_ctx *z);

/* Collective. Reduces what is left, clips, updates, and starts gathering the new parameters. lr: learning
 * rate of this step, finite (else ZERO_ERR_ARG) and the same on every rank: where it differs, or the calls
 * since zero_wrap do, no weight is changed and the context ends with ZERO_ERR_MISMATCH, by this call where
 * info is given, else by a later one. Waits for the norm of the step before. info may be NULL; if it is not,
 * the call waits for this step's norm (not for the update). A step is skipped on all ranks if a gradient of
 * any rank is not finite, or if the norm is so large that the update would overflow: after clipping above
 * 1.8e19 if an optimizer keeps squares of the gradient (AdamW, Adam, RMSprop), else above the largest float.
 * Then nothing is updated, 0 is returned, and info->skipped tells, or a warning that names the tensor.
 * Refused with ZERO_ERR_ORDER, and nothing changed, while a bracket is open, when no backward bracket has
 * ended since the last step (of a model that uses them), or when the micro-batches counted are not
 * cfg.grad_accum_steps (which a model without brackets and with grad_accum_steps 1 is trusted to have run).
 * What is counted is the backward brackets of the unit that has most: a multiple of grad_accum_steps. A unit
 * that a pass uses several times, as tied weights are, may have more; but when every unit has had twice
 * grad_accum_steps or more (times its uses in cfg.order), a zero_step was forgotten: this one is refused, and
 * so is the next zero_begin in backward. A model that uses every unit several times in a pass says so in
 * cfg.order.
 * If a unit is left out (zero_begin) and a gradient of it is not zero at stages 0 and 1, the call returns
 * ZERO_ERR_ORDER with the tensor's name, and nothing is changed; on a GPU the context ends, by this call if
 * info is given, else by a later one. A gradient with ZERO_GRAD_OVERWRITE is not looked at.
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

/* The next zero_step carries n (0..8) doubles of this rank, a loss and the like, in the all-reduce of its
 * norm; their means over ranks, with the same bits whatever the order (the sum is exact), come with its
 * outcome: zero_step's info or zero_last_step. Copied; given again, the last ones count; zero_drop forgets
 * them. Of the stages of a pipeline (pp) the last one's count, and come to all. Every rank gives as many,
 * else the step ends the context with ZERO_ERR_MISMATCH. ZERO_ERR_ARG for another n, or NULL. Local; does not
 * wait. */
ZERO_API int zero_carry(zero_ctx *z, const double *values, int32_t n);

/* Collective, blocking. Where a program has a rule of its own on the norm or the loss: reduces what is left,
 * and gives in *norm the global norm of the step to come, scaled and before clipping, as zero_step's info
 * will have it (NaN if a gradient is not finite, so that the step would be skipped). Then zero_step goes on,
 * or zero_drop gives up. Until one of them is called, a backward bracket and zero_micro are refused, and a
 * model without brackets leaves its gradients alone (on the host zero_step refuses what was written since;
 * it looks at the first 4 KiB of each gradient). Forward brackets are free. Asked again, it gives the same
 * number without asking anybody. Refused with ZERO_ERR_ORDER, and nothing changed, if zero_step would be. */
ZERO_API int zero_norm(zero_ctx *z, double *norm);

/* Collective; waits at most for the last step's norm and for gradients that are being reduced. Gives up the
 * step with its gradients, after zero_norm or at any time since its first backward: gradients are zero again,
 * the count of micro-batches starts anew, weights, optimizer states and the number of the step (info.t) stay.
 * Counted in zero_stats.n_dropped. Refused with ZERO_ERR_ORDER, and nothing changed, while a bracket is open,
 * or when there is nothing to drop as far as brackets tell; where every tensor is frozen, as a pipeline stage
 * may be, it is not. */
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

/* Set the number of the last step, and the step count of every unit, to t (0 to 1e17). info.t and checkpoints
 * go on from the number, bias corrections and optim.update from the counts. For optimizer states that come
 * from elsewhere: zero_write them, and set the count that they belong to. Between steps. Every rank gives the
 * same, as of zero_tune. Waits for the last step's norm. */
ZERO_API int zero_set_step(zero_ctx *z, int64_t t);

/* Collective, blocking. Copies elements [first, first + n) of tensors[tensor], row-major over the whole
 * tensor, to dst: the caller's, host memory, n elements of the tensor's dtype (ZERO_VALUE_PARAM) or fp32 (the
 * others). value: enum zero_value. Every rank (of a pipeline, of the stage) gives the same tensor, value and
 * range, else the context ends with ZERO_ERR_MISMATCH; dst may be NULL on ranks that do not want it.
 * ZERO_ERR_ARG for a range or value that the tensor does not have; ZERO_ERR_ORDER inside a bracket, while it
 * has no values, and for a gradient when zero_step would be refused. */
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

/* Collective, blocking. The reverse: src is host memory, of the same dtype, read until the call returns; rank
 * 0's counts, others may give NULL. Writing ZERO_VALUE_PARAM sets the master weights to the same value;
 * writing ZERO_VALUE_MASTER sets the parameter to it, rounded. Errors as of zero_read, but a tensor without
 * values takes them; also ZERO_ERR_ARG for ZERO_VALUE_GRAD, and ZERO_ERR_ORDER between zero_gather_all and
 * zero_release_all. Of a ZERO_TIED tensor the first and the last pipeline stage's ranks make this call, alike
 * and in one order with their other calls of all ranks; the first stage's src counts. All of it goes to the
 * last stage each time, so write it in few calls. Its states the first stage's ranks write alone. */
ZERO_API int zero_write(zero_ctx *z, int32_t tensor, int32_t value, int64_t first, int64_t n,
                        const void *src);

/* Collective, blocking. values (n, 0 to 64, doubles), the caller's, host memory: each becomes its mean over
 * ranks; with the same bits whatever the order (the sum is exact). For losses and metrics. Every rank gives
 * as many, else the context ends with ZERO_ERR_MISMATCH. ZERO_ERR_ARG for another n, or NULL. With a mesh
 * all ranks call it, and each has the mean of those that have its part. */
ZERO_API int zero_mean(zero_ctx *z, double *values, int32_t n);

/* Collective, blocking. For losses that are means over tokens (or samples, or weights) of which ranks and
 * micro-batches have different numbers: padding, masks, documents of different lengths. count: of this
 * rank, in all micro-batches of the step to come; finite, 0 and more; of ranks of tp the same; of pp the last
 * stage's counts. A program
 * that adds up the losses of its tokens, and begins backward with *scale of each, not with one by its own
 * number of them, trains on the mean over all tokens of all ranks and micro-batches: the same mean, however
 * they are spread. *scale has the same bits on all ranks: 1 / (sum of counts) with cfg.grad_sum, else that
 * times grad_accum_steps and ranks (those of dp, with a mesh), which takes back the mean that zero_step
 * takes; cfg.grad_scale comes on top. Called again, the last one counts.
 * Before the step's first backward, outside brackets: between forward and backward of the first micro-batch
 * it waits for the least. A step without, after one with it, is told to cfg.log once. ZERO_ERR_ARG, on all
 * ranks, naming the rank, for another count, and where all are 0 (then skip the step, on all ranks);
 * ZERO_ERR_ORDER when a step has begun. *scale is left alone then, and nothing changed. */
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
 * ZERO_ERR_MISMATCH. On the host it blocks until the others have come, where it moves something. Without a
 * mesh, or with tp 1, dst is src in both phases.
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

/* Gives this rank's next action of the step, when what it reads has come: on the host that is waited for. The
 * order is the schedule's, which the program follows: forward of several micro-batches may come before the
 * first backward, so what a backward needs of its forward is kept by micro-batch, and by stage where
 * stages_per_rank is above 1. With one stage in all, as without a mesh, each micro-batch's forward is
 * followed by its backward, and in, out and kept are NULL: one program for both. Every rank calls it until
 * micro_batch is -1; then zero_step. With several stages brackets are inside actions, of units of the
 * action's stage, a unit's backward inside a backward one, and zero_micro is not called. ZERO_ERR_ORDER, and
 * nothing changed: the action before is not over, a bracket is open. */
ZERO_API int zero_next(zero_ctx *z, struct zero_action *action);
/* The action that zero_next gave is over: what it wrote goes on its way, beside what comes next. Does not
 * wait, while there is room for messages on their way. ZERO_ERR_ORDER, and nothing changed: there is none, a
 * bracket is open. */
ZERO_API int zero_finish(zero_ctx *z);

/* What zero_next gives from here on, up to its next micro_batch of -1, is an evaluation: the forward of
 * grad_accum_steps micro-batches, without backward or a step. The loss is the last stage's: zero_mean, which
 * all ranks call, gives its mean there. Every rank calls this between steps. Local. ZERO_ERR_ORDER, and
 * nothing changed: a step, or an evaluation, has begun. */
ZERO_API int zero_evaluate(zero_ctx *z);

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
 * and inside a bracket or between actions. No buffers: nothing happens, and nobody waits. Beyond that a
 * buffer is read by zero_read (rank 0's), written by zero_write (on all ranks), saved, loaded (on all ranks),
 * exported and imported as other tensors are; it has no ZERO_VALUE_MASTER and no states. In a model in
 * pipeline stages rank 0 and all ranks are those of the buffer's stage, but all ranks of the world call. */
ZERO_API int zero_sync_buffers(zero_ctx *z, int32_t how);

/* Collective, blocking (but see cfg.save_async). Saves a new checkpoint into the folder dir, which is made if
 * it is missing (not its parents), as dir/save-SERIAL-step-T: weights, optimizer states, the count of steps,
 * the program's user data and each rank's own. Each rank writes what it owns, as one safetensors file; rank 0
 * then writes the manifest, which alone makes it a checkpoint. On return it is on the disk: files and folders
 * were synced, and heads and checksums read back. Only then are those beyond the cfg.save_keep latest
 * removed, and what unfinished saves left. All ranks must see one file system there, which is looked at. dir
 * may be relative, to the working directory at the call, and may be a symbolic link. Links inside it are not
 * followed: a save-... that is one is not removed, and any other fails the call. Outside brackets, between
 * steps; with pp above 1 before the first action of a step or after the last, or ZERO_ERR_ORDER, and of the
 * tensors of all stages.
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
 * none. zero_save, zero_load and zero_unwrap do the same first. With pp above 1 ZERO_ERR_ORDER between two
 * actions. */
ZERO_API int zero_save_wait(zero_ctx *z);

/* Where the checkpoint is that was saved last, for zero_load, and for copying it elsewhere: *path is
 * dir/save-SERIAL-step-T (or -kept) from the root on, the same on every rank, valid until the next zero_save,
 * zero_save_wait, zero_load or zero_unwrap; NULL when this context has saved none. It is the last one that is
 * known to be on the disk: with cfg.save_async the one begun last from zero_save_wait on, the one before it
 * until then. A save that failed changes nothing. Local; does not wait. */
ZERO_API int zero_get_saved(zero_ctx *z, const char **path);

/* Collective, blocking. Loads a checkpoint: path is one, or a folder of them, of which the one saved last is
 * taken; unfinished ones, and those with a damaged manifest or a file of another size, are skipped and told
 * to cfg.log. Any stage, world, mesh, prefetch and budget loads what any other saved, bit by bit. A damaged
 * block is an error of the rank that reads it. Links inside the folder are not followed. Tensors are
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
 * saved one: where the world has changed, who goes on from what is the program's to say. One of n_saved
 * and bytes may be NULL; without bytes saved_rank is not looked at. With bytes: ZERO_ERR_ORDER when no
 * checkpoint was loaded, ZERO_ERR_ARG when saved_rank is none of its ranks. Local; does not wait. */
ZERO_API int zero_find_rank_data(zero_ctx *z, int32_t saved_rank, int32_t *n_saved, int64_t *bytes);

/* Reads bytes [first, first + n) of what saved rank saved_rank gave, from the checkpoint loaded last, to dst.
 * zero_load has checked all of it, and brings none of it to memory; here each block of 1 MiB that is touched
 * is checked once more. The file must still be there: read before a zero_save whose cfg.save_keep removes
 * that checkpoint, else ZERO_ERR_IO. Every call opens the file, so read large pieces. Local, blocking. */
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

/* This rank's numbers, of a context that has failed too. Local; does not wait. ZERO_ERR_ARG where z or out is
 * NULL, or the configuration has no stats_size. */
ZERO_API int zero_get_stats(zero_ctx *z, struct zero_stats *out);

/* Writes this rank's timeline to the file path as Chrome trace JSON (Perfetto reads it): brackets,
 * collectives, steps. Needs cfg.trace (else ZERO_ERR_ARG), and has the latest part of a long run. Not
 * collective: each rank to a file of its own. Waits until what was begun is done. ZERO_ERR_IO. */
ZERO_API int zero_trace_write(zero_ctx *z, const char *path);

/* Collective and blocking when the context is healthy, local when it has failed. Frees everything and sets *z
 * to NULL, also when it returns an error: that of an asynchronous save, or what ended the context. Pointers
 * the library gave to the model are dead, and set to NULL. NULL and pointers to NULL are allowed. In a forked
 * child: ZERO_ERR_ORDER, and only *z is changed. Where a thread of the library's does not come back from a
 * driver or, on a GPU, from optim.update, it keeps the context's memory, a warning says so, and the process
 * should end. */
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
