/* test_time.c: step time on the virtual clock: what must hide hides, what cannot does not. */
#include "shard/verify/verify.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

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

/* Compute of one unit forward: 2 * 1e6 * 1000 / 1e12 s = 2 ms. */
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

static struct zr_verify_time timed(struct zr_verify_case c, struct zr_verify_speed s, const char *trace)
{
    struct zr_verify_time t;
    struct zr_verify_result r;
    assert_int_equal(zr_verify_time(&c, &s, trace, &t, &r), 0);
    if (r.n_reports)
        fail_msg("%s", r.text);
    assert_int_equal(t.peak_bytes, t.plan_bytes);
    assert_int_equal(t.compute_ns, 8 * (2 + 4) * 1000000);
    return t;
}

static void overlap_hides_links(void **state)
{
    (void)state;
    /* Links without limit: nothing is exposed. */
    assert_true(timed(a_case(3, 4, 2), a_speed(1e18, 1e18), NULL).exposed_ns < 10000);
    /* A gather of 2 MB at 2 GB/s takes 1 ms, less than the 2 ms of compute that it hides behind: only the
     * ends of a step show. */
    struct zr_verify_time hidden = timed(a_case(3, 2, 2), a_speed(1e9, 1e9), NULL);
    assert_true(hidden.exposed_ns >= 2000000 && hidden.exposed_ns < 4000000);
    /* Without prefetch every gather shows. */
    struct zr_verify_time demand = timed(a_case(3, 2, 0), a_speed(1e9, 1e9), NULL);
    assert_true(demand.exposed_ns > 10000000);
    /* A network slower than the links of a node shows where ranks are on two nodes. */
    assert_true(timed(a_case(3, 4, 2), a_speed(1e12, 1e8), NULL).step_ns >
                timed(a_case(3, 2, 2), a_speed(1e12, 1e8), NULL).step_ns * 3);
}

static void trace_is_written(void **state)
{
    (void)state;
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
    const struct CMUnitTest tests[] = {cmocka_unit_test(overlap_hides_links),
                                       cmocka_unit_test(trace_is_written)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
