/* SPDX-License-Identifier: Apache-2.0 */
/* host_memory.c: reads the host's free memory, and the limits of this process's memory control groups.
 * Documentation/admin-guide/cgroup-v1/memory.rst and cgroup-v2.rst of Linux describe the files. */
#include "kernels/host/host_memory.h"

#include <ctype.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

enum { ROOT_BYTES = 256, PATH_BYTES = ROOT_BYTES + ZR_GROUP_PATH_BYTES + 64, N_CACHE = 3 };

/* The names of the files in one version of control groups. */
struct version {
    const char *mount, *limit, *used;
    /* Version 2 limits swap alone, version 1 memory and swap together. */
    const char *swap_limit, *swap_used;
    const char *cache[N_CACHE]; /* keys of memory.stat: memory that counts as used, but can be taken back */
    bool swap_alone;
};

#define V2_FILES                                                                                             \
    "memory.max", "memory.current", "memory.swap.max", "memory.swap.current",                                \
        {"inactive_file ", "active_file ", "slab_reclaimable "}, true

static const struct version v2 = {"/sys/fs/cgroup", V2_FILES};
static const struct version v2_beside_v1 = {"/sys/fs/cgroup/unified", V2_FILES};
static const struct version v1 = {"/sys/fs/cgroup/memory",
                                  "memory.limit_in_bytes",
                                  "memory.usage_in_bytes",
                                  "memory.memsw.limit_in_bytes",
                                  "memory.memsw.usage_in_bytes",
                                  {"total_inactive_file ", "total_active_file ", NULL},
                                  false};

/* Version 1 has no word for "no limit". It uses a number of pages that no machine has. */
#define NO_LIMIT (INT64_C(1) << 60)

struct search {
    const char *root;
    struct zr_host_memory *out;
    int64_t swap;                       /* least swap that the host and all groups leave */
    int64_t both[ZR_MAX_MEMORY_GROUPS]; /* limit of memory and swap together, for version 1 */
};

static int64_t least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static int64_t not_negative(int64_t x)
{
    return x > 0 ? x : 0;
}

/* Returns the number at the start of a text, after spaces. -1: there is none, or it means "no limit". */
static int64_t parse(const char *text)
{
    text += strspn(text, " \t");
    if (!isdigit((unsigned char)*text))
        return -1;
    long long n = strtoll(text, NULL, 10);
    return n < NO_LIMIT ? n : -1;
}

/* Returns the sum of the numbers behind the keys, each at the start of a line. -1: none of them is there. The
 * key "" matches every line, for files that hold one number. */
static int64_t read_numbers(const char *path, const char *const *keys, int n_keys)
{
    char *line = NULL;
    size_t n_line = 0;
    int64_t sum = -1;
    FILE *f = fopen(path, "re");
    while (f && getline(&line, &n_line, f) > 0)
        for (int i = 0; i < n_keys && keys[i]; i++) {
            size_t n = strlen(keys[i]);
            int64_t number = strncmp(line, keys[i], n) ? -1 : parse(line + n);
            if (number >= 0)
                sum = not_negative(sum) + number;
        }
    free(line);
    if (f)
        fclose(f);
    return sum;
}

static int64_t read_in(const char *root, const char *folder, const char *name, const char *key)
{
    char path[PATH_BYTES];
    snprintf(path, sizeof path, "%s%s/%s", root, folder, name);
    return read_numbers(path, &key, 1);
}

/* Returns what a limit leaves, or INT64_MAX if there is no limit or it cannot be read. */
static int64_t left(const struct search *s, const char *folder, const char *limit, const char *used)
{
    int64_t most = read_in(s->root, folder, limit, ""), taken = read_in(s->root, folder, used, "");
    return most < 0 || taken < 0 ? INT64_MAX : not_negative(most - taken);
}

static void add_group(struct search *s, const struct version *v, const char *folder)
{
    char path[PATH_BYTES];
    struct stat st;
    int64_t memory = left(s, folder, v->limit, v->used), both = INT64_MAX,
            swap = left(s, folder, v->swap_limit, v->swap_used);
    snprintf(path, sizeof path, "%s%s/memory.stat", s->root, folder);
    int64_t cache = not_negative(read_numbers(path, v->cache, N_CACHE));
    if (v->swap_alone)
        s->swap = least(s->swap, swap);
    else if (swap < INT64_MAX)
        both = swap + cache;
    snprintf(path, sizeof path, "%s%s", s->root, folder);
    if (s->out->n_groups == ZR_MAX_MEMORY_GROUPS || (memory == INT64_MAX && both == INT64_MAX) ||
        stat(path, &st))
        return;
    s->both[s->out->n_groups] = both;
    struct zr_memory_group *g = &s->out->group[s->out->n_groups++];
    g->id = (uint64_t)st.st_dev << 40 ^ (uint64_t)st.st_ino;
    g->free_bytes = memory == INT64_MAX ? memory : memory + cache;
    snprintf(g->path, sizeof g->path, "%s", folder);
}

static bool is_there(const struct search *s, const char *folder)
{
    char path[PATH_BYTES];
    struct stat st;
    snprintf(path, sizeof path, "%s%s", s->root, folder);
    return !strstr(folder, "/..") && !stat(path, &st) && S_ISDIR(st.st_mode);
}

/* Adds the group, whose path the kernel gives, and those around it. In a container the path may be one of the
 * host's, which does not exist here. Then the mount point is the container's group. */
static void add_groups(struct search *s, const struct version *v, const char *group)
{
    char folder[ZR_GROUP_PATH_BYTES];
    size_t top = strlen(v->mount);
    int length = snprintf(folder, sizeof folder, "%s%s", v->mount, group);
    if (length < 0 || (size_t)length >= sizeof folder || !is_there(s, folder))
        snprintf(folder, sizeof folder, "%s", v->mount);
    for (;;) {
        size_t end = strlen(folder);
        while (end > top && folder[end - 1] == '/')
            folder[--end] = 0;
        add_group(s, v, folder);
        if (end <= top)
            return;
        *strrchr(folder, '/') = 0;
    }
}

/* Returns whether a list such as "cpu,memory" names memory. */
static bool has_memory(const char *list)
{
    for (; *list; list += strcspn(list, ","), list += *list == ',')
        if (!strncmp(list, "memory", 6) && (!list[6] || list[6] == ','))
            return true;
    return false;
}

/* Reads a line of /proc/self/cgroup, such as "4:memory:/group", or "0::/group" for version 2. */
static void add_line(struct search *s, char *line)
{
    char *list = strchr(line, ':'), *group = list ? strchr(list + 1, ':') : NULL;
    if (!group)
        return;
    *group++ = 0;
    group[strcspn(group, "\n")] = 0;
    if (*group != '/')
        return;
    if (has_memory(list + 1)) {
        add_groups(s, &v1, group);
    } else if (!list[1]) {
        add_groups(s, &v2, group);
        add_groups(s, &v2_beside_v1, group);
    }
}

/* Returns the free KiB of swap in compressed memory. A line of /proc/swaps has file, type, size, used and
 * priority. */
static int64_t zram_free_kib(const char *root)
{
    char path[PATH_BYTES], *line = NULL;
    size_t n_line = 0;
    int64_t kib = 0;
    snprintf(path, sizeof path, "%s/proc/swaps", root);
    FILE *f = fopen(path, "re");
    while (f && getline(&line, &n_line, f) > 0) {
        long long size, used;
        if (!strncmp(line, "/dev/zram", 9) && sscanf(line, "%*s %*s %lld %lld", &size, &used) == 2)
            kib += not_negative(size - used);
    }
    free(line);
    if (f)
        fclose(f);
    return kib;
}

void zr_host_memory_look(const char *root, struct zr_host_memory *out)
{
    char path[PATH_BYTES], *line = NULL;
    size_t n_line = 0;
    *out = (struct zr_host_memory){0};
    int64_t available_kib = read_in(root, "/proc", "meminfo", "MemAvailable:"),
            swap_kib = read_in(root, "/proc", "meminfo", "SwapFree:") - zram_free_kib(root);
    struct search s = {.root = root, .out = out, .swap = not_negative(swap_kib) * 1024};
    snprintf(path, sizeof path, "%s/proc/self/cgroup", root);
    FILE *f = fopen(path, "re");
    while (f && getline(&line, &n_line, f) > 0)
        add_line(&s, line);
    free(line);
    if (f)
        fclose(f);
    out->swap_bytes = s.swap;
    out->free_bytes = available_kib < 0 ? INT64_MAX : available_kib * 1024 + s.swap;
    for (int i = 0; i < out->n_groups; i++) {
        int64_t memory = out->group[i].free_bytes;
        out->group[i].free_bytes = least(memory < INT64_MAX ? memory + s.swap : memory, s.both[i]);
    }
}

int64_t zr_host_memory_least(const struct zr_host_memory *m)
{
    int64_t bytes = m->free_bytes;
    for (int i = 0; i < m->n_groups; i++)
        bytes = least(bytes, m->group[i].free_bytes);
    return bytes;
}
