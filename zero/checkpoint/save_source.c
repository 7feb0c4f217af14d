/* SPDX-License-Identifier: Apache-2.0 */
/* save_source.c: reads any part of the bytes of a rank's file from memory. */
#include "zero/checkpoint/save_source.h"
#include "kernels/alloc.h"
#include "kernels/asserts.h"
#include "kernels/state_codes.h"

#include <stdlib.h>
#include <string.h>

/* The first and the last master of a read may be needed in part, but are copied whole. */
#define MORE_STAGING ((int64_t)(2 * sizeof(float)))

static int open_staging(struct zr_source *s, struct zr_device *dev, int64_t bytes)
{
    if (uv_mutex_init(&s->lock))
        return zr_fail(ZERO_ERR_SYSTEM, "a mutex could not be made");
    s->dev = dev;
    int err = zr_thread_begin(dev);
    if (!err)
        err = dev->ops->stream_open(dev, ZR_STREAM_QUEUE, "zero-save", NULL, &s->stream);
    if (!err)
        err = dev->ops->host_alloc(dev, bytes + MORE_STAGING, &s->staging);
    s->staging_bytes = bytes + MORE_STAGING;
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

/* A read of the ranges: where its next bytes go, and where they are staged (NULL: nowhere). */
struct reading {
    const struct zr_source *s;
    char *dst, *staged;
};

/* Calls fn for the part of each range in bytes [from, from + n) of the file: n bytes, after skip others. */
static int for_ranges(struct reading *r, int64_t from, int64_t n,
                      int (*fn)(struct reading *r, const struct zr_extent *x, int64_t skip, int64_t n))
{
    const struct zr_source *s = r->s;
    int64_t done = 0;
    int err = 0;
    for (int64_t i = find_range(s, from); !err && done < n; i++) {
        int64_t skip = from + done - s->at[i], part = zr_min(n - done, s->at[i + 1] - s->at[i] - skip);
        ZR_ASSERT(i < s->x->n && skip >= 0 && part >= 0);
        if (part)
            err = fn(r, &s->x->list[i], skip, part);
        done += part;
    }
    return err;
}

/* Returns how many masters have bytes among n bytes that follow skip bytes. *first: the first of them. */
static int64_t masters_in(int64_t skip, int64_t n, int64_t *first)
{
    const int64_t size = sizeof(float);
    *first = skip / size;
    return (skip + n + size - 1) / size - *first;
}

/* Copies to staging on the stream. Weights come first, and then their remainders. */
static int stage_range(struct reading *r, const struct zr_extent *x, int64_t skip, int64_t n)
{
    const struct zr_device_ops *d = r->s->dev->ops;
    int64_t first, n_masters = masters_in(skip, n, &first), half = sizeof(uint16_t);
    if (!x->weights) {
        ZR_TRY(d->copy(r->s->stream, r->staged, x->at + skip, n));
        r->staged += n;
        return 0;
    }
    ZR_TRY(d->copy(r->s->stream, r->staged, x->weights + first * half, n_masters * half));
    r->staged += n_masters * half;
    ZR_TRY(d->copy(r->s->stream, r->staged, x->at + first * half, n_masters * half));
    r->staged += n_masters * half;
    return 0;
}

/* Writes n bytes of masters that are made of weights and 16 more bits each, after the first skip bytes. */
static void join(char *dst, const char *weights, const char *more, int64_t skip, int64_t n)
{
    for (int64_t i = 0, part; n > 0; i++, n -= part, skip = 0) {
        uint16_t weight, remainder;
        memcpy(&weight, weights + i * 2, sizeof weight);
        memcpy(&remainder, more + i * 2, sizeof remainder);
        float master = zr_join_master(weight, remainder);
        part = zr_min((int64_t)sizeof master - skip, n);
        if (part == sizeof master)
            memcpy(dst, &master, sizeof master);
        else
            memcpy(dst, (const char *)&master + skip, (size_t)part);
        dst += part;
    }
}

/* Writes a part of a range to its place, from staging or from memory. */
static int put_range(struct reading *r, const struct zr_extent *x, int64_t skip, int64_t n)
{
    int64_t first, n_masters = masters_in(skip, n, &first), half = sizeof(uint16_t);
    if (!x->weights) {
        memcpy(r->dst, r->staged ? r->staged : x->at + skip, (size_t)n);
        r->staged += r->staged ? n : 0;
    } else {
        const char *weights = r->staged ? r->staged : x->weights + first * half;
        const char *more = r->staged ? r->staged + n_masters * half : x->at + first * half;
        join(r->dst, weights, more, skip % (int64_t)sizeof(float), n);
        r->staged += r->staged ? 2 * n_masters * half : 0;
    }
    r->dst += n;
    return 0;
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
    struct reading stage = {s, NULL, s->staging}, put = {s, dst, s->staging};
    if (!s->dev)
        return for_ranges(&put, from, n, put_range);
    /* One copy at a time: a copy from the device is much faster than the disk. */
    uv_mutex_lock(&s->lock);
    int err = zr_thread_begin(s->dev); /* any of the threads that save */
    if (!err)
        err = for_ranges(&stage, from, n, stage_range);
    int waited = s->dev->ops->stream_sync(s->stream);
    err = err ? err : waited;
    if (!err)
        for_ranges(&put, from, n, put_range);
    uv_mutex_unlock(&s->lock);
    return err;
}
