/* SPDX-License-Identifier: Apache-2.0 */
/* fuzz_meeting_file.c: parses arbitrary bytes as the file by which ranks meet. An accepted file must be
 * printed and parsed again with the same contents; only the notation of addresses may differ. */
#include "comm/meet/meeting_file.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    struct zr_meeting_file f, again;
    char text[ZR_MEETING_FILE_BYTES], back[ZR_MEETING_FILE_BYTES];
    memset(&f, 0x55, sizeof f);
    if (!zr_meeting_file_parse((const char *)data, n, &f))
        return 0;
    if (f.n < 1 || f.n > ZR_LOOKUP_MAX || f.attempt < 0 || f.world < 2)
        abort();
    zr_meeting_file_print(&f, text);
    if (!zr_meeting_file_parse(text, strlen(text), &again) || again.n != f.n || again.world != f.world)
        abort();
    for (int i = 0; i < f.n; i++)
        if (zr_address_port(&f.at[i]) < 1 || !zr_address_same(&f.at[i], &again.at[i]))
            abort();
    zr_meeting_file_print(&again, back);
    if (strcmp(text, back) != 0)
        abort();
    return 0;
}
