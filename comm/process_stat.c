/* SPDX-License-Identifier: Apache-2.0 */
/* process_stat.c: reads /proc/PID/stat. */
#include "comm/process_stat.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* The text is "PID (NAME) STATE PARENT ...", and NAME may have any characters. */
bool zr_process_stat(int pid, struct zr_process_stat *out)
{
    char path[32], text[512];
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t n = fd < 0 ? -1 : read(fd, text, sizeof text - 1);
    if (fd >= 0)
        close(fd);
    text[n > 0 ? n : 0] = 0;
    const char *begin = strchr(text, '('), *end = strrchr(text, ')');
    if (!begin || !end || sscanf(end + 1, " %c %d", &out->state, &out->parent) != 2)
        return false;
    snprintf(out->name, sizeof out->name, "%.*s", (int)(end - begin - 1), begin + 1);
    return true;
}
