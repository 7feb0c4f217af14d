/* SPDX-License-Identifier: Apache-2.0 */
/* load_convert.c: chooses how each value of this rank is read from a checkpoint. It converts values that are
 * kept in another form than they were saved: frozen weights that are trained now, fp32 masters that are kept
 * as remainders, and states in another precision.
 *
 * All conversions go through fp32. The saved values are read to the end of fp32 memory and widened in place,
 * beginning with the first. If this rank keeps values of 4 bytes, the fp32 memory is where it keeps them.
 * Values are rounded to nearest, and the blocks of 8-bit states are those of the tensor. So all ranks of any
 * world get the same bits. */
#include "kernels/alloc.h"
#include "kernels/asserts.h"
#include "kernels/state_codes.h"
#include "zero/checkpoint/float_values.h"
#include "zero/checkpoint/load_inside.h"

#include <stdio.h>
#include <string.h>

static const struct zr_tensor *tensor_of(const struct zr_loading *l, int32_t tensor)
{
    return &l->z->whole.tensors[tensor];
}

/* ---- what is saved ---- */

bool zr_loading_is_saved(const struct zr_loading *l, int32_t tensor, int kind)
{
    const struct zr_manifest_tensor *was = l->was[tensor];
    if (kind == ZR_VALUE_PARAM)
        return !was->trainable || tensor_of(l, tensor)->dtype != ZERO_F32;
    if (kind == ZR_VALUE_MASTER)
        return was->trainable && was->masters != ZERO_MASTERS_NONE;
    if (kind >= ZR_SCALE(0))
        return was->trainable && was->moments == ZERO_MOMENTS_Q8 && kind - ZR_SCALE(0) < was->n_states;
    return was->trainable && kind < was->n_states;
}

/* Returns the elements of a layer of a part, as it was saved. */
static int64_t saved_layer(const struct zr_loading *l, int32_t tensor)
{
    const struct zr_manifest_tensor *was = l->was[tensor];
    return l->saved[tensor].part_elems / (was->stacked ? was->shape[0] : 1);
}

int64_t zr_loading_saved_block(const struct zr_loading *l, int32_t tensor, int64_t element)
{
    return zr_block_of(saved_layer(l, tensor), element);
}

int64_t zr_loading_saved_values(const struct zr_loading *l, int32_t tensor, int32_t part, int kind)
{
    int64_t n = zr_tp_elems(&l->saved[tensor], part);
    return kind < ZR_SCALE(0) || n == 0 ? n : zr_loading_saved_block(l, tensor, n - 1) + 1;
}

/* Returns the bytes of a saved value. */
static int64_t saved_size(const struct zr_loading *l, int32_t tensor, int kind)
{
    if (kind < 0)
        return zr_dtype_bytes(kind == ZR_VALUE_PARAM ? tensor_of(l, tensor)->dtype : ZERO_F32);
    return zr_st_dtype_bytes(zr_kind_dtype(tensor_of(l, tensor), l->was[tensor]->moments, kind));
}

/* ---- what is read ---- */

/* Whether states were saved in the precision and, with 8 bits, the blocks in which they are kept. */
static bool same_moments(const struct zr_manifest_tensor *was, const struct zr_tensor *t)
{
    int64_t layers = t->stacked ? t->n_layers : was->stacked ? was->shape[0] : 1;
    bool whole_blocks = t->n_elems / layers % ZR_Q8_BLOCK == 0;
    return was->moments == t->moments &&
           (t->moments != ZERO_MOMENTS_Q8 || was->stacked == t->stacked || whole_blocks);
}

static struct zr_load_source source_of_state(const struct zr_loading *l, const struct zr_extent *x)
{
    struct zr_load_source s = {.way = ZR_LOAD_AS_SAVED, .kind = x->kind, .size = x->size};
    if (!zr_loading_is_saved(l, x->tensor, x->kind % ZR_MAX_STATES)) {
        s.way = ZR_LOAD_ZEROS;
    } else if (!same_moments(l->was[x->tensor], tensor_of(l, x->tensor))) {
        s.way = x->kind < ZR_SCALE(0) ? ZR_LOAD_CONVERTED : ZR_LOAD_NOTHING;
        s.size = saved_size(l, x->tensor, x->kind % ZR_MAX_STATES);
        s.has_scales = l->was[x->tensor]->moments == ZERO_MOMENTS_Q8;
    }
    return s;
}

/* For masters that are kept as weights and remainders: returns the range of the other of the two, if this
 * rank reads the same range of both. Without groups it does. Both are then made from one read. */
static const struct zr_extent *other_half(const struct zr_loading *l, const struct zr_extent *x)
{
    int other = x->kind == ZR_VALUE_PARAM ? ZR_VALUE_MASTER : ZR_VALUE_PARAM;
    const struct zr_extent *half = zr_extent_find(&l->own, x->tensor, other, x->first);
    return half && half->n == x->n ? half : NULL;
}

/* Returns the source of weights or remainders. A remainder belongs to a weight that is rounded from the
 * master, which the saved weight may not be. So both come from the master. */
static struct zr_load_source source_of_half(const struct zr_loading *l, const struct zr_extent *x)
{
    struct zr_load_source s = {.way = ZR_LOAD_CONVERTED, .kind = ZR_VALUE_MASTER, .size = sizeof(float)};
    bool weight = x->kind == ZR_VALUE_PARAM;
    if (!zr_loading_is_saved(l, x->tensor, ZR_VALUE_MASTER))
        s = (struct zr_load_source){
            .way = weight ? ZR_LOAD_AS_SAVED : ZR_LOAD_ZEROS, .kind = ZR_VALUE_PARAM, .size = x->size};
    else if (!weight && other_half(l, x))
        s.way = ZR_LOAD_NOTHING;
    return s;
}

struct zr_load_source zr_loading_source(const struct zr_loading *l, const struct zr_extent *x)
{
    const struct zr_tensor *t = tensor_of(l, x->tensor);
    if (x->kind >= 0)
        return source_of_state(l, x);
    if (t->grad && t->masters == ZERO_MASTERS_REMAINDER)
        return source_of_half(l, x);
    struct zr_load_source s = {.way = ZR_LOAD_AS_SAVED, .kind = x->kind};
    if (!zr_loading_is_saved(l, x->tensor, x->kind))
        s.kind = x->kind == ZR_VALUE_PARAM ? ZR_VALUE_MASTER : ZR_VALUE_PARAM;
    s.size = saved_size(l, x->tensor, s.kind);
    if (s.size != x->size)
        s.way = ZR_LOAD_CONVERTED;
    return s;
}

int64_t zr_loading_run_scales(const struct zr_loading *l, int32_t tensor, const struct zr_saved_run *run)
{
    return zr_loading_saved_block(l, tensor, run->first + run->n - 1) -
           zr_loading_saved_block(l, tensor, run->first) + 1;
}

/* Returns how many scales the runs of an extent have, which are read run by run. */
static int64_t count_scales(const struct zr_loading *l, const struct zr_extent *x)
{
    int64_t n = 0;
    for (int64_t at = x->first; at < x->first + x->n;) {
        struct zr_saved_run run = zr_loading_run(l, x, at);
        if (run.part >= 0)
            n += zr_loading_run_scales(l, x->tensor, &run);
        at += run.n;
    }
    return n;
}

struct zr_load_room zr_loading_room(const struct zr_loading *l, const struct zr_extent *x,
                                    const struct zr_load_source *s, int64_t *used)
{
    const int64_t wide_size = sizeof(float);
    bool own = x->size == wide_size;
    int64_t bytes = own ? 0 : x->n * wide_size;
    char *base = l->wide ? l->wide + *used : NULL;
    struct zr_load_room room = {0};
    *used += bytes;
    if (s->has_scales)
        *used += zr_round_up(count_scales(l, x) * (int64_t)sizeof *room.scales, wide_size);
    if (!base)
        return room;
    char *wide = own ? x->at : base;
    room.wide = (float *)wide;
    room.values = wide + x->n * (wide_size - s->size);
    room.scales = (uint16_t *)(base + bytes);
    return room;
}

/* ---- converting ---- */

/* Decodes a run of 8-bit states. Its scales begin with that of its first element. codes may be the last
 * quarter of the memory of wide. */
static void decode_run(const struct zr_loading *l, const struct zr_extent *x, const struct zr_saved_run *run,
                       const uint8_t *codes, const uint16_t *scales, float *wide)
{
    const struct zr_optimizer_kind *row = zr_optimizer_kind(tensor_of(l, x->tensor)->optimizer);
    bool squares = row && row->squares == x->kind;
    int64_t layer = saved_layer(l, x->tensor), first_block = zr_loading_saved_block(l, x->tensor, run->first);
    for (int64_t i = 0, n; i < run->n; i += n) {
        int64_t element = run->first + i, in_layer = element % layer;
        float scale = zr_bf16_value(scales[zr_loading_saved_block(l, x->tensor, element) - first_block]);
        n = zr_min(ZR_Q8_BLOCK - in_layer % ZR_Q8_BLOCK, zr_min(layer - in_layer, run->n - i));
        for (int64_t k = i; k < i + n; k++)
            wide[k] = zr_q8_value(codes[k], scale, squares);
    }
}

static void decode(const struct zr_loading *l, const struct zr_extent *x, const struct zr_load_room *room)
{
    const uint16_t *scales = room->scales;
    for (int64_t at = x->first; at < x->first + x->n;) {
        struct zr_saved_run run = zr_loading_run(l, x, at);
        int64_t i = at - x->first;
        if (run.part < 0) {
            memset(room->wide + i, 0, (size_t)run.n * sizeof *room->wide);
        } else {
            decode_run(l, x, &run, (const uint8_t *)room->values + i, scales, room->wide + i);
            scales += zr_loading_run_scales(l, x->tensor, &run);
        }
        at += run.n;
    }
}

/* Encodes an extent, which begins with a block. */
static void encode(const struct zr_loading *l, const struct zr_extent *x, const float *wide)
{
    const struct zr_tensor *t = tensor_of(l, x->tensor);
    const bool squares = zr_optimizer_kind(t->optimizer)->squares == x->kind;
    const struct zr_extent *to = zr_extent_find(&l->own, x->tensor, ZR_SCALE(x->kind),
                                                zr_block_of(t->n_elems / t->n_layers, x->first));
    ZR_ASSERT(to && to->n == zr_q8_blocks(x->n));
    for (int64_t i = 0; i < x->n; i += ZR_Q8_BLOCK) {
        int64_t end = zr_min(i + ZR_Q8_BLOCK, x->n);
        uint32_t largest = 0;
        for (int64_t k = i; k < end; k++) {
            uint32_t size = zr_q8_size(wide[k], squares);
            largest = size > largest ? size : largest;
        }
        uint16_t scale = zr_q8_scale(largest);
        memcpy(to->at + i / ZR_Q8_BLOCK * (int64_t)sizeof scale, &scale, sizeof scale);
        for (int64_t k = i; k < end; k++)
            x->at[k] = (char)zr_q8_code(wide[k], zr_bf16_value(scale), squares, ZR_NOISE_NEAREST);
    }
}

/* Writes weights that are rounded from masters, or the remainders. */
static void split(const struct zr_extent *x, const float *masters)
{
    for (int64_t i = 0; i < x->n; i++) {
        uint16_t half = x->kind == ZR_VALUE_PARAM ? zr_round_away(masters[i]) : zr_remainder_of(masters[i]);
        memcpy(x->at + i * (int64_t)sizeof half, &half, sizeof half);
    }
}

/* Makes the values that this rank keeps. */
static void narrow(const struct zr_loading *l, const struct zr_extent *x, const float *wide)
{
    if (x->kind < 0) {
        const struct zr_extent *half = x->kind == ZR_VALUE_PARAM ? other_half(l, x) : NULL;
        split(x, wide);
        if (half)
            split(half, wide);
    } else if (tensor_of(l, x->tensor)->moments == ZERO_MOMENTS_BF16) {
        zr_floats_copy(x->at, ZERO_BF16, wide, "F32", x->n);
    } else {
        encode(l, x, wide);
    }
}

static void convert(const struct zr_loading *l, const struct zr_extent *x, const struct zr_load_source *s,
                    const struct zr_load_room *room)
{
    const struct zr_tensor *t = tensor_of(l, x->tensor);
    if (s->has_scales)
        decode(l, x, room);
    else if (s->size < (int64_t)sizeof *room->wide)
        zr_floats_copy(room->wide, ZERO_F32, room->values,
                       zr_kind_dtype(t, l->was[x->tensor]->moments, s->kind), x->n);
    if (x->size < (int64_t)sizeof *room->wide)
        narrow(l, x, room->wide);
}

void zr_loading_convert(const struct zr_loading *l)
{
    int64_t used = 0;
    for (int64_t i = 0; i < l->own.n; i++) {
        const struct zr_extent *x = &l->own.list[i];
        const struct zr_load_source s = zr_loading_source(l, x);
        if (s.way != ZR_LOAD_CONVERTED)
            continue;
        const struct zr_load_room room = zr_loading_room(l, x, &s, &used);
        convert(l, x, &s, &room);
    }
}

/* ---- reporting ---- */

/* Whether masters were saved as `from` and are kept as `to`, and one of the two is none. Between fp32 masters
 * and remainders no bits change, so that is not reported. */
static bool has_masters(const struct zr_manifest_tensor *was, const struct zr_tensor *t, int from, int to)
{
    return (int)was->masters == from && (int)t->masters == to &&
           (from == ZERO_MASTERS_NONE) != (to == ZERO_MASTERS_NONE);
}

/* Whether moments were saved as `from` and are kept as `to`, or in other blocks if these are equal. */
static bool has_moments(const struct zr_manifest_tensor *was, const struct zr_tensor *t, int from, int to)
{
    return (int)was->moments == from && (int)t->moments == to && t->n_states && !same_moments(was, t);
}

/* Says how many tensors are converted from one precision to another, and the first one's name. That is a
 * warning if it loses bits. key: "masters" or "moments", whose precisions `has` compares. */
static void report_converted(const struct zr_loading *l, const char *key, int from, int to, bool loses,
                             bool (*has)(const struct zr_manifest_tensor *was, const struct zr_tensor *t,
                                         int from, int to))
{
    void (*say)(struct zr_log *, const char *, ...) = loses ? zr_warn : zr_info;
    const char *first = NULL;
    int32_t n = 0;
    for (int32_t i = 0; i < l->z->whole.n; i++) {
        const struct zr_tensor *t = tensor_of(l, i);
        if (!l->was[i]->trainable || !t->grad || !has(l->was[i], t, from, to))
            continue;
        first = first ? first : t->name;
        n++;
    }
    if (n)
        say(l->z->config.options.log,
            "%s: saved in another precision and converted: %s %s -> %s of %d of its tensors (%.100s%s)%s%s",
            l->folder, key, zr_config_value_text(key, from).text, zr_config_value_text(key, to).text, n,
            first, n > 1 ? ", ..." : "", from == to ? ", in other blocks" : "",
            loses ? "; that loses bits" : "");
}

void zr_loading_report_precision(const struct zr_loading *l)
{
    const struct zr_options *o = &l->z->config.options;
    for (int from = 0; from <= ZERO_MOMENTS_Q8; from++)
        for (int to = 0; to <= ZERO_MOMENTS_Q8; to++) {
            report_converted(l, "masters", from, to, to == ZERO_MASTERS_NONE, has_masters);
            report_converted(l, "moments", from, to, to != ZERO_MOMENTS_F32, has_moments);
        }
    if (l->manifest.seeded && zr_rounds_at_random(l->z) && l->manifest.seed != o->seed)
        zr_info(o->log, "%s: saved with seed %lld; steps from here on use seed %lld", l->folder,
                (long long)l->manifest.seed, (long long)o->seed);
}
