/* SPDX-License-Identifier: Apache-2.0 */
/* test_time.c: tests step time on the virtual clock: transfers that can be hidden are hidden, and others
 * are not. */
#include "kernels/agreement.h"
#include "shard/options.h"
#include "shard/verify/verify.h"
#include "test/cmocka.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static struct zr_verify_case a_case(int stage, int world, int prefetch)
{
    return (struct zr_verify_case){.seed = 1,
                                   .stage = stage,
                                   .world = world,
                                   .n_units = 8,
                                   .prefetch = prefetch,
                                   .accum = 1,
                                   .n_steps = 3,
                                   .bf16 = true,
                                   .declared = true,
                                   .wait_result = true,
                                   .poison = -1,
                                   .dead = -1};
}

/* Compute of one unit in forward takes 2 * 1e6 * 1000 / 1e12 s = 2 ms. */
static struct zr_verify_speed a_speed(double near, double far)
{
    return (struct zr_verify_speed){.flops_per_s = 1e12,
                                    .memory_bytes_per_s = 1e15,
                                    .near_bytes_per_s = near,
                                    .far_bytes_per_s = far,
                                    .ranks_per_node = 2,
                                    .tokens = 1000,
                                    .unit_elems = 1000000};
}

static struct zr_verify_time run(struct zr_verify_case c, struct zr_verify_speed s, const char *trace,
                                 int64_t compute_ns)
{
    struct zr_verify_time t;
    struct zr_verify_result r;
    assert_int_equal(zr_verify_time(&c, &s, trace, &t, &r), 0);
    if (r.n_reports)
        fail_msg("%s", r.text);
    assert_int_equal(t.peak_bytes, t.plan_bytes);
    assert_int_equal(t.compute_ns, compute_ns);
    return t;
}

static struct zr_verify_time timed(struct zr_verify_case c, struct zr_verify_speed s, const char *trace)
{
    return run(c, s, trace, 8 * (2 + 4) * 1000000);
}

static void overlap_hides_links(void **state)
{
    /* Links without limit: nothing is exposed. */
    assert_true(timed(a_case(3, 4, 2), a_speed(1e18, 1e18), NULL).exposed_ns < 10000);
    /* A gather of 2 MB at 2 GB/s takes 1 ms, less than the 2 ms of compute that hide it. Only the ends of
     * a step are exposed. */
    struct zr_verify_time hidden = timed(a_case(3, 2, 2), a_speed(1e9, 1e9), NULL);
    assert_true(hidden.exposed_ns >= 2000000 && hidden.exposed_ns < 4000000);
    /* Without prefetch every gather is exposed. */
    struct zr_verify_time demand = timed(a_case(3, 2, 0), a_speed(1e9, 1e9), NULL);
    assert_true(demand.exposed_ns > 10000000);
    /* With ranks on two nodes, a network slower than the links of a node is exposed. */
    assert_true(timed(a_case(3, 4, 2), a_speed(1e12, 1e8), NULL).step_ns >
                timed(a_case(3, 2, 2), a_speed(1e12, 1e8), NULL).step_ns * 3);
}

/* ---- masters and states in host memory ---- */

/* Choices, with the bytes of an element of a bf16 tensor that an update reads and writes. */
static const struct {
    int masters, moments;
    double bytes;
} choices[] = {{ZERO_MASTERS_F32, ZERO_MOMENTS_F32, 2 * (4 + 2 * 4)},
               {ZERO_MASTERS_REMAINDER, ZERO_MOMENTS_BF16, 2 * (2 + 2 * 2)},
               {ZERO_MASTERS_NONE, ZERO_MOMENTS_Q8, 2 * 2 * (1 + 2.0 / 32)}};
enum { N_CHOICES = sizeof choices / sizeof *choices };

/* Returns how much more of a step is exposed if an update of a unit takes update_ns because of the link to
 * host memory. Kernels take no other time. */
static int64_t exposed_by_link(int stage, int world, int choice, int64_t update_ns)
{
    struct zr_verify_case c = a_case(stage, world, 2);
    struct zr_verify_speed s = a_speed(1e30, 1e30);
    int64_t compute_ns = c.n_units * (2 + 4) * (int64_t)1000000;
    s.memory_bytes_per_s = 1e30;
    c.masters = choices[choice].masters;
    c.moments = choices[choice].moments;
    int64_t in_device = run(c, s, NULL, compute_ns).exposed_ns;
    c.states = ZERO_STATES_HOST;
    double bytes = choices[choice].bytes * (double)s.unit_elems / (stage ? world : 1);
    s.states_bytes_per_s = bytes / (double)update_ns * 1e9;
    return run(c, s, NULL, compute_ns).exposed_ns - in_device;
}

/* Units are updated in the order of the next forward, which waits for each unit by itself. So only the first
 * unit's update is exposed if an update takes no longer than a forward. */
static void only_the_first_update_is_exposed(void **state)
{
    const int64_t forward_ns = 2000000, fast_ns = forward_ns * 9 / 10, slow_ns = 3 * forward_ns;
    for (int stage = 0; stage <= 3; stage++)
        for (int i = 0; i < 3 * N_CHOICES; i++) {
            int world = 1 << i % 3, choice = i / 3;
            int64_t rounding_ns = world * 1000; /* of slices up to whole pieces, and of times to ns */
            int64_t exposed_ns = exposed_by_link(stage, world, choice, fast_ns);
            assert_true(exposed_ns >= fast_ns && exposed_ns <= fast_ns + rounding_ns);
            exposed_ns = exposed_by_link(stage, world, choice, slow_ns);
            assert_true(exposed_ns >= slow_ns + 7 * (slow_ns - forward_ns) - rounding_ns);
        }
}

/* ---- groups ---- */

/* Two nodes, each a group of two ranks. For its group, a unit's gradient is 1.024 MB per rank's slice. As
 * much travels between groups, as fp32 sums of half a slice. */
enum { ELEMS = 1024000, FORWARD_NS = 2048000, BACKWARD_NS = 4096000, SLICE_BYTES = 1024000, N_UNITS = 8 };

static struct zr_verify_case groups_case(enum zr_hybrid hybrid, int accum)
{
    struct zr_verify_case c = a_case(3, 4, 2);
    c.n_units = N_UNITS;
    c.group = 2;
    c.hybrid = hybrid;
    c.accum = accum;
    c.deterministic = accum > 1; /* each contribution is reduced between groups */
    return c;
}

/* Kernels take no time, so a step exposes the time of its links only. */
static struct zr_verify_speed groups_speed(double near, double far)
{
    struct zr_verify_speed s = a_speed(near, far);
    s.memory_bytes_per_s = 1e30;
    s.unit_elems = ELEMS;
    return s;
}

static int64_t wire_ns(double bytes, double bytes_per_s)
{
    return (int64_t)(bytes / bytes_per_s * 1e9);
}

/* Both halves of the agreement: a quarter of the record of each rank on the other node. */
static int64_t agreement_ns(double far)
{
    return 2 * wire_ns(2.0 * (double)((ZR_AGREE_SUMS + ZR_AGREE_MAXES) * 8 / 4), far);
}

static int64_t shown_ns(enum zr_hybrid hybrid, int accum, double near, double far)
{
    int64_t compute_ns = accum * N_UNITS * (FORWARD_NS + BACKWARD_NS);
    return run(groups_case(hybrid, accum), groups_speed(near, far), NULL, compute_ns).exposed_ns;
}

/* A unit's reduction between groups takes as long as its backward, and the one within its group a quarter
 * of that. They overlap, so only the last unit's two reductions are exposed after the last backward. If
 * they ran one after the other, every earlier unit would add a quarter of a backward. */
static void outer_hides_behind_backward(void **state)
{
    const double near = 1e9;
    const int64_t in_group = wire_ns(SLICE_BYTES, near);
    assert_int_equal(in_group, BACKWARD_NS / 4);
    /* HSDP: gradients are reduced between groups, and gathered in place. The first gather of a step has
     * nothing to hide behind. */
    double far = 5e8;
    int64_t outer = 2 * wire_ns(SLICE_BYTES, far);
    assert_int_equal(outer, BACKWARD_NS);
    assert_int_equal(shown_ns(ZR_HSDP, 1, near, far), in_group + in_group + outer + agreement_ns(far));
    /* HFSDP: gradients are only reduced between groups. The updated fine slice of the first unit, half as
     * many bytes, is gathered between groups before its group gathers it. The other units' slices take as
     * long as a forward, and hide. */
    far = 2.5e8;
    outer = wire_ns(SLICE_BYTES, far);
    int64_t updated = wire_ns(SLICE_BYTES / 2, far);
    assert_true(outer == BACKWARD_NS && updated == FORWARD_NS);
    assert_int_equal(shown_ns(ZR_HFSDP, 1, near, far),
                     updated + in_group + in_group + outer + agreement_ns(far));
    /* Through group slots, in each micro-batch. */
    assert_int_equal(shown_ns(ZR_HFSDP, 2, near, far),
                     updated + in_group + in_group + outer + agreement_ns(far));
}

/* ---- pipeline stages ---- */

/* Each pipeline stage is one unit, with forward time F and backward time B, on as many ranks as the
 * others. Links are free, except to far ranks. */
enum { F = 2000000, B = 4000000 };

static struct zr_verify_time time_stages(int ranks, int per_rank, int n_micro, int schedule, int dp,
                                         double far)
{
    struct zr_verify_case c = a_case(1, ranks * dp, 2);
    struct zr_verify_speed s = a_speed(1e30, far);
    c.n_units = 1;
    c.pp = ranks;
    c.per_rank = per_rank;
    c.accum = n_micro;
    c.schedule = schedule;
    c.deterministic = true;
    s.memory_bytes_per_s = 1e30;
    s.ranks_per_node = dp > 1 ? 1 : 64;
    return run(c, s, NULL, (int64_t)n_micro * per_rank * (F + B));
}

/* Runs the engine on free links with 2p or more micro-batches. Between its first forward and last
 * backward, a rank idles as long as published: (p - 1) times a stage's forward and backward. With v stages
 * on a rank, a stage takes a v-th of the rank's time. The update's wait for the norm is counted
 * separately, and is 0 here. */
static void stages_stand_as_published(void **state)
{
    for (int ranks = 2; ranks <= 8; ranks++)
        for (int more = 0; more <= ranks; more += ranks) {
            const int n_micro = 2 * ranks + more;
            const struct {
                int per_rank, schedule, each;
            } each[] = {{1, ZR_RUN_GPIPE, F + B},
                        {1, ZR_RUN_1F1B, F + B},
                        {2, ZR_RUN_INTERLEAVED, F + B},
                        {3, ZR_RUN_INTERLEAVED, F + B},
                        {1, ZR_RUN_ZERO_BUBBLE, F + B / 2 - B / 2}}; /* half of B is for weights */
            for (size_t i = 0; i < sizeof each / sizeof *each; i++) {
                struct zr_verify_time t =
                    time_stages(ranks, each[i].per_rank, n_micro, each[i].schedule, 1, 1e30);
                assert_int_equal(t.bubble_ns, (ranks - 1) * each[i].each);
                assert_int_equal(t.norm_ns, 0);
                assert_int_equal(t.exposed_ns, t.bubble_ns);
            }
        }
}

/* If the ranks of a pipeline stage are far apart, the last gradients and the agreement take time after the
 * last backward. */
static void the_norm_is_waited_for_apart(void **state)
{
    struct zr_verify_time near = time_stages(2, 1, 4, ZR_RUN_1F1B, 2, 1e12);
    struct zr_verify_time far = time_stages(2, 1, 4, ZR_RUN_1F1B, 2, 1e9);
    assert_true(near.norm_ns > 0);
    assert_true(far.norm_ns > 500 * near.norm_ns);
    assert_true(far.exposed_ns >= far.bubble_ns + far.norm_ns);
}

static void trace_is_written(void **state)
{
    char path[] = "/tmp/zero-test-time-XXXXXX", text[4096];
    int fd = mkstemp(path);
    assert_true(fd >= 0);
    close(fd);
    timed(a_case(3, 2, 2), a_speed(1e9, 1e9), path);
    FILE *f = fopen(path, "r");
    assert_non_null(f);
    bool gathers = false, named = false, first = true, ended = false;
    while (fgets(text, sizeof text, f)) {
        assert_true(!first || !strcmp(text, "[\n"));
        first = false;
        gathers |= strstr(text, "{\"name\":\"all_gather\",\"ph\":\"X\",\"pid\":1,") != NULL;
        named |= !strcmp(
            text,
            "{\"name\":\"thread_name\",\"ph\":\"M\",\"pid\":1,\"tid\":4,\"args\":{\"name\":\"gather\"}},\n");
        size_t n = strlen(text);
        ended = n >= 3 && !strcmp(text + n - 3, "}]\n");
    }
    fclose(f);
    unlink(path);
    assert_true(gathers && named && ended);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(overlap_hides_links),          cmocka_unit_test(only_the_first_update_is_exposed),
        cmocka_unit_test(outer_hides_behind_backward),  cmocka_unit_test(stages_stand_as_published),
        cmocka_unit_test(the_norm_is_waited_for_apart), cmocka_unit_test(trace_is_written)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
