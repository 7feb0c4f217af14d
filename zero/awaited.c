/* SPDX-License-Identifier: Apache-2.0 */
/* awaited.c: ZERO_INIT_LATER: which elements have no values yet.
 *
 * Until all have, nothing that would read them is done: brackets, steps, saves. zero_load gives values to all
 * of them, zero_write (and zero_import, by it) to ranges, in any order. Every rank makes the same calls, so
 * all come to the same answer; of a model in pipeline stages, those of one stage. */
#include "shard/tp_cut.h"
#include "zero/context.h"

#include <stdlib.h>
#include <string.h>

struct range {
    int64_t first, end;
};

/* Of one tensor. */
struct known {
    struct range *list; /* ascending, apart */
    int32_t n, room;
};

struct zr_awaited {
    bool written; /* to some range, weights or states */
    int32_t n_tensors, n_parts;
    /* (n_tensors, n_parts) With ZERO_WHOLE a write may be to elements of some parts only. Every rank notes
     * what all parts have, so that all of them complete the values in one call. Other tensors use the first
     * list alone. */
    struct known of[];
};

int zr_awaited_open(struct zero_ctx *z)
{
    size_t n = (size_t)z->layout->n_tensors, n_parts = (size_t)z->mesh.parts;
    z->awaited = calloc(1, sizeof *z->awaited + n * n_parts * sizeof *z->awaited->of);
    if (!z->awaited)
        return zr_fail(ZR_ERR_NOMEM, "no memory for a table of %zu tensors", n);
    z->awaited->n_tensors = (int32_t)n;
    z->awaited->n_parts = (int32_t)n_parts;
    return 0;
}

void zr_awaited_close(struct zero_ctx *z)
{
    for (int32_t i = 0; z->awaited && i < z->awaited->n_tensors * z->awaited->n_parts; i++)
        free(z->awaited->of[i].list);
    free(z->awaited);
    z->awaited = NULL;
}

static int32_t lists_of(const struct zero_ctx *z, int32_t tensor, struct known **first)
{
    *first = &z->awaited->of[tensor * z->awaited->n_parts];
    return z->layout->tensors[tensor].given_whole ? z->awaited->n_parts : 1;
}

/* All that there are, of all lists. */
static int64_t n_wanted(const struct zero_ctx *z, int32_t tensor)
{
    struct known *k;
    return lists_of(z, tensor, &k) * z->layout->tensors[tensor].n_elems;
}

static int64_t n_known(const struct zero_ctx *z, int32_t tensor)
{
    struct known *k;
    int64_t n = 0;
    for (int32_t left = lists_of(z, tensor, &k); left > 0; left--, k++)
        for (int32_t i = 0; i < k->n; i++)
            n += k->list[i].end - k->list[i].first;
    return n;
}

static bool is_complete(const struct zero_ctx *z, int32_t tensor)
{
    const struct zr_tensor *t = &z->layout->tensors[tensor];
    return t->buffer || n_known(z, tensor) == n_wanted(z, tensor);
}

static int refuse(const struct zero_ctx *z, const char *call, int32_t tensor)
{
    const struct zr_tensor *t = &z->layout->tensors[tensor];
    return zr_fail(ZR_ERR_ORDER,
                   "%s: tensor %s (unit %d) has values for %lld of its %lld elements: init_from is "
                   "ZERO_INIT_LATER, so first call zero_load, or zero_import and zero_write for all tensors",
                   call, t->name, t->unit, (long long)n_known(z, tensor), (long long)n_wanted(z, tensor));
}

int zr_awaited_refuse(struct zero_ctx *z, const char *call, int32_t tensor)
{
    if (!z->awaited)
        return 0;
    int err = zr_engine_check(z->engine); /* a failure counts for more than what has no values yet */
    if (err)
        return err;
    for (int32_t i = 0; i < z->awaited->n_tensors; i++)
        if ((tensor < 0 || i == tensor) && !is_complete(z, i))
            return refuse(z, call, i);
    return 0;
}

int zr_awaited_refuse_all(struct zero_ctx *z, const char *call)
{
    int err = zr_awaited_refuse(z, call, -1);
    if (z->mesh.stages == 1 || z->config.user.init_from != ZERO_INIT_LATER || z->stages_have_values)
        return err;
    err = zr_agree_in_run(z, err);
    if (!err)
        err = zr_engine_tp_compare(z->engine); /* which is for all ranks, too */
    z->stages_have_values = !err;
    return err;
}

bool zr_awaited_nothing_written(const struct zero_ctx *z)
{
    return z->awaited && !z->awaited->written;
}

static int reserve(struct known *k)
{
    if (k->n < k->room)
        return 0;
    int32_t room = 2 * k->room + 4;
    struct range *more = realloc(k->list, (size_t)room * sizeof *more);
    if (!more)
        return zr_fail(ZR_ERR_NOMEM, "no memory for %d ranges", room);
    k->list = more;
    k->room = room;
    return 0;
}

int zr_awaited_reserve(struct zero_ctx *z, int32_t tensor)
{
    struct known *k;
    int err = 0;
    if (!z->awaited)
        return 0;
    z->awaited->written = true;
    for (int32_t left = lists_of(z, tensor, &k); !err && left > 0; left--)
        err = reserve(k++);
    return err;
}

/* There is room for one more. */
static void add(struct known *k, int64_t first, int64_t end)
{
    int32_t i = 0, j;
    while (i < k->n && k->list[i].end < first)
        i++;
    for (j = i; j < k->n && k->list[j].first <= end; j++) {
        first = zr_min(first, k->list[j].first);
        end = zr_max(end, k->list[j].end);
    }
    memmove(k->list + i + 1, k->list + j, (size_t)(k->n - j) * sizeof *k->list);
    k->n += 1 - (j - i);
    k->list[i] = (struct range){first, end};
}

static void complete(struct zero_ctx *z)
{
    zr_awaited_close(z);
    zr_engine_point(z->engine, true);
    zr_info(z->config.options.log, "all parameters have values");
}

void zr_awaited_note(struct zero_ctx *z, int32_t tensor, bool whole, int64_t first, int64_t n)
{
    struct known *k;
    if (!z->awaited || z->layout->tensors[tensor].buffer || n == 0)
        return;
    const struct zr_tp_cut cut = zr_tp_of_tensor(&z->layout->tensors[tensor], z->mesh.parts);
    int32_t n_lists = lists_of(z, tensor, &k);
    for (int32_t part = 0; part < n_lists; part++) {
        int64_t begin = whole ? zr_tp_from(&cut, part, first) : first,
                end = whole ? zr_tp_from(&cut, part, first + n) : first + n;
        if (begin < end)
            add(&k[part], begin, end);
    }
    for (int32_t i = 0; i < z->awaited->n_tensors; i++)
        if (!is_complete(z, i))
            return;
    complete(z);
}

void zr_awaited_loaded(struct zero_ctx *z)
{
    if (z->awaited)
        complete(z);
}
