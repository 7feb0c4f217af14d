/* SPDX-License-Identifier: Apache-2.0 */
/* loop.h: the libuv loop on its thread, and the queue of jobs from the model's thread.
 *
 * The model's thread alone pushes jobs. They are carried out in order, one at a time: usually by the loop's
 * thread, or by the model's thread when it needs the queue to be empty (zr_loop_drain). A lock says whose
 * turn it is, and no thread waits for it. The model's thread waits for the loop only if the queue is full, or
 * until a job has been carried out (zr_loop_await).
 *
 * Waking a loop costs a system call. So the producer makes it only when the loop has announced that it is
 * about to sleep.
 *
 * A job may call foreign code (a driver, optim.update, a log function) that never returns. So a thread that
 * waits for the loop watches whether it still moves (zr_loop_limit). Nobody watches the model's thread in a
 * job; as in any call of the program, the other ranks then miss this one. */
#ifndef ZR_SHARD_LOOP_H
#define ZR_SHARD_LOOP_H

#include "comm/comm.h"
#include "shard/core.h"

#include <uv.h>

struct zr_tuned;
struct zr_carried;

/* An action, and what the model's thread knew when it gave the action to the loop. */
struct zr_job {
    struct zr_action action;
    /* from an observer, for itself (observer.h) */
    void *note;
    /* NORM, UPDATE: the step's numbers */
    const struct zr_tuned *tuned;
    /* NORM: the values that the step carries */
    const struct zr_carried *carried;
    uint64_t call_hash;
    /* hash of the calls that every rank makes (zr_world_hash) */
    uint64_t world_hash;
    uint32_t step;
    /* NORM: gradients are compared over tp in this step */
    bool compares_tp;
    float lr;
    /* UPDATE: steps that have updated the unit, with this one */
    int64_t t;
    /* NORM, UPDATE: the unit that the step updates next; -1: none */
    int32_t next;
    /* number of the step among all steps begun: skipped ones count, and those before a load */
    int64_t begun;
    /* for the flight recorder */
    struct zr_flight_from from;
};

struct zr_loop;

/* Opens a loop. It calls issue for each job, on one thread at a time. n_jobs: capacity, rounded up to a power
 * of two. */
int zr_loop_open(int32_t n_jobs, void (*issue)(void *arg, const struct zr_job *job), void *arg,
                 struct zr_loop **out);
/* Makes both threads call ready before each job. is_loop: the calling thread is the loop's. While ready
 * returns false, the job and those behind it stay queued, and the loop serves other handles, because a job
 * must not wait for what these bring. Nor may it wait for what a later job brings. Before zr_loop_start. */
void zr_loop_ask(struct zr_loop *l, bool (*ready)(void *arg, const struct zr_job *job, bool is_loop));
/* Limits how long the loop may be in one job, or in one handle, while the model's thread waits for it. After
 * limit_ms the waiting thread calls stuck once, and nothing waits for the loop any more. A job that is not
 * ready does not count. ms: how long the loop has not moved. Without this call waits have no end. Before
 * zr_loop_start. */
void zr_loop_limit(struct zr_loop *l, int64_t limit_ms, void (*stuck)(void *arg, int64_t ms), void *arg);
/* A loop without a thread, for simulations. Its driver carries out jobs by zr_loop_issue_next. pushed is
 * called after each push. awaited is called when the model's thread must wait for a job, and returns once
 * that job is carried out. Start and kick do nothing, and close drops queued jobs. */
struct zr_loop_driver {
    void (*pushed)(void *arg);
    void (*awaited)(void *arg, uint64_t number);
    void *arg;
};
int zr_loop_open_driven(int32_t n_jobs, void (*issue)(void *arg, const struct zr_job *job), void *arg,
                        const struct zr_loop_driver *driver, struct zr_loop **out);
/* Carries out the next job of a driven loop. Returns its number, or 0 if there is none. */
uint64_t zr_loop_issue_next(struct zr_loop *l);
/* Returns the uv loop, for handles such as sockets. Use it before zr_loop_start or on the loop's thread. */
uv_loop_t *zr_loop_uv(struct zr_loop *l);
/* Starts the thread. spin_ns: how long the loop looks for more work before it sleeps. on_start, unless NULL,
 * is the first function that runs on the thread. */
int zr_loop_start(struct zr_loop *l, int64_t spin_ns, void (*on_start)(void *arg), void *arg);
/* Queues a job and returns its number, from 1. Returns 0 if the loop is stuck and the job is dropped. */
uint64_t zr_loop_push(struct zr_loop *l, const struct zr_job *job);
/* Makes sure that the loop sees what was pushed. Call it after the last of a group of jobs. */
void zr_loop_kick(struct zr_loop *l);
/* Blocks until job `number` has been carried out. Returns false if the loop is stuck and has not done so. */
bool zr_loop_await(struct zr_loop *l, uint64_t number);
/* Returns once the queue is empty. The calling thread, which is the one that pushes, carries out the jobs
 * that are ready. It waits for the loop's thread only for the others. Returns false if the loop is stuck. */
bool zr_loop_drain(struct zr_loop *l);
/* Whether the calling thread is carrying out a job of the loop. */
bool zr_loop_is_inside(const struct zr_loop *l);
/* Whether job `number` has been carried out. */
bool zr_loop_issued(const struct zr_loop *l, uint64_t number);
/* Carries out queued jobs, calls on_stop on the loop's thread (where other handles can be closed), joins the
 * thread and frees the loop. If the loop was never started, everything runs on the calling thread. l may be
 * NULL. Returns false if the thread has not moved for the limit (at least 5 s; if it is stuck, 5 s more). The
 * thread and the loop are then left behind, with everything that they may use, because the thread goes on
 * when it can. */
bool zr_loop_close(struct zr_loop *l, void (*on_stop)(void *arg), void *arg);

#endif
