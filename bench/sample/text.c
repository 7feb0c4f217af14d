/* SPDX-License-Identifier: Apache-2.0 */
/* text.c: the one place where zero-bench sample turns text into tokens, and tokens into text. A token is a
 * byte. */
#include "bench/sample/sample.h"
#include "kernels/alloc.h"

#include <stdio.h>
#include <string.h>

int sample_encode(const char *text, int64_t V, int32_t **ids, int64_t *n)
{
    text = text ? text : "\n";
    *n = (int64_t)strlen(text);
    ZR_TRY(ZR_ALLOC(*ids, *n, "the tokens of --prompt"));
    for (int64_t i = 0; i < *n; i++) {
        (*ids)[i] = (unsigned char)text[i];
        if ((*ids)[i] >= V)
            return zr_fail(ZERO_ERR_ARG, "--prompt: byte %d is not below --vocab, which is %lld", (*ids)[i],
                           (long long)V);
    }
    return 0;
}

void sample_print(int32_t id)
{
    if (id > 255)
        printf("<%d>", id); /* it is no byte */
    else if ((id < ' ' && id != '\n' && id != '\t') || id == 127)
        printf("\\x%02x", (unsigned)id);
    else
        putchar(id);
}
