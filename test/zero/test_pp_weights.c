/* SPDX-License-Identifier: Apache-2.0 */
/* test_pp_weights.c: weight files of a model with pipeline stages, one or several per rank. Files equal those
 * of one pipeline stage, byte for byte, and give the same bits on any mesh. A wrong file or map is an error
 * on every rank, and changes nothing. N_MESHES=all: with several pipeline stages per rank, runs each mesh at
 * every ZeRO stage. */
#include "test/cmocka.h"
#include "test/zero/pp_model.h"
#include "test/zero/sample.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { FILE_BYTES = 700 };

static int export_one(struct toy_rank *r, struct model *m, zero_ctx *z, const struct place *at)
{
    const struct setup *s = r->arg;
    struct map map;
    char folder[256];
    for (int step = 0; step < STEPS; step++)
        OR_RETURN(pp_step(m, z, step, at));
    pp_make_map(m, &map, !s->no_head);
    snprintf(folder, sizeof folder, "%s/mapped", s->folder);
    OR_RETURN(zero_export(z, folder, map.list, map.n, FILE_BYTES));
    snprintf(folder, sizeof folder, "%s/own-names", s->folder);
    OR_RETURN(zero_export(z, folder, NULL, 0, 0));
    OR_RETURN(pp_step(m, z, STEPS, at));
    return 0;
}

/* s->async: import with the map */
static int import_one(struct toy_rank *r, struct model *m, zero_ctx *z, const struct place *at)
{
    const struct setup *s = r->arg;
    struct map map;
    char folder[256];
    pp_make_map(m, &map, !s->no_head);
    snprintf(folder, sizeof folder, "%s/%s", s->folder, s->async ? "mapped" : "own-names");
    OR_RETURN(zero_import(z, folder, s->async ? map.list : NULL, map.n));
    OR_RETURN(pp_look(m, z, &pp_found[r->rank][0]));
    OR_RETURN(pp_step(m, z, STEPS, at));
    OR_RETURN(pp_look(m, z, &pp_found[r->rank][1]));
    return 0;
}

/* Files that one pipeline stage wrote, with and without a second name of the tied tensor, and hashes of the
 * weights. */
struct reference {
    char folder[2][40];
    uint64_t want[2];
};

static void export_to(const struct mesh *mesh, bool no_head, char folder[40])
{
    struct setup s = {.mesh = mesh, .folder = folder, .no_head = no_head};
    strcpy(folder, "/tmp/zero-pp-weights-XXXXXX");
    toy_make_folder(folder);
    pp_run(&s, export_one, "exported");
    toy_forget_export_ids(folder);
}

static void open_reference(struct reference *ref)
{
    *ref = (struct reference){0};
    for (int no_head = 0; no_head < 2; no_head++)
        export_to(&pp_meshes[0], no_head, ref->folder[no_head]);
}

static void close_reference(struct reference *ref)
{
    for (int no_head = 0; no_head < 2; no_head++)
        toy_remove_folder(ref->folder[no_head]);
}

static void import_alike(struct reference *ref, const struct setup *s)
{
    pp_run(s, import_one, "imported");
    pp_check_bits(s->mesh, ref->want, "imported");
}

/* number: the mesh's number, which selects options that must not matter */
static void check_mesh(struct reference *ref, const struct mesh *mesh, int number)
{
    bool no_head = mesh->pp == 1 && mesh->v > 1;
    char folder[40], what[TEXT], command[256];
    if (!sample_has())
        return;
    export_to(mesh, no_head, folder);
    snprintf(command, sizeof command, "diff -rq '%s' '%s' >&2", ref->folder[no_head], folder);
    if (system(command))
        fail_msg("%s: other files than of one stage", pp_text(mesh, "exported", what));
    toy_remove_folder(folder);
    for (int mapped = 0; mapped < 2; mapped++) {
        struct setup s = {.mesh = mesh,
                          .folder = ref->folder[no_head],
                          .no_head = no_head,
                          .async = mapped,
                          .check = number % 8 == 4,
                          .later = (number + mapped) % 3 == 1};
        import_alike(ref, &s);
    }
}

static void weights_are_the_whole_models(void **state)
{
    static const struct mesh more[] = {{4, 2, 1, 1}, {2, 1, 2, 0}};
    struct reference ref;
    open_reference(&ref);
    for (int i = 0; i < PP_MESHES; i++)
        check_mesh(&ref, &pp_meshes[i], i);
    for (int i = 0; i < 2; i++)
        check_mesh(&ref, &more[i], i);
    close_reference(&ref);
}

static void so_they_are_with_several_stages_on_a_rank(void **state)
{
    const char *wanted = getenv("N_MESHES");
    bool all = wanted && !strcmp(wanted, "all");
    struct reference ref;
    pp_set_layers(MAX_LAYERS);
    open_reference(&ref);
    int number = 0;
    for (struct mesh m = {.pp = 1}; m.pp <= 4; m.pp++)
        for (m.v = 2; m.v <= MAX_OWN; m.v++)
            for (m.tp = 1; m.tp <= 2; m.tp++)
                for (m.dp = 1; m.dp <= 2; m.dp++, number++)
                    for (m.stage = 0; m.stage < 4; m.stage++)
                        if ((all || m.stage == (number + number / 4) % 4) &&
                            pp_world(&m) <= (all ? MAX_WORLD : 8))
                            check_mesh(&ref, &m, number);
    close_reference(&ref);
    pp_set_layers(LAYERS);
}

/* Calls with wrong maps, on one pipeline stage's ranks or on all. Each rank gets an error, and nothing
 * changes. */
static int exchange_weights_wrongly(struct toy_rank *r, struct model *m, zero_ctx *z, const struct place *at)
{
    const struct setup *s = r->arg;
    struct bits before, after;
    struct zero_action a;
    struct map map, bad;
    char folder[64];
    OR_RETURN(pp_look(m, z, &before));
    pp_make_map(m, &map, true);
    toy_expect(r, zero_export(z, "/proc/nothing", map.list, map.n, 0), ZERO_ERR_IO, "/proc/nothing");
    toy_expect(r, zero_import(z, "/proc/nothing", map.list, map.n), ZERO_ERR_IO, "/proc/nothing");
    bad = map;
    bad.list[0].slice = at->pp ? ZERO_SLICE(LAYERS) : 0;
    toy_expect(r, zero_export(z, s->folder, bad.list, bad.n, 0), ZERO_ERR_ARG,
               at->pp ? "map[0] (scale): slice is ZERO_SLICE(5) of tensor scale; allowed" : "rank 2: ");
    bad = map;
    for (int i = 0; i < bad.n; i++)
        bad.list[i].transposed |= !strcmp(bad.list[i].name, "scale");
    toy_expect(
        r, zero_import(z, s->folder, bad.list, bad.n), ZERO_ERR_ARG,
        "(scale): transposed is set for all layers of tensor scale, but they are on several pipeline stages");
    bad = map;
    bad.list[bad.n - 1].name = at->pp ? "wpe" : map.names[bad.n - 1];
    toy_expect(r, zero_export(z, s->folder, bad.list, bad.n, 0), ZERO_ERR_ARG,
               "two entries of map are named wpe");
    bad = map;
    if (at->pp == 1 && at->dp == 1)
        bad.list[0].name = "another";
    toy_expect(r, zero_export(z, s->folder, bad.list, bad.n, 0), ZERO_ERR_MISMATCH,
               "on rank 2; all ranks of a pipeline stage must give the same");
    toy_expect(r, zero_export(z, s->folder, map.list, at->pp ? -1 : 1, 0), ZERO_ERR_ARG,
               at->pp ? "n is -1; allowed: 0 and more" : "rank 2: ");
    toy_expect(r, zero_export(z, s->folder, map.list, 0, 0), ZERO_ERR_ARG,
               "n is 0 for all pipeline stages; allowed: 1..");
    toy_expect(r, zero_import(z, s->folder, map.list, map.n), ZERO_ERR_IO,
               "model-00001-of-00001.safetensors");
    snprintf(folder, sizeof folder, "%s/one-stage", s->folder);
    OR_RETURN(zero_export(z, folder, map.list, at->pp ? 0 : 1, 0)); /* a map for one pipeline stage only */
    OR_RETURN(zero_import(z, folder, map.list, at->pp ? 0 : 1));
    void *seen = m->param[SEEN];
    if (at->pp == 0 && at->dp == 1)
        m->param[SEEN] = NULL;
    toy_expect(r, zero_import(z, folder, map.list, at->pp ? 0 : 1), ZERO_ERR_ORDER,
               "*param of buffer seen is NULL");
    m->param[SEEN] = seen;
    toy_expect(r, zero_import(z, folder, map.list, map.n), ZERO_ERR_IO, "is not in");
    OR_RETURN(pp_look(m, z, &after));
    if (memcmp(&before, &after, sizeof before) != 0)
        toy_wrong(r, "a call that failed has changed something; ");
    if (at->pp == 0) { /* the other pipeline stage would wait for this one's output */
        OR_RETURN(zero_next(z, &a));
        toy_expect(r, zero_export(z, s->folder, NULL, 0, 0), ZERO_ERR_ORDER,
                   "zero_export: the step has begun");
        toy_expect(r, zero_import(z, s->folder, NULL, 0), ZERO_ERR_ORDER, "zero_import: the step has begun");
        toy_expect(r, zero_sync_buffers(z, ZERO_SYNC_RANK0), ZERO_ERR_ORDER,
                   "zero_sync_buffers: the step has begun");
    }
    return 0;
}

static void maps_of_stages_are_checked(void **state)
{
    static const struct mesh mesh[] = {{2, 2, 1, 3}, {2, 2, 1, 3, 2}, {2, 2, 1, 0, 2}};
    char command[512];
    for (size_t i = 0; i < sizeof mesh / sizeof *mesh; i++) {
        char folder[] = "/tmp/zero-pp-weights-XXXXXX";
        toy_make_folder(folder);
        /* An index with a file that ends early. */
        snprintf(command, sizeof command,
                 "cd %s && printf '{\"weight_map\": {\"wte\": \"model-00001-of-00001.safetensors\"}}' "
                 "> model.safetensors.index.json && printf x > model-00001-of-00001.safetensors",
                 folder);
        assert_int_equal(system(command), 0);
        struct setup s = {.mesh = &mesh[i], .folder = folder};
        pp_run(&s, exchange_weights_wrongly, "maps");
        toy_remove_folder(folder);
    }
}

/* Imports a wrong file, stores the error, and checks that nothing changed. */
static int import_wrong_file(struct toy_rank *r, struct model *m, zero_ctx *z, const struct place *at)
{
    const struct setup *s = r->arg;
    struct bits before, after;
    OR_RETURN(pp_look(m, z, &before));
    int err = zero_import(z, s->folder, NULL, 0);
    toy_note(r, err);
    OR_RETURN(pp_look(m, z, &after));
    if (memcmp(&before, &after, sizeof before) != 0)
        toy_wrong(r, "a refusal has changed something; ");
    OR_RETURN(pp_step(m, z, 0, at));
    return err;
}

/* Makes a folder "indexed" with a copy of the file with the tensors' own names, and an index. */
static void make_index(const char *folder)
{
    char path[128];
    snprintf(path, sizeof path, "%s/indexed", folder);
    assert_int_equal(mkdir(path, 0700), 0);
    snprintf(path, sizeof path,
             "cp %s/own-names/model.safetensors %s/indexed/model-00001-of-00001.safetensors", folder, folder);
    assert_int_equal(system(path), 0);
    snprintf(path, sizeof path, "%s/indexed/model.safetensors.index.json", folder);
    FILE *index = fopen(path, "w");
    assert_non_null(index);
    fprintf(index, "{\"weight_map\": {");
    for (int t = 0; t < TENSORS; t++)
        fprintf(index, "%s\n\"%s\": \"model-00001-of-00001.safetensors\"", t ? "," : "", pp_shapes[t].name);
    fprintf(index, "}}\n");
    assert_int_equal(fclose(index), 0);
}

/* All ranks of any pipeline stages refuse a wrong file with the message that one pipeline stage gives. */
static void wrong_files_are_refused_alike(void **state)
{
    static const struct mesh mesh[] = {{1, 1, 1, 0},    {2, 2, 1, 3},    {2, 2, 1, 1, 2},
                                       {3, 1, 2, 2, 2}, {1, 2, 1, 3, 3}, {2, 1, 1, 0, 3}};
    static const struct {
        /* runs in the folder; $index is the index, $file its only file */
        const char *spoil;
        int code;
        const char *says;
    } wrong[] = {
        {"sed -i 's/\"norm\"/\"worm\"/' $index", ZERO_ERR_IO, "tensor norm is not in it"},
        {"sed -i '1s/\"scale\"/\"stale\"/' $file", ZERO_ERR_IO, "tensor scale is not in this file"},
        {"sed -i '1s/\\(\"wpe\"[^[]*\\)\\[5,6\\]/\\1[6,5]/' $file", ZERO_ERR_ARG,
         "tensor wpe has shape [6, 5]"},
        {"sed -i '1s/\\(\"proj\":{\"dtype\":\"\\)F32/\\1I32/' $file", ZERO_ERR_NOTSUP, "tensor proj is I32"},
        {"sed -i '1s/\\(\"count\":{\"dtype\":\"\\)I32/\\1F32/' $file", ZERO_ERR_NOTSUP,
         "tensor count is F32, but count is a buffer"},
        {"truncate -s -1 $file", ZERO_ERR_IO, "model-00001-of-00001.safetensors"},
        {"rm $file", ZERO_ERR_IO, "model-00001-of-00001.safetensors"},
    };
    char good[40], folder[] = "/tmp/zero-pp-wrong-XXXXXX", command[512], what[TEXT];
    export_to(&pp_meshes[0], false, good);
    make_index(good);
    toy_make_folder(folder);
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        char first[sizeof((struct toy_rank *)0)->text] = "";
        snprintf(command, sizeof command,
                 "cd %s && cp %s/indexed/* . && index=model.safetensors.index.json "
                 "file=model-00001-of-00001.safetensors && %s && ! diff -rq . %s/indexed >/dev/null",
                 folder, good, wrong[i].spoil, good);
        assert_int_equal(system(command), 0);
        for (size_t k = 0; k < sizeof mesh / sizeof *mesh; k++) {
            struct toy_rank r[MAX_WORLD];
            struct setup s = {.mesh = &mesh[k], .folder = folder};
            pp_run_ranks(&s, import_wrong_file, r);
            for (int rank = 0; rank < pp_world(&mesh[k]); rank++) {
                if (r[rank].err != wrong[i].code || !strstr(r[rank].text, wrong[i].says) || r[rank].wrong[0])
                    fail_msg("%s: rank %d: %d \"%s\" %s", pp_text(&mesh[k], "imported wrongly", what), rank,
                             r[rank].err, r[rank].text, r[rank].wrong);
                const char *from = strstr(r[rank].text, folder);
                assert_non_null(from);
                if (!*first)
                    strcpy(first, from);
                assert_string_equal(from, first);
            }
        }
    }
    toy_remove_folder(folder);
    toy_remove_folder(good);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(weights_are_the_whole_models),
        cmocka_unit_test(so_they_are_with_several_stages_on_a_rank),
        cmocka_unit_test(maps_of_stages_are_checked),
        cmocka_unit_test(wrong_files_are_refused_alike),
    };
    return cmocka_run_group_tests(tests, NULL, toy_remove_folders);
}
