/* SPDX-License-Identifier: Apache-2.0 */
/* files.h: every call that checkpoints make to the file system, as one small table that tests replace, and
 * what is always wanted above it: whole transfers, retries of interrupted calls, messages that name the file.
 *
 * Paths come from zr_path_absolute, which resolves the links that lead to the user's folder. Below that no
 * link is followed, or a link in a folder of checkpoints could lead a clean-up to other people's files. Where
 * a component of a path is a link, every call fails. The calls that end in "linked" are the exception: they
 * read files of other programs, where links are normal.
 *
 * Functions of the table return 0 or more, or a negative errno. For a link that is not followed that is
 * -ELOOP, or -ZR_LINK_TO_ITSELF or -ZR_LINK_TO_NOTHING if it cannot be followed. Thread-safety: the table's
 * functions may be called by several threads at once, on different descriptors. */
#ifndef ZR_ZERO_FILES_H
#define ZR_ZERO_FILES_H

#include "kernels/error.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define ZR_PATH_BYTES   1024 /* of a path, its terminating zero included */
#define ZR_DIRECT_ALIGN 4096 /* of memory, place and length of what goes past the page cache */

/* No errno of the operating system. */
enum { ZR_LINK_TO_ITSELF = 5000, ZR_LINK_TO_NOTHING };

struct zr_files {
    /* a descriptor; folders too, to sync them; O_DIRECT: -EINVAL where the file system has no such thing,
     * here or at a transfer. -EISDIR, or -ENXIO for a FIFO, a socket or a device. Links are followed only
     * without O_NOFOLLOW. */
    int (*open)(void *arg, const char *path, int flags, unsigned mode);

    int64_t (*pread)(void *arg, int fd, void *buf, size_t n, int64_t at);
    int64_t (*pwrite)(void *arg, int fd, const void *buf, size_t n, int64_t at);
    int (*fsync)(void *arg, int fd);
    /* a hint: begin to write these bytes to the disk; NULL: none */
    void (*start_sync)(void *arg, int fd, int64_t at, int64_t n);
    /* makes a new file this long and reserves its space; 0 where the file system cannot reserve any; NULL: it
     * never can */
    int (*allocate)(void *arg, int fd, int64_t bytes);

    /* most of a file's first bytes are in the page cache; NULL: never */
    bool (*is_cached)(void *arg, int fd, int64_t bytes);

    int (*close)(void *arg, int fd);
    int64_t (*size)(void *arg, int fd);
    int (*rename)(void *arg, const char *from, const char *to);
    int (*mkdir)(void *arg, const char *path, unsigned mode);
    int (*unlink)(void *arg, const char *path);
    int (*rmdir)(void *arg, const char *path);
    int (*opendir)(void *arg, const char *path, void **out);
    /* 1: a name, 0: no more; "." and ".." included */
    int (*readdir)(void *arg, void *dir, char *name, size_t name_bytes);

    int (*closedir)(void *arg, void *dir);
    /* of the whole file, until the descriptor is closed, against every other descriptor, of this process too.
     * -EAGAIN: another has it; -ENOLCK: the file system has no locks */
    int (*lock)(void *arg, int fd);
    /* 1: path is a name of the open file; 0: it is not */
    int (*is_at)(void *arg, int fd, const char *path);
    /* where the open file is now, which may be elsewhere than where it was opened; NULL: never known */
    int (*path_of)(void *arg, int fd, char *out, size_t out_bytes);

    /* the path from the root, whatever the working directory will be; of an existing file or folder always
     * the same one */
    int (*absolute)(void *arg, const char *path, char *out, size_t out_bytes);

    void *arg;
};

/* The code of a call that met a link. */
bool zr_is_link(int64_t code);

/* The operating system's own. */
extern const struct zr_files zr_files_posix;

/* All below: 0 or ZR_ERR_IO (what was asked for is in the message: the call, the path, the reason),
 * ZR_ERR_ARG for a path too long. Blocking. Interrupted calls are repeated, short transfers continued. */
int zr_file_open(const struct zr_files *fs, const char *path, int flags, int *fd);
/* Opens a file for reading and writing; is_new: it was missing, and this call made it. *fd is -1 if the file
 * was removed while this call ran. */
int zr_file_open_or_make(const struct zr_files *fs, const char *path, bool *is_new, int *fd);
/* Opens a file for reading; missing is set when there is no such file. */
int zr_file_find(const struct zr_files *fs, const char *path, bool *missing, int *fd);
int zr_file_find_linked(const struct zr_files *fs, const char *path, bool *missing, int *fd);
/* Exactly n bytes; an end of file before that is an error that says where. */
int zr_file_read(const struct zr_files *fs, int fd, const char *path, void *buf, int64_t n, int64_t at);
int zr_file_write(const struct zr_files *fs, int fd, const char *path, const void *buf, int64_t n,
                  int64_t at);
int zr_file_sync(const struct zr_files *fs, int fd, const char *path);
int zr_file_allocate(const struct zr_files *fs, int fd, const char *path, int64_t bytes);
int zr_file_size(const struct zr_files *fs, int fd, const char *path, int64_t *bytes);
/* The descriptor is gone also when this fails. */
int zr_file_close(const struct zr_files *fs, int fd, const char *path);
/* Makes the names in a folder durable. */
int zr_folder_sync(const struct zr_files *fs, const char *path);
int zr_file_rename(const struct zr_files *fs, const char *from, const char *to);
/* Makes the folder's own name durable. */
int zr_folder_sync_parent(const struct zr_files *fs, const char *path);
/* exists: NULL, or set when it failed because the name is taken. */
int zr_folder_make(const struct zr_files *fs, const char *path, bool *exists);
/* Removes a folder of files, `first` (or NULL) before the others. A missing one is no error. A link or a file
 * of that name stays, and is no error: it was not made here. Folders inside it stay, and it with them: an
 * error if there were files to remove, and none afterwards, so that this is reported once. */
int zr_folder_remove(const struct zr_files *fs, const char *path, const char *first);
/* Calls fn with each name but "." and ".."; non-zero ends the walk and is returned. missing: NULL, or set
 * when there is no folder of that name: nothing, a file or a link. */
int zr_folder_walk(const struct zr_files *fs, const char *path, bool *missing,
                   int (*fn)(void *arg, const char *name), void *arg);

struct zr_names {
    char **name;
    size_t n;
};
/* The names in a folder, sorted, without "." and "..". Release l with zr_names_free, also after a failure. */
int zr_folder_list(const struct zr_files *fs, const char *path, bool *missing, struct zr_names *l);
/* A zeroed list is empty. */
int zr_names_add(struct zr_names *l, const char *name);
void zr_names_free(struct zr_names *l);

/* The whole of a file, at most max bytes of it, with a zero after them; *out is freed by the caller. missing
 * is set when there is no such file. */
int zr_file_load(const struct zr_files *fs, const char *path, int64_t max, bool *missing, char **out,
                 int64_t *n);
int zr_file_load_linked(const struct zr_files *fs, const char *path, int64_t max, bool *missing, char **out,
                        int64_t *n);
/* Makes the file, writes it, syncs it and closes it. A file of that name is replaced. */
int zr_file_store(const struct zr_files *fs, const char *path, const void *data, int64_t n);

/* ZR_LOCK_HELD: by another; ZR_NO_LOCKS: this file system has none. */
enum zr_lock_outcome { ZR_LOCKED, ZR_LOCK_HELD, ZR_NO_LOCKS };
/* Does not wait. */
int zr_file_lock(const struct zr_files *fs, int fd, const char *path, enum zr_lock_outcome *outcome);
int zr_file_is_at(const struct zr_files *fs, int fd, const char *path, bool *is);
/* A missing one is no error. */
int zr_file_remove(const struct zr_files *fs, const char *path);
int zr_path_absolute(const struct zr_files *fs, const char *path, char out[ZR_PATH_BYTES]);

/* path = folder/name. ZR_ERR_ARG when it does not fit. */
int zr_path_join(char path[ZR_PATH_BYTES], const char *folder, const char *name);

#endif
