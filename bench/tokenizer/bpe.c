/* SPDX-License-Identifier: Apache-2.0 */
/* bpe.c: a vocabulary of byte strings, and byte-pair encoding with it.
 *
 * tokenizer.json writes the bytes of a token as printable characters, one for each byte. In memory, tokens
 * are the bytes themselves. A piece starts as single bytes. While any two neighbours have a merge, the pair
 * with the lowest rank is joined; of equal ranks, the leftmost pair. Symbols are in a linked list, and
 * possible merges in a heap, so that a long piece does not take quadratic time. */
#include "bench/tokenizer/internal.h"
#include "kernels/alloc.h"

#include <stdlib.h>
#include <string.h>

#define MAX_PIECE (1 << 24) /* bytes; each takes 48 bytes of memory */

/* ---- the alphabet of bytes ---- */

static bool stands_for_itself(int c)
{
    return (c >= 33 && c <= 126) || (c >= 161 && c <= 172) || (c >= 174 && c <= 255);
}

/* Fills in the byte of each character of the alphabet. The characters from 256 on stand, in order, for the
 * bytes that do not stand for themselves. -1: the character is not in the alphabet. */
static void make_alphabet(int16_t byte_of[512])
{
    int next = 256;
    for (int c = 0; c < 512; c++)
        byte_of[c] = -1;
    for (int c = 0; c < 256; c++)
        byte_of[stands_for_itself(c) ? c : next++] = (int16_t)c;
}

/* Converts a token from the alphabet to bytes, at most n. Returns how many, or -1 if it has characters that
 * are not in the alphabet. */
static int64_t bytes_of_token(const int16_t byte_of[512], const char *text, size_t n, char *out)
{
    int64_t used = 0;
    for (size_t i = 0; i < n; i++) {
        int c = (unsigned char)text[i];
        if (c >= 0xC0 && c < 0xC8 && i + 1 < n) /* two bytes, for characters below 512 */
            c = (c & 31) << 6 | ((unsigned char)text[++i] & 63);
        else if (c >= 0x80)
            return -1;
        if (byte_of[c] < 0)
            return -1;
        out[used++] = (char)byte_of[c];
    }
    return used;
}

/* ---- tables ---- */

static uint64_t hash_bytes(const char *bytes, size_t n)
{
    uint64_t h = 0xCBF29CE484222325;
    for (size_t i = 0; i < n; i++)
        h = (h ^ (unsigned char)bytes[i]) * 0x100000001B3;
    return h ^ h >> 32;
}

static uint64_t hash_pair(int32_t left, int32_t right)
{
    uint64_t h = ((uint64_t)(uint32_t)left << 32 | (uint32_t)right) * 0x9E3779B97F4A7C15;
    return h ^ h >> 32;
}

static int64_t table_size(int64_t n)
{
    int64_t size = 16;
    while (size < 2 * n)
        size *= 2;
    return size;
}

/* Returns the slot of these bytes in the table, or the empty slot where they belong. */
static int32_t *place_of_bytes(const struct vocabulary *v, const char *bytes, size_t n)
{
    uint64_t mask = (uint64_t)v->n_by_bytes - 1, i = hash_bytes(bytes, n) & mask;
    for (;; i = (i + 1) & mask) {
        int32_t id = v->by_bytes[i];
        if (id < 0 || (v->tokens[id].n == n && !memcmp(v->bytes + v->tokens[id].at, bytes, n)))
            return &v->by_bytes[i];
    }
}

int32_t vocabulary_find(const struct vocabulary *v, const char *bytes, size_t n)
{
    return *place_of_bytes(v, bytes, n);
}

/* The same as place_of_bytes, for the merge of two neighbours. */
static struct merge *place_of_merge(const struct vocabulary *v, int32_t left, int32_t right)
{
    uint64_t mask = (uint64_t)v->n_merges - 1, i = hash_pair(left, right) & mask;
    for (;; i = (i + 1) & mask) {
        struct merge *m = &v->merges[i];
        if (m->left < 0 || (m->left == left && m->right == right))
            return m;
    }
}

/* ---- reading ---- */

int vocabulary_set(struct vocabulary *v, int32_t id, const char *bytes, size_t n, enum token_kind kind)
{
    int64_t needed = v->n_bytes + (int64_t)n;
    if (needed >= v->byte_capacity) {
        int64_t capacity = 2 * needed + 64;
        ZR_TRY(ZR_GROW(v->bytes, capacity, "%lld bytes of tokens", (long long)capacity));
        v->byte_capacity = capacity;
    }
    memcpy(v->bytes + v->n_bytes, bytes, n);
    v->tokens[id] = (struct token){(uint32_t)v->n_bytes, (uint32_t)n, kind};
    v->n_bytes = needed;
    return 0;
}

/* Adds a token of the model. It goes into the hash table only if it consists of characters of the alphabet.
 * Other tokens, such as special ones, are never the result of merges. */
static int add_token(struct vocabulary *v, const char *file, const int16_t byte_of[512], const char *text,
                     int32_t id)
{
    size_t n = strlen(text);
    if (v->tokens[id].kind)
        return zr_fail(ZERO_ERR_ARG, "%s: model.vocab: id %d has two tokens", file, id);
    ZR_TRY(vocabulary_set(v, id, text, n, TOKEN_MODEL));
    char *bytes = v->bytes + v->tokens[id].at;
    int64_t n_own = bytes_of_token(byte_of, text, n, bytes);
    if (n_own < 0) {
        memcpy(bytes, text, n);
        return 0;
    }
    v->tokens[id].n = (uint32_t)n_own;
    v->n_bytes = v->tokens[id].at + n_own;
    *place_of_bytes(v, bytes, (size_t)n_own) = id;
    if (n_own == 1)
        v->byte_id[(unsigned char)*bytes] = id;
    return 0;
}

static int read_tokens(struct vocabulary *v, const char *file, const int16_t byte_of[512],
                       const json_t *vocab, int64_t extra_ids)
{
    const char *text;
    json_t *value;
    v->n = extra_ids;
    json_object_foreach((json_t *)(uintptr_t)vocab, text, value)
    {
        json_int_t id = json_is_integer(value) ? json_integer_value(value) : -1;
        if (id < 0 || id >= TOKENIZER_MAX_IDS)
            return zr_fail(ZERO_ERR_ARG,
                           "%s: model.vocab: the id of \"%.50s\" is not a whole number below %d", file, text,
                           TOKENIZER_MAX_IDS);
        v->n = id >= v->n ? id + 1 : v->n;
    }
    v->n_by_bytes = table_size((int64_t)json_object_size(vocab));
    ZR_TRY(ZR_ZALLOC(v->tokens, v->n, "%lld tokens", (long long)v->n));
    ZR_TRY(ZR_ALLOC(v->by_bytes, v->n_by_bytes, "a table of tokens"));
    memset(v->by_bytes, -1, (size_t)v->n_by_bytes * sizeof *v->by_bytes);
    memset(v->byte_id, -1, sizeof v->byte_id);
    json_object_foreach((json_t *)(uintptr_t)vocab, text, value)
        ZR_TRY(add_token(v, file, byte_of, text, (int32_t)json_integer_value(value)));
    return 0;
}

/* Finds the two tokens of a merge, "a b" or ["a", "b"]. Returns false if it is neither. */
static bool merge_texts(const json_t *value, const char **left, size_t *n_left, const char **right)
{
    const char *text = json_string_value(value), *space = text ? strchr(text, ' ') : NULL;
    *left = text ? text : json_string_value(json_array_get(value, 0));
    *right = space ? space + 1 : json_string_value(json_array_get(value, 1));
    if (!*left || !*right || (!text && json_array_size(value) != 2) || (text && strchr(*right, ' ')))
        return false;
    *n_left = text ? (size_t)(space - text) : strlen(*left);
    return true;
}

static int add_merge(struct vocabulary *v, const char *file, const int16_t byte_of[512], const json_t *value,
                     size_t rank)
{
    const char *left, *right;
    size_t n_left, n_right;
    int32_t id = -1, left_id = -1, right_id = -1;
    if (!merge_texts(value, &left, &n_left, &right))
        return zr_fail(ZERO_ERR_ARG, "%s: model.merges[%zu]: is not two tokens", file, rank);
    n_right = strlen(right);
    char *bytes;
    ZR_TRY(ZR_ALLOC(bytes, (int64_t)(n_left + n_right), "the bytes of a merge"));
    int64_t n = bytes_of_token(byte_of, left, n_left, bytes);
    int64_t more = n < 0 ? -1 : bytes_of_token(byte_of, right, n_right, bytes + n);
    if (more >= 0) {
        left_id = vocabulary_find(v, bytes, (size_t)n);
        right_id = vocabulary_find(v, bytes + n, (size_t)more);
        id = vocabulary_find(v, bytes, (size_t)(n + more));
    }
    free(bytes);
    if (n <= 0 || more <= 0 || left_id < 0 || right_id < 0 || id < 0)
        return zr_fail(ZERO_ERR_ARG,
                       "%s: model.merges[%zu]: model.vocab lacks \"%.*s\", \"%.50s\" or both together", file,
                       rank, (int)(n_left < 50 ? n_left : 50), left, right);
    *place_of_merge(v, left_id, right_id) = (struct merge){left_id, right_id, id, (uint32_t)rank};
    return 0;
}

int vocabulary_read(struct vocabulary *v, const char *file, const json_t *vocab, const json_t *merges,
                    int64_t extra_ids)
{
    int16_t byte_of[512];
    size_t rank;
    json_t *value;
    if (!json_is_object(vocab) || !json_is_array(merges))
        return zr_fail(ZERO_ERR_ARG, "%s: model.vocab is not an object, or model.merges is not an array",
                       file);
    make_alphabet(byte_of);
    ZR_TRY(read_tokens(v, file, byte_of, vocab, extra_ids));
    v->n_merges = table_size((int64_t)json_array_size(merges));
    ZR_TRY(ZR_ALLOC(v->merges, v->n_merges, "a table of merges"));
    for (int64_t i = 0; i < v->n_merges; i++)
        v->merges[i].left = -1;
    json_array_foreach((json_t *)(uintptr_t)merges, rank, value)
        ZR_TRY(add_merge(v, file, byte_of, value, rank));
    return 0;
}

void vocabulary_free(struct vocabulary *v)
{
    free(v->tokens);
    free(v->bytes);
    free(v->by_bytes);
    free(v->merges);
}

/* ---- merging ---- */

/* A symbol of the linked list. prev or next -1: it is the first or the last. id -1: it was joined to the
 * symbol before it. */
struct bpe_symbol {
    int32_t id, prev, next;
};

/* The merge of symbol `at` and the next one. */
struct bpe_candidate {
    uint32_t rank;
    int32_t at;
    const struct merge *merge;
};

static bool comes_first(const struct bpe_candidate *a, const struct bpe_candidate *b)
{
    return a->rank != b->rank ? a->rank < b->rank : a->at < b->at;
}

static void push(struct bpe_scratch *s, struct bpe_candidate c)
{
    int64_t i = s->n_heap++;
    for (; i > 0 && comes_first(&c, &s->heap[(i - 1) / 2]); i = (i - 1) / 2)
        s->heap[i] = s->heap[(i - 1) / 2];
    s->heap[i] = c;
}

static struct bpe_candidate pop(struct bpe_scratch *s)
{
    struct bpe_candidate first = s->heap[0], last = s->heap[--s->n_heap];
    int64_t i = 0, child;
    while ((child = 2 * i + 1) < s->n_heap) {
        if (child + 1 < s->n_heap && comes_first(&s->heap[child + 1], &s->heap[child]))
            child++;
        if (!comes_first(&s->heap[child], &last))
            break;
        s->heap[i] = s->heap[child];
        i = child;
    }
    s->heap[i] = last;
    return first;
}

/* Adds the merge of a symbol and the next one to the heap, if they have one. */
static void consider(const struct vocabulary *v, struct bpe_scratch *s, int32_t at)
{
    if (at < 0 || s->symbols[at].next < 0)
        return;
    const struct merge *m = place_of_merge(v, s->symbols[at].id, s->symbols[s->symbols[at].next].id);
    if (m->left >= 0)
        push(s, (struct bpe_candidate){m->rank, at, m});
}

/* Joins a candidate's symbols, unless one of them has changed since. */
static void join(const struct vocabulary *v, struct bpe_scratch *s, const struct bpe_candidate *c)
{
    struct bpe_symbol *left = &s->symbols[c->at];
    if (left->id != c->merge->left || left->next < 0 || s->symbols[left->next].id != c->merge->right)
        return;
    struct bpe_symbol *right = &s->symbols[left->next];
    left->id = c->merge->id;
    left->next = right->next;
    right->id = -1;
    if (left->next >= 0)
        s->symbols[left->next].prev = c->at;
    consider(v, s, left->prev);
    consider(v, s, c->at);
}

/* Allocates memory for a piece of n bytes. The heap begins with fewer than n merges. Each join removes one
 * and adds two at most. */
static int make_room(struct bpe_scratch *s, int64_t n)
{
    if (n <= s->capacity)
        return 0;
    if (n > MAX_PIECE)
        return zr_fail(ZERO_ERR_NOTSUP, "the text has a piece of %lld bytes without a cut; at most %d",
                       (long long)n, MAX_PIECE);
    n = n < 256 ? 256 : n;
    ZR_TRY(ZR_GROW(s->symbols, n, "a piece of %lld bytes", (long long)n));
    ZR_TRY(ZR_GROW(s->heap, 2 * n, "a piece of %lld bytes", (long long)n));
    ZR_TRY(ZR_GROW(s->ids, n, "a piece of %lld bytes", (long long)n));
    s->capacity = n;
    return 0;
}

int bpe_piece(const struct vocabulary *v, struct bpe_scratch *s, const char *piece, size_t n)
{
    ZR_TRY(make_room(s, (int64_t)n));
    int32_t count = (int32_t)n;
    for (int32_t i = 0; i < count; i++) {
        int byte = (unsigned char)piece[i];
        if (v->byte_id[byte] < 0)
            return zr_fail(ZERO_ERR_ARG, "the tokenizer has no token for byte 0x%02x", byte);
        s->symbols[i] = (struct bpe_symbol){v->byte_id[byte], i - 1, i + 1 < count ? i + 1 : -1};
    }
    s->n_heap = s->n_ids = 0;
    for (int32_t i = 0; i < count; i++)
        consider(v, s, i);
    while (s->n_heap) {
        const struct bpe_candidate c = pop(s);
        join(v, s, &c);
    }
    for (int32_t i = 0; i >= 0; i = s->symbols[i].next)
        s->ids[s->n_ids++] = s->symbols[i].id;
    return 0;
}

void bpe_scratch_free(struct bpe_scratch *s)
{
    free(s->symbols);
    free(s->heap);
    free(s->ids);
}
