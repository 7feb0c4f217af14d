/* SPDX-License-Identifier: Apache-2.0 */
/* observer.h: observers of what the program does with the memory that the engine hands out.
 *
 * Whoever opens an engine installs its observers (open_observers in struct zr_engine_parts). The engine calls
 * all of them at the same moments, and does not know what they look for. The first error that one returns
 * ends the program's call. Functions are called on the model's thread unless they say otherwise. */
#ifndef ZR_SHARD_ENGINE_OBSERVER_H
#define ZR_SHARD_ENGINE_OBSERVER_H

#include "shard/engine/engine.h"

struct zr_walk_slots;

enum zr_grant_kind {
    ZR_GRANT_PARAM,
    ZR_GRANT_GRAD,
    /* the slots of a pipeline action */
    ZR_GRANT_SLOTS,
    /* all parameters, whole (zero_gather_all) */
    ZR_GRANT_ALL
};

/* Memory that the model is given for a while. */
struct zr_grant {
    enum zr_grant_kind kind;
    /* false: memory is announced before the library fills it: a gradient, or all parameters */
    bool ready;
    /* PARAM and GRAD: as in struct zr_action */
    int32_t unit, slot;
    bool bracket, fill, in_flight;
    /* SLOTS only */
    const struct zr_walk_slots *slots;
    bool evaluates;
};

enum zr_reduce_moment {
    /* the gradient was summed over tp in its place */
    ZR_REDUCE_SUMMED,
    /* it has been reduced, and belongs to the model again */
    ZR_REDUCE_RETURNED
};

enum zr_step_moment {
    /* zero_norm or zero_step was called, and nothing has been done yet */
    ZR_STEP_CALLED,
    /* the norm of zero_norm is known */
    ZR_STEP_NORM_KNOWN,
    /* the core has taken zero_step */
    ZR_STEP_BEGUN,
    /* the loop was given all jobs of the step */
    ZR_STEP_ISSUED,
    /* all ranks agree on the last norm; it is in e->agreed */
    ZR_STEP_AGREED,
    /* the step's outcome is known and counted */
    ZR_STEP_SETTLED,
    /* zero_drop */
    ZR_STEP_DROPPED,
    /* the end of zero_step, where observers of all ranks may communicate */
    ZR_STEP_OVER
};

enum zr_snapshot_moment {
    /* its copies are on the reduce stream, so that a thread of the program will read it; called by the thread
     * that carries out jobs */
    ZR_SNAPSHOT_ISSUED,
    /* the thread has read it */
    ZR_SNAPSHOT_READ
};

struct zr_observer;

/* Any function may be NULL. */
struct zr_observer_ops {
    /* The model is about to get the memory; or it has returned the memory, and its pointers have not changed
     * yet. */
    int (*on_begin)(struct zr_observer *o, const struct zr_grant *g);
    int (*on_end)(struct zr_observer *o, const struct zr_grant *g);
    int (*on_reduce)(struct zr_observer *o, int32_t unit, enum zr_reduce_moment at);
    /* call: "zero_step" or "zero_norm" at ZR_STEP_CALLED, else NULL. */
    int (*on_step)(struct zr_observer *o, enum zr_step_moment at, const char *call);
    /* The engine is about to act on a call of the program. name and phase are literals, for messages. */
    void (*on_call)(struct zr_observer *o, const char *name, int32_t unit, const char *phase, uint32_t step);
    /* The job is about to be given to the loop. An observer may leave a note in it. */
    void (*on_push)(struct zr_observer *o, struct zr_job *job);
    /* The job is about to be carried out; it was. Called by the thread that does so. */
    void (*on_job)(struct zr_observer *o, const struct zr_job *job);
    void (*on_job_done)(struct zr_observer *o);
    void (*on_snapshot)(struct zr_observer *o, enum zr_snapshot_moment at);
    /* Returns 0, or the code of the first fault so far, with its message set and logged. */
    int (*find_fault)(struct zr_observer *o);
    /* Return where the model's pointer shall point instead of the library's memory: to a piece while its unit
     * is open, and to a tensor otherwise. NULL: to the library's memory, and nowhere. */
    char *(*piece_at)(const struct zr_observer *o, const struct zr_piece *p, bool grad);
    char *(*closed_at)(const struct zr_observer *o, int32_t tensor, bool grad);
    /* Returns memory and other objects of the device, whose streams are idle. NULL: it has none. */
    void (*give_back)(struct zr_observer *o);
    /* Frees everything else except the observer itself. */
    void (*close)(struct zr_observer *o);
};

/* The first member of each observer. */
struct zr_observer {
    const struct zr_observer_ops *ops;
    struct zr_engine *e;
};

enum { ZR_MAX_OBSERVERS = 8 };

/* Observers in the order in which they see a begin. They see an end in the reverse order. */
struct zr_observers {
    struct zr_observer *of[ZR_MAX_OBSERVERS];
    int n;
};

/* For opening: installs an observer. It has `bytes`, which begin with a struct zr_observer, and then n
 * elements of size bytes, all zero. They are freed when the engine is closed. */
int zr_observer_new(struct zr_engine *e, const struct zr_observer_ops *ops, size_t bytes, int64_t n,
                    size_t size, struct zr_observer **out);
void zr_observers_give_back(struct zr_engine *e);
void zr_observers_close(struct zr_engine *e);

/* Call all observers. */
int zr_observe_begin(struct zr_engine *e, const struct zr_grant *g);
int zr_observe_end(struct zr_engine *e, const struct zr_grant *g);
int zr_observe_reduce(struct zr_engine *e, int32_t unit, enum zr_reduce_moment at);
int zr_observe_step(struct zr_engine *e, enum zr_step_moment at, const char *call);
void zr_observe_call(struct zr_engine *e, const char *name, int32_t unit, const char *phase, uint32_t step);
void zr_observe_push(struct zr_engine *e, struct zr_job *job);
void zr_observe_job(struct zr_engine *e, const struct zr_job *job);
void zr_observe_job_done(struct zr_engine *e);
void zr_observe_snapshot(struct zr_engine *e, enum zr_snapshot_moment at);
int zr_observe_fault(struct zr_engine *e);
/* Return the first address that an observer gives, or NULL. */
char *zr_observed_piece(const struct zr_engine *e, const struct zr_piece *p, bool grad);
char *zr_observed_closed(const struct zr_engine *e, int32_t tensor, bool grad);

#endif
