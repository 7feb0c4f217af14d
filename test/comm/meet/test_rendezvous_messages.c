/* SPDX-License-Identifier: Apache-2.0 */
/* test_rendezvous_messages.c: tests messages between rank 0 and the other ranks after the detach. */
#include "test/cmocka.h"
#include "test/comm/meet/meeting.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { N = 4, MESSAGES = 12, MAX_BYTES = 64 * 1024 };

/* From 1 byte to the largest size allowed. */
static size_t bytes_of(int k)
{
    return k == MESSAGES - 1 ? MAX_BYTES : (size_t)1 + (size_t)k * (size_t)k * 37;
}

static void fill(char *data, int from, int to, int k)
{
    for (size_t i = 0; i < bytes_of(k); i++)
        data[i] = (char)((int)i * 13 + from * 31 + to * 7 + k);
}

struct talk {
    struct rank *me;
    struct meeting m;
    uv_timer_t stop;
    /* received from each rank so far */
    int n_got[N];
    /* messages still to come */
    int n_left;
    int n_wrong, n_lost;
    /* a message is delivered only when the loop runs after the detach */
    bool detached;
};

static void stop_closed(uv_handle_t *h)
{
}

static void stop(struct talk *t)
{
    if (!uv_is_closing((uv_handle_t *)&t->stop))
        uv_close((uv_handle_t *)&t->stop, stop_closed);
    zr_rendezvous_close(t->m.r);
}

static void time_over(uv_timer_t *timer)
{
    stop(timer->data);
}

static void on_message(void *arg, int from, const void *data, size_t n)
{
    struct talk *t = arg;
    static _Thread_local char want[MAX_BYTES];
    int k = t->n_got[from]++;
    fill(want, from, t->me->w.rank, k % MESSAGES);
    t->n_wrong += !t->detached || n != bytes_of(k % MESSAGES) || memcmp(data, want, n) != 0;
    if (--t->n_left == 0) {
        atomic_store(&t->me->stage, 2);
        if (t->me->w.rank != 0)
            stop(t);
    }
}

/* The other ranks stay until rank 0, which must receive from all, leaves. */
static void on_lost(void *arg, int rank, const char *why)
{
    struct talk *t = arg;
    t->n_lost++;
    snprintf(t->me->note, sizeof t->me->note, "rank %d: %s", rank, why);
    stop(t);
}

static int send_messages(struct talk *t, int to)
{
    static _Thread_local char data[MAX_BYTES];
    int err = 0;
    for (int k = 0; k < MESSAGES && !err; k++) {
        fill(data, t->me->w.rank, to, k);
        err = zr_rendezvous_send(t->m.r, to, data, bytes_of(k));
    }
    return err;
}

static void talk(struct rank *me)
{
    struct zr_sigpipe_hold hold; /* a context's loop thread does the same */
    zr_sigpipe_hold(&hold);
    struct talk t = {.me = me, .n_left = me->w.rank == 0 ? MESSAGES * (me->w.world - 1) : MESSAGES};
    RANK_CHECK(me, meet(&t.m, &me->w, LONG_MS) == 0, "%s", zr_error_text());
    RANK_CHECK(me, exchange_ranks(&t.m) == 0, "%s", zr_error_text());
    zr_rendezvous_on_message(t.m.r, on_message);
    RANK_CHECK(me, zr_rendezvous_send(t.m.r, me->w.rank ? 0 : 1, "x", 1) == ZERO_ERR_ORDER, "not detached");
    /* Messages of ranks that do not sleep arrive before this rank has detached. */
    if (me->w.rank == *(int *)me->arg) {
        for (int i = 0; i < me->w.world; i++)
            RANK_CHECK(me, i == me->w.rank || wait_stage(&me->all[i], 1), "rank %d tells nothing", i);
        for (int i = 0; i < 50; i++)
            uv_run(&t.m.loop, UV_RUN_NOWAIT);
    }
    zr_rendezvous_detach(t.m.r, on_lost, NULL, &t);
    t.detached = true;
    uv_timer_init(&t.m.loop, &t.stop);
    t.stop.data = &t;
    uv_timer_start(&t.stop, time_over, LONG_MS, 0);
    for (int i = 1; i < me->w.world && me->w.rank == 0; i++)
        RANK_CHECK(me, send_messages(&t, i) == 0, "%s", zr_error_text());
    if (me->w.rank != 0)
        RANK_CHECK(me, send_messages(&t, 0) == 0, "%s", zr_error_text());
    atomic_store(&me->stage, 1);
    while (uv_run(&t.m.loop, UV_RUN_ONCE) && !(me->w.rank == 0 && t.n_left == 0))
        ;
    if (me->w.rank == 0) { /* the other ranks have its messages before it leaves */
        for (int i = 1; i < me->w.world; i++)
            while (atomic_load(&me->all[i].stage) < 2 && uv_is_active((uv_handle_t *)&t.stop))
                uv_run(&t.m.loop, UV_RUN_NOWAIT);
        stop(&t);
    }
    RANK_CHECK(me, zr_rendezvous_send(t.m.r, 0, "x", 1) < 0, "it is closed");
    RANK_CHECK(me, part(&t.m), "handles are left");
    RANK_CHECK(me, t.n_left == 0 && t.n_wrong == 0 && t.n_lost == 0, "%d left, %d wrong, lost: %s", t.n_left,
               t.n_wrong, me->note);
}

static void test_messages(void **state)
{
    for (int late = 0; late < N; late++) {
        run_ranks(false, N, talk, &late, NULL);
        run_ranks(true, N, talk, &late, NULL);
    }
}

static void on_word(void *arg, int from, const void *data, size_t n)
{
    struct talk *t = arg;
    snprintf(t->me->note, sizeof t->me->note, "%.*s from rank %d", (int)n, (const char *)data, from);
    t->me->code++;
    stop(t);
}

/* Rank 0 sends to all ranks at once. Rank 2 has died by then. */
static void send_to_everyone(struct rank *me)
{
    struct zr_sigpipe_hold hold; /* as above */
    zr_sigpipe_hold(&hold);
    struct talk t = {.me = me};
    char large[MAX_BYTES + 1] = "";
    RANK_CHECK(me, meet(&t.m, &me->w, LONG_MS) == 0, "%s", zr_error_text());
    RANK_CHECK(me, exchange_ranks(&t.m) == 0, "%s", zr_error_text());
    if (me->dies)
        kill(getpid(), SIGKILL);
    zr_rendezvous_on_message(t.m.r, on_word);
    zr_rendezvous_detach(t.m.r, NULL, NULL, &t);
    uv_timer_init(&t.m.loop, &t.stop);
    t.stop.data = &t;
    uv_timer_start(&t.stop, time_over, LONG_MS, 0);
    if (me->w.rank == 0) {
        int err = 0;
        while (!err) {
            uv_run(&t.m.loop, UV_RUN_ONCE);
            err = zr_rendezvous_send(t.m.r, 2, "x", 1);
        }
        RANK_CHECK(me, err == ZERO_ERR_PEER && strstr(zr_error_text(), "rank 2"), "%s", zr_error_text());
        RANK_CHECK(me, zr_rendezvous_send(t.m.r, 1, large, sizeof large) == ZERO_ERR_ARG, "too large");
        RANK_CHECK(me, zr_rendezvous_send(t.m.r, 1, large, 0) == ZERO_ERR_ARG, "nothing");
        RANK_CHECK(me, zr_rendezvous_send(t.m.r, 0, large, 1) == ZERO_ERR_ARG, "itself");
        RANK_CHECK(me, zr_rendezvous_send(t.m.r, me->w.world, large, 1) == ZERO_ERR_ARG, "nobody");
        RANK_CHECK(me, zr_rendezvous_send(t.m.r, -1, "go", 2) == 0, "%s", zr_error_text());
        stop(&t);
    } else {
        RANK_CHECK(me, zr_rendezvous_send(t.m.r, 3, "x", 1) == ZERO_ERR_ARG, "not rank 0");
        RANK_CHECK(me, zr_rendezvous_send(t.m.r, -1, "x", 1) == ZERO_ERR_ARG, "not rank 0's");
        uv_run(&t.m.loop, UV_RUN_DEFAULT);
    }
    RANK_CHECK(me, part(&t.m), "handles are left");
}

static void rank_2_dies(struct rank *r)
{
    r->dies = r->w.rank == 2;
}

static void test_to_everyone(void **state)
{
    struct rank *r = run_ranks(true, N, send_to_everyone, NULL, rank_2_dies);
    expect_rank(&r[1], 1, "go from rank 0");
    expect_rank(&r[3], 1, "go from rank 0");
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_messages), cmocka_unit_test(test_to_everyone)};
    return cmocka_run_group_tests_name("rendezvous_messages", tests, NULL, NULL);
}
