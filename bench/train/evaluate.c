/* SPDX-License-Identifier: Apache-2.0 */
/* evaluate.c: the loss of rows that zero-bench train does not learn from, by forward passes between steps. */
#include "bench/train/run.h"

#include <stdio.h>

/* The mean loss over all rows. All ranks make equally many passes, because a forward pass is collective. */
static int held_out_loss(struct run *r, train_forward *forward, double *loss)
{
    struct model *last = &r->model[r->n_own - 1];
    int64_t rows_of_pass = r->o->batch * r->at.n_dp;
    r->eval_counted = 0.0;
    TRY(forward(r, (r->n_eval + rows_of_pass - 1) / rows_of_pass, train_next_held_out));
    double values[2] = {0.0, r->eval_counted};
    TRY(model_send_loss(last));
    TRY(model_take_loss(last, &values[0]));
    if (r->z)
        TRY_ZERO(zero_mean(r->z, values, 2));
    *loss = values[0] * (double)model_own_tokens(last) / values[1]; /* the sum is of micro-batches' means */
    return 0;
}

int train_evaluate(struct run *r, const struct train_step *s, train_forward *forward)
{
    const struct train_options *o = r->o;
    if (!r->n_eval || !(s->stop || (o->eval_every && s->step % o->eval_every == 0)))
        return 0;
    TRY(held_out_loss(r, forward, &r->eval_loss));
    bool best = r->eval_loss < r->best_loss;
    if (best) {
        r->best_loss = r->eval_loss;
        r->best_step = s->step;
        r->best_rows = r->n_eval;
        r->best_tokens = r->eval->n_tokens;
    }
    report_evaluation(&r->report, s->step, r->eval_loss, r->best_loss, r->best_step);
    return best && o->keep_best ? train_save_best(r) : 0;
}
