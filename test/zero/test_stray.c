/* SPDX-License-Identifier: Apache-2.0 */
/* test_stray.c: a gradient that is written outside its bracket, in a step with brackets, at stages 0 and 1.
 * Tests which tensor the error names, which call returns it, and what may follow. Runs on the host, and on
 * the GPU stand-in. */
#include "test/cmocka.h"
#include "test/zero/toy_net.h"
#include "test/zero/where.h"

#include <stdlib.h>
#include <string.h>

enum call { STEP, STEP_WITH_INFO, NORM, CALLS };

struct setup {
    int stage, unit;
    enum call call;
};

static _Thread_local const struct zero_config *my_cfg;

static void wait_for_model(void)
{
    where_wait(my_cfg);
}

static int backward_of(struct toy *m, zero_ctx *z, int unit, bool add)
{
    OR_RETURN(zero_begin(z, unit, ZERO_BACKWARD));
    toy_wait();
    if (add)
        toy_add_gradient(m, unit, 0, 0);
    return zero_end(z, unit, ZERO_BACKWARD);
}

static const char *name_of(const struct setup *s)
{
    return s->unit == 0 ? "the gradient of tensor embedding is not zero, but its unit 0"
                        : "the gradient of tensor layers is not zero, but its unit 2";
}

/* The host checks before anything changes. Once the gradient is zeroed, or has a bracket, the step
 * succeeds. */
static void refused_at_once(struct toy_rank *r, zero_ctx *z, struct toy *m, const struct setup *s)
{
    struct zero_step_info info;
    double norm;
    int err = 0;
    if (s->call == NORM)
        toy_expect(r, zero_norm(z, &norm), ZERO_ERR_ORDER, name_of(s));
    toy_expect(r, zero_step(z, 0.1f, s->call == STEP_WITH_INFO ? &info : NULL), ZERO_ERR_ORDER, name_of(s));
    if (s->unit == 0)
        memset(m->grad[0], 0, (size_t)toy_elems(0) * sizeof(float));
    else
        TOY_TRY(backward_of(m, z, s->unit, false));
    TOY_TRY(zero_step(z, 0.1f, NULL));
}

/* A GPU has checked when the norm is known. The context fails. */
static void refused_with_the_norm(struct toy_rank *r, zero_ctx *z, const struct setup *s)
{
    struct zero_step_info info;
    double norm;
    float value;
    int err = 0;
    if (s->call == NORM)
        toy_expect(r, zero_norm(z, &norm), ZERO_ERR_ORDER, name_of(s));
    else if (s->call == STEP_WITH_INFO)
        toy_expect(r, zero_step(z, 0.1f, &info), ZERO_ERR_ORDER, name_of(s));
    else
        TOY_TRY(zero_step(z, 0.1f, NULL));
    toy_expect(r, zero_read(z, 0, ZERO_VALUE_PARAM, 0, 1, &value), ZERO_ERR_ORDER, "gradient");
}

static void write_outside(struct toy_rank *r)
{
    const struct setup *s = r->arg;
    struct zero_config cfg = toy_config(r, s->stage);
    struct toy m;
    zero_ctx *z = NULL;
    int err = 0;
    cfg.debug.log = toy_forget_line;
    toy_make(&m);
    where_open(r->rank, &cfg);
    my_cfg = &cfg;
    TOY_TRY(zero_wrap(&z, m.table, TOY_TENSORS, &cfg));
    for (int step = 0; step < 2; step++) {
        for (int u = 0; u < TOY_UNITS; u++)
            if (u != s->unit || step == 0)
                TOY_TRY(backward_of(&m, z, u, true));
        if (step == 0)
            TOY_TRY(zero_step(z, 0.1f, NULL));
    }
    if (!err) {
        toy_wait();
        toy_add_gradient(&m, s->unit, 1, 0);
        if (where_has_gpu)
            refused_with_the_norm(r, z, s);
        else
            refused_at_once(r, z, &m, s);
    }
    zero_unwrap(&z);
    where_close(&cfg);
    toy_free(&m);
}

static void a_gradient_outside_is_named(void **state)
{
    for (int world = 1; world <= 2; world++)
        for (int stage = 0; stage < 2; stage++)
            for (int unit = 0; unit <= 2; unit += 2)
                for (int call = 0; call < CALLS; call++) {
                    struct setup s = {stage, unit, (enum call)call};
                    struct toy_rank r[2];
                    toy_run(world, write_outside, &s, r, "a gradient outside of a bracket");
                }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(a_gradient_outside_is_named)};
    toy_wait = wait_for_model;
    return cmocka_run_group_tests_name("stray", tests, NULL, NULL);
}
