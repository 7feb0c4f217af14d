/* memory.c: is there room for the plan? Asked before anything is allocated, so that the answer is an error
 * with a table and not the kernel's killer in the middle of the first step. */
#include "shard/check_places.h"
#include "zero/context.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A number of bytes from a one-number file, or -1 ("max", or no such file). */
static int64_t read_number(const char *path)
{
    char text[64];
    FILE *f = fopen(path, "r");
    if (!f)
        return -1;
    char *got = fgets(text, sizeof text, f);
    fclose(f);
    if (!got)
        return -1;
    char *end;
    long long n = strtoll(text, &end, 10);
    return end == text ? -1 : n;
}

static int64_t host_available(void)
{
    char line[256];
    long long kib = -1;
    FILE *f = fopen("/proc/meminfo", "r");
    while (f && fgets(line, sizeof line, f))
        if (sscanf(line, "MemAvailable: %lld kB", &kib) == 1)
            break;
    if (f)
        fclose(f);
    return kib < 0 ? -1 : kib * 1024;
}

/* What the container may still take, control groups version 2. Page cache counts as used there but can be
 * taken back. */
static int64_t group_available(void)
{
    int64_t max = read_number("/sys/fs/cgroup/memory.max"),
            used = read_number("/sys/fs/cgroup/memory.current");
    if (max < 0 || used < 0)
        return -1;
    char line[256];
    long long cache = 0;
    FILE *f = fopen("/sys/fs/cgroup/memory.stat", "r");
    while (f && fgets(line, sizeof line, f))
        if (sscanf(line, "inactive_file %lld", &cache) == 1)
            break;
    if (f)
        fclose(f);
    return max - used + cache;
}

/* -1: nobody says. */
static int64_t free_on_host(void)
{
    int64_t host = host_available(), group = group_available();
    return host < 0 ? group : group < 0 ? host : zr_min(host, group);
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
    int64_t bytes = on_gpu(p->gather_bytes) + on_gpu(p->reduce_bytes) + on_gpu(p->master_elems * size);
    for (int i = 0; i < p->n_states; i++)
        bytes += on_gpu(p->state_elems[i] * size);
    return bytes + (z->config.options.check && !p->grad_resident ? zr_places_need(z->layout) : 0);
}

/* NCCL makes its connections with the first collective that wants them (since 2.22), and then takes, for each
 * channel and direction, buffers of three protocols: NCCL_BUFFSIZE (4 MiB), and by the constants of its
 * init.cc 512 KiB and 4.7 MiB. 32 channels are what it uses at most on one NVLink switch; there are two
 * communicators. A guess, and so not refused. */
enum { NCCL_CHANNEL_BYTES = (4 << 20) + (512 << 10) + 4915200, NCCL_CHANNELS = 32, NCCL_COMMS = 2 };

int zr_memory_check_gpu(struct zero_ctx *z, bool communicators)
{
    int64_t free_bytes, total_bytes, wanted = gpu_bytes(z),
                                     exact = z->plan->total_bytes - z->plan->host_bytes;
    if (!z->device->ops->memory || (communicators && !z->nccl))
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
        snprintf(more + strlen(more), sizeof more - strlen(more), " after NCCL's communicators took %lld",
                 (long long)taken);
    if (wanted > free_bytes)
        return refuse(z->plan, exact, "rank on its GPU", free_bytes, more);
    z->gpu_free_bytes = free_bytes;
    int64_t later = (int64_t)NCCL_CHANNEL_BYTES * NCCL_CHANNELS * NCCL_COMMS;
    if (communicators && wanted + later > free_bytes)
        zr_warn(
            z->config.options.log,
            "the plan leaves %lld bytes of the GPU's memory free; NCCL takes up to about %lld more with its "
            "first collectives",
            (long long)(free_bytes - wanted), (long long)later);
    return 0;
}

int zr_memory_check(struct zero_ctx *z, int n_local)
{
    int64_t on_host = z->device->ops->memory ? z->plan->host_bytes : z->plan->total_bytes;
    int err = zr_memory_check_gpu(z, false);
    if (err)
        return err;
    int64_t free_bytes = free_on_host();
    if (free_bytes < 0 || on_host <= free_bytes / n_local)
        return 0;
    char where[64];
    snprintf(where, sizeof where, "of %d ranks on this host", n_local);
    return refuse(z->plan, on_host, where, free_bytes, "");
}

int zr_memory_check_room(struct zero_ctx *z, int64_t bytes, bool on_host)
{
    int64_t free_bytes = -1, total_bytes;
    int n = on_host ? z->world.world : 1; /* ranks of one host */
    int err = 0;
    if (on_host)
        free_bytes = free_on_host();
    else if (z->device->ops->memory)
        err = z->device->ops->memory(z->device, &free_bytes, &total_bytes);
    if (err || free_bytes < 0 || bytes <= free_bytes / n)
        return err;
    return zr_fail(ZR_ERR_NOMEM, "needs %lld bytes for each of %d ranks on this %s, which has %lld free",
                   (long long)bytes, n, on_host ? "host" : "GPU", (long long)free_bytes);
}
