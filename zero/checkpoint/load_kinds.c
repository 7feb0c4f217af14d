/* SPDX-License-Identifier: Apache-2.0 */
/* load_kinds.c: which saved values become which values of this model. They are the same kinds, unless a
 * tensor was frozen when it was saved and is trained now, or the reverse. A frozen tensor has its weights
 * alone, in the model's dtype. A trained one has fp32 masters, which are its weights if those are f32, and
 * states. */
#include "zero/checkpoint/float_values.h"
#include "zero/checkpoint/load_inside.h"

#include <stdio.h>
#include <string.h>

bool zr_loading_is_saved(const struct zr_loading *l, int32_t tensor, int kind)
{
    const struct zr_manifest_tensor *was = l->was[tensor];
    if (kind == ZR_VALUE_PARAM)
        return !was->trainable || l->z->whole.tensors[tensor].dtype != ZR_F32;
    return was->trainable && kind < was->n_states;
}

/* Masters that are read from weights of fewer bytes: those are read to the end of the masters' memory. */
static int64_t bytes_to_widen(const struct zr_loading *l, const struct zr_extent *x)
{
    bool other = x->kind == ZR_VALUE_MASTER && !zr_loading_is_saved(l, x->tensor, x->kind);
    return other ? x->size - zr_dtype_bytes(l->z->whole.tensors[x->tensor].dtype) : 0;
}

bool zr_loading_source(const struct zr_loading *l, const struct zr_extent *x, struct zr_extent *from)
{
    int64_t more = bytes_to_widen(l, x);
    *from = *x;
    if (zr_loading_is_saved(l, x->tensor, x->kind))
        return true;
    from->kind = x->kind == ZR_VALUE_PARAM ? ZR_VALUE_MASTER : ZR_VALUE_PARAM;
    from->size = x->size - more;
    from->at = x->at + x->n * more;
    return x->kind < 0;
}

void zr_loading_widen(const struct zr_loading *l)
{
    for (int64_t i = 0; i < l->own.n; i++) {
        const struct zr_extent *x = &l->own.list[i];
        int64_t more = bytes_to_widen(l, x);
        if (more)
            zr_floats_copy(x->at, ZR_F32, x->at + x->n * more,
                           zr_st_dtype_of(l->z->whole.tensors[x->tensor].dtype), x->n);
    }
}

/* Prints how many tensors have changed, and the first one's name; "" if none has. */
static void print_changed(const struct zr_loading *l, bool was_trained, const char *what, char out[300])
{
    const struct zr_whole *whole = &l->z->whole;
    const char *first = NULL;
    int32_t n = 0;
    for (int32_t i = 0; i < whole->n; i++) {
        bool is_trained = whole->tensors[i].grad != NULL;
        if (l->was[i]->trainable != was_trained || is_trained == was_trained)
            continue;
        first = first ? first : whole->tensors[i].name;
        n++;
    }
    *out = 0;
    if (n)
        snprintf(out, 300, " %d of its tensors %s (%.100s%s)", n, what, first, n > 1 ? ", ..." : "");
}

void zr_loading_report_kinds(const struct zr_loading *l)
{
    char thawed[300], frozen[300];
    print_changed(l, false, "were frozen and are trained now, with fresh optimizer state", thawed);
    print_changed(l, true, "were trained and are frozen now, without their optimizer state", frozen);
    if (*thawed || *frozen)
        zr_warn(l->z->config.options.log, "%s:%s%s%s", l->folder, thawed, *thawed && *frozen ? ";" : "",
                frozen);
}
