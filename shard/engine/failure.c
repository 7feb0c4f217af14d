/* SPDX-License-Identifier: Apache-2.0 */
/* failure.c: the first failure of an engine. It is kept, reported to the other ranks, and returned by every
 * later call. */
#include "comm/flight.h"
#include "comm/fork.h"
#include "shard/engine/internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* How long a wait goes on after a failure, in ns. */
static const int64_t LEFT_AFTER_NS = INT64_C(2) * 1000 * 1000 * 1000;

static const char found_by[] = " (found by rank ";

/* Reports the failure to the other ranks, with the rank that found it, unless a communicator has added
 * one. */
static void report_others(struct zr_engine *e, int code, const char *text)
{
    char reported[ZR_ERROR_BYTES / 2];
    if (!e->on_fail)
        return;
    if (strstr(text, found_by))
        snprintf(reported, sizeof reported, "%.*s", (int)sizeof reported - 1, text);
    else
        snprintf(reported, sizeof reported, "%.*s%s%d)", (int)sizeof reported - 40, text, found_by, e->rank);
    e->on_fail(e->on_fail_arg, code, reported);
}

bool zr_engine_has_failed(const struct zr_engine *e)
{
    return zr_first_code(&e->s.failure) != 0;
}

int zr_engine_fail(struct zr_engine *e, int code, const char *text)
{
    if (zr_first_keep(&e->s.failure, code, text)) {
        atomic_store(&e->s.failed_ns, zr_now_ns());
        zr_flight_fail(e->flight, code, text);
        zr_roles_abort(e, code, text);
        report_others(e, code, text);
    }
    return code;
}

void zr_engine_save_flight(struct zr_engine *e)
{
    struct zr_saved_error kept;
    char path[ZR_FLIGHT_PATH];
    zr_error_save(&kept, 0);
    if (zr_flight_save(e->flight, path))
        zr_warn(e->opt.log, "this rank's flight recorder could not be written: %s", zr_error_text());
    else if (path[0])
        zr_info(e->opt.log, "this rank's flight recorder is in %s (zero-bench flight reads it)", path);
    zr_error_restore(&kept);
}

void zr_engine_stuck(void *arg, int64_t ms)
{
    struct zr_engine *e = arg;
    enum zr_action_kind kind = (enum zr_action_kind)atomic_load(&e->i.kind);
    int32_t unit = atomic_load(&e->i.unit);
    bool on_gpu = !e->dev->ops->host_memory, user = kind == ZR_ACT_UPDATE && e->opt.update && on_gpu;
    char text[256], of[32] = "";
    if (kind && unit >= 0)
        snprintf(of, sizeof of, " of unit %d", unit);
    snprintf(text, sizeof text, "the library's own thread has made no progress for %lld ms: it is in %s%s%s",
             (long long)ms, kind ? zr_action_name(kind) : "none of its jobs", of,
             user             ? ", and has called optim.update"
             : kind && on_gpu ? ", in a call to CUDA or the communicator"
                              : "");
    zr_engine_fail(e, ZERO_ERR_TIMEOUT, text);
}

/* A failure may go from one communicator to the next around the ranks, and gain a finder each time. This
 * keeps the first, and removes it if it is this rank. */
static void keep_first_finder(char *why, int rank)
{
    char *finder = strstr(why, found_by), *end = finder ? strchr(finder, ')') : NULL;
    if (end)
        end[1] = 0;
    if (end && atoi(finder + strlen(found_by)) == rank)
        *finder = 0;
}

/* Whether no failure is known on any rank. Every call of the model asks this twice. */
static bool is_well(const struct zr_engine *e)
{
    return !zr_first_code(&e->s.failure) && !zr_first_code(&e->s.transfer_failure) && !zr_roles_alarmed(e);
}

void zr_engine_remote_failure(struct zr_engine *e, int code, const char *text)
{
    char why[ZR_ERROR_BYTES];
    int known = zr_roles_status(e, why, sizeof why);
    if (known && known != ZERO_ERR_PEER)
        code = known;
    else
        snprintf(why, sizeof why, "%s", text);
    keep_first_finder(why, e->rank);
    zr_engine_fail(e, code, why);
}

int zr_engine_status(struct zr_engine *e)
{
    if (is_well(e))
        return 0;
    int code = zr_first_code(&e->s.failure);
    char why[ZR_ERROR_BYTES];
    if (!code && zr_first_report(&e->s.transfer_failure, why, sizeof why)) {
        code = zr_engine_fail(e, zr_first_code(&e->s.transfer_failure), why);
    } else if (!code) {
        code = zr_roles_status(e, why, sizeof why);
        if (!code)
            return 0;
        keep_first_finder(why, e->rank);
        zr_engine_fail(e, code, why);
    }
    bool has_name = e->name[0];
    return zr_fail(zr_first_code(&e->s.failure), "rank %d%s%s%s: %s", e->rank, has_name ? " of \"" : "",
                   has_name ? e->name : "", has_name ? "\"" : "", e->s.failure.text);
}

/* Ends waits some time after a failure. Operations that a failure reaches end soon, and those that have not
 * ended by then may never. If one does end after all, operations behind it would use memory that is the
 * program's again, so they are prevented from running. */
static int ask_of_waiting(void *arg)
{
    struct zr_engine *e = arg;
    int err = zr_engine_status(e);
    int64_t failed_ns = atomic_load(&e->s.failed_ns);
    if (!err || !failed_ns || zr_now_ns() - failed_ns <= LEFT_AFTER_NS)
        return 0;
    atomic_store(&e->s.left, true);
    zr_engine_leave_streams(e);
    return err;
}

void zr_engine_guard_waits(struct zr_engine *e)
{
    if (e->dev->ops->ask_while_waiting && zr_roles_may_stick(e))
        e->dev->ops->ask_while_waiting(e->dev, ask_of_waiting, e);
}

int zr_engine_check_process(const struct zr_engine *e)
{
    if (e->forks == zr_fork_depth())
        return 0;
    return zr_fail(ZERO_ERR_ORDER,
                   "this process was forked from process %d, which called zero_wrap: only that process may "
                   "use the context, because its threads run there",
                   e->pid);
}

int zr_engine_check(struct zr_engine *e)
{
    int err = zr_engine_check_process(e);
    if (!err)
        err = zr_engine_status(e);
    int code = err ? 0 : zr_observe_fault(e);
    if (!code)
        return err;
    zr_engine_fail(e, code, zr_error_text());
    return zr_engine_status(e);
}
