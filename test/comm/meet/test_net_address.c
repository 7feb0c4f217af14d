/* SPDX-License-Identifier: Apache-2.0 */
/* test_net_address.c: tests addresses of both families, this host's network interfaces, and sockets bound
 * to them. */
#include "comm/meet/net_address.h"
#include "test/cmocka.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static union zr_address address_of(const char *number, int port)
{
    union zr_address a;
    if (!zr_address_parse(number, port, &a))
        fail_msg("%s is not taken for an address", number);
    return a;
}

static void test_numbers(void **state)
{
    static const struct {
        const char *number, *printed, *host;
        bool loopback, far, any;
    } rows[] = {
        {"127.0.0.1", "127.0.0.1:7", "127.0.0.1", true, false, false},
        {"127.255.3.4", "127.255.3.4:7", "127.255.3.4", true, false, false},
        {"10.77.0.1", "10.77.0.1:7", "10.77.0.1", false, true, false},
        {"169.254.1.1", "169.254.1.1:7", "169.254.1.1", false, false, false},
        {"0.0.0.0", "0.0.0.0:7", "0.0.0.0", false, true, true},
        {"::1", "[::1]:7", "::1", true, false, false},
        {"::", "[::]:7", "::", false, true, true},
        {"fd77::0:1", "[fd77::1]:7", "fd77::1", false, true, false},
        {"fe80::1%lo", "[fe80::1%lo]:7", "fe80::1%lo", false, false, false},
        /* the address of an IPv4 peer, as a socket of both families reports it */
        {"::ffff:127.0.0.1", "127.0.0.1:7", "127.0.0.1", true, false, false},
        {"::ffff:10.0.0.1", "10.0.0.1:7", "10.0.0.1", false, true, false},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        union zr_address a = address_of(rows[i].number, 7);
        char printed[ZR_ADDRESS_CHARS], host[ZR_ADDRESS_CHARS];
        zr_address_print(&a, printed);
        zr_address_print_host(&a, host);
        assert_string_equal(printed, rows[i].printed);
        assert_string_equal(host, rows[i].host);
        assert_int_equal(zr_address_port(&a), 7);
        if (zr_address_is_loopback(&a) != rows[i].loopback || zr_address_is_any(&a) != rows[i].any ||
            zr_address_reaches_far(&a) != rows[i].far)
            fail_msg("%s: loopback %d, any %d, far %d", rows[i].number, zr_address_is_loopback(&a),
                     zr_address_is_any(&a), zr_address_reaches_far(&a));
    }
}

static void test_no_numbers(void **state)
{
    static const char *const bad[] = {"",           "localhost", "1.2.3",     "1.2.3.4.5", "[::1]",
                                      "::1::",      "1.2.3.4:5", "256.0.0.1", "fe80::1%",  "fe80::1%nosuch",
                                      "0x7f.1.1.1", "1.2.3.4 ",  "::g"};
    union zr_address a;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        if (zr_address_parse(bad[i], 7, &a))
            fail_msg("\"%s\" is taken for an address", bad[i]);
}

static void test_same(void **state)
{
    union zr_address a = address_of("10.0.0.1", 5), b = address_of("::ffff:10.0.0.1", 5);
    assert_true(zr_address_same(&a, &b) && zr_address_same(&b, &a));
    zr_address_set_port(&b, 6);
    assert_false(zr_address_same(&a, &b));
    zr_address_set_port(&a, 6);
    assert_true(zr_address_same(&a, &b));
    /* The port has the same offset in both families. Here the first four bytes are equal too. */
    a = address_of("fd77::1", 6);
    b = address_of("fd77::2", 6);
    assert_false(zr_address_same(&a, &b));
    b = address_of("253.119.0.0", 6);
    assert_false(zr_address_same(&a, &b));
}

static void test_interfaces(void **state)
{
    struct zr_interfaces c;
    char text[512];
    assert_int_equal(zr_interfaces_all(&c), 0);
    assert_true(c.n > 0);
    zr_interfaces_list(&c, text, sizeof text);
    print_message("this host has %s\n", text);
    assert_non_null(strstr(text, "lo (127.0.0.1"));
    assert_int_equal(zr_interfaces_find("x", "lo", &c), 0);
    for (int i = 0; i < c.n; i++) {
        assert_string_equal(c.of[i].name, "lo");
        assert_true(!i || c.of[i - 1].address.any.sa_family == AF_INET || /* IPv4 comes first */
                    c.of[i].address.any.sa_family == AF_INET6);
    }
    assert_int_equal(zr_interfaces_find("x", "127.0.0.1", &c), 0);
    assert_int_equal(c.n, 1);
    static const char *const absent[] = {"eth99", "203.0.113.9", "l", "lo0", "lo ", ""};
    for (size_t i = 0; i < sizeof absent / sizeof *absent; i++) {
        assert_int_equal(zr_interfaces_find("cfg.launch.interface", absent[i], &c), ZERO_ERR_ARG);
        snprintf(text, sizeof text, "cfg.launch.interface is \"%s\": this host has ", absent[i]);
        assert_non_null(strstr(zr_error_text(), text));
        assert_non_null(strstr(zr_error_text(), "lo (127.0.0.1"));
    }
}

/* A list that does not fit is cut at an entry and terminated. */
static void test_long_list(void **state)
{
    struct zr_interfaces c = {.n = 32};
    char text[64];
    for (int i = 0; i < c.n; i++) {
        snprintf(c.of[i].name, sizeof c.of[i].name, "an interface with a long name %d", i);
        c.of[i].address = address_of("fd77::1234:5678:9abc", 0);
    }
    memset(text, 'x', sizeof text);
    zr_interfaces_list(&c, text, sizeof text);
    assert_int_equal(strlen(text), sizeof text - 1);
    c.n = 0;
    zr_interfaces_list(&c, text, sizeof text);
    assert_string_equal(text, "none");
}

static void test_routes(void **state)
{
    union zr_address to = address_of("127.9.9.9", 80), from;
    char name[ZR_INTERFACE_CHARS];
    assert_int_equal(zr_address_source(&to, &from), 0);
    assert_true(zr_address_is_loopback(&from) && zr_address_port(&from) == 0);
    to = address_of("127.0.0.1", 0);
    assert_int_equal(zr_address_source(&to, &from), 0);
    zr_interface_of(&from, name);
    assert_string_equal(name, "lo");
    to = address_of("203.0.113.9", 0);
    zr_interface_of(&to, name);
    assert_string_equal(name, "");
}

static void test_bind(void **state)
{
    union zr_address a = address_of("127.0.0.1", 0);
    socklen_t n = sizeof a;
    int fd = zr_address_bind(&a);
    assert_true(fd >= 0);
    assert_int_equal(getsockname(fd, &a.any, &n), 0);
    /* A bound port can be taken by one listener, and by no other after that. */
    int beside = zr_address_bind(&a);
    assert_true(beside >= 0);
    assert_int_equal(listen(beside, 1), 0);
    assert_int_equal(zr_address_bind(&a), -EADDRINUSE);
    close(beside);
    close(fd);
    a = address_of("203.0.113.9", 0);
    assert_int_equal(zr_address_bind(&a), -EADDRNOTAVAIL);
}

/* :: accepts IPv4 too, whatever the system's default is. */
static void test_bind_all(void **state)
{
    union zr_address a = address_of("::", 0), to;
    socklen_t n = sizeof a;
    int fd = zr_address_bind(&a);
    if (fd == -EAFNOSUPPORT || fd == -EADDRNOTAVAIL) {
        print_message("this host has no IPv6\n");
        skip();
    }
    assert_true(fd >= 0 && getsockname(fd, &a.any, &n) == 0 && listen(fd, 1) == 0);
    to = address_of("127.0.0.1", zr_address_port(&a));
    int s = socket(AF_INET, SOCK_STREAM, 0);
    assert_int_equal(connect(s, &to.any, sizeof to.v4), 0);
    close(s);
    close(fd);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_numbers),    cmocka_unit_test(test_no_numbers), cmocka_unit_test(test_same),
        cmocka_unit_test(test_interfaces), cmocka_unit_test(test_long_list),  cmocka_unit_test(test_routes),
        cmocka_unit_test(test_bind),       cmocka_unit_test(test_bind_all),
    };
    return cmocka_run_group_tests_name("net_address", tests, NULL, NULL);
}
