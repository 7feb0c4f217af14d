/* SPDX-License-Identifier: Apache-2.0 */
/* run_env.c: the environment that makes a process a rank. */
#include "kernels/asserts.h"
#include "zero/run/run.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Variables that make a process take itself for a rank of another launcher, or of an outer zero-run. They are
 * removed, and the first fifteen are set anew. A name that ends in _ stands for all that begin with it. */
static const char *const launcher_variables[] = {
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT",
    "ZERO_RANK", "ZERO_WORLD_SIZE", "ZERO_LOCAL_RANK", "ZERO_JOB", "ZERO_JOB_KEY", "ZERO_ATTEMPT",
    "ZERO_PROGRESS", "ZERO_FLIGHT_FD",
    /* libzero's own, which take precedence over those that are set anew */
    "ZERO_RENDEZVOUS", "ZERO_JOB_KEY_FILE",
    /* torchrun's */
    "TORCHELASTIC_", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME",
    /* Open MPI's, MPICH's, Slurm's */
    "OMPI_COMM_WORLD_", "PMIX_RANK", "PMI_RANK", "PMI_SIZE", "PMI_FD", "PMI_PORT", "MPI_LOCALRANKID",
    "MPI_LOCALNRANKS", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"};

/* Whether an entry of the environment, NAME=VALUE, is one of these variables. */
static bool is_launcher_variable(const char *entry)
{
    size_t n_name = strcspn(entry, "=");
    for (size_t i = 0; i < sizeof launcher_variables / sizeof *launcher_variables; i++) {
        const char *name = launcher_variables[i];
        size_t n = strlen(name);
        if (name[n - 1] == '_' ? n_name > n && !memcmp(entry, name, n)
                               : n_name == n && !memcmp(entry, name, n))
            return true;
    }
    return false;
}

/* An environment under construction, in one allocation, and the memory of the next entry's text. */
struct environment {
    char **env, *text;
    /* all entries, and those that are set here */
    size_t n, n_new;
};
enum { N_NEW = 21, NEW_BYTES = sizeof((struct zr_run_options *)0)->meet_file + 64 };

static void __attribute__((format(printf, 2, 3))) add(struct environment *e, const char *fmt, ...)
{
    va_list ap;
    ZR_ASSERT(e->n_new < N_NEW);
    e->n_new++;
    va_start(ap, fmt);
    vsnprintf(e->text, NEW_BYTES, fmt, ap);
    va_end(ap);
    e->env[e->n++] = e->text;
    e->text += NEW_BYTES;
}

static bool has_name(const char *entry, const char *name)
{
    size_t n = strlen(name);
    return !strncmp(entry, name, n) && entry[n] == '=';
}

/* Copies this process's environment without launcher variables and without what is set anew. plain: TERM is
 * set anew. */
static bool copy_environment(struct environment *e, const struct zr_run_assignment *s, bool plain)
{
    size_t n = 0;
    while (environ[n])
        n++;
    e->n = e->n_new = 0;
    e->env = malloc((n + N_NEW + 1) * sizeof *e->env + (size_t)N_NEW * NEW_BYTES);
    if (!e->env)
        return false;
    e->text = (char *)(e->env + n + N_NEW + 1);
    for (size_t i = 0; i < n; i++)
        if (!is_launcher_variable(environ[i]) && !(plain && has_name(environ[i], "TERM")) &&
            !(s->accum && has_name(environ[i], "ZERO_GRAD_ACCUM_STEPS")))
            e->env[e->n++] = environ[i];
    return true;
}

char **zr_run_environment(const struct zr_run_options *o, const struct zr_run_assignment *s, int local_rank,
                          const char *progress, bool flight)
{
    /* If our output is not a terminal, ranks must not use colours or move the cursor. */
    bool plain = !o->raw && !isatty(STDOUT_FILENO);
    struct environment e;
    if (!copy_environment(&e, s, plain))
        return NULL;
    add(&e, "RANK=%d", s->first_rank + local_rank);
    add(&e, "WORLD_SIZE=%d", s->world);
    add(&e, "LOCAL_RANK=%d", local_rank);
    add(&e, "LOCAL_WORLD_SIZE=%d", s->n_ranks);
    add(&e, "GROUP_RANK=%d", s->node);
    add(&e, "MASTER_ADDR=%s", s->host);
    add(&e, "MASTER_PORT=%d", s->port);
    if (o->n_nodes > 1 && o->meet_file[0])
        add(&e, "ZERO_RENDEZVOUS=file://%s", o->meet_file);
    add(&e, "ZERO_RANK=%d", s->first_rank + local_rank);
    add(&e, "ZERO_WORLD_SIZE=%d", s->world);
    add(&e, "ZERO_LOCAL_RANK=%d", local_rank);
    add(&e, "ZERO_JOB=%s", s->job);
    add(&e, "ZERO_JOB_KEY=%s", o->key);
    add(&e, "ZERO_ATTEMPT=%d", s->attempt);
    add(&e, "ZERO_PROGRESS=%s:%d", progress, local_rank);
    if (flight)
        add(&e, "ZERO_FLIGHT_FD=%d", ZR_RUN_FLIGHT_FD);
    if (s->accum)
        add(&e, "ZERO_GRAD_ACCUM_STEPS=%d", s->accum);
    if (plain)
        add(&e, "TERM=dumb");
    /* The communicators of a GPU may deadlock unless NCCL starts their kernels in the order of the calls
     * (NCCL 2.26). Streams that share one of CUDA's connections, 8 by default, wait for each other. */
    if (!getenv("NCCL_LAUNCH_ORDER_IMPLICIT"))
        add(&e, "NCCL_LAUNCH_ORDER_IMPLICIT=1");
    if (!getenv("CUDA_DEVICE_MAX_CONNECTIONS"))
        add(&e, "CUDA_DEVICE_MAX_CONNECTIONS=32");
    if (!getenv("OMP_NUM_THREADS")) {
        int each = (int)uv_available_parallelism() / s->n_ranks;
        add(&e, "OMP_NUM_THREADS=%d", each > 1 ? each : 1);
    }
    e.env[e.n] = NULL;
    return e.env;
}
