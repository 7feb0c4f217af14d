/* SPDX-License-Identifier: Apache-2.0 */
/* guard_report.c: the thread of a reporter. It uses two event descriptors, because a signal handler may read,
 * write and poll them. */
#include "kernels/check/guard_report.h"
#include "kernels/alloc.h"
#include "kernels/error.h"
#include "kernels/limits.h"
#include "kernels/thread.h"

#include <errno.h>
#include <poll.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

enum { WAIT_MS = 2000 };

struct zr_reporter {
    struct zr_thread thread;
    pid_t process;
    int wake, reported; /* reported stays readable once it is */
    _Atomic bool asked, done, gave_up;
    void (*report)(void *arg);
    void *arg;
};

/* Adds 1 to an event descriptor's counter. The counter never fills, so the write does not block. */
static void post(int fd)
{
    const uint64_t one = 1;
    while (write(fd, &one, sizeof one) < 0 && errno == EINTR)
        ;
}

static void reporter_main(void *arg)
{
    struct zr_reporter *r = arg;
    uint64_t n;
    while (read(r->wake, &n, sizeof n) < 0 && errno == EINTR)
        ;
    if (atomic_load(&r->asked)) {
        r->report(r->arg);
        atomic_store(&r->done, true);
        post(r->reported);
    }
}

static int64_t now_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

void zr_report_ask(struct zr_reporter *r)
{
    atomic_store(&r->asked, true);
    post(r->wake);
}

void zr_report_wait(struct zr_reporter *r)
{
    if (atomic_load(&r->gave_up) || pthread_equal(pthread_self(), r->thread.id) || getpid() != r->process)
        return;
    int64_t end = now_ms() + WAIT_MS, left = WAIT_MS;
    int n = 0;
    while (left > 0 && (n = poll(&(struct pollfd){.fd = r->reported, .events = POLLIN}, 1, (int)left)) < 0 &&
           errno == EINTR)
        left = end - now_ms();
    if (n <= 0 || !atomic_load(&r->done))
        atomic_store(&r->gave_up, true);
}

static void free_reporter(struct zr_reporter *r)
{
    if (r->wake >= 0)
        close(r->wake);
    if (r->reported >= 0)
        close(r->reported);
    free(r);
}

int zr_reporter_open(void (*report)(void *arg), void *arg, struct zr_reporter **out)
{
    *out = NULL;
    struct zr_reporter *r;
    ZR_TRY(ZR_ZALLOC(r, 1, "a guard's reporter"));
    r->process = getpid();
    r->report = report;
    r->arg = arg;
    char why[ZR_SYSTEM_WORDS];
    r->wake = eventfd(0, EFD_CLOEXEC);
    r->reported = eventfd(0, EFD_CLOEXEC);
    int err = r->wake < 0 || r->reported < 0
                  ? zr_fail(ZERO_ERR_SYSTEM, "no event descriptor: %s", zr_system_words(errno, why))
                  : zr_thread_start(&r->thread, "zero-report", reporter_main, r);
    if (err) {
        free_reporter(r);
        return zr_fail_more(err, "a guard's reporter");
    }
    *out = r;
    return 0;
}

void zr_reporter_close(struct zr_reporter *r)
{
    if (!r)
        return;
    if (getpid() == r->process) {
        post(r->wake);
        zr_thread_join(&r->thread);
    }
    free_reporter(r);
}
