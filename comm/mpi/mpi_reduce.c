/* SPDX-License-Identifier: Apache-2.0 */
/* mpi_reduce.c: a segment's sum. MPI's own adds in an order that is its library's, and slowly, so every rank
 * sends each owner its slice, and the owner adds them up in the fixed tree in fp32.
 *
 * It goes in steps that are the same on all ranks: of every slice one chunk, from the places of one block of
 * the tree (comm/fold.h). In step k of a chunk a rank of block b gets from block b + k and sends to block
 * b - k, so that what one rank sends in a step another gets in the same step. Two steps are under way at a
 * time: one comes while the one before is added. */
#include "comm/fold.h"
#include "comm/mpi/mpi_comm.h"

struct sum {
    struct zr_mpi *m;
    const struct zr_reduce_seg *g;
    int size, me, n_blocks;
    /* bytes of an element; of a chunk */
    int64_t each, chunk;
    int64_t n_steps;
    struct zr_fold fold;
};

static int block_of(int place)
{
    return place / ZR_FOLD_BLOCK;
}

static int block_ends(const struct sum *s, int block)
{
    int end = (block + 1) * ZR_FOLD_BLOCK;
    return end < s->size ? end : s->size;
}

/* Whose sources come in a step, and to whom this rank's go. */
static int block_from(const struct sum *s, int64_t step)
{
    return (block_of(s->me) + (int)(step % s->n_blocks)) % s->n_blocks;
}

static int block_to(const struct sum *s, int64_t step)
{
    return (block_of(s->me) - (int)(step % s->n_blocks) + s->n_blocks) % s->n_blocks;
}

static int64_t chunk_begins(const struct sum *s, int64_t step)
{
    return step / s->n_blocks * s->chunk;
}

/* Of a place's slice; may be none. */
static int64_t chunk_bytes(const struct sum *s, int place, int64_t step)
{
    int64_t left = zr_cut_bytes(&s->g->cut, place) - chunk_begins(s, step);
    return left < 0 ? 0 : left < s->chunk ? left : s->chunk;
}

static char *chunk_in(const struct sum *s, int place, int64_t step)
{
    return s->m->base.arena + s->g->src + zr_cut_at(&s->g->cut, place) + chunk_begins(s, step);
}

static char *staged_at(const struct sum *s, int place, int64_t step)
{
    int rows = s->size < ZR_FOLD_BLOCK ? s->size : ZR_FOLD_BLOCK;
    return s->m->own + (step % 2 * rows + place % ZR_FOLD_BLOCK) * s->m->chunk;
}

static int begin_step(const struct sum *s, int64_t step)
{
    struct zr_mpi *m = s->m;
    int from = block_from(s, step), to = block_to(s, step), err = 0;
    int64_t n = chunk_bytes(s, s->me, step);
    for (int i = from * ZR_FOLD_BLOCK; i < block_ends(s, from) && n && !err; i++)
        if (i != s->me)
            err = zr_mpi_receive(m, staged_at(s, i, step), n, i, ZR_MPI_TAG_DATA, &m->data[step % 2]);
    for (int i = to * ZR_FOLD_BLOCK; i < block_ends(s, to) && !err; i++) {
        n = chunk_bytes(s, i, step);
        if (i != s->me && n)
            err = zr_mpi_send(m, chunk_in(s, i, step), n, i, ZR_MPI_TAG_DATA, &m->data[step % 2]);
    }
    return err;
}

static void add_step(struct sum *s, int64_t step)
{
    int64_t n = chunk_bytes(s, s->me, step) / s->each;
    int block = block_from(s, step), first = block * ZR_FOLD_BLOCK;
    const void *src[ZR_FOLD_BLOCK];
    if (n == 0)
        return;
    if (step % s->n_blocks == 0) {
        float *dst = (float *)(s->m->base.arena + s->g->dst) + chunk_begins(s, step) / s->each;
        int64_t rows = s->size < ZR_FOLD_BLOCK ? s->size : ZR_FOLD_BLOCK;
        zr_fold_begin(&s->fold, s->m->set->kernels, s->size, dst, s->g->accumulate, n,
                      (float *)(s->m->own + 2 * rows * s->m->chunk), s->m->chunk / zr_dtype_bytes(ZR_BF16));
    }
    for (int i = first; i < block_ends(s, block); i++)
        src[i - first] = i == s->me ? chunk_in(s, i, step) : staged_at(s, i, step);
    zr_fold_add(&s->fold, block, src, s->g->dtype);
}

int zr_mpi_reduce(struct zr_mpi *m, const struct zr_reduce_seg *g)
{
    struct sum s = {.m = m,
                    .g = g,
                    .size = m->base.group.size,
                    .me = m->base.group.rank,
                    .n_blocks = zr_fold_blocks(m->base.group.size),
                    .each = zr_dtype_bytes(g->dtype),
                    .chunk = m->chunk};
    s.n_steps = (zr_cut_most(&g->cut, s.size) + s.chunk - 1) / s.chunk * s.n_blocks;
    int err = s.n_steps ? begin_step(&s, 0) : 0;
    for (int64_t step = 0; step < s.n_steps && !err; step++) {
        if (step + 1 < s.n_steps)
            err = begin_step(&s, step + 1);
        err = err ? err : zr_mpi_await(m, &m->data[step % 2], 0);
        if (!err)
            add_step(&s, step);
    }
    return err;
}
