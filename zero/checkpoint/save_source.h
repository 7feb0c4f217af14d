/* SPDX-License-Identifier: Apache-2.0 */
/* save_source.h: the bytes of a rank's file, read a part at a time: a head, then the ranges, then the
 * program's data. Ranges are in host memory, or in memory of a device that the CPU cannot read. */
#ifndef ZR_ZERO_SAVE_SOURCE_H
#define ZR_ZERO_SAVE_SOURCE_H

#include "zero/checkpoint/save.h"

#include <uv.h>

/* Thread-safety: zr_source_read from any thread, several at once; the rest from one. */
struct zr_source {
    /* memory of the caller's, as x is */
    const char *head;
    const struct zr_extents *x;
    /* of the head; of all */
    int64_t head_bytes, bytes;
    /* (x->n + 1) bytes of the file where the ranges begin, and where the last ends */
    int64_t *at;
    /* Memory that the CPU cannot read goes through page-locked memory, a part at a time. NULL: all can be
     * read. */
    struct zr_device *dev;
    struct zr_stream *stream;
    void *staging;
    int64_t staging_bytes;
    uv_mutex_t lock;
};

/* dev: where the ranges are, or NULL for the host's memory. most_bytes: of a read. ZR_ERR_NOMEM,
 * ZR_ERR_SYSTEM, the device's. On failure nothing is held. */
int zr_source_open(const char *head, int64_t head_bytes, const struct zr_extents *x, struct zr_device *dev,
                   int64_t most_bytes, struct zr_source *s);
/* A zeroed one is allowed. */
void zr_source_close(struct zr_source *s);
/* Bytes [from, from + n). */
int zr_source_read(struct zr_source *s, char *dst, int64_t from, int64_t n);

#endif
