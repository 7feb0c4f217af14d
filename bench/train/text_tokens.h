/* SPDX-License-Identifier: Apache-2.0 */
/* text_tokens.h: files of text as token ids. Each file is a document: the ids that the tokenizer's template
 * puts before a text, its own ids, and the model's end token. */
#ifndef ZERO_BENCH_TEXT_TOKENS_H
#define ZERO_BENCH_TEXT_TOKENS_H

#include "bench/llama/hf_config.h"
#include "bench/tokenizer/tokenizer.h"

#define TEXT_TOKENS_MAX (1 << 24) /* limit of text_tokens_take, because every rank holds a copy */

/* Whether the folder of a model has a tokenizer. */
bool text_has_tokenizer(const char *dir);
/* The token that ends a text. -1: config.json names none. */
int64_t text_end_token(const struct hf_config *c);

/* Encodes the files as text_walk finds them, and calls `take` with the ids in order. In folders, files that
 * are not text are passed over. *n_files grows by the number of files. An error names the file. */
int text_tokens(const struct tokenizer *t, const char *const *paths, int n_paths, int64_t end_token,
                tokenizer_take *take, void *to, int64_t *n_files);
/* token_ids_take, which refuses more than TEXT_TOKENS_MAX ids. */
int text_tokens_take(void *to, const int32_t *ids, int64_t n);

#endif
