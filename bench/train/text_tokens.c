/* SPDX-License-Identifier: Apache-2.0 */
/* text_tokens.c: reads files of text one at a time and encodes each as a document. */
#include "bench/train/text_tokens.h"
#include "bench/train/bytes_data.h"
#include "kernels/alloc.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

bool text_has_tokenizer(const char *dir)
{
    char path[1024];
    return (size_t)snprintf(path, sizeof path, "%s/" TOKENIZER_FILE, dir) < sizeof path &&
           !access(path, F_OK);
}

int64_t text_end_token(const struct hf_config *c)
{
    return c->n_eos ? c->eos[0] : -1;
}

struct text_encoder {
    const struct tokenizer *tokenizer;
    int64_t end_token, n_files;
    tokenizer_take *take;
    void *to;
    char *text;
    size_t n, capacity;
};

/* Reads a whole file, which may be a pipe. */
static int read_text(struct text_encoder *e, const char *path)
{
    FILE *f = fopen(path, "rb");
    if (!f)
        return zr_fail(ZERO_ERR_IO, "cannot read %s: %s", path, strerror(errno));
    int err = 0;
    for (e->n = 0; !err && !feof(f) && !ferror(f);) {
        if (e->n == e->capacity) {
            size_t more = e->capacity ? 2 * e->capacity : 1 << 16;
            err = ZR_GROW(e->text, (int64_t)more, "%zu bytes of text", more);
            e->capacity = err ? e->capacity : more;
        }
        if (!err)
            e->n += fread(e->text + e->n, 1, e->capacity - e->n, f);
    }
    if (!err && ferror(f))
        err = zr_fail(ZERO_ERR_IO, "cannot read %s: %s", path, strerror(errno));
    fclose(f);
    return err;
}

static int encode_file(void *arg, const char *path, bool given)
{
    struct text_encoder *e = arg;
    int32_t end = (int32_t)e->end_token;
    ZR_TRY(read_text(e, path));
    if (!given && text_is_binary(e->text, e->n))
        return 0;
    e->n_files++;
    int err = tokenizer_encode(e->tokenizer, e->text, e->n, true, e->take, e->to);
    if (!err && e->end_token >= 0)
        err = e->take(e->to, &end, 1);
    return err ? zr_fail_more(err, "%s", path) : 0;
}

int text_tokens(const struct tokenizer *t, const char *const *paths, int n_paths, int64_t end_token,
                tokenizer_take *take, void *to, int64_t *n_files)
{
    struct text_encoder e = {.tokenizer = t, .end_token = end_token, .take = take, .to = to};
    int err = 0;
    for (int i = 0; !err && i < n_paths; i++)
        err = text_walk(paths[i], NULL, encode_file, &e);
    free(e.text);
    *n_files += e.n_files;
    return err;
}

int text_tokens_take(void *to, const int32_t *ids, int64_t n)
{
    struct token_ids *list = to;
    if (list->n + n <= TEXT_TOKENS_MAX)
        return token_ids_take(to, ids, n);
    return zr_fail(ZERO_ERR_ARG,
                   "this and the files before it are more than %d tokens; for so many, zero-bench tokenize "
                   "makes a file, which the ranks of --tokens share",
                   TEXT_TOKENS_MAX);
}
