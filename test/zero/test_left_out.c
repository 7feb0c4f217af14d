/* SPDX-License-Identifier: Apache-2.0 */
/* test_left_out.c: a unit without a backward bracket in a step is logged once. At stages 0 and 1, where
 * pointers are valid without brackets, a unit with brackets in only some micro-batches is logged too. */
#include "test/cmocka.h"
#include "test/zero/toy_net.h"

#include <stdio.h>
#include <string.h>

enum { STEPS = 4, ACCUM = 3 };

/* The bracket of unit 1 that is left out. step, micro: -1: in all. */
struct setup {
    int stage;
    enum zero_phase phase;
    int step, micro;
    bool drops;
};

static _Atomic int n_lines;
static char first_line[512];

static void keep_line(void *arg, const char *line)
{
    if ((strstr(line, "bracket in ") || strstr(line, "backward bracket, so")) && n_lines++ == 0)
        snprintf(first_line, sizeof first_line, "%s", line);
}

static int pass(struct toy *m, zero_ctx *z, const struct setup *s, enum zero_phase phase, int step, int micro)
{
    int err = 0;
    for (int k = 0; !err && k < TOY_UNITS; k++) {
        int u = phase == ZERO_FORWARD ? k : TOY_UNITS - 1 - k;
        bool of_step = s->step < 0 || s->step == step, of_micro = s->micro < 0 || s->micro == micro;
        bool left_out = u == 1 && s->phase == phase && of_step && of_micro;
        err = left_out ? 0 : zero_begin(z, u, phase);
        if (!err && phase == ZERO_BACKWARD && !left_out)
            toy_add_gradient(m, u, step, micro);
        if (!err && !left_out)
            err = zero_end(z, u, phase);
    }
    return err;
}

static void train(struct toy_rank *r)
{
    const struct setup *s = r->arg;
    struct toy m;
    zero_ctx *z;
    struct zero_config cfg = toy_config(r, s->stage);
    cfg.debug.log = r->rank == 0 ? keep_line : toy_forget_line;
    cfg.grad_accum_steps = ACCUM;
    int err = toy_open(r, &m, &z, &cfg);
    for (int step = 0; !err && step < STEPS; step++) {
        for (int micro = 0; !err && micro < ACCUM; micro++) {
            TOY_TRY(pass(&m, z, s, ZERO_FORWARD, step, micro));
            TOY_TRY(pass(&m, z, s, ZERO_BACKWARD, step, micro));
        }
        if (s->drops && (s->step < 0 || step == s->step))
            TOY_TRY(zero_drop(z));
        else
            TOY_TRY(zero_step(z, 1e-3f, NULL));
    }
    toy_close(&m, &z);
}

static void run(struct setup s, const char *says)
{
    struct toy_rank r[2];
    n_lines = 0;
    toy_run(2, train, &s, r, says ? says : "no line");
    if (n_lines != (says != NULL) || (says && !strstr(first_line, says)))
        fail_msg("stage %d, phase %d of step %d, micro-batch %d: %d lines, the first: %s", s.stage, s.phase,
                 s.step, s.micro, n_lines, first_line);
}

static void a_bracket_that_is_left_out_is_a_line(void **state)
{
    for (int stage = 0; stage <= 1; stage++) {
        run((struct setup){stage, ZERO_BACKWARD, 2, 1, false},
            "step 3: unit 1 (tensor layers) had a backward bracket in only 2 of 3 micro-batches: at stage ");
        run((struct setup){stage, ZERO_FORWARD, 2, 0, false},
            "step 3: unit 1 (tensor layers) had a forward bracket in only 2 of 3 micro-batches: at stage ");
        run((struct setup){stage, ZERO_BACKWARD, -1, 2, false},
            "step 1: unit 1 (tensor layers) had a backward bracket in only 2 of 3 micro-batches: at stage ");
    }
}

/* Also for a unit that never has a backward bracket. */
static void a_unit_that_a_step_leaves_out_is_a_line(void **state)
{
    for (int stage = 0; stage <= 3; stage++) {
        run((struct setup){stage, ZERO_BACKWARD, 1, -1, false},
            "step 2: unit 1 (tensor layers) had no backward bracket, so this step does not update it");
        run((struct setup){stage, ZERO_BACKWARD, -1, -1, false},
            "step 1: unit 1 (tensor layers) had no backward bracket, so this step does not update it");
    }
}

static void else_there_is_none(void **state)
{
    for (int stage = 0; stage <= 3; stage++) {
        run((struct setup){stage, ZERO_BACKWARD, 99, -1, false}, NULL); /* nothing is left out */
        run((struct setup){stage, ZERO_BACKWARD, 1, 1, true}, NULL);    /* the step is dropped */
        if (stage > 1)
            /* outside brackets pointers are NULL there */
            run((struct setup){stage, ZERO_BACKWARD, 2, 1, false}, NULL);
        else
            run((struct setup){stage, ZERO_FORWARD, -1, -1, false}, NULL); /* no micro-batch has one */
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_bracket_that_is_left_out_is_a_line),
        cmocka_unit_test(a_unit_that_a_step_leaves_out_is_a_line),
        cmocka_unit_test(else_there_is_none),
    };
    return cmocka_run_group_tests_name("left out", tests, NULL, NULL);
}
