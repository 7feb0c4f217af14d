/* SPDX-License-Identifier: Apache-2.0 */
/* run_decide.c: decides whether a failed job starts again, with how many ranks and micro-batches, and says
 * why. */
#include "zero/run/run_decide.h"

#include <stdarg.h>
#include <stdio.h>

/* Restarts in a row that may reach no new step. */
enum { MAX_WITHOUT_STEP = 2 };

static void __attribute__((format(printf, 2, 3))) say(struct zr_run_next *out, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(out->text, sizeof out->text, fmt, ap);
    va_end(ap);
}

static const char *plural(int64_t n)
{
    return n == 1 ? "" : "s";
}

static const char *are(int64_t n)
{
    return n == 1 ? "is" : "are";
}

/* Returns the micro-batches of a step in the first attempt. 0: not known. */
static int64_t batches_of(const struct zr_run_ended *e)
{
    return (int64_t)e->first_world * e->first_accum;
}

/* Sets out->accum so that a step has as many micro-batches as in the first attempt. Returns false if that is
 * impossible. The text then says why. */
static bool divide_batches(const struct zr_run_limits *l, const struct zr_run_ended *e,
                           struct zr_run_next *out)
{
    int64_t all = batches_of(e), per_rank = (all + out->world / 2) / out->world;
    if (out->world == (all ? e->first_world : e->world)) /* the program's own number is right */
        return true;
    if (!all) {
        if (!l->allow_batch_change)
            say(out,
                "no restart: %d of %d ranks %s left, and no rank's record says how many micro-batches a step "
                "has; --allow-batch-change goes on with the program's number for %d",
                out->world, e->world, are(out->world), out->world);
        return l->allow_batch_change;
    }
    out->accum = (int)(per_rank > 0 ? per_rank : 1);
    if (out->accum * (int64_t)out->world == all || l->allow_batch_change)
        return true;
    say(out,
        "no restart: a step has %lld micro-batch%s (%d rank%s, grad_accum_steps %d), which %d ranks cannot "
        "share evenly; --allow-batch-change goes on with %lld",
        (long long)all, all == 1 ? "" : "es", e->first_world, plural(e->first_world), e->first_accum,
        out->world, (long long)out->accum * out->world);
    return false;
}

/* Writes why the job starts again, with how many ranks, and how far it had come. */
static void say_restart(const struct zr_run_limits *l, const struct zr_run_ended *e, struct zr_run_next *out)
{
    char reached[64] = "no record tells of a step", accum[160] = "";
    int64_t all = batches_of(e), now = (int64_t)out->world * out->accum;
    if (e->max_step >= 0)
        snprintf(reached, sizeof reached, "step %lld was reached", (long long)e->max_step);
    if (out->accum && now != all)
        snprintf(accum, sizeof accum, ", grad_accum_steps %d: %lld micro-batches in a step instead of %lld",
                 out->accum, (long long)now, (long long)all);
    else if (out->accum && out->accum != e->accum)
        snprintf(accum, sizeof accum, ", grad_accum_steps %d", out->accum);
    say(out, "restart %d of %d: %d rank%s%s; %s", e->n_attempts, l->restarts, out->world, plural(out->world),
        accum, reached);
}

/* Whether there is a reason against any restart. The text then has it. */
static bool forbids_restart(const struct zr_run_limits *l, const struct zr_run_ended *e,
                            struct zr_run_next *out)
{
    int least = l->min_ranks ? l->min_ranks : e->first_world ? e->first_world : e->world;
    if (e->cannot_start)
        say(out, "no restart: the program cannot be started");
    else if (e->n_attempts > l->restarts)
        say(out, "no restart: %s",
            l->restarts == 1 ? "the one restart is used up" : "all restarts are used up");
    else if (e->n_without_step >= MAX_WITHOUT_STEP && e->max_step >= 0)
        say(out, "no restart: %d restarts in a row reached no new step (the last one was %lld)",
            e->n_without_step, (long long)e->max_step);
    else if (e->n_without_step >= MAX_WITHOUT_STEP)
        say(out, "no restart: %d restarts in a row reached no step, according to the records of libzero",
            e->n_without_step);
    else if (e->leftovers)
        say(out, "no restart: processes of the ranks have not ended, and might write to the same files");
    else if (e->n_available < least && l->min_ranks)
        say(out, "no restart: %d rank%s %s left, and --min-ranks is %d", e->n_available,
            plural(e->n_available), are(e->n_available), least);
    else if (e->n_available < least)
        say(out, "no restart: %d of %d ranks %s left; --min-ranks M allows fewer", e->n_available, least,
            are(e->n_available));
    return out->text[0];
}

void zr_run_decide(const struct zr_run_limits *l, const struct zr_run_ended *e, struct zr_run_next *out)
{
    *out = (struct zr_run_next){.world = e->n_available};
    if (e->asked || l->restarts == 0 || forbids_restart(l, e, out))
        return;
    out->restart = divide_batches(l, e, out);
    if (out->restart)
        say_restart(l, e, out);
}
