/* SPDX-License-Identifier: Apache-2.0 */
/* ends_by_assert.h: tests in a child process whether a call ends it by an assert (kernels/asserts.h). */
#ifndef ZR_TEST_ENDS_BY_ASSERT_H
#define ZR_TEST_ENDS_BY_ASSERT_H

#include <signal.h>
#include <stdbool.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

/* Returns whether fn(arg) ends by SIGABRT after a line that contains text. */
static inline bool ends_by_assert(void (*fn)(void *arg), void *arg, const char *text)
{
    int ends[2], status = 0;
    char said[4096] = "";
    size_t n = 0;
    if (pipe(ends))
        return false;
    pid_t child = fork();
    if (child == 0) {
        setrlimit(RLIMIT_CORE, &(struct rlimit){0, 0});
        signal(SIGABRT, SIG_DFL);
        dup2(ends[1], STDERR_FILENO);
        fn(arg);
        _exit(0);
    }
    close(ends[1]);
    for (ssize_t got = 1; got > 0 && n<sizeof said - 1; n += got> 0 ? (size_t)got : 0)
        got = read(ends[0], said + n, sizeof said - 1 - n);
    close(ends[0]);
    if (child < 0 || waitpid(child, &status, 0) != child)
        return false;
    return WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT && strstr(said, text);
}

#endif
