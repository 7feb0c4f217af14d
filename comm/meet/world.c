/* world.c: rank and world, from the configuration or from what a launcher left in the environment. The first
 * source that is set wins and is then read strictly: half of a pair, text that is not a number or a rank
 * outside its world is an error, and no reason to look at the next source. Otherwise a launcher that is half
 * understood would train N independent copies of one model. */
#include "comm/meet/meeting_point.h"
#include "comm/meet/net_address.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const struct zr_launcher launchers[] = {
    {.source = "ZERO_RANK", .rank = "ZERO_RANK", .world = "ZERO_WORLD_SIZE", .local_rank = "ZERO_LOCAL_RANK"},
    {.source = "torchrun",
     .rank = "RANK",
     .world = "WORLD_SIZE",
     .local_rank = "LOCAL_RANK",
     .job = {"TORCHELASTIC_RUN_ID"},
     .attempt = "TORCHELASTIC_RESTART_COUNT"},
    {.source = "Open MPI",
     .rank = "OMPI_COMM_WORLD_RANK",
     .world = "OMPI_COMM_WORLD_SIZE",
     .local_rank = "OMPI_COMM_WORLD_LOCAL_RANK",
     .local_size = "OMPI_COMM_WORLD_LOCAL_SIZE",
     .gives_no_address = true,
     .is_of_mpi = true,
     .job = {"PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"}},
    {.source = "MPICH",
     .rank = "PMI_RANK",
     .world = "PMI_SIZE",
     .local_rank = "MPI_LOCALRANKID",
     .local_size = "MPI_LOCALNRANKS",
     .gives_no_address = true,
     .is_of_mpi = true,
     .is_of_slurm = true, /* srun --mpi=pmi2 */
     .job = {"PMI_JOBID", "PMI_KVSNAME"}},
    {.source = "Slurm",
     .rank = "SLURM_PROCID",
     .world = "SLURM_NTASKS",
     .local_rank = "SLURM_LOCALID",
     .gives_no_address = true,
     .is_of_slurm = true,
     .job = {"SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID"},
     .attempt = "SLURM_RESTART_COUNT",
     .single_means_alone = true},
};

/* Rank, world and source. */
static int read_ranks(const struct zr_launcher *l, struct zr_world *w)
{
    const char *rank = getenv(l->rank), *world = getenv(l->world), *local = getenv(l->local_rank);
    if (!rank || !world)
        return zr_fail(ZR_ERR_ARG, "%s is not set though %s is \"%.64s\": both or neither are allowed",
                       rank ? l->world : l->rank, rank ? l->rank : l->world, rank ? rank : world);
    int err = zr_meeting_number(l->world, world, 1, ZR_MOST_RANKS, &w->world);
    if (!err)
        err = zr_meeting_number(l->rank, rank, 0, w->world - 1, &w->rank);
    w->local_rank = w->rank;
    if (!err && local)
        err = zr_meeting_number(l->local_rank, local, 0, w->world - 1, &w->local_rank);
    w->has_local_rank = local != NULL;
    if (err)
        return err;
    snprintf(w->source, sizeof w->source, "%s", l->source);
    return 0;
}

static int read_launcher(const struct zr_launcher *l, const char *want_url, bool by_mpi, struct zr_world *w)
{
    int err = read_ranks(l, w);
    return err ? err : zr_meeting_point_find(l, want_url, by_mpi, w);
}

/* Is this the launcher that started us? */
static bool is_set(const struct zr_launcher *l)
{
    const char *rank = getenv(l->rank), *world = getenv(l->world);
    if (l->single_means_alone) {
        /* The shell of an allocation has SLURM_NTASKS but no SLURM_PROCID: not a task of ours. */
        return rank && world && strcmp(world, "1") != 0;
    }
    return rank || world;
}

static const struct zr_launcher *find_launcher(void)
{
    for (size_t i = 0; i < sizeof launchers / sizeof *launchers; i++)
        if (is_set(&launchers[i]))
            return &launchers[i];
    return NULL;
}

int zr_world_lent(const char *name, int want_rank, int want_world, const char *want_url, int comm_rank,
                  int comm_world, struct zr_world *w)
{
    struct zr_world found = {.rank = comm_rank, .local_rank = comm_rank, .world = comm_world}, said = found;
    const struct zr_launcher *l = want_world > 0 ? NULL : find_launcher();
    const char *url = want_url ? want_url : getenv("ZERO_RENDEZVOUS"), *master = getenv("MASTER_ADDR");
    int err = 0;
    strcpy(said.source, "rank and world of the configuration");
    if (want_world > 0)
        said.rank = want_rank, said.world = want_world;
    else if (l)
        err = read_ranks(l, &said);
    if (err)
        return err;
    if (said.rank != comm_rank || said.world != comm_world)
        return zr_fail(
            ZR_ERR_ARG,
            "%s is rank %d of %d, but %s%s: rank %d of %d; they must be the same (if the "
            "communicator is of some of the ranks only, set rank and world of the configuration to its)",
            name, comm_rank, comm_world, said.source, l ? "'s variables say" : " say", said.rank, said.world);
    found.local_rank = l ? said.local_rank : comm_rank;
    found.has_local_rank = said.has_local_rank;
    snprintf(found.source, sizeof found.source, "%s", name);
    if (comm_world > 1 && url)
        err = zr_meeting_url(want_url ? "rendezvous" : "ZERO_RENDEZVOUS", url, &found);
    else if (comm_world > 1 && master && strlen(master) < sizeof found.host)
        snprintf(found.host, sizeof found.host, "%s", master);
    if (!err)
        *w = found;
    return err;
}

static int find_world(int want_rank, int want_world, const char *want_url, bool by_mpi, struct zr_world *w)
{
    struct zr_world found = {.world = 1};
    int err = 0;
    if (want_world < 0 || want_world > ZR_MOST_RANKS)
        return zr_fail(ZR_ERR_ARG, "world is %d: 1 to %d are allowed, or 0 to look in the environment",
                       want_world, ZR_MOST_RANKS);
    if (want_world > 0) {
        if (want_rank < 0 || want_rank >= want_world)
            return zr_fail(ZR_ERR_ARG, "rank is %d: 0 to %d are allowed (world is %d)", want_rank,
                           want_world - 1, want_world);
        found.rank = found.local_rank = want_rank;
        found.world = want_world;
        strcpy(found.source, "config");
        err = zr_meeting_point_find(NULL, want_url, by_mpi, &found);
    } else {
        const struct zr_launcher *l = find_launcher();
        if (l) {
            err = read_launcher(l, want_url, by_mpi, &found);
        } else {
            strcpy(found.source, "alone");
            err = zr_meeting_point_find(NULL, want_url, by_mpi, &found);
        }
    }
    if (!err)
        *w = found;
    return err;
}

int zr_world_find(int want_rank, int want_world, const char *want_url, struct zr_world *w)
{
    return find_world(want_rank, want_world, want_url, false, w);
}

int zr_world_find_by_mpi(int want_rank, int want_world, const char *want_url, struct zr_world *w)
{
    return find_world(want_rank, want_world, want_url, true, w);
}

/* The number by which the others look for rank 0 is this host's, and not one of those it is to listen at. */
static int check_listening(const struct zr_world *w, const struct zr_interfaces *asked)
{
    union zr_address given;
    char list[256], other[ZR_INTERFACE_CHARS];
    if (!zr_address_parse(w->host, 0, &given) || zr_address_is_loopback(&given))
        return 0;
    for (int i = 0; i < asked->n; i++)
        if (zr_address_same(&asked->of[i].address, &given))
            return 0;
    zr_interface_of(&given, other);
    zr_interfaces_list(asked, list, sizeof list);
    return !other[0] ? 0
                     : zr_fail(ZR_ERR_ARG,
                               "rank 0 is to listen on interface %s, but the others look for it at %s, which "
                               "is on %s: give them an address of that interface, or name the other one",
                               list, w->host, other);
}

int zr_world_interface(const char *want, struct zr_world *w)
{
    const char *said = getenv("ZERO_INTERFACE"), *name = said && *said ? "ZERO_INTERFACE" : "interface";
    struct zr_interfaces found;
    want = said && *said ? said : want;
    if (!want || !*want || w->world == 1)
        return 0;
    int err = zr_interfaces_find(name, want, &found);
    if (!err && w->rank == 0)
        err = check_listening(w, &found);
    if (!err)
        snprintf(w->interface, sizeof w->interface, "%s", want);
    return err;
}

bool zr_world_is_on_loopback(const struct zr_world *w)
{
    union zr_address a;
    return zr_address_parse(w->host, w->port, &a) ? zr_address_is_loopback(&a)
                                                  : strcmp(w->host, "localhost") == 0;
}
