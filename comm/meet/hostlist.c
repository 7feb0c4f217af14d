/* SPDX-License-Identifier: Apache-2.0 */
/* hostlist.c: see hostlist.h. */
#include "comm/meet/hostlist.h"

#include <stdbool.h>
#include <stdio.h>
#include <string.h>

enum { DIGITS = 18 }; /* of one number */

struct reader {
    const char *variable, *list, *at;
    /* of the name that is read: its first form, and for how many it stands */
    char name[ZR_HOSTLIST_NAME];
    int n_name;
    int64_t n;
};

static int refuse_list(const struct reader *r, const char *what)
{
    return zr_fail(ZR_ERR_ARG,
                   "%s is \"%.200s\": %s at character %d; a list such as node[01-03,07],login is allowed",
                   r->variable, r->list, what, (int)(r->at - r->list) + 1);
}

static bool is_digit(char c)
{
    return c >= '0' && c <= '9';
}

static bool is_of_name(char c)
{
    return is_digit(c) || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '.' || c == '_' ||
           c == '-';
}

static int add_to_name(struct reader *r, const char *text, int n)
{
    if (r->n_name + n >= ZR_HOSTLIST_NAME)
        return refuse_list(r, "a name of more than 255 characters");
    memcpy(r->name + r->n_name, text, (size_t)n);
    r->n_name += n;
    return 0;
}

static int read_number(struct reader *r, int64_t *out)
{
    const char *from = r->at;
    for (*out = 0; is_digit(*r->at); r->at++) {
        if (r->at - from >= DIGITS)
            return refuse_list(r, "a number of more than 18 digits");
        *out = *out * 10 + (*r->at - '0');
    }
    return r->at > from ? 0 : refuse_list(r, "no number");
}

/* What is between a bracket and the one that closes it; the first number of it is the name's. */
static int read_group(struct reader *r)
{
    int64_t n = 0;
    for (bool first = true; first || *r->at == ','; first = false) {
        const char *from = ++r->at;
        int64_t low, high;
        int err = read_number(r, &low);
        if (!err && first)
            err = add_to_name(r, from, (int)(r->at - from));
        high = low;
        if (!err && *r->at == '-') {
            r->at++;
            err = read_number(r, &high);
        }
        if (err)
            return err;
        if (high < low)
            return refuse_list(r, "a range that goes down");
        if (high - low >= ZR_HOSTLIST_MOST || (n += high - low + 1) > ZR_HOSTLIST_MOST)
            return refuse_list(r, "more than 65536 names");
    }
    if (*r->at != ']')
        return refuse_list(r, "no ]");
    r->at++;
    r->n *= n;
    return r->n > ZR_HOSTLIST_MOST ? refuse_list(r, "more than 65536 names") : 0;
}

static int read_name(struct reader *r)
{
    const char *from = r->at;
    int err = 0;
    r->n_name = 0;
    r->n = 1;
    while (!err && (is_of_name(*r->at) || *r->at == '[')) {
        if (*r->at == '[')
            err = read_group(r);
        else
            err = add_to_name(r, r->at++, 1);
    }
    if (err)
        return err;
    if (r->at == from)
        return refuse_list(r, *from ? "no name" : "the end");
    return *r->at && *r->at != ',' ? refuse_list(r, "what no name has") : 0;
}

int zr_hostlist_first(const char *variable, const char *list, char first[ZR_HOSTLIST_NAME], int64_t *n)
{
    struct reader r = {.variable = variable, .list = list, .at = list};
    char found[ZR_HOSTLIST_NAME];
    int64_t all = 0;
    for (bool more = true; more;) {
        int err = read_name(&r);
        if (err)
            return err;
        if (!all)
            snprintf(found, sizeof found, "%.*s", r.n_name, r.name);
        all += r.n;
        if (all > ZR_HOSTLIST_MOST)
            return refuse_list(&r, "more than 65536 names");
        more = *r.at == ',';
        r.at += more;
    }
    memcpy(first, found, strlen(found) + 1);
    *n = all;
    return 0;
}
