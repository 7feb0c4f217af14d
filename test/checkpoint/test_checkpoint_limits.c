/* SPDX-License-Identifier: Apache-2.0 */
/* test_checkpoint_limits.c: tests that whatever is written can be read. Some models have so many or so
 * long names that a limit of the reader is near. Also tests files that a disk changes, and more files than
 * a process may open. */
#include "test/checkpoint/memory_files.h"
#include "test/checkpoint/saved_model.h"
#include "test/cmocka.h"
#include "test/kernels/random.h"
#include "zero/checkpoint/checkpoint_dir.h"
#include "zero/checkpoint/save.h"
#include "zero/checkpoint/shard_file.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

static uint64_t seed;
static char base[] = "/tmp/zero-checkpoint-XXXXXX";

static int remove_one(void *arg, const char *name)
{
    char path[ZR_PATH_BYTES];
    return zr_path_join(path, arg, name) || zr_folder_remove(&zr_files_posix, path, NULL);
}

static void clear(char *path)
{
    assert_int_equal(zr_folder_walk(&zr_files_posix, path, NULL, remove_one, path), 0);
    assert_int_equal(rmdir(path), 0);
}

static int count_name(void *arg, const char *name)
{
    ++*(int *)arg;
    return 0;
}

/* ---- sizes that are known in advance ---- */

static void print_name(char *out, int n)
{
    static const char *const letters[] = {"a",    "Z",    "/",    ".",        "\"",          "\\",
                                          "\b",   "\t",   "\n",   "\v",       "\f",          "\r",
                                          "\x01", "\x1f", "\x7f", "\xc3\xa4", "\xe2\x82\xac"};
    size_t at = 0;
    for (int i = 0; i < n; i++) {
        const char *letter = letters[random_next(&seed) % (sizeof letters / sizeof *letters)];
        memcpy(out + at, letter, strlen(letter));
        at += strlen(letter);
    }
    snprintf(out + at, 24, "%d", n); /* all names differ */
}

static void test_sizes(void **state)
{
    for (int n = 1; n < 60; n++) {
        struct zr_manifest_tensor tensors[60] = {0};
        struct zr_manifest_file files[60] = {0};
        struct zr_st_entry entries[60] = {0};
        int64_t updates[4] = {0, 9, 1000000, INT64_MAX / 2};
        struct zr_manifest m = {
            .world = n, .version = "1.0", .tensors = tensors, .n_tensors = n, .files = files, .n_files = n};
        static char names[60][400];
        int64_t expected = 0, at = 0, n_text, n_head;
        char *text, *head;
        for (int i = 0; i < n; i++) {
            print_name(names[i], i);
            tensors[i] = (struct zr_manifest_tensor){.name = names[i],
                                                     .dtype = "BF16",
                                                     .n_dims = 1 + i % 8,
                                                     .trainable = i % 3,
                                                     .optimizer = "rmsprop",
                                                     .n_states = 1,
                                                     .updates = updates,
                                                     .n_updates = 1 + i % 4};
            entries[i] = (struct zr_st_entry){.name = names[i], .dtype = "BF16", .n_dims = i % 8};
            int64_t bytes = 2;
            for (int d = 0; d < 8; d++) {
                tensors[i].shape[d] = 1 + (int64_t)(random_next(&seed) % 100);
                entries[i].shape[d] = 1 + (int64_t)(random_next(&seed) % 100);
                bytes *= d < entries[i].n_dims ? entries[i].shape[d] : 1;
            }
            struct zr_st_entry reported = entries[i];
            reported.begin = at;
            reported.end = at += bytes;
            expected += zr_st_entry_bytes(&reported);
            files[i].bytes = (int64_t)(random_next(&seed) >> 2);
            for (int k = 0; k < ZR_N_DATA; k++)
                files[i].data[k] = files[i].bytes >> n;
            zr_shard_name(i, n, files[i].name);
        }
        assert_int_equal(zr_manifest_print(&m, &text, &n_text), 0);
        assert_in_range(zr_manifest_bytes(&m) - n_text, 0, 1024 + 24 * 6 * n);
        free(text);
        assert_int_equal(zr_st_head(entries, n, NULL, &head, &n_head), 0);
        while (head[n_head - 1] == ' ')
            n_head--;
        assert_int_equal(n_head, 8 + 2 + expected - 1); /* braces, and no comma after the last entry */
        free(head);
    }
}

static void test_manifest_limit(void **state)
{
    enum { N = ZR_MANIFEST_MAX / (6 << 20) + 1 };
    static struct zr_manifest_tensor tensors[N];
    struct zr_manifest m = {.tensors = tensors, .n_tensors = N};
    char *name = malloc((1 << 20) + 1);
    memset(name, 1, 1 << 20); /* six characters each in JSON */
    name[1 << 20] = 0;
    for (int i = 0; i < N; i++)
        tensors[i] = (struct zr_manifest_tensor){.name = name, .dtype = "F32", .n_dims = 1, .shape = {1}};
    assert_int_equal(zr_manifest_check(&m), ZERO_ERR_ARG);
    assert_non_null(strstr(zr_error_text(), "in a manifest; allowed: 1073741824"));
    m.n_tensors = N - 1;
    assert_int_equal(zr_manifest_check(&m), 0);
    free(name);
}

/* A manifest of more than 64 MiB. It could once be written, and not read. */
static void test_long_manifest(void **state)
{
    enum { N = 68 };
    struct zr_manifest_tensor tensors[N];
    struct zr_manifest_file file = {.name = "shard", .bytes = 8};
    struct zr_manifest found,
        m = {.world = 1, .tensors = tensors, .n_tensors = N, .files = &file, .n_files = 1};
    char *name = calloc((1 << 20) + 1, 1), *text;
    int64_t n;
    memset(name, 'n', 1 << 20);
    for (int i = 0; i < N; i++)
        tensors[i] = (struct zr_manifest_tensor){.name = name, .dtype = "F32", .n_dims = 1, .shape = {1}};
    assert_int_equal(zr_manifest_check(&m), 0);
    assert_int_equal(zr_manifest_print(&m, &text, &n), 0);
    assert_true(n > 64 << 20);
    assert_int_equal(zr_manifest_parse("file", text, n, &found), 0);
    zr_manifest_free(&found);
    free(text);
    free(name);
}

/* ---- a model of long names ---- */

struct long_names {
    int n, chars;
    struct zero_tensor *tensors;
    void **param, **grad;
    float *weights;
    char *text;
};

static struct long_names open_names(int n, int chars)
{
    struct long_names l = {.n = n, .chars = chars};
    l.tensors = calloc((size_t)n, sizeof *l.tensors);
    l.param = calloc((size_t)n, sizeof *l.param);
    l.grad = calloc((size_t)n, sizeof *l.grad);
    l.weights = calloc((size_t)n, sizeof *l.weights);
    l.text = malloc((size_t)n * ((size_t)chars + 1));
    for (int i = 0; i < n; i++) {
        char *name = l.text + (size_t)i * ((size_t)chars + 1);
        memset(name, 'n', (size_t)chars);
        name[snprintf(name, (size_t)chars, "%d", i)] = '.';
        name[chars] = 0;
        l.weights[i] = (float)i;
        l.param[i] = &l.weights[i];
        l.tensors[i] = (struct zero_tensor){
            .name = name, .param = &l.param[i], .grad = &l.grad[i], .shape = {1}, .dtype = ZERO_F32};
    }
    return l;
}

static void close_names(struct long_names *l)
{
    free(l->tensors);
    free(l->param);
    free(l->grad);
    free(l->weights);
    free(l->text);
}

static zero_ctx *wrap(struct long_names *l)
{
    struct zero_config cfg = ZERO_CONFIG_INIT;
    zero_ctx *z;
    cfg.launch.world = 1;
    cfg.checkpoint.save_keep = 1;
    CHECK_OK(zero_wrap(&z, l->tensors, l->n, &cfg));
    return z;
}

/* A header longer than safetensors allows. The error comes before anything is written. */
static void test_long_header(void **state)
{
    char run[sizeof base + 8];
    snprintf(run, sizeof run, "%s/run", base);
    struct long_names l = open_names(34, 1 << 20);
    zero_ctx *z = wrap(&l);
    assert_int_equal(zero_save(z, run, NULL), ZERO_ERR_ARG);
    assert_non_null(strstr(zero_last_error(), "safetensors allows 100000000"));
    assert_int_equal(access(run, F_OK), -1);
    CHECK_OK(zero_unwrap(&z));
    close_names(&l);
}

/* ---- a disk that changes what is written ---- */

static struct zr_files changing;
static const char *_Atomic changes; /* in writes that contain this; NULL: none. Ranks are threads */
static int64_t (*write_really)(void *arg, int fd, const void *buf, size_t n, int64_t at);

static int64_t write_changed(void *arg, int fd, const void *buf, size_t n, int64_t at)
{
    const char *mark = changes, *found = mark ? memmem(buf, n, mark, strlen(mark)) : NULL;
    if (!found)
        return write_really(arg, fd, buf, n, at);
    char *copy = malloc(n);
    memcpy(copy, buf, n);
    copy[found - (const char *)buf + 20] ^= 4;
    int64_t put = write_really(arg, fd, copy, n, at);
    free(copy);
    return put;
}

static void save_changed(struct model_rank *m, void *arg)
{
    static const char *const marks[] = {"{\"embedding", "ZRBLOCK1", "{\"format\""};
    CHECK_OK(model_steps(m, 1));
    uint64_t hash = model_hash(m);
    CHECK_OK(zero_save(m->z, "run", NULL));
    CHECK_OK(zero_save_wait(m->z, NULL));
    for (int i = 0; i < 3; i++) {
        CHECK_OK(model_steps(m, 1));
        CHECK_OK(zr_engine_barrier(m->z->engine));
        changes = marks[i];
        int err = zero_save(m->z, "run", NULL);
        CHECK_THAT((err ? err : zero_save_wait(m->z, NULL)) == ZERO_ERR_IO);
        CHECK_THAT(strstr(zero_last_error(), "read back") || strstr(zero_last_error(), ".blocks"));
        CHECK_OK(zr_engine_barrier(m->z->engine));
        changes = NULL;
        CHECK_OK(zero_load(m->z, "run")); /* the older one was kept, and is the latest */
        CHECK_THAT(model_hash(m) == hash && model_t(m) == 1);
        m->step = 1;
    }
    CHECK_OK(zero_save(m->z, "run", NULL));
    CHECK_OK(zero_save_wait(m->z, NULL));
}

static void test_changed(void **state)
{
    for (int way = 0; way < 4; way++) {
        struct memory_files *files = memory_files_open();
        int n = 0;
        changing = *memory_files_table(files);
        write_really = changing.pwrite;
        changing.pwrite = write_changed;
        struct model_options o = {
            .stage = 2, .world = way / 2 ? 2 : 1, .async = way % 2, .keep = 1, .files = &changing};
        model_run(&o, save_changed, NULL);
        assert_int_equal(zr_folder_walk(&changing, "run", NULL, count_name, &n), 0);
        assert_int_equal(n, 1); /* failed saves left nothing */
        memory_files_close(files);
    }
}

/* ---- more files than a process may open ---- */

#define N_SHARDS 200

/* Reads the single file of a checkpoint and writes it again as N_SHARDS files. */
static void split(struct model_rank *m, const char *from, const char *to)
{
    const struct zr_files *fs = &zr_files_posix;
    const struct zr_layout *layout = m->z->layout;
    const _Atomic bool never = false;
    struct zr_manifest manifest;
    struct zr_shard whole;
    bool broken;
    CHECK_OK(zr_checkpoint_open(fs, from, &broken, &manifest));
    CHECK_OK(zr_shard_open(fs, from, &manifest.files[0], &whole));
    CHECK_OK(zr_folder_make(fs, to, NULL));
    char *data = malloc((size_t)whole.bytes);
    CHECK_OK(zr_shard_fetch(&whole, &(struct zr_request){0, whole.bytes, data}, 1));
    manifest.files = realloc(manifest.files, N_SHARDS * sizeof *manifest.files);
    manifest.world = manifest.n_files = N_SHARDS;
    for (int r = 0; r < N_SHARDS; r++) {
        struct zr_extent list[64];
        struct zr_extents x = {.list = list};
        struct zr_manifest_file *f = &manifest.files[r];
        char path[ZR_PATH_BYTES];
        bool missing;
        int64_t n;
        int fd;
        for (int t = 0; t < layout->n_tensors; t++)
            for (int64_t i = 0; i < whole.st.n_entries; i++) {
                const struct zr_st_entry *e = &whole.st.entries[i];
                size_t chars = strlen(layout->tensors[t].name);
                int kind;
                if (strncmp(e->name, layout->tensors[t].name, chars) != 0 || e->name[chars] != '/')
                    continue;
                CHECK_THAT(zr_kind_parse(e->name + chars + 1, strcspn(e->name + chars + 1, "/"), &kind));
                int64_t lo = e->shape[0] * r / N_SHARDS, hi = e->shape[0] * (r + 1) / N_SHARDS;
                int64_t size = zr_st_dtype_bytes(e->dtype);
                CHECK_THAT(x.n < 64);
                list[x.n++] = (struct zr_extent){.tensor = t,
                                                 .kind = kind,
                                                 .first = lo,
                                                 .n = hi - lo,
                                                 .size = size,
                                                 .at = data + e->begin + lo * size};
            }
        *f = (struct zr_manifest_file){0};
        zr_shard_name(r, N_SHARDS, f->name);
        CHECK_OK(zr_shard_write(fs, to, f->name, layout->tensors, &x, NULL, &never));
        CHECK_OK(zr_path_join(path, to, f->name));
        CHECK_OK(zr_file_find(fs, path, &missing, &fd));
        CHECK_OK(zr_file_size(fs, fd, path, &f->bytes));
        CHECK_OK(zr_file_close(fs, fd, path));
        char *table, beside[ZR_PATH_BYTES + 8];
        snprintf(beside, sizeof beside, "%s%s", path, ZR_BLOCKS_SUFFIX);
        CHECK_OK(zr_file_load(fs, beside, INT32_MAX, &missing, &table, &n));
        f->blocks = zr_checksum_of(table, n);
        free(table);
    }
    CHECK_OK(zr_checkpoint_seal(fs, to, &manifest));
    zr_shard_close(&whole);
    zr_manifest_free(&manifest);
    free(data);
}

static int n_open(void)
{
    DIR *d = opendir("/proc/self/fd");
    int n = 0;
    while (d && readdir(d))
        n++;
    if (d)
        closedir(d);
    return n;
}

static void load_many(struct model_rank *m, void *arg)
{
    char one[ZR_PATH_BYTES], run[sizeof base + 8], many[sizeof base + 8];
    struct rlimit usual, few;
    snprintf(run, sizeof run, "%s/run", base);
    snprintf(many, sizeof many, "%s/many", base);
    snprintf(one, sizeof one, "%s/save-00000001-step-00000002", run);
    CHECK_OK(model_steps(m, 2));
    uint64_t hash = model_hash(m);
    CHECK_OK(zero_save(m->z, run, NULL));
    split(m, one, many);
    CHECK_OK(model_steps(m, 1));
    CHECK_THAT(!getrlimit(RLIMIT_NOFILE, &usual));
    few = usual;
    few.rlim_cur = (rlim_t)n_open() + 100;
    CHECK_THAT(!setrlimit(RLIMIT_NOFILE, &few));
    int err = zero_load(m->z, many);
    CHECK_THAT(!setrlimit(RLIMIT_NOFILE, &usual));
    CHECK_OK(err);
    CHECK_THAT(model_hash(m) == hash && model_t(m) == 2);
    CHECK_OK(zr_folder_remove(&zr_files_posix, many, NULL));
}

static void test_many_shards(void **state)
{
    char run[sizeof base + 8];
    model_run(&(struct model_options){.stage = 3, .world = 1}, load_many, NULL);
    snprintf(run, sizeof run, "%s/run", base);
    clear(run);
}

int main(void)
{
    const char *given = getenv("SEED");
    seed = given ? strtoull(given, NULL, 0) : (uint64_t)time(NULL);
    printf("SEED=%llu\n", (unsigned long long)seed);
    if (!mkdtemp(base))
        return 1;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sizes),         cmocka_unit_test(test_manifest_limit),
        cmocka_unit_test(test_long_manifest), cmocka_unit_test(test_long_header),
        cmocka_unit_test(test_changed),       cmocka_unit_test(test_many_shards),
    };
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    return rmdir(base) || failed;
}
