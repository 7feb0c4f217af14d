/* SPDX-License-Identifier: Apache-2.0 */
/* test_core_valid.c: tests that an assert ends the process as soon as the core's state breaks an
 * invariant, in builds with asserts. Any call finds it, even one that is refused. */
#include "shard/core_inside.h"
#include "test/cmocka.h"
#include "test/ends_by_assert.h"

#include <stdint.h>

#ifdef ZR_ASSERTS

enum { N_UNITS = 3, N_SLOTS = 2 };

static struct zr_core *core_in_backward(void)
{
    static _Alignas(16) char memory[1 << 20];
    struct zr_core_unit_spec u[N_UNITS];
    const int64_t bytes[N_SLOTS] = {100, 100};
    struct zr_core_spec spec = {.n_units = N_UNITS,
                                .units = u,
                                .n_param_slots = N_SLOTS,
                                .n_grad_slots = N_SLOTS,
                                .param_slot_bytes = bytes,
                                .grad_slot_bytes = bytes,
                                .gathers_updated = true,
                                .prefetch = 1,
                                .grad_accum_steps = 2,
                                .reduce_each = true,
                                .n_sums = 1};
    for (int i = 0; i < N_UNITS; i++)
        u[i] = (struct zr_core_unit_spec){.param_bytes = 100, .grad_bytes = 100, .trainable = true};
    assert_true(zr_core_bytes(&spec) <= sizeof memory);
    struct zr_core *c = zr_core_init(memory, &spec);
    struct zr_action out[100];
    int32_t n;
    const struct zr_core_event calls[] = {{ZR_EV_BEGIN, 0, ZERO_FORWARD},
                                          {ZR_EV_BEGIN, 1, ZERO_FORWARD},
                                          {ZR_EV_END, 0, ZERO_FORWARD},
                                          {ZR_EV_END, 1, ZERO_FORWARD},
                                          {ZR_EV_BEGIN, 1, ZERO_BACKWARD}};
    assert_true(zr_core_max_actions(&spec) <= 100);
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++)
        assert_int_equal(zr_core_take(c, &calls[i], out, &n), 0);
    return c;
}

/* Makes a call that is refused, without changing the core first. */
static void refused(void *arg)
{
    struct zr_action out[100];
    int32_t n;
    zr_core_take(arg, &(struct zr_core_event){.kind = ZR_EV_RELEASE_ALL}, out, &n);
}

/* Breaks the state of a core *c by a statement; the next call must end the process. */
#define NOTICED(statement)                                                                                   \
    do {                                                                                                     \
        struct zr_core *c = core_in_backward();                                                              \
        statement;                                                                                           \
        if (!ends_by_assert(refused, c, "zr_core_valid"))                                                    \
            fail_msg("not noticed: %s", #statement);                                                         \
    } while (0)

static void each_invariant(void **state)
{
    assert_false(ends_by_assert(refused, core_in_backward(), ""));
    NOTICED(pslots(c)[0].unit = pslots(c)[1].unit);
    NOTICED(zr_core_pin(c, units(c)[0].pslot, -1)); /* a negative number of pins */
    NOTICED(zr_core_pin(c, units(c)[1].pslot, -1)); /* a pin is lost */
    NOTICED(c->n_open++);
    NOTICED(units(c)[2].open[ZERO_FORWARD] = true);
    NOTICED(units(c)[0].n_contrib = units(c)[0].depth = 2); /* too many sums */
    NOTICED(units(c)[0].n_contrib = 1);                     /* without a sum */
    NOTICED(units(c)[1].n_bwd = 3);                         /* of one in each of two micro-batches */
    NOTICED(gslots(c)[units(c)[1].gslot].unit = 0);         /* another unit's slot */
    NOTICED((units(c)[1].next_use = 7, pslots(c)[units(c)[1].pslot].pins = 0)); /* a stale key */
    NOTICED(c->pos = c->n_order + 1);
}

#else

static void each_invariant(void **state)
{
    skip(); /* a build without asserts */
}

#endif

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(each_invariant)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
