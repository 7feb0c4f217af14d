/* SPDX-License-Identifier: Apache-2.0 */
/* test_bad_input.c: whatever a program gives that is wrong is a negative code of the right kind and a message
 * that names the field, its value and what is allowed; nothing is left behind, nothing was changed, and what
 * was right before still is. */
#include "test/zero/toy_net.h"

#include <float.h>
#include <limits.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmocka.h>

/* ---- zero_wrap's arguments ---- */

/* What zero_wrap is called with. */
struct call {
    struct toy m;
    struct zero_config cfg;
    const struct zero_tensor *tensors;
    int32_t n;
};

static void stage_4(struct call *c)
{
    c->cfg.stage = 4;
}
static void stage_below_0(struct call *c)
{
    c->cfg.stage = -1;
}
static void no_name(struct call *c)
{
    c->m.table[2].name = NULL;
}
static void empty_name(struct call *c)
{
    c->m.table[2].name = "";
}
static void no_param(struct call *c)
{
    c->m.table[0].param = NULL;
}
static void no_parameters(struct call *c)
{
    c->m.param[1] = NULL;
}
static void same_name(struct call *c)
{
    c->m.table[2].name = "embedding";
}
static void same_param(struct call *c)
{
    c->m.table[3].param = c->m.table[0].param;
}
static void same_grad(struct call *c)
{
    c->m.table[4].grad = c->m.table[1].grad;
}
static void grad_is_param(struct call *c)
{
    c->m.table[4].grad = c->m.table[4].param;
}
static void same_memory(struct call *c)
{
    c->m.param[3] = c->m.param[0];
}
static void overlapping_memory(struct call *c)
{
    c->m.param[3] = (float *)c->m.param[0] + 164;
}
static void empty_shape(struct call *c)
{
    memset(c->m.table[1].shape, 0, sizeof c->m.table[1].shape);
}
static void negative_shape(struct call *c)
{
    c->m.table[0].shape[1] = -1;
}
static void shape_overflows(struct call *c)
{
    c->m.table[0].shape[0] = INT64_MAX;
    c->m.table[0].shape[1] = 2;
}
static void shape_overflows_later(struct call *c)
{
    for (int d = 0; d < 8; d++)
        c->m.table[0].shape[d] = d == 0 ? INT64_C(1) << 40 : 1 << 12;
}
static void bytes_overflow(struct call *c)
{
    c->m.table[0].shape[0] = INT64_MAX / 2;
    c->m.table[0].shape[1] = 1;
}
static void sum_overflows(struct call *c)
{
    /* Each for itself is allowed; what they need together does not fit an int64_t. */
    static struct zero_tensor many[200];
    static void *param[200], *grad[200];
    static char name[200][8];
    for (int i = 0; i < 200; i++) {
        snprintf(name[i], sizeof name[i], "t%d", i);
        param[i] = (void *)((uintptr_t)1 << 56 | (uintptr_t)i << 8);
        many[i] = (struct zero_tensor){.name = name[i],
                                       .param = &param[i],
                                       .grad = &grad[i],
                                       .shape = {INT64_C(1) << 47},
                                       .dtype = ZERO_F32};
    }
    c->tensors = many;
    c->n = 200;
}
static void unit_gap(struct call *c)
{
    c->m.table[4].unit = 7;
}
static void negative_unit(struct call *c)
{
    c->m.table[2].unit = -1;
}
static void huge_unit(struct call *c)
{
    c->m.table[4].unit = INT32_MAX;
}
static void too_many_layers(struct call *c)
{
    c->m.table[1].shape[0] = (1 << 20) + 1;
}
static void too_many_layers_together(struct call *c)
{
    static struct zero_tensor many[20];
    static void *param[20];
    static char name[20][8];
    for (int i = 0; i < 20; i++) {
        snprintf(name[i], sizeof name[i], "t%d", i);
        param[i] = (void *)((uintptr_t)1 << 56 | (uintptr_t)i << 32);
        many[i] = (struct zero_tensor){.name = name[i],
                                       .param = &param[i],
                                       .shape = {1 << 20},
                                       .dtype = ZERO_F32,
                                       .unit = i << 20,
                                       .flags = ZERO_STACKED};
    }
    c->tensors = many;
    c->n = 20;
}
static void negative_uses(struct call *c)
{
    c->m.table[0].uses = -1;
}
static void too_many_uses(struct call *c)
{
    c->m.table[0].uses = 1001;
}
static void uses_that_differ(struct call *c)
{
    c->m.table[1].uses = 2;
    c->m.table[2].uses = 3;
}
static void uses_beside_an_order(struct call *c)
{
    static const struct zero_call order[] = {{1, ZERO_BACKWARD, 0}, {1, ZERO_BACKWARD, 1}};
    c->m.table[2].uses = 2;
    c->cfg.memory.order = order;
    c->cfg.memory.n_order = 2;
}
static void unknown_flags(struct call *c)
{
    c->m.table[0].flags = 1u << 20 | ZERO_NO_DECAY;
}
static void f16(struct call *c)
{
    c->m.table[2].dtype = ZERO_F16;
}
static void no_dtype(struct call *c)
{
    c->m.table[2].dtype = (enum zero_dtype)0;
}
static void zeroed_config(struct call *c)
{
    memset(&c->cfg, 0, sizeof c->cfg);
}
static void garbage_config(struct call *c)
{
    memset(&c->cfg, 0xa5, sizeof c->cfg);
}
static void newer_config(struct call *c)
{
    c->cfg.size = sizeof c->cfg + 8;
}
static void no_tensors(struct call *c)
{
    c->n = 0;
}
static void negative_tensors(struct call *c)
{
    c->n = -3;
}
static void null_tensors(struct call *c)
{
    c->tensors = NULL;
}
static void rank_3_of_3(struct call *c)
{
    c->cfg.launch.world = 3;
    c->cfg.launch.rank = 3;
    c->cfg.launch.rendezvous = "tcp://127.0.0.1:1";
}
static void rank_alone(struct call *c)
{
    c->cfg.launch.world = 0;
    c->cfg.launch.rank = 1;
}
static void bad_rendezvous(struct call *c)
{
    c->cfg.launch.world = 2;
    c->cfg.launch.rendezvous = "udp://nowhere";
}
static void no_rendezvous(struct call *c)
{
    c->cfg.launch.world = 2;
    c->cfg.launch.rank = 1;
}
static void no_interface(struct call *c)
{
    c->cfg.launch.world = 2;
    c->cfg.launch.rendezvous = "tcp://127.0.0.1:1";
    c->cfg.launch.interface = "eth99";
    c->cfg.launch.timeout_ms = c->cfg.launch.start_timeout_ms =
        200; /* for the other rank, which is to hear of it */
}
static void world_size_abc(struct call *c)
{
    c->cfg.launch.world = 0;
    setenv("RANK", "0", 1);
    setenv("WORLD_SIZE", "abc", 1);
}
static void world_size_alone(struct call *c)
{
    c->cfg.launch.world = 0;
    setenv("WORLD_SIZE", "2", 1);
}
static void rank_variable_outside(struct call *c)
{
    c->cfg.launch.world = 0;
    setenv("RANK", "2", 1);
    setenv("WORLD_SIZE", "2", 1);
}
static void bad_variable(struct call *c)
{
    (void)c;
    setenv("ZERO_STAGE", "7", 1);
}
static int any_update(void *arg, const struct zero_update *u)
{
    (void)arg;
    (void)u;
    return 0;
}
static void update_and_optimizer(struct call *c)
{
    c->cfg.optim.update = any_update;
    c->cfg.optim.weight_decay = 0;
    c->cfg.optim.optimizer = ZERO_SGD;
}
static void states_without_update(struct call *c)
{
    c->cfg.optim.n_states = 1;
}
static void five_states(struct call *c)
{
    c->cfg.optim.update = any_update;
    c->cfg.optim.weight_decay = 0;
    c->cfg.optim.n_states = 5;
}
static void clip_nan(struct call *c)
{
    c->cfg.clip = NAN;
}
static void negative_timeout(struct call *c)
{
    c->cfg.launch.timeout_ms = -1;
}
static const struct zero_call of_unit_9[] = {{9, ZERO_FORWARD, 0}, {9, ZERO_FORWARD, 1}};
static void order_of_unit_9(struct call *c)
{
    c->cfg.memory.order = of_unit_9;
    c->cfg.memory.n_order = 2;
}
static void order_unbalanced(struct call *c)
{
    static const struct zero_call order[] = {{1, ZERO_FORWARD, 0}};
    c->cfg.memory.order = order;
    c->cfg.memory.n_order = 1;
}
static void order_without_length(struct call *c)
{
    c->cfg.memory.order = of_unit_9;
}

static const struct {
    const char *what;
    void (*spoil)(struct call *c);
    int code;
    const char *said[4];
} wrap_cases[] = {
    {"stage 4", stage_4, ZERO_ERR_ARG, {"stage is 4", "0, 1, 2, 3"}},
    {"stage -1", stage_below_0, ZERO_ERR_ARG, {"stage is -1", "0, 1, 2, 3"}},
    {"no name", no_name, ZERO_ERR_ARG, {"tensors[2]", "name is NULL", "unique"}},
    {"empty name", empty_name, ZERO_ERR_ARG, {"tensors[2]", "empty", "unique"}},
    {"no param", no_param, ZERO_ERR_ARG, {"tensors[0] (embedding)", "param is NULL", "must be"}},
    {"*param NULL",
     no_parameters,
     ZERO_ERR_ARG,
     {"tensors[1] (layers)", "*param is NULL", "must be allocated"}},
    {"same name", same_name, ZERO_ERR_ARG, {"tensors[0]", "tensors[2]", "embedding", "unique"}},
    {"same param", same_param, ZERO_ERR_ARG, {"embedding", "frozen", "param", "same pointer"}},
    {"same grad", same_grad, ZERO_ERR_ARG, {"layers", "head", "grad", "same pointer"}},
    {"grad is param", grad_is_param, ZERO_ERR_ARG, {"head", "grad", "param", "same pointer"}},
    {"same memory", same_memory, ZERO_ERR_ARG, {"embedding", "frozen", "memory", "tied"}},
    {"overlapping memory", overlapping_memory, ZERO_ERR_ARG, {"embedding", "frozen", "memory", "tied"}},
    {"empty shape", empty_shape, ZERO_ERR_ARG, {"tensors[1] (layers)", "shape[0] is 0", "at least one"}},
    {"negative shape",
     negative_shape,
     ZERO_ERR_ARG,
     {"tensors[0] (embedding)", "shape[1] is -1", "1 and more"}},
    {"shape overflows",
     shape_overflows,
     ZERO_ERR_ARG,
     {"tensors[0] (embedding)", "overflows", "shape[0]", "elements"}},
    {"shape overflows later",
     shape_overflows_later,
     ZERO_ERR_ARG,
     {"tensors[0] (embedding)", "overflows", "shape[1]"}},
    {"bytes overflow", bytes_overflow, ZERO_ERR_ARG, {"tensors[0] (embedding)", "overflows", "shape[0]"}},
    {"sum overflows", sum_overflows, ZERO_ERR_ARG, {"together", "elements", "allowed"}},
    {"unit gap", unit_gap, ZERO_ERR_ARG, {"unit 3 has no tensor", "without gaps"}},
    {"negative unit", negative_unit, ZERO_ERR_ARG, {"tensors[2] (bias)", "unit is -1", "0 and more"}},
    {"huge unit", huge_unit, ZERO_ERR_ARG, {"unit 3 has no tensor", "without gaps"}},
    {"too many layers", too_many_layers, ZERO_ERR_ARG, {"tensors[1] (layers)", "1048577", "1..1048576"}},
    {"too many layers together",
     too_many_layers_together,
     ZERO_ERR_ARG,
     {"20971520 layers", "allowed: 16777216"}},
    {"negative uses", negative_uses, ZERO_ERR_ARG, {"tensors[0] (embedding)", "uses is -1", "0..1000"}},
    {"too many uses", too_many_uses, ZERO_ERR_ARG, {"tensors[0] (embedding)", "uses is 1001", "0..1000"}},
    {"uses that differ",
     uses_that_differ,
     ZERO_ERR_ARG,
     {"tensors[2] (bias)", "uses is 3", "unit 1 has 2", "allowed"}},
    {"uses beside an order",
     uses_beside_an_order,
     ZERO_ERR_ARG,
     {"tensors[2] (bias)", "uses is 2", "cfg.memory.order has 1", "unit 1"}},
    {"unknown flags",
     unknown_flags,
     ZERO_ERR_ARG,
     {"tensors[0] (embedding)", "flags", "0x100000", "allowed"}},
    {"f16", f16, ZERO_ERR_NOTSUP, {"tensors[2] (bias)", "f16", "ZERO_F32, ZERO_BF16"}},
    {"no dtype", no_dtype, ZERO_ERR_ARG, {"tensors[2] (bias)", "dtype is 0", "ZERO_F32, ZERO_BF16"}},
    {"zeroed config",
     zeroed_config,
     ZERO_ERR_ARG,
     {"was not initialised", "ZERO_CONFIG_INIT", "zero_config_init"}},
    {"garbage config",
     garbage_config,
     ZERO_ERR_ARG,
     {"version is 0xa5a5a5a5", "did not initialise cfg", "ZERO_CONFIG_INIT"}},
    {"newer config", newer_config, ZERO_ERR_ARG, {"size is", "another zero.h"}},
    {"no tensors", no_tensors, ZERO_ERR_ARG, {"n_tensors is 0", "1 and more"}},
    {"negative tensors", negative_tensors, ZERO_ERR_ARG, {"n_tensors is -3", "1 and more"}},
    {"null tensors", null_tensors, ZERO_ERR_ARG, {"tensors is NULL"}},
    {"rank 3 of 3", rank_3_of_3, ZERO_ERR_ARG, {"rank is 3", "0 to 2"}},
    {"rank without world", rank_alone, ZERO_ERR_ARG, {"rank is 1", "world is 0", "both"}},
    {"bad rendezvous", bad_rendezvous, ZERO_ERR_ARG, {"rendezvous is \"udp://nowhere\"", "tcp://host:port"}},
    {"no rendezvous", no_rendezvous, ZERO_ERR_ARG, {"rank 1 of 2", "ZERO_RENDEZVOUS"}},
    {"no such interface",
     no_interface,
     ZERO_ERR_ARG,
     {"interface is \"eth99\": this host has ", "lo (127.0.0.1"}},
    {"WORLD_SIZE=abc", world_size_abc, ZERO_ERR_ARG, {"WORLD_SIZE is \"abc\"", "whole number"}},
    {"WORLD_SIZE without RANK", world_size_alone, ZERO_ERR_ARG, {"RANK is not set", "WORLD_SIZE is \"2\""}},
    {"RANK=2 of 2", rank_variable_outside, ZERO_ERR_ARG, {"RANK is \"2\"", "0 to 1"}},
    {"ZERO_STAGE=7", bad_variable, ZERO_ERR_ARG, {"ZERO_STAGE is \"7\"", "0, 1, 2, 3"}},
    {"update and optimizer",
     update_and_optimizer,
     ZERO_ERR_ARG,
     {"optimizer is sgd", "update", "one of the two"}},
    {"states without update",
     states_without_update,
     ZERO_ERR_ARG,
     {"n_states is 1", "update is NULL", "allowed"}},
    {"five states", five_states, ZERO_ERR_ARG, {"n_states is 5", "allowed: 0, 1, 2, 3, 4"}},
    {"clip NaN", clip_nan, ZERO_ERR_ARG, {"clip is", "nan", "0 or more"}},
    {"negative timeout", negative_timeout, ZERO_ERR_ARG, {"timeout_ms is -1", "allowed"}},
    {"order of unit 9", order_of_unit_9, ZERO_ERR_ARG, {"order[0].unit is 9", "0..3"}},
    {"order unbalanced", order_unbalanced, ZERO_ERR_ARG, {"order[0]", "never ended", "balanced"}},
    {"order without length", order_without_length, ZERO_ERR_ARG, {"n_order is 0", "both"}},
};

static void clear_environment(void)
{
    unsetenv("RANK");
    unsetenv("WORLD_SIZE");
    unsetenv("ZERO_STAGE");
    unsetenv("ZERO_GRAD_ACCUM_STEPS");
}

static void make_call(struct call *c)
{
    toy_make(&c->m);
    c->cfg = (struct zero_config)ZERO_CONFIG_INIT;
    c->cfg.stage = 3;
    c->cfg.launch.world = 1;
    c->tensors = c->m.table;
    c->n = TOY_TENSORS;
}

static void assert_said(const char *what, const char *const *said, size_t n)
{
    for (size_t i = 0; i < n && said[i]; i++)
        if (!strstr(zero_last_error(), said[i]))
            fail_msg("%s: \"%s\" does not say \"%s\"", what, zero_last_error(), said[i]);
}

static void assert_works(struct toy *m)
{
    struct zero_config cfg = ZERO_CONFIG_INIT;
    zero_ctx *z = NULL;
    cfg.stage = 2;
    cfg.launch.world = 1;
    assert_true(toy_untouched(m));
    if (zero_wrap(&z, m->table, TOY_TENSORS, &cfg))
        fail_msg("a correct zero_wrap fails: %s", zero_last_error());
    assert_int_equal(toy_forward(m, z, true), 0);
    assert_int_equal(toy_backward(m, z, true, 0, 0), 0);
    assert_int_equal(zero_step(z, 1e-2f, NULL), 0);
    assert_int_equal(zero_unwrap(&z), 0);
    assert_null(z);
}

static void assert_nothing_left(struct toy_holdings before)
{
    struct toy_holdings now;
    if (!toy_holds_no_more(before, &now))
        fail_msg("fds %d -> %d, threads %d -> %d, maps %d -> %d", before.n_fds, now.n_fds, before.n_threads,
                 now.n_threads, before.n_maps, now.n_maps);
}

static void wrap_refuses(void **state)
{
    (void)state;
    struct toy_holdings before = toy_holdings();
    for (size_t i = 0; i < sizeof wrap_cases / sizeof *wrap_cases; i++) {
        struct call c;
        make_call(&c);
        wrap_cases[i].spoil(&c);
        void *param[TOY_TENSORS], *grad[TOY_TENSORS];
        memcpy(param, c.m.param, sizeof param);
        memcpy(grad, c.m.grad, sizeof grad);
        zero_ctx *z = (zero_ctx *)&c;
        int err = zero_wrap(&z, c.tensors, c.n, &c.cfg);
        clear_environment();
        if (err != wrap_cases[i].code)
            fail_msg("%s: code %d \"%s\"", wrap_cases[i].what, err, err ? zero_last_error() : "");
        assert_said(wrap_cases[i].what, wrap_cases[i].said, 4);
        assert_said(wrap_cases[i].what, (const char *const[]){"zero_wrap"}, 1);
        assert_null(z);
        assert_memory_equal(param, c.m.param, sizeof param);
        assert_memory_equal(grad, c.m.grad, sizeof grad);
        toy_free(&c.m);
        toy_make(&c.m);
        assert_works(&c.m);
        toy_free(&c.m);
    }
    assert_nothing_left(before);
}

/* What zero_plan can see it refuses in the same words, but it needs no pointers and knows f16. */
static void plan_refuses(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof wrap_cases / sizeof *wrap_cases; i++) {
        void (*spoil)(struct call *) = wrap_cases[i].spoil;
        bool by_pointer = spoil == no_param || spoil == no_parameters || spoil == same_param ||
                          spoil == same_memory || spoil == overlapping_memory || spoil == same_grad ||
                          spoil == grad_is_param;
        bool by_place = spoil == bad_rendezvous || spoil == no_rendezvous || spoil == no_interface ||
                        spoil == world_size_abc || spoil == world_size_alone ||
                        spoil == rank_variable_outside;
        struct call c;
        make_call(&c);
        spoil(&c);
        struct zero_plan_info info = {.world = -7};
        int err = zero_plan(c.tensors, c.n, &c.cfg, &info);
        clear_environment();
        if (err != (by_pointer || by_place || spoil == f16 ? 0 : wrap_cases[i].code))
            fail_msg("%s: code %d \"%s\"", wrap_cases[i].what, err, err ? zero_last_error() : "");
        if (err) {
            assert_said(wrap_cases[i].what, wrap_cases[i].said, 4);
            assert_said(wrap_cases[i].what, (const char *const[]){"zero_plan"}, 1);
            assert_int_equal(info.world, -7);
        }
        toy_free(&c.m);
    }
    struct toy m;
    toy_make(&m);
    assert_int_equal(zero_plan(m.table, TOY_TENSORS, NULL, NULL), ZERO_ERR_ARG);
    assert_said("plan without out", (const char *const[]){"out is NULL"}, 1);
    toy_free(&m);
}

static void null_arguments(void **state)
{
    (void)state;
    struct toy m;
    double x = 0;
    struct zero_stats stats;
    zero_ctx *none = NULL;
    toy_make(&m);
    struct zero_config cfg = ZERO_CONFIG_INIT;
    assert_int_equal(zero_wrap(NULL, m.table, TOY_TENSORS, &cfg), ZERO_ERR_ARG);
    assert_said("zero_wrap", (const char *const[]){"zero_wrap", "out is NULL"}, 2);
    assert_true(toy_untouched(&m));
    const struct {
        const char *name;
        int code;
    } calls[] = {
        {"zero_begin", zero_begin(NULL, 0, ZERO_FORWARD)},
        {"zero_end", zero_end(NULL, 0, ZERO_FORWARD)},
        {"zero_micro", zero_micro(NULL)},
        {"zero_step", zero_step(NULL, 0, NULL)},
        {"zero_read", zero_read(NULL, 0, 0, 0, 1, &x)},
        {"zero_write", zero_write(NULL, 0, 0, 0, 1, &x)},
        {"zero_mean", zero_mean(NULL, &x, 1)},
        {"zero_get_stats", zero_get_stats(NULL, &stats)},
        {"zero_trace_write", zero_trace_write(NULL, "/dev/null")},
    };
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++)
        if (calls[i].code != ZERO_ERR_ARG)
            fail_msg("%s without a context: %d", calls[i].name, calls[i].code);
#define SAYS(call)                                                                                           \
    zero_strerror(0);                                                                                        \
    assert_int_equal(call, ZERO_ERR_ARG);                                                                    \
    assert_said(#call, (const char *const[]){"z is NULL"}, 1)
    SAYS(zero_begin(NULL, 0, ZERO_FORWARD));
    SAYS(zero_end(NULL, 0, ZERO_FORWARD));
    SAYS(zero_micro(NULL));
    SAYS(zero_step(NULL, 0, NULL));
    SAYS(zero_read(NULL, 0, 0, 0, 1, &x));
    SAYS(zero_write(NULL, 0, 0, 0, 1, &x));
    SAYS(zero_mean(NULL, &x, 1));
    SAYS(zero_get_stats(NULL, &stats));
    SAYS(zero_trace_write(NULL, "/dev/null"));
#undef SAYS
    assert_int_equal(zero_unwrap(NULL), 0);
    assert_int_equal(zero_unwrap(&none), 0);

    zero_ctx *z = NULL;
    assert_int_equal(zero_wrap(&z, m.table, TOY_TENSORS, NULL), ZERO_ERR_ARG);
    assert_said("zero_wrap", (const char *const[]){"zero_wrap", "cfg is NULL", "ZERO_CONFIG_INIT"}, 3);
    assert_true(toy_untouched(&m));
    assert_int_equal(zero_wrap(&z, m.table, TOY_TENSORS, &cfg), 0);
    assert_int_equal(zero_get_stats(z, NULL), ZERO_ERR_ARG);
    assert_said("zero_get_stats", (const char *const[]){"out is NULL"}, 1);
    assert_int_equal(zero_trace_write(z, NULL), ZERO_ERR_ARG);
    assert_said("zero_trace_write", (const char *const[]){"path is NULL"}, 1);
    assert_int_equal(zero_trace_write(z, "/dev/null"), ZERO_ERR_ARG);
    assert_said("zero_trace_write", (const char *const[]){"trace is 0", "ZERO_TRACE"}, 2);
    assert_int_equal(zero_unwrap(&z), 0);
    toy_free(&m);
}

static void trace_to_nowhere(void **state)
{
    (void)state;
    struct toy m;
    zero_ctx *z = NULL;
    struct zero_config cfg = ZERO_CONFIG_INIT;
    cfg.debug.trace = 1;
    toy_make(&m);
    assert_int_equal(zero_wrap(&z, m.table, TOY_TENSORS, &cfg), 0);
    assert_int_equal(zero_trace_write(z, "/no/such/folder/trace.json"), ZERO_ERR_IO);
    assert_said("zero_trace_write", (const char *const[]){"/no/such/folder/trace.json", "No such file"}, 2);
    /* Harmless for the run. */
    assert_int_equal(toy_backward(&m, z, false, 0, 0), 0);
    assert_int_equal(zero_step(z, 1e-2f, NULL), 0);
    assert_int_equal(zero_unwrap(&z), 0);
    toy_free(&m);
}

static void unknown_keys(void **state)
{
    (void)state;
    static const struct {
        const char *key, *nearest;
    } cases[] = {{"stge", "\"stage\""}, {"prefetched", "\"prefetch\""}, {"wire-dtype", "\"wire_dtype\""}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct zero_config cfg = ZERO_CONFIG_INIT, was = cfg;
        assert_int_equal(zero_config_set(&cfg, cases[i].key, "3"), ZERO_ERR_ARG);
        assert_said(cases[i].key, (const char *const[]){cases[i].key, cases[i].nearest}, 2);
        assert_memory_equal(&cfg, &was, sizeof cfg);
    }
}

/* ---- what only ranks can get wrong together ---- */

struct shared_case {
    void (*spoil)(struct call *c);
    const char *said[4];
    int code;
};

static void backend_self(struct call *c)
{
    c->cfg.launch.backend = ZERO_BACKEND_SELF;
}
static void budget_below_a_unit(struct call *c)
{
    c->cfg.memory.param_budget_bytes = 100;
}

static void wrap_among_ranks(struct toy_rank *r)
{
    const struct shared_case *of = r->arg;
    struct call c;
    make_call(&c);
    c.cfg = toy_config(r, 3);
    of->spoil(&c);
    zero_ctx *z = (zero_ctx *)&c;
    toy_note(r, zero_wrap(&z, c.tensors, c.n, &c.cfg));
    if (z)
        toy_wrong(r, "out is not NULL");
    if (!toy_untouched(&c.m))
        toy_wrong(r, "the model's pointers were changed");
    toy_free(&c.m);
}

static void ranks_refuse_together(void **state)
{
    (void)state;
    static const struct shared_case cases[] = {
        {backend_self, {"backend is self", "world is 2", "auto, shm"}, ZERO_ERR_ARG},
        {budget_below_a_unit, {"param_budget_bytes is 100", "unit 3", "1024"}, ZERO_ERR_BUDGET},
        {stage_4, {"stage is 4", "0, 1, 2, 3"}, ZERO_ERR_ARG},
        {unit_gap, {"unit 3 has no tensor", "without gaps"}, ZERO_ERR_ARG},
    };
    struct toy_holdings before = toy_holdings();
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct toy_rank r[2];
        toy_ranks(2, wrap_among_ranks, (void *)(uintptr_t)&cases[i], r);
        for (int k = 0; k < 2; k++) {
            if (r[k].wrong[0] || r[k].err != cases[i].code)
                fail_msg("case %zu rank %d: code %d \"%s\" %s", i, k, r[k].err, r[k].text, r[k].wrong);
            for (int s = 0; s < 4 && cases[i].said[s]; s++)
                if (!strstr(r[k].text, cases[i].said[s]))
                    fail_msg("rank %d: \"%s\" does not say \"%s\"", k, r[k].text, cases[i].said[s]);
        }
    }
    assert_nothing_left(before);
}

/* ---- not enough memory ---- */

static int64_t status_kib(const char *key)
{
    char line[256];
    long long kib = -1;
    FILE *f = fopen("/proc/self/status", "r");
    while (f && fgets(line, sizeof line, f))
        if (!strncmp(line, key, strlen(key)) && sscanf(line + strlen(key), " %lld", &kib) == 1)
            break;
    if (f)
        fclose(f);
    return kib;
}

struct huge {
    void *memory;
    int64_t elems;
    int stage;
};

static void wrap_huge(struct toy_rank *r)
{
    const struct huge *h = r->arg;
    void *param = h->memory, *grad = NULL;
    struct zero_tensor t = {
        .name = "huge", .param = &param, .grad = &grad, .shape = {h->elems / 1024, 1024}, .dtype = ZERO_BF16};
    struct zero_config cfg = toy_config(r, h->stage);
    zero_ctx *z = (zero_ctx *)&t;
    int64_t peak = status_kib("VmPeak:");
    toy_note(r, zero_wrap(&z, &t, 1, &cfg));
    if (z || param != h->memory || grad)
        toy_wrong(r, "something was changed");
    if (r->world == 1 && status_kib("VmPeak:") - peak > 1 << 16)
        toy_wrong(r, "%lld KiB were taken first", (long long)(status_kib("VmPeak:") - peak));
}

static void more_than_memory(void **state)
{
    (void)state;
    int64_t host = (int64_t)sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGESIZE);
    struct huge h = {.elems = host / 2048 * 1024};
    h.memory = mmap(NULL, (size_t)h.elems * 2, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    assert_true(h.memory != MAP_FAILED);
    for (h.stage = 0; h.stage <= 3; h.stage++)
        for (int world = 1; world <= 2; world++) {
            struct toy_rank r[2];
            toy_ranks(world, wrap_huge, &h, r);
            for (int k = 0; k < world; k++) {
                if (r[k].wrong[0] || r[k].err != ZERO_ERR_NOMEM)
                    fail_msg("stage %d world %d rank %d: code %d \"%s\" %s", h.stage, world, k, r[k].err,
                             r[k].text, r[k].wrong);
#define IN_TABLE(name, words)                                                                                \
    if (!strstr(r[k].text, words))                                                                           \
        fail_msg("\"%s\" has no line \"%s\"", r[k].text, words);
                ZERO_MEM_MAP(IN_TABLE)
                assert_non_null(strstr(r[k].text, "free"));
            }
            struct zero_config cfg = ZERO_CONFIG_INIT;
            struct zero_plan_info info;
            void *grad = NULL;
            struct zero_tensor t = {
                .name = "huge", .param = &h.memory, .grad = &grad, .shape = {h.elems}, .dtype = ZERO_BF16};
            cfg.stage = h.stage;
            cfg.launch.world = world;
            assert_int_equal(zero_plan(&t, 1, &cfg, &info), 0);
            assert_true(info.bytes.total > host);
            assert_true(info.n_params == h.elems);
        }
    munmap(h.memory, (size_t)h.elems * 2);
}

/* ---- a run that is disturbed by refused calls ---- */

struct training {
    int stage, accum;
    bool brackets, disturb;
};

/* The call fails with this code and says these. */
#define REFUSED(call, want, ...) refused(r, #call, call, want, (const char *const[]){__VA_ARGS__, NULL})

static void refused(struct toy_rank *r, const char *call, int code, int want, const char *const *said)
{
    if (code != want)
        toy_wrong(r, "%s: code %d (%s), expected %d", call, code, code ? zero_last_error() : "", want);
    for (; code && *said; said++)
        if (!strstr(zero_last_error(), *said))
            toy_wrong(r, "%s: \"%s\" does not say \"%s\"", call, zero_last_error(), *said);
}

/* Refused at any time; open: a bracket is. */
static void misuse(struct toy_rank *r, zero_ctx *z, bool open)
{
    float x[4] = {0};
    double many[65] = {0};
    REFUSED(zero_begin(z, -1, ZERO_FORWARD), ZERO_ERR_ARG, "zero_begin", "unit is -1", "0..3");
    REFUSED(zero_begin(z, TOY_UNITS, ZERO_BACKWARD), ZERO_ERR_ARG, "unit is 4", "0..3");
    REFUSED(zero_end(z, INT32_MAX, ZERO_FORWARD), ZERO_ERR_ARG, "zero_end", "unit is 2147483647", "0..3");
    REFUSED(zero_begin(z, 0, (enum zero_phase)0), ZERO_ERR_ARG, "phase is 0", "ZERO_FORWARD, ZERO_BACKWARD");
    REFUSED(zero_end(z, 0, (enum zero_phase)5), ZERO_ERR_ARG, "phase is 5", "ZERO_FORWARD, ZERO_BACKWARD");
    REFUSED(zero_step(z, NAN, NULL), ZERO_ERR_ARG, "lr is", "finite");
    REFUSED(zero_step(z, INFINITY, NULL), ZERO_ERR_ARG, "lr is inf", "finite");
    REFUSED(zero_read(z, -1, 0, 0, 1, x), ZERO_ERR_ARG, "zero_read", "tensor is -1", "0..4");
    REFUSED(zero_read(z, TOY_TENSORS, 0, 0, 1, x), ZERO_ERR_ARG, "tensor is 5", "0..4");
    REFUSED(zero_read(z, 0, -1, 0, 1, x), ZERO_ERR_ARG, "value is -1", "0..3");
    REFUSED(zero_write(z, 0, 4, 0, 1, x), ZERO_ERR_ARG, "zero_write", "value is 4", "0..3",
            "optimizer of tensor embedding: adamw, 2 states per weight: first moment, second moment");
    REFUSED(zero_read(z, 0, 0, -1, 1, x), ZERO_ERR_ARG, "embedding", "first is -1", "165");
    REFUSED(zero_read(z, 0, 0, 0, -1, x), ZERO_ERR_ARG, "embedding", "n is -1", "165");
    REFUSED(zero_read(z, 0, 0, 165, 1, x), ZERO_ERR_ARG, "embedding", "first is 165", "n is 1", "165");
    REFUSED(zero_write(z, 0, 0, 0, 166, x), ZERO_ERR_ARG, "embedding", "n is 166", "165");
    REFUSED(zero_write(z, 0, 0, INT64_MAX, INT64_MAX, x), ZERO_ERR_ARG, "embedding",
            "first is 9223372036854775807", "165");
    REFUSED(zero_read(z, 0, 0, INT64_MIN, INT64_MAX, x), ZERO_ERR_ARG, "embedding",
            "first is -9223372036854775808", "165");
    REFUSED(zero_read(z, TOY_FROZEN, ZERO_VALUE_MASTER, 0, 1, x), ZERO_ERR_ARG, "frozen", "no master");
    REFUSED(zero_write(z, TOY_FROZEN, ZERO_VALUE_STATE, 0, 1, x), ZERO_ERR_ARG, "frozen", "no states");
    REFUSED(zero_mean(z, many, 65), ZERO_ERR_ARG, "zero_mean", "n is 65", "0..64");
    REFUSED(zero_mean(z, many, -1), ZERO_ERR_ARG, "n is -1", "0..64");
    REFUSED(zero_mean(z, NULL, 1), ZERO_ERR_ARG, "values is NULL");
    if (r->world == 1)
        REFUSED(zero_write(z, 0, 0, 0, 1, NULL), open ? ZERO_ERR_ORDER : ZERO_ERR_ARG, "zero_write");
    if (open) {
        REFUSED(zero_read(z, 0, 0, 0, 1, x), ZERO_ERR_ORDER, "zero_read", "open bracket", "end it first");
        REFUSED(zero_write(z, 0, 0, 0, 1, x), ZERO_ERR_ORDER, "zero_write", "open bracket", "end it first");
        REFUSED(zero_step(z, 1e-2f, NULL), ZERO_ERR_ORDER, "zero_step", "open bracket", "end it first");
        REFUSED(zero_micro(z), ZERO_ERR_ORDER, "zero_micro", "open bracket", "end it first");
    }
}

static int disturbed_pass(struct toy_rank *r, struct toy *m, zero_ctx *z, const struct training *t,
                          enum zero_phase phase, int step, int micro)
{
    int err = 0;
    for (int i = 0; !err && i < TOY_UNITS; i++) {
        int u = phase == ZERO_FORWARD ? i : TOY_UNITS - 1 - i;
        err = zero_begin(z, u, phase);
        if (!err && phase == ZERO_BACKWARD)
            toy_add_gradient(m, u, step, micro);
        if (t->disturb && !err) {
            char unit[32];
            snprintf(unit, sizeof unit, "unit %d", u);
            misuse(r, z, true);
            REFUSED(zero_begin(z, u, phase), ZERO_ERR_ORDER, unit, "already open",
                    phase == ZERO_FORWARD ? "forward" : "backward");
            REFUSED(zero_end(z, u, 3 - phase), ZERO_ERR_ORDER, unit, "not open",
                    phase == ZERO_FORWARD ? "backward" : "forward");
            REFUSED(zero_end(z, (u + 1) % TOY_UNITS, phase), ZERO_ERR_ORDER, "not open");
        }
        if (!err)
            err = zero_end(z, u, phase);
        if (t->disturb && !err)
            REFUSED(zero_end(z, u, phase), ZERO_ERR_ORDER, "not open");
    }
    return err;
}

static void train(struct toy_rank *r)
{
    const struct training *t = r->arg;
    struct toy m;
    zero_ctx *z = NULL;
    struct zero_config cfg = toy_config(r, t->stage);
    cfg.grad_accum_steps = t->accum;
    toy_make(&m);
    int err = zero_wrap(&z, m.table, TOY_TENSORS, &cfg);
    for (int step = 0; !err && step < 3; step++) {
        if (t->disturb) {
            misuse(r, z, false);
            if (t->stage >= 2 || t->brackets)
                REFUSED(zero_step(z, 1e-2f, NULL), ZERO_ERR_ORDER, "zero_step");
        }
        for (int a = 0; !err && a < t->accum; a++) {
            int micro = a * r->world + r->rank;
            if (t->brackets) {
                err = disturbed_pass(r, &m, z, t, ZERO_FORWARD, step, micro);
                if (!err)
                    err = disturbed_pass(r, &m, z, t, ZERO_BACKWARD, step, micro);
                if (!err && t->disturb && a + 1 < t->accum)
                    REFUSED(zero_step(z, 1e-2f, NULL), ZERO_ERR_ORDER, "zero_step", "unit", "1 backward",
                            "grad_accum_steps is 2");
            } else {
                err = toy_backward(&m, z, false, step, micro);
                if (!err && t->disturb && a + 1 < t->accum)
                    REFUSED(zero_step(z, 1e-2f, NULL), ZERO_ERR_ORDER, "zero_step", "grad_accum_steps is 2",
                            "zero_micro");
                if (!err && a + 1 < t->accum)
                    err = zero_micro(z);
                else if (!err && t->disturb)
                    REFUSED(zero_micro(z), ZERO_ERR_ORDER, "zero_micro", "grad_accum_steps is 2",
                            "at most 1");
            }
            if (t->disturb)
                misuse(r, z, false);
        }
        struct zero_step_info info;
        if (!err)
            err = zero_step(z, 1e-2f, &info);
        if (!err && info.t != step + 1)
            toy_wrong(r, "t is %lld after step %d", (long long)info.t, step);
    }
    if (!err)
        err = toy_hash(z, 2, &r->hash);
    toy_note(r, err);
    zero_unwrap(&z);
    toy_free(&m);
}

static void assert_ranks_well(const struct toy_rank *r, const char *what, int stage)
{
    for (int k = 0; k < r->world; k++)
        if (r[k].wrong[0] || r[k].err)
            fail_msg("%s: stage %d world %d rank %d: code %d \"%s\"; %s", what, stage, r->world, k, r[k].err,
                     r[k].err ? r[k].text : "", r[k].wrong);
}

static void run_goes_on(void **state)
{
    (void)state;
    for (int world = 1; world <= 2; world++)
        for (int brackets = 0; brackets <= 1; brackets++) {
            uint64_t first = 0;
            for (int stage = 0; stage <= (brackets ? 3 : 1); stage++)
                for (int disturb = 0; disturb <= 1; disturb++) {
                    struct training t = {stage, 2, brackets, disturb};
                    struct toy_rank r[2];
                    toy_ranks(world, train, &t, r);
                    assert_ranks_well(r, disturb ? "disturbed" : "undisturbed", stage);
                    first = first ? first : r[0].hash;
                    for (int k = 0; k < world; k++)
                        if (r[k].hash != first)
                            fail_msg("stage %d world %d brackets %d disturbed %d rank %d: other bits", stage,
                                     world, brackets, disturb, k);
                }
        }
}

/* After one micro-batch where two make a step, or with a third; and no brackets where they are needed. */
static void off_count(struct toy_rank *r)
{
    int stage = *(int *)r->arg;
    struct toy m;
    zero_ctx *z = NULL;
    struct zero_config cfg = toy_config(r, stage);
    cfg.grad_accum_steps = 2;
    toy_make(&m);
    int err = zero_wrap(&z, m.table, TOY_TENSORS, &cfg);
    if (!err && stage >= 2)
        REFUSED(zero_step(z, 1e-2f, NULL), ZERO_ERR_ORDER, "no backward bracket");
    if (!err)
        err = toy_backward(&m, z, true, 0, 0);
    if (!err)
        REFUSED(zero_step(z, 1e-2f, NULL), ZERO_ERR_ORDER, "micro-batches are missing", "has had 1 backward",
                "grad_accum_steps is 2");
    if (!err)
        err = toy_backward(&m, z, true, 0, 1);
    /* A third would be taken into a mean of two. */
    if (!err)
        REFUSED(toy_backward(&m, z, true, 0, 2), ZERO_ERR_ORDER, "unit 3 has had 2 backward brackets",
                "Is a zero_step missing?", "zero_tensor.uses");
    if (!err)
        err = toy_hash(z, 2, &r->hash);
    if (!err)
        err = zero_unwrap(&z);
    toy_note(r, err);
    zero_unwrap(&z);
    toy_free(&m);
}

/* zero_step twice: the second would move the moments and decay the weights once more. */
static void step_again(struct toy_rank *r)
{
    int stage = *(int *)r->arg;
    struct toy m;
    zero_ctx *z = NULL;
    struct zero_config cfg = toy_config(r, stage);
    uint64_t before = 0;
    toy_make(&m);
    int err = zero_wrap(&z, m.table, TOY_TENSORS, &cfg);
    for (int step = 0; !err && step < 2; step++) {
        err = toy_backward(&m, z, true, step, r->rank);
        if (!err)
            err = zero_step(z, 1e-2f, NULL);
        if (!err)
            err = toy_hash(z, 2, &before);
        if (!err)
            REFUSED(zero_step(z, 1e-2f, NULL), ZERO_ERR_ORDER, "no backward bracket has ended");
        if (!err)
            err = toy_hash(z, 2, &r->hash);
        if (r->hash != before)
            toy_wrong(r, "a refused step changed something");
    }
    toy_note(r, err);
    zero_unwrap(&z);
    toy_free(&m);
}

static void twice_in_a_row(void **state)
{
    (void)state;
    for (int world = 1; world <= 2; world++)
        for (int stage = 0; stage <= 3; stage++) {
            struct toy_rank r[2];
            toy_ranks(world, step_again, &stage, r);
            assert_ranks_well(r, "a second step", stage);
        }
}

static void three_of_two(void **state)
{
    (void)state;
    for (int world = 1; world <= 2; world++)
        for (int stage = 0; stage <= 3; stage++) {
            struct toy_rank r[2];
            toy_ranks(world, off_count, &stage, r);
            assert_ranks_well(r, "off count", stage);
        }
}

/* ---- gradients that are not finite ---- */

struct spoilt {
    int stage, tensor, accum;
    int who; /* rank, -1: nobody, -2: all */
    float x;
    bool take; /* the spoilt step is taken at all */
    bool own_update;
};

static int sgd(void *arg, const struct zero_update *u)
{
    (void)arg;
    for (int64_t i = 0; i < u->n; i++) {
        u->state[0][i] = 0.9f * u->state[0][i] + u->grad[i];
        u->state[1][i] += (float)u->t;
        u->master[i] -= u->lr * u->state[0][i];
    }
    return 0;
}

static void train_spoilt(struct toy_rank *r)
{
    const struct spoilt *s = r->arg;
    struct toy m;
    zero_ctx *z = NULL;
    struct zero_config cfg = toy_config(r, s->stage);
    bool mine = s->who == -2 || s->who == r->rank;
    int t = 0;
    cfg.clip = 0.5f;
    cfg.grad_accum_steps = s->accum;
    if (s->own_update) {
        cfg.optim.update = sgd;
        cfg.optim.weight_decay = 0;
        cfg.optim.n_states = 2;
    }
    toy_make(&m);
    int err = zero_wrap(&z, m.table, TOY_TENSORS, &cfg);
    for (int step = 0; !err && step < 4; step++) {
        bool bad = step == 1;
        uint64_t before = 0, after = 0;
        if (bad && !s->take)
            continue;
        if (bad)
            err = toy_hash(z, 2, &before);
        for (int a = 0; !err && a < s->accum; a++)
            for (int u = TOY_UNITS; !err && u-- > 0;) {
                err = zero_begin(z, u, ZERO_BACKWARD);
                if (err)
                    break;
                toy_add_gradient(&m, u, step, a * r->world + r->rank);
                if (bad && mine && a == 0 && u == m.table[s->tensor].unit)
                    toy_poison_gradient(&m, s->tensor, s->x);
                err = zero_end(z, u, ZERO_BACKWARD);
            }
        struct zero_step_info info;
        if (!err)
            err = zero_step(z, 1e-2f, &info);
        bool skip = bad && s->who != -1;
        t += !skip;
        if (err)
            break;
        if (info.skipped != skip || info.t != t || !isfinite(info.grad_norm) != skip ||
            (skip && info.clipped))
            toy_wrong(r, "step %d: skipped %d, t %lld (expected %d, %d), norm %g, clipped %d", step,
                      info.skipped, (long long)info.t, skip, t, info.grad_norm, info.clipped);
        if (bad)
            err = toy_hash(z, 2, &after);
        if (skip && !err && before != after)
            toy_wrong(r, "the skipped step changed something");
    }
    if (!err)
        err = toy_hash(z, 2, &r->hash);
    struct zero_stats stats = {0};
    if (!err)
        err = zero_get_stats(z, &stats);
    if (!err && stats.n_skipped != (s->take && s->who != -1))
        toy_wrong(r, "n_skipped is %lld", (long long)stats.n_skipped);
    if (!err && (stats.grad_accum_steps != s->accum || stats.n_steps < 1 ||
                 stats.n_micro != stats.n_steps * s->accum * r->world))
        toy_wrong(r, "grad_accum_steps is %d, n_micro %lld after %lld steps", stats.grad_accum_steps,
                  (long long)stats.n_micro, (long long)stats.n_steps);
    toy_note(r, err);
    zero_unwrap(&z);
    toy_free(&m);
}

static void not_finite(void **state)
{
    (void)state;
    static const struct {
        float x;
        int tensor;
    } bad[] = {{NAN, 0}, {INFINITY, TOY_STACKED}, {-INFINITY, 2}, {NAN, 4}};
    for (int world = 1; world <= 3; world++)
        for (int own = 0; own <= 1; own++) {
            uint64_t without = 0, with = 0;
            for (int stage = 0; stage <= 3; stage++) {
                struct toy_rank r[3];
                struct spoilt s = {.stage = stage, .who = -1, .accum = 1 + own, .own_update = own};
                toy_ranks(world, train_spoilt, &s, r);
                assert_ranks_well(r, "never spoilt, a step left out", stage);
                without = without ? without : r[0].hash;
                assert_true(r[0].hash == without);
                s.take = true;
                toy_ranks(world, train_spoilt, &s, r);
                assert_ranks_well(r, "never spoilt", stage);
                with = with ? with : r[0].hash;
                assert_true(r[0].hash == with);
                assert_true(with != without);
                int k = (stage + world + own) % 4;
                for (s.who = -2; s.who < world; s.who += s.who == -2 ? 2 : 1) {
                    s.x = bad[k].x;
                    s.tensor = bad[k].tensor;
                    k = (k + 1) % 4;
                    toy_ranks(world, train_spoilt, &s, r);
                    assert_ranks_well(r, "spoilt", stage);
                    for (int i = 0; i < world; i++)
                        if (r[i].hash != without)
                            fail_msg("stage %d world %d who %d tensor %d x %g: a skipped step is not as if "
                                     "never taken",
                                     stage, world, s.who, s.tensor, (double)s.x);
                }
            }
        }
}

/* Finite on every rank, and too large together. */
static void sum_not_finite(struct toy_rank *r)
{
    struct toy m;
    zero_ctx *z = NULL;
    struct zero_config cfg = toy_config(r, *(int *)r->arg);
    struct zero_step_info info = {0};
    toy_make(&m);
    int err = zero_wrap(&z, m.table, TOY_TENSORS, &cfg);
    for (int u = TOY_UNITS; !err && u-- > 0;) {
        err = zero_begin(z, u, ZERO_BACKWARD);
        if (!err)
            toy_add_gradient(&m, u, 0, 0);
        if (!err && u == 0)
            toy_poison_gradient(&m, 0, FLT_MAX);
        if (!err)
            err = zero_end(z, u, ZERO_BACKWARD);
    }
    if (!err)
        err = zero_step(z, 1e-2f, &info);
    if (!err && (!info.skipped || info.t != 0))
        toy_wrong(r, "skipped %d t %lld norm %g", info.skipped, (long long)info.t, info.grad_norm);
    toy_note(r, err);
    zero_unwrap(&z);
    toy_free(&m);
}

static void overflow_in_sum(void **state)
{
    (void)state;
    for (int stage = 0; stage <= 3; stage++) {
        struct toy_rank r[2];
        toy_ranks(2, sum_not_finite, &stage, r);
        assert_ranks_well(r, "sum", stage);
    }
}

/* ---- an update callback that fails ---- */

struct refusing {
    int stage, who;
};

struct refusing_rank {
    bool refuse;
    int n_after;
    bool said;
};

static int refusing_update(void *arg, const struct zero_update *u)
{
    struct refusing_rank *me = arg;
    me->n_after += me->said;
    if (u->t == 2 && me->refuse && !strcmp(u->tensor, "embedding")) {
        me->said = true;
        return 7;
    }
    return 0;
}

static void train_refusing(struct toy_rank *r)
{
    const struct refusing *s = r->arg;
    struct refusing_rank me = {.refuse = r->rank == s->who};
    struct toy m;
    zero_ctx *z = NULL;
    struct zero_config cfg = toy_config(r, s->stage);
    cfg.optim.update = refusing_update;
    cfg.optim.weight_decay = 0;
    cfg.optim.update_arg = &me;
    toy_make(&m);
    int err = zero_wrap(&z, m.table, TOY_TENSORS, &cfg), step = 0;
    if (err)
        toy_wrong(r, "zero_wrap: %s", zero_last_error());
    for (; !err && step < 10; step++) {
        err = toy_forward(&m, z, true);
        if (!err)
            err = toy_backward(&m, z, true, step, r->rank);
        if (!err)
            err = zero_step(z, 1e-2f, NULL);
    }
    toy_note(r, err);
    if (step < 1 || step > 4)
        toy_wrong(r, "failed in step %d", step);
    float x;
    double mean = 0;
    refused(r, "begin", zero_begin(z, 0, ZERO_FORWARD), ZERO_ERR_FAILED,
            (const char *const[]){"embedding", NULL});
    refused(r, "read", zero_read(z, 0, 0, 0, 1, &x), ZERO_ERR_FAILED,
            (const char *const[]){"embedding", NULL});
    refused(r, "mean", zero_mean(z, &mean, 1), ZERO_ERR_FAILED, (const char *const[]){"embedding", NULL});
    refused(r, "unwrap", zero_unwrap(&z), ZERO_ERR_FAILED, (const char *const[]){"embedding", NULL});
    if (z)
        toy_wrong(r, "unwrap left the context");
    for (int t = 0; t < TOY_TENSORS; t++)
        if (m.param[t] || m.grad[t])
            toy_wrong(r, "unwrap left a pointer");
    toy_free(&m);
}

static void update_fails(void **state)
{
    (void)state;
    struct toy_holdings before = toy_holdings();
    for (int world = 1; world <= 3; world++)
        for (int stage = 0; stage <= 3; stage++) {
            struct refusing s = {stage, world - 1};
            struct toy_rank r[3];
            toy_ranks(world, train_refusing, &s, r);
            for (int k = 0; k < world; k++) {
                char who[16];
                snprintf(who, sizeof who, "rank %d", s.who);
                if (r[k].wrong[0] || r[k].err != ZERO_ERR_FAILED || !strstr(r[k].text, "returned 7") ||
                    !strstr(r[k].text, "embedding") || !strstr(r[k].text, who))
                    fail_msg("world %d stage %d rank %d: code %d \"%s\"; %s", world, stage, k, r[k].err,
                             r[k].text, r[k].wrong);
            }
        }
    assert_nothing_left(before);
}

/* ---- the environment ---- */

static void environment_reaches_wrap(void **state)
{
    (void)state;
    struct toy m;
    zero_ctx *z = NULL;
    struct zero_stats stats;
    struct zero_config cfg = ZERO_CONFIG_INIT;
    toy_make(&m);
    setenv("ZERO_STAGE", "2", 1);
    setenv("ZERO_GRAD_ACCUM_STEPS", "2", 1);
    cfg.stage = 1;
    assert_int_equal(zero_wrap(&z, m.table, TOY_TENSORS, &cfg), 0);
    clear_environment();
    assert_int_equal(cfg.stage, 1);
    assert_int_equal(zero_get_stats(z, &stats), 0);
    assert_int_equal(stats.stage, 2);
    assert_int_equal(toy_backward(&m, z, true, 0, 0), 0);
    assert_int_equal(zero_step(z, 1e-2f, NULL), ZERO_ERR_ORDER);
    assert_said("step", (const char *const[]){"grad_accum_steps is 2"}, 1);
    assert_int_equal(toy_backward(&m, z, true, 0, 1), 0);
    assert_int_equal(zero_step(z, 1e-2f, NULL), 0);
    assert_int_equal(zero_unwrap(&z), 0);
    toy_free(&m);
}

int main(void)
{
    clear_environment();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(wrap_refuses),     cmocka_unit_test(plan_refuses),
        cmocka_unit_test(null_arguments),   cmocka_unit_test(trace_to_nowhere),
        cmocka_unit_test(unknown_keys),     cmocka_unit_test(ranks_refuse_together),
        cmocka_unit_test(more_than_memory), cmocka_unit_test(run_goes_on),
        cmocka_unit_test(three_of_two),     cmocka_unit_test(twice_in_a_row),
        cmocka_unit_test(not_finite),       cmocka_unit_test(overflow_in_sum),
        cmocka_unit_test(update_fails),     cmocka_unit_test(environment_reaches_wrap),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
