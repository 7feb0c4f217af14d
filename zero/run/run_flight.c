/* SPDX-License-Identifier: Apache-2.0 */
/* run_flight.c: the last call of a rank. zero-run makes the memory of the rank's flight recorder, and passes
 * it to the rank as a descriptor. So it can read the memory however the rank ends. */
#include "comm/flight_view.h"
#include "zero/run/run_ranks.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int zr_run_flight_make(void)
{
    return zr_flight_make();
}

/* Returns a view of the recorder, which the caller frees. NULL: there is none, or no memory to read it. */
static struct zr_flight_view *look(int fd)
{
    struct zr_flight_view *v = fd < 0 ? NULL : malloc(sizeof *v);
    if (v && zr_flight_look(fd, v))
        return v;
    free(v);
    return NULL;
}

void zr_run_flight_last_call(int fd, char last[ZR_RUN_MESSAGE_BYTES])
{
    struct zr_flight_view *v = look(fd);
    last[0] = 0;
    if (v && v->state == ZR_FLIGHT_OPEN)
        zr_flight_last_words(v, last, ZR_RUN_MESSAGE_BYTES);
    free(v);
}

/* The rank may have written a file itself when something failed. That file does not say how the rank
 * ended. */
void zr_run_flight_write(int fd, const struct zr_run_end *end, char why[ZR_RUN_MESSAGE_BYTES])
{
    const char *folder = getenv("ZERO_FLIGHT_DIR");
    struct zr_flight_view *v = folder && *folder ? look(fd) : NULL;
    char path[ZR_FLIGHT_PATH];
    why[0] = 0;
    if (v && (end->signal || v->code || v->state == ZR_FLIGHT_OPEN)) {
        v->has_ended = 1;
        v->exit_code = end->code;
        v->signal = end->signal;
        v->asked = end->asked;
        v->copied_ns = (int64_t)end->at_ns;
        v->epoch_ns = end->epoch_ns;
        if (zr_flight_write_file(v, folder, path))
            snprintf(why, ZR_RUN_MESSAGE_BYTES, "the flight recorder of rank %d could not be written: %s",
                     end->rank, zr_error_text());
        else /* the rank may have been killed while it wrote its own */
            zr_flight_remove_part(v, path);
    }
    free(v);
}
