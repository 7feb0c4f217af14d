/* SPDX-License-Identifier: Apache-2.0 */
/* fork.h: what a process that ends, and the children that it forks, do to the ranks it talks to.
 *
 * A forked child has copies of all descriptors: while it lives, the sockets of its parent do not close, and
 * other ranks would not see that the parent is gone. So a child closes, as its very first act, the sockets
 * that are kept here. It has none of the library's threads either, so it must not use a context; whoever
 * opened one compares the depth. (exec closes the descriptors anyway; a child made by vfork or by a bare
 * clone system call runs no such handler.)
 *
 * A process that ends by exit or by returning from main while sockets are kept says a last word on them, so
 * that the other ranks know that it was no crash. */
#ifndef ZR_COMM_FORK_H
#define ZR_COMM_FORK_H

#include "comm/meet/frame.h"

#include <stdbool.h>

/* The failure that a last word carries: in the frame's field about, and as its payload. code 0: none yet. */
struct zr_last_failure {
    int code;
    char text[ZR_FRAME_TEXT_BYTES];
};

/* A socket that is kept; in its owner's memory. */
struct zr_kept_socket {
    struct zr_kept_socket *prev, *next;
    int fd;
    bool is_kept, has_last_word;
    struct zr_frame last_word;
    const struct zr_last_failure *failure;
};

/* All of these from any thread. */
void zr_fork_keep(struct zr_kept_socket *s, int fd);
/* What is sent when the process ends, with *failure, which stays where it is; f NULL: nothing. Only while it
 * is kept. */
void zr_fork_last_word(struct zr_kept_socket *s, const struct zr_frame *f,
                       const struct zr_last_failure *failure);
/* Keeps the failure for last words, unless there is one already. */
void zr_fork_last_failure(struct zr_last_failure *failure, int code, const char *text);
/* Before the descriptor is closed. Not kept: nothing. */
void zr_fork_forget(struct zr_kept_socket *s);

/* The process is ending, and its last messages are sent: what it reads from others' sockets from here on is
 * the answer to them, not a loss. */
bool zr_fork_ending(void);

/* How many forks lie between the process that loaded the library, and this one. */
unsigned zr_fork_depth(void);

#endif
