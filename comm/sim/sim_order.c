/* SPDX-License-Identifier: Apache-2.0 */
/* sim_order.c: checks that ranks issue collectives in the same order over all communicators, and that
 * those of one communicator run one after the other on each rank, whatever their streams. */
#include "comm/sim/sim_inside.h"

#include <stdlib.h>

/* A collective that the first rank to come issued, on any communicator. Groups of one role issue the same. */
struct issue {
    enum zr_role role;
    struct zr_post post;
    int rank; /* the first rank that issued it */
};

struct issues {
    struct issue *issue;
    int64_t n, cap;
};

struct zr_sim_order {
    /* Collectives by class of ranks, separately for the schedule and for the model's thread (is_models). */
    struct issues all[2][ZR_SIM_MAX_RANKS];
    int32_t class_of[ZR_SIM_MAX_RANKS];
    int64_t at[2][ZR_SIM_MAX_RANKS]; /* number of collectives that each rank has issued */
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
    for (int k = 0; o && k < ZR_SIM_MAX_RANKS; k++)
        for (int models = 0; models < 2; models++)
            free(o->all[models][k].issue);
    free(o);
}

/* Whether the model's thread issues a role's collectives: activations and tied tensors. */
static bool is_models(enum zr_role role)
{
    return role == ZR_ROLE_TP || (role >= ZR_ROLE_EVEN_PAIR && role <= ZR_ROLE_TIED);
}

void zr_sim_order_keep(struct zr_sim_comm_world *d, int rank, const struct zr_post *p)
{
    struct zr_sim_order *o = d->order;
    bool models = is_models(d->role);
    struct issues *all = &o->all[models][o->class_of[rank]];
    struct zr_line *host = zr_sim_speaker(d->w);
    if (!models) {
        zr_sim_begin(d->w, host, "issue", p->unit, p->step);
        zr_shadow_write(d->rec, host, &o->turn[rank][ZR_ROLES], 1);
    }
    int64_t k = o->at[models][rank]++;
    if (k == all->cap) {
        all->cap = all->cap ? all->cap * 2 : 256;
        all->issue = realloc(all->issue, (size_t)all->cap * sizeof *all->issue);
        if (!all->issue)
            abort();
    }
    if (k == all->n) {
        all->issue[all->n++] = (struct issue){d->role, *p, rank};
        return;
    }
    const struct issue *i = &all->issue[k];
    if (i->role != d->role || i->post.op != p->op || i->post.unit != p->unit || i->post.step != p->step)
        zr_report(
            d->rec,
            "order across communicators: collective %lld of rank %d is %s %s of unit %d, step %u, of rank "
            "%d %s %s of unit %d, step %u",
            (long long)k, i->rank, zr_role_name(i->role), zr_op_name((enum zr_op)i->post.op), i->post.unit,
            i->post.step, rank, d->name, zr_op_name((enum zr_op)p->op), p->unit, p->step);
}

void zr_sim_order_start(struct zr_sim_comm_world *d, struct zr_line *l, const struct zr_post *p)
{
    zr_sim_begin(d->w, l, zr_op_name((enum zr_op)p->op), p->unit, p->step);
    zr_shadow_write(d->rec, l, &d->order->turn[l->rank][d->role], 1);
}
