/* SPDX-License-Identifier: Apache-2.0 */
/* test_verify.c: runs the engine on the simulated world: cases that once failed, and many random ones.
 * Also tests that no answer of the device changes the schedule. */
#include "comm/segment.h"
#include "comm/sim/sim.h"
#include "shard/verify/verify.h"
#include "test/cmocka.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void passes(const struct zr_verify_case *c, struct zr_verify_result *r)
{
    char text[1024];
    assert_int_equal(zr_verify_run(c, NULL, r), 0);
    if (r->n_reports) {
        zr_verify_describe(c, text, sizeof text);
        print_error("%s\n%s\n", text, r->text);
        fail();
    }
}

/* Each of these cases once failed, by a fault of the engine unless noted otherwise. */
static void once_failed(void **state)
{
    static const char *const cases[] = {
        /* Gradients were stored instead of added, without a reduce for every micro-batch. The first
         * micro-batch was lost. */
        "seed=499 stage=0 world=2 n_units=1 accum=2 n_steps=1 overwrite=1 poison=-1 dead=-1",
        "seed=499 stage=1 world=2 n_units=1 accum=2 n_steps=1 overwrite=1 poison=-1 dead=-1",
        /* A step without any gradient zeroed a sum that a slower peer was still gathering for the step
         * before. */
        "seed=1814 stage=0 world=2 n_units=5 accum=1 n_steps=2 frozen=63 skipped=3 overwrite=1 poison=-1 "
        "dead=-1",
        /* The model was at fault here. It zeroed a stacked tensor before the step, when one layer had no
         * bracket yet and others were being summed in place. */
        "seed=48114 stage=0 world=2 n_units=3 accum=1 n_steps=1 skipped=20 stacked=1 zeroes=8 poison=-1 "
        "dead=-1",
        /* A snapshot of the last pipeline stage read memory that its tied tensor was being written to. */
        "seed=208 stage=3 world=2 n_units=1 accum=1 n_steps=1 snapshots=84 poison=-1 dead=-1 pp=2 tied=1",
        "seed=226 stage=3 world=2 n_units=1 accum=1 n_steps=1 snapshots=21 poison=-1 dead=-1 pp=2 tied=1",
        /* A step was abandoned in the middle of its backward. With several units open at once, its calls
         * were not the declared ones, and there was no slot for them. */
        "seed=523688 stage=3 world=2 n_units=4 accum=1 n_steps=2 pattern=1 bf16=1 declared=1 poison=-1 "
        "dead=-1 drops=28",
        /* Ranks are dealt out to hosts in turn. The first rank of a later pipeline stage was not its
         * lowest, whose values count. */
        "seed=1 stage=3 world=12 n_units=1 accum=1 n_steps=1 poison=-1 dead=-1 pp=2 hybrid=1 group=2 dealt=1",
        /* The verifier was at fault here. It expected a skipped step, though the rank whose gradients are not
         * finite owned no element of the units in it. */
        "seed=1986 stage=3 world=3 n_units=4 accum=1 n_steps=2 pattern=2 skipped=80 wait_result=1 poison=0 "
        "dead=-1 granule=358",
        /* After a sum over cp, two shifts overwrote what a rank that is no neighbour was still gathering. */
        "seed=9 stage=1 world=5 n_units=3 accum=2 n_steps=1 cp=5 moves=77 poison=-1 dead=-1",
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct zr_verify_case c;
        struct zr_verify_result r;
        assert_int_equal(zr_verify_parse(cases[i], &c), 0);
        passes(&c, &r);
        assert_true(r.n_ops > 0 && !r.refused);
    }
}

/* Random configurations. The coverage that they report is checked. */
static void seeds(void **state)
{
    const char *given = getenv("SEED"), *n = getenv("N_SEEDS");
    uint64_t first = given ? strtoull(given, NULL, 0) : 1, n_seeds = n ? strtoull(n, NULL, 0) : 1000;
    int64_t n_ops = 0, n_died = 0, n_starved = 0, n_reordered = 0, n_snapshots = 0, n_refused = 0;
    int n_hybrid[3] = {0}, n_pp = 0, n_tp = 0, n_cp = 0, n_tied = 0, n_several = 0;
    int n_masters[3] = {0}, n_moments[3] = {0}, n_sums = 0, n_states[3] = {0};
    for (uint64_t s = first; s < first + n_seeds; s++) {
        struct zr_verify_case c;
        struct zr_verify_result r;
        zr_verify_case_random(s, &c);
        passes(&c, &r);
        n_ops += r.n_ops;
        n_died += r.died;
        n_starved += r.starved;
        n_reordered += r.reordered;
        n_snapshots += r.n_snapshots;
        n_refused += r.refused != 0;
        n_hybrid[c.group > 1 && c.group < c.world ? c.hybrid : 0]++;
        n_pp += c.pp > 1;
        n_tp += c.tp > 1;
        n_cp += c.cp > 1;
        n_tied += c.tied;
        n_several += c.per_rank > 1;
        n_masters[c.masters]++;
        n_moments[c.moments]++;
        n_sums += c.sums_bf16;
        n_states[c.states]++;
    }
    print_message(
        "%lld with a rank that dies, %lld starved, %lld reordered, %lld snapshots, %lld refused, %d "
        "HSDP, %d HFSDP, %d in stages, %d tied, %d with several on a rank, %d in parts, %d with cp\n",
        (long long)n_died, (long long)n_starved, (long long)n_reordered, (long long)n_snapshots,
        (long long)n_refused, n_hybrid[1], n_hybrid[2], n_pp, n_tied, n_several, n_tp, n_cp);
    assert_true(n_ops > 100 * (int64_t)n_seeds);
    if (n_seeds < 1000) /* too few to cover everything */
        return;
    assert_true(n_hybrid[1] > 15 && n_hybrid[2] > 15 && n_pp > 150 && n_tied > 50 && n_several > 50 &&
                n_tp > 150 && n_cp > 150);
    assert_true(n_masters[1] > 50 && n_masters[2] > 50 && n_moments[1] > 50 && n_moments[2] > 50 &&
                n_sums > 50 && n_states[1] > 50 && n_states[2] > 100);
    assert_true(n_died > 25 && n_starved > 10 && n_reordered > 50 && n_snapshots > 500 && n_refused > 10);
}

/* The text of a case replays it exactly. */
static void replays(void **state)
{
    for (uint64_t s = 1; s < 60; s++) {
        struct zr_verify_case c, again;
        struct zr_verify_result r, same;
        char text[1024];
        zr_verify_case_random(s, &c);
        zr_verify_describe(&c, text, sizeof text);
        assert_int_equal(zr_verify_parse(text, &again), 0);
        passes(&c, &r);
        passes(&again, &same);
        assert_true(r.action_hash == same.action_hash && r.n_ops == same.n_ops &&
                    r.n_accesses == same.n_accesses);
    }
    struct zr_verify_case c;
    assert_int_equal(zr_verify_parse("stage=3 world=65 n_units=1 accum=1 n_steps=1", &c), ZERO_ERR_ARG);
    assert_int_equal(zr_verify_parse("stage=3 wold=2", &c), ZERO_ERR_ARG);
    assert_int_equal(zr_verify_parse("stage=3 world", &c), ZERO_ERR_ARG);
}

/* Groups belong to hybrid sharding at stage 3, and divide the world. Without the fields there are none. Ranks
 * along cp divide the data-parallel ranks. A program that updates the weights needs fp32. */
static void possible_cases(void **state)
{
    static const struct {
        const char *text;
        int err;
    } cases[] = {
        {"stage=3 world=6 n_units=1 accum=1 n_steps=1", 0},
        {"stage=3 world=6 n_units=1 accum=1 n_steps=1 group=2 hybrid=1", 0},
        {"stage=3 world=6 n_units=1 accum=1 n_steps=1 group=3 hybrid=2 dealt=1", 0},
        {"stage=3 world=6 n_units=1 accum=1 n_steps=1 group=1 hybrid=2", 0},
        {"stage=3 world=6 n_units=1 accum=1 n_steps=1 group=6 hybrid=1", 0},
        {"stage=3 world=6 n_units=1 accum=1 n_steps=1 group=4 hybrid=1", ZERO_ERR_ARG},
        {"stage=3 world=6 n_units=1 accum=1 n_steps=1 group=0 hybrid=1", ZERO_ERR_ARG},
        {"stage=3 world=6 n_units=1 accum=1 n_steps=1 group=-2 hybrid=1", ZERO_ERR_ARG},
        {"stage=3 world=6 n_units=1 accum=1 n_steps=1 group=2 hybrid=3", ZERO_ERR_ARG},
        {"stage=2 world=6 n_units=1 accum=1 n_steps=1 group=2 hybrid=1", ZERO_ERR_ARG},
        {"stage=3 world=6 n_units=1 accum=1 n_steps=1 group=2", ZERO_ERR_ARG},
        {"stage=3 world=6 n_units=1 accum=1 n_steps=1 dealt=1", ZERO_ERR_ARG},
        {"stage=1 world=6 n_units=1 accum=1 n_steps=1 cp=3 moves=10", 0},
        {"stage=1 world=6 n_units=1 accum=1 n_steps=1 cp=1", 0},
        {"stage=1 world=6 n_units=1 accum=1 n_steps=1 tp=2 cp=3", 0},
        {"stage=1 world=6 n_units=1 accum=1 n_steps=1 tp=2 cp=2", ZERO_ERR_ARG},
        {"stage=1 world=6 n_units=1 accum=1 n_steps=1 cp=4", ZERO_ERR_ARG},
        {"stage=1 world=6 n_units=1 accum=1 n_steps=1 cp=-3", ZERO_ERR_ARG},
        {"stage=1 world=6 n_units=1 accum=1 n_steps=1 moves=10", ZERO_ERR_ARG},
        {"stage=1 world=6 n_units=1 accum=1 n_steps=1 masters=2 moments=2 sums_bf16=1 states=1", 0},
        {"stage=1 world=6 n_units=1 accum=1 n_steps=1 masters=3", ZERO_ERR_ARG},
        {"stage=1 world=6 n_units=1 accum=1 n_steps=1 moments=-1", ZERO_ERR_ARG},
        {"stage=1 world=6 n_units=1 accum=1 n_steps=1 states=3", ZERO_ERR_ARG},
        {"stage=1 world=6 n_units=1 accum=1 n_steps=1 states=2 snapshots=50", ZERO_ERR_ARG},
        {"stage=1 world=6 n_units=1 accum=1 n_steps=1 moments=1 user_update=1", ZERO_ERR_ARG},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct zr_verify_case c;
        int err = zr_verify_parse(cases[i].text, &c);
        if (err != cases[i].err)
            fail_msg("%s: %d", cases[i].text, err);
        if (!err)
            assert_true(zr_verify_possible(&c));
    }
}

/* One run of a configuration stands for all orders of the device, since no answer of the device reaches
 * the core. Whatever the device says about events, and whenever the loop runs, the same actions are taken. */
static void decisions_depend_on_calls_only(void **state)
{
    for (uint64_t s = 1; s < 200; s++) {
        struct zr_verify_case c;
        struct zr_verify_result first, r;
        zr_verify_case_random(s, &c);
        c.dead = -1;
        c.fail_alloc = 0;
        c.pace = ZR_PACE_AT_ONCE;
        passes(&c, &first);
        for (int k = 0; k < 6; k++) {
            c.event_done = k % 3;
            c.pace = k < 3 ? ZR_PACE_LATE : ZR_PACE_RANDOM;
            passes(&c, &r);
            assert_true(r.action_hash == first.action_hash);
        }
    }
}

/* If a model leaves out a zero_begin on one rank, the report says what it uses and where. */
static void outside_a_bracket(void **state)
{
    struct zr_verify_case c;
    struct zr_verify_result r;
    const struct zr_mutant *m = NULL;
    assert_int_equal(
        zr_verify_parse("seed=1 stage=3 world=2 n_units=4 accum=1 n_steps=2 poison=-1 dead=-1", &c), 0);
    for (int i = 0; i < zr_mutant_count(); i++)
        if (!strcmp(zr_mutant_name(zr_mutant_at(i)), "one rank does not use a unit"))
            m = zr_mutant_at(i);
    assert_non_null(m);
    assert_int_equal(zr_verify_run(&c, m, &r), 0);
    assert_true(r.n_reports > 0);
    assert_non_null(strstr(r.text, "the model's fault: rank 1 uses t"));
    assert_non_null(strstr(r.text, "of unit 0 in forward, step 1, outside its bracket"));
}

/* A fault between groups is reduced to the fewest groups that show it. */
static void groups_shrink(void **state)
{
    struct zr_verify_case c;
    struct zr_verify_result r;
    const struct zr_mutant *m = NULL;
    assert_int_equal(zr_verify_parse("seed=1 stage=3 world=12 group=3 hybrid=2 dealt=1 n_units=5 accum=2 "
                                     "n_steps=3 prefetch=2 pace=3 values=1 poison=-1 dead=-1",
                                     &c),
                     0);
    for (int i = 0; i < zr_mutant_count(); i++)
        if (!strcmp(zr_mutant_name(zr_mutant_at(i)), "a reduction between groups is left out"))
            m = zr_mutant_at(i);
    assert_non_null(m);
    assert_int_equal(zr_verify_run(&c, m, &r), 0);
    assert_true(r.n_reports > 0);
    zr_verify_shrink(&c, m, &r);
    assert_true(zr_verify_possible(&c));
    assert_true(c.hybrid && c.world == 2 * c.group && c.group <= 3 && c.n_units == 1 && !c.dealt);
    assert_int_equal(zr_verify_run(&c, m, &r), 0);
    assert_true(r.n_reports > 0);
}

/* A fault of shifts is reduced to two ranks along cp. */
static void cp_shrinks(void **state)
{
    struct zr_verify_case c;
    struct zr_verify_result r;
    const struct zr_mutant *m = NULL;
    assert_int_equal(zr_verify_parse("seed=1 stage=3 world=24 tp=2 cp=4 moves=60 sums=30 n_units=5 accum=2 "
                                     "n_steps=3 prefetch=2 pace=3 values=1 poison=-1 dead=-1",
                                     &c),
                     0);
    for (int i = 0; i < zr_mutant_count(); i++)
        if (!strcmp(zr_mutant_name(zr_mutant_at(i)), "the end of a shift does not wait for it"))
            m = zr_mutant_at(i);
    assert_non_null(m);
    zr_verify_shrink(&c, m, &r);
    assert_true(zr_verify_possible(&c));
    assert_true(c.cp == 2 && c.world == 2 && c.tp < 2 && c.moves && !c.sums && c.n_units == 1);
}

/* The ZeRO stages, then hybrid sharding in two groups of two, and context parallelism over two ranks. */
enum { N_ROWS = 7 };

static const char *set_row(struct zr_verify_case *c, int row)
{
    static const char *const name[N_ROWS] = {"stage 0", "stage 1", "stage 2", "stage 3",
                                             "HSDP",    "HFSDP",   "cp"};
    c->stage = row < 3 ? row : 3;
    if (row > 3)
        c->world = 4;
    if (row == 4 || row == 5) {
        c->hybrid = row - 3;
        c->group = 2;
    }
    if (row == 6) {
        c->cp = 2;
        c->moves = 60;
    }
    return name[row];
}

/* A rank may die at any point, even while opening. All other ranks learn of it and end, including those
 * that share no group with it. */
static void dies_at_every_point(void **state)
{
    for (int row = 0; row < N_ROWS; row++) {
        struct zr_verify_case c;
        struct zr_verify_result r = {.died = true};
        assert_int_equal(
            zr_verify_parse("seed=7 world=3 n_units=3 accum=2 n_steps=2 pace=2 values=1 prefetch=1 "
                            "snapshots=100 poison=-1 dead=1 stage=0",
                            &c),
            0);
        const char *name = set_row(&c, row);
        for (c.dead_at = 0; r.died; c.dead_at++)
            passes(&c, &r);
        print_message("%s: %d points\n", name, c.dead_at - 1);
        assert_true(c.dead_at > 100);
    }
}

/* If any allocation fails while ranks open, all of them give up, and nothing is left. */
static void every_allocation_refused(void **state)
{
    for (int row = 0; row < N_ROWS; row++) {
        struct zr_verify_case c;
        struct zr_verify_result r = {.starved = true};
        assert_int_equal(zr_verify_parse("seed=7 world=3 n_units=3 accum=1 n_steps=1 bf16=1 snapshots=100 "
                                         "poison=-1 dead=-1 stage=0",
                                         &c),
                         0);
        const char *name = set_row(&c, row);
        for (c.fail_alloc = 1; r.starved; c.fail_alloc++)
            passes(&c, &r);
        print_message("%s: %d allocations\n", name, c.fail_alloc - 2);
        assert_true(c.fail_alloc > 3 * 10);
    }
}

static void never(void *arg, int rank)
{
    fail_msg("nobody has to wait");
}

/* Collectives come in the same order on each communicator, but not across the two. Then they come in the
 * same order across both, but from two unordered threads of a rank. */
static void order_over_communicators(void **state)
{
    static const char *const found[] = {
        "",
        "order across communicators: collective 0 of rank 0 is gather all_gather of unit 1, step 0, of rank "
        "1 reduce all_gather of unit 2, step 0",
        "race on rank 1's order of collectives"};
    for (int wrong = 0; wrong < 3; wrong++) {
        const struct zr_sim_options o = {.world = 2, .yield = never};
        struct zr_sim *w;
        struct zr_comm *comm[2][2];
        struct zr_stream *stream[2][2];
        assert_int_equal(zr_sim_open(&o, &w), 0);
        struct zr_sim_order *order = zr_sim_order_open(w, NULL);
        assert_int_equal(zr_sim_comm_open(w, ZR_ROLE_GATHER, 0, NULL, order, comm[0]), 0);
        assert_int_equal(zr_sim_comm_open(w, ZR_ROLE_REDUCE, 0, NULL, order, comm[1]), 0);
        for (int r = 0; r < 2; r++)
            for (int k = 0; k < 2; k++) {
                int c = wrong == 1 && r == 1 ? !k : k;
                struct zr_tag tag = {.unit = 1 + c};
                struct zr_device *dev = zr_sim_device(w, r);
                zr_sim_host(w, r, wrong == 2 && r == 1 && k ? ZR_SIM_MODEL : ZR_SIM_LOOP);
                assert_int_equal(dev->ops->stream_open(dev, ZR_STREAM_QUEUE, "s", NULL, &stream[r][c]), 0);
                struct zr_gather_seg nothing;
                assert_int_equal(zr_comm_all_gather(comm[c][r], stream[r][c], &nothing, 0, &tag), 0);
            }
        const struct zr_recorder *rec = zr_sim_recorder(w);
        assert_int_equal(rec->n_reports > 0, wrong > 0);
        assert_memory_equal(rec->first_report, found[wrong], strlen(found[wrong]));
        for (int r = 0; r < 2; r++)
            for (int c = 0; c < 2; c++) {
                zr_sim_device(w, r)->ops->stream_close(stream[r][c]);
                zr_comm_close(comm[c][r]);
            }
        zr_sim_close(w);
        zr_sim_order_close(order);
    }
}

/* Ranks in a ring, each of which shares a communicator with either neighbour. On each communicator the order
 * is right, whatever its ranks issue first. But if each rank begins with the next one, there is no order of
 * all. */
static void order_of_all_ranks(void **state)
{
    static const int32_t pairs[3][2] = {{0, 1}, {1, 2}, {2, 0}};
    for (int n = 0; n < 2; n++) {
        const struct zr_sim_options o = {.world = 3, .yield = never};
        static const int32_t class_of[] = {0, 1, 2};
        struct zr_sim *w;
        struct zr_comm *comm[3][3] = {{NULL}};
        struct zr_stream *stream[3][2];
        assert_int_equal(zr_sim_open(&o, &w), 0);
        struct zr_sim_order *order = zr_sim_order_open(w, class_of);
        for (int k = 0; k < 3; k++) {
            const struct zr_group group = {.size = 2, .members = pairs[k]};
            assert_int_equal(
                zr_sim_comm_open(w, (enum zr_role)(ZR_ROLE_EVEN_PAIR + k), 1, &group, order, comm[k]), 0);
        }
        for (int r = 0; r < 3; r++)
            for (int k = 0; k < 2; k++) {
                /* the pair with the next rank has the number r; in case 1 rank 2 begins with its last one */
                int pair = (n == 1 && r == 2) != k ? (r + 2) % 3 : r;
                const struct zr_tag tag = {.unit = pair};
                struct zr_device *dev = zr_sim_device(w, r);
                struct zr_gather_seg nothing;
                zr_sim_host(w, r, ZR_SIM_LOOP);
                assert_int_equal(dev->ops->stream_open(dev, ZR_STREAM_QUEUE, "s", NULL, &stream[r][k]), 0);
                assert_int_equal(zr_comm_all_gather(comm[pair][r], stream[r][k], &nothing, 0, &tag), 0);
            }
        zr_sim_order_end(order, w);
        const struct zr_recorder *rec = zr_sim_recorder(w);
        assert_int_equal(rec->n_reports > 0, n == 0);
        for (int r = 0; n == 0 && r < 3; r++) {
            char text[64];
            snprintf(text, sizeof text, "rank %d issues", r);
            assert_non_null(strstr(rec->first_report, text));
        }
        for (int r = 0; r < 3; r++)
            for (int k = 0; k < 2; k++) {
                zr_sim_device(w, r)->ops->stream_close(stream[r][k]);
                zr_comm_close(comm[k ? r : (r + 2) % 3][r]);
            }
        zr_sim_close(w);
        zr_sim_order_close(order);
    }
}

/* Two collectives on one communicator, each on its own stream, are reported unless the second stream waits
 * for the first. */
static void order_on_one_communicator(void **state)
{
    for (int waits = 0; waits < 2; waits++) {
        const struct zr_sim_options o = {.world = 2, .yield = never};
        struct zr_sim *w;
        struct zr_comm *comm[2];
        struct zr_stream *stream[2][2];
        struct zr_event *event[2];
        assert_int_equal(zr_sim_open(&o, &w), 0);
        struct zr_sim_order *order = zr_sim_order_open(w, NULL);
        assert_int_equal(zr_sim_comm_open(w, ZR_ROLE_REDUCE_OUTER, 0, NULL, order, comm), 0);
        for (int r = 0; r < 2; r++) {
            const struct zr_device_ops *d = zr_sim_device(w, r)->ops;
            zr_sim_host(w, r, ZR_SIM_LOOP);
            assert_int_equal(d->event_open(zr_sim_device(w, r), &event[r]), 0);
            for (int k = 0; k < 2; k++) {
                const struct zr_tag tag = {.unit = k};
                struct zr_gather_seg nothing;
                assert_int_equal(
                    d->stream_open(zr_sim_device(w, r), ZR_STREAM_QUEUE, "s", NULL, &stream[r][k]), 0);
                if (k && waits)
                    assert_int_equal(d->stream_wait(stream[r][k], event[r]), 0);
                assert_int_equal(zr_comm_all_gather(comm[r], stream[r][k], &nothing, 0, &tag), 0);
                assert_int_equal(d->event_record(event[r], stream[r][k]), 0);
            }
        }
        const struct zr_recorder *rec = zr_sim_recorder(w);
        assert_int_equal(rec->n_reports > 0, !waits);
        if (!waits)
            assert_non_null(strstr(rec->first_report, "race on rank"));
        for (int r = 0; r < 2; r++) {
            for (int k = 0; k < 2; k++)
                zr_sim_device(w, r)->ops->stream_close(stream[r][k]);
            zr_sim_device(w, r)->ops->event_close(event[r]);
            zr_comm_close(comm[r]);
        }
        zr_sim_close(w);
        zr_sim_order_close(order);
    }
}

/* Communicators of two groups, each in any order. Places tell whose slice is where, and messages name
 * ranks of the world. */
static void groups(void **state)
{
    static const int32_t members[] = {2, 0, 1, 4, 3};
    const struct zr_group group[] = {{.size = 3, .members = members}, {.size = 2, .members = members + 3}};
    const struct zr_sim_options o = {.world = 5, .yield = never};
    struct zr_sim *w;
    struct zr_comm *comm[5];
    struct zr_stream *stream[5];
    char text[512];
    assert_int_equal(zr_sim_open(&o, &w), 0);
    struct zr_sim_order *order = zr_sim_order_open(w, NULL);
    assert_int_equal(zr_sim_comm_open(w, ZR_ROLE_REDUCE_OUTER, 2, group, order, comm), 0);
    for (int i = 0; i < 5; i++) {
        int r = members[i], k = i < 3 ? 0 : 1;
        struct zr_device *dev = zr_sim_device(w, r);
        zr_sim_host(w, r, ZR_SIM_LOOP);
        assert_int_equal(comm[r]->group.size, group[k].size);
        assert_int_equal(comm[r]->group.rank, i - 3 * k);
        assert_int_equal(zr_comm_rank(comm[r], comm[r]->group.rank), r);
        assert_int_equal(dev->ops->stream_open(dev, ZR_STREAM_QUEUE, "s", NULL, &stream[r]), 0);
    }
    /* Rank 0 comes last. The other group does not wait for it. */
    for (int i = 4; i >= 0; i--) {
        int r = i == 0 ? 0 : i == 1 ? 2 : members[i];
        struct zr_tag tag = {.unit = 0};
        struct zr_gather_seg nothing;
        zr_sim_host(w, r, ZR_SIM_LOOP);
        if (i == 0) {
            zr_sim_comm_waits(comm[1], text, sizeof text);
            assert_string_equal(text,
                                "rank 2 waits in reduce outer all_gather of unit 0, step 0; rank 1 waits "
                                "in reduce outer all_gather of unit 0, step 0; rank 0 is not there; ");
            zr_sim_comm_waits(comm[4], text, sizeof text);
            assert_string_equal(text, "");
        }
        assert_int_equal(zr_comm_all_gather(comm[r], stream[r], &nothing, 0, &tag), 0);
    }
    zr_sim_comm_waits(comm[0], text, sizeof text);
    assert_string_equal(text, "");
    assert_int_equal(zr_sim_recorder(w)->n_reports, 0);
    for (int r = 0; r < 5; r++) {
        zr_sim_device(w, r)->ops->stream_close(stream[r]);
        zr_comm_close(comm[r]);
    }
    zr_sim_close(w);
    zr_sim_order_close(order);
}

/* Opens the other ranks' arenas while the first waits for them. */
static struct zr_comm *shared_comm[2][5];
static struct zr_arena *shared[5];
static int n_shared;

static void share_next(void *arg, int rank)
{
    struct zr_sim **w = arg;
    if (n_shared == 5)
        return;
    int r = n_shared++;
    struct zr_comm *c = shared_comm[0][r];
    zr_sim_host(*w, r, ZR_SIM_MODEL);
    assert_int_equal(zr_comm_arena(c, 4096, &shared[r]), 0);
}

/* Slices of any size, in bytes, of all ranks and of groups of three and two. */
enum { GATHERED = 1024, GRADIENTS = 2048, SUMS = 3072 };
static const int64_t of_all[] = {0, 64, 64, 256, 320, 320}, of_groups[2][4] = {{0, 64, 64, 256}, {0, 0, 256}};
static const struct zr_content gathered = {.kind = ZR_CONTENT_PARAM, .size = 4, .flat = 7, .value = 5},
                               summed = {.kind = ZR_CONTENT_GRAD, .size = 4, .flat = 8, .value = 3, .n = 1};

static void put_ragged(struct zr_sim *w, int r, struct zr_stream *s)
{
    struct zr_comm *all = shared_comm[0][r], *few = shared_comm[1][r];
    char *base = shared[r]->base;
    const int64_t *const at = of_groups[few->group.size == 2];
    const int place = few->group.rank;
    struct zr_tag tag = {.unit = -1};
    struct zr_content mine = gathered;
    mine.first = at[place] / 4;
    if (at[place + 1] > at[place])
        zr_sim_mark(w, base + GATHERED + at[place], at[place + 1] - at[place], mine);
    zr_sim_mark(w, base + GRADIENTS, 320, summed);
    /* The caller may reuse the lists. */
    int64_t few_list[4], all_list[6];
    memcpy(few_list, at, sizeof few_list);
    for (int p = 0; p < 6; p++)
        all_list[p] = 1000 + of_all[p] / 4;
    struct zr_gather_seg g = {GATHERED, GATHERED, true, {.total = 256, .at = few_list}};
    struct zr_reduce_seg sum = {
        GRADIENTS, SUMS, {.total = 320, .at = all_list, .at_bytes = 4}, ZERO_F32, false};
    assert_int_equal(zr_comm_all_gather(few, s, &g, 1, &tag), 0);
    assert_int_equal(zr_comm_reduce_scatter(all, s, &sum, 1, &tag), 0);
    memset(few_list, 0x55, sizeof few_list);
    memset(all_list, 0x55, sizeof all_list);
}

static void expect_ragged(struct zr_sim *w, int r, struct zr_stream *s)
{
    struct zr_recorder *rec = zr_sim_recorder(w);
    const struct zr_comm *few = shared_comm[1][r];
    const int64_t *const at = of_groups[few->group.size == 2];
    int64_t bytes = of_all[r + 1] - of_all[r];
    struct zr_content sum = summed;
    struct zr_comm_stats stats;
    sum.first = of_all[r] / 4;
    sum.value *= 5;
    sum.n = 5;
    zr_shadow_expect(rec, zr_sim_line_of(s), shared[r]->base + GATHERED, 256, gathered);
    if (bytes)
        zr_shadow_expect(rec, zr_sim_line_of(s), shared[r]->base + SUMS, bytes, sum);
    zr_comm_stats(shared_comm[1][r], &stats);
    int64_t own = at[few->group.rank + 1] - at[few->group.rank], group = few->group.size;
    assert_int_equal(stats.wire_bytes,
                     zr_agree_wire((int)group, few->group.rank, 1, 1) + 8 * (group - 1) + 256 - own);
    zr_comm_stats(shared_comm[0][r], &stats);
    assert_int_equal(stats.wire_bytes, zr_agree_wire(5, r, 1, 1) + 4 * bytes);
}

/* One arena is attached to two communicators, of all ranks and of groups. Each moves the bytes of its
 * ranks only. */
static void shared_arena(void **state)
{
    static const int32_t members[] = {2, 0, 1, 4, 3};
    const struct zr_group group[] = {{.size = 3, .members = members}, {.size = 2, .members = members + 3}};
    struct zr_sim *w;
    const struct zr_sim_options o = {.world = 5, .yield = share_next, .arg = &w};
    struct zr_stream *stream[5];
    assert_int_equal(zr_sim_open(&o, &w), 0);
    struct zr_sim_order *order = zr_sim_order_open(w, NULL);
    assert_int_equal(zr_sim_comm_open(w, ZR_ROLE_CONTROL, 0, NULL, order, shared_comm[0]), 0);
    assert_int_equal(zr_sim_comm_open(w, ZR_ROLE_REDUCE, 2, group, order, shared_comm[1]), 0);
    n_shared = 0;
    share_next(&w, 0);
    for (int r = 0; r < 5; r++) {
        struct zr_device *dev = zr_sim_device(w, r);
        zr_sim_host(w, r, ZR_SIM_LOOP);
        assert_int_equal(dev->ops->stream_open(dev, ZR_STREAM_QUEUE, "s", NULL, &stream[r]), 0);
        for (int k = 0; k < 2; k++) {
            struct zr_comm *c = shared_comm[k][r];
            assert_int_equal(zr_comm_attach(c, shared[r]), 0);
            assert_int_equal(zr_comm_attach(c, shared[r]), ZERO_ERR_ORDER);
        }
        zr_arena_drop(shared[r]);
        /* Words 0 and 1 are a sum and a maximum over all ranks, 8 and 9 over the group. Slots of the group
         * begin at 16. */
        int64_t *words = (int64_t *)shared[r]->base;
        words[0] = words[1] = words[8] = words[9] = r + 1;
        words[16 + shared_comm[1][r]->group.rank] = 100 + r;
    }
    for (int r = 0; r < 5; r++) {
        struct zr_comm *all = shared_comm[0][r], *few = shared_comm[1][r];
        struct zr_tag tag = {.unit = -1};
        zr_sim_host(w, r, ZR_SIM_LOOP);
        assert_int_equal(zr_comm_agree(all, stream[r], 0, 1, 1, &tag), 0);
        assert_int_equal(zr_comm_agree(few, stream[r], 64, 1, 1, &tag), 0);
        assert_int_equal(zr_comm_exchange(few, stream[r], 128, 8, &tag), 0);
        put_ragged(w, r, stream[r]);
    }
    for (int r = 0; r < 5; r++) {
        const int64_t *words = (const int64_t *)shared[r]->base;
        bool first = shared_comm[1][r]->group.size == 3;
        assert_int_equal(words[0], 15);
        assert_int_equal(words[1], 5);
        assert_int_equal(words[8], first ? 6 : 9);
        assert_int_equal(words[9], first ? 3 : 5);
        for (int p = 0; p < shared_comm[1][r]->group.size; p++)
            assert_int_equal(words[16 + p], 100 + members[(first ? 0 : 3) + p]);
        struct zr_comm_stats stats;
        zr_comm_stats(shared_comm[0][r], &stats);
        assert_int_equal(stats.n_agree, 1);
        expect_ragged(w, r, stream[r]);
    }
    assert_int_equal(zr_sim_recorder(w)->n_reports, 0);
    for (int r = 0; r < 5; r++) {
        int64_t peak;
        zr_sim_device(w, r)->ops->stream_close(stream[r]);
        for (int k = 0; k < 2; k++)
            zr_comm_close(shared_comm[k][r]);
        assert_int_equal(zr_sim_held(w, r, &peak), 0);
    }
    zr_sim_close(w);
    zr_sim_order_close(order);
}

/* A table of copies moves contents row by row, and leaves the gaps between rows. */
static void tables(void **state)
{
    const struct zr_sim_options o = {.world = 1, .yield = never};
    struct zr_sim *w;
    struct zr_stream *s;
    void *p;
    assert_int_equal(zr_sim_open(&o, &w), 0);
    struct zr_device *dev = zr_sim_device(w, 0);
    zr_sim_host(w, 0, ZR_SIM_LOOP);
    assert_int_equal(dev->ops->stream_open(dev, ZR_STREAM_QUEUE, "s", NULL, &s), 0);
    assert_int_equal(dev->ops->alloc(dev, 4096, &p), 0);
    char *at = p;
    struct zr_content copied = {.kind = ZR_CONTENT_PARAM, .size = 4, .flat = 7, .value = 5},
                      other = {.kind = ZR_CONTENT_PARAM, .size = 4, .flat = 8, .value = 6};
    zr_sim_mark(w, at, 512, copied);
    zr_sim_mark(w, at + 1024, 512, other);
    const struct zr_copy_rows rows = {at + 1024, at, 64, 160, 128, 64};
    assert_int_equal(dev->ops->copy_rows(s, &rows, 1), 0);
    struct zr_recorder *rec = zr_sim_recorder(w);
    const struct {
        int64_t at, bytes, first;
        bool moved;
    } want[] = {{1024, 64, 0, true},   {1088, 64, 16, false}, {1152, 64, 16, true},
                {1216, 64, 48, false}, {1280, 32, 32, true},  {1312, 224, 72, false}};
    for (size_t i = 0; i < sizeof want / sizeof *want; i++) {
        struct zr_content c = want[i].moved ? copied : other;
        c.first = want[i].first;
        zr_shadow_expect(rec, zr_sim_line_of(s), at + want[i].at, want[i].bytes, c);
    }
    assert_int_equal(rec->n_reports, 0);
    /* A table of sums reads a range of every source. */
    struct zr_content grad = {.kind = ZR_CONTENT_GRAD, .size = 4, .flat = 7, .value = 5, .n = 1};
    zr_sim_mark(w, at + 2048, 1024, grad);
    const void *src[] = {at + 2048, at + 2048};
    const struct zr_sum_range sums[] = {{(float *)(at + 3328), 64, 16, false},
                                        {(float *)(at + 3584), 96, 16, false}};
    assert_int_equal(dev->ops->sum_ranges(s, sums, 2, src, 2, ZERO_F32), 0);
    struct zr_content sum = grad;
    sum.first = 64;
    sum.value = 10;
    sum.n = 2;
    zr_shadow_expect(rec, zr_sim_line_of(s), at + 3328, 64, sum);
    sum.first = 96;
    zr_shadow_expect(rec, zr_sim_line_of(s), at + 3584, 64, sum);
    assert_int_equal(rec->n_reports, 0);
    assert_int_equal(dev->ops->sum_ranges(s, sums, 65, src, 2, ZERO_F32), ZERO_ERR_ARG);
    struct zr_copy_rows bad = rows;
    bad.dst = at + 32;
    assert_int_equal(dev->ops->copy_rows(s, &bad, 1), ZERO_ERR_ARG);
    dev->ops->free(dev, p, 4096);
    dev->ops->stream_close(s);
    zr_sim_close(w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(once_failed),
        cmocka_unit_test(seeds),
        cmocka_unit_test(replays),
        cmocka_unit_test(possible_cases),
        cmocka_unit_test(decisions_depend_on_calls_only),
        cmocka_unit_test(outside_a_bracket),
        cmocka_unit_test(groups_shrink),
        cmocka_unit_test(cp_shrinks),
        cmocka_unit_test(dies_at_every_point),
        cmocka_unit_test(every_allocation_refused),
        cmocka_unit_test(order_over_communicators),
        cmocka_unit_test(order_of_all_ranks),
        cmocka_unit_test(order_on_one_communicator),
        cmocka_unit_test(groups),
        cmocka_unit_test(shared_arena),
        cmocka_unit_test(tables),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
