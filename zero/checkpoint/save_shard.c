/* SPDX-License-Identifier: Apache-2.0 */
/* save_shard.c: writes one rank's file of a checkpoint. save.h describes the format. */
#include "kernels/alloc.h"
#include "kernels/state_codes.h"
#include "zero/checkpoint/block_file.h"
#include "zero/checkpoint/parallel.h"
#include "zero/checkpoint/save.h"
#include "zero/checkpoint/save_source.h"
#include "zero/checkpoint/shard_file.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- names ---- */

const char *zr_kind_dtype(const struct zr_tensor *t, enum zero_moments moments, int kind)
{
    const struct zr_optimizer_kind *row = zr_optimizer_kind(t->optimizer);
    if (kind < 0 || moments == ZERO_MOMENTS_F32)
        return zr_st_dtype_of(kind == ZR_VALUE_PARAM ? t->dtype : ZERO_F32);
    if (kind >= ZR_SCALE(0) || moments == ZERO_MOMENTS_BF16)
        return zr_st_dtype_of(ZERO_BF16);
    return row && row->squares == kind ? "U8" : "I8";
}

int64_t zr_block_of(int64_t layer_elems, int64_t element)
{
    return element / layer_elems * zr_q8_blocks(layer_elems) + element % layer_elems / ZR_Q8_BLOCK;
}

void zr_kind_print(int kind, char text[ZR_KIND_CHARS])
{
    if (kind >= ZR_SCALE(0))
        snprintf(text, ZR_KIND_CHARS, "scale%d", kind - ZR_SCALE(0));
    else if (kind >= 0)
        snprintf(text, ZR_KIND_CHARS, "state%d", kind);
    else
        snprintf(text, ZR_KIND_CHARS, "%s", kind == ZR_VALUE_PARAM ? "model" : "master");
}

bool zr_kind_parse(const char *text, size_t n, int *kind)
{
    char known[ZR_KIND_CHARS];
    for (*kind = ZR_VALUE_PARAM; *kind < ZR_N_KINDS; ++*kind) {
        zr_kind_print(*kind, known);
        if (strlen(known) == n && !memcmp(known, text, n))
            return true;
    }
    return false;
}

const char *zr_optimizer_name(enum zero_optimizer kind)
{
    const struct zr_optimizer_kind *row = zr_optimizer_kind(kind);
    return row ? row->name : "user";
}

int32_t zr_tensor_dims(const struct zr_tensor *t)
{
    int32_t n = 0;
    while (n < 8 && t->shape[n])
        n++;
    return n;
}

void zr_shard_name(int rank, int world, char out[64])
{
    snprintf(out, 64, "shard-%05d-of-%05d.safetensors", rank + 1, world);
}

/* ---- extents ---- */

/* What add_run and add_range need. */
struct collecting {
    struct zero_ctx *z;
    /* the snapshot; NULL: ranges are where the values are now */
    char *base;
    /* for a save: leaves out what other ranks save */
    bool saves;
    /* list NULL: ranges are only counted */
    struct zr_extents *out;
    /* the run whose ranges are added */
    const struct zr_run *run;
};

/* Returns the address of byte `skip` of the run. NULL: it is in a file that is not mapped. */
static char *run_at(const struct collecting *c, int64_t skip)
{
    const struct zr_state_file *mapped = c->z->mapped;
    if (!c->run->at)
        return mapped && mapped->map ? mapped->map + c->run->file_at + skip : NULL;
    return (c->base ? c->base + c->run->snapshot_at : c->run->at) + skip;
}

/* Adds elements [first, first + n) of a flat, which are in one piece: a tensor, or one layer of it. */
static int add_range(void *arg, const struct zr_flat *f, const struct zr_piece *p, int64_t first, int64_t n)
{
    struct collecting *c = arg;
    const struct zr_run *run = c->run;
    const struct zr_tensor *t = &c->z->layout->tensors[p->tensor];
    const struct zr_tp_cut cut = zr_tp_of_tensor(t, c->z->mesh.tp);
    const struct zr_whole_at whole = zr_whole_at(c->z, p->tensor);
    int64_t from = p->layer * p->n + (first - p->first); /* in this rank's tensor */
    if (c->saves && !t->cut && c->z->mesh.tp_rank > 0)
        return 0;
    if (c->saves)
        n = zr_min(n, zr_tp_elems(&cut, c->z->mesh.tp_rank) - from);
    if (n <= 0)
        return 0;
    bool scales = run->per > 1;
    if (c->out->list)
        c->out->list[c->out->n] =
            (struct zr_extent){.tensor = whole.tensor,
                               .kind = run->kind,
                               .given = f->copy,
                               .first = scales ? zr_block_of(p->n, whole.first + from) : whole.first + from,
                               .n = (n + run->per - 1) / run->per,
                               .size = run->size,
                               .at = run_at(c, (first / run->per - run->first) * run->size)};
    c->out->n++;
    return 0;
}

/* Adds the ranges of a run: one kind of value of a part of a flat (struct zr_run). */
static int add_run(void *arg, const struct zr_run *run)
{
    struct collecting *c = arg;
    c->run = run;
    return zr_flat_ranges(c->z->layout, run->flat, run->first * run->per, (run->first + run->n) * run->per,
                          add_range, c);
}

static int by_tensor_kind_first(const void *a, const void *b)
{
    const struct zr_extent *x = a, *y = b;
    if (x->tensor != y->tensor)
        return x->tensor < y->tensor ? -1 : 1;
    if (x->kind != y->kind)
        return x->kind < y->kind ? -1 : 1;
    return (x->first > y->first) - (x->first < y->first);
}

const struct zr_extent *zr_extent_find(const struct zr_extents *x, int32_t tensor, int kind, int64_t first)
{
    const struct zr_extent key = {.tensor = tensor, .kind = kind, .first = first};
    return bsearch(&key, x->list, (size_t)x->n, sizeof key, by_tensor_kind_first);
}

/* Joins masters that are kept as 16 more bits with their weights, which are ranges too. In the file of states
 * a range may have fewer masters than the range of the weights. */
static void join_masters(const struct zr_tensor *tensors, const struct zr_extents *all)
{
    const struct zr_extent *w = all->list;
    for (int64_t i = 0; i < all->n; i++) {
        struct zr_extent *x = &all->list[i];
        if (x->kind != ZR_VALUE_MASTER || tensors[x->tensor].masters != ZERO_MASTERS_REMAINDER)
            continue;
        while (w->tensor != x->tensor || w->kind != ZR_VALUE_PARAM || x->first >= w->first + w->n)
            w++;
        x->weights = w->at + (x->first - w->first) * w->size;
        x->size = sizeof(float);
    }
}

/* Adds each buffer as one range. base: memory of their copies, or NULL for the buffers themselves. */
static void add_buffers(struct zero_ctx *z, char *base, struct zr_extents *out)
{
    for (int32_t i = 0; i < z->layout->n_tensors; i++) {
        const struct zr_tensor *t = &z->layout->tensors[i];
        if (!t->buffer)
            continue;
        out->list[out->n++] = (struct zr_extent){.tensor = zr_whole_at(z, i).tensor,
                                                 .kind = ZR_VALUE_PARAM,
                                                 .n = t->n_elems,
                                                 .size = zr_dtype_bytes(t->dtype),
                                                 .at = base ? base : *t->param};
        if (base)
            base += zr_buffer_room(t);
    }
}

/* The type of zr_engine_runs and zr_engine_runs_to_load. */
typedef int (*runs_fn)(struct zr_engine *e, int (*fn)(void *arg, const struct zr_run *run), void *arg);

/* Lists the ranges of all runs, in the order of tensors. They are counted first, so that the list fits. */
static int list_extents(struct zero_ctx *z, runs_fn runs, bool saves, char *base, int64_t buffers_at,
                        struct zr_extents *out)
{
    const struct zr_extents none = {.part = z->mesh.tp > 1 ? z->mesh.tp_rank : -1};
    *out = none;
    struct collecting c = {.z = z, .base = base, .saves = saves, .out = out};
    int64_t n_buffers = buffers_at < 0 ? 0 : z->layout->n_buffers;
    runs(z->engine, add_run, &c);
    out->n += n_buffers;
    struct zr_extent *list;
    ZR_TRY(ZR_ALLOC(list, out->n + 1, "%lld ranges", (long long)out->n));
    *out = none;
    out->list = list;
    runs(z->engine, add_run, &c);
    if (n_buffers)
        add_buffers(z, base ? base + buffers_at : NULL, out);
    qsort(list, (size_t)out->n, sizeof *list, by_tensor_kind_first);
    if (saves)
        join_masters(z->whole.tensors, out);
    return 0;
}

int zr_extents_of(struct zero_ctx *z, char *base, int64_t buffers_at, struct zr_extents *out)
{
    return list_extents(z, zr_engine_runs, true, base, buffers_at, out);
}

int zr_extents_to_load(struct zero_ctx *z, char *base, int64_t buffers_at, struct zr_extents *out)
{
    return list_extents(z, zr_engine_runs_to_load, false, base, buffers_at, out);
}

/* ---- the head ---- */

/* Whether range b continues range a, so that one entry has both. */
static bool follows(const struct zr_extent *a, const struct zr_extent *b)
{
    return a->tensor == b->tensor && a->kind == b->kind && a->first + a->n == b->first;
}

static void free_entries(struct zr_st_entry *e, int64_t n)
{
    for (int64_t i = 0; e && i < n; i++)
        free(e[i].name);
    free(e);
}

/* Prints what follows the tensor in an entry's name: "/model/0", or "/model/0@2" for a tp part. */
#define ENTRY_END_CHARS (ZR_KIND_CHARS + 40)
static int print_entry_end(const struct zr_tensor *tensors, const struct zr_extents *all,
                           const struct zr_extent *x, char text[ENTRY_END_CHARS])
{
    char kind[ZR_KIND_CHARS];
    zr_kind_print(x->kind, kind);
    if (all->part >= 0 && tensors[x->tensor].cut)
        return snprintf(text, ENTRY_END_CHARS, "/%s/%" PRId64 "@%d", kind, x->first, all->part);
    return snprintf(text, ENTRY_END_CHARS, "/%s/%" PRId64, kind, x->first);
}

static const char *entry_dtype(const struct zr_tensor *tensors, const struct zr_extent *x)
{
    const struct zr_tensor *t = &tensors[x->tensor];
    return zr_kind_dtype(t, t->moments, x->kind);
}

static char *entry_name(const struct zr_tensor *tensors, const struct zr_extents *all,
                        const struct zr_extent *x)
{
    char end[ENTRY_END_CHARS];
    const char *tensor = tensors[x->tensor].name;
    size_t n = strlen(tensor) + (size_t)print_entry_end(tensors, all, x, end) + 1;
    char *name = malloc(n);
    if (name)
        snprintf(name, n, "%s%s", tensor, end);
    return name;
}

#define DATA_ENTRY_BYTES 256 /* upper bound of an entry's bytes in the header */

int zr_shard_check(const struct zr_tensor *tensors, const struct zr_extents *x)
{
    struct zr_st_entry e = {.n_dims = 1};
    int64_t n = ZR_DIRECT_ALIGN, n_entries = 0; /* n: an upper bound */
    for (int64_t i = 0, next; i < x->n; i = next) {
        const struct zr_extent *first = &x->list[i];
        char end[ENTRY_END_CHARS];
        e.name = tensors[first->tensor].name;
        e.dtype = entry_dtype(tensors, first);
        e.shape[0] = first->n;
        for (next = i + 1; next < x->n && follows(&x->list[next - 1], &x->list[next]); next++)
            e.shape[0] += x->list[next].n;
        e.begin = e.end;
        e.end += e.shape[0] * first->size;
        n += zr_st_entry_bytes(&e) + print_entry_end(tensors, x, first, end);
        n_entries++;
    }
    for (int k = 0; k < ZR_N_DATA; k++)
        n += x->data[k].bytes ? DATA_ENTRY_BYTES : 0;
    return n <= ZR_ST_MAX_HEADER
               ? 0
               : zr_fail(ZERO_ERR_ARG,
                         "the header of this rank's file would have %lld bytes for %lld ranges of tensors; "
                         "safetensors allows %d: save from more ranks, or make fewer, larger tensors",
                         (long long)n, (long long)n_entries, ZR_ST_MAX_HEADER);
}

/* Makes the safetensors header: an entry for each range, and for the program's data. */
static int make_head(const struct zr_tensor *tensors, const struct zr_extents *x, char **head, int64_t *n)
{
    struct zr_st_entry *entries;
    int64_t n_entries = 0;
    int err = ZR_ZALLOC(entries, x->n + ZR_N_DATA + 1, "a header of %lld ranges", (long long)x->n);
    for (int64_t i = 0; !err && i < x->n; i++) {
        if (i && follows(&x->list[i - 1], &x->list[i])) {
            entries[n_entries - 1].shape[0] += x->list[i].n;
            continue;
        }
        struct zr_st_entry *e = &entries[n_entries];
        *e = (struct zr_st_entry){.name = entry_name(tensors, x, &x->list[i]),
                                  .dtype = entry_dtype(tensors, &x->list[i]),
                                  .n_dims = 1,
                                  .shape = {x->list[i].n}};
        n_entries++;
        if (!e->name)
            err = zr_fail(ZERO_ERR_NOMEM, "no memory for a header of %lld ranges", (long long)x->n);
    }
    for (int k = 0; !err && k < ZR_N_DATA; k++) {
        if (!x->data[k].bytes)
            continue;
        struct zr_st_entry *e = &entries[n_entries++];
        *e = (struct zr_st_entry){
            .name = strdup(zr_data_names[k]), .dtype = "U8", .n_dims = 1, .shape = {x->data[k].bytes}};
        if (!e->name)
            err = zr_fail(ZERO_ERR_NOMEM, "no memory for the header of the program's own data");
    }
    if (!err)
        err = zr_st_head(entries, n_entries, NULL, head, n);
    free_entries(entries, n_entries);
    return err;
}

/* ---- the file ---- */

/* Enough to keep the disk busy while blocks are filled. */
#define N_THREADS 4

/* One zr_shard_write, for its threads. */
struct writing {
    struct zr_block_file file;
    struct zr_source source;
    struct zr_checksum *sums;
    const _Atomic bool *cancelled;
};

/* Copies block number k from memory, and writes it. */
static int write_block(void *arg, int64_t k, char *block)
{
    struct writing *w = arg;
    int64_t from = k * ZR_BLOCK_BYTES, n = zr_min(ZR_BLOCK_BYTES, w->source.bytes - from);
    if (atomic_load_explicit(w->cancelled, memory_order_relaxed))
        return zr_fail(ZERO_ERR_FAILED, "%s: given up", w->file.path);
    ZR_TRY(zr_source_read(&w->source, block, from, n));
    w->sums[k] = zr_checksum_of(block, n);
    return zr_block_write(&w->file, block, n, from);
}

static int write_file(const struct zr_files *fs, const char *path, struct writing *w)
{
    int64_t bytes = w->source.bytes, n = zr_blocks_count(bytes);
    ZR_TRY(ZR_ALLOC(w->sums, n, "the checksums of %lld bytes", (long long)bytes));
    int err = zr_block_file_create(fs, path, bytes, &w->file);
    if (!err)
        err = zr_in_parallel(n, N_THREADS, ZR_BLOCK_BYTES, write_block, w);
    if (!err)
        err = zr_file_sync(fs, w->file.fd, path);
    int closed = zr_block_file_close(&w->file);
    return err ? err : closed;
}

/* Writes the table of the blocks' checksums. *blocks: the checksum of the table. */
static int write_blocks(const struct zr_files *fs, const char *path, const struct zr_checksum *sums,
                        int64_t bytes, struct zr_checksum *blocks)
{
    char table_path[ZR_PATH_BYTES];
    unsigned char *table;
    int64_t n;
    snprintf(table_path, sizeof table_path, "%.*s%s", (int)(sizeof table_path - sizeof ZR_BLOCKS_SUFFIX - 1),
             path, ZR_BLOCKS_SUFFIX);
    ZR_TRY(zr_blocks_print(sums, bytes, &table, &n));
    int err = zr_file_store(fs, table_path, table, n);
    *blocks = zr_checksum_of(table, n);
    free(table);
    return err;
}

/* Reads the file back as a load does. Older checkpoints are removed because this one exists, so it must be
 * readable, and not only written. */
static int read_back(const struct zr_files *fs, const char *folder, const struct zr_manifest_file *file)
{
    struct zr_shard shard;
    int err = zr_shard_open(fs, folder, file, &shard);
    if (err)
        return zr_fail_more(err, "read back");
    zr_shard_close(&shard);
    return 0;
}

int zr_shard_write(const struct zr_files *fs, const char *folder, const char *name,
                   const struct zr_tensor *tensors, const struct zr_extents *x, struct zr_device *dev,
                   const _Atomic bool *cancelled)
{
    char path[ZR_PATH_BYTES], *head = NULL;
    int64_t head_bytes;
    struct writing w = {.cancelled = cancelled};
    struct zr_manifest_file file = {0};
    int err = zr_path_join(path, folder, name);
    if (!err)
        err = make_head(tensors, x, &head, &head_bytes);
    if (!err)
        err = zr_source_open(head, head_bytes, x, dev, ZR_BLOCK_BYTES, &w.source);
    if (!err)
        err = write_file(fs, path, &w);
    if (!err)
        err = write_blocks(fs, path, w.sums, w.source.bytes, &file.blocks);
    if (!err)
        err = zr_folder_sync(fs, folder);
    file.bytes = w.source.bytes;
    snprintf(file.name, sizeof file.name, "%s", name);
    if (!err)
        err = read_back(fs, folder, &file);
    zr_source_close(&w.source);
    free(head);
    free(w.sums);
    return err;
}
