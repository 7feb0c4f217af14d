/* SPDX-License-Identifier: Apache-2.0 */
/* fork.c: a list of sockets, with a fork handler that closes them in children and an exit handler that sends
 * last words. */
#include "comm/fork.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

static pthread_once_t once = PTHREAD_ONCE_INIT;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct zr_kept_socket *kept;
static atomic_uint depth;
static atomic_bool ending;
static pid_t owner; /* process that owns the descriptors in the list */

static void before_fork(void)
{
    pthread_mutex_lock(&lock);
}

static void in_parent(void)
{
    pthread_mutex_unlock(&lock);
}

/* Makes only calls that are safe in a signal handler: other threads may have held any lock. */
static void in_child(void)
{
    for (const struct zr_kept_socket *s = kept; s; s = s->next)
        close(s->fd);
    kept = NULL;
    owner = getpid();
    atomic_fetch_add(&depth, 1);
    pthread_mutex_unlock(&lock);
}

static void watch_forks(void)
{
    owner = getpid();
    pthread_atfork(before_fork, in_parent, in_child); /* without memory for it, children keep the sockets */
}

/* Installed when the library is loaded, so that forks before its first use are counted, too. */
__attribute__((constructor)) static void watch_from_load(void)
{
    pthread_once(&once, watch_forks);
}

void zr_fork_keep(struct zr_kept_socket *s, int fd)
{
    pthread_once(&once, watch_forks);
    pthread_mutex_lock(&lock);
    s->fd = fd;
    s->is_kept = true;
    s->has_last_word = false;
    s->prev = NULL;
    s->next = kept;
    if (kept)
        kept->prev = s;
    kept = s;
    pthread_mutex_unlock(&lock);
}

void zr_fork_last_word(struct zr_kept_socket *s, const struct zr_frame *f,
                       const struct zr_last_failure *failure)
{
    pthread_mutex_lock(&lock);
    s->has_last_word = f && s->is_kept;
    s->failure = failure;
    if (f)
        s->last_word = *f;
    pthread_mutex_unlock(&lock);
}

void zr_fork_last_failure(struct zr_last_failure *failure, int code, const char *text)
{
    pthread_mutex_lock(&lock);
    if (!failure->code) {
        failure->code = code;
        snprintf(failure->text, sizeof failure->text, "%s", text);
    }
    pthread_mutex_unlock(&lock);
}

void zr_fork_forget(struct zr_kept_socket *s)
{
    pthread_mutex_lock(&lock);
    if (s->is_kept) {
        if (s->prev)
            s->prev->next = s->next;
        else
            kept = s->next;
        if (s->next)
            s->next->prev = s->prev;
        s->is_kept = false;
    }
    pthread_mutex_unlock(&lock);
}

unsigned zr_fork_depth(void)
{
    pthread_once(&once, watch_forks);
    return atomic_load_explicit(&depth, memory_order_relaxed);
}

bool zr_fork_ending(void)
{
    return atomic_load(&ending);
}

static void say_last_word(const struct zr_kept_socket *s)
{
    char word[sizeof s->last_word + sizeof s->failure->text];
    struct zr_frame head = s->last_word;
    head.about = s->failure->code;
    head.n_bytes = head.about ? (uint32_t)strlen(s->failure->text) : 0;
    memcpy(word, &head, sizeof head);
    memcpy(word + sizeof head, s->failure->text, head.n_bytes);
    (void)!send(s->fd, word, sizeof head + head.n_bytes, MSG_DONTWAIT | MSG_NOSIGNAL);
}

/* Runs at exit, after the program's own handlers. The library's threads may still be at work; they write
 * nothing if all is well. Other threads hold the lock only briefly. An exception is exit called by a signal
 * handler that interrupted such a thread: then nothing is sent. */
__attribute__((destructor)) static void say_last_words(void)
{
    int busy = 1;
    for (int i = 0; i < 100 && busy; i++) {
        busy = pthread_mutex_trylock(&lock);
        if (busy)
            nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    }
    atomic_store(&ending, true);
    if (busy)
        return;
    for (const struct zr_kept_socket *s = kept; s && owner == getpid(); s = s->next)
        if (s->has_last_word)
            say_last_word(s);
    pthread_mutex_unlock(&lock);
}
