/* SPDX-License-Identifier: Apache-2.0 */
/* test_checkpoint_foreign.c: tests weight files that other programs wrote, imported on 1 and 2 ranks. They
 * have all values of F16, dtypes that the library does not import, and NaN and infinity. Some are Git LFS
 * pointers or have an index of another export. */
#include "kernels/state_codes.h"
#include "test/cmocka.h"
#include "test/stand_in/half.h"
#include "test/zero/toy_net.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { N = 1 << 16, SIDE = 256, TENSORS = 7 };
enum { TRAINED_F32, TRAINED_BF16, FROZEN_F32, FROZEN_BF16, TURNED, SEEN, COUNT };

static char folder[] = "/tmp/zero-foreign-XXXXXX";

/* ---- the expected value ---- */

static double value_of_f16(int bits)
{
    int exponent = bits >> 10 & 31, fraction = bits & 1023;
    double size = exponent == 31 ? (fraction ? NAN : INFINITY)
                  : exponent     ? ldexp(1024 + fraction, exponent - 25)
                                 : ldexp(fraction, -24);
    return bits & 0x8000 ? -size : size;
}

/* Returns the nearer of the two neighbouring bf16 values. Of two equally near, returns the larger if away,
 * which is how weights are rounded from masters, and otherwise the even one. */
static float rounded(double x, bool away)
{
    const float f = (float)x; /* exact */
    const uint32_t bits = zr_float_bits(f);
    if (!(bits & 0xffff) || !isfinite(x))
        return f;
    const uint16_t half = (uint16_t)(bits >> 16);
    const float a = bf16_to_float(half), b = bf16_to_float((uint16_t)(half + 1));
    const double to_a = fabs(x - a), to_b = fabs(x - b);
    return to_a < to_b || (to_a == to_b && !away && !(half & 1)) ? a : b;
}

static bool same(float found, double wanted)
{
    float w = (float)wanted;
    return isnan(w) ? isnan(found) && !signbit(found) == !signbit(w) : !memcmp(&found, &w, 4);
}

/* ---- a file ---- */

struct file {
    FILE *f;
    char head[8192];
    size_t n_head;
    int64_t at;
    char *data;
};

static void add(struct file *f, const char *name, const char *dtype, const char *shape, const void *data,
                int64_t bytes)
{
    f->n_head += (size_t)snprintf(f->head + f->n_head, sizeof f->head - f->n_head,
                                  "%s\"%s\":{\"dtype\":\"%s\",\"shape\":[%s],\"data_offsets\":[%lld,%lld]}",
                                  f->n_head ? "," : "{", name, dtype, shape, (long long)f->at,
                                  (long long)(f->at + bytes));
    f->data = realloc(f->data, (size_t)(f->at + bytes));
    assert_non_null(f->data);
    memcpy(f->data + f->at, data, (size_t)bytes);
    f->at += bytes;
}

static void path_of(const char *name, char path[200])
{
    snprintf(path, 200, "%s/%s", folder, name);
}

static void write_text(const char *name, const char *text)
{
    char path[200];
    path_of(name, path);
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    assert_true(fputs(text, f) >= 0);
    assert_int_equal(fclose(f), 0);
}

static void finish(struct file *f)
{
    char path[200];
    path_of("model.safetensors", path);
    f->head[f->n_head++] = '}';
    uint64_t n = f->n_head;
    f->f = fopen(path, "w");
    assert_non_null(f->f);
    assert_int_equal(fwrite(&n, 8, 1, f->f), 1);
    assert_int_equal(fwrite(f->head, f->n_head, 1, f->f), 1);
    assert_int_equal(fwrite(f->data, (size_t)f->at, 1, f->f), 1);
    assert_int_equal(fclose(f->f), 0);
    free(f->data);
}

/* Adds every dtype of safetensors, in tensors that no import asks for. */
static void add_others(struct file *f)
{
    static const struct {
        const char *dtype;
        int bits;
    } all[] = {{"BOOL", 8},        {"F4", 4},         {"F6_E2M3", 6}, {"F6_E3M2", 6}, {"U8", 8},
               {"I8", 8},          {"F8_E5M2", 8},    {"F8_E4M3", 8}, {"F8_E8M0", 8}, {"I16", 16},
               {"U16", 16},        {"F16", 16},       {"BF16", 16},   {"I32", 32},    {"U32", 32},
               {"F32", 32},        {"C64", 64},       {"F64", 64},    {"I64", 64},    {"U64", 64},
               {"F8_E4M3FNUZ", 8}, {"F8_E5M2FNUZ", 8}};
    static const char zeros[256];
    char name[32];
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        snprintf(name, sizeof name, "other %s", all[i].dtype);
        add(f, name, all[i].dtype, "4, 3, 2", zeros, 24 * all[i].bits / 8);
    }
}

/* seen, count: dtypes of the buffers' values. id: NULL, or that of an export by libzero. */
static void write_file_of(const char *id, const uint16_t *values, const char *trained, const char *count)
{
    static const float seen[] = {1, -2, 0.5f};
    static const int32_t counted[] = {7, -9};
    struct file f = {0};
    if (id)
        f.n_head =
            (size_t)snprintf(f.head, sizeof f.head, "{\"__metadata__\":{\"libzero_export\":\"%s\"}", id);
    add(&f, "trained f32", trained, "256, 256", values, 2 * N);
    add(&f, "trained bf16", "F16", "256, 256", values, 2 * N);
    add_others(&f);
    add(&f, "frozen f32", "F16", "65536", values, 2 * N);
    add(&f, "frozen bf16", "F16", "65536", values, 2 * N);
    add(&f, "turned", "F16", "256, 256", values, 2 * N);
    add(&f, "seen", "F32", "3", seen, sizeof seen);
    add(&f, "count", count, "2", counted, sizeof counted);
    finish(&f);
}

static void write_file(const uint16_t *values, const char *trained, const char *count)
{
    write_file_of(NULL, values, trained, count);
}

/* ---- a model ---- */

struct lines {
    int n;
    char last[600];
};

static void take_line(void *arg, const char *line)
{
    struct lines *l = arg;
    if (!strstr(line, "will not recover") && !strstr(line, "belongs to another export"))
        return;
    l->n++;
    snprintf(l->last, sizeof l->last, "%s", line);
}

struct job {
    int stage;
    /* text of the expected error; NULL: the import must work */
    const char *says;
    int code;
    /* "", or text of the expected log line */
    const char *line;
    /* index of a first value that is NaN or infinite */
    int nan_at;
    /* the file has other values than every F16 */
    bool other_values;
};

struct model {
    void *param[TENSORS], *grad[TENSORS], *own[TENSORS];
    struct zero_tensor table[TENSORS];
};

static void make_model(struct model *m, int nan_at)
{
    static const struct zero_tensor table[TENSORS] = {
        {.name = "trained f32", .shape = {SIDE, SIDE}, .dtype = ZERO_F32, .unit = 0},
        {.name = "trained bf16", .shape = {SIDE, SIDE}, .dtype = ZERO_BF16, .unit = 1},
        {.name = "frozen f32", .shape = {N}, .dtype = ZERO_F32, .unit = 2},
        {.name = "frozen bf16", .shape = {N}, .dtype = ZERO_BF16, .unit = 3},
        {.name = "turned", .shape = {SIDE, SIDE}, .dtype = ZERO_F32, .unit = 4},
        {.name = "seen", .shape = {3}, .dtype = ZERO_F32, .unit = 0, .flags = ZERO_BUFFER},
        {.name = "count", .shape = {2}, .dtype = ZERO_I32, .unit = 0, .flags = ZERO_BUFFER},
    };
    memcpy(m->table, table, sizeof table);
    for (int i = 0; i < TENSORS; i++) {
        m->param[i] = m->own[i] = calloc(N, 4);
        m->table[i].param = &m->param[i];
        if (i != FROZEN_F32 && i != FROZEN_BF16 && i < SEEN)
            m->table[i].grad = &m->grad[i];
    }
    if (nan_at)
        ((uint16_t *)m->param[TRAINED_BF16])[nan_at] = 0x7fc0;
}

static float at(const void *values, int dtype, int64_t i)
{
    return dtype == ZERO_F32 ? ((const float *)values)[i] : bf16_to_float(((const uint16_t *)values)[i]);
}

/* Checks that tensor t's elements are the converted values of the bits that identify them. */
static void check_values(struct toy_rank *r, zero_ctx *z, const struct model *m, int t, int value)
{
    int dtype = value == ZERO_VALUE_MASTER ? ZERO_F32 : m->table[t].dtype, n_wrong = 0;
    char *found = malloc(4 * N);
    if (zero_read(z, t, value, 0, N, found))
        toy_wrong(r, "%s: %s; ", m->table[t].name, zero_last_error());
    for (int i = 0; i < N; i++) {
        int bits = t == TURNED ? i % SIDE * SIDE + i / SIDE : i;
        double wanted = value_of_f16(bits);
        double as_read = dtype == ZERO_F32 ? wanted : (double)rounded(wanted, m->table[t].grad != NULL);
        if (!same(at(found, dtype, i), as_read) && !n_wrong++)
            toy_wrong(r, "%s: element %d (F16 %#x) is %.9g, should be %.9g; ", m->table[t].name, i, bits,
                      (double)at(found, dtype, i), wanted);
    }
    free(found);
}

static void import(struct toy_rank *r)
{
    static const struct zero_weight map[] = {{.name = "trained f32", .tensor = TRAINED_F32},
                                             {.name = "trained bf16", .tensor = TRAINED_BF16},
                                             {.name = "frozen f32", .tensor = FROZEN_F32},
                                             {.name = "frozen bf16", .tensor = FROZEN_BF16},
                                             {.name = "turned", .tensor = TURNED, .transposed = 1},
                                             {.name = "seen", .tensor = SEEN},
                                             {.name = "count", .tensor = COUNT}};
    const struct job *job = r->arg;
    struct lines lines = {0};
    struct model m = {0};
    zero_ctx *z = NULL;
    int err = 0;
    make_model(&m, job->nan_at);
    struct zero_config cfg = toy_config(r, job->stage);
    cfg.debug.log = take_line;
    cfg.debug.log_arg = &lines;
    TOY_TRY(zero_wrap(&z, m.table, TENSORS, &cfg));
    if (!err && job->says) {
        toy_expect(r, zero_import(z, folder, map, TENSORS), job->code, job->says);
    } else if (!err && !job->nan_at) {
        TOY_TRY(zero_import(z, folder, map, TENSORS));
        int n_tensors = job->other_values ? 0 : SEEN;
        for (int t = 0; !err && t < n_tensors; t++)
            check_values(r, z, &m, t, ZERO_VALUE_PARAM);
        for (int t = 0; !err && t < n_tensors; t++)
            if (m.table[t].grad)
                check_values(r, z, &m, t, ZERO_VALUE_MASTER);
        if (((float *)m.param[SEEN])[1] != -2 || ((int32_t *)m.param[COUNT])[1] != -9)
            toy_wrong(r, "a buffer has other values; ");
    }
    double n = lines.n;
    TOY_TRY(zero_mean(z, &n, 1));
    if (!err && n * r->world != (*job->line != 0))
        toy_wrong(r, "%g lines on all ranks; ", n * r->world);
    if (lines.n && !strstr(lines.last, job->line))
        toy_wrong(r, "the line is: %s; ", lines.last);
    zero_unwrap(&z);
    for (int t = 0; t < TENSORS; t++)
        free(m.own[t]);
}

static void try_import(const struct job *job)
{
    struct toy_rank r[2];
    for (int world = 1; world <= 2; world++)
        for (int stage = 0; stage <= 3; stage += 3) {
            struct job at_stage = *job;
            at_stage.stage = stage;
            toy_run(world, import, &at_stage, r, job->says ? job->says : "imported");
        }
}

static uint16_t *all_values(void)
{
    static uint16_t values[N];
    for (int i = 0; i < N; i++)
        values[i] = (uint16_t)i;
    return values;
}

static void every_f16_is_imported(void **state)
{
    write_file(all_values(), "F16", "I32");
    try_import(&(struct job){.line = "model.safetensors: element 31744 of tensor trained f32 is inf"});
}

/* The largest float stays finite in F32 weights and masters, and rounds to infinity in BF16. */
static void rounding_to_infinity_is_said(void **state)
{
    static float values[N];
    static const float seen[] = {1, -2, 0.5f};
    static const int32_t count[] = {7, -9};
    values[40000] = 3.4e38f;
    struct file f = {0};
    add(&f, "trained f32", "F32", "256, 256", values, 4 * N);
    add(&f, "trained bf16", "F32", "256, 256", values, 4 * N);
    add(&f, "frozen f32", "F32", "65536", values, 4 * N);
    add(&f, "frozen bf16", "F16", "65536", values, 2 * N);
    add(&f, "turned", "F32", "256, 256", values, 4 * N);
    add(&f, "seen", "F32", "3", seen, sizeof seen);
    add(&f, "count", "I32", "2", count, sizeof count);
    finish(&f);
    try_import(&(struct job){.other_values = true,
                             .line = "element 40000 of tensor trained bf16 is inf as BF16; training will"});
}

static void other_dtypes_are_refused(void **state)
{
    write_file(all_values(), "I16", "I32");
    try_import(&(struct job){
        .says = "tensor trained f32 is I16; allowed: F32, BF16, F16", .code = ZERO_ERR_NOTSUP, .line = ""});
    write_file(all_values(), "F16", "F32");
    try_import(&(struct job){
        .says = "tensor count is F32, but count is a buffer and I32", .code = ZERO_ERR_NOTSUP, .line = ""});
    /* A dtype that safetensors does not have is refused even if no import asks for the tensor. */
    struct file f = {0};
    add(&f, "x", "F7", "8", "1234567", 7);
    finish(&f);
    try_import(&(struct job){
        .says = "tensor x: dtype is F7, which the format does not have", .code = ZERO_ERR_IO, .line = ""});
    f = (struct file){0};
    add(&f, "x", "F6_E2M3", "3", "12", 2);
    finish(&f);
    try_import(&(struct job){.says = "tensor x: its 18 bits of F6_E2M3 are not a whole number of bytes",
                             .code = ZERO_ERR_IO,
                             .line = ""});
}

static void pointers_of_git_lfs_are_called_that(void **state)
{
    static const char pointer[] =
        "version https://git-lfs.github.com/spec/v1\n"
        "oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\n"
        "size 12345\n";
    char path[200];
    write_text("model.safetensors", pointer);
    try_import(&(struct job){
        .says = "model.safetensors: this is a Git LFS pointer", .code = ZERO_ERR_IO, .line = ""});
    path_of("model.safetensors", path);
    assert_int_equal(remove(path), 0);
    write_text("model.safetensors.index.json", pointer);
    try_import(&(struct job){
        .says = "model.safetensors.index.json: this is a Git LFS pointer", .code = ZERO_ERR_IO, .line = ""});
}

/* model.safetensors is read even if the index belongs to another export. */
static void an_index_of_another_export_is_named(void **state)
{
    static const uint16_t zeros[N];
    write_text("model.safetensors.index.json",
               "{\"metadata\": {\"libzero_export\": \"0123456789abcdef\"}, \"weight_map\": {}}");
    struct job job = {.other_values = true, .line = ""};
    write_file_of("0123456789abcdef", zeros, "F16", "I32");
    try_import(&job);
    job.line = "model.safetensors.index.json belongs to another export";
    write_file_of("fedcba9876543210", zeros, "F16", "I32");
    try_import(&job);
    write_file(zeros, "F16", "I32");
    try_import(&job);
    job.line = "";
    write_text("model.safetensors.index.json", "not JSON");
    try_import(&job);
}

static void first_values_are_looked_at(void **state)
{
    try_import(
        &(struct job){.nan_at = 40000, .line = "zero_wrap: element 40000 of tensor trained bf16 is nan"});
}

static int make_folder(void **state)
{
    strcpy(folder + strlen(folder) - 6, "XXXXXX");
    toy_make_folder(folder);
    return 0;
}

static int remove_folder(void **state)
{
    toy_remove_folder(folder);
    return 0;
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, make_folder, remove_folder)
    const struct CMUnitTest tests[] = {
        TEST(every_f16_is_imported),      TEST(rounding_to_infinity_is_said),
        TEST(other_dtypes_are_refused),   TEST(pointers_of_git_lfs_are_called_that),
        TEST(first_values_are_looked_at), TEST(an_index_of_another_export_is_named),
    };
    return cmocka_run_group_tests(tests, NULL, toy_remove_folders);
}
