/* SPDX-License-Identifier: Apache-2.0 */
/* test_flight_peers.c: tests that ranks of a host can read the last calls of each other's programs while
 * the peer lives, after it has closed its recorder, and after it was killed. They know nothing of ranks of
 * other hosts. */
#include "comm/flight_peers.h"
#include "comm/flight_view.h"
#include "comm/topology.h"
#include "test/cmocka.h"
#include "test/comm/ranks.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Ranks 0 and 1 are on one host, 2 and 3 on another. */
enum { WORLD = 4, TIMEOUT_MS = 30000 };

struct member {
    struct rank *me;
    uv_loop_t loop;
    struct zr_rendezvous *rdv;
    struct zr_topology topology;
    struct zr_flight *flight;
    struct zr_flight_peers *peers;
};

/* On ranks with an even number the call has returned. */
static void enter_call(struct zr_flight *f, int rank)
{
    const struct zr_logged_call call = {
        .name = ZR_CALL_END, .phase = ZERO_BACKWARD, .subject = rank, .step = 12};
    zr_flight_enter(f, &call);
    if (rank % 2 == 0)
        zr_flight_leave(f);
}

static void expect_call(struct member *m, int rank, bool made, bool returned)
{
    char text[ZR_LAST_CALL_CHARS], expected[ZR_LAST_CALL_CHARS] = "";
    if (made)
        snprintf(expected, sizeof expected, "; its last call was zero_end(unit %d, backward) in step 12%s",
                 rank, returned ? ", which had returned" : "");
    zr_rendezvous_last_call(m->rdv, rank, text);
    RANK_CHECK(m->me, !strcmp(text, expected), "of rank %d: \"%s\", not \"%s\"", rank, text, expected);
}

/* without: the rank that has no recorder. */
static void expect_calls(struct member *m, int without)
{
    for (int r = 0; r < WORLD; r++)
        expect_call(m, r, r / 2 == m->me->w.rank / 2 && r != without, r % 2 == 0);
    expect_call(m, -1, false, false);
    expect_call(m, WORLD, false, false);
}

static int open_all(struct member *m, int without)
{
    const struct zr_flight_owner owner = {.rank = m->me->w.rank, .world = WORLD, .job = ""};
    struct zr_identity id;
    char why[ZR_FLIGHT_TEXT];
    zr_identity_read(&id);
    snprintf(id.host_id, sizeof id.host_id, "host %d", m->me->w.rank / 2);
    uv_loop_init(&m->loop);
    int err = zr_rendezvous_open(&m->loop, &m->me->w, TIMEOUT_MS, &m->rdv);
    if (!err)
        err = zr_topology_probe(m->rdv, &id, 0, &m->topology);
    if (!err)
        err = zr_flight_open(&owner, &m->flight, why);
    if (!err)
        err = zr_flight_peers_open(m->rdv, &m->topology, m->me->w.rank == without ? NULL : m->flight, NULL,
                                   &m->peers);
    return err;
}

static void close_recorders(struct member *m)
{
    zr_rendezvous_know(m->rdv, &(struct zr_known_ranks){.arg = NULL});
    zr_flight_peers_close(m->peers);
    zr_flight_close(m->flight);
    m->peers = NULL;
    m->flight = NULL;
}

/* Waits until the loss of rank 3, which was killed, is known. */
static int await_loss(struct member *m)
{
    int err = 0;
    for (int i = 0; i < 6000 && !err; i++, sleep_ms(5))
        err = zr_rendezvous_look(m->rdv);
    return err;
}

/* Rank 1 has closed its recorder by now. Rank 3 is dead if it was to die. */
static void look_again(struct member *m)
{
    struct rank *me = m->me;
    RANK_CHECK(me, wait_stage(&me->all[1], 4), "rank 1 has not closed its recorder");
    if (me->all[3].dies)
        RANK_CHECK(me, await_loss(m) == ZERO_ERR_PEER, "rank 3 is there: %s", zr_error_text());
    expect_call(m, 1, me->w.rank == 0, true);
    expect_call(m, 3, me->w.rank == 2, false);
}

static void record_and_look(struct rank *me)
{
    struct member m = {.me = me};
    const int without = *(int *)me->arg, rank = me->w.rank;
    RANK_CHECK(me, open_all(&m, without) == 0, "%s", zr_error_text());
    for (int r = 0; r < WORLD; r++)
        expect_call(&m, r, false, false);
    RANK_CHECK(me, all_at(me, 1), "a rank is missing");
    enter_call(m.flight, rank);
    RANK_CHECK(me, all_at(me, 2), "a rank is missing");
    expect_calls(&m, without);
    RANK_CHECK(me, all_at(me, 3), "a rank is missing");
    if (me->dies)
        kill(getpid(), SIGKILL);
    if (rank == 1)
        close_recorders(&m);
    atomic_store(&me->stage, 4);
    if (rank % 2 == 0)
        look_again(&m);
    atomic_store(&me->stage, 5);
    RANK_CHECK(me, wait_stage(&me->all[0], 5) && wait_stage(&me->all[2], 5), "a rank looks for ever");
    close_recorders(&m);
    zr_topology_free(&m.topology);
    zr_rendezvous_free(m.rdv);
    RANK_CHECK(me, uv_loop_close(&m.loop) == 0, "handles are left");
}

static void rank_3_dies(struct rank *r)
{
    r->dies = r->w.rank == 3;
}

static void test_processes(void **state)
{
    int nobody = -1;
    run_ranks(true, WORLD, record_and_look, &nobody, rank_3_dies);
}

static void test_threads(void **state)
{
    int nobody = -1;
    run_ranks(false, WORLD, record_and_look, &nobody, NULL);
}

static void test_one_has_none(void **state)
{
    for (int without = 0; without < WORLD; without += 2)
        run_ranks(true, WORLD, record_and_look, &without, rank_3_dies);
}

/* A file descriptor's number may be used for another file. */
static void test_another_file(void **state)
{
    const struct zr_flight_owner owner = {.rank = 2, .world = WORLD, .job = ""};
    const struct zr_flight_record *rec;
    struct zr_flight *f;
    struct zr_shared_at where;
    char why[ZR_FLIGHT_TEXT];
    assert_int_equal(zr_flight_open(&owner, &f, why), 0);
    assert_true(zr_flight_where(f, &where));
    where.inode++;
    assert_int_equal(zr_flight_map(&where, &rec), ZERO_ERR_SYSTEM);
    assert_non_null(strstr(zr_error_text(), "is not the shared memory of rank 2"));
    assert_null(rec);
    zr_flight_unmap(rec);
    zr_flight_close(f);
}

int main(void)
{
    unsetenv("ZERO_FLIGHT_FD"); /* may be set by a zero-run that runs this test */
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_processes),
        cmocka_unit_test(test_threads),
        cmocka_unit_test(test_one_has_none),
        cmocka_unit_test(test_another_file),
    };
    return cmocka_run_group_tests_name("flight recorders of one host", tests, NULL, NULL);
}
