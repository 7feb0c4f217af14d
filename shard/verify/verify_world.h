/* SPDX-License-Identifier: Apache-2.0 */
/* verify_world.h: the types and functions that the verifier's files share. A struct zr_verify_world is one
 * run: its pipeline stages (zr_verify_stage), its ranks (zr_verify_rank), and the simulated devices and
 * communicators below them. A zr_script is the list of calls that the model makes. */
#ifndef ZR_SHARD_VERIFY_WORLD_H
#define ZR_SHARD_VERIFY_WORLD_H

#include "comm/mesh.h"
#include "comm/sim/sim.h"
#include "comm/sim/symmetry.h"
#include "shard/engine/internal.h"
#include "shard/engine/walk.h"
#include "shard/verify/verify.h"

#include <ucontext.h>

/* Capacity of a loop's queue of jobs. */
enum { ZR_VERIFY_QUEUE = 512 };

/* A random number from splitmix64 (Steele, Lea and Flood, OOPSLA 2014). */
static inline uint64_t zr_verify_draw(uint64_t *state)
{
    uint64_t x = *state += UINT64_C(0x9e3779b97f4a7c15);
    x = (x ^ x >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ x >> 27) * UINT64_C(0x94d049bb133111eb);
    return x ^ x >> 31;
}

static inline int64_t zr_verify_below(uint64_t *state, int64_t n)
{
    return (int64_t)(zr_verify_draw(state) % (uint64_t)n);
}

static inline bool zr_verify_chance(uint64_t *state, int percent)
{
    return zr_verify_below(state, 100) < percent;
}

/* One operation of a script. All ranks of a pipeline stage execute the same operations in order. */
enum zr_script_op_kind {
    ZR_DO_BEGIN,
    ZR_DO_END,
    ZR_DO_USE,
    ZR_DO_MICRO,
    ZR_DO_STEP,
    ZR_DO_READ,
    ZR_DO_WRITE,
    /* Writes all tensors that two pipeline stages share. */
    ZR_DO_WRITE_TIED,
    ZR_DO_MEAN,
    ZR_DO_SNAPSHOT,
    /* The model zeroes every gradient that it has a pointer to. */
    ZR_DO_ZERO,
    ZR_DO_NORM,
    ZR_DO_DROP,
    ZR_DO_GATHER_ALL,
    ZR_DO_RELEASE_ALL,
    /* For pipeline stages: begin an evaluation; call zero_next; read the action's inputs; write its outputs;
     * call zero_finish. */
    ZR_DO_EVALUATE,
    ZR_DO_NEXT,
    ZR_DO_TAKE,
    ZR_DO_GIVE,
    ZR_DO_FINISH,
    /* Over tp or cp: a collective, an enum zr_combination; the beginning and the end of a shift. */
    ZR_DO_COMBINE,
    ZR_DO_SHIFT_BEGIN,
    ZR_DO_SHIFT_END
};

/* Collectives on an activation. PARTS is an all-to-all, MAX a maximum of numbers on the host. */
enum zr_combination {
    ZR_COMBINE_SUM,
    ZR_COMBINE_SCATTER,
    ZR_COMBINE_GATHER,
    ZR_COMBINE_PARTS,
    ZR_COMBINE_BROADCAST,
    ZR_COMBINE_MAX,
    ZR_COMBINATIONS
};

/* Most elements of an activation, enough for more than one transfer, and of the array for MAX. The verifier
 * compares every element of the latter. */
enum { ZR_VERIFY_AXIS_ELEMS = ZR_AXIS_ELEMS + 5000, ZR_VERIFY_MAX_OP_ELEMS = 200 };

struct zr_script_op {
    uint8_t kind;
    /* enum zero_phase: of a bracket or of an action; otherwise 0. */
    uint8_t phase;
    /* READ and WRITE: the tensor's index. Otherwise the unit's. -1: none. */
    int32_t index;
    int32_t step;
    /* USE: the second use, at the end of forward and the beginning of backward. */
    bool again;
    /* COMBINE and SHIFT: enum zero_axis. Then the collective, its data type and n elements, and whether it
     * works in place. by: the distance of a shift, or the root of a broadcast. */
    uint8_t axis, how;
    bool bf16, in_place;
    int32_t n, by;
    /* Actions: the stage of the whole pipeline and the micro-batch (-1: no action is left), and the number of
     * the evaluation or step, counted together. */
    int32_t pp_stage, micro, pass;
};

struct zr_script {
    struct zr_script_op *ops;
    int32_t n, cap;
    /* (n_order) The declared order: calls of one micro-batch, or with pipeline stages of a whole step. */
    struct zero_call *order;
    int32_t n_order;
    /* (n_steps, n_units) Contributions to the gradient, one for each backward use. */
    int32_t *n_contrib;
    /* The model changed its order. */
    bool reordered;
    /* No backward pass is bracketed. */
    bool no_backward_brackets;
};

/* The most pipeline stages per rank. */
enum { ZR_VERIFY_PER_RANK = 4 };

/* Data shared by all ranks at one position of the pipeline. */
struct zr_verify_stage {
    /* Position in the pipeline, 0..pp-1. */
    int32_t at;
    /* First unit of each pipeline stage of the rank, followed by the end of the last one. */
    int32_t first_unit[ZR_VERIFY_PER_RANK + 1];
    struct zr_layout *layout;
    /* Its rows of the pipeline schedule: the lists of actions of its ranks, for a step and for an evaluation.
     * Each rank has its own position in them. */
    struct zr_walk walk;
    struct zr_pipe_room room;
    struct zr_script script;
    struct zr_options opt;
    struct zr_plan *plan;
};

/* verify_case.c: the layout of the tensors at position `at` of the pipeline, on its groups. */
int zr_verify_layout(const struct zr_verify_case *c, int32_t at, const struct zr_verify_speed *speed,
                     struct zr_layout **out);

/* verify_tensors.c: the unit that ZR_USE_TWICE uses twice, or -1. */
int32_t zr_verify_used_twice(const struct zr_verify_case *c, int32_t n_units);
/* The layout that takes the tensors frees them. */
int zr_script_tensors(const struct zr_verify_case *c, int32_t at, const struct zr_verify_speed *speed,
                      struct zr_tensor **out, int32_t *n);
/* verify_script.c: writes the script of a pipeline stage whose layout and rows (stage->walk) exist. */
int zr_script_make(const struct zr_verify_case *c, const struct zr_verify_stage *stage,
                   struct zr_script *out);
void zr_script_free(struct zr_script *s);

/* The change that a mutant makes to the schedule, the plan or the model. LESS: it leaves one thing out. OTHER
 * and WRONG: it takes another one of the same kind. TWICE, LATE and EARLY: it changes the time. */
enum zr_mutation {
    /* An event is not recorded, or nobody waits for it: a stream, or the host. */
    ZR_LESS_RECORD = 1,
    ZR_LESS_WAIT,
    ZR_LESS_EVENT_SYNC,
    /* The host does not wait for a stream. */
    ZR_LESS_STREAM_SYNC,
    /* Memory is not zeroed. */
    ZR_LESS_CLEAR,
    /* The model thread does not wait for the loop to issue a job. */
    ZR_LESS_AWAIT,
    /* The communicators of zr_mutant.roles have zr_mutant.flaw. */
    ZR_FLAWED_COMM,
    /* A job is not issued, issued twice, or issued after a later one. */
    ZR_LESS_JOB,
    ZR_TWICE_JOB,
    ZR_LATE_JOB,
    /* A gather or reduce uses the next slot of the plan, or the next group slot. */
    ZR_WRONG_SLOT,
    ZR_WRONG_GROUP_SLOT,
    /* A reduce overwrites instead of adding to earlier micro-batches, or adds to old values. */
    ZR_NO_ACCUMULATE,
    ZR_ALWAYS_ACCUMULATE,
    /* A reduce puts its result in sums[0] (ZR_ACT_REDUCE), and nothing is folded. */
    ZR_OTHER_SUM,
    /* A job's copies go on the gather stream. */
    ZR_OTHER_STREAM,
    /* The model leaves out a call. */
    ZR_LESS_CALL,
    /* A snapshot is read without waiting for it. */
    ZR_EARLY_READER,
    /* Nobody waits for the reader of the previous snapshot. */
    ZR_LESS_READER,
    /* Communicators of these roles join the same number of wrong ranks: neighbours of a pipeline stage
     * instead of ranks with the same index in tensor parallelism. For the roles of tp and cp they are ranks
     * that are far apart. */
    ZR_OTHER_GROUP,
    /* Partial gradients are not summed over the tensor-parallel ranks. */
    ZR_SKIP_TP_GRAD_SUM,
    /* Gradients that are equal on all tensor-parallel ranks are summed over them. */
    ZR_SUM_EQUAL_TP_GRADS,
    /* ALL: the norm counts replicated tensors once per tensor-parallel rank. FIRST: it counts split tensors
     * on the first one only. */
    ZR_NORM_OF_ALL,
    ZR_NORM_OF_FIRST,
    /* Messages between pipeline stages have one slot too few. */
    ZR_LESS_SLOTS,
    /* The last pipeline stage exchanges its first two messages in the wrong order. */
    ZR_OTHER_ORDER,
    /* The first pipeline stage leaves out its last message. */
    ZR_LESS_MESSAGE,
    /* Tied values are not sent after a step. */
    ZR_LESS_TIED_VALUES,
    /* The model thread and the loop issue operations without knowing of each other's. */
    ZR_TWO_ISSUERS,
    /* The first pipeline stage starts to receive tied gradients before the message that comes first. */
    ZR_EARLY_TIE,
    /* Over the axis of zr_mutant.roles: a shift goes to the other side; the model uses what a shift moves
     * without ending it; operations do not alternate between the two `out`. */
    ZR_OTHER_SIDE,
    ZR_LESS_SHIFT_END,
    ZR_SAME_OUT,
    /* A part of the file of states is read into the buffer of the part before it. */
    ZR_SAME_BUFFER
};

/* The stream on which a mutant acts. */
enum zr_stream_class {
    ZR_ON_ANY,
    ZR_ON_COMPUTE,
    ZR_ON_GATHER,
    ZR_ON_REDUCE,
    ZR_ON_GATHER_OUTER,
    ZR_ON_REDUCE_OUTER,
    ZR_ON_PAIR_0,
    ZR_ON_TIED,
    ZR_ON_SHIFT,
    ZR_ON_STATES
};

struct zr_mutant {
    const char *name, *link;
    enum zr_mutation what;
    enum zr_event_class event;
    enum zr_stream_class stream;
    /* Acts only while the host makes this call. NULL: always. */
    const char *during;
    /* The kind of job that it changes; 0: any. For ZR_LESS_CALL, the call (enum zr_script_op_kind). */
    int action;
    /* ZR_LATE_JOB: the job is issued after the next job of this kind. 0: of any other kind. */
    int until;
    /* The case in which it is searched for (zr_verify_parse), with varying seeds. NULL: random cases. */
    const char *case_text;
    /* Flaws of the communicators, and the roles that have them, one bit each. No role: all roles. */
    unsigned flaw, roles;
    /* Acts on the last rank only. */
    bool one_rank;
};

struct zr_verify_rank {
    struct zr_verify_world *v;
    int id;
    ucontext_t context;
    char *stack;
    bool done, dead, engine_open;
    /* The activity count at which the rank found nothing to do. -1: it can run. */
    int64_t stuck_at;
    /* Calls that the model made, and points at which the rank could have died. */
    int64_t n_calls, n_points;
    int error;
    /* The rank made every call of the script. */
    bool finished;
    bool refused;

    const struct zr_verify_stage *of_stage;
    int32_t tp_rank;
    struct zr_walk walk;
    struct zr_walk_slots slots;
    /* Memory for activations that go over tp or cp (zr_verify_axis_bytes bytes). NULL without these. */
    char *activations;
    /* The beginnings of the shifts over tp and over cp that are open. NULL: none. */
    const struct zr_script_op *open_shift[2];

    struct zr_layout layout;
    /* With a mutant: the layout as the engine sees it. */
    struct zr_layout shown;
    struct zr_plan plan;
    struct zr_tensor *tensors;
    /* (n_tensors) The model's own pointers. */
    void **param, **grad;
    /* (n_tensors) Memory of the values before zero_wrap. */
    char **own;
    struct zr_engine engine;
    struct zr_loop *loop;
    /* (ZR_VERIFY_QUEUE) Clock of the model thread when it pushed each job. */
    struct zr_vclock **pushed;
    uint64_t n_pushed, n_issued;
    enum zr_verify_pace pace;
    /* The job that a mutant delays. */
    struct zr_job held;
    bool holding;
    /* (n_units) Backward uses since the last step. */
    int32_t *n_used;
    /* (n_units) Updates that the script expects, without skipped steps. */
    int32_t *n_done;
    /* The last snapshot: taken and not read yet; complete; the clock at which it was complete. */
    bool reading, readable;
    struct zr_vclock *complete;
    /* (n_units) Updates in the snapshot, and the number of steps before it. */
    int32_t *n_saved, saved_step;
    double mean[2];
    /* Buffer for values that are read and written. */
    char *scratch;
    /* Memory that stands for the file of states. NULL: there is none. The buffer of the last read, and the
     * parts that streams read from the file and wrote to it. */
    char *file, *last_buffer;
    int64_t n_read, n_written;
    uint64_t action_hash;
    int64_t step_from_ns, step_to_ns;
    /* Bytes received from other ranks after zero_wrap. */
    int64_t received_bytes;
};

/* The most classes of ranks (see zr_stage_class): at most one per rank of a case. */
enum { ZR_VERIFY_CLASSES = 64 };

/* Times of a step on the virtual clock: start of its first forward, end of its last backward, and of its
 * norm. 0: not yet. */
struct zr_verify_span {
    int64_t from_ns, to_ns, norm_ns;
};

struct zr_verify_world {
    const struct zr_verify_case *c;
    const struct zr_mutant *mutant;
    const struct zr_verify_speed *speed;
    uint64_t random;
    struct zr_verify_stage *stages;
    /* Some pipeline stage has trainable tensors. */
    bool any_trained;
    struct zr_sim *sim;
    struct zr_sim_order *order;
    /* Simulated ranks: all of the case's, or by symmetry one of each kind. */
    int n_ranks;
    bool by_symmetry;
    struct zr_symmetry symmetry;
    /* (n_ranks) The groups of each rank. */
    struct zr_mesh *mesh;
    /* Communicators by role, then by rank. NULL: nobody has the role. */
    struct zr_comm **comm[ZR_ROLES];
    /* (n_opened) The distinct arrays of comm, to close. */
    struct zr_comm **opened[ZR_ROLES];
    int n_opened;
    struct zr_verify_rank *ranks;
    int32_t *unit_of_flat;
    ucontext_t scheduler;
    struct zr_verify_rank *running;
    /* The others noticed the dead rank; a hang was broken up. */
    bool lost, hang_broken;
    /* Turns of threads so far, and the turn from which the others notice the dead rank. */
    int64_t n_turns, lose_at;
    /* Places where the mutant changed something. */
    int64_t n_acted;
    /* Jobs that loops have issued, over all ranks. */
    int64_t n_issued;
    /* Per class of ranks: gradient elements in all norms, as counted and as the script expects. */
    int64_t n_squared[ZR_VERIFY_CLASSES], n_expected[ZR_VERIFY_CLASSES];
    int64_t n_snapshots;
    /* Agreements so far, counted per rank; the result of the current and the previous one; the last error of
     * all. */
    int n_agreed, agreed[2], agreed_error;
    /* Compute time of rank 0, in the current step and the last one. */
    int64_t compute_ns, step_compute_ns;
    struct zr_verify_span span, step_span;
    void *trace;
};

/* verify_mutants.c */
bool zr_mutant_drops(void *arg, enum zr_sim_edge edge, int rank, const struct zr_event *event,
                     const struct zr_stream *stream);
/* Change a pipeline stage before anything runs: its tensors and the norm's flags; its messages. */
void zr_mutant_change_layout(struct zr_verify_world *v, struct zr_layout *l);
void zr_mutant_change_rows(struct zr_verify_world *v, struct zr_verify_stage *s);
/* Whether a shift goes to the wrong side; whether its end is left out. Lets the next operation over the axis
 * use the same `out` as the last one (mesh_axis.h). Each acts only if the mutant is that one. */
bool zr_mutant_shifts_back(struct zr_verify_rank *r, enum zero_axis axis);
bool zr_mutant_leaves_shift_open(struct zr_verify_rank *r, enum zero_axis axis);
void zr_mutant_keep_out(struct zr_verify_rank *r, enum zero_axis axis);
/* Whether a part of the file is read into r->last_buffer. */
bool zr_mutant_reads_into_last(struct zr_verify_rank *r);
/* Issues the job, or what the mutant makes of it. */
void zr_mutant_issue(struct zr_verify_rank *r, const struct zr_job *job);

/* verify_stages.c */
int zr_stages_make(struct zr_verify_world *v);
void zr_stages_free(struct zr_verify_world *v);
/* Number of data-parallel ranks: those with the same place in the pipeline and in tensor parallelism. */
int32_t zr_verify_dp(const struct zr_verify_case *c);
/* Number of units of a pipeline stage. */
int32_t zr_stage_units(const struct zr_verify_case *c, int32_t stage);
/* Stages of the whole pipeline. With more than one, ranks work by actions. */
int32_t zr_case_stages(const struct zr_verify_case *c);
static inline bool zr_in_stages(const struct zr_verify_case *c)
{
    return zr_case_stages(c) > 1;
}
static inline int32_t zr_case_pp(const struct zr_verify_case *c)
{
    return c->pp > 1 ? c->pp : 1;
}
static inline int32_t zr_case_per_rank(const struct zr_verify_case *c)
{
    return c->per_rank > 1 ? c->per_rank : 1;
}
/* The class of a rank, from 0 on. Ranks of a class have the same pipeline stages and the same index in tensor
 * parallelism. */
int zr_stage_class(const struct zr_verify_case *c, int32_t rank);
/* Sets the rank's pipeline stage and its index in tensor parallelism, at the beginning of its rows. */
void zr_stage_enter(struct zr_verify_world *v, struct zr_verify_rank *r);
/* The value of zr_content.flat for this tensor. It is equal on all ranks that have the same elements. */
int32_t zr_stage_flat(const struct zr_verify_rank *r, const struct zr_tensor *t, int32_t flat);
/* The rank whose contribution to the gradient this rank computes. Tensor-parallel ranks that compute the same
 * gradient all use the first one's. */
int zr_stage_contributor(const struct zr_verify_world *v, int rank, const struct zr_tensor *t);
/* The callback zr_sim_options.whole_grad. */
struct zr_content zr_stage_whole_grad(void *arg, int32_t flat, uint32_t step);

/* verify_actions.c */
int zr_actions_next(struct zr_verify_rank *r, const struct zr_script_op *op);
int zr_actions_move(struct zr_verify_rank *r, const struct zr_script_op *op);
int zr_actions_finish(struct zr_verify_rank *r);

/* verify_axis.c: the last one checks the arrays of shifts that the script leaves open, when nothing is in
 * flight any more. */
int64_t zr_verify_axis_bytes(void);
int zr_verify_combine(struct zr_verify_rank *r, const struct zr_script_op *op);
int zr_verify_shift(struct zr_verify_rank *r, const struct zr_script_op *op);
void zr_verify_left_shifts(struct zr_verify_rank *r);

/* verify_compute.c: the compute of one use of a unit, on the rank's compute stream; and the model's zeroing
 * of its gradients. */
int zr_compute_use(struct zr_verify_rank *r, const struct zr_script_op *op);
int zr_compute_zero_grads(struct zr_verify_rank *r);
/* The expected content of a piece's parameters. n_updates: updates of each unit. NULL: before the first. */
struct zr_content zr_compute_expected_param(const struct zr_verify_rank *r, int32_t piece,
                                            const int32_t *n_updates);

/* verify_groups.c: opens and closes the communicators of all roles, one for each group. */
int zr_groups_open(struct zr_verify_world *v);
void zr_groups_close(struct zr_verify_world *v);
/* Calls fn with one member of each open communicator, until fn returns false. */
void zr_groups_each(const struct zr_verify_world *v, bool (*fn)(void *arg, struct zr_comm *any), void *arg);

/* verify_run.c: counts the elements of a norm that the rank has ordered: those of the units that it used. */
void zr_verify_expect_norm(struct zr_verify_rank *r);
/* verify_run.c: whether the step that this rank has ordered must be skipped. That is so if its gradients are
 * not finite, and the rank that has them owns elements of a unit in it. With granules it may own none. */
bool zr_verify_skips(const struct zr_verify_rank *r, int step);

/* verify_rank.c: opens a rank, which then waits for its first turn. zr_ranks_close also closes ranks that are
 * missing or half open, and the communicators. */
int zr_rank_open(struct zr_verify_world *v, int id);
/* The callback optim.update; arg is the rank. */
int zr_rank_user_update(void *arg, const struct zero_update *u);
void zr_ranks_close(struct zr_verify_world *v);

/* verify_snapshot.c: the engine's callback for a complete snapshot; arg is the rank. */
void zr_snapshot_complete(void *arg);
/* Whether the rank's reader can read its snapshot; reads it. waited: the reader first waits until the
 * snapshot is complete. */
bool zr_snapshot_readable(const struct zr_verify_rank *r);
void zr_snapshot_read(struct zr_verify_rank *r, bool waited);
/* On the model thread: take a snapshot; wait until the previous one was read. */
int zr_snapshot_take(struct zr_verify_rank *r);
int zr_snapshot_end(struct zr_verify_rank *r);

/* verify_turns.c, called on the model thread:
 *   give_way  lets other threads run
 *   dies      says whether the rank dies here or is dead
 *   yield     waits for the device (zr_sim_options.yield; arg is the world)
 *   agree     exchanges errors through the rendezvous */
void zr_turn_give_way(struct zr_verify_rank *r);
bool zr_turn_dies(struct zr_verify_rank *r);
void zr_turn_yield(void *arg, int rank);
int zr_turn_agree(struct zr_verify_rank *r, int err);
/* Callbacks of a driven loop; arg is the rank. */
void zr_turn_issue(void *arg, const struct zr_job *job);
void zr_turn_pushed(void *arg);
void zr_turn_awaited(void *arg, uint64_t number);
/* Runs until every rank is done or nothing can run any more. */
void zr_turns_take(struct zr_verify_world *v);

/* verify_time.c, with a virtual clock: records an operation that ran (zr_sim_options.ran), and names the
 * lines of the trace. If v->trace is set, both write to it. */
void zr_time_ran(void *arg, const struct zr_info *info, const char *line, int rank, int64_t from_ns,
                 int64_t to_ns);
void zr_trace_name_lines(struct zr_verify_world *v);

/* verify_run.c: runs a case with the mutant, speed and trace in v. time may be NULL. */
int zr_verify_world_run(struct zr_verify_world *v, struct zr_verify_result *out, struct zr_verify_time *time);

#endif
