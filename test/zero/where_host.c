/* SPDX-License-Identifier: Apache-2.0 */
/* where_host.c: runs ranks on the host, in shared memory. */
#include "test/zero/where.h"

#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>

const bool where_has_gpu = false;

void where_open(int rank, struct zero_config *cfg)
{
    (void)rank, (void)cfg;
}

void where_close(struct zero_config *cfg)
{
    (void)cfg;
}

void where_fork(void)
{
}

void where_reap(void)
{
}

void where_stop(pid_t pid)
{
    kill(pid, SIGSTOP);
    waitpid(pid, NULL, WUNTRACED);
}

void where_enter(int on_host)
{
    (void)on_host;
}

bool where_leave(char *text, size_t n_text)
{
    (void)text, (void)n_text;
    return true;
}

void where_wait(const struct zero_config *cfg)
{
    (void)cfg;
}

void *where_alloc(size_t n_bytes)
{
    return calloc(1, n_bytes);
}

void where_release(void *at)
{
    free(at);
}
