/* SPDX-License-Identifier: Apache-2.0 */
/* layout.h: where every element of the model is, on every rank: tensors -> units -> flats -> pieces.
 *
 *   tensor  what the model names. A stacked tensor is n_slices equal slices, slice l belonging to unit + l.
 *   unit    what is gathered together.
 *   flat    the tensors of one unit that share dtype, trainability, optimizer, the number of its states and
 *           whether the model's parts have different elements of them, laid end to end: a run of bytes that
 *           is cut into equal slices, one for each rank of the job. Collectives move whole flats.
 *   piece   one tensor slice inside a flat.
 *
 * Two kinds of flat. A *packed* flat holds all pieces of its key (unit, dtype, trainable, optimizer, cut),
 * each 256-byte aligned, padded so that all ranks' slices are equal. An *in-place* flat is one slice of a
 * stacked tensor that has to lie in one buffer with the other slices (stages 0 and 1, where the model uses
 * base + l*stride with no bracket to re-point base): nothing can be padded there, so its last slices may be
 * short or empty.
 *
 * Slices of a rank start at multiples of 256 bytes from the flat's start and pieces at multiples of 256, so
 * every shard boundary is a multiple of 32 elements from the start of its tensor slice, for every world and
 * both kinds: the canonical blocks of the gradient norm are never cut.
 *
 * Granules that such boundaries would tear are kept together: a flat with one is cut at a list of places, the
 * nearest to an equal cut that tear neither a granule nor a block. Its slices differ in size,
 * and may be empty. What every rank reserves is the largest, so offsets and sizes stay equal on all ranks. */
#ifndef ZR_SHARD_LAYOUT_H
#define ZR_SHARD_LAYOUT_H

#include "comm/segment.h"
#include "shard/placement.h"

#define ZR_PIECE_ALIGN 256 /* bytes, start of a piece in a packed flat */
#define ZR_GAP_BYTES   256 /* at least, behind a gradient; a multiple of ZR_PIECE_ALIGN */
#define ZR_SHARD_ALIGN 256 /* bytes; slices are multiples: of 128 still when f32 travels as bf16 */

/* A tensor that two pipeline stages have. The first updates it, and gives its values to the last. */
enum zr_tie { ZR_TIE_NONE, ZR_TIE_OWNER, ZR_TIE_COPY };

/* As given by the model, checked and copied. */
struct zr_tensor {
    char *name;
    /* the model's own pointers; grad NULL: frozen */
    void **param, **grad;

    enum zr_dtype dtype;
    /* row-major, ended by 0 or by all 8; the product is n_elems */
    int64_t shape[8];
    /* of the whole tensor */
    int64_t n_elems;
    /* layers of a stacked tensor, else 1; 0: a buffer, which lies in no unit */
    int64_t n_slices;
    /* of slice 0; of a buffer 0 */
    int32_t unit;
    /* of the rank's pipeline stages, which; all tensors of a unit are of one */
    int32_t pp_stage;
    /* of the options, which group it is in; and that group's optimizer, with the states that it keeps */
    int32_t group;
    enum zr_optimizer optimizer;
    int32_t n_states;
    /* backward brackets of its unit in a micro-batch; 0: it does not say */
    int32_t uses;
    /* the group's weight decay is not its */
    bool no_decay;
    /* elements of a slice that stay on one rank, counted from its first; 0 is 1 */
    int64_t granule;

    bool stacked, overwrite, resident;
    /* other parts of the model have other elements of it: they are cut along a dimension, in blocks, and the
     * whole has so much along it, 0: as much as all parts have; else all have the same */
    bool cut;
    int32_t cut_dim, cut_blocks;
    int64_t cut_size;
    /* the program gives values of the whole, and the library cuts this part out */
    bool given_whole;
    /* the model's parts have all of it, and each a gradient of its own: it is their sum */
    bool partial;
    /* of two pipeline stages, with tied_grad on the copy's: the model's pointer to the gradient that goes to
     * the owner, where the tensor is trained; its grad is NULL, as the owner alone updates it */
    enum zr_tie tie;
    void **tied_grad;
    /* not trained, and its memory stays the model's (buffers.c) */
    bool buffer;
    /* the model takes its pointers after each begin: several slices may be open */
    bool pointer_per_begin;
};

struct zr_piece {
    int32_t tensor, slice;
    /* element of the flat it starts at */
    int64_t first;
    /* elements, > 0 */
    int64_t n;
};

struct zr_flat {
    int32_t unit;
    enum zr_dtype dtype;
    /* as its tensors have them; NONE and 0 too of frozen ones */
    enum zr_optimizer optimizer;
    int32_t n_states;

    bool trainable, in_place, cut;
    /* of tensors that another pipeline stage owns: their values come from there, and are saved there */
    bool copy;
    int32_t first_piece, n_pieces;
    /* The same bytes, cut once for each rank of the job and once for each of a group. Fine slices are ordered
     * by group index inside, then by group: those of one inner slice lie side by side in it. Without groups
     * both cuts are one. With granules they share one list of places, in elements, which is the flat's. */
    struct zr_cut fine, inner;
    /* (inner) bytes of the largest fine slice of each inner one, so that what goes over all ranks need not
     * look for it again; in the memory of the list of places. NULL: there is no list */
    const int64_t *groups_most;
    /* fine slices of an inner one */
    int32_t outer;
    /* Offsets inside the full parameters of its unit (packed) or inside the region of all in-place flats, and
     * the same for gradients (trainable flats only). */
    int64_t param_at, grad_at;
    /* one rank's inner slice, inside the unit's packed parameter shards (bytes) */
    int64_t shard_at;
    /* Of the largest slice of each cut, and of the flat; what every rank reserves. Multiples of 256 bytes. */
    int64_t fine_elems, inner_elems, elems;
};

struct zr_unit {
    int32_t first_flat, n_flats;
    /* packed flats, full */
    int64_t param_bytes;
    /* packed trainable flats, full */
    int64_t grad_bytes;
    /* packed flats, one rank's inner slices */
    int64_t shard_bytes;
    /* fp32 elements of the gathered gradient: all trainable flats, padded; and of one inner slice of it */
    int64_t elems, inner_elems;
    /* backward brackets in a micro-batch, as its tensors say; 0: none of them does */
    int32_t uses;

    bool trainable, resident;
};

struct zr_layout {
    /* Groups, and ranks of each; world is their product. */
    int32_t outer, inner, world;
    /* stacked tensors lie in one buffer */
    bool in_place;
    /* behind each tensor's gradient lie at least ZR_GAP_BYTES that nobody uses, and that stay zero: where
     * they are not, the model wrote there (check/stored.c) */
    bool gaps;

    int32_t n_tensors, n_units, n_flats, n_pieces, n_buffers;
    struct zr_tensor *tensors;
    struct zr_unit *units;
    /* in order of units */
    struct zr_flat *flats;
    /* in order of flats */
    struct zr_piece *pieces;
    /* first piece index of each tensor in slice order: piece_of[slice_base[t] + l] */
    int32_t *piece_of;
    /* (n_tensors + 1) */
    int32_t *slice_base;

    int64_t in_place_param_bytes, in_place_grad_bytes;
    /* fp32 elements of one array of fine slices of all trainable flats */
    int64_t state_elems;
    /* elements of the model, without buffers */
    int64_t n_params;
    /* some flat is cut at a list of places: ranks differ in what they own, receive and send */
    bool has_places;
    /* what a copy of all buffers takes, one after the other: see zr_buffer_room */
    int64_t buffer_bytes;
    /* of everything that must agree between ranks */
    uint64_t hash;
};

/* tensors is taken over: freed by zr_layout_free, or by this call when it fails. in_place and gaps: see
 * above. ZR_ERR_ARG for units that leave a gap, or whose tensors disagree on uses; ZR_ERR_NOMEM. */
int zr_layout_make(struct zr_tensor *tensors, int32_t n_tensors, int32_t inner, int32_t outer, bool in_place,
                   bool gaps, struct zr_layout **out);
/* NULL is allowed. */
void zr_layout_free(struct zr_layout *l);
/* Of all that must agree between ranks; not of the pointers. */
uint64_t zr_tensor_hash(const struct zr_tensor *t, uint64_t seed);
void zr_tensors_free(struct zr_tensor *t, int32_t n);

/* Of one buffer's copy in a row of them. */
int64_t zr_buffer_room(const struct zr_tensor *t);

/* Elements [*first, *first + result) of the flat in fine slice number k of world; may be none. Each element
 * has one such owner, at every placement: the norm, checkpoints and first values go by it. */
int64_t zr_flat_owned(const struct zr_flat *f, int k, int64_t *first);

/* Elements of a flat. */
struct zr_span {
    int64_t first, n;
};

/* What a rank has of it at a level. */
struct zr_span zr_flat_span(const struct zr_flat *f, struct zr_where at, enum zr_level level);

/* The inner slice of that number, cut for the groups. */
static inline struct zr_cut zr_flat_groups_cut(const struct zr_flat *f, int32_t inner)
{
    struct zr_cut groups = zr_cut_part(&f->fine, inner * f->outer, f->outer);
    groups.most = f->groups_most ? f->groups_most[inner] : 0;
    return groups;
}

/* A cut of the flat, of its sums in fp32. */
static inline struct zr_cut zr_flat_sums_cut(const struct zr_flat *f, const struct zr_cut *c)
{
    return zr_cut_in(c, zr_dtype_bytes(f->dtype), sizeof(float));
}

/* The number of a rank's fine slice. */
static inline int32_t zr_layout_fine(const struct zr_layout *l, struct zr_where at)
{
    return at.inner * l->outer + at.outer;
}

/* The flat of piece p. */
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

/* Equal slices never cut the granule: it divides a block of the norm. */
static inline bool zr_granule_fits(int64_t granule)
{
    return granule <= 1 || ZR_NORM_BLOCK % granule == 0;
}

#endif
