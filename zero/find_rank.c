/* SPDX-License-Identifier: Apache-2.0 */
/* find_rank.c: which rank this process is, for zero_wrap, and for programs that must know before it. */
#include "zero/context.h"

int zr_find_rank(const struct zero_config *cfg, struct zr_world *out)
{
    struct zr_lent_ranks ranks = {0};
    void *lent;
    const struct zr_backend *of = zr_backend_of_lent(cfg, &lent);
    const struct zr_backend *asked = zr_backend_row(cfg->launch.backend);
    if (!of)
        return (asked && asked->world_meet ? zr_world_find_by_mpi : zr_world_find)(
            cfg->launch.rank, cfg->launch.world, cfg->launch.rendezvous, out);
    ranks.name = of->lent_name;
    int err = of->lent_world(lent, zr_config_start_ms(cfg), &ranks.rank, &ranks.world);
    if (!err && of->job_world)
        err = of->job_world(zr_config_start_ms(cfg), &ranks.job_rank, &ranks.job_world);
    return err ? err
               : zr_world_lent(&ranks, cfg->launch.rank, cfg->launch.world, cfg->launch.rendezvous, out);
}

static int resolve_and_find(const struct zero_config *cfg, struct zr_world *out)
{
    const struct zero_config plain = ZERO_CONFIG_INIT;
    struct zr_config config;
    int err = zr_config_resolve_silently(cfg ? cfg : &plain, &config);
    if (err)
        return err;
    err = zr_find_rank(&config.user, out);
    zr_config_release(&config);
    return err;
}

int zero_find_rank(const struct zero_config *cfg, int32_t *rank, int32_t *world, int32_t *local_rank)
{
    struct zr_world found;
    int err = resolve_and_find(cfg, &found);
    if (err)
        return zr_fail_more(err, "zero_find_rank");
    if (rank)
        *rank = found.rank;
    if (world)
        *world = found.world;
    if (local_rank)
        *local_rank = found.local_rank;
    return 0;
}
