/* SPDX-License-Identifier: Apache-2.0 */
/* test_checkpoint_damage.c: tests that files which are cut, flipped, swapped or from another model are
 * refused. The error names the file, and nothing changes. */
#include "test/checkpoint/memory_files.h"
#include "test/checkpoint/saved_model.h"
#include "test/cmocka.h"
#include "test/kernels/random.h"
#include "zero/checkpoint/manifest.h"
#include "zero/checkpoint/safetensors.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define FIRST  "run/save-00000001-step-00000001"
#define SECOND "run/save-00000002-step-00000002"
#define SHARD1 "/shard-00001-of-00002.safetensors"
#define SHARD2 "/shard-00002-of-00002.safetensors"

enum { N_HEAD_BITS = 84000 }; /* approximately; of manifest, tables and headers together */

static struct memory_files *disk;
static uint64_t hashes[3];
static int64_t n_flips = 20000; /* of data; N_FLIPS in the environment: 100,000 take a minute or two */
static int64_t head_stride = 1; /* every bit outside of data, unless N_FLIPS asks for fewer */
static uint64_t seed;

static void save_two(struct model_rank *m, void *arg)
{
    for (int i = 1; i <= 2; i++) {
        CHECK_OK(model_steps(m, 1));
        CHECK_OK(zero_save(m->z, "run", NULL));
        uint64_t h = model_hash(m);
        if (m->rank == 0)
            hashes[i] = h;
    }
}

static int open_disk(void **state)
{
    disk = memory_files_open();
    model_run(&(struct model_options){.stage = 2, .world = 2, .files = memory_files_table(disk)}, save_two,
              NULL);
    return 0;
}

static int close_disk(void **state)
{
    memory_files_close(disk);
    return 0;
}

static char lines[8192]; /* log lines */

static void keep_line(void *arg, const char *line)
{
    size_t n = strlen(lines);
    snprintf(lines + n, sizeof lines - n, "%s\n", line);
}

static void with_one(void (*fn)(struct model_rank *m, void *arg), void *arg)
{
    struct model_options o = {
        .stage = 3, .world = 1, .scrambled = true, .log = keep_line, .files = memory_files_table(disk)};
    model_run(&o, fn, arg);
}

/* ---- flips ---- */

struct flipping {
    uint64_t before; /* hash of the context's state */
    int64_t n;
};

static void flip_and_load(struct model_rank *m, struct flipping *f, unsigned char *at, int bit,
                          const char *where)
{
    *at ^= (unsigned char)(1 << bit);
    int err = zero_load(m->z, SECOND);
    *at ^= (unsigned char)(1 << bit);
    if (err != ZERO_ERR_IO || !strstr(zero_last_error(), where)) {
        fprintf(stderr, "bit %d at %p: %d: %s\n", bit, (void *)at, err, zero_last_error());
        abort();
    }
    f->n++;
}

static void unchanged(struct model_rank *m, const struct flipping *f)
{
    CHECK_THAT(model_hash(m) == f->before && model_t(m) == 0);
}

static void flip_bits(struct model_rank *m, struct flipping *f, const char *path, int64_t from, int64_t to)
{
    int64_t *n;
    unsigned char *p = memory_files_content(disk, path, &n);
    CHECK_THAT(p && from < *n);
    int64_t n_bits = ((to < *n ? to : *n) - from) * 8;
    for (int64_t i = (int64_t)(random_next(&seed) % (uint64_t)head_stride); i < n_bits; i += head_stride)
        flip_and_load(m, f, p + from + i / 8, (int)(i % 8), strrchr(path, '/'));
    unchanged(m, f);
}

static int64_t header_end(const char *path)
{
    int64_t *n, end = 0;
    const unsigned char *p = memory_files_content(disk, path, &n);
    for (int i = 0; i < 8; i++)
        end |= (int64_t)p[i] << 8 * i;
    return end + 8;
}

static void flip_heads(struct model_rank *m, void *arg)
{
    struct flipping f = {.before = model_hash(m)};
    flip_bits(m, &f, SECOND "/manifest.json", 0, INT64_MAX);
    flip_bits(m, &f, SECOND SHARD1 ".blocks", 0, INT64_MAX);
    flip_bits(m, &f, SECOND SHARD2 ".blocks", 0, INT64_MAX);
    flip_bits(m, &f, SECOND SHARD1, 0, header_end(SECOND SHARD1));
    flip_bits(m, &f, SECOND SHARD2, 0, header_end(SECOND SHARD2));
    int64_t *n;
    flip_and_load(m, &f, memory_files_content(disk, SECOND SHARD2, &n) + 20, 0,
                  " (the header among them) are damaged");
    printf("%lld flips of manifest, tables and headers refused\n", (long long)f.n);
    CHECK_OK(zero_load(m->z, SECOND)); /* only the flips were at fault */
    CHECK_THAT(model_hash(m) == hashes[2]);
}

static void flip_data(struct model_rank *m, void *arg)
{
    struct flipping f = {.before = model_hash(m)};
    const char *paths[] = {SECOND SHARD1, SECOND SHARD2};
    for (int64_t i = 0; i < n_flips; i++) {
        int64_t *n, from = header_end(paths[i % 2]);
        unsigned char *p = memory_files_content(disk, paths[i % 2], &n);
        flip_and_load(m, &f, p + from + random_next(&seed) % (uint64_t)(*n - from),
                      (int)(random_next(&seed) % 8), strrchr(paths[i % 2], '/'));
    }
    unchanged(m, &f);
    printf("%lld flips of data refused\n", (long long)f.n);
    CHECK_OK(zero_load(m->z, SECOND));
    CHECK_THAT(model_hash(m) == hashes[2]);
}

static void test_flipped_heads(void **state)
{
    with_one(flip_heads, NULL);
}

static void test_flipped_data(void **state)
{
    with_one(flip_data, NULL);
}

/* ---- cuts ---- */

static void cut(struct model_rank *m, void *arg)
{
    const char *paths[] = {SECOND "/manifest.json", SECOND SHARD1, SECOND SHARD2, SECOND SHARD1 ".blocks"};
    uint64_t before = model_hash(m);
    for (int i = 0; i < 4; i++) {
        int64_t *n;
        CHECK_THAT(memory_files_content(disk, paths[i], &n) != NULL);
        int64_t whole = *n;
        for (int64_t at = whole; at-- > 0; at -= at > 600 && at < whole - 600 ? 97 : 0) {
            *n = at < 0 ? 0 : at;
            CHECK_THAT(zero_load(m->z, SECOND) == ZERO_ERR_IO &&
                       strstr(zero_last_error(), strrchr(paths[i], '/')));
        }
        *n = whole;
        CHECK_THAT(model_hash(m) == before);
        /* As the latest checkpoint it is skipped, with a log line that names it. */
        *n = whole / 2;
        *lines = 0;
        CHECK_OK(zero_load(m->z, "run"));
        CHECK_THAT(model_hash(m) == hashes[1] && model_t(m) == 1);
        CHECK_THAT(strstr(lines, strrchr(paths[i], '/')) && strstr(lines, "skipped"));
        *n = whole;
        CHECK_OK(zero_load(m->z, "run"));
        CHECK_THAT(model_hash(m) == hashes[2] && model_t(m) == 2);
        before = hashes[2];
    }
}

static void test_cut(void **state)
{
    with_one(cut, NULL);
}

/* ---- files from elsewhere ---- */

struct kept {
    unsigned char *p;
    int64_t n;
};

static struct kept keep_file(const char *path)
{
    int64_t *n;
    const unsigned char *p = memory_files_content(disk, path, &n);
    struct kept k = {malloc((size_t)*n), *n};
    memcpy(k.p, p, (size_t)*n);
    return k;
}

static void refused(struct model_rank *m, const char *path, int code, const char *a, const char *b)
{
    uint64_t before = model_hash(m);
    int64_t t = model_t(m);
    int err = zero_load(m->z, path);
    if (err != code || !strstr(zero_last_error(), a) || !strstr(zero_last_error(), b)) {
        fprintf(stderr, "expected %d, %s and %s; got %d: %s\n", code, a, b, err, zero_last_error());
        abort();
    }
    CHECK_THAT(model_hash(m) == before && model_t(m) == t);
}

static void put_back(const char *path, struct kept k)
{
    memory_files_put(disk, path, k.p, k.n);
    free(k.p);
}

static void swap_files(struct model_rank *m, void *arg)
{
    const char *names[] = {SHARD1, SHARD2, SHARD1 ".blocks", SHARD2 ".blocks"};
    char path[128], other[128];
    for (int i = 0; i < 4; i++) {
        snprintf(path, sizeof path, "%s%s", SECOND, names[i]);
        struct kept own = keep_file(path);
        /* missing */
        CHECK_THAT(memory_files_table(disk)->unlink(disk, path) == 0);
        refused(m, SECOND, ZERO_ERR_IO, names[i], "no such file");
        /* stale: from the checkpoint before, alone and with its table */
        snprintf(other, sizeof other, "%s%s", FIRST, names[i]);
        struct kept stale = keep_file(other);
        memory_files_put(disk, path, stale.p, stale.n);
        refused(m, SECOND, ZERO_ERR_IO, names[i], "");
        free(stale.p);
        put_back(path, own);
    }
    /* swapped, files and tables */
    for (int i = 0; i < 2; i++) {
        struct kept a = keep_file(i ? SECOND SHARD1 ".blocks" : SECOND SHARD1),
                    b = keep_file(i ? SECOND SHARD2 ".blocks" : SECOND SHARD2);
        memory_files_put(disk, i ? SECOND SHARD1 ".blocks" : SECOND SHARD1, b.p, b.n);
        memory_files_put(disk, i ? SECOND SHARD2 ".blocks" : SECOND SHARD2, a.p, a.n);
        refused(m, SECOND, ZERO_ERR_IO, "/shard-0000", "");
        put_back(i ? SECOND SHARD1 ".blocks" : SECOND SHARD1, a);
        put_back(i ? SECOND SHARD2 ".blocks" : SECOND SHARD2, b);
    }
    /* a stale manifest with other files */
    struct kept own = keep_file(SECOND "/manifest.json"), stale = keep_file(FIRST "/manifest.json");
    memory_files_put(disk, SECOND "/manifest.json", stale.p, stale.n);
    refused(m, SECOND, ZERO_ERR_IO, ".blocks", "from another checkpoint");
    free(stale.p);
    put_back(SECOND "/manifest.json", own);
    /* a file that no manifest names does no harm */
    memory_files_put(disk, SECOND "/shard-00003-of-00002.safetensors", "x", 1);
    memory_files_put(disk, "run/notes.txt", "x", 1);
    CHECK_OK(zero_load(m->z, "run"));
    CHECK_THAT(model_hash(m) == hashes[2]);
    /* not a checkpoint */
    refused(m, "nowhere", ZERO_ERR_IO, "nowhere", "not a checkpoint");
    memory_files_table(disk)->mkdir(disk, "empty", 0);
    refused(m, "empty", ZERO_ERR_IO, "empty", "not a checkpoint");
    refused(m, "run/notes.txt", ZERO_ERR_IO, "notes.txt", "");
}

static void test_swapped(void **state)
{
    with_one(swap_files, NULL);
}

/* A valid manifest and valid tables over files that do not fit together: entries are there twice or
 * missing. */
static void rewrite_manifest(int n_files, const char *const names[])
{
    int64_t *n, printed;
    struct zr_manifest man;
    char *text;
    const unsigned char *p = memory_files_content(disk, SECOND "/manifest.json", &n);
    CHECK_OK(zr_manifest_parse("m", (const char *)p, *n, &man));
    struct zr_manifest_file files[2] = {man.files[0], man.files[1]}, *own = man.files;
    for (int i = 0; i < n_files; i++)
        files[i] = own[strcmp(names[i], own[0].name) ? 1 : 0];
    man.files = files;
    man.n_files = man.world = n_files;
    CHECK_OK(zr_manifest_print(&man, &text, &printed));
    memory_files_put(disk, SECOND "/manifest.json", text, printed);
    free(text);
    man.files = own;
    zr_manifest_free(&man);
}

static void misfits(struct model_rank *m, void *arg)
{
    const char *first = &SHARD1[1], *second = &SHARD2[1]; /* without the slash */
    struct kept own = keep_file(SECOND "/manifest.json");
    rewrite_manifest(1, (const char *const[]){first});
    refused(m, SECOND, ZERO_ERR_IO, "embedding", "are in none of the 1 files");
    memory_files_put(disk, SECOND "/manifest.json", own.p, own.n);
    rewrite_manifest(2, (const char *const[]){second, second});
    refused(m, SECOND, ZERO_ERR_IO, "tensor embedding", "");
    put_back(SECOND "/manifest.json", own);
    CHECK_OK(zero_load(m->z, SECOND));
}

/* A manifest that another program or version could have written: one value differs, and the checksum at
 * its end is right. */
static void another_manifest(struct model_rank *m, void *arg)
{
    static const struct {
        const char *was, *is, *says;
    } changes[] = {
        {"libzero checkpoint 1", "libzero checkpoint 3",
         "format is \"libzero checkpoint 3\"; this library reads \"libzero checkpoint 1\""},
        {"\"updates\":2", "\"updates\":3", "updates are not whole numbers in 0..2"},
        {"\"updates\":2", "\"updates\":[2]", "updates has 1 numbers"},
        {"\"updates\":2", "\"update\":2", "updates are not whole numbers in 0..2"},
        {"\"rank_data\":0", "\"rank_data\":-1", "rank_data is not a whole number in 0.."},
        {"\"job_data\":0,\"rank_data\":0}]", "\"job_data\":1,\"rank_data\":0}]",
         "job_data is not a whole number in 0..0"}, /* only rank 0's file may have it */
    };
    static const char trailer[] = ",\"checksum\":\"";
    struct kept own = keep_file(SECOND "/manifest.json");
    for (size_t i = 0; i < sizeof changes / sizeof *changes; i++) {
        const char *p = (const char *)own.p;
        const char *at = memmem(p, (size_t)own.n, changes[i].was, strlen(changes[i].was));
        const char *end = memmem(p, (size_t)own.n, trailer, strlen(trailer));
        char sum[ZR_SUM_CHARS], *text = malloc((size_t)own.n + 16);
        CHECK_THAT(at && end);
        const char *rest = at + strlen(changes[i].was);
        int n = snprintf(text, (size_t)own.n + 16, "%.*s%s%.*s", (int)(at - p), p, changes[i].is,
                         (int)(end - rest), rest);
        struct zr_checksum s = zr_checksum_of(text, n);
        zr_checksum_print(&s, sum);
        n += snprintf(text + n, (size_t)(own.n + 16 - n), "%s%s\"}\n", trailer, sum);
        memory_files_put(disk, SECOND "/manifest.json", text, n);
        refused(m, SECOND, ZERO_ERR_IO, "manifest.json", changes[i].says);
        free(text);
    }
    put_back(SECOND "/manifest.json", own);
    CHECK_OK(zero_load(m->z, SECOND));
}

static void test_another_manifest(void **state)
{
    with_one(another_manifest, NULL);
}

static void test_misfits(void **state)
{
    with_one(misfits, NULL);
}

/* ---- another model ---- */

static int change;
static const struct {
    const char *says;
    bool can_import; /* the error names zero_export and zero_import */
} reported[] = {
    {"tensor embedding has shape [37, 9] there and [9, 37] in this model", false},
    {"tensor head has shape [1025] there and [1024] in this model", false},
    {"tensor layers/b is F32 there and BF16 in this model; use the same, or move only the weights", true},
    {"tensor running is a buffer there and frozen in this model", false},
    {"tensor scale is not in this model", false},
    {"the optimizer of tensor embedding is adamw with 2 states there, and sgd with 0 in this model", true},
    {"tensor running is F32 there and I32 in this model", false}};

static void make_another(struct zero_tensor *t, struct zero_config *cfg)
{
    switch (change) {
    case 0:
        t[0].shape[0] = 9;
        t[0].shape[1] = 37;
        break;
    case 1:
        t[5].shape[0] = 1024;
        break;
    case 2:
        t[2].dtype = ZERO_BF16;
        break;
    case 3:
        t[7].flags = 0;
        t[7].unit = 0;
        break;
    case 4:
        t[6].name = "scales";
        break;
    case 5:
        cfg->optim.optimizer = ZERO_SGD;
        break;
    case 6:
        t[7].dtype = ZERO_I32;
        break;
    }
}

static void load_another(struct model_rank *m, void *arg)
{
    refused(m, "run", ZERO_ERR_ARG, reported[change].says, SECOND);
    CHECK_THAT((strstr(zero_last_error(), "zero_export and zero_import") != NULL) ==
               reported[change].can_import);
    CHECK_OK(zero_save(m->z, "other", NULL));
    CHECK_OK(zero_load(m->z, "other"));
}

static void test_another_model(void **state)
{
    for (change = 0; change < (int)(sizeof reported / sizeof *reported); change++) {
        struct model_options o = {
            .stage = 1, .world = 2, .change = make_another, .files = memory_files_table(disk)};
        model_run(&o, load_another, NULL);
    }
}

/* ---- invalid safetensors files ---- */

static void test_safetensors(void **state)
{
#define T(name, begin, end, shape)                                                                           \
    "\"" name "\":{\"dtype\":\"F32\",\"shape\":[" shape "],\"data_offsets\":[" #begin "," #end "]}"
    static const struct {
        const char *json;
        int64_t data;
        const char *what;
    } bad[] = {
        {"", 0, "does not begin"},
        {"[]", 0, "does not begin"},
        {" {}", 0, "does not begin"},
        {"{}\n", 0, "does not end"},
        {"{\"a\":}", 0, "not JSON"},
        {"{}{}", 0, "not JSON"},
        {"{}", 4, "4 bytes after the last tensor"},
        {"{\"a\":1}", 0, "tensor a"},
        {"{\"a\":{}}", 0, "tensor a"},
        {"{" T("a", 0, 8, "2") "}", 4, "not within the 4 bytes"},
        {"{" T("a", 0, 8, "3") "}", 8, "F32 of shape [3] has 12"},
        {"{" T("a", 4, 12, "2") "}", 12, "a hole of 4 bytes before tensor a"},
        {"{" T("a", 0, 8, "2") "," T("b", 4, 12, "2") "}", 12, "tensors a and b overlap"},
        {"{" T("a", 0, 8, "2") "," T("b", 12, 16, "1") "}", 16, "a hole of 4 bytes before tensor b"},
        {"{" T("a", 0, 8, "2") "," T("a", 8, 16, "2") "}", 16, "duplicate"},
        {"{" T("a", 0, 8, "-2") "}", 8, "whole numbers of 0 and more"},
        {"{" T("a", 0, 8, "2.0") "}", 8, "whole numbers of 0 and more"},
        {"{" T("a", 0, 8, "4611686018427387904,4611686018427387904") "}", 8, "more bytes than a file"},
        {"{" T("a", 0, 8, "9223372036854775808") "}", 8, "not JSON"},
        {"{" T("a", 8, 0, "2") "}", 8, "not within"},
        {"{" T("a", -8, 0, "2") "}", 8, "not within"},
        {"{" T("a", 0, 8, "1,1,1,1,1,1,1,1,2") "}", 8, "9 dimensions"},
        {"{\"a\":{\"dtype\":\"F33\",\"shape\":[2],\"data_offsets\":[0,8]}}", 8, "dtype is F33"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8],\"x\":1}}", 8, "alone"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0]}}", 8, "array of two"},
        {"{\"__metadata__\":{\"a\":1}," T("a", 0, 8, "2") "}", 8, "__metadata__"},
    };
    struct zr_st st;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        int64_t n = (int64_t)strlen(bad[i].json);
        int err = zr_st_parse("file", bad[i].json, n, 8 + n + bad[i].data, &st);
        if (err != ZERO_ERR_IO || !strstr(zr_error_text(), bad[i].what) || !strstr(zr_error_text(), "file: "))
            fail_msg("%s: %d: %s", bad[i].json, err, zr_error_text());
    }
    const char *good = "{\"__metadata__\":{\"format\":\"pt\"}," T("b", 8, 8, "0,5") "," T(
        "a", 0, 8, "1,2") "," T("c", 8, 12, "") "}  ";
    assert_int_equal(zr_st_parse("file", good, (int64_t)strlen(good), 8 + (int64_t)strlen(good) + 12, &st),
                     0);
    assert_int_equal(st.n_entries, 3);
    assert_string_equal(st.entries[0].name, "a");
    assert_true(st.entries[0].n_dims == 2 && st.entries[0].end - st.entries[0].begin == 8);
    zr_st_free(&st);

    /* lengths that point outside of the file */
    static const uint64_t lengths[] = {UINT64_C(1) << 63, UINT64_MAX, 100000001, 57, 0, 1};
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        unsigned char file[64] = {0};
        for (int k = 0; k < 8; k++)
            file[k] = (unsigned char)(lengths[i] >> 8 * k);
        memory_files_put(disk, "bad.safetensors", file, sizeof file);
        const struct zr_files *fs = memory_files_table(disk);
        int fd = fs->open(disk, "bad.safetensors", O_RDONLY, 0);
        assert_int_equal(zr_st_read(fs, fd, "bad.safetensors", sizeof file, &st), ZERO_ERR_IO);
        assert_non_null(strstr(zr_error_text(), "header"));
        assert_int_equal(zr_st_read(fs, fd, "bad.safetensors", 7, &st), ZERO_ERR_IO);
        fs->close(disk, fd);
    }
}

/* ---- the real file system ---- */

static void on_disk(struct model_rank *m, void *arg)
{
    char path[256], inside[512];
    snprintf(path, sizeof path, "%s/run", (const char *)arg);
    m->z->files = &zr_files_posix;
    CHECK_OK(model_steps(m, 1));
    CHECK_OK(zero_save(m->z, path, NULL));
    uint64_t hash = model_hash(m);
    CHECK_OK(model_steps(m, 1));
    /* A folder that cannot be written. Even root cannot make a file inside a file. */
    snprintf(inside, sizeof inside, "%s/save-00000001-step-00000001/manifest.json/run", path);
    uint64_t later = model_hash(m);
    CHECK_THAT(zero_save(m->z, inside, NULL) == ZERO_ERR_IO &&
               strstr(zero_last_error(), "manifest.json/run: make folder: not a directory"));
    CHECK_THAT(zero_save(m->z, "/proc/nothing-here", NULL) == ZERO_ERR_IO &&
               strstr(zero_last_error(), "/proc/nothing-here"));
    CHECK_THAT(model_hash(m) == later);
    CHECK_OK(zero_load(m->z, path));
    CHECK_THAT(model_hash(m) == hash);
}

static void test_on_disk(void **state)
{
    char folder[] = "/tmp/zero-checkpoint-XXXXXX", path[256];
    assert_non_null(mkdtemp(folder));
    struct model_options o = {.stage = 3, .world = 2};
    model_run(&o, on_disk, folder);
    snprintf(path, sizeof path, "%s/run/save-00000001-step-00000001", folder);
    assert_int_equal(zr_folder_remove(&zr_files_posix, path, NULL), 0);
    snprintf(path, sizeof path, "%s/run", folder);
    assert_int_equal(zr_folder_remove(&zr_files_posix, path, NULL), 0);
    assert_int_equal(rmdir(folder), 0);
}

int main(void)
{
    const char *s = getenv("SEED"), *n = getenv("N_FLIPS");
    seed = s ? strtoull(s, NULL, 0) : (uint64_t)time(NULL) * 1000;
    n_flips = n ? atoll(n) : n_flips;
    if (n && n_flips > 0)
        head_stride = N_HEAD_BITS / n_flips | 1; /* odd, so that all bits of a byte have their turn */
    printf("SEED=%llu\n", (unsigned long long)seed);
    const struct CMUnitTest tests[] = {
#define ON_DISK(test) cmocka_unit_test_setup_teardown(test, open_disk, close_disk)
        ON_DISK(test_flipped_heads),    ON_DISK(test_flipped_data), ON_DISK(test_cut),
        ON_DISK(test_swapped),          ON_DISK(test_misfits),      ON_DISK(test_another_model),
        ON_DISK(test_another_manifest), ON_DISK(test_safetensors),  cmocka_unit_test(test_on_disk),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
