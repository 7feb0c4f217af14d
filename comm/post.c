/* SPDX-License-Identifier: Apache-2.0 */
/* post.c: hashes, compares and describes the operations that ranks post. */
#include "comm/post.h"
#include "comm/segment.h"

#include <stdio.h>
#include <xxhash.h>

void zr_post_numbers(struct zr_post *p, const int64_t *v, int n)
{
    p->seg_hash = XXH3_64bits_withSeed(v, (size_t)n * sizeof *v, p->seg_hash);
}

void zr_post_cut(struct zr_post *p, const struct zr_cut *c, int size)
{
    p->bytes += c->total;
    for (int place = 1; c->at && place < size; place++) {
        int64_t at = zr_cut_at(c, place);
        zr_post_numbers(p, &at, 1);
    }
}

bool zr_post_same(const struct zr_post *a, const struct zr_post *b)
{
    return a->seq == b->seq && a->op == b->op && a->unit == b->unit && a->root == b->root &&
           a->step == b->step && a->n_seg == b->n_seg && a->call_hash == b->call_hash &&
           a->bytes == b->bytes && a->seg_hash == b->seg_hash;
}

void zr_post_describe(const struct zr_post *p, char *text, size_t n_text)
{
    int n = snprintf(text, n_text, "%s seq %llu", zr_op_name((enum zr_op)p->op), (unsigned long long)p->seq);
    if (p->unit >= 0 && n > 0 && (size_t)n < n_text)
        snprintf(text + n, n_text - (size_t)n, " unit %d", p->unit);
}

void zr_post_where(const struct zr_post *p, char *text, size_t n_text)
{
    char unit[24] = "";
    if (p->unit >= 0)
        snprintf(unit, sizeof unit, " unit %d", p->unit);
    if (p->seq)
        snprintf(text, n_text, "at seq %llu (%s%s)", (unsigned long long)p->seq,
                 zr_op_name((enum zr_op)p->op), unit);
    else
        snprintf(text, n_text, "not at its first operation yet");
}

/* Writes how two posts of the same operation and unit differ. */
static void describe_difference(const struct zr_post *theirs, int my_rank, const struct zr_post *mine,
                                char *text, size_t n_text)
{
    if (mine->step != theirs->step)
        snprintf(text, n_text, " of step %u, rank %d of step %u", theirs->step, my_rank, mine->step);
    else if (mine->bytes != theirs->bytes)
        snprintf(text, n_text, " with %lld bytes, rank %d with %lld", (long long)theirs->bytes, my_rank,
                 (long long)mine->bytes);
    else if (mine->root != theirs->root)
        snprintf(text, n_text, " with root %d, rank %d with root %d", theirs->root, my_rank, mine->root);
    else if (mine->n_seg != theirs->n_seg)
        snprintf(text, n_text, " with %u segments, rank %d with %u", theirs->n_seg, my_rank, mine->n_seg);
    else if (mine->seg_hash != theirs->seg_hash)
        snprintf(text, n_text, " with other segments (place, size, dtype or accumulation) than rank %d",
                 my_rank);
    else
        snprintf(text, n_text, " after other calls of the program than rank %d", my_rank);
}

void zr_post_differ(int rank, const struct zr_post *theirs, int my_rank, const struct zr_post *mine,
                    char *text, size_t n_text)
{
    char op[96], more[256] = "";
    zr_post_describe(theirs, op, sizeof op);
    if (mine->op == theirs->op && mine->unit == theirs->unit)
        describe_difference(theirs, my_rank, mine, more, sizeof more);
    snprintf(text, n_text, "rank %d is at %s%s", rank, op, more);
}
