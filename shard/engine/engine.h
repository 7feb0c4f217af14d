/* SPDX-License-Identifier: Apache-2.0 */
/* engine.h: the engine runs a plan. It has the memory, streams and events of one rank, and carries out the
 * core's actions on two threads. Each of its files has its own state; what they share is in internal.h. Other
 * folders only call the functions here.
 *
 *   model's thread:  call -> core -> actions -> the model's pointers, the compute stream  (model.c)
 *   loop's thread:   -> queue -> jobs -> the gather and the reduce streams                (issue.c)
 *
 * The model's thread runs the core itself. A decision costs less than handing it over, needs no lock, and
 * cannot depend on the loop's timing. The loop's thread only issues jobs, in the order of the queue, and does
 * not wait. The model's thread issues jobs, too, before an operation of its own.
 *
 * Functions are for the model's thread unless they say otherwise. */
#ifndef ZR_SHARD_ENGINE_H
#define ZR_SHARD_ENGINE_H

#include "comm/comm.h"
#include "shard/engine/loop.h"
#include "shard/plan.h"

struct zr_check;
struct zr_engine;

/* ---- opening, failing, closing ---- */

/* Sizes of the arenas between pipeline stages. Each message has a slot (pipe.c). Tied tensors have a separate
 * arena (tied.c). */
struct zr_pipe_room {
    /* Pipeline stages of a rank, >= 1; ranks that have all stages together. */
    int32_t per_rank, pp;
    /* Bytes of a slot, a multiple of 4096; bytes of these that are not sent (cfg.debug.check); and
     * cfg.pipeline.activation_bytes. */
    int64_t slot_bytes, guard_bytes, activation_bytes;
    /* Most messages to the next stage, and back, that are on their way or in use at once. */
    int32_t n_onward, n_back;
    /* Bytes of all tied tensors, a multiple of 4096, 0: none; most micro-batches whose gradients of them are
     * on their way at once. */
    int64_t tied_bytes;
    int32_t n_tied;
    /* If not 0, the last stage sends only the fp32 sum over a step's n_summed micro-batches. Bytes of that
     * sum, a multiple of 4096. */
    int64_t tied_sum_bytes;
    int32_t n_summed;
};
int64_t zr_pipe_room_bytes(const struct zr_pipe_room *r);
/* Returns the bytes of the arena for tied tensors, which every pipeline stage has. */
int64_t zr_tied_room_bytes(const struct zr_pipe_room *r);
/* Return the bytes of one tied tensor in that arena, and of its sum. */
int64_t zr_tied_bytes(const struct zr_tensor *t);
int64_t zr_tied_sum_bytes(const struct zr_tensor *t);

/* Functions that read and write whole parts of the file of states: n bytes from offset `at` on. A thread of
 * the device calls them, and between steps the model's thread. On failure they return ZERO_ERR_IO, with a
 * message. */
struct zr_state_io {
    int (*read)(void *arg, void *buf, int64_t n, int64_t at);
    int (*write)(void *arg, const void *buf, int64_t n, int64_t at);
    void *arg;
};

struct zr_engine_parts {
    struct zr_device *dev;
    /* Communicators by role. NULL: nobody has the role. One communicator may have two roles: without groups
     * and pipeline stages, the one that reduces is also the one of control. */
    struct zr_comm *comm[ZR_ROLES];
    /* The plan, which has the layout. */
    const struct zr_plan *plan;
    const struct zr_options *opt;
    /* The loop, opened with zr_engine_issue and the engine. NULL: the model's thread carries out jobs
     * itself. */
    struct zr_loop *loop;
    /* The model's compute stream on a GPU. */
    void *native_stream;
    /* For several pipeline stages. */
    struct zr_pipe_room pipe_room;
    /* For a plan with file_bytes. */
    struct zr_state_io states;
    /* Installs observers (observer.h) when streams and tables are open. NULL: there are none. */
    int (*open_observers)(struct zr_engine *e, const struct zr_engine_parts *parts);
    /* For the observers: the check that dev and the communicators belong to. NULL: cfg.debug.check is off. */
    struct zr_check *check;
    /* Called once, by the thread that records the first failure. It must not block. Other ranks pass the text
     * to their zr_engine_remote_failure. NULL: not called. */
    void (*on_fail)(void *arg, int code, const char *text);
    void *on_fail_arg;
    /* Flight recorder of calls, jobs and operations. NULL: none. */
    struct zr_flight *flight;
    /* The context's name, for messages. NULL or "": none. */
    const char *name;
};

/* Allocates only the state, because a loop is opened with its address. zr_engine_free takes a closed engine,
 * or NULL. */
int zr_engine_new(struct zr_engine **out);
void zr_engine_free(struct zr_engine *e);
/* Opens streams, events and tables. What parts points to must outlive the engine. Local. On failure nothing
 * is left. */
int zr_engine_open(struct zr_engine *e, const struct zr_engine_parts *parts);
/* Allocates the arenas and the optimizer's memory. zr_engine_adopt loads the parameters. Collective,
 * blocking. On failure zr_engine_close frees what was allocated. The communicators free their arenas. */
int zr_engine_allocate(struct zr_engine *e);
/* Closes the engine, if it is open. Its loop must have been stopped, or never started. Local. Returns false
 * if, after a failure, the work of a communicator does not end. Streams, memory and the engine's own state
 * are left behind then, and all that they use must be left too. */
bool zr_engine_close(struct zr_engine *e);

/* Carries out one job. arg is the engine. For zr_loop_open. */
void zr_engine_issue(void *arg, const struct zr_job *job);
/* For zr_loop_ask: whether a thread can carry out the job without a wait. arg is the engine. */
bool zr_engine_is_ready(void *arg, const struct zr_job *job, bool is_loop);

/* For zr_loop_limit: the loop has not moved for ms. Fails the engine, and names the job. arg is the engine.
 */
void zr_engine_stuck(void *arg, int64_t ms);

/* Returns 0, or the first failure with its message set for this thread. Finds failures of communicators and
 * of other ranks. Any thread. */
int zr_engine_status(struct zr_engine *e);
/* Whether a failure is recorded. Does not look at the communicators. Any thread. */
bool zr_engine_has_failed(const struct zr_engine *e);
/* The same as zr_engine_status, and finds faults of the model (cfg.debug.check). */
int zr_engine_check(struct zr_engine *e);
/* Returns ZERO_ERR_ORDER in a process that was forked from the one that opened the engine. That process must
 * not use it, nor close it. */
int zr_engine_check_process(const struct zr_engine *e);
/* Records the first failure, and ends all communicators. Returns code. Any thread. */
int zr_engine_fail(struct zr_engine *e, int code, const char *text);
/* Reports that another rank's on_fail was called with this. A failure that a communicator already knows stays
 * the first, unless it is ZERO_ERR_PEER, which is how another rank's failure looks from here. Any thread. */
void zr_engine_remote_failure(struct zr_engine *e, int code, const char *text);

/* ---- training ---- */

/* Makes one call to the core, and takes its actions. Blocks only as zero_begin and zero_step say. */
int zr_engine_call(struct zr_engine *e, const struct zr_core_event *ev);
/* Checks, before a call, that the pointers of its unit (at a step: of all tensors) are as the library stored
 * them. Also checks that no other layer of a stacked tensor is open, as its base would move. ZERO_ERR_ORDER
 * names the tensor. */
int zr_pointers_check(const struct zr_engine *e, const struct zr_core_event *ev);
/* Records the call that the program is in, so that ranks can compare their calls. Every rank must make it.
 * zr_engine_call and zr_engine_step record theirs. args: a hash of the arguments that must be equal, besides
 * the subject of zr_engine_enter. */
void zr_engine_called(struct zr_engine *e, uint64_t args);

/* Notes that the program asks for the first action of a step, or of an evaluation. Pipeline stages compare
 * which of the two it is with their first message. */
void zr_engine_begins_pass(struct zr_engine *e, bool evaluates);

/* For the flight recorder: the program enters or leaves a call. subject: the unit or tensor, or -1. */
void zr_engine_enter(struct zr_engine *e, enum zr_call_name name, enum zero_phase phase, int32_t subject);
void zr_engine_leave(struct zr_engine *e);

/* Makes the step. If result is not NULL, waits for the norm. */
int zr_engine_step(struct zr_engine *e, float lr, struct zero_step_info *result);
/* After a step, compares what must be equal between ranks. In steps 1, 2, 4, 8 and 16 of a tensor-parallel
 * model these are the gradients of tensors that are not cut (compare_tp.c). In check mode they are the copies
 * of weights too. Collective. ZERO_ERR_MISMATCH, on every rank, ends the context. */
int zr_engine_end_step(struct zr_engine *e);
/* Gives n values of this rank to the next zr_engine_step. Every rank must give the same number. Local. */
void zr_engine_give(struct zr_engine *e, const double *values, int32_t n);
/* Returns the outcome of the last step, without a wait. *known is false if it is not there yet. */
int zr_engine_last(struct zr_engine *e, bool *known, struct zero_step_info *result);
/* Waits for the last step's norm, and takes its outcome over. zr_engine_facts is up to date afterwards. */
int zr_engine_settle(struct zr_engine *e);
/* Waits for the norm of the gradients so far, as zr_engine_step will find it. A second call gives the same.
 */
int zr_engine_norm(struct zr_engine *e, double *norm);
/* Gives up the step and its gradients. */
int zr_engine_drop(struct zr_engine *e);

/* Numbers of a step that may change between steps (tune.c). */
struct zr_tuned {
    struct zr_optim optim[ZR_MAX_OPTIMS];
    float clip;
    double grad_scale;
    /* Micro-batches of the step, set by zr_engine_set_accum. */
    int32_t grad_accum_steps;
    /* Set before the first step if states were written or loaded, or belong to other steps. */
    bool has_states;
    /* For the engine only: the last job that reads these numbers. 0: none. */
    uint64_t last_job;
};
/* Returns the numbers of the next step for the caller to change, at once and equally on every rank. Between
 * steps only. Waits until the step before the last has been issued. */
struct zr_tuned *zr_engine_change_tuned(struct zr_engine *e);
/* Returns them for reading only. Local. */
const struct zr_tuned *zr_engine_tuned(const struct zr_engine *e);
/* The next steps have n micro-batches, at most zr_most_micro_batches of the options. Between steps only, with
 * one pipeline stage, and equal on all ranks. */
void zr_engine_set_accum(struct zr_engine *e, int32_t n);
/* Sets the number of the last step, and the count of every unit, to t, the step that the optimizer's states
 * belong to. Between steps, and equal on all ranks. Waits for the last step's norm. */
int zr_engine_set_step(struct zr_engine *e, int64_t t);
/* Returns or sets how many steps have updated the unit. zr_engine_settle must have been called. */
int64_t zr_engine_unit_step(const struct zr_engine *e, int32_t unit);
void zr_engine_set_unit_step(struct zr_engine *e, int32_t unit, int64_t t);
/* Makes messages count steps on from `last`, the number of the last step. Every rank calls it between the
 * same two calls. zr_engine_set_step does the same, but only in the next step, because ranks may call it at
 * different times. */
void zr_engine_renumber(struct zr_engine *e, int64_t last);
/* Returns a hash of everything that must be equal on all ranks: these numbers, the step's number, and how
 * many values it carries. */
uint32_t zr_tuned_digest(const struct zr_engine *e, int32_t n_carried);

/* Points the model at its parameters and gradients if it has them at all times (stages 0 and 1) and `values`
 * is true: the parameters have values. Otherwise sets its pointers to NULL. */
void zr_engine_point(struct zr_engine *e, bool values);
/* Sets all pointers to NULL, except those that the model has assigned. */
void zr_engine_unpoint(struct zr_engine *e);

/* ---- state and statistics ---- */

/* The same as the functions of the core with these names (core.h). */
int32_t zr_engine_open_unit(const struct zr_engine *e);
bool zr_engine_between_steps(const struct zr_engine *e);
bool zr_engine_is_complete(const struct zr_engine *e);
bool zr_engine_wrote_nothing(const struct zr_engine *e);
bool zr_engine_holds_all(const struct zr_engine *e);

struct zr_engine_facts {
    /* Calls of zr_engine_step; the number of the last one, which counts on after a load. */
    int64_t n_steps, last_step;
    /* The first unit that the last step left out. -1: none. */
    int32_t left_out;
    /* Steps that were not skipped. */
    int64_t t;
    int64_t n_skipped, n_dropped;
    /* Waits of the model's thread for parameters, and their time. */
    int64_t n_waits, wait_ns;
    int64_t n_replans;
    int64_t n_gather, n_reduce;
    /* Units gathered and reduced between groups. */
    int64_t n_outer_gather, n_outer_reduce;
    /* Bytes received since zr_engine_adopt; those of them from other groups, with what all ranks exchange if
     * there are groups. */
    int64_t wire_bytes, outer_bytes;
    /* Bytes of activations received over tp, and over cp. */
    int64_t tp_bytes, cp_bytes;
    /* Bytes received from neighbouring pipeline stages. */
    int64_t pipe_bytes;
    /* As in struct zr_comm_stats, for all communicators. */
    int64_t library_bytes;
    int64_t allocated[ZR_MEM_COUNT];
    const char *backend, *device;
};
void zr_engine_facts(const struct zr_engine *e, struct zr_engine_facts *out);
/* Sets the count of skipped steps, from a checkpoint. */
void zr_engine_set_skipped(struct zr_engine *e, int64_t n);
/* Sets how many elements of the tensor are in earlier pipeline stages, in this rank's part over tp. 0 at
 * first. */
void zr_engine_set_first(struct zr_engine *e, int32_t tensor, int64_t first);
struct zr_device *zr_engine_device(const struct zr_engine *e);
/* Gives a number of this rank that goes into each step from here on (any thread). The second returns the
 * least number of any rank, as of the last step whose outcome was read. */
void zr_engine_report_least(struct zr_engine *e, uint64_t number);
uint64_t zr_engine_least(const struct zr_engine *e);
/* Writes the timeline (cfg.debug.trace). Blocks. */
int zr_engine_trace_write(struct zr_engine *e, const char *path);
/* Writes the last operation, such as "during all_gather seq 12 unit 3" or "after ...", or "" if no
 * communicator knows it. Any thread. */
void zr_engine_last_op(const struct zr_engine *e, char *text, size_t n);

/* Waits until all jobs have been carried out. Returns early if the loop is stuck; the engine has failed
 * then. */
void zr_engine_await_jobs(struct zr_engine *e);

/* Waits until everything issued so far is done. */
int zr_engine_drain(struct zr_engine *e);

/* ---- all parameters (gather_all.c) ---- */

/* Gather all parameters whole.
 *
 *   bytes     returns the memory for this, which the plan does not have. on_host: host memory, on a device
 *             with other memory
 *   open      allocates it; local
 *   gather    gathers all parameters, and points the model there; collective, blocking. where: the
 *             argument of zero_gather_all, which ranks compare
 *   release   points the model back, and frees the memory
 *   close     frees the memory */
int64_t zr_engine_all_bytes(const struct zr_engine *e, bool on_host);
int zr_engine_all_open(struct zr_engine *e, bool on_host);
int zr_engine_all_gather(struct zr_engine *e, int32_t where);
int zr_engine_all_release(struct zr_engine *e);
void zr_engine_all_close(struct zr_engine *e);

/* ---- values, collective and blocking between steps ---- */

/* Read and write elements of a tensor, like zero_read and zero_write. Rank 0's data is written. kind:
 *   -3    the gradient as the update will use it, after zero_norm; read only
 *   -2    the parameter in the tensor's dtype
 *   -1    the master weight
 *   i>=0  optimizer state i */
enum { ZR_VALUE_GRAD = -3, ZR_VALUE_PARAM = -2, ZR_VALUE_MASTER = -1 };
int zr_engine_read(struct zr_engine *e, int32_t tensor, int kind, int64_t first, int64_t n, void *dst);
int zr_engine_write(struct zr_engine *e, int32_t tensor, int kind, int64_t first, int64_t n, const void *src);
/* The same for elements of the whole tensor, which tp cuts. Each tp rank takes its part. Padding becomes
 * 0. */
int zr_engine_write_whole(struct zr_engine *e, int32_t tensor, int kind, int64_t first, int64_t n,
                          const void *src);
/* Calls for buffers (buffers.c). No *param may be NULL.
 *
 *   read      reads elements; every rank gets rank 0's. dst may be NULL
 *   write     writes rank 0's elements on every rank. src may be NULL on other ranks
 *   spread    copies rank 0's values to all ranks
 *   compare   sets *element to the first element here that differs from rank 0's, or to -1
 *   mean      averages an f32 or bf16 buffer over ranks */
int zr_engine_read_buffer(struct zr_engine *e, int32_t tensor, int64_t first, int64_t n, void *dst);
int zr_engine_write_buffer(struct zr_engine *e, int32_t tensor, int64_t first, int64_t n, const void *src);
int zr_engine_spread_buffer(struct zr_engine *e, int32_t tensor);
int zr_engine_compare_buffer(struct zr_engine *e, int32_t tensor, int64_t *element);
int zr_engine_mean_buffer(struct zr_engine *e, int32_t tensor);
/* Copies all buffers between the model's memory and a row of copies, zr_buffer_room bytes each. Copies out of
 * the model's memory are in the order of its stream. Local, blocking. */
int zr_engine_copy_buffers(struct zr_engine *e, char *base, bool into_model);

/* Gives rank 0's buffers to all ranks, and if params is true, its parameters too. */
int zr_engine_adopt(struct zr_engine *e, bool params);
/* Sets the parameters by a callback, like cfg.init in zero.h, which numbers elements within the whole tensor
 * (init.c). */
int zr_engine_init(struct zr_engine *e,
                   int (*init)(void *arg, int32_t tensor, int64_t first, int64_t n, void *dst), void *arg);
/* Replaces each of values[0..n) by its mean over those ranks of the last pipeline stage that have this rank's
 * tp number. n <= 64. */
int zr_engine_mean(struct zr_engine *e, double *values, int32_t n);
/* Copies bytes to buf from the rank in pipeline stage root with this rank's tp and data-parallel numbers.
 * Collective over all ranks. */
int zr_engine_broadcast_stages(struct zr_engine *e, int32_t root, void *buf, int64_t bytes);
/* Copies mine (n_bytes <= ZR_EXCHANGE_BYTES) to all[rank * n_bytes] on every rank. */
int zr_engine_exchange(struct zr_engine *e, const void *mine, int64_t n_bytes, void *all);

/* ---- pipeline stages (pipe.c) ---- */

/* Directions: activations go on to the next stage, and their gradients come back. */
enum zr_pipe_way { ZR_PIPE_ONWARD, ZR_PIPE_BACK };

struct zr_pipe_message {
    enum zr_pipe_way way;
    /* The message goes from pipeline stage `edge` to edge + 1, or back, for this micro-batch. Stages are
     * numbered over the whole model. */
    int32_t edge, micro_batch;
};

/* Returns the message's slot in this rank's memory. */
void *zr_engine_pipe_at(const struct zr_engine *e, const struct zr_pipe_message *m);
/* Sends or receives the message once the model is done with the slot, on a stream of the pair of ranks. Both
 * ranks must move messages in the same order. Does not wait. */
int zr_engine_pipe_move(struct zr_engine *e, const struct zr_pipe_message *m, bool sends);
/* Makes the model's stream wait until the last message of that slot has moved. On the host, the caller waits
 * too. */
int zr_engine_pipe_await(struct zr_engine *e, const struct zr_pipe_message *m);
/* Reports that the model has written the slot, or needs it no more, as of the current position of its
 * stream. */
int zr_engine_pipe_done(struct zr_engine *e, const struct zr_pipe_message *m);

/* ---- tied tensors, which the first and the last stage share (tied.c); no effect without them ---- */

/* Starts to move the micro-batch's gradients from the last stage to the first: on the last stage after the
 * action, on the first before it. If the last stage sends sums, they move with the last micro-batch. */
int zr_engine_tied_move(struct zr_engine *e, int32_t micro_batch);
/* Begins a backward action. The last stage's model gets zeroed memory for its gradients once there is room.
 * Brackets of the first stage begin with the gradients that were received. */
int zr_engine_tied_begin(struct zr_engine *e, int32_t micro_batch);
/* Ends the action. If the unit was bracketed there and not here, the first stage makes the bracket.
 * ZERO_ERR_ORDER: the last stage's model wrote such a gradient outside a bracket, or assigned its *grad.
 * Nothing has changed then. */
int zr_engine_tied_end(struct zr_engine *e);
/* Send the first stage's values to the last stage, whose model waits for them. _values: at first, and when
 * they were set from outside. _step: after a step, if the tensors are trained. */
int zr_engine_tied_values(struct zr_engine *e);
int zr_engine_tied_step(struct zr_engine *e);

/* ---- collectives of the program over tp or cp (mesh_axis.c) ---- */

/* Collectives over an axis of several ranks, in the order of the model's stream. On the host they are done
 * when they return. A failure ends the context. call: for messages.
 *
 *   combine    all_reduce, reduce_scatter, all_gather or all_to_all, as in zr_comm_arrays; sums are added in
 *              the fixed tree in fp32 and rounded once if the communicator is deterministic
 *   max        the largest of f32 or bf16; NaN if one is
 *   broadcast  the bytes in buf of the axis's rank root
 *
 * dst may be src for sums of all and for max. In gathers and reduce_scatters the part may lie at its place in
 * the whole. */
int zr_engine_combine(struct zr_engine *e, enum zero_axis axis, enum zr_call_name call, enum zr_op op,
                      const struct zr_arrays *x);
int zr_engine_axis_max(struct zr_engine *e, enum zero_axis axis, enum zr_call_name call,
                       const struct zr_arrays *x);
int zr_engine_axis_broadcast(struct zr_engine *e, enum zero_axis axis, enum zr_call_name call, int32_t root,
                             void *buf, int64_t bytes);
/* Begin and end a shift: src goes to the rank x->by further. The first does not wait for other ranks over cp;
 * over tp the host does. dst and src belong to the shift until it is ended. */
int zr_engine_shift_begin(struct zr_engine *e, enum zero_axis axis, const struct zr_arrays *x);
int zr_engine_shift_end(struct zr_engine *e, enum zero_axis axis);
/* With cfg.debug.check, in steps that compare: checks the x->n elements of x->src. If whole is true, all
 * ranks of the axis must have the same; ZERO_ERR_MISMATCH names two ranks that differ, and ends the context.
 * Otherwise each rank should have a different contribution, and the first equal ones cause a warning. */
int zr_engine_compare_activation(struct zr_engine *e, enum zero_axis axis, enum zr_call_name call,
                                 const struct zr_arrays *x, bool whole);
/* With cfg.debug.check, in steps that compare: warns if two ranks of the axis have the same elements in
 * x->src, where each should have other rows. Warns also if two ranks have given this array and the one before
 * it in opposite orders, which is seen if each rank has both in one piece of memory. For gathers and
 * all-to-all, on an axis of several ranks. */
int zr_engine_compare_rows(struct zr_engine *e, enum zero_axis axis, enum zr_call_name call,
                           const struct zr_arrays *x);
/* In steps that compare: gives n words of every rank of the axis to all. *all: those of rank 0, 1, ...; NULL:
 * no comparison is due. */
int zr_engine_exchange_words(struct zr_engine *e, enum zero_axis axis, enum zr_call_name call,
                             const int64_t *mine, int32_t n, const int64_t **all);
/* Records a call that all ranks of the axis must make. It also goes into the hash of calls that the next
 * collective over the axis compares. call: a hash of everything that must be equal. */
void zr_engine_axis_called(struct zr_engine *e, enum zero_axis axis, uint64_t call);
/* Copies on the model's stream. Local. */
int zr_engine_copy(struct zr_engine *e, void *dst, const void *src, int64_t n_bytes);
/* Checks that all tp ranks have the same values of tensors that are not cut. Collective, blocking, between
 * steps. */
int zr_engine_tp_compare(struct zr_engine *e);
/* The same without an error. If values differ, *differ is true and this thread's message says where. */
int zr_engine_tp_find_difference(struct zr_engine *e, bool *differ);
/* Waits until every rank is here and nothing is in flight. */
int zr_engine_barrier(struct zr_engine *e);

/* ---- checkpoints (snapshot.c, restore.c) ---- */

/* A run of this rank's values in a checkpoint. */
struct zr_run {
    const struct zr_flat *flat;
    /* As in zr_engine_read, or ZR_SCALE(i). With ZERO_MASTERS_REMAINDER masters are the remainders. */
    int kind;
    /* Elements of the flat for each value: ZR_Q8_BLOCK if the values are scales, else 1. */
    int64_t per;
    /* Values of the flat. n may be 0. */
    int64_t first, n;
    /* Bytes of a value. */
    int64_t size;
    /* Address of value `first`. NULL: it is at byte file_at of the file of states. */
    char *at;
    int64_t file_at;
    /* Byte offset in the snapshot, or in memory where all runs of this walk lie end to end; and the bytes
     * reserved for the run. */
    int64_t snapshot_at, snapshot_bytes;
};
/* Walks the runs that this rank alone owns, flat by flat. A non-zero result of fn ends the walk and is
 * returned. */
int zr_engine_runs(struct zr_engine *e, int (*fn)(void *arg, const struct zr_run *run), void *arg);
/* The same for runs that this rank reads from a checkpoint: everything that it keeps in its group, because
 * nothing is sent between groups. Without groups these are the runs that it owns. */
int zr_engine_runs_to_load(struct zr_engine *e, int (*fn)(void *arg, const struct zr_run *run), void *arg);
/* Calls fn for every range of elements of the flat in [lo, hi) that belongs to one piece. `first` is an
 * element of the flat. */
typedef int (*zr_range_fn)(void *arg, const struct zr_flat *f, const struct zr_piece *p, int64_t first,
                           int64_t n);
int zr_flat_ranges(const struct zr_layout *l, const struct zr_flat *f, int64_t lo, int64_t hi, zr_range_fn fn,
                   void *arg);

/* Returns plan->snapshot_bytes of host memory. NULL: the plan has no snapshot. */
char *zr_engine_snapshot(const struct zr_engine *e);
/* Makes the loop copy all runs into the snapshot, in the order of the reduce stream: after the last step's
 * update, before the next one's. Does not wait. The stream calls complete(arg) when everything is copied, but
 * never if the context fails before. The previous snapshot must have been read. */
int zr_engine_take_snapshot(struct zr_engine *e, void (*complete)(void *arg), void *arg);
/* Prevents later calls of complete. Waits for a call that is running, but not for the copies, which may never
 * end after a failure. The caller must hold nothing that complete waits for. */
void zr_engine_forget_snapshot(struct zr_engine *e);
/* Reports that the last snapshot has been read. */
void zr_engine_snapshot_read(struct zr_engine *e);

/* Loading: collective, blocking, between steps. begin waits until nobody reads a shard. Then every rank
 * writes its runs to load with zr_engine_restore_run, which copies the whole run from host memory. end
 * spreads what a rank holds of other ranks' values: resident parameters, and at stage 0 all state. */
int zr_engine_restore_begin(struct zr_engine *e);
int zr_engine_restore_run(struct zr_engine *e, const struct zr_run *run, const void *src);
int zr_engine_restore_end(struct zr_engine *e);
/* Zeroes this rank's optimizer states after a load that was given up. Local, blocking. */
int zr_engine_zero_states(struct zr_engine *e);

#endif
