/* SPDX-License-Identifier: Apache-2.0 */
/* prepare.c: from the model's table and a configuration to a plan: what zero_plan reports and what zero_wrap
 * carries out are made by the same steps. */
#include "zero/context.h"

/* Parts that are padded have all of the whole between them; one part is the whole. */
static int check_sizes(const struct zr_layout *l, int32_t parts)
{
    for (int32_t i = 0; i < l->n_tensors; i++) {
        const struct zr_tensor *t = &l->tensors[i];
        int64_t most = t->shape[0] > INT64_MAX / parts ? INT64_MAX : t->shape[0] * parts;
        if (t->cut_size > most || (t->cut_size && parts == 1 && t->cut_size != most))
            return zr_fail(ZR_ERR_ARG,
                           "tensors[%d] (%s): tp_size is %lld, but shape[0] is %lld on %d ranks of tp; "
                           "allowed: %s%lld",
                           i, t->name, (long long)t->cut_size, (long long)t->shape[0], parts,
                           parts > 1 ? "1.." : "", (long long)most);
    }
    return 0;
}

int zr_prepare(struct zr_config *c, int world, const struct zero_tensor *tensors, int32_t n_tensors,
               enum zr_values_in values, struct zr_prepared *out)
{
    struct zr_tensor *t;
    *out = (struct zr_prepared){0};
    ZR_TRY(zr_backend_choose(c, world * zr_model_ranks(&c->options), &out->backend));
    ZR_TRY(zr_tensors_check(tensors, n_tensors, &c->user, values, &t));
    int err = zr_ties_take(c, t, n_tensors);
    if (err) {
        zr_tensors_free(t, n_tensors);
        return err;
    }
    ZR_TRY(zr_config_layout(c, t, n_tensors, world, &out->layout));
    ZR_TRY(check_sizes(out->layout, c->options.parts > 1 ? c->options.parts : 1));
    zr_backend_reserve(c, out->backend, out->layout);
    ZR_TRY(zr_schedule_make(c, out->layout, &out->schedule));
    return zr_plan_make(out->layout, &c->options, &out->plan);
}
