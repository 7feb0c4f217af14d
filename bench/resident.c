/* SPDX-License-Identifier: Apache-2.0 */
/* resident.c: reads this process's resident memory from /proc. */
#include "bench/resident.h"

#include <stdio.h>
#include <string.h>

/* The value of the line "key:   123 kB" in a file of /proc, in bytes; -1 if there is none. */
static int64_t kilobytes_line(const char *path, const char *key)
{
    FILE *f = fopen(path, "r");
    if (!f)
        return -1;
    char line[256];
    long long kb = -1;
    size_t n = strlen(key);
    while (kb < 0 && fgets(line, sizeof line, f))
        if (strncmp(line, key, n) || line[n] != ':' || sscanf(line + n + 1, "%lld", &kb) != 1)
            kb = -1;
    fclose(f);
    return kb < 0 ? -1 : kb * 1024;
}

int64_t resident_bytes(void)
{
    int64_t bytes = kilobytes_line("/proc/self/smaps_rollup", "Pss");
    return bytes >= 0 ? bytes : kilobytes_line("/proc/self/status", "VmRSS");
}
