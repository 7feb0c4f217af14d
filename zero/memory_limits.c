/* memory_limits.c: the limits that memory control groups set this process, of version 2 or 1: its own
 * group's, and those of the groups that this one lies in. */
#include "zero/memory_limits.h"

#include "shard/layout.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

/* What one version calls its files. */
struct version {
    const char *mount, *limit, *used, *cache[2];
};

static const struct version versions[] = {
    {"/sys/fs/cgroup", "memory.max", "memory.current", {"inactive_file %lld", "active_file %lld"}},
    {"/sys/fs/cgroup/unified", "memory.max", "memory.current", {"inactive_file %lld", "active_file %lld"}},
    {"/sys/fs/cgroup/memory",
     "memory.limit_in_bytes",
     "memory.usage_in_bytes",
     {"total_inactive_file %lld", "total_active_file %lld"}}};
enum { V2, V2_BESIDE_V1, V1 };

/* Version 1 has no word for "none", but a number of pages that no machine has. */
#define NO_LIMIT (INT64_C(1) << 60)

/* A number of bytes from a one-number file, or -1 ("max", or no such file). */
static int64_t read_number(const char *folder, const char *name)
{
    char path[ZR_GROUP_PATH_BYTES + 32], text[64], *end;
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *f = fopen(path, "r");
    if (!f)
        return -1;
    char *got = fgets(text, sizeof text, f);
    fclose(f);
    if (!got)
        return -1;
    long long n = strtoll(text, &end, 10);
    return end == text || n < 0 || n >= NO_LIMIT ? -1 : n;
}

/* Page cache counts as used, but can be taken back. */
static int64_t read_cache(const char *folder, const struct version *v)
{
    char path[ZR_GROUP_PATH_BYTES + 32], line[256];
    int64_t sum = 0;
    long long n;
    snprintf(path, sizeof path, "%s/memory.stat", folder);
    FILE *f = fopen(path, "r");
    while (f && fgets(line, sizeof line, f))
        for (int i = 0; i < 2; i++)
            if (sscanf(line, v->cache[i], &n) == 1)
                sum += n;
    if (f)
        fclose(f);
    return sum;
}

static void add_limit(const char *folder, const struct version *v, struct zr_memory_limit *out, int *n)
{
    struct stat st;
    int64_t limit = read_number(folder, v->limit), used = read_number(folder, v->used);
    if (*n == ZR_MOST_MEMORY_LIMITS || limit < 0 || used < 0 || stat(folder, &st))
        return;
    struct zr_memory_limit *l = &out[(*n)++];
    l->group = (uint64_t)st.st_dev << 40 ^ (uint64_t)st.st_ino;
    l->free_bytes = zr_max(limit - used + read_cache(folder, v), 0);
    l->n_ranks = 1;
    snprintf(l->path, sizeof l->path, "%s", folder);
}

/* The group, whose path the kernel says, and upwards. In a container the path may be one of the host's, which
 * is not there: then what is mounted is the container's own. */
static void add_groups(const char *path, const struct version *v, struct zr_memory_limit *out, int *n)
{
    char folder[ZR_GROUP_PATH_BYTES];
    struct stat st;
    size_t top = strlen(v->mount);
    int length = snprintf(folder, sizeof folder, "%s%s", v->mount, path);
    if (length < 0 || (size_t)length >= sizeof folder || stat(folder, &st))
        snprintf(folder, sizeof folder, "%s", v->mount);
    for (;;) {
        size_t end = strlen(folder);
        while (end > top && folder[end - 1] == '/')
            folder[--end] = 0;
        add_limit(folder, v, out, n);
        if (end <= top)
            return;
        *strrchr(folder, '/') = 0;
    }
}

/* Whether a list such as "cpu,memory" names memory. */
static bool has_memory(const char *list)
{
    for (; *list; list += strcspn(list, ","), list += *list == ',')
        if (!strncmp(list, "memory", 6) && (!list[6] || list[6] == ','))
            return true;
    return false;
}

int zr_memory_limits(struct zr_memory_limit *out)
{
    char line[ZR_GROUP_PATH_BYTES + 128];
    int n = 0;
    FILE *f = fopen("/proc/self/cgroup", "r");
    while (f && fgets(line, sizeof line, f)) { /* "4:memory:/path", and of version 2 "0::/path" */
        char *list = strchr(line, ':'), *path = list ? strchr(list + 1, ':') : NULL;
        if (!path)
            continue;
        *path++ = 0;
        path[strcspn(path, "\n")] = 0;
        if (has_memory(list + 1)) {
            add_groups(path, &versions[V1], out, &n);
        } else if (!list[1]) {
            add_groups(path, &versions[V2], out, &n);
            add_groups(path, &versions[V2_BESIDE_V1], out, &n);
        }
    }
    if (f)
        fclose(f);
    return n;
}
