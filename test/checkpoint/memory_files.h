/* SPDX-License-Identifier: Apache-2.0 */
/* memory_files.h: a file system in memory that forgets what was not synced, and fails on request.
 *
 * After a crash, each write to a file since its last fsync may be lost, as a whole or in part. In a
 * folder, each name that was made, renamed or removed since its last fsync may be lost. POSIX promises no
 * more. Thread-safe. */
#ifndef ZR_TEST_MEMORY_FILES_H
#define ZR_TEST_MEMORY_FILES_H

#include "zero/checkpoint/files.h"

struct memory_files;

struct memory_files *memory_files_open(void);
void memory_files_close(struct memory_files *m);
const struct zr_files *memory_files_table(struct memory_files *m);
/* Returns the file system as found after a power failure now. seed selects which unsynced changes stay. */
struct memory_files *memory_files_crash(struct memory_files *m, uint64_t seed);

enum memory_fault {
    FAULT_NONE,
    FAULT_EIO,
    FAULT_ENOSPC,
    FAULT_EINTR, /* nothing was done; a repeated call works */
    FAULT_SHORT, /* transfers of more than a byte move one byte; other calls work */
    FAULT_DEAD   /* this call and all later ones fail: the machine is off */
};
enum memory_direct { DIRECT_WORKS, DIRECT_NOT_OPENED, DIRECT_NOT_MOVED };
/* Sets what O_DIRECT does: transfers must be aligned, which is checked, or fail with -EINVAL, at opening
 * or at each transfer. */
void memory_files_direct(struct memory_files *m, enum memory_direct direct);
/* Number of transfers past the page cache. */
int64_t memory_files_n_direct(const struct memory_files *m);

/* Call number `at` from now (1: the next) meets the fault; with always, all later calls meet it too. */
void memory_files_fault(struct memory_files *m, enum memory_fault fault, int64_t at, bool always);
/* Number of calls since the last memory_files_fault. */
int64_t memory_files_calls(const struct memory_files *m);
/* Number of open descriptors and folder walks, without those that hold a lock. */
int memory_files_n_open(const struct memory_files *m);
/* The contents of a file, which may be changed in place or cut; NULL if it does not exist. */
unsigned char *memory_files_content(struct memory_files *m, const char *path, int64_t **size);
/* Flips bits of the byte that is followed by n_behind others, while others may read the file. Returns
 * false if there is no such byte. */
bool memory_files_flip(struct memory_files *m, const char *path, int64_t n_behind, unsigned char bits);
/* Sets the contents of a file. */
void memory_files_put(struct memory_files *m, const char *path, const void *data, int64_t n);

#endif
