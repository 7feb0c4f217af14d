/* SPDX-License-Identifier: Apache-2.0 */
/* call_order.c: what zero-bench train tells libzero in advance: the order of its calls, and how gradients
 * are written. It also reads the position that a checkpoint of it contains. */
#include "bench/train/pipeline.h"
#include "kernels/device.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Fills in the order for the layers of one pipeline stage, or of a whole model: forward over the embedding,
 * the layers and the head, and back. */
int32_t train_call_order(struct zero_call *out, const struct model_config *stage)
{
    const struct model_units u = stage->ops->units(stage);
    int32_t n = 0, layers = (int32_t)stage->layers;
    bool tied = u.head == u.embedding; /* then the unit stays open during the whole backward pass */
    bool embeds = !stage->no_embedding && (tied || !stage->lora_rank); /* not frozen */
/* unit, phase, whether it ends the bracket */
#define CALL(u, p, e)                                                                                        \
    out[n++] = (struct zero_call)                                                                            \
    {                                                                                                        \
        .unit = (u), .phase = (p), .is_end = (e)                                                             \
    }
    if (!stage->no_embedding) {
        CALL(u.embedding, ZERO_FORWARD, 0);
        CALL(u.embedding, ZERO_FORWARD, 1);
    }
    for (int32_t l = 0; l < layers; l++) {
        CALL(u.first_layer + l, ZERO_FORWARD, 0);
        CALL(u.first_layer + l, ZERO_FORWARD, 1);
    }
    if (!stage->no_head) {
        CALL(u.head, ZERO_FORWARD, 0);
        CALL(u.head, ZERO_FORWARD, 1);
        CALL(u.head, ZERO_BACKWARD, 0);
    }
    if (!stage->no_head && !tied)
        CALL(u.head, ZERO_BACKWARD, 1);
    for (int32_t l = layers; l-- > 0;) {
        CALL(u.first_layer + l, ZERO_BACKWARD, 0);
        CALL(u.first_layer + l, ZERO_BACKWARD, 1);
    }
    if (embeds && !tied)
        CALL(u.embedding, ZERO_BACKWARD, 0);
    if (embeds)
        CALL(u.embedding, ZERO_BACKWARD, 1);
#undef CALL
    return n;
}

bool train_stores_every_micro_batch(const struct train_options *o)
{
    const char *in_place = getenv("ZERO_GRAD_IN_PLACE"); /* then the model adds gradients up */
    bool model_adds = in_place && *in_place && strcmp(in_place, "0") != 0;
    return !o->plain && ((o->stage >= 2 && !model_adds) || o->accum == 1);
}

bool train_read_position(const char *text, struct train_position *out)
{
    unsigned long long seed, data_hash = 0;
    long long v[8] = {[4] = -1, [6] = -1, [7] = -1};
    double best = INFINITY, alpha = 0;
    if (sscanf(text,
               "seed %llu step %lld samples %lld text_bytes %lld per_step %lld rows %lld best %lf best_step "
               "%lld best_rows %lld best_tokens %lld data %llu lora_alpha %lf",
               &seed, &v[0], &v[1], &v[2], &v[3], &v[4], &best, &v[5], &v[6], &v[7], &data_hash, &alpha) < 5)
        return false;
    *out = (struct train_position){.seed = seed,
                                   .step = v[0],
                                   .samples = v[1],
                                   .text_bytes = v[2],
                                   .per_step = v[3],
                                   .rows = v[4],
                                   .best_loss = best,
                                   .best_step = v[5],
                                   .best_rows = v[6],
                                   .best_tokens = v[7],
                                   .data_hash = data_hash,
                                   .lora_alpha = alpha};
    return out->step >= 0 && out->step <= 1000000000 && out->per_step >= 1 && out->samples >= 0 &&
           out->samples <= INT64_MAX / 2;
}

int train_n_states(enum zero_optimizer optimizer, double beta1)
{
    return zr_optimizer_states((enum zero_optimizer)optimizer, (float)beta1);
}
