/* SPDX-License-Identifier: Apache-2.0 */
/* llama_rotary.h: rotary positions (Su et al., arXiv:2104.09864): the table of cosines and sines that
 * llama_layers.h rotates with. Pairs and frequencies follow Hugging Face's Llama: channel i of a head forms
 * a pair with channel i + HS/2. */
#ifndef ZERO_BENCH_LLAMA_ROTARY_H
#define ZERO_BENCH_LLAMA_ROTARY_H

#include "bench/llama/hf_config.h"

/* table (n_positions, HS) = for each position the cosines of HS/2 angles, then their sines. HS is even. */
void llama_rotary_table(float *table, int64_t n_positions, int64_t HS, const struct hf_rope *rope);

#endif
