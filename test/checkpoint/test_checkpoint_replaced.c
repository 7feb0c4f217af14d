/* SPDX-License-Identifier: Apache-2.0 */
/* test_checkpoint_replaced.c: tests an export that replaces an earlier one. At every file call in turn,
 * rank 0 is killed, the power fails, or the call fails. A reader that looks for model.safetensors first
 * and then for the index finds the old export or the new one, complete, and zero_import reads it. Files of
 * other programs are refused by name.
 *
 * N_SUBSETS is the number of subsets of unsynced changes for each power failure. */
#include "test/checkpoint/memory_files.h"
#include "test/checkpoint/saved_model.h"
#include "test/cmocka.h"
#include "test/zero/pp_model.h"
#include "zero/checkpoint/safetensors.h"

#include <jansson.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_FILES = 32, MAX_CALLS = 1000 };
static int n_subsets = 8;

/* ---- a reader that shares no code with zero_import ---- */

static uint64_t mix(uint64_t h, const void *data, int64_t n)
{
    const unsigned char *p = data;
    for (int64_t i = 0; i < n; i++)
        h = (h ^ p[i]) * UINT64_C(0x100000001b3);
    return h;
}

/* Adds up hashes of the file's tensors, so their order does not matter. Returns false if there is no such
 * file. */
static bool hash_file(struct memory_files *m, const char *name, uint64_t *sum)
{
    char path[ZR_PATH_BYTES];
    int64_t *n, n_head = 0;
    struct zr_st st;
    snprintf(path, sizeof path, "run/%s", name);
    const unsigned char *data = memory_files_content(m, path, &n);
    if (!data)
        return false;
    assert_true(*n > 8);
    for (int i = 0; i < 8; i++)
        n_head |= (int64_t)data[i] << 8 * i;
    assert_true(n_head > 0 && n_head <= *n - 8);
    assert_int_equal(zr_st_parse(path, (const char *)data + 8, n_head, *n, &st), 0);
    for (int64_t i = 0; i < st.n_entries; i++) {
        const struct zr_st_entry *e = &st.entries[i];
        uint64_t h = mix(UINT64_C(0xcbf29ce484222325), e->name, (int64_t)strlen(e->name));
        *sum += mix(h, data + e->begin, e->end - e->begin);
    }
    zr_st_free(&st);
    return true;
}

/* Returns a hash of what the folder holds for a loader in Hugging Face's order; 0: nothing. */
static uint64_t hash_export(struct memory_files *m)
{
    uint64_t sum = 0;
    int64_t *n;
    const char *key, *done[MAX_FILES];
    int n_done = 0;
    json_t *value;
    if (hash_file(m, "model.safetensors", &sum))
        return sum;
    const unsigned char *text = memory_files_content(m, "run/model.safetensors.index.json", &n);
    if (!text)
        return 0;
    json_t *index = json_loadb((const char *)text, (size_t)*n, 0, NULL);
    assert_non_null(index);
    json_object_foreach(json_object_get(index, "weight_map"), key, value)
    {
        bool known = false;
        for (int i = 0; i < n_done; i++)
            known |= !strcmp(done[i], json_string_value(value));
        if (known)
            continue;
        assert_true(n_done < MAX_FILES);
        done[n_done++] = json_string_value(value);
        if (!hash_file(m, json_string_value(value), &sum))
            fail_msg("the index names %s, which is not there", json_string_value(value));
    }
    json_decref(index);
    return sum;
}

static int count(void *arg, const char *name)
{
    int *n = arg;
    *n += *name != '.' || strcmp(name, ".lock") != 0;
    return 0;
}

static int count_files(struct memory_files *m)
{
    int n = 0;
    assert_int_equal(zr_folder_walk(memory_files_table(m), "run", NULL, count, &n), 0);
    return n;
}

/* ---- exports over exports, on the ranks of a mesh ---- */

enum fault { KILLED, FAILED, N_FAULTS };

struct world {
    const struct mesh *mesh;
    pthread_barrier_t barrier;
    /* Bytes per file of the old export and of the new one. 0: a single file. -1: there is no old one. */
    int64_t old_bytes, new_bytes;
    /* Disks with the old export, with the new one only, and at each call that met a fault. */
    struct memory_files *before, *after, *at[N_FAULTS][MAX_CALLS];
    int n_at[N_FAULTS], code[MAX_WORLD];
    bool done;
};

static void meet(struct world *w)
{
    pthread_barrier_wait(&w->barrier);
}

struct one_rank {
    struct toy_rank *r;
    struct model *m;
    struct place at;
    zero_ctx *z;
    struct map map;
};

static void open_rank(struct toy_rank *r, const struct mesh *mesh, struct one_rank *o)
{
    const struct setup s = {.mesh = mesh};
    struct toy_rank with = *r;
    with.arg = (void *)(uintptr_t)&s;
    *o = (struct one_rank){.r = r};
    CHECK_OK(pp_wrap(&with, &o->m, &o->at, &o->z));
    pp_make_map(o->m, &o->map, true);
}

static void close_rank(struct one_rank *o)
{
    CHECK_OK(zero_unwrap(&o->z));
    pp_free(o->m);
}

static int export_to(struct one_rank *o, struct memory_files *m, int64_t file_bytes)
{
    o->z->files = memory_files_table(m);
    return zero_export(o->z, "run", o->map.list, o->map.n, file_bytes);
}

/* Exports over a copy of the disk, with a fault at call k. */
static void meet_fault(struct world *w, struct one_rank *o, enum fault fault, int k)
{
    int rank = o->r->rank;
    if (rank == 0) {
        CHECK_THAT(k < MAX_CALLS);
        w->at[fault][k] = memory_files_crash(w->before, 1); /* all of it */
        memory_files_fault(w->at[fault][k], fault == KILLED ? FAULT_DEAD : FAULT_EIO, k + 1, false);
        w->n_at[fault] = k + 1;
    }
    meet(w);
    struct memory_files *disk = w->at[fault][k];
    w->code[rank] = export_to(o, disk, w->new_bytes);
    CHECK_THAT(!w->code[rank] || (w->code[rank] == ZERO_ERR_IO && strstr(zero_last_error(), "zero_export")) ||
               (w->code[rank] == ZERO_ERR_ARG && strstr(zero_last_error(), "did not write")));
    meet(w);
    for (int i = 0; i < pp_world(w->mesh); i++)
        CHECK_THAT(w->code[i] == w->code[rank]);
    if (rank == 0) {
        w->done = memory_files_calls(disk) <= k;
        CHECK_THAT(!w->done || !w->code[0]);
        CHECK_THAT(memory_files_n_open(disk) == 0);
        memory_files_fault(disk, FAULT_NONE, 0, false);
    }
    meet(w);
}

static void export_over(struct toy_rank *r)
{
    struct world *w = r->arg;
    struct one_rank o;
    open_rank(r, w->mesh, &o);
    const struct zr_files *own = o.z->files;
    if (w->old_bytes >= 0)
        CHECK_OK(export_to(&o, w->before, w->old_bytes));
    for (int step = 0; step < STEPS; step++)
        CHECK_OK(pp_step(o.m, o.z, step, &o.at));
    CHECK_OK(export_to(&o, w->after, w->new_bytes));
    for (enum fault fault = 0; fault < N_FAULTS; fault++) {
        meet(w);
        if (r->rank == 0)
            w->done = false;
        meet(w);
        for (int k = 0; !w->done; k++)
            meet_fault(w, &o, fault, k);
    }
    o.z->files = own;
    close_rank(&o);
}

/* One rank reads what was found after a failure, and exports over it. */
struct found {
    struct memory_files *disk;
    uint64_t bits;
    /* of the next export; -1: there is none */
    int64_t file_bytes;
    bool empty;
};

static const struct mesh alone = {1, 1, 1, 0};

static void import_and_export(struct toy_rank *r)
{
    struct found *f = r->arg;
    struct one_rank o;
    struct bits bits;
    open_rank(r, &alone, &o);
    const struct zr_files *own = o.z->files;
    o.z->files = memory_files_table(f->disk);
    if (!f->empty) {
        CHECK_OK(zero_import(o.z, "run", o.map.list, o.map.n));
        CHECK_OK(pp_look(o.m, o.z, &bits));
        f->bits = bits.all;
    }
    if (f->file_bytes >= 0)
        CHECK_OK(export_to(&o, f->disk, f->file_bytes));
    o.z->files = own;
    close_rank(&o);
}

static uint64_t bits_of(struct memory_files *disk, int64_t file_bytes, bool empty)
{
    struct toy_rank r[1];
    struct found f = {.disk = disk, .file_bytes = file_bytes, .empty = empty};
    toy_run(1, import_and_export, &f, r, "imported");
    return f.bits;
}

struct tally {
    int n_old, n_new;
};

static void check_found(const struct world *w, struct memory_files *disk, bool thoroughly, struct tally *t)
{
    static const int64_t next[] = {0, 700};
    uint64_t found = hash_export(disk), old_hash = hash_export(w->before), new_hash = hash_export(w->after);
    bool is_new = found == new_hash;
    if (!is_new && found != old_hash)
        fail_msg("neither the old export nor the new one is there");
    t->n_new += is_new;
    t->n_old += !is_new;
    if (!thoroughly)
        return;
    uint64_t bits = bits_of(disk, next[t->n_old % 2], !found);
    if (found)
        assert_true(bits == bits_of(is_new ? w->after : w->before, -1, false));
    /* Leftovers are gone: there are as many files as after an export into an empty folder. */
    struct memory_files *fresh = memory_files_open();
    (void)bits_of(fresh, next[t->n_old % 2], true);
    assert_int_equal(count_files(disk), count_files(fresh));
    memory_files_close(fresh);
}

static void replace(const struct mesh *mesh, int64_t old_bytes, int64_t new_bytes)
{
    struct toy_rank r[MAX_WORLD];
    struct world *w = calloc(1, sizeof *w);
    struct tally t = {0};
    char what[TEXT];
    assert_non_null(w);
    *w = (struct world){.mesh = mesh, .old_bytes = old_bytes, .new_bytes = new_bytes};
    w->before = memory_files_open();
    w->after = memory_files_open();
    assert_int_equal(pthread_barrier_init(&w->barrier, NULL, (unsigned)pp_world(mesh)), 0);
    toy_run(pp_world(mesh), export_over, w, r, pp_text(mesh, "exported", what));
    pthread_barrier_destroy(&w->barrier);
    assert_true(hash_export(w->after) != hash_export(w->before));
    for (enum fault fault = 0; fault < N_FAULTS; fault++)
        for (int k = 0; k < w->n_at[fault]; k++) {
            struct memory_files *disk = w->at[fault][k];
            for (int i = 0; fault == KILLED && i < n_subsets; i++) {
                struct memory_files *lost = memory_files_crash(disk, (uint64_t)(k * 1000 + i));
                check_found(w, lost, i == 2 && k % 10 == 0, &t);
                memory_files_close(lost);
            }
            check_found(w, disk, k % 10 == 5, &t);
            memory_files_close(disk);
        }
    printf("%s, files of %lld over files of %lld bytes: %d calls, %d times the old export, %d the new one\n",
           pp_text(mesh, "exported", what), (long long)new_bytes, (long long)old_bytes, w->n_at[KILLED] - 1,
           t.n_old, t.n_new);
    assert_true(t.n_old > 10 && t.n_new > 2);
    memory_files_close(w->before);
    memory_files_close(w->after);
    free(w);
}

static void old_or_new_is_there_whole(void **state)
{
    static const struct mesh meshes[] = {{1, 1, 1, 0}, {2, 1, 2, 1, 2}};
    static const int64_t bytes[][2] = {{-1, 0}, {-1, 1200}, {0, 0}, {1200, 0}, {0, 1200}, {1200, 700}};
    for (size_t i = 0; i < sizeof meshes / sizeof *meshes; i++)
        for (size_t k = 0; k < sizeof bytes / sizeof *bytes; k++)
            replace(&meshes[i], bytes[k][0], bytes[k][1]);
}

/* ---- files of two exports ---- */

struct two {
    struct memory_files *disk;
    bool without_ids;
};

/* Finds the first file in the folder whose name begins like a shard's. */
static int first_shard(void *arg, const char *name)
{
    char *first = arg;
    bool is = !strncmp(name, "model-", 6);
    if (is && (!*first || strcmp(name + 22, first + 22) < 0)) /* after the id */
        snprintf(first, 64, "%s", name);
    return 0;
}

static void forget_ids(struct memory_files *m, const char *path)
{
    static const char key[] = ZR_EXPORT_KEY;
    int64_t *n;
    unsigned char *p = memory_files_content(m, path, &n);
    bool found = false;
    assert_non_null(p);
    for (int64_t i = 0; !found && i + (int64_t)sizeof key < *n; i++)
        if (!memcmp(p + i, key, sizeof key - 1)) {
            p[i] = 'L';
            found = true;
        }
    assert_true(found);
}

static void import_mixed(struct toy_rank *r)
{
    const struct two *two = r->arg;
    struct one_rank o;
    open_rank(r, &alone, &o);
    const struct zr_files *own = o.z->files;
    o.z->files = memory_files_table(two->disk);
    int err = zero_import(o.z, "run", o.map.list, o.map.n);
    if (two->without_ids)
        CHECK_OK(err);
    else
        CHECK_THAT(err == ZERO_ERR_IO && strstr(zero_last_error(), "the folder mixes files of two exports") &&
                   strstr(zero_last_error(), "run/model-"));
    o.z->files = own;
    close_rank(&o);
}

static void files_of_two_exports_are_refused(void **state)
{
    struct memory_files *a = memory_files_open(), *b = memory_files_open();
    char first[2][64] = {"", ""}, path[2][80];
    int64_t *n;
    struct toy_rank r[1];
    (void)bits_of(a, 1200, true);
    (void)bits_of(b, 1200, true);
    assert_int_equal(zr_folder_walk(memory_files_table(a), "run", NULL, first_shard, first[0]), 0);
    assert_int_equal(zr_folder_walk(memory_files_table(b), "run", NULL, first_shard, first[1]), 0);
    assert_true(strcmp(first[0], first[1]) != 0);
    snprintf(path[0], sizeof path[0], "run/%s", first[0]);
    snprintf(path[1], sizeof path[1], "run/%s", first[1]);
    const unsigned char *other = memory_files_content(b, path[1], &n);
    assert_non_null(other);
    memory_files_put(a, path[0], other, *n);
    struct two two = {.disk = a};
    toy_run(1, import_mixed, &two, r, "imported mixed files");
    forget_ids(a, path[0]);
    two.without_ids = true;
    toy_run(1, import_mixed, &two, r, "imported a file without an id");
    memory_files_close(a);
    memory_files_close(b);
}

/* ---- other files, on a disk ---- */

struct foreign {
    const char *folder, *name;
};

static void export_beside(struct toy_rank *r)
{
    const struct foreign *f = r->arg;
    struct one_rank o;
    open_rank(r, &alone, &o);
    int err = zero_export(o.z, f->folder, o.map.list, o.map.n, 0);
    if (f->name)
        CHECK_THAT(err == ZERO_ERR_ARG && strstr(zero_last_error(), f->name) &&
                   strstr(zero_last_error(), f->folder));
    else
        CHECK_OK(err);
    close_rank(&o);
}

static void try_beside(const char *folder, const char *name)
{
    struct foreign f = {folder, name};
    struct toy_rank r[1];
    toy_run(1, export_beside, &f, r, name ? name : "beside other files");
}

static void run_in(const char *folder, const char *what)
{
    char command[400];
    snprintf(command, sizeof command, "cd '%s' && %s", folder, what);
    assert_int_equal(system(command), 0);
}

static void weights_of_others_are_refused(void **state)
{
    static const char *const names[] = {"model-00001-of-00002.safetensors",
                                        "model.safetensors.index.json",
                                        "adapter_model.safetensors",
                                        "adapter_model.bin",
                                        "pytorch_model.bin",
                                        "pytorch_model-00001-of-00002.bin",
                                        "pytorch_model.bin.index.json",
                                        "diffusion_pytorch_model.fp16.bin",
                                        "tf_model.h5",
                                        "tf_model.h5.index.json",
                                        "flax_model.msgpack",
                                        "flax_model-00001-of-00002.msgpack",
                                        "model.ckpt.index",
                                        "model-q4_0.gguf",
                                        "ggml-model-f16.bin",
                                        "consolidated.00.pth",
                                        "rust_model.ot",
                                        "model.safetensors"};
    char folder[] = "/tmp/zero-foreign-XXXXXX", command[200];
    toy_make_folder(folder);
    run_in(folder, "echo '{}' > config.json && mkdir save-1 && echo x > notes.bin && "
                   "touch tokenizer.model tokenizer_config.json training_args.bin optimizer.pt");
    try_beside(folder, NULL);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        snprintf(command, sizeof command, "cp model.safetensors kept && echo '{\"weight_map\": {}}' > %s",
                 names[i]);
        run_in(folder, command);
        try_beside(folder, names[i]);
        snprintf(command, sizeof command,
                 "test \"$(cat %s)\" = '{\"weight_map\": {}}' && rm %s && "
                 "mv kept model.safetensors",
                 names[i], names[i]);
        run_in(folder, command);
    }
    /* Copies of its files under other names belong to the user. */
    run_in(folder, "cp model.safetensors best.safetensors");
    try_beside(folder, "best.safetensors");
    run_in(folder, "rm best.safetensors");
    /* Unfinished files of killed exports are removed, and no others. */
    run_in(folder, "echo x > .libzero_export-0123456789abcdef-00003 && echo x > .libzero_export-mine");
    try_beside(folder, NULL);
    run_in(folder, "test \"$(echo $(ls -A))\" = '.libzero_export-mine config.json model.safetensors "
                   "notes.bin optimizer.pt save-1 "
                   "tokenizer.model tokenizer_config.json training_args.bin'");
    toy_remove_folder(folder);
}

/* A folder of Hugging Face's cache: its files are links to blobs that other folders share. */
static void a_linked_blob_stays(void **state)
{
    char folder[] = "/tmp/zero-blobs-XXXXXX", inner[64];
    toy_make_folder(folder);
    run_in(folder, "mkdir blobs snapshot && echo weights > blobs/0a1b && "
                   "ln -s ../blobs/0a1b snapshot/model.safetensors");
    snprintf(inner, sizeof inner, "%s/snapshot", folder);
    try_beside(inner, "model.safetensors");
    run_in(folder, "test \"$(cat blobs/0a1b)\" = weights && test -L snapshot/model.safetensors");
    /* A link to the folder itself is followed. */
    run_in(folder, "mkdir real && ln -s real linked");
    snprintf(inner, sizeof inner, "%s/linked", folder);
    try_beside(inner, NULL);
    run_in(folder, "test -f real/model.safetensors && test -L linked");
    toy_remove_folder(folder);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(old_or_new_is_there_whole),
        cmocka_unit_test(files_of_two_exports_are_refused),
        cmocka_unit_test(weights_of_others_are_refused),
        cmocka_unit_test(a_linked_blob_stays),
    };
    const char *n = getenv("N_SUBSETS");
    n_subsets = n ? atoi(n) : n_subsets;
    return cmocka_run_group_tests(tests, NULL, toy_remove_folders);
}
