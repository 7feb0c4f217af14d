/* SPDX-License-Identifier: Apache-2.0 */
/* test_bad_input.c: wrong arguments and calls. Each returns the right error, with a message that names the
 * field, its value and what is allowed. A failed call leaves nothing behind and changes nothing, and the run
 * goes on. */
#include "test/cmocka.h"
#include "test/zero/toy_net.h"

#include <float.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* ---- arguments of zero_wrap and zero_plan ---- */

/* Arguments of zero_wrap. */
struct call {
    struct toy m;
    struct zero_config cfg;
    const struct zero_tensor *tensors;
    int32_t n;
};

/* Calls that refuse a row. WRAP: zero_wrap. PLAN: zero_wrap and zero_plan. RANKS: zero_wrap on each of two
 * ranks. ALL: all of these. zero_plan needs no pointers and no ranks, and knows f16. */
enum { WRAP = 1, PLAN = 3, RANKS = 4, ALL = 7 };

struct bad_call {
    const char *what;
    int who;
    void (*spoil)(struct call *c);
    int code;
    const char *said[4];
};

static const struct bad_call *bad_calls[64];
static int n_bad_calls;

/* One row: its name, who refuses it, the statement that spoils the call *c, the error, and parts of its text.
 * The row adds itself to bad_calls[] before main(). */
#define REFUSES(...)                  REFUSES_NUMBERED(__COUNTER__, __VA_ARGS__)
#define REFUSES_NUMBERED(number, ...) REFUSES_ROW(number, __VA_ARGS__)
#define REFUSES_ROW(number, what, who, statement, code, ...)                                                 \
    static void spoil_##number(struct call *c)                                                               \
    {                                                                                                        \
        (void)c;                                                                                             \
        statement;                                                                                           \
    }                                                                                                        \
    __attribute__((constructor)) static void add_##number(void)                                              \
    {                                                                                                        \
        static const struct bad_call row = {what, who, spoil_##number, ZERO_ERR_##code, {__VA_ARGS__}};      \
        bad_calls[n_bad_calls++] = &row;                                                                     \
    }

static void shape_overflows_later(struct call *c)
{
    for (int d = 0; d < 8; d++)
        c->m.table[0].shape[d] = d == 0 ? INT64_C(1) << 40 : 1 << 12;
}
/* Each tensor is allowed, but the sum of their sizes does not fit an int64_t. */
static void sum_overflows(struct call *c)
{
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

static void uses_beside_an_order(struct call *c)
{
    static const struct zero_call order[] = {{1, ZERO_BACKWARD, 0}, {1, ZERO_BACKWARD, 1}};
    c->m.table[2].uses = 2;
    c->cfg.memory.order = order;
    c->cfg.memory.n_order = 2;
}

static int any_update(void *arg, const struct zero_update *u)
{
    return 0;
}

static const struct zero_call of_unit_9[] = {{9, ZERO_FORWARD, 0}, {9, ZERO_FORWARD, 1}};
static void order_unbalanced(struct call *c)
{
    static const struct zero_call order[] = {{1, ZERO_FORWARD, 0}};
    c->cfg.memory.order = order;
    c->cfg.memory.n_order = 1;
}

REFUSES("stage 4", ALL, c->cfg.stage = 4, ARG, "stage is 4", "0, 1, 2, 3")
REFUSES("stage -1", PLAN, c->cfg.stage = -1, ARG, "stage is -1", "0, 1, 2, 3")
REFUSES("no name", PLAN, c->m.table[2].name = NULL, ARG, "tensors[2]", "name is NULL", "unique")
REFUSES("empty name", PLAN, c->m.table[2].name = "", ARG, "tensors[2]", "empty", "unique")
REFUSES("no param", WRAP, c->m.table[0].param = NULL, ARG, "tensors[0] (embedding)", "param is NULL",
        "must be")
REFUSES("*param NULL", WRAP, c->m.param[1] = NULL, ARG, "tensors[1] (layers)", "*param is NULL",
        "must be allocated")
REFUSES("same name", PLAN, c->m.table[2].name = "embedding", ARG, "tensors[0]", "tensors[2]", "embedding",
        "unique")
REFUSES("same param", WRAP, c->m.table[3].param = c->m.table[0].param, ARG, "embedding", "frozen", "param",
        "same pointer")
REFUSES("same grad", WRAP, c->m.table[4].grad = c->m.table[1].grad, ARG, "layers", "head", "grad",
        "same pointer")
REFUSES("grad is param", WRAP, c->m.table[4].grad = c->m.table[4].param, ARG, "head", "grad", "param",
        "same pointer")
REFUSES("same memory", WRAP, c->m.param[3] = c->m.param[0], ARG, "embedding", "frozen", "memory", "tied")
REFUSES("overlapping memory", WRAP, c->m.param[3] = (float *)c->m.param[0] + 164, ARG, "embedding", "frozen",
        "memory", "tied")
REFUSES("empty shape", PLAN, memset(c->m.table[1].shape, 0, sizeof c->m.table[1].shape), ARG,
        "tensors[1] (layers)", "shape[0] is 0", "at least one")
REFUSES("negative shape", PLAN, c->m.table[0].shape[1] = -1, ARG, "tensors[0] (embedding)", "shape[1] is -1",
        "1 and more")
REFUSES("shape overflows", PLAN, (c->m.table[0].shape[0] = INT64_MAX, c->m.table[0].shape[1] = 2), ARG,
        "tensors[0] (embedding)", "overflows", "shape[0]", "elements")
REFUSES("shape overflows later", PLAN, shape_overflows_later(c), ARG, "tensors[0] (embedding)", "overflows",
        "shape[1]")
REFUSES("bytes overflow", PLAN, (c->m.table[0].shape[0] = INT64_MAX / 2, c->m.table[0].shape[1] = 1), ARG,
        "tensors[0] (embedding)", "overflows", "shape[0]")
REFUSES("sum overflows", PLAN, sum_overflows(c), ARG, "together", "elements", "allowed")
REFUSES("unit gap", ALL, c->m.table[4].unit = 7, ARG, "unit 3 has no tensor", "without gaps")
REFUSES("negative unit", PLAN, c->m.table[2].unit = -1, ARG, "tensors[2] (bias)", "unit is -1", "0 and more")
REFUSES("huge unit", PLAN, c->m.table[4].unit = INT32_MAX, ARG, "unit 3 has no tensor", "without gaps")
REFUSES("too many layers", PLAN, c->m.table[1].shape[0] = (1 << 20) + 1, ARG, "tensors[1] (layers)",
        "1048577", "1..1048576")
REFUSES("too many layers together", PLAN, too_many_layers_together(c), ARG, "20971520 layers",
        "allowed: 16777216")
REFUSES("negative uses", PLAN, c->m.table[0].uses = -1, ARG, "tensors[0] (embedding)", "uses is -1",
        "0..1000")
REFUSES("too many uses", PLAN, c->m.table[0].uses = 1001, ARG, "tensors[0] (embedding)", "uses is 1001",
        "0..1000")
REFUSES("uses that differ", PLAN, (c->m.table[1].uses = 2, c->m.table[2].uses = 3), ARG, "tensors[2] (bias)",
        "uses is 3", "unit 1 has 2", "allowed")
REFUSES("uses beside an order", PLAN, uses_beside_an_order(c), ARG, "tensors[2] (bias)", "uses is 2",
        "cfg.memory.order has 1", "unit 1")
REFUSES("unknown flags", PLAN, c->m.table[0].flags = 1u << 20 | ZERO_NO_DECAY, ARG, "tensors[0] (embedding)",
        "flags", "0x100000", "allowed")
REFUSES("f16", WRAP, c->m.table[2].dtype = ZERO_F16, NOTSUP, "tensors[2] (bias)", "f16",
        "ZERO_F32, ZERO_BF16")
REFUSES("no dtype", PLAN, c->m.table[2].dtype = (enum zero_dtype)0, ARG, "tensors[2] (bias)", "dtype is 0",
        "ZERO_F32, ZERO_BF16")
REFUSES("zeroed config", PLAN, memset(&c->cfg, 0, sizeof c->cfg), ARG, "was not initialised",
        "ZERO_CONFIG_INIT", "zero_config_init")
REFUSES("garbage config", PLAN, memset(&c->cfg, 0xa5, sizeof c->cfg), ARG, "version is 0xa5a5a5a5",
        "did not initialise cfg", "ZERO_CONFIG_INIT")
REFUSES("newer config", PLAN, c->cfg.size = sizeof c->cfg + 8, ARG, "size is", "another zero.h")
REFUSES("no tensors", PLAN, c->n = 0, ARG, "n_tensors is 0", "1 and more")
REFUSES("negative tensors", PLAN, c->n = -3, ARG, "n_tensors is -3", "1 and more")
REFUSES("null tensors", PLAN, c->tensors = NULL, ARG, "tensors is NULL")
REFUSES("rank 3 of 3", PLAN,
        (c->cfg.launch.world = 3, c->cfg.launch.rank = 3, c->cfg.launch.rendezvous = "tcp://127.0.0.1:1"),
        ARG, "rank is 3", "0 to 2")
REFUSES("rank without world", PLAN, (c->cfg.launch.world = 0, c->cfg.launch.rank = 1), ARG, "rank is 1",
        "world is 0", "both")
REFUSES("bad rendezvous", WRAP, (c->cfg.launch.world = 2, c->cfg.launch.rendezvous = "udp://nowhere"), ARG,
        "rendezvous is \"udp://nowhere\"", "tcp://host:port")
REFUSES("no rendezvous", WRAP, (c->cfg.launch.world = 2, c->cfg.launch.rank = 1), ARG, "rank 1 of 2",
        "ZERO_RENDEZVOUS")
REFUSES("no such interface", WRAP,
        (c->cfg.launch.world = 2, c->cfg.launch.rendezvous = "tcp://127.0.0.1:1",
         c->cfg.launch.interface = "eth99", c->cfg.launch.timeout_ms = c->cfg.launch.start_timeout_ms = 200),
        ARG, "interface is \"eth99\": this host has ", "lo (127.0.0.1")
REFUSES("WORLD_SIZE=abc", WRAP,
        (c->cfg.launch.world = 0, setenv("RANK", "0", 1), setenv("WORLD_SIZE", "abc", 1)), ARG,
        "WORLD_SIZE is \"abc\"", "whole number")
REFUSES("WORLD_SIZE without RANK", WRAP, (c->cfg.launch.world = 0, setenv("WORLD_SIZE", "2", 1)), ARG,
        "RANK is not set", "WORLD_SIZE is \"2\"")
REFUSES("RANK=2 of 2", WRAP, (c->cfg.launch.world = 0, setenv("RANK", "2", 1), setenv("WORLD_SIZE", "2", 1)),
        ARG, "RANK is \"2\"", "0 to 1")
REFUSES("ZERO_STAGE=7", PLAN, setenv("ZERO_STAGE", "7", 1), ARG, "ZERO_STAGE is \"7\"", "0, 1, 2, 3")
REFUSES("update and optimizer", PLAN,
        (c->cfg.optim.update = any_update, c->cfg.optim.weight_decay = 0, c->cfg.optim.optimizer = ZERO_SGD),
        ARG, "optimizer is sgd", "update", "one of the two")
REFUSES("states without update", PLAN, c->cfg.optim.n_states = 1, ARG, "n_states is 1", "update is NULL",
        "allowed")
REFUSES("five states", PLAN,
        (c->cfg.optim.update = any_update, c->cfg.optim.weight_decay = 0, c->cfg.optim.n_states = 5), ARG,
        "n_states is 5", "allowed: 0, 1, 2, 3, 4")
REFUSES("clip NaN", PLAN, c->cfg.clip = NAN, ARG, "clip is", "nan", "0 or more")
REFUSES("negative timeout", PLAN, c->cfg.launch.timeout_ms = -1, ARG, "timeout_ms is -1", "allowed")
REFUSES("order of unit 9", PLAN, (c->cfg.memory.order = of_unit_9, c->cfg.memory.n_order = 2), ARG,
        "order[0].unit is 9", "0..3")
REFUSES("order unbalanced", PLAN, order_unbalanced(c), ARG, "order[0]", "never ended", "balanced")
REFUSES("order without length", PLAN, c->cfg.memory.order = of_unit_9, ARG, "n_order is 0", "both")
REFUSES("backend self", RANKS, c->cfg.launch.backend = ZERO_BACKEND_SELF, ARG, "backend is self",
        "world is 2", "auto, shm")
REFUSES("budget below a unit", RANKS, c->cfg.memory.param_budget_bytes = 100, BUDGET,
        "param_budget_bytes is 100", "unit 3", "1024")

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

/* The call fails with this code, and its message contains these texts. */
#define ASSERT_REFUSED(call, want, ...)                                                                      \
    assert_refused(#call, call, want, (const char *const[]){__VA_ARGS__, NULL})

static void assert_refused(const char *call, int code, int want, const char *const *said)
{
    if (code != want)
        fail_msg("%s: code %d \"%s\", expected %d", call, code, code ? zero_last_error() : "", want);
    assert_said(call, said, SIZE_MAX);
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

static void wrap_refuses(void **state)
{
    struct toy_holdings before = toy_holdings();
    for (int i = 0; i < n_bad_calls; i++) {
        const struct bad_call *b = bad_calls[i];
        struct call c;
        if (!(b->who & WRAP))
            continue;
        make_call(&c);
        b->spoil(&c);
        void *param[TOY_TENSORS], *grad[TOY_TENSORS];
        memcpy(param, c.m.param, sizeof param);
        memcpy(grad, c.m.grad, sizeof grad);
        zero_ctx *z = (zero_ctx *)&c;
        assert_refused(b->what, zero_wrap(&z, c.tensors, c.n, &c.cfg), b->code,
                       (const char *const[]){"zero_wrap", NULL});
        clear_environment();
        assert_said(b->what, b->said, 4);
        assert_null(z);
        assert_memory_equal(param, c.m.param, sizeof param);
        assert_memory_equal(grad, c.m.grad, sizeof grad);
        toy_free(&c.m);
        toy_make(&c.m);
        assert_works(&c.m);
        toy_free(&c.m);
    }
    toy_assert_nothing_left(before);
}

/* zero_plan refuses what it can see, with the same message. */
static void plan_refuses(void **state)
{
    for (int i = 0; i < n_bad_calls; i++) {
        const struct bad_call *b = bad_calls[i];
        struct call c;
        if (!(b->who & WRAP))
            continue;
        make_call(&c);
        b->spoil(&c);
        struct zero_plan_info info = {.world = -7};
        int err = zero_plan(c.tensors, c.n, &c.cfg, &info);
        clear_environment();
        if (err != (b->who >= PLAN ? b->code : 0))
            fail_msg("%s: code %d \"%s\"", b->what, err, err ? zero_last_error() : "");
        if (err) {
            assert_said(b->what, b->said, 4);
            assert_said(b->what, (const char *const[]){"zero_plan"}, 1);
            assert_int_equal(info.world, -7);
        }
        toy_free(&c.m);
    }
    struct toy m;
    toy_make(&m);
    ASSERT_REFUSED(zero_plan(m.table, TOY_TENSORS, NULL, NULL), ZERO_ERR_ARG, "out is NULL");
    toy_free(&m);
}

static void null_arguments(void **state)
{
    struct toy m;
    double x = 0;
    struct zero_stats stats;
    zero_ctx *z = NULL;
    toy_make(&m);
    struct zero_config cfg = ZERO_CONFIG_INIT;
    ASSERT_REFUSED(zero_wrap(NULL, m.table, TOY_TENSORS, &cfg), ZERO_ERR_ARG, "zero_wrap", "out is NULL");
    assert_true(toy_untouched(&m));
    ASSERT_REFUSED(zero_begin(NULL, 0, ZERO_FORWARD), ZERO_ERR_ARG, "zero_begin: z is NULL");
    ASSERT_REFUSED(zero_end(NULL, 0, ZERO_FORWARD), ZERO_ERR_ARG, "zero_end: z is NULL");
    ASSERT_REFUSED(zero_micro(NULL), ZERO_ERR_ARG, "zero_micro: z is NULL");
    ASSERT_REFUSED(zero_step(NULL, 0, NULL), ZERO_ERR_ARG, "zero_step: z is NULL");
    ASSERT_REFUSED(zero_read(NULL, 0, 0, 0, 1, &x), ZERO_ERR_ARG, "zero_read: z is NULL");
    ASSERT_REFUSED(zero_write(NULL, 0, 0, 0, 1, &x), ZERO_ERR_ARG, "zero_write: z is NULL");
    ASSERT_REFUSED(zero_mean(NULL, &x, 1), ZERO_ERR_ARG, "zero_mean: z is NULL");
    ASSERT_REFUSED(zero_get_stats(NULL, &stats), ZERO_ERR_ARG, "zero_get_stats: z is NULL");
    ASSERT_REFUSED(zero_trace_write(NULL, "/dev/null"), ZERO_ERR_ARG, "zero_trace_write: z is NULL");
    assert_int_equal(zero_unwrap(NULL), 0);
    assert_int_equal(zero_unwrap(&z), 0);

    ASSERT_REFUSED(zero_wrap(&z, m.table, TOY_TENSORS, NULL), ZERO_ERR_ARG, "zero_wrap", "cfg is NULL",
                   "ZERO_CONFIG_INIT");
    assert_true(toy_untouched(&m));
    assert_int_equal(zero_wrap(&z, m.table, TOY_TENSORS, &cfg), 0);
    ASSERT_REFUSED(zero_get_stats(z, NULL), ZERO_ERR_ARG, "out is NULL");
    ASSERT_REFUSED(zero_trace_write(z, NULL), ZERO_ERR_ARG, "path is NULL");
    ASSERT_REFUSED(zero_trace_write(z, "/dev/null"), ZERO_ERR_ARG, "trace is 0", "ZERO_TRACE");
    assert_int_equal(zero_unwrap(&z), 0);
    toy_free(&m);
}

static void trace_to_nowhere(void **state)
{
    struct toy m;
    zero_ctx *z = NULL;
    struct zero_config cfg = ZERO_CONFIG_INIT;
    cfg.debug.trace = 1;
    toy_make(&m);
    assert_int_equal(zero_wrap(&z, m.table, TOY_TENSORS, &cfg), 0);
    ASSERT_REFUSED(zero_trace_write(z, "/no/such/folder/trace.json"), ZERO_ERR_IO,
                   "/no/such/folder/trace.json", "No such file");
    assert_int_equal(toy_backward(&m, z, false, 0, 0), 0);
    assert_int_equal(zero_step(z, 1e-2f, NULL), 0);
    assert_int_equal(zero_unwrap(&z), 0);
    toy_free(&m);
}

static void unknown_keys(void **state)
{
    static const struct {
        const char *key, *nearest;
    } cases[] = {{"stge", "\"stage\""}, {"prefetched", "\"prefetch\""}, {"wire-dtype", "\"wire_dtype\""}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct zero_config cfg = ZERO_CONFIG_INIT, was = cfg;
        ASSERT_REFUSED(zero_config_set(&cfg, cases[i].key, "3"), ZERO_ERR_ARG, cases[i].key,
                       cases[i].nearest);
        assert_memory_equal(&cfg, &was, sizeof cfg);
    }
}

/* ---- configurations that are wrong only together ---- */

static void wrap_among_ranks(struct toy_rank *r)
{
    const struct bad_call *of = r->arg;
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
    struct toy_holdings before = toy_holdings();
    for (int i = 0; i < n_bad_calls; i++) {
        const struct bad_call *b = bad_calls[i];
        struct toy_rank r[2];
        if (!(b->who & RANKS))
            continue;
        toy_ranks(2, wrap_among_ranks, (void *)(uintptr_t)b, r);
        for (int k = 0; k < 2; k++) {
            if (r[k].wrong[0] || r[k].err != b->code)
                fail_msg("%s, rank %d: code %d \"%s\" %s", b->what, k, r[k].err, r[k].text, r[k].wrong);
            for (int s = 0; s < 4 && b->said[s]; s++)
                if (!strstr(r[k].text, b->said[s]))
                    fail_msg("rank %d: \"%s\" does not say \"%s\"", k, r[k].text, b->said[s]);
        }
    }
    toy_assert_nothing_left(before);
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

/* The call fails with this code, and its message contains these texts. */
#define REFUSED(call, want, ...) refused(r, #call, call, want, (const char *const[]){__VA_ARGS__, NULL})

static void refused(struct toy_rank *r, const char *call, int code, int want, const char *const *said)
{
    if (code != want)
        toy_wrong(r, "%s: code %d (%s), expected %d", call, code, code ? zero_last_error() : "", want);
    for (; code && *said; said++)
        if (!strstr(zero_last_error(), *said))
            toy_wrong(r, "%s: \"%s\" does not say \"%s\"", call, zero_last_error(), *said);
}

/* Makes calls that are refused at any time. open: a bracket is open. */
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
    /* In a larger world only rank 0 must give the values. The other ranks would accept NULL, and wait for
     * rank 0. */
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
    zero_ctx *z;
    struct zero_config cfg = toy_config(r, t->stage);
    cfg.grad_accum_steps = t->accum;
    int err = toy_open(r, &m, &z, &cfg);
    for (int step = 0; !err && step < 3; step++) {
        if (t->disturb) {
            misuse(r, z, false);
            if (t->stage >= 2 || t->brackets)
                REFUSED(zero_step(z, 1e-2f, NULL), ZERO_ERR_ORDER, "zero_step");
        }
        for (int a = 0; !err && a < t->accum; a++) {
            int micro = a * r->world + r->rank;
            if (t->brackets) {
                err = FIRST_ERROR(disturbed_pass(r, &m, z, t, ZERO_FORWARD, step, micro),
                                  disturbed_pass(r, &m, z, t, ZERO_BACKWARD, step, micro));
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
    toy_close(&m, &z);
}

static void run_goes_on(void **state)
{
    for (int world = 1; world <= 2; world++)
        for (int brackets = 0; brackets <= 1; brackets++) {
            uint64_t first = 0;
            for (int stage = 0; stage <= (brackets ? 3 : 1); stage++)
                for (int disturb = 0; disturb <= 1; disturb++) {
                    struct training t = {stage, 2, brackets, disturb};
                    struct toy_rank r[2];
                    toy_run(world, train, &t, r, disturb ? "disturbed" : "undisturbed");
                    first = first ? first : r[0].hash;
                    for (int k = 0; k < world; k++)
                        if (r[k].hash != first)
                            fail_msg("stage %d world %d brackets %d disturbed %d rank %d: other bits", stage,
                                     world, brackets, disturb, k);
                }
        }
}

/* Calls zero_step after one of two micro-batches, starts a third micro-batch, and calls zero_step without
 * brackets. */
static void off_count(struct toy_rank *r)
{
    int stage = *(int *)r->arg;
    struct toy m;
    zero_ctx *z;
    struct zero_config cfg = toy_config(r, stage);
    cfg.grad_accum_steps = 2;
    int err = toy_open(r, &m, &z, &cfg);
    if (!err && stage >= 2)
        REFUSED(zero_step(z, 1e-2f, NULL), ZERO_ERR_ORDER, "no backward bracket");
    if (!err)
        err = toy_backward(&m, z, true, 0, 0);
    if (!err)
        REFUSED(zero_step(z, 1e-2f, NULL), ZERO_ERR_ORDER, "micro-batches are missing", "has had 1 backward",
                "grad_accum_steps is 2");
    if (!err)
        err = toy_backward(&m, z, true, 0, 1);
    if (!err)
        REFUSED(toy_backward(&m, z, true, 0, 2), ZERO_ERR_ORDER, "unit 3 has had 2 backward brackets",
                "Is a zero_step missing?", "zero_tensor.uses");
    if (!err)
        err = toy_hash(z, 2, &r->hash);
    if (!err)
        err = zero_unwrap(&z);
    toy_note(r, err);
    toy_close(&m, &z);
}

/* Calls zero_step twice: the second must not move the moments or decay the weights. */
static void step_again(struct toy_rank *r)
{
    int stage = *(int *)r->arg;
    struct toy m;
    zero_ctx *z;
    struct zero_config cfg = toy_config(r, stage);
    uint64_t before = 0;
    int err = toy_open(r, &m, &z, &cfg);
    for (int step = 0; !err && step < 2; step++) {
        err = FIRST_ERROR(toy_backward(&m, z, true, step, r->rank), zero_step(z, 1e-2f, NULL),
                          toy_hash(z, 2, &before));
        if (!err)
            REFUSED(zero_step(z, 1e-2f, NULL), ZERO_ERR_ORDER, "no backward bracket has ended");
        if (!err)
            err = toy_hash(z, 2, &r->hash);
        if (r->hash != before)
            toy_wrong(r, "a refused step changed something");
    }
    toy_note(r, err);
    toy_close(&m, &z);
}

static void twice_in_a_row(void **state)
{
    int stage;
    toy_at_each_stage(step_again, &stage, &stage, "a second step");
}

static void three_of_two(void **state)
{
    int stage;
    toy_at_each_stage(off_count, &stage, &stage, "off count");
}

/* ---- gradients that are not finite ---- */

struct spoilt {
    int stage, tensor, accum;
    /* the rank with the gradient; -1: none, -2: all */
    int who;
    float x;
    /* whether the second step is taken */
    bool take;
    bool own_update;
};

static int sgd(void *arg, const struct zero_update *u)
{
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
    zero_ctx *z;
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
    int err = toy_open(r, &m, &z, &cfg);
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
    toy_close(&m, &z);
}

static void not_finite(void **state)
{
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
                toy_run(world, train_spoilt, &s, r, "never spoilt, a step left out");
                without = without ? without : r[0].hash;
                assert_true(r[0].hash == without);
                s.take = true;
                toy_run(world, train_spoilt, &s, r, "never spoilt");
                with = with ? with : r[0].hash;
                assert_true(r[0].hash == with);
                assert_true(with != without);
                int k = (stage + world + own) % 4;
                for (s.who = -2; s.who < world; s.who += s.who == -2 ? 2 : 1) {
                    s.x = bad[k].x;
                    s.tensor = bad[k].tensor;
                    k = (k + 1) % 4;
                    toy_run(world, train_spoilt, &s, r, "spoilt");
                    for (int i = 0; i < world; i++)
                        if (r[i].hash != without)
                            fail_msg("stage %d world %d who %d tensor %d x %g: a skipped step is not as if "
                                     "never taken",
                                     stage, world, s.who, s.tensor, (double)s.x);
                }
            }
        }
}

/* The gradients are finite on each rank, but their sum is not. */
static void sum_not_finite(struct toy_rank *r)
{
    struct toy m;
    zero_ctx *z;
    struct zero_config cfg = toy_config(r, *(int *)r->arg);
    struct zero_step_info info = {0};
    int err = toy_open(r, &m, &z, &cfg);
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
    toy_close(&m, &z);
}

static void overflow_in_sum(void **state)
{
    for (int stage = 0; stage <= 3; stage++) {
        struct toy_rank r[2];
        toy_run(2, sum_not_finite, &stage, r, "sum");
    }
}

/* ---- an update callback that fails ---- */

struct refusing {
    /* who: the rank whose update fails */
    int stage, who;
};

struct refusing_rank {
    /* this is the rank whose update fails; and it has failed */
    bool refuse, has_failed;
    /* updates that the library called after that */
    int n_after;
};

/* Fails in the second step. */
static int refusing_update(void *arg, const struct zero_update *u)
{
    struct refusing_rank *me = arg;
    me->n_after += me->has_failed;
    if (u->t == 2 && me->refuse && !strcmp(u->tensor, "embedding")) {
        me->has_failed = true;
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
        err = FIRST_ERROR(toy_forward(&m, z, true), toy_backward(&m, z, true, step, r->rank),
                          zero_step(z, 1e-2f, NULL));
    }
    toy_note(r, err);
    /* step: how many steps were begun. The update fails in the second. Updates run in the background, so a
     * rank may begin two more steps before a call reports the failure. */
    if (step < 2 || step > 4)
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
    /* zero_unwrap has ended the threads that call updates */
    if (me.has_failed != me.refuse || me.n_after)
        toy_wrong(r, "failed %d, and %d updates were called after that", me.has_failed, me.n_after);
    toy_free(&m);
}

static void update_fails(void **state)
{
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
    toy_assert_nothing_left(before);
}

/* ---- the environment ---- */

static void environment_reaches_wrap(void **state)
{
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
    ASSERT_REFUSED(zero_step(z, 1e-2f, NULL), ZERO_ERR_ORDER, "grad_accum_steps is 2");
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
