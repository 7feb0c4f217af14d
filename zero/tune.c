/* SPDX-License-Identifier: Apache-2.0 */
/* tune.c: zero_tune and zero_set_step, which change between steps what the next step is taken with: clip,
 * grad_scale, numbers of parameter groups, micro-batches, and the step number. */
#include "zero/checkpoint/checkpoint_dir.h"
#include "zero/context.h"

#include <string.h>
#include <xxhash.h>

/* The keys of zero_tune. */
static const struct {
    const char *key;
    enum zr_call_name called; /* for the flight recorder */
    bool of_groups;           /* set for a parameter group; the others hold for the step */
} keys[] = {{"clip", ZR_CALL_TUNE_CLIP, false},
            {"grad_scale", ZR_CALL_TUNE_GRAD_SCALE, false},
            {"grad_accum_steps", ZR_CALL_TUNE_ACCUM, false},
            {"lr_scale", ZR_CALL_TUNE_LR_SCALE, true},
            {"beta1", ZR_CALL_TUNE_BETA1, true},
            {"beta2", ZR_CALL_TUNE_BETA2, true},
            {"eps", ZR_CALL_TUNE_EPS, true},
            {"weight_decay", ZR_CALL_TUNE_DECAY, true}};
enum { CLIP, GRAD_SCALE, ACCUM, LR_SCALE, BETA1, BETA2, EPS, DECAY, N_KEYS };

static int check_range(const struct zero_ctx *z, int32_t group, int index)
{
    int32_t n = z->config.options.n_optims;
    if (!keys[index].of_groups && group != ZERO_ALL)
        return zr_fail(ZERO_ERR_ARG,
                       "zero_tune: group is %d but %s applies to the whole step; allowed: ZERO_ALL (-1)",
                       group, keys[index].key);
    if (group == ZERO_ALL || (group >= 0 && group < n))
        return 0;
    return zr_fail(ZERO_ERR_ARG,
                   "zero_tune: group is %d; allowed: 0..%d (see n_optim_groups), or ZERO_ALL (-1)", group,
                   n - 1);
}

/* Checks that the optimizer of a group uses this number and has memory for it. */
static int check_group(const struct zero_ctx *z, int32_t i, int index, double x)
{
    const struct zr_optim *g = &z->config.options.optim[i];
    const struct zr_optimizer_kind *row = zr_optimizer_kind(g->optimizer);
    if (index == LR_SCALE)
        return 0;
    if (!row)
        return zr_fail(ZERO_ERR_ARG,
                       "zero_tune: key is %s but group %d has an update of its own; allowed: lr_scale",
                       keys[index].key, i);
    if ((index == BETA1 && row->no_beta1) || (index == BETA2 && row->no_beta2) ||
        (index == EPS && !row->eps_divides))
        return zr_fail(ZERO_ERR_ARG, "zero_tune: group %d uses %s, which has no %s", i, row->name,
                       keys[index].key);
    if (index == BETA1 && x != 0 && row->momentum_only && !g->n_states)
        return zr_fail(ZERO_ERR_ARG,
                       "zero_tune: beta1 of group %d (%s) is %.9g, but was 0 at zero_wrap, which then keeps "
                       "no momentum; start with a value above 0",
                       i, row->name, x);
    if (index == EPS && x == 0)
        zr_warn(z->config.log,
                "zero_tune: eps of group %d (%s) is 0: a weight whose gradient has been 0 in every step "
                "becomes NaN",
                i, row->name);
    return 0;
}

/* Checks grad_accum_steps last, because on success the schedule has x micro-batches. */
static int check_accum(struct zero_ctx *z, double x)
{
    int32_t most = zr_most_micro_batches(&z->config.options);
    if (!(x >= 1 && x <= most) || x != (double)(int32_t)x)
        return zr_fail(ZERO_ERR_ARG,
                       "zero_tune: grad_accum_steps is %.9g; allowed: 1 to %d (see max_grad_accum_steps)", x,
                       most);
    if (z->has_loss_scale)
        return zr_fail(ZERO_ERR_ORDER,
                       "zero_tune: grad_accum_steps after zero_loss_scale, which depends on it; call "
                       "zero_loss_scale afterwards");
    return zr_schedule_tune(z, (int32_t)x);
}

/* Sets a number of a parameter group. */
static void set(struct zr_optim *g, int index, float x)
{
    switch (index) {
    case LR_SCALE:
        g->lr_scale = x;
        break;
    case BETA1:
        g->beta1 = x;
        break;
    case BETA2:
        g->beta2 = x;
        break;
    case EPS:
        g->eps = x;
        break;
    case DECAY:
        g->weight_decay = x;
        break;
    }
}

int zero_tune(zero_ctx *z, int32_t group, const char *key, double value)
{
    ZR_TRY(zr_call_check(z, ZR_CALL_TUNE_CLIP));
    int index = 0;
    while (key && index < N_KEYS && strcmp(key, keys[index].key) != 0)
        index++;
    if (!key || index == N_KEYS)
        return zr_fail(ZERO_ERR_ARG,
                       "zero_tune: key is %s%s%s; allowed: clip, grad_scale, grad_accum_steps, lr_scale, "
                       "beta1, beta2, eps, weight_decay",
                       key ? "\"" : "", key ? key : "NULL", key ? "\"" : "");
    double x = value;
    int err = check_range(z, group, index);
    if (!err && index == ACCUM)
        err = check_accum(z, value);
    else if (!err && (err = zr_config_check_number(key, value, &x)))
        return zr_fail_more(err, "zero_tune");
    int32_t first = group == ZERO_ALL ? 0 : group, end = 1 + group;
    if (group == ZERO_ALL)
        end = z->config.options.n_optims;
    for (int32_t i = first; !err && keys[index].of_groups && i < end; i++)
        err = check_group(z, i, index, x);
    if (err)
        return err;
    ZR_IN_CALL(z, keys[index].called, 0, -1);
    const double args[] = {group, x};
    zr_engine_called(z->engine, XXH3_64bits(args, sizeof args));
    struct zr_tuned *next = zr_engine_change_tuned(z->engine);
    if (index == CLIP)
        next->clip = (float)x;
    else if (index == GRAD_SCALE)
        next->grad_scale = x;
    else if (index == ACCUM)
        zr_engine_set_accum(z->engine, (int32_t)x);
    else
        for (int32_t i = first; i < end; i++)
            set(&next->optim[i], index, (float)x);
    return 0;
}

int zero_set_step(zero_ctx *z, int64_t t)
{
    ZR_BEGIN_CALL(z, ZR_CALL_SET_STEP);
    if (t < 0 || t > ZR_MAX_STEPS)
        return zr_fail(ZERO_ERR_ARG, "zero_set_step: t is %lld; allowed: 0 to %lld", (long long)t,
                       (long long)ZR_MAX_STEPS);
    zr_engine_called(z->engine, (uint64_t)t);
    return zr_engine_set_step(z->engine, t);
}
