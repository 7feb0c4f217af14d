/* SPDX-License-Identifier: Apache-2.0 */
/* llama_rotary.c: computes the table of rotary positions. Angles are in double precision, because those of
 * high positions are large. */
#include "bench/llama/llama_rotary.h"

#include <math.h>

static const double PI = 3.14159265358979323846;

static double scaled(double frequency, const struct hf_rope *r)
{
    if (r->kind == HF_ROPE_PLAIN)
        return frequency;
    if (r->kind == HF_ROPE_LINEAR)
        return frequency / r->factor;
    double wavelengths = (double)r->original_context * frequency / (2 * PI); /* in the original context */
    double share = (wavelengths - r->low_freq_factor) / (r->high_freq_factor - r->low_freq_factor);
    share = share < 0 ? 0 : share > 1 ? 1 : share;
    return frequency * (share + (1 - share) / r->factor);
}

void llama_rotary_table(float *table, int64_t n_positions, int64_t HS, const struct hf_rope *rope)
{
    for (int64_t i = 0; i < HS / 2; i++) {
        double frequency = scaled(pow(rope->theta, -2.0 * (double)i / (double)HS), rope);
        for (int64_t p = 0; p < n_positions; p++) {
            table[p * HS + i] = (float)cos((double)p * frequency);
            table[p * HS + HS / 2 + i] = (float)sin((double)p * frequency);
        }
    }
}
