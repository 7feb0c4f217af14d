/* SPDX-License-Identifier: Apache-2.0 */
/* body_update.h: the optimizers' element-wise update, written once with the vector functions of a vec_*.h.
 *
 * host_portable.c, host_avx2.c and host_avx512.c include it after their vec_*.h. update_range is inlined for
 * each constant kind, variant and type of the parameter, so its loop has no branches. */
#include "kernels/host/update_element.h"

/* Prefetch distance in elements (1 KiB): about what is read during one memory latency. The CPU's own
 * prefetchers stop at the end of a page. */
enum { UPDATE_AHEAD = 256 };

ALWAYS_INLINE void update_prefetch(const struct zr_update *u, int64_t i, int n_read)
{
    if (VEC_LANES == 1)
        return; /* one prefetch per element would cost more than it saves */
    __builtin_prefetch(u->grad + i + UPDATE_AHEAD, 0);
    __builtin_prefetch(u->master + i + UPDATE_AHEAD, 1);
    for (int s = 0; s < n_read; s++)
        __builtin_prefetch(u->state[s] + i + UPDATE_AHEAD, 1);
}

/* Updates elements [0, n). n is a multiple of VEC_LANES. */
ALWAYS_INLINE void update_range(const struct zr_update *u, int64_t n, enum zero_optimizer kind,
                                enum update_variant variant, enum update_param out)
{
    const struct update_constants k = update_constants_of(u, u->scalars->grad_scale);
    const int n_read = update_n_read(kind, variant), n_written = update_n_written(kind, variant);
    float *master = u->master, *param = u->param;
    unsigned char *param_bf16 = u->param;
    const float *grad = u->grad;
    float *state0 = u->state[0], *state1 = u->state[1];

    for (int64_t i = 0; i < n; i += VEC_LANES) {
        update_prefetch(u, i, n_read);
        vec s0 = k.scale, s1 = k.scale; /* any value: a state that is not loaded here is only written */
        if (n_read > 0)
            s0 = vec_load(state0 + i);
        if (n_read > 1)
            s1 = vec_load(state1 + i);
        vec w = update_element(&k, kind, variant, vec_load(master + i), vec_load(grad + i), &s0, &s1);
        if (n_written > 0)
            vec_store(state0 + i, s0);
        if (n_written > 1)
            vec_store(state1 + i, s1);
        vec_store(master + i, w);
        if (out == PARAM_F32)
            vec_store(param + i, w);
        else if (out == PARAM_BF16)
            vec_store_bf16(param_bf16 + 2 * i, w);
    }
}

ALWAYS_INLINE void update_with(const struct zr_update *u, int64_t n, enum zero_optimizer kind,
                               enum update_variant variant)
{
    switch (update_param_of(u)) {
    case PARAM_NOT_WRITTEN:
        update_range(u, n, kind, variant, PARAM_NOT_WRITTEN);
        break;
    case PARAM_F32:
        update_range(u, n, kind, variant, PARAM_F32);
        break;
    case PARAM_BF16:
        update_range(u, n, kind, variant, PARAM_BF16);
        break;
    }
}

static void host_update(const struct zr_update *u)
{
    if (u->scalars->skip)
        return;
    int64_t n = u->n - u->n % VEC_LANES;
    switch (u->kind) {
#define KIND(NAME, number, name, source)                                                                     \
    case ZERO_##NAME:                                                                                        \
        if (NAME##_MOMENTUM_ONLY && !u->state[0])                                                            \
            update_with(u, n, ZERO_##NAME, UPDATE_STATELESS);                                                \
        else if (NAME##_FIRST_STEP && u->t == 1)                                                             \
            update_with(u, n, ZERO_##NAME, UPDATE_FIRST);                                                    \
        else                                                                                                 \
            update_with(u, n, ZERO_##NAME, UPDATE_USUAL);                                                    \
        break;
        ZERO_OPTIMIZER_MAP(KIND)
#undef KIND
    default:
        break;
    }
#if VEC_LANES > 1
    if (n < u->n) {
        struct zr_update tail = *u;
        tail.n = u->n - n;
        tail.master += n;
        tail.grad += n;
        if (tail.param)
            tail.param = (char *)tail.param + n * zr_dtype_bytes(u->param_dtype);
        for (int i = 0; i < ZR_OPTIMIZER_STATES; i++)
            if (tail.state[i])
                tail.state[i] += n;
        zr_host_portable.update(&tail);
    }
#endif
}
