/* SPDX-License-Identifier: Apache-2.0 */
/* errors.c: the public error calls, and compile-time checks that public and internal numbers are equal. */
#include "kernels/device.h"
#include "kernels/error.h"
#include "zero/zero.h"

/* Checks in both directions, so that neither list can grow alone. */
#define SAME(name, value, ...)                                                                               \
    _Static_assert((int)ZERO_ERR_##name == (int)ZR_ERR_##name && (int)ZERO_ERR_##name == (value),            \
                   "ZERO_ERR_" #name " differs from ZR_ERR_" #name);
ZERO_ERR_MAP(SAME)
ZR_ERR_MAP(SAME)
#undef SAME

#define SAME(name) _Static_assert((int)ZERO_##name == (int)ZR_##name, "ZERO_" #name " differs from ZR_" #name)
SAME(F32);
SAME(BF16);
SAME(F16);
#undef SAME

/* The same for numbers and names of the optimizers. */
#define PUBLIC(name, value, key, text) PUBLIC_##name##_##key = value,
enum { ZERO_OPTIMIZER_MAP(PUBLIC) PUBLIC_END };
#undef PUBLIC
#define INTERNAL(name, key, value) INTERNAL_##name##_##key = value,
enum { ZR_OPTIMIZER_MAP(INTERNAL) INTERNAL_END };
#undef INTERNAL
#define SAME(name, key)                                                                                      \
    _Static_assert((int)PUBLIC_##name##_##key == (int)INTERNAL_##name##_##key,                               \
                   "ZERO_" #name " differs from ZR_" #name);
#define PUBLIC(name, value, key, text) SAME(name, key)
#define INTERNAL(name, key, value)     SAME(name, key)
ZERO_OPTIMIZER_MAP(PUBLIC)
ZR_OPTIMIZER_MAP(INTERNAL)
#undef PUBLIC
#undef INTERNAL
#undef SAME

const char *zero_strerror(int code)
{
    switch (code) {
    case 0:
        return "success";
#define TEXT(name, value, text, help)                                                                        \
    case value:                                                                                              \
        return text;
        ZERO_ERR_MAP(TEXT)
#undef TEXT
    }
    return "unknown error";
}

const char *zero_last_error(void)
{
    return zr_error_text();
}

#define DIGITS_(n) #n
#define DIGITS(n)  DIGITS_(n)

const char *zero_version(void)
{
    return DIGITS(ZERO_VERSION_MAJOR) "." DIGITS(ZERO_VERSION_MINOR) "." DIGITS(ZERO_VERSION_PATCH);
}
