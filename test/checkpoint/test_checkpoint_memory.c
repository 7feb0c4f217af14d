/* SPDX-License-Identifier: Apache-2.0 */
/* test_checkpoint_memory.c: fails every allocation of wrap, step, save and load in turn, once and from
 * then on. The call returns an error, nothing is lost or left behind, and everything works afterwards.
 *
 * EVERY=n in the environment tests one allocation in n, and one in 5 n among several ranks. EVERY=1 tests
 * all. */
#include "test/checkpoint/saved_model.h"
#include "test/cmocka.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <jansson.h>
#include <uv.h>

/* ---- the allocator, by the linker's --wrap; of the library's own code, libuv and jansson ---- */

static _Atomic int64_t n_calls, fail_at; /* 0: none fails */
static _Atomic bool always;

void *__real_malloc(size_t n);
void *__real_calloc(size_t n, size_t size);
void *__real_realloc(void *p, size_t n);
char *__real_strdup(const char *s);
void *__wrap_malloc(size_t n);
void *__wrap_calloc(size_t n, size_t size);
void *__wrap_realloc(void *p, size_t n);
char *__wrap_strdup(const char *s);

static bool fails(void)
{
    int64_t at = fail_at;
    if (!at)
        return false;
    int64_t k = ++n_calls;
    return k == at || (always && k > at);
}

void *__wrap_malloc(size_t n)
{
    return fails() ? NULL : __real_malloc(n);
}

void *__wrap_calloc(size_t n, size_t size)
{
    return fails() ? NULL : __real_calloc(n, size);
}

void *__wrap_realloc(void *p, size_t n)
{
    return fails() ? NULL : __real_realloc(p, n);
}

char *__wrap_strdup(const char *s)
{
    return fails() ? NULL : __real_strdup(s);
}

static void begin_failing(int64_t k, bool for_good)
{
    n_calls = 0;
    always = for_good;
    fail_at = k;
}

/* Returns the number of allocations since begin_failing. */
static int64_t end_failing(void)
{
    fail_at = 0;
    return n_calls;
}

/* ---- one model ---- */

/* Uses the real file system, since the one in memory allocates too. No power failure is tested here, so
 * nothing need wait for the disk. */
static char folder[] = "/tmp/zero-checkpoint-XXXXXX", run[sizeof folder + 8];

static int no_sync(void *arg, int fd)
{
    return 0;
}

static uint64_t hashes[3];

static int every_alone = 1, every_among = 5; /* one in so many fails: for a single rank, and among several */

static void reach(struct model_rank *m, void *arg)
{
    for (int i = 1; i <= 2; i++) {
        CHECK_OK(model_steps(m, 1));
        uint64_t h = model_hash(m);
        if (m->rank == 0)
            hashes[i] = h;
        if (i == 1)
            CHECK_OK(zero_save(m->z, run, NULL));
    }
    CHECK_OK(zero_save_wait(m->z, NULL));
}

static void fail_calls(struct model_rank *m, void *arg)
{
    bool for_good = *(bool *)arg, done = false;
    reach(m, NULL);
    for (int64_t k = 1 + rand() % every_alone; !done; k += every_alone) {
        begin_failing(k, for_good);
        int err = zero_save(m->z, run, NULL);
        if (!err)
            err = zero_save_wait(m->z, NULL);
        done = end_failing() < k;
        /* Without memory jansson misreads. Then the result is wrong in some way, and an error says so. */
        if (err)
            CHECK_THAT(err == ZERO_ERR_NOMEM || err == ZERO_ERR_IO);
        if (done)
            CHECK_THAT(err == 0);
        CHECK_THAT(model_hash(m) == hashes[2]);
        /* Saving works again, and removes what could not be removed. */
        CHECK_OK(zero_save(m->z, run, NULL));
        CHECK_OK(zero_save_wait(m->z, NULL));
        if (done)
            printf("%lld allocations in a save\n", (long long)n_calls);
    }
    done = false;
    for (int64_t k = 1 + rand() % every_alone; !done; k += every_alone) {
        begin_failing(k, for_good);
        int err = zero_load(m->z, run);
        done = end_failing() < k;
        /* Without memory jansson misreads. Then the result is wrong in some way, and an error says so. */
        if (err)
            CHECK_THAT(err == ZERO_ERR_NOMEM || err == ZERO_ERR_IO);
        CHECK_THAT(model_t(m) == 2);
        CHECK_THAT(err == 0 || !done);
        CHECK_THAT(model_hash(m) == hashes[2]);
        if (done)
            printf("%lld allocations in a load\n", (long long)n_calls);
    }
    done = false;
    for (int64_t k = 1; !done && k < 100; k++) {
        begin_failing(k, for_good);
        int err = model_steps(m, 1);
        done = end_failing() < k;
        CHECK_THAT(err == 0 && done); /* nothing is allocated after zero_wrap */
    }
    CHECK_OK(zero_save(m->z, run, NULL));
    CHECK_OK(zero_save_wait(m->z, NULL));
}

/* ---- several ranks: all learn of a failed allocation on any of them, and go on ---- */

struct among {
    bool for_good, done;
    int64_t first, every;      /* allocation */
    pthread_barrier_t barrier; /* not the library's, which is under test */
    int err[3];
    char text[3][300];
    char saves[3][sizeof run]; /* folders, by the step that is saved in them */
};

static bool all_or_none(const struct model_rank *m, struct among *a, int err)
{
    a->err[m->rank] = err;
    snprintf(a->text[m->rank], sizeof *a->text, "%s", err ? zero_last_error() : "");
    pthread_barrier_wait(&a->barrier);
    bool same = true;
    for (int r = 1; r < m->world; r++)
        same &= !a->err[r] == !a->err[0];
    if (!same && m->rank == 0)
        for (int r = 0; r < m->world; r++)
            fprintf(stderr, "rank %d: %d: %s\n", r, a->err[r], a->text[r]);
    return same;
}

static void begin_among(const struct model_rank *m, struct among *a, int64_t k)
{
    pthread_barrier_wait(&a->barrier);
    if (m->rank == 0)
        begin_failing(k, a->for_good);
    pthread_barrier_wait(&a->barrier);
}

/* Returns whether there were fewer than k allocations. */
static bool end_among(const struct model_rank *m, struct among *a, int64_t k)
{
    pthread_barrier_wait(&a->barrier);
    if (m->rank == 0)
        a->done = end_failing() < k;
    pthread_barrier_wait(&a->barrier);
    return a->done;
}

static void fail_among(struct model_rank *m, void *arg)
{
    struct among *a = arg;
    uint64_t hash[3];
    int64_t k, n = 0;
    bool done = false;
    for (int i = 1; i <= 2; i++) {
        CHECK_OK(model_steps(m, 1));
        hash[i] = model_hash(m);
        if (i == 1)
            CHECK_OK(zero_save(m->z, a->saves[1], NULL));
        CHECK_OK(zero_save_wait(m->z, NULL));
    }
    for (k = a->first; !done; k += a->every) {
        begin_among(m, a, k);
        int err = zero_save(m->z, a->saves[2], NULL);
        if (!err)
            err = zero_save_wait(m->z, NULL);
        done = end_among(m, a, k);
        CHECK_THAT(all_or_none(m, a, err));
        CHECK_THAT(err == 0 || ((err == ZERO_ERR_NOMEM || err == ZERO_ERR_IO) && !done));
        if (++n % 16 && !done)
            continue;
        CHECK_THAT(model_hash(m) == hash[2]);
        CHECK_OK(zero_save(m->z, a->saves[2], NULL));
        CHECK_OK(zero_load(m->z, a->saves[2]));
        CHECK_THAT(model_hash(m) == hash[2]);
    }
    if (m->rank == 0)
        printf("%lld allocations in a save of %d ranks\n", (long long)k, m->world);
    done = false;
    for (k = a->first; !done; k += a->every) {
        begin_among(m, a, k);
        int err = zero_load(m->z, a->saves[1]);
        done = end_among(m, a, k);
        CHECK_THAT(all_or_none(m, a, err));
        /* Without memory jansson misreads. Then the result is wrong in some way, and an error says so. */
        CHECK_THAT(err == 0 || ((err == ZERO_ERR_NOMEM || err == ZERO_ERR_IO) && !done));
        CHECK_THAT(model_t(m) == (err ? 2 : 1));
        if (err && ++n % 16)
            continue;
        CHECK_THAT(model_hash(m) == hash[err ? 2 : 1]);
        m->step = 1;
        CHECK_OK(zero_load(m->z, a->saves[1]));
        CHECK_OK(model_steps(m, 1));
        CHECK_THAT(model_hash(m) == hash[2]);
    }
    if (m->rank == 0)
        printf("%lld allocations in a load of %d ranks\n", (long long)k, m->world);
    begin_among(m, a, 1);
    int err = model_steps(m, 1);
    CHECK_THAT(end_among(m, a, 1) && err == 0); /* nothing is allocated after zero_wrap */
}

static int remove_one(void *arg, const char *name)
{
    char path[ZR_PATH_BYTES];
    return zr_path_join(path, arg, name) || zr_folder_remove(&zr_files_posix, path, NULL);
}

static void clear(const char *path)
{
    assert_int_equal(zr_folder_walk(&zr_files_posix, path, NULL, remove_one, (void *)(uintptr_t)path), 0);
    assert_int_equal(rmdir(path), 0);
}

static void test_allocations_of_calls(void **state)
{
    for (int way = 0; way < 4; way++) {
        bool for_good = way & 1;
        struct zr_files files = zr_files_posix;
        files.fsync = no_sync;
        snprintf(run, sizeof run, "%s/run%d", folder, way);
        struct model_options o = {.stage = 2, .world = 1, .async = way & 2, .keep = 2, .files = &files};
        model_run(&o, fail_calls, &for_good);
        clear(run);
    }
}

/* EVERY=1 in the environment takes minutes. */

static void test_allocations_among_ranks(void **state)
{
    for (int way = 0; way < 4; way++) {
        struct among a = {.for_good = way & 1, .first = 1 + rand() % every_among, .every = every_among};
        struct zr_files files = zr_files_posix;
        files.fsync = no_sync;
        for (int step = 1; step <= 2; step++)
            snprintf(a.saves[step], sizeof run, "%s/step%d", folder, step);
        struct model_options o = {
            .stage = way, .world = way % 3 == 1 ? 3 : 2, .async = way & 2, .keep = 2, .files = &files};
        assert_int_equal(pthread_barrier_init(&a.barrier, NULL, (unsigned)o.world), 0);
        model_run(&o, fail_among, &a);
        pthread_barrier_destroy(&a.barrier);
        clear(a.saves[1]);
        clear(a.saves[2]);
    }
}

static void test_allocations_of_wrap(void **state)
{
    bool done = false;
    for (int64_t k = 1; !done; k++) {
        float w[40] = {1, 2, 3}, v[9] = {0}, *pw = w, *gw = NULL, *pv = v, *gv = NULL;
        struct zero_tensor t[] = {{"w", (void **)&pw, (void **)&gw, {40}, ZERO_F32, 0, 0},
                                  {"v", (void **)&pv, (void **)&gv, {9}, ZERO_F32, 1, 0}};
        struct zero_config cfg = ZERO_CONFIG_INIT;
        zero_ctx *z;
        cfg.launch.world = 1;
        cfg.stage = 3;
        cfg.checkpoint.save_async = 1;
        cfg.debug.trace = 1;
        begin_failing(k, k % 2);
        int err = zero_wrap(&z, t, 2, &cfg);
        done = end_failing() < k;
        if (err) {
            assert_int_equal(err, ZERO_ERR_NOMEM);
            assert_true(z == NULL && pw == w && gw == NULL && !done);
        } else {
            assert_int_equal(zero_unwrap(&z), 0);
        }
    }
}

static void *counted(size_t n)
{
    return fails() ? NULL : __real_malloc(n);
}

static void release(void *p)
{
    free(p);
}

int main(void)
{
    uv_replace_allocator(__wrap_malloc, __wrap_realloc, __wrap_calloc, release);
    json_set_alloc_funcs(counted, release);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_allocations_of_calls),
        cmocka_unit_test(test_allocations_among_ranks),
        cmocka_unit_test(test_allocations_of_wrap),
    };
    const char *e = getenv("EVERY"), *given = getenv("SEED");
    unsigned seed = given ? (unsigned)atoi(given) : (unsigned)time(NULL);
    if (e && atoi(e) > 0) {
        every_alone = atoi(e);
        every_among = every_alone == 1 ? 1 : 5 * every_alone;
    }
    srand(seed);
    printf("SEED=%u\n", seed);
    if (!mkdtemp(folder))
        return 1;
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    return rmdir(folder) || failed;
}
