/* SPDX-License-Identifier: Apache-2.0 */
/* resident.h: how much physical memory this process holds. */
#ifndef ZERO_BENCH_RESIDENT_H
#define ZERO_BENCH_RESIDENT_H

#include <stdint.h>

/* Bytes resident now, counting a page that n processes map as 1/n of a page ("Pss" of
 * /proc/self/smaps_rollup): ranks that read each other's arena would otherwise count it once each, and the
 * figures of all ranks add up to what the machine holds. Where the kernel has no such file, VmRSS, which
 * counts such pages in full. -1 if neither can be read. */
int64_t resident_bytes(void);

#endif
