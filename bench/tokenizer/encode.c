/* SPDX-License-Identifier: Apache-2.0 */
/* encode.c: a text becomes ids in these steps, which are those of the tokenizers library:
 *
 *   1. Added tokens are found in the original text, and become their ids.
 *   2. The text between them is normalised.
 *   3. Added tokens are found in the normalised text, and become their ids.
 *   4. The text between them is cut into pieces, by one stage after another.
 *   5. Each piece becomes ids by byte-pair encoding.
 */
#include "bench/tokenizer/internal.h"
#include "kernels/alloc.h"

#include <stdlib.h>
#include <string.h>

struct encoder {
    const struct tokenizer *t;
    tokenizer_take *take;
    void *to, *scratch;
    struct bpe_scratch bpe;
};

static int take_id(const struct encoder *e, int32_t id)
{
    return e->take(e->to, &id, 1);
}

/* ---- UTF-8 ---- */

/* The bytes of the character that begins with this byte of valid UTF-8. */
static size_t character_length(unsigned char first)
{
    return first < 0x80 ? 1 : first < 0xE0 ? 2 : first < 0xF0 ? 3 : 4;
}

/* Returns the code point at s, and its length in *length. -1: the bytes are not UTF-8. */
static int32_t character_at(const unsigned char *s, size_t n, size_t *length)
{
    static const int32_t least[] = {0, 0, 0x80, 0x800, 0x10000};
    size_t k = *length = character_length(*s);
    int32_t c = k == 1 ? *s : *s & (0x7F >> k);
    if (k > n || (*s >= 0x80 && *s < 0xC0) || *s >= 0xF8)
        return -1;
    for (size_t i = 1; i < k; i++) {
        if ((s[i] & 0xC0) != 0x80)
            return -1;
        c = c << 6 | (s[i] & 0x3F);
    }
    return c < least[k] || c > 0x10FFFF || (c >= 0xD800 && c < 0xE000) ? -1 : c;
}

static int check_utf8(const char *text, size_t n)
{
    size_t length;
    for (size_t i = 0; i < n; i += length)
        if (character_at((const unsigned char *)text + i, n - i, &length) < 0)
            return zr_fail(ZERO_ERR_ARG, "the text is not UTF-8: byte %zu is 0x%02x", i,
                           (unsigned char)text[i]);
    return 0;
}

static bool is_space(int32_t c)
{
    return (c >= 9 && c <= 13) || c == ' ' || c == 0x85 || c == 0xA0 || c == 0x1680 ||
           (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F ||
           c == 0x3000;
}

/* Returns where the white space that ends at `at` begins, but not below `from`. */
static size_t space_before(const char *text, size_t from, size_t at)
{
    size_t length;
    while (at > from) {
        size_t i = at - 1;
        while (i > from && (text[i] & 0xC0) == 0x80)
            i--;
        if (!is_space(character_at((const unsigned char *)text + i, at - i, &length)))
            break;
        at = i;
    }
    return at;
}

static size_t space_after(const char *text, size_t n, size_t at)
{
    size_t length;
    while (at < n && is_space(character_at((const unsigned char *)text + at, n - at, &length)))
        at += length;
    return at;
}

/* ---- pieces ---- */

static int cut(struct encoder *e, int k, const char *text, size_t n);

/* Encodes a piece that no stage cuts further. */
static int encode_piece(struct encoder *e, const char *piece, size_t n)
{
    int32_t id = e->t->ignore_merges ? vocabulary_find(&e->t->vocab, piece, n) : -1;
    if (id >= 0)
        return take_id(e, id);
    ZR_TRY(bpe_piece(&e->t->vocab, &e->bpe, piece, n));
    return e->take(e->to, e->bpe.ids, e->bpe.n_ids);
}

/* Gives the matches of a stage, and what lies between them, to the next one. An empty match only cuts. */
static int cut_by_pattern(struct encoder *e, int k, const char *text, size_t n)
{
    size_t from = 0, done = 0, start, end;
    while (from <= n) {
        ZR_TRY(split_find(e->t->stages[k].pattern, e->scratch, text, n, from, &start, &end));
        if (start > n)
            break;
        ZR_TRY(cut(e, k + 1, text + done, start - done));
        ZR_TRY(cut(e, k + 1, text + start, end - start));
        done = end;
        from = end > start ? end : end < n ? end + character_length((unsigned char)text[end]) : n + 1;
    }
    return cut(e, k + 1, text + done, n - done);
}

static int cut_with_prefix(struct encoder *e, int k, const char *text, size_t n)
{
    char *copy;
    ZR_TRY(ZR_ALLOC(copy, (int64_t)n + 1, "%zu bytes of text", n + 1));
    *copy = ' ';
    memcpy(copy + 1, text, n);
    int err = cut(e, k, copy, n + 1);
    free(copy);
    return err;
}

/* Cuts a text by stage k and those after it. */
static int cut(struct encoder *e, int k, const char *text, size_t n)
{
    if (!n)
        return 0;
    if (k == e->t->n_stages)
        return encode_piece(e, text, n);
    if (e->t->stages[k].prefix_space && *text != ' ')
        return cut_with_prefix(e, k, text, n);
    return e->t->stages[k].pattern ? cut_by_pattern(e, k, text, n) : cut(e, k + 1, text, n);
}

/* ---- added tokens ---- */

/* Narrows [*low, *high) to the tokens whose byte number i is c. All of them have the same bytes before it. */
static void narrow(const struct added_tokens *a, size_t i, unsigned char c, int64_t *low, int64_t *high)
{
    int64_t bound[2];
    for (int side = 0; side < 2; side++) {
        int64_t first = *low, last = *high;
        while (first < last) {
            int64_t middle = first + (last - first) / 2;
            const struct added_token *token = &a->list[middle];
            int byte = i < token->n ? (unsigned char)token->text[i] : -1;
            if (byte < c || (side && byte == c))
                first = middle + 1;
            else
                last = middle;
        }
        bound[side] = first;
    }
    *low = bound[0];
    *high = bound[1];
}

/* Returns the longest added token that the text begins with. NULL: none. */
static const struct added_token *longest(const struct added_tokens *a, const char *text, size_t n)
{
    const struct added_token *found = NULL;
    int64_t low = 0, high = a->n;
    for (size_t i = 0; i < n && low < high; i++) {
        narrow(a, i, (unsigned char)text[i], &low, &high);
        if (low < high && a->list[low].n == i + 1) /* the shortest comes first */
            found = &a->list[low];
    }
    return found;
}

typedef int encode_between(struct encoder *e, const char *text, size_t n);

/* Finds added tokens from left to right, and gives `between` what lies between them. */
static int encode_added(struct encoder *e, const struct added_tokens *a, const char *text, size_t n,
                        encode_between *between)
{
    bool begins[256] = {false};
    size_t done = 0;
    for (int64_t i = 0; i < a->n; i++)
        begins[(unsigned char)*a->list[i].text] = true;
    for (size_t i = 0; i < n; i++) {
        const struct added_token *token = begins[(unsigned char)text[i]] ? longest(a, text + i, n - i) : NULL;
        if (!token)
            continue;
        size_t start = token->lstrip ? space_before(text, done, i) : i, end = i + token->n;
        if (start > done)
            ZR_TRY(between(e, text + done, start - done));
        ZR_TRY(take_id(e, token->id));
        done = token->rstrip ? space_after(text, n, end) : end;
        i = done - 1;
    }
    return n > done ? between(e, text + done, n - done) : 0;
}

static int encode_plain(struct encoder *e, const char *text, size_t n)
{
    return cut(e, 0, text, n);
}

static int encode_normalized(struct encoder *e, const char *text, size_t n)
{
    char *copy = NULL;
    if (e->t->nfc) {
        size_t n_copy;
        ZR_TRY(nfc_normalize(text, n, &copy, &n_copy));
        text = copy ? copy : text;
        n = copy ? n_copy : n;
    }
    int err = encode_added(e, &e->t->normalized, text, n, encode_plain);
    free(copy);
    return err;
}

/* ---- the whole ---- */

int tokenizer_encode(const struct tokenizer *t, const char *text, size_t n, bool whole_text,
                     tokenizer_take *take, void *to)
{
    struct encoder e = {.t = t, .take = take, .to = to};
    if (!split_is_available())
        return zr_fail(ZERO_ERR_NOTSUP,
                       "text cannot become tokens, because this zero-bench was built without "
                       "PCRE2 (libpcre2-dev)");
    ZR_TRY(check_utf8(text, n));
    e.scratch = split_scratch_make();
    int err = e.scratch ? 0 : zr_fail(ZERO_ERR_NOMEM, "no memory to match regular expressions");
    if (!err && whole_text && t->n_before)
        err = take(to, t->before, t->n_before);
    if (!err)
        err = encode_added(&e, &t->raw, text, n, encode_normalized);
    if (!err && whole_text && t->n_after)
        err = take(to, t->after, t->n_after);
    bpe_scratch_free(&e.bpe);
    split_scratch_free(e.scratch);
    return err;
}

int token_ids_take(void *to, const int32_t *ids, int64_t n)
{
    struct token_ids *list = to;
    if (list->n + n > list->capacity) {
        int64_t capacity = 2 * (list->n + n) + 64;
        ZR_TRY(ZR_GROW(list->ids, capacity, "%lld token ids", (long long)capacity));
        list->capacity = capacity;
    }
    memcpy(list->ids + list->n, ids, (size_t)n * sizeof *ids);
    list->n += n;
    return 0;
}
