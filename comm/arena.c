/* SPDX-License-Identifier: Apache-2.0 */
/* arena.c: allocates one rank's memory, on its device or as a file that other ranks map. */
#include "comm/arena.h"
#include "comm/shared_memory.h"
#include "kernels/alloc.h"

#include <stdlib.h>
#include <unistd.h>

/* An arena with its memory. It is shared, or plain device memory. */
struct arena {
    struct zr_arena base;
    /* NULL: the arena is shared. */
    struct zr_device *dev;
    /* -1: the arena is plain. */
    int fd;
};

static void free_arena(struct zr_arena *a)
{
    struct arena *arena = (struct arena *)a;
    if (arena->dev && a->base)
        arena->dev->ops->free(arena->dev, a->base, a->bytes);
    else if (!arena->dev)
        zr_shared_unmap(a->base, a->bytes);
    if (arena->fd >= 0)
        close(arena->fd);
    free(arena);
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

/* Makes an arena without memory. */
static int new_arena(struct zr_device *dev, const char *who, int64_t bytes, struct arena **out)
{
    ZR_TRY(ZR_ZALLOC(*out, 1, "%s's arena of %lld bytes", who, (long long)bytes));
    struct arena *a = *out;
    a->base = (struct zr_arena){.free = free_arena, .bytes = bytes, .n_held = 1};
    a->dev = dev;
    a->fd = -1;
    return 0;
}

/* Hands an arena out, or drops it after a failure. */
static int give(struct arena *a, int err, struct zr_arena **out)
{
    if (err)
        zr_arena_drop(&a->base);
    else
        *out = &a->base;
    return err;
}

int zr_plain_arena(struct zr_device *dev, const char *who, int64_t bytes, struct zr_arena **out)
{
    struct arena *a;
    void *at = NULL;
    if (bytes <= 0)
        return zr_fail(ZERO_ERR_ARG, "%s: the arena is %lld bytes: more than 0 are allowed", who,
                       (long long)bytes);
    int err = new_arena(dev, who, bytes, &a);
    if (err)
        return err;
    err = dev->ops->alloc(dev, bytes, &at);
    a->base.base = err ? NULL : at;
    return give(a, err ? err : zr_plain_zero(dev, at, bytes), out);
}

int zr_shared_arena(const char *who, const char *name, int64_t bytes, struct zr_arena **out)
{
    struct arena *a;
    int err = new_arena(NULL, who, bytes, &a);
    return err ? err : give(a, zr_shared_make(name, bytes, &a->fd, &a->base.base), out);
}

int zr_arena_fd(const struct zr_arena *a)
{
    return ((const struct arena *)a)->fd;
}
