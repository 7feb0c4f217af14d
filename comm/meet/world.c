/* SPDX-License-Identifier: Apache-2.0 */
/* world.c: finds this rank's number and world, from the configuration, the program's communicator or a
 * launcher's environment variables. */
#include "comm/fork.h"
#include "comm/meet/meeting_point.h"
#include "comm/meet/net_address.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* --- the configuration --- */

static int take_configured(int want_rank, int want_world, struct zr_world *w)
{
    if (want_world < 0 || want_world > ZR_MAX_RANKS)
        return zr_fail(ZERO_ERR_ARG, "world is %d: 1 to %d are allowed, or 0 to look in the environment",
                       want_world, ZR_MAX_RANKS);
    if (want_rank < 0 || want_rank >= want_world)
        return zr_fail(ZERO_ERR_ARG, "rank is %d: 0 to %d are allowed (world is %d)", want_rank,
                       want_world - 1, want_world);
    w->rank = w->local_rank = want_rank;
    w->world = want_world;
    w->is_given = true;
    strcpy(w->source, "config");
    snprintf(w->size_from, sizeof w->size_from, "world of the configuration is %d", want_world);
    return 0;
}

/* --- the program's communicator, or its exchange --- */

static bool says_ranks(const struct zr_world *w, int rank, int world)
{
    return w->rank == rank && w->world == world;
}

/* Compares the communicator with `said`: the configuration if l is NULL, otherwise a launcher. A launcher may
 * know the whole job, while the communicator has some of its ranks, or all in another order. */
static int check_user_ranks(const struct zr_user_comm_ranks *c, const struct zr_launcher *l,
                            const struct zr_world *said)
{
    char job[64] = "";
    if (says_ranks(said, c->rank, c->world) ||
        (l && c->job_world && says_ranks(said, c->job_rank, c->job_world)))
        return 0;
    if (c->job_world)
        snprintf(job, sizeof job, " (and rank %d of %d of MPI_COMM_WORLD)", c->job_rank, c->job_world);
    if (!l)
        return zr_fail(
            ZERO_ERR_ARG,
            "%s is rank %d of %d%s, but rank and world of the configuration say: rank %d of %d; they "
            "must be the same, and may be left 0",
            c->name, c->rank, c->world, job, said->rank, said->world);
    return zr_fail(ZERO_ERR_ARG,
                   "%s is rank %d of %d%s, but %s is %d and %s is %d; they must be the same (%s)", c->name,
                   c->rank, c->world, job, l->rank, said->rank, l->world, said->world,
                   l->kind == ZR_LAUNCHER_ZERO_RUN ? "zero-run starts no MPI"
                   : c->job_world                  ? "unset them if they are left over"
                                  : "if the communicator has only some of the ranks, set rank and world of "
                                    "the configuration to match it");
}

/* Takes a launcher's values for the rank, if the configuration gives no world. l is NULL if no launcher is
 * set. */
static int find_said(const struct zr_user_comm_ranks *c, int want_rank, int want_world,
                     struct zr_world *found)
{
    const struct zr_launcher *l = NULL;
    struct zr_world said = {.world = 0};
    int err = want_world ? take_configured(want_rank, want_world, &said) : zr_launcher_find(false, &l, &said);
    if (!err && (l || want_world))
        err = check_user_ranks(c, l, &said);
    found->is_given = said.is_given;
    if (err || !l)
        return err;
    found->local_rank = said.local_rank;
    found->has_local_rank = said.has_local_rank;
    snprintf(found->note, sizeof found->note, "%s", said.note);
    return 0;
}

int zr_world_of_user_comm(const struct zr_user_comm_ranks *c, int want_rank, int want_world,
                          const char *want_url, struct zr_world *w)
{
    struct zr_world found = {.rank = c->rank, .local_rank = c->rank, .world = c->world};
    const char *url = want_url ? want_url : getenv("ZERO_RENDEZVOUS"), *master = getenv("MASTER_ADDR");
    int err = find_said(c, want_rank, want_world, &found);
    if (err)
        return err;
    snprintf(found.source, sizeof found.source, "%s", c->name);
    snprintf(found.size_from, sizeof found.size_from, "%s has %d ranks", c->name, c->world);
    if (c->world > 1 && url)
        err = zr_meeting_url(want_url ? "rendezvous" : "ZERO_RENDEZVOUS", url, &found);
    else if (c->world > 1 && master && !zr_meeting_host(master, found.host))
        found.host[0] = 0;
    if (!err)
        *w = found;
    return err;
}

/* --- a launcher --- */

/* Refuses a configuration that names a part of a launcher's job. All parts have the job's name, key and
 * meeting point, so ranks of two parts would be mixed up. If the launcher's variables may be left over, ranks
 * compare them when they meet. */
static int refuse_part(const char *want_url, struct zr_world *w)
{
    struct zr_world said = {0};
    bool is_sure;
    const struct zr_launcher *l =
        w->world > 1 && !want_url ? zr_launcher_of_larger(w->world, &said, &is_sure) : NULL;
    if (!l)
        return 0;
    if (!is_sure) {
        w->start.rank = said.rank;
        w->start.world = said.world;
        return 0;
    }
    return zr_fail(ZERO_ERR_ARG,
                   "rank %d of %d (from the configuration) belongs to %s's job as rank %d of %d: give each "
                   "part of a job its own meeting point: set cfg.launch.rendezvous to tcp://host:port or "
                   "file:///path, different for each part",
                   w->rank, w->world, l->source, said.rank, said.world);
}

static int find_launched(bool by_mpi, const struct zr_launcher **l, struct zr_world *w)
{
    strcpy(w->source, "alone");
    strcpy(w->size_from, "no launcher's variables are set");
    int err = zr_launcher_find(by_mpi, l, w);
    if (!err && by_mpi && *l && (*l)->kind == ZR_LAUNCHER_ZERO_RUN && w->world > 1)
        return zr_fail(
            ZERO_ERR_ARG,
            "backend is mpi, but zero-run started this rank (%s), and zero-run starts no MPI: start the "
            "ranks by one mpirun of Open MPI or one mpiexec of MPICH, or set backend to auto",
            w->size_from);
    if (!err && *l && zr_fork_depth() && zr_launcher_is_unchanged(*l))
        w->forks = (int)zr_fork_depth();
    return err;
}

static int find_world(int want_rank, int want_world, const char *want_url, bool by_mpi, struct zr_world *w)
{
    struct zr_world found = {.world = 1};
    const struct zr_launcher *l = NULL;
    int err = want_world ? take_configured(want_rank, want_world, &found) : find_launched(by_mpi, &l, &found);
    if (!err && want_world)
        err = refuse_part(want_url, &found);
    if (!err)
        err = zr_meeting_point_find(l, want_url, by_mpi, &found);
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

/* Fails if the others look for rank 0 at an address of this host that is not on the interface on which rank 0
 * listens. */
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
                     : zr_fail(ZERO_ERR_ARG,
                               "rank 0 listens on interface %s, but the others look for it at %s, which is "
                               "on %s: change the interface or the address",
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
