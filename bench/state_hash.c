/* state_hash.c: see state_hash.h. */
#include "bench/state_hash.h"

#include "kernels/device.h"

#include <nettle/sha2.h>
#include <stdio.h>
#include <stdlib.h>

#define CHUNK (256 * 1024) /* elements read at a time */

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

int state_hash(char out[STATE_HASH_CHARS], bool hash, const struct zero_tensor *tensors, int32_t n_tensors,
               int n_states, state_reader read, void *from)
{
    struct sha256_ctx sha;
    sha256_init(&sha);
    float *chunk = hash ? malloc(CHUNK * sizeof *chunk) : NULL;
    if (hash && !chunk)
        return zr_fail(ZR_ERR_NOMEM, "no memory to read the state into");
    int err = 0;
    for (int32_t t = 0; t < n_tensors; t++) {
        int64_t n_elements = tensor_elements(&tensors[t]);
        for (int value = ZERO_VALUE_MASTER; value < ZERO_VALUE_STATE + n_states; value++) {
            for (int64_t first = 0; !err && first < n_elements; first += CHUNK) {
                int64_t n = n_elements - first < CHUNK ? n_elements - first : CHUNK;
                err = read(from, t, value, first, n, chunk);
                if (!err && hash)
                    sha256_update(&sha, (size_t)n * sizeof *chunk, (const uint8_t *)chunk);
            }
        }
    }
    free(chunk);
    finish(&sha, out);
    return err;
}
