/* SPDX-License-Identifier: Apache-2.0 */
/* sim_order.c: checks the order in which ranks issue collectives, over all communicators:
 *
 *   - One thread of a rank at a time issues them.
 *   - Ranks of one class issue the same collectives, in the same order.
 *   - There is one order of all collectives of the job in which every rank issues its own. So if each rank
 *     waited for every collective before it issues the next one, all would still end. Then no wait of an
 *     issuing thread for an earlier collective can be a deadlock: for room in a communicator, or for a norm.
 *   - Those of one communicator run one after the other on each rank, whatever their streams. */
#include "comm/sim/sim_inside.h"

#include <stdio.h>
#include <stdlib.h>

/* A collective that a rank issued. Groups of one role issue the same. */
struct issue {
    struct zr_sim_comm_world *comm;
    struct zr_post post;
    int rank;
};

struct issues {
    struct issue *issue;
    int64_t n, cap;
};

struct zr_sim_order {
    /* By class of ranks: the collectives, as the first rank to come issued them. */
    struct issues all[ZR_SIM_MAX_RANKS];
    int32_t class_of[ZR_SIM_MAX_RANKS];
    int64_t at[ZR_SIM_MAX_RANKS]; /* number of collectives that each rank has issued */
    /* By rank: its collectives, and the first that has no place yet in the order of all ranks. It gets one
     * when it is the first of all members. */
    struct issues own[ZR_SIM_MAX_RANKS];
    int64_t first[ZR_SIM_MAX_RANKS];
    /* Bytes of each rank that its collectives write, one for each role, and one that issuing writes. */
    char turn[ZR_SIM_MAX_RANKS][ZR_ROLES + 1];
};

struct zr_sim_order *zr_sim_order_open(struct zr_sim *w, const int32_t *class_of)
{
    struct zr_sim_order *o = calloc(1, sizeof *o);
    for (int r = 0; o && class_of && r < zr_sim_config(w)->world; r++)
        o->class_of[r] = class_of[r];
    for (int r = 0; o && r < zr_sim_config(w)->world; r++)
        if (zr_sim_register(w, r, "order of collectives", o->turn[r], ZR_ROLES + 1)) {
            free(o);
            o = NULL;
        }
    return o;
}

void zr_sim_order_close(struct zr_sim_order *o)
{
    for (int k = 0; o && k < ZR_SIM_MAX_RANKS; k++) {
        free(o->all[k].issue);
        free(o->own[k].issue);
    }
    free(o);
}

static void add_issue(struct issues *to, struct issue i)
{
    if (to->n == to->cap) {
        to->cap = to->cap ? to->cap * 2 : 256;
        to->issue = realloc(to->issue, (size_t)to->cap * sizeof *to->issue);
        if (!to->issue)
            abort();
    }
    to->issue[to->n++] = i;
}

/* ---- one order of all ranks ---- */

static const struct issue *first_of(const struct zr_sim_order *o, int rank)
{
    return o->first[rank] < o->own[rank].n ? &o->own[rank].issue[o->first[rank]] : NULL;
}

/* The rank has a new first collective. Gives places in the order to it, and to what follows from that. */
static void place_first(struct zr_sim_order *o, int rank)
{
    const struct issue *i = first_of(o, rank);
    struct zr_sim_comm_world *d = i ? i->comm : NULL;
    if (!d || ++d->n_first < d->n)
        return;
    d->n_first = 0;
    for (int p = 0; p < d->n; p++)
        o->first[zr_sim_comm_at(d, p)->sim_rank]++;
    for (int p = 0; p < d->n; p++)
        place_first(o, zr_sim_comm_at(d, p)->sim_rank);
}

/* Returns a member of the rank's first collective that issues another one before it. -1: none. */
static int before_first(const struct zr_sim_order *o, int rank)
{
    const struct zr_sim_comm_world *d = first_of(o, rank)->comm;
    for (int p = 0; p < d->n; p++) {
        int member = zr_sim_comm_at(d, p)->sim_rank;
        const struct issue *i = first_of(o, member);
        if (i && i->comm != d)
            return member;
    }
    return -1;
}

static size_t say_before(char *text, size_t n, int rank, const struct issue *first, const struct issue *then)
{
    int k = snprintf(text, n, "; rank %d issues %s %s of unit %d, step %u, before %s %s of unit %d, step %u",
                     rank, first->comm->name, zr_op_name((enum zr_op)first->post.op), first->post.unit,
                     first->post.step, then->comm->name, zr_op_name((enum zr_op)then->post.op),
                     then->post.unit, then->post.step);
    return k < 0 || (size_t)k > n ? n : (size_t)k;
}

/* Each collective that is left waits for one that another rank issues earlier. So going from one to the next
 * leads around a circle, unless a rank has ended too early. */
void zr_sim_order_end(const struct zr_sim_order *o, struct zr_sim *w)
{
    const int world = zr_sim_config(w)->world;
    char text[512] = "";
    int rank = 0, next;
    while (rank < world && !first_of(o, rank))
        rank++;
    if (rank == world)
        return;
    for (int k = 0; k < world && rank >= 0; k++)
        rank = before_first(o, rank);
    size_t at = 0;
    for (int from = rank; rank >= 0 && at < sizeof text; rank = next) {
        next = before_first(o, rank);
        at += say_before(text + at, sizeof text - at, next, first_of(o, next), first_of(o, rank));
        if (next == from)
            break;
    }
    zr_report(zr_sim_recorder(w), "no order of all collectives%s", text);
}

/* ---- the order of each rank ---- */

void zr_sim_order_keep(struct zr_sim_comm_world *d, int rank, const struct zr_post *p)
{
    struct zr_sim_order *o = d->order;
    struct issues *all = &o->all[o->class_of[rank]];
    struct zr_line *host = zr_sim_speaker(d->w);
    zr_sim_begin(d->w, host, "issue", p->unit, p->step);
    zr_shadow_write(d->rec, host, &o->turn[rank][ZR_ROLES], 1);
    add_issue(&o->own[rank], (struct issue){d, *p, rank});
    if (o->first[rank] == o->own[rank].n - 1)
        place_first(o, rank);
    int64_t k = o->at[rank]++;
    if (k == all->n) {
        add_issue(all, (struct issue){d, *p, rank});
        return;
    }
    const struct issue *i = &all->issue[k];
    if (i->comm->role != d->role || i->post.op != p->op || i->post.unit != p->unit || i->post.step != p->step)
        zr_report(
            d->rec,
            "order across communicators: collective %lld of rank %d is %s %s of unit %d, step %u, of rank "
            "%d %s %s of unit %d, step %u",
            (long long)k, i->rank, i->comm->name, zr_op_name((enum zr_op)i->post.op), i->post.unit,
            i->post.step, rank, d->name, zr_op_name((enum zr_op)p->op), p->unit, p->step);
}

void zr_sim_order_start(struct zr_sim_comm_world *d, struct zr_line *l, const struct zr_post *p)
{
    zr_sim_begin(d->w, l, zr_op_name((enum zr_op)p->op), p->unit, p->step);
    zr_shadow_write(d->rec, l, &d->order->turn[l->rank][d->role], 1);
}
