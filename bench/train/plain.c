/* SPDX-License-Identifier: Apache-2.0 */
/* plain.c: a step of zero-bench train --plain. This is the program of train.c before it is wrapped. Gradients
 * and optimizer belong to the program, and there are no brackets. */
#include "bench/train/run.h"

int plain_train_open(struct run *r)
{
    TRY(model_open_params(&r->model[0], r->o->seed));
    TRY(model_open_grads(&r->model[0]));
    return plain_open(&r->plain, &r->compute, r->tensors, r->n_tensors);
}

static void forward(struct model *m)
{
    model_embed_forward(m);
    for (int64_t l = 0; l < m->config.layers; l++)
        model_layer_forward(m, l);
    model_head_forward(m);
}

int plain_forward(struct run *r, int64_t n, train_rows *rows)
{
    for (int64_t i = 0; i < n; i++) {
        TRY(rows(r, &r->model[0], i));
        forward(&r->model[0]);
    }
    return r->model[0].err;
}

int plain_train_step(struct run *r, struct train_step *s)
{
    struct model *m = &r->model[0];
    for (int64_t micro_batch = 0; micro_batch < r->accum; micro_batch++) {
        TRY(train_next_rows(r, m, micro_batch));
        m->stores = r->stores_each || micro_batch == 0; /* later micro-batches add to the gradient */
        forward(m);
        model_head_backward(m);
        for (int64_t l = m->config.layers; l-- > 0;)
            model_layer_backward(m, l);
        model_embed_backward(m);
        TRY(m->err);
    }
    TRY(model_send_loss(m));
    profile_enter(r->o->profile, PROFILE_OPTIMIZER);
    TRY(plain_step(&r->plain, r->o, s->lr, &s->info));
    return train_take_loss(r, s);
}
