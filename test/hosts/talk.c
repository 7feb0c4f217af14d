/* SPDX-License-Identifier: Apache-2.0 */
/* talk.c: a rank that meets the others as zero_wrap does, and then exchanges messages over the rendezvous,
 * for test_hosts_cut.py.
 *
 * Rank 0 sends a number to all ranks, which send it back, and continues with the next number when all have
 * answered. Every rank prints each number ("round 7"), and then what ends it: "lost rank 2 after 310 ms:
 * why" (since the last number), or "failed: why". The environment gives its rank.
 *
 *     talk TIMEOUT_MS    zero_wrap's timeout_ms, for the time after all have met */
#include "comm/meet/rendezvous.h"
#include "comm/topology.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MEET_MS = 60000, PACE_MS = 50, MOST_MS = 200000 };

struct talk {
    uv_loop_t loop;
    struct zr_world w;
    struct zr_topology hosts;
    struct zr_rendezvous *rdv;
    uv_timer_t pace, end;
    int64_t round;
    uint64_t round_ms;
    /* rank 0: how many ranks have sent it back */
    int n_back;
    bool is_over;
};

static void leave(struct talk *t)
{
    if (t->is_over)
        return;
    t->is_over = true;
    uv_close((uv_handle_t *)&t->pace, NULL);
    uv_close((uv_handle_t *)&t->end, NULL);
    zr_rendezvous_close(t->rdv);
}

static void print_round(struct talk *t, int64_t round)
{
    t->round = round;
    t->round_ms = uv_now(&t->loop);
    printf("round %lld\n", (long long)round);
}

static void say_next(uv_timer_t *timer)
{
    struct talk *t = timer->data;
    print_round(t, t->round + 1);
    t->n_back = 0;
    if (zr_rendezvous_send(t->rdv, -1, &t->round, sizeof t->round)) {
        printf("failed: %s\n", zr_error_text());
        leave(t);
    }
}

static void on_message(void *arg, int from, const void *data, size_t n)
{
    struct talk *t = arg;
    int64_t round;
    if (t->is_over || n != sizeof round)
        return;
    memcpy(&round, data, sizeof round);
    if (t->w.rank != 0) {
        print_round(t, round);
        if (zr_rendezvous_send(t->rdv, from, &round, sizeof round))
            printf("failed: %s\n", zr_error_text());
    } else if (round == t->round && ++t->n_back == t->w.world - 1) {
        uv_timer_start(&t->pace, say_next, PACE_MS, 0);
    }
}

static void on_lost(void *arg, int rank, const char *why)
{
    struct talk *t = arg;
    if (!t->is_over)
        printf("lost rank %d after %llu ms: %s\n", rank, (unsigned long long)(uv_now(&t->loop) - t->round_ms),
               why);
    leave(t);
}

static void on_failed(void *arg, int code, const char *text)
{
    struct talk *t = arg;
    (void)code;
    if (!t->is_over)
        printf("failed: %s\n", text);
    leave(t);
}

static void on_end(uv_timer_t *timer)
{
    leave(timer->data);
}

static int meet(struct talk *t, int64_t timeout_ms)
{
    int err = zr_world_find(-1, 0, NULL, &t->w);
    if (!err)
        err = zr_world_interface(NULL, &t->w);
    if (!err)
        err = zr_rendezvous_open(&t->loop, &t->w, MEET_MS, &t->rdv);
    if (!err)
        err = zr_topology_probe(t->rdv, NULL, 0, &t->hosts);
    if (err)
        return err;
    zr_rendezvous_hosts(t->rdv, &t->hosts);
    zr_rendezvous_on_message(t->rdv, on_message);
    zr_rendezvous_limit(t->rdv, timeout_ms);
    zr_rendezvous_detach(t->rdv, on_lost, on_failed, t);
    return 0;
}

int main(int argc, char **argv)
{
    struct talk t = {.rdv = NULL};
    if (argc != 2)
        return 2;
    setvbuf(stdout, NULL, _IOLBF, 0);
    uv_loop_init(&t.loop);
    int err = meet(&t, atoll(argv[1]));
    if (err) {
        fprintf(stderr, "%s\n", zr_error_text());
    } else {
        t.pace.data = t.end.data = &t;
        uv_timer_init(&t.loop, &t.pace);
        uv_timer_init(&t.loop, &t.end);
        uv_timer_start(&t.end, on_end, MOST_MS, 0);
        if (t.w.rank == 0)
            uv_timer_start(&t.pace, say_next, PACE_MS, 0);
        t.round_ms = uv_now(&t.loop);
        uv_run(&t.loop, UV_RUN_DEFAULT);
    }
    zr_rendezvous_free(t.rdv);
    zr_topology_free(&t.hosts);
    uv_loop_close(&t.loop);
    return err != 0;
}
