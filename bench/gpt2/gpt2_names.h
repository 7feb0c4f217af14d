/* SPDX-License-Identifier: Apache-2.0 */
/* gpt2_names.h: maps the tensors of a GPT-2 to the names of its published weights, for zero_export and
 * zero_import. */
#ifndef ZERO_BENCH_GPT2_NAMES_H
#define ZERO_BENCH_GPT2_NAMES_H

#include "zero/zero.h"

#define GPT2_N_NAMES(layers) (12 * (layers) + 4)

/* Fills map with at most GPT2_N_NAMES(layers) entries, layer by layer, and returns their number. So the
 * entries of consecutive pipeline stages have the order of the whole model. Their names are stored in text,
 * which has as many rows. The array number (n_tensors) gives each tensor's number in the whole model. The
 * layers are first_layer .. first_layer + layers - 1. The published matrices are (in, out), the model's (out,
 * in). */
int32_t gpt2_names(struct zero_weight *map, char (*text)[40], const int32_t *number, int32_t n_tensors,
                   int32_t first_layer, int32_t layers);

#endif
