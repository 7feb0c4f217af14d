/* SPDX-License-Identifier: Apache-2.0 */
/* train.c: trains a GPT-2 on bytes. It is the worked example of a C model that libzero shards.
 *
 * From top to bottom: the table of tensors, zero_wrap, a forward and a backward pass with each unit between
 * zero_begin and zero_end, a step, and the loop. Of libzero it calls only what zero/zero.h declares, and each
 * such call that can fail is inside TRY_ZERO. TRY is for the program's own functions. Both return the call's
 * error, if there is one.
 *
 * Functions that begin with gpt2_ are the model (bench/gpt2), and those with train_ are in this folder
 * (run.h). plain.c has the same step without libzero, and pipeline_step.c has it with pipeline stages.
 * setup.c opens the model and turns options into the configuration. */
#include "bench/libzero_error.h"
#include "bench/train/run.h"

#include <math.h>
#include <stdio.h>

/* ---- the table of tensors ---- */

/* Unit 0 is what the model uses first and last: embeddings, last norm and head. Unit 1 + l is layer l. The
 * tensors of all layers are stacked: one tensor has a slice for each layer.
 *
 * The letters of shapes are those of struct gpt2_config. U, A and F are this rank's share of the token ids,
 * the attention's channels and the MLP's channels, which tensor parallelism cuts. */
void train_describe(struct zero_tensor out[TRAIN_N_TENSORS], const struct gpt2_config *config,
                    struct gpt2 *model, bool stores)
{
    static struct gpt2 no_model; /* for the addresses of its pointers, which nobody follows */
    struct gpt2 *m = model ? model : &no_model;
    int64_t L = config->layers, C = config->channels, U = gpt2_part_vocab(config);
    int64_t A = gpt2_part_channels(config), F = gpt2_part_hidden(config);
    int32_t matrix = stores ? ZERO_GRAD_OVERWRITE : 0;
    bool tp = config->tp > 1;
    uint32_t norm = ZERO_NO_DECAY | (config->sequence ? ZERO_TP_PARTIAL : 0);
    /* A whole tensor; and one that tensor parallelism cuts along `dim`, in `blocks` equal blocks each. */
    /* clang-format off */
#define TENSOR(name, unit, flags, ...) \
    {#name, (void **)&m->params.name, (void **)&m->grads.name, {__VA_ARGS__}, GPT2_ZERO_DTYPE, unit, flags}
#define CUT(name, unit, flags, dim, blocks, ...) \
    {#name, (void **)&m->params.name, (void **)&m->grads.name, {__VA_ARGS__}, GPT2_ZERO_DTYPE, unit, flags, \
     .tp_cut = tp ? ZERO_TP_CUT(dim) : 0, .tp_blocks = tp ? blocks : 0}
    /* clang-format on */
    const struct zero_tensor table[TRAIN_N_TENSORS] = {
        CUT(wte, 0, matrix, 0, 1, U, C),
        TENSOR(wpe, 0, 0, config->context, C),
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
    if (tp)
        out[0].tp_size = config->vocab;
}

/* ---- wrapping ---- */

/* The first values of elements [first, first + n) of a tensor. No rank holds the whole model: libzero asks
 * each rank for what it owns. */
static int draw_weights(void *arg, int32_t tensor, int64_t first, int64_t n, void *dst)
{
    const struct run *r = arg;
    gpt2_draw(&r->o->model.config, r->o->seed, r->number[tensor], train_first_element(r, tensor) + first, n,
              dst);
    return 0;
}

static int wrap(struct run *r)
{
    struct zero_config cfg = ZERO_CONFIG_INIT;
    TRY(train_configure(r, &cfg));
    if (train_reads_weights(r->o)) {
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

static int forward(struct run *r, struct gpt2 *m)
{
    TRY_ZERO(zero_begin(r->z, 0, ZERO_FORWARD));
    gpt2_embed_forward(m);
    TRY_ZERO(zero_end(r->z, 0, ZERO_FORWARD));
    for (int32_t l = 0; l < m->config.layers; l++) {
        TRY_ZERO(zero_begin(r->z, 1 + l, ZERO_FORWARD));
        gpt2_layer_forward(m, l);
        TRY_ZERO(zero_end(r->z, 1 + l, ZERO_FORWARD));
    }
    TRY_ZERO(zero_begin(r->z, 0, ZERO_FORWARD));
    gpt2_head_forward(m);
    TRY_ZERO(zero_end(r->z, 0, ZERO_FORWARD));
    return m->err;
}

/* Head and embedding have the same weights, so unit 0 stays open from one to the other: both add to one
 * gradient. */
static int backward(struct run *r, struct gpt2 *m)
{
    TRY_ZERO(zero_begin(r->z, 0, ZERO_BACKWARD));
    gpt2_head_backward(m);
    for (int32_t l = (int32_t)m->config.layers; l-- > 0;) {
        TRY_ZERO(zero_begin(r->z, 1 + l, ZERO_BACKWARD));
        gpt2_layer_backward(m, l);
        TRY_ZERO(zero_end(r->z, 1 + l, ZERO_BACKWARD));
    }
    gpt2_embed_backward(m);
    TRY_ZERO(zero_end(r->z, 0, ZERO_BACKWARD));
    return m->err;
}

/* ---- training ---- */

static int evaluate(struct run *r, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        TRY(train_next_held_out(r, &r->model[0], i));
        TRY(forward(r, &r->model[0]));
    }
    return 0;
}

static int train_step(struct run *r, struct train_step *s)
{
    struct gpt2 *m = &r->model[0];
    for (int64_t micro_batch = 0; micro_batch < r->accum; micro_batch++) {
        TRY(train_next_rows(r, m, micro_batch));
        TRY(forward(r, m));
        TRY(backward(r, m));
    }
    TRY(gpt2_send_loss(m));
    TRY_ZERO(zero_step(r->z, s->lr, &s->info));
    return train_take_loss(r, s);
}

/* Makes the steps that the loaded checkpoint, if there is one, has not made. */
static int train_loop(struct run *r)
{
    const struct train_options *o = r->o;
    int (*make_step)(struct run *, struct train_step *) = o->plain             ? plain_train_step
                                                          : r->at.n_stages > 1 ? pipeline_train_step
                                                                               : train_step;
    int (*forward_only)(struct run *, int64_t) = o->plain             ? plain_evaluate
                                                 : r->at.n_stages > 1 ? pipeline_evaluate
                                                                      : evaluate;
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
        TRY(train_evaluate(r, &s, forward_only));
        TRY(train_save(r, s.step, s.stop));
    }
    if (r->z)
        TRY_ZERO(zero_save_wait(r->z, NULL));
    return train_end(r, s.loss);
}

static int train(struct run *r)
{
    TRY(train_open(r));
    TRY(r->o->plain ? plain_train_open(r) : wrap(r));
    if (r->o->only_exports) {
        TRY_ZERO(zero_load(r->z, r->o->load));
        return train_export(r);
    }
    train_introduce(r);
    TRY(train_import(r));
    TRY(train_loop(r));
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
        fprintf(stderr, "zero-bench train: %s\n", error_text());
    zero_unwrap(&r.z);
    return train_close(&r, err);
}
