/* SPDX-License-Identifier: Apache-2.0 */
/* beat.c: beats between hosts, which show that a network is cut without notice.
 *
 * A host that crashes, is stopped or is cut off closes no connection. So from the detach on both ends of a
 * link between hosts send a small frame at intervals. An end that has received nothing for three fourths of
 * the time that ranks wait for each other treats the other end as lost. That is before its own waits end
 * without a reason. After an outage of one second TCP needs most of another second to go on, and after two
 * seconds two, which is within that time. Ranks of one host notice each other's end at once and need no
 * beats.
 *
 * A beat also names the call that its sender is in, or was in last. If the sender is killed, or its host is
 * gone, no rank on another host can read that any more. The message of the loss then has the call of the last
 * beat.
 *
 * The loop's thread also issues collectives. So rank 0 of a large world does not send all beats at once. It
 * divides the interval into ticks, and at each tick it sends to some of the ranks.
 *
 * If several ranks of a host go silent together, the first that is found is reported, with the name of the
 * host. The others are dropped without a message. */
#include "comm/meet/hub.h"
#include "comm/topology.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    SHORTEST_MS = 10, /* least time between two beats */
    LONGEST_MS = 1000,
    AT_A_TIME = 32, /* number of beats that are sent at once, about */
    BEATS = 16,     /* number of beats in timeout_ms */
    LATE_MS = 50,   /* a longer delay of this loop does not count as silence of others */
    HOST_CHARS = 256
};

static int64_t interval_ms(const struct zr_rendezvous *r)
{
    int64_t ms = r->timeout_ms / BEATS;
    return ms < SHORTEST_MS ? SHORTEST_MS : ms > LONGEST_MS ? LONGEST_MS : ms;
}

/* Time from one tick to the next. An interval has n_beat_ticks of them. */
static int64_t tick_ms(const struct zr_rendezvous *r)
{
    int64_t ms = interval_ms(r) / r->n_beat_ticks;
    return ms ? ms : 1;
}

static int64_t limit_ms(const struct zr_rendezvous *r)
{
    return r->timeout_ms - r->timeout_ms / 4;
}

static bool on_one_host(const struct zr_rendezvous *r, int a, int b)
{
    return r->hosts && r->hosts->host_of[a] == r->hosts->host_of[b];
}

/* Whether the link leads to a rank of another host that is here. */
static bool beats(const struct zr_rendezvous *r, const struct zr_link *l)
{
    return l->rank >= 0 && r->members[l->rank].link == l && r->members[l->rank].state == ZR_MEMBER_HERE &&
           !l->finishing && !on_one_host(r, r->w.rank, l->rank);
}

/* --- silent ranks --- */

/* Counts the links to ranks of the same host, including this one: those that are silent for about as long,
 * and the others. */
static void count_links(const struct zr_rendezvous *r, const struct zr_link *silent, int *n_silent,
                        int *n_not)
{
    *n_silent = *n_not = 0;
    for (const struct zr_link *l = r->links; l; l = l->next)
        if (beats(r, l) && (l == silent || on_one_host(r, l->rank, silent->rank)))
            ++*(l->heard_ms <= silent->heard_ms + 2 * interval_ms(r) ? n_silent : n_not);
}

/* Writes "host 1 ("node1", ranks 2, 3) is silent: no heartbeat from rank 2", or the same for a rank alone. */
static void name_silent(const struct zr_rendezvous *r, const struct zr_link *l, bool whole_host,
                        char text[HOST_CHARS])
{
    if (!r->hosts) {
        snprintf(text, HOST_CHARS, "it is silent: no heartbeat");
        return;
    }
    char ranks[96];
    int host = r->hosts->host_of[l->rank];
    const char *name = r->hosts->hosts[host].name;
    zr_topology_list_ranks(r->hosts, host, ranks, sizeof ranks);
    if (whole_host)
        snprintf(text, HOST_CHARS, "host %d (\"%s\", rank%s %s) is silent: no heartbeat from rank %d", host,
                 name, r->hosts->hosts[host].n_ranks > 1 ? "s" : "", ranks, l->rank);
    else
        snprintf(text, HOST_CHARS,
                 "it is silent, unlike other ranks of host %d (\"%s\", ranks %s): no heartbeat", host, name,
                 ranks);
}

/* Drops the links to the same host that are silent too. */
static void let_go_with(struct zr_rendezvous *r, const struct zr_link *lost)
{
    for (struct zr_link *l = r->links; l; l = l->next)
        if (l != lost && beats(r, l) && on_one_host(r, l->rank, lost->rank) &&
            l->heard_ms <= lost->heard_ms + 2 * interval_ms(r))
            zr_hub_let_go(r, l);
}

static void lose_silent(struct zr_rendezvous *r, struct zr_link *l, int64_t now)
{
    int n_silent, n_not;
    char who[HOST_CHARS], why[HOST_CHARS + 256];
    count_links(r, l, &n_silent, &n_not);
    name_silent(r, l, n_not == 0, who);
    snprintf(why, sizeof why, "%s (%s) for %lld ms, and one is due every %lld ms: %s", who, l->peer,
             (long long)(now - l->heard_ms), (long long)interval_ms(r),
             n_not == 0 ? "its network is cut, or it is stopped" : "it is stopped");
    if (n_silent > 1)
        let_go_with(r, l);
    zr_hub_lose(r, l, why);
}

/* Looks for links that have been silent for too long. */
static void look(struct zr_rendezvous *r, int64_t now)
{
    for (int rank = 0; rank < r->w.world && !r->closing; rank++) {
        struct zr_link *l = r->members[rank].link;
        if (l && beats(r, l) && now - l->heard_ms > limit_ms(r))
            lose_silent(r, l, now);
    }
}

/* --- the timer --- */

/* Sends the beats of the current tick. */
static void send_beats(struct zr_rendezvous *r)
{
    char call[ZR_HUB_CALL_CHARS];
    zr_hub_describe(r, r->w.rank, call);
    for (struct zr_link *l = r->links; l; l = l->next)
        if (beats(r, l) && l->rank % r->n_beat_ticks == r->beat_tick)
            (void)zr_hub_send(r, l->rank, ZR_FRAME_BEAT, 0, call, strlen(call));
    r->beat_tick = (r->beat_tick + 1) % r->n_beat_ticks;
}

void zr_hub_on_beat(struct zr_rendezvous *r, int rank, const char *payload)
{
    struct zr_member *member = &r->members[rank];
    free(member->last_heard);
    member->last_heard = payload && payload[0] ? strndup(payload, ZR_HUB_CALL_CHARS - 1) : NULL;
}

/* Does not count the time in which this loop stood still. What came meanwhile is still to be read. */
static void forgive(struct zr_rendezvous *r, int64_t late_ms)
{
    for (struct zr_link *l = r->links; l; l = l->next)
        l->heard_ms += late_ms;
}

static void start_timer(struct zr_rendezvous *r, int64_t now);

static void on_beat(uv_timer_t *t)
{
    struct zr_rendezvous *r = t->data;
    int64_t now = zr_hub_now_ms(r), late = now - r->beat_due_ms;
    if (late > LATE_MS)
        forgive(r, late);
    send_beats(r);
    look(r, now);
    if (!r->closing)
        start_timer(r, now);
}

static void start_timer(struct zr_rendezvous *r, int64_t now)
{
    r->beat_due_ms = now + tick_ms(r);
    uv_timer_start(&r->beat, on_beat, (uint64_t)tick_ms(r), 0);
}

void zr_hub_beat(struct zr_rendezvous *r)
{
    int n = 0;
    int64_t now = zr_hub_now_ms(r);
    for (struct zr_link *l = r->links; l; l = l->next) {
        n += beats(r, l);
        l->heard_ms = now + r->timeout_ms - limit_ms(r); /* the first beat may take as long as ranks wait */
    }
    if (!n)
        return;
    int64_t ticks = (n - 1) / AT_A_TIME + 1;
    r->n_beat_ticks = (int)(ticks < interval_ms(r) ? ticks : interval_ms(r));
    r->beat_due_ms = now; /* the first beats come at once, with a call */
    uv_timer_start(&r->beat, on_beat, 0, 0);
}
