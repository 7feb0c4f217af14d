/* SPDX-License-Identifier: Apache-2.0 */
/* tokenizer.h: converts text to token ids and back, with the tokenizer.json of a Hugging Face folder.
 *
 * Byte-level BPE is implemented, as GPT-2, Llama 3, Qwen2, Qwen3 and Mistral's Tekken use it. The ids are
 * those of the tokenizers library. They may differ only for the newest characters, because each library has
 * its own version of Unicode. If a file asks for something that is not implemented, the error names it. The
 * fields `truncation` and `padding` are ignored. An open tokenizer does not change, so threads may share
 * it. */
#ifndef ZERO_BENCH_TOKENIZER_H
#define ZERO_BENCH_TOKENIZER_H

#include "zero/types.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define TOKENIZER_FILE "tokenizer.json"

struct tokenizer;

/* Reads the file `path`, or tokenizer.json in the folder `path`. Returns 0 or an error:
 *
 *     ZERO_ERR_IO      the file cannot be read, or is not JSON
 *     ZERO_ERR_ARG     a field has an impossible value
 *     ZERO_ERR_NOTSUP  a field has a value that is not implemented here */
int tokenizer_open(struct tokenizer **out, const char *path);
/* Parses the n bytes of such a file. `file` is its name in messages. */
int tokenizer_parse(struct tokenizer **out, const char *file, const char *text, size_t n);
/* t may be NULL. */
void tokenizer_close(struct tokenizer *t);

/* The highest id plus one. Some ids below it may have no token. */
int64_t tokenizer_n_ids(const struct tokenizer *t);
/* Returns the id of the added token with this content in the file's added_tokens. -1: there is none. */
int64_t tokenizer_added_id(const struct tokenizer *t, const char *content);
/* Whether id is a special token, such as the one that ends a text. */
bool tokenizer_is_special(const struct tokenizer *t, int64_t id);

/* Returns the *n bytes of a token, which are valid until the tokenizer is closed. A text is the bytes of its
 * tokens, one after another. A single token may be part of a character. An id without a token, which a model
 * with a padded vocabulary can choose, gives U+FFFD, the replacement character. */
const char *tokenizer_bytes(const struct tokenizer *t, int64_t id, size_t *n);

/* Receives the next n ids of a text. A value other than 0 stops the encoding, which returns it. */
typedef int tokenizer_take(void *to, const int32_t *ids, int64_t n);

/* Encodes n bytes of UTF-8, and calls `take` with the ids in order, a few at a time. Added tokens in the text
 * become their ids. With whole_text, the ids that the file's template puts before and after a text are
 * included. Returns 0, the value of `take`, ZERO_ERR_NOMEM or one of these errors:
 *
 * ZERO_ERR_ARG the text is not UTF-8, or a byte has no token ZERO_ERR_NOTSUP the text needs PCRE2 or
 * utf8proc, which the build lacks; or a piece of it is too long */
int tokenizer_encode(const struct tokenizer *t, const char *text, size_t n, bool whole_text,
                     tokenizer_take *take, void *to);

/* A list of ids. token_ids_take is the callback that appends to it. {0} is empty. The caller frees ids. */
struct token_ids {
    int32_t *ids;
    int64_t n, capacity;
};
int token_ids_take(void *to, const int32_t *ids, int64_t n);

#endif
