/* SPDX-License-Identifier: Apache-2.0 */
/* limits.h: file calls that report the process's limits instead of ending the process.
 *
 * The kernel sends SIGXFSZ to a thread that writes beyond RLIMIT_FSIZE. The signal ends the process unless
 * the program handles it. The calls below block the signal in the calling thread while they run, and discard
 * it if it came. They then only fail with EFBIG. The limit holds for shared memory files, too.
 *
 * zr_system_words and zr_limit_words name the limit in the message. */
#ifndef ZR_KERNELS_LIMITS_H
#define ZR_KERNELS_LIMITS_H

#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

/* These functions behave like the system's calls, errno included. */
ssize_t zr_limited_write(int fd, const void *data, size_t n);
ssize_t zr_limited_pwrite(int fd, const void *data, size_t n, off_t at);
int zr_limited_ftruncate(int fd, off_t bytes);
int zr_limited_fallocate(int fd, int mode, off_t at, off_t bytes);

/* Use these around several writes in a row, such as stdio's. Begin and end run on the same thread. */
struct zr_large_write {
    bool blocks;
    sigset_t before;
};
void zr_large_write_begin(struct zr_large_write *w);
/* Keeps errno. */
void zr_large_write_end(const struct zr_large_write *w);

enum { ZR_SYSTEM_WORDS = 160 };
/* Writes the system's text for an errno. If a limit of this process is the reason, its name and value follow.
 * Returns text. */
const char *zr_system_words(int error, char text[ZR_SYSTEM_WORDS]);
/* Does the same with the text of a library, such as uv_strerror's. */
const char *zr_limit_words(int error, const char *words, char text[ZR_SYSTEM_WORDS]);

/* Returns whether the error is EMFILE or ENFILE. */
bool zr_is_descriptor_limit(int error);
enum { ZR_MAX_PROBED = 8 };
/* Returns EMFILE or ENFILE if this process cannot open n more descriptors now, else 0. n is at most
 * ZR_MAX_PROBED. Without a descriptor, libuv aborts in some places, and closes connections in others. */
int zr_no_descriptors(int n);
/* Returns how many descriptors this process has open, or 0 if the system does not say. */
int zr_count_descriptors(void);
/* As many descriptors as large jobs need. It is no higher, because some programs close all descriptors up to
 * the limit. */
enum { ZR_MANY_DESCRIPTORS = 65536 };
/* The soft limit on descriptors (RLIMIT_NOFILE). */
unsigned long long zr_descriptor_limit(void);
/* Raises the limit to n, or to the hard limit if that is lower. Returns the new limit. */
unsigned long long zr_raise_descriptor_limit(unsigned long long n);

#endif
