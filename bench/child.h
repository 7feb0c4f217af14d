/* SPDX-License-Identifier: Apache-2.0 */
/* child.h: runs another program with a pipe to its input or from its output. */
#ifndef ZERO_BENCH_CHILD_H
#define ZERO_BENCH_CHILD_H

#include <stdbool.h>
#include <stdio.h>
#include <sys/types.h>

struct child {
    pid_t pid;
    /* its standard output; with to_child its standard input */
    FILE *pipe;
};

/* Starts argv[0], which is looked up in PATH unless it contains a slash. Everything else is inherited. With
 * to_child, this process ignores SIGPIPE from then on. Returns 0, or -1 with errno set (ENOENT: there is no
 * such program). */
int child_open(struct child *c, char *const argv[], bool to_child);
/* Closes the pipe and waits. Returns the exit code, 128 + the signal that ended it, or -1. */
int child_close(struct child *c);

#endif
