/* SPDX-License-Identifier: Apache-2.0 */
/* pipeline_step.c: a step of zero-bench train --pp. zero_next returns one action after another: a pipeline
 * stage, a pass, a micro-batch, and the buffers for its input and output. */
#include "bench/train/run.h"

#include <stdlib.h>

/* The forward pass of one pipeline stage. It is that of train.c, except at the ends: a stage without the
 * embedding reads its input from a->in, and a stage without the head writes its output to a->out. */
static int forward(struct run *r, const struct zero_action *a)
{
    struct model *m = &r->model[a->pp_stage];
    const struct train_stage *s = &r->stage[a->pp_stage];
    int32_t first = s->unit + s->units.first_layer, embedding = s->unit + s->units.embedding,
            head = s->unit + s->units.head;
    if (a->in) {
        m->acts.embedded = (real *)(uintptr_t)a->in; /* only read */
    } else {
        TRY_ZERO(zero_begin(r->z, embedding, ZERO_FORWARD));
        model_embed_forward(m);
        TRY_ZERO(zero_end(r->z, embedding, ZERO_FORWARD));
    }
    for (int32_t l = 0; l < m->config.layers; l++) {
        TRY_ZERO(zero_begin(r->z, first + l, ZERO_FORWARD));
        model_layer_forward(m, l);
        TRY_ZERO(zero_end(r->z, first + l, ZERO_FORWARD));
    }
    if (a->out) {
        model_copy_residual(m, a->out, model_last_residual(m));
    } else {
        TRY_ZERO(zero_begin(r->z, head, ZERO_FORWARD));
        model_head_forward(m);
        TRY_ZERO(zero_end(r->z, head, ZERO_FORWARD));
    }
    return m->err;
}

/* The backward pass of one pipeline stage. A stage without the head reads the gradient of its output from
 * a->in, and a stage without the embedding writes the gradient of its input to a->out. With the zero-bubble
 * schedule a backward pass comes in two parts, and the part for weights uses neither. */
static int backward(struct run *r, const struct zero_action *a)
{
    const enum zero_phase phase = (enum zero_phase)a->phase;
    struct model *m = &r->model[a->pp_stage];
    const struct train_stage *s = &r->stage[a->pp_stage];
    int32_t first = s->unit + s->units.first_layer, embedding = s->unit + s->units.embedding,
            head = s->unit + s->units.head;
    if (a->kept)
        m->acts.embedded = (real *)(uintptr_t)a->kept;
    model_begin_backward(m, phase == ZERO_BACKWARD_INPUT    ? MODEL_INPUTS
                            : phase == ZERO_BACKWARD_WEIGHT ? MODEL_WEIGHTS
                                                            : MODEL_ALL);
    if (a->in && phase != ZERO_BACKWARD_WEIGHT)
        model_copy_residual(m, m->acts.dresidual, a->in);
    if (!s->config.no_head) {
        TRY_ZERO(zero_begin(r->z, head, phase));
        model_head_backward(m);
        if (head != embedding)
            TRY_ZERO(zero_end(r->z, head, phase));
    }
    for (int32_t l = (int32_t)m->config.layers; l-- > 0;) {
        TRY_ZERO(zero_begin(r->z, first + l, phase));
        model_layer_backward(m, l);
        TRY_ZERO(zero_end(r->z, first + l, phase));
    }
    if (!s->config.no_embedding && (head == embedding || !m->config.lora_rank)) {
        if (head != embedding)
            TRY_ZERO(zero_begin(r->z, embedding, phase));
        model_embed_backward(m);
        TRY_ZERO(zero_end(r->z, embedding, phase));
    }
    if (a->out)
        model_copy_residual(m, a->out, m->acts.dresidual);
    model_end_backward(m);
    return m->err;
}

/* Carries out an action. The embedding's backward pass needs the tokens again, attention to documents their
 * beginnings, and layers the positions that they use, because other micro-batches' forward passes may have
 * come between. */
static int act(struct run *r, const struct zero_action *a)
{
    const struct model_config *config = &r->stage[a->pp_stage].config;
    struct model *m = &r->model[a->pp_stage];
    bool is_forward = a->phase == ZERO_FORWARD;
    model_turn_to(m, a->micro_batch % m->n_kept);
    bool in_layers =
        (config->documents || config->ops->layers_use_positions) && a->phase != ZERO_BACKWARD_WEIGHT;
    if (in_layers || (!config->no_embedding && a->phase != ZERO_BACKWARD_INPUT) ||
        (is_forward && !config->no_head))
        TRY(train_next_rows(r, m, a->micro_batch));
    TRY(is_forward ? forward(r, a) : backward(r, a));
    return take_libzero_error(zero_finish(r->z));
}

/* The last stage has the loss and decides whether time is up. The step carries both to all ranks. */
int pipeline_train_step(struct run *r, struct train_step *s)
{
    struct model *last = &r->model[r->n_own - 1];
    struct zero_action a;
    TRY_ZERO(zero_next(r->z, &a));
    while (a.micro_batch >= 0) {
        TRY(act(r, &a));
        TRY_ZERO(zero_next(r->z, &a));
    }
    double values[3] = {0.0, train_time_is_up(r) ? 1.0 : 0.0, r->counted};
    TRY(model_send_loss(last));
    TRY(model_take_loss(last, &values[0]));
    TRY_ZERO(zero_carry(r->z, values, 3));
    TRY_ZERO(zero_step(r->z, s->lr, &s->info));
    s->loss = train_mean_loss(r, s->info.carried[0], s->info.carried[2]);
    s->stop = s->info.carried[1] > 0.0;
    return 0;
}

/* An evaluation has as many micro-batches as a step, also if n is less. */
int pipeline_forward(struct run *r, int64_t n, train_rows *rows)
{
    struct zero_action a;
    for (int64_t first = 0; first < n; first += r->accum) {
        TRY_ZERO(zero_evaluate(r->z));
        TRY_ZERO(zero_next(r->z, &a));
        while (a.micro_batch >= 0) {
            struct model *m = &r->model[a.pp_stage];
            model_turn_to(m, a.micro_batch % m->n_kept);
            TRY(rows(r, m, first + a.micro_batch));
            TRY(forward(r, &a));
            TRY_ZERO(zero_finish(r->z));
            TRY_ZERO(zero_next(r->z, &a));
        }
    }
    return 0;
}

/* Whether a file or the environment may say another schedule than the options. */
static bool other_schedule(const struct run *r)
{
    const char *schedule = getenv("ZERO_SCHEDULE");
    return r->o->schedule_file || (schedule && *schedule);
}

bool pipeline_has_two_parts(const struct run *r)
{
    return r->at.n_stages > 1 && (r->o->schedule == ZERO_SCHEDULE_ZERO_BUBBLE || other_schedule(r));
}

/* Micro-batches whose forward passes come before the first one's backward pass. If the schedule is not known,
 * all of them. */
static int64_t n_kept(const struct run *r, int32_t k)
{
    if (other_schedule(r))
        return r->accum;
    return pipe_kept_of(r->o->schedule, r->at.n_stages, r->n_own, r->accum, k * r->at.n_stages + r->at.stage);
}

int pipeline_keep(struct run *r)
{
    for (int32_t k = 0; k < r->n_own; k++)
        TRY(model_keep(&r->model[k], n_kept(r, k)));
    return 0;
}
