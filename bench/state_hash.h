/* state_hash.h: one SHA-256 for all that training has made of the optimizer's state. */
#ifndef ZERO_BENCH_STATE_HASH_H
#define ZERO_BENCH_STATE_HASH_H

#include "zero/zero.h"

#include <stdbool.h>

#define STATE_HASH_CHARS 65 /* 64 hex digits and the end */

/* Reads n fp32 values as zero_read does; dst is NULL on ranks that do not hash. */
typedef int (*state_reader)(void *from, int32_t tensor, int32_t value, int64_t first, int64_t n, void *dst);

/* Hashes, tensor after tensor in the table's order, the master weights and then each of n_states states,
 * element by element in row-major order, as little-endian fp32. Collective when read is: every rank calls,
 * those with hash set get the hex digits in out. Returns 0 or what read returned. */
int state_hash(char out[STATE_HASH_CHARS], bool hash, const struct zero_tensor *tensors, int32_t n_tensors,
               int n_states, state_reader read, void *from);

/* Of n characters. */
void state_hash_text(char out[STATE_HASH_CHARS], const char *text, size_t n);

/* Elements of a tensor. */
int64_t tensor_elements(const struct zero_tensor *t);

#endif
