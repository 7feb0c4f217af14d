/* SPDX-License-Identifier: Apache-2.0 */
/* gpt2_vocab.h: embedding and loss of a model whose token ids are divided among parts. Each part has V ids
 * and their rows of wte. It runs on the host. There are N rows of tokens and C channels; a token or target
 * below 0 belongs to another part. All functions return 0. */
#ifndef ZERO_BENCH_GPT2_VOCAB_H
#define ZERO_BENCH_GPT2_VOCAB_H

#include "bench/gpt2/gpt2_layers.h"

/* Converts ids (n) of the whole vocabulary to those of the part whose V ids begin at `first`. Other parts'
 * ids become -1. */
void gpt2_vocab_localize(int32_t *ids, int64_t n, int64_t first, int64_t V);

/* out (B, T, C) = wte (V, C) at the part's tokens and 0 at others', plus wpe (T, C) if that is not NULL.
 * The sum over the parts is the embedding, if one of them passes wpe. */
int gpt2_vocab_embed(const struct place *on, real *out, const int32_t *tokens, const real *wte,
                     const real *wpe, int64_t B, int64_t T, int64_t C);

/* Cross entropy in three steps, between which the parts take the largest, and then the sum, of what each row
 * has: top (N) is its largest logit, total (N) the sum of exp(logit - top), wanted (N) the sum
 * of logit - top as label weighs it, of this part's tokens. logits (N, V), with ld elements between rows,
 * become those exponentials. */
int gpt2_vocab_top(const struct place *on, float *top, const float *logits, int64_t N, int64_t V, int64_t ld);
int gpt2_vocab_exponentials(const struct place *on, float *logits, float *total, float *wanted,
                            const float *top, const int32_t *targets, int64_t N, int64_t V, int64_t ld,
                            struct gpt2_label label);
/* loss (N) = log(total) - wanted. dlogits = scale * its gradient, and 0 in columns V to width. */
int gpt2_vocab_loss(const struct place *on, real *dlogits, double *loss, const float *logits,
                    const float *total, const float *wanted, const int32_t *targets, int64_t N, int64_t V,
                    int64_t width, int64_t ld, struct gpt2_label label, float scale);

#endif
