/* SPDX-License-Identifier: Apache-2.0 */
/* mpi_tiers.c: gathers and sums of groups that have several ranks on a host: shared memory inside a host, MPI
 * between hosts.
 *
 * A gather: of each other host, what a member has goes over MPI to one member here (spread.h says which), and
 * all members here copy it out of that one's arena, as they copy each other's own slices.
 *
 * A sum: each host adds up what its own members have, straight out of their arenas, in fp32: each member that
 * part which the places of its column own. These go over MPI to the owners, who add them up. It is the fixed
 * tree cut where it branches into hosts (spread.h), so its bits are those of all members' sources together;
 * where the hosts lie otherwise sums go member by member (mpi_reduce.c). Steps are as they are there: of each
 * slice one chunk, from one block of hosts. A host's sums are fp32, so that a chunk has fewer elements in the
 * same staging memory. */
#include "comm/fold.h"
#include "comm/mpi/mpi_comm.h"

#include <stdlib.h>

/* Of sums that need no staging, since all members are on one host: elements between two looks at what has
 * failed. */
enum { HOST_ELEMENTS = 1 << 18, STAGE_ALIGN = 64 };

/* Once for each group. */
static void report_tiers(const struct zr_mpi *m)
{
    const struct zr_spread *s = &m->spread;
    struct zr_log *log = m->base.group.rank ? NULL : m->set->opt.log;
    if (s->n_hosts == 1 && m->sums_by_host)
        zr_info(log, "mpi %s: shared memory among the %d ranks of a group, which are on one host", m->name,
                s->size);
    else if (m->sums_by_host)
        zr_info(log, "mpi %s: %d ranks on each of %d hosts: shared memory inside a host, MPI between",
                m->name, s->most_local, s->n_hosts);
    else
        zr_info(log,
                "mpi %s: %d to %d ranks on each of %d hosts: gathers use shared memory inside a host; sums "
                "are made rank by rank over MPI, because sums by host keep their bits only if each host has "
                "the same power of two of ranks (up to %d), consecutive in the group",
                m->name, s->least_local, s->most_local, s->n_hosts, ZR_MAX_SOURCES);
}

int zr_mpi_spread(struct zr_mpi *m)
{
    const struct zr_group *g = &m->base.group;
    struct zr_spread *s = &m->spread;
    if (!m->set->tiers || g->size == 1 || m->base.role == ZR_ROLE_CONTROL)
        return 0;
    int err = zr_spread_make(m->set->opt.topology, g, s);
    if (err)
        return err;
    m->sums_by_host = s->cut && s->most_local > 1 && s->most_local <= ZR_MAX_SOURCES;
    if (s->most_local > 1)
        report_tiers(m);
    else
        zr_spread_free(s);
    return 0;
}

static bool is_here(const struct zr_mpi *m, int place)
{
    return m->spread.host_of[place] == m->spread.host;
}

/* Between two pieces of what needs no MPI: it goes on all the same, and a failure ends the operation. */
static int look_between(struct zr_mpi *m)
{
    int err = zr_first_code(&m->set->failure);
    if (!err)
        zr_mpi_poll(m->set->process);
    return err;
}

static int pull_here(struct zr_mpi *m, char *to, const char *from, int64_t bytes)
{
    for (int64_t at = 0, n; at < bytes; at += n) {
        n = bytes - at < 2 * ZR_COPY_STREAM_BYTES ? bytes - at : ZR_COPY_STREAM_BYTES;
        m->set->kernels->copy(to + at, from + at, n);
        if (at + n < bytes) {
            int err = look_between(m);
            if (err)
                return err;
        }
    }
    return 0;
}

/* ---- gathers ---- */

static int64_t message_bytes(int64_t bytes, int64_t at)
{
    return bytes - at < ZR_MPI_MESSAGE ? bytes - at : ZR_MPI_MESSAGE;
}

/* My slice to those who fetch it for other hosts, and what I fetch for this one: to the place ahead, from the
 * one behind, all ranks at the same distance one after the other. */
static int begin_fetching(struct zr_mpi *m, const struct zr_gather_seg *g)
{
    const struct zr_spread *s = &m->spread;
    int size = m->base.group.size, me = m->base.group.rank, err = 0;
    char *region = m->base.arena + g->dst, *own = m->base.arena + zr_gather_own(g, me);
    for (int k = 1; k < size && !err; k++) {
        int to = (me + k) % size, from = (me - k + size) % size;
        bool gives = !is_here(m, to) &&
                     zr_spread_place(s, s->host_of[to], zr_spread_fetcher(s, me, s->host_of[to])) == to;
        bool takes =
            !is_here(m, from) && zr_spread_place(s, s->host, zr_spread_fetcher(s, from, s->host)) == me;
        int64_t out = gives ? zr_cut_bytes(&g->cut, me) : 0, in = takes ? zr_cut_bytes(&g->cut, from) : 0;
        for (int64_t at = 0; at < (out > in ? out : in) && !err; at += ZR_MPI_MESSAGE) {
            err = zr_mpi_await(m, &m->data[0], ZR_MPI_WINDOW - 2);
            if (!err && at < in)
                err = zr_mpi_receive(m, region + zr_cut_at(&g->cut, from) + at, message_bytes(in, at), from,
                                     ZR_MPI_TAG_DATA, &m->data[0]);
            if (!err && at < out)
                err = zr_mpi_send(m, own + at, message_bytes(out, at), to, ZR_MPI_TAG_DATA, &m->data[0]);
        }
    }
    return err;
}

/* What this host's members own, out of their arenas, beginning with the one after me. */
static int copy_own(struct zr_mpi *m, const struct zr_gather_seg *g)
{
    const struct zr_spread *s = &m->spread;
    int n = s->n_local[s->host], err = 0;
    for (int k = 1; k <= n && !err; k++) {
        int i = zr_spread_place(s, s->host, (s->local_of[m->base.group.rank] + k) % n);
        char *to = m->base.arena + g->dst + zr_cut_at(&g->cut, i);
        const char *from = m->peer[i] + zr_gather_own(g, i);
        if (from != to)
            err = pull_here(m, to, from, zr_cut_bytes(&g->cut, i));
    }
    return err;
}

/* What other members of this host have fetched of other hosts. */
static int copy_fetched(struct zr_mpi *m, const struct zr_gather_seg *g)
{
    const struct zr_spread *s = &m->spread;
    int size = m->base.group.size, me = m->base.group.rank, err = 0;
    for (int k = 1; k < size && !err; k++) {
        int i = (me + k) % size;
        int64_t at = g->dst + zr_cut_at(&g->cut, i);
        int by = zr_spread_place(s, s->host, zr_spread_fetcher(s, i, s->host));
        if (!is_here(m, i) && by != me)
            err = pull_here(m, m->base.arena + at, m->peer[by] + at, zr_cut_bytes(&g->cut, i));
    }
    return err;
}

int zr_mpi_gather_by_host(struct zr_mpi *m, const struct zr_gather_seg *seg, uint32_t n_seg)
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
    return err ? err : zr_mpi_meet_host(m); /* nobody reads what I have fetched any more */
}

/* ---- sums ---- */

struct sum {
    struct zr_mpi *m;
    const struct zr_reduce_seg *g;
    /* of the group; this rank's host and column; blocks of hosts, and hosts of one */
    int n_hosts, host, column, n_blocks, rows;
    /* of a chunk; bytes of an element of the source */
    int64_t elems, each;
    int64_t n_steps;
    struct zr_fold fold;
};

static int hosts_end(const struct sum *s, int block)
{
    int end = (block + 1) * ZR_FOLD_BLOCK;
    return end < s->n_hosts ? end : s->n_hosts;
}

static int hosts_from(const struct sum *s, int64_t step)
{
    return (s->host / ZR_FOLD_BLOCK + (int)(step % s->n_blocks)) % s->n_blocks;
}

static int hosts_to(const struct sum *s, int64_t step)
{
    return (s->host / ZR_FOLD_BLOCK - (int)(step % s->n_blocks) + s->n_blocks) % s->n_blocks;
}

/* Who owns what this column adds up for a host. */
static int owner(const struct sum *s, int host)
{
    return zr_spread_place(&s->m->spread, host, s->column);
}

static int64_t part_begins(const struct sum *s, int64_t step)
{
    return step / s->n_blocks * s->elems;
}

/* Of a place's slice; may be none. */
static int64_t part_elems(const struct sum *s, int place, int64_t step)
{
    int64_t left = zr_cut_bytes(&s->g->cut, place) / s->each - part_begins(s, step);
    return left < 0 ? 0 : left < s->elems ? left : s->elems;
}

/* What comes of hosts, and what goes to them, of two steps each. */
static float *staged_in(const struct sum *s, int host, int64_t step)
{
    return (float *)s->m->own + (step % 2 * s->rows + host % ZR_FOLD_BLOCK) * s->elems;
}

static float *staged_out(const struct sum *s, int host, int64_t step)
{
    return staged_in(s, host, step) + 2 * s->rows * s->elems;
}

/* What this host's members have of a place's chunk. */
static void sum_here(const struct sum *s, int place, int64_t step, float *dst, bool accumulate)
{
    const struct zr_mpi *m = s->m;
    const void *src[ZR_MAX_SOURCES];
    int n = m->spread.n_local[s->host];
    int64_t at = s->g->src + zr_cut_at(&s->g->cut, place) + part_begins(s, step) * s->each;
    for (int i = 0; i < n; i++)
        src[i] = m->peer[zr_spread_place(&m->spread, s->host, i)] + at;
    m->set->kernels->sum_tree(dst, src, n, s->g->dtype, part_elems(s, place, step), accumulate);
}

static int begin_host_step(const struct sum *s, int64_t step)
{
    struct zr_mpi *m = s->m;
    int from = hosts_from(s, step), to = hosts_to(s, step), err = 0;
    int64_t n = part_elems(s, m->base.group.rank, step) * (int64_t)sizeof(float);
    for (int h = from * ZR_FOLD_BLOCK; h < hosts_end(s, from) && n && !err; h++)
        if (h != s->host)
            err =
                zr_mpi_receive(m, staged_in(s, h, step), n, owner(s, h), ZR_MPI_TAG_DATA, &m->data[step % 2]);
    for (int h = to * ZR_FOLD_BLOCK; h < hosts_end(s, to) && !err; h++) {
        n = part_elems(s, owner(s, h), step) * (int64_t)sizeof(float);
        if (h == s->host || !n)
            continue;
        sum_here(s, owner(s, h), step, staged_out(s, h, step), false);
        err = zr_mpi_send(m, staged_out(s, h, step), n, owner(s, h), ZR_MPI_TAG_DATA, &m->data[step % 2]);
    }
    return err;
}

static void add_host_step(struct sum *s, int64_t step)
{
    struct zr_mpi *m = s->m;
    int me = m->base.group.rank, block = hosts_from(s, step), first = block * ZR_FOLD_BLOCK;
    int64_t n = part_elems(s, me, step);
    float *dst = (float *)(m->base.arena + s->g->dst) + part_begins(s, step);
    const void *src[ZR_FOLD_BLOCK];
    if (n == 0)
        return;
    if (s->n_hosts == 1) {
        sum_here(s, me, step, dst, s->g->accumulate);
        return;
    }
    if (step % s->n_blocks == 0)
        zr_fold_begin(&s->fold, m->set->kernels, s->n_hosts, dst, s->g->accumulate, n,
                      (float *)m->own + 4 * s->rows * s->elems, s->elems);
    for (int h = first; h < hosts_end(s, block); h++) {
        if (h == s->host)
            sum_here(s, me, step, staged_in(s, h, step), false);
        src[h - first] = staged_in(s, h, step);
    }
    zr_fold_add(&s->fold, block, src, ZR_F32);
}

/* As much as the memory that the plan has for sums member by member has room for: rows that come and that go,
 * two steps of each, and partial sums of the tree over hosts. */
static int64_t elems_of(const struct zr_mpi *m, int n_hosts, int rows)
{
    int64_t n = 4 * rows + zr_fold_parts(n_hosts);
    return n_hosts == 1 ? HOST_ELEMENTS
                        : m->base.reserve / n / STAGE_ALIGN * STAGE_ALIGN / (int64_t)sizeof(float);
}

static int reduce_on_hosts(struct zr_mpi *m, const struct zr_reduce_seg *g)
{
    const struct zr_spread *at = &m->spread;
    struct sum s = {.m = m,
                    .g = g,
                    .n_hosts = at->n_hosts,
                    .host = at->host,
                    .column = at->local_of[m->base.group.rank],
                    .n_blocks = zr_fold_blocks(at->n_hosts),
                    .rows = at->n_hosts < ZR_FOLD_BLOCK ? at->n_hosts : ZR_FOLD_BLOCK,
                    .each = zr_dtype_bytes(g->dtype)};
    s.elems = elems_of(m, s.n_hosts, s.rows);
    ZR_ASSERT(s.elems > 0);
    s.n_steps = (zr_cut_most(&g->cut, at->size) / s.each + s.elems - 1) / s.elems * s.n_blocks;
    int err = s.n_steps ? begin_host_step(&s, 0) : 0;
    for (int64_t step = 0; step < s.n_steps && !err; step++) {
        if (step + 1 < s.n_steps)
            err = begin_host_step(&s, step + 1);
        err = err ? err : zr_mpi_await(m, &m->data[step % 2], 0);
        err = err ? err : look_between(m);
        if (!err)
            add_host_step(&s, step);
    }
    return err;
}

int zr_mpi_reduce_by_host(struct zr_mpi *m, const struct zr_reduce_seg *seg, uint32_t n_seg)
{
    int err = 0;
    for (uint32_t i = 0; i < n_seg && !err; i++)
        err = reduce_on_hosts(m, &seg[i]);
    return err ? err : zr_mpi_meet_host(m); /* nobody reads my arena any more */
}
