/* SPDX-License-Identifier: Apache-2.0 */
/* save_source.h: reads the bytes of a rank's file from memory, a piece at a time. The bytes are a head, which
 * lists the entries, then the ranges of memory with their values, and the program's data. Ranges are in host
 * memory, or in device memory that the CPU cannot read. */
#ifndef ZR_ZERO_SAVE_SOURCE_H
#define ZR_ZERO_SAVE_SOURCE_H

#include "zero/checkpoint/save.h"

#include <uv.h>

/* Thread-safety: several threads may call zr_source_read at once. The other functions are for one thread. */
struct zr_source {
    /* The head of the file, and the ranges of memory that follow it. Both are the caller's. */
    const char *head;
    const struct zr_extents *x;
    /* Bytes of the head, and of the whole file. */
    int64_t head_bytes, bytes;
    /* (x->n + 1) Bytes of the file where the ranges begin, and where the last one ends. */
    int64_t *at;
    /* The device that has the ranges. They are copied through page-locked memory (staging), a piece at a
     * time. NULL: the CPU can read all ranges. */
    struct zr_device *dev;
    struct zr_stream *stream;
    void *staging;
    int64_t staging_bytes;
    uv_mutex_t lock;
};

/* dev: the device that has the ranges; NULL: they are in host memory. most_bytes: the most bytes of a read.
 * ZERO_ERR_NOMEM, ZERO_ERR_SYSTEM or an error of the device. After a failure nothing is held. */
int zr_source_open(const char *head, int64_t head_bytes, const struct zr_extents *x, struct zr_device *dev,
                   int64_t most_bytes, struct zr_source *s);
/* A zeroed struct is allowed. */
void zr_source_close(struct zr_source *s);
/* Copies bytes [from, from + n) of the file to dst. */
int zr_source_read(struct zr_source *s, char *dst, int64_t from, int64_t n);

#endif
