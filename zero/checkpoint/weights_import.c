/* SPDX-License-Identifier: Apache-2.0 */
/* weights_import.c: zero_import reads weights from files of zero_export and of other programs. */
#include "kernels/alloc.h"
#include "zero/checkpoint/float_values.h"
#include "zero/checkpoint/weights_inside.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <jansson.h>

/* A file that weights are read from. */
struct source {
    char name[256], path[ZR_PATH_BYTES];
    int fd;
    struct zr_st st;
};

struct sources {
    struct source *list;
    int32_t n;
    /* The only file, if the program has named one, and its folder. NULL: the program has named a folder. */
    const char *single;
    char folder[ZR_PATH_BYTES];
    /* Id of the export that these files belong to, and the first file that has it. "": no file has an id
     * yet. */
    char export_id[ZR_EXPORT_ID_BYTES], id_from[256];
};

static void close_sources(const struct zr_files *fs, struct sources *s)
{
    for (int32_t i = 0; i < s->n; i++) {
        if (s->list[i].fd >= 0)
            zr_file_close(fs, s->list[i].fd, s->list[i].path);
        zr_st_free(&s->list[i].st);
    }
    free(s->list);
}

/* Checks that a file belongs to the same export as the files before it. Files without an id, such as those of
 * other programs, are not checked. */
static int check_export(const struct zr_weights *ws, struct sources *s, const char *file, const char *id)
{
    if (!*id || !strcmp(id, s->export_id))
        return 0;
    if (*s->export_id)
        return zr_fail(
            ZERO_ERR_IO,
            "%s/%s: it belongs to export %s, but %s belongs to export %s: the folder mixes files of "
            "two exports",
            ws->dir, file, id, s->id_from, s->export_id);
    snprintf(s->export_id, sizeof s->export_id, "%s", id);
    snprintf(s->id_from, sizeof s->id_from, "%s", file);
    return 0;
}

/* Opens a file of the folder, unless it is open, and sets *out to its number. */
static int open_source(const struct zr_weights *ws, struct sources *s, const char *name, int32_t *out)
{
    const struct zr_files *fs = ws->z->files;
    int64_t bytes;
    bool missing;
    for (*out = 0; *out < s->n; ++*out)
        if (!strcmp(s->list[*out].name, name))
            return 0;
    if (!*name || *name == '.' || strchr(name, '/') || strlen(name) >= sizeof s->list->name)
        return zr_fail(ZERO_ERR_IO,
                       "%s/" ZR_WEIGHTS_INDEX ": \"%.100s\" is not the name of a file in the same folder",
                       ws->dir, name);
    ZR_TRY(ZR_GROW(s->list, s->n + 1, "%d files", s->n + 1));
    struct source *f = &s->list[s->n];
    *f = (struct source){.fd = -1};
    snprintf(f->name, sizeof f->name, "%s", name);
    ZR_TRY(zr_path_join(f->path, ws->dir, name));
    ZR_TRY(zr_file_find_linked(fs, f->path, &missing, &f->fd));
    s->n++;
    ZR_TRY(zr_file_size(fs, f->fd, f->path, &bytes));
    ZR_TRY(zr_st_read(fs, f->fd, f->path, bytes, &f->st));
    return check_export(ws, s, name, f->st.export_id);
}

static bool is_folder(const struct zr_files *fs, const char *path)
{
    void *dir;
    bool is = fs->opendir(fs->arg, path, &dir) == 0;
    if (is)
        fs->closedir(fs->arg, dir);
    return is;
}

/* If the program has named a file instead of a folder, ws->dir becomes its folder. */
static int take_file(struct zr_weights *ws, struct sources *s)
{
    static const char end[] = ".safetensors";
    const char *slash = strrchr(ws->dir, '/');
    size_t n = strlen(ws->dir), k = sizeof end - 1,
           n_folder = slash && slash > ws->dir ? (size_t)(slash - ws->dir) : 1;
    if (n < k || strcmp(ws->dir + n - k, end) != 0 || is_folder(ws->z->files, ws->dir))
        return 0;
    if (n_folder >= ZR_PATH_BYTES)
        return zr_fail(ZERO_ERR_ARG, "%.100s...: the path is too long", ws->dir);
    snprintf(s->folder, sizeof s->folder, "%.*s", (int)n_folder, slash ? ws->dir : ".");
    s->single = slash ? slash + 1 : ws->dir;
    ws->dir = s->folder;
    return 0;
}

/* Whether the folder has all weights in the file ZR_WEIGHTS_SINGLE. */
static int has_single(const struct zr_weights *ws, bool *has)
{
    char path[ZR_PATH_BYTES];
    bool missing = false;
    int fd, err = zr_path_join(path, ws->dir, ZR_WEIGHTS_SINGLE);
    if (err)
        return err;
    err = zr_file_find_linked(ws->z->files, path, &missing, &fd);
    *has = !missing;
    if (!err)
        zr_file_close(ws->z->files, fd, path);
    return missing ? 0 : err;
}

/* Reads the index. *out is NULL if the folder has only one file. As in Hugging Face's libraries,
 * ZR_WEIGHTS_SINGLE comes before an index. */
static int read_index(const struct zr_weights *ws, struct sources *s, json_t **out)
{
    char path[ZR_PATH_BYTES], *text, id[ZR_EXPORT_ID_BYTES];
    int64_t n;
    bool missing = false;
    json_error_t why;
    *out = NULL;
    bool single;
    int err = has_single(ws, &single);
    if (err || single)
        return err;
    err = zr_path_join(path, ws->dir, ZR_WEIGHTS_INDEX);
    if (!err)
        err = zr_file_load_linked(ws->z->files, path, ZR_WEIGHTS_MAX_INDEX, &missing, &text, &n);
    if (err)
        return missing ? 0 : err;
    *out = json_loadb(text, (size_t)n, JSON_REJECT_DUPLICATES, &why);
    bool is_pointer = zr_is_lfs_pointer(text, n);
    free(text);
    if (is_pointer)
        return zr_fail(ZERO_ERR_IO, ZR_LFS_POINTER, path);
    if (!json_is_object(json_object_get(*out, "weight_map"))) {
        json_decref(*out);
        *out = NULL;
        return zr_fail(ZERO_ERR_IO, "%s: has no weight_map, or is not JSON", path);
    }
    zr_st_export_id(json_object_get(*out, "metadata"), id);
    return check_export(ws, s, ZR_WEIGHTS_INDEX, id);
}

/* Warns if the folder also has the index of another export. A killed export may leave both. The import does
 * not need this index, so an index that cannot be read is no error. */
static void report_other_export(const struct zr_weights *ws, const struct sources *s)
{
    char path[ZR_PATH_BYTES], *text, id[ZR_EXPORT_ID_BYTES];
    int64_t n;
    bool missing;
    if (ws->z->world.rank || zr_path_join(path, ws->dir, ZR_WEIGHTS_INDEX) ||
        zr_file_load_linked(ws->z->files, path, ZR_WEIGHTS_MAX_INDEX, &missing, &text, &n))
        return;
    json_t *index = json_loadb(text, (size_t)n, 0, NULL);
    free(text);
    zr_st_export_id(json_object_get(index, "metadata"), id);
    json_decref(index);
    if (*id && strcmp(id, s->export_id) != 0)
        zr_warn(ws->z->config.options.log,
                "zero_import: %s/" ZR_WEIGHTS_SINGLE " is read; %s belongs to another export and is not",
                ws->dir, path);
}

static int by_name(const void *a, const void *b)
{
    return strcmp((*(struct zr_weight *const *)a)->name, (*(struct zr_weight *const *)b)->name);
}

/* Matches the entries of a file with weights by name. The weights are sorted. */
static void match(struct zr_weights *ws, struct zr_weight **sorted, const struct source *f, int32_t file)
{
    for (int64_t k = 0; k < f->st.n_entries; k++) {
        struct zr_weight key = {.name = f->st.entries[k].name}, *p = &key;
        struct zr_weight **found = bsearch(&p, sorted, (size_t)ws->n, sizeof *sorted, by_name);
        if (found && (*found)->file == file)
            (*found)->entry = (int32_t)k;
    }
}

/* Checks that the file has a weight in the model's shape, and a dtype that can be converted to the
 * model's. */
static int check_weight(const struct zr_weights *ws, const struct sources *s, const struct zr_weight *w)
{
    const struct zr_tensor *t = &ws->z->whole.tensors[w->tensor];
    const char *file = s->list[w->file].name;
    if (w->entry < 0)
        return zr_fail(ZERO_ERR_IO, "%s/%s: tensor %s is not in this file", ws->dir, file, w->name);
    const struct zr_st_entry *e = &s->list[w->file].st.entries[w->entry];
    if (e->n_dims != w->n_dims || memcmp(e->shape, w->shape, (size_t)w->n_dims * sizeof *w->shape) != 0) {
        char theirs[ZR_SHAPE_CHARS], ours[ZR_SHAPE_CHARS];
        zr_shape_print(e->shape, e->n_dims, theirs);
        zr_shape_print(w->shape, w->n_dims, ours);
        return zr_fail(ZERO_ERR_ARG, "%s/%s: tensor %s has shape %s; for %s of this model it should be %s",
                       ws->dir, file, w->name, theirs, t->name, ours);
    }
    const char *expected = zr_st_dtype_of(t->dtype);
    if (!strcmp(e->dtype, expected) || zr_floats_convert(e->dtype, t->dtype))
        return 0;
    if (zr_floats_convert("F32", t->dtype))
        return zr_fail(ZERO_ERR_NOTSUP, "%s/%s: tensor %s is %s; allowed: F32, BF16, F16", ws->dir, file,
                       w->name, e->dtype);
    return zr_fail(ZERO_ERR_NOTSUP, "%s/%s: tensor %s is %s, but %s is a buffer and %s", ws->dir, file,
                   w->name, e->dtype, t->name, expected);
}

/* Opens the files, and finds the entry of each weight. */
static int find_weights(struct zr_weights *ws, struct sources *s)
{
    json_t *index = NULL;
    ZR_TRY(take_file(ws, s));
    if (!s->single)
        ZR_TRY(read_index(ws, s, &index));
    struct zr_weight **sorted;
    int err = ZR_ALLOC(sorted, ws->n, "%d weights", ws->n);
    for (int32_t i = 0; !err && i < ws->n; i++) {
        struct zr_weight *w = sorted[i] = &ws->list[i];
        const char *name =
            index       ? json_string_value(json_object_get(json_object_get(index, "weight_map"), w->name))
            : s->single ? s->single
                        : ZR_WEIGHTS_SINGLE;
        w->entry = -1;
        err = name
                  ? open_source(ws, s, name, &w->file)
                  : zr_fail(ZERO_ERR_IO, "%s/" ZR_WEIGHTS_INDEX ": tensor %s is not in it", ws->dir, w->name);
    }
    if (!err)
        qsort(sorted, (size_t)ws->n, sizeof *sorted, by_name);
    for (int32_t f = 0; !err && f < s->n; f++)
        match(ws, sorted, &s->list[f], f);
    for (int32_t i = 0; !err && i < ws->n; i++)
        err = check_weight(ws, s, &ws->list[i]);
    if (!err && !index && !s->single)
        report_other_export(ws, s);
    free(sorted);
    json_decref(index);
    return err;
}

/* Trainable weights are imported as fp32 masters, from which parameters are rounded. Frozen ones have no
 * masters. */
static enum zero_dtype import_dtype(const struct zr_tensor *t)
{
    return t->grad ? ZERO_F32 : t->dtype;
}

static int64_t import_bytes(const struct zr_tensor *t)
{
    return zr_dtype_bytes(import_dtype(t));
}

/* Reads elements [k, k + n) of this rank's part from the file, run by run. Padding becomes 0. */
static int read_runs(struct zr_weights *ws, const struct source *f, const struct zr_weight *w, char *dst,
                     int64_t k, int64_t n)
{
    const struct zr_st_entry *e = &f->st.entries[w->entry];
    int64_t size = zr_st_dtype_bytes(e->dtype);
    int32_t part = w->cut.parts > 1 ? ws->z->mesh.tp_rank : 0;
    int err = 0;
    for (int64_t done = 0, m; !err && done < n; done += m) {
        struct zr_tp_run run = zr_tp_run_of_part(&w->cut, part, k + done);
        m = zr_min(run.n, n - done);
        if (run.whole < 0)
            memset(dst + done * size, 0, (size_t)(m * size));
        else
            err = zr_file_read(ws->z->files, f->fd, f->path, dst + done * size, m * size,
                               e->begin + run.whole * size);
    }
    return err;
}

/* Sets *stopped on all ranks if one of them could not read. With tp or pipeline stages the first failure is
 * an error on all ranks. */
static int agree_on_failure(struct zero_ctx *z, bool reads, int local, bool *stopped)
{
    double bad = reads && local;
    int err = z->mesh.tp * z->mesh.pp > 1 ? zr_agree_in_run(z, local) : zr_engine_mean(z->engine, &bad, 1);
    *stopped = err || bad > 0;
    return err;
}

/* How a rank reads weights. s NULL: this rank does not read. */
struct in {
    const struct sources *s;
    /* the values that were read, and memory of that size to transpose them in */
    char *buffer, *turned;
    /* the first NaN or infinity among all weights has been reported */
    bool *reported;
};

/* Logs the first NaN or infinity only. k: index of the first value in this rank's part. A master may be
 * finite while its rounded parameter is not. */
static void report_non_finite(const struct zr_weights *ws, const struct in *in, const struct zr_weight *w,
                              const char *values, int64_t k, int64_t n)
{
    const struct zr_tensor *t = &ws->z->whole.tensors[w->tensor];
    float value;
    if (*in->reported || !zr_floats_convert("F32", t->dtype))
        return;
    int64_t i = zr_find_non_finite(values, import_dtype(t), t->dtype, n, &value);
    if (i < 0)
        return;
    *in->reported = true;
    struct zr_tp_run run = zr_tp_run_of_part(&w->cut, w->cut.parts > 1 ? ws->z->mesh.tp_rank : 0, k + i);
    zr_warn(
        ws->z->config.options.log,
        "zero_import: %s/%s: element %lld of tensor %s is %g as %s; training will not recover from it, and "
        "more may follow",
        ws->dir, in->s->list[w->file].name, (long long)run.whole, w->name, (double)value,
        zr_st_dtype_of(t->dtype));
}

/* Finds the elements [first, end) of the weight in this tensor. *k: the first of them. */
static int64_t part_of_range(const struct zr_weight_range *range, int64_t first, int64_t end, int64_t *k)
{
    *k = zr_max(first, range->begin);
    return zr_max(zr_min(end, range->begin + range->n) - *k, 0);
}

/* Reads elements [k, k + n) to dst, in the dtype of the import. */
static int read_part(struct zr_weights *ws, const struct in *in, const struct zr_weight *w, char *dst,
                     int64_t k, int64_t n)
{
    const struct source *f = &in->s->list[w->file];
    enum zero_dtype dtype = import_dtype(&ws->z->whole.tensors[w->tensor]);
    const char *theirs = f->st.entries[w->entry].dtype;
    /* The values are read to the end of the memory, so that widening in place reads each before it writes
     * there. */
    char *at = dst + n * zr_max(zr_dtype_bytes(dtype) - zr_st_dtype_bytes(theirs), 0);
    ZR_TRY(read_runs(ws, f, w, at, k, n));
    if (zr_floats_convert(theirs, dtype)) {
        zr_floats_copy(dst, dtype, at, theirs, n);
        report_non_finite(ws, in, w, dst, k, n);
    }
    return 0;
}

/* Reads this rank's elements among [first, end) into the buffer, one after the other. */
static int read_piece(struct zr_weights *ws, const struct in *in, const struct zr_weight *w, int64_t first,
                      int64_t end)
{
    int64_t size = import_bytes(&ws->z->whole.tensors[w->tensor]), k, at = 0;
    int err = 0;
    for (int32_t i = 0; !err && i < w->n_ranges; i++) {
        int64_t n = part_of_range(&ws->ranges[w->first_range + i], first, end, &k);
        if (n)
            err = read_part(ws, in, w, in->buffer + at * size, k, n);
        at += n;
    }
    if (!err && w->transposed && at)
        zr_weights_transpose(in->turned, in->buffer, w->columns, w->rows, size);
    return err;
}

/* Writes this rank's elements among [first, end) from the buffer to the tensors. */
static int write_piece(struct zr_weights *ws, const struct in *in, const struct zr_weight *w, int64_t first,
                       int64_t end)
{
    const struct zr_tensor *t = &ws->z->whole.tensors[w->tensor];
    const char *src = w->transposed ? in->turned : in->buffer;
    int64_t k, at = 0;
    int err = 0;
    for (int32_t i = 0; !err && i < w->n_ranges; i++) {
        const struct zr_weight_range *range = &ws->ranges[w->first_range + i];
        int64_t n = part_of_range(range, first, end, &k);
        if (n)
            err = zr_values_write(ws->z, range->tensor, t->grad ? ZR_VALUE_MASTER : ZR_VALUE_PARAM,
                                  range->at + (k - range->begin), n, src ? src + at * import_bytes(t) : NULL);
        at += n;
    }
    return err;
}

/* Imports a weight, a piece at a time. *local: the first failure of this rank to read, after which it only
 * takes part in the collectives. */
static int import_one(struct zr_weights *ws, const struct in *in, const struct zr_weight *w, int *local,
                      bool *stopped)
{
    /* Values may take more bytes in the file than in the tensor. */
    int64_t size = zr_max(4, import_bytes(&ws->z->whole.tensors[w->tensor]));
    int64_t piece = w->transposed ? w->n : zr_min(w->n, ZR_WEIGHTS_PIECE_BYTES / size);
    /* All ranks use pieces of the same size, even in other pipeline stages, because they learn of failures
     * together. */
    for (int64_t first = 0; first < w->n; first += piece) {
        int64_t end = zr_min(first + piece, w->n);
        if (in->s && !*local)
            *local = read_piece(ws, in, w, first, end);
        /* All ranks learn whether the piece could be read. If not, none writes it. */
        int err = agree_on_failure(ws->z, in->s != NULL, *local, stopped);
        if (err || *stopped)
            return err;
        err = write_piece(ws, in, w, first, end);
        if (err)
            return err;
    }
    return 0;
}

/* Sends tied tensors from the first pipeline stage to the last, which records that its copies have values. */
static int give_tied(struct zero_ctx *z, const struct zr_weights *ws)
{
    int err = zr_engine_tied_values(z->engine);
    for (int32_t i = 0; !err && i < ws->n; i++)
        if (ws->list[i].copy >= 0)
            err =
                zr_values_write(z, ws->list[i].copy, ZR_VALUE_PARAM, ws->list[i].first, ws->list[i].n, NULL);
    return err;
}

int zero_import(zero_ctx *z, const char *dir, const struct zero_weight *map, int32_t n)
{
    ZR_IN_CALL(z, ZR_CALL_IMPORT, 0, -1);
    ZR_TRY(zr_weights_check_call(z, dir, ZR_CALL_IMPORT));
    struct zr_weights ws = {.z = z, .dir = dir};
    struct sources s = {0};
    struct in in = {0};
    bool reads = zr_weights_has_files(z);
    int err = zr_weights_resolve(z, map, n, 0, &ws);
    if (!err)
        err = zr_buffers_check(z);
    if (!err && reads)
        err = find_weights(&ws, &s);
    int64_t bytes = ZR_WEIGHTS_PIECE_BYTES;
    for (int32_t i = 0; i < ws.n; i++)
        if (ws.list[i].transposed)
            bytes =
                zr_max(bytes, ws.list[i].n * zr_max(4, import_bytes(&z->whole.tensors[ws.list[i].tensor])));
    if (!err && reads) {
        err = ZR_ALLOC(in.buffer, 2 * bytes, "%lld bytes of weights", (long long)(2 * bytes));
        in.turned = in.buffer ? in.buffer + bytes : NULL;
        in.s = &s;
    }
    err = zr_agree_in_run(z, err);
    int local = 0;
    bool begun = !err, stopped = false, reported = false;
    in.reported = &reported;
    for (int32_t i = 0; !err && !stopped && i < ws.n; i++)
        err = import_one(&ws, &in, &ws.list[i], &local, &stopped);
    if (begun && !err)
        err = zr_agree_in_run(z, local);
    if (begun && !err && !stopped)
        err = give_tied(z, &ws);
    struct zr_saved_error kept;
    zr_error_save(&kept, err);
    /* Both pipeline stages get the values from before the failure. */
    if (begun && err && !zr_engine_has_failed(z->engine))
        (void)zr_engine_tied_values(z->engine);
    close_sources(z->files, &s);
    free(in.buffer);
    zr_weights_free(&ws);
    return err ? zr_fail_more(zr_error_restore(&kept), "zero_import") : 0;
}
