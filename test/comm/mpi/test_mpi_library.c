/* SPDX-License-Identifier: Apache-2.0 */
/* test_mpi_library.c: which MPI is taken, and what is refused by name, over libraries that pass for MPIs.
 * Each case is in a process of its own, since what is loaded stays. */
#include "comm/mpi/mpi_library.h"
#include "kernels/error.h"

#include <dlfcn.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

/* Where the fakes are, as shared libraries of those names. */
static const char *fakes;
/* A folder that has the shims of both under the names that are looked for. */
static char shims[64];

/* What a process finds. */
struct outcome {
    int code, again;
    enum zr_mpi_kind kind;
    bool is_programs, is_programs_again;
    char version[ZR_MPI_VERSION_BYTES], text[ZR_ERROR_BYTES], line[1024];
};

/* loaded: fakes, by name, space between; env: NAME=VALUE, space between. */
struct given {
    const char *loaded, *env;
    enum zr_mpi_kind wanted;
};

static void load_fake(const char *name)
{
    char path[512];
    snprintf(path, sizeof path, "%s/lib%s.so", fakes, name);
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

static void load_word(char *word)
{
    load_fake(word);
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
    setenv("ZERO_MPI_SHIMS", shims, 1);
    for_each(g->env, set_word);
    for_each(g->loaded, load_word);
    zr_log_open(keep_line, o, NULL, &log);
    o->code = zr_mpi_load(g->wanted, log, &m);
    snprintf(o->text, sizeof o->text, "%s", o->code ? zr_error_text() : "");
    if (!o->code) {
        o->kind = m.kind;
        o->is_programs = m.is_programs;
        snprintf(o->version, sizeof o->version, "%s", m.version);
        o->again = zr_mpi_load(g->wanted, NULL, &m);
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

static void takes(struct given g, enum zr_mpi_kind kind, bool is_programs)
{
    struct outcome o = outcome_of(g);
    const char *version = kind == ZR_MPI_OMPI ? "Open MPI v9.8.7" : "MPICH 9.8.7";
    if (o.code || o.kind != kind || o.is_programs != is_programs || strcmp(o.version, version))
        fail_msg("loaded \"%s\", environment \"%s\": code %d \"%s\", kind %d, the program's %d, \"%s\"",
                 g.loaded ? g.loaded : "", g.env ? g.env : "", o.code, o.text, o.kind, o.is_programs,
                 o.version);
    if (o.again || o.is_programs_again != is_programs)
        fail_msg("the second time: code %d, the program's %d", o.again, o.is_programs_again);
    char line[256];
    snprintf(line, sizeof line, "mpi: %s, by %s/libzero-mpi-%s.so (%s)", version, shims,
             kind == ZR_MPI_OMPI ? "ompi" : "mpich",
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

/* --- which --- */

static void test_process_decides(void **state)
{
    (void)state;
    takes((struct given){"fake_ompi", NULL, ZR_MPI_AUTO}, ZR_MPI_OMPI, true);
    takes((struct given){"fake_mpich", NULL, ZR_MPI_AUTO}, ZR_MPI_MPICH, true);
    takes((struct given){"fake_mpich", NULL, ZR_MPI_MPICH}, ZR_MPI_MPICH, true);
    takes((struct given){"fake_mpich", "PMI_RANK=1 PMI_SIZE=4", ZR_MPI_AUTO}, ZR_MPI_MPICH, true);
}

static void test_then_the_launcher(void **state)
{
    (void)state;
    takes((struct given){NULL, "OMPI_COMM_WORLD_SIZE=4", ZR_MPI_AUTO}, ZR_MPI_OMPI, false);
    takes((struct given){NULL, "PMI_RANK=1 PMI_SIZE=4", ZR_MPI_AUTO}, ZR_MPI_MPICH, false);
    takes((struct given){NULL, "PMI_FD=7", ZR_MPI_AUTO}, ZR_MPI_MPICH, false);
    takes((struct given){NULL, "PMI_PORT=host:7", ZR_MPI_MPICH}, ZR_MPI_MPICH, false);
    takes((struct given){NULL, "PMIX_NAMESPACE=a PMIX_RANK=1 SLURM_STEP_ID=0", ZR_MPI_AUTO}, ZR_MPI_OMPI,
          false);
    takes((struct given){NULL, "OMPI_COMM_WORLD_SIZE=4 PMI_RANK=1 PMI_SIZE=4", ZR_MPI_AUTO}, ZR_MPI_OMPI,
          false);
}

static void test_then_the_configuration(void **state)
{
    (void)state;
    takes((struct given){NULL, NULL, ZR_MPI_AUTO}, ZR_MPI_OMPI, false);
    takes((struct given){NULL, NULL, ZR_MPI_OMPI}, ZR_MPI_OMPI, false);
    takes((struct given){NULL, NULL, ZR_MPI_MPICH}, ZR_MPI_MPICH, false);
}

/* --- what is refused --- */

static void test_contradictions(void **state)
{
    (void)state;
    refuses((struct given){"fake_ompi", NULL, ZR_MPI_MPICH}, ZR_ERR_ARG,
            "mpi is mpich, but this process has loaded Open MPI v9.8.7 (",
            "libfake_ompi.so); allowed: auto, ompi");
    refuses((struct given){NULL, "PMI_RANK=1 PMI_SIZE=4", ZR_MPI_OMPI}, ZR_ERR_ARG,
            "mpi is ompi, but this rank was started by MPICH's launcher (PMI_RANK is 1, PMI_SIZE is 4)",
            "; allowed: auto, mpich");
    refuses(
        (struct given){"fake_mpich", "OMPI_COMM_WORLD_SIZE=4", ZR_MPI_AUTO}, ZR_ERR_ARG,
        "this rank was started by Open MPI's mpirun (OMPI_COMM_WORLD_SIZE is 4), but the program has loaded "
        "MPICH 9.8.7 (",
        "which sees 1 rank: start it by mpiexec of MPICH, or link it with Open MPI");
    refuses((struct given){"fake_ompi", "PMI_RANK=1 PMI_SIZE=4", ZR_MPI_AUTO}, ZR_ERR_ARG,
            "this rank was started by MPICH's launcher (PMI_RANK is 1, PMI_SIZE is 4), but the program has "
            "loaded "
            "Open MPI v9.8.7 (",
            "which sees 1 rank: start it by mpirun of Open MPI, or link it with MPICH");
    /* a program's MPI that has begun knows how many ranks it has */
    takes((struct given){"fake_ompi", "PMI_RANK=1 PMI_SIZE=4 FAKE_MPI_HAS_BEGUN=1", ZR_MPI_AUTO}, ZR_MPI_OMPI,
          true);
}

static void test_slurm(void **state)
{
    static const char said[] = "this rank was started by srun without PMIx (PMIX_NAMESPACE is not set)";
    (void)state;
    refuses((struct given){NULL, "SLURM_STEP_ID=0", ZR_MPI_AUTO}, ZR_ERR_ARG, said, "srun --mpi=pmix");
    refuses((struct given){"fake_ompi", "SLURM_STEP_ID=0", ZR_MPI_AUTO}, ZR_ERR_ARG, said, "or mpirun");
    takes((struct given){"fake_ompi", "SLURM_STEP_ID=0 FAKE_MPI_HAS_BEGUN=1", ZR_MPI_AUTO}, ZR_MPI_OMPI,
          true);
    takes((struct given){"fake_mpich", "SLURM_STEP_ID=0", ZR_MPI_AUTO}, ZR_MPI_MPICH, true);
}

static void test_several(void **state)
{
    (void)state;
    refuses((struct given){"fake_ompi fake_mpich", NULL, ZR_MPI_AUTO}, ZR_ERR_NOTSUP,
            "this process has loaded two MPIs, ", "libfake_mpich.so (MPICH 9.8.7): load one of them only");
    refuses((struct given){"fake_other", NULL, ZR_MPI_AUTO}, ZR_ERR_NOTSUP,
            "this process has an MPI that is neither Open MPI nor of MPICH's kind: \"Somebody's MPI 1.0\" (",
            "libfake_other.so)");
    refuses((struct given){"fake_intel", NULL, ZR_MPI_AUTO}, ZR_ERR_NOTSUP,
            "this process has loaded Intel(R) MPI Library 2021.6 for Linux* OS (",
            "but libzero's library for MPICH works with MPICH 9.8.7 (");
}

/* Puts a fake under the name of the shim for Open MPI into a new folder. */
static void put(const char *fake, char *folder)
{
    char from[512], to[128];
    strcpy(folder, "/tmp/zero-mpi-XXXXXX");
    assert_non_null(mkdtemp(folder));
    snprintf(from, sizeof from, "%s/lib%s.so", fakes, fake);
    snprintf(to, sizeof to, "%s/libzero-mpi-ompi.so", folder);
    assert_int_equal(symlink(from, to), 0);
}

static void take_away(const char *folder, const char *key)
{
    char path[128];
    snprintf(path, sizeof path, "%s/libzero-mpi-%s.so", folder, key);
    unlink(path);
}

static void refuses_shim(const char *fake, const char *part, const char *other)
{
    char folder[64], env[128];
    put(fake, folder);
    snprintf(env, sizeof env, "ZERO_MPI_SHIMS=%s", folder);
    refuses((struct given){NULL, env, ZR_MPI_OMPI}, ZR_ERR_NOTSUP, part, other);
    take_away(folder, "ompi");
    rmdir(folder);
}

static void test_shims(void **state)
{
    static const char none[] = "ZERO_MPI_SHIMS=/nowhere";
    (void)state;
    refuses_shim("fake_shim_old", "libzero-mpi-ompi.so is of another libzero (its table is version 77 of ",
                 "install both anew");
    refuses_shim("fake_ompi", "libzero-mpi-ompi.so has no zero_mpi_shim_1: ", "it is not libzero's library");
#ifdef ZR_NO_MPICH
    refuses((struct given){NULL, none, ZR_MPI_MPICH}, ZR_ERR_NOTSUP,
            "this libzero was built without MPICH: ", ZR_NO_MPICH);
#else
    refuses((struct given){NULL, none, ZR_MPI_MPICH}, ZR_ERR_NOTSUP,
            "libzero's library for MPICH is not there: looked for /nowhere/libzero-mpi-mpich.so: ",
            "cannot open shared object file");
#endif
#ifdef ZR_NO_OMPI
    refuses((struct given){"fake_ompi", none, ZR_MPI_AUTO}, ZR_ERR_NOTSUP,
            "this libzero was built without Open MPI: ", ZR_NO_OMPI);
#else
    refuses((struct given){"fake_ompi", none, ZR_MPI_AUTO}, ZR_ERR_NOTSUP,
            "libzero's library for Open MPI is not there: looked for /nowhere/libzero-mpi-ompi.so: ",
            "cannot open shared object file");
#endif
}

/* Both shims of fakes, as they are named. */
static int begin(void **state)
{
    char from[512], to[128];
    (void)state;
    fakes = getenv("ZERO_TEST_FAKE_MPI");
    assert_non_null(fakes);
    put("fake_shim_ompi", shims);
    snprintf(from, sizeof from, "%s/libfake_shim_mpich.so", fakes);
    snprintf(to, sizeof to, "%s/libzero-mpi-mpich.so", shims);
    return symlink(from, to);
}

static int end(void **state)
{
    (void)state;
    take_away(shims, "ompi");
    take_away(shims, "mpich");
    return rmdir(shims);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_process_decides),
        cmocka_unit_test(test_then_the_launcher),
        cmocka_unit_test(test_then_the_configuration),
        cmocka_unit_test(test_contradictions),
        cmocka_unit_test(test_slurm),
        cmocka_unit_test(test_several),
        cmocka_unit_test(test_shims),
    };
    return cmocka_run_group_tests_name("mpi library", tests, begin, end);
}
