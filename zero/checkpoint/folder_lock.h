/* SPDX-License-Identifier: Apache-2.0 */
/* folder_lock.h: that one context at a time saves into a folder, of all processes and hosts that the file
 * system's locks reach: each takes the others' unfinished saves for left behind, and removes their old ones.
 *
 * The lock is one of the operating system's on the file .lock in the folder, which says who holds it. It goes
 * with its holder, however that ends; a file without a lock is of no account. A file of this name that
 * libzero did not write is the user's, and stays. An empty one, or one with only the beginning of what
 * libzero writes, may be either's: it is locked, and neither written nor removed. */
#ifndef ZR_ZERO_FOLDER_LOCK_H
#define ZR_ZERO_FOLDER_LOCK_H

#include "kernels/log.h"
#include "zero/checkpoint/files.h"

/* A program that saves into more is one that never comes back to most. */
#define ZR_MOST_FOLDER_LOCKS 8

/* A zeroed one holds none. The lock used last is first in the list. Thread-safety: one thread at a time. */
struct zr_folder_locks {
    struct zr_folder_lock {
        const struct zr_files *fs;
        char folder[ZR_PATH_BYTES];
        /* -1: the file system has no locks */
        int fd;
        /* the file was there before, and may be the user's: it is not removed */
        bool stays;
        /* who took it: a forked child has this too, and not the lock to give back */
        int64_t pid;
    } list[ZR_MOST_FOLDER_LOCKS];
    int n;
};

/* Takes the folder's lock, or finds that it is held already by this one; beyond ZR_MOST_FOLDER_LOCKS the one
 * that was not asked for longest is given up. If the folder or its lock file was renamed or removed, the lock
 * of what is at the path now is taken. folder: as zr_path_absolute makes it. Where the file system has no
 * locks the log is warned. ZR_ERR_IO names the holder, ZR_ERR_ARG a file of the user's. */
int zr_folder_lock(struct zr_folder_locks *locks, const struct zr_files *fs, const char *folder,
                   struct zr_log *log);
/* *is: these locks include that of the folder at this path. folder: as zr_path_absolute makes it. */
int zr_folder_is_locked(const struct zr_folder_locks *locks, const struct zr_files *fs, const char *folder,
                        bool *is);
/* Gives all back, and removes their files. */
void zr_folder_unlock_all(struct zr_folder_locks *locks);

#endif
