/* SPDX-License-Identifier: Apache-2.0 */
/* test_gather_all.c: zero_gather_all: what the model's pointers show, what is allowed meanwhile, and that
 * training is not affected. Runs at every stage on one to three ranks that are threads. Units are sharded,
 * resident or stacked, f32 or bf16. Check mode is on or off, on the host or on the GPU stand-in. */
#include "test/cmocka.h"
#include "test/zero/sample.h"
#include "test/zero/toy_net.h"
#include "test/zero/where.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { STEPS = 3, WORLDS = 3 };

struct setup {
    int stage, prefetch;
    int where;     /* argument of zero_gather_all */
    bool gathers;  /* calls zero_gather_all between steps and within them */
    bool resident; /* one unit is resident */
    bool unbracketed;
    int64_t timeout_ms; /* 0: the default */
};

/* The configuration of the calling thread's rank. */
static _Thread_local struct zero_config open_cfg;

static void wait_for_model(void)
{
    where_wait(&open_cfg);
}

static zero_ctx *open_rank(struct toy_rank *r, struct toy *m, int *err)
{
    zero_ctx *z = NULL;
    where_open(r->rank, &open_cfg);
    *err = zero_wrap(&z, m->table, TOY_TENSORS, &open_cfg);
    if (*err)
        toy_note(r, *err);
    return z;
}

static void close_rank(struct toy *m, zero_ctx **z)
{
    zero_unwrap(z);
    where_close(&open_cfg);
    toy_free(m);
}

/* Checks that the model's pointers show the bytes that zero_read gives. */
static int compare(struct toy_rank *r, struct toy *m, zero_ctx *z)
{
    int err = 0;
    for (int t = 0; !err && t < TOY_TENSORS; t++) {
        size_t n = (size_t)toy_elems(t) * (m->table[t].dtype == ZERO_F32 ? 4 : 2);
        unsigned char *x = malloc(n);
        memset(x, 0xff, n);
        TOY_TRY(zero_read(z, t, ZERO_VALUE_PARAM, 0, toy_elems(t), x));
        wait_for_model();
        if (!err && (!m->param[t] || memcmp(m->param[t], x, n)))
            toy_wrong(r, "tensor %s is not what it should be", m->table[t].name);
        free(x);
    }
    return err;
}

static int look_at_all(struct toy_rank *r, struct toy *m, zero_ctx *z)
{
    const struct setup *s = r->arg;
    int err = 0;
    void *before[TOY_TENSORS];
    memcpy(before, m->param, sizeof before);
    TOY_TRY(zero_gather_all(z, s->where));
    TOY_TRY(compare(r, m, z));
    TOY_TRY(toy_forward(m, z, true)); /* brackets are allowed, but not needed */
    if (r->rank == 0)
        TOY_TRY(toy_forward(m, z, false)); /* without brackets, one rank may run forward alone */
    TOY_TRY(compare(r, m, z));
    TOY_TRY(zero_release_all(z));
    if (!err && memcmp(before, m->param, sizeof before))
        toy_wrong(r, "a pointer is not where it was");
    return err;
}

static zero_ctx *wrap(struct toy_rank *r, struct toy *m, int *err)
{
    const struct setup *s = r->arg;
    open_cfg = toy_config(r, s->stage);
    toy_make(m);
    open_cfg.memory.prefetch = s->prefetch;
    if (s->timeout_ms)
        open_cfg.launch.timeout_ms = s->timeout_ms;
    if (s->resident)
        m->table[0].flags |= ZERO_RESIDENT;
    return open_rank(r, m, err);
}

static void train(struct toy_rank *r)
{
    const struct setup *s = r->arg;
    struct toy m;
    int err;
    bool brackets = !s->unbracketed;
    zero_ctx *z = wrap(r, &m, &err);
    if (!err && s->gathers)
        TOY_TRY(look_at_all(r, &m, z));
    for (int step = 0; !err && step < STEPS; step++) {
        TOY_TRY(toy_forward(&m, z, brackets));
        TOY_TRY(toy_backward(&m, z, brackets, step, r->rank));
        if (!err && s->gathers && step == 1)
            TOY_TRY(look_at_all(r, &m, z)); /* between backward and step, so gradients are pending */
        TOY_TRY(zero_step(z, 1e-2f, NULL));
        if (!err && s->gathers)
            TOY_TRY(look_at_all(r, &m, z));
    }
    struct zero_stats stats;
    TOY_TRY(zero_get_stats(z, &stats));
    if (!err && memcmp(&stats.allocated, &stats.planned, sizeof stats.planned))
        toy_wrong(r, "more is held than planned");
    if (!err && stats.n_replans)
        toy_wrong(r, "the order was learned anew %d times", (int)stats.n_replans);
    TOY_TRY(toy_hash(z, 2, &r->hash));
    close_rank(&m, &z);
}

static void everything_is_there(void **state)
{
    const int own_device = where_has_gpu ? ZERO_DEVICE_CUDA : 0;
    for (int world = 1; world <= (where_has_gpu ? WORLDS : TOY_HYBRID_WORLD); world++)
        for (int stage = 0; stage < TOY_STAGES; stage++)
            for (int way = 0; way < 8; way += where_has_gpu ? 3 : 1) { /* worlds take longer there */
                if (!toy_has_stage(world, stage) || !sample_has())
                    continue;
                struct setup s = {.stage = stage,
                                  .prefetch = way & 1 ? 0 : 1,
                                  .resident = way & 2,
                                  .where = way & 4   ? ZERO_DEVICE_HOST
                                           : way & 1 ? own_device
                                                     : 0,
                                  .unbracketed = stage < 2 && (way & 2)};
                struct toy_rank plain[TOY_HYBRID_WORLD], r[TOY_HYBRID_WORLD];
                char what[64];
                snprintf(what, sizeof what, "stage %d world %d way %d", stage, world, way);
                toy_run(world, train, &s, plain, what);
                s.gathers = true;
                toy_run(world, train, &s, r, what);
                for (int k = 0; k < world; k++)
                    if (r[k].hash != plain[0].hash)
                        fail_msg("%s: other weights on rank %d", what, k);
            }
}

/* ---- what is refused meanwhile ---- */

static void call_wrongly(struct toy_rank *r)
{
    struct toy m;
    int err;
    double norm;
    float x[8] = {0};
    static const char *const held = "zero_gather_all holds all parameters";
    zero_ctx *z = wrap(r, &m, &err);
    toy_expect(r, zero_gather_all(NULL, 0), ZERO_ERR_ARG, "zero_gather_all: z is NULL");
    toy_expect(r, zero_release_all(NULL), ZERO_ERR_ARG, "zero_release_all: z is NULL");
    if (!where_has_gpu)
        toy_expect(r, zero_gather_all(z, ZERO_DEVICE_CUDA), ZERO_ERR_ARG,
                   "where is 2; allowed: 0, ZERO_DEVICE_HOST");
    toy_expect(r, zero_gather_all(z, -1), ZERO_ERR_ARG, "where is -1");
    toy_expect(r, zero_release_all(z), ZERO_ERR_ORDER, "there was no zero_gather_all");
    TOY_TRY(zero_begin(z, 1, ZERO_FORWARD));
    toy_expect(r, zero_gather_all(z, 0), ZERO_ERR_ORDER, "zero_gather_all: unit 1 has an open bracket");
    TOY_TRY(zero_end(z, 1, ZERO_FORWARD));
    TOY_TRY(toy_forward(&m, z, true));
    TOY_TRY(toy_backward(&m, z, true, 0, r->rank));
    TOY_TRY(zero_gather_all(z, 0));
    toy_expect(r, zero_gather_all(z, 0), ZERO_ERR_ORDER, "all parameters are already gathered");
    toy_expect(r, zero_begin(z, 1, ZERO_BACKWARD), ZERO_ERR_ORDER, held);
    toy_expect(r, zero_micro(z), ZERO_ERR_ORDER, held);
    toy_expect(r, zero_norm(z, &norm), ZERO_ERR_ORDER, held);
    toy_expect(r, zero_drop(z), ZERO_ERR_ORDER, held);
    toy_expect(r, zero_step(z, 1e-2f, NULL), ZERO_ERR_ORDER, held);
    toy_expect(r, zero_write(z, 0, ZERO_VALUE_PARAM, 0, 8, x), ZERO_ERR_ORDER, held);
    toy_expect(r, zero_load(z, "/tmp"), ZERO_ERR_ORDER, held);
    toy_expect(r, zero_import(z, "/tmp", NULL, 0), ZERO_ERR_ORDER, held);
    TOY_TRY(zero_begin(z, 1, ZERO_FORWARD));
    toy_expect(r, zero_begin(z, 1, ZERO_FORWARD), ZERO_ERR_ORDER, "already open");
    toy_expect(r, zero_release_all(z), ZERO_ERR_ORDER, "zero_release_all: unit 1 has an open bracket");
    TOY_TRY(zero_end(z, 1, ZERO_FORWARD));
    toy_expect(r, zero_end(z, 1, ZERO_FORWARD), ZERO_ERR_ORDER, "is not open");
    TOY_TRY(zero_release_all(z));
    toy_expect(r, zero_release_all(z), ZERO_ERR_ORDER, "there was no zero_gather_all");
    TOY_TRY(zero_step(z, 1e-2f, NULL));
    TOY_TRY(zero_gather_all(z, 0));
    TOY_TRY(zero_unwrap(&z)); /* also releases */
    if (!err && m.param[0])
        toy_wrong(r, "a pointer is left");
    close_rank(&m, &z);
}

static void wrong_moments(void **state)
{
    struct setup s = {.prefetch = 0};
    toy_at_each_stage(call_wrongly, &s, &s.stage, "wrong moments");
}

/* ---- memory budget ---- */

static void ask_beyond_the_budget(struct toy_rank *r)
{
    struct toy m;
    int err;
    toy_make(&m);
    open_cfg = toy_config(r, 3);
    open_cfg.memory.param_budget_bytes = 1024;
    open_cfg.memory.prefetch = 0;
    zero_ctx *z = open_rank(r, &m, &err);
    void *before = m.param[0];
    if (!err)
        toy_expect(r, zero_gather_all(z, 0), ZERO_ERR_BUDGET, "bytes on top of the");
    if (!err && m.param[0] != before)
        toy_wrong(r, "a refused call changed a pointer");
    TOY_TRY(zero_gather_all(z, ZERO_DEVICE_HOST));
    TOY_TRY(compare(r, &m, z));
    TOY_TRY(zero_release_all(z));
    TOY_TRY(toy_forward(&m, z, true));
    TOY_TRY(toy_backward(&m, z, true, 0, r->rank));
    TOY_TRY(zero_step(z, 1e-2f, NULL));
    close_rank(&m, &z);
}

static void beyond_the_budget(void **state)
{
    struct toy_rank r[WORLDS];
    toy_run(2, ask_beyond_the_budget, NULL, r, "budget");
}

/* ---- ranks that differ ---- */

static void differ(struct toy_rank *r)
{
    struct toy m;
    int err;
    zero_ctx *z = wrap(r, &m, &err);
    if (r->rank == 0)
        TOY_TRY(zero_gather_all(z, 0));
    TOY_TRY(toy_forward(&m, z, true));
    TOY_TRY(toy_backward(&m, z, true, 0, r->rank));
    TOY_TRY(zero_step(z, 1e-2f, NULL));
    TOY_TRY(toy_hash(z, 2, &r->hash));
    if (err != ZERO_ERR_MISMATCH || !strstr(r->text, "zero_gather_all"))
        toy_wrong(r, "%d %s", err, r->text);
    r->err = 0;
    toy_expect(r, zero_gather_all(z, 0), ZERO_ERR_MISMATCH, "");
    toy_expect(r, zero_release_all(z), ZERO_ERR_MISMATCH, "");
    close_rank(&m, &z);
}

static void ranks_that_differ(void **state)
{
    for (int stage = 0; stage <= 3; stage++) {
        /* On GPUs a timeout of the collective finds it. */
        struct setup s = {.stage = stage, .timeout_ms = where_has_gpu ? 2000 : 0};
        struct toy_rank r[WORLDS];
        toy_run(2, differ, &s, r, "one rank asks alone");
    }
}

/* ---- check mode ---- */

/* In check mode gathered parameters may only be read, and only until zero_release_all. */
static void touch_wrongly(struct toy_rank *r)
{
    const struct setup *s = r->arg;
    struct toy m;
    int err;
    toy_make(&m);
    open_cfg = toy_config(r, s->stage);
    open_cfg.debug.check = 1;
    zero_ctx *z = open_rank(r, &m, &err);
    TOY_TRY(zero_gather_all(z, 0));
    float *kept = m.param[0];
    if (!err && s->gathers)
        kept[7] = 1;
    TOY_TRY(zero_release_all(z));
    volatile float seen = err ? 0 : kept[7];
    (void)seen;
    TOY_TRY(toy_forward(&m, z, true));
    if (err != ZERO_ERR_ORDER ||
        !strstr(r->text, s->gathers ? "writes tensor embedding (unit 0, element 7) which may only be read"
                                    : "reads tensor embedding (unit 0, element 7)"))
        toy_wrong(r, "%d %s", err, r->text);
    r->err = 0;
    close_rank(&m, &z);
}

static void touches_are_found(void **state)
{
    if (where_has_gpu) /* GPU memory cannot be closed */
        skip();
    for (int world = 1; world <= 2; world++)
        for (int stage = 2; stage <= 3; stage++)
            for (int writes = 0; writes < 2; writes++) {
                struct setup s = {.stage = stage, .gathers = writes};
                struct toy_rank r[WORLDS];
                toy_run(world, touch_wrongly, &s, r, writes ? "a write" : "a late read");
            }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(everything_is_there), cmocka_unit_test(wrong_moments),
        cmocka_unit_test(beyond_the_budget),   cmocka_unit_test(ranks_that_differ),
        cmocka_unit_test(touches_are_found),
    };
    toy_wait = wait_for_model;
    return cmocka_run_group_tests(tests, NULL, NULL);
}
