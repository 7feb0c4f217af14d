/* SPDX-License-Identifier: Apache-2.0 */
/* save_manifest.c: what the manifest of a save says of the model, before anything is written. */
#include "zero/checkpoint/save_inside.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

/* A hash of the settings that change what is computed; stage, world and the like do not. */
static uint64_t config_hash(const struct zr_options *o)
{
    double v[] = {
        (double)o->clip,      o->grad_scale, o->grad_sum, o->deterministic, (double)o->grad_accum_steps,
        (double)o->wire_dtype};
    return XXH64(v, sizeof v, XXH64(o->optim, (size_t)o->n_optims * sizeof *o->optim, 0));
}

/* Of one that is cut: the whole's shape, and into what. */
static void fill_cut(const struct zero_ctx *z, const struct zr_tensor *from, struct zr_manifest_tensor *t)
{
    const struct zr_tp_cut cut = zr_tp_of_tensor(from, z->mesh.parts);
    if (cut.parts == 1)
        return;
    t->parts = cut.parts;
    t->dim = from->cut_dim;
    t->blocks = (int32_t)cut.blocks;
    t->rows = cut.each;
    t->shape[t->dim] = cut.rows;
}

int zr_save_fill_manifest(struct zero_ctx *z, struct zr_manifest *m)
{
    const struct zr_whole *l = &z->whole;
    const struct zr_options *o = &z->config.options;
    struct zr_engine_facts facts;
    zr_engine_facts(z->engine, &facts);
    *m = (struct zr_manifest){.t = facts.t,
                              .n_skipped = facts.n_skipped,
                              .n_micro = z->n_micro,
                              .world = z->world.world,
                              .stage = o->stage,
                              .config_hash = config_hash(o),
                              .layout_hash = l->hash};
    snprintf(m->version, sizeof m->version, "%s", zero_version());
    m->tensors = calloc((size_t)l->n, sizeof *m->tensors);
    m->files = calloc((size_t)m->world, sizeof *m->files);
    bool ok = m->tensors && m->files;
    for (int32_t i = 0; ok && i < l->n; i++, m->n_tensors++) {
        struct zr_manifest_tensor *t = &m->tensors[i];
        t->name = strdup(l->tensors[i].name);
        snprintf(t->dtype, sizeof t->dtype, "%s", zr_kind_dtype(&l->tensors[i], ZR_VALUE_PARAM));
        t->n_dims = zr_tensor_dims(&l->tensors[i]);
        memcpy(t->shape, l->tensors[i].shape, sizeof t->shape);
        t->trainable = l->tensors[i].grad != NULL;
        if (t->trainable) {
            snprintf(t->optimizer, sizeof t->optimizer, "%s", zr_optimizer_name(l->tensors[i].optimizer));
            t->n_states = l->tensors[i].n_states;
        }
        t->buffer = l->tensors[i].buffer;
        fill_cut(z, &l->tensors[i], t);
        ok = t->name != NULL;
    }
    for (int32_t r = 0; ok && r < m->world; r++, m->n_files++)
        zr_shard_name(r, m->world, m->files[r].name);
    return ok ? 0 : zr_fail(ZR_ERR_NOMEM, "no memory for a manifest of %d tensors", l->n);
}
