/* SPDX-License-Identifier: Apache-2.0 */
/* rounding.c: the noise for rounding at random. It depends on the seed, the step, the tensor's name, and the
 * number of an element in the whole tensor. None of these depends on how tensors and layers are cut, so all
 * layouts give the same bits. */
#include "shard/engine/issue.h"
#include "shard/tp_cut.h"

#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

int zr_rounding_open(struct zr_engine *e)
{
    ZR_TABLE(e, e->first_layer, e->layout->n_tensors);
    return 0;
}

void zr_engine_set_first(struct zr_engine *e, int32_t tensor, int64_t first)
{
    const struct zr_tensor *t = &e->layout->tensors[tensor];
    e->first_layer[tensor] = t->buffer ? 0 : first / (t->n_elems / t->n_layers);
}

/* The numbers of each layer's elements begin at a multiple of ZR_Q8_BLOCK, as updates of 8-bit states
 * need. */
struct zr_rounding zr_rounding_from(const struct zr_engine *e, const struct zr_piece *p, int64_t at,
                                    int64_t step)
{
    const struct zr_tensor *t = &e->layout->tensors[p->tensor];
    const struct zr_tp_cut cut = zr_tp_of_tensor(t, e->tp);
    const int64_t layer_elems = zr_round_up(zr_tp_whole_elems(&cut) / t->n_layers, ZR_Q8_BLOCK);
    struct zr_rounding r = {.first = (e->first_layer[p->tensor] + p->layer) * layer_elems};
    zr_rounding_key(r.key, (uint64_t)e->opt.seed, (uint64_t)step, XXH3_64bits(t->name, strlen(t->name)));
    if (cut.parts == 1) {
        r.first += at;
        return r;
    }
    const int64_t run = zr_tp_run_elems(&cut), stride = zr_tp_run_stride(&cut);
    r.run = run;
    r.skip = stride - run;
    r.at = at % run;
    r.first += at / run * stride + e->tp_rank * run + r.at;
    return r;
}
