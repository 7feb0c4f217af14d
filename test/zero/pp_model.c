/* SPDX-License-Identifier: Apache-2.0 */
/* pp_model.c: pipeline stages, gradients, hashes and weight maps of the model in pp_model.h. */
#include "test/zero/pp_model.h"
#include "test/cmocka.h"
#include "test/stand_in/half.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct shape pp_shapes[TENSORS] = {
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

const struct mesh pp_meshes[PP_MESHES] = {{1, 1, 1, 0},    {2, 2, 1, 3},    {3, 1, 2, 1},   {1, 2, 2, 2},
                                          {4, 2, 1, 2},    {2, 4, 1, 4},    {2, 2, 2, 3},   {3, 2, 1, 0},
                                          {4, 1, 2, 3},    {1, 4, 1, 5},    {2, 1, 1, 1},   {2, 4, 1, 5},
                                          {2, 2, 1, 2, 2}, {3, 1, 2, 3, 2}, {2, 1, 1, 0, 3}};
struct bits pp_found[MAX_WORLD][2];
bool pp_leaves_out;
int pp_skipped_step = -1;

static int n_layers = LAYERS;

void pp_set_layers(int n)
{
    n_layers = n;
    for (int t = 0; t < TENSORS; t++)
        if (pp_shapes[t].where == IN_LAYERS)
            pp_shapes[t].shape[0] = n;
}

void pp_use_blocks(int tp)
{
    const struct shape own[TENSORS] = {
        {"wte", {13, 32}, ZERO_BF16, 0, 1, FIRST_AND_LAST, 0, 2, true, false},
        {"wpe", {5, 6}, ZERO_F32, -1, 0, IN_FIRST, 0, 2, false, false},
        {"seen", {3}, ZERO_F32, -1, 0, IN_FIRST, 0, 0, false, true, true},
        {"qkvw", {LAYERS, 24, 4 * tp}, ZERO_BF16, 1, 3, IN_LAYERS, 0, 2, false, false},
        {"proj", {LAYERS, 3, 32 * tp}, ZERO_F32, 2, 1, IN_LAYERS, 0, 2, false, false},
        {"scale", {LAYERS, 70}, ZERO_BF16, -1, 0, IN_LAYERS, 0, 2, false, false},
        {"alone", {47}, ZERO_BF16, -1, 0, IN_LAYER_3, ZERO_LION, 1, false, false},
        {"count", {2}, ZERO_I32, -1, 0, IN_LAYER_3, 0, 0, false, true, true},
        {"norm", {70}, ZERO_F32, -1, 0, IN_LAST, 0, 2, false, false},
        {"mean", {5}, ZERO_BF16, -1, 0, IN_LAST, 0, 0, false, true, true},
    };
    memcpy(pp_shapes, own, sizeof own);
}

#include "test/zero/tp_shape.inc"

int64_t pp_whole_of(const struct model *m, int k, int64_t i)
{
    return whole_of(&pp_shapes[m->own[k].tensor], m->tp, m->part, m->own[k].from + i);
}

float pp_value(int tensor, int draw, int64_t whole)
{
    uint32_t x = (uint32_t)(tensor * 7919 + draw * 104729) + (uint32_t)whole * 2654435761u;
    x ^= x >> 15;
    x *= 2246822519u;
    x ^= x >> 13;
    return (float)((int)(x % 255) - 127) / 256;
}

void pp_put(int dtype, void *at, int64_t i, float x)
{
    if (dtype == ZERO_I32)
        ((int32_t *)at)[i] = (int32_t)(x * 256);
    else if (dtype == ZERO_BF16)
        ((uint16_t *)at)[i] = bf16_from_float(x);
    else
        ((float *)at)[i] = x;
}

float pp_get(int dtype, const void *at, int64_t i)
{
    if (dtype == ZERO_I32)
        return (float)((const int32_t *)at)[i] / 256;
    return dtype == ZERO_BF16 ? bf16_to_float(((const uint16_t *)at)[i]) : ((const float *)at)[i];
}

/* ---- one rank's model ---- */

void pp_free(struct model *m)
{
    while (m) {
        struct model *next = m->next;
        free(m);
        m = next;
    }
}

/* Returns the tensor's unit in its pipeline stage. The order is embedding, wpe, layers and norm. The last of
 * several pipeline stages has the tied embedding again, as its last unit. */
static int unit_of(const struct model *m, int tensor, bool copy)
{
    int layers = m->stage == 0 ? 2 : 0;
    switch (pp_shapes[tensor].where) {
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
    return (first ? 2 : 0) + m->n_layers + last + (last && !first && !m->untied);
}

static bool has_tensor(const struct model *m, int tensor)
{
    switch (pp_shapes[tensor].where) {
    case FIRST_AND_LAST:
        return m->stage == 0 || (m->stage == m->pp - 1 && !m->untied);
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
    const struct shape *s = &pp_shapes[tensor];
    struct own *o = &m->own[m->n];
    struct zero_tensor *x = &m->table[m->n];
    bool stacked = s->where == IN_LAYERS;
    *o = (struct own){.tensor = tensor, .n = n_elems(s, m->tp), .n_layers = 1};
    o->copy = tensor == EMBEDDING && m->stage > 0;
    if (stacked) {
        o->layer = m->first;
        o->n_layers = m->n_layers;
        o->from = o->n / n_layers * m->first;
        o->n = o->n / n_layers * m->n_layers;
    }
    m->param[m->n] = m->memory[m->n];
    for (int64_t i = 0; i < o->n; i++) {
        int64_t whole = whole_of(s, m->tp, m->part, o->from + i);
        bool nonsense = whole < 0 || o->copy || (s->buffer && m->dp);
        pp_put(s->dtype, m->param[m->n], i, nonsense ? 77 : pp_value(tensor, 0, whole));
    }
    *x = (struct zero_tensor){.name = s->name,
                              .param = &m->param[m->n],
                              .grad = s->frozen ? NULL : &m->grad[m->n],
                              .dtype = (enum zero_dtype)s->dtype,
                              .unit = m->first_unit + unit_of(m, tensor, o->copy),
                              .pp_stage = m->stage / n_ranks,
                              .flags = stacked                             ? ZERO_STACKED
                                       : s->buffer                         ? ZERO_BUFFER
                                       : tensor == EMBEDDING && !m->untied ? ZERO_TIED
                                                                           : 0,
                              .group = s->optimizer == ZERO_LION};
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

static struct model *make_stage(const struct mesh *on, int stage, const struct place *at, int first_unit)
{
    struct model *m = calloc(1, sizeof *m);
    m->pp = on->pp * (on->v ? on->v : 1);
    m->untied = on->pp == 1 && on->v > 1;
    m->stage = stage;
    m->tp = on->tp;
    m->dp = at->dp;
    m->part = at->tp;
    m->first_unit = first_unit;
    m->first = pipeline_layers_before(n_layers, m->pp, stage);
    m->n_layers = pipeline_layers_before(n_layers, m->pp, stage + 1) - m->first;
    for (int t = 0; t < TENSORS; t++)
        if (has_tensor(m, t))
            add_tensor(m, on->pp, t);
    return m;
}

int pp_wrap(struct toy_rank *r, struct model **out, struct place *at, zero_ctx **z)
{
    struct model **first = out;
    const struct setup *s = r->arg;
    const struct mesh *on = s->mesh;
    struct zero_config cfg = toy_config(r, on->stage);
    cfg.optim.masters = s->masters;
    cfg.optim.moments = s->moments;
    cfg.memory.seed = s->seed;
    struct zero_optim lion = cfg.optim;
    lion.optimizer = ZERO_LION;
    cfg.optim_groups = &lion;
    cfg.n_optim_groups = 1;
    OR_RETURN(pipeline_place(&cfg, on->stage, on->pp, on->dp, on->tp, at));
    cfg.debug.log = s->log ? s->log : toy_forget_line;
    cfg.clip = 0;
    cfg.checkpoint.save_async = s->async;
    cfg.debug.check = s->check;
    cfg.init_from = s->later ? ZERO_INIT_LATER : ZERO_INIT_MODEL;
    cfg.pipeline.activation_bytes = ACTIVATIONS;
    cfg.grad_accum_steps = MICRO / at->n_dp;
    int v = on->v ? on->v : 1, n = 0, units = 0;
    struct zero_tensor table[MAX_OWN * MAX_TABLE];
    cfg.pipeline.stages_per_rank = v;
    cfg.pipeline.schedule = v > 1 ? ZERO_SCHEDULE_INTERLEAVED : ZERO_SCHEDULE_1F1B;
    for (int k = 0; k < v; k++, out = &(*out)->next) {
        struct model *m = *out = make_stage(on, k * on->pp + at->pp, at, units);
        m->first_tensor = n;
        n += m->n;
        units += n_units(m);
    }
    bool last_first = on->stage % 2; /* the table's pipeline stages may be in any order */
    for (struct model *m = *first; m; m = m->next) {
        m->first_tensor = last_first ? n - m->first_tensor - m->n : m->first_tensor;
        memcpy(table + m->first_tensor, m->table, (size_t)m->n * sizeof *table);
    }
    if (s->spoil)
        s->spoil(table, n, at->pp);
    return zero_wrap(z, table, n, &cfg);
}

struct job {
    const struct setup *s;
    pp_fn *fn;
};

static void run_rank(struct toy_rank *r)
{
    const struct job *j = r->arg;
    struct model *m = NULL;
    struct place at = {0};
    zero_ctx *z = NULL;
    r->arg = (void *)(uintptr_t)j->s;
    int err = pp_wrap(r, &m, &at, &z);
    if (j->fn)
        toy_note(r, FIRST_ERROR(err, j->fn(r, m, z, &at)));
    else
        toy_expect(r, err, j->s->code, j->s->says);
    zero_unwrap(&z);
    pp_free(m);
}

void pp_run_ranks(const struct setup *s, pp_fn *fn, struct toy_rank r[MAX_WORLD])
{
    struct job j = {s, fn};
    toy_ranks(pp_world(s->mesh), run_rank, &j, r);
}

void pp_run(const struct setup *s, pp_fn *fn, const char *what)
{
    struct toy_rank r[MAX_WORLD];
    char text[TEXT];
    pp_run_ranks(s, fn, r);
    toy_assert_well(r, pp_world(s->mesh), pp_text(s->mesh, what, text));
}

/* ---- training ---- */

/* Adds one micro-batch's gradients of a unit; micro is the global number. For a tied tensor, the last
 * pipeline stage adds one half, then the first one the other. */
static void add_gradients(const struct model *m, int unit, int step, int micro)
{
    for (int k = 0; k < m->n; k++) {
        const struct own *o = &m->own[k];
        const struct shape *s = &pp_shapes[o->tensor];
        int layer = unit - m->table[k].unit;
        if (s->frozen || layer < 0 || layer >= o->n_layers)
            continue;
        int draw = 1 + 2 * (step * MICRO + micro);
        bool tied = o->tensor == EMBEDDING, first = m->stage == 0, last = m->stage == m->pp - 1;
        for (int half = tied && !last && !m->untied; half <= (tied && first); half++)
            for (int64_t i = 0, n = o->n / o->n_layers; i < n; i++) {
                int64_t whole = whole_of(s, m->tp, m->part, o->from + layer * n + i);
                float g = whole < 0                 ? 0
                          : step == pp_skipped_step ? INFINITY
                                                    : pp_value(o->tensor, draw + half, whole);
                pp_put(s->dtype, m->grad[k], layer * n + i, pp_get(s->dtype, m->grad[k], layer * n + i) + g);
            }
    }
}

/* Changes buffers as running statistics would, equally on all ranks. */
static void change_buffers(struct model *m, int step)
{
    for (int k = 0; k < m->n; k++)
        for (int64_t i = 0; pp_shapes[m->own[k].tensor].buffer && i < m->own[k].n; i++) {
            int dtype = pp_shapes[m->own[k].tensor].dtype;
            pp_put(dtype, m->param[k], i, pp_get(dtype, m->param[k], i) + (float)(step + 1) / 256);
        }
}

/* u: the unit's number within the pipeline stage */
static bool is_left_out(const struct model *m, int u, int step)
{
    int before = m->stage == 0 ? 2 : 0;
    return pp_leaves_out && step == 1 &&
           ((m->stage == 0 && u == 1) || (u >= before && m->first + u - before == LAYERS - 1));
}

int pp_step(struct model *first, zero_ctx *z, int step, const struct place *at)
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
        for (int i = 0; i < n; i++) {
            int u = a.phase == ZERO_FORWARD ? i : n - 1 - i, unit = m->first_unit + u;
            if (a.phase == ZERO_BACKWARD && is_left_out(m, u, step))
                continue;
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

static int look_at_stage(const struct model *m, zero_ctx *z, struct bits *out)
{
    static const int values[] = {ZERO_VALUE_PARAM, ZERO_VALUE_MASTER, ZERO_VALUE_STATE, ZERO_VALUE_STATE + 1};
    for (int k = 0; k < m->n; k++) {
        const struct own *o = &m->own[k];
        const struct shape *s = &pp_shapes[o->tensor];
        for (int v = 0; v < (s->frozen || o->copy ? 1 : 2 + s->n_states); v++) {
            float x[MAX_ELEMS];
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

int pp_look(const struct model *m, zero_ctx *z, struct bits *out)
{
    *out = (struct bits){0};
    for (; m; m = m->next)
        OR_RETURN(look_at_stage(m, z, out));
    return 0;
}

int pp_world(const struct mesh *m)
{
    return m->pp * m->dp * m->tp;
}

const char *pp_text(const struct mesh *m, const char *what, char text[TEXT])
{
    snprintf(text, TEXT, "%s with pp %d, dp %d, tp %d, stage %d, %d stages a rank", what, m->pp, m->dp, m->tp,
             m->stage, m->v ? m->v : 1);
    return text;
}

static void check_bits(const struct mesh *m, int when, uint64_t *want, const char *what)
{
    int n_stage = m->dp * m->tp;
    uint64_t all = 0;
    for (int k = 0; k < pp_world(m); k++) {
        int first = k / n_stage * n_stage + k % m->tp;
        const struct bits *own = &pp_found[k][when], *like = &pp_found[first][when];
        if (own->all != like->all || own->tied != like->tied)
            fail_msg("%s: rank %d has other bits than rank %d", what, k, first);
        if (k / n_stage == m->pp - 1 && own->tied != pp_found[k % m->tp][when].tied)
            fail_msg("%s: rank %d has other weights of a tied tensor than its owner", what, k);
        all += first == k ? own->all : 0;
    }
    *want = *want ? *want : all;
    if (*want != all)
        fail_msg("%s: other bits %s", what, when ? "a step later" : "at once");
}

void pp_check_bits(const struct mesh *m, uint64_t want[2], const char *what)
{
    char text[TEXT];
    for (int when = 0; when < 2; when++)
        check_bits(m, when, &want[when], pp_text(m, what, text));
}

/* ---- maps of weights ---- */

/* layer: the layer's number in the whole model; -1: all of the tensor */
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
                             .tensor = m->first_tensor + k,
                             .slice = layer < 0 ? 0 : ZERO_SLICE(layer - m->first),
                             .transposed = !strcmp(name, "head") || (layer % 2 == 1 && tensor < SCALE)};
}

static void map_stage(struct map *out, const struct model *m, bool head)
{
    for (int t = 0; t < TENSORS; t++)
        if ((pp_shapes[t].where <= IN_FIRST && m->stage == 0) || (t == SCALE && m->n_layers))
            map_tensor(out, m, t, -1, pp_shapes[t].name);
    for (int l = m->first; l < m->first + m->n_layers; l++)
        for (int t = 0; t < TENSORS; t++)
            if (pp_shapes[t].where == IN_LAYERS && t != SCALE)
                map_tensor(out, m, t, l, pp_shapes[t].name);
            else if (pp_shapes[t].where == IN_LAYER_3 && l == 3)
                map_tensor(out, m, t, -1, pp_shapes[t].name);
    if (m->stage < m->pp - 1)
        return;
    map_tensor(out, m, NORM, -1, "norm");
    map_tensor(out, m, MEAN, -1, "mean");
    if (head)
        map_tensor(out, m, EMBEDDING, -1, "head");
}

void pp_make_map(const struct model *first, struct map *out, bool head)
{
    const struct model *m = first;
    bool backward = m->next && m->next->first_tensor < m->first_tensor;
    const struct model *stages[MAX_OWN];
    int n = 0;
    for (; m; m = m->next)
        stages[n++] = m;
    out->n = 0;
    for (int k = 0; k < n; k++)
        map_stage(out, stages[backward ? n - 1 - k : k], head);
}
