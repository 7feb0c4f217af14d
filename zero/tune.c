/* SPDX-License-Identifier: Apache-2.0 */
/* tune.c: what a step is taken with, changed between steps: clip, the optimizers' numbers, and the number of
 * the step. */
#include "zero/checkpoint/checkpoint_dir.h"
#include "zero/context.h"

#include <string.h>
#include <xxhash.h>

static const struct {
    const char *key;
    enum zr_called_name called;
    bool of_optimizers; /* clip is of the step */
} knobs[] = {{"clip", ZR_CALLED_TUNE_CLIP, false},
             {"beta1", ZR_CALLED_TUNE_BETA1, true},
             {"beta2", ZR_CALLED_TUNE_BETA2, true},
             {"eps", ZR_CALLED_TUNE_EPS, true},
             {"weight_decay", ZR_CALLED_TUNE_DECAY, true}};
enum { CLIP, BETA1, BETA2, EPS, DECAY, N_KNOBS };

/* By a tensor of any pipeline stage: the ranks of all make the call. */
static bool is_used(const struct zero_ctx *z, enum zr_optimizer kind)
{
    for (int32_t i = 0; i < z->whole.n; i++) {
        const struct zr_tensor *t = &z->whole.tensors[i];
        if (t->grad && zr_kind_of(&z->config.options, t->optimizer) == kind)
            return true;
    }
    return false;
}

/* The kind that is meant; NONE where it is all of them, or the step. */
static int find_kind(const struct zero_ctx *z, int32_t optimizer, int knob, enum zr_optimizer *out)
{
    enum zr_optimizer own = z->config.options.optimizer;
    *out = ZR_OPTIMIZER_NONE;
    if (!knobs[knob].of_optimizers) {
        if (optimizer)
            return zr_fail(ZR_ERR_ARG, "zero_tune: optimizer is %d but %s is of the whole step; allowed: 0",
                           optimizer, knobs[knob].key);
        return 0;
    }
    if (!own)
        return zr_fail(ZR_ERR_ARG, "zero_tune: key is %s but cfg.update updates every tensor; allowed: clip",
                       knobs[knob].key);
    if (optimizer < 0 || optimizer >= ZR_OPTIMIZER_COUNT)
        return zr_fail(ZR_ERR_ARG, "zero_tune: optimizer is %d; allowed: an enum zero_optimizer, or 0",
                       optimizer);
    if (!optimizer && knob == DECAY)
        return 0;
    *out = optimizer ? (enum zr_optimizer)optimizer : own;
    if (!is_used(z, *out))
        return zr_fail(ZR_ERR_ARG, "zero_tune: optimizer is %d, but no tensor's is %s", optimizer,
                       zr_optimizer_kind(*out)->name);
    return 0;
}

static int check_kind(const struct zero_ctx *z, enum zr_optimizer kind, int knob, float x)
{
    const struct zr_optimizer_kind *row = zr_optimizer_kind(kind);
    if ((knob == BETA1 && row->no_beta1) || (knob == BETA2 && row->no_beta2) ||
        (knob == EPS && !row->eps_divides))
        return zr_fail(ZR_ERR_ARG, "zero_tune: %s uses no %s", row->name, knobs[knob].key);
    int32_t named = kind == z->config.options.optimizer ? ZR_OPTIMIZER_NONE : (int32_t)kind;
    if (knob == BETA1 && x != 0 && row->momentum_only && !z->plan->states_of[named])
        return zr_fail(
            ZR_ERR_ARG,
            "zero_tune: beta1 of %s is %.9g, but was 0 at zero_wrap, which keeps no momentum then; "
            "begin with one above 0",
            row->name, (double)x);
    if (knob == EPS && x == 0)
        zr_warn(z->config.log,
                "zero_tune: eps of %s is 0: a weight whose gradient has been 0 in every step becomes NaN",
                row->name);
    return 0;
}

static void set(struct zr_hyper *h, int knob, float x)
{
    switch (knob) {
    case BETA1:
        h->beta1 = x;
        break;
    case BETA2:
        h->beta2 = x;
        break;
    case EPS:
        h->eps = x;
        break;
    case DECAY:
        h->weight_decay = x;
        break;
    }
}

int zero_tune(zero_ctx *z, int32_t optimizer, const char *key, double value)
{
    int err = zr_need_no_step(z, "zero_tune"), knob = 0;
    if (err)
        return err;
    while (key && knob < N_KNOBS && strcmp(key, knobs[knob].key) != 0)
        knob++;
    if (!key || knob == N_KNOBS)
        return zr_fail(ZR_ERR_ARG, "zero_tune: key is %s%s%s; allowed: clip, beta1, beta2, eps, weight_decay",
                       key ? "\"" : "", key ? key : "NULL", key ? "\"" : "");
    enum zr_optimizer kind;
    float x;
    err = find_kind(z, optimizer, knob, &kind);
    if (!err && (err = zr_config_check_number(key, value, &x)))
        return zr_fail_more(err, "zero_tune");
    if (!err && kind)
        err = check_kind(z, kind, knob, x);
    if (err)
        return err;
    ZR_IN_CALL(z, knobs[knob].called, false, -1);
    const double said[] = {optimizer, (double)x};
    zr_engine_called(z->engine, knobs[knob].called, -1, XXH3_64bits(said, sizeof said));
    struct zr_tuned *next = zr_engine_tune(z->engine);
    if (knob == CLIP)
        next->clip = x;
    for (int k = 1; knob != CLIP && k < ZR_OPTIMIZER_COUNT; k++)
        if (!kind || k == (int)kind)
            set(&next->hyper[k], knob, x);
    return 0;
}

int zero_set_step(zero_ctx *z, int64_t t)
{
    ZR_IN_CALL(z, ZR_CALLED_SET_STEP, false, -1);
    int err = zr_need_no_step(z, "zero_set_step");
    if (err)
        return err;
    if (t < 0 || t > ZR_MOST_STEPS)
        return zr_fail(ZR_ERR_ARG, "zero_set_step: t is %lld; allowed: 0 to %lld", (long long)t,
                       (long long)ZR_MOST_STEPS);
    zr_engine_called(z->engine, ZR_CALLED_SET_STEP, -1, (uint64_t)t);
    return zr_engine_set_step(z->engine, t);
}
