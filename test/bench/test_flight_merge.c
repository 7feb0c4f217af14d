/* SPDX-License-Identifier: Apache-2.0 */
/* test_flight_merge.c: tests the comparison of ranks' flight recorders. In random jobs one rank is dead,
 * makes another operation, is late, or has left no file: exactly that is found, with its call. In other
 * jobs nothing is found. Files that do not belong together are refused, and the message names them. */
#include "bench/arguments.h"
#include "bench/flight/merge.h"
#include "test/cmocka.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { MAX_WORLD = 8, MAX_OPS = 60 };

static unsigned seed;

static uint32_t below(uint32_t n)
{
    seed = seed * 1664525u + 1013904223u;
    return (seed >> 8) % n;
}

static int begin(void **state)
{
    const char *given = getenv("SEED");
    seed = given ? (unsigned)strtoul(given, NULL, 10) : (unsigned)time(NULL) ^ (unsigned)getpid() << 8;
    print_message("SEED=%u\n", seed);
    *state = strdup("/tmp/test_flight_merge.XXXXXX");
    return mkdtemp(*state) ? 0 : -1;
}

static int end(void **state)
{
    rmdir(*state);
    free(*state);
    return 0;
}

/* A random job. dead, different, late and missing are ranks, or -1 if there is none. */
struct job {
    int world, n_ops;
    int dead, signal;
    /* bits of the ranks that have ended too, the signal that ended them, and the one that the launcher had
     * sent */
    unsigned ended;
    int by;
    uint32_t asked;
    /* how long after the others the dead rank was looked at; all were looked at together */
    int64_t seen_after_ns;
    bool at_once;
    int different, at;
    int late, n_late;
    int missing;
    int inner; /* size of the groups that gather */
};

static struct zr_tag tag_of(const struct job *j, int rank, int n)
{
    bool other = rank == j->different && n == j->at;
    return (struct zr_tag){.unit = other ? 1000 : n % 7, .step = (uint32_t)(n / 10 + 1), .call_hash = 5};
}

static void record(struct zr_flight *f, const struct job *j, int rank)
{
    int first = rank / j->inner * j->inner, n_ops = rank == j->late ? j->n_ops - j->n_late : j->n_ops;
    int32_t members[MAX_WORLD];
    for (int i = 0; i < MAX_WORLD; i++)
        members[i] = first + i;
    zr_flight_role(f, ZR_ROLE_GATHER,
                   &(struct zr_group){.size = j->inner, .rank = rank - first, .members = members});
    for (int n = 1; n <= n_ops; n++) {
        const struct zr_logged_call call = {
            .name = ZR_CALL_BEGIN, .subject = n % 7, .step = (uint32_t)(n / 10 + 1)};
        struct zr_tag tag = tag_of(j, rank, n);
        zr_flight_enter(f, &call);
        zr_flight_issue(f, ZR_ROLE_GATHER, ZR_OP_ALL_GATHER, 4096, &tag);
        zr_flight_start(&tag.mark);
        if (n < n_ops)
            zr_flight_finish(&tag.mark);
        zr_flight_leave(f);
    }
}

static void write_rank(const char *folder, const struct job *j, int rank, char path[ZR_FLIGHT_PATH])
{
    const struct zr_flight_owner owner = {.rank = rank, .world = j->world, .job = "job"};
    struct zr_flight_view *v = malloc(sizeof *v);
    struct zr_flight *f;
    char why[ZR_FLIGHT_TEXT];
    assert_non_null(v);
    assert_int_equal(zr_flight_open(&owner, &f, why), 0);
    record(f, j, rank);
    zr_flight_copy(f, v);
    if (rank == j->dead) {
        v->has_ended = 1;
        v->signal = j->signal;
        v->exit_code = !j->signal;
        v->copied_ns += j->seen_after_ns;
    } else if (j->ended >> rank & 1) {
        v->has_ended = 1;
        v->signal = j->by;
        v->exit_code = j->by ? 0 : 3;
    }
    if (j->ended >> rank & 1)
        v->asked = j->asked;
    if (j->at_once)
        v->epoch_ns = -v->copied_ns;
    assert_int_equal(zr_flight_write_file(v, folder, path), 0);
    zr_flight_close(f);
    free(v);
}

struct findings {
    int n;
    struct flight_finding at[64];
};

static void on_finding(void *arg, const struct flight_finding *f)
{
    struct findings *all = arg;
    assert_true(all->n < 64);
    all->at[all->n++] = *f;
}

/* Reads the files in random order. */
static void judge(const char *folder, const struct job *j, struct findings *out)
{
    char paths[MAX_WORLD][ZR_FLIGHT_PATH], *given[MAX_WORLD] = {0};
    struct flight f;
    int n = 0;
    for (int rank = 0; rank < j->world; rank++)
        if (rank != j->missing) {
            write_rank(folder, j, rank, paths[n]);
            given[n] = paths[n];
            n++;
        }
    for (int i = n; i-- > 1;) {
        int k = (int)below((uint32_t)i + 1);
        char *p = given[i];
        given[i] = given[k];
        given[k] = p;
    }
    out->n = 0;
    assert_int_equal(flight_open(&f, "test", given, n), 0);
    assert_int_equal(f.n, n);
    flight_judge(&f, on_finding, out);
    flight_close(&f);
    for (int i = 0; i < n; i++)
        unlink(paths[i]);
}

static struct job draw_job(void)
{
    static const int inner_of[MAX_WORLD + 1][2] = {{0, 0}, {0, 0}, {2, 2}, {3, 3}, {4, 2},
                                                   {5, 5}, {6, 3}, {7, 7}, {8, 4}};
    int world = 2 + (int)below(MAX_WORLD - 1);
    return (struct job){.world = world,
                        .n_ops = 2 + (int)below(MAX_OPS),
                        .inner = inner_of[world][below(2)],
                        .dead = -1,
                        .different = -1,
                        .late = -1,
                        .missing = -1};
}

static void test_what_stands_out(void **state)
{
    struct findings all;
    for (int round = 0; round < 200; round++) {
        struct job j = draw_job();
        int faulty = (int)below((uint32_t)j.world), what = (int)below(5);
        char call[ZR_CALL_LOG_CHARS];
        if (what == 1) {
            j.dead = faulty;
            j.signal = below(2) ? 9 : 0;
        } else if (what == 2) {
            j.different = faulty;
            j.at = 1 + (int)below((uint32_t)j.n_ops);
        } else if (what == 3) {
            j.late = faulty;
            j.n_late = 1 + (int)below((uint32_t)j.n_ops);
        } else if (what == 4) {
            j.missing = faulty;
        }
        judge(*state, &j, &all);
        if (what == 0) {
            assert_int_equal(all.n, 0);
            continue;
        }
        assert_int_equal(all.n, 1);
        const struct flight_finding *f = &all.at[0];
        int last = j.n_ops - (what == 3 ? j.n_late : 0), n = what == 2 ? j.at : last;
        snprintf(call, sizeof call, "zero_begin(unit %d, forward) in step %d", n % 7, n / 10 + 1);
        /* If two differ, neither is known to be right. The later one is compared with the first. */
        if (what == 2)
            assert_true(f->rank == faulty || (faulty % j.inner == 0 && f->rank == faulty + 1));
        else
            assert_int_equal(f->rank, faulty);
        assert_int_equal(f->kind, what == 1   ? FLIGHT_DEAD
                                  : what == 2 ? FLIGHT_DIFFERENT
                                  : what == 3 ? FLIGHT_LATE
                                              : FLIGHT_MISSING);
        if (what != 4 && n > 0)
            assert_string_equal(f->call, call);
        if (what == 2) {
            assert_non_null(strstr(f->text, "unit 1000"));
            assert_non_null(strstr(f->text, "another unit"));
        }
    }
}

/* A killed rank may be seen after one that has noticed its loss and for which the launcher ends all
 * others. What counts is who ended a rank, not when. */
static void test_ranks_that_the_launcher_ended(void **state)
{
    static const int by[] = {SIGTERM, SIGKILL, 0};
    struct findings all;
    for (int round = 0; round < 100; round++) {
        struct job j = draw_job();
        j.dead = (int)below((uint32_t)j.world);
        j.by = by[round % 3];
        j.signal = j.by == SIGKILL ? SIGSEGV : SIGKILL;
        j.asked = UINT32_C(1) << SIGTERM | (j.by == SIGKILL ? UINT32_C(1) << SIGKILL : 0);
        /* the dead rank too may get a signal, before the launcher sees that it is dead */
        j.ended = (1u << j.world) - 1 - (below(2) << j.dead);
        j.seen_after_ns = below(2) ? INT64_C(20000000) : 0;
        judge(*state, &j, &all);
        assert_int_equal(all.at[0].kind, FLIGHT_DEAD);
        assert_int_equal(all.at[0].rank, j.dead);
        assert_non_null(strstr(all.at[0].text, "was killed by signal"));
        assert_int_equal(all.n, j.by ? 1 : j.world);
        for (int i = 1; i < all.n; i++) {
            assert_int_equal(all.at[i].kind, FLIGHT_DEAD);
            assert_non_null(strstr(all.at[i].text, "exited with code 3 and without zero_unwrap (its launcher "
                                                   "had asked it to end)"));
        }
    }
}

/* A rank that exits because another was killed may be seen at the same time. */
static void test_one_that_was_killed_comes_before_those_that_exit(void **state)
{
    struct findings all;
    struct job j = draw_job();
    j.dead = j.world - 1;
    j.signal = SIGKILL;
    j.ended = (1u << j.dead) - 1;
    j.at_once = true;
    judge(*state, &j, &all);
    assert_int_equal(all.n, j.world);
    for (int i = 0; i < all.n; i++)
        assert_int_equal(all.at[i].rank, i ? i - 1 : j.dead);
}

/* Other ranks time out because of one that waits for something else. Then the launcher ends it. */
static void test_a_late_rank_that_the_launcher_ended(void **state)
{
    struct findings all;
    struct job j = draw_job();
    j.late = (int)below((uint32_t)j.world);
    j.n_late = 1;
    j.ended = 1u << j.late;
    j.by = SIGTERM;
    j.asked = UINT32_C(1) << SIGTERM;
    judge(*state, &j, &all);
    assert_int_equal(all.n, 1);
    assert_int_equal(all.at[0].kind, FLIGHT_LATE);
    assert_int_equal(all.at[0].rank, j.late);
}

static void test_files_that_do_not_belong_together(void **state)
{
    struct job a = draw_job(), b = a;
    char paths[3][ZR_FLIGHT_PATH], *given[3] = {paths[0], paths[1], paths[2]};
    struct flight f;
    b.world++;
    write_rank(*state, &a, 0, paths[0]);
    write_rank(*state, &b, 1, paths[1]);
    assert_int_equal(flight_open(&f, "test", given, 2), EXIT_USAGE);
    snprintf(paths[2], sizeof paths[2], "%s/again", (char *)*state);
    assert_int_equal(rename(paths[0], paths[2]), 0);
    write_rank(*state, &a, 0, paths[0]);
    given[1] = paths[2];
    assert_int_equal(flight_open(&f, "test", given, 2), EXIT_USAGE);
    assert_int_equal(truncate(paths[2], 100), 0);
    assert_int_equal(flight_open(&f, "test", given, 2), EXIT_USAGE);
    for (int i = 0; i < 3; i++)
        unlink(paths[i]);
    assert_int_equal(flight_open(&f, "test", given, 2), EXIT_USAGE);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_what_stands_out, begin, end),
        cmocka_unit_test_setup_teardown(test_ranks_that_the_launcher_ended, begin, end),
        cmocka_unit_test_setup_teardown(test_one_that_was_killed_comes_before_those_that_exit, begin, end),
        cmocka_unit_test_setup_teardown(test_a_late_rank_that_the_launcher_ended, begin, end),
        cmocka_unit_test_setup_teardown(test_files_that_do_not_belong_together, begin, end),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
