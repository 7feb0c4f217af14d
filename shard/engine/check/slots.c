/* SPDX-License-Identifier: Apache-2.0 */
/* slots.c: checks what the model does in the slots between pipeline stages (cfg.debug.check).
 *
 *   a.out   is filled with NaN before an action gets it (bytes of 0xff, which are NaN in every dtype). So a
 *           stage that reads more than was written reads NaN. Extra bytes follow, so that a write beyond
 *           activation_bytes is seen and does not reach another message. What was written must be unchanged
 *           when the slot is given again.
 *   a.in    is hashed when an action gets it, and must be unchanged at the action's end. That of a forward
 *           must stay so until its backward, which has it as a.kept, is over.
 *
 * The last byte that is not 0xff shows how much a micro-batch has written. On a GPU the host looks at a copy
 * of the slot, for which it waits. For the model's thread only. */
#include "kernels/alloc.h"
#include "shard/engine/check/observers.h"
#include "shard/engine/internal.h"
#include "shard/engine/issue.h"
#include "shard/engine/walk.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

/* Contents of a slot when the model last got it, or gave it back. */
struct slot_contents {
    uint64_t hash;
    /* the slot must not change until it is given again or freed */
    bool known;
    /* the model gave it back */
    bool gave;
    /* the action that got it or gave it back */
    struct zr_pipe_action by;
};

struct slot_check {
    struct zr_observer o;
    struct zr_pipe_room room;
    /* the action that is under way */
    struct zr_walk_slots now;
    bool evaluates;
    /* (stages of a rank, forward and back) bytes that the first micro-batch wrote, -1: none has written yet;
     * and its number. said: other micro-batches that write another size were reported. */
    int64_t *first_bytes;
    int32_t *first_micro;
    bool said;
    /* (slot_bytes) a slot's content; NULL: the host reads and writes slots themselves */
    unsigned char *copy;
    /* (slots) */
    struct slot_contents contents[];
};

/* ---- contents of slots ---- */

static struct slot_contents *contents_of(struct slot_check *c, const void *slot)
{
    return slot ? &c->contents[zr_pipe_slot_number(c->o.e, slot)] : NULL;
}

/* Copies to or from a slot in the order of the model's stream, and waits for it. */
static int copy_slot(struct slot_check *c, void *to, const void *from)
{
    struct zr_engine *e = c->o.e;
    ZR_TRY(e->dev->ops->copy(e->compute, to, from, c->room.slot_bytes));
    ZR_TRY(e->dev->ops->event_record(e->ev.drained, e->compute));
    return zr_engine_wait(e, e->ev.drained);
}

/* Points *content at the slot's content, until the next call. */
static int look_at_slot(struct slot_check *c, const void *slot, const unsigned char **content)
{
    *content = c->copy ? c->copy : slot;
    return c->copy ? zr_engine_note(c->o.e, copy_slot(c, c->copy, slot)) : 0;
}

static int fill_slot(struct slot_check *c, void *slot)
{
    memset(c->copy ? c->copy : slot, 0xff, (size_t)c->room.slot_bytes);
    return c->copy ? zr_engine_note(c->o.e, copy_slot(c, slot, c->copy)) : 0;
}

static int hash_slot(struct slot_check *c, const void *slot, uint64_t *hash)
{
    const unsigned char *content;
    ZR_TRY(look_at_slot(c, slot, &content));
    *hash = XXH3_64bits(content, (size_t)c->room.activation_bytes);
    return 0;
}

static int note_contents(struct slot_check *c, const void *slot, bool gave)
{
    struct slot_contents *h = contents_of(c, slot);
    *h = (struct slot_contents){.known = true, .gave = gave, .by = c->now.action};
    return hash_slot(c, slot, &h->hash);
}

/* Text such as "forward of micro-batch 3". */
struct action_text {
    char text[64];
};
static struct action_text text_of(const struct zr_pipe_action *a)
{
    struct action_text t;
    const char *phase = zr_phase_name(zr_pipe_phase(a->kind));
    snprintf(t.text, sizeof t.text, "%s of micro-batch %d", phase, a->micro_batch);
    return t;
}

static int compare_slot(struct slot_check *c, const void *slot, const char *name)
{
    const struct slot_contents *h = contents_of(c, slot);
    uint64_t hash;
    if (!h || !h->known)
        return 0;
    ZR_TRY(hash_slot(c, slot, &hash));
    if (hash == h->hash)
        return 0;
    const struct action_text now = text_of(&c->now.action), then = text_of(&h->by);
    if (h->gave)
        return zr_engine_note(c->o.e,
                              zr_fail(ZERO_ERR_ORDER,
                                      "check: the model's fault: the a.out of %s was changed after its "
                                      "zero_finish, which had begun to send it; found in %s",
                                      then.text, now.text));
    return zr_engine_note(c->o.e,
                          zr_fail(ZERO_ERR_ORDER,
                                  "check: the model's fault: it wrote to %s of %s, which it may only read, "
                                  "because others read it too: work on a copy",
                                  name, then.text));
}

/* ---- sizes of messages ---- */

static int64_t written_bytes(const struct slot_check *c, const unsigned char *slot)
{
    int64_t n = c->room.slot_bytes;
    while (n > 0 && slot[n - 1] == 0xff)
        n--;
    return zr_round_up(n, 4); /* a number may end with a byte of 0xff */
}

/* Warns once if micro-batches write different sizes, because the stage that reads them has to know. */
static void report_sizes(struct slot_check *c, int64_t n)
{
    const struct zr_pipe_action *a = &c->now.action;
    int32_t k = a->stage / c->o.e->pp * 2 + (a->kind != ZR_PIPE_FORWARD);
    if (c->first_bytes[k] < 0) {
        c->first_bytes[k] = n;
        c->first_micro[k] = a->micro_batch;
    } else if (c->first_bytes[k] != n && !c->said) {
        c->said = true;
        zr_warn(c->o.e->opt.log,
                "check: %s wrote %lld bytes to a.out, but that of micro-batch %d wrote %lld: a stage that "
                "reads more than was written finds NaN there",
                text_of(a).text, (long long)n, c->first_micro[k], (long long)c->first_bytes[k]);
    }
}

static int check_written(struct slot_check *c, const void *out)
{
    const unsigned char *content;
    ZR_TRY(look_at_slot(c, out, &content));
    const int64_t n = written_bytes(c, content), most = c->room.activation_bytes;
    if (n > zr_round_up(most, 4))
        return zr_engine_note(
            c->o.e, zr_fail(ZERO_ERR_ORDER,
                            "check: the model's fault: %s wrote %lld bytes to a.out, but activation_bytes is "
                            "%lld, and the bytes beyond belong to other micro-batches",
                            text_of(&c->now.action).text, (long long)n, (long long)most));
    report_sizes(c, n);
    return 0;
}

/* ---- the observer ---- */

static int slots_begin(struct zr_observer *o, const struct zr_grant *g)
{
    struct slot_check *c = (struct slot_check *)o;
    if (g->kind != ZR_GRANT_SLOTS)
        return 0;
    const struct zr_walk_slots *s = &c->now;
    c->now = *g->slots;
    c->evaluates = g->evaluates;
    ZR_TRY(compare_slot(c, s->in, "a.in"));
    ZR_TRY(compare_slot(c, s->kept, "a.in"));
    ZR_TRY(compare_slot(c, s->out, "a.out"));
    if (s->in && !contents_of(c, s->in)->known)
        ZR_TRY(note_contents(c, s->in, false));
    if (!s->out)
        return 0;
    contents_of(c, s->out)->known = false;
    return fill_slot(c, s->out);
}

static int slots_end(struct zr_observer *o, const struct zr_grant *g)
{
    struct slot_check *c = (struct slot_check *)o;
    if (g->kind != ZR_GRANT_SLOTS)
        return 0;
    const struct zr_walk_slots *s = &c->now;
    ZR_TRY(compare_slot(c, s->in, "a.in"));
    ZR_TRY(compare_slot(c, s->kept, "a.kept"));
    if (s->out) {
        ZR_TRY(check_written(c, s->out));
        ZR_TRY(note_contents(c, s->out, true));
    }
    /* A slot that may be written again need not stay unchanged any more. */
    bool over = zr_pipe_gives_weights(s->action.kind) || c->evaluates;
    if (s->in && over)
        contents_of(c, s->in)->known = false;
    if (s->kept && over)
        contents_of(c, s->kept)->known = false;
    return 0;
}

static void close_slots(struct zr_observer *o)
{
    struct slot_check *c = (struct slot_check *)o;
    free(c->first_bytes);
    free(c->first_micro);
    free(c->copy);
}

int zr_slots_open(struct zr_engine *e, const struct zr_engine_parts *parts)
{
    struct zr_observer *o;
    static const struct zr_observer_ops ops = {
        .on_begin = slots_begin, .on_end = slots_end, .close = close_slots};
    const struct zr_pipe_room *room = &parts->pipe_room;
    const int32_t n = room->per_rank * 2;
    if (!e->opt.check || !e->m.pipe)
        return 0;
    ZR_TRY(zr_observer_new(e, &ops, sizeof(struct slot_check), zr_pipe_room_bytes(room) / room->slot_bytes,
                           sizeof(struct slot_contents), &o));
    struct slot_check *c = (struct slot_check *)o;
    c->room = *room;
    ZR_TRY(ZR_ALLOC(c->first_bytes, n, "the check of a pipeline's slots"));
    ZR_TRY(ZR_ZALLOC(c->first_micro, n, "the check of a pipeline's slots"));
    if (!e->dev->ops->host_memory)
        ZR_TRY(ZR_ALLOC(c->copy, room->slot_bytes, "the check of a pipeline's slots"));
    for (int32_t i = 0; i < n; i++)
        c->first_bytes[i] = -1;
    return 0;
}
