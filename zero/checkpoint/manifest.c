/* SPDX-License-Identifier: Apache-2.0 */
/* manifest.c: prints and parses the manifest, and the table of checksums of each file. */
#include "zero/checkpoint/manifest.h"
#include "kernels/alloc.h"
#include "kernels/state_codes.h"
#include "zero/checkpoint/safetensors.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <jansson.h>

#define ANY_FORMAT    "libzero checkpoint " /* followed by its number */
#define FORMAT        ANY_FORMAT "1"
#define FORMAT_2      ANY_FORMAT "2" /* if steps round at random */
#define TRAILER       ",\"checksum\":\""
#define TRAILER_BYTES ((int64_t)(sizeof TRAILER - 1 + ZR_SUM_CHARS - 1 + 3)) /* and "}\n */

const char *const zr_data_names[ZR_N_DATA] = {[ZR_DATA_JOB] = "job_data", [ZR_DATA_RANK] = "rank_data"};

void zr_manifest_free(struct zr_manifest *m)
{
    for (int32_t i = 0; m->tensors && i < m->n_tensors; i++) {
        free(m->tensors[i].name);
        free(m->tensors[i].updates);
    }
    free(m->tensors);
    free(m->files);
    *m = (struct zr_manifest){0};
}

/* ---- printing ---- */

static json_t *hex64(uint64_t x)
{
    char text[20];
    snprintf(text, sizeof text, "%016" PRIx64, x);
    return json_string(text);
}

static json_t *print_updates(const struct zr_manifest_tensor *t)
{
    json_t *list = t->n_updates > 1 ? json_array() : NULL;
    if (t->n_updates == 1)
        return json_integer(t->updates[0]);
    for (int32_t i = 0; list && i < t->n_updates; i++)
        if (json_array_append_new(list, json_integer(t->updates[i]))) {
            json_decref(list);
            list = NULL;
        }
    return list;
}

/* Names of forms that are not saved as fp32. NULL: saved as fp32. */
static const char *const masters_names[] = {[ZERO_MASTERS_NONE] = "none"};
static const char *const moments_names[] = {
    [ZERO_MOMENTS_F32] = NULL, [ZERO_MOMENTS_BF16] = "bf16", [ZERO_MOMENTS_Q8] = "q8"};

/* Adds how masters and states are saved, if it is not as fp32. */
static bool print_precision(const struct zr_manifest_tensor *t, json_t *o)
{
    const char *masters = masters_names[t->masters], *moments = moments_names[t->moments];
    return (!masters || !json_object_set_new(o, "masters", json_string(masters))) &&
           (!moments || !json_object_set_new(o, "moments", json_string(moments))) &&
           (!t->stacked || !json_object_set_new(o, "stacked", json_true()));
}

static bool is_format_2(const struct zr_manifest *m)
{
    bool is = m->seeded;
    for (int32_t i = 0; i < m->n_tensors; i++)
        is |= masters_names[m->tensors[i].masters] || moments_names[m->tensors[i].moments];
    return is;
}

static json_t *print_tensors(const struct zr_manifest *m)
{
    json_t *list = json_array();
    for (int32_t i = 0; list && i < m->n_tensors; i++) {
        const struct zr_manifest_tensor *t = &m->tensors[i];
        json_t *shape = json_array();
        bool ok = shape != NULL;
        for (int32_t d = 0; ok && d < t->n_dims; d++)
            ok = !json_array_append_new(shape, json_integer(t->shape[d]));
        if (!ok) {
            json_decref(shape);
            shape = NULL;
        }
        json_t *o = json_pack("{s:s, s:s, s:o, s:b}", "name", t->name, "dtype", t->dtype, "shape", shape,
                              "trainable", (int)t->trainable);
        ok = o != NULL;
        if (t->trainable)
            ok = ok && !json_object_set_new(o, "optimizer", json_string(t->optimizer)) &&
                 !json_object_set_new(o, "states", json_integer(t->n_states)) &&
                 !json_object_set_new(o, "updates", print_updates(t)) && print_precision(t, o);
        if (t->buffer)
            ok = ok && !json_object_set_new(o, "buffer", json_true());
        if (t->parts)
            ok = ok && !json_object_set_new(o, "parts", json_integer(t->parts)) &&
                 !json_object_set_new(o, "dim", json_integer(t->dim)) &&
                 !json_object_set_new(o, "rows", json_integer(t->rows)) &&
                 !json_object_set_new(o, "blocks", json_integer(t->blocks));
        if (!ok) {
            json_decref(o);
            o = NULL;
        }
        if (json_array_append_new(list, o)) {
            json_decref(list);
            return NULL;
        }
    }
    return list;
}

static json_t *print_files(const struct zr_manifest *m)
{
    json_t *list = json_array();
    for (int32_t i = 0; list && i < m->n_files; i++) {
        char sum[ZR_SUM_CHARS];
        zr_checksum_print(&m->files[i].blocks, sum);
        json_t *o = json_pack("{s:s, s:I, s:s}", "name", m->files[i].name, "bytes",
                              (json_int_t)m->files[i].bytes, "blocks", sum);
        bool ok = o != NULL;
        for (int k = 0; k < ZR_N_DATA; k++)
            ok = ok && !json_object_set_new(o, zr_data_names[k], json_integer(m->files[i].data[k]));
        if (!ok) {
            json_decref(o);
            o = NULL;
        }
        if (json_array_append_new(list, o)) {
            json_decref(list);
            return NULL;
        }
    }
    return list;
}

int64_t zr_manifest_bytes(const struct zr_manifest *m)
{
    static const char tensor[] =
        "{\"name\":,\"dtype\":\"\",\"shape\":[],\"trainable\":false,\"buffer\":true},",
                      trained[] = ",\"optimizer\":\"\",\"states\":0,\"updates\":[]",
                      precision[] = ",\"masters\":\"none\",\"moments\":\"bf16\",\"stacked\":true",
                      cut[] = ",\"parts\":,\"dim\":,\"rows\":,\"blocks\":",
                      file[] = "{\"name\":\"\",\"bytes\":,\"blocks\":\"\",\"job_data\":,\"rank_data\":},";
    int64_t digits = 20, n = 1024; /* all other members: far fewer */
    for (int32_t i = 0; i < m->n_tensors; i++) {
        const struct zr_manifest_tensor *t = &m->tensors[i];
        n += zr_json_bytes(t->name) + (int64_t)(sizeof tensor + strlen(t->dtype));
        if (t->trainable)
            n += (int64_t)(sizeof trained + sizeof precision + strlen(t->optimizer)) +
                 t->n_updates * (digits + 1);
        for (int32_t d = 0; d < t->n_dims; d++)
            n += snprintf(NULL, 0, "%" PRId64 ",", t->shape[d]);
        n += t->parts ? (int64_t)sizeof cut + 4 * digits : 0;
    }
    for (int32_t i = 0; i < m->n_files; i++)
        n += (int64_t)(sizeof file + strlen(m->files[i].name)) + 3 * digits + ZR_SUM_CHARS;
    return n;
}

static int check_names(const struct zr_manifest *m)
{
    for (int32_t i = 0; i < m->n_tensors; i++)
        if (!zr_is_utf8(m->tensors[i].name))
            return zr_fail(ZERO_ERR_ARG, "tensor %s: the name is not UTF-8, which manifests are written in",
                           m->tensors[i].name);
    return 0;
}

int zr_manifest_check(const struct zr_manifest *m)
{
    int64_t n = zr_manifest_bytes(m);
    if (n > ZR_MANIFEST_MAX)
        return zr_fail(ZERO_ERR_ARG,
                       "the names and shapes of %d tensors take %lld bytes in a manifest; allowed: %d",
                       m->n_tensors, (long long)n, ZR_MANIFEST_MAX);
    return check_names(m);
}

int zr_manifest_print(const struct zr_manifest *m, char **out, int64_t *n)
{
    char *text = NULL, *all = NULL;
    ZR_TRY(check_names(m));
    json_t *root = json_object();
    bool ok = root != NULL;
#define SET(key, value) ok = ok && !json_object_set_new(root, key, value)
    SET("format", json_string(is_format_2(m) ? FORMAT_2 : FORMAT));
    SET("version", json_string(m->version));
    SET("step", json_integer(m->t));
    SET("skipped_steps", json_integer(m->n_skipped));
    SET("micro_batches", json_integer(m->n_micro));
    SET("world", json_integer(m->world));
    SET("stage", json_integer(m->stage));
    SET("config_hash", hex64(m->config_hash));
    SET("layout_hash", hex64(m->layout_hash));
    if (m->seeded)
        SET("seed", json_integer(m->seed));
    SET("block_bytes", json_integer(ZR_BLOCK_BYTES));
    SET("tensors", print_tensors(m));
    SET("files", print_files(m));
#undef SET
    if (ok)
        text = json_dumps(root, JSON_COMPACT);
    json_decref(root);
    int64_t body = text ? (int64_t)strlen(text) - 1 : 0; /* without the closing brace */
    if (text)
        all = malloc((size_t)(body + TRAILER_BYTES + 1));
    if (all) {
        char sum[ZR_SUM_CHARS];
        struct zr_checksum s = zr_checksum_of(text, body);
        zr_checksum_print(&s, sum);
        memcpy(all, text, (size_t)body);
        *n = body + snprintf(all + body, (size_t)TRAILER_BYTES + 1, "%s%s\"}\n", TRAILER, sum);
    }
    free(text);
    if (!all)
        return zr_fail(ZERO_ERR_NOMEM, "no memory for a manifest of %d tensors", m->n_tensors);
    *out = all;
    return 0;
}

/* ---- parsing ---- */

static int bad(const char *file, const char *key, const char *what)
{
    return zr_fail(ZERO_ERR_IO, "%s: %s: %s", file, key, what);
}

static int get_int(const char *file, const json_t *o, const char *key, int64_t lo, int64_t hi, int64_t *out)
{
    const json_t *v = json_object_get(o, key);
    *out = json_integer_value(v);
    if (!json_is_integer(v) || *out < lo || *out > hi)
        return zr_fail(ZERO_ERR_IO, "%s: %s is not a whole number in %" PRId64 "..%" PRId64, file, key, lo,
                       hi);
    return 0;
}

static int get_int32(const char *file, const json_t *o, const char *key, int64_t lo, int64_t hi, int32_t *out)
{
    int64_t x;
    int err = get_int(file, o, key, lo, hi, &x);
    *out = (int32_t)x;
    return err;
}

static int get_text(const char *file, const json_t *o, const char *key, char *out, size_t n)
{
    const char *text = json_string_value(json_object_get(o, key));
    if (!text || strlen(text) >= n)
        return bad(file, key, "is not a string, or too long");
    memcpy(out, text, strlen(text) + 1);
    return 0;
}

static int get_hash(const char *file, const json_t *o, const char *key, uint64_t *out)
{
    char text[20], *end;
    ZR_TRY(get_text(file, o, key, text, sizeof text));
    *out = strtoull(text, &end, 16);
    return strlen(text) == 16 && !*end ? 0 : bad(file, key, "is not 16 hexadecimal digits");
}

static int check_format(const char *file, const json_t *o)
{
    char text[sizeof FORMAT + 12];
    int err = get_text(file, o, "format", text, sizeof text);
    if (err || !strcmp(text, FORMAT) || !strcmp(text, FORMAT_2))
        return err;
    return zr_fail(ZERO_ERR_IO, "%s: format is \"%s\"; this library reads \"%s\" and \"%s\"", file, text,
                   FORMAT, FORMAT_2);
}

/* Reads the optimizer that trains the tensor, and how many states it keeps. */
static int get_optimizer(const char *file, const json_t *o, struct zr_manifest_tensor *t)
{
    if (!t->trainable)
        return 0;
    ZR_TRY(get_text(file, o, "optimizer", t->optimizer, sizeof t->optimizer));
    return get_int32(file, o, "states", 0, 4, &t->n_states);
}

/* Reads a member that has one of the names, and gives the name's index. Without the member it gives 0. */
static int get_choice(const char *file, const json_t *o, const char *key, const char *const *names, int n,
                      int *out)
{
    char text[8];
    *out = 0;
    if (!json_object_get(o, key))
        return 0;
    ZR_TRY(get_text(file, o, key, text, sizeof text));
    while (++*out < n)
        if (names[*out] && !strcmp(text, names[*out]))
            return 0;
    return bad(file, key, "is not a way to keep masters or moments that this library knows");
}

/* Whether elements that follow each other in a part and in the whole are whole blocks of 8-bit states. */
static bool cut_fits_blocks(const struct zr_manifest_tensor *t)
{
    int64_t run = t->rows / t->blocks;
    for (int32_t d = t->dim + 1; d < t->n_dims; d++)
        run *= t->shape[d];
    return run % ZR_Q8_BLOCK == 0 && (!t->stacked || t->dim > 0);
}

/* Reads how masters and states are saved. */
static int get_precision(const char *file, const json_t *o, const char *name, struct zr_manifest_tensor *t)
{
    int masters, moments;
    const json_t *stacked = json_object_get(o, "stacked");
    if (!t->trainable)
        return 0;
    ZR_TRY(get_choice(file, o, "masters", masters_names, ZERO_MASTERS_NONE + 1, &masters));
    ZR_TRY(get_choice(file, o, "moments", moments_names, ZERO_MOMENTS_Q8 + 1, &moments));
    t->masters = (enum zero_masters)masters;
    t->moments = (enum zero_moments)moments;
    t->stacked = stacked != NULL;
    if ((t->masters && strcmp(t->dtype, "BF16") != 0) || (t->moments && !t->n_states) ||
        (stacked && (!json_is_true(stacked) || t->moments != ZERO_MOMENTS_Q8)) ||
        (t->moments == ZERO_MOMENTS_Q8 && t->parts && !cut_fits_blocks(t)))
        return zr_fail(ZERO_ERR_IO, "%s: tensor %s: masters, moments and stacked do not fit it", file, name);
    return 0;
}

/* Reads how the tensor is cut over tp, if it is. */
static int get_cut(const char *file, const json_t *o, const char *name, struct zr_manifest_tensor *t)
{
    if (!json_object_get(o, "parts"))
        return 0;
    ZR_TRY(get_int32(file, o, "parts", 2, 1 << 24, &t->parts));
    ZR_TRY(get_int32(file, o, "dim", 0, t->n_dims - 1, &t->dim));
    ZR_TRY(get_int(file, o, "rows", 1, t->shape[t->dim], &t->rows));
    ZR_TRY(get_int32(file, o, "blocks", 1, INT32_MAX, &t->blocks));
    int64_t all = t->rows * t->parts, whole = t->shape[t->dim];
    bool padded = all != whole;
    if (t->buffer || t->rows > INT64_MAX / t->parts || all < whole || t->rows % t->blocks ||
        (padded && (t->dim > 0 || t->blocks > 1)))
        return zr_fail(ZERO_ERR_IO, "%s: tensor %s: %d parts of %lld rows in %d blocks do not fit its shape",
                       file, name, t->parts, (long long)t->rows, t->blocks);
    return 0;
}

/* Reads how many steps updated the tensor, or each of its layers. */
static int get_updates(const char *file, const json_t *o, const char *name, int64_t most,
                       struct zr_manifest_tensor *t)
{
    const json_t *v = json_object_get(o, "updates");
    size_t n = json_is_array(v) ? json_array_size(v) : 1;
    if (!t->trainable)
        return 0;
    if (json_is_array(v) && (n < 2 || (int64_t)n != t->shape[0]))
        return zr_fail(ZERO_ERR_IO,
                       "%s: tensor %s: updates has %zu numbers; allowed: 1, or as many as layers", file, name,
                       n);
    ZR_TRY(ZR_ZALLOC(t->updates, n, "the updates of tensor %s of %s", name, file));
    t->n_updates = (int32_t)n;
    for (size_t i = 0; i < n; i++) {
        const json_t *x = json_is_array(v) ? json_array_get(v, i) : v;
        t->updates[i] = json_integer_value(x);
        if (!json_is_integer(x) || t->updates[i] < 0 || t->updates[i] > most)
            return zr_fail(ZERO_ERR_IO, "%s: tensor %s: updates are not whole numbers in 0..%" PRId64, file,
                           name, most);
    }
    return 0;
}

static int get_tensor(const char *file, const json_t *o, int64_t step, struct zr_manifest_tensor *t)
{
    const char *name = json_string_value(json_object_get(o, "name"));
    const json_t *shape = json_object_get(o, "shape"), *trainable = json_object_get(o, "trainable");
    const json_t *buffer = json_object_get(o, "buffer");
    if (!name || !*name)
        return bad(file, "tensors", "one has no name");
    ZR_TRY(get_text(file, o, "dtype", t->dtype, sizeof t->dtype));
    if (!json_is_boolean(trainable) || (buffer && (!json_is_true(buffer) || json_is_true(trainable))) ||
        json_array_size(shape) < 1 || json_array_size(shape) > 8 || !zr_st_dtype_bytes(t->dtype))
        return zr_fail(ZERO_ERR_IO, "%s: tensor %s: dtype, shape or trainable is not valid", file, name);
    t->trainable = json_is_true(trainable);
    ZR_TRY(get_optimizer(file, o, t));
    t->buffer = buffer != NULL;
    t->n_dims = (int32_t)json_array_size(shape);
    int64_t n = 8;
    for (int32_t i = 0; i < t->n_dims; i++) {
        const json_t *d = json_array_get(shape, (size_t)i);
        t->shape[i] = json_integer_value(d);
        if (!json_is_integer(d) || t->shape[i] < 1 || __builtin_mul_overflow(n, t->shape[i], &n))
            return zr_fail(ZERO_ERR_IO,
                           "%s: tensor %s: shape is not made of whole numbers of 1 and more, or is too large",
                           file, name);
    }
    int err = get_cut(file, o, name, t);
    if (!err)
        err = get_precision(file, o, name, t);
    if (!err)
        err = get_updates(file, o, name, step, t);
    if (!err) {
        t->name = strdup(name);
        err = t->name ? 0 : zr_fail(ZERO_ERR_NOMEM, "%s: no memory for the name of a tensor", file);
    }
    if (err) {
        free(t->updates);
        t->updates = NULL;
    }
    return err;
}

/* Whether the name is a plain file name, which cannot lead out of the folder. */
static bool is_plain_name(const char *name)
{
    return *name && *name != '.' && !strchr(name, '/');
}

static int get_file(const char *file, const json_t *o, bool of_rank0, struct zr_manifest_file *f)
{
    char sum[ZR_SUM_CHARS];
    int64_t left;
    int err = get_text(file, o, "name", f->name, sizeof f->name - sizeof ZR_BLOCKS_SUFFIX);
    if (!err)
        err = get_int(file, o, "bytes", 8, INT64_MAX / 2, &f->bytes);
    left = f->bytes;
    for (int k = 0; !err && k < ZR_N_DATA; k++) {
        bool here = k != ZR_DATA_JOB || of_rank0;
        err = get_int(file, o, zr_data_names[k], 0, here ? left : 0, &f->data[k]);
        left -= err ? 0 : f->data[k];
    }
    if (!err)
        err = get_text(file, o, "blocks", sum, sizeof sum);
    if (!err && !is_plain_name(f->name))
        err = bad(file, "files", "a name does not name a file in the same folder");
    if (!err && !zr_checksum_parse(sum, &f->blocks))
        err = bad(file, f->name, "blocks is not a checksum");
    return err;
}

static int get_all(const char *file, const json_t *o, struct zr_manifest *m)
{
    int32_t block;
    int err = check_format(file, o);
#define GET(call)                                                                                            \
    if (!err)                                                                                                \
    err = call
    GET(get_text(file, o, "version", m->version, sizeof m->version));
    GET(get_int(file, o, "step", 0, INT64_MAX / 2, &m->t));
    GET(get_int(file, o, "skipped_steps", 0, INT64_MAX / 2, &m->n_skipped));
    GET(get_int(file, o, "micro_batches", 0, INT64_MAX / 2, &m->n_micro));
    GET(get_int32(file, o, "world", 1, 1 << 24, &m->world));
    GET(get_int32(file, o, "stage", 0, 3, &m->stage));
    GET(get_hash(file, o, "config_hash", &m->config_hash));
    GET(get_hash(file, o, "layout_hash", &m->layout_hash));
    m->seeded = json_object_get(o, "seed") != NULL;
    GET(m->seeded ? get_int(file, o, "seed", 0, (INT64_C(1) << 53) - 1, &m->seed) : 0);
    GET(get_int32(file, o, "block_bytes", ZR_BLOCK_BYTES, ZR_BLOCK_BYTES, &block));
#undef GET
    const json_t *tensors = json_object_get(o, "tensors"), *files = json_object_get(o, "files");
    if (!err && (json_array_size(tensors) < 1 || json_array_size(tensors) > INT32_MAX / 2))
        err = bad(file, "tensors", "is not an array with at least one entry");
    if (!err && json_array_size(files) != (size_t)m->world)
        err = bad(file, "files", "is not an array with one entry per rank");
    if (err)
        return err;
    ZR_TRY(ZR_ZALLOC(m->tensors, json_array_size(tensors), "the tensors of %s", file));
    ZR_TRY(ZR_ZALLOC(m->files, json_array_size(files), "the files of %s", file));
    for (size_t i = 0; !err && i < json_array_size(tensors); i++, m->n_tensors += !err)
        err = get_tensor(file, json_array_get(tensors, i), m->t, &m->tensors[i]);
    for (size_t i = 0; !err && i < json_array_size(files); i++, m->n_files += !err)
        err = get_file(file, json_array_get(files, i), i == 0, &m->files[i]);
    return err;
}

bool zr_manifest_is_sound(const char *text, int64_t n)
{
    char sum[ZR_SUM_CHARS], trailer[TRAILER_BYTES + 1];
    int64_t body = n - TRAILER_BYTES;
    if (body < 1 || n > ZR_MANIFEST_MAX)
        return false;
    struct zr_checksum s = zr_checksum_of(text, body);
    zr_checksum_print(&s, sum);
    snprintf(trailer, sizeof trailer, "%s%s\"}\n", TRAILER, sum);
    return !memcmp(text + body, trailer, (size_t)TRAILER_BYTES);
}

bool zr_manifest_is_ours(const char *text, int64_t n)
{
    static const char head[] = "{\"format\":\"" ANY_FORMAT;
    int64_t n_head = (int64_t)sizeof head - 1, n_trailer = (int64_t)sizeof TRAILER - 1;
    return (n >= n_head && !memcmp(text, head, (size_t)n_head)) ||
           (n >= TRAILER_BYTES && !memcmp(text + n - TRAILER_BYTES, TRAILER, (size_t)n_trailer));
}

/* Prints what was read, and compares it with the text. Without memory, jansson 2.14 may leave out characters
 * of a text or a number and still report success. */
static int check_again(const char *file, const char *text, int64_t n, const struct zr_manifest *m)
{
    char *again;
    int64_t n_again;
    ZR_TRY(zr_manifest_print(m, &again, &n_again));
    bool same = n == n_again && !memcmp(text, again, (size_t)n);
    free(again);
    return same ? 0
                : zr_fail(ZERO_ERR_NOMEM,
                          "%s: not as this library writes it, or there is no memory to read it", file);
}

int zr_manifest_parse(const char *file, const char *text, int64_t n, struct zr_manifest *out)
{
    json_error_t why;
    *out = (struct zr_manifest){0};
    if (!zr_manifest_is_sound(text, n))
        return zr_fail(ZERO_ERR_IO,
                       "%s: the checksum at its end does not match the bytes before it: the file was cut "
                       "short or changed",
                       file);
    json_t *root = json_loadb(text, (size_t)n, JSON_REJECT_DUPLICATES, &why);
    if (!root)
        return zr_fail(ZERO_ERR_NOMEM, "%s: not JSON: byte %d: %.100s; or there is no memory to read it",
                       file, why.position, why.text);
    int err = get_all(file, root, out);
    json_decref(root);
    if (!err)
        err = check_again(file, text, n, out);
    if (err)
        zr_manifest_free(out);
    else
        out->sum = zr_checksum_of(text, n);
    return err;
}

/* ---- blocks ---- */

static const char blocks_magic[8] = "ZRBLOCK1";

int zr_blocks_print(const struct zr_checksum *sums, int64_t bytes, unsigned char **out, int64_t *n)
{
    int64_t count = zr_blocks_count(bytes);
    *n = (int64_t)sizeof blocks_magic + 8 + count * ZR_SUM_BYTES;
    unsigned char *p;
    ZR_TRY(ZR_ALLOC(p, *n, "the checksums of %lld blocks", (long long)count));
    memcpy(p, blocks_magic, sizeof blocks_magic);
    for (int i = 0; i < 8; i++)
        p[8 + i] = (unsigned char)((uint64_t)bytes >> 8 * i);
    for (int64_t i = 0; i < count; i++)
        zr_checksum_store(&sums[i], p + 16 + i * ZR_SUM_BYTES);
    *out = p;
    return 0;
}

int zr_blocks_parse(const char *file, const unsigned char *data, int64_t n, int64_t bytes,
                    struct zr_checksum **sums)
{
    int64_t count = zr_blocks_count(bytes);
    uint64_t reported = 0;
    if (n != 16 + count * ZR_SUM_BYTES || memcmp(data, blocks_magic, sizeof blocks_magic) != 0)
        return zr_fail(ZERO_ERR_IO, "%s: not the checksums of a file of %lld bytes", file, (long long)bytes);
    for (int i = 0; i < 8; i++)
        reported |= (uint64_t)data[8 + i] << 8 * i;
    if (reported != (uint64_t)bytes)
        return zr_fail(ZERO_ERR_IO, "%s: the checksums of a file of %llu bytes, not of %lld", file,
                       (unsigned long long)reported, (long long)bytes);
    struct zr_checksum *s;
    ZR_TRY(ZR_ALLOC(s, count + 1, "the checksums of %lld blocks", (long long)count));
    for (int64_t i = 0; i < count; i++)
        zr_checksum_load(data + 16 + i * ZR_SUM_BYTES, &s[i]);
    *sums = s;
    return 0;
}
