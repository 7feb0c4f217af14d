/* SPDX-License-Identifier: Apache-2.0 */
/* vocab.h: token ids that are split over tensor-parallel ranks. Each rank has a range of the ids, and
 * their rows of wte.
 *
 * The steps of the loss here are those for the CPU; layers.cu has those for GPUs. layers.h says what
 * each step computes. */
#ifndef ZERO_BENCH_MODEL_VOCAB_H
#define ZERO_BENCH_MODEL_VOCAB_H

#include "bench/model/layers.h"

/* Converts n ids of the whole vocabulary, in host memory, to numbers from 0 for the rank that has the V ids
 * from `first` on. Ids of other ranks become -1. */
void model_vocab_localize(int32_t *ids, int64_t n, int64_t first, int64_t V);

/* N is the number of rows, V the number of this rank's ids. Rows of logits and dlogits are ld elements apart.
 * dlogits has `width` columns, the same number on all ranks; those from V on become 0. targets (N) are the
 * converted ids of each row's next token. label gives the probability that each token should have. */
int model_vocab_top(const struct compute *on, float *top, const float *logits, int64_t N, int64_t V,
                    int64_t ld);
int model_vocab_exponentials(const struct compute *on, float *logits, float *total, float *wanted,
                             const float *top, const int32_t *targets, int64_t N, int64_t V, int64_t ld,
                             struct model_label label);
int model_vocab_loss(const struct compute *on, real *dlogits, double *loss, const float *logits,
                     const float *total, const float *wanted, const int32_t *targets, int64_t N, int64_t V,
                     int64_t width, int64_t ld, struct model_label label, float scale);

#endif
