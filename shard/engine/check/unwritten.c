/* SPDX-License-Identifier: Apache-2.0 */
/* unwritten.c: finds gradients that backward does not write.
 *
 * A model that computes in other memory (a struct copied before zero_wrap, graph nodes that were not
 * re-pointed) trains on zeros, and nothing else would show it. The library hands gradients out zeroed. A
 * gradient that is zero at the end of every backward bracket of the first step was not written. */
#include "shard/engine/check/observers.h"
#include "shard/engine/internal.h"
#include "shard/engine/issue.h"

#include <stdio.h>
#include <string.h>

struct unwritten {
    struct zr_observer o;
    /* the first step is not over, and the CPU can read gradients */
    bool looks;
    /* (n_pieces) the gradient was not zero at some end */
    bool written[];
};

static struct unwritten *unwritten_of(struct zr_observer *o)
{
    return (struct unwritten *)o;
}

static int look_at(struct zr_observer *o, const struct zr_flat *f, const struct zr_piece *p, char *full)
{
    bool *written = &unwritten_of(o)->written[p - o->e->layout->pieces];
    if (!*written)
        *written = !zr_all_zero(zr_grad_of_piece(f, p, full), p->n, f->dtype);
    return 0;
}

static int unwritten_end(struct zr_observer *o, const struct zr_grant *g)
{
    if (g->kind != ZR_GRANT_GRAD || !unwritten_of(o)->looks)
        return 0;
    return zr_for_grad_pieces(o, g->unit, g->slot, look_at);
}

/* Appends the name of a tensor, or of its layer. Returns false if there is no room. */
static bool add_name(const struct zr_engine *e, const struct zr_piece *p, char *text, size_t n_text)
{
    const struct zr_tensor *t = &e->layout->tensors[p->tensor];
    char name[160];
    if (t->stacked)
        snprintf(name, sizeof name, "%.100s[%lld]", t->name, (long long)p->layer);
    else
        snprintf(name, sizeof name, "%.100s", t->name);
    size_t n = strlen(text);
    if (n + strlen(name) + 16 > n_text)
        return false;
    snprintf(text + n, n_text - n, "%s%s", n ? ", " : "", name);
    return true;
}

static void report_unwritten(struct zr_engine *e, const bool *written)
{
    char names[512] = "";
    int32_t n_trainable = 0, n_left = 0, n_named = 0;
    for (int32_t i = 0; i < e->layout->n_pieces; i++) {
        const struct zr_piece *p = &e->layout->pieces[i];
        if (!zr_piece_flat(e->layout, i)->trainable || p->n == 0)
            continue;
        n_trainable++;
        if (written[i])
            continue;
        n_left++;
        n_named += add_name(e, p, names, sizeof names);
    }
    if (n_left && n_left == n_trainable)
        zr_warn(e->opt.log, "in the first step this rank wrote no gradient at all");
    else if (n_left)
        zr_warn(e->opt.log, "in the first step no gradient was written to %s%s: all its elements are zero",
                names, n_named < n_left ? ", ..." : "");
}

static int check_norm(struct zr_engine *e, double grad_norm)
{
    bool trainable = false;
    for (int32_t u = 0; !trainable && u < e->layout->n_units; u++)
        trainable = e->layout->units[u].trainable;
    if (grad_norm != 0 || !trainable)
        return 0;
    if (zr_step_calls(e) == 1)
        return zr_fail(ZERO_ERR_ORDER,
                       "step 1: every gradient is zero, on every rank: backward does not write where the "
                       "library points the model's gradients. Does it use pointers that were copied before "
                       "zero_wrap, or memory of its own? It must read them again after each zero_begin.");
    zr_warn(e->opt.log,
            "every gradient of a step was zero, on every rank: zero_step was called twice, or backward wrote "
            "nothing");
    return 0;
}

static int unwritten_step(struct zr_observer *o, enum zr_step_moment at, const char *call)
{
    struct unwritten *w = unwritten_of(o);
    (void)call;
    if (at == ZR_STEP_SETTLED)
        return check_norm(o->e, o->e->agreed->grad_norm);
    if (at == ZR_STEP_ISSUED && w->looks)
        report_unwritten(o->e, w->written);
    w->looks &= at != ZR_STEP_ISSUED;
    return 0;
}

int zr_unwritten_open(struct zr_engine *e)
{
    struct zr_observer *o;
    static const struct zr_observer_ops ops = {.on_end = unwritten_end, .on_step = unwritten_step};
    const struct zr_device_ops *d = e->dev->ops;
    if (!e->opt.log)
        return 0;
    ZR_TRY(zr_observer_new(e, &ops, sizeof(struct unwritten), e->layout->n_pieces, sizeof(bool), &o));
    unwritten_of(o)->looks = d->host_memory && d->compute_on_caller;
    return 0;
}
