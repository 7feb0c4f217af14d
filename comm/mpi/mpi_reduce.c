/* SPDX-License-Identifier: Apache-2.0 */
/* mpi_reduce.c: sums. MPI's own reduce-scatter is slow, and adds in an order that its library chooses. So
 * each source sends each owner its slice, and the owner adds them in the fixed tree in fp32.
 *
 * A source is a rank, or a host with several ranks if the tree branches into hosts (spread.h). In the second
 * case each member takes the slices that the places of its column own. It adds them up directly from the
 * arenas of its host, and sends these sums in fp32. The bits are those of a sum over all ranks' slices.
 *
 * A sum takes steps that are the same on all ranks. A step handles one chunk of every slice, from the sources
 * of one block of the tree (comm/fold.h). In step k of a chunk a source of block b receives from block b + k
 * and sends to block b - k. So what one source sends in a step another receives in the same step. Two steps
 * are active at a time: one is received while the one before is added. */
#include "comm/fold.h"
#include "comm/mpi/mpi_comm.h"

/* HOST_ELEMENTS: elements that are added between two looks at failures, in sums that need no staging because
 * all ranks are on one host. */
enum { HOST_ELEMENTS = 1 << 18, STAGE_ALIGN = 64 };

struct sum {
    struct zr_mpi *m;
    const struct zr_reduce_seg *g;
    /* Number of sources; this rank's or its host's number; number of blocks; most sources of a block. */
    int n, me, n_blocks, rows;
    /* This rank's number on its host. */
    int column;
    /* Type of the elements that travel. */
    enum zero_dtype wire;
    /* Elements of a chunk; bytes of an element in the arena. */
    int64_t elems, each;
    int64_t n_steps;
    struct zr_fold fold;
};

static int block_end(const struct sum *s, int block)
{
    int end = (block + 1) * ZR_FOLD_BLOCK;
    return end < s->n ? end : s->n;
}

/* The block that a step receives from, and the block that it sends to. */
static int block_from(const struct sum *s, int64_t step)
{
    return (s->me / ZR_FOLD_BLOCK + (int)(step % s->n_blocks)) % s->n_blocks;
}

static int block_to(const struct sum *s, int64_t step)
{
    return (s->me / ZR_FOLD_BLOCK - (int)(step % s->n_blocks) + s->n_blocks) % s->n_blocks;
}

/* The place to which this rank sends for source i, and from which it receives for source i. */
static int partner(const struct sum *s, int i)
{
    return s->m->sums_by_host ? zr_spread_place(&s->m->spread, i, s->column) : i;
}

static int64_t chunk_begins(const struct sum *s, int64_t step)
{
    return step / s->n_blocks * s->elems;
}

/* Elements of a place's slice in a step's chunk; may be 0. */
static int64_t chunk_elems(const struct sum *s, int place, int64_t step)
{
    int64_t left = zr_cut_bytes(&s->g->cut, place) / s->each - chunk_begins(s, step);
    return left < 0 ? 0 : left < s->elems ? left : s->elems;
}

static int64_t chunk_offset(const struct sum *s, int place, int64_t step)
{
    return s->g->src + zr_cut_at(&s->g->cut, place) + chunk_begins(s, step) * s->each;
}

static int64_t row_bytes(const struct sum *s)
{
    return s->elems * zr_dtype_bytes(s->wire);
}

/* Staging memory for what a source sends here, and for what this host sends to another, for two steps
 * each. */
static char *staged_in(const struct sum *s, int i, int64_t step)
{
    return s->m->own + (step % 2 * s->rows + i % ZR_FOLD_BLOCK) * row_bytes(s);
}

static char *staged_out(const struct sum *s, int i, int64_t step)
{
    return staged_in(s, i, step) + 2 * s->rows * row_bytes(s);
}

/* Adds up the parts of a place's chunk that this host's members have. */
static void sum_here(const struct sum *s, int place, int64_t step, void *dst, bool accumulate)
{
    const struct zr_mpi *m = s->m;
    const void *src[ZR_MAX_SOURCES];
    int host = m->spread.host, n = m->spread.n_local[host];
    for (int i = 0; i < n; i++)
        src[i] = m->peer[zr_spread_place(&m->spread, host, i)] + chunk_offset(s, place, step);
    m->set->kernels->sum_tree(dst, src, n, s->g->dtype, chunk_elems(s, place, step), accumulate);
}

/* This source's part of a place's chunk. A host adds it up at `staged`. */
static const char *source_of(const struct sum *s, int place, int64_t step, char *staged)
{
    if (!s->m->sums_by_host)
        return s->m->base.arena + chunk_offset(s, place, step);
    sum_here(s, place, step, staged, false);
    return staged;
}

static int begin_step(const struct sum *s, int64_t step)
{
    struct zr_mpi *m = s->m;
    struct zr_mpi_batch *batch = &m->data[step % 2];
    int from = block_from(s, step), to = block_to(s, step), err = 0;
    int64_t size = zr_dtype_bytes(s->wire), n = chunk_elems(s, m->base.group.rank, step) * size;
    for (int i = from * ZR_FOLD_BLOCK; i < block_end(s, from) && n && !err; i++)
        if (i != s->me)
            err = zr_mpi_receive(m, staged_in(s, i, step), n, partner(s, i), ZR_MPI_TAG_DATA, batch);
    for (int i = to * ZR_FOLD_BLOCK; i < block_end(s, to) && !err; i++) {
        n = chunk_elems(s, partner(s, i), step) * size;
        if (i != s->me && n)
            err = zr_mpi_send(m, source_of(s, partner(s, i), step, staged_out(s, i, step)), n, partner(s, i),
                              ZR_MPI_TAG_DATA, batch);
    }
    return err;
}

static void add_step(struct sum *s, int64_t step)
{
    struct zr_mpi *m = s->m;
    int me = m->base.group.rank, block = block_from(s, step), first = block * ZR_FOLD_BLOCK;
    int64_t n = chunk_elems(s, me, step);
    float *dst = (float *)(m->base.arena + s->g->dst) + chunk_begins(s, step);
    const void *src[ZR_FOLD_BLOCK];
    if (n == 0)
        return;
    if (m->sums_by_host && s->n == 1) {
        sum_here(s, me, step, dst, s->g->accumulate);
        return;
    }
    if (step % s->n_blocks == 0)
        zr_fold_begin(&s->fold, m->set->kernels, s->n, dst, s->g->accumulate, n,
                      (float *)(m->own + (m->sums_by_host ? 4 : 2) * s->rows * row_bytes(s)), s->elems);
    for (int i = first; i < block_end(s, block); i++) {
        char *staged = staged_in(s, i, step);
        src[i - first] = i == s->me ? source_of(s, me, step, staged) : staged;
    }
    zr_fold_add(&s->fold, block, src, s->wire);
}

/* Elements of a chunk. The plan sizes the staging memory for sums by rank. Sums by host divide it into
 * received and sent rows of two steps each, and the partial sums of the tree over hosts. */
static int64_t elems_of(const struct sum *s)
{
    const struct zr_mpi *m = s->m;
    int64_t n = 4 * s->rows + zr_fold_parts(s->n);
    if (!m->sums_by_host)
        return m->chunk / s->each;
    return s->n == 1 ? HOST_ELEMENTS
                     : m->base.reserve / n / STAGE_ALIGN * STAGE_ALIGN / (int64_t)sizeof(float);
}

static int sum_segment(struct zr_mpi *m, const struct zr_reduce_seg *g)
{
    const struct zr_spread *at = &m->spread;
    int place = m->base.group.rank, n = m->sums_by_host ? at->n_hosts : m->base.group.size;
    struct sum s = {.m = m,
                    .g = g,
                    .n = n,
                    .me = m->sums_by_host ? at->host : place,
                    .n_blocks = zr_fold_blocks(n),
                    .rows = n < ZR_FOLD_BLOCK ? n : ZR_FOLD_BLOCK,
                    .column = m->sums_by_host ? at->local_of[place] : 0,
                    .wire = m->sums_by_host ? ZERO_F32 : g->dtype,
                    .each = zr_dtype_bytes(g->dtype)};
    s.elems = elems_of(&s);
    ZR_ASSERT(s.elems > 0);
    s.n_steps = (zr_cut_most(&g->cut, m->base.group.size) / s.each + s.elems - 1) / s.elems * s.n_blocks;
    int err = s.n_steps ? begin_step(&s, 0) : 0;
    for (int64_t step = 0; step < s.n_steps && !err; step++) {
        if (step + 1 < s.n_steps)
            err = begin_step(&s, step + 1);
        err = err ? err : zr_mpi_await(m, &m->data[step % 2], 0);
        if (!err && m->sums_by_host)
            err = zr_mpi_look_between(m);
        if (!err)
            add_step(&s, step);
    }
    return err;
}

int zr_mpi_reduce(struct zr_mpi *m, const struct zr_reduce_seg *seg, uint32_t n_seg)
{
    int err = 0;
    for (uint32_t i = 0; i < n_seg && !err; i++)
        err = sum_segment(m, &seg[i]);
    return err || !m->sums_by_host ? err : zr_mpi_meet_host(m); /* no rank reads my arena any more */
}
