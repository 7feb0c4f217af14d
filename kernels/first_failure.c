/* SPDX-License-Identifier: Apache-2.0 */
/* first_failure.c: keeps the first failure, which several threads may try to set at once. */
#include "kernels/first_failure.h"

#include <sched.h>
#include <stdio.h>

bool zr_first_keep(struct zr_first *f, int code, const char *text)
{
    code = code ? code : ZERO_ERR_FAILED;
    if (atomic_exchange(&f->claimed, true)) {
        while (!zr_first_code(f)) /* another thread is writing its text */
            sched_yield();
        return false;
    }
    snprintf(f->text, sizeof f->text, "%s", text ? text : zr_err_name(code));
    atomic_store_explicit(&f->code, code, memory_order_release);
    return true;
}

int zr_first_report(const struct zr_first *f, char *text, size_t n_text)
{
    int code = zr_first_code(f);
    if (text && n_text)
        snprintf(text, n_text, "%s", code ? f->text : "");
    return code;
}
