/* SPDX-License-Identifier: Apache-2.0 */
/* weights.c: zero_export writes the weights in the files of Hugging Face's libraries: model.safetensors, or
 * several files with model.safetensors.index.json. Rank 0 writes them, a piece at a time. With tp or pipeline
 * stages the first rank of each part writes its runs into the files that rank 0 makes. */
#include "comm/first_error.h"
#include "kernels/alloc.h"
#include "zero/checkpoint/weights_inside.h"

#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <jansson.h>

static int64_t elem_bytes(const struct zr_weights *ws, const struct zr_weight *w)
{
    return zr_dtype_bytes(ws->z->whole.tensors[w->tensor].dtype);
}

/* zr_weights_transpose takes squares with sides of this many elements. Their rows stay in the cache until all
 * columns are used. */
#define SQUARE 16

static inline void transpose(char *restrict dst, const char *restrict src, int64_t rows, int64_t columns,
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
    if (size == 4) /* with a constant size a copy is two instructions */
        transpose(dst, src, rows, columns, 4);
    else if (size == 2)
        transpose(dst, src, rows, columns, 2);
    else
        transpose(dst, src, rows, columns, size);
}

/* ---- export ---- */

/* Divides the weights over files of at most max_file_bytes, in their order. */
static void assign_files(struct zr_weights *ws, int64_t max_file_bytes)
{
    int64_t bytes = 0;
    for (int32_t i = 0; i < ws->n; i++) {
        struct zr_weight *w = &ws->list[i];
        int64_t weight_bytes = w->n_whole * elem_bytes(ws, w);
        if (i && bytes + weight_bytes > max_file_bytes) {
            ws->n_files++;
            bytes = 0;
        }
        w->file = ws->n_files;
        bytes += weight_bytes;
    }
    ws->n_files++;
}

bool zr_weights_has_files(const struct zero_ctx *z)
{
    return zr_dp_rank(z) == 0;
}

/* Writes elements [k, k + n) of this rank's part of a weight to their places in the file, run by run. at:
 * byte of the file where the weight begins. */
static int write_runs(struct zr_weights *ws, const struct zr_weight *w, const char *src, int64_t k, int64_t n,
                      int fd, const char *path, int64_t at)
{
    int64_t size = elem_bytes(ws, w);
    int32_t part = w->cut.parts > 1 ? ws->z->mesh.tp_rank : 0;
    int err = 0;
    for (int64_t done = 0, m; !err && done < n; done += m) {
        struct zr_tp_run run = zr_tp_run_of_part(&w->cut, part, k + done);
        m = zr_min(run.n, n - done);
        if (run.whole >= 0) /* otherwise the run is padding */
            err = zr_file_write(ws->z->files, fd, path, src + done * size, m * size, at + run.whole * size);
    }
    return err;
}

/* Where a rank writes a weight, and its memory for that. */
struct out {
    char *buffer;
    int64_t buffer_bytes;
    int fd;
    const char *path;
    /* byte of the file where the weight begins */
    int64_t at;
};

/* Reads the part of a weight that is in one tensor, on all ranks that have it. The first of them writes it,
 * or the first of each part. *local keeps the first failure to write, after which the rank only takes part in
 * reading. Returns a failure of communication only. */
static int export_range(struct zr_weights *ws, const struct zr_weight *w, const struct zr_weight_range *range,
                        const struct out *o, int *local)
{
    struct zero_ctx *z = ws->z;
    bool writes = o->fd >= 0 && (w->cut.parts > 1 || z->mesh.tp_rank == 0);
    int64_t size = elem_bytes(ws, w),
            piece = w->transposed ? w->n : zr_min(w->n, ZR_WEIGHTS_PIECE_BYTES / size);
    for (int64_t done = 0; done < range->n; done += piece) {
        int64_t n = zr_min(piece, range->n - done);
        char *dst = writes && !*local ? o->buffer : NULL;
        ZR_TRY(zr_values_read(z, range->tensor, ZR_VALUE_PARAM, range->at + done, n, dst));
        if (!dst)
            continue;
        if (w->transposed) {
            dst = o->buffer + o->buffer_bytes / 2;
            zr_weights_transpose(dst, o->buffer, w->rows, w->columns, size);
        }
        *local = write_runs(ws, w, dst, range->begin + done, n, o->fd, o->path, o->at);
    }
    return 0;
}

/* Exports a weight. */
static int export_one(struct zr_weights *ws, const struct zr_weight *w, const struct out *o, int *local)
{
    int err = 0;
    for (int32_t i = 0; !err && i < w->n_ranges; i++)
        err = export_range(ws, w, &ws->ranges[w->first_range + i], o, local);
    return err;
}

/* Rank 0 makes the file. The others compute where its weights lie. */
static int begin_file(struct zr_weights *ws, const char *id, int32_t file, char path[ZR_PATH_BYTES], int *fd,
                      struct zr_st_entry *entries)
{
    char name[ZR_EXPORT_NAME_BYTES], *head = NULL;
    bool makes = ws->z->world.rank == 0;
    int64_t n = 0, head_bytes;
    for (int32_t i = 0; i < ws->n; i++) {
        const struct zr_weight *w = &ws->list[i];
        if (w->file != file)
            continue;
        entries[n] = (struct zr_st_entry){.name = (char *)(uintptr_t)w->name,
                                          .dtype = zr_st_dtype_of(ws->z->whole.tensors[w->tensor].dtype),
                                          .n_dims = w->n_dims};
        memcpy(entries[n++].shape, w->shape, sizeof w->shape);
    }
    zr_export_hidden_name(id, file, name);
    int err = zr_path_join(path, ws->dir, name);
    if (!err)
        err = zr_st_head(entries, n, id, &head, &head_bytes);
    if (!err && makes)
        err = zr_file_open(ws->z->files, path, O_WRONLY | O_CREAT | O_EXCL, fd);
    if (!err && makes)
        err = zr_file_write(ws->z->files, *fd, path, head, head_bytes, 0);
    free(head);
    return err;
}

/* Prints the index. The caller frees *out. */
static int print_index(const struct zr_weights *ws, const char *id, char **out)
{
    char name[ZR_EXPORT_NAME_BYTES];
    int64_t total = 0;
    json_t *map = json_object();
    bool ok = map != NULL;
    for (int32_t i = 0; i < ws->n; i++) {
        zr_export_name(id, ws->list[i].file, ws->n_files, name);
        ok = ok && !json_object_set_new(map, ws->list[i].name, json_string(name));
        total += ws->list[i].n_whole * elem_bytes(ws, &ws->list[i]);
    }
    json_t *root = json_pack("{s:{s:I, s:s}, s:o}", "metadata", "total_size", (json_int_t)total,
                             ZR_EXPORT_KEY, id, "weight_map", map);
    *out = ok && root ? json_dumps(root, JSON_INDENT(2)) : NULL;
    json_decref(root);
    if (!*out)
        return zr_fail(ZERO_ERR_NOMEM, "no memory for the index of %d weights", ws->n);
    if (strlen(*out) > ZR_WEIGHTS_MAX_INDEX)
        return zr_fail(ZERO_ERR_ARG, "the index of %d weights has %zu bytes; allowed: %d", ws->n,
                       strlen(*out), ZR_WEIGHTS_MAX_INDEX);
    return 0;
}

/* Gives the files their names, with an index if there are several. */
static int publish(const struct zr_weights *ws, struct zr_export_folder *f)
{
    char *index = NULL;
    int err = ws->n_files > 1 ? print_index(ws, f->id, &index) : 0;
    if (!err)
        err = zr_export_publish(f, index);
    free(index);
    return err;
}

/* Rank 0 sends this when it has prepared the folder. */
struct begun {
    char id[ZR_EXPORT_ID_BYTES];
    ZR_FIRST_ERROR(ZR_EXCHANGE_BYTES - sizeof(int32_t) - 32);
};

/* Rank 0 prepares the folder, and tells all ranks the export's id. */
static int begin_export(struct zr_weights *ws, struct zr_export_folder *f, char id[ZR_EXPORT_ID_BYTES])
{
    struct zero_ctx *z = ws->z;
    struct begun mine = {0}, *all = z->from_all;
    int err = 0;
    if (z->world.rank == 0)
        zr_first_error_put(
            &mine, zr_export_begin(z->files, &z->locks, z->config.options.log, ws->dir, ws->n_files, f));
    memcpy(mine.id, f->id, sizeof mine.id);
    if (z->world.world == 1)
        all[0] = mine;
    else
        err = zr_engine_exchange(z->engine, &mine, sizeof mine, all);
    err = zr_first_error(err, &mine, all, z->world.world, z->world.rank);
    if (!err)
        snprintf(id, ZR_EXPORT_ID_BYTES, "%.*s", ZR_EXPORT_ID_BYTES - 1, all[0].id);
    return err;
}

/* If several ranks write, they open the file that rank 0 has made, or all learn that it failed. */
static int join_file(struct zr_weights *ws, const char *path, int *fd, int *local)
{
    if (ws->z->mesh.tp * ws->z->mesh.pp == 1)
        return 0;
    ZR_TRY(zr_agree_in_run(ws->z, *local));
    if (zr_weights_has_files(ws->z) && *fd < 0)
        *local = zr_file_open(ws->z->files, path, O_WRONLY, fd);
    return 0;
}

/* Writes and syncs all files under hidden names, on all ranks that write. */
static int write_files(struct zr_weights *ws, const char *id)
{
    struct zero_ctx *z = ws->z;
    bool writes = zr_weights_has_files(z);
    int local = 0, err = 0;
    int64_t buffer_bytes = ZR_WEIGHTS_PIECE_BYTES;
    for (int32_t i = 0; i < ws->n; i++)
        if (ws->list[i].transposed)
            buffer_bytes = zr_max(buffer_bytes, 2 * ws->list[i].n * elem_bytes(ws, &ws->list[i]));
    char *buffer = writes ? malloc((size_t)buffer_bytes) : NULL;
    struct zr_st_entry *entries = writes ? malloc((size_t)ws->n * sizeof *entries) : NULL;
    if (writes && (!buffer || !entries))
        local = zr_fail(ZERO_ERR_NOMEM, "no memory for %lld bytes of weights", (long long)buffer_bytes);
    for (int32_t file = 0; !err && file < ws->n_files; file++) {
        char path[ZR_PATH_BYTES];
        int fd = -1;
        int64_t k = 0;
        if (writes && !local)
            local = begin_file(ws, id, file, path, &fd, entries);
        err = join_file(ws, path, &fd, &local);
        for (int32_t i = 0; !err && i < ws->n; i++) {
            if (ws->list[i].file != file)
                continue;
            struct out o = {buffer, buffer_bytes, fd, path, writes && !local ? entries[k++].begin : 0};
            err = export_one(ws, &ws->list[i], &o, &local);
        }
        if (fd >= 0 && !local)
            local = zr_file_sync(z->files, fd, path);
        int closed = fd >= 0 ? zr_file_close(z->files, fd, path) : 0;
        local = local ? local : closed;
    }
    free(buffer);
    free(entries);
    return err ? err : zr_agree_in_run(z, local);
}

/* Writes the files under hidden names, and then publishes them. */
static int export_files(struct zr_weights *ws)
{
    struct zero_ctx *z = ws->z;
    struct zr_export_folder *f;
    char id[ZR_EXPORT_ID_BYTES], path[ZR_PATH_BYTES];
    int err = zr_agree_in_run(z, ZR_ZALLOC(f, 1, "the folder of an export"));
    if (!err)
        err = begin_export(ws, f, id);
    if (!err)
        err = zr_agree_in_run(z, zr_weights_has_files(z) ? zr_path_absolute(z->files, ws->dir, path) : 0);
    ws->dir = path;
    if (!err)
        err = write_files(ws, id);
    if (!err)
        err = zr_agree_in_run(z, z->world.rank == 0 ? publish(ws, f) : 0);
    struct zr_saved_error kept;
    zr_error_save(&kept, err);
    if (f)
        zr_export_end(f);
    free(f);
    return err ? zr_error_restore(&kept) : 0;
}

int zr_weights_check_call(struct zero_ctx *z, const char *dir, enum zr_call_name name)
{
    ZR_TRY(zr_call_check(z, name));
    if (!dir || !*dir)
        return zr_fail(ZERO_ERR_ARG, "%s: dir is NULL or empty", zr_call_function(name));
    zr_engine_called(z->engine, 0);
    return 0;
}

int zero_export(zero_ctx *z, const char *dir, const struct zero_weight *map, int32_t n,
                int64_t max_file_bytes)
{
    ZR_IN_CALL(z, ZR_CALL_EXPORT, 0, -1);
    ZR_TRY(zr_weights_check_call(z, dir, ZR_CALL_EXPORT));
    struct zr_weights ws = {.z = z, .dir = dir};
    max_file_bytes = max_file_bytes > 0 ? max_file_bytes : INT64_C(5000000000);
    int err = zr_weights_resolve(z, map, n, max_file_bytes, &ws);
    if (!err)
        err = zr_weights_check_names(&ws);
    if (!err)
        err = zr_buffers_check(z);
    err = zr_agree_in_run(z, err);
    if (!err) {
        assign_files(&ws, max_file_bytes);
        err = export_files(&ws);
    }
    zr_weights_free(&ws);
    return err ? zr_fail_more(err, "zero_export") : 0;
}
