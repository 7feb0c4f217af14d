/* mesh.c: see mesh.h. */
#include "comm/mesh.h"
#include "kernels/error.h"

#include <stdlib.h>

static bool spans_hosts(const struct zr_topology *t, const int32_t *members, int32_t n)
{
    for (int32_t k = 1; k < n; k++)
        if (t->host_of[members[k]] != t->host_of[members[0]])
            return true;
    return false;
}

/* The n ranks at places first, first + step and on. */
static void fill_members(const struct zr_topology *t, int32_t first, int32_t step, int32_t n,
                         int32_t *members)
{
    for (int32_t k = 0; k < n; k++)
        members[k] = t->rank_at[first + k * step];
}

static struct zr_group group_of(const struct zr_topology *t, int32_t first, int32_t step, int32_t n,
                                int32_t *members)
{
    struct zr_group g = {.size = n, .members = members};
    fill_members(t, first, step, n, members);
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

int zr_mesh_make(const struct zr_topology *t, int32_t inner, struct zr_mesh *out)
{
    *out = (struct zr_mesh){.inner = 0};
    if (inner < 1 || t->world % inner)
        return zr_fail(ZR_ERR_ARG,
                       "groups of %d ranks in a world of %d: a number that divides the world is allowed",
                       inner, t->world);
    struct zr_mesh m = {.inner = inner, .outer = t->world / inner};
    int32_t place = t->place_of[t->rank];
    m.members = calloc((size_t)(t->world + m.inner + m.outer), sizeof *m.members);
    if (!m.members)
        return zr_fail(ZR_ERR_NOMEM, "no memory for the groups of %d ranks", t->world);
    int32_t *in = m.members + t->world, *across = in + m.inner;
    for (int32_t i = 0; i < m.inner; i++) {
        fill_members(t, i, m.inner, m.outer, across);
        m.outer_spans_hosts |= spans_hosts(t, across, m.outer);
    }
    m.all = group_of(t, 0, 1, t->world, m.members);
    m.in = group_of(t, place / m.inner * m.inner, 1, m.inner, in);
    m.out = group_of(t, place % m.inner, m.inner, m.outer, across);
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
