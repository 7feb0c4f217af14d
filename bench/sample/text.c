/* SPDX-License-Identifier: Apache-2.0 */
/* text.c: what zero-bench sample makes of text, tokens, and of tokens text: by a tokenizer, or a token for
 * each byte. */
#include "bench/sample/sample.h"
#include "kernels/error.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int encode(const struct tokenizer *t, const char *text, struct token_ids *ids)
{
    if (t)
        return tokenizer_encode(t, text, strlen(text), /* whole_text */ true, token_ids_take, ids);
    for (; *text; text++)
        ZR_TRY(token_ids_take(ids, &(int32_t){(unsigned char)*text}, 1));
    return 0;
}

int sample_encode(const struct tokenizer *t, const char *text, int64_t V, int32_t **ids, int64_t *n)
{
    struct token_ids list = {0};
    int err = encode(t, text ? text : "", &list);
    if (!err && !text && !list.n)
        err = encode(t, "\n", &list);
    for (int64_t i = 0; !err && i < list.n; i++)
        if (list.ids[i] >= V)
            err = zr_fail(ZERO_ERR_ARG, "--prompt: the model has no id %d, only those below %lld",
                          list.ids[i], (long long)V);
    *ids = list.ids;
    *n = list.n;
    return err;
}

static void print_byte(unsigned char byte)
{
    if ((byte < ' ' && byte != '\n' && byte != '\t') || byte == 127)
        printf("\\x%02x", (unsigned)byte);
    else
        putchar(byte);
}

void sample_print(const struct tokenizer *t, int32_t id)
{
    size_t n = 0;
    const char *bytes = t && !tokenizer_is_special(t, id) ? tokenizer_bytes(t, id, &n) : NULL;
    for (size_t i = 0; i < n; i++)
        print_byte((unsigned char)bytes[i]);
    if (!t && id > 255)
        printf("<%d>", id); /* it is no byte */
    else if (!t)
        print_byte((unsigned char)id);
}

bool sample_ends(const struct tokenizer *t, int32_t id)
{
    return t && tokenizer_is_special(t, id);
}
