/* SPDX-License-Identifier: Apache-2.0 */
/* error.c: stores the message of each thread's last failure. */
#include "kernels/error.h"

#include <stdio.h>
#include <string.h>

static _Thread_local char message[ZR_ERROR_BYTES];

int zr_vfail(int code, const char *fmt, va_list ap)
{
    /* The message is first written to a buffer, because an argument may be the old message. */
    char text[ZR_ERROR_BYTES];
    vsnprintf(text, sizeof text, fmt, ap);
    memcpy(message, text, sizeof message);
    return code;
}

int zr_fail(int code, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    zr_vfail(code, fmt, ap);
    va_end(ap);
    return code;
}

int zr_fail_more(int code, const char *fmt, ...)
{
    char prefix[ZR_ERROR_BYTES / 2];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(prefix, sizeof prefix, fmt, ap);
    va_end(ap);
    return zr_fail(code, "%s: %s", prefix, message);
}

const char *zr_error_text(void)
{
    return message;
}

int zr_error_save(struct zr_saved_error *k, int code)
{
    k->code = code;
    memcpy(k->text, message, sizeof k->text);
    return code;
}

int zr_error_restore(const struct zr_saved_error *k)
{
    memcpy(message, k->text, sizeof message);
    return k->code;
}

const char *zr_err_name(int code)
{
    switch (code) {
    case 0:
        return "success";
#define X(name, value, text, help)                                                                           \
    case value:                                                                                              \
        return text;
        ZERO_ERR_MAP(X)
#undef X
    }
    return "unknown error";
}
