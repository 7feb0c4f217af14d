/* SPDX-License-Identifier: Apache-2.0 */
/* pipe.c: moves activations between neighbouring pipeline stages, and their gradients back.
 *
 * A rank sends activations to the rank of the next stage, which sends their gradients back. Two neighbours
 * form a pair with a communicator and a stream. Stages are dealt to the ranks in turn. So with several stages
 * per rank the pairs form a ring, and a pair moves the messages of several stages. Both ranks have an arena
 * with the same slots: for each pair and each stage of a rank, some slots for messages onward and some for
 * messages back. A message is in the same slot on both sides, where the sender's model writes it and the
 * receiver's model reads it. So a message is copied once, and the model's thread waits only for the messages
 * that it needs next:
 *
 *   done[slot]    compute -> pair   sender: the model has written the slot; receiver: it needs it no more
 *   moved[slot]   pair -> compute   sender: the slot may be written again; receiver: the message is there
 *
 * A rank that has all stages reads from a slot what it wrote there, and nothing moves.
 *
 * The schedule (shard/pipeline/) gives the order of the messages, which is the same on both sides. */
#include "shard/engine/internal.h"
#include "shard/engine/issue.h"

#include <xxhash.h>

struct zr_pipe {
    struct zr_pipe_room room;
    /* memory of all slots */
    char *base;
    /* (n_events) done and moved of each slot */
    struct zr_event **all;
    int32_t n_events;
};

/* ---- slots ---- */

static int32_t slots_of(const struct zr_pipe_room *r, enum zr_pipe_way way)
{
    return way == ZR_PIPE_ONWARD ? r->n_onward : r->n_back;
}

/* Returns how many regions for pairs the arena has. A rank uses two, which must differ from those of its
 * neighbours' other pairs. A ring of an odd number of ranks needs three. */
static int32_t pair_regions(const struct zr_pipe_room *r)
{
    if (r->pp == 1)
        return 1;
    return r->per_rank > 1 && r->pp % 2 ? 3 : 2;
}

/* Returns the region of the pair whose earlier stage is on rank `pair` of the pipeline. */
static int32_t region_of_pair(const struct zr_pipe_room *r, int32_t pair)
{
    return pair == r->pp - 1 ? pair_regions(r) - 1 : pair % 2;
}

/* Counts the slots of all pairs. */
static int64_t count_slots(const struct zr_pipe_room *r)
{
    return (int64_t)pair_regions(r) * r->per_rank * (r->n_onward + r->n_back);
}

int64_t zr_pipe_room_bytes(const struct zr_pipe_room *r)
{
    return count_slots(r) * r->slot_bytes;
}

/* Returns the number of the message's slot among the slots of all pairs. */
static int64_t slot_number(const struct zr_pipe_room *r, const struct zr_pipe_message *m)
{
    int64_t edge = (int64_t)region_of_pair(r, m->edge % r->pp) * r->per_rank + m->edge / r->pp;
    return edge * (r->n_onward + r->n_back) + (m->way == ZR_PIPE_ONWARD ? 0 : r->n_onward) +
           m->micro_batch % slots_of(r, m->way);
}

static int64_t slot_at(const struct zr_pipe_room *r, const struct zr_pipe_message *m)
{
    return slot_number(r, m) * r->slot_bytes;
}

static enum zr_role role_of(const struct zr_engine *e, const struct zr_pipe_message *m)
{
    int32_t pair = m->edge % e->pp;
    ZR_ASSERT(pair == e->pp_at || (pair + 1) % e->pp == e->pp_at);
    if (pair == e->pp - 1)
        return ZR_ROLE_CLOSING_PAIR;
    return pair % 2 ? ZR_ROLE_ODD_PAIR : ZR_ROLE_EVEN_PAIR;
}

static struct zr_event *event_of(const struct zr_engine *e, const struct zr_pipe_message *m, bool moved)
{
    return e->m.pipe->all[2 * slot_number(&e->m.pipe->room, m) + moved];
}

void *zr_engine_pipe_at(const struct zr_engine *e, const struct zr_pipe_message *m)
{
    return e->m.pipe->base + slot_at(&e->m.pipe->room, m);
}

int64_t zr_pipe_slot_number(const struct zr_engine *e, const void *slot)
{
    return ((const char *)slot - e->m.pipe->base) / e->m.pipe->room.slot_bytes;
}

/* ---- opening ---- */

int zr_pipe_open(struct zr_engine *e, const struct zr_pipe_room *room)
{
    if (e->pp == 1 && room->per_rank < 2)
        return 0;
    int32_t n = (int32_t)(2 * count_slots(room));
    ZR_TABLE(e, e->m.pipe, 1);
    struct zr_pipe *p = e->m.pipe;
    ZR_TABLE(e, p->all, n);
    p->room = *room;
    for (; p->n_events < n; p->n_events++)
        ZR_TRY(e->dev->ops->event_open(e->dev, &p->all[p->n_events]));
    for (int i = 0; i < ZR_PAIR_ROLES; i++) {
        static const char *const name[ZR_PAIR_ROLES] = {"zero-even-pair", "zero-odd-pair", "zero-closing"};
        const struct zr_comm *c = e->role[ZR_ROLE_EVEN_PAIR + i].comm;
        if (c && c->group.size > 1)
            ZR_TRY(e->dev->ops->stream_open(e->dev, ZR_STREAM_QUEUE, name[i], NULL, &e->pair_stream[i]));
    }
    zr_roles_streams(e);
    return 0;
}

int zr_pipe_allocate(struct zr_engine *e)
{
    static const enum zr_role pairs[] = {ZR_ROLE_EVEN_PAIR, ZR_ROLE_ODD_PAIR, ZR_ROLE_CLOSING_PAIR};
    const int64_t bytes = e->plan->pipe_bytes;
    void *base;
    if (!bytes)
        return 0;
    if (e->pp > 1)
        return zr_engine_open_arena(e, pairs, ZR_PAIR_ROLES, bytes, &e->m.pipe->base);
    /* A rank that has all stages needs no communicator. */
    ZR_TRY(e->dev->ops->alloc(e->dev, bytes, &base));
    e->m.pipe->base = base;
    return 0;
}

void zr_pipe_close(struct zr_engine *e)
{
    if (!e->m.pipe)
        return;
    for (int i = 0; i < ZR_PAIR_ROLES; i++)
        e->dev->ops->stream_close(e->pair_stream[i]);
    for (int32_t i = 0; i < e->m.pipe->n_events; i++)
        e->dev->ops->event_close(e->m.pipe->all[i]);
    if (e->m.pipe->base && e->pp == 1)
        e->dev->ops->free(e->dev, e->m.pipe->base, e->plan->pipe_bytes);
    e->m.pipe = NULL;
}

enum zr_event_class zr_pipe_event_class(const struct zr_engine *e, const struct zr_event *event)
{
    for (int32_t i = 0; e->m.pipe && i < e->m.pipe->n_events; i++)
        if (e->m.pipe->all[i] == event)
            return i % 2 ? ZR_EVENT_PIPE_MOVED : ZR_EVENT_PIPE_DONE;
    return ZR_EVENT_ANY;
}

/* ---- messages ---- */

/* Both sides compute the same tag, so a message that is not the expected one is found before it moves. */
static struct zr_tag tag_of(const struct zr_engine *e, const struct zr_pipe_message *m, int64_t bytes)
{
    const int64_t words[] = {m->way, m->micro_batch, m->edge, bytes};
    return (struct zr_tag){.unit = -1,
                           .step = zr_step_number(e),
                           .call_hash = XXH3_64bits_withSeed(words, sizeof words, e->m.world_calls)};
}

/* The pair's stream waits until the model is done with the slot. The event tells the model's stream that the
 * message has moved. */
static int move_message(struct zr_engine *e, const struct zr_pipe_message *m, bool sends)
{
    const enum zr_role role = role_of(e, m);
    struct zr_stream *s = e->role[role].stream;
    const int64_t bytes = e->m.pipe->room.slot_bytes - e->m.pipe->room.guard_bytes;
    const struct zr_tag tag = tag_of(e, m, bytes);
    int here = e->role[role].comm->group.rank, sender = sends ? here : 1 - here;
    ZR_TRY(e->dev->ops->stream_wait(s, event_of(e, m, false)));
    ZR_TRY(zr_role_broadcast(e, role, slot_at(&e->m.pipe->room, m), bytes, sender, &tag));
    return e->dev->ops->event_record(event_of(e, m, true), s);
}

int zr_engine_pipe_move(struct zr_engine *e, const struct zr_pipe_message *m, bool sends)
{
    return zr_engine_note(e, move_message(e, m, sends));
}

int zr_engine_pipe_await(struct zr_engine *e, const struct zr_pipe_message *m)
{
    int err = zr_engine_note(e, zr_model_wait_for(e, event_of(e, m, true)));
    return err ? err : zr_engine_status(e);
}

int zr_engine_pipe_done(struct zr_engine *e, const struct zr_pipe_message *m)
{
    return zr_engine_note(e, e->dev->ops->event_record(event_of(e, m, false), e->compute));
}
