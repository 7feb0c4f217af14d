/* SPDX-License-Identifier: Apache-2.0 */
/* state_hash.h: one SHA-256 for the whole optimizer state, to compare what two runs have trained. */
#ifndef ZERO_BENCH_STATE_HASH_H
#define ZERO_BENCH_STATE_HASH_H

#include "zero/zero.h"

#include <stdbool.h>
#include <stdint.h>

#define STATE_HASH_CHARS 65 /* 64 hex digits and a zero */

/* Reads n fp32 values as zero_read does. dst is NULL on ranks that do not hash. */
typedef int (*state_reader)(void *from, int32_t tensor, int32_t value, int64_t first, int64_t n, void *dst);

struct state_digest {
    uint8_t byte[32];
};

/* The number of pieces of a table. A tensor is one piece; a stacked tensor has one for each layer; a frozen
 * one has none, because nothing changes it. */
int64_t state_pieces(const struct zero_tensor *tensors, int32_t n_tensors);

/* The SHA-256 of each piece, in the table's order: of its master weights and then of each of n_states
 * states, element by element in row-major order, as little-endian fp32. If read is collective, every rank
 * calls, and those with hash set get the digests in out. Returns 0 or what read returned. */
int state_digests(struct state_digest *out, bool hash, const struct zero_tensor *tensors, int32_t n_tensors,
                  int n_states, state_reader read, void *from);

/* The SHA-256 of n digests, one after another, in hex digits. */
void state_hash_of(char out[STATE_HASH_CHARS], const struct state_digest *digests, int64_t n);

/* The hash of a whole table: state_digests and state_hash_of. */
int state_hash(char out[STATE_HASH_CHARS], bool hash, const struct zero_tensor *tensors, int32_t n_tensors,
               int n_states, state_reader read, void *from);

/* The SHA-256 of n characters. */
void state_hash_text(char out[STATE_HASH_CHARS], const char *text, size_t n);

/* The number of elements of a tensor. */
int64_t tensor_elements(const struct zero_tensor *t);

#endif
