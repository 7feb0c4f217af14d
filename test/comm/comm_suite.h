/* SPDX-License-Identifier: Apache-2.0 */
/* comm_suite.h: what every communicator must do, as functions of a rank (see ranks.h); arg is a struct
 * comm_plan.
 *
 * Every rank draws the same operations from one seed and knows what every other rank puts in, so each checks
 * its whole arena after each operation: what should be there, bit for bit, and poison everywhere else. Sums
 * are compared with a plain fp32 tree for the bits, where the communicator promises them, and with fp64 for
 * the error. */
#ifndef ZR_TEST_COMM_COMM_SUITE_H
#define ZR_TEST_COMM_COMM_SUITE_H

#include "test/comm/comm_fixture.h"

struct comm_plan {
    const struct fixture_kind *kind;
    uint64_t seed;
    int n_ops;
    /* NULL: one group of all ranks, in their order */
    const struct fixture_groups *groups;
};

/* A world dealt out by the seed: groups of any size, in any order. */
void comm_suite_deal(struct fixture_groups *g, uint64_t seed, int world);

/* n_ops operations one after the other, on two communicators in turn. */
void comm_suite_conform(struct rank *me);
/* One arena attached to two communicators, of all ranks and of this rank's group: each moves its own bytes.
 */
void comm_suite_shared(struct rank *me);
/* Many operations at once on two communicators and two streams, with delays. */
void comm_suite_mixed(struct rank *me);

#endif
