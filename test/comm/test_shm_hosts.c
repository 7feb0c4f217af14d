/* SPDX-License-Identifier: Apache-2.0 */
/* test_shm_hosts.c: tests shared memory in a world with several hosts: a machine's memory and cores are
 * divided among its own ranks. This test sets how much memory and how many cores there are. */
#include "comm/backend.h"
#include "comm/shm/shm.h"
#include "comm/topology.h"
#include "kernels/host/host_memory.h"
#include "test/cmocka.h"
#include "test/comm/comm_fixture.h"

#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { LONG_MS = 60000, WORLD = 4, ARENA_BYTES = 400 << 10 };

static int64_t free_bytes = 1 << 20;
static int n_cores = 1024;

void __wrap_zr_host_memory_look(const char *root, struct zr_host_memory *out);
int __wrap_sched_getaffinity(pid_t pid, size_t bytes, cpu_set_t *set);
long __wrap_sysconf(int name);
long __real_sysconf(int name);

void __wrap_zr_host_memory_look(const char *root, struct zr_host_memory *out)
{
    *out = (struct zr_host_memory){.free_bytes = free_bytes};
}

int __wrap_sched_getaffinity(pid_t pid, size_t bytes, cpu_set_t *set)
{
    CPU_ZERO_S(bytes, set);
    for (int i = 0; i < n_cores && i < CPU_SETSIZE; i++)
        CPU_SET_S(i, bytes, set);
    return 0;
}

long __wrap_sysconf(int name)
{
    return name == _SC_NPROCESSORS_ONLN ? n_cores : __real_sysconf(name);
}

/* Parameters of a test. */
struct hosts {
    int32_t local_size;
    /* the hosts are containers of one machine */
    bool one_machine;
    int64_t arena_bytes;
    /* of rank 3; the others have free_bytes */
    int64_t free_bytes_of_3;
};

/* Makes the topology that a probe would find. */
static int lay_out(struct rank *me, const struct hosts *h, struct zr_topology *t)
{
    int err = zr_topology_assume(me->w.world, h->local_size, t);
    if (err)
        return err;
    t->rank = me->w.rank;
    t->host = t->host_of[me->w.rank];
    t->local_size = t->hosts[t->host].n_ranks;
    t->local_rank = me->w.rank - t->hosts[t->host].lowest_rank;
    for (int32_t i = 0; i < t->n_hosts; i++)
        snprintf(t->hosts[i].machine, sizeof t->hosts[i].machine, "machine %d", h->one_machine ? 0 : i);
    return 0;
}

/* Opens one group per host. */
static void open_on_hosts(struct rank *me)
{
    const struct hosts *h = me->arg;
    struct fixture o;
    struct zr_topology t;
    struct zr_comm *c = NULL;
    char *base = NULL;
    int32_t members[WORLD];
    if (me->w.rank == 3 && h->free_bytes_of_3)
        free_bytes = h->free_bytes_of_3; /* limits this process only */
    RANK_CHECK(me, lay_out(me, h, &t) == 0, "%s", zr_error_text());
    RANK_CHECK(me, fixture_open(&o, &me->w, &fixture_shm, 0, LONG_MS, 0) == 0, "%s", zr_error_text());
    struct zr_group g = {.size = t.local_size, .rank = t.local_rank, .members = members};
    for (int32_t i = 0; i < g.size; i++)
        members[i] = t.hosts[t.host].lowest_rank + i;
    RANK_CHECK(me, zr_shm_open(o.rdv, o.dev, &t, &g, ZR_ROLE_GATHER, LONG_MS, &c) == 0, "%s",
               zr_error_text());
    me->stage = ((struct zr_shm *)c)->spin_ns > 0;
    note_error(me, fixture_arena(c, h->arena_bytes, &base));
    zr_comm_close(c);
    zr_topology_free(&t);
    RANK_CHECK(me, fixture_close(&o), "handles are left");
}

static void expect_code(struct hosts h, int code, const char *text)
{
    struct rank *r = run_ranks(true, WORLD, open_on_hosts, &h, NULL);
    for (int i = 0; i < WORLD; i++)
        expect_rank(&r[i], code, text);
}

static void test_memory(void **state)
{
    /* twice fits, four times does not */
    expect_code((struct hosts){2, false, ARENA_BYTES, 0}, 0, "");
    expect_code(
        (struct hosts){2, true, ARENA_BYTES, 0}, ZERO_ERR_NOMEM,
        "4 ranks need 409600 bytes of shared memory each, but 1048576 are left on the host of rank 0");
    expect_code((struct hosts){4, false, ARENA_BYTES, 0}, ZERO_ERR_NOMEM, "4 ranks need 409600 bytes");
    expect_code((struct hosts){2, false, ARENA_BYTES * 2, 0}, ZERO_ERR_NOMEM, "2 ranks need 819200 bytes");
    /* every rank checks every host */
    expect_code((struct hosts){2, false, ARENA_BYTES, 600 << 10}, ZERO_ERR_NOMEM,
                "2 ranks need 409600 bytes of shared memory each, but 614400 are left on the host of rank 3");
}

static void expect_looking(struct hosts h, int cores, bool looks)
{
    n_cores = cores;
    const struct rank *r = run_ranks(true, WORLD, open_on_hosts, &h, NULL);
    for (int i = 0; i < WORLD; i++)
        assert_int_equal(r[i].stage, looks);
    n_cores = 1024;
}

/* If two streams of each local rank can have a core each, waiting ranks spin. Otherwise a waiting rank
 * sleeps at once. */
static void test_cores(void **state)
{
    expect_looking((struct hosts){2, false, ARENA_BYTES, 0}, 4, true);
    expect_looking((struct hosts){2, false, ARENA_BYTES, 0}, 3, false);
    expect_looking((struct hosts){2, true, 4096, 0}, 4, false);
    expect_looking((struct hosts){4, false, 4096, 0}, 4, false);
}

static void test_too_many(void **state)
{
    extern const struct zr_backend zr_backend_shm;
    struct zr_topology t;
    assert_int_equal(zr_topology_assume(65, 0, &t), 0);
    struct zr_group all = {.size = 64, .members = t.rank_at};
    assert_int_equal(zr_backend_shm.check_hosts(&t, &all), 0);
    all.size = 65;
    assert_int_equal(zr_backend_shm.check_hosts(&t, &all), ZERO_ERR_NOTSUP);
    assert_string_equal(zr_error_text(), "shared memory among 65 ranks: up to 64 are allowed");
    zr_topology_free(&t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_memory),
        cmocka_unit_test(test_cores),
        cmocka_unit_test(test_too_many),
    };
    return cmocka_run_group_tests_name("shared memory on several hosts", tests, NULL, NULL);
}
