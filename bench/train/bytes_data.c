/* SPDX-License-Identifier: Apache-2.0 */
/* bytes_data.c: reads text files and cuts batches out of them. fts(3) walks folders in a fixed order. */
#include "bench/train/bytes_data.h"
#include "bench/random_bits.h"
#include "kernels/alloc.h"
#include "kernels/device.h"

#include <errno.h>
#include <fts.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

static int by_name(const FTSENT **a, const FTSENT **b)
{
    return strcmp((*a)->fts_name, (*b)->fts_name);
}

static bool ends_in(const char *name, const char *suffix)
{
    size_t n = strlen(name), k = strlen(suffix);
    return n >= k && !strcmp(name + n - k, suffix);
}

bool text_is_binary(const void *bytes, size_t n)
{
    return memchr(bytes, 0, n < 4096 ? n : 4096);
}

/* Appends a file. In folders, a file that does not look like text is left out. */
static int append(void *arg, const char *path, bool given)
{
    struct bytes_data *d = arg;
    if (d->n_bytes == BYTES_DATA_MAX)
        return 1;
    FILE *f = fopen(path, "rb");
    if (!f)
        return zr_fail(ZERO_ERR_IO, "cannot read %s: %s", path, strerror(errno));
    uint8_t *start = d->bytes + d->n_bytes;
    size_t n = fread(start, 1, (size_t)(BYTES_DATA_MAX - d->n_bytes), f);
    int failed = ferror(f) ? errno : 0;
    fclose(f);
    if (failed)
        return zr_fail(ZERO_ERR_IO, "cannot read %s: %s", path, strerror(failed));
    if (!given && text_is_binary(start, n))
        return 0;
    d->n_bytes += (int64_t)n;
    d->n_files++;
    return 0;
}

int text_walk(const char *path, const char *suffix, text_visit *visit, void *arg)
{
    char *const roots[] = {(char *)path, NULL};
    FTS *walk = fts_open(roots, FTS_PHYSICAL | FTS_COMFOLLOW | FTS_NOCHDIR, by_name);
    if (!walk)
        return zr_fail(ZERO_ERR_IO, "cannot read %s: %s", path, strerror(errno));
    int err = 0;
    for (FTSENT *e; !err && (e = fts_read(walk));) {
        bool given = e->fts_level == FTS_ROOTLEVEL;
        switch (e->fts_info) {
        case FTS_F:
            if (given || !suffix || ends_in(e->fts_name, suffix))
                err = visit(arg, e->fts_path, given);
            break;
        case FTS_DNR:
        case FTS_ERR:
        case FTS_NS:
            err = zr_fail(ZERO_ERR_IO, "cannot read %s: %s", e->fts_path, strerror(e->fts_errno));
            break;
        case FTS_DEFAULT: /* a pipe that was named is read like a file */
            err = given ? visit(arg, e->fts_path, given) : 0;
            break;
        default:
            break;
        }
    }
    fts_close(walk);
    return err;
}

int bytes_data_open(struct bytes_data *d, const char *const *paths, int n_paths)
{
    *d = (struct bytes_data){0};
    /* Pages without text are never touched. */
    ZR_TRY(ZR_ALLOC(d->bytes, BYTES_DATA_MAX, "%d bytes of text", BYTES_DATA_MAX));
    int err = n_paths ? 0 : text_walk(BYTES_DATA_DEFAULT, ".h", append, d);
    for (int i = 0; !err && i < n_paths; i++)
        err = text_walk(paths[i], NULL, append, d);
    if (err < 0)
        bytes_data_close(d);
    return err < 0 ? err : 0;
}

void bytes_data_close(struct bytes_data *d)
{
    free(d->bytes);
    *d = (struct bytes_data){0};
}

/* Fills n tokens of a row from `first` on with the piece of the text that bits choose. */
static void take_piece(const struct bytes_data *d, const struct token_rows *row, int64_t first, int64_t n,
                       int64_t T, uint64_t bits)
{
    const uint8_t *text = d->bytes + bits % (uint64_t)(d->n_bytes - T);
    for (int64_t t = 0; t < n; t++) {
        row->tokens[first + t] = text[t];
        row->targets[first + t] = text[t + 1];
        row->document_start[first + t] = (int32_t)first;
    }
}

void bytes_data_sample(const struct bytes_data *d, const struct token_rows *out, int64_t B, int64_t T,
                       int64_t document, uint64_t seed, int64_t step, int64_t micro_batch)
{
    uint64_t batch = random_bits(random_bits(random_bits(seed) + (uint64_t)step) + (uint64_t)micro_batch);
    for (int64_t b = 0; b < B; b++) {
        const struct token_rows row = {out->tokens + b * T, out->targets + b * T,
                                       out->document_start + b * T};
        uint64_t bits = random_bits(batch + (uint64_t)b);
        for (int64_t at = 0, n; at < T; at += n, bits = random_bits(bits)) {
            n = document ? 1 + (int64_t)(random_bits(bits + 1) % (uint64_t)(2 * document - 1)) : T;
            n = n < T - at ? n : T - at;
            take_piece(d, &row, at, n, T, bits);
        }
    }
}
