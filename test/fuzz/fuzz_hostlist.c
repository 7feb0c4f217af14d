/* SPDX-License-Identifier: Apache-2.0 */
/* fuzz_hostlist.c: parses arbitrary bytes as a list of hosts in Slurm's format. A slow expander, which builds
 * every name, must accept the same lists and find the same names. */
#include "comm/meet/meeting_point.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

#define DIGITS "0123456789"
#define NAME   "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ._-" DIGITS

/* The number of names, the first name, and whether the current element has produced a name. */
struct expansion {
    int64_t n;
    char first[ZR_HOSTLIST_NAME];
    bool has_begun;
};

static bool take_name(struct expansion *e, const char *name)
{
    if (!e->has_begun && strlen(name) >= ZR_HOSTLIST_NAME)
        return false;
    if (e->n == 0)
        snprintf(e->first, sizeof e->first, "%s", name);
    e->has_begun = true;
    return ++e->n <= ZR_HOSTLIST_MAX;
}

static bool expand(struct expansion *e, const char *before, const char *rest);

/* piece: a number such as "7", or a range such as "01-10". */
static bool expand_piece(struct expansion *e, const char *before, const char *piece, const char *after)
{
    size_t n_low = strspn(piece, DIGITS);
    const char *high_text = piece[n_low] == '-' ? piece + n_low + 1 : piece;
    size_t n_high = strspn(high_text, DIGITS);
    if (n_low < 1 || n_low > 18 || n_high < 1 || n_high > 18 || high_text[n_high])
        return false;
    int64_t low = strtoll(piece, NULL, 10), high = strtoll(high_text, NULL, 10);
    bool good = low <= high;
    for (int64_t i = low; good && i <= high; i++) {
        char name[ZR_HOSTLIST_NAME + 32];
        int width = (int)n_low;
        if (strlen(before) >= ZR_HOSTLIST_NAME) /* even the first name is too long */
            return false;
        snprintf(name, sizeof name, "%s%0*lld", before, width, (long long)i);
        good = expand(e, name, after);
    }
    return good;
}

/* Expands an element: `before` is complete, `rest` is still to be read. */
static bool expand(struct expansion *e, const char *before, const char *rest)
{
    size_t n = strspn(rest, NAME);
    char *name = malloc(strlen(before) + n + 1), *group = strdup(rest + n);
    sprintf(name, "%s%.*s", before, (int)n, rest);
    char *end = strchr(group, ']'), *pieces = group + 1;
    bool good = false;
    if (!*group) {
        good = take_name(e, name);
    } else if (*group == '[' && end) {
        *end = 0;
        good = true;
        for (char *piece; good && (piece = strsep(&pieces, ","));)
            good = expand_piece(e, name, piece, end + 1);
    }
    free(name);
    free(group);
    return good;
}

/* Commas outside brackets separate elements. */
static bool expand_all(struct expansion *e, char *list)
{
    bool inside = false, good = true;
    char *element = list;
    for (char *c = list; good; c++) {
        bool last = !*c;
        inside = *c == '[' || (inside && *c != ']');
        if (!last && (inside || *c != ','))
            continue;
        *c = 0;
        e->has_begun = false;
        good = *element && expand(e, "", element);
        element = c + 1;
        if (last)
            break;
    }
    return good;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    char *list = malloc(n + 1), *copy, first[ZR_HOSTLIST_NAME] = "untouched";
    struct expansion e = {.n = 0};
    int64_t n_names = -1;
    if (!list)
        return 0;
    memcpy(list, data, n);
    list[n] = 0;
    copy = strdup(list);
    int err = zr_hostlist_first("LIST", list, first, &n_names);
    bool good = expand_all(&e, copy);
    if (err ? good || n_names != -1 || strcmp(first, "untouched") || !strstr(zr_error_text(), "at character ")
            : !good || n_names != e.n || strcmp(first, e.first))
        abort();
    free(copy);
    free(list);
    return 0;
}
