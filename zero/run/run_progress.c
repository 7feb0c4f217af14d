/* SPDX-License-Identifier: Apache-2.0 */
/* run_progress.c: how far this node's ranks have come, in memory that they share with us (zero/progress.h).
 *
 * Ranks open it by its name in /proc. A descriptor would not do, because a program between zero-run and the
 * rank's program may close it. */
#include "zero/progress.h"
#include "zero/run/run.h"

#include <errno.h>
#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

int zr_run_progress_open(struct zr_run_progress *p, int n_ranks)
{
    size_t n = (size_t)n_ranks * sizeof *p->records;
    p->fd = memfd_create("zero-run progress", MFD_CLOEXEC);
    void *all = p->fd >= 0 && !ftruncate(p->fd, (off_t)n)
                    ? mmap(NULL, n, PROT_READ | PROT_WRITE, MAP_SHARED, p->fd, 0)
                    : MAP_FAILED;
    if (all == MAP_FAILED)
        return -errno;
    p->records = all;
    p->n_ranks = n_ranks;
    snprintf(p->path, sizeof p->path, "/proc/%d/fd/%d", (int)getpid(), p->fd);
    return 0;
}

void zr_run_progress_clear(struct zr_run_progress *p)
{
    for (int i = 0; i < p->n_ranks; i++)
        p->records[i] = (struct zr_progress){.magic = ZR_PROGRESS_MAGIC, .t = -1};
}

void zr_run_progress_ended(struct zr_run_progress *p, int local_rank, int code, int signum)
{
    atomic_store(&p->records[local_rank].ended, signum ? -signum : 1 + code);
}

struct zr_run_reached zr_run_progress_read(const struct zr_run_progress *p)
{
    struct zr_run_reached r = {.step = -1};
    for (int i = 0; i < p->n_ranks; i++) {
        int64_t t = atomic_load(&p->records[i].t);
        int32_t accum = atomic_load(&p->records[i].accum);
        r.step = t > r.step ? t : r.step;
        r.accum = accum > r.accum ? accum : r.accum;
    }
    return r;
}
