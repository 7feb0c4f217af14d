/* SPDX-License-Identifier: Apache-2.0 */
/* test_check_report.c: check mode (cfg.debug.check) reports what it found before the model goes on. So the
 * report survives whatever happens to the model afterwards. Each model runs in a separate process. */
#include "test/cmocka.h"
#include "test/zero/toy_net.h"

#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

static const char touched[] = "it reads tensor head (unit 3, element 5) outside its bracket";

struct run {
    struct toy m;
    zero_ctx *z;
    int fd; /* receives log lines */
    pthread_mutex_t lock;
    bool log_locks;
};

static void log_line(void *arg, const char *line)
{
    struct run *r = arg;
    if (r->log_locks)
        pthread_mutex_lock(&r->lock);
    dprintf(r->fd, "%s\n", line);
    if (r->log_locks)
        pthread_mutex_unlock(&r->lock);
}

/* Touches closed memory. Several threads race here on purpose. */
__attribute__((no_sanitize("thread"), noinline)) static void touch(struct run *r)
{
    (void)((volatile uint16_t *)r->m.param[4])[5];
}

static void division(struct run *r)
{
    touch(r);
    raise(SIGFPE);
}

static void wild_pointer(struct run *r)
{
    volatile char *nowhere = mmap(NULL, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    touch(r);
    *nowhere = 1;
}

static void killed(struct run *r)
{
    touch(r);
    raise(SIGKILL);
}

/* The program's log needs a lock that the touching thread holds. The report comes after the lock is
 * released. */
static void holds_the_lock(struct run *r)
{
    r->log_locks = true;
    pthread_mutex_lock(&r->lock);
    touch(r);
    touch(r);
    pthread_mutex_unlock(&r->lock);
    zero_unwrap(&r->z);
    _exit(0);
}

static void *touching_thread(void *arg)
{
    touch(arg);
    return NULL;
}

static void threads(struct run *r)
{
    pthread_t thread[4];
    for (int i = 0; i < 4; i++)
        pthread_create(&thread[i], NULL, touching_thread, r);
    for (int i = 0; i < 4; i++)
        pthread_join(thread[i], NULL);
    zero_unwrap(&r->z);
    _exit(0);
}

/* The program writes a closed unit to a file. No signal comes, and few programs check what fwrite returns. */
static void saves(struct run *r)
{
    FILE *f = tmpfile();
    setvbuf(f, NULL, _IONBF, 0);
    size_t n = fwrite((char *)r->m.param[4] + 10, 2, 20, f);
    zero_unwrap(&r->z);
    _exit(n < 20 ? 0 : 7);
}

static void loads(struct run *r)
{
    int fds[2];
    char text[40] = "";
    if (pipe(fds) || write(fds[1], text, sizeof text) != sizeof text)
        _exit(6);
    ssize_t n = read(fds[0], (char *)r->m.param[4] + 10, sizeof text);
    zero_unwrap(&r->z);
    _exit(n < 0 ? 0 : 7);
}

static const struct way {
    const char *name;
    void (*go)(struct run *r);
    int signal; /* the signal that ends it; 0: it exits with 0 */
    const char *reported;
} ways[] = {
    {"SIGFPE", division, SIGFPE, touched},
    {"SIGSEGV", wild_pointer, SIGSEGV, touched},
    {"SIGKILL", killed, SIGKILL, touched},
    {"lock", holds_the_lock, 0, touched},
    {"threads", threads, 0, touched},
    {"save", saves, 0,
     "it reads tensor head (unit 3, element 5) by fwrite outside its bracket; the call fails or does less "
     "than "
     "it was asked"},
    {"load", loads, 0,
     "it writes tensor head (unit 3, element 5) by read outside its bracket; the call fails"},
};

static void model(const struct way *w, int stage, int fd)
{
    signal(SIGSEGV, SIG_DFL); /* a sanitizer has its own handler */
    signal(SIGFPE, SIG_DFL);
    struct run r = {.fd = fd, .lock = PTHREAD_MUTEX_INITIALIZER};
    toy_make(&r.m);
    struct zero_config cfg = ZERO_CONFIG_INIT;
    cfg.launch.world = 1;
    cfg.stage = stage;
    cfg.debug.check = 1;
    cfg.debug.log = log_line;
    cfg.debug.log_arg = &r;
    int err = FIRST_ERROR(zero_wrap(&r.z, r.m.table, TOY_TENSORS, &cfg), toy_forward(&r.m, r.z, true));
    if (err) {
        dprintf(fd, "%s\n", zero_last_error());
        _exit(9);
    }
    w->go(&r);
    _exit(8);
}

static int times(const char *text, const char *what)
{
    int n = 0;
    for (; (text = strstr(text, what)); text++)
        n++;
    return n;
}

static void test_reported_first(void **state)
{
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++)
        for (int stage = 2; stage < 4; stage++) {
            int fds[2], status;
            assert_int_equal(pipe(fds), 0);
            pid_t child = fork();
            if (child == 0) {
                alarm(60);
                model(&ways[i], stage, fds[1]);
            }
            close(fds[1]);
            char text[4096] = "";
            size_t n = 0;
            for (ssize_t k; (k = read(fds[0], text + n, sizeof text - 1 - n)) > 0;)
                n += (size_t)k;
            close(fds[0]);
            assert_int_equal(waitpid(child, &status, 0), child);
            bool ended = ways[i].signal ? WIFSIGNALED(status) && WTERMSIG(status) == ways[i].signal
                                        : WIFEXITED(status) && WEXITSTATUS(status) == 0;
            if (!ended || times(text, ways[i].reported) != 1 || times(text, "the model's fault") != 1)
                fail_msg("%s, stage %d: status %x, told \"%s\"", ways[i].name, stage, (unsigned)status, text);
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_reported_first)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
