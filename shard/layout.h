/* SPDX-License-Identifier: Apache-2.0 */
/* layout.h: where every element of the model is, on every rank: tensors -> units -> flats -> pieces.
 *
 *   tensor  what the model names. A stacked tensor is n_layers equal layers (ZERO_SLICE in the public
 *           headers); layer l is in unit + l.
 *   unit    tensors that are gathered together.
 *   flat    the tensors of a unit that agree in dtype, trainability, optimizer, number of states, in how
 *           masters, states and gradient sums are kept, and in whether tensor parallelism cuts them. They lie
 *           end to end, and are cut into one slice for each data-parallel rank. Collectives move whole flats.
 *   piece   one layer of a tensor (usually all of it) inside a flat.
 *
 * There are two kinds of flat. A *packed* flat holds all pieces that agree, each aligned to 256 bytes, and is
 * padded so that all ranks' slices are equal. An *in-place* flat is one layer of a stacked tensor whose
 * layers must lie in one buffer. This is so at stages 0 and 1, where the model uses base + l*stride and no
 * bracket changes base. The flat has no padding, so its last ranks' slices may be short or empty.
 *
 * Slices of a rank and pieces start at multiples of 256 bytes from the flat's start. So every shard boundary
 * is a multiple of 32 elements from the start of its layer, for every world and both kinds of flat. It
 * never cuts a canonical block of the gradient norm.
 *
 * If such boundaries would cut a granule, the flat is cut at a list of places instead. These are the places
 * nearest to equal cuts that cut neither a granule nor a block. Slices then differ in size, and may be empty.
 * Every rank reserves the largest, so offsets and sizes are still equal on all ranks. */
#ifndef ZR_SHARD_LAYOUT_H
#define ZR_SHARD_LAYOUT_H

#include "comm/segment.h"
#include "shard/placement.h"

#define ZR_PIECE_ALIGN 256 /* bytes; alignment of a piece in a packed flat */
#define ZR_GAP_BYTES   256 /* least bytes after a gradient; a multiple of ZR_PIECE_ALIGN */
#define ZR_SHARD_ALIGN 256 /* bytes; slices are multiples of it, and of 128 even when f32 is sent as bf16 */

/* Roles of a tensor that two pipeline stages share. The first stage owns and updates it, and sends its values
 * to the last stage, which has a copy. */
enum zr_tie { ZR_TIE_NONE, ZR_TIE_OWNER, ZR_TIE_COPY };

/* A tensor as the model gave it, checked and copied. */
struct zr_tensor {
    char *name;
    /* Addresses of the model's own pointers. grad NULL: frozen. */
    void **param, **grad;

    enum zero_dtype dtype;
    /* Row-major dimensions, ended by 0 if fewer than 8. Their product is n_elems. */
    int64_t shape[8];
    /* Elements of all layers together. */
    int64_t n_elems;
    /* Layers of a stacked tensor, else 1. 0: a buffer, which is in no unit. */
    int64_t n_layers;
    /* Unit of layer 0. 0 for a buffer. */
    int32_t unit;
    /* Pipeline stage on this rank. All tensors of a unit have the same. */
    int32_t pp_stage;
    /* Parameter group in the options; its optimizer, and the number of states that it keeps per
     * weight. */
    int32_t group;
    enum zero_optimizer optimizer;
    int32_t n_states;
    /* How its masters and states are kept. masters is F32 unless the dtype is BF16. */
    enum zero_masters masters;
    enum zero_moments moments;
    /* Dtype of its gradient sum, F32 or BF16. */
    enum zero_dtype sum_dtype;
    /* Backward brackets of its unit in a micro-batch. 0: not given. */
    int32_t uses;
    /* The group's weight decay does not apply. */
    bool no_decay;
    /* Elements of a layer that stay together on one rank, counted from its first. 0 means 1. */
    int64_t granule;

    bool stacked, overwrite, resident;
    /* cut: tensor-parallel ranks have different elements (tp_cut.h). The whole tensor has cut_size elements
     * along cut_dim, in cut_blocks blocks; cut_size 0: as many as all parts together. Not cut: all have the
     * same elements. */
    bool cut;
    int32_t cut_dim, cut_blocks;
    int64_t cut_size;
    /* The program gives values of the whole tensor, and the library cuts out this rank's part. */
    bool given_whole;
    /* Tensor-parallel ranks have the whole tensor, and each computes a gradient; the sum of these is the
     * gradient. */
    bool partial;
    /* The tensor's role. If it is trained, tied_grad of a copy is the address of the model's pointer to the
     * gradient that goes to the owner. The copy's grad is NULL, because only the owner updates it. */
    enum zr_tie tie;
    void **tied_grad;
    /* Not trained. Its memory stays the model's (buffers.c). */
    bool buffer;
    /* The model reads its pointers after each begin, so several layers may be open. */
    bool pointer_per_begin;
};

/* One layer of a tensor, or all of a tensor that is not stacked. */
struct zr_piece {
    int32_t tensor, layer;
    /* Its first element in the flat. */
    int64_t first;
    /* Elements, > 0. */
    int64_t n;
};

struct zr_flat {
    int32_t unit;
    enum zero_dtype dtype;
    /* The optimizer of the flat's tensors, and the number of its states. NONE and 0 if frozen. */
    enum zero_optimizer optimizer;
    int32_t n_states;
    /* How masters and states of all its tensors are kept, and the dtype of their gradient sums. F32 if
     * frozen. */
    enum zero_masters masters;
    enum zero_moments moments;
    enum zero_dtype sum_dtype;

    bool trainable, in_place, cut;
    /* Another pipeline stage owns its tensors. That stage sends their values, and saves them. */
    bool copy;
    int32_t first_piece, n_pieces;
    /* The same bytes, cut once for each rank of the world (fine) and once for each rank of a shard group
     * (inner). Fine slices are ordered by inner index, then by group, so those of one inner slice lie next to
     * each other in it. Without groups both cuts are equal. With granules both use one list of places, in
     * elements, which the flat owns. */
    struct zr_cut fine, inner;
    /* Bytes of the largest fine slice in each inner slice, so that collectives over all ranks need not search
     * for it. In the memory of the list of places. NULL: there is no list. */
    const int64_t *groups_most;
    /* Fine slices of an inner slice. */
    int32_t outer;
    /* Offset of a packed flat in the full parameters and in the full gradients of its unit. For an in-place
     * flat: offset in the regions of all in-place flats. grad_at is set for trainable flats only. */
    int64_t param_at, grad_at;
    /* Byte offset of one rank's inner slice in the unit's packed parameter shards. */
    int64_t shard_at;
    /* Elements of the largest fine slice, of the largest inner slice and of the flat, in multiples of 256
     * bytes. Every rank reserves these. */
    int64_t fine_elems, inner_elems, elems;
};

struct zr_unit {
    int32_t first_flat, n_flats;
    /* Bytes of the packed flats, full. */
    int64_t param_bytes;
    /* Bytes of the packed trainable flats, full. */
    int64_t grad_bytes;
    /* Bytes of one rank's inner slices of the packed flats. */
    int64_t shard_bytes;
    /* Backward brackets in a micro-batch, as its tensors say. 0: none of them says. */
    int32_t uses;

    bool trainable;
    /* A tensor of it asks for its own memory (ZERO_RESIDENT, ZERO_TIED). zr_plan.resident has the result. */
    bool asked_resident;
};

struct zr_layout {
    /* Shard groups, and ranks of each. world is their product. */
    int32_t outer, inner, world;
    /* Stacked tensors lie in one buffer. */
    bool in_place;
    /* At least ZR_GAP_BYTES after each tensor's gradient are unused and stay zero. If they change, the model
     * wrote there (check/stored.c). */
    bool gaps;

    int32_t n_tensors, n_units, n_flats, n_pieces, n_buffers;
    struct zr_tensor *tensors;
    struct zr_unit *units;
    /* In the order of units. */
    struct zr_flat *flats;
    /* In the order of flats. */
    struct zr_piece *pieces;
    /* Piece of each layer: layer l of tensor t is piece_of[layer_base[t] + l]. */
    int32_t *piece_of;
    /* (n_tensors + 1) Layers of all tensors before this one. */
    int32_t *layer_base;

    int64_t in_place_param_bytes, in_place_grad_bytes;
    /* Elements of the fine slices of all trainable flats. */
    int64_t state_elems;
    /* Elements of the model, without buffers. */
    int64_t n_params;
    /* Some flat is cut at a list of places, so ranks differ in what they own, receive and send. */
    bool has_places;
    /* Bytes of a copy of all buffers, each in zr_buffer_room bytes. */
    int64_t buffer_bytes;
    /* Hash of everything that ranks must agree on. */
    uint64_t hash;
};

/* Makes a layout for `outer` groups of `inner` ranks; struct zr_layout explains in_place and gaps. The call
 * takes the tensors over: zr_layout_free frees them, or this call if it fails. Returns ZERO_ERR_ARG if units
 * leave a gap or their tensors disagree on uses, or ZERO_ERR_NOMEM. */
int zr_layout_make(struct zr_tensor *tensors, int32_t n_tensors, int32_t inner, int32_t outer, bool in_place,
                   bool gaps, struct zr_layout **out);
/* l may be NULL. */
void zr_layout_free(struct zr_layout *l);
/* Hashes everything in the tensor that ranks must agree on. Pointers do not count. */
uint64_t zr_tensor_hash(const struct zr_tensor *t, uint64_t seed);
void zr_tensors_free(struct zr_tensor *t, int32_t n);

/* Returns the bytes of one buffer in a copy of all buffers. */
int64_t zr_buffer_room(const struct zr_tensor *t);

/* Elements [*first, *first + result) of the flat are in fine slice k, 0 <= k < world; the result may be 0.
 * Each element has one such owner at every placement. The norm, checkpoints and first values use it. */
int64_t zr_flat_owned(const struct zr_flat *f, int k, int64_t *first);

/* Elements of a flat. */
struct zr_span {
    int64_t first, n;
};

/* Returns the elements that a rank has of the flat at a level. */
struct zr_span zr_flat_span(const struct zr_flat *f, struct zr_where at, enum zr_level level);

/* Cuts inner slice number `inner` into the groups' fine slices. */
static inline struct zr_cut zr_flat_groups_cut(const struct zr_flat *f, int32_t inner)
{
    struct zr_cut groups = zr_cut_part(&f->fine, inner * f->outer, f->outer);
    groups.most = f->groups_most ? f->groups_most[inner] : 0;
    return groups;
}

/* Returns the same cut of the flat's gradient sums, in their dtype. */
static inline struct zr_cut zr_flat_sums_cut(const struct zr_flat *f, const struct zr_cut *c,
                                             enum zero_dtype dtype)
{
    return zr_cut_in(c, zr_dtype_bytes(f->dtype), zr_dtype_bytes(dtype));
}

/* Cuts the sums of inner slice number `inner` into the groups' fine slices. */
static inline struct zr_cut zr_flat_group_sums_cut(const struct zr_flat *f, int32_t inner,
                                                   enum zero_dtype dtype)
{
    const struct zr_cut groups = zr_flat_groups_cut(f, inner);
    return zr_flat_sums_cut(f, &groups, dtype);
}

/* Returns the bytes of one element of the flat's gradient sums. */
static inline int64_t zr_sum_size(const struct zr_flat *f)
{
    return zr_dtype_bytes(f->sum_dtype);
}

/* Returns the number of a rank's fine slice. */
static inline int32_t zr_layout_fine(const struct zr_layout *l, struct zr_where at)
{
    return at.inner * l->outer + at.outer;
}

/* Returns the flat that a piece is in. */
const struct zr_flat *zr_piece_flat(const struct zr_layout *l, int32_t piece);

static inline int64_t zr_round_up(int64_t n, int64_t to)
{
    return (n + to - 1) / to * to;
}

static inline int64_t zr_min(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static inline int64_t zr_max(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

/* Whether equal slices never cut the granule, because it divides a block of the norm. */
static inline bool zr_granule_fits(int64_t granule)
{
    return granule <= 1 || ZR_NORM_BLOCK % granule == 0;
}

#endif
