/* SPDX-License-Identifier: Apache-2.0 */
/* run_terminal.c: a pseudo-terminal for a rank's standard output.
 *
 * C's stdio and other libraries hold back output to a pipe until some KiB are full, and a crash loses it. To
 * a terminal they write line by line. So a rank gets a terminal, which changes nothing and echoes nothing. It
 * is not the rank's controlling terminal, unless the rank opens it by name. */
#include "zero/run/run.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <termios.h>
#include <unistd.h>

/* Sets the width of our own terminal, if there is one, less the prefix of each line. */
static void set_width(int fd, int n_prefix)
{
    struct winsize size;
    if (ioctl(STDOUT_FILENO, TIOCGWINSZ, &size))
        return; /* the size stays 0 by 0, which means unknown */
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
    /* Open the other end through this one and not by its name, because a container may have no /dev/pts. */
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
