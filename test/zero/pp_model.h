/* SPDX-License-Identifier: Apache-2.0 */
/* pp_model.h: a model in pipeline stages on any mesh, also with several stages on a rank, for tests of
 * checkpoints, files of weights and first values. It has stacked tensors that are divided over the stages, a
 * tied tensor, buffers, and tensors of one stage. Ranks are threads. Gradients depend only on the element of
 * the whole model, so all meshes end in the same bits. */
#ifndef ZR_TEST_PP_MODEL_H
#define ZR_TEST_PP_MODEL_H

#include "test/zero/pipeline_ranks.h"

enum {
    MOST_WORLD = 16,
    TENSORS = 10,
    /* unless pp_set_layers says so */
    LAYERS = 5,
    MOST_LAYERS = 12,
    MICRO = 4,
    STEPS = 2,
    MOST_ELEMS = 1 << 11,
    MOST_TABLE = 12,
    MOST_OWN = 3
};
enum { TEXT = 128 };
enum { EMBEDDING = 0, SEEN = 2, SCALE = 5, NORM = 8, MEAN = 9, ACTIVATIONS = 4 };

/* Where a tensor is. */
enum where { FIRST_AND_LAST, IN_FIRST, IN_LAYERS, IN_LAYER_3, IN_LAST };

/* The whole model's; cut: the dimension, -1: none. */
struct shape {
    const char *name;
    int64_t shape[4];
    int dtype, cut, blocks;
    enum where where;
    int optimizer, n_states;
    bool padded, frozen, buffer;
};
extern struct shape pp_shapes[TENSORS];
void pp_set_layers(int n);
/* Step 1 leaves out wpe, which is in the first stage, and the last layer. */
extern bool pp_leaves_out;

/* v: stages of a rank, 0: one. Behind stage 3: hybrids. With several stages on the one rank of pp the
 * embedding is the first stage's alone, as the library has no tied tensors there. */
struct mesh {
    int pp, dp, tp, stage, v;
};
enum { PP_MESHES = 15 };
extern const struct mesh pp_meshes[PP_MESHES];

struct setup {
    const struct mesh *mesh;
    const char *folder;
    bool async, check;
    /* first values are given after the wrap */
    bool later;
    /* maps of weights have no second name of the tied tensor */
    bool no_head;
    /* of the mesh that saved */
    int n_saved;
    /* changes the model before the wrap, or the load */
    void (*spoil)(struct zero_tensor *table, int n, int stage);
    int code;
    const char *says;
};

/* What a rank has: tensor of the whole, and from which element of its part on. */
struct own {
    int tensor, layer, n_layers;
    int64_t from, n;
    bool copy;
};

/* One stage of a rank. */
struct model {
    int first, n_layers, pp, stage, dp, tp, part, n;
    /* the embedding is in one stage */
    bool untied;
    struct own own[MOST_TABLE];
    void *param[MOST_TABLE], *grad[MOST_TABLE];
    float memory[MOST_TABLE][MOST_ELEMS];
    struct zero_tensor table[MOST_TABLE];
    /* where the stage's units and tensors begin in the rank's; the rank's next stage */
    int first_unit, first_tensor;
    struct model *next;
};

/* A sum over the whole model's elements that this rank's stage and part own, and apart from it what the tied
 * tensor's weights come to on both of its stages. */
struct bits {
    uint64_t all, tied;
};
/* Of each rank, for the test: before a save or after a load, and a step later. */
extern struct bits pp_found[MOST_WORLD][2];

/* A small number that bf16 has. draw: 0 the first weight, then one for each gradient. */
float pp_value(int tensor, int draw, int64_t whole);
void pp_put(int dtype, void *at, int64_t i, float x);
float pp_get(int dtype, const void *at, int64_t i);
/* Which element of the whole tensor is element i of the k-th tensor here; -1: none. */
int64_t pp_whole_of(const struct model *m, int k, int64_t i);

/* Wraps what a rank has, by r->arg, a struct setup; *out: its stages, which pp_free frees, also after an
 * error. */
int pp_wrap(struct toy_rank *r, struct model **out, struct place *at, zero_ctx **z);
void pp_free(struct model *m);
/* The type of a rank's work between zero_wrap and zero_unwrap, which returns the first error. r->arg is the
 * setup. */
typedef int pp_fn(struct toy_rank *r, struct model *m, zero_ctx *z, const struct place *at);
/* Wraps on all ranks of s->mesh, and calls fn on each. Fails the test unless all goes well, or, without fn,
 * unless zero_wrap fails as s says. what: said of the mesh. */
void pp_run(const struct setup *s, pp_fn *fn, const char *what);
/* The same, but the outcome is left in r. */
void pp_run_ranks(const struct setup *s, pp_fn *fn, struct toy_rank r[MOST_WORLD]);
int pp_step(struct model *first, zero_ctx *z, int step, const struct place *at);
int pp_look(const struct model *m, zero_ctx *z, struct bits *out);

enum { MOST_MAP = 64 };
struct map {
    struct zero_weight list[MOST_MAP];
    char names[MOST_MAP][32];
    int n;
};
/* Of a rank's stages, in the order of its table, under other names and layer by layer; but all layers of one
 * tensor as one, and, if head is set, the tied tensor under a second name, which the last stage gives. */
void pp_make_map(const struct model *first, struct map *out, bool head);

int pp_world(const struct mesh *m);
const char *pp_text(const struct mesh *m, const char *what, char text[TEXT]);
/* Fails the test unless pp_found has the hashes want[] of the whole model, before and a step later, and ranks
 * that have the same have the same bits. A hash that is not known yet is 0, and is set. */
void pp_check_bits(const struct mesh *m, uint64_t want[2], const char *what);

#endif
