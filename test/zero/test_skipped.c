/* SPDX-License-Identifier: Apache-2.0 */
/* test_skipped.c: steps that are skipped because a gradient is not finite, or its square would overflow.
 * Tests that nothing changes, and what the log says. Runs on the host, and on the GPU stand-in. */
#include "test/cmocka.h"
#include "test/zero/sample.h"
#include "test/zero/toy_net.h"
#include "test/zero/where.h"

#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { WORLDS = 3, LINE = 1024 };

struct setup {
    int stage, optimizer, tensor, bad_rank;
    /* first element of the tensor's gradient on rank bad_rank, in the second step */
    float value;
    float clip;
    bool own_update;
    /* part of the log line about the skipped step; "": the step must be taken */
    const char *says;
};

static const int unit_of[TOY_TENSORS] = {0, 1, 1, -1, 3};
static const char *const name_of[TOY_TENSORS] = {"embedding", "layers", "bias", "frozen", "head"};

static _Thread_local const struct zero_config *my_cfg;

static void wait_for_model(void)
{
    where_wait(my_cfg);
}

struct log {
    pthread_mutex_t lock;
    int n;
    char line[LINE];
};

static void keep_line(void *arg, const char *line)
{
    struct log *l = arg;
    const char *said = strstr(line, "was skipped");
    pthread_mutex_lock(&l->lock);
    l->n += said != NULL;
    if (said)
        snprintf(l->line, sizeof l->line, "%s", said);
    pthread_mutex_unlock(&l->lock);
}

static int take(void *arg, const struct zero_update *u)
{
    for (int64_t i = 0; i < u->n; i++)
        u->master[i] -= u->lr * fminf(u->grad[i], 1);
    return 0;
}

static int backward(struct toy *m, zero_ctx *z, const struct setup *s, int step, int rank)
{
    for (int u = TOY_UNITS; u-- > 0;) {
        OR_RETURN(zero_begin(z, u, ZERO_BACKWARD));
        toy_wait();
        toy_add_gradient(m, u, step, rank);
        if (step == 1 && rank == s->bad_rank && u == unit_of[s->tensor])
            toy_poison_gradient(m, s->tensor, s->value);
        OR_RETURN(zero_end(z, u, ZERO_BACKWARD));
    }
    return 0;
}

/* The second step has the bad gradient, and does not ask for its info. */
static void train(struct toy_rank *r)
{
    const struct setup *s = r->arg;
    struct zero_config cfg = toy_config(r, s->stage);
    struct zero_step_info info = {.t = 0};
    struct toy m;
    struct log log = {.lock = PTHREAD_MUTEX_INITIALIZER};
    zero_ctx *z = NULL;
    uint64_t before = 0, after = 0;
    int err = 0, n_states = s->own_update ? 0 : s->optimizer == ZERO_ADAMW ? 2 : s->optimizer != ZERO_SGD;
    bool skipped = s->says[0];
    cfg.optim.optimizer = s->own_update ? ZERO_ADAMW : s->optimizer;
    cfg.clip = s->clip;
    cfg.debug.log = keep_line;
    cfg.debug.log_arg = &log;
    if (s->own_update) {
        cfg.optim.update = take;
        cfg.optim.weight_decay = 0;
    }
    toy_make(&m);
    where_open(r->rank, &cfg);
    my_cfg = &cfg;
    TOY_TRY(zero_wrap(&z, m.table, TOY_TENSORS, &cfg));
    for (int step = 0; !err && step < 3; step++) {
        TOY_TRY(toy_forward(&m, z, true));
        TOY_TRY(backward(&m, z, s, step, r->rank));
        if (step == 1)
            TOY_TRY(toy_hash(z, n_states, &before));
        TOY_TRY(zero_step(z, 1e-3f, step == 2 ? &info : NULL));
        if (step == 1)
            TOY_TRY(toy_hash(z, n_states, &after));
    }
    zero_unwrap(&z);
    where_close(&cfg);
    toy_free(&m);
    if (!err && (info.t != (skipped ? 2 : 3) || info.skipped || !isfinite(info.grad_norm)))
        toy_wrong(r, "the third step is number %lld, skipped %d, norm %g", (long long)info.t, info.skipped,
                  info.grad_norm);
    if (!err && (before == after) != skipped)
        toy_wrong(r, "the step %s weights or states", skipped ? "changed" : "did not change");
    if (!err && log.n != (int)skipped)
        toy_wrong(r, "%d lines say that the step was skipped", log.n);
    if (!err && skipped && (!strstr(log.line, s->says) || !strstr(log.line, name_of[s->tensor])))
        toy_wrong(r, "\"%s\" lacks \"%s\" or \"%s\"", log.line, s->says, name_of[s->tensor]);
    r->hash = 0;
    for (const char *c = log.line; *c; c++)
        r->hash = r->hash * 31 + (unsigned char)*c;
}

/* All ranks name the same tensor. */
static void check_world(struct setup *s, int world)
{
    struct toy_rank r[MAX_TOY_RANKS];
    char what[64];
    snprintf(what, sizeof what, "stage %d, optimizer %d, %g in %s of rank %d", s->stage, s->optimizer,
             (double)s->value, name_of[s->tensor], s->bad_rank);
    toy_run(world, train, s, r, what);
    for (int k = 1; k < world; k++)
        if (r[k].hash != r[0].hash)
            fail_msg("%s: ranks 0 and %d say different things", what, k);
}

static void check_everywhere(struct setup s)
{
    static unsigned n;
    for (int world = 1; world <= TOY_HYBRID_WORLD; world++)
        for (s.stage = 0; s.stage < TOY_STAGES; s.stage++) {
            if (!toy_has_stage(world, s.stage) || !sample_has())
                continue;
            do
                s.tensor = (int)(n++ % TOY_TENSORS);
            while (s.tensor == TOY_FROZEN);
            s.bad_rank = (int)(n % (unsigned)world);
            check_world(&s, world);
        }
}

static void not_finite(void **state)
{
    check_everywhere((struct setup){.optimizer = ZERO_ADAMW, .value = NAN, .says = "not finite"});
    check_everywhere((struct setup){.optimizer = ZERO_SGD, .value = -INFINITY, .says = "not finite"});
}

static void too_large(void **state)
{
    check_everywhere(
        (struct setup){.optimizer = ZERO_ADAMW, .value = 1e22f, .says = "the update overflows float"});
    check_everywhere(
        (struct setup){.optimizer = ZERO_RMSPROP, .value = -1e22f, .says = "the update overflows float"});
}

/* The gradient that the update gets is not too large for it, so the step is taken. */
static void not_too_large(void **state)
{
    static const struct setup taken[] = {
        {.optimizer = ZERO_ADAMW, .value = 1e22f, .clip = 1, .says = ""},
        {.optimizer = ZERO_ADAMW, .value = 1e19f, .says = ""},
        {.optimizer = ZERO_SGD, .value = 1e22f, .says = ""},
        {.optimizer = ZERO_ADAMW, .value = 1e22f, .own_update = true, .says = ""}};
    for (size_t i = 0; i < sizeof taken / sizeof *taken; i++)
        if (!where_has_gpu || !taken[i].own_update)
            for (int stage = 0; stage < 4; stage++) {
                struct setup s = taken[i];
                s.stage = stage;
                s.tensor = stage == TOY_FROZEN ? 4 : stage;
                check_world(&s, 2);
            }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(not_finite),
        cmocka_unit_test(too_large),
        cmocka_unit_test(not_too_large),
    };
    toy_wait = wait_for_model;
    return cmocka_run_group_tests(tests, NULL, NULL);
}
