/* SPDX-License-Identifier: Apache-2.0 */
/* save_source.c: reads any part of the bytes of a rank's file from memory. */
#include "zero/checkpoint/save_source.h"
#include "kernels/alloc.h"
#include "kernels/asserts.h"

#include <stdlib.h>
#include <string.h>

static int open_staging(struct zr_source *s, struct zr_device *dev, int64_t bytes)
{
    if (uv_mutex_init(&s->lock))
        return zr_fail(ZERO_ERR_SYSTEM, "a mutex could not be made");
    s->dev = dev;
    int err = zr_thread_begin(dev);
    if (!err)
        err = dev->ops->stream_open(dev, ZR_STREAM_QUEUE, "zero-save", NULL, &s->stream);
    if (!err)
        err = dev->ops->host_alloc(dev, bytes, &s->staging);
    s->staging_bytes = bytes;
    return err;
}

int zr_source_open(const char *head, int64_t head_bytes, const struct zr_extents *x, struct zr_device *dev,
                   int64_t most_bytes, struct zr_source *s)
{
    *s = (struct zr_source){.head = head, .head_bytes = head_bytes, .x = x, .bytes = head_bytes};
    ZR_TRY(ZR_ALLOC(s->at, x->n + 1, "the places of %lld ranges", (long long)x->n));
    for (int64_t i = 0; i < x->n; i++) {
        s->at[i] = s->bytes;
        s->bytes += x->list[i].n * x->list[i].size;
    }
    s->at[x->n] = s->bytes;
    for (int k = 0; k < ZR_N_DATA; k++)
        s->bytes += x->data[k].bytes;
    int err = dev ? open_staging(s, dev, most_bytes) : 0;
    if (err)
        zr_source_close(s);
    return err;
}

void zr_source_close(struct zr_source *s)
{
    if (s->dev) {
        s->dev->ops->stream_close(s->stream);
        if (s->staging)
            s->dev->ops->host_free(s->dev, s->staging, s->staging_bytes);
        uv_mutex_destroy(&s->lock);
    }
    free(s->at);
    *s = (struct zr_source){0};
}

/* Returns the range that contains byte `from`. */
static int64_t find_range(const struct zr_source *s, int64_t from)
{
    int64_t lo = 0, hi = s->x->n;
    while (lo < hi) {
        int64_t mid = (lo + hi) / 2;
        if (s->at[mid + 1] <= from)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

/* Copies bytes of the ranges, by the CPU or on the stream. */
static int gather(const struct zr_source *s, char *dst, int64_t from, int64_t n)
{
    int64_t done = 0;
    int err = 0;
    for (int64_t i = find_range(s, from); !err && done < n; i++) {
        int64_t skip = from + done - s->at[i], part = zr_min(n - done, s->at[i + 1] - s->at[i] - skip);
        ZR_ASSERT(i < s->x->n && skip >= 0 && part >= 0);
        const char *src = s->x->list[i].at + skip;
        if (s->dev && part)
            err = s->dev->ops->copy(s->stream, dst + done, src, part);
        else
            memcpy(dst + done, src, (size_t)part);
        done += part;
    }
    return err;
}

/* Copies the program's data within bytes [from, from + n) of the file. It stands after the ranges. */
static void copy_data(const struct zr_source *s, char *dst, int64_t from, int64_t n)
{
    int64_t begin = s->at[s->x->n];
    for (int k = 0; k < ZR_N_DATA; k++) {
        int64_t end = begin + s->x->data[k].bytes, first = zr_max(from, begin), last = zr_min(from + n, end);
        if (first < last)
            memcpy(dst + (first - from), (const char *)s->x->data[k].at + (first - begin),
                   (size_t)(last - first));
        begin = end;
    }
}

int zr_source_read(struct zr_source *s, char *dst, int64_t from, int64_t n)
{
    if (from < s->head_bytes) {
        int64_t part = zr_min(n, s->head_bytes - from);
        memcpy(dst, s->head + from, (size_t)part);
        dst += part;
        from += part;
        n -= part;
    }
    int64_t ranges_end = s->at[s->x->n];
    copy_data(s, dst, from, n);
    n = zr_min(n, ranges_end - from);
    if (n <= 0)
        return 0;
    if (!s->dev)
        return gather(s, dst, from, n);
    /* One copy at a time: a copy from the device is much faster than the disk. */
    uv_mutex_lock(&s->lock);
    int err = zr_thread_begin(s->dev); /* any of the threads that save */
    if (!err)
        err = gather(s, s->staging, from, n);
    int waited = s->dev->ops->stream_sync(s->stream);
    err = err ? err : waited;
    if (!err)
        memcpy(dst, s->staging, (size_t)n);
    uv_mutex_unlock(&s->lock);
    return err;
}
