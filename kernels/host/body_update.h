/* SPDX-License-Identifier: Apache-2.0 */
/* body_update.h: the optimizers' element-wise update, written once with the vector functions of a vec_*.h.
 *
 * host_portable.c, host_avx2.c and host_avx512.c include it after their vec_*.h. Each function is
 * instantiated for a kind of optimizer and a type of the written parameter, so the loops have no branches. */
#include "kernels/host/update_element.h"

/* Elements by which each array is prefetched: 1 KiB ahead, about what arrives in the time that memory takes
 * to answer. The CPU's own prefetchers stop at the end of a page. */
enum { UPDATE_AHEAD = 256 };

ALWAYS_INLINE void update_ask_ahead(const struct zr_update *u, int64_t i, int n_read, int n_states)
{
    if (VEC_LANES == 1)
        return; /* one prefetch per element would cost more than it saves */
    __builtin_prefetch(u->grad + i + UPDATE_AHEAD, 0);
    __builtin_prefetch(u->master + i + UPDATE_AHEAD, 1);
    for (int s = 0; s < n_states; s++)
        if (s < n_read)
            __builtin_prefetch(u->state[s] + i + UPDATE_AHEAD, 1);
}

/* Updates elements [0, n). n is a multiple of VEC_LANES. */
ALWAYS_INLINE void update_range(const struct zr_update *u, int64_t n, enum zero_optimizer kind,
                                enum update_variant variant, enum update_param out)
{
    const struct update_numbers k = update_numbers_of(u, u->scalars->grad_scale);
    const int n_read = update_states_read(kind, variant), n_states = update_states(kind, variant);
    float *master = u->master, *param = u->param;
    unsigned char *half = u->param;
    const float *grad = u->grad;
    float *state0 = u->state[0], *state1 = u->state[1];

    for (int64_t i = 0; i < n; i += VEC_LANES) {
        update_ask_ahead(u, i, n_read, n_states);
        vec s0 = k.scale, s1 = k.scale; /* any value, read only if there is a state */
        if (n_read > 0)
            s0 = vec_load(state0 + i);
        if (n_read > 1)
            s1 = vec_load(state1 + i);
        vec w = update_element(&k, kind, variant, vec_load(master + i), vec_load(grad + i), &s0, &s1);
        if (n_states > 0)
            vec_store(state0 + i, s0);
        if (n_states > 1)
            vec_store(state1 + i, s1);
        vec_store(master + i, w);
        if (out == PARAM_F32)
            vec_store(param + i, w);
        else if (out == PARAM_BF16)
            vec_store_bf16(half + 2 * i, w);
    }
}

ALWAYS_INLINE void update_with(const struct zr_update *u, int64_t n, enum zero_optimizer kind,
                               enum update_variant variant)
{
    switch (update_param_of(u)) {
    case PARAM_NONE:
        update_range(u, n, kind, variant, PARAM_NONE);
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
