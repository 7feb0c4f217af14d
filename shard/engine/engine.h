/* engine.h: a plan in motion: memory, streams and events of one rank, and the two hands that take the core's
 * actions.
 *
 *   model's thread:  call -> core -> actions -> the model's pointers, the compute stream  (engine_model.c)
 *   loop's thread:   -> queue -> jobs -> the gather and the reduce stream                 (engine_issue.c)
 *
 * The model's thread runs the core itself: a decision costs less than handing it over, needs no lock, and
 * cannot depend on the loop's timing. The loop only issues, in the order of the queue.
 *
 * Every arrow between streams is one event:
 *   param_free[slot]  compute -> gather   the last bracket that read the slot ended
 *   ready[unit]       gather  -> compute  the unit's parameters are gathered
 *   updated[unit]     reduce  -> gather   the optimizer wrote the shard (-> compute: nothing is gathered)
 *   grad_done[place]  compute -> reduce   backward has written the gradient
 *   grad_free[place]  reduce  -> compute  every rank has reduced it: its place may be written again
 *   step_compute      compute -> reduce   what came before zero_step is done with the parameters
 *   gather_tail       gather  -> reduce   every gather of the old parameters is done
 *   step_norm         reduce  -> host     norm, clip factor and skip flag of the step are known */
#ifndef ZR_SHARD_ENGINE_H
#define ZR_SHARD_ENGINE_H

#include "comm/comm.h"
#include "shard/engine/engine_check.h"
#include "shard/engine/loop.h"
#include "shard/engine/timeline.h"
#include "shard/plan.h"

#include <stdatomic.h>

/* What a step found out; valid after step_norm. */
struct zr_step_result {
    double grad_norm;
    bool clipped, skipped;
    int64_t save_written; /* the last save whose files all ranks had written then */
    int64_t t;            /* the engine's, after it */
    int32_t n_carried;
    double carried[ZR_MAX_CARRIED]; /* means over ranks of what zr_engine_give gave */
};

/* Slices of a tensor whose gradient lies in place, at stages 0 and 1. The model has one pointer for all of
 * them. It is taken away while one is being reduced, unless another is in a bracket or the model does not
 * bracket it: a model that zeroes its gradients meanwhile fails at once, instead of changing what is being
 * added up. */
struct zr_lending {
    int32_t n_in_flight, n_open, n_unbracketed;
};

/* All parameters, gathered (engine_all.c). */
struct zr_all {
    char *base; /* memory of its own, bytes of it; NULL: none is needed */
    int64_t bytes;
    int64_t *at; /* (n_tensors) in it; -1: the tensor lies whole elsewhere */
    bool apart;  /* in memory of the host, though the device has its own */
};

/* What steps are taken with, and may change between them (engine_tune.c). */
struct zr_tuned {
    struct zr_hyper hyper[ZR_OPTIMIZER_COUNT];
    float clip;
    bool has_states;   /* before the first step: states were written, loaded or are those of other steps */
    uint64_t last_job; /* that was told to take it; 0: none was */
};

struct zr_engine {
    struct zr_device *dev;
    struct zr_comm *gather, *reduce;
    const struct zr_layout *layout;
    const struct zr_plan *plan;
    struct zr_options opt;
    struct zr_loop *loop; /* NULL: jobs are carried out at once, on the calling thread */
    int rank, world;

    char *gather_base, *reduce_base; /* arenas */
    float *master, *state[ZR_MAX_STATES];
    char *snapshot;                  /* plan->snapshot_bytes of host_alloc memory, or NULL */
    struct zr_step_outcome *outcome; /* of the last step; host_alloc memory, valid after step_norm */
    char *words;                     /* (world, ZR_EXCHANGE_BYTES) behind it: what an exchange brought */
    int64_t allocated[ZR_MEM_COUNT], master_bytes;

    struct zr_stream *compute, *gather_stream, *reduce_stream;
    struct zr_event **events; /* all of them, for closing */
    int32_t n_events;
    struct zr_event **param_free, **ready, **updated, **grad_done, **grad_free;
    struct zr_event *step_compute, *gather_tail, *step_norm, *drained;

    /* The model's thread. */
    struct zr_core *core;
    struct zr_action *actions;
    bool unkicked;      /* pushed, but the loop was not told */
    uint64_t n_jobs;    /* pushed */
    uint64_t norm_job;  /* the last step's */
    uint64_t *unit_job; /* (n_units) the last job that writes the unit's parameters */
    uint64_t *grad_job; /* (places) the last job that reads the gradient place */
    bool *written;      /* (n_pieces) in the first step, a gradient that is not zero; NULL: not looked at */
    void **reported_param, **reported_grad; /* (n_tensors) what was last stored in the model's pointers */
    int32_t *n_shown_param, *n_shown_grad;  /* (n_tensors) slices the model's pointer can reach now */
    bool *param_shown, *grad_shown;         /* (n_units) */
    int32_t *param_slot, *grad_slot;        /* (n_units) where it is shown */
    struct zr_lending *lending;             /* (n_tensors) stages 0 and 1: may the model have the gradient? */
    bool *in_flight, *bracketed; /* (n_units) its gradient is being reduced; was ever in a backward bracket */
    int32_t *flying, n_flying;   /* the units in flight, (n_units) */
    uint32_t step;               /* calls of zero_step */
    int64_t t;                   /* steps that were not skipped */
    int64_t n_skipped, n_dropped;
    bool result_due;              /* a step's outcome was not looked at yet */
    bool result_wanted;           /* the program asked for it */
    struct zr_step_result result; /* of the last step looked at */
    struct zr_all all;
    struct zr_tuned tuned[2]; /* the one of tuned_now is the next step's; the loop reads both */
    int tuned_now;
    float lr;
    double norm;                /* of the step to come, once it was asked for */
    int32_t n_given, n_carried; /* given: for the step to come; carried: by the last one that was begun */
    double given[ZR_MAX_CARRIED], carried[ZR_MAX_CARRIED];
    bool norming;        /* what is pushed is of the step to come */
    uint64_t *late_grad; /* (n_pieces) of engine_late.c: hashes; NULL: not looked at */
    int64_t n_waits, wait_ns;
    int64_t save_seen; /* save_written of the last step looked at */

    uint64_t *kept_grad; /* (n_pieces) of check_in_place.c: hashes, 0: none; NULL: not watched */
    float **aside;       /* (n_units) of engine_aside.c: NULL but where a sum was set aside */

    /* The loop's thread. */
    struct zr_gather_seg *gather_segs;
    struct zr_reduce_seg *reduce_segs;
    uint64_t n_norms;
    _Atomic int64_t n_gather, n_reduce;
    int64_t wire_at_open; /* what opening took from the others: not the model's traffic */

    /* Any thread. */
    _Atomic int64_t save_written; /* for the step's record */

    struct zr_snapshot_listener *listener; /* of snapshots; NULL: the plan has none */

    /* The first failure, whoever met it. */
    int pid;        /* that opened it: no other may use it */
    unsigned forks; /* zr_fork_depth there */
    _Atomic int failed;
    uv_mutex_t fail_lock;
    char fail_text[ZR_ERROR_BYTES];
    void (*on_fail)(void *arg, int code, const char *text);
    void *on_fail_arg;

    struct zr_timeline *timeline; /* NULL: not kept */
    struct zr_model_check *watch; /* NULL: not checked */
};

struct zr_engine_parts {
    struct zr_device *dev;
    struct zr_comm *gather, *reduce;
    const struct zr_plan *plan; /* and its layout */
    const struct zr_options *opt;
    struct zr_loop *loop;   /* NULL or opened with zr_engine_issue and the engine's address. Without one, jobs
                               are carried out by the model's thread; where that thread computes too (host), it
                               then does all the work itself */
    void *native_stream;    /* the model's compute stream on a GPU */
    struct zr_check *check; /* dev and the communicators are its; NULL: not checked */
    /* Called once, when the first failure is recorded, by whichever thread records it: text is what another
     * rank gives to its zr_engine_remote_failure. Must not block. NULL: nobody is told. */
    void (*on_fail)(void *arg, int code, const char *text);
    void *on_fail_arg;
};

/* Everything in parts is borrowed and outlives the engine. Local: streams, events, tables. e is the caller's
 * memory (its address is the loop's argument); on failure nothing is left in it. */
int zr_engine_open(struct zr_engine *e, const struct zr_engine_parts *parts);
/* Collective, blocking: the arenas and the optimizer's memory. The parameters are not loaded: see
 * zr_engine_adopt. On failure what was allocated is freed by zr_engine_close (and the arenas with their
 * communicators). */
int zr_engine_allocate(struct zr_engine *e);
/* Local. The loop must have been stopped or never started. false: after a failure a communicator's work on
 * the streams does not end; they and the device's memory were left behind, and the device must be, too. */
bool zr_engine_close(struct zr_engine *e);

/* The loop's hand: carries out one job. arg is the engine. */
void zr_engine_issue(void *arg, const struct zr_job *job);

/* Whether a job can be carried out without waiting on the loop's thread, for zr_loop_ask. arg is the engine.
 */
bool zr_engine_is_ready(void *arg, const struct zr_job *job);

/* The model's hand: one call, through the core. Blocks only as zero_begin and zero_step say. */
int zr_engine_call(struct zr_engine *e, const struct zr_core_event *ev);

/* The program makes a call that every rank must make, besides those of zr_engine_call and zr_engine_step: for
 * messages. subject: the tensor, or -1; args: of what else must be equal. Model's thread. */
void zr_engine_called(struct zr_engine *e, enum zr_called_name name, int32_t subject, uint64_t args);

/* The step: result may be NULL; if not, waits for the norm. */
int zr_engine_step(struct zr_engine *e, float lr, struct zr_step_result *result);

/* n values of this rank that the next zr_engine_step carries; as many on every rank. Local. */
void zr_engine_give(struct zr_engine *e, const double *values, int32_t n);
/* The outcome of the last step, without a wait: *known false: it is not there yet. */
int zr_engine_last(struct zr_engine *e, bool *known, struct zr_step_result *result);

/* Between steps: what the next step is taken with, to be changed at once; every rank gives the same. Waits
 * for the step before the last to have been issued. opt.hyper and opt.clip are what the engine began with. */
struct zr_tuned *zr_engine_tune(struct zr_engine *e);
/* The number of the last step is t; the optimizer's states are those that belong to it. Between steps; every
 * rank gives the same. Waits for the last step's norm. */
int zr_engine_set_step(struct zr_engine *e, int64_t t);
/* For zr_engine_open; and what all ranks must have alike, hashed: these numbers, the step's number, and how
 * many values a step carries. */
void zr_tuned_open(struct zr_engine *e);
uint32_t zr_tuned_digest(const struct zr_engine *e, int32_t n_carried);

/* The norm of the gradients so far, as zr_engine_step will find it; asked again, the same without another
 * look. Waits for it. */
int zr_engine_norm(struct zr_engine *e, double *norm);
/* Gives the step up, with its gradients. */
int zr_engine_drop(struct zr_engine *e);

/* All parameters (engine_all.c). bytes: of memory that it takes besides the plan's; apart: in memory of the
 * host, though the device has its own. open: takes it; local. gather: collective, blocking; the model's
 * pointers go there; where: for messages and the calls' hash. release: back to where they were, and the
 * memory is given back. close: the memory alone. */
int64_t zr_engine_all_bytes(const struct zr_engine *e, bool apart);
int zr_engine_all_open(struct zr_engine *e, bool apart);
int zr_engine_all_gather(struct zr_engine *e, int32_t where);
int zr_engine_all_release(struct zr_engine *e);
void zr_engine_all_close(struct zr_engine *e);
/* Copies the unit from its slot to where all are, on the compute stream. */
int zr_all_keep(struct zr_engine *e, int32_t unit, int32_t slot);

/* What engine_step.c needs of engine_model.c: to take the first n of e->actions; to tell the communicator of
 * a call; to wait until the loop has carried out a job (0: none), without which waiting for its events would
 * not wait. */
int zr_model_act(struct zr_engine *e, int32_t n);
void zr_model_called(struct zr_engine *e, const struct zr_core_event *ev);
void zr_model_await(struct zr_engine *e, uint64_t job);

/* 0, or the first failure with its message set for this thread. Failures of a communicator, or of another
 * rank, are found here. Any thread. */
int zr_engine_status(struct zr_engine *e);
/* The same, and what the model was seen to do (cfg.check). Model's thread. */
int zr_engine_check(struct zr_engine *e);
/* Fails in a process that was forked from the one that opened it: there it must not be touched, nor closed.
 */
int zr_engine_check_process(const struct zr_engine *e);
/* Records the first failure and ends both communicators. Any thread. Returns code. */
int zr_engine_fail(struct zr_engine *e, int code, const char *text);
/* Another rank's on_fail was called with this. Where a communicator knows of a failure already, that one
 * stays the first, unless it is ZR_ERR_PEER: that is what another rank's failure looks like from here. Any
 * thread. */
void zr_engine_remote_failure(struct zr_engine *e, int code, const char *text);
/* Looks at the last step's result, waiting for its norm: e->t is right afterwards. Model's thread. */
int zr_engine_settle(struct zr_engine *e);
/* Waits for the event, or for the context to fail: on a GPU a collective that has failed may stand for ever.
 * Any thread. */
int zr_engine_wait(struct zr_engine *e, struct zr_event *event);
/* Waits until everything issued so far is done. Model's thread. */
int zr_engine_drain(struct zr_engine *e);

/* check_in_place.c: a backward bracket of a resident unit ends, whose gradient is reduced then or not; the
 * next begins, whose gradient is zeroed then or not: ZR_ERR_ORDER if the model changed what it had said to
 * keep. */
void zr_in_place_end(struct zr_engine *e, int32_t unit, bool reduced);
int zr_in_place_begin(struct zr_engine *e, int32_t unit, bool fill);
/* zero_step is called, and nothing has been done for it; the step was dropped. */
int zr_in_place_step(struct zr_engine *e);
void zr_in_place_drop(struct zr_engine *e);

/* Whether backward writes gradients, in the first step (engine_written.c). Model's thread. open: nothing
 * where the CPU cannot see them, or nobody would be told. look: a backward bracket ended. tell: the step has
 * begun; nothing is looked at afterwards. norm: of a step that is known; ZR_ERR_ORDER if the first is zero.
 */
int zr_written_open(struct zr_engine *e);
void zr_written_look(struct zr_engine *e, const struct zr_flat *f, const struct zr_piece *p, int32_t slot);
void zr_written_report(struct zr_engine *e);
int zr_written_norm(struct zr_engine *e, double grad_norm);

/* engine_late.c: the norm is known; and at the step: ZR_ERR_ORDER if a model without brackets wrote a
 * gradient since. */
void zr_late_keep(struct zr_engine *e);
int zr_late_check(const struct zr_engine *e);

/* check_stored.c: a backward bracket begins, before the model gets the gradient, zeroed or not; and, as the
 * model has given it back: ZR_ERR_ORDER if it did not store all of a tensor that has ZERO_GRAD_OVERWRITE, or
 * wrote beyond the end of one. bracket: as in struct zr_action. */
void zr_stored_begin(struct zr_engine *e, int32_t unit, int32_t slot, bool zeroed);
int zr_stored_end(struct zr_engine *e, int32_t unit, int32_t slot, bool bracket);

/* A further contribution, in one step, to a gradient that is summed in place (engine_aside.c). make: memory
 * for what is to be set aside, when the unit needs some for the first time; model's thread. carry: sets it
 * aside; add: adds it to the sum again; the loop's thread. */
int zr_aside_make(struct zr_engine *e, int32_t unit);
int zr_aside_issue(struct zr_engine *e, int32_t unit, const struct zr_tag *tag);
int zr_aside_add(struct zr_engine *e, int32_t unit);
void zr_aside_close(struct zr_engine *e);

/* Points the model at what is resident at stages 0 and 1, for good; at NULL else, and while there are no
 * values. */
void zr_engine_point(struct zr_engine *e, bool values);
void zr_engine_unpoint(struct zr_engine *e); /* all at NULL, but those that the model assigned since */
/* Stores in the model's pointer, and remembers it (engine_pointers.c). */
void zr_point_param(struct zr_engine *e, int32_t tensor, void *to);
void zr_point_grad(struct zr_engine *e, int32_t tensor, void *to);
/* Before a call is made: the pointers of its unit, or at a step of all tensors, are as they were stored; and
 * no other layer of a stacked tensor is open, whose base would move. ZR_ERR_ORDER naming the tensor, and
 * nothing changed. */
int zr_pointers_check(const struct zr_engine *e, const struct zr_core_event *ev);

/* Values. kind: -3 gradient as the update will have it (of a step whose norm was asked for, to be read only),
 * -2 parameter in the tensor's dtype, -1 master, i >= 0 state i. Collective, blocking; see zero_read and
 * zero_write. write: rank 0's data counts. */
enum { ZR_VALUE_GRAD = -3, ZR_VALUE_PARAM = -2, ZR_VALUE_MASTER = -1 };
int zr_engine_read(struct zr_engine *e, int32_t tensor, int kind, int64_t first, int64_t n, void *dst);
int zr_engine_write(struct zr_engine *e, int32_t tensor, int kind, int64_t first, int64_t n, const void *src);
/* Buffers (engine_buffers.c), all collective and blocking; no *param is NULL. read, write: elements of one,
 * of which rank 0's count; dst may be NULL, and src on other ranks. spread: rank 0's values to all. compare:
 * *element is the first that is not rank 0's here, or -1. mean: of f32 and bf16. */
int zr_engine_read_buffer(struct zr_engine *e, int32_t tensor, int64_t first, int64_t n, void *dst);
int zr_engine_write_buffer(struct zr_engine *e, int32_t tensor, int64_t first, int64_t n, const void *src);
int zr_engine_spread_buffer(struct zr_engine *e, int32_t tensor);
int zr_engine_compare_buffer(struct zr_engine *e, int32_t tensor, int64_t *element);
int zr_engine_mean_buffer(struct zr_engine *e, int32_t tensor);
/* Local, blocking: between the model's memory and a row of all of them, zr_buffer_room apart (out of it: in
 * the order of the model's stream). */
int zr_engine_copy_buffers(struct zr_engine *e, char *base, bool into_model);

/* Collective: gives rank 0's buffers to all, and params: takes over the model's parameters from rank 0. */
int zr_engine_adopt(struct zr_engine *e, bool params);
/* Collective, blocking: the parameters by a callback, as cfg.init in zero.h (engine_init.c). */
int zr_engine_init(struct zr_engine *e,
                   int (*init)(void *arg, int32_t tensor, int64_t first, int64_t n, void *dst), void *arg);
/* Local, blocking: this rank's optimizer states are zero again, where a load was given up. */
int zr_engine_zero_states(struct zr_engine *e);
/* Collective: each of values[0..n) becomes its mean over ranks; n <= 64. */
int zr_engine_mean(struct zr_engine *e, double *values, int32_t n);
/* The mean over ranks of the i-th double of n_bytes that each left in e->words. */
double zr_mean_of(const struct zr_engine *e, int64_t n_bytes, int32_t i);
/* Collective, blocking: mine (n_bytes <= ZR_EXCHANGE_BYTES) to all[rank * n_bytes] of every rank. */
int zr_engine_exchange(struct zr_engine *e, const void *mine, int64_t n_bytes, void *all);
/* Collective: everyone is here and nothing is in flight. */
int zr_engine_barrier(struct zr_engine *e);

/* Calls fn for every range of elements of `flat` in [lo, hi) that belongs to one piece: first is the flat's
 * element. */
typedef int (*zr_range_fn)(void *arg, const struct zr_flat *f, const struct zr_piece *p, int64_t first,
                           int64_t n);
int zr_flat_ranges(const struct zr_layout *l, const struct zr_flat *f, int64_t lo, int64_t hi, zr_range_fn fn,
                   void *arg);

/* Elements of a flat whose state this rank holds: its shard, or at stage 0 all. */
int64_t zr_engine_kept(const struct zr_engine *e, const struct zr_flat *f, int64_t *first);
/* Addresses of element `first` of a flat (which must be kept by this rank). */
float *zr_engine_master_at(const struct zr_engine *e, const struct zr_flat *f, int64_t first);
float *zr_engine_state_at(const struct zr_engine *e, const struct zr_flat *f, int i, int64_t first);
char *zr_engine_param_at(const struct zr_engine *e, const struct zr_flat *f, int64_t first);

/* One run of values that this rank owns and a checkpoint holds. */
struct zr_run {
    const struct zr_flat *flat;
    int kind;            /* as in zr_engine_read */
    int64_t first, n;    /* elements of the flat; n may be 0 */
    int64_t size;        /* bytes of an element */
    char *at;            /* of element first */
    int64_t snapshot_at; /* bytes, in the snapshot */
};
/* All of them, flat by flat. A non-zero result of fn ends the walk and is returned. (engine_snapshot.c) */
int zr_engine_runs(struct zr_engine *e, int (*fn)(void *arg, const struct zr_run *run), void *arg);
/* Has the loop copy them all into the snapshot, in the order of the reduce stream: after the last step's
 * update, before the next one's. Does not wait: complete(arg) is called by the stream when all is copied, and
 * never if the context fails before. The one before must have been read by then. Model's thread. */
int zr_engine_take_snapshot(struct zr_engine *e, void (*complete)(void *arg), void *arg);
int zr_engine_issue_snapshot(struct zr_engine *e); /* the loop's part of it */
/* complete is not called from here on: a call that runs is waited for, the copies are not, as after a failure
 * they may never come. Model's thread, holding nothing that complete waits for. */
void zr_engine_forget_snapshot(struct zr_engine *e);
/* For zr_engine_open and zr_engine_close. */
int zr_snapshot_listener_open(struct zr_snapshot_listener **out);
void zr_snapshot_listener_close(struct zr_snapshot_listener *l); /* NULL is allowed */
/* Whoever read the last snapshot is known to be done. Model's thread. */
void zr_engine_snapshot_read(struct zr_engine *e);

/* Loading. Collective, blocking, between steps (engine_restore.c). begin: nobody reads a shard any more. Then
 * every rank writes its runs (zr_engine_restore_run: n_bytes from host memory, over the whole run), and end
 * spreads what every rank holds of the others: resident parameters, and at stage 0 all state. */
int zr_engine_restore_begin(struct zr_engine *e);
int zr_engine_restore_run(struct zr_engine *e, const struct zr_run *run, const void *src);
int zr_engine_restore_end(struct zr_engine *e);
/* Collective, blocking: resident parameters, of which every rank has its part. */
int zr_engine_gather_residents(struct zr_engine *e);

/* The gradient place of unit, as an index of grad_done, grad_free and grad_job. */
static inline int32_t zr_grad_place(const struct zr_plan *p, int32_t unit, int32_t slot)
{
    return slot >= 0 ? p->layout->n_units + slot : unit;
}

static inline struct zr_step_scalars *zr_engine_scalars(const struct zr_engine *e)
{
    return (struct zr_step_scalars *)(e->reduce_base + e->plan->control_at);
}

static inline struct zr_step_record *zr_engine_record(const struct zr_engine *e, int rank)
{
    return (struct zr_step_record *)(e->reduce_base + e->plan->exchange_at +
                                     rank * (int64_t)ZR_EXCHANGE_BYTES);
}

#endif
