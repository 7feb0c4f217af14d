/* SPDX-License-Identifier: Apache-2.0 */
/* nccl_stand_in_share.c: the memory that the ranks of the NCCL stand-in share, and who they are.
 *
 * Ranks that are threads share the heap and one lock. Ranks that are processes inherit a mapping from the
 * process that forks them. It has the same address in all of them, so its contents can point to each
 * other.
 *
 * A process may be killed at any moment. So the lock is robust, each change under it is published by a
 * single store, and waiting uses a futex: a condition variable would wait for dead processes. */
#include "test/stand_in/nccl_stand_in_inside.h"

#include <errno.h>
#include <linux/futex.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

/* Pages that are not used cost nothing. */
enum { LOOK_MS = 20, FIRST_CLASS = 6 };
static const size_t SHARED_BYTES = (size_t)4 << 30;

static struct nsi_shared own = {.lock = PTHREAD_MUTEX_INITIALIZER};
struct nsi_shared *nsi_shared = &own;

/* --- the lock --- */

/* The process that was woken may be one that is stopped, so every waiter looks again after a while. */
void nsi_lock(void)
{
    int err = ETIMEDOUT;
    while (err == ETIMEDOUT) {
        struct timespec until;
        clock_gettime(CLOCK_REALTIME, &until);
        int64_t ns = until.tv_nsec + LOOK_MS * 1000000;
        until.tv_sec += ns / 1000000000;
        until.tv_nsec = ns % 1000000000;
        err = nsi_shared->owner ? pthread_mutex_timedlock(&nsi_shared->lock, &until)
                                : pthread_mutex_lock(&nsi_shared->lock);
    }
    if (err == EOWNERDEAD)
        pthread_mutex_consistent(&nsi_shared->lock);
}

void nsi_unlock(void)
{
    pthread_mutex_unlock(&nsi_shared->lock);
}

static long futex(int op, uint32_t value, const struct timespec *most)
{
    return syscall(SYS_futex, &nsi_shared->moved, op, value, most, NULL, 0);
}

void nsi_wake(void)
{
    atomic_fetch_add(&nsi_shared->moved, 1);
    futex(FUTEX_WAKE, INT32_MAX, NULL);
}

void nsi_wait(void)
{
    const struct timespec most = {.tv_nsec = LOOK_MS * 1000000};
    uint32_t seen = atomic_load(&nsi_shared->moved);
    nsi_unlock();
    futex(FUTEX_WAIT, seen, &most);
    nsi_lock();
}

/* --- memory --- */

static int class_of(size_t bytes)
{
    int c = FIRST_CLASS;
    while ((size_t)1 << c < bytes)
        c++;
    return c;
}

/* The header of each piece. */
struct piece {
    struct piece *next;
    int class;
    char pad[48];
};
_Static_assert(sizeof(struct piece) == 64, "what is behind it is aligned");

void *nsi_new(size_t bytes)
{
    struct nsi_shared *s = nsi_shared;
    if (!s->owner)
        return calloc(1, bytes);
    int c = class_of(bytes + sizeof(struct piece));
    struct piece *p = s->freed[c];
    if (p) {
        s->freed[c] = p->next;
    } else {
        p = (struct piece *)((char *)s + s->used);
        s->used += (size_t)1 << c;
        if (s->used > SHARED_BYTES) {
            fprintf(stderr, "NCCL stand-in: its ranks share more than %zu bytes\n", SHARED_BYTES);
            abort();
        }
    }
    p->class = c;
    return memset(p + 1, 0, bytes);
}

void nsi_drop(void *at)
{
    struct nsi_shared *s = nsi_shared;
    if (!s->owner) {
        free(at);
        return;
    }
    if (!at)
        return;
    struct piece *p = (struct piece *)at - 1;
    p->next = s->freed[p->class];
    s->freed[p->class] = p;
}

/* --- ranks --- */

void nccl_stand_in_share(void)
{
    pthread_mutexattr_t a;
    struct nsi_shared *s =
        mmap(NULL, SHARED_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (s == MAP_FAILED) {
        perror("NCCL stand-in: memory that ranks share");
        abort();
    }
    pthread_mutexattr_init(&a);
    pthread_mutexattr_setpshared(&a, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&a, PTHREAD_MUTEX_ROBUST);
    pthread_mutex_init(&s->lock, &a);
    pthread_mutexattr_destroy(&a);
    s->owner = getpid();
    s->used = (sizeof *s + 63) / 64 * 64;
    nsi_shared = s;
}

void nccl_stand_in_stop(pid_t pid)
{
    nsi_lock();
    kill(pid, SIGSTOP);
    waitpid(pid, NULL, WUNTRACED);
    nsi_unlock();
}

/* For other ranks, as this process sees them: 0: not looked for yet; otherwise a descriptor plus 1. */
static int life[NSI_RANKS];

void nsi_end_sharing(void)
{
    for (int i = 0; i < NSI_RANKS; i++)
        if (life[i] > 0)
            close(life[i] - 1);
    memset(life, 0, sizeof life);
    if (nsi_shared->owner != getpid())
        return;
    munmap(nsi_shared, SHARED_BYTES);
    nsi_shared = &own;
}

int nsi_slot(int device)
{
    struct nsi_shared *s = nsi_shared;
    const char *host = getenv("NCCL_HOSTID");
    if (!s->owner)
        return device;
    for (int i = 0; i < s->n_slots; i++)
        if (s->slot[i].pid == getpid() && s->slot[i].device == device)
            return i;
    if (s->n_slots == NSI_RANKS) {
        fprintf(stderr, "NCCL stand-in: more than %d ranks\n", NSI_RANKS);
        abort();
    }
    struct nsi_slot *new = &s->slot[s->n_slots];
    *new = (struct nsi_slot){.pid = getpid(), .device = device};
    snprintf(new->host, sizeof new->host, "%s", host ? host : "");
    return s->n_slots++;
}

bool nsi_same_host(int a, int b)
{
    return !nsi_shared->owner || strcmp(nsi_shared->slot[a].host, nsi_shared->slot[b].host) == 0;
}

bool nsi_same_gpu(int a, int b)
{
    return nsi_shared->owner && a != b && nsi_same_host(a, b) &&
           nsi_shared->slot[a].device == nsi_shared->slot[b].device;
}

/* A process that was not waited for yet can be found, and its descriptor tells that it has ended. */
static bool has_ended(int slot)
{
    if (!nsi_shared->owner || nsi_shared->slot[slot].pid == getpid())
        return false;
    if (!life[slot])
        life[slot] = (int)syscall(SYS_pidfd_open, nsi_shared->slot[slot].pid, 0) + 1;
    if (!life[slot])
        return errno == ESRCH;
    struct pollfd p = {.fd = life[slot] - 1, .events = POLLIN};
    return poll(&p, 1, 0) == 1;
}

static bool is_dead(const struct nsi_team *k, int rank)
{
    return k->slot[rank] >= 0 && !k->left[rank] && has_ended(k->slot[rank]);
}

/* While a communicator is made, ranks are a ring of sockets on any hosts. The end of a neighbour is
 * noticed, and no other. */
bool nsi_ring_is_broken(const struct nsi_team *k, int rank)
{
    return is_dead(k, (rank + 1) % k->n_ranks) || is_dead(k, (rank + k->n_ranks - 1) % k->n_ranks);
}

/* In a collective, ranks of one host read each other's memory and do not notice an end. */
bool nsi_network_is_broken(const struct nsi_team *k, int rank)
{
    bool broken = false;
    for (int i = 0; i < k->n_ranks; i++)
        broken |= i != rank && !nsi_same_host(k->slot[rank], k->slot[i]) && is_dead(k, i);
    return broken;
}

bool nsi_any_is_dead(const struct nsi_team *k)
{
    bool dead = false;
    for (int i = 0; i < k->n_ranks; i++)
        dead |= is_dead(k, i);
    return dead;
}

bool nsi_on_one_host(const struct nsi_team *k)
{
    bool one = true;
    for (int i = 1; i < k->n_ranks; i++)
        one &= nsi_same_host(k->slot[0], k->slot[i]);
    return one;
}
