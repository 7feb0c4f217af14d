/* SPDX-License-Identifier: Apache-2.0 */
/* threads.h: divides work on the host among the threads of a struct compute.
 *
 *     IN_PARTS(on)
 *     {
 *         int64_t from = part_at(on, n, part), to = part_at(on, n, part + 1);
 *         ...
 *     }
 *
 * With gcc's OpenMP, these are the threads that oneDNN multiplies with, so no more threads run than
 * requested. Other builds do one part after another. */
#ifndef ZERO_BENCH_PARTS_H
#define ZERO_BENCH_PARTS_H

#include "bench/compute.h"

/* Runs the block once on each thread, with its number as `part`, and waits for all. */
#define IN_PARTS(on)                                                                                         \
    _Pragma("omp parallel for schedule(static) num_threads((on)->n_threads)") for (int part = 0;             \
                                                                                   part < (on)->n_threads;   \
                                                                                   part++)

/* Returns the index at which a part of n begins. The part ends where the next one begins. */
static inline int64_t part_at(const struct compute *on, int64_t n, int part)
{
    return n * part / on->n_threads;
}

#endif
