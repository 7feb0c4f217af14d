/* SPDX-License-Identifier: Apache-2.0 */
/* standard_fds.c: opens descriptors 0 to 2 if the program has closed them. */
#include "kernels/standard_fds.h"
#include "kernels/error.h"
#include "kernels/limits.h"

#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

int zr_standard_fds_open(unsigned *opened)
{
    char why[ZR_SYSTEM_WORDS];
    *opened = 0;
    for (int fd = 0; fd <= STDERR_FILENO; fd++) {
        if (fcntl(fd, F_GETFD) >= 0)
            continue;
        int got = open("/dev/null", O_RDWR); /* the lowest free number; children inherit it */
        if (got < 0)
            return zr_fail(ZERO_ERR_SYSTEM,
                           "descriptor %d is closed, and /dev/null cannot be opened in its place: %s", fd,
                           zr_system_words(errno, why));
        if (got > STDERR_FILENO) /* another thread was faster */
            close(got);
        else
            *opened |= 1u << got;
    }
    return 0;
}

int zr_above_standard(int fd)
{
    if (fd < 0 || fd > STDERR_FILENO)
        return fd;
    int moved = fcntl(fd, F_DUPFD_CLOEXEC, STDERR_FILENO + 1), error = errno;
    close(fd);
    errno = error;
    return moved;
}
