/* SPDX-License-Identifier: Apache-2.0 */
/* nccl_watch.c: watches the operations of a context's NCCL communicators, so that nothing waits for ever.
 *
 * One thread watches all communicators of a context. While something is pending it looks every few
 * milliseconds. It looks for completed operations, ledgers that differ, and NCCL's asynchronous errors. It
 * also looks for operations and calls into NCCL that take longer than timeout_ms. Time counts from when the
 * stream gets to the operation, so that waiting for the model's compute is no fault.
 *
 * A failure that it finds goes to the other ranks over the rendezvous at once. If calls that differ between
 * ranks may be the cause, these are compared first (nccl_comm.h).
 *
 * After a failure a helper thread aborts the communicator. That ends the kernels that wait for peers, and the
 * streams go on. ncclCommAbort frees the communicator, so the issuing thread must not be inside NCCL with it.
 * If it is, ncclCommRevoke makes its call return first. If NCCL has no such function, or if that does not
 * help within some seconds, it is aborted all the same. NCCL cannot end a symmetric kernel or a copy-engine
 * gather that is stuck. If the abort does not return in time, the communicator and its memory are never
 * freed, and the log says so. */
#include "comm/flight.h"
#include "comm/meet/rendezvous.h"
#include "comm/nccl/nccl_comm.h"
#include "comm/timed_call.h"

#include <stdio.h>
#include <string.h>

enum {
    TICK_NS = 5 * 1000 * 1000,
    GRACE_NS = 500 * 1000 * 1000 /* time for a call in progress to return before it is revoked or aborted */
};

/* Time limit of ncclCommRevoke, and of ncclCommAbort. It does not depend on timeout_ms, which may be so short
 * that a busy machine needs longer to start the thread that aborts. */
static const int64_t ABORT_NS = INT64_C(5) * 1000 * 1000 * 1000;

/* Time for a call in progress to return after ncclCommRevoke. */
static const int64_t REVOKED_NS = INT64_C(5) * 1000 * 1000 * 1000;

/* Time for comparing the ranks' calls. Rank 0 waits a little less for the ranks. */
static const int64_t DOUBT_NS = INT64_C(8) * 1000 * 1000 * 1000;

/* ---- calls under a deadline ---- */

static struct zr_task_call nccl_call(const struct zr_nccl_set *p, const char *what, int (*fn)(void *arg))
{
    return (struct zr_task_call){.what = what,
                                 .thread = "zero-nccl-call",
                                 .dev = p->dev, /* NCCL uses the thread's current device */
                                 .fn = fn,
                                 .unbegun = ncclUnhandledCudaError};
}

static int call_within(struct zr_nccl_set *p, const struct zr_task_call *call, int64_t ms, void *arg,
                       size_t bytes, ncclResult_t *res)
{
    bool left;
    int returned = ncclSuccess, err = zr_timed_call(call, ms, arg, bytes, &returned, &left);
    *res = left ? ncclInProgress : (ncclResult_t)returned;
    if (left) {
        pthread_mutex_lock(&p->lock);
        p->stuck = true;
        pthread_mutex_unlock(&p->lock);
    }
    return err;
}

int zr_nccl_timed_call(struct zr_nccl_set *p, const char *what, int64_t ms, int (*fn)(void *arg), void *arg,
                       size_t bytes, ncclResult_t *res)
{
    struct zr_task_call call = nccl_call(p, what, fn);
    call.limit = ms == ZR_NCCL_CLOSE_MS ? NULL : " (start_timeout_ms)";
    return call_within(p, &call, ms, arg, bytes, res);
}

int zr_nccl_together(struct zr_nccl_set *p, const char *what, int (*fn)(void *arg), void *arg, size_t bytes,
                     ncclResult_t *res)
{
    struct zr_task_call call = nccl_call(p, what, fn);
    call.look = p->rdv;
    call.limit = " (start_timeout_ms)";
    return call_within(p, &call, p->opt.start_timeout_ms, arg, bytes, res);
}

/* ---- failing ---- */

int zr_nccl_code(ncclResult_t res)
{
    switch (res) {
    case ncclInvalidArgument:
    case ncclInvalidUsage:
        return ZERO_ERR_ARG;
    case ncclRemoteError:
        return ZERO_ERR_PEER;
    default:
        return ZERO_ERR_SYSTEM;
    }
}

int zr_nccl_say(const struct zr_nccl_set *p, ncclComm_t comm, ncclResult_t res, const char *what)
{
    const char *more = p->api.GetLastError(comm);
    return zr_fail(zr_nccl_code(res), "%s: %s%s%s", what, p->api.GetErrorString(res),
                   more && *more ? ": " : "", more ? more : "");
}

static void reap(struct zr_nccl *m);

/* Called with the lock held. Returns false if it had failed before. */
static bool keep_failure(struct zr_nccl *m, int code, const char *text)
{
    m->abort_wanted = true;
    return zr_first_keep(&m->failure, code, text);
}

/* Called with the lock held, after all communicators that fail with one cause have its code. Threads that see
 * the alarm query them at once. */
static void raise_alarm(struct zr_nccl_set *p)
{
    atomic_store(&p->alarm, 1);
    pthread_cond_broadcast(&p->wake);
}

int zr_nccl_fail(struct zr_nccl *m, int code, const char *fmt, ...)
{
    char text[ZR_NCCL_TEXT];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    pthread_mutex_lock(&m->set->lock);
    if (keep_failure(m, code, text))
        raise_alarm(m->set);
    pthread_mutex_unlock(&m->set->lock);
    return zr_first_code(&m->failure);
}

int zr_nccl_fail_call(struct zr_nccl *m, ncclResult_t res, const char *what)
{
    int code = zr_nccl_say(m->set, m->comm, res, what);
    return zr_nccl_fail(m, code, "%s", zr_error_text());
}

static const char found_by[] = " (found by rank ";

static void report_failure(struct zr_nccl_set *p, int code, const char *text)
{
    char reported[ZR_NCCL_TEXT + 64];
    raise_alarm(p);
    snprintf(reported, sizeof reported, strstr(text, found_by) ? "%.*s" : "%.*s%s%d)", ZR_NCCL_TEXT - 1, text,
             found_by, p->rank);
    zr_rendezvous_report(p->rdv, code, reported);
}

/* Fails all communicators. The other ranks abort theirs when they learn of the failure, and the model's
 * thread may be waiting for any of them. Called with the lock held. */
static void found(struct zr_nccl_set *p, int code, const char *text)
{
    bool any = false;
    for (int i = 0; i < p->n_open; i++)
        any |= keep_failure(p->open[i], code, text);
    if (any)
        report_failure(p, code, text);
}

/* Begins a doubt. If this host's flight recorders explain it, that becomes the failure at once. Returns false
 * if the calls cannot be compared. */
static bool begin_doubt(struct zr_nccl_set *p, int code, const char *text)
{
    char why[ZR_FRAME_TEXT_BYTES];
    if (p->in_doubt)
        return true;
    int explained = zr_rendezvous_explain(p->rdv, code, text, why);
    if (explained) {
        found(p, explained, why);
        return true;
    }
    if (!zr_rendezvous_compare(p->rdv, code, text))
        return false;
    p->in_doubt = true;
    p->doubt_ends_ns = zr_now_ns() + (p->timeout_ns < DOUBT_NS ? p->timeout_ns : DOUBT_NS);
    p->doubt_code = code;
    snprintf(p->doubt_text, sizeof p->doubt_text, "%s", text);
    pthread_cond_broadcast(&p->wake);
    return true;
}

void zr_nccl_doubt(struct zr_nccl *m, int code, const char *text)
{
    if (!zr_nccl_has_failed(m) && !begin_doubt(m->set, code, text))
        found(m->set, code, text);
}

static bool all_have_failed(const struct zr_nccl_set *p)
{
    for (int i = 0; i < p->n_open; i++)
        if (!zr_nccl_has_failed(p->open[i]))
            return false;
    return true;
}

static void doubt_all(struct zr_nccl_set *p, int code, const char *text)
{
    if (!all_have_failed(p) && !begin_doubt(p, code, text))
        found(p, code, text);
}

/* Ends a doubt if rank 0 has not answered in time; rank 0 may be the cause itself. Called with the lock
 * held. */
static void end_doubt(struct zr_nccl_set *p)
{
    char text[ZR_NCCL_TEXT];
    if (!p->in_doubt || zr_now_ns() < p->doubt_ends_ns)
        return;
    snprintf(text, sizeof text, "%.600s; rank 0, which compares what the ranks called, has not answered",
             p->doubt_text);
    found(p, p->doubt_code, text);
}

/* ---- looking, all with the lock held ---- */

/* Compares all ranks' ledgers. Every rank compares the same ledgers and finds the same message. */
static void compare_ledgers(struct zr_nccl *m, int index)
{
    struct zr_nccl_set *p = m->set;
    const struct zr_group *group = &m->base.group;
    const struct zr_nccl_ledger *l = zr_nccl_ledgers(p, index);
    p->ledger_busy[index] = false;
    for (int i = 1; i < group->size; i++) {
        if (memcmp(&l[i], &l[0], sizeof *l) == 0)
            continue;
        char text[ZR_NCCL_TEXT];
        int rank = zr_group_member(group, i), first = zr_group_member(group, 0);
        if (l[i].n_issued != l[0].n_issued)
            snprintf(
                text, sizeof text,
                "rank %d issued %llu collectives up to its exchange %llu, rank %d %llu up to its exchange "
                "%llu; every rank must make the same calls",
                rank, (unsigned long long)l[i].n_issued, (unsigned long long)l[i].exchange, first,
                (unsigned long long)l[0].n_issued, (unsigned long long)l[0].exchange);
        else
            snprintf(text, sizeof text,
                     "rank %d issued different collectives from rank %d up to exchange %llu (both %llu): "
                     "another order, unit, step, size or call of the model",
                     rank, first, (unsigned long long)l[0].exchange, (unsigned long long)l[0].n_issued);
        doubt_all(p, ZERO_ERR_MISMATCH, text);
        return;
    }
}

/* Compares the maxima of an agreement: if all ledgers are equal, each pair is a word and its complement. */
static void compare_most(struct zr_nccl *m, int index)
{
    struct zr_nccl_set *p = m->set;
    uint64_t most[4];
    char text[ZR_NCCL_TEXT];
    memcpy(most, zr_nccl_ledgers(p, index), sizeof most);
    p->ledger_busy[index] = false;
    if (most[0] == ~most[1] && most[2] == ~most[3])
        return;
    if (most[2] != ~most[3])
        snprintf(text, sizeof text,
                 "one rank issued %llu collectives up to a comparison, another %llu; every rank must make "
                 "the same calls",
                 (unsigned long long)most[2], (unsigned long long)~most[3]);
    else
        snprintf(text, sizeof text,
                 "ranks issued different collectives up to a comparison (all %llu): another order, unit, "
                 "step, size or call of the model",
                 (unsigned long long)most[2]);
    doubt_all(p, ZERO_ERR_MISMATCH, text);
}

/* Looks at the world's sum, which is 0 if the ranks of each communicator have issued the same operations on
 * it. */
static void compare_world(struct zr_nccl *m, int index)
{
    struct zr_nccl_set *p = m->set;
    uint64_t sum;
    memcpy(&sum, zr_nccl_ledgers(p, index), sizeof sum);
    p->ledger_busy[index] = false;
    if (sum)
        doubt_all(
            p, ZERO_ERR_MISMATCH,
            "the ranks of a communicator issued different operations up to a comparison: another order, "
            "unit, step, size or call of the model");
}

/* Queries an event as the device does, and keeps a failure. */
static int query(struct zr_nccl *m, const struct zr_nccl_pending *e, struct zr_event *event)
{
    int done = m->set->dev->ops->event_query(event);
    if (done < 0) {
        char op[96], text[ZR_NCCL_TEXT];
        zr_post_describe(&e->op.post, op, sizeof op);
        snprintf(text, sizeof text, "%s: %s", op, zr_error_text());
        found(m->set, done, text);
    }
    return done;
}

static void reap(struct zr_nccl *m)
{
    while (m->n_got < m->n_put && !zr_nccl_has_failed(m)) {
        struct zr_nccl_pending *e = zr_nccl_entry(m, m->n_got);
        int done = query(m, e, e->done);
        if (!done && !e->begun_ns && query(m, e, e->begun) == 1) {
            e->begun_ns = zr_now_ns();
            zr_flight_start(&e->op.mark);
        }
        if (!done)
            return;
        if (done < 0)
            break;
        if (!e->begun_ns)
            zr_flight_start(&e->op.mark);
        zr_comm_done(&m->base, &e->op);
        m->n_got++;
        if (e->ledger >= 0 && m->base.role == ZR_ROLE_WORLD)
            compare_world(m, e->ledger);
        else if (e->ledger >= 0 && e->most)
            compare_most(m, e->ledger);
        else if (e->ledger >= 0)
            compare_ledgers(m, e->ledger);
    }
    if (zr_nccl_has_failed(m))
        m->n_got = m->n_put; /* nothing is counted after a failure */
}

void zr_nccl_reap(struct zr_nccl *m)
{
    pthread_mutex_lock(&m->set->lock);
    reap(m);
    pthread_mutex_unlock(&m->set->lock);
}

static void check_time(struct zr_nccl *m)
{
    struct zr_nccl_set *p = m->set;
    int64_t now = zr_now_ns();
    char op[96], text[ZR_NCCL_TEXT];
    if (m->issuing && now - m->issuing_ns > p->timeout_ns) {
        zr_post_describe(&zr_nccl_entry(m, m->n_put)->op.post, op, sizeof op);
        snprintf(text, sizeof text, "%s: NCCL has not accepted it after %lld ms (timeout_ms)", op,
                 (long long)(p->timeout_ns / 1000000));
        /* The thread that would have calls compared is inside that NCCL call. */
        found(p, ZERO_ERR_TIMEOUT, text);
    } else if (m->n_got < m->n_put) {
        const struct zr_nccl_pending *e = zr_nccl_entry(m, m->n_got);
        if (!e->begun_ns || now - e->begun_ns <= p->timeout_ns)
            return;
        zr_post_describe(&e->op.post, op, sizeof op);
        snprintf(text, sizeof text,
                 "%s: waited %lld ms (timeout_ms) for the other ranks (%llu operations are queued behind "
                 "it): one is late or issued something else, or the program uses NCCL at the same time",
                 op, (long long)(p->timeout_ns / 1000000), (unsigned long long)(m->n_put - m->n_got - 1));
        zr_nccl_doubt(m, ZERO_ERR_TIMEOUT, text);
    }
}

static void check_async(struct zr_nccl *m)
{
    struct zr_nccl_set *p = m->set;
    ncclResult_t res = ncclSuccess;
    if (!m->comm || m->abort_wanted || p->api.CommGetAsyncError(m->comm, &res) || res == ncclSuccess ||
        res == ncclInProgress)
        return;
    char op[96], what[160];
    bool under_way = m->n_got < m->n_put;
    const struct zr_nccl_pending *e = zr_nccl_entry(m, m->n_got);
    if (under_way)
        zr_post_describe(&e->op.post, op, sizeof op);
    snprintf(what, sizeof what, "%s%sNCCL's %s communicator", under_way ? op : "", under_way ? ": " : "",
             m->name);
    int code = zr_nccl_say(p, m->comm, res, what);
    zr_nccl_doubt(m, code, zr_error_text());
}

static bool watch_look(struct zr_nccl *m)
{
    reap(m);
    if (!zr_nccl_has_failed(m))
        check_time(m);
    if (m->n_got == m->n_put && !m->issuing)
        return (m->abort_wanted && !m->abort_ended) || (m->set->in_doubt && !zr_nccl_has_failed(m));
    check_async(m);
    return true;
}

/* ---- aborting ---- */

struct abort_arg {
    struct zr_nccl_api api;
    ncclComm_t comm;
};

static int abort_comm(void *arg)
{
    struct abort_arg *a = arg;
    return a->api.CommAbort(a->comm);
}

static int revoke_comm(void *arg)
{
    struct abort_arg *a = arg;
    return a->api.CommRevoke(a->comm, 0);
}

/* Whether to revoke or abort now: the issuing thread is outside NCCL, or has been inside for too long. */
static bool abort_is_due(const struct zr_nccl *m)
{
    int64_t until = m->revoked_ns ? m->revoked_ns + REVOKED_NS : m->issuing_ns + GRACE_NS;
    return m->abort_wanted && !m->abort_begun && (!m->issuing || zr_now_ns() > until);
}

static bool any_abort_is_due(const struct zr_nccl_set *p)
{
    bool due = false;
    for (int i = 0; i < p->n_open; i++)
        due |= abort_is_due(p->open[i]);
    return due;
}

struct aborting {
    struct zr_nccl *m;
    struct zr_task *task;
    struct abort_arg arg;
    bool revokes, late;
};

static void begin_abort(struct zr_nccl *m, struct aborting *a)
{
    *a = (struct aborting){.m = m, .arg = {m->set->api, m->comm}};
    a->revokes = m->issuing && m->set->api.CommRevoke && !m->revoked_ns && m->comm && !m->user_comm;
    const struct zr_task_call call = nccl_call(m->set, a->revokes ? "ncclCommRevoke" : "ncclCommAbort",
                                               a->revokes ? revoke_comm : abort_comm);
    if (m->comm && !m->user_comm && zr_task_start(&call, &a->arg, sizeof a->arg, &a->task))
        m->set->stuck = true;
    if (a->revokes)
        return;
    m->abort_begun = true;
    m->comm = NULL;
}

static void end_abort(const struct aborting *a)
{
    struct zr_nccl_set *p = a->m->set;
    p->stuck |= a->late;
    if (a->revokes) {
        /* The abort is due as soon as the call in progress has returned, or at once if revoking is late. */
        a->m->revoked_ns = zr_now_ns() - (a->late ? REVOKED_NS : 0);
        return;
    }
    a->m->abort_ended = true;
    if (a->late)
        zr_warn(p->opt.log,
                "NCCL's %s communicator could not be aborted: its memory is not freed, and its stream may "
                "never end; this process should exit",
                a->m->name);
}

/* Revokes or aborts all that are due, in parallel. Called with the lock held, which is released meanwhile. */
static void abort_due(struct zr_nccl_set *p)
{
    struct aborting all[ZR_ROLES];
    int n = 0;
    for (int i = 0; i < p->n_open; i++)
        if (abort_is_due(p->open[i]))
            begin_abort(p->open[i], &all[n++]);
    pthread_mutex_unlock(&p->lock);
    int res;
    int64_t until = zr_now_ns() + ABORT_NS;
    for (int i = 0; i < n; i++) {
        int64_t left = (until - zr_now_ns()) / 1000000;
        all[i].late = all[i].task && !zr_task_await(all[i].task, left > 0 ? left : 0, &all[i].arg, &res);
    }
    pthread_mutex_lock(&p->lock);
    for (int i = 0; i < n; i++)
        end_abort(&all[i]);
    pthread_cond_broadcast(&p->wake);
}

/* Looks at all communicators. Returns whether something is pending, so that it must look again soon. */
static bool look_at_all(struct zr_nccl_set *p)
{
    bool busy = false;
    for (int i = 0; i < p->n_open; i++)
        busy |= watch_look(p->open[i]);
    return busy;
}

static void watch(void *arg)
{
    struct zr_nccl_set *p = arg;
    int err = zr_thread_begin(p->dev);
    pthread_mutex_lock(&p->lock);
    if (err) {
        struct zr_saved_error kept;
        zr_error_save(&kept, err);
        found(p, err, kept.text);
    }
    while (!p->stop) {
        bool busy = look_at_all(p);
        end_doubt(p);
        if (any_abort_is_due(p)) {
            abort_due(p);
            continue;
        }
        if (busy) {
            struct timespec until = zr_in_ns(TICK_NS);
            pthread_cond_timedwait(&p->wake, &p->lock, &until);
        } else {
            p->idle = true;
            pthread_cond_wait(&p->wake, &p->lock);
            p->idle = false;
        }
    }
    pthread_mutex_unlock(&p->lock);
}

int zr_nccl_watch(struct zr_nccl_set *p)
{
    pthread_mutex_init(&p->lock, NULL);
    zr_cond_init(&p->wake);
    int err = zr_thread_start(&p->watcher, "zero-nccl", watch, p);
    if (!err)
        return 0;
    pthread_cond_destroy(&p->wake);
    pthread_mutex_destroy(&p->lock);
    return zr_fail_more(err, "NCCL's communicators");
}

void zr_nccl_unwatch(struct zr_nccl_set *p)
{
    pthread_mutex_lock(&p->lock);
    p->stop = true;
    pthread_cond_broadcast(&p->wake);
    pthread_mutex_unlock(&p->lock);
    zr_thread_join(&p->watcher);
}

bool zr_nccl_settle(struct zr_nccl *m)
{
    struct zr_nccl_set *p = m->set;
    pthread_mutex_lock(&p->lock);
    while (m->abort_wanted && !m->abort_ended) /* each of the watching thread's steps has a time limit */
        pthread_cond_wait(&p->wake, &p->lock);
    bool well = !p->stuck;
    pthread_mutex_unlock(&p->lock);
    return well;
}
