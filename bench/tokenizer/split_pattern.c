/* SPDX-License-Identifier: Apache-2.0 */
/* split_pattern.c: the regular expressions that cut a text into pieces.
 *
 * The tokenizers library matches with Oniguruma. PCRE2 reads most of its syntax in the same way. This file
 * translates what differs, and refuses what it does not know. */
#include "bench/tokenizer/internal.h"
#include "kernels/alloc.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifdef BENCH_HAVE_PCRE2
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

struct split_pattern {
    pcre2_code *code;
};

struct translation {
    const char *file, *from;
    /* Room for 7 times the expression. */
    char *to;
    size_t used;
    bool in_set;
};

static int refuse(const struct translation *t, const char *at, const char *what)
{
    return zr_fail(ZERO_ERR_NOTSUP,
                   "%s: pre_tokenizer: regular expression %.300s: %s is not implemented, at %.20s", t->file,
                   t->from, what, at);
}

static void put(struct translation *t, const char *text, size_t n)
{
    memcpy(t->to + t->used, text, n);
    t->used += n;
}

/* Translates \p{NAME}. PCRE2 gives the bare name of a script a wider meaning. Returns the length, or 0 if it
 * is not implemented. */
static size_t translate_property(struct translation *t, const char *at)
{
    size_t n = at[2] == '{' ? strspn(at + 3, "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz_") : 0;
    if (n == 0 || at[3 + n] != '}')
        return 0;
    put(t, at, 3);
    put(t, "sc:", n > 2 ? 3 : 0);
    put(t, at + 3, n + 1);
    return n + 4;
}

/* Translates what begins with a backslash. Returns its length, or 0 if it is not implemented. */
static size_t translate_escape(struct translation *t, const char *at)
{
    switch (at[1]) {
    case 's': /* in PCRE2 it matches U+180E too */
        put(t, "\\p{WSpace}", 10);
        return 2;
    case 'S':
        put(t, "\\P{WSpace}", 10);
        return 2;
    case 'p':
    case 'P':
        return translate_property(t, at);
    default:
        if (!strchr("dDnrt", at[1]) && (unsigned char)at[1] < 128 &&
            !strchr("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~ ", at[1]))
            return 0;
        put(t, at, at[1] ? 2 : 1);
        return at[1] ? 2 : 1;
    }
}

/* Returns the length of {3}, {3,} or {1,3}. 0: it is something else, or a + follows, which Oniguruma reads as
 * another repetition. */
static size_t length_of_count(const char *at)
{
    const char *digits = "0123456789";
    size_t first = strspn(at + 1, digits), n = 1 + first;
    if (at[n] == ',')
        n += 1 + strspn(at + n + 1, digits);
    return first && at[n] == '}' && at[n + 1] != '+' ? n + 1 : 0;
}

/* Returns the length of the characters that begin a group, or 0 if such a group is not implemented. */
static size_t length_of_group(const char *at)
{
    static const char *const known[] = {"(?:", "(?i:", "(?=", "(?!", "(?<=", "(?<!", "(?>"};
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (!strncmp(at, known[i], strlen(known[i])))
            return strlen(known[i]);
    return at[1] == '?' || at[1] == '*' ? 0 : 1;
}

/* Translates the element at `at`. Returns its length, or 0 if it is not implemented; *what then names it. */
static size_t translate_one(struct translation *t, const char *at, const char **what)
{
    size_t n = 1;
    *what = "this";
    if (*at == '\\')
        return translate_escape(t, at);
    if (t->in_set) {
        *what = "a set in a set";
        t->in_set = *at != ']';
        n = *at == '[' || (at[0] == '&' && at[1] == '&') ? 0 : 1;
    } else if (*at == '[') {
        t->in_set = true;
        n = at[1] == '^' ? 2 : 1;
        n = at[n] == ']' ? 0 : n;
    } else if (*at == '(') {
        n = length_of_group(at);
    } else if (*at == '{') {
        n = length_of_count(at);
    } else if (strchr("^$.", *at)) {
        n = 0;
    }
    put(t, at, n);
    return n;
}

static int translate(struct translation *t)
{
    const char *what;
    for (const char *at = t->from; *at;) {
        size_t n = translate_one(t, at, &what);
        if (!n)
            return refuse(t, at, what);
        at += n;
    }
    return 0;
}

static int compile(struct split_pattern *p, const struct translation *t)
{
    int code;
    PCRE2_SIZE at;
    char why[120];
    p->code = pcre2_compile((PCRE2_SPTR)t->to, t->used,
                            PCRE2_UTF | PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C | PCRE2_NO_AUTO_CAPTURE, &code,
                            &at, NULL);
    if (p->code)
        return 0;
    pcre2_get_error_message(code, (PCRE2_UCHAR *)why, sizeof why);
    return zr_fail(ZERO_ERR_NOTSUP, "%s: pre_tokenizer: regular expression %.300s: %s", t->file, t->from,
                   why);
}

int split_pattern_make(struct split_pattern **out, const char *file, const char *expression)
{
    struct translation t = {.file = file, .from = expression};
    *out = NULL;
    ZR_TRY(ZR_ALLOC(t.to, 7 * (int64_t)strlen(expression) + 1, "a regular expression"));
    int err = translate(&t);
    if (!err)
        err = ZR_ZALLOC(*out, 1, "a regular expression");
    if (!err)
        err = compile(*out, &t);
    free(t.to);
    return err;
}

void split_pattern_free(struct split_pattern *p)
{
    if (p)
        pcre2_code_free(p->code);
    free(p);
}

struct scratch {
    pcre2_match_data *data;
    pcre2_match_context *context;
};

void *split_scratch_make(void)
{
    struct scratch *s = calloc(1, sizeof *s);
    if (s) {
        s->data = pcre2_match_data_create(1, NULL);
        s->context = pcre2_match_context_create(NULL);
    }
    if (s && s->data && s->context)
        return s;
    split_scratch_free(s);
    return NULL;
}

void split_scratch_free(void *scratch)
{
    struct scratch *s = scratch;
    if (!s)
        return;
    pcre2_match_data_free(s->data);
    pcre2_match_context_free(s->context);
    free(s);
}

bool split_is_available(void)
{
    return true;
}

/* A limit for the backtracking steps of one match. With the expressions that are in use, the steps grow at
 * most linearly with the text. */
static uint32_t most_steps(size_t n)
{
    return n < 1 << 28 ? 1000000 + 8 * (uint32_t)n : UINT32_MAX;
}

int split_find(const struct split_pattern *p, void *scratch, const char *text, size_t n, size_t from,
               size_t *start, size_t *end)
{
    struct scratch *s = scratch;
    char why[120];
    pcre2_set_match_limit(s->context, most_steps(n - from));
    int rc = pcre2_match(p->code, (PCRE2_SPTR)text, n, from, PCRE2_NO_UTF_CHECK, s->data, s->context);
    const PCRE2_SIZE *found = pcre2_get_ovector_pointer(s->data);
    *start = rc >= 0 ? found[0] : n + 1;
    *end = rc >= 0 ? found[1] : n + 1;
    if (rc >= 0 || rc == PCRE2_ERROR_NOMATCH)
        return 0;
    pcre2_get_error_message(rc, (PCRE2_UCHAR *)why, sizeof why);
    return zr_fail(rc == PCRE2_ERROR_NOMEMORY ? ZERO_ERR_NOMEM : ZERO_ERR_NOTSUP,
                   "the text cannot be cut by pre_tokenizer's regular expression: %s", why);
}

#else /* without PCRE2 no text is cut */

int split_pattern_make(struct split_pattern **out, const char *file, const char *expression)
{
    (void)file;
    (void)expression;
    *out = NULL;
    return 0;
}

void split_pattern_free(struct split_pattern *p)
{
    (void)p;
}

void *split_scratch_make(void)
{
    return NULL;
}

void split_scratch_free(void *scratch)
{
    (void)scratch;
}

bool split_is_available(void)
{
    return false;
}

int split_find(const struct split_pattern *p, void *scratch, const char *text, size_t n, size_t from,
               size_t *start, size_t *end)
{
    (void)p;
    (void)scratch;
    (void)text;
    (void)from;
    *start = *end = n + 1;
    return 0;
}

#endif
