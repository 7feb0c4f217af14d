/* SPDX-License-Identifier: Apache-2.0 */
/* flight_peers.c: exchanges where recorders are, maps those of this host's ranks, and reads them. */
#include "comm/flight_peers.h"
#include "comm/flight_view.h"
#include "comm/meet/rendezvous.h"
#include "comm/process_stat.h"
#include "comm/topology.h"
#include "kernels/log.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct zr_flight_peers {
    int32_t world, rank;
    /* (world) Records by rank, including this one's. NULL: on another host, or not mapped. */
    const struct zr_flight_record *records[];
};

/* Returns a rank's record. NULL: it cannot be read here. */
static const struct zr_flight_record *record_of(const struct zr_flight_peers *p, int rank)
{
    return rank >= 0 && rank < p->world ? p->records[rank] : NULL;
}

/* ---- the functions of struct zr_known_ranks (rendezvous.h) ---- */

static void last_call(void *arg, int rank, char *text, size_t n_text)
{
    const struct zr_flight_record *rec = record_of(arg, rank);
    struct zr_flight_call last;
    char call[ZR_FLIGHT_CALL_CHARS];
    text[0] = 0;
    if (!rec || !zr_flight_read_call(rec, &last))
        return;
    zr_flight_describe_call(&last, call);
    snprintf(text, n_text, "%s", call);
}

static bool is_stopped(int32_t pid)
{
    struct zr_process_stat s;
    return zr_process_stat(pid, &s) && (s.state == 'T' || s.state == 't');
}

static void see(void *arg, int rank, struct zr_rank_seen *out)
{
    const struct zr_flight_record *rec = record_of(arg, rank);
    _Static_assert(sizeof out->text == ZR_FLIGHT_TEXT, "a recorded message fits");
    memset(out, 0, sizeof *out);
    if (!rec)
        return;
    out->code = zr_flight_read_failure(rec, &out->failed_ns, out->text);
    out->is_stopped = is_stopped(zr_flight_process_of(rec));
}

static void shared_calls(void *arg, struct zr_shared_calls out[ZR_SHARED_CALLS])
{
    const struct zr_flight_peers *p = arg;
    if (p->records[p->rank])
        zr_flight_shared_calls(p->records[p->rank], out);
}

static bool common_calls(void *arg, int rank, const struct zr_call_log **mine,
                         const struct zr_call_log **theirs)
{
    const struct zr_flight_peers *p = arg;
    const struct zr_flight_record *rec = record_of(p, rank);
    return rec && p->records[p->rank] && zr_flight_common_calls(p->records[p->rank], rec, mine, theirs);
}

/* ---- opening ---- */

static void map_peer(struct zr_flight_peers *p, struct zr_shared_at *where, int32_t rank, struct zr_log *log)
{
    where->rank = rank;
    if (where->fd >= 0 && zr_flight_map(where, &p->records[rank])) /* a rank without a file has logged that */
        zr_warn(log, "the last call of rank %d cannot be read if it is lost: %s", rank, zr_error_text());
}

int zr_flight_peers_open(struct zr_rendezvous *rdv, const struct zr_topology *t, const struct zr_flight *f,
                         struct zr_log *log, struct zr_flight_peers **out)
{
    const int32_t world = zr_rendezvous_world(rdv), rank = zr_rendezvous_rank(rdv);
    struct zr_flight_peers *p = calloc(1, sizeof *p + (size_t)world * sizeof *p->records);
    struct zr_shared_at mine, *all = calloc((size_t)world, sizeof *all);
    *out = NULL;
    if (!p || !all) {
        free(p);
        free(all);
        return zr_rendezvous_fail(
            rdv, zr_fail(ZERO_ERR_NOMEM, "no memory for the flight recorders of %d ranks", world));
    }
    p->world = world;
    p->rank = rank;
    p->records[rank] = zr_flight_record_of(f);
    (void)zr_flight_where(f, &mine);
    int err = zr_rendezvous_exchange(rdv, &mine, sizeof mine, all);
    for (int32_t r = 0; r < world && !err; r++)
        if (r != rank && t->host_of[r] == t->host)
            map_peer(p, &all[r], r, log);
    free(all);
    if (err) {
        free(p);
        return err;
    }
    zr_rendezvous_know(rdv, &(struct zr_known_ranks){last_call, see, shared_calls, common_calls, p});
    *out = p;
    return 0;
}

void zr_flight_peers_close(struct zr_flight_peers *p)
{
    for (int32_t r = 0; p && r < p->world; r++)
        if (r != p->rank)
            zr_flight_unmap(p->records[r]);
    free(p);
}
