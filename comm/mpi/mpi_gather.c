/* SPDX-License-Identifier: Apache-2.0 */
/* mpi_gather.c: gathers.
 *
 * If each rank of the group has a host for itself, MPI's all-gather gathers equal slices. Other slices are
 * sent from each rank to each other. If hosts have several ranks, they use shared memory inside a host. Then
 * MPI sends each slice of another host to one member here (spread.h says which). All members here copy it out
 * of that member's arena, and copy each other's slices directly. */
#include "comm/mpi/mpi_comm.h"

static bool is_here(const struct zr_mpi *m, int place)
{
    return m->spread.host_of[place] == m->spread.host;
}

/* Whether place `by` receives the slice of place `of` over MPI. */
static bool fetches(const struct zr_mpi *m, int by, int of)
{
    const struct zr_spread *s = &m->spread;
    if (!s->size)
        return true;
    int host = s->host_of[by];
    return s->host_of[of] != host && zr_spread_place(s, host, zr_spread_fetcher(s, of, host)) == by;
}

static int64_t message_bytes(int64_t bytes, int64_t at)
{
    return bytes - at < ZR_MPI_MESSAGE ? bytes - at : ZR_MPI_MESSAGE;
}

int zr_mpi_swap(struct zr_mpi *m, const char *out, int64_t n_out, int to, char *in, int64_t n_in, int from)
{
    int err = 0;
    for (int64_t at = 0; at < (n_out > n_in ? n_out : n_in) && !err; at += ZR_MPI_MESSAGE) {
        err = zr_mpi_await(m, &m->data[0], ZR_MPI_WINDOW - 2);
        if (!err && at < n_in)
            err = zr_mpi_receive(m, in + at, message_bytes(n_in, at), from, ZR_MPI_TAG_DATA, &m->data[0]);
        if (!err && at < n_out)
            err = zr_mpi_send(m, out + at, message_bytes(n_out, at), to, ZR_MPI_TAG_DATA, &m->data[0]);
    }
    return err;
}

/* Begins to send this rank's slice to the ranks that fetch it, and to receive the slices that this rank
 * fetches. Messages go to the place ahead and come from the place behind, with the same distance on all ranks
 * at a time. So a rank's pending messages are pending on its peers, too. */
static int begin_fetching(struct zr_mpi *m, const struct zr_gather_seg *g)
{
    int size = m->base.group.size, me = m->base.group.rank, err = 0;
    char *region = m->base.arena + g->dst, *own = m->base.arena + zr_gather_own(g, me);
    for (int k = 1; k < size && !err; k++) {
        int to = (me + k) % size, from = (me - k + size) % size;
        int64_t out = fetches(m, to, me) ? zr_cut_bytes(&g->cut, me) : 0;
        int64_t in = fetches(m, me, from) ? zr_cut_bytes(&g->cut, from) : 0;
        err = zr_mpi_swap(m, own, out, to, region + zr_cut_at(&g->cut, from), in, from);
    }
    return err;
}

/* ---- each rank has a host for itself ---- */

static int gather_flat(struct zr_mpi *m, const struct zr_gather_seg *g)
{
    int size = m->base.group.size, me = m->base.group.rank;
    char *region = m->base.arena + g->dst, *own = m->base.arena + zr_gather_own(g, me),
         *there = region + zr_cut_at(&g->cut, me);
    int64_t mine = zr_cut_bytes(&g->cut, me);
    bool equal = !g->cut.at && g->cut.total == g->cut.each * size;
    if (g->cut.total == 0)
        return 0;
    if (equal && size > 1)
        return zr_mpi_all_gather(m, own == there ? NULL : own, region, g->cut.each, g->cut.each);
    if (own != there && mine)
        m->set->kernels->copy(there, own, mine);
    int err = begin_fetching(m, g);
    return err ? err : zr_mpi_await(m, &m->data[0], 0);
}

/* ---- hosts with several ranks ---- */

int zr_mpi_pull(struct zr_mpi *m, char *to, const char *from, int64_t bytes)
{
    for (int64_t at = 0, n; at < bytes; at += n) {
        n = bytes - at < 2 * ZR_COPY_STREAM_BYTES ? bytes - at : ZR_COPY_STREAM_BYTES;
        m->set->kernels->copy(to + at, from + at, n);
        int err = at + n < bytes ? zr_mpi_look_between(m) : 0;
        if (err)
            return err;
    }
    return 0;
}

/* Copies the slices of this host's members out of their arenas, beginning with the one after me. */
static int copy_own(struct zr_mpi *m, const struct zr_gather_seg *g)
{
    const struct zr_spread *s = &m->spread;
    int n = s->n_local[s->host], err = 0;
    for (int k = 1; k <= n && !err; k++) {
        int i = zr_spread_place(s, s->host, (s->local_of[m->base.group.rank] + k) % n);
        char *to = m->base.arena + g->dst + zr_cut_at(&g->cut, i);
        const char *from = m->peer[i] + zr_gather_own(g, i);
        if (from != to)
            err = zr_mpi_pull(m, to, from, zr_cut_bytes(&g->cut, i));
    }
    return err;
}

/* Copies slices of other hosts that other members of this host have fetched. */
static int copy_fetched(struct zr_mpi *m, const struct zr_gather_seg *g)
{
    const struct zr_spread *s = &m->spread;
    int size = m->base.group.size, me = m->base.group.rank, err = 0;
    for (int k = 1; k < size && !err; k++) {
        int i = (me + k) % size;
        int64_t at = g->dst + zr_cut_at(&g->cut, i);
        int by = zr_spread_place(s, s->host, zr_spread_fetcher(s, i, s->host));
        if (!is_here(m, i) && by != me)
            err = zr_mpi_pull(m, m->base.arena + at, m->peer[by] + at, zr_cut_bytes(&g->cut, i));
    }
    return err;
}

static int gather_by_host(struct zr_mpi *m, const struct zr_gather_seg *seg, uint32_t n_seg)
{
    int err = 0;
    for (uint32_t i = 0; i < n_seg && !err; i++)
        err = begin_fetching(m, &seg[i]);
    for (uint32_t i = 0; i < n_seg && !err; i++)
        err = copy_own(m, &seg[i]);
    err = err ? err : zr_mpi_await(m, &m->data[0], 0);
    if (err || m->spread.n_hosts == 1)
        return err;
    err = zr_mpi_meet_host(m);
    for (uint32_t i = 0; i < n_seg && !err; i++)
        err = copy_fetched(m, &seg[i]);
    return err ? err : zr_mpi_meet_host(m); /* no rank reads what I have fetched any more */
}

int zr_mpi_gather(struct zr_mpi *m, const struct zr_gather_seg *seg, uint32_t n_seg)
{
    int err = 0;
    if (m->spread.size)
        return gather_by_host(m, seg, n_seg);
    for (uint32_t i = 0; i < n_seg && !err; i++)
        err = gather_flat(m, &seg[i]);
    return err;
}
