/* SPDX-License-Identifier: Apache-2.0 */
/* tokenizer_json.c: reads the fields of tokenizer.json. If a field asks for something that is not implemented
 * here, the error names it. */
#include "bench/tokenizer/internal.h"
#include "kernels/alloc.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The regular expression that ByteLevel uses with use_regex. */
static const char gpt2_pattern[] =
    "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+";

/* The most levels of sequences within sequences. */
#define MAX_DEPTH 4

struct reader {
    struct tokenizer *t;
    const char *file;
};

/* ---- fields ---- */

static const json_t *find(const json_t *object, const char *name)
{
    const json_t *value = json_object_get(object, name);
    return json_is_null(value) ? NULL : value;
}

/* Fails with a message that names the field and its value. */
static int refuse(const struct reader *r, const char *name, const json_t *value, const char *allowed)
{
    char *text = value ? json_dumps(value, JSON_ENCODE_ANY | JSON_COMPACT) : NULL;
    int err = zr_fail(ZERO_ERR_NOTSUP, "%s: %s is %.100s; allowed: %s", r->file, name,
                      text ? text : "missing", allowed);
    free(text);
    return err;
}

/* fallback -1: the field must be there. */
static int read_bool(const struct reader *r, const json_t *object, const char *name, int fallback, bool *out)
{
    const json_t *value = find(object, name);
    *out = value ? json_is_true(value) : fallback > 0;
    return (value ? json_is_boolean(value) : fallback >= 0) ? 0 : refuse(r, name, value, "true, false");
}

static int refuse_true(const struct reader *r, const json_t *object, const char *name)
{
    return json_is_true(find(object, name)) ? refuse(r, name, find(object, name), "false") : 0;
}

static int refuse_text(const struct reader *r, const json_t *object, const char *name)
{
    const json_t *value = find(object, name);
    return value && json_string_length(value) + !json_is_string(value) ? refuse(r, name, value, "null") : 0;
}

static bool has_type(const json_t *object, const char *type)
{
    const char *own = json_string_value(json_object_get(object, "type"));
    return own && !strcmp(own, type);
}

/* Fails with a message that names the type of a component. */
static int refuse_type(const struct reader *r, const char *field, const json_t *object, const char *allowed)
{
    const json_t *type = find(object, "type");
    if (!object)
        return zr_fail(ZERO_ERR_NOTSUP, "%s: %s is null, but only byte-level BPE is implemented: %s", r->file,
                       field, allowed);
    return zr_fail(ZERO_ERR_NOTSUP, "%s: %s: %.50s is not implemented; allowed: %s", r->file, field,
                   json_is_string(type) ? json_string_value(type) : "a component without type", allowed);
}

/* Calls `read` with each component of a sequence, or with the only component. `list` is the name of a
 * sequence's list, which differs between fields. Without a component it calls `read` with NULL. */
typedef int read_component(struct reader *r, const json_t *component);
static int read_each(struct reader *r, const char *field, const json_t *component, const char *list,
                     int depth, read_component *read)
{
    size_t i;
    json_t *one;
    if (!has_type(component, "Sequence"))
        return read(r, component);
    const json_t *all = find(component, list);
    if (!json_is_array(all) || depth == MAX_DEPTH)
        return zr_fail(ZERO_ERR_ARG, "%s: %s: a Sequence without %s, or too deep", r->file, field, list);
    json_array_foreach((json_t *)(uintptr_t)all, i, one)
        ZR_TRY(read_each(r, field, one, list, depth + 1, read));
    return 0;
}

/* ---- normalizer and pre_tokenizer ---- */

static int read_normalizer(struct reader *r, const json_t *n)
{
    if (n && !has_type(n, "NFC"))
        return refuse_type(r, "normalizer", n, "null, NFC");
    r->t->nfc |= n != NULL;
    return 0;
}

static int add_stage(struct reader *r, bool prefix_space, const char *expression)
{
    if (r->t->n_stages == TOKENIZER_MAX_STAGES)
        return zr_fail(ZERO_ERR_NOTSUP, "%s: pre_tokenizer: has more than %d parts", r->file,
                       TOKENIZER_MAX_STAGES);
    struct split_stage *s = &r->t->stages[r->t->n_stages++];
    s->prefix_space = prefix_space;
    return expression ? split_pattern_make(&s->pattern, r->file, expression) : 0;
}

/* Adds a stage that finds text as it is written. */
static int add_string_stage(struct reader *r, const char *text)
{
    char *quoted, *to;
    ZR_TRY(ZR_ALLOC(quoted, 2 * (int64_t)strlen(text) + 1, "a regular expression"));
    for (to = quoted; *text; *to++ = *text++)
        if (strchr("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~", *text))
            *to++ = '\\';
    *to = 0;
    int err = add_stage(r, false, quoted);
    free(quoted);
    return err;
}

static int read_split(struct reader *r, const json_t *p)
{
    const json_t *pattern = find(p, "pattern"), *behavior = find(p, "behavior");
    const char *regex = json_string_value(find(pattern, "Regex")),
               *string = json_string_value(find(pattern, "String")), *how = json_string_value(behavior);
    if (!how || strcmp(how, "Isolated") != 0)
        return refuse(r, "pre_tokenizer: Split: behavior", behavior, "\"Isolated\"");
    ZR_TRY(refuse_true(r, p, "invert"));
    if (regex && *regex)
        return add_stage(r, false, regex);
    return string && *string ? add_string_stage(r, string)
                             : refuse(r, "pre_tokenizer: Split: pattern", pattern, "Regex, String");
}

/* ByteLevel must be the last stage, because a stage after it would see the characters of its alphabet. */
static int read_pre_tokenizer(struct reader *r, const json_t *p)
{
    bool prefix_space, use_regex, individual;
    if (has_type(p, "ByteLevel")) {
        ZR_TRY(read_bool(r, p, "add_prefix_space", -1, &prefix_space));
        ZR_TRY(read_bool(r, p, "use_regex", 1, &use_regex));
        return add_stage(r, prefix_space, use_regex ? gpt2_pattern : NULL);
    }
    if (has_type(p, "Split"))
        return read_split(r, p);
    if (has_type(p, "Digits")) {
        ZR_TRY(read_bool(r, p, "individual_digits", -1, &individual));
        return add_stage(r, false, individual ? "\\p{N}" : "\\p{N}+");
    }
    return refuse_type(r, "pre_tokenizer", p, "Split, Digits, ByteLevel");
}

/* Counts the ByteLevel components, and whether the last component is one. */
static void count_byte_level(const json_t *p, int *count, bool *is_last)
{
    size_t i;
    json_t *one;
    *is_last = has_type(p, "ByteLevel");
    *count += *is_last;
    json_array_foreach((json_t *)(uintptr_t)json_object_get(p, "pretokenizers"), i, one)
        count_byte_level(one, count, is_last);
}

static int read_pre_tokenizers(struct reader *r, const json_t *p)
{
    int count = 0;
    bool is_last;
    ZR_TRY(read_each(r, "pre_tokenizer", p, "pretokenizers", 0, read_pre_tokenizer));
    count_byte_level(p, &count, &is_last);
    if (count == 1 && is_last)
        return 0;
    return zr_fail(ZERO_ERR_NOTSUP,
                   "%s: pre_tokenizer: has %d components ByteLevel; allowed: one, at the end", r->file,
                   count);
}

/* ---- post_processor and decoder ---- */

/* Appends the ids of one special token of a template. */
static int add_template_token(struct reader *r, const json_t *tokens, const char *name, int32_t *list, int *n)
{
    const json_t *ids = find(find(tokens, name), "ids");
    json_t *value;
    size_t i;
    if (!json_is_array(ids))
        return zr_fail(ZERO_ERR_ARG, "%s: post_processor: special_tokens lacks the ids of \"%.50s\"", r->file,
                       name);
    json_array_foreach((json_t *)(uintptr_t)ids, i, value)
    {
        json_int_t id = json_is_integer(value) ? json_integer_value(value) : -1;
        if (id < 0 || id >= r->t->vocab.n || *n == TOKENIZER_MAX_TEMPLATE)
            return zr_fail(
                ZERO_ERR_ARG,
                "%s: post_processor: \"%.50s\" has an id without a token, or there are more than %d", r->file,
                name, TOKENIZER_MAX_TEMPLATE);
        list[(*n)++] = (int32_t)id;
    }
    return 0;
}

/* Reads the template of a single text. The template of a pair is ignored. */
static int read_template(struct reader *r, const json_t *p)
{
    struct tokenizer *t = r->t;
    const json_t *single = find(p, "single"), *tokens = find(p, "special_tokens");
    int texts = 0;
    size_t i;
    json_t *part;
    json_array_foreach((json_t *)(uintptr_t)single, i, part)
    {
        const char *name = json_string_value(find(find(part, "SpecialToken"), "id"));
        texts += find(part, "Sequence") != NULL;
        if (name && texts)
            ZR_TRY(add_template_token(r, tokens, name, t->after, &t->n_after));
        else if (name)
            ZR_TRY(add_template_token(r, tokens, name, t->before, &t->n_before));
    }
    return texts == 1 ? 0 : refuse(r, "post_processor: single", single, "an array with one Sequence");
}

static int read_post_processor(struct reader *r, const json_t *p)
{
    if (!p || has_type(p, "ByteLevel")) /* ByteLevel changes only the positions of tokens */
        return 0;
    if (!has_type(p, "TemplateProcessing"))
        return refuse_type(r, "post_processor", p, "null, ByteLevel, TemplateProcessing");
    if (r->t->n_before || r->t->n_after)
        return zr_fail(ZERO_ERR_NOTSUP, "%s: post_processor: has two templates; allowed: one", r->file);
    return read_template(r, p);
}

static int read_decoder(struct reader *r, const json_t *d)
{
    return has_type(d, "ByteLevel") ? 0 : refuse_type(r, "decoder", d, "ByteLevel");
}

/* ---- model and added_tokens ---- */

/* The number of ids that added tokens need. */
static int64_t n_added_ids(const json_t *list)
{
    int64_t n = 0;
    size_t i;
    json_t *one;
    json_array_foreach((json_t *)(uintptr_t)list, i, one)
    {
        json_int_t id = json_integer_value(json_object_get(one, "id"));
        n = id >= n && id < TOKENIZER_MAX_IDS ? id + 1 : n;
    }
    return n;
}

static int read_model(struct reader *r, const json_t *m, int64_t extra_ids)
{
    struct vocabulary *v = &r->t->vocab;
    if (find(m, "type") && !has_type(m, "BPE"))
        return refuse_type(r, "model", m, "BPE");
    if (json_number_value(find(m, "dropout")) > 0)
        return refuse(r, "model: dropout", find(m, "dropout"), "null");
    ZR_TRY(refuse_true(r, m, "byte_fallback"));
    ZR_TRY(refuse_text(r, m, "continuing_subword_prefix"));
    ZR_TRY(refuse_text(r, m, "end_of_word_suffix"));
    ZR_TRY(read_bool(r, m, "ignore_merges", 0, &r->t->ignore_merges));
    ZR_TRY(vocabulary_read(v, r->file, find(m, "vocab"), find(m, "merges"), extra_ids));
    for (int i = 0; i < 256; i++) /* otherwise unk_token has no effect */
        if (v->byte_id[i] < 0)
            return refuse_text(r, m, "unk_token");
    return 0;
}

/* Adds a token with the text by which it is found, in form NFC if `normalize` asks for it. */
static int add_text(struct added_tokens *a, const struct tokenizer *t, const char *content, bool normalize,
                    struct added_token token)
{
    char *copy = NULL;
    size_t n = strlen(content), n_copy;
    if (normalize && t->nfc && nfc_is_available()) /* without it, text that could match is refused */
        ZR_TRY(nfc_normalize(content, n, &copy, &n_copy));
    token.n = copy ? n_copy : n;
    if (!copy) {
        ZR_TRY(ZR_ALLOC(copy, (int64_t)n, "an added token"));
        memcpy(copy, content, n);
    }
    token.text = copy;
    a->list[a->n++] = token;
    return 0;
}

static int read_added_token(struct reader *r, const json_t *vocab, const json_t *one)
{
    struct tokenizer *t = r->t;
    const json_t *number = find(one, "id"), *same = NULL;
    const char *content = json_string_value(find(one, "content"));
    struct added_token token = {.id = (int32_t)json_integer_value(number)};
    bool normalized, special;
    if (!content || !*content || !json_is_integer(number) || json_integer_value(number) != token.id ||
        token.id < 0 || token.id >= t->vocab.n)
        return refuse(r, "added_tokens", one, "objects with content and a possible id");
    ZR_TRY(read_bool(r, one, "lstrip", 0, &token.lstrip));
    ZR_TRY(read_bool(r, one, "rstrip", 0, &token.rstrip));
    ZR_TRY(read_bool(r, one, "special", 0, &special));
    ZR_TRY(read_bool(r, one, "normalized", !special, &normalized));
    if (json_is_true(find(one, "single_word")))
        return refuse(r, "added_tokens: single_word", one, "false");
    same = find(vocab, content);
    if (same ? json_integer_value(same) != token.id : t->vocab.tokens[token.id].kind != TOKEN_NONE)
        return refuse(r, "added_tokens", one, "the id that model.vocab has for it, or a free one");
    if (t->vocab.tokens[token.id].kind >= TOKEN_ADDED)
        return refuse(r, "added_tokens", one, "one of a kind");
    ZR_TRY(
        vocabulary_set(&t->vocab, token.id, content, strlen(content), special ? TOKEN_SPECIAL : TOKEN_ADDED));
    return add_text(normalized ? &t->normalized : &t->raw, t, content, normalized, token);
}

static int by_text(const void *a, const void *b)
{
    const struct added_token *x = a, *y = b;
    int order = memcmp(x->text, y->text, x->n < y->n ? x->n : y->n);
    return order ? order : (x->n > y->n) - (x->n < y->n);
}

static int sort_added(const struct reader *r, struct added_tokens *a)
{
    if (a->n)
        qsort(a->list, (size_t)a->n, sizeof *a->list, by_text);
    for (int64_t i = 1; i < a->n; i++)
        if (!by_text(&a->list[i - 1], &a->list[i]))
            return zr_fail(ZERO_ERR_ARG, "%s: added_tokens: two are \"%.*s\"", r->file,
                           (int)(a->list[i].n < 50 ? a->list[i].n : 50), a->list[i].text);
    return 0;
}

static int read_added_tokens(struct reader *r, const json_t *vocab, const json_t *list)
{
    struct tokenizer *t = r->t;
    int64_t n = (int64_t)json_array_size(list);
    size_t i;
    json_t *one;
    ZR_TRY(ZR_ALLOC(t->raw.list, n, "added tokens"));
    ZR_TRY(ZR_ALLOC(t->normalized.list, n, "added tokens"));
    json_array_foreach((json_t *)(uintptr_t)list, i, one) ZR_TRY(read_added_token(r, vocab, one));
    ZR_TRY(sort_added(r, &t->raw));
    return sort_added(r, &t->normalized);
}

int tokenizer_read_json(struct tokenizer *t, const char *file, const json_t *root)
{
    struct reader r = {t, file};
    const json_t *model = find(root, "model"), *added = find(root, "added_tokens");
    ZR_TRY(read_pre_tokenizers(&r, find(root, "pre_tokenizer")));
    ZR_TRY(read_each(&r, "normalizer", find(root, "normalizer"), "normalizers", 0, read_normalizer));
    ZR_TRY(read_each(&r, "decoder", find(root, "decoder"), "decoders", 0, read_decoder));
    ZR_TRY(read_model(&r, model, n_added_ids(added)));
    ZR_TRY(read_added_tokens(&r, find(model, "vocab"), added));
    return read_each(&r, "post_processor", find(root, "post_processor"), "processors", 0,
                     read_post_processor);
}
