/* SPDX-License-Identifier: Apache-2.0 */
/* axes.c: a mesh of axes, which number the ranks; and what it comes to in a configuration. */
#include "zero/context.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Outermost first: the ranks of the last axis are neighbours. */
enum axis { PP, DP_REPLICATE, DP_SHARD, CP, TP, N_AXES };
static const char *const axis_name[N_AXES] = {"pp", "dp_replicate", "dp_shard", "cp", "tp"};

#define AXES "pp, dp_replicate, dp_shard, cp, tp"

/* What a name of several axes stands for. */
static const struct {
    const char *name;
    unsigned axes;
} flattened[] = {{"dp", 1u << DP_REPLICATE | 1u << DP_SHARD | 1u << CP}, {"world", (1u << N_AXES) - 1}};

struct zero_mesh {
    int32_t size[N_AXES], at[N_AXES];
    int32_t rank, world;
};

/* The axis called by the first n characters; N_AXES: none is. */
static int find_axis(const char *name, size_t n)
{
    int a = 0;
    while (a < N_AXES && (strlen(axis_name[a]) != n || strncmp(axis_name[a], name, n) != 0))
        a++;
    return a;
}

/* ---- opening ---- */

static int read_axes(struct zero_mesh *m, const struct zero_axis *axes, int32_t n_axes)
{
    int before = -1;
    for (int a = 0; a < N_AXES; a++)
        m->size[a] = 1;
    for (int32_t i = 0; i < n_axes; i++) {
        const char *name = axes[i].name ? axes[i].name : "";
        int a = find_axis(name, strlen(name));
        if (a == N_AXES)
            return zr_fail(ZR_ERR_ARG, "axes[%d] is \"%s\"; allowed: " AXES, i, name);
        if (a <= before)
            return zr_fail(ZR_ERR_ARG, "axes[%d] is %s, behind %s; allowed: each once, in the order " AXES, i,
                           name, axis_name[before]);
        if (axes[i].size < 1 && axes[i].size != -1)
            return zr_fail(ZR_ERR_ARG,
                           "axes[%d] (%s) has size %d; allowed: 1 and more, or -1 for what is left", i, name,
                           axes[i].size);
        m->size[a] = axes[i].size;
        before = a;
    }
    return 0;
}

/* "pp 1, dp_replicate 1, dp_shard 4, cp 1, tp 2" */
static void list_sizes(const struct zero_mesh *m, char *text, size_t n_text)
{
    int n = 0;
    text[0] = 0;
    for (int a = 0; a < N_AXES && (size_t)n < n_text; a++)
        n += snprintf(text + n, n_text - (size_t)n, "%s%s %d", a ? ", " : "", axis_name[a], m->size[a]);
}

/* One axis may be what the others leave of the world. */
static int complete_sizes(struct zero_mesh *m)
{
    int open = -1;
    int64_t product = 1;
    char sizes[128];
    list_sizes(m, sizes, sizeof sizes);
    for (int a = 0; a < N_AXES; a++) {
        if (m->size[a] != -1) {
            product *= product <= m->world ? m->size[a] : 1;
            continue;
        }
        if (open >= 0)
            return zr_fail(ZR_ERR_ARG, "%s and %s have size -1; allowed: one axis of what is left",
                           axis_name[open], axis_name[a]);
        open = a;
    }
    if (open >= 0 && m->world % product == 0)
        m->size[open] = (int32_t)(m->world / product);
    else if (open >= 0 || product != m->world)
        return zr_fail(ZR_ERR_ARG, "the axes (%s) do not multiply to the world of %d ranks", sizes, m->world);
    return 0;
}

static int refuse_later_axes(const struct zero_mesh *m)
{
    if (m->size[CP] > 1)
        return zr_fail(ZR_ERR_NOTSUP, "cp is %d: this library has no such axis yet; allowed: 1", m->size[CP]);
    return 0;
}

static int open_mesh(struct zero_mesh *m, const struct zero_axis *axes, int32_t n_axes,
                     const struct zero_config *cfg)
{
    int err = zero_find_rank(cfg, &m->rank, &m->world, NULL);
    if (!err && (n_axes < 0 || (n_axes && !axes)))
        err = zr_fail(ZR_ERR_ARG, "n_axes is %d, axes is %s; allowed: 0 and more, and axes not NULL", n_axes,
                      axes ? "set" : "NULL");
    if (!err)
        err = read_axes(m, axes, n_axes);
    if (!err)
        err = complete_sizes(m);
    if (!err)
        err = refuse_later_axes(m);
    if (err)
        return err;
    int32_t left = m->rank;
    for (int a = N_AXES; a-- > 0; left /= m->size[a])
        m->at[a] = left % m->size[a];
    return 0;
}

int zero_mesh_open(zero_mesh **out, const struct zero_axis *axes, int32_t n_axes,
                   const struct zero_config *cfg)
{
    if (!out)
        return zr_fail(ZR_ERR_ARG, "zero_mesh_open: out is NULL");
    *out = NULL;
    struct zero_mesh *m = calloc(1, sizeof *m);
    if (!m)
        return zr_fail(ZR_ERR_NOMEM, "zero_mesh_open: no memory for a mesh");
    int err = open_mesh(m, axes, n_axes, cfg);
    if (err) {
        free(m);
        return zr_fail_more(err, "zero_mesh_open");
    }
    *out = m;
    return 0;
}

int zero_mesh_close(zero_mesh **m)
{
    if (!m)
        return 0;
    free(*m);
    *m = NULL;
    return 0;
}

/* ---- ranks ---- */

/* One bit for each axis of "dp_shard+cp". */
static int read_names(const char *names, unsigned *axes)
{
    *axes = 0;
    for (const char *at = names; at; at = strchr(at, '+') ? strchr(at, '+') + 1 : NULL) {
        size_t n = strcspn(at, "+");
        int a = find_axis(at, n);
        unsigned one = a < N_AXES ? 1u << a : 0;
        for (size_t i = 0; i < sizeof flattened / sizeof *flattened; i++)
            if (strlen(flattened[i].name) == n && !strncmp(flattened[i].name, at, n))
                one = flattened[i].axes;
        if (!one || (*axes & one))
            return zr_fail(ZR_ERR_ARG,
                           "zero_mesh_rank: axes is \"%s\"; allowed: " AXES
                           ", dp, world, or several of them once "
                           "each with + between",
                           names);
        *axes |= one;
    }
    return 0;
}

int zero_mesh_rank(const zero_mesh *m, const char *axes, int32_t *rank, int32_t *size)
{
    unsigned wanted;
    if (!m || !axes)
        return zr_fail(ZR_ERR_ARG, "zero_mesh_rank: %s is NULL", m ? "axes" : "m");
    int err = read_names(axes, &wanted);
    if (err)
        return err;
    int32_t number = 0, n = 1;
    for (int a = 0; a < N_AXES; a++)
        if (wanted & 1u << a) {
            number = number * m->size[a] + m->at[a];
            n *= m->size[a];
        }
    if (rank)
        *rank = number;
    if (size)
        *size = n;
    return 0;
}

/* ---- in a configuration ---- */

int zr_config_mesh(struct zr_config *c, int32_t rank, int32_t world)
{
    const struct zero_mesh *m = c->user.mesh;
    c->options.parts = c->options.pp = 1;
    c->pp_at = 0;
    if (!m)
        return 0;
    if (rank < 0 && m->world != world)
        return zr_fail(ZR_ERR_ARG, "mesh is of a world of %d, but world is %d; allowed: the same, or world 0",
                       m->world, world);
    if (rank >= 0 && (m->world != world || m->rank != rank))
        return zr_fail(
            ZR_ERR_ARG,
            "mesh is of rank %d in a world of %d, but this is rank %d in a world of %d; open it with "
            "the configuration that it is for",
            m->rank, m->world, rank, world);
    if (c->user.shard_group != ZERO_AUTO)
        return zr_fail(
            ZR_ERR_ARG,
            "shard_group is %d, but mesh is set, whose dp_shard is %d; allowed: ZERO_AUTO with a mesh",
            c->user.shard_group, m->size[DP_SHARD]);
    static const int on_host[] = {PP, TP};
    for (size_t i = 0; i < sizeof on_host / sizeof *on_host; i++)
        if (c->user.device == ZERO_DEVICE_CUDA && m->size[on_host[i]] > 1)
            return zr_fail(ZR_ERR_NOTSUP,
                           "%s is %d, but device is cuda, where this library has no such axis yet; "
                           "allowed: %s 1, or device host",
                           axis_name[on_host[i]], m->size[on_host[i]], axis_name[on_host[i]]);
    c->options.parts = m->size[TP];
    c->options.pp = m->size[PP];
    c->pp_at = m->at[PP];
    if (c->user.hybrid)
        c->user.shard_group = m->size[DP_SHARD];
    else if (m->size[DP_REPLICATE] > 1 && rank <= 0)
        zr_warn(
            c->log,
            "dp_replicate is %d but hybrid is none: it has no effect, all data-parallel ranks are one group",
            m->size[DP_REPLICATE]);
    return 0;
}
