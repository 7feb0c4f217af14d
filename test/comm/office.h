/* office.h: what a rank of a test works with: a loop, the rendezvous, a device, and communicators on streams.
 */
#ifndef ZR_TEST_COMM_OFFICE_H
#define ZR_TEST_COMM_OFFICE_H

#include "comm/comm.h"
#include "test/comm/ranks.h"

enum { MOST_COMMS = 2 };

struct office {
    uv_loop_t loop;
    struct zr_rendezvous *rdv;
    struct zr_device *dev;
    int n;
    struct zr_comm *comm[MOST_COMMS];
    struct zr_stream *stream[MOST_COMMS];
    char *base[MOST_COMMS];
};

/* Opens n communicators; self instead of shm when asked. arena_bytes 0: no arena yet. Returns 0 or the error.
 */
int office_open(struct office *o, const struct zr_world *w, bool self, int n, int64_t timeout_ms,
                int64_t arena_bytes);
/* Closes what is open; false when handles were left on the loop. */
bool office_close(struct office *o);

#endif
