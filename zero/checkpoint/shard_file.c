/* SPDX-License-Identifier: Apache-2.0 */
/* shard_file.c: opens one rank's file of a checkpoint, reads it and checks its blocks. */
#include "zero/checkpoint/shard_file.h"
#include "kernels/alloc.h"
#include "zero/checkpoint/parallel.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int by_offset(const void *a, const void *b)
{
    const struct zr_request *x = a, *y = b;
    return (x->at > y->at) - (x->at < y->at);
}

static int64_t least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* Reports a damaged block. It names tensors only if the header was read. */
static int damaged(const struct zr_shard *s, int64_t from, int64_t n)
{
    long long first = from, last = from + n - 1;
    for (int64_t i = 0; i < s->st.n_entries; i++)
        if (s->st.entries[i].begin <= last && s->st.entries[i].end > first)
            return zr_fail(ZERO_ERR_IO,
                           "%s: bytes %lld..%lld (tensor %s) are damaged: their checksums differ from those "
                           "saved; load an earlier checkpoint",
                           s->path, first, last, s->st.entries[i].name);
    return zr_fail(ZERO_ERR_IO,
                   "%s: bytes %lld..%lld (the header among them) are damaged: their checksums differ from "
                   "those saved; load an earlier checkpoint",
                   s->path, first, last);
}

/* Enough to keep the disk busy while blocks are checked. */
#define N_THREADS 4

/* One zr_shard_fetch, for its threads. */
struct fetching {
    struct zr_shard *s;
    const struct zr_request *requests; /* sorted by offset */
    int64_t *ends;                     /* (n) greatest end of the requests up to this one */
    int64_t n;
    int64_t *blocks; /* indices of the blocks to read */
    int64_t n_blocks;
};

/* Returns the first request that ends after `from`. Some later ones may end earlier. */
static int64_t find_request(const struct fetching *f, int64_t from)
{
    int64_t lo = 0, hi = f->n;
    while (lo < hi) {
        int64_t mid = (lo + hi) / 2;
        if (f->ends[mid] <= from)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

/* Reads and checks block number i of the list, and copies from it what requests ask for. */
static int fetch_block(void *arg, int64_t i, char *block)
{
    struct fetching *f = arg;
    struct zr_shard *s = f->s;
    int64_t k = f->blocks[i], from = k * ZR_BLOCK_BYTES, n = least(ZR_BLOCK_BYTES, s->bytes - from);
    ZR_TRY(zr_block_read(&s->file, block, n, from));
    struct zr_checksum sum = zr_checksum_of(block, n);
    if (!zr_checksum_equal(&sum, &s->sums[k]))
        return damaged(s, from, n);
    for (int64_t r = find_request(f, from); r < f->n && f->requests[r].at < from + n; r++) {
        const struct zr_request *q = &f->requests[r];
        int64_t skip = q->at < from ? from - q->at : 0, at = q->at + skip - from;
        if (q->dst && skip < q->n)
            memcpy(q->dst + skip, block + at, (size_t)least(q->n - skip, n - at));
    }
    return 0;
}

static int fetch(struct zr_shard *s, struct zr_request *requests, int64_t n)
{
    struct fetching f = {.s = s, .requests = requests, .n = n};
    qsort(requests, (size_t)n, sizeof *requests, by_offset);
    ZR_TRY(ZR_ALLOC(f.ends, n, "reading %s", s->path));
    for (int64_t i = 0, end = 0; i < n; i++)
        end = f.ends[i] = end > requests[i].at + requests[i].n ? end : requests[i].at + requests[i].n;
    int err = ZR_ALLOC(f.blocks, zr_blocks_count(s->bytes) + 1, "reading %s", s->path);
    for (int64_t i = 0, k = 0; !err && i < n; i++) {
        int64_t first = requests[i].at / ZR_BLOCK_BYTES;
        for (k = k > first ? k : first; k * ZR_BLOCK_BYTES < requests[i].at + requests[i].n; k++)
            f.blocks[f.n_blocks++] = k;
    }
    if (!err)
        err = zr_in_parallel(f.n_blocks, N_THREADS, ZR_BLOCK_BYTES, fetch_block, &f);
    free(f.blocks);
    free(f.ends);
    return err;
}

int zr_shard_fetch(struct zr_shard *s, struct zr_request *requests, int64_t n)
{
    bool was_closed = s->file.fd < 0;
    if (!n)
        return 0;
    int err = was_closed ? zr_block_file_open(s->fs, s->path, s->bytes, &s->file) : 0;
    if (!err)
        err = fetch(s, requests, n);
    if (was_closed)
        zr_shard_close_file(s);
    return err;
}

int zr_shard_find_data(const struct zr_shard *s, const struct zr_manifest_file *file, enum zr_data_kind kind,
                       const struct zr_st_entry **out)
{
    int64_t bytes = file->data[kind];
    *out = NULL;
    for (int64_t i = 0; bytes && i < s->st.n_entries; i++) {
        const struct zr_st_entry *e = &s->st.entries[i];
        if (!strcmp(e->name, zr_data_names[kind]) && e->end - e->begin == bytes)
            *out = e;
    }
    return *out || !bytes
               ? 0
               : zr_fail(ZERO_ERR_IO, "%s: it lacks entry %s of %lld bytes, which the manifest lists",
                         s->path, zr_data_names[kind], (long long)bytes);
}

/* Reads the checksums of the blocks, which are in a file of their own. */
static int read_sums(struct zr_shard *s, const char *folder, const struct zr_manifest_file *file)
{
    char path[ZR_PATH_BYTES], name[sizeof file->name + sizeof ZR_BLOCKS_SUFFIX], *table;
    bool missing;
    int64_t n;
    snprintf(name, sizeof name, "%s%s", file->name, ZR_BLOCKS_SUFFIX);
    ZR_TRY(zr_path_join(path, folder, name));
    ZR_TRY(zr_file_load(s->fs, path, INT32_MAX, &missing, &table, &n));
    int err = 0;
    struct zr_checksum sum = zr_checksum_of(table, n);
    if (!zr_checksum_equal(&sum, &file->blocks))
        err = zr_fail(ZERO_ERR_IO,
                      "%s: its checksum differs from the manifest's: it is damaged or from another "
                      "checkpoint; copy whole folders, or load an earlier checkpoint",
                      path);
    if (!err)
        err = zr_blocks_parse(path, (unsigned char *)table, n, file->bytes, &s->sums);
    free(table);
    return err;
}

/* Prints the header that was read, and compares it with the text. Without memory, jansson 2.14 may leave out
 * characters of a text or a number and still report success. */
static int check_header(struct zr_shard *s, const char *json, int64_t n)
{
    char *head;
    int64_t head_bytes;
    ZR_TRY(zr_st_head(s->st.entries, s->st.n_entries, NULL, &head, &head_bytes));
    bool same = head_bytes == n + 8 && !memcmp(head + 8, json, (size_t)n);
    free(head);
    return same ? 0
                : zr_fail(ZERO_ERR_NOMEM,
                          "%s: the header is not as this library writes it, or there is no memory to read it",
                          s->path);
}

/* Reads the safetensors header: 8 bytes with its length, then JSON. */
static int read_head(struct zr_shard *s)
{
    unsigned char length[8];
    uint64_t n = 0;
    ZR_TRY(zr_shard_fetch(s, &(struct zr_request){0, 8, (char *)length}, 1));
    for (int i = 0; i < 8; i++)
        n |= (uint64_t)length[i] << 8 * i;
    if (n > ZR_ST_MAX_HEADER || n > (uint64_t)s->bytes - 8)
        return zr_fail(ZERO_ERR_IO, "%s: the header has %llu bytes; allowed: %d, and within the file's %lld",
                       s->path, (unsigned long long)n, ZR_ST_MAX_HEADER, (long long)s->bytes);
    char *json;
    ZR_TRY(ZR_ALLOC(json, n + 1, "the header of %s, which has %llu bytes", s->path, (unsigned long long)n));
    int err = zr_shard_fetch(s, &(struct zr_request){8, (int64_t)n, json}, 1);
    if (!err)
        err = zr_st_parse(s->path, json, (int64_t)n, s->bytes, &s->st);
    if (!err)
        err = check_header(s, json, (int64_t)n);
    free(json);
    return err;
}

int zr_shard_open(const struct zr_files *fs, const char *folder, const struct zr_manifest_file *file,
                  struct zr_shard *s)
{
    *s = (struct zr_shard){.fs = fs, .file.fd = -1, .file.direct = -1, .bytes = file->bytes};
    int err = zr_path_join(s->path, folder, file->name);
    if (!err)
        err = read_sums(s, folder, file);
    if (!err)
        err = zr_block_file_open(fs, s->path, s->bytes, &s->file);
    if (!err)
        err = read_head(s);
    if (err)
        zr_shard_close(s);
    return err;
}

void zr_shard_close_file(struct zr_shard *s)
{
    zr_block_file_close(&s->file); /* nothing was written, so errors do not matter */
}

void zr_shard_close(struct zr_shard *s)
{
    if (s->fs)
        zr_shard_close_file(s);
    free(s->sums);
    zr_st_free(&s->st);
    *s = (struct zr_shard){0};
}
