/* SPDX-License-Identifier: Apache-2.0 */
/* setup.c: what comes before and after the training of zero-bench train. It opens this rank's part of the
 * model, turns the options into a struct zero_config, and frees everything. */
#include "bench/arguments.h"
#include "bench/train/run.h"
#include "kernels/alloc.h"

#include <stdio.h>
#include <stdlib.h>

/* The libzero warning that zero-bench tune, which times the steps, has already seen in its plan. */
static const char *hidden_when_timed[] = {"stage 3 shards no", NULL};
/* Those that are only of use to a run that trains. */
static const char *hidden_when_sampled[] = {"stage 3 shards no", "were trained and are frozen now",
                                            "with fewer micro-batches than stages", NULL};

/* With adapters b is 0 in the first step, and so are the gradients of all a. */
static const char *hidden_with_adapters[] = {"in the first step no gradient was written to",
                                             "with ZERO_TP_PARTIAL each must", NULL};

static void log_line(void *arg, const char *line)
{
    const struct run *r = arg;
    fprintf(stderr, "zero-bench train: rank %d: %s\n", r->rank, line);
}

/* ---- the place on the mesh ---- */

static void configure_mesh(const struct train_options *o, struct zero_config *cfg)
{
    cfg->stage = (int32_t)o->stage;
    cfg->hybrid = o->hybrid;
    cfg->mesh.dp_replicate = (int32_t)o->dp_replicate;
    cfg->mesh.dp_shard = (int32_t)o->dp_shard;
    if (o->pp > 1)
        cfg->mesh.pp = (int32_t)o->pp;
    if (o->model.config.cp > 1)
        cfg->mesh.cp = (int32_t)o->model.config.cp;
    if (o->model.config.tp > 1)
        cfg->mesh.tp = (int32_t)o->model.config.tp;
}

/* The model was opened for --pp, --cp and --tp, so the environment must not say otherwise. */
static int take_place(struct run *r, const struct zero_place *p)
{
    int64_t pp = r->o->pp, cp = r->o->model.config.cp, tp = r->o->model.config.tp;
    r->at = (struct train_place){
        .dp = p->data, .n_dp = p->n_data, .cp = p->cp, .tp = p->tp, .stage = p->pp, .n_stages = p->n_pp};
    if (p->n_pp == (pp > 1 ? pp : 1) && p->n_cp == (cp > 1 ? cp : 1) && p->n_tp == (tp > 1 ? tp : 1))
        return 0;
    return zr_fail(ZERO_ERR_ARG,
                   "pp is %d, cp %d and tp %d by ZERO_PP, ZERO_CP and ZERO_TP, which this program wants as "
                   "--pp, --cp and --tp",
                   p->n_pp, p->n_cp, p->n_tp);
}

/* Without --pp, --cp and --tp every rank opens the same model, and zero_wrap finds the place. */
static int find_place(struct run *r)
{
    const struct train_options *o = r->o;
    if (o->pp > 1 || o->model.config.cp > 1 || o->model.config.tp > 1) {
        struct zero_config cfg = ZERO_CONFIG_INIT;
        struct zero_place place;
        configure_mesh(o, &cfg);
        TRY_ZERO(zero_find_place(&cfg, &place));
        TRY(take_place(r, &place));
    }
    r->n_own = r->at.n_stages > 1 ? (int32_t)o->stages_per_rank : 1;
    for (int32_t k = 0; k < r->n_own; k++) {
        r->stage[k].config =
            train_stage_config(&o->model.config, k * r->at.n_stages + r->at.stage, r->n_own * r->at.n_stages);
        r->stage[k].config.two_parts = pipeline_has_two_parts(r);
        r->stage[k].units = r->stage[k].config.ops->units(&r->stage[k].config);
    }
    return 0;
}

/* ---- the model ---- */

/* Adds the tensors of this rank's k-th pipeline stage to the rank's table. */
static void describe_stage(struct run *r, int32_t k, int32_t first_unit)
{
    struct train_stage *s = &r->stage[k];
    struct zero_tensor *own = r->tensors + r->n_tensors;
    struct model_pointers pointers = model_pointers_of(&r->model[k]);
    pointers.stores = r->o->plain || r->stores_each;
    s->unit = first_unit;
    s->first = r->n_tensors;
    s->n = s->config.ops->describe(own, r->number + r->n_tensors, &s->config, &pointers);
    for (int32_t t = 0; t < s->n; t++) {
        own[t].unit += first_unit;
        own[t].pp_stage = k;
        if (r->o->sample)
            own[t].grad = NULL; /* frozen, so it has no optimizer state either */
    }
    r->n_tensors += s->n;
}

static int open_stages(struct run *r)
{
    int32_t unit = 0;
    for (int32_t k = 0; k < r->n_own; k++) {
        struct model *m = &r->model[k];
        TRY(model_open(m, &r->stage[k].config, r->o->batch, &r->compute));
        m->stores = r->stores_each;
        m->profile = r->o->profile;
        train_join_tp(m, r->at.tp, &r->z);
        train_join_cp(m, r->at.cp, r->cp_rows, &r->z);
        describe_stage(r, k, unit);
        unit += r->stage[k].units.n;
    }
    return 0;
}

int train_open(struct run *r)
{
    const struct train_options *o = r->o;
    r->bad_input = true;
    if (train_trains(o))
        TRY(train_load_data(r));
    r->bad_input = o->device == ZERO_DEVICE_CUDA; /* The option is wrong if there is no GPU. */
    TRY(compute_open(&r->compute, o->device == ZERO_DEVICE_CUDA, (int)o->gpu, (int)o->threads));
    r->bad_input = false;
    TRY(find_place(r));
    TRY(train_cp_rows(&r->cp_rows, &o->model.config));
    r->stores_each = train_stores_every_micro_batch(o);
    r->report.quiet = o->step_ms || o->profile;
    r->per_step = r->accum;
    return open_stages(r);
}

bool train_trains(const struct train_options *o)
{
    return !o->only_exports && !o->sample;
}

bool train_reads_weights(const struct train_options *o)
{
    return o->import_from || !train_trains(o);
}

int64_t train_first_element(const struct run *r, int32_t tensor)
{
    const struct zero_tensor *t = &r->tensors[tensor];
    return train_elements_before(t, &r->stage[t->pp_stage].config);
}

/* ---- libzero ---- */

static void configure_log(struct run *r, struct zero_config *cfg)
{
    cfg->debug.trace = r->o->profile || r->o->trace;
    if (r->o->log) {
        cfg->debug.log = log_line;
        cfg->debug.log_arg = r;
    } else if (r->o->step_ms || r->o->sample) {
        cfg->debug.log = report_warning;
        cfg->debug.log_arg = r->o->sample ? hidden_when_sampled : hidden_when_timed;
    } else if (r->o->model.config.lora_rank) {
        cfg->debug.log = report_warning;
        cfg->debug.log_arg = hidden_with_adapters;
    }
}

int train_configure(struct run *r, struct zero_config *cfg)
{
    const struct train_options *o = r->o;
    configure_mesh(o, cfg);
    configure_log(r, cfg);
    cfg->optim.optimizer = (int32_t)o->optimizer;
    cfg->optim.beta1 = (float)o->beta1;
    cfg->optim.beta2 = (float)o->beta2;
    cfg->optim.weight_decay = (float)o->weight_decay;
    cfg->clip = (float)o->clip;
    cfg->grad_accum_steps = (int32_t)o->accum;
    if (r->at.n_stages > 1) {
        cfg->pipeline.schedule = o->schedule;
        cfg->pipeline.schedule_file = o->schedule_file;
        cfg->pipeline.stages_per_rank = r->n_own;
        cfg->pipeline.activation_bytes = train_stage_bytes(&o->model.config, o->batch, sizeof(real));
    }
    cfg->memory.prefetch = (int32_t)o->prefetch;
    cfg->memory.param_budget_bytes = o->budget;
    cfg->memory.wire_dtype = o->wire_dtype;
    cfg->deterministic = o->deterministic;
    states_to_config(&o->states, cfg);
    cfg->checkpoint.save_async = o->save_async;
    cfg->checkpoint.save_keep = (int32_t)o->keep;
    cfg->device = o->device;
    cfg->stream = compute_stream(&r->compute);
    TRY(ZR_ALLOC(r->order, train_n_calls(r->stage, r->n_own), "the order of calls"));
    cfg->memory.order = r->order;
    cfg->memory.n_order = train_stages_order(r->order, r->stage, r->n_own);
    while (o->sample && r->order[cfg->memory.n_order - 1].phase != ZERO_FORWARD)
        cfg->memory.n_order--; /* there are no backward passes */
    return 0;
}

int train_after_wrap(struct run *r)
{
    struct zero_stats stats;
    TRY_ZERO(zero_get_stats(r->z, &stats));
    r->rank = stats.place.rank;
    r->world = stats.place.world;
    TRY(take_place(r, &stats.place));
    r->reports = r->at.stage == r->at.n_stages - 1 && r->at.dp == 0 && r->at.cp == 0 && r->at.tp == 0;
    r->report.quiet = r->report.quiet || !r->reports;
    r->accum = stats.grad_accum_steps;
    r->states = states_of_run(&stats, MODEL_DTYPE);
    r->per_step = r->at.n_dp * r->accum;
    return r->at.n_stages > 1 ? pipeline_keep(r) : 0;
}

int train_close(struct run *r, int err)
{
    int status = r->bad_input || err == ZERO_ERR_ARG || err == ZERO_ERR_BUDGET ? EXIT_USAGE : EXIT_FAILURE;
    plain_close(&r->plain);
    for (int32_t k = 0; k < PIPE_MAX_OWN; k++)
        model_close(&r->model[k]);
    compute_close(&r->compute);
    bytes_data_close(&r->data);
    token_data_close(&r->tokens);
    token_data_close(&r->held_out);
    report_close(&r->report);
    free(r->ids.ids);
    free(r->order);
    free(r->cp_rows);
    free(r->whole.tokens);
    if (!err)
        status = r->not_drawn ? EXIT_FAILURE : EXIT_SUCCESS;
    return status;
}
