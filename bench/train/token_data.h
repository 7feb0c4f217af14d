/* SPDX-License-Identifier: Apache-2.0 */
/* token_data.h: files of token ids, cut into rows to train on.
 *
 * The files are mapped, so that all ranks of a host share the page cache, and nothing is copied. A row is
 * `context` tokens and the one after them. Rows of a file follow each other, and the last target of one is
 * the first token of the next. No row crosses files: what is left at a file's end is not used. */
#ifndef ZERO_BENCH_TRAIN_TOKEN_DATA_H
#define ZERO_BENCH_TRAIN_TOKEN_DATA_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Rows of tokens, (B, T) each: tokens, the token that follows each, and the position in its row at which the
 * token's document begins. A target that a mask leaves out of the loss is TOKEN_LEFT_OUT. */
enum { TOKEN_LEFT_OUT = -2 };
struct token_rows {
    int32_t *tokens, *targets, *document_start;
};

struct token_file {
    const char *path;
    /* the mapped file, and where its ids begin */
    void *map;
    size_t map_bytes;
    const uint8_t *ids;
    /* a byte for each token, which is 0 if the token does not count in the loss; NULL: all count */
    uint8_t *mask;
    /* bytes of an id: 1, 2 or 4 */
    int id_bytes;
    /* the id between two documents; -1: none */
    int64_t end_token;
    /* It is the first token of the document after it, as in llm.c's files; else the last of the one
     * before. */
    bool end_token_first;
    int64_t n_tokens, n_rows;
};

struct token_data {
    struct token_file *files;
    int n_files;
    int64_t n_tokens, n_rows;
    /* tokens in a row, and the bound of their ids */
    int64_t context, vocab;
    /* Rows are divided into documents, at each end token. */
    bool documents;
    /* -1: what the file's format says, which is GPT-2's for uint16 behind a header, and else none */
    int64_t end_token;
};

/* Maps the files. Each begins with the header of llm.c: 256 int32. The first three are
 *
 *   20240520, 1, the number of tokens    uint16 ids follow
 *   20240801, 7, the number of tokens    uint32 ids follow
 *
 * llm.c puts the end token before each document, so there a document begins with it.
 *
 * With id_bytes, which is 2 or 4, they have no header, and a document ends with the end token. paths must
 * outlive d. The caller has set context, vocab, documents and end_token of d. Returns 0 or a zero_err whose
 * message names the file. A set without a single row is refused, and with documents a file without an end
 * token. */
int token_data_open(struct token_data *d, const char *const *paths, int n_paths, int64_t id_bytes);
/* The same for n ids of text in memory, which must outlive d. id_bytes 1: each byte is a token. end_token is
 * for documents; -1: none. The message does not say where the text is from. */
int token_data_open_text(struct token_data *d, const void *ids, int id_bytes, int64_t n, int64_t end_token);
/* Maps a mask for each file. Returns 0 or a zero_err whose message names the file. */
int token_data_open_masks(struct token_data *d, const char *const *paths, int n_paths);
void token_data_close(struct token_data *d);

/* Fills in one row, at the beginning of out's arrays. Returns 0, or a zero_err that names the file and the
 * position of an id that is not below vocab. */
int token_data_row(const struct token_data *d, int64_t row, const struct token_rows *out);

/* The number of targets of a row that count in the loss, among n from position `from` on. */
int64_t token_data_count(const struct token_data *d, int64_t row, int64_t from, int64_t n);

/* Whether any target of rows [first, first + n) counts in the loss. */
bool token_data_counts(const struct token_data *d, int64_t first, int64_t n);

/* A hash of what a training run takes from the files, whatever their formats. It covers each file's number
 * of tokens, its first and last ids and their masks, and where documents are divided. It is not 0. */
uint64_t token_data_hash(const struct token_data *d);

/* The number, below n, that is taken as the i-th of an epoch. Over all i from 0 to n - 1 these are all
 * numbers, each once, in an order that depends only on n, seed and epoch. There is no table. */
int64_t token_data_shuffled(int64_t i, int64_t n, uint64_t seed, int64_t epoch);

#endif
