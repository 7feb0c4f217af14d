/* SPDX-License-Identifier: Apache-2.0 */
/* nccl_agree.c: what the ranks of the world exchange over the rendezvous while they open communicators and
 * make arenas.
 *
 * Every step that may fail on one rank ends with an exchange of results. So all ranks go on, or fail with
 * the same message, and a rank that does not come is named. */
#include "comm/meet/rendezvous.h"
#include "comm/nccl/nccl_comm.h"
#include "kernels/alloc.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct outcome {
    int32_t err;
    int64_t number;
};

/* Reports the error to the other ranks, which wait for the exchange. */
static int no_memory_to_compare(struct zr_nccl_set *p, int err)
{
    err = err ? err : zr_fail(ZERO_ERR_NOMEM, "nccl: no memory to compare %d ranks", p->world);
    return zr_rendezvous_fail(p->rdv, err);
}

int zr_nccl_agree(struct zr_nccl_set *p, int err, int64_t number, const struct zr_nccl *m,
                  struct zr_nccl_tally *t)
{
    if (!t)
        return zr_rendezvous_agree(p->rdv, err);
    struct outcome mine = {.number = number}, *all = malloc((size_t)p->world * sizeof *all);
    if (!all)
        return no_memory_to_compare(p, err);
    int met = zr_rendezvous_agree_and_exchange(p->rdv, err, &mine.err, sizeof mine, all);
    if (!met)
        *t = (struct zr_nccl_tally){.first = all[zr_comm_rank(&m->base, 0)].number, .odd = -1};
    for (int i = 0; !met && i < m->base.group.size; i++) {
        int r = zr_comm_rank(&m->base, i);
        t->sum += all[r].number;
        if (t->odd < 0 && all[r].number != t->first)
            t->odd = r, t->odd_number = all[r].number;
    }
    free(all);
    return met;
}

/* Compares what a rank moves in a role with the first rank of its group. Pipeline stages may differ. */
static int compare_role(const struct zr_nccl_card *all, int r, int role)
{
    const int first = all[r].first[role];
    const struct {
        const char *what;
        int64_t own, firsts;
    } rows[] = {{"the largest slice", all[r].largest[role], all[first].largest[role]},
                {"packed_bytes", all[r].packed[role], all[first].packed[role]}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        if (rows[i].own != rows[i].firsts)
            return zr_fail(
                ZERO_ERR_MISMATCH,
                "nccl: %s (%s) is %lld on rank %d and %lld on rank %d; all ranks must have the same",
                rows[i].what, zr_role_name((enum zr_role)role), (long long)rows[i].own, r,
                (long long)rows[i].firsts, first);
    return 0;
}

static int compare_cards(const struct zr_nccl_set *p, const struct zr_nccl_card *all)
{
    for (int r = 1; r < p->world; r++) {
        if (all[r].version != all[0].version) {
            char a[32], b[32];
            zr_nccl_version_text(all[r].version, a, sizeof a);
            zr_nccl_version_text(all[0].version, b, sizeof b);
            return zr_fail(ZERO_ERR_MISMATCH,
                           "rank %d has NCCL %s, rank 0 has %s: all ranks must have the same", r, a, b);
        }
#define SAME(field, what)                                                                                    \
    if (all[r].field != all[0].field)                                                                        \
    return zr_fail(ZERO_ERR_MISMATCH,                                                                        \
                   "nccl: %s is %lld on rank %d and %lld on rank 0; all ranks must have the same", what,     \
                   (long long)all[r].field, r, (long long)all[0].field)
        SAME(deterministic, "deterministic");
        SAME(copy_engine, "copy_engine");
        SAME(small_bytes, "small_bytes");
        SAME(ranks_per_id, "ranks_per_id");
        SAME(user_comm, "the use of nccl_comm");
#undef SAME
        for (int role = 0; role < ZR_ROLES; role++)
            ZR_TRY(compare_role(all, r, role));
    }
    return 0;
}

/* Whether this rank makes one of the ids of m's communicator. */
static bool makes_id(const struct zr_nccl *m)
{
    int i = zr_nccl_n_ids(m) - 1;
    while (i >= 0 && zr_nccl_id_place(m, i) != m->base.group.rank)
        i--;
    return i >= 0;
}

struct making {
    struct zr_nccl_api api;
    ncclUniqueId id;
};

/* Makes an id. NCCL opens a socket for it and starts a thread. */
static int get_id(void *arg)
{
    struct making *m = arg;
    return m->api.GetUniqueId(&m->id);
}

static int make_id(struct zr_nccl_set *p, ncclUniqueId *id)
{
    struct making m = {.api = p->api};
    ncclResult_t res = ncclSuccess;
    int err = zr_nccl_timed_call(p, "ncclGetUniqueId", p->opt.start_timeout_ms, get_id, &m, sizeof m, &res);
    if (!err && res)
        err = zr_nccl_say(p, NULL, res, "ncclGetUniqueId");
    *id = m.id;
    return err;
}

static void write_card(const struct zr_nccl_set *p, struct zr_nccl_card *card)
{
    *card = (struct zr_nccl_card){.version = p->api.version,
                                  .deterministic = p->opt.deterministic,
                                  .copy_engine = p->opt.copy_engine,
                                  .user_comm = p->opt.user_comm != NULL,
                                  .small_bytes = p->opt.small_bytes,
                                  .ranks_per_id = p->opt.ranks_per_id};
    for (int i = 0; i < p->n_open; i++) {
        const struct zr_nccl *m = p->open[i];
        card->largest[m->base.role] = m->largest;
        card->packed[m->base.role] = m->packed;
        card->first[m->base.role] = zr_comm_rank(&m->base, 0);
    }
}

/* Copies the ids in the same order on every rank, as NCCL requires. all has an id of every rank. */
static int take_ids(const struct zr_nccl *m, const ncclUniqueId *all, ncclUniqueId **ids)
{
    int n = zr_nccl_n_ids(m);
    *ids = NULL;
    if (n)
        ZR_TRY(ZR_ALLOC(*ids, n, "%d ids of nccl %s", n, m->name));
    for (int i = 0; i < n; i++)
        (*ids)[i] = all[zr_comm_rank(&m->base, zr_nccl_id_place(m, i))];
    return 0;
}

/* Exchanges the ids of a role, if a rank makes one for it. */
static int exchange_ids(struct zr_nccl_set *p, enum zr_role role, const struct zr_nccl_card *cards,
                        const ncclUniqueId *mine, ncclUniqueId **ids)
{
    int r = 0;
    while (r < p->world && !cards[r].makes_id[role])
        r++;
    if (r == p->world)
        return 0;
    ncclUniqueId *all = malloc((size_t)p->world * sizeof *all);
    if (!all)
        return no_memory_to_compare(p, 0);
    int err = zr_rendezvous_exchange(p->rdv, mine, sizeof *mine, all);
    if (!err)
        err = zr_rendezvous_agree(p->rdv, p->of[role].set ? take_ids(&p->of[role], all, ids) : 0);
    free(all);
    return err;
}

int zr_nccl_meet(struct zr_nccl_set *p, int err, ncclUniqueId *ids[ZR_ROLES])
{
    struct zr_nccl_card mine;
    ncclUniqueId own[ZR_ROLES] = {0};
    write_card(p, &mine);
    for (int i = 0; !err && i < p->n_open; i++)
        if (makes_id(p->open[i])) {
            mine.makes_id[p->open[i]->base.role] = true;
            err = make_id(p, &own[p->open[i]->base.role]);
        }
    struct zr_nccl_card *all = malloc((size_t)p->world * sizeof *all);
    if (!all)
        return no_memory_to_compare(p, err);
    int met = zr_rendezvous_agree_and_exchange(p->rdv, err, &mine.err, sizeof mine, all);
    if (!met)
        met = compare_cards(p, all);
    for (int role = 0; !met && role < ZR_ROLES; role++)
        met = exchange_ids(p, (enum zr_role)role, all, &own[role], &ids[role]);
    free(all);
    return met;
}
