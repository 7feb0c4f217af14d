/* SPDX-License-Identifier: Apache-2.0 */
/* mesh.c: lists the members of this rank's groups on each axis. */
#include "comm/mesh.h"
#include "kernels/alloc.h"
#include "kernels/error.h"

#include <stdlib.h>

static bool spans_hosts(const struct zr_topology *t, const int32_t *members, int32_t n)
{
    for (int32_t k = 1; k < n; k++)
        if (t->host_of[members[k]] != t->host_of[members[0]])
            return true;
    return false;
}

/* Copies n ranks of the list: those at first, first + step, and so on. */
static void fill_members(const int32_t *list, int32_t first, int32_t step, int32_t n, int32_t *members)
{
    for (int32_t k = 0; k < n; k++)
        members[k] = list[first + k * step];
}

/* Number of ranks of one pipeline stage. */
static int32_t stage_size(const struct zr_topology *t, const struct zr_mesh *m)
{
    return t->world / m->pp;
}

/* Whether a list of places puts b directly after a: on the same host, or the same rank if places are
 * ranks. */
static bool is_listed_with(const struct zr_topology *t, int32_t a, int32_t b)
{
    return t->by_rank ? a == b : t->host_of[a] == t->host_of[b];
}

/* Lists the data-parallel ranks with this pipeline stage and number along tp, and returns the place of rank
 * among them, or -1. The order is host by host, as in the topology, but hosts are ordered by the lowest of
 * these ranks. If places are ranks, the order is by number. */
static int32_t list_dp(const struct zr_topology *t, const struct zr_mesh *m, int32_t pp_rank, int32_t tp_rank,
                       int32_t rank, int32_t *members)
{
    int32_t n = 0, found = -1, first = pp_rank * stage_size(t, m) + tp_rank,
            end = (pp_rank + 1) * stage_size(t, m);
    for (int32_t lowest = first; lowest < end; lowest += m->tp) {
        bool is_listed = false;
        for (int32_t k = 0; k < n && !is_listed; k++)
            is_listed = is_listed_with(t, members[k], lowest);
        for (int32_t r = lowest; r < end && !is_listed; r += m->tp) {
            if (!is_listed_with(t, r, lowest))
                continue;
            if (r == rank)
                found = n;
            members[n++] = r;
        }
    }
    return found;
}

/* The group of these members, with this rank's place among them if it is one. */
static struct zr_group group_of(const struct zr_topology *t, const int32_t *members, int32_t n)
{
    struct zr_group g = {.size = n, .members = members};
    for (int32_t k = 0; k < n; k++) {
        bool is_here = t->host_of[members[k]] == t->host;
        if (members[k] == t->rank) {
            g.rank = k;
            g.local_rank = g.local_size;
        }
        g.local_size += is_here;
    }
    return g;
}

/* Whether any replicate group has ranks on two hosts. all and replicate have room for the ranks of a dp group
 * and of a replicate group. */
static bool any_replicas_span_hosts(const struct zr_topology *t, const struct zr_mesh *m, int32_t *all,
                                    int32_t *replicate)
{
    bool spans = false;
    for (int32_t k = 0; k < m->pp * m->tp; k++) {
        list_dp(t, m, k / m->tp, k % m->tp, -1, all);
        for (int32_t i = 0; i < m->dp_shard; i++) {
            fill_members(all, i, m->dp_shard, m->dp_replicate, replicate);
            spans |= spans_hosts(t, replicate, m->dp_replicate);
        }
    }
    return spans;
}

/* Lists the pair of this rank: an even (odd 0) or an odd stage and the next one. The list is this rank alone
 * if it has no such neighbour. Returns the number of ranks. */
static int32_t list_pair(const struct zr_topology *t, const struct zr_mesh *m, int32_t odd, int32_t *members)
{
    bool first = m->pp_rank % 2 == odd;
    int32_t next = t->rank + stage_size(t, m), before = t->rank - stage_size(t, m);
    members[0] = first || before < 0 ? t->rank : before;
    members[1] = first ? next : t->rank;
    return first ? 1 + (m->pp_rank + 1 < m->pp) : 1 + (before >= 0);
}

/* Lists the ranks of the first and the last pipeline stage at the same place as this rank in its stage. For a
 * rank of another stage the list has that rank alone. Returns the number of ranks. */
static int32_t list_ends(const struct zr_topology *t, const struct zr_mesh *m, int32_t *members)
{
    int32_t n = stage_size(t, m), last = m->pp - 1;
    bool at_end = last > 0 && m->pp_rank % last == 0;
    members[0] = at_end ? t->rank % n : t->rank;
    members[1] = t->rank % n + last * n;
    return at_end ? 2 : 1;
}

static int check_division(const struct zr_topology *t, const struct zr_mesh_sizes *s)
{
    const int32_t pp = s->pp, tp = s->tp, dp_shard = s->dp_shard;
    if (pp < 1 || tp < 1 || t->world / pp % tp || t->world % pp)
        return zr_fail(ZERO_ERR_ARG,
                       "pp %d and tp %d in a world of %d: a product that divides the world is allowed", pp,
                       tp, t->world);
    int32_t n = t->world / pp / tp;
    if (dp_shard < 1 || n % dp_shard)
        return zr_fail(ZERO_ERR_ARG,
                       "groups of %d ranks in a world of %d: a number that divides the world is allowed",
                       dp_shard, n);
    if (s->cp < 1 || n % s->cp)
        return zr_fail(ZERO_ERR_ARG, "cp %d of %d data-parallel ranks: a number that divides them is allowed",
                       s->cp, n);
    return 0;
}

int zr_mesh_make(const struct zr_topology *t, const struct zr_mesh_sizes *sizes, struct zr_mesh *out)
{
    const int32_t tp = sizes->tp, cp = sizes->cp;
    *out = (struct zr_mesh){.dp_shard = 0};
    ZR_TRY(check_division(t, sizes));
    int32_t n = t->world / sizes->pp / tp;
    struct zr_mesh m = {.pp = sizes->pp,
                        .tp = tp,
                        .cp = cp,
                        .pp_rank = t->rank / (t->world / sizes->pp),
                        .tp_rank = t->rank % tp,
                        .cp_rank = t->rank / tp % cp,
                        .dp_shard = sizes->dp_shard,
                        .dp_replicate = n / sizes->dp_shard};
    ZR_TRY(ZR_ZALLOC(m.members, n + m.dp_shard + m.dp_replicate + tp + cp + t->world + 6,
                     "the groups of %d ranks", t->world));
    int32_t *shard = m.members + n, *replicate = shard + m.dp_shard, *tp_ranks = replicate + m.dp_replicate,
            *cp_ranks = tp_ranks + tp, *world = cp_ranks + cp, *pair = world + t->world;
    m.replicas_span_hosts = any_replicas_span_hosts(t, &m, m.members, replicate);
    int32_t place = list_dp(t, &m, m.pp_rank, m.tp_rank, t->rank, m.members);
    fill_members(m.members, place / m.dp_shard * m.dp_shard, 1, m.dp_shard, shard);
    fill_members(m.members, place % m.dp_shard, m.dp_shard, m.dp_replicate, replicate);
    for (int32_t k = 0; k < tp; k++)
        tp_ranks[k] = t->rank - m.tp_rank + k;
    for (int32_t k = 0; k < cp; k++)
        cp_ranks[k] = t->rank + (k - m.cp_rank) * tp;
    fill_members(t->rank_at, 0, 1, t->world, world);
    m.dp_group = group_of(t, m.members, n);
    m.shard_group = group_of(t, shard, m.dp_shard);
    m.replicate_group = group_of(t, replicate, m.dp_replicate);
    m.tp_group = group_of(t, tp_ranks, tp);
    m.cp_group = group_of(t, cp_ranks, cp);
    m.world = group_of(t, world, t->world);
    for (int32_t odd = 0; odd < 2; odd++)
        m.pair[odd] = group_of(t, pair + 2 * odd, list_pair(t, &m, odd, pair + 2 * odd));
    m.ends = group_of(t, pair + 4, list_ends(t, &m, pair + 4));
    *out = m;
    return 0;
}

void zr_mesh_free(struct zr_mesh *mesh)
{
    if (!mesh)
        return;
    free(mesh->members);
    *mesh = (struct zr_mesh){.dp_shard = 0};
}
