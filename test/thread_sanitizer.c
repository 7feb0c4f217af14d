/* SPDX-License-Identifier: Apache-2.0 */
/* thread_sanitizer.c: helps ThreadSanitizer with libraries that were not built with it. Linked only into
 * the tests of that build.
 *
 * libuv closes descriptors by syscall(SYS_close), which ThreadSanitizer does not see. If another thread
 * then gets the same number, ThreadSanitizer takes both for one descriptor and reports a race. This
 * syscall() is found before libc's. */
#include <dlfcn.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <sys/syscall.h>
#include <unistd.h>

typedef long (*syscall_fn)(long number, long, long, long, long, long, long);

long syscall(long number, ...)
{
    static _Atomic(syscall_fn) next;
    long a[6];
    va_list ap;
    va_start(ap, number);
    for (int i = 0; i < 6; i++)
        a[i] = va_arg(ap, long);
    va_end(ap);
    if (number == SYS_close)
        return close((int)a[0]);
    syscall_fn fn = atomic_load(&next);
    if (!fn) {
        fn = (syscall_fn)dlsym(RTLD_NEXT, "syscall");
        atomic_store(&next, fn);
    }
    return fn(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}

/* NVTX fills its table of functions at the first call of any thread, while others may read it. Both the
 * old and the new entry may be called. */
const char *__tsan_default_suppressions(void);
const char *__tsan_default_suppressions(void)
{
    return "race_top:nvtxSetInitFunctionsToNoops_v3\n";
}
