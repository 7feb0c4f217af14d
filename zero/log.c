/* log.c: lines to cfg.log. */
#include "zero/context.h"

#include <stdio.h>

void zr_say(const struct zero_ctx *z, const char *fmt, ...)
{
    if (!z->config.options.log)
        return;
    char line[1024];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(line, sizeof line, fmt, ap);
    va_end(ap);
    z->config.options.log(z->config.options.log_arg, line);
}
