/* SPDX-License-Identifier: Apache-2.0 */
/* test_mpi_stand_in.c: tests that the stand-in for MPI moves the right data, and reports what MPI does not
 * allow. */
#include "kernels/device.h"
#include "test/cmocka.h"
#include "test/comm/mpi/mpi_traffic.h"
#include "test/stand_in/mpi_stand_in.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

enum { RANKS = 8 };

struct rank {
    int rank;
    struct zr_mpi_world *w;
    int32_t comm;
    void (*fn)(struct rank *s);
    char wrong[512];
};

static const struct zr_mpi_shim *shim;
static struct rank ranks[RANKS];
/* of the running test */
static int n_ranks;
static void *user_comm;

/* cmocka's asserts jump, so they work on the test's own thread only. */
#define CHECK(s, cond)                                                                                       \
    do {                                                                                                     \
        if (!(cond)) {                                                                                       \
            snprintf((s)->wrong, sizeof(s)->wrong, "line %d: %s", __LINE__, #cond);                          \
            return;                                                                                          \
        }                                                                                                    \
    } while (0)

/* Begins MPI, and makes a communicator of all ranks. */
static bool begin(struct rank *s)
{
    enum zr_mpi_level level;
    int32_t member[RANKS];
    mpi_stand_in_be(s->rank);
    s->w = shim->world();
    for (int i = 0; i < n_ranks; i++)
        member[i] = i;
    if (shim->is_initialized(s->w) || shim->init(s->w, ZR_MPI_SERIALIZED, &level) ||
        level != ZR_MPI_SERIALIZED || !shim->is_initialized(s->w))
        return false;
    return shim->make(s->w, NULL, member, n_ranks, 1, &s->comm) == 0;
}

static bool end(struct rank *s)
{
    return shim->free(s->w, s->comm) == 0 && shim->finalize(s->w) == 0 && shim->is_finalized(s->w);
}

static void nap(void)
{
    nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
}

/* Waits until so many requests have ended, or for so many milliseconds. Returns how many did, or minus the
 * class of an error. */
static int ended_within(struct rank *s, int n, int ms)
{
    struct zr_mpi_done done[ZR_MPI_SLOTS];
    int all = 0;
    for (int i = 0; i < ms && all < n; i++) {
        int some = shim->poll(s->w, done);
        if (some < 0)
            return some;
        if (some > 0 && done[0].error)
            return -done[0].error;
        all += some;
        if (!some)
            nap();
    }
    return all;
}

static int ended(struct rank *s, int n)
{
    return ended_within(s, n, 60000);
}

/* Returns whether no request in progress ends. */
static bool none_ends(struct rank *s)
{
    return ended_within(s, 1, 30) == 0;
}

static void *run_rank(void *arg)
{
    struct rank *s = arg;
    s->fn(s);
    return NULL;
}

/* Runs fn as n ranks. Then expects a misuse with this text, or none (NULL). */
static void run(int n, void (*fn)(struct rank *s), const char *misuse)
{
    pthread_t id[RANKS];
    const char *first;
    n_ranks = n;
    shim = mpi_stand_in_shim();
    mpi_stand_in_the_machine()->n_ranks = n;
    for (int i = 0; i < n; i++) {
        ranks[i] = (struct rank){.rank = i, .fn = fn};
        assert_int_equal(pthread_create(&id[i], NULL, run_rank, &ranks[i]), 0);
    }
    for (int i = 0; i < n; i++)
        pthread_join(id[i], NULL);
    int found = mpi_stand_in_end(&first);
    for (int i = 0; i < n; i++)
        if (ranks[i].wrong[0])
            fail_msg("rank %d: %s", i, ranks[i].wrong);
    if (misuse ? found == 0 || !strstr(first, misuse) : found != 0)
        fail_msg("%d misuses, first: \"%s\", expected: \"%s\"", found, first, misuse ? misuse : "");
}

/* --- what is allowed --- */

static void traffic(struct rank *s)
{
    CHECK(s, begin(s));
    if (!mpi_traffic(shim, s->w, user_comm, s->wrong, sizeof s->wrong))
        return;
    CHECK(s, end(s));
}

static void test_traffic(void **state)
{
    user_comm = NULL;
    for (int n = 1; n <= RANKS; n += n < 4 ? 1 : 2)
        run(n, traffic, NULL);
}

static void test_user_comm(void **state)
{
    static struct mpi_stand_in_comm reversed = {.n = 5, .member = {4, 3, 2, 1, 0}};
    user_comm = &reversed;
    run(5, traffic, NULL);
}

static void no_comm(struct rank *s)
{
    struct mpi_stand_in_comm none = {0}, part = {.n = 2, .member = {2, 1}};
    int rank, size;
    CHECK(s, begin(s));
    CHECK(s, shim->rank_of(s->w, &none, &rank, &size) == 0 && rank == -1 && size == 0);
    CHECK(s, shim->rank_of(s->w, &part, &rank, &size) == 0 && size == 2);
    CHECK(s, rank == (s->rank == 2 ? 0 : s->rank == 1 ? 1 : -1));
    CHECK(s, end(s));
}

static void test_no_comm(void **state)
{
    run(3, no_comm, NULL);
}

/* A broadcast's root does not wait for the other ranks; a gather does. */
static void no_barrier(struct rank *s)
{
    static atomic_bool gone;
    char at[4] = "abc", to[8];
    int32_t slot;
    if (s->rank == 0)
        atomic_store(&gone, false);
    CHECK(s, begin(s));
    if (s->rank == 0) {
        CHECK(s, shim->broadcast(s->w, s->comm, at, 4, 0, &slot) == 0 && ended(s, 1) == 1);
        CHECK(s, shim->all_gather(s->w, s->comm, at, to, 4, 4, &slot) == 0);
        CHECK(s, none_ends(s));
        atomic_store(&gone, true);
    } else {
        for (int i = 0; i < 60000 && !atomic_load(&gone); i++)
            nap();
        memset(at, 0, 4);
        CHECK(s, shim->broadcast(s->w, s->comm, at, 4, 0, &slot) == 0);
        CHECK(s, ended(s, 1) == 1 && !strcmp(at, "abc"));
        CHECK(s, shim->all_gather(s->w, s->comm, at, to, 4, 4, &slot) == 0);
    }
    CHECK(s, ended(s, 1) == 1 && !memcmp(to, "abc\0abc", 8));
    CHECK(s, end(s));
}

static void test_no_barrier(void **state)
{
    run(2, no_barrier, NULL);
}

/* --- misuse --- */

static void two_threads(struct rank *s)
{
    CHECK(s, begin(s));
    CHECK(s, end(s));
}

static void *poll_once(void *arg)
{
    struct zr_mpi_done done[ZR_MPI_SLOTS];
    struct rank *s = arg;
    shim->poll(s->w, done);
    return NULL;
}

static void other_thread(struct rank *s)
{
    pthread_t id;
    CHECK(s, begin(s));
    CHECK(s, pthread_create(&id, NULL, poll_once, s) == 0);
    pthread_join(id, NULL);
    CHECK(s, end(s));
}

static void early(struct rank *s)
{
    struct zr_mpi_done done[ZR_MPI_SLOTS];
    mpi_stand_in_be(s->rank);
    s->w = shim->world();
    CHECK(s, shim->poll(s->w, done) < 0);
}

static void late(struct rank *s)
{
    CHECK(s, begin(s));
    CHECK(s, end(s));
    CHECK(s, shim->free(s->w, s->comm) != 0);
}

static void no_rank(struct rank *s)
{
    shim->world();
}

static void pending_free(struct rank *s)
{
    static char at;
    int32_t slot;
    CHECK(s, begin(s));
    CHECK(s, shim->receive(s->w, s->comm, &at, 1, 0, 3, &slot) == 0);
    CHECK(s, shim->free(s->w, s->comm) != 0);
}

static void never_freed(struct rank *s)
{
    CHECK(s, begin(s));
    CHECK(s, shim->finalize(s->w) == 0);
}

static void never_received(struct rank *s)
{
    static char at;
    int32_t slot;
    CHECK(s, begin(s));
    CHECK(s, shim->receive(s->w, s->comm, &at, 1, 0, 3, &slot) == 0);
}

static void touched(struct rank *s)
{
    static char at[9000], to[9000];
    int32_t slot;
    CHECK(s, begin(s));
    CHECK(s, shim->send(s->w, s->comm, at, sizeof at, 0, 3, &slot) == 0);
    at[8999] = 1;
    CHECK(s, shim->receive(s->w, s->comm, to, sizeof to, 0, 3, &slot) == 0);
    CHECK(s, ended(s, 2) == 2);
    CHECK(s, end(s));
}

/* Memory to be filled holds no useful data until its request has ended. */
static void poisoned(struct rank *s)
{
    static char at[4] = "abc", to[4] = "def";
    int32_t slot;
    CHECK(s, begin(s));
    CHECK(s, shim->receive(s->w, s->comm, to, 4, 0, 3, &slot) == 0 && memcmp(to, "def", 4) != 0);
    CHECK(s, shim->send(s->w, s->comm, at, 4, 0, 3, &slot) == 0 && ended(s, 2) == 2 && !strcmp(to, "abc"));
    CHECK(s, end(s));
}

static void other_room(struct rank *s)
{
    static char at[8], to[4];
    int32_t slot;
    CHECK(s, begin(s));
    CHECK(s, shim->send(s->w, s->comm, at, 8, 0, 3, &slot) == 0);
    CHECK(s, shim->receive(s->w, s->comm, to, 4, 0, 3, &slot) == 0);
}

static void too_large(struct rank *s)
{
    static char at;
    int32_t slot;
    CHECK(s, begin(s));
    CHECK(s, shim->send(s->w, s->comm, &at, INT64_C(1) << 31, 0, 3, &slot) != 0 && slot == -1);
    CHECK(s, end(s));
}

static void large_tag(struct rank *s)
{
    static char at;
    int32_t slot;
    CHECK(s, begin(s));
    CHECK(s, shim->send(s->w, s->comm, &at, 1, 0, ZR_MPI_TAG_MAX + 1, &slot) != 0 && slot == -1);
    CHECK(s, end(s));
}

/* Two collectives; rank 1 changes the order, the size or the root. */
static int other;

static void collectives(struct rank *s)
{
    static int64_t words[2][2];
    static char bytes[2][64];
    int32_t slot;
    int n = s->rank && other == 1 ? 1 : 2, root = s->rank && other == 2;
    CHECK(s, begin(s));
    if (s->rank && other == 0)
        CHECK(s, shim->broadcast(s->w, s->comm, bytes[1], 16, 0, &slot) == 0);
    CHECK(s, shim->all_max(s->w, s->comm, words[s->rank], n, &slot) == 0);
    if (!s->rank || other != 0)
        CHECK(s, shim->broadcast(s->w, s->comm, bytes[s->rank], 16, root, &slot) == 0);
}

static void test_misuse(void **state)
{
    static const struct {
        int n;
        void (*fn)(struct rank *s);
        const char *misuse;
    } rows[] = {
        {1, two_threads, NULL},
        {1, other_thread, NULL},
        {1, early, "rank 0: poll is called before MPI_Init"},
        {1, late, "rank 0: free is called after MPI_Finalize"},
        {1, no_rank, "a thread that is no rank"},
        {1, pending_free, "rank 0: free of a communicator with 1 requests pending"},
        {1, never_freed, "rank 0: 1 communicators were not freed"},
        {1, never_received, "rank 0: 1 requests are pending at the end"},
        {1, touched, "rank 0: memory that is sent (kind 1, 9000 bytes) changed"},
        {1, poisoned, NULL},
        {1, other_room, "rank 0: a message of 8 bytes with tag 3 is received as one of 4"},
        {1, too_large, "rank 0: send of 2147483648 bytes"},
        {1, large_tag, "rank 0: send with tag 32768"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        run(rows[i].n, rows[i].fn, rows[i].misuse);
}

static void test_other_collectives(void **state)
{
    for (other = 0; other < 3; other++)
        run(2, collectives, "another rank's is kind");
}

/* --- faults --- */

static void faults(struct rank *s)
{
    static char at;
    int32_t slot;
    CHECK(s, begin(s));
    mpi_stand_in_fail("send", 0, 2, 15);
    CHECK(s, shim->send(s->w, s->comm, &at, 1, 0, 3, &slot) == 0);
    CHECK(s, shim->send(s->w, s->comm, &at, 1, 0, 3, &slot) == 15 && slot == -1);
    mpi_stand_in_fail("poll", 0, 1, 17);
    CHECK(s, ended(s, 1) == -17);
    CHECK(s, shim->receive(s->w, s->comm, &at, 1, 0, 3, &slot) == 0 && ended(s, 1) == 1);
    CHECK(s, end(s));
}

/* Requests that involve a dead rank never end. Others do. */
static void death(struct rank *s)
{
    static char at[3][8], to[3][8];
    int next = s->rank == 0 ? 1 : s->rank == 1 ? 0 : 2;
    int32_t slot;
    CHECK(s, begin(s));
    if (s->rank == 2)
        mpi_stand_in_die(2);
    CHECK(s, shim->send(s->w, s->comm, at[s->rank], 8, next, 3, &slot) == 0);
    CHECK(s, shim->receive(s->w, s->comm, to[s->rank], 8, next, 3, &slot) == 0);
    CHECK(s, s->rank == 2 ? none_ends(s) : ended(s, 2) == 2);
    if (s->rank != 2)
        CHECK(s, shim->receive(s->w, s->comm, to[s->rank], 8, 2, 3, &slot) == 0 && none_ends(s));
}

static void hang(struct rank *s)
{
    struct zr_mpi_done done[ZR_MPI_SLOTS];
    CHECK(s, begin(s));
    mpi_stand_in_hang("poll", 0, 1);
    CHECK(s, shim->poll(s->w, done) < 0);
}

static void test_faults(void **state)
{
    struct mpi_stand_in_counts c = {0};
    pthread_t id;
    const char *first;
    run(1, faults, NULL);
    run(3, death, NULL);
    ranks[0] = (struct rank){.fn = hang};
    n_ranks = 1;
    assert_int_equal(pthread_create(&id, NULL, run_rank, &ranks[0]), 0);
    for (int i = 0; i < 60000 && c.n_hung == 0; i++, nap())
        mpi_stand_in_counts(&c);
    assert_int_equal(c.n_hung, 1);
    assert_int_equal(mpi_stand_in_end(&first), 0); /* releases it */
    pthread_join(id, NULL);
    assert_string_equal(ranks[0].wrong, "");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_traffic), cmocka_unit_test(test_user_comm),
        cmocka_unit_test(test_no_comm), cmocka_unit_test(test_no_barrier),
        cmocka_unit_test(test_misuse),  cmocka_unit_test(test_other_collectives),
        cmocka_unit_test(test_faults),
    };
    return cmocka_run_group_tests_name("mpi stand-in", tests, NULL, NULL);
}
