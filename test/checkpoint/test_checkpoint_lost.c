/* SPDX-License-Identifier: Apache-2.0 */
/* test_checkpoint_lost.c: tests an asynchronous save that ends before its snapshot is copied, because a
 * peer is lost or no thread can be started to write it. Also tests the threads that write. */
#include "kernels/thread.h"
#include "shard/engine/internal.h"
#include "test/checkpoint/memory_files.h"
#include "test/checkpoint/saved_model.h"
#include "test/cmocka.h"

#include <malloc.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* ---- snapshots whose copies wait until a gate opens ---- */

struct gate {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool open;
};

static struct gate gate = {.lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};
static struct zr_device_ops slow;
static const struct zr_device_ops *own;
static const struct zr_engine *copying;

static void stand(void *arg)
{
    pthread_mutex_lock(&gate.lock);
    while (!gate.open)
        pthread_cond_wait(&gate.changed, &gate.lock);
    pthread_mutex_unlock(&gate.lock);
}

static int copy_slowly(struct zr_stream *s, void *dst, const void *src, int64_t bytes)
{
    const char *to = dst, *snapshot = copying->snapshot;
    bool shards = s != copying->compute; /* the saving thread copies buffers at once */
    if (shards && to >= snapshot && to < snapshot + copying->plan->snapshot_bytes) {
        int err = own->call(s, stand, NULL, 0);
        if (err)
            return err;
    }
    return own->copy(s, dst, src, bytes);
}

static void close_gate(struct model_rank *m)
{
    struct zr_engine *e = m->z->engine;
    CHECK_OK(zr_engine_drain(e)); /* the loop is idle */
    gate.open = false;
    own = e->dev->ops;
    copying = e;
    slow = *own;
    slow.copy = copy_slowly;
    e->dev->ops = &slow;
}

static void open_gate(void)
{
    pthread_mutex_lock(&gate.lock);
    gate.open = true;
    pthread_cond_broadcast(&gate.changed);
    pthread_mutex_unlock(&gate.lock);
}

static bool gate_is_open(void)
{
    pthread_mutex_lock(&gate.lock);
    bool open = gate.open;
    pthread_mutex_unlock(&gate.lock);
    return open;
}

/* ---- a lost peer ---- */

static void lose_peer(struct model_rank *m, void *arg)
{
    pthread_barrier_t *barrier = arg;
    CHECK_OK(model_steps(m, 1));
    if (m->rank == 0)
        close_gate(m);
    CHECK_OK(zero_save(m->z, "run", NULL));
    pthread_barrier_wait(barrier);
    if (m->rank == 0) {
        /* Reports what the rendezvous reports when a peer's socket closes. */
        zr_engine_fail(m->z->engine, ZERO_ERR_PEER, "rank 1 was lost: its connection was closed");
        CHECK_THAT(zr_save_end(m->z) == ZERO_ERR_PEER); /* does not wait for what may never come */
        CHECK_THAT(!gate_is_open());
        open_gate();
        /* The snapshot is complete only now, when no one waits for it any more. */
        CHECK_OK(zr_engine_device(m->z->engine)->ops->stream_sync(m->z->engine->reduce_stream));
    }
    CHECK_THAT(zero_save_wait(m->z, NULL) == ZERO_ERR_PEER);
    pthread_barrier_wait(barrier);
}

static void test_lost_peer(void **state)
{
    for (int stage = 0; stage < 4; stage++) {
        struct memory_files *files = memory_files_open();
        pthread_barrier_t barrier;
        assert_int_equal(pthread_barrier_init(&barrier, NULL, 2), 0);
        struct model_options o = {
            .stage = stage, .world = 2, .async = true, .files = memory_files_table(files)};
        model_run(&o, lose_peer, &barrier);
        pthread_barrier_destroy(&barrier);
        memory_files_close(files);
    }
}

/* ---- no thread to write ---- */

static _Atomic bool no_threads;

int __real_zr_thread_start(struct zr_thread *t, const char *name, void (*fn)(void *arg), void *arg);
int __wrap_zr_thread_start(struct zr_thread *t, const char *name, void (*fn)(void *arg), void *arg);

int __wrap_zr_thread_start(struct zr_thread *t, const char *name, void (*fn)(void *arg), void *arg)
{
    return no_threads ? zr_fail(ZERO_ERR_SYSTEM, "thread %s could not be started: the test has none", name)
                      : __real_zr_thread_start(t, name, fn, arg);
}

static void *open_later(void *arg)
{
    const struct timespec a_while = {.tv_nsec = 100000000};
    nanosleep(&a_while, NULL);
    open_gate();
    return arg;
}

static void save_without_thread(struct model_rank *m, void *arg)
{
    pthread_t later;
    CHECK_OK(model_steps(m, 1));
    uint64_t hash = model_hash(m);
    close_gate(m);
    no_threads = true;
    CHECK_OK(zero_save(m->z, "run", NULL));
    CHECK_THAT(!pthread_create(&later, NULL, open_later, NULL));
    CHECK_THAT(zero_save_wait(m->z, NULL) == ZERO_ERR_SYSTEM);
    CHECK_THAT(gate_is_open()); /* the snapshot's memory may be reused: its copies are done */
    pthread_join(later, NULL);
    no_threads = false;
    CHECK_OK(zero_save(m->z, "run", NULL));
    CHECK_OK(zero_save_wait(m->z, NULL));
    CHECK_OK(model_steps(m, 1));
    CHECK_OK(zero_load(m->z, "run"));
    CHECK_THAT(model_hash(m) == hash);
}

/* ---- the threads that read and write files ---- */

static struct zr_files watched, plain;
static _Atomic int n_transfers, n_heard; /* of library threads; of those with signals */

/* Called for each write. */
static void look_at_thread(void)
{
    char name[ZR_THREAD_NAME_BYTES];
    sigset_t mask;
    pthread_getname_np(pthread_self(), name, sizeof name);
    if (strncmp(name, "zero-", 5) != 0)
        return;
    pthread_sigmask(SIG_BLOCK, NULL, &mask);
    n_transfers++;
    n_heard += !sigismember(&mask, SIGTERM) || !sigismember(&mask, SIGUSR1) || sigismember(&mask, SIGSEGV);
}

static int64_t watched_pwrite(void *arg, int fd, const void *buf, size_t n, int64_t at)
{
    look_at_thread();
    return plain.pwrite(arg, fd, buf, n, at);
}

static void save_on_threads(struct model_rank *m, void *arg)
{
    CHECK_OK(model_steps(m, 1));
    CHECK_OK(zero_save(m->z, "run", NULL));
    CHECK_OK(zero_save_wait(m->z, NULL));
}

/* The program's signals go to the program's threads, even during a save. */
static void test_threads_that_write(void **state)
{
    struct memory_files *files = memory_files_open();
    watched = plain = *memory_files_table(files);
    watched.pwrite = watched_pwrite;
    struct model_options o = {.stage = 1, .world = 1, .async = true, .files = &watched};
    model_run(&o, save_on_threads, NULL);
    assert_true(n_transfers > 0);
    assert_int_equal(n_heard, 0);
    memory_files_close(files);
}

/* Shared memory also for a single rank, which then has a loop and streams. */
static void use_shm(struct zero_tensor *tensors, struct zero_config *cfg)
{
    cfg->launch.backend = ZERO_BACKEND_SHM;
}

static void test_no_thread(void **state)
{
    struct memory_files *files = memory_files_open();
    struct model_options o = {
        .stage = 2, .world = 1, .async = true, .files = memory_files_table(files), .change = use_shm};
    model_run(&o, save_without_thread, NULL);
    assert_int_equal(memory_files_n_open(files), 0);
    memory_files_close(files);
}

int main(void)
{
    mallopt(M_PERTURB, 0x5a); /* freed memory is overwritten */
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_lost_peer),
        cmocka_unit_test(test_no_thread),
        cmocka_unit_test(test_threads_that_write),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
