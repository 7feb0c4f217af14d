/* SPDX-License-Identifier: Apache-2.0 */
/* fork.h: protects the other ranks from forks and exits of this process.
 *
 * A forked child has copies of all descriptors. While it lives, its parent's sockets stay open, and other
 * ranks would not see that the parent has ended. So a child closes the sockets that are kept here before it
 * does anything else. It has none of the library's threads either, so it must not use a context. A context
 * compares the fork depth to find that out. exec closes the descriptors anyway. A child made by vfork or by a
 * bare clone system call runs no fork handler.
 *
 * When a process ends by exit or by returning from main, it sends a last word on each kept socket. Then the
 * other ranks know that it did not crash. */
#ifndef ZR_COMM_FORK_H
#define ZR_COMM_FORK_H

#include "comm/meet/frame.h"

#include <stdbool.h>

/* The failure that a last word carries, as the frame's about field and its payload. code 0: none yet. */
struct zr_last_failure {
    int code;
    char text[ZR_FRAME_TEXT_BYTES];
};

/* A socket that is kept. Its owner provides the memory. */
struct zr_kept_socket {
    struct zr_kept_socket *prev, *next;
    int fd;
    bool is_kept, has_last_word;
    struct zr_frame last_word;
    const struct zr_last_failure *failure;
};

/* Any thread may call these functions. */
void zr_fork_keep(struct zr_kept_socket *s, int fd);
/* Sets the frame that is sent when the process ends, with *failure, which must stay valid. f NULL: nothing is
 * sent. Does nothing unless the socket is kept. */
void zr_fork_last_word(struct zr_kept_socket *s, const struct zr_frame *f,
                       const struct zr_last_failure *failure);
/* Keeps the failure for last words, unless one is kept already. */
void zr_fork_last_failure(struct zr_last_failure *failure, int code, const char *text);
/* Call before the descriptor is closed. Does nothing if the socket is not kept. */
void zr_fork_forget(struct zr_kept_socket *s);

/* Whether the process is ending and sends its last words. From then on, what it reads from other ranks'
 * sockets is the answer to them, not a loss. */
bool zr_fork_ending(void);

/* Number of forks between the process that loaded the library and this one. */
unsigned zr_fork_depth(void);

#endif
