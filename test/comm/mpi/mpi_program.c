/* SPDX-License-Identifier: Apache-2.0 */
/* mpi_program.c: a program that has MPI itself, as one rank of those that its launcher has started.
 *
 *     mpi_program WHAT
 *
 * WHAT: lends, reordered (a communicator, in MPI's order or the other way round), serialized (it begins MPI
 * with too weak a level), early (MPI_Finalize before zero_unwrap), begun_here (MPI is left to the library),
 * null (it lends MPI_COMM_NULL), other_rank (it lends one and says that it is another rank), refused (what
 * rank 1 configures is refused), part (it lends a communicator of all ranks but the last), told NAME=VALUE...
 * (it sets variables once MPI has begun, or removes those without a value).
 * Prints, on each rank, what was to be seen: "rank 1: trained", or an error. */
#include "zero/zero.h"

#include <mpi.h>

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { N = 1000, STEPS = 3 };

static float *w[2], *dw[2], first[2][N];

static void say(const char *what)
{
    int rank = -1, begun = 0, ended = 0;
    MPI_Initialized(&begun);
    MPI_Finalized(&ended);
    if (begun && !ended)
        MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    printf("rank %d: %s\n", rank, what);
    fflush(stdout);
}

static int wrap(zero_ctx **z, const struct zero_config *cfg)
{
    static const char *const names[2] = {"a", "b"};
    struct zero_tensor tensors[2];
    for (int l = 0; l < 2; l++) {
        for (int i = 0; i < N; i++)
            first[l][i] = 1;
        w[l] = first[l];
        tensors[l] = (struct zero_tensor){.name = names[l],
                                          .param = (void **)&w[l],
                                          .grad = (void **)&dw[l],
                                          .shape = {N},
                                          .dtype = ZERO_F32,
                                          .unit = l};
    }
    return zero_wrap(z, tensors, 2, cfg);
}

/* The gradient of rank r is r + 1, so a step of plain SGD takes lr times its mean. */
static int step(zero_ctx *z, int rank)
{
    int err = 0;
    for (int l = 0; l < 2 && !err; l++) {
        err = zero_begin(z, l, ZERO_FORWARD);
        err = err ? err : zero_end(z, l, ZERO_FORWARD);
    }
    for (int l = 1; l >= 0 && !err; l--) {
        err = zero_begin(z, l, ZERO_BACKWARD);
        for (int i = 0; i < N && !err; i++)
            dw[l][i] += (float)(rank + 1);
        err = err ? err : zero_end(z, l, ZERO_BACKWARD);
    }
    return err ? err : zero_step(z, 0.5f, NULL);
}

/* What is left of 1 after so many steps. */
static int check(zero_ctx *z, int world)
{
    float got[N], want = 1 - STEPS * 0.5f * (float)(world + 1) / 2;
    int err = zero_read(z, 1, ZERO_VALUE_PARAM, 0, N, got);
    for (int i = 0; i < N && !err; i++)
        if (got[i] != want) {
            printf("element %d is %g, not %g\n", i, (double)got[i], (double)want);
            return 1;
        }
    return err;
}

/* With traffic of the program's own on another communicator meanwhile. */
static int train(zero_ctx *z, MPI_Comm own, int rank, int world)
{
    struct zero_stats stats;
    int err = zero_get_stats(z, &stats);
    if (!err && (stats.rank != rank || stats.world != world || strcmp(stats.backend, "mpi")))
        return printf("rank %d of %d, backend %s\n", (int)stats.rank, (int)stats.world, stats.backend), 1;
    for (int s = 0; s < STEPS && !err; s++) {
        int one = 1, sum = 0;
        err = step(z, rank);
        if (own != MPI_COMM_NULL)
            MPI_Allreduce(&one, &sum, 1, MPI_INT, MPI_SUM, own);
        if (own != MPI_COMM_NULL && sum != world)
            return printf("the program's own sum is %d\n", sum), 1;
    }
    return err ? err : check(z, world);
}

static int lend(bool reordered)
{
    int level, rank, world, mine;
    MPI_Comm comm;
    zero_ctx *z;
    struct zero_config cfg = ZERO_CONFIG_INIT;
    MPI_Init_thread(NULL, NULL, MPI_THREAD_MULTIPLE, &level);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &world);
    mine = reordered ? world - 1 - rank : rank;
    cfg.stage = 3;
    cfg.optimizer = ZERO_SGD;
    int err = 0;
    for (int round = 0; round < 2 && !err; round++) { /* MPI stays what it is when a context is closed */
        int32_t found_rank = -1, found_world = -1;
        MPI_Comm_split(MPI_COMM_WORLD, 0, mine, &comm);
        cfg.mpi_comm = &comm;
        err = zero_find_rank(&cfg, &found_rank, &found_world, NULL);
        if (!err && (found_rank != mine || found_world != world))
            return printf("found rank %d of %d\n", (int)found_rank, (int)found_world), 1;
        err = err ? err : wrap(&z, &cfg);
        if (err)
            break;
        MPI_Comm_free(&comm);
        err = train(z, MPI_COMM_WORLD, mine, world);
        if (!err)
            err = zero_unwrap(&z);
    }
    say(err ? zero_last_error() : "trained");
    MPI_Finalize();
    return err != 0;
}

static int lend_wrongly(const char *how)
{
    int level, rank, world, need = strcmp(how, "serialized") ? MPI_THREAD_MULTIPLE : MPI_THREAD_SERIALIZED;
    MPI_Comm comm = strcmp(how, "null") ? MPI_COMM_WORLD : MPI_COMM_NULL;
    zero_ctx *z;
    struct zero_config cfg = ZERO_CONFIG_INIT;
    MPI_Init_thread(NULL, NULL, need, &level);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &world);
    cfg.mpi_comm = &comm;
    if (!strcmp(how, "other_rank")) {
        cfg.rank = (rank + 1) % world;
        cfg.world = world;
    }
    int err = wrap(&z, &cfg);
    say(err ? zero_last_error() : "trained");
    MPI_Finalize();
    return 0;
}

static int finalize_early(void)
{
    int level, rank, err = 0;
    zero_ctx *z;
    struct zero_config cfg = ZERO_CONFIG_INIT;
    MPI_Init_thread(NULL, NULL, MPI_THREAD_MULTIPLE, &level);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    cfg.stage = 3;
    cfg.backend = ZERO_BACKEND_MPI;
    cfg.timeout_ms = 5000;
    err = wrap(&z, &cfg);
    err = err ? err : step(z, rank);
    if (err)
        return say(zero_last_error()), 1;
    MPI_Barrier(MPI_COMM_WORLD);
    MPI_Finalize();
    for (int s = 0; s < STEPS && !err; s++)
        err = step(z, rank);
    say(err ? zero_last_error() : "trained");
    zero_unwrap(&z);
    return 0;
}

/* The communicator says who the ranks are, though the launcher knows one more. */
static int lend_part(void)
{
    int level, rank, world;
    MPI_Comm comm;
    zero_ctx *z;
    struct zero_config cfg = ZERO_CONFIG_INIT;
    MPI_Init_thread(NULL, NULL, MPI_THREAD_MULTIPLE, &level);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &world);
    MPI_Comm_split(MPI_COMM_WORLD, rank == world - 1, rank, &comm);
    cfg.stage = 3;
    cfg.optimizer = ZERO_SGD;
    cfg.mpi_comm = &comm;
    int err = 0;
    if (rank < world - 1) {
        err = wrap(&z, &cfg);
        err = err ? err : train(z, comm, rank, world - 1);
        err = err ? err : zero_unwrap(&z);
    }
    MPI_Comm_free(&comm);
    say(err ? zero_last_error() : "trained");
    MPI_Finalize();
    return err != 0;
}

static int change_variables(int n, char **changes)
{
    int level, rank;
    zero_ctx *z;
    struct zero_config cfg = ZERO_CONFIG_INIT;
    MPI_Init_thread(NULL, NULL, MPI_THREAD_MULTIPLE, &level);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    for (int i = 0; i < n; i++) {
        char *value = strchr(changes[i], '=');
        if (value)
            *value++ = 0;
        if (value)
            setenv(changes[i], value, 1);
        else
            unsetenv(changes[i]);
    }
    int err = wrap(&z, &cfg);
    err = err ? err : step(z, rank);
    err = err ? err : zero_unwrap(&z);
    say(err ? zero_last_error() : "trained");
    MPI_Finalize();
    return 0;
}

/* Rank 1 configures what there is not. */
static int refuse_one(void)
{
    int level, rank;
    zero_ctx *z;
    struct zero_config cfg = ZERO_CONFIG_INIT;
    MPI_Init_thread(NULL, NULL, MPI_THREAD_MULTIPLE, &level);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    cfg.stage = rank == 1 ? 7 : 3;
    int err = wrap(&z, &cfg);
    say(err ? zero_last_error() : "trained");
    MPI_Finalize();
    return 0;
}

/* Though the program is linked with it. */
static int begin_here(void)
{
    zero_ctx *z;
    int32_t rank, world;
    int ended = 0;
    struct zero_config cfg = ZERO_CONFIG_INIT;
    cfg.stage = 2;
    cfg.optimizer = ZERO_SGD;
    cfg.backend = ZERO_BACKEND_MPI;
    int err = zero_find_rank(&cfg, &rank, &world, NULL);
    for (int round = 0; round < 2 && !err; round++) {
        err = wrap(&z, &cfg);
        err = err ? err : train(z, MPI_COMM_NULL, rank, world);
        if (!err)
            err = zero_unwrap(&z);
    }
    MPI_Finalized(&ended);
    say(err ? zero_last_error() : ended ? "it has ended" : "trained");
    return err != 0;
}

int main(int n_args, char **args)
{
    const char *what = n_args > 1 ? args[1] : "";
    if (!strcmp(what, "lends") || !strcmp(what, "reordered"))
        return lend(!strcmp(what, "reordered"));
    if (!strcmp(what, "serialized") || !strcmp(what, "null") || !strcmp(what, "other_rank"))
        return lend_wrongly(what);
    if (!strcmp(what, "early"))
        return finalize_early();
    if (!strcmp(what, "refused"))
        return refuse_one();
    if (!strcmp(what, "part"))
        return lend_part();
    if (!strcmp(what, "told"))
        return change_variables(n_args - 2, args + 2);
    if (!strcmp(what, "begun_here"))
        return begin_here();
    fprintf(stderr, "what?\n");
    return 2;
}
