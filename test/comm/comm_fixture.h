/* SPDX-License-Identifier: Apache-2.0 */
/* fixture.h: what a rank of a test works with: a loop, the rendezvous, a device, and communicators on
 * streams.
 */
#ifndef ZR_TEST_COMM_FIXTURE_H
#define ZR_TEST_COMM_FIXTURE_H

#include "comm/comm.h"
#include "test/comm/ranks.h"

enum { MOST_COMMS = 2 };

struct fixture {
    uv_loop_t loop;
    struct zr_rendezvous *rdv;
    struct zr_device *dev;
    /* of the communicators */
    struct zr_group group;
    int32_t members[MOST_RANKS];
    int n;
    struct zr_comm *comm[MOST_COMMS];
    struct zr_stream *stream[MOST_COMMS];
    char *base[MOST_COMMS];
};

/* Which communicator, on which device. */
struct fixture_kind {
    int (*open_device)(const struct zr_world *w, struct zr_device **out);
    /* opens n communicators into o->comm */
    int (*open_comms)(struct fixture *o, int n, int64_t timeout_ms);
    /* what communicator i keeps of its arena for itself; NULL: nothing */
    int64_t (*reserve_bytes)(int world, int i);
    /* reduces in the fixed tree and leaves src alone */
    bool exact;
    /* all ranks must mix the communicators alike */
    bool same_order;
    /* only the second communicator reduces */
    bool one_reduces;
    /* Slices of any size are packed up to this longest one: all ranks' rows travel whole. */
    int64_t gather_packs, reduce_packs;
};

extern const struct fixture_kind fixture_self, fixture_shm;

/* A world dealt out to two groups: the first n_first of deal are one, the others another, in that order. */
struct fixture_groups {
    int n_first;
    int32_t deal[MOST_RANKS];
};

/* Opens n communicators of that kind among all ranks. arena_bytes 0: no arena yet. Returns 0 or the error. */
int fixture_open(struct fixture *o, const struct zr_world *w, const struct fixture_kind *kind, int n,
                 int64_t timeout_ms, int64_t arena_bytes);
/* The same among the ranks of this rank's group. groups NULL: among all. */
int fixture_open_groups(struct fixture *o, const struct zr_world *w, const struct fixture_groups *groups,
                        const struct fixture_kind *kind, int n, int64_t timeout_ms, int64_t arena_bytes);
/* Closes what is open; false when handles were left on the loop. */
bool fixture_close(struct fixture *o);

/* Makes an arena and attaches it to c alone. */
int fixture_arena(struct zr_comm *c, int64_t bytes, char **base);
/* Two more communicators of the same kind, of this rank's group, on the rendezvous and the device of o, whose
 * they are; closed by fixture_close_more. */
int fixture_open_more(struct fixture *more, struct fixture *o, const struct zr_world *w,
                      const struct fixture_groups *groups, const struct fixture_kind *kind,
                      int64_t timeout_ms);
void fixture_close_more(struct fixture *more);

/* The whole arena of communicator i, from and to the host's memory; blocking. */
int fixture_store(struct fixture *o, int i, const char *from, int64_t bytes);
int fixture_fetch(struct fixture *o, int i, char *to, int64_t bytes);

/* Keeps the communicator's state for the test, as note_error does a call's. */
void note_status(struct rank *me, struct zr_comm *c);

/* Waits (bounded) until the communicator has failed. */
void wait_failed(struct zr_comm *c);

/* For a thread: aborts the communicator that it is given, in a while, and then once more, for another cause.
 */
void *abort_soon(void *comm);

#endif
