/* SPDX-License-Identifier: Apache-2.0 */
/* load_read.c: reads and checks a rank's part of a checkpoint. It checks that the checkpoint is of this
 * model, finds where each range lies, and reads the ranges that this rank keeps. */
#include "kernels/alloc.h"
#include "kernels/asserts.h"
#include "zero/checkpoint/float_values.h"
#include "zero/checkpoint/load_inside.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The most files that stay open. Further ones are opened when they are read, because a process usually has
 * 1024 descriptors, and a file may take two. */
#define MAX_OPEN_SHARDS 32

void zr_loading_free(struct zr_loading *l)
{
    for (int32_t i = 0; i < l->n_shards; i++)
        zr_shard_close(&l->shards[i]);
    free(l->shards);
    free(l->ranges);
    free(l->by_name);
    free(l->saved);
    free(l->here);
    free(l->was);
    if (!l->staged_file && l->staged != zr_engine_snapshot(l->z->engine))
        free(l->staged);
    zr_states_close(l->staged_file);
    if (!l->wide_file)
        free(l->wide);
    zr_states_close(l->wide_file);
    free(l->own.list);
    l->z->mapped = NULL;
    zr_states_close(l->states);
    zr_loaded_checkpoint_free(l->loaded);
    zr_manifest_free(&l->manifest);
}

/* ---- comparing the checkpoint with the model ---- */

static int compare_names(const void *a, const void *b)
{
    return strcmp((*(const struct zr_tensor *const *)a)->name, (*(const struct zr_tensor *const *)b)->name);
}

static int index_names(struct zr_loading *l)
{
    const struct zr_whole *whole = &l->z->whole;
    ZR_TRY(ZR_ALLOC(l->by_name, whole->n, "%d names", whole->n));
    for (int32_t i = 0; i < whole->n; i++)
        l->by_name[i] = &whole->tensors[i];
    qsort(l->by_name, (size_t)whole->n, sizeof *l->by_name, compare_names);
    return 0;
}

/* Finds a tensor by its name of n bytes. NULL: the model has no tensor of that name. */
static const struct zr_tensor *find_tensor(const struct zr_loading *l, const char *name, size_t n)
{
    int32_t lo = 0, hi = l->z->whole.n;
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
        known |= !strcmp(name, zr_optimizer_name((enum zero_optimizer)kind));
    return known;
}

#define USE_THE_SAME "; use the same, or move only the weights, with zero_export and zero_import"

/* Refuses states of another optimizer, which are of no use to this one. */
static int check_optimizer(const struct zr_loading *l, const struct zr_manifest_tensor *m,
                           const struct zr_tensor *t)
{
    const char *ours = zr_optimizer_name(t->optimizer);
    if (strcmp(m->optimizer, ours) == 0 && m->n_states == t->n_states)
        return 0;
    return zr_fail(ZERO_ERR_ARG,
                   "%s: the optimizer of tensor %s is %s with %d states there%s, and %s with %d in this "
                   "model" USE_THE_SAME,
                   l->folder, m->name, m->optimizer, m->n_states,
                   knows_optimizer(m->optimizer) ? "" : " (this library has no optimizer of that name)", ours,
                   t->n_states);
}

static const char *kind_name(bool trainable, bool buffer)
{
    return buffer ? "a buffer" : trainable ? "trainable" : "frozen";
}

static int check_tensor(const struct zr_loading *l, const struct zr_manifest_tensor *m)
{
    const struct zr_tensor *t = find_tensor(l, m->name, strlen(m->name));
    if (!t)
        return zr_fail(ZERO_ERR_ARG, "%s: tensor %s is not in this model", l->folder, m->name);
    int32_t n_dims = zr_tensor_dims(t);
    const struct zr_tp_cut *here = &l->here[t - l->z->whole.tensors];
    int64_t shape[8]; /* shape of the whole tensor */
    memcpy(shape, t->shape, sizeof shape);
    if (here->parts > 1)
        shape[t->cut_dim] = here->rows;
    if (n_dims != m->n_dims || memcmp(shape, m->shape, (size_t)n_dims * sizeof *shape) != 0) {
        char theirs[ZR_SHAPE_CHARS], ours[ZR_SHAPE_CHARS];
        zr_shape_print(m->shape, m->n_dims, theirs);
        zr_shape_print(shape, n_dims, ours);
        return zr_fail(ZERO_ERR_ARG, "%s: tensor %s has shape %s there and %s in this model", l->folder,
                       m->name, theirs, ours);
    }
    const char *dtype = zr_st_dtype_of(t->dtype);
    if (strcmp(dtype, m->dtype) != 0)
        return zr_fail(ZERO_ERR_ARG, "%s: tensor %s is %s there and %s in this model%s", l->folder, m->name,
                       m->dtype, dtype, zr_floats_convert(m->dtype, t->dtype) ? USE_THE_SAME : "");
    if (m->buffer != t->buffer)
        return zr_fail(ZERO_ERR_ARG, "%s: tensor %s is %s there and %s in this model", l->folder, m->name,
                       kind_name(m->trainable, m->buffer), kind_name(t->grad, t->buffer));
    return m->trainable && t->grad ? check_optimizer(l, m, t) : 0;
}

/* Returns how the tensor was cut when it was saved. */
static struct zr_tp_cut cut_when_saved(const struct zr_manifest_tensor *m)
{
    int64_t shape[8], n = 1;
    memcpy(shape, m->shape, sizeof shape);
    for (int32_t d = 0; d < m->n_dims; d++)
        n *= shape[d];
    if (!m->parts)
        return zr_tp_none(n);
    shape[m->dim] = m->rows; /* rows of a part */
    return zr_tp_along(shape, m->dim, m->blocks, m->shape[m->dim], m->parts);
}

static int check_model(struct zr_loading *l)
{
    const struct zr_whole *whole = &l->z->whole;
    const struct zr_manifest *m = &l->manifest;
    size_t n_tensors = (size_t)whole->n;
    bool *seen = calloc(n_tensors, sizeof *seen);
    l->saved = calloc(n_tensors, sizeof *l->saved);
    l->here = calloc(n_tensors, sizeof *l->here);
    l->was = calloc(n_tensors, sizeof *l->was);
    int err = seen && l->saved && l->here && l->was
                  ? index_names(l)
                  : zr_fail(ZERO_ERR_NOMEM, "no memory to compare %d tensors", whole->n);
    for (int32_t i = 0; !err && i < whole->n; i++)
        l->here[i] = zr_tp_of_tensor(&whole->tensors[i], l->z->mesh.tp);
    for (int32_t i = 0; !err && i < m->n_tensors; i++) {
        err = check_tensor(l, &m->tensors[i]);
        if (err)
            break;
        int64_t k = find_tensor(l, m->tensors[i].name, strlen(m->tensors[i].name)) - whole->tensors;
        if (seen[k])
            err = zr_fail(ZERO_ERR_IO, "%s: tensor %s is there twice", l->folder, m->tensors[i].name);
        seen[k] = true;
        l->saved[k] = cut_when_saved(&m->tensors[i]);
        l->was[k] = &m->tensors[i];
    }
    for (int32_t i = 0; !err && i < whole->n; i++)
        if (!seen[i])
            err = zr_fail(ZERO_ERR_ARG, "%s: tensor %s of this model is not in the checkpoint", l->folder,
                          whole->tensors[i].name);
    free(seen);
    return err;
}

/* ---- finding ranges in the files ---- */

static bool parse_count(const char *text, int64_t *out)
{
    char again[24], *end;
    *out = strtoll(text, &end, 10);
    snprintf(again, sizeof again, "%" PRId64, *out);
    return *out >= 0 && !*end && !strcmp(again, text);
}

/* Parses "128", or "128@1" for a tensor that was saved in parts. */
static bool parse_place(const char *text, const struct zr_tp_cut *saved, struct zr_load_range *out)
{
    char first[24];
    const char *at = strchr(text, '@');
    int64_t part = 0;
    size_t n = at ? (size_t)(at - text) : strlen(text);
    if ((at != NULL) != (saved->parts > 1) || n >= sizeof first)
        return false;
    memcpy(first, text, n);
    first[n] = 0;
    if (!parse_count(first, &out->first) || (at && !parse_count(at + 1, &part)) || part >= saved->parts)
        return false;
    out->part = (int32_t)part;
    return true;
}

static int read_entry(const struct zr_loading *l, int32_t file, const struct zr_st_entry *e,
                      struct zr_load_range *out)
{
    const char *path = l->shards[file].path, *first = strrchr(e->name, '/'), *kind = first;
    while (kind && kind > e->name && *--kind != '/') {
    }
    if (!kind || *kind != '/' || !zr_kind_parse(kind + 1, (size_t)(first - kind - 1), &out->kind))
        return zr_fail(ZERO_ERR_IO, "%s: entry %s is not named TENSOR/KIND/FIRST", path, e->name);
    const struct zr_tensor *t = find_tensor(l, e->name, (size_t)(kind - e->name));
    if (!t)
        return zr_fail(ZERO_ERR_ARG, "%s: entry %s belongs to a tensor that is not in this model", path,
                       e->name);
    out->tensor = (int32_t)(t - l->z->whole.tensors);
    const struct zr_tp_cut *saved = &l->saved[out->tensor];
    if (!parse_place(first + 1, saved, out))
        return zr_fail(ZERO_ERR_IO, "%s: entry %s is not named TENSOR/KIND/FIRST%s", path, e->name,
                       saved->parts > 1 ? "@PART" : "");
    int64_t n_values = zr_loading_saved_values(l, out->tensor, out->part, out->kind);
    out->file = file;
    out->at = e->begin;
    out->n = e->n_dims == 1 ? e->shape[0] : -1;
    const char *dtype = zr_kind_dtype(t, l->was[out->tensor]->moments, out->kind);
    /* The optimizer decides between I8 and U8, and a frozen tensor has none. */
    bool codes = !strcmp(dtype, "I8") || !strcmp(dtype, "U8");
    if (strcmp(dtype, e->dtype) != 0 && !(codes && !t->grad && zr_st_dtype_bytes(e->dtype) == 1))
        return zr_fail(ZERO_ERR_IO, "%s: entry %s is %s; it should be %s", path, e->name, e->dtype, dtype);
    if (out->n < 0 || out->first > n_values - out->n)
        return zr_fail(ZERO_ERR_IO, "%s: entry %s does not lie within the %lld %s of tensor %s", path,
                       e->name, (long long)n_values, out->kind < ZR_SCALE(0) ? "elements" : "scales",
                       t->name);
    return 0;
}

/* Lists the ranges of a file. These are all of its entries except the program's data. */
static int read_entries(struct zr_loading *l, int32_t file)
{
    const struct zr_shard *s = &l->shards[file];
    const struct zr_st_entry *data[ZR_N_DATA];
    int err = 0;
    for (int k = 0; !err && k < ZR_N_DATA; k++)
        err = zr_shard_find_data(s, &l->manifest.files[file], k, &data[k]);
    for (int64_t i = 0; !err && i < s->st.n_entries; i++)
        if (&s->st.entries[i] != data[ZR_DATA_JOB] && &s->st.entries[i] != data[ZR_DATA_RANK])
            err = read_entry(l, file, &s->st.entries[i], &l->ranges[l->n_ranges++]);
    return err;
}

static int in_order(const void *a, const void *b)
{
    const struct zr_load_range *x = a, *y = b;
    if (x->tensor != y->tensor)
        return x->tensor < y->tensor ? -1 : 1;
    if (x->kind != y->kind)
        return x->kind < y->kind ? -1 : 1;
    if (x->part != y->part)
        return x->part < y->part ? -1 : 1;
    if (x->first != y->first)
        return x->first < y->first ? -1 : 1;
    return (x->n > y->n) - (x->n < y->n);
}

static bool is_of(const struct zr_loading *l, int64_t i, int32_t tensor, int kind, int32_t part)
{
    const struct zr_load_range *r = &l->ranges[i];
    return i < l->n_ranges && r->tensor == tensor && r->kind == kind && r->part == part;
}

/* Checks that the ranges from *i on cover a part once, and moves *i past them. */
static int check_part(const struct zr_loading *l, int32_t t, int kind, int32_t part, int64_t *i)
{
    const struct zr_tensor *tensor = &l->z->whole.tensors[t];
    char text[ZR_KIND_CHARS];
    int64_t end = 0, should = zr_loading_is_saved(l, t, kind) ? zr_loading_saved_values(l, t, part, kind) : 0;
    zr_kind_print(kind, text);
    for (; is_of(l, *i, t, kind, part); ++*i) {
        const struct zr_load_range *r = &l->ranges[*i];
        if (!should)
            return zr_fail(ZERO_ERR_IO, "%s: tensor %s has %s values, which it should not",
                           l->shards[r->file].path, tensor->name, text);
        if (r->first < end)
            return zr_fail(ZERO_ERR_IO, "%s: %s elements %lld..%lld of tensor %s are in another file too",
                           l->shards[r->file].path, text, (long long)r->first,
                           (long long)(zr_min(end, r->first + r->n) - 1), tensor->name);
        if (r->first > end)
            break;
        end = r->first + r->n;
    }
    if (end == should)
        return 0;
    int64_t next = is_of(l, *i, t, kind, part) ? l->ranges[*i].first : should;
    return zr_fail(ZERO_ERR_IO, "%s: %s elements %lld..%lld of tensor %s are in none of the %d files",
                   l->folder, text, (long long)end, (long long)(next - 1), tensor->name, l->n_shards);
}

/* Checks that ranges cover every value of every tensor once. */
static int check_cover(const struct zr_loading *l)
{
    int64_t i = 0;
    int err = 0;
    for (int32_t t = 0; !err && t < l->z->whole.n; t++)
        for (int kind = ZR_VALUE_PARAM; !err && kind < ZR_N_KINDS; kind++)
            for (int32_t part = 0; !err && part < l->saved[t].parts; part++)
                err = check_part(l, t, kind, part, &i);
    return err;
}

static int open_shards(struct zr_loading *l)
{
    const struct zr_manifest *m = &l->manifest;
    int64_t n = 0;
    int err = 0;
    ZR_TRY(ZR_ZALLOC(l->shards, m->n_files, "%d files", m->n_files));
    for (; !err && l->n_shards < m->n_files; l->n_shards += !err) {
        err = zr_shard_open(l->z->files, l->folder, &m->files[l->n_shards], &l->shards[l->n_shards]);
        if (err)
            break;
        n += l->shards[l->n_shards].st.n_entries;
        if (l->n_shards >= MAX_OPEN_SHARDS)
            zr_shard_close_file(&l->shards[l->n_shards]);
    }
    if (err)
        return err;
    ZR_TRY(ZR_ALLOC(l->ranges, n + 1, "%lld ranges", (long long)n));
    for (int32_t f = 0; !err && f < l->n_shards; f++)
        err = read_entries(l, f);
    if (err)
        return err;
    qsort(l->ranges, (size_t)l->n_ranges, sizeof *l->ranges, in_order);
    return check_cover(l);
}

/* ---- reading this rank's part ---- */

/* Returns the first range of a part of a tensor that ends after value `first`. */
static int64_t find_range(const struct zr_loading *l, int32_t tensor, int kind, int32_t part, int64_t first)
{
    int64_t lo = 0, hi = l->n_ranges;
    while (lo < hi) {
        int64_t mid = (lo + hi) / 2;
        const struct zr_load_range *r = &l->ranges[mid];
        bool before = r->tensor != tensor ? r->tensor < tensor
                      : r->kind != kind   ? r->kind < kind
                      : r->part != part   ? r->part < part
                                          : r->first + r->n <= first;
        if (before)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

/* The requests of this rank, by file. requests NULL: they are only counted. */
struct meeting {
    const struct zr_loading *l;
    struct zr_request **requests;
    int64_t *n;
    /* bytes of l->wide that extents use */
    int64_t wide;
};

/* Requests values [first, first + n) of a saved part, of size bytes each, to dst. */
static void meet_ranges(const struct meeting *m, int32_t tensor, int kind, int32_t part, int64_t first,
                        int64_t n, int64_t size, char *dst)
{
    const struct zr_loading *l = m->l;
    for (int64_t at = first, k = find_range(l, tensor, kind, part, first); at < first + n; k++) {
        const struct zr_load_range *r = &l->ranges[k]; /* exists, because ranges cover everything */
        ZR_ASSERT(is_of(l, k, tensor, kind, part));
        int64_t end = zr_min(first + n, r->first + r->n);
        if (end <= at)
            continue; /* an empty range */
        if (m->requests)
            m->requests[r->file][m->n[r->file]] = (struct zr_request){.at = r->at + (at - r->first) * size,
                                                                      .n = (end - at) * size,
                                                                      .dst = dst + (at - first) * size};
        m->n[r->file]++;
        at = end;
    }
}

/* Zeroes padding, fresh optimizer state, and values that another pipeline stage will send. */
static void meet_padding(const struct meeting *m, char *dst, int64_t n_bytes)
{
    if (m->requests)
        memset(dst, 0, (size_t)n_bytes);
}

struct zr_saved_run zr_loading_run(const struct zr_loading *l, const struct zr_extent *x, int64_t at)
{
    const struct zr_tp_cut *here = &l->here[x->tensor], *saved = &l->saved[x->tensor];
    int64_t per = x->kind < ZR_SCALE(0) ? 1 : ZR_Q8_BLOCK, left = (x->first + x->n - at) * per;
    int32_t own = here->parts > 1 ? l->z->mesh.tp_rank : 0;
    struct zr_saved_run out = {.part = own, .first = at, .n = x->first + x->n - at};
    if (x->given)
        out.part = -1;
    if (x->given || (here->parts == 1 && saved->parts == 1))
        return out;
    /* Cuts are between whole blocks, and only the last layer that was padded has a shorter one. */
    struct zr_tp_run run = zr_tp_run_of_part(here, own, at * per);
    if (run.whole < 0) {
        out.part = -1;
        left = zr_min(left, run.n);
    } else if (zr_tp_same(here, saved)) {
        left = zr_min(left, zr_tp_elems(here, own) - at * per);
    } else {
        struct zr_tp_run from = zr_tp_run_of_whole(saved, run.whole);
        left = zr_min(left, zr_min(run.n, from.n));
        out.part = from.part;
        out.first = from.at / per;
    }
    out.n = (left + per - 1) / per;
    return out;
}

/* Requests the scales of a run of states, and moves *dst past them. */
static void meet_scales(const struct meeting *m, const struct zr_extent *x, const struct zr_saved_run *run,
                        uint16_t **dst)
{
    int64_t first = zr_loading_saved_block(m->l, x->tensor, run->first);
    int64_t n = zr_loading_run_scales(m->l, x->tensor, run);
    meet_ranges(m, x->tensor, ZR_SCALE(x->kind), run->part, first, n, sizeof **dst, (char *)*dst);
    *dst += m->requests ? n : 0;
}

/* Requests an extent. If the tensor was saved in other parts, goes through it run by run. */
static void meet_extent(struct meeting *m, const struct zr_extent *x)
{
    const struct zr_load_source source = zr_loading_source(m->l, x);
    struct zr_load_room room = {.values = x->at};
    if (source.way == ZR_LOAD_CONVERTED)
        room = zr_loading_room(m->l, x, &source, &m->wide);
    if (source.way == ZR_LOAD_ZEROS)
        meet_padding(m, x->at, x->n * x->size);
    if (source.way == ZR_LOAD_ZEROS || source.way == ZR_LOAD_NOTHING)
        return;
    for (int64_t at = x->first; at < x->first + x->n;) {
        struct zr_saved_run run = zr_loading_run(m->l, x, at);
        char *dst = m->requests ? room.values + (at - x->first) * source.size : NULL;
        if (run.part < 0)
            meet_padding(m, dst, run.n * source.size);
        else
            meet_ranges(m, x->tensor, source.kind, run.part, run.first, run.n, source.size, dst);
        if (run.part >= 0 && source.has_scales)
            meet_scales(m, x, &run, &room.scales);
        at += run.n;
    }
}

/* Lists, by file, the parts of the saved ranges that this rank reads; requests NULL: only counts them.
 * Returns the bytes of l->wide that are needed. */
static int64_t meet(const struct zr_loading *l, struct zr_request **requests, int64_t *n)
{
    struct meeting m = {l, requests, n, 0};
    for (int64_t i = 0; i < l->own.n; i++)
        meet_extent(&m, &l->own.list[i]);
    return m.wide;
}

/* Adds this rank's share of the program's data to what is checked, so that a load finds damage there. The
 * data itself is not kept. */
static int add_data(const struct zr_loading *l, int32_t file, struct zr_request *requests, int64_t *n)
{
    int64_t rank = l->z->world.rank, world = l->z->world.world;
    int err = 0;
    for (int k = 0; !err && k < ZR_N_DATA; k++) {
        const struct zr_st_entry *e;
        int64_t size = l->manifest.files[file].data[k], share = size / world, more = size % world;
        int64_t first = rank * share + zr_min(rank, more), bytes = share + (rank < more);
        err = zr_shard_find_data(&l->shards[file], &l->manifest.files[file], k, &e);
        if (!err && bytes)
            requests[(*n)++] = (struct zr_request){.at = e->begin + first, .n = bytes};
    }
    return err;
}

/* Makes a file and maps it. The context's own file is not used, because a load that fails must change
 * nothing. */
static int open_file(const struct zr_loading *l, int64_t bytes, const char *what, struct zr_state_file **out)
{
    ZR_TRY(ZR_ZALLOC(*out, 1, "a file for %s", what));
    int err = zr_state_file_open_like(l->z->states, bytes, *out);
    return err ? zr_fail_more(err, "a load needs space for %s until it ends", what) : zr_state_file_map(*out);
}

/* Allocates temporary memory. If states are in a file because memory is short, it is the map of another
 * file. */
static int make_room(struct zr_loading *l, int64_t bytes, const char *what, struct zr_state_file **file,
                     char **out)
{
    if (!l->states || !bytes)
        return ZR_ALLOC(*out, bytes + 1, "%s: %lld bytes", what, (long long)bytes);
    ZR_TRY(open_file(l, bytes, what, file));
    *out = (*file)->map;
    return 0;
}

static int fetch(struct zr_loading *l)
{
    size_t n_files = (size_t)l->n_shards;
    struct zr_request **requests;
    int64_t *n = NULL;
    int err = ZR_ZALLOC(requests, n_files, "%d files", l->n_shards);
    if (!err)
        err = ZR_ZALLOC(n, n_files, "%d files", l->n_shards);
    if (!err) {
        int64_t wide = meet(l, NULL, n);
        err = make_room(l, wide, "converting values", &l->wide_file, &l->wide);
    }
    for (size_t f = 0; !err && f < n_files; f++) {
        err = ZR_ALLOC(requests[f], n[f] + ZR_N_DATA + 1, "%lld ranges", (long long)n[f]);
    }
    if (!err) {
        memset(n, 0, n_files * sizeof *n);
        meet(l, requests, n);
        for (size_t f = 0; !err && f < n_files; f++)
            err = add_data(l, (int32_t)f, requests[f], &n[f]);
    }
    for (size_t f = 0; !err && f < n_files; f++)
        err = zr_shard_fetch(&l->shards[f], requests[f], n[f]);
    if (!err)
        zr_loading_convert(l);
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

/* Whether values go directly from the file to their places. They do in host memory with ZERO_INIT_LATER, if
 * nothing was written yet that a failure could spoil. */
static bool is_direct(const struct zero_ctx *z)
{
    return zr_init_later_nothing_written(z) && z->device->ops->host_memory;
}

static int read_direct(struct zr_loading *l)
{
    const struct zr_layout *layout = l->z->layout;
    ZR_TRY(ZR_ALLOC(l->staged, layout->buffer_bytes + 1, "the %lld bytes of the buffers",
                    (long long)layout->buffer_bytes));
    int err = zr_extents_to_load(l->z, NULL, 0, &l->own);
    char *at = l->staged;
    for (int32_t t = 0; !err && t < layout->n_tensors; t++) { /* in the order of the table */
        if (!layout->tensors[t].buffer)
            continue;
        for (int64_t i = 0; i < l->own.n; i++)
            if (l->own.list[i].tensor == zr_whole_at(l->z, t).tensor)
                l->own.list[i].at = at;
        at += zr_buffer_room(&layout->tensors[t]);
    }
    return err ? err : fetch(l);
}

static int open_states(struct zr_loading *l)
{
    const struct zr_state_file *states = l->z->states;
    if (!states)
        return 0;
    ZR_TRY(open_file(l, states->bytes, "another file of states", &l->states));
    l->z->mapped = l->states;
    return 0;
}

static int read_values(struct zr_loading *l)
{
    struct zero_ctx *z = l->z;
    int64_t bytes = 0;
    l->direct = is_direct(z);
    if (l->direct)
        return read_direct(l);
    zr_engine_runs_to_load(z->engine, add_bytes, &l->buffers_at);
    bytes = l->buffers_at + z->layout->buffer_bytes;
    /* The snapshot's memory is used if it is large enough, because touching new memory may take longer than
     * reading the file. In hybrids a rank reads more than it saves. */
    l->staged = zr_engine_snapshot(z->engine);
    if (!l->staged || bytes > z->plan->snapshot_bytes)
        ZR_TRY(make_room(l, bytes, "the values that this rank loads", &l->staged_file, &l->staged));
    ZR_TRY(zr_extents_to_load(z, l->staged, l->buffers_at, &l->own));
    return fetch(l);
}

int zr_loading_read(struct zr_loading *l)
{
    ZR_TRY(check_model(l));
    ZR_TRY(open_shards(l));
    ZR_TRY(zr_buffers_check(l->z));
    ZR_TRY(open_states(l));
    ZR_TRY(read_values(l));
    return l->states ? zr_state_file_unmap(l->states) : 0;
}
