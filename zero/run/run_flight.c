/* run_flight.c: what a rank did last. The memory of its flight recorder is made here and given along as a
 * descriptor, so it is there whatever became of the rank. */
#include "comm/flight_view.h"
#include "zero/run/run.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int zr_run_flight_make(void)
{
    return zr_flight_make();
}

/* What a rank writes itself when something fails has no word of its end. */
static void write_file(const char *folder, const struct zr_flight_view *v, char *why, size_t n_why)
{
    char path[ZR_FLIGHT_PATH];
    if (zr_flight_write_file(v, folder, path))
        snprintf(why, n_why, "what rank %d did last could not be written: %s", v->rank, zr_error_text());
}

void zr_run_flight_end(int fd, int code, int signum, char last[ZR_RUN_LAST_CHARS],
                       char why[ZR_RUN_LAST_CHARS])
{
    const char *folder = getenv("ZERO_FLIGHT_DIR");
    struct zr_flight_view *v = fd < 0 ? NULL : malloc(sizeof *v);
    last[0] = why[0] = 0;
    bool known = v && zr_flight_look(fd, v);
    if (known && v->state == ZR_FLIGHT_OPEN)
        zr_flight_last_words(v, last, ZR_RUN_LAST_CHARS);
    if (known) {
        v->has_ended = 1;
        v->exit_code = code;
        v->signal = signum;
    }
    if (known && folder && *folder && (signum || v->code || v->state == ZR_FLIGHT_OPEN))
        write_file(folder, v, why, ZR_RUN_LAST_CHARS);
    free(v);
}
