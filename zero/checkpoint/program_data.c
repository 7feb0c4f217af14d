/* SPDX-License-Identifier: Apache-2.0 */
/* program_data.c: zero_set_data and zero_read_data, which put data of the program into checkpoints. Rank 0
 * gives the data of the job, and each rank gives data about itself. A save writes the copy that zero_set_data
 * has made into the rank's file. Ranges are read from the checkpoint that was loaded last. */
#include "kernels/alloc.h"
#include "zero/checkpoint/save.h"
#include "zero/checkpoint/shard_file.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- for the next saves ---- */

struct zr_data *zr_data_keep(struct zr_data *d)
{
    if (d)
        d->n_holders++;
    return d;
}

void zr_data_drop(struct zr_data *d)
{
    if (d && --d->n_holders == 0)
        free(d);
}

int zero_set_data(zero_ctx *z, int32_t whose, const void *data, int64_t bytes)
{
    static const char call[] = "zero_set_data";
    if (!z || (!data && bytes))
        return zr_fail(ZERO_ERR_ARG, "%s: %s is NULL", call, z ? "data" : "z");
    if (zr_engine_check_process(z->engine))
        return zr_fail_more(ZERO_ERR_ORDER, call);
    if (whose != ZERO_DATA_JOB && whose != ZERO_DATA_RANK)
        return zr_fail(ZERO_ERR_ARG, "%s: whose is %d; allowed: ZERO_DATA_JOB (%d) and ZERO_DATA_RANK (%d)",
                       call, whose, ZERO_DATA_JOB, ZERO_DATA_RANK);
    if (bytes < 0)
        return zr_fail(ZERO_ERR_ARG, "%s: bytes is %lld; allowed: 0 and more", call, (long long)bytes);
    enum zr_data_kind kind = whose == ZERO_DATA_JOB ? ZR_DATA_JOB : ZR_DATA_RANK;
    bool is_saved = kind == ZR_DATA_RANK || z->world.rank == 0; /* the job's data are rank 0's */
    struct zr_data *d = NULL;
    if (bytes && is_saved) {
        d = bytes < INT64_MAX / 4 ? malloc(sizeof *d + (size_t)bytes) : NULL;
        if (!d)
            return zr_fail(ZERO_ERR_NOMEM, "%s: no memory for %lld bytes", call, (long long)bytes);
        *d = (struct zr_data){.n_holders = 1, .bytes = bytes};
        memcpy(d->content, data, (size_t)bytes);
    }
    zr_data_drop(z->data[kind]);
    z->data[kind] = d;
    z->data_set[kind] = true;
    return 0;
}

/* ---- in the checkpoint that was loaded ---- */

/* The files of the checkpoint that was loaded last. */
struct zr_loaded_checkpoint {
    /* absolute path, if there is anything to read */
    char folder[ZR_PATH_BYTES];
    int32_t n;
    /* one for each rank that saved it */
    struct zr_manifest_file files[];
};

int zr_loaded_checkpoint_prepare(struct zero_ctx *z, const char *folder, const struct zr_manifest *m,
                                 struct zr_loaded_checkpoint **out)
{
    struct zr_loaded_checkpoint *l;
    ZR_TRY(ZR_ZALLOC_ARRAY(l, sizeof *l, m->n_files, sizeof *l->files, "the names of %d files", m->n_files));
    l->n = m->n_files;
    memcpy(l->files, m->files, (size_t)m->n_files * sizeof *l->files);
    int64_t bytes = 0;
    for (int kind = 0; kind < ZR_N_DATA; kind++)
        bytes += zr_loaded_checkpoint_bytes(l, kind);
    /* The program may change its working directory before it reads the data. */
    int err = bytes ? zr_path_absolute(z->files, folder, l->folder) : 0;
    if (err)
        free(l);
    else
        *out = l;
    return err;
}

void zr_loaded_checkpoint_use(struct zero_ctx *z, struct zr_loaded_checkpoint *loaded)
{
    free(z->loaded);
    z->loaded = loaded;
    for (int kind = 0; kind < ZR_N_DATA; kind++) {
        zr_data_drop(z->data[kind]);
        z->data[kind] = NULL;
        z->data_set[kind] = z->reported_no_data[kind] = false;
    }
}

void zr_loaded_checkpoint_free(struct zr_loaded_checkpoint *l)
{
    free(l);
}

int64_t zr_loaded_checkpoint_bytes(const struct zr_loaded_checkpoint *l, int kind)
{
    int64_t n = 0;
    for (int32_t r = 0; l && r < l->n; r++)
        n += l->files[r].data[kind];
    return n;
}

/* Reads n bytes from byte `first` of the data in a rank's file. */
static int read_range(const struct zero_ctx *z, const struct zr_manifest_file *f, enum zr_data_kind kind,
                      int64_t first, int64_t n, void *dst)
{
    struct zr_shard s;
    const struct zr_st_entry *e;
    ZR_TRY(zr_shard_open(z->files, z->loaded->folder, f, &s));
    /* The entry was there when the checkpoint was loaded, but the file may have been replaced since. */
    int err = zr_shard_find_data(&s, f, kind, &e);
    if (!err)
        err = zr_shard_fetch(&s, &(struct zr_request){.at = e->begin + first, .n = n, .dst = dst}, 1);
    zr_shard_close(&s);
    return err;
}

int zero_read_data(zero_ctx *z, int32_t whose, int64_t first, int64_t n, void *dst,
                   struct zero_data_info *info)
{
    static const char call[] = "zero_read_data";
    char who[32];
    if (!z || (!dst && n))
        return zr_fail(ZERO_ERR_ARG, "%s: %s is NULL", call, z ? "dst" : "z");
    if (zr_engine_check_process(z->engine))
        return zr_fail_more(ZERO_ERR_ORDER, call);
    if (!z->loaded)
        return zr_fail(ZERO_ERR_ORDER, "%s: no checkpoint was loaded", call);
    bool job = whose == ZERO_DATA_JOB;
    if (!job && (whose < 0 || whose >= z->loaded->n))
        return zr_fail(ZERO_ERR_ARG,
                       "%s: whose is %d; allowed: ZERO_DATA_JOB (%d), and 0..%d, the ranks that saved the "
                       "checkpoint",
                       call, whose, ZERO_DATA_JOB, z->loaded->n - 1);
    enum zr_data_kind kind = job ? ZR_DATA_JOB : ZR_DATA_RANK;
    const struct zr_manifest_file *f = &z->loaded->files[job ? 0 : whose];
    int64_t bytes = f->data[kind];
    if (job)
        snprintf(who, sizeof who, "the job");
    else
        snprintf(who, sizeof who, "saved rank %d", whose);
    if (n < 0 || first < 0 || first > bytes || n > bytes - first)
        return zr_fail(ZERO_ERR_ARG, "%s: first is %lld and n is %lld; %s has %lld bytes", call,
                       (long long)first, (long long)n, who, (long long)bytes);
    int err = n ? read_range(z, f, kind, first, n, dst) : 0;
    if (!err && info)
        *info = (struct zero_data_info){.bytes = bytes, .n_saved = z->loaded->n};
    return err ? zr_fail_more(err, call) : 0;
}
