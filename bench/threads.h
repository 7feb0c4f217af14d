/* SPDX-License-Identifier: Apache-2.0 */
/* threads.h: work on the host divided among the place's threads.
 *
 *     IN_PARTS(on)
 *     {
 *         int64_t from = part_at(on, n, part), to = part_at(on, n, part + 1);
 *         ...
 *     }
 *
 * By gcc's OpenMP, whose threads are those that oneDNN multiplies with, so that there are no more of them
 * than were asked for; in other builds the parts come one after another. */
#ifndef ZERO_BENCH_PARTS_H
#define ZERO_BENCH_PARTS_H

#include "bench/place.h"

/* Once for each of the threads, `part` being its number; over when all are. */
#define IN_PARTS(on)                                                                                         \
    _Pragma("omp parallel for schedule(static) num_threads((on)->n_threads)") for (int part = 0;             \
                                                                                   part < (on)->n_threads;   \
                                                                                   part++)

/* Where a part of n begins; it ends where the next one begins. */
static inline int64_t part_at(const struct place *on, int64_t n, int part)
{
    return n * part / on->n_threads;
}

#endif
