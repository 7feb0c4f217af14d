/* SPDX-License-Identifier: Apache-2.0 */
/* test_comm.c: runs the suite of comm_suite.h for self, and for shm with ranks as threads and as
 * processes. */
#include "comm/shm/shm.h"
#include "test/cmocka.h"
#include "test/comm/comm_suite.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { TIMEOUT_MS = 60000 };

static void test_self(void **state)
{
    struct comm_plan p = {.kind = &fixture_self, .seed = fresh_seed("self"), .n_ops = 200};
    run_ranks(false, 1, comm_suite_conform, &p, NULL);
}

static void test_shm_processes(void **state)
{
    static const int worlds[] = {1, 2, 3, 4, 5, 8};
    struct comm_plan p = {.kind = &fixture_shm, .seed = fresh_seed("shm, processes"), .n_ops = 40};
    for (size_t i = 0; i < sizeof worlds / sizeof *worlds; i++)
        run_ranks(true, worlds[i], comm_suite_conform, &p, NULL);
}

static void test_shm_threads(void **state)
{
    struct comm_plan p = {.kind = &fixture_shm, .seed = fresh_seed("shm, threads"), .n_ops = 40};
    for (int world = 1; world <= 8; world++)
        run_ranks(false, world, comm_suite_conform, &p, NULL);
}

static void test_mixed(void **state)
{
    struct comm_plan p = {.kind = &fixture_shm, .seed = fresh_seed("mixed")};
    run_ranks(true, 2, comm_suite_mixed, &p, NULL);
    run_ranks(true, 4, comm_suite_mixed, &p, NULL);
    run_ranks(false, 3, comm_suite_mixed, &p, NULL);
    run_ranks(false, 6, comm_suite_mixed, &p, NULL);
    p.kind = &fixture_self;
    run_ranks(false, 1, comm_suite_mixed, &p, NULL);
}

/* Two groups at once, each with some ranks in any order. Each moves its own bytes only. */
static void test_groups(void **state)
{
    struct fixture_groups g = {3, {2, 0, 1, 4, 3}};
    struct comm_plan p = {.kind = &fixture_shm, .seed = fresh_seed("shm, groups"), .n_ops = 40, .groups = &g};
    run_ranks(true, 5, comm_suite_conform, &p, NULL);
    run_ranks(true, 5, comm_suite_mixed, &p, NULL);
    run_ranks(true, 5, comm_suite_shared, &p, NULL);
    for (int world = 2; world <= 8; world++) {
        comm_suite_deal(&g, p.seed + (uint64_t)world, world);
        run_ranks(true, world, comm_suite_conform, &p, NULL);
    }
}

/* --- more segments under way than the communicator keeps --- */

static void deep_queue(struct rank *me)
{
    enum { N_OPS = 120, N_SEGS = 1000, MOST = 8192 };
    struct fixture o;
    char why[512];
    struct zr_tag tag = {.unit = 1};
    RANK_CHECK(me, fixture_open(&o, &me->w, &fixture_shm, 1, TIMEOUT_MS, (int64_t)MOST * 256) == 0, "%s",
               zr_error_text());
    struct zr_comm *c = o.comm[0];
    struct zr_gather_seg *seg = calloc(MOST + 1, sizeof *seg), *places = calloc(MOST, sizeof *places);
    for (int i = 0; i <= MOST; i++)
        seg[i] = (struct zr_gather_seg){
            .src = i % MOST * 256, .in_place = true, .dst = i % MOST * 256, .cut = {128, 256}};
    memcpy(places, seg, MOST * sizeof *places);
    for (int i = 0; i < MOST; i++)
        memset(o.base[0] + i * 256 + me->w.rank * 128, i % 100 + me->w.rank, 128);
    if (me->w.rank == 1)
        nanosleep(&(struct timespec){.tv_nsec = 100 * 1000000}, NULL); /* so that rank 0's queue fills */
    /* Every other operation has segments with their own lists of places, which are kept too. */
    for (int i = 0; i < N_OPS; i++) {
        int64_t list[] = {5, 5 + 128, 5 + 256};
        for (int k = 0; k < N_SEGS; k++)
            places[k].cut = k % 3 ? (struct zr_cut){.total = 256, .at = list} : seg[k].cut;
        RANK_CHECK(
            me, zr_comm_all_gather(c, o.stream[0], i % 2 ? places : seg + i % 3 * N_SEGS, N_SEGS, &tag) == 0,
            "%s", zr_error_text());
        *(volatile int64_t *)&list[1] = 0;
    }
    /* As many segments as fit in total, starting in the middle of the ring. */
    RANK_CHECK(me, zr_comm_all_gather(c, o.stream[0], seg, MOST, &tag) == 0, "%s", zr_error_text());
    RANK_CHECK(me, zr_comm_all_gather(c, o.stream[0], seg, MOST + 1, &tag) == ZERO_ERR_ARG,
               "too many were taken");
    const int64_t list[] = {0, 128, 256};
    memcpy(places, seg, MOST * sizeof *places);
    places[MOST - 1].cut = (struct zr_cut){.total = 256, .at = list};
    RANK_CHECK(me,
               zr_comm_all_gather(c, o.stream[0], places, MOST, &tag) == ZERO_ERR_ARG &&
                   strstr(zr_error_text(), "1 of 8192 segments have their own places"),
               "\"%s\"", zr_error_text());
    RANK_CHECK(me, zr_comm_exchange(c, o.stream[0], 0, 0, &tag) == 0, "%s", zr_error_text());
    o.dev->ops->stream_sync(o.stream[0]);
    RANK_CHECK(me, zr_comm_status(c, why, sizeof why) == 0, "%s", why);
    for (int i = 0; i < MOST * 256; i++)
        RANK_CHECK(me, o.base[0][i] == i / 256 % 100 + i / 128 % 2, "byte %d", i);
    free(places);
    free(seg);
    RANK_CHECK(me, fixture_close(&o), "handles are left");
}

static void test_deep_queue(void **state)
{
    run_ranks(true, 2, deep_queue, NULL, NULL);
}

/* A peer does not come. A rank that asks for room gets the answer no, and is not held up. */
static void full_queue(struct rank *me)
{
    /* Counts each segment with its list of three places, and allows for an operation that has to skip the
     * end of the ring. None does here, since these sizes divide the ring. */
    enum {
        N_SEGS = 1024,
        SEG = sizeof(union zr_any_seg),
        MOST = N_SEGS + (N_SEGS * 3 * sizeof(int64_t) + SEG - 1) / SEG,
        FIT = (ZR_RING_ENTRIES - 2 * MOST) / N_SEGS + 1
    };
    struct fixture o;
    char why[512];
    struct zr_tag tag = {.unit = 1};
    RANK_CHECK(me, fixture_open(&o, &me->w, &fixture_shm, 1, TIMEOUT_MS, (int64_t)ZR_RING_SEGS * 256) == 0,
               "%s", zr_error_text());
    struct zr_comm *c = o.comm[0];
    struct zr_stream *s = o.stream[0];
    struct zr_gather_seg *seg = calloc(ZR_RING_SEGS, sizeof *seg);
    for (int i = 0; i < ZR_RING_SEGS; i++)
        seg[i] = (struct zr_gather_seg){.src = i * 256, .in_place = true, .dst = i * 256, .cut = {128, 256}};
    for (int round = 0; round < 3; round++) {
        int n = 0;
        if (me->w.rank == round % 2)
            RANK_CHECK(me, all_at(me, 2 * round + 1), "the other does not fill its queue");
        for (; n < FIT; n++) {
            RANK_CHECK(me, me->w.rank == round % 2 || c->ops->has_room(c, 1, N_SEGS), "no room for number %d",
                       n);
            RANK_CHECK(me, zr_comm_all_gather(c, s, seg, N_SEGS, &tag) == 0, "%s", zr_error_text());
        }
        if (me->w.rank != round % 2) {
            RANK_CHECK(me, !c->ops->has_room(c, 1, N_SEGS), "round %d: room for %d more", round, N_SEGS);
            RANK_CHECK(me, c->ops->has_room(c, 1, 0), "no room for what has no segments");
            RANK_CHECK(me, all_at(me, 2 * round + 1), "the other does not come");
        }
        o.dev->ops->stream_sync(s);
        /* At any position of the ring there is room for the two largest operations of a job. */
        RANK_CHECK(me, c->ops->has_room(c, 2, ZR_RING_SEGS), "no room in an empty queue");
        for (int i = 0; i < 2; i++)
            RANK_CHECK(me, zr_comm_all_gather(c, s, seg, ZR_RING_SEGS, &tag) == 0, "%s", zr_error_text());
        o.dev->ops->stream_sync(s);
        RANK_CHECK(me, all_at(me, 2 * round + 2), "a rank is missing");
    }
    RANK_CHECK(me, zr_comm_status(c, why, sizeof why) == 0, "%s", why);
    free(seg);
    RANK_CHECK(me, fixture_close(&o), "handles are left");
}

static void test_full_queue(void **state)
{
    run_ranks(true, 2, full_queue, NULL, NULL);
}

/* --- operation numbers that wrap around --- */

/* Acts as if 2^30 more operations had passed. The stream is idle. */
static void pass_operations(struct zr_comm *c)
{
    struct zr_shm *m = (struct zr_shm *)c;
    m->base.n_issued += 1 << 30;
    atomic_fetch_add(&m->queue.run_seq, 1 << 30);
}

/* Passes more than half as many operations as a word can count, of a kind for which peers raise no
 * word. Then a rank must still wait for peers that are not there yet. */
static void numbers_wrap(struct rank *me)
{
    struct fixture o;
    char why[512];
    struct zr_tag tag = {.unit = 1};
    RANK_CHECK(me, fixture_open(&o, &me->w, &fixture_shm, 1, TIMEOUT_MS, 4096) == 0, "%s", zr_error_text());
    struct zr_comm *c = o.comm[0];
    struct zr_stream *s = o.stream[0];
    uint64_t *word = (uint64_t *)o.base[0];
    struct zr_gather_seg g = {.src = 1024, .dst = 1024, .in_place = true, .cut = {128, 384}};
    for (int round = 0; round < 6; round++) {
        for (int i = 0; i < 3; i++) {
            RANK_CHECK(me, zr_comm_all_gather(c, s, &g, 1, &tag) == 0, "%s", zr_error_text());
            o.dev->ops->stream_sync(s);
            pass_operations(c);
        }
        /* The last of all ranks comes last. */
        RANK_CHECK(me, all_at(me, round + 1), "a rank is missing");
        if (me->w.rank == round % me->w.world)
            nanosleep(&(struct timespec){.tv_nsec = 20 * 1000000}, NULL);
        word[0] = (uint64_t)me->w.rank + 1;
        word[1] = (uint64_t)(round + me->w.rank);
        RANK_CHECK(me, zr_comm_agree(c, s, 0, 1, 1, &tag) == 0, "%s", zr_error_text());
        o.dev->ops->stream_sync(s);
        RANK_CHECK(me, zr_comm_status(c, why, sizeof why) == 0, "%s", why);
        RANK_CHECK(me, word[0] == 6 && word[1] == (uint64_t)round + 2, "%llu and %llu",
                   (unsigned long long)word[0], (unsigned long long)word[1]);
    }
    RANK_CHECK(me, fixture_close(&o), "handles are left");
}

static void test_numbers_wrap(void **state)
{
    run_ranks(true, 3, numbers_wrap, NULL, NULL);
}

/* --- on the caller's own stream --- */

static void on_caller(struct rank *me)
{
    struct fixture o;
    struct zr_stream *s;
    struct zr_tag tag = {.unit = 1};
    RANK_CHECK(me, fixture_open(&o, &me->w, &fixture_shm, 1, TIMEOUT_MS, 4096) == 0, "%s", zr_error_text());
    RANK_CHECK(me, o.dev->ops->stream_open(o.dev, ZR_STREAM_CALLER, "caller", NULL, &s) == 0, "%s",
               zr_error_text());
    struct zr_comm *c = o.comm[0];
    o.base[0][me->w.rank] = (char)(me->w.rank + 1);
    RANK_CHECK(me, zr_comm_exchange(c, s, 0, 1, &tag) == 0, "%s", zr_error_text());
    for (int i = 0; i < me->w.world; i++)
        RANK_CHECK(me, o.base[0][i] == i + 1, "byte %d is %d", i, o.base[0][i]);
    o.dev->ops->stream_close(s);
    RANK_CHECK(me, fixture_close(&o), "handles are left");
}

static void test_caller_stream(void **state)
{
    run_ranks(true, 3, on_caller, NULL, NULL);
}

int main(void)
{
    /* Tests that fork come before tests that start threads in this process. */
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_shm_processes), cmocka_unit_test(test_groups),
        cmocka_unit_test(test_deep_queue),    cmocka_unit_test(test_full_queue),
        cmocka_unit_test(test_numbers_wrap),  cmocka_unit_test(test_caller_stream),
        cmocka_unit_test(test_self),          cmocka_unit_test(test_shm_threads),
        cmocka_unit_test(test_mixed),
    };
    return cmocka_run_group_tests_name("communicators", tests, NULL, NULL);
}
