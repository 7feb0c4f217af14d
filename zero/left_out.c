/* left_out.c: brackets that the model has left out, at stages 0 and 1, where its pointers are valid without.
 *
 * What a unit computes outside of a bracket may read parameters of the step before, and its gradient of that
 * micro-batch is in no sum. That cannot be told from a unit that was left out altogether, as layers that are
 * dropped at random are: so it is reported, once, of a unit that has brackets in other micro-batches or
 * steps, and it is no error. One that never has any is used without, which is allowed. */
#include "zero/context.h"

#include <stdlib.h>
#include <string.h>

enum { FORWARD, BACKWARD, PHASES };

struct zr_left_out {
    /* (n_units) of this step; and whether there was one in any step */
    struct {
        int32_t n[PHASES];
        bool ever[PHASES];
    } * unit;
    bool reported;
};

int zr_left_out_open(struct zero_ctx *z)
{
    if (!z->plan->place.model_holds)
        return 0;
    z->left_out = calloc(1, sizeof *z->left_out);
    if (z->left_out)
        z->left_out->unit = calloc((size_t)z->layout->n_units, sizeof *z->left_out->unit);
    if (!z->left_out || !z->left_out->unit)
        return zr_fail(ZR_ERR_NOMEM, "no memory to count the brackets of %d units", z->layout->n_units);
    return 0;
}

void zr_left_out_close(struct zero_ctx *z)
{
    if (z->left_out)
        free(z->left_out->unit);
    free(z->left_out);
    z->left_out = NULL;
}

void zr_left_out_count(struct zero_ctx *z, int32_t unit, enum zero_phase phase)
{
    if (!z->left_out || phase == ZERO_BACKWARD_INPUT)
        return;
    int k = phase == ZERO_FORWARD ? FORWARD : BACKWARD;
    z->left_out->unit[unit].n[k]++;
    z->left_out->unit[unit].ever[k] = true;
}

void zr_left_out_drop(struct zero_ctx *z)
{
    for (int32_t u = 0; z->left_out && u < z->layout->n_units; u++)
        memset(z->left_out->unit[u].n, 0, sizeof z->left_out->unit[u].n);
}

bool zr_left_out_all(const struct zero_ctx *z)
{
    bool trains = false;
    for (int32_t i = 0; i < z->layout->n_flats; i++)
        trains |= z->layout->flats[i].trainable;
    for (int32_t u = 0; z->left_out && u < z->layout->n_units; u++)
        if (z->left_out->unit[u].n[BACKWARD])
            return false;
    return z->left_out && trains;
}

static const char *tensor_of(const struct zr_layout *l, int32_t unit)
{
    for (int32_t i = 0; i < l->n_tensors; i++) {
        const struct zr_tensor *t = &l->tensors[i];
        if (!t->buffer && unit >= t->unit && unit < t->unit + t->n_slices)
            return t->name;
    }
    return "none";
}

/* Of a unit with fewer than there are micro-batches, where another has as many. */
static bool report_phase(struct zero_ctx *z, int k, int64_t step)
{
    const struct zr_left_out *c = z->left_out;
    int32_t all = z->config.options.grad_accum_steps, least = -1, most = 0;
    for (int32_t u = 0; u < z->layout->n_units; u++) {
        most = (int32_t)zr_max(most, c->unit[u].n[k]);
        if (c->unit[u].ever[k] && (least < 0 || c->unit[u].n[k] < c->unit[least].n[k]))
            least = u;
    }
    if (least < 0 || most < all || c->unit[least].n[k] >= all)
        return false;
    zr_warn(z->config.options.log,
            "step %lld: unit %d (tensor %s) had a %s bracket in %d of %d micro-batches: at stage %d what it "
            "computed without one %s; if it computed nothing, all is well",
            (long long)step, least, tensor_of(z->layout, least), k == FORWARD ? "forward" : "backward",
            c->unit[least].n[k], all, z->config.options.stage,
            k == FORWARD ? "may have read parameters of the step before" : "is in no gradient");
    return true;
}

void zr_left_out_step(struct zero_ctx *z)
{
    if (!z->left_out)
        return;
    struct zr_engine_facts facts;
    zr_engine_facts(z->engine, &facts);
    for (int k = BACKWARD; k >= FORWARD && !z->left_out->reported; k--)
        z->left_out->reported = report_phase(z, k, facts.last_step);
    zr_left_out_drop(z);
}
