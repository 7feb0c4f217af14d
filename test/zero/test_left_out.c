/* SPDX-License-Identifier: Apache-2.0 */
/* test_left_out.c: a unit without a backward bracket in a step is a line of the log, once. At stages 0 and 1,
 * where pointers are valid without brackets, so is one that has brackets in some micro-batches alone. */
#include "test/cmocka.h"
#include "test/zero/toy_net.h"

#include <stdio.h>
#include <string.h>

enum { STEPS = 4, ACCUM = 3 };

/* Which bracket of unit 1 is left out: of this phase, in this step, and of this micro-batch; -1: of all. */
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

/* At any stage, and of a unit that never has one, too. */
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
        run((struct setup){stage, ZERO_BACKWARD, 1, 1, true}, NULL);    /* of a step that is given up */
        if (stage > 1)
            run((struct setup){stage, ZERO_BACKWARD, 2, 1, false}, NULL); /* pointers are NULL there */
        else
            run((struct setup){stage, ZERO_FORWARD, -1, -1, false}, NULL); /* one that never has any */
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
