/* memory.c: is there room for the plan? Asked before anything is allocated, so that the answer is an error
 * with a table and not the kernel's killer in the middle of the first step. */
#include "shard/engine/check_places.h"
#include "zero/context.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { WHERE_BYTES = ZR_GROUP_PATH_BYTES + 64 };

/* What there is now, each group with as many ranks as were counted in it. */
static void look(const struct zero_ctx *z, struct zr_host_memory *m)
{
    zr_host_memory_look("", m);
    for (int i = 0; i < m->n_groups; i++)
        for (int k = 0; k < z->memory.n_groups; k++)
            if (z->memory.group[k].id == m->group[i].id)
                m->group[i].n_ranks = z->memory.group[k].n_ranks;
}

/* Whether there are so many bytes for each rank; else in where[WHERE_BYTES], "of 2 ranks on this machine",
 * who they are, and in *free_bytes what there is for all of them. */
static bool fits_host(const struct zero_ctx *z, int64_t bytes, char *where, int64_t *free_bytes)
{
    struct zr_host_memory m;
    int n_ranks = zr_topology_on_machine(&z->topology);
    zr_host_memory_look("", &m);
    *free_bytes = m.free_bytes;
    snprintf(where, WHERE_BYTES, "of %d ranks on this machine", n_ranks);
    return bytes <= *free_bytes / n_ranks;
}

static bool fits_groups(const struct zero_ctx *z, int64_t bytes, char *where, int64_t *free_bytes)
{
    struct zr_host_memory m;
    look(z, &m);
    for (int i = 0; i < m.n_groups; i++) {
        const struct zr_memory_group *g = &m.group[i];
        *free_bytes = g->free_bytes;
        snprintf(where, WHERE_BYTES, "of %d ranks in memory control group %s", g->n_ranks, g->path);
        if (bytes > *free_bytes / g->n_ranks)
            return false;
    }
    return true;
}

static int refuse(const struct zr_plan *plan, int64_t wanted, const char *where, int64_t free_bytes,
                  const char *more)
{
    char table[1024];
    zr_plan_table(plan, table, sizeof table);
    return zr_fail(ZR_ERR_NOMEM, "the plan needs %lld bytes for each %s, which has %lld free%s:\n%s",
                   (long long)wanted, where, (long long)free_bytes, more, table);
}

/* cudaMalloc and ncclMemAlloc map memory in pieces of 2 MiB (cuMemGetAllocationGranularity). What is smaller
 * may share one with others; that is not counted on. */
enum { GPU_PIECE_BYTES = 2 << 20, GPU_ALIGN_BYTES = 4096 };

static int64_t on_gpu(int64_t bytes)
{
    return bytes ? zr_round_up(bytes + GPU_ALIGN_BYTES, GPU_PIECE_BYTES) : 0;
}

/* Allocation by allocation, as the engine makes them. */
static int64_t gpu_bytes(const struct zero_ctx *z)
{
    const struct zr_plan *p = z->plan;
    const int64_t size = sizeof(float);
    int64_t bytes = on_gpu(p->gather_bytes) + on_gpu(p->reduce_bytes) + on_gpu(p->control_bytes) +
                    on_gpu(p->master_elems * size);
    for (int i = 0; i < p->n_states; i++)
        bytes += on_gpu(p->state_elems[i] * size);
    return bytes + (z->config.options.check && !p->place.model_holds ? zr_places_need(z->layout) : 0);
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
    int err = z->device->ops->memory(z->device, &free_bytes, &total_bytes);
    if (err)
        return err;
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
    /* A guess, and so not refused. */
    int64_t later = z->backend->library_bytes * n_communicators(z);
    if (communicators && wanted + later > free_bytes)
        zr_warn(
            z->config.options.log,
            "the plan leaves %lld bytes of the GPU's memory free; %s takes up to about %lld more with its "
            "first collectives",
            (long long)(free_bytes - wanted), z->backend->library, (long long)later);
    return 0;
}

static int64_t on_host(const struct zero_ctx *z)
{
    return z->device->ops->memory ? z->plan->host_bytes : z->plan->total_bytes;
}

int zr_memory_check(struct zero_ctx *z)
{
    int64_t free_bytes;
    char where[WHERE_BYTES];
    int err = zr_memory_check_gpu(z, false);
    if (!err && !fits_host(z, on_host(z), where, &free_bytes))
        err = refuse(z->plan, on_host(z), where, free_bytes, "");
    return err;
}

int zr_memory_check_groups(struct zero_ctx *z)
{
    int64_t free_bytes;
    char where[WHERE_BYTES];
    return fits_groups(z, on_host(z), where, &free_bytes)
               ? 0
               : refuse(z->plan, on_host(z), where, free_bytes, "");
}

int zr_memory_check_room(struct zero_ctx *z, int64_t bytes, bool host)
{
    int64_t free_bytes = -1, total_bytes;
    char where[WHERE_BYTES];
    if (host)
        return fits_host(z, bytes, where, &free_bytes) && fits_groups(z, bytes, where, &free_bytes)
                   ? 0
                   : zr_fail(ZR_ERR_NOMEM, "needs %lld bytes for each %s, which has %lld free",
                             (long long)bytes, where, (long long)free_bytes);
    int err = z->device->ops->memory ? z->device->ops->memory(z->device, &free_bytes, &total_bytes) : 0;
    if (err || free_bytes < 0 || bytes <= free_bytes)
        return err;
    return zr_fail(ZR_ERR_NOMEM, "needs %lld bytes on this GPU, which has %lld free", (long long)bytes,
                   (long long)free_bytes);
}
