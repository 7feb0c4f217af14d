/* SPDX-License-Identifier: Apache-2.0 */
/* missing_brackets.c: logs once if the model leaves out brackets.
 *
 * A step with backward brackets does not update units that have none. That is right if layers are dropped or
 * networks are trained in turn, and a fault if a bracket was forgotten.
 *
 * At stages 0 and 1 pointers are valid without brackets. If a unit has brackets in only some micro-batches,
 * the others may have computed without one. They may then have read parameters of the previous step, or
 * written gradients that are in no sum. */
#include "kernels/alloc.h"
#include "zero/context.h"

#include <stdlib.h>
#include <string.h>

enum { FORWARD, BACKWARD, PHASES };

struct zr_missing_brackets {
    /* (n_units) brackets in this step, and whether there was one in any step */
    struct {
        int32_t n[PHASES];
        bool ever[PHASES];
    } * unit;
    /* warnings that were given: about a unit without brackets in a step, and in a micro-batch */
    bool reported_step, reported_micro_batch;
};

int zr_missing_brackets_open(struct zero_ctx *z)
{
    int32_t n = z->layout->n_units;
    ZR_TRY(ZR_ZALLOC(z->missing_brackets, 1, "the brackets of %d units", n));
    return ZR_ZALLOC(z->missing_brackets->unit, n, "the brackets of %d units", n);
}

void zr_missing_brackets_close(struct zero_ctx *z)
{
    if (z->missing_brackets)
        free(z->missing_brackets->unit);
    free(z->missing_brackets);
    z->missing_brackets = NULL;
}

void zr_missing_brackets_count(struct zero_ctx *z, int32_t unit, enum zero_phase phase)
{
    if (phase == ZERO_BACKWARD_INPUT)
        return;
    int k = phase == ZERO_FORWARD ? FORWARD : BACKWARD;
    z->missing_brackets->unit[unit].n[k]++;
    z->missing_brackets->unit[unit].ever[k] = true;
}

void zr_missing_brackets_drop(struct zero_ctx *z)
{
    for (int32_t u = 0; u < z->layout->n_units; u++)
        memset(z->missing_brackets->unit[u].n, 0, sizeof z->missing_brackets->unit[u].n);
}

/* Returns the name of a tensor of the unit. trained: only of a trained one. "none" if there is no such
 * tensor. */
static const char *tensor_of(const struct zr_layout *l, int32_t unit, bool trained)
{
    const char *name = "none";
    for (int32_t i = l->n_tensors; i-- > 0;) {
        const struct zr_tensor *t = &l->tensors[i];
        if (!t->buffer && unit >= t->unit && unit < t->unit + t->n_layers && (!trained || t->grad))
            name = t->name;
    }
    return name;
}

/* Reports a unit that the step left out; -1: there is none. Returns whether it did. */
static bool report_step(struct zero_ctx *z, int64_t step, int32_t unit)
{
    if (unit < 0)
        return false;
    zr_warn(z->config.options.log,
            "step %lld: unit %d (tensor %s) had no backward bracket, so this step does not update it. That "
            "is right if the step did not use the unit. Later steps do not warn again",
            (long long)step, unit, tensor_of(z->layout, unit, true));
    return true;
}

/* Reports a unit with fewer brackets than micro-batches, if another unit has as many. */
static bool report_phase(struct zero_ctx *z, int k, int64_t step)
{
    const struct zr_missing_brackets *c = z->missing_brackets;
    int32_t all = zr_engine_tuned(z->engine)->grad_accum_steps, least = -1, most = 0;
    for (int32_t u = 0; u < z->layout->n_units; u++) {
        most = (int32_t)zr_max(most, c->unit[u].n[k]);
        bool used = k == FORWARD ? c->unit[u].ever[k] : c->unit[u].n[k] > 0;
        if (used && (least < 0 || c->unit[u].n[k] < c->unit[least].n[k]))
            least = u;
    }
    if (least < 0 || most < all || c->unit[least].n[k] >= all)
        return false;
    zr_warn(z->config.options.log,
            "step %lld: unit %d (tensor %s) had a %s bracket in only %d of %d micro-batches: at stage %d a "
            "computation without a bracket %s. This is right if the others did not use the unit",
            (long long)step, least, tensor_of(z->layout, least, false), k == FORWARD ? "forward" : "backward",
            c->unit[least].n[k], all, z->config.options.stage,
            k == FORWARD ? "may read parameters of the previous step" : "may be missing from the gradients");
    return true;
}

void zr_missing_brackets_step(struct zero_ctx *z)
{
    struct zr_missing_brackets *c = z->missing_brackets;
    struct zr_engine_facts facts;
    zr_engine_facts(z->engine, &facts);
    if (!c->reported_step)
        c->reported_step = report_step(z, facts.last_step, facts.left_out);
    for (int k = BACKWARD; z->plan->placement.model_holds && k >= FORWARD && !c->reported_micro_batch; k--)
        c->reported_micro_batch = report_phase(z, k, facts.last_step);
    zr_missing_brackets_drop(z);
}
