/* SPDX-License-Identifier: Apache-2.0 */
/* missing_brackets.c: brackets that the model has left out, which go to the log once.
 *
 * A step with backward brackets leaves out the units that have none. That is meant where layers are dropped
 * or networks are trained in turn, and a fault where a bracket was forgotten.
 *
 * At stages 0 and 1 pointers are valid without brackets. There a unit that has brackets in some micro-batches
 * alone may have computed without one in the others: with the parameters of the step before, or a gradient
 * that is in no sum, unless it was written before the first bracket of the step. */
#include "kernels/alloc.h"
#include "zero/context.h"

#include <stdlib.h>
#include <string.h>

enum { FORWARD, BACKWARD, PHASES };

struct zr_missing_brackets {
    /* (n_units) of this step; and whether there was one in any step */
    struct {
        int32_t n[PHASES];
        bool ever[PHASES];
    } * unit;
    /* of a whole step, and of a micro-batch */
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

/* One of the unit; trained: that is trained, if there is one. */
static const char *tensor_of(const struct zr_layout *l, int32_t unit, bool trained)
{
    const char *name = "none";
    for (int32_t i = l->n_tensors; i-- > 0;) {
        const struct zr_tensor *t = &l->tensors[i];
        if (!t->buffer && unit >= t->unit && unit < t->unit + t->n_slices && (!trained || t->grad))
            name = t->name;
    }
    return name;
}

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

/* Of a unit with fewer than there are micro-batches, where another has as many. */
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
    for (int k = BACKWARD; z->plan->place.model_holds && k >= FORWARD && !c->reported_micro_batch; k--)
        c->reported_micro_batch = report_phase(z, k, facts.last_step);
    zr_missing_brackets_drop(z);
}
