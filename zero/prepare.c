/* prepare.c: from the model's table and a configuration to a plan: what zero_plan reports and what zero_wrap
 * carries out are made by the same steps. */
#include "zero/context.h"

int zr_prepare(struct zr_config *c, int world, const struct zero_tensor *tensors, int32_t n_tensors,
               enum zr_values_in values, struct zr_prepared *out)
{
    struct zr_tensor *t;
    *out = (struct zr_prepared){0};
    int err = zr_backend_choose(c, world * zr_model_ranks(&c->options), &out->backend);
    if (!err)
        err = zr_tensors_check(tensors, n_tensors, &c->user, values, &t);
    if (!err)
        err = zr_config_layout(c, t, n_tensors, world, &out->layout);
    if (err)
        return err;
    zr_backend_reserve(c, out->backend, out->layout);
    err = zr_schedule_make(c, out->layout, &out->schedule);
    if (err)
        return err;
    return zr_plan_make(out->layout, &c->options, &out->plan);
}
