/* SPDX-License-Identifier: Apache-2.0 */
/* body_update.h: the optimizers' element-wise update, written once with the vector functions of a vec_*.h.
 *
 * host_portable.c, host_avx2.c and host_avx512.c include it after their vec_*.h. update_range is inlined for
 * each constant kind, variant and type of the parameter, so its loop has no branches. */
#include "kernels/host/update_element.h"
#include "kernels/op_check.h"

/* Prefetch distance in elements (1 KiB): about what is read during one memory latency. The CPU's own
 * prefetchers stop at the end of a page. */
enum { UPDATE_AHEAD = 256 };

ALWAYS_INLINE void update_prefetch(const struct zr_update *u, int64_t i, int n_read)
{
    if (VEC_LANES == 1)
        return; /* one prefetch per element would cost more than it saves */
    __builtin_prefetch((const float *)u->grad + i + UPDATE_AHEAD, 0);
    __builtin_prefetch(u->master + i + UPDATE_AHEAD, 1);
    for (int s = 0; s < n_read; s++)
        __builtin_prefetch((float *)u->state[s] + i + UPDATE_AHEAD, 1);
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
            vec_store_weight(param_bf16 + 2 * i, w);
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

/* Updates with everything in fp32. */
static __attribute__((noinline)) void update_f32(const struct zr_update *u)
{
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
        zr_update_advance(&tail, n);
        zr_host_portable.update(&tail);
    }
#endif
}

/* --- masters, states or a gradient in fewer bytes ---
 *
 * A piece of each array is decoded to floats on the stack, updated there, and encoded again, so that memory
 * is passed once and every optimizer has every precision. The pieces stay in the first-level cache. */

/* A multiple of ZR_Q8_BLOCK. */
enum { UPDATE_PIECE = 256 };

/* What is decoded and encoded: n elements from element at on, which are adjacent in the tensor. */
struct update_piece {
    const struct zr_update *u;
    int64_t at, n;
};

static void decode_state(float *x, const struct update_piece *p, int state)
{
    const struct zr_update *u = p->u;
    if (u->moments == ZERO_MOMENTS_BF16)
        decode_bf16(x, (const uint16_t *)u->state[state] + p->at, p->n);
    else
        decode_q8(x, (const uint8_t *)u->state[state] + p->at, u->scale[state] + p->at / ZR_Q8_BLOCK, p->n,
                  update_squares(u->kind) == state);
}

static void encode_state(const float *x, const struct update_piece *p, int state)
{
    const struct zr_update *u = p->u;
    const enum zr_noise_kind kind = (enum zr_noise_kind)(ZR_NOISE_STATE_0 + state);
    if (u->moments == ZERO_MOMENTS_BF16) {
        encode_bf16((uint16_t *)u->state[state] + p->at, x, p->n, &u->rounding, kind, p->at);
        return;
    }
    uint32_t first;
    const struct zr_noise noise = noise_from(&u->rounding, kind, p->at, &first);
    encode_q8((uint8_t *)u->state[state] + p->at, u->scale[state] + p->at / ZR_Q8_BLOCK, x, p->n,
              update_squares(u->kind) == state, &noise, first);
}

static void decode_piece_weights(float *w, const struct update_piece *p)
{
    const uint16_t *weight = (const uint16_t *)p->u->param + p->at;
    if (p->u->masters == ZERO_MASTERS_NONE)
        decode_bf16(w, weight, p->n);
    else
        decode_masters(w, weight, p->u->remainder + p->at, p->n);
}

static void encode_piece_weights(const float *w, const struct update_piece *p)
{
    uint16_t *weight = (uint16_t *)p->u->param + p->at;
    if (p->u->masters == ZERO_MASTERS_NONE)
        encode_bf16(weight, w, p->n, &p->u->rounding, ZR_NOISE_WEIGHT, p->at);
    else
        encode_masters(weight, p->u->remainder + p->at, w, p->n);
}

static void update_piece(const struct update_piece *p)
{
    float w[UPDATE_PIECE], grad[UPDATE_PIECE], state[ZR_OPTIMIZER_STATES][UPDATE_PIECE];
    const bool coded_weights = p->u->masters != ZERO_MASTERS_F32, coded = p->u->moments != ZERO_MOMENTS_F32;
    struct zr_update u = *p->u;
    zr_update_advance(&u, p->at);
    u.n = p->n;
    if (u.grad_dtype == ZERO_BF16) {
        decode_bf16(grad, u.grad, p->n);
        u.grad = grad;
        u.grad_dtype = ZERO_F32;
    }
    if (coded_weights) {
        decode_piece_weights(w, p);
        u.master = w;
        u.param = NULL;
    }
    for (int i = 0; coded && i < ZR_OPTIMIZER_STATES; i++)
        if (p->u->state[i]) {
            decode_state(state[i], p, i);
            u.state[i] = state[i];
        }
    u.masters = ZERO_MASTERS_F32;
    u.moments = ZERO_MOMENTS_F32;
    update_f32(&u);
    if (coded_weights)
        encode_piece_weights(w, p);
    for (int i = 0; coded && i < ZR_OPTIMIZER_STATES; i++)
        if (p->u->state[i])
            encode_state(state[i], p, i);
}

static void host_update(const struct zr_update *u)
{
    if (u->scalars->skip)
        return;
    if (update_is_f32(u)) {
        update_f32(u);
        return;
    }
    for (struct update_piece p = {.u = u}; p.at < u->n; p.at += p.n) {
        const int64_t adjacent = zr_rounding_adjacent(&u->rounding, p.at);
        p.n = u->n - p.at < UPDATE_PIECE ? u->n - p.at : UPDATE_PIECE;
        p.n = adjacent < p.n ? adjacent : p.n;
        update_piece(&p);
    }
}
