/* SPDX-License-Identifier: Apache-2.0 */
/* resident.h: how much physical memory this process uses. */
#ifndef ZERO_BENCH_RESIDENT_H
#define ZERO_BENCH_RESIDENT_H

#include <stdint.h>

/* Resident bytes. A page that n processes map counts as 1/n ("Pss" of /proc/self/smaps_rollup), because
 * ranks map each other's arenas; so the figures of all ranks add up to what the machine holds. A kernel
 * without that file gives VmRSS, which counts such pages in full. -1 if neither can be read. */
int64_t resident_bytes(void);

#endif
