/* SPDX-License-Identifier: Apache-2.0 */
/* pipeline.c: the tables of pipeline.h, and what ranks of a pipeline collect at the end. */
#include "bench/train/pipeline.h"
#include "bench/libzero_error.h"
#include "bench/schedule/pipeline_stages.h"
#include "kernels/alloc.h"

#include <stdlib.h>
#include <string.h>

struct model_config train_stage_config(const struct model_config *whole, int32_t stage, int32_t n_stages)
{
    struct model_config config = *whole;
    for (int32_t s = 0; s < stage; s++)
        config.first_layer += pipe_layers_of(whole->layers, n_stages, s);
    config.layers = pipe_layers_of(whole->layers, n_stages, stage);
    config.no_embedding = stage > 0;
    config.no_head = stage < n_stages - 1;
    return config;
}

int64_t train_elements_before(const struct zero_tensor *t, const struct model_config *stage)
{
    int64_t n_parts = t->tp_cut ? stage->tp : 1;
    return t->flags & ZERO_STACKED ? stage->first_layer * (tensor_elements(t) / t->shape[0]) * n_parts : 0;
}

/* The pieces (state_hash.h) of the whole model: the number of each tensor's first one, and of them all. */
struct pieces {
    int64_t first[MODEL_MAX_TENSORS], n;
};

static struct pieces pieces_of(const struct model_config *whole)
{
    struct zero_tensor table[MODEL_MAX_TENSORS];
    int32_t number[MODEL_MAX_TENSORS], n = model_describe(table, number, whole, ZERO_F32);
    struct pieces p = {.n = 0};
    for (int32_t t = 0; t < n; t++) {
        p.first[number[t]] = p.n;
        p.n += state_pieces(&table[t], 1);
    }
    return p;
}

int64_t train_stage_bytes(const struct model_config *whole, int64_t batch, int64_t element_bytes)
{
    return batch * model_own_context(whole) * whole->channels * element_bytes /
           (whole->sequence ? whole->tp : 1);
}

/* Copies n bytes between the host and the device, and waits. */
static int copy_message(const struct train_items *t, void *dst, const void *src, int64_t n)
{
    const struct zr_device_ops *dev = t->compute->dev->ops;
    ZR_TRY(dev->copy(t->compute->stream, dst, src, n));
    return dev->stream_sync(t->compute->stream);
}

/* Passes on the bytes from `first` on: receives those that this rank has not made, and sends all. in is a
 * buffer of in_message bytes. */
static int pass_message(const struct train_items *t, int64_t first, const struct zero_action *a, uint8_t *in)
{
    uint8_t *bytes = t->items;
    int64_t left = t->n * t->item_bytes - first, n = left < t->in_message ? left : t->in_message;
    if (n <= 0)
        return 0;
    if (a->in)
        ZR_TRY(copy_message(t, in, a->in, n));
    for (int64_t i = 0; i < n && a->in; i++)
        if (!t->mine[(first + i) / t->item_bytes])
            bytes[first + i] = in[i];
    return a->out ? copy_message(t, a->out, bytes + first, n) : 0;
}

int train_stages_gather(zero_ctx *z, const struct train_items *t)
{
    struct zero_action a;
    int64_t n_messages, all = t->n * t->item_bytes;
    uint8_t *in;
    int err = ZR_ALLOC(in, t->in_message, "a message of %lld bytes", (long long)t->in_message);
    for (int64_t first = 0; !err && first < all; first += n_messages * t->in_message) {
        n_messages = 0;
        err = take_libzero_error(zero_evaluate(z));
        err = err ? err : take_libzero_error(zero_next(z, &a));
        while (!err && a.micro_batch >= 0) {
            n_messages = a.micro_batch < n_messages ? n_messages : a.micro_batch + 1;
            err = pass_message(t, first + a.micro_batch * t->in_message, &a, in);
            err = err ? err : take_libzero_error(zero_finish(z));
            err = err ? err : take_libzero_error(zero_next(z, &a));
        }
    }
    free(in);
    return err;
}

/* What read_owned reads from: the tensors of a rank's table from number n_before on. */
struct owned {
    zero_ctx *z;
    int32_t n_before;
};

static int read_owned(void *from, int32_t tensor, int32_t value, int64_t first, int64_t n, void *dst)
{
    const struct owned *o = from;
    return take_libzero_error(zero_read(o->z, o->n_before + tensor, value, first, n, dst));
}

/* Hashes the tensors whose state a stage owns, and puts the digests in their places. The last stage's copy
 * of the embedding, its first tensor, belongs to the first stage. */
static int hash_stage(struct state_digest *all, bool *mine, bool hash, zero_ctx *z,
                      const struct train_stage *s, const struct pieces *pieces,
                      const struct zero_tensor *tensors, const int32_t *number, int n_states)
{
    bool copy = (tensors[s->first].flags & ZERO_TIED) && s->config.no_embedding;
    struct owned owned = {z, s->first + copy};
    int32_t n_tensors = s->n - copy;
    tensors += owned.n_before;
    number += owned.n_before;
    int64_t n_own = state_pieces(tensors, n_tensors), at = 0;
    struct state_digest *here;
    int err = ZR_ZALLOC(here, n_own, "%lld digests", (long long)n_own);
    err = err ? err : state_digests(here, hash, tensors, n_tensors, n_states, read_owned, &owned);
    for (int32_t t = 0; t < n_tensors && !err; t++) {
        bool stacked = tensors[t].flags & ZERO_STACKED;
        int64_t to = pieces->first[number[t]] + (stacked ? s->config.first_layer : 0);
        for (int64_t i = 0; i < state_pieces(&tensors[t], 1); i++, at++, to++) {
            mine[to] = true;
            all[to] = here[at];
        }
    }
    free(here);
    return err;
}

int train_stages_hash(char out[STATE_HASH_CHARS], bool hash, zero_ctx *z, const struct train_stage *stages,
                      int32_t n_stages, const struct model_config *whole, const struct zero_tensor *tensors,
                      const int32_t *number, int n_states, int64_t message_bytes,
                      const struct compute *compute)
{
    const struct pieces pieces = pieces_of(whole);
    int64_t n = pieces.n;
    struct state_digest *all = calloc((size_t)n, sizeof *all);
    bool *mine = calloc((size_t)n, sizeof *mine);
    int err = all && mine ? 0 : zr_fail(ZERO_ERR_NOMEM, "no memory for %lld digests", (long long)n);
    for (int32_t k = 0; k < n_stages && !err; k++)
        err = hash_stage(all, mine, hash, z, &stages[k], &pieces, tensors, number, n_states);
    const struct train_items digests = {all, n, sizeof *all, message_bytes, mine, compute};
    err = err ? err : train_stages_gather(z, &digests);
    if (!err)
        state_hash_of(out, all, n);
    free(all);
    free(mine);
    return err;
}

int64_t train_n_calls(const struct train_stage *stages, int32_t n_stages)
{
    int64_t n = 0, most = 0;
    for (int32_t k = 0; k < n_stages; k++) {
        int64_t n_of_stage = TRAIN_N_CALLS(stages[k].config.layers);
        n += n_of_stage;
        most = n_of_stage > most ? n_of_stage : most;
    }
    return n + most; /* add_calls writes a stage's calls before it drops half of them */
}

/* Writes a stage's forward or backward calls to out, which has room for both. */
static int32_t add_calls(struct zero_call *out, const struct train_stage *s, bool backward)
{
    int32_t n = train_call_order(out, &s->config), n_forward = 0;
    while (n_forward < n && out[n_forward].phase == ZERO_FORWARD)
        n_forward++;
    if (backward)
        memmove(out, out + n_forward, (size_t)(n - n_forward) * sizeof *out);
    n = backward ? n - n_forward : n_forward;
    for (int32_t i = 0; i < n; i++)
        out[i].unit += s->unit;
    return n;
}

int32_t train_stages_order(struct zero_call *out, const struct train_stage *stages, int32_t n_stages)
{
    int32_t n = 0;
    for (int32_t k = 0; k < n_stages; k++)
        n += add_calls(out + n, &stages[k], false);
    for (int32_t k = n_stages; k-- > 0;)
        n += add_calls(out + n, &stages[k], true);
    return n;
}
