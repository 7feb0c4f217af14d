/* SPDX-License-Identifier: Apache-2.0 */
/* command_line.c: this process's command line, by which ranks notice that they run different programs. */
#include "zero/context.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

/* Appends an argument as it is, but for control characters; what does not fit ends in "...". */
static void append(struct zr_command_line *out, const char *arg)
{
    size_t used = strlen(out->text), room = sizeof out->text - used;
    int n = snprintf(out->text + used, room, "%s%s", used ? " " : "", arg);
    for (char *p = out->text + used; *p; p++)
        if (iscntrl((unsigned char)*p))
            *p = '?';
    if (n >= (int)room)
        strcpy(out->text + sizeof out->text - sizeof "...", "...");
}

void zr_command_line_read(struct zr_command_line *out)
{
    char *arg = NULL;
    size_t room = 0;
    memset(out, 0, sizeof *out);
    FILE *f = fopen("/proc/self/cmdline", "re");
    for (bool is_first = true; f && getdelim(&arg, &room, 0, f) > 0; is_first = false) {
        const char *slash = is_first ? strrchr(arg, '/') : NULL, *from = slash ? slash + 1 : arg;
        size_t n = 0;
        append(out, from);
        for (; *from; from++)
            if (!isdigit((unsigned char)*from))
                arg[n++] = *from;
        out->hash = XXH64(arg, n, out->hash + 1);
    }
    if (!f || !feof(f))
        out->hash = 0;
    free(arg);
    if (f)
        fclose(f);
}
