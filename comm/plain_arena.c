/* SPDX-License-Identifier: Apache-2.0 */
/* plain_arena.c: see plain_arena.h. */
#include "comm/plain_arena.h"

#include <stdlib.h>

struct plain_arena {
    struct zr_arena base;
    struct zr_device *dev;
};

static void free_plain_arena(struct zr_arena *a)
{
    struct plain_arena *own = (struct plain_arena *)a;
    own->dev->ops->free(own->dev, a->base, a->bytes);
    free(own);
}

int zr_plain_zero(struct zr_device *dev, void *at, int64_t bytes)
{
    struct zr_stream *s = NULL;
    int err = dev->ops->stream_open(dev, ZR_STREAM_QUEUE, "arena", NULL, &s);
    if (!err)
        err = dev->ops->zero(s, at, bytes);
    if (!err)
        err = dev->ops->stream_sync(s);
    dev->ops->stream_close(s);
    return err;
}

int zr_plain_arena(struct zr_device *dev, const char *who, int64_t bytes, struct zr_arena **out)
{
    void *at;
    if (bytes <= 0)
        return zr_fail(ZR_ERR_ARG, "%s: the arena is %lld bytes: more than 0 are allowed", who,
                       (long long)bytes);
    struct plain_arena *a = calloc(1, sizeof *a);
    if (!a)
        return zr_fail(ZR_ERR_NOMEM, "%s: no memory for an arena of %lld bytes", who, (long long)bytes);
    int err = dev->ops->alloc(dev, bytes, &at);
    if (err) {
        free(a);
        return err;
    }
    a->base = (struct zr_arena){.free = free_plain_arena, .base = at, .bytes = bytes, .n_held = 1};
    a->dev = dev;
    err = zr_plain_zero(dev, at, bytes);
    if (err)
        zr_arena_drop(&a->base);
    else
        *out = &a->base;
    return err;
}
