/* SPDX-License-Identifier: Apache-2.0 */
/* test_sim.c: tests all-to-all and shift between ranks of the simulated device. They move the right parts and
 * order the ranks as far as comm.h promises. Each flaw of a communicator, and a program that relies on more
 * than is promised, is reported. */
#include "comm/sim/sim.h"
#include "test/cmocka.h"

#include <stdlib.h>

enum { RANKS = 4, PART = 512, FROM = 0, TO = RANKS * PART, ARENA_BYTES = 4 * RANKS * PART, ROUNDS = 3 };

/* A world whose ranks all run on this thread. */
struct world {
    struct zr_sim *w;
    struct zr_sim_order *order;
    struct zr_comm *comm[RANKS];
    struct zr_stream *stream[RANKS];
    int n_arenas;
};

static void speak(const struct world *o, int rank)
{
    zr_sim_host(o->w, rank, ZR_SIM_MODEL);
}

static void make_next_arena(struct world *o)
{
    struct zr_comm *c = o->comm[o->n_arenas];
    struct zr_arena *a;
    speak(o, o->n_arenas++);
    assert_int_equal(zr_comm_arena(c, ARENA_BYTES, &a), 0);
    assert_int_equal(zr_comm_attach(c, a), 0);
    zr_arena_drop(a);
}

/* Called while a rank waits for the arenas of the others. */
static void go_on(void *arg, int rank)
{
    struct world *o = arg;
    if (o->n_arenas < RANKS)
        make_next_arena(o);
}

static void open_world(struct world *o, unsigned flaws)
{
    const struct zr_sim_options opt = {.world = RANKS, .yield = go_on, .arg = o, .comm_flaws = flaws};
    *o = (struct world){.n_arenas = 0};
    assert_int_equal(zr_sim_open(&opt, &o->w), 0);
    o->order = zr_sim_order_open(o->w, NULL);
    assert_non_null(o->order);
    assert_int_equal(zr_sim_comm_open(o->w, ZR_ROLE_TP, 0, NULL, o->order, o->comm), 0);
    make_next_arena(o);
    for (int r = 0; r < RANKS; r++) {
        struct zr_device *d = zr_sim_device(o->w, r);
        speak(o, r);
        assert_int_equal(d->ops->stream_open(d, ZR_STREAM_QUEUE, "parts", NULL, &o->stream[r]), 0);
    }
}

/* Returns how many faults were reported. */
static int64_t close_world(struct world *o)
{
    int64_t n = zr_sim_recorder(o->w)->n_reports;
    for (int r = 0; r < RANKS; r++) {
        speak(o, r);
        zr_sim_device(o->w, r)->ops->stream_close(o->stream[r]);
        zr_comm_close(o->comm[r]);
    }
    zr_sim_close(o->w);
    zr_sim_order_close(o->order);
    return n;
}

/* Touches a part with what rank `of` sends to rank `to` in this round. */
static void touch_part(const struct world *o, int rank, int64_t at, enum zr_sim_how how, int round, int of,
                       int to)
{
    const struct zr_sim_touch t = {o->comm[rank]->arena + at,
                                   PART,
                                   how,
                                   {.kind = ZR_CONTENT_ACTIVATION,
                                    .size = 4,
                                    .value = (uint64_t)((round * RANKS + of) * RANKS + to + 1)}};
    assert_int_equal(zr_sim_compute(o->stream[rank], "part", &t, 1, 0), 0);
}

/* Each round writes the parts, passes them, and reads what has come. */
static void pass_rounds(struct world *o, enum zr_op op, int by)
{
    const struct zr_tag tag = {.unit = -1};
    const bool all = op == ZR_OP_ALL_TO_ALL;
    for (int round = 0; round < ROUNDS; round++)
        for (int r = 0; r < RANKS; r++) {
            const int from = ((r - by) % RANKS + RANKS) % RANKS, n = all ? RANKS : 1;
            speak(o, r);
            for (int p = 0; p < n; p++)
                touch_part(o, r, FROM + p * PART, ZR_SIM_SET, round, r, all ? p : 0);
            int err = all ? zr_comm_all_to_all(o->comm[r], o->stream[r], FROM, TO, PART, &tag)
                          : zr_comm_shift(o->comm[r], o->stream[r], FROM, TO, PART, by, &tag);
            assert_int_equal(err, 0);
            for (int p = 0; p < n; p++)
                touch_part(o, r, TO + p * PART, ZR_SIM_READ, round, all ? p : from, all ? r : 0);
        }
    for (int r = 0; r < RANKS; r++) {
        struct zr_comm_stats s;
        speak(o, r);
        zr_sim_device(o->w, r)->ops->stream_sync(o->stream[r]);
        zr_comm_stats(o->comm[r], &s);
        assert_int_equal(all ? s.n_all_to_all : s.n_shift, ROUNDS);
        assert_int_equal(s.wire_bytes, ROUNDS * PART * (all ? RANKS - 1 : by % RANKS ? 1 : 0));
    }
}

static int64_t reports(enum zr_op op, int by, unsigned flaws)
{
    struct world o;
    open_world(&o, flaws);
    pass_rounds(&o, op, by);
    return close_world(&o);
}

static void test_sound(void **state)
{
    assert_int_equal(reports(ZR_OP_ALL_TO_ALL, 0, 0), 0);
    for (int by = -RANKS - 1; by <= RANKS + 1; by++)
        assert_int_equal(reports(ZR_OP_SHIFT, by, 0), 0);
}

static void test_flaws(void **state)
{
    static const unsigned flaws[] = {ZR_SIM_PARTS_START_ALONE, ZR_SIM_PARTS_LEAVE_ALONE,
                                     ZR_SIM_PARTS_MOVE_NOTHING};
    for (size_t i = 0; i < sizeof flaws / sizeof *flaws; i++) {
        assert_true(reports(ZR_OP_ALL_TO_ALL, 0, flaws[i]) > 0);
        assert_true(reports(ZR_OP_SHIFT, 1, flaws[i]) > 0);
    }
}

/* Rank 2 writes in its arena before an operation, and rank 0 writes there after it. An all-to-all orders
 * these two writes. A shift by 1 orders only neighbours. */
static int64_t rely_on_order(enum zr_op op)
{
    struct world o;
    const struct zr_tag tag = {.unit = -1};
    open_world(&o, 0);
    for (int r = 0; r < RANKS; r++) {
        speak(&o, r);
        for (int p = 0; p < RANKS; p++)
            touch_part(&o, r, FROM + p * PART, ZR_SIM_SET, 0, r, p);
        if (r == 2)
            touch_part(&o, r, 2 * TO, ZR_SIM_SET, 0, 0, 0);
        int err = op == ZR_OP_ALL_TO_ALL ? zr_comm_all_to_all(o.comm[r], o.stream[r], FROM, TO, PART, &tag)
                                         : zr_comm_shift(o.comm[r], o.stream[r], FROM, TO, PART, 1, &tag);
        assert_int_equal(err, 0);
    }
    const struct zr_sim_touch t = {o.comm[2]->arena + 2 * TO, PART, ZR_SIM_PLAIN_WRITE, {.kind = 0}};
    speak(&o, 0);
    assert_int_equal(zr_sim_compute(o.stream[0], "write", &t, 1, 0), 0);
    for (int r = 0; r < RANKS; r++) {
        speak(&o, r);
        zr_sim_device(o.w, r)->ops->stream_sync(o.stream[r]);
    }
    return close_world(&o);
}

static void test_order(void **state)
{
    assert_int_equal(rely_on_order(ZR_OP_ALL_TO_ALL), 0);
    assert_true(rely_on_order(ZR_OP_SHIFT) > 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_sound), cmocka_unit_test(test_flaws),
                                       cmocka_unit_test(test_order)};
    return cmocka_run_group_tests_name("simulated communicators", tests, NULL, NULL);
}
