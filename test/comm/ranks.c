/* SPDX-License-Identifier: Apache-2.0 */
/* ranks.c: starts and joins the ranks of ranks.h. */
#include "test/comm/ranks.h"
#include "test/cmocka.h"
#include "test/held_port.h"
#include "test/kernels/random.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

void rank_says(struct rank *r, const char *file, int line, const char *cond, const char *fmt, ...)
{
    char text[900];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    const char *name = strrchr(file, '/');
    snprintf(r->wrong, sizeof r->wrong, "%s:%d: %s: %s", name ? name + 1 : file, line, cond, text);
}

void sleep_ms(int ms)
{
    nanosleep(&(struct timespec){.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000}, NULL);
}

bool wait_stage(struct rank *r, int stage)
{
    for (int i = 0; i < 30000; i++) {
        if (atomic_load(&r->stage) >= stage)
            return true;
        sleep_ms(1);
    }
    return false;
}

bool all_at(struct rank *me, int stage)
{
    bool there = true;
    atomic_store(&me->stage, stage);
    for (int i = 0; i < me->w.world; i++)
        there &= wait_stage(&me->all[i], stage);
    return there;
}

void note_error(struct rank *me, int code)
{
    me->code = code;
    snprintf(me->note, sizeof me->note, "%s", code ? zr_error_text() : "");
}

void expect_rank(const struct rank *r, int code, const char *text)
{
    if (r->code != code || !strstr(r->note, text))
        fail_msg("rank %d: code %d \"%s\", expected %d with \"%s\"", r->w.rank, r->code, r->note, code, text);
}

const char *meeting_host(void)
{
    const char *by = getenv("MEETING");
    return by && strcmp(by, "ipv6") == 0 ? "::1" : "127.0.0.1";
}

struct task {
    void (*fn)(struct rank *r);
    struct rank *r;
};

static void *thread_main(void *arg)
{
    struct task *t = arg;
    t->fn(t->r);
    return NULL;
}

static void run_threads(struct rank *r, int n, void (*fn)(struct rank *r))
{
    pthread_t id[MANY_RANKS];
    struct task task[MANY_RANKS];
    for (int i = 0; i < n; i++) {
        task[i] = (struct task){fn, &r[i]};
        assert_int_equal(pthread_create(&id[i], NULL, thread_main, &task[i]), 0);
    }
    for (int i = 0; i < n; i++)
        pthread_join(id[i], NULL);
}

static void run_processes(struct rank *r, int n, void (*fn)(struct rank *r))
{
    pid_t id[MANY_RANKS];
    fflush(NULL);
    for (int i = 0; i < n; i++) {
        id[i] = fork();
        assert_true(id[i] >= 0);
        if (id[i] == 0) {
            /* cmocka catches these signals and would go on with the next test, even in this process. */
            static const int fatal[] = {SIGSEGV, SIGFPE, SIGBUS, SIGILL, SIGSYS, SIGABRT};
            for (size_t k = 0; k < sizeof fatal / sizeof *fatal; k++)
                signal(fatal[k], SIG_DFL);
            alarm(120);
            fn(&r[i]);
            fflush(NULL);
            exit(0); /* not _exit: leaks are reported at exit */
        }
    }
    for (int i = 0; i < n; i++) {
        int status = 0;
        while (waitpid(id[i], &status, 0) < 0 && errno == EINTR)
            ;
        if (!r[i].wrong[0] && r[i].dies != !!WIFSIGNALED(status))
            snprintf(r[i].wrong, sizeof r[i].wrong, "ended with status 0x%x", (unsigned)status);
        if (!r[i].wrong[0] && WIFEXITED(status) && WEXITSTATUS(status) != 0)
            snprintf(r[i].wrong, sizeof r[i].wrong, "exit code %d", WEXITSTATUS(status));
    }
}

struct rank *run_ranks(bool forked, int n, void (*fn)(struct rank *r), void *arg,
                       void (*before)(struct rank *r))
{
    static struct rank *shared;
    if (!shared) {
        shared = mmap(NULL, MANY_RANKS * sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS,
                      -1, 0);
        assert_true(shared != MAP_FAILED);
    }
    memset(shared, 0, (size_t)n * sizeof *shared);
    int port = held_port();
    for (int i = 0; i < n; i++) {
        struct rank *r = &shared[i];
        r->w = (struct zr_world){.rank = i, .world = n, .local_rank = i, .port = port};
        snprintf(r->w.host, sizeof r->w.host, "%s", meeting_host());
        snprintf(r->w.job, sizeof r->w.job, "test %d", (int)getpid());
        r->w.key = (struct zr_job_key){.n_bytes = 16, .bytes = "a key of 16 byte"};
        r->forked = forked;
        r->arg = arg;
        r->all = shared;
    }
    for (int i = 0; i < n && before; i++)
        before(&shared[i]);
    if (forked)
        run_processes(shared, n, fn);
    else
        run_threads(shared, n, fn);
    int wrong = 0;
    for (int i = 0; i < n; i++)
        if (shared[i].wrong[0])
            print_error("%s: rank %d of %d: %s\n", forked ? "processes" : "threads", i, n, shared[i].wrong),
                wrong++;
    assert_int_equal(wrong, 0);
    return shared;
}

int64_t random_in(uint64_t *state, int64_t lo, int64_t hi)
{
    return lo + (int64_t)(random_next(state) % (uint64_t)(hi - lo + 1));
}

uint64_t fresh_seed(const char *what)
{
    const char *text = getenv("ZERO_TEST_SEED");
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    uint64_t seed = text ? strtoull(text, NULL, 0) : (uint64_t)t.tv_nsec ^ ((uint64_t)t.tv_sec << 20);
    print_message("%s: ZERO_TEST_SEED=%llu\n", what, (unsigned long long)seed);
    return seed;
}
