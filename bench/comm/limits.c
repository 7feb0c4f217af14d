/* SPDX-License-Identifier: Apache-2.0 */
/* limits.c: plain copies and sums in a rank's own memory. zero-bench comm prints their speed as an upper
 * bound of what a collective with the same copies or sums can reach. */
#include "bench/comm/limits.h"
#include "kernels/error.h"

/* Size of the buffer `from`: n slices. */
static int64_t source_bytes(int n, int64_t slice)
{
    return n * slice;
}

/* Size of the buffer `to`: the copies, or the sum of all slices in fp32. */
static int64_t target_bytes(int n, int64_t slice, enum zero_dtype dtype)
{
    int64_t sum = slice / zr_dtype_bytes(dtype) * (int64_t)sizeof(float), copies = (n - 1) * slice;
    return sum > copies ? sum : copies;
}

int64_t comm_limits_bytes(int n, int64_t slice, enum zero_dtype dtype)
{
    return source_bytes(n, slice) + target_bytes(n, slice, dtype);
}

int comm_limits_open(struct comm_limits *l, struct zr_device *dev, struct zr_stream *s, int n, int64_t slice,
                     enum zero_dtype dtype)
{
    void *from = NULL, *to = NULL;
    *l = (struct comm_limits){.dev = dev,
                              .dtype = dtype,
                              .from_bytes = source_bytes(n, slice),
                              .to_bytes = target_bytes(n, slice, dtype)};
    int err = dev->ops->alloc(dev, l->from_bytes, &from);
    err = err ? err : dev->ops->alloc(dev, l->to_bytes, &to);
    l->from = from;
    l->to = to;
    /* Writes the pages once; until then they all map the same zero page. */
    err = err ? err : dev->ops->zero(s, from, l->from_bytes);
    err = err ? err : dev->ops->zero(s, to, l->to_bytes);
    err = err ? err : dev->ops->stream_sync(s);
    if (err)
        comm_limits_close(l);
    return err;
}

int comm_limits_copy(struct comm_limits *l, struct zr_stream *s, int n, int64_t slice)
{
    int err = 0;
    for (int i = 0; i < n - 1 && !err; i++)
        err = l->dev->ops->copy(s, l->to + i * slice, l->from + i * slice, slice);
    return err;
}

int comm_limits_add(struct comm_limits *l, struct zr_stream *s, int n, int64_t slice)
{
    const void *source[ZR_MAX_SOURCES];
    if (n > ZR_MAX_SOURCES)
        return zr_fail(ZERO_ERR_NOTSUP, "sums of %d ranks: up to %d are measured", n, ZR_MAX_SOURCES);
    for (int i = 0; i < n; i++)
        source[i] = l->from + i * slice;
    return l->dev->ops->sum_tree(s, (float *)l->to, source, n, l->dtype, slice / zr_dtype_bytes(l->dtype),
                                 false);
}

void comm_limits_close(struct comm_limits *l)
{
    if (l->from)
        l->dev->ops->free(l->dev, l->from, l->from_bytes);
    if (l->to)
        l->dev->ops->free(l->dev, l->to, l->to_bytes);
    *l = (struct comm_limits){0};
}
