/* SPDX-License-Identifier: Apache-2.0 */
/* observer.h: observers of what the model does with the memory that it is given.
 *
 * Each observer finds one kind of misuse and is one file of check/; check/observers.c lists them. The engine
 * calls all observers at the same moments, on the model's thread, and does not know what they look for. The
 * first error that one returns ends the program's call. */
#ifndef ZR_SHARD_ENGINE_OBSERVER_H
#define ZR_SHARD_ENGINE_OBSERVER_H

#include "shard/engine/engine.h"

struct zr_walk_given;

enum zr_grant_kind {
    ZR_GRANT_PARAM,
    ZR_GRANT_GRAD,
    /* the slots of a pipeline action */
    ZR_GRANT_SLOTS
};

/* Memory that the model is given for a while. */
struct zr_grant {
    enum zr_grant_kind kind;
    /* false: a gradient is announced before the library waits for its memory and zeroes it */
    bool ready;
    /* PARAM and GRAD: as in struct zr_action */
    int32_t unit, slot;
    bool bracket, fill, in_flight;
    /* SLOTS only */
    const struct zr_walk_given *slots;
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
    ZR_STEP_DROPPED
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

enum { ZR_MOST_OBSERVERS = 6 };

/* Observers in the order in which they see a begin. They see an end in the reverse order. */
struct zr_observers {
    struct zr_observer *of[ZR_MOST_OBSERVERS];
    int n;
};

/* check/observers.c. Call open once streams and tables are open. If it fails, close what it has opened. */
int zr_observers_open(struct zr_engine *e, const struct zr_engine_parts *parts);
void zr_observers_give_back(struct zr_engine *e);
void zr_observers_close(struct zr_engine *e);

int zr_observe_begin(struct zr_engine *e, const struct zr_grant *g);
int zr_observe_end(struct zr_engine *e, const struct zr_grant *g);
int zr_observe_reduce(struct zr_engine *e, int32_t unit, enum zr_reduce_moment at);
int zr_observe_step(struct zr_engine *e, enum zr_step_moment at, const char *call);

#endif
