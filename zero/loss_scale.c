/* SPDX-License-Identifier: Apache-2.0 */
/* loss_scale.c: zero_loss_scale, for steps whose ranks and micro-batches have different numbers of tokens.
 *
 * zero_step divides by the number of ranks and micro-batches, as if each had as many tokens. The scale undoes
 * this and divides by the tokens of all ranks instead. The program multiplies its loss by it before backward,
 * so nothing else has to know. */
#include "kernels/exact_sum.h"
#include "zero/context.h"

#include <math.h>

/* Checks the count of rank r. Ranks of tp are neighbours, and train on the same tokens. */
static int check_count(const struct zero_ctx *z, const double *count, int r)
{
    int first = r - r % z->mesh.tp;
    if (!isfinite(count[r]) || count[r] < 0)
        return zr_fail(ZERO_ERR_ARG, "zero_loss_scale: count is %g on rank %d; allowed: finite, 0 and more",
                       count[r], r);
    if (count[r] != count[first])
        return zr_fail(ZERO_ERR_ARG,
                       "zero_loss_scale: count is %g on rank %d and %g on rank %d; the ranks of tp must have "
                       "the same tokens",
                       count[first], first, count[r], r);
    return 0;
}

/* Adds up the tokens. All ranks have the same counts, so they compute the same sum. Tokens count once, on the
 * first rank of tp in the last pipeline stage, which has the loss. */
static int add_up(const struct zero_ctx *z, double *sum)
{
    const double *count = z->from_all;
    struct zr_exact_sum exact;
    int last = z->world.world - z->world.world / z->mesh.pp;
    zr_exact_reset(&exact);
    for (int r = 0; r < z->world.world; r++) {
        ZR_TRY(check_count(z, count, r));
        if (r >= last && r % z->mesh.tp == 0)
            zr_exact_add(&exact, count[r]);
    }
    *sum = zr_exact_value(&exact);
    return 0;
}

/* Computes the factor for the loss of one token. */
static int scale_of(const struct zero_ctx *z, double sum, double *scale)
{
    const struct zr_options *o = &z->config.options;
    double by = o->grad_sum ? 1 : (double)zr_dp_world(z) * zr_engine_tuned(z->engine)->grad_accum_steps;
    if (sum == 0)
        return zr_fail(ZERO_ERR_ARG,
                       "zero_loss_scale: count is 0 on all ranks: there is nothing to train on; "
                       "skip this step, on all ranks");
    *scale = by / sum;
    if (isfinite(*scale) && *scale > 0)
        return 0;
    return zr_fail(
        ZERO_ERR_ARG,
        "zero_loss_scale: the counts of all ranks add up to %g, which gives no finite scale above 0", sum);
}

int zero_loss_scale(zero_ctx *z, double count, double *scale)
{
    ZR_BEGIN_CALL(z, ZR_CALL_LOSS_SCALE);
    double sum = 0, found = 0;
    if (!scale)
        return zr_fail(ZERO_ERR_ARG, "zero_loss_scale: scale is NULL");
    zr_engine_called(z->engine, 0);
    ZR_TRY(zr_engine_exchange(z->engine, &count, sizeof count, z->from_all));
    ZR_TRY(add_up(z, &sum));
    ZR_TRY(scale_of(z, sum, &found));
    z->has_loss_scale = true;
    *scale = found;
    return 0;
}

/* Ends the scale of this step. It holds for one step, because it depends on that step's counts. */
void zr_loss_scale_step(struct zero_ctx *z)
{
    if (z->had_loss_scale && !z->has_loss_scale && !z->reported_no_loss_scale && z->world.rank == 0) {
        zr_warn(z->config.options.log, "zero_loss_scale was called for the previous step but not for this "
                                       "one: its scale was computed from the tokens of the previous step");
        z->reported_no_loss_scale = true;
    }
    z->had_loss_scale = z->has_loss_scale;
    z->has_loss_scale = false;
}

void zr_loss_scale_drop(struct zero_ctx *z)
{
    z->had_loss_scale |= z->has_loss_scale;
    z->has_loss_scale = false;
}
