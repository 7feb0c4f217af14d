/* SPDX-License-Identifier: Apache-2.0 */
/* comm_suite.h: the checks that every communicator must pass, written as rank functions (ranks.h). Their
 * arg is a struct comm_plan.
 *
 * Every rank draws the same operations from one seed and knows every rank's input. It therefore checks its
 * whole arena after each operation: the expected bits where data belongs, and poison everywhere else. Sums
 * must have the bits of a plain fp32 tree where the communicator promises them; their error is checked
 * against fp64. */
#ifndef ZR_TEST_COMM_COMM_SUITE_H
#define ZR_TEST_COMM_COMM_SUITE_H

#include "test/comm/comm_fixture.h"

struct comm_plan {
    const struct fixture_kind *kind;
    uint64_t seed;
    int n_ops;
    /* NULL: one group of all ranks, in rank order */
    const struct fixture_groups *groups;
};

/* Splits a world by the seed into groups of any size, in any order. */
void comm_suite_deal(struct fixture_groups *g, uint64_t seed, int world);

/* Runs n_ops operations, one after the other, on two communicators in turn. */
void comm_suite_conform(struct rank *me);
/* Runs n_ops operations that move the arrays of the program, on communicators that have them. */
void comm_suite_arrays(struct rank *me);
/* Attaches one arena to two communicators, one of all ranks and one of this rank's group. Each must move
 * its own bytes only. */
void comm_suite_shared(struct rank *me);
/* Runs many operations at once on two communicators and two streams, with delays. */
void comm_suite_mixed(struct rank *me);

#endif
