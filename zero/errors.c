/* errors.c: the public face of the last failure, and the proof that public and internal numbers are the same.
 */
#include "kernels/device.h"
#include "kernels/error.h"
#include "zero/zero.h"

/* Both ways, so that neither list can grow alone. */
#define SAME(name, value, text)                                                                              \
    _Static_assert((int)ZERO_ERR_##name == (int)ZR_ERR_##name && (int)ZERO_ERR_##name == (value),            \
                   "ZERO_ERR_" #name " differs from ZR_ERR_" #name);
ZERO_ERR_MAP(SAME)
ZR_ERR_MAP(SAME)
#undef SAME

#define SAME(name) _Static_assert((int)ZERO_##name == (int)ZR_##name, "ZERO_" #name " differs from ZR_" #name)
SAME(F32);
SAME(BF16);
SAME(F16);
SAME(ADAMW);
SAME(ADAM);
SAME(SGD);
SAME(RMSPROP);
#undef SAME

const char *zero_strerror(int code)
{
    switch (code) {
    case 0:
        return "success";
#define TEXT(name, value, text)                                                                              \
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
