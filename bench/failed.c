/* SPDX-License-Identifier: Apache-2.0 */
/* failed.c: puts all messages into the thread's message of kernels/error.h. */
#include "bench/failed.h"
#include "kernels/device.h"
#include "zero/zero.h"

int failed(int code, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    zr_vfail(code, fmt, ap);
    va_end(ap);
    return code;
}

int reported(int err)
{
    return err ? zr_fail(err, "%s", zero_last_error()) : 0;
}

const char *failed_text(void)
{
    return zr_error_text();
}
