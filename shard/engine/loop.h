/* SPDX-License-Identifier: Apache-2.0 */
/* loop.h: the libuv loop on its own thread, and the queue by which the model's thread gives it work.
 *
 * One producer (the model's thread), one consumer (the loop's thread). Jobs are carried out in order. The
 * model's thread never waits for the loop except when the queue is full, or when it asks until when a job has
 * been carried out (zr_loop_await).
 *
 * Waking a loop costs a system call, so the producer makes it only when the loop has said that it is about to
 * sleep.
 *
 * A job may call what is not ours (a driver, optim.update, a log function) and may so never come back.
 * Whoever waits for the loop therefore watches whether it still turns (zr_loop_limit). */
#ifndef ZR_SHARD_LOOP_H
#define ZR_SHARD_LOOP_H

#include "comm/comm.h"
#include "shard/core.h"

#include <uv.h>

/* An action and what the model's thread knew when it gave it. */
struct zr_vclock;
struct zr_tuned;
struct zr_given;

struct zr_job {
    struct zr_action action;
    /* of a check (check/model_check.h); NULL: none */
    struct zr_vclock *known;
    /* NORM, UPDATE: the step's */
    const struct zr_tuned *tuned;
    /* NORM: what the program gave the step */
    const struct zr_given *given;
    uint64_t call_hash;
    /* of all that every rank makes (zr_world_hash) */
    uint64_t world_hash;
    uint32_t step;
    /* NORM: gradients are compared over tp in this step */
    bool compares_tp;
    float lr;
    /* UPDATE: how many steps have updated the unit, with this one */
    int64_t t;
    /* for the flight recorder */
    struct zr_flight_from from;
};

struct zr_loop;

/* issue is called on the loop's thread for each job. n_jobs: capacity, rounded up to a power of two. */
int zr_loop_open(int32_t n_jobs, void (*issue)(void *arg, const struct zr_job *job), void *arg,
                 struct zr_loop **out);
/* Before zr_loop_start. ready is asked on the loop's thread before each job; while it says no, the job and
 * those behind it stay queued, and the loop serves the handles of others: a job must not wait for what they
 * bring. */
void zr_loop_ask(struct zr_loop *l, bool (*ready)(void *arg, const struct zr_job *job));
/* Before zr_loop_start. While the model's thread waits for it, the loop may stand in one job, or in
 * somebody's handle, for limit_ms; after that stuck is called, once, on that thread, and nothing waits for
 * the loop any more. A job that is not ready is no standstill. ms: for how long it has stood. Not called:
 * waits have no end. */
void zr_loop_limit(struct zr_loop *l, int64_t limit_ms, void (*stuck)(void *arg, int64_t ms), void *arg);
/* A loop without a thread, for simulations: its driver carries out the jobs by zr_loop_issue_next. pushed is
 * called after each push, and awaited where the model's thread has to wait for a job: when it returns, the
 * job must have been carried out. Start and kick do nothing, and close drops what is queued. */
struct zr_loop_driver {
    void (*pushed)(void *arg);
    void (*awaited)(void *arg, uint64_t number);
    void *arg;
};
int zr_loop_open_driven(int32_t n_jobs, void (*issue)(void *arg, const struct zr_job *job), void *arg,
                        const struct zr_loop_driver *driver, struct zr_loop **out);
/* Carries out the next job: its number, or 0 when there is none. Driven loops only. */
uint64_t zr_loop_issue_next(struct zr_loop *l);
/* For handles of others (sockets), before zr_loop_start or on the loop's thread. */
uv_loop_t *zr_loop_uv(struct zr_loop *l);
/* spin_ns: how long the loop looks for more work before it sleeps. on_start (NULL: none) is the first thing
 * that runs on its thread. */
int zr_loop_start(struct zr_loop *l, int64_t spin_ns, void (*on_start)(void *arg), void *arg);
/* Queues a job and returns its number, 1-based; 0: the loop is stuck, and the job is dropped. */
uint64_t zr_loop_push(struct zr_loop *l, const struct zr_job *job);
/* Makes sure that the loop sees what was pushed: after the last of a group. */
void zr_loop_kick(struct zr_loop *l);
/* Blocks until job `number` has been carried out. false: it was not, the loop is stuck. */
bool zr_loop_await(struct zr_loop *l, uint64_t number);
/* Job `number` has been carried out. */
bool zr_loop_issued(const struct zr_loop *l, uint64_t number);
/* Carries out what is queued, calls on_stop on the loop's thread (where handles of others can be closed),
 * joins, frees. Also for a loop that was never started: then everything runs on the calling thread. NULL is
 * allowed. false: the thread has not moved for the limit (5 s at least; for one that is stuck, 5 s more) and
 * is left behind, with the loop: what it may touch has to stay, for it goes on when it can. */
bool zr_loop_close(struct zr_loop *l, void (*on_stop)(void *arg), void *arg);

#endif
