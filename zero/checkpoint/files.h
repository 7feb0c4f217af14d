/* SPDX-License-Identifier: Apache-2.0 */
/* files.h: the file system calls of checkpoints. They are one small table, which tests replace. The functions
 * above the table make whole transfers, retry interrupted calls, and name the file in messages.
 *
 * Paths come from zr_path_absolute, which resolves the links that lead to the user's folder. Below that no
 * link is followed, and every call fails if a component of a path is a link. Otherwise a link in a folder of
 * checkpoints could lead a clean-up to other people's files. The calls that end in "linked" are the
 * exception: they read files of other programs, where links are normal.
 *
 * Functions of the table return 0 or more, or a negative errno. For a link that is not followed that is
 * -ELOOP, or -ZR_LINK_TO_ITSELF or -ZR_LINK_TO_NOTHING if it cannot be followed. Thread-safety: several
 * threads may call the table's functions at once, on different descriptors. */
#ifndef ZR_ZERO_FILES_H
#define ZR_ZERO_FILES_H

#include "kernels/error.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define ZR_PATH_BYTES   1024 /* bytes of a path, its terminating zero included */
#define ZR_DIRECT_ALIGN 4096 /* alignment of memory, place and length of direct transfers */

/* Codes that are no errno of the operating system. */
enum { ZR_LINK_TO_ITSELF = 5000, ZR_LINK_TO_NOTHING };

struct zr_files {
    /* Returns a descriptor. Folders may be opened, to sync them. Links are followed only without O_NOFOLLOW.
     * -EINVAL: the file system has no O_DIRECT; a transfer may report this too. -EISDIR: a folder. -ENXIO: a
     * FIFO, a socket or a device. */
    int (*open)(void *arg, const char *path, int flags, unsigned mode);
    /* Makes a file that never has a name, for reading and writing, in the folder of path. Fails if the file
     * system has no such files. NULL: none has. */
    int (*open_unnamed)(void *arg, const char *path);

    int64_t (*pread)(void *arg, int fd, void *buf, size_t n, int64_t at);
    int64_t (*pwrite)(void *arg, int fd, const void *buf, size_t n, int64_t at);
    int (*fsync)(void *arg, int fd);
    /* A hint to begin writing these bytes to the disk. NULL: there is none. */
    void (*start_sync)(void *arg, int fd, int64_t at, int64_t n);
    /* Makes a new file this long and reserves its space. 0 if the file system cannot reserve any. NULL: it
     * never can. */
    int (*allocate)(void *arg, int fd, int64_t bytes);

    /* Maps the first `bytes` bytes of a file that was opened for reading and writing. NULL: files cannot be
     * mapped. */
    int (*map)(void *arg, int fd, int64_t bytes, void **out);
    int (*unmap)(void *arg, void *at, int64_t bytes);

    /* Whether most of a file's first `bytes` bytes are in the page cache. NULL: they never are. */
    bool (*is_cached)(void *arg, int fd, int64_t bytes);
    /* Whether the file system of an open file keeps its files in memory. NULL: none does. */
    bool (*is_in_memory)(void *arg, int fd);

    int (*close)(void *arg, int fd);
    int64_t (*size)(void *arg, int fd);
    int (*rename)(void *arg, const char *from, const char *to);
    int (*mkdir)(void *arg, const char *path, unsigned mode);
    int (*unlink)(void *arg, const char *path);
    int (*rmdir)(void *arg, const char *path);
    int (*opendir)(void *arg, const char *path, void **out);
    /* 1: a name, which may be "." or "..". 0: there are no more names. */
    int (*readdir)(void *arg, void *dir, char *name, size_t name_bytes);

    int (*closedir)(void *arg, void *dir);
    /* Locks the whole file until the descriptor is closed, against every other descriptor, even of this
     * process. -EAGAIN: another has the lock. -ENOLCK: the file system has no locks. */
    int (*lock)(void *arg, int fd);
    /* 1: path is a name of the open file. 0: it is not. */
    int (*is_at)(void *arg, int fd, const char *path);
    /* The path of the open file now, which may differ from the one it was opened with. NULL: it is never
     * known. */
    int (*path_of)(void *arg, int fd, char *out, size_t out_bytes);

    /* The path from the root, which does not change with the working directory. An existing file or folder
     * always has the same one. */
    int (*absolute)(void *arg, const char *path, char *out, size_t out_bytes);

    void *arg;
};

/* Whether this is the code of a call that met a link. */
bool zr_is_link(int64_t code);

/* The calls of the operating system. */
extern const struct zr_files zr_files_posix;

/* All functions below return 0, ZERO_ERR_IO with the call, the path and the reason in the message, or
 * ZERO_ERR_ARG for a path that is too long. They block. Interrupted calls are repeated, and short transfers
 * are continued. */
int zr_file_open(const struct zr_files *fs, const char *path, int flags, int *fd);
/* Opens a file for reading and writing, and makes it if it is missing. *is_new: this call made it. *fd is -1
 * if the file was removed while this call ran. */
int zr_file_open_or_make(const struct zr_files *fs, const char *path, bool *is_new, int *fd);
/* Opens a file for reading. *missing is set if there is no such file. */
int zr_file_find(const struct zr_files *fs, const char *path, bool *missing, int *fd);
int zr_file_find_linked(const struct zr_files *fs, const char *path, bool *missing, int *fd);
/* Transfers exactly n bytes. If the file ends before that, the error says where. */
int zr_file_read(const struct zr_files *fs, int fd, const char *path, void *buf, int64_t n, int64_t at);
int zr_file_write(const struct zr_files *fs, int fd, const char *path, const void *buf, int64_t n,
                  int64_t at);
int zr_file_sync(const struct zr_files *fs, int fd, const char *path);
int zr_file_allocate(const struct zr_files *fs, int fd, const char *path, int64_t bytes);
int zr_file_size(const struct zr_files *fs, int fd, const char *path, int64_t *bytes);
/* Releases the descriptor, even if the call fails. */
int zr_file_close(const struct zr_files *fs, int fd, const char *path);
/* Makes the names in a folder durable. */
int zr_folder_sync(const struct zr_files *fs, const char *path);
int zr_file_rename(const struct zr_files *fs, const char *from, const char *to);
/* Makes the folder's own name durable. */
int zr_folder_sync_parent(const struct zr_files *fs, const char *path);
/* Makes a folder. exists: NULL, or set if the call failed because the name is taken. */
int zr_folder_make(const struct zr_files *fs, const char *path, bool *exists);
/* Removes a folder and the files in it, `first` (or NULL) before the others. A missing folder is no error. A
 * link or a file of that name stays, and is no error, because libzero did not make it. If the folder has
 * folders inside, they and it stay. That is an error if there were files to remove, and none afterwards, so
 * that it is reported once. */
int zr_folder_remove(const struct zr_files *fs, const char *path, const char *first);
/* Calls fn with each name except "." and "..". If fn returns non-zero, the walk ends and returns it. missing:
 * NULL, or set if there is no folder of that name, but nothing, a file or a link. */
int zr_folder_walk(const struct zr_files *fs, const char *path, bool *missing,
                   int (*fn)(void *arg, const char *name), void *arg);

struct zr_names {
    char **name;
    size_t n;
};
/* Lists the names in a folder, sorted, without "." and "..". The caller releases l with zr_names_free, even
 * after a failure. */
int zr_folder_list(const struct zr_files *fs, const char *path, bool *missing, struct zr_names *l);
/* A zeroed list is empty. */
int zr_names_add(struct zr_names *l, const char *name);
void zr_names_free(struct zr_names *l);

/* Reads a whole file of at most max bytes, and appends a zero byte. The caller frees *out. *missing is set if
 * there is no such file. */
int zr_file_load(const struct zr_files *fs, const char *path, int64_t max, bool *missing, char **out,
                 int64_t *n);
int zr_file_load_linked(const struct zr_files *fs, const char *path, int64_t max, bool *missing, char **out,
                        int64_t *n);
/* Makes the file, or replaces it, then writes, syncs and closes it. */
int zr_file_store(const struct zr_files *fs, const char *path, const void *data, int64_t n);

/* ZR_LOCK_BUSY: another process has the lock. ZR_LOCK_UNSUPPORTED: the file system has no locks. */
enum zr_lock_outcome { ZR_LOCK_TAKEN, ZR_LOCK_BUSY, ZR_LOCK_UNSUPPORTED };
/* Tries to take the lock, without waiting. */
int zr_file_lock(const struct zr_files *fs, int fd, const char *path, enum zr_lock_outcome *outcome);
/* Sets *is_there: path leads to the file of this descriptor. */
int zr_file_is_at(const struct zr_files *fs, int fd, const char *path, bool *is_there);
/* Removes a file. A missing one is no error. */
int zr_file_remove(const struct zr_files *fs, const char *path);
int zr_path_absolute(const struct zr_files *fs, const char *path, char out[ZR_PATH_BYTES]);

/* Sets path to folder/name. ZERO_ERR_ARG if it does not fit. */
int zr_path_join(char path[ZR_PATH_BYTES], const char *folder, const char *name);

#endif
