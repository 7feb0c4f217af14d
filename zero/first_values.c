/* SPDX-License-Identifier: Apache-2.0 */
/* first_values.c: looks for NaN and infinity among the first weights, because one spoils every step. Each
 * rank searches the weights that it owns once, and logs the first one. */
#include "kernels/alloc.h"
#include "zero/checkpoint/float_values.h"
#include "zero/checkpoint/save_source.h"

#include <stdlib.h>

#define MAX_BUFFER_BYTES (1 << 20)

/* Searches a range of this rank's values, which begins at byte `at` of the source. *found: the index in the
 * tensor of the first such element. -1: none. */
static int find_in_range(struct zr_source *s, const struct zr_extent *x, int64_t at, enum zero_dtype dtype,
                         char *buffer, int64_t buffer_bytes, int64_t *found, float *value)
{
    int err = 0;
    *found = -1;
    for (int64_t done = 0, n; !err && *found < 0 && done < x->n; done += n) {
        n = zr_min(x->n - done, buffer_bytes / x->size);
        err = zr_source_read(s, buffer, at + done * x->size, n * x->size);
        int64_t i = err ? -1 : zr_find_non_finite(buffer, dtype, dtype, n, value);
        *found = i < 0 ? -1 : x->first + done + i;
    }
    return err;
}

/* Logs the first NaN or infinity among parameters and masters. Skips masters in a file, because they were
 * made from the parameters. */
static int report_first(struct zero_ctx *z, struct zr_source *s, char *buffer, int64_t buffer_bytes)
{
    int64_t found = -1;
    float value;
    int err = 0;
    for (int64_t i = 0; !err && found < 0 && i < s->x->n; i++) {
        const struct zr_extent *x = &s->x->list[i];
        const struct zr_tensor *t = &z->whole.tensors[x->tensor];
        enum zero_dtype dtype = x->kind == ZR_VALUE_PARAM ? t->dtype : ZERO_F32;
        if (x->kind >= 0 || !x->at || !zr_floats_convert("F32", dtype))
            continue;
        err = find_in_range(s, x, s->at[i], dtype, buffer, buffer_bytes, &found, &value);
        if (!err && found >= 0)
            zr_warn(z->config.options.log,
                    "zero_wrap: element %lld of tensor %s is %g; training will not recover from it, and more "
                    "may follow",
                    (long long)found, t->name, (double)value);
    }
    return err;
}

/* Returns how much to read at a time: the largest value that this rank owns, but at most MAX_BUFFER_BYTES. */
static int64_t buffer_bytes_for(const struct zr_extents *own)
{
    int64_t bytes = (int64_t)sizeof(float);
    for (int64_t i = 0; i < own->n; i++)
        bytes = zr_max(bytes, own->list[i].n * own->list[i].size);
    return zr_min(bytes, MAX_BUFFER_BYTES);
}

void zr_first_values_report(struct zero_ctx *z)
{
    struct zr_device *dev = zr_engine_device(z->engine);
    struct zr_extents own = {0};
    struct zr_source s = {0};
    char *buffer = NULL;
    int64_t bytes = 0;
    int err = zr_engine_drain(z->engine);
    if (!err)
        err = zr_extents_of(z, NULL, -1, &own);
    if (!err) {
        bytes = buffer_bytes_for(&own);
        err = ZR_ALLOC(buffer, bytes, "%lld bytes", (long long)bytes);
    }
    if (!err)
        err = zr_source_open("", 0, &own, dev->ops->host_memory ? NULL : dev, bytes, &s);
    if (!err)
        err = report_first(z, &s, buffer, bytes);
    if (err)
        zr_warn(z->config.options.log, "zero_wrap did not look for NaN among the first values: %s",
                zr_error_text());
    zr_source_close(&s);
    free(own.list);
    free(buffer);
}
