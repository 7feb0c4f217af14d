/* SPDX-License-Identifier: Apache-2.0 */
/* launcher.c: finds the launcher that counts. The variables of that launcher are read strictly: half of a
 * pair, text that is not a number and a rank outside its world are errors. Going on to the next launcher
 * instead could train N independent copies of one model. */
#include "comm/meet/launcher.h"
#include "comm/process_stat.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const struct zr_launcher launchers[ZR_LAUNCHERS] = {
    {.kind = ZR_LAUNCHER_ZERO_RUN,
     .source = "zero-run",
     .rank = "ZERO_RANK",
     .world = "ZERO_WORLD_SIZE",
     .local_rank = "ZERO_LOCAL_RANK"},
    {.kind = ZR_LAUNCHER_BY_HAND,
     .source = "ZERO_RANK",
     .rank = "ZERO_RANK",
     .world = "ZERO_WORLD_SIZE",
     .local_rank = "ZERO_LOCAL_RANK"},
    {.kind = ZR_LAUNCHER_TORCHRUN,
     .source = "torchrun",
     .rank = "RANK",
     .world = "WORLD_SIZE",
     .local_rank = "LOCAL_RANK",
     .job = {"TORCHELASTIC_RUN_ID"},
     .attempt = "TORCHELASTIC_RESTART_COUNT"},
    {.kind = ZR_LAUNCHER_OMPI,
     .source = "Open MPI",
     .rank = "OMPI_COMM_WORLD_RANK",
     .world = "OMPI_COMM_WORLD_SIZE",
     .local_rank = "OMPI_COMM_WORLD_LOCAL_RANK",
     .local_size = "OMPI_COMM_WORLD_LOCAL_SIZE",
     .gives_no_address = true,
     .is_of_mpi = true,
     .job = {"PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"}},
    {.kind = ZR_LAUNCHER_MPICH,
     .source = "MPICH",
     .rank = "PMI_RANK",
     .world = "PMI_SIZE",
     .local_rank = "MPI_LOCALRANKID",
     .local_size = "MPI_LOCALNRANKS",
     .gives_no_address = true,
     .is_of_mpi = true,
     .is_of_slurm = true, /* srun --mpi=pmi2 */
     .job = {"PMI_JOBID", "PMI_KVSNAME"}},
    {.kind = ZR_LAUNCHER_SLURM,
     .source = "Slurm",
     .rank = "SLURM_PROCID",
     .world = "SLURM_NTASKS",
     .local_rank = "SLURM_LOCALID",
     .gives_no_address = true,
     .is_of_slurm = true,
     .job = {"SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID"},
     .attempt = "SLURM_RESTART_COUNT"},
    {.kind = ZR_LAUNCHER_PLAIN,
     .source = "RANK",
     .rank = "RANK",
     .world = "WORLD_SIZE",
     .local_rank = "LOCAL_RANK",
     .attempt = "TORCHELASTIC_RESTART_COUNT"},
};

int zr_meeting_number(const char *name, const char *text, int lo, int hi, int *out)
{
    char *end;
    errno = 0;
    long v = strtol(text, &end, 10);
    bool digits = text[0] == '-' ? text[1] >= '0' && text[1] <= '9' : text[0] >= '0' && text[0] <= '9';
    if (!digits || *end || errno == ERANGE || v < lo || v > hi)
        return zr_fail(ZERO_ERR_ARG, "%s is \"%.64s\": a whole number from %d to %d is allowed", name, text,
                       lo, hi);
    *out = (int)v;
    return 0;
}

bool zr_launcher_is_slurm_task(int rank, int world)
{
    const char *task = getenv("SLURM_PROCID"), *n = getenv("SLURM_NTASKS");
    char want_task[16], want_n[16];
    snprintf(want_task, sizeof want_task, "%d", rank);
    snprintf(want_n, sizeof want_n, "%d", world);
    return task && n && strcmp(task, want_task) == 0 && strcmp(n, want_n) == 0;
}

/* --- launchers that are set --- */

static const char slurm_step_tasks[] = "SLURM_STEP_NUM_TASKS";

static bool is_torchruns(void)
{
    return getenv("TORCHELASTIC_RUN_ID") || getenv("LOCAL_WORLD_SIZE");
}

/* Whether this is a task of srun. A batch script has SLURM_PROCID and SLURM_NTASKS like a task, but no
 * SLURM_STEP_ID. */
static bool is_in_step(void)
{
    return getenv("SLURM_STEP_ID") != NULL;
}

static bool says_more_than(const char *text, const char *least)
{
    return text && strcmp(text, least) != 0;
}

/* Returns whether Slurm's variables count. The shell of an allocation lacks SLURM_PROCID, and a batch script
 * may lack SLURM_NTASKS. Task 0 of a world of 1 shows nothing. A batch script starts its ranks by RANK and
 * WORLD_SIZE if they are set. Any other half of what srun sets is read, and refused. */
static bool is_slurm_set(const char *rank, const char *world)
{
    bool is_plain = getenv("RANK") || getenv("WORLD_SIZE");
    bool has_others = says_more_than(world, "1") || says_more_than(getenv(slurm_step_tasks), "1");
    bool is_more = says_more_than(rank, "0") || (has_others && (rank || (world && is_in_step())));
    return is_more && (is_in_step() || !is_plain);
}

static bool is_set(const struct zr_launcher *l)
{
    const char *rank = getenv(l->rank), *world = getenv(l->world);
    switch (l->kind) {
    case ZR_LAUNCHER_ZERO_RUN:
        return (rank || world) && getenv("ZERO_JOB");
    case ZR_LAUNCHER_BY_HAND:
        return (rank || world) && !getenv("ZERO_JOB");
    case ZR_LAUNCHER_TORCHRUN:
        return (rank || world) && is_torchruns();
    case ZR_LAUNCHER_PLAIN:
        return (rank || world) && !is_torchruns();
    case ZR_LAUNCHER_SLURM:
        return is_slurm_set(rank, world);
    case ZR_LAUNCHER_OMPI:
    case ZR_LAUNCHER_MPICH:
    case ZR_LAUNCHERS:
        break;
    }
    return rank || world;
}

/* --- reading variables --- */

/* Reads a variable that may be missing. *out then stays unchanged. */
static int read_optional(const char *name, int lo, int hi, int *out)
{
    const char *text = getenv(name);
    return text ? zr_meeting_number(name, text, lo, hi, out) : 0;
}

/* Compares the two variables that say how many tasks srun started. They may differ in the shell of salloc,
 * and with srun --preserve-env. */
static int check_step(const struct zr_launcher *l, int world)
{
    int n = world, err = read_optional(slurm_step_tasks, 1, ZR_MAX_RANKS, &n);
    if (err || n == world)
        return err;
    return zr_fail(ZERO_ERR_ARG,
                   "%s is %d, but %s is %d: start the ranks with srun, or choose by ZERO_RANK and "
                   "ZERO_WORLD_SIZE, which win",
                   l->world, world, slurm_step_tasks, n);
}

/* Number of ranks that torchrun's agent started, and of agents. 0: unknown. */
struct agents {
    int n_local, n;
};

static int read_agents(int world, struct agents *a)
{
    *a = (struct agents){0};
    int err = read_optional("LOCAL_WORLD_SIZE", 1, world, &a->n_local);
    return err ? err : read_optional("GROUP_WORLD_SIZE", 1, ZR_MAX_RANKS, &a->n);
}

static int read_ranks(const struct zr_launcher *l, struct zr_world *w)
{
    const char *rank = getenv(l->rank), *world = getenv(l->world), *local = getenv(l->local_rank);
    struct agents unused;
    if (!rank || !world)
        return zr_fail(ZERO_ERR_ARG, "%s is not set though %s is \"%.64s\": both or neither are allowed",
                       rank ? l->world : l->rank, rank ? l->rank : l->world, rank ? rank : world);
    int err = zr_meeting_number(l->world, world, 1, ZR_MAX_RANKS, &w->world);
    if (!err && l->kind == ZR_LAUNCHER_SLURM)
        err = check_step(l, w->world);
    if (!err && (err = zr_meeting_number(l->rank, rank, 0, w->world - 1, &w->rank)))
        return zr_fail_more(err, "%s is %d", l->world, w->world);
    if (!err && l->kind == ZR_LAUNCHER_TORCHRUN)
        err = read_agents(w->world, &unused);
    w->local_rank = w->rank;
    if (!err && local)
        err = zr_meeting_number(l->local_rank, local, 0, w->world - 1, &w->local_rank);
    w->has_local_rank = local != NULL;
    if (err)
        return err;
    snprintf(w->source, sizeof w->source, "%s", l->source);
    snprintf(w->size_from, sizeof w->size_from, "%s is %d%s", l->world, w->world,
             l->kind == ZR_LAUNCHER_SLURM && !is_in_step() ? ", but srun did not start this program" : "");
    return 0;
}

/* --- the launcher's process --- */

/* Returns whether process pid began with this rank's variables of l. -1: they cannot be read. */
static int began_as_this_rank(pid_t pid, const struct zr_launcher *l)
{
    const char *const names[] = {l->rank, l->world, "PMI_FD"};
    char path[32], *text = NULL;
    size_t n_text = 0;
    int n_equal = 0, n_set = 0;
    snprintf(path, sizeof path, "/proc/%ld/environ", (long)pid);
    FILE *f = fopen(path, "re");
    if (!f)
        return -1;
    for (int i = 0; i < 3; i++)
        n_set += getenv(names[i]) != NULL;
    while (getdelim(&text, &n_text, 0, f) > 0)
        for (int i = 0; i < 3; i++) {
            size_t n = strlen(names[i]);
            const char *own = getenv(names[i]);
            if (strncmp(text, names[i], n) == 0 && text[n] == '=')
                n_equal += own && strcmp(text + n + 1, own) == 0 ? 1 : -3;
        }
    bool is_read = !ferror(f);
    free(text);
    fclose(f);
    return is_read ? n_equal == n_set : -1;
}

bool zr_launcher_is_unchanged(const struct zr_launcher *l)
{
    return began_as_this_rank(getpid(), l) == 1;
}

pid_t zr_launcher_process(const struct zr_launcher *l)
{
    struct zr_process_stat s;
    for (pid_t pid = getppid(); pid > 0 && zr_process_stat(pid, &s); pid = s.parent) {
        /* The launcher of a job inside a rank of another job has that rank's variables. */
        int is_wrapper = strncmp(s.name, "hydra", 5) ? began_as_this_rank(pid, l) : 0;
        if (is_wrapper < 0)
            break;
        if (!is_wrapper)
            return pid;
    }
    return 0;
}

/* --- comparing launchers --- */

/* Returns how many agents torchrun has. 0: unknown. A launcher that starts the agents, such as mpirun, has
 * this number of ranks. */
static int count_agents(int world)
{
    struct agents a;
    if (read_agents(world, &a)) /* read_ranks has refused it */
        return 0;
    return a.n ? a.n : a.n_local && world % a.n_local == 0 ? world / a.n_local : 0;
}

/* Two launchers that disagree: l, which counts, and m. */
struct pair {
    const struct zr_launcher *l, *m;
    const struct zr_world *by_l, *by_m;
    bool by_mpi;
};

/* Returns whether this process is a task of srun, which gives each task the number of its process. A launcher
 * inside the task starts other processes. */
static bool is_task_itself(void)
{
    const char *task = getenv("SLURM_TASK_PID");
    char own[16];
    snprintf(own, sizeof own, "%ld", (long)getpid());
    return task && strcmp(task, own) == 0;
}

/* Returns whether m is Slurm, and not the innermost launcher. srun sets MPICH's variables too, with
 * --mpi=pmi2. */
static bool is_outer_slurm(const struct pair *p)
{
    return p->m->is_of_slurm && zr_launcher_is_slurm_task(p->by_m->rank, p->by_m->world) && !is_task_itself();
}

/* Returns whether m may be an outer launcher, whose ranks are not those of this job. */
static bool may_differ(const struct pair *p)
{
    bool needs_mpi = p->by_mpi && p->m->is_of_mpi;
    switch (p->l->kind) {
    case ZR_LAUNCHER_BY_HAND:
        return !needs_mpi;
    case ZR_LAUNCHER_TORCHRUN:
        return !needs_mpi && (is_outer_slurm(p) || count_agents(p->by_l->world) == p->by_m->world);
    case ZR_LAUNCHER_OMPI:
    case ZR_LAUNCHER_MPICH:
        return is_outer_slurm(p);
    case ZR_LAUNCHER_ZERO_RUN: /* zero-run removes the variables of an outer launcher */
    case ZR_LAUNCHER_SLURM:
    case ZR_LAUNCHER_PLAIN:
    case ZR_LAUNCHERS:
        break;
    }
    return false;
}

static const char *label_of(const struct zr_launcher *l)
{
    return l->kind == ZR_LAUNCHER_BY_HAND ? "set by hand"
           : l->kind == ZR_LAUNCHER_PLAIN ? "set by hand, or left over"
                                          : l->source;
}

static int refuse_pair(const struct pair *p)
{
    const struct zr_launcher *l = p->l, *m = p->m;
    char cure[256];
    if (p->by_mpi && m->is_of_mpi && l->is_of_mpi)
        snprintf(cure, sizeof cure,
                 "backend mpi works with the ranks of MPI_COMM_WORLD: unset those of the launcher that did "
                 "not start "
                 "this process, %s and %s or %s and %s",
                 l->rank, l->world, m->rank, m->world);
    else if (p->by_mpi && m->is_of_mpi)
        snprintf(cure, sizeof cure, "backend mpi works with the ranks of MPI_COMM_WORLD: unset %s and %s",
                 l->rank, l->world);
    else if (l->kind == ZR_LAUNCHER_ZERO_RUN)
        snprintf(cure, sizeof cure, "start the program by one launcher only, or unset %s and %s", m->rank,
                 m->world);
    else
        snprintf(cure, sizeof cure,
                 "unset those that are left over, or choose by ZERO_RANK and ZERO_WORLD_SIZE, which win");
    return zr_fail(
        ZERO_ERR_ARG,
        "two launchers contradict each other: %s is %d and %s is %d (%s), but %s is %d and %s is %d "
        "(%s); %s",
        l->rank, p->by_l->rank, l->world, p->by_l->world, label_of(l), m->rank, p->by_m->rank, m->world,
        p->by_m->world, label_of(m), cure);
}

/* Notes that srun may have started several torchruns, one for each job, or that torchrun's variables are
 * left over. */
static void note_slurm(const struct pair *p, struct zr_world *w)
{
    if (p->l->kind == ZR_LAUNCHER_TORCHRUN && p->m->kind == ZR_LAUNCHER_SLURM && is_in_step() &&
        count_agents(w->world) != p->by_m->world)
        snprintf(
            w->note, sizeof w->note,
            "this is rank %d of %d by torchrun's variables, and task %d of %d of srun's: if torchrun did not "
            "start this program, unset RANK and WORLD_SIZE",
            w->rank, w->world, p->by_m->rank, p->by_m->world);
}

/* Returns whether the variables of m do not matter, so that they are not even read. */
static bool is_ignored(const struct zr_launcher *l, const struct zr_launcher *m, bool by_mpi)
{
    return l->kind == ZR_LAUNCHER_BY_HAND && !(by_mpi && m->is_of_mpi);
}

/* Returns whether the variables of m may be unreadable: an inner launcher may leave Slurm's like that. */
static bool may_be_unreadable(const struct zr_launcher *l, const struct zr_launcher *m)
{
    return m->kind == ZR_LAUNCHER_SLURM && l->kind != ZR_LAUNCHER_ZERO_RUN;
}

static int compare_one(const struct zr_launcher *l, const struct zr_launcher *m, bool by_mpi,
                       struct zr_world *w)
{
    struct zr_world said = {0};
    const struct pair p = {l, m, w, &said, by_mpi};
    int err = read_ranks(m, &said);
    if (err)
        return may_be_unreadable(l, m) ? 0 : err;
    if (said.rank == w->rank && said.world == w->world)
        return 0;
    if (!may_differ(&p))
        return refuse_pair(&p);
    note_slurm(&p, w);
    return 0;
}

static int compare_others(const struct zr_launcher *l, bool by_mpi, struct zr_world *w)
{
    int err = 0;
    for (const struct zr_launcher *m = l + 1; m < launchers + ZR_LAUNCHERS && !err; m++)
        if (is_set(m) && !is_ignored(l, m, by_mpi))
            err = compare_one(l, m, by_mpi, w);
    return err;
}

/* Returns whether a process may merely have inherited the variables, from a batch script's shell or a
 * container. */
static bool may_be_inherited(const struct zr_launcher *l)
{
    return l->kind == ZR_LAUNCHER_PLAIN || (l->kind == ZR_LAUNCHER_SLURM && !is_task_itself());
}

const struct zr_launcher *zr_launcher_of_larger(int world, struct zr_world *said, bool *is_sure)
{
    const struct zr_launcher *l = NULL;
    struct zr_saved_error kept;
    for (const struct zr_launcher *m = launchers; m < launchers + ZR_LAUNCHERS; m++)
        if (is_set(m) && (!l || (may_be_inherited(l) && !may_be_inherited(m))))
            l = m;
    if (!l)
        return NULL;
    *is_sure = !may_be_inherited(l);
    zr_error_save(&kept, 0);
    bool is_legible = read_ranks(l, said) == 0;
    zr_error_restore(&kept);
    return is_legible && said->world > world ? l : NULL;
}

int zr_launcher_find(bool by_mpi, const struct zr_launcher **out, struct zr_world *w)
{
    const struct zr_launcher *l = launchers;
    struct zr_world found = *w;
    while (l < launchers + ZR_LAUNCHERS && !is_set(l))
        l++;
    *out = NULL;
    if (l == launchers + ZR_LAUNCHERS)
        return 0;
    int err = read_ranks(l, &found);
    if (!err)
        err = compare_others(l, by_mpi, &found);
    if (err)
        return err;
    *out = l;
    *w = found;
    return 0;
}
