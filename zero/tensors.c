/* tensors.c: checks the model's tensor table field by field and copies it. */
#include "zero/context.h"

#include <stdlib.h>
#include <string.h>

#define KNOWN_FLAGS (ZERO_STACKED | ZERO_NO_DECAY | ZERO_GRAD_OVERWRITE | ZERO_RESIDENT)

static int bad(const struct zero_tensor *t, int32_t i, const char *what)
{
    return zr_fail(ZR_ERR_ARG, "tensors[%d] (%s): %s", i, t->name && *t->name ? t->name : "no name", what);
}

/* The product of the shape, or -1 with a message. */
static int64_t count_elems(const struct zero_tensor *t, int32_t i, int64_t elem_bytes)
{
    int64_t n = 1;
    int rank = 0;
    for (; rank < 8 && t->shape[rank]; rank++) {
        if (t->shape[rank] < 0) {
            zr_fail(ZR_ERR_ARG, "tensors[%d] (%s): shape[%d] is %lld; allowed: 1 and more, ended by 0", i, t->name, rank,
                    (long long)t->shape[rank]);
            return -1;
        }
        /* A quarter of the address space leaves room for padding and sums over tensors. */
        if (__builtin_mul_overflow(n, t->shape[rank], &n) || n > INT64_MAX / 4 / elem_bytes / 16) {
            zr_fail(ZR_ERR_ARG, "tensors[%d] (%s): shape overflows at shape[%d] = %lld", i, t->name, rank,
                    (long long)t->shape[rank]);
            return -1;
        }
    }
    if (rank == 0) {
        zr_fail(ZR_ERR_ARG, "tensors[%d] (%s): shape[0] is 0; a tensor has at least one dimension and one element", i, t->name);
        return -1;
    }
    return n;
}

static int check_one(const struct zero_tensor *t, int32_t i, bool for_plan, struct zr_tensor *out)
{
    if (!t->name || !*t->name)
        return bad(t, i, "name is NULL or empty; every tensor needs a unique name");
    if (!for_plan && !t->param)
        return bad(t, i, "param is NULL; it must be the address of the model's pointer");
    if (!for_plan && !*t->param)
        return bad(t, i, "*param is NULL; the parameters must be allocated and initialised before zero_wrap");
    if (t->dtype != ZERO_F32 && t->dtype != ZERO_BF16 && t->dtype != ZERO_F16)
        return zr_fail(ZR_ERR_ARG, "tensors[%d] (%s): dtype is %d; allowed: ZERO_F32, ZERO_BF16", i, t->name, (int)t->dtype);
    if (t->dtype == ZERO_F16 && !for_plan)
        return zr_fail(ZR_ERR_NOTSUP, "tensors[%d] (%s): dtype f16 has no kernels on the host; allowed: ZERO_F32, ZERO_BF16", i,
                       t->name);
    if (t->flags & ~(uint32_t)KNOWN_FLAGS)
        return zr_fail(ZR_ERR_ARG, "tensors[%d] (%s): flags has unknown bits 0x%x", i, t->name, t->flags & ~(uint32_t)KNOWN_FLAGS);
    if (t->unit < 0)
        return zr_fail(ZR_ERR_ARG, "tensors[%d] (%s): unit is %d; allowed: 0 and more", i, t->name, t->unit);
    int64_t n = count_elems(t, i, zr_dtype_bytes((enum zr_dtype)t->dtype));
    if (n < 0)
        return ZR_ERR_ARG;
    bool stacked = t->flags & ZERO_STACKED;
    if (stacked && (t->shape[0] > 1 << 20 || t->unit > INT32_MAX - t->shape[0]))
        return zr_fail(ZR_ERR_ARG, "tensors[%d] (%s): shape[0] is %lld layers; allowed for ZERO_STACKED: 1..%d", i, t->name,
                       (long long)t->shape[0], 1 << 20);
    *out = (struct zr_tensor){.param = t->param,
                              .grad = t->grad,
                              .dtype = (enum zr_dtype)t->dtype,
                              .n_elems = n,
                              .n_slices = stacked ? t->shape[0] : 1,
                              .unit = t->unit,
                              .stacked = stacked,
                              .no_decay = t->flags & ZERO_NO_DECAY,
                              .overwrite = t->flags & ZERO_GRAD_OVERWRITE,
                              .resident = t->flags & ZERO_RESIDENT};
    out->name = strdup(t->name);
    return out->name ? 0 : zr_fail(ZR_ERR_NOMEM, "no memory for the name of tensors[%d]", i);
}

static int by_name(const void *a, const void *b)
{
    return strcmp((*(struct zr_tensor *const *)a)->name, (*(struct zr_tensor *const *)b)->name);
}

/* The same model pointer in two tensors would be re-pointed twice. */
static int by_param(const void *a, const void *b)
{
    uintptr_t x = (uintptr_t)(*(struct zr_tensor *const *)a)->param, y = (uintptr_t)(*(struct zr_tensor *const *)b)->param;
    return (x > y) - (x < y);
}

static int check_unique(struct zr_tensor *t, int32_t n, bool for_plan)
{
    struct zr_tensor **sorted = malloc((size_t)n * sizeof *sorted);
    if (!sorted)
        return zr_fail(ZR_ERR_NOMEM, "no memory to check %d tensors", n);
    int err = 0;
    for (int32_t i = 0; i < n; i++)
        sorted[i] = &t[i];
    qsort(sorted, (size_t)n, sizeof *sorted, by_name);
    for (int32_t i = 1; !err && i < n; i++)
        if (!strcmp(sorted[i]->name, sorted[i - 1]->name))
            err = zr_fail(ZR_ERR_ARG, "tensors[%d] and tensors[%d] are both named %s; names must be unique",
                          (int)zr_min(sorted[i - 1] - t, sorted[i] - t), (int)zr_max(sorted[i - 1] - t, sorted[i] - t),
                          sorted[i]->name);
    if (!for_plan)
        qsort(sorted, (size_t)n, sizeof *sorted, by_param);
    for (int32_t i = 1; !err && !for_plan && i < n; i++)
        if (sorted[i]->param == sorted[i - 1]->param)
            err = zr_fail(ZR_ERR_ARG, "tensors %s and %s have the same param; one pointer of the model is one tensor",
                          sorted[i - 1]->name, sorted[i]->name);
    free(sorted);
    return err;
}

int zr_tensors_check(const struct zero_tensor *tensors, int32_t n, bool for_plan, struct zr_tensor **out)
{
    if (!tensors)
        return zr_fail(ZR_ERR_ARG, "tensors is NULL");
    if (n < 1)
        return zr_fail(ZR_ERR_ARG, "n_tensors is %d; allowed: 1 and more", n);
    struct zr_tensor *t = calloc((size_t)n, sizeof *t);
    if (!t)
        return zr_fail(ZR_ERR_NOMEM, "no memory for %d tensors", n);
    int err = 0;
    int64_t slices = 0;
    for (int32_t i = 0; !err && i < n; i++) {
        err = check_one(&tensors[i], i, for_plan, &t[i]);
        slices += t[i].n_slices;
    }
    if (!err && slices > INT32_MAX / 2)
        err = zr_fail(ZR_ERR_ARG, "the tensors have %lld layers together; allowed: %d", (long long)slices, INT32_MAX / 2);
    if (!err)
        err = check_unique(t, n, for_plan);
    if (err) {
        zr_tensors_free(t, n);
        return err;
    }
    *out = t;
    return 0;
}
