/* SPDX-License-Identifier: Apache-2.0 */
/* identity.c: reads this process's boot id, PID namespace and ZERO_HOST_ID, and opens files of peers. */
#include "comm/identity.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

/* Reads one line without its end, or "" if there is none. */
static void read_line(const char *path, char *text, int n_text)
{
    FILE *f = fopen(path, "re");
    text[0] = 0;
    if (!f)
        return;
    if (!fgets(text, n_text, f))
        text[0] = 0;
    fclose(f);
    text[strcspn(text, "\n")] = 0;
}

static void read_host_id(char *part, size_t n_part)
{
    const char *text = getenv("ZERO_HOST_ID");
    size_t n = text ? strlen(text) : 0;
    if (n < n_part)
        snprintf(part, n_part, "%s", text ? text : "");
    else
        snprintf(part, n_part, "%.24s~%016llx", text, (unsigned long long)XXH3_64bits(text, n));
}

void zr_identity_read(struct zr_identity *out)
{
    struct stat st;
    *out = (struct zr_identity){.pid_namespace = 0};
    gethostname(out->host_name, sizeof out->host_name - 1);
    read_line("/proc/sys/kernel/random/boot_id", out->machine, sizeof out->machine);
    if (!out->machine[0])
        snprintf(out->machine, sizeof out->machine, "%.47s", out->host_name);
    if (stat("/proc/self/ns/pid", &st) == 0)
        out->pid_namespace = (uint64_t)st.st_ino;
    read_host_id(out->host_id, sizeof out->host_id);
}

int zr_identity_open(const struct zr_identity *id, int rank, int pid, int fd)
{
    char path[64];
    if (id->open)
        return id->open(id->arg, rank, pid, fd);
    snprintf(path, sizeof path, "/proc/%d/fd/%d", pid, fd);
    return open(path, O_RDWR | O_CLOEXEC);
}
