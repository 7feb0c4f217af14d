/* SPDX-License-Identifier: Apache-2.0 */
/* token_data.c: maps token files, checks their headers, and reads rows out of them in a shuffled order. */
#include "bench/train/token_data.h"
#include "bench/random_bits.h"
#include "kernels/alloc.h"
#include "kernels/device.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { HEADER_BYTES = 256 * sizeof(int32_t) };

/* The headers of llm.c. */
static const struct {
    int32_t magic, version;
    int id_bytes;
    int64_t end_token;
} headers[] = {{20240520, 1, 2, 50256}, {20240801, 7, 4, -1}};

/* Maps a regular file that is not empty. The caller unmaps it. */
static int map_file(const char *path, void **map, size_t *n_bytes)
{
    struct stat st;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return zr_fail(ZERO_ERR_IO, "cannot read %s: %s", path, strerror(errno));
    int err = fstat(fd, &st) ? errno : S_ISREG(st.st_mode) ? 0 : EINVAL;
    if (err) {
        err = zr_fail(ZERO_ERR_IO, "cannot read %s: %s", path,
                      err == EINVAL ? "it is not a regular file" : strerror(err));
    } else if (st.st_size == 0) {
        err = zr_fail(ZERO_ERR_ARG, "%s: the file is empty", path);
    } else {
        void *p = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_SHARED, fd, 0);
        if (p == MAP_FAILED)
            err = zr_fail(ZERO_ERR_IO, "cannot map %s: %s", path, strerror(errno));
        *map = err ? NULL : p;
        *n_bytes = err ? 0 : (size_t)st.st_size;
    }
    close(fd);
    return err;
}

/* Finds the ids behind a header, which must agree with the file's size. */
static int read_header(struct token_file *f)
{
    int32_t h[3] = {0};
    memcpy(h, f->map, f->map_bytes < sizeof h ? f->map_bytes : sizeof h);
    size_t kind = h[0] == headers[0].magic ? 0 : 1;
    if (h[0] != headers[kind].magic)
        return zr_fail(ZERO_ERR_ARG,
                       "%s: begins with %d, which is no magic number of llm.c (%d or %d); --token-bytes is "
                       "for files without a header",
                       f->path, h[0], headers[0].magic, headers[1].magic);
    if (f->map_bytes < HEADER_BYTES)
        return zr_fail(ZERO_ERR_ARG, "%s: %lld bytes are less than a header of %d", f->path,
                       (long long)f->map_bytes, HEADER_BYTES);
    if (h[1] != headers[kind].version)
        return zr_fail(ZERO_ERR_ARG, "%s: has version %d, but only version %d of %d is known", f->path, h[1],
                       headers[kind].version, h[0]);
    f->id_bytes = headers[kind].id_bytes;
    f->end_token = headers[kind].end_token;
    f->end_token_first = true;
    f->n_tokens = h[2];
    f->ids = (const uint8_t *)f->map + HEADER_BYTES;
    int64_t want = HEADER_BYTES + f->n_tokens * f->id_bytes;
    if (f->n_tokens < 0 || want != (int64_t)f->map_bytes)
        return zr_fail(ZERO_ERR_ARG, "%s: its header says %lld tokens, which are %lld bytes, but it has %lld",
                       f->path, (long long)f->n_tokens, (long long)want, (long long)f->map_bytes);
    return 0;
}

static bool has_header(const struct token_file *f)
{
    int32_t h[2] = {0};
    memcpy(h, f->map, f->map_bytes < sizeof h ? 0 : sizeof h);
    bool found = false;
    for (size_t i = 0; i < sizeof headers / sizeof headers[0]; i++)
        found |= h[0] == headers[i].magic && h[1] == headers[i].version;
    return found;
}

static int open_file(struct token_file *f, int64_t id_bytes)
{
    ZR_TRY(map_file(f->path, &f->map, &f->map_bytes));
    if (!id_bytes)
        return read_header(f);
    if (has_header(f))
        return zr_fail(ZERO_ERR_ARG, "%s: begins with a header of llm.c, so it is read without --token-bytes",
                       f->path);
    f->ids = f->map;
    f->id_bytes = (int)id_bytes;
    f->end_token = -1;
    f->n_tokens = (int64_t)f->map_bytes / id_bytes;
    if (f->n_tokens * id_bytes != (int64_t)f->map_bytes)
        return zr_fail(ZERO_ERR_ARG, "%s: %lld bytes are not a whole number of ids of --token-bytes %lld",
                       f->path, (long long)f->map_bytes, (long long)id_bytes);
    return 0;
}

/* Counts a file's tokens and the rows that they make. */
static void add_rows(struct token_data *d, struct token_file *f)
{
    f->n_rows = f->n_tokens ? (f->n_tokens - 1) / d->context : 0;
    d->n_tokens += f->n_tokens;
    d->n_rows += f->n_rows;
}

static int open_files(struct token_data *d, const char *const *paths, int n_paths, int64_t id_bytes)
{
    ZR_TRY(ZR_ZALLOC(d->files, n_paths, "%d files of tokens", n_paths));
    while (d->n_files < n_paths) {
        struct token_file *f = &d->files[d->n_files];
        f->path = paths[d->n_files++];
        ZR_TRY(open_file(f, id_bytes));
        f->end_token = d->end_token >= 0 ? d->end_token : f->end_token;
        if (d->documents && f->end_token < 0)
            return zr_fail(ZERO_ERR_ARG,
                           "%s: its format has no end token, at which documents end; --end-token names it",
                           f->path);
        if (d->documents && f->end_token >= d->vocab)
            return zr_fail(
                ZERO_ERR_ARG,
                "%s: documents end at token %lld, but the model has %lld ids; --end-token or --vocab "
                "is wrong",
                f->path, (long long)f->end_token, (long long)d->vocab);
        add_rows(d, f);
    }
    if (!d->n_rows)
        return zr_fail(
            ZERO_ERR_ARG,
            "%s%s: %lld tokens are less than a row, which takes %lld: --context and the one after it",
            paths[0], n_paths > 1 ? " and those after it" : "", (long long)d->n_tokens,
            (long long)d->context + 1);
    return 0;
}

int token_data_open(struct token_data *d, const char *const *paths, int n_paths, int64_t id_bytes)
{
    int err = open_files(d, paths, n_paths, id_bytes);
    if (err)
        token_data_close(d);
    return err;
}

int token_data_open_text(struct token_data *d, const void *ids, int id_bytes, int64_t n, int64_t end_token)
{
    if (d->documents && end_token < 0)
        return zr_fail(ZERO_ERR_ARG, "the text has no end token, at which documents end");
    ZR_TRY(ZR_ZALLOC(d->files, 1, "a piece of text"));
    d->files[d->n_files++] = (struct token_file){
        .path = "text", .ids = ids, .id_bytes = id_bytes, .end_token = end_token, .n_tokens = n};
    add_rows(d, &d->files[0]);
    if (d->n_rows)
        return 0;
    int64_t needed = d->context + 1;
    token_data_close(d);
    return zr_fail(ZERO_ERR_ARG,
                   "%lld %s of text are less than a row, which takes %lld: --context and the one after it",
                   (long long)n, id_bytes == 1 ? "bytes" : "tokens", (long long)needed);
}

int token_data_open_masks(struct token_data *d, const char *const *paths, int n_paths)
{
    if (n_paths != d->n_files)
        return zr_fail(ZERO_ERR_ARG, "%d masks are given for %d files of tokens", n_paths, d->n_files);
    for (int i = 0; i < n_paths; i++) {
        struct token_file *f = &d->files[i];
        void *map = NULL;
        size_t n_bytes = 0;
        ZR_TRY(map_file(paths[i], &map, &n_bytes));
        if ((int64_t)n_bytes != f->n_tokens) {
            munmap(map, n_bytes);
            return zr_fail(ZERO_ERR_ARG, "%s: a mask of %lld bytes, but %s has %lld tokens", paths[i],
                           (long long)n_bytes, f->path, (long long)f->n_tokens);
        }
        f->mask = map;
    }
    return 0;
}

void token_data_close(struct token_data *d)
{
    for (int i = 0; i < d->n_files; i++) {
        if (d->files[i].map)
            munmap(d->files[i].map, d->files[i].map_bytes);
        if (d->files[i].mask)
            munmap(d->files[i].mask, (size_t)d->files[i].n_tokens);
    }
    free(d->files);
    *d = (struct token_data){0};
}

static int64_t id_at(const struct token_file *f, int64_t i)
{
    uint16_t id2;
    uint32_t id4;
    switch (f->id_bytes) {
    case 1:
        return f->ids[i];
    case 2:
        memcpy(&id2, f->ids + 2 * i, sizeof id2);
        return id2;
    default:
        memcpy(&id4, f->ids + 4 * i, sizeof id4);
        return id4;
    }
}

/* Finds the file with a row. *first gets the position of the row's first token in it. */
static const struct token_file *file_of(const struct token_data *d, int64_t row, int64_t *first)
{
    const struct token_file *f = d->files;
    for (; row >= f->n_rows; f++)
        row -= f->n_rows;
    *first = row * d->context;
    return f;
}

int token_data_row(const struct token_data *d, int64_t row, const struct token_rows *out)
{
    int64_t first, start = 0;
    const struct token_file *f = file_of(d, row, &first);
    for (int64_t t = 0; t <= d->context; t++) {
        int64_t id = id_at(f, first + t);
        if (id >= d->vocab)
            return zr_fail(ZERO_ERR_ARG, "%s: token %lld has id %lld, but the model has %lld ids (--vocab)",
                           f->path, (long long)(first + t), (long long)id, (long long)d->vocab);
        if (t > 0)
            out->targets[t - 1] = f->mask && !f->mask[first + t] ? TOKEN_LEFT_OUT : (int32_t)id;
        bool divides = d->documents && id == f->end_token;
        if (divides && f->end_token_first)
            start = t;
        if (t < d->context) {
            out->tokens[t] = (int32_t)id;
            out->document_start[t] = (int32_t)start;
        }
        if (divides && !f->end_token_first)
            start = t + 1;
    }
    return 0;
}

int64_t token_data_count(const struct token_data *d, int64_t row, int64_t from, int64_t n)
{
    int64_t first, count = 0;
    const struct token_file *f = file_of(d, row, &first);
    for (int64_t i = 1; f->mask && i <= n; i++)
        count += f->mask[first + from + i] != 0;
    return f->mask ? count : n;
}

bool token_data_counts(const struct token_data *d, int64_t first, int64_t n)
{
    bool found = false;
    for (int64_t row = first; !found && row < first + n; row++)
        found = token_data_count(d, row, 0, d->context) > 0;
    return found;
}

static uint64_t hash_tokens(uint64_t hash, const struct token_file *f, int64_t first, int64_t end)
{
    for (int64_t i = first > 0 ? first : 0; i < end && i < f->n_tokens; i++)
        hash = random_bits(hash ^ (uint64_t)(2 * id_at(f, i) + (f->mask && f->mask[i])));
    return hash;
}

uint64_t token_data_hash(const struct token_data *d)
{
    enum { N_HASHED = 1024 };
    uint64_t hash = d->documents;
    for (const struct token_file *f = d->files; f < d->files + d->n_files; f++) {
        hash = random_bits(random_bits(hash ^ (uint64_t)f->n_tokens) ^ (f->mask != NULL));
        if (d->documents)
            hash = random_bits(hash ^ (uint64_t)(2 * f->end_token + f->end_token_first));
        hash = hash_tokens(hash, f, 0, N_HASHED);
        hash = hash_tokens(hash, f, f->n_tokens - N_HASHED, f->n_tokens);
    }
    return hash | 1;
}

/* A Feistel network permutes all numbers with an even number of bits. There are at most four times n. A
 * number that is too large is permuted again, until it is below n (cycle walking; Black and Rogaway
 * 2002). */
int64_t token_data_shuffled(int64_t i, int64_t n, uint64_t seed, int64_t epoch)
{
    const uint64_t key = random_bits(random_bits(seed) + (uint64_t)epoch);
    int half = 1;
    while (half < 31 && (int64_t)1 << 2 * half < n)
        half++;
    const uint64_t mask = ((uint64_t)1 << half) - 1;
    uint64_t x = (uint64_t)i;
    do {
        uint64_t left = x >> half, right = x & mask;
        for (uint64_t round = 0; round < 4; round++) {
            uint64_t next = left ^ (random_bits(random_bits(key + round) + right) & mask);
            left = right;
            right = next;
        }
        x = left << half | right;
    } while (x >= (uint64_t)n);
    return (int64_t)x;
}
