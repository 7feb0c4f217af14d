/* SPDX-License-Identifier: Apache-2.0 */
/* run_exec.c: finds the program, and takes the last steps in a rank's process before the program runs.
 *
 * A rank must not outlive zero-run, even if zero-run gets SIGKILL. Linux can do that (prctl
 * PR_SET_PDEATHSIG), but the process must ask for it after the fork, and libuv offers no way to do so. So
 * zero-run starts itself in the rank's process, calls prctl, and becomes the program. The setting survives
 * exec. The rank's own children do not inherit it, and programs with set-user-id lose it. */
#include "zero/run/run.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <unistd.h>

static int cannot(const char *name, int error)
{
    fprintf(stderr, "zero-run: %s: %s\n", name, strerror(error));
    return error == ENOENT || error == ENOTDIR ? ZR_RUN_NOT_FOUND : ZR_RUN_NOT_RUNNABLE;
}

/* Returns 0 if path is a program, otherwise an errno. */
static int runnable(const char *path)
{
    struct stat st;
    if (stat(path, &st))
        return errno;
    if (!S_ISREG(st.st_mode))
        return S_ISDIR(st.st_mode) ? EISDIR : EACCES;
    return access(path, X_OK) ? errno : 0;
}

int zr_run_find(const char *name, char **out)
{
    size_t n_name = strlen(name);
    if (strchr(name, '/') || n_name == 0) {
        int error = n_name ? runnable(name) : ENOENT;
        if (error)
            return cannot(n_name ? name : "\"\"", error);
        *out = strdup(name);
        return *out ? 0 : cannot(name, ENOMEM);
    }
    const char *dirs = getenv("PATH");
    if (!dirs)
        dirs = "/usr/local/bin:/usr/bin:/bin";
    char *path = malloc(strlen(dirs) + n_name + 4);
    if (!path)
        return cannot(name, ENOMEM);
    int seen = 0; /* errno of the best candidate that cannot be run */
    for (const char *dir = dirs;; dir++) {
        int n_dir = (int)strcspn(dir, ":");
        /* An empty entry is the current folder. The slash keeps exec from searching again. */
        sprintf(path, "%.*s/%s", n_dir ? n_dir : 1, n_dir ? dir : ".", name);
        int error = runnable(path);
        if (!error) {
            *out = path;
            return 0;
        }
        if (error != ENOENT && error != ENOTDIR && error != EISDIR)
            seen = error;
        dir += n_dir;
        if (!*dir)
            break;
    }
    free(path);
    if (seen)
        return cannot(name, seen);
    fprintf(stderr, "zero-run: %s: no such program in PATH\n", name);
    return ZR_RUN_NOT_FOUND;
}

int zr_run_exec(int argc, char **argv)
{
    if (argc < 5) {
        fprintf(stderr, "zero-run: %s is not an option for users\n", ZR_RUN_EXEC);
        return 2;
    }
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != (pid_t)strtol(argv[2], NULL, 10))
        raise(SIGKILL); /* zero-run died before the call of prctl */
    execvp(argv[3], argv + 4);
    return cannot(argv[3], errno);
}
