/* SPDX-License-Identifier: Apache-2.0 */
/* overhead_world.c: see overhead_world.h. */
#include "bench/overhead_world.h"
#include "bench/failed.h"
#include "bench/report/report.h"

#include "kernels/device.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

struct worlds {
    struct zero_tensor *own[2]; /* (n) of each world, with pointers of its own: (n) params, (n) grads */
    void **pointers[2];
    int32_t n;
    struct zero_config cfg;
    int world[2];
    char meeting[2][40]; /* rendezvous */
    zero_ctx *z[2];
};

/* A port of the loopback that nobody has just now. */
static int find_port(char meeting[40])
{
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof at;
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    int err = 0;
    if (fd < 0 || bind(fd, (struct sockaddr *)&at, sizeof at) ||
        getsockname(fd, (struct sockaddr *)&at, &size))
        err = zr_fail(ZR_ERR_SYSTEM, "no port of the loopback: %s", strerror(errno));
    if (fd >= 0)
        close(fd);
    snprintf(meeting, 40, "tcp://127.0.0.1:%d", ntohs(at.sin_port));
    return err;
}

/* The ranks are one job's, and know each other by this. */
static int make_key(void)
{
    unsigned char bytes[16];
    char key[2 * sizeof bytes + 1];
    if (getrandom(bytes, sizeof bytes, 0) != sizeof bytes)
        return zr_fail(ZR_ERR_SYSTEM, "no random bits for the job's key: %s", strerror(errno));
    for (size_t i = 0; i < sizeof bytes; i++)
        snprintf(key + 2 * i, 3, "%02x", bytes[i]);
    return setenv("ZERO_JOB_KEY", key, 1) ? zr_fail(ZR_ERR_NOMEM, "no memory for the job's key") : 0;
}

/* Joins the worlds that have such a rank. */
static int join(struct worlds *w, int rank)
{
    int err = 0;
    for (int k = 0; !err && k < 2; k++) {
        if (rank >= w->world[k])
            continue;
        w->cfg.launch.rank = rank;
        w->cfg.launch.world = w->world[k];
        w->cfg.launch.rendezvous = w->meeting[k];
        err = zero_wrap(&w->z[k], w->own[k], w->n, &w->cfg);
    }
    return reported(err);
}

static void leave(struct worlds *w)
{
    zero_unwrap(&w->z[1]);
    zero_unwrap(&w->z[0]);
}

/* Another rank: sleeps until rank 0 has closed its end of the pipe, or is gone. */
static void be_rank(struct worlds *w, int rank, const int pipe_ends[2])
{
    char byte;
    close(pipe_ends[1]);
    int err = join(w, rank);
    while (!err && read(pipe_ends[0], &byte, 1) < 0 && errno == EINTR)
        ;
    leave(w);
    _exit(err ? EXIT_FAILURE : EXIT_SUCCESS);
}

static int by_turns(struct worlds *w, int64_t passes, int (*measure)(void *arg, zero_ctx *z, double *ns),
                    void *arg, double ns[2])
{
    double *times = malloc(2 * (size_t)passes * sizeof *times);
    if (!times)
        return zr_fail(ZR_ERR_NOMEM, "no memory for the times of %lld passes", (long long)passes);
    int err = 0;
    for (int64_t i = -2; !err && i < passes; i++) { /* two passes to warm up */
        for (int k = 0; !err && k < 2; k++) {
            double t = 0;
            err = measure(arg, w->z[k], &t);
            if (i >= 0)
                times[k * passes + i] = t;
        }
    }
    reported(err);
    for (int k = 0; !err && k < 2; k++)
        ns[k] = report_median(times + k * passes, passes);
    free(times);
    return err;
}

int overhead_world(const struct zero_tensor *tensors, int32_t n, const struct zero_config *cfg, int world,
                   int64_t passes, int (*measure)(void *arg, zero_ctx *z, double *ns), void *arg,
                   double ns[2])
{
    size_t count = (size_t)n;
    struct worlds w = {.n = n, .cfg = *cfg, .world = {2, world}};
    pid_t *child = calloc((size_t)world, sizeof *child);
    int ends[2] = {-1, -1}, err = 0, n_children = 0;
    for (int k = 0; k < 2; k++) {
        w.own[k] = calloc(count, sizeof *w.own[k]);
        w.pointers[k] = calloc(2 * count, sizeof *w.pointers[k]);
    }
    if (!child || !w.own[0] || !w.own[1] || !w.pointers[0] || !w.pointers[1])
        err = zr_fail(ZR_ERR_NOMEM, "no memory for %d ranks", world);
    for (int k = 0; !err && k < 2; k++)
        for (int32_t i = 0; i < n; i++) {
            w.pointers[k][i] = *tensors[i].param;
            w.own[k][i] = tensors[i];
            w.own[k][i].param = &w.pointers[k][i];
            w.own[k][i].grad = &w.pointers[k][n + i];
        }
    for (int k = 0; !err && k < 2; k++)
        err = find_port(w.meeting[k]);
    if (!err)
        err = make_key();
    if (!err && pipe(ends))
        err = zr_fail(ZR_ERR_SYSTEM, "no pipe: %s", strerror(errno));
    fflush(stdout);
    while (!err && n_children < world - 1) {
        pid_t pid = fork();
        if (pid == 0)
            be_rank(&w, n_children + 1, ends);
        if (pid < 0)
            err = zr_fail(ZR_ERR_SYSTEM, "starting rank %d: %s", n_children + 1, strerror(errno));
        else
            child[n_children++] = pid;
    }
    if (ends[0] >= 0)
        close(ends[0]);
    if (!err)
        err = join(&w, 0);
    if (!err)
        err = by_turns(&w, passes, measure, arg, ns);
    if (ends[1] >= 0)
        close(ends[1]);
    leave(&w);
    for (int i = 0; i < n_children; i++)
        while (waitpid(child[i], NULL, 0) < 0 && errno == EINTR)
            ;
    free(child);
    for (int k = 0; k < 2; k++) {
        free(w.own[k]);
        free(w.pointers[k]);
    }
    return err;
}
