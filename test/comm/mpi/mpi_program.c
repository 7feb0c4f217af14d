/* SPDX-License-Identifier: Apache-2.0 */
/* mpi_program.c: a program that uses MPI itself, run as one rank of an MPI launcher's job. Each rank
 * prints what it saw, such as "rank 1: trained", or an error.
 *
 *     mpi_program WHAT
 *
 * WHAT is one of:
 *     lends                  lends a communicator in MPI's order
 *     reordered              lends a communicator in reverse order
 *     serialized             initializes MPI with too low a thread level
 *     early                  calls MPI_Finalize before zero_unwrap
 *     begun_here             lets the library initialize MPI
 *     without                uses no MPI
 *     null                   lends MPI_COMM_NULL
 *     other_rank             lends a communicator, and configures another rank than it has there
 *     refused                rank 1's configuration is refused
 *     part                   lends a communicator of all ranks but the last
 *     told NAME=VALUE...     sets variables after MPI has begun; without a value, removes them
 *     late                   one context trains while ranks wait for the last one to wrap another
 *     threads                wraps two contexts from two threads, on rank 1 in the other order
 *     numbered               two contexts at once, in which each process has two different ranks
 *     again                  zero_wrap after one to which the last rank, or rank 0, did not come
 *     crossed, crossed_user_comm  rank 1 wraps another context first, of the same communicator or another
 *     forked                 a child process wraps */
#include "zero/zero.h"

#include <mpi.h>

#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { N = 1000, STEPS = 3 };

/* The model of one context. A thread trains the first model unless it takes the other. */
static struct model {
    float *w[2], *dw[2], first[2][N];
    zero_ctx *z;
} models[2];
static _Thread_local struct model *model = &models[0];

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
            model->first[l][i] = 1;
        model->w[l] = model->first[l];
        tensors[l] = (struct zero_tensor){.name = names[l],
                                          .param = (void **)&model->w[l],
                                          .grad = (void **)&model->dw[l],
                                          .shape = {N},
                                          .dtype = ZERO_F32,
                                          .unit = l};
    }
    return zero_wrap(z, tensors, 2, cfg);
}

/* The gradient of rank r is r + 1, so a step of plain SGD subtracts lr times the mean of these. */
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
            model->dw[l][i] += (float)(rank + 1);
        err = err ? err : zero_end(z, l, ZERO_BACKWARD);
    }
    return err ? err : zero_step(z, 0.5f, NULL);
}

/* Checks a weight that began as 1, after STEPS steps. */
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

/* Trains while the program has traffic on another communicator. */
static int train(zero_ctx *z, MPI_Comm own, int rank, int world)
{
    struct zero_stats stats;
    int err = zero_get_stats(z, &stats);
    const char *backend = getenv("ZERO_BACKEND");
    if (!err && (stats.place.rank != rank || stats.place.world != world ||
                 strcmp(stats.backend, backend && !strcmp(backend, "shm") ? "shm" : "mpi")))
        return printf("rank %d of %d, backend %s\n", (int)stats.place.rank, (int)stats.place.world,
                      stats.backend),
               1;
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
    cfg.optim.optimizer = ZERO_SGD;
    int err = 0;
    for (int round = 0; round < 2 && !err; round++) { /* closing a context must not end MPI */
        struct zero_place found = {.rank = -1};
        MPI_Comm_split(MPI_COMM_WORLD, 0, mine, &comm);
        cfg.launch.mpi_comm = &comm;
        err = zero_find_place(&cfg, &found);
        if (!err && (found.rank != mine || found.world != world))
            return printf("found rank %d of %d\n", (int)found.rank, (int)found.world), 1;
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
    cfg.launch.mpi_comm = &comm;
    if (!strcmp(how, "other_rank")) {
        cfg.launch.rank = (rank + 1) % world;
        cfg.launch.world = world;
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
    cfg.launch.backend = ZERO_BACKEND_MPI;
    cfg.launch.timeout_ms = 5000;
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

/* The communicator gives the ranks, though the launcher started one more. */
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
    cfg.optim.optimizer = ZERO_SGD;
    cfg.launch.mpi_comm = &comm;
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

/* Rank 1 configures something that does not exist. */
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

/* The library initializes MPI, though the program is linked with it. ZERO_BACKEND_AUTO leaves the choice
 * to the environment. */
static int begin_here(int backend)
{
    zero_ctx *z;
    struct zero_place place;
    int ended = 0;
    struct zero_config cfg = ZERO_CONFIG_INIT;
    cfg.stage = 2;
    cfg.optim.optimizer = ZERO_SGD;
    cfg.launch.backend = backend;
    int err = zero_find_place(&cfg, &place);
    for (int round = 0; round < 2 && !err; round++) {
        err = wrap(&z, &cfg);
        err = err ? err : train(z, MPI_COMM_NULL, place.rank, place.world);
        if (!err)
            err = zero_unwrap(&z);
    }
    MPI_Finalized(&ended);
    say(err ? zero_last_error() : ended ? "it has ended" : "trained");
    return err != 0;
}

/* --- several contexts --- */

/* One context that a thread wraps and trains. */
struct task {
    struct model *model;
    struct zero_config cfg;
    int rank, world, err;
    char text[1024];
};

static int note(struct task *t, int err)
{
    t->err = err;
    if (err)
        snprintf(t->text, sizeof t->text, "context \"%s\": %s", t->cfg.launch.name, zero_last_error());
    return err;
}

static struct task task_of(int number, int start_timeout_ms)
{
    static const char *const names[] = {"a", "b"};
    struct task t = {.model = &models[number], .cfg = ZERO_CONFIG_INIT};
    t.cfg.stage = 3;
    t.cfg.optim.optimizer = ZERO_SGD;
    t.cfg.launch.backend = ZERO_BACKEND_MPI;
    t.cfg.launch.name = names[number];
    t.cfg.launch.timeout_ms = 20000;
    t.cfg.launch.start_timeout_ms = start_timeout_ms;
    MPI_Comm_rank(MPI_COMM_WORLD, &t.rank);
    MPI_Comm_size(MPI_COMM_WORLD, &t.world);
    return t;
}

static void *train_and_close(void *arg)
{
    struct task *t = arg;
    model = t->model;
    usleep(200000); /* by now the other ranks may be waiting for the other context */
    int err = train(model->z, MPI_COMM_NULL, t->rank, t->world);
    note(t, err ? err : zero_unwrap(&model->z));
    return NULL;
}

static void *wrap_and_train(void *arg)
{
    struct task *t = arg;
    model = t->model;
    if (!note(t, wrap(&model->z, &t->cfg)))
        train_and_close(t);
    return NULL;
}

static int say_both(const struct task *t, const struct task *other)
{
    say(t->err ? t->text : other->err ? other->text : "trained");
    return t->err || other->err;
}

/* The last rank comes to the second context after it has trained the first. */
static int come_late(void)
{
    struct task a = task_of(0, 60000), b = task_of(1, 60000);
    pthread_t thread;
    if (note(&a, wrap(&a.model->z, &a.cfg)) || pthread_create(&thread, NULL, train_and_close, &a))
        return say_both(&a, &b);
    if (b.rank == b.world - 1)
        pthread_join(thread, NULL);
    wrap_and_train(&b);
    if (b.rank != b.world - 1)
        pthread_join(thread, NULL);
    return say_both(&a, &b);
}

static int wrap_from_threads(void)
{
    struct task t[2] = {task_of(0, 60000), task_of(1, 60000)};
    pthread_t thread;
    int first = t[0].rank == 1;
    if (pthread_create(&thread, NULL, wrap_and_train, &t[first]))
        return 1;
    usleep(100000);
    wrap_and_train(&t[!first]);
    pthread_join(thread, NULL);
    return say_both(&t[0], &t[1]);
}

static void *wrap_and_close(void *arg)
{
    struct task *t = arg;
    model = t->model;
    if (!note(t, wrap(&model->z, &t->cfg)))
        note(t, zero_unwrap(&model->z));
    return NULL;
}

/* Two contexts at once, over communicators in which each process has different ranks. */
static int number_otherwise(void)
{
    struct task t[2] = {task_of(0, 30000), task_of(1, 30000)};
    MPI_Comm comm[2] = {MPI_COMM_WORLD};
    MPI_Comm_split(MPI_COMM_WORLD, 0, (t[1].rank + 1) % t[1].world, &comm[1]);
    for (int round = 0; round < 12 && !t[0].err && !t[1].err; round++) {
        pthread_t thread;
        for (int i = 0; i < 2; i++)
            t[i].cfg.launch.mpi_comm = &comm[i];
        MPI_Barrier(MPI_COMM_WORLD);
        if (pthread_create(&thread, NULL, wrap_and_close, &t[0]))
            return 1;
        wrap_and_close(&t[1]);
        pthread_join(thread, NULL);
    }
    return say_both(&t[0], &t[1]);
}

/* Runs over MPI_COMM_WORLD and over the program's communicator. The last rank, or rank 0, misses the first
 * zero_wrap and comes to the second one while the others wait. Prints the first one's error too. */
static int wrap_again(void)
{
    int err = 0;
    for (int i = 0; i < 4 && !err; i++) {
        struct task t = task_of(0, 2500);
        MPI_Comm comm = MPI_COMM_WORLD;
        int late = i < 2 ? t.world - 1 : 0;
        if (i % 2)
            t.cfg.launch.mpi_comm = &comm;
        if (t.rank != late)
            wrap_and_train(&t);
        if (t.rank != late)
            say(t.err ? t.text : "trained");
        MPI_Barrier(MPI_COMM_WORLD);
        t.cfg.launch.start_timeout_ms = 60000;
        if (t.rank == late)
            usleep(200000);
        wrap_and_train(&t);
        say(t.err ? t.text : "trained");
        err = t.err;
    }
    return err != 0;
}

static int cross(bool lends)
{
    MPI_Comm comm[2];
    int number, rank;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    for (int i = 0; i < 2; i++)
        MPI_Comm_dup(MPI_COMM_WORLD, &comm[i]);
    number = rank == 1;
    struct task t = task_of(number, 3500);
    if (lends)
        t.cfg.launch.mpi_comm = &comm[number];
    wrap_and_train(&t);
    say(t.err ? t.text : "trained");
    return 0;
}

/* Returns the child's error, as the parent reads it. */
static int wrap_in_child(void)
{
    struct task t = task_of(0, 60000);
    char text[sizeof t.text] = "";
    int ends[2];
    wrap_and_train(&t);
    if (t.err || pipe(ends))
        return say(t.text), 1;
    fflush(NULL);
    pid_t pid = fork();
    if (pid == 0) {
        note(&t, wrap(&t.model->z, &t.cfg));
        _exit(write(ends[1], t.text, strlen(t.text) + 1) < 0);
    }
    if (read(ends[0], text, sizeof text - 1) > 0)
        say(text);
    return pid < 0;
}

static int use_several(const char *what)
{
    int level;
    MPI_Init_thread(NULL, NULL, MPI_THREAD_MULTIPLE, &level);
    int err = !strcmp(what, "late")       ? come_late()
              : !strcmp(what, "threads")  ? wrap_from_threads()
              : !strcmp(what, "numbered") ? number_otherwise()
              : !strcmp(what, "again")    ? wrap_again()
              : !strcmp(what, "forked")   ? wrap_in_child()
                                          : cross(!strcmp(what, "crossed_user_comm"));
    MPI_Finalize();
    return err;
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
        return begin_here(ZERO_BACKEND_MPI);
    if (!strcmp(what, "without"))
        return begin_here(ZERO_BACKEND_AUTO);
    const char *const several[] = {"late",    "threads",           "numbered", "again",
                                   "crossed", "crossed_user_comm", "forked"};
    for (size_t i = 0; i < sizeof several / sizeof *several; i++)
        if (!strcmp(what, several[i]))
            return use_several(what);
    fprintf(stderr, "what?\n");
    return 2;
}
