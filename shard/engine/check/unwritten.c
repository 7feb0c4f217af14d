/* SPDX-License-Identifier: Apache-2.0 */
/* unwritten.c: does backward write the gradients that it was given?
 *
 * A model that computes in memory of its own (a struct copied before zero_wrap, graph nodes that were not
 * re-pointed) trains on zeros, and nothing else would say so. The library hands gradients out zeroed: what
 * holds nothing but zeros at the end of every backward bracket of the first step was not written, or might as
 * well not have been. */
#include "shard/engine/internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

bool zr_all_zero(const char *x, int64_t n, enum zr_dtype dtype)
{
    int64_t size = zr_dtype_bytes(dtype);
    if (n == 0 || (!x[0] && !memcmp(x, x + 1, (size_t)(n * size - 1))))
        return true;
    for (int64_t i = 0; i < n * size; i++)
        if (x[i] && !((i + 1) % size == 0 && x[i] == (char)0x80))
            return false;
    return true;
}

int zr_written_open(struct zr_engine *e)
{
    const struct zr_device_ops *d = e->dev->ops;
    if (!e->opt.log || !d->host_memory || !d->compute_on_caller)
        return 0;
    e->m.written = calloc((size_t)e->layout->n_pieces + 1, sizeof *e->m.written);
    return e->m.written ? 0 : zr_fail(ZR_ERR_NOMEM, "no memory for %d pieces", e->layout->n_pieces);
}

static void look_at_written(struct zr_engine *e, const struct zr_flat *f, const struct zr_piece *p,
                            int32_t slot)
{
    bool *written = &e->m.written[p - e->layout->pieces];
    const char *at = e->reduce_base + zr_plan_grad_full(e->plan, f, slot);
    if (f->trainable && !*written)
        *written = !zr_all_zero(at + p->first * zr_dtype_bytes(f->dtype), p->n, f->dtype);
}

void zr_written_look_at(struct zr_engine *e, int32_t unit, int32_t slot)
{
    const struct zr_unit *u = &e->layout->units[unit];
    for (int32_t i = 0; i < u->n_flats; i++) {
        const struct zr_flat *f = &e->layout->flats[u->first_flat + i];
        for (int32_t k = 0; k < f->n_pieces; k++)
            look_at_written(e, f, &e->layout->pieces[f->first_piece + k], slot);
    }
}

/* Appends a tensor's name, or a layer of it. false: there is no more room. */
static bool add_name(const struct zr_engine *e, const struct zr_piece *p, char *text, size_t n_text)
{
    const struct zr_tensor *t = &e->layout->tensors[p->tensor];
    char name[160];
    if (t->stacked)
        snprintf(name, sizeof name, "%.100s[%lld]", t->name, (long long)p->slice);
    else
        snprintf(name, sizeof name, "%.100s", t->name);
    size_t n = strlen(text);
    if (n + strlen(name) + 16 > n_text)
        return false;
    snprintf(text + n, n_text - n, "%s%s", n ? ", " : "", name);
    return true;
}

void zr_written_report(struct zr_engine *e)
{
    char names[512] = "";
    int32_t n_trainable = 0, n_left = 0, n_named = 0;
    for (int32_t i = 0; i < e->layout->n_pieces; i++) {
        const struct zr_piece *p = &e->layout->pieces[i];
        if (!zr_piece_flat(e->layout, i)->trainable || p->n == 0)
            continue;
        n_trainable++;
        if (e->m.written[i])
            continue;
        n_left++;
        n_named += add_name(e, p, names, sizeof names);
    }
    if (n_left && n_left == n_trainable)
        zr_warn(e->opt.log, "in the first step this rank wrote no gradient at all");
    else if (n_left)
        zr_warn(e->opt.log, "in the first step no gradient was written to %s%s: all its elements are zero",
                names, n_named < n_left ? ", ..." : "");
    free(e->m.written);
    e->m.written = NULL;
}

int zr_written_norm(struct zr_engine *e, double grad_norm)
{
    bool trainable = false;
    for (int32_t u = 0; !trainable && u < e->layout->n_units; u++)
        trainable = e->layout->units[u].trainable;
    if (grad_norm != 0 || !trainable || !e->opt.log)
        return 0;
    if (e->m.step == 1)
        return zr_fail(ZR_ERR_ORDER,
                       "step 1: every gradient is zero, on every rank: backward does not write where the "
                       "library points the model's gradients. Does it use pointers that were copied before "
                       "zero_wrap, or memory of its own? It must read them again after each zero_begin.");
    zr_warn(e->opt.log,
            "every gradient of a step was zero, on every rank: zero_step was called twice, or backward wrote "
            "nothing");
    return 0;
}
