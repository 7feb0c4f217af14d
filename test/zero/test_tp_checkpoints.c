/* SPDX-License-Identifier: Apache-2.0 */
/* test_tp_checkpoints.c: a checkpoint from one mesh loads on any other, and training continues with the same
 * bits. With ZERO_WHOLE, the library cuts whole values as a program would. The test computes element by
 * element where each part lies in the whole. */
#include "test/cmocka.h"
#include "test/stand_in/half.h"
#include "test/zero/pipeline_ranks.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MAX_WORLD = 8, AROUND = 64, TENSORS = 8, MAX_ELEMS = 1 << 10, BUFFER = 6, VOCAB = 13 };

/* A tensor of the whole model. cut: the dimension that tensor parallelism cuts; -1: none. */
struct shape {
    const char *name;
    int64_t shape[4];
    int dtype, cut, blocks;
    uint32_t flags;
    int optimizer, n_states, unit;
    bool padded;
};
static const struct shape powers_of_two[TENSORS] = {
    {"wte", {VOCAB, 6}, ZERO_F32, 0, 1, 0, 0, 2, 0, true},
    {"wpe", {5, 6}, ZERO_BF16, -1, 0, 0, 0, 2, 0, false},
    {"qkvw", {3, 24, 6}, ZERO_BF16, 1, 3, ZERO_STACKED, 0, 2, 1, false},
    {"qkvb", {3, 24}, ZERO_F32, 1, 3, ZERO_STACKED, 0, 2, 1, false},
    {"proj", {3, 6, 8}, ZERO_F32, 2, 1, ZERO_STACKED, 0, 2, 1, false},
    {"norm", {6}, ZERO_F32, -1, 0, 0, 0, 2, 0, false},
    {"seen", {4}, ZERO_I32, -1, 0, ZERO_BUFFER, 0, 0, 0, false},
    {"wide", {4, 16, 5}, ZERO_BF16, 1, 2, 0, ZERO_LION, 1, 4, false},
};

/* For tp 2 and 3. */
static const struct shape twos_and_threes[TENSORS] = {
    {"wte", {VOCAB, 6}, ZERO_F32, 0, 1, 0, 0, 2, 0, true},
    {"wpe", {5, 6}, ZERO_BF16, -1, 0, 0, 0, 2, 0, false},
    {"qkvw", {3, 18, 6}, ZERO_BF16, 1, 3, ZERO_STACKED, 0, 2, 1, false},
    {"qkvb", {3, 18}, ZERO_F32, 1, 3, ZERO_STACKED, 0, 2, 1, false},
    {"proj", {3, 6, 6}, ZERO_F32, 2, 1, ZERO_STACKED, 0, 2, 1, false},
    {"norm", {6}, ZERO_F32, -1, 0, 0, 0, 2, 0, false},
    {"seen", {4}, ZERO_I32, -1, 0, ZERO_BUFFER, 0, 0, 0, false},
    {"wide", {4, 12, 5}, ZERO_BF16, 1, 2, 0, ZERO_LION, 1, 4, false},
};
static const struct shape *shapes = powers_of_two;

struct mesh {
    int dp, tp, stage;
};
/* A stage above 3 is a hybrid. */
static const struct mesh meshes[] = {{1, 1, 0}, {2, 1, 3}, {4, 1, 4}, {1, 2, 1}, {2, 2, 2},
                                     {4, 2, 5}, {1, 4, 3}, {2, 4, 3}, {2, 4, 0}, {1, 8, 1}};
enum { N_MESHES = sizeof meshes / sizeof *meshes };

#include "test/zero/tp_shape.inc"

/* Returns a value of the whole model that is exact in bf16. kind: 0 for the weight, then the states. */
static float value_of(int tensor, int kind, int64_t whole)
{
    uint32_t x = (uint32_t)(tensor * 7919 + kind * 104729) + (uint32_t)whole * 2654435761u;
    x ^= x >> 15;
    float f = (float)(int)(x % 255 + 1) / 256;
    return kind == 0 && x % 2 ? -f : f;
}

/* ---- one rank ---- */

static int world_of(const struct mesh *m)
{
    return m->dp * m->tp;
}

struct setup {
    const struct mesh *mesh;
    const char *folder;
    bool async;
    int says; /* the step number that was saved */
    /* from: source of initial values. gives: the model has them; whole: they are whole tensors */
    enum zero_init from;
    bool gives, whole;
};

struct model {
    void *param[TENSORS], *grad[TENSORS];
    char own[TENSORS][AROUND + MAX_ELEMS * 4 + AROUND];
    struct zero_tensor table[TENSORS];
};

static struct model *make_model(int tp)
{
    struct model *m = calloc(1, sizeof *m);
    for (int t = 0; t < TENSORS; t++) {
        const struct shape *s = &shapes[t];
        struct zero_tensor *x = &m->table[t];
        m->param[t] = m->own[t];
        *x = (struct zero_tensor){.name = s->name,
                                  .param = &m->param[t],
                                  .grad = t == BUFFER ? NULL : &m->grad[t],
                                  .dtype = (enum zero_dtype)s->dtype,
                                  .unit = s->unit,
                                  .flags = s->flags,
                                  .group = s->optimizer == ZERO_LION};
        memcpy(x->shape, s->shape, sizeof s->shape);
        if (s->cut >= 0) {
            x->shape[s->cut] = rows_of_part(s, tp);
            x->tp_cut = ZERO_TP_CUT(s->cut);
            x->tp_blocks = s->blocks;
            x->tp_size = s->padded ? s->shape[0] : 0;
        }
    }
    return m;
}

static void put_value(enum zero_dtype dtype, void *values, int64_t i, float f)
{
    if (dtype == ZERO_BF16)
        ((uint16_t *)values)[i] = bf16_from_float(f);
    else
        ((float *)values)[i] = f;
}

/* Stores values between NaNs, which must not be read. */
static void give_values(struct model *m, const struct setup *s, int part, bool has)
{
    int tp = s->whole ? 1 : s->mesh->tp;
    for (int t = 0; t < TENSORS; t++) {
        const struct shape *x = &shapes[t];
        char *values = m->own[t] + AROUND;
        memset(m->own[t], 0xff, sizeof m->own[t]);
        m->param[t] = has || t == BUFFER ? values : NULL;
        m->table[t].flags |= s->whole && t != BUFFER ? ZERO_WHOLE : 0;
        for (int32_t i = 0; t == BUFFER && i < n_elems(x, 1); i++)
            ((int32_t *)values)[i] = 100 + i;
        for (int64_t i = 0; t != BUFFER && i < n_elems(x, tp); i++) {
            int64_t whole = whole_of(x, tp, s->whole ? 0 : part, i);
            put_value((enum zero_dtype)x->dtype, values, i, whole < 0 ? 0 : value_of(t, 0, whole));
        }
    }
}

static int draw_value(void *arg, int32_t tensor, int64_t first, int64_t n, void *dst)
{
    const struct shape *s = &shapes[tensor];
    for (int64_t i = 0; i < n; i++)
        put_value((enum zero_dtype)s->dtype, dst, i, value_of(tensor, 0, first + i));
    return first < 0 || first + n > n_elems(s, 1);
}

static int wrap(struct toy_rank *r, struct model **m, zero_ctx **z, struct place *at)
{
    const struct setup *s = r->arg;
    struct zero_config cfg = toy_config(r, s->mesh->stage);
    struct zero_optim lion = cfg.optim;
    lion.optimizer = ZERO_LION;
    cfg.optim_groups = &lion;
    cfg.n_optim_groups = 1;
    int err = pipeline_place(&cfg, s->mesh->stage, 1, s->mesh->dp, s->mesh->tp, at);
    cfg.debug.log = toy_forget_line;
    cfg.checkpoint.save_async = s->async;
    cfg.init_from = (int32_t)s->from;
    cfg.init = s->from == ZERO_INIT_CALL ? draw_value : NULL;
    *m = make_model(s->mesh->tp);
    if (s->gives)
        give_values(*m, s, at->tp, s->from == ZERO_INIT_MODEL || (s->from == ZERO_INIT_RANK0 && at->dp == 0));
    return FIRST_ERROR(err, zero_wrap(z, (*m)->table, TENSORS, &cfg));
}

/* A rank's work between zero_wrap and zero_unwrap. Returns the first error. */
typedef int rank_fn(struct toy_rank *r, struct model *m, zero_ctx *z, int tp, int part);

struct job {
    const struct setup *s;
    rank_fn *fn;
};

static void run_rank(struct toy_rank *r)
{
    const struct job *j = r->arg;
    struct model *m = NULL;
    zero_ctx *z = NULL;
    struct place at = {0};
    r->arg = (void *)(uintptr_t)j->s;
    r->hash = 0;
    toy_note(r, FIRST_ERROR(wrap(r, &m, &z, &at), j->fn(r, m, z, j->s->mesh->tp, at.tp)));
    zero_unwrap(&z);
    free(m);
}

/* Wraps on all ranks of the mesh, and calls fn. Fails the test unless all goes well. what: the run's name in
 * failure messages. */
static void run(const struct setup *s, rank_fn *fn, const char *what, struct toy_rank r[MAX_WORLD])
{
    struct job j = {s, fn};
    char text[160];
    snprintf(text, sizeof text, "%s with dp %d, tp %d, stage %d", what, s->mesh->dp, s->mesh->tp,
             s->mesh->stage);
    toy_run(world_of(s->mesh), run_rank, &j, r, text);
}

/* Adds an element of the whole model to the hash, which is the same on every mesh. */
static void add_to_hash(struct toy_rank *r, int tensor, int kind, int64_t whole, uint32_t bits)
{
    uint64_t h = (uint64_t)whole * 0x9e3779b97f4a7c15u + (uint64_t)(tensor * 8 + kind);
    h = (h ^ bits) * 0xff51afd7ed558ccdu;
    r->hash += h ^ h >> 31;
}

/* Reads all values on this rank and hashes them. Tensors that are not cut count on one tensor-parallel rank
 * only. expected: also compares with value_of. alone: weights only. */
static int look(struct toy_rank *r, zero_ctx *z, int tp, int part, bool expected, bool alone)
{
    static const int values[] = {ZERO_VALUE_PARAM, ZERO_VALUE_STATE, ZERO_VALUE_STATE + 1};
    float x[MAX_ELEMS];
    for (int t = 0; t < TENSORS; t++)
        for (int k = 0; k <= (alone ? 0 : shapes[t].n_states); k++) {
            const struct shape *s = &shapes[t];
            bool narrow = k == 0 && s->dtype == ZERO_BF16;
            int64_t n = n_elems(s, tp);
            memset(x, 0x7f, sizeof x);
            int err = zero_read(z, t, values[k], 0, n, x);
            if (err)
                return err;
            for (int64_t i = 0; i < n; i++) {
                int64_t whole = whole_of(s, tp, part, i);
                uint32_t bits, want;
                float f = t == BUFFER ? 0 : value_of(t, k, whole);
                memcpy(&want, &f, sizeof want);
                memcpy(&bits, (const char *)x + i * (narrow ? 2 : 4), narrow ? 2 : 4);
                bits = narrow ? bits << 16 : bits;
                want = t == BUFFER ? (uint32_t)(100 + i) : want;
                if (whole < 0) /* padding is zero after a load */
                    want = 0;
                else if (s->cut >= 0 || part == 0)
                    add_to_hash(r, t, k, whole, bits);
                if (expected && bits != want) {
                    toy_wrong(r, "element %d of part %d of %s, kind %d, is %08x instead of %08x; ", (int)i,
                              part, s->name, k, bits, want);
                    return 0;
                }
            }
        }
    return 0;
}

/* Writes every value on this rank, weights and states. */
static int write_all(struct toy_rank *r, struct model *m, zero_ctx *z, int tp, int part)
{
    static const int values[] = {ZERO_VALUE_PARAM, ZERO_VALUE_STATE, ZERO_VALUE_STATE + 1};
    for (int t = 0; t < TENSORS; t++)
        for (int k = 0; k <= shapes[t].n_states; k++) {
            const struct shape *s = &shapes[t];
            float x[MAX_ELEMS];
            uint16_t narrow[MAX_ELEMS];
            int64_t n = n_elems(s, tp);
            if (t == BUFFER) {
                for (int32_t i = 0; i < n; i++)
                    ((int32_t *)m->own[t])[i] = 100 + i;
                continue;
            }
            for (int64_t i = 0; i < n; i++) {
                int64_t whole = whole_of(s, tp, part, i);
                x[i] = whole < 0 ? 77 : value_of(t, k, whole); /* checkpoints do not have padding */
                narrow[i] = bf16_from_float(x[i]);
            }
            int err = zero_write(z, t, values[k], 0, n, k == 0 && s->dtype == ZERO_BF16 ? (void *)narrow : x);
            if (err)
                return err;
        }
    return 0;
}

static int save_one(struct toy_rank *r, struct model *m, zero_ctx *z, int tp, int part)
{
    const struct setup *s = r->arg;
    char own[16];
    OR_RETURN(write_all(r, m, z, tp, part));
    OR_RETURN(zero_set_step(z, s->says));
    snprintf(own, sizeof own, "rank %d", r->rank);
    OR_RETURN(zero_set_data(z, ZERO_DATA_RANK, own, sizeof own));
    OR_RETURN(zero_set_data(z, ZERO_DATA_JOB, "mine", 4));
    OR_RETURN(zero_save(z, s->folder, NULL));
    OR_RETURN(zero_save_wait(z, NULL));
    return 0;
}

/* Takes one step, with a gradient that depends only on the element of the whole. */
static int train(struct model *m, zero_ctx *z, int tp, int part)
{
    for (int unit = 0; unit <= 4; unit++) {
        int err = zero_begin(z, unit, ZERO_BACKWARD);
        for (int t = 0; !err && t < TENSORS; t++) {
            const struct shape *s = &shapes[t];
            bool stacked = s->flags & ZERO_STACKED;
            int layer = stacked ? unit - s->unit : 0;
            if (t == BUFFER || (stacked ? layer < 0 || layer > 2 : unit != s->unit))
                continue;
            int64_t n = n_elems(s, tp) / (stacked ? 3 : 1);
            for (int64_t i = layer * n; i < (layer + 1) * n; i++) {
                int64_t whole = whole_of(s, tp, part, i);
                float g = whole < 0 ? 0 : value_of(t, 3, whole);
                if (s->dtype == ZERO_BF16)
                    ((uint16_t *)m->grad[t])[i] = bf16_from_float(g);
                else
                    ((float *)m->grad[t])[i] = g;
            }
        }
        if (!err)
            err = zero_end(z, unit, ZERO_BACKWARD);
        if (err)
            return err;
    }
    return zero_step(z, 0.125f, NULL);
}

static int load_one(struct toy_rank *r, struct model *m, zero_ctx *z, int tp, int part)
{
    const struct setup *s = r->arg;
    struct zero_data_info info = {0};
    r->hash = 0;
    OR_RETURN(zero_load(z, s->folder));
    OR_RETURN(look(r, z, tp, part, true, false));
    OR_RETURN(zero_read_data(z, ZERO_DATA_JOB, 0, 0, NULL, &info));
    r->hash = 0;
    OR_RETURN(train(m, z, tp, part));
    OR_RETURN(look(r, z, tp, part, false, false));
    r->ms = info.n_saved;
    return 0;
}

/* ---- weights alone ---- */

/* Maps slices of stacked tensors, also fused ones, and transposed tensors. */
static const struct zero_weight map[] = {
    {"wte", 0, 0, 0},
    {"wte, turned", 0, 0, 1},
    {"wpe", 1, 0, 0},
    {"qkvw.0", 2, ZERO_SLICE(0), 0},
    {"qkvw.1", 2, ZERO_SLICE(1), 1},
    {"qkvw.2", 2, ZERO_SLICE(2), 0},
    {"qkvb", 3, 0, 0},
    {"proj", 4, 0, 0},
    {"proj.1, turned", 4, ZERO_SLICE(1), 1},
    {"norm", 5, 0, 0},
    {"seen", 6, 0, 0},
    {"wide", 7, 0, 0},
};
enum { N_MAP = sizeof map / sizeof *map, FILE_BYTES = 1200 };

static int export_one(struct toy_rank *r, struct model *m, zero_ctx *z, int tp, int part)
{
    const struct setup *s = r->arg;
    OR_RETURN(write_all(r, m, z, tp, part));
    if (tp > 1) {
        const struct zero_weight sliced = {"wte.0", 0, ZERO_SLICE(0), 0};
        toy_expect(r, zero_export(z, s->folder, &sliced, 1, 0), ZERO_ERR_ARG,
                   "slice is set, but tensor wte is cut over tp along its first dimension");
        toy_expect(r, zero_export(z, "/proc/nothing", map, N_MAP, 0), ZERO_ERR_IO, "/proc/nothing");
        toy_expect(r, zero_import(z, "/proc/nothing", map, N_MAP), ZERO_ERR_IO, "/proc/nothing");
    }
    OR_RETURN(zero_export(z, s->folder, map, N_MAP, FILE_BYTES));
    return 0;
}

static int import_one(struct toy_rank *r, struct model *m, zero_ctx *z, int tp, int part)
{
    const struct setup *s = r->arg;
    OR_RETURN(zero_import(z, s->folder, map, N_MAP));
    OR_RETURN(look(r, z, tp, part, true, true));
    return 0;
}

/* ---- tests ---- */

/* Returns the hash of the whole model, from the ranks of the first replica. */
static uint64_t hash_of(const struct mesh *m, const struct toy_rank *r)
{
    uint64_t hash = 0;
    for (int part = 0; part < m->tp; part++)
        hash += r[part].hash;
    return hash;
}

static void any_mesh_loads_any_others(void **state)
{
    uint64_t after = 0;
    for (int from = 0; from < N_MESHES; from++) {
        char folder[] = "/tmp/zero-tp-ckpt-XXXXXX", what[64];
        struct toy_rank r[MAX_WORLD];
        toy_make_folder(folder);
        struct setup s = {.mesh = &meshes[from], .folder = folder, .async = from % 2, .says = 7};
        run(&s, save_one, "saved", r);
        snprintf(what, sizeof what, "saved with dp %d, tp %d; loaded", meshes[from].dp, meshes[from].tp);
        for (int to = 0; to < N_MESHES; to++) {
            s.mesh = &meshes[to];
            run(&s, load_one, what, r);
            assert_int_equal(r[0].ms, world_of(&meshes[from]));
            after = after ? after : hash_of(s.mesh, r);
            if (after != hash_of(s.mesh, r))
                fail_msg("%s to dp %d, tp %d: the step after it ends in other bits", what, s.mesh->dp,
                         s.mesh->tp);
        }
        toy_remove_folder(folder);
    }
}

/* Fails the test if a file is missing or differs. */
static void expect_same_files(const char *folder, const char *first, const char *what)
{
    char command[512]; /* room for two short paths */
    snprintf(command, sizeof command, "diff -rq '%s' '%s' >&2", first, folder);
    if (system(command))
        fail_msg("%s: other files than of the whole model", what);
}

static void weights_are_the_whole_models(void **state)
{
    char folder[N_MESHES][32], what[128];
    struct toy_rank r[MAX_WORLD];
    struct setup s = {0};
    for (int i = 0; i < N_MESHES; i++) {
        strcpy(folder[i], "/tmp/zero-tp-weights-XXXXXX");
        toy_make_folder(folder[i]);
        s.mesh = &meshes[i];
        s.folder = folder[i];
        run(&s, export_one, "exported", r);
        toy_forget_export_ids(folder[i]);
        snprintf(what, sizeof what, "exported with dp %d, tp %d, stage %d", s.mesh->dp, s.mesh->tp,
                 s.mesh->stage);
        expect_same_files(folder[i], folder[0], what);
        s = (struct setup){.mesh = s.mesh, .folder = folder[0]};
        if (i % 2) { /* all initial values come from the files */
            s.gives = s.whole = true;
            s.from = ZERO_INIT_LATER;
        }
        run(&s, import_one, "imported", r);
        s = (struct setup){0};
    }
    for (int i = 0; i < N_MESHES; i++)
        toy_remove_folder(folder[i]);
}

/* ---- whole tensors ---- */

/* Writes a whole tensor in three pieces, which differ from the ranks' parts. lacks: values are missing until
 * the last piece is written. */
static int write_whole(struct toy_rank *r, zero_ctx *z, int t, int k, bool lacks)
{
    static const int values[] = {ZERO_VALUE_PARAM, ZERO_VALUE_STATE, ZERO_VALUE_STATE + 1};
    const struct setup *s = r->arg;
    enum zero_dtype dtype = k > 0 ? ZERO_F32 : (enum zero_dtype)shapes[t].dtype;
    int64_t n = n_elems(&shapes[t], 1), piece = n / 3 + 1;
    float src[MAX_ELEMS];
    int err = 0;
    for (int64_t first = 0, m; !err && first < n; first += m) {
        m = first + piece < n ? piece : n - first;
        memset(src, 0xff, sizeof src);
        for (int64_t i = 0; i < m; i++)
            put_value(dtype, src, i, value_of(t, k, first + i));
        err = zero_write(z, t, values[k], first, m, r->rank < s->mesh->tp ? src : NULL);
        if (!err && lacks && first + m < n) /* although some ranks have all of their part */
            toy_expect(r, zero_read(z, t, ZERO_VALUE_PARAM, 0, 1, src), ZERO_ERR_ORDER, "has values for");
    }
    if (!err)
        toy_expect(r, zero_write(z, t, values[k], 1, n, src), ZERO_ERR_ARG, "elements of tensor");
    return err;
}

static int write_all_whole(struct toy_rank *r, zero_ctx *z, bool states, bool lacks)
{
    int err = 0;
    for (int t = 0; t < TENSORS; t++)
        for (int k = 0; !err && t != BUFFER && k <= (states ? shapes[t].n_states : 0); k++)
            err = write_whole(r, z, t, k, lacks);
    return err;
}

/* At stages 0 and 1 the model sees its part at any time. */
static void look_at_pointers(struct toy_rank *r, const struct model *m, int tp, int part)
{
    for (int t = 0; t < TENSORS; t++)
        for (int64_t i = 0; t != BUFFER && i < n_elems(&shapes[t], tp); i++) {
            float want[1] = {0};
            int64_t whole = whole_of(&shapes[t], tp, part, i), size = shapes[t].dtype == ZERO_BF16 ? 2 : 4;
            put_value((enum zero_dtype)shapes[t].dtype, want, 0, whole < 0 ? 0 : value_of(t, 0, whole));
            if (memcmp((const char *)m->param[t] + i * size, want, (size_t)size) != 0)
                toy_wrong(r, "the model has another element %d of %s; ", (int)i, shapes[t].name);
        }
}

static int give_one(struct toy_rank *r, struct model *m, zero_ctx *z, int tp, int part)
{
    const struct setup *s = r->arg;
    if (s->from == ZERO_INIT_LATER)
        OR_RETURN(write_all_whole(r, z, false, true));
    OR_RETURN(look(r, z, tp, part, true, true));
    if (s->mesh->stage < 2)
        look_at_pointers(r, m, tp, part);
    r->hash = 0;
    OR_RETURN(train(m, z, tp, part));
    OR_RETURN(look(r, z, tp, part, false, false));
    uint64_t hash = r->hash;
    if (s->whole) {
        OR_RETURN(write_all_whole(r, z, true, false));
        OR_RETURN(look(r, z, tp, part, true, false));
    }
    r->hash = hash;
    return 0;
}

/* With tp 8, one rank's part of wte is all padding. */
static void whole_tensors_are_cut(void **state)
{
    static const struct mesh on[] = {{1, 2, 0}, {2, 3, 1}, {1, 3, 2}, {2, 2, 3},
                                     {4, 2, 5}, {1, 8, 1}, {2, 1, 0}};
    for (size_t i = 0; i < sizeof on / sizeof *on; i++) {
        struct setup s = {.mesh = &on[i], .gives = true};
        struct toy_rank r[MAX_WORLD];
        char what[96];
        shapes = on[i].tp == 8 ? powers_of_two : twos_and_threes;
        run(&s, give_one, "cut by the program", r);
        uint64_t hash = hash_of(s.mesh, r);
        s.whole = true;
        for (int from = ZERO_INIT_MODEL; from <= ZERO_INIT_CALL; from++) {
            s.from = (enum zero_init)from;
            snprintf(what, sizeof what, "init_from %d, tp %d", from, s.mesh->tp);
            run(&s, give_one, what, r);
            if (hash != hash_of(s.mesh, r))
                fail_msg("%s: other bits than of a program that cuts", what);
        }
    }
    shapes = powers_of_two;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(weights_are_the_whole_models),
        cmocka_unit_test(any_mesh_loads_any_others),
        cmocka_unit_test(whole_tensors_are_cut),
    };
    return cmocka_run_group_tests(tests, NULL, toy_remove_folders);
}
