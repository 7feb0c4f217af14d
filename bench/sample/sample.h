/* SPDX-License-Identifier: Apache-2.0 */
/* sample.h: what zero-bench sample generates, and how it chooses each token. Nothing here depends on the
 * model's dtype. */
#ifndef ZERO_BENCH_SAMPLE_H
#define ZERO_BENCH_SAMPLE_H

#include "bench/tokenizer/tokenizer.h"

struct sample_options {
    /* text to go on from; NULL: what a text begins with */
    const char *prompt;
    /* tokenizer.json or its folder; NULL: a token is a byte */
    const char *tokenizer;
    /* tokens to generate, unless a special token ends the text */
    int64_t n_tokens;
    /* 0: always the likeliest token */
    double temperature;
    /* Only the top_k likeliest tokens are chosen from (0: all), and of these the likeliest that together have
     * the probability top_p. */
    int64_t top_k;
    double top_p;
    uint64_t seed;
};

/* A token that may be chosen. */
struct sample_token {
    float logit;
    int32_t id;
};

/* Chooses the i-th generated token from the logits of all V ids. The choice depends on nothing else but the
 * options, so ranks with the same logits choose the same. Returns its id, or -1 - id for a logit that is not
 * finite. room has V elements. */
int32_t sample_choose(const struct sample_options *o, int64_t i, const float *logits, int64_t V,
                      struct sample_token *room);

/* What follows takes a tokenizer, or NULL if a token is a byte. */

/* Makes tokens of a text (NULL: of what a text begins with), of ids below V. The caller frees *ids, also
 * after a failure. Returns 0 or a zero_err. */
int sample_encode(const struct tokenizer *t, const char *text, int64_t V, int32_t **ids, int64_t *n);
/* Prints the text of a token: nothing for a special one. Control characters are shown as \xNN, except for
 * line breaks and tabs. */
void sample_print(const struct tokenizer *t, int32_t id);
/* Whether the token ends a text. */
bool sample_ends(const struct tokenizer *t, int32_t id);

#endif
