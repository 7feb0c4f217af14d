/* SPDX-License-Identifier: Apache-2.0 */
/* run_descendants.c: finds the processes that ranks have started. Programs such as timeout and setsid leave
 * the rank's process group, so groups alone do not find them. But zero-run is a subreaper, the new parent of
 * processes whose own parent has ended. So all of them descend from it. */
#include "comm/process_stat.h"
#include "zero/run/run.h"

#include <ctype.h>
#include <dirent.h>
#include <stdlib.h>
#include <unistd.h>

struct process {
    int pid, parent;
};

/* Returns false if the process is gone, or only waits to be reaped. */
static bool read_process(const char *number, struct process *out)
{
    struct zr_process_stat s;
    *out = (struct process){.pid = atoi(number)};
    if (!zr_process_stat(out->pid, &s))
        return false;
    out->parent = s.parent;
    return s.state != 'Z' && s.state != 'X';
}

/* Whether /proc belongs to our PID namespace. That of another one has other numbers for processes. */
static bool proc_is_ours(void)
{
    char text[16] = "";
    return readlink("/proc/self", text, sizeof text - 1) > 0 && atoi(text) == (int)getpid();
}

/* Returns all live processes, which the caller frees. *n: their number. */
static struct process *read_processes(int *n)
{
    struct process *all = NULL;
    int room = 0;
    *n = 0;
    DIR *d = proc_is_ours() ? opendir("/proc") : NULL;
    for (const struct dirent *e; d && (e = readdir(d));) {
        if (*n == room) {
            struct process *more = realloc(all, sizeof *all * (size_t)(room = 2 * room + 256));
            if (!more)
                break;
            all = more;
        }
        if (isdigit((unsigned char)*e->d_name) && read_process(e->d_name, &all[*n]))
            ++*n;
    }
    if (d)
        closedir(d);
    return all;
}

static bool has(const struct zr_run_pids *p, int pid)
{
    for (int i = 0; i < p->n; i++)
        if (p->pids[i] == pid)
            return true;
    return false;
}

struct zr_run_pids zr_run_descendants(const struct zr_run_pids *except)
{
    int n, self = (int)getpid();
    struct process *all = read_processes(&n);
    struct zr_run_pids found = {malloc(sizeof *found.pids * (size_t)(n + 1)), 0};
    for (int before = -1; found.pids && before < found.n;) {
        before = found.n;
        for (int i = 0; i < n; i++) {
            const struct process *p = &all[i];
            if ((p->parent == self || has(&found, p->parent)) && !has(&found, p->pid) && !has(except, p->pid))
                found.pids[found.n++] = p->pid;
        }
    }
    free(all);
    return found;
}
