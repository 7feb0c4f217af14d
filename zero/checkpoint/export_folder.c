/* SPDX-License-Identifier: Apache-2.0 */
/* export_folder.c: writes an export's files into their folder and switches readers to them, by the protocol
 * of export_folder.h. Loaders look for ZR_WEIGHTS_SINGLE first, and for the index afterwards. After every
 * call to the file system below, this order leads them to a whole export. */
#include "zero/checkpoint/export_folder.h"

#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include <jansson.h>

#define HIDDEN "." ZR_EXPORT_KEY "-"

/* ---- names ---- */

void zr_export_name(const char *id, int32_t file, int32_t n_files, char out[ZR_EXPORT_NAME_BYTES])
{
    if (n_files == 1)
        snprintf(out, ZR_EXPORT_NAME_BYTES, ZR_WEIGHTS_SINGLE);
    else
        snprintf(out, ZR_EXPORT_NAME_BYTES, "model-%s-%05d-of-%05d.safetensors", id, file + 1, n_files);
}

void zr_export_hidden_name(const char *id, int32_t file, char out[ZR_EXPORT_NAME_BYTES])
{
    snprintf(out, ZR_EXPORT_NAME_BYTES, HIDDEN "%s-%05d", id, file + 1);
}

/* Whether an export has given a file this hidden name. The index is hidden file -1. */
static bool is_hidden_name(const char *name)
{
    char id[ZR_EXPORT_ID_BYTES], printed[ZR_EXPORT_NAME_BYTES];
    int file;
    if (sscanf(name, HIDDEN "%16[0-9a-f]-%8d", id, &file) != 2)
        return false;
    zr_export_hidden_name(id, file - 1, printed);
    return strlen(id) == ZR_EXPORT_ID_BYTES - 1 && !strcmp(name, printed);
}

/* Whether the export with this id could have given a file this final name. */
static bool is_name_of(const char *name, const char *id)
{
    char printed[ZR_EXPORT_NAME_BYTES];
    int file, n;
    if (!strcmp(name, ZR_WEIGHTS_SINGLE))
        return true;
    if (sscanf(name, "model-%*16[0-9a-f]-%8d-of-%8d.safetensors", &file, &n) != 2)
        return false;
    zr_export_name(id, file - 1, n, printed);
    return !strcmp(name, printed);
}

static bool ends_with(const char *name, const char *end)
{
    size_t n = strlen(name), k = strlen(end);
    return n >= k && !strcmp(name + n - k, end);
}

/* Whether a loader would take the file for the model's weights, or for a list of them. The table in
 * zero/checkpoints.md names the loaders. */
static bool is_weight_file(const char *name)
{
    static const char *const patterns[] = {
        "*.safetensors",   "*.safetensors.index.json",
        "*pytorch_model*", "adapter_model.*",
        "tf_model*",       "flax_model*",
        "model.ckpt*",     "*.gguf",
        "ggml-model*",     "consolidated.*",
        "rust_model.ot",
    };
    for (size_t i = 0; i < sizeof patterns / sizeof *patterns; i++)
        if (!fnmatch(patterns[i], name, 0))
            return true;
    return false;
}

/* ---- recognizing files ---- */

static int read_index_id(const struct zr_files *fs, const char *path, char id[ZR_EXPORT_ID_BYTES])
{
    char *text;
    int64_t n;
    bool missing;
    json_error_t why;
    ZR_TRY(zr_file_load(fs, path, ZR_WEIGHTS_MAX_INDEX, &missing, &text, &n));
    json_t *index = json_loadb(text, (size_t)n, 0, &why);
    free(text);
    zr_st_export_id(json_object_get(index, "metadata"), id);
    json_decref(index);
    return 0;
}

static int read_file_id(const struct zr_files *fs, const char *path, char id[ZR_EXPORT_ID_BYTES])
{
    struct zr_st st = {0};
    int64_t bytes;
    bool missing;
    int fd, err = zr_file_find(fs, path, &missing, &fd);
    if (err)
        return err;
    err = zr_file_size(fs, fd, path, &bytes);
    if (!err)
        err = zr_st_read(fs, fd, path, bytes, &st);
    memcpy(id, st.export_id, ZR_EXPORT_ID_BYTES);
    zr_st_free(&st);
    zr_file_close(fs, fd, path);
    return err;
}

/* Sets *is_ours: zero_export wrote this weight file. A file that cannot be read counts as somebody else's. */
static int recognize(const struct zr_export_folder *f, const char *name, bool *is_ours)
{
    char path[ZR_PATH_BYTES], id[ZR_EXPORT_ID_BYTES] = "";
    bool is_index = !strcmp(name, ZR_WEIGHTS_INDEX);
    int err = zr_path_join(path, f->path, name);
    if (!err && is_index)
        err = read_index_id(f->fs, path, id);
    else if (!err && ends_with(name, ".safetensors"))
        err = read_file_id(f->fs, path, id);
    *is_ours = !err && *id && (is_index || is_name_of(name, id));
    return err == ZERO_ERR_NOMEM ? err : 0;
}

/* Appends to a list for a message; n: number of names in it. */
static void append(char *list, size_t bytes, const char *name, int32_t n)
{
    size_t at = strlen(list);
    snprintf(list + at, bytes - at, "%s%s", n ? ", " : "", name);
}

static int remove_in(const struct zr_export_folder *f, const char *name)
{
    char path[ZR_PATH_BYTES];
    ZR_TRY(zr_path_join(path, f->path, name));
    return zr_file_remove(f->fs, path);
}

/* Lists the files of earlier exports, and removes what killed exports left. Removes nothing if the folder has
 * weight files that zero_export did not write. */
static int examine(struct zr_export_folder *f)
{
    struct zr_names all;
    char foreign[400] = "";
    int32_t n_foreign = 0;
    int err = zr_folder_list(f->fs, f->path, NULL, &all);
    for (size_t i = 0; !err && i < all.n; i++) {
        bool is_ours = false;
        if (!is_weight_file(all.name[i]))
            continue;
        err = recognize(f, all.name[i], &is_ours);
        if (!err && is_ours)
            err = zr_names_add(&f->old, all.name[i]);
        else if (!err)
            append(foreign, sizeof foreign, all.name[i], n_foreign++);
    }
    if (!err && n_foreign)
        err = zr_fail(ZERO_ERR_ARG,
                      "%s: this folder has %d weight files that zero_export did not write (%s); allowed: a "
                      "folder without such files",
                      f->path, n_foreign, foreign);
    for (size_t i = 0; !err && i < all.n; i++)
        if (is_hidden_name(all.name[i]))
            err = remove_in(f, all.name[i]);
    zr_names_free(&all);
    return err;
}

/* ---- a new export ---- */

static int draw_id(char id[ZR_EXPORT_ID_BYTES])
{
    uint64_t random;
    if (getrandom(&random, sizeof random, 0) != sizeof random)
        return zr_fail(ZERO_ERR_SYSTEM, "getrandom: %s", strerror(errno));
    snprintf(id, ZR_EXPORT_ID_BYTES, "%016" PRIx64, random);
    return 0;
}

int zr_export_begin(const struct zr_files *fs, const struct zr_folder_locks *held, struct zr_log *log,
                    const char *path, int32_t n_files, struct zr_export_folder *f)
{
    bool exists, is_locked = false;
    *f = (struct zr_export_folder){.fs = fs, .n_files = n_files};
    ZR_TRY(zr_path_absolute(fs, path, f->path));
    if (zr_folder_make(fs, f->path, &exists) && !exists)
        return ZERO_ERR_IO;
    ZR_TRY(zr_folder_find_lock(held, fs, f->path, &is_locked));
    if (!is_locked)
        ZR_TRY(zr_folder_lock(&f->locks, fs, f->path, log));
    ZR_TRY(examine(f));
    return draw_id(f->id);
}

/* Renames a hidden file to its final name. */
static int reveal(const struct zr_export_folder *f, int32_t file, const char *name)
{
    char hidden[ZR_EXPORT_NAME_BYTES], from[ZR_PATH_BYTES], to[ZR_PATH_BYTES];
    zr_export_hidden_name(f->id, file, hidden);
    ZR_TRY(zr_path_join(from, f->path, hidden));
    ZR_TRY(zr_path_join(to, f->path, name));
    return zr_file_rename(f->fs, from, to);
}

static int store_index(const struct zr_export_folder *f, const char *text)
{
    char hidden[ZR_EXPORT_NAME_BYTES], path[ZR_PATH_BYTES];
    zr_export_hidden_name(f->id, -1, hidden);
    ZR_TRY(zr_path_join(path, f->path, hidden));
    return zr_file_store(f->fs, path, text, (int64_t)strlen(text));
}

/* Removes the files of the old export. An old index or single file goes before the old shards, because
 * loaders find it first. */
static int remove_old(struct zr_export_folder *f)
{
    const char *first_read = f->n_files == 1 ? ZR_WEIGHTS_INDEX : ZR_WEIGHTS_SINGLE;
    bool had_it = false;
    int err = 0;
    for (size_t i = 0; !err && i < f->old.n; i++)
        if (!strcmp(f->old.name[i], first_read)) {
            had_it = true;
            err = remove_in(f, first_read);
        }
    if (!err && had_it)
        err = zr_folder_sync(f->fs, f->path);
    for (size_t i = 0; !err && i < f->old.n; i++)
        if (strcmp(f->old.name[i], ZR_WEIGHTS_SINGLE) != 0 && strcmp(f->old.name[i], ZR_WEIGHTS_INDEX) != 0)
            err = remove_in(f, f->old.name[i]);
    return err ? err : zr_folder_sync(f->fs, f->path);
}

int zr_export_publish(struct zr_export_folder *f, const char *index)
{
    char name[ZR_EXPORT_NAME_BYTES];
    bool is_single = f->n_files == 1;
    int err = is_single ? 0 : store_index(f, index);
    for (int32_t i = 0; !err && !is_single && i < f->n_files; i++) {
        zr_export_name(f->id, i, f->n_files, name);
        err = reveal(f, i, name);
    }
    if (!err)
        err = zr_folder_sync(f->fs, f->path);
    if (!err)
        err = zr_folder_sync_parent(f->fs, f->path);
    if (err)
        return err;
    f->is_switched = true; /* even if the rename reports a failure, it may have happened */
    ZR_TRY(is_single ? reveal(f, 0, ZR_WEIGHTS_SINGLE) : reveal(f, -1, ZR_WEIGHTS_INDEX));
    ZR_TRY(zr_folder_sync(f->fs, f->path));
    return remove_old(f);
}

void zr_export_end(struct zr_export_folder *f)
{
    char name[ZR_EXPORT_NAME_BYTES];
    for (int32_t i = -1; *f->id && !f->is_switched && i < f->n_files; i++) {
        zr_export_hidden_name(f->id, i, name);
        (void)remove_in(f, name);
        if (i < 0 || f->n_files == 1)
            continue;
        zr_export_name(f->id, i, f->n_files, name);
        (void)remove_in(f, name);
    }
    zr_folder_unlock_all(&f->locks);
    zr_names_free(&f->old);
}
