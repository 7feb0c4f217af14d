/* SPDX-License-Identifier: Apache-2.0 */
/* folder_lock.h: lets one context at a time save into a folder. Otherwise two runs would take each other's
 * unfinished saves for abandoned ones, and remove each other's old saves. This holds for all processes and
 * hosts that the file system's locks reach.
 *
 * The lock is an operating system lock on the file .lock in the folder, whose text says who holds it. It ends
 * when the last process that has the descriptor closes it or ends, in whatever way. A child that the holder
 * forked may have it, too. A .lock file that no process has locked means nothing: its holder has ended. A
 * file of this name that libzero did not write is the user's, and stays. An empty file, or one with only the
 * beginning of what libzero writes, may be the user's. It is locked, but neither written nor removed. */
#ifndef ZR_ZERO_FOLDER_LOCK_H
#define ZR_ZERO_FOLDER_LOCK_H

#include "kernels/log.h"
#include "zero/checkpoint/files.h"

/* Most locks that a context keeps. For one more folder it releases the least recently used lock. That folder
 * is unprotected until the context saves into it again. */
#define ZR_MAX_FOLDER_LOCKS 8

/* A zeroed struct holds no lock. The most recently used lock is first. Thread-safety: one thread at a
 * time. */
struct zr_folder_locks {
    struct zr_folder_lock {
        const struct zr_files *fs;
        char folder[ZR_PATH_BYTES];
        /* Descriptor of the lock file. -1: the file system has no locks. */
        int fd;
        /* The file was there before, and stays because it may be the user's. */
        bool stays;
        /* Process that took the lock. A forked child has a copy of this struct, but must not remove the
         * file. */
        int64_t pid;
    } list[ZR_MAX_FOLDER_LOCKS];
    int n;
};

/* Takes the folder's lock, if this list does not hold it already. If the list is full, the least recently
 * used lock is released. If the folder or its lock file was renamed or removed, the lock of what is at the
 * path now is taken. folder: as zr_path_absolute makes it. If the file system has no locks, this warns and
 * succeeds.
 *
 * Errors: ZERO_ERR_IO   another holds the lock, and the message says who; or a file system call failed
 *         ZERO_ERR_ARG  the lock file is the user's */
int zr_folder_lock(struct zr_folder_locks *locks, const struct zr_files *fs, const char *folder,
                   struct zr_log *log);
/* Sets *held: the list holds the lock of the folder at this path, or it has the folder and its file system
 * has no locks. folder: as zr_path_absolute makes it. */
int zr_folder_find_lock(const struct zr_folder_locks *locks, const struct zr_files *fs, const char *folder,
                        bool *held);
/* Releases all locks, and removes their files. */
void zr_folder_unlock_all(struct zr_folder_locks *locks);

#endif
