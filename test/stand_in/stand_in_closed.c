/* SPDX-License-Identifier: Apache-2.0 */
/* stand_in_closed.c: device memory that host code cannot access, as on a GPU.
 *
 * One file in memory is mapped twice. Programs get addresses in the first mapping, which no code may
 * access. The stand-in translates them to the second one for copies, collectives and the arguments of
 * kernels. A handler for SIGSEGV names an access to the first mapping before the program ends of it.
 *
 * With sanitizers, which know the bounds of malloc's blocks and the order of accesses to one address, device
 * memory is malloc's and open. */
#include "test/stand_in/stand_in_inside.h"

#if defined(__SANITIZE_ADDRESS__) || defined(STAND_IN_TSAN)
#define OPEN_MEMORY 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(memory_sanitizer)
#define OPEN_MEMORY 1
#endif
#endif

#ifdef OPEN_MEMORY

#include <stdlib.h>

void *si_closed_take(int device, size_t bytes)
{
    (void)device;
    return malloc(bytes);
}

void si_closed_release(void *at, size_t bytes)
{
    (void)bytes;
    free(at);
}

void si_closed_end(void)
{
}

void *stand_in_reach(const void *p)
{
    return (void *)(uintptr_t)p;
}

void si_reach_arguments(void *closure, size_t bytes)
{
    (void)closure, (void)bytes;
}

void stand_in_touch(void)
{
}

void si_touch_end(void)
{
}

#else

#include <execinfo.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

/* Pages that are not used cost nothing. The first mapping is asked for at a place whose addresses hardly
 * look like two small numbers side by side; the kernel may choose another one. */
#define PART_BYTES ((size_t)256 << 30)
#define ALL_BYTES  (PART_BYTES * STAND_IN_MAX_DEVICES)
#define WANTED     ((void *)(uintptr_t)0x5b3d40000000)
enum { PAGE = 4096 };

static struct {
    char *shown, *reached;
    /* of each device's part: bytes given out, and threads that may access it */
    size_t used[STAND_IN_MAX_DEVICES];
    int n_touching[STAND_IN_MAX_DEVICES];
    /* allocations that are not released */
    int n_live;
    struct sigaction before;
    bool handles;
} closed;

/* The device, plus 1, whose memory this thread may access. */
static _Thread_local int touching;

static bool is_shown(const void *p)
{
    return closed.shown && (const char *)p >= closed.shown && (const char *)p < closed.shown + ALL_BYTES;
}

void *stand_in_reach(const void *p)
{
    return is_shown(p) ? closed.reached + ((const char *)p - closed.shown) : (void *)(uintptr_t)p;
}

/* Kernels get addresses in their arguments alone, and in structs among these. */
void si_reach_arguments(void *closure, size_t bytes)
{
    char *word = closure;
    for (size_t i = 0; i + sizeof(void *) <= bytes; i += sizeof(void *)) {
        void *p;
        memcpy(&p, word + i, sizeof p);
        if (is_shown(p) && si_is_in_block(p)) {
            p = stand_in_reach(p);
            memcpy(word + i, &p, sizeof p);
        }
    }
}

/* --- naming an access --- */

static void pass_on(int signum, siginfo_t *info, void *context)
{
    if (closed.before.sa_flags & SA_SIGINFO)
        closed.before.sa_sigaction(signum, info, context);
    else if (closed.before.sa_handler != SIG_DFL && closed.before.sa_handler != SIG_IGN)
        closed.before.sa_handler(signum);
    else
        signal(signum, SIG_DFL); /* the access is tried again */
}

static void name_access(const void *at, bool writes)
{
    char name[32] = "", text[400];
    struct stand_in_range r = {0};
    bool held = pthread_mutex_trylock(&si.lock) == 0, known = held && si_find_any(at, &r);
    pthread_getname_np(pthread_self(), name, sizeof name);
    int n = snprintf(
        text, sizeof text,
        "stand-in: misuse: %s %s device memory at %p, byte %zu of an allocation of %zu (%s) of "
        "device %zu, thread %s\n",
        si_on_stream ? "a kernel that got the address from memory, or a host function," : "host code",
        writes ? "writes" : "reads", at, known ? (size_t)((const char *)at - r.at) : 0, r.bytes,
        known ? r.kind : "not known", (size_t)((const char *)at - closed.shown) / PART_BYTES, name);
    if (write(STDERR_FILENO, text, (size_t)n) != n)
        abort();
    void *frames[24];
    backtrace_symbols_fd(frames, backtrace(frames, 24), STDERR_FILENO);
    if (held)
        pthread_mutex_unlock(&si.lock);
}

static void on_fault(int signum, siginfo_t *info, void *context)
{
    static _Thread_local bool inside;
    if (inside || !is_shown(info->si_addr)) {
        if (inside)
            signal(signum, SIG_DFL);
        else
            pass_on(signum, info, context);
        return;
    }
    inside = true;
    bool writes = false;
#ifdef __x86_64__
    writes = ((const ucontext_t *)context)->uc_mcontext.gregs[REG_ERR] & 2;
#endif
    name_access(info->si_addr, writes);
    signal(signum, SIG_DFL); /* the access is tried again, and ends the program */
}

/* Tests' frameworks set their own handler for the time of a test, so ours is set where a test begins. */
static void handle(void)
{
    struct sigaction mine = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO | SA_ONSTACK}, now;
    void *frame;
    backtrace(&frame, 1); /* the first call allocates */
    sigaction(SIGSEGV, NULL, &now);
    if (now.sa_flags & SA_SIGINFO && now.sa_sigaction == on_fault)
        return;
    closed.before = now;
    sigaction(SIGSEGV, &mine, NULL);
    closed.handles = true;
}

/* --- allocation --- */

static bool open_file(void)
{
    if (closed.shown)
        return true;
    int fd = memfd_create("device memory", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, (off_t)ALL_BYTES)) {
        close(fd);
        return false;
    }
    char *shown = mmap(WANTED, ALL_BYTES, PROT_NONE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    char *reached = mmap(NULL, ALL_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    close(fd);
    if (shown == MAP_FAILED || reached == MAP_FAILED)
        return false;
    madvise(shown, ALL_BYTES, MADV_DONTDUMP);
    madvise(reached, ALL_BYTES, MADV_DONTDUMP);
    closed.reached = reached;
    closed.shown = shown;
    return true;
}

static size_t whole_pages(size_t bytes)
{
    return (bytes + PAGE - 1) / PAGE * PAGE;
}

void *si_closed_take(int device, size_t bytes)
{
    size_t n = whole_pages(bytes);
    if (n > PART_BYTES || !open_file() || closed.used[device] + n > PART_BYTES)
        return NULL;
    if (closed.n_live++ == 0)
        handle();
    char *at = closed.shown + (size_t)device * PART_BYTES + closed.used[device];
    closed.used[device] += n;
    return at;
}

void si_closed_release(void *at, size_t bytes)
{
    closed.n_live--;
    madvise(stand_in_reach(at), whole_pages(bytes), MADV_REMOVE);
}

static void protect(int device, int access)
{
    if (closed.used[device])
        mprotect(closed.shown + (size_t)device * PART_BYTES, closed.used[device], access);
}

void si_closed_end(void)
{
    struct sigaction now;
    for (int d = 0; d < STAND_IN_MAX_DEVICES; d++) {
        if (closed.n_touching[d])
            protect(d, PROT_NONE);
        closed.n_touching[d] = 0;
        if (!closed.n_live)
            closed.used[d] = 0;
    }
    sigaction(SIGSEGV, NULL, &now);
    if (closed.handles && now.sa_flags & SA_SIGINFO && now.sa_sigaction == on_fault)
        sigaction(SIGSEGV, &closed.before, NULL);
    closed.handles = false;
}

/* --- tests that compute in device memory --- */

void stand_in_touch(void)
{
    int d = si_device();
    if (touching)
        si_touch_end();
    si_lock();
    touching = d + 1;
    if (closed.n_touching[d]++ == 0)
        protect(d, PROT_READ | PROT_WRITE);
    si_unlock();
}

void si_touch_end(void)
{
    int d = touching - 1;
    if (!touching)
        return;
    si_lock();
    touching = 0;
    if (closed.n_touching[d] > 0 && --closed.n_touching[d] == 0)
        protect(d, PROT_NONE);
    si_unlock();
}

#endif
