/* SPDX-License-Identifier: Apache-2.0 */
/* summary.c: what zero-bench train prints and draws of a run: how it runs, each step, and the result. */
#include "bench/hybrids.h"
#include "bench/resident.h"
#include "bench/train/run.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

/* ---- each step ---- */

/* Progress from 0 to 1: of the steps or of the time, whichever ends first. */
static double share_done(const struct run *r, int64_t steps)
{
    const struct train_options *o = r->o;
    double by_steps = (double)steps / (double)o->steps;
    double by_time = o->seconds > 0 ? (double)(report_now_ns() - r->start_ns) * 1e-9 / o->seconds : 0;
    return by_steps > by_time ? by_steps : by_time;
}

/* Seconds until the run ends, by its mean speed so far or by the clock, whichever is first. */
static double seconds_left(const struct run *r, int64_t step)
{
    const struct train_options *o = r->o;
    double passed = (double)(report_now_ns() - r->start_ns) * 1e-9;
    double by_steps = o->steps < INT64_MAX
                          ? passed / (double)(r->report.n_steps + 1) * (double)(o->steps - step)
                          : INFINITY;
    double by_time = o->seconds > 0 ? fmax(o->seconds - passed, 0) : INFINITY;
    return fmin(by_steps, by_time);
}

bool train_time_is_up(const struct run *r)
{
    const struct train_options *o = r->o;
    return o->seconds > 0 && (double)(report_now_ns() - r->start_ns) * 1e-9 >= o->seconds;
}

double train_mean_loss(const struct run *r, double sum, double counted)
{
    return r->o->masks.n ? sum * (double)model_own_tokens(&r->model[0]) / counted : sum / (double)r->accum;
}

int train_take_loss(struct run *r, struct train_step *s)
{
    profile_step(r->o->profile, s->step + 1, s->step + 1 == r->o->steps);
    double values[3] = {0.0, r->at.dp == 0 && train_time_is_up(r) ? 1.0 : 0.0, r->counted};
    TRY(model_take_loss(&r->model[0], &values[0])); /* on a GPU it arrives with the norm */
    profile_enter(r->o->profile, r->z ? PROFILE_EXPOSED : PROFILE_REST);
    if (r->z)
        TRY_ZERO(zero_mean(r->z, values, 3));
    float stop = values[1] > 0.0;
    if (r->z) /* each rank of a tp group has read its own clock */
        TRY(train_reduce_tp(&r->model[0], &stop, 1, true));
    profile_enter(r->o->profile, PROFILE_REST);
    s->loss = train_mean_loss(r, values[0], values[2]);
    s->stop = stop > 0.0f;
    return 0;
}

/* Measured at every step whose number is a power of two and at the last one, because the kernel takes a while
 * to count. Memory does not grow between two steps, so no peak is missed. */
static void measure_memory(struct run *r)
{
    int64_t now = resident_bytes(), on_device = compute_used_bytes(&r->compute);
    r->peak_resident = now > r->peak_resident ? now : r->peak_resident;
    r->peak_device = on_device > r->peak_device ? on_device : r->peak_device;
}

int train_report_step(struct run *r, const struct train_step *s)
{
    const struct train_options *o = r->o;
    double ms = (double)(report_now_ns() - s->start_ns) * 1e-6;
    double tokens_per_s = (double)(r->at.n_dp * r->accum * o->batch * o->model.config.context) / ms * 1e3;
    double peak = o->peak_tflops * 1e12 * r->world;
    r->n_samples += r->accum * r->at.n_dp * o->batch;
    if (s->stop || (s->step & (s->step - 1)) == 0)
        measure_memory(r);
    if (s->empty) {
        report_empty_step(&r->report, s->step);
        return 0;
    }
    struct report_step reported_step = {
        .step = s->step,
        .loss = s->loss,
        .grad_norm = s->info.grad_norm,
        .ms = ms,
        .tokens_per_s = tokens_per_s,
        .lr = (double)s->lr,
        .mfu = peak > 0 ? tokens_per_s * model_flop_per_token(&o->model.config) / peak : NAN,
        .seconds_left = s->stop ? 0 : seconds_left(r, s->step),
        .resident_bytes = r->compute.cuda ? r->peak_device : r->peak_resident,
        .share_done = share_done(r, s->step),
        .skipped = s->info.skipped,
    };
    return report_step(&r->report, &reported_step, s->stop);
}

/* ---- the end ---- */

static int read_wrapped(void *from, int32_t tensor, int32_t value, int64_t first, int64_t n, void *dst)
{
    return take_libzero_error(zero_read(from, tensor, value, first, n, dst));
}

/* Collects on the last stage what each rank of the pipeline has filled into its s. The caller frees
 * s->ranks. */
static int gather_ranks(struct run *r, struct report_summary *s)
{
    const struct train_options *o = r->o;
    int32_t n = r->at.n_stages;
    struct report_rank *ranks = calloc((size_t)n, sizeof *ranks);
    bool *mine = calloc((size_t)n, sizeof *mine);
    int err = ranks && mine ? 0 : zr_fail(ZERO_ERR_NOMEM, "no memory for what %d ranks take", n);
    if (!err) {
        ranks[r->at.stage] =
            (struct report_rank){s->planned_bytes, s->bytes, s->activation_bytes, s->peak_rss_bytes};
        mine[r->at.stage] = true;
        const struct train_items all = {
            ranks, n,          sizeof *ranks, train_stage_bytes(&o->model.config, o->batch, sizeof(real)),
            mine,  &r->compute};
        err = train_stages_gather(r->z, &all);
    }
    free(mine);
    s->ranks = ranks;
    s->n_ranks = err ? 0 : n;
    return err;
}

/* Prints the result of the run. */
static int summarize(struct run *r, double loss)
{
    const struct train_options *o = r->o;
    int err = 0;
    if (!r->peak_resident) /* no step was made */
        measure_memory(r);
    struct report_summary s = {
        .world = r->world,
        .stage = -1,
        .states = r->states,
        .device = compute_name(&r->compute),
        .loss = loss,
        .tokens_per_step = r->at.n_dp * r->accum * o->batch * o->model.config.context,
        .flop_per_token = model_flop_per_token(&o->model.config),
        .peak_tflops = o->peak_tflops * r->world,
        .peak_device_bytes = r->peak_device,
    };
    for (int32_t k = 0; k < r->n_own; k++)
        s.activation_bytes += model_activation_bytes(&r->model[k]);
    double peak = (double)r->peak_resident;
    int n_states = train_n_states(o->optimizer, o->beta1);
    if (r->z) {
        struct zero_stats stats;
        TRY_ZERO(zero_get_stats(r->z, &stats)); /* before the state is read, which adds traffic */
        if (stats.place.n_pp == 1)              /* each pipeline stage reports its own */
            TRY_ZERO(zero_mean(r->z, &peak, 1));
        if (stats.place.n_pp > 1)
            TRY(train_stages_hash(s.state_sha256, r->at.dp == 0, r->z, r->stage, r->n_own, &o->model.config,
                                  r->tensors, r->number, n_states,
                                  train_stage_bytes(&o->model.config, o->batch, sizeof(real)), &r->compute));
        else
            TRY(state_hash(s.state_sha256, r->at.dp == 0, r->tensors, r->n_tensors, n_states, read_wrapped,
                           r->z));
        if (stats.place.n_tp > 1)
            TRY(train_hash_tp(&r->model[0], s.state_sha256));
        s.stage = stats.stage;
        s.hybrid = hybrid_of_run(stats.hybrid, stats.dp_shard, stats.place.n_data * stats.place.n_cp);
        s.dp_shard = stats.dp_shard;
        s.bytes = stats.allocated;
        s.planned_bytes = stats.planned;
        s.traffic = stats.traffic;
        s.library_bytes = stats.library_bytes;
    } else {
        int64_t n = r->plain.n_params;
        TRY(state_hash(s.state_sha256, true, r->tensors, r->n_tensors, n_states, plain_read, &r->plain));
        s.bytes.param_shards = s.bytes.grad_shards = n * (int64_t)sizeof(real);
        s.bytes.master = r->plain.master ? n * 4 : 0;
        s.bytes.moments = n * 8;
        s.bytes.total = 2 * n * (int64_t)sizeof(real) + s.bytes.master + s.bytes.moments;
        s.planned_bytes = s.bytes;
    }
    s.peak_rss_bytes = (int64_t)peak;
    if (r->at.n_stages > 1)
        err = gather_ranks(r, &s);
    if (!err)
        report_summary(&r->report, &s);
    free(s.ranks);
    return err;
}

/* Gives the times of the steps to the caller of train_run (tune), the same on all ranks: means over
 * data-parallel ranks, and of these the largest over tp. */
static int share_times(struct run *r)
{
    const struct train_options *o = r->o;
    memcpy(o->step_ms, r->report.ms, (size_t)o->steps * sizeof *o->step_ms);
    int err = r->z ? take_libzero_error(zero_mean(r->z, o->step_ms, (int32_t)o->steps)) : 0;
    for (int64_t i = 0; !err && i < o->steps && r->model[0].config.tp > 1; i++) {
        float ms = (float)o->step_ms[i];
        err = train_reduce_tp(&r->model[0], &ms, 1, true);
        o->step_ms[i] = (double)ms;
    }
    return err;
}

/* Shares the CPU time that each rank of cp spends in attention, in the mean over the data. */
static int share_attention(struct run *r, struct profile *p)
{
    const int32_t n_cp = r->o->model.config.cp > 1 ? (int32_t)r->o->model.config.cp : 1;
    p->n_cp = n_cp <= PROFILE_MAX_CP ? n_cp : 0;
    for (int32_t c = 0; c < p->n_cp; c++)
        p->attention_cpu_ms[c] = c == r->at.cp ? (double)p->attention_cpu_ns * 1e-6 * n_cp : 0;
    return r->z && p->n_cp ? take_libzero_error(zero_mean(r->z, p->attention_cpu_ms, p->n_cp)) : 0;
}

/* Completes the profile, for zero-bench profile. */
static int take_profile(struct run *r)
{
    struct profile *p = r->o->profile;
    p->rank = r->rank;
    p->world = r->world;
    p->n_kept = model_n_params(&r->o->model.config);
    TRY(share_attention(r, p));
    if (r->z) {
        struct zero_stats stats;
        TRY_ZERO(zero_get_stats(r->z, &stats));
        p->n_kept = stats.allocated.moments / 8; /* two fp32 moments for each weight */
    }
    return profile_finish(p, r->z);
}

/* Room for a text such as "stage 3 as HSDP in groups of 2 on 4 ranks (shm)". */
enum { N_HOW = 160 };
static void how_it_runs(const struct run *r, char how[N_HOW])
{
    char groups[48] = "", stages[48] = "", rows[48] = "";
    struct zero_stats s;
    if (!r->z || zero_get_stats(r->z, &s)) {
        snprintf(how, N_HOW, "not wrapped");
        return;
    }
    int hybrid = hybrid_of_run(s.hybrid, s.dp_shard, s.place.n_data * s.place.n_cp);
    if (hybrid)
        snprintf(groups, sizeof groups, " as %s in groups of %d", option_word_of(option_hybrids, hybrid),
                 s.dp_shard);
    if (s.place.n_pp > 1)
        snprintf(stages, sizeof stages, ", in %d pipeline stages", s.place.n_pp * r->n_own);
    if (s.place.n_cp > 1)
        snprintf(rows, sizeof rows, ", each row on %d", s.place.n_cp);
    snprintf(how, N_HOW, "stage %d%s on %d rank%s%s%s%s (%s)", s.stage, groups, s.place.world,
             s.place.world == 1 ? "" : "s",
             s.place.n_tp == 2  ? ", layers in 2 parts"
             : s.place.n_tp > 2 ? ", layers in parts"
                                : "",
             rows, stages, s.backend);
}

/* Writes the timeline and draws the losses, if they are asked for. */
static int draw(struct run *r)
{
    const struct train_options *o = r->o;
    char how[N_HOW], title[N_HOW + 64];
    if (!r->reports)
        return 0;
    if (o->trace)
        TRY_ZERO(zero_trace_write(r->z, o->trace));
    if (!o->plot)
        return 0;
    how_it_runs(r, how);
    snprintf(title, sizeof title, "%s, %s: loss of each step", o->model.name, how);
    r->not_drawn = report_plot(&r->report, o->plot, title) != 0;
    if (!r->not_drawn)
        report_text(&r->report, "losses drawn in %s\n", o->plot);
    return 0;
}

void train_introduce(const struct run *r)
{
    char how[N_HOW], states[STATES_TEXT];
    how_it_runs(r, how);
    report_text(&r->report, "%s: %.2f million parameters, %s, %s; ", r->o->model.name,
                (double)model_n_params(&r->o->model.config) * 1e-6, MODEL_DTYPE_NAME, how);
    if (*states_text(&r->states, states))
        report_text(&r->report, "%s; ", states);
    if (r->o->model.config.lora_rank)
        report_text(&r->report, "adapters of rank %lld are trained; ",
                    (long long)r->o->model.config.lora_rank);
    if (r->tokens.n_files)
        report_text(&r->report, "%lld tokens in %d file%s, %lld rows", (long long)r->tokens.n_tokens,
                    r->tokens.n_files, r->tokens.n_files == 1 ? "" : "s", (long long)r->n_rows);
    else
        report_text(&r->report, "%s of text in %lld files", report_bytes(r->data.n_bytes).text,
                    (long long)r->data.n_files);
    if (r->n_eval)
        report_text(&r->report, ", and %lld rows to evaluate", (long long)r->n_eval);
    if (r->o->model.dir && !r->o->import_from)
        report_text(&r->report, "; the weights are drawn, not read from %s", r->o->model.dir);
    report_text(&r->report, "\n");
}

int train_end(struct run *r, double loss)
{
    if (r->o->profile)
        return take_profile(r);
    if (r->o->step_ms)
        return share_times(r);
    TRY(summarize(r, loss));
    return draw(r);
}
