/* gpt2_names.h: the tensors of a GPT-2 under the names of its published weights, for zero_export and
 * zero_import. */
#ifndef ZERO_BENCH_GPT2_NAMES_H
#define ZERO_BENCH_GPT2_NAMES_H

#include "zero/zero.h"

#define GPT2_N_NAMES(layers) (12 * (layers) + 4)

/* Fills map, GPT2_N_NAMES(layers) entries, whose names are kept in text, as many rows. The published matrices
 * are (in, out), the model's (out, in). */
void gpt2_names(struct zero_weight *map, char (*text)[40], int32_t layers);

#endif
