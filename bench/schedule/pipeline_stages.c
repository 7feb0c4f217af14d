/* SPDX-License-Identifier: Apache-2.0 */
/* pipeline_stages.c: divides layers over pipeline stages, and times the library's schedules. */
#include "bench/schedule/pipeline_stages.h"

#include "kernels/error.h"
#include "shard/pipeline/pipeline.h"
#include "zero/zero.h"

#include <stdio.h>

const struct option_word pipe_schedules[] = {{"1f1b", ZERO_SCHEDULE_1F1B},
                                             {"gpipe", ZERO_SCHEDULE_GPIPE},
                                             {"interleaved", ZERO_SCHEDULE_INTERLEAVED},
                                             {"zero-bubble", ZERO_SCHEDULE_ZERO_BUBBLE},
                                             {0}};

const char *pipe_options_fault(int schedule, int64_t pp, int64_t per_rank)
{
    bool may_have_several = schedule == ZERO_SCHEDULE_GPIPE || schedule == ZERO_SCHEDULE_INTERLEAVED;
    if (schedule >= 0 && pp == 1)
        return "--schedule: is of a pipeline, which --pp asks for";
    if (per_rank > 1 && (pp == 1 || !may_have_several))
        return "--stages-per-rank: is of --pp with --schedule interleaved or gpipe";
    return NULL;
}

void pipe_options_default(int *schedule, int64_t *micro_batches, int64_t pp)
{
    *schedule = *schedule >= 0 ? *schedule : ZERO_SCHEDULE_1F1B;
    *micro_batches = *micro_batches ? *micro_batches : pp > 1 ? 2 * pp : 1;
}

int64_t pipe_layers_of(int64_t layers, int64_t pp, int64_t stage)
{
    /* the order in which stages get one of the layers that are left over */
    int64_t turn = stage == pp - 1 ? pp - 1 : stage == 0 ? pp - 2 : stage - 1;
    return layers / pp + (turn < layers % pp);
}

int64_t pipe_layers_of_rank(int64_t layers, int64_t pp, int64_t per_rank, int64_t rank)
{
    int64_t n = 0;
    for (int64_t s = rank; s < pp * per_rank; s += pp)
        n += pipe_layers_of(layers, pp * per_rank, s);
    return n;
}

static bool are_alike(int64_t layers, int64_t pp, int64_t per_rank, int64_t a, int64_t b)
{
    for (int64_t s = 0; s < pp * per_rank; s += pp)
        if (pipe_layers_of(layers, pp * per_rank, s + a) != pipe_layers_of(layers, pp * per_rank, s + b))
            return false;
    return true;
}

/* Few ranks between the first and the last are different from every lower one. */
void pipe_find_alike(int64_t *like, int64_t layers, int64_t pp, int64_t per_rank)
{
    for (int64_t r = 0; r < pp; r++) {
        int64_t lower = r == 0 || r == pp - 1 ? r : 1;
        while (lower < r && (like[lower] != lower || !are_alike(layers, pp, per_rank, lower, r)))
            lower++;
        like[r] = lower;
    }
}

int64_t pipe_parts(int schedule, int64_t per_rank, int64_t backward)
{
    /* zero-bubble fills idle time with gradients of weights, so 1F1B's bubble shrinks by those of both
     * directions */
    return schedule == ZERO_SCHEDULE_ZERO_BUBBLE && backward > 1 ? (1 + backward) / (backward - 1) : per_rank;
}

/* indexed by enum zero_schedule */
static const enum zr_pipeline_kind kinds[] = {[ZERO_SCHEDULE_1F1B] = ZR_1F1B,
                                              [ZERO_SCHEDULE_GPIPE] = ZR_GPIPE,
                                              [ZERO_SCHEDULE_INTERLEAVED] = ZR_INTERLEAVED,
                                              [ZERO_SCHEDULE_ZERO_BUBBLE] = ZR_ZERO_BUBBLE};

/* The change that an action makes to the number of micro-batches whose activations are kept. */
static int kept_by(enum zr_pipe_kind kind)
{
    return kind == ZR_PIPE_FORWARD ? 1 : zr_pipe_gives_weights(kind) ? -1 : 0;
}

/* The same of those between the two parts of a backward pass. */
static int between_by(enum zr_pipe_kind kind)
{
    return kind == ZR_PIPE_BACKWARD_INPUT ? 1 : kind == ZR_PIPE_BACKWARD_WEIGHT ? -1 : 0;
}

/* The most bytes that a rank has at any time, if its actions change the number of those in `bytes`. */
static int64_t most_bytes(const int64_t *bytes, int (*change)(enum zr_pipe_kind kind),
                          const struct zr_pipe_row *row)
{
    int64_t now = 0, most = 0;
    for (int64_t i = 0; i < row->n && bytes; i++) {
        now += change(row->at[i].kind) * bytes[row->at[i].stage];
        most = now > most ? now : most;
    }
    return most;
}

/* A rank exchanges messages with the ranks before and after it, and a pair's slots must not overlap those
 * of its neighbours' other pairs. Two sets of slots suffice, except in a ring of an odd number of ranks
 * (several stages on a rank), which needs three. */
static int32_t count_slots(const struct pipe_times *t, int32_t n_onward, int32_t n_back)
{
    return (t->per_rank > 1 && t->pp % 2 ? 3 : 2) * t->per_rank * (n_onward + n_back);
}

static void take_report(const struct pipe_times *t, const struct zr_pipe_report *report,
                        struct pipe_result *out)
{
    double idle = 0;
    for (int32_t s = 0; s < t->pp; s++) {
        idle += (double)report->ranks[s].idle_ns;
        out->kept[s] = (int32_t)report->ranks[s].peak_activations;
    }
    out->span_ns = report->span_ns;
    out->bubble = idle / ((double)t->pp * (double)report->span_ns);
}

int pipe_simulate(const struct pipe_times *t, struct pipe_result *out)
{
    /* computing the gradients of weights takes as many products as the forward pass */
    const struct zr_pipe_cost cost = {.forward_ns = 1,
                                      .backward_ns = t->backward,
                                      .weight_ns = 1,
                                      .moves_ns = t->moves_ns,
                                      .units = t->forward_ns};
    struct zr_pipeline *computed = NULL, *all = NULL;
    struct zr_pipe_report report;
    int32_t n_onward = 0, n_back = 0;
    *out = (struct pipe_result){0};
    int err = zr_pipeline_build(&computed, kinds[t->schedule], t->pp, t->per_rank, t->micro_batches, false);
    /* with the costs that the library assumes */
    if (!err)
        err = zr_pipeline_lower(&all, computed, zr_pipe_assumed_cost(), 0);
    if (!err)
        err = zr_pipeline_slots(all, &n_onward, &n_back);
    if (!err)
        err = zr_pipeline_check(all, &cost, &report);
    if (!err) {
        out->n_slots = count_slots(t, n_onward, n_back);
        take_report(t, &report, out);
        for (int32_t r = 0; r < t->pp; r++)
            out->kept_bytes[r] = most_bytes(t->kept_bytes, kept_by, &computed->rows[r]) +
                                 most_bytes(t->between_bytes, between_by, &computed->rows[r]);
        zr_pipe_report_close(&report, all);
    }
    zr_pipeline_close(all);
    zr_pipeline_close(computed);
    return err;
}

int64_t pipe_kept_of(int schedule, int64_t pp, int64_t per_rank, int64_t micro_batches, int64_t stage)
{
    struct zr_pipeline *p = NULL;
    int64_t now = 0, most = 0;
    if (zr_pipeline_build(&p, kinds[schedule], (int32_t)pp, (int32_t)per_rank, (int32_t)micro_batches, false))
        return micro_batches;
    const struct zr_pipe_row *row = &p->rows[stage % pp];
    for (int64_t i = 0; i < row->n; i++) {
        if (row->at[i].stage == stage)
            now += kept_by(row->at[i].kind);
        most = now > most ? now : most;
    }
    zr_pipeline_close(p);
    return most;
}

void pipe_warn_of_few(const char *name, int64_t micro_batches, int64_t pp)
{
    if (micro_batches < pp)
        fprintf(stderr, "%s: warning: fewer micro-batches (%lld) than pipeline stages (%lld)\n", name,
                (long long)micro_batches, (long long)pp);
}
