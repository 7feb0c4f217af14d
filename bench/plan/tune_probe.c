/* SPDX-License-Identifier: Apache-2.0 */
/* tune_probe.c: times a few steps of the best candidates. Times are means over ranks, so every rank
 * chooses the same candidate. */
#include "bench/plan/tune.h"
#include "bench/report/report.h"

#include <string.h>

#define N_ROUNDS 2
#define N_WARM   2 /* the first steps fill caches and slots */

/* The options of zero-bench train for a candidate. */
static struct train_options options_of(const struct tune_options *o, const struct candidate *c)
{
    const struct plan_options *p = &o->plan;
    struct train_options t = train_defaults(&p->model);
    t.dtype = (enum zero_dtype)p->dtype;
    t.optimizer = (enum zero_optimizer)p->optimizer;
    t.batch = p->batch;
    t.accum = p->accum;
    t.pp = p->pp;
    t.schedule = p->schedule;
    t.stages_per_rank = p->stages_per_rank;
    t.device = p->device;
    t.threads = o->threads;
    t.gpu = o->gpu;
    t.log = o->log;
    t.stage = c->stage;
    if (c->hybrid) {
        t.hybrid = c->hybrid == HYBRID_HFSDP ? ZERO_HFSDP : ZERO_HSDP;
        t.dp_replicate = tune_n_dp(o) / c->dp_shard;
    }
    t.prefetch = c->prefetch;
    t.budget = c->budget;
    t.deterministic = c->deterministic;
    t.wire_dtype = c->wire_dtype;
    t.states = c->states;
    return t;
}

static int time_steps(const struct tune_options *o, struct candidate *c, int64_t steps)
{
    double ms[TUNE_MAX_STEPS + N_WARM];
    const char *paths[] = {o->data};
    struct train_options t = options_of(o, c);
    t.data = (struct train_files){paths, o->data ? 1 : 0};
    t.steps = N_WARM + steps;
    t.step_ms = ms;
    int status = t.dtype == ZERO_BF16 ? train_run_bf16(&t) : train_run_f32(&t);
    if (status)
        return status;
    memcpy(c->ms + c->n_ms, ms + N_WARM, (size_t)steps * sizeof *ms);
    c->n_ms += steps;
    report_median(c->ms, c->n_ms); /* also sorts them */
    return 0;
}

/* The best candidate of each kind that fits. Returns their number, at most `most`. */
static int64_t first_of_kinds(const struct candidates *c, int64_t most, struct candidate **out)
{
    int64_t n = 0;
    for (int64_t i = 0; i < c->n && n < most; i++) {
        bool known = !c->all[i].fits || c->all[i].refused;
        for (int64_t k = 0; k < n; k++)
            known |= tune_same_kind(out[k], &c->all[i]);
        if (!known)
            out[n++] = &c->all[i];
    }
    return n;
}

/* There are two rounds, so that a machine that slows down meanwhile widens the times of all candidates. */
int tune_probe(const struct tune_options *o, struct candidates *c)
{
    struct candidate **tried = calloc((size_t)o->n_probe, sizeof *tried);
    int64_t n = tried ? first_of_kinds(c, o->n_probe, tried) : 0;
    int status = tried ? 0 : EXIT_FAILURE;
    for (int round = 0; round < N_ROUNDS; round++) {
        int64_t steps = round ? o->steps - o->steps / 2 : o->steps / 2;
        for (int64_t i = 0; !status && i < n; i++)
            status = time_steps(o, tried[round ? n - 1 - i : i], steps);
    }
    for (int64_t i = 0; status && i < n; i++)
        tried[i]->n_ms = 0;
    free(tried);
    return status;
}

double tune_lower_ms(const struct candidate *c)
{
    return c->ms[c->n_ms / 4];
}

double tune_upper_ms(const struct candidate *c)
{
    return c->ms[c->n_ms - 1 - c->n_ms / 4];
}

double tune_median_ms(const struct candidate *c)
{
    double ms[TUNE_MAX_STEPS];
    memcpy(ms, c->ms, (size_t)c->n_ms * sizeof *ms);
    return report_median(ms, c->n_ms);
}

bool tune_probed(const struct candidates *c)
{
    return c->n > 0 && c->all[0].n_ms > 0;
}

/* Where times overlap, the difference is noise: three quarters of one's steps must be faster than three
 * quarters of the other's. */
int64_t tune_choose(const struct candidates *c)
{
    int64_t chosen = 0;
    for (int64_t i = 1; tune_probed(c) && i < c->n; i++)
        if (c->all[i].n_ms && tune_upper_ms(&c->all[i]) < tune_lower_ms(&c->all[chosen]))
            chosen = i;
    return chosen;
}
