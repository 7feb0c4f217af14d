/* SPDX-License-Identifier: Apache-2.0 */
/* train.c: trains a model on bytes. It is the worked example of a C model that libzero shards.
 *
 * From top to bottom: zero_wrap, a forward and a backward pass with each unit between zero_begin and
 * zero_end, a step, and the loop. The table of tensors is the model's, such as that of bench/gpt2/gpt2_ops.c.
 * Of libzero it calls only what zero/zero.h declares, and each such call that can fail is inside TRY_ZERO.
 * TRY is for the program's own functions. Both return the call's error, if there is one.
 *
 * Functions that begin with model_ are the model (bench/model), and those with train_ are in this folder
 * (run.h). plain.c has the same step without libzero, and pipeline_step.c has it with pipeline stages.
 * setup.c opens the model and turns options into the configuration. */
#include "bench/libzero_error.h"
#include "bench/train/run.h"

#include <math.h>
#include <stdio.h>

/* ---- wrapping ---- */

/* The first values of elements [first, first + n) of a tensor. No rank holds the whole model: libzero asks
 * each rank for what it owns. If the weights come from files, only adapters are drawn. */
static int draw_weights(void *arg, int32_t tensor, int64_t first, int64_t n, void *dst)
{
    const struct run *r = arg;
    if (train_reads_weights(r->o) && !r->tensors[tensor].grad) {
        memset(dst, 0, (size_t)n * sizeof(real));
        return 0;
    }
    model_draw(&r->o->model.config, r->o->seed, r->number[tensor], train_first_element(r, tensor) + first, n,
               dst);
    return 0;
}

static int wrap(struct run *r)
{
    struct zero_config cfg = ZERO_CONFIG_INIT;
    TRY(train_configure(r, &cfg));
    if (train_reads_weights(r->o) && !r->o->model.config.lora_rank) {
        cfg.init_from = ZERO_INIT_LATER;
    } else {
        cfg.init_from = ZERO_INIT_CALL;
        cfg.init = draw_weights;
        cfg.init_arg = r;
    }
    TRY_ZERO(zero_wrap(&r->z, r->tensors, r->n_tensors, &cfg));
    return train_after_wrap(r);
}

/* ---- the model, unit by unit ---- */

static int forward(struct run *r, struct model *m)
{
    const struct model_units u = r->stage[0].units;
    TRY_ZERO(zero_begin(r->z, u.embedding, ZERO_FORWARD));
    model_embed_forward(m);
    TRY_ZERO(zero_end(r->z, u.embedding, ZERO_FORWARD));
    for (int32_t l = 0; l < m->config.layers; l++) {
        TRY_ZERO(zero_begin(r->z, u.first_layer + l, ZERO_FORWARD));
        model_layer_forward(m, l);
        TRY_ZERO(zero_end(r->z, u.first_layer + l, ZERO_FORWARD));
    }
    TRY_ZERO(zero_begin(r->z, u.head, ZERO_FORWARD));
    model_head_forward(m);
    TRY_ZERO(zero_end(r->z, u.head, ZERO_FORWARD));
    return m->err;
}

/* If head and embedding have the same weights, they are one unit, which stays open from one to the other:
 * both add to one gradient. A frozen embedding has none, and no part in backward. */
static int backward(struct run *r, struct model *m)
{
    const struct model_units u = r->stage[0].units;
    bool tied = u.head == u.embedding;
    TRY_ZERO(zero_begin(r->z, u.head, ZERO_BACKWARD));
    model_head_backward(m);
    if (!tied)
        TRY_ZERO(zero_end(r->z, u.head, ZERO_BACKWARD));
    for (int32_t l = (int32_t)m->config.layers; l-- > 0;) {
        TRY_ZERO(zero_begin(r->z, u.first_layer + l, ZERO_BACKWARD));
        model_layer_backward(m, l);
        TRY_ZERO(zero_end(r->z, u.first_layer + l, ZERO_BACKWARD));
    }
    if (!tied && m->config.lora_rank)
        return m->err;
    if (!tied)
        TRY_ZERO(zero_begin(r->z, u.embedding, ZERO_BACKWARD));
    model_embed_backward(m);
    TRY_ZERO(zero_end(r->z, u.embedding, ZERO_BACKWARD));
    return m->err;
}

/* ---- training ---- */

static int forward_only(struct run *r, int64_t n, train_rows *rows)
{
    for (int64_t i = 0; i < n; i++) {
        TRY(rows(r, &r->model[0], i));
        TRY(forward(r, &r->model[0]));
    }
    return 0;
}

static int train_step(struct run *r, struct train_step *s)
{
    struct model *m = &r->model[0];
    for (int64_t micro_batch = 0; micro_batch < r->accum; micro_batch++) {
        TRY(train_next_rows(r, m, micro_batch));
        TRY(forward(r, m));
        TRY(backward(r, m));
    }
    TRY(model_send_loss(m));
    TRY_ZERO(zero_step(r->z, s->lr, &s->info));
    return train_take_loss(r, s);
}

/* Makes the steps that the loaded checkpoint, if there is one, has not made. */
static int train_loop(struct run *r, train_forward *pass)
{
    const struct train_options *o = r->o;
    int (*make_step)(struct run *, struct train_step *) = o->plain             ? plain_train_step
                                                          : r->at.n_stages > 1 ? pipeline_train_step
                                                                               : train_step;
    struct train_step s = {.loss = NAN};
    r->start_ns = report_now_ns();
    if (o->load)
        TRY(train_load(r, &s.step));
    s.stop = s.step >= o->steps;
    while (!s.stop) {
        s.lr = (float)learning_rate(&o->rate, s.step);
        s.start_ns = report_now_ns();
        TRY(train_count_tokens(r, &s.empty));
        TRY(s.empty ? 0 : make_step(r, &s));
        s.step++;
        s.stop = s.stop || s.step == o->steps;
        TRY(train_report_step(r, &s));
        TRY(train_evaluate(r, &s, pass));
        TRY(train_save(r, s.step, s.stop));
    }
    if (r->z)
        TRY_ZERO(zero_save_wait(r->z, NULL));
    return train_end(r, s.loss);
}

static int train(struct run *r)
{
    const struct train_options *o = r->o;
    TRY(train_open(r));
    TRY(o->plain ? plain_train_open(r) : wrap(r));
    train_forward *pass = o->plain ? plain_forward : r->at.n_stages > 1 ? pipeline_forward : forward_only;
    if (!train_trains(o)) {
        if (o->load)
            TRY(train_load_weights(r));
        TRY(train_import(r));
        return o->sample ? sample_generate(r, pass) : train_export(r);
    }
    train_introduce(r);
    TRY(train_import(r));
    TRY(train_loop(r, pass));
    return train_export(r); /* after the report, so that its traffic is not counted as the training's */
}

int train_run(const struct train_options *o)
{
    struct run r = {.o = o,
                    .world = 1,
                    .reports = true,
                    .at = {.n_dp = 1, .n_stages = 1},
                    .n_own = 1,
                    .accum = o->accum,
                    .eval_loss = NAN,
                    .best_loss = INFINITY,
                    .report = {.json = o->json}};
    int err = train(&r);
    if (err)
        fprintf(stderr, "zero-bench %s: %s\n", o->sample ? "sample" : "train", error_text());
    zero_unwrap(&r.z);
    return train_close(&r, err);
}
