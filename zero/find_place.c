/* SPDX-License-Identifier: Apache-2.0 */
/* find_place.c: finds the rank of this process and its place in cfg.mesh. zero_wrap and zero_plan use it, and
 * programs that need both before the wrap. */
#include "zero/context.h"

#include <stdio.h>

int zr_find_rank(const struct zero_config *cfg, struct zr_world *out)
{
    struct zr_user_comm_ranks ranks = {
        .name = "exchange", .rank = cfg->launch.rank, .world = cfg->launch.world};
    void *comm;
    const struct zr_backend *user_backend = zr_backend_of_user_comm(cfg, &comm);
    const struct zr_backend *named_backend = zr_backend_row(cfg->launch.backend);
    if (!user_backend && (!cfg->launch.exchange || !cfg->launch.world))
        return (named_backend && named_backend->job_world ? zr_world_find_by_mpi : zr_world_find)(
            cfg->launch.rank, cfg->launch.world, cfg->launch.rendezvous, out);
    if (user_backend) {
        ranks.name = user_backend->user_comm_name;
        ZR_TRY(user_backend->user_comm_world(comm, zr_config_start_ms(cfg), &ranks.rank, &ranks.world));
    }
    if (user_backend && user_backend->job_world)
        ZR_TRY(user_backend->job_world(zr_config_start_ms(cfg), &ranks.job_rank, &ranks.job_world));
    return zr_world_of_user_comm(&ranks, cfg->launch.rank, cfg->launch.world, cfg->launch.rendezvous, out);
}

/* ---- the mesh ---- */

/* Writes "pp 1, dp_replicate auto, dp_shard 4, cp 1, tp 2". */
static void list_sizes(const struct zero_config *c, char *text, size_t n_text)
{
    char replicate[16] = "auto";
    if (c->mesh.dp_replicate != ZERO_AUTO)
        snprintf(replicate, sizeof replicate, "%d", c->mesh.dp_replicate);
    snprintf(text, n_text, "pp %d, dp_replicate %s, dp_shard %d, cp %d, tp %d", c->mesh.pp, replicate,
             c->mesh.dp_shard, c->mesh.cp, c->mesh.tp);
}

/* Computes the size of each axis. The dp axes are -1 if only the hosts decide. */
static int size_axes(const struct zero_config *c, struct zero_place *p)
{
    const int32_t size[] = {c->mesh.pp, c->mesh.cp, c->mesh.tp,
                            c->mesh.dp_replicate == ZERO_AUTO ? 1 : c->mesh.dp_replicate,
                            c->mesh.dp_shard ? c->mesh.dp_shard : 1};
    bool leaves_ranks = c->mesh.dp_replicate == ZERO_AUTO || !c->mesh.dp_shard;
    int64_t product = 1;
    char sizes[128];
    if (c->mesh.dp_replicate == ZERO_AUTO && c->mesh.dp_shard)
        return zr_fail(ZERO_ERR_ARG,
                       "dp_shard is %d, but dp_replicate auto sets it to the number of ranks on a host; "
                       "allowed: dp_shard 0 with dp_replicate auto",
                       c->mesh.dp_shard);
    for (size_t i = 0; i < sizeof size / sizeof *size; i++)
        product *= product <= p->world ? size[i] : 1;
    if (leaves_ranks ? p->world % product != 0 : product != p->world) {
        list_sizes(c, sizes, sizeof sizes);
        return leaves_ranks
                   ? zr_fail(ZERO_ERR_ARG, "the axes of mesh (%s) do not divide the world of %d ranks", sizes,
                             p->world)
                   : zr_fail(ZERO_ERR_ARG, "the axes of mesh (%s) do not multiply to the world of %d ranks",
                             sizes, p->world);
    }
    p->n_pp = c->mesh.pp;
    p->n_cp = c->mesh.cp;
    p->n_tp = c->mesh.tp;
    p->n_data = p->world / (p->n_pp * p->n_cp * p->n_tp);
    p->n_dp_replicate = c->mesh.dp_replicate;
    p->n_dp_shard = c->mesh.dp_replicate == ZERO_AUTO ? -1 : p->n_data / c->mesh.dp_replicate;
    return 0;
}

int zr_config_mesh(struct zr_config *c, int32_t rank, int32_t world)
{
    struct zero_place p = {.rank = rank, .world = world};
    ZR_TRY(size_axes(&c->user, &p));
    int32_t left = rank;
    p.tp = left % p.n_tp;
    left /= p.n_tp;
    p.cp = left % p.n_cp;
    left /= p.n_cp;
    p.data = left % p.n_data;
    p.pp = left / p.n_data;
    p.dp_replicate = p.n_dp_shard < 0 ? -1 : p.data / p.n_dp_shard;
    p.dp_shard = p.n_dp_shard < 0 ? -1 : p.data % p.n_dp_shard;
    c->place = p;
    c->options.tp = p.n_tp;
    c->options.cp = p.n_cp;
    c->options.pp = p.n_pp;
    return 0;
}

/* ---- the call ---- */

static int find_place(struct zr_config *c, struct zero_place *out)
{
    struct zr_world found;
    ZR_TRY(zr_find_rank(&c->user, &found));
    ZR_TRY(zr_config_mesh(c, found.rank, found.world));
    *out = c->place;
    out->local_rank = found.local_rank;
    return 0;
}

int zero_cp_rows(const struct zero_place *place, int64_t rows, enum zero_cp_order order, int64_t first[2],
                 int64_t n[2])
{
    if (!place || !first || !n)
        return zr_fail(ZERO_ERR_ARG, "zero_cp_rows: %s is NULL", !place ? "place" : !first ? "first" : "n");
    const int64_t cp = place->n_cp, chunks = order == ZERO_CP_ZIGZAG && cp > 1 ? 2 * cp : cp;
    if (order != ZERO_CP_CONTIGUOUS && order != ZERO_CP_ZIGZAG)
        return zr_fail(ZERO_ERR_ARG, "zero_cp_rows: order is %d; allowed: ZERO_CP_CONTIGUOUS, ZERO_CP_ZIGZAG",
                       (int)order);
    if (cp < 1 || place->cp < 0 || place->cp >= cp)
        return zr_fail(ZERO_ERR_ARG, "zero_cp_rows: place is rank %d of %d along cp; allowed: 0 to n_cp - 1",
                       place->cp, place->n_cp);
    if (rows < 0 || rows % chunks)
        return zr_fail(ZERO_ERR_ARG,
                       "zero_cp_rows: rows is %lld; allowed: 0 and more, a multiple of %lld (%scp, with %s)",
                       (long long)rows, (long long)chunks, chunks > cp ? "2 * " : "",
                       order == ZERO_CP_ZIGZAG ? "ZERO_CP_ZIGZAG" : "ZERO_CP_CONTIGUOUS");
    const int64_t each = rows / chunks;
    first[0] = place->cp * each;
    first[1] = chunks > cp ? (chunks - 1 - place->cp) * each : first[0] + each;
    n[0] = each;
    n[1] = chunks > cp ? each : 0;
    return 0;
}

int zero_find_place(const struct zero_config *cfg, struct zero_place *out)
{
    const struct zero_config plain = ZERO_CONFIG_INIT;
    struct zr_config config;
    if (!out)
        return zr_fail(ZERO_ERR_ARG, "zero_find_place: out is NULL");
    int err = zr_config_resolve_silently(cfg ? cfg : &plain, &config);
    if (err)
        return zr_fail_more(err, "zero_find_place");
    err = find_place(&config, out);
    zr_config_release(&config);
    return err ? zr_fail_more(err, "zero_find_place") : 0;
}
