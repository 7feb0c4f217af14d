/* SPDX-License-Identifier: Apache-2.0 */
/* net_lookup.h: the addresses of a name.
 *
 * The system's resolver may take half a minute and more, and cannot be stopped. So it runs on a thread of its
 * own, which is left to itself where nobody wants to know any more. */
#ifndef ZR_COMM_NET_LOOKUP_H
#define ZR_COMM_NET_LOOKUP_H

#include "comm/meet/net_address.h"

#include <uv.h>

enum { ZR_LOOKUP_MOST = 8 };

/* What became of it. */
struct zr_looked_up {
    /* addresses of both families, in the resolver's order */
    int n;
    union zr_address at[ZR_LOOKUP_MOST];
    /* "": there are some; else why there are none */
    char why[160];
};

struct zr_lookup;

/* done is called once, on the loop's thread, when nothing of it is left on the loop; *out is gone then.
 * Returns ZR_ERR_NOMEM or ZR_ERR_SYSTEM where it could not begin: then done is not called. */
int zr_lookup_start(uv_loop_t *loop, const char *host, int port,
                    void (*done)(void *arg, const struct zr_looked_up *found), void *arg,
                    struct zr_lookup **out);

/* On the loop's thread: nobody waits for the resolver any more; done comes in the next round of the loop. */
void zr_lookup_leave(struct zr_lookup *l);

#endif
