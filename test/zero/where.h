/* where.h: where a test's ranks train: on the host, or on a GPU that may be a stand-in (the model then
 * computes on the CPU, in device memory, when its stream has got there). */
#ifndef ZR_TEST_ZERO_WHERE_H
#define ZR_TEST_ZERO_WHERE_H

#include "zero/zero.h"

#include <stdbool.h>
#include <stddef.h>

/* This program can train on a GPU. */
extern const bool where_has_gpu;

/* By a rank's thread, before zero_wrap: its device, and what cfg says of it; by the same thread, after
 * zero_unwrap. */
void where_open(int rank, struct zero_config *cfg);
void where_close(struct zero_config *cfg);

/* Waits until what zero_begin has put on cfg's stream is done: then the CPU may touch the unit. */
void where_wait(const struct zero_config *cfg);

/* Memory where the model computes, zeroed. */
void *where_alloc(size_t n_bytes);
void where_release(void *at);

#endif
