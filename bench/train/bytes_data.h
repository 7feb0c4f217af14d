/* SPDX-License-Identifier: Apache-2.0 */
/* bytes_data.h: the text to train on. A byte is a token. */
#ifndef ZERO_BENCH_BYTES_DATA_H
#define ZERO_BENCH_BYTES_DATA_H

#include "bench/train/token_data.h"

#include <stdint.h>

#define BYTES_DATA_DEFAULT "/usr/include"     /* C headers are on every machine that builds */
#define BYTES_DATA_MAX     (16 * 1024 * 1024) /* limit, because every rank holds a copy */

struct bytes_data {
    uint8_t *bytes;
    int64_t n_bytes, n_files;
};

/* What is done with a file of text. given: it was named, and not found in a folder. A positive value ends the
 * walk. */
typedef int text_visit(void *arg, const char *path, bool given);
/* Visits path, or all files in the folder path in the order of their names, without symbolic links. In
 * folders, only names that end in suffix are visited; NULL: all names. Returns 0, what the visit returned, or
 * ZERO_ERR_IO. */
int text_walk(const char *path, const char *suffix, text_visit *visit, void *arg);
/* Whether the beginning of a file does not look like text: it has a zero byte. */
bool text_is_binary(const void *bytes, size_t n);

/* Reads files, and all files in folders in the order of their names, up to BYTES_DATA_MAX. In folders,
 * symbolic links and files that are not text (a zero byte near the start) are passed over. If n_paths is
 * 0, the C headers of BYTES_DATA_DEFAULT are read. The same files give the same bytes on every rank.
 * Returns 0 or a zero_err that names the path. */
int bytes_data_open(struct bytes_data *d, const char *const *paths, int n_paths);
void bytes_data_close(struct bytes_data *d);

/* Fills B rows with pieces of the text. `document` 0: a row is one piece. Otherwise it is a pack of
 * documents, which are pieces of 1 to 2 * document - 1 bytes. The last target of a document is the byte that
 * follows in the text, not the next document's first. The pieces depend only on seed, step, micro-batch
 * (counted over all ranks) and row, so any number of ranks sees the same batches. n_bytes must be above T. */
void bytes_data_sample(const struct bytes_data *d, const struct token_rows *out, int64_t B, int64_t T,
                       int64_t document, uint64_t seed, int64_t step, int64_t micro_batch);

#endif
