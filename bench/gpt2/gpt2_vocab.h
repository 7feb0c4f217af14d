/* SPDX-License-Identifier: Apache-2.0 */
/* gpt2_vocab.h: embedding and loss on the host if the token ids are split over tensor-parallel ranks. Each
 * rank has V ids and their rows of wte. There are N rows of tokens and C channels. A negative token or target
 * belongs to another rank. The int functions always return 0, for the macro RUN in gpt2.c. */
#ifndef ZERO_BENCH_GPT2_VOCAB_H
#define ZERO_BENCH_GPT2_VOCAB_H

#include "bench/gpt2/gpt2_layers.h"

/* Converts global ids (n) to those of the rank with ids first .. first + V - 1. Other ids become -1. */
void gpt2_vocab_localize(int32_t *ids, int64_t n, int64_t first, int64_t V);

/* out (B, T, C) = wte (V, C) at the rank's tokens and 0 at others, plus wpe (T, C) unless NULL. One rank
 * passes wpe. The sum over the ranks is then the embedding. */
int gpt2_vocab_embed(const struct compute *on, real *out, const int32_t *tokens, const real *wte,
                     const real *wpe, int64_t B, int64_t T, int64_t C);

/* Cross entropy in three steps. Each of the first two writes values over this rank's ids, one per row, which
 * the caller reduces over the ranks before the next step:
 *
 *   gpt2_vocab_top           top (N), the largest logit: by maximum
 *   gpt2_vocab_exponentials  total (N), the sum of exp(logit - top), and wanted (N), the sum of logit - top
 *                            weighted by the label: both by sum
 *
 * The exponentials replace logits (N, V). Rows of logits and dlogits begin ld elements apart. */
int gpt2_vocab_top(const struct compute *on, float *top, const float *logits, int64_t N, int64_t V,
                   int64_t ld);
int gpt2_vocab_exponentials(const struct compute *on, float *logits, float *total, float *wanted,
                            const float *top, const int32_t *targets, int64_t N, int64_t V, int64_t ld,
                            struct gpt2_label label);
/* loss (N) = log(total) - wanted; dlogits (N, width) = scale * its gradient. width is the same on all ranks.
 * Columns V to width - 1 belong to no id and become 0: they pad a rank that has fewer ids. */
int gpt2_vocab_loss(const struct compute *on, real *dlogits, double *loss, const float *logits,
                    const float *total, const float *wanted, const int32_t *targets, int64_t N, int64_t V,
                    int64_t width, int64_t ld, struct gpt2_label label, float scale);

#endif
