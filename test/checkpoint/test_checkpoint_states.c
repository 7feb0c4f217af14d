/* SPDX-License-Identifier: Apache-2.0 */
/* test_checkpoint_states.c: tests checkpoints of masters and moments that take fewer bytes than fp32, on
 * meshes of data, tensor and pipeline parallelism.
 *
 * For each choice of masters and moments, a run that is saved on one mesh and loaded on another goes on with
 * the bits of an uninterrupted run. One of its steps is skipped. A remainder is saved as the bytes of fp32
 * masters. Values that are kept in another form are converted, with the same bits on all meshes. Damaged
 * scales and manifests that do not match the files are refused, and change nothing. */
#include "test/checkpoint/memory_files.h"
#include "test/cmocka.h"
#include "test/stand_in/half.h"
#include "test/zero/pp_model.h"
#include "zero/checkpoint/manifest.h"
#include "zero/checkpoint/safetensors.h"
#include "zero/context.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SAVED_STEPS = 3, ALL_STEPS = 5, SKIPPED_STEP = 1, BLOCK = 32 };

struct choice {
    int masters, moments;
};
static const struct choice choices[] = {
    {ZERO_MASTERS_F32, ZERO_MOMENTS_F32},        {ZERO_MASTERS_REMAINDER, ZERO_MOMENTS_F32},
    {ZERO_MASTERS_NONE, ZERO_MOMENTS_F32},       {ZERO_MASTERS_F32, ZERO_MOMENTS_BF16},
    {ZERO_MASTERS_REMAINDER, ZERO_MOMENTS_BF16}, {ZERO_MASTERS_NONE, ZERO_MOMENTS_BF16},
    {ZERO_MASTERS_F32, ZERO_MOMENTS_Q8},         {ZERO_MASTERS_REMAINDER, ZERO_MOMENTS_Q8},
    {ZERO_MASTERS_NONE, ZERO_MOMENTS_Q8},
};
enum { N_CHOICES = sizeof choices / sizeof *choices };
static const struct choice fp32 = {ZERO_MASTERS_F32, ZERO_MOMENTS_F32};

static struct memory_files *files;
static const struct mesh one_rank = {1, 1, 1, 0};
static _Atomic int n_converted, n_seeds;
/* What lines about masters and about moments should say, whether as a warning, and how many did. */
static struct {
    char says[64];
    bool loses;
    _Atomic int n;
} converted[2];

static void note(void *arg, const char *line)
{
    n_converted += strstr(line, "saved in another precision and converted:") != NULL;
    for (int i = 0; i < 2; i++)
        converted[i].n += strstr(line, converted[i].says) &&
                          (strstr(line, "; that loses bits") != NULL) == converted[i].loses &&
                          (strstr(line, "warning: ") != NULL) == converted[i].loses;
    n_seeds += strstr(line, "saved with seed 0; steps from here on use seed 5") != NULL;
}

static void open_files(void)
{
    files = memory_files_open();
    n_converted = n_seeds = 0;
}

/* ---- ranks ---- */

static int steps(struct model *m, zero_ctx *z, const struct place *at, int first, int end)
{
    for (int step = first; step < end; step++)
        OR_RETURN(pp_step(m, z, step, at));
    return 0;
}

/* Saves after some steps, and again after all of them. */
static int save_one(struct toy_rank *r, struct model *m, zero_ctx *z, const struct place *at)
{
    const struct setup *s = r->arg;
    z->files = memory_files_table(files);
    OR_RETURN(steps(m, z, at, 0, SAVED_STEPS));
    OR_RETURN(pp_look(m, z, &pp_found[r->rank][0]));
    OR_RETURN(zero_save(z, s->folder, NULL));
    OR_RETURN(steps(m, z, at, SAVED_STEPS, ALL_STEPS));
    OR_RETURN(pp_look(m, z, &pp_found[r->rank][1]));
    OR_RETURN(zero_save(z, "/end", NULL));
    return zero_save_wait(z, NULL);
}

static int go_on(struct toy_rank *r, struct model *m, zero_ctx *z, const struct place *at)
{
    const struct setup *s = r->arg;
    z->files = memory_files_table(files);
    OR_RETURN(zero_load(z, s->folder));
    OR_RETURN(pp_look(m, z, &pp_found[r->rank][0]));
    OR_RETURN(steps(m, z, at, SAVED_STEPS, ALL_STEPS));
    OR_RETURN(pp_look(m, z, &pp_found[r->rank][1]));
    OR_RETURN(zero_save(z, "/other end", NULL));
    return zero_save_wait(z, NULL);
}

/* Saves what it loaded, so that files of one mesh can be compared. */
static int save_again(struct toy_rank *r, struct model *m, zero_ctx *z, const struct place *at)
{
    const struct setup *s = r->arg;
    z->files = memory_files_table(files);
    OR_RETURN(zero_load(z, s->folder));
    OR_RETURN(zero_save(z, "/copy", NULL));
    return zero_save_wait(z, NULL);
}

/* Loads into trained values, and takes a step. */
static int load_only(struct toy_rank *r, struct model *m, zero_ctx *z, const struct place *at)
{
    const struct setup *s = r->arg;
    z->files = memory_files_table(files);
    if (!s->later && !s->spoil)
        OR_RETURN(pp_step(m, z, 7, at));
    OR_RETURN(zero_load(z, s->folder));
    OR_RETURN(pp_look(m, z, &pp_found[r->rank][0]));
    if (!s->spoil)
        OR_RETURN(pp_step(m, z, SAVED_STEPS, at));
    return pp_look(m, z, &pp_found[r->rank][1]);
}

static struct setup setup_of(const struct mesh *mesh, const struct choice *c, const char *folder)
{
    return (struct setup){
        .mesh = mesh, .folder = folder, .masters = c->masters, .moments = c->moments, .log = note};
}

static void run(const struct mesh *mesh, const struct choice *c, const char *folder, int way, pp_fn *fn,
                uint64_t want[2])
{
    struct setup s = setup_of(mesh, c, folder);
    char what[TEXT];
    s.async = way & 1;
    s.later = fn != save_one && way & 2;
    snprintf(what, sizeof what, "masters %d, moments %d, folder %s", c->masters, c->moments, folder);
    pp_run(&s, fn, what);
    if (want)
        pp_check_bits(mesh, want, what);
}

/* ---- files ---- */

static const unsigned char *content(const char *folder, int t, const char *name, int64_t **n)
{
    char path[200];
    snprintf(path, sizeof path, "%s/save-00000001-step-%08d/%s", folder, t, name);
    return memory_files_content(files, path, n);
}

static void assert_same_files(const char *a, const char *b, int t, int n_files)
{
    for (int i = 0; i <= n_files; i++) {
        char name[64] = "manifest.json";
        int64_t *n_a, *n_b;
        if (i)
            snprintf(name, sizeof name, "shard-%05d-of-%05d.safetensors", i, n_files);
        const unsigned char *x = content(a, t, name, &n_a), *y = content(b, t, name, &n_b);
        if (!x || !y)
            fail_msg("%s or %s has no %s of step %d", a, b, name, t);
        if (*n_a != *n_b || memcmp(x, y, (size_t)*n_a) != 0)
            fail_msg("%s of %s and %s differ", name, a, b);
    }
}

/* ---- tests ---- */

static void every_choice_goes_on_anywhere(void **state)
{
    const char *every = getenv("EVERY");
    int n_pairs = every && atoi(every) > 1 ? 3 : PP_MESHES;
    for (int c = 0; c < N_CHOICES; c++) {
        uint64_t want[2] = {0};
        open_files();
        run(&one_rank, &choices[c], "/begin", c, save_one, want);
        memory_files_close(files);
        for (int k = 0; k < n_pairs; k++) {
            const struct mesh *from = &pp_meshes[(4 * c + 5 * k) % PP_MESHES],
                              *to = &pp_meshes[(7 * c + 11 * k + 1) % PP_MESHES];
            open_files();
            run(from, &choices[c], "/begin", k, save_one, want);
            run(to, &choices[c], "/begin", k + 1, go_on, want);
            run(&one_rank, &choices[c], "/end", k, save_again, NULL);
            assert_int_equal(zr_file_rename(memory_files_table(files), "/copy", "/first copy"), 0);
            run(&one_rank, &choices[c], "/other end", k + 2, save_again, NULL);
            assert_same_files("/copy", "/first copy", ALL_STEPS - 1, 1);
            assert_int_equal(n_converted + n_seeds, 0);
            memory_files_close(files);
        }
    }
}

static void a_remainder_is_saved_as_fp32_masters(void **state)
{
    static const struct choice remainder = {ZERO_MASTERS_REMAINDER, ZERO_MOMENTS_F32};
    for (int k = 0; k < PP_MESHES; k += 2) {
        uint64_t want[2] = {0};
        const struct mesh *mesh = &pp_meshes[k];
        open_files();
        run(mesh, &fp32, "/wide", k / 2, save_one, want);
        run(mesh, &remainder, "/halves", k / 2 + 1, save_one, want);
        assert_same_files("/wide", "/halves", SAVED_STEPS - 1, pp_world(mesh));
        run(&pp_meshes[(k + 3) % PP_MESHES], &remainder, "/wide", k, go_on, want);
        run(&pp_meshes[(k + 4) % PP_MESHES], &fp32, "/halves", k, go_on, want);
        assert_int_equal(n_converted, 0);
        memory_files_close(files);
    }
}

static void expect_converted(int i, const char *key, const char *from, const char *to, bool loses)
{
    snprintf(converted[i].says, sizeof converted[i].says, "converted: %s %s -> %s of", key, from, to);
    converted[i].loses = loses;
    converted[i].n = 0;
}

static void other_precisions_are_converted(void **state)
{
    static const char *const masters[] = {"f32", "remainder", "none"}, *const moments[] = {"f32", "bf16",
                                                                                           "q8"};
    for (int from = 0; from < N_CHOICES; from++) {
        uint64_t saved[2] = {0};
        open_files();
        run(&pp_meshes[from], &choices[from], "/begin", from, save_one, saved);
        for (int to = 0; to < N_CHOICES; to++) {
            const struct choice *a = &choices[from], *b = &choices[to];
            bool none_before = a->masters == ZERO_MASTERS_NONE, none_now = b->masters == ZERO_MASTERS_NONE;
            bool has_other_masters = none_before != none_now, has_other_moments = a->moments != b->moments;
            uint64_t want[2] = {0};
            n_converted = 0;
            expect_converted(0, "masters", none_before ? "none" : "f32", masters[b->masters], none_now);
            expect_converted(1, "moments", moments[a->moments], moments[b->moments],
                             b->moments != ZERO_MOMENTS_F32);
            for (int k = 0; k < 3; k++)
                run(&pp_meshes[(from + 5 * to + 7 * k) % PP_MESHES], b, "/begin", 2 * k, load_only, want);
            assert_int_equal(converted[0].n, has_other_masters ? 3 : 0);
            assert_int_equal(converted[1].n, has_other_moments ? 3 : 0);
            assert_int_equal(n_converted, converted[0].n + converted[1].n);
            /* States of fp32 and masters of fp32 hold what was saved. */
            bool exact =
                (b->moments == ZERO_MOMENTS_F32 || b->moments == a->moments) && (none_before || !none_now);
            assert_true(!exact || want[0] == saved[0]);
        }
        memory_files_close(files);
    }
}

/* Tensors that tp does not cut into whole blocks, which only a load into other states can have. */
static void codes_are_read_into_any_cut(void **state)
{
    static const struct choice q8 = {ZERO_MASTERS_REMAINDER, ZERO_MOMENTS_Q8},
                               bf16 = {ZERO_MASTERS_F32, ZERO_MOMENTS_BF16};
    static const struct mesh cut[] = {{1, 2, 2, 2}, {3, 1, 2, 1}, {4, 1, 2, 3}}, whole[] = {{2, 2, 1, 3}};
    static const int64_t shapes[][3] = {{LAYERS, 24, 6}, {LAYERS, 6, 8}};
    struct shape kept[TENSORS];
    uint64_t saved[2] = {0}, narrow[2] = {0};
    memcpy(kept, pp_shapes, sizeof kept);
    memcpy(pp_shapes[3].shape, shapes[0], sizeof shapes[0]);
    memcpy(pp_shapes[4].shape, shapes[1], sizeof shapes[1]);
    pp_shapes[EMBEDDING].shape[1] = 6;
    open_files();
    run(&whole[0], &q8, "/begin", 0, save_one, saved);
    run(&whole[0], &bf16, "/begin", 0, load_only, narrow);
    for (int k = 0; k < 3; k++) {
        uint64_t want[2] = {saved[0], 0};
        run(&cut[k], &fp32, "/begin", k, load_only, want);
        run(&cut[k], &bf16, "/begin", k + 1, load_only, narrow);
    }
    memory_files_close(files);
    memcpy(pp_shapes, kept, sizeof kept);
}

/* Loads the layers of a tensor as one tensor, whose blocks may have elements of two layers. */
static void one_tensor(struct zero_tensor *table, int n, int stage)
{
    for (int i = 0; i < n; i++)
        if (!strcmp(table[i].name, "scale"))
            table[i].flags = 0;
}

/* layers of the tensor, elements of each (0: its shape has only the layers), and whether they are whole
 * blocks. */
static void check_layers(int layers, int64_t elems, bool whole_blocks)
{
    static const struct choice q8 = {ZERO_MASTERS_F32, ZERO_MOMENTS_Q8};
    uint64_t saved[2] = {0}, want[2] = {0}, exact[2] = {0};
    pp_set_layers(layers);
    pp_shapes[SCALE].shape[1] = elems;
    open_files();
    run(&one_rank, &q8, "/begin", 0, save_one, saved);
    for (int stage = 0; stage < 4; stage++) {
        const struct mesh mesh = {1, 1 + stage % 2, 1, stage};
        struct setup s = setup_of(&mesh, &q8, "/begin");
        s.spoil = one_tensor;
        pp_run(&s, load_only, "blocks across layers");
        pp_check_bits(&mesh, want, "blocks across layers");
        assert_int_equal(n_converted, whole_blocks ? 0 : stage + 1);
    }
    assert_true((want[0] == saved[0]) == whole_blocks);
    struct setup s = setup_of(&one_rank, &fp32, "/begin");
    s.spoil = one_tensor;
    pp_run(&s, load_only, "fp32 across layers");
    pp_check_bits(&one_rank, exact, "fp32 across layers");
    assert_true(exact[0] == saved[0]);
    memory_files_close(files);
    pp_set_layers(LAYERS);
    pp_use_blocks(2);
}

static void blocks_of_layers_are_kept_or_converted(void **state)
{
    check_layers(LAYERS, 70, false);
    check_layers(8, 20, false); /* whole blocks together */
    check_layers(LAYERS, 64, true);
    check_layers(LAYERS, 0, false); /* a number per layer */
}

/* ---- rounding to nearest ---- */

static float saved_states[2][TENSORS][MAX_ELEMS], loaded_states[2][TENSORS][MAX_ELEMS];

static int read_states(struct model *m, zero_ctx *z, float out[2][TENSORS][MAX_ELEMS])
{
    for (int k = 0; k < m->n; k++)
        for (int i = 0; i < pp_shapes[m->own[k].tensor].n_states; i++)
            OR_RETURN(zero_read(z, m->first_tensor + k, ZERO_VALUE_STATE + i, 0, m->own[k].n,
                                out[i][m->own[k].tensor]));
    return 0;
}

static int save_states(struct toy_rank *r, struct model *m, zero_ctx *z, const struct place *at)
{
    z->files = memory_files_table(files);
    OR_RETURN(steps(m, z, at, 0, SAVED_STEPS));
    OR_RETURN(read_states(m, z, saved_states));
    return zero_save(z, "/begin", NULL);
}

static int load_states(struct toy_rank *r, struct model *m, zero_ctx *z, const struct place *at)
{
    z->files = memory_files_table(files);
    OR_RETURN(zero_load(z, "/begin"));
    return read_states(m, z, loaded_states);
}

static void check_block(const float *saved, const float *loaded, int64_t n)
{
    float largest = 0;
    for (int64_t i = 0; i < n; i++)
        largest = fmaxf(largest, fabsf(saved[i]));
    for (int64_t i = 0; i < n; i++) {
        bool near = fabsf(saved[i]) > largest / 1000;
        assert_true((saved[i] == 0) == (loaded[i] == 0) && (saved[i] < 0) == (loaded[i] < 0));
        assert_true(fabsf(saved[i] - loaded[i]) <= (near ? 0.0085f : 0.001f) * largest);
    }
}

static void states_are_rounded_to_nearest(void **state)
{
    static const struct choice narrow[] = {{ZERO_MASTERS_F32, ZERO_MOMENTS_BF16},
                                           {ZERO_MASTERS_F32, ZERO_MOMENTS_Q8}};
    open_files();
    run(&one_rank, &fp32, "/begin", 0, save_states, NULL);
    for (int c = 0; c < 2; c++) {
        run(&one_rank, &narrow[c], "/begin", 0, load_states, NULL);
        for (int t = 0; t < TENSORS; t++)
            for (int s = 0; s < pp_shapes[t].n_states; s++) {
                const float *saved = saved_states[s][t], *loaded = loaded_states[s][t];
                int64_t n = 1, layer;
                for (int d = 0; d < 4 && pp_shapes[t].shape[d]; d++)
                    n *= pp_shapes[t].shape[d];
                layer = pp_shapes[t].where == IN_LAYERS ? n / LAYERS : n;
                for (int64_t i = 0; !c && i < n; i++)
                    assert_true(loaded[i] == bf16_to_float(bf16_from_float(saved[i])));
                for (int64_t i = 0; c && i < n; i += i % layer + BLOCK < layer ? BLOCK : layer - i % layer)
                    check_block(saved + i, loaded + i, i % layer + BLOCK < layer ? BLOCK : layer - i % layer);
            }
    }
    memory_files_close(files);
}

/* ---- seeds ---- */

static void another_seed_is_one_line(void **state)
{
    static const struct choice none = {ZERO_MASTERS_NONE, ZERO_MOMENTS_F32};
    uint64_t want[2] = {0}, other[2] = {0};
    open_files();
    run(&one_rank, &none, "/begin", 0, save_one, want);
    other[0] = want[0];
    for (int k = 0; k < 3; k++) {
        struct setup s = setup_of(&pp_meshes[2 * k + 1], &none, "/begin");
        s.seed = 5;
        pp_run(&s, go_on, "another seed");
        pp_check_bits(s.mesh, other, "another seed");
        assert_int_equal(n_seeds, k + 1);
    }
    assert_true(other[1] != want[1]);
    struct setup s = setup_of(&one_rank, &fp32, "/begin"); /* rounds nothing at random */
    s.seed = 5;
    pp_run(&s, load_only, "no seed");
    assert_int_equal(n_seeds, 3);
    memory_files_close(files);
}

/* ---- damage ---- */

static const char *reason;

static int refuse(struct toy_rank *r, struct model *m, zero_ctx *z, const struct place *at)
{
    struct bits before, after;
    z->files = memory_files_table(files);
    OR_RETURN(pp_step(m, z, 7, at));
    OR_RETURN(pp_look(m, z, &before));
    toy_expect(r, zero_load(z, "/begin"), ZERO_ERR_IO, reason);
    OR_RETURN(pp_look(m, z, &after));
    if (before.all != after.all)
        toy_wrong(r, "a failed load changed values; ");
    return 0;
}

static void damaged_scales_are_refused(void **state)
{
    static const struct choice q8 = {ZERO_MASTERS_REMAINDER, ZERO_MOMENTS_Q8};
    int64_t *n, n_head = 0;
    struct zr_st st;
    int n_scales = 0;
    open_files();
    run(&one_rank, &q8, "/begin", 0, save_one, NULL);
    unsigned char *data = (unsigned char *)(uintptr_t)content("/begin", SAVED_STEPS - 1,
                                                              "shard-00001-of-00001.safetensors", &n);
    for (int i = 0; i < 8; i++)
        n_head |= (int64_t)data[i] << 8 * i;
    assert_int_equal(zr_st_parse("shard", (const char *)data + 8, n_head, *n, &st), 0);
    for (int64_t i = 0; i < st.n_entries; i++) {
        const struct zr_st_entry *e = &st.entries[i];
        bool scales = strstr(e->name, "/scale") != NULL, codes = strstr(e->name, "/state") != NULL;
        bool squares = strstr(e->name, "/state1") != NULL;
        if (codes)
            assert_string_equal(e->dtype, squares ? "U8" : "I8");
        if (!scales)
            continue;
        assert_string_equal(e->dtype, "BF16");
        n_scales++;
        data[e->end - 1] ^= 1;
        reason = "are damaged";
        if (n_scales % 4 == 1)
            run(&pp_meshes[n_scales % PP_MESHES], &q8, "/begin", 0, refuse, NULL);
        data[e->end - 1] ^= 1;
    }
    assert_int_equal(n_scales, 2 * 6 + 1);
    zr_st_free(&st);
    memory_files_close(files);
}

static void other_manifest(void (*change)(struct zr_manifest_tensor *t))
{
    struct zr_manifest m;
    char *text;
    int64_t *n, n_text;
    const char *was = (const char *)content("/begin", SAVED_STEPS - 1, "manifest.json", &n);
    assert_int_equal(zr_manifest_parse("manifest", was, *n, &m), 0);
    assert_true(m.seeded && m.seed == 0 && memmem(was, (size_t)*n, "libzero checkpoint 2", 20));
    for (int32_t i = 0; i < m.n_tensors; i++)
        if (!strcmp(m.tensors[i].name, "scale"))
            change(&m.tensors[i]);
    assert_int_equal(zr_manifest_print(&m, &text, &n_text), 0);
    char path[100];
    snprintf(path, sizeof path, "/begin/save-00000001-step-%08d/manifest.json", SAVED_STEPS - 1);
    memory_files_put(files, path, text, n_text);
    zr_manifest_free(&m);
    free(text);
}

static void say_bf16(struct zr_manifest_tensor *t)
{
    t->moments = ZERO_MOMENTS_BF16;
    t->stacked = false;
}

static void say_none(struct zr_manifest_tensor *t)
{
    t->masters = ZERO_MASTERS_NONE;
}

static void say_flat(struct zr_manifest_tensor *t)
{
    t->stacked = false;
}

static void manifests_that_do_not_match_are_refused(void **state)
{
    static const struct choice q8 = {ZERO_MASTERS_F32, ZERO_MOMENTS_Q8};
    static const struct {
        void (*change)(struct zr_manifest_tensor *t);
        const char *says;
    } changes[] = {{say_bf16, "is I8; it should be BF16"},
                   {say_none, "tensor scale has master values, which it should not"},
                   {say_flat, "does not lie within the 11 scales of tensor scale"}};
    for (int i = 0; i < 3; i++) {
        open_files();
        run(&one_rank, &q8, "/begin", 0, save_one, NULL);
        other_manifest(changes[i].change);
        reason = changes[i].says;
        run(&pp_meshes[i], &q8, "/begin", 0, refuse, NULL);
        memory_files_close(files);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_choice_goes_on_anywhere),
        cmocka_unit_test(a_remainder_is_saved_as_fp32_masters),
        cmocka_unit_test(other_precisions_are_converted),
        cmocka_unit_test(codes_are_read_into_any_cut),
        cmocka_unit_test(blocks_of_layers_are_kept_or_converted),
        cmocka_unit_test(states_are_rounded_to_nearest),
        cmocka_unit_test(another_seed_is_one_line),
        cmocka_unit_test(damaged_scales_are_refused),
        cmocka_unit_test(manifests_that_do_not_match_are_refused),
    };
    pp_use_blocks(2);
    pp_skipped_step = SKIPPED_STEP;
    return cmocka_run_group_tests(tests, NULL, NULL);
}
