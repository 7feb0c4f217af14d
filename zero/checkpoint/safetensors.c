/* SPDX-License-Identifier: Apache-2.0 */
/* safetensors.c: reads and writes headers of safetensors files. */
#include "zero/checkpoint/safetensors.h"
#include "kernels/alloc.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <jansson.h>

#define HEAD_ALIGN 64

/* All dtypes of the format, including those that the library does not use. */
static const struct {
    const char *name;
    int64_t bits;
} dtypes[] = {
#define X(NAME, bytes, name) {#NAME, 8 * bytes},
    ZR_DTYPES(X)
#undef X
        {"C64", 64},
    {"F64", 64},
    {"U64", 64},
    {"U32", 32},
    {"I16", 16},
    {"U16", 16},
    {"I8", 8},
    {"U8", 8},
    {"BOOL", 8},
    {"F8_E4M3", 8},
    {"F8_E5M2", 8},
    {"F8_E8M0", 8},
    {"F8_E4M3FNUZ", 8},
    {"F8_E5M2FNUZ", 8},
    {"F6_E2M3", 6},
    {"F6_E3M2", 6},
    {"F4", 4},
};
#define N_DTYPES (sizeof dtypes / sizeof *dtypes)

static int64_t dtype_bits(const char *dtype)
{
    for (size_t i = 0; i < N_DTYPES; i++)
        if (!strcmp(dtype, dtypes[i].name))
            return dtypes[i].bits;
    return 0;
}

int64_t zr_st_dtype_bytes(const char *dtype)
{
    return dtype_bits(dtype) / 8;
}

const char *zr_st_dtype_of(enum zero_dtype t)
{
    switch (t) {
#define X(NAME, bytes, name)                                                                                 \
    case ZERO_##NAME:                                                                                        \
        return #NAME;
        ZR_DTYPES(X)
#undef X
    }
    return "unknown";
}

void zr_shape_print(const int64_t *shape, int32_t n_dims, char text[ZR_SHAPE_CHARS])
{
    size_t at = 0;
    text[0] = 0;
    for (int32_t i = 0; i < n_dims && at < ZR_SHAPE_CHARS - 1; i++)
        at += (size_t)snprintf(text + at, ZR_SHAPE_CHARS - at, "%s%" PRId64, i ? ", " : "[", shape[i]);
    if (at < ZR_SHAPE_CHARS - 1)
        snprintf(text + at, ZR_SHAPE_CHARS - at, n_dims ? "]" : "[]");
}

void zr_st_free(struct zr_st *st)
{
    for (int64_t i = 0; i < st->n_entries; i++)
        free(st->entries[i].name);
    free(st->entries);
    *st = (struct zr_st){0};
}

/* ---- reading ---- */

#define LFS_POINTER "version https://git-lfs.github.com/spec/"

bool zr_is_lfs_pointer(const char *text, int64_t n)
{
    int64_t k = (int64_t)sizeof LFS_POINTER - 1;
    return n >= k && !memcmp(text, LFS_POINTER, (size_t)k);
}

static int bad(const char *file, const char *tensor, const char *what)
{
    return zr_fail(ZERO_ERR_IO, "%s: tensor %s: %s", file, tensor, what);
}

static int read_dtype(const char *file, const char *name, const json_t *o, struct zr_st_entry *e)
{
    const char *text = json_string_value(json_object_get(o, "dtype"));
    if (!text)
        return bad(file, name, "dtype is not a string");
    for (size_t i = 0; i < N_DTYPES; i++)
        if (!strcmp(text, dtypes[i].name))
            e->dtype = dtypes[i].name;
    return e->dtype ? 0
                    : zr_fail(ZERO_ERR_IO, "%s: tensor %s: dtype is %.20s, which the format does not have",
                              file, name, text);
}

/* *bytes: bytes of all elements. */
static int read_shape(const char *file, const char *name, const json_t *o, struct zr_st_entry *e,
                      int64_t *bytes)
{
    const json_t *shape = json_object_get(o, "shape");
    if (!json_is_array(shape))
        return bad(file, name, "shape is not an array");
    if (json_array_size(shape) > ZR_ST_MAX_DIMS)
        return zr_fail(ZERO_ERR_IO, "%s: tensor %s: shape has %zu dimensions; allowed: %d", file, name,
                       json_array_size(shape), ZR_ST_MAX_DIMS);
    e->n_dims = (int32_t)json_array_size(shape);
    int64_t bits = dtype_bits(e->dtype);
    for (int32_t i = 0; i < e->n_dims; i++) {
        const json_t *d = json_array_get(shape, (size_t)i);
        e->shape[i] = json_integer_value(d);
        if (!json_is_integer(d) || e->shape[i] < 0)
            return bad(file, name, "shape is not made of whole numbers of 0 and more");
        if (__builtin_mul_overflow(bits, e->shape[i], &bits))
            return bad(file, name, "shape has more bytes than a file can have");
    }
    if (bits % 8)
        return zr_fail(ZERO_ERR_IO,
                       "%s: tensor %s: its %" PRId64 " bits of %s are not a whole number of bytes", file,
                       name, bits, e->dtype);
    *bytes = bits / 8;
    return 0;
}

static int read_entry(const char *file, const char *name, const json_t *o, int64_t data_at,
                      int64_t file_bytes, struct zr_st_entry *e)
{
    if (!json_is_object(o) || json_object_size(o) != 3)
        return bad(file, name, "is not described by dtype, shape and data_offsets alone");
    int64_t bytes = 0;
    ZR_TRY(read_dtype(file, name, o, e));
    ZR_TRY(read_shape(file, name, o, e, &bytes));
    const json_t *at = json_object_get(o, "data_offsets"), *begin = json_array_get(at, 0),
                 *end = json_array_get(at, 1);
    if (json_array_size(at) != 2 || !json_is_integer(begin) || !json_is_integer(end))
        return bad(file, name, "data_offsets is not an array of two whole numbers");
    int64_t b = json_integer_value(begin), n = json_integer_value(end);
    if (b < 0 || n < b || n > file_bytes - data_at)
        return zr_fail(ZERO_ERR_IO,
                       "%s: tensor %s: data_offsets [%" PRId64 ", %" PRId64 "] are not within the %" PRId64
                       " bytes of data",
                       file, name, b, n, file_bytes - data_at);
    if (n - b != bytes) {
        char shape[ZR_SHAPE_CHARS];
        zr_shape_print(e->shape, e->n_dims, shape);
        return zr_fail(ZERO_ERR_IO,
                       "%s: tensor %s: %" PRId64 " bytes of data, but %s of shape %s has %" PRId64, file,
                       name, n - b, e->dtype, shape, bytes);
    }
    e->begin = data_at + b;
    e->end = data_at + n;
    e->name = strdup(name);
    return e->name ? 0 : zr_fail(ZERO_ERR_NOMEM, "%s: no memory for the name of a tensor", file);
}

void zr_st_export_id(const json_t *metadata, char id[ZR_EXPORT_ID_BYTES])
{
    const char *text = json_string_value(json_object_get(metadata, ZR_EXPORT_KEY));
    bool is_id = text && strlen(text) == ZR_EXPORT_ID_BYTES - 1 &&
                 strspn(text, "0123456789abcdef") == ZR_EXPORT_ID_BYTES - 1;
    snprintf(id, ZR_EXPORT_ID_BYTES, "%s", is_id ? text : "");
}

static int check_metadata(const char *file, const json_t *o)
{
    const char *key;
    json_t *value;
    bool strings = json_is_object(o);
    json_object_foreach((json_t *)(uintptr_t)o, key, value) strings &= json_is_string(value);
    return strings ? 0 : zr_fail(ZERO_ERR_IO, "%s: __metadata__ is not an object of strings", file);
}

static int by_begin(const void *a, const void *b)
{
    const struct zr_st_entry *x = a, *y = b;
    if (x->begin != y->begin)
        return x->begin < y->begin ? -1 : 1;
    return (x->end > y->end) - (x->end < y->end);
}

static int check_contiguous(const char *file, const struct zr_st *st, int64_t data_at, int64_t file_bytes)
{
    int64_t end = data_at;
    for (int64_t i = 0; i < st->n_entries; i++) {
        const struct zr_st_entry *e = &st->entries[i];
        if (e->begin < end)
            return zr_fail(ZERO_ERR_IO, "%s: tensors %s and %s overlap", file, st->entries[i - 1].name,
                           e->name);
        if (e->begin > end)
            return zr_fail(ZERO_ERR_IO, "%s: a hole of %" PRId64 " bytes before tensor %s", file,
                           e->begin - end, e->name);
        end = e->end;
    }
    if (end != file_bytes)
        return zr_fail(ZERO_ERR_IO, "%s: %" PRId64 " bytes after the last tensor", file, file_bytes - end);
    return 0;
}

static int read_entries(const char *file, const json_t *root, int64_t data_at, int64_t file_bytes,
                        struct zr_st *out)
{
    const char *key;
    json_t *value;
    int err = 0;
    ZR_TRY(ZR_ZALLOC(out->entries, json_object_size(root) + 1, "%zu tensors of %s", json_object_size(root),
                     file));
    json_object_foreach((json_t *)(uintptr_t)root, key, value)
    {
        if (!strcmp(key, "__metadata__")) {
            err = check_metadata(file, value);
            zr_st_export_id(value, out->export_id);
        } else {
            err = read_entry(file, key, value, data_at, file_bytes, &out->entries[out->n_entries]);
            out->n_entries += !err;
        }
        if (err)
            return err;
    }
    qsort(out->entries, (size_t)out->n_entries, sizeof *out->entries, by_begin);
    return check_contiguous(file, out, data_at, file_bytes);
}

int zr_st_parse(const char *file, const char *json, int64_t n, int64_t file_bytes, struct zr_st *out)
{
    json_error_t why;
    *out = (struct zr_st){0};
    if (n < 2 || json[0] != '{')
        return zr_fail(ZERO_ERR_IO, "%s: the header does not begin with {", file);
    int64_t used = n;
    while (used > 1 && json[used - 1] == ' ')
        used--;
    if (json[used - 1] != '}')
        return zr_fail(ZERO_ERR_IO, "%s: the header does not end with } and spaces", file);
    json_t *root = json_loadb(json, (size_t)used, JSON_REJECT_DUPLICATES, &why);
    if (!root)
        return zr_fail(ZERO_ERR_IO, "%s: the header is not JSON: byte %d: %.100s", file, why.position,
                       why.text);
    int err = read_entries(file, root, 8 + n, file_bytes, out);
    json_decref(root);
    if (err)
        zr_st_free(out);
    return err;
}

int zr_st_read(const struct zr_files *fs, int fd, const char *file, int64_t file_bytes, struct zr_st *out)
{
    unsigned char length[8];
    uint64_t n = 0;
    *out = (struct zr_st){0};
    if (file_bytes < 8)
        return zr_fail(ZERO_ERR_IO,
                       "%s: has %" PRId64 " bytes, fewer than the 8 that a safetensors file begins with",
                       file, file_bytes);
    ZR_TRY(zr_file_read(fs, fd, file, length, sizeof length, 0));
    for (int i = 0; i < 8; i++)
        n |= (uint64_t)length[i] << 8 * i;
    if (!memcmp(length, LFS_POINTER, sizeof length)) {
        char text[sizeof LFS_POINTER - 1];
        int64_t n_text = file_bytes < (int64_t)sizeof text ? file_bytes : (int64_t)sizeof text;
        ZR_TRY(zr_file_read(fs, fd, file, text, n_text, 0));
        if (zr_is_lfs_pointer(text, n_text))
            return zr_fail(ZERO_ERR_IO, ZR_LFS_POINTER, file);
    }
    if (n > ZR_ST_MAX_HEADER || n > (uint64_t)file_bytes - 8)
        return zr_fail(ZERO_ERR_IO,
                       "%s: the header has %" PRIu64 " bytes; allowed: %d, and within the file's %" PRId64,
                       file, n, ZR_ST_MAX_HEADER, file_bytes);
    char *json;
    ZR_TRY(ZR_ALLOC(json, (int64_t)n + 1, "the header of %s, which has %" PRIu64 " bytes", file, n));
    int err = zr_file_read(fs, fd, file, json, (int64_t)n, 8);
    if (!err)
        err = zr_st_parse(file, json, (int64_t)n, file_bytes, out);
    free(json);
    return err;
}

/* ---- writing ---- */

/* Checks the rules of RFC 3629: no overlong forms, no surrogates, nothing above U+10FFFF. */
bool zr_is_utf8(const char *text)
{
    for (const unsigned char *p = (const unsigned char *)text; *p;) {
        int more = *p < 0x80                  ? 0
                   : *p >= 0xc2 && *p <= 0xdf ? 1
                   : (*p & 0xf0) == 0xe0      ? 2
                   : *p >= 0xf0 && *p <= 0xf4 ? 3
                                              : -1;
        unsigned char lo = *p == 0xe0   ? 0xa0
                           : *p == 0xf0 ? 0x90
                                        : 0x80,
                      hi = *p == 0xed   ? 0x9f
                           : *p == 0xf4 ? 0x8f
                                        : 0xbf;
        if (more < 0)
            return false;
        for (p++; more > 0; more--, p++, lo = 0x80, hi = 0xbf)
            if (*p < lo || *p > hi)
                return false;
    }
    return true;
}

/* Counts escapes as json_dumps writes them without JSON_ENSURE_ASCII. */
int64_t zr_json_bytes(const char *text)
{
    int64_t n = 2;
    for (const unsigned char *p = (const unsigned char *)text; *p; p++)
        n += *p == '"' || *p == '\\' || (*p >= '\b' && *p <= '\r' && *p != '\v') ? 2 : *p < 0x20 ? 6 : 1;
    return n;
}

static int64_t n_digits(int64_t x)
{
    int64_t n = 1;
    for (; x > 9; x /= 10)
        n++;
    return n;
}

int64_t zr_st_entry_bytes(const struct zr_st_entry *e)
{
    static const char rest[] = ":{\"dtype\":\"\",\"shape\":[],\"data_offsets\":[,]},";
    int64_t n = zr_json_bytes(e->name) + (int64_t)(strlen(e->dtype) + sizeof rest - 1) + n_digits(e->begin) +
                n_digits(e->end) + (e->n_dims ? e->n_dims - 1 : 0);
    for (int32_t i = 0; i < e->n_dims; i++)
        n += n_digits(e->shape[i]);
    return n;
}

static json_t *describe(const struct zr_st_entry *e, int64_t data_at)
{
    json_t *shape = json_array();
    for (int32_t i = 0; shape && i < e->n_dims; i++)
        if (json_array_append_new(shape, json_integer(e->shape[i]))) {
            json_decref(shape);
            return NULL;
        }
    return json_pack("{s:s, s:o, s:[I, I]}", "dtype", e->dtype, "shape", shape, "data_offsets",
                     (json_int_t)(e->begin - data_at), (json_int_t)(e->end - data_at));
}

int zr_st_head(struct zr_st_entry *entries, int64_t n_entries, const char *export_id, char **out,
               int64_t *n_out)
{
    /* size: an upper bound of the JSON. Braces, __metadata__ and padding take less than 3 * HEAD_ALIGN. */
    int64_t end = 0, size = 3 * HEAD_ALIGN;
    json_t *root = json_object();
    int err = root ? 0 : ZERO_ERR_NOMEM;
    if (!err && export_id &&
        json_object_set_new(root, "__metadata__",
                            json_pack("{s:s, s:s}", "format", "pt", ZR_EXPORT_KEY, export_id)))
        err = ZERO_ERR_NOMEM;
    for (int64_t i = 0; !err && i < n_entries; i++) {
        struct zr_st_entry *e = &entries[i];
        int64_t bytes = zr_st_dtype_bytes(e->dtype);
        for (int32_t d = 0; d < e->n_dims; d++)
            bytes *= e->shape[d];
        e->begin = end;
        e->end = end += bytes;
        size += zr_st_entry_bytes(e);
        if (!zr_is_utf8(e->name))
            err = zr_fail(ZERO_ERR_ARG, "tensor %s: the name is not UTF-8, which safetensors are written in",
                          e->name);
        else if (json_object_set_new(root, e->name, describe(e, 0)))
            err = ZERO_ERR_NOMEM;
    }
    if (!err && size > ZR_ST_MAX_HEADER)
        err = zr_fail(ZERO_ERR_ARG, "the header of %lld tensors would have %lld bytes; safetensors allows %d",
                      (long long)n_entries, (long long)size, ZR_ST_MAX_HEADER);
    char *text = err ? NULL : json_dumps(root, JSON_COMPACT);
    json_decref(root);
    int64_t used = text ? (int64_t)strlen(text) : 0,
            n = (8 + used + HEAD_ALIGN - 1) / HEAD_ALIGN * HEAD_ALIGN;
    char *head = text ? malloc((size_t)n) : NULL;
    if (err != ZERO_ERR_ARG && !head) /* ZERO_ERR_ARG has its message already */
        err = zr_fail(ZERO_ERR_NOMEM, "no memory for a header of %lld tensors", (long long)n_entries);
    if (!err) {
        for (int i = 0; i < 8; i++)
            head[i] = (char)((uint64_t)(n - 8) >> 8 * i);
        memcpy(head + 8, text, (size_t)used);
        memset(head + 8 + used, ' ', (size_t)(n - 8 - used));
        for (int64_t i = 0; i < n_entries; i++) {
            entries[i].begin += n;
            entries[i].end += n;
        }
        *out = head;
        *n_out = n;
    }
    free(text);
    return err;
}
