/* SPDX-License-Identifier: Apache-2.0 */
/* run_terminal.c: a pseudo-terminal for a rank's standard output.
 *
 * C's stdio and others hold back what they write to a pipe until some KiB are full, and a program that
 * crashes takes it along; to a terminal they write line by line. So a rank gets a terminal, which changes
 * nothing of what passes and echoes nothing. It is no rank's controlling terminal, unless the rank opens it
 * by name. */
#include "zero/run/run.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <termios.h>
#include <unistd.h>

/* As wide as ours, where we have one, less what we put before each line. */
static void set_width(int fd, int n_prefix)
{
    struct winsize size;
    if (ioctl(STDOUT_FILENO, TIOCGWINSZ, &size))
        return; /* it says 0 by 0, which programs take for unknown */
    if (size.ws_col > n_prefix)
        size.ws_col = (unsigned short)(size.ws_col - n_prefix);
    ioctl(fd, TIOCSWINSZ, &size);
}

int zr_run_terminal(uv_file ends[2], int n_prefix)
{
    struct termios mode;
    int error = 0;
    ends[1] = -1;
    ends[0] = posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC | O_NONBLOCK);
    if (ends[0] < 0)
        return -errno;
    /* The other end by this one, not by its name: in a container there may be no /dev/pts. */
    if (unlockpt(ends[0]) || (ends[1] = ioctl(ends[0], TIOCGPTPEER, O_RDWR | O_NOCTTY | O_CLOEXEC)) < 0 ||
        tcgetattr(ends[1], &mode)) {
        error = errno;
    } else {
        cfmakeraw(&mode);
        error = tcsetattr(ends[1], TCSANOW, &mode) ? errno : 0;
    }
    if (!error) {
        set_width(ends[1], n_prefix);
        return 0;
    }
    if (ends[1] >= 0)
        close(ends[1]);
    close(ends[0]);
    return -error;
}
