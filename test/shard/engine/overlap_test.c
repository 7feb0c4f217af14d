/* SPDX-License-Identifier: Apache-2.0 */
/* overlap_test.c: units of fixed cost on the device's timeline, as in PyTorch's FSDP2 overlap test. A unit
 * has compute c in forward and 2c in backward, and communication m, with m < c. Only the first gather and the
 * last reduce may be exposed: forward = m + L*c, backward = 2m + L*2c. */
#include "shard/engine/check/observers.h"
#include "shard/engine/internal.h"
#include "test/cmocka.h"
#include "test/shard/engine/overlap_device.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MAX_UNITS 40

struct world {
    struct zr_device *dev;
    struct zr_layout *layout;
    struct zr_plan *plan;
    struct zr_options opt;
    struct zr_engine e;
    void *param[MAX_UNITS], *grad[MAX_UNITS];
    int n_units;
    int64_t c, m;
};

static void describe_world(struct world *w, int stage, int n_units, int64_t c, int64_t m, int prefetch,
                           int64_t budget)
{
    memset(w, 0, sizeof *w);
    w->n_units = n_units;
    w->c = c;
    w->m = m;
    w->opt = (struct zr_options){.stage = stage,
                                 .grad_scale = 1,
                                 .grad_accum_steps = 1,
                                 .optim = {{.lr_scale = 1, .beta1 = 0.9f, .beta2 = 0.999f, .eps = 1e-8f}},
                                 .n_optims = 1,
                                 .prefetch = prefetch,
                                 .param_budget_bytes = budget,
                                 .deterministic = true,
                                 .timeout_ms = 1000};
}

static void begin_world(struct world *w, struct zr_device *dev)
{
    int n_units = w->n_units;
    struct zr_tensor *t = calloc((size_t)n_units, sizeof *t);
    for (int i = 0; i < n_units; i++) {
        char name[16];
        snprintf(name, sizeof name, "t%d", i);
        t[i] = (struct zr_tensor){.name = strdup(name),
                                  .param = &w->param[i],
                                  .grad = &w->grad[i],
                                  .dtype = ZERO_F32,
                                  .n_elems = 4096,
                                  .optimizer = ZERO_ADAMW,
                                  .n_states = 2,
                                  .n_layers = 1,
                                  .unit = i};
    }
    w->dev = dev;
    assert_int_equal(
        zr_layout_make(t, n_units, 4, 1, zr_placement_asked(&w->opt).model_holds, false, &w->layout), 0);
    assert_int_equal(zr_plan_make(w->layout, &w->opt, &w->plan), 0);
    struct zr_engine_parts parts = {
        .dev = w->dev, .plan = w->plan, .opt = &w->opt, .open_observers = zr_check_open_observers};
    parts.comm[ZR_ROLE_GATHER] = overlap_comm_open(w->dev, 4, w->m);
    parts.comm[ZR_ROLE_REDUCE] = parts.comm[ZR_ROLE_CONTROL] = overlap_comm_open(w->dev, 4, w->m);
    assert_int_equal(zr_engine_open(&w->e, &parts), 0);
    assert_int_equal(zr_engine_allocate(&w->e), 0);
}

static void open_world(struct world *w, int stage, int n_units, int64_t c, int64_t m, int prefetch,
                       int64_t budget)
{
    describe_world(w, stage, n_units, c, m, prefetch, budget);
    begin_world(w, overlap_device_open());
}

static void close_world(struct world *w)
{
    struct zr_comm *gather = w->e.distinct[0], *reduce = w->e.distinct[1];
    zr_engine_close(&w->e);
    zr_comm_close(gather);
    zr_comm_close(reduce);
    zr_plan_free(w->plan);
    zr_layout_free(w->layout);
    w->dev->ops->close(w->dev);
}

static void call(struct world *w, enum zr_core_event_kind kind, int unit, int backward)
{
    struct zr_core_event ev = {.kind = kind, .unit = unit, .phase = backward ? ZERO_BACKWARD : ZERO_FORWARD};
    assert_int_equal(zr_engine_call(&w->e, &ev), 0);
}

static int64_t max(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

/* Returns when everything running now is done. */
static int64_t all_done(struct world *w)
{
    return max(overlap_now(w->e.compute),
               max(overlap_now(w->e.gather_stream), overlap_now(w->e.reduce_stream)));
}

/* Time from the optimizer's end to the end of the last unit's compute. */
static int64_t forward(struct world *w)
{
    int64_t from = max(overlap_now(w->e.reduce_stream), overlap_now(w->e.compute));
    for (int i = 0; i < w->n_units; i++) {
        call(w, ZR_EV_BEGIN, i, 0);
        overlap_spend(w->e.compute, w->c);
        call(w, ZR_EV_END, i, 0);
    }
    return overlap_now(w->e.compute) - from;
}

/* Time from the end of forward to the end of the last reduce. */
static int64_t backward(struct world *w)
{
    int64_t from = overlap_now(w->e.compute);
    for (int i = w->n_units; i-- > 0;) {
        call(w, ZR_EV_BEGIN, i, 1);
        overlap_spend(w->e.compute, 2 * w->c);
        call(w, ZR_EV_END, i, 1);
    }
    return all_done(w) - from;
}

static void only_the_ends_are_exposed(void **state)
{
    static const int counts[] = {2, 3, 5, 10, MAX_UNITS};
    static const int64_t costs[][2] = {{100, 99}, {100, 50}, {100, 1}, {7, 3}}; /* c, m */
    for (int stage = 1; stage <= 3; stage++)
        for (size_t n = 0; n < sizeof counts / sizeof counts[0]; n++)
            for (size_t k = 0; k < sizeof costs / sizeof costs[0]; k++)
                for (int prefetch = 1; prefetch <= 4; prefetch++) {
                    struct world w;
                    int64_t c = costs[k][0], m = costs[k][1], L = counts[n];
                    open_world(&w, stage, counts[n], c, m, prefetch, -1);
                    for (int s = 0; s < 4; s++) {
                        int64_t fwd = forward(&w);
                        /* Nothing was updated before the first step, so resident units are not gathered. */
                        assert_int_equal(fwd, (w.plan->resident[0] && s == 0 ? 0 : m) + L * c);
                        /* The last units of forward stay for backward, so not even its first gather is
                         * exposed. */
                        assert_int_equal(backward(&w), m + L * 2 * c);
                        assert_int_equal(zr_engine_step(&w.e, 0.1f, NULL), 0);
                    }
                    close_world(&w);
                }
}

/* If nothing is left of forward, because everything was written in between, the first gather of backward
 * is exposed too. */
static void backward_from_nothing(void **state)
{
    for (int prefetch = 1; prefetch <= 4; prefetch++) {
        struct world w;
        open_world(&w, 3, 12, 100, 60, prefetch, -1);
        for (int s = 0; s < 3; s++) {
            assert_int_equal(forward(&w), 60 + 12 * 100);
            for (int u = 0; u < w.n_units; u++)
                call(&w, ZR_EV_REWRITE, u, 0);
            /* That write waits for the device, so no gather can have begun before. */
            overlap_spend(w.e.gather_stream, all_done(&w) - overlap_now(w.e.gather_stream));
            assert_int_equal(backward(&w), 2 * 60 + 12 * 2 * 100);
            assert_int_equal(zr_engine_step(&w.e, 0.1f, NULL), 0);
        }
        close_world(&w);
    }
}

/* Without prefetch every gather is exposed: one per unit and pass, except for the unit that is still
 * there. */
static void no_prefetch_exposes_all(void **state)
{
    struct world w;
    open_world(&w, 3, 10, 100, 60, 0, -1);
    for (int s = 0; s < 3; s++) {
        assert_int_equal(forward(&w), 10 * (60 + 100));
        /* With one gradient slot the reduce is exposed as well, but runs while the next unit is gathered. */
        assert_int_equal(backward(&w), 10 * 200 + 9 * 60 + 60);
        assert_int_equal(zr_engine_step(&w.e, 0.1f, NULL), 0);
    }
    close_world(&w);
}

/* With memory for all units, each is gathered once per step, and backward waits for nothing. */
static void full_budget_gathers_once(void **state)
{
    struct world w;
    open_world(&w, 3, 10, 100, 60, 2, 10 * 4096 * 4);
    for (int s = 0; s < 3; s++) {
        int64_t fwd = forward(&w), bwd = backward(&w);
        assert_int_equal(fwd, (s ? 60 : 0) + 10 * 100);
        assert_int_equal(bwd, 10 * 200 + 60);
        assert_int_equal(zr_engine_step(&w.e, 0.1f, NULL), 0);
    }
    assert_int_equal(w.e.i.n_gather, 3 * 10);
    close_world(&w);
}

/* A bracket does not ask a communicator for its status unless an alarm was raised. Asking would mean
 * asking the peers. */
static void brackets_ask_nobody(void **state)
{
    for (int stage = 0; stage <= 3; stage++) {
        for (int alarmed = 0; alarmed < 2; alarmed++) {
            struct world w;
            open_world(&w, stage, 10, 100, 60, 2, -1);
            struct zr_comm *of[] = {w.e.distinct[0], w.e.distinct[1]};
            forward(&w);
            backward(&w);
            assert_int_equal(overlap_comm_n_asked(of[0]) + overlap_comm_n_asked(of[1]), 0);
            overlap_comm_alarm(of[alarmed]);
            call(&w, ZR_EV_BEGIN, 0, 0);
            assert_true(overlap_comm_n_asked(of[0]) > 0 && overlap_comm_n_asked(of[1]) > 0);
            close_world(&w);
        }
    }
}

/* Counts spans of a kind in the engine's timeline. longest returns the length of the longest one in
 * microseconds. */
static int64_t n_spans(struct world *w, const char *kind, double *longest)
{
    char path[] = "/tmp/zero-overlap-XXXXXX", line[512], wanted[64];
    int fd = mkstemp(path);
    assert_true(fd >= 0);
    close(fd);
    assert_int_equal(zr_engine_trace_write(&w->e, path), 0);
    FILE *f = fopen(path, "r");
    assert_non_null(f);
    snprintf(wanted, sizeof wanted, "\"cat\":\"%s\"", kind);
    int64_t n = 0;
    *longest = 0;
    while (fgets(line, sizeof line, f)) {
        if (!strstr(line, wanted))
            continue;
        double us = atof(strstr(line, "\"dur\":") + strlen("\"dur\":"));
        *longest = us > *longest ? us : *longest;
        n++;
    }
    fclose(f);
    unlink(path);
    return n;
}

/* With compute on the calling thread, each of its waits is in the timeline. It waits for a unit that is
 * being gathered, and for a gradient's memory that is being reduced. Only the first kind counts as a begin
 * that waited for its unit. */
static void every_wait_is_a_span(void **state)
{
    for (int full = 0; full < 2; full++) {
        struct world w;
        double longest;
        /* Communication takes longer than compute. With memory for all units, backward waits for none. */
        describe_world(&w, 3, 10, 10, 60, 1, full ? 10 * 4096 * 4 : -1);
        w.opt.trace = true;
        begin_world(&w, overlap_device_open_on_caller());
        for (int s = 0; s < 3; s++) {
            forward(&w);
            int64_t of_units = w.e.m.n_waits, all = overlap_device_n_waited(w.dev);
            backward(&w);
            of_units = w.e.m.n_waits - of_units;
            all = overlap_device_n_waited(w.dev) - all;
            assert_true(full ? of_units == 0 && all > 0 : of_units > 0);
            assert_int_equal(zr_engine_step(&w.e, 0.1f, NULL), 0);
        }
        assert_int_equal(n_spans(&w, "wait", &longest), overlap_device_n_waited(w.dev));
        close_world(&w);
    }
}

/* If all ranks update everything and a sum is not in backward's memory, the sum is gathered for the
 * update. That time is not counted as the update's, which is free here. */
static void gathered_sums_are_no_update(void **state)
{
    struct world w;
    double longest;
    describe_world(&w, 0, 5, 100, 60, 2, -1);
    w.opt.trace = true;
    w.opt.wire_dtype = ZERO_BF16; /* so that sums are not in place */
    begin_world(&w, overlap_device_open());
    for (int s = 0; s < 2; s++) {
        forward(&w);
        backward(&w);
        int64_t from = overlap_now(w.e.reduce_stream);
        assert_int_equal(zr_engine_step(&w.e, 0.1f, NULL), 0);
        assert_int_equal(overlap_now(w.e.reduce_stream) - from, 5 * 60); /* one gather per unit */
    }
    assert_int_equal(n_spans(&w, "update", &longest), 2 * 5);
    assert_true(longest == 0);
    close_world(&w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(only_the_ends_are_exposed),   cmocka_unit_test(backward_from_nothing),
        cmocka_unit_test(no_prefetch_exposes_all),     cmocka_unit_test(full_budget_gathers_once),
        cmocka_unit_test(brackets_ask_nobody),         cmocka_unit_test(every_wait_is_a_span),
        cmocka_unit_test(gathered_sums_are_no_update),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
