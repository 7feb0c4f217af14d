/* SPDX-License-Identifier: Apache-2.0 */
/* internal.h: what an engine consists of, for its own files (and the verifier, which looks inside).
 *
 * Which thread may touch what is said by where it is: `m` is the model's thread's, `i` belongs to whoever
 * carries out jobs (the loop's thread; without a loop, the model's), `s` is shared, by locks and atomics, and
 * what is outside of the three is fixed once the engine is allocated. A job takes what it needs from one side
 * to the other (struct zr_job): zr_model_push is the only place where it does.
 *
 * The arrows between streams are events.h's.
 */
#ifndef ZR_SHARD_ENGINE_INSIDE_H
#define ZR_SHARD_ENGINE_INSIDE_H

#include "kernels/agreement.h"
#include "kernels/first_failure.h"
#include "shard/engine/check/model_check.h"
#include "shard/engine/engine.h"
#include "shard/engine/events.h"
#include "shard/engine/observer.h"
#include "shard/engine/timeline.h"

#include <stdatomic.h>

/* Slices of a tensor whose gradient lies in place, at stages 0 and 1. The model has one pointer for all of
 * them. It is taken away while one is being reduced, unless another is in a bracket: a model that zeroes its
 * gradients meanwhile fails at once, instead of changing what is being added up. */
struct zr_lending {
    int32_t n_in_flight, n_open;
};

/* All parameters, gathered (gather_all.c). */
struct zr_all {
    /* memory of its own, bytes of it; NULL: none is needed */
    char *base;
    int64_t bytes;
    /* (n_tensors) in it; -1: the tensor lies whole elsewhere */
    int64_t *at;
    /* in memory of the host, though the device has its own */
    bool apart;
};

/* What a step carries (zr_engine_give). */
struct zr_given {
    int32_t n;
    double value[ZR_MAX_CARRIED];
};

/* The model's thread. */
struct zr_model_side {
    struct zr_core *core;
    struct zr_action *actions;
    /* the call of the program's that these are of, for messages */
    enum zr_core_event_kind call;
    /* (n_flats) for collectives between steps */
    struct zr_gather_seg *segs;

    /* ---- activations between the model's parts (tensor_parallel.c) */
    /* which `out` the last sum went through */
    int parts_out;
    /* that a gradient which each part should have of its own was the same on all */
    bool said_partial;
    /* that what is added up was the same on all */
    bool said_sum;
    /* that gradients of what is not cut differ by rounding */
    bool said_rounding;
    /* a hash of all collectives over tp so far, those that move nothing included */
    uint64_t parts_calls;
    /* and of the calls that ranks of all pipeline stages make: none of brackets */
    uint64_t world_calls;

    /* ---- jobs that the loop was given */
    /* jobs were pushed, and the loop was not woken for them yet */
    bool unkicked;
    uint64_t n_jobs;
    /* the latest NORM */
    uint64_t norm_job;
    /* (n_units) the last job that writes the unit's parameters */
    uint64_t *unit_job;
    /* (places) the last job that reads the gradient place */
    uint64_t *grad_job;

    /* ---- the model's pointers */
    /* (n_tensors) what was last stored in them */
    void **reported_param, **reported_grad;
    /* (n_tensors) slices that they can reach now */
    int32_t *n_shown_param, *n_shown_grad;
    /* (n_units) */
    bool *param_shown, *grad_shown;
    /* (n_units) where it is shown */
    int32_t *param_slot, *grad_slot;
    /* (n_tensors) stages 0 and 1: may the model have the gradient? */
    struct zr_lending *lending;
    /* (n_units) its gradient is being reduced */
    bool *in_flight;
    /* the units in flight, (n_units) */
    int32_t *flying, n_flying;
    struct zr_all all;

    /* ---- steps */
    /* calls of zero_step */
    uint32_t step;
    /* what is added to them for the job's number of a step, which goes on after a load */
    int64_t step_offset;
    /* the next zero_step finds that anew; a zero_step is under way */
    bool renumber, stepping;
    /* the first unit that the last of them left out; -1: none */
    int32_t left_out;
    /* steps that were not skipped */
    int64_t t;
    /* (n_units) of these, the steps that updated the unit */
    int64_t *unit_t;
    /* (n_units) the step whose outcome is due updates it, unless it is skipped */
    bool *updating;
    int64_t n_skipped, n_dropped;
    /* a step's outcome was not looked at yet */
    bool result_due;
    /* the program asked for it */
    bool result_wanted;
    /* of the last step looked at */
    struct zr_step_result result;
    /* of that step: see zr_engine_least */
    uint64_t least;
    /* the one of tuned_now is the next step's; jobs read both */
    struct zr_tuned tuned[2];
    int tuned_now;
    float lr;
    /* of the step to come, once it was asked for */
    double norm;
    /* what is pushed is of the step to come */
    bool norming;
    /* for the step to come */
    struct zr_given given;
    /* of the last step that was begun, whose job reads it */
    struct zr_given carried;

    int64_t n_waits, wait_ns;
    /* what opening took from the others: not the model's traffic */
    int64_t wire_at_open, outer_at_open, model_at_open;
    int64_t allocated[ZR_MEM_COUNT];
};

/* Whoever carries out jobs. */
struct zr_issuer {
    /* (n_flats) */
    struct zr_gather_seg *gather_segs;
    /* (n_flats) */
    struct zr_reduce_seg *reduce_segs;
    /* (n_units) the next norm does not count its gradient */
    bool *left_out;
    /* read by any thread */
    _Atomic int64_t n_gather, n_reduce, n_outer_gather, n_outer_reduce;
    /* the job that is being carried out, for messages: enum zr_action_kind, 0 for none; and its unit */
    _Atomic int32_t kind, unit;
};

/* Any thread. */
struct zr_shared {
    /* for the step's agreement, of which the least over ranks counts */
    _Atomic uint64_t own_least;
    /* of snapshots; NULL: the plan has none */
    struct zr_snapshot_listener *listener;
    /* The first failure, whoever met it. */
    struct zr_first failure;
    /* when, on zr_now_ns()'s clock; 0: not yet */
    _Atomic int64_t failed_ns;
    /* A wait was given up: the streams are left, with what is on them, which never runs. */
    atomic_bool left;
};

/* A communicator in its role, and the stream that its collectives go on. */
struct zr_role_run {
    /* NULL: nobody has the role; of two roles it may be the same */
    struct zr_comm *comm;
    struct zr_stream *stream;
};

struct zr_engine {
    /* NULL: it is not open */
    struct zr_device *dev;
    /* The communicators by what they are for, and each of them once. */
    struct zr_role_run role[ZR_ROLES];
    struct zr_comm *distinct[ZR_ROLES];
    int n_distinct;
    const struct zr_layout *layout;
    const struct zr_plan *plan;
    struct zr_options opt;
    /* NULL: jobs are carried out at once, on the calling thread */
    struct zr_loop *loop;
    void (*on_fail)(void *arg, int code, const char *text);
    void *on_fail_arg;
    /* NULL: nothing is recorded */
    struct zr_flight *flight;
    /* of the context, for messages; "": it has none */
    const char *name;
    /* Of the world, for messages; and among the ranks of control, which counts world of them. */
    int rank, place, world;
    /* into how many a pipeline stage is cut, and which this rank has; how many stages there are, and which is
     * this rank's: those of control have the same of both (comm/mesh.h). All ranks are n_all. */
    int32_t parts, part, pp, pp_at, n_all;
    /* that place on the axes */
    struct zr_where at;
    /* the process that opened it: no other may use it */
    int pid;
    /* zr_fork_depth when it was opened */
    unsigned forks;

    /* arenas; control_base: what all ranks exchange, which without groups lies in reduce_base */
    char *gather_base, *reduce_base, *control_base;
    /* of activations on their way between parts of the model; NULL: it is whole */
    char *model_base;
    /* and between pipeline stages, and of tensors that two of them have; NULL: there is one */
    char *pipe_base, *tied_base;
    float *master, *state[ZR_MAX_STATES];
    /* plan->snapshot_bytes of host_alloc memory, or NULL */
    char *snapshot;
    /* of the last step; host_alloc memory, valid after step_norm */
    struct zr_agreed *agreed;
    /* (world, ZR_EXCHANGE_BYTES) behind it: what an exchange brought */
    char *words;
    int64_t master_bytes;
    /* (n_tensors) of compare_tp.c, written by a step's NORM */
    struct zr_tp_gradient *tp_gradient;
    /* (n_units) of compare_tp.c, for the same job: the step leaves the unit out */
    bool *tp_left_out;
    /* of one operation of a job: flats of a unit */
    int32_t most_segs;

    /* NULL: no step has any gathers, or reductions, between groups */
    struct zr_stream *compute, *gather_stream, *reduce_stream, *gather_outer_stream, *reduce_outer_stream;
    /* of the pairs of neighbouring stages; NULL: this rank has no such neighbour */
    struct zr_stream *pair_stream[ZR_PAIR_ROLES];
    /* of tied tensors; NULL: this rank has none */
    struct zr_stream *tied_stream;
    struct zr_events ev;
    /* NULL: not kept */
    struct zr_timeline *timeline;
    struct zr_observers observers;
    /* one of them, for the memory that it guards; NULL: cfg.debug.check is off */
    struct zr_model_check *watch;
    /* NULL: there is one pipeline stage */
    struct zr_pipe *pipe;
    /* NULL: no tensor is tied to one of another stage */
    struct zr_tied *tied;

    struct zr_model_side m;
    struct zr_issuer i;
    struct zr_shared s;
};

/* ---- tables.c, for opening and closing ---- */

int zr_tables_open(struct zr_engine *e);
/* Also half opened ones. Of the events, frees the lists alone. */
void zr_tables_close(struct zr_engine *e);

/* ---- pipe.c, for opening and closing ---- */

int zr_pipe_open(struct zr_engine *e, const struct zr_pipe_room *room);
/* Its streams are idle. */
void zr_pipe_close(struct zr_engine *e);

/* ---- tied.c ---- */

int zr_tied_open(struct zr_engine *e, const struct zr_pipe_room *room);
/* Its stream is idle. */
void zr_tied_close(struct zr_engine *e);
/* The last stage gives of the tensor's gradient in this action, and no bracket has begun with it yet. */
bool zr_tied_is_due(const struct zr_engine *e, int32_t tensor);
/* A backward bracket of the unit begins, whose gradient is zero in that slot but for what is due: begins with
 * that. */
int zr_tied_fill(struct zr_engine *e, int32_t unit, int32_t slot);

/* A backward bracket of the unit has ended. */
void zr_tied_bracketed(struct zr_engine *e, int32_t unit);

/* No micro-batch of the next step has begun. */
void zr_tied_forget(struct zr_engine *e);

/* ---- tensor_parallel.c ---- */

/* The unit's gradient is complete in that slot, and about to be reduced: of what each part of the model has a
 * gradient of its own (struct zr_tensor, partial), it becomes their sum, on the model's stream. any: whether
 * there was something to do. */
int zr_partial_sum(struct zr_engine *e, int32_t unit, int32_t slot, bool *any);

struct zr_tag zr_parts_tag(const struct zr_engine *e, enum zr_called_name call, int64_t n, int32_t kind);

/* ---- roles.c ---- */

/* For zr_engine_open: which communicators there are; and, once the streams are open, where they work. */
void zr_roles_take(struct zr_engine *e, struct zr_comm *const comm[ZR_ROLES]);
void zr_roles_streams(struct zr_engine *e);
/* A collective of comm.h on the role's communicator and stream. barrier: one of which only the end counts;
 * of CONTROL, REDUCE or REDUCE_OUTER. */
int zr_role_gather(struct zr_engine *e, enum zr_role role, const struct zr_gather_seg *seg, int n,
                   const struct zr_tag *tag);
/* On another stream, which is behind everything on the role's, as that is behind it. */
int zr_role_gather_on(struct zr_engine *e, enum zr_role role, struct zr_stream *s,
                      const struct zr_gather_seg *seg, int n, const struct zr_tag *tag);
int zr_role_reduce(struct zr_engine *e, enum zr_role role, const struct zr_reduce_seg *seg, int n,
                   const struct zr_tag *tag);
int zr_role_exchange(struct zr_engine *e, enum zr_role role, int64_t off, int64_t slot_bytes,
                     const struct zr_tag *tag);
int zr_role_barrier(struct zr_engine *e, enum zr_role role, const struct zr_tag *tag);
/* From place `root` of the role's ranks to the others. */
int zr_role_broadcast(struct zr_engine *e, enum zr_role role, int64_t off, int64_t bytes, int root,
                      const struct zr_tag *tag);
/* Of all ranks, those of other parts of the model included. */
int zr_world_agree(struct zr_engine *e, int64_t off, int32_t n_sum, int32_t n_max, const struct zr_tag *tag);
/* Of all communicators: whether any may have a failure to tell; the first that has one; all fail; each can
 * take what a job puts on it without a wait; the work of any does not end (zr_comm_ops.stuck); bytes
 * received, but for activations; activations; and of the first by those that join groups: 0 where there is
 * one. */
bool zr_roles_alarmed(const struct zr_engine *e);
int zr_roles_status(const struct zr_engine *e, char *why, size_t n_why);
void zr_roles_abort(struct zr_engine *e, int code, const char *text);
/* On each communicator, for n_ops operations more of any unit. */
bool zr_roles_have_room(const struct zr_engine *e, int n_ops);
/* Before an operation of the model's thread, for which no loop asks: waits for those before if need be. */
int zr_roles_make_room(struct zr_engine *e);
bool zr_roles_stuck(const struct zr_engine *e);
/* That can happen to one of them. */
bool zr_roles_may_stick(const struct zr_engine *e);
int64_t zr_roles_wire_bytes(const struct zr_engine *e);
int64_t zr_roles_model_bytes(const struct zr_engine *e);
int64_t zr_roles_pipe_bytes(const struct zr_engine *e);
int64_t zr_roles_outer_bytes(const struct zr_engine *e);
int64_t zr_roles_library_bytes(const struct zr_engine *e);

/* ---- issue.c ---- */

/* For zr_engine_open, behind zr_tables_open: room on the streams for the largest job. */
int zr_room_open(struct zr_engine *e);
/* What a job puts on the reduce stream, at most; and, if it is none of a step (NORM, UPDATE, SNAPSHOT), on
 * any other. unit: of those that have one. */
int64_t zr_room_of(const struct zr_engine *e, enum zr_action_kind kind, int32_t unit);
/* All streams take the job without a wait of whoever puts it there. */
bool zr_room_for(const struct zr_engine *e, const struct zr_action *a);

/* ---- engine.c, step.c ---- */

/* Addresses of element `first` of a flat (which must be kept by this rank). Kept: elements of a flat whose
 * state this rank holds: its slice at the level of the state, at stage 0 all. */
struct zr_span zr_engine_kept(const struct zr_engine *e, const struct zr_flat *f);
float *zr_engine_master_at(const struct zr_engine *e, const struct zr_flat *f, int64_t first);
float *zr_engine_state_at(const struct zr_engine *e, const struct zr_flat *f, int i, int64_t first);
char *zr_engine_param_at(const struct zr_engine *e, const struct zr_flat *f, int64_t first);

/* Waits for the event, or for the context to fail: on a GPU a collective that has failed may stand for ever.
 * Not on the loop's thread. */
int zr_engine_wait(struct zr_engine *e, struct zr_event *event);

/* ---- failure.c ---- */

/* Of an engine whose waits may be for a call that does not come back (zr_comm_ops.stuck): each ends with the
 * failure that is known, when that has been so for a while. Closing ends it. */
void zr_engine_guard_waits(struct zr_engine *e);
/* Nothing that is on the streams and has not begun ever runs. Any thread. */
void zr_engine_leave_streams(struct zr_engine *e);

/* The job's number of the step before, and of the one under way: steps count from 1, and go on after a load.
 * Every message has these. */
static inline uint32_t zr_last_step_number(const struct zr_engine *e)
{
    return (uint32_t)(e->m.step + e->m.step_offset);
}

static inline uint32_t zr_step_number(const struct zr_engine *e)
{
    return zr_last_step_number(e) + !e->m.stepping; /* zero_step has counted itself */
}

/* If err is one, with this thread's message, the engine fails with it. */
static inline int zr_engine_note(struct zr_engine *e, int err)
{
    return err ? zr_engine_fail(e, err, zr_error_text()) : 0;
}

/* Once, where ZERO_FLIGHT_DIR asks for it. Keeps this thread's message. */
void zr_engine_save_flight(struct zr_engine *e);

/* ---- model.c ---- */

/* Takes the first n of e->m.actions. */
int zr_model_act(struct zr_engine *e, int32_t n);
/* What the program called when it gave the core such an event. */
const char *zr_model_call_name(enum zr_core_event_kind kind);
/* From here on another thread: gives the action to the loop, with what it needs to know. Without a loop it is
 * carried out now. */
void zr_model_push(struct zr_engine *e, const struct zr_action *a);
/* Tells the communicator of a call. */
void zr_model_called(struct zr_engine *e, const struct zr_core_event *ev);
/* The model goes on when the event has come: at once where its stream waits by itself. */
int zr_model_wait_for(struct zr_engine *e, struct zr_event *ev);
/* Waits until the loop has carried out a job (0: none), without which waiting for its events would not wait.
 * Returns why the engine has failed, if it has: the job may not have been carried out then. */
int zr_model_await(struct zr_engine *e, uint64_t job);

/* model_pointers.c: stores in the model's pointer, and remembers it. */
void zr_point_param(struct zr_engine *e, int32_t tensor, void *to);
void zr_point_grad(struct zr_engine *e, int32_t tensor, void *to);

/* model_pointers.c: the model's pointers to a unit's parameters (gradients) go to slot, or away. Where the
 * model has its gradients for good: the unit's backward bracket opens, and closes; in_flight: the gradient is
 * being reduced from then on; and is the model's again. */
void zr_show_params(struct zr_engine *e, int32_t unit, int32_t slot);
void zr_hide_params(struct zr_engine *e, int32_t unit);
void zr_show_grads(struct zr_engine *e, int32_t unit, int32_t slot);
void zr_hide_grads(struct zr_engine *e, int32_t unit);
void zr_lend_unit(struct zr_engine *e, int32_t unit);
void zr_take_unit(struct zr_engine *e, int32_t unit, bool in_flight);
void zr_lend_again(struct zr_engine *e, int32_t unit);

/* Adds what this rank keeps of a tensor, weights and master weights, to a hash (check/replicas.c). buffer:
 * ZR_DIGEST_BYTES of the host. */
enum { ZR_DIGEST_BYTES = 1 << 20 };
int zr_digest_tensor(struct zr_engine *e, char *buffer, int32_t tensor, uint64_t *hash);
/* With cfg.debug.check, ranks compare what they have in this step: 1, 2, 4, 8 and so on, and every 64th. */
bool zr_compare_is_due(const struct zr_engine *e);

/* For zr_engine_open (tune.c). */
void zr_tuned_open(struct zr_engine *e);
/* Copies the unit from its slot to where all are, on the compute stream (gather_all.c). */
int zr_all_keep(struct zr_engine *e, int32_t unit, int32_t slot);
/* Collective, blocking: inner slices, of which every rank has its fine slice; resident parameters, of which
 * every rank has its inner slice (restore.c). */
int zr_engine_gather_inner(struct zr_engine *e);
int zr_engine_gather_residents(struct zr_engine *e);

/* snapshot.c: for zr_engine_open and zr_engine_close; the job of a snapshot. */
int zr_snapshot_listener_open(struct zr_snapshot_listener **out);
/* NULL is allowed. */
void zr_snapshot_listener_close(struct zr_snapshot_listener *l);
int zr_engine_issue_snapshot(struct zr_engine *e);

/* values.c: no value but 0 and -0 in n elements. */
bool zr_all_zero(const char *x, int64_t n, enum zr_dtype dtype);

/* ---- places ---- */

/* Of a flat, the elements whose parameters this rank keeps, in a unit that is sharded: its inner slice. */
static inline struct zr_span zr_engine_inner(const struct zr_engine *e, const struct zr_flat *f)
{
    return zr_flat_span(f, e->at, ZR_LEVEL_INNER);
}

/* And those that it alone speaks for: its fine slice. */
static inline struct zr_span zr_engine_own(const struct zr_engine *e, const struct zr_flat *f)
{
    return zr_flat_span(f, e->at, ZR_LEVEL_FINE);
}

/* The flat's inner slice, whole from the fine slices of its groups. */
static inline struct zr_gather_seg zr_outer_gather_seg(const struct zr_engine *e, const struct zr_flat *f)
{
    int64_t at = zr_plan_param_own(e->plan, f, e->at);
    return (struct zr_gather_seg){
        .src = at, .dst = at, .in_place = true, .cut = zr_flat_groups_cut(f, e->at.inner)};
}

/* Room for values on their way between ranks: plan.values_bytes, of the control communicator's arena. */
static inline char *zr_values_staging(const struct zr_engine *e)
{
    return e->control_base + e->plan->values_at;
}

/* Of all ranks. */
static inline enum zr_role zr_widest_role(const struct zr_engine *e)
{
    return e->role[ZR_ROLE_WORLD].comm ? ZR_ROLE_WORLD : ZR_ROLE_CONTROL;
}

static inline struct zr_comm *zr_widest_comm(const struct zr_engine *e)
{
    return e->role[zr_widest_role(e)].comm;
}

/* Of all calls so far that every rank of the world makes. */
static inline uint64_t zr_world_hash(const struct zr_engine *e)
{
    return e->pp > 1 ? e->m.world_calls : zr_core_hash(e->m.core);
}

/* The place of the rank that owns fine slice number k of each flat. */
static inline int32_t zr_fine_place(const struct zr_engine *e, int32_t k)
{
    return k % e->layout->outer * e->layout->inner + k / e->layout->outer;
}

/* The gradient place of unit, as an index of grad_done, grad_free and grad_job. */
static inline int32_t zr_grad_place(const struct zr_plan *p, int32_t unit, int32_t slot)
{
    return slot >= 0 ? p->layout->n_units + slot : unit;
}

/* The place of a group's sum, as an index of partial_full and partial_free: of the unit, where it lies in
 * place; else of the slot. */
static inline int32_t zr_partial_place(const struct zr_action *a)
{
    return a->partial >= 0 ? a->partial : a->unit;
}

static inline int32_t zr_n_partial_places(const struct zr_plan *p)
{
    int32_t n = p->outer_each ? p->n_partial_slots : p->layout->n_units;
    return p->spec.outer ? n : 0;
}

static inline struct zr_step_scalars *zr_engine_scalars(const struct zr_engine *e)
{
    return (struct zr_step_scalars *)(e->reduce_base + e->plan->control_at);
}

/* Of this rank, and then of all (kernels/agreement.h). */
static inline struct zr_agreement *zr_engine_agreement(const struct zr_engine *e)
{
    return (struct zr_agreement *)(e->control_base + e->plan->agreement_at);
}

/* Squares of what this rank owns of the gradient. */
static inline struct zr_own_squares *zr_engine_norm_at(const struct zr_engine *e)
{
    return (struct zr_own_squares *)(e->reduce_base + e->plan->norm_at);
}

#endif
