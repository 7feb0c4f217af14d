/* SPDX-License-Identifier: Apache-2.0 */
/* tokenize_cmd.c: zero-bench tokenize --model DIR --to FILE PATH... It writes ids without a header. The ranks
 * of a training map the file, so that a host has them once. */
#include "bench/arguments.h"
#include "bench/commands.h"
#include "bench/llama/hf_folder.h"
#include "bench/train/text_tokens.h"
#include "kernels/error.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

struct tokenize_options {
    const char *model, *to;
    const char **paths;
    int n_paths;
};

#define OPTION_STRUCT struct tokenize_options
static const struct option_row rows[] = {
    {"model", "DIR", "The folder of a Hugging Face model, with tokenizer.json and config.json",
     OPTION_TEXT(model)},
    {"to", "FILE", "Write the ids into this file, as unsigned integers of 2 or 4 bytes", OPTION_TEXT(to)},
    {0},
};

static error_t take_path(struct argp_state *state, const struct option_row *row, char *arg, void *to)
{
    struct tokenize_options *o = to;
    (void)state, (void)row;
    o->paths[o->n_paths++] = arg;
    return 0;
}

static error_t finish(struct argp_state *state, void *options)
{
    const struct tokenize_options *o = options;
    if (!o->model || !o->to || !o->n_paths)
        return option_fault(state, "give --model, --to, and files or folders of text");
    for (int i = 0; i < o->n_paths; i++)
        if (hf_folder_is_same(o->to, o->paths[i]))
            return option_fault(state, "--to: %s is also to be read, and would be lost", o->to);
    return 0;
}

static const struct option_table table = {
    .rows = rows,
    .doc = "Encodes text with the tokenizer of a model, for zero-bench train --tokens. Each file is a "
           "document, and the model's end token follows it.",
    .args_doc = "PATH...",
    .read_word = take_path,
    .finish = finish,
};

struct id_file {
    FILE *f;
    int id_bytes;
    int64_t n;
};

static int write_ids(void *to, const int32_t *ids, int64_t n)
{
    struct id_file *out = to;
    out->n += n;
    for (int64_t i = 0; i < n; i++) {
        uint16_t short_id = (uint16_t)ids[i];
        const void *id = out->id_bytes == 2 ? (const void *)&short_id : &ids[i];
        if (fwrite(id, (size_t)out->id_bytes, 1, out->f) != 1)
            return zr_fail(ZERO_ERR_IO, "the ids cannot be written: %s", strerror(errno));
    }
    return 0;
}

/* A link, a pipe or a device, as /dev/stdout, is not ours to remove. */
static void remove_file(const char *path)
{
    struct stat there;
    if (lstat(path, &there) == 0 && S_ISREG(there.st_mode))
        unlink(path);
}

/* Writes all ids. A file that is not complete is removed. */
static int write_file(const struct tokenize_options *o, const struct tokenizer *t, int64_t end_token,
                      struct id_file *out, int64_t *n_files)
{
    bool fits = tokenizer_n_ids(t) <= 1 << 16 && end_token < 1 << 16;
    *out = (struct id_file){.f = fopen(o->to, "wb"), .id_bytes = fits ? 2 : 4};
    if (!out->f)
        return zr_fail(ZERO_ERR_IO, "%s: cannot be made: %s", o->to, strerror(errno));
    int err = text_tokens(t, o->paths, o->n_paths, end_token, write_ids, out, n_files);
    if (fclose(out->f) && !err)
        err = zr_fail(ZERO_ERR_IO, "%s: cannot be written: %s", o->to, strerror(errno));
    if (err)
        remove_file(o->to);
    return err;
}

static int tokenize(const struct tokenize_options *o)
{
    struct hf_config c;
    struct tokenizer *t;
    struct id_file out;
    int64_t n_files = 0;
    ZR_TRY(hf_config_read(&c, o->model));
    ZR_TRY(tokenizer_open(&t, o->model));
    int64_t end_token = text_end_token(&c);
    int err = write_file(o, t, end_token, &out, &n_files);
    tokenizer_close(t);
    ZR_TRY(err);
    printf("%lld tokens of %lld files. Train on them with --tokens %s --token-bytes %d", (long long)out.n,
           (long long)n_files, o->to, out.id_bytes);
    if (end_token >= 0)
        printf(", and with --documents end --end-token %lld to keep files apart", (long long)end_token);
    printf("\n");
    return 0;
}

int tokenize_command(const char *name, int argc, char **argv)
{
    struct tokenize_options o = {.paths = calloc((size_t)argc, sizeof *o.paths)};
    if (!o.paths) {
        fprintf(stderr, "%s: no memory for %d names\n", name, argc);
        return EXIT_FAILURE;
    }
    int status = options_parse(&table, name, argc, argv, &o);
    if (!status && tokenize(&o)) {
        fprintf(stderr, "%s: %s\n", name, zr_error_text());
        status = EXIT_USAGE;
    }
    free(o.paths);
    return status;
}
