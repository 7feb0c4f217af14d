/* memory.c: is there room for the plan? Asked before anything is allocated, so that the answer is an error
 * with a table and not the kernel's killer in the middle of the first step. */
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

static int refuse(const struct zr_plan *plan, int64_t wanted, const char *where, int64_t free_bytes)
{
    char table[1024];
    zr_plan_table(plan, table, sizeof table);
    return zr_fail(ZR_ERR_NOMEM, "the plan needs %lld bytes for each %s, which has %lld free:\n%s",
                   (long long)wanted, where, (long long)free_bytes, table);
}

int zr_memory_check(struct zr_device *dev, const struct zr_plan *plan, int n_local)
{
    int64_t on_host = plan->total_bytes, free_bytes, total_bytes;
    if (dev->ops->memory) {
        int err = dev->ops->memory(dev, &free_bytes, &total_bytes);
        if (err)
            return err;
        on_host = plan->host_bytes;
        if (plan->total_bytes - on_host > free_bytes)
            return refuse(plan, plan->total_bytes - on_host, "rank on its GPU", free_bytes);
    }
    int64_t host = host_available(), group = group_available();
    free_bytes = host < 0 ? group : group < 0 ? host : zr_min(host, group);
    if (free_bytes < 0 || on_host <= free_bytes / n_local)
        return 0;
    char where[64];
    snprintf(where, sizeof where, "of %d ranks on this host", n_local);
    return refuse(plan, on_host, where, free_bytes);
}
