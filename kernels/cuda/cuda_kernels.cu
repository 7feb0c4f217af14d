/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_kernels.cu: the element-wise kernels of a sharded optimizer on a GPU. cuda_norm.cu has the kernels
 * whose threads need each other.
 *
 * nvcc compiles this file, and in tests the host's compiler does so for the CPU (test/stand_in).
 * Multiplications and additions must not be contracted (-fmad=false), so that the bits are those of the host.
 * bf16 is two bytes, the upper half of a float. */
#include "kernels/cuda/cuda_kernels.h"

#include "kernels/host/vec_portable.h"
#include "kernels/raw_bits.h"

#include "kernels/host/update_element.h"

#include <cuda_runtime.h>

#include "kernels/cuda/cuda_elements.h"

namespace
{

template <class To, class From> struct cast_op {
    To *dst;
    const From *src;
    template <int W> __device__ __forceinline__ void run(int64_t i) const
    {
        floats<W> x;
        x.load(src + i);
        x.store(dst + i);
    }
};

template <class From> struct add_op {
    float *dst;
    const From *src;
    template <int W> __device__ __forceinline__ void run(int64_t i) const
    {
        floats<W> a, b;
        a.load(dst + i);
        b.load(src + i);
        for (int j = 0; j < W; j++)
            a.v[j] = vec_add(a.v[j], b.v[j]);
        a.store(dst + i);
    }
};

struct scale_op {
    float *x;
    const struct zr_step_scalars *scalars;
    template <int W> __device__ __forceinline__ void run(int64_t i) const
    {
        floats<W> a;
        a.load(x + i);
        const float factor = scalars->grad_scale;
        if (scalars->skip || factor == 1) /* factor 1 keeps the bits of a NaN, too */
            return;
        for (int j = 0; j < W; j++)
            a.v[j] = vec_mul(a.v[j], factor);
        a.store(x + i);
    }
};

/* Up to N sources, where N is a power of two. The tree over [at, at + n) splits at the largest power of two
 * below n. */
template <class From, int N> struct tree_sources {
    int n_src;
    const From *src[N];

    template <int W, int AT, int SIZE> __device__ __forceinline__ floats<W> sum(int64_t i, int n) const
    {
        if constexpr (SIZE == 1) {
            (void)n;
            floats<W> x;
            x.load(src[AT] + i);
            return x;
        } else {
            constexpr int HALF = SIZE / 2;
            floats<W> a = sum<W, AT, HALF>(i, n < HALF ? n : HALF);
            if (n > HALF) {
                floats<W> b = sum<W, AT + HALF, HALF>(i, n - HALF);
                for (int j = 0; j < W; j++)
                    a.v[j] = vec_add(a.v[j], b.v[j]);
            }
            return a;
        }
    }

    /* Writes or, with accumulate, adds W elements from i to dst. */
    template <int W> __device__ __forceinline__ void keep(float *dst, int64_t i, bool accumulate) const
    {
        floats<W> total = sum<W, 0, N>(i, n_src);
        if (accumulate) {
            floats<W> was;
            was.load(dst);
            for (int j = 0; j < W; j++)
                total.v[j] = vec_add(was.v[j], total.v[j]);
        }
        total.store(dst);
    }
};

template <class From, int N> struct tree_op {
    float *dst;
    bool accumulate;
    struct tree_sources<From, N> from;
    template <int W> __device__ __forceinline__ void run(int64_t i) const
    {
        from.template keep<W>(dst + i, i, accumulate);
    }
};

__device__ __forceinline__ float bits_as_float(uint32_t bits)
{
    return __uint_as_float(bits);
}

__device__ __forceinline__ float bits_as_float(uint16_t bits)
{
    return __uint_as_float((uint32_t)bits << 16);
}

/* Bits is the unsigned type of the element's size. */
template <class Bits> struct maximum_op {
    Bits *dst;
    int n_src;
    const Bits *src[ZR_MAX_SOURCES];
    template <int W> __device__ __forceinline__ void run(int64_t i) const
    {
        for (int64_t end = i + W; i < end; i++) {
            Bits greatest = src[0][i];
            for (int k = 1; k < n_src; k++) {
                const Bits x = src[k][i];
                if (zr_is_greater(bits_as_float(x), bits_as_float(greatest)))
                    greatest = x;
            }
            dst[i] = greatest;
        }
    }
};

template <class Bits>
cudaError_t maximum(cudaStream_t s, void *dst, const void *const *src, int n_src, int64_t n)
{
    struct maximum_op<Bits> op = {
        static_cast<Bits *>(dst), n_src,
        {
        }
    };
    for (int k = 0; k < n_src; k++)
        op.src[k] = static_cast<const Bits *>(src[k]);
    const struct operand any = {NULL, 1}; /* elements are read one by one, so alignment does not matter */
    return run_each(s, op, n, &any, 1);
}

/* An entry of a table of sums. A block of threads works on one entry. */
struct sum_range {
    struct zr_sum_range r;
    int32_t first_block;
    int32_t width; /* elements per access: WIDTH if all operands are aligned for it, else 1 */
};

template <class From, int N> struct sum_table {
    struct sum_range sum[ZR_MAX_SUMS];
    int n;
    struct tree_sources<From, N> from;
};

template <class From, int N>
__global__ void __launch_bounds__(THREADS) sum_ranges(const __grid_constant__ struct sum_table<From, N> t)
{
    int k = 0;
    while (k + 1 < t.n && (int)blockIdx.x >= t.sum[k + 1].first_block)
        k++;
    const struct zr_sum_range &r = t.sum[k].r;
    const int width = t.sum[k].width;
    int64_t i = (((int64_t)blockIdx.x - t.sum[k].first_block) * THREADS + threadIdx.x) * width;
    if (width == WIDTH && i + WIDTH <= r.n)
        t.from.template keep<WIDTH>(r.dst + i, r.at + i, r.accumulate);
    else
        for (int64_t end = i + width; i < end && i < r.n; i++)
            t.from.template keep<1>(r.dst + i, r.at + i, r.accumulate);
}

/* A span of an update with fp32 states. Blocks of threads are assigned as for sums. */
struct f32_span {
    int64_t first, n;
    float lr, decay;
};

struct update_span {
    struct f32_span at;
    int32_t first_block;
    int32_t width;
};

struct update_table {
    struct zr_update u;
    int n;
    struct update_span span[ZR_MAX_SPANS];
};
static_assert(sizeof(struct update_table) <= 4096, "all that a kernel takes as arguments");

/* Updates W elements from i. */
template <zero_optimizer KIND, update_variant VARIANT, update_param OUT, int W>
__device__ __forceinline__ void update_elements(const struct zr_update &u, float lr, float decay, int64_t i)
{
    const int n_read = update_n_read(KIND, VARIANT), n_written = update_n_written(KIND, VARIANT);
    floats<W> w, g, s0 = {}, s1 = {};
    w.load(u.master + i);
    g.load(static_cast<const float *>(u.grad) + i);
    if (n_read > 0)
        s0.load(static_cast<const float *>(u.state[0]) + i);
    if (n_read > 1)
        s1.load(static_cast<const float *>(u.state[1]) + i);
    if (u.scalars->skip) /* read last, so that all loads are under way at once */
        return;
    struct zr_update own = u;
    own.lr = lr;
    own.decay = decay;
    const struct update_constants k = update_constants_of(&own, u.scalars->grad_scale);
    for (int j = 0; j < W; j++)
        w.v[j] = update_element(&k, KIND, VARIANT, w.v[j], g.v[j], &s0.v[j], &s1.v[j]);
    if (n_written > 0)
        s0.store(static_cast<float *>(u.state[0]) + i);
    if (n_written > 1)
        s1.store(static_cast<float *>(u.state[1]) + i);
    w.store(u.master + i);
    if (OUT == PARAM_F32)
        w.store(static_cast<float *>(u.param) + i);
    else if (OUT == PARAM_BF16)
        w.store_weights(static_cast<uint16_t *>(u.param) + i);
}

template <zero_optimizer KIND, update_variant VARIANT, update_param OUT>
__global__ void __launch_bounds__(THREADS) update_spans(const __grid_constant__ struct update_table t)
{
    int k = 0;
    while (k + 1 < t.n && (int)blockIdx.x >= t.span[k + 1].first_block)
        k++;
    const struct f32_span &at = t.span[k].at;
    const int width = t.span[k].width;
    int64_t i = (((int64_t)blockIdx.x - t.span[k].first_block) * THREADS + threadIdx.x) * width;
    if (width == WIDTH && i + WIDTH <= at.n)
        update_elements<KIND, VARIANT, OUT, WIDTH>(t.u, at.lr, at.decay, at.first + i);
    else
        for (int64_t end = i + width; i < end && i < at.n; i++)
            update_elements<KIND, VARIANT, OUT, 1>(t.u, at.lr, at.decay, at.first + i);
}

/* Returns whether WIDTH elements from element first on are one access of every array. */
bool update_is_aligned(const struct zr_update *u, int n_written, enum update_param out, int64_t first)
{
    const int param_bytes = out == PARAM_BF16 ? 2 : 4;
    bool aligned = (uintptr_t)(u->master + first) % (WIDTH * 4) == 0 &&
                   (uintptr_t)(static_cast<const float *>(u->grad) + first) % (WIDTH * 4) == 0 &&
                   (out == PARAM_NOT_WRITTEN ||
                    ((uintptr_t)u->param + (uintptr_t)(first * param_bytes)) % (WIDTH * param_bytes) == 0);
    for (int i = 0; i < n_written; i++)
        aligned &= (uintptr_t)(static_cast<float *>(u->state[i]) + first) % (WIDTH * 4) == 0;
    return aligned;
}

/* --- updates with masters, states or a gradient in fewer bytes ---
 *
 * A thread decodes WIDTH elements, updates them, and encodes them. The threads of a block of 8-bit codes find
 * its largest element together. The precision is known at run time only: it is the same for all threads, and
 * memory takes longer than the branches. */

constexpr int CODED_SPANS = 32, Q8_THREADS = ZR_Q8_BLOCK / WIDTH;

struct coded_table {
    struct zr_update u;
    int n;
    int32_t first_block[CODED_SPANS];
    struct zr_update_span span[CODED_SPANS];
};
static_assert(sizeof(struct coded_table) <= 4096, "all that a kernel takes as arguments");

/* WIDTH elements that may be one access. */
template <class T> struct alignas(sizeof(T) * WIDTH) several {
    T v[WIDTH];
};

/* Loads the first n of WIDTH elements. The others are 0. */
template <class T> __device__ __forceinline__ struct several<T> load_some(const T *p, int n) {
    struct several<T> x = {
    };
    if (n == WIDTH && (uintptr_t)p % sizeof x == 0)
        x = *reinterpret_cast<const struct several<T> *>(p);
    else
        for (int j = 0; j < n; j++)
            x.v[j] = p[j];
    return x;
}

template <class T>
__device__ __forceinline__ void store_some(T *p, const struct several<T> &x, int n)
{
    if (n == WIDTH && (uintptr_t)p % sizeof x == 0)
        *reinterpret_cast<struct several<T> *>(p) = x;
    else
        for (int j = 0; j < n; j++)
            p[j] = x.v[j];
}

/* The elements of a thread: n from index at of the arrays. element has their numbers in the whole tensor.
 * They are computed in one place, so that a kernel has the code of their divisions once. rounding NULL:
 * states are rounded to nearest. */
struct coded {
    int64_t at;
    int n;
    const struct zr_rounding *rounding;
    int64_t element[WIDTH];
};

/* first: index of element 0 in the arrays. n: elements of all threads. */
__device__ __forceinline__ struct coded coded_of(int64_t first, int64_t i, int64_t n,
                                                 const struct zr_rounding *rounding)
{
    struct coded c = {first + i, i >= n ? 0 : n - i < WIDTH ? (int)(n - i) : WIDTH, rounding, {}};
    for (int j = 0; rounding && j < WIDTH; j++)
        c.element[j] = zr_rounding_element(rounding, i + j);
    return c;
}

__device__ __forceinline__ uint32_t noise_of(const struct coded &c, zr_noise_kind kind, int j)
{
    if (!c.rounding)
        return ZR_NOISE_NEAREST;
    return zr_noise_bits(zr_noise_of(c.rounding, kind, c.element[j]), (uint32_t)c.element[j]);
}

__device__ __forceinline__ void decode_bf16(struct several<float> &x, const void *from, const struct coded &c)
{
    const struct several<uint16_t> h = load_some(static_cast<const uint16_t *>(from) + c.at, c.n);
    for (int j = 0; j < WIDTH; j++)
        x.v[j] = zr_bf16_value(h.v[j]);
}

__device__ __forceinline__ void encode_bf16(void *to, const struct several<float> &x, const struct coded &c,
                                            zr_noise_kind kind)
{
    struct several<uint16_t> h = {
    };
    for (int j = 0; j < c.n; j++)
        h.v[j] = zr_round_random(x.v[j], noise_of(c, kind, j));
    store_some(static_cast<uint16_t *>(to) + c.at, h, c.n);
}

__device__ __forceinline__ void decode_q8(struct several<float> &x, const void *codes, const uint16_t *scales,
                                          const struct coded &c, bool squares)
{
    const struct several<uint8_t> code = load_some(static_cast<const uint8_t *>(codes) + c.at, c.n);
    const float scale = c.n > 0 ? zr_bf16_value(scales[c.at / ZR_Q8_BLOCK]) : 0;
    for (int j = 0; j < WIDTH; j++)
        x.v[j] = zr_q8_value(code.v[j], scale, squares);
}

/* Every thread of the warp must call this, even one whose n is 0. */
__device__ __forceinline__ void encode_q8(void *codes, uint16_t *scales, const struct several<float> &x,
                                          const struct coded &c, bool squares, zr_noise_kind kind)
{
    struct several<uint8_t> code = {
    };
    uint32_t largest = 0;
    for (int j = 0; j < c.n; j++) {
        const uint32_t size = zr_q8_size(x.v[j], squares);
        largest = size > largest ? size : largest;
    }
    for (int step = Q8_THREADS / 2; step > 0; step /= 2) {
        const uint32_t other = __shfl_xor_sync(0xffffffffu, largest, step);
        largest = other > largest ? other : largest;
    }
    const uint16_t scale = zr_q8_scale(largest);
    for (int j = 0; j < c.n; j++)
        code.v[j] = zr_q8_code(x.v[j], zr_bf16_value(scale), squares, noise_of(c, kind, j));
    store_some(static_cast<uint8_t *>(codes) + c.at, code, c.n);
    if (c.n > 0 && threadIdx.x % Q8_THREADS == 0)
        scales[c.at / ZR_Q8_BLOCK] = scale;
}

__device__ __forceinline__ void decode_master(struct several<float> &w, const void *weights,
                                              const uint16_t *remainders, const struct coded &c)
{
    const struct several<uint16_t> high = load_some(static_cast<const uint16_t *>(weights) + c.at, c.n);
    const struct several<uint16_t> low = load_some(remainders + c.at, c.n);
    for (int j = 0; j < WIDTH; j++)
        w.v[j] = zr_join_master(high.v[j], low.v[j]);
}

/* Encodes only the weights if remainders is NULL. */
__device__ __forceinline__ void encode_master(void *weights, uint16_t *remainders,
                                              const struct several<float> &w, const struct coded &c)
{
    struct several<uint16_t> high, low;
    for (int j = 0; j < WIDTH; j++) {
        high.v[j] = zr_round_away(w.v[j]);
        low.v[j] = zr_remainder_of(w.v[j]);
    }
    store_some(static_cast<uint16_t *>(weights) + c.at, high, c.n);
    if (remainders)
        store_some(remainders + c.at, low, c.n);
}

__device__ __forceinline__ void decode_state(struct several<float> &x, const struct zr_update &u,
                                             const struct coded &c, int state, bool squares)
{
    if (u.moments == ZERO_MOMENTS_F32)
        x = load_some(static_cast<const float *>(u.state[state]) + c.at, c.n);
    else if (u.moments == ZERO_MOMENTS_BF16)
        decode_bf16(x, u.state[state], c);
    else
        decode_q8(x, u.state[state], u.scale[state], c, squares);
}

__device__ __forceinline__ void encode_state(const struct several<float> &x, const struct zr_update &u,
                                             const struct coded &c, int state, bool squares)
{
    const zr_noise_kind kind = (zr_noise_kind)(ZR_NOISE_STATE_0 + state);
    if (u.moments == ZERO_MOMENTS_F32)
        store_some(static_cast<float *>(u.state[state]) + c.at, x, c.n);
    else if (u.moments == ZERO_MOMENTS_BF16)
        encode_bf16(u.state[state], x, c, kind);
    else
        encode_q8(u.state[state], u.scale[state], x, c, squares, kind);
}

__device__ __forceinline__ void decode_weights(struct several<float> &w, const struct zr_update &u,
                                               const struct coded &c)
{
    if (u.masters == ZERO_MASTERS_F32)
        w = load_some(static_cast<const float *>(u.master) + c.at, c.n);
    else if (u.masters == ZERO_MASTERS_NONE)
        decode_bf16(w, u.param, c);
    else
        decode_master(w, u.param, u.remainder, c);
}

__device__ __forceinline__ void encode_weights(const struct several<float> &w, const struct zr_update &u,
                                               const struct coded &c)
{
    const enum update_param out = update_param_of(&u);
    if (u.masters == ZERO_MASTERS_NONE) {
        encode_bf16(u.param, w, c, ZR_NOISE_WEIGHT);
        return;
    }
    if (u.masters == ZERO_MASTERS_F32)
        store_some(u.master + c.at, w, c.n);
    if (u.masters == ZERO_MASTERS_REMAINDER)
        encode_master(u.param, u.remainder, w, c);
    else if (out == PARAM_F32)
        store_some(static_cast<float *>(u.param) + c.at, w, c.n);
    else if (out == PARAM_BF16)
        encode_master(u.param, NULL, w, c);
}

template <zero_optimizer KIND, update_variant VARIANT>
__global__ void __launch_bounds__(THREADS) update_coded(const __grid_constant__ struct coded_table t)
{
    const int n_written = update_n_written(KIND, VARIANT), n_read = update_n_read(KIND, VARIANT);
    const int squares = update_squares(KIND);
    int k = 0;
    while (k + 1 < t.n && (int)blockIdx.x >= t.first_block[k + 1])
        k++;
    const struct zr_update_span &span = t.span[k];
    const int64_t first = (((int64_t)blockIdx.x - t.first_block[k]) * THREADS + threadIdx.x) * WIDTH;
    const struct coded c = coded_of(span.first, first, span.n, &span.rounding);
    if (t.u.scalars->skip)
        return;
    struct several<float> g, w = {}, s[ZR_OPTIMIZER_STATES] = {
    };
    if (t.u.grad_dtype == ZERO_F32)
        g = load_some(static_cast<const float *>(t.u.grad) + c.at, c.n);
    else
        decode_bf16(g, t.u.grad, c);
    decode_weights(w, t.u, c);
    for (int i = 0; i < n_read; i++)
        decode_state(s[i], t.u, c, i, i == squares);
    struct zr_update own = t.u;
    own.lr = span.lr;
    own.decay = span.decay;
    const struct update_constants constants = update_constants_of(&own, t.u.scalars->grad_scale);
    for (int j = 0; j < c.n; j++)
        w.v[j] = update_element(&constants, KIND, VARIANT, w.v[j], g.v[j], &s[0].v[j], &s[1].v[j]);
    for (int i = 0; i < n_written; i++)
        encode_state(s[i], t.u, c, i, i == squares);
    encode_weights(w, t.u, c);
}

template <zero_optimizer KIND, update_variant VARIANT>
cudaError_t update_coded_spans(cudaStream_t s, const struct zr_update *u, const struct zr_update_span *spans,
                               int n_spans)
{
    struct coded_table t = {};
    int64_t n_blocks = 0;
    t.u = *u;
    for (int i = 0; i < n_spans && i < CODED_SPANS; i++) {
        if (spans[i].n <= 0)
            continue;
        t.first_block[t.n] = (int32_t)n_blocks;
        t.span[t.n++] = spans[i];
        n_blocks += ceil_div(spans[i].n, THREADS * WIDTH);
        if (n_blocks > INT32_MAX)
            return cudaErrorInvalidValue;
    }
    cudaError_t err = n_blocks ? launch(update_coded<KIND, VARIANT>, n_blocks, s, t) : cudaSuccess;
    return err || n_spans <= CODED_SPANS
               ? err
               : update_coded_spans<KIND, VARIANT>(s, u, spans + CODED_SPANS, n_spans - CODED_SPANS);
}

template <zero_optimizer KIND, update_variant VARIANT>
cudaError_t update_with(cudaStream_t s, const struct zr_update *u, const struct zr_update_span *spans,
                        int n_spans)
{
    if (!update_is_f32(u))
        return update_coded_spans<KIND, VARIANT>(s, u, spans, n_spans);
    const enum update_param out = update_param_of(u);
    struct update_table t = {};
    int64_t n_blocks = 0;
    t.u = *u;
    for (int i = 0; i < n_spans; i++) {
        if (spans[i].n <= 0)
            continue;
        const int width =
            update_is_aligned(u, update_n_written(KIND, VARIANT), out, spans[i].first) ? WIDTH : 1;
        t.span[t.n++] = {{spans[i].first, spans[i].n, spans[i].lr, spans[i].decay}, (int32_t)n_blocks, width};
        n_blocks += ceil_div(spans[i].n, THREADS * width);
        if (n_blocks > INT32_MAX)
            return cudaErrorInvalidValue;
    }
    if (n_blocks == 0)
        return cudaSuccess;
    switch (out) {
    case PARAM_F32:
        return launch(update_spans<KIND, VARIANT, PARAM_F32>, n_blocks, s, t);
    case PARAM_BF16:
        return launch(update_spans<KIND, VARIANT, PARAM_BF16>, n_blocks, s, t);
    default:
        return launch(update_spans<KIND, VARIANT, PARAM_NOT_WRITTEN>, n_blocks, s, t);
    }
}

/* Compiles only the variants that the kind has. */
template <zero_optimizer KIND, bool MOMENTUM_ONLY, bool FIRST_STEP>
cudaError_t update_kind(cudaStream_t s, const struct zr_update *u, const struct zr_update_span *spans,
                        int n_spans)
{
    if constexpr (MOMENTUM_ONLY) {
        if (!u->state[0])
            return update_with<KIND, UPDATE_STATELESS>(s, u, spans, n_spans);
    }
    if constexpr (FIRST_STEP) {
        if (u->t == 1)
            return update_with<KIND, UPDATE_FIRST>(s, u, spans, n_spans);
    }
    return update_with<KIND, UPDATE_USUAL>(s, u, spans, n_spans);
}

/* --- elements in fewer bytes, without an update --- */

__global__ void __launch_bounds__(THREADS) encode(struct zr_coded to, const float *src, int64_t n)
{
    const struct coded c = coded_of(0, thread_index() * WIDTH, n, NULL);
    const struct several<float> x = load_some(src + c.at, c.n);
    if (to.coding == ZR_CODING_WEIGHT)
        encode_master(to.at, NULL, x, c);
    else if (to.coding == ZR_CODING_REMAINDER)
        encode_master(to.at, to.beside, x, c);
    else
        encode_q8(to.at, to.beside, x, c, to.coding == ZR_CODING_Q8_SQUARES, ZR_NOISE_STATE_0);
}

__global__ void __launch_bounds__(THREADS) decode(float *dst, struct zr_coded from, int64_t n)
{
    const struct coded c = coded_of(0, thread_index() * WIDTH, n, NULL);
    struct several<float> x;
    if (from.coding == ZR_CODING_WEIGHT)
        decode_bf16(x, from.at, c);
    else if (from.coding == ZR_CODING_REMAINDER)
        decode_master(x, from.at, from.beside, c);
    else
        decode_q8(x, from.at, from.beside, c, from.coding == ZR_CODING_Q8_SQUARES);
    store_some(dst + c.at, x, c.n);
}

__global__ void __launch_bounds__(THREADS)
    add_rounded(uint16_t *dst, const float *src, int64_t n, struct zr_rounding rounding)
{
    const struct coded c = coded_of(0, thread_index() * WIDTH, n, &rounding);
    const struct several<float> add = load_some(src + c.at, c.n);
    struct several<float> sum;
    decode_bf16(sum, dst, c);
    for (int j = 0; j < WIDTH; j++)
        sum.v[j] = vec_add(sum.v[j], add.v[j]);
    encode_bf16(dst, sum, c, ZR_NOISE_SUM);
}

/* --- narrowing in place ---
 *
 * Element i goes where element i / 2 was. One block handles the first IN_PLACE_BLOCK elements, and reads each
 * piece before it writes it. After them, elements [m, 2m) go where elements [m / 2, m) were, which are done.
 * So one launch for each doubling is enough, because launches on a stream run in order. */

constexpr int64_t IN_PLACE_BLOCK = 8192;

__global__ void __launch_bounds__(THREADS) narrow_first(uint16_t *dst, const float *src, int n)
{
    for (int base = 0; base < n; base += THREADS) {
        int i = base + (int)threadIdx.x;
        float x = i < n ? vec_load_f32_bytes(src + i) : 0;
        __syncthreads();
        if (i < n)
            vec_store_bf16(dst + i, x);
        __syncthreads();
    }
}

cudaError_t narrow(cudaStream_t s, uint16_t *dst, const float *src, int64_t n)
{
    const struct operand both[] = {{dst, 2}, {src, 4}};
    return run_each(s, cast_op<uint16_t, float>{dst, src}, n, both, 2);
}

/* --- small values --- */

struct words {
    uint64_t v[ZR_PUT_BYTES / 8];
};

__global__ void __launch_bounds__(THREADS) put_words(uint64_t *dst, struct words value, int n)
{
    if ((int)threadIdx.x < n)
        dst[threadIdx.x] = value.v[threadIdx.x];
}

__device__ __forceinline__ int64_t device_clock()
{
#ifdef __CUDACC__
    int64_t t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
    return t;
#else
    return zr_now_ns();
#endif
}

__global__ void __launch_bounds__(THREADS) stamp(int64_t *out_ns, int64_t offset_ns)
{
    if (threadIdx.x == 0)
        *out_ns = device_clock() + offset_ns;
}

template <class From, int N> struct tree_sources<From, N> sources_of(const void *const *src, int n_src) {
    struct tree_sources<From, N> from = {
    };
    from.n_src = n_src;
    for (int k = 0; k < n_src; k++)
        from.src[k] = static_cast<const From *>(src[k]);
    return from;
}

template <class From, int N>
cudaError_t tree_of(cudaStream_t s, float *dst, const void *const *src, int n_src, int64_t n, bool accumulate)
{
    struct operand all[N + 1] = {{dst, sizeof(float)}};
    for (int k = 0; k < n_src; k++)
        all[k + 1] = operand{src[k], sizeof(From)};
    return run_each(s, tree_op<From, N>{dst, accumulate, sources_of<From, N>(src, n_src)}, n, all, n_src + 1);
}

template <class From>
cudaError_t tree(cudaStream_t s, float *dst, const void *const *src, int n_src, int64_t n, bool accumulate)
{
    if (n_src <= 2)
        return tree_of<From, 2>(s, dst, src, n_src, n, accumulate);
    if (n_src <= 4)
        return tree_of<From, 4>(s, dst, src, n_src, n, accumulate);
    if (n_src <= 8)
        return tree_of<From, 8>(s, dst, src, n_src, n, accumulate);
    return tree_of<From, ZR_MAX_SOURCES>(s, dst, src, n_src, n, accumulate);
}

template <class From, int N>
cudaError_t ranges_of(cudaStream_t s, const struct zr_sum_range *table, int n_sums, const void *const *src,
                      int n_src)
{
    static_assert(sizeof(struct sum_table<From, N>) <= 4096, "all that a kernel takes as arguments");
    struct sum_table<From, N> t = {
    };
    int64_t n_blocks = 0;
    t.from = sources_of<From, N>(src, n_src);
    for (int i = 0; i < n_sums; i++) {
        const struct zr_sum_range &r = table[i];
        if (r.n <= 0)
            continue;
        bool aligned = (uintptr_t)r.dst % (WIDTH * sizeof(float)) == 0;
        for (int k = 0; k < n_src; k++)
            aligned &= (uintptr_t)(t.from.src[k] + r.at) % (WIDTH * sizeof(From)) == 0;
        const int width = aligned ? WIDTH : 1;
        t.sum[t.n++] = {r, (int32_t)n_blocks, width};
        n_blocks += ceil_div(r.n, THREADS * width);
        if (n_blocks > INT32_MAX)
            return cudaErrorInvalidValue;
    }
    return n_blocks ? launch(sum_ranges<From, N>, n_blocks, s, t) : cudaSuccess;
}

template <class From>
cudaError_t ranges(cudaStream_t s, const struct zr_sum_range *table, int n_sums, const void *const *src,
                   int n_src)
{
    if (n_src <= 2)
        return ranges_of<From, 2>(s, table, n_sums, src, n_src);
    if (n_src <= 8)
        return ranges_of<From, 8>(s, table, n_sums, src, n_src);
    return ranges_of<From, ZR_MAX_SOURCES>(s, table, n_sums, src, n_src);
}

} // namespace

/* --- C functions --- */

cudaError_t zr_cuda_put(cudaStream_t s, void *dst, const void *src, int64_t bytes)
{
    struct words value = {};
    if (bytes <= 0)
        return cudaSuccess;
    memcpy(&value, src, (size_t)bytes);
    return launch(put_words, 1, s, static_cast<uint64_t *>(dst), value, (int)(bytes / 8));
}

cudaError_t zr_cuda_stamp(cudaStream_t s, int64_t *out_ns, int64_t offset_ns)
{
    return launch(stamp, 1, s, out_ns, offset_ns);
}

cudaError_t zr_cuda_cast(cudaStream_t s, void *dst, enum zero_dtype dt, const void *src, int64_t n)
{
    if (dt == ZERO_F32) {
        const struct operand both[] = {{dst, 4}, {src, 2}};
        return run_each(
            s, cast_op<float, uint16_t>{static_cast<float *>(dst), static_cast<const uint16_t *>(src)}, n,
            both, 2);
    }
    uint16_t *half = static_cast<uint16_t *>(dst);
    const float *from = static_cast<const float *>(src);
    if (dst != src || n <= 0)
        return narrow(s, half, from, n);
    int64_t done = n < IN_PLACE_BLOCK ? n : IN_PLACE_BLOCK;
    cudaError_t err = launch(narrow_first, 1, s, half, from, (int)done);
    for (; !err && done < n; done *= 2)
        err = narrow(s, half + done, from + done, done < n - done ? done : n - done);
    return err;
}

cudaError_t zr_cuda_add(cudaStream_t s, float *dst, const void *src, enum zero_dtype st, int64_t n)
{
    const struct operand both[] = {{dst, 4}, {src, (int)zr_dtype_bytes(st)}};
    return st == ZERO_F32
               ? run_each(s, add_op<float>{dst, static_cast<const float *>(src)}, n, both, 2)
               : run_each(s, add_op<uint16_t>{dst, static_cast<const uint16_t *>(src)}, n, both, 2);
}

cudaError_t zr_cuda_sum_tree(cudaStream_t s, float *dst, const void *const *src, int n_src,
                             enum zero_dtype st, int64_t n, bool accumulate)
{
    return st == ZERO_F32 ? tree<float>(s, dst, src, n_src, n, accumulate)
                          : tree<uint16_t>(s, dst, src, n_src, n, accumulate);
}

cudaError_t zr_cuda_sum_ranges(cudaStream_t s, const struct zr_sum_range *table, int n_sums,
                               const void *const *src, int n_src, enum zero_dtype st)
{
    return st == ZERO_F32 ? ranges<float>(s, table, n_sums, src, n_src)
                          : ranges<uint16_t>(s, table, n_sums, src, n_src);
}

cudaError_t zr_cuda_maximum(cudaStream_t s, void *dst, const void *const *src, int n_src,
                            enum zero_dtype dtype, int64_t n)
{
    return dtype == ZERO_F32 ? maximum<uint32_t>(s, dst, src, n_src, n)
                             : maximum<uint16_t>(s, dst, src, n_src, n);
}

cudaError_t zr_cuda_scale(cudaStream_t s, float *x, int64_t n, const struct zr_step_scalars *scalars)
{
    const struct operand one[] = {{x, 4}};
    return run_each(s, scale_op{x, scalars}, n, one, 1);
}

cudaError_t zr_cuda_add_rounded(cudaStream_t s, uint16_t *dst, const float *src, int64_t n,
                                const struct zr_rounding *rounding)
{
    return n <= 0 ? cudaSuccess
                  : launch(add_rounded, ceil_div(n, THREADS * WIDTH), s, dst, src, n, *rounding);
}

cudaError_t zr_cuda_encode(cudaStream_t s, const struct zr_coded *to, const float *src, int64_t n)
{
    return n <= 0 ? cudaSuccess : launch(encode, ceil_div(n, THREADS * WIDTH), s, *to, src, n);
}

cudaError_t zr_cuda_decode(cudaStream_t s, float *dst, const struct zr_coded *from, int64_t n)
{
    return n <= 0 ? cudaSuccess : launch(decode, ceil_div(n, THREADS * WIDTH), s, dst, *from, n);
}

cudaError_t zr_cuda_update_spans(cudaStream_t s, const struct zr_update *u,
                                 const struct zr_update_span *spans, int n_spans)
{
    switch (u->kind) {
#define KIND(NAME, number, name, source)                                                                     \
    case ZERO_##NAME:                                                                                        \
        return update_kind<ZERO_##NAME, NAME##_MOMENTUM_ONLY, NAME##_FIRST_STEP>(s, u, spans, n_spans);
        ZERO_OPTIMIZER_MAP(KIND)
#undef KIND
    default:
        return cudaErrorInvalidValue;
    }
}
