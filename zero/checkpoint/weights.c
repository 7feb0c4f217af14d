/* weights.c: zero_export: the model's weights alone, in the files that others read and write:
 * model-0000i-of-0000N.safetensors and model.safetensors.index.json, as Hugging Face's libraries have them.
 * Rank 0 does the input and output, a piece at a time. Of a model in parts the first rank of each part does
 * that of its own, run by run, in the files that rank 0 makes. */
#include "zero/checkpoint/weights_inside.h"

#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <jansson.h>

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

/* w->shape is that of what is here, as the file has it; sliced: it lacks the tensor's first dimension. */
static int place_in_file(const struct zero_ctx *z, const struct zr_tensor *t, bool sliced, int32_t i,
                         struct zr_weight *w)
{
    w->cut = zr_tp_none(w->n);
    if (z->mesh.parts > 1 && t->cut) {
        int32_t dim = t->cut_dim - sliced;
        if (dim < 0)
            return zr_fail(
                ZR_ERR_ARG,
                "map[%d] (%s): slice is set, but tensor %s is cut over tp along its first dimension; "
                "allowed: 0 (all of it)",
                i, w->name, t->name);
        dim = w->transposed ? 1 - dim : dim;
        w->cut = zr_tp_along(w->shape, dim, t->cut_blocks, t->cut_size, z->mesh.parts);
        w->shape[dim] = w->cut.rows;
    }
    w->n_whole = 1;
    for (int32_t d = 0; d < w->n_dims; d++)
        w->n_whole *= w->shape[d];
    return 0;
}

static int resolve_one(const struct zero_ctx *z, const struct zero_weight *m, int32_t i, struct zr_weight *w)
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
    *w = (struct zr_weight){.name = m->name,
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
        w->rows = w->shape[0];
        w->columns = w->shape[1];
        w->shape[0] = w->columns;
        w->shape[1] = w->rows;
    }
    return place_in_file(z, t, !whole, i, w);
}

int zr_weights_resolve(struct zero_ctx *z, const struct zero_weight *map, int32_t n, struct zr_weights *out)
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

static int64_t elem_bytes(const struct zr_weights *ws, const struct zr_weight *w)
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

void zr_weights_transpose(char *dst, const char *src, int64_t rows, int64_t columns, int64_t size)
{
    if (size == 4) /* known here, a copy is two instructions */
        turn(dst, src, rows, columns, 4);
    else if (size == 2)
        turn(dst, src, rows, columns, 2);
    else
        turn(dst, src, rows, columns, size);
}

/* ---- export ---- */

static void assign_files(struct zr_weights *ws, int64_t max_file_bytes)
{
    int64_t bytes = 0;
    for (int32_t i = 0; i < ws->n; i++) {
        struct zr_weight *w = &ws->list[i];
        int64_t own = w->n_whole * elem_bytes(ws, w);
        if (i && bytes + own > max_file_bytes) {
            ws->n_files++;
            bytes = 0;
        }
        w->file = ws->n_files;
        bytes += own;
    }
    ws->n_files++;
}

bool zr_weights_has_files(const struct zero_ctx *z)
{
    return zr_dp_rank(z) == 0;
}

/* Of the weight, elements [k, k + n) as they lie in the file but for what other parts have, to where they
 * belong in it: run by run. at: byte of the file where the weight begins. */
static int write_runs(struct zr_weights *ws, const struct zr_weight *w, const char *src, int64_t k, int64_t n,
                      int fd, const char *path, int64_t at)
{
    int64_t size = elem_bytes(ws, w);
    int32_t part = w->cut.parts > 1 ? ws->z->mesh.part : 0;
    int err = 0;
    for (int64_t done = 0, m; !err && done < n; done += m) {
        struct zr_tp_run run = zr_tp_run_of_part(&w->cut, part, k + done);
        m = zr_min(run.n, n - done);
        if (run.whole >= 0) /* else it pads */
            err = zr_file_write(ws->z->files, fd, path, src + done * size, m * size, at + run.whole * size);
    }
    return err;
}

/* Reads a weight on all ranks and writes it on rank 0, or of each part on its first. *local keeps the first
 * failure there, after which it only takes part. Only a failure among ranks is returned. */
static int export_one(struct zr_weights *ws, const struct zr_weight *w, char *buffer, int64_t buffer_bytes,
                      int fd, const char *path, int64_t at, int *local)
{
    struct zero_ctx *z = ws->z;
    bool writes = fd >= 0 && (w->cut.parts > 1 || z->mesh.part == 0);
    int64_t size = elem_bytes(ws, w),
            piece = w->transposed ? w->n : zr_min(w->n, ZR_WEIGHTS_PIECE_BYTES / size);
    for (int64_t k = 0; k < w->n; k += piece) {
        int64_t n = zr_min(piece, w->n - k);
        char *dst = writes && !*local ? buffer : NULL;
        int err = zr_values_read(z, w->tensor, ZR_VALUE_PARAM, w->first + k, n, dst);
        if (err)
            return err;
        if (!dst)
            continue;
        if (w->transposed) {
            zr_weights_transpose(buffer + buffer_bytes / 2, buffer, w->rows, w->columns, size);
            dst = buffer + buffer_bytes / 2;
        }
        *local = write_runs(ws, w, dst, k, n, fd, path, at);
    }
    return 0;
}

/* Rank 0 makes the file; others find where its weights are. */
static int begin_file(struct zr_weights *ws, int32_t file, char path[ZR_PATH_BYTES], int *fd,
                      struct zr_st_entry *entries)
{
    char name[80], *head = NULL;
    bool makes = ws->z->world.rank == 0;
    int64_t n = 0, head_bytes;
    for (int32_t i = 0; i < ws->n; i++) {
        const struct zr_weight *w = &ws->list[i];
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
    if (!err && makes)
        err = zr_file_open(ws->z->files, path, O_WRONLY | O_CREAT | O_TRUNC, fd);
    if (!err && makes)
        err = zr_file_write(ws->z->files, *fd, path, head, head_bytes, 0);
    free(head);
    return err;
}

static int write_index(const struct zr_weights *ws)
{
    char path[ZR_PATH_BYTES], name[64];
    int64_t total = 0;
    json_t *map = json_object();
    bool ok = map != NULL;
    for (int32_t i = 0; i < ws->n; i++) {
        file_name(ws->list[i].file, ws->n_files, name);
        ok = ok && !json_object_set_new(map, ws->list[i].name, json_string(name));
        total += ws->list[i].n_whole * elem_bytes(ws, &ws->list[i]);
    }
    json_t *root =
        json_pack("{s:{s:I}, s:o}", "metadata", "total_size", (json_int_t)total, "weight_map", map);
    char *text = ok && root ? json_dumps(root, JSON_INDENT(2)) : NULL;
    json_decref(root);
    if (!text)
        return zr_fail(ZR_ERR_NOMEM, "no memory for the index of %d weights", ws->n);
    int err = zr_path_join(path, ws->dir, ZR_WEIGHTS_INDEX);
    if (!err && strlen(text) > ZR_WEIGHTS_MAX_INDEX)
        err = zr_fail(ZR_ERR_ARG, "the index of %d weights has %zu bytes; allowed: %d", ws->n, strlen(text),
                      ZR_WEIGHTS_MAX_INDEX);
    if (!err)
        err = zr_file_store(ws->z->files, path, text, (int64_t)strlen(text));
    free(text);
    return err ? err : zr_folder_sync(ws->z->files, ws->dir);
}

/* Where several ranks write: rank 0's file is there, or all know that it is not, and the others open it. */
static int join_file(struct zr_weights *ws, const char *path, int *fd, int *local)
{
    if (ws->z->mesh.parts == 1)
        return 0;
    int err = zr_agree_in_run(ws->z, *local);
    if (!err && zr_weights_has_files(ws->z) && *fd < 0)
        *local = zr_file_open(ws->z->files, path, O_WRONLY, fd);
    return err;
}

static int export_files(struct zr_weights *ws)
{
    struct zero_ctx *z = ws->z;
    bool makes = z->world.rank == 0, writes = zr_weights_has_files(z), exists;
    int local = 0, err = 0;
    int64_t buffer_bytes = ZR_WEIGHTS_PIECE_BYTES;
    for (int32_t i = 0; i < ws->n; i++)
        if (ws->list[i].transposed)
            buffer_bytes = zr_max(buffer_bytes, 2 * ws->list[i].n * elem_bytes(ws, &ws->list[i]));
    char *buffer = writes ? malloc((size_t)buffer_bytes) : NULL;
    struct zr_st_entry *entries = writes ? malloc((size_t)ws->n * sizeof *entries) : NULL;
    if (writes && (!buffer || !entries))
        local = zr_fail(ZR_ERR_NOMEM, "no memory for %lld bytes of weights", (long long)buffer_bytes);
    if (makes && !local && zr_folder_make(z->files, ws->dir, &exists) && !exists)
        local = ZR_ERR_IO;
    for (int32_t file = 0; !err && file < ws->n_files; file++) {
        char path[ZR_PATH_BYTES];
        int fd = -1;
        int64_t k = 0;
        if (writes && !local)
            local = begin_file(ws, file, path, &fd, entries);
        err = join_file(ws, path, &fd, &local);
        for (int32_t i = 0; !err && i < ws->n; i++)
            if (ws->list[i].file == file)
                err = export_one(ws, &ws->list[i], buffer, buffer_bytes, fd, path,
                                 writes && !local ? entries[k++].begin : 0, &local);
        if (fd >= 0 && !local)
            local = zr_file_sync(z->files, fd, path);
        int closed = fd >= 0 ? zr_file_close(z->files, fd, path) : 0;
        local = local ? local : closed;
    }
    if (!err && z->mesh.parts > 1)
        err = zr_agree_in_run(z, local); /* before the index says that all is there */
    if (makes && !err && !local)
        local = write_index(ws);
    free(buffer);
    free(entries);
    return err ? err : zr_agree_in_run(z, local);
}

int zr_weights_check_call(struct zero_ctx *z, const char *dir, const char *call, enum zr_called_name name)
{
    if (!z || !dir || !*dir)
        return zr_fail(ZR_ERR_ARG, "%s: %s", call, !z ? "z is NULL" : "dir is NULL or empty");
    int err = zr_refuse_in_stages(z, call);
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
    int err = zr_weights_check_call(z, dir, "zero_export", ZR_CALLED_EXPORT);
    if (!err)
        err = zr_awaited_refuse(z, "zero_export", -1);
    if (err)
        return err;
    struct zr_weights ws = {.z = z, .dir = dir};
    err = zr_agree_in_run(z, zr_weights_resolve(z, map, n, &ws));
    if (!err) {
        assign_files(&ws, max_file_bytes > 0 ? max_file_bytes : INT64_C(5000000000));
        err = export_files(&ws);
    }
    free(ws.list);
    return err ? zr_fail_more(err, "zero_export") : 0;
}
