/* SPDX-License-Identifier: Apache-2.0 */
/* op_queue.c: puts operations on a stream, runs them, and keeps their segments in a ring. */
#include "comm/op_queue.h"
#include "comm/flight.h"

#include <string.h>
#include <sys/mman.h>

enum { RING_BYTES = ZR_RING_ENTRIES * sizeof(union zr_any_seg) };

/* Argument of the call on the stream. */
struct queued {
    struct zr_op_queue *q;
    struct zr_comm_op op;
    /* End of the operation's entries in the ring. All before it are free after the operation. */
    uint64_t end;
};
_Static_assert(sizeof(struct queued) <= ZR_CALL_BYTES, "an operation travels in a call");

/* Most programs use a small part of the ring. Pages from mmap take no memory until they are written. */
bool zr_op_queue_open(struct zr_op_queue *q, struct zr_comm *c, struct zr_device *dev)
{
    void *at = mmap(NULL, RING_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED)
        return false;
    q->comm = c;
    q->dev = dev;
    q->entry = at;
    pthread_mutex_init(&q->lock, NULL);
    pthread_cond_init(&q->freed_some, NULL);
    return true;
}

void zr_op_queue_close(struct zr_op_queue *q)
{
    pthread_cond_destroy(&q->freed_some);
    pthread_mutex_destroy(&q->lock);
    munmap(q->entry, RING_BYTES);
}

/* ---- segments ---- */

/* Finds the index from which n entries are free. Waits if there is no room, which zr_op_queue_has_room
 * predicts. */
static uint64_t find_room(struct zr_op_queue *q, uint64_t n)
{
    uint64_t at = q->n_taken % ZR_RING_ENTRIES;
    /* Entries never wrap around the end. */
    uint64_t put = q->n_taken + (at + n > ZR_RING_ENTRIES ? ZR_RING_ENTRIES - at : 0);
    pthread_mutex_lock(&q->lock);
    while (put + n - q->n_freed > ZR_RING_ENTRIES)
        pthread_cond_wait(&q->freed_some, &q->lock);
    pthread_mutex_unlock(&q->lock);
    return put;
}

/* Number of entries that lists of places take. */
static uint64_t entries_of_lists(const struct zr_op_queue *q, uint64_t n_lists)
{
    const uint64_t each = sizeof(union zr_any_seg), places = (uint64_t)q->comm->group.size + 1;
    return (n_lists * places * sizeof(int64_t) + each - 1) / each;
}

/* Copies the segments of an operation, and their lists, into the ring. */
static int keep_segments(struct zr_op_queue *q, struct queued *k)
{
    const struct zr_comm *c = q->comm;
    const int n = (int)k->op.post.n_seg, n_lists = zr_op_lists(&k->op);
    const uint64_t all = (uint64_t)n + entries_of_lists(q, (uint64_t)n_lists);
    if (all > ZR_RING_SEGS)
        return zr_fail(ZERO_ERR_ARG,
                       "%s %s: %d of %d segments have their own places: there is room for %d segments, but "
                       "they take that of %llu",
                       zr_role_name(c->role), zr_op_name((enum zr_op)k->op.post.op), n_lists, n, ZR_RING_SEGS,
                       (unsigned long long)all);
    uint64_t put = find_room(q, all);
    union zr_any_seg *to = &q->entry[put % ZR_RING_ENTRIES];
    zr_op_keep(&k->op, c->group.size, to, (int64_t *)&to[n]);
    k->end = put + all;
    return 0;
}

/* At most one operation skips the end of the ring, and skips fewer entries than it takes. */
bool zr_op_queue_has_room(struct zr_op_queue *q, int n_ops, int n_seg)
{
    uint64_t each = (uint64_t)n_seg + entries_of_lists(q, (uint64_t)n_seg);
    if (each > ZR_RING_SEGS)
        each = ZR_RING_SEGS;
    pthread_mutex_lock(&q->lock);
    uint64_t queued = q->n_taken - q->n_freed;
    pthread_mutex_unlock(&q->lock);
    return queued == 0 || (uint64_t)(n_ops + 1) * each <= ZR_RING_ENTRIES - queued;
}

static void free_segments(struct zr_op_queue *q, uint64_t end)
{
    pthread_mutex_lock(&q->lock);
    q->n_freed = end;
    pthread_cond_signal(&q->freed_some);
    pthread_mutex_unlock(&q->lock);
}

/* ---- operations ---- */

static void run_in_order(struct zr_op_queue *q, const struct zr_comm_op *op)
{
    if (atomic_exchange(&q->run_seq, op->post.seq) + 1 != op->post.seq) {
        q->fail(q->comm, ZERO_ERR_ORDER,
                "operations of one communicator were put on streams that ran them out of order");
        return;
    }
    zr_flight_start(&op->mark);
    if (q->move(q->comm, op) == 0)
        zr_comm_done(q->comm, op);
}

static void run_queued(void *arg)
{
    const struct queued *k = arg;
    if (!zr_first_code(k->q->comm->failure))
        run_in_order(k->q, &k->op);
    if (k->op.post.n_seg)
        free_segments(k->q, k->end);
    atomic_store(&k->q->over_seq, k->op.post.seq);
}

int zr_op_queue_put(struct zr_op_queue *q, struct zr_stream *s, const struct zr_comm_op *op)
{
    struct queued k = {.q = q, .op = *op, .end = q->n_taken};
    int err = op->post.n_seg ? keep_segments(q, &k) : 0;
    if (err)
        return err;
    uint64_t put = q->n_taken;
    q->n_taken = k.end;
    err = q->dev->ops->call(s, run_queued, &k, sizeof k);
    if (err)
        q->n_taken = put;
    return err;
}
