/* SPDX-License-Identifier: Apache-2.0 */
/* test_launchers.c: environment variables of two launchers at once. The innermost launcher decides the rank.
 * If the variables cannot tell which one that is, zero_find_place and zero_wrap refuse with the same message,
 * which names both. */
#include "test/cmocka.h"
#include "test/zero/toy_net.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum launcher { ZERO_RUN, TORCHRUN, OPEN_MPI, MPICH, SLURM, N_LAUNCHERS };

static const char *const names[N_LAUNCHERS] = {"zero-run", "torchrun", "Open MPI", "MPICH", "Slurm"};
/* names of the variables of rank and world in messages */
static const char *const rank_variable[N_LAUNCHERS] = {"ZERO_RANK", "RANK", "OMPI_COMM_WORLD_RANK",
                                                       "PMI_RANK", "SLURM_PROCID"};
static const char *const world_variable[N_LAUNCHERS] = {"ZERO_WORLD_SIZE", "WORLD_SIZE",
                                                        "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS"};

static void forget_others(void)
{
    static const char *const others[] = {"RANK",
                                         "WORLD_SIZE",
                                         "LOCAL_WORLD_SIZE",
                                         "GROUP_WORLD_SIZE",
                                         "ZERO_RANK",
                                         "ZERO_WORLD_SIZE",
                                         "ZERO_JOB",
                                         "TORCHELASTIC_RUN_ID",
                                         "LOCAL_RANK",
                                         "ZERO_LOCAL_RANK",
                                         "PMI_RANK",
                                         "PMI_SIZE",
                                         "SLURM_PROCID",
                                         "SLURM_NTASKS",
                                         "OMPI_COMM_WORLD_RANK",
                                         "OMPI_COMM_WORLD_SIZE"};
    for (size_t i = 0; i < sizeof others / sizeof *others; i++)
        unsetenv(others[i]);
}

static void begin(void)
{
    forget_others();
    unsetenv("SLURM_STEP_ID");
    unsetenv("SLURM_TASK_PID");
    unsetenv("ZERO_BACKEND");
    setenv("MASTER_ADDR", "127.0.0.1", 1);
    setenv("MASTER_PORT", "29500", 1);
}

static void put(const char *name, int value)
{
    char text[16];
    snprintf(text, sizeof text, "%d", value);
    setenv(name, text, 1);
}

/* Sets the variables of a rank that the launcher starts. is_inner: the launcher starts the rank itself, not
 * another launcher. agents: number of torchrun processes that start ranks. */
static void launch(enum launcher l, int rank, int world, bool is_inner, int agents)
{
    if (l == ZERO_RUN) {
        forget_others();
        setenv("ZERO_JOB", "job", 1);
        put("RANK", rank);
        put("WORLD_SIZE", world);
        put("LOCAL_WORLD_SIZE", world);
    }
    if (l == TORCHRUN) {
        setenv("TORCHELASTIC_RUN_ID", "none", 1);
        put("LOCAL_WORLD_SIZE", world / agents);
        put("GROUP_WORLD_SIZE", agents);
    }
    if (l == SLURM) {
        setenv("SLURM_STEP_ID", "0", 1);
        put("SLURM_TASK_PID", is_inner ? (int)getpid() : 1);
    }
    put(rank_variable[l], rank);
    put(world_variable[l], world);
}

/* ---- every ordered pair ---- */

/* INNER: the inner launcher decides, without a message. REFUSED: the variables contradict each other, or do
 * not tell. */
enum outcome { NONE, INNER, REFUSED };

static const enum outcome outcomes[N_LAUNCHERS][N_LAUNCHERS] = {
    /* rows: the outer launcher; columns: inner zero-run, torchrun, Open MPI, MPICH, Slurm */
    [ZERO_RUN] = {NONE, REFUSED, REFUSED, REFUSED, REFUSED},
    [TORCHRUN] = {INNER, NONE, REFUSED, REFUSED, REFUSED},
    [OPEN_MPI] = {INNER, INNER, NONE, REFUSED, REFUSED},
    [MPICH] = {INNER, INNER, REFUSED, NONE, REFUSED},
    [SLURM] = {INNER, INNER, INNER, INNER, NONE},
};

/* Sets the variables of rank 0 of 2 of the outer launcher, and rank 3 of 4 of the inner one. An inner
 * torchrun has an agent in each process of the outer launcher. */
static void nest(enum launcher outer, enum launcher inner)
{
    begin();
    launch(outer, 0, 2, false, 1);
    launch(inner, 3, 4, true, 2);
}

static void expect(const char *what, int32_t want_rank, int32_t want_world)
{
    struct zero_place p;
    if (zero_find_place(NULL, &p))
        fail_msg("%s: %s", what, zero_last_error());
    if (p.rank != want_rank || p.world != want_world)
        fail_msg("%s: rank %d of %d", what, p.rank, p.world);
}

/* zero_find_place must fail with all these texts (up to NULL) in its message, and zero_wrap with the same
 * message. */
static void refuse(const char *what, ...)
{
    struct zero_config cfg = ZERO_CONFIG_INIT;
    char said[1024];
    struct toy m;
    zero_ctx *z;
    va_list ap;
    struct zero_place p;
    int err = zero_find_place(NULL, &p);
    if (err != ZERO_ERR_ARG)
        fail_msg("%s: code %d", what, err);
    va_start(ap, what);
    for (const char *text; (text = va_arg(ap, const char *));)
        if (!strstr(zero_last_error(), text))
            fail_msg("%s: \"%s\" does not say \"%s\"", what, zero_last_error(), text);
    va_end(ap);
    snprintf(said, sizeof said, "zero_wrap: %s", zero_last_error() + strlen("zero_find_place: "));
    toy_make(&m);
    assert_int_equal(zero_wrap(&z, m.table, TOY_TENSORS, &cfg), err);
    assert_string_equal(zero_last_error(), said);
    toy_free(&m);
}

static void test_pairs(void **state)
{
    int n = 0;
    for (enum launcher outer = 0; outer < N_LAUNCHERS; outer++)
        for (enum launcher inner = 0; inner < N_LAUNCHERS; inner++) {
            char what[64];
            if (outcomes[outer][inner] == NONE)
                continue;
            snprintf(what, sizeof what, "%s inside %s", names[inner], names[outer]);
            nest(outer, inner);
            if (outcomes[outer][inner] == INNER)
                expect(what, 3, 4);
            else
                refuse(what, rank_variable[outer], world_variable[outer], rank_variable[inner],
                       world_variable[inner], "contradict each other", NULL);
            n++;
        }
    assert_int_equal(n, 20);
    begin();
}

/* Launchers that agree cause no error, whichever is the inner one. */
static void test_agree(void **state)
{
    for (enum launcher outer = 0; outer < N_LAUNCHERS; outer++)
        for (enum launcher inner = 0; inner < N_LAUNCHERS; inner++) {
            begin();
            launch(outer, 1, 2, false, 1);
            launch(inner, 1, 2, true, 1);
            expect(names[inner], 1, 2);
        }
    begin();
}

/* ---- RANK and WORLD_SIZE that torchrun did not set ---- */

static void test_left_over(void **state)
{
    for (enum launcher l = OPEN_MPI; l < N_LAUNCHERS; l++) {
        begin();
        put("RANK", 0);
        put("WORLD_SIZE", 1);
        expect("RANK and WORLD_SIZE alone", 0, 1);
        launch(l, 1, 2, true, 1);
        refuse(names[l], "RANK is 0 and WORLD_SIZE is 1", rank_variable[l], " is 1 and ", world_variable[l],
               " is 2", "choose by ZERO_RANK and ZERO_WORLD_SIZE", NULL);
        put("RANK", 1);
        put("WORLD_SIZE", 2);
        expect(names[l], 1, 2);
        unsetenv("WORLD_SIZE");
        refuse(names[l], "WORLD_SIZE is not set though RANK is \"1\"", NULL);
        /* The user's choice takes precedence, and leftover variables do not matter. */
        put("WORLD_SIZE", 9);
        put("ZERO_RANK", 3);
        put("ZERO_WORLD_SIZE", 5);
        expect(names[l], 3, 5);
    }
    begin();
    launch(ZERO_RUN, 1, 2, true, 1);
    put("RANK", 0);
    refuse("zero-run", "ZERO_RANK is 1 and ZERO_WORLD_SIZE is 2 (zero-run), but RANK is 0", NULL);
    begin();
}

/* ---- variables that Slurm leaves in a shell ---- */

static void test_slurm_shells(void **state)
{
    /* A batch script has SLURM_PROCID 0 and no step. It may start ranks with RANK and WORLD_SIZE. */
    begin();
    put("SLURM_PROCID", 0);
    put("SLURM_NTASKS", 4);
    expect("a batch script", 0, 4);
    put("RANK", 1);
    put("WORLD_SIZE", 2);
    expect("a loop in a batch script", 1, 2);
    /* mpirun's daemons are tasks of a step on some hosts, and have no task number on the first host. */
    begin();
    launch(SLURM, 1, 3, false, 1);
    launch(OPEN_MPI, 5, 8, true, 1);
    expect("mpirun in an allocation", 5, 8);
    /* srun --mpi=pmi2 sets the variables of MPICH and of Slurm. */
    begin();
    launch(SLURM, 1, 3, true, 1);
    launch(MPICH, 1, 3, true, 1);
    expect("srun --mpi=pmi2", 1, 3);
    put("SLURM_TASK_PID", 1);
    launch(OPEN_MPI, 5, 8, true, 1);
    expect("mpirun in a step with --mpi=pmi2", 5, 8);
    unsetenv("OMPI_COMM_WORLD_RANK");
    unsetenv("OMPI_COMM_WORLD_SIZE");
    launch(TORCHRUN, 7, 8, true, 1);
    expect("torchrun in a step with --mpi=pmi2", 7, 8);
    /* A single task contradicts nothing. */
    begin();
    launch(SLURM, 0, 1, true, 1);
    launch(TORCHRUN, 1, 2, true, 1);
    expect("torchrun and a single task", 1, 2);
    begin();
}

static void count_note(void *arg, const char *line)
{
    if (strstr(line, "this is rank 0 of 1 by torchrun's variables, and task 1 of 2 of srun's"))
        ++*(int *)arg;
}

/* Either each of two tasks starts a separate torchrun, or torchrun's variables are leftovers. One log line
 * says so. */
static void test_torchrun_alone_in_task(void **state)
{
    struct zero_config cfg = ZERO_CONFIG_INIT;
    int n_notes = 0;
    struct toy m;
    zero_ctx *z;
    cfg.debug.log = count_note;
    cfg.debug.log_arg = &n_notes;
    begin();
    launch(SLURM, 1, 2, false, 1);
    launch(TORCHRUN, 0, 1, true, 1);
    toy_make(&m);
    assert_int_equal(zero_wrap(&z, m.table, TOY_TENSORS, &cfg), 0);
    assert_int_equal(n_notes, 1);
    assert_int_equal(zero_unwrap(&z), 0);
    put("GROUP_WORLD_SIZE", 2); /* one agent per task is correct */
    toy_free(&m);
    toy_make(&m);
    assert_int_equal(zero_wrap(&z, m.table, TOY_TENSORS, &cfg), 0);
    assert_int_equal(n_notes, 1);
    assert_int_equal(zero_unwrap(&z), 0);
    toy_free(&m);
    begin();
}

/* ---- backend mpi ---- */

/* With backend mpi a rank has the number that MPI's launcher gave it. Other variables that contradict it are
 * refused. */
static void test_backend_mpi(void **state)
{
    for (enum launcher l = OPEN_MPI; l <= MPICH; l++) {
        begin();
        launch(l, 1, 2, true, 1);
        put("ZERO_RANK", 0);
        put("ZERO_WORLD_SIZE", 1);
        expect(names[l], 0, 1);
        setenv("ZERO_BACKEND", "mpi", 1);
        refuse(names[l],
               "backend mpi works with the ranks of MPI_COMM_WORLD: unset ZERO_RANK and ZERO_WORLD_SIZE",
               NULL);
        begin();
        launch(l, 1, 2, false, 1);
        launch(TORCHRUN, 3, 4, true, 2);
        expect(names[l], 3, 4);
        setenv("ZERO_BACKEND", "mpi", 1);
        refuse(names[l], "unset RANK and WORLD_SIZE", NULL);
    }
    /* The variables of one MPI are leftovers. */
    begin();
    launch(OPEN_MPI, 1, 2, true, 1);
    launch(MPICH, 0, 1, true, 1);
    setenv("ZERO_BACKEND", "mpi", 1);
    refuse("two MPIs",
           "unset those of the launcher that did not start this process, OMPI_COMM_WORLD_RANK and "
           "OMPI_COMM_WORLD_SIZE or PMI_RANK and PMI_SIZE",
           NULL);
    begin();
    launch(ZERO_RUN, 1, 2, true, 1);
    setenv("ZERO_BACKEND", "mpi", 1);
    refuse("zero-run",
           "backend is mpi, but zero-run started this rank (ZERO_WORLD_SIZE is 2), and zero-run starts "
           "no MPI: start the ranks by one mpirun",
           NULL);
    begin();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_pairs),
        cmocka_unit_test(test_agree),
        cmocka_unit_test(test_left_over),
        cmocka_unit_test(test_slurm_shells),
        cmocka_unit_test(test_torchrun_alone_in_task),
        cmocka_unit_test(test_backend_mpi),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
