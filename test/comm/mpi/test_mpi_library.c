/* SPDX-License-Identifier: Apache-2.0 */
/* test_mpi_library.c: tests that the MPI module is loaded, or refused with a message that names the cause,
 * over libraries that pass for MPIs. Each case has its own process, since a loaded library stays loaded. */
#include "comm/mpi/mpi_library.h"
#include "kernels/error.h"
#include "test/cmocka.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

/* Where the fakes are, as shared libraries of those names. */
static const char *fakes;

/* The result of one process. */
struct outcome {
    int code, again;
    bool is_programs, is_programs_again;
    char version[ZR_MPI_VERSION_BYTES], text[ZR_ERROR_BYTES], line[1024];
};

/* module is a fake's name or a path. loaded lists fakes by name, and env lists NAME=VALUE; both are
 * separated by spaces. */
struct given {
    const char *module, *loaded, *env;
};

static const char *path_of(const char *name)
{
    static char path[512];
    snprintf(path, sizeof path, "%s/lib%s.so", fakes, name);
    return path;
}

static void load_word(char *word)
{
    const char *path = path_of(word);
    if (!dlopen(path, RTLD_NOW | RTLD_LOCAL))
        fprintf(stderr, "%s\n", dlerror());
}

static void for_each(const char *list, void (*fn)(char *word))
{
    char *copy = strdup(list ? list : ""), *rest = copy;
    for (char *word; (word = strsep(&rest, " "));)
        if (*word)
            fn(word);
    free(copy);
}

static void set_word(char *word)
{
    char *value = strchr(word, '=');
    *value = 0;
    setenv(word, value + 1, 1);
}

static void keep_line(void *arg, const char *line)
{
    struct outcome *o = arg;
    snprintf(o->line, sizeof o->line, "%s", line);
}

static void forget_jobs(void)
{
    static const char *const names[] = {
        "OMPI_COMM_WORLD_SIZE", "PMI_RANK",  "PMI_SIZE",     "PMI_FD", "PMI_PORT",
        "PMIX_NAMESPACE",       "PMIX_RANK", "SLURM_STEP_ID"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        unsetenv(names[i]);
}

static void look(const struct given *g, struct outcome *o)
{
    struct zr_mpi_library m;
    struct zr_log *log;
    forget_jobs();
    for_each(g->env, set_word);
    for_each(g->loaded, load_word);
    zr_mpi_module_file = !g->module || g->module[0] == '/' ? g->module : path_of(g->module);
    zr_log_open(keep_line, o, NULL, &log);
    o->code = zr_mpi_load(log, &m);
    snprintf(o->text, sizeof o->text, "%s", o->code ? zr_error_text() : "");
    if (!o->code) {
        o->is_programs = m.is_programs;
        snprintf(o->version, sizeof o->version, "%s", m.version);
        o->again = zr_mpi_load(NULL, &m);
        o->is_programs_again = m.is_programs;
    }
    zr_log_close(log);
}

static struct outcome outcome_of(struct given g)
{
    struct outcome o = {0};
    int ends[2], status;
    assert_int_equal(pipe(ends), 0);
    fflush(NULL);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        alarm(60);
        look(&g, &o);
        _exit(write(ends[1], &o, sizeof o) != sizeof o);
    }
    close(ends[1]);
    bool whole = read(ends[0], &o, sizeof o) == sizeof o;
    close(ends[0]);
    waitpid(child, &status, 0);
    if (!whole || status)
        fail_msg("loaded \"%s\", environment \"%s\": status 0x%x", g.loaded ? g.loaded : "",
                 g.env ? g.env : "", (unsigned)status);
    return o;
}

static void takes(struct given g, bool is_programs)
{
    struct outcome o = outcome_of(g);
    const char *version = strcmp(g.module, "fake_shim_ompi") ? "MPICH 9.8.7" : "Open MPI v9.8.7";
    if (o.code || o.is_programs != is_programs || strcmp(o.version, version))
        fail_msg("loaded \"%s\", environment \"%s\": code %d \"%s\", the program's %d, \"%s\"",
                 g.loaded ? g.loaded : "", g.env ? g.env : "", o.code, o.text, o.is_programs, o.version);
    if (o.again || o.is_programs_again != is_programs)
        fail_msg("the second time: code %d, the program's %d", o.again, o.is_programs_again);
    char line[1024];
    snprintf(line, sizeof line, "mpi: %s, by %s (%s)", version, path_of(g.module),
             is_programs ? "in the process already" : "loaded for libzero");
    assert_non_null(strstr(o.line, line));
}

static void refuses(struct given g, int code, const char *part, const char *other)
{
    struct outcome o = outcome_of(g);
    if (o.code != code || !strstr(o.text, part) || !strstr(o.text, other))
        fail_msg("loaded \"%s\", environment \"%s\": code %d \"%s\", expected %d with \"%s\" and \"%s\"",
                 g.loaded ? g.loaded : "", g.env ? g.env : "", o.code, o.text, code, part, other);
}

static const char ompi[] = "fake_shim_ompi", mpich[] = "fake_shim_mpich";

static void test_fits(void **state)
{
    takes((struct given){ompi, NULL, NULL}, false);
    takes((struct given){mpich, NULL, NULL}, false);
    takes((struct given){ompi, "fake_ompi", NULL}, true);
    takes((struct given){mpich, "fake_mpich", "PMI_RANK=1 PMI_SIZE=4"}, true);
    takes((struct given){ompi, NULL, "OMPI_COMM_WORLD_SIZE=4"}, false);
    takes((struct given){mpich, NULL, "PMI_FD=7"}, false);
    takes((struct given){mpich, NULL, "PMI_PORT=host:7"}, false);
    takes((struct given){ompi, NULL, "PMIX_NAMESPACE=a PMIX_RANK=1 SLURM_STEP_ID=0"}, false);
    takes((struct given){ompi, NULL, "OMPI_COMM_WORLD_SIZE=4 PMI_RANK=1 PMI_SIZE=4"}, false);
}

/* --- refusals --- */

static void test_other_launcher(void **state)
{
    refuses((struct given){mpich, NULL, "OMPI_COMM_WORLD_SIZE=4"}, ZERO_ERR_ARG,
            "this rank was started by Open MPI's mpirun (OMPI_COMM_WORLD_SIZE is 4), but libzero was built "
            "for MPICH 9.8.7, which sees 1 rank: ",
            "start it by mpiexec of MPICH, or build libzero and the program with Open MPI (-Dmpi=ompi)");
    refuses((struct given){ompi, "fake_ompi", "PMI_RANK=1 PMI_SIZE=4"}, ZERO_ERR_ARG,
            "this rank was started by MPICH's launcher (PMI_RANK is 1, PMI_SIZE is 4), but libzero was "
            "built for Open MPI v9.8.7, which sees 1 rank: ",
            "start it by mpirun of Open MPI, or build libzero and the program with MPICH (-Dmpi=mpich)");
    /* A program's MPI that has begun knows how many ranks it has. */
    takes((struct given){ompi, "fake_ompi", "PMI_RANK=1 PMI_SIZE=4 FAKE_MPI_HAS_BEGUN=1"}, true);
}

static void test_slurm(void **state)
{
    static const char said[] = "this rank was started by srun without PMIx (PMIX_NAMESPACE is not set)";
    refuses((struct given){ompi, NULL, "SLURM_STEP_ID=0"}, ZERO_ERR_ARG, said, "srun --mpi=pmix");
    refuses((struct given){ompi, "fake_ompi", "SLURM_STEP_ID=0"}, ZERO_ERR_ARG, said, "or mpirun");
    takes((struct given){ompi, "fake_ompi", "SLURM_STEP_ID=0 FAKE_MPI_HAS_BEGUN=1"}, true);
    takes((struct given){mpich, "fake_mpich", "SLURM_STEP_ID=0"}, true);
}

static void test_other_mpi(void **state)
{
    refuses((struct given){mpich, "fake_ompi", NULL}, ZERO_ERR_NOTSUP,
            "this process has loaded Open MPI v9.8.7 (", "libfake_shim_mpich.so): build both with one MPI");
    refuses((struct given){ompi, "fake_mpich", NULL}, ZERO_ERR_NOTSUP,
            "this process has loaded MPICH 9.8.7 (",
            "libfake_mpich.so), but libzero was built for Open MPI 1.2.3 (");
    refuses((struct given){ompi, "fake_ompi fake_mpich", NULL}, ZERO_ERR_NOTSUP,
            "this process has loaded two MPIs, ", "libfake_mpich.so (MPICH 9.8.7): load one of them only");
    refuses((struct given){ompi, "fake_other", NULL}, ZERO_ERR_NOTSUP,
            "this process has an MPI that is neither Open MPI nor of MPICH's kind: \"Somebody's MPI 1.0\" (",
            "libfake_other.so)");
    refuses((struct given){mpich, "fake_intel", NULL}, ZERO_ERR_NOTSUP,
            "this process has loaded Intel(R) MPI Library 2021.6 for Linux* OS (",
            "but libzero's module for MPI works with MPICH 9.8.7 (");
}

static void test_module(void **state)
{
    refuses((struct given){"fake_shim_old", NULL, NULL}, ZERO_ERR_NOTSUP,
            "libfake_shim_old.so is of another libzero (its table is version 77 of ", "install both again");
    refuses((struct given){"fake_ompi", NULL, NULL}, ZERO_ERR_NOTSUP,
            "libfake_ompi.so has no zero_mpi_shim_1: ", "it is not libzero's module for MPI");
#ifdef ZR_NO_MPI
    refuses((struct given){"/nowhere/libzero-mpi.so", NULL, NULL}, ZERO_ERR_NOTSUP,
            "backend is mpi, but this libzero was built without MPI: ", ZR_NO_MPI);
#else
    refuses((struct given){"/nowhere/libzero-mpi.so", NULL, NULL}, ZERO_ERR_NOTSUP,
            "backend is mpi, but libzero's module for MPI cannot be loaded: /nowhere/libzero-mpi.so: ",
            "cannot open shared object file");
#endif
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_fits),      cmocka_unit_test(test_other_launcher), cmocka_unit_test(test_slurm),
        cmocka_unit_test(test_other_mpi), cmocka_unit_test(test_module),
    };
    fakes = getenv("FAKE_MPI");
    return fakes ? cmocka_run_group_tests_name("mpi library", tests, NULL, NULL) : 1;
}
