/* room.c: how much memory is left.
 *
 * Pages of a memfd are handed out until the kernel kills somebody for them, so a communicator asks before it
 * takes. */
#include "comm/shm/shm.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The number after key at the start of a line of file, or otherwise. */
static int64_t read_number(const char *path, const char *key, int64_t otherwise)
{
    FILE *f = fopen(path, "re");
    if (!f)
        return otherwise;
    char line[256];
    size_t n = strlen(key);
    int64_t found = otherwise;
    while (fgets(line, sizeof line, f)) {
        if (strncmp(line, key, n) != 0)
            continue;
        char *end;
        long long v = strtoll(line + n, &end, 10);
        if (end != line + n)
            found = v;
        break;
    }
    fclose(f);
    return found;
}

/* What the limits of our cgroup (version 2), and of those around it, leave. Page cache is not counted, as it
 * can be taken back. */
static int64_t cgroup_room(void)
{
    char line[512], path[1024], file[1100];
    int64_t room = INT64_MAX;
    FILE *f = fopen("/proc/self/cgroup", "re");
    if (!f)
        return room;
    path[0] = 0;
    while (fgets(line, sizeof line, f)) {
        line[strcspn(line, "\n")] = 0;
        if (strncmp(line, "0::/", 4) == 0)
            snprintf(path, sizeof path, "/sys/fs/cgroup%s", line + 3);
    }
    fclose(f);
    while (strlen(path) >= strlen("/sys/fs/cgroup")) {
        snprintf(file, sizeof file, "%s/memory.max", path);
        int64_t most = read_number(file, "", -1); /* "max" is no number: no limit */
        if (most >= 0) {
            snprintf(file, sizeof file, "%s/memory.stat", path);
            int64_t used = read_number(file, "anon ", 0) + read_number(file, "shmem ", 0);
            int64_t left = most > used ? most - used : 0;
            room = left < room ? left : room;
        }
        *strrchr(path, '/') = 0;
    }
    return room;
}

int64_t zr_memory_room(void)
{
    int64_t kib = read_number("/proc/meminfo", "MemAvailable:", -1);
    int64_t swap_kib = read_number("/proc/meminfo", "SwapFree:", 0);
    int64_t host = kib < 0 ? INT64_MAX : (kib + swap_kib) * 1024;
    int64_t group = cgroup_room();
    return host < group ? host : group;
}
