/* nccl_agree.c: what all ranks of the world tell each other over the rendezvous while communicators are
 * opened and arenas made.
 *
 * Every step that may fail on one rank alone ends with a comparison, so that all ranks go on together or fail
 * together, with the same words. It is also what names a rank that does not come. */
#include "comm/meet/rendezvous.h"
#include "comm/nccl/nccl_comm.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct outcome {
    int64_t number;
    ZR_VERDICT(400);
};

/* The others, who wait to compare, are told. */
static int no_memory_to_compare(struct zr_nccl_pair *p, int err)
{
    err = err ? err : zr_fail(ZR_ERR_NOMEM, "nccl: no memory to compare %d ranks", p->world);
    return zr_rendezvous_fail(p->rdv, err);
}

int zr_nccl_agree(struct zr_nccl_pair *p, int err, int64_t number, struct zr_nccl_tally *t)
{
    struct outcome mine = {.number = number}, *all = malloc((size_t)p->world * sizeof *all);
    zr_verdict_put(&mine, err);
    if (!all)
        return no_memory_to_compare(p, err);
    int met = zr_rendezvous_exchange(p->rdv, &mine, sizeof mine, all);
    met = zr_verdict(met, &mine, all, p->world, p->rank);
    if (!met && t)
        *t = (struct zr_nccl_tally){.first = all[0].number, .odd = -1};
    for (int i = 0; !met && t && i < p->group.size; i++)
        t->sum += all[zr_group_member(&p->group, i)].number;
    for (int r = 0; !met && t && r < p->world; r++) {
        if (t->odd < 0 && all[r].number != t->first)
            t->odd = r, t->odd_number = all[r].number;
    }
    free(all);
    return met;
}

static int compare_cards(const struct zr_nccl_pair *p, const struct zr_nccl_card *all)
{
    for (int r = 1; r < p->world; r++) {
        if (all[r].version != all[0].version) {
            char a[32], b[32];
            zr_nccl_version_text(all[r].version, a, sizeof a);
            zr_nccl_version_text(all[0].version, b, sizeof b);
            return zr_fail(ZR_ERR_MISMATCH,
                           "rank %d has NCCL %s, rank 0 has %s: all ranks must have the same", r, a, b);
        }
#define SAME(field, what)                                                                                    \
    if (all[r].field != all[0].field)                                                                        \
    return zr_fail(ZR_ERR_MISMATCH,                                                                          \
                   "nccl: %s is %lld on rank %d and %lld on rank 0; all ranks must have the same", what,     \
                   (long long)all[r].field, r, (long long)all[0].field)
        SAME(deterministic, "deterministic");
        SAME(copy_engine, "copy_engine");
        SAME(reserve_bytes, "reserve_bytes");
        SAME(packed_bytes, "packed_bytes");
        SAME(small_bytes, "small_bytes");
        SAME(lent, "the use of a communicator that was lent");
#undef SAME
    }
    return 0;
}

int zr_nccl_meet(struct zr_nccl_pair *p, int err, struct zr_nccl_card *out)
{
    struct zr_nccl_card mine = {.version = p->api.version,
                                .deterministic = p->opt.deterministic,
                                .copy_engine = p->opt.copy_engine,
                                .lent = p->opt.lent != NULL,
                                .reserve_bytes = p->opt.reserve_bytes,
                                .packed_bytes = p->opt.packed_bytes,
                                .small_bytes = p->opt.small_bytes};
    for (int i = 0; !err && p->group.rank == 0 && !p->opt.lent && i < 2; i++) {
        ncclResult_t res = p->api.GetUniqueId(&mine.id[i]);
        if (res)
            err = zr_nccl_say(p, NULL, res, "ncclGetUniqueId");
    }
    zr_verdict_put(&mine, err);
    struct zr_nccl_card *all = malloc((size_t)p->world * sizeof *all);
    if (!all)
        return no_memory_to_compare(p, err);
    int met = zr_rendezvous_exchange(p->rdv, &mine, sizeof mine, all);
    met = zr_verdict(met, &mine, all, p->world, p->rank);
    if (!met)
        met = compare_cards(p, all);
    if (!met)
        *out = all[zr_group_member(&p->group, 0)];
    free(all);
    return met;
}
