/* world.c: rank and world, from the configuration or from what a launcher left in the environment. The first
 * source that is set wins and is then read strictly: half of a pair, text that is not a number or a rank
 * outside its world is an error, and no reason to look at the next source. Otherwise a launcher that is half
 * understood would train N independent copies of one model. */
#include "comm/meet/rendezvous.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <xxhash.h>

enum { MAX_WORLD = 65536 };

/* One launcher's variables. The rank and world variables go in pairs; the others may be missing. */
struct launcher {
    const char *source;
    const char *rank, *world, *local_rank;
    const char *job[3];      /* variables that together tell one job from another on this host */
    const char *attempt;     /* how often it was started again; may be missing */
    bool single_means_alone; /* set in every shell of an allocation, so a world of 1 says nothing */
};

static const struct launcher launchers[] = {
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
     .job = {"PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"}},
    {.source = "MPICH",
     .rank = "PMI_RANK",
     .world = "PMI_SIZE",
     .local_rank = "MPI_LOCALRANKID",
     .job = {"PMI_JOBID", "PMI_KVSNAME"}},
    {.source = "Slurm",
     .rank = "SLURM_PROCID",
     .world = "SLURM_NTASKS",
     .local_rank = "SLURM_LOCALID",
     .job = {"SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID"},
     .attempt = "SLURM_RESTART_COUNT",
     .single_means_alone = true},
};

/* Decimal text in [lo, hi], nothing before or after it. */
static int parse_int(const char *name, const char *text, int lo, int hi, int *out)
{
    char *end;
    errno = 0;
    long v = strtol(text, &end, 10);
    bool digits = text[0] == '-' ? text[1] >= '0' && text[1] <= '9' : text[0] >= '0' && text[0] <= '9';
    if (!digits || *end || errno == ERANGE || v < lo || v > hi)
        return zr_fail(ZR_ERR_ARG, "%s is \"%.64s\": a whole number from %d to %d is allowed", name, text, lo,
                       hi);
    *out = (int)v;
    return 0;
}

/* "tcp://host:port" */
static int parse_url(const char *name, const char *url, struct zr_world *w)
{
    const char *rest = strncmp(url, "tcp://", 6) == 0 ? url + 6 : NULL;
    const char *colon = rest ? strrchr(rest, ':') : NULL;
    size_t n = colon ? (size_t)(colon - rest) : 0;
    if (n == 0 || n >= sizeof w->host || memchr(rest, ':', n) || memchr(rest, '/', n))
        return zr_fail(ZR_ERR_ARG,
                       "%s is \"%.200s\": tcp://host:port is allowed, with a name or an IPv4 address of up "
                       "to %zu characters",
                       name, url, sizeof w->host - 1);
    char port_name[64];
    snprintf(port_name, sizeof port_name, "the port in %s", name);
    int err = parse_int(port_name, colon + 1, 1, 65535, &w->port);
    if (err)
        return err;
    memcpy(w->host, rest, n);
    w->host[n] = 0;
    return 0;
}

/* The address from ZERO_RENDEZVOUS or MASTER_ADDR and MASTER_PORT; *found tells whether there was one. */
static int find_address(struct zr_world *w, bool *found)
{
    const char *url = getenv("ZERO_RENDEZVOUS");
    const char *addr = getenv("MASTER_ADDR"), *port = getenv("MASTER_PORT");
    *found = url || addr || port;
    if (url)
        return parse_url("ZERO_RENDEZVOUS", url, w);
    if (!addr && !port)
        return 0;
    if (!addr || !port)
        return zr_fail(ZR_ERR_ARG, "%s is not set though %s is \"%.64s\": both or neither are allowed",
                       addr ? "MASTER_PORT" : "MASTER_ADDR", addr ? "MASTER_ADDR" : "MASTER_PORT",
                       addr ? addr : port);
    size_t n = strlen(addr);
    if (n == 0 || n >= sizeof w->host)
        return zr_fail(
            ZR_ERR_ARG,
            "MASTER_ADDR is \"%.64s\": a name or an IPv4 address of 1 to %zu characters is allowed", addr,
            sizeof w->host - 1);
    int err = parse_int("MASTER_PORT", port, 1, 65535, &w->port);
    if (err)
        return err;
    memcpy(w->host, addr, n + 1);
    /* torchrun's agent keeps its own store on that very port. */
    const char *agent = getenv("TORCHELASTIC_USE_AGENT_STORE");
    if (agent && strcmp(agent, "True") == 0)
        w->port += w->port < 65535 ? 1 : -1;
    return 0;
}

/* MPI's and Slurm's launchers give no address. Ranks of one host then meet on loopback, at a port below the
 * ephemeral range that only this job's id leads to. */
static void derive_address(struct zr_world *w)
{
    strcpy(w->host, "127.0.0.1");
    w->port = 20000 + (int)(XXH3_64bits(w->job, strlen(w->job)) % 12000);
}

static void find_job(const struct launcher *l, struct zr_world *w)
{
    const char *own = getenv("ZERO_JOB");
    if (own) {
        snprintf(w->job, sizeof w->job, "%s", own);
        return;
    }
    size_t used = 0;
    for (int i = 0; l && i < 3 && l->job[i]; i++) {
        const char *text = getenv(l->job[i]);
        if (text && used < sizeof w->job)
            used += (size_t)snprintf(w->job + used, sizeof w->job - used, "%s%s", used ? "." : "", text);
    }
}

/* Completes w, whose rank, world and source are known. */
static int find_meeting_point(const struct launcher *l, const char *want_url, struct zr_world *w)
{
    find_job(l, w);
    const char *attempt = l && l->attempt ? getenv(l->attempt) : NULL;
    int bad = attempt ? parse_int(l->attempt, attempt, 0, INT_MAX, &w->attempt) : 0;
    if (!bad && w->world > 1)
        bad = zr_job_key_find(&w->key);
    if (bad)
        return bad;
    if (want_url) {
        int err = parse_url("rendezvous", want_url, w);
        if (err)
            return err;
    } else if (w->world > 1) {
        bool found;
        int err = find_address(w, &found);
        if (err)
            return err;
        if (!found && l && l->job[0] && strcmp(l->source, "torchrun") != 0) {
            /* The launcher's process is the same parent for all its ranks of a host. */
            if (!w->job[0])
                snprintf(w->job, sizeof w->job, "%s of parent %ld", l->source, (long)getppid());
            derive_address(w);
        } else if (!found) {
            return zr_fail(ZR_ERR_ARG,
                           "rank %d of %d (from %s) does not know where rank 0 is: set ZERO_RENDEZVOUS to "
                           "tcp://host:port, or MASTER_ADDR and MASTER_PORT",
                           w->rank, w->world, w->source);
        }
    }
    if (w->world == 1) {
        w->host[0] = 0;
        w->port = 0;
    }
    return 0;
}

/* Rank, world and source. */
static int read_ranks(const struct launcher *l, struct zr_world *w)
{
    const char *rank = getenv(l->rank), *world = getenv(l->world), *local = getenv(l->local_rank);
    if (!rank || !world)
        return zr_fail(ZR_ERR_ARG, "%s is not set though %s is \"%.64s\": both or neither are allowed",
                       rank ? l->world : l->rank, rank ? l->rank : l->world, rank ? rank : world);
    int err = parse_int(l->world, world, 1, MAX_WORLD, &w->world);
    if (!err)
        err = parse_int(l->rank, rank, 0, w->world - 1, &w->rank);
    w->local_rank = w->rank;
    if (!err && local)
        err = parse_int(l->local_rank, local, 0, w->world - 1, &w->local_rank);
    w->has_local_rank = local != NULL;
    if (err)
        return err;
    snprintf(w->source, sizeof w->source, "%s", l->source);
    return 0;
}

static int read_launcher(const struct launcher *l, const char *want_url, struct zr_world *w)
{
    int err = read_ranks(l, w);
    return err ? err : find_meeting_point(l, want_url, w);
}

/* Is this the launcher that started us? */
static bool is_set(const struct launcher *l)
{
    const char *rank = getenv(l->rank), *world = getenv(l->world);
    if (l->single_means_alone) {
        /* The shell of an allocation has SLURM_NTASKS but no SLURM_PROCID: not a task of ours. */
        return rank && world && strcmp(world, "1") != 0;
    }
    return rank || world;
}

static const struct launcher *find_launcher(void)
{
    for (size_t i = 0; i < sizeof launchers / sizeof *launchers; i++)
        if (is_set(&launchers[i]))
            return &launchers[i];
    return NULL;
}

int zr_world_lent(int want_rank, int want_world, const char *want_url, int comm_rank, int comm_world,
                  struct zr_world *w)
{
    struct zr_world found = {.rank = comm_rank, .local_rank = comm_rank, .world = comm_world}, said = found;
    const struct launcher *l = want_world > 0 ? NULL : find_launcher();
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
            "nccl_comm is rank %d of %d, but %s%s: rank %d of %d; they must be the same (if the "
            "communicator is of some of the ranks only, set rank and world of the configuration to its)",
            comm_rank, comm_world, said.source, l ? "'s variables say" : " say", said.rank, said.world);
    found.local_rank = l ? said.local_rank : comm_rank;
    found.has_local_rank = said.has_local_rank;
    strcpy(found.source, "nccl_comm");
    if (comm_world > 1 && url)
        err = parse_url(want_url ? "rendezvous" : "ZERO_RENDEZVOUS", url, &found);
    else if (comm_world > 1 && master && strlen(master) < sizeof found.host)
        snprintf(found.host, sizeof found.host, "%s", master);
    if (!err)
        *w = found;
    return err;
}

int zr_world_find(int want_rank, int want_world, const char *want_url, struct zr_world *w)
{
    struct zr_world found = {.world = 1};
    int err = 0;
    if (want_world < 0 || want_world > MAX_WORLD)
        return zr_fail(ZR_ERR_ARG, "world is %d: 1 to %d are allowed, or 0 to look in the environment",
                       want_world, MAX_WORLD);
    if (want_world > 0) {
        if (want_rank < 0 || want_rank >= want_world)
            return zr_fail(ZR_ERR_ARG, "rank is %d: 0 to %d are allowed (world is %d)", want_rank,
                           want_world - 1, want_world);
        found.rank = found.local_rank = want_rank;
        found.world = want_world;
        strcpy(found.source, "config");
        err = find_meeting_point(NULL, want_url, &found);
    } else {
        const struct launcher *l = find_launcher();
        if (l) {
            err = read_launcher(l, want_url, &found);
        } else {
            strcpy(found.source, "alone");
            err = find_meeting_point(NULL, want_url, &found);
        }
    }
    if (!err)
        *w = found;
    return err;
}
