/* SPDX-License-Identifier: Apache-2.0 */
/* gpt2_names.h: the tensors of a GPT-2 under their published names, for zero_export and zero_import. */
#ifndef ZERO_BENCH_GPT2_NAMES_H
#define ZERO_BENCH_GPT2_NAMES_H

#include "zero/zero.h"

#define GPT2_N_NAMES(layers) (12 * (layers) + 4)

/* Fills map, which has GPT2_N_NAMES(layers) entries, with names that are written to as many rows of text.
 * Returns the number of entries. They go layer by layer, so that consecutive pipeline stages have the
 * order of the whole model. number (n_tensors) says which of the whole model's tensors are in the table,
 * whose layers begin with first_layer. Published matrices are (in, out), the model's (out, in). */
int32_t gpt2_names(struct zero_weight *map, char (*text)[40], const int32_t *number, int32_t n_tensors,
                   int32_t first_layer, int32_t layers);

#endif
