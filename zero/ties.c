/* SPDX-License-Identifier: Apache-2.0 */
/* ties.c: tensors that the first and the last pipeline stage share (ZERO_TIED). It decides which stage owns
 * each one, and hashes what must be equal on both. */
#include "zero/context.h"

#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

/* Checks tensor number i of the table, which has the flag ZERO_TIED. */
static int check_tied(const struct zr_config *c, const struct zr_tensor *t, int32_t i)
{
    const struct zr_options *o = &c->options;
    int32_t stage = t->pp_stage * o->pp + c->place.pp, last = c->user.pipeline.stages_per_rank * o->pp - 1;
    if (stage > 0 && stage < last)
        return zr_fail(ZERO_ERR_NOTSUP,
                       "tensors[%d] (%s): ZERO_TIED on pipeline stage %d; allowed: on the first (0) and the "
                       "last (%d), which both have it",
                       i, t->name, stage, last);
    if (c->place.pp == 0 && t->overwrite)
        return zr_fail(ZERO_ERR_ARG,
                       "tensors[%d] (%s): ZERO_GRAD_OVERWRITE with ZERO_TIED on the first pipeline stage, "
                       "where backward adds to the last stage's gradient; allowed: one of the two flags",
                       i, t->name);
    if (t->grad && o->grad_in_place && o->grad_accum_steps > 1)
        return zr_fail(
            ZERO_ERR_NOTSUP,
            "tensors[%d] (%s): ZERO_TIED with grad_in_place 1 and grad_accum_steps %d; allowed: "
            "grad_in_place 0, because the first stage's backward starts from the last stage's gradient",
            i, t->name, o->grad_accum_steps);
    return 0;
}

int zr_ties_take(const struct zr_config *c, struct zr_tensor *t, int32_t n)
{
    for (int32_t i = 0; i < n; i++) {
        if (t[i].tie == ZR_TIE_NONE)
            continue;
        t[i].tie = ZR_TIE_NONE; /* until it is known that there are two stages to tie */
        if (c->options.pp < 2 && c->user.pipeline.stages_per_rank > 1)
            return zr_fail(ZERO_ERR_NOTSUP,
                           "tensors[%d] (%s): ZERO_TIED with pp 1 and stages_per_rank %d, so this rank has "
                           "both the first and the last stage; allowed: stages_per_rank 1",
                           i, t[i].name, c->user.pipeline.stages_per_rank);
        if (c->options.pp < 2) /* Without a pipeline one tensor has both uses. */
            continue;
        ZR_TRY(check_tied(c, &t[i], i));
        t[i].tie = c->place.pp == 0 ? ZR_TIE_OWNER : ZR_TIE_COPY;
        if (t[i].tie == ZR_TIE_COPY) {
            t[i].tied_grad = t[i].grad;
            t[i].grad = NULL;
        }
    }
    return 0;
}

int64_t zr_ties_bytes(const struct zr_layout *l)
{
    int64_t bytes = 0;
    for (int32_t i = 0; i < l->n_tensors; i++)
        if (l->tensors[i].tie != ZR_TIE_NONE)
            bytes += zr_tied_bytes(&l->tensors[i]);
    return bytes;
}

int64_t zr_ties_sum_bytes(const struct zr_layout *l)
{
    int64_t bytes = 0;
    for (int32_t i = 0; i < l->n_tensors; i++)
        if (l->tensors[i].tie != ZR_TIE_NONE)
            bytes += zr_tied_sum_bytes(&l->tensors[i]);
    return bytes;
}

uint64_t zr_ties_hash(const struct zr_layout *l)
{
    uint64_t hash = 0;
    for (int32_t i = 0; i < l->n_tensors; i++) {
        const struct zr_tensor *t = &l->tensors[i];
        const int64_t words[] = {t->dtype,    t->cut,
                                 t->cut_dim,  t->cut_blocks,
                                 t->cut_size, (t->tie == ZR_TIE_COPY ? t->tied_grad : t->grad) != NULL,
                                 t->partial,  t->given_whole};
        if (t->tie == ZR_TIE_NONE)
            continue;
        hash = XXH64(words, sizeof words, XXH64(t->shape, sizeof t->shape, hash));
        hash = XXH64(t->name, strlen(t->name), hash);
    }
    return hash;
}
