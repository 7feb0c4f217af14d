/* SPDX-License-Identifier: Apache-2.0 */
/* engine.h: the engine runs a plan: it has the memory, streams and events of one rank, and two threads that
 * take the core's actions. Its state is internal.h's; other folders only call the functions here.
 *
 *   model's thread:  call -> core -> actions -> the model's pointers, the compute stream  (model.c)
 *   loop's thread:   -> queue -> jobs -> the gather and the reduce streams                (issue.c)
 *
 * The model's thread runs the core itself: a decision costs less than handing it over, needs no lock, and
 * cannot depend on the loop's timing. The loop's thread only issues jobs, in the order of the queue, and does
 * not wait.
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

/* The arenas between pipeline stages. Each message has a slot (pipe.c), and tied tensors have their own
 * (tied.c). */
struct zr_pipe_room {
    /* stages of a rank, >= 1, and the ranks that have all of them together */
    int32_t per_rank, pp;
    /* bytes of a slot, a multiple of 4096; of these, bytes that are not sent (cfg.debug.check); and
     * cfg.pipeline.activation_bytes */
    int64_t slot_bytes, guard_bytes, activation_bytes;
    /* messages to the next stage, and back, that may be on their way or in use */
    int32_t n_onward, n_back;
    /* bytes of all tied tensors, a multiple of 4096, 0: there are none; micro-batches whose gradients of them
     * may be on their way */
    int64_t tied_bytes;
    int32_t n_tied;
    /* not 0: the last stage sends only the fp32 sum over a step's n_summed micro-batches, of so many bytes, a
     * multiple of 4096 */
    int64_t tied_sum_bytes;
    int32_t n_summed;
};
int64_t zr_pipe_room_bytes(const struct zr_pipe_room *r);
/* Bytes of the arena for tied tensors, which every stage has. */
int64_t zr_tied_room_bytes(const struct zr_pipe_room *r);
/* Bytes of one tied tensor in it, and of its sum. */
int64_t zr_tied_bytes(const struct zr_tensor *t);
int64_t zr_tied_sum_bytes(const struct zr_tensor *t);

struct zr_engine_parts {
    struct zr_device *dev;
    /* by role; NULL: nobody has the role. One may have two roles: without groups, the one that reduces is
     * also the one of control */
    struct zr_comm *comm[ZR_ROLES];
    /* the plan, and its layout */
    const struct zr_plan *plan;
    const struct zr_options *opt;
    /* opened with zr_engine_issue and the engine; NULL: the model's thread carries out jobs itself */
    struct zr_loop *loop;
    /* the model's compute stream on a GPU */
    void *native_stream;
    /* for several pipeline stages */
    struct zr_pipe_room pipe_room;
    /* the check that dev and the communicators belong to; NULL: cfg.debug.check is off */
    struct zr_check *check;
    /* called once, by the thread that records the first failure; must not block. Other ranks give text to
     * their zr_engine_remote_failure. NULL: not called */
    void (*on_fail)(void *arg, int code, const char *text);
    void *on_fail_arg;
    /* flight recorder of calls, jobs and operations; NULL: none */
    struct zr_flight *flight;
    /* the context's name, for messages; NULL or "": none */
    const char *name;
};

/* Only the memory, because a loop is opened with its address. An engine that is freed is not open, or NULL.
 */
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

/* Carries out one job. arg is the engine. For the loop's thread. */
void zr_engine_issue(void *arg, const struct zr_job *job);
/* For zr_loop_ask: whether the loop's thread can carry out the job without a wait. arg is the engine. */
bool zr_engine_is_ready(void *arg, const struct zr_job *job);

/* For zr_loop_limit: the loop has not moved for ms. Fails the engine, and names the job. arg is the engine.
 */
void zr_engine_stuck(void *arg, int64_t ms);

/* Returns 0, or the first failure with its message set for this thread. Finds failures of communicators and
 * of other ranks. Any thread. */
int zr_engine_status(struct zr_engine *e);
/* Whether a failure is recorded. Does not look at the communicators. Any thread. */
bool zr_engine_has_failed(const struct zr_engine *e);
/* As zr_engine_status, and finds faults of the model (cfg.debug.check). */
int zr_engine_check(struct zr_engine *e);
/* Returns ZR_ERR_ORDER in a process that was forked from the one that opened the engine. That process must
 * not use it, nor close it. */
int zr_engine_check_process(const struct zr_engine *e);
/* Records the first failure, and ends all communicators. Returns code. Any thread. */
int zr_engine_fail(struct zr_engine *e, int code, const char *text);
/* Another rank's on_fail was called with this. A failure that a communicator already knows stays the first,
 * unless it is ZR_ERR_PEER, which is how another rank's failure looks from here. Any thread. */
void zr_engine_remote_failure(struct zr_engine *e, int code, const char *text);

/* ---- training ---- */

/* The outcome of a step. */
struct zr_step_result {
    double grad_norm;
    bool clipped, skipped;
    /* steps that were not skipped, with this one */
    int64_t t;
    int32_t n_carried;
    /* means over ranks of what zr_engine_give gave */
    double carried[ZR_MAX_CARRIED];
};

/* Makes one call to the core, and takes its actions. Blocks only as zero_begin and zero_step say. */
int zr_engine_call(struct zr_engine *e, const struct zr_core_event *ev);
/* Checks before a call that the pointers of its unit, or at a step of all tensors, are as they were stored,
 * and that no other layer of a stacked tensor is open, whose base would move. ZR_ERR_ORDER names the tensor.
 */
int zr_pointers_check(const struct zr_engine *e, const struct zr_core_event *ev);
/* For messages: the program makes a call that every rank must make, other than by zr_engine_call and
 * zr_engine_step. subject: the tensor, or -1; args: a hash of what else must be equal. */
void zr_engine_called(struct zr_engine *e, enum zr_called_name name, int32_t subject, uint64_t args);

/* The program asks for the first action of a step, or of an evaluation. Pipeline stages compare which of the
 * two it is with their first message. */
void zr_engine_begins_pass(struct zr_engine *e, bool evaluates);

/* For the flight recorder: the program enters a call, and leaves it. subject as in zr_engine_called. */
void zr_engine_enter(struct zr_engine *e, enum zr_called_name name, bool backward, int32_t subject);
void zr_engine_leave(struct zr_engine *e);

/* Makes the step. If result is not NULL, waits for the norm. */
int zr_engine_step(struct zr_engine *e, float lr, struct zr_step_result *result);
/* Gives n values of this rank to the next zr_engine_step, as many on every rank. Local. */
void zr_engine_give(struct zr_engine *e, const double *values, int32_t n);
/* Returns the outcome of the last step, without a wait. *known is false if it is not there yet. */
int zr_engine_last(struct zr_engine *e, bool *known, struct zr_step_result *result);
/* Waits for the last step's norm, and takes its outcome over. zr_engine_facts is right afterwards. */
int zr_engine_settle(struct zr_engine *e);
/* Waits for the norm of the gradients so far, as zr_engine_step will find it. A second call gives the same.
 */
int zr_engine_norm(struct zr_engine *e, double *norm);
/* Gives the step up, with its gradients. */
int zr_engine_drop(struct zr_engine *e);

/* Numbers of a step that may change between steps (tune.c). */
struct zr_tuned {
    struct zr_optim optim[ZR_MOST_OPTIMS];
    float clip;
    double grad_scale;
    /* micro-batches of the step; set by zr_engine_set_accum */
    int32_t grad_accum_steps;
    /* before the first step: states were written, loaded or are those of other steps */
    bool has_states;
    /* the engine's own: the last one that reads it; 0: none does */
    uint64_t last_job;
};
/* Returns the numbers of the next step, to be changed at once, alike on every rank. Between steps only. Waits
 * until the step before the last has been issued. */
struct zr_tuned *zr_engine_tune(struct zr_engine *e);
/* The same, only to be read. Local. */
const struct zr_tuned *zr_engine_tuned(const struct zr_engine *e);
/* The next steps have n micro-batches, at most zr_most_micro_batches of the options. Between steps only, with
 * one pipeline stage. Every rank gives the same. */
void zr_engine_set_accum(struct zr_engine *e, int32_t n);
/* Sets the number of the last step, and the count of every unit, to t, to which the optimizer's states
 * belong. Between steps. Every rank gives the same. Waits for the last step's norm. */
int zr_engine_set_step(struct zr_engine *e, int64_t t);
/* How many steps have updated the unit; the engine is settled. */
int64_t zr_engine_unit_step(const struct zr_engine *e, int32_t unit);
void zr_engine_set_unit_step(struct zr_engine *e, int32_t unit, int64_t t);
/* Messages count steps on from there: last is the number of the last step that was made. Every rank does so
 * between the same two calls. zr_engine_set_step does it in the next step, for ranks may call that one at
 * different times. */
void zr_engine_renumber(struct zr_engine *e, int64_t last);
/* A hash of what all ranks must give alike: these numbers, the step's number, and how many values it carries.
 */
uint32_t zr_tuned_digest(const struct zr_engine *e, int32_t n_carried);

/* Points the model at its resident parameters and gradients, at stages 0 and 1 and if there are values; else
 * at NULL. */
void zr_engine_point(struct zr_engine *e, bool values);
/* Sets all pointers to NULL, but those that the model has assigned. */
void zr_engine_unpoint(struct zr_engine *e);

/* ---- where it stands ---- */

/* As the functions of the core with these names (core.h). */
int32_t zr_engine_open_unit(const struct zr_engine *e);
bool zr_engine_between_steps(const struct zr_engine *e);
bool zr_engine_is_complete(const struct zr_engine *e);
bool zr_engine_wrote_nothing(const struct zr_engine *e);
bool zr_engine_holds_all(const struct zr_engine *e);

struct zr_engine_facts {
    /* calls of zr_engine_step; the number of the last one, which goes on after a load */
    int64_t n_steps, last_step;
    /* the first unit that the last one left out; -1: none */
    int32_t left_out;
    /* steps that were not skipped */
    int64_t t;
    int64_t n_skipped, n_dropped;
    /* of the model's thread, for parameters */
    int64_t n_waits, wait_ns;
    int64_t n_replans;
    int64_t n_gather, n_reduce;
    /* units gathered and reduced between groups */
    int64_t n_outer_gather, n_outer_reduce;
    /* received since zr_engine_adopt; and of it between groups, with what all ranks exchange where there are
     * any */
    int64_t wire_bytes, outer_bytes;
    /* received of activations, from ranks that have other parts of the model */
    int64_t model_bytes;
    /* and from those of neighbouring pipeline stages */
    int64_t pipe_bytes;
    /* as in struct zr_comm_stats, of all communicators */
    int64_t library_bytes;
    int64_t allocated[ZR_MEM_COUNT];
    const char *backend, *device;
};
void zr_engine_facts(const struct zr_engine *e, struct zr_engine_facts *out);
/* Steps that were skipped, of a checkpoint that was loaded. */
void zr_engine_set_skipped(struct zr_engine *e, int64_t n);
struct zr_device *zr_engine_device(const struct zr_engine *e);
/* A number of this rank that goes into each step from here on (any thread); and the least that a rank gave
 * to the last step that was looked at. */
void zr_engine_report_least(struct zr_engine *e, uint64_t number);
uint64_t zr_engine_least(const struct zr_engine *e);
/* Blocking: cfg.debug.trace. */
int zr_engine_trace_write(struct zr_engine *e, const char *path);
/* "during all_gather seq 12 unit 3", or "after ..."; "" where no communicator can tell. Any thread. */
void zr_engine_last_op(const struct zr_engine *e, char *text, size_t n);

/* Waits until the loop has issued all that the model's thread has given it. Ends where it is stuck: the
 * engine has failed then. */
void zr_engine_await_jobs(struct zr_engine *e);

/* Waits until everything issued so far is done. */
int zr_engine_drain(struct zr_engine *e);

/* ---- all parameters (gather_all.c) ---- */

/* bytes     memory for this besides the plan's. apart: host memory, on a device that has its own
 * open      allocates it; local
 * gather    gathers all parameters, and points the model there; collective, blocking. where: for the hash of
 *           calls
 * release   points the model back, and frees the memory
 * close     frees the memory */
int64_t zr_engine_all_bytes(const struct zr_engine *e, bool apart);
int zr_engine_all_open(struct zr_engine *e, bool apart);
int zr_engine_all_gather(struct zr_engine *e, int32_t where);
int zr_engine_all_release(struct zr_engine *e);
void zr_engine_all_close(struct zr_engine *e);

/* ---- values, collective and blocking between steps ---- */

/* Read and write elements of a tensor, as zero_read and zero_write. Rank 0's data is written. kind:
 *   -3    the gradient as the update will have it, after zero_norm; only to be read
 *   -2    the parameter in the tensor's dtype
 *   -1    the master weight
 *   i>=0  optimizer state i */
enum { ZR_VALUE_GRAD = -3, ZR_VALUE_PARAM = -2, ZR_VALUE_MASTER = -1 };
int zr_engine_read(struct zr_engine *e, int32_t tensor, int kind, int64_t first, int64_t n, void *dst);
int zr_engine_write(struct zr_engine *e, int32_t tensor, int kind, int64_t first, int64_t n, const void *src);
/* The same for elements of the tensor before it is cut by tp. Each tp rank takes its own. Padding becomes 0.
 */
int zr_engine_write_whole(struct zr_engine *e, int32_t tensor, int kind, int64_t first, int64_t n,
                          const void *src);
/* Buffers (buffers.c); no *param is NULL. read, write: elements of one, of which rank 0's count; dst
 * may be NULL, and src on other ranks. spread: rank 0's values to all. compare: *element is the first that is
 * not rank 0's here, or -1. mean: of f32 and bf16. */
int zr_engine_read_buffer(struct zr_engine *e, int32_t tensor, int64_t first, int64_t n, void *dst);
int zr_engine_write_buffer(struct zr_engine *e, int32_t tensor, int64_t first, int64_t n, const void *src);
int zr_engine_spread_buffer(struct zr_engine *e, int32_t tensor);
int zr_engine_compare_buffer(struct zr_engine *e, int32_t tensor, int64_t *element);
int zr_engine_mean_buffer(struct zr_engine *e, int32_t tensor);
/* Local, blocking: between the model's memory and a row of all of them, zr_buffer_room apart (out of it: in
 * the order of the model's stream). */
int zr_engine_copy_buffers(struct zr_engine *e, char *base, bool into_model);

/* Gives rank 0's buffers to all, and params: takes over the model's parameters from rank 0. */
int zr_engine_adopt(struct zr_engine *e, bool params);
/* The parameters by a callback, as cfg.init in zero.h, which counts elements in the whole tensor
 * (init.c). */
int zr_engine_init(struct zr_engine *e,
                   int (*init)(void *arg, int32_t tensor, int64_t first, int64_t n, void *dst), void *arg);
/* Each of values[0..n) becomes its mean over the ranks of the last pipeline stage that have this rank's tp
 * number. n <= 64. */
int zr_engine_mean(struct zr_engine *e, double *values, int32_t n);
/* buf gets the bytes of the rank of pipeline stage root that has this rank's tp number and its place among
 * data-parallel ranks. Collective over all ranks. */
int zr_engine_broadcast_stages(struct zr_engine *e, int32_t root, void *buf, int64_t bytes);
/* Copies mine (n_bytes <= ZR_EXCHANGE_BYTES) to all[rank * n_bytes] on every rank of the job. */
int zr_engine_exchange(struct zr_engine *e, const void *mine, int64_t n_bytes, void *all);
/* check/replicas.c: with cfg.debug.check, after steps 1, 2, 4, ..., compares the groups' copies (HSDP), and
 * what all tp ranks have whole. Collective, after a step. ZR_ERR_MISMATCH, on every rank, ends the context.
 */
int zr_engine_check_replicas(struct zr_engine *e);

/* ---- pipeline stages (pipe.c) ---- */

/* Activations go on to the next stage, their gradients come back from it. */
enum zr_pipe_way { ZR_PIPE_ONWARD, ZR_PIPE_BACK };

struct zr_pipe_message {
    enum zr_pipe_way way;
    /* from stage edge of the whole model to edge + 1, or back; and of which micro-batch */
    int32_t edge, micro_batch;
};

/* The message's slot in this rank's memory. */
void *zr_engine_pipe_at(const struct zr_engine *e, const struct zr_pipe_message *m);
/* Sends or receives it, once the model is done with the slot, on a stream beside the model's; in the same
 * order as the other rank. Does not wait. */
int zr_engine_pipe_move(struct zr_engine *e, const struct zr_pipe_message *m, bool sends);
/* The model's stream waits until the last message of that slot has moved. On the host, so does the caller. */
int zr_engine_pipe_await(struct zr_engine *e, const struct zr_pipe_message *m);
/* The model has written the slot, or needs it no more, as far as its stream has come. */
int zr_engine_pipe_done(struct zr_engine *e, const struct zr_pipe_message *m);

/* ---- tensors of the first and the last stage (tied.c); without them nothing is done ---- */

/* The first stage takes from here on what the last gives of micro-batches up to that many of the step. */
int zr_engine_tied_expect(struct zr_engine *e, int32_t n_micro);
/* A backward action begins: the last stage's model is shown where its gradients go, zeroed, once there is
 * room; the first stage's brackets begin with what came. */
int zr_engine_tied_begin(struct zr_engine *e, int32_t micro_batch);
/* It is over, and what the last stage has written goes on its way. Where its unit was bracketed there and not
 * here, the first stage makes the bracket. ZR_ERR_ORDER, and nothing changed: the last stage's model wrote
 * such a gradient outside of a bracket, or assigned its *grad. */
int zr_engine_tied_end(struct zr_engine *e);
/* The first stage's values go to the last, whose model waits for them. At first, and where they came from
 * elsewhere; and after a step, which does nothing where nobody trains them. */
int zr_engine_tied_values(struct zr_engine *e);
int zr_engine_tied_step(struct zr_engine *e);

/* ---- tensor parallelism (tensor_parallel.c) ---- */

/* Collectives over the tp ranks of one copy of the model, in the order of the model's stream. On the host
 * they are done when they return. A failure ends the context. call: for messages.
 *
 *   sum        n elements of dtype, added in the fixed tree in fp32 and rounded once
 *   scatter    this rank's 1/tp of the n elements of such a sum
 *   gather     the other way: each rank's 1/tp in src, to n elements in dst
 *   max        the largest of f32 or bf16 in host memory; NaN if one is
 *   broadcast  the bytes in buf of tp rank root
 *
 * dst may be src for sum and max. For scatter and gather they lie apart, or the part lies where it belongs in
 * the whole, and n is a multiple of tp. */
int zr_engine_tp_sum(struct zr_engine *e, enum zr_called_name call, void *dst, const void *src, int64_t n,
                     enum zr_dtype dtype);
int zr_engine_tp_scatter(struct zr_engine *e, enum zr_called_name call, void *dst, const void *src, int64_t n,
                         enum zr_dtype dtype);
int zr_engine_tp_gather(struct zr_engine *e, enum zr_called_name call, void *dst, const void *src, int64_t n,
                        enum zr_dtype dtype);
int zr_engine_tp_max(struct zr_engine *e, enum zr_called_name call, void *dst, const void *src, int64_t n,
                     enum zr_dtype dtype);
int zr_engine_tp_broadcast(struct zr_engine *e, enum zr_called_name call, int32_t root, void *buf,
                           int64_t bytes);
/* With cfg.debug.check, in steps that compare: checks n elements of dtype in host memory. If whole, all tp
 * ranks must have the same. ZR_ERR_MISMATCH names two ranks that differ, and ends the context. Otherwise each
 * should have a contribution of its own, and equal contributions are warned of once. */
int zr_engine_compare_activation(struct zr_engine *e, enum zr_called_name call, const void *x, int64_t n,
                                 enum zr_dtype dtype, bool whole);
/* Adds a tp call of the program to the hash of calls, which the next collective over tp compares. call: a
 * hash of all that must be equal. */
void zr_engine_tp_called(struct zr_engine *e, uint64_t call);
/* Copies on the model's stream. Local. */
int zr_engine_copy(struct zr_engine *e, void *dst, const void *src, int64_t n_bytes);
/* Checks that all tp ranks have the same values of tensors that are not cut. Collective, blocking, between
 * steps. */
int zr_engine_tp_compare(struct zr_engine *e);
/* The same without an error: if they differ, *apart is true and this thread's message says where. */
int zr_engine_tp_find_difference(struct zr_engine *e, bool *apart);
/* Collective, after a step. In steps 1, 2, 4, 8 and 16 of a model in parts: whether all parts have the same
 * gradient of tensors that are not cut (compare_tp.c). ZR_ERR_MISMATCH, on every rank, ends the context. */
int zr_engine_compare_gradients(struct zr_engine *e);

/* Everyone is here and nothing is in flight. */
int zr_engine_barrier(struct zr_engine *e);

/* ---- checkpoints (snapshot.c, restore.c) ---- */

/* One run of values of this rank that a checkpoint holds. */
struct zr_run {
    const struct zr_flat *flat;
    /* as in zr_engine_read */
    int kind;
    /* elements of the flat; n may be 0 */
    int64_t first, n;
    /* bytes of an element */
    int64_t size;
    /* of element first */
    char *at;
    /* bytes, in the snapshot, or where all runs of this walk lie end to end; and how many are kept for it */
    int64_t snapshot_at, snapshot_bytes;
};
/* Flat by flat: what this rank owns, and no other; a non-zero result of fn ends the walk and is returned. */
int zr_engine_runs(struct zr_engine *e, int (*fn)(void *arg, const struct zr_run *run), void *arg);
/* The same for what it reads from a checkpoint: all that it keeps in its group, for nothing is sent between
 * groups. Without groups that is what it owns. */
int zr_engine_runs_to_load(struct zr_engine *e, int (*fn)(void *arg, const struct zr_run *run), void *arg);
/* Calls fn for every range of elements of `flat` in [lo, hi) that belongs to one piece: first is the flat's
 * element. */
typedef int (*zr_range_fn)(void *arg, const struct zr_flat *f, const struct zr_piece *p, int64_t first,
                           int64_t n);
int zr_flat_ranges(const struct zr_layout *l, const struct zr_flat *f, int64_t lo, int64_t hi, zr_range_fn fn,
                   void *arg);

/* plan->snapshot_bytes of the host's memory; NULL: the plan has none. */
char *zr_engine_snapshot(const struct zr_engine *e);
/* Has the loop copy all runs into the snapshot, in the order of the reduce stream: after the last step's
 * update, before the next one's. Does not wait: complete(arg) is called by the stream when all is copied, and
 * never if the context fails before. The one before must have been read by then. */
int zr_engine_take_snapshot(struct zr_engine *e, void (*complete)(void *arg), void *arg);
/* complete is not called from here on: a call that runs is waited for, the copies are not, as after a failure
 * they may never come. The caller holds nothing that complete waits for. */
void zr_engine_forget_snapshot(struct zr_engine *e);
/* Whoever read the last snapshot is known to be done. */
void zr_engine_snapshot_read(struct zr_engine *e);

/* Loading: collective, blocking, between steps. begin: nobody reads a shard any more. Then every rank writes
 * its runs to load (zr_engine_restore_run: n_bytes from host memory, over the whole run), and end spreads
 * what every rank holds of the others: resident parameters, and at stage 0 all state. */
int zr_engine_restore_begin(struct zr_engine *e);
int zr_engine_restore_run(struct zr_engine *e, const struct zr_run *run, const void *src);
int zr_engine_restore_end(struct zr_engine *e);
/* Local, blocking: this rank's optimizer states are zero again, where a load was given up. */
int zr_engine_zero_states(struct zr_engine *e);

#endif
