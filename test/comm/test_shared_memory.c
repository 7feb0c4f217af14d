/* SPDX-License-Identifier: Apache-2.0 */
/* test_shared_memory.c: tests memory that peers map: it is zero at first and the same for all. Large
 * memory lies in large pages, for its owner and for peers, if the kernel can provide them. */
#include "comm/shared_memory.h"
#include "kernels/huge_pages.h"
#include "test/cmocka.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

struct shared {
    int fd;
    char *own, *peer;
    int64_t bytes;
};

static void open_shared(struct shared *s, int64_t bytes)
{
    s->bytes = bytes;
    assert_int_equal(zr_shared_make("test", bytes, &s->fd, &s->own), 0);
    struct zr_shared_at at = {.pid = (int32_t)getpid(), .fd = s->fd};
    assert_int_equal(zr_shared_inode(s->fd, &at.inode), 0);
    assert_int_equal(zr_shared_map(&at, bytes, PROT_READ, &s->peer), 0);
}

static void close_shared(struct shared *s)
{
    zr_shared_unmap(s->own, s->bytes);
    zr_shared_unmap(s->peer, s->bytes);
    close(s->fd);
}

/* Sizes around page sizes, and one that is reserved in several pieces. */
static void test_contents(void **state)
{
    const int64_t huge = ZR_HUGE_PAGE_BYTES,
                  sizes[] = {1,    4096,        4097,         huge - 4096,
                             huge, huge + 4096, 3 * huge - 1, ((int64_t)130 << 20) + 1};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        struct shared s;
        open_shared(&s, sizes[i]);
        for (int64_t at = 0; at < s.bytes; at++)
            assert_int_equal(s.own[at], 0);
        for (int64_t at = 0; at < s.bytes; at += 4096)
            memcpy(s.own + at, &(char){(char)(at / 4096 % 127)}, 1);
        s.own[s.bytes - 1] = 42;
        for (int64_t at = 0; at < s.bytes - 1; at += 4096)
            assert_int_equal(s.peer[at], at / 4096 % 127);
        assert_int_equal(s.peer[s.bytes - 1], 42);
        close_shared(&s);
    }
}

/* Returns KiB of large pages in the mapping that starts there, or -1 if there is none. */
static long huge_kib(const char *at)
{
    FILE *f = fopen("/proc/self/smaps", "re");
    assert_non_null(f);
    char line[512], start[32];
    snprintf(start, sizeof start, "%lx-", (unsigned long)(uintptr_t)at);
    long kib = -1;
    bool here = false;
    while (kib < 0 && fgets(line, sizeof line, f)) {
        here = here || !strncmp(line, start, strlen(start));
        if (here && sscanf(line, "ShmemPmdMapped: %ld kB", &kib) != 1)
            kib = -1;
    }
    fclose(f);
    return kib;
}

/* Asks the kernel directly, for a mapping whose large pages each have a page already. */
static bool kernel_makes_them(const struct shared *s)
{
    return zr_make_huge_pages(s->own, s->bytes / ZR_HUGE_PAGE_BYTES * ZR_HUGE_PAGE_BYTES);
}

/* The kernel may lack large pages at one time and have some at the next, so one success in a few tries is
 * enough. */
static void test_large_pages(void **state)
{
    const long whole = 5, expected = whole * (long)(ZR_HUGE_PAGE_BYTES / 1024);
    bool made = false, could = false;
    for (int i = 0; !made && i < 5; i++) {
        struct shared s;
        open_shared(&s, whole * ZR_HUGE_PAGE_BYTES + 4096);
        assert_int_equal((uintptr_t)s.own % (uintptr_t)ZR_HUGE_PAGE_BYTES, 0);
        assert_int_equal((uintptr_t)s.peer % (uintptr_t)ZR_HUGE_PAGE_BYTES, 0);
        made = huge_kib(s.own) == expected;
        could |= made || kernel_makes_them(&s); /* only what was made before the test asked counts */
        for (int64_t at = 0; at < s.bytes; at += 4096)
            assert_int_equal(s.peer[at], 0);
        if (made)
            assert_int_equal(huge_kib(s.peer), expected);
        close_shared(&s);
    }
    if (!could)
        skip();
    assert_true(made);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_contents),
        cmocka_unit_test(test_large_pages),
    };
    return cmocka_run_group_tests_name("shared_memory", tests, NULL, NULL);
}
