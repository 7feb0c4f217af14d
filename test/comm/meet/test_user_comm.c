/* SPDX-License-Identifier: Apache-2.0 */
/* test_user_comm.c: tests where ranks meet that can exchange bytes already: on loopback, at the address that
 * the user gives, or at one of the addresses that rank 0 offers. */
#include "comm/meet/user_comm.h"
#include "test/cmocka.h"
#include "test/comm/ranks.h"

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
        cmocka_unit_test(test_one_loopback),         cmocka_unit_test(test_own_addresses),
        cmocka_unit_test(test_several_hosts),        cmocka_unit_test(test_other_name),
        cmocka_unit_test(test_wrong_bytes),          cmocka_unit_test(test_meet_by_list),
        cmocka_unit_test(test_another_job_is_there),
    };
    return cmocka_run_group_tests_name("user_comm", tests, NULL, NULL);
}
