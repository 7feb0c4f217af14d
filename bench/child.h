/* SPDX-License-Identifier: Apache-2.0 */
/* child.h: another program, run with a pipe to its input or from its output. */
#ifndef ZERO_BENCH_CHILD_H
#define ZERO_BENCH_CHILD_H

#include <stdbool.h>
#include <stdio.h>
#include <sys/types.h>

struct child {
    pid_t pid;
    /* its standard output, or its standard input when opened to_child */
    FILE *pipe;
};

/* Starts argv[0], looked up in PATH unless it holds a slash; the rest is inherited. Returns 0, or -1 with
 * errno set (ENOENT: there is no such program). */
int child_open(struct child *c, char *const argv[], bool to_child);
/* Closes the pipe and waits. Returns the exit code, 128 + the signal that ended it, or -1. */
int child_close(struct child *c);

#endif
