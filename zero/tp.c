/* SPDX-License-Identifier: Apache-2.0 */
/* tp.c: what a model that is cut over the tp axis puts around its products: the conjugate pairs, of whole
 * activations and of those whose rows are cut between products, and sums and maxima over the ranks that have
 * its parts. Without a mesh, or with tp 1, they move nothing between ranks,
 * so that a program need not ask. */
#include "zero/context.h"

#include <xxhash.h>

static bool overlap(const void *a, int64_t n_a, const void *b, int64_t n_b)
{
    uintptr_t x = (uintptr_t)a, y = (uintptr_t)b;
    return x > y ? x - y < (uintptr_t)n_b : y - x < (uintptr_t)n_a;
}

/* Gradients of weights cross no parts. */
static bool is_backward(enum zero_phase phase)
{
    return phase == ZERO_BACKWARD || phase == ZERO_BACKWARD_INPUT;
}

/* All but where dst and src lie. */
static int check_moved(struct zero_ctx *z, const char *call, const void *dst, const void *src, int64_t n,
                       int32_t dtype, enum zero_phase phase)
{
    if (!z)
        return zr_fail(ZR_ERR_ARG, "%s: z is NULL", call);
    int err = zr_engine_check(z->engine);
    if (err)
        return err;
    if (phase != ZERO_FORWARD && !is_backward(phase))
        return zr_fail(ZR_ERR_ARG,
                       "%s: phase is %d; allowed: ZERO_FORWARD, ZERO_BACKWARD, ZERO_BACKWARD_INPUT", call,
                       (int)phase);
    if (dtype != ZERO_F32 && dtype != ZERO_BF16)
        return zr_fail(ZR_ERR_ARG, "%s: dtype is %d; allowed: ZERO_F32, ZERO_BF16", call, dtype);
    if (n < 0 || n > INT64_MAX / (int64_t)sizeof(float) || (n && (!dst || !src)))
        return zr_fail(ZR_ERR_ARG,
                       "%s: n is %lld, dst is %s, src is %s; allowed: 0 to 2^61 - 1, and not NULL", call,
                       (long long)n, dst ? "set" : "NULL", src ? "set" : "NULL");
    return 0;
}

static int check_pair(struct zero_ctx *z, const char *call, const void *dst, const void *src, int64_t n,
                      int32_t dtype, enum zero_phase phase)
{
    int err = check_moved(z, call, dst, src, n, dtype, phase);
    if (err)
        return err;
    int64_t bytes = n * zr_dtype_bytes((enum zr_dtype)dtype);
    if (dst != src && overlap(dst, bytes, src, bytes))
        return zr_fail(ZR_ERR_ARG, "%s: dst and src share memory; allowed: the same, or apart", call);
    return 0;
}

/* Of n elements and a rank's part of them: the part is that of the whole, or both lie apart. */
static int check_part(struct zero_ctx *z, const char *call, const void *dst, const void *src, int64_t n,
                      int32_t dtype, enum zero_phase phase, bool gathers)
{
    int err = check_moved(z, call, dst, src, n, dtype, phase);
    if (err)
        return err;
    if (n % z->mesh.parts)
        return zr_fail(ZR_ERR_ARG, "%s: n is %lld; allowed: a multiple of tp, which is %d", call,
                       (long long)n, z->mesh.parts);
    int64_t bytes = n * zr_dtype_bytes((enum zr_dtype)dtype), of_part = bytes / z->mesh.parts;
    const char *whole = gathers ? dst : src, *part = gathers ? src : dst;
    uintptr_t own = (uintptr_t)whole + (uintptr_t)(z->world.rank % z->mesh.parts * of_part);
    if ((uintptr_t)part != own && overlap(whole, bytes, part, of_part))
        return zr_fail(ZR_ERR_ARG,
                       "%s: dst and src share memory; allowed: apart, or the part where rank %d of tp has it "
                       "in the whole",
                       call, z->world.rank % z->mesh.parts);
    return 0;
}

/* What ranks compare: of calls that move nothing, too. how: whether it sums, or the operation. */
static void say(struct zero_ctx *z, enum zr_called_name call, int64_t n, int32_t dtype, int32_t how)
{
    const int64_t said[] = {call, n, dtype, how};
    uint64_t hash = XXH3_64bits(said, sizeof said);
    zr_engine_parts_called(z->engine, hash);
    zr_engine_called(z->engine, call, -1, hash);
}

/* An activation is whole, the same on all ranks of tp, or partial, a contribution of each, or a part of it.
 * cfg.debug.check looks at the bits: what is taken for whole must be, and what is added up is most likely
 * not. */
static int compare(struct zero_ctx *z, enum zr_called_name call, const void *src, int64_t n, int32_t dtype,
                   enum zero_phase phase, bool whole)
{
    return zr_engine_compare_activation(z->engine, call, is_backward(phase), src, n, (enum zr_dtype)dtype,
                                        whole);
}

static int move(struct zero_ctx *z, enum zr_called_name call, void *dst, const void *src, int64_t n,
                int32_t dtype, enum zero_phase phase, bool sums)
{
    say(z, call, n, dtype, sums);
    int err = compare(z, call, src, n, dtype, phase, !sums);
    if (err)
        return err;
    if (sums && z->mesh.parts > 1)
        return zr_engine_sum_parts(z->engine, call, dst, src, n, (enum zr_dtype)dtype);
    return zr_engine_copy(z->engine, dst, src, n * zr_dtype_bytes((enum zr_dtype)dtype));
}

int zero_tp_enter(zero_ctx *z, void *dst, const void *src, int64_t n, int32_t dtype, enum zero_phase phase)
{
    ZR_IN_CALL(z, ZR_CALLED_TP_ENTER, is_backward(phase), -1);
    int err = check_pair(z, "zero_tp_enter", dst, src, n, dtype, phase);
    return err ? err : move(z, ZR_CALLED_TP_ENTER, dst, src, n, dtype, phase, is_backward(phase));
}

int zero_tp_leave(zero_ctx *z, void *dst, const void *src, int64_t n, int32_t dtype, enum zero_phase phase)
{
    ZR_IN_CALL(z, ZR_CALLED_TP_LEAVE, is_backward(phase), -1);
    int err = check_pair(z, "zero_tp_leave", dst, src, n, dtype, phase);
    return err ? err : move(z, ZR_CALLED_TP_LEAVE, dst, src, n, dtype, phase, phase == ZERO_FORWARD);
}

/* gathers: n elements of the parts, else each rank's part of their sum. */
static int move_parts(struct zero_ctx *z, enum zr_called_name call, void *dst, const void *src, int64_t n,
                      int32_t dtype, enum zero_phase phase, bool gathers)
{
    say(z, call, n, dtype, gathers);
    int err = gathers ? 0 : compare(z, call, src, n, dtype, phase, false);
    if (err)
        return err;
    if (z->mesh.parts == 1)
        return zr_engine_copy(z->engine, dst, src, n * zr_dtype_bytes((enum zr_dtype)dtype));
    return gathers ? zr_engine_gather_parts(z->engine, call, dst, src, n, (enum zr_dtype)dtype)
                   : zr_engine_scatter_parts(z->engine, call, dst, src, n, (enum zr_dtype)dtype);
}

int zero_tp_gather(zero_ctx *z, void *dst, const void *src, int64_t n, int32_t dtype, enum zero_phase phase)
{
    ZR_IN_CALL(z, ZR_CALLED_TP_GATHER, is_backward(phase), -1);
    bool gathers = phase == ZERO_FORWARD;
    int err = check_part(z, "zero_tp_gather", dst, src, n, dtype, phase, gathers);
    return err ? err : move_parts(z, ZR_CALLED_TP_GATHER, dst, src, n, dtype, phase, gathers);
}

int zero_tp_scatter(zero_ctx *z, void *dst, const void *src, int64_t n, int32_t dtype, enum zero_phase phase)
{
    ZR_IN_CALL(z, ZR_CALLED_TP_SCATTER, is_backward(phase), -1);
    bool gathers = is_backward(phase);
    int err = check_part(z, "zero_tp_scatter", dst, src, n, dtype, phase, gathers);
    return err ? err : move_parts(z, ZR_CALLED_TP_SCATTER, dst, src, n, dtype, phase, gathers);
}

int zero_tp_reduce(zero_ctx *z, float *x, int64_t n, int32_t op)
{
    ZR_IN_CALL(z, op == ZERO_TP_MAX ? ZR_CALLED_TP_MAX : ZR_CALLED_TP_SUM, false, -1);
    int err = check_pair(z, "zero_tp_reduce", x, x, n, ZERO_F32, ZERO_FORWARD);
    if (err)
        return err;
    if (op != ZERO_TP_SUM && op != ZERO_TP_MAX)
        return zr_fail(ZR_ERR_ARG, "zero_tp_reduce: op is %d; allowed: ZERO_TP_SUM, ZERO_TP_MAX", op);
    enum zr_called_name call = op == ZERO_TP_MAX ? ZR_CALLED_TP_MAX : ZR_CALLED_TP_SUM;
    say(z, call, n, ZERO_F32, op);
    if (z->mesh.parts == 1)
        return 0;
    return op == ZERO_TP_MAX ? zr_engine_most_of_parts(z->engine, call, x, n)
                             : zr_engine_sum_parts(z->engine, call, x, x, n, ZR_F32);
}
