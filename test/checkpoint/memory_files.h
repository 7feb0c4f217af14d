/* SPDX-License-Identifier: Apache-2.0 */
/* memory_files.h: a file system in memory that forgets what was not synced, and fails when it is told to.
 *
 * Of a file, what was written since its last fsync may be lost, each write by itself and in part; of a
 * folder, each name made, renamed or removed since its fsync. That is all that POSIX promises. Thread-safe.
 */
#ifndef ZR_TEST_MEMORY_FILES_H
#define ZR_TEST_MEMORY_FILES_H

#include "zero/checkpoint/files.h"

struct memory_files;

struct memory_files *memory_files_open(void);
void memory_files_close(struct memory_files *m);
const struct zr_files *memory_files_table(struct memory_files *m);
/* As it would be found after losing power now, with a subset drawn from seed of what was not synced. */
struct memory_files *memory_files_crash(struct memory_files *m, uint64_t seed);

enum memory_fault {
    FAULT_NONE,
    FAULT_EIO,
    FAULT_ENOSPC,
    FAULT_EINTR, /* nothing was done; asked again, it is */
    FAULT_SHORT, /* transfers of more than a byte move one; other calls work */
    FAULT_DEAD   /* this call and all after it fail: the machine is off */
};
enum memory_direct { DIRECT_WORKS, DIRECT_NOT_OPENED, DIRECT_NOT_MOVED };
/* What O_DIRECT gets: transfers that must be aligned, which is checked; or -EINVAL, at once or at each
 * transfer. */
void memory_files_direct(struct memory_files *m, enum memory_direct direct);
/* Transfers past the page cache that were done. */
int64_t memory_files_n_direct(const struct memory_files *m);

/* Call `at` from now (1: the next) meets the fault; always: all from then on. */
void memory_files_fault(struct memory_files *m, enum memory_fault fault, int64_t at, bool always);
/* Calls since the last memory_files_fault. */
int64_t memory_files_calls(const struct memory_files *m);
/* Descriptors and folder walks that are open, but for those that hold a lock. */
int memory_files_n_open(const struct memory_files *m);
/* The content of a file, to be changed in place or cut: NULL when there is none. */
unsigned char *memory_files_content(struct memory_files *m, const char *path, int64_t **size);
/* Changes bits of the byte that has n_behind others behind it, while others may read the file; false:
 * there is none. */
bool memory_files_flip(struct memory_files *m, const char *path, int64_t n_behind, unsigned char bits);
/* Makes a file hold these bytes. */
void memory_files_put(struct memory_files *m, const char *path, const void *data, int64_t n);

#endif
