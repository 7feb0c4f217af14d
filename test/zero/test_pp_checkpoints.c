/* test_pp_checkpoints.c: a checkpoint of a model in pipeline stages is loaded with any other stages, groups
 * and parts, bit by bit, and training goes on from it alike. Gradients are those of the whole model's
 * elements, so all meshes come to the same bits. */
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

enum { MOST_WORLD = 8, TENSORS = 7, LAYERS = 5, MICRO = 4, STEPS = 2, MOST_ELEMS = 1 << 10, MOST_TABLE = 9 };
enum { EMBEDDING = 0, ALONE = 5, ACTIVATIONS = 4 };

/* Where a tensor is. */
enum where { FIRST_AND_LAST, IN_FIRST, IN_LAYERS, IN_LAYER_3, IN_LAST };

/* The whole model's; cut: the dimension, -1: none. */
struct shape {
    const char *name;
    int64_t shape[4];
    int dtype, cut, blocks;
    enum where where;
    int optimizer, n_states;
    bool padded, frozen;
};
static struct shape shapes[TENSORS] = {
    {"wte", {13, 6}, ZERO_BF16, 0, 1, FIRST_AND_LAST, 0, 2, true, false},
    {"wpe", {5, 6}, ZERO_F32, -1, 0, IN_FIRST, 0, 2, false, false},
    {"qkvw", {LAYERS, 24, 6}, ZERO_BF16, 1, 3, IN_LAYERS, 0, 2, false, false},
    {"proj", {LAYERS, 6, 8}, ZERO_F32, 2, 1, IN_LAYERS, 0, 2, false, false},
    {"scale", {LAYERS, 6}, ZERO_F32, -1, 0, IN_LAYERS, 0, 0, false, true},
    {"alone", {7}, ZERO_F32, -1, 0, IN_LAYER_3, ZERO_LION, 1, false, false},
    {"norm", {6}, ZERO_BF16, -1, 0, IN_LAST, 0, 2, false, false},
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
    if (dtype == ZERO_BF16)
        ((uint16_t *)at)[i] = (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    else
        ((float *)at)[i] = x;
}

static float get(int dtype, const void *at, int64_t i)
{
    uint32_t bits;
    float x;
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
    int first, n_layers, pp, stage, tp, part, n;
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
        put(s->dtype, m->param[m->n], i, whole < 0 || o->copy ? 77 : value_of(tensor, 0, whole));
    }
    *x = (struct zero_tensor){.name = s->name,
                              .param = &m->param[m->n],
                              .grad = s->frozen ? NULL : &m->grad[m->n],
                              .dtype = (enum zero_dtype)s->dtype,
                              .unit = m->first_unit + unit_of(m, tensor, o->copy),
                              .pp_stage = m->stage / n_ranks,
                              .flags = stacked               ? ZERO_STACKED
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

static struct model *make_stage(const struct mesh *on, int stage, int part, int first_unit)
{
    struct model *m = calloc(1, sizeof *m);
    m->pp = on->pp * (on->v ? on->v : 1);
    m->stage = stage;
    m->tp = on->tp;
    m->part = part;
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
    cfg.activation_bytes = ACTIVATIONS;
    cfg.grad_accum_steps = MICRO / at->n_dp;
    int v = on->v ? on->v : 1, n = 0, units = 0;
    struct zero_tensor table[3 * MOST_TABLE];
    cfg.stages_per_rank = v;
    cfg.schedule = v > 1 ? ZERO_SCHEDULE_INTERLEAVED : ZERO_SCHEDULE_1F1B;
    for (int k = 0; k < v; k++, out = &(*out)->next) {
        struct model *m = *out = make_stage(on, k * on->pp + at->pp, at->tp, units);
        m->first_tensor = n;
        memcpy(table + n, m->table, (size_t)m->n * sizeof *table);
        n += m->n;
        units += n_units(m);
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

static int one_step(struct model *first, zero_ctx *z, int step, const struct place *at)
{
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

/* ---- tests ---- */

static void remove_folder(const char *path)
{
    char command[512];
    snprintf(command, sizeof command, "rm -rf '%s'", path);
    assert_int_equal(system(command), 0);
}

static int world_of(const struct mesh *m)
{
    return m->pp * m->dp * m->tp;
}

static const char *text_of(const struct mesh *m, const char *what, char text[128])
{
    snprintf(text, 128, "%s with pp %d, dp %d, tp %d, stage %d, %d stages a rank", what, m->pp, m->dp, m->tp,
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

/* Of every each-th mesh. */
static void load_on_others(int each)
{
    char what[128], first[2][1 << 12] = {"", ""};
    uint64_t want[2] = {0};
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
            if ((to + N_MESHES - from) % 3 == 2) /* two of three pairs */
                continue;
            s.mesh = &meshes[to];
            s.check = (from + to) % 5 == 0;
            toy_ranks(world_of(s.mesh), load_one, &s, r);
            char both[288], loaded[128];
            snprintf(both, sizeof both, "%s; %s", text_of(saved, "saved", what),
                     text_of(s.mesh, "loaded", loaded));
            toy_assert_well(r, world_of(s.mesh), both);
            check_bits(s.mesh, 0, &want[0], both);
            check_bits(s.mesh, 1, &want[1], both);
        }
        remove_folder(folder);
    }
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

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(any_mesh_loads_any_others),
        cmocka_unit_test(so_it_is_with_a_tied_tensor_of_f32),
        cmocka_unit_test(so_it_is_with_a_frozen_one),
        cmocka_unit_test(stages_that_do_not_fit_are_named),
        cmocka_unit_test(checkpoints_of_another_model_are_named),
        cmocka_unit_test(damage_is_found_by_all),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
