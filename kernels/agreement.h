/* SPDX-License-Identifier: Apache-2.0 */
/* agreement.h: what the ranks agree on at a step, in a form that one all-reduce of fixed size can combine.
 *
 * agree_begin writes a rank's part. The all-reduce adds `sum` as integers, so the order does not matter, and
 * takes the maximum of `max`. agree_end reads the result. It is the same on every rank, so all ranks compute
 * the same.
 *
 *     squares of the rank's gradients -> agree_begin -> all-reduce (comm.h: agree)
 *         -> agree_end -> scalars of the update kernels */
#ifndef ZR_KERNELS_AGREEMENT_H
#define ZR_KERNELS_AGREEMENT_H

#include "kernels/device.h"
#include "kernels/exact_sum.h"
#include "kernels/host_device_code.h"

#include <float.h>

/* A sum of doubles that may be added over ranks: its limbs after carries, and whether something was not
 * finite. Each limb is below 2^32, except the last, which may have any sign. So 2^31 ranks fit. */
#define ZR_AGREE_LIMBS (ZR_EXACT_LIMBS + 1)

/* Words that must be equal on all ranks, and from ZR_AGREE_LEAST on, words that may differ. */
enum zr_agree_word {
    ZR_AGREE_CALLS,   /* hash of the model's calls so far */
    ZR_AGREE_LR,      /* zr_agree_lr_word: the learning rate, and the rank, which may differ */
    ZR_AGREE_LEAST,   /* the program's word; every rank gets the least */
    ZR_AGREE_SQUARES, /* 1: an optimizer of this rank keeps squares of the gradient; the greatest counts */
    ZR_AGREE_LARGEST, /* zr_largest_with_rank, written by agree_begin; the greatest counts */
    ZR_AGREE_WORDS
};

/* The greatest norms with which a step is taken, after scaling and clipping: if an optimizer squares elements
 * of the gradient, and if none does. Above them an element's square, or the element itself, may overflow
 * fp32, and a second moment would stay infinite. */
#define ZR_MAX_NORM_TO_SQUARE 1.8e19
#define ZR_MAX_NORM           ((double)FLT_MAX)

/* The size does not depend on how many values are carried. Ranks that carry different numbers of values must
 * still meet in the all-reduce, so that the difference can be reported. */
#define ZR_AGREE_RANKS (ZR_AGREE_LIMBS * (1 + ZR_MAX_CARRIED))
#define ZR_AGREE_SUMS  (ZR_AGREE_RANKS + 1)
#define ZR_AGREE_MAXES (2 * ZR_AGREE_WORDS)
struct zr_agreement {
    /* Limbs of the norm, then of each carried value (0 if not carried). The word at ZR_AGREE_RANKS counts the
     * ranks; after a failed all-reduce it is wrong. */
    int64_t sum[ZR_AGREE_SUMS];
    /* For each word its maximum, and the maximum of its complement, which gives the minimum. */
    uint64_t max[ZR_AGREE_MAXES];
};
/* Bit of zr_agreed.differs: the all-reduce did not combine the parts of all ranks. */
#define ZR_AGREE_INCOMPLETE (UINT32_C(1) << ZR_AGREE_WORDS)

/* Result of sum_squares over a rank's part of the gradient. */
struct zr_own_squares {
    struct zr_exact_sum sum;
    /* word of struct zr_largest */
    uint64_t largest;
};

struct zr_agree_begin {
    /* squares of this rank; device memory */
    const struct zr_own_squares *own;
    /* output, written whole; device memory, 8-byte aligned */
    struct zr_agreement *out;
    /* The word ZR_AGREE_LARGEST is not read. */
    uint64_t words[ZR_AGREE_WORDS];
    /* rank in the world, below 2^16 */
    int32_t rank;
    /* the program's values, n_carried of them */
    double carried[ZR_MAX_CARRIED];
    int32_t n_carried;
};

struct zr_agree_lr {
    float lr;
    int32_t rank;
};

/* The outcome of a step, for the host. */
struct zr_agreed {
    /* norm of the scaled gradient before clipping; NaN if a gradient is not finite */
    double grad_norm;
    /* minimum of the word ZR_AGREE_LEAST over the ranks */
    uint64_t least;
    /* zr_largest_with_rank over all ranks. 0: no block is large. */
    uint64_t largest;
    /* too_large: the step is skipped because the norm is finite but above most_norm */
    int32_t clipped, skipped, too_large;
    double most_norm;
    /* 1 << word for each word before ZR_AGREE_LEAST that differs between ranks, and ZR_AGREE_INCOMPLETE */
    uint32_t differs;
    /* means over n_averaged ranks; NaN if a rank's value is not finite */
    double carried[ZR_MAX_CARRIED];
    /* the largest and the least learning rate, compared by bits, each with a rank that gave it */
    struct zr_agree_lr lr[2];
};

/* How agree_end computes the outcome. norm is the exact sum of all ranks' squares.
 *
 *   grad_norm  = sqrt(norm) * |scale|, in double
 *   clipped    = grad_norm is finite, clip > 0 and grad_norm > clip
 *   grad_scale = (float)(clipped ? scale * (clip / grad_norm) : scale)
 *   most_norm  = ZR_MAX_NORM_TO_SQUARE if an optimizer of any rank keeps squares, else ZR_MAX_NORM
 *   too_large  = (clipped ? clip : grad_norm) > most_norm
 *   skip       = grad_norm is not finite, too_large, a word differs, or not n_ranks ranks are in it
 *   carried    = (exact sum, rounded once) / n_averaged */
struct zr_agree_end {
    /* combined record of all ranks; device memory */
    const struct zr_agreement *all;
    double scale;
    /* Limit of the norm. 0: no clipping. */
    float clip;
    /* n_ranks: all ranks. n_averaged: ranks whose carried values count; all others carry 0. */
    int32_t n_carried, n_ranks, n_averaged;
    /* output; device memory */
    struct zr_step_scalars *scalars;
    /* output; host_alloc memory, read after an event */
    struct zr_agreed *agreed;
};

/* agree_begin and agree_end on memory that the calling thread may access. */
void zr_agree_write(const struct zr_agree_begin *b);
void zr_agree_read(const struct zr_agree_end *e);

/* ---- the parts of both, for the host and a GPU ---- */

/* Writes the limbs of a sum, whose carries it propagates. */
ZR_HOST_DEVICE void zr_agree_limbs(int64_t *to, struct zr_exact_sum *from)
{
    zr_exact_carry(from);
    for (int i = 0; i < ZR_EXACT_LIMBS; i++)
        to[i] = from->nonfinite ? 0 : from->limb[i];
    to[ZR_EXACT_LIMBS] = from->nonfinite != 0;
}

/* Writes sum number k. Sum 0 is the norm, with the count of ranks. Sum k is carried value k - 1. */
ZR_HOST_DEVICE void zr_agree_write_sum(const struct zr_agree_begin *b, int k)
{
    struct zr_exact_sum sum;
    if (k == 0) {
        sum = b->own->sum;
    } else {
        memset(&sum, 0, sizeof sum);
        if (k <= b->n_carried)
            zr_exact_add(&sum, b->carried[k - 1]);
    }
    zr_agree_limbs(b->out->sum + k * ZR_AGREE_LIMBS, &sum);
    if (k == 0)
        b->out->sum[ZR_AGREE_RANKS] = 1;
}

ZR_HOST_DEVICE void zr_agree_write_word(const struct zr_agree_begin *b, int w)
{
    uint64_t word = w == ZR_AGREE_LARGEST ? zr_largest_with_rank(b->own->largest, b->rank) : b->words[w];
    b->out->max[2 * w] = word;
    b->out->max[2 * w + 1] = ~word;
}

/* Returns sum number k over all ranks, rounded once. */
ZR_HOST_DEVICE double zr_agree_sum(const struct zr_agreement *all, int k)
{
    struct zr_exact_sum sum;
    const int64_t *limbs = all->sum + k * ZR_AGREE_LIMBS;
    for (int i = 0; i < ZR_EXACT_LIMBS; i++)
        sum.limb[i] = limbs[i];
    sum.n_added = 0;
    sum.nonfinite = limbs[ZR_EXACT_LIMBS] != 0;
    return zr_exact_value(&sum);
}

/* The rank is in the lower half, so the largest and the least word say which rank gave them. */
ZR_HOST_DEVICE uint64_t zr_agree_lr_word(float lr, int32_t rank)
{
    uint32_t bits;
    memcpy(&bits, &lr, sizeof bits);
    return (uint64_t)bits << 32 | (uint32_t)rank;
}

ZR_HOST_DEVICE struct zr_agree_lr zr_agree_lr_of(uint64_t word)
{
    struct zr_agree_lr of;
    uint32_t bits = (uint32_t)(word >> 32);
    memcpy(&of.lr, &bits, sizeof bits);
    of.rank = (int32_t)(uint32_t)word;
    return of;
}

/* Returns the bits of the words that differ. */
ZR_HOST_DEVICE uint32_t zr_agree_differs(const struct zr_agreement *all)
{
    uint32_t differs = 0;
    for (int w = 0; w < ZR_AGREE_LEAST; w++) {
        int shift = w == ZR_AGREE_LR ? 32 : 0;
        if (all->max[2 * w] >> shift != ~all->max[2 * w + 1] >> shift)
            differs |= UINT32_C(1) << w;
    }
    return differs;
}

/* Computes the scalars and the outcome. sums has the result of zr_agree_sum for each sum. */
ZR_HOST_DEVICE void zr_agree_conclude(const struct zr_agree_end *e, const double sums[1 + ZR_MAX_CARRIED])
{
    struct zr_agreed out;
    memset(&out, 0, sizeof out);
    out.differs = zr_agree_differs(e->all);
    if (e->all->sum[ZR_AGREE_RANKS] != e->n_ranks)
        out.differs |= ZR_AGREE_INCOMPLETE;
    out.least = ~e->all->max[2 * ZR_AGREE_LEAST + 1];
    out.lr[0] = zr_agree_lr_of(e->all->max[2 * ZR_AGREE_LR]);
    out.lr[1] = zr_agree_lr_of(~e->all->max[2 * ZR_AGREE_LR + 1]);
    out.grad_norm = sqrt(sums[0]) * fabs(e->scale);
    bool finite = out.grad_norm - out.grad_norm == 0;
    out.clipped = finite && e->clip > 0 && out.grad_norm > (double)e->clip;
    out.most_norm = e->all->max[2 * ZR_AGREE_SQUARES] ? ZR_MAX_NORM_TO_SQUARE : ZR_MAX_NORM;
    out.too_large = finite && (out.clipped ? (double)e->clip : out.grad_norm) > out.most_norm;
    out.largest = e->all->max[2 * ZR_AGREE_LARGEST];
    out.skipped = !finite || out.too_large;
    for (int k = 0; k < e->n_carried; k++)
        out.carried[k] = sums[1 + k] / e->n_averaged;
    e->scalars->grad_scale = (float)(out.clipped ? e->scale * ((double)e->clip / out.grad_norm) : e->scale);
    e->scalars->skip = out.skipped || out.differs != 0;
    *e->agreed = out;
}

#endif
