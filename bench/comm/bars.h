/* SPDX-License-Identifier: Apache-2.0 */
/* bars.h: what zero-bench comm --bars asks of its rows. */
#ifndef ZERO_BENCH_COMM_BARS_H
#define ZERO_BENCH_COMM_BARS_H

#include "bench/comm/rounds.h"

/* How many times as fast a row is as another one, round by round: what else the machine does hits both. */
struct comm_bar {
    const struct comm_row *row, *than;
    /* over the rounds: the median, and between which two half of them lie */
    double median, low, high;
    /* NAN: nothing is asked, it is only told */
    double asked;
    bool met;
};

/* All of the size that was measured last: shared memory against the machine's limits, and MPI's communicators
 * against MPI's own collectives, of which the fastest counts. Into bar[COMM_MOST_ROWS]: how many, or a
 * zr_err. */
int comm_bars(const struct comm_rounds *b, struct comm_bar *bar);
void comm_bar_report(const struct comm_bar *bar, bool json);

#endif
