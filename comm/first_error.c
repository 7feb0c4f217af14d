/* SPDX-License-Identifier: Apache-2.0 */
/* first_error.c: applies the rule of first_error.h to the results that ranks have exchanged. */
#include "comm/first_error.h"

#include <stdbool.h>
#include <stdio.h>
#include <string.h>

int zr_first_error_write(int32_t *to_err, char *to_text, size_t text_bytes, int err)
{
    *to_err = err;
    memset(to_text, 0, text_bytes);
    if (err)
        snprintf(to_text, text_bytes, "%s", zr_error_text());
    return err;
}

/* A rank that timed out, or lost another, is affected by the failure of others. */
static bool is_consequence(int code)
{
    return code == ZERO_ERR_TIMEOUT || code == ZERO_ERR_PEER;
}

bool zr_first_error_rather(int so_far, int of_next)
{
    return of_next && (!so_far || (is_consequence(so_far) && !is_consequence(of_next)));
}

int zr_first_error_code(int code)
{
    switch (code) {
    case 0:
#define X(name, value, text, help) case ZERO_ERR_##name:
        ZERO_ERR_MAP(X)
#undef X
        return code;
    default:
        return ZERO_ERR_FAILED;
    }
}

int zr_first_error_find(const int32_t *err, const char *text, size_t text_bytes, size_t stride, int n, int me)
{
    int code = 0, who = 0;
    for (int r = 0; r < n; r++) {
        int of_r = zr_first_error_code(*(const int32_t *)((const char *)err + (size_t)r * stride));
        if (zr_first_error_rather(code, of_r))
            code = of_r, who = r;
    }
    if (!code)
        return 0;
    const char *said = text + (size_t)who * stride;
    return who == me ? zr_fail(code, "%.*s", (int)text_bytes - 1, said)
                     : zr_fail(code, "rank %d: %.*s", who, (int)text_bytes - 1, said);
}

int zr_first_error_alone(int met, int err, const char *text, size_t text_bytes)
{
    return err ? zr_fail(err, "%.*s", (int)text_bytes - 1, text) : met;
}
