/* SPDX-License-Identifier: Apache-2.0 */
/* test_guard.c: tests guarded memory, which reports accesses. */
#include "kernels/check/guard.h"
#include "kernels/error.h"
#include "test/cmocka.h"

#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

static const struct zr_guard_region wanted[] = {{1, 1}, {0, 64}, {64, 64}, {4096, 64}, {100000, 32}};
enum { N = 5 };

static struct zr_guard *open_guard(void)
{
    struct zr_guard *g;
    assert_int_equal(zr_guard_open(wanted, N, NULL, NULL, &g), 0);
    return g;
}

static void expect_touch(const struct zr_guard *g, int region, int64_t offset, enum zr_guard_mode mode,
                         int write)
{
    struct zr_guard_touch t;
    assert_true(zr_guard_touched(g, &t));
    assert_int_equal(t.region, region);
    assert_int_equal(t.offset, offset);
    assert_int_equal(t.mode, mode);
    if (t.write >= 0)
        assert_int_equal(t.write, write);
}

static void test_what_is_allowed(void **state)
{
    struct zr_guard *g = open_guard();
    struct zr_guard_touch t;
    for (int i = 0; i < N; i++) {
        char *p = zr_guard_at(g, i);
        assert_int_equal((uintptr_t)p % (uintptr_t)wanted[i].align, 0);
        assert_int_equal(zr_guard_set(g, i, ZR_GUARD_OPEN), 0);
        memset(p, i + 1, (size_t)wanted[i].bytes);
        assert_int_equal(zr_guard_set(g, i, ZR_GUARD_READ), 0);
        for (int64_t k = 0; k < wanted[i].bytes; k++)
            assert_int_equal(p[k], i + 1);
        assert_int_equal(zr_guard_set(g, i, ZR_GUARD_CLOSED), 0);
    }
    assert_false(zr_guard_touched(g, &t));
    zr_guard_close(g);
}

/* Makes each kind of forbidden access. The first one is reported, and the program goes on with NaN bytes. */
static void test_forbidden(void **state)
{
    static const struct {
        int region;
        enum zr_guard_mode mode;
        int64_t offset;
        int write;
    } cases[] = {{0, ZR_GUARD_CLOSED, 0, 0},     {0, ZR_GUARD_CLOSED, 0, 1},
                 {2, ZR_GUARD_READ, 63, 1},      {2, ZR_GUARD_OPEN, 64, 0},
                 {3, ZR_GUARD_OPEN, 4096, 1},    {3, ZR_GUARD_READ, -1, 0},
                 {4, ZR_GUARD_CLOSED, 99999, 0}, {4, ZR_GUARD_OPEN, 200000, 1},
                 {4, ZR_GUARD_OPEN, -100000, 0}, {3, ZR_GUARD_CLOSED, -4000, 1}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct zr_guard *g = open_guard();
        int r = cases[i].region;
        char *p = zr_guard_at(g, r);
        zr_guard_set(g, r, ZR_GUARD_OPEN);
        memset(p, 1, (size_t)wanted[r].bytes);
        zr_guard_set(g, r, cases[i].mode);
        volatile char *at = p + cases[i].offset;
        bool inside = cases[i].offset >= 0 && cases[i].offset < wanted[r].bytes;
        if (cases[i].write)
            *at = 7;
        else
            assert_int_equal((unsigned char)*at, 0xff);
        if (cases[i].write)
            assert_int_equal(*at, 7);
        if (inside && cases[i].mode == ZR_GUARD_READ)
            assert_int_equal(p[0], 1); /* the contents stay */
        expect_touch(g, r, cases[i].offset, cases[i].mode, cases[i].write);
        zr_guard_set(g, 4, ZR_GUARD_CLOSED);
        *(volatile char *)zr_guard_at(g, 4) = 1; /* a second access changes nothing */
        expect_touch(g, r, cases[i].offset, cases[i].mode, cases[i].write);
        zr_guard_close(g);
    }
}

/* These forbidden accesses race on purpose. */
__attribute__((no_sanitize("thread"))) static void *touch_all(void *arg)
{
    volatile char *p = arg;
    for (int k = 0; k < 100000; k += 97)
        p[k] = 1;
    return NULL;
}

static void test_threads(void **state)
{
    struct zr_guard *g = open_guard();
    struct zr_guard_touch t;
    pthread_t thread[4];
    for (int i = 0; i < 4; i++)
        assert_int_equal(pthread_create(&thread[i], NULL, touch_all, zr_guard_at(g, 4)), 0);
    for (int i = 0; i < 4; i++)
        pthread_join(thread[i], NULL);
    assert_true(zr_guard_touched(g, &t));
    assert_int_equal(t.region, 4);
    zr_guard_close(g);
}

static void *touch_own(void *arg)
{
    struct zr_guard *g = open_guard();
    for (int i = 0; i < 2000; i++) {
        zr_guard_set(g, 3, ZR_GUARD_CLOSED);
        *(volatile char *)zr_guard_at(g, 3) = 1;
    }
    zr_guard_close(g);
    return NULL;
}

/* A handler that searches for its guard meets guards of others, which are opened and closed meanwhile. */
static void test_others_close(void **state)
{
    enum { N_THREADS = 3 };
    pthread_t thread[N_THREADS];
    for (int i = 0; i < N_THREADS; i++)
        assert_int_equal(pthread_create(&thread[i], NULL, touch_own, NULL), 0);
    for (int i = 0; i < 4000; i++)
        zr_guard_close(open_guard());
    for (int i = 0; i < N_THREADS; i++)
        pthread_join(thread[i], NULL);
}

static volatile sig_atomic_t n_mine;
static sigjmp_buf out_of_it;

static void mine(int number)
{
    n_mine++;
    siglongjmp(out_of_it, 1);
}

/* A page that may not be accessed and belongs to no guard. */
static volatile char *forbidden_page(void)
{
    void *p = mmap(NULL, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_true(p != MAP_FAILED);
    return p;
}

/* A fault outside any guard goes to the handler that was installed before, which is restored at the end. */
static void test_others(void **state)
{
    struct sigaction a = {.sa_handler = mine, .sa_flags = SA_NODEFER}, before, after;
    sigaction(SIGSEGV, &a, &before);
    struct zr_guard *g = open_guard(), *h = open_guard();
    struct zr_guard_touch t;
    volatile char *nowhere = forbidden_page();
    if (!sigsetjmp(out_of_it, 1))
        *nowhere = 1;
    assert_int_equal(n_mine, 1);
    *(volatile char *)zr_guard_at(h, 3) = 1;
    assert_int_equal(n_mine, 1);
    assert_false(zr_guard_touched(g, &t));
    expect_touch(h, 3, 0, ZR_GUARD_CLOSED, 1);
    zr_guard_close(h);
    *(volatile char *)zr_guard_at(g, 0) = 1; /* the other guard still works */
    expect_touch(g, 0, 0, ZR_GUARD_CLOSED, 1);
    zr_guard_close(g);
    sigaction(SIGSEGV, &before, &after);
    assert_true(after.sa_handler == mine);
}

/* A program without a handler dies of a fault, as it would without guards. */
static void test_default(void **state)
{
    volatile char *nowhere = forbidden_page();
    pid_t child = fork();
    if (child == 0) {
        signal(SIGSEGV, SIG_DFL);
        struct zr_guard *g;
        if (zr_guard_open(wanted, N, NULL, NULL, &g))
            _exit(2);
        *(volatile char *)zr_guard_at(g, 0) = 1;
        *nowhere = 1;
        _exit(3);
    }
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFSIGNALED(status));
    assert_int_equal(WTERMSIG(status), SIGSEGV);
}

/* Memory handed to a system call is noticed, though no signal comes. Other memory is not. */
static void test_calls(void **state)
{
    enum { BYTES = 100000 };
    static char plain[BYTES];
    FILE *f = tmpfile();
    int fd = fileno(f), pair[2];
    assert_int_equal(socketpair(AF_UNIX, SOCK_DGRAM, 0, pair), 0);
    for (int way = 0; way < 9; way++)
        for (int mode = ZR_GUARD_CLOSED; mode <= ZR_GUARD_OPEN + 1; mode++) {
            struct zr_guard *g = open_guard();
            struct zr_guard_touch t;
            char *p = zr_guard_at(g, 4);
            bool over = mode > ZR_GUARD_OPEN; /* open, but the call runs beyond its end */
            int64_t n = over ? BYTES + 8192 : BYTES;
            struct iovec v[2] = {{plain, 100}, {p, (size_t)n}};
            zr_guard_set(g, 4, over ? ZR_GUARD_OPEN : (enum zr_guard_mode)mode);
            rewind(f);
            ssize_t done = 0;
            bool into = false; /* the kernel writes to the memory */
            switch (way) {
            case 0:
                done = write(fd, p, (size_t)n);
                break;
            case 1:
                done = pwrite(fd, p, (size_t)n, 0);
                break;
            case 2:
                done = writev(fd, v, 2);
                break;
            case 3:
                done = (ssize_t)fwrite(p, 4, (size_t)n / 4, f);
                break;
            case 4:
                done = send(pair[0], p, (size_t)n, 0);
                recv(pair[1], plain, 1, MSG_DONTWAIT);
                break;
            case 5:
                into = true;
                done = pread(fd, p, (size_t)n, 0);
                break;
            case 6:
                into = true;
                done = read(fd, p, (size_t)n);
                break;
            case 7:
                into = true;
                done = (ssize_t)fread(p, 1, (size_t)n, f);
                break;
            case 8:
                into = true;
                done = readv(fd, v, 2);
                break;
            }
            (void)done;
            bool wrong = over || mode == ZR_GUARD_CLOSED || (mode == ZR_GUARD_READ && into);
            assert_int_equal(zr_guard_touched(g, &t), wrong);
            if (wrong) {
                static const char *const names[] = {"write", "pwrite", "writev", "fwrite", "send",
                                                    "pread", "read",   "fread",  "readv"};
                assert_non_null(t.call);
                assert_string_equal(t.call, names[way]);
                assert_int_equal(t.region, 4);
                assert_int_equal(t.write, into);
                assert_true(over ? t.offset >= BYTES && t.offset < BYTES + 64 : t.offset == 0);
            }
            /* Memory outside any guard, before and after. */
            zr_guard_close(g);
            g = open_guard();
            assert_int_equal(pwrite(fd, plain, BYTES, 0), BYTES);
            assert_int_equal(pread(fd, plain, BYTES, 0), BYTES);
            assert_false(zr_guard_touched(g, &t));
            zr_guard_close(g);
        }
    fclose(f);
    close(pair[0]);
    close(pair[1]);
    assert_int_equal(write(-1, plain, 1), -1); /* the wrapped functions are restored */
}

static void count(int number)
{
    n_mine++;
}

/* A signal sent by a process is no access. It goes to the disposition that was set before the guard, the
 * first time. */
static void test_sent(void **state)
{
    pid_t child = fork();
    if (child == 0) {
        signal(SIGSEGV, SIG_DFL);
        struct zr_guard *g;
        if (zr_guard_open(wanted, N, NULL, NULL, &g))
            _exit(2);
        kill(getpid(), SIGSEGV);
        _exit(3);
    }
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFSIGNALED(status));
    assert_int_equal(WTERMSIG(status), SIGSEGV);

    void (*const before[])(int) = {count, SIG_IGN};
    for (int i = 0; i < 2; i++) {
        struct sigaction a = {.sa_handler = before[i]}, old;
        sigaction(SIGSEGV, &a, &old);
        struct zr_guard *g = open_guard();
        struct zr_guard_touch t;
        n_mine = 0;
        for (int k = 1; k < 3; k++) {
            raise(SIGSEGV);
            assert_int_equal(n_mine, before[i] == count ? k : 0);
        }
        assert_false(zr_guard_touched(g, &t));
        *(volatile char *)zr_guard_at(g, 3) = 1; /* the guard's handler is still installed */
        expect_touch(g, 3, 0, ZR_GUARD_CLOSED, 1);
        zr_guard_close(g);
        sigaction(SIGSEGV, &old, NULL);
    }
}

static void test_most(void **state)
{
    struct zr_guard *g[65];
    for (int i = 0; i < 64; i++)
        g[i] = open_guard();
    assert_int_equal(zr_guard_open(wanted, N, NULL, NULL, &g[64]), ZERO_ERR_NOMEM);
    assert_null(g[64]);
    zr_guard_close(g[17]);
    g[17] = open_guard();
    for (int i = 0; i < 64; i++)
        zr_guard_close(g[i]);
    const struct zr_guard_region too_much = {INT64_C(1) << 60, 64};
    assert_int_equal(zr_guard_open(&too_much, 1, NULL, NULL, &g[0]), ZERO_ERR_NOMEM);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_what_is_allowed),
        cmocka_unit_test(test_forbidden),
        cmocka_unit_test(test_threads),
        cmocka_unit_test(test_others),
        cmocka_unit_test(test_others_close),
        cmocka_unit_test(test_default),
        cmocka_unit_test(test_calls),
        cmocka_unit_test(test_sent),
        cmocka_unit_test(test_most),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
