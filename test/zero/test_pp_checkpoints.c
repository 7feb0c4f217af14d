/* test_pp_checkpoints.c: a checkpoint of a model in pipeline stages is loaded with any other stages, groups
 * and parts, bit by bit, and training goes on from it alike; and so it is with its files of weights, and with
 * first values that are written. Gradients are those of the whole model's elements, so all meshes come to the
 * same bits. */
#include "test/zero/toy_net.h"

#include <dirent.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

enum {
    MOST_WORLD = 8,
    TENSORS = 10,
    LAYERS = 5,
    MICRO = 4,
    STEPS = 2,
    MOST_ELEMS = 1 << 10,
    MOST_TABLE = 12
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
static struct shape shapes[TENSORS] = {
    {"wte", {13, 6}, ZERO_BF16, 0, 1, FIRST_AND_LAST, 0, 2, true, false},
    {"wpe", {5, 6}, ZERO_F32, -1, 0, IN_FIRST, 0, 2, false, false},
    {"seen", {3}, ZERO_F32, -1, 0, IN_FIRST, 0, 0, false, true, true},
    {"qkvw", {LAYERS, 24, 6}, ZERO_BF16, 1, 3, IN_LAYERS, 0, 2, false, false},
    {"proj", {LAYERS, 6, 8}, ZERO_F32, 2, 1, IN_LAYERS, 0, 2, false, false},
    {"scale", {LAYERS, 6}, ZERO_F32, -1, 0, IN_LAYERS, 0, 0, false, true},
    {"alone", {7}, ZERO_F32, -1, 0, IN_LAYER_3, ZERO_LION, 1, false, false},
    {"count", {2}, ZERO_I32, -1, 0, IN_LAYER_3, 0, 0, false, true, true},
    {"norm", {6}, ZERO_BF16, -1, 0, IN_LAST, 0, 2, false, false},
    {"mean", {5}, ZERO_BF16, -1, 0, IN_LAST, 0, 0, false, true, true},
};

/* v: stages of a rank, 0: one. */
struct mesh {
    int pp, dp, tp, stage, v;
};
/* Behind stage 3: hybrids. */
static const struct mesh meshes[] = {{1, 1, 1, 0},    {2, 2, 1, 3},    {3, 1, 2, 1},   {1, 2, 2, 2},
                                     {4, 2, 1, 2},    {2, 4, 1, 4},    {2, 2, 2, 3},   {3, 2, 1, 0},
                                     {4, 1, 2, 3},    {1, 4, 1, 5},    {2, 1, 1, 1},   {2, 4, 1, 5},
                                     {2, 2, 1, 2, 2}, {3, 1, 2, 3, 2}, {2, 1, 1, 0, 3}};
enum { N_MESHES = sizeof meshes / sizeof *meshes };

#include "test/zero/tp_shape.inc"

/* A small number that bf16 has. draw: 0 the first weight, then one for each gradient. */
static float value_of(int tensor, int draw, int64_t whole)
{
    uint32_t x = (uint32_t)(tensor * 7919 + draw * 104729) + (uint32_t)whole * 2654435761u;
    x ^= x >> 15;
    x *= 2246822519u;
    x ^= x >> 13;
    return (float)((int)(x % 255) - 127) / 256;
}

static void put(int dtype, void *at, int64_t i, float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    if (dtype == ZERO_I32)
        ((int32_t *)at)[i] = (int32_t)(x * 256);
    else if (dtype == ZERO_BF16)
        ((uint16_t *)at)[i] = (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    else
        ((float *)at)[i] = x;
}

static float get(int dtype, const void *at, int64_t i)
{
    uint32_t bits;
    float x;
    if (dtype == ZERO_I32)
        return (float)((const int32_t *)at)[i] / 256;
    if (dtype != ZERO_BF16)
        return ((const float *)at)[i];
    bits = (uint32_t)((const uint16_t *)at)[i] << 16;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* ---- one rank's model ---- */

struct setup {
    const struct mesh *mesh;
    const char *folder;
    bool async, check;
    /* first values are given after the wrap */
    bool later;
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

struct model {
    int first, n_layers, pp, stage, dp, tp, part, n;
    struct own own[MOST_TABLE];
    void *param[MOST_TABLE], *grad[MOST_TABLE];
    float memory[MOST_TABLE][MOST_ELEMS];
    struct zero_tensor table[MOST_TABLE];
    /* where the stage's units and tensors begin in the rank's; the rank's next stage */
    int first_unit, first_tensor;
    struct model *next;
};

static void free_model(struct model *m)
{
    while (m) {
        struct model *next = m->next;
        free(m);
        m = next;
    }
}

static int layers_before(int pp, int stage)
{
    return LAYERS / pp * stage + (stage < LAYERS % pp ? stage : LAYERS % pp);
}

/* Units of a stage: the embedding, wpe, layers, norm, and on the last of several the embedding again. */
static int unit_of(const struct model *m, int tensor, bool copy)
{
    int layers = m->stage == 0 ? 2 : 0;
    switch (shapes[tensor].where) {
    case FIRST_AND_LAST:
        return copy ? layers + m->n_layers + 1 : 0;
    case IN_FIRST:
        return 1;
    case IN_LAYERS:
        return layers;
    case IN_LAYER_3:
        return layers + 3 - m->first;
    case IN_LAST:
        return layers + m->n_layers;
    }
    return -1;
}

static int n_units(const struct model *m)
{
    bool first = m->stage == 0, last = m->stage == m->pp - 1;
    return (first ? 2 : 0) + m->n_layers + last + (last && !first);
}

static bool has_tensor(const struct model *m, int tensor)
{
    switch (shapes[tensor].where) {
    case FIRST_AND_LAST:
        return m->stage == 0 || m->stage == m->pp - 1;
    case IN_FIRST:
        return m->stage == 0;
    case IN_LAYERS:
        return m->n_layers > 0;
    case IN_LAYER_3:
        return m->first <= 3 && 3 < m->first + m->n_layers;
    case IN_LAST:
        return m->stage == m->pp - 1;
    }
    return false;
}

static void add_tensor(struct model *m, int n_ranks, int tensor)
{
    const struct shape *s = &shapes[tensor];
    struct own *o = &m->own[m->n];
    struct zero_tensor *x = &m->table[m->n];
    bool stacked = s->where == IN_LAYERS;
    *o = (struct own){.tensor = tensor, .n = n_elems(s, m->tp), .n_layers = 1};
    o->copy = tensor == EMBEDDING && m->stage > 0;
    if (stacked) {
        o->layer = m->first;
        o->n_layers = m->n_layers;
        o->from = o->n / LAYERS * m->first;
        o->n = o->n / LAYERS * m->n_layers;
    }
    m->param[m->n] = m->memory[m->n];
    for (int64_t i = 0; i < o->n; i++) {
        int64_t whole = whole_of(s, m->tp, m->part, o->from + i);
        bool nonsense = whole < 0 || o->copy || (s->buffer && m->dp);
        put(s->dtype, m->param[m->n], i, nonsense ? 77 : value_of(tensor, 0, whole));
    }
    *x = (struct zero_tensor){.name = s->name,
                              .param = &m->param[m->n],
                              .grad = s->frozen ? NULL : &m->grad[m->n],
                              .dtype = (enum zero_dtype)s->dtype,
                              .unit = m->first_unit + unit_of(m, tensor, o->copy),
                              .pp_stage = m->stage / n_ranks,
                              .flags = stacked               ? ZERO_STACKED
                                       : s->buffer           ? ZERO_BUFFER
                                       : tensor == EMBEDDING ? ZERO_TIED
                                                             : 0,
                              .optimizer = s->optimizer};
    memcpy(x->shape, s->shape, sizeof s->shape);
    if (stacked)
        x->shape[0] = m->n_layers;
    if (s->cut >= 0) {
        x->shape[s->cut] = rows_of_part(s, m->tp);
        x->tp_cut = ZERO_TP_CUT(s->cut);
        x->tp_blocks = s->blocks;
        x->tp_size = s->padded ? s->shape[0] : 0;
    }
    m->n++;
}

static void forget_line(void *arg, const char *line)
{
    (void)arg;
    (void)line;
}

#define OR_RETURN(call)                                                                                      \
    do {                                                                                                     \
        int err_ = (call);                                                                                   \
        if (err_)                                                                                            \
            return err_;                                                                                     \
    } while (0)

struct place {
    int32_t pp, dp, n_dp, tp;
};

static struct model *make_stage(const struct mesh *on, int stage, const struct place *at, int first_unit)
{
    struct model *m = calloc(1, sizeof *m);
    m->pp = on->pp * (on->v ? on->v : 1);
    m->stage = stage;
    m->tp = on->tp;
    m->dp = at->dp;
    m->part = at->tp;
    m->first_unit = first_unit;
    m->first = layers_before(m->pp, stage);
    m->n_layers = layers_before(m->pp, stage + 1) - m->first;
    for (int t = 0; t < TENSORS; t++)
        if (has_tensor(m, t))
            add_tensor(m, on->pp, t);
    return m;
}

static int wrap(struct toy_rank *r, struct model **out, struct place *at, zero_ctx **z)
{
    struct model **first = out;
    const struct setup *s = r->arg;
    const struct mesh *on = s->mesh;
    const struct zero_axis axes[] = {
        {"pp", on->pp}, {"dp_replicate", on->stage > 3 ? on->dp / 2 : 1}, {"dp_shard", -1}, {"tp", on->tp}};
    struct zero_config cfg = toy_config(r, on->stage);
    zero_mesh *mesh = NULL;
    OR_RETURN(zero_mesh_open(&mesh, axes, 4, &cfg));
    OR_RETURN(zero_mesh_rank(mesh, "pp", &at->pp, NULL));
    OR_RETURN(zero_mesh_rank(mesh, "dp", &at->dp, &at->n_dp));
    OR_RETURN(zero_mesh_rank(mesh, "tp", &at->tp, NULL));
    cfg.mesh = mesh;
    cfg.shard_group = ZERO_AUTO;
    cfg.log = forget_line;
    cfg.clip = 0;
    cfg.save_async = s->async;
    cfg.check = s->check;
    cfg.init_from = s->later ? ZERO_INIT_LATER : ZERO_INIT_MODEL;
    cfg.activation_bytes = ACTIVATIONS;
    cfg.grad_accum_steps = MICRO / at->n_dp;
    int v = on->v ? on->v : 1, n = 0, units = 0;
    struct zero_tensor table[3 * MOST_TABLE];
    cfg.stages_per_rank = v;
    cfg.schedule = v > 1 ? ZERO_SCHEDULE_INTERLEAVED : ZERO_SCHEDULE_1F1B;
    for (int k = 0; k < v; k++, out = &(*out)->next) {
        struct model *m = *out = make_stage(on, k * on->pp + at->pp, at, units);
        m->first_tensor = n;
        n += m->n;
        units += n_units(m);
    }
    bool last_first = on->stage % 2; /* a table has its stages in any order */
    for (struct model *m = *first; m; m = m->next) {
        m->first_tensor = last_first ? n - m->first_tensor - m->n : m->first_tensor;
        memcpy(table + m->first_tensor, m->table, (size_t)m->n * sizeof *table);
    }
    if (s->spoil)
        s->spoil(table, n, at->pp);
    int err = zero_wrap(z, table, n, &cfg);
    zero_mesh_close(&mesh);
    return err;
}

/* ---- training ---- */

/* Adds to the gradients of a unit, of one micro-batch of all; of a tied tensor one half on the last stage,
 * then the other on the first. */
static void add_gradients(const struct model *m, int unit, int step, int micro)
{
    for (int k = 0; k < m->n; k++) {
        const struct own *o = &m->own[k];
        const struct shape *s = &shapes[o->tensor];
        int layer = unit - m->table[k].unit;
        if (s->frozen || layer < 0 || layer >= o->n_layers)
            continue;
        int draw = 1 + 2 * (step * MICRO + micro);
        bool tied = o->tensor == EMBEDDING, first = m->stage == 0, last = m->stage == m->pp - 1;
        for (int half = tied && !last; half <= (tied && first); half++)
            for (int64_t i = 0, n = o->n / o->n_layers; i < n; i++) {
                int64_t whole = whole_of(s, m->tp, m->part, o->from + layer * n + i);
                float g = whole < 0 ? 0 : value_of(o->tensor, draw + half, whole);
                put(s->dtype, m->grad[k], layer * n + i, get(s->dtype, m->grad[k], layer * n + i) + g);
            }
    }
}

/* As statistics of what forward has seen; the same on all ranks. */
static void change_buffers(struct model *m, int step)
{
    for (int k = 0; k < m->n; k++)
        for (int64_t i = 0; shapes[m->own[k].tensor].buffer && i < m->own[k].n; i++) {
            int dtype = shapes[m->own[k].tensor].dtype;
            put(dtype, m->param[k], i, get(dtype, m->param[k], i) + (float)(step + 1) / 256);
        }
}

static int one_step(struct model *first, zero_ctx *z, int step, const struct place *at)
{
    for (struct model *m = first; m; m = m->next)
        change_buffers(m, step);
    for (;;) {
        struct zero_action a;
        const struct model *m = first;
        OR_RETURN(zero_next(z, &a));
        if (a.micro_batch < 0)
            break;
        for (int k = 0; k < a.pp_stage; k++)
            m = m->next;
        int n = n_units(m);
        for (int u = 0; u < n; u++) {
            int unit = m->first_unit + (a.phase == ZERO_FORWARD ? u : n - 1 - u);
            OR_RETURN(zero_begin(z, unit, a.phase));
            if (a.phase == ZERO_BACKWARD)
                add_gradients(m, unit, step, a.micro_batch * at->n_dp + at->dp);
            OR_RETURN(zero_end(z, unit, a.phase));
        }
        if (a.out)
            memset(a.out, 0, ACTIVATIONS);
        OR_RETURN(zero_finish(z));
    }
    return zero_step(z, 0.125f, NULL);
}

/* A sum over the whole model's elements that this rank's stage and part own, and apart from it what the tied
 * tensor's weights come to on both of its stages. */
struct bits {
    uint64_t all, tied;
};

static int look_at_stage(const struct model *m, zero_ctx *z, struct bits *out)
{
    static const int values[] = {ZERO_VALUE_PARAM, ZERO_VALUE_MASTER, ZERO_VALUE_STATE, ZERO_VALUE_STATE + 1};
    for (int k = 0; k < m->n; k++) {
        const struct own *o = &m->own[k];
        const struct shape *s = &shapes[o->tensor];
        for (int v = 0; v < (s->frozen || o->copy ? 1 : 2 + s->n_states); v++) {
            float x[MOST_ELEMS];
            bool narrow = v == 0 && s->dtype == ZERO_BF16;
            memset(x, 0x7f, sizeof x);
            OR_RETURN(zero_read(z, m->first_tensor + k, values[v], 0, o->n, x));
            for (int64_t i = 0; i < o->n; i++) {
                int64_t whole = whole_of(s, m->tp, m->part, o->from + i);
                uint64_t h = (uint64_t)whole * 0x9e3779b97f4a7c15u + (uint64_t)(o->tensor * 8 + v);
                uint32_t bits = 0;
                memcpy(&bits, (const char *)x + i * (narrow ? 2 : 4), narrow ? 2 : 4);
                h = (h ^ bits) * 0xff51afd7ed558ccdu;
                h ^= h >> 31;
                if (whole < 0)
                    continue;
                if (!o->copy && (s->cut >= 0 || m->part == 0))
                    out->all += h;
                if (o->tensor == EMBEDDING && v == 0)
                    out->tied += h;
            }
        }
    }
    return 0;
}

static int look(const struct model *m, zero_ctx *z, struct bits *out)
{
    *out = (struct bits){0};
    for (; m; m = m->next)
        OR_RETURN(look_at_stage(m, z, out));
    return 0;
}

/* ---- ranks ---- */

/* Of each rank: before the save or after the load, and a step later. */
static struct bits found[MOST_WORLD][2];

static void save_one(struct toy_rank *r)
{
    const struct setup *s = r->arg;
    struct model *m = NULL;
    struct place at = {0};
    zero_ctx *z = NULL;
    int err = 0;
    char own[16];
    TOY_TRY(wrap(r, &m, &at, &z));
    for (int step = 0; step < STEPS; step++)
        TOY_TRY(one_step(m, z, step, &at));
    TOY_TRY(look(m, z, &found[r->rank][0]));
    snprintf(own, sizeof own, "rank %d", r->rank);
    TOY_TRY(zero_set_rank_data(z, own, sizeof own));
    TOY_TRY(zero_set_user_data(z, r->rank ? "other" : "mine", 4));
    TOY_TRY(zero_save(z, s->folder));
    TOY_TRY(one_step(m, z, STEPS, &at));
    TOY_TRY(zero_save_wait(z));
    TOY_TRY(look(m, z, &found[r->rank][1]));
    zero_unwrap(&z);
    free_model(m);
}

static void load_one(struct toy_rank *r)
{
    const struct setup *s = r->arg;
    struct model *m = NULL;
    struct place at = {0};
    struct zero_stats stats;
    zero_ctx *z = NULL;
    const void *mine = NULL;
    int64_t bytes = 0;
    int32_t n_saved = 0;
    int err = 0;
    TOY_TRY(wrap(r, &m, &at, &z));
    if (s->check) /* over what was trained meanwhile */
        TOY_TRY(one_step(m, z, 7, &at));
    TOY_TRY(zero_load(z, s->folder));
    TOY_TRY(look(m, z, &found[r->rank][0]));
    TOY_TRY(zero_get_user_data(z, &mine, &bytes));
    if (!err && (bytes != 4 || memcmp(mine, "mine", 4) != 0))
        toy_wrong(r, "the program's own data is another; ");
    TOY_TRY(zero_find_rank_data(z, s->n_saved - 1, &n_saved, &bytes));
    if (!err && (n_saved != s->n_saved || bytes != 16))
        toy_wrong(r, "%d ranks saved, the last %d bytes; ", n_saved, (int)bytes);
    TOY_TRY(zero_get_stats(z, &stats));
    TOY_TRY(one_step(m, z, STEPS, &at));
    TOY_TRY(look(m, z, &found[r->rank][1]));
    zero_unwrap(&z);
    free_model(m);
}

/* ---- first values by zero_write ---- */

static int write_tensor(struct model *m, zero_ctx *z, int k)
{
    const struct own *o = &m->own[k];
    const struct shape *s = &shapes[o->tensor];
    float x[MOST_ELEMS] = {0};
    int dtype = s->frozen ? s->dtype : ZERO_F32, value = s->frozen ? ZERO_VALUE_PARAM : ZERO_VALUE_MASTER;
    int64_t half = o->n / 2, size = dtype == ZERO_BF16 ? 2 : 4;
    for (int64_t i = 0; i < o->n; i++) {
        int64_t whole = whole_of(s, m->tp, m->part, o->from + i);
        put(dtype, x, i, whole < 0 || o->copy ? 77 : value_of(o->tensor, 0, whole));
    }
    const char *from = (const char *)x + half * size;
    bool counts = m->dp == 0 && !o->copy;
    OR_RETURN(zero_write(z, m->first_tensor + k, value, half, o->n - half, counts ? from : NULL));
    return zero_write(z, m->first_tensor + k, value, 0, half, counts ? x : NULL);
}

/* Of all of the rank's stages: norm, or all but it. */
static int write_tensors(struct model *m, zero_ctx *z, bool later, bool norm)
{
    for (; later && m; m = m->next)
        for (int k = 0; k < m->n; k++)
            if ((m->own[k].tensor == NORM) == norm && !shapes[m->own[k].tensor].buffer)
                OR_RETURN(write_tensor(m, z, k));
    return 0;
}

/* All but norm, which the last stage has: until it is written no stage goes on. */
static void write_one(struct toy_rank *r)
{
    const struct setup *s = r->arg;
    struct model *m = NULL;
    struct place at = {0};
    struct zero_action a;
    zero_ctx *z = NULL;
    int err = 0;
    TOY_TRY(wrap(r, &m, &at, &z));
    TOY_TRY(write_tensors(m, z, s->later, false));
    if (!err && s->later) {
        const char *says = "tensor norm (unit ";
        toy_expect(r, zero_next(z, &a), ZERO_ERR_ORDER, says);
        toy_expect(r, zero_evaluate(z), ZERO_ERR_ORDER, says);
        toy_expect(r, zero_save(z, s->folder), ZERO_ERR_ORDER, says);
        if (s->mesh->v < 2)
            toy_expect(r, zero_export(z, s->folder, NULL, 0, 0), ZERO_ERR_ORDER, says);
        toy_expect(r, zero_gather_all(z, 0), ZERO_ERR_ORDER, says);
    }
    TOY_TRY(write_tensors(m, z, s->later, true));
    TOY_TRY(look(m, z, &found[r->rank][0]));
    for (int step = 0; step < STEPS; step++)
        TOY_TRY(one_step(m, z, step, &at));
    for (struct model *t = err || !s->check ? NULL : m; t;
         t = t->next) { /* in training, too; the same values */
        float x[MOST_ELEMS];
        int64_t n = t->own[0].n;
        if (t->table[0].flags != ZERO_TIED)
            continue;
        if (!t->own[0].copy)
            TOY_TRY(zero_read(z, t->first_tensor, ZERO_VALUE_MASTER, 0, n, x));
        TOY_TRY(zero_write(z, t->first_tensor, ZERO_VALUE_MASTER, 0, n, t->own[0].copy ? NULL : x));
    }
    TOY_TRY(look(m, z, &found[r->rank][1]));
    zero_unwrap(&z);
    free_model(m);
}

/* ---- buffers ---- */

/* Of each data-parallel rank others, in the first stage alone or in all; count is made to differ, too. */
static void spoil_buffers(struct model *m, bool all, bool whole_numbers)
{
    for (int k = 0; k < m->n; k++) {
        const struct shape *s = &shapes[m->own[k].tensor];
        if (!s->buffer || (s->dtype == ZERO_I32 ? !whole_numbers : !all && m->stage > 0))
            continue;
        for (int64_t i = 0; i < m->own[k].n; i++)
            put(s->dtype, m->param[k], i, value_of(m->own[k].tensor, 0, i) + (float)(m->dp * (1 + i)) / 64);
    }
}

static void expect_buffers(struct toy_rank *r, struct model *m, double ranks_apart, const char *what)
{
    for (int k = 0; k < m->n; k++) {
        const struct shape *s = &shapes[m->own[k].tensor];
        for (int64_t i = 0; s->buffer && s->dtype != ZERO_I32 && i < m->own[k].n; i++) {
            float want = value_of(m->own[k].tensor, 0, i) + (float)(ranks_apart * (double)(1 + i) / 64);
            if (get(s->dtype, m->param[k], i) != want)
                toy_wrong(r, "%s: element %d of %s is %g, expected %g; ", what, (int)i, s->name,
                          (double)get(s->dtype, m->param[k], i), (double)want);
        }
    }
}

static void sync_one(struct toy_rank *r)
{
    const struct setup *s = r->arg;
    struct model *m = NULL;
    struct place at = {0};
    zero_ctx *z = NULL;
    int err = 0;
    TOY_TRY(wrap(r, &m, &at, &z));
    if (!err) {
        spoil_buffers(m, false, false);
        toy_expect(
            r, zero_save(z, s->folder), ZERO_ERR_MISMATCH,
            "zero_sync_buffers first: element 0 of buffer seen is not the same on rank 1 as on rank 0");
        spoil_buffers(m, true, true);
        toy_expect(r, zero_sync_buffers(z, ZERO_SYNC_MEAN), ZERO_ERR_MISMATCH, "integers have no mean");
        TOY_TRY(zero_sync_buffers(z, ZERO_SYNC_RANK0));
        expect_buffers(r, m, 0, "by the first rank");
        spoil_buffers(m, true, false);
        TOY_TRY(zero_sync_buffers(z, ZERO_SYNC_MEAN));
        expect_buffers(r, m, 0.5, "by the mean");
    }
    TOY_TRY(zero_save(z, s->folder));
    if (!err && m->stage == 0) { /* among the ranks of a stage */
        float x[3] = {0}, y[3] = {1, 2, 3};
        TOY_TRY(zero_read(z, SEEN, ZERO_VALUE_PARAM, 0, 3, x));
        if (x[1] != get(ZERO_F32, m->param[SEEN], 1))
            toy_wrong(r, "a buffer is read as another; ");
        TOY_TRY(zero_write(z, SEEN, ZERO_VALUE_PARAM, 0, 3, m->dp ? NULL : y));
        if (get(ZERO_F32, m->param[SEEN], 2) != 3)
            toy_wrong(r, "a buffer was not written; ");
    }
    /* Where all ranks call, all hear of it and go on; where those of one stage do, the context ends. */
    static const char says[] = "*param of buffer seen is NULL";
    void *own = err ? NULL : m->param[SEEN];
    bool spoils = !err && m->stage == 0 && m->dp == 1;
    if (spoils)
        m->param[SEEN] = NULL;
    if (!err) {
        toy_expect(r, zero_sync_buffers(z, ZERO_SYNC_RANK0), ZERO_ERR_ORDER, says);
        toy_expect(r, zero_export(z, s->folder, NULL, 0, 0), ZERO_ERR_ORDER, says);
    }
    if (spoils && m->pp > 1)
        toy_expect(r, zero_read(z, SEEN, ZERO_VALUE_PARAM, 0, 3, NULL), ZERO_ERR_ORDER, says);
    if (!err && m->pp > 1)
        toy_expect(r, zero_sync_buffers(z, ZERO_SYNC_RANK0), ZERO_ERR_ORDER, says);
    if (spoils)
        m->param[SEEN] = own;
    zero_unwrap(&z);
    free_model(m);
}

/* ---- weights alone ---- */

enum { MOST_MAP = 32, FILE_BYTES = 700 };

struct map {
    struct zero_weight list[MOST_MAP];
    char names[MOST_MAP][32];
    int n;
};

/* layer: of the whole model, -1: all of the tensor. */
static void map_tensor(struct map *out, const struct model *m, int tensor, int layer, const char *name)
{
    int k = 0;
    char *text = out->names[out->n];
    while (m->own[k].tensor != tensor)
        k++;
    if (layer < 0)
        snprintf(text, sizeof *out->names, "%s", name);
    else
        snprintf(text, sizeof *out->names, "h.%d.%s", layer, name);
    out->list[out->n++] =
        (struct zero_weight){.name = text,
                             .tensor = k,
                             .slice = layer < 0 ? 0 : ZERO_SLICE(layer - m->first),
                             .transposed = !strcmp(name, "head") || (layer % 2 == 1 && tensor < SCALE)};
}

/* Layer by layer; but all layers of one tensor as one, and the tied tensor under a second name, which the
 * last stage gives. */
static void make_map(const struct model *m, struct map *out)
{
    out->n = 0;
    for (int t = 0; t < TENSORS; t++)
        if ((shapes[t].where <= IN_FIRST && m->stage == 0) || t == SCALE)
            map_tensor(out, m, t, -1, shapes[t].name);
    for (int l = m->first; l < m->first + m->n_layers; l++)
        for (int t = 0; t < TENSORS; t++)
            if (shapes[t].where == IN_LAYERS && t != SCALE)
                map_tensor(out, m, t, l, shapes[t].name);
            else if (shapes[t].where == IN_LAYER_3 && l == 3)
                map_tensor(out, m, t, -1, shapes[t].name);
    if (m->stage < m->pp - 1)
        return;
    map_tensor(out, m, NORM, -1, "norm");
    map_tensor(out, m, MEAN, -1, "mean");
    map_tensor(out, m, EMBEDDING, -1, "head");
}

static void export_one(struct toy_rank *r)
{
    const struct setup *s = r->arg;
    struct model *m = NULL;
    struct place at = {0};
    struct map map;
    zero_ctx *z = NULL;
    char folder[256];
    int err = 0;
    TOY_TRY(wrap(r, &m, &at, &z));
    for (int step = 0; step < STEPS; step++)
        TOY_TRY(one_step(m, z, step, &at));
    if (!err) {
        make_map(m, &map);
        snprintf(folder, sizeof folder, "%s/mapped", s->folder);
    }
    TOY_TRY(zero_export(z, folder, map.list, map.n, FILE_BYTES));
    if (!err)
        snprintf(folder, sizeof folder, "%s/own-names", s->folder);
    TOY_TRY(zero_export(z, folder, NULL, 0, 0));
    TOY_TRY(one_step(m, z, STEPS, &at));
    zero_unwrap(&z);
    free_model(m);
}

static void import_one(struct toy_rank *r)
{
    const struct setup *s = r->arg;
    struct model *m = NULL;
    struct place at = {0};
    struct map map;
    zero_ctx *z = NULL;
    char folder[256];
    int err = 0;
    TOY_TRY(wrap(r, &m, &at, &z));
    if (!err) {
        make_map(m, &map);
        snprintf(folder, sizeof folder, "%s/%s", s->folder, s->async ? "mapped" : "own-names");
    }
    TOY_TRY(zero_import(z, folder, s->async ? map.list : NULL, map.n));
    TOY_TRY(look(m, z, &found[r->rank][0]));
    TOY_TRY(one_step(m, z, STEPS, &at));
    TOY_TRY(look(m, z, &found[r->rank][1]));
    zero_unwrap(&z);
    free_model(m);
}

/* With several stages on a rank. */
static void refuse_one(struct toy_rank *r)
{
    const struct setup *s = r->arg;
    static const char says[] = "stages_per_rank is ";
    struct model *m = NULL;
    struct place at = {0};
    zero_ctx *z = NULL;
    int err = 0;
    TOY_TRY(wrap(r, &m, &at, &z));
    if (!err) {
        toy_expect(r, zero_export(z, s->folder, NULL, 0, 0), ZERO_ERR_NOTSUP, says);
        toy_expect(r, zero_import(z, s->folder, NULL, 0), ZERO_ERR_NOTSUP, says);
    }
    zero_unwrap(&z);
    free_model(m);
}

/* ---- tests ---- */

static void remove_folder(const char *path)
{
    char command[1024];
    snprintf(command, sizeof command, "rm -rf '%s'", path);
    assert_int_equal(system(command), 0);
}

static int world_of(const struct mesh *m)
{
    return m->pp * m->dp * m->tp;
}

static const char *text_of(const struct mesh *m, const char *what, char text[TEXT])
{
    snprintf(text, TEXT, "%s with pp %d, dp %d, tp %d, stage %d, %d stages a rank", what, m->pp, m->dp, m->tp,
             m->stage, m->v ? m->v : 1);
    return text;
}

/* Of the whole model, in which ranks that have the same have the same bits. want: 0 where it is not known. */
static void check_bits(const struct mesh *m, int when, uint64_t *want, const char *what)
{
    int n_stage = m->dp * m->tp;
    uint64_t all = 0;
    for (int k = 0; k < world_of(m); k++) {
        int first = k / n_stage * n_stage + k % m->tp;
        const struct bits *own = &found[k][when], *like = &found[first][when];
        if (own->all != like->all || own->tied != like->tied)
            fail_msg("%s: rank %d has other bits than rank %d", what, k, first);
        if (k / n_stage == m->pp - 1 && own->tied != found[k % m->tp][when].tied)
            fail_msg("%s: rank %d has other weights of a tied tensor than its owner", what, k);
        all += first == k ? own->all : 0;
    }
    *want = *want ? *want : all;
    if (*want != all)
        fail_msg("%s: other bits %s", what, when ? "a step later" : "at once");
}

/* The text of the manifest's tensors. */
static char *tensors_of(const char *folder)
{
    char path[512], *text = calloc(1, 1 << 16);
    DIR *d = opendir(folder);
    struct dirent *e;
    assert_non_null(d);
    path[0] = 0;
    while ((e = readdir(d)) != NULL)
        if (!strncmp(e->d_name, "save-", 5))
            snprintf(path, sizeof path, "%s/%.200s/manifest.json", folder, e->d_name);
    closedir(d);
    FILE *f = fopen(path, "r");
    assert_non_null(f);
    size_t n = fread(text, 1, (1 << 16) - 1, f);
    fclose(f);
    assert_true(n > 100);
    char *from = strstr(text, "\"tensors\":"), *to = strstr(text, "\"files\":");
    assert_non_null(from);
    assert_non_null(to);
    *to = 0;
    memmove(text, from, strlen(from) + 1);
    return text;
}

/* Six meshes, of which each loads what any other saved: of stages, parts, data-parallel ranks and several
 * stages on a rank, and of more than one of these. */
static bool is_of_six(int mesh)
{
    static const int six[] = {0, 3, 4, 6, 12, 13};
    for (int i = 0; i < 6; i++)
        if (six[i] == mesh)
            return true;
    return false;
}

/* Of every each-th mesh. */
static void load_on_others(int each)
{
    char what[128], first[2][1 << 12] = {"", ""};
    uint64_t want[2] = {0};
    int n_of_six = 0;
    for (int from = 0; from < N_MESHES; from += each) {
        char folder[] = "/tmp/zero-pp-ckpt-XXXXXX";
        struct toy_rank r[MOST_WORLD];
        const struct mesh *saved = &meshes[from];
        assert_non_null(mkdtemp(folder));
        struct setup s = {.mesh = saved, .folder = folder, .async = from % 2};
        toy_ranks(world_of(saved), save_one, &s, r);
        toy_assert_well(r, world_of(saved), text_of(saved, "saved", what));
        check_bits(saved, 0, &want[0], what);
        check_bits(saved, 1, &want[1], what);
        /* It says nothing of stages. */
        char *tensors = tensors_of(folder), *like = first[saved->tp - 1];
        assert_true(strlen(tensors) < sizeof *first);
        if (!*like)
            strcpy(like, tensors);
        assert_string_equal(tensors, like);
        free(tensors);
        s.n_saved = world_of(saved);
        for (int to = 0; to < N_MESHES; to++) {
            bool both_of_six = is_of_six(from) && is_of_six(to);
            if ((to + N_MESHES - from) % 3 == 2 && !both_of_six) /* two of three of the other pairs */
                continue;
            n_of_six += both_of_six && to != from;
            s.mesh = &meshes[to];
            s.check = (from + to) % 5 == 0;
            s.later = (from + to) % 5 == 1;
            toy_ranks(world_of(s.mesh), load_one, &s, r);
            char both[2 * TEXT + 4], loaded[TEXT];
            snprintf(both, sizeof both, "%s; %s", text_of(saved, "saved", what),
                     text_of(s.mesh, "loaded", loaded));
            toy_assert_well(r, world_of(s.mesh), both);
            check_bits(s.mesh, 0, &want[0], both);
            check_bits(s.mesh, 1, &want[1], both);
        }
        remove_folder(folder);
    }
    assert_true(each > 1 || n_of_six == 6 * 5);
}

static void any_mesh_loads_any_others(void **state)
{
    (void)state;
    load_on_others(1);
}

/* The last stage's copy has a kind of value that no file has: masters are the values. */
static void so_it_is_with_a_tied_tensor_of_f32(void **state)
{
    const struct shape before = shapes[EMBEDDING];
    (void)state;
    shapes[EMBEDDING].dtype = ZERO_F32;
    load_on_others(5);
    shapes[EMBEDDING] = before;
}

static void so_it_is_with_a_frozen_one(void **state)
{
    const struct shape before = shapes[EMBEDDING];
    (void)state;
    shapes[EMBEDDING].frozen = true;
    load_on_others(7);
    shapes[EMBEDDING] = before;
}

/* The files are those of one stage, byte for byte, and give the same bits to any mesh. */
static void weights_are_the_whole_models(void **state)
{
    static const struct mesh more[] = {{4, 2, 1, 1}, {2, 1, 2, 0}};
    enum { N_MORE = sizeof more / sizeof *more, N_ALL = N_MESHES + N_MORE };
    char folder[N_ALL][32], what[128], command[128];
    struct toy_rank r[MOST_WORLD];
    uint64_t want[2] = {0};
    (void)state;
    for (int i = 0; i < N_ALL; i++) {
        const struct mesh *mesh = i < N_MESHES ? &meshes[i] : &more[i - N_MESHES];
        strcpy(folder[i], "/tmp/zero-pp-weights-XXXXXX");
        assert_non_null(mkdtemp(folder[i]));
        struct setup s = {.mesh = mesh, .folder = folder[i]};
        toy_ranks(world_of(mesh), mesh->v > 1 ? refuse_one : export_one, &s, r);
        toy_assert_well(r, world_of(mesh), text_of(mesh, "exported", what));
        if (mesh->v > 1)
            continue;
        snprintf(command, sizeof command, "diff -rq '%s' '%s' >&2", folder[0], folder[i]);
        if (system(command))
            fail_msg("%s: other files than of one stage", what);
        for (int mapped = 0; mapped < 2; mapped++) {
            s = (struct setup){.mesh = mesh,
                               .folder = folder[0],
                               .async = mapped,
                               .check = i == 4,
                               .later = (i + mapped) % 3 == 1};
            toy_ranks(world_of(mesh), import_one, &s, r);
            toy_assert_well(r, world_of(mesh), text_of(mesh, "imported", what));
            check_bits(mesh, 0, &want[0], what);
            check_bits(mesh, 1, &want[1], what);
        }
    }
    for (int i = 0; i < N_ALL; i++)
        remove_folder(folder[i]);
}

static void first_values_may_come_later(void **state)
{
    uint64_t want[2] = {0};
    char what[128];
    (void)state;
    for (int i = 0; i < N_MESHES; i++)
        for (int later = 0; later < 2; later++) {
            struct toy_rank r[MOST_WORLD];
            struct setup s = {
                .mesh = &meshes[i], .folder = "/tmp/never-made", .later = later, .check = i % 4 == 3};
            toy_ranks(world_of(s.mesh), write_one, &s, r);
            toy_assert_well(r, world_of(s.mesh), text_of(s.mesh, later ? "written" : "adopted", what));
            check_bits(s.mesh, 0, &want[0], what);
            check_bits(s.mesh, 1, &want[1], what);
        }
}

static void buffers_of_stages_are_made_equal(void **state)
{
    static const struct mesh mesh[] = {{2, 2, 1, 3}, {3, 2, 1, 1}, {1, 2, 1, 2}, {2, 2, 1, 0}};
    char what[128];
    (void)state;
    for (size_t i = 0; i < sizeof mesh / sizeof *mesh; i++) {
        char folder[] = "/tmp/zero-pp-buffers-XXXXXX";
        struct toy_rank r[MOST_WORLD];
        assert_non_null(mkdtemp(folder));
        struct setup s = {.mesh = &mesh[i], .folder = folder, .check = true};
        toy_ranks(world_of(s.mesh), sync_one, &s, r);
        toy_assert_well(r, world_of(s.mesh), text_of(s.mesh, "buffers", what));
        remove_folder(folder);
    }
}

/* ---- used wrongly ---- */

static struct zero_tensor *named(struct zero_tensor *table, int n, const char *name)
{
    for (int i = 0; i < n; i++)
        if (!strcmp(table[i].name, name))
            return &table[i];
    return NULL;
}

static void double_a_name(struct zero_tensor *table, int n, int stage)
{
    if (stage == 1)
        named(table, n, "norm")->name = "wpe";
}

static void stack_in_one(struct zero_tensor *table, int n, int stage)
{
    if (stage == 1)
        named(table, n, "scale")->flags = 0;
}

static void change_a_shape(struct zero_tensor *table, int n, int stage)
{
    if (stage == 1)
        named(table, n, "scale")->shape[1]--;
}

static void change_a_cut(struct zero_tensor *table, int n, int stage)
{
    if (stage == 1)
        named(table, n, "qkvw")->tp_blocks = 1;
}

static void change_an_optimizer(struct zero_tensor *table, int n, int stage)
{
    if (stage == 1)
        named(table, n, "proj")->optimizer = ZERO_LION;
}

static void freeze_in_one(struct zero_tensor *table, int n, int stage)
{
    if (stage == 1)
        named(table, n, "proj")->grad = NULL;
}

static void change_a_dtype(struct zero_tensor *table, int n, int stage)
{
    if (stage == 1)
        named(table, n, "scale")->dtype = ZERO_BF16;
}

static void rename_one(struct zero_tensor *table, int n, int stage)
{
    if (stage == 1)
        named(table, n, "alone")->name = "another";
}

static void leave_out_layers(struct zero_tensor *table, int n, int stage)
{
    if (stage == 1)
        named(table, n, "scale")->name = "scale of the others";
}

static void wrap_wrongly(struct toy_rank *r)
{
    const struct setup *s = r->arg;
    struct model *m = NULL;
    struct place at = {0};
    zero_ctx *z = NULL;
    toy_expect(r, wrap(r, &m, &at, &z), s->code, s->says);
    zero_unwrap(&z);
    free_model(m);
}

static void stages_that_do_not_fit_are_named(void **state)
{
    static const struct mesh mesh = {2, 2, 1, 2};
    static const char unlike[] = "rank 0 and rank 2, of two pipeline stages, differ in the layers of tensor ";
    static const struct {
        void (*spoil)(struct zero_tensor *table, int n, int stage);
        const char *says, *name;
    } bad[] = {
        {double_a_name, "tensor wpe is in the tables of rank 0 and rank 2, of two pipeline stages", ""},
        {stack_in_one, "tensor scale is in the tables of rank 0 and rank 2, of two pipeline stages", ""},
        {change_a_shape, unlike, "scale: in the shape"},
        {change_a_cut, unlike, "qkvw"},
        {change_an_optimizer, unlike, "proj"},
        {freeze_in_one, unlike, "proj"},
        {change_a_dtype, unlike, "scale"},
    };
    (void)state;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        struct toy_rank r[MOST_WORLD];
        char says[160];
        snprintf(says, sizeof says, "%s%s", bad[i].says, bad[i].name);
        struct setup s = {.mesh = &mesh, .spoil = bad[i].spoil, .code = ZERO_ERR_MISMATCH, .says = says};
        toy_ranks(4, wrap_wrongly, &s, r);
        toy_assert_well(r, 4, says);
    }
}

static void load_wrongly(struct toy_rank *r)
{
    const struct setup *s = r->arg;
    struct model *m = NULL;
    struct place at = {0};
    zero_ctx *z = NULL;
    struct bits before, after;
    int err = 0;
    TOY_TRY(wrap(r, &m, &at, &z));
    TOY_TRY(look(m, z, &before));
    if (!err)
        toy_expect(r, zero_load(z, s->folder), s->code, s->says);
    TOY_TRY(look(m, z, &after));
    if (!err && memcmp(&before, &after, sizeof before) != 0)
        toy_wrong(r, "the load that failed has changed something; ");
    zero_unwrap(&z);
    free_model(m);
}

static void checkpoints_of_another_model_are_named(void **state)
{
    static const struct mesh mesh = {2, 2, 1, 3};
    static const struct {
        void (*spoil)(struct zero_tensor *table, int n, int stage);
        const char *says;
    } bad[] = {
        {rename_one, "tensor alone is not in this model"},
        {leave_out_layers, "tensor scale has shape [5, 6] there and [3, 6] in this model"},
    };
    char folder[] = "/tmp/zero-pp-ckpt-XXXXXX";
    struct toy_rank r[MOST_WORLD];
    (void)state;
    assert_non_null(mkdtemp(folder));
    struct setup s = {.mesh = &mesh, .folder = folder, .code = ZERO_ERR_ARG};
    toy_ranks(4, save_one, &s, r);
    toy_assert_well(r, 4, "saved");
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        s.spoil = bad[i].spoil;
        s.says = bad[i].says;
        toy_ranks(4, load_wrongly, &s, r);
        toy_assert_well(r, 4, s.says);
    }
    remove_folder(folder);
}

/* A block of the last stage's file: all ranks hear of it, and nothing is changed. */
static void damage_is_found_by_all(void **state)
{
    static const struct mesh mesh = {2, 2, 1, 3};
    char folder[] = "/tmp/zero-pp-ckpt-XXXXXX", command[512];
    struct toy_rank r[MOST_WORLD];
    (void)state;
    assert_non_null(mkdtemp(folder));
    struct setup s = {.mesh = &mesh, .folder = folder, .code = ZERO_ERR_IO};
    toy_ranks(4, save_one, &s, r);
    toy_assert_well(r, 4, "saved");
    snprintf(command, sizeof command,
             "printf XXXX | dd of=$(echo %s/save-*/shard-00003-of-00004.safetensors) bs=1 seek=1000 "
             "conv=notrunc 2>/dev/null",
             folder);
    assert_int_equal(system(command), 0);
    s.says = "shard-00003-of-00004.safetensors";
    toy_ranks(4, load_wrongly, &s, r);
    toy_assert_well(r, 4, "damaged");
    remove_folder(folder);
}

/* On one stage's ranks, or on all: an error on each, and nothing is changed. */
static void exchange_weights_wrongly(struct toy_rank *r)
{
    const struct setup *s = r->arg;
    struct model *m = NULL;
    struct place at = {0};
    struct bits before, after;
    struct zero_action a;
    struct map map, bad;
    zero_ctx *z = NULL;
    int err = 0;
    TOY_TRY(wrap(r, &m, &at, &z));
    TOY_TRY(look(m, z, &before));
    if (err)
        goto out;
    make_map(m, &map);
    toy_expect(r, zero_export(z, "/proc/nothing", map.list, map.n, 0), ZERO_ERR_IO, "/proc/nothing");
    toy_expect(r, zero_import(z, "/proc/nothing", map.list, map.n), ZERO_ERR_IO, "/proc/nothing");
    bad = map;
    bad.list[0].slice = at.pp ? ZERO_SLICE(LAYERS) : 0;
    toy_expect(r, zero_export(z, s->folder, bad.list, bad.n, 0), ZERO_ERR_ARG,
               at.pp ? "map[0] (scale): slice is ZERO_SLICE(5) of tensor scale; allowed" : "rank 2: ");
    bad = map;
    bad.list[at.pp ? 0 : 3].transposed = true;
    toy_expect(
        r, zero_import(z, s->folder, bad.list, bad.n), ZERO_ERR_ARG,
        "(scale): transposed is set for all layers of tensor scale, which several pipeline stages have");
    bad = map;
    bad.list[bad.n - 1].name = at.pp ? "wpe" : map.names[bad.n - 1];
    toy_expect(r, zero_export(z, s->folder, bad.list, bad.n, 0), ZERO_ERR_ARG,
               "two entries of map are called wpe");
    toy_expect(r, zero_export(z, s->folder, map.list, at.pp ? -1 : 1, 0), ZERO_ERR_ARG,
               at.pp ? "n is -1; allowed: 0 and more" : "rank 2: ");
    toy_expect(r, zero_export(z, s->folder, map.list, 0, 0), ZERO_ERR_ARG,
               "n is 0 for all pipeline stages; allowed: 1..");
    toy_expect(r, zero_import(z, s->folder, map.list, map.n), ZERO_ERR_IO,
               "model-00001-of-00001.safetensors");
    TOY_TRY(zero_export(z, s->folder, map.list, at.pp ? 0 : 1, 0)); /* one stage's alone */
    TOY_TRY(zero_import(z, s->folder, map.list, at.pp ? 0 : 1));
    void *seen = m->param[SEEN];
    if (at.pp == 0 && at.dp == 1)
        m->param[SEEN] = NULL;
    toy_expect(r, zero_import(z, s->folder, map.list, at.pp ? 0 : 1), ZERO_ERR_ORDER,
               "*param of buffer seen is NULL");
    m->param[SEEN] = seen;
    toy_expect(r, zero_import(z, s->folder, map.list, map.n), ZERO_ERR_IO, "is not in it");
    TOY_TRY(look(m, z, &after));
    if (!err && memcmp(&before, &after, sizeof before) != 0)
        toy_wrong(r, "a call that failed has changed something; ");
    if (at.pp == 0) /* the other stage would wait for what this one gives */
        TOY_TRY(zero_next(z, &a));
    if (!err && at.pp == 0) {
        toy_expect(r, zero_export(z, s->folder, NULL, 0, 0), ZERO_ERR_ORDER,
                   "zero_export: actions of the step have begun");
        toy_expect(r, zero_import(z, s->folder, NULL, 0), ZERO_ERR_ORDER,
                   "zero_import: actions of the step have begun");
        toy_expect(r, zero_sync_buffers(z, ZERO_SYNC_RANK0), ZERO_ERR_ORDER,
                   "zero_sync_buffers: actions of the step have begun");
    }
out:
    zero_unwrap(&z);
    free_model(m);
}

static void maps_of_stages_are_checked(void **state)
{
    static const struct mesh mesh = {2, 2, 1, 3};
    char folder[] = "/tmp/zero-pp-weights-XXXXXX", command[512];
    struct toy_rank r[MOST_WORLD];
    (void)state;
    assert_non_null(mkdtemp(folder));
    /* An index whose file ends early. */
    snprintf(command, sizeof command,
             "cd %s && printf '{\"weight_map\": {\"wte\": \"model-00001-of-00001.safetensors\"}}' "
             "> model.safetensors.index.json && printf x > model-00001-of-00001.safetensors",
             folder);
    assert_int_equal(system(command), 0);
    struct setup s = {.mesh = &mesh, .folder = folder};
    toy_ranks(4, exchange_weights_wrongly, &s, r);
    toy_assert_well(r, 4, "maps");
    remove_folder(folder);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(any_mesh_loads_any_others),
        cmocka_unit_test(so_it_is_with_a_tied_tensor_of_f32),
        cmocka_unit_test(so_it_is_with_a_frozen_one),
        cmocka_unit_test(weights_are_the_whole_models),
        cmocka_unit_test(first_values_may_come_later),
        cmocka_unit_test(buffers_of_stages_are_made_equal),
        cmocka_unit_test(maps_of_stages_are_checked),
        cmocka_unit_test(stages_that_do_not_fit_are_named),
        cmocka_unit_test(checkpoints_of_another_model_are_named),
        cmocka_unit_test(damage_is_found_by_all),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
