/* SPDX-License-Identifier: Apache-2.0 */
/* disk.h: how fast dd writes and reads the same disk, to compare checkpoints with. */
#ifndef ZERO_BENCH_DISK_H
#define ZERO_BENCH_DISK_H

#include "bench/child.h"

#include <stdint.h>

#define DISK_MAX_WRITERS 64

/* As many dd processes as a checkpoint has files, each with its part of the bytes. */
struct disk_dd {
    const char *dir;
    /* number of processes, at most DISK_MAX_WRITERS */
    int32_t n;
    /* of all processes together */
    int64_t bytes;
    struct child child[DISK_MAX_WRITERS];
};

enum disk_job { DISK_WRITE, DISK_WRITE_DIRECT, DISK_READ, DISK_READ_TO_MEMORY };

/* Starts them. They write new files of zeros with an fsync at the end, through the page cache or past it
 * (oflag=direct). Or they read those files into dd's buffer, or into new files in /dev/shm. Returns 0 or a
 * zero_err; disk_dd_wait then waits for those that were started. */
int disk_dd_start(struct disk_dd *d, enum disk_job job);
int disk_dd_wait(struct disk_dd *d);
/* Whether all have ended. Does not wait. */
bool disk_dd_ended(struct disk_dd *d);
/* Removes all that they wrote. */
void disk_dd_remove(const struct disk_dd *d);
/* Removes only the files in memory. */
void disk_dd_forget(const struct disk_dd *d);

/* Returns the bytes of all ranks' files of the checkpoints in dir's subfolders. */
int64_t disk_count_bytes(const char *dir);
/* Removes a folder with everything in it. */
int disk_remove_folder(const char *dir);
/* Takes the files in dir, and in its subfolders, out of the page cache, or reads them into it. */
void disk_make_cold(const char *dir);
void disk_make_warm(const char *dir);

#endif
