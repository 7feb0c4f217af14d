/* SPDX-License-Identifier: Apache-2.0 */
/* choose.c: chooses a token from the logits. The random number of a choice depends only on the seed and on
 * the number of the generated token. */
#include "bench/random_bits.h"
#include "bench/sample/sample.h"

#include <math.h>
#include <stdlib.h>

/* Sorts the likeliest token first. Equally likely tokens are sorted by id. */
static int compare(const void *a, const void *b)
{
    const struct sample_token *x = a, *y = b;
    if (x->logit != y->logit)
        return x->logit > y->logit ? -1 : 1;
    return x->id < y->id ? -1 : 1;
}

/* The probability of a token, divided by that of the likeliest one. */
static double weight(const struct sample_options *o, const struct sample_token *tokens, int64_t at)
{
    return exp(((double)tokens[at].logit - (double)tokens[0].logit) / o->temperature);
}

/* Draws from n tokens, sorted by compare. u is uniform in [0, 1). */
static int32_t draw(const struct sample_options *o, const struct sample_token *tokens, int64_t n, double u)
{
    double all = 0.0, nucleus = 0.0, sum = 0.0;
    int64_t k = 0, at = 0;
    for (int64_t t = 0; t < n; t++)
        all += weight(o, tokens, t);
    do
        nucleus += weight(o, tokens, k++);
    while (k < n && nucleus < o->top_p * all);
    do
        sum += weight(o, tokens, at++);
    while (at < k && sum <= u * nucleus);
    return tokens[at - 1].id;
}

int32_t sample_choose(const struct sample_options *o, int64_t i, const float *logits, int64_t V,
                      struct sample_token *room)
{
    int32_t top = 0;
    for (int32_t id = 0; id < V; id++) {
        if (!isfinite(logits[id]))
            return -1 - id;
        top = logits[id] > logits[top] ? id : top;
        room[id] = (struct sample_token){logits[id], id};
    }
    if (o->temperature == 0.0)
        return top;
    double u = (double)(random_bits(random_bits(o->seed) + (uint64_t)i) >> 11) * 0x1p-53;
    qsort(room, (size_t)V, sizeof *room, compare);
    return draw(o, room, o->top_k && o->top_k < V ? o->top_k : V, u);
}
