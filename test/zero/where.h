/* SPDX-License-Identifier: Apache-2.0 */
/* where.h: the device on which a test's ranks train: the host, or a GPU that may be a stand-in. On the
 * stand-in the CPU computes in device memory, after it waited for the model's stream, and until the thread
 * calls the library again. */
#ifndef ZR_TEST_ZERO_WHERE_H
#define ZR_TEST_ZERO_WHERE_H

#include "zero/zero.h"

#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

/* Whether this program trains on a GPU. */
extern const bool where_has_gpu;

/* A rank's thread calls where_open before zero_wrap, to select the device and set cfg. It calls where_close
 * after zero_unwrap. */
void where_open(int rank, struct zero_config *cfg);
void where_close(struct zero_config *cfg);

/* The parent of ranks that are processes calls these. Call where_fork before the first fork, and where_reap
 * after all ranks have ended. A rank that where_stop stops holds nothing of the stand-in that others wait
 * for. The call returns after the rank has stopped. */
void where_fork(void);
void where_stop(pid_t pid);
void where_reap(void);
/* Each rank that is a process calls these. Call where_enter first; on_host is the number of the host that the
 * rank claims. Call where_leave last. It returns false, with a reason in text, if the GPU stand-in was
 * misused. */
void where_enter(int on_host);
bool where_leave(char *text, size_t n_text);

/* Waits for what zero_begin enqueued on cfg's stream, so that the CPU may touch the unit until this thread's
 * next call of the library. */
void where_wait(const struct zero_config *cfg);

/* Allocates zeroed memory where the model computes. */
void *where_alloc(size_t n_bytes);
void where_release(void *at);

#endif
