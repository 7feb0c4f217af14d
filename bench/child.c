/* SPDX-License-Identifier: Apache-2.0 */
/* child.c: runs another program. popen(3) would use a shell, which prints a different message for a missing
 * program. */
#include "bench/child.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;

int child_open(struct child *c, char *const argv[], bool to_child)
{
    int ends[2]; /* [0] is read from, [1] is written to */
    if (pipe2(ends, O_CLOEXEC))
        return -1;
    int ours = to_child ? ends[1] : ends[0], theirs = to_child ? ends[0] : ends[1];
    posix_spawn_file_actions_t actions;
    int err = posix_spawn_file_actions_init(&actions);
    if (!err) {
        err = posix_spawn_file_actions_adddup2(&actions, theirs, to_child ? STDIN_FILENO : STDOUT_FILENO);
        err = err ? err : posix_spawnp(&c->pid, argv[0], &actions, NULL, argv, environ);
        posix_spawn_file_actions_destroy(&actions);
    }
    close(theirs);
    /* From now on this process ignores SIGPIPE: if a child ends early, its exit code says so. This child has
     * been started before and does not inherit that. Children that are started later do. */
    if (to_child)
        signal(SIGPIPE, SIG_IGN);
    c->pipe = err ? NULL : fdopen(ours, to_child ? "w" : "r");
    if (!c->pipe) {
        close(ours);
        errno = err ? err : ENOMEM;
        return -1;
    }
    return 0;
}

int child_close(struct child *c)
{
    fclose(c->pipe);
    int status;
    while (waitpid(c->pid, &status, 0) < 0)
        if (errno != EINTR)
            return -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}
