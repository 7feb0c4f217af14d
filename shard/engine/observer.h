/* SPDX-License-Identifier: Apache-2.0 */
/* observer.h: observers of what the model does with the memory that it is given.
 *
 * An observer finds one kind of misuse. Each is a file of check/; check/observers.c lists them. The engine
 * calls all of them at the same moments, on the model's thread, and knows none. The first error that one
 * returns ends the program's call. */
#ifndef ZR_SHARD_ENGINE_OBSERVER_H
#define ZR_SHARD_ENGINE_OBSERVER_H

#include "shard/engine/engine.h"

struct zr_walk_given;

enum zr_grant_kind {
    ZR_GRANT_PARAM,
    ZR_GRANT_GRAD,
    /* the slots of an action between pipeline stages */
    ZR_GRANT_SLOTS
};

/* Memory that the model is given for a while. */
struct zr_grant {
    enum zr_grant_kind kind;
    /* a gradient is announced first, before the library waits for its place and zeroes it (not ready) */
    bool ready;
    /* PARAM and GRAD: as in struct zr_action */
    int32_t unit, slot;
    bool bracket, fill, in_flight;
    /* SLOTS */
    const struct zr_walk_given *slots;
    bool evaluates;
};

enum zr_reduce_moment {
    /* the gradient was summed over tp where it lies */
    ZR_REDUCE_SUMMED,
    /* it has been reduced, and is the model's again */
    ZR_REDUCE_RETURNED
};

enum zr_step_moment {
    /* zero_norm or zero_step was called, and nothing has been done for it */
    ZR_STEP_CALLED,
    /* zero_norm has its norm */
    ZR_STEP_NORM_KNOWN,
    /* the core has taken zero_step */
    ZR_STEP_BEGUN,
    /* all jobs of the step were given to the loop */
    ZR_STEP_ISSUED,
    /* all ranks agree on the last norm that was asked for, which e->agreed has */
    ZR_STEP_AGREED,
    /* the step's outcome is known, and counted */
    ZR_STEP_SETTLED,
    /* zero_drop */
    ZR_STEP_DROPPED
};

struct zr_observer;

/* Any function may be NULL. */
struct zr_observer_ops {
    /* the model is about to get the memory; it has given it back, and its pointers still stand there */
    int (*on_begin)(struct zr_observer *o, const struct zr_grant *g);
    int (*on_end)(struct zr_observer *o, const struct zr_grant *g);
    int (*on_reduce)(struct zr_observer *o, int32_t unit, enum zr_reduce_moment at);
    /* call: "zero_step" or "zero_norm", of CALLED; else NULL */
    int (*on_step)(struct zr_observer *o, enum zr_step_moment at, const char *call);
    /* gives back what is the device's, whose streams are idle; NULL: it has none */
    void (*give_back)(struct zr_observer *o);
    /* frees what it has, but for itself */
    void (*close)(struct zr_observer *o);
};

/* The first member of each observer. */
struct zr_observer {
    const struct zr_observer_ops *ops;
    struct zr_engine *e;
};

enum { ZR_MOST_OBSERVERS = 6 };

/* In the order in which they are told of a begin; an end goes the other way round. */
struct zr_observers {
    struct zr_observer *of[ZR_MOST_OBSERVERS];
    int n;
};

/* check/observers.c. open: once the streams and tables are there; what it has opened is closed also where it
 * fails. */
int zr_observers_open(struct zr_engine *e, const struct zr_engine_parts *parts);
void zr_observers_give_back(struct zr_engine *e);
void zr_observers_close(struct zr_engine *e);

int zr_observe_begin(struct zr_engine *e, const struct zr_grant *g);
int zr_observe_end(struct zr_engine *e, const struct zr_grant *g);
int zr_observe_reduce(struct zr_engine *e, int32_t unit, enum zr_reduce_moment at);
int zr_observe_step(struct zr_engine *e, enum zr_step_moment at, const char *call);

#endif
