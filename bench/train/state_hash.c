/* SPDX-License-Identifier: Apache-2.0 */
/* state_hash.c: SHA-256 of optimizer state, tensor by tensor. */
#include "bench/train/state_hash.h"

#include "kernels/alloc.h"
#include "kernels/device.h"

#include <nettle/sha2.h>
#include <stdio.h>
#include <stdlib.h>

#define BUFFER_ELEMS (256 * 1024) /* elements read at a time */

int64_t tensor_elements(const struct zero_tensor *t)
{
    int64_t n = 1;
    for (int i = 0; i < 8 && t->shape[i]; i++)
        n *= t->shape[i];
    return n;
}

static void finish(struct sha256_ctx *sha, char out[STATE_HASH_CHARS])
{
    uint8_t digest[SHA256_DIGEST_SIZE];
    sha256_digest(sha, sizeof digest, digest);
    for (size_t i = 0; i < sizeof digest; i++)
        snprintf(out + 2 * i, 3, "%02x", digest[i]);
}

void state_hash_text(char out[STATE_HASH_CHARS], const char *text, size_t n)
{
    struct sha256_ctx sha;
    sha256_init(&sha);
    sha256_update(&sha, n, (const uint8_t *)text);
    finish(&sha, out);
}

/* Layers of a stacked tensor; 1 for any other. */
static int64_t n_layers(const struct zero_tensor *t)
{
    return t->flags & ZERO_STACKED ? t->shape[0] : 1;
}

static int64_t n_pieces(const struct zero_tensor *t)
{
    return t->grad ? n_layers(t) : 0;
}

int64_t state_pieces(const struct zero_tensor *tensors, int32_t n_tensors)
{
    int64_t n = 0;
    for (int32_t t = 0; t < n_tensors; t++)
        n += n_pieces(&tensors[t]);
    return n;
}

/* Hashes a piece (state_pieces): all values of n elements of tensor t. If buffer is NULL, this rank only
 * takes part in reading. */
static int digest_piece(struct state_digest *out, float *buffer, int32_t t, int64_t first, int64_t n,
                        int n_values, state_reader read, void *from)
{
    struct sha256_ctx sha;
    sha256_init(&sha);
    for (int value = ZERO_VALUE_MASTER; value < ZERO_VALUE_MASTER + n_values; value++) {
        for (int64_t at = 0; at < n; at += BUFFER_ELEMS) {
            int64_t k = n - at < BUFFER_ELEMS ? n - at : BUFFER_ELEMS;
            int err = read(from, t, value, first + at, k, buffer);
            if (err)
                return err;
            if (buffer)
                sha256_update(&sha, (size_t)k * sizeof *buffer, (const uint8_t *)buffer);
        }
    }
    if (buffer)
        sha256_digest(&sha, sizeof out->byte, out->byte);
    return 0;
}

int state_digests(struct state_digest *out, bool hash, const struct zero_tensor *tensors, int32_t n_tensors,
                  int n_states, state_reader read, void *from)
{
    int n_values = ZERO_VALUE_STATE + n_states - ZERO_VALUE_MASTER, err = 0;
    float *buffer = NULL;
    if (hash)
        ZR_TRY(ZR_ALLOC(buffer, BUFFER_ELEMS, "a part of the state"));
    for (int32_t t = 0; t < n_tensors; t++) {
        int64_t n = tensor_elements(&tensors[t]) / n_layers(&tensors[t]);
        for (int64_t i = 0; i < n_pieces(&tensors[t]) && !err; i++)
            err = digest_piece(out++, buffer, t, i * n, n, n_values, read, from);
    }
    free(buffer);
    return err;
}

void state_hash_of(char out[STATE_HASH_CHARS], const struct state_digest *digests, int64_t n)
{
    state_hash_text(out, (const char *)digests, (size_t)n * sizeof *digests);
}

int state_hash(char out[STATE_HASH_CHARS], bool hash, const struct zero_tensor *tensors, int32_t n_tensors,
               int n_states, state_reader read, void *from)
{
    int64_t n = state_pieces(tensors, n_tensors);
    struct state_digest *digests;
    ZR_TRY(ZR_ALLOC(digests, n, "%lld digests", (long long)n));
    int err = state_digests(digests, hash, tensors, n_tensors, n_states, read, from);
    if (!err && hash)
        state_hash_of(out, digests, n);
    free(digests);
    return err;
}
