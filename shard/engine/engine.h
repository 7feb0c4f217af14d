/* SPDX-License-Identifier: Apache-2.0 */
/* engine.h: a plan in motion: memory, streams and events of one rank, and the two hands that take the core's
 * actions. What it consists of is internal.h's; from outside there are only calls.
 *
 *   model's thread:  call -> core -> actions -> the model's pointers, the compute stream  (model.c)
 *   loop's thread:   -> queue -> jobs -> the gather and the reduce streams                (issue.c)
 *
 * The model's thread runs the core itself: a decision costs less than handing it over, needs no lock, and
 * cannot depend on the loop's timing. The loop only issues, in the order of the queue, and waits for nothing.
 *
 * Calls are of the model's thread unless they say otherwise. */
#ifndef ZR_SHARD_ENGINE_H
#define ZR_SHARD_ENGINE_H

#include "comm/comm.h"
#include "shard/engine/loop.h"
#include "shard/plan.h"

struct zr_check;
struct zr_engine;

/* ---- opening, failing, closing ---- */

/* Slots of the arena between pipeline stages (pipe.c): how many messages from a stage to the next, and
 * back, may be on their way, or in use. */
struct zr_pipe_room {
    /* stages of a rank, >= 1, and the ranks that have all of them together */
    int32_t per_rank, pp;
    /* of one message, a multiple of 4096; of it, with cfg.debug.check, room that is not sent; and cfg's
     * number */
    int64_t slot_bytes, guard_bytes, activation_bytes;
    int32_t n_onward, n_back;
    /* of all tied tensors, a multiple of 4096, 0: there are none; and micro-batches whose gradients of them
     * may be on their way (tied.c) */
    int64_t tied_bytes;
    int32_t n_tied;
    /* not 0: the last stage sums them up over so many micro-batches, which are a step's, in fp32 (bytes, a
     * multiple of 4096), and that alone goes */
    int64_t tied_sum_bytes;
    int32_t n_summed;
};
int64_t zr_pipe_room_bytes(const struct zr_pipe_room *r);
/* Of the arena of tied tensors, which every stage has. */
int64_t zr_tied_room_bytes(const struct zr_pipe_room *r);
/* What one of them takes in it; what its sum does. */
int64_t zr_tied_bytes(const struct zr_tensor *t);
int64_t zr_tied_sum_bytes(const struct zr_tensor *t);

struct zr_engine_parts {
    struct zr_device *dev;
    /* By role; NULL: nobody has it. The same one may have two: where all ranks are one group, the one that
     * reduces is also the one of control. */
    struct zr_comm *comm[ZR_ROLES];
    /* with its layout */
    const struct zr_plan *plan;
    const struct zr_options *opt;
    /* NULL or opened with zr_engine_issue and the engine. Without one, jobs are carried out by the model's
     * thread; where that thread computes too (host), it then does all the work itself. */
    struct zr_loop *loop;
    /* the model's compute stream on a GPU */
    void *native_stream;
    /* of a pipeline of several stages */
    struct zr_pipe_room pipe_room;
    /* the check that dev and the communicators belong to; NULL: cfg.debug.check is off */
    struct zr_check *check;
    /* Called once, when the first failure is recorded, by whichever thread records it: text is what another
     * rank gives to its zr_engine_remote_failure. Must not block. NULL: nobody is told. */
    void (*on_fail)(void *arg, int code, const char *text);
    void *on_fail_arg;
    /* what records calls, jobs and operations; NULL: nothing does */
    struct zr_flight *flight;
    /* of the context, for messages; NULL or "": it has none */
    const char *name;
};

/* Memory alone: a loop is opened with its address. Free takes one that is not open; NULL is allowed. */
int zr_engine_new(struct zr_engine **out);
void zr_engine_free(struct zr_engine *e);
/* Everything in parts is borrowed and outlives the engine. Local: streams, events, tables. On failure nothing
 * is left of them. */
int zr_engine_open(struct zr_engine *e, const struct zr_engine_parts *parts);
/* Collective, blocking: the arenas and the optimizer's memory. The parameters are not loaded: see
 * zr_engine_adopt. On failure what was allocated is freed by zr_engine_close (and the arenas with their
 * communicators). */
int zr_engine_allocate(struct zr_engine *e);
/* Local. The loop must have been stopped or never started; one that is not open is left as it is. false:
 * after a failure a communicator's work on the streams does not end; they, the device's memory and the
 * engine's own were left behind, and all that they use must be, too. */
bool zr_engine_close(struct zr_engine *e);

/* Carries out one job. arg is the engine. Loop's thread. */
void zr_engine_issue(void *arg, const struct zr_job *job);
/* Whether a job can be carried out without waiting on the loop's thread, for zr_loop_ask. arg is the engine.
 * Loop's thread. */
bool zr_engine_is_ready(void *arg, const struct zr_job *job);

/* The loop has not moved for ms: fails, and says in which job it stands. For zr_loop_limit. arg is the
 * engine. */
void zr_engine_stuck(void *arg, int64_t ms);

/* 0, or the first failure with its message set for this thread. Failures of a communicator, or of another
 * rank, are found here. Any thread. */
int zr_engine_status(struct zr_engine *e);
/* Whether one is recorded: a load, no look at the communicators. Any thread. */
bool zr_engine_has_failed(const struct zr_engine *e);
/* The same as zr_engine_status, and what the model was seen to do (cfg.debug.check). */
int zr_engine_check(struct zr_engine *e);
/* Fails in a process that was forked from the one that opened it: there it must not be touched, nor closed.
 */
int zr_engine_check_process(const struct zr_engine *e);
/* Records the first failure and ends all communicators. Any thread. Returns code. */
int zr_engine_fail(struct zr_engine *e, int code, const char *text);
/* Another rank's on_fail was called with this. Where a communicator knows of a failure already, that one
 * stays the first, unless it is ZR_ERR_PEER: that is what another rank's failure looks like from here. Any
 * thread. */
void zr_engine_remote_failure(struct zr_engine *e, int code, const char *text);

/* ---- training ---- */

/* What a step found out. */
struct zr_step_result {
    double grad_norm;
    bool clipped, skipped;
    /* the engine's, after it */
    int64_t t;
    int32_t n_carried;
    /* means over ranks of what zr_engine_give gave */
    double carried[ZR_MAX_CARRIED];
};

/* One call, through the core. Blocks only as zero_begin and zero_step say. */
int zr_engine_call(struct zr_engine *e, const struct zr_core_event *ev);
/* Before a call is made: the pointers of its unit, or at a step of all tensors, are as they were stored; and
 * no other layer of a stacked tensor is open, whose base would move. ZR_ERR_ORDER naming the tensor, and
 * nothing changed. */
int zr_pointers_check(const struct zr_engine *e, const struct zr_core_event *ev);
/* The program makes a call that every rank must make, besides those of zr_engine_call and zr_engine_step: for
 * messages. subject: the tensor, or -1; args: of what else must be equal. */
void zr_engine_called(struct zr_engine *e, enum zr_called_name name, int32_t subject, uint64_t args);

/* The program asks for the first action of a step, or of an evaluation: which of the two, all pipeline stages
 * compare with their first message. */
void zr_engine_begins_pass(struct zr_engine *e, bool evaluates);

/* The program is in a call from here on, which counts once its arguments were found to be right; and has left
 * it. For the flight recorder. subject as in zr_engine_called. */
void zr_engine_enter(struct zr_engine *e, enum zr_called_name name, bool backward, int32_t subject);
void zr_engine_leave(struct zr_engine *e);

/* The step: result may be NULL; if not, waits for the norm. */
int zr_engine_step(struct zr_engine *e, float lr, struct zr_step_result *result);
/* n values of this rank that the next zr_engine_step carries; as many on every rank. Local. */
void zr_engine_give(struct zr_engine *e, const double *values, int32_t n);
/* The outcome of the last step, without a wait: *known false: it is not there yet. */
int zr_engine_last(struct zr_engine *e, bool *known, struct zr_step_result *result);
/* Looks at the last step's result, waiting for its norm: what zr_engine_facts says is right afterwards. */
int zr_engine_settle(struct zr_engine *e);
/* The norm of the gradients so far, as zr_engine_step will find it; asked again, the same without another
 * look. Waits for it. */
int zr_engine_norm(struct zr_engine *e, double *norm);
/* Gives the step up, with its gradients. */
int zr_engine_drop(struct zr_engine *e);

/* What steps are taken with, and may change between them (tune.c). */
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
/* Between steps: what the next step is taken with, to be changed at once; every rank gives the same. Waits
 * for the step before the last to have been issued. opt has what the engine began with. */
struct zr_tuned *zr_engine_tune(struct zr_engine *e);
/* The same, to be read. Local. */
const struct zr_tuned *zr_engine_tuned(const struct zr_engine *e);
/* Between steps: the next ones have n micro-batches, at most zr_most_micro_batches of the options, with one
 * pipeline stage. Every rank gives the same. */
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
/* What all ranks must have alike, hashed: these numbers, the step's number, and how many values a step
 * carries. */
uint32_t zr_tuned_digest(const struct zr_engine *e, int32_t n_carried);

/* Points the model at what is resident at stages 0 and 1, for good; at NULL else, and while there are no
 * values. */
void zr_engine_point(struct zr_engine *e, bool values);
/* Sets all of them to NULL, but those that the model assigned since. */
void zr_engine_unpoint(struct zr_engine *e);

/* ---- where it stands ---- */

/* The innermost unit that is open, or -1; whether no backward bracket has ended since the last step; whether
 * the gradients of the step are complete (zr_engine_norm); whether a backward bracket or a contribution is
 * missing for a step; whether all parameters are gathered (zr_engine_all_gather). */
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

/* bytes: of memory that it takes besides the plan's; apart: in memory of the host, though the device has its
 * own. open: takes it; local. gather: collective, blocking; the model's pointers go there; where: for
 * messages and the calls' hash. release: back to where they were, and the memory is given back. close: the
 * memory alone. */
int64_t zr_engine_all_bytes(const struct zr_engine *e, bool apart);
int zr_engine_all_open(struct zr_engine *e, bool apart);
int zr_engine_all_gather(struct zr_engine *e, int32_t where);
int zr_engine_all_release(struct zr_engine *e);
void zr_engine_all_close(struct zr_engine *e);

/* ---- values, collective and blocking between steps ---- */

/* kind: -3 gradient as the update will have it (of a step whose norm was asked for, to be read only), -2
 * parameter in the tensor's dtype, -1 master, i >= 0 state i. See zero_read and zero_write. write: rank 0's
 * data counts. */
enum { ZR_VALUE_GRAD = -3, ZR_VALUE_PARAM = -2, ZR_VALUE_MASTER = -1 };
int zr_engine_read(struct zr_engine *e, int32_t tensor, int kind, int64_t first, int64_t n, void *dst);
int zr_engine_write(struct zr_engine *e, int32_t tensor, int kind, int64_t first, int64_t n, const void *src);
/* The same of elements of the whole tensor: each part takes its own. Padding becomes 0. */
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
/* Each of values[0..n) becomes its mean over the last pipeline stage's ranks that have this rank's part.
 * n <= 64. */
int zr_engine_mean(struct zr_engine *e, double *values, int32_t n);
/* Collective over all ranks. buf gets the bytes of a rank of pipeline stage number root: the one that has
 * this rank's part and its place among data-parallel ranks. */
int zr_engine_broadcast_stages(struct zr_engine *e, int32_t root, void *buf, int64_t bytes);
/* mine (n_bytes <= ZR_EXCHANGE_BYTES) to all[rank * n_bytes] of every rank, those of other parts included. */
int zr_engine_exchange(struct zr_engine *e, const void *mine, int64_t n_bytes, void *all);
/* With cfg.debug.check, after steps 1, 2, 4, ...: whether the groups' copies are equal (HSDP), and what all
 * parts of the model have; else nothing (check/replicas.c). Collective, after a step. ZR_ERR_MISMATCH, on
 * every rank, ends the context. */
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

/* ---- the model in parts (tensor_parallel.c) ---- */

/* Collective over the ranks that have parts of one copy; in the order of the model's stream, and on the host
 * done when they return. call: for messages. sum: of n elements of dtype, added in the fixed tree in fp32 and
 * rounded once, to dst, which may be src. most: the largest of f32 or bf16, in the host's memory, NaN where
 * one is; dst may be src. broadcast: what the rank with part number root has in buf. A failure ends the
 * context. */
int zr_engine_sum_parts(struct zr_engine *e, enum zr_called_name call, void *dst, const void *src, int64_t n,
                        enum zr_dtype dtype);
/* Of n elements, a multiple of how many parts there are: scatter: this rank's part of the sum to dst,
 * each element in the same tree; gather: the parts, in src of each rank, to dst. dst and src lie apart, or
 * the part lies in the whole, where it belongs. */
int zr_engine_scatter_parts(struct zr_engine *e, enum zr_called_name call, void *dst, const void *src,
                            int64_t n, enum zr_dtype dtype);
int zr_engine_gather_parts(struct zr_engine *e, enum zr_called_name call, void *dst, const void *src,
                           int64_t n, enum zr_dtype dtype);
int zr_engine_most_of_parts(struct zr_engine *e, enum zr_called_name call, void *dst, const void *src,
                            int64_t n, enum zr_dtype dtype);
int zr_engine_broadcast_parts(struct zr_engine *e, enum zr_called_name call, int32_t root, void *buf,
                              int64_t bytes);
/* With cfg.debug.check, in the steps that compare: n elements of dtype in the host's memory, of which every
 * part should have the same (whole), or a contribution of its own. call: for messages.
 * ZR_ERR_MISMATCH, which ends the context, names two ranks that differ; contributions that are equal are
 * warned of once. */
int zr_engine_compare_activation(struct zr_engine *e, enum zr_called_name call, const void *x, int64_t n,
                                 enum zr_dtype dtype, bool whole);
/* A call of the program's around parts, whether it moves anything or not, as a hash of all that must be
 * equal: the next that moves compares. */
void zr_engine_parts_called(struct zr_engine *e, uint64_t call);
/* Local: on the model's stream. */
int zr_engine_copy(struct zr_engine *e, void *dst, const void *src, int64_t n_bytes);
/* Collective, blocking, between steps: whether all parts have the same of tensors that are not cut. */
int zr_engine_compare_parts(struct zr_engine *e);
/* The same, without an error: *apart, and this thread's message, say that they have not. */
int zr_engine_find_apart(struct zr_engine *e, bool *apart);
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
