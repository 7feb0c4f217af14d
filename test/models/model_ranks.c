/* SPDX-License-Identifier: Apache-2.0 */
/* model_ranks.c: runs and compares models as model_ranks.h describes. */
#include "test/models/model_ranks.h"
#include "test/cmocka.h"
#include "test/held_port.h"

#include <math.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

struct zero_config run_config(const struct run_setup *setup, int rank, const char *url)
{
    struct zero_config cfg = ZERO_CONFIG_INIT;
    cfg.stage = setup->stage;
    cfg.launch.world = setup->world;
    cfg.launch.rank = rank;
    cfg.launch.rendezvous = url;
    if (setup->accum)
        cfg.grad_accum_steps = setup->accum;
    if (setup->prefetch)
        cfg.memory.prefetch = setup->prefetch > 0 ? setup->prefetch : 0;
    if (setup->budget)
        cfg.memory.param_budget_bytes = setup->budget;
    cfg.memory.grad_in_place = setup->in_place;
    if (setup->deterministic)
        cfg.deterministic = setup->deterministic > 0;
    return cfg;
}

int run_failed(struct run_log *log, int err, const char *call)
{
    if (log->err == 0) {
        log->err = err;
        snprintf(log->error, sizeof log->error, "%.60s: %s: %s", call, zero_strerror(err), zero_last_error());
    }
    return err;
}

void run_unwrap(struct run_log *log, zero_ctx **z)
{
    int err = zero_unwrap(z);
    if (err != 0)
        run_failed(log, err, "zero_unwrap");
    else if (*z != NULL)
        run_failed(log, ZERO_ERR_FAILED, "zero_unwrap left a pointer");
}

int run_micro(const struct run_setup *setup, int rank, int a)
{
    return a * setup->world + rank;
}

bool run_zeroes(const struct run_setup *setup, int a, bool backward)
{
    switch (setup->zeroing) {
    case RUN_ZEROES_NEVER:
        return false;
    case RUN_ZEROES_STEP:
        return a == 0 && !backward;
    case RUN_ZEROES_MICRO:
        return !backward;
    case RUN_ZEROES_BACKWARD:
        return backward;
    }
    return false;
}

void run_lag(const struct run_setup *setup, int rank)
{
    if (setup->lags && rank == setup->world - 1)
        nanosleep(&(struct timespec){.tv_nsec = 500000}, NULL);
}

struct rank_thread {
    pthread_t thread;
    run_rank_fn *fn;
    const void *options;
    const struct run_setup *setup;
    int rank;
    const char *url;
    struct run_log *log;
};

static void *rank_main(void *arg)
{
    struct rank_thread *t = arg;
    t->fn(t->options, t->setup, t->rank, t->url, t->log);
    return NULL;
}

void run_ranks_raw(run_rank_fn *fn, const void *options, const struct run_setup *setup, struct run_log *logs)
{
    struct rank_thread threads[RUN_MAX_WORLD];
    char url[64];
    assert_in_range(setup->world, 1, RUN_MAX_WORLD);
    if (setup->world > 1)
        snprintf(url, sizeof url, "tcp://127.0.0.1:%d", held_port());
    memset(logs, 0, (size_t)setup->world * sizeof *logs);
    for (int r = 0; r < setup->world; r++) {
        threads[r] = (struct rank_thread){.fn = fn,
                                          .options = options,
                                          .setup = setup,
                                          .rank = r,
                                          .url = setup->world > 1 ? url : NULL,
                                          .log = &logs[r]};
        assert_int_equal(pthread_create(&threads[r].thread, NULL, rank_main, &threads[r]), 0);
    }
    for (int r = 0; r < setup->world; r++)
        pthread_join(threads[r].thread, NULL);
}

struct run_log run_ranks(const struct run_model *model, const void *options, const struct run_setup *setup)
{
    struct run_log logs[RUN_MAX_WORLD];
    int n_failed = 0;
    run_ranks_raw(model->rank, options, setup, logs);
    for (int r = 0; r < setup->world; r++)
        if (logs[r].err != 0) {
            print_error("%s: rank %d: %s\n", run_setup_text(setup), r, logs[r].error);
            n_failed++;
        }
    if (n_failed > 0)
        fail_msg("%s: %d ranks failed", run_setup_text(setup), n_failed);
    for (int r = 1; r < setup->world; r++) {
        char what[320];
        snprintf(what, sizeof what, "%s, rank %d against rank 0", run_setup_text(setup), r);
        run_assert_same(&logs[0], &logs[r], what);
        run_log_free(&logs[r]);
    }
    return logs[0];
}

struct run_log run_plain(const struct run_model *model, const void *options)
{
    struct run_log log = {0};
    model->plain(options, &log);
    if (log.err != 0)
        fail_msg("plain: %s", log.error);
    assert_true(log.n_steps > 0 && log.n_weights > 0);
    return log;
}

void run_log_free(struct run_log *log)
{
    free(log->weights);
    free(log->states);
    log->weights = log->states = NULL;
}

static void assert_same_doubles(const double *a, const double *b, int n, const char *name, const char *what)
{
    for (int i = 0; i < n; i++)
        if (memcmp(&a[i], &b[i], sizeof *a) != 0)
            fail_msg("%s: %s of step %d: %.17g, expected %.17g", what, name, i, b[i], a[i]);
}

static void assert_same_floats(const float *a, const float *b, int64_t n, const char *name, const char *what)
{
    for (int64_t i = 0; i < n; i++)
        if (memcmp(&a[i], &b[i], sizeof *a) != 0)
            fail_msg("%s: %s %lld of %lld: %.9g, expected %.9g", what, name, (long long)i, (long long)n,
                     (double)b[i], (double)a[i]);
}

/* Gradient norms and states are compared between wrapped runs only. A plain run sums its norm in another
 * order, and stores its states anywhere. */
void run_assert_same(const struct run_log *a, const struct run_log *b, const char *what)
{
    assert_int_equal(a->n_steps, b->n_steps);
    assert_int_equal(a->n_weights, b->n_weights);
    assert_same_doubles(a->loss, b->loss, a->n_steps, "loss", what);
    assert_same_doubles(a->eval, b->eval, a->n_steps, "evaluation loss", what);
    assert_same_floats(a->weights, b->weights, a->n_weights, "weight", what);
    if (a->states != NULL && b->states != NULL) {
        assert_int_equal(a->n_states, b->n_states);
        assert_same_doubles(a->norm, b->norm, a->n_steps, "gradient norm", what);
        assert_same_floats(a->states, b->states, a->n_states, "optimizer state", what);
    }
}

static void assert_near_doubles(const double *a, const double *b, int n, double tolerance, const char *name,
                                const char *what)
{
    for (int i = 0; i < n; i++)
        if (!(fabs(a[i] - b[i]) <= tolerance * (fabs(a[i]) + 1e-3)))
            fail_msg("%s: %s of step %d: %.9g, expected %.9g within %g", what, name, i, b[i], a[i],
                     tolerance);
}

void run_assert_near(const struct run_model *model, const struct run_log *a, const struct run_log *b,
                     const char *what)
{
    assert_int_equal(a->n_steps, b->n_steps);
    assert_int_equal(a->n_weights, b->n_weights);
    assert_near_doubles(a->loss, b->loss, a->n_steps, model->tolerance, "loss", what);
    assert_near_doubles(a->eval, b->eval, a->n_steps, model->tolerance, "evaluation loss", what);
    if (a->norm[0] > 0.0) /* some plain models do not compute it */
        assert_near_doubles(a->norm, b->norm, a->n_steps, 10 * model->tolerance, "gradient norm", what);

    /* A single weight may drift where its gradient is only rounding error. The distance of all weights may
     * not. */
    double distance = 0.0, size = 0.0;
    for (int64_t i = 0; i < a->n_weights; i++) {
        distance += pow((double)a->weights[i] - b->weights[i], 2);
        size += pow(a->weights[i], 2);
    }
    if (!(sqrt(distance) <= 10 * model->tolerance * sqrt(size)))
        fail_msg("%s: weights differ by %g of their norm, allowed %g", what, sqrt(distance / size),
                 10 * model->tolerance);
}

void run_assert_learned(const struct run_log *log, double part)
{
    double first = log->loss[0], last = log->loss[log->n_steps - 1];
    if (!(last < part * first))
        fail_msg("the loss went from %g to %g, expected less than %g", first, last, part * first);
}

const char *run_setup_text(const struct run_setup *s)
{
    static _Thread_local char text[256];
    static const char *const zeroing[] = {"", ", zeroes each step", ", zeroes each micro-batch",
                                          ", zeroes before backward"};
    snprintf(text, sizeof text, "stage %d, world %d, accum %d, prefetch %d, budget %lld, %s%s%s%s%s%s%s",
             s->stage, s->world, s->accum > 0 ? s->accum : 1, s->prefetch, (long long)s->budget,
             s->brackets ? "brackets" : "no brackets", s->order ? ", order given" : "", zeroing[s->zeroing],
             s->in_place ? ", in place" : "",
             s->deterministic > 0   ? ", deterministic"
             : s->deterministic < 0 ? ", not deterministic"
                                    : "",
             s->no_micro ? ", no zero_micro" : "", s->no_info ? ", no info" : "");
    return text;
}

void run_compare(const struct run_model *model, const void *options, const struct run_setup *base,
                 int max_world, bool exact)
{
    struct run_log plain = run_plain(model, options);
    for (int world = 1; world <= max_world; world++) {
        struct run_log first = {0};
        for (int stage = 0; stage <= (base->brackets ? 3 : 1); stage++) {
            struct run_setup setup = *base;
            setup.world = world;
            setup.stage = stage;
            struct run_log log = run_ranks(model, options, &setup);
            if (world == 1 && exact)
                run_assert_same(&plain, &log, run_setup_text(&setup));
            run_assert_near(model, &plain, &log, run_setup_text(&setup));
            if (stage == 0) {
                first = log;
            } else {
                run_assert_same(&first, &log, run_setup_text(&setup));
                run_log_free(&log);
            }
        }
        run_log_free(&first);
    }
    run_log_free(&plain);
}
