/* SPDX-License-Identifier: Apache-2.0 */
/* seg_ring.c: see seg_ring.h. */
#include "comm/seg_ring.h"

#include <sys/mman.h>

enum { RING_BYTES = ZR_RING_ENTRIES * sizeof(union zr_any_seg) };

/* Most programs use a small part of the ring. Pages of their own take no memory until they are written. */
bool zr_seg_ring_open(struct zr_seg_ring *r)
{
    void *at = mmap(NULL, RING_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED)
        return false;
    *r = (struct zr_seg_ring){.entry = at};
    pthread_mutex_init(&r->lock, NULL);
    pthread_cond_init(&r->moved, NULL);
    return true;
}

void zr_seg_ring_close(struct zr_seg_ring *r)
{
    pthread_cond_destroy(&r->moved);
    pthread_mutex_destroy(&r->lock);
    munmap(r->entry, RING_BYTES);
}

/* From which on n entries have room. Who has not asked zr_seg_ring_has_room waits while they have none. */
static uint64_t ring_room(struct zr_seg_ring *r, uint64_t n)
{
    uint64_t at = r->put % ZR_RING_ENTRIES;
    uint64_t put = r->put + (at + n > ZR_RING_ENTRIES ? ZR_RING_ENTRIES - at : 0); /* never around the end */
    pthread_mutex_lock(&r->lock);
    while (put + n - r->got > ZR_RING_ENTRIES)
        pthread_cond_wait(&r->moved, &r->lock);
    pthread_mutex_unlock(&r->lock);
    return put;
}

/* Entries that lists of places take. */
static uint64_t entries_of_lists(int size, uint64_t n_lists)
{
    const uint64_t each = sizeof(union zr_any_seg), places = (uint64_t)size + 1;
    return (n_lists * places * sizeof(int64_t) + each - 1) / each;
}

static bool has_list(enum zr_op op, const void *seg, int i)
{
    const struct zr_gather_seg *g = seg;
    const struct zr_reduce_seg *r = seg;
    return (op == ZR_OP_ALL_GATHER ? g[i].cut.at : r[i].cut.at) != NULL;
}

/* Returns where its cut is, of the copy. */
static struct zr_cut *copy_seg(union zr_any_seg *to, enum zr_op op, const void *seg, int i)
{
    if (op == ZR_OP_ALL_GATHER) {
        to->gather = ((const struct zr_gather_seg *)seg)[i];
        return &to->gather.cut;
    }
    to->reduce = ((const struct zr_reduce_seg *)seg)[i];
    return &to->reduce.cut;
}

int zr_seg_ring_keep(struct zr_seg_ring *r, const char *who, int size, enum zr_op op, const void *seg, int n,
                     struct zr_kept_segs *out)
{
    int n_lists = 0;
    for (int i = 0; i < n; i++)
        n_lists += has_list(op, seg, i);
    const uint64_t all = (uint64_t)n + entries_of_lists(size, (uint64_t)n_lists);
    if (all > ZR_RING_SEGS)
        return zr_fail(ZR_ERR_ARG,
                       "%s %s: %d of %d segments have their own places: there is room for %d segments, but "
                       "they take that of %llu",
                       who, zr_op_name(op), n_lists, n, ZR_RING_SEGS, (unsigned long long)all);
    uint64_t put = ring_room(r, all);
    union zr_any_seg *to = &r->entry[put % ZR_RING_ENTRIES];
    int64_t *places = (int64_t *)&to[n];
    for (int i = 0; i < n; i++)
        places += zr_cut_keep(copy_seg(&to[i], op, seg, i), size, places);
    *out = (struct zr_kept_segs){to, put + all};
    return 0;
}

/* At most one operation skips the end of the ring, less than it takes. */
bool zr_seg_ring_has_room(struct zr_seg_ring *r, int size, int n_ops, int n_seg)
{
    uint64_t each = (uint64_t)n_seg + entries_of_lists(size, (uint64_t)n_seg);
    if (each > ZR_RING_SEGS)
        each = ZR_RING_SEGS;
    pthread_mutex_lock(&r->lock);
    uint64_t queued = r->put - r->got;
    pthread_mutex_unlock(&r->lock);
    return queued == 0 || (uint64_t)(n_ops + 1) * each <= ZR_RING_ENTRIES - queued;
}

void zr_seg_ring_free(struct zr_seg_ring *r, uint64_t end)
{
    pthread_mutex_lock(&r->lock);
    r->got = end;
    pthread_cond_signal(&r->moved);
    pthread_mutex_unlock(&r->lock);
}
