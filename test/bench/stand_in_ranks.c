/* SPDX-License-Identifier: Apache-2.0 */
/* stand_in_ranks.c: starts the ranks of zero-bench on the stand-ins for CUDA and NCCL.
 *
 * Ranks that are processes share the NCCL stand-in's memory only if one process forks them. So zero-run
 * cannot start them. With STAND_IN_RANKS=N in the environment, this program forks N ranks before main, each
 * with its own device, and exits when all have ended. */
#include "test/stand_in/nccl_stand_in.h"
#include "test/stand_in/stand_in.h"

#include <arpa/inet.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

/* A port that is free now. */
static int free_port(void)
{
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof at;
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    if (fd < 0 || bind(fd, (struct sockaddr *)&at, size) || getsockname(fd, (struct sockaddr *)&at, &size))
        return 0;
    close(fd);
    return ntohs(at.sin_port);
}

static void set(const char *name, int value)
{
    char text[16];
    snprintf(text, sizeof text, "%d", value);
    setenv(name, text, 1);
}

static void become_rank(int rank, int n, int port)
{
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    set("RANK", rank);
    set("WORLD_SIZE", n);
    set("LOCAL_RANK", rank);
    set("LOCAL_WORLD_SIZE", n);
    set("MASTER_PORT", port);
    setenv("MASTER_ADDR", "127.0.0.1", 1);
    /* zero-run sets this, too; without it the library warns. */
    setenv("ZERO_JOB_KEY", "000102030405060708090a0b0c0d0e0f", 1);
    setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "1", 1);
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);
    unsetenv("STAND_IN_RANKS");
}

/* Returns the worst exit code of all children. */
static int await_ranks(void)
{
    int status, worst = 0;
    while (wait(&status) > 0) {
        int code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
        worst = code > worst ? code : worst;
    }
    return worst;
}

__attribute__((constructor)) static void start_ranks(void)
{
    const char *asked = getenv("STAND_IN_RANKS");
    int n = asked ? atoi(asked) : 0, port = n > 0 ? free_port() : 0;
    if (n < 1)
        return;
    stand_in_the_machine()->n_devices = n;
    nccl_stand_in_share();
    for (int rank = 0; rank < n; rank++)
        if (fork() == 0) {
            become_rank(rank, n, port);
            return;
        }
    _exit(await_ranks());
}
