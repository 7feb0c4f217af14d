/* SPDX-License-Identifier: Apache-2.0 */
/* pp_model.h: a model with pipeline stages on any mesh, also with several pipeline stages per rank, for tests
 * of checkpoints, weight files and initial values. It has stacked tensors that span pipeline stages, a tied
 * tensor, buffers, and tensors of one pipeline stage only.
 *
 * Ranks are threads. A gradient depends only on the element of the whole model, so all meshes end in the same
 * bits. */
#ifndef ZR_TEST_PP_MODEL_H
#define ZR_TEST_PP_MODEL_H

#include "test/zero/pipeline_ranks.h"

enum {
    MAX_WORLD = 16,
    TENSORS = 10,
    /* the default; pp_set_layers changes it */
    LAYERS = 5,
    MAX_LAYERS = 12,
    MICRO = 4,
    STEPS = 2,
    MAX_ELEMS = 1 << 11,
    MAX_TABLE = 12,
    MAX_OWN = 3
};
enum { TEXT = 128 };
enum { EMBEDDING = 0, SEEN = 2, SCALE = 5, NORM = 8, MEAN = 9, ACTIVATIONS = 4 };

/* Pipeline stages that have the tensor. */
enum where { FIRST_AND_LAST, IN_FIRST, IN_LAYERS, IN_LAYER_3, IN_LAST };

/* A tensor of the whole model. cut: the dimension that tensor parallelism cuts; -1: none. */
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
/* Changes the shapes so that up to this many ranks of tp (a power of two) have whole blocks of 8-bit states.
 * The last block of a layer may still be shorter. */
void pp_use_blocks(int tp);
/* If set, step 1 runs no backward for wpe, which is in the first pipeline stage, and for the last layer. */
extern bool pp_leaves_out;

/* Gradients of this step are not finite, so the library skips it. Negative: no step is skipped. */
extern int pp_skipped_step;

/* v: pipeline stages per rank; 0: one. stage: the ZeRO stage; above 3: a hybrid. If pp is 1 and v is above 1,
 * only the first pipeline stage has the embedding, because the library does not tie tensors there. */
struct mesh {
    int pp, dp, tp, stage, v;
};
enum { PP_MESHES = 15 };
extern const struct mesh pp_meshes[PP_MESHES];

struct setup {
    const struct mesh *mesh;
    const char *folder;
    bool async, check;
    /* enum zero_masters and enum zero_moments of all tensors, and the seed of their rounding */
    int masters, moments, seed;
    /* NULL: lines are dropped */
    void (*log)(void *arg, const char *line);
    /* initial values are set after zero_wrap */
    bool later;
    /* weight maps do not name the tied tensor a second time */
    bool no_head;
    /* world size of the run that saved the checkpoint */
    int n_saved;
    /* changes the model before zero_wrap or a load */
    void (*spoil)(struct zero_tensor *table, int n, int stage);
    int code;
    const char *says;
};

/* A tensor that a rank has. from: its first element within the tensor-parallel rank's part. */
struct own {
    int tensor, layer, n_layers;
    int64_t from, n;
    bool copy;
};

/* One pipeline stage of a rank. */
struct model {
    int first, n_layers, pp, stage, dp, tp, part, n;
    /* only the first pipeline stage has the embedding */
    bool untied;
    struct own own[MAX_TABLE];
    void *param[MAX_TABLE], *grad[MAX_TABLE];
    float memory[MAX_TABLE][MAX_ELEMS];
    struct zero_tensor table[MAX_TABLE];
    /* the pipeline stage's first unit and tensor in the rank's table */
    int first_unit, first_tensor;
    struct model *next;
};

/* all: sum of hashes over the elements that this rank's pipeline stage and tensor-parallel rank own. tied:
 * the same over the weights of the tied tensor, on both of its pipeline stages. */
struct bits {
    uint64_t all, tied;
};
/* Hashes of each rank, for the test to compare: before a save or after a load, and one step later. */
extern struct bits pp_found[MAX_WORLD][2];

/* A small number that is exact in bf16. draw: 0 for the initial weight, then one number per gradient. */
float pp_value(int tensor, int draw, int64_t whole);
void pp_put(int dtype, void *at, int64_t i, float x);
float pp_get(int dtype, const void *at, int64_t i);
/* Returns which element of the whole tensor is element i of the k-th tensor here; -1: none. */
int64_t pp_whole_of(const struct model *m, int k, int64_t i);

/* Wraps a rank's pipeline stages; r->arg is the struct setup. pp_free frees *out, also after an error. */
int pp_wrap(struct toy_rank *r, struct model **out, struct place *at, zero_ctx **z);
void pp_free(struct model *m);
/* A rank's work between zero_wrap and zero_unwrap. Returns the first error. r->arg is the setup. */
typedef int pp_fn(struct toy_rank *r, struct model *m, zero_ctx *z, const struct place *at);
/* Wraps on all ranks of s->mesh, and calls fn on each. Fails the test unless all goes well. If fn is NULL,
 * zero_wrap must fail with s->code and s->says. what: the run's name in failure messages. */
void pp_run(const struct setup *s, pp_fn *fn, const char *what);
/* Does the same as pp_run, but leaves the outcome in r. */
void pp_run_ranks(const struct setup *s, pp_fn *fn, struct toy_rank r[MAX_WORLD]);
int pp_step(struct model *first, zero_ctx *z, int step, const struct place *at);
int pp_look(const struct model *m, zero_ctx *z, struct bits *out);

enum { MAX_MAP = 64 };
struct map {
    struct zero_weight list[MAX_MAP];
    char names[MAX_MAP][32];
    int n;
};
/* Maps the tensors of a rank's pipeline stages, in the order of its table. Names differ from the table's, and
 * layers are separate except for one tensor. If head is set, the last pipeline stage gives the tied tensor a
 * second name. */
void pp_make_map(const struct model *first, struct map *out, bool head);

int pp_world(const struct mesh *m);
const char *pp_text(const struct mesh *m, const char *what, char text[TEXT]);
/* Fails the test unless pp_found sums to the hashes want[], at once and a step later, and replicas have equal
 * bits. A want[] of 0 is set to the sum. */
void pp_check_bits(const struct mesh *m, uint64_t want[2], const char *what);

#endif
