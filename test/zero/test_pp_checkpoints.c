/* SPDX-License-Identifier: Apache-2.0 */
/* test_pp_checkpoints.c: a checkpoint of a model with pipeline stages loads with any other pp, dp and tp, and
 * training continues with the same bits. The same holds for initial values that are written. */
#include "test/cmocka.h"
#include "test/zero/pp_model.h"
#include "test/zero/sample.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- ranks ---- */

static int save_one(struct toy_rank *r, struct model *m, zero_ctx *z, const struct place *at)
{
    const struct setup *s = r->arg;
    char own[16];
    for (int step = 0; step < STEPS; step++)
        OR_RETURN(pp_step(m, z, step, at));
    OR_RETURN(pp_look(m, z, &pp_found[r->rank][0]));
    snprintf(own, sizeof own, "rank %d", r->rank);
    OR_RETURN(zero_set_data(z, ZERO_DATA_RANK, own, sizeof own));
    OR_RETURN(zero_set_data(z, ZERO_DATA_JOB, r->rank ? "other" : "mine", 4));
    OR_RETURN(zero_save(z, s->folder, NULL));
    OR_RETURN(pp_step(m, z, STEPS, at));
    OR_RETURN(zero_save_wait(z, NULL));
    OR_RETURN(pp_look(m, z, &pp_found[r->rank][1]));
    return 0;
}

static int load_one(struct toy_rank *r, struct model *m, zero_ctx *z, const struct place *at)
{
    const struct setup *s = r->arg;
    struct zero_stats stats;
    struct zero_data_info job = {0}, last = {0};
    char mine[4];
    if (s->check) /* zero_load must replace what training changed */
        OR_RETURN(pp_step(m, z, 7, at));
    OR_RETURN(zero_load(z, s->folder));
    OR_RETURN(pp_look(m, z, &pp_found[r->rank][0]));
    OR_RETURN(zero_read_data(z, ZERO_DATA_JOB, 0, sizeof mine, mine, &job));
    if ((job.bytes != 4 || memcmp(mine, "mine", 4) != 0))
        toy_wrong(r, "the program's own data is another; ");
    OR_RETURN(zero_read_data(z, s->n_saved - 1, 0, 0, NULL, &last));
    if ((last.n_saved != s->n_saved || last.bytes != 16))
        toy_wrong(r, "%d ranks saved, the last %d bytes; ", last.n_saved, (int)last.bytes);
    OR_RETURN(zero_get_stats(z, &stats));
    OR_RETURN(pp_step(m, z, STEPS, at));
    OR_RETURN(pp_look(m, z, &pp_found[r->rank][1]));
    return 0;
}

/* ---- initial values by zero_write ---- */

static int write_tensor(struct model *m, zero_ctx *z, int k)
{
    const struct own *o = &m->own[k];
    const struct shape *s = &pp_shapes[o->tensor];
    float x[MAX_ELEMS] = {0};
    int dtype = s->frozen ? s->dtype : ZERO_F32, value = s->frozen ? ZERO_VALUE_PARAM : ZERO_VALUE_MASTER;
    int64_t half = o->n / 2, size = dtype == ZERO_BF16 ? 2 : 4;
    for (int64_t i = 0; i < o->n; i++) {
        int64_t whole = pp_whole_of(m, k, i);
        pp_put(dtype, x, i, whole < 0 || o->copy ? 77 : pp_value(o->tensor, 0, whole));
    }
    const char *from = (const char *)x + half * size;
    bool counts = m->dp == 0 && !o->copy;
    OR_RETURN(zero_write(z, m->first_tensor + k, value, half, o->n - half, counts ? from : NULL));
    return zero_write(z, m->first_tensor + k, value, 0, half, counts ? x : NULL);
}

/* Writes the tensors of all the rank's pipeline stages: only norm, or all but norm. */
static int write_tensors(struct model *m, zero_ctx *z, bool later, bool norm)
{
    for (; later && m; m = m->next)
        for (int k = 0; k < m->n; k++)
            if ((m->own[k].tensor == NORM) == norm && !pp_shapes[m->own[k].tensor].buffer)
                OR_RETURN(write_tensor(m, z, k));
    return 0;
}

/* Writes all tensors but norm, which the last pipeline stage has. Until norm is written, calls are refused on
 * every pipeline stage. */
static int write_one(struct toy_rank *r, struct model *m, zero_ctx *z, const struct place *at)
{
    const struct setup *s = r->arg;
    struct zero_action a;
    OR_RETURN(write_tensors(m, z, s->later, false));
    if (s->later) {
        const char *says = "tensor norm (unit ";
        toy_expect(r, zero_next(z, &a), ZERO_ERR_ORDER, says);
        toy_expect(r, zero_evaluate(z), ZERO_ERR_ORDER, says);
        toy_expect(r, zero_save(z, s->folder, NULL), ZERO_ERR_ORDER, says);
        toy_expect(r, zero_export(z, s->folder, NULL, 0, 0), ZERO_ERR_ORDER, says);
        toy_expect(r, zero_gather_all(z, 0), ZERO_ERR_ORDER, says);
    }
    OR_RETURN(write_tensors(m, z, s->later, true));
    OR_RETURN(pp_look(m, z, &pp_found[r->rank][0]));
    for (int step = 0; step < STEPS; step++)
        OR_RETURN(pp_step(m, z, step, at));
    /* zero_write of the same values after training */
    for (struct model *t = s->check ? m : NULL; t; t = t->next) {
        float x[MAX_ELEMS];
        int64_t n = t->own[0].n;
        if (t->table[0].flags != ZERO_TIED)
            continue;
        if (!t->own[0].copy)
            OR_RETURN(zero_read(z, t->first_tensor, ZERO_VALUE_MASTER, 0, n, x));
        OR_RETURN(zero_write(z, t->first_tensor, ZERO_VALUE_MASTER, 0, n, t->own[0].copy ? NULL : x));
    }
    OR_RETURN(pp_look(m, z, &pp_found[r->rank][1]));
    return 0;
}

/* ---- buffers ---- */

/* Gives each data-parallel rank different buffers, on all pipeline stages or on the first one only.
 * whole_numbers: count differs too. */
static void spoil_buffers(struct model *m, bool all, bool whole_numbers)
{
    for (int k = 0; k < m->n; k++) {
        const struct shape *s = &pp_shapes[m->own[k].tensor];
        if (!s->buffer || (s->dtype == ZERO_I32 ? !whole_numbers : !all && m->stage > 0))
            continue;
        for (int64_t i = 0; i < m->own[k].n; i++)
            pp_put(s->dtype, m->param[k], i,
                   pp_value(m->own[k].tensor, 0, i) + (float)(m->dp * (1 + i)) / 64);
    }
}

static void expect_buffers(struct toy_rank *r, struct model *m, double ranks_apart, const char *what)
{
    for (int k = 0; k < m->n; k++) {
        const struct shape *s = &pp_shapes[m->own[k].tensor];
        for (int64_t i = 0; s->buffer && s->dtype != ZERO_I32 && i < m->own[k].n; i++) {
            float want = pp_value(m->own[k].tensor, 0, i) + (float)(ranks_apart * (double)(1 + i) / 64);
            if (pp_get(s->dtype, m->param[k], i) != want)
                toy_wrong(r, "%s: element %d of %s is %g, expected %g; ", what, (int)i, s->name,
                          (double)pp_get(s->dtype, m->param[k], i), (double)want);
        }
    }
}

static int sync_one(struct toy_rank *r, struct model *m, zero_ctx *z, const struct place *at)
{
    const struct setup *s = r->arg;
    spoil_buffers(m, false, false);
    toy_expect(r, zero_save(z, s->folder, NULL), ZERO_ERR_MISMATCH,
               "call zero_sync_buffers first: element 0 of buffer seen differs between rank 1 and rank 0");
    spoil_buffers(m, true, true);
    toy_expect(r, zero_sync_buffers(z, ZERO_SYNC_MEAN), ZERO_ERR_MISMATCH, "integers have no mean");
    OR_RETURN(zero_sync_buffers(z, ZERO_SYNC_RANK0));
    expect_buffers(r, m, 0, "by the first rank");
    spoil_buffers(m, true, false);
    OR_RETURN(zero_sync_buffers(z, ZERO_SYNC_MEAN));
    expect_buffers(r, m, 0.5, "by the mean");
    OR_RETURN(zero_save(z, s->folder, NULL));
    if (m->stage == 0) { /* only the ranks of one pipeline stage call */
        float x[3] = {0}, y[3] = {1, 2, 3};
        OR_RETURN(zero_read(z, SEEN, ZERO_VALUE_PARAM, 0, 3, x));
        if (x[1] != pp_get(ZERO_F32, m->param[SEEN], 1))
            toy_wrong(r, "a buffer is read as another; ");
        OR_RETURN(zero_write(z, SEEN, ZERO_VALUE_PARAM, 0, 3, m->dp ? NULL : y));
        if (pp_get(ZERO_F32, m->param[SEEN], 2) != 3)
            toy_wrong(r, "a buffer was not written; ");
    }
    /* If all ranks call, all get the error and go on. If only one pipeline stage's ranks call, the context
     * fails. */
    static const char says[] = "*param of buffer seen is NULL";
    void *own = m->param[SEEN];
    bool spoils = m->stage == 0 && m->dp == 1;
    if (spoils)
        m->param[SEEN] = NULL;
    toy_expect(r, zero_sync_buffers(z, ZERO_SYNC_RANK0), ZERO_ERR_ORDER, says);
    toy_expect(r, zero_export(z, s->folder, NULL, 0, 0), ZERO_ERR_ORDER, says);
    if (spoils && m->pp > 1)
        toy_expect(r, zero_read(z, SEEN, ZERO_VALUE_PARAM, 0, 3, NULL), ZERO_ERR_ORDER, says);
    if (m->pp > 1)
        toy_expect(r, zero_sync_buffers(z, ZERO_SYNC_RANK0), ZERO_ERR_ORDER, says);
    if (spoils)
        m->param[SEEN] = own;
    return 0;
}

/* ---- tests ---- */

/* Returns the text of the manifest's tensors. */
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

/* Whether a mesh is one of six that each load what any other of the six saved. They differ in pipeline
 * stages, tensor-parallel ranks, data-parallel ranks, pipeline stages per rank, and combinations of these. */
static bool is_of_six(int mesh)
{
    static const int six[] = {0, 3, 4, 6, 12, 13};
    for (int i = 0; i < 6; i++)
        if (six[i] == mesh)
            return true;
    return false;
}

/* Saves on every each-th mesh, and loads on others. */
static void load_on_others(int each)
{
    char first[2][1 << 12] = {"", ""};
    uint64_t want[2] = {0};
    int n_of_six = 0;
    for (int from = 0; from < PP_MESHES; from += each) {
        char folder[] = "/tmp/zero-pp-ckpt-XXXXXX";
        const struct mesh *saved = &pp_meshes[from];
        toy_make_folder(folder);
        struct setup s = {.mesh = saved, .folder = folder, .async = from % 2};
        pp_run(&s, save_one, "saved");
        pp_check_bits(saved, want, "saved");
        /* The manifest does not mention pipeline stages. */
        char *tensors = tensors_of(folder), *like = first[saved->tp - 1];
        assert_true(strlen(tensors) < sizeof *first);
        if (!*like)
            strcpy(like, tensors);
        assert_string_equal(tensors, like);
        free(tensors);
        s.n_saved = pp_world(saved);
        for (int to = 0; to < PP_MESHES; to++) {
            bool both_of_six = is_of_six(from) && is_of_six(to);
            /* one in three of the other pairs is left out */
            if ((to + PP_MESHES - from) % 3 == 2 && !both_of_six)
                continue;
            n_of_six += both_of_six && to != from;
            if (!sample_has())
                continue;
            s.mesh = &pp_meshes[to];
            s.check = (from + to) % 5 == 0;
            s.later = (from + to) % 5 == 1;
            char loaded[TEXT];
            snprintf(loaded, sizeof loaded, "loaded from pp %d, dp %d, tp %d, v %d,", saved->pp, saved->dp,
                     saved->tp, saved->v);
            pp_run(&s, load_one, loaded);
            pp_check_bits(s.mesh, want, loaded);
        }
        toy_remove_folder(folder);
    }
    assert_true(each > 1 || n_of_six == 6 * 5);
}

static void any_mesh_loads_any_others(void **state)
{
    load_on_others(1);
}

/* An f32 tensor has no separate master weights, and the last pipeline stage's copy still loads. */
static void so_it_is_with_a_tied_tensor_of_f32(void **state)
{
    const struct shape before = pp_shapes[EMBEDDING];
    pp_shapes[EMBEDDING].dtype = ZERO_F32;
    load_on_others(5);
    pp_shapes[EMBEDDING] = before;
}

static void so_it_is_with_a_frozen_one(void **state)
{
    const struct shape before = pp_shapes[EMBEDDING];
    pp_shapes[EMBEDDING].frozen = true;
    load_on_others(7);
    pp_shapes[EMBEDDING] = before;
}

/* Step counts differ between units of different pipeline stages, and load on any number of pipeline
 * stages. */
static void so_it_is_with_units_left_out(void **state)
{
    static const struct mesh mesh[] = {{1, 1, 1, 2}, {2, 1, 1, 1}};
    uint64_t want[2] = {0};
    pp_leaves_out = true;
    for (int from = 0; from < 2; from++) {
        char folder[] = "/tmp/zero-pp-ckpt-XXXXXX";
        const struct mesh *both[] = {&mesh[from], &mesh[1 - from]};
        toy_make_folder(folder);
        struct setup s = {.folder = folder, .n_saved = pp_world(&mesh[from])};
        for (int i = 0; i < 2; i++) {
            s.mesh = both[i];
            pp_run(&s, i ? load_one : save_one, i ? "loaded" : "saved");
            pp_check_bits(s.mesh, want, i ? "loaded" : "saved");
        }
        char *tensors = tensors_of(folder);
        assert_non_null(strstr(tensors, "\"updates\""));
        free(tensors);
        toy_remove_folder(folder);
    }
    pp_leaves_out = false;
}

static void first_values_may_come_later(void **state)
{
    uint64_t want[2] = {0};
    for (int i = 0; i < PP_MESHES; i++)
        for (int later = 0; later < 2; later++) {
            struct setup s = {
                .mesh = &pp_meshes[i], .folder = "/tmp/never-made", .later = later, .check = i % 4 == 3};
            pp_run(&s, write_one, later ? "written" : "adopted");
            pp_check_bits(s.mesh, want, later ? "written" : "adopted");
        }
}

static void buffers_of_stages_are_made_equal(void **state)
{
    static const struct mesh mesh[] = {{2, 2, 1, 3}, {3, 2, 1, 1}, {1, 2, 1, 2}, {2, 2, 1, 0}};
    for (size_t i = 0; i < sizeof mesh / sizeof *mesh; i++) {
        char folder[] = "/tmp/zero-pp-buffers-XXXXXX";
        toy_make_folder(folder);
        struct setup s = {.mesh = &mesh[i], .folder = folder, .check = true};
        pp_run(&s, sync_one, "buffers");
        toy_remove_folder(folder);
    }
}

/* ---- wrong calls ---- */

static struct zero_tensor *named(struct zero_tensor *table, int n, const char *name)
{
    for (int i = 0; i < n; i++)
        if (!strcmp(table[i].name, name))
            return &table[i];
    return NULL;
}

/* Defines a function that changes the table of the second pipeline stage. */
#define SPOIL(what, statement)                                                                               \
    static void what(struct zero_tensor *table, int n, int stage)                                            \
    {                                                                                                        \
        if (stage == 1)                                                                                      \
            statement;                                                                                       \
    }
SPOIL(double_a_name, named(table, n, "norm")->name = "wpe")
SPOIL(stack_in_one, named(table, n, "scale")->flags = 0)
SPOIL(change_a_shape, named(table, n, "scale")->shape[1]--)
SPOIL(change_a_cut, named(table, n, "qkvw")->tp_blocks = 1)
SPOIL(change_an_optimizer, named(table, n, "proj")->group = 1)
SPOIL(freeze_in_one, named(table, n, "proj")->grad = NULL)
SPOIL(change_a_dtype, named(table, n, "scale")->dtype = ZERO_BF16)
SPOIL(rename_one, named(table, n, "alone")->name = "another")
SPOIL(leave_out_layers, named(table, n, "scale")->name = "scale of the others")

static void stages_that_do_not_fit_are_named(void **state)
{
    static const struct mesh mesh = {2, 2, 1, 2};
    static const char unlike[] = "rank 0 and rank 2 of two pipeline stages differ in tensor ";
    static const struct {
        void (*spoil)(struct zero_tensor *table, int n, int stage);
        const char *says, *name;
    } bad[] = {
        {double_a_name, "tensor wpe is in the tables of rank 0 and rank 2 of two pipeline stages", ""},
        {stack_in_one, "tensor scale is in the tables of rank 0 and rank 2 of two pipeline stages", ""},
        {change_a_shape, unlike, "scale: in the shape"},
        {change_a_cut, unlike, "qkvw"},
        {change_an_optimizer, unlike, "proj"},
        {freeze_in_one, unlike, "proj"},
        {change_a_dtype, unlike, "scale"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        char says[160];
        snprintf(says, sizeof says, "%s%s", bad[i].says, bad[i].name);
        struct setup s = {.mesh = &mesh, .spoil = bad[i].spoil, .code = ZERO_ERR_MISMATCH, .says = says};
        pp_run(&s, NULL, says);
    }
}

static int load_wrongly(struct toy_rank *r, struct model *m, zero_ctx *z, const struct place *at)
{
    const struct setup *s = r->arg;
    struct bits before, after;
    OR_RETURN(pp_look(m, z, &before));
    toy_expect(r, zero_load(z, s->folder), s->code, s->says);
    OR_RETURN(pp_look(m, z, &after));
    if (memcmp(&before, &after, sizeof before) != 0)
        toy_wrong(r, "the load that failed has changed something; ");
    return 0;
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
    toy_make_folder(folder);
    struct setup s = {.mesh = &mesh, .folder = folder, .code = ZERO_ERR_ARG};
    pp_run(&s, save_one, "saved");
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        s.spoil = bad[i].spoil;
        s.says = bad[i].says;
        pp_run(&s, load_wrongly, s.says);
    }
    toy_remove_folder(folder);
}

/* Damages a block of the last pipeline stage's file. All ranks get the error, and nothing changes. */
static void damage_is_found_by_all(void **state)
{
    static const struct mesh mesh = {2, 2, 1, 3};
    char folder[] = "/tmp/zero-pp-ckpt-XXXXXX", command[512];
    toy_make_folder(folder);
    struct setup s = {.mesh = &mesh, .folder = folder, .code = ZERO_ERR_IO};
    pp_run(&s, save_one, "saved");
    snprintf(command, sizeof command,
             "printf XXXX | dd of=$(echo %s/save-*/shard-00003-of-00004.safetensors) bs=1 seek=1000 "
             "conv=notrunc 2>/dev/null",
             folder);
    assert_int_equal(system(command), 0);
    s.says = "shard-00003-of-00004.safetensors";
    pp_run(&s, load_wrongly, "damaged");
    toy_remove_folder(folder);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(any_mesh_loads_any_others),
        cmocka_unit_test(so_it_is_with_a_tied_tensor_of_f32),
        cmocka_unit_test(so_it_is_with_a_frozen_one),
        cmocka_unit_test(so_it_is_with_units_left_out),
        cmocka_unit_test(first_values_may_come_later),
        cmocka_unit_test(buffers_of_stages_are_made_equal),
        cmocka_unit_test(stages_that_do_not_fit_are_named),
        cmocka_unit_test(checkpoints_of_another_model_are_named),
        cmocka_unit_test(damage_is_found_by_all),
    };
    return cmocka_run_group_tests(tests, NULL, toy_remove_folders);
}
