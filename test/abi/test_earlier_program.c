/* SPDX-License-Identifier: Apache-2.0 */
/* test_earlier_program.c: a program compiled with today's zero.h, over a library whose structs have each one
 * field more: tables are walked in the program's steps, nothing is written beyond the program's structs, and
 * what it does not know has its default. */
#include "test/abi/from_later_header.h"
#include "test/zero/toy_net.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

enum { STEPS = 3, ROOM = 64, POISON = 0xb5 };

/* The structs that the library fills, each with what must stay as it is behind it. */
struct room {
    union {
        struct zero_step_info info;
        struct zero_stats stats;
        struct zero_plan_info plan;
        unsigned char bytes[sizeof(struct zero_stats) + sizeof(struct zero_plan_info) + ROOM];
    } u;
};

static void poison(struct room *r)
{
    memset(r, POISON, sizeof *r);
}

static bool untouched_beyond(const struct room *r, size_t size)
{
    for (size_t i = size; i < size + ROOM; i++)
        if (r->u.bytes[i] != POISON)
            return false;
    return true;
}

static int64_t sum(const struct zero_bytes *b)
{
    int64_t n = 0;
#define ADD(name, text) n += b->name;
    ZERO_MEM_MAP(ADD)
#undef ADD
    return n;
}

/* The later zero.h is a later one. */
static void structs_have_grown(void **state)
{
    (void)state;
    assert_true(later_size_of("config") > sizeof(struct zero_config));
    assert_true(later_size_of("tensor") > sizeof(struct zero_tensor));
    assert_true(later_size_of("call") > sizeof(struct zero_call));
    assert_true(later_size_of("weight") > sizeof(struct zero_weight));
    assert_true(later_size_of("step_info") > sizeof(struct zero_step_info));
    assert_true(later_size_of("stats") > sizeof(struct zero_stats));
    assert_true(later_size_of("plan_info") > sizeof(struct zero_plan_info));
}

static void unknown_field_has_its_default(void **state)
{
    (void)state;
    struct zero_config begun[2] = {ZERO_CONFIG_INIT, ZERO_CONFIG_INIT};
    assert_int_equal(later_field_of_config(&begun[0]), 77);
    /* By a program without macros; of two in an array, the second is left alone. */
    memset(begun, POISON, sizeof begun);
    const struct zero_config was = begun[1];
    assert_int_equal(zero_config_init(&begun[0], sizeof begun[0]), 0);
    assert_memory_equal(&begun[1], &was, sizeof was);
    assert_int_equal(begun[0].size, sizeof begun[0]);
    assert_int_equal(begun[0].tensor_size, 0);
    assert_int_equal(later_field_of_config(&begun[0]), 77);
    assert_int_equal(zero_config_set(&begun[0], "stage", "3"), 0);
    assert_int_equal(begun[0].stage, 3);
    assert_memory_equal(&begun[1], &was, sizeof was);
}

static void plan_fills_its_struct(void **state)
{
    (void)state;
    for (int stage = 0; stage <= 3; stage++) {
        struct room r;
        struct toy m;
        struct zero_config cfg = ZERO_CONFIG_INIT;
        cfg.stage = stage;
        cfg.launch.world = 2;
        toy_make(&m);
        poison(&r);
        if (zero_plan(m.table, TOY_TENSORS, &cfg, &r.u.plan))
            fail_msg("%s", zero_last_error());
        assert_true(untouched_beyond(&r, sizeof r.u.plan));
        int64_t n = 0;
        for (int t = 0; t < TOY_TENSORS; t++)
            n += toy_elems(t);
        assert_int_equal(r.u.plan.n_params, n);
        assert_int_equal(r.u.plan.stage, stage);
        assert_true(r.u.plan.bytes.total > 0);
        assert_int_equal(r.u.plan.bytes.total, sum(&r.u.plan.bytes));
        assert_true(r.u.plan.traffic.wire_bytes > 0 && r.u.plan.paper_bytes > 0);
        toy_free(&m);
    }
}

/* Every unit, twice in forward: an order that is not the default one. */
static int32_t make_order(struct zero_call out[6 * TOY_UNITS])
{
    int32_t n = 0;
    for (int pass = 0; pass < 2; pass++)
        for (int32_t u = 0; u < TOY_UNITS; u++)
            for (uint8_t end = 0; end < 2; end++)
                out[n++] = (struct zero_call){.unit = u, .phase = ZERO_FORWARD, .is_end = end};
    for (int32_t u = TOY_UNITS; u-- > 0;)
        for (uint8_t end = 0; end < 2; end++)
            out[n++] = (struct zero_call){.unit = u, .phase = ZERO_BACKWARD, .is_end = end};
    return n;
}

#define NEED(what)                                                                                           \
    do {                                                                                                     \
        if (!(what))                                                                                         \
            toy_wrong(r, "line %d: %s (%s)\n", __LINE__, #what, zero_last_error());                          \
    } while (0)

static int step_once(struct toy *m, zero_ctx *z, const struct toy_rank *r, int step, struct room *room)
{
    int err = 0;
    for (int pass = 0; !err && pass < 2; pass++)
        err = toy_forward(m, z, true);
    if (!err)
        err = toy_backward(m, z, true, step, r->rank);
    poison(room);
    return err ? err : zero_step(z, 1e-2f, &room->u.info);
}

/* Two weights, one of them a slice, out under other names and back in. */
static void weights_out_and_in(struct toy_rank *r, zero_ctx *z, const char *dir)
{
    const struct zero_weight map[] = {{.name = "a", .tensor = 0},
                                      {.name = "b", .tensor = TOY_STACKED, .slice = ZERO_SLICE(1)},
                                      {.name = "c", .tensor = 2}};
    float was[120], now[120], other[120];
    memset(other, 0, sizeof other);
    NEED(zero_export(z, dir, map, 3, 0) == 0);
    NEED(zero_read(z, TOY_STACKED, ZERO_VALUE_PARAM, 120, 120, was) == 0);
    NEED(zero_write(z, TOY_STACKED, ZERO_VALUE_PARAM, 120, 120, other) == 0);
    NEED(zero_import(z, dir, map, 3) == 0);
    NEED(zero_read(z, TOY_STACKED, ZERO_VALUE_PARAM, 120, 120, now) == 0);
    NEED(memcmp(was, now, sizeof was) == 0);
    NEED(memcmp(was, other, sizeof was) != 0);
}

struct job {
    int stage;
    const char *dir;
};

static void train_rank(struct toy_rank *r)
{
    const struct job *job = r->arg;
    struct zero_call order[6 * TOY_UNITS];
    struct zero_config cfg = toy_config(r, job->stage);
    struct toy m;
    struct room room;
    zero_ctx *z = NULL;
    cfg.memory.order = order;
    cfg.memory.n_order = make_order(order);
    toy_make(&m);
    int err = zero_wrap(&z, m.table, TOY_TENSORS, &cfg);
    NEED(!err);
    memset(order, POISON, sizeof order); /* it was copied */
    for (int step = 0; !err && step < STEPS; step++) {
        err = step_once(&m, z, r, step, &room);
        NEED(!err && untouched_beyond(&room, sizeof room.u.info));
        NEED(room.u.info.t == step + 1 && room.u.info.grad_norm > 0);
        NEED(!room.u.info.skipped && !room.u.info.clipped);
    }
    poison(&room);
    NEED(err || zero_get_stats(z, &room.u.stats) == 0);
    const struct zero_stats *s = &room.u.stats;
    NEED(untouched_beyond(&room, sizeof *s));
    NEED(s->rank == r->rank && s->world == r->world && s->n_steps == STEPS);
    NEED(s->allocated.total == s->planned.total && s->planned.total == sum(&s->planned));
    NEED(s->n_replans == 0); /* the order was read as it was written */
    NEED(!strcmp(s->path, s->backend));
    if (!err)
        weights_out_and_in(r, z, job->dir);
    NEED(zero_unwrap(&z) == 0);
    toy_free(&m);
}

static void tables_and_results(void **state)
{
    (void)state;
    char dir[] = "/tmp/zero_abi_XXXXXX", file[128];
    assert_non_null(mkdtemp(dir));
    for (int world = 1; world <= 2; world++)
        for (int stage = 0; stage <= 3; stage++) {
            struct toy_rank r[2];
            struct job job = {stage, dir};
            toy_ranks(world, train_rank, &job, r);
            for (int k = 0; k < world; k++)
                if (*r[k].wrong)
                    fail_msg("stage %d world %d rank %d:\n%s", stage, world, k, r[k].wrong);
        }
    snprintf(file, sizeof file, "%s/model.safetensors", dir);
    assert_int_equal(unlink(file), 0);
    assert_int_equal(rmdir(dir), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(structs_have_grown),
        cmocka_unit_test(unknown_field_has_its_default),
        cmocka_unit_test(plan_fills_its_struct),
        cmocka_unit_test(tables_and_results),
    };
    return cmocka_run_group_tests_name("a program of an earlier zero.h", tests, NULL, NULL);
}
