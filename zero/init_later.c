/* SPDX-License-Identifier: Apache-2.0 */
/* init_later.c: tracks which parameters have values after ZERO_INIT_LATER.
 *
 * Until every element has a value, calls that read parameters are refused: brackets, steps, saves. zero_load
 * fills all elements. zero_write and zero_import fill ranges in any order. All ranks of a pipeline stage make
 * the same calls, so they reach the same answer without communicating. */
#include "kernels/alloc.h"
#include "shard/tp_cut.h"
#include "zero/context.h"

#include <stdlib.h>
#include <string.h>

struct range {
    int64_t first, end;
};

/* The ranges of one tensor that have values: sorted and disjoint. */
struct known_ranges {
    struct range *list;
    int32_t n, capacity;
};

struct zr_init_later {
    bool written; /* zero_write has written a range of weights or states */
    int32_t n_tensors, n_parts;
    /* (n_tensors, n_parts) With ZERO_WHOLE a write may reach only some parts. Every rank records what all
     * parts have, so all ranks complete the values in the same call. Other tensors use the first list only.
     */
    struct known_ranges lists[];
};

int zr_init_later_open(struct zero_ctx *z)
{
    size_t n = (size_t)z->layout->n_tensors, n_parts = (size_t)z->mesh.tp;
    ZR_TRY(ZR_ZALLOC_ARRAY(z->init_later, sizeof *z->init_later, (int64_t)n,
                           n_parts * sizeof *z->init_later->lists, "a table of %zu tensors", n));
    z->init_later->n_tensors = (int32_t)n;
    z->init_later->n_parts = (int32_t)n_parts;
    return 0;
}

void zr_init_later_close(struct zero_ctx *z)
{
    for (int32_t i = 0; z->init_later && i < z->init_later->n_tensors * z->init_later->n_parts; i++)
        free(z->init_later->lists[i].list);
    free(z->init_later);
    z->init_later = NULL;
}

/* Finds the lists of a tensor. Returns their number. */
static int32_t lists_of(const struct zero_ctx *z, int32_t tensor, struct known_ranges **first)
{
    *first = &z->init_later->lists[tensor * z->init_later->n_parts];
    return z->layout->tensors[tensor].given_whole ? z->init_later->n_parts : 1;
}

/* Returns how many elements need values, over all lists of the tensor. */
static int64_t n_wanted(const struct zero_ctx *z, int32_t tensor)
{
    struct known_ranges *k;
    return lists_of(z, tensor, &k) * z->layout->tensors[tensor].n_elems;
}

/* Returns how many elements have values, over all lists of the tensor. */
static int64_t n_known(const struct zero_ctx *z, int32_t tensor)
{
    struct known_ranges *k;
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
    return zr_fail(ZERO_ERR_ORDER,
                   "%s: tensor %s (unit %d) has values for %lld of its %lld elements: init_from is "
                   "ZERO_INIT_LATER, so first call zero_load, or zero_import and zero_write for all tensors",
                   call, t->name, t->unit, (long long)n_known(z, tensor), (long long)n_wanted(z, tensor));
}

int zr_init_later_require(struct zero_ctx *z, const char *call, int32_t tensor)
{
    if (!z->init_later)
        return 0;
    /* An earlier failure is reported first. */
    ZR_TRY(zr_engine_check(z->engine));
    for (int32_t i = 0; i < z->init_later->n_tensors; i++)
        if ((tensor < 0 || i == tensor) && !is_complete(z, i))
            return refuse(z, call, i);
    return 0;
}

int zr_init_later_require_all(struct zero_ctx *z, const char *call)
{
    int err = zr_init_later_require(z, call, -1);
    if (z->mesh.pp == 1 || z->config.user.init_from != ZERO_INIT_LATER || z->stages_have_values)
        return err;
    err = zr_agree_in_run(z, err);
    if (!err)
        err = zr_engine_tp_compare(z->engine); /* which is for all ranks, too */
    z->stages_have_values = !err;
    return err;
}

bool zr_init_later_nothing_written(const struct zero_ctx *z)
{
    return z->init_later && !z->init_later->written;
}

static int reserve(struct known_ranges *k)
{
    if (k->n < k->capacity)
        return 0;
    int32_t capacity = 2 * k->capacity + 4;
    ZR_TRY(ZR_GROW(k->list, capacity, "%d ranges", capacity));
    k->capacity = capacity;
    return 0;
}

int zr_init_later_reserve(struct zero_ctx *z, int32_t tensor)
{
    struct known_ranges *k;
    int err = 0;
    if (!z->init_later)
        return 0;
    z->init_later->written = true;
    for (int32_t left = lists_of(z, tensor, &k); !err && left > 0; left--)
        err = reserve(k++);
    return err;
}

/* Inserts [first, end), and merges ranges that touch it. The caller has reserved memory. */
static void add(struct known_ranges *k, int64_t first, int64_t end)
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

/* Called when every element has a value: the model may read its parameters. */
static void complete(struct zero_ctx *z)
{
    zr_init_later_close(z);
    zr_engine_point(z->engine, true);
    zr_info(z->config.options.log, "all parameters have values");
}

void zr_init_later_note(struct zero_ctx *z, int32_t tensor, bool whole, int64_t first, int64_t n)
{
    struct known_ranges *k;
    if (!z->init_later || z->layout->tensors[tensor].buffer || n == 0)
        return;
    const struct zr_tp_cut cut = zr_tp_of_tensor(&z->layout->tensors[tensor], z->mesh.tp);
    int32_t n_lists = lists_of(z, tensor, &k);
    for (int32_t part = 0; part < n_lists; part++) {
        int64_t begin = whole ? zr_tp_from(&cut, part, first) : first,
                end = whole ? zr_tp_from(&cut, part, first + n) : first + n;
        if (begin < end)
            add(&k[part], begin, end);
    }
    for (int32_t i = 0; i < z->init_later->n_tensors; i++)
        if (!is_complete(z, i))
            return;
    complete(z);
}

void zr_init_later_loaded(struct zero_ctx *z)
{
    if (z->init_later)
        complete(z);
}
