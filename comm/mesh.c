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
    return t->world / m->stages;
}

/* Whether a list of places puts b directly after a: on the same host, or the same rank if places are
 * ranks. */
static bool is_listed_with(const struct zr_topology *t, int32_t a, int32_t b)
{
    return t->by_rank ? a == b : t->host_of[a] == t->host_of[b];
}

/* Lists the ranks that have a part of a stage, and returns the place of rank among them, or -1. The order is
 * host by host, as in the topology, but hosts are ordered by the lowest of these ranks. If places are ranks,
 * the order is by number. */
static int32_t list_part(const struct zr_topology *t, const struct zr_mesh *m, int32_t stage, int32_t part,
                         int32_t rank, int32_t *members)
{
    int32_t n = 0, found = -1, first = stage * stage_size(t, m) + part, end = (stage + 1) * stage_size(t, m);
    for (int32_t lowest = first; lowest < end; lowest += m->parts) {
        bool is_listed = false;
        for (int32_t k = 0; k < n && !is_listed; k++)
            is_listed = is_listed_with(t, members[k], lowest);
        for (int32_t r = lowest; r < end && !is_listed; r += m->parts) {
            if (!is_listed_with(t, r, lowest))
                continue;
            if (r == rank)
                found = n;
            members[n++] = r;
        }
    }
    return found;
}

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

/* Whether any outer group has ranks on two hosts. all and across have room for a part's ranks, and for those
 * of an outer group. */
static bool any_outer_spans_hosts(const struct zr_topology *t, const struct zr_mesh *m, int32_t *all,
                                  int32_t *across)
{
    bool spans = false;
    for (int32_t k = 0; k < m->stages * m->parts; k++) {
        list_part(t, m, k / m->parts, k % m->parts, -1, all);
        for (int32_t i = 0; i < m->inner; i++) {
            fill_members(all, i, m->inner, m->outer, across);
            spans |= spans_hosts(t, across, m->outer);
        }
    }
    return spans;
}

/* Lists the pair of this rank: an even (odd 0) or an odd stage and the next one. The list is this rank alone
 * if it has no such neighbour. Returns the number of ranks. */
static int32_t list_pair(const struct zr_topology *t, const struct zr_mesh *m, int32_t odd, int32_t *members)
{
    bool first = m->stage % 2 == odd;
    int32_t next = t->rank + stage_size(t, m), before = t->rank - stage_size(t, m);
    members[0] = first || before < 0 ? t->rank : before;
    members[1] = first ? next : t->rank;
    return first ? 1 + (m->stage + 1 < m->stages) : 1 + (before >= 0);
}

/* Lists the ranks of the first and the last stage with this rank's part and place. The list is this rank
 * alone in other stages. Returns the number of ranks. */
static int32_t list_ends(const struct zr_topology *t, const struct zr_mesh *m, int32_t *members)
{
    int32_t n = stage_size(t, m), last = m->stages - 1;
    bool at_end = last > 0 && m->stage % last == 0;
    members[0] = at_end ? t->rank % n : t->rank;
    members[1] = t->rank % n + last * n;
    return at_end ? 2 : 1;
}

static int check_division(const struct zr_topology *t, int32_t stages, int32_t parts, int32_t inner)
{
    if (stages < 1 || parts < 1 || t->world / stages % parts || t->world % stages)
        return zr_fail(ZERO_ERR_ARG,
                       "%d stages of %d parts in a world of %d: a product that divides the world is allowed",
                       stages, parts, t->world);
    int32_t n = t->world / stages / parts;
    if (inner < 1 || n % inner)
        return zr_fail(ZERO_ERR_ARG,
                       "groups of %d ranks in a world of %d: a number that divides the world is allowed",
                       inner, n);
    return 0;
}

int zr_mesh_make(const struct zr_topology *t, int32_t stages, int32_t parts, int32_t inner,
                 struct zr_mesh *out)
{
    *out = (struct zr_mesh){.inner = 0};
    int err = check_division(t, stages, parts, inner);
    if (err)
        return err;
    int32_t n = t->world / stages / parts;
    struct zr_mesh m = {.stages = stages,
                        .parts = parts,
                        .stage = t->rank / (t->world / stages),
                        .part = t->rank % parts,
                        .inner = inner,
                        .outer = n / inner};
    ZR_TRY(ZR_ZALLOC(m.members, n + m.inner + m.outer + parts + t->world + 6, "the groups of %d ranks",
                     t->world));
    int32_t *in = m.members + n, *across = in + m.inner, *model = across + m.outer, *world = model + parts,
            *pair = world + t->world;
    m.outer_spans_hosts = any_outer_spans_hosts(t, &m, m.members, across);
    int32_t place = list_part(t, &m, m.stage, m.part, t->rank, m.members);
    fill_members(m.members, place / m.inner * m.inner, 1, m.inner, in);
    fill_members(m.members, place % m.inner, m.inner, m.outer, across);
    for (int32_t k = 0; k < parts; k++)
        model[k] = t->rank - m.part + k;
    fill_members(t->rank_at, 0, 1, t->world, world);
    m.all = group_of(t, m.members, n);
    m.in = group_of(t, in, m.inner);
    m.out = group_of(t, across, m.outer);
    m.model = group_of(t, model, parts);
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
    *mesh = (struct zr_mesh){.inner = 0};
}
