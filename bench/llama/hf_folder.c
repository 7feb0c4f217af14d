/* SPDX-License-Identifier: Apache-2.0 */
/* hf_folder.c: copies files between folders of Hugging Face models. A new file is written under a hidden name
 * and then renamed, so that a reader sees the old file or the new one. */
#include "bench/llama/hf_folder.h"
#include "bench/llama/hf_config.h"
#include "kernels/error.h"

#include <dirent.h>
#include <errno.h>
#include <fnmatch.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <jansson.h>

/* Files that are copied if they are there. */
static const char *const copied[] = {
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
};

#define PATH_BYTES 1024

static int io_error(const char *path, const char *what)
{
    return zr_fail(ZERO_ERR_IO, "%s: %s: %s", path, what, strerror(errno));
}

static int join(char path[PATH_BYTES], const char *folder, const char *before, const char *name)
{
    int n = snprintf(path, PATH_BYTES, "%s/%s%s", folder, before, name);
    if (n >= 0 && n < PATH_BYTES)
        return 0;
    return zr_fail(ZERO_ERR_ARG, "%.100s...: the path has more than %d bytes", folder, PATH_BYTES - 1);
}

static bool same_file(const char *a, const char *b)
{
    struct stat x, y;
    return !stat(a, &x) && !stat(b, &y) && x.st_dev == y.st_dev && x.st_ino == y.st_ino;
}

/* A file that is being written. */
struct new_file {
    char path[PATH_BYTES], hidden[PATH_BYTES];
    FILE *f;
};

static int begin_file(struct new_file *w, const char *folder, const char *name)
{
    ZR_TRY(join(w->path, folder, "", name));
    ZR_TRY(join(w->hidden, folder, ".new-", name));
    w->f = fopen(w->hidden, "wb");
    return w->f ? 0 : io_error(w->hidden, "cannot be made");
}

/* Gives the file its name. err: a failure so far, after which the file is removed. Returns the first
 * failure. */
static int end_file(struct new_file *w, int err)
{
    if (!err && (fflush(w->f) || fsync(fileno(w->f))))
        err = io_error(w->hidden, "cannot be written");
    if (fclose(w->f) && !err)
        err = io_error(w->hidden, "cannot be written");
    if (!err && rename(w->hidden, w->path))
        err = io_error(w->path, "cannot be replaced");
    if (err)
        unlink(w->hidden);
    return err;
}

/* Copies a file, unless there is none or it is the same one. */
static int copy_file(const char *from, const char *to, const char *name)
{
    char path[PATH_BYTES], target[PATH_BYTES], block[1 << 14];
    struct new_file w = {0};
    size_t n;
    ZR_TRY(join(path, from, "", name));
    ZR_TRY(join(target, to, "", name));
    if (same_file(path, target))
        return 0;
    FILE *f = fopen(path, "rb");
    if (!f)
        return errno == ENOENT ? 0 : io_error(path, "cannot be opened");
    int err = begin_file(&w, to, name);
    while (!err && (n = fread(block, 1, sizeof block, f)) > 0)
        if (fwrite(block, 1, n, w.f) != n)
            err = io_error(w.hidden, "cannot be written");
    if (!err && ferror(f))
        err = io_error(path, "cannot be read");
    fclose(f);
    return w.f ? end_file(&w, err) : err;
}

/* Prints numbers with 15 digits, as people write them, if that is exact. NULL: no memory. */
static char *print(const json_t *root)
{
    char *text = json_dumps(root, JSON_INDENT(2) | JSON_REAL_PRECISION(15));
    json_t *again = text ? json_loads(text, 0, NULL) : NULL;
    bool exact = json_equal(root, again);
    json_decref(again);
    if (exact)
        return text;
    free(text);
    return json_dumps(root, JSON_INDENT(2) | JSON_REAL_PRECISION(17));
}

int hf_folder_store(const char *dir, const char *name, const json_t *root)
{
    struct new_file w = {0};
    char *text = print(root);
    int err = text ? begin_file(&w, dir, name) : zr_fail(ZERO_ERR_NOMEM, "no memory for %s/%s", dir, name);
    if (!err && fprintf(w.f, "%s\n", text) < 0)
        err = io_error(w.hidden, "cannot be written");
    free(text);
    return w.f ? end_file(&w, err) : err;
}

/* Writes config.json with another dtype, under the name that the file has for it. */
static int copy_config(const char *from, const char *to, enum zero_dtype dtype)
{
    char path[PATH_BYTES];
    json_error_t why;
    ZR_TRY(join(path, from, "", HF_CONFIG_FILE));
    json_t *root = json_load_file(path, JSON_REJECT_DUPLICATES, &why);
    const char *fault = root ? "not a JSON object" : why.text;
    const char *key = json_object_get(root, "dtype") ? "dtype" : "torch_dtype";
    if (json_object_set_new(root, key, json_string(dtype == ZERO_BF16 ? "bfloat16" : "float32"))) {
        json_decref(root);
        return zr_fail(ZERO_ERR_IO, "%s: %.150s", path, fault);
    }
    int err = hf_folder_store(to, HF_CONFIG_FILE, root);
    json_decref(root);
    return err;
}

bool hf_folder_has_weights(const char *dir)
{
    static const char *const names[] = {"model.safetensors", "model.safetensors.index.json"};
    char path[PATH_BYTES];
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (!join(path, dir, "", names[i]) && !access(path, F_OK))
            return true;
    return false;
}

bool hf_folder_has_others(const char *dir, char *name, size_t n)
{
    static const char *const patterns[] = {"*.safetensors", "pytorch_model*", "consolidated.*", "*.gguf"};
    DIR *d = opendir(dir);
    bool found = false;
    for (const struct dirent *e; d && !found && (e = readdir(d));)
        for (size_t i = 0; i < sizeof patterns / sizeof *patterns && !found; i++)
            if (!fnmatch(patterns[i], e->d_name, FNM_PERIOD) && strncmp(e->d_name, "adapter_", 8) != 0) {
                snprintf(name, n, "%s", e->d_name);
                found = true;
            }
    if (d)
        closedir(d);
    return found;
}

bool hf_folder_is_same(const char *a, const char *b)
{
    return !strcmp(a, b) || same_file(a, b);
}

int hf_folder_copy(const char *from, const char *to, enum zero_dtype dtype)
{
    ZR_TRY(copy_config(from, to, dtype));
    for (size_t i = 0; i < sizeof copied / sizeof *copied; i++)
        ZR_TRY(copy_file(from, to, copied[i]));
    return 0;
}
