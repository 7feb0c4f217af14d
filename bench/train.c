/* SPDX-License-Identifier: Apache-2.0 */
/* train.c: trains a GPT-2 on bytes, plain or wrapped.
 *
 * This file is the worked example of wrapping a C model. All that wrapping adds to the plain program stands
 * in the section of that name: the table of tensors, and zero_wrap in place of the memory for gradients and
 * optimizer state. Below it, begin() and end() are the brackets around each use of a unit, and zero_step
 * replaces the optimizer's loop. With --plain, r->z is NULL and none of it happens. Of libzero it uses what
 * zero/zero.h shows, and nothing of its inside. */
#include "bench/arguments.h"
#include "bench/failed.h"
#include "bench/pipe_stages.h"
#include "bench/resident.h"
#include "bench/train_run.h"
#include "bench/train_stages.h"

#include <math.h>
#include <stdio.h>

#define N_WARMUP_STEPS 10 /* the learning rate ramps up over these */

/* ---- wrapping ---- */

/* Unit 0 is what the first and the last part of the model use, unit 1 + l is layer l. */
void train_describe(struct zero_tensor out[TRAIN_N_TENSORS], const struct gpt2_config *config,
                    struct gpt2 *model, bool stores)
{
    static struct gpt2 nowhere;
    struct gpt2 *m = model ? model : &nowhere;
    int64_t L = config->layers, C = config->channels, T = config->context, U = gpt2_part_vocab(config);
    int64_t A = gpt2_part_channels(config), F = gpt2_part_hidden(config);
    int32_t matrix = stores ? ZERO_GRAD_OVERWRITE : 0;
    bool parts = config->tp > 1;
    uint32_t norm = ZERO_NO_DECAY | (config->sequence ? ZERO_TP_PARTIAL : 0);
    /* clang-format off */
#define TENSOR(name, unit, flags, ...) \
    {#name, (void **)&m->params.name, (void **)&m->grads.name, {__VA_ARGS__}, GPT2_ZERO_DTYPE, unit, flags}
#define CUT(name, unit, flags, dim, blocks, ...) \
    {#name, (void **)&m->params.name, (void **)&m->grads.name, {__VA_ARGS__}, GPT2_ZERO_DTYPE, unit, flags, \
     .tp_cut = parts ? ZERO_TP_CUT(dim) : 0, .tp_blocks = parts ? blocks : 0}
    /* clang-format on */
    const struct zero_tensor table[TRAIN_N_TENSORS] = {
        CUT(wte, 0, matrix, 0, 1, U, C),
        TENSOR(wpe, 0, 0, T, C),
        TENSOR(ln1w, 1, ZERO_STACKED | norm, L, C),
        TENSOR(ln1b, 1, ZERO_STACKED | norm, L, C),
        CUT(qkvw, 1, ZERO_STACKED | matrix, 1, 3, L, 3 * A, C),
        CUT(qkvb, 1, ZERO_STACKED | ZERO_NO_DECAY, 1, 3, L, 3 * A),
        CUT(attprojw, 1, ZERO_STACKED | matrix, 2, 1, L, C, A),
        TENSOR(attprojb, 1, ZERO_STACKED | ZERO_NO_DECAY, L, C),
        TENSOR(ln2w, 1, ZERO_STACKED | norm, L, C),
        TENSOR(ln2b, 1, ZERO_STACKED | norm, L, C),
        CUT(fcw, 1, ZERO_STACKED | matrix, 1, 1, L, F, C),
        CUT(fcb, 1, ZERO_STACKED | ZERO_NO_DECAY, 1, 1, L, F),
        CUT(fcprojw, 1, ZERO_STACKED | matrix, 2, 1, L, C, F),
        TENSOR(fcprojb, 1, ZERO_STACKED | ZERO_NO_DECAY, L, C),
        TENSOR(lnfw, 0, norm, C),
        TENSOR(lnfb, 0, norm, C),
    };
#undef TENSOR
#undef CUT
    memcpy(out, table, sizeof table);
    if (parts)
        out[0].tp_size = config->vocab;
}

static void log_line(void *arg, const char *line)
{
    const struct run *r = arg;
    fprintf(stderr, "zero-bench train: rank %d: %s\n", r->rank, line);
}

/* What zero-bench tune has from its plan, and chose. */
static const char *timed_on_purpose[] = {"stage 3 shards nothing", NULL};

/* No rank holds the whole model: each draws what it owns. */
static int draw_weights(void *arg, int32_t tensor, int64_t first, int64_t n, void *dst)
{
    const struct run *r = arg;
    const struct train_stage *s = &r->stage[r->tensors[tensor].pp_stage];
    int64_t before = train_elements_before(&r->tensors[tensor], &s->own);
    gpt2_draw(&r->o->model.config, r->o->seed, r->number[tensor], before + first, n, dst);
    return 0;
}

/* Where this rank is, and what it has of the model. */
static int find_place(struct run *r, struct zero_config *cfg)
{
    const struct train_options *o = r->o;
    cfg->stage = (int32_t)o->stage;
    cfg->hybrid = o->hybrid;
    cfg->mesh.dp_replicate = (int32_t)o->dp_replicate;
    cfg->mesh.dp_shard = (int32_t)o->dp_shard;
    TRY(train_place_open(&r->at, o->pp, o->model.config.tp, cfg));
    r->n_own = r->at.n_stages > 1 ? (int32_t)o->stages_per_rank : 1;
    for (int32_t k = 0; k < r->n_own; k++)
        r->stage[k].own =
            train_stage_config(&o->model.config, k * r->at.n_stages + r->at.stage, r->n_own * r->at.n_stages);
    return 0;
}

/* The model's, or a stage's, which is open. */
static void describe_stage(struct run *r, int32_t k, int32_t first_unit)
{
    struct train_stage *s = &r->stage[k];
    struct zero_tensor *own = r->tensors + r->n_tensors;
    s->unit = first_unit;
    s->first = r->n_tensors;
    train_describe(own, &s->own, &r->model[k], r->o->plain || r->stores_each);
    s->n = train_stage_table(own, r->number + r->n_tensors, &s->own);
    for (int32_t t = 0; t < s->n; t++) {
        own[t].unit += first_unit;
        own[t].pp_stage = k;
    }
    r->n_tensors += s->n;
}

static int open_stages(struct run *r)
{
    int32_t unit = 0;
    for (int32_t k = 0; k < r->n_own; k++) {
        TRY(gpt2_open(&r->model[k], &r->stage[k].own, r->o->batch, &r->place));
        describe_stage(r, k, unit);
        unit += (int32_t)(train_first_layer_unit(&r->stage[k].own) + r->stage[k].own.layers);
    }
    return 0;
}

static int wrap(struct run *r, struct zero_config cfg)
{
    const struct train_options *o = r->o;
    if (o->import_from || o->only_exports) {
        cfg.init_from = ZERO_INIT_LATER;
    } else {
        cfg.init_from = ZERO_INIT_CALL;
        cfg.init = draw_weights;
        cfg.init_arg = r;
    }
    cfg.optim.optimizer = (int32_t)o->optimizer;
    cfg.optim.beta1 = (float)o->beta1;
    cfg.optim.beta2 = (float)o->beta2;
    cfg.optim.weight_decay = (float)o->weight_decay;
    cfg.clip = (float)o->clip;
    cfg.grad_accum_steps = (int32_t)o->accum;
    if (r->at.n_stages > 1) {
        cfg.pipeline.schedule = o->schedule;
        cfg.pipeline.schedule_file = o->schedule_file;
        cfg.pipeline.stages_per_rank = r->n_own;
        cfg.pipeline.activation_bytes = train_stage_bytes(&o->model.config, o->batch, sizeof(real));
    }
    cfg.memory.prefetch = (int32_t)o->prefetch;
    cfg.memory.param_budget_bytes = o->budget;
    cfg.deterministic = o->deterministic;
    cfg.memory.wire_dtype = o->wire_dtype;
    cfg.checkpoint.save_async = o->save_async;
    cfg.checkpoint.save_keep = (int32_t)o->keep;
    cfg.device = o->device;
    cfg.stream = place_stream(&r->place);
    cfg.debug.trace = o->profile || o->trace;
    cfg.debug.log = o->log ? log_line : NULL;
    cfg.debug.log_arg = r;
    if (o->step_ms && !o->log) {
        cfg.debug.log = report_warning;
        cfg.debug.log_arg = timed_on_purpose;
    }
    for (int32_t k = 0; k < r->n_own; k++)
        train_parts_join(&r->at, &r->model[k], &r->z);
    struct zero_call *order = malloc((size_t)train_n_calls(r->stage, r->n_own) * sizeof *order);
    if (!order)
        return failed(ZERO_ERR_NOMEM, "no memory for the order of calls");
    cfg.memory.order = order;
    cfg.memory.n_order = train_stages_order(order, r->stage, r->n_own);
    int err = reported(zero_wrap(&r->z, r->tensors, r->n_tensors, &cfg));
    free(order);
    if (err)
        return err;
    struct zero_stats stats;
    TRY(reported(zero_get_stats(r->z, &stats)));
    r->rank = stats.place.rank;
    r->world = stats.place.world;
    TRY(train_place_wrapped(&r->at, o->pp, o->model.config.tp, &stats));
    r->reports = r->at.stage == r->at.n_stages - 1 && r->at.dp == 0 && r->at.part == 0;
    r->accum = stats.grad_accum_steps;
    return 0;
}

static inline int begin(struct run *r, int64_t unit, enum zero_phase phase)
{
    if (!r->z)
        return 0;
    enum profile_part before = profile_enter(r->o->profile, PROFILE_LIBRARY);
    int err = reported(zero_begin(r->z, (int32_t)unit, phase));
    profile_enter(r->o->profile, before);
    return err;
}

static inline int end(struct run *r, int64_t unit, enum zero_phase phase)
{
    if (!r->z)
        return 0;
    enum profile_part before = profile_enter(r->o->profile, PROFILE_LIBRARY);
    int err = reported(zero_end(r->z, (int32_t)unit, phase));
    profile_enter(r->o->profile, before);
    return err;
}

/* ---- the model, unit by unit. What an action has from another stage, and gives to one: struct zero_action;
 * without stages nothing. ---- */

static int forward(struct run *r, const struct zero_action *a)
{
    struct gpt2 *m = &r->model[a->pp_stage];
    const struct train_stage *s = &r->stage[a->pp_stage];
    int64_t first = s->unit + train_first_layer_unit(&s->own);
    if (a->in) {
        m->acts.embedded = (real *)(uintptr_t)a->in; /* only read */
    } else {
        TRY(begin(r, s->unit, ZERO_FORWARD));
        gpt2_embed_forward(m);
        TRY(end(r, s->unit, ZERO_FORWARD));
    }
    for (int64_t l = 0; l < m->config.layers; l++) {
        TRY(begin(r, first + l, ZERO_FORWARD));
        gpt2_layer_forward(m, l);
        TRY(end(r, first + l, ZERO_FORWARD));
    }
    if (a->out) {
        gpt2_copy_residual(m, a->out, gpt2_last_residual(m));
    } else {
        TRY(begin(r, s->unit, ZERO_FORWARD));
        gpt2_head_forward(m);
        TRY(end(r, s->unit, ZERO_FORWARD));
    }
    return m->err;
}

/* Where head and embedding are here both, their unit is held from one to the other, so that they add to one
 * gradient. */
static int backward(struct run *r, const struct zero_action *a)
{
    struct gpt2 *m = &r->model[a->pp_stage];
    const struct train_stage *s = &r->stage[a->pp_stage];
    int64_t first = s->unit + train_first_layer_unit(&s->own);
    if (a->kept)
        m->acts.embedded = (real *)(uintptr_t)a->kept;
    if (a->in) {
        gpt2_copy_residual(m, m->acts.dresidual, a->in);
    } else {
        TRY(begin(r, s->unit, ZERO_BACKWARD));
        gpt2_head_backward(m);
        if (a->out)
            TRY(end(r, s->unit, ZERO_BACKWARD));
    }
    for (int64_t l = m->config.layers; l-- > 0;) {
        TRY(begin(r, first + l, ZERO_BACKWARD));
        gpt2_layer_backward(m, l);
        TRY(end(r, first + l, ZERO_BACKWARD));
    }
    if (a->out) {
        gpt2_copy_residual(m, a->out, m->acts.dresidual);
    } else {
        if (a->in)
            TRY(begin(r, s->unit, ZERO_BACKWARD));
        gpt2_embed_backward(m);
        TRY(end(r, s->unit, ZERO_BACKWARD));
    }
    return m->err;
}

static int optimize(struct run *r, float lr, struct zero_step_info *info)
{
    if (r->z)
        return reported(zero_step(r->z, lr, info));
    return plain_step(&r->plain, r->o, lr, info);
}

/* ---- the loop ---- */

/* Replaces *loss, this rank's sum over its micro-batches, by the mean over all, and *stop by rank 0's. */
static int share(struct run *r, double *loss, bool *stop)
{
    double values[2] = {*loss, r->at.dp == 0 && *stop ? 1.0 : 0.0};
    profile_enter(r->o->profile, r->z ? PROFILE_EXPOSED : PROFILE_REST);
    if (r->z)
        TRY(reported(zero_mean(r->z, values, 2)));
    float any = values[1] > 0.0;
    if (r->z) /* clocks of other parts' ranks may have said so */
        TRY(reported(zero_all_reduce(r->z, ZERO_AXIS_TP, &any, &any, 1, ZERO_F32, ZERO_MAX)));
    profile_enter(r->o->profile, PROFILE_REST);
    *loss = values[0] / (double)r->accum;
    *stop = any > 0.0f;
    return 0;
}

/* The text of this rank's micro-batch `a` of the next step: chosen by how many micro-batches went before it,
 * in steps as they were when the run began. So ranks may be fewer or more when a run goes on. */
static void choose_text(struct run *r, struct gpt2 *m, int64_t a)
{
    const struct train_options *o = r->o;
    int64_t n = r->n_micro + a * r->at.n_dp + r->at.dp;
    bytes_data_sample(&r->data, m->tokens, m->targets, o->batch, o->model.config.context, o->seed,
                      n / r->per_step, n % r->per_step);
}

/* Of the steps or the time that the run may take, whichever ends first. */
static double share_done(const struct run *r, int64_t steps)
{
    const struct train_options *o = r->o;
    double by_steps = (double)steps / (double)o->steps;
    double by_time = o->seconds > 0 ? (double)(report_now_ns() - r->start_ns) * 1e-9 / o->seconds : 0;
    return by_steps > by_time ? by_steps : by_time;
}

/* The k-th action of a step. Without stages a backward follows each forward. */
static int next_action(struct run *r, int64_t k, struct zero_action *a)
{
    if (r->at.n_stages > 1)
        return reported(zero_next(r->z, a));
    int64_t micro_batch = k / 2 < r->accum ? k / 2 : -1;
    *a = (struct zero_action){.phase = k % 2 ? ZERO_BACKWARD : ZERO_FORWARD,
                              .micro_batch = (int32_t)micro_batch};
    return 0;
}

static int act(struct run *r, const struct zero_action *a)
{
    const struct train_options *o = r->o;
    const struct gpt2_config *own = &r->stage[a->pp_stage].own;
    struct gpt2 *m = &r->model[a->pp_stage];
    bool in_stages = r->at.n_stages > 1, is_forward = a->phase == ZERO_FORWARD;
    m->stores = r->stores_each || (o->plain && a->micro_batch == 0);
    gpt2_turn_to(m, a->micro_batch % m->n_kept);
    /* In stages others' forwards may have come since the embedding's. */
    if (is_forward ? !own->no_embedding || !own->no_head : in_stages && !own->no_embedding) {
        TRY(gpt2_next_batch(m));
        choose_text(r, m, a->micro_batch);
        gpt2_send_batch(m);
    }
    profile_enter(o->profile, PROFILE_COMPUTE);
    TRY(is_forward ? forward(r, a) : backward(r, a));
    profile_enter(o->profile, PROFILE_REST);
    return in_stages ? reported(zero_finish(r->z)) : 0;
}

static bool time_is_up(const struct run *r)
{
    const struct train_options *o = r->o;
    return o->seconds > 0 && (double)(report_now_ns() - r->start_ns) * 1e-9 >= o->seconds;
}

/* Of this rank's stages the last may have the loss. */
static struct gpt2 *last_model(struct run *r)
{
    return &r->model[r->n_own - 1];
}

/* In stages the last one has the loss, and says whether time is up: the step takes both to all ranks. */
static int carry(struct run *r, double *loss)
{
    TRY(gpt2_take_loss(last_model(r), loss));
    double values[2] = {*loss, time_is_up(r) ? 1.0 : 0.0};
    return reported(zero_carry(r->z, values, 2));
}

static int train_step(struct run *r, int64_t step, bool *stop, double *loss)
{
    const struct train_options *o = r->o;
    struct gpt2 *m = last_model(r);
    int64_t T = o->model.config.context, start = report_now_ns();
    struct zero_action a;
    TRY(next_action(r, 0, &a));
    for (int64_t k = 1; a.micro_batch >= 0; k++) {
        TRY(act(r, &a));
        TRY(next_action(r, k, &a));
    }
    TRY(gpt2_send_loss(m));
    if (r->at.n_stages > 1)
        TRY(carry(r, loss));
    struct zero_step_info info;
    double ramp = step < N_WARMUP_STEPS ? (double)(step + 1) / N_WARMUP_STEPS : 1.0;
    profile_enter(o->profile, r->z ? PROFILE_LIBRARY : PROFILE_OPTIMIZER);
    TRY(optimize(r, (float)(o->lr * ramp), &info));
    profile_enter(o->profile, PROFILE_REST);
    profile_step(o->profile, step + 1, step + 1 == o->steps);
    if (r->at.n_stages > 1) {
        *loss = info.carried[0] / (double)r->accum;
        *stop = step + 1 == o->steps || info.carried[1] > 0.0;
    } else {
        TRY(gpt2_take_loss(m, loss)); /* in one wait with the norm */
        *stop = step + 1 == o->steps || time_is_up(r);
        TRY(share(r, loss, stop));
    }
    r->n_micro += r->accum * r->at.n_dp;

    double ms = (double)(report_now_ns() - start) * 1e-6;
    /* Now and then, for it takes the kernel a while to count. What a step needs is held from the first one
     * on, so no peak falls between. */
    if (*stop || ((step + 1) & step) == 0) {
        int64_t now = resident_bytes(), on_device = place_used_bytes(&r->place);
        r->peak_resident = now > r->peak_resident ? now : r->peak_resident;
        r->peak_device = on_device > r->peak_device ? on_device : r->peak_device;
    }
    struct report_step reported_step = {
        .step = step + 1,
        .loss = *loss,
        .grad_norm = info.grad_norm,
        .ms = ms,
        .tokens_per_s = (double)(r->at.n_dp * r->accum * o->batch * T) / ms * 1e3,
        .resident_bytes = r->place.cuda ? r->peak_device : r->peak_resident,
        .share_done = share_done(r, step + 1),
        .skipped = info.skipped,
    };
    return report_step(&r->report, &reported_step, *stop);
}

/* Micro-batches whose forwards come before the backward of the first of them, in a stage: at most, where the
 * environment may have changed the schedule. */
static int64_t n_kept(const struct run *r, int32_t k)
{
    const char *schedule = getenv("ZERO_SCHEDULE");
    if (r->at.n_stages == 1)
        return 1;
    if (r->o->schedule_file || (schedule && *schedule))
        return r->accum;
    return pipe_kept_of(r->o->schedule, r->at.n_stages, r->n_own, r->accum, k * r->at.n_stages + r->at.stage);
}

static int train(struct run *r)
{
    const struct train_options *o = r->o;
    r->bad_input = true;
    if (!o->only_exports)
        TRY(train_load_text(r));
    r->bad_input = o->device == ZERO_DEVICE_CUDA; /* there may be none */
    TRY(place_open(&r->place, o->device == ZERO_DEVICE_CUDA, (int)o->gpu, (int)o->threads));
    r->bad_input = false;
    struct zero_config cfg = ZERO_CONFIG_INIT;
    TRY(find_place(r, &cfg));
    r->stores_each = train_stores_each(o);
    TRY(open_stages(r));
    if (o->plain) {
        TRY(gpt2_open_params(r->model, o->seed));
        TRY(gpt2_open_grads(r->model));
        TRY(plain_open(&r->plain, &r->place, r->tensors, r->n_tensors));
    } else {
        TRY(wrap(r, cfg));
        for (int32_t k = 0; k < r->n_own; k++)
            TRY(gpt2_keep(&r->model[k], n_kept(r, k)));
    }
    r->report.quiet = !r->reports || o->step_ms || o->profile;
    for (int32_t k = 0; k < r->n_own; k++)
        r->model[k].profile = o->profile;
    if (o->only_exports) {
        TRY(reported(zero_load(r->z, o->load)));
        return train_export(r);
    }
    train_introduce(r);
    r->per_step = r->at.n_dp * r->accum;
    TRY(train_import(r));
    r->start_ns = report_now_ns();
    int64_t first = 0;
    if (o->load)
        TRY(train_load(r, &first));
    bool stop = first >= o->steps;
    double loss = NAN;
    for (int64_t step = first; !stop; step++) {
        TRY(train_step(r, step, &stop, &loss));
        TRY(train_save(r, step + 1, stop));
    }
    if (r->z)
        TRY(reported(zero_save_wait(r->z, NULL)));
    TRY(train_end(r, loss));
    return train_export(r); /* whose traffic is not the training's */
}

int train_run(const struct train_options *o)
{
    struct run r = {.o = o,
                    .world = 1,
                    .reports = true,
                    .at.n_dp = 1,
                    .at.n_stages = 1,
                    .n_own = 1,
                    .accum = o->accum,
                    .report = {.json = o->json}};
    int err = train(&r);
    if (err)
        fprintf(stderr, "zero-bench train: %s\n", failed_text());
    zero_unwrap(&r.z);
    plain_close(&r.plain);
    for (int32_t k = 0; k < PIPE_MOST_OWN; k++)
        gpt2_close(&r.model[k]);
    place_close(&r.place);
    bytes_data_close(&r.data);
    report_close(&r.report);
    if (!err)
        return r.not_drawn ? EXIT_FAILURE : EXIT_SUCCESS;
    return r.bad_input || err == ZERO_ERR_ARG || err == ZERO_ERR_BUDGET ? EXIT_USAGE : EXIT_FAILURE;
}
