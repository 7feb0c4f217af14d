/* SPDX-License-Identifier: Apache-2.0 */
/* test_llama_names.c: weights of four architectures go into a model and out again with the same bits, on
 * every mesh. Each rank has the elements that its part of the model needs. The exported folder has the names,
 * shapes and dtypes of the one that transformers wrote (make_references.py --check loads such a folder). */
#include "bench/llama/hf_folder.h"
#include "bench/llama/llama_ops.h"
#include "kernels/error.h"
#include "test/bench/llama/llama_references.h"
#include "test/cmocka.h"
#include "test/zero/toy_net.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <jansson.h>

static const char *references, *const names[] = {"llama", "mistral", "qwen2", "qwen3"};
enum { N_NAMES = sizeof names / sizeof *names, MAX_MAP = LLAMA_N_TENSORS * 3, MAX_BYTES = 1 << 15 };

struct mesh {
    int stage, pp, dp, tp;
    bool sequence;
};
static const struct mesh meshes[] = {{0, 1, 1, 1}, {3, 1, 2, 1}, {1, 1, 1, 2, true},
                                     {3, 1, 2, 2}, {3, 2, 1, 1}, {2, 2, 1, 2}};

/* ---- files ---- */

/* The names of all weights in a folder, as the keys of an object. */
static json_t *list_names(const char *folder)
{
    json_t *index = llama_load_json(folder, "model.safetensors.index.json"), *list;
    if (index) {
        list = json_incref(json_object_get(index, "weight_map"));
        json_decref(index);
        return list;
    }
    FILE *f;
    long at;
    list = llama_load_header(folder, "model.safetensors", &at, &f);
    assert_non_null(list);
    fclose(f);
    assert_string_equal(json_string_value(json_object_get(json_object_get(list, "__metadata__"), "format")),
                        "pt");
    json_object_del(list, "__metadata__");
    return list;
}

static void check_same_weights(const char *ours, const char *theirs)
{
    json_t *list = list_names(theirs), *own = list_names(ours), *value;
    const char *name;
    assert_int_equal(json_object_size(own), json_object_size(list));
    json_object_foreach(list, name, value)
    {
        struct llama_weight a, b;
        assert_true(llama_load_weight(ours, name, &a) && llama_load_weight(theirs, name, &b));
        if (strcmp(a.dtype, b.dtype) || !json_equal(a.shape, b.shape) || a.n != b.n ||
            memcmp(a.bytes, b.bytes, a.n) != 0)
            fail_msg("%s: %s differs from that of %s", ours, name, theirs);
        llama_free_weight(&a);
        llama_free_weight(&b);
    }
    json_decref(list);
    json_decref(own);
}

/* ---- a rank ---- */

struct job {
    const char *folder, *out;
    const struct mesh *mesh;
    struct hf_config config;
};

struct model {
    struct model_config part;
    void *params[LLAMA_N_TENSORS], *grads[LLAMA_N_TENSORS];
    struct zero_tensor table[LLAMA_N_TENSORS];
    int32_t number[LLAMA_N_TENSORS], n, n_map;
    struct zero_weight map[MAX_MAP];
    char text[MAX_MAP][MODEL_NAME_BYTES];
};

static void describe(struct model *m, const struct job *job, int32_t pp)
{
    const struct hf_config *c = &job->config;
    int64_t before = pp ? (c->layers + 1) / 2 : 0;
    m->part = llama_sizes(c);
    m->part.tp = job->mesh->tp;
    m->part.sequence = job->mesh->sequence;
    m->part.first_layer = before;
    m->part.layers = job->mesh->pp == 1 ? c->layers : pp ? c->layers - before : (c->layers + 1) / 2;
    m->part.no_embedding = pp > 0;
    m->part.no_head = pp < job->mesh->pp - 1;
    m->n = llama_ops.describe(m->table, m->number, &m->part,
                              &(struct model_pointers){m->params, m->grads, c->dtype, true});
    m->n_map = llama_ops.names(m->map, m->text, m->number, m->n, &m->part);
    assert_true(m->n_map <= llama_ops.n_names(&m->part));
}

/* Returns the dimension of a published weight that tp cuts. -1: none. */
static int cut_of(const char *name)
{
    return strstr(name, "norm") ? -1 : strstr(name, "o_proj") || strstr(name, "down_proj") ? 1 : 0;
}

/* Compares a rank's elements with the rows or columns of the file that are its own. Rows after the last are
 * 0. */
static bool has_own_part(const struct llama_weight *w, const char *name, int tp, int part, const char *values,
                         size_t n)
{
    int cut = tp > 1 ? cut_of(name) : -1;
    size_t size = !strcmp(w->dtype, "BF16") ? 2 : 4,
           rows = (size_t)json_integer_value(json_array_get(w->shape, 0)), row = w->n / rows,
           each = cut == 0 ? (rows + (size_t)tp - 1) / (size_t)tp : rows,
           columns = cut == 1 ? row / (size_t)tp : row, first = cut == 0 ? each * (size_t)part : 0,
           first_byte = cut == 1 ? columns * (size_t)part : 0;
    static const char zeros[256];
    bool same = n * size == each * columns;
    for (size_t r = 0; same && r < each; r++)
        same = !memcmp(values + r * columns,
                       first + r < rows ? w->bytes + (first + r) * row + first_byte : zeros, columns);
    return same;
}

static int check_parts(struct toy_rank *r, zero_ctx *z, const struct model *m, int part)
{
    const struct job *job = r->arg;
    char *values = malloc(MAX_BYTES);
    int err = 0;
    for (int32_t i = 0; !err && i < m->n_map; i++) {
        const struct zero_weight *e = &m->map[i];
        const struct zero_tensor *t = &m->table[e->tensor];
        int64_t n = 1, slice = e->slice ? e->slice - ZERO_SLICE(0) : 0;
        struct llama_weight w;
        for (int d = e->slice ? 1 : 0; d < 8 && t->shape[d]; d++)
            n *= t->shape[d];
        err = zero_read(z, e->tensor, ZERO_VALUE_PARAM, slice * n, n, values);
        if (!err && !llama_load_weight(job->folder, e->name, &w))
            toy_wrong(r, "%s is not in the file", e->name);
        else if (!err && !has_own_part(&w, e->name, job->mesh->tp, part, values, (size_t)n))
            toy_wrong(r, "%s has other values", e->name);
        if (!err)
            llama_free_weight(&w);
    }
    free(values);
    return err;
}

static void import_and_export(struct toy_rank *r)
{
    const struct job *job = r->arg;
    struct zero_config cfg = toy_config(r, job->mesh->stage);
    struct zero_place at;
    struct model *m = calloc(1, sizeof *m);
    zero_ctx *z = NULL;
    int err = 0;
    cfg.mesh.pp = job->mesh->pp;
    cfg.mesh.tp = job->mesh->tp;
    cfg.init_from = ZERO_INIT_LATER;
    cfg.debug.log = toy_forget_line;
    cfg.pipeline.activation_bytes = 64;
    cfg.grad_accum_steps = 2;
    TOY_TRY(zero_find_place(&cfg, &at));
    if (!err)
        describe(m, job, at.pp);
    TOY_TRY(zero_wrap(&z, m->table, m->n, &cfg));
    TOY_TRY(zero_import(z, job->folder, m->map, m->n_map));
    TOY_TRY(check_parts(r, z, m, at.tp));
    TOY_TRY(zero_export(z, job->out, m->map, m->n_map, 0));
    zero_unwrap(&z);
    free(m);
}

/* ---- tests ---- */

static void check_mesh(const char *name, const struct mesh *mesh, const char *out)
{
    struct toy_rank r[MAX_TOY_RANKS];
    char folder[1024], what[100];
    struct job job = {folder, out, mesh, {0}};
    snprintf(folder, sizeof folder, "%s/%s", references, name);
    snprintf(what, sizeof what, "%s, stage %d, pp %d, dp %d, tp %d", name, mesh->stage, mesh->pp, mesh->dp,
             mesh->tp);
    assert_int_equal(hf_config_read(&job.config, folder), 0);
    toy_run(mesh->pp * mesh->dp * mesh->tp, import_and_export, &job, r, what);
    check_same_weights(out, folder);
    assert_int_equal(hf_folder_copy(folder, out, job.config.dtype), 0);
    assert_int_equal(hf_config_read(&job.config, out), 0);
}

static void weights_go_in_and_out_on_every_mesh(void **state)
{
    const char *keep = getenv("KEEP"); /* a folder for what one rank exports */
    for (int i = 0; i < N_NAMES; i++)
        for (size_t k = 0; k < sizeof meshes / sizeof *meshes; k++) {
            char out[512] = "/tmp/llama-names-XXXXXX";
            if (keep && k == 0) {
                snprintf(out, sizeof out, "%s/%s", keep, names[i]);
                check_mesh(names[i], &meshes[k], out);
                continue;
            }
            toy_make_folder(out);
            check_mesh(names[i], &meshes[k], out);
            toy_remove_folder(out);
        }
}

/* Fills in the table of one stage out of `stages` and returns it by tensor; missing ones have no name. */
static const struct zero_tensor *describe_stage(const char *name, int64_t tp, bool sequence, int stage,
                                                int stages)
{
    static struct zero_tensor by_number[LLAMA_N_TENSORS];
    static struct hf_config c;
    static void *pointers[LLAMA_N_TENSORS];
    struct zero_tensor table[LLAMA_N_TENSORS];
    int32_t number[LLAMA_N_TENSORS];
    char folder[1024];
    snprintf(folder, sizeof folder, "%s/%s", references, name);
    assert_int_equal(hf_config_read(&c, folder), 0);
    struct model_config p = llama_sizes(&c);
    p.tp = tp;
    p.sequence = sequence;
    p.first_layer = stage;
    p.layers = stages == 1 ? c.layers : 1;
    p.no_embedding = stage > 0;
    p.no_head = stage < stages - 1;
    int32_t n = llama_ops.describe(table, number, &p,
                                   &(struct model_pointers){pointers, pointers, ZERO_F32, /* stores */ true});
    memset(by_number, 0, sizeof by_number);
    for (int32_t i = 0; i < n; i++)
        by_number[number[i]] = table[i];
    return by_number;
}

static void units_follow_the_order_of_use(void **state)
{
    const struct zero_tensor *t = describe_stage("llama", 1, false, 0, 1);
    assert_int_equal(t[LLAMA_EMBED].unit, 0);
    assert_int_equal(t[LLAMA_Q].unit, 1);
    assert_int_equal(t[LLAMA_NORM].unit, 3); /* after two layers */
    assert_int_equal(t[LLAMA_HEAD].unit, 3);
    t = describe_stage("llama", 1, false, 1, 2);
    assert_null(t[LLAMA_EMBED].name);
    assert_int_equal(t[LLAMA_Q].unit, 0);
    assert_int_equal(t[LLAMA_HEAD].unit, 1);
    t = describe_stage("qwen3", 1, false, 0, 1);
    assert_null(t[LLAMA_HEAD].name);
    assert_int_equal(t[LLAMA_NORM].unit, 0); /* with the embedding, which is the head */
}

static void a_tied_embedding_is_on_both_ends(void **state)
{
    const struct zero_tensor *t = describe_stage("qwen2", 1, false, 0, 1);
    assert_int_equal(t[LLAMA_EMBED].flags, ZERO_GRAD_OVERWRITE);
    t = describe_stage("qwen2", 1, false, 0, 2);
    assert_int_equal(t[LLAMA_EMBED].flags, ZERO_TIED); /* adds to the gradient of the head */
    assert_null(t[LLAMA_NORM].name);
    t = describe_stage("qwen2", 1, false, 1, 2);
    assert_int_equal(t[LLAMA_EMBED].flags, ZERO_TIED | ZERO_GRAD_OVERWRITE);
    assert_int_equal(t[LLAMA_NORM].unit, t[LLAMA_EMBED].unit);
    t = describe_stage("mistral", 1, false, 0, 1);
    assert_int_equal(t[LLAMA_EMBED].flags, 0); /* rows of tokens are added */
    assert_int_equal(t[LLAMA_HEAD].flags, ZERO_GRAD_OVERWRITE);
}

static void partial_gradients_are_summed_over_tp(void **state)
{
    const struct zero_tensor *t = describe_stage("qwen3", 2, false, 0, 1);
    assert_true(t[LLAMA_Q_NORM].flags & t[LLAMA_K_NORM].flags & ZERO_TP_PARTIAL); /* of this rank's heads */
    assert_false((t[LLAMA_NORM1].flags | t[LLAMA_NORM2].flags | t[LLAMA_NORM].flags) & ZERO_TP_PARTIAL);
    t = describe_stage("qwen3", 2, true, 0, 1);
    assert_true(t[LLAMA_NORM1].flags & t[LLAMA_NORM2].flags & t[LLAMA_NORM].flags & ZERO_TP_PARTIAL);
    t = describe_stage("qwen3", 1, true, 0, 1);
    for (int i = 0; i < LLAMA_N_TENSORS; i++)
        assert_false(t[i].flags & ZERO_TP_PARTIAL);
}

/* ---- the folder ---- */

static void put(const char *folder, const char *name, const char *text)
{
    char path[200];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    assert_true(fputs(text, f) >= 0);
    assert_int_equal(fclose(f), 0);
}

static void expect(const char *folder, const char *name, const char *text)
{
    char path[200], found[200] = "";
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *f = fopen(path, "rb");
    assert_non_null(f);
    assert_true(fread(found, 1, sizeof found - 1, f) > 0);
    fclose(f);
    assert_string_equal(found, text);
}

static void files_beside_the_weights_are_copied(void **state)
{
    char from[] = "/tmp/llama-from-XXXXXX", to[] = "/tmp/llama-to-XXXXXX", path[200];
    toy_make_folder(from);
    toy_make_folder(to);
    assert_int_equal(hf_folder_copy(from, to, ZERO_F32), ZERO_ERR_IO);
    assert_non_null(strstr(zr_error_text(), from));
    assert_non_null(strstr(zr_error_text(), "config.json"));
    put(from, "config.json", "{\"rms_norm_eps\": 1e-05, \"own\": [1], \"torch_dtype\": \"float32\"}");
    put(from, "tokenizer.json", "{}\n");
    put(from, "README.md", "text");
    put(to, "tokenizer.json", "old");
    assert_int_equal(hf_folder_copy(from, to, ZERO_BF16), 0);
    expect(to, "config.json",
           "{\n  \"rms_norm_eps\": 1e-5,\n  \"own\": [\n    1\n  ],\n  \"torch_dtype\": \"bfloat16\"\n}\n");
    expect(to, "tokenizer.json", "{}\n");
    snprintf(path, sizeof path, "%s/README.md", to);
    assert_int_equal(access(path, F_OK), -1);
    put(from, "config.json", "{\"a\": 0.12345678901234567, \"dtype\": \"float32\"}");
    assert_int_equal(hf_folder_copy(from, from, ZERO_BF16), 0); /* the same folder */
    expect(from, "config.json", "{\n  \"a\": 0.12345678901234566,\n  \"dtype\": \"bfloat16\"\n}\n");
    expect(from, "tokenizer.json", "{}\n");
    put(from, "config.json", "[]");
    assert_int_equal(hf_folder_copy(from, to, ZERO_F32), ZERO_ERR_IO);
    assert_non_null(strstr(zr_error_text(), "config.json: not a JSON object"));
    toy_remove_folder(from);
    toy_remove_folder(to);
}

static void a_folder_that_cannot_be_written_is_named(void **state)
{
    char from[] = "/tmp/llama-from-XXXXXX", to[200];
    toy_make_folder(from);
    put(from, "config.json", "{}");
    snprintf(to, sizeof to, "%s/none", from);
    assert_int_equal(hf_folder_copy(from, to, ZERO_F32), ZERO_ERR_IO);
    assert_non_null(strstr(zr_error_text(), to));
    toy_remove_folder(from);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(weights_go_in_and_out_on_every_mesh),
        cmocka_unit_test(units_follow_the_order_of_use),
        cmocka_unit_test(a_tied_embedding_is_on_both_ends),
        cmocka_unit_test(partial_gradients_are_summed_over_tp),
        cmocka_unit_test(files_beside_the_weights_are_copied),
        cmocka_unit_test(a_folder_that_cannot_be_written_is_named),
    };
    references = argc > 1 ? argv[1] : "references";
    return cmocka_run_group_tests(tests, NULL, toy_remove_folders);
}
