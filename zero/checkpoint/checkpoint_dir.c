/* SPDX-License-Identifier: Apache-2.0 */
/* checkpoint_dir.c: names, lists, seals, opens and removes the checkpoints in a folder. */
#include "zero/checkpoint/checkpoint_dir.h"
#include "kernels/alloc.h"

#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MANIFEST_TEMP "manifest.json.part"

/* ---- names ---- */

struct name {
    int64_t serial, t;
    bool hidden; /* still being written, or never finished */
    bool kept;   /* never removed, once it is finished */
    char text[ZR_CHECKPOINT_NAME_BYTES];
};

#define KEPT "-kept"
/* A name has 18 digits for the serial number. */
#define MAX_SERIAL INT64_C(999999999999999999)

static void print_name(int64_t serial, int64_t t, bool kept, char out[ZR_CHECKPOINT_NAME_BYTES])
{
    snprintf(out, ZR_CHECKPOINT_NAME_BYTES, "save-%08" PRId64 "-step-%08" PRId64 "%s", serial, t,
             kept ? KEPT : "");
}

static bool parse_name(const char *text, struct name *out)
{
    char again[ZR_CHECKPOINT_NAME_BYTES];
    long long serial, t;
    if (strlen(text) >= sizeof out->text)
        return false;
    out->hidden = *text == '.';
    memcpy(out->text, text, strlen(text) + 1);
    if (sscanf(text + out->hidden, "save-%18lld-step-%18lld", &serial, &t) != 2)
        return false;
    out->serial = serial;
    out->t = t;
    size_t n = strlen(text), end = sizeof KEPT - 1;
    out->kept = n > end && !strcmp(text + n - end, KEPT);
    print_name(serial, t, out->kept, again);
    return !strcmp(again, text + out->hidden);
}

struct list {
    struct name *names;
    size_t n;
};

static int add(void *arg, const char *text)
{
    struct list *l = arg;
    struct name name;
    if (!parse_name(text, &name))
        return 0;
    ZR_TRY(ZR_GROW(l->names, l->n + 1, "the names of checkpoints"));
    l->names[l->n++] = name;
    return 0;
}

static int newest_first(const void *a, const void *b)
{
    const struct name *x = a, *y = b;
    if (x->serial != y->serial)
        return x->serial > y->serial ? -1 : 1;
    return strcmp(x->text, y->text);
}

/* Lists the saves in root. The caller frees l->names, even after a failure. */
static int list_saves(const struct zr_files *fs, const char *root, bool *missing, struct list *l)
{
    *l = (struct list){0};
    ZR_TRY(zr_folder_walk(fs, root, missing, add, l));
    if (l->n)
        qsort(l->names, l->n, sizeof *l->names, newest_first);
    return 0;
}

/* ---- saving ---- */

/* The manifest.json in the folder itself. */
enum root_manifest { NO_MANIFEST, OF_ANOTHER_PROGRAM, OF_CHECKPOINT };

/* Looks for a manifest in the folder itself. A damaged one of libzero counts as a checkpoint, so that the
 * folder is called damaged and not empty. */
static int find_manifest(const struct zr_files *fs, const char *root, enum root_manifest *found)
{
    char path[ZR_PATH_BYTES], *text;
    bool missing = false;
    int64_t n;
    *found = NO_MANIFEST;
    int err = zr_path_join(path, root, ZR_MANIFEST_NAME);
    if (!err)
        err = zr_file_load(fs, path, ZR_MANIFEST_MAX, &missing, &text, &n);
    if (err)
        return missing ? 0 : err;
    *found = zr_manifest_is_ours(text, n) ? OF_CHECKPOINT : OF_ANOTHER_PROGRAM;
    free(text);
    return 0;
}

/* Refuses to save into a checkpoint, because zero_load would take the folder itself. */
static int refuse_checkpoint(const struct zr_files *fs, const char *root)
{
    enum root_manifest found;
    int err = find_manifest(fs, root, &found);
    if (err || found != OF_CHECKPOINT)
        return err;
    const char *end = strrchr(root, '/');
    return zr_fail(ZERO_ERR_ARG,
                   "%s: this folder is itself a checkpoint, and zero_load would not find a save in it; "
                   "allowed: a folder of checkpoints, such as the one above: %.*s",
                   root, end > root ? (int)(end - root) : 1, end ? root : ".");
}

static int make_root(const struct zr_files *fs, const char *root)
{
    bool exists;
    int err = zr_folder_make(fs, root, &exists);
    return err && !exists ? err : 0;
}

int zr_checkpoint_begin(const struct zr_files *fs, struct zr_folder_locks *locks, struct zr_log *log,
                        const char *root, int64_t t, bool kept, char name[ZR_CHECKPOINT_NAME_BYTES])
{
    struct list l;
    bool missing;
    char hidden[ZR_CHECKPOINT_NAME_BYTES + 1], path[ZR_PATH_BYTES];
    if (strlen(root) + 2 * ZR_CHECKPOINT_NAME_BYTES >= ZR_PATH_BYTES)
        return zr_fail(ZERO_ERR_ARG, "%.200s...: the path has %zu characters; allowed: %d", root,
                       strlen(root), ZR_PATH_BYTES - 2 * ZR_CHECKPOINT_NAME_BYTES - 1);
    ZR_TRY(make_root(fs, root));
    ZR_TRY(refuse_checkpoint(fs, root));
    ZR_TRY(zr_folder_lock(locks, fs, root, log));
    int err = list_saves(fs, root, &missing, &l);
    int64_t last = !err && l.n ? l.names[0].serial : 0;
    if (last == MAX_SERIAL)
        err = zr_fail(ZERO_ERR_ARG,
                      "%s/%s: zero_load would not find a later save, because this number is the largest that "
                      "a name can hold; allowed: another folder, or a smaller number",
                      root, l.names[0].text);
    free(l.names);
    if (err)
        return err;
    print_name(last + 1, t, kept, name);
    snprintf(hidden, sizeof hidden, ".%s", name);
    ZR_TRY(zr_path_join(path, root, hidden));
    return zr_folder_make(fs, path, NULL);
}

int zr_checkpoint_seal(const struct zr_files *fs, const char *folder, const struct zr_manifest *m)
{
    char temp[ZR_PATH_BYTES], path[ZR_PATH_BYTES], *text = NULL;
    int64_t n;
    int err = zr_path_join(temp, folder, MANIFEST_TEMP);
    if (!err)
        err = zr_path_join(path, folder, ZR_MANIFEST_NAME);
    if (!err)
        err = zr_manifest_print(m, &text, &n);
    if (!err)
        err = zr_file_store(fs, temp, text, n);
    if (!err)
        err = zr_file_rename(fs, temp, path);
    if (!err)
        err = zr_folder_sync(fs, folder);
    free(text);
    return err;
}

int zr_checkpoint_publish(const struct zr_files *fs, const char *root, const char *name)
{
    char from[ZR_PATH_BYTES], to[ZR_PATH_BYTES], hidden[ZR_CHECKPOINT_NAME_BYTES + 1];
    /* Root's own name is synced too, because the run that made root may have ended before it did so. */
    int err = zr_folder_sync_parent(fs, root);
    snprintf(hidden, sizeof hidden, ".%s", name);
    if (!err)
        err = zr_path_join(from, root, hidden);
    if (!err)
        err = zr_path_join(to, root, name);
    if (!err)
        err = zr_file_rename(fs, from, to);
    return err ? err : zr_folder_sync(fs, root);
}

/* The contents of a folder with the name of a save. missing: it is a link, or no folder. */
struct contents {
    bool missing, has_manifest;
    size_t n, n_folders;
};

static int stop(void *arg, const char *name)
{
    (void)arg;
    (void)name;
    return 1;
}

static int look_inside(const struct zr_files *fs, const char *path, struct contents *c)
{
    struct zr_names l;
    char inner[ZR_PATH_BYTES];
    *c = (struct contents){0};
    int err = zr_folder_list(fs, path, &c->missing, &l);
    c->n = l.n;
    for (size_t i = 0; !err && i < l.n; i++) {
        bool is_file;
        err = zr_path_join(inner, path, l.name[i]);
        if (err)
            break;
        (void)zr_folder_walk(fs, inner, &is_file, stop, NULL); /* a folder that cannot be opened counts too */
        c->n_folders += !is_file;
        c->has_manifest |= !strcmp(l.name[i], ZR_MANIFEST_NAME);
    }
    zr_names_free(&l);
    return c->missing ? 0 : err;
}

/* Removes an old save. It is renamed to its hidden name first, so that an interrupted removal leaves an
 * unfinished save, which the next prune removes. A folder without a manifest stays: somebody may be copying
 * it. A folder of the user's inside a save also stays where it is. */
static int remove_save(const struct zr_files *fs, const char *root, const char *name, struct zr_log *log)
{
    char path[ZR_PATH_BYTES], to[ZR_PATH_BYTES], hidden[ZR_CHECKPOINT_NAME_BYTES + 1];
    struct contents c;
    int err = zr_path_join(path, root, name);
    if (!err)
        err = look_inside(fs, path, &c);
    if (err || c.missing || (c.n && c.n == c.n_folders))
        return err;
    if (!c.has_manifest) {
        zr_warn(log, "%s: save_keep leaves this folder alone, because it has no " ZR_MANIFEST_NAME, path);
        return 0;
    }
    if (c.n_folders)
        return zr_folder_remove(fs, path, ZR_MANIFEST_NAME);
    snprintf(hidden, sizeof hidden, ".%s", name);
    ZR_TRY(zr_path_join(to, root, hidden));
    ZR_TRY(zr_file_rename(fs, path, to));
    ZR_TRY(zr_folder_sync(fs, root));
    return zr_folder_remove(fs, to, NULL);
}

void zr_checkpoint_prune(const struct zr_files *fs, const char *root, const char *name, int keep,
                         struct zr_log *log)
{
    struct list l;
    char path[ZR_PATH_BYTES];
    int kept = 0;
    int err = list_saves(fs, root, NULL, &l);
    for (size_t i = 0; !err && i < l.n; i++) {
        struct name *n = &l.names[i];
        if (!strcmp(n->text, name)) {
            kept += !n->kept;
            continue;
        }
        if (n->kept && !n->hidden)
            continue;
        err = zr_path_join(path, root, n->text);
        if (err)
            break;
        if (!n->hidden) {
            struct zr_manifest m;
            if (!keep)
                continue;
            /* A damaged checkpoint does not count. It would take the place of one that can be loaded. */
            bool broken, good = kept < keep && !zr_checkpoint_open(fs, path, &broken, &m);
            if (good)
                zr_manifest_free(&m);
            kept += good;
            if (good || kept < keep)
                continue;
        }
        if (n->hidden ? zr_folder_remove(fs, path, NULL) : remove_save(fs, root, n->text, log))
            zr_warn(log, "old checkpoints could not be removed: %s", zr_error_text());
    }
    if (err)
        zr_warn(log, "old checkpoints could not be removed: %s", zr_error_text());
    free(l.names);
}

/* ---- finding ---- */

static int check_file(const struct zr_files *fs, const char *folder, const char *name, int64_t bytes,
                      bool *broken)
{
    char path[ZR_PATH_BYTES];
    int64_t n;
    int fd, err = zr_path_join(path, folder, name);
    if (!err)
        err = zr_file_find(fs, path, broken, &fd);
    if (err)
        return err;
    err = zr_file_size(fs, fd, path, &n);
    *broken = !err && n != bytes;
    if (*broken)
        err = zr_fail(ZERO_ERR_IO, "%s: has %lld bytes; the manifest says %lld", path, (long long)n,
                      (long long)bytes);
    zr_file_close(fs, fd, path);
    return err;
}

int zr_checkpoint_open(const struct zr_files *fs, const char *folder, bool *broken, struct zr_manifest *out)
{
    char path[ZR_PATH_BYTES], name[sizeof out->files->name + sizeof ZR_BLOCKS_SUFFIX], *text;
    int64_t n;
    *broken = false;
    *out = (struct zr_manifest){0};
    int err = zr_path_join(path, folder, ZR_MANIFEST_NAME);
    if (!err)
        err = zr_file_load(fs, path, ZR_MANIFEST_MAX, broken, &text, &n);
    if (err)
        return *broken ? zr_fail(ZERO_ERR_IO, "%s: not a checkpoint: it has no " ZR_MANIFEST_NAME, folder)
                       : err;
    /* A complete checkpoint that a later version wrote cannot be read. That is an error, and it is not
     * skipped. */
    *broken = !zr_manifest_is_sound(text, n);
    err = zr_manifest_parse(path, text, n, out);
    free(text);
    if (err)
        return err;
    for (int32_t i = 0; !err && i < out->n_files; i++) {
        const struct zr_manifest_file *f = &out->files[i];
        err = check_file(fs, folder, f->name, f->bytes, broken);
        snprintf(name, sizeof name, "%s%s", f->name, ZR_BLOCKS_SUFFIX);
        if (!err)
            err = check_file(fs, folder, name, 16 + zr_blocks_count(f->bytes) * ZR_SUM_BYTES, broken);
    }
    if (err)
        zr_manifest_free(out);
    return err;
}

/* Tries to open a save. *found: it can be loaded. If it cannot, a log line says that it is skipped. */
static int try_save(const struct zr_files *fs, const char *root, const struct name *save, struct zr_log *log,
                    bool *found)
{
    char path[ZR_PATH_BYTES];
    struct zr_manifest m;
    bool broken;
    *found = false;
    if (save->hidden) {
        zr_warn(log, "%s/%s was never finished: skipped", root, save->text);
        return 0;
    }
    ZR_TRY(zr_path_join(path, root, save->text));
    int err = zr_checkpoint_open(fs, path, &broken, &m);
    if (err && !broken) /* The checkpoint may be good. Taking an older one instead would lose it silently. */
        return err;
    *found = !err;
    if (*found)
        zr_manifest_free(&m);
    else
        zr_warn(log, "skipped: %s", zr_error_text());
    return 0;
}

int zr_checkpoint_latest(const struct zr_files *fs, const char *root, char name[ZR_CHECKPOINT_NAME_BYTES],
                         struct zr_log *log)
{
    struct list l;
    bool missing = false, found = false;
    enum root_manifest manifest;
    name[0] = 0;
    int err = find_manifest(fs, root, &manifest);
    if (err || manifest == OF_CHECKPOINT)
        return err;
    err = list_saves(fs, root, &missing, &l);
    if (err && missing)
        zr_fail(err, "%s: not a checkpoint: there is no such folder", root);
    for (size_t i = 0; !err && !found && i < l.n; i++) {
        err = try_save(fs, root, &l.names[i], log, &found);
        if (found)
            memcpy(name, l.names[i].text, sizeof l.names[i].text);
    }
    if (!err && !found)
        err = manifest == NO_MANIFEST
                  ? zr_fail(ZERO_ERR_IO,
                            "%s: not a checkpoint: it has no " ZR_MANIFEST_NAME
                            " and no finished save; give the folder that zero_save was given",
                            root)
                  : zr_fail(ZERO_ERR_IO,
                            "%s: not a checkpoint: it has no finished save, and %s/" ZR_MANIFEST_NAME
                            " is not libzero's, or is damaged",
                            root, root);
    free(l.names);
    return err;
}
