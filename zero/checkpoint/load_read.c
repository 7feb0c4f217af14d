/* load_read.c: a rank's part of a checkpoint, read and checked: is it this model's, where is what, and what
 * of it is mine. */
#include "zero/checkpoint/load_inside.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* More are opened one at a time: a process has 1024 descriptors at the usual limit, and a file may take two.
 */
#define MOST_OPEN_SHARDS 32

void zr_loading_free(struct zr_loading *l)
{
    for (int32_t i = 0; i < l->n_shards; i++)
        zr_shard_close(&l->shards[i]);
    free(l->shards);
    free(l->ranges);
    free(l->by_name);
    if (l->staged != zr_engine_snapshot(l->z->engine))
        free(l->staged);
    free(l->own.list);
    zr_loaded_ranks_free(l->ranks);
    zr_manifest_free(&l->manifest);
}

/* ---- is it this model's? ---- */

static int compare_names(const void *a, const void *b)
{
    return strcmp((*(const struct zr_tensor *const *)a)->name, (*(const struct zr_tensor *const *)b)->name);
}

static int index_names(struct zr_loading *l)
{
    const struct zr_layout *layout = l->z->layout;
    l->by_name = malloc((size_t)layout->n_tensors * sizeof *l->by_name);
    if (!l->by_name)
        return zr_fail(ZR_ERR_NOMEM, "no memory for %d names", layout->n_tensors);
    for (int32_t i = 0; i < layout->n_tensors; i++)
        l->by_name[i] = &layout->tensors[i];
    qsort(l->by_name, (size_t)layout->n_tensors, sizeof *l->by_name, compare_names);
    return 0;
}

/* NULL: the model has none of that name (n bytes). */
static const struct zr_tensor *find_tensor(const struct zr_loading *l, const char *name, size_t n)
{
    int32_t lo = 0, hi = l->z->layout->n_tensors;
    while (lo < hi) {
        int32_t mid = (lo + hi) / 2;
        const char *other = l->by_name[mid]->name;
        int order = strncmp(other, name, n);
        if (!order && other[n])
            order = 1;
        if (!order)
            return l->by_name[mid];
        if (order < 0)
            lo = mid + 1;
        else
            hi = mid;
    }
    return NULL;
}

static bool knows_optimizer(const char *name)
{
    bool known = !strcmp(name, zr_optimizer_name(ZR_OPTIMIZER_NONE));
    for (int kind = 1; kind < ZR_OPTIMIZER_COUNT; kind++)
        known |= !strcmp(name, zr_optimizer_name((enum zr_optimizer)kind));
    return known;
}

/* States are of use only to the optimizer that made them. */
static int check_optimizer(const struct zr_loading *l, const struct zr_manifest_tensor *m,
                           const struct zr_tensor *t)
{
    const char *ours = zr_optimizer_name(zr_kind_of(&l->z->config.options, t->optimizer));
    int32_t n_states = l->z->plan->states_of[t->optimizer];
    if (strcmp(m->optimizer, ours) == 0 && m->n_states == n_states)
        return 0;
    return zr_fail(
        ZR_ERR_ARG,
        "%s: the optimizer of tensor %s is %s with %d states there%s, and %s with %d in this model",
        l->folder, m->name, m->optimizer, m->n_states,
        knows_optimizer(m->optimizer) ? "" : " (this library has none of that name)", ours, n_states);
}

static const char *kind_name(bool trainable, bool buffer)
{
    return buffer ? "a buffer" : trainable ? "trainable" : "frozen";
}

static int check_tensor(const struct zr_loading *l, const struct zr_manifest_tensor *m)
{
    const struct zr_tensor *t = find_tensor(l, m->name, strlen(m->name));
    if (!t)
        return zr_fail(ZR_ERR_ARG, "%s: tensor %s is not in this model", l->folder, m->name);
    int32_t n_dims = zr_tensor_dims(t);
    if (n_dims != m->n_dims || memcmp(t->shape, m->shape, (size_t)n_dims * sizeof *t->shape) != 0) {
        char theirs[ZR_SHAPE_CHARS], ours[ZR_SHAPE_CHARS];
        zr_shape_print(m->shape, m->n_dims, theirs);
        zr_shape_print(t->shape, n_dims, ours);
        return zr_fail(ZR_ERR_ARG, "%s: tensor %s has shape %s there and %s in this model", l->folder,
                       m->name, theirs, ours);
    }
    const char *dtype = zr_kind_dtype(t, ZR_VALUE_PARAM);
    if (strcmp(dtype, m->dtype) != 0)
        return zr_fail(ZR_ERR_ARG, "%s: tensor %s is %s there and %s in this model", l->folder, m->name,
                       m->dtype, dtype);
    if (m->trainable != (t->grad != NULL) || m->buffer != t->buffer)
        return zr_fail(ZR_ERR_ARG, "%s: tensor %s is %s there and %s in this model", l->folder, m->name,
                       kind_name(m->trainable, m->buffer), kind_name(t->grad, t->buffer));
    return m->trainable ? check_optimizer(l, m, t) : 0;
}

static int check_model(struct zr_loading *l)
{
    const struct zr_layout *layout = l->z->layout;
    const struct zr_manifest *m = &l->manifest;
    bool *seen = calloc((size_t)layout->n_tensors, sizeof *seen);
    int err =
        seen ? index_names(l) : zr_fail(ZR_ERR_NOMEM, "no memory to compare %d tensors", layout->n_tensors);
    for (int32_t i = 0; !err && i < m->n_tensors; i++) {
        err = check_tensor(l, &m->tensors[i]);
        if (err)
            break;
        int64_t k = find_tensor(l, m->tensors[i].name, strlen(m->tensors[i].name)) - layout->tensors;
        if (seen[k])
            err = zr_fail(ZR_ERR_IO, "%s: tensor %s is there twice", l->folder, m->tensors[i].name);
        seen[k] = true;
    }
    for (int32_t i = 0; !err && i < layout->n_tensors; i++)
        if (!seen[i])
            err = zr_fail(ZR_ERR_ARG, "%s: tensor %s of this model is not there", l->folder,
                          layout->tensors[i].name);
    free(seen);
    return err;
}

/* ---- where is what? ---- */

static bool parse_count(const char *text, int64_t *out)
{
    char again[24], *end;
    *out = strtoll(text, &end, 10);
    snprintf(again, sizeof again, "%" PRId64, *out);
    return *out >= 0 && !*end && !strcmp(again, text);
}

static bool is_rank_data(const struct zr_manifest_file *f, const struct zr_st_entry *e)
{
    return f->rank_data && !strcmp(e->name, ZR_RANK_DATA_NAME);
}

/* The program's own bytes of a rank, which the manifest says there are. */
static int check_rank_data(const struct zr_loading *l, int32_t file)
{
    const struct zr_manifest_file *f = &l->manifest.files[file];
    const struct zr_shard *s = &l->shards[file];
    bool found = !f->rank_data;
    for (int64_t i = 0; i < s->st.n_entries; i++)
        found |= is_rank_data(f, &s->st.entries[i]) &&
                 s->st.entries[i].end - s->st.entries[i].begin == f->rank_data;
    return found ? 0
                 : zr_fail(ZR_ERR_IO, "%s: it has no entry %s of %lld bytes, which the manifest says it has",
                           s->path, ZR_RANK_DATA_NAME, (long long)f->rank_data);
}

static int read_entry(const struct zr_loading *l, int32_t file, const struct zr_st_entry *e,
                      struct zr_load_range *out)
{
    const char *path = l->shards[file].path, *first = strrchr(e->name, '/'), *kind = first;
    while (kind && kind > e->name && *--kind != '/') {
    }
    if (!kind || *kind != '/' || !zr_kind_parse(kind + 1, (size_t)(first - kind - 1), &out->kind) ||
        !parse_count(first + 1, &out->first))
        return zr_fail(ZR_ERR_IO, "%s: entry %s is not named TENSOR/KIND/FIRST", path, e->name);
    const struct zr_tensor *t = find_tensor(l, e->name, (size_t)(kind - e->name));
    if (!t)
        return zr_fail(ZR_ERR_ARG, "%s: entry %s is of a tensor that is not in this model", path, e->name);
    out->tensor = (int32_t)(t - l->z->layout->tensors);
    out->file = file;
    out->at = e->begin;
    out->n = e->n_dims == 1 ? e->shape[0] : -1;
    const char *dtype = zr_kind_dtype(t, out->kind);
    if (strcmp(dtype, e->dtype) != 0)
        return zr_fail(ZR_ERR_IO, "%s: entry %s is %s; it should be %s", path, e->name, e->dtype, dtype);
    if (out->n < 0 || out->first > t->n_elems - out->n)
        return zr_fail(ZR_ERR_IO, "%s: entry %s does not lie within the %lld elements of tensor %s", path,
                       e->name, (long long)t->n_elems, t->name);
    return 0;
}

static int in_order(const void *a, const void *b)
{
    const struct zr_load_range *x = a, *y = b;
    if (x->tensor != y->tensor)
        return x->tensor < y->tensor ? -1 : 1;
    if (x->kind != y->kind)
        return x->kind < y->kind ? -1 : 1;
    if (x->first != y->first)
        return x->first < y->first ? -1 : 1;
    return (x->n > y->n) - (x->n < y->n);
}

static bool is_saved(const struct zr_loading *l, const struct zr_tensor *t, int kind)
{
    struct zr_flat f = {.trainable = t->grad != NULL, .dtype = t->dtype, .optimizer = t->optimizer};
    return zr_plan_saves(l->z->plan, &f, kind);
}

/* Every value of every tensor, once. */
static int check_cover(const struct zr_loading *l)
{
    int64_t i = 0;
    for (int32_t t = 0; t < l->z->layout->n_tensors; t++) {
        const struct zr_tensor *tensor = &l->z->layout->tensors[t];
        for (int kind = ZR_VALUE_PARAM; kind < ZR_MAX_STATES; kind++) {
            char text[ZR_KIND_CHARS];
            int64_t end = 0, should = is_saved(l, tensor, kind) ? tensor->n_elems : 0;
            zr_kind_print(kind, text);
            for (; i < l->n_ranges && l->ranges[i].tensor == t && l->ranges[i].kind == kind; i++) {
                const struct zr_load_range *r = &l->ranges[i];
                if (!should)
                    return zr_fail(ZR_ERR_IO, "%s: tensor %s has %s values, which it should not",
                                   l->shards[r->file].path, tensor->name, text);
                if (r->first < end)
                    return zr_fail(ZR_ERR_IO,
                                   "%s: %s elements %lld..%lld of tensor %s are in another file too",
                                   l->shards[r->file].path, text, (long long)r->first,
                                   (long long)(zr_min(end, r->first + r->n) - 1), tensor->name);
                if (r->first > end)
                    break;
                end = r->first + r->n;
            }
            if (end != should) {
                int64_t next = i < l->n_ranges && l->ranges[i].tensor == t && l->ranges[i].kind == kind
                                   ? l->ranges[i].first
                                   : should;
                return zr_fail(
                    ZR_ERR_IO, "%s: %s elements %lld..%lld of tensor %s are in none of the %d files",
                    l->folder, text, (long long)end, (long long)(next - 1), tensor->name, l->n_shards);
            }
        }
    }
    return 0;
}

static int open_shards(struct zr_loading *l)
{
    const struct zr_manifest *m = &l->manifest;
    int64_t n = 0;
    int err = 0;
    l->shards = calloc((size_t)m->n_files, sizeof *l->shards);
    if (!l->shards)
        return zr_fail(ZR_ERR_NOMEM, "no memory for %d files", m->n_files);
    for (; !err && l->n_shards < m->n_files; l->n_shards += !err) {
        err = zr_shard_open(l->z->files, l->folder, &m->files[l->n_shards], &l->shards[l->n_shards]);
        if (err)
            break;
        n += l->shards[l->n_shards].st.n_entries;
        if (l->n_shards >= MOST_OPEN_SHARDS)
            zr_shard_rest(&l->shards[l->n_shards]);
    }
    if (err)
        return err;
    l->ranges = malloc((size_t)(n + 1) * sizeof *l->ranges);
    if (!l->ranges)
        return zr_fail(ZR_ERR_NOMEM, "no memory for %lld ranges", (long long)n);
    for (int32_t f = 0; f < l->n_shards; f++)
        for (int64_t i = 0; !err && i < l->shards[f].st.n_entries; i++)
            if (!is_rank_data(&m->files[f], &l->shards[f].st.entries[i]))
                err = read_entry(l, f, &l->shards[f].st.entries[i], &l->ranges[l->n_ranges++]);
    for (int32_t f = 0; !err && f < l->n_shards; f++)
        err = check_rank_data(l, f);
    if (err)
        return err;
    qsort(l->ranges, (size_t)l->n_ranges, sizeof *l->ranges, in_order);
    return check_cover(l);
}

/* ---- what is mine of it? ---- */

/* The first range that ends after element `first`. */
static int64_t find_range(const struct zr_loading *l, const struct zr_extent *x)
{
    int64_t lo = 0, hi = l->n_ranges;
    while (lo < hi) {
        int64_t mid = (lo + hi) / 2;
        const struct zr_load_range *r = &l->ranges[mid];
        bool before = r->tensor != x->tensor ? r->tensor < x->tensor
                      : r->kind != x->kind   ? r->kind < x->kind
                                             : r->first + r->n <= x->first;
        if (before)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

/* Lists, by file, the parts of the saved ranges that this rank reads; requests NULL: only counts them. */
static void meet(const struct zr_loading *l, struct zr_request **requests, int64_t *n)
{
    for (int64_t i = 0; i < l->own.n; i++) {
        const struct zr_extent *x = &l->own.list[i];
        for (int64_t at = x->first, k = find_range(l, x); at < x->first + x->n; k++) {
            const struct zr_load_range *r = &l->ranges[k]; /* they cover everything */
            int64_t end = zr_min(x->first + x->n, r->first + r->n);
            if (end <= at)
                continue; /* an empty one */
            if (requests)
                requests[r->file][n[r->file]] = (struct zr_request){.at = r->at + (at - r->first) * x->size,
                                                                    .n = (end - at) * x->size,
                                                                    .dst = x->at + (at - x->first) * x->size};
            n[r->file]++;
            at = end;
        }
    }
}

/* Damage is found now, not when the program asks for it: each rank looks at a part of each. */
static void add_rank_data(const struct zr_loading *l, int32_t file, struct zr_request *requests, int64_t *n)
{
    const struct zr_shard *s = &l->shards[file];
    int64_t rank = l->z->world.rank, world = l->z->world.world;
    for (int64_t i = 0; i < s->st.n_entries; i++) {
        const struct zr_st_entry *e = &s->st.entries[i];
        int64_t size = e->end - e->begin, share = size / world, more = size % world;
        int64_t first = rank * share + zr_min(rank, more), bytes = share + (rank < more);
        if (bytes && is_rank_data(&l->manifest.files[file], e))
            requests[(*n)++] = (struct zr_request){.at = e->begin + first, .n = bytes};
    }
}

static int fetch(struct zr_loading *l)
{
    size_t n_files = (size_t)l->n_shards;
    struct zr_request **requests = calloc(n_files, sizeof *requests);
    int64_t *n = calloc(n_files, sizeof *n);
    int err = requests && n ? 0 : zr_fail(ZR_ERR_NOMEM, "no memory for %d files", l->n_shards);
    if (!err)
        meet(l, NULL, n);
    for (size_t f = 0; !err && f < n_files; f++) {
        requests[f] = malloc((size_t)(n[f] + 2) * sizeof **requests);
        if (!requests[f])
            err = zr_fail(ZR_ERR_NOMEM, "no memory for %lld ranges", (long long)n[f]);
    }
    if (!err) {
        memset(n, 0, n_files * sizeof *n);
        meet(l, requests, n);
        for (size_t f = 0; f < n_files; f++)
            add_rank_data(l, (int32_t)f, requests[f], &n[f]);
    }
    for (size_t f = 0; !err && f < n_files; f++)
        err = zr_shard_fetch(&l->shards[f], requests[f], n[f]);
    for (size_t f = 0; requests && f < n_files; f++)
        free(requests[f]);
    free(requests);
    free(n);
    return err;
}

static int add_bytes(void *arg, const struct zr_run *run)
{
    *(int64_t *)arg += run->snapshot_bytes;
    return 0;
}

/* Nothing has values yet that a failure could spoil: they go from the file to their places, without a copy of
 * all of them in between. */
static bool is_direct(const struct zero_ctx *z)
{
    return zr_awaited_nothing_written(z) && z->device->ops->host_memory;
}

static int read_direct(struct zr_loading *l)
{
    const struct zr_layout *layout = l->z->layout;
    l->staged = malloc((size_t)layout->buffer_bytes + 1);
    if (!l->staged)
        return zr_fail(ZR_ERR_NOMEM, "no memory for the %lld bytes of the buffers",
                       (long long)layout->buffer_bytes);
    int err = zr_extents_to_load(l->z, NULL, 0, &l->own);
    char *at = l->staged;
    for (int64_t i = 0; !err && i < l->own.n; i++) { /* in the table's order */
        const struct zr_tensor *t = &layout->tensors[l->own.list[i].tensor];
        if (!t->buffer)
            continue;
        l->own.list[i].at = at;
        at += zr_buffer_room(t);
    }
    return err ? err : fetch(l);
}

int zr_loading_read(struct zr_loading *l)
{
    struct zero_ctx *z = l->z;
    int64_t bytes = 0;
    int err = check_model(l);
    if (!err)
        err = open_shards(l);
    if (err)
        return err;
    err = zr_buffers_check(z);
    if (err)
        return err;
    l->direct = is_direct(z);
    if (l->direct)
        return read_direct(l);
    zr_engine_runs_to_load(z->engine, add_bytes, &l->buffers_at);
    bytes = l->buffers_at + z->layout->buffer_bytes;
    /* Touching memory for the first time may take longer than reading the file: what is reserved is better,
     * and nobody uses it now. In groups a rank reads more than it saves. */
    l->staged = zr_engine_snapshot(z->engine);
    if (!l->staged || bytes > z->plan->snapshot_bytes)
        l->staged = malloc((size_t)bytes + 1);
    if (!l->staged)
        return zr_fail(ZR_ERR_NOMEM, "no memory for the %lld bytes that this rank loads", (long long)bytes);
    err = zr_extents_to_load(z, l->staged, l->buffers_at, &l->own);
    return err ? err : fetch(l);
}
