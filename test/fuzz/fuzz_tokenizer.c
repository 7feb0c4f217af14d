/* SPDX-License-Identifier: Apache-2.0 */
/* fuzz_tokenizer.c: parses arbitrary bytes as a tokenizer.json, and encodes with it the text behind the first
 * form feed. Ids must have tokens, and each id has bytes. */
#include "bench/tokenizer/tokenizer.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static void demand(int ok)
{
    if (!ok)
        abort();
}

static uint8_t sum;

static void read_bytes(const struct tokenizer *t, int64_t id)
{
    size_t n;
    const char *bytes = tokenizer_bytes(t, id, &n);
    for (size_t i = 0; i < n; i++)
        sum ^= (uint8_t)bytes[i];
}

static int take(void *to, const int32_t *ids, int64_t n)
{
    struct tokenizer *t = to;
    for (int64_t i = 0; i < n; i++) {
        demand(ids[i] >= 0 && ids[i] < tokenizer_n_ids(t));
        read_bytes(t, ids[i]);
    }
    return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    struct tokenizer *t;
    const uint8_t *end = n ? memchr(data, '\f', n) : NULL;
    size_t n_json = end ? (size_t)(end - data) : n, n_text = end ? n - n_json - 1 : 0;
    if (tokenizer_parse(&t, "fuzz", (const char *)data, n_json))
        return 0;
    int64_t n_ids = tokenizer_n_ids(t);
    for (int64_t id = -1; id <= n_ids && id < 5000; id++)
        read_bytes(t, id);
    tokenizer_is_special(t, n_ids);
    tokenizer_added_id(t, "<s>");
    /* An expression may take exponential time, up to a limit for each match. */
    tokenizer_encode(t, end ? (const char *)end + 1 : "", n_text < 64 ? n_text : 64, true, take, t);
    tokenizer_close(t);
    return 0;
}
