/* SPDX-License-Identifier: Apache-2.0 */
/* disk.h: what a disk and the system's page cache give to dd, to measure checkpoints beside. */
#ifndef ZERO_BENCH_DISK_H
#define ZERO_BENCH_DISK_H

#include "bench/child.h"

#include <stdint.h>

#define DISK_MAX_WRITERS 64

/* As many dd as a checkpoint has files, each with its part of the bytes. */
struct disk_dd {
    const char *dir;
    /* at most DISK_MAX_WRITERS */
    int32_t n;
    /* of all writers together */
    int64_t bytes;
    struct child child[DISK_MAX_WRITERS];
};

enum disk_job { DISK_WRITE, DISK_WRITE_DIRECT, DISK_READ, DISK_READ_TO_MEMORY };

/* Starts them: new files of zeros with an fsync at the end, through the page cache or past it (oflag=direct);
 * or a reading of those files, each into dd's one buffer or into memory as large as they are (new files in
 * /dev/shm). Returns 0 or a zr_err; disk_dd_wait then waits for what was started. */
int disk_dd_start(struct disk_dd *d, enum disk_job job);
int disk_dd_wait(struct disk_dd *d);
/* Have all of them ended? Does not wait. */
bool disk_dd_ended(struct disk_dd *d);
/* All that they wrote. */
void disk_dd_remove(const struct disk_dd *d);
/* Only what is in memory. */
void disk_dd_forget(const struct disk_dd *d);

/* Removes a folder and all in it. */
int disk_remove_folder(const char *dir);
/* Takes the files in dir, and in its folders' folders, out of the page cache, or reads them into it. */
void disk_make_cold(const char *dir);
void disk_make_warm(const char *dir);

#endif
