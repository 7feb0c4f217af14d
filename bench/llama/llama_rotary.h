/* SPDX-License-Identifier: Apache-2.0 */
/* llama_rotary.h: rotary positions (Su et al., arXiv:2104.09864): the table of cosines and sines that
 * llama_layers.h rotates with. Pairs and frequencies follow Hugging Face's Llama: channel i of a head forms
 * a pair with channel i + HS/2. */
#ifndef ZERO_BENCH_LLAMA_ROTARY_H
#define ZERO_BENCH_LLAMA_ROTARY_H

#include <stdint.h>

/* How frequencies change so that a model handles longer rows than it was first trained with. */
enum llama_scaling {
    LLAMA_UNSCALED,
    LLAMA_LINEAR, /* all are divided by factor */
    LLAMA_LLAMA3, /* low ones are divided by factor, high ones stay, those between are interpolated */
};

struct llama_rotary {
    /* Base of the frequencies: pair i of HS/2 turns by theta^(-2i/HS) radians per position. */
    double theta;
    enum llama_scaling scaling;
    double factor;
    /* Only of LLAMA_LLAMA3. A wavelength above original_context / low_freq_factor positions is low, one below
     * original_context / high_freq_factor is high. */
    double low_freq_factor, high_freq_factor, original_context;
};

/* table (n_positions, HS) = for each position the cosines of HS/2 angles, then their sines. HS is even. */
void llama_rotary_table(float *table, int64_t n_positions, int64_t HS, const struct llama_rotary *rotary);

#endif
