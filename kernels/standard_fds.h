/* SPDX-License-Identifier: Apache-2.0 */
/* standard_fds.h: keeps descriptors 0, 1 and 2 for standard input, output and error.
 *
 * A process may start with one of them closed. The next file or socket then gets its number. A printf would
 * write into it, and libuv ends a process that closes such a socket. */
#ifndef ZR_KERNELS_STANDARD_FDS_H
#define ZR_KERNELS_STANDARD_FDS_H

/* Opens /dev/null in place of each of the three that is closed. *opened gets bit 1 << fd for each one opened.
 * Returns ZERO_ERR_SYSTEM if /dev/null cannot be opened. Any thread. */
int zr_standard_fds_open(unsigned *opened);

/* Moves a descriptor that was just opened above 2, in case the program has closed a standard one since. A
 * descriptor above 2 and a negative fd are returned unchanged. A moved one has close-on-exec set. If it
 * cannot be moved, it is closed, and the result is -1 with errno. */
int zr_above_standard(int fd);

#endif
