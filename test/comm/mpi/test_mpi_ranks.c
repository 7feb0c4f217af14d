/* SPDX-License-Identifier: Apache-2.0 */
/* test_mpi_ranks.c: runs the suite of comm_suite.h over MPI communicators, as one rank of an MPI
 * launcher's job.
 *
 *     test_mpi_ranks MODULE SEED WORLD [RANKS_OF_A_HOST] */
#include "test/comm/comm_suite.h"
#include "test/comm/mpi/mpi_fixture.h"

#include <stdio.h>
#include <stdlib.h>

static struct rank me;

static bool run(void (*fn)(struct rank *r), struct comm_plan *p, const char *what)
{
    me.arg = p;
    fn(&me);
    if (me.wrong[0])
        fprintf(stderr, "rank %d of %d, %s, seed %llu: %s\n", me.w.rank, me.w.world, what,
                (unsigned long long)p->seed, me.wrong);
    return !me.wrong[0];
}

int main(int n_args, char **args)
{
    struct fixture_groups g;
    struct comm_plan p = {
        .kind = &fixture_real_mpi, .seed = n_args > 2 ? strtoull(args[2], NULL, 0) : 1, .n_ops = 40};
    zr_mpi_module_file = args[1];
    if (zr_world_find(-1, 0, NULL, &me.w)) {
        fprintf(stderr, "%s\n", zr_error_text());
        return 1;
    }
    if (n_args > 3 && me.w.world != atoi(args[3])) {
        fprintf(stderr, "the launcher has started a world of %d\n", me.w.world);
        return 1;
    }
    if (n_args > 4) {
        int32_t host_of[MAX_RANKS];
        for (int i = 0; i < me.w.world && i < MAX_RANKS; i++)
            host_of[i] = i / atoi(args[4]);
        mpi_fixture_hosts(me.w.world, host_of);
    }
    bool right = run(comm_suite_conform, &p, "conform") && run(comm_suite_mixed, &p, "mixed");
    comm_suite_deal(&g, p.seed, me.w.world);
    p.groups = &g;
    right = right && run(comm_suite_conform, &p, "groups") && run(comm_suite_shared, &p, "shared");
    if (right && me.w.rank == 0)
        printf("right, seed %llu\n", (unsigned long long)p.seed);
    return !right;
}
