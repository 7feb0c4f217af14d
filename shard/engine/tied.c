/* SPDX-License-Identifier: Apache-2.0 */
/* tied.c: tensors that the first and the last pipeline stage share, such as an embedding that is also the
 * head's matrix.
 *
 * The first stage's rank is the *owner*. It has gradient, state and master weights, as for any tensor. The
 * last stage's rank has a *copy*. The schedule core treats the copy as frozen, because its values come from
 * the owner after each step.
 *
 * Gradients go from the copy to the owner, one message per micro-batch. The copy's backward writes them to
 * memory of this file. The owner's backward of the same micro-batch starts with them, in place of zeros, and
 * adds to them. So the sum is that of a single stage, in the same order. If sums need not be those of a
 * single stage (not deterministic), the copy adds its micro-batches up in fp32 and sends only the sum. The
 * owner's backward of the step's last micro-batch starts with it.
 *
 * A step updates a tied unit if either stage brackets its backward. So each message says, for each tensor,
 * whether the copy has bracketed its unit. If only the copy has, the owner makes the bracket itself: then the
 * copy's gradient is the owner's contribution.
 *
 * Values go from the owner to the copy between steps, in the first slot. They move after the owner's update
 * and after all earlier work on both compute streams. If no tied tensor is trained, no gradients move, and
 * values move only when they are set or loaded.
 *
 * Each rank of the first stage forms a pair with the rank of the last stage that has the same data-parallel
 * and tensor-parallel number. Both keep the tied parameters whole. The pair has a communicator, a stream
 * besides the model's, and on both ranks an arena of the same layout. A slot has all tied tensors:
 *
 *   a message per micro-batch   [slot 0] .. [slot n-1]
 *   sums                        [sums | one slot, which the copy's backward writes to]
 *
 * Two events of each slot order the streams. done is also recorded before values move, when both models have
 * read the previous ones:
 *
 *   done[slot]    compute -> tied   copy: the model has written its gradients; owner: it has read them
 *   moved[slot]   tied -> compute   copy: the slot may be written again; owner: the gradients are there */
#include "shard/engine/internal.h"
#include "shard/engine/issue.h"

#include <string.h>
#include <xxhash.h>

/* Numbers of the two ranks in the pair. */
enum { OWNER, COPY };

/* A message of values, where others have the number of a micro-batch. */
enum { VALUES = -1 };

struct tied_tensor {
    int32_t tensor;
    /* offset in a slot; offset of its sum, if sums are sent */
    int64_t at, sum_at;
    bool trained;
    /* owner: a gradient comes in this pipeline action, and no bracket has started with it yet */
    bool unread;
    /* copy: the unit had a backward bracket in this pipeline action; in any action of the current sum */
    bool bracketed, bracketed_in_sum;
};

/* A word behind the gradient or the sum says whether the copy's unit was bracketed. */
enum { WORD_BYTES = 8 };

struct zr_tied {
    /* arena, of the same layout on both ranks */
    char *base;
    int64_t slot_bytes;
    int32_t n_slots;
    /* bytes of all sums, 0: a message per micro-batch; micro-batches of a sum */
    int64_t sum_bytes;
    int32_t n_summed;
    bool owner;
    /* (n) in the table's order, which is the same on both */
    struct tied_tensor *list;
    int32_t n;
    /* (2 * n_slots) done and moved of each slot */
    struct zr_event **slot;
    /* the copy has received its values */
    struct zr_event *received_values;
    /* micro-batch of the current pipeline action; -1: none */
    int32_t micro_batch;
};

/* ---- sizes and addresses ---- */

int64_t zr_tied_bytes(const struct zr_tensor *t)
{
    return zr_round_up(t->n_elems * zr_dtype_bytes(t->dtype) + WORD_BYTES, ZR_PIECE_ALIGN);
}

int64_t zr_tied_sum_bytes(const struct zr_tensor *t)
{
    return zr_round_up(t->n_elems * (int64_t)sizeof(float) + WORD_BYTES, ZR_PIECE_ALIGN);
}

/* Never 0, because all ranks take part in making the arena. */
int64_t zr_tied_room_bytes(const struct zr_pipe_room *r)
{
    return zr_max(r->tied_sum_bytes + r->tied_bytes * r->n_tied, 4096);
}

static const struct zr_tensor *tensor_of(const struct zr_engine *e, const struct tied_tensor *t)
{
    return &e->layout->tensors[t->tensor];
}

static int64_t tied_tensor_bytes(const struct zr_engine *e, const struct tied_tensor *t)
{
    const struct zr_tensor *of = tensor_of(e, t);
    return of->n_elems * zr_dtype_bytes(of->dtype);
}

static char *tied_slot(const struct zr_engine *e, int32_t micro_batch, const struct tied_tensor *t)
{
    return e->m.tied->base + micro_batch % e->m.tied->n_slots * e->m.tied->slot_bytes + t->at;
}

static char *tied_sum(const struct zr_engine *e, const struct tied_tensor *t)
{
    return e->m.tied->base + t->sum_at;
}

/* Returns where the copy's backward writes. It is never the sum, even for f32, because a model may zero its
 * gradients at the start of a backward. */
static char *tied_grad(const struct zr_engine *e, const struct tied_tensor *t)
{
    return tied_slot(e, e->m.tied->micro_batch, t) + e->m.tied->sum_bytes;
}

/* Returns the address of the word in the message of this micro-batch. */
static char *tied_word(const struct zr_engine *e, const struct tied_tensor *t)
{
    char *end = e->m.tied->sum_bytes
                    ? tied_sum(e, t) + zr_tied_sum_bytes(tensor_of(e, t))
                    : tied_slot(e, e->m.tied->micro_batch, t) + zr_tied_bytes(tensor_of(e, t));
    return end - WORD_BYTES;
}

static bool is_last_of_sum(const struct zr_tied *ties, int32_t micro_batch)
{
    return micro_batch == ties->n_summed - 1;
}

static struct zr_event *tied_event(const struct zr_tied *ties, int32_t micro_batch, bool moved)
{
    return ties->slot[2 * (micro_batch % ties->n_slots) + moved];
}

/* ---- opening ---- */

static int list_tensors(struct zr_engine *e, struct zr_tied *ties)
{
    int64_t at = 0, sum_at = 0;
    ZR_TABLE(e, ties->list, e->layout->n_tensors);
    for (int32_t i = 0; i < e->layout->n_tensors; i++) {
        const struct zr_tensor *t = &e->layout->tensors[i];
        if (t->tie == ZR_TIE_NONE)
            continue;
        ties->owner = t->tie == ZR_TIE_OWNER;
        ties->list[ties->n++] = (struct tied_tensor){
            .tensor = i, .at = at, .sum_at = sum_at, .trained = ties->owner ? t->grad : t->tied_grad};
        at += zr_tied_bytes(t);
        sum_at += zr_tied_sum_bytes(t);
    }
    return 0;
}

static int open_tied_events(struct zr_engine *e, struct zr_tied *ties)
{
    ZR_TABLE(e, ties->slot, 2 * ties->n_slots);
    for (int32_t i = 0; i < 2 * ties->n_slots; i++)
        ZR_TRY(e->dev->ops->event_open(e->dev, &ties->slot[i]));
    return e->dev->ops->event_open(e->dev, &ties->received_values);
}

int zr_tied_open(struct zr_engine *e, const struct zr_pipe_room *room)
{
    if (room->tied_bytes == 0)
        return 0;
    ZR_TABLE(e, e->m.tied, 1);
    struct zr_tied *ties = e->m.tied;
    ties->slot_bytes = room->tied_bytes;
    ties->n_slots = room->n_tied;
    ties->sum_bytes = room->tied_sum_bytes;
    ties->n_summed = room->n_summed;
    ties->micro_batch = -1;
    ZR_TRY(list_tensors(e, ties));
    ZR_TRY(open_tied_events(e, ties));
    ZR_TRY(e->dev->ops->stream_open(e->dev, ZR_STREAM_QUEUE, "zero-tied", NULL, &e->tied_stream));
    zr_roles_streams(e);
    return 0;
}

int zr_tied_allocate(struct zr_engine *e)
{
    const enum zr_role role = ZR_ROLE_TIED;
    const int64_t bytes = e->plan->tied_bytes;
    char *unused, **base = e->m.tied ? &e->m.tied->base : &unused; /* all pipeline stages take part */
    return bytes ? zr_engine_open_arena(e, &role, 1, bytes, base) : 0;
}

void zr_tied_close(struct zr_engine *e)
{
    struct zr_tied *ties = e->m.tied;
    if (!ties)
        return;
    e->dev->ops->stream_close(e->tied_stream);
    for (int32_t i = 0; ties->slot && i < 2 * ties->n_slots; i++)
        e->dev->ops->event_close(ties->slot[i]);
    e->dev->ops->event_close(ties->received_values);
    e->m.tied = NULL;
}

enum zr_event_class zr_tied_event_class(const struct zr_engine *e, const struct zr_event *event)
{
    const struct zr_tied *ties = e->m.tied;
    for (int32_t i = 0; ties && ties->slot && i < 2 * ties->n_slots; i++)
        if (ties->slot[i] == event)
            return i % 2 ? ZR_EVENT_TIED_MOVED : ZR_EVENT_TIED_DONE;
    return ties && event == ties->received_values ? ZR_EVENT_TIED_VALUES : ZR_EVENT_ANY;
}

/* ---- messages ---- */

/* Sends a micro-batch's gradients, the sums or VALUES from rank `root` of the pair to the other. Both ranks
 * call this. */
static int send_slot(struct zr_engine *e, int32_t micro_batch, int root)
{
    const struct zr_tied *ties = e->m.tied;
    const int64_t words[] = {micro_batch, ties->n, ties->slot_bytes};
    const struct zr_tag tag = {.unit = -1,
                               .step = zr_step_number(e),
                               .call_hash = XXH3_64bits_withSeed(words, sizeof words, e->m.world_calls)};
    bool values = micro_batch == VALUES;
    int64_t off = values ? 0 : micro_batch % ties->n_slots * ties->slot_bytes,
            n_bytes = !values && ties->sum_bytes ? ties->sum_bytes : ties->slot_bytes;
    return zr_role_broadcast(e, ZR_ROLE_TIED, off, n_bytes, root, &tag);
}

/* Moves the slot's gradients, or a step's sums, once this rank's model is done with the slot. */
static int move_grads(struct zr_engine *e, int32_t micro_batch)
{
    const struct zr_device_ops *d = e->dev->ops;
    ZR_TRY(d->stream_wait(e->tied_stream, tied_event(e->m.tied, micro_batch, false)));
    ZR_TRY(send_slot(e, micro_batch, COPY));
    return d->event_record(tied_event(e->m.tied, micro_batch, true), e->tied_stream);
}

static bool trains_any(const struct zr_tied *ties)
{
    bool any = false;
    for (int32_t i = 0; ties && i < ties->n; i++)
        any |= ties->list[i].trained;
    return any;
}

/* Sums have one slot. The schedule has a message for each micro-batch, of which only the last one moves. */
int zr_engine_tied_move(struct zr_engine *e, int32_t micro_batch)
{
    const struct zr_tied *ties = e->m.tied;
    if (!trains_any(ties) || (ties->sum_bytes && !is_last_of_sum(ties, micro_batch)))
        return 0;
    return zr_engine_note(e, move_grads(e, micro_batch));
}

/* ---- gradients ---- */

/* Points the copy's model at memory for its gradients, and zeroes it, because backward adds to it. Gradients
 * with ZERO_GRAD_OVERWRITE are not zeroed, because backward stores all of them. */
static int show_grads(struct zr_engine *e)
{
    struct zr_tied *ties = e->m.tied;
    ZR_TRY(zr_model_wait_for(e, tied_event(ties, ties->micro_batch, true)));
    for (int32_t i = 0; i < ties->n; i++) {
        const struct tied_tensor *t = &ties->list[i];
        char *at = tied_grad(e, t);
        if (!t->trained)
            continue;
        if (!tensor_of(e, t)->overwrite)
            ZR_TRY(e->dev->ops->zero(e->compute, at, tied_tensor_bytes(e, t)));
        *tensor_of(e, t)->tied_grad = at;
    }
    return 0;
}

/* Expects gradients in this action: those of the micro-batch, or in the last one the sums. */
static void expect_grads(struct zr_engine *e)
{
    struct zr_tied *ties = e->m.tied;
    bool comes = !ties->sum_bytes || is_last_of_sum(ties, ties->micro_batch);
    for (int32_t i = 0; i < ties->n; i++)
        ties->list[i].unread = ties->list[i].trained && comes;
}

int zr_engine_tied_begin(struct zr_engine *e, int32_t micro_batch)
{
    struct zr_tied *ties = e->m.tied;
    if (!trains_any(ties))
        return 0;
    ties->micro_batch = micro_batch;
    if (ties->owner)
        expect_grads(e);
    else
        ZR_TRY(zr_engine_note(e, show_grads(e)));
    return zr_engine_status(e);
}

bool zr_tied_has_received(const struct zr_engine *e, int32_t tensor)
{
    bool received = false;
    for (int32_t i = 0; e->m.tied && i < e->m.tied->n; i++)
        received |= e->m.tied->list[i].tensor == tensor && e->m.tied->list[i].unread;
    return received;
}

/* Adds what the copy's backward has just written to the sums. */
static int add_to_sums(struct zr_engine *e)
{
    const struct zr_device_ops *d = e->dev->ops;
    for (int32_t i = 0; i < e->m.tied->n; i++) {
        const struct tied_tensor *t = &e->m.tied->list[i];
        const struct zr_tensor *of = tensor_of(e, t);
        float *sum = (float *)tied_sum(e, t);
        if (!t->trained)
            continue;
        if (e->m.tied->micro_batch)
            ZR_TRY(d->add(e->compute, sum, tied_grad(e, t), of->dtype, of->n_elems));
        else
            ZR_TRY(d->cast(e->compute, sum, ZERO_F32, tied_grad(e, t), of->dtype, of->n_elems));
    }
    return 0;
}

/* Returns the tensor's only piece. A tied tensor has one, because ZERO_TIED excludes ZERO_STACKED. */
static const struct zr_piece *tied_piece(const struct zr_engine *e, const struct tied_tensor *t,
                                         const struct zr_flat **flat)
{
    int32_t piece = e->layout->piece_of[e->layout->layer_base[t->tensor]];
    *flat = zr_piece_flat(e->layout, piece);
    return &e->layout->pieces[piece];
}

int zr_tied_fill(struct zr_engine *e, int32_t unit, int32_t slot)
{
    struct zr_tied *ties = e->m.tied;
    for (int32_t i = 0; ties && i < ties->n; i++) {
        struct tied_tensor *t = &ties->list[i];
        const struct zr_flat *f;
        const struct zr_piece *p = tied_piece(e, t, &f);
        if (!t->unread || f->unit != unit)
            continue;
        char *at = e->reduce_base + zr_plan_grad_full(e->plan, f, slot) + p->first * zr_dtype_bytes(f->dtype);
        ZR_TRY(zr_model_wait_for(e, tied_event(ties, ties->micro_batch, true)));
        if (ties->sum_bytes && f->dtype != ZERO_F32)
            ZR_TRY(e->dev->ops->cast(e->compute, at, f->dtype, tied_sum(e, t), ZERO_F32,
                                     tensor_of(e, t)->n_elems));
        else
            ZR_TRY(e->dev->ops->copy(e->compute, at,
                                     ties->sum_bytes ? tied_sum(e, t) : tied_slot(e, ties->micro_batch, t),
                                     tied_tensor_bytes(e, t)));
        t->unread = false;
    }
    return 0;
}

void zr_tied_bracketed(struct zr_engine *e, int32_t unit)
{
    for (int32_t i = 0; e->m.tied && i < e->m.tied->n; i++) {
        struct tied_tensor *t = &e->m.tied->list[i];
        if (tensor_of(e, t)->unit == unit)
            t->bracketed = t->bracketed_in_sum = true;
    }
}

/* Zeroes the gradients that backward overwrites, because this bracket has no backward that would. */
static int zero_overwritten(struct zr_engine *e, int32_t unit)
{
    int32_t n, slot = e->plan->placement.model_holds ? -1 : zr_shown_slot(e, unit, true);
    const struct zr_flat *f = zr_unit_flats(e, unit, &n);
    for (int32_t i = 0; i < n; i++)
        for (int32_t k = 0; f[i].trainable && k < f[i].n_pieces; k++) {
            const struct zr_piece *p = &e->layout->pieces[f[i].first_piece + k];
            int64_t size = zr_dtype_bytes(f[i].dtype);
            if (e->layout->tensors[p->tensor].overwrite)
                ZR_TRY(e->dev->ops->zero(
                    e->compute, e->reduce_base + zr_plan_grad_full(e->plan, &f[i], slot) + p->first * size,
                    p->n * size));
        }
    return 0;
}

/* Makes a bracket of the unit, because the owner's model had none in this pipeline action. It is a backward
 * of weights alone, which needs no parameters. */
static int bracket_for_copy(struct zr_engine *e, int32_t unit)
{
    struct zr_core_event ev = {.kind = ZR_EV_BEGIN, .unit = unit, .phase = ZERO_BACKWARD_WEIGHT};
    int err = zr_engine_call(e, &ev);
    if (!err)
        err = zr_engine_note(e, zero_overwritten(e, unit));
    ev.kind = ZR_EV_END;
    return err ? err : zr_engine_call(e, &ev);
}

/* Reads the word behind the gradient, or behind the sum, and waits for it. */
static int read_word(struct zr_engine *e, const struct tied_tensor *t, int64_t *word)
{
    ZR_TRY(e->dev->ops->copy(e->compute, e->words, tied_word(e, t), sizeof *word));
    ZR_TRY(e->dev->ops->event_record(e->ev.drained, e->compute));
    ZR_TRY(zr_engine_wait(e, e->ev.drained));
    const struct zr_access seen = {e->words, sizeof *word, false};
    zr_declare(e->dev, NULL, &seen, 1);
    memcpy(word, e->words, sizeof *word);
    return 0;
}

/* Reads the word of the message. The host waits for it, because it decides which brackets there are. It does
 * so only if the owner's model had no bracket of the tensor's unit in this action. */
static int receive_word(struct zr_engine *e, const struct tied_tensor *t, int64_t *word)
{
    ZR_TRY(zr_model_wait_for(e, tied_event(e->m.tied, e->m.tied->micro_batch, true)));
    return read_word(e, t, word);
}

/* Makes contributions of the gradients that no bracket of the owner has started with. If the copy had no
 * bracket either, its gradient is zero and nothing is added. */
static int bracket_unread(struct zr_engine *e)
{
    struct zr_tied *ties = e->m.tied;
    for (int32_t i = 0; i < ties->n; i++) {
        struct tied_tensor *t = &ties->list[i];
        int64_t bracketed = 0;
        if (!t->unread)
            continue;
        ZR_TRY(zr_engine_note(e, receive_word(e, t, &bracketed)));
        if (bracketed)
            ZR_TRY(bracket_for_copy(e, tensor_of(e, t)->unit));
        t->unread = false;
    }
    return 0;
}

/* Writes the copy's word into the message. A gradient without a bracket is zero, but one that backward
 * overwrites must be zeroed here. */
static int write_word(struct zr_engine *e, struct tied_tensor *t)
{
    const struct zr_device_ops *d = e->dev->ops;
    int64_t word = e->m.tied->sum_bytes ? t->bracketed_in_sum : t->bracketed;
    if (!t->bracketed && tensor_of(e, t)->overwrite)
        ZR_TRY(d->zero(e->compute, tied_grad(e, t), tied_tensor_bytes(e, t)));
    t->bracketed = false;
    return d->put(e->compute, tied_word(e, t), &word, sizeof word);
}

/* Whether the copy's gradient is still zero. On a GPU a kernel looks for bytes that are not, and leaves its
 * answer where the message's word comes later. The host waits for it, in actions without a bracket alone. It
 * takes -0 for a value that was written, which the CPU does not. */
static int is_grad_zero(struct zr_engine *e, const struct tied_tensor *t, bool *zero)
{
    const struct zr_device_ops *d = e->dev->ops;
    int64_t digest = 0;
    *zero = true;
    if (d->compute_on_caller) {
        *zero = zr_all_zero(tied_grad(e, t), tensor_of(e, t)->n_elems, tensor_of(e, t)->dtype);
    } else if (!d->host_memory) { /* a simulated device has no values */
        uint64_t *word = (uint64_t *)tied_word(e, t);
        ZR_TRY(d->zero(e->compute, word, sizeof *word));
        ZR_TRY(d->digest(e->compute, word, tied_grad(e, t), tied_tensor_bytes(e, t), 0));
        ZR_TRY(read_word(e, t, &digest));
        *zero = digest == 0;
    }
    return 0;
}

/* Checks what the model did with its tied gradients in this pipeline action. */
static int check_end(struct zr_engine *e)
{
    const struct zr_tied *ties = e->m.tied;
    for (int32_t i = 0; i < ties->n; i++) {
        const struct tied_tensor *t = &ties->list[i];
        const struct zr_tensor *of = tensor_of(e, t);
        bool zero = true;
        if (!ties->owner && t->trained && !t->bracketed && !of->overwrite)
            ZR_TRY(zr_engine_note(e, is_grad_zero(e, t, &zero)));
        if (!zero)
            return zr_fail(ZERO_ERR_ORDER,
                           "zero_finish: micro-batch %d has no backward bracket of unit %d here, but the "
                           "gradient of tensor %s is not zero: bracket the backward of unit %d",
                           ties->micro_batch, of->unit, of->name, of->unit);
        if (!ties->owner && t->trained && *of->tied_grad != tied_grad(e, t))
            return zr_fail(ZERO_ERR_ORDER,
                           "zero_finish: *grad of tensor %s is %p; the library stored %p there and reads the "
                           "gradient from it: restore the library's pointer",
                           of->name, *of->tied_grad, (void *)tied_grad(e, t));
    }
    return 0;
}

/* Completes the copy's message, or adds the micro-batch to the sums. */
static int complete_message(struct zr_engine *e)
{
    struct zr_tied *ties = e->m.tied;
    for (int32_t i = 0; i < ties->n; i++)
        if (ties->list[i].trained)
            ZR_TRY(write_word(e, &ties->list[i]));
    if (ties->sum_bytes)
        ZR_TRY(add_to_sums(e));
    return e->dev->ops->event_record(tied_event(ties, ties->micro_batch, false), e->compute);
}

/* Takes the memory for gradients back from the copy's model. */
static int end_copy(struct zr_engine *e)
{
    struct zr_tied *ties = e->m.tied;
    int err = complete_message(e);
    for (int32_t i = 0; i < ties->n; i++)
        if (ties->list[i].trained)
            *tensor_of(e, &ties->list[i])->tied_grad = NULL;
    return err;
}

int zr_engine_tied_end(struct zr_engine *e)
{
    struct zr_tied *ties = e->m.tied;
    if (!trains_any(ties))
        return 0;
    ZR_TRY(check_end(e));
    if (!ties->owner)
        return zr_engine_note(e, end_copy(e));
    ZR_TRY(bracket_unread(e));
    return zr_engine_note(e,
                          e->dev->ops->event_record(tied_event(ties, ties->micro_batch, false), e->compute));
}

/* ---- values ---- */

/* Returns the address of the tensor's values, which are whole here. */
static char *values_at(const struct zr_engine *e, const struct tied_tensor *t)
{
    const struct zr_flat *f;
    const struct zr_piece *p = tied_piece(e, t, &f);
    return e->gather_base + zr_plan_param_full(e->plan, f, -1) + p->first * zr_dtype_bytes(f->dtype);
}

/* Makes the pair's stream wait for the model's work. An evaluation, or a step that was dropped, may still
 * read the copy's values or what the first slot held. */
static int wait_for_model(struct zr_engine *e)
{
    struct zr_event *done = tied_event(e->m.tied, 0, false);
    ZR_TRY(e->dev->ops->event_record(done, e->compute));
    return e->dev->ops->stream_wait(e->tied_stream, done);
}

/* Sends the values after the unit's update, and after the gather that makes it whole. */
static int send_values(struct zr_engine *e)
{
    const struct zr_device_ops *d = e->dev->ops;
    const struct zr_tied *ties = e->m.tied;
    for (int32_t i = 0; i < ties->n; i++) {
        const struct tied_tensor *t = &ties->list[i];
        int32_t unit = tensor_of(e, t)->unit;
        ZR_TRY(zr_jobs_await(e, zr_job_writing_params(e, unit)));
        ZR_TRY(d->stream_wait(e->tied_stream, e->ev.updated[unit]));
        ZR_TRY(d->stream_wait(e->tied_stream, e->ev.ready[unit]));
        ZR_TRY(d->copy(e->tied_stream, tied_slot(e, 0, t), values_at(e, t), tied_tensor_bytes(e, t)));
    }
    return send_slot(e, VALUES, OWNER);
}

/* Receives the values. The model's stream waits for them, because the model may read them without a
 * bracket. */
static int receive_values(struct zr_engine *e)
{
    const struct zr_device_ops *d = e->dev->ops;
    const struct zr_tied *ties = e->m.tied;
    ZR_TRY(send_slot(e, VALUES, OWNER));
    for (int32_t i = 0; i < ties->n; i++) {
        const struct tied_tensor *t = &ties->list[i];
        ZR_TRY(d->copy(e->tied_stream, values_at(e, t), tied_slot(e, 0, t), tied_tensor_bytes(e, t)));
    }
    ZR_TRY(d->event_record(ties->received_values, e->tied_stream));
    return zr_model_wait_for(e, ties->received_values);
}

void zr_tied_forget(struct zr_engine *e)
{
    if (!e->m.tied)
        return;
    e->m.tied->micro_batch = -1;
    for (int32_t i = 0; i < e->m.tied->n; i++)
        e->m.tied->list[i].bracketed = e->m.tied->list[i].bracketed_in_sum = false;
}

int zr_engine_tied_values(struct zr_engine *e)
{
    if (!e->m.tied)
        return 0;
    zr_tied_forget(e);
    ZR_TRY(zr_engine_note(e, wait_for_model(e)));
    ZR_TRY(zr_engine_note(e, e->m.tied->owner ? send_values(e) : receive_values(e)));
    return zr_engine_status(e);
}

int zr_engine_tied_step(struct zr_engine *e)
{
    zr_tied_forget(e);
    return trains_any(e->m.tied) ? zr_engine_tied_values(e) : 0;
}
