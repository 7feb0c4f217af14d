/* SPDX-License-Identifier: Apache-2.0 */
/* nfc.c: brings text into Unicode's form NFC, by utf8proc.
 *
 * An ASCII character never combines with what is before it. So only characters that are not ASCII, with the
 * one before them, are normalised, a run of them at a time. Most texts are in form NFC and are not copied. */
#include "bench/tokenizer/internal.h"
#include "kernels/alloc.h"

#include <stdlib.h>
#include <string.h>

#ifdef BENCH_HAVE_UTF8PROC
#include <utf8proc.h>

/* utf8proc sorts combining marks in quadratic time. */
#define MAX_MARKS 1000

struct copy {
    char *bytes;
    size_t n, capacity;
};

static int append(struct copy *c, const char *bytes, size_t n)
{
    if (!c->bytes || c->n + n > c->capacity) {
        size_t capacity = 2 * (c->n + n) + 64;
        ZR_TRY(ZR_GROW(c->bytes, (int64_t)capacity, "%zu bytes of text in form NFC", capacity));
        c->capacity = capacity;
    }
    memcpy(c->bytes + c->n, bytes, n);
    c->n += n;
    return 0;
}

static int check_marks(const char *run, size_t n)
{
    int marks = 0;
    utf8proc_int32_t c;
    for (size_t i = 0; i < n;) {
        i += (size_t)utf8proc_iterate((const utf8proc_uint8_t *)run + i, (utf8proc_ssize_t)(n - i), &c);
        marks = utf8proc_get_property(c)->combining_class ? marks + 1 : 0;
        if (marks > MAX_MARKS)
            return zr_fail(ZERO_ERR_NOTSUP, "the text has more than %d combining marks in a row", MAX_MARKS);
    }
    return 0;
}

/* Normalises a run of valid UTF-8. The caller frees *out. */
static int normalize_run(const char *run, size_t n, utf8proc_uint8_t **out, size_t *n_out)
{
    ZR_TRY(check_marks(run, n));
    utf8proc_ssize_t length = utf8proc_map((const utf8proc_uint8_t *)run, (utf8proc_ssize_t)n, out,
                                           UTF8PROC_STABLE | UTF8PROC_COMPOSE);
    *n_out = (size_t)length;
    return length >= 0 ? 0 : zr_fail(ZERO_ERR_NOMEM, "form NFC: %s", utf8proc_errmsg(length));
}

/* Appends the run at text + at in form NFC. A run that does not change is left for a later copy. */
static int take_run(struct copy *c, const char *text, size_t at, size_t n, size_t *copied)
{
    utf8proc_uint8_t *run = NULL;
    size_t n_run;
    int err = normalize_run(text + at, n, &run, &n_run);
    if (!err && (n_run != n || memcmp(run, text + at, n) != 0)) {
        err = append(c, text + *copied, at - *copied);
        err = err ? err : append(c, (const char *)run, n_run);
        *copied = at + n;
    }
    free(run);
    return err;
}

bool nfc_is_available(void)
{
    return true;
}

int nfc_normalize(const char *text, size_t n, char **out, size_t *n_out)
{
    struct copy c = {0};
    size_t copied = 0;
    int err = 0;
    for (size_t i = 0, first; !err && i < n;) {
        if ((unsigned char)text[i] < 0x80) {
            i++;
            continue;
        }
        first = i ? i - 1 : 0; /* if i > 0, an ASCII character is before it */
        while (i < n && (unsigned char)text[i] >= 0x80)
            i++;
        err = take_run(&c, text, first, i - first, &copied);
    }
    if (!err && c.bytes)
        err = append(&c, text + copied, n - copied);
    if (err) {
        free(c.bytes);
        c = (struct copy){0};
    }
    *out = c.bytes;
    *n_out = c.n;
    return err;
}

#else

bool nfc_is_available(void)
{
    return false;
}

int nfc_normalize(const char *text, size_t n, char **out, size_t *n_out)
{
    *out = NULL;
    *n_out = 0;
    for (size_t i = 0; i < n; i++)
        if ((unsigned char)text[i] >= 0x80)
            return zr_fail(ZERO_ERR_NOTSUP,
                           "this tokenizer needs form NFC of text that is not ASCII, but this "
                           "zero-bench was built without utf8proc (libutf8proc-dev)");
    return 0;
}

#endif
