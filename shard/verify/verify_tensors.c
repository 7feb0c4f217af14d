/* SPDX-License-Identifier: Apache-2.0 */
/* verify_tensors.c: draws the tensors of one pipeline stage of a case: sizes, data types, optimizers,
 * granules, and how tensor parallelism splits them. */
#include "kernels/alloc.h"
#include "shard/verify/verify_world.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int64_t any_size(uint64_t *s)
{
    static const int64_t sizes[] = {1, 15, 17, 31, 32, 33, 63, 64, 100, 127, 128, 129, 17 * 257, 8100};
    return zr_verify_chance(s, 30) ? 1 + zr_verify_below(s, 3000)
                                   : sizes[zr_verify_below(s, sizeof sizes / sizeof *sizes)];
}

static void name_tensor(struct zr_tensor *t, int32_t i)
{
    char name[16];
    snprintf(name, sizeof name, "t%d", i);
    t->name = strdup(name);
}

static void *nowhere;

/* ZR_OPTIMIZER_NONE: the optimizer of the case. Each kind of optimizer has its own group. */
static void set_optimizer(const struct zr_verify_case *c, enum zero_optimizer kind, struct zr_tensor *t)
{
    if (!kind && !c->user_update)
        kind = c->sgd ? ZERO_SGD : ZERO_ADAMW;
    t->optimizer = kind;
    t->group = kind;
    t->n_states = kind ? zr_optimizer_states(kind, zr_optimizer_kind(kind)->beta1) : 2;
}

/* A layer has one dimension, which tensor parallelism cuts into equal parts. */
static void set_shape(struct zr_tensor *t)
{
    int d = 0;
    if (t->stacked)
        t->shape[d++] = t->n_layers;
    t->shape[d] = t->n_elems / t->n_layers;
    t->cut_dim = d;
    t->cut_blocks = 1;
}

/* Chooses in how many bytes the tensor's masters, states and gradient sum are kept, as zero_wrap does. Blocks
 * of codes may not cross from one tensor-parallel rank to the next. */
static void set_precision(const struct zr_verify_case *c, struct zr_tensor *t)
{
    const bool bf16 = t->dtype == ZERO_BF16, fp32 = c->mixed && t->group % 2;
    const bool whole_blocks = !t->cut || t->n_elems / t->n_layers % ZR_Q8_BLOCK == 0;
    t->sum_dtype = bf16 && c->sums_bf16 ? ZERO_BF16 : ZERO_F32;
    t->masters = bf16 && !fp32 ? (enum zero_masters)c->masters : ZERO_MASTERS_F32;
    t->moments = fp32                                             ? ZERO_MOMENTS_F32
                 : c->moments == ZERO_MOMENTS_Q8 && !whole_blocks ? ZERO_MOMENTS_BF16
                                                                  : (enum zero_moments)c->moments;
}

/* A tied tensor. Both pipeline stages draw it from the same state, so they agree. */
static int tied_tensor(const struct zr_verify_case *c, bool owner, int32_t unit, struct zr_tensor *out)
{
    uint64_t s = c->seed ^ 0x71ed;
    struct zr_tensor t = {.name = strdup("tied"),
                          .param = &nowhere,
                          .n_layers = 1,
                          .unit = unit,
                          .resident = true,
                          .tie = owner ? ZR_TIE_OWNER : ZR_TIE_COPY};
    t.n_elems = any_size(&s);
    t.dtype = c->bf16 && zr_verify_chance(&s, 50) ? ZERO_BF16 : ZERO_F32;
    bool frozen = zr_verify_chance(&s, c->frozen);
    *(owner ? &t.grad : &t.tied_grad) = frozen ? NULL : &nowhere;
    t.partial = c->tp > 1 && zr_verify_chance(&s, c->partial);
    t.cut = c->tp > 1 && !t.partial && zr_verify_chance(&s, 60);
    t.granule = zr_min(c->granule, t.n_elems);
    set_optimizer(c, ZR_OPTIMIZER_NONE, &t);
    set_shape(&t);
    set_precision(c, &t);
    *out = t;
    return t.name ? 0 : zr_fail(ZERO_ERR_NOMEM, "no memory for a name");
}

/* The unit of a pipeline stage that is a tied tensor, or -1. */
static int32_t tied_unit(const struct zr_verify_case *c, int32_t stage, int32_t n_units)
{
    bool first = stage == 0, last = stage == zr_case_stages(c) - 1;
    return !c->tied || (!first && !last) ? -1 : first ? 0 : n_units - 1;
}

/* Decides whether a tensor is split over the tensor-parallel ranks. The tensors of a unit that are not split
 * have partial gradients either all or not at all. */
static void place_on_tp_ranks(const struct zr_verify_case *c, uint64_t *s, bool partial, struct zr_tensor *t)
{
    if (c->tp < 2)
        return;
    t->cut = t->stacked || zr_verify_chance(s, 60);
    t->partial = !t->cut && partial;
}

int32_t zr_verify_used_twice(const struct zr_verify_case *c, int32_t n_units)
{
    return c->pattern != ZR_USE_TWICE ? -1 : c->reversed ? n_units - 1 : 0;
}

/* The tensors of a rank so far. */
struct table {
    const struct zr_verify_case *c;
    const struct zr_verify_speed *speed;
    struct zr_tensor *t;
    int32_t n;
};

/* Adds the tensors of a stage of the whole pipeline. It is number `own` on its rank, and its units begin at
 * first_unit. */
static int add_stage(struct table *to, int32_t stage, int32_t own, int32_t first_unit)
{
    const struct zr_verify_case *c = to->c;
    const struct zr_verify_speed *speed = to->speed;
    uint64_t s = c->seed ^ 0x7e45 ^ (uint64_t)stage << 40, tp_random = s + 1;
    int32_t n_units = zr_stage_units(c, stage), tied = tied_unit(c, stage, n_units);
    /* One tensor spans several units if c->stacked. Each unit also has one to three tensors. */
    int32_t first = c->stacked ? (int32_t)zr_verify_below(&s, n_units) : 0;
    for (int32_t u = c->stacked ? -1 : 0; u < n_units; u++) {
        int32_t k = u < 0 || speed ? 1 : 1 + (int32_t)zr_verify_below(&s, 3);
        bool partial = c->tp > 1 && zr_verify_chance(&tp_random, c->partial);
        if (u >= 0 && u == tied) {
            struct zr_tensor *x = &to->t[to->n++];
            int err = tied_tensor(c, stage == 0, first_unit + u, x);
            x->pp_stage = own;
            if (err)
                return err;
            continue;
        }
        for (; k > 0; k--, to->n++) {
            struct zr_tensor *x = &to->t[to->n];
            *x = (struct zr_tensor){.param = &nowhere,
                                    .grad = &nowhere,
                                    .dtype = ZERO_F32,
                                    .n_layers = 1,
                                    .unit = first_unit + (u < 0 ? first : u),
                                    .pp_stage = own};
            x->n_elems = !speed         ? any_size(&s)
                         : speed->units ? speed->units[zr_max(u, 0)].elems
                                        : speed->unit_elems;
            name_tensor(x, to->n);
            if (!x->name)
                return zr_fail(ZERO_ERR_NOMEM, "no memory for a name");
            if (u < 0) {
                x->stacked = x->pointer_per_begin = true;
                x->n_layers = n_units - first;
                x->n_elems *= x->n_layers;
            }
            if (c->bf16 && (speed || zr_verify_chance(&s, 50)))
                x->dtype = ZERO_BF16;
            if (zr_verify_chance(&s, c->frozen))
                x->grad = NULL;
            x->no_decay = zr_verify_chance(&s, 30);
            set_optimizer(c, /* mixed: several kinds, some without state */
                          c->mixed
                              ? (enum zero_optimizer)((c->seed + (uint64_t)to->n * 7) % ZR_OPTIMIZER_COUNT)
                              : ZR_OPTIMIZER_NONE,
                          x);
            /* Overwriting is allowed only if the model writes each gradient once before it hands it in. */
            bool often =
                c->pattern == ZR_USE_TIED || (c->unbracketed && (c->pattern == ZR_USE_TWICE || c->skipped));
            x->overwrite = c->overwrite && !often && zr_verify_chance(&s, 50);
            /* A declared order already contains the second use. */
            if (u >= 0 && !c->declared && u == zr_verify_used_twice(c, n_units))
                x->uses = 2;
            x->resident = (c->resident && zr_verify_chance(&s, 30)) ||
                          (speed && speed->units && speed->units[zr_max(u, 0)].resident);
            x->granule = zr_min(c->granule, x->n_elems / x->n_layers);
            place_on_tp_ranks(c, &tp_random, partial, x);
            set_shape(x);
            set_precision(c, x);
        }
    }
    return 0;
}

int zr_script_tensors(const struct zr_verify_case *c, int32_t at, const struct zr_verify_speed *speed,
                      struct zr_tensor **out, int32_t *n)
{
    struct table to = {.c = c, .speed = speed};
    int32_t n_units = 0, pp = zr_case_pp(c);
    for (int32_t k = 0; k < zr_case_per_rank(c); k++)
        n_units += zr_stage_units(c, k * pp + at);
    int err = ZR_ZALLOC(to.t, 3 * (int64_t)n_units + ZR_VERIFY_PER_RANK, "the tensors of %d units", n_units);
    for (int32_t k = 0, unit = 0; !err && k < zr_case_per_rank(c); k++) {
        err = add_stage(&to, k * pp + at, k, unit);
        unit += zr_stage_units(c, k * pp + at);
    }
    if (err && to.t)
        zr_tensors_free(to.t, to.n);
    *out = to.t;
    *n = to.n;
    return err;
}
