/* SPDX-License-Identifier: Apache-2.0 */
/* state_parts.c: masters and states in a file (states = file). A part of the file is in memory while it is
 * updated, read or written. There are two buffers, so that the next part is read, and the one before it
 * written, while a part is updated:
 *
 *   states stream   read 0 | read 1 |          write 0 | read 2 |          write 1 | ...
 *   reduce stream            update 0          update 1           ...
 *
 * Reads and writes are in the order of one stream. So a part is read after it was written, and a buffer is
 * filled after it was written. Only the update and the states stream wait for each other. */
#include "kernels/asserts.h"
#include "shard/engine/issue.h"

struct zr_parts {
    struct zr_state_io io;
    char *buffer[2];
    /* Parts that were requested from the file, and those that were updated; both since the start. Part number
     * n is in buffer n % 2. */
    int64_t n_read, n_used;
    /* The part whose masters and states have an address now, in the buffer `at`. at NULL: none. */
    struct zr_state_part open;
    char *at;
    /* zr_part_use: it is to be written when another part is used. */
    bool is_changed;
};

/* ---- opening and closing ---- */

int zr_parts_open(struct zr_engine *e, const struct zr_state_io *io)
{
    const struct zr_device_ops *d = e->dev->ops;
    if (!e->plan->file_bytes)
        return 0;
    ZR_TABLE(e, e->i.parts, 1);
    e->i.parts->io = *io;
    return d->stream_open(e->dev, ZR_STREAM_QUEUE, "zero-states", NULL, &e->states_stream);
}

int zr_parts_allocate(struct zr_engine *e)
{
    for (int b = 0; e->i.parts && b < 2; b++) {
        void *at = NULL;
        ZR_TRY(e->dev->ops->host_alloc(e->dev, e->plan->part_bytes, &at));
        e->i.parts->buffer[b] = at;
        e->m.allocated[ZR_MEM_STATE_BUFFERS] += e->plan->part_bytes;
    }
    return 0;
}

void zr_parts_close(struct zr_engine *e)
{
    e->dev->ops->stream_close(e->states_stream);
    for (int b = 0; e->i.parts && b < 2; b++)
        if (e->i.parts->buffer[b])
            e->dev->ops->host_free(e->dev, e->i.parts->buffer[b], e->plan->part_bytes);
}

/* ---- addresses ---- */

/* Returns the offset in the part of a master, a state or a scale of element `first`. The last part of a
 * tensor that is not padded may have an odd number of codes. Then a byte follows them, for which there is
 * room. */
static int64_t place_in_part(const struct zr_state_part *part, int kind, int64_t first)
{
    const struct zr_flat *f = part->flat;
    const int64_t size = sizeof(uint16_t);
    if (kind >= ZR_SCALE(0))
        return part->state_at[kind - ZR_SCALE(0)] + zr_round_up(part->n * zr_plan_state_size(f), size) +
               (first - part->first) / ZR_Q8_BLOCK * size;
    return kind == ZR_VALUE_MASTER ? part->master_at + (first - part->first) * zr_plan_master_size(f)
                                   : part->state_at[kind] + (first - part->first) * zr_plan_state_size(f);
}

char *zr_part_at(const struct zr_engine *e, const struct zr_flat *f, int kind, int64_t first)
{
    const struct zr_parts *parts = e->i.parts;
    const struct zr_state_part *part = &parts->open;
    ZR_ASSERT(parts->at && part->flat == f && first >= part->first && first < part->first + part->n);
    char *at = parts->at + place_in_part(part, kind, first);
    ZR_ASSERT(kind < ZR_SCALE(0) || (uintptr_t)at % sizeof(uint16_t) == 0);
    return at;
}

/* Finds the part of the element. Returns false if the flat has nothing in the file. */
static bool part_with(const struct zr_engine *e, const struct zr_flat *f, int64_t first,
                      struct zr_state_part *part)
{
    struct zr_span kept = zr_engine_kept(e, f);
    return zr_plan_part(e->plan, f, kept, (first - kept.first) / e->plan->part_elems, part);
}

bool zr_part_has(const struct zr_engine *e, const struct zr_flat *f, int kind)
{
    return e->i.parts && (kind >= 0 || (kind == ZR_VALUE_MASTER && zr_plan_master_size(f)));
}

int64_t zr_part_place(const struct zr_engine *e, const struct zr_flat *f, int kind, int64_t first, int64_t *n)
{
    struct zr_state_part part = {0};
    bool found = part_with(e, f, first, &part);
    ZR_ASSERT(found && zr_part_has(e, f, kind));
    (void)found;
    *n = zr_min(*n, part.first + part.n - first);
    return part.at + place_in_part(&part, kind, first);
}

/* ---- between steps ---- */

int zr_part_leave(struct zr_engine *e)
{
    struct zr_parts *parts = e->i.parts;
    if (!parts)
        return 0;
    bool is_changed = parts->is_changed;
    const char *at = parts->at;
    parts->is_changed = false;
    parts->at = NULL;
    return is_changed
               ? zr_engine_note(e, parts->io.write(parts->io.arg, at, parts->open.bytes, parts->open.at))
               : 0;
}

int zr_part_use(struct zr_engine *e, const struct zr_flat *f, int64_t first, bool changes, int64_t *n)
{
    struct zr_parts *parts = e->i.parts;
    struct zr_state_part part;
    if (!parts || !part_with(e, f, first, &part))
        return 0;
    *n = zr_min(*n, part.first + part.n - first);
    if (!parts->at || parts->open.at != part.at) {
        ZR_TRY(zr_engine_drain(e)); /* writes back what the buffer has */
        ZR_TRY(zr_engine_note(e, parts->io.read(parts->io.arg, parts->buffer[0], part.bytes, part.at)));
        parts->open = part;
        parts->at = parts->buffer[0];
    }
    parts->is_changed |= changes;
    return 0;
}

/* ---- in a step ---- */

/* One transfer, on the states stream. */
struct transfer {
    struct zr_engine *e;
    char *buffer;
    int64_t bytes, at;
    bool writes;
};
_Static_assert(sizeof(struct transfer) <= ZR_CALL_BYTES, "must travel on a stream");

/* A failure ends the context. On a GPU this is a host function, which may not call CUDA. There the failure is
 * kept for zr_engine_status. */
static void run_transfer(void *arg)
{
    const struct transfer *t = arg;
    struct zr_engine *e = t->e;
    const struct zr_state_io *io = &e->i.parts->io;
    if (zr_engine_has_failed(e) || zr_first_code(&e->s.transfer_failure))
        return;
    int err = t->writes ? io->write(io->arg, t->buffer, t->bytes, t->at)
                        : io->read(io->arg, t->buffer, t->bytes, t->at);
    if (err && e->dev->ops->host_memory)
        zr_engine_fail(e, err, zr_error_text());
    else if (err)
        zr_first_keep(&e->s.transfer_failure, err, zr_error_text());
}

static int put_transfer(struct zr_engine *e, const struct zr_state_part *part, int64_t number, bool writes)
{
    const struct transfer t = {e, e->i.parts->buffer[number % 2], part->bytes, part->at, writes};
    const struct zr_access used = {t.buffer, t.bytes, !writes};
    zr_declare(e->dev, e->states_stream, &used, 1);
    return e->dev->ops->call(e->states_stream, run_transfer, &t, sizeof t);
}

int zr_part_read_ahead(struct zr_engine *e, const struct zr_state_part *part)
{
    int b = (int)(e->i.parts->n_read % 2);
    ZR_TRY(put_transfer(e, part, e->i.parts->n_read++, false));
    return e->dev->ops->event_record(e->ev.states_read[b], e->states_stream);
}

bool zr_next_part(const struct zr_engine *e, int32_t unit, int32_t *flat, int64_t *k,
                  struct zr_state_part *part)
{
    int32_t n;
    const struct zr_flat *f = zr_unit_flats(e, unit, &n);
    for (; *flat < n; ++*flat, *k = 0)
        if (f[*flat].trainable && zr_plan_part(e->plan, &f[*flat], zr_engine_kept(e, &f[*flat]), *k, part))
            return true;
    return false;
}

int zr_parts_read_ahead(struct zr_engine *e, int32_t unit)
{
    struct zr_state_part part;
    int32_t flat = 0;
    int64_t k = 0;
    if (!e->i.parts || unit < 0 || !zr_next_part(e, unit, &flat, &k, &part))
        return 0;
    return zr_part_read_ahead(e, &part);
}

int zr_part_begin(struct zr_engine *e, const struct zr_state_part *part)
{
    struct zr_parts *parts = e->i.parts;
    int b = (int)(parts->n_used % 2);
    if (parts->n_read == parts->n_used)
        ZR_TRY(zr_part_read_ahead(e, part));
    ZR_ASSERT(!parts->is_changed);
    parts->open = *part;
    parts->at = parts->buffer[b];
    return e->dev->ops->stream_wait(e->reduce_stream, e->ev.states_read[b]);
}

int zr_part_end(struct zr_engine *e)
{
    struct zr_parts *parts = e->i.parts;
    const struct zr_device_ops *d = e->dev->ops;
    int b = (int)(parts->n_used % 2);
    parts->at = NULL;
    ZR_TRY(d->event_record(e->ev.states_updated[b], e->reduce_stream));
    ZR_TRY(d->stream_wait(e->states_stream, e->ev.states_updated[b]));
    return put_transfer(e, &parts->open, parts->n_used++, true);
}

/* ---- room on the streams ---- */

int64_t zr_parts_of(const struct zr_engine *e, int32_t unit)
{
    struct zr_state_part part;
    int64_t n = 0, k = 0;
    for (int32_t flat = 0; e->i.parts && zr_next_part(e, unit, &flat, &k, &part); k++)
        n++;
    return n;
}

int64_t zr_parts_room(const struct zr_engine *e, int32_t unit)
{
    /* of each part: read it, wait for its update, write it; and a read ahead */
    return 3 * zr_parts_of(e, unit) + 1;
}
