/* SPDX-License-Identifier: Apache-2.0 */
/* gpt2_reference.h: the loss of a GPT-2 in double precision, written to be obviously right. There is no
 * batching and no kept activation, and one token's row is computed at a time. */
#ifndef ZERO_TEST_GPT2_REFERENCE_H
#define ZERO_TEST_GPT2_REFERENCE_H

#include "bench/model/model_config.h"

/* params: each tensor of struct gpt2_params (bench/gpt2/gpt2.h), in its order, as doubles. Returns the mean
 * loss over B*T tokens. */
double reference_loss(const struct model_config *c, double *const params[16], const int32_t *tokens,
                      const int32_t *targets, int64_t B);

#endif
