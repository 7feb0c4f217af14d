/* shard_file.c: see shard_file.h. */
#include "zero/shard_file.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int by_place(const void *a, const void *b)
{
    const struct zr_request *x = a, *y = b;
    return (x->at > y->at) - (x->at < y->at);
}

static int64_t least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static int damaged(const struct zr_shard *s, int64_t from, int64_t n)
{
    const char *tensor = "the header";
    for (int64_t i = 0; i < s->st.n_entries; i++)
        if (s->st.entries[i].begin < from + n && s->st.entries[i].end > from) {
            tensor = s->st.entries[i].name;
            break;
        }
    return zr_fail(ZR_ERR_IO,
                   "%s: bytes %lld..%lld (tensor %s) are damaged: their checksums differ from those saved",
                   s->path, (long long)from, (long long)(from + n - 1), tensor);
}

int zr_shard_fetch(const struct zr_shard *s, struct zr_request *requests, int64_t n)
{
    char *block = malloc(ZR_BLOCK_BYTES);
    int64_t held = -1;
    int err = block ? 0 : zr_fail(ZR_ERR_NOMEM, "no memory to read %s", s->path);
    qsort(requests, (size_t)n, sizeof *requests, by_place);
    for (int64_t i = 0; !err && i < n; i++) {
        const struct zr_request *q = &requests[i];
        for (int64_t at = q->at; !err && at < q->at + q->n;) {
            int64_t k = at / ZR_BLOCK_BYTES, from = k * ZR_BLOCK_BYTES,
                    bytes = least(ZR_BLOCK_BYTES, s->bytes - from);
            bool whole = at == from && bytes <= q->at + q->n - at; /* read to where it belongs */
            if (whole || k != held) {
                char *to = whole ? q->dst + (at - q->at) : block;
                held = whole ? held : k;
                err = zr_file_read(s->fs, s->fd, s->path, to, bytes, from);
                if (err)
                    break;
                struct zr_sum sum = zr_sum_of(to, bytes);
                if (!zr_sum_equal(&sum, &s->sums[k])) {
                    err = damaged(s, from, bytes);
                    break;
                }
            }
            int64_t part = least(q->at + q->n, from + bytes) - at;
            if (!whole)
                memcpy(q->dst + (at - q->at), block + (at - from), (size_t)part);
            at += part;
        }
    }
    free(block);
    return err;
}

static int read_sums(struct zr_shard *s, const char *folder, const struct zr_manifest_file *file)
{
    char path[ZR_PATH_BYTES], name[sizeof file->name + sizeof ZR_BLOCKS_SUFFIX], *table;
    bool missing;
    int64_t n;
    snprintf(name, sizeof name, "%s%s", file->name, ZR_BLOCKS_SUFFIX);
    int err = zr_path_join(path, folder, name);
    if (!err)
        err = zr_file_load(s->fs, path, INT32_MAX, &missing, &table, &n);
    if (err)
        return err;
    struct zr_sum sum = zr_sum_of(table, n);
    if (!zr_sum_equal(&sum, &file->blocks))
        err =
            zr_fail(ZR_ERR_IO,
                    "%s: its checksum is not the manifest's: it is damaged, or of another checkpoint", path);
    if (!err)
        err = zr_blocks_parse(path, (unsigned char *)table, n, file->bytes, &s->sums);
    free(table);
    return err;
}

/* When memory is out, jansson 2.14 may leave characters out of a string or a number and report success. So
 * what was read is printed again and must be what was there. */
static int check_again(struct zr_shard *s, const char *json, int64_t n)
{
    char *head;
    int64_t head_bytes;
    int err = zr_st_head(s->st.entries, s->st.n_entries, NULL, &head, &head_bytes);
    if (err)
        return err;
    bool same = head_bytes == n + 8 && !memcmp(head + 8, json, (size_t)n);
    free(head);
    return same ? 0
                : zr_fail(ZR_ERR_NOMEM,
                          "%s: the header is not as this library writes it, or there is no memory to read it",
                          s->path);
}

static int read_head(struct zr_shard *s)
{
    unsigned char length[8];
    uint64_t n = 0;
    int err = zr_shard_fetch(s, &(struct zr_request){0, 8, (char *)length}, 1);
    if (err)
        return err;
    for (int i = 0; i < 8; i++)
        n |= (uint64_t)length[i] << 8 * i;
    if (n > ZR_ST_MAX_HEADER || n > (uint64_t)s->bytes - 8)
        return zr_fail(ZR_ERR_IO, "%s: the header has %llu bytes; allowed: %d, and within the file's %lld",
                       s->path, (unsigned long long)n, ZR_ST_MAX_HEADER, (long long)s->bytes);
    char *json = malloc((size_t)n + 1);
    if (!json)
        return zr_fail(ZR_ERR_NOMEM, "%s: no memory for a header of %llu bytes", s->path,
                       (unsigned long long)n);
    err = zr_shard_fetch(s, &(struct zr_request){8, (int64_t)n, json}, 1);
    if (!err)
        err = zr_st_parse(s->path, json, (int64_t)n, s->bytes, &s->st);
    if (!err)
        err = check_again(s, json, (int64_t)n);
    free(json);
    return err;
}

int zr_shard_open(const struct zr_files *fs, const char *folder, const struct zr_manifest_file *file,
                  struct zr_shard *s)
{
    bool missing;
    *s = (struct zr_shard){.fs = fs, .fd = -1, .bytes = file->bytes};
    int err = zr_path_join(s->path, folder, file->name);
    if (!err)
        err = read_sums(s, folder, file);
    if (!err)
        err = zr_file_find(fs, s->path, &missing, &s->fd);
    if (!err)
        err = read_head(s);
    if (err)
        zr_shard_close(s);
    return err;
}

void zr_shard_close(struct zr_shard *s)
{
    if (s->fs && s->fd >= 0)
        zr_file_close(s->fs, s->fd, s->path); /* only read */
    free(s->sums);
    zr_st_free(&s->st);
    *s = (struct zr_shard){.fd = -1};
}
