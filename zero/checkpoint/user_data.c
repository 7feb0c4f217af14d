/* SPDX-License-Identifier: Apache-2.0 */
/* user_data.c: what the program itself wants in its checkpoints: a few bytes of rank 0 for all, and any
 * number of each rank's own. */
#include "zero/checkpoint/save.h"
#include "zero/checkpoint/shard_file.h"

#include <stdlib.h>
#include <string.h>

/* ---- one for all ---- */

int zero_set_user_data(zero_ctx *z, const void *data, int64_t bytes)
{
    if (!z || (!data && bytes))
        return zr_fail(ZR_ERR_ARG, "zero_set_user_data: %s is NULL", z ? "data" : "z");
    if (zr_engine_check_process(z->engine))
        return zr_fail_more(ZR_ERR_ORDER, "zero_set_user_data");
    if (bytes < 0 || bytes > ZR_USER_DATA_MAX)
        return zr_fail(ZR_ERR_ARG,
                       "zero_set_user_data: bytes is %lld; allowed: 0..%d; zero_set_rank_data takes more",
                       (long long)bytes, ZR_USER_DATA_MAX);
    unsigned char *copy = malloc((size_t)bytes + 1);
    if (!copy)
        return zr_fail(ZR_ERR_NOMEM, "zero_set_user_data: no memory for %lld bytes", (long long)bytes);
    if (bytes)
        memcpy(copy, data, (size_t)bytes);
    free(z->user_data);
    z->user_data = copy;
    z->n_user_data = bytes;
    return 0;
}

int zero_get_user_data(zero_ctx *z, const void **data, int64_t *bytes)
{
    if (!z || !data || !bytes)
        return zr_fail(ZR_ERR_ARG, "zero_get_user_data: an argument is NULL");
    if (zr_engine_check_process(z->engine))
        return zr_fail_more(ZR_ERR_ORDER, "zero_get_user_data");
    *data = z->n_user_data ? z->user_data : NULL;
    *bytes = z->n_user_data;
    return 0;
}

/* ---- each rank's own ---- */

struct zr_rank_data *zr_rank_data_keep(struct zr_rank_data *d)
{
    if (d)
        d->n_holders++;
    return d;
}

void zr_rank_data_drop(struct zr_rank_data *d)
{
    if (d && --d->n_holders == 0)
        free(d);
}

int zero_set_rank_data(zero_ctx *z, const void *data, int64_t bytes)
{
    if (!z || (!data && bytes))
        return zr_fail(ZR_ERR_ARG, "zero_set_rank_data: %s is NULL", z ? "data" : "z");
    if (zr_engine_check_process(z->engine))
        return zr_fail_more(ZR_ERR_ORDER, "zero_set_rank_data");
    if (bytes < 0)
        return zr_fail(ZR_ERR_ARG, "zero_set_rank_data: bytes is %lld; allowed: 0 and more",
                       (long long)bytes);
    struct zr_rank_data *d = NULL;
    if (bytes) {
        d = bytes < INT64_MAX / 4 ? malloc(sizeof *d + (size_t)bytes) : NULL;
        if (!d)
            return zr_fail(ZR_ERR_NOMEM, "zero_set_rank_data: no memory for %lld bytes", (long long)bytes);
        *d = (struct zr_rank_data){.n_holders = 1, .bytes = bytes};
        memcpy(d->data, data, (size_t)bytes);
    }
    zr_rank_data_drop(z->rank_data);
    z->rank_data = d;
    z->rank_data_set = true;
    return 0;
}

/* ---- of a checkpoint ---- */

struct zr_loaded_ranks {
    char folder[ZR_PATH_BYTES]; /* from the root on, where there is anything to read */
    int32_t n;
    struct zr_manifest_file files[]; /* of each rank that saved it */
};

int zr_loaded_ranks_prepare(struct zero_ctx *z, const char *folder, const struct zr_manifest *m,
                            struct zr_loaded_ranks **out)
{
    struct zr_loaded_ranks *l = malloc(sizeof *l + (size_t)m->n_files * sizeof *l->files);
    if (!l)
        return zr_fail(ZR_ERR_NOMEM, "no memory for the names of %d files", m->n_files);
    *l = (struct zr_loaded_ranks){.n = m->n_files};
    memcpy(l->files, m->files, (size_t)m->n_files * sizeof *l->files);
    /* The program may change its working directory before it reads them. */
    int err = zr_loaded_ranks_bytes(l) ? zr_path_absolute(z->files, folder, l->folder) : 0;
    if (err)
        free(l);
    else
        *out = l;
    return err;
}

void zr_loaded_ranks_use(struct zero_ctx *z, struct zr_loaded_ranks *loaded)
{
    free(z->loaded);
    z->loaded = loaded;
    zr_rank_data_drop(z->rank_data);
    z->rank_data = NULL;
    z->rank_data_set = z->reported_no_rank_data = false;
}

void zr_loaded_ranks_free(struct zr_loaded_ranks *l)
{
    free(l);
}

int64_t zr_loaded_ranks_bytes(const struct zr_loaded_ranks *l)
{
    int64_t n = 0;
    for (int32_t r = 0; l && r < l->n; r++)
        n += l->files[r].rank_data;
    return n;
}

/* ZR_ERR_ORDER, ZR_ERR_ARG when the loaded checkpoint has no such rank. */
static int check_saved_rank(const struct zero_ctx *z, const char *call, int32_t saved_rank)
{
    if (!z->loaded)
        return zr_fail(ZR_ERR_ORDER, "%s: no checkpoint was loaded", call);
    if (saved_rank < 0 || saved_rank >= z->loaded->n)
        return zr_fail(ZR_ERR_ARG,
                       "%s: saved_rank is %d; allowed: 0..%d, of the ranks that saved the checkpoint", call,
                       saved_rank, z->loaded->n - 1);
    return 0;
}

int zero_find_rank_data(zero_ctx *z, int32_t saved_rank, int32_t *n_saved, int64_t *bytes)
{
    static const char call[] = "zero_find_rank_data";
    if (!z || (!n_saved && !bytes))
        return zr_fail(ZR_ERR_ARG, "%s: %s", call, z ? "n_saved and bytes are NULL" : "z is NULL");
    if (zr_engine_check_process(z->engine))
        return zr_fail_more(ZR_ERR_ORDER, call);
    int err = bytes ? check_saved_rank(z, call, saved_rank) : 0;
    if (err)
        return err;
    if (n_saved)
        *n_saved = z->loaded ? z->loaded->n : 0;
    if (bytes)
        *bytes = z->loaded->files[saved_rank].rank_data;
    return 0;
}

static int read_range(const struct zero_ctx *z, const struct zr_manifest_file *f, int64_t first, int64_t n,
                      char *dst)
{
    struct zr_shard s;
    const struct zr_st_entry *found = NULL;
    int err = zr_shard_open(z->files, z->loaded->folder, f, &s);
    if (err)
        return err;
    for (int64_t i = 0; i < s.st.n_entries; i++)
        if (!strcmp(s.st.entries[i].name, ZR_RANK_DATA_NAME))
            found = &s.st.entries[i];
    /* It was there at the load; the file may have been made anew since. */
    if (!found || found->end - found->begin != f->rank_data)
        err = zr_fail(ZR_ERR_IO, "%s: it has no entry %s of %lld bytes", s.path, ZR_RANK_DATA_NAME,
                      (long long)f->rank_data);
    else
        err = zr_shard_fetch(&s, &(struct zr_request){.at = found->begin + first, .n = n, .dst = dst}, 1);
    zr_shard_close(&s);
    return err;
}

int zero_read_rank_data(zero_ctx *z, int32_t saved_rank, int64_t first, int64_t n, void *dst)
{
    static const char call[] = "zero_read_rank_data";
    if (!z || (!dst && n))
        return zr_fail(ZR_ERR_ARG, "%s: %s is NULL", call, z ? "dst" : "z");
    if (zr_engine_check_process(z->engine))
        return zr_fail_more(ZR_ERR_ORDER, call);
    int err = check_saved_rank(z, call, saved_rank);
    if (err)
        return err;
    const struct zr_manifest_file *f = &z->loaded->files[saved_rank];
    if (n < 0 || first < 0 || first > f->rank_data || n > f->rank_data - first)
        return zr_fail(ZR_ERR_ARG, "%s: first is %lld and n is %lld; saved rank %d has %lld bytes", call,
                       (long long)first, (long long)n, saved_rank, (long long)f->rank_data);
    err = n ? read_range(z, f, first, n, dst) : 0;
    return err ? zr_fail_more(err, call) : 0;
}
