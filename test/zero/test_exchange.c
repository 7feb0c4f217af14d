/* SPDX-License-Identifier: Apache-2.0 */
/* test_exchange.c: ranks that meet by cfg.launch.exchange, the program's own all-gather, and what goes wrong
 * in it. Here it works through the memory of the process, whose threads are the ranks. */
#include "test/cmocka.h"
#include "test/zero/toy_net.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_BYTES = 8192, STAGE = 2, STEPS = 2, SHORT_MS = 1500, FAILURE = 7 };

/* What one rank does otherwise than the others, or all do with COUNTS_BACKWARDS. */
enum fault {
    NONE,
    RETURNS_AN_ERROR,
    HAS_NO_EXCHANGE,
    GETS_OTHER_BYTES,
    COUNTS_BACKWARDS,
    SAYS_A_LARGER_WORLD,
    SAYS_A_SMALLER_WORLD,
    BAD_TABLE,
    BAD_CONFIG
};

struct hall;

struct member {
    struct hall *hall;
    int rank;
    enum fault fault;
};

/* The program's all-gather of `world` ranks. */
struct hall {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int world, n_here, n_calls;
    bool is_over;
    char bytes[MAX_TOY_RANKS][MAX_BYTES];
    struct member members[MAX_TOY_RANKS];
};

struct plan {
    struct hall *hall;
    bool exchanges;
    enum fault fault;
    /* the rank with the fault */
    int odd;
};

static int exchange(void *arg, const void *mine, void *all, size_t bytes)
{
    const struct member *s = arg;
    struct hall *h = s->hall;
    if (bytes > MAX_BYTES)
        return -1;
    pthread_mutex_lock(&h->lock);
    memcpy(h->bytes[s->rank], mine, bytes);
    h->n_here++;
    h->n_calls++;
    pthread_cond_broadcast(&h->changed);
    while (h->n_here < h->world && !h->is_over)
        pthread_cond_wait(&h->changed, &h->lock);
    for (int i = 0; i < h->world; i++)
        memcpy((char *)all + (size_t)i * bytes, h->bytes[i], bytes);
    pthread_mutex_unlock(&h->lock);
    if (s->fault == GETS_OTHER_BYTES)
        ((char *)all)[bytes / 2] ^= 1;
    return s->fault == RETURNS_AN_ERROR ? FAILURE : 0;
}

static int train(struct toy *m, zero_ctx *z, int rank)
{
    for (int step = 0; step < STEPS; step++) {
        int err = FIRST_ERROR(toy_forward(m, z, true), toy_backward(m, z, true, step, rank),
                              zero_step(z, 1e-2f, NULL));
        if (err)
            return err;
    }
    return 0;
}

static void one_rank(struct toy_rank *r)
{
    const struct plan *p = r->arg;
    enum fault fault = r->rank == p->odd ? p->fault : NONE;
    struct zero_config cfg = toy_config(r, STAGE);
    struct zero_place place;
    struct toy m;
    zero_ctx *z;
    struct member *member = &p->hall->members[r->rank];
    *member = (struct member){p->hall, r->rank, fault};
    cfg.debug.log = toy_forget_line;
    cfg.launch.start_timeout_ms = p->fault ? SHORT_MS : 30000;
    if (p->exchanges && fault != HAS_NO_EXCHANGE) {
        cfg.launch.rendezvous = NULL;
        cfg.launch.exchange = exchange;
        cfg.launch.exchange_arg = member;
    }
    cfg.launch.rank = p->fault == COUNTS_BACKWARDS ? r->world - 1 - r->rank : r->rank;
    cfg.launch.world += (fault == SAYS_A_LARGER_WORLD) - (fault == SAYS_A_SMALLER_WORLD);
    cfg.clip = fault == BAD_CONFIG ? -1 : 0;
    toy_make(&m);
    if (fault == BAD_TABLE)
        m.table[1].name = NULL;
    if (fault != BAD_CONFIG && (zero_find_place(&cfg, &place) || place.rank != cfg.launch.rank))
        toy_wrong(r, "found: rank %d", place.rank);
    toy_note(r, zero_wrap(&z, m.table, TOY_TENSORS, &cfg));
    if (!r->err) {
        toy_note(r, train(&m, z, r->rank));
        toy_note(r, r->err ? r->err : toy_hash(z, 2, &r->hash));
        zero_unwrap(&z);
    }
    toy_free(&m);
}

static void end_hall(struct hall *h)
{
    pthread_mutex_lock(&h->lock);
    h->is_over = true;
    pthread_cond_broadcast(&h->changed);
    pthread_mutex_unlock(&h->lock);
}

/* Each run has another hall, as threads may be left behind in one. */
static struct hall *run(int world, struct plan p, struct toy_rank *r)
{
    static struct hall halls[32];
    static int n;
    p.hall = &halls[n++];
    pthread_mutex_init(&p.hall->lock, NULL);
    pthread_cond_init(&p.hall->changed, NULL);
    p.hall->world = world;
    toy_ranks(world, one_rank, &p, r);
    end_hall(p.hall);
    for (int i = 0; i < world; i++)
        if (r[i].wrong[0])
            fail_msg("rank %d: %s", i, r[i].wrong);
    return p.hall;
}

static void test_trains(void **state)
{
    struct toy_rank r[4];
    for (int world = 1; world <= 4; world++) {
        run(world, (struct plan){.exchanges = false}, r);
        uint64_t want = r[0].hash;
        struct hall *h = run(world, (struct plan){.exchanges = true}, r);
        toy_assert_well(r, world, "exchange");
        for (int i = 0; i < world; i++)
            assert_true(r[i].hash == want);
        assert_int_equal(h->n_calls, world > 1 ? world : 0);
    }
}

static void expect(const struct toy_rank *r, int err, const char *text)
{
    if (r->err != err || !strstr(r->text, text))
        fail_msg("rank %d: %d \"%s\" lacks \"%s\"", r->rank, r->err, r->text, text);
}

/* Runs three ranks. Rank 1 has the fault. */
static void expect_fault(enum fault fault, int odd_err, const char *odd_text, int err, const char *text)
{
    struct toy_rank r[3];
    run(3, (struct plan){.exchanges = true, .fault = fault, .odd = 1}, r);
    for (int i = 0; i < 3; i++)
        expect(&r[i], i == 1 ? odd_err : err, i == 1 ? odd_text : text);
}

static void test_faults(void **state)
{
    expect_fault(RETURNS_AN_ERROR, ZERO_ERR_FAILED, "cfg.launch.exchange returned 7 on rank 1",
                 ZERO_ERR_TIMEOUT, "start_timeout_ms");
    expect_fault(GETS_OTHER_BYTES, ZERO_ERR_FAILED, "exchange gave rank 1 wrong bytes for rank 0",
                 ZERO_ERR_TIMEOUT, "start_timeout_ms");
    expect_fault(HAS_NO_EXCHANGE, ZERO_ERR_TIMEOUT, "start_timeout_ms", ZERO_ERR_TIMEOUT,
                 "cfg.launch.exchange (do all ranks call zero_wrap, and is it set on all?) has not returned "
                 "after 1500 ms (start_timeout_ms)");
    expect_fault(COUNTS_BACKWARDS, ZERO_ERR_ARG, "the bytes of rank 2 in the place of rank 0", ZERO_ERR_ARG,
                 "the bytes of rank 2 in the place of rank 0");
    expect_fault(SAYS_A_LARGER_WORLD, ZERO_ERR_ARG, "world is 3 on rank 0 and 4 on rank 1", ZERO_ERR_ARG,
                 "world is 4 on rank 1 and 3 on rank");
    expect_fault(SAYS_A_SMALLER_WORLD, ZERO_ERR_ARG,
                 "gave rank 1 the bytes of 3 ranks or more, but cfg.launch.world is 2", ZERO_ERR_ARG,
                 "world is 2 on rank 1 and 3 on rank");
    expect_fault(BAD_TABLE, ZERO_ERR_ARG, "tensors[1]", ZERO_ERR_ARG, "tensors[1]");
    expect_fault(BAD_CONFIG, ZERO_ERR_ARG, "clip is", ZERO_ERR_ARG, "clip is");
}

static void refuse(const struct zero_config *cfg, const char *text)
{
    struct toy m;
    zero_ctx *z;
    toy_make(&m);
    assert_int_equal(zero_wrap(&z, m.table, TOY_TENSORS, cfg), ZERO_ERR_ARG);
    if (!strstr(zero_last_error(), text))
        fail_msg("\"%s\" lacks \"%s\"", zero_last_error(), text);
    toy_free(&m);
}

static void test_refused(void **state)
{
    struct zero_config cfg = ZERO_CONFIG_INIT;
    cfg.debug.log = toy_forget_line;
    cfg.launch.exchange = exchange;
    refuse(&cfg, "exchange is set but world is 0");
    cfg.launch.world = 2;
    cfg.launch.mpi_comm = &cfg;
    refuse(&cfg, "exchange and mpi_comm are set");
    cfg.launch.mpi_comm = NULL;
    cfg.launch.nccl_comm = &cfg;
    cfg.device = ZERO_DEVICE_CUDA;
    refuse(&cfg, "exchange and nccl_comm are set");
}

/* A plan needs no other rank. */
static void test_plans(void **state)
{
    struct toy_rank r = {.rank = 1, .world = 2};
    struct zero_config cfg = toy_config(&r, STAGE);
    struct zero_plan_info info;
    struct toy m;
    cfg.launch.rendezvous = NULL;
    cfg.launch.exchange = exchange; /* which would read its argument, NULL */
    toy_make(&m);
    assert_int_equal(zero_plan(m.table, TOY_TENSORS, &cfg, &info), 0);
    toy_free(&m);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_trains),
        cmocka_unit_test(test_faults),
        cmocka_unit_test(test_refused),
        cmocka_unit_test(test_plans),
    };
    return cmocka_run_group_tests_name("exchange", tests, NULL, NULL);
}
