/* SPDX-License-Identifier: Apache-2.0 */
/* limits.h: what the machine itself can do, beside which zero-bench comm shows its collectives: the
 * copies of an all-gather and the sums of a reduce-scatter, from this rank's own memory to its own. All ranks
 * do it at the same time, each on the thread that its collectives run on. */
#ifndef ZERO_BENCH_COMM_LIMITS_H
#define ZERO_BENCH_COMM_LIMITS_H

#include "kernels/device.h"

struct comm_limits {
    struct zr_device *dev;
    enum zr_dtype dtype;
    /* what n slices are copied from, and summed; what they are copied to, which has room for the sum, too */
    char *from, *to;
    int64_t from_bytes, to_bytes;
};

/* Bytes that both take of the device's memory. */
int64_t comm_limits_bytes(int n, int64_t slice, enum zr_dtype dtype);
/* For up to n slices of so many bytes, a multiple of 128. Blocks. 0 or a zr_err, holding nothing. */
int comm_limits_open(struct comm_limits *l, struct zr_device *dev, struct zr_stream *s, int n, int64_t slice,
                     enum zr_dtype dtype);
/* Puts on the stream what an all-gather among n has to copy: n - 1 slices. */
int comm_limits_copy(struct comm_limits *l, struct zr_stream *s, int n, int64_t slice);
/* Puts on the stream what a reduce-scatter among n has to sum: n slices to one of fp32. */
int comm_limits_add(struct comm_limits *l, struct zr_stream *s, int n, int64_t slice);
/* The stream must be idle. One that was not opened, of zeros, is allowed. */
void comm_limits_close(struct comm_limits *l);

#endif
