/* SPDX-License-Identifier: Apache-2.0 */
/* test_user_comm.c: tests where ranks meet that can exchange bytes already: on loopback, at the address that
 * the user gives, or at one of the addresses that rank 0 offers. */
#include "comm/meet/user_comm.h"
#include "kernels/device.h"
#include "kernels/log.h"
#include "test/cmocka.h"
#include "test/comm/ranks.h"

#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
#include <xxhash.h>

/* --- the cards --- */

/* Fills both cards of a world of two. What rank 0 fills in goes to *w. */
static void fill(struct zr_world *w, struct zr_user_comm_card c[2])
{
    const struct zr_world other = {.rank = 1, .world = 2};
    int held = -1, none = -1;
    w->world = 2;
    assert_int_equal(zr_user_comm_fill(w, &held, &c[0]), 0);
    assert_int_equal(zr_user_comm_fill(&other, &none, &c[1]), 0);
    assert_int_equal(none, -1);
    if (held >= 0)
        close(held);
}

/* Gives changed cards their hash. */
static void sign(struct zr_user_comm_card c[2])
{
    for (int i = 0; i < 2; i++)
        c[i].sum = XXH3_64bits((const char *)&c[i] + sizeof c[i].sum, sizeof c[i] - sizeof c[i].sum);
}

static void choose(struct zr_user_comm_card c[2], struct zr_world *w)
{
    sign(c);
    *w = (struct zr_world){.rank = 1, .world = 2};
    if (zr_user_comm_choose(c, "nccl_comm", w))
        fail_msg("%s", zr_error_text());
    assert_int_equal(w->key.n_bytes, c[0].key.n_bytes);
    assert_memory_equal(w->key.bytes, c[0].key.bytes, sizeof w->key.bytes);
}

static void test_one_loopback(void **state)
{
    struct zr_world w = {.rank = 0};
    struct zr_user_comm_card c[2];
    fill(&w, c);
    assert_true(c[0].port > 0 && c[0].key.n_bytes > 0);
    choose(c, &w);
    assert_string_equal(w.host, "127.0.0.1");
    assert_int_equal(w.port, c[0].port);
    assert_int_equal(w.n_at, 0);
}

/* The addresses that rank 0 offers can be reached from other hosts, and have its port. */
static void test_own_addresses(void **state)
{
    struct zr_world w = {.rank = 0};
    struct zr_user_comm_card c[2];
    union zr_address at[ZR_LOOKUP_MAX];
    fill(&w, c);
    int n = zr_address_list_read(c[0].at, strlen(c[0].at), at);
    assert_true(n >= 0); /* a machine without a network has none */
    for (int i = 0; i < n; i++)
        assert_true(zr_address_reaches_far(&at[i]) && zr_address_port(&at[i]) == c[0].port);
    strcpy(w.interface, "lo");
    fill(&w, c);
    assert_string_equal(c[0].at, "");
    w.interface[0] = 0;
    strcpy(w.host, "node7"); /* MASTER_ADDR */
    fill(&w, c);
    assert_string_equal(c[0].at, "");
    c[1].loopback++;
    choose(c, &w);
    assert_string_equal(w.host, "node7");
    assert_true(w.n_at == 0 && w.port == c[0].port);
}

static void test_several_hosts(void **state)
{
    struct zr_world w = {.rank = 0};
    struct zr_user_comm_card c[2];
    union zr_address want;
    fill(&w, c);
    c[1].loopback++;
    snprintf(c[0].at, sizeof c[0].at, "10.77.0.1:%d [fd77::1]:%d", (int)c[0].port, (int)c[0].port);
    choose(c, &w);
    assert_string_equal(w.host, "");
    assert_true(w.n_at == 2 && w.port == c[0].port);
    assert_true(zr_address_parse("10.77.0.1", w.port, &want) && zr_address_same(&w.at[0], &want));
    assert_true(zr_address_parse("fd77::1", w.port, &want) && zr_address_same(&w.at[1], &want));
    c[0].at[0] = 0;
    sign(c);
    assert_int_equal(zr_user_comm_choose(c, "nccl_comm", &w), ZERO_ERR_ARG);
    assert_string_equal(
        zr_error_text(),
        "the ranks of nccl_comm are on several hosts, and rank 0's host, or its interface, has no address "
        "that other hosts can reach: set cfg.launch.rendezvous or ZERO_RENDEZVOUS to tcp://host:port");
}

static void test_other_name(void **state)
{
    struct zr_world w = {.rank = 0, .name = "gen"};
    struct zr_user_comm_card c[2];
    fill(&w, c);
    strcpy(c[1].name, "disc");
    sign(c);
    assert_int_equal(zr_user_comm_choose(c, "nccl_comm", &w), ZERO_ERR_MISMATCH);
    assert_string_equal(zr_error_text(),
                        "cfg.launch.name is \"gen\" on rank 0 and \"disc\" on rank 1: ranks that meet over "
                        "nccl_comm must wrap their contexts in the same order");
}

/* Bytes that an exchange has changed, or put in another place, are an error. */
static void test_wrong_bytes(void **state)
{
    struct zr_world w = {.rank = 0};
    struct zr_user_comm_card c[2], was[2];
    fill(&w, c);
    memcpy(was, c, sizeof c);
    for (size_t at = 0; at < sizeof c[1]; at += 61) {
        ((char *)&c[1])[at] ^= 4;
        assert_int_equal(zr_user_comm_choose(c, "exchange", &w), ZERO_ERR_FAILED);
        assert_non_null(strstr(zr_error_text(), "exchange gave rank 0 wrong bytes for rank 1"));
        memcpy(c, was, sizeof c);
    }
    c[1] = c[0];
    assert_int_equal(zr_user_comm_choose(c, "exchange", &w), ZERO_ERR_ARG);
    assert_non_null(strstr(zr_error_text(), "gave rank 0 the bytes of rank 0 in the place of rank 1"));
    memcpy(c, was, sizeof c);
    c[1].world = 3;
    sign(c);
    assert_int_equal(zr_user_comm_choose(c, "exchange", &w), ZERO_ERR_ARG);
    assert_non_null(strstr(zr_error_text(), "world is 3 on rank 1 and 2 on rank 0"));
}

/* Rank 0 alone has all cards. The others need only its own to come to the same result. */
static void test_checked_by_rank_0(void **state)
{
    const struct zr_world of_0 = {.rank = 0, .world = 2};
    struct zr_world w = {.rank = 0}, want, found = {.rank = 1, .world = 2};
    struct zr_user_comm_card c[2], first;
    fill(&w, c);
    choose(c, &want);
    zr_user_comm_check(c, "mpi_comm", &of_0);
    first = c[0];
    assert_int_equal(zr_user_comm_choose(&first, "mpi_comm", &found), 0);
    assert_string_equal(found.host, want.host);
    assert_int_equal(found.port, want.port);
    fill(&w, c);
    strcpy(c[0].address, "node7");
    c[1].loopback++;
    sign(c);
    zr_user_comm_check(c, "mpi_comm", &of_0);
    first = c[0];
    assert_int_equal(zr_user_comm_choose(&first, "mpi_comm", &found), 0);
    assert_string_equal(found.host, "node7");
    first.port ^= 1;
    assert_int_equal(zr_user_comm_choose(&first, "mpi_comm", &found), ZERO_ERR_FAILED);
    fill(&w, c);
    zr_first_error_put(&c[1], zr_fail(ZERO_ERR_IO, "the disk"));
    sign(c);
    zr_user_comm_check(c, "mpi_comm", &of_0);
    for (int rank = 0; rank < 2; rank++) {
        found.rank = rank;
        zr_fail(ZERO_ERR_FAILED, "another");
        assert_int_equal(zr_user_comm_choose(c, "mpi_comm", &found), ZERO_ERR_IO);
        assert_string_equal(zr_error_text(), "rank 1: the disk");
    }
}

/* --- the program's all-gather --- */

enum { WORLD = 3, PATIENCE_MS = 300 };

/* An all-gather that writes n ranks' bytes, or waits until it may go on. */
struct program {
    int n;
    atomic_bool waits, has_device;
};

static _Thread_local bool has_device;

static int begin_thread(struct zr_device *dev)
{
    has_device = true;
    return 0;
}

static int gather(void *arg, const void *mine, void *all, size_t bytes)
{
    struct program *p = arg;
    atomic_store(&p->has_device, has_device);
    while (atomic_load(&p->waits))
        usleep(1000);
    for (int i = 0; i < p->n; i++)
        memcpy((char *)all + (size_t)i * bytes, mine, bytes);
    return 0;
}

/* A rank that has ended. begun: it had begun to meet the others. */
struct ending {
    int rank;
    bool begun;
};

static bool has_ended(void *arg, int rank, bool *has_begun, char *how, size_t n_how)
{
    const struct ending *e = arg;
    *has_begun = e && e->begun;
    snprintf(how, n_how, "its program returned 3");
    return e && rank == e->rank;
}

static void count_line(void *arg, const char *line)
{
    if (strstr(line,
               "zero_wrap still waits: cfg.launch.exchange (do all ranks call zero_wrap, and is it set on "
               "all?) has not returned on rank 1 after "))
        ++*(int *)arg;
}

/* Calls the program's all-gather on rank 1 of WORLD. */
static int call_program(struct program *p, struct zr_waiting *waiting, struct zr_device *dev)
{
    static struct zr_user_comm_card mine, all[WORLD];
    const struct zr_world w = {.rank = 1, .world = WORLD, .waiting = waiting};
    struct zr_user_comm c = {.name = "exchange",
                             .exchange = gather,
                             .exchange_arg = p,
                             .timeout_ms = PATIENCE_MS,
                             .w = &w,
                             .dev = dev};
    return zr_user_comm_call(&c, &mine, all, sizeof mine);
}

/* A group that is larger than the world is found, and overwrites nothing. */
static void test_other_group(void **state)
{
    static struct program p;
    p.n = WORLD;
    assert_int_equal(call_program(&p, NULL, NULL), 0);
    for (p.n = WORLD + 1; p.n <= 2 * WORLD; p.n++) {
        char text[96];
        snprintf(text, sizeof text, "gave rank 1 the bytes of %d ranks or more, but cfg.launch.world is 3",
                 p.n);
        assert_int_equal(call_program(&p, NULL, NULL), ZERO_ERR_ARG);
        if (!strstr(zr_error_text(), text))
            fail_msg("%s", zr_error_text());
    }
}

static void test_device_of_thread(void **state)
{
    static struct program p = {.n = WORLD};
    const struct zr_device_ops ops = {.thread_begin = begin_thread};
    struct zr_device dev = {.ops = &ops};
    assert_int_equal(call_program(&p, NULL, &dev), 0);
    assert_true(p.has_device && !has_device);
    assert_int_equal(call_program(&p, NULL, NULL), 0);
    assert_false(p.has_device);
}

/* A wait says so now and then, and ends if a rank has ended. */
static void test_long_wait(void **state)
{
    static struct program p[3] = {{WORLD, true}, {WORLD, true}, {WORLD, true}};
    struct ending ended = {.rank = 2};
    struct zr_log *log;
    int n_lines = 0;
    assert_int_equal(zr_log_open(count_line, &n_lines, NULL, &log), 0);
    struct zr_waiting waiting = {.log = log, .remind_ms = 50, .has_ended = has_ended};
    assert_int_equal(call_program(&p[0], &waiting, NULL), ZERO_ERR_TIMEOUT);
    assert_true(n_lines > 1);
    waiting.arg = &ended;
    assert_int_equal(call_program(&p[1], &waiting, NULL), ZERO_ERR_PEER);
    if (!strstr(zr_error_text(), "rank 2 ended before it came to zero_wrap: its program returned 3"))
        fail_msg("%s", zr_error_text());
    ended.begun = true;
    assert_int_equal(call_program(&p[2], &waiting, NULL), ZERO_ERR_PEER);
    if (!strstr(zr_error_text(), "rank 2 ended in zero_wrap: its program returned 3"))
        fail_msg("%s", zr_error_text());
    for (int i = 0; i < 3; i++)
        atomic_store(&p[i].waits, false);
    zr_log_close(log);
}

/* --- meeting by a list of addresses --- */

enum { PATIENT_MS = 60000, SHORT_MS = 600, REFUSED_MS = 3000 };

/* Ports that are bound. Nobody listens there unless a rank asks for it. */
struct ports {
    int fd[2];
    union zr_address at[2];
};

static void take_ports(struct ports *p)
{
    for (int i = 0; i < 2; i++) {
        socklen_t n = sizeof p->at[i];
        zr_address_parse("127.0.0.1", 0, &p->at[i]);
        p->fd[i] = zr_address_bind(&p->at[i]);
        assert_true(p->fd[i] >= 0);
        assert_int_equal(getsockname(p->fd[i], &p->at[i].any, &n), 0);
    }
}

static void drop_ports(const struct ports *p)
{
    close(p->fd[0]);
    close(p->fd[1]);
}

/* Rank 0 listens at the second address. */
static void take_list(struct zr_world *w, const struct ports *p)
{
    w->host[0] = 0;
    w->n_at = 2;
    memcpy(w->at, p->at, sizeof p->at);
    w->port = zr_address_port(&p->at[1]);
}

static void open_rank(struct rank *me, const struct zr_world *w, int64_t timeout_ms)
{
    struct zr_rendezvous *rdv = NULL;
    uv_loop_t loop;
    uv_loop_init(&loop);
    note_error(me, zr_rendezvous_open(&loop, w, timeout_ms, &rdv));
    zr_rendezvous_free(rdv);
    RANK_CHECK(me, uv_loop_close(&loop) == 0, "handles are left");
}

static void meet(struct rank *me)
{
    take_list(&me->w, me->arg);
    open_rank(me, &me->w, PATIENT_MS);
}

static void miss(struct rank *me)
{
    take_list(&me->w, me->arg);
    if (me->w.rank != 0)
        open_rank(me, &me->w, SHORT_MS);
}

static void test_meet_by_list(void **state)
{
    struct ports p;
    char both[ZR_ADDRESS_LIST_CHARS];
    take_ports(&p);
    zr_address_list_print(p.at, 2, both);
    struct rank *r = run_ranks(false, 4, meet, &p, NULL);
    for (int i = 0; i < 4; i++)
        expect_rank(&r[i], 0, "");
    r = run_ranks(false, 2, miss, &p, NULL);
    expect_rank(&r[1], ZERO_ERR_TIMEOUT, both);
    drop_ports(&p);
}

/* Ranks 0 and 1 are one job, ranks 2 and 3 another. The other job waits at the first address of the list
 * and refuses rank 1 for longer than a rank keeps trying where it has one address only. Then rank 0 comes
 * to the second address. */
static void pass_over(struct rank *me)
{
    const struct ports *p = me->arg;
    struct zr_world w = me->w;
    bool is_other = me->w.rank >= 2;
    w.rank = me->w.rank % 2;
    w.world = 2;
    if (is_other) {
        strcpy(w.host, "127.0.0.1");
        w.port = zr_address_port(&p->at[0]);
        w.key.bytes[0]++;
    } else {
        take_list(&w, p);
    }
    if (me->w.rank == 0)
        sleep_ms(REFUSED_MS + 600);
    if (me->w.rank == 3)
        RANK_CHECK(me, wait_stage(&me->all[1], 1), "rank 1 does not end");
    open_rank(me, &w, PATIENT_MS);
    if (me->w.rank == 1)
        atomic_store(&me->stage, 1);
}

static void test_another_job_is_there(void **state)
{
    struct ports p;
    take_ports(&p);
    struct rank *r = run_ranks(false, 4, pass_over, &p, NULL);
    for (int i = 0; i < 4; i++)
        expect_rank(&r[i], 0, "");
    drop_ports(&p);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_one_loopback),
        cmocka_unit_test(test_own_addresses),
        cmocka_unit_test(test_several_hosts),
        cmocka_unit_test(test_other_name),
        cmocka_unit_test(test_wrong_bytes),
        cmocka_unit_test(test_checked_by_rank_0),
        cmocka_unit_test(test_other_group),
        cmocka_unit_test(test_device_of_thread),
        cmocka_unit_test(test_long_wait),
        cmocka_unit_test(test_meet_by_list),
        cmocka_unit_test(test_another_job_is_there),
    };
    return cmocka_run_group_tests_name("user_comm", tests, NULL, NULL);
}
