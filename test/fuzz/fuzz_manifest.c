/* SPDX-License-Identifier: Apache-2.0 */
/* fuzz_manifest.c: parses arbitrary bytes as a manifest. They are tried again with the right checksum, to get
 * past its check. An accepted manifest must be printed as the same bytes. */
#include "zero/checkpoint/manifest.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static void try(const char *text, int64_t n)
{
    struct zr_manifest m;
    char *again;
    int64_t n_again;
    if (zr_manifest_parse("fuzz", text, n, &m))
        return;
    if (zr_manifest_print(&m, &again, &n_again) || n_again != n || memcmp(again, text, (size_t)n) != 0)
        abort();
    free(again);
    zr_manifest_free(&m);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    char sum[ZR_SUM_CHARS];
    struct zr_checksum *sums;
    try((const char *)data, (int64_t)n);
    /* Try the input as a table of block checksums, too. */
    if (n > 16 &&
        !zr_blocks_parse("fuzz", data, (int64_t)n, (int64_t)(n - 16) / ZR_SUM_BYTES * ZR_BLOCK_BYTES, &sums))
        free(sums);
    /* Keep the part before a checksum, if there is one. */
    const char *mark = ",\"checksum\":\"";
    const uint8_t *at = memmem(data, n, mark, strlen(mark));
    size_t body = at ? (size_t)(at - data) : n;
    char *text = malloc(body + 64);
    if (!text)
        return 0;
    memcpy(text, data, body);
    struct zr_checksum s = zr_checksum_of(text, (int64_t)body);
    zr_checksum_print(&s, sum);
    int64_t whole = (int64_t)body + snprintf(text + body, 64, "%s%s\"}\n", mark, sum);
    try(text, whole);
    free(text);
    return 0;
}
