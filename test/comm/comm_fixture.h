/* SPDX-License-Identifier: Apache-2.0 */
/* comm_fixture.h: what one rank of a test works with: a loop, a rendezvous, a device, and communicators
 * with one stream each. */
#ifndef ZR_TEST_COMM_FIXTURE_H
#define ZR_TEST_COMM_FIXTURE_H

#include "comm/comm.h"
#include "test/comm/ranks.h"

enum { MAX_COMMS = 2 };

struct fixture {
    uv_loop_t loop;
    struct zr_rendezvous *rdv;
    struct zr_device *dev;
    /* the group that all communicators connect */
    struct zr_group group;
    int32_t members[MAX_RANKS];
    int n;
    struct zr_comm *comm[MAX_COMMS];
    struct zr_stream *stream[MAX_COMMS];
    char *base[MAX_COMMS];
};

/* The kind of communicator, and the device it runs on. */
struct fixture_kind {
    int (*open_device)(const struct zr_world *w, struct zr_device **out);
    /* opens n communicators into o->comm */
    int (*open_comms)(struct fixture *o, int n, int64_t timeout_ms);
    /* bytes of its arena that communicator i keeps for itself; NULL: none */
    int64_t (*reserve_bytes)(int world, int i);
    /* reduces in the fixed tree and leaves src alone */
    bool exact;
    /* all ranks must issue operations on the two communicators in one common order */
    bool same_order;
    /* only the second communicator reduces */
    bool one_reduces;
    /* Slices of any size are packed up to this length of the longest one. All ranks' rows then travel
     * whole. */
    int64_t gather_packs, reduce_packs;
};

extern const struct fixture_kind fixture_self, fixture_shm;

/* Splits a world into two groups: the first n_first ranks of deal, and the rest, each in that order. */
struct fixture_groups {
    int n_first;
    int32_t deal[MAX_RANKS];
};

/* Opens n communicators of that kind among all ranks. With arena_bytes 0 they have no arena yet. Returns 0
 * or the error. */
int fixture_open(struct fixture *o, const struct zr_world *w, const struct fixture_kind *kind, int n,
                 int64_t timeout_ms, int64_t arena_bytes);
/* Does the same among the ranks of this rank's group. If groups is NULL, the group is all ranks. */
int fixture_open_groups(struct fixture *o, const struct zr_world *w, const struct fixture_groups *groups,
                        const struct fixture_kind *kind, int n, int64_t timeout_ms, int64_t arena_bytes);
/* Closes what is open. Returns false if handles were left on the loop. */
bool fixture_close(struct fixture *o);

/* Makes an arena and attaches it to c only. */
int fixture_arena(struct zr_comm *c, int64_t bytes, char **base);
/* Opens two more communicators of the same kind for this rank's group. They use o's rendezvous and device,
 * so close them with fixture_close_more before o. */
int fixture_open_more(struct fixture *more, struct fixture *o, const struct zr_world *w,
                      const struct fixture_groups *groups, const struct fixture_kind *kind,
                      int64_t timeout_ms);
void fixture_close_more(struct fixture *more);

/* Copy the whole arena of communicator i from and to host memory. Both calls block. */
int fixture_store(struct fixture *o, int i, const char *from, int64_t bytes);
int fixture_fetch(struct fixture *o, int i, char *to, int64_t bytes);

/* Keeps the communicator's state for the test, as note_error keeps a call's result. */
void note_status(struct rank *me, struct zr_comm *c);

/* Waits until the communicator has failed; the wait is bounded. */
void wait_failed(struct zr_comm *c);

/* Thread function: aborts the given communicator after a short delay, and then again with another cause. */
void *abort_soon(void *comm);

#endif
