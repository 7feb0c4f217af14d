/* SPDX-License-Identifier: Apache-2.0 */
/* where.h: where a test's ranks train: on the host, or on a GPU that may be a stand-in (the model then
 * computes on the CPU, in device memory, when its stream has got there). */
#ifndef ZR_TEST_ZERO_WHERE_H
#define ZR_TEST_ZERO_WHERE_H

#include "zero/zero.h"

#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

/* This program can train on a GPU. */
extern const bool where_has_gpu;

/* And its ranks may have parts of one model. */
extern const bool where_has_parts;

/* By a rank's thread, before zero_wrap: its device, and what cfg says of it; by the same thread, after
 * zero_unwrap. */
void where_open(int rank, struct zero_config *cfg);
void where_close(struct zero_config *cfg);

/* Where ranks are processes. By the one that forks them: before; to stop one (it returns when that has) with
 * nothing in its hands that the others wait for; and when all have ended. */
void where_fork(void);
void where_stop(pid_t pid);
void where_reap(void);
/* By each of them: before the rest, on_host being the number of the host that it is to pose as; and at its
 * end: false where the GPU's stand-in was misused, as text says. */
void where_enter(int on_host);
bool where_leave(char *text, size_t n_text);

/* Waits until what zero_begin has put on cfg's stream is done: then the CPU may touch the unit. */
void where_wait(const struct zero_config *cfg);

/* Memory where the model computes, zeroed. */
void *where_alloc(size_t n_bytes);
void where_release(void *at);

#endif
