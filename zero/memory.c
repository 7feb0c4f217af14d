/* SPDX-License-Identifier: Apache-2.0 */
/* memory.c: checks that there is memory for the plan. It runs before anything is allocated, so that a lack of
 * memory is an error with a table. Otherwise the kernel might kill the process in the middle of the first
 * step. */
#include "shard/engine/check/bracket_copies.h"
#include "zero/context.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { WHERE_BYTES = ZR_GROUP_PATH_BYTES + 64 };

/* What some ranks need of one memory together, and how much is free. */
struct shared {
    int64_t wanted, free_bytes;
    int n_ranks;
    /* each of them needs as much as this rank */
    bool alike;
    /* "2 ranks on this machine" */
    char where[WHERE_BYTES];
};

/* Adds up the ranks that share a memory. group: bits of a control group. 0: the memory of the machine. */
static void add_sharers(const struct zero_ctx *z, uint32_t group, struct shared *s)
{
    *s = (struct shared){.alike = true};
    for (int r = 0; r < z->world.world; r++) {
        const struct zr_sharer *x = &z->sharers[r];
        bool shares = group ? (x->groups & group) != 0 : x->same_machine;
        if (!shares && r != z->world.rank)
            continue;
        s->n_ranks++;
        s->wanted = x->bytes > INT64_MAX - s->wanted ? INT64_MAX : s->wanted + x->bytes;
        s->alike &= x->bytes == z->sharers[z->world.rank].bytes;
    }
}

/* Returns the bit of a group that was seen when ranks agreed on the plan. An unknown group gets a bit that no
 * rank has. */
static uint32_t bit_of_group(const struct zero_ctx *z, const struct zr_memory_group *g)
{
    int k = 0;
    while (k < z->memory.n_groups && z->memory.group[k].id != g->id)
        k++;
    return UINT32_C(1) << k;
}

/* Whether the host and each memory control group of this rank have what their ranks need. If not, out
 * describes the first that lacks memory. */
static bool fits_host(const struct zero_ctx *z, struct shared *out)
{
    struct zr_host_memory m;
    zr_host_memory_look("", &m);
    add_sharers(z, 0, out);
    out->free_bytes = m.free_bytes;
    snprintf(out->where, WHERE_BYTES, "%d ranks on this machine", out->n_ranks);
    for (int i = 0; out->wanted <= out->free_bytes && i < m.n_groups; i++) {
        const struct zr_memory_group *g = &m.group[i];
        add_sharers(z, bit_of_group(z, g), out);
        out->free_bytes = g->free_bytes;
        snprintf(out->where, WHERE_BYTES, "%d ranks in memory control group %s", out->n_ranks, g->path);
    }
    return out->wanted <= out->free_bytes;
}

static int refuse(const struct zr_plan *plan, int64_t wanted, const char *where, int64_t free_bytes,
                  const char *more)
{
    char table[1024];
    zr_plan_table(plan, table, sizeof table);
    return zr_fail(ZERO_ERR_NOMEM,
                   "the plan needs %lld bytes for each %s, which has %lld free%s; a higher stage, more ranks "
                   "or less prefetch needs less:\n%s",
                   (long long)wanted, where, (long long)free_bytes, more, table);
}

/* cudaMalloc and ncclMemAlloc map memory in pieces of 2 MiB (cuMemGetAllocationGranularity). Smaller
 * allocations may share a piece, but this is not counted on. */
enum { GPU_PIECE_BYTES = 2 << 20, GPU_ALIGN_BYTES = 4096 };

static int64_t on_gpu(int64_t bytes)
{
    return bytes ? zr_round_up(bytes + GPU_ALIGN_BYTES, GPU_PIECE_BYTES) : 0;
}

/* Counts each allocation that the engine makes. */
static int64_t gpu_bytes(const struct zero_ctx *z)
{
    const struct zr_plan *p = z->plan;
    int64_t bytes = on_gpu(p->gather_bytes) + on_gpu(p->reduce_bytes) + on_gpu(p->control_bytes) +
                    on_gpu(p->tp_bytes) + on_gpu(p->cp_bytes) + on_gpu(p->pipe_bytes) + on_gpu(p->tied_bytes);
    if (p->states == ZERO_STATES_DEVICE)
        bytes += on_gpu(p->master_bytes);
    for (int i = 0; i < p->n_states && p->states == ZERO_STATES_DEVICE; i++)
        bytes += on_gpu(p->state_bytes[i]);
    return bytes +
           (z->config.options.check && !p->placement.model_holds ? zr_bracket_copies_need(z->layout) : 0);
}

static int n_communicators(const struct zero_ctx *z)
{
    int n = 0;
    for (int r = 0; r < ZR_ROLES; r++)
        n += z->comm[r] && z->comm[r]->group.size > 1 &&
             (r != ZR_ROLE_CONTROL || z->comm[r] != z->comm[ZR_ROLE_REDUCE]);
    return n;
}

int zr_memory_check_gpu(struct zero_ctx *z, bool communicators)
{
    int64_t free_bytes, total_bytes, wanted = gpu_bytes(z),
                                     exact = z->plan->total_bytes - z->plan->host_bytes;
    if (!z->device->ops->memory || (communicators && !z->backend->library))
        return 0;
    ZR_TRY(z->device->ops->memory(z->device, &free_bytes, &total_bytes));
    char more[256] = "";
    int64_t taken = z->gpu_free_bytes - free_bytes;
    if (wanted > free_bytes && exact <= free_bytes)
        snprintf(more, sizeof more, " (%lld as it is allocated, in pieces of %d)", (long long)wanted,
                 GPU_PIECE_BYTES);
    if (communicators && taken > 0)
        snprintf(more + strlen(more), sizeof more - strlen(more), " after %s's communicators took %lld",
                 z->backend->library, (long long)taken);
    if (wanted > free_bytes)
        return refuse(z->plan, exact, "rank on its GPU", free_bytes, more);
    z->gpu_free_bytes = free_bytes;
    /* This estimate is no reason to refuse. */
    int64_t later = z->backend->library_bytes * n_communicators(z);
    if (communicators && wanted + later > free_bytes)
        zr_warn(
            z->config.options.log,
            "the plan leaves %lld bytes of the GPU's memory free; %s takes up to about %lld more with its "
            "first collectives",
            (long long)(free_bytes - wanted), z->backend->library, (long long)later);
    return 0;
}

int64_t zr_memory_host_bytes(const struct zero_ctx *z)
{
    return z->device->ops->memory ? z->plan->host_bytes : z->plan->total_bytes;
}

int zr_memory_check(struct zero_ctx *z)
{
    struct shared s;
    char table[1024], where[WHERE_BYTES + 4];
    int64_t own = zr_memory_host_bytes(z);
    z->sharers[z->world.rank].bytes = own;
    if (fits_host(z, &s))
        return 0;
    snprintf(where, sizeof where, "of %s", s.where);
    if (s.alike)
        return refuse(z->plan, own, where, s.free_bytes, "");
    zr_plan_table(z->plan, table, sizeof table);
    return zr_fail(ZERO_ERR_NOMEM,
                   "the plans of %s need %lld bytes together, but %lld are free; this rank's needs %lld:\n%s",
                   s.where, (long long)s.wanted, (long long)s.free_bytes, (long long)own, table);
}

int zr_memory_ask(struct zero_ctx *z, int64_t bytes)
{
    int64_t *all = z->from_all;
    z->sharers[z->world.rank].bytes = bytes;
    if (z->world.world == 1)
        return 0;
    int err = zr_engine_exchange(z->engine, &bytes, sizeof bytes, all);
    for (int r = 0; !err && r < z->world.world; r++)
        z->sharers[r].bytes = all[r];
    return err;
}

int zr_memory_check_room(struct zero_ctx *z, int64_t bytes, bool host)
{
    int64_t free_bytes = -1, total_bytes;
    struct shared s;
    if (host && fits_host(z, &s))
        return 0;
    if (host && s.alike)
        return zr_fail(ZERO_ERR_NOMEM, "needs %lld bytes for each of %s, which has %lld free",
                       (long long)bytes, s.where, (long long)s.free_bytes);
    if (host)
        return zr_fail(ZERO_ERR_NOMEM, "needs %lld bytes for %s together, but %lld are free",
                       (long long)s.wanted, s.where, (long long)s.free_bytes);
    int err = z->device->ops->memory ? z->device->ops->memory(z->device, &free_bytes, &total_bytes) : 0;
    if (err || free_bytes < 0 || bytes <= free_bytes)
        return err;
    return zr_fail(ZERO_ERR_NOMEM, "needs %lld bytes on this GPU, which has %lld free", (long long)bytes,
                   (long long)free_bytes);
}
