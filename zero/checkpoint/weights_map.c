/* SPDX-License-Identifier: Apache-2.0 */
/* weights_map.c: the map of names that zero_export and zero_import get. It checks the entries, and finds
 * where each lies in a file and on this rank. Entries name tensors of the whole model. With pipeline stages
 * each rank gives the entries of its table, and all ranks collect them in the order of stages. */
#include "kernels/alloc.h"
#include "zero/checkpoint/weights_inside.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <xxhash.h>

/* An entry of a map: a weight's name in the file, and the tensor of the whole model that has its values.
 * slice: index into the tensor's first dimension; -1: all of it. pp_stage: the pipeline stage of the model
 * that has the tensor. */
struct entry {
    const char *name;
    int32_t tensor, slice, pp_stage;
    bool transposed;
    /* index before the entries were sorted by stage */
    int32_t given_index;
};

struct entries {
    struct entry *list;
    int32_t n;
};

static int32_t count_dims(const struct zr_tensor *t)
{
    int32_t n = 0;
    while (n < 8 && t->shape[n])
        n++;
    return n;
}

/* ---- this rank's map ---- */

/* Returns the slice of a tensor that an entry names. -1: all of it. */
static int resolve_slice(const struct zero_weight *m, int32_t i, const struct zr_tensor *t, int32_t *slice)
{
    char given[32];
    int32_t n_dims = count_dims(t);
    *slice = m->slice ? m->slice - ZERO_SLICE(0) : -1;
    if (!m->slice || (*slice >= 0 && *slice < t->shape[0] && n_dims > 1))
        return 0;
    snprintf(given, sizeof given, *slice < 0 ? "%d" : "ZERO_SLICE(%d)", *slice < 0 ? m->slice : *slice);
    if (n_dims < 2)
        return zr_fail(ZERO_ERR_ARG,
                       "map[%d] (%s): slice is %s, but tensor %s has one dimension; allowed: 0 (all of it)",
                       i, m->name, given, t->name);
    return zr_fail(ZERO_ERR_ARG,
                   "map[%d] (%s): slice is %s of tensor %s; allowed: 0 (all of it), ZERO_SLICE(0) "
                   "to ZERO_SLICE(%lld)",
                   i, m->name, given, t->name, (long long)t->shape[0] - 1);
}

/* Checks an entry, and translates this rank's tensors and layers to those of the whole model. */
static int check_entry(const struct zero_ctx *z, const struct zero_weight *m, int32_t i, struct entry *e)
{
    int32_t slice;
    if (!m->name || !*m->name || !zr_is_utf8(m->name))
        return zr_fail(ZERO_ERR_ARG, "map[%d]: name is NULL, empty or not UTF-8", i);
    if (!strcmp(m->name, "__metadata__"))
        return zr_fail(ZERO_ERR_ARG, "map[%d]: name is __metadata__, which safetensors reserves", i);
    if (m->tensor < 0 || m->tensor >= z->layout->n_tensors)
        return zr_fail(ZERO_ERR_ARG, "map[%d] (%s): tensor is %d; allowed: 0..%d", i, m->name, m->tensor,
                       z->layout->n_tensors - 1);
    const struct zr_tensor *t = &z->layout->tensors[m->tensor];
    ZR_TRY(resolve_slice(m, i, t, &slice));
    struct zr_whole_at at = zr_whole_at(z, m->tensor);
    if (m->transposed && slice < 0 && t->n_elems < z->whole.tensors[at.tensor].n_elems)
        return zr_fail(ZERO_ERR_ARG,
                       "map[%d] (%s): transposed is set for all layers of tensor %s, but they are on several "
                       "pipeline stages; allowed: transposed 0, or one layer by ZERO_SLICE",
                       i, m->name, t->name);
    *e = (struct entry){.name = m->name,
                        .tensor = at.tensor,
                        .slice = slice < 0 ? -1 : slice + (int32_t)(at.first / (t->n_elems / t->shape[0])),
                        .pp_stage = t->pp_stage * z->mesh.pp + z->config.place.pp,
                        .transposed = m->transposed};
    return 0;
}

/* Makes the list of this rank's entries. map NULL: each tensor under its own name. */
static int list_own(const struct zero_ctx *z, const struct zero_weight *map, int32_t n, struct entries *out)
{
    int32_t least = map && z->mesh.pp > 1 ? 0 : 1;
    int err = 0;
    n = map ? n : z->layout->n_tensors;
    if (n < least)
        return zr_fail(ZERO_ERR_ARG, "n is %d; allowed: %d and more", n, least);
    ZR_TRY(ZR_ZALLOC(out->list, (int64_t)n + 1, "%d weights", n));
    out->n = n;
    for (int32_t i = 0; !err && i < n; i++) {
        struct zero_weight w = {.name = z->layout->tensors[map ? 0 : i].name, .tensor = i};
        err = check_entry(z, map ? &map[i] : &w, i, &out->list[i]);
    }
    return err;
}

/* ---- the entries of all stages ---- */

/* An entry as ranks exchange it: this struct, then the name with its terminating zero. */
struct reported_entry {
    int32_t tensor, slice, pp_stage, transposed;
};

static struct reported_entry report_of(const struct entry *e)
{
    return (struct reported_entry){e->tensor, e->slice, e->pp_stage, e->transposed};
}

static int64_t report_bytes_of(const struct entries *own)
{
    int64_t n = 0;
    for (int32_t i = 0; i < own->n; i++)
        n += (int64_t)(sizeof(struct reported_entry) + strlen(own->list[i].name) + 1);
    return n;
}

static void report_entries(const struct entries *own, char *out)
{
    for (int32_t i = 0; i < own->n; i++) {
        const struct entry *e = &own->list[i];
        const struct reported_entry t = report_of(e);
        size_t n = strlen(e->name) + 1;
        memcpy(out, &t, sizeof t);
        memcpy(out + sizeof t, e->name, n);
        out += sizeof t + n;
    }
}

/* The size of a rank's list as ranks exchange it, and the number of its entries. */
struct reported_size {
    int64_t bytes, n;
};

/* Collects in *out the entries of the first rank of each pp rank's ranks, one list after the other. *n:
 * number of entries. */
static int exchange_entries(struct zero_ctx *z, const struct entries *own, char **out, int64_t *n)
{
    int32_t n_stage = z->world.world / z->mesh.pp;
    struct reported_size mine = {report_bytes_of(own), own->n}, *sizes = z->from_all;
    int64_t *at = calloc((size_t)z->mesh.pp + 1, sizeof *at), most = 0;
    char *text = malloc((size_t)mine.bytes + 1), *blocks = z->from_all;
    int err = at && text ? 0 : zr_fail(ZERO_ERR_NOMEM, "no memory for the names of %d weights", own->n);
    err = zr_agree_in_run(z, err);
    if (!err)
        err = zr_engine_exchange(z->engine, &mine, sizeof mine, sizes);
    *n = 0;
    for (int32_t s = 0; !err && s < z->mesh.pp; s++) {
        const struct reported_size *theirs = &sizes[s * n_stage];
        at[s + 1] = at[s] + theirs->bytes;
        *n += theirs->n;
        most = zr_max(most, theirs->bytes);
    }
    if (!err) {
        report_entries(own, text);
        err = ZR_ALLOC(*out, at[z->mesh.pp] + 1, "the names of %lld weights", (long long)*n);
        err = zr_agree_in_run(z, err);
    }
    for (int64_t done = 0; !err && done < most; done += ZR_EXCHANGE_BYTES) {
        char block[ZR_EXCHANGE_BYTES] = {0};
        if (done < mine.bytes)
            memcpy(block, text + done, (size_t)zr_min(mine.bytes - done, ZR_EXCHANGE_BYTES));
        err = zr_engine_exchange(z->engine, block, sizeof block, blocks);
        for (int32_t s = 0; !err && s < z->mesh.pp; s++) {
            int64_t left = zr_min(at[s + 1] - at[s] - done, ZR_EXCHANGE_BYTES);
            if (left > 0)
                memcpy(*out + at[s] + done, blocks + (size_t)(s * n_stage) * sizeof block, (size_t)left);
        }
    }
    free(at);
    free(text);
    return err;
}

static bool same_weight(const struct entry *a, const struct entry *b)
{
    return a->tensor == b->tensor && a->slice == b->slice && a->transposed == b->transposed;
}

static int by_name_and_place(const void *a, const void *b)
{
    const struct entry *x = *(const struct entry *const *)a, *y = *(const struct entry *const *)b;
    int order = strcmp(x->name, y->name);
    return order ? order : (x > y) - (x < y);
}

/* Returns the entries sorted by name. NULL: no memory. */
static struct entry **sort(const struct entries *all)
{
    struct entry **sorted = malloc(((size_t)all->n + 1) * sizeof *sorted);
    for (int32_t i = 0; sorted && i < all->n; i++)
        sorted[i] = &all->list[i];
    if (sorted)
        qsort(sorted, (size_t)all->n, sizeof *sorted, by_name_and_place);
    return sorted;
}

static int by_stage(const void *a, const void *b)
{
    const struct entry *x = a, *y = b;
    return x->pp_stage != y->pp_stage ? (x->pp_stage > y->pp_stage) - (x->pp_stage < y->pp_stage)
                                      : (x->given_index > y->given_index) - (x->given_index < y->given_index);
}

/* Sorts entries by pipeline stage, and keeps the order inside a stage. */
static void sort_by_stage(struct entries *all)
{
    for (int32_t i = 0; i < all->n; i++)
        all->list[i].given_index = i;
    qsort(all->list, (size_t)all->n, sizeof *all->list, by_stage);
}

/* Removes repeated entries, which there are because each stage that has a tensor names it. A tensor of -1
 * marks an entry that goes. */
static int leave_out_repeated(struct entries *all)
{
    struct entry **sorted = sort(all);
    int32_t n = 0;
    if (!sorted)
        return zr_fail(ZERO_ERR_NOMEM, "no memory to compare %d weights", all->n);
    for (int32_t i = 0; i < all->n; i++)
        for (int32_t k = i; k-- > 0 && !strcmp(sorted[k]->name, sorted[i]->name);)
            if (sorted[k]->tensor >= 0 && same_weight(sorted[k], sorted[i])) {
                sorted[i]->tensor = -1;
                break;
            }
    for (int32_t i = 0; i < all->n; i++)
        if (all->list[i].tensor >= 0)
            all->list[n++] = all->list[i];
    all->n = n;
    free(sorted);
    return 0;
}

/* Replaces this rank's entries by those of all ranks. names: memory that holds their names. */
static int receive_all(struct zero_ctx *z, struct entries *entries, char **names)
{
    int64_t n;
    ZR_TRY(exchange_entries(z, entries, names, &n));
    if (n < 1 || n > INT32_MAX / 2)
        return zr_fail(ZERO_ERR_ARG, "n is %lld for all pipeline stages; allowed: 1..%d", (long long)n,
                       INT32_MAX / 2);
    free(entries->list);
    entries->n = 0;
    ZR_TRY(ZR_ZALLOC(entries->list, n, "%lld weights", (long long)n));
    entries->n = (int32_t)n;
    const char *at = *names;
    for (int32_t i = 0; i < entries->n; i++) {
        struct reported_entry t;
        memcpy(&t, at, sizeof t);
        entries->list[i] = (struct entry){.name = at + sizeof t,
                                          .tensor = t.tensor,
                                          .slice = t.slice,
                                          .pp_stage = t.pp_stage,
                                          .transposed = t.transposed};
        at += sizeof t + strlen(at + sizeof t) + 1;
    }
    return 0;
}

/* Makes the list of the whole model from the lists of all pipeline stages. */
static int join_stages(struct zero_ctx *z, struct entries *entries, char **names)
{
    if (z->mesh.pp > 1) /* with one stage this rank has all entries */
        ZR_TRY(receive_all(z, entries, names));
    sort_by_stage(entries);
    return leave_out_repeated(entries);
}

/* ---- whether ranks give the same map ---- */

/* A hash of the first n entries. */
static uint64_t hash_entries(const struct entries *own, int32_t n)
{
    uint64_t hash = 0;
    for (int32_t i = 0; i < n; i++) {
        const struct entry *e = &own->list[i];
        const struct reported_entry t = report_of(e);
        hash = XXH3_64bits_withSeed(&t, sizeof t, hash);
        hash = XXH3_64bits_withSeed(e->name, strlen(e->name) + 1, hash);
    }
    return hash;
}

struct described_entry {
    char text[ZR_EXCHANGE_BYTES];
};

static struct described_entry describe_entry(const struct zero_ctx *z, const struct entries *own, int32_t i)
{
    struct described_entry d = {"nothing"};
    char slice[32] = "";
    if (i >= own->n)
        return d;
    const struct entry *e = &own->list[i];
    if (e->slice >= 0)
        snprintf(slice, sizeof slice, "slice %d of ", e->slice);
    snprintf(d.text, sizeof d.text, "\"%.300s\" (%stensor %.300s%s)", e->name, slice,
             z->whole.tensors[e->tensor].name, e->transposed ? ", transposed" : "");
    return d;
}

/* Collective. Returns ZERO_ERR_MISMATCH and names the first entry that differs between ranks a and b. n: the
 * number of entries that both of them have. */
static int say_difference(struct zero_ctx *z, const struct entries *own, int a, int b, int32_t n)
{
    int32_t first = 0;
    int err = 0;
    /* Entries before first are equal. One before n differs, or n is the number of the shorter map. */
    while (!err && first < n) {
        int32_t middle = first + (n - first) / 2;
        uint64_t mine = hash_entries(own, (int32_t)zr_min(middle + 1, own->n)), *all = z->from_all;
        err = zr_engine_exchange(z->engine, &mine, sizeof mine, all);
        if (!err && all[a] == all[b])
            first = middle + 1;
        else
            n = middle;
    }
    struct described_entry mine = describe_entry(z, own, first), *all = z->from_all;
    if (!err)
        err = zr_engine_exchange(z->engine, &mine, sizeof mine, all);
    if (err)
        return err;
    return zr_fail(ZERO_ERR_MISMATCH,
                   "map[%d] is %.*s on rank %d and %.*s on rank %d; all ranks%s must give the same", first,
                   (int)sizeof all->text, all[b].text, b, (int)sizeof all->text, all[a].text, a,
                   z->mesh.pp > 1 ? " of a pipeline stage" : "");
}

/* The arguments that ranks compare. */
struct map_arguments {
    uint64_t hash;
    int64_t n, max_file_bytes;
};

/* Collective. Only the ranks of one pipeline stage give the same map. */
static int compare_maps(struct zero_ctx *z, const struct entries *own, int64_t max_file_bytes)
{
    struct map_arguments mine = {hash_entries(own, own->n), own->n, max_file_bytes}, *all = z->from_all;
    int world = z->world.world, n_stage = world / z->mesh.pp;
    int err = world > 1 ? zr_engine_exchange(z->engine, &mine, sizeof mine, all) : 0;
    for (int r = 1; !err && r < world; r++) {
        int first = r / n_stage * n_stage;
        if (all[r].max_file_bytes != all[0].max_file_bytes)
            return zr_fail(
                ZERO_ERR_MISMATCH,
                "max_file_bytes is %lld on rank %d and %lld on rank 0; all ranks must give the same",
                (long long)all[r].max_file_bytes, r, (long long)all[0].max_file_bytes);
        if (all[r].hash != all[first].hash || all[r].n != all[first].n)
            return say_difference(z, own, first, r, (int32_t)zr_min(all[r].n, all[first].n));
    }
    return err;
}

/* ---- where each weight lies ---- */

/* Finds how a weight is cut in the file. On entry w->shape is that of this rank's part, with the file's order
 * of dimensions. On return it is that of the whole weight. sliced: the shape lacks the tensor's first
 * dimension. */
static int place_in_file(const struct zero_ctx *z, const struct zr_tensor *t, bool sliced, int32_t i,
                         struct zr_weight *w)
{
    w->cut = zr_tp_none(w->n);
    if (z->mesh.tp > 1 && t->cut) {
        int32_t dim = t->cut_dim - sliced;
        if (dim < 0)
            return zr_fail(
                ZERO_ERR_ARG,
                "map[%d] (%s): slice is set, but tensor %s is cut over tp along its first dimension; "
                "allowed: 0 (all of it)",
                i, w->name, t->name);
        dim = w->transposed ? 1 - dim : dim;
        w->cut = zr_tp_along(w->shape, dim, t->cut_blocks, t->cut_size, z->mesh.tp);
        w->shape[dim] = w->cut.rows;
    }
    w->n_whole = 1;
    for (int32_t d = 0; d < w->n_dims; d++)
        w->n_whole *= w->shape[d];
    return 0;
}

/* Fills in a weight from entry number i. */
static int resolve_one(const struct zero_ctx *z, const struct entry *e, int32_t i, struct zr_weight *w)
{
    const struct zr_tensor *t = &z->whole.tensors[e->tensor];
    bool whole = e->slice < 0;
    *w = (struct zr_weight){
        .name = e->name, .tensor = e->tensor, .transposed = e->transposed, .n_dims = count_dims(t) - !whole};
    memcpy(w->shape, t->shape + !whole, (size_t)w->n_dims * sizeof *w->shape);
    w->n = whole ? t->n_elems : t->n_elems / t->shape[0];
    w->first = whole ? 0 : e->slice * w->n;
    if (e->transposed && w->n_dims != 2)
        return zr_fail(ZERO_ERR_ARG, "map[%d] (%s): transposed is set for %d dimensions; allowed: 2", i,
                       e->name, w->n_dims);
    if (e->transposed) {
        w->rows = w->shape[0];
        w->columns = w->shape[1];
        w->shape[0] = w->columns;
        w->shape[1] = w->rows;
    }
    return place_in_file(z, t, !whole, i, w);
}

/* Finds this rank's tensors from a tensor of the whole model. A rank with several pipeline stages may have
 * several that are parts of the same one. */
struct own_tensors {
    /* (whole.n) the first of this rank's tensors that are parts of the whole tensor, and this rank's copy of
     * a tied tensor; -1: none */
    int32_t *first, *copy;
    /* (layout.n_tensors) the next tensor that is part of the same whole tensor; -1: none */
    int32_t *next;
};

static void free_own_tensors(struct own_tensors *own)
{
    free(own->first);
    free(own->copy);
    free(own->next);
}

/* Fills in *own. The copy of a tied tensor on the last pipeline stage is kept apart, because the first stage
 * has the same values. */
static int find_own_tensors(const struct zero_ctx *z, struct own_tensors *own)
{
    size_t n = (size_t)z->whole.n, n_table = (size_t)z->layout->n_tensors;
    *own = (struct own_tensors){0};
    ZR_TRY(ZR_ALLOC(own->first, n, "the places of %zu tensors", n));
    ZR_TRY(ZR_ALLOC(own->copy, n, "the places of %zu tensors", n));
    ZR_TRY(ZR_ALLOC(own->next, n_table, "the places of %zu tensors", n_table));
    for (size_t t = 0; t < n; t++)
        own->first[t] = own->copy[t] = -1;
    for (int32_t t = 0; t < z->layout->n_tensors; t++) {
        bool copy = z->layout->tensors[t].tie == ZR_TIE_COPY;
        int32_t *link = &(copy ? own->copy : own->first)[zr_whole_at(z, t).tensor];
        own->next[t] = *link;
        *link = t;
    }
    return 0;
}

/* Lists where a weight lies in this rank's tensors. ranges NULL: only counts. */
static int32_t list_ranges(const struct zero_ctx *z, const struct own_tensors *own, const struct zr_weight *w,
                           struct zr_weight_range *ranges)
{
    int32_t n = 0;
    for (int32_t t = own->first[w->tensor]; t >= 0; t = own->next[t]) {
        int64_t from = zr_whole_at(z, t).first, begin = zr_max(w->first, from),
                end = zr_min(w->first + w->n, from + z->layout->tensors[t].n_elems);
        if (begin >= end)
            continue;
        if (ranges)
            ranges[n] = (struct zr_weight_range){
                .tensor = t, .begin = begin - w->first, .n = end - begin, .at = begin - from};
        n++;
    }
    return n;
}

/* Fills in out->ranges, and where each weight's ranges begin. */
static int place_all(const struct zero_ctx *z, struct zr_weights *out)
{
    struct own_tensors own;
    int64_t n = 0;
    int err = find_own_tensors(z, &own);
    for (int32_t i = 0; !err && i < out->n; i++)
        n += list_ranges(z, &own, &out->list[i], NULL);
    free(out->ranges);
    out->ranges = err ? NULL : malloc(((size_t)n + 1) * sizeof *out->ranges);
    if (!err && (!out->ranges || n > INT32_MAX))
        err = zr_fail(ZERO_ERR_NOMEM, "no memory for %lld places of weights", (long long)n);
    for (int32_t i = 0, k = 0; !err && i < out->n; i++) {
        struct zr_weight *w = &out->list[i];
        w->copy = own.copy[w->tensor];
        w->first_range = k;
        k += w->n_ranges = list_ranges(z, &own, w, &out->ranges[k]);
    }
    free_own_tensors(&own);
    return err;
}

/* Fills in all weights. */
static int resolve_all(const struct zero_ctx *z, const struct entries *all, struct zr_weights *out)
{
    free(out->list);
    int err = ZR_ZALLOC(out->list, (int64_t)all->n + 1, "%d weights", all->n);
    out->n = err ? 0 : all->n;
    for (int32_t i = 0; !err && i < out->n; i++)
        err = resolve_one(z, &all->list[i], i, &out->list[i]);
    return err ? err : place_all(z, out);
}

int zr_weights_resolve(struct zero_ctx *z, const struct zero_weight *map, int32_t n, int64_t max_file_bytes,
                       struct zr_weights *out)
{
    struct entries all = {0};
    int err = list_own(z, map, n, &all);
    if (!err)
        err = resolve_all(z, &all, out);
    err = zr_agree_in_run(z, err);
    if (!err)
        err = compare_maps(z, &all, max_file_bytes);
    if (!err && zr_stages(z) > 1) {
        err = join_stages(z, &all, &out->names);
        if (!err)
            err = resolve_all(z, &all, out);
    }
    free(all.list);
    return err;
}

static int by_text(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

int zr_weights_check_names(const struct zr_weights *ws)
{
    const char **sorted;
    int err = ZR_ALLOC(sorted, ws->n, "comparing %d weights", ws->n);
    for (int32_t i = 0; !err && i < ws->n; i++)
        sorted[i] = ws->list[i].name;
    if (!err)
        qsort(sorted, (size_t)ws->n, sizeof *sorted, by_text);
    for (int32_t i = 1; !err && i < ws->n; i++)
        if (!strcmp(sorted[i], sorted[i - 1]))
            err = zr_fail(ZERO_ERR_ARG, "two entries of map are named %s; allowed: a different name for each",
                          sorted[i]);
    free(sorted);
    return err;
}

void zr_weights_free(struct zr_weights *ws)
{
    free(ws->list);
    free(ws->ranges);
    free(ws->names);
}
