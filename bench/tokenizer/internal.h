/* SPDX-License-Identifier: Apache-2.0 */
/* internal.h: types and functions that the files of bench/tokenizer share.
 *
 *   tokenizer_json.c   reads the fields of tokenizer.json
 *   bpe.c              holds the vocabulary and its merges, and finds the ids of one piece of text
 *   split_pattern.c    matches regular expressions, with PCRE2
 *   nfc.c              normalises Unicode text, with utf8proc
 *   encode.c           cuts a text into added tokens and pieces
 *   tokenizer.c        opens and closes a tokenizer, and returns the bytes of ids */
#ifndef ZERO_BENCH_TOKENIZER_INTERNAL_H
#define ZERO_BENCH_TOKENIZER_INTERNAL_H

#include "bench/tokenizer/tokenizer.h"

#include <jansson.h>

#define TOKENIZER_MAX_IDS      (1 << 24)
#define TOKENIZER_MAX_STAGES   8
#define TOKENIZER_MAX_TEMPLATE 8

/* ---- vocabulary ---- */

enum token_kind { TOKEN_NONE, TOKEN_MODEL, TOKEN_ADDED, TOKEN_SPECIAL };

/* The bytes of a token are the n bytes at `at` of the vocabulary's bytes. */
struct token {
    uint32_t at, n;
    enum token_kind kind;
};

/* A merge: the neighbours `left` and `right` become the token `id`. Of all possible merges, the one with the
 * lowest rank is made first. left -1: an empty slot of the table. */
struct merge {
    int32_t left, right, id;
    uint32_t rank;
};

struct vocabulary {
    /* The tokens, indexed by id. */
    struct token *tokens;
    int64_t n;
    char *bytes;
    int64_t n_bytes, byte_capacity;
    /* Hash tables, whose sizes are powers of two. by_bytes finds the id of some bytes (-1: an empty slot),
     * and merges the merge of two neighbours. */
    int32_t *by_bytes;
    struct merge *merges;
    int64_t n_by_bytes, n_merges;
    /* The token of each single byte. -1: it has none. */
    int32_t byte_id[256];
};

/* Gives a token its bytes. id is below v->n. */
int vocabulary_set(struct vocabulary *v, int32_t id, const char *bytes, size_t n, enum token_kind kind);
/* Fills in the vocabulary from the file's model.vocab and model.merges. extra_ids: the number of ids that
 * added tokens need. */
int vocabulary_read(struct vocabulary *v, const char *file, const json_t *vocab, const json_t *merges,
                    int64_t extra_ids);
void vocabulary_free(struct vocabulary *v);
/* The id of a token of the model with these bytes. -1: there is none. */
int32_t vocabulary_find(const struct vocabulary *v, const char *bytes, size_t n);

/* Memory for the merges of one piece, which grows as needed. {0} is empty. */
struct bpe_scratch {
    struct bpe_symbol *symbols;
    struct bpe_candidate *heap;
    int64_t capacity, n_heap;
    /* The result. */
    int32_t *ids;
    int64_t n_ids;
};
/* Finds the ids of a piece of n bytes, at least 1, in O(n log n). */
int bpe_piece(const struct vocabulary *v, struct bpe_scratch *s, const char *piece, size_t n);
void bpe_scratch_free(struct bpe_scratch *s);

/* ---- regular expressions ---- */

struct split_pattern;
/* Compiles an expression in the syntax of Oniguruma, which the tokenizers library uses. Syntax that PCRE2
 * might read in another way is refused. In a build without PCRE2, *out becomes NULL. */
int split_pattern_make(struct split_pattern **out, const char *file, const char *expression);
void split_pattern_free(struct split_pattern *p);

/* Memory for matching, for one thread. NULL: there is no memory, or no PCRE2. */
void *split_scratch_make(void);
void split_scratch_free(void *scratch);
bool split_is_available(void);
/* Finds the first match that begins at `from` or later in valid UTF-8. If there is none, *start becomes
 * n + 1. */
int split_find(const struct split_pattern *p, void *scratch, const char *text, size_t n, size_t from,
               size_t *start, size_t *end);

/* ---- normalisation ---- */

/* Converts valid UTF-8 to form NFC. If the text is in this form already, *out becomes NULL. Otherwise the
 * caller frees the *n_out bytes. */
bool nfc_is_available(void);
int nfc_normalize(const char *text, size_t n, char **out, size_t *n_out);

/* ---- the whole ---- */

struct added_token {
    /* The bytes that are searched for in a text. */
    char *text;
    size_t n;
    int32_t id;
    /* White space before or after the token becomes part of it. */
    bool lstrip, rstrip;
};

/* Sorted by text. */
struct added_tokens {
    struct added_token *list;
    int64_t n;
};

/* A step that cuts pieces into smaller ones. With prefix_space, it first puts a space before a piece that
 * does not begin with one. Then each match of pattern becomes a piece, and so does the text between two
 * matches. pattern NULL: it does not cut. */
struct split_stage {
    bool prefix_space;
    struct split_pattern *pattern;
};

struct tokenizer {
    struct vocabulary vocab;
    /* raw: tokens to find in the text before it is normalised. normalized: tokens to find in the normalised
     * text between those. */
    struct added_tokens raw, normalized;
    bool nfc;
    struct split_stage stages[TOKENIZER_MAX_STAGES];
    int n_stages;
    /* A piece that is a token becomes its id, without merges. */
    bool ignore_merges;
    /* Ids before and after a whole text. */
    int32_t before[TOKENIZER_MAX_TEMPLATE], after[TOKENIZER_MAX_TEMPLATE];
    int n_before, n_after;
};

/* Fills in a zeroed tokenizer, which the caller closes even after a failure. */
int tokenizer_read_json(struct tokenizer *t, const char *file, const json_t *root);

#endif
