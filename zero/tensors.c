/* SPDX-License-Identifier: Apache-2.0 */
/* tensors.c: checks the model's tensor table field by field and copies it. */
#include "kernels/alloc.h"
#include "shard/tp_cut.h"
#include "zero/context.h"

#include <stdlib.h>
#include <string.h>

#define KNOWN_FLAGS                                                                                          \
    (ZERO_STACKED | ZERO_NO_DECAY | ZERO_GRAD_OVERWRITE | ZERO_RESIDENT | ZERO_POINTER_PER_BEGIN |           \
     ZERO_BUFFER | ZERO_TIED | ZERO_TP_PARTIAL | ZERO_WHOLE)

/* The most elements of all tensors together. Then no sum of bytes over states, gradient sums, ranks and
 * padding overflows int64_t, and tables over units need only 32-bit offsets. */
#define MAX_ELEMS  (INT64_C(1) << 48)
#define MAX_LAYERS (1 << 24)
#define MAX_USES   1000

static int bad(const struct zero_tensor *t, int32_t i, const char *what)
{
    return zr_fail(ZERO_ERR_ARG, "tensors[%d] (%s): %s", i, t->name && *t->name ? t->name : "no name", what);
}

/* Returns the product of the shape, or -1 with a message. */
static int64_t count_elems(const struct zero_tensor *t, int32_t i)
{
    int64_t n = 1;
    int rank = 0;
    for (; rank < 8 && t->shape[rank]; rank++) {
        if (t->shape[rank] < 0) {
            zr_fail(ZERO_ERR_ARG, "tensors[%d] (%s): shape[%d] is %lld; allowed: 1 and more, ended by 0", i,
                    t->name, rank, (long long)t->shape[rank]);
            return -1;
        }
        if (__builtin_mul_overflow(n, t->shape[rank], &n) || n > MAX_ELEMS) {
            zr_fail(ZERO_ERR_ARG,
                    "tensors[%d] (%s): shape overflows at shape[%d] = %lld; allowed: %lld elements in all", i,
                    t->name, rank, (long long)t->shape[rank], (long long)MAX_ELEMS);
            return -1;
        }
    }
    if (rank == 0) {
        zr_fail(ZERO_ERR_ARG,
                "tensors[%d] (%s): shape[0] is 0; a tensor has at least one dimension and one element", i,
                t->name);
        return -1;
    }
    return n;
}

/* n: elements of the tensor, or of one layer. */
static int check_granule(const struct zero_tensor *t, int32_t i, int64_t n)
{
    if (t->granule >= 0 && t->granule <= n)
        return 0;
    return zr_fail(ZERO_ERR_ARG, "tensors[%d] (%s): granule is %lld; allowed: 0..%lld, the elements of %s", i,
                   t->name, (long long)t->granule, (long long)n,
                   t->flags & ZERO_STACKED ? "a layer" : "the tensor");
}

/* Checks how the tensor is cut over tp. */
static int check_cut(const struct zero_tensor *t, int32_t i)
{
    int32_t n_dims = 0, d = t->tp_cut - 1;
    while (n_dims < 8 && t->shape[n_dims])
        n_dims++;
    if (t->tp_cut == 0)
        return t->tp_blocks == 0 && t->tp_size == 0
                   ? 0
                   : bad(t, i, "tp_blocks or tp_size is set, but tp_cut is 0; allowed: both 0");
    bool stacked = t->flags & ZERO_STACKED;
    if (d < stacked || d >= n_dims)
        return zr_fail(ZERO_ERR_ARG,
                       "tensors[%d] (%s): tp_cut is %d; allowed: 0, or ZERO_TP_CUT(%d) to ZERO_TP_CUT(%d), a "
                       "dimension of %s",
                       i, t->name, t->tp_cut, (int)stacked, n_dims - 1, stacked ? "a layer" : "the tensor");
    if (t->tp_blocks < 0 || (t->tp_blocks > 1 && t->shape[d] % t->tp_blocks))
        return zr_fail(ZERO_ERR_ARG,
                       "tensors[%d] (%s): tp_blocks is %d; allowed: 0, or a number that divides the %lld of "
                       "dimension %d",
                       i, t->name, t->tp_blocks, (long long)t->shape[d], d);
    if (t->tp_size < 0 || (t->tp_size && (d > 0 || t->tp_blocks > 1 || stacked)))
        return zr_fail(ZERO_ERR_ARG,
                       "tensors[%d] (%s): tp_size is %lld; allowed: 0, or shape[0] of the whole tensor, if "
                       "it is cut along dimension 0, has one block and is not ZERO_STACKED",
                       i, t->name, (long long)t->tp_size);
    return 0;
}

static int check_buffer(const struct zero_tensor *t, int32_t i)
{
    if (t->grad)
        return bad(t, i, "grad is set, but a ZERO_BUFFER is not trained; allowed: NULL");
    if (t->flags & ~(uint32_t)ZERO_BUFFER)
        return zr_fail(
            ZERO_ERR_ARG,
            "tensors[%d] (%s): flags is 0x%x; allowed with ZERO_BUFFER: no other flag, as a buffer "
            "belongs to no unit and has no gradient",
            i, t->name, t->flags);
    if (t->group != 0)
        return bad(t, i, "group is set, but a ZERO_BUFFER is not trained; allowed: 0");
    if (t->granule != 0)
        return bad(t, i, "granule is set, but a ZERO_BUFFER is not cut; allowed: 0");
    if (t->tp_cut != 0)
        return bad(t, i, "tp_cut is set, but a ZERO_BUFFER is not cut; allowed: 0");
    if (t->uses != 0)
        return bad(t, i, "uses is set, but a ZERO_BUFFER belongs to no unit; allowed: 0");
    return 0;
}

/* Checks a tensor's dtype. */
static int check_dtype(const struct zero_tensor *t, int32_t i, bool for_plan)
{
    bool buffer = t->flags & ZERO_BUFFER;
    switch (t->dtype) {
    case ZERO_F32:
    case ZERO_BF16:
        return 0;
    case ZERO_F16:
        return for_plan ? 0
                        : zr_fail(ZERO_ERR_NOTSUP,
                                  "tensors[%d] (%s): dtype f16 can be planned, not trained: it has no "
                                  "kernels; allowed: ZERO_F32, "
                                  "ZERO_BF16",
                                  i, t->name);
    case ZERO_I32:
    case ZERO_I64:
        if (buffer)
            return 0;
        return zr_fail(
            ZERO_ERR_ARG,
            "tensors[%d] (%s): dtype is %s, which is for a ZERO_BUFFER; allowed: ZERO_F32, ZERO_BF16", i,
            t->name, t->dtype == ZERO_I32 ? "ZERO_I32" : "ZERO_I64");
    }
    return zr_fail(ZERO_ERR_ARG, "tensors[%d] (%s): dtype is %d; allowed: ZERO_F32, ZERO_BF16%s", i, t->name,
                   (int)t->dtype, buffer ? ", ZERO_I32, ZERO_I64" : "");
}

static int check_one(const struct zero_tensor *t, int32_t i, enum zr_values_in values, struct zr_tensor *out)
{
    bool for_plan = values == ZR_VALUES_UNSEEN;
    if (!t->name || !*t->name)
        return bad(t, i, "name is NULL or empty; every tensor needs a unique name");
    if (!for_plan && !t->param)
        return bad(t, i, "param is NULL; it must be the address of the model's pointer");
    bool buffer = t->flags & ZERO_BUFFER;
    if (!for_plan && buffer && !*t->param)
        return bad(t, i,
                   "*param is NULL; the memory of a ZERO_BUFFER is the model's, whatever cfg.init_from is");
    if (values == ZR_VALUES_IN_MODEL && !*t->param)
        return bad(t, i,
                   "*param is NULL; the parameters must be allocated and initialised before zero_wrap, or "
                   "cfg.init_from must say where their values come from");
    if (values == ZR_VALUES_IN_RANK0 && !*t->param)
        return bad(t, i,
                   "*param is NULL on rank 0, which must give the values (init_from is ZERO_INIT_RANK0)");
    ZR_TRY(check_dtype(t, i, for_plan));
    if (t->flags & ~(uint32_t)KNOWN_FLAGS)
        return zr_fail(ZERO_ERR_ARG,
                       "tensors[%d] (%s): flags is 0x%x with unknown bits 0x%x; allowed: those of 0x%x", i,
                       t->name, t->flags, t->flags & ~(uint32_t)KNOWN_FLAGS, KNOWN_FLAGS);
    if (buffer)
        ZR_TRY(check_buffer(t, i));
    if (t->unit < 0 && !buffer)
        return zr_fail(ZERO_ERR_ARG, "tensors[%d] (%s): unit is %d; allowed: 0 and more", i, t->name,
                       t->unit);
    if (t->uses < 0 || t->uses > MAX_USES)
        return zr_fail(ZERO_ERR_ARG, "tensors[%d] (%s): uses is %d; allowed: 0..%d", i, t->name, t->uses,
                       MAX_USES);
    int64_t n = count_elems(t, i);
    if (n < 0)
        return ZERO_ERR_ARG;
    bool stacked = t->flags & ZERO_STACKED;
    if (stacked && (t->shape[0] > 1 << 20 || t->unit > INT32_MAX - t->shape[0]))
        return zr_fail(ZERO_ERR_ARG,
                       "tensors[%d] (%s): shape[0] is %lld layers; allowed for ZERO_STACKED: 1..%d", i,
                       t->name, (long long)t->shape[0], 1 << 20);
    ZR_TRY(check_granule(t, i, stacked ? n / t->shape[0] : n));
    ZR_TRY(check_cut(t, i));
    if ((t->flags & ZERO_TP_PARTIAL) && t->tp_cut)
        return bad(t, i,
                   "ZERO_TP_PARTIAL with tp_cut; allowed: one of them, because each rank of tp has the "
                   "gradient of its own part of a cut tensor");
    if ((t->flags & ZERO_TIED) && (stacked || (t->flags & ZERO_POINTER_PER_BEGIN)))
        return bad(t, i, "ZERO_TIED with ZERO_STACKED or ZERO_POINTER_PER_BEGIN; allowed: without them");
    *out = (struct zr_tensor){.param = t->param,
                              .grad = t->grad,
                              .dtype = (enum zero_dtype)t->dtype,
                              .n_elems = n,
                              .n_layers = buffer    ? 0
                                          : stacked ? t->shape[0]
                                                    : 1,
                              .unit = buffer ? 0 : t->unit,
                              .pp_stage = t->pp_stage,
                              .uses = t->uses,
                              .buffer = buffer,
                              .stacked = stacked,
                              .group = t->group,
                              .no_decay = t->flags & ZERO_NO_DECAY,
                              .overwrite = t->flags & ZERO_GRAD_OVERWRITE,
                              .resident = t->flags & (ZERO_RESIDENT | ZERO_TIED),
                              .cut = t->tp_cut > 0,
                              .cut_dim = t->tp_cut > 0 ? t->tp_cut - 1 : 0,
                              .cut_blocks = t->tp_cut == 0 ? 0
                                            : t->tp_blocks ? t->tp_blocks
                                                           : 1,
                              .cut_size = t->tp_size,
                              .given_whole = (t->flags & ZERO_WHOLE) && t->tp_cut > 0,
                              .partial = t->flags & ZERO_TP_PARTIAL,
                              .tie = t->flags & ZERO_TIED ? ZR_TIE_OWNER : ZR_TIE_NONE,
                              .pointer_per_begin = t->flags & ZERO_POINTER_PER_BEGIN,
                              .granule = t->granule};
    for (int d = 0; d < 8 && t->shape[d]; d++)
        out->shape[d] = t->shape[d];
    out->name = strdup(t->name);
    return out->name ? 0 : zr_fail(ZERO_ERR_NOMEM, "no memory for the name of tensors[%d]", i);
}

static int by_name(const void *a, const void *b)
{
    const struct zr_tensor *x = *(struct zr_tensor *const *)a, *y = *(struct zr_tensor *const *)b;
    int order = strcmp(x->name, y->name);
    return order ? order : (x->pp_stage > y->pp_stage) - (x->pp_stage < y->pp_stage);
}

/* Whether two stacked tensors are one stack in two pipeline stages of this rank. */
static bool is_one_stack(const struct zr_tensor *a, const struct zr_tensor *b)
{
    return a->stacked && b->stacked && a->pp_stage != b->pp_stage;
}

static int check_names(const struct zr_tensor *t, int32_t n)
{
    const struct zr_tensor **sorted;
    ZR_TRY(ZR_ALLOC(sorted, n, "checking %d tensors", n));
    int err = 0;
    for (int32_t i = 0; i < n; i++)
        sorted[i] = &t[i];
    qsort(sorted, (size_t)n, sizeof *sorted, by_name);
    for (int32_t i = 1; !err && i < n; i++)
        if (!strcmp(sorted[i]->name, sorted[i - 1]->name) && !is_one_stack(sorted[i], sorted[i - 1]))
            err = zr_fail(ZERO_ERR_ARG, "tensors[%d] and tensors[%d] are both named %s; names must be unique",
                          (int)zr_min(sorted[i - 1] - t, sorted[i] - t),
                          (int)zr_max(sorted[i - 1] - t, sorted[i] - t), sorted[i]->name);
    free(sorted);
    return err;
}

/* A range of the model's memory: one of its pointers, or what param points to. */
struct range {
    uintptr_t at;
    uint64_t bytes;
    const char *tensor, *what;
};

static int by_place(const void *a, const void *b)
{
    const struct range *x = a, *y = b;
    return (x->at > y->at) - (x->at < y->at);
}

/* Finds the first two ranges that overlap. Sorts r. */
static bool find_overlap(struct range *r, size_t n, const struct range **one, const struct range **other)
{
    qsort(r, n, sizeof *r, by_place);
    const struct range *farthest = r;
    for (size_t i = 1; i < n; i++) {
        if (r[i].at - farthest->at < farthest->bytes) {
            *one = farthest;
            *other = &r[i];
            return true;
        }
        farthest = &r[i];
    }
    return false;
}

/* Checks that no two tensors share memory. A pointer in two tensors would be set twice. Two tensors over the
 * same weights, such as tied ones, would become separate parameters. If values come from elsewhere, *param is
 * not followed, and all may point to one placeholder. */
static int check_pointers(const struct zr_tensor *t, int32_t n, int32_t tp, enum zr_values_in values)
{
    struct range *r;
    const struct range *a, *b;
    size_t n_ranges = 0;
    int err = 0;
    ZR_TRY(ZR_ALLOC(r, 2 * (int64_t)n, "a check of %d tensors", n));
    for (int32_t i = 0; i < n; i++) {
        r[n_ranges++] = (struct range){(uintptr_t)t[i].param, sizeof(void *), t[i].name, "param"};
        if (t[i].grad)
            r[n_ranges++] = (struct range){(uintptr_t)t[i].grad, sizeof(void *), t[i].name, "grad"};
    }
    if (find_overlap(r, n_ranges, &a, &b))
        err = zr_fail(ZERO_ERR_ARG,
                      "%s of tensor %s and %s of tensor %s are the same pointer of the model; each needs its "
                      "own pointer",
                      a->what, a->tensor, b->what, b->tensor);
    n_ranges = 0;
    for (int32_t i = 0; i < n; i++) {
        const struct zr_tp_cut cut = zr_tp_of_tensor(&t[i], t[i].given_whole ? tp : 1);
        int64_t bytes = zr_tp_whole_elems(&cut) * zr_dtype_bytes(t[i].dtype);
        if (*t[i].param && (values != ZR_VALUES_ELSEWHERE || t[i].buffer))
            r[n_ranges++] = (struct range){(uintptr_t)*t[i].param, (uint64_t)bytes, t[i].name, "*param"};
    }
    if (!err && n_ranges && find_overlap(r, n_ranges, &a, &b))
        err = zr_fail(
            ZERO_ERR_ARG,
            "*param of tensors %s and %s share memory; tied weights are one tensor, under one pointer",
            a->tensor, b->tensor);
    free(r);
    return err;
}

static int refuse_none(int32_t n, const struct zero_config *cfg)
{
    if (n == 0 && cfg->mesh.pp > 1)
        return zr_fail(
            ZERO_ERR_ARG,
            "n_tensors is 0, with pp %d; allowed: 1 and more, so pp is at most the number of layers",
            cfg->mesh.pp);
    return zr_fail(ZERO_ERR_ARG, "n_tensors is %d; allowed: 1 and more", n);
}

int zr_tensors_check(const struct zero_tensor *tensors, int32_t n, const struct zero_config *cfg,
                     enum zr_values_in values, struct zr_tensor **out)
{
    if (!tensors)
        return zr_fail(ZERO_ERR_ARG, "tensors is NULL");
    if (n < 1)
        return refuse_none(n, cfg);
    struct zr_tensor *t;
    ZR_TRY(ZR_ZALLOC(t, n, "%d tensors", n));
    int64_t slices = 0, elems = 0;
    int err = 0;
    for (int32_t i = 0; !err && i < n; i++) {
        const struct zero_tensor *one = &tensors[i];
        err = check_one(one, i, values, &t[i]);
        if (!err && (one->pp_stage < 0 || one->pp_stage >= cfg->pipeline.stages_per_rank))
            err = zr_fail(ZERO_ERR_ARG,
                          "tensors[%d] (%s): pp_stage is %d; allowed: 0..%d (see stages_per_rank)", i,
                          t[i].name, one->pp_stage, cfg->pipeline.stages_per_rank - 1);
        if (!err && (one->group < 0 || one->group > cfg->n_optim_groups))
            err = zr_fail(ZERO_ERR_ARG, "tensors[%d] (%s): group is %d; allowed: 0..%d (see n_optim_groups)",
                          i, t[i].name, one->group, cfg->n_optim_groups);
        slices += t[i].n_layers;
        elems += t[i].n_elems;
        if (!err && elems > MAX_ELEMS)
            err =
                zr_fail(ZERO_ERR_ARG, "tensors[0] to tensors[%d] have %lld elements together; allowed: %lld",
                        i, (long long)elems, (long long)MAX_ELEMS);
    }
    if (!err && slices > MAX_LAYERS)
        err = zr_fail(ZERO_ERR_ARG, "the tensors have %lld layers together; allowed: %d", (long long)slices,
                      MAX_LAYERS);
    if (!err)
        err = check_names(t, n);
    if (!err && values != ZR_VALUES_UNSEEN)
        err = check_pointers(t, n, cfg->mesh.tp, values);
    if (err) {
        zr_tensors_free(t, n);
        return err;
    }
    *out = t;
    return 0;
}
