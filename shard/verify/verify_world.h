/* SPDX-License-Identifier: Apache-2.0 */
/* verify_world.h: what the files of the verifier share. */
#ifndef ZR_SHARD_VERIFY_WORLD_H
#define ZR_SHARD_VERIFY_WORLD_H

#include "comm/mesh.h"
#include "comm/sim/sim.h"
#include "comm/sim/symmetry.h"
#include "shard/engine/internal.h"
#include "shard/engine/walk.h"
#include "shard/verify/verify.h"

#include <ucontext.h>

/* Jobs that a loop holds. */
enum { ZR_VERIFY_QUEUE = 512 };

/* splitmix64 (Steele, Lea and Flood, OOPSLA 2014). */
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

/* What the model does, in order; the same on every rank of a stage. */
enum zr_script_op_kind {
    ZR_DO_BEGIN,
    ZR_DO_END,
    ZR_DO_USE,
    ZR_DO_MICRO,
    ZR_DO_STEP,
    ZR_DO_READ,
    ZR_DO_WRITE,
    /* all tensors that two stages have */
    ZR_DO_WRITE_TIED,
    ZR_DO_MEAN,
    ZR_DO_SNAPSHOT,
    /* the model zeroes all gradients that it has a pointer to */
    ZR_DO_ZERO,
    ZR_DO_NORM,
    ZR_DO_DROP,
    ZR_DO_GATHER_ALL,
    ZR_DO_RELEASE_ALL,
    /* of a pipeline stage: an evaluation begins, an action is asked for, what it is given is read, what it
     * gives is written, and it is over */
    ZR_DO_EVALUATE,
    ZR_DO_NEXT,
    ZR_DO_TAKE,
    ZR_DO_GIVE,
    ZR_DO_FINISH,
    /* of the model's parts, an enum zr_parts_move */
    ZR_DO_PARTS
};

/* What the parts of a model do with an activation. The last is of a host's numbers. */
enum zr_parts_move { ZR_PARTS_SUM, ZR_PARTS_SCATTER, ZR_PARTS_GATHER, ZR_PARTS_MOST, ZR_PARTS_MOVES };

/* Its most elements: more than go between parts at a time; and of numbers, all of which are compared. */
enum { ZR_VERIFY_PARTS_ELEMS = ZR_MODEL_ELEMS + 5000, ZR_VERIFY_MOST_ELEMS = 200 };

struct zr_script_op {
    uint8_t kind;
    /* as of a zr_call; of an action what its brackets are of */
    uint8_t backward, apart;
    /* of READ and WRITE: a tensor */
    int32_t unit;
    int32_t step;
    /* of USE: the one behind the others, at the end of forward and the beginning of backward */
    bool again;
    /* of PARTS: how they move n elements, and whether what comes lies in what goes */
    uint8_t how;
    bool bf16, in_place;
    int32_t n;
    /* of an action: the stage of the whole model and the micro-batch, -1: none is left; and of which
     * evaluation or step, all counted together */
    int32_t pp_stage, micro, pass;
};

struct zr_script {
    struct zr_script_op *ops;
    int32_t n, cap;
    /* (n_order) of one micro-batch; in stages, of a step */
    struct zr_call *order;
    int32_t n_order;
    /* (n_steps, n_units) contributions, one for each backward use */
    int32_t *n_contrib;
    /* the model changed its order */
    bool reordered;
    /* no backward pass is bracketed */
    bool unbracketed;
};

/* The most stages of a rank. */
enum { ZR_VERIFY_PER_RANK = 4 };

/* What the ranks that have the same pipeline stages, or stage, have alike. */
struct zr_verify_stage {
    /* of pp */
    int32_t at;
    /* (stages of a rank) where each one's units begin, and where the last one's end */
    int32_t first_unit[ZR_VERIFY_PER_RANK + 1];
    struct zr_layout *layout;
    /* its rows; each rank goes through them on its own */
    struct zr_walk walk;
    struct zr_pipe_room room;
    struct zr_script script;
    struct zr_options opt;
    struct zr_plan *plan;
};

/* verify_case.c: where a stage's tensors are, on its groups. */
int zr_verify_layout(const struct zr_verify_case *c, int32_t at, const struct zr_verify_speed *speed,
                     struct zr_layout **out);

/* verify_tensors.c: the unit that ZR_USE_TWICE uses twice; else -1. */
int32_t zr_verify_used_twice(const struct zr_verify_case *c, int32_t n_units);
/* Freed by the layout they go into. */
int zr_script_tensors(const struct zr_verify_case *c, int32_t at, const struct zr_verify_speed *speed,
                      struct zr_tensor **out, int32_t *n);
/* verify_script.c: the stage's layout and rows are there. */
int zr_script_make(const struct zr_verify_case *c, const struct zr_verify_stage *stage,
                   struct zr_script *out);
void zr_script_free(struct zr_script *s);

/* What a mutant does. LESS: something is left out. */
enum zr_mutation {
    ZR_LESS_RECORD = 1,
    ZR_LESS_WAIT,
    ZR_LESS_EVENT_SYNC,
    ZR_LESS_STREAM_SYNC,
    ZR_LESS_CLEAR,
    /* the model's thread does not wait for the loop to issue a job */
    ZR_LESS_AWAIT,
    ZR_FLAWED_COMM,
    ZR_LESS_JOB,
    ZR_TWICE_JOB,
    ZR_LATE_JOB,
    ZR_OTHER_SLOT,
    ZR_OTHER_PARTIAL,
    ZR_NO_ACCUMULATE,
    ZR_ALWAYS_ACCUMULATE,
    ZR_OTHER_SUM,
    /* a job's copies go on the gather stream */
    ZR_OTHER_STREAM,
    /* the model leaves out a call */
    ZR_LESS_CALL,
    /* a snapshot is read without waiting for it */
    ZR_EARLY_READER,
    /* nobody waits for the reader of the snapshot before */
    ZR_LESS_READER,
    /* communicators of these roles join other ranks, as many: those of a stage side by side, not its
     * parts'; of the role that joins parts the other way round */
    ZR_OTHER_GROUP,
    /* gradients that each part has of its own are not added up over the parts; those that all have alike
     * are */
    ZR_NO_PARTIAL,
    ZR_ALL_PARTIAL,
    /* the norm has what all parts have once for each of them; or of what is cut the first part's alone */
    ZR_NORM_OF_ALL,
    ZR_NORM_OF_FIRST,
    /* messages between stages have a slot less */
    ZR_LESS_SLOTS,
    /* the last stage takes its first two messages in another order; the first stage leaves its last one
     * out */
    ZR_OTHER_ORDER,
    ZR_LESS_MESSAGE,
    /* tied values do not move after a step */
    ZR_LESS_TIED_VALUES
};

enum zr_stream_class {
    ZR_ON_ANY,
    ZR_ON_COMPUTE,
    ZR_ON_GATHER,
    ZR_ON_REDUCE,
    ZR_ON_GATHER_OUTER,
    ZR_ON_REDUCE_OUTER,
    ZR_ON_EVEN_PAIR,
    ZR_ON_TIED
};

struct zr_mutant {
    const char *name, *link;
    enum zr_mutation what;
    enum zr_event_class event;
    enum zr_stream_class stream;
    /* it acts only while the host does this; NULL: always */
    const char *during;
    /* jobs: of this kind alone; 0: of any. ZR_LESS_CALL: the call, an enum zr_script_op_kind */
    int action;
    /* ZR_LATE_JOB: it is issued after the next job of this kind; 0: of any other kind */
    int until;
    /* configurations that it is looked for in, the seed apart; NULL: random ones */
    const char *on;
    /* what the communicators of these roles do wrong, a bit each; no role: all of them */
    unsigned flaw, roles;
    /* it acts on the last rank alone */
    bool one_rank;
};

struct zr_verify_rank {
    struct zr_verify_world *v;
    int id;
    ucontext_t context;
    char *stack;
    bool done, dead, engine_open;
    /* the activity at which it found nothing to do; -1: it can go on */
    int64_t stuck_at;
    /* calls of the model, and points of everything that happens to the rank */
    int64_t n_calls, n_points;
    int error;
    /* it made every call of the script */
    bool finished;
    bool refused;

    const struct zr_verify_stage *of_stage;
    int32_t part;
    struct zr_walk walk;
    struct zr_walk_given given;
    /* for what moves between parts (zr_parts_bytes); NULL: there are none */
    char *activations;

    struct zr_layout layout;
    /* with a mutant: as the engine sees it */
    struct zr_layout shown;
    struct zr_plan plan;
    struct zr_tensor *tensors;
    /* (n_tensors) the model's own pointers */
    void **param, **grad;
    /* (n_tensors) where its values are before the runtime takes them over */
    char **own;
    struct zr_engine engine;
    struct zr_loop *loop;
    /* (ZR_VERIFY_QUEUE) the model's clock when it gave a job */
    struct zr_vclock **pushed;
    uint64_t n_pushed, n_issued;
    enum zr_verify_pace pace;
    /* the job that a mutant makes late */
    struct zr_job held;
    bool holding;
    /* (n_units) backward uses since the step */
    int32_t *n_used;
    /* (n_units) updates that were not skipped, by the script */
    int32_t *n_done;
    /* The last snapshot: ordered and not read yet; complete; since when; with what in it. */
    bool reading, readable;
    struct zr_vclock *complete;
    /* (n_units) updates that are in it; steps that were made before it */
    int32_t *n_saved, saved_step;
    double mean[2];
    /* for values read and written */
    char *scratch;
    uint64_t action_hash;
    int64_t step_from_ns, step_to_ns;
    /* from other ranks, since it was wrapped */
    int64_t received_bytes;
};

/* Of ranks that have the same part of the same stage: at most as many as a case has ranks. */
enum { ZR_VERIFY_CLASSES = 64 };

/* Of a step on the virtual clock: its first forward began, its last backward ended, its norm was known. 0:
 * not yet. */
struct zr_verify_span {
    int64_t from_ns, to_ns, norm_ns;
};

struct zr_verify_world {
    const struct zr_verify_case *c;
    const struct zr_mutant *mutant;
    const struct zr_verify_speed *speed;
    uint64_t random;
    struct zr_verify_stage *stages;
    /* some stage trains something */
    bool any_trained;
    struct zr_sim *sim;
    struct zr_sim_order *order;
    /* Simulated ranks: all of the case's, or by symmetry one of each kind. */
    int n_ranks;
    bool by_symmetry;
    struct zr_symmetry symmetry;
    /* (n_ranks) what each finds its groups to be */
    struct zr_mesh *mesh;
    /* By role, (n_ranks) of each, by rank; NULL: nobody has it. Those that were opened, once each. */
    struct zr_comm **comm[ZR_ROLES], **opened[ZR_ROLES];
    int n_opened;
    struct zr_verify_rank *ranks;
    int32_t *unit_of_flat;
    ucontext_t scheduler;
    struct zr_verify_rank *running;
    /* a rank was lost; a hang was broken up */
    bool lost, ended;
    int64_t n_turns, lose_at, n_acted, n_issued;
    /* elements of gradients in all norms of the ranks of a class, and by the script */
    int64_t n_squared[ZR_VERIFY_CLASSES], n_expected[ZR_VERIFY_CLASSES];
    int64_t n_snapshots;
    /* how many ranks have agreed; on what, in this and the one before; the last error of all */
    int n_agreed, agreed[2], agreed_error;
    /* of rank 0, in this step and in the one before */
    int64_t compute_ns, step_compute_ns;
    struct zr_verify_span span, step_span;
    void *trace;
};

/* verify_mutants.c */
bool zr_mutant_drops(void *arg, enum zr_sim_edge edge, int rank, const struct zr_event *event,
                     const struct zr_stream *stream);
/* What the mutant makes of a stage before anything runs: its tensors and what the norm counts, its
 * messages. */
void zr_mutant_change_layout(struct zr_verify_world *v, struct zr_layout *l);
void zr_mutant_change_rows(struct zr_verify_world *v, struct zr_verify_stage *s);
/* Carries out the job, or what the mutant makes of it. */
void zr_mutant_issue(struct zr_verify_rank *r, const struct zr_job *job);

/* verify_stages.c */
int zr_stages_make(struct zr_verify_world *v);
void zr_stages_free(struct zr_verify_world *v);
/* Of all ranks: data-parallel ones of each part of each stage; units of a stage. */
int32_t zr_verify_dp(const struct zr_verify_case *c);
int32_t zr_stage_units(const struct zr_verify_case *c, int32_t stage);
/* Of the whole model; more than one: ranks take actions. */
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
/* Ranks that have the same part of the same stage are of one class, from 0 on. */
int zr_stage_class(const struct zr_verify_case *c, int32_t rank);
/* Its stage and part, at the beginning of its rows. */
void zr_stage_enter(struct zr_verify_world *v, struct zr_verify_rank *r);
/* Of the tensor's flat, the number in contents: the same on all that have the same elements. */
int32_t zr_stage_flat(const struct zr_verify_rank *r, const struct zr_tensor *t, int32_t flat);
/* Whose contribution to a tensor's gradient this rank's is: all parts have that of the first, where they
 * have all of it and the same. */
int zr_stage_contributor(const struct zr_verify_world *v, int rank, const struct zr_tensor *t);
/* zr_sim_options.whole_grad. */
struct zr_content zr_stage_whole_grad(void *arg, int32_t flat, uint32_t step);

/* verify_actions.c */
int zr_actions_next(struct zr_verify_rank *r, const struct zr_script_op *op);
int zr_actions_move(struct zr_verify_rank *r, const struct zr_script_op *op);
int zr_actions_finish(struct zr_verify_rank *r);

/* verify_parts.c */
int64_t zr_parts_bytes(void);
int zr_parts_do(struct zr_verify_rank *r, const struct zr_script_op *op);

/* verify_compute.c: the compute of one use of a unit, on the rank's compute stream. */
int zr_script_use(struct zr_verify_rank *r, const struct zr_script_op *op);
int zr_script_zero(struct zr_verify_rank *r);
/* The content of a piece's parameters after n_updates of each unit; NULL: before the first. */
struct zr_content zr_script_values(const struct zr_verify_rank *r, int32_t piece, const int32_t *n_updates);

/* verify_groups.c: the communicators of all roles, each of as many groups as the role has. */
int zr_groups_open(struct zr_verify_world *v);
void zr_groups_close(struct zr_verify_world *v);
/* Calls fn with one communicator of each group of each that was opened, until it returns false. */
void zr_groups_each(const struct zr_verify_world *v, bool (*fn)(void *arg, struct zr_comm *any), void *arg);

/* verify_run.c: the rank has ordered a norm, of the units that it has used. */
void zr_verify_expect_norm(struct zr_verify_rank *r);

/* verify_rank.c: opening leaves a rank that waits for its first turn. Closing NULL or half opened ones is
 * allowed; the communicators go with them. */
int zr_rank_open(struct zr_verify_world *v, int id);
/* optim.update; arg is the rank. */
int zr_rank_user_update(void *arg, const struct zr_user_update *u);
void zr_ranks_close(struct zr_verify_world *v);

/* verify_snapshot.c: what the engine tells a complete snapshot to; arg is the rank. */
void zr_snapshot_complete(void *arg);
/* The rank's reader may go on, and does; waited: knowing the snapshot to be complete. */
bool zr_snapshot_readable(const struct zr_verify_rank *r);
void zr_snapshot_read(struct zr_verify_rank *r, bool waited);
/* On the model's thread: takes one; waits until the one before was read. */
int zr_snapshot_take(struct zr_verify_rank *r);
int zr_snapshot_end(struct zr_verify_rank *r);

/* verify_turns.c, on the model's thread: others go on, then this one again; whether the rank dies here, or
 * has; a wait for the device (zr_sim_options.yield; arg is the world); what ranks agree on through the
 * rendezvous. */
void zr_turn_give_way(struct zr_verify_rank *r);
bool zr_turn_dies(struct zr_verify_rank *r);
void zr_turn_yield(void *arg, int rank);
int zr_turn_agree(struct zr_verify_rank *r, int err);
/* Of a driven loop; arg is the rank. */
void zr_turn_issue(void *arg, const struct zr_job *job);
void zr_turn_pushed(void *arg);
void zr_turn_awaited(void *arg, uint64_t number);
/* Until every rank is done, or nothing can go on any more. */
void zr_turns_take(struct zr_verify_world *v);

/* verify_time.c, where there is a clock: an operation ran (zr_sim_options.ran). With v->trace it goes there;
 * names for its lines. */
void zr_time_ran(void *arg, const struct zr_info *info, const char *line, int rank, int64_t from_ns,
                 int64_t to_ns);
void zr_trace_name_lines(struct zr_verify_world *v);

/* verify_run.c: all of a case, with mutant, speed and trace as they are in v. time may be NULL. */
int zr_verify_world_run(struct zr_verify_world *v, struct zr_verify_result *out, struct zr_verify_time *time);

#endif
