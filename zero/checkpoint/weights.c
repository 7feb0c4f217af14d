/* weights.c: the model's weights alone, in the files that others read and write:
 * model-0000i-of-0000N.safetensors and model.safetensors.index.json, as Hugging Face's libraries have them.
 * Rank 0 does the input and output, a piece at a time. */
#include "zero/checkpoint/safetensors.h"
#include "zero/context.h"

#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <jansson.h>

#define INDEX_NAME  "model.safetensors.index.json"
#define SINGLE_NAME "model.safetensors"
#define PIECE_BYTES (4 << 20)
#define MAX_INDEX   (256 << 20)

/* One weight of the map, resolved. */
struct weight {
    const char *name;
    int32_t tensor, file, entry;
    bool transposed;
    int64_t first, n; /* elements of the tensor */
    int64_t shape[8]; /* in the file */
    int32_t n_dims;
};

struct weights {
    struct zero_ctx *z;
    const char *dir;
    struct weight *list;
    int32_t n, n_files;
};

/* Whether an entry is of the whole tensor, or of which slice. */
static int resolve_slice(const struct zero_weight *m, int32_t i, const struct zr_tensor *t, int32_t n_dims,
                         bool *whole, int64_t *slice)
{
    char given[32];
    *whole = m->slice == 0;
    *slice = *whole ? 0 : (int64_t)m->slice - ZERO_SLICE(0);
    if (*whole || (*slice >= 0 && *slice < t->shape[0] && n_dims > 1))
        return 0;
    snprintf(given, sizeof given, *slice < 0 ? "%d" : "ZERO_SLICE(%d)", *slice < 0 ? m->slice : (int)*slice);
    if (n_dims < 2)
        return zr_fail(ZR_ERR_ARG,
                       "map[%d] (%s): slice is %s, but tensor %s has one dimension; allowed: 0, "
                       "all of it",
                       i, m->name, given, t->name);
    return zr_fail(ZR_ERR_ARG,
                   "map[%d] (%s): slice is %s of tensor %s; allowed: 0 (all of it), ZERO_SLICE(0) "
                   "to ZERO_SLICE(%lld)",
                   i, m->name, given, t->name, (long long)t->shape[0] - 1);
}

static int resolve_one(const struct zero_ctx *z, const struct zero_weight *m, int32_t i, struct weight *w)
{
    if (!m->name || !*m->name || !zr_is_utf8(m->name))
        return zr_fail(ZR_ERR_ARG, "map[%d]: name is NULL, empty or not UTF-8", i);
    if (m->tensor < 0 || m->tensor >= z->layout->n_tensors)
        return zr_fail(ZR_ERR_ARG, "map[%d] (%s): tensor is %d; allowed: 0..%d", i, m->name, m->tensor,
                       z->layout->n_tensors - 1);
    const struct zr_tensor *t = &z->layout->tensors[m->tensor];
    int32_t n_dims = 0;
    while (n_dims < 8 && t->shape[n_dims])
        n_dims++;
    bool whole;
    int64_t slice;
    int err = resolve_slice(m, i, t, n_dims, &whole, &slice);
    if (err)
        return err;
    *w = (struct weight){.name = m->name,
                         .tensor = m->tensor,
                         .transposed = m->transposed,
                         .n_dims = whole ? n_dims : n_dims - 1};
    memcpy(w->shape, t->shape + !whole, (size_t)w->n_dims * sizeof *w->shape);
    w->n = whole ? t->n_elems : t->n_elems / t->shape[0];
    w->first = slice * w->n;
    if (m->transposed && w->n_dims != 2)
        return zr_fail(ZR_ERR_ARG, "map[%d] (%s): transposed is set for %d dimensions; allowed: 2", i,
                       m->name, w->n_dims);
    if (m->transposed) {
        int64_t rows = w->shape[0];
        w->shape[0] = w->shape[1];
        w->shape[1] = rows;
    }
    return 0;
}

/* map NULL: every tensor under its own name. */
static int resolve(struct zero_ctx *z, const struct zero_weight *map, int32_t n, struct weights *out)
{
    int err = map ? zr_config_needs(&z->config.user, offsetof(struct zero_config, weight_size)) : 0;
    if (err)
        return err;
    n = map ? n : z->layout->n_tensors;
    out->list = calloc((size_t)n + 1, sizeof *out->list);
    if (!out->list)
        return zr_fail(ZR_ERR_NOMEM, "no memory for %d weights", n);
    out->n = n;
    err = n < 1 ? zr_fail(ZR_ERR_ARG, "n is %d; allowed: 1 and more", n) : 0;
    for (int32_t i = 0; !err && i < n; i++) {
        struct zero_weight w = {.name = z->layout->tensors[map ? 0 : i].name, .tensor = i};
        if (map)
            zr_copy_in(&w, sizeof w, map, i, z->config.user.weight_size);
        err = resolve_one(z, &w, i, &out->list[i]);
    }
    return err;
}

static int64_t elem_bytes(const struct weights *ws, const struct weight *w)
{
    return zr_dtype_bytes(ws->z->layout->tensors[w->tensor].dtype);
}

static void file_name(int32_t file, int32_t n_files, char out[64])
{
    snprintf(out, 64, "model-%05d-of-%05d.safetensors", file + 1, n_files);
}

/* A square of so many elements at a time, whose rows stay in the cache until all columns are used. */
#define SQUARE 16

static inline void turn(char *restrict dst, const char *restrict src, int64_t rows, int64_t columns,
                        int64_t size)
{
    for (int64_t r0 = 0; r0 < rows; r0 += SQUARE)
        for (int64_t c0 = 0; c0 < columns; c0 += SQUARE)
            for (int64_t r = r0; r < zr_min(r0 + SQUARE, rows); r++)
                for (int64_t c = c0; c < zr_min(c0 + SQUARE, columns); c++)
                    memcpy(dst + (c * rows + r) * size, src + (r * columns + c) * size, (size_t)size);
}

/* (rows, columns) -> (columns, rows) */
static void transpose(char *dst, const char *src, int64_t rows, int64_t columns, int64_t size)
{
    if (size == 4) /* known here, a copy is two instructions */
        turn(dst, src, rows, columns, 4);
    else if (size == 2)
        turn(dst, src, rows, columns, 2);
    else
        turn(dst, src, rows, columns, size);
}

/* ---- export ---- */

static void assign_files(struct weights *ws, int64_t max_file_bytes)
{
    int64_t bytes = 0;
    for (int32_t i = 0; i < ws->n; i++) {
        struct weight *w = &ws->list[i];
        int64_t own = w->n * elem_bytes(ws, w);
        if (i && bytes + own > max_file_bytes) {
            ws->n_files++;
            bytes = 0;
        }
        w->file = ws->n_files;
        bytes += own;
    }
    ws->n_files++;
}

/* Reads a weight on all ranks and writes it on rank 0. *local keeps rank 0's first failure, after which it
 * only takes part. Only a failure among ranks is returned. */
static int export_one(struct weights *ws, const struct weight *w, char *buffer, int64_t buffer_bytes, int fd,
                      const char *path, int64_t at, int *local)
{
    struct zero_ctx *z = ws->z;
    int64_t size = elem_bytes(ws, w), piece = w->transposed ? w->n : zr_min(w->n, PIECE_BYTES / size);
    for (int64_t k = 0; k < w->n; k += piece) {
        int64_t n = zr_min(piece, w->n - k);
        char *dst = buffer && !*local ? buffer : NULL;
        int err = zr_values_read(z, w->tensor, ZR_VALUE_PARAM, w->first + k, n, dst);
        if (err)
            return err;
        if (!dst)
            continue;
        if (w->transposed) { /* shape is the file's: the model has it the other way round */
            transpose(buffer + buffer_bytes / 2, buffer, w->shape[1], w->shape[0], size);
            dst = buffer + buffer_bytes / 2;
        }
        *local = zr_file_write(z->files, fd, path, dst, n * size, at + k * size);
    }
    return 0;
}

static int begin_file(struct weights *ws, int32_t file, char path[ZR_PATH_BYTES], int *fd,
                      struct zr_st_entry *entries)
{
    char name[80], *head = NULL;
    int64_t n = 0, head_bytes;
    for (int32_t i = 0; i < ws->n; i++) {
        const struct weight *w = &ws->list[i];
        if (w->file != file)
            continue;
        entries[n] = (struct zr_st_entry){.name = (char *)(uintptr_t)w->name,
                                          .dtype = zr_st_dtype_of(ws->z->layout->tensors[w->tensor].dtype),
                                          .n_dims = w->n_dims};
        memcpy(entries[n++].shape, w->shape, sizeof w->shape);
    }
    file_name(file, ws->n_files, name);
    int err = zr_path_join(path, ws->dir, name);
    if (!err)
        err = zr_st_head(entries, n, "pt", &head, &head_bytes);
    if (!err)
        err = zr_file_open(ws->z->files, path, O_WRONLY | O_CREAT | O_TRUNC, fd);
    if (!err)
        err = zr_file_write(ws->z->files, *fd, path, head, head_bytes, 0);
    free(head);
    return err;
}

static int write_index(const struct weights *ws)
{
    char path[ZR_PATH_BYTES], name[64];
    int64_t total = 0;
    json_t *map = json_object();
    bool ok = map != NULL;
    for (int32_t i = 0; i < ws->n; i++) {
        file_name(ws->list[i].file, ws->n_files, name);
        ok = ok && !json_object_set_new(map, ws->list[i].name, json_string(name));
        total += ws->list[i].n * elem_bytes(ws, &ws->list[i]);
    }
    json_t *root =
        json_pack("{s:{s:I}, s:o}", "metadata", "total_size", (json_int_t)total, "weight_map", map);
    char *text = ok && root ? json_dumps(root, JSON_INDENT(2)) : NULL;
    json_decref(root);
    if (!text)
        return zr_fail(ZR_ERR_NOMEM, "no memory for the index of %d weights", ws->n);
    int err = zr_path_join(path, ws->dir, INDEX_NAME);
    if (!err && strlen(text) > MAX_INDEX)
        err = zr_fail(ZR_ERR_ARG, "the index of %d weights has %zu bytes; allowed: %d", ws->n, strlen(text),
                      MAX_INDEX);
    if (!err)
        err = zr_file_store(ws->z->files, path, text, (int64_t)strlen(text));
    free(text);
    return err ? err : zr_folder_sync(ws->z->files, ws->dir);
}

static int export_files(struct weights *ws)
{
    struct zero_ctx *z = ws->z;
    bool writes = z->world.rank == 0, exists;
    int local = 0, err = 0;
    int64_t buffer_bytes = PIECE_BYTES;
    for (int32_t i = 0; i < ws->n; i++)
        if (ws->list[i].transposed)
            buffer_bytes = zr_max(buffer_bytes, 2 * ws->list[i].n * elem_bytes(ws, &ws->list[i]));
    char *buffer = writes ? malloc((size_t)buffer_bytes) : NULL;
    struct zr_st_entry *entries = writes ? malloc((size_t)ws->n * sizeof *entries) : NULL;
    if (writes && (!buffer || !entries))
        local = zr_fail(ZR_ERR_NOMEM, "no memory for %lld bytes of weights", (long long)buffer_bytes);
    if (writes && !local && zr_folder_make(z->files, ws->dir, &exists) && !exists)
        local = ZR_ERR_IO;
    for (int32_t file = 0; !err && file < ws->n_files; file++) {
        char path[ZR_PATH_BYTES];
        int fd = -1;
        int64_t k = 0;
        if (writes && !local)
            local = begin_file(ws, file, path, &fd, entries);
        for (int32_t i = 0; !err && i < ws->n; i++)
            if (ws->list[i].file == file)
                err = export_one(ws, &ws->list[i], buffer, buffer_bytes, fd, path,
                                 writes && !local ? entries[k++].begin : 0, &local);
        if (fd >= 0 && !local)
            local = zr_file_sync(z->files, fd, path);
        int closed = fd >= 0 ? zr_file_close(z->files, fd, path) : 0;
        local = local ? local : closed;
    }
    if (writes && !err && !local)
        local = write_index(ws);
    free(buffer);
    free(entries);
    return err ? err : zr_agree_in_run(z, local);
}

static int check_call(struct zero_ctx *z, const char *dir, const char *call, enum zr_called_name name)
{
    if (!z || !dir || !*dir)
        return zr_fail(ZR_ERR_ARG, "%s: %s", call, !z ? "z is NULL" : "dir is NULL or empty");
    int err = zr_refuse_in_parts(z, call);
    if (!err)
        err = zr_refuse_in_bracket(z, call);
    if (!err)
        err = zr_engine_check(z->engine);
    if (!err)
        zr_engine_called(z->engine, name, -1, 0);
    return err;
}

int zero_export(zero_ctx *z, const char *dir, const struct zero_weight *map, int32_t n,
                int64_t max_file_bytes)
{
    ZR_IN_CALL(z, ZR_CALLED_EXPORT, false, -1);
    int err = check_call(z, dir, "zero_export", ZR_CALLED_EXPORT);
    if (!err)
        err = zr_awaited_refuse(z, "zero_export", -1);
    if (err)
        return err;
    struct weights ws = {.z = z, .dir = dir};
    err = zr_agree_in_run(z, resolve(z, map, n, &ws));
    if (!err) {
        assign_files(&ws, max_file_bytes > 0 ? max_file_bytes : INT64_C(5000000000));
        err = export_files(&ws);
    }
    free(ws.list);
    return err ? zr_fail_more(err, "zero_export") : 0;
}

/* ---- import ---- */

struct source {
    char name[256];
    int fd;
    struct zr_st st;
};

struct sources {
    struct source *list;
    int32_t n;
};

static void close_sources(const struct zr_files *fs, struct sources *s)
{
    for (int32_t i = 0; i < s->n; i++) {
        if (s->list[i].fd >= 0)
            zr_file_close(fs, s->list[i].fd, s->list[i].name);
        zr_st_free(&s->list[i].st);
    }
    free(s->list);
}

static int open_source(const struct weights *ws, struct sources *s, const char *name, int32_t *out)
{
    const struct zr_files *fs = ws->z->files;
    char path[ZR_PATH_BYTES];
    int64_t bytes;
    for (*out = 0; *out < s->n; ++*out)
        if (!strcmp(s->list[*out].name, name))
            return 0;
    if (!*name || *name == '.' || strchr(name, '/') || strlen(name) >= sizeof s->list->name)
        return zr_fail(ZR_ERR_IO, "%s/" INDEX_NAME ": \"%.100s\" is not the name of a file beside it",
                       ws->dir, name);
    struct source *more = realloc(s->list, ((size_t)s->n + 1) * sizeof *more);
    if (!more)
        return zr_fail(ZR_ERR_NOMEM, "no memory for %d files", s->n + 1);
    s->list = more;
    struct source *f = &s->list[s->n];
    *f = (struct source){.fd = -1};
    snprintf(f->name, sizeof f->name, "%s", name);
    int err = zr_path_join(path, ws->dir, name);
    if (!err)
        err = zr_file_open(fs, path, O_RDONLY, &f->fd);
    if (err)
        return err;
    s->n++;
    err = zr_file_size(fs, f->fd, path, &bytes);
    return err ? err : zr_st_read(fs, f->fd, path, bytes, &f->st);
}

/* The index, or NULL where the folder has one file only. */
static int read_index(const struct weights *ws, json_t **out)
{
    char path[ZR_PATH_BYTES], *text;
    int64_t n;
    bool missing = false;
    json_error_t why;
    *out = NULL;
    int err = zr_path_join(path, ws->dir, INDEX_NAME);
    if (!err)
        err = zr_file_load(ws->z->files, path, MAX_INDEX, &missing, &text, &n);
    if (err)
        return missing ? 0 : err;
    *out = json_loadb(text, (size_t)n, JSON_REJECT_DUPLICATES, &why);
    free(text);
    if (!json_is_object(json_object_get(*out, "weight_map"))) {
        json_decref(*out);
        *out = NULL;
        return zr_fail(ZR_ERR_IO, "%s: has no weight_map, or is no JSON", path);
    }
    return 0;
}

static int by_name(const void *a, const void *b)
{
    return strcmp((*(struct weight *const *)a)->name, (*(struct weight *const *)b)->name);
}

/* Which entry is which weight: through names, sorted once. */
static void match(struct weights *ws, struct weight **sorted, const struct source *f, int32_t file)
{
    for (int64_t k = 0; k < f->st.n_entries; k++) {
        struct weight key = {.name = f->st.entries[k].name}, *p = &key;
        struct weight **found = bsearch(&p, sorted, (size_t)ws->n, sizeof *sorted, by_name);
        if (found && (*found)->file == file)
            (*found)->entry = (int32_t)k;
    }
}

static int check_weight(const struct weights *ws, const struct sources *s, const struct weight *w)
{
    const struct zr_tensor *t = &ws->z->layout->tensors[w->tensor];
    const char *file = s->list[w->file].name;
    if (w->entry < 0)
        return zr_fail(ZR_ERR_IO, "%s/%s: tensor %s is not there", ws->dir, file, w->name);
    const struct zr_st_entry *e = &s->list[w->file].st.entries[w->entry];
    if (e->n_dims != w->n_dims || memcmp(e->shape, w->shape, (size_t)w->n_dims * sizeof *w->shape) != 0) {
        char theirs[ZR_SHAPE_CHARS], ours[ZR_SHAPE_CHARS];
        zr_shape_print(e->shape, e->n_dims, theirs);
        zr_shape_print(w->shape, w->n_dims, ours);
        return zr_fail(ZR_ERR_ARG, "%s/%s: tensor %s has shape %s; for %s of this model it should be %s",
                       ws->dir, file, w->name, theirs, t->name, ours);
    }
    const char *own = zr_st_dtype_of(t->dtype);
    if (t->buffer && strcmp(e->dtype, own) != 0)
        return zr_fail(ZR_ERR_NOTSUP, "%s/%s: tensor %s is %s, but %s is a buffer and %s", ws->dir, file,
                       w->name, e->dtype, t->name, own);
    if (!t->buffer && strcmp(e->dtype, "F32") != 0 && strcmp(e->dtype, "BF16") != 0)
        return zr_fail(ZR_ERR_NOTSUP, "%s/%s: tensor %s is %s; allowed: F32, BF16", ws->dir, file, w->name,
                       e->dtype);
    if (!t->grad && strcmp(e->dtype, own) != 0)
        return zr_fail(ZR_ERR_NOTSUP, "%s/%s: tensor %s is %s, but %s is frozen and %s", ws->dir, file,
                       w->name, e->dtype, t->name, own);
    return 0;
}

static int find_weights(struct weights *ws, struct sources *s)
{
    json_t *index;
    int err = read_index(ws, &index);
    if (err)
        return err;
    struct weight **sorted = malloc((size_t)ws->n * sizeof *sorted);
    if (!sorted)
        err = zr_fail(ZR_ERR_NOMEM, "no memory for %d weights", ws->n);
    for (int32_t i = 0; !err && i < ws->n; i++) {
        struct weight *w = sorted[i] = &ws->list[i];
        const char *name =
            index ? json_string_value(json_object_get(json_object_get(index, "weight_map"), w->name))
                  : SINGLE_NAME;
        w->entry = -1;
        err = name ? open_source(ws, s, name, &w->file)
                   : zr_fail(ZR_ERR_IO, "%s/" INDEX_NAME ": tensor %s is not in it", ws->dir, w->name);
    }
    if (!err)
        qsort(sorted, (size_t)ws->n, sizeof *sorted, by_name);
    for (int32_t f = 0; !err && f < s->n; f++)
        match(ws, sorted, &s->list[f], f);
    for (int32_t i = 0; !err && i < ws->n; i++)
        err = check_weight(ws, s, &ws->list[i]);
    free(sorted);
    json_decref(index);
    return err;
}

/* Trainable weights go in as fp32 masters, which the model's own are rounded from; others have none. */
static int64_t import_bytes(const struct zr_tensor *t)
{
    return t->grad ? (int64_t)sizeof(float) : zr_dtype_bytes(t->dtype);
}

static int import_one(struct weights *ws, const struct sources *s, const struct weight *w, char *buffer,
                      char *turned, int *local, bool *stopped)
{
    struct zero_ctx *z = ws->z;
    const struct zr_tensor *t = &z->layout->tensors[w->tensor];
    int64_t size = import_bytes(t);
    int64_t piece = w->transposed ? w->n : zr_min(w->n, PIECE_BYTES / size);
    for (int64_t k = 0; k < w->n; k += piece) {
        int64_t n = zr_min(piece, w->n - k);
        char *src = buffer;
        if (s && !*local) {
            const struct source *f = &s->list[w->file];
            const struct zr_st_entry *e = &f->st.entries[w->entry];
            int64_t theirs = zr_st_dtype_bytes(e->dtype);
            char *at = buffer +
                       n * (size - theirs); /* at the end, so that widening in place reads before it writes */
            if (size < theirs)
                at = buffer;
            *local = zr_file_read(z->files, f->fd, f->name, at, n * theirs, e->begin + k * theirs);
            for (int64_t i = 0; !*local && size > theirs && i < n; i++) {
                uint16_t narrow;
                memcpy(&narrow, at + i * 2, 2);
                uint32_t wide = (uint32_t)narrow << 16;
                memcpy(buffer + i * 4, &wide, 4);
            }
            if (!*local && w->transposed) {
                transpose(turned, buffer, w->shape[0], w->shape[1], size);
                src = turned;
            }
        }
        /* All learn whether rank 0 could read it, and then none writes it. */
        double bad = s && *local;
        int err = zr_engine_mean(z->engine, &bad, 1);
        if (err || bad > 0) {
            *stopped = true;
            return err;
        }
        err = zero_write(z, w->tensor, t->grad ? ZERO_VALUE_MASTER : ZERO_VALUE_PARAM, w->first + k, n, src);
        if (err)
            return err;
    }
    return 0;
}

int zero_import(zero_ctx *z, const char *dir, const struct zero_weight *map, int32_t n)
{
    ZR_IN_CALL(z, ZR_CALLED_IMPORT, false, -1);
    int err = z ? zr_refuse_in_all(z, "zero_import") : 0;
    if (!err)
        err = check_call(z, dir, "zero_import", ZR_CALLED_IMPORT);
    if (err)
        return err;
    struct weights ws = {.z = z, .dir = dir};
    struct sources s = {0};
    char *buffer = NULL;
    bool reads = z->world.rank == 0;
    err = resolve(z, map, n, &ws);
    if (!err && reads)
        err = find_weights(&ws, &s);
    int64_t bytes = PIECE_BYTES;
    for (int32_t i = 0; i < ws.n; i++)
        if (ws.list[i].transposed)
            bytes =
                zr_max(bytes, ws.list[i].n * zr_max(4, import_bytes(&z->layout->tensors[ws.list[i].tensor])));
    if (!err && reads) {
        buffer = malloc((size_t)bytes * 2);
        err =
            buffer ? 0 : zr_fail(ZR_ERR_NOMEM, "no memory for %lld bytes of weights", (long long)(2 * bytes));
    }
    err = zr_agree_in_run(z, err);
    int local = 0;
    bool begun = !err, stopped = false;
    for (int32_t i = 0; !err && !stopped && i < ws.n; i++)
        err = import_one(&ws, reads ? &s : NULL, &ws.list[i], buffer, reads ? buffer + bytes : NULL, &local,
                         &stopped);
    if (begun && !err)
        err = zr_agree_in_run(z, local);
    struct zr_kept kept;
    zr_keep(&kept, err);
    close_sources(z->files, &s);
    free(buffer);
    free(ws.list);
    return err ? zr_fail_more(zr_say_again(&kept), "zero_import") : 0;
}
