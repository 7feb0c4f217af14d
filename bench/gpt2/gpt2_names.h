/* SPDX-License-Identifier: Apache-2.0 */
/* gpt2_names.h: the tensors of a GPT-2 under the names of its published weights, for zero_export and
 * zero_import. */
#ifndef ZERO_BENCH_GPT2_NAMES_H
#define ZERO_BENCH_GPT2_NAMES_H

#include "zero/zero.h"

#define GPT2_N_NAMES(layers) (12 * (layers) + 4)

/* Fills map, GPT2_N_NAMES(layers) entries or fewer, whose names are kept in text, as many rows, and returns
 * how many: layer by layer, so that pipeline stages one after the other have the order of one. number
 * (n_tensors): which of the whole model's tensors a table has, and its layers are that many from first_layer
 * on. The published matrices are (in, out), the model's (out, in). */
int32_t gpt2_names(struct zero_weight *map, char (*text)[40], const int32_t *number, int32_t n_tensors,
                   int32_t first_layer, int32_t layers);

#endif
