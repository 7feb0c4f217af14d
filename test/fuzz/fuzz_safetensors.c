/* SPDX-License-Identifier: Apache-2.0 */
/* fuzz_safetensors.c: parses arbitrary bytes as a safetensors file. The entries of an accepted file must lie
 * end to end and fill the file. The header that the writer makes of them must parse to the same entries. */
#include "zero/checkpoint/safetensors.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static void demand(int ok)
{
    if (!ok)
        abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    struct zr_st st, again;
    if (n < 1)
        return 0;
    /* The first byte is the number of data bytes after the header, counted from the space: a space is 0, ( is
     * 8. */
    uint8_t n_data = (uint8_t)(data[0] - ' ');
    int64_t json = (int64_t)n - 1, file = 8 + json + n_data;
    if (zr_st_parse("fuzz", (const char *)data + 1, json, file, &st))
        return 0;
    int64_t end = 8 + json;
    for (int64_t i = 0; i < st.n_entries; i++) {
        demand(st.entries[i].begin == end && st.entries[i].end >= end);
        end = st.entries[i].end;
        int64_t bytes = zr_st_dtype_bytes(st.entries[i].dtype);
        for (int32_t d = 0; d < st.entries[i].n_dims; d++)
            bytes *= st.entries[i].shape[d];
        demand(bytes == st.entries[i].end - st.entries[i].begin);
    }
    demand(end == file);
    char *head;
    int64_t head_bytes;
    demand(!zr_st_head(st.entries, st.n_entries, NULL, &head, &head_bytes));
    demand(!zr_st_parse("again", head + 8, head_bytes - 8, head_bytes + n_data, &again));
    demand(again.n_entries == st.n_entries);
    free(head);
    zr_st_free(&again);
    zr_st_free(&st);
    return 0;
}
