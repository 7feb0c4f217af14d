/* SPDX-License-Identifier: Apache-2.0 */
/* test_rendezvous_names.c: tests ranks that meet at a host name. A name may have addresses of both
 * families, addresses where nobody listens, or no address yet. Rank 0 may also be at addresses of one
 * family while others come by the other. */
#include "test/cmocka.h"
#include "test/comm/meet/meeting.h"
#include "test/held_port.h"

#include <netdb.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

/* --- a resolver --- */

/* Names and their addresses. Every other name is resolved as usual. */
static const struct {
    const char *name, *at[3];
} names[] = {
    {"first-is-nobodys.test", {"::1", "127.0.0.1"}},
    {"mixed.test", {"203.0.113.9", "127.0.0.1", "2001:db8::9"}},
    {"far.test", {"203.0.113.9", "2001:db8::9"}},
};

static atomic_int n_asked, n_stuck;
static atomic_bool let_go;

int __real_getaddrinfo(const char *host, const char *service, const struct addrinfo *hints,
                       struct addrinfo **out);
int __wrap_getaddrinfo(const char *host, const char *service, const struct addrinfo *hints,
                       struct addrinfo **out);
void __real_freeaddrinfo(struct addrinfo *all);
void __wrap_freeaddrinfo(struct addrinfo *all);

struct answer {
    struct addrinfo of[3];
    union zr_address at[3];
};

static int answer_with(const char *const at[3], struct addrinfo **out)
{
    struct answer *a = calloc(1, sizeof *a);
    for (int i = 0; i < 3 && at[i]; i++) {
        if (!zr_address_parse(at[i], 0, &a->at[i]))
            abort();
        a->of[i].ai_family = a->at[i].any.sa_family;
        a->of[i].ai_addr = &a->at[i].any;
        a->of[i].ai_addrlen = a->at[i].any.sa_family == AF_INET ? sizeof a->at[i].v4 : sizeof a->at[i].v6;
        a->of[i].ai_canonname = (char *)names; /* marks a result as the test's own */
        if (i)
            a->of[i - 1].ai_next = &a->of[i];
    }
    *out = a->of;
    return 0;
}

int __wrap_getaddrinfo(const char *host, const char *service, const struct addrinfo *hints,
                       struct addrinfo **out)
{
    atomic_fetch_add(&n_asked, 1);
    if (strcmp(host, "stuck.test") == 0) {
        atomic_fetch_add(&n_stuck, 1);
        for (int i = 0; i < 20000 && !atomic_load(&let_go); i++)
            sleep_ms(1);
        atomic_fetch_sub(&n_stuck, 1);
        return EAI_AGAIN;
    }
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (strcmp(host, names[i].name) == 0)
            return answer_with(names[i].at, out);
    return __real_getaddrinfo(host, service, hints, out);
}

void __wrap_freeaddrinfo(struct addrinfo *all)
{
    if (all && all->ai_canonname == (char *)names)
        free(all);
    else
        __real_freeaddrinfo(all);
}

/* --- ranks that meet --- */

static bool has_ipv6(void)
{
    union zr_address a;
    int fd = zr_address_parse("::1", 0, &a) ? zr_address_bind(&a) : -1;
    if (fd < 0)
        print_message("this host has no ::1\n");
    else
        close(fd);
    return fd >= 0;
}

static void meet_at(struct rank *me)
{
    struct meeting m;
    note_error(me, meet(&m, &me->w, LONG_MS));
    if (!me->code)
        RANK_CHECK(me, exchange_ranks(&m) == 0, "%s", zr_error_text());
    RANK_CHECK(me, part(&m), "handles are left");
}

/* hosts: where ranks 0, 1 and 2 look for rank 0. */
static struct rank *meet_three(const char *const hosts[3], void (*before)(struct rank *r))
{
    return run_ranks(false, 3, meet_at, (void *)hosts, before);
}

static void take_host(struct rank *r)
{
    strcpy(r->w.host, ((const char *const *)r->arg)[r->w.rank]);
}

static void take_host_no_key(struct rank *r)
{
    take_host(r);
    r->w.key.n_bytes = 0;
}

static void expect_all(const struct rank *r, int code, const char *text)
{
    for (int i = 0; i < 3; i++)
        expect_rank(&r[i], code, text);
}

/* If nobody listens at one address of a name, the others are tried. */
static void test_first_is_nobodys(void **state)
{
    static const char *const hosts[3] = {"127.0.0.1", "first-is-nobodys.test", "first-is-nobodys.test"};
    expect_all(meet_three(hosts, take_host), 0, "");
    expect_all(meet_three(hosts, take_host_no_key), 0, "");
}

/* Without a key, both sides use only the loopback addresses of a name. If it has none, no rank goes on. */
static void test_without_key(void **state)
{
    static const char *const mixed[3] = {"mixed.test", "mixed.test", "mixed.test"}, *const far[3] = {
                                                                                        "far.test",
                                                                                        "far.test",
                                                                                        "far.test"};
    expect_all(meet_three(mixed, take_host_no_key), 0, "");
    expect_all(meet_three(far, take_host_no_key), ZERO_ERR_ARG,
               "rank 0's address far.test (203.0.113.9) can be reached by other hosts");
}

/* Ranks 1 and 2 come by either family. Rank 0 is at a name of both, or at all addresses: because it says so,
 * or because it cannot resolve its own name. */
static void test_both_families(void **state)
{
    static const char *const hosts[][3] = {
        {"localhost", "127.0.0.1", "::1"}, {"::", "127.0.0.1", "::1"}, {"name.test", "::1", "127.0.0.1"}};
    if (!has_ipv6())
        skip();
    for (size_t i = 0; i < sizeof hosts / sizeof *hosts; i++)
        expect_all(meet_three(hosts[i], take_host), 0, "");
    expect_all(meet_three(hosts[0], take_host_no_key), 0, "");
}

static void twins(struct rank *r)
{
    take_host(r);
    if (r->w.rank == 2)
        r->w.rank = 1;
}

/* A peer that came by IPv4 to a socket of both families is named by its IPv4 address. */
static void test_names_of_peers(void **state)
{
    static const char *const hosts[3] = {"::", "127.0.0.1", "127.0.0.1"};
    if (!has_ipv6())
        skip();
    const struct rank *r = meet_three(hosts, twins);
    for (int i = 0; i < 3; i++)
        expect_rank(&r[i], ZERO_ERR_MISMATCH, "rank 1 is there twice: at 127.0.0.1:");
}

static struct zr_world world_at(int rank, const char *host)
{
    struct zr_world w = {.rank = rank, .world = 2, .port = held_port(), .key = {.n_bytes = 16}};
    strcpy(w.host, host);
    return w;
}

static void expect_text(int code, int want, const char *text)
{
    if (code != want || !strstr(zr_error_text(), text))
        fail_msg("code %d: \"%s\", expected %d with \"%s\"", code, zr_error_text(), want, text);
}

/* If the port is taken in one of the two families, rank 0 listens in neither. */
static void test_half_taken(void **state)
{
    struct zr_world w = world_at(0, "localhost");
    union zr_address taken, other;
    struct meeting m;
    if (!has_ipv6())
        skip();
    assert_true(zr_address_parse("::1", w.port, &taken) && zr_address_parse("127.0.0.1", w.port, &other));
    int fd = zr_address_bind(&taken);
    assert_true(fd >= 0 && listen(fd, 1) == 0);
    char text[96];
    snprintf(text, sizeof text, "rank 0 cannot listen at [::1]:%d (lo): address already in use", w.port);
    expect_text(meet(&m, &w, SHORT_MS), ZERO_ERR_SYSTEM, text);
    assert_int_equal(uv_loop_close(&m.loop), 0);
    close(fd);
    fd = zr_address_bind(&other);
    assert_true(fd >= 0 && listen(fd, 1) == 0);
    close(fd);
}

/* No interface of rank 0's host has the address, as with a gateway. Rank 0 then listens at all of its
 * addresses, and says so if nobody comes. */
static void test_not_ours(void **state)
{
    static const char *const hosts[3] = {"203.0.113.9", "127.0.0.1", "127.0.0.1"};
    expect_all(meet_three(hosts, take_host), 0, "");
    struct zr_world w = world_at(0, "203.0.113.9");
    struct meeting m;
    expect_text(meet(&m, &w, 200), ZERO_ERR_TIMEOUT,
                "203.0.113.9 is not an address of this host, so rank 0 listens at all of its addresses");
    assert_int_equal(uv_loop_close(&m.loop), 0);
}

/* A rank that found nobody says where it looked, and from which address. */
static void test_nobody_there(void **state)
{
    struct zr_world w = world_at(1, "127.0.0.1");
    struct meeting m;
    char text[160];
    snprintf(text, sizeof text,
             "rank 1 (127.0.0.1 on lo) waited 300 ms for rank 0 at 127.0.0.1:%d; last: ", w.port);
    expect_text(meet(&m, &w, 300), ZERO_ERR_TIMEOUT, text);
    assert_int_equal(uv_loop_close(&m.loop), 0);
    w = world_at(1, "first-is-nobodys.test");
    snprintf(text, sizeof text,
             "waited 300 ms for rank 0 at first-is-nobodys.test:%d (::1, 127.0.0.1); last:", w.port);
    expect_text(meet(&m, &w, 300), ZERO_ERR_TIMEOUT, text);
    assert_int_equal(uv_loop_close(&m.loop), 0);
    if (!has_ipv6())
        skip();
    w = world_at(1, "::1");
    snprintf(text, sizeof text, "rank 1 (::1 on lo) waited 300 ms for rank 0 at [::1]:%d; last: ", w.port);
    expect_text(meet(&m, &w, 300), ZERO_ERR_TIMEOUT, text);
    assert_int_equal(uv_loop_close(&m.loop), 0);
}

/* A name that was resolved is not resolved again at each try. */
static void test_asked_rarely(void **state)
{
    struct zr_world w = world_at(1, "first-is-nobodys.test");
    struct meeting m;
    int before = atomic_load(&n_asked);
    uint64_t begun_ns = uv_hrtime();
    assert_int_equal(meet(&m, &w, 600), ZERO_ERR_TIMEOUT);
    assert_int_equal(uv_loop_close(&m.loop), 0);
    int n = atomic_load(&n_asked) - before, seconds = (int)((uv_hrtime() - begun_ns) / 1000000000);
    if (n < 1 || n > 2 + seconds)
        fail_msg("looked up %d times in %d s", n, seconds);
}

/* --- a resolver that does not answer --- */

static void test_stuck(void **state)
{
    struct zr_world w = world_at(1, "stuck.test");
    struct meeting m;
    expect_text(meet(&m, &w, 200), ZERO_ERR_TIMEOUT,
                "last: the address of \"stuck.test\" is being looked up");
    assert_int_equal(uv_loop_close(&m.loop), 0);
    for (int i = 0; i < 10000 && !atomic_load(&n_stuck); i++)
        sleep_ms(1);
    int still = atomic_load(&n_stuck); /* nobody has waited for it */
    atomic_store(&let_go, true);
    for (int i = 0; i < 30000 && atomic_load(&n_stuck); i++)
        sleep_ms(1);
    sleep_ms(20); /* for the thread to end */
    assert_int_equal(still, 1);
    assert_int_equal(atomic_load(&n_stuck), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_first_is_nobodys),
        cmocka_unit_test(test_without_key),
        cmocka_unit_test(test_both_families),
        cmocka_unit_test(test_names_of_peers),
        cmocka_unit_test(test_half_taken),
        cmocka_unit_test(test_not_ours),
        cmocka_unit_test(test_nobody_there),
        cmocka_unit_test(test_asked_rarely),
        cmocka_unit_test(test_stuck),
    };
    return cmocka_run_group_tests_name("rendezvous names", tests, NULL, NULL);
}
