/* SPDX-License-Identifier: Apache-2.0 */
/* errors.c: the public calls for error texts and the version. */
#include "kernels/error.h"
#include "zero/zero.h"

const char *zero_strerror(int code)
{
    return code ? zr_err_name(code) : "success";
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
