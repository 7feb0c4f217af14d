/* SPDX-License-Identifier: Apache-2.0 */
/* unit_steps.c: how many steps updated each tensor, for the bias correction of its optimizer.
 *
 * A unit has one count. A checkpoint stores it by tensor and layer, so that a model with other pipeline
 * stages or units can load it. Rank 0 writes the manifest, and ranks of other pipeline stages send it their
 * counts. */
#include "kernels/alloc.h"
#include "zero/checkpoint/load_inside.h"
#include "zero/checkpoint/save_inside.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Layer `layer` of tensor `tensor` of the whole model. */
struct layer_count {
    int32_t tensor, layer;
    int64_t t;
};

/* Calls fn for each layer of this rank's trainable tensors, with its unit. */
static void for_layers(const struct zero_ctx *z, void (*fn)(void *arg, int32_t unit, struct layer_count c),
                       void *arg)
{
    const struct zr_layout *l = z->layout;
    for (int32_t i = 0; i < l->n_tensors; i++) {
        const struct zr_tensor *t = &l->tensors[i];
        const struct zr_whole_at place = zr_whole_at(z, i);
        if (!t->grad || t->buffer)
            continue;
        int64_t before = t->stacked ? place.first / (t->n_elems / t->n_layers) : 0;
        for (int64_t s = 0; s < t->n_layers; s++)
            fn(arg, (int32_t)(t->unit + s),
               (struct layer_count){.tensor = place.tensor, .layer = (int32_t)(before + s)});
    }
}

/* ---- saving ---- */

struct listing {
    const struct zero_ctx *z;
    /* NULL: they are only counted */
    struct layer_count *list;
    int64_t n;
};

static void add_count(void *arg, int32_t unit, struct layer_count c)
{
    struct listing *to = arg;
    c.t = zr_engine_unit_step(to->z->engine, unit);
    if (to->list)
        to->list[to->n] = c;
    to->n++;
}

static void put_count(struct zr_manifest *m, const struct layer_count *c)
{
    struct zr_manifest_tensor *t = &m->tensors[c->tensor];
    if (c->layer < t->n_updates)
        t->updates[c->layer] = c->t;
}

/* Allocates one number for each layer of each trainable tensor, initially the step of the job. */
static int open_counts(const struct zero_ctx *z, struct zr_manifest *m)
{
    for (int32_t i = 0; i < m->n_tensors; i++) {
        struct zr_manifest_tensor *t = &m->tensors[i];
        int64_t n = z->whole.tensors[i].stacked ? z->whole.tensors[i].n_layers : 1;
        if (!t->trainable)
            continue;
        ZR_TRY(ZR_ZALLOC(t->updates, n, "the counts of %lld layers", (long long)n));
        t->n_updates = (int32_t)n;
        for (int64_t k = 0; k < n; k++)
            t->updates[k] = m->t;
    }
    return 0;
}

/* The ranks of all pipeline stages exchange their counts, this many at a time. */
enum { AT_ONCE = ZR_EXCHANGE_BYTES / sizeof(struct layer_count) - 1 };

struct some_counts {
    int64_t n, left;
    struct layer_count list[AT_ONCE];
};
_Static_assert(sizeof(struct some_counts) <= ZR_EXCHANGE_BYTES, "must fit an exchange");

static int report_counts(struct zero_ctx *z, const struct listing *own, struct zr_manifest *m)
{
    struct some_counts mine, *all = z->from_all;
    bool more = true;
    for (int64_t at = 0; more; at += AT_ONCE) {
        mine = (struct some_counts){.n = zr_max(zr_min(own->n - at, AT_ONCE), 0)};
        mine.left = zr_max(own->n - at - mine.n, 0);
        if (mine.n)
            memcpy(mine.list, own->list + at, (size_t)mine.n * sizeof *mine.list);
        ZR_TRY(zr_engine_exchange(z->engine, &mine, sizeof mine, all));
        more = false;
        for (int r = 0; r < z->world.world; r++) {
            more |= all[r].left > 0;
            for (int64_t i = 0; m->tensors && i < all[r].n; i++)
                put_count(m, &all[r].list[i]);
        }
    }
    return 0;
}

/* Keeps one number if all layers have the same. */
static void close_counts(struct zr_manifest *m)
{
    for (int32_t i = 0; i < m->n_tensors; i++) {
        struct zr_manifest_tensor *t = &m->tensors[i];
        bool alike = true;
        for (int32_t k = 0; k < t->n_updates; k++)
            alike &= t->updates[k] == t->updates[0];
        if (alike && t->n_updates > 1)
            t->n_updates = 1;
    }
}

int zr_unit_steps_save(struct zero_ctx *z, struct zr_manifest *m)
{
    struct listing own = {.z = z};
    for_layers(z, add_count, &own);
    int err = ZR_ALLOC(own.list, own.n + 1, "%lld counts", (long long)own.n);
    if (!err)
        err = open_counts(z, m);
    if (!err && m->n_tensors)
        err = zr_manifest_check(m); /* with a number for each layer, which is the most */
    err = zr_agree_in_run(z, err);
    own.n = 0;
    if (!err)
        for_layers(z, add_count, &own);
    for (int64_t i = 0; !err && m->tensors && i < own.n; i++)
        put_count(m, &own.list[i]);
    if (!err && z->mesh.pp > 1)
        err = report_counts(z, &own, m);
    if (!err)
        close_counts(m);
    free(own.list);
    return err;
}

/* ---- loading ---- */

/* A tensor that was frozen has no counts. Its states are fresh, so its count begins at 0. */
static int64_t count_of(const struct zr_manifest_tensor *t, const struct zr_tensor *here, int32_t layer)
{
    int64_t most = 0;
    if (t->n_updates > 1 && here->stacked)
        return t->updates[layer];
    for (int32_t i = 0; i < t->n_updates; i++)
        most = zr_max(most, t->updates[i]);
    return most;
}

static void forget_count(void *arg, int32_t unit, struct layer_count c)
{
    const struct zero_ctx *z = arg;
    (void)c;
    zr_engine_set_unit_step(z->engine, unit, 0);
}

static int64_t saved_count(const struct zr_loading *l, const struct layer_count *c)
{
    return count_of(l->was[c->tensor], &l->z->whole.tensors[c->tensor], c->layer);
}

static void take_count(void *arg, int32_t unit, struct layer_count c)
{
    const struct zr_loading *l = arg;
    int64_t now = zr_engine_unit_step(l->z->engine, unit);
    zr_engine_set_unit_step(l->z->engine, unit, zr_max(now, saved_count(l, &c)));
}

struct mixed {
    const struct zr_loading *l;
    /* the first tensor whose count is not its unit's */
    struct layer_count first;
    int32_t unit, n;
    /* names and counts of all of them, or of as many as there is room for */
    char list[300];
};

static void list_mixed(struct mixed *m, const struct layer_count *c)
{
    const struct zr_tensor *t = &m->l->z->whole.tensors[c->tensor];
    char layer[16] = "", text[120];
    size_t at = strlen(m->list), room = sizeof m->list - at;
    if (t->stacked)
        snprintf(layer, sizeof layer, "[%d]", c->layer);
    size_t n = (size_t)snprintf(text, sizeof text, "%s%.60s%s %lld", at ? ", " : "", t->name, layer,
                                (long long)c->t);
    bool fits = n + sizeof ", ..." <= room;
    if (fits || at < 5 || strcmp(m->list + at - 5, ", ...") != 0)
        snprintf(m->list + at, room, "%s", fits ? text : ", ...");
}

static void find_mixed(void *arg, int32_t unit, struct layer_count c)
{
    struct mixed *m = arg;
    c.t = saved_count(m->l, &c);
    if (c.t == zr_engine_unit_step(m->l->z->engine, unit))
        return;
    if (m->n++ == 0) {
        m->first = c;
        m->unit = unit;
    }
    list_mixed(m, &c);
}

/* Warns if tensors of a unit had different counts. The unit takes the largest. For the others its bias
 * correction is too small, because their states are young. */
static void report_mixed(const struct zr_loading *l)
{
    const struct zero_ctx *z = l->z;
    struct mixed m = {.l = l};
    for_layers(z, find_mixed, &m);
    /* Rank 0 knows only the units of its pipeline stage. */
    if (m.n && (z->world.rank == 0 || z->mesh.pp > 1))
        zr_warn(
            z->config.options.log,
            "%s: %lld steps have updated tensor %s, but its unit %d continues from step %lld, so the first "
            "updates of AdamW and Adam are larger than with fresh states (%d tensors or layers in all, and "
            "the steps that updated each: %s): put tensors that begin to train later into their own unit",
            l->folder, (long long)m.first.t, z->whole.tensors[m.first.tensor].name, m.unit,
            (long long)zr_engine_unit_step(z->engine, m.unit), m.n, m.list);
}

void zr_unit_steps_load(const struct zr_loading *l)
{
    for_layers(l->z, forget_count, l->z);
    for_layers(l->z, take_count, (void *)(uintptr_t)l);
    report_mixed(l);
}
