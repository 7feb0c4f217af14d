/* SPDX-License-Identifier: Apache-2.0 */
/* symmetry.c: colour refinement over the hosts and groups of a world, and the choice of representatives. */
#include "comm/sim/symmetry.h"
#include "comm/sim/sim_inside.h"
#include "kernels/alloc.h"

#include <stdlib.h>
#include <string.h>

/* splitmix64's finalizer (Steele, Lea and Flood, OOPSLA 2014). */
static uint64_t mix(uint64_t x)
{
    x += UINT64_C(0x9e3779b97f4a7c15);
    x = (x ^ x >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ x >> 27) * UINT64_C(0x94d049bb133111eb);
    return x ^ x >> 31;
}

/* The n ranks first, first + step, and so on. */
struct row {
    int32_t first, step, n;
};

static struct row inner_of(const struct zr_symmetry *s, int32_t rank)
{
    return (struct row){rank / s->inner * s->inner, 1, s->inner};
}

static struct row outer_of(const struct zr_symmetry *s, int32_t rank)
{
    return (struct row){rank % s->inner, s->inner, s->world / s->inner};
}

/* Number of ranks of the row on the rank's host, and number of hosts in the row. */
static uint64_t seen_in(const struct zr_symmetry *s, struct row row, int32_t rank)
{
    int32_t near = 0, hosts = 0, last = -1;
    for (int32_t k = 0; k < row.n; k++) {
        int32_t host = (row.first + k * row.step) / s->per_host;
        near += host == rank / s->per_host;
        hosts += host != last;
        last = host;
    }
    return (uint64_t)near << 32 | (uint64_t)hosts;
}

/* The same for the whole world as a row. It is computed directly, as seen_in for each rank would take too
 * long. */
static uint64_t seen_in_world(const struct zr_symmetry *s, int32_t rank)
{
    int32_t host = rank / s->per_host, left = s->world - host * s->per_host;
    return (uint64_t)(left < s->per_host ? left : s->per_host);
}

/* Adds up colors by group, as all ranks of an inner or an outer group see the same members. */
static void sum_rows(const struct zr_symmetry *s, const uint64_t *color, uint64_t *inner, uint64_t *outer)
{
    memset(inner, 0, (size_t)(s->world / s->inner) * sizeof *inner);
    memset(outer, 0, (size_t)s->inner * sizeof *outer);
    for (int32_t r = 0; r < s->world; r++) {
        inner[r / s->inner] += mix(color[r]);
        outer[r % s->inner] += mix(color[r]);
    }
}

static int ascending(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

/* Number of different colors among n. sorted has room for n and gets them in order. */
static int32_t count_colors(const uint64_t *color, int32_t n, uint64_t *sorted)
{
    int32_t count = 0;
    memcpy(sorted, color, (size_t)n * sizeof *color);
    qsort(sorted, (size_t)n, sizeof *sorted, ascending);
    for (int32_t i = 0; i < n; i++)
        if (i == 0 || sorted[i] != sorted[i - 1])
            sorted[count++] = sorted[i];
    return count;
}

/* Gives each rank a first color. If a group is the whole world, the other has one rank, and neither adds
 * anything. */
static void first_colors(const struct zr_symmetry *s, uint64_t *color)
{
    bool groups = s->inner > 1 && s->inner < s->world;
    for (int32_t r = 0; r < s->world; r++) {
        color[r] = mix(seen_in_world(s, r));
        if (groups)
            color[r] = mix(mix(color[r] + seen_in(s, inner_of(s, r), r)) + seen_in(s, outer_of(s, r), r));
    }
}

/* Refines color (world) until the number of classes is stable. room has 3 * world numbers; the classes'
 * colors come first in it, ascending. Returns the number of classes. */
static int32_t refine(const struct zr_symmetry *s, uint64_t *color, uint64_t *room)
{
    uint64_t *inner = room + s->world, *outer = room + 2 * s->world;
    first_colors(s, color);
    for (int32_t n = count_colors(color, s->world, room), before = 0; n != before;) {
        before = n;
        sum_rows(s, color, inner, outer);
        for (int32_t r = 0; r < s->world; r++)
            color[r] = mix(color[r] ^ mix(inner[r / s->inner] ^ mix(outer[r % s->inner])));
        n = count_colors(color, s->world, room);
    }
    return count_colors(color, s->world, room);
}

/* Position of the rank's slice among all slices: by its place in the group, then by group. */
static int32_t slice_of(const struct zr_symmetry *s, int32_t rank)
{
    return rank % s->inner * (s->world / s->inner) + rank / s->inner;
}

/* Numbers the classes in the order of their representatives' ranks. */
static int number_classes(struct zr_symmetry *s, const uint64_t *color, const uint64_t *sorted)
{
    int32_t *best = malloc((size_t)s->n * sizeof *best), *number = malloc((size_t)s->n * sizeof *number);
    int err = best && number ? 0 : zr_fail(ZERO_ERR_NOMEM, "no memory for %d kinds of ranks", s->n);
    for (int32_t k = 0; !err && k < s->n; k++)
        best[k] = -1;
    for (int32_t r = 0; !err && r < s->world; r++) {
        const uint64_t *at = bsearch(&color[r], sorted, (size_t)s->n, sizeof *sorted, ascending);
        int32_t k = s->class_of[r] = (int32_t)(at - sorted);
        if (best[k] < 0 || slice_of(s, r) < slice_of(s, best[k]))
            best[k] = r;
    }
    for (int32_t r = 0, n = 0; !err && r < s->world; r++) {
        if (best[s->class_of[r]] != r)
            continue;
        number[s->class_of[r]] = n;
        s->rank[n++] = r;
    }
    for (int32_t r = 0; !err && r < s->world; r++)
        s->class_of[r] = number[s->class_of[r]];
    free(best);
    free(number);
    return err;
}

int zr_symmetry_make(int32_t world, int32_t inner, int32_t per_host, struct zr_symmetry *out)
{
    struct zr_symmetry s = {.world = world, .inner = inner, .per_host = per_host};
    uint64_t *color = malloc((size_t)world * 4 * sizeof *color), *room = color ? color + world : NULL;
    s.class_of = malloc((size_t)world * sizeof *s.class_of);
    *out = (struct zr_symmetry){0};
    int err = color && s.class_of ? 0 : zr_fail(ZERO_ERR_NOMEM, "no memory for %d ranks", world);
    if (!err) {
        s.n = refine(&s, color, room);
        if (s.n > ZR_SIM_MAX_RANKS)
            err = zr_fail(ZERO_ERR_ARG,
                          "%d ranks in groups of %d on hosts of %d are of %d kinds; at most %d can be "
                          "simulated: make groups fill hosts, or hosts hold whole groups",
                          world, inner, per_host, s.n, ZR_SIM_MAX_RANKS);
        else
            err = ZR_ALLOC(s.rank, s.n, "%d kinds of ranks", s.n);
    }
    if (!err)
        err = number_classes(&s, color, room);
    free(color);
    if (err)
        zr_symmetry_free(&s);
    else
        *out = s;
    return err;
}

void zr_symmetry_free(struct zr_symmetry *s)
{
    free(s->rank);
    free(s->class_of);
    *s = (struct zr_symmetry){0};
}
