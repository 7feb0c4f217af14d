/* SPDX-License-Identifier: Apache-2.0 */
/* test_core.c: tests the schedule core by scripted steps and by random walks, checked by core_watch.c. */
#include "shard/core_inside.h"
#include "test/shard/core_watch.h"

/* ---- scripted steps ---- */

enum { MAX_UNITS = 8, MAX_CALLS = 128 };

/* A spec and memory for its arrays. */
struct model {
    struct zr_core_unit_spec units[MAX_UNITS];
    int64_t pslot[MAX_UNITS], gslot[MAX_UNITS];
    struct zero_call order[MAX_CALLS];
    struct zr_core_spec spec;
};

/* Makes n_units units of 100 bytes at stage 3 in a world of 2, with n_slots parameter slots. order is a
 * script. */
static void make_model(struct model *m, int32_t n_units, int32_t n_slots, int32_t prefetch, const char *order)
{
    memset(m, 0, sizeof *m);
    for (int32_t i = 0; i < MAX_UNITS; i++) {
        m->units[i] = (struct zr_core_unit_spec){.param_bytes = 100, .grad_bytes = 100, .trainable = true};
        m->pslot[i] = m->gslot[i] = 100;
    }
    m->spec = (struct zr_core_spec){.n_units = n_units,
                                    .units = m->units,
                                    .n_param_slots = n_slots,
                                    .n_grad_slots = 2,
                                    .param_slot_bytes = m->pslot,
                                    .grad_slot_bytes = m->gslot,
                                    .gathers_updated = true,
                                    .prefetch = prefetch,
                                    .grad_accum_steps = 1,
                                    .reduce_each = true,
                                    .n_sums = 1,
                                    .order = m->order};
    enum zr_core_event_kind kind;
    int32_t unit;
    enum zero_phase phase;
    while (watch_parse(&order, &kind, &unit, &phase))
        m->order[m->spec.n_order++] =
            (struct zero_call){.unit = unit, .phase = phase, .is_end = kind == ZR_EV_END};
}

/* Makes the model's parameters and gradients resident, as at stages 0 and 1. */
static void make_resident(struct model *m, int stage)
{
    m->spec.gathers_updated = stage > 0;
    m->spec.model_holds = true;
    m->spec.n_param_slots = m->spec.n_grad_slots = 0;
    for (int32_t i = 0; i < m->spec.n_units; i++)
        m->units[i].resident = true;
}

static int32_t n_actions(const struct watch *w, enum zr_action_kind kind, int32_t unit)
{
    int32_t n = 0;
    for (int32_t i = 0; i < w->n_out; i++)
        n += w->out[i].kind == kind && w->out[i].unit == unit;
    return n;
}

/* Runs the script and a step. Returns the number of gathers, without those for the next step's first
 * units. */
static int64_t gathers_of(struct watch *w, const char *script)
{
    int64_t before = w->n_gathers;
    for (int32_t u = 0, slot; u < w->spec.n_units; u++)
        before -= zr_core_present(w->core, u, &slot) && slot >= 0; /* gathered by the step before */
    watch_run(w, script);
    int64_t n = w->n_gathers - before;
    watch_run(w, "S");
    return n;
}

#define DEFAULT_ORDER "0(0) 1(1) 2(2) 3(3) 3[3] 2[2] 1[1] 0[0]"

static void declared_order(void **state)
{
    struct model m;
    struct watch w;
    make_model(&m, 4, 2, 1, DEFAULT_ORDER);
    watch_open(&w, &m.spec);
    watch_run(&w, DEFAULT_ORDER "S");
    int64_t demand = w.n_demand_gathers;
    assert_int_equal(demand, 1); /* nothing could be gathered before the very first call */
    for (int i = 0; i < 3; i++)
        assert_int_equal(gathers_of(&w, DEFAULT_ORDER), 2 * 4 - 2); /* units 2 and 3 stay */
    assert_int_equal(w.n_demand_gathers, demand);
    assert_int_equal(zr_core_counts(w.core).n_strays, 0);
    assert_int_equal(zr_core_counts(w.core).n_replans, 0);
    assert_int_equal(zr_core_counts(w.core).n_calls, 4 * 16);
    watch_close(&w);
}

/* Takes the fewest gathers that n_slots slots allow: the last units of forward stay for backward.
 * Gathering ahead takes no more. */
static void fewest_gathers(void **state)
{
    for (int32_t n_slots = 1; n_slots <= 4; n_slots++) {
        for (int32_t prefetch = 0; prefetch <= 100; prefetch = prefetch < 3 ? prefetch + 1 : prefetch + 97) {
            struct model m;
            struct watch w;
            make_model(&m, 4, n_slots, prefetch, DEFAULT_ORDER);
            watch_open(&w, &m.spec);
            for (int i = 0; i < 3; i++) {
                int64_t n = gathers_of(&w, DEFAULT_ORDER);
                CHECK(n == 2 * 4 - n_slots, "%lld gathers with %d slots, prefetch %d", (long long)n, n_slots,
                      prefetch);
            }
            CHECK(prefetch || w.n_demand_gathers == w.n_gathers, "gathers ahead without prefetch");
            watch_close(&w);
        }
    }
}

/* Prefetch counts units, however often each of them is used. */
static void prefetch_counts_units(void **state)
{
    struct model m;
    struct watch w;
    int32_t slot;
    make_model(&m, 4, 4, 2, "0(0) 1(1) 1(1) 1(1) 2(2) 3(3) 3[3] 2[2] 1[1] 0[0]");
    watch_open(&w, &m.spec);
    watch_run(&w, "0(");
    assert_true(zr_core_present(w.core, 1, &slot) && zr_core_present(w.core, 2, &slot));
    assert_false(zr_core_present(w.core, 3, &slot));
    watch_run(&w, "0) 1(1) 1(1) 1(");
    assert_true(zr_core_present(w.core, 3, &slot));
    watch_run(&w, "1) 2(2) 3(3) 3[3] 2[2] 1[1] 0[0] S");
    watch_close(&w);

    /* Open units do not count as gathered ahead. */
    make_model(&m, 4, 3, 1, "0( 1(1) 2(2) 0[ 3[3] 2[2] 1[1] 0] 0)");
    watch_open(&w, &m.spec);
    watch_run(&w, "0( 1(1) 2(");
    assert_true(zr_core_present(w.core, 3, &slot));
    watch_run(&w, "2) 0[ 3[3] 2[2] 1[1] 0] 0) S");
    watch_close(&w);
}

static int32_t slot_of(const struct watch *w, int32_t unit)
{
    int32_t slot;
    return zr_core_present(w->core, unit, &slot) ? slot : -1;
}

/* A unit gets the smallest slot that fits: an empty one first, otherwise one whose unit is used last or
 * never again. */
static void slots_that_fit_best(void **state)
{
    static const int64_t slots[] = {300, 100, 200};
    struct model m;
    struct watch w;
    make_model(&m, 6, 3, 0, "");
    for (int i = 0; i < 3; i++)
        m.pslot[i] = m.gslot[i] = slots[i];
    m.spec.n_grad_slots = 3;
    m.units[4].param_bytes = m.units[4].grad_bytes = 200;
    m.units[5].param_bytes = m.units[5].grad_bytes = 300;
    watch_open(&w, &m.spec);
    watch_run(&w, "0(0)");
    assert_int_equal(slot_of(&w, 0), 1);
    watch_run(&w, "1(1)");
    assert_int_equal(slot_of(&w, 1), 2);
    watch_run(&w, "2(2)");
    assert_int_equal(slot_of(&w, 2), 0);
    /* All slots are in use and no unit is needed again, so the smallest slot that fits is taken. */
    watch_run(&w, "3(3)");
    assert_int_equal(slot_of(&w, 3), 1);
    watch_run(&w, "4(4)");
    assert_int_equal(slot_of(&w, 4), 2);
    watch_run(&w, "0[ 4[ 5[ 5] 4] 0] S"); /* gradient slots of 100, 200 and 300 bytes */
    watch_close(&w);
}

/* The smallest slot whose unit is not used again is taken, however far away those units are in a next
 * step. An empty slot comes first. */
static void small_and_empty_slots_first(void **state)
{
    struct model m;
    struct watch w;
    make_model(&m, 5, 4, 0, "");
    for (int i = 0; i < 4; i++)
        m.pslot[i] = m.units[i].param_bytes = 100 * (i + 1);
    m.units[4].param_bytes = 200;
    watch_open(&w, &m.spec);
    watch_run(&w, "0(0) 1(1)"); /* slots 1, 2 and 3 are empty then */
    assert_int_equal(slot_of(&w, 1), 1);
    watch_run(&w, "2(2) 3(3) 4(4)");
    assert_int_equal(slot_of(&w, 4), 1);
    watch_close(&w);

    make_model(&m, 3, 2, 0, "0(0) 1(1) 1[1] 0[0]");
    m.pslot[0] = m.units[1].param_bytes = 300;
    m.pslot[1] = 200;
    watch_open(&w, &m.spec);
    watch_run(&w, "0(0) 1(1) 1[1] 0[0] 2(2)");
    assert_int_equal(slot_of(&w, 2), 1);
    watch_close(&w);

    make_model(&m, 3, 2, 0, "0(0) 1(1) 2(2) 0(0) 0[0]");
    watch_open(&w, &m.spec);
    watch_run(&w, "0(0) 1(1) W0 2(2)");
    assert_true(slot_of(&w, 1) >= 0 && slot_of(&w, 2) >= 0);
    watch_close(&w);
}

/* A unit whose use was skipped counts as used last from then on. Its slot is the first to be filled again,
 * though no bracket of the unit says so. */
static void who_was_left_out_goes_first(void **state)
{
    struct model m;
    struct watch w;
    make_model(&m, 5, 3, 0, "0(0) 1(1) 2(2) 0(0) 3(3) 4(4) 1(1) 3(3) 2(2) 4[4] 3[3] 2[2] 1[1] 0[0]");
    watch_open(&w, &m.spec);
    watch_run(&w, "0(0) 1(1) 2(2) 3(3)"); /* unit 0 was due before 3; 2 is used last, so its slot is taken */
    assert_true(slot_of(&w, 0) >= 0 && slot_of(&w, 1) >= 0 && slot_of(&w, 3) >= 0);
    watch_run(&w, "4(");
    assert_int_equal(slot_of(&w, 0), -1);
    assert_true(slot_of(&w, 1) >= 0 && slot_of(&w, 3) >= 0);
    watch_run(&w, "4) 1(1) 3(3)");
    assert_int_equal(w.n_gathers, 5);
    watch_run(&w, "2(2) 4[4] 3[3] 2[2] 1[1] 0[0] S");
    watch_close(&w);
}

/* The largest slot is reserved for units that fit no other. A small unit gets it only when a bracket needs
 * it, and leaves it first. */
static void largest_slot_is_reserved(void **state)
{
    struct model m;
    struct watch w;
    make_model(&m, 5, 3, 3, "0(0) 1(1) 2(2) 3(3) 4(4) 4[4] 3[3] 2[2] 1[1] 0[0]");
    m.pslot[0] = 300;
    m.units[4].param_bytes = 300;
    m.spec.reserve_largest = true;
    watch_open(&w, &m.spec);
    watch_run(&w, "0("); /* 1 gets the other small slot; 2 is not gathered ahead into the slot of 4 */
    assert_true(slot_of(&w, 0) > 0 && slot_of(&w, 1) > 0);
    assert_int_equal(slot_of(&w, 2), -1);
    watch_run(&w, "0) 1( 2(");
    assert_true(slot_of(&w, 1) > 0 && slot_of(&w, 2) > 0);
    watch_run(&w, "3("); /* needed now */
    assert_int_equal(slot_of(&w, 3), 0);
    watch_run(&w, "3) 2) 4(");
    assert_int_equal(slot_of(&w, 4), 0);
    watch_run(&w, "4) 1) 4[4] 3[3] 2[2] 1[1] 0[0] S");
    watch_close(&w);
}

/* A small unit that was in the reserved slot, because another was open, is in a small slot when it comes
 * again. A learned order that used the reserved slot has no effect on another order. */
static void the_reserved_slot_is_left(void **state)
{
    struct model m;
    struct watch w;
    make_model(&m, 3, 2, 0, "0(0) 1(1) 2(2) 2[2] 1[1] 0[0]");
    m.pslot[0] = m.units[2].param_bytes = 300;
    m.spec.reserve_largest = true;
    watch_open(&w, &m.spec);
    watch_run(&w, "0(1(1)0)");
    assert_int_equal(slot_of(&w, 1), 0);
    watch_run(&w, "1(");
    assert_int_equal(slot_of(&w, 1), 1);
    watch_run(&w, "2(2)1) 2[2] 1[1] 0[0] S");
    assert_int_equal(zr_core_counts(w.core).n_replans, 1);
    watch_run(&w, "1(2(2)1) 0(0) 2[2] 1[1] 0[0] S");
    watch_close(&w);
}

/* zero_gather_all may leave a small unit in the large slot. If the order opens a large unit inside its
 * bracket, it is gathered again into a small slot. */
static void nested_brackets_find_their_sizes(void **state)
{
    struct model m;
    struct watch w;
    make_model(&m, 3, 2, 0, "2(0(0)2) 1(1) 1[1] 2[0[0]2]");
    m.pslot[0] = m.units[0].param_bytes = 200;
    watch_open(&w, &m.spec);
    assert_true(w.core->sized && zr_core_has_room(w.core));
    watch_run(&w, "2(0(0)2) 1(1) 1[1] 2[0[0]2] S GR");
    assert_int_equal(slot_of(&w, 2), 0); /* all were gathered in turn, this one after the large one */
    watch_run(&w, "2(");
    assert_int_equal(slot_of(&w, 2), 1);
    watch_run(&w, "0(0)2) 1(1)"); /* an evaluation */
    watch_run(&w, "2(0(0)2) 1(1) 1[1] 2[0[0]2] S");
    assert_int_equal(zr_core_counts(w.core).n_replans, 0);
    watch_close(&w);

    /* With prefetch, this happens before its bracket. */
    m.spec.prefetch = 1;
    watch_open(&w, &m.spec);
    watch_run(&w, "2(0(0)2) 1(1) 1[1] 2[0[0]2] S GR");
    assert_int_equal(slot_of(&w, 2), 1);
    watch_close(&w);

    /* A pass that starts again has its own slot sizes: unit 1 is in the large slot only later in the
     * order. */
    make_model(&m, 3, 2, 0, "1(1) 2(0(0)2) 2(1(1)2) 1[1] 2[2] 0[0]");
    m.pslot[0] = m.units[0].param_bytes = 200;
    watch_open(&w, &m.spec);
    watch_run(&w, "1(1) 2(0(0)2) 1(");
    assert_int_equal(slot_of(&w, 1), 1);
    watch_run(&w, "1) 2(0(0)2) 2(1(");
    assert_int_equal(slot_of(&w, 1), 0);
    watch_run(&w, "1)2) 1[1] 2[2] 0[0] S");
    watch_close(&w);

    /* With one unit open at a time, any slot is enough and sizes are not fixed. */
    make_model(&m, 3, 2, 0, "2(2) 0(0) 1(1) 1[1] 0[0] 2[2]");
    m.pslot[0] = m.units[0].param_bytes = 200;
    watch_open(&w, &m.spec);
    assert_false(w.core->sized);
    watch_run(&w, "2(2) 0(0) 1(1) 1[1] 0[0] 2[2] S GR 2(2)");
    assert_int_equal(slot_of(&w, 2), 0);
    watch_close(&w);

    /* A bracket of weights takes no parameter slot, and does not fail for lack of one. */
    make_model(&m, 3, 2, 0, "2(0(0)2) 1(1) 1{1} 1< 2{0{0}2} 1> 2<2> 0<0>");
    m.pslot[0] = m.units[0].param_bytes = 200;
    watch_open(&w, &m.spec);
    assert_true(w.core->sized && zr_core_has_room(w.core));
    watch_run(&w, "2(0(0)2) 1(1) 1{1} 1< 2{0{0}2} 1> 2<2> 0<0> S");
    watch_close(&w);
    make_model(&m, 3, 2, 0, "2(2) 0(0) 1(1) 1{1} 1< 0{0} 2{2} 1> 0<0> 2<2>");
    m.pslot[0] = m.units[0].param_bytes = 200;
    watch_open(&w, &m.spec);
    assert_false(w.core->sized);
    watch_close(&w);

    /* Two large units at once, and one slot for them. */
    make_model(&m, 2, 2, 0, "0(1(1)0) 1[1] 0[0]");
    m.pslot[0] = m.units[0].param_bytes = m.units[1].param_bytes = 200;
    watch_open(&w, &m.spec);
    assert_false(zr_core_has_room(w.core));
    watch_close(&w);
}

/* A bracket of weights needs no parameters, so its unit may be gathered ahead inside it. */
static void weights_need_no_parameters(void **state)
{
    struct model m;
    struct watch w;
    make_model(&m, 2, 1, 1, "0(0) 1(1) 0{0} 0< 1{1} 0> 1<1>");
    m.spec.grad_accum_steps = 2;
    watch_open(&w, &m.spec);
    watch_run(&w, "0(0) 1(1) 0{0} 0< 1{");
    assert_int_equal(slot_of(&w, 1), 0);
    watch_run(&w, "1}");
    assert_int_equal(slot_of(&w, 0), 0); /* for the next micro-batch */
    watch_run(&w, "0> 1<1> 0(0) 1(1) 0{0} 0< 1{1} 0> 1<1> S");
    assert_int_equal(zr_core_counts(w.core).n_strays, 0);
    watch_close(&w);
}

/* The gradient slot that was free for longest is used, if it fits, since its reduce has had the most time. */
static void gradient_slots_take_turns(void **state)
{
    struct model m;
    struct watch w;
    make_model(&m, 4, 2, 1, DEFAULT_ORDER);
    m.spec.grad_accum_steps = 3;
    m.spec.n_grad_slots = 3;
    watch_open(&w, &m.spec);
    int32_t last[2] = {-1, -1};
    for (int32_t i = 0; i < 12; i++) {
        assert_int_equal(watch_call(&w, ZR_EV_BEGIN, i % 4, ZERO_BACKWARD), 0);
        for (int32_t k = 0; k < w.n_out; k++) {
            if (w.out[k].kind != ZR_ACT_USE_GRAD)
                continue;
            assert_true(w.out[k].slot != last[0] && w.out[k].slot != last[1]);
            last[0] = last[1];
            last[1] = w.out[k].slot;
        }
        assert_int_equal(watch_call(&w, ZR_EV_END, i % 4, ZERO_BACKWARD), 0);
    }
    watch_close(&w);
}

/* With as many slots as units, each unit is gathered once per step. */
static void room_for_all(void **state)
{
    struct model m;
    struct watch w;
    make_model(&m, 4, 4, 100, DEFAULT_ORDER);
    watch_open(&w, &m.spec);
    for (int i = 0; i < 3; i++)
        assert_int_equal(gathers_of(&w, DEFAULT_ORDER), 4);
    watch_close(&w);
}

/* A step does not make frozen units stale. */
static void frozen_units_stay(void **state)
{
    struct model m;
    struct watch w;
    make_model(&m, 2, 2, 1, "0(0) 1(1) 1[1] 0[0]");
    m.units[0].trainable = false;
    watch_open(&w, &m.spec);
    watch_run(&w, "0(0) 1(1) 1[1] 0[0] S 0(0) 1(1) 1[1] 0[0] S 0(0) 1(1) 1[1] 0[0]");
    assert_int_equal(w.n_gathers, 1 + 3);
    watch_close(&w);
}

/* After the first step an order is followed without a call out of order, whether it was declared or not. */
static void follows(const char *declared, int32_t n_units, int32_t n_slots, const char *step)
{
    for (int known = 0; known < 2; known++) {
        struct model m;
        struct watch w;
        make_model(&m, n_units, n_slots, 1, known ? step : declared);
        watch_open(&w, &m.spec);
        watch_run(&w, step);
        watch_run(&w, "S");
        int64_t strays = zr_core_counts(w.core).n_strays, demand = w.n_demand_gathers,
                replans = zr_core_counts(w.core).n_replans;
        CHECK(known ? strays == 0 : strays > 0, "%lld strays in \"%s\"", (long long)strays, step);
        CHECK(replans == !known, "%lld replans for \"%s\"", (long long)replans, step);
        for (int i = 0; i < 3; i++) {
            watch_run(&w, step);
            watch_run(&w, "S");
        }
        struct zr_core_counts c = zr_core_counts(w.core);
        CHECK(c.n_strays == strays, "%lld strays in \"%s\"", (long long)(c.n_strays - strays), step);
        CHECK(c.n_replans == replans, "%lld replans of \"%s\"", (long long)(c.n_replans - replans), step);
        CHECK(w.n_demand_gathers == demand, "%lld late gathers in \"%s\"",
              (long long)(w.n_demand_gathers - demand), step);
        watch_close(&w);
    }
}

static void orders_are_learned(void **state)
{
    /* The next unit is open already. */
    follows(DEFAULT_ORDER, 4, 3, "0( 1(1) 2(2) 0[ 3[3] 2[2] 1[1] 0] 0)");
    /* Three passes per step, where three consecutive backward brackets were declared. */
    follows("0(0) 1(1) 2(2) 3(3) 3[3] 3[3] 3[3] 2[2] 2[2] 2[2] 1[1] 1[1] 1[1] 0[0] 0[0] 0[0]", 4, 2,
            DEFAULT_ORDER DEFAULT_ORDER DEFAULT_ORDER);
    follows(DEFAULT_ORDER, 4, 3, "0( 1(1) 2(2) 3(3) 0) 0[ 3[3] 2[2] 1[1] 0]");                /* nested */
    follows(DEFAULT_ORDER, 4, 3, "0(0) 1(1) 2(2) 3(3) 3[ 3(3) 3] 2(2) 2[2] 1[ 1(1) 1] 0[0]"); /* recomputed */
    follows(DEFAULT_ORDER, 4, 3,
            "0(0) 1(1) 2(2) 3(3) 0(0) 0[ 3[3] 2[2] 1[1] 0]"); /* tied: the head is unit 0 */
    follows(DEFAULT_ORDER " 0[0]", 4, 3,
            "0(0) 1(1) 2(2) 3(3) 0(0) 0[0] 3[3] 2[2] 1[1] 0[0]");            /* tied, two contributions */
    follows(DEFAULT_ORDER, 4, 2, "0(0) 2(2) 3(3) 3[3] 2[2] 0[0]");           /* a unit skipped */
    follows(DEFAULT_ORDER, 4, 2, "3(3) 2(2) 1(1) 0(0) 0[0] 1[1] 2[2] 3[3]"); /* reversed */
    follows(DEFAULT_ORDER, 4, 4, "0( 1( 2( 0) 3( 1) 2) 3) 3[ 2[ 3] 1[ 2] 0[ 1] 0]"); /* overlapping */
    follows(DEFAULT_ORDER, 4, 4, "0( 1( 2( 3( 3[ 3] 3) 2[ 2] 2) 1[ 1] 1) 0[ 0] 0)"); /* backward inside */
    follows(DEFAULT_ORDER DEFAULT_ORDER, 4, 2,
            "0(0) 0(0) 1(1) 1(1) 2(2) 2(2) 2[2] 2[2] 1[1] 1[1] 0[0] 0[0]"); /* every layer twice */
}

static void change_mid_run(void **state)
{
    const char *other = "0(0) 2(2) 1(1) 3(3) 3[3] 1[1] 2[2] 0[0] S";
    struct model m;
    struct watch w;
    make_model(&m, 4, 2, 1, DEFAULT_ORDER);
    watch_open(&w, &m.spec);
    watch_run(&w, DEFAULT_ORDER "S" DEFAULT_ORDER "S");
    assert_int_equal(zr_core_counts(w.core).n_strays, 0);
    watch_run(&w, other);
    assert_int_equal(zr_core_counts(w.core).n_replans, 1);
    int64_t strays = zr_core_counts(w.core).n_strays, demand = w.n_demand_gathers;
    assert_true(strays > 0);
    watch_run(&w, other);
    watch_run(&w, other);
    assert_int_equal(zr_core_counts(w.core).n_strays, strays);
    assert_int_equal(zr_core_counts(w.core).n_replans, 1);
    assert_int_equal(w.n_demand_gathers, demand);
    watch_close(&w);
}

static void set_accum(struct watch *w, int32_t n)
{
    zr_core_set_accum(w->core, n);
    zr_core_set_accum(w->copy, n);
    w->spec.grad_accum_steps = n;
}

/* Steps with another number of micro-batches follow the declared order, or the order learned from whole
 * steps. */
static void other_micro_batches(void **state)
{
    static const int32_t accum_of[] = {4, 1, 3, 2, 4};
    static const char *const micro_batch[] = {DEFAULT_ORDER, "0(0) 2(2) 1(1) 3(3) 3[3] 1[1] 2[2] 0[0]"};
    for (int learned = 0; learned < 2; learned++) {
        struct zr_core_counts before = {0}, now;
        int64_t demand = 0;
        struct model m;
        struct watch w;
        make_model(&m, 4, 2, 1, DEFAULT_ORDER);
        m.spec.grad_accum_steps = 2;
        m.spec.max_grad_accum_steps = 4;
        m.spec.n_sums = sums_for(4);
        watch_open(&w, &m.spec);
        for (int i = -1; i < (int)(sizeof accum_of / sizeof *accum_of); i++) {
            if (i >= 0)
                set_accum(&w, accum_of[i]);
            for (int32_t a = 0; a < w.spec.grad_accum_steps; a++)
                watch_run(&w, micro_batch[learned]);
            watch_run(&w, "S");
            now = zr_core_counts(w.core);
            before = i < 0 ? now : before;
            demand = i < 0 ? w.n_demand_gathers : demand;
            assert_int_equal(now.n_strays, before.n_strays);
            assert_int_equal(now.n_replans, learned);
            assert_int_equal(w.n_demand_gathers, demand);
        }
        uint64_t hash = zr_core_hash(w.core);
        set_accum(&w, 3);
        assert_true(zr_core_hash(w.core) != hash);
        watch_close(&w);
    }
}

/* The padding of the declared calls, which may be anything, does not reach the core's bytes. */
static void padding_of_calls(void **state)
{
    char *core[2];
    size_t bytes = 0;
    for (int i = 0; i < 2; i++) {
        struct zero_call order[MAX_CALLS];
        struct model m;
        make_model(&m, 4, 2, 1, DEFAULT_ORDER);
        assert_true(m.spec.n_order <= MAX_CALLS);
        memset(order, i ? 0xaa : 0x55, sizeof order);
        for (int32_t k = 0; k < m.spec.n_order; k++) {
            order[k].unit = m.order[k].unit;
            order[k].phase = m.order[k].phase;
            order[k].is_end = m.order[k].is_end;
        }
        m.spec.order = order;
        bytes = zr_core_bytes(&m.spec);
        core[i] = malloc(bytes);
        assert_non_null(core[i]);
        zr_core_init(core[i], &m.spec);
    }
    assert_memory_equal(core[0], core[1], bytes);
    free(core[0]);
    free(core[1]);
}

/* Forward passes between steps do not change the order, whatever their number and first units. */
static void evaluation(void **state)
{
    static const char *const forward[] = {"0(0) 1(1) 2(2) 3(3)", "0( 1(1) 2(2) 3(3) 0)",
                                          "0(0) 1(1) 2(2) 3(3) 0(0)", "0(0) 0(0) 1(1) 2(2) 3(3)"};
    static const char *const backward[] = {"3[3] 2[2] 1[1] 0[0] ", "0[ 3[3] 2[2] 1[1] 0] "};
    for (int i = 0; i < 8; i++) {
        char step[256];
        struct model m;
        struct watch w;
        snprintf(step, sizeof step, "%s %s", forward[i / 2], backward[i % 2]);
        make_model(&m, 4, 3, 1, step);
        m.spec.grad_accum_steps = 2;
        watch_open(&w, &m.spec);
        for (int n_passes = 0; n_passes < 6; n_passes++) {
            for (int k = 0; k < n_passes; k++)
                watch_run(&w, forward[i / 2]);
            for (int k = 0; k < 2; k++)
                watch_run(&w, step);
            watch_run(&w, "S");
            CHECK(zr_core_counts(w.core).n_replans == 0, "\"%s\" after %d evaluations", step, n_passes);
            int64_t strays = zr_core_counts(w.core).n_strays, demand = w.n_demand_gathers;
            for (int k = 0; k < 2; k++)
                watch_run(&w, step);
            watch_run(&w, "S");
            CHECK(zr_core_counts(w.core).n_strays == strays, "\"%s\" after %d evaluations", step, n_passes);
            CHECK(w.n_demand_gathers == demand, "\"%s\" after %d evaluations", step, n_passes);
        }
        /* A thousand passes must not fill the record. */
        for (int k = 0; k < 1000; k++)
            watch_run(&w, forward[i / 2]);
        for (int k = 0; k < 2; k++)
            watch_run(&w, step);
        watch_run(&w, "S");
        CHECK(zr_core_counts(w.core).n_replans == 0, "\"%s\" after many evaluations", step);
        watch_close(&w);
    }
}

/* A step that differs from the declared order is learned although long evaluations come before each step. */
static void evaluation_before_each_step(void **state)
{
    static const char step[] = "0(0) 1(1) 2(2) 3(3) 3[ 3(3) 3] 2[ 2(2) 2] 1[ 1(1) 1] 0[ 0(0) 0] S";
    struct model m;
    struct watch w;
    make_model(&m, 4, 3, 1, DEFAULT_ORDER);
    watch_open(&w, &m.spec);
    int64_t strays = -1;
    for (int s = 0; s < 3; s++) {
        if (s == 2)
            strays = zr_core_counts(w.core).n_strays;
        for (int k = 0; k < 200; k++)
            watch_run(&w, "0(0) 1(1) 2(2) 3(3)");
        watch_run(&w, step);
    }
    assert_int_equal(zr_core_counts(w.core).n_strays, strays);
    watch_close(&w);
}

/* A learned step is repeated for another number of micro-batches only if its micro-batches are equal. */
static void other_micro_batches_unequal(void **state)
{
    struct model m;
    struct watch w;
    make_model(&m, 2, 1, 1, "0(0) 1(1) 1[1] 0[0]");
    m.spec.grad_accum_steps = 2;
    m.spec.max_grad_accum_steps = 4;
    watch_open(&w, &m.spec);
    /* An evaluation of both units comes first: the first 11 of the 22 calls end inside a backward bracket. */
    watch_run(&w, "0(0) 1(1) 0(0) 1(1) 1[ 1(1) 1] 0[0] 0(0) 1(1) 1[1] 0[0] S");
    int64_t replans = zr_core_counts(w.core).n_replans;
    assert_true(replans > 0);
    set_accum(&w, 1);
    int64_t strays = zr_core_counts(w.core).n_strays;
    watch_run(&w, "0(0) 1(1) 1[ 1(1) 1] 0[0] S");
    assert_int_equal(zr_core_counts(w.core).n_strays, strays + 1); /* the evaluation, which does not come */
    watch_close(&w);
}

/* After a backward bracket, the order's first call does not begin an evaluation, so the step is learned with
 * all its calls. */
static void again_behind_a_backward(void **state)
{
    static const char step[] = "0(0) 0[0] 0(0) 0[0] 1(1) 1[1] S";
    struct model m;
    struct watch w;
    make_model(&m, 2, 1, 1, "0(0) 0[0] 1(1) 1[1]");
    m.units[0].trainable = false;
    watch_open(&w, &m.spec);
    watch_run(&w, step);
    assert_int_equal(zr_core_counts(w.core).n_replans, 1);
    int64_t strays = zr_core_counts(w.core).n_strays;
    watch_run(&w, step);
    assert_int_equal(zr_core_counts(w.core).n_strays, strays);
    watch_close(&w);
}

/* A different forward pass may cost one step of late gathers, not more. */
static void other_evaluation(void **state)
{
    struct model m;
    struct watch w;
    make_model(&m, 4, 2, 1, DEFAULT_ORDER);
    watch_open(&w, &m.spec);
    watch_run(&w, DEFAULT_ORDER "S 0(0) 3(3) 0(0) 3(3)" DEFAULT_ORDER "S" DEFAULT_ORDER "S");
    int64_t strays = zr_core_counts(w.core).n_strays, demand = w.n_demand_gathers;
    watch_run(&w, DEFAULT_ORDER "S" DEFAULT_ORDER "S");
    assert_int_equal(zr_core_counts(w.core).n_strays, strays);
    assert_int_equal(w.n_demand_gathers, demand);
    watch_close(&w);
}

static void two_forwards_one_backward(void **state)
{
    const char *step = "0(0) 1(1) 2(2) 3(3)" DEFAULT_ORDER;
    for (int known = 0; known < 2; known++) {
        struct model m;
        struct watch w;
        make_model(&m, 4, 2, 1, known ? step : DEFAULT_ORDER);
        watch_open(&w, &m.spec);
        for (int i = 0; i < 4; i++) {
            watch_run(&w, step);
            watch_run(&w, "S");
        }
        struct zr_core_counts c = zr_core_counts(w.core);
        assert_int_equal(c.n_replans, 0);
        assert_true(c.n_strays <= (known ? 0 : 4)); /* one call, where the second pass begins */
        watch_close(&w);
    }
}

static void refused(struct watch *w, enum zr_core_event_kind kind, int32_t unit, enum zero_phase phase,
                    int code, const char *message)
{
    assert_int_equal(watch_call(w, kind, unit, phase), code);
    if (!strstr(zr_error_text(), message))
        fail_msg("\"%s\" does not say \"%s\"", zr_error_text(), message);
}

static void errors_change_nothing(void **state)
{
    struct model m;
    struct watch w;
    make_model(&m, 4, 2, 1, DEFAULT_ORDER);
    m.spec.grad_accum_steps = 2;
    watch_open(&w, &m.spec);
    refused(&w, ZR_EV_END, 0, ZERO_FORWARD, ZERO_ERR_ORDER, "unit 0 is not open in forward");
    refused(&w, ZR_EV_BEGIN, 4, ZERO_FORWARD, ZERO_ERR_ARG, "unit is 4; allowed: 0..3");
    refused(&w, ZR_EV_BEGIN, -1, ZERO_BACKWARD, ZERO_ERR_ARG, "unit is -1; allowed: 0..3");
    refused(&w, ZR_EV_END, INT32_MAX, ZERO_BACKWARD, ZERO_ERR_ARG, "unit is 2147483647");
    refused(&w, ZR_EV_REWRITE, 4, 0, ZERO_ERR_ARG, "unit is 4");
    refused(&w, (enum zr_core_event_kind)77, 0, 0, ZERO_ERR_ARG, "unknown event 77");
    refused(&w, ZR_EV_STEP, 0, 0, ZERO_ERR_ORDER, "no backward bracket has ended");
    watch_run(&w, "0(");
    refused(&w, ZR_EV_BEGIN, 0, ZERO_FORWARD, ZERO_ERR_ORDER, "unit 0 is already open in forward");
    refused(&w, ZR_EV_END, 0, ZERO_BACKWARD, ZERO_ERR_ORDER, "unit 0 is not open in backward");
    refused(&w, ZR_EV_STEP, 0, 0, ZERO_ERR_ORDER, "unit 0 has an open bracket");
    refused(&w, ZR_EV_MICRO, 0, 0, ZERO_ERR_ORDER, "unit 0 has an open bracket");
    refused(&w, ZR_EV_REWRITE, 0, 0, ZERO_ERR_ORDER, "unit 0 has an open bracket");
    watch_run(&w, "0[ 1(");
    refused(&w, ZR_EV_BEGIN, 0, ZERO_BACKWARD, ZERO_ERR_ORDER, "unit 0 is already open in backward");
    refused(&w, ZR_EV_BEGIN, 2, ZERO_FORWARD, ZERO_ERR_BUDGET,
            "no parameter slot is free for unit 2 (100 bytes)");
    watch_run(&w, "1) 0)");
    refused(&w, ZR_EV_END, 0, ZERO_FORWARD, ZERO_ERR_ORDER, "unit 0 is not open in forward");
    watch_run(&w, "0]");
    refused(&w, ZR_EV_STEP, 0, 0, ZERO_ERR_ORDER, "unit 0 has had 1 backward pass since");
    watch_run(&w, "M");
    refused(&w, ZR_EV_MICRO, 0, 0, ZERO_ERR_ORDER, "at most 1 time:");
    watch_run(&w, "0[ 0] S");
    refused(&w, ZR_EV_STEP, 0, 0, ZERO_ERR_ORDER, "no backward bracket has ended");
    /* After all of that a clean step works. */
    watch_run(&w, DEFAULT_ORDER DEFAULT_ORDER "S");
    watch_close(&w);

    make_model(&m, 4, 4, 1, DEFAULT_ORDER);
    watch_open(&w, &m.spec);
    watch_run(&w, "0[ 1[");
    refused(&w, ZR_EV_BEGIN, 2, ZERO_BACKWARD, ZERO_ERR_BUDGET,
            "no gradient slot is free for unit 2 (100 bytes)");
    watch_run(&w, "0] 2[ 2] 1] S");
    watch_close(&w);

    make_model(&m, 4, 0, 0, DEFAULT_ORDER);
    make_resident(&m, 1);
    m.spec.grad_accum_steps = 3;
    watch_open(&w, &m.spec);
    for (int u = 0; u < 4; u++)
        w.unit[u].no_brackets = true;
    refused(&w, ZR_EV_STEP, 0, 0, ZERO_ERR_ORDER,
            "zero_micro ended 0 micro-batches, but grad_accum_steps is 3");
    watch_run(&w, "M");
    refused(&w, ZR_EV_STEP, 0, 0, ZERO_ERR_ORDER, "1 micro-batch,");
    watch_run(&w, "M S M M S");
    watch_close(&w);
}

/* The message names the smallest open unit whose slot would be enough. For gradients, it does not mention
 * prefetch or the budget. */
static void unit_to_flag(void **state)
{
    static const int64_t slots[] = {300, 100, 200};
    struct model m;
    struct watch w;
    make_model(&m, 6, 3, 1, "");
    for (int i = 0; i < 3; i++)
        m.pslot[i] = m.gslot[i] = slots[i];
    m.spec.n_grad_slots = 3;
    m.units[3].param_bytes = m.units[3].grad_bytes = 150;
    m.units[4].param_bytes = m.units[4].grad_bytes = 250;
    m.units[5].param_bytes = m.units[5].grad_bytes = 120;
    watch_open(&w, &m.spec);
    watch_run(&w, "0( 4( 5(");
    refused(
        &w, ZR_EV_BEGIN, 3, ZERO_FORWARD, ZERO_ERR_BUDGET,
        "give a tensor of unit 5 the flag ZERO_RESIDENT, which keeps the 120 bytes of its parameters outside "
        "the slots, or declare the nesting in cfg.memory.order, or raise prefetch or param_budget_bytes");
    watch_run(&w, "5) 4) 0) 4[ 5( 5) 0[ 5[");
    refused(&w, ZR_EV_BEGIN, 3, ZERO_FORWARD, ZERO_ERR_BUDGET, "tensor of unit 5 ");
    watch_run(&w, "5] 0] 4]");
    m.spec.n_param_slots = 0;
    for (int i = 0; i < 6; i++)
        m.units[i].resident = true;
    watch_close(&w);
    watch_open(&w, &m.spec);
    watch_run(&w, "0[ 4[ 5[");
    refused(&w, ZR_EV_BEGIN, 3, ZERO_BACKWARD, ZERO_ERR_BUDGET,
            "give a tensor of unit 5 the flag ZERO_RESIDENT, which keeps the 120 bytes of its gradients "
            "outside the slots, or declare the nesting in cfg.memory.order");
    assert_null(strstr(zr_error_text(), "prefetch"));
    watch_run(&w, "5]");
    refused(&w, ZR_EV_BEGIN, 4, ZERO_BACKWARD, ZERO_ERR_ORDER, "already open");
    watch_run(&w, "4] 0] S");
    watch_close(&w);
}

/* A step may have as many backward brackets of a unit as are declared, or fewer. One more is refused. A
 * step with missing micro-batches is refused too. */
static void brackets_are_counted(void **state)
{
    static const char backward[] = "3[ 3] 2[ 2] 1[ 1] 0[ 0]";
    struct model m;
    struct watch w;
    for (int stage = 1; stage < 4; stage++)
        for (int accum = 1; accum < 4; accum++) {
            char says[80];
            make_model(&m, 4, 2, 1, DEFAULT_ORDER);
            if (stage == 1)
                make_resident(&m, 1);
            m.spec.grad_accum_steps = accum;
            watch_open(&w, &m.spec);
            for (int step = 0; step < 2; step++) {
                for (int a = 0; a < accum; a++) {
                    if (a)
                        refused(&w, ZR_EV_STEP, 0, 0, ZERO_ERR_ORDER, "micro-batches are missing: unit 0");
                    watch_run(&w, backward);
                }
                snprintf(says, sizeof says,
                         "zero_tensor.uses is 1 and grad_accum_steps is %d. Is a zero_step", accum);
                refused(&w, ZR_EV_BEGIN, 3, ZERO_BACKWARD, ZERO_ERR_ORDER, says);
                watch_run(&w, "3( 3)"); /* a forward bracket is always allowed */
                watch_run(&w, step ? "N S" : "S");
            }
            watch_close(&w);
        }

    /* A tied unit may have three. */
    make_model(&m, 4, 2, 1, "0(0) 1(1) 2(2) 3(3) 3[3] 3[3] 3[3] 2[2] 1[1] 0[0]");
    watch_open(&w, &m.spec);
    watch_run(&w, "3[ 3] 3[ 3] 2[ 2] 1[ 1] 0[ 0] 3[ 3]");
    refused(&w, ZR_EV_BEGIN, 3, ZERO_BACKWARD, ZERO_ERR_ORDER, "unit 3 has had 3 backward brackets");
    watch_run(&w, "S 3[ 3] 3[ 3] 1[ 1] S"); /* or fewer, and while others are left out */
    watch_run(&w, "3[ 3] S 0[ 0] S");       /* and all others */
    watch_close(&w);

    /* Two brackets of one micro-batch are not taken for two micro-batches, unless no other unit has any. */
    make_model(&m, 2, 2, 1, "0(0) 1(1) 1[1] 1[1] 0[0]");
    m.spec.grad_accum_steps = 2;
    watch_open(&w, &m.spec);
    watch_run(&w, "1[ 1] 1[ 1] 0[ 0]");
    refused(&w, ZR_EV_STEP, 0, 0, ZERO_ERR_ORDER, "micro-batches are missing: unit 0 has had 1");
    watch_run(&w, "1[ 1] 0[ 0] S 1[ 1] 1[ 1] S");
    watch_close(&w);

    /* Two uses of every unit. */
    make_model(&m, 2, 2, 1, "0( 0) 1( 1) 1[ 1] 0[ 0] 1[ 1] 0[ 0]");
    m.spec.grad_accum_steps = 2;
    watch_open(&w, &m.spec);
    watch_run(&w, "1[ 1] 0[ 0] 1[ 1] 0[ 0] S");
    for (int a = 0; a < 4; a++)
        watch_run(&w, "1[ 1] 0[ 0]");
    refused(&w, ZR_EV_BEGIN, 1, ZERO_BACKWARD, ZERO_ERR_ORDER,
            "Otherwise set grad_accum_steps to the micro-batches of a step, or zero_tensor.uses to the "
            "unit's backward brackets in a micro-batch");
    watch_run(&w, "S");
    watch_close(&w);
}

/* The norm before the step, and dropped steps. The watch knows what the sums must hold. */
static void norms_and_drops(void **state)
{
    for (int stage = 0; stage < 4; stage++)
        for (int each = stage > 1; each < 2; each++) {
            struct model m;
            struct watch w;
            make_model(&m, 3, 2, 1, "0(0) 1(1) 2(2) 2[2] 1[1] 0[0]");
            if (stage < 2)
                make_resident(&m, stage);
            m.spec.grad_accum_steps = 2;
            m.spec.reduce_each = each;
            watch_open(&w, &m.spec);
            if (stage < 2)
                watch_run(&w, "2[2] X"); /* other units may have been written without brackets */
            else
                refused(&w, ZR_EV_DROP, 0, 0, ZERO_ERR_ORDER, "nothing to drop");
            if (each)
                refused(&w, ZR_EV_NORM, 0, 0, ZERO_ERR_ORDER,
                        stage < 2 ? "zero_norm: zero_micro ended 0 micro-batches" : "zero_norm: no backward");
            watch_run(&w, "0(0) 1(1) 2(2) 2[2] 1[1] 0[");
            refused(&w, ZR_EV_NORM, 0, 0, ZERO_ERR_ORDER, "zero_norm: unit 0 has an open bracket");
            refused(&w, ZR_EV_DROP, 0, 0, ZERO_ERR_ORDER, "zero_drop: unit 0 has an open bracket");
            watch_run(&w, "0]");
            refused(&w, ZR_EV_NORM, 0, 0, ZERO_ERR_ORDER, "zero_norm: micro-batches are missing");
            watch_run(&w, "2[2] 1[1] 0[0] N N");
            assert_true(zr_core_complete(w.core) && !zr_core_between_steps(w.core));
            refused(&w, ZR_EV_BEGIN, 1, ZERO_BACKWARD, ZERO_ERR_ORDER, "after zero_norm");
            refused(&w, ZR_EV_MICRO, 0, 0, ZERO_ERR_ORDER, "zero_norm has ended");
            refused(&w, ZR_EV_SNAPSHOT, -1, 0, ZERO_ERR_ORDER, "a step has begun");
            watch_run(&w, "1(1) N S"); /* a forward bracket is always allowed */
            assert_true(!zr_core_complete(w.core) && zr_core_between_steps(w.core));
            refused(&w, ZR_EV_DROP, 0, 0, ZERO_ERR_ORDER, "nothing to drop");
            /* Steps are dropped in the middle, at the end, and after the norm. */
            watch_run(&w, "2[2] 1[1] X 2[2] 1[1] 0[0] 0[0] X 1[1] 1[1] N X 2[2] 1[1] 0[0] 1[1] 0[0] S");
            assert_int_equal(n_actions(&w, ZR_ACT_NORM, -1), 1);
            watch_run(&w, "0(0) 1(1) 2(2) 2[2] 1[1] 0[0] 2[2] 1[1] 0[0] N S");
            watch_close(&w);
        }
}

/* A pipeline's order is that of a whole step with interleaved micro-batches. It is followed from the first
 * call on, though that call comes again before any backward. An evaluation between steps does not change
 * it. */
static void orders_of_a_step(void **state)
{
    static const char *const orders[] = {
        "0(0) 1(1) 2(2) 0(0) 1(1) 2(2) 2[2] 1[1] 0[0] 0(0) 1(1) 2(2) 2[2] 1[1] 0[0] 2[2] 1[1] 0[0]",
        "0(0) 1(1) 2(2) 0(0) 1(1) 2(2) 0(0) 1(1) 2(2) 2[2] 1[1] 0[0] 2[2] 1[1] 0[0] 2[2] 1[1] 0[0]"};
    for (int k = 0; k < 2; k++)
        for (int stage = 0; stage < 4; stage++) {
            struct model m;
            struct watch w;
            make_model(&m, 3, 2, 1, orders[k]);
            if (stage < 2)
                make_resident(&m, stage);
            m.spec.grad_accum_steps = 3;
            m.spec.order_of_step = true;
            m.spec.n_sums = 2;
            watch_open(&w, &m.spec);
            for (int step = 0; step < 3; step++) {
                watch_run(&w, orders[k]);
                refused(&w, ZR_EV_EVALUATED, -1, 0, ZERO_ERR_ORDER, "so this is not an evaluation");
                watch_run(&w, "S");
            }
            assert_int_equal(zr_core_counts(w.core).n_strays, 0);
            watch_run(&w, "0(0) 1(1) 2(2) 0(");
            refused(&w, ZR_EV_EVALUATED, -1, 0, ZERO_ERR_ORDER, "unit 0 has an open bracket");
            watch_run(&w, "0) 1(1) 2(2) 0(0) 1(1) 2(2) E");
            int64_t strays = zr_core_counts(w.core).n_strays, demand = w.n_demand_gathers;
            watch_run(&w, orders[k]);
            assert_true(w.n_demand_gathers == demand); /* the first gather was under way */
            watch_run(&w, "S");
            watch_run(&w, orders[k]);
            watch_run(&w, "S");
            assert_int_equal(zr_core_counts(w.core).n_strays, strays);
            assert_int_equal(zr_core_counts(w.core).n_replans, 0);
            watch_run(&w, orders[k]);
            refused(&w, ZR_EV_BEGIN, 2, ZERO_BACKWARD, ZERO_ERR_ORDER, "unit 2 has had 3 backward brackets");
            watch_close(&w);
        }
}

/* The order was only assumed. The model's own order differs and is learned as a whole, however often its
 * first call comes. */
static void orders_of_a_step_are_learned(void **state)
{
#define THRICE(calls) calls calls calls
    static const char assumed[] = THRICE("0(0) 1(1) 2(2) 3(3) ") THRICE("3[3] 2[2] 1[1] 0[0] ");
    static const char own[] = THRICE("0( 1(1) 2(2) 3(3) 0) ") THRICE("0[ 3[3] 2[2] 1[1] 0] ");
    struct model m;
    struct watch w;
    make_model(&m, 4, 3, 1, assumed);
    m.spec.grad_accum_steps = 3;
    m.spec.order_of_step = true;
    watch_open(&w, &m.spec);
    watch_run(&w, own);
    watch_run(&w, "S");
    int64_t strays = zr_core_counts(w.core).n_strays;
    int64_t demand = w.n_demand_gathers;
    assert_true(strays > 0);
    for (int step = 0; step < 2; step++) {
        watch_run(&w, own);
        watch_run(&w, "S");
    }
    assert_int_equal(w.n_demand_gathers, demand);
    assert_int_equal(w.core->n_order, 3 * 16); /* all calls of a step */
    assert_int_equal(zr_core_counts(w.core).n_strays, strays);
    assert_int_equal(zr_core_counts(w.core).n_replans, 1);
    watch_close(&w);
}

/* A norm begins a step, with and without brackets. */
static void norm_without_brackets(void **state)
{
    struct model m;
    struct watch w;
    make_model(&m, 2, 0, 0, "");
    make_resident(&m, 1);
    watch_open(&w, &m.spec);
    w.unit[0].no_brackets = w.unit[1].no_brackets = true;
    watch_run(&w, "N");
    refused(&w, ZR_EV_SNAPSHOT, -1, 0, ZERO_ERR_ORDER, "a step has begun");
    refused(&w, ZR_EV_EVALUATED, -1, 0, ZERO_ERR_ORDER, "a step has begun");
    watch_run(&w, "S N X");
    assert_int_equal(watch_call(&w, ZR_EV_SNAPSHOT, -1, 0), 0);
    watch_close(&w);
}

/* All parameters can be gathered, whatever the slots hold. Brackets then need no gather, and the order is
 * kept. */
static void everything_at_once(void **state)
{
    for (int32_t n_slots = 1; n_slots <= 4; n_slots++)
        for (int stage = 0; stage < 4; stage++) {
            struct model m;
            struct watch w;
            make_model(&m, 4, n_slots, 1, DEFAULT_ORDER);
            if (stage < 3)
                make_resident(&m, stage);
            m.spec.model_holds = stage < 2;
            m.spec.n_grad_slots = stage < 2 ? 0 : 2;
            watch_open(&w, &m.spec);
            watch_run(&w, DEFAULT_ORDER "S");
            int64_t before = w.n_gathers;
            for (int32_t u = 0; u < 4; u++)
                before -= slot_of(&w, u) >= 0;
            watch_run(&w, "G");
            assert_int_equal(w.n_gathers - before, stage < 3 ? 0 : 4);
            refused(&w, ZR_EV_GATHER_ALL, 0, 0, ZERO_ERR_ORDER, "call zero_release_all first");
            refused(&w, ZR_EV_BEGIN, 1, ZERO_BACKWARD, ZERO_ERR_ORDER,
                    "unit 1 in backward while zero_gather_all");
            refused(&w, ZR_EV_STEP, 1, ZERO_BACKWARD, ZERO_ERR_ORDER, "zero_step: zero_gather_all holds");
            uint64_t held = zr_core_hash(w.core);
            watch_run(&w, "1(");
            uint64_t begun = zr_core_hash(w.core);
            watch_run(&w, "1)");
            assert_true(begun != held && zr_core_hash(w.core) != begun);
            watch_run(&w, "3( 1( 2( 0( 3) 1) 2) ");
            refused(&w, ZR_EV_RELEASE_ALL, 0, 0, ZERO_ERR_ORDER, "unit 0 has an open bracket");
            watch_run(&w, "0) R");
            if (stage == 3)
                assert_true(slot_of(&w, 0) >= 0); /* gathered ahead again */
            refused(&w, ZR_EV_RELEASE_ALL, 0, 0, ZERO_ERR_ORDER, "there was no zero_gather_all");
            watch_run(&w, "0(0) 1(1) 2(2) 3(3) 3[3] G 2(2) R 2[2] 1[1] 0[0] N G R S" DEFAULT_ORDER "S");
            assert_int_equal(zr_core_counts(w.core).n_replans, 0);
            assert_int_equal(zr_core_counts(w.core).n_strays, 0);
            watch_close(&w);
        }
}

/* The core does not learn from a dropped step. */
static void dropped_steps_are_forgotten(void **state)
{
    struct model m;
    struct watch w;
    make_model(&m, 4, 2, 1, DEFAULT_ORDER);
    watch_open(&w, &m.spec);
    watch_run(&w, DEFAULT_ORDER "S 3(3) 3[3] 0(0) 0[0] X");
    assert_int_equal(zr_core_counts(w.core).n_replans, 0);
    int64_t strays = zr_core_counts(w.core).n_strays;
    watch_run(&w, DEFAULT_ORDER "S" DEFAULT_ORDER "N S");
    assert_int_equal(zr_core_counts(w.core).n_replans, 0);
    assert_int_equal(zr_core_counts(w.core).n_strays, strays);
    watch_close(&w);
}

/* Tests whether the calls show that the model cannot have written a gradient. */
static void writes_nothing(void **state)
{
    struct model m;
    struct watch w;
    make_model(&m, 3, 0, 0, "0(0) 1(1) 2(2) 2[2] 1[1] 0[0]");
    make_resident(&m, 1);
    m.units[2].trainable = false;
    watch_open(&w, &m.spec);
    assert_false(zr_core_wrote_nothing(w.core));
    watch_run(&w, "2[ 2] 1[");
    assert_false(zr_core_wrote_nothing(w.core)); /* unit 0 has no brackets yet */
    watch_run(&w, "1] S");
    assert_false(zr_core_wrote_nothing(w.core));
    w.unit[0].no_brackets = false;
    watch_run(&w, "0[ 0]");
    assert_false(zr_core_wrote_nothing(w.core));
    watch_run(&w, "S 2( 2)");
    assert_true(zr_core_wrote_nothing(w.core));
    watch_run(&w, "2[ 2]"); /* this step leaves out the others */
    assert_false(zr_core_wrote_nothing(w.core));
    watch_close(&w);
}

/* An error about a missing slot names units that hold one. */
static void no_slot_names_holders(void **state)
{
    struct model m;
    struct watch w;
    make_model(&m, 4, 2, 1, DEFAULT_ORDER);
    watch_open(&w, &m.spec);
    watch_run(&w, "0( 0[ 3(");
    refused(&w, ZR_EV_BEGIN, 2, ZERO_FORWARD, ZERO_ERR_BUDGET,
            "Open units: 0 (forward and backward), 3 (forward). Is a zero_end missing?");
    watch_run(&w, "3) 1[");
    refused(&w, ZR_EV_BEGIN, 0, ZERO_FORWARD, ZERO_ERR_ORDER, "already open");
    watch_run(&w, "0)");
    refused(&w, ZR_EV_BEGIN, 2, ZERO_BACKWARD, ZERO_ERR_BUDGET, "0 (backward), 1 (backward)");
    watch_close(&w);
}

/* Two different sequences of calls have different hashes, and calls that fail do not change the hash. */
/* The slot of an ended bracket is used at once, not when the next bracket begins. */
static void an_end_makes_room(void **state)
{
    struct model m;
    struct watch w;
    make_model(&m, 4, 2, 2, DEFAULT_ORDER);
    watch_open(&w, &m.spec);
    watch_run(&w, "0(");
    assert_true(slot_of(&w, 1) >= 0 && slot_of(&w, 2) < 0);
    watch_run(&w, "0)");
    assert_true(slot_of(&w, 1) >= 0 && slot_of(&w, 2) >= 0);
    watch_run(&w, "1(1) 2(2) 3(3) 3[3] 2[2] 1[1] 0[0] S");
    watch_close(&w);
}

/* After a unit was skipped or used again, the units that follow it in the order are gathered ahead again. */
static void order_is_found_again(void **state)
{
    struct model m;
    struct watch w;
    make_model(&m, 6, 2, 1, "0(0) 1(1) 2(2) 3(3) 4(4) 5(5) 5[5] 4[4] 3[3] 2[2] 1[1] 0[0]");
    watch_open(&w, &m.spec);
    watch_run(&w, "0(0) 1(1) 3(");
    assert_true(slot_of(&w, 4) >= 0);
    watch_run(&w, "3) 4(4) 5(5) 5[5] 4[4] 3[3] 2[2] 1[1] 0[0] S");
    watch_close(&w);
    watch_open(&w, &m.spec);
    watch_run(&w, "0(0) 1(1) 2(2)");
    assert_true(slot_of(&w, 3) >= 0);
    watch_run(&w, "1(");
    assert_true(slot_of(&w, 2) >= 0 && slot_of(&w, 3) < 0);
    watch_run(&w, "1) 2(2) 3(3) 4(4) 5(5) 5[5] 4[4] 3[3] 2[2] 1[1] 0[0] S");
    watch_close(&w);
    /* Inside an open bracket no pass begins: the second use of unit 1 is the one after unit 2. */
    make_model(&m, 4, 3, 1, "0( 1(1) 2(2) 1(1) 3(3) 0) 3[3] 2[2] 1[1] 0[0]");
    watch_open(&w, &m.spec);
    watch_run(&w, "0( 1(1) 1(");
    assert_true(slot_of(&w, 3) >= 0);
    watch_run(&w, "1) 3(3) 0) 3[3] 2[2] 1[1] 0[0] S");
    watch_close(&w);
    /* Backward goes back to the forward of unit 4, and unit 5 comes after it. */
    make_model(&m, 6, 2, 1, "0(0) 1(1) 2(2) 3(3) 4(4) 5(5) 5[5] 4[4] 3[3] 2[2] 1[1] 0[0]");
    watch_open(&w, &m.spec);
    watch_run(&w, "0(0) 1(1) 2(2) 3(3) 4(4) 5(5) 5[5] 4[4] 3[3]");
    assert_true(slot_of(&w, 5) < 0);
    watch_run(&w, "4(");
    assert_true(slot_of(&w, 5) >= 0);
    watch_run(&w, "4) 2[2] 1[1] 0[0] S");
    watch_close(&w);
}

/* A step with more calls than the record holds is not learned: a cut order would be wrong. */
static void too_long_an_order(void **state)
{
    struct model m;
    struct watch w;
    make_model(&m, 2, 2, 1, "0(0) 1(1) 1[1] 0[0]");
    watch_open(&w, &m.spec);
    watch_run(&w, "0(0) 1(1) 1[1] 0[0]");
    for (int i = 0; i < 1000; i++)
        watch_run(&w, "0(0)");
    watch_run(&w, "S");
    assert_int_equal(zr_core_counts(w.core).n_replans, 0);
    watch_run(&w, "0(0) 1(1) 1[1] 0[0] S");
    assert_int_equal(zr_core_counts(w.core).n_replans, 0);
    watch_close(&w);
}

/* Makes the calls of a script `times` times without the watch, which is too slow for very many. */
static void run_bare(struct zr_core *c, const char *script, int32_t times, struct zr_action *out)
{
    for (int32_t i = 0; i < times; i++) {
        const char *at = script;
        enum zr_core_event_kind kind;
        int32_t unit, n;
        enum zero_phase phase;
        while (watch_parse(&at, &kind, &unit, &phase)) {
            struct zr_core_event ev = {.kind = kind, .unit = unit, .phase = phase};
            assert_int_equal(zr_core_take(c, &ev, out, &n), 0);
        }
    }
}

/* A step with more calls than the record holds is learned if it repeats its first calls, and only then. */
static void a_long_step_that_repeats(void **state)
{
    enum { ACCUM = 30000 };
    static const struct {
        const char *order, *micro, *odd; /* odd: made once, before the last micro-batch */
        bool learned;
    } of[] = {{"0(0) 1(1) 1[1] 0[0]", "1(1) 0(0) 0[0] 1[1]", "", true},
              {"0(0) 1(1) 1[1] 0[0]", "0(0) 1(1) 1(1) 1[1] 0[0] 0(0)", "", true}, /* ends as it begins */
              {"0(0) 1(1) 1[1] 1[1] 1[1] 0[0]", "1[1] 1[1] 0(0) 1[1]", "", true}, /* repeats inside */
              {"0(0) 1(1) 1[1] 0[0]", "1(1) 0(0) 0[0] 1[1]", "1(1)", false},
              {"0(0) 1(1) 1[1] 0[0]", "1(1) 0(0) 0[0] 1[1]", "0(0)", false}};
    for (size_t k = 0; k < sizeof of / sizeof *of; k++) {
        struct model m;
        make_model(&m, 2, 1, 1, of[k].order);
        m.spec.grad_accum_steps = ACCUM;
        void *mem = aligned_alloc(16, zr_core_bytes(&m.spec));
        struct zr_action *out = malloc((size_t)zr_core_max_actions(&m.spec) * sizeof *out);
        assert_true(mem && out);
        struct zr_core *c = zr_core_init(mem, &m.spec);
        run_bare(c, of[k].order, ACCUM, out);
        run_bare(c, "S", 1, out);
        assert_int_equal(zr_core_counts(c).n_strays, 0);
        assert_int_equal(zr_core_counts(c).n_replans, 0);
        for (int step = 0; step < 1 + of[k].learned; step++) {
            run_bare(c, of[k].micro, ACCUM - 1, out);
            run_bare(c, of[k].odd, 1, out);
            run_bare(c, of[k].micro, 1, out);
            int64_t strays = zr_core_counts(c).n_strays;
            run_bare(c, "S", 1, out);
            assert_int_equal(zr_core_counts(c).n_replans, of[k].learned);
            run_bare(c, of[k].micro, 1, out);
            CHECK((zr_core_counts(c).n_strays == strays) == of[k].learned, "case %zu", k);
            run_bare(c, of[k].micro, ACCUM - 1, out);
            run_bare(c, "S", 1, out);
        }
        free(mem);
        free(out);
    }
}

/* At stages 0 and 1 a step waits only for the parameters of units without forward brackets. The gathers of
 * other units go on during the next forward. Used gradients are handed out zeroed. */
static void brackets_buy_overlap(void **state)
{
    struct model m;
    struct watch w;
    make_model(&m, 3, 0, 1, "0(0) 1(1) 2(2) 2[2] 1[1] 0[0]");
    make_resident(&m, 1);
    m.spec.reduce_each = false;
    m.spec.grad_accum_steps = 2;
    watch_open(&w, &m.spec);
    w.unit[2].no_brackets = true;
    for (int i = 0; i < 2; i++) {
        /* Unit 1 is not used in the second micro-batch. It is reduced at the step, and needs no other
         * action. */
        watch_run(&w, "0(0) 1(1) 1[1] 0[0] 0(0) 0[0] S");
        assert_int_equal(n_actions(&w, ZR_ACT_WAIT_PARAM, 0) + n_actions(&w, ZR_ACT_WAIT_PARAM, 1), 0);
        assert_int_equal(n_actions(&w, ZR_ACT_HIDE_GRAD, 1), 0);
        assert_int_equal(n_actions(&w, ZR_ACT_USE_GRAD, 1), 1);
        assert_int_equal(n_actions(&w, ZR_ACT_REDUCE, 1), 1);
        assert_int_equal(n_actions(&w, ZR_ACT_WAIT_PARAM, 2), 1);
        assert_int_equal(n_actions(&w, ZR_ACT_HIDE_GRAD, 2) + n_actions(&w, ZR_ACT_USE_GRAD, 2), 0);
        assert_int_equal(n_actions(&w, ZR_ACT_LEAVE_OUT, 2), 1);
    }
    watch_close(&w);
}

static void hash_tells_calls_apart(void **state)
{
    enum { N_UNITS = 64, N_CALLS = 8 * N_UNITS, N_OTHERS = 7, N = N_CALLS + N_OTHERS + 1 };
    static const enum zr_core_event_kind others[N_OTHERS] = {
        ZR_EV_MICRO, ZR_EV_STEP, ZR_EV_SNAPSHOT, ZR_EV_NORM, ZR_EV_DROP, ZR_EV_GATHER_ALL, ZR_EV_EVALUATED};
    struct zr_core_unit_spec units[N_UNITS];
    for (int i = 0; i < N_UNITS; i++)
        units[i] = (struct zr_core_unit_spec){.resident = true};
    struct zero_call order[2] = {{.phase = ZERO_FORWARD}, {.phase = ZERO_FORWARD, .is_end = 1}};
    struct zr_core_spec spec = {.order = order,
                                .n_order = 2,
                                .n_units = N_UNITS,
                                .units = units,
                                .grad_accum_steps = 2,
                                .model_holds = true,
                                .n_sums = 1,
                                .reduce_each = true};
    void *mem = aligned_alloc(16, zr_core_bytes(&spec));
    struct zr_action *out = malloc((size_t)zr_core_max_actions(&spec) * sizeof *out);
    uint64_t hash[N];
    int32_t n_out;
    for (int i = 0; i < N; i++) {
        struct zr_core *c = zr_core_init(mem, &spec);
        struct zr_core_event ev = {.kind = others[i < N_CALLS ? 0 : (i - N_CALLS) % N_OTHERS]};
        if (i < N_CALLS) {
            ev = (struct zr_core_event){
                .kind = ZR_EV_BEGIN, .unit = i / 8, .phase = ZERO_FORWARD + (i & 1) + (i >> 2 & 1) * 2};
            if (i & 2) { /* the end, after the same begin */
                assert_int_equal(zr_core_take(c, &ev, out, &n_out), 0);
                ev.kind = ZR_EV_END;
            }
        }
        if (i < N - 1) /* the last makes no call at all */
            assert_int_equal(zr_core_take(c, &ev, out, &n_out), 0);
        hash[i] = zr_core_hash(c);
        ev = (struct zr_core_event){.kind = ZR_EV_END, .unit = N_UNITS};
        assert_int_equal(zr_core_take(c, &ev, out, &n_out), ZERO_ERR_ARG);
        assert_int_equal(zr_core_hash(c), hash[i]);
        for (int j = 0; j < i; j++)
            CHECK(hash[i] != hash[j], "calls %d and %d have one hash", i, j);
    }
    free(mem);
    free(out);
}

/* ---- accumulation ---- */

static void replace_leaves(char *to, const char *tree, int32_t world)
{
    *to = 0;
    while (*tree) {
        if (strchr("()+", *tree)) {
            char one[2] = {*tree++, 0};
            strcat(to, one);
            continue;
        }
        char *end;
        int32_t id = (int32_t)strtol(tree, &end, 10);
        tree_text(to + strlen(to), id * world, world);
        tree = end;
    }
}

/* Accumulation adds micro-batches in one fixed tree. Together with the tree over ranks inside it, that is
 * the tree over global ids. */
static void sums_are_one_tree(void **state)
{
    for (int32_t accum = 1; accum <= 9; accum++) {
        for (int stage = 0; stage <= 3; stage++) {
            for (int bracketed = 0; bracketed < (stage <= 1 ? 2 : 1) + (stage > 1); bracketed++) {
                struct model m;
                struct watch w;
                char expected[SUM_TEXT], global[SUM_TEXT];
                make_model(&m, 2, 2, 1, "0(0) 1(1) 1[1] 0[0]");
                m.spec.grad_accum_steps = accum;
                m.spec.n_sums = sums_for(accum);
                if (stage <= 1)
                    make_resident(&m, stage);
                m.spec.gathers_updated = stage > 0;
                watch_open(&w, &m.spec);
                bool brackets = stage > 1 || bracketed;
                w.unit[0].no_brackets = w.unit[1].no_brackets = !brackets;
                for (int step = 0; step < 3; step++) {
                    for (int32_t a = 0; a < accum; a++) {
                        if (brackets)
                            watch_run(&w, "0(0) 1(1) 1[1] 0[0]");
                        if (a + 1 < accum && !brackets)
                            watch_run(&w, "M");
                    }
                    watch_run(&w, "S");
                    tree_text(expected, 0, accum);
                    assert_string_equal(w.unit[0].last_sum, expected);
                    assert_string_equal(w.unit[1].last_sum, expected);
                }
                for (int32_t world = 1; world <= 8; world *= 2) {
                    replace_leaves(global, w.unit[0].last_sum, world);
                    tree_text(expected, 0, accum * world);
                    assert_string_equal(global, expected);
                }
                watch_close(&w);
            }
        }
    }
}

/* With groups there is a second reduction. It comes once per step, where the last declared contribution
 * ends, or after each contribution, in the tree's shape. */
static void groups_reduce_again(void **state)
{
    for (int accum = 1; accum <= 5; accum++) {
        for (int way = 0; way < 4; way++) {
            bool each = way & 1, gathers = way & 2;
            struct model m;
            struct watch w;
            char expected[SUM_TEXT];
            make_model(&m, 2, 2, 1, "0(0) 1(1) 1[1] 0[0]");
            m.spec.grad_accum_steps = accum;
            m.spec.outer = true;
            m.spec.outer_each = each;
            m.spec.outer_gathers = gathers;
            m.spec.n_group_slots = each;
            m.spec.n_sums = each ? sums_for(accum) : 1;
            watch_open(&w, &m.spec);
            for (int step = 0; step < 3; step++) {
                for (int a = 0; a < accum; a++) {
                    assert_int_equal(w.unit[1].n_outer, each ? a : 0);
                    watch_run(&w, "0(0) 1(1) 1[1]");
                    assert_int_equal(n_actions(&w, ZR_ACT_REDUCE, 1), 1);
                    assert_int_equal(n_actions(&w, ZR_ACT_REDUCE_OUTER, 1), each || a + 1 == accum);
                    watch_run(&w, "0[0]");
                }
                watch_run(&w, step == 1 ? "N S" : "S");
                for (int u = 0; u < 2; u++)
                    assert_int_equal(n_actions(&w, ZR_ACT_GATHER_OUTER, u), gathers);
                if (each) {
                    tree_text(expected, 0, accum);
                    assert_string_equal(w.unit[0].last_sum, expected);
                }
            }
            /* After a drop, only sums that other groups gather have to be waited for. */
            for (int a = 0; a < accum; a++)
                watch_run(&w, "0(0) 1(1) 1[1] 0[0]");
            watch_run(&w, "X");
            assert_int_equal(n_actions(&w, ZR_ACT_DROP_SUMS, -1), !each && !gathers);
            /* A bracket that was not declared. */
            for (int a = 0; a < accum; a++)
                watch_run(&w, "0(0) 1(1) 1[1] 0[0]");
            refused(&w, ZR_EV_BEGIN, 1, ZERO_BACKWARD, ZERO_ERR_ORDER, "Is a zero_step missing?");
            watch_run(&w, "S");
            watch_close(&w);
        }
    }
}

/* With fewer contributions than declared, the step reduces their sum between groups. One more contribution
 * is refused. */
static void groups_reduce_fewer_uses(void **state)
{
    static const char *const sum[] = {"0", "(0+1)", "((0+1)+2)"};
    for (int way = 0; way < 4; way++) {
        bool gathers = way & 1, asks = way & 2;
        struct model m;
        struct watch w;
        make_model(&m, 2, 2, 1, "0(0) 1(1) 1[1] 1[1] 1[1] 0[0]");
        m.spec.outer = true;
        m.spec.outer_gathers = gathers;
        watch_open(&w, &m.spec);
        for (int step = 0; step < 6; step++) {
            int n_uses = 1 + step % 3;
            watch_run(&w, "0(0) 1(1) 0[0]");
            for (int use = 1; use <= n_uses; use++) {
                watch_run(&w, "1[1]");
                assert_int_equal(n_actions(&w, ZR_ACT_REDUCE_OUTER, 1), use == 3);
            }
            if (n_uses == 3)
                refused(&w, ZR_EV_BEGIN, 1, ZERO_BACKWARD, ZERO_ERR_ORDER,
                        "unit 1 has had 3 backward brackets");
            watch_run(&w, asks ? "N" : "S");
            assert_int_equal(n_actions(&w, ZR_ACT_REDUCE_OUTER, 1), n_uses < 3);
            watch_run(&w, asks ? "S" : "");
            assert_string_equal(w.unit[1].last_sum, sum[n_uses - 1]);
            /* Steps are dropped in the middle and at the end. The next step starts from zero. */
            watch_run(&w, "0(0) 1(1) 1[1] 1[1] X");
            assert_int_equal(n_actions(&w, ZR_ACT_DROP_SUMS, -1), 0);
            watch_run(&w, "0(0) 1(1) 1[1] 1[1] 1[1] X");
            assert_int_equal(n_actions(&w, ZR_ACT_DROP_SUMS, -1), !gathers);
            watch_run(&w, "0(0) 1(1) 1[1] 1[1] N X"); /* the norm has reduced them between groups */
            assert_int_equal(n_actions(&w, ZR_ACT_DROP_SUMS, -1), !gathers);
        }
        watch_close(&w);
    }
}

/* The declared uses of a unit are summed before the sum goes between groups. */
static void groups_wait_for_declared_uses(void **state)
{
    struct model m;
    struct watch w;
    make_model(&m, 2, 2, 1, "0(0) 1(1) 1[1] 0[0] 1[1]");
    m.spec.grad_accum_steps = 2;
    m.spec.outer = true;
    watch_open(&w, &m.spec);
    for (int step = 0; step < 3; step++) {
        watch_run(&w, "0(0) 1(1) 1[1] 0[0] 1[1] 0(0) 1(1) 1[1] 0[0]");
        assert_int_equal(w.unit[1].n_outer, 0);
        watch_run(&w, "1[1]");
        assert_int_equal(w.unit[1].n_outer, 1);
        assert_string_equal(w.unit[1].sum[0], "(((0+1)+2)+3)");
        watch_run(&w, "S");
    }
    watch_close(&w);
}

/* The same for a model that has its gradients only inside brackets. They have their own memory until the
 * last micro-batch, take no slot, and are zeroed once per step. */
static void whole_until_the_last_micro_batch(void **state)
{
    struct model m;
    struct watch w;
    make_model(&m, 2, 2, 1, "0(0) 1(1) 1[1] 0[0]");
    m.spec.grad_accum_steps = 3;
    m.spec.reduce_each = false;
    m.spec.n_grad_slots = 0;
    m.units[0].grad_home = m.units[1].grad_home = true;
    watch_open(&w, &m.spec);
    for (int step = 0; step < 4; step++) {
        int64_t before = w.n_reduces;
        for (int a = 0; a < 3; a++) {
            watch_run(&w, "0(0) 1(1) 1[");
            assert_int_equal(n_actions(&w, ZR_ACT_USE_GRAD, 1), 1);
            bool filled = false;
            for (int32_t i = 0; i < w.n_out; i++)
                filled |= w.out[i].kind == ZR_ACT_USE_GRAD && w.out[i].fill && w.out[i].slot == -1;
            CHECK(filled == (a == 0 && step > 0), "step %d, micro-batch %d", step,
                  a); /* arenas start as zeros */
            watch_run(&w, "1] 0[0]");
        }
        assert_int_equal(w.n_reduces - before, 2);
        watch_run(&w, step == 1 ? "N X" : step == 2 ? "N S" : "S");
    }
    /* A unit with fewer passes is reduced at the step. What was dropped before does not come back. */
    watch_run(&w, "0(0) 1(1) 1[1] 0[0] 0(0) 1(1) 1[1] 0(0) 1(1) 1[1] N S");
    watch_run(&w, "0(0) 1(1) 1[1] 0[0] X");
    watch_run(&w, "0(0) 1(1) 1[1] 0[0] 0(0) 1(1) 1[1] 0[0] 0(0) 1(1) 1[1] 0[0] S");
    watch_close(&w);
}

/* Without reduce_each the model sums into its own gradient, and there is one reduce. */
static void reduces_once(void **state)
{
    struct model m;
    struct watch w;
    make_model(&m, 2, 0, 0, "0(0) 1(1) 1[1] 0[0]");
    make_resident(&m, 1);
    m.spec.grad_accum_steps = 4;
    m.spec.reduce_each = false;
    watch_open(&w, &m.spec);
    for (int step = 1; step <= 3; step++) {
        for (int a = 0; a < 4; a++)
            watch_run(&w, "0(0) 1(1) 1[1] 0[0]");
        watch_run(&w, "S");
        assert_int_equal(w.n_reduces, 2 * step);
        assert_string_equal(w.unit[0].last_sum, "(((0+1)+2)+3)");
    }
    watch_close(&w);
}

/* A model may zero its gradients between its micro-batches, at any place in its code. A gradient that is
 * being reduced is returned when a micro-batch ends. It must not be returned before, which would lose the
 * overlap, nor in the next micro-batch. */
static void gradients_are_returned(void **state)
{
    static const struct {
        const char *order, *first, *then;
        int accum;
        bool once, frozen;
    } cases[] = {
        /* The order is known. */
        {"0(0) 1(1) 1[1] 0[0]", NULL, "0(0) 1(1) 1[1] 0[0]! S", 1, false, false},
        {"0(0) 1(1) 1[1] 0[0]", NULL, "0(0) 1(1) 1[1] 0[0]! 0(0) 1(1) 1[1] 0[0]! S", 2, false, false},
        {"0(0) 1(1) 1[1] 0[0]", NULL, "0(0) 1(1) 1[1] 0[0] 0(0) 1(1) 1[1] 0[0]! S", 2, true, false},
        /* A unit is open through all of backward, or its forward bracket is open all the time. */
        {"0( 1(1) 0) 0[ 1[1] 0]", NULL, "0( 1(1) 0) 0[ 1[1] 0]! 0( 1(1) 0) 0[ 1[1] 0]! S", 2, false, false},
        {"0( 1(1) 1[1] 0[0] 0)", NULL, "0( 1(1) 1[1] 0[0]! 0) 0( 1(1) 1[1] 0[0]! 0) S", 2, false, false},
        /* Backward only; a forward before each backward; a unit used twice; a frozen unit. */
        {"1[1] 0[0]", NULL, "1[1] 0[0]! 1[1] 0[0]! S", 2, false, false},
        {"0(0) 1(1) 1(1) 1[1] 0(0) 0[0]", NULL, "0(0) 1(1) 1(1) 1[1] 0(0) 0[0]! S", 1, false, false},
        {"0(0) 1(1) 0[0] 1[1] 0[0]", NULL, "0(0) 1(1) 0[0] 1[1] 0[0]! 0(0) 1(1) 0[0] 1[1] 0[0]! S", 2, false,
         false},
        {"0(0) 1(1) 1[1] 0[0]", NULL, "0(0) 1(1) 1[1]! 0[0] 0(0) 1(1) 1[1]! 0[0] S", 2, false, true},
        {"0(0) 1(1) 0[ 1[1] 0]", NULL, "0(0) 1(1) 0[ 1[1] 0]! 0(0) 1(1) 0[ 1[1] 0]! S", 2, false, true},
        /* The order is not the declared one. Until it is learned, each end may be the last of a
         * micro-batch. */
        {"0(0) 1(1) 1[1] 0[0]", "1(1) 0(0) 0[0]! 1[1]! 1(1) 0(0) 0[0]! 1[1]! S",
         "1(1) 0(0) 0[0] 1[1]! 1(1) 0(0) 0[0] 1[1]! S", 2, false, false},
        /* A micro-batch ends early. The next forward, zero_micro or the step shows it. */
        {"0(0) 1(1) 1[1] 0[0]", "0(0) 1(1) 1[1] 0(!0) 1(1) 1[1]! 0[0]! S",
         "0(0) 1(1) 1[1]! 0(0) 1(1) 1[1]! 0[0]! S", 2, false, false},
        {"0(0) 1(1) 1[1] 0[0]", "0(0) 1(1) 1[1] M! 0(0) 1(1) 1[1]! S", "0(0) 1(1) 1[1]! M 0(0) 1(1) 1[1]! S",
         2, false, false},
        {"0(0) 1(1) 1[1] 0[0]", "0(0) 1(1) 1[1] S!", "0(0) 1(1) 1[1]! S", 1, false, false},
        /* Micro-batches have different numbers of calls, so the calls do not show where one ends. */
        {"0(0) 1(1) 1[1] 0[0]",
         "0(0) 1(1) 1[1] 0[0]! 0(0) 0[0]! S 0(0) 1(1) 1[1]! 0[0]! 0(0) 1(1) 1[1]! 0[0]! S",
         "0(0) 1(1) 1[1] 0[0]! 0(0) 1(1) 1[1] 0[0]! S", 2, false, false},
        {"0(0) 1(1) 1[1] 0[0]", "0(0) 1(1) 1[1] 0[0]! 0(0) 0[0]! S", "0(0) 1(1) 1[1]! 0[0]! 0(0) 0[0]! S", 2,
         false, false},
        {"0(0) 1(1) 1[1] 0[0] 0[0]", "0(0) 1(1) 0[0]! 0[0]! 0[0]! 1[1]! 0(0) 1(1) 0[0]! 1[1]! S",
         "0(0) 1(1) 0[0]! 0[0]! 0[0]! 1[1]! 0(0) 1(1) 0[0]! 1[1]! S", 2, false, false},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct model m;
        struct watch w;
        make_model(&m, 2, 0, 0, cases[i].order);
        make_resident(&m, 1);
        m.spec.grad_accum_steps = cases[i].accum;
        m.spec.reduce_each = !cases[i].once;
        m.units[0].trainable = !cases[i].frozen;
        watch_open(&w, &m.spec);
        if (cases[i].first)
            watch_run(&w, cases[i].first);
        for (int step = 0; step < 2; step++)
            watch_run(&w, cases[i].then);
        watch_close(&w);
    }
}

/* A rank with two pipeline stages of two units each, in turns. Gradients are returned at the end of each
 * backward action if the order marks these, and otherwise at each place that may be one. */
static void gradients_of_stages_in_turns(void **state)
{
    static const char order[] =
        "0(0) 1(1) 0(0) 1(1) 2(2) 3(3) 2(2) 3(3) 3[3] 2[2] 3[3] 2[2] 1[1] 0[0] 1[1] 0[0]";
    static const char *const returned[] = {
        "0(0) 1(1) 0(0) 1(1) 2(2) 3(3) 2(2) 3(3) 3[3]! 2[2]! 3[3]! 2[2]! 1[1]! 0[0]! 1[1]! 0[0]! S",
        "0(0) 1(1) 0(0) 1(1) 2(2) 3(3) 2(2) 3(3) 3[3] 2[2]! 3[3] 2[2]! 1[1] 0[0]! 1[1] 0[0]! S"};
    for (int says = 0; says < 2; says++) {
        struct model m;
        struct watch w;
        make_model(&m, 4, 0, 0, order);
        make_resident(&m, 1);
        m.spec.grad_accum_steps = 2;
        m.spec.order_of_step = true;
        for (int32_t i = 0; i < m.spec.n_order; i++)
            if (says && m.order[i].phase == ZERO_BACKWARD && m.order[i].is_end && m.order[i].unit % 2 == 0)
                m.order[i].is_end = ZR_ENDS_ACTION;
        watch_open(&w, &m.spec);
        for (int step = 0; step < 3; step++)
            watch_run(&w, returned[says]);
        assert_int_equal(zr_core_counts(w.core).n_replans, 0);
        watch_close(&w);
    }
}

/* One backward bracket of unit 0 in which backward computes forward anew, many times. Returns how often it
 * returned gradients. */
static int32_t long_backward(struct zr_core *c, struct zr_action *out)
{
    int32_t n, n_returns = 0;
    struct zr_core_event end = {.kind = ZR_EV_END, .phase = ZERO_BACKWARD};
    run_bare(c, "0[", 1, out);
    run_bare(c, "0(0)", 60, out);
    assert_int_equal(zr_core_take(c, &end, out, &n), 0);
    for (int32_t k = 0; k < n; k++)
        n_returns += out[k].kind == ZR_ACT_RETURN_GRADS;
    return n_returns;
}

/* If a step is too long to record, its first micro-batch gives the ends of all micro-batches. If the step's
 * brackets do not repeat those of the first micro-batch, any bracket may end a micro-batch. */
static void gradients_of_a_long_step(void **state)
{
    for (int32_t n_brackets = 3; n_brackets <= 4; n_brackets++) {
        struct model m;
        make_model(&m, 2, 0, 0, "0(0) 1(1) 1[1] 0[0] 0[0]");
        make_resident(&m, 1);
        m.spec.grad_accum_steps = 2;
        struct zr_core *c = zr_core_init(aligned_alloc(16, zr_core_bytes(&m.spec)), &m.spec);
        struct zr_action *out = malloc((size_t)zr_core_max_actions(&m.spec) * sizeof *out);
        for (int step = 0; step < 3; step++) {
            for (int32_t i = 0; i < n_brackets; i++)
                assert_int_equal(long_backward(c, out), step == 0 || n_brackets == 3 || i % 2 == 1);
            run_bare(c, "S", 1, out);
        }
        assert_int_equal(zr_core_counts(c).n_replans, n_brackets == 4);
        free(c);
        free(out);
    }
}

/* ---- random walks ---- */

static void random_spec(struct random_source *r, struct model *m)
{
    memset(m, 0, sizeof *m);
    struct zr_core_spec *s = &m->spec;
    s->n_units = 1 + (int32_t)random_below(r, MAX_UNITS);
    int world = 1 + (int)random_below(r, 4), stage = (int)random_below(r, 4);
    s->gathers_updated = world > 1 && stage > 0;
    s->prefetch = chance(r, 10) ? 100 : (int32_t)random_below(r, 4);
    s->grad_accum_steps = chance(r, 50) ? 1 : 1 + (int32_t)random_below(r, 5);
    s->model_holds = stage <= 1;
    s->reduce_each = s->grad_accum_steps == 1 || chance(r, stage >= 2 ? 70 : 50);
    bool tree = s->reduce_each && s->grad_accum_steps > 1 && chance(r, 70);
    s->n_sums = tree ? sums_for(s->grad_accum_steps) : 1;
    bool slots = stage == 3 && world > 1;
    int64_t largest = 0;
    int in_place = chance(r, 50) ? 0 : chance(r, 50) ? 100 : 50;
    for (int32_t u = 0; u < s->n_units; u++) {
        m->units[u] = (struct zr_core_unit_spec){.param_bytes = 1 + random_below(r, chance(r, 50) ? 1 : 100),
                                                 .grad_bytes = 1 + random_below(r, 100),
                                                 .resident = !slots || chance(r, 20),
                                                 .trainable = chance(r, 80)};
        if (!m->units[u].trainable)
            m->units[u].grad_bytes = 0;
        else if (s->grad_accum_steps == 1 || !s->reduce_each)
            m->units[u].sum_in_place = chance(r, in_place);
        m->units[u].grad_home = m->units[u].trainable && !s->reduce_each;
        largest = zr_max(largest, zr_max(m->units[u].param_bytes, m->units[u].grad_bytes));
    }
    s->n_param_slots = slots ? 1 + (int32_t)random_below(r, s->n_units) : 0;
    s->n_grad_slots = s->model_holds ? 0 : 1 + (int32_t)random_below(r, s->n_units);
    for (int32_t i = 0; i < MAX_UNITS; i++) {
        m->pslot[i] = chance(r, 40) ? largest : 1 + random_below(r, 100);
        m->gslot[i] = chance(r, 40) ? largest : 1 + random_below(r, 100);
    }
    s->reserve_largest = chance(r, 30);
    if (stage == 3 && chance(r, 40)) {
        s->outer = true;
        s->outer_gathers = chance(r, 50);
        s->outer_each = tree || chance(r, 30);
        s->n_group_slots = s->outer_each ? 1 + (int32_t)random_below(r, 3) : 0;
        for (int32_t u = 0; u < s->n_units; u++)
            m->units[u].sum_in_place = false;
    }
    s->units = m->units;
    s->param_slot_bytes = m->pslot;
    s->grad_slot_bytes = m->gslot;
    s->order = m->order;
    s->n_order = random_calls(r, s->n_units, m->order);
    int32_t uses[MAX_UNITS] = {0};
    for (int32_t i = 0; i < s->n_order; i++) /* a sum in place takes one contribution */
        if (zr_phase_has_grads(m->order[i].phase) && !m->order[i].is_end && uses[m->order[i].unit]++)
            m->units[m->order[i].unit].sum_in_place = false;
}

static bool brackets_allowed(const struct watch *w, int32_t unit)
{
    return unit < 0 || unit >= w->spec.n_units || !w->unit[unit].no_brackets;
}

/* Makes any call, which is usually out of place. */
static void stray(struct random_source *r, struct watch *w)
{
    int32_t unit = (int32_t)random_below(r, w->spec.n_units + 2) - 1;
    switch (random_below(r, 15)) {
    case 0:
        watch_call(w, ZR_EV_STEP, 0, 0);
        break;
    case 3:
        watch_call(w, ZR_EV_NORM, 0, 0);
        break;
    case 4:
        watch_call(w, ZR_EV_DROP, 0, 0);
        break;
    case 5:
        watch_call(w, ZR_EV_GATHER_ALL, 0, 0);
        if (chance(r, 50))
            watch_call(w, ZR_EV_RELEASE_ALL, 0, 0);
        break;
    case 1:
        watch_call(w, ZR_EV_MICRO, 0, 0);
        break;
    case 2:
        watch_call(w, ZR_EV_REWRITE, unit, 0);
        break;
    default:
        if (brackets_allowed(w, unit))
            watch_call(w, chance(r, 50) ? ZR_EV_BEGIN : ZR_EV_END, unit,
                       (enum zero_phase)(ZERO_FORWARD + random_below(r, 4)));
    }
}

static bool may_begin(const struct watch *w, int32_t unit)
{
    const struct unit *u = &units(w->core)[unit];
    return u->n_bwd < zr_core_most_brackets(w->core, u);
}

/* Ends what is open, and makes calls until a step is allowed. */
static void finish_step(struct random_source *r, struct watch *w)
{
    for (int32_t u = 0; u < w->spec.n_units; u++)
        for (enum zero_phase p = ZERO_FORWARD; p <= ZERO_BACKWARD_WEIGHT; p++)
            if (w->unit[u].open[p])
                assert_int_equal(watch_call(w, ZR_EV_END, u, p), 0);
    if (w->all)
        assert_int_equal(watch_call(w, ZR_EV_RELEASE_ALL, 0, 0), 0);
    if (chance(r, 20))
        watch_call(w, ZR_EV_NORM, 0, 0);
    if (chance(r, 10))
        watch_call(w, ZR_EV_DROP, 0, 0);
    for (int tries = 0; tries < 100 && watch_call(w, ZR_EV_STEP, 0, 0); tries++) {
        int32_t most = 0, unit = -1;
        for (int32_t u = 0; u < w->spec.n_units; u++)
            if (w->unit[u].n_bwd >= most && may_begin(w, u) && w->spec.units[u].trainable &&
                !w->unit[u].no_brackets && (unit < 0 || chance(r, 90))) {
                unit = u;
                most = w->unit[u].n_bwd;
            }
        if (most == 0 && w->spec.model_holds && w->n_micro + 1 < w->spec.grad_accum_steps)
            watch_call(w, ZR_EV_MICRO, 0, 0);
        else if (w->unbracketed)
            watch_call(w, ZR_EV_DROP, 0, 0);
        else if (unit >= 0 && !watch_call(w, ZR_EV_BEGIN, unit, ZERO_BACKWARD))
            watch_call(w, ZR_EV_END, unit, ZERO_BACKWARD);
    }
}

static void walk(struct random_source *r)
{
    struct model m;
    struct watch w;
    struct zero_call calls[MAX_CALLS];
    random_spec(r, &m);
    watch_open(&w, &m.spec);
    int unbracketed = !m.spec.model_holds ? 0 : chance(r, 30) ? 100 : chance(r, 20) ? 30 : 0;
    for (int32_t u = 0; u < m.spec.n_units; u++)
        w.unit[u].no_brackets = chance(r, unbracketed);
    int strays = chance(r, 50) ? 0 : chance(r, 50) ? 3 : 40, n_steps = 1 + (int)random_below(r, 4);
    for (int step = 0; step < n_steps; step++) {
        if (chance(r, 20) && zr_core_between_steps(w.core) && !w.n_open)
            set_accum(&w, 1 + (int32_t)random_below(r, m.spec.grad_accum_steps));
        for (int32_t a = 0; a < w.spec.grad_accum_steps; a++) {
            int32_t n = m.spec.n_order;
            memcpy(calls, m.order, (size_t)n * sizeof *calls);
            if (chance(r, 20))
                n = random_calls(r, m.spec.n_units, calls);
            for (int32_t i = 0; i < n; i++) {
                if (brackets_allowed(&w, calls[i].unit))
                    watch_call(&w, calls[i].is_end ? ZR_EV_END : ZR_EV_BEGIN, calls[i].unit, calls[i].phase);
                if (chance(r, strays))
                    stray(r, &w);
            }
            if (unbracketed && a + 1 < w.spec.grad_accum_steps)
                watch_call(&w, ZR_EV_MICRO, 0, 0);
        }
        finish_step(r, &w);
        if (chance(r, 10))
            watch_call(&w, ZR_EV_REWRITE, (int32_t)random_below(r, m.spec.n_units), 0);
        if (chance(r, 5))
            watch_call(&w, ZR_EV_SNAPSHOT, -1, 0);
    }
    watch_close(&w);
}

static void any_calls(void **state)
{
    FOR_CASES(r, 20000)
    walk(&r);
}

/* The block is plain data and can be moved: a copy goes on like the original. */
static void a_copy_goes_on(void **state)
{
    FOR_CASES(r, 200)
    {
        struct model m;
        random_spec(&r, &m);
        size_t bytes = zr_core_bytes(&m.spec);
        void *a = aligned_alloc(16, bytes), *b = aligned_alloc(16, bytes);
        struct zr_action *out = malloc((size_t)zr_core_max_actions(&m.spec) * sizeof *out);
        struct zr_core *core = zr_core_init(a, &m.spec);
        int32_t n, half = (int32_t)random_below(&r, m.spec.n_order + 1);
        for (int32_t i = 0; i < m.spec.n_order; i++) {
            const struct zero_call *c = &m.order[i];
            struct zr_core_event ev = {
                .kind = c->is_end ? ZR_EV_END : ZR_EV_BEGIN, .unit = c->unit, .phase = c->phase};
            if (i == half)
                memcpy(b, a, bytes);
            zr_core_take(core, &ev, out, &n);
        }
        for (int32_t i = half; i < m.spec.n_order; i++) {
            const struct zero_call *c = &m.order[i];
            struct zr_core_event ev = {
                .kind = c->is_end ? ZR_EV_END : ZR_EV_BEGIN, .unit = c->unit, .phase = c->phase};
            zr_core_take(b, &ev, out, &n);
        }
        CHECK(half == m.spec.n_order || !memcmp(a, b, bytes), "the copy went another way");
        free(a);
        free(b);
        free(out);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(declared_order),
        cmocka_unit_test(fewest_gathers),
        cmocka_unit_test(prefetch_counts_units),
        cmocka_unit_test(slots_that_fit_best),
        cmocka_unit_test(small_and_empty_slots_first),
        cmocka_unit_test(who_was_left_out_goes_first),
        cmocka_unit_test(largest_slot_is_reserved),
        cmocka_unit_test(the_reserved_slot_is_left),
        cmocka_unit_test(nested_brackets_find_their_sizes),
        cmocka_unit_test(weights_need_no_parameters),
        cmocka_unit_test(gradient_slots_take_turns),
        cmocka_unit_test(room_for_all),
        cmocka_unit_test(frozen_units_stay),
        cmocka_unit_test(orders_are_learned),
        cmocka_unit_test(change_mid_run),
        cmocka_unit_test(other_micro_batches),
        cmocka_unit_test(padding_of_calls),
        cmocka_unit_test(evaluation),
        cmocka_unit_test(evaluation_before_each_step),
        cmocka_unit_test(other_micro_batches_unequal),
        cmocka_unit_test(again_behind_a_backward),
        cmocka_unit_test(other_evaluation),
        cmocka_unit_test(two_forwards_one_backward),
        cmocka_unit_test(errors_change_nothing),
        cmocka_unit_test(unit_to_flag),
        cmocka_unit_test(brackets_are_counted),
        cmocka_unit_test(norms_and_drops),
        cmocka_unit_test(dropped_steps_are_forgotten),
        cmocka_unit_test(orders_of_a_step),
        cmocka_unit_test(orders_of_a_step_are_learned),
        cmocka_unit_test(norm_without_brackets),
        cmocka_unit_test(everything_at_once),
        cmocka_unit_test(writes_nothing),
        cmocka_unit_test(no_slot_names_holders),
        cmocka_unit_test(an_end_makes_room),
        cmocka_unit_test(order_is_found_again),
        cmocka_unit_test(too_long_an_order),
        cmocka_unit_test(a_long_step_that_repeats),
        cmocka_unit_test(brackets_buy_overlap),
        cmocka_unit_test(hash_tells_calls_apart),
        cmocka_unit_test(sums_are_one_tree),
        cmocka_unit_test(whole_until_the_last_micro_batch),
        cmocka_unit_test(groups_reduce_again),
        cmocka_unit_test(groups_wait_for_declared_uses),
        cmocka_unit_test(groups_reduce_fewer_uses),
        cmocka_unit_test(reduces_once),
        cmocka_unit_test(gradients_are_returned),
        cmocka_unit_test(gradients_of_stages_in_turns),
        cmocka_unit_test(gradients_of_a_long_step),
        cmocka_unit_test(any_calls),
        cmocka_unit_test(a_copy_goes_on),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
