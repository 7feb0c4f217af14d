/* SPDX-License-Identifier: Apache-2.0 */
/* tokenizer.c: opens and closes a tokenizer, and returns the bytes of an id. */
#include "bench/tokenizer/internal.h"
#include "kernels/alloc.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#define MAX_FILE (1 << 28) /* bytes; real ones have 1 to 40 million */

int tokenizer_parse(struct tokenizer **out, const char *file, const char *text, size_t n)
{
    json_error_t why;
    struct tokenizer *t = NULL;
    *out = NULL;
    json_t *root = json_loadb(text, n, JSON_REJECT_DUPLICATES, &why);
    int err = 0;
    if (!root)
        err = zr_fail(ZERO_ERR_IO, "%s: line %d: not JSON: %.150s", file, why.line, why.text);
    else if (!json_is_object(root))
        err = zr_fail(ZERO_ERR_IO, "%s: not a JSON object", file);
    else
        err = ZR_ZALLOC(t, 1, "a tokenizer");
    if (!err)
        err = tokenizer_read_json(t, file, root);
    json_decref(root);
    if (err)
        tokenizer_close(t);
    else
        *out = t;
    return err;
}

/* Reads a whole file, which the caller frees. */
static int read_file(const char *path, char **text, size_t *n)
{
    struct stat st;
    FILE *f = fopen(path, "rb");
    if (!f)
        return zr_fail(ZERO_ERR_IO, "%s: cannot be opened: %s", path, strerror(errno));
    int err = 0;
    if (fstat(fileno(f), &st) || !S_ISREG(st.st_mode))
        err = zr_fail(ZERO_ERR_IO, "%s: is not a regular file", path);
    else if (st.st_size > MAX_FILE)
        err = zr_fail(ZERO_ERR_IO, "%s: has more than %d bytes", path, MAX_FILE);
    else
        err = ZR_ALLOC(*text, (int64_t)st.st_size, "the text of %s", path);
    if (!err) {
        *n = fread(*text, 1, (size_t)st.st_size, f);
        if (ferror(f))
            err = zr_fail(ZERO_ERR_IO, "%s: cannot be read: %s", path, strerror(errno));
    }
    fclose(f);
    return err;
}

int tokenizer_open(struct tokenizer **out, const char *path)
{
    char file[1024], *text = NULL;
    struct stat st;
    size_t n = 0;
    *out = NULL;
    bool is_folder = !stat(path, &st) && S_ISDIR(st.st_mode);
    if ((size_t)snprintf(file, sizeof file, "%s%s", path, is_folder ? "/" TOKENIZER_FILE : "") >= sizeof file)
        return zr_fail(ZERO_ERR_ARG, "%.100s...: the path has more than %zu bytes", path, sizeof file - 1);
    int err = read_file(file, &text, &n);
    if (!err)
        err = tokenizer_parse(out, file, text, n);
    free(text);
    return err;
}

static void free_added(struct added_tokens *a)
{
    for (int64_t i = 0; i < a->n; i++)
        free(a->list[i].text);
    free(a->list);
}

void tokenizer_close(struct tokenizer *t)
{
    if (!t)
        return;
    for (int i = 0; i < t->n_stages; i++)
        split_pattern_free(t->stages[i].pattern);
    free_added(&t->raw);
    free_added(&t->normalized);
    vocabulary_free(&t->vocab);
    free(t);
}

int64_t tokenizer_n_ids(const struct tokenizer *t)
{
    return t->vocab.n;
}

static enum token_kind kind_of(const struct tokenizer *t, int64_t id)
{
    return id >= 0 && id < t->vocab.n ? t->vocab.tokens[id].kind : TOKEN_NONE;
}

int64_t tokenizer_added_id(const struct tokenizer *t, const char *content)
{
    const struct vocabulary *v = &t->vocab;
    size_t n = strlen(content);
    for (int64_t id = v->n - 1; id >= 0; id--) {
        const struct token *token = &v->tokens[id];
        if (token->kind >= TOKEN_ADDED && token->n == n && !memcmp(v->bytes + token->at, content, n))
            return id;
    }
    return -1;
}

bool tokenizer_is_special(const struct tokenizer *t, int64_t id)
{
    return kind_of(t, id) == TOKEN_SPECIAL;
}

const char *tokenizer_bytes(const struct tokenizer *t, int64_t id, size_t *n)
{
    static const char unknown[] = "\xEF\xBF\xBD";
    bool known = kind_of(t, id) != TOKEN_NONE;
    *n = known ? t->vocab.tokens[id].n : sizeof unknown - 1;
    return known ? t->vocab.bytes + t->vocab.tokens[id].at : unknown;
}
