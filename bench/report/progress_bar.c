/* SPDX-License-Identifier: Apache-2.0 */
/* progress_bar.c: a line on a terminal that is overwritten. */
#include "bench/report/progress_bar.h"
#include "kernels/device.h"

#include <stdarg.h>
#include <string.h>
#include <sys/ioctl.h>
#include <termios.h>
#include <unistd.h>

#define INTERVAL_NS 100000000
enum { BAR = 12, WIDEST = 256, USUAL_WIDTH = 80 };

/* A terminal without OPOST belongs to zero-run, which puts the rank's number before each line, so ranks
 * print lines. On a person's terminal OPOST is set. */
struct progress progress_on(FILE *file)
{
    struct termios mode;
    bool shows = !tcgetattr(fileno(file), &mode) && (mode.c_oflag & OPOST);
    return (struct progress){.file = shows ? file : NULL};
}

/* The terminal's width, less one column, because some terminals then move the cursor to the next line. */
static int width_of(FILE *file)
{
    struct winsize size;
    int columns = ioctl(fileno(file), TIOCGWINSZ, &size) ? 0 : size.ws_col;
    columns = columns ? columns - 1 : USUAL_WIDTH - 1;
    return columns < WIDEST ? columns : WIDEST - 1;
}

void progress_show(struct progress *p, double share, const char *fmt, ...)
{
    int64_t now = zr_now_ns();
    if (!p->file || (p->shown && now - p->last_ns < INTERVAL_NS))
        return;
    double at = share > 0 ? share < 1 ? share : 1 : 0; /* a share that is not a number is 0 */
    int full = (int)(at * BAR);
    char bar[BAR + 1] = {0}, text[WIDEST];
    memset(bar, '.', BAR);
    memset(bar, '#', (size_t)full);
    int n = snprintf(text, sizeof text, "[%s] %3.0f%%  ", bar, 100 * at);
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text + n, sizeof text - (size_t)n, fmt, ap);
    va_end(ap);
    text[width_of(p->file)] = 0;
    fprintf(p->file, "\r%s\033[K", text);
    fflush(p->file);
    p->shown = true;
    p->last_ns = now;
}

void progress_clear(struct progress *p)
{
    if (p->shown) {
        fputs("\r\033[K", p->file);
        fflush(p->file);
    }
    p->shown = false;
}
