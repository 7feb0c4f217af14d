/* SPDX-License-Identifier: Apache-2.0 */
/* internal.h: what the files of the engine share. The verifier and tests include it too.
 *
 * Each of three members of struct zr_engine belongs to a thread:
 *   m   the model's thread
 *   i   the thread that carries out jobs just now: the loop's or the model's
 *   s   any thread, by locks and atomics
 * The other members do not change once the engine is allocated. Only zr_jobs_push passes data from m to i, in
 * a job (struct zr_job). events.h lists the events between streams.
 *
 * State that one file works on is a struct in that file. Other files see only a pointer to it, and the few
 * functions below. */
#ifndef ZR_SHARD_ENGINE_INTERNAL_H
#define ZR_SHARD_ENGINE_INTERNAL_H

#include "kernels/agreement.h"
#include "kernels/first_failure.h"
#include "shard/engine/engine.h"
#include "shard/engine/events.h"
#include "shard/engine/observer.h"
#include "shard/engine/timeline.h"

#include <stdatomic.h>

/* Values that a step carries (zr_engine_give). */
struct zr_carried {
    int32_t n;
    double value[ZR_MAX_CARRIED];
};

/* Bytes received: everything but activations, from other groups, and activations over tp and cp. */
struct zr_received {
    int64_t wire, outer, tp, cp;
};

/* The model's thread. */
struct zr_model_side {
    struct zr_core *core;
    /* the actions of the last call of the model */
    struct zr_action *actions;
    int32_t n_actions;
    /* (n_flats) for collectives between steps */
    struct zr_gather_seg *segs;
    /* hash of the calls that ranks of all pipeline stages make: no brackets */
    uint64_t world_calls;
    /* waits of the model for parameters, and their time */
    int64_t n_waits, wait_ns;
    /* bytes that were received for opening and for comparisons, which are not the program's traffic */
    struct zr_received not_counted;
    int64_t allocated[ZR_MEM_COUNT];
    /* warned that gradients of tensors that are not cut differ by rounding between tp ranks */
    bool said_rounding;

    /* ---- defined in the file that works on them */
    /* jobs.c */
    struct zr_jobs *jobs;
    /* step.c */
    struct zr_steps *steps;
    /* tune.c. Jobs read it, too, while it does not change. */
    struct zr_tuning *tuning;
    /* model_pointers.c */
    struct zr_pointers *pointers;
    /* gather_all.c. NULL: parameters are not gathered whole */
    struct zr_all *all;
    /* mesh_axis.h */
    struct zr_mesh_axis *tp_axis, *cp_axis;
    /* tensor_parallel.c */
    struct zr_tp *tp;
    /* pipe.c. NULL: there is one pipeline stage */
    struct zr_pipe *pipe;
    /* tied.c. NULL: no tensor is tied to one of another pipeline stage */
    struct zr_tied *tied;
};

/* State of the thread that carries out jobs just now: the loop's or the model's. */
struct zr_issuer {
    /* (n_flats) */
    struct zr_gather_seg *gather_segs;
    /* (n_flats) */
    struct zr_reduce_seg *reduce_segs;
    /* (n_units) the next norm does not count the unit's gradient */
    bool *left_out;
    /* state_parts.c. NULL: masters and states are in no file */
    struct zr_parts *parts;
    /* read by any thread */
    _Atomic int64_t n_gather, n_reduce, n_outer_gather, n_outer_reduce;
    /* enum zr_action_kind of the current job, 0: none; and its unit; for messages */
    _Atomic int32_t kind, unit;
};

/* State for any thread. */
struct zr_shared {
    /* what zr_engine_report_least took from this rank */
    _Atomic uint64_t reported_least;
    /* NULL: the plan has no snapshots */
    struct zr_snapshot_listener *listener;
    /* the first failure of any thread */
    struct zr_first failure;
    /* failure of a transfer to or from the file of states, in a CUDA host function, which cannot call
     * zr_engine_fail */
    struct zr_first transfer_failure;
    /* time of the first failure by zr_now_ns(); 0: none yet */
    _Atomic int64_t failed_ns;
    /* a wait was given up; operations left on the streams never run, and the streams are not closed */
    atomic_bool left;
};

/* A communicator in its role, and the stream for its collectives. */
struct zr_role_run {
    /* NULL: nobody has the role. Two roles may have the same communicator. */
    struct zr_comm *comm;
    struct zr_stream *stream;
};

struct zr_engine {
    /* NULL: the engine is not open */
    struct zr_device *dev;
    /* the communicators by role, and a list without repetitions */
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
    /* the context's name, for messages; "": none */
    const char *name;
    /* number of the rank in the job, for messages; ranks of the job */
    int rank;
    int32_t n_all;
    /* Data-parallel ranks, tp ranks and pipeline stages, and this rank's number among each. The control
     * communicator joins the data-parallel ranks with this tp_rank and pp_at (comm/mesh.h). */
    int32_t dp, dp_rank, tp, tp_rank, pp, pp_at;
    /* position of dp_rank on the axes */
    struct zr_where at;
    /* the process that opened it; no other may use it */
    int pid;
    /* zr_fork_depth when it was opened */
    unsigned forks;

    /* (n_tensors) layers of the tensor in earlier pipeline stages */
    int64_t *first_layer;

    /* arenas; control_base is for exchanges of all ranks, and equals reduce_base without groups and pipeline
     * stages */
    char *gather_base, *reduce_base, *control_base;
    /* NULL: the plan has no master array, or not so many states */
    char *master, *state[ZR_MAX_STATES];
    /* plan->snapshot_bytes of host_alloc memory, or NULL */
    char *snapshot;
    /* the agreement of the last step; host_alloc memory, valid after step_norm */
    struct zr_agreed *agreed;
    /* (n_all, ZR_EXCHANGE_BYTES) behind it: the words of the last exchange */
    char *words;
    /* the most flats of a unit, and so of one operation; the most zr_rounding_ops of a unit */
    int32_t most_segs;
    int64_t most_roundings;

    /* gather_outer_stream, reduce_outer_stream: NULL if no step gathers or reduces between groups */
    struct zr_stream *compute, *gather_stream, *reduce_stream, *gather_outer_stream, *reduce_outer_stream;
    /* for messages with a neighbouring pipeline stage; NULL: this rank has no such neighbour */
    struct zr_stream *pair_stream[ZR_PAIR_ROLES];
    /* for tied tensors; NULL: this rank has none */
    struct zr_stream *tied_stream;
    /* for reads and writes of the file of states; NULL: there is none */
    struct zr_stream *states_stream;
    struct zr_events ev;
    /* all memory of zr_table_open, as a list */
    struct zr_table *tables;
    /* NULL: not kept */
    struct zr_timeline *timeline;
    struct zr_observers observers;

    struct zr_model_side m;
    struct zr_issuer i;
    struct zr_shared s;
};

/* ---- tables.c, for opening and closing ---- */

/* Allocates the tables of the members i and m. */
int zr_tables_open(struct zr_engine *e);
/* Works after a failure to open, too. Frees all tables, and the lists of events, but not the events. */
void zr_tables_close(struct zr_engine *e);
/* Sets *field to n zeroed elements of that size, which zr_tables_close frees. field: address of a pointer. */
int zr_table_open(struct zr_engine *e, void *field, int64_t n, size_t size);
#define ZR_TABLE(e, field, n) ZR_TRY(zr_table_open(e, &(field), n, sizeof *(field)))

/* ---- pipe.c ---- */

int zr_pipe_open(struct zr_engine *e, const struct zr_pipe_room *room);
int zr_pipe_allocate(struct zr_engine *e);
/* Returns the number of the slot at that address, among the slots of all pairs. */
int64_t zr_pipe_slot_number(const struct zr_engine *e, const void *slot);
/* All streams must be idle. */
void zr_pipe_close(struct zr_engine *e);

/* ---- tied.c ---- */

int zr_tied_open(struct zr_engine *e, const struct zr_pipe_room *room);
int zr_tied_allocate(struct zr_engine *e);
/* The stream of tied tensors must be idle. */
void zr_tied_close(struct zr_engine *e);
/* Whether the last stage sends a gradient of the tensor in this action, which no bracket has started with
 * yet. */
bool zr_tied_has_received(const struct zr_engine *e, int32_t tensor);
/* Called when a backward bracket of the unit begins, with zero gradients in that slot. Stores in them what
 * the last stage has sent. */
int zr_tied_fill(struct zr_engine *e, int32_t unit, int32_t slot);

/* Notes that a backward bracket of the unit has ended. */
void zr_tied_bracketed(struct zr_engine *e, int32_t unit);

/* Resets the state for the next step. */
void zr_tied_forget(struct zr_engine *e);

/* ---- tensor_parallel.c, compare_tp.c ---- */

int zr_tp_open(struct zr_engine *e);
/* Sums, on the model's stream, the unit's gradients that are partial on each tp rank (partial in struct
 * zr_tensor). They must be complete in that slot. *any: whether the unit has such a gradient. */
int zr_tp_sum_grads(struct zr_engine *e, int32_t unit, int32_t slot, bool *any);

/* At the end of a step, compares the partial gradients that it has summed, in the steps that compare. */
int zr_tp_compare_partial(struct zr_engine *e);
/* Returns memory of the device, for the reduce stream. */
struct zr_shard_digest *zr_tp_shard_digest(const struct zr_engine *e);

/* ---- roles.c ---- */

/* For zr_engine_open. The first takes the communicators; the second sets their streams, once these are
 * open. */
void zr_roles_take(struct zr_engine *e, struct zr_comm *const comm[ZR_ROLES]);
void zr_roles_streams(struct zr_engine *e);
/* The collectives of comm.h, on the role's communicator and stream. A barrier needs the role CONTROL, REDUCE
 * or REDUCE_OUTER. */
int zr_role_gather(struct zr_engine *e, enum zr_role role, const struct zr_gather_seg *seg, int n,
                   const struct zr_tag *tag);
/* The same on another stream. The caller orders it with the role's stream, both ways. */
int zr_role_gather_on(struct zr_engine *e, enum zr_role role, struct zr_stream *s,
                      const struct zr_gather_seg *seg, int n, const struct zr_tag *tag);
int zr_role_reduce(struct zr_engine *e, enum zr_role role, const struct zr_reduce_seg *seg, int n,
                   const struct zr_tag *tag);
/* The same on a stream that the caller orders with the role's. */
int zr_role_arrays(struct zr_engine *e, enum zr_role role, struct zr_stream *s, enum zr_op op,
                   const struct zr_arrays *arrays, const struct zr_tag *tag);
int zr_role_all_to_all(struct zr_engine *e, enum zr_role role, int64_t src, int64_t dst, int64_t bytes,
                       const struct zr_tag *tag);
/* The same on a stream that the caller orders with the role's. */
int zr_role_shift(struct zr_engine *e, enum zr_role role, struct zr_stream *s, int64_t src, int64_t dst,
                  int64_t bytes, int32_t by, const struct zr_tag *tag);
int zr_role_exchange(struct zr_engine *e, enum zr_role role, int64_t off, int64_t slot_bytes,
                     const struct zr_tag *tag);
int zr_role_barrier(struct zr_engine *e, enum zr_role role, const struct zr_tag *tag);
/* root: a rank's number among the role's ranks. */
int zr_role_broadcast(struct zr_engine *e, enum zr_role role, int64_t off, int64_t bytes, int root,
                      const struct zr_tag *tag);
/* An agreement over all ranks of the job. */
int zr_world_agree(struct zr_engine *e, int64_t off, int32_t n_sum, int32_t n_max, const struct zr_tag *tag);
/* For all communicators: whether any may have failed; the first failure of any; and failing them all. */
bool zr_roles_alarmed(const struct zr_engine *e);
int zr_roles_status(const struct zr_engine *e, char *why, size_t n_why);
void zr_roles_abort(struct zr_engine *e, int code, const char *text);
/* Whether each communicator takes n_ops more operations without a wait. */
bool zr_roles_have_room(const struct zr_engine *e, int n_ops);
/* Waits until there is room for an operation of the model's thread. */
int zr_roles_make_room(struct zr_engine *e);
/* Whether some communicator's work never ends (zr_comm_ops.stuck); whether that can happen. */
bool zr_roles_stuck(const struct zr_engine *e);
bool zr_roles_may_stick(const struct zr_engine *e);
/* Return bytes received: everything but activations; activations over the axis of that role; activations
 * between pipeline stages; the part of the first from other groups; and library_bytes of struct
 * zr_comm_stats. */
int64_t zr_roles_wire_bytes(const struct zr_engine *e);
int64_t zr_roles_axis_bytes(const struct zr_engine *e, enum zr_role role);
int64_t zr_roles_pipe_bytes(const struct zr_engine *e);
int64_t zr_roles_outer_bytes(const struct zr_engine *e);
int64_t zr_roles_library_bytes(const struct zr_engine *e);
struct zr_received zr_received_so_far(const struct zr_engine *e);
/* Take bytes out of the program's traffic: those received since `before`, when nothing was under way; and
 * those of an exchange over an axis, to which each rank gives so many. */
void zr_do_not_count_since(struct zr_engine *e, struct zr_received before);
void zr_do_not_count_axis(struct zr_engine *e, enum zr_role role, int64_t bytes);

/* ---- issue.c ---- */

/* For zr_engine_open, after zr_tables_open: reserves room on the streams for the largest job. */
int zr_room_open(struct zr_engine *e);
/* Returns the most operations that a job puts on the reduce stream. A job other than NORM, UPDATE and
 * SNAPSHOT puts as many on any other stream. unit: the job's, if it has one. */
int64_t zr_room_of(const struct zr_engine *e, enum zr_action_kind kind, int32_t unit);
/* Whether all streams take the job's operations without a wait. */
bool zr_room_for(const struct zr_engine *e, const struct zr_action *a);

/* ---- engine.c, step.c ---- */

/* Makes an arena with the communicator of the first role, and attaches those of all roles that somebody
 * has. */
int zr_engine_open_arena(struct zr_engine *e, const enum zr_role *roles, int n_roles, int64_t bytes,
                         char **base);

/* Return the elements of a flat whose optimizer state this rank keeps (at stage 0 all), and the addresses of
 * element `first` of these. Without a region for masters, these are the parameters. */
struct zr_span zr_engine_kept(const struct zr_engine *e, const struct zr_flat *f);
char *zr_engine_master_at(const struct zr_engine *e, const struct zr_flat *f, int64_t first);
char *zr_engine_state_at(const struct zr_engine *e, const struct zr_flat *f, int i, int64_t first);
char *zr_engine_param_at(const struct zr_engine *e, const struct zr_flat *f, int64_t first);
/* Returns the address of the scale of the block of ZR_Q8_BLOCK elements that `first` is in. NULL: states of
 * the flat have no scales. */
uint16_t *zr_engine_scales_at(const struct zr_engine *e, const struct zr_flat *f, int i, int64_t first);
/* Returns the address of any of these, by kind: ZR_VALUE_PARAM, ZR_VALUE_MASTER, a state, or ZR_SCALE of a
 * state. */
char *zr_engine_value_at(const struct zr_engine *e, const struct zr_flat *f, int kind, int64_t first);

/* Waits for the event, or for the context to fail, because a failed collective on a GPU may never end. Not
 * for the loop's thread. */
int zr_engine_wait(struct zr_engine *e, struct zr_event *event);

/* ---- failure.c ---- */

/* If a communicator may get stuck (zr_comm_ops.stuck): lets each wait end with the known failure after a
 * while. Closing ends that. */
void zr_engine_guard_waits(struct zr_engine *e);
/* Prevents operations that are on the streams and have not begun from running. Any thread. */
void zr_engine_leave_streams(struct zr_engine *e);

/* Fails the engine with err and this thread's message, unless err is 0. */
static inline int zr_engine_note(struct zr_engine *e, int err)
{
    return err ? zr_engine_fail(e, err, zr_error_text()) : 0;
}

/* Saves the flight recorder once, if ZERO_FLIGHT_DIR is set. Keeps this thread's message. */
void zr_engine_save_flight(struct zr_engine *e);

/* ---- model.c ---- */

/* Carries out the first n of e->m.actions. */
int zr_model_act(struct zr_engine *e, int32_t n);
/* The name of the program's call that gives the core such an event. */
const char *zr_model_call_name(enum zr_core_event_kind kind);
/* Records the call, so that ranks can compare their calls. */
void zr_model_called(struct zr_engine *e, const struct zr_core_event *ev);
/* Lets the model go on after the event: on the host waits for it, on a GPU makes the model's stream wait. */
int zr_model_wait_for(struct zr_engine *e, struct zr_event *ev);
/* ---- jobs.c ---- */

int zr_jobs_open(struct zr_engine *e);
/* Gives the action to the loop as a job, with all that it needs to know. Without a loop, carries it out. */
void zr_jobs_push(struct zr_engine *e, const struct zr_action *a);
/* Makes sure that the loop sees all jobs. */
void zr_jobs_kick(struct zr_engine *e);
/* Waits until the loop has carried out the job with that number (0: none). Its events are recorded then, so a
 * wait for them works. Returns the failure of the engine, if any; the job may not have been carried out
 * then. */
int zr_jobs_await(struct zr_engine *e, uint64_t job);
/* Every operation on a communicator takes its turn here. One that the model's thread issues itself comes
 * after all jobs so far, which this thread carries out if the loop has not. So a rank issues all operations
 * in the order of its program, whatever thread issues them. Inside a job this does nothing. */
int zr_jobs_take_turn(struct zr_engine *e);
/* Return the number of a job, 0: there was none. The last one that writes the unit's parameters; that uses
 * the gradient with that index (zr_grad_index); the last NORM; and the last of all. */
uint64_t zr_job_writing_params(const struct zr_engine *e, int32_t unit);
uint64_t zr_job_using_grad(const struct zr_engine *e, int32_t index);
uint64_t zr_last_norm_job(const struct zr_engine *e);
uint64_t zr_last_job(const struct zr_engine *e);

/* ---- step.c ---- */

int zr_steps_open(struct zr_engine *e);
/* Returns how often zero_step was called. */
uint32_t zr_step_calls(const struct zr_engine *e);
/* Return the numbers of the last step and of the step under way, as in all messages. Steps count from 1, and
 * go on after a load. */
uint32_t zr_last_step_number(const struct zr_engine *e);
uint32_t zr_step_number(const struct zr_engine *e);
/* Returns the outcome of the last step that was read. */
const struct zero_step_info *zr_last_result(const struct zr_engine *e);
/* Fills in the facts about steps. */
void zr_steps_facts(const struct zr_engine *e, struct zr_engine_facts *out);
/* Fills in what a job needs to know of its step, and notes what the job will do. number: the job's. */
void zr_steps_fill_job(struct zr_engine *e, struct zr_job *job, uint64_t number);

/* ---- rounding.c ---- */

int zr_rounding_open(struct zr_engine *e);
/* Returns the noise of the elements of a piece from its element `at` on. step: zr_job.begun. */
struct zr_rounding zr_rounding_from(const struct zr_engine *e, const struct zr_piece *p, int64_t at,
                                    int64_t step);

/* ---- precision.c ---- */

/* Write the masters of n elements from `first` on: from the parameters, or from fp32 values. Without a region
 * for masters they do nothing. With ZERO_MASTERS_REMAINDER zr_masters_write writes the parameters, too. */
int zr_masters_from_params(struct zr_engine *e, const struct zr_flat *f, int64_t first, int64_t n);
int zr_masters_write(struct zr_engine *e, const struct zr_flat *f, int64_t first, int64_t n,
                     const float *src);
/* Writes the parameters, rounded from masters as an update rounds them. */
int zr_params_from_masters(struct zr_engine *e, const struct zr_flat *f, int64_t first, int64_t n,
                           const float *src);
/* Writes a state, rounded to nearest. Elements with 8-bit codes are whole blocks, or end with their layer. */
int zr_state_write(struct zr_engine *e, const struct zr_flat *f, int i, int64_t first, int64_t n,
                   const float *src);
/* Read values in fp32. If `first` is inside a block of 8-bit codes, zr_state_read also writes the block's
 * earlier elements, in front of dst. */
int zr_masters_read(struct zr_engine *e, const struct zr_flat *f, int64_t first, int64_t n, float *dst);
int zr_state_read(struct zr_engine *e, const struct zr_flat *f, int i, int64_t first, int64_t n, float *dst);

/* ---- tune.c ---- */

int zr_tuning_open(struct zr_engine *e);
/* Returns the numbers for a job of the next step, which do not change before the job is issued. */
const struct zr_tuned *zr_tuned_of_job(struct zr_engine *e, uint64_t job);

/* ---- model_pointers.c ---- */

int zr_pointers_open(struct zr_engine *e);
/* Store an address in the model's pointer, and remember it. */
void zr_point_param(struct zr_engine *e, int32_t tensor, void *to);
void zr_point_grad(struct zr_engine *e, int32_t tensor, void *to);

/* Point the model at a unit's parameters or gradients in a slot, or take these away. */
void zr_show_params(struct zr_engine *e, int32_t unit, int32_t slot);
void zr_hide_params(struct zr_engine *e, int32_t unit);
void zr_show_grads(struct zr_engine *e, int32_t unit, int32_t slot);
void zr_hide_grads(struct zr_engine *e, int32_t unit);
/* Returns the slot where the model's pointers show a unit's parameters or gradients, or ZR_NOT_SHOWN. */
enum { ZR_NOT_SHOWN = -2 };
int32_t zr_shown_slot(const struct zr_engine *e, int32_t unit, bool grad);
/* At stages 0 and 1, where the model has its gradients at all times. Call zr_open_grads when a backward
 * bracket of the unit begins, and zr_close_grads when it ends. If `reducing`, the gradient is being reduced
 * from then on. */
void zr_open_grads(struct zr_engine *e, int32_t unit);
void zr_close_grads(struct zr_engine *e, int32_t unit, bool reducing);
/* Gives the model the pointer of one gradient again that has been reduced, and returns its unit. Returns -1
 * if there is none left. sums_too: steps have used gradients that are summed where backward writes them. */
int32_t zr_return_next_grad(struct zr_engine *e, bool sums_too);

/* compare_tp.c: computes a digest of this rank's part of the tensors [first, end), weights and master
 * weights, and waits for it. whole_only: leaves out tensors that are cut over tp. */
int zr_digest_tensors(struct zr_engine *e, int32_t first, int32_t end, bool whole_only, uint64_t *digest);
/* Whether ranks compare their copies in this step (cfg.debug.check): 1, 2, 4, 8 and so on, and every 64th. */
bool zr_compare_is_due(const struct zr_engine *e);

/* gather_all.c: copies the unit from its slot to its place among all parameters, on the compute stream. */
int zr_all_keep(struct zr_engine *e, int32_t unit, int32_t slot);
/* restore.c: gather inner slices from the ranks' fine slices, and resident parameters from their inner
 * slices. Collective, blocking. */
int zr_engine_gather_inner(struct zr_engine *e);
int zr_engine_gather_residents(struct zr_engine *e);

/* snapshot.c: called by zr_engine_open and zr_engine_close; and the job of a snapshot. */
int zr_snapshot_listener_open(struct zr_snapshot_listener **out);
/* l may be NULL. */
void zr_snapshot_listener_close(struct zr_snapshot_listener *l);
int zr_engine_issue_snapshot(struct zr_engine *e);

/* ---- state_parts.c; without a file of states these do nothing ---- */

int zr_parts_open(struct zr_engine *e, const struct zr_state_io *io);
int zr_parts_allocate(struct zr_engine *e);
/* Finishes what is on the states stream. */
void zr_parts_close(struct zr_engine *e);

/* Returns the address of a value of element `first` in the part that is open. kind: ZR_VALUE_MASTER, a state,
 * or ZR_SCALE of a state, for the scale of the element's block. */
char *zr_part_at(const struct zr_engine *e, const struct zr_flat *f, int kind, int64_t first);
/* Returns whether values of that kind of the flat are in the file. */
bool zr_part_has(const struct zr_engine *e, const struct zr_flat *f, int kind);
/* Returns the offset in the file of such a value of element `first`. Limits *n to the elements from there on
 * that are in the same part. */
int64_t zr_part_place(const struct zr_engine *e, const struct zr_flat *f, int kind, int64_t first,
                      int64_t *n);
/* Between steps: opens the part with element `first`, and limits *n to its elements from there on. The part's
 * masters and states then have addresses, until another part is opened or zr_engine_drain is called. If
 * `changes` is set, the part is written back then. Blocks. */
int zr_part_use(struct zr_engine *e, const struct zr_flat *f, int64_t first, bool changes, int64_t *n);
/* Closes the part that zr_part_use has opened, and writes it back if it was changed. Blocks. */
int zr_part_leave(struct zr_engine *e);

/* Finds the first part of the unit that is not before part *k of the unit's flat number *flat, and sets both.
 * Returns false if there is none. */
bool zr_next_part(const struct zr_engine *e, int32_t unit, int32_t *flat, int64_t *k,
                  struct zr_state_part *part);
/* In a job: requests a part from the file. */
int zr_part_read_ahead(struct zr_engine *e, const struct zr_state_part *part);
/* Requests the first part of `unit`, which is updated next. -1: no unit is. */
int zr_parts_read_ahead(struct zr_engine *e, int32_t unit);
/* Begins the update of a part, and requests the part if it was not read ahead. Its masters and states have
 * addresses until zr_part_end, which requests the write. Parts are updated in the order of requests. */
int zr_part_begin(struct zr_engine *e, const struct zr_state_part *part);
int zr_part_end(struct zr_engine *e);
/* Return how many parts a unit has, and the most operations that its UPDATE puts on the states stream. */
int64_t zr_parts_of(const struct zr_engine *e, int32_t unit);
int64_t zr_parts_room(const struct zr_engine *e, int32_t unit);

/* values.c: whether n elements are all 0 or -0. */
bool zr_all_zero(const char *x, int64_t n, enum zero_dtype dtype);

/* ---- offsets and indices ---- */

/* The elements of a sharded unit's flat whose parameters this rank keeps: its inner slice. */
static inline struct zr_span zr_engine_inner(const struct zr_engine *e, const struct zr_flat *f)
{
    return zr_flat_span(f, e->at, ZR_LEVEL_INNER);
}

/* The elements that this rank alone speaks for: its fine slice. */
static inline struct zr_span zr_engine_fine(const struct zr_engine *e, const struct zr_flat *f)
{
    return zr_flat_span(f, e->at, ZR_LEVEL_FINE);
}

/* A gather of the flat's inner slice from the fine slices of the groups. */
static inline struct zr_gather_seg zr_outer_gather_seg(const struct zr_engine *e, const struct zr_flat *f)
{
    int64_t at = zr_plan_param_own(e->plan, f, e->at);
    return (struct zr_gather_seg){
        .src = at, .dst = at, .in_place = true, .cut = zr_flat_groups_cut(f, e->at.inner)};
}

/* Returns plan.values_bytes of memory in the control communicator's arena, for values on their way between
 * ranks. */
static inline char *zr_values_staging(const struct zr_engine *e)
{
    return e->control_base + e->plan->values_at;
}

/* Return the role, and the communicator, of all ranks of the job. */
static inline enum zr_role zr_widest_role(const struct zr_engine *e)
{
    return e->role[ZR_ROLE_WORLD].comm ? ZR_ROLE_WORLD : ZR_ROLE_CONTROL;
}

static inline struct zr_comm *zr_widest_comm(const struct zr_engine *e)
{
    return e->role[zr_widest_role(e)].comm;
}

/* Returns a hash of all calls so far that every rank of the job makes. */
static inline uint64_t zr_world_hash(const struct zr_engine *e)
{
    return e->pp > 1 ? e->m.world_calls : zr_core_hash(e->m.core);
}

/* Returns the number of the rank that owns fine slice k of each flat. */
static inline int32_t zr_fine_place(const struct zr_engine *e, int32_t k)
{
    return k % e->layout->outer * e->layout->inner + k / e->layout->outer;
}

/* Returns the index of unit's gradient in grad_done, grad_free and using_grad. */
static inline int32_t zr_grad_index(const struct zr_plan *p, int32_t unit, int32_t slot)
{
    return slot >= 0 ? p->layout->n_units + slot : unit;
}

/* Returns the index of a group's sum in group_sum_done and group_sum_free: the unit if groups' sums are
 * reduced between groups once a step, else the group slot. */
static inline int32_t zr_group_sum_index(const struct zr_action *a)
{
    return a->group_slot >= 0 ? a->group_slot : a->unit;
}

static inline int32_t zr_n_group_sums(const struct zr_plan *p)
{
    int32_t n = p->outer_each ? p->n_group_slots : p->layout->n_units;
    return p->spec.outer ? n : 0;
}

static inline struct zr_step_scalars *zr_engine_scalars(const struct zr_engine *e)
{
    return (struct zr_step_scalars *)(e->reduce_base + e->plan->control_at);
}

/* This rank's part of the agreement, and afterwards the result (kernels/agreement.h). */
static inline struct zr_agreement *zr_engine_agreement(const struct zr_engine *e)
{
    return (struct zr_agreement *)(e->control_base + e->plan->agreement_at);
}

/* The squares of this rank's part of the gradient. */
static inline struct zr_own_squares *zr_engine_norm_at(const struct zr_engine *e)
{
    return (struct zr_own_squares *)(e->reduce_base + e->plan->norm_at);
}

#endif
