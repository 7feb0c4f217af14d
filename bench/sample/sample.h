/* SPDX-License-Identifier: Apache-2.0 */
/* sample.h: the options of zero-bench sample, the choice of a token, and the conversion between text and
 * tokens. Nothing here depends on the model's dtype. */
#ifndef ZERO_BENCH_SAMPLE_H
#define ZERO_BENCH_SAMPLE_H

#include "bench/tokenizer/tokenizer.h"

struct sample_options {
    /* text to continue; NULL: begin with the tokens that begin a text */
    const char *prompt;
    /* tokenizer.json or its folder; NULL: a token is a byte */
    const char *tokenizer;
    /* tokens to generate, unless a special token ends the text */
    int64_t n_tokens;
    /* 0: always the likeliest token */
    double temperature;
    /* The choice is among the top_k likeliest tokens (0: all), and of these among the likeliest ones that
     * together have the probability top_p. */
    int64_t top_k;
    double top_p;
    uint64_t seed;
};

/* A token that may be chosen. */
struct sample_token {
    float logit;
    int32_t id;
};

/* Chooses the i-th generated token from the logits of all V ids. The choice depends only on these and on the
 * options, so ranks with the same logits choose the same token. Returns its id. If the logit of an id is not
 * finite, it returns -1 - id. room is a buffer of V elements. */
int32_t sample_choose(const struct sample_options *o, int64_t i, const float *logits, int64_t V,
                      struct sample_token *room);

/* The functions below take a tokenizer, or NULL if each byte is a token. */

/* Converts text to ids below V. text NULL: *ids becomes the tokens that begin a text. The caller frees *ids,
 * also after a failure. Returns 0 or a zero_err. */
int sample_encode(const struct tokenizer *t, const char *text, int64_t V, int32_t **ids, int64_t *n);
/* Prints the text of a token: nothing for a special one. Control characters are shown as \xNN, except for
 * line breaks and tabs. */
void sample_print(const struct tokenizer *t, int32_t id);
/* Whether the token ends a text. */
bool sample_ends(const struct tokenizer *t, int32_t id);

#endif
