/* SPDX-License-Identifier: Apache-2.0 */
/* limits.h: the speed limits that zero-bench comm prints next to its collectives. A limit is the speed of the
 * copies of an all-gather, or of the sums of a reduce-scatter, inside this rank's memory. All ranks run them
 * at the same time, each on the thread that its collectives run on. */
#ifndef ZERO_BENCH_COMM_LIMITS_H
#define ZERO_BENCH_COMM_LIMITS_H

#include "kernels/device.h"

struct comm_limits {
    struct zr_device *dev;
    enum zero_dtype dtype;
    /* buffers: n slices that are copied or summed, and the destination of the copies or of the sum */
    char *from, *to;
    /* sizes of the buffers */
    int64_t from_bytes, to_bytes;
};

/* Bytes of device memory that both buffers take. */
int64_t comm_limits_bytes(int n, int64_t slice, enum zero_dtype dtype);
/* Opens memory for up to n slices of slice bytes, a multiple of 128. Blocks. Returns 0 or a zero_err, and
 * then holds nothing. */
int comm_limits_open(struct comm_limits *l, struct zr_device *dev, struct zr_stream *s, int n, int64_t slice,
                     enum zero_dtype dtype);
/* Enqueues the copies of an all-gather among n ranks: n - 1 slices. */
int comm_limits_copy(struct comm_limits *l, struct zr_stream *s, int n, int64_t slice);
/* Enqueues the sums of a reduce-scatter among n ranks: n slices to one of fp32. */
int comm_limits_add(struct comm_limits *l, struct zr_stream *s, int n, int64_t slice);
/* Frees the memory. The stream must be idle. A zeroed struct is allowed. */
void comm_limits_close(struct comm_limits *l);

#endif
